"""Where an image lies: its pixels, its patches in the vision stream, its tokens in the prompt.

The processor cuts an image into a grid of patches, and lays the patches of all images of an input, and
after them those of all frames of its videos, in one row, the *vision stream*. Inside an image they
come in merge-block order: the blocks of `spatial_merge_size` x `spatial_merge_size` neighbours in
raster order, the patches of a block one after the other. The merger makes one image token of each
block, so token `k` of an image is made of its patches `4 k` to `4 k + 3` (at a merge size of 2), and
the tokens are in raster order. Further frames (t > 1) follow in the same way. This is the order of
transformers' Qwen2-VL image processor.

Qwen2.5-VL lays the blocks of a frame window by window before its first layer, and so they stay up to
`vision.tower_output` and `projector.output`. The maps below are those of that stream; `image_features`
are in the order of the tokens again. `vision.patch_embeddings` lie before that change, and have patch
`token * merge ** 2 + inside` at that row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import _core
from .errors import InputError

__all__ = ["ImageTokens", "PromptRows", "prompt_rows"]

Index = int | torch.Tensor


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """One image or video of an input: `model.image_tokens(prompt, images=...)` and
    `model.video_tokens(prompt, videos=...)` give them in order.

    A *token* is an index among this image's own tokens, 0 to `len(image) - 1`; a *patch* is a row of
    the vision stream, as a vision value holds it. Wherever a method takes one of them it also takes
    a tensor of them, and then gives tensors of its shape.

    Attributes:
        kind: "image" or "video".
        prompt: the prompt in the batch that it belongs to.
        image: its place among the images, or the videos, of the whole input.
        grid: (t, h, w) in patches, its row of `image_grid_thw` or `video_grid_thw`.
        merge: patches of a merge block along one side.
        patch_size: pixels of a patch along one side.
        positions: [tokens], the position of each token in the (padded) prompt.
        rows: its slice of `vision.image_features`, or of `vision.video_features`.
        deepstack: its slice of `deepstack_output`, whose rows are in the order of the prompts' tokens:
            that of `rows`, unless the input has images and videos.
        patches: its slice of the vision stream: `vision.layers[i].layer_output[0, image.patches]`.
            Those of the videos come after those of all images.
        blocks: [tokens], which of the merge blocks in `patches` becomes each token: 0, 1, 2, ... unless the
            tower has windows.
    """

    kind: str
    prompt: int
    image: int
    grid: tuple[int, int, int]
    merge: int
    patch_size: int
    positions: torch.Tensor
    rows: slice
    deepstack: slice
    patches: slice
    blocks: torch.Tensor

    def __len__(self) -> int:
        """The number of its tokens."""
        return len(self.positions)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(frames, rows, columns) in tokens: `features[image.rows].reshape(*image.shape, -1)`."""
        frames, height, width = self.grid
        return frames, height // self.merge, width // self.merge

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels of the resized image, as the patches are cut from it."""
        _, height, width = self.grid
        return width * self.patch_size, height * self.patch_size

    @property
    def span(self) -> slice:
        """The part of the prompt from its first token to its last. The frames of a video have text
        between them; `positions` are the tokens alone."""
        return slice(int(self.positions[0]), int(self.positions[-1]) + 1)

    # --- tokens ---

    def token_at(self, row: Index, column: Index, frame: Index = 0) -> Index:
        """The token at a place of the grid of tokens; negatives count from the end."""
        frames, rows, columns = self.shape
        frame, row = _within(frame, frames, "frame"), _within(row, rows, "row")
        return (frame * rows + row) * columns + _within(column, columns, "column")

    def place(self, token: Index) -> tuple[Index, Index, Index]:
        """(frame, row, column) of a token in the grid of tokens."""
        _, rows, columns = self.shape
        token = _within(token, len(self), "token")
        return token // (rows * columns), token // columns % rows, token % columns

    def box(self, token: Index, size: tuple[int, int] | None = None) -> tuple[Any, Any, Any, Any]:
        """(left, top, right, bottom) of a token in pixels of the resized image; right and bottom are
        the first pixels outside. With the original image's `size`, (width, height) as Pillow says
        it, in pixels of that image, which need not be whole numbers."""
        _, row, column = self.place(token)
        return self._box(row, column, self.patch_size * self.merge, size)

    def token_at_pixel(self, x: float, y: float, size: tuple[int, int] | None = None, frame: int = 0) -> int:
        """The token whose box holds a pixel of the resized image, or of the original of this `size`."""
        width, height = size or self.size
        if not (0 <= x < width and 0 <= y < height):
            raise InputError(f"pixel ({x}, {y}) lies outside the image of {width} x {height} pixels")
        _, rows, columns = self.shape
        return int(self.token_at(int(y * rows / height), int(x * columns / width), frame))

    # --- patches ---

    def patches_of(self, token: Index) -> torch.Tensor:
        """The rows of the vision stream that the merger folds into a token: [merge ** 2], or
        [..., merge ** 2] for a tensor of tokens."""
        block = self.merge**2
        first = torch.as_tensor(_looked_up(self.blocks, _within(token, len(self), "token"))) * block
        first = first + self.patches.start
        return first.unsqueeze(-1) + torch.arange(block)

    def token_of(self, patch: Index) -> Index:
        """The token that a row of the vision stream is folded into."""
        return _looked_up(self.blocks.argsort(), self._own(patch) // self.merge**2)

    def patch_at(self, row: Index, column: Index, frame: Index = 0) -> Index:
        """The row of the vision stream that holds the patch at a place of the grid of patches."""
        frames, height, width = self.grid
        frame, row = _within(frame, frames, "frame"), _within(row, height, "row")
        column, merge = _within(column, width, "column"), self.merge
        token = (frame * (height // merge) + row // merge) * (width // merge) + column // merge
        block = _looked_up(self.blocks, token)
        return self.patches.start + (block * merge + row % merge) * merge + column % merge

    def patch_place(self, patch: Index) -> tuple[Index, Index, Index]:
        """(frame, row, column) in the grid of patches of a row of the vision stream."""
        merge = self.merge
        inside = self._own(patch) % merge**2
        frame, row, column = self.place(self.token_of(patch))
        return frame, row * merge + inside // merge, column * merge + inside % merge

    def patch_box(self, patch: Index, size: tuple[int, int] | None = None) -> tuple[Any, Any, Any, Any]:
        """(left, top, right, bottom) in pixels of a row of the vision stream; see `box`."""
        _, row, column = self.patch_place(patch)
        return self._box(row, column, self.patch_size, size)

    @property
    def patch_map(self) -> torch.Tensor:
        """[t, h, w], the row of the vision stream of each patch: `stream[0, image.patch_map]` is the
        image in raster order, [t, h, w, vision_hidden_size]."""
        frames, height, width = (torch.arange(count) for count in self.grid)
        return torch.as_tensor(self.patch_at(height[:, None], width, frames[:, None, None]))

    def _own(self, patch: Index) -> Index:
        start, stop = self.patches.start, self.patches.stop
        if torch.as_tensor((torch.as_tensor(patch) < start) | (torch.as_tensor(patch) >= stop)).any():
            raise InputError(f"patch {patch} is not of {self.kind} {self.image}, whose rows are {start} to {stop - 1}")
        return patch - start

    def _box(self, row: Any, column: Any, side: int, size: tuple[int, int] | None) -> tuple[Any, Any, Any, Any]:
        pixels = (column * side, row * side, (column + 1) * side, (row + 1) * side)
        if size is None:
            return pixels
        across, down = size[0] / self.size[0], size[1] / self.size[1]
        return pixels[0] * across, pixels[1] * down, pixels[2] * across, pixels[3] * down


@dataclass(frozen=True, eq=False)
class PromptRows:
    """One prompt of a batch: where its own part lies in values of the whole batch.

    >>> for row in model.prompt_rows(batch):
    ...     own = logits[row.index, row.tokens]          # [its tokens, vocab_size]
    ...     features = image_features[row.features]      # [its image tokens, hidden_size]

    Attributes:
        index: its place in the batch.
        tokens: the slice of its positions; what lies before is padding.
        images: its images, with their slices; see `ImageTokens`.
        videos: its videos, likewise.
        features: its slice of `vision.image_features`, all its images.
        deepstack: its slice of `deepstack_output`, all its images and videos.
        patches: its images' slice of the vision stream; a video's is `videos[i].patches`.
    """

    index: int
    tokens: slice
    images: tuple[ImageTokens, ...]
    videos: tuple[ImageTokens, ...]
    features: slice
    deepstack: slice
    patches: slice


def prompt_rows(model: Any, encoding: Mapping[str, torch.Tensor]) -> list[PromptRows]:
    """The prompts of an encoding, their images and videos; see `model.prompt_rows`."""
    ids, mask = encoding["input_ids"], encoding.get("attention_mask")
    images = list(_items(model, encoding, "image", 0))
    videos = list(_items(model, encoding, "video", images[-1].patches.stop if images else 0))
    found: list[PromptRows] = []
    feature = level = patch = 0
    for index in range(len(ids)):
        own = tuple(image for image in images if image.prompt == index)
        clips = tuple(video for video in videos if video.prompt == index)
        features = slice(feature, own[-1].rows.stop if own else feature)
        patches = slice(patch, own[-1].patches.stop if own else patch)
        deepstack = slice(level, level + sum(len(item) for item in (*own, *clips)))
        tokens = slice(0, ids.shape[1]) if mask is None else _unmasked(mask[index], index)
        found.append(PromptRows(index, tokens, own, clips, features, deepstack, patches))
        feature, level, patch = features.stop, deepstack.stop, patches.stop
    return found


def _unmasked(mask: torch.Tensor, index: int) -> slice:
    """From the first position that is no padding to the last."""
    kept = mask.nonzero().flatten().tolist()
    if not kept:
        raise InputError(f"attention_mask is 0 on all {len(mask)} positions of row {index}: the prompt is empty")
    return slice(kept[0], kept[-1] + 1)


def _items(model: Any, encoding: Mapping[str, torch.Tensor], kind: str, patch: int) -> Iterator[ImageTokens]:
    """The images or videos of an input in order: each takes the next placeholders, row after row.
    `patch` is the row of the vision stream of the first."""
    ids, grids = encoding["input_ids"], encoding.get(f"{kind}_grid_thw")
    if grids is None:
        return
    merge = model.vision.spatial_merge_size
    tokens = {name: ids == model.config[f"{name}_token_id"] for name in ("image", "video")}
    prompts, positions = tokens[kind].nonzero(as_tuple=True)
    wanted = int(grids.prod(-1).sum()) // merge**2
    if len(prompts) != wanted:
        raise InputError(f"input_ids holds {len(prompts)} {kind} tokens, and the {len(grids)} {kind}s give {wanted}")
    levels = (tokens["image"] | tokens["video"]).flatten().cumsum(0).reshape(ids.shape) - 1
    row = 0
    for image, (t, h, w) in enumerate(grids.tolist()):
        rows, patches = slice(row, row + t * h * w // merge**2), slice(patch, patch + t * h * w)
        level = int(levels[prompts[row], positions[row]])
        yield ImageTokens(
            kind=kind,
            prompt=int(prompts[row]),
            image=image,
            grid=(t, h, w),
            merge=merge,
            patch_size=model.vision.patch_size,
            positions=positions[rows],
            rows=rows,
            deepstack=slice(level, level + rows.stop - rows.start),
            patches=patches,
            blocks=_blocks(model, (t, h, w)),
        )
        row, patch = rows.stop, patches.stop


def _blocks(model: Any, grid: tuple[int, int, int]) -> torch.Tensor:
    """[tokens], the place of each token's merge block among those of its image or video."""
    window, merge = model.vision.window_size, model.vision.spatial_merge_size
    if window is None:
        return torch.arange(grid[0] * grid[1] * grid[2] // merge**2)
    return _core.window_places(grid, merge, window // merge // model.vision.patch_size)


def _looked_up(table: torch.Tensor, index: Index) -> Index:
    """An element as an integer, or elements as a tensor."""
    return table[index] if isinstance(index, torch.Tensor) else int(table[index])


def _within(index: Index, count: int, name: str) -> Index:
    """An index, or a tensor of them, counted from the front; refused where there is none."""
    wrong = (index < -count) | (index >= count)
    if bool(wrong.any() if isinstance(wrong, torch.Tensor) else wrong):
        raise InputError(f"{name} {index}: there are {count}, 0 to {count - 1}")
    return index % count
