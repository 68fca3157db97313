"""The inputs that parity is taken on, as plain tensors that both sides are given."""

from typing import NamedTuple

import torch

import tiny


class Spelling(NamedTuple):
    """How a family takes what it is given."""

    patch_size: int
    one_run: bool  # a video's tokens stand in one run, as against a run for each frame behind its time
    by_second: bool  # takes the seconds from frame to frame of each video

    @classmethod
    def of(cls, config):
        """That of a config.json."""
        by_second = "tokens_per_second" in config["vision_config"]
        return cls(config["vision_config"].get("patch_size", 14), config["model_type"].startswith("qwen2"), by_second)


def _text(length, seed):
    return torch.randint(0, tiny.PAD, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _image(grid):
    return [tiny.VISION_START] + [tiny.IMAGE] * (grid[1] * grid[2] // 4) + [tiny.VISION_END]


def _video(grid, seed, spelling):
    """Frames in one run, or each behind a text of its own as the processor writes its time."""
    if spelling.one_run:
        return [tiny.VISION_START] + [tiny.VIDEO] * (grid[0] * grid[1] * grid[2] // 4) + [tiny.VISION_END]
    ids = []
    for frame in range(grid[0]):
        ids += _text(2, seed + frame) + [tiny.VISION_START] + [tiny.VIDEO] * (grid[1] * grid[2] // 4)
        ids.append(tiny.VISION_END)
    return ids


def _pixels(grids, patch_size, seed):
    rows = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 3 * 2 * patch_size**2, generator=generator) * 2 - 1


def _encode(prompts, grids, spelling, seed, videos=()):
    """Pads `prompts` (lists of ids) on the left and adds the pixels of the images' `grids` and of `videos`."""
    length = max(map(len, prompts))
    inputs = {
        "input_ids": torch.tensor([[tiny.PAD] * (length - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts]),
    }
    if grids:
        inputs["pixel_values"] = _pixels(grids, spelling.patch_size, seed)
        inputs["image_grid_thw"] = torch.tensor(grids)
    if videos:
        inputs["pixel_values_videos"] = _pixels(videos, spelling.patch_size, seed + 100)
        inputs["video_grid_thw"] = torch.tensor(videos)
    return inputs


WIDE, TALL, SQUARE, STRIP, LARGE = (1, 4, 6), (1, 6, 2), (1, 4, 4), (1, 2, 10), (1, 8, 10)
CLIP, LONG = (2, 6, 4), (3, 2, 4)  # videos


def text(spelling):
    return _encode([_text(9, 1)], [], spelling, 0)


def one_image(spelling):
    return _encode([_text(3, 2) + _image(WIDE) + _text(4, 3)], [WIDE], spelling, 11)


def large_image(spelling):
    """Enough image tokens, either way, for windows of two and three to fill and to be cut."""
    return _encode([_text(1, 51) + _image(LARGE) + _text(2, 52)], [LARGE], spelling, 16)


def two_images(spelling):
    """Different sizes, one of them taller and one wider than the smaller position tables."""
    ids = _text(2, 4) + _image(TALL) + _text(3, 5) + _image(STRIP) + _text(2, 6)
    return _encode([ids], [TALL, STRIP], spelling, 12)


def padded_text(spelling):
    return _encode([_text(4, 7), _text(9, 8), _text(1, 9)], [], spelling, 0)


def padded_mixed(spelling):
    """A text row, a row with one image and a row with two, left-padded to one length."""
    prompts = [
        _text(5, 10),
        _image(SQUARE) + _text(2, 11),
        _text(1, 12) + _image(TALL) + _image(WIDE) + _text(3, 13),
    ]
    return _encode(prompts, [SQUARE, TALL, WIDE], spelling, 13)


def videos(spelling):
    """Two videos: each frame is a run of tokens, a segment of the attention and a position of its own."""
    ids = _text(2, 14) + _video(CLIP, 15, spelling) + _text(3, 20) + _video(LONG, 21, spelling) + _text(2, 25)
    inputs = _encode([ids], [], spelling, 14, [CLIP, LONG])
    if spelling.by_second:
        inputs["second_per_grid_ts"] = torch.tensor([1.0, 2.6])
    return inputs


def images_and_videos(spelling):
    """A video before an image, a text, and an image before a video: the tower has them in another order."""
    prompts = [
        _text(2, 30) + _video(LONG, 31, spelling) + _image(TALL) + _text(1, 35),
        _text(4, 36),
        _image(WIDE) + _text(2, 37) + _video(CLIP, 38, spelling) + _text(3, 41),
    ]
    return _encode(prompts, [TALL, WIDE], spelling, 15, [LONG, CLIP])


CASES = {
    f.__name__: f
    for f in (text, one_image, large_image, two_images, padded_text, padded_mixed, videos, images_and_videos)
}
