"""What holds of the Qwen encoder: its merger is the projector, its attention runs once per image."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch

import vlscope
from sites import collect, difference


def test_image_size_says_that_any_resolution_is_taken(model):
    with pytest.raises(vlscope.Unavailable, match="own grid"):
        model.vision.image_size


@pytest.mark.parametrize("value", ["attention_scores", "attention_probabilities"])
def test_no_one_tensor_is_the_pattern_under_any_implementation(model, prompts, value):
    attn = model.vision.layers[0].self_attn
    with pytest.raises(vlscope.Unavailable, match="no one tensor is the block's pattern") as outside:
        getattr(attn, value)
    assert "eager" not in str(outside.value)
    with model.trace(**prompts.one_image):
        with pytest.raises(vlscope.Unavailable, match="no one tensor is the block's pattern"):
            getattr(attn, value)
        with pytest.raises(vlscope.Unavailable, match="no one tensor is the block's pattern"):
            setattr(attn, value, torch.zeros(1))


def test_the_interior_is_the_same_under_both_implementations(name, vlscope_model, prompts):
    at = "vision.layers.0.self_attn"
    interior = [f"{at}.attention_{part}" for part in ("queries", "keys", "values")]
    interior += [f"{at}.image_attention_scores", f"{at}.image_attention_probabilities"]
    runs = [collect(vlscope_model(name, attention), prompts.two_images, *interior) for attention in ("eager", "sdpa")]
    for eager, sdpa in zip(*runs, strict=True):
        assert difference(sdpa, eager) is None
