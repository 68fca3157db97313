"""Benchmarks: `./dev bench SUITE [options]`. One file a suite; figures are medians with ratios to a peer."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import overhead
import torch

SUITES = {"overhead": overhead}


def machine() -> dict[str, object]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    parser.add_argument("suite", choices=SUITES, nargs="?", default="overhead")
    parser.add_argument("--reps", type=int, default=200, help="counted runs of each engine, interleaved")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    rows = SUITES[arguments.suite].run(arguments.reps, peers=not arguments.no_peers)
    about = machine()
    print(f"{about['cpu']}, {about['threads']} thread(s), torch {about['torch']}, {arguments.reps} runs\n")
    print(overhead.table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
