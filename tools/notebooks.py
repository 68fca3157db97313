"""Runs the notebooks and writes what they print into them; their pictures are left out.

`./dev python tools/notebooks.py [NAME...]`. The tests hold the notebooks to what is written.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SECONDS = 300  # for one cell, on a busy machine


@contextlib.contextmanager
def kernel() -> Iterator[KernelManager]:
    """A kernel for several notebooks, which imports torch once. What they write goes with it."""
    manager = KernelManager(kernel_name="python3")
    with tempfile.TemporaryDirectory() as folder:
        manager.start_kernel(cwd=folder)
        try:
            yield manager
        finally:
            manager.shutdown_kernel(now=True)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def run(notebook: Any, manager: KernelManager) -> Any:
    """Runs a notebook in an empty namespace; its cells then hold all outputs."""
    empty = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")])
    for book in (empty, notebook):
        NotebookClient(book, km=manager, timeout=SECONDS).execute()
    return notebook


def printed(notebook: Any) -> list[str]:
    """What each code cell prints."""
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def bare(notebook: Any) -> Any:
    """The notebook with what its cells print, and nothing else of a run."""
    texts = iter(printed(notebook))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text = next(texts)
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
            cell.execution_count = None
            cell.metadata = {}
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of the notebooks; all by default")
    names = parser.parse_args().names
    with kernel() as manager:
        for path in sorted(FOLDER.glob("*.ipynb")):
            if not names or path.stem in names:
                nbformat.write(bare(run(read(path), manager)), path)
                print(path.name)


if __name__ == "__main__":
    main()
