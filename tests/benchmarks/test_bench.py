"""The benchmarks run and print their tables. Their figures are nobody's assertion."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

#: Suite -> some of its rows.
SUITES = {
    "overhead": {"untraced forward", "empty trace", "one read", "one assignment"},
    "traces": {
        "tiny: every vision block: ours",
        "tiny: last attention row, every block: ours, eager",
        "tiny: layer x position sweep: ours",
        "tiny: layer sweep over a recording, of as many forwards",
    },
    "forward": {
        "tiny: matrix products, share of the forward",
        "tiny: trace, one value of block 0, of the whole forward",
    },
    "streaming": {
        "tiny-bf16: image prompt, last logits, streamed, of the resident",
        "tiny-bf16: anonymous memory at its peak: streamed",
    },
    "generation": {"image prompt, 32 tokens", "long text, 1 token", "image prompt, a patch in each block"},
}


@pytest.fixture
def module(monkeypatch):
    """A module of benchmarks/, as its driver imports it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def bench(*arguments):
    command = [sys.executable, str(BENCHMARKS / "bench.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_suites_keep_every_row_and_print_those_with_a_target(tmp_path):
    out = tmp_path / "figures.json"
    result = bench(*SUITES, "--quick", "--reps", 2, "--no-peers", "--json", out)
    assert result.returncode == 0, result.stderr
    figures = json.loads(out.read_text())
    for suite, names in SUITES.items():
        assert names <= {row["what"] for row in figures["suites"][suite]}
    with_target = [row["what"] for rows in figures["suites"].values() for row in rows if row["target"] is not None]
    assert with_target
    assert all(name in result.stdout for name in with_target)
    assert bench("--from", out).stdout == result.stdout


def test_a_fresh_interpreter_tells_its_load_and_first_logits(module):
    rows = module("loading").run(module("measure").Sizes(long=1, peers=False, threads=1, models=("tiny",)))
    found = {row.what: row.value for row in rows}
    assert found["tiny: fresh interpreter to first logits: ours"] > found["tiny: weights alone, load"] > 0


def test_the_peak_of_a_trace_holds_what_it_delivered(module, monkeypatch):
    memory = module("memory")
    monkeypatch.setattr(memory, "WORKS", {"every_layer": "every text block"})
    rows = memory.run(module("measure").Sizes(peers=False, threads=1, models=("tiny",)))
    found = {row.what: row.value for row in rows}
    delivered = 6 * 2078 * 64 * 4 / 2**20
    assert found["tiny: peak over the weights: every text block: ours"] > delivered
    pattern = 4 * 2078**2 * 4 / 2**20
    assert found["tiny: peak over the weights: whole pattern of a block: ours"] > pattern


class Engine:
    """Delivers the same tensors for each work."""

    def __init__(self, *tensors):
        self.tensors = list(tensors)

    def deliver(self):
        return self.tensors


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([torch.zeros(2, 3)], "off by 1.0e"),
        ([torch.ones(2, 4)], r"\[2, 4\]"),
        ([torch.ones(2, 3), torch.ones(2, 3)], "2 tensors"),
        ([torch.full((2, 3), float("nan"))], "off by nan"),
    ],
)
def test_what_differs_from_the_hooks_is_not_timed(module, theirs, message):
    traces = module("traces")
    plain, right = Engine(torch.zeros(1, 3)), Engine(torch.ones(1, 2, 3))
    works = {"nothing": {"transformers": plain}, "last_logits": {"transformers": plain}}
    with pytest.raises(traces.WrongResult, match=message):
        traces.check({**works, "every_layer": {"hooks": right, "other": Engine(*theirs)}})


def test_an_edit_that_moves_nothing_is_not_timed(module):
    traces = module("traces")
    plain = Engine(torch.ones(1, 3))
    works = {work: {"transformers": plain} for work in ("nothing", "last_logits")}
    with pytest.raises(traces.WrongResult, match="did not move"):
        traces.check({**works, **{work: {"hooks": plain} for work in traces.EDITS}})


def test_a_missed_target_is_marked_and_explained(module):
    measure, report = module("measure"), module("report")
    rows = [measure.row("empty trace", [30.0, 31.0, 32.0], target=20.0), measure.row("no target", [1.0])]
    rows += [measure.row("speed", [5.0, 5.0], target=4.0, at_least=True)]
    text = report.targets(rows)
    assert "MISSED empty trace: " in text
    assert "no target" not in text
    assert [row.verdict for row in rows] == ["MISSED", "", "met"]


def test_the_page_shows_the_kept_figures(module):
    report, suites = module("report"), module("bench").SUITES
    page = report.PAGE.read_text()
    assert report.written(page, report.blocks(json.loads(report.RESULTS.read_text()), suites)) == page


def test_a_page_without_a_place_for_a_table_is_refused(module):
    with pytest.raises(ValueError, match="0 blocks named traces"):
        module("report").written("# Performance\n", {"traces": "figures"})
