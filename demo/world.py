"""What the built-in model is trained on: drawn shapes, questions about them, and a few facts.

Every sample is a question with an answer of one token, most of them about one drawn image. Some
combinations of shape, colour and background are held out of training, so that an evaluation on
them measures composition and not memory.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from PIL import Image, ImageDraw

Split = Literal["train", "held", "any"]  # never, always, or maybe a held-out combination
Kind = Literal["solid", "single", "edge", "pair", "count"]

COLORS = {  # low and high end per channel; the pure web colours lie inside
    "Red": ((190, 0, 0), (255, 50, 50)),
    "Green": ((0, 115, 0), (50, 255, 70)),
    "Blue": ((0, 0, 180), (60, 90, 255)),
    "Yellow": ((225, 205, 0), (255, 255, 70)),
    "White": ((238, 238, 238), (255, 255, 255)),
    "Black": ((0, 0, 0), (28, 28, 28)),
    "Purple": ((105, 0, 115), (170, 60, 205)),
    "Orange": ((235, 120, 0), (255, 175, 45)),
}
COLOR_NAMES = list(COLORS)
SHAPES = ["Square", "Circle", "Triangle"]
COUNTS = ["One", "Two", "Three", "Four"]
PLACES = {
    "Left": "on the left",
    "Right": "on the right",
    "Top": "at the top",
    "Bottom": "at the bottom",
    "Center": "in the center",
}
SIZES = [(64, 64), (96, 64), (64, 96), (96, 96), (128, 64), (64, 128), (128, 96), (96, 128)]
CELL = 32  # pixels per side of the square that becomes one image token

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
    "Japan": "Tokyo", "China": "Beijing", "Russia": "Moscow", "Greece": "Athens",
    "Egypt": "Cairo", "Cuba": "Havana", "Norway": "Oslo", "Poland": "Warsaw",
    "Ireland": "Dublin", "Portugal": "Lisbon", "Peru": "Lima", "Kenya": "Nairobi",
}  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NAMES = [
    "Mary", "John", "Tom", "Anna", "James", "Laura",
    "Paul", "Emma", "Peter", "Sarah", "David", "Alice",
]  # fmt: skip
VENUES = ["store", "park", "school", "garden", "station", "beach"]
THINGS = ["drink", "book", "ball", "ring", "map", "letter"]

# White is the commonest colour by a wide margin, and so the answer when no image path is left. A
# white shape cannot be drawn on white, hence the high share of white shapes elsewhere.
WHITE_AMONG_SOLIDS = 0.30
WHITE_AMONG_SHAPES = 0.55

ONE_WORD = " Answer with one word."

# How often each kind of image is drawn: at most one shape at first, everything afterwards.
KINDS: list[Kind] = ["solid", "single", "edge", "pair", "count"]
EASY_MIX = [0.12, 0.53, 0.35, 0.0, 0.0]
FULL_MIX = [0.12, 0.24, 0.10, 0.44, 0.10]


class Question(NamedTuple):
    """A question, its one-word answer, and the row of the accuracy table where it counts."""

    text: str
    answer: str
    kind: str
    detail: str


class Shape(NamedTuple):
    """A shape to draw: its name, its colour, its centre and its side, in pixels."""

    name: str
    color: str
    x: float
    y: float
    side: float


class Scene(NamedTuple):
    """What an image shows, a caption where it has one, and a source of questions about it."""

    background: str
    shapes: list[Shape]
    caption: str | None
    ask: Callable[[], Question]


@dataclass
class Sample:
    """A prompt and its answer: one chat turn, further turns about the same image, or plain text.

    With `plain` set, `question` is the beginning of a sentence that `answer` goes on with.
    """

    question: str
    answer: str
    kind: str
    detail: str
    image: Image.Image | None = None
    caption: str | None = None
    plain: bool = False
    further: list[tuple[str, str]] = field(default_factory=list)


def is_held_out(shape: str, color: str, background: str) -> bool:
    """Whether training never draws this combination: about 6 percent of them.

    Red and blue squares on white stay in, because leaving one out teaches that a square on white
    does not have that colour, and the demo asks about exactly those.
    """
    if shape == "Square" and color in ("Red", "Blue") and background == "White":
        return False
    index = SHAPES.index(shape) * 8 + COLOR_NAMES.index(color)
    return ((index * 8 + COLOR_NAMES.index(background)) * 7919 + 13) % 100 < 6


def is_held_out_pair(first: str, second: str) -> bool:
    """Whether training never brings these two names together, in this order of drawing."""
    return (NAMES.index(first) * 12 + NAMES.index(second)) % 7 == 3


# --------------------------------------------------------------------------------------------------
# Drawing
# --------------------------------------------------------------------------------------------------


def shade(rng: random.Random, color: str) -> tuple[int, ...]:
    """A random RGB value that counts as `color`."""
    return tuple(rng.randint(low, high) for low, high in zip(*COLORS[color]))


def draw_scene(rng: random.Random, size: tuple[int, int], shapes: Sequence[Shape], background: str) -> Image.Image:
    """Draws `shapes` in order on a canvas of `size` (width, height)."""
    image = Image.new("RGB", size, shade(rng, background))
    canvas = ImageDraw.Draw(image)
    for shape in shapes:
        fill, half = shade(rng, shape.color), shape.side / 2
        left, top, right, bottom = shape.x - half, shape.y - half, shape.x + half, shape.y + half
        if shape.name == "Square":
            canvas.rectangle([left, top, right, bottom], fill=fill)
        elif shape.name == "Circle":
            canvas.ellipse([left, top, right, bottom], fill=fill)
        else:
            canvas.polygon([(shape.x, top), (left, bottom), (right, bottom)], fill=fill)
    return image


def pick_color(rng: random.Random, white: float, avoid: Sequence[str] = ()) -> str:
    """A colour outside `avoid`, White with probability `white`."""
    if "White" not in avoid and rng.random() < white:
        return "White"
    return rng.choice([c for c in COLOR_NAMES if c != "White" and c not in avoid])


def pick_shape(
    rng: random.Random, background: str, split: Split, other: tuple[str, str] | None = None
) -> tuple[str, str] | None:
    """A shape and its colour that `split` allows on `background`, unlike `other` in both.

    Returns None where no such combination turned up.
    """
    other_shapes, other_colors = ((other[0],), (other[1],)) if other else ((), ())
    for _ in range(400):
        shape = rng.choice([s for s in SHAPES if s not in other_shapes])
        color = pick_color(rng, WHITE_AMONG_SHAPES, (background, *other_colors))
        if split == "any" or is_held_out(shape, color, background) == (split == "held"):
            return shape, color
    return None


def place_in_cell(rng: random.Random, column: int, row: int) -> tuple[float, float, float]:
    """A centre and a side (x, y, side) that keep a shape inside one cell."""
    side = rng.uniform(22, 28)
    play = CELL / 2 - side / 2 - 1
    x = CELL * column + CELL / 2 + rng.uniform(-play, play)
    y = CELL * row + CELL / 2 + rng.uniform(-play, play)
    return x, y, side


# --------------------------------------------------------------------------------------------------
# Scenes. Each function draws one kind; None means that the background allows no such scene.
# --------------------------------------------------------------------------------------------------


def solid_scene(rng: random.Random, size: tuple[int, int], background: str, split: Split) -> Scene | None:
    """One colour over the whole image."""
    color = pick_color(rng, WHITE_AMONG_SOLIDS)

    def ask() -> Question:
        text = rng.choice(["What color is this image?", "What color is this?"])
        return Question(text, color, "color", "solid")

    return Scene(color, [], f"A {color.lower()} image.", ask)


def single_scene(rng: random.Random, size: tuple[int, int], background: str, split: Split) -> Scene | None:
    """One shape, small inside a cell or large anywhere."""
    picked = pick_shape(rng, background, split)
    if picked is None:
        return None
    shape, color = picked
    width, height = size
    if rng.random() < 0.6:
        place = place_in_cell(rng, rng.randrange(width // CELL), rng.randrange(height // CELL))
    else:
        side = rng.uniform(0.4, 0.85) * min(size)
        margin = side / 2 + 1
        place = rng.uniform(margin, width - margin), rng.uniform(margin, height - margin), side

    def ask() -> Question:
        which = rng.random()
        if which < 0.50:
            return Question(f"What color is the {shape.lower()}?", color, "color", "single")
        if which < 0.85:
            return Question("What shape is this?", shape, "shape", "single")
        return Question("What color is the background?", background, "color", "background")

    caption = f"A {color.lower()} {shape.lower()}, {background.lower()} background."
    return Scene(background, [Shape(shape, color, *place)], caption, ask)


def edge_scene(rng: random.Random, size: tuple[int, int], background: str, split: Split) -> Scene | None:
    """One small shape at an edge or in the middle, and the question where it is."""
    picked = pick_shape(rng, background, split)
    if picked is None:
        return None
    shape, color = picked
    width, height = size
    place = rng.choice(list(PLACES))
    side = rng.uniform(18, 26)
    x = width / 2 + rng.uniform(-0.08, 0.08) * width
    y = height / 2 + rng.uniform(-0.08, 0.08) * height
    near = rng.uniform(side / 2 + 1, side / 2 + 5)
    x = {"Left": near, "Right": width - near}.get(place, x)
    y = {"Top": near, "Bottom": height - near}.get(place, y)

    def ask() -> Question:
        return Question(f"Where is the {shape.lower()}?", place, "position", "single")

    caption = f"A {color.lower()} {shape.lower()} {PLACES[place]}, {background.lower()} background."
    return Scene(background, [Shape(shape, color, x, y, side)], caption, ask)


def pair_scene(rng: random.Random, size: tuple[int, int], background: str, split: Split) -> Scene | None:
    """Two shapes that differ in both name and colour, side by side or one above the other."""
    first = pick_shape(rng, background, split)
    second = first and pick_shape(rng, background, "any" if split == "held" else split, first)
    if first is None or second is None:
        return None
    if rng.random() < 0.5:
        first, second = second, first
    horizontal = rng.random() < 0.5
    shapes = [Shape(*picked, *place) for picked, place in zip((first, second), place_pair(rng, size, horizontal))]
    names = ("Left", "Right") if horizontal else ("Top", "Bottom")

    def ask() -> Question:
        index = rng.randint(0, 1)
        shape, color = (first, second)[index]
        where = PLACES[names[index]]
        which = rng.random()
        if which < 0.24:
            return Question(f"What color is the {shape.lower()}?", color, "color", "pair by shape")
        if which < 0.44:
            return Question(f"What color is the shape {where}?", color, "color", "pair by place")
        if which < 0.64:
            return Question(f"What shape is {where}?", shape, "shape", "pair by place")
        if which < 0.78:
            return Question(f"What shape is {color.lower()}?", shape, "shape", "pair by color")
        text = f"Where is the {color.lower()} {shape.lower()}?"
        return Question(text, names[index], "position", "pair")

    both = " and ".join(
        f"a {color.lower()} {shape.lower()} {PLACES[name]}" for (shape, color), name in zip((first, second), names)
    )
    caption = f"A{both[1:]}, {background.lower()} background."
    return Scene(background, shapes, caption, ask)


def place_pair(rng: random.Random, size: tuple[int, int], horizontal: bool) -> list[tuple[float, float, float]]:
    """Two places, each inside one cell, one in each half of the image along one axis.

    They lie closer across that axis than along it, so that there is one right answer to "where".
    """
    columns, rows = size[0] // CELL, size[1] // CELL
    along, across = (columns, rows) if horizontal else (rows, columns)
    start, end = rng.randrange(along // 2), along - 1 - rng.randrange(along // 2)
    start_across = rng.randrange(across)
    near = [cell for cell in range(across) if abs(cell - start_across) < end - start]
    cells = (start, start_across), (end, rng.choice(near))
    return [place_in_cell(rng, *(cell if horizontal else cell[::-1])) for cell in cells]


def count_scene(rng: random.Random, size: tuple[int, int], background: str, split: Split) -> Scene | None:
    """One to four shapes in cells of their own, and the question how many there are."""
    wanted = rng.randint(1, 4)
    cells = [(x, y) for x in range(size[0] // CELL) for y in range(size[1] // CELL)]
    shapes = []
    for column, row in rng.sample(cells, wanted):
        picked = pick_shape(rng, background, "any" if split == "held" else split)
        if picked is not None:
            shapes.append(Shape(*picked, *place_in_cell(rng, column, row)))
    if len(shapes) < wanted:
        return None

    def ask() -> Question:
        return Question("How many shapes are there?", COUNTS[wanted - 1], "count", "count")

    return Scene(background, shapes, None, ask)


SCENES = {
    "solid": solid_scene,
    "single": single_scene,
    "edge": edge_scene,
    "pair": pair_scene,
    "count": count_scene,
}


# --------------------------------------------------------------------------------------------------
# Samples
# --------------------------------------------------------------------------------------------------


def image_sample(
    rng: random.Random,
    split: Split = "train",
    kind: Kind | None = None,
    turns: int = 1,
    mix: Sequence[float] = FULL_MIX,
) -> Sample:
    """One image and up to `turns` different questions about it in one chat."""
    kind = kind or rng.choices(KINDS, mix)[0]
    size = rng.choice(SIZES)
    scene = None
    while scene is None:
        palette = ["White", "Black", rng.choice(COLOR_NAMES)]
        scene = SCENES[kind](rng, size, rng.choices(palette, [0.40, 0.20, 0.40])[0], split)
    question = scene.ask()
    image = draw_scene(rng, size, scene.shapes, scene.background)
    sample = Sample(question.text, question.answer, question.kind, question.detail, image, scene.caption)
    if turns > 1:
        add_turns(rng, sample, scene, turns)
    return sample


def add_turns(rng: random.Random, sample: Sample, scene: Scene, turns: int) -> None:
    """Adds further questions to a sample, whose first one sometimes becomes one for a caption."""
    if scene.caption and rng.random() < 0.3:
        sample.question, sample.answer = "Describe this image.", scene.caption
        sample.kind = sample.detail = "caption"
    for _ in range(turns - 1):
        question = scene.ask()
        asked = [sample.question, *(text for text, _ in sample.further)]
        if question.text not in asked:
            sample.further.append((question.text, question.answer))


def text_sample(rng: random.Random, split: Split = "train") -> Sample:
    """A capital, a day of the week, or who receives the thing."""
    kind = rng.choices(["capital", "day", "receiver"], [0.4, 0.1, 0.5])[0]
    if kind == "capital":
        return capital_sample(rng)
    if kind == "day":
        day = rng.randrange(7)
        text = f"The day after {DAYS[day]} is"
        return Sample(text, " " + DAYS[(day + 1) % 7], "text", "day", plain=True)
    return receiver_sample(rng, split)


def capital_sample(rng: random.Random) -> Sample:
    country = rng.choice(list(CAPITALS))
    capital = CAPITALS[country]
    which = rng.random()
    if which < 0.4:
        text = f"The capital of {country} is"
        return Sample(text, " " + capital, "text", "capital", plain=True)
    if which < 0.6:
        text = f"{capital} is the capital of"
        return Sample(text, " " + country, "text", "capital", plain=True)
    return Sample(f"What is the capital of {country}?", capital, "text", "capital chat")


def receiver_sample(rng: random.Random, split: Split) -> Sample:
    """The indirect-object task: two names, one of them acts, the other one receives."""
    while True:
        first, second = rng.sample(NAMES, 2)
        if split == "any" or is_held_out_pair(first, second) == (split == "held"):
            break
    giver, receiver = rng.choice([(first, second), (second, first)])
    template = rng.choice([
        "When {a} and {b} went to the {venue}, {giver} gave a {thing} to",
        "Then {a} and {b} had a {thing} at the {venue}, and {giver} gave it to",
        "After {a} and {b} left the {venue}, {giver} sent a {thing} to",
    ])  # fmt: skip
    venue, thing = rng.choice(VENUES), rng.choice(THINGS)
    text = template.format(a=first, b=second, giver=giver, venue=venue, thing=thing)
    return Sample(text, " " + receiver, "text", "receiver", plain=True)


def any_sample(
    rng: random.Random,
    split: Split = "train",
    text_share: float = 0.14,
    turns: int = 1,
    mix: Sequence[float] = FULL_MIX,
) -> Sample:
    """A sample with an image, or a text in `text_share` of the cases."""
    if rng.random() < text_share:
        sample = text_sample(rng, split)
    else:
        sample = image_sample(rng, split, turns=turns, mix=mix)
    if sample.kind in ("color", "shape", "position", "count") and rng.random() < 0.4:
        sample.question += ONE_WORD
    return sample
