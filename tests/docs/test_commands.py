"""Every command that a page shows in a "```console" block runs and prints what the page says.

The blocks of a page, those in Python among them, run in order in one folder. A line of `...` stands for any lines.
"""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("vlscope")

from vlscope.cli import main

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```console\n" in page.read_text()]


def commands(block):
    """(arguments, output) of each command of a block."""
    for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield shlex.split(line), output


def as_pattern(output):
    return "".join("(?:.*\n)*?" if line == "...\n" else re.escape(line) for line in output.splitlines(keepends=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_commands_of_a_page_print_what_it_says(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for kind, block, shown in BLOCK.findall(page.read_text()):
        if kind == "python":
            exec(block, namespace)
            assert capsys.readouterr().out == shown, block
            continue
        for (program, *arguments), output in commands(block):
            assert program == "vlscope"
            main(arguments)
            printed = capsys.readouterr()
            # Warnings and progress of other libraries are no part of what is shown.
            errors = "".join(re.findall(r"^vlscope: .*\n", printed.err, re.MULTILINE))
            assert re.fullmatch(as_pattern(output), printed.out + errors), f"{shlex.join(arguments)}:\n{printed.out}"


def test_every_command_is_on_the_page():
    from vlscope.cli import COMMANDS

    page = (ROOT / "docs" / "command-line.md").read_text()
    assert [name for name in COMMANDS if f"`vlscope {name}" not in page and f"$ vlscope {name} " not in page] == []
    assert len(list(commands("$ vlscope a 'b c' \\\n  d\nx\n...\n$ vlscope e\n"))) == 2
    assert re.fullmatch(as_pattern("x\n...\ny\n"), "x\n1\n2\ny\n") and not re.fullmatch(as_pattern("x\n"), "x\ny\n")
