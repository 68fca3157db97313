"""Edits of an open trace: a value or a part of it replaced, attention cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..sites import dims, expand, expand_below, read, write
from ..tree import Tensors

if TYPE_CHECKING:
    from ..model import StandardizedTransformer
    from ..trace import Tracer

#: Axes along which a value has one row for each token or patch.
POSITION_AXES = ("seq", "query", "patches", "image_tokens", "video_tokens")

Selection = Any  # an index, a slice, a sequence of indices, a boolean mask, or None for all
Replacement = Mapping[str, Any] | Callable[[torch.Tensor, str], torch.Tensor]


def replace(root: StandardizedTransformer | Tracer, site: str, by: Replacement, **at: Selection) -> None:
    """Put `by` in the place of a value, or of the part of it that `at` chooses, in an open trace.

    >>> with model.trace(prompt) as tracer:
    ...     replace(tracer, "layers.3.self_attn.attention_head_outputs", zero, heads=[0, 2], seq=slice(4, None))

    Args:
        root: the tracer, or the model for the innermost trace.
        site: one site or a pattern, in forward order. Of a value of several tensors, such as one for each
            image, each is replaced.
        by: `zero`, `noise(...)`, a mapping from sites to tensors (see `collect`, `mean`, `resample`),
            or a function of the value and its site. Axes of length 1 are repeated.
        at: for each axis by its name (`seq`, `heads`, `patches`, ...; see `vlscope.sites.dims`) an
            index, a slice, a list of indices or a boolean mask; several axes choose their product.
    """
    for name in expand(_model_of(root), site):
        put(root, name, by, at)


def put(root: StandardizedTransformer | Tracer, site: str, by: Replacement, at: Mapping[Any, Selection]) -> None:
    """`replace` at one site. An axis goes by its name or its number."""
    parts = read_parts(root, site)
    several = isinstance(parts, Tensors)
    if callable(by):
        new = tuple(by(part, f"{site}.{k}" if several else site) for k, part in enumerate(parts))
    else:
        new = parts_of(by[site])
    pairs = zip(matching(new, parts, site), parts, strict=True)
    made = [_replaced(_model_of(root), site, part, donor, at) for donor, part in pairs]
    write(root, site, tuple(made) if several else made[0])


def _replaced(
    model: StandardizedTransformer,
    site: str,
    value: torch.Tensor,
    new: torch.Tensor,
    at: Mapping[Any, Selection],
) -> torch.Tensor:
    """A tensor of `value`'s shape, with `new` where `at` says."""
    new = fitting(new, value, site)
    if at:
        new = torch.where(_chosen(model, value, at, site), new, value)
    return new.expand_as(value).clone()


def knockout(
    root: StandardizedTransformer | Tracer,
    layers: int | Sequence[int] | None = None,
    *,
    queries: Selection = None,
    keys: Selection = None,
    heads: Selection = None,
) -> None:
    """Attention knockout in an open trace: the probabilities from `queries` to `keys` are set to zero
    in some blocks and heads, and the rows that lose something are divided by their sums. That is the
    same as setting the scores to minus infinity (Geva et al. 2023, arXiv:2304.14767, section 5). A row
    that has no other key is left at zero: its heads then give nothing.

    Args:
        root: the tracer, or the model for the innermost trace.
        layers: blocks, by default all; negatives count from the end. See `windows`.
        queries, keys: positions that look and that are looked at.
        heads: query heads.
    """
    model = _model_of(root)
    for site in expand_below(model, "self_attn.attention_probabilities", layers):
        pattern = read(root, site)
        cut = _chosen(model, pattern, {"heads": heads, "query": queries, "key": keys}, site)
        left = pattern.masked_fill(cut, 0)
        total = left.sum(-1, keepdim=True)
        renormalised = left / total.masked_fill(total == 0, 1)
        lost = (cut & (pattern != 0)).any(-1, keepdim=True)
        write(root, site, torch.where(lost, renormalised, left))


def windows(model: StandardizedTransformer, size: int) -> list[range]:
    """For each block the window of `size` blocks around it, cut off at the ends (Geva et al. 2023)."""
    count, before = model.num_layers, (size - 1) // 2
    return [range(max(0, i - before), min(count, i - before + size)) for i in range(count)]


def _model_of(root: Any) -> StandardizedTransformer:
    return root._model  # a model is the root of its own tree, a tracer has one


def read_parts(root: StandardizedTransformer | Tracer, site: str) -> tuple[torch.Tensor, ...]:
    """The tensors of a site's value: one, or `Tensors` as of the patterns of each image."""
    value = read(root, site)
    if isinstance(value, torch.Tensor):
        return (value,)
    if not isinstance(value, Tensors):
        raise InputError(f"{site} is no one value but {type(value).__name__}: name a value that it holds")
    return value


def parts_of(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of what was collected or is to be put in, one or several."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def matching(new: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], site: str) -> Sequence[torch.Tensor]:
    """`new`, refused if it is another number of tensors than the value's `parts`."""
    if len(new) != len(parts):
        raise InputError(f"{site} holds {len(parts)} tensors here, and what is to be put in is {len(new)}")
    return new


def axis_of(model: StandardizedTransformer, site: str, axis: str | int | None, rank: int) -> int:
    """The index of an axis of a site's tensors by its name or number, or of the axis of positions."""
    if isinstance(axis, int):
        if not -rank <= axis < rank:
            raise InputError(f"axis {axis} of {site}: it has {rank} axes, 0 to {rank - 1}")
        return axis % rank
    axes = dims(model, site)
    found = [k for k, name in enumerate(axes) if (name in POSITION_AXES if axis is None else name == axis)]
    if not found:
        wanted = "positions" if axis is None else repr(axis)
        raise InputError(f"{site} has the axes {', '.join(axes)}, and none of {wanted}")
    return found[0]


def fitting(new: torch.Tensor, value: torch.Tensor, site: str) -> torch.Tensor:
    """`new` as it takes the place of `value`; axes of length 1 are repeated."""
    fits = new.ndim == value.ndim and all(a in (1, b) for a, b in zip(new.shape, value.shape))
    if not fits:
        raise InputError(f"{site} holds {list(value.shape)} here, and what is to be put in is {list(new.shape)}")
    return new.to(value)


def _chosen(
    model: StandardizedTransformer, value: torch.Tensor, at: Mapping[Any, Selection], site: str
) -> torch.Tensor:
    """True on the part of a value that `at` chooses; broadcasts to the value."""
    chosen = torch.ones([1] * value.ndim, dtype=torch.bool)
    for axis, choice in at.items():
        where = axis_of(model, site, axis, value.ndim)
        kept = selected(choice, value.shape[where], axis, site)
        chosen = chosen & kept.reshape([-1 if k == where else 1 for k in range(value.ndim)])
    return chosen.to(value.device)


def selected(choice: Selection, length: int, axis: str | int, site: str) -> torch.Tensor:
    """[length], True where `choice` says."""
    kept = torch.zeros(length, dtype=torch.bool)
    if choice is None:
        return ~kept
    if isinstance(choice, slice):
        kept[choice] = True
        return kept
    indices = torch.as_tensor(choice).cpu()
    if indices.dtype == torch.bool:
        if indices.shape != (length,):
            raise InputError(f"a mask of {list(indices.shape)} was given for {site}, which has {length} along {axis}")
        return indices
    for index in indices.reshape(-1).tolist():
        if not -length <= index < length:
            raise InputError(f"{axis} {index} of {site}: there are {length}, 0 to {length - 1}")
        kept[index] = True
    return kept
