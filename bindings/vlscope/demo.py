"""Where does the colour travel? A small study of the built-in vision-language model.

The model sees a red square and is asked for its colour. The image reaches its text blocks on two
paths: as image features among the embeddings, and as DeepStack features added to the stream after
the first three blocks. This script

1. zeroes either path, and both, and asks again;
2. writes the image rows of a blue square's run into the red square's run, block by block;
3. draws how much the last token attends to each part of the image.

Run it with `vlscope demo`, or copy it: it uses nothing but the public interface.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw

import vlscope

QUESTION = "What color is the square? Answer with one word."
SIZE = (128, 96)
DEEPSTACK = range(3)


def picture(
    color: str = "red",
    shape: str = "square",
    size: tuple[int, int] = (96, 96),
    background: str = "white",
) -> Image.Image:
    """Draws one shape in the middle of an image, half as tall as the image's shorter side.

    `color` and `background` are names or codes that Pillow knows, `shape` is "square", "circle" or
    "triangle", `size` is (width, height) in pixels. Raises ValueError on any other shape.
    """
    image = Image.new("RGB", size, background)
    canvas = ImageDraw.Draw(image)
    width, height = size
    side = min(size) // 2
    left, top = (width - side) // 2, (height - side) // 2
    right, bottom = left + side - 1, top + side - 1
    if shape == "square":
        canvas.rectangle([left, top, right, bottom], fill=color)
    elif shape == "circle":
        canvas.ellipse([left, top, right, bottom], fill=color)
    elif shape == "triangle":
        canvas.polygon([(width // 2, top), (left, bottom), (right, bottom)], fill=color)
    else:
        raise ValueError(f"shape is {shape!r}; it can be 'square', 'circle' or 'triangle'")
    return image


# --------------------------------------------------------------------------------------------------
# The experiments
# --------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    word: str
    probability: float


class Ablation(NamedTuple):
    zeroed: str
    answer: Answer


class Patching(NamedTuple):
    """The logits of two words, the clean run's answer and the donor's, with and without a patch."""

    words: tuple[str, str]
    clean: torch.Tensor  # [2], without a patch
    patched: torch.Tensor  # [blocks, 2], with the donor's rows entering this block
    answers: list[str]  # per block


def ask(
    model: vlscope.StandardizedTransformer,
    image: Image.Image,
    features: bool = False,
    deepstack: bool = False,
) -> Answer:
    """The answer about `image`, with its image features or its DeepStack features zeroed."""
    with model.trace(QUESTION, images=[image]):
        if features:
            model.vision.image_features[:] = 0
        if deepstack:
            for k in DEEPSTACK:
                model.layers[k].deepstack_output[:] = 0
        probabilities = model.next_token_probs.save()
    probability, token = probabilities[0].max(-1)
    return Answer(model.tokenizer.decode([token.item()]), probability.item())


def ablate(model: vlscope.StandardizedTransformer, image: Image.Image) -> list[Ablation]:
    """The answer with either image path zeroed, and with both."""
    return [
        Ablation("nothing", ask(model, image)),
        Ablation("image features", ask(model, image, features=True)),
        Ablation("DeepStack", ask(model, image, deepstack=True)),
        Ablation("both", ask(model, image, features=True, deepstack=True)),
    ]


def patch(model: vlscope.StandardizedTransformer, image: Image.Image, donor: Image.Image) -> Patching:
    """Writes the donor's image rows into the stream entering each block, one block at a time."""
    with model.trace(QUESTION, images=[donor]):
        mask = model.vision.image_token_mask.save()
        rows = [layer.layer_input[mask] for layer in model.layers]
        donor_logits = model.logits[0, -1].save()
    with model.trace(QUESTION, images=[image]):
        clean_logits = model.logits[0, -1].save()

    patched = []
    for layer, donor_rows in zip(model.layers, rows):
        with model.trace(QUESTION, images=[image]):
            layer.layer_input[mask] = donor_rows
            patched.append(model.logits[0, -1].save())

    tokens = [int(clean_logits.argmax()), int(donor_logits.argmax())]
    first, second = (model.tokenizer.decode([token]) for token in tokens)
    logits = torch.stack(patched)
    return Patching(
        words=(first, second),
        clean=clean_logits[tokens],
        patched=logits[:, tokens],
        answers=[model.tokenizer.decode([token]) for token in logits.argmax(-1).tolist()],
    )


