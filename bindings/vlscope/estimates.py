"""How many bytes values take, told before any of them is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .errors import NotReachedError
from .sites import expand

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["estimate"]


def estimate(model: StandardizedTransformer, prompt: Any, sites: str | Iterable[str], **inputs: Any) -> dict[str, int]:
    """The bytes that each value of `sites` takes if it is saved in a trace of this input, by site.

    `sites` are patterns, `prompt` and `inputs` what `model.trace` takes. Nothing is computed and no weight
    is needed. Two names of one tensor are listed with its bytes each, and take them once.

    >>> sum(vlscope.estimate(model, "Hello", "layers.*.layer_output").values())
    1536

    Raises:
        UnknownSite, Unavailable: for sites that the model does not serve.
        NotReachedError: for a site that this input does not reach.
        InputError: what `model.trace` refuses.
    """
    wanted = expand(model, sites)
    shapes = model.scan(prompt, **inputs)
    for site in wanted:
        if site not in shapes:
            raise NotReachedError(f"{site} is not reached by this input, so it takes no bytes: leave it out")
    return {site: _bytes(shapes[site]) for site in wanted}


def _bytes(value: Any) -> int:
    parts = value if isinstance(value, tuple) else (value,)
    return sum(part.numel() * part.element_size() for part in parts)
