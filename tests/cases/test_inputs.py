"""Inputs of every wrong kind: refused by name and numbers before any compute, and the next call gives the same bits."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
import vlscope
from vlscope import InputError

VS, VE, IMAGE, VIDEO = tiny.VISION_START, tiny.VISION_END, tiny.IMAGE, tiny.VIDEO
IDS = torch.tensor([[7, VS, *[IMAGE] * 8, VE, 9]])
PIXELS = torch.rand(32, 1536, generator=torch.Generator().manual_seed(0)) * 2 - 1
GRID = torch.tensor([[1, 4, 8]])
WIDE = {"input_ids": IDS, "pixel_values": PIXELS, "image_grid_thw": GRID}
ONES = torch.ones_like(IDS)


def spoiled(tensor, value, *index):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.fixture(scope="module")
def plain(model):
    return model(**WIDE).logits


REFUSED = {
    # ids
    "ids of floating point": ({"input_ids": IDS.float()}, "input_ids is float32; give integers"),
    "ids of bool": ({"input_ids": IDS.bool()}, "input_ids is bool; give integers"),
    "ids of three axes": ({"input_ids": IDS[None]}, r"input_ids has shape \[1, 1, 12\], with 3 axes; 2"),
    "ids of no axis": ({"input_ids": torch.tensor(3)}, r"input_ids has shape \[\], with 0 axes; 2"),
    "no ids": ({"input_ids": IDS[:, :0]}, r"input_ids has shape \[1, 0\]: the prompt is empty"),
    "no prompts": ({"input_ids": IDS[:0]}, r"input_ids has shape \[0, 12\]: the prompt is empty"),
    "ids on meta": ({"input_ids": IDS.to("meta")}, "input_ids is on meta"),
    "sparse ids": ({"input_ids": IDS.to_sparse()}, "input_ids is sparse"),
    "an id too high": ({"input_ids": spoiled(IDS, 704, 0, 11)}, "704 at row 0, position 11; .*ids 0 to 703"),
    "a negative id": ({"input_ids": spoiled(IDS, -1, 0, 0)}, "-1 at row 0, position 0"),
    "ids of uneven rows": ({"input_ids": [[1, 2], [3]]}, "input_ids is no tensor .*length 2 .*got 1"),
    "words for ids": ({"input_ids": "hello"}, "input_ids is no tensor"),
    # masks
    "a mask of another length": ({"attention_mask": ONES[:, 1:]}, r"attention_mask has shape \[1, 11\], .*\[1, 12\]"),
    "a mask for each head": ({"attention_mask": ONES[None, None]}, r"\[1, 1, 1, 12\], with 4 axes; 2"),
    "a mask of floating point": ({"attention_mask": ONES.float()}, "attention_mask is float32; give integers"),
    "a mask of twos": ({"attention_mask": spoiled(ONES, 2, 0, 5)}, "attention_mask holds 2 at row 0, position 5"),
    "a row of padding": ({"attention_mask": ONES * 0}, "attention_mask is 0 on all 12 positions of row 0"),
    "a mask on meta": ({"attention_mask": ONES.to("meta")}, "attention_mask is on meta"),
    "a half hidden image": ({"attention_mask": spoiled(ONES, 0, 0, 4)}, "0 on 1 of the 8 tokens of image 0"),
    # grids
    "a grid of floating point": ({"image_grid_thw": GRID.float()}, "image_grid_thw is float32; give integers"),
    "a grid of one axis": ({"image_grid_thw": GRID[0]}, r"image_grid_thw has shape \[3\], with 1 axes; 2"),
    "a grid of four numbers": ({"image_grid_thw": torch.ones(1, 4).long()}, r"shape \[1, 4\]; \[images, 3\]"),
    "no grids": ({"image_grid_thw": GRID[:0]}, r"shape \[0, 3\]; \[images, 3\]"),
    "a grid on meta": ({"image_grid_thw": GRID.to("meta")}, "image_grid_thw is on meta"),
    "a negative grid": ({"image_grid_thw": -GRID}, r"image 0 is \(-1, -4, -8\) patches"),
    "a grid of zero rows": ({"image_grid_thw": spoiled(GRID, 0, 0, 1)}, r"\(1, 0, 8\) patches.*multiples of 2"),
    "a grid of odd rows": ({"image_grid_thw": spoiled(GRID, 3, 0, 1)}, r"\(1, 3, 8\) patches.*multiples of 2"),
    "an image of two frames": ({"image_grid_thw": torch.tensor([[2, 4, 4]])}, r"\(2, 4, 4\) patches; an image has 1"),
    "a grid that overflows": ({"image_grid_thw": torch.tensor([[1, 2**62, 2**62]])}, r"\(1, 4611686018427387904, "),
    "grids whose sum overflows": (
        {"pixel_values_videos": PIXELS, "video_grid_thw": torch.full((8, 3), 2**20)},
        "pixel_values_videos has 32 patches, video_grid_thw counts 9223372036854775807",
    ),
    # pixels
    "pixels of one more axis": ({"pixel_values": PIXELS[None]}, r"\[1, 32, 1536\]; \[patches, 1536\]"),
    "pixels of another width": ({"pixel_values": PIXELS[:, 1:]}, r"\[32, 1535\]; \[patches, 1536\]"),
    "a patch too few": ({"pixel_values": PIXELS[1:]}, "pixel_values has 31 patches, image_grid_thw counts 32"),
    "no patches": ({"pixel_values": PIXELS[:0]}, "pixel_values has 0 patches, image_grid_thw counts 32"),
    "pixels of bytes": ({"pixel_values": PIXELS.byte()}, "pixel_values is uint8; give floating point"),
    "pixels of eight bits": ({"pixel_values": PIXELS.to(torch.float8_e4m3fn)}, "pixel_values is float8_e4m3fn"),
    "complex pixels": ({"pixel_values": PIXELS.to(torch.complex64)}, "pixel_values is complex64"),
    "pixels on meta": ({"pixel_values": PIXELS.to("meta")}, "pixel_values is on meta"),
    "sparse pixels": ({"pixel_values": PIXELS.to_sparse()}, "pixel_values is sparse"),
    "a NaN": ({"pixel_values": spoiled(PIXELS, float("nan"), 3, 5)}, "holds nan at patch 3, column 5"),
    "an infinity": ({"pixel_values": spoiled(PIXELS, -float("inf"), 0, 0)}, "holds -inf at patch 0, column 0"),
    # counts
    "pixels without a grid": ({"image_grid_thw": None}, "pixel_values was given without image_grid_thw"),
    "a grid without pixels": ({"pixel_values": None}, "image_grid_thw was given without pixel_values"),
    "tokens without an image": ({"pixel_values": None, "image_grid_thw": None}, "8 image tokens .* 0 features"),
    "a token too few": ({"input_ids": IDS[:, :9]}, "7 image tokens .* 8 features"),
    "a broken run": (
        {"input_ids": torch.tensor([[7, VS, *[IMAGE] * 4, 5, *[IMAGE] * 4, VE]])},
        "image 0 gives 8 features, but the run of image tokens at position 2 has 4",
    ),
    "a video token for an image": ({"input_ids": spoiled(IDS, VIDEO, 0, 4)}, "7 image tokens .* 8 features"),
    "seconds of no video": ({"second_per_grid_ts": torch.ones(1)}, "second_per_grid_ts was given, but qwen3_vl"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_input_that_does_not_fit_is_refused_before_anything_runs(model, plain, what):
    wrong, said = REFUSED[what]
    for run in (model.trace, model.generate):
        with pytest.raises(InputError, match=said), run(**{**WIDE, **wrong}):
            raise AssertionError("the block was entered")
    with pytest.raises(InputError, match=said):
        model(**{**WIDE, **wrong})
    assert torch.equal(model(**WIDE).logits, plain)


@pytest.mark.parametrize("name", ["position_ids", "inputs_embeds", "past_key_values", "labels", "pixel_value"])
def test_an_argument_that_a_trace_does_not_take_is_refused_by_its_name(model, name):
    with pytest.raises(TypeError, match=f"no argument '{name}'"):
        model.trace(**WIDE, **{name: torch.ones(1)})


STRIDED = torch.empty(32, 3072)[:, ::2].copy_(PIXELS)
SAME = {
    "strided pixels": {"pixel_values": STRIDED},
    "transposed pixels": {"pixel_values": PIXELS.T.contiguous().T},
    "wide pixels": {"pixel_values": PIXELS.double()},
    "pixels with a gradient": {"pixel_values": PIXELS.clone().requires_grad_()},
    "lists": {"pixel_values": PIXELS.tolist(), "input_ids": IDS.tolist(), "image_grid_thw": GRID.tolist()},
    "arrays": {"pixel_values": PIXELS.numpy(), "input_ids": IDS.numpy(), "image_grid_thw": GRID.numpy()},
    "narrow integers": {"input_ids": IDS.int(), "image_grid_thw": GRID.to(torch.uint8)},
    "strided ids": {"input_ids": IDS.repeat_interleave(2, 1)[:, ::2]},
    "ids of one axis": {"input_ids": IDS[0], "attention_mask": ONES[0]},
    "a mask of bool": {"attention_mask": ONES.bool()},
}


@pytest.mark.parametrize("what", SAME)
def test_the_same_numbers_in_another_form_give_the_same_bits(model, plain, what):
    given = {**WIDE, **SAME[what]}
    before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    assert torch.equal(model(**given).logits, plain)
    assert all(torch.equal(given[name], value) for name, value in before.items())


def test_a_wholly_hidden_image_takes_no_room_and_the_next_keeps_its_own_grid(model):
    """Grids of one size and two shapes: were the first taken for the second image, nothing else would tell."""
    image = [VS, *[IMAGE] * 8, VE]
    given = {
        "input_ids": torch.tensor([[7, *image, 9, *image, 9]]),
        "pixel_values": torch.cat([PIXELS, PIXELS]),
        "image_grid_thw": torch.tensor([[1, 4, 8], [1, 8, 4]]),
    }
    mask = torch.ones_like(given["input_ids"])
    mask[0, 1:11] = 0
    alone = {"input_ids": torch.tensor([[7, 9, *image, 9]]), "pixel_values": PIXELS}
    expected = model(**alone, image_grid_thw=torch.tensor([[1, 8, 4]])).logits[0, -1]
    torch.testing.assert_close(model(**given, attention_mask=mask).logits[0, -1], expected, rtol=1e-5, atol=1e-5)


def test_a_row_of_nothing_but_padding_is_refused_by_its_row(model):
    ids, mask = torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[1, 1, 1], [0, 0, 0]])
    with pytest.raises(InputError, match="all 3 positions of row 1"):
        model(input_ids=ids, attention_mask=mask)


def test_a_prompt_may_be_longer_than_the_config_says(model, reference_model):
    """As in the reference: positions go on, the tables are made for the prompt at hand."""
    ids = torch.arange(4200)[None] % 500
    assert ids.shape[1] > model.config["text_config"]["max_position_embeddings"]
    with model.trace(ids, logits_to_keep=1):
        ours = model.logits.save()
    with torch.no_grad():
        theirs = reference_model("dense", "sdpa")(ids, logits_to_keep=1).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows, columns", [(2, 400), (400, 2)])
def test_a_grid_may_be_two_hundred_times_longer_than_wide(model, rows, columns):
    count = rows * columns // 4
    given = {
        "input_ids": torch.tensor([[7, VS, *[IMAGE] * count, VE, 9]]),
        "pixel_values": torch.rand(rows * columns, 1536, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }
    with model.trace(**given):
        _, kwargs = model.model.language_model.inputs
        assert kwargs["position_ids"][:, 0, -1].tolist() == [2 + max(rows, columns) // 2 + 1] * 3
        assert model.logits.isfinite().all()


MODES = ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16"]


@pytest.mark.parametrize("mode", MODES)
def test_a_picture_of_any_mode_is_what_pillow_makes_of_it_in_rgb(model, mode):
    if mode in ("I", "I;16", "1", "L", "P"):
        image = Image.new(mode, (64, 64), 1 if mode == "1" else 200)
    elif mode == "PA":
        image = Image.new("P", (64, 64), 3).convert("PA")
    else:
        image = Image.new(mode, (64, 64), (10, 120, 230, 77)[: len(Image.new(mode, (1, 1)).getbands())])
    assert image.mode == mode
    ours = model.encode("What?", images=[image])["pixel_values"]
    assert torch.equal(ours, model.encode("What?", images=[image.convert("RGB")])["pixel_values"])


def test_pictures_of_no_pixel_or_too_many_or_of_a_mode_without_rgb_are_refused_by_their_index(model, monkeypatch):
    red = vlscope.demo.picture("red", size=(64, 64))
    buffer = io.BytesIO()
    Image.new("RGB", (300, 300)).save(buffer, "PNG")
    plain = model("What?", images=[red]).logits
    for empty in (Image.new("RGB", (0, 5)), np.zeros((5, 0, 3), np.uint8), np.zeros((0, 0), np.uint8)):
        with pytest.raises(InputError, match=r"image 1: .*(0|empty)"):
            model("What?", images=[red, empty])
    for mode, said in (("F", "mode F"), ("La", r"\(mode La\) cannot become RGB")):
        with pytest.raises(InputError, match=f"image 1: .*{said}"):
            model("What?", images=[red, Image.new("LA" if mode == "La" else mode, (64, 64)).convert(mode)])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match="image 1: .*90000 pixels"):
        model("What?", images=[red, buffer.getvalue()])
    monkeypatch.undo()
    assert torch.equal(model("What?", images=[red]).logits, plain)
