"""From samples to the tensors that the model takes: ids, M-RoPE positions, patches, targets.

Images are drawn in sizes that the processor never resizes, so a few lines of numpy replace it here;
`evaluate.check_folder` holds the two together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from world import CELL, Sample

PATCH = 16


@dataclass
class Encoded:
    """One sample as ids, with the spans [start, end) of its answers and its [3, ids] positions."""

    ids: list[int]
    answers: list[tuple[int, int]]
    positions: np.ndarray
    image: Image.Image | None


@dataclass
class Batch:
    """Samples padded on the right, and every token of their answers as a prediction.

    Prediction i is of `targets[i]`, made at row `rows[i]`, column `columns[i]`; `first[i]` tells
    whether it is the first token of an answer.
    """

    ids: torch.Tensor  # [batch, sequence]
    positions: torch.Tensor  # [3, batch, sequence]
    rows: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor
    first: torch.Tensor
    pixels: torch.Tensor | None  # [patches, channels * frames * PATCH * PATCH], all images in a row
    grid: torch.Tensor | None  # [images, 3]: frames, patch rows, patch columns
    tokens_per_image: list[int]


def cells(image: Image.Image) -> tuple[int, int]:
    """Columns and rows of image tokens."""
    return image.width // CELL, image.height // CELL


def prompt_text(sample: Sample) -> str:
    """The prompt up to the answer, as the chat template would write it."""
    if sample.plain:
        return sample.question
    vision = ""
    if sample.image is not None:
        columns, rows = cells(sample.image)
        vision = "<|vision_start|>" + "<|image_pad|>" * (columns * rows) + "<|vision_end|>"
    return user_turn(vision + sample.question)


def user_turn(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def encode(tokenizer: Tokenizer, sample: Sample) -> Encoded:
    """The prompt, the answer, its stop token, and the further turns."""
    ids: list[int] = []
    answers = []
    stop = ".<|endoftext|>" if sample.plain else "<|im_end|>"
    turns = [(prompt_text(sample), sample.answer)]
    turns += [("\n" + user_turn(question), answer) for question, answer in sample.further]
    for prompt, answer in turns:
        ids += tokenizer.encode(prompt).ids
        start = len(ids)
        ids += tokenizer.encode(answer + stop).ids
        answers.append((start, len(ids)))
    return Encoded(ids, answers, mrope_positions(tokenizer, ids, sample.image), sample.image)


def mrope_positions(tokenizer: Tokenizer, ids: list[int], image: Image.Image | None) -> np.ndarray:
    """Time, height and width position of every token, [3, ids].

    Text counts up by one in all three. Image tokens share the time at which the image starts and
    count rows and columns from there; the text after them goes on from the largest position.
    """
    positions = np.tile(np.arange(len(ids)), (3, 1))
    if image is None:
        return positions
    columns, rows = cells(image)
    start = ids.index(tokenizer.token_to_id("<|image_pad|>"))
    end = start + columns * rows
    positions[0, start:end] = start
    positions[1, start:end] = start + np.repeat(np.arange(rows), columns)
    positions[2, start:end] = start + np.tile(np.arange(columns), rows)
    positions[:, end:] = start + max(columns, rows) + np.arange(len(ids) - end)
    return positions


def patchify(image: Image.Image) -> np.ndarray:
    """The normalised patches of an image in merge-block order, [patches, 2 * 3 * PATCH * PATCH]."""
    pixels = (np.asarray(image, dtype=np.float32) / 255.0 - 0.5) / 0.5
    columns, rows = cells(image)
    blocks = pixels.transpose(2, 0, 1).reshape(3, rows, 2, PATCH, columns, 2, PATCH)
    patches = blocks.transpose(1, 4, 2, 5, 0, 3, 6)  # row, column, row and column in it, channel
    frames = np.repeat(patches[:, :, :, :, :, None], 2, axis=5)  # a still image is two equal frames
    return frames.reshape(4 * rows * columns, -1)


def collate(tokenizer: Tokenizer, encoded: Sequence[Encoded]) -> Batch:
    """Pads a list of samples into one batch. The last target is never an input."""
    length = max(len(item.ids) for item in encoded) - 1
    ids = np.full((len(encoded), length), tokenizer.token_to_id("<|endoftext|>"), dtype=np.int64)
    positions = np.zeros((3, len(encoded), length), dtype=np.int64)
    predictions = []
    for row, item in enumerate(encoded):
        used = len(item.ids) - 1
        ids[row, :used], positions[:, row, :used] = item.ids[:used], item.positions[:, :used]
        for start, end in item.answers:
            predictions += [(row, i - 1, item.ids[i], i == start) for i in range(start, end)]
    rows, columns, targets, first = (torch.tensor(column) for column in zip(*predictions))
    images = [item.image for item in encoded if item.image is not None]
    shapes = [cells(image) for image in images]
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        rows=rows,
        columns=columns,
        targets=targets,
        first=first,
        pixels=torch.from_numpy(np.concatenate([patchify(i) for i in images])) if images else None,
        grid=torch.tensor([(1, 2 * r, 2 * c) for c, r in shapes]) if images else None,
        tokens_per_image=[columns * rows for columns, rows in shapes],
    )


def answer_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The logits of every prediction of a batch, [predictions, vocabulary]."""
    stream = model.model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        pixel_values=batch.pixels,
        image_grid_thw=batch.grid,
        use_cache=False,
    ).last_hidden_state
    return model.lm_head(stream[batch.rows, batch.columns])
