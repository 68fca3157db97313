"""Every named value and every module's inputs and output, against transformers with hooks, in one trace each.

The list of what to read is what transformers went through, in its order: a site that the engine lacks, serves in
another order or with other bits fails here; `test_every_value_of_the_tree_is_compared` holds the other direction.
"""

import re
from collections.abc import Mapping

import pytest
import torch

import tiny
from parity import reference
from parity.cases import CASES
from sites import difference, resolve

MODELS = [*tiny.CONFIGS, "demo"]

# Site pattern -> (tolerance, reason). docs/parity.md tells the same.
EXCEPTIONS = {
    r"next_token_probs": (
        1e-5,
        "made from the last row of each prompt alone; a row of a matrix product alone "
        "differs in its last bits from the row of the whole",
    ),
}

# What transformers tells a module about caching and the form of its answer, and the token types that follow from the
# ids; `rope_deltas` comes back for the decoding steps to come.
NO_VALUES = {"past_key_values", "use_cache", "return_dict", "mm_token_type_ids", "rope_deltas"}


def tolerance(site):
    return next((limit for pattern, (limit, _) in EXCEPTIONS.items() if re.fullmatch(pattern, site)), 0.0)


def without_absent(mapping):
    return {key: value for key, value in mapping.items() if key not in NO_VALUES and value is not None}


def expected(run, site):
    """What transformers has at a site of the reading list."""
    if site in run.values:
        return run.values[site]
    path, _, side = site.rpartition(".")
    call = run.calls[path]
    if side == "inputs":
        kwargs = without_absent(call.kwargs)
        if path == "model":  # given to transformers where it would count padding; vlscope makes them inside
            kwargs.pop("position_ids", None)
        return call.args, kwargs
    if side == "input":  # the text model is called by keyword, with input_ids=None first
        first = call.kwargs.get("inputs_embeds")
        return first if first is not None else next(iter((*call.args, *call.kwargs.values())))
    output = call.output
    return without_absent(output) if isinstance(output, Mapping) else output


def shaped(site, ours):
    """The engine's answer in the form of `expected`: mappings without empty entries, output objects as mappings."""
    if site.endswith(".inputs"):
        args, kwargs = ours
        return tuple(args), without_absent(kwargs)
    if not isinstance(ours, (torch.Tensor, tuple, list)) and site.endswith("output"):
        fields = ours if isinstance(ours, Mapping) else vars(ours)
        return without_absent(fields)
    return ours


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_every_value_equals_transformers(name, attention, case, vlscope_model, reference_run, inputs):
    model, run = vlscope_model(name, attention), reference_run(name, attention, case)
    served, faults = {}, []
    with model.trace(**inputs(name, case)) as tracer:
        for site, key in reference.reading_list(run):
            try:
                served[site] = key, resolve(model, site)
            except Exception as error:
                faults.append(f"{site}: {type(error).__name__}: {error}")
        result = tracer.result.logits
    for site, (key, ours) in served.items():
        text = difference(shaped(site, ours), expected(run, key), tolerance(site))
        if text:
            faults.append(f"{site} {text}")
    if text := difference(result, run.logits):
        faults.append(f"tracer.result.logits {text}")
    assert not faults, f"{len(faults)} faults, in forward order:\n" + "\n".join(faults[:40])


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
