"""The processor equals transformers' AutoProcessor bit for bit, and refuses what would go wrong in silence."""

import base64
import functools
import io
import json
import os
import pickle
import random
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from PIL import Image

from vlscope import _core
from vlscope.errors import CheckpointNotFound, ConfigError, InputError
from vlscope.processing import Processor

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
TINY = {"size": {"shortest_edge": 1024, "longest_edge": 32768}}
QWEN3 = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
QWEN2 = {
    "patch_size": 14,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
}

TEXTS = [
    "What color is the square?",
    "  two  spaces\tand\n\n lines \r\n",
    "don't, we'll, I'M; 12345 -- 3.14!",
    "na\u00efve cafe\u0301 \u4f60\u597d \U0001f642 \u0915\u093f",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "",
]

# (height, width) -> the size at factor 32 and Qwen3-VL's limits, and at factor 28 and Qwen2-VL's.
SIZES = [
    ((448, 448), (448, 448), (448, 448)),
    ((224, 224), (256, 256), (224, 224)),
    ((256, 256), (256, 256), (252, 252)),
    ((100, 100), (256, 256), (112, 112)),
    ((720, 1280), (704, 1280), (728, 1288)),
    ((1080, 1920), (1088, 1920), (1092, 1932)),
    ((480, 640), (480, 640), (476, 644)),
    ((320, 256), (320, 256), (308, 252)),
    ((48, 80), (224, 352), (56, 84)),
    ((16, 16), (256, 256), (56, 56)),
    ((1, 200), (32, 3648), (28, 812)),
    ((3024, 4032), (3008, 4032), (3024, 4032)),
    ((5000, 8000), (3232, 5152), (2828, 4508)),
    ((112, 2000), (128, 1984), (112, 1988)),
]


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def picture(height=64, width=64, seed=0):
    return Image.fromarray(noise(height, width, seed))


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def folder(processor_folder):
    """folder(**settings): the built-in model's processor files with changed image settings."""
    return functools.partial(processor_folder, "preprocessor_config.json")


@pytest.fixture(scope="session")
def pair(folder, auto):
    """(ours, theirs) of the built-in model with limits of 1,024 to 32,768 pixels."""
    path = folder(**TINY)
    return Processor.from_folder(path), auto(path)


@pytest.fixture
def processor(pair):
    return pair[0]


def assert_same_pixels(ours, theirs, images, **settings):
    mine = ours.image_processor(images, **settings)
    reference = theirs.image_processor(images, return_tensors="pt", **settings)
    assert mine["image_grid_thw"].tolist() == reference["image_grid_thw"].tolist()
    assert mine["pixel_values"].dtype == reference["pixel_values"].dtype
    assert torch.equal(mine["pixel_values"], reference["pixel_values"])


def assert_same_encoding(mine, reference):
    assert list(mine) == list(reference)
    for name, value in reference.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(mine[name], value), name


# --- sizes and pixels ---------------------------------------------------------------------------


@pytest.mark.parametrize("size, qwen3, qwen2", SIZES)
def test_sizes_are_those_of_the_families(size, qwen3, qwen2):
    assert _core.smart_resize(*size, 32, 65536, 16777216) == qwen3
    assert _core.smart_resize(*size, 28, 3136, 12845056) == qwen2


def test_sizes_equal_the_reference_on_random_sides_and_limits():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    draw = random.Random(0)
    for _ in range(2000):
        height, width = (int(2 ** draw.uniform(0, 13)) for _ in range(2))
        factor = draw.choice([28, 32, 16, 64])
        low = draw.randint(1, 100_000)
        high = draw.randint(low, 2_000_000)
        try:
            expected = smart_resize(height, width, factor, low, high)
        except ValueError:
            with pytest.raises(InputError):
                _core.smart_resize(height, width, factor, low, high)
            continue
        assert _core.smart_resize(height, width, factor, low, high) == expected


def test_halves_of_a_factor_round_to_even():
    assert _core.smart_resize(16, 2048, 32, 65536, 16777216) == (32, 2912)
    assert _core.smart_resize(80, 1024, 32, 65536, 16777216) == (64, 1024)


def test_no_side_of_a_thin_image_falls_to_zero():
    assert _core.smart_resize(31, 639, 32, 3136, 15680) == (32, 544)
    assert _core.smart_resize(40, 900, 32, 1024, 8192) == (32, 416)


