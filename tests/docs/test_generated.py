"""The generated pages are what the table of values and the shipped configs say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
            assert f"    {value.name}: {'Tensors' if value.list else 'torch.Tensor'}" in stub, value.name


SCRIPT = """
import torch
import vlscope
from typing_extensions import assert_type
from vlscope.tree import ModuleList, TextLayer

model = vlscope.load("demo")
assert_type(model.layers, ModuleList[TextLayer])
assert_type(model.vision.num_layers, int)
assert_type(model.lm_head.weight, torch.Tensor)
with model.trace("The day after Monday is"):
    assert_type(model.layers[0].self_attn.attention_queries, torch.Tensor)
    model.layers[-1].layer_output[:] = 0
    assert_type(vlscope.save(model.logits), torch.Tensor)
"""

#: A line that the types refuse, and a word of the refusal.
REFUSED = {
    "model.layers[0].layer_outputs": "layer_outputs",
    "model.layers[0].layer_output = 3": "Tensor",
    "model.layers[0].self_attn.output[1].shape": "None",
}


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_script_type_checks_and_its_slips_are_found(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "\n".join(REFUSED) + "\n")
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", str(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT / "bindings")},
    )
    found = [line for line in result.stdout.splitlines() if ": error: " in line]
    first = SCRIPT.count("\n") + 1
    for number, word in enumerate(REFUSED.values(), first):
        assert any(f":{number}: error:" in line and word in line for line in found), result.stdout + result.stderr
    assert len(found) == len(REFUSED), result.stdout


def test_every_method_of_a_model_and_a_tracer_is_on_the_page_of_helpers():
    import vlscope
    from vlscope.tree import SIZES_OF

    page = (ROOT / "docs" / "helpers.md").read_text()
    classes = (vlscope.StandardizedTransformer, vlscope.GenerationTracer, vlscope.InvokeTracer, vlscope.Recording)
    named = {name for owner in classes for name in dir(owner) if not name.startswith("_")}
    values = {value.name for value in vlscope.StandardizedTransformer._kind.values}
    served = {"input", "inputs", "output", "root", *values, *SIZES_OF["CausalLM"]}
    missing = {name for name in named - served if not re.search(rf"\b{name}\b", page)}
    assert not missing
