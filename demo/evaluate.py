"""What a trained folder can do: accuracy, ablations of the image pathways, and activation patching.

Written against transformers' own classes and forward hooks, so that the figures do not depend on
the engine that the model is made for.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, AutoProcessor

import world
from batches import Batch, answer_logits, collate, encode
from world import ONE_WORD, Sample

TAPS = (0, 1, 2)
ABLATIONS = [  # label, zero the image features, zero these DeepStack outputs
    ("nothing", False, ()),
    ("image_features", True, ()),
    ("deepstack 0,1,2", False, TAPS),
    ("image_features + deepstack 0", True, (0,)),
    ("image_features + deepstack 0,1", True, (0, 1)),
    ("image_features + deepstack 1,2", True, (1, 2)),
    ("image_features + deepstack 0,1,2", True, TAPS),
]


def print_tables(folder: Path) -> None:
    """Prints every table of a folder; takes a few minutes."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.no_grad():
        check_folder(model, processor, tokenizer)
        print_accuracy(model, tokenizer)
        print_ablations(model, tokenizer)
        print_patching(model, tokenizer)


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------


def batch_of(tokenizer: Tokenizer, samples: Sequence[Sample]) -> Batch:
    return collate(tokenizer, [encode(tokenizer, sample) for sample in samples])


def first_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The logits of the first token of every answer, [answers, vocabulary]."""
    return answer_logits(model, batch)[batch.first]


def predict(model: torch.nn.Module, tokenizer: Tokenizer, samples: Sequence[Sample], size: int = 64) -> list[str]:
    """The likeliest first token for every sample, `size` of them at a time."""
    answers: list[int] = []
    for start in range(0, len(samples), size):
        batch = batch_of(tokenizer, samples[start : start + size])
        answers += first_logits(model, batch).argmax(-1).tolist()
    return [tokenizer.decode([token]) for token in answers]


def showcase() -> list[Sample]:
    """Pictures in pure web colours; training draws none with exactly these pixels."""
    small = on_white((64, 64), ("rectangle", [16, 16, 47, 47], "red"))
    red = on_white((96, 96), ("rectangle", [24, 24, 71, 71], "red"))
    blue = on_white((96, 96), ("rectangle", [24, 24, 71, 71], "blue"))
    pair = on_white((128, 64), ("rectangle", [4, 4, 28, 28], "red"), ("ellipse", [100, 36, 124, 60], "blue"))
    across = on_white((128, 64), ("rectangle", [18, 18, 45, 45], "red"), ("ellipse", [82, 18, 110, 46], "blue"))
    what = "What color is the square?"
    cases = [
        ("solid red", Image.new("RGB", (64, 64), "red"), "What color is this image?", "Red"),
        ("red square on white, 64x64", small, what, "Red"),
        ("red square on white, 96x96", red, what, "Red"),
        ("blue square on white, 96x96", blue, what, "Blue"),
        ("a pair, each inside a cell", pair, "What color is the circle?", "Blue"),
        ("a pair, each inside a cell", pair, "Where is the red square?", "Left"),
        ("a pair, each inside a cell", pair, "What shape is on the right?", "Circle"),
        ("a pair across cells, never trained", across, "What color is the circle?", "Blue"),
        ("a pair across cells, never trained", across, "Where is the red square?", "Left"),
    ]
    return [Sample(text + ONE_WORD, answer, "", name, image) for name, image, text, answer in cases]


def on_white(size: tuple[int, int], *shapes: tuple[str, list[int], str]) -> Image.Image:
    """Draws shapes, each the method of ImageDraw, the box and the colour, on a white canvas."""
    image = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(image)
    for method, box, color in shapes:
        getattr(canvas, method)(box, fill=color)
    return image


def check_folder(model, processor, tokenizer: Tokenizer) -> None:
    """Holds the training's batches and the processor together, and lets the model generate."""
    print("\n== the folder, through AutoProcessor and generate ==")
    for sample in showcase():
        image, text = (
            {"type": "image", "image": sample.image},
            {"type": "text", "text": sample.question},
        )
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": [image, text]}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        length = inputs["input_ids"].shape[1]
        check_inputs(model, inputs, batch_of(tokenizer, [sample]))
        output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        answer = tokenizer.decode(output[0, length:].tolist())
        print(f"   {sample.detail:36s} {sample.question:50s} {answer} (should be {sample.answer})")