def test_an_aspect_ratio_over_200_is_refused_with_its_numbers(processor):
    assert _core.smart_resize(200, 1, 32, 65536, 16777216) == (3648, 32)
    with pytest.raises(InputError, match="image 0: .* 1 pixels high and 201 wide.* 201.* 200"):
        processor.image_processor(picture(1, 201))


def test_pixels_of_random_sizes_equal_the_reference(pair):
    draw = random.Random(1)
    for seed in range(250):
        size = [int(2 ** draw.uniform(0, 8)) for _ in range(2)]
        if max(size) <= 200 * min(size):
            assert_same_pixels(*pair, picture(*size, seed))


@pytest.mark.parametrize(
    "settings, sizes",
    [
        (QWEN3, [(1, 1), (1, 200), (200, 1), (31, 31), (48, 80), (448, 448), (37, 53), (720, 1280)]),
        (QWEN2, [(1, 1), (30, 500), (224, 224), (333, 777), (56, 56)]),
        ({**QWEN2, "merge_size": 1, "temporal_patch_size": 3}, [(40, 61)]),
    ],
)
def test_pixels_under_real_limits_equal_the_reference(folder, auto, settings, sizes):
    path = folder(**settings)
    ours, theirs = Processor.from_folder(path), auto(path)
    for size in sizes:
        assert_same_pixels(ours, theirs, picture(*size))
    assert_same_pixels(ours, theirs, [picture(*size) for size in sizes])


def test_resizing_is_pillows_antialiased_bicubic_within_one_level(processor):
    checkerboard = np.indices((512, 512)).sum(0) % 2 * np.uint8(255)
    edge = np.repeat(np.array([[0, 255]], dtype=np.uint8), 2, axis=0)
    speckle = noise(37, 53)[..., 0]
    # Where one side grows and the other shrinks, the two clip their overshoot at different moments.
    for grey, (high, wide) in [
        (checkerboard, (128, 128)),
        (edge, (32, 32)),
        (speckle, (32, 32)),
        (speckle[:32, :32], (64, 64)),
    ]:
        image = Image.fromarray(np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2))
        settings = {"min_pixels": high * wide, "max_pixels": high * wide}
        patches = processor.image_processor(image, **settings)["pixel_values"]
        grid = patches.view(high // 32, wide // 32, 2, 2, 3, 2, 16, 16).permute(5, 4, 0, 2, 6, 1, 3, 7)
        levels = grid.reshape(2, 3, high, wide) * 127.5 + 127.5
        expected = np.asarray(image.resize((wide, high), Image.Resampling.BICUBIC))
        assert torch.equal(levels[0], levels[1])
        assert np.abs(levels[0].permute(1, 2, 0).numpy() - expected).max() < 1.01


@pytest.mark.parametrize("do_rescale, do_normalize", [(True, False), (False, True)])
def test_switched_off_steps_equal_the_reference(pair, do_rescale, do_normalize):
    assert_same_pixels(*pair, picture(), do_rescale=do_rescale, do_normalize=do_normalize)


def test_without_resizing_the_size_has_to_fit(pair):
    assert_same_pixels(*pair, picture(96, 32), do_resize=False)
    with pytest.raises(InputError, match="multiples of 32 .* 96 high and 40 wide"):
        pair[0].image_processor(picture(96, 40), do_resize=False)


@pytest.mark.parametrize(
    "mode",
    ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I"]
    + ["I;16", "I;16L", "I;16B"],
)
def test_every_mode_of_pillow_equals_the_reference(pair, mode):
    if mode in ("I;16", "I;16L", "I;16B"):
        image = Image.frombytes(mode, (50, 40), noise(40, 50).tobytes()[:4000])
    elif mode == "I":
        image = Image.fromarray(noise(40, 50)[..., 0].astype(np.int32) * 3 - 100)
    elif mode in ("RGBA", "RGBa", "RGBX", "CMYK"):
        image = Image.frombytes(mode, (50, 40), np.random.default_rng(0).bytes(8000))
    elif mode in ("LAB", "HSV", "YCbCr"):
        image = Image.frombytes(mode, (50, 40), noise(40, 50).tobytes())
    elif mode == "PA":
        image = picture(40, 50).convert("P").convert("PA")
    else:
        image = picture(40, 50).convert(mode)
    assert image.mode == mode
    assert_same_pixels(*pair, image)


def test_transparency_is_dropped_and_16_bits_are_clipped(processor):
    clear = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    red = processor.image_processor(Image.new("RGB", (32, 32), (255, 0, 0)))["pixel_values"]
    assert torch.equal(processor.image_processor(clear)["pixel_values"], red)
    row = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16).repeat(6, 0)
    levels = np.array([[0, 255, 255, 255, 255]], dtype=np.uint8).repeat(6, 0)
    deep = processor.image_processor(Image.fromarray(row))["pixel_values"]
    assert torch.equal(deep, processor.image_processor(Image.fromarray(levels))["pixel_values"])


