"""The shape calculator: the specification's table, the released sizes, the processor, the command line, the page."""

import html
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import browser
import vlscope
from vlscope import calculator
from vlscope.processing import ImageProcessor, ImageSettings

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "shape-calculator.html"

#: The example of the specification, row for row.
TABLE = """\
Stage / quantity                       Result
Resized height                         512
Resized width                          512
Temporal groups                        1
Repeated frames                        1
Model patch-grid rows                  32
Model patch-grid columns               32
Processor spatial units × time groups  1024
Model patch positions                  1024
Effective visual tokens                256
LLM visual feature shape               [256, 4096]
Continuous scalar values               1048576

2×16×16 patches → ViT → 2×2 concat + MLP → LLM
qwen3-vl-8b: 27 vision blocks · width 1152 → 4096
DeepStack from vision blocks 8, 16, 24 (zero-based)
A still image is repeated to fill its temporal patch, which adds no motion.
"""


def test_the_example_of_the_specification_is_printed_row_for_row():
    assert f"{vlscope.shapes(512, 512)}\n" == TABLE


@pytest.mark.parametrize(
    "model, blocks, width, llm_width, taps",
    [
        ("2b", 24, 1024, 2048, (5, 11, 17)),
        ("8b", 27, 1152, 4096, (8, 16, 24)),
        ("235b-a22b", 27, 1152, 4096, (8, 16, 24)),
        ("Qwen/Qwen3-VL-2B-Instruct", 24, 1024, 2048, (5, 11, 17)),
    ],
)
def test_the_inspected_configurations_are_those_of_the_specification(model, blocks, width, llm_width, taps):
    shape = vlscope.shapes(512, 512, model=model)
    known = shape.configuration
    assert (known.vision_blocks, known.vision_width, known.llm_width) == (blocks, width, llm_width)
    assert known.deepstack_blocks == taps and known.options.patch_size == 16
    assert shape.feature_shape == (256, llm_width) and shape.scalars == 256 * llm_width


def test_three_frames_make_two_groups_and_the_last_frame_is_repeated():
    three, four = vlscope.shapes(512, 512, frames=3), vlscope.shapes(512, 512, frames=4)
    assert (three.temporal_groups, three.repeated_frames, three.visual_tokens) == (2, 1, 512)
    assert (four.temporal_groups, four.repeated_frames, four.visual_tokens) == (2, 0, 512)
    assert "The last frame is repeated to fill the last temporal patch: 1 more." in three.notes()
    assert not any("repeated" in note for note in four.notes())


def test_the_pinned_sizes_are_those_of_the_released_configs():
    found = {}
    for path in sorted((ROOT / "tests" / "data" / "configs").glob("*.json")):
        config = json.loads(path.read_text())
        vision, text = config["vision_config"], config.get("text_config", config)
        name = path.stem.removesuffix("-instruct").removesuffix("-thinking")
        taps = tuple(vision.get("deepstack_visual_indexes", ()))
        width = vision.get("embed_dim", vision["hidden_size"])
        found[name] = (vision["depth"], width, text["hidden_size"], taps)
        assert vlscope.shapes(512, 512, model=name).configuration.options.patch_size == vision["patch_size"]
    assert found == calculator.PINNED


def sizes(count, seed, longest):
    """Random sizes of images, thin ones and odd ones among them."""
    draw = random.Random(seed)
    for _ in range(count):
        a = round(2 ** draw.uniform(0, np.log2(longest)))
        b = draw.choice([round(2 ** draw.uniform(0, np.log2(longest))), draw.randint(1, longest), a])
        yield draw.choice([(a, b), (b, a)])


@pytest.mark.parametrize(
    "model, patch_size, limits", [("8b", 16, (65536, 16777216)), ("qwen2-vl-7b", 14, (3136, 12845056))]
)
def test_images_have_the_sizes_that_the_processor_gives_them(model, patch_size, limits):
    settings = ImageSettings(patch_size=patch_size, min_pixels=limits[0], max_pixels=limits[1])
    for height, width in sizes(40, seed=1, longest=700):
        if max(height, width) > 200 * min(height, width):
            with pytest.raises(vlscope.InputError, match="at most 200"):
                vlscope.shapes(height, width, model=model)
            continue
        shape = vlscope.shapes(height, width, model=model)
        encoded = ImageProcessor(settings)(Image.new("RGB", (width, height)))
        assert encoded["image_grid_thw"].tolist() == [[shape.temporal_groups, shape.grid_rows, shape.grid_columns]]
        assert len(encoded["pixel_values"]) == shape.patch_positions == shape.processor_units
        assert shape.resized_height == shape.grid_rows * patch_size
        assert shape.visual_tokens == shape.patch_positions // 4


def test_a_budget_is_the_processors_max_pixels():
    for height, width in [(1080, 1920), (333, 777), (64, 64)]:
        shape = vlscope.shapes(height, width, budget=100)
        settings = ImageSettings(patch_size=16, min_pixels=65536, max_pixels=100 * 32**2)
        encoded = ImageProcessor(settings)(np.zeros((height, width, 3), np.uint8))
        assert encoded["image_grid_thw"].tolist() == [[1, shape.grid_rows, shape.grid_columns]]
        assert shape.visual_tokens <= 100


@pytest.mark.parametrize("name", ["demo", "dense", "moe", "qwen2", "qwen2_5", "hybrid", "hybrid_moe", "unordered_taps"])
def test_a_checkpoint_of_each_family_serves_the_shapes_that_are_foretold(name, vlscope_model):
    model = vlscope_model(name)
    image = np.zeros((150, 90, 3), np.uint8)
    shape = vlscope.shapes(150, 90, model=model.folder)
    assert shape == vlscope.shapes(150, 90, model=model)
    with model.trace("What is this?", images=[image]):
        assert model.vision.patch_embeddings.shape == (1, shape.patch_positions, shape.configuration.vision_width)
        assert tuple(model.vision.image_features.shape) == shape.feature_shape
    assert shape.configuration.vision_blocks == len(model.vision.layers)


