"""What every suite shares: interleaved timing, medians with their spread, and the printed table."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Work:
    """Something to time. `around` is entered before each run and left after it, off the clock."""

    run: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = field(default=contextlib.nullcontext)

    def time(self) -> float:
        """Microseconds of one run."""
        with self.around():
            start = time.perf_counter()
            self.run()
            return (time.perf_counter() - start) * 1e6


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keeps Python's cycle collector out of what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interleaved(works: dict[str, Work], reps: int) -> Times:
    """Times of each work, `reps` of them after a tenth more to warm up.

    Every repetition runs each work once, in an order drawn anew (from a fixed seed): what a run
    finds in the caches depends on which ran before it, and none shall always follow the same one.
    """
    order = list(works)
    shuffle = random.Random(0).shuffle
    warm_up = max(reps // 10, 1)
    times: Times = {name: [] for name in works}
    with no_collection():
        for rep in range(-warm_up, reps):
            shuffle(order)
            for name in order:
                us = works[name].time()
                if rep >= 0:
                    times[name].append(us)
    return times


def again(run: Callable[[], Any], count: int) -> list[float]:
    """Times of one work again and again, with nothing in between to push it out of the caches."""
    work = Work(run)
    with no_collection():
        work.time()
        return [work.time() for _ in range(count)]


def slopes(more: Sequence[float], fewer: Sequence[float], count: int) -> list[float]:
    """Cost of one of `count` additions: in each repetition, the difference of its two runs."""
    return [(a - b) / count for a, b in zip(more, fewer, strict=True)]


@dataclass(frozen=True)
class Row:
    """One figure: median and quartiles in microseconds, beside its target and its peer's median.

    `margin` is how far off the median itself may be (95 %; from the quartiles and the number of runs).
    """

    what: str
    us: float
    low: float
    high: float
    margin: float
    target: float | None = None
    peer: float | None = None

    @property
    def verdict(self) -> str:
        """`met` or `MISSED`; `unclear` if the target lies within the margin; empty without a target."""
        if self.target is None:
            return ""
        if abs(self.us - self.target) <= self.margin:
            return "unclear"
        return "met" if self.us < self.target else "MISSED"

    @property
    def ratio(self) -> float | None:
        return self.us / self.peer if self.peer is not None and self.peer > 0 else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict, "ratio": self.ratio}


def row(what: str, times: Sequence[float], *, target: float | None = None, peer: Sequence[float] | None = None) -> Row:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    margin = 1.57 * (high - low) / math.sqrt(len(times))  # McGill, Tukey and Larsen 1978: notches
    return Row(what, median, low, high, margin, target, None if peer is None else statistics.median(peer))


def table(rows: Sequence[Row]) -> str:
    """The rows as text; a figure is marked `MISSED` if it is over its target."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.2f}"

    width = max(len(row.what) for row in rows) + 2
    lines = [
        f"{'microseconds':{width}}{'median':>12}{'+-':>9}{'quartiles':>26}{'target':>12}{'':>9}{'peer':>12}{'ratio':>7}"
    ]
    for row in rows:
        spread = f"{row.low:,.2f} .. {row.high:,.2f}"
        lines.append(
            f"{row.what:{width}}{number(row.us):>12}{number(row.margin):>9}{spread:>26}{number(row.target):>12}{row.verdict:>9}"
            f"{number(row.peer):>12}{number(row.ratio):>7}"
        )
    return "\n".join(line.rstrip() for line in lines)
