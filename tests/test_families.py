"""What tells the families apart: configs and their spellings, stored names, counts of weights, what is served."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
import vlscope
from vlscope.errors import CheckpointError, ConfigError, InputError

RELEASED = Path(__file__).parent / "data" / "configs"

# Tensors and parameters as the hub counts them.
COUNTS = {
    "qwen2-vl-2b-instruct": (729, 2_208_985_600),
    "qwen2-vl-7b-instruct": (730, 8_291_375_616),
    "qwen2-vl-72b-instruct": (1354, 73_405_560_320),
    "qwen2.5-vl-3b-instruct": (824, 3_754_622_976),
    "qwen2.5-vl-7b-instruct": (729, 8_292_166_656),
    "qwen2.5-vl-32b-instruct": (1161, 33_452_718_336),
    "qwen2.5-vl-72b-instruct": (1353, 73_410_777_344),
}
LINES = {"qwen2_5": "qwen2_5_vl", "qwen2": "qwen2_vl"}


@pytest.mark.parametrize("name", COUNTS)
def test_a_released_config_counts_to_the_tensor_and_the_parameter(name):
    assert vlscope.weight_counts(RELEASED / f"{name}.json") == COUNTS[name]


@pytest.fixture
def folder(checkpoint, tmp_path):
    """folder(name): a copy of a checkpoint that may be changed."""
    return lambda name: Path(shutil.copytree(checkpoint(name), tmp_path / name))


def change(folder, edit):
    """Rewrites config.json through `edit`, which changes the object in place or returns another."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(edit(config) or config))


