"""Shapes by arithmetic: what an image or a video becomes on its way to the language model.

>>> print(shapes(512, 512))
Stage / quantity                       Result
Resized height                         512
...
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import _core
from .errors import InputError

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["PINNED", "Configuration", "Shapes", "shapes"]

#: Released sizes: vision blocks, vision width, LLM width, DeepStack blocks (zero-based).
PINNED: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "qwen3-vl-2b": (24, 1024, 2048, (5, 11, 17)),
    "qwen3-vl-4b": (24, 1024, 2560, (5, 11, 17)),
    "qwen3-vl-8b": (27, 1152, 4096, (8, 16, 24)),
    "qwen3-vl-32b": (27, 1152, 5120, (8, 16, 24)),
    "qwen3-vl-30b-a3b": (27, 1152, 2048, (8, 16, 24)),
    "qwen3-vl-235b-a22b": (27, 1152, 4096, (8, 16, 24)),
    "qwen3.5-0.8b": (12, 768, 1024, ()),
    "qwen3.5-2b": (24, 1024, 2048, ()),
    "qwen3.5-4b": (24, 1024, 2560, ()),
    "qwen3.5-9b": (27, 1152, 4096, ()),
    "qwen3.5-27b": (27, 1152, 5120, ()),
    "qwen3.5-35b-a3b": (27, 1152, 2048, ()),
    "qwen3.5-122b-a10b": (27, 1152, 3072, ()),
    "qwen3.5-397b-a17b": (27, 1152, 4096, ()),
    "qwen2.5-vl-3b": (32, 1280, 2048, ()),
    "qwen2.5-vl-7b": (32, 1280, 3584, ()),
    "qwen2.5-vl-32b": (32, 1280, 5120, ()),
    "qwen2.5-vl-72b": (32, 1280, 8192, ()),
    "qwen2-vl-2b": (32, 1280, 1536, ()),
    "qwen2-vl-7b": (32, 1280, 3584, ()),
    "qwen2-vl-72b": (32, 1280, 8192, ()),
}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What the arithmetic needs to know of a model. `options` holds patch sizes and pixel limits."""

    name: str
    vision_blocks: int
    vision_width: int
    llm_width: int
    deepstack_blocks: tuple[int, ...]
    options: _core.ImageOptions = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The sizes of one image, or of the frames of one video. `print` shows them as a table.

    Attributes:
        frames: of the video; None for an image.
        resized_height, resized_width: in pixels, after the processor's resize.
        temporal_groups: groups of frames that share patches.
        repeated_frames: copies of the last frame that fill the last group; 1 for a still image.
        grid_rows, grid_columns: the grid of patches of one group.
        patch_positions: rows of the vision tower.
        visual_tokens: vectors that the language model gets, without boundaries, timestamps and text.
        configuration: the model's.
    """

    frames: int | None
    resized_height: int
    resized_width: int
    temporal_groups: int
    repeated_frames: int
    grid_rows: int
    grid_columns: int
    patch_positions: int
    visual_tokens: int
    configuration: Configuration

    @property
    def processor_units(self) -> int:
        """Spatial units that the processor cuts, times groups: in these families they are the patches."""
        return self.patch_positions

    @property
    def feature_shape(self) -> tuple[int, int]:
        """Shape of `vision.image_features` (or `video_features`): [visual tokens, LLM width]."""
        return self.visual_tokens, self.configuration.llm_width

    @property
    def scalars(self) -> int:
        """Numbers in `feature_shape`."""
        return self.visual_tokens * self.configuration.llm_width

    def rows(self) -> list[tuple[str, str]]:
        """The table: pairs of a quantity and its value."""
        return [
            ("Resized height", str(self.resized_height)),
            ("Resized width", str(self.resized_width)),
            ("Temporal groups", str(self.temporal_groups)),
            ("Repeated frames", str(self.repeated_frames)),
            ("Model patch-grid rows", str(self.grid_rows)),
            ("Model patch-grid columns", str(self.grid_columns)),
            ("Processor spatial units × time groups", str(self.processor_units)),
            ("Model patch positions", str(self.patch_positions)),
            ("Effective visual tokens", str(self.visual_tokens)),
            ("LLM visual feature shape", str(list(self.feature_shape))),
            ("Continuous scalar values", str(self.scalars)),
        ]

    def notes(self) -> Iterator[str]:
        """What stands below the table: the way of the patches, the model, the frames repeated."""
        model, options = self.configuration, self.configuration.options
        depth, patch, merge = options.temporal_patch_size, options.patch_size, options.merge_size
        yield f"{depth}×{patch}×{patch} patches → ViT → {merge}×{merge} concat + MLP → LLM"
        yield f"{model.name}: {model.vision_blocks} vision blocks · width {model.vision_width} → {model.llm_width}"
        if model.deepstack_blocks:
            yield f"DeepStack from vision blocks {', '.join(map(str, model.deepstack_blocks))} (zero-based)"
        if self.frames is None:
            yield "A still image is repeated to fill its temporal patch, which adds no motion."
        elif self.repeated_frames:
            yield f"The last frame is repeated to fill the last temporal patch: {self.repeated_frames} more."

    def __str__(self) -> str:
        rows = [("Stage / quantity", "Result"), *self.rows()]
        width = max(len(label) for label, _ in rows)
        table = [f"{label:<{width}}  {value}" for label, value in rows]
        return "\n".join([*table, "", *self.notes()])


def shapes(
    height: int,
    width: int,
    *,
    frames: int | None = None,
    model: str | os.PathLike[str] | StandardizedTransformer = "8b",
    budget: int | None = None,
) -> Shapes:
    """The sizes that an image of `height` x `width` pixels has on its way, without any model run.

    >>> shapes(1080, 1920, model="2b").visual_tokens
    2040

    Args:
        frames: a video of this many frames, taken and resized already: its sides are used as they
            are. Without it, an image, resized as the processor does.
        model: "2b", "8b", "235b-a22b" and the other sizes of Qwen3-VL; "qwen2.5-vl-7b" and the like
            of the other families (`vlscope.calculator.PINNED`); a checkpoint folder, or a model.
        budget: at most this many visual tokens for an image: max_pixels is this times the pixels of
            a token (32 x 32).

    Raises:
        InputError: an empty image, one over an aspect ratio of 200, frames whose sides are no
            multiples of a token's side, a budget under the smallest image, a name that is not known.
    """
    known = _configuration(model)
    for name, value in (("height", height), ("width", width), ("frames", frames), ("budget", budget)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise InputError(f"{name} is {value!r}; give an integer")
        if value is not None and value.bit_length() > 63:
            raise InputError(f"{name} is {value}, and no image has so much")
    if frames is not None and budget is not None:
        raise InputError("a budget bounds how an image is resized, and the frames of a video are taken as they are")
    if budget is not None:
        known = dataclasses.replace(known, options=_core.with_token_budget(known.options, budget))
    if frames is None:
        found = _core.image_shape(height, width, known.options)
    else:
        found = _core.video_shape(frames, height, width, known.options)
    return Shapes(
        frames=frames,
        resized_height=found.resized[0],
        resized_width=found.resized[1],
        temporal_groups=found.temporal_groups,
        repeated_frames=found.repeated_frames,
        grid_rows=found.grid[0],
        grid_columns=found.grid[1],
        patch_positions=found.patch_positions,
        visual_tokens=found.visual_tokens,
        configuration=known,
    )


def _configuration(model: str | os.PathLike[str] | StandardizedTransformer) -> Configuration:
    if not isinstance(model, (str, os.PathLike)):
        return _of_model(model)
    if model == "demo" or Path(model).is_dir():
        from .model import load

        return _of_model(load(model, dispatch=False))
    short = os.fspath(model).lower().rpartition("/")[2].removesuffix("-instruct").removesuffix("-thinking")
    for name in (short, f"qwen3-vl-{short}"):
        if name in PINNED:
            return _pinned(name)
    raise InputError(
        f"{os.fspath(model)!r} is no folder here, and no size that is known: "
        f"{', '.join(name.removeprefix('qwen3-vl-') for name in PINNED)}"
    )


def _pinned(name: str) -> Configuration:
    options = _core.ImageOptions()
    if not name.startswith("qwen2"):
        options.patch_size, options.min_pixels, options.max_pixels = 16, 256**2, 4096**2
    else:  # the files of Qwen2-VL and Qwen2.5-VL
        options.patch_size, options.min_pixels, options.max_pixels = 14, 4 * 28**2, 16384 * 28**2
    return Configuration(name, *PINNED[name], options)


def _of_model(model: StandardizedTransformer) -> Configuration:
    from .processing.processor import read_image_settings

    settings = read_image_settings(model.folder)
    if settings is None:
        raise InputError(f"{model.folder} has no preprocessor_config.json, which says how images are resized")
    vision, taps = model.vision, model.config["vision_config"].get("deepstack_visual_indexes") or ()
    name = Path(model.repo_id).name
    return Configuration(
        name, vision.num_layers, vision.vision_hidden_size, model.hidden_size, tuple(taps), settings.native()
    )
