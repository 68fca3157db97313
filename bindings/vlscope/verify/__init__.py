"""Does the engine compute on this checkpoint what it promises to?

>>> report = vlscope.verify.run("demo")
>>> report.ok
True
>>> print(report)

Two parts: the identities (`vlscope.verify.identities`), which need nothing else, and, where
transformers is installed, every named value and every module's inputs and output against those of
transformers on the same weights and prompts. The prompts are random tokens and pixels.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from ..model import StandardizedTransformer, load
from . import prompts
from .identities import ALL

if TYPE_CHECKING:
    from .reference import Run

__all__ = ["Compared", "Held", "Report", "run"]

#: The release that values are the same bits as.
TRANSFORMERS = "5.17.0"
SHOWN = 20  # differing sites, of which there may be hundreds behind the first


@dataclass(frozen=True)
class Held:
    """One identity: what it is about, in words, and what is wrong (None where it holds)."""

    suite: str
    sentence: str
    fault: str | None


@dataclass
class Compared:
    """One value over all blocks and prompts: how many tensors were compared, and how they came out."""

    value: str
    bits: int = 0
    within: int = 0
    differ: int = 0


@dataclass
class Report:
    """What `run` found. `print` shows it as two tables.

    Attributes:
        model, family: what was looked at.
        attention: the attention implementation.
        identities: every identity that applies to the model.
        parity: every value, in the order of the forward; empty where it was not compared.
        faults: "prompt: site: difference" of every site that differs, in forward order.
        note: what parity was taken against, or why it was not.
    """

    model: str
    family: str
    attention: str
    identities: list[Held] = field(default_factory=list)
    parity: list[Compared] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything that was looked at is as it should be."""
        return not self.faults and not any(held.fault for held in self.identities)

    def __str__(self) -> str:
        from ..commands.common import table

        broken = sum(held.fault is not None for held in self.identities)
        rows = [(held.suite, held.sentence, held.fault or "holds") for held in self.identities]
        parts = [
            f"{self.model} ({self.family}), float32 on the CPU, {self.attention}",
            table([("about", "identity", "result"), *rows]),
            f"{len(rows) - broken} identities hold, {broken} do not",
            self.note,
        ]
        if self.parity:
            cells = [(row.value, *map(str, (row.bits, row.within, row.differ))) for row in self.parity]
            parts.append(table([("value", "same bits", "within tolerance", "differ"), *cells]))
            total = sum(row.bits + row.within + row.differ for row in self.parity)
            parts.append(f"{total - len(self.faults)} of {total} comparisons agree")
        if self.faults:
            more = [f"and {len(self.faults) - SHOWN} more"] if len(self.faults) > SHOWN else []
            parts.append("\n".join(["in forward order:", *self.faults[:SHOWN], *more]))
        return "\n\n".join(parts)


def run(
    model: str | os.PathLike[str],
    *,
    attention: str = "sdpa",
    weights: str = "resident",
    parity: bool = True,
    progress: bool = False,
) -> Report:
    """Check the identities and the parity of a checkpoint.

    In float32, on the CPU and at one thread, as parity is promised: last bits depend on all three.
    The two models are never in memory together; the values of transformers are.

    Args:
        model: a checkpoint folder, a hub id, or "demo".
        attention: "sdpa" or "eager".
        weights: "resident" or "stream", as in `vlscope.load`.
        parity: False leaves transformers out.
        progress: shows a bar on a terminal.

    Raises:
        VlscopeError: what `vlscope.load` raises. A model that breaks a promise is no error: see `Report.ok`.
    """
    shell = load(model, attn_implementation=attention, dispatch=False)
    report = Report(str(model), shell.family, attention)
    given = prompts.of(shell.config)
    with _one_thread(), tqdm(total=len(ALL) + 2 * len(prompts.CASES), disable=None if progress else True) as bar:
        runs, report.note = _reference_runs(shell, given, bar) if parity else ({}, "parity was not asked for")
        ours = load(model, attn_implementation=attention, dtype=torch.float32, weights=weights)
        _compare(report, ours, given, runs, bar)
        for identity in ALL:
            bar.set_description(identity.suite)
            if identity.applies(ours):
                report.identities.append(Held(identity.suite, identity.sentence, identity.fault(ours, given)))
            bar.update()
    return report


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _reference_runs(model: StandardizedTransformer, given: SimpleNamespace, bar: Any) -> tuple[dict[str, Run], str]:
    """What transformers does on each prompt, and what is to be said about it."""
    try:
        installed = version("transformers")
        from . import reference  # imports transformers
    except PackageNotFoundError:
        return {}, f"parity was not checked: transformers is not installed (pip install transformers=={TRANSFORMERS})"
    except ImportError as error:
        return {}, f"parity was not checked: transformers {installed} is not {TRANSFORMERS} ({error})"
    theirs = reference.load(model.folder, model.attn_implementation)
    runs = {}
    for case in prompts.CASES:
        bar.set_description(f"transformers, {case}")
        runs[case] = reference.run(theirs, getattr(given, case))
        bar.update()
    del theirs
    gc.collect()  # hooks hold it in circles
    note = f"parity with transformers {installed} on {len(runs)} prompts"
    return runs, note if installed == TRANSFORMERS else f"{note}; it is promised with {TRANSFORMERS}"


def _compare(
    report: Report,
    model: StandardizedTransformer,
    given: SimpleNamespace,
    runs: dict[str, Run],
    bar: Any,
) -> None:
    rows: dict[str, Compared] = {}
    for case, theirs in reversed(runs.items()):  # the fullest first, which has every value in the order of the forward
        from . import parity

        bar.set_description(case)
        inputs = getattr(given, case)
        for site, fault, bits in (*parity.compare(model, inputs, theirs), parity.compare_logits(model, inputs, theirs)):
            name = _named(site, site in theirs.values)
            row = rows.setdefault(name, Compared(name))
            if fault:
                row.differ += 1
                report.faults.append(f"{case}: {site} {fault}")
            elif bits:
                row.bits += 1
            else:
                row.within += 1
        bar.update()
    report.parity = sorted(rows.values(), key=lambda row: row.value.startswith("every module's"))


def _named(site: str, value: bool) -> str:
    """The row of a site: a named value over all blocks; modules together."""
    side = site.rpartition(".")[2]
    if not value and side in ("input", "inputs", "output"):
        return f"every module's .{side}"
    return re.sub(r"\.\d+", ".*", site)
