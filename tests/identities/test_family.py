"""What holds of every family's text model: aliases, sums, patterns, writes, helpers, sizes."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch

import vlscope
from identities.models import QWEN3_VL
from sites import collect
from vlscope.verify.identities.text import INTERIOR


def logits_of(model, inputs, edit=lambda: None):
    with model.trace(**inputs):
        edit()
        return model.logits.save()


def test_the_inside_of_a_skipped_layer_is_never_reached(model, prompts):
    with model.trace(**prompts.text):
        model.skip_layer(1)
        with pytest.raises(vlscope.NotReachedError, match=r"layers\.1\.self_attn"):
            model.layers[1].self_attn.attention_output
        logits = model.logits.save()
    assert logits.isfinite().all()


def test_steering_several_layers_moves_all_positions(model, prompts):
    vector = torch.ones(model.hidden_size)
    clean = collect(model, prompts.text, "layers.0.layer_output", "layers.1.layer_output")
    with model.trace(**prompts.text):
        model.steer([0, 1], vector, factor=0.5)
        second = model.layers[1].layer_output.save()
    assert (second - clean[1]).abs().amin(dim=(0, 1)).max() > 0.1


def test_sizes_are_those_of_the_weights(model):
    attn = model.layers[0].self_attn
    mlp = next(layer.mlp for layer in model.layers if not hasattr(type(layer.mlp), "router_logits"))
    assert tuple(model.lm_head.weight.shape) == (model.vocab_size, model.hidden_size)
    assert tuple(attn.q_proj.weight.shape) == (model.num_heads * model.head_dim, model.hidden_size)
    assert tuple(attn.k_proj.weight.shape) == (model.num_kv_heads * model.head_dim, model.hidden_size)
    assert tuple(mlp.gate_proj.weight.shape) == (model.intermediate_size, model.hidden_size)
    assert model.qk_head_dim == model.head_dim
    assert len(model.layers) == model.num_layers and len(model.vision.layers) == model.vision.num_layers
    with pytest.raises(AttributeError):
        model.hidden_size = 3


def test_the_printout_names_every_value(model):
    text = repr(model)
    for value in (
        "logits",
        "token_embeddings",
        "layer_output",
        "attention_queries",
        "attention_probabilities",
        "mlp_output",
        "deepstack_output",
        "image_features",
        "patch_embeddings",
        "tower_output",
        "image_token_mask",
        "next_token_probs",
    ):
        assert value in text, value


@pytest.mark.parametrize("name", QWEN3_VL)
def test_support_is_what_can_be_read(model, prompts):
    support = model.support()
    assert support["layer_output"] is None and support["vision.image_features"] is None
    taps = min(len(model.config["vision_config"]["deepstack_visual_indexes"]), model.num_layers)
    missing = support["deepstack_output"] or {}
    assert sorted(missing) == list(range(taps, model.num_layers))
    for layer, reason in missing.items():
        with pytest.raises(vlscope.Unavailable) as caught:
            model.layers[layer].deepstack_output
        assert reason in str(caught.value)
        assert model.support(layer=layer)["deepstack_output"] == reason
        assert not hasattr(model.layers[layer], "nothing_of_that_name")
    assert model.support(layer=0)["deepstack_output"] is None
    assert sorted(support["vision.attention_scores"]) == list(range(model.vision.num_layers))
    for name in INTERIOR:
        assert support[name] is None
