"""Images: the settings of `preprocessor_config.json`, and every form of picture made RGB pixels."""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from .. import _core
from ..errors import ConfigError, InputError
from .text import check_return_tensors

if TYPE_CHECKING:
    from PIL import Image
    from typing_extensions import Self


_BICUBIC = 3
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# `size` counts pixels under these names; the older files of the family use the second of each pair.
_SIZE_KEYS = {
    "shortest_edge": "min_pixels",
    "min_pixels": "min_pixels",
    "longest_edge": "max_pixels",
    "max_pixels": "max_pixels",
}


@dataclasses.dataclass(frozen=True)
class ImageSettings:
    """How images become patches. The defaults are those of transformers' `Qwen2VLImageProcessor`.

    `min_pixels` and `max_pixels` bound height * width after resizing; the configuration files spell
    them `size = {"shortest_edge": ..., "longest_edge": ...}`.
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = CLIP_MEAN
    image_std: tuple[float, ...] = CLIP_STD
    resample: int = _BICUBIC

    _noun = "image"
    _type_key = "image_processor_type"
    _type = "Qwen2VLImageProcessor"
    _optional: ClassVar[tuple[str, ...]] = ()  # settings that a file can leave out by a null

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> Self:
        """The settings of a `preprocessor_config.json`; `where` names it in errors."""
        kind = config.get(cls._type_key, cls._type)
        if not kind.startswith(cls._type):
            raise ConfigError(
                f"{where}: {cls._type_key} {kind!r} is not supported; the Qwen-VL families use {cls._type!r}"
            )
        names = {field.name for field in dataclasses.fields(cls)} | {"size"}
        known = {name: value for name, value in config.items() if name in names}
        try:
            absent: dict[str, Any] = {name: None for name in cls._optional if config.get(name, ...) is None}
            return dataclasses.replace(cls(), **absent).replace(**known)
        except InputError as error:
            raise ConfigError(f"{where}: {error}") from None

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed; what is not named, or is None, keeps its value.

        `size` takes `shortest_edge` and `longest_edge`, alone or together; `min_pixels` and
        `max_pixels` win over it. An unknown name raises `TypeError`, a limit that makes no sense
        `InputError`.
        """
        names = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(set(changes) - names - {"size"}):
            raise TypeError(
                f"unknown {self._noun} setting {unknown[0]!r}; the settings are {', '.join(sorted(names | {'size'}))}"
            )
        merged: dict[str, Any] = {} if changes.get("size") is None else _limits_of_size(changes["size"])
        for name, value in changes.items():
            if name != "size" and value is not None:
                merged[name] = tuple(value) if isinstance(value, list) else value
        settings = dataclasses.replace(self, **merged)
        settings.check()
        return settings

    def check(self) -> None:
        """Raise `InputError` where the settings make no sense or contradict each other."""
        self.native().check()

    def native(self) -> _core.ImageOptions:
        """The same settings as the C++ side takes them."""
        if self.resample != _BICUBIC:
            raise InputError(f"resample {self.resample} is not supported, only {_BICUBIC} (bicubic)")
        options = _core.ImageOptions()
        for field in dataclasses.fields(ImageSettings):
            if field.name != "resample":
                set_option(options, field, getattr(self, field.name))
        return options


def set_option(options: Any, field: dataclasses.Field[Any], value: Any) -> None:
    """Hand one setting to the C++ side."""
    try:
        setattr(options, field.name, value)
    except TypeError:
        raise InputError(f"{field.name} has to be {field.type}, got {value!r}") from None


def _limits_of_size(size: Any) -> dict[str, int]:
    if not isinstance(size, Mapping) or not set(size) <= set(_SIZE_KEYS):
        raise InputError(
            f"size has to be a mapping with 'shortest_edge' and 'longest_edge' (pixel counts), got {size!r}"
        )
    return {_SIZE_KEYS[name]: value for name, value in size.items() if value is not None}


class ImageProcessor:
    """Turns images into `pixel_values` and `image_grid_thw`.

    >>> image_processor(images=[picture])["image_grid_thw"]
    tensor([[ 1, 28, 28]])
    """

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not an ordinary attribute: `image_processor.patch_size` and the like.
        if name.startswith("_") or name == "settings":
            raise AttributeError(name)
        return getattr(self.settings, name)

    @property
    def size(self) -> dict[str, int]:
        """The pixel limits under the names that the configuration files use."""
        return {
            "shortest_edge": self.settings.min_pixels,
            "longest_edge": self.settings.max_pixels,
        }

    def __call__(self, images: Any, return_tensors: str | None = "pt", **changes: Any) -> dict[str, torch.Tensor]:
        """Process one image, a list, or a list of lists. `changes` hold for this call only."""
        check_return_tensors(return_tensors)
        settings = self.settings.replace(**changes)
        return self.process(load_images(flatten_images(images)), settings)

    def process(self, pixels: Sequence[np.ndarray], settings: ImageSettings) -> dict[str, torch.Tensor]:
        """Patches and grids of uint8 arrays [height, width, 3] (see `load_images`)."""
        values, grids = _core.preprocess_images(list(pixels), settings.native())
        return {"pixel_values": values, "image_grid_thw": grids}

    def __repr__(self) -> str:
        return f"ImageProcessor({self.settings})"