def test_arrays_and_tensors_in_every_layout_give_the_pixels_of_the_picture(pair):
    array = noise(40, 50)
    expected = pair[0].image_processor(Image.fromarray(array))["pixel_values"]
    padded = np.zeros((40, 60, 3), dtype=np.uint8)
    padded[:, 5:55] = array
    for form in (
        array,
        array.transpose(2, 0, 1),
        np.asfortranarray(array),
        padded[:, 5:55],
        torch.from_numpy(array),
        torch.from_numpy(array).permute(2, 0, 1),
        array[None],
    ):
        assert torch.equal(pair[0].image_processor(form)["pixel_values"], expected)
        assert_same_pixels(*pair, form)
    frozen = array.copy()
    frozen.flags.writeable = False
    mirrored = array[::-1].copy()[::-1]
    for form in (frozen, mirrored):
        assert torch.equal(pair[0].image_processor(form)["pixel_values"], expected)


def test_grey_arrays_equal_grey_pictures(pair):
    grey = noise(40, 50)[..., 0]
    expected = pair[0].image_processor(Image.fromarray(grey))["pixel_values"]
    for form in (grey, grey[None], grey[..., None]):
        assert torch.equal(pair[0].image_processor(form)["pixel_values"], expected)
    assert_same_pixels(*pair, grey[None])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "int64"])
def test_pixels_other_than_uint8_are_refused(processor, dtype):
    with pytest.raises(InputError, match=f"image 1: pixels have to be uint8, got {dtype}"):
        processor.image_processor([picture(), np.ones((40, 50, 3), dtype=dtype)])


def test_a_floating_point_picture_is_refused(processor):
    with pytest.raises(InputError, match="mode F"):
        processor.image_processor(Image.new("F", (32, 32), 0.5))


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (40, 50, 4), (40, 50, 2), (7,)])
def test_arrays_that_are_no_picture_are_refused(processor, shape):
    with pytest.raises(InputError, match="image 0: "):
        processor.image_processor(np.zeros(shape, dtype=np.uint8))


def test_paths_bytes_and_data_addresses_equal_the_open_picture(pair, tmp_path):
    image = picture(40, 50)
    path = tmp_path / "a picture é.png"
    path.write_bytes(png(image))
    address = "data:image/png;base64," + base64.b64encode(png(image)).decode()
    expected = pair[0].image_processor(image)["pixel_values"]
    for form in (path, str(path), png(image), address):
        assert torch.equal(pair[0].image_processor(form)["pixel_values"], expected)
    assert_same_pixels(*pair, str(path))


def test_exif_rotation_is_left_to_the_caller(pair, tmp_path):
    image = Image.new("RGB", (96, 64), (200, 30, 30))
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "sideways.jpg"
    image.save(path, exif=exif)
    for form in (Image.open(path), path, path.read_bytes()):
        assert pair[0].image_processor(form)["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert_same_pixels(*pair, Image.open(path))


@pytest.mark.parametrize("suffix", ["gif", "png", "webp"])
def test_an_animation_gives_its_current_frame(processor, tmp_path, suffix):
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    frames = [Image.new("RGB", (32, 32), color) for color in colors]
    path = tmp_path / f"animation.{suffix}"
    lossless = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], **lossless)
    expected = [processor.image_processor(frame)["pixel_values"] for frame in frames]
    animation = Image.open(path)
    assert torch.equal(processor.image_processor(path)["pixel_values"], expected[0])
    assert torch.equal(processor.image_processor(animation)["pixel_values"], expected[0])
    animation.seek(2)
    assert torch.equal(processor.image_processor(animation)["pixel_values"], expected[2])


