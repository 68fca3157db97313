"""Sites: the names that values go by, from `logits` to `layers.3.self_attn.attention_queries`.

A site is the dotted path of a value under `model`, by the short names or by those of the
transformers module tree, or a mixture of them. In a pattern an index may be negative, `*` stands
for every index and `a:b` for a range, as in a slice of a list:

>>> expand(model, ["vision.layers.-1.layer_output", "layers.0:2.self_attn.attention_output"])
['vision.layers.3.layer_output', 'layers.0.self_attn.attention_output', 'layers.1.self_attn.attention_output']
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from .errors import InputError, NotReachedError, Unavailable, UnknownSite
from .tree import Module, ModuleList, near_names

if TYPE_CHECKING:
    from .model import StandardizedTransformer
    from .trace import Tracer

__all__ = ["dims", "expand", "expand_below", "is_pattern", "number", "reaches", "read", "write"]

_INDEX = re.compile(r"-?\d+")
_RANGE = re.compile(r"(-?\d+)?:(-?\d+)?")


def is_pattern(site: str) -> bool:
    """Whether `site` may stand for several: it holds a `*` or a range."""
    return any(part == "*" or ":" in part for part in site.split("."))


def expand(model: StandardizedTransformer, patterns: str | Iterable[str]) -> list[str]:
    """The sites that one or several patterns stand for: short names, each once, in forward order.

    Where `*` or a range meets blocks that lack the value (`layers.*.deepstack_output`), those that
    have it are given.

    Raises:
        UnknownSite: a pattern that stands for nothing; the message has names near it.
        Unavailable: a value that this model never serves, with the reason.
    """
    numbers = {
        index for pattern in ([patterns] if isinstance(patterns, str) else patterns) for index in _find(model, pattern)
    }
    return [model._sites[index].path for index in sorted(numbers, key=lambda index: (_order(model, index), index))]


def expand_below(model: StandardizedTransformer, site: str, layers: int | Sequence[int] | None = None) -> list[str]:
    """The sites of `site` in text blocks, in forward order: `site` is the part below the block
    (`"layer_output"`, `"self_attn.attention_head_outputs"`).

    Without `layers`, in every block that serves it; a name that no block has is then taken from
    the root (`"vision.layers.*.layer_output"`, `"vision.image_features"`). Raises as `expand`.
    """
    if layers is not None:
        return expand(model, [f"layers.{layer}.{site}" for layer in ([layers] if isinstance(layers, int) else layers)])
    try:
        return expand(model, f"layers.*.{site}")
    except UnknownSite:
        return expand(model, site)


def number(model: StandardizedTransformer, site: str) -> int:
    """The engine's number of one site. Raises `UnknownSite`, also for a pattern of several."""
    if is_pattern(site):
        raise UnknownSite(f"{site!r} stands for several sites; one is needed here. sites.expand(model, ...) lists them")
    (index,) = _find(model, site, available=False)
    return index


def dims(model: StandardizedTransformer, site: str) -> tuple[str, ...]:
    """The axes of a named value, or of a native input or output that is the same tensor:
    `("batch", "seq", "hidden_size")`. Raises `InputError` for a site whose axes have no names."""
    index = number(model, site)
    place, order = model._sites[index], _order(model, index)
    owner = place.path.rpartition(".")[0]
    own = model.get(owner) if owner else model
    for host in chain([own], _modules(model)):
        for offset, value in enumerate(host._kind.values):
            named = host._values + offset
            other = model._sites[named]
            if other.slot != place.slot or model._core.order_of(named) != order:
                continue
            if other.batch_axis == place.batch_axis:  # a native row of all prompts has no name
                axes = tuple(value.dims.split())
                return axes[1:] if other.images_axis and not place.images_axis else axes
    raise InputError(
        f"the axes of {place.path} have no names: give a named value, see model.support(), or an axis by its number"
    )


def read(root: StandardizedTransformer | Tracer, site: str) -> Any:
    """The value at one site of an open trace; `root` is the tracer, or the model for the innermost."""
    return root.get(site)


def write(root: StandardizedTransformer | Tracer, site: str, value: Any) -> None:
    """Assign to one site of an open trace, as `model.layers[3].layer_output = value` does."""
    owner, _, name = site.rpartition(".")
    setattr(root.get(owner) if owner else root, name, value)


