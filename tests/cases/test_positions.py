"""Positions: what each token's time, height and width are, and how they turn queries and keys."""
# ruff: noqa: B018 - an attribute that is read and dropped is what some of these tests are about

import copy
import functools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny
import vlscope
from vlscope import InputError
from vlscope.processing import Processor

VS, VE, IMAGE = tiny.VISION_START, tiny.VISION_END, tiny.IMAGE
VIDEO_PLACE = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def wide():
    """`a VS I*8 VE b`, an image of the grid (1, 4, 8)."""
    return prompt([7, VS, *[IMAGE] * 8, VE, 9], (1, 4, 8))


@pytest.fixture(scope="module")
def video_folder(processor_folder):
    return functools.partial(processor_folder, "video_preprocessor_config.json")


def prompt(ids, *grids):
    """The tensors of ids and images of random pixels."""
    inputs = {"input_ids": torch.tensor([ids])}
    if grids:
        rows = sum(t * h * w for t, h, w in grids)
        inputs["pixel_values"] = torch.rand(rows, 1536, generator=torch.Generator().manual_seed(len(ids))) * 2 - 1
        inputs["image_grid_thw"] = torch.tensor(grids)
    return inputs


def positions(model, inputs):
    """(time, height, width) of each token of the first prompt."""
    with model.trace(**inputs):
        _, kwargs = model.model.language_model.inputs
        return [tuple(place) for place in kwargs["position_ids"][:, 0].T.tolist()]


def alike(*numbers):
    return [(number,) * 3 for number in numbers]


def next_position(model, inputs):
    """That of the first token after a prompt."""
    with model.generate(**inputs, max_new_tokens=2, eos_token_id=[]) as tracer:
        next(tracer.iter[1])
        args, kwargs = model.model.language_model.rotary_emb.inputs
        return {**kwargs}.get("position_ids", args[-1]).flatten().tolist()


def test_po_01_every_image_has_its_grid_and_the_text_goes_on_behind_it(model):
    inputs = prompt([7, VS, *[IMAGE] * 4, VE, 8, VS, *[IMAGE] * 4, VE, 9], (1, 4, 4), (1, 4, 4))
    assert positions(model, inputs) == [
        *alike(0, 1),
        *((2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3)),
        *alike(4, 5, 6),
        *((7, 7, 7), (7, 7, 8), (7, 8, 7), (7, 8, 8)),
        *alike(9, 10),
    ]
    assert next_position(model, inputs) == [11] * 3


def axes_of(folder):
    """Which axis drives each frequency of a model: the one whose positions give the table's sines."""
    model = vlscope.load(folder)
    inputs = prompt([7, VS, *[IMAGE] * 8, VE, 9], (1, 4, 8))
    with model.trace(**inputs):
        cos, sin = (table[0].clone() for table in model.model.language_model.rotary_emb.output)
    half = model.head_dim // 2
    assert torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:])
    places = torch.tensor(positions(model, inputs)).double()
    base = model.config["text_config"]["rope_parameters"]["rope_theta"]
    angles = places[..., None] * base ** (-torch.arange(half) / half)  # [token, axis, frequency]
    errors = (angles.sin() - sin[:, None, :half]).abs().amax(0)
    assert (errors.min(0).values * 10 < errors.median(0).values).all()
    return "".join("THW"[axis] for axis in errors.argmin(0))


def test_po_05_the_axes_alternate_along_the_frequencies_and_the_rest_is_time(checkpoint):
    assert axes_of(checkpoint("dense")) == "THWTHWTT"


def test_po_05_the_sections_of_the_released_models(tmp_path, monkeypatch):
    config = copy.deepcopy(tiny.CONFIGS["dense"])
    config["text_config"].update(head_dim=128, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=2)
    # A small base, so that each of the 64 frequencies turns visibly.
    config["text_config"]["rope_parameters"].update(mrope_section=[24, 20, 20], rope_theta=100.0)
    monkeypatch.setitem(tiny.CONFIGS, "released sections", config)
    assert axes_of(tiny.build("released sections", tmp_path / "model")) == "THW" * 20 + "TTTT"


def test_po_07_rows_and_columns_are_those_of_the_merged_grid(model, wide):
    rows_and_columns = [(2, 2 + row, 2 + column) for row in range(2) for column in range(4)]
    assert positions(model, wide) == [*alike(0, 1), *rows_and_columns, *alike(6, 7)]
    assert next_position(model, wide) == [8] * 3


def test_po_07_attention_is_causal_by_index_whatever_the_positions(model, wide):
    changed = {**wide, "input_ids": wide["input_ids"].clone()}
    changed["input_ids"][0, -1] = 11
    for site in ("layers.3.layer_output", "logits"):
        with model.trace(**wide):
            before = model.get(site).clone()
        with model.trace(**changed):
            after = model.get(site)
            assert torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before[:, -1], after[:, -1])


def test_po_08_angles_are_made_in_float32_and_cast_afterwards(checkpoint):
    model = vlscope.load(checkpoint("dense"), dtype=torch.bfloat16)
    with model.trace(torch.arange(1100)[None] % 500):
        cos, sin = (table[0].clone() for table in model.model.language_model.rotary_emb.output)
    frequencies = 1 / 5e6 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16)
    angles = torch.cat([torch.arange(1100).float()[:, None] * frequencies] * 2, -1)
    assert cos.dtype == torch.bfloat16
    assert torch.equal(cos, angles.cos().bfloat16()) and torch.equal(sin, angles.sin().bfloat16())
    for first, second in ((256, 257), (1000, 1001)):
        assert not torch.equal(cos[first], cos[second])