def test_files_that_hold_no_picture_are_refused_by_name(processor, tmp_path):
    whole = png(picture())
    jpeg = io.BytesIO()
    picture().save(jpeg, "JPEG")
    files = {
        "text.png": b"no picture at all",
        "empty.png": b"",
        "drawing.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "half.png": whole[: len(whole) // 2],
        "half.jpg": jpeg.getvalue()[: len(jpeg.getvalue()) // 2],
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"image 1: .*{name}"):
            processor.image_processor([picture(), path])
        with pytest.raises(InputError, match="image 0: "):
            processor.image_processor(content)
    with pytest.raises(InputError, match="image 0: there is no image file 'nowhere.png'"):
        processor.image_processor("nowhere.png")
    with pytest.raises(InputError, match="download it"):
        processor.image_processor("https://example.org/cat.png")
    half = Image.open(io.BytesIO(files["half.png"]))
    with pytest.raises(InputError, match="image 0: .*truncated"):
        processor.image_processor(half)
    with pytest.raises(InputError, match="a dict is not an image"):
        processor.image_processor({})


def test_images_keep_their_order_and_stand_alone(processor):
    wide, tall = picture(64, 96, 1), picture(96, 64, 2)
    both = processor.image_processor([wide, tall])
    assert both["image_grid_thw"].tolist() == [[1, 4, 6], [1, 6, 4]]
    alone = [processor.image_processor(image)["pixel_values"] for image in (wide, tall)]
    assert torch.equal(both["pixel_values"], torch.cat(alone))
    swapped = processor.image_processor([tall, wide])
    assert torch.equal(swapped["pixel_values"], torch.cat(alone[::-1]))


# --- settings -----------------------------------------------------------------------------------


def test_limits_follow_call_then_constructor_then_file(folder):
    path, image = folder(**QWEN3), picture(1080, 1920)
    processor = Processor.from_folder(path)

    def grid(result):
        return result["image_grid_thw"].tolist()

    assert grid(processor.image_processor(image)) == [[1, 68, 120]]
    reduced = [[1, 24, 42]]
    for limit in ({"max_pixels": 262144}, {"size": {"longest_edge": 262144}}):
        assert grid(processor.image_processor(image, **limit)) == reduced
        assert grid(processor(images=image, images_kwargs=limit)) == reduced
        small = Processor.from_folder(path, **limit)
        assert grid(small(images=image)) == reduced
        assert small.image_processor.size == {"shortest_edge": 65536, "longest_edge": 262144}
        assert grid(small(images=image, max_pixels=16777216)) == [[1, 68, 120]]
        assert grid(small(images=image)) == reduced
    assert grid(processor.image_processor(image)) == [[1, 68, 120]]


def test_both_limits_at_a_call_equal_the_reference(pair):
    assert_same_pixels(*pair, picture(300, 200), min_pixels=4096, max_pixels=8192)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_pixels": 2048, "max_pixels": 8192, "size": None},
        {"size": {"min_pixels": 2048, "max_pixels": 8192}},
        {"min_pixels": 2048, "max_pixels": 8192},
    ],
)
def test_every_spelling_of_the_limits_in_a_file_is_read(folder, settings):
    size = Processor.from_folder(folder(**settings)).image_processor.size
    assert size == {"shortest_edge": 2048, "longest_edge": 8192}


