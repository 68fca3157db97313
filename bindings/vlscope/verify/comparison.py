"""How two values differ, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["difference"]


def difference(ours: Any, theirs: Any, tolerance: float = 0.0) -> str | None:
    """None where both agree, else how they do not.

    Tensors agree to the bit, or within `tolerance` of the largest magnitude in `theirs` (at least
    1). Tuples and mappings agree if their elements do.
    """
    if isinstance(theirs, torch.Tensor):
        return _between_tensors(ours, theirs, tolerance)
    if isinstance(theirs, Mapping):
        if not isinstance(ours, Mapping) or set(ours) != set(theirs):
            return f"holds {sorted(ours) if isinstance(ours, Mapping) else ours!r}, not {sorted(theirs)}"
        pairs = [(f"[{key!r}]", ours[key], theirs[key]) for key in theirs]
    elif isinstance(theirs, (tuple, list)):
        if not isinstance(ours, (tuple, list)) or len(ours) != len(theirs):
            return f"holds {len(ours) if isinstance(ours, (tuple, list)) else ours!r} elements, not {len(theirs)}"
        pairs = [(f"[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return None if ours == theirs else f"is {ours!r}, not {theirs!r}"
    found = [f"{key} {text}" for key, a, b in pairs if (text := difference(a, b, tolerance))]
    return "; ".join(found) or None


def _between_tensors(ours: Any, theirs: torch.Tensor, tolerance: float) -> str | None:
    if not isinstance(ours, torch.Tensor):
        return f"is a {type(ours).__name__}, not a tensor"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"is {ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
    if torch.equal(ours, theirs):
        return None
    worst = (ours.double() - theirs.double()).abs().max().item()
    scale = max(1.0, theirs.double().abs().max().item())
    if worst <= tolerance * scale:
        return None
    unequal = (ours != theirs).sum().item()
    return f"differs in {unequal} of {theirs.numel()} elements, by {worst:.3g} at most"
