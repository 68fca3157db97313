"""A sparse autoencoder of the built-in model: collected, trained, spliced back in, and looked at.

The autoencoder (TopK: Gao et al. 2024, arXiv:2406.04093) writes a state x of the stream behind one block as a few of
many directions,

    z = TopK(W_enc (x - b_dec) + b_enc),    x' = W_dec z + b_dec

1. draws pictures, and collects the block's output for questions about them (`vlscope.collect`);
2. trains on the rows in a shuffled order (`vlscope.ActivationDataset`);
3. puts x' in the place of x while the model answers about new pictures (`model.edit`), and says how much of the
   variance is kept and how many answers;
4. draws the features that fire on few image tokens, on the pictures that fire them most.

Run it with `python examples/sae.py --out sae`; it takes some seconds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw

import vlscope

SITE = "layers.2.layer_output"
QUESTION = "What color is the {}?"
COLORS = ("red", "green", "blue", "yellow", "black", "purple", "orange")
SHAPES = ("square", "circle", "triangle")
SIZE = (128, 96)
CELL = 32  # pixels of an image token, along a side


class Picture(NamedTuple):
    image: Image.Image
    color: str
    shape: str


class Autoencoder(torch.nn.Module):
    """A TopK autoencoder of states [..., width], which are brought to one scale first."""

    def __init__(self, statistics: vlscope.collection.Statistics, features: int = 256, active: int = 8) -> None:
        super().__init__()
        width = len(statistics.mean)
        self.active = active
        self.register_buffer("mean", statistics.mean.float())
        self.register_buffer("scale", statistics.variance.mean().sqrt().float())
        directions = torch.nn.functional.normalize(torch.randn(features, width), dim=-1)
        self.encoder = torch.nn.Parameter(directions.clone())
        self.decoder = torch.nn.Parameter(directions)
        self.encoder_bias = torch.nn.Parameter(torch.zeros(features))
        self.decoder_bias = torch.nn.Parameter(torch.zeros(width))

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """[..., features], zero but for the `active` largest ones."""
        centred = (states - self.mean) / self.scale - self.decoder_bias
        scores = (centred @ self.encoder.T + self.encoder_bias).relu()
        top = scores.topk(self.active, dim=-1)
        return torch.zeros_like(scores).scatter(-1, top.indices, top.values)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes @ self.decoder + self.decoder_bias) * self.scale + self.mean

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(states))


def draw_picture(chance: random.Random) -> Picture:
    """One shape of one colour, anywhere on a white ground."""
    color, shape, side = chance.choice(COLORS), chance.choice(SHAPES), chance.randint(24, 56)
    image = Image.new("RGB", SIZE, "white")
    left, top = chance.randint(0, SIZE[0] - side), chance.randint(0, SIZE[1] - side)
    right, bottom = left + side, top + side
    canvas = ImageDraw.Draw(image)
    if shape == "triangle":
        canvas.polygon([((left + right) / 2, top), (left, bottom), (right, bottom)], fill=color)
    else:
        draw = canvas.rectangle if shape == "square" else canvas.ellipse
        draw([left, top, right, bottom], fill=color)
    return Picture(image, color, shape)


def write_prompts(folder: Path, pictures: list[Picture]) -> Path:
    """The prompts as JSONL, with the pictures beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prompts.jsonl"
    with path.open("w") as lines:
        for number, (image, _, shape) in enumerate(pictures):
            image.save(folder / f"{number}.png")
            prompt = {"prompt": QUESTION.format(shape), "images": [f"{number}.png"]}
            lines.write(json.dumps(prompt) + "\n")
    return path


def train(acts: vlscope.ActivationDataset, steps: int) -> Autoencoder:
    """Minimise the squared error over shuffled rows."""
    torch.manual_seed(0)
    autoencoder = Autoencoder(acts.statistics[SITE])
    optimiser = torch.optim.Adam(autoencoder.parameters(), lr=3e-3)
    for _, rows in zip(range(steps), acts[SITE].batches(512, seed=0, epochs=None)):
        rows = rows.float()
        loss = ((autoencoder(rows) - rows) / autoencoder.scale).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return autoencoder.requires_grad_(False)


def unexplained(autoencoder: Autoencoder, states: torch.Tensor) -> float:
    """The fraction of the variance that the reconstruction leaves."""
    error = (autoencoder(states) - states).square().sum()
    return float(error / (states - states.mean(0)).square().sum())


class Answers(NamedTuple):
    words: list[str]
    right: float  # mean probability of the right answer


