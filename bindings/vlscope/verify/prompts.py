"""Prompts of random tokens and pixels for any checkpoint, as plain tensors.

No tokenizer and no processor is asked: what a forward is given is `input_ids`, `attention_mask`,
pixels and grids, and any ids and pixels will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

__all__ = ["CASES", "Grid", "Inputs", "Spelling", "of"]

Inputs = dict[str, torch.Tensor]
#: Temporal patches, rows and columns of patches.
Grid = tuple[int, int, int]

WIDE, TALL, SQUARE, STRIP, LARGE = (1, 4, 6), (1, 6, 2), (1, 4, 4), (1, 2, 10), (1, 8, 10)
CLIP, LONG = (2, 6, 4), (3, 2, 4)  # videos


class Spelling(NamedTuple):
    """How a checkpoint takes what it is given."""

    words: torch.Tensor  # ids that stand for text
    image: int
    video: int
    vision_start: int
    vision_end: int
    patch_size: int
    one_run: bool  # a video's tokens stand in one run, as against a run for each frame behind its time
    by_second: bool  # takes the seconds from frame to frame of each video

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Spelling:
        """That of a config.json."""
        text, vision = config.get("text_config", config), config["vision_config"]
        # Around an image any id will do, where the vocabulary of a small model lacks that of its family.
        start, end = (
            token if (token := config.get(f"vision_{side}_token_id", 0)) < text["vocab_size"] else 0
            for side in ("start", "end")
        )
        words = torch.ones(text["vocab_size"], dtype=torch.bool)
        words[[config["image_token_id"], config["video_token_id"], start, end]] = False
        return cls(
            words.nonzero()[:, 0],
            config["image_token_id"],
            config["video_token_id"],
            start,
            end,
            patch_size=vision.get("patch_size", 14),
            one_run=config["model_type"].startswith("qwen2"),
            by_second="tokens_per_second" in vision,
        )


def _text(length: int, seed: int, spelling: Spelling) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return spelling.words[torch.randint(0, len(spelling.words), (length,), generator=generator)].tolist()


def _image(grid: Grid, spelling: Spelling) -> list[int]:
    return [spelling.vision_start] + [spelling.image] * (grid[1] * grid[2] // 4) + [spelling.vision_end]


def _video(grid: Grid, seed: int, spelling: Spelling) -> list[int]:
    """Frames in one run, or each behind a text of its own as the processor writes its time."""
    frame = [spelling.video] * (grid[1] * grid[2] // 4)
    if spelling.one_run:
        return [spelling.vision_start] + frame * grid[0] + [spelling.vision_end]
    ids = []
    for i in range(grid[0]):
        ids += [*_text(2, seed + i, spelling), spelling.vision_start, *frame, spelling.vision_end]
    return ids


def _pixels(grids: Sequence[Grid], patch_size: int, seed: int) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 3 * 2 * patch_size**2, generator=generator) * 2 - 1


def _encode(
    prompts: Sequence[list[int]],
    spelling: Spelling,
    seed: int = 0,
    images: Sequence[Grid] = (),
    videos: Sequence[Grid] = (),
) -> Inputs:
    """Pads `prompts` (lists of ids) on the left and adds the pixels of `images` and `videos`."""
    length, pad = max(map(len, prompts)), int(spelling.words[0])
    inputs = {
        "input_ids": torch.tensor([[pad] * (length - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts]),
    }
    if images:
        inputs["pixel_values"] = _pixels(images, spelling.patch_size, seed)
        inputs["image_grid_thw"] = torch.tensor(images)
    if videos:
        inputs["pixel_values_videos"] = _pixels(videos, spelling.patch_size, seed + 100)
        inputs["video_grid_thw"] = torch.tensor(videos)
    return inputs


def text(spelling: Spelling) -> Inputs:
    return _encode([_text(9, 1, spelling)], spelling)


def one_image(spelling: Spelling) -> Inputs:
    ids = _text(3, 2, spelling) + _image(WIDE, spelling) + _text(4, 3, spelling)
    return _encode([ids], spelling, 11, [WIDE])


def large_image(spelling: Spelling) -> Inputs:
    """Enough image tokens, either way, for windows of two and three to fill and to be cut."""
    ids = _text(1, 51, spelling) + _image(LARGE, spelling) + _text(2, 52, spelling)
    return _encode([ids], spelling, 16, [LARGE])


def two_images(spelling: Spelling) -> Inputs:
    """Different sizes, one of them taller and one wider than the smaller position tables."""
    ids = _text(2, 4, spelling) + _image(TALL, spelling) + _text(3, 5, spelling)
    ids += _image(STRIP, spelling) + _text(2, 6, spelling)
    return _encode([ids], spelling, 12, [TALL, STRIP])


def padded_text(spelling: Spelling) -> Inputs:
    return _encode([_text(4, 7, spelling), _text(9, 8, spelling), _text(1, 9, spelling)], spelling)


def padded_mixed(spelling: Spelling) -> Inputs:
    """A text row, a row with one image and a row with two, left-padded to one length."""
    prompts = [
        _text(5, 10, spelling),
        _image(SQUARE, spelling) + _text(2, 11, spelling),
        _text(1, 12, spelling) + _image(TALL, spelling) + _image(WIDE, spelling) + _text(3, 13, spelling),
    ]
    return _encode(prompts, spelling, 13, [SQUARE, TALL, WIDE])


def videos(spelling: Spelling) -> Inputs:
    """Two videos: each frame is a run of tokens, a segment of the attention and a position of its own."""
    ids = _text(2, 14, spelling) + _video(CLIP, 15, spelling) + _text(3, 20, spelling)
    ids += _video(LONG, 21, spelling) + _text(2, 25, spelling)
    inputs = _encode([ids], spelling, 14, videos=[CLIP, LONG])
    if spelling.by_second:
        inputs["second_per_grid_ts"] = torch.tensor([1.0, 2.6])
    return inputs


def images_and_videos(spelling: Spelling) -> Inputs:
    """A video before an image, a text, and an image before a video: the tower has them in another order."""
    prompts = [
        _text(2, 30, spelling) + _video(LONG, 31, spelling) + _image(TALL, spelling) + _text(1, 35, spelling),
        _text(4, 36, spelling),
        _image(WIDE, spelling) + _text(2, 37, spelling) + _video(CLIP, 38, spelling) + _text(3, 41, spelling),
    ]
    return _encode(prompts, spelling, 15, [TALL, WIDE], [LONG, CLIP])


CASES: dict[str, Callable[[Spelling], Inputs]] = {
    f.__name__: f
    for f in (text, one_image, large_image, two_images, padded_text, padded_mixed, videos, images_and_videos)
}


def of(config: Mapping[str, Any]) -> SimpleNamespace:
    """Every case for the checkpoint of a config.json: `of(config).one_image`, ..."""
    spelling = Spelling.of(config)
    return SimpleNamespace(**{name: make(spelling) for name, make in CASES.items()})