def read_prompt(model: vlscope.StandardizedTransformer, image: Image.Image) -> str:
    """The prompt as the model sees it, its run of image tokens shortened."""
    with model.trace(QUESTION, images=[image]):
        ids = model.input_ids.save()
    pad = "<|image_pad|>"
    text = model.tokenizer.decode(ids[0].tolist(), skip_special_tokens=False)
    count = text.count(pad)
    return text.replace(pad * count, f"{pad} x {count}").strip()


# --------------------------------------------------------------------------------------------------
# Printing and drawing
# --------------------------------------------------------------------------------------------------


def print_ablations(ablations: list[Ablation]) -> None:
    print(f"{'zeroed':<16}{'answer':<10}probability")
    for zeroed, (word, probability) in ablations:
        print(f"{zeroed:<16}{word:<10}{probability:.3f}")


def print_patching(result: Patching) -> None:
    first, second = result.words
    print(f"{'image rows':<22}{'answer':<10}{first + ' logit':<24}{second} logit")
    rows = [("red", first, result.clean)]
    for block, (answer, logits) in enumerate(zip(result.answers, result.patched)):
        rows.append((f"blue, into block {block}", answer, logits))
    for label, answer, logits in rows:
        print(f"{label:<22}{answer:<10}{bar(logits[0]):<24}{bar(logits[1])}".rstrip())


def bar(logit: torch.Tensor) -> str:
    """A logit with its bar; one character per unit, none below zero."""
    return f"{logit:5.1f} {'#' * max(0, round(logit.item()))}"


def draw(path: Path, model: vlscope.StandardizedTransformer, image: Image.Image, patching: Patching) -> None:
    """Writes the figure. Raises `vlscope.MissingPackage` where matplotlib is not installed."""
    plot = vlscope.plot  # before matplotlib: it says what to install
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.1], hspace=0.06)
    plot.attention(model, QUESTION, images=[image], figure=top)
    top.suptitle("Attention of the last token on the image, mean of the heads, by block", fontweight="bold")
    draw_patching(bottom, patching)
    figure.savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.15)


def draw_patching(figure, result: Patching) -> None:
    """The logit of either answer by patched block, and dotted where it is without a patch."""
    axes = figure.subplots()
    blocks = range(len(result.patched))
    for index, (word, color) in enumerate(zip(result.words, ("tab:red", "tab:blue"))):
        logits, clean = result.patched[:, index].tolist(), result.clean[index].item()
        axes.plot(blocks, logits, "o-", color=color)
        axes.axhline(clean, color=color, linestyle=":", linewidth=1)
        edge = blocks[-1] + 0.1
        axes.text(edge, logits[-1], word, color=color, va="center", fontweight="bold")
        axes.text(-0.4, clean, f"{word}, no patch", color=color, va="bottom")
    axes.set(xlim=(-0.45, blocks[-1] + 0.45), xticks=blocks, ylabel="logit of the answer")
    axes.set_xlabel("block whose incoming image rows are taken from the blue square's run")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Patching the image rows", fontweight="bold")


def run(out: Path) -> None:
    """Runs the whole study and writes `demo.png` into the folder `out`."""
    model = vlscope.load("demo")
    red, blue = picture("red", size=SIZE), picture("blue", size=SIZE)

    ablations = ablate(model, red)
    answer = ablations[0].answer
    print(f"prompt\n{read_prompt(model, red)}\n")
    print(f"answer\n{answer.word}, probability {answer.probability:.3f}\n")
    print("zeroing the paths of the image")
    print_ablations(ablations)

    print("\nwriting the image rows of a blue square's run into this one")
    patching = patch(model, red, blue)
    print_patching(patching)

    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.png"
    try:
        draw(path, model, red, patching)
        print(f"\n{path}")
    except vlscope.MissingPackage as error:
        print(f"\nno picture: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for demo.png")
    run(parser.parse_args().out)


if __name__ == "__main__":
    main()