def reaches(tracer: Tracer, site: str) -> bool:
    """False where the forward of an open trace is known not to come by a site. Nothing is computed.

    Raises `Unavailable` for what is never served, `OutOfOrderError` for what the forward has passed."""
    try:
        tracer._core.check_reachable(number(tracer._model, site))
    except NotReachedError:
        return False
    return True


def _modules(model: StandardizedTransformer) -> Iterable[Module]:
    return (model.get(entry["path"]) if entry["path"] else model for entry in model._entries)


def _order(model: StandardizedTransformer, index: int) -> int:
    order = model._core.order_of(index)
    return -1 if order is None else order


def _find(model: StandardizedTransformer, pattern: str, available: bool = True) -> list[int]:
    """The numbers of the sites of one pattern; those that are not served are left out or refused."""
    numbers = _match(model, pattern.split("."), pattern)
    served = [index for index in numbers if not model._sites[index].unavailable]
    if not served and available:
        place = model._sites[numbers[0]]
        raise Unavailable(f"{place.path} is unavailable: {place.unavailable}")
    return served if available else numbers


def _match(node: Module | ModuleList[Any], parts: Sequence[str], pattern: str) -> list[int]:
    """The sites at `parts` below a node. Raises `UnknownSite` where there is none."""
    if isinstance(node, ModuleList):
        return _match_blocks(node, parts, pattern)
    name = parts[0]
    found = _named(node).get(".".join(parts))
    if found is not None:
        return [found]
    if len(parts) == 1:
        raise _unknown(pattern, name, node, _named(node))
    children = node._names()
    child = getattr(node, name) if name in children else None
    if not isinstance(child, (Module, ModuleList)):
        raise _unknown(pattern, name, node, children)
    return _match(child, parts[1:], pattern)


def _match_blocks(blocks: ModuleList[Any], parts: Sequence[str], pattern: str) -> list[int]:
    if len(parts) == 1:
        raise UnknownSite(f"{pattern!r} is a list of {len(blocks)} blocks, not a value: go on with .*.layer_output")
    found: list[int] = []
    missing: UnknownSite | None = None
    for index in _indices(parts[0], len(blocks), pattern):
        try:
            found += _match(blocks[index], parts[1:], pattern)
        except UnknownSite as error:  # blocks of one list may differ
            missing = missing or error
    if not found:
        raise missing or UnknownSite(f"{pattern!r}: {parts[0]} is an empty range of {len(blocks)} blocks")
    return found


def _indices(part: str, count: int, pattern: str) -> Sequence[int]:
    """The indices that `3`, `-1`, `*` or `a:b` stand for."""
    if part == "*":
        return range(count)
    if (ends := _RANGE.fullmatch(part)) is not None:
        start, stop = (None if end is None else int(end) for end in ends.groups())
        return range(count)[start:stop]
    if not _INDEX.fullmatch(part):
        raise UnknownSite(f"{pattern!r}: {part!r} is no index; give a number, a range such as 0:4, or *")
    if not -count <= int(part) < count:
        raise UnknownSite(f"{pattern!r}: index {part}, and there are {count} blocks, 0 to {count - 1}")
    return [int(part) % count]


def _named(host: Module) -> dict[str, int]:
    """The sites of one module by the last part of their names."""
    found = {value.name: host._values + offset for offset, value in enumerate(host._kind.values)}
    first, last = host._inputs, host._values + len(host._kind.values)
    own = f"{host._site_path}." if host._site_path else ""
    lists = {
        place.path.removeprefix(own): first + k for k, place in enumerate(host._model._sites[first:last]) if place.list
    }
    return {**lists, "input": host._inputs, "output": host._outputs, **found}


def _unknown(pattern: str, name: str, host: Module, known: Iterable[str]) -> UnknownSite:
    where = host._site_path or "the model"
    if name in host._parameters:
        return UnknownSite(f"{pattern!r} is a weight, which no trace serves: read it as an attribute of its module")
    if name in host._names():
        return UnknownSite(f"{pattern!r} stops at a module: go on to a value, such as {pattern}.output")
    either = sorted({*known, *_named(host), *host._names()})
    return UnknownSite(f"no site {pattern!r}: {where} has no {name!r}.{near_names(name, either)}")