@pytest.mark.parametrize(
    "limits, message",
    [
        ({"min_pixels": 10000, "max_pixels": 5000}, "min_pixels 10000 is larger than max_pixels 5000"),
        ({"max_pixels": 0}, "max_pixels has to be positive, got 0"),
        ({"min_pixels": -1}, "min_pixels has to be positive, got -1"),
        ({"max_pixels": 10}, "min_pixels 1024 is larger than max_pixels 10"),
        ({"size": {"height": 5}}, "size has to be"),
        ({"patch_size": "16"}, "patch_size has to be int, got '16'"),
        ({"resample": 2}, "resample 2 is not supported"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std holds a zero"),
    ],
)
def test_settings_that_make_no_sense_are_refused_and_nothing_changes(folder, limits, message):
    path = folder(**TINY)
    processor = Processor.from_folder(path)
    before = processor(images=picture())["pixel_values"]
    with pytest.raises(InputError, match=message):
        processor(images=picture(), **limits)
    with pytest.raises(InputError, match=message):
        Processor.from_folder(path, **limits)
    with pytest.raises(ConfigError, match=f"preprocessor_config.json: {message}"):
        Processor.from_folder(folder(**(TINY | limits)))
    assert torch.equal(processor(images=picture())["pixel_values"], before)


def test_an_unknown_keyword_is_refused(processor, folder):
    for call in (
        lambda: processor(images=picture(), max_pixel=5),
        lambda: processor.encode_prompt("hi", max_pixel=5),
        lambda: Processor.from_folder(folder(), max_pixel=5),
    ):
        with pytest.raises(TypeError, match="unknown image setting 'max_pixel'"):
            call()


def test_a_folder_saved_by_transformers_is_read(pair, tmp_path):
    pair[1].save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    saved = Processor.from_folder(tmp_path)
    assert saved.image_processor.settings == pair[0].image_processor.settings
    text = PLACEHOLDER + "hi"
    again = saved(text=text, images=picture(), return_tensors="pt")
    assert_same_encoding(again, pair[1](text=text, images=picture(), return_tensors="pt"))


def test_another_image_processor_is_refused(folder):
    with pytest.raises(ConfigError, match="CLIPImageProcessor"):
        Processor.from_folder(folder(image_processor_type="CLIPImageProcessor"))


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.json and merges.txt"])
def test_ids_and_text_equal_the_reference(folder, auto, files):
    path = folder()
    for name in ["vocab.json", "merges.txt"] if files == "tokenizer.json" else ["tokenizer.json"]:
        (path / name).unlink()
    ours, theirs = Processor.from_folder(path).tokenizer, auto(path).tokenizer
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours(text).input_ids == ours.encode(text) == ids
        assert ours.tokenize(text) == theirs.tokenize(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    for name in ("eos_token_id", "pad_token_id", "bos_token_id", "vocab_size", "special_tokens_map"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.convert_tokens_to_ids(["<|image_pad|>", "Red"]) == theirs.convert_tokens_to_ids(
        ["<|image_pad|>", "Red"]
    )


def test_decoding_takes_one_id_a_row_and_a_batch(pair):
    ours, theirs = pair
    batch = torch.tensor([[1, 2, 3], [4, 5, 697]])
    assert ours.decode(7) == theirs.decode(7)
    assert ours.decode(batch[0]) == theirs.decode(batch[0])
    assert ours.decode(batch) == theirs.decode(batch) == ours.batch_decode(batch)
    assert ours.batch_decode(batch, skip_special_tokens=True) == theirs.batch_decode(batch, skip_special_tokens=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_equal_the_reference(pair, side):
    ours, theirs = pair
    text = ["short", PLACEHOLDER + PLACEHOLDER + "two images", "a longer text", "one " + PLACEHOLDER]
    images = [picture(40, 90, 1), picture(64, 32, 2), picture(32, 32, 3)]
    nested = [[], images[:2], [], images[2:]]
    options = {"padding": True, "padding_side": side, "return_tensors": "pt"}
    reference = theirs(text=text, images=images, **options)
    for form in (images, nested):
        assert_same_encoding(ours(text=text, images=form, **options), reference)
    padded = {"padding": "max_length", "max_length": 40, "padding_side": side, "return_tensors": "pt"}
    assert_same_encoding(ours(text=text[:1], **padded), theirs(text=text[:1], **padded))


def test_padding_is_on_the_left_unless_told_otherwise(processor):
    encoding = processor(text=["hello there", "hi"], padding=True, return_tensors="pt")
    assert encoding.attention_mask[1].tolist()[0] == 0
    assert encoding.input_ids[1, 0] == processor.tokenizer.pad_token_id


def test_lists_come_without_return_tensors(pair):
    text = ["hi", PLACEHOLDER + "hello"]
    mine, reference = (p(text=text, images=picture()) for p in pair)
    assert_same_encoding(mine, reference)


def test_rows_of_different_length_need_padding_to_be_a_tensor(processor):
    with pytest.raises(InputError, match="padding=True"):
        processor(text=["hi", "a longer text"], return_tensors="pt")
    with pytest.raises(InputError, match="return_tensors has to be"):
        processor(text="hi", return_tensors="tf")


def test_truncation_removes_text_and_never_part_of_an_image(processor):
    text = f"a {PLACEHOLDER} b c d e f g"
    whole = processor(text=text, images=picture(64, 64), return_tensors="pt").input_ids
    cut = processor(text=text, images=picture(64, 64), truncation=True, max_length=8, return_tensors="pt").input_ids
    assert torch.equal(cut, whole[:, :8])
    with pytest.raises(InputError, match="max_length 4 cuts image 0 of 1: 1 of its 4 tokens"):
        processor(text=text, images=picture(64, 64), truncation=True, max_length=4)


def test_an_encoding_has_attributes_and_moves_and_pickles(processor):
    encoding = processor(text="hi", return_tensors="pt")
    assert encoding.input_ids is encoding["input_ids"]
    assert encoding.to("meta").input_ids.is_meta
    assert torch.equal(pickle.loads(pickle.dumps(encoding)).input_ids, encoding.input_ids)
    with pytest.raises(AttributeError, match="no pixel_values"):
        _ = encoding.pixel_values


# --- chat templates -----------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "image", "image": picture(64, 64, 1)},
            {"type": "text", "text": "What & <b>?"},
            {"type": "image", "image": picture(40, 90, 2)},
        ],
    },
    {"role": "assistant", "content": "Red"},
    {"role": "user", "content": "And now?"},
]

TEMPLATE = """{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
    {% if loop.first %}{{ (tools or [])|tojson }}{% endif %}
[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}
{%- if c.type == 'text' %}{{ c.text | trim }}{% continue %}{% endif %}<|image_pad|>{% endfor %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{% generation %}[assistant]{% endgeneration %}{{ eos_token }}{{ style }}{% endif %}"""


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("generation", [False, True])
def test_chat_templates_equal_the_reference(pair, template, generation):
    options = {"chat_template": template, "add_generation_prompt": generation}
    if template:
        options |= {"tools": [{"name": "f", "description": "<é>"}], "style": "x"}
    ours, theirs = pair
    assert ours.apply_chat_template(CHAT, **options) == theirs.apply_chat_template(CHAT, **options)
    options |= {"tokenize": True}
    assert ours.apply_chat_template(CHAT, **options) == theirs.apply_chat_template(CHAT, **options)
    options |= {"return_dict": True, "return_tensors": "pt"}
    mine = ours.apply_chat_template(CHAT, **options)
    assert_same_encoding(mine, theirs.apply_chat_template(CHAT, **options))


def test_a_batch_of_conversations_equals_the_reference(pair):
    batch = [CHAT, [{"role": "user", "content": "hi"}]]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    mine = pair[0].apply_chat_template(batch, padding=True, **options)
    padding = {"padding": True, "padding_side": "left"}
    assert_same_encoding(mine, pair[1].apply_chat_template(batch, processor_kwargs=padding, **options))


def test_templates_are_found_where_the_reference_finds_them(folder, auto):
    path = folder()
    file = path / "chat_template.jinja"
    source = file.read_text()
    conversation = [{"role": "user", "content": "hi"}]

    def rendered():
        mine = Processor.from_folder(path).apply_chat_template(conversation)
        assert mine == auto(path).apply_chat_template(conversation)
        return mine

    assert rendered() == "<|im_start|>user\nhi<|im_end|>\n"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "json " + source}))
    assert rendered().startswith("json<|im_start|>")
    (path / "chat_template.json").unlink()
    file.unlink()
    config = json.loads((path / "tokenizer_config.json").read_text())
    text = json.dumps(config | {"chat_template": "tokenizer " + source})
    (path / "tokenizer_config.json").write_text(text)
    mine = Processor.from_folder(path).apply_chat_template(conversation)
    assert mine.startswith("tokenizer<|im_start|>")