def answer(model: vlscope.StandardizedTransformer, pictures: list[Picture]) -> Answers:
    """What the model says about some pictures."""
    words, right = [], 0.0
    for image, color, shape in pictures:
        with torch.no_grad(), model.trace(QUESTION.format(shape), images=[image]):
            probabilities = model.next_token_probs[0].save()
        words.append(model.tokenizer.decode([int(probabilities.argmax())]))
        right += float(probabilities[model.tokenizer.encode(color.capitalize())[0]]) / len(pictures)
    return Answers(words, right)


def spliced(
    model: vlscope.StandardizedTransformer, replace: Callable[[torch.Tensor], torch.Tensor], pictures: list[Picture]
) -> Answers:
    """The same with a function of the block's output in its place, at every token."""
    with model.edit(SITE, lambda states: replace(states).to(states.dtype)):
        return answer(model, pictures)


def choose_features(codes: torch.Tensor, count: int) -> list[int]:
    """The strongest of the features that fire on image tokens, and on few of them: at most one in ten."""
    often = (codes > 0).float().mean(0)
    strength = codes.topk(8, dim=0).values.mean(0)
    return torch.where((often > 0) & (often < 0.1), strength, -1).topk(count).indices.tolist()


def draw_features(
    path: Path, acts: vlscope.ActivationDataset, autoencoder: Autoencoder, pictures: list[Picture]
) -> bool:
    """A row for each feature: the four pictures that fire it most, dark where it does not fire. Returns
    False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = acts[acts["image"][:] >= 0]
    codes = autoencoder.encode(rows[SITE].float())
    features = choose_features(codes, 6)
    figure = Figure(figsize=(8, 1.7 * len(features)), layout="constrained")
    grid = figure.subplots(len(features), 4, squeeze=False)
    for axes_of_feature, feature in zip(grid, features):
        strongest = torch.zeros(len(pictures)).scatter_reduce(0, rows["sample"], codes[:, feature], "amax")
        for axes, sample in zip(axes_of_feature, strongest.topk(4).indices.tolist()):
            own = rows["sample"] == sample
            heat = torch.zeros(SIZE[1] // CELL, SIZE[0] // CELL)
            heat[rows["grid_row"][own], rows["grid_col"][own]] = codes[own, feature]
            shade = 0.7 * (1 - heat / codes[:, feature].max())
            extent = (0, SIZE[0], SIZE[1], 0)
            axes.imshow(pictures[sample].image, extent=extent)
            axes.imshow(torch.zeros_like(heat).numpy(), cmap="gray", vmin=0, vmax=1, alpha=shade.numpy(), extent=extent)
            axes.set(xticks=[], yticks=[])
        axes_of_feature[0].set_ylabel(f"feature {feature}")
    figure.suptitle("Pictures that fire a feature most; light where it fires")
    figure.savefig(path, dpi=120)
    return True


def run(out: Path, count: int = 200, steps: int = 1000) -> dict[str, float]:
    """The whole study, in the folder `out`; gives its figures by name."""
    chance = random.Random(0)
    pictures = [draw_picture(chance) for _ in range(count)]
    unseen = [draw_picture(chance) for _ in range(60)]
    model = vlscope.load("demo")

    vlscope.collect(model, write_prompts(out / "data", pictures), SITE, out / "acts", batch_size=10)
    acts = vlscope.ActivationDataset(out / "acts")
    print(f"{len(acts):,} states of {SITE} from {count} prompts")

    autoencoder = train(acts, steps)
    vlscope.collect(model, write_prompts(out / "unseen", unseen), SITE, out / "unseen-acts", batch_size=10)
    left = unexplained(autoencoder, vlscope.ActivationDataset(out / "unseen-acts")[SITE][:])
    print(f"variance of new states that the autoencoder keeps: {1 - left:.1%}")

    plain = answer(model, unseen)
    found = {
        "reconstruction": spliced(model, autoencoder, unseen),
        "mean": spliced(model, lambda states: autoencoder.mean.expand_as(states), unseen),
    }
    print(f"{'in its place':<16}{'same answer':<14}probability of the right one")
    print(f"{'(nothing)':<16}{1:<14.0%}{plain.right:.3f}")
    figures = {"unexplained": left, "right": plain.right}
    for name, (words, right) in found.items():
        same = sum(a == b for a, b in zip(words, plain.words)) / len(words)
        print(f"{name:<16}{same:<14.0%}{right:.3f}")
        figures |= {f"same, {name}": same, f"right, {name}": right}

    path = out / "features.png"
    if draw_features(path, acts, autoencoder, pictures):
        print(path)
    else:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("sae"), help="folder for the data and features.png")
    run(parser.parse_args().out)


if __name__ == "__main__":
    main()
