"""What holds of DeepStack: which blocks have it, what it adds and where, and what comes of writing it."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch

import vlscope
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


def test_only_the_first_blocks_have_a_level(model):
    for k, layer in enumerate(model.layers):
        if k < taps_of(model):
            with pytest.raises(ValueError):
                layer.deepstack_output
        else:
            with pytest.raises(vlscope.Unavailable, match=rf"layers\.{k}|{taps_of(model)}"):
                layer.deepstack_output


def test_each_level_is_its_mergers_output(model, prompts):
    """Levels go by the order of the tapped blocks; mergers by the order in which the config names them."""
    indexes = model.config["vision_config"]["deepstack_visual_indexes"]
    for level, block in enumerate(sorted(indexes)[: taps_of(model)]):
        merger = indexes.index(block)
        made, added = collect(
            model,
            prompts.two_images,
            f"vision.deepstack_merger_list.{merger}.output",
            f"layers.{level}.deepstack_output",
        )
        assert torch.equal(made, added)


def test_a_merger_reads_the_block_it_taps(model, prompts):
    indexes = model.config["vision_config"]["deepstack_visual_indexes"]
    for merger, block in enumerate(indexes):
        out, fed = collect(
            model, prompts.two_images, f"vision.layers.{block}.output", f"vision.deepstack_merger_list.{merger}.input"
        )
        assert torch.equal(out, fed)


def test_a_level_is_added_at_the_image_tokens_and_nowhere_else(model, prompts):
    for inputs in (prompts.one_image, prompts.padded_mixed):
        for k in range(taps_of(model)):
            mask, out, added, after = collect(
                model,
                inputs,
                "vision.image_token_mask",
                f"layers.{k}.layer_output",
                f"layers.{k}.deepstack_output",
                entering(model, k),
            )
            assert torch.equal(after[mask], out[mask] + added)
            assert torch.equal(after[~mask], out[~mask])


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


def test_a_zeroed_level_leaves_the_stream_and_moves_the_logits(model, prompts):
    (clean,) = collect(model, prompts.one_image, "logits")
    for k in range(taps_of(model)):
        with model.trace(**prompts.one_image):
            out = model.layers[k].layer_output.save()
            model.layers[k].deepstack_output[:] = 0
            after = model.layers[k + 1].input.save() if k + 1 < model.num_layers else model.norm.input.save()
            logits = model.logits.save()
        assert torch.equal(out, after)
        assert (logits - clean).abs().max() > 1e-3


def test_an_assigned_level_of_ones_adds_one(model, prompts):
    with model.trace(**prompts.one_image):
        mask = model.vision.image_token_mask.save()
        out = model.layers[0].layer_output.save()
        model.layers[0].deepstack_output = torch.ones_like(model.layers[0].deepstack_output)
        after = model.layers[1].input.save()
    assert torch.equal(after[mask], out[mask] + 1)


def test_past_the_taps_a_block_reads_what_the_last_one_left(model, prompts):
    for k in range(taps_of(model), model.num_layers - 1):
        out, after = collect(model, prompts.one_image, f"layers.{k}.layer_output", f"layers.{k + 1}.input")
        assert torch.equal(out, after)
        with model.trace(**prompts.one_image):
            assert model.layers[k].layer_output is model.layers[k + 1].input


def test_a_text_prompt_reaches_no_level(model, prompts):
    with model.trace(**prompts.text):
        with pytest.raises(vlscope.NotReachedError, match=r"deepstack_output"):
            model.layers[0].deepstack_output
        out = model.layers[0].layer_output.save()
        assert model.layers[1].input is out
