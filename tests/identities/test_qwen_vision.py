"""What holds of the Qwen encoder: its merger is the projector, its attention runs once per image."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch

import vlscope
from sites import collect, resolve


def test_the_merger_is_the_projector(model, prompts):
    with model.trace(**prompts.one_image):
        assert model.projector.input is model.model.visual.merger.input
        assert model.projector.output is model.vision.merger.output


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


def test_queries_keys_and_values_are_the_whole_row_after_the_rotary(model, prompts):
    with model.trace(**prompts.two_images):
        attn = model.vision.layers[1].self_attn
        cos, sin = attn.inputs[1]["position_embeddings"]
        qkv = attn.qkv.output.clone()
        q, k, v = attn.attention_queries.save(), attn.attention_keys.save(), attn.attention_values.save()
    heads = model.vision.num_heads
    raw = qkv.view(len(qkv), 3, heads, -1).permute(1, 2, 0, 3)[:, None]  # [3, 1, heads, patches, head_dim]

    def rotate(x):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    torch.testing.assert_close(q, rotate(raw[0]))
    torch.testing.assert_close(k, rotate(raw[1]))
    assert torch.equal(v, raw[2])


def test_heads_projected_are_the_attention_output(model, prompts):
    heads, output = collect(
        model,
        prompts.two_images,
        "vision.layers.1.self_attn.attention_head_outputs",
        "vision.layers.1.self_attn.attention_output",
    )
    proj = model.vision.layers[1].self_attn.proj
    made = torch.nn.functional.linear(heads.flatten(2), proj.weight, proj.bias)
    torch.testing.assert_close(made, output)


@pytest.mark.parametrize("site", ["vision.layers.1.layer_output", "vision.patch_embeddings"])
def test_a_write_through_the_leading_axis_reaches_the_native_tensor(model, prompts, site):
    native = {"vision.patch_embeddings": "vision.patch_embed.output"}.get(site, "vision.layers.1.output")
    with model.trace(**prompts.two_images):
        resolve(model, site)[:, 3] = 7.0
        row = resolve(model, native)[3].clone()
    assert (row == 7.0).all()


@pytest.mark.parametrize("leading", [True, False])
def test_an_assignment_may_carry_or_omit_the_leading_axis(model, prompts, leading):
    with model.trace(**prompts.two_images):
        value = model.vision.layers[0].layer_output
        new = value * 2
        model.vision.layers[0].layer_output = new if leading else new[0]
        entering = model.vision.layers[1].input.save()
    assert torch.equal(entering, new[0])


def test_four_patches_make_one_token(model, prompts):
    for inputs in (prompts.one_image, prompts.two_images):
        with model.trace(**inputs):
            mask = model.vision.image_token_mask.save()
            fed = model.projector.input.save()
        assert len(fed) // 4 == mask.sum() == (inputs["image_grid_thw"].prod(-1) // 4).sum()


def test_features_are_the_mergers_output_as_it_is(model, prompts):
    with model.trace(**prompts.two_images):
        assert torch.equal(model.projector.output, model.vision.image_features)
