"""The images of a prompt as the model sees them, and per-token numbers in their raster order.

What `vlscope.plot` and `vlscope.html` draw on is made back from `pixel_values`, so that a picture is of
what the model was given: after the resize, and whatever the image came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .errors import InputError
from .index_maps import ImageTokens, PromptRows, prompt_rows

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["PicturedPrompt", "Seen", "pictured"]

#: `rescale_factor` of a processor that names none.
_BYTE = 1 / 255


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """One image or video of a prompt.

    Attributes:
        tokens: where it lies in the prompt and in the vision stream.
        pixels: [frames, height, width, 3], uint8, after the resize. Of the frames of a video that
            become one temporal patch, the first.
    """

    tokens: ImageTokens
    pixels: np.ndarray[Any, Any]

    def patch_map(self, windowed: bool = True) -> torch.Tensor:
        """[t, h, w], the row of each patch, as `ImageTokens.patch_map`; with `windowed` off that of
        `pixel_values` and `vision.patch_embeddings`, which lie before Qwen2.5-VL's change of order."""
        tokens = self.tokens
        return (tokens if windowed else dataclasses.replace(tokens, blocks=torch.arange(len(tokens)))).patch_map


@dataclasses.dataclass(frozen=True, eq=False)
class PicturedPrompt:
    """One prompt with its images: what a picture is drawn of.

    Attributes:
        encoding: the tensors that a trace takes, `model.trace(**prompt.encoding)`.
        row: its part of the (padded) input.
        seen: its images, then its videos.
        texts: the text of each of its tokens, special tokens as they are written.
    """

    encoding: dict[str, torch.Tensor]
    row: PromptRows
    seen: tuple[Seen, ...]
    texts: tuple[str, ...]

    def position(self, token: int) -> int:
        """The position in the padded input of a token of the prompt; negatives count from the end.

        Raises:
            InputError: there is no such token.
        """
        count = len(self.texts)
        if not -count <= token < count:
            raise InputError(f"token {token}: the prompt has {count}, 0 to {count - 1}")
        return self.row.tokens.start + token % count

    def token_grids(self, values: torch.Tensor) -> list[torch.Tensor]:
        """For each image the values of its tokens, [..., frames, rows, columns].

        Args:
            values: [..., seq], one for each position of the input, or [..., image_tokens], one for
                each token of images and videos in the order of the prompt, as `deepstack_output`
                and (of a prompt without videos) `vision.image_features` have them.
        """
        length, count = self.encoding["input_ids"].shape[1], self.row.deepstack.stop
        if values.shape[-1] not in (length, count):
            raise InputError(
                f"there are {values.shape[-1]} values along the last axis; give one for each of the {length} "
                f"positions, or for each of the {count} image tokens"
            )
        whole = values.shape[-1] == length
        own = [item.tokens for item in self.seen]
        grids = [values[..., item.positions if whole else item.deepstack] for item in own]
        return [grid.reshape(*grid.shape[:-1], *item.shape) for grid, item in zip(grids, own)]

    def patch_grids(self, values: torch.Tensor, windowed: bool = True) -> list[torch.Tensor]:
        """For each image the values of its patches, [..., t, h, w]; see `Seen.patch_map`.

        Args:
            values: [..., patches], one for each row of the vision stream.
        """
        count = sum(item.tokens.patches.stop - item.tokens.patches.start for item in self.seen)
        if values.shape[-1] != count:
            raise InputError(f"there are {values.shape[-1]} values along the last axis, and {count} patches")
        return [values[..., item.patch_map(windowed)] for item in self.seen]


def pictured(model: StandardizedTransformer, prompt: Any = None, **inputs: Any) -> PicturedPrompt:
    """A prompt and its images; takes what `model.trace` takes, one prompt.

    Raises:
        InputError: several prompts, or one without an image or video.
    """
    if isinstance(prompt, Mapping) and "prompt" in prompt:
        prompt, inputs = None, {**prompt, **inputs}
        prompt = inputs.pop("prompt")
    encoding = model.encode(prompt, **inputs)
    rows = prompt_rows(model, encoding)
    if len(rows) != 1:
        raise InputError(f"a picture is of one prompt; this input has {len(rows)}")
    items = (*rows[0].images, *rows[0].videos)
    if not items:
        raise InputError("the prompt has no image and no video: there is nothing to draw on")
    ids = encoding["input_ids"][0, rows[0].tokens].tolist()
    texts = tuple(model.tokenizer.decode([token], skip_special_tokens=False) for token in ids)
    return PicturedPrompt(encoding, rows[0], tuple(_seen(model, encoding, items)), texts)


def _seen(
    model: StandardizedTransformer, encoding: Mapping[str, torch.Tensor], items: Sequence[ImageTokens]
) -> list[Seen]:
    """The pixels of each image, from its rows of `pixel_values`."""
    parts = [encoding[name].float().cpu() for name in ("pixel_values", "pixel_values_videos") if name in encoding]
    patches = torch.cat(parts)
    found = []
    for item in items:
        blank = Seen(item, np.empty(0, np.uint8))
        pixels = patches[blank.patch_map(windowed=False)]  # [t, h, w, channels * temporal * side * side]
        side, (t, h, w) = item.patch_size, item.grid
        pixels = pixels.reshape(t, h, w, 3, -1, side, side)[:, :, :, :, 0]
        pixels = pixels.permute(0, 1, 4, 2, 5, 3).reshape(t, h * side, w * side, 3)
        found.append(dataclasses.replace(blank, pixels=_bytes(pixels, _settings(model, item.kind))))
    return found


def _settings(model: StandardizedTransformer, kind: str) -> Any:
    """What says how pixels were normalised."""
    processor: Any = model.processor
    own = getattr(processor, f"{kind}_processor", None) or processor.image_processor
    return getattr(own, "settings", own)


def _bytes(pixels: torch.Tensor, settings: Any) -> np.ndarray[Any, Any]:
    """Pixels [..., 3] of 0 to 255 that normalise to these."""
    if getattr(settings, "do_normalize", True):
        pixels = pixels * torch.tensor(settings.image_std) + torch.tensor(settings.image_mean)
    if getattr(settings, "do_rescale", True):
        pixels = pixels / getattr(settings, "rescale_factor", _BYTE)
    return pixels.round().clamp(0, 255).to(torch.uint8).numpy()
