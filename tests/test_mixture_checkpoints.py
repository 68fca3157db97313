"""Experts in the forms that checkpoints have them in, and what of them is read."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import tiny
import vlscope

RELEASED = Path(__file__).parent / "data" / "configs"

# Tensors and parameters as the hub counts them.
COUNTS = {
    "qwen3-vl-30b-a3b-instruct": (882, 31_070_754_032),
    "qwen3-vl-235b-a22b-instruct": (1388, 235_670_022_896),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_released_config_counts_to_the_tensor_and_the_parameter(name):
    assert vlscope.weight_counts(RELEASED / f"{name}.json") == COUNTS[name]


@pytest.fixture
def folder(checkpoint, tmp_path):
    """folder(name): a copy of a checkpoint that may be changed."""
    return lambda name: Path(shutil.copytree(checkpoint(name), tmp_path / name))


def change(folder, edit):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["moe", "moe_hub"])
def test_every_form_of_the_experts_is_the_same_model_to_the_bit(name, attention, folder, inputs):
    path = folder(name)
    given = inputs(name, "two_images")

    def logits(form):
        tiny.restore(path, form)
        return vlscope.load(path, attn_implementation=attention)(**given).logits

    expected = logits(lambda stored: stored)
    for form in (
        lambda stored: {key: tiny.exchanged(key, value) for key, value in stored.items()},
        lambda stored: {key: tiny.exchanged(key, value) for key, value in stored.items()},  # and back
        lambda stored: tiny.split(
            {
                key: tiny.exchanged(key, value) if name in tiny.EXPERTS_EXCHANGED else value
                for key, value in stored.items()
            }
        ),
    ):
        assert torch.equal(logits(form), expected)


def test_weights_of_experts_have_the_shapes_of_transformers(vlscope_model, reference_model):
    for name in tiny.QWEN3_VL_MOE:
        ours, theirs = vlscope_model(name), reference_model(name, "sdpa")
        found = dict(theirs.named_parameters())
        for path in (p for p in found if tiny.is_experts(p)):
            owner, _, weight = path.rpartition(".")
            assert torch.equal(getattr(ours.get(owner), weight), found[path])


def test_the_number_of_experts_may_have_its_other_name(folder, vlscope_model, inputs):
    path = folder("moe")

    def rename(config):
        text = config["text_config"]
        experts = text.pop("num_experts", None) or text.pop("num_local_experts")
        text["num_local_experts"] = experts
        text["norm_topk_prob"] = False  # read by nobody

    change(path, rename)
    given = inputs("moe", "text")
    assert torch.equal(vlscope.load(path)(**given).logits, vlscope_model("moe")(**given).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["moe", "moe_hub"])
def test_half_precision_stays_near_float32(name, dtype, checkpoint, vlscope_model, inputs):
    given = inputs(name, "two_images")
    model, precise = vlscope.load(checkpoint(name), dtype=dtype), vlscope_model(name)
    site = next(p for p in precise.scan(**given) if p.endswith("router_logits")).removesuffix("router_logits")
    with precise.trace(**given):
        expected = precise.get(f"{site}routed_output").clone()
    with model.trace(**given):
        routed = model.get(f"{site}routed_output").clone()
    assert routed.dtype == dtype
    assert (routed.float() - expected).norm() / expected.norm() < 0.1


def test_an_expert_that_nobody_chooses_is_not_touched(vlscope_model, inputs):
    """Numbers that would show are written over the experts of a copy that a prompt passes by."""
    model = vlscope_model("moe")
    given = {key: value[:, :2] for key, value in inputs("moe", "text").items()}
    clean = model(**given).logits
    edited = []
    with model.trace(**given):
        chosen = [layer.mlp.expert_indices.unique().tolist() for layer in model.layers]
    try:
        for layer, hit in zip(model.layers, chosen, strict=True):
            for expert in set(range(layer.mlp.num_experts)) - set(hit):
                weight = layer.mlp.experts.gate_up_proj[expert]
                edited.append((weight, weight.clone()))
                weight.fill_(torch.nan)
        assert edited
        assert torch.equal(model(**given).logits, clean)
    finally:
        for weight, before in edited:
            weight.copy_(before)