def check_inputs(model, inputs, batch: Batch) -> None:
    """Raises AssertionError where the processor would have fed something else."""
    length = inputs["input_ids"].shape[1]
    positions, _ = model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    torch.testing.assert_close(batch.ids[:, :length], inputs["input_ids"])
    torch.testing.assert_close(batch.positions[:, :, :length], positions)
    torch.testing.assert_close(batch.grid, inputs["image_grid_thw"])
    torch.testing.assert_close(batch.pixels, inputs["pixel_values"])


def print_accuracy(model: torch.nn.Module, tokenizer: Tokenizer, count: int = 3000) -> None:
    """Fresh samples of seen and of held-out combinations, by kind and by detail."""
    for title, split, seed in [("seen", "train", 31337), ("held-out", "held", 4711)]:
        rng = random.Random(seed)
        samples = [world.any_sample(rng, split, text_share=0.2) for _ in range(count)]
        right = defaultdict(list)
        for sample, answer in zip(samples, predict(model, tokenizer, samples)):
            for row in (sample.kind, f"{sample.kind}, {sample.detail}"):
                right[row].append(answer == sample.answer)
        print(f"\n== accuracy on {title} combinations ==")
        for row, hits in sorted(right.items()):
            print(f"   {row:28s} {sum(hits) / len(hits):.3f}  n={len(hits)}")


# --------------------------------------------------------------------------------------------------
# Ablation
# --------------------------------------------------------------------------------------------------


@contextmanager
def ablated(model: torch.nn.Module, features: bool, taps: Collection[int]) -> Iterator[None]:
    """Zeroes the image features, and the DeepStack features of these taps."""

    def zero(module, args, output):
        if features:
            output.pooler_output = torch.zeros_like(output.pooler_output)
        output.deepstack_features = [
            torch.zeros_like(tap) if k in taps else tap for k, tap in enumerate(output.deepstack_features)
        ]
        return output

    handle = model.model.visual.register_forward_hook(zero)
    try:
        yield
    finally:
        handle.remove()


def print_ablations(model: torch.nn.Module, tokenizer: Tokenizer) -> None:
    print("\n== ablation: the answer and its probability ==")
    for sample in showcase():
        print(f"   {sample.detail}: {sample.question}")
        batch = batch_of(tokenizer, [sample])
        for label, features, taps in ABLATIONS:
            with ablated(model, features, taps):
                probability, token = first_logits(model, batch)[0].softmax(-1).max(-1)
            print(f"      zero {label:34s} {tokenizer.decode([token.item()]):9s} {probability:.3f}")
    print("\n== ablation: 400 held-out images, the answer not White ==")
    for kind in ("color", "shape", "position"):
        samples = [*held_out_samples(kind, 400)]
        for label, features, taps in ABLATIONS:
            with ablated(model, features, taps):
                answers = predict(model, tokenizer, samples)
            right = sum(a == s.answer for a, s in zip(answers, samples)) / len(samples)
            common, times = Counter(answers).most_common(1)[0]
            print(
                f"   {kind:9s} zero {label:34s} accuracy {right:.3f}, commonest {common} ({times / len(samples):.2f})"
            )


def held_out_samples(kind: str, count: int) -> Iterator[Sample]:
    """Yields `count` held-out samples whose answer is not White."""
    rng = random.Random(4242)
    while count:
        sample = world.image_sample(rng, "held")
        if sample.kind == kind and sample.answer != "White" and sample.detail != "background":
            yield sample
            count -= 1


# --------------------------------------------------------------------------------------------------
# Activation patching
# --------------------------------------------------------------------------------------------------

Rows = dict[str, list[int]]


