"""The text of measured figures, and its place in docs/performance.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import measure
from measure import Row
from reasons import REASONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results.json"


def rows_of(results: Mapping[str, Any]) -> dict[str, list[Row]]:
    return {suite: [Row.of(stored) for stored in rows] for suite, rows in results["suites"].items()}


def blocks(results: Mapping[str, Any], suites: Mapping[str, ModuleType]) -> dict[str, str]:
    """The machine, a table for each suite, and the one of targets, by name."""
    rows = rows_of(results)
    tables = {suite: getattr(suites[suite], "text", measure.table)(rows[suite]) for suite in suites if suite in rows}
    return {
        "machine": _machine(results),
        **tables,
        "targets": targets([row for found in rows.values() for row in found]),
    }


def _machine(results: Mapping[str, Any]) -> str:
    about = results["machine"]
    minutes = sum(results["seconds"].values()) / 60
    return (
        f"{about['cpu']}, {about['cores']} cores, load {about['load']:.2f} at the start; torch {about['torch']}, "
        f"Python {about['python']}\n./dev bench {' '.join(results['arguments'])}: {minutes:.0f} minutes"
    )


def targets(rows: list[Row]) -> str:
    """Every figure that has a target, and below them why the missed ones are missed."""
    missed = [row for row in rows if row.verdict == "MISSED"]
    reasons = [f"MISSED {row.what}: {reason(row.what)}" for row in missed]
    return "\n".join([measure.targets(rows), *([""] if reasons else []), *reasons])


def reason(what: str) -> str:
    return next((why for part, why in REASONS.items() if part in what), "not explained yet")


def _block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- measured: {name} -->\n)```text\n.*?```\n", re.DOTALL)


def written(page: str, texts: Mapping[str, str]) -> str:
    """The page with these texts in the blocks of their names. Raises ValueError where one has no block."""
    for name, text in texts.items():
        block = f"```text\n{text}\n```\n"
        page, count = _block(name).subn(lambda match, block=block: match[1] + block, page)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} blocks named {name}; one is expected")
    return page


def write(results: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Put the texts into the page, and the figures that they come from beside this file."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), texts), encoding="utf-8")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
