"""The model as a whole: scan, the helpers on tokens, weights edited by the user, messages, the command line."""

import logging
import subprocess
import sys

import pytest
import torch

import vlscope
from vlscope.cli import main

PROMPT = "What color is the square?"


@pytest.fixture
def model():
    return vlscope.load("demo")


@pytest.fixture(scope="module")
def red():
    return vlscope.demo.picture("red", size=(64, 64))


def test_scan_foretells_shape_and_dtype_of_every_value_without_weights(model, red):
    shapes = vlscope.load("demo", dispatch=False).scan(PROMPT, images=[red])
    with model.trace(PROMPT, images=[red]):
        for site in (
            "vision.image_token_mask",
            "token_embeddings",
            "vision.layers.1.self_attn.attention_queries",
            "vision.layers.1.layer_output",
            "projector.output",
            "vision.image_features",
            "layers.0.deepstack_output",
            "layers.3.self_attn.attention_probabilities",
            "layers.3.self_attn.o_proj.input",
            "layers.5.mlp.mlp_output",
            "logits",
            "next_token_probs",
        ):
            value = model.get(site)
            assert (shapes[site].shape, shapes[site].dtype) == (value.shape, value.dtype), site


def test_a_trace_takes_videos_and_how_their_frames_are_taken(model, red):
    clip = [red] * 8
    for options, groups in (
        ({}, 2),
        ({"fps": 1, "video_metadata": [{"fps": 1}]}, 4),
        ({"num_frames": 6}, 3),
        ({"do_sample_frames": False}, 4),
    ):
        encoding = model.processor.encode_prompt(PROMPT, red, [clip], **options)
        with model.trace(PROMPT, images=[red], videos=[clip], **options):
            assert torch.equal(model.input_ids, encoding["input_ids"])
            features = model.vision.video_features.save()
        assert len(features) == groups * 4
        assert torch.equal(model(encoding).logits, model(PROMPT, images=[red], videos=clip, **options).logits)
        assert model.scan(PROMPT, videos=[clip], **options)["vision.video_features"].shape == features.shape
    messages = [{"role": "user", "content": [{"type": "video", "video": clip}, {"type": "text", "text": PROMPT}]}]
    beside = model(PROMPT, videos=[clip], num_frames=6).logits
    assert torch.equal(model(messages, num_frames=6).logits, beside)


def test_videos_are_refused_where_they_cannot_go(model, red):
    with pytest.raises(vlscope.InputError, match="videos were given without a prompt"):
        model.trace(videos=[[red] * 4])
    with pytest.raises(TypeError, match="fps was given without videos"):
        model.trace(PROMPT, fps=2)
    with pytest.raises(vlscope.InputError, match="pixel_values_videos was given without video_grid_thw"):
        model(input_ids=torch.tensor([[1]]), pixel_values_videos=torch.zeros(4, 1536))
    text = vlscope.load("demo", task="text-generation")
    with pytest.raises(vlscope.InputError, match="videos were given .*text-generation"):
        text.trace(PROMPT, videos=[[red] * 4])
    encoding = model.processor.encode_prompt(PROMPT, videos=[[red] * 4])
    with pytest.raises(vlscope.InputError, match="videos were given .*text-generation"):
        text(encoding)


def test_scan_leaves_out_what_a_text_does_not_reach(model):
    sites = model.scan("Hello")
    assert "layers.0.layer_output" in sites
    assert not any("deepstack" in site or site.startswith("vision.layers") for site in sites)


def test_an_edited_weight_counts_from_now_on_and_is_named_once(model, caplog):
    before = model("Hello").logits
    with caplog.at_level(logging.WARNING, logger="vlscope"):
        model.layers[2].mlp.down_proj.weight.mul_(0.5)
        after = model("Hello").logits
        again = model("Hello").logits
    named = [record.getMessage() for record in caplog.records if "down_proj" in record.getMessage()]
    assert len(named) == 1 and "layers.2.mlp.down_proj.weight" in named[0]
    assert not torch.equal(before, after) and torch.equal(after, again)
    assert torch.equal(vlscope.load("demo")("Hello").logits, before), "the edit reached the file"


def test_the_likeliest_tokens_are_named(model, red):
    with model.trace(PROMPT, images=[red]):
        last = model.layers[-1].layer_output[0, -1:].save()
        probs = model.next_token_probs.save()
    (closest,) = model.get_topk_closest_tokens(last, k=3)
    assert list(closest) == list(model.probs_to_dict(probs[0], k=3))
    assert next(iter(closest)) == "Red" and len(closest) == 3
    assert sum(model.probs_to_dict(probs[0], k=10**6).values()) == pytest.approx(1.0, abs=1e-5)


def test_values_describe_themselves_on_their_class(model):
    value = type(model.layers[0]).layer_output
    assert value.layout is vlscope.layouts.Residual and value.dims == ("batch", "seq", "hidden_size")
    assert "before any DeepStack add" in value.__doc__
    with model.trace("Hello"):
        stream = model.layers[0].layer_output
    assert isinstance(stream, vlscope.layouts.Residual)
    assert not isinstance(stream, vlscope.layouts.Pattern)


def test_interior_values_and_layers_are_offered_by_tab_completion_without_a_trace(model):
    assert {"layer_output", "self_attn", "mlp", "input", "skip"} <= set(dir(model.layers[0]))
    assert {"layers", "vision", "projector", "logits", "lm_head"} <= set(dir(model))


def test_the_command_line_prints_the_values_of_a_model(capsys):
    assert main(["values", "demo"]) == 0
    printed = capsys.readouterr().out
    assert "(layer_output) -> Residual [batch seq hidden_size]" in printed and "Vision Config" in printed


def test_the_command_line_reports_a_wrong_path_in_one_line(tmp_path):
    wrong = tmp_path / "nothing here"
    command = [sys.executable, "-m", "vlscope", "values", str(wrong)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and str(wrong) in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1
