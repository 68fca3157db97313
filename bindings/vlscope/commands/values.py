"""Print the modules and values of a model.

Prints the module tree of a checkpoint with every value that it serves: name, layout, axes and
meaning. Reads config.json only.

Examples:
  vlscope values demo
  vlscope values Qwen/Qwen3-VL-4B-Instruct
"""

from __future__ import annotations

import argparse

from . import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)


def run(arguments: argparse.Namespace) -> None:
    from ..model import load

    print(load(arguments.model, dispatch=False))