@pytest.mark.parametrize("name", ["demo", "dense", "qwen2", "hybrid_moe"])
def test_a_video_has_the_grid_that_the_processor_of_its_checkpoint_makes(name, vlscope_model):
    model = vlscope_model(name)
    side = 2 * model.vision.patch_size
    frames = np.zeros((5, 2 * side, 3 * side, 3), np.uint8)
    shape = vlscope.shapes(2 * side, 3 * side, frames=5, model=model)
    encoded = model.processor.video_processor(frames, do_resize=False, do_sample_frames=False)
    grid = [shape.temporal_groups, shape.grid_rows, shape.grid_columns]
    assert encoded["video_grid_thw"].tolist() == [grid] and shape.repeated_frames == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((10, 2001), "aspect ratio of 200.1; at most 200"),
        ((0, 5), "the image is empty"),
        ((500, 512, 3), "multiples of 32 .*500 high and 512 wide"),
        ((512, 512, 0), "the video has 0 frames"),
        ((512, 512, None, 63), "63 visual tokens .*65536.* give 64 tokens or more"),
        ((512, 512, 2, 100), "a budget bounds how an image is resized"),
        ((512.0, 512), "height is 512.0; give an integer"),
        ((512, 2**20 + 1), "width is 1048577; at most 1048576 is counted"),
        ((512, 2**70), "width is 1180591620717411303424, and no image has so much"),
        ((512, 512, None, 2**40), "budget is 1099511627776; at most 1073741824 is counted"),
    ],
)
def test_what_has_no_shape_is_refused(arguments, message):
    height, width, frames, budget = (*arguments, None, None)[:4]
    with pytest.raises(vlscope.InputError, match=message):
        vlscope.shapes(height, width, frames=frames, budget=budget)


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(vlscope.InputError, match="'9b' is no folder here.*2b, 4b, 8b.*qwen2.5-vl-7b"):
        vlscope.shapes(512, 512, model="9b")


def test_the_command_line_prints_the_table(capsys):
    from vlscope.cli import main

    assert main(["shape", "--height", "512", "--width", "512"]) == 0
    assert capsys.readouterr().out == TABLE
    assert main(["shape", "--height", "512", "--width", "512", "--frames", "3", "--model", "2b"]) == 0
    assert capsys.readouterr().out == f"{vlscope.shapes(512, 512, frames=3, model='2b')}\n"
    assert main(["shape", "--height", "2000", "--width", "2000", "--max-tokens", "100"]) == 0
    assert capsys.readouterr().out == f"{vlscope.shapes(2000, 2000, budget=100)}\n"
    assert main(["shape", "--height", "500", "--width", "512", "--frames", "3"]) == 2
    assert re.fullmatch("vlscope: .*multiples of 32.*500 high and 512 wide\n", capsys.readouterr().err)


def queries():
    """Random queries of the page: every model, images, videos and budgets, some of which are refused."""
    draw, found = random.Random(3), []
    for height, width in sizes(600, seed=2, longest=9000):
        query = {"model": draw.choice(list(calculator.PINNED)), "height": height, "width": width}
        kind = draw.choice(["image", "image", "budget", "video"])
        if kind == "video" and draw.random() < 0.8:
            side = 28 if query["model"].startswith("qwen2") else 32
            query |= {"height": side * draw.randint(1, 60), "width": side * draw.randint(1, 60)}
        query["frames"] = draw.randint(0, 40) if kind == "video" else None
        query["budget"] = draw.randint(1, 2000) if kind == "budget" else None
        found.append(query)
    edges = [(0, 3, None, None), (2**20, 2**20 + 1, None, None), (2**20, 2**20, 2**20, None), (9, 9, None, 2**40)]
    found += [dict(zip(("height", "width", "frames", "budget"), edge), model="qwen3-vl-8b") for edge in edges]
    return found


def test_the_page_gives_what_the_library_gives():
    given = queries()
    page = browser.document(PAGE, "cases=" + json.dumps(given, separators=(",", ":")))
    answers = json.loads(html.unescape(re.search(r'<pre id="results"[^>]*>(.*?)</pre>', page, re.DOTALL)[1]))
    refused = 0
    for query, answer in zip(given, answers, strict=True):
        try:
            shape = vlscope.shapes(**query)
        except vlscope.InputError as error:
            assert answer == {"refused": str(error)}, query
            refused += 1
        else:
            assert answer == {"rows": [list(row) for row in shape.rows()], "notes": list(shape.notes())}, query
    assert 20 < refused < len(given) / 2


def test_the_page_shows_the_table_of_the_address():
    page = browser.document(PAGE, "height=1080&width=1920&model=qwen3-vl-2b")
    shown = re.findall(r"<tr[^>]*><th[^>]*>(.*?)</th><td>(.*?)</td></tr>", page)
    assert [tuple(map(html.unescape, row)) for row in shown] == vlscope.shapes(1080, 1920, model="2b").rows()
    assert not re.search(r"""(?:src|href)=["'](?!#)""", PAGE.read_text()), "the page is one file"


def test_the_page_says_why_it_refuses():
    page = browser.document(PAGE, "height=10&width=2001")
    message = re.search(r'id="message">(.*?)</p>', page)[1]
    with pytest.raises(vlscope.InputError) as refused:
        vlscope.shapes(10, 2001)
    assert html.unescape(message) == str(refused.value)