def test_a_template_sees_only_variables_that_it_knows(processor):
    with pytest.raises(TypeError, match="'enable_thinking'"):
        processor.apply_chat_template(CHAT, enable_thinking=False)
    with pytest.raises(InputError, match="no tools here"):
        processor.apply_chat_template([{"role": "tool", "content": ""}], chat_template=TEMPLATE)


def test_a_conversation_is_left_as_it_is(processor):
    image = base64.b64encode(png(picture())).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
    conversation = [{"role": "user", "content": parts}]
    encoding = processor.encode_prompt(conversation)
    assert parts[0]["type"] == "image_url"
    direct = processor.encode_prompt([{"role": "user", "content": [{"type": "image", "image": picture()}]}])
    assert_same_encoding(encoding, direct)
    coded = processor.encode_prompt([{"role": "user", "content": [{"type": "image", "base64": image}]}])
    assert_same_encoding(coded, direct)


# --- the input of a trace -----------------------------------------------------------------------


def test_a_string_alone_is_tokenised_raw(pair):
    ours, theirs = pair
    assert_same_encoding(ours.encode_prompt("The capital"), theirs(text="The capital", return_tensors="pt"))


def test_a_string_with_placeholders_stands_as_it_is(pair):
    ours, theirs = pair
    text = f"a {PLACEHOLDER} b {PLACEHOLDER}"
    images = [picture(40, 90), picture()]
    reference = theirs(text=text, images=images, return_tensors="pt")
    for form in (images, tuple(images), [images]):
        assert_same_encoding(ours.encode_prompt(text, form), reference)


def test_a_string_without_placeholders_becomes_a_user_turn_around_its_images(pair):
    ours, theirs = pair
    images = [picture(40, 90), picture()]
    text = f"<|im_start|>user\n{PLACEHOLDER}{PLACEHOLDER}What?<|im_end|>\n<|im_start|>assistant\n"
    reference = theirs(text=text, images=images, return_tensors="pt")
    assert_same_encoding(ours.encode_prompt("What?", images), reference)


