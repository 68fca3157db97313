"""What holds of every vision tower: the mask, the scatter, the tower's blocks, prompts without images."""

import pytest
import torch

import tiny
import vlscope
from identities.models import QWEN3_VL
from sites import collect, resolve, write

STAGES = (
    "vision.patch_embeddings",
    "vision.layers.0.layer_input",
    "vision.layers.1.self_attn.attention_queries",
    "vision.layers.1.self_attn.attention_keys",
    "vision.layers.1.self_attn.attention_values",
    "vision.layers.1.self_attn.attention_head_outputs",
    "vision.layers.1.self_attn.attention_output",
    "vision.layers.1.mlp.mlp_output",
    "vision.layers.1.layer_output",
    "projector.input",
    "projector.output",
    "vision.image_features",
)


def test_the_mask_marks_the_image_tokens_and_counts_the_features(model, prompts):
    for inputs in (prompts.one_image, prompts.two_images, prompts.padded_mixed):
        mask, features, first = collect(
            model, inputs, "vision.image_token_mask", "vision.image_features", "layers.0.input"
        )
        assert torch.equal(mask, inputs["input_ids"] == tiny.IMAGE)
        assert mask.sum() == len(features)
        assert torch.equal(first[mask], features)


def test_zeroed_features_change_only_the_image_positions_entering_the_text_model(model, prompts):
    mask, clean = collect(model, prompts.two_images, "vision.image_token_mask", "layers.0.input")
    with model.trace(**prompts.two_images):
        model.vision.image_features[:] = 0
        entering = model.layers[0].input.save()
    assert entering[mask].count_nonzero() == 0
    assert torch.equal(entering[~mask], clean[~mask])


@pytest.mark.parametrize("site", STAGES)
def test_a_write_at_each_stage_lands_in_place_and_assigned_alike(model, prompts, site):
    (clean,) = collect(model, prompts.two_images, "logits")
    with model.trace(**prompts.two_images):
        resolve(model, site).mul_(-0.5)
        in_place = model.logits.save()
    with model.trace(**prompts.two_images):
        write(model, site, resolve(model, site) * -0.5)
        assigned = model.logits.save()
    assert torch.equal(in_place, assigned)
    assert (in_place - clean).abs().max() > 1e-3


@pytest.mark.parametrize("site", STAGES)
def test_assigning_a_value_to_itself_is_neutral(model, prompts, site):
    (clean,) = collect(model, prompts.two_images, "logits")
    with model.trace(**prompts.two_images):
        write(model, site, resolve(model, site))
        same = model.logits.save()
    with model.trace(**prompts.two_images):
        write(model, site, resolve(model, site).clone())
        copied = model.logits.save()
    assert torch.equal(same, clean) and torch.equal(copied, clean)


def test_a_write_to_the_tower_output_moves_nothing(model, prompts):
    (clean,) = collect(model, prompts.one_image, "logits")
    with model.trace(**prompts.one_image):
        model.vision.tower_output[:] = 0
        assert torch.equal(model.logits, clean)


def test_tower_blocks_add_their_attention_and_mlp(model, prompts):
    for i in range(model.vision.num_layers):
        at = f"vision.layers.{i}"
        x, native, attn, mlp, out = collect(
            model,
            prompts.two_images,
            f"{at}.layer_input",
            f"{at}.input",
            f"{at}.self_attn.attention_output",
            f"{at}.mlp.mlp_output",
            f"{at}.layer_output",
        )
        assert torch.equal(x + attn + mlp, out)
        assert native.ndim == 2 and torch.equal(native + attn + mlp, out)  # across the two forms, by broadcasting


def test_patch_embeddings_are_the_patch_modules_output(model, prompts):
    native, patches = collect(model, prompts.two_images, "vision.patch_embed.output", "vision.patch_embeddings")
    assert torch.equal(native[None], patches)


@pytest.mark.parametrize("name", QWEN3_VL)
def test_the_first_block_reads_patches_plus_the_resampled_table(model, prompts):
    patches, entering = collect(model, prompts.one_image, "vision.patch_embeddings", "vision.layers.0.input")
    table = model.vision.pos_embed.weight
    side = int(len(table) ** 0.5)
    _, height, width = prompts.one_image["image_grid_thw"][0].tolist()
    grid = torch.nn.functional.interpolate(
        table.T.reshape(1, -1, side, side), size=(height, width), mode="bilinear", align_corners=True
    )[0]
    blocks = grid.reshape(-1, height // 2, 2, width // 2, 2).permute(1, 3, 2, 4, 0).flatten(0, 3)
    torch.testing.assert_close(entering, patches[0] + blocks, rtol=1e-5, atol=1e-5)
    assert (entering - patches[0]).abs().max() > 1e-2


def test_an_image_alone_gives_the_rows_it_gives_beside_another(model, prompts):
    """No patch attends across images: rows of the first image are the same bits with and without the second."""
    inputs = prompts.two_images
    patches = int(inputs["image_grid_thw"][0].prod())
    changed = dict(inputs, pixel_values=inputs["pixel_values"].clone())
    changed["pixel_values"][patches:] *= -1
    sites = [f"vision.layers.{i}.layer_output" for i in range(model.vision.num_layers)]
    for a, b in zip(collect(model, inputs, *sites), collect(model, changed, *sites), strict=True):
        assert torch.equal(a[:, :patches], b[:, :patches])
        assert not torch.equal(a[:, patches:], b[:, patches:])


def test_a_text_prompt_has_a_mask_and_no_image_value(name, model, prompts):
    with model.trace(**prompts.text):
        mask = model.vision.image_token_mask.save()
        for site in (
            "vision.patch_embeddings",
            "vision.layers.0.layer_output",
            "vision.layers.1.self_attn.inputs",
            "projector.output",
            "vision.tower_output",
            "vision.image_features",
            *(("vision.deepstack_merger_list.0.output", "layers.0.deepstack_output") if name in QWEN3_VL else ()),
        ):
            with pytest.raises(vlscope.NotReachedError, match="image"):
                resolve(model, site)
        logits = model.logits.save()
    assert mask.shape == prompts.text["input_ids"].shape and not mask.any()
    assert torch.equal(logits, model(**prompts.text).logits)


def test_a_text_only_load_serves_no_vision_value(checkpoint, name, attention, prompts):
    model = vlscope.load(checkpoint(name), task="text-generation", attn_implementation=attention)
    reads = (
        lambda: model.vision.image_features,
        lambda: model.vision.layers[0].layer_output,
        lambda: model.vision.image_token_mask,
        lambda: model.vision.video_token_mask,
        lambda: model.vision.visual_token_mask,
        lambda: model.vision.video_features,
        lambda: model.projector.output,
        *([lambda: model.layers[0].deepstack_output] if name in QWEN3_VL else []),
    )
    for read in reads:
        with pytest.raises(vlscope.Unavailable, match="text-generation"):
            read()
    with model.trace(**prompts.text):
        for read in reads:
            with pytest.raises(vlscope.Unavailable, match="text-generation"):
                read()
        logits = model.logits.save()
    whole = vlscope.load(checkpoint(name), attn_implementation=attention)
    assert torch.equal(logits, whole(**prompts.text).logits)
    assert not any(row.startswith("vision.") for row in model.support())
