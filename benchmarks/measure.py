"""What every suite shares: interleaved timing, medians with their spread, and the printed tables."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

import torch

Times = dict[str, list[float]]
Name = TypeVar("Name")


class Timed(Protocol):
    """Something to time, here or in another process."""

    def time(self) -> float:
        """Microseconds of one run."""


@dataclass(frozen=True)
class Work:
    """A run in this process. `around` is entered before each run and left after it, off the clock."""

    run: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = field(default=contextlib.nullcontext)

    def time(self) -> float:
        with self.around():
            start = time.perf_counter()
            self.run()
            return (time.perf_counter() - start) * 1e6


@dataclass(frozen=True)
class Sizes:
    """How much is run: the counted runs of short works and of works that take seconds, and the models."""

    short: int = 200
    long: int = 5
    peers: bool = True
    threads: int | None = None
    models: tuple[str, ...] = ("tiny", "cut2b")


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keeps Python's cycle collector out of what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleaved(works: Mapping[Name, Timed], reps: int) -> dict[Name, list[float]]:
    """Times of each work, `reps` of them after a tenth more to warm up.

    Every repetition runs each work once, in an order drawn anew (from a fixed seed): what a run
    finds in the caches depends on which ran before it, and none shall always follow the same one.
    """
    order = list(works)
    shuffle = random.Random(0).shuffle
    warm_up = max(reps // 10, 1)
    times: dict[Name, list[float]] = {name: [] for name in works}
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


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs in each repetition."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


@dataclass(frozen=True)
class Row:
    """One figure: median and quartiles in `unit`, beside its target and its peer's median.

    `margin` is how far off the median itself may be (95 %; from the quartiles and the number of runs).
    A target is the most that is allowed; with `at_least`, the least.
    """

    what: str
    value: float
    low: float
    high: float
    margin: float
    target: float | None = None
    peer: float | None = None
    unit: str = "us"
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """`met` or `MISSED`; `unclear` if the target lies within the margin; empty without a target."""
        if self.target is None:
            return ""
        if abs(self.value - self.target) <= self.margin:
            return "unclear"
        return "met" if (self.value > self.target) == self.at_least else "MISSED"

    @property
    def ratio(self) -> float | None:
        return self.value / self.peer if self.peer is not None and self.peer > 0 else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict, "ratio": self.ratio}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Row:
        """The row that `as_dict` wrote."""
        return cls(**{name: stored[name] for name in cls.__dataclass_fields__})


def row(
    what: str,
    values: Sequence[float],
    *,
    target: float | None = None,
    peer: Sequence[float] | None = None,
    unit: str = "us",
    at_least: bool = False,
) -> Row:
    """The figure of repeated measurements. One alone has no spread, and says so with a margin of 0."""
    if len(values) == 1:
        low = median = high = values[0]
    else:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    margin = 1.57 * (high - low) / math.sqrt(len(values))  # McGill, Tukey and Larsen 1978: notches
    theirs = None if peer is None else statistics.median(peer)
    return Row(what, median, low, high, margin, target, theirs, unit, at_least)


def number(value: float | None) -> str:
    """Three digits at least, and no more decimals than they need."""
    if value is None:
        return ""
    size = abs(value)
    return f"{value:,.{0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 or size == 0 else 3}f}"


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Cells under each other: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    )


def table(rows: Sequence[Row]) -> str:
    """Every row as text; a figure that is beyond its target is marked `MISSED`."""
    head = ["", "median", "+-", "quartiles", "unit", "target", "", "peer", "ratio"]
    lines = [head]
    for row in rows:
        spread = f"{number(row.low)} .. {number(row.high)}"
        figures = [number(row.value), number(row.margin), spread, row.unit]
        lines.append([row.what, *figures, _target(row), row.verdict, number(row.peer), number(row.ratio)])
    return columns(lines)


def targets(rows: Sequence[Row]) -> str:
    """The rows that have a target, beside it."""
    lines = [["figure", "measured", "+-", "unit", "target", ""]]
    lines += [
        [row.what, number(row.value), number(row.margin), row.unit, _target(row), row.verdict]
        for row in rows
        if row.target is not None
    ]
    return columns(lines)


def _target(row: Row) -> str:
    return "" if row.target is None else f"{'>=' if row.at_least else '<='} {number(row.target)}"
