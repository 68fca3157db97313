"""The benchmarks run and print their table. Their figures are nobody's assertion."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SUITES = {
    "overhead": {"untraced forward", "empty trace", "one read", "one assignment"},
    "generation": {"image prompt, 32 tokens", "long text, 1 token", "image prompt, a patch in each block"},
}


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_prints_every_row(suite, tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), suite, "--reps", "2", "--no-peers"]
    result = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    names = [row["what"] for row in json.loads(out.read_text())["rows"]]
    assert SUITES[suite] <= set(names)
    assert all(name in result.stdout for name in names)
