"""Ablate and patch the image pathway of the built-in model.

Asks the built-in model for a color, takes its two image pathways away, patches each block from
another image's run, and draws demo.png.

Examples:
  vlscope demo
  vlscope demo --out pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where demo.png goes")


def run(arguments: argparse.Namespace) -> None:
    from .. import demo

    demo.run(arguments.out)
