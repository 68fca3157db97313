"""The extension module: the engine as the package uses it. Not part of the public interface."""

import os
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

class Value:
    name: str
    layout: str
    dims: str
    description: str
    read_only: str
    unavailable: str

class Field:
    name: str
    keyword: bool
    slots: int
    read_only: bool

class Form(Enum):
    tensor = ...
    tuple = ...
    record = ...

class Kind:
    name: str
    doc: str
    inputs: list[Field]
    form: Form
    outputs: list[Field]
    values: list[Value]
    aliases: dict[str, str]

def all_kinds() -> list[Kind]: ...

class Site:
    path: str
    slot: int
    images_axis: bool
    read_only: str
    unavailable: str

class Inputs:
    def __init__(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> None: ...
    input_ids: torch.Tensor

def following(inputs: Inputs, tokens: torch.Tensor) -> Inputs: ...

class Trace:
    def read(self, site: int) -> torch.Tensor | None: ...
    def read_element(self, site: int, index: int) -> torch.Tensor: ...
    def write(self, site: int, value: torch.Tensor) -> None: ...
    def write_element(self, site: int, index: int, value: torch.Tensor) -> None: ...
    def count_from(self, site: int) -> int: ...
    def replace(self, module: int, value: torch.Tensor) -> None: ...
    def finish(self) -> torch.Tensor: ...
    def check_edits(self) -> None: ...
    def hand_over(self, next: Trace) -> None: ...
    def close(self) -> None: ...
    def site_of(self, tensor: torch.Tensor) -> str | None: ...
    def position(self) -> str: ...

class TracerBase:
    _model: Any
    _core: Any

class ModuleBase:
    _model: Any
    _tracer: Any
    _index: int
    _inputs: int
    _outputs: int
    _values: int

class Accessor:
    def __new__(cls, first: str, offset: int) -> Accessor: ...
    def __call__(self, module: Any, value: Any = None) -> Any: ...

OPEN: Any

class Model:
    loaded: bool
    dtype: torch.dtype
    device: str
    @staticmethod
    def build(config_json: str, where: str, attention: str, text_only: bool) -> Model: ...
    def load(
        self, folder: str | os.PathLike[str], dtype: torch.dtype | None, device: torch.device, copy: bool
    ) -> dict[str, Any]: ...
    def config(self) -> dict[str, Any]: ...
    def modules(self) -> list[dict[str, Any]]: ...
    def sites(self) -> list[Site]: ...
    def order_of(self, site: int) -> int | None: ...
    def locations(self) -> list[str]: ...
    def parameter(self, module: int, name: str) -> torch.Tensor: ...
    def apply(self, module: int, x: torch.Tensor) -> torch.Tensor: ...
    def count_weights(self) -> tuple[int, int]: ...
    def generation_prompt(self, inputs: Inputs, capacity: int) -> Inputs: ...
    def trace(self, inputs: Inputs) -> Trace: ...
    def forward(self, inputs: Inputs) -> torch.Tensor: ...
    def project_on_vocab(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def scan(self, inputs: Inputs) -> list[tuple[int, int, list[int], torch.dtype]]: ...

class ImageOptions:
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    do_resize: bool
    do_rescale: bool
    do_normalize: bool
    rescale_factor: float
    image_mean: Sequence[float]
    image_std: Sequence[float]
    def __init__(self) -> None: ...
    def check(self) -> None: ...

def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]: ...
def processed_size(height: int, width: int, options: ImageOptions) -> tuple[int, int]: ...
def preprocess_images(
    images: Sequence[np.ndarray[Any, Any]], options: ImageOptions
) -> tuple[torch.Tensor, torch.Tensor]: ...
