"""Benchmarks: `./dev bench SUITE [options]`. Figures are medians, beside a target and a peer's in the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import generation
import overhead
import torch
from measure import table

#: One module a suite, with `run(reps, peers) -> list[Row]`.
SUITES = {"overhead": overhead, "generation": generation}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(named, platform.processor()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    parser.add_argument("suite", choices=SUITES, nargs="?", default="overhead")
    parser.add_argument("--reps", type=int, default=200, help="counted runs of each engine, interleaved")
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1)
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args()
    if arguments.reps < 2:
        parser.error("--reps must be at least 2: one run has no spread")
    return arguments


def main() -> int:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    about = machine()
    rows = SUITES[arguments.suite].run(arguments.reps, peers=not arguments.no_peers)
    print(
        f"{about['cpu']}, {about['cores']} cores, load {about['load']:.2f} at the start; "
        f"torch {about['torch']}, {about['threads']} thread(s), {arguments.reps} runs\n"
    )
    print(table(rows))
    if arguments.json:
        figures = {"machine": about, "reps": arguments.reps, "rows": [row.as_dict() for row in rows]}
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
