"""Benchmarks: `./dev bench [SUITE ...] [options]`; every suite when none is named.

Figures are medians. The last table sets every figure that has a target beside it, and says why a
target is missed. `--write` puts the figures into docs/performance.md and benchmarks/results.json. With
`--from FILE` only the suites that are named are measured, and the others' figures are those of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import forward
import generation
import loading
import memory
import overhead
import report
import streaming
import torch
import traces
from checkpoints import CACHE, SHAPES
from measure import Sizes

#: One module a suite, with `run(sizes) -> list[Row]`, and `text(rows)` where its table is a special one.
SUITES: dict[str, ModuleType] = {
    "overhead": overhead,
    "traces": traces,
    "forward": forward,
    "generation": generation,
    "loading": loading,
    "memory": memory,
    "streaming": streaming,
}
#: The figures of the last run.
LAST = CACHE / "last.json"


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(named, platform.processor()),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"some of {', '.join(SUITES)}")
    parser.add_argument("--reps", type=int, default=200, help="counted runs of what takes microseconds")
    parser.add_argument("--long-reps", type=int, default=5, help="counted runs of what takes seconds")
    parser.add_argument("--quick", action="store_true", help="few runs, and of the models the tiny one")
    parser.add_argument("--full", action="store_true", help="the whole 2B shape in place of the cut one")
    parser.add_argument("--shape", choices=SHAPES, help="another shape in place of the cut one, e.g. 8b-bf16")
    parser.add_argument("--threads", type=int, choices=(1, 2), help="by default 1 for the tiny model, else all cores")
    parser.add_argument("--no-peers", action="store_true", help="leave the other engines out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--write", action="store_true", help="write the figures into the page and results.json")
    parser.add_argument(
        "--from", type=Path, metavar="FILE", dest="stored", help="take the suites not named from this file"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    if min(arguments.reps, arguments.long_reps) < 2:
        parser.error("--reps and --long-reps must be at least 2: one run has no spread")
    return arguments


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    peers, threads = not arguments.no_peers, arguments.threads
    if arguments.quick:
        return Sizes(min(arguments.reps, 20), 2, peers, threads, ("tiny",))
    shape = arguments.shape or ("2b" if arguments.full else "cut2b")
    return Sizes(arguments.reps, arguments.long_reps, peers, threads, ("tiny", shape))


def told(arguments: argparse.Namespace) -> list[str]:
    """What of the command the figures depend on."""
    flags = [f"--{name.replace('_', '-')}" for name in ("quick", "full", "no_peers") if getattr(arguments, name)]
    counts = [f"--reps {arguments.reps}", f"--long-reps {arguments.long_reps}"]
    shape = [f"--shape {arguments.shape}"] if arguments.shape else []
    return [
        *arguments.suites,
        *counts,
        *flags,
        *shape,
        *([f"--threads {arguments.threads}"] if arguments.threads else []),
    ]


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures as they are stored: those of the suites asked for, beside kept ones of the others.

    They are kept after each suite, so that a run of an hour is not lost to its last minute.
    """
    results: dict[str, Any] = {"suites": {}, "seconds": {}}
    wanted = arguments.suites or list(SUITES)
    if arguments.stored:
        results, wanted = json.loads(arguments.stored.read_text()), arguments.suites
    for name in wanted:
        results |= {"machine": machine(), "arguments": told(arguments)}
        start = time.perf_counter()
        results["suites"][name] = [row.as_dict() for row in SUITES[name].run(sizes_of(arguments))]
        results["seconds"][name] = round(time.perf_counter() - start)
        print(f"{name}: {results['seconds'][name]} s", file=sys.stderr, flush=True)
        LAST.parent.mkdir(exist_ok=True)
        LAST.write_text(json.dumps(results, indent=1))
    return results


def main() -> int:
    arguments = parse()
    results = figures(arguments)
    blocks = report.blocks(results, SUITES)
    print("\n\n".join(blocks.values()))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.write:
        report.write(results, blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
