"""Check what the engine computes on a checkpoint.

Runs the identities that hold of every checkpoint and, where transformers is installed, compares
every named value and every module's inputs and output with those of transformers, on prompts of
random tokens and pixels. Loads the model in float32 and runs at one thread on the CPU; the model
is loaded twice, one after the other. The exit code is 1 if anything is not as it should be.

Examples:
  vlscope verify demo
  vlscope verify path/to/checkpoint --attention eager
  vlscope verify path/to/checkpoint --without-parity
"""

from __future__ import annotations

import argparse

from . import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    common.add_attention(parser)
    common.add_weights(parser)
    parser.add_argument("--without-parity", action="store_true", help="check the identities only")


def run(arguments: argparse.Namespace) -> int:
    from .. import verify

    report = verify.run(
        arguments.model,
        attention=arguments.attention,
        weights=arguments.weights,
        parity=not arguments.without_parity,
        progress=True,
    )
    print(report)
    return 0 if report.ok else 1
