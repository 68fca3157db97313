"""The page for people coming from other libraries: every line of its right columns runs."""

import re
from pathlib import Path

import pytest

pytest.importorskip("vlscope")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from.md"
SETUP = re.search(r"^```python\n(.*?)^```\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]

#: What stands around a line, by the head of its column.
BLOCKS = {
    "vlscope": "if True:",
    "vlscope, in a trace": "with model.trace(question, images=[red]) as tracer:",
    "vlscope, in a generation": "with model.generate(question, images=[red], max_new_tokens=3) as tracer:",
}


def rows(page):
    """(line of the page, head of the right column, its code) of every row of a table that has code there."""
    head = None
    for number, line in enumerate(page.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            head = None
        elif head is None:
            head = cells[-1]
        elif code := re.findall(r"`([^`]+)`", cells[-1]):
            yield number, head, code


ROWS = list(rows(PAGE.read_text()))


@pytest.fixture(scope="module")
def names():
    namespace = {}
    exec(compile(SETUP, str(PAGE), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("number, head, code", ROWS, ids=[f"line {number}" for number, _, _ in ROWS])
def test_a_line_of_the_right_column_runs(names, number, head, code):
    lines = [f"{line} pass" if line.endswith(":") else line for line in code]
    block = "\n    ".join([BLOCKS[head], *lines])
    try:
        exec(compile(block, f"{PAGE.name}, line {number}", "exec"), dict(names))
    finally:
        names["model"].clear_edits()


def test_the_rows_of_a_table_are_found_with_the_code_of_their_right_column():
    page = "| a | vlscope |\n|---|---|\n| `x` | `y = 1`, or `z(2)` |\n| `x` | prose |\n\n"
    page += "| b | vlscope, in a trace |\n|---|---|\n| | `w` |\n"
    assert list(rows(page)) == [(3, "vlscope", ["y = 1", "z(2)"]), (8, "vlscope, in a trace", ["w"])]
    assert len(ROWS) > 80 and {head for _, head, _ in ROWS} == set(BLOCKS)
