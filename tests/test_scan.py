"""Scans: the shapes and dtypes of traces, found by rules in C++ alone, for models of any size."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vlscope
from vlscope.tree import Record
from vlscope.verify.prompts import CASES, Spelling

RELEASED = Path(__file__).parent / "data" / "configs"
#: One checkpoint of each family, and those whose shapes differ most from it.
TINY = ["dense", "ungrouped", "moe", "qwen2", "qwen2_5", "qwen2_5_one_kv_head", "hybrid", "hybrid_uneven", "hybrid_moe"]
#: The largest of each family.
LARGEST = [
    "qwen2-vl-72b-instruct",
    "qwen2.5-vl-72b-instruct",
    "qwen3-vl-32b-instruct",
    "qwen3-vl-235b-a22b-instruct",
    "qwen3.5-27b",
    "qwen3.5-397b-a17b",
]


def facts(value):
    return [(part.shape, part.dtype) for part in (value if isinstance(value, tuple) else [value])]


def served(value, told):
    """What a scan tells of: of several tensors under one name the first, but for a list."""
    parts = value.values() if isinstance(value, Record) else value if isinstance(value, tuple) else [value]
    return tuple(parts) if isinstance(told, tuple) else next(iter(parts))


def assert_told(model, inputs):
    """Every value that a trace serves is in the scan as it is, and no other."""
    told, seen = model.scan(**inputs), set()
    known = {place.path for place in model._sites if not place.unavailable}
    with model.trace(**inputs):
        for site in sorted(known, key=model.order):
            try:
                value = model.get(site)
            except vlscope.NotReachedError:
                continue
            if value is not None and value != ():
                seen.add(site)
                assert facts(served(value, told[site])) == facts(told[site]), site
    assert seen == set(told)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TINY)
def test_a_scan_tells_the_shape_and_dtype_of_every_value(name, attention, case, vlscope_model, inputs):
    assert_told(vlscope_model(name, attention), inputs(name, case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TINY)
def test_a_scan_knows_the_dtype_that_the_weights_are_loaded_in(name, attention, dtype, checkpoint, inputs):
    options = {"attn_implementation": attention, "dtype": dtype}
    model, before = (vlscope.load(checkpoint(name), dispatch=now, **options) for now in (True, False))
    for case in ("padded_mixed", "images_and_videos"):
        given = inputs(name, case)
        assert_told(model, given)
        told = before.scan(**given)
        assert {site: facts(value) for site, value in told.items()} == {
            site: facts(value) for site, value in model.scan(**given).items()
        }
    assert before.dtype == dtype and not before.dispatched


#: Scans every input in `given.pt`, then tells what was imported on the way.
FRESH = """
import sys, torch, vlscope
scans = torch.load("given.pt")
for attention in ("sdpa", "eager"):
    model = vlscope.load(".", dispatch=False, attn_implementation=attention)
    for inputs in scans:
        print(len(model.scan(**inputs)))
print([name for name in ("sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes") if name in sys.modules])
"""


@pytest.mark.parametrize("name", LARGEST)
def test_a_scan_of_the_largest_models_imports_none_of_torchs_rules_in_python(name, tmp_path):
    shutil.copy(RELEASED / f"{name}.json", tmp_path / "config.json")
    spelling = Spelling.of(json.loads((tmp_path / "config.json").read_text()))
    cases = [CASES[case](spelling) for case in ("text", "padded_text", "padded_mixed", "images_and_videos")]
    torch.save(cases, tmp_path / "given.pt")
    ran = subprocess.run([sys.executable, "-c", FRESH], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    *counts, imported = ran.stdout.split("\n")[:-1]
    assert len(counts) == 2 * len(cases) and all(int(count) > 1000 for count in counts)
    assert imported == "[]"


def test_a_scan_leaves_torchs_own_rules_as_they_were(model, image):
    calls = (lambda x: x * 2, lambda x: x @ x.T, lambda x: x.softmax(0), lambda x: torch.nn.functional.layer_norm(x, [4]))
    x = torch.empty(3, 4, device="meta")
    before = [call(x) for call in calls]
    model.scan(**image)
    assert [facts(call(x)) for call in calls] == [facts(value) for value in before]
    with pytest.raises(NotImplementedError, match="meta"):  # a rule that torch has for no device but others
        torch.nonzero(x)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Meta)
