"""Every Python example of the README and of the pages in docs/ runs, and prints what the page says.

The blocks of a page run in order and share one namespace. A block opened with "```python no-run" is
skipped. A "```text" block right after an example is what the example prints.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("vlscope")

ROOT = Path(__file__).parents[2]
#: Pages whose examples follow commands are run by test_commands.py.
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "```console\n" not in page.read_text()
]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


class Example(NamedTuple):
    """A block of code, the line of the page before it, and its output where the page shows it."""

    code: str
    line: int
    output: str | None


def examples(page: str) -> Iterator[Example]:
    for match in BLOCK.finditer(page):
        code, output = match.groups()
        yield Example(code, page[: match.start(1)].count("\n"), output)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_page_run_and_print_what_it_says(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code, line, output in examples(page.read_text()):
        padded = "\n" * line + code  # so that a traceback shows the line of the page
        exec(compile(padded, str(page), "exec"), namespace)
        printed = capsys.readouterr().out
        if output is not None:
            assert printed == output, f"{page.name}, the example at line {line}"


def test_examples_are_found_with_their_output_and_skipped_where_marked():
    page = "a\n\n```python\nx = 1\n```\n\n```text\n1\n```\n\n"
    page += "```python no-run\ny\n```\n\n```python\nz\n```\n"
    assert list(examples(page)) == [Example("x = 1\n", 3, "1\n"), Example("z\n", 15, None)]
