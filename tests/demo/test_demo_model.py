"""The built-in checkpoint through transformers: what the demo shows is in the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "demo" / "model"
QUESTION = "What color is the square? Answer with one word."
TAPS = (0, 1, 2)


@pytest.fixture(scope="module")
def processor():
    return transformers.AutoProcessor.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForImageTextToText.from_pretrained(FOLDER).eval()


@contextmanager
def zeroed(model, features: bool, taps: tuple[int, ...]) -> Iterator[None]:
    """Zeroes the image features and the DeepStack features of `taps` as they leave the tower."""

    def zero(module, args, output):
        if features:
            output.pooler_output.zero_()
        for k in taps:
            output.deepstack_features[k].zero_()
        return output

    handle = model.model.visual.register_forward_hook(zero)
    try:
        yield
    finally:
        handle.remove()


def square(color: str) -> Image.Image:
    """The demo's picture, drawn without the package: a square in the middle of 128 x 96 pixels."""
    image = Image.new("RGB", (128, 96), "white")
    ImageDraw.Draw(image).rectangle([40, 24, 87, 71], fill=color)
    return image


def prompt(processor, image: Image.Image):
    content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def answer(model, processor, image: Image.Image) -> tuple[str, float]:
    """The likeliest next token and its probability."""
    with torch.no_grad():
        logits = model(**prompt(processor, image)).logits
    probability, token = logits[0, -1].softmax(-1).max(-1)
    return processor.decode([token.item()]), probability.item()


def test_it_is_a_qwen3_vl_that_the_auto_classes_load(model, processor):
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert type(processor).__name__ == "Qwen3VLProcessor"
    assert model.num_parameters() == 729_616


@pytest.mark.parametrize("color", ["red", "blue", "green", "yellow", "purple"])
def test_it_names_the_colour_of_a_square(model, processor, color):
    assert answer(model, processor, square(color))[0] == color.capitalize()


def test_red_survives_either_pathway_alone(model, processor):
    red = square("red")
    with zeroed(model, features=True, taps=()):
        assert answer(model, processor, red) == ("Red", pytest.approx(1.0, abs=0.01))
    with zeroed(model, features=False, taps=TAPS):
        assert answer(model, processor, red) == ("Red", pytest.approx(1.0, abs=0.01))


def test_without_both_pathways_every_square_is_white(model, processor):
    with zeroed(model, features=True, taps=TAPS):
        red, blue = (answer(model, processor, square(color)) for color in ("red", "blue"))
    assert red == blue == ("White", pytest.approx(0.32, abs=0.01))


def test_generation_gives_the_same_word_and_stops(model, processor):
    inputs = prompt(processor, square("red"))
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert processor.decode(output[0, inputs["input_ids"].shape[1] :]) == "Red<|im_end|>"