def test_po_09_a_text_is_that_of_the_plain_text_model_and_reaches_no_image_value(model, checkpoint, inputs):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    text = inputs("dense", "text")
    settings = {**tiny.CONFIGS["dense"]["text_config"]}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
    plain = Qwen3ForCausalLM(Qwen3Config(**settings, attn_implementation="sdpa")).eval()
    stored = load_file(checkpoint("dense") / "model.safetensors")
    weights = {name.replace("model.language_model.", "model."): t for name, t in stored.items() if "visual" not in name}
    plain.load_state_dict(weights)
    with torch.no_grad():
        expected = plain(text["input_ids"]).logits
    assert torch.equal(model(**text).logits, expected)
    assert positions(model, text) == alike(*range(9))
    reached = model.scan(**text)
    assert not any(site.startswith("vision.") and not site.endswith("_token_mask") for site in reached)
    with model.trace(**text):
        with pytest.raises(vlscope.NotReachedError, match="no image"):
            model.vision.patch_embeddings
        assert torch.equal(model.logits, expected)


def test_po_10_no_prompt_leaves_its_offset_to_the_next(checkpoint, wide, inputs):
    prompts = [wide, inputs("dense", "text"), prompt([3, VS, *[IMAGE] * 4, VE], (1, 4, 4)), inputs("dense", "text")]
    fresh = [vlscope.load(checkpoint("dense"))(**given).logits for given in prompts]
    model = vlscope.load(checkpoint("dense"))
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 1, 3)):
        for index in order:
            assert torch.equal(model(**prompts[index]).logits, fresh[index])
            with pytest.raises(InputError):
                model(**{**wide, "image_grid_thw": torch.tensor([[1, 4, 6]])})
            with pytest.raises(ZeroDivisionError), model.trace(**wide):
                model.layers[1].layer_output
                raise ZeroDivisionError
            assert torch.equal(model(**prompts[index]).logits, fresh[index])


def frames(count):
    return np.random.default_rng(0).integers(0, 256, (count, 64, 64, 3), dtype=np.uint8)


def video(processor, count, **metadata):
    encoding = processor(
        text=VIDEO_PLACE, videos=[frames(count)], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
    )
    return encoding, processor.decode(encoding["input_ids"][0])


def test_po_11_frames_are_grouped_by_the_temporal_patch_and_not_by_the_merge_size(video_folder):
    processor = Processor.from_folder(video_folder(temporal_patch_size=4))
    encoding, text = video(processor, 8, fps=1, frames_indices=list(range(8)))
    assert encoding["video_grid_thw"][0, 0] == 2
    assert text.count("seconds>") == 2 and "<1.5 seconds>" in text and "<5.5 seconds>" in text


def test_po_12_an_odd_frame_is_repeated_and_each_group_stands_behind_its_time(video_folder, caplog):
    processor = Processor.from_folder(video_folder())
    encoding, text = video(processor, 5, fps=24, frames_indices=[0, 12, 24, 36, 48])
    count, rows, columns = encoding["video_grid_thw"][0].tolist()
    group = "<|vision_start|>" + "<|video_pad|>" * (rows * columns // 4) + "<|vision_end|>"
    assert count == 3
    assert "".join(f"<{time} seconds>{group}" for time in ("0.2", "1.2", "2.0")) in text
    patches = encoding["pixel_values_videos"].view(3, rows * columns, 3, 2, 256)
    assert torch.equal(patches[2, :, :, 0], patches[2, :, :, 1]) and not torch.equal(
        patches[1, :, :, 0], patches[1, :, :, 1]
    )
    assert video(processor, 1, fps=24)[0]["video_grid_thw"][0, 0] == 1
    with caplog.at_level("WARNING", logger="vlscope"):
        assert video(processor, 5, frames_indices=[0, 12, 24, 36, 48])[1] == text
    assert "24 frames a second" in caplog.text


def test_po_12_each_group_of_a_video_has_the_positions_of_an_image(model):
    ids = [7, VS, *[tiny.VIDEO] * 2, VE, 8, VS, *[tiny.VIDEO] * 2, VE]
    pixels = torch.rand(16, 1536, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": torch.tensor([ids]), "pixel_values_videos": pixels}
    inputs["video_grid_thw"] = torch.tensor([[2, 2, 4]])
    expected = [*alike(0, 1), (2, 2, 2), (2, 2, 3), *alike(4, 5, 6), (7, 7, 7), (7, 7, 8), *alike(9)]
    assert positions(model, inputs) == expected


def test_po_13_ids_pixels_and_grids_are_enough(model):
    picture = vlscope.demo.picture("red", size=(96, 64))
    batch = model.encode("What is this?", images=[picture])
    bare = {name: batch[name] for name in ("input_ids", "pixel_values", "image_grid_thw")}
    assert positions(model, bare) == positions(model, batch)
    assert torch.equal(model(**bare).logits, model("What is this?", images=[picture]).logits)
    for left_out, given in (("image_grid_thw", "pixel_values"), ("pixel_values", "image_grid_thw")):
        partial = {name: value for name, value in bare.items() if name != left_out}
        with pytest.raises(InputError, match=f"{given} was given without {left_out}"):
            model(**partial)


def test_po_14_a_dimension_turns_with_the_one_half_a_head_further(model, wide, inputs):
    for given in (inputs("dense", "text"), wide):
        for dimension in (0, 3, 7):
            with model.trace(**given):
                cos, sin = (table[0].clone() for table in model.model.language_model.rotary_emb.output)
                normed = model.layers[1].self_attn.q_norm.output
                normed[:] = 0
                normed[..., dimension] = 1
                queries = model.layers[1].self_attn.attention_queries[0]
            expected = torch.zeros_like(queries)
            expected[..., dimension], expected[..., dimension + 8] = cos[:, dimension], sin[:, dimension]
            assert torch.equal(queries, expected)
