"""The inputs that parity is taken on, as plain tensors that both sides are given."""

import torch

import tiny


def _text(length, seed):
    return torch.randint(0, tiny.PAD, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _image(grid):
    return [tiny.VISION_START] + [tiny.IMAGE] * (grid[1] * grid[2] // 4) + [tiny.VISION_END]


def _video(grid, seed):
    """Frames, each behind a text of its own as the processor writes its time."""
    ids = []
    for frame in range(grid[0]):
        ids += _text(2, seed + frame) + [tiny.VISION_START] + [tiny.VIDEO] * (grid[1] * grid[2] // 4)
        ids.append(tiny.VISION_END)
    return ids


def _pixels(grids, patch_size, seed):
    rows = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 3 * 2 * patch_size**2, generator=generator) * 2 - 1


def _encode(prompts, grids, patch_size, seed, videos=()):
    """Pads `prompts` (lists of ids) on the left and adds the pixels of the images' `grids` and of `videos`."""
    length = max(map(len, prompts))
    inputs = {
        "input_ids": torch.tensor([[tiny.PAD] * (length - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts]),
    }
    if grids:
        inputs["pixel_values"] = _pixels(grids, patch_size, seed)
        inputs["image_grid_thw"] = torch.tensor(grids)
    if videos:
        inputs["pixel_values_videos"] = _pixels(videos, patch_size, seed + 100)
        inputs["video_grid_thw"] = torch.tensor(videos)
    return inputs


WIDE, TALL, SQUARE, STRIP = (1, 4, 6), (1, 6, 2), (1, 4, 4), (1, 2, 10)
CLIP, LONG = (2, 6, 4), (3, 2, 4)  # videos


def text(patch_size):
    return _encode([_text(9, 1)], [], patch_size, 0)


def one_image(patch_size):
    return _encode([_text(3, 2) + _image(WIDE) + _text(4, 3)], [WIDE], patch_size, 11)


def two_images(patch_size):
    """Different sizes, one of them taller and one wider than the smaller position tables."""
    ids = _text(2, 4) + _image(TALL) + _text(3, 5) + _image(STRIP) + _text(2, 6)
    return _encode([ids], [TALL, STRIP], patch_size, 12)


def padded_text(patch_size):
    return _encode([_text(4, 7), _text(9, 8), _text(1, 9)], [], patch_size, 0)


def padded_mixed(patch_size):
    """A text row, a row with one image and a row with two, left-padded to one length."""
    prompts = [
        _text(5, 10),
        _image(SQUARE) + _text(2, 11),
        _text(1, 12) + _image(TALL) + _image(WIDE) + _text(3, 13),
    ]
    return _encode(prompts, [SQUARE, TALL, WIDE], patch_size, 13)


def videos(patch_size):
    """Two videos: each frame is a run of tokens, a segment of the attention and a position of its own."""
    ids = _text(2, 14) + _video(CLIP, 15) + _text(3, 20) + _video(LONG, 21) + _text(2, 25)
    return _encode([ids], [], patch_size, 14, [CLIP, LONG])


def images_and_videos(patch_size):
    """A video before an image, a text, and an image before a video: the tower has them in another order."""
    prompts = [
        _text(2, 30) + _video(LONG, 31) + _image(TALL) + _text(1, 35),
        _text(4, 36),
        _image(WIDE) + _text(2, 37) + _video(CLIP, 38) + _text(3, 41),
    ]
    return _encode(prompts, [TALL, WIDE], patch_size, 15, [LONG, CLIP])


CASES = {f.__name__: f for f in (text, one_image, two_images, padded_text, padded_mixed, videos, images_and_videos)}