def test_messages_hold_their_images_or_take_them_from_beside(pair):
    ours, theirs = pair
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    reference = theirs.apply_chat_template(CHAT, return_tensors="pt", **options)
    assert_same_encoding(ours.encode_prompt(CHAT), reference)
    embedded = [part["image"] for part in CHAT[1]["content"] if part["type"] == "image"]
    parts = [{"type": "image"}, CHAT[1]["content"][1], {"type": "image"}]
    bare = [CHAT[0], {"role": "user", "content": parts}, *CHAT[2:]]
    assert_same_encoding(ours.encode_prompt(bare, embedded), reference)
    mixed = [CHAT[0], {"role": "user", "content": [*CHAT[1]["content"][:2], parts[2]]}, *CHAT[2:]]
    assert_same_encoding(ours.encode_prompt(mixed, embedded[1:]), reference)
    spoken = ours.encode_prompt([*CHAT, {"role": "assistant", "content": "Blue"}])
    assert ours.decode(spoken.input_ids[0]).endswith("Blue<|im_end|>\n")


def test_ids_pass_through_with_their_placeholders_repeated(processor):
    image = picture(40, 90)
    encoding = processor.encode_prompt("What?", image)
    row = encoding.input_ids[0]
    for form in (row.tolist(), tuple(row.tolist()), row, row.numpy(), encoding.input_ids):
        assert_same_encoding(processor.encode_prompt(form, image), encoding)
    assert_same_encoding(processor.encode_prompt(encoding), encoding)


def test_a_batch_equals_its_prompts_padded_on_the_left(processor):
    images = [picture(64, 96, 1), picture(96, 64, 2), picture(32, 32, 3)]
    prompts = [
        "raw text",
        f"{PLACEHOLDER} and {PLACEHOLDER}",
        CHAT,
        [1, 2, 3],
        "asked about the picture",
    ]
    nested = [None, images[:2], [], [], images[2:]]
    batch = processor.encode_prompt(prompts, nested)
    singles = [processor.encode_prompt(prompt, own) for prompt, own in zip(prompts, nested, strict=True)]
    for index, single in enumerate(singles):
        length = single.input_ids.shape[1]
        for name in ("input_ids", "mm_token_type_ids"):
            assert torch.equal(batch[name][index, -length:], single[name][0])
        assert batch.attention_mask[index].sum() == length
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(batch[name], torch.cat([s[name] for s in singles if name in s]))
    assert_same_encoding(processor.encode_prompt(singles), batch)
    assert_same_encoding(processor.encode_prompt([*singles[:4], prompts[4]], [None] * 4 + [images[2:]]), batch)


def test_a_flat_list_of_images_is_divided_by_the_placeholders(processor):
    prompts = ["none", PLACEHOLDER, PLACEHOLDER * 2, "none", PLACEHOLDER + "x"]
    images = [picture(64, 96, seed) if seed % 2 else picture(96, 64, seed) for seed in range(4)]
    nested = [[], images[:1], images[1:3], [], images[3:]]
    assert_same_encoding(processor.encode_prompt(prompts, images), processor.encode_prompt(prompts, nested))