def token_counts(pixels: Sequence[np.ndarray], settings: ImageSettings) -> list[int]:
    """How many image tokens each image becomes. No pixel is touched."""
    options = settings.native()
    area = (settings.patch_size * settings.merge_size) ** 2
    counts = []
    for index, image in enumerate(pixels):
        with naming("image", index):
            height, width = _core.processed_size(image.shape[0], image.shape[1], options)
        counts.append(height * width // area)
    return counts


def flatten_images(images: Any) -> list[Any]:
    """One image, a list of images, a list of lists, or an array with a batch axis, as a flat list."""
    if isinstance(images, (np.ndarray, torch.Tensor)) and images.ndim == 4:
        return list(images)
    if not isinstance(images, (list, tuple)):
        return [images]
    return [image for item in images for image in flatten_images(item)]


def load_images(images: Sequence[Any]) -> list[np.ndarray]:
    """Each image as uint8 RGB [height, width, 3]; errors name the image by its index.

    * PIL images are taken as they stand: the current frame, no EXIF rotation, `convert("RGB")`
      (alpha dropped, 16-bit clipped to 255). A file's path or its bytes are opened by PIL and then
      treated the same, so a photo that is stored sideways stays sideways; `PIL.ImageOps.exif_transpose`
      turns it.
    * Arrays and tensors are uint8: [height, width, 3], [3, height, width], or grey with 1 channel
      or none. Where both ends could be the channels the first one is. Floating point is refused:
      0..1 and 0..255 cannot be told apart.
    """
    loaded = []
    for index, image in enumerate(images):
        with naming("image", index):
            loaded.append(load_image(image))
    return loaded


@contextlib.contextmanager
def naming(noun: str, index: int) -> Iterator[None]:
    """Put a noun and its index ("image 3") before the message of an `InputError`."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{noun} {index}: {error}") from error.__cause__


def load_image(image: Any) -> np.ndarray:
    """One image as uint8 RGB [height, width, 3]; see `load_images`."""
    if isinstance(image, torch.Tensor):
        return _from_array(image.detach().cpu().numpy())
    if isinstance(image, np.ndarray):
        return _from_array(image)
    if isinstance(image, (bytes, bytearray, memoryview)):
        return _from_file(io.BytesIO(image), f"{len(image)} bytes")
    if isinstance(image, str) and image.startswith("data:image/"):
        return _from_file(io.BytesIO(decode_base64(image.partition(",")[2])), "data: address")
    if isinstance(image, str) and image.startswith(("http://", "https://")):
        raise InputError(f"{image} is an address; download it and pass the file, or a PIL image")
    if isinstance(image, (str, os.PathLike)):
        path = Path(image)
        if not path.is_file():
            raise InputError(f"there is no image file {str(path)!r}")
        return _from_file(path, str(path))

    from PIL import Image

    if isinstance(image, Image.Image):
        return _from_pil(image)
    raise InputError(
        f"a {type(image).__name__} is not an image; pass a PIL image, a path, bytes, or a uint8 array or tensor"
    )


def decode_base64(text: str) -> bytes:
    """The bytes of a base64 image of a chat message."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise InputError(f"the base64 text of the image is damaged: {error}") from None


def _from_file(source: io.BytesIO | Path, name: str) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(source) as image:
            return _from_pil(image, name)
    except UnidentifiedImageError:
        raise InputError(f"{name} is in no image format that Pillow can read") from None
    except (OSError, Image.DecompressionBombError) as error:
        raise InputError(f"{name} cannot be read: {error}") from error


def _from_pil(image: Image.Image, name: str = "the image") -> np.ndarray:
    if image.mode == "F":
        raise InputError(
            f"{name} has floating-point pixels (mode F), whose range is unknown; scale it to 0..255 "
            "and convert it to mode L or RGB"
        )
    try:
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise InputError(f"{name} is truncated or damaged: {error}") from error
    except ValueError as error:
        raise InputError(f"{name} (mode {image.mode}) cannot become RGB: {error}") from None


def _from_array(array: np.ndarray) -> np.ndarray:
    if array.dtype != np.uint8:
        raise InputError(
            f"pixels have to be uint8, got {array.dtype}; scale them to 0..255 and convert "
            "(a picture in 0..1: `(x * 255).round().astype('uint8')`)"
        )
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in (1, 3):
        raise InputError(f"pixels have to be [height, width, 3] or [3, height, width], got {list(array.shape)}")
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    return np.broadcast_to(array, (*array.shape[:2], 3))
