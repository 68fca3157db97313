"""Videos: their tokens, their features, frames that do not see each other, images beside them."""

from __future__ import annotations

import torch

from .identity import Model, Prompts, close, equal, identity, require, values

_MASKS = [f"vision.{kind}_token_mask" for kind in ("image", "video", "visual")]


@identity()
def the_masks_mark_the_tokens_of_each_kind_and_count_the_features(model: Model, prompts: Prompts) -> None:
    inputs = prompts.images_and_videos
    images, videos, visual, of_images, of_videos, entering = values(
        model, inputs, *_MASKS, "vision.image_features", "vision.video_features", "layers.0.input"
    )
    equal(images, inputs["input_ids"] == model.config["image_token_id"], _MASKS[0])
    equal(videos, inputs["input_ids"] == model.config["video_token_id"], _MASKS[1])
    equal(visual, images | videos, _MASKS[2])
    equal(entering[images], of_images, "layers.0.input at the image tokens")
    equal(entering[videos], of_videos, "layers.0.input at the video tokens")


@identity()
def features_of_images_and_videos_are_written_alone(model: Model, prompts: Prompts) -> None:
    with model.trace(**prompts.images_and_videos):
        images, visual = model.vision.image_token_mask, model.vision.visual_token_mask
        model.vision.video_features[:] = 4
        model.vision.image_features = torch.ones_like(model.vision.image_features)
        entering = model.layers[0].input
    expected = torch.where(images, 1.0, 4.0)[visual]
    equal(entering[visual], expected[:, None].expand(-1, model.hidden_size).clone(), "layers.0.input")


@identity()
def one_pass_over_images_and_videos_gives_what_each_gives_alone(model: Model, prompts: Prompts) -> None:
    inputs = prompts.images_and_videos
    together = values(model, inputs, "vision.image_features", "vision.video_features")
    ids = inputs["input_ids"]
    for kind, other, pixels, features in zip(
        ("image", "video"), ("video", "image"), ("pixel_values", "pixel_values_videos"), together, strict=True
    ):
        kept = ids[ids != model.config[f"{other}_token_id"]][None]
        alone = {"input_ids": kept, pixels: inputs[pixels], f"{kind}_grid_thw": inputs[f"{kind}_grid_thw"]}
        (value,) = values(model, alone, f"vision.{kind}_features")
        close(features, value, f"vision.{kind}_features", tolerance=1e-4)


@identity(lambda model: not model.vision.window_size)
def each_frame_is_a_segment_that_sees_no_other(model: Model, prompts: Prompts) -> None:
    inputs = prompts.videos
    grids = inputs["video_grid_thw"].tolist()
    with model.trace(**inputs):
        ends = model.vision.layers[0].inputs[1]["cu_seqlens"].tolist()
    lengths = [height * width for frames, height, width in grids for _ in range(frames)]
    require(ends == torch.tensor([0, *lengths]).cumsum(0).tolist(), f"cu_seqlens is {ends} for frames of {lengths}")
    frame = slice(lengths[0], lengths[0] + lengths[1])
    changed = dict(inputs, pixel_values_videos=inputs["pixel_values_videos"].clone())
    changed["pixel_values_videos"][frame] *= -1
    same = torch.ones(ends[-1], dtype=torch.bool)
    same[frame] = False
    sites = [f"vision.layers.{i}.layer_output" for i in range(model.vision.num_layers)]
    for site, a, b in zip(sites, values(model, inputs, *sites), values(model, changed, *sites), strict=True):
        equal(b[:, same], a[:, same], f"{site} of the other frames")
        require(not torch.equal(a[:, ~same], b[:, ~same]), f"{site} of the changed frame is as it was")


@identity()
def a_video_of_one_frame_is_an_image_under_another_token(model: Model, prompts: Prompts) -> None:
    inputs = prompts.two_images
    image, video = model.config["image_token_id"], model.config["video_token_id"]
    as_video = {
        "input_ids": inputs["input_ids"].masked_fill(inputs["input_ids"] == image, video),
        "attention_mask": inputs["attention_mask"],
        "pixel_values_videos": inputs["pixel_values"],
        "video_grid_thw": inputs["image_grid_thw"],
    }
    for site in ("layers.0.layer_input", "logits"):
        (one,), (other,) = values(model, inputs, site), values(model, as_video, site)
        equal(other, one, site)
