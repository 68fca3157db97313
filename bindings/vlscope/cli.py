"""The command line: `vlscope demo`, `vlscope values MODEL`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


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
    _add(commands, "collect", importlib.import_module(".commands.collect", __package__))
    return parser


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, module: ModuleType) -> None:
    """A command that is a module of its own; see `vlscope.commands`."""
    text, _, examples = (module.__doc__ or "").partition("\nExamples:\n")
    summary, _, rest = text.partition("\n")
    parser = commands.add_parser(
        name,
        help=summary.rstrip("."),
        description=f"{summary}\n{rest}".strip(),
        epilog=f"examples:\n{examples.rstrip()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


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
