"""What holds of DeepStack: which blocks have it, what it adds and where, and what comes of writing it."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch

from identities.models import QWEN3_VL
from sites import collect


@pytest.fixture(params=QWEN3_VL)
def name(request):
    return request.param


def taps_of(model):
    return min(len(model.config["vision_config"]["deepstack_visual_indexes"]), model.num_layers)


def entering(model, k):
    """Where the stream is read after the add behind block k."""
    return f"layers.{k + 1}.input" if k + 1 < model.num_layers else "norm.input"


def test_with_videos_a_level_is_added_at_the_visual_tokens_in_the_order_of_the_prompt(model, prompts):
    """The tower has the images first, the prompt has them where it has them."""
    indexes = model.config["vision_config"]["deepstack_visual_indexes"]
    inputs = prompts.images_and_videos
    for k, block in enumerate(sorted(indexes)[: taps_of(model)]):
        image_mask, mask, made, out, added, after = collect(
            model,
            inputs,
            "vision.image_token_mask",
            "vision.visual_token_mask",
            f"vision.deepstack_merger_list.{indexes.index(block)}.output",
            f"layers.{k}.layer_output",
            f"layers.{k}.deepstack_output",
            entering(model, k),
        )
        images = int(image_mask.sum())
        assert torch.equal(after[mask], out[mask] + added)
        assert torch.equal(after[~mask], out[~mask])
        assert torch.equal(added[image_mask[mask]], made[:images])
        assert torch.equal(added[~image_mask[mask]], made[images:])
        assert not torch.equal(added, made)


def test_a_saved_block_output_stays_as_it_was_before_the_add(model, prompts):
    (alone,) = collect(model, prompts.one_image, "layers.0.layer_output")
    with_next, _ = collect(model, prompts.one_image, "layers.0.layer_output", entering(model, 0))
    assert torch.equal(alone, with_next)
