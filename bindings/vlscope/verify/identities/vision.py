"""The vision tower: masks, the scatter, the blocks, the merger, patterns of each image."""

from __future__ import annotations

import torch

from ...errors import NotReachedError, Unavailable
from ...sites import read, write
from .identity import (
    Model,
    Prompts,
    cells,
    close,
    equal,
    has_several_blocks,
    identity,
    logits_of,
    moved,
    raises,
    require,
    values,
)


def _last(model: Model) -> str:
    return f"vision.layers.{model.vision.num_layers - 1}"


def _stages(model: Model) -> list[str]:
    """A value of each kind, from the pixels to the text model."""
    last, attention = _last(model), f"{_last(model)}.self_attn"
    return [
        "vision.patch_embeddings",
        "vision.layers.0.layer_input",
        *(f"{attention}.attention_{part}" for part in ("queries", "keys", "values", "head_outputs", "output")),
        f"{last}.mlp.mlp_output",
        f"{last}.layer_output",
        "projector.input",
        "projector.output",
        "vision.image_features",
    ]


@identity()
def the_mask_marks_the_image_tokens_and_counts_the_features(model: Model, prompts: Prompts) -> None:
    for inputs in (prompts.one_image, prompts.two_images, prompts.padded_mixed):
        mask, features, entering = values(
            model, inputs, "vision.image_token_mask", "vision.image_features", "layers.0.input"
        )
        equal(mask, inputs["input_ids"] == model.config["image_token_id"], "vision.image_token_mask")
        require(mask.sum() == len(features), f"{len(features)} features for {int(mask.sum())} image tokens")
        equal(entering[mask], features, "layers.0.input at the image tokens")


@identity()
def zeroed_features_change_only_the_image_tokens_entering_the_text_model(model: Model, prompts: Prompts) -> None:
    mask, clean = values(model, prompts.two_images, "vision.image_token_mask", "layers.0.input")
    with model.trace(**prompts.two_images):
        model.vision.image_features[:] = 0
        entering = model.layers[0].input
    require(entering[mask].count_nonzero() == 0, "layers.0.input at the image tokens is not zero")
    equal(entering[~mask], clean[~mask], "layers.0.input elsewhere")


@identity()
def a_write_at_each_stage_lands_in_place_and_assigned_alike(model: Model, prompts: Prompts) -> None:
    clean = logits_of(model, prompts.two_images)
    for site in _stages(model):
        in_place = logits_of(model, prompts.two_images, lambda site=site: read(model, site).mul_(-0.5))  # type: ignore[misc]
        assigned = logits_of(
            model,
            prompts.two_images,
            lambda site=site: write(model, site, read(model, site) * -0.5),  # type: ignore[misc]
        )
        equal(assigned, in_place, f"logits after a write to {site}")
        moved(in_place, clean, f"the logits after a write to {site}")


@identity()
def assigning_a_value_to_itself_is_neutral(model: Model, prompts: Prompts) -> None:
    clean = logits_of(model, prompts.two_images)
    for site in _stages(model):
        copied = logits_of(
            model,
            prompts.two_images,
            lambda site=site: write(model, site, read(model, site).clone()),  # type: ignore[misc]
        )
        equal(copied, clean, f"logits after {site} was assigned to itself")


@identity()
def a_write_to_the_tower_output_moves_nothing(model: Model, prompts: Prompts) -> None:
    edited = logits_of(model, prompts.one_image, lambda: model.vision.tower_output.zero_())
    equal(edited, logits_of(model, prompts.one_image), "logits")


@identity()
def tower_blocks_add_their_attention_and_their_mlp(model: Model, prompts: Prompts) -> None:
    parts = ("layer_input", "self_attn.attention_output", "mlp.mlp_output", "layer_output")
    for i in range(model.vision.num_layers):
        x, attention, mlp, out = values(model, prompts.two_images, *(f"vision.layers.{i}.{part}" for part in parts))
        equal(x + attention + mlp, out, f"vision.layers.{i}.layer_output")


