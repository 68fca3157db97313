"""The command line: `vlscope demo`, `vlscope values MODEL`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def _demo(arguments: argparse.Namespace) -> None:
    from . import demo

    demo.run(arguments.out)


def _values(arguments: argparse.Namespace) -> None:
    from .model import load

    print(load(arguments.model, dispatch=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vlscope", description="Trace Qwen vision-language models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="ablate and patch the image pathway of the built-in model",
        description="Asks the built-in model for a color, takes its two image pathways away, patches "
        "each block from another image's run, and draws demo.png.",
    )
    demo.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where demo.png goes")
    demo.set_defaults(run=_demo)

    values = commands.add_parser(
        "values",
        help="print the modules and values of a model",
        description="Prints the module tree of a checkpoint with every value that it serves: name, "
        "layout, axes and meaning. Reads config.json only.",
    )
    values.add_argument("model", metavar="MODEL", help='a checkpoint folder, a hub id, or "demo"')
    values.set_defaults(run=_values)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Errors of the user's are one line on stderr and exit code 2."""
    from .errors import VlscopeError

    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (VlscopeError, OSError) as error:
        print(f"vlscope: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