def flat(config):
    """The spelling of the hub: the text model's keys at the top, and the rotary settings of transformers 4."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text |= {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2}
    text.pop("layer_types")
    config["vision_config"] = {
        k: v for k, v in config["vision_config"].items() if k not in ("rope_parameters", "model_type")
    }
    config["vision_config"]["in_chans"] = config["vision_config"].pop("in_channels")
    return {**text, **config}


@pytest.mark.parametrize("name", [*LINES, "qwen2_5_one_kv_head"])
def test_the_flat_spelling_of_the_hub_is_the_same_model(name, folder, vlscope_model, inputs):
    path = folder(name)
    change(path, flat)
    given = inputs(name, "one_image")
    assert torch.equal(vlscope.load(path)(**given).logits, vlscope_model(name)(**given).logits)


@pytest.mark.parametrize("name", [*LINES, "qwen2_one_kv_head"])
@pytest.mark.parametrize("spelling", ["old", "new", "base"])
def test_old_and_new_names_of_the_weights_are_the_same_model(name, spelling, folder, vlscope_model, inputs):
    path = folder(name)
    stored = load_file(path / "model.safetensors")
    new = {
        key
        if key.startswith("lm_head")
        else "model." + key
        if key.startswith("visual.")
        else f"model.language_model.{key[6:]}": value
        for key, value in stored.items()
    }
    assert any(key.startswith("visual.") for key in stored) and any(key.startswith("model.layers.") for key in stored)
    names = {
        "old": stored,
        "new": new,
        "base": {key if key.startswith("lm_head") else key.removeprefix("model."): value for key, value in new.items()},
    }
    save_file(names[spelling], path / "model.safetensors")
    given = inputs(name, "one_image")
    assert torch.equal(vlscope.load(path)(**given).logits, vlscope_model(name)(**given).logits)


def test_a_missing_bias_is_named(folder):
    path = folder("qwen2_5")
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.1.self_attn.k_proj.bias"]
    save_file(stored, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.bias.*not stored"):
        vlscope.load(path)


REFUSED = {
    "rms_norm_eps": (lambda c: c["text_config"].pop("rms_norm_eps") and None, r"text_config\.rms_norm_eps is missing"),
    "width": (lambda c: c["vision_config"].pop("hidden_size") and None, r"vision_config\.hidden_size is missing"),
    "seconds": (lambda c: c["vision_config"].pop("tokens_per_second") and None, "tokens_per_second is missing"),
    "windows": (
        lambda c: c["vision_config"].update(window_size=27),
        "window_size 27 is less than one image token of 28",
    ),
    "blocks": (
        lambda c: c["vision_config"].update(fullatt_block_indexes=[3]),
        r"fullatt_block_indexes\[0\] is 3, but the tower has 3 blocks",
    ),
    "projection": (
        lambda c: c["vision_config"].update(out_hidden_size=32),
        r"vision_config\.out_hidden_size is 32, but text_config\.hidden_size is 64",
    ),
    "sliding": (
        lambda c: c["text_config"].update(use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "use_sliding_window",
    ),
    "types": (
        lambda c: c["text_config"].update(layer_types=["full_attention", "sliding_attention", "full_attention"]),
        "sliding_attention",
    ),
    "heads": (lambda c: c["text_config"].update(head_dim=8), "head_dim is 8; this family has .* = 16"),
    "axes": (
        lambda c: c["text_config"]["rope_parameters"].update(mrope_section=[2, 2, 3]),
        r"mrope_section \[2, 2, 3\] must be three numbers that sum to head_dim / 2 = 8, not 7",
    ),
    "interleaved": (
        lambda c: c["text_config"]["rope_parameters"].update(mrope_interleaved=True),
        "mrope_interleaved is true; this family does not",
    ),
    "activation": (lambda c: c["vision_config"].update(hidden_act="gelu"), 'hidden_act must be silu, found "gelu"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_would_mean_another_model_is_refused(case, folder):
    edit, message = REFUSED[case]
    path = folder("qwen2_5")
    change(path, edit)
    with pytest.raises(ConfigError, match=message):
        vlscope.load(path)


@pytest.mark.parametrize("name", [*tiny.QWEN2_5_VL, *tiny.QWEN2_VL])
def test_deepstack_is_unavailable_and_says_why(name, vlscope_model, inputs):
    model = vlscope_model(name)
    reasons = model.support()["deepstack_output"]
    assert "has no DeepStack" in str(reasons)
    with pytest.raises(vlscope.Unavailable, match="has no DeepStack"), model.trace(**inputs(name, "one_image")):
        model.layers[0].deepstack_output  # noqa: B018


def test_the_window_is_on_the_model_and_on_its_card(vlscope_model):
    windowed, plain = vlscope_model("qwen2_5"), vlscope_model("qwen2")
    assert windowed.vision.window_size == 56 and plain.vision.window_size is None
    assert dict(windowed._config["vision_card"])["fullatt_block_indexes"] == "[1]"
    assert dict(plain._config["vision_card"])["window_size"] == "none"
    assert windowed.family == "qwen2_5_vl" and plain.family == "qwen2_vl"


@pytest.mark.parametrize("name", LINES)
def test_modules_of_a_sequential_are_counted(name, vlscope_model, inputs):
    model = vlscope_model(name)
    mlp = model.projector.mlp
    assert mlp[-1] is model.get("model.visual.merger.mlp.2")
    with pytest.raises(IndexError, match="there are 3, 0 to 2"):
        mlp[3]
    with model.trace(**inputs(name, "one_image")):
        hidden = mlp[0].output.clone()
        assert torch.equal(torch.nn.functional.gelu(hidden), mlp[1].output)


# --- windows ----------------------------------------------------------------------------------------------------


def test_windows_hold_what_they_should_of_a_large_image(vlscope_model, inputs):
    """8 x 10 patches are 4 x 5 tokens; windows of 2 x 2 tokens, the last column of them 2 x 1."""
    model = vlscope_model("qwen2_5")
    with model.trace(**inputs("qwen2_5", "large_image")):
        ends = [block.inputs[1]["cu_seqlens"].tolist() for block in model.vision.layers]
    windows = [0, 16, 32, 40, 56, 72, 80]
    assert ends == [windows, [0, 80], windows]


def test_patterns_of_a_windowed_block_are_one_for_each_window(vlscope_model, inputs):
    model = vlscope_model("qwen2_5")
    with model.trace(**inputs("qwen2_5", "large_image")):
        windowed = [p.shape for p in model.vision.layers[0].self_attn.image_attention_probabilities]
        whole = [p.shape for p in model.vision.layers[1].self_attn.image_attention_probabilities]
    assert [tuple(shape) for shape in windowed] == [(2, n, n) for n in (16, 16, 8, 16, 16, 8)]
    assert [tuple(shape) for shape in whole] == [(2, 80, 80)]


@pytest.mark.parametrize("name", tiny.QWEN2_5_VL)
@pytest.mark.parametrize("case", ["large_image", "two_images", "images_and_videos"])
def test_the_stream_is_in_window_order_and_the_features_in_that_of_the_prompt(name, case, vlscope_model, inputs):
    model = vlscope_model(name)
    given = inputs(name, case)
    items = [item for row in model.prompt_rows(**given) for item in (*row.images, *row.videos)]
    with model.trace(**given):
        embedded = model.vision.patch_embeddings.clone()
        stream = model.vision.layers[0].layer_input.clone()
        tower = model.projector.output.clone()
        features = {kind: getattr(model.vision, f"{kind}_features").clone() for kind in {item.kind for item in items}}
    block = model.vision.spatial_merge_size**2
    for item in items:
        for token in range(len(item)):
            own = item.patches_of(token)
            start = item.patches.start + token * block
            assert torch.equal(stream[0, own], embedded[0, start : start + block])
            assert torch.equal(features[item.kind][item.rows][token], tower[int(own[0]) // block])
            assert item.token_of(own).unique().tolist() == [token]
        assert torch.equal(
            item.patch_at(*item.patch_place(item.patch_map)[1:], item.patch_place(item.patch_map)[0]), item.patch_map
        )


def test_a_window_does_not_see_beyond_itself(vlscope_model, inputs):
    """A change of one patch before a windowed block reaches, in that block, its own window alone."""
    model, given = vlscope_model("qwen2_5"), inputs("qwen2_5", "large_image")
    outputs = []
    for change_by in (0.0, 1.0):
        with model.trace(**given):
            model.vision.layers[0].layer_input[0, 20] += change_by
            outputs.append(model.vision.layers[0].layer_output[0].clone())
    changed = (outputs[0] != outputs[1]).any(-1).nonzero().flatten()
    assert changed.tolist() == list(range(16, 32))


# --- videos -----------------------------------------------------------------------------------------------------


def test_seconds_between_frames_space_them_in_time(vlscope_model, inputs):
    model = vlscope_model("qwen2_5")
    given = inputs("qwen2_5", "videos")
    times = {}
    for seconds in ([1.0, 1.0], [1.0, 2.6], None):
        told = {**given, "second_per_grid_ts": seconds}
        with model.trace(**told):
            times[str(seconds)] = model.model.language_model.inputs[1]["position_ids"][0].clone()
    assert torch.equal(times["None"], times["[1.0, 1.0]"])
    second = [int(p) for p in times["[1.0, 2.6]"][0][given["input_ids"][0] == tiny.VIDEO][-6:]]
    assert [p - second[0] for p in second] == [0, 0, 4, 4, 8, 8]  # two tokens a frame; 2 a second, whole seconds


def test_seconds_that_fit_nothing_are_refused(vlscope_model, inputs):
    model = vlscope_model("qwen2_5")
    given = inputs("qwen2_5", "videos")
    with pytest.raises(InputError, match=r"second_per_grid_ts has shape \[1\], but there are 2 videos"):
        model(**{**given, "second_per_grid_ts": [1.0]})
    with pytest.raises(InputError, match="second_per_grid_ts of video 1 is -1"):
        model(**{**given, "second_per_grid_ts": [1.0, -1.0]})
    with pytest.raises(InputError, match="qwen2_vl does not count the time of a video in seconds"):
        vlscope_model("qwen2")(**{**inputs("qwen2", "videos"), "second_per_grid_ts": [1.0, 1.0]})