@identity(has_several_blocks)
def the_stream_of_patches_is_the_native_one_under_a_leading_axis(model: Model, prompts: Prompts) -> None:
    pairs = (
        ("vision.patch_embed.output", "vision.patch_embeddings"),
        ("vision.layers.0.output", "vision.layers.0.layer_output"),
        ("projector.input", "vision.tower_output"),
    )
    for native, named in pairs:
        one, other = values(model, prompts.two_images, native, named)
        equal(other, one[None], named)
    with model.trace(**prompts.two_images):
        model.vision.layers[0].layer_output[:, 3] = 7.0
        require((model.vision.layers[0].output[3] == 7).all(), "a write to layer_output did not reach .output")
        new = model.vision.layers[0].layer_output * 2
        model.vision.layers[0].layer_output = new[0]
        entering = model.vision.layers[1].input
    equal(entering, new[0], "vision.layers.1.input after an assignment without the leading axis")


@identity(lambda model: hasattr(model.vision, "pos_embed"))
def the_first_block_reads_patches_and_the_resampled_table(model: Model, prompts: Prompts) -> None:
    patches, entering = values(model, prompts.one_image, "vision.patch_embeddings", "vision.layers.0.input")
    table = model.vision.pos_embed.weight.to(model.dtype)  # as stored, in a model that streams
    side = int(len(table) ** 0.5)
    _, height, width = prompts.one_image["image_grid_thw"][0].tolist()
    grid = torch.nn.functional.interpolate(
        table.T.reshape(1, -1, side, side), size=(height, width), mode="bilinear", align_corners=True
    )[0]
    blocks = grid.reshape(-1, height // 2, 2, width // 2, 2).permute(1, 3, 2, 4, 0).flatten(0, 3)
    close(entering, patches[0] + blocks, "vision.layers.0.input")
    moved(entering, patches[0], "vision.layers.0.input, as against the patches alone,")


@identity(lambda model: model.family == "qwen2_vl")
def the_first_block_reads_the_patches(model: Model, prompts: Prompts) -> None:
    patches, entering = values(model, prompts.one_image, "vision.patch_embeddings", "vision.layers.0.input")
    equal(entering, patches[0], "vision.layers.0.input")


@identity(lambda model: model.family == "qwen2_5_vl")
def the_first_block_reads_the_patches_in_another_order(model: Model, prompts: Prompts) -> None:
    patches, entering = values(model, prompts.large_image, "vision.patch_embeddings", "vision.layers.0.input")
    (image,) = model.image_tokens(**prompts.large_image)
    order = image.token_of(torch.arange(0, len(entering), 4))
    tokens = patches[0].unflatten(0, (-1, 4))[order]
    equal(entering, tokens.flatten(0, 1), "vision.layers.0.input")


@identity()
def patches_of_one_image_are_the_same_bits_whatever_another_image_is(model: Model, prompts: Prompts) -> None:
    inputs = prompts.two_images
    patches = int(inputs["image_grid_thw"][0].prod())
    changed = dict(inputs, pixel_values=inputs["pixel_values"].clone())
    changed["pixel_values"][patches:] *= -1
    sites = [f"vision.layers.{i}.layer_output" for i in range(model.vision.num_layers)]
    for site, a, b in zip(sites, values(model, inputs, *sites), values(model, changed, *sites), strict=True):
        equal(b[:, :patches], a[:, :patches], f"{site} of the first image")
        require(not torch.equal(a[:, patches:], b[:, patches:]), f"{site} of the second image did not change")


@identity()
def the_merger_is_the_projector(model: Model, prompts: Prompts) -> None:
    with model.trace(**prompts.one_image):
        require(model.projector.input is model.model.visual.merger.input, "projector.input is not the merger's")
        require(model.projector.output is model.vision.merger.output, "projector.output is not the merger's")


@identity()
def four_patches_make_one_token(model: Model, prompts: Prompts) -> None:
    for inputs in (prompts.one_image, prompts.two_images):
        mask, fed = values(model, inputs, "vision.image_token_mask", "projector.input")
        tokens = sum(map(cells, inputs["image_grid_thw"]))
        require(len(fed) // 4 == int(mask.sum()) == tokens, f"{len(fed)} patches, {int(mask.sum())} image tokens")


@identity()
def features_are_the_rows_of_the_mergers_output(model: Model, prompts: Prompts) -> None:
    """In their order; but for a tower with windows, which has them window by window."""
    projected, features = values(model, prompts.large_image, "projector.output", "vision.image_features")
    if model.vision.window_size:
        (image,) = model.image_tokens(**prompts.large_image)
        order = image.token_of(torch.arange(0, 4 * len(features), 4))
        features = features[order]
    equal(features, projected, "vision.image_features")


@identity()
def no_one_tensor_is_the_pattern_of_a_tower_block(model: Model, prompts: Prompts) -> None:
    attention = model.vision.layers[0].self_attn
    for name in ("attention_scores", "attention_probabilities"):
        reason = raises(Unavailable, lambda name=name: getattr(attention, name), name)  # type: ignore[misc]
        require("eager" not in reason, f"{name} puts it down to the attention implementation: {reason}")


@identity()
def queries_keys_and_values_of_the_tower_are_rotated_parts_of_one_projection(model: Model, prompts: Prompts) -> None:
    attention = model.vision.layers[-1].self_attn
    with model.trace(**prompts.two_images):
        cos, sin = attention.inputs[1]["position_embeddings"]
        qkv = attention.qkv.output.clone()
        queries, keys, rows = attention.attention_queries, attention.attention_keys, attention.attention_values
    # [3, 1, heads, patches, head_dim]
    parts = qkv.view(len(qkv), 3, model.vision.num_heads, -1).permute(1, 2, 0, 3)[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    close(queries, rotate(parts[0]), "attention_queries")
    close(keys, rotate(parts[1]), "attention_keys")
    equal(rows, parts[2].contiguous(), "attention_values")


@identity()
def the_pattern_of_each_image_is_that_of_its_queries_and_keys(model: Model, prompts: Prompts) -> None:
    attention = model.vision.layers[-1].self_attn
    for inputs in (prompts.one_image, prompts.two_images, prompts.padded_mixed):
        with model.trace(**inputs):
            ends = attention.inputs[1]["cu_seqlens"].tolist()
            queries, keys, rows = attention.attention_queries, attention.attention_keys, attention.attention_values
            scores, patterns = attention.image_attention_scores, attention.image_attention_probabilities
            heads = attention.attention_head_outputs
        require(len(patterns) == len(ends) - 1, f"{len(patterns)} patterns for {len(ends) - 1} segments")
        for i, (a, b) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
            made = queries[0, :, a:b] @ keys[0, :, a:b].transpose(-1, -2) * model.vision.head_dim**-0.5
            equal(scores[i], made, f"image_attention_scores[{i}]")
            equal(patterns[i], made.softmax(-1), f"image_attention_probabilities[{i}]")
            close(
                heads[0, a:b], (patterns[i] @ rows[0, :, a:b]).transpose(0, 1), f"attention_head_outputs of segment {i}"
            )


@identity()
def heads_of_the_tower_projected_are_its_attention_output(model: Model, prompts: Prompts) -> None:
    at = f"{_last(model)}.self_attn"
    heads, output = values(model, prompts.two_images, f"{at}.attention_head_outputs", f"{at}.attention_output")
    proj = model.vision.layers[-1].self_attn.proj
    weight = proj.weight.to(model.dtype)
    close(output, torch.nn.functional.linear(heads.flatten(2), weight, proj.bias), f"{at}.attention_output")


@identity()
def a_text_has_a_mask_and_no_image_value(model: Model, prompts: Prompts) -> None:
    with model.trace(**prompts.text):
        mask = model.vision.image_token_mask
        require(mask.shape == prompts.text["input_ids"].shape and not mask.any(), "vision.image_token_mask")
        for site in (*_stages(model), "vision.tower_output"):
            raises(NotReachedError, lambda site=site: read(model, site), site)  # type: ignore[misc]
        logits = model.logits
    equal(logits, logits_of(model, prompts.text), "logits")
