"""Every named value and every module's inputs and output, against transformers with hooks, in one trace each.

The list of what to read is what transformers went through, in its order: a site that the engine lacks, serves in
another order or with other bits fails here; `test_every_value_of_the_tree_is_compared` holds the other direction.
"""

import pytest
import torch

import tiny
from sites import difference
from vlscope.verify import parity
from vlscope.verify.prompts import CASES

MODELS = [*tiny.CONFIGS, "demo"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_every_value_equals_transformers(name, attention, case, vlscope_model, reference_run, inputs):
    model, run = vlscope_model(name, attention), reference_run(name, attention, case)
    compared = list(parity.compare(model, inputs(name, case), run))
    faults = [f"{site}: {fault}" for site, fault, _ in compared if fault]
    assert not faults, f"{len(faults)} faults, in forward order:\n" + "\n".join(faults[:40])
    assert {site for site, _, bits in compared if not bits} <= {"next_token_probs"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_untraced_logits_equal_transformers(name, attention, case, vlscope_model, reference_run, inputs):
    model, logits = vlscope_model(name, attention), reference_run(name, attention, case).logits
    assert difference(model(**inputs(name, case)).logits, logits) is None
    with torch.no_grad():
        assert difference(model(**inputs(name, case)).logits, logits) is None


def values_of(host):
    """The names of the values that a host declares."""
    return {name for name in dir(type(host)) if hasattr(getattr(type(host), name), "layout")}


@pytest.mark.parametrize("name", MODELS)
def test_every_value_of_the_tree_is_compared(name, vlscope_model, reference_run):
    """Walks the hosts of the tree: what they declare and what the reference recorded are the same names."""
    model, run = vlscope_model(name, "eager"), reference_run(name, "eager", "images_and_videos")
    hosts = {"": model, "vision": model.vision, "projector": model.projector}
    for tower, blocks in (("", model.layers), ("vision.", model.vision.layers)):
        for i, block in enumerate(blocks):
            hosts[f"{tower}layers.{i}"] = block
            for part in ("self_attn", "linear_attn", "mlp"):
                if hasattr(block, part):
                    hosts[f"{tower}layers.{i}.{part}"] = getattr(block, part)
    declared = {
        f"{path}.{value}".lstrip(".")
        for path, host in hosts.items()
        for value in values_of(host)
        if served(host, value)
    }
    on_later_steps = {name for name in declared if name.endswith(".linear_attn.state_input")}
    assert declared - set(run.values) == on_later_steps
    assert set(run.values) - declared <= {"projector.input", "projector.output"}  # of the module, not of the table


def served(host, value):
    """Whether a host has a value at all: Unavailable is raised on access, ValueError only means "not now"."""
    from vlscope import Unavailable

    try:
        getattr(host, value)
    except Unavailable:
        return False
    except ValueError:
        return True
    raise AssertionError(f"{value} was readable outside a trace")
