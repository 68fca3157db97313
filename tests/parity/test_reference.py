"""The recorder is trusted as far as these tests reach: watching changes nothing, and what it wrote down adds up."""

import re

import pytest
import torch

import tiny
from sites import difference, each
from vlscope.verify import reference
from vlscope.verify.prompts import CASES

MODELS = [*tiny.CONFIGS, "demo"]
IMPLEMENTATIONS = ["eager", "sdpa"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_watching_leaves_the_logits_as_they_are(name, attention, case, reference_model, reference_run, inputs):
    plain = reference.plain(reference_model(name, attention), inputs(name, case))
    watched = reference_run(name, attention, case).logits
    if case == "images_and_videos":  # unwatched, the tower runs twice
        torch.testing.assert_close(watched, plain, rtol=1e-5, atol=1e-5 * plain.abs().max().item())
    else:
        assert torch.equal(watched, plain)


@pytest.mark.parametrize("case", ["one_image", "two_images", "padded_mixed", "videos", "images_and_videos"])
@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_recorded_values_obey_the_block_and_deepstack_identities(name, attention, case, reference_run):
    values = reference_run(name, attention, case).values
    calls = reference_run(name, attention, case).calls
    for tower in ("", "vision."):
        blocks = sum(key.startswith(f"{tower}layers.") and key.endswith(".layer_input") for key in values)
        assert blocks
        for i in range(blocks):
            at = f"{tower}layers.{i}"
            mixer = "linear_attn" if f"{at}.linear_attn.states" in values else "self_attn"
            middle = values[f"{at}.layer_input"] + values[f"{at}.{mixer}.attention_output"]
            assert torch.equal(middle + values[f"{at}.mlp.mlp_output"], values[f"{at}.layer_output"])
            heads = values[f"{at}.{mixer}.attention_head_outputs"]
            assert heads.shape[1] == values[f"{at}.layer_input"].shape[1]
            shape = heads.shape if mixer == "linear_attn" else heads.transpose(1, 2).shape
            assert shape[:-1] == values[f"{at}.{mixer}.attention_queries"].shape[:-1]
    for kind in ("image", "video"):
        mask = values[f"vision.{kind}_token_mask"]
        if mask.any():
            assert torch.equal(values["layers.0.layer_input"][mask], values[f"vision.{kind}_features"])
    mask = values["vision.visual_token_mask"]
    taps = sum(key.endswith("deepstack_output") for key in values)
    assert (taps > 0) == (name in {**tiny.QWEN3_VL, **tiny.QWEN3_VL_MOE, "demo": None})
    for k in range(taps):
        following = f"layers.{k + 1}.layer_input"
        entering = values[following] if following in values else calls["model.language_model.norm"].args[0]
        out = values[f"layers.{k}.layer_output"]
        assert torch.equal(entering[mask], out[mask] + values[f"layers.{k}.deepstack_output"])
        assert torch.equal(entering[~mask], out[~mask])


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_recorded_pattern_makes_the_recorded_heads_under_eager(name, reference_run):
    values = reference_run(name, "eager", "padded_mixed").values
    at = [key.rpartition(".")[0] for key in values if re.match(r"layers.*attention_scores", key)][-1]
    groups = values[f"{at}.attention_queries"].shape[1] // values[f"{at}.attention_keys"].shape[1]
    value = values[f"{at}.attention_values"].repeat_interleave(groups, dim=1)
    heads = values[f"{at}.attention_probabilities"] @ value
    assert torch.equal(heads.transpose(1, 2), values[f"{at}.attention_head_outputs"])


FIXED = ("input_ids", "attention_mask", "next_token_probs")


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_an_edit_that_changes_nothing_is_neutral_and_one_that_does_moves_the_logits(
    attention, reference_model, reference_run, inputs
):
    name, case = "unordered_taps", "two_images"
    model, watched = reference_model(name, attention), reference_run(name, attention, case)
    for site, value in watched.values.items():
        elsewhere = re.search(r"layers\.[023]", site) and "deepstack" not in site
        if site in FIXED or site.endswith("_token_mask") or elsewhere:
            continue
        same = reference.run(model, inputs(name, case), {site: lambda x: x})
        recomputed = attention == "sdpa" and site.endswith(("attention_scores", "attention_probabilities"))
        if recomputed:  # heads are then made from the pattern, not by the fused kernel
            torch.testing.assert_close(same.logits, watched.logits, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(same.logits, watched.logits), site
        moved = reference.run(model, inputs(name, case), {site: lambda x: x.roll(1, dims=-1)})
        assert difference(moved.values[site], each(lambda x: x.roll(1, dims=-1), value)) is None, site
        change = (moved.logits - watched.logits).abs().max()
        assert change > 1e-2 or site == "vision.tower_output", (site, change)


def test_a_tapped_block_is_followed_by_its_own_merger(reference_run):
    order = reference_run("unordered_taps", "eager", "one_image").order
    at = order.index
    assert at("vision.layers.0.layer_output") < at("model.visual.deepstack_merger_list.1.inputs")
    assert at("model.visual.deepstack_merger_list.1.output") < at("vision.layers.1.layer_input")
    assert at("vision.layers.2.layer_output") < at("model.visual.deepstack_merger_list.0.inputs")
    assert at("model.visual.deepstack_merger_list.0.output") < at("vision.layers.3.layer_input")
    assert at("projector.output") < at("vision.tower_output") < at("vision.image_features") < at("layers.0.layer_input")
    assert at("layers.1.layer_output") < at("layers.1.deepstack_output") < at("layers.2.layer_input")