@pytest.mark.parametrize(
    "prompt, images, message",
    [
        (None, None, "None"),
        ("", None, "empty"),
        ([], None, "empty"),
        ([[]], None, "empty"),
        (["hi", ""], None, "prompt 1: the prompt is empty"),
        (torch.zeros(1, 0, dtype=torch.long), None, "empty"),
        (3.5, None, "a float is not a prompt"),
        ([1, 2.5], None, "have to be integers"),
        (["hi", None], None, "prompt 1: a NoneType"),
        (PLACEHOLDER, None, r"1 image placeholders .* 0 images"),
        (PLACEHOLDER * 2, 1, r"2 image placeholders .* 1 images"),
        (PLACEHOLDER, 2, r"1 image placeholders .* 2 images"),
        ("<|video_pad|>", None, r"1 video placeholders .* 0 videos"),
        ([696, 701, 701, 701], 1, r"3 image tokens, and the images give 4 features"),
        ([696, 701], None, r"1 image tokens, and the images give 0 features"),
        ([PLACEHOLDER, "hi"], [[0], [0], [0]], "3 lists of images were passed for 2 prompts"),
        ([PLACEHOLDER, PLACEHOLDER], [[0, 0], []], "prompt 0: .*1 image placeholders .* 2 images"),
        ([PLACEHOLDER, PLACEHOLDER], 3, "hold 2 image placeholders, and 3 images"),
        (["one", "two"], 2, r"0 image placeholders, and 2 images .*\[\[\.\.\.\], \[\.\.\.\]\]"),
        ([{"role": "user", "content": [{"type": "image"}]}], 2, "1 image parts .* 2 images"),
        ([{"role": "user", "content": "hi"}], 1, "0 image placeholders .* 1 images"),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PLACEHOLDER}]}],
            1,
            "2 image placeholders .* 1 images",
        ),
        ([{"role": "user", "content": ["hi"]}], None, "a part of a message"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_before_any_pixel_work(processor, monkeypatch, prompt, images, message):
    if isinstance(images, int):
        images = [picture() for _ in range(images)]
    elif images is not None:
        images = [[picture() for _ in own] for own in images]
    monkeypatch.setattr(
        processor.image_processor, "process", lambda *_: pytest.fail("pixels were touched"), raising=False
    )
    with pytest.raises(InputError, match=message):
        processor.encode_prompt(prompt, images)


def test_the_processor_counts_placeholders_too(processor):
    with pytest.raises(InputError, match=r"2 image placeholders .* 1 images"):
        processor(text=PLACEHOLDER * 2, images=picture())
    with pytest.raises(InputError, match=r"prompt 1: .*1 image placeholders .* 0 images"):
        processor(text=["hi", PLACEHOLDER])
    with pytest.raises(InputError, match="pass text="):
        processor()
    with pytest.raises(InputError, match="empty"):
        processor(text=[])


# --- incomplete folders -------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_takes_ids(folder, processor):
    path = folder(**TINY)
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (path / name).unlink()
    bare = Processor.from_folder(path)
    image = picture(40, 90)
    encoding = processor.encode_prompt("What?", image)
    assert_same_encoding(bare.encode_prompt(encoding.input_ids, image), encoding)
    with pytest.raises(InputError, match="tokenizer.json .* pass token ids"):
        bare.encode_prompt("What?")
    with pytest.raises(InputError, match="rows|padding"):
        bare.encode_prompt([[1, 2], [1, 2, 3]])


def test_a_folder_without_a_template_takes_written_placeholders(folder, processor):
    path = folder(**TINY)
    (path / "chat_template.jinja").unlink()
    bare = Processor.from_folder(path)
    text = f"{PLACEHOLDER}What?"
    assert_same_encoding(bare.encode_prompt(text, picture()), processor.encode_prompt(text, picture()))
    with pytest.raises(InputError, match=r"no chat template.*<\|vision_start\|><\|image_pad\|>"):
        bare.encode_prompt("What?", picture())


def test_a_folder_without_image_settings_takes_text(folder, processor):
    path = folder()
    (path / "preprocessor_config.json").unlink()
    bare = Processor.from_folder(path)
    assert_same_encoding(bare.encode_prompt("hi"), processor.encode_prompt("hi"))
    with pytest.raises(InputError, match="preprocessor_config.json"):
        bare.encode_prompt(PLACEHOLDER, picture())


def test_damaged_files_are_named(folder, tmp_path):
    for name in ("preprocessor_config.json", "tokenizer_config.json", "tokenizer.json", "config.json"):
        path = folder()
        (path / name).write_text("{")
        with pytest.raises(ConfigError, match=name):
            Processor.from_folder(path)
    with pytest.raises(CheckpointNotFound, match="nowhere"):
        Processor.from_folder(tmp_path / "nowhere")


def test_a_vocabulary_is_read_when_it_is_first_needed(folder):
    path = folder()
    (path / "tokenizer.json").write_text('{"model": {"type": "of no kind"}}')
    late = Processor.from_folder(path)
    with pytest.raises(ConfigError, match="tokenizer.json"):
        late.encode_prompt("hi")
    with pytest.raises(ConfigError, match="tokenizer.json"):  # and not half read
        late.encode_prompt("hi")


def test_a_tokenizer_is_pickled_read_or_not(folder):
    tokenizer = Processor.from_folder(folder()).tokenizer
    copies = [pickle.loads(pickle.dumps(tokenizer))]
    ids = tokenizer.encode("What color?")
    copies.append(pickle.loads(pickle.dumps(tokenizer)))
    assert [copy.encode("What color?") for copy in copies] == [ids, ids]


def test_the_libraries_of_text_and_pictures_are_imported_when_needed():
    code = (
        "import sys, vlscope.processing\nassert not {'tokenizers', 'jinja2', 'PIL', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
