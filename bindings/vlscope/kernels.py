"""The library of CUDA kernels, loaded beside the engine where there are both the library and a device."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

__all__ = ["cuda_kernels"]

_LIBRARY = Path(__file__).with_name("_cuda.so")


def _load(library: Path) -> bool:
    if not library.exists() or not torch.cuda.is_available():
        return False
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        logging.getLogger("vlscope").warning(
            "the CUDA kernels cannot be loaded, torch's own operations are used: %s", error
        )
        return False
    return True


_LOADED = _load(_LIBRARY)


def cuda_kernels() -> bool:
    """Whether `torch.ops.vlscope` has kernels of its own on CUDA: vlscope was built where nvcc is, and runs where
    a device is. Without them the same operators are composed of torch's own operations."""
    return _LOADED
