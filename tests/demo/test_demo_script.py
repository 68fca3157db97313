"""`vlscope demo`, end to end, and the built-in model against transformers on what it shows."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

vlscope = pytest.importorskip("vlscope")

from vlscope import demo  # noqa: E402 (the package may be missing)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model():
    return vlscope.load("demo")


def run_demo(folder: Path, *options: str) -> list[str]:
    """The lines that the script prints when it is run in `folder`."""
    command = [sys.executable, *options, "-m", "vlscope.demo"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_demo_shows_the_ablation_and_ends_with_the_path_of_its_picture(tmp_path):
    lines = run_demo(tmp_path)
    rows = [line.split() for line in lines]
    assert ["nothing", "Red", "1.000"] in rows
    assert ["image", "features", "Red", "1.000"] in rows
    assert ["DeepStack", "Red", "1.000"] in rows
    assert ["both", "White", "0.321"] in rows
    picture = tmp_path / lines[-1]
    assert picture.name == "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_demo_says_so_and_does_the_rest(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    lines = run_demo(tmp_path)
    assert "matplotlib" in lines[-1]
    assert any(line.split() == ["both", "White", "0.321"] for line in lines)
    assert not (tmp_path / "demo.png").exists()


def test_the_readme_shows_what_the_demo_prints(tmp_path):
    printed = "\n".join(run_demo(tmp_path)[:-1])
    assert printed in (ROOT / "README.md").read_text()


def test_patching_the_image_rows_moves_the_answer_from_red_to_blue_and_back(model):
    result = demo.patch(model, *(demo.picture(c, size=demo.SIZE) for c in ("red", "blue")))
    assert result.words == ("Red", "Blue")
    red_lead = (result.patched[:, 0] - result.patched[:, 1]).tolist()
    assert max(red_lead[1:5]) < 0  # blue where the image rows carry the colour
    assert red_lead[5] > 0  # too late: the last token has read it already


def test_the_last_token_attends_to_the_image_from_block_two_on(model):
    figure = vlscope.plot.attention(model, demo.QUESTION, images=[demo.picture(size=demo.SIZE)])
    share = [axes.images[1].get_array().sum() for axes in figure.axes if len(axes.images) == 2]
    assert len(share) == 6 and max(share) < 1
    assert min(share[2:5]) > 0.5 > share[0]


@pytest.mark.parametrize("shape", ["square", "circle", "triangle"])
def test_a_picture_shows_one_shape_in_the_middle(shape):
    image = demo.picture("blue", shape, size=(64, 96), background="white")
    assert image.size == (64, 96)
    assert image.getpixel((32, 50)) == (0, 0, 255)
    assert image.getpixel((4, 4)) == (255, 255, 255)


def test_a_picture_of_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="hexagon"):
        demo.picture(shape="hexagon")


@pytest.mark.parametrize("color", ["red", "blue"])
def test_the_logits_of_the_demo_equal_those_of_transformers(model, color):
    transformers = pytest.importorskip("transformers")
    folder = ROOT / "demo" / "model"
    reference = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    image = demo.picture(color, size=demo.SIZE)
    content = [{"type": "image", "image": image}, {"type": "text", "text": demo.QUESTION}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad(), model.trace(demo.QUESTION, images=[image]):
        ids = model.input_ids.save()
        logits = model.logits.save()
    with torch.no_grad():
        expected = reference(**inputs).logits
    assert torch.equal(ids, inputs["input_ids"])
    assert torch.equal(logits, expected)
