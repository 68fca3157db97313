"""Traces: one forward that runs as far as its script asks, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from . import _core
from .errors import OutOfOrderError
from .tree import KINDS, OPEN, Module, Tensors, plant

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["InvokeTracer", "Saved", "StopTrace", "Tracer", "save"]

T = TypeVar("T")


def _not_open(*_: Any) -> NoReturn:
    raise OutOfOrderError("this trace is not open: its values can be read and written inside its `with` block only")


class StopTrace(Exception):
    """Ends the block of one tracer; raised by `tracer.stop()` and caught where the block is left."""

    def __init__(self, tracer: Any) -> None:
        super().__init__("tracer.stop() was called outside its own block")
        self.tracer = tracer


class Saved(Mapping[str, Any]):
    """What a trace has saved, by the site last read through; results of arithmetic are `saved.0`,
    `saved.1`, ... In the order of saving."""

    def __init__(self) -> None:
        self._items: dict[str, Any] = {}
        self._unnamed = 0

    def _keep(self, site: str | None, value: Any) -> None:
        if any(value is kept for kept in self._items.values()):
            return
        if site is None:
            site = f"saved.{self._unnamed}"
            self._unnamed += 1
        self._items[site] = value

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


def _release_views(saved: Saved) -> None:
    """Give each saved slice storage of its own, so that it does not keep the whole tensor alive.

    Left alone are tensors of a graph, and those whose storage another saved tensor shares.
    """
    tensors = [kept for kept in saved.values() if isinstance(kept, torch.Tensor)]
    storages = [kept.untyped_storage() for kept in tensors if kept.layout == torch.strided]
    owners: dict[int, int] = {}
    for storage in storages:
        owners[storage._cdata] = owners.get(storage._cdata, 0) + 1
    for kept in tensors:
        if kept.layout != torch.strided or kept.requires_grad or kept.is_meta:
            continue
        storage = kept.untyped_storage()
        if storage.nbytes() > kept.numel() * kept.element_size() and owners[storage._cdata] == 1:
            kept.data = kept.data.clone()


class _Block:
    """What both kinds of tracer share: the saved values, and ending the block."""

    saved: Saved

    def stop(self) -> NoReturn:
        """End the block here: nothing further is computed, what was saved stays."""
        raise StopTrace(self)

    def barrier(self, participants: int) -> Callable[[], None]:
        """Accepted for scripts written for other tracers; blocks run where they stand, so there is
        nothing to wait for."""
        return lambda: None


class Tracer(_Block):
    """One forward, open inside `with model.trace(prompt) as tracer:`.

    A tracer has the whole tree too: `tracer.layers[3].layer_output` is that value of this forward,
    whichever other trace is open. The forward runs only as far as the last value read.
    """

    def __init__(
        self,
        model: StandardizedTransformer,
        inputs: _core.Inputs,
        on_exit: Callable[[Tracer], None] | None = None,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._on_exit = on_exit
        self._core: Any = None
        self._tree: Module | None = None
        self._read: Callable[[int], Any] = _not_open
        self._write: Callable[[int, Any], None] = _not_open
        self.saved = Saved()

    def __enter__(self) -> Tracer:
        if self._core is not None:
            raise ValueError("a tracer is used once: call model.trace(...) again")
        self._model.dispatch()
        self._core = self._model._core.trace(self._inputs)
        self._read, self._write = self._core.read, self._core.write
        OPEN.set((*OPEN.get(), self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> bool:
        OPEN.set(tuple(tracer for tracer in OPEN.get() if tracer is not self))
        stopped = isinstance(error, StopTrace) and error.tracer is self
        try:
            if error is None or stopped:
                self._core.check_edits()
        finally:
            self._core.close()
            self._read = self._write = _not_open
            self._tree = None  # it refers back to this tracer, and so would keep what was saved
            _release_views(self.saved)
            if self._on_exit:
                self._on_exit(self)
        return stopped

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
        if name.startswith("_") or name == "saved":
            object.__setattr__(self, name, value)
        else:
            setattr(self.root, name, value)

    def __repr__(self) -> str:
        state = "not open" if self._read is _not_open else f"at {self._core.position()}"
        return f"<Tracer {state}, saved: {', '.join(self.saved) or 'nothing'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Tracer holds a running forward and cannot be copied or pickled")


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

    def __enter__(self) -> InvokeTracer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> bool:
        return isinstance(error, StopTrace) and error.tracer is self


def save(value: T) -> T:
    """Keep `value` in the trace that served it, else in the innermost open one; returns it.

    Nothing is copied: a later edit in place shows, `save(x.clone())` is a snapshot.
    Raises `ValueError` outside any trace.
    """
    tracers = OPEN.get()
    if not tracers:
        raise ValueError("nothing is being traced: save inside `with model.trace(prompt): ...`")
    tensor = value[0] if isinstance(value, Tensors) else value
    if isinstance(tensor, torch.Tensor):
        for tracer in reversed(tracers):
            site = tracer._core.site_of(tensor)
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
