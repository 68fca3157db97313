"""vlscope: read and edit the forward of Qwen vision-language models, value by value.

>>> import vlscope
>>> model = vlscope.load("demo")
>>> with model.trace("What color is this?", images=[picture]):
...     features = model.vision.image_features.save()
...     logits = model.logits.save()
"""

from __future__ import annotations

import importlib
from typing import Any

from . import (
    _build,  # noqa: F401, I001  (first: it loads torch and the engine, or says why not)
    layouts,
    sites,
)
from .calculator import Shapes, shapes
from .edits import Edit
from .errors import (
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    InputError,
    LateEditError,
    NotReachedError,
    OutOfMemory,
    OutOfOrderError,
    Unavailable,
    UnknownSite,
    UnsupportedFamily,
    VlscopeError,
)
from .estimates import estimate
from .generation import GenerationTracer, Sampling
from .index_maps import ImageTokens, PromptRows
from .model import StandardizedTransformer, load, weight_counts
from .recording import Recording
from .trace import InvokeTracer, Saved, Session, Tracer, save
from .tree import Module, ModuleList, Record, Tensors, Value

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "ConfigError",
    "Edit",
    "GenerationTracer",
    "ImageTokens",
    "InputError",
    "InvokeTracer",
    "LateEditError",
    "Module",
    "ModuleList",
    "NotReachedError",
    "OutOfMemory",
    "OutOfOrderError",
    "PromptRows",
    "Record",
    "Recording",
    "Sampling",
    "Saved",
    "Session",
    "Shapes",
    "StandardizedTransformer",
    "Tensors",
    "Tracer",
    "Unavailable",
    "UnknownSite",
    "UnsupportedFamily",
    "Value",
    "VlscopeError",
    "estimate",
    "layouts",
    "load",
    "save",
    "shapes",
    "sites",
    "weight_counts",
]

_LAZY = ("demo", "patching", "processing", "printing")  # imported when first used: they cost start-up time


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'vlscope' has no attribute {name!r}")
