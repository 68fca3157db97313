"""vlscope: read and edit the forward of Qwen vision-language models, value by value.

>>> import vlscope
>>> model = vlscope.load("demo")
>>> with model.trace("What color is this?", images=[picture]):
...     features = model.vision.image_features.save()
...     logits = model.logits.save()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    CollectionError,
    ConfigError,
    InputError,
    LateEditError,
    MissingPackage,
    NonFiniteError,
    NotReachedError,
    OutOfMemory,
    OutOfOrderError,
    TokenizationError,
    Unavailable,
    UnknownSite,
    UnsupportedFamily,
    VlscopeError,
)
from .estimates import estimate
from .finite import first_nonfinite
from .generation import GenerationTracer, Sampling
from .index_maps import ImageTokens, PromptRows
from .kernels import cuda_kernels
from .model import StandardizedTransformer, load, weight_counts
from .recording import Recording
from .trace import InvokeTracer, Saved, Session, Tracer, save
from .tree import Module, ModuleList, Record, Tensors, Value

__version__ = "0.1.0"

__all__ = [
    "ActivationDataset",
    "CheckpointError",
    "CheckpointNotFound",
    "CollectionError",
    "ConfigError",
    "Edit",
    "GenerationTracer",
    "ImageTokens",
    "InputError",
    "InvokeTracer",
    "LateEditError",
    "MissingPackage",
    "Module",
    "ModuleList",
    "NonFiniteError",
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
    "TokenizationError",
    "Tracer",
    "Unavailable",
    "UnknownSite",
    "UnsupportedFamily",
    "Value",
    "VlscopeError",
    "collect",
    "cuda_kernels",
    "estimate",
    "first_nonfinite",
    "layouts",
    "load",
    "save",
    "shapes",
    "sites",
    "weight_counts",
]

if TYPE_CHECKING:
    from .collection import ActivationDataset, collect

#: Imported when first used: they cost start-up time.
_LAZY = ("collection", "demo", "html", "interventions", "patching", "plot", "printing", "processing", "prompts")
_LAZY_NAMES = {"ActivationDataset": "collection", "collect": "collection"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f".{name}", __name__)
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(f".{_LAZY_NAMES[name]}", __name__), name)
    raise AttributeError(f"module 'vlscope' has no attribute {name!r}")
