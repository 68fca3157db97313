"""The notebooks run, print what they say, and end with a picture."""

import copy
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)
PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def kernel():
    with notebooks.kernel() as manager:
        yield manager


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_a_notebook_prints_what_is_written_and_ends_with_a_picture(path, kernel):
    written = notebooks.read(path)
    done = notebooks.run(copy.deepcopy(written), kernel)
    assert notebooks.printed(done) == notebooks.printed(written), f"./dev python tools/notebooks.py {path.stem}"
    assert "image/png" in done.cells[-1].outputs[-1].data


def test_a_notebook_begins_with_the_question_it_answers(path):
    first = notebooks.read(path).cells[0]
    assert first.cell_type == "markdown" and re.match(r"# .*\?\n", first.source)


def test_a_notebook_holds_nothing_of_a_run_but_what_it_printed(path):
    assert nbformat.writes(notebooks.bare(notebooks.read(path))) + "\n" == path.read_text()


def test_the_index_of_the_docs_links_every_notebook_by_its_question():
    linked = re.findall(r"\[([^]]+)\]\(\.\./notebooks/([\w-]+)\.ipynb\)", (ROOT / "docs" / "index.md").read_text())
    titles = {path.stem: notebooks.read(path).cells[0].source.splitlines()[0].removeprefix("# ") for path in PATHS}
    assert {name: title for title, name in linked} == titles and len(linked) == len(titles)
