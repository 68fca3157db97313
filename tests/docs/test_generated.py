"""The generated pages are what the table of values and the shipped configs say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_pages_are_current():
    command = [sys.executable, str(ROOT / "tools" / "docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"run ./dev docs: {result.stdout}{result.stderr}"


def test_every_value_of_the_table_is_on_the_page():
    from vlscope import _core

    page = (ROOT / "docs" / "values.md").read_text()
    for kind in _core.all_kinds():
        for value in kind.values:
            assert f"`{value.name}`" in page, value.name


def test_every_value_of_the_table_has_a_type():
    from vlscope import _core

    stub = (ROOT / "bindings" / "vlscope" / "tree.pyi").read_text()
    for kind in _core.all_kinds():
        assert f"class {kind.name}(Module):" in stub
        for value in kind.values:
            assert f"    {value.name}: torch.Tensor" in stub, value.name