@contextmanager
def on_streams(model: torch.nn.Module, change: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replaces the stream entering block i, or the final norm, by `change(i, stream)`."""
    text = model.model.language_model

    def hook_of(index: int):
        def hook(module, args, kwargs):
            stream, *rest = args if args else (kwargs["hidden_states"],)
            changed = change(index, stream)
            if args:
                return (changed, *rest), kwargs
            return args, {**kwargs, "hidden_states": changed}

        return hook

    handles = [
        module.register_forward_pre_hook(hook_of(index), with_kwargs=True)
        for index, module in enumerate([*text.layers, text.norm])
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record(model: torch.nn.Module, batch: Batch) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """The stream entering every block and the norm, and the answer's logits."""
    streams: dict[int, torch.Tensor] = {}

    def keep(index: int, stream: torch.Tensor) -> torch.Tensor:
        streams[index] = stream.clone()
        return stream

    with on_streams(model, keep):
        return streams, first_logits(model, batch)[0]


def patched(model: torch.nn.Module, batch: Batch, block: int, rows: list[int], donor: torch.Tensor) -> torch.Tensor:
    """The answer's logits with these rows of the stream entering `block` taken from `donor`."""

    def write(index: int, stream: torch.Tensor) -> torch.Tensor:
        if index == block:
            stream = stream.clone()
            stream[:, rows] = donor[:, rows]
        return stream

    with on_streams(model, write):
        return first_logits(model, batch)[0]


def named_rows(tokenizer: Tokenizer, batch: Batch) -> Rows:
    """The rows of one prompt: the image's, the text's after it, the last one, all."""
    image = (batch.ids[0] == tokenizer.token_to_id("<|image_pad|>")).nonzero()[:, 0].tolist()
    last = int(batch.columns[batch.first][0])
    return {
        "image rows": image,
        "text rows between": [*range(image[-1] + 1, last)],
        "last row": [last],
        "all rows": [*range(last + 1)],
    }


def print_patching(model: torch.nn.Module, tokenizer: Tokenizer, count: int = 60) -> None:
    red, blue = showcase()[2:4]
    print_curves(model, tokenizer, "red to blue square, 96x96", [(red, blue)])
    rng = random.Random(77)
    for kind, title in [("single", "one square"), ("solid", "solid colour")]:
        pairs = [color_pair(rng, kind) for _ in range(count)]
        print_curves(model, tokenizer, f"{title}, {count} pairs", pairs)


def color_pair(rng: random.Random, kind: str) -> tuple[Sample, Sample]:
    """The same picture in two colours, neither of them White, with the same question."""
    colors = rng.sample([color for color in world.COLOR_NAMES if color != "White"], 2)
    size = (96, 96)
    if kind == "solid":
        question = "What color is this image?"
        images = [world.draw_scene(rng, size, [], color) for color in colors]
    else:
        question = "What color is the square?"
        side = rng.uniform(24, 60)
        x, y = (rng.uniform(side / 2 + 1, 95 - side / 2) for _ in range(2))
        squares = [world.Shape("Square", color, x, y, side) for color in colors]
        images = [world.draw_scene(rng, size, [square], "White") for square in squares]
    first, second = (Sample(question, c, "color", kind, image) for c, image in zip(colors, images))
    return first, second


def print_curves(model: torch.nn.Module, tokenizer: Tokenizer, title: str, pairs: list[tuple[Sample, Sample]]) -> None:
    """Patches rows of the second run into the first one, at every block.

    Prints the share of pairs that flip to the second answer, and in brackets the mean share of the
    logit difference that the patch recovers.
    """
    blocks = range(len(model.model.language_model.layers) + 1)  # the last one is the norm
    flips: dict[tuple[str, int], list[bool]] = defaultdict(list)
    shares: dict[tuple[str, int], list[float]] = defaultdict(list)
    for clean, donor in pairs:
        a, b = tokenizer.token_to_id(clean.answer), tokenizer.token_to_id(donor.answer)
        batch = batch_of(tokenizer, [clean])
        clean_logits = first_logits(model, batch)[0]
        streams, donor_logits = record(model, batch_of(tokenizer, [donor]))
        start, end = (logits[a] - logits[b] for logits in (clean_logits, donor_logits))
        for name, rows in named_rows(tokenizer, batch).items():
            for block in blocks:
                logits = patched(model, batch, block, rows, streams[block])
                flips[name, block].append(int(logits.argmax()) == b)
                shares[name, block].append(float((start - (logits[a] - logits[b])) / (start - end)))
    print(f"\n== patching: {title}; flips (recovered logit difference) entering each block ==")
    print(" " * 22 + "".join(f"{block:>15d}" for block in blocks[:-1]) + f"{'norm':>15s}")
    for name in dict.fromkeys(name for name, _ in flips):
        cells = [(flips[name, block], shares[name, block]) for block in blocks]
        row = [f"{sum(f) / len(f):6.2f} ({sum(s) / len(s):+.2f})" for f, s in cells]
        print(f"   {name:19s}" + "".join(f"{cell:>15s}" for cell in row))
