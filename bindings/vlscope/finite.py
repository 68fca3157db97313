"""Where a forward stops being made of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["first_nonfinite"]


def first_nonfinite(model: StandardizedTransformer, prompt: Any = None, **inputs: Any) -> str | None:
    """The site of the first value, in the order of the forward, that holds a NaN or an infinity.

    None if no value does. `prompt` and `inputs` are what `model.trace` takes. Every value of the forward is
    read, patterns included, so give a short prompt that shows the fault.

    >>> vlscope.first_nonfinite(model, "Hello") is None
    True

    Raises `InputError` for what `model.trace` refuses.
    """
    # Of several names of one place the last listed comes first: a named value stands behind its native ones.
    sites = sorted(reversed(model.scan(prompt, **inputs)), key=model.order)
    with model.trace(prompt, **inputs) as tracer:
        return next((site for site in sites if not _is_finite(tracer.get(site))), None)


def _is_finite(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(bool(part.isfinite().all()) for part in parts if isinstance(part, torch.Tensor))
