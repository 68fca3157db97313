"""The page of promises names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_page_of_promises_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/reliability.md").read_text())
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_every_suite_of_c_plus_plus_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.cc)`, suites? (.*?) \|", (ROOT / "docs/reliability.md").read_text())
    suites = [(file, suite) for file, suites in named for suite in re.findall(r"`(\w+)`", suites)]
    assert len(suites) > 3
    for file, suite in suites:
        assert re.search(rf"TEST(_F|_P)?\({suite},", (ROOT / file).read_text()), f"{file}: {suite}"


def test_every_promise_names_its_test():
    page = (ROOT / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| (?!promise |---)(.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert len(rows) > 40
    assert not [promise for promise, test in rows if "`tests/" not in test]
