"""What holds of videos: their tokens, their features, frames that do not see each other, images beside them."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch

import tiny
import vlscope
from identities.models import UNWINDOWED
from sites import collect

MASKS = [f"vision.{kind}_token_mask" for kind in ("image", "video", "visual")]


@pytest.mark.parametrize("name", UNWINDOWED)
def test_the_features_are_the_two_parts_of_the_projectors_output(model, prompts):
    with model.trace(**prompts.images_and_videos):
        projected = model.projector.output.save()
        videos, images = model.vision.video_features.save(), model.vision.image_features.save()
    assert torch.equal(projected, torch.cat([images, videos]))
    for inputs, kind in ((prompts.two_images, "image"), (prompts.videos, "video")):
        with model.trace(**inputs):
            projected = model.projector.output
            assert getattr(model.vision, f"{kind}_features").data_ptr() == projected.data_ptr()


@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("edited, other", [("image", "video"), ("video", "image")])
def test_each_part_is_written_alone(model, prompts, edited, other, assigned):
    inputs = prompts.images_and_videos
    *masks, clean = collect(model, inputs, *MASKS, "layers.0.input")
    mask = masks[edited == "video"]
    with model.trace(**inputs):
        kept = getattr(model.vision, f"{other}_features").clone()
        if assigned:
            value = getattr(model.vision, f"{edited}_features")
            setattr(model.vision, f"{edited}_features", torch.zeros_like(value))
        else:
            getattr(model.vision, f"{edited}_features")[:] = 0
        assert torch.equal(getattr(model.vision, f"{other}_features"), kept)
        entering = model.layers[0].input.save()
    assert entering[mask].count_nonzero() == 0
    assert torch.equal(entering[~mask], clean[~mask])


def test_both_parts_are_written_in_one_trace_in_any_order(model, prompts):
    with model.trace(**prompts.images_and_videos):
        visual = model.vision.visual_token_mask.save()
        model.vision.video_features[:] = 2
        model.vision.image_features = torch.ones_like(model.vision.image_features)
        model.vision.video_features[:] *= 2
        entering = model.layers[0].input.save()
    ids = prompts.images_and_videos["input_ids"][visual]
    expected = torch.where(ids == tiny.IMAGE, 1.0, 4.0)[:, None].expand(-1, model.hidden_size)
    assert torch.equal(entering[visual], expected)


@pytest.mark.parametrize(
    "case, missing, there, advice",
    [
        ("two_images", "video", "image", r"videos=\[\.\.\.\]"),
        ("videos", "image", "video", r"images=\[\.\.\.\]"),
    ],
)
def test_what_the_prompt_lacks_is_refused_before_the_forward_moves(model, prompts, case, missing, there, advice):
    inputs = getattr(prompts, case)
    message = f"vision.{missing}_features is not reached: there is no {missing} in this prompt. Give {advice}"
    with model.trace(**inputs):
        with pytest.raises(vlscope.NotReachedError, match=message):
            getattr(model.vision, f"{missing}_features")
        model.input_ids
        getattr(model.vision, f"{there}_features")
        for _ in range(2):  # also where the forward stands at their common location
            with pytest.raises(vlscope.NotReachedError, match=message):
                getattr(model.vision, f"{missing}_features")
        with pytest.raises(vlscope.NotReachedError, match=message):
            setattr(model.vision, f"{missing}_features", torch.zeros(1))
        logits = model.logits.save()
    assert torch.equal(logits, model(**inputs).logits)


def test_masks_are_copies_that_nobody_assigns(model, prompts):
    with model.trace(**prompts.images_and_videos):
        for mask in ("image_token_mask", "video_token_mask", "visual_token_mask"):
            value = getattr(model.vision, mask)
            value[:] = False
            with pytest.raises(AttributeError, match="assign model.input_ids"):
                setattr(model.vision, mask, value)
        logits = model.logits.save()
    assert torch.equal(logits, model(**prompts.images_and_videos).logits)


def test_every_frame_has_the_same_places(model, prompts):
    """What tells frames apart is the text between them: equal frames leave the tower equal."""
    inputs = dict(prompts.videos)
    t, h, w = inputs["video_grid_thw"][0].tolist()
    pixels = inputs["pixel_values_videos"].clone()
    pixels[: t * h * w] = pixels[: h * w].repeat(t, 1)
    entering, features = collect(
        model, {**inputs, "pixel_values_videos": pixels}, "vision.layers.0.input", "vision.video_features"
    )
    frames = features[: t * h * w // 4].view(t, h * w // 4, -1)
    assert torch.equal(entering[: h * w], entering[h * w : 2 * h * w])
    torch.testing.assert_close(frames[0], frames[1])


def test_a_row_with_videos_gives_the_logits_it_gives_alone(model, prompts):
    inputs = prompts.images_and_videos
    together = model(**inputs).logits
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    rows = inputs["image_grid_thw"].prod(1).tolist(), inputs["video_grid_thw"].prod(1).tolist()
    images, videos = inputs["pixel_values"].split(rows[0]), inputs["pixel_values_videos"].split(rows[1])
    for row, index in ((0, 0), (2, 1)):  # row 1 is a text
        alone = model(
            input_ids=ids[row : row + 1, mask[row]],
            pixel_values=images[index],
            image_grid_thw=inputs["image_grid_thw"][index : index + 1],
            pixel_values_videos=videos[index],
            video_grid_thw=inputs["video_grid_thw"][index : index + 1],
        )
        torch.testing.assert_close(together[row, mask[row]], alone.logits[0], rtol=1e-4, atol=1e-4)


def test_gradients_reach_each_part_alone(model, prompts):
    with model.trace(**prompts.images_and_videos):
        videos = model.vision.video_features
        videos.requires_grad_()
        images = model.vision.image_features
        model.logits[0, -1].max().backward()
    assert videos.grad.abs().max() > 0
    assert images.grad is None and not images.requires_grad


def test_scan_foretells_what_a_prompt_with_videos_reaches(model, prompts):
    for case in ("videos", "images_and_videos"):
        inputs = getattr(prompts, case)
        shapes = model.scan(**inputs)
        assert ("vision.image_features" in shapes) == ("image_grid_thw" in inputs)
        kinds = ("image_features", "video_features", "_token_mask", "deepstack_output", "layer_output")
        sites = sorted((site for site in shapes if site.endswith(kinds)), key=model.order)
        for site, value in zip(sites, collect(model, inputs, *sites), strict=True):
            assert (value.shape, value.dtype) == (shapes[site].shape, shapes[site].dtype), site
