"""Each refusal: its type, the thing and both numbers in its message; and the next call gives the same bits."""
# ruff: noqa: B018 - reading an attribute is the test

import json
import shutil

import pytest
import torch
from PIL import Image

import tiny
import vlscope
from vlscope import CheckpointError, ConfigError, InputError, UnsupportedFamily

RED = Image.new("RGB", (64, 64), "red")
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture
def refuses(model, inputs):
    """refuses(error, words, **given): the trace and the call are refused so, and an ordinary call is as before."""
    ordinary = inputs("dense", "two_images")
    before = model(**ordinary).logits

    def check(error, words, *args, **given):
        def traced():
            with model.trace(*args, **given):
                model.logits

        for run in (traced, lambda: model(*args, **given)):
            with pytest.raises(error) as caught:
                run()
            for word in words:
                assert str(word) in str(caught.value), f"{word!r} is not in: {caught.value}"
        assert torch.equal(model(**ordinary).logits, before)

    return check


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a checkpoint that a test may damage."""
    return shutil.copytree(checkpoint("dense"), tmp_path / "model")


def configure(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


# --- prompts ----------------------------------------------------------------------------------------------------


def test_an_image_without_a_placeholder(refuses):
    refuses(InputError, [1, 2], PLACEHOLDER + "What?", images=[RED, RED])


def test_a_placeholder_without_an_image(refuses):
    refuses(InputError, [2, 1], PLACEHOLDER * 2 + "What?", images=[RED])
    refuses(InputError, [1, 0], PLACEHOLDER + "What?")


@pytest.mark.parametrize("empty", ["", [], torch.zeros(1, 0, dtype=torch.long)], ids=["string", "list", "ids"])
def test_an_empty_prompt(refuses, empty):
    refuses(InputError, ["empty"], empty)


def test_no_prompt(model):
    with pytest.raises((TypeError, ValueError)), model.trace(None):
        model.logits


@pytest.mark.parametrize("wrong", [704, -1, 10**9])
def test_a_token_id_outside_the_vocabulary(refuses, wrong):
    refuses(InputError, [wrong, 703], input_ids=torch.tensor([[1, 2, wrong]]))


def test_one_token_is_a_prompt(model):
    assert model(input_ids=torch.tensor([[3]])).logits.shape == (1, 1, 704)


def test_ids_written_in_the_trace_are_checked_as_well(model):
    with pytest.raises(InputError, match="(?s)9999.*703"), model.trace(input_ids=torch.tensor([[1, 2, 3]])):
        model.input_ids[0, 1] = 9999
        model.logits


# --- tensors ----------------------------------------------------------------------------------------------------


def test_a_grid_of_another_size_than_the_pixels(refuses, inputs):
    given = dict(inputs("dense", "one_image"), image_grid_thw=torch.tensor([[1, 4, 4]]))
    refuses(InputError, [24, 16], **given)


def test_a_grid_that_makes_other_tokens_than_the_prompt_holds(refuses, inputs):
    given = inputs("dense", "one_image")
    ids = torch.cat([given["input_ids"], torch.tensor([[tiny.IMAGE]])], dim=1)
    refuses(InputError, [7, 6], **dict(given, input_ids=ids, attention_mask=torch.ones_like(ids)))


def test_a_grid_that_does_not_divide_into_merge_blocks(refuses, inputs):
    refuses(InputError, [3, 2], **dict(inputs("dense", "one_image"), image_grid_thw=torch.tensor([[1, 3, 8]])))


@pytest.mark.parametrize("grid", [[[1, 4]], [[1, 4, 6, 1]], [1, 4, 6], [[1, -4, -6]], [[0, 4, 6]]])
def test_a_grid_that_is_none(refuses, inputs, grid):
    refuses(InputError, ["image_grid_thw"], **dict(inputs("dense", "one_image"), image_grid_thw=torch.tensor(grid)))


def test_pixels_without_a_grid_and_a_grid_without_pixels(refuses, inputs):
    given = inputs("dense", "one_image")
    refuses(InputError, ["image_grid_thw"], **{k: v for k, v in given.items() if k != "image_grid_thw"})
    refuses(InputError, ["pixel_values"], **{k: v for k, v in given.items() if k != "pixel_values"})


def test_pixels_of_another_width_than_a_patch(refuses, inputs):
    given = inputs("dense", "one_image")
    refuses(InputError, [1535, 1536], **dict(given, pixel_values=given["pixel_values"][:, :-1]))


def test_two_images_of_equal_total_but_other_parts(refuses, inputs):
    """Swapped grids have the right total; the runs of placeholders tell."""
    given = inputs("dense", "two_images")
    refuses(InputError, [3, 5], **dict(given, image_grid_thw=given["image_grid_thw"].flip(0)))


def test_a_mask_of_another_shape_than_the_ids(refuses, inputs):
    given = inputs("dense", "text")
    refuses(InputError, [9, 8], **dict(given, attention_mask=given["attention_mask"][:, :-1]))


def test_a_mask_that_masks_a_whole_row(refuses, inputs):
    given = inputs("dense", "text")
    refuses(InputError, ["attention_mask"], **dict(given, attention_mask=torch.zeros_like(given["attention_mask"])))


def test_ids_that_are_no_integers(refuses):
    refuses((InputError, TypeError), ["float32"], input_ids=torch.ones(1, 3))


def test_an_unknown_keyword(model):
    with pytest.raises(TypeError, match="input_idz"), model.trace(input_idz=torch.ones(1, 3, dtype=torch.long)):
        model.logits


def test_an_image_on_a_text_only_load(checkpoint, inputs):
    model = vlscope.load(checkpoint("dense"), task="text-generation")
    before = model(**inputs("dense", "text")).logits
    for run in (lambda: model(**inputs("dense", "one_image")), lambda: model(PLACEHOLDER + "What?", images=[RED])):
        with pytest.raises((InputError, vlscope.Unavailable), match="text-generation"):
            run()
    assert torch.equal(model(**inputs("dense", "text")).logits, before)


# --- folders ----------------------------------------------------------------------------------------------------


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere") as caught:
        vlscope.load(tmp_path / "nowhere")
    assert isinstance(caught.value, CheckpointError) and isinstance(caught.value, ValueError)


def test_a_file_instead_of_a_folder(folder):
    with pytest.raises(CheckpointError, match="config.json"):
        vlscope.load(folder / "config.json")


def test_an_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        vlscope.load(tmp_path)


def test_a_configuration_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises((ConfigError, CheckpointError), match="config.json"):
        vlscope.load(folder)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_an_unknown_family(folder, family):
    configure(folder, lambda config: config.update(model_type=family))
    with pytest.raises(UnsupportedFamily, match=f"(?s){family}.*qwen3_vl") as caught:
        vlscope.load(folder)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("keep", [0, 4, 100, 10_000, -4])
def test_a_cut_weight_file(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep] if keep else b"")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        vlscope.load(folder)


def test_a_weight_file_whose_header_is_damaged(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[:8] = (2**60).to_bytes(8, "little")
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        vlscope.load(folder)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        vlscope.load(folder)


@pytest.mark.parametrize("taps, said", [([1, 7], "(?s)7.*4|4.*7"), ([-1], "-1")])
def test_a_tap_outside_the_tower(folder, taps, said):
    configure(folder, lambda config: config["vision_config"].update(deepstack_visual_indexes=taps))
    with pytest.raises(ConfigError, match=said) as caught:
        vlscope.load(folder)
    assert "deepstack_visual_indexes" in str(caught.value)


def test_a_hub_id_that_is_not_there_offline(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="nobody/no-such-model"):
        vlscope.load("nobody/no-such-model")


def test_an_unknown_attention_task_or_device(folder):
    for wrong in ({"attn_implementation": "flash"}, {"task": "image-generation"}, {"dtype": torch.int8}):
        with pytest.raises((ValueError, TypeError), match=str(next(iter(wrong.values()))).removeprefix("torch.")):
            vlscope.load(folder, **wrong)


def test_errors_pickle():
    import pickle

    for name in (
        "OutOfOrderError",
        "NotReachedError",
        "LateEditError",
        "Unavailable",
        "ConfigError",
        "CheckpointError",
        "InputError",
        "UnsupportedFamily",
    ):
        error = getattr(vlscope, name)("a message")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == "a message"
