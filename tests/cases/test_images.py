"""Pictures on their way to patches: sizes, modes, files, limits and placeholders, with the numbers of each case."""

import functools
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import vlscope
from vlscope import InputError
from vlscope.processing import ImageSettings, Processor

SHIPPED = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


@pytest.fixture(scope="module")
def folder(processor_folder):
    """folder(**settings): the built-in model's processor files with changed image settings."""
    return functools.partial(processor_folder, "preprocessor_config.json")


@pytest.fixture(scope="module")
def processor(folder):
    """With the limits that the family ships."""
    return Processor.from_folder(folder(**SHIPPED))


def noise(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def grid(encoding):
    ((frames, rows, columns),) = encoding["image_grid_thw"].tolist()
    assert frames == 1
    return rows, columns


def levels(processor, image, **settings):
    """The pixels that reach the model, as 0..255 [height, width, 3] before they were normalised by 0.5 and 0.5."""
    encoding = processor.image_processor(image, **settings)
    rows, columns = grid(encoding)
    patches = encoding["pixel_values"].view(rows // 2, columns // 2, 2, 2, 3, 2, 16, 16).permute(5, 0, 2, 6, 1, 3, 7, 4)
    frames = patches.reshape(2, rows * 16, columns * 16, 3) * 127.5 + 127.5
    assert torch.equal(frames[0], frames[1])
    return frames[0].numpy()


# --- sizes ------------------------------------------------------------------------------------------------------

SIZES = [
    *(((side, side), (256, 256), 64) for side in (1, 2, 8, 31)),
    ((1, 200), (32, 3648), 114),
    ((200, 1), (3648, 32), 114),
]


@pytest.mark.parametrize("size, resized, tokens", SIZES)
def test_im_01_an_image_smaller_than_a_merged_block_is_enlarged(processor, size, resized, tokens):
    encoding = processor(text=PLACE, images=noise(*size), return_tensors="pt")
    rows, columns = grid(encoding)
    assert (rows * 16, columns * 16) == resized
    assert (encoding["input_ids"] == processor.image_token_id).sum() == tokens


def test_im_01_a_single_pixel_is_a_constant_image(processor):
    assert (levels(processor, Image.new("RGB", (1, 1), (10, 20, 30))).round() == (10, 20, 30)).all()


def test_im_01_a_side_of_none_and_a_ratio_over_200_are_refused(processor):
    with pytest.raises(InputError, match=r"image 0: .*1 pixels high and 201 wide.*201.*200"):
        processor.image_processor(noise(1, 201))
    for shape in ((0, 5, 3), (5, 0, 3)):
        with pytest.raises(InputError, match="image 0: .*0"):
            processor.image_processor(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("size, resized, tokens", [((16, 2048), (32, 2912), 91), ((80, 1024), (64, 1024), 64)])
def test_im_03_half_a_block_rounds_to_the_even_neighbour(processor, size, resized, tokens):
    rows, columns = grid(processor.image_processor(noise(*size)))
    assert (rows * 16, columns * 16) == resized and rows * columns // 4 == tokens


@pytest.mark.parametrize(
    "size, limits, resized",
    [((31, 639), (3136, 15680), (32, 544)), ((40, 900), (1024, 8192), (32, 416))],
)
def test_im_04_no_side_of_a_thin_image_falls_to_zero(processor, size, limits, resized):
    rows, columns = grid(processor.image_processor(noise(*size), min_pixels=limits[0], max_pixels=limits[1]))
    assert (rows * 16, columns * 16) == resized


# --- modes and files --------------------------------------------------------------------------------------------


def test_im_05_alpha_is_dropped_whether_a_picture_comes_open_or_as_a_file(processor, tmp_path):
    image = Image.new("RGBA", (32, 32), (*RED, 0))
    image.paste((*GREEN, 128), (16, 0, 32, 32))
    image.save(tmp_path / "clear.png")
    for form in (image, tmp_path / "clear.png", (tmp_path / "clear.png").read_bytes()):
        seen = levels(processor, form, do_resize=False).round()
        assert (seen[:, :16] == RED).all() and (seen[:, 16:] == GREEN).all()


def test_im_07_sixteen_bits_are_clipped_and_never_wrapped(processor, tmp_path):
    row = np.array([0, 255, 256, 32768, 65535], dtype=np.uint16).repeat([32, 8, 8, 8, 8])
    picture = Image.fromarray(np.tile(row, (32, 1)))
    picture.save(tmp_path / "deep.png")
    for form in (picture, tmp_path / "deep.png", (tmp_path / "deep.png").read_bytes()):
        seen = levels(processor, form, do_resize=False).round()
        assert (seen[:, :32] == 0).all() and (seen[:, 32:] == 255).all()


def test_im_09_a_photo_stored_sideways_stays_so_in_every_form(model, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "photo.jpg"
    noise(64, 96).save(path, exif=exif)
    for form in (Image.open(path), path, str(path), path.read_bytes()):
        assert model.encode("What?", images=[form])["image_grid_thw"].tolist() == [[1, 4, 6]]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_im_10_an_animation_is_the_one_frame_it_stands_at(processor, kind):
    frames = [Image.new("RGB", (32, 32), color) for color in (RED, GREEN, BLUE)]
    options = {"lossless": True} if kind == "WEBP" else {}
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    opened = Image.open(io.BytesIO(content))
    assert (levels(processor, content, do_resize=False).round() == RED).all()
    assert (levels(processor, opened, do_resize=False).round() == RED).all()
    opened.seek(2)
    assert (levels(processor, opened, do_resize=False).round() == BLUE).all()


def test_im_11_a_file_that_holds_no_picture_is_refused_by_its_name(processor, tmp_path):
    assert levels(processor, saved(Image.new("RGB", (32, 32), RED), "WEBP", lossless=True), do_resize=False).any()
    for name, content in {"text.png": b"no picture", "empty.png": b"", "drawing.svg": b"<svg/>"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"image 1: .*{name} is in no image format"):
            processor.image_processor([noise(32, 32), tmp_path / name])
        with pytest.raises(InputError, match=f"image 0: {len(content)} bytes is in no image format"):
            processor.image_processor(content)
    with pytest.raises(InputError, match="image 0: there is no image file .*nowhere.png"):
        processor.image_processor(tmp_path / "nowhere.png")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_im_12_a_truncated_file_is_refused_by_its_index_and_nothing_is_run(model, kind):
    content = saved(noise(64, 64), kind)
    good, cut = noise(64, 64, 1), content[: len(content) // 2]
    plain = model("What?", images=[good]).logits
    for form in (cut, Image.open(io.BytesIO(cut))):
        with pytest.raises(InputError, match="image 1: .*truncated"), model.trace("What?", images=[good, form]):
            raise AssertionError("the block was entered")
    assert torch.equal(model("What?", images=[good]).logits, plain)


def test_im_13_pixels_of_floating_point_are_refused_and_uint8_ones_taken(model):
    array = np.asarray(noise(64, 64))
    expected = model("What?", images=[Image.fromarray(array)]).logits
    nan = array.astype(np.float32)
    nan[0] = np.nan
    for pixels in (array / np.float32(255), array.astype(np.float32), nan, torch.tensor(array) / 255):
        with pytest.raises(InputError, match="image 0: pixels have to be uint8, got float32"):
            model("What?", images=[pixels])
    assert torch.equal(model("What?", images=[array]).logits, expected)


# --- placeholders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places, count", [(2, 1), (1, 2), (3, 2)])
def test_im_16_images_and_placeholders_that_differ_in_number_are_refused_by_both(model, places, count):
    images = [noise(64, 64, seed) for seed in range(count)]
    with pytest.raises(InputError, match=rf"{places} image placeholders .*{count} images"):
        model(PLACE * places, images=images)


def test_im_16_expanded_ids_are_counted_against_the_features(model):
    batch = dict(model.encode(PLACE, images=[noise(64, 64)]))
    ids = batch["input_ids"][0].tolist()
    tokens = ids.count(model.processor.image_token_id)
    ids.remove(model.processor.image_token_id)
    with pytest.raises(InputError, match=rf"{tokens - 1} image tokens .*give {tokens} features"):
        model(**{**batch, "input_ids": torch.tensor([ids]), "attention_mask": None})


def test_im_17_a_text_without_placeholders_becomes_a_turn_that_holds_its_images(model):
    images = [noise(64, 64), noise(64, 96, 1)]
    ids = model.encode("What is this?", images=images)["input_ids"]
    text = model.tokenizer.decode(ids[0])
    assert text.startswith("<|im_start|>user\n<|vision_start|><|image_pad|>") and "What is this?<|im_end|>" in text
    assert text.count("<|vision_start|>") == 2
    seen, blind = model("What is this?", images=images).logits, model("What is this?").logits
    assert not torch.allclose(seen[:, -1], blind[:, -1], atol=1e-3)


@pytest.mark.parametrize("limit, kept", [(42, 40), (65, 63)])
def test_im_20_a_limit_that_cuts_an_image_is_refused_by_its_numbers(processor, limit, kept):
    call = {"text": f"a{PLACE} b c d", "images": noise(256, 256), "truncation": True, "return_tensors": "pt"}
    with pytest.raises(InputError, match=rf"max_length {limit} cuts image 0 of 1: {kept} of its 64 tokens"):
        processor(**call, max_length=limit)
    assert (processor(**call, max_length=66)["input_ids"] == processor.image_token_id).sum() == 64


# --- limits -----------------------------------------------------------------------------------------------------


def test_im_21_a_limit_holds_wherever_it_is_given_and_by_either_name(folder):
    path, image = folder(**SHIPPED), noise(1080, 1920)
    plain = Processor.from_folder(path)
    assert grid(plain.image_processor(image)) == (1088 // 16, 1920 // 16) and 68 * 120 // 4 == 2040
    reduced = set()
    for limit in ({"max_pixels": 262144}, {"size": {"longest_edge": 262144}}):
        reduced.add(grid(plain(images=image, **limit)))
        reduced.add(grid(plain(images=image, images_kwargs=limit)))
        reduced.add(grid(Processor.from_folder(path, **limit)(images=image)))
    in_file = folder(size={"shortest_edge": 65536, "longest_edge": 262144})
    reduced.add(grid(Processor.from_folder(in_file)(images=image)))
    assert reduced == {(24, 42)}
    with pytest.raises(TypeError, match="max_pixel'"):
        plain(images=image, max_pixel=262144)


def test_im_22_limits_belong_to_one_processor_and_one_call(folder):
    image = noise(300, 300)
    paths = [folder(size={"shortest_edge": 1024, "longest_edge": most}) for most in (4096, 65536)]
    alone = [grid(Processor.from_folder(path)(images=image)) for path in paths]
    for order in ((0, 1), (1, 0)):
        made = {index: Processor.from_folder(paths[index]) for index in order}
        assert [grid(made[index](images=image)) for index in (0, 1)] == alone
    small = made[0]
    assert grid(small(images=image, max_pixels=16384)) != alone[0]
    assert grid(small(images=image)) == alone[0]
    assert small.image_processor.settings.replace(min_pixels=2048).max_pixels == 4096


@pytest.mark.parametrize(
    "limits, said",
    [
        ({"min_pixels": 10000, "max_pixels": 5000}, "10000 is larger than max_pixels 5000"),
        ({"max_pixels": 0}, "max_pixels has to be positive, got 0"),
        ({"min_pixels": -1}, "min_pixels has to be positive, got -1"),
    ],
)
def test_im_22_limits_that_no_image_can_meet_are_refused(processor, limits, said):
    before = processor.image_processor.settings
    with pytest.raises(InputError, match=said):
        processor(images=noise(64, 64), **limits)
    assert processor.image_processor.settings == before
    with pytest.raises(InputError, match=said):
        ImageSettings().replace(**limits)


def test_im_23_images_of_two_sizes_keep_their_order_and_their_features(model):
    wide, tall = Image.new("RGB", (96, 64), RED), Image.new("RGB", (64, 96), BLUE)

    def features(*images):
        with model.trace(PLACE * len(images), images=list(images)) as tracer:
            return tracer.vision.image_features.clone()

    def close(ours, expected):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)

    encoding = model.encode(PLACE * 2, images=[wide, tall])
    assert encoding["image_grid_thw"].tolist() == [[1, 4, 6], [1, 6, 4]]
    both, swapped = features(wide, tall), features(tall, wide)
    close(both, torch.cat([features(wide), features(tall)]))
    close(swapped, both.roll(6, 0))
    assert not torch.allclose(both[:6], both[6:], atol=1e-2)


def test_im_24_pixels_are_those_of_pillows_bicubic_and_stay_within_their_range(processor):
    """Equal to the bit is transformers' fast processor, in `tests/test_processor.py`."""
    speckle = noise(32, 48)
    board = Image.fromarray((np.indices((512, 512)).sum(0) % 2 * 255).astype(np.uint8)).convert("RGB")
    edge = Image.fromarray(np.repeat([[0] * 4 + [255] * 4], 8, 0).astype(np.uint8)).convert("RGB")
    cases = [(noise(37, 53), (32, 32)), (speckle, (64, 96)), (board, (256, 256)), (edge, (64, 64))]
    for image, (height, width) in cases:
        limits = {"min_pixels": height * width, "max_pixels": height * width}
        seen = levels(processor, image, **limits)
        assert seen.shape == (height, width, 3) and seen.min() >= 0 and seen.max() <= 255
        pillow = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        assert np.abs(seen - pillow).max() < 1.01
    assert {0, 255} < set(seen[0, :, 0].round().tolist())


def test_a_limit_in_a_file_is_named_with_the_file(folder):
    path = folder()
    config = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps({**config, "min_pixels": 5, "max_pixels": 3}))
    with pytest.raises(vlscope.ConfigError, match=r"preprocessor_config\.json: min_pixels 5 .*max_pixels 3"):
        Processor.from_folder(path)
