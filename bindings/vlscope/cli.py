"""The command line, `vlscope COMMAND ...`: finds the command, runs it, and says what went wrong."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

#: Modules of `vlscope.commands`, in the order of the help.
COMMANDS = ("demo", "values", "run", "patch", "ablate", "shape", "collect", "verify")

USER_ERROR = 2
BROKEN_PIPE = 141  # as of a program that SIGPIPE ended
INTERRUPTED = 130  # as of one that Ctrl-C ended


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, module: ModuleType) -> None:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vlscope",
        description="Trace Qwen vision-language models.",
        epilog="`vlscope COMMAND --help` explains a command and shows how it is called.\n"
        "exit codes: 0 done, 1 a check failed, 2 a mistake in what was asked for, 130 Ctrl-C",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        _add(commands, name, importlib.import_module(f".commands.{name}", __package__))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors of the user's are one line on stderr and code 2."""
    from .errors import VlscopeError

    arguments = _parser().parse_args(argv)
    try:
        code: int | None = arguments.run(arguments)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # the reader has what it wants, as in `vlscope values demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (VlscopeError, OSError) as error:
        print(f"vlscope: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
