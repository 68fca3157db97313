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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TINY)
def test_no_operation_of_a_scan_enters_python(name, attention, vlscope_model, inputs):
    model, called = vlscope_model(name, attention), []
    prepared = [model._prepare(**inputs(name, case)) for case in CASES]
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code) if event == "call" else None)
    try:
        for each in prepared:
            model._core.scan(each)
    finally:
        sys.setprofile(before)
    assert called == []


#: What comes with torch's rules in Python for shapes alone, and takes seconds.
HEAVY = ("sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes")
SCANS = """
import torch, vlscope
scans = torch.load("given.pt")
for attention in ("sdpa", "eager"):
    model = vlscope.load(".", dispatch=False, attn_implementation=attention)
    for inputs in scans:
        print(len(model.scan(**inputs)))
"""
TRACES = """
import vlscope
model, red = vlscope.load("demo"), vlscope.demo.picture("red", size=(64, 64))
with model.trace("What color is this?", images=[red]):
    model.layers[1].layer_output.requires_grad_()
    model.logits.sum().backward()
with model.generate("Hello", max_new_tokens=2) as tracer:
    for step in tracer.iter[:]:
        print(model.logits.shape[1])
"""


def run_fresh(script, folder):
    """The lines that a script prints in an interpreter of its own, which imports nothing heavy meanwhile."""
    script += f"\nimport sys; print([name for name in {HEAVY} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    *lines, imported = ran.stdout.splitlines()
    assert imported == "[]"
    return lines


@pytest.mark.parametrize("name", LARGEST)
def test_a_scan_of_the_largest_models_asks_no_rule_in_python(name, tmp_path):
    shutil.copy(RELEASED / f"{name}.json", tmp_path / "config.json")
    spelling = Spelling.of(json.loads((tmp_path / "config.json").read_text()))
    cases = [CASES[case](spelling) for case in ("text", "padded_text", "padded_mixed", "images_and_videos")]
    torch.save(cases, tmp_path / "given.pt")
    counts = run_fresh(SCANS, tmp_path)
    assert len(counts) == 2 * len(cases) and all(int(count) > 1000 for count in counts)


def test_a_trace_asks_none_either(tmp_path):
    assert run_fresh(TRACES, tmp_path) == ["1", "1"]


def test_a_scan_leaves_torch_as_it_was(model, image):
    def state():
        local = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
        tables = [torch._C._dispatch_dump_table(f"aten::{op}") for op in ("mul.Tensor", "mm", "layer_norm", "zeros")]
        return [str(keys) for keys in local], tables

    before = state()
    model.scan(**image)
    with pytest.raises(vlscope.InputError):
        model.scan(input_ids=torch.full((1, 3), -1))
    assert state() == before
    rule = next(line for line in before[1][0].splitlines() if line.startswith("Meta:"))
    assert "_meta_registrations.py" in rule, "others still get torch's own rule"
