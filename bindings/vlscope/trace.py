"""Traces: one forward that runs as far as its script asks, line by line."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from . import _core
from .edits import Schedule, Visit, keeper, visit
from .errors import NotReachedError, OutOfOrderError
from .sites import expand
from .tree import KINDS, OPEN, Module, Tensors, plant

if TYPE_CHECKING:
    from typing_extensions import Self

    from .model import StandardizedTransformer

__all__ = ["InvokeTracer", "Saved", "Session", "StepsSaved", "StopTrace", "Tracer", "save"]

T = TypeVar("T")


class StopTrace(Exception):
    """Ends the block of one tracer; raised by `tracer.stop()` and caught where the block is left."""

    def __init__(self, tracer: Any) -> None:
        super().__init__("tracer.stop() was called outside its own block")
        self.tracer = tracer


class Saved(Mapping[str, Any]):
    """What a trace has saved, by the site last read through, or the method that made it, as in
    `layers.3.self_attn.attention_row`; a second object of one name is `site#2`. Results of arithmetic
    are `saved.0`, `saved.1`, ... In the order of saving."""

    def __init__(self) -> None:
        self._items: dict[str, Any] = {}
        self._unnamed = 0

    def _keep(self, site: str | None, value: Any) -> None:
        if any(value is kept for kept in self._kept()):
            return
        if site is None:
            self._items[f"saved.{self._unnamed}"] = value
            self._unnamed += 1
        else:
            self._put(site, value)

    def _put(self, site: str, value: Any) -> None:
        if site in self._items:
            # Assigned or made anew since: both were saved, and both are kept.
            site = next(name for n in itertools.count(2) if (name := f"{site}#{n}") not in self._items)
        self._items[site] = value

    def _kept(self) -> Iterator[Any]:
        """Every object that was saved."""
        return iter(self._items.values())

    def __getitem__(self, site: str) -> Any:
        try:
            return self._items[site]
        except KeyError:
            raise KeyError(f"{site!r} was not saved; saved are {', '.join(self._items)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Saved({', '.join(self._items)})"


class StepsSaved(Saved):
    """What a generation has saved: for each site the values of the steps, in their order."""

    def _put(self, site: str, value: Any) -> None:
        self._items.setdefault(site, []).append(value)

    def _kept(self) -> Iterator[Any]:
        for kept in self._items.values():
            yield from kept if isinstance(kept, list) else (kept,)


def _release_views(saved: Saved) -> None:
    """Give each saved slice storage of its own, so that it does not keep the whole tensor alive.

    Left alone are tensors of a graph, and those whose storage another saved tensor shares.
    """
    tensors = [kept for kept in saved._kept() if isinstance(kept, torch.Tensor)]
    storages = [kept.untyped_storage() for kept in tensors if kept.layout == torch.strided]
    owners: dict[int, int] = {}
    for storage in storages:
        owners[storage._cdata] = owners.get(storage._cdata, 0) + 1
    for kept in tensors:
        if kept.layout != torch.strided or kept.requires_grad or kept.is_meta:
            continue
        storage = kept.untyped_storage()
        if storage.nbytes() > kept.numel() * kept.element_size() and owners[storage._cdata] == 1:
            _core.own_storage(kept)


class _Block:
    """What tracers and sessions share: a block that `stop` ends."""

    saved: Saved

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> bool:
        """True, which ends the matter, where the block was left by its own `stop`."""
        return isinstance(error, StopTrace) and error.tracer is self

    def stop(self) -> NoReturn:
        """End the block here: nothing further is computed, what was saved stays."""
        raise StopTrace(self)

    def barrier(self, participants: int) -> Callable[[], None]:
        """Accepted for scripts written for other tracers; blocks run where they stand, so there is
        nothing to wait for."""
        return lambda: None


class Tracer(_core.TracerBase, _Block):
    """One forward, open inside `with model.trace(prompt) as tracer:`.

    A tracer has the whole tree too: `tracer.layers[3].layer_output` is that value of this forward,
    whichever other trace is open. The forward runs only as far as the last value read.
    """

    _tree: Module | None
    _schedule: Schedule | None
    _last_kept = -1  # order of the last site of a cache
    _made: WeakIdKeyDictionary | None = None  # tensors that a module's methods made, and the names of these

    def __init__(
        self,
        model: StandardizedTransformer,
        inputs: _core.Inputs,
        on_exit: Callable[[Tracer], None] | None = None,
    ) -> None:
        self._model = model
        # One call in place of one __setattr__ each: opening a trace is to cost next to nothing.
        vars(self).update(_inputs=inputs, _on_exit=on_exit, _tree=None, _schedule=None, saved=Saved())

    def __enter__(self) -> Tracer:
        inputs = vars(self).pop("_inputs", None)
        if inputs is None:
            raise ValueError("a tracer is used once: call model.trace(...) again")
        model = self._model
        if not model._dispatched:
            model.dispatch()
        self._core = self._start(inputs)
        if model._edits:
            self._plan([visit for edit in model._edits.values() for visit in edit.visits])
        OPEN.set((*OPEN.get(), self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> bool:
        tracers = OPEN.get()
        innermost = tracers and tracers[-1] is self
        OPEN.set(tracers[:-1] if innermost else tuple(tracer for tracer in tracers if tracer is not self))
        stopped = _Block.__exit__(self, kind, error, traceback)
        try:
            if error is None:
                self._complete()
            if error is None or stopped:
                self._core.check_edits()
        finally:
            self._close()
        return stopped

    def _start(self, inputs: _core.Inputs) -> Any:
        return self._model._core.trace(inputs)

    def _complete(self) -> None:
        """What is still to be done where the block is left normally."""
        if self._armed:
            self._visit(self._last_kept)

    def _plan(self, visits: Sequence[Visit]) -> None:
        """Have the tracer do something by itself at these sites."""
        if self._schedule is None:
            self._schedule = Schedule()
        self._schedule.add(visits)
        self._armed = self._schedule.armed

    def _visit(self, order: int | None) -> None:
        """Called before the forward is taken to a place in its order, or past it."""
        if self._schedule is not None and order is not None:
            self._schedule.run(self, order)

    def cache(
        self, sites: str | Iterable[str], *, device: Any = None, dtype: torch.dtype | None = None
    ) -> Mapping[str, Any]:
        """Keep the values of `sites` as the forward passes them, without reading them one by one.

        `sites` are patterns, as in `layers.*.layer_output`. Returns a mapping by site that is full when
        the block is left; the forward runs at least to the last of them. In a generation it holds a list
        for each site, a value a step. Values are detached, and moved to `device` and `dtype` if given;
        else they are the live tensors, edits included.

        Raises:
            UnknownSite, Unavailable, OutOfOrderError: for what cannot be kept, before anything moves.
        """
        if self._core is None:
            raise OutOfOrderError("this trace is not open: ask for a cache inside its `with` block")
        kept = type(self.saved)()
        visits = [visit(self._model, site, keeper(kept, site, device, dtype)) for site in expand(self._model, sites)]
        for wanted in visits:
            with contextlib.suppress(NotReachedError):
                self._core.check_reachable(wanted.number)
        self._plan(visits)
        self._last_kept = max(self._last_kept, *(wanted.order for wanted in visits))
        return kept

    def _named(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """`tensor`, to be saved under `name`."""
        if self._made is None:
            self._made = WeakIdKeyDictionary()
        self._made[tensor] = name
        return tensor

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        """The site that served `tensor`, or the method that made it."""
        if self._made is not None and tensor in self._made:
            return self._made[tensor]
        return self._core.site_of(tensor)

    def _close(self) -> None:
        self._core.close()
        self._core = None
        self._tree = None  # it refers back to this tracer, and so would keep what was saved
        if self.saved:
            _release_views(self.saved)
        if self._on_exit:
            self._on_exit(self)

    @property
    def root(self) -> Any:
        """The module tree bound to this forward."""
        if self._tree is None:
            tree = object.__new__(KINDS["CausalLM"])
            plant(tree, self._model, self._model._entries, self)
            self._tree = tree
        return self._tree

    @property
    def result(self) -> Any:
        """The forward's result, a record with `.logits`. Reading it runs the forward to its end."""
        return self.root.output

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.root, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.root, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self._model) if not name.startswith("_"))})

    def __repr__(self) -> str:
        state = "not open" if self._core is None else f"at {self._core.position()}"
        return f"<Tracer {state}, saved: {', '.join(self.saved) or 'nothing'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Tracer holds a running forward and cannot be copied or pickled")


