"""Edits that stand: what is done to a value in every trace, and values kept without being read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import sites
from .errors import InputError, NotReachedError, Unavailable
from .tree import Tensors

if TYPE_CHECKING:
    from .model import StandardizedTransformer
    from .trace import Saved, Tracer

__all__ = ["Edit", "Schedule", "Visit", "keeper", "make_edit", "visit"]

Act = Callable[[Any], Any]


@dataclass(frozen=True)
class Visit:
    """Something that a tracer does by itself at one site."""

    order: int  # of the site's location
    number: int  # of the site
    act: Act  # takes the value; what it returns, other than None, is assigned


def visit(model: StandardizedTransformer, site: str, act: Act) -> Visit:
    """A visit of one concrete site."""
    number = sites.number(model, site)
    order = model._core.order_of(number)
    if order is None:
        raise Unavailable(f"{site} is unavailable: {model._sites[number].unavailable}")
    return Visit(order, number, act)


@dataclass(frozen=True, eq=False)
class Edit:
    """A persistent edit; made by `model.edit`. As a context manager it lasts for the block.

    Attributes:
        key: another edit under the same key replaces this one.
        sites: the sites that it acts on.
        function: what is done to each value.
    """

    model: StandardizedTransformer
    key: str
    sites: tuple[str, ...]
    function: Act
    visits: tuple[Visit, ...]

    def __enter__(self) -> Edit:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the edit back: traces opened from now on go without it."""
        if self.model._edits.get(self.key) is self:
            del self.model._edits[self.key]

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"<Edit {self.key!r}: {name} at {', '.join(self.sites)}>"


def make_edit(model: StandardizedTransformer, pattern: str | Iterable[str], function: Act, key: str | None) -> Edit:
    """See `model.edit`."""
    if not callable(function):
        raise InputError(f"an edit is a function of the value; got {type(function).__name__}")
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    found = sites.expand(model, patterns)
    for site in found:
        reason = model._sites[sites.number(model, site)].read_only
        if reason:
            raise InputError(f"{site} is read-only: {reason}.")
    visits = tuple(visit(model, site, function) for site in found)
    return Edit(model, key or ", ".join(patterns), tuple(found), function, visits)


class Schedule:
    """The visits of one tracer, in forward order. They are made when the forward is taken to their
    site or past it, before the script sees anything from there on."""

    def __init__(self) -> None:
        self._all: list[Visit] = []
        self._next = 0

    def add(self, visits: Iterable[Visit]) -> None:
        """More visits, all of them ahead of the forward."""
        self._all[self._next :] = sorted([*self._all[self._next :], *visits], key=lambda visit: visit.order)

    def restart(self) -> None:
        """For the next step of a generation."""
        self._next = 0

    @property
    def armed(self) -> int:
        """See `_core.TracerBase`."""
        return self._all[self._next].order + 1 if self._next < len(self._all) else 0

    def run(self, tracer: Tracer, order: int | None = None) -> None:
        """Make every visit up to a place in the forward order; all of them by default. What this
        forward does not reach is passed over."""
        while self._next < len(self._all) and (order is None or self._all[self._next].order <= order):
            visit = self._all[self._next]
            self._next += 1
            tracer._armed = self.armed
            core, listed = tracer._core, tracer._model._sites[visit.number].list
            try:
                value = Tensors(core.read_list(visit.number)) if listed else core.read(visit.number)
            except NotReachedError:
                continue
            result = visit.act(value)
            if result is not None and result is not value:
                _check_result(tracer._model._sites[visit.number].path, result, listed)
                (core.write_list if listed else core.write)(visit.number, result)


def _check_result(site: str, result: Any, listed: bool) -> None:
    """What an edit returned must be what the site holds: a tensor, or several."""
    parts = result if listed and isinstance(result, (tuple, list)) else [result]
    for part in parts:
        if not isinstance(part, torch.Tensor):
            raise InputError(
                f"the edit of {site} returned {type(part).__name__}; return a tensor, or None after editing in place"
            )


def keeper(saved: Saved, site: str, device: Any, dtype: torch.dtype | None) -> Act:
    """Keeps a value under its site, detached."""

    def keep(value: Any) -> None:
        parts = value if isinstance(value, tuple) else (value,)
        moved = tuple(part.detach().to(device=device, dtype=dtype) for part in parts)
        saved._keep(site, moved if isinstance(value, tuple) else moved[0])

    return keep
