"""What holds of the Qwen encoder: its merger is the projector, its attention runs once per image."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch

import vlscope
from sites import collect, difference, resolve


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


def test_the_loop_over_cu_seqlens_gives_the_patterns_of_the_images(model, prompts):
    attn = model.vision.layers[1].self_attn
    for inputs in (prompts.one_image, prompts.two_images, prompts.padded_mixed):
        with model.trace(**inputs):
            cu = attn.inputs[1]["cu_seqlens"].save()
            q = attn.attention_queries.save()
            k = attn.attention_keys.save()
            served = attn.image_attention_scores, attn.image_attention_probabilities
        made = [], []
        for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            made[0].append(q[0, :, a:b] @ k[0, :, a:b].transpose(-1, -2) * model.vision.head_dim**-0.5)
            made[1].append(made[0][-1].softmax(-1))
        for ours, theirs in zip(served, made, strict=True):
            assert len(theirs) == len(inputs["image_grid_thw"])
            assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_each_pattern_times_that_images_values_is_the_head_outputs(attention, model, prompts):
    for attn in (block.self_attn for block in model.vision.layers):
        with model.trace(**prompts.two_images):
            cu = attn.inputs[1]["cu_seqlens"].tolist()
            values = attn.attention_values.save()
            patterns = attn.image_attention_probabilities
            heads = attn.attention_head_outputs.save()
        for pattern, a, b in zip(patterns, cu[:-1], cu[1:], strict=True):
            made = (pattern @ values[0, :, a:b]).transpose(0, 1)
            if attention == "eager":
                assert torch.equal(made, heads[0, a:b])
            torch.testing.assert_close(made, heads[0, a:b], rtol=1e-5, atol=1e-5)


def test_the_interior_is_the_same_under_both_implementations(name, vlscope_model, prompts):
    at = "vision.layers.0.self_attn"
    interior = [f"{at}.attention_{part}" for part in ("queries", "keys", "values")]
    interior += [f"{at}.image_attention_scores", f"{at}.image_attention_probabilities"]
    runs = [collect(vlscope_model(name, attention), prompts.two_images, *interior) for attention in ("eager", "sdpa")]
    for eager, sdpa in zip(*runs, strict=True):
        assert difference(sdpa, eager) is None


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