class Session(_Block):
    """Several traces that belong together: `with model.session() as session: ...`

    Traces run where they stand and what they save outlives them, with or without a session;
    `session.stop()` leaves the block from wherever it is called.
    """


class InvokeTracer(_Block):
    """Several forwards in one block: `with model.trace() as tracer: with tracer.invoke(prompt): ...`

    Each `invoke` block is a forward of its own, run where it stands, so a value of an earlier block
    can be used in a later one, and every block may carry images. `saved` gathers the values of all
    blocks, as `invokes.0.logits`, ...
    """

    def __init__(self, model: StandardizedTransformer) -> None:
        self._model = model
        self.invokes: list[Tracer] = []
        self.saved = Saved()

    def invoke(self, *prompt: Any, **inputs: Any) -> Tracer:
        """One forward of the block; takes what `model.trace` takes."""
        if not prompt and not inputs:
            raise ValueError(
                "invoke() without a prompt would join the other prompts in one batch: give "
                "model.trace a list of prompts instead"
            )
        tracer = self._model._tracer_for(*prompt, on_exit=self._gather, **inputs)
        self.invokes.append(tracer)
        return tracer

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ValueError(
            f"{name} belongs to one forward, and this block has none of its own: read it inside "
            "`with tracer.invoke(prompt): ...`, or give model.trace the prompt"
        )

    def _gather(self, tracer: Tracer) -> None:
        for site, value in tracer.saved.items():
            self.saved._keep(f"invokes.{self.invokes.index(tracer)}.{site}", value)


def save(value: T) -> T:
    """Keep `value` in the trace that served it, else in the innermost open one; returns it.

    Nothing is copied: a later edit in place shows, `save(x.clone())` is a snapshot.
    Raises `ValueError` outside any trace.
    """
    tracers = [tracer for tracer in OPEN.get() if tracer._core is not None]
    if not tracers:
        raise ValueError("nothing is being traced: save inside `with model.trace(prompt): ...`")
    tensor = value[0] if isinstance(value, Tensors) else value
    if isinstance(tensor, torch.Tensor):
        for tracer in reversed(tracers):
            site = tracer._name_of(tensor)
            if site is not None:
                tracer.saved._keep(site if tensor is value else site.rpartition(".")[0], value)
                return value
    tracers[-1].saved._keep(None, value)
    return value


def _tensor_save(self: torch.Tensor) -> torch.Tensor:
    """Keep this tensor beyond the trace it stands in; returns it. See `vlscope.save`."""
    if not OPEN.get():
        inherited = getattr(super(torch.Tensor, self), "save", None)  # another tracer's, if imported
        if inherited is not None:
            return inherited()
    return save(self)


torch.Tensor.save = _tensor_save  # type: ignore[attr-defined]
