"""The benchmarks run and print their table. Their figures are nobody's assertion."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_overhead_suite_prints_every_row(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "overhead", "--reps", "2", "--no-peers"]
    result = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    names = [row["what"] for row in json.loads(out.read_text())["rows"]]
    assert {"untraced forward", "empty trace", "one read", "one assignment"} <= set(names)
    assert all(name in result.stdout for name in names)
