"""The module tree as Python sees it: one class for each kind of module, one property for each value.

The classes are made from the engine's table of named values, so that the table stays the one place
where a value is declared. Looking at a class (`help(type(model.layers[0]))`, tab completion) moves
no forward; reading a property of an instance inside a trace does.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch

from . import _core, layouts
from .errors import InputError, OutOfOrderError, Unavailable

if TYPE_CHECKING:
    from contextvars import ContextVar

    from .model import StandardizedTransformer
    from .trace import Tracer

__all__ = ["KINDS", "OPEN", "SIZES_OF", "METHODS", "Module", "ModuleList", "Record", "Tensors", "Value", "near_names"]


#: Tracers whose blocks the current task is in, innermost last.
OPEN: ContextVar[tuple[Tracer, ...]] = _core.OPEN


def near_names(name: str, known: Sequence[str]) -> str:
    """A sentence with the names of `known` that `name` may have meant; empty if there is none."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f" Did you mean {', '.join(near)}?" if near else ""


class Record(Mapping[str, Any]):
    """A result with named parts, read as `record.logits` or `record["logits"]`. Read-only: edit a
    part in place."""

    __slots__ = ("_parts",)

    def __init__(self, **parts: Any) -> None:
        object.__setattr__(self, "_parts", parts)

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._parts[name]
        except KeyError:
            known = list(self._parts)
            message = f"no part {name!r}; there are {', '.join(known)}.{near_names(name, known)}"
            raise AttributeError(message) from None

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name} cannot be assigned here: edit it in place, or assign the whole")

    def __reduce__(self) -> Any:
        return partial(Record, **self._parts), ()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name}={tuple(part.shape)}" if isinstance(part, torch.Tensor) else f"{name}={part!r}"
            for name, part in self._parts.items()
        )
        return f"Record({parts})"


class Tensors(tuple[torch.Tensor, ...]):
    """The tensors of a value that is several, such as one for each image. Edit an element in place,
    or assign a whole tuple to the value."""

    __slots__ = ()

    def save(self) -> Tensors:
        """Keep all of them in the trace, under the value's name; returns the tuple."""
        from .trace import save

        return save(self)


class Value(property):
    """A named value. On the class it describes itself; on an instance it is the live tensor, or for
    `many` a tuple of them.

    Attributes: `layout` (a class of `vlscope.layouts`), `dims` (its axes), `__doc__`.
    """

    layout: layouts.Layout
    dims: tuple[str, ...]
    many: bool

    def __init__(self, declared: _core.Value, offset: int) -> None:
        def read_many(host: Module) -> Tensors:
            return host._read_many(host._values + offset)

        def write_many(host: Module, values: Sequence[torch.Tensor]) -> None:
            host._write_many(host._values + offset, values)

        axes = f"[{declared.dims}]" if declared.dims else "unavailable"
        note = declared.read_only or declared.unavailable
        layout = f"tuple of {declared.layout}" if declared.list else declared.layout
        doc = f"{layout} {axes}: {declared.description}." + (f" {note}." if note else "")
        if declared.list:
            super().__init__(read_many, write_many)
        else:
            access = _core.Accessor("values", offset)
            super().__init__(access, access)
        self.__doc__ = doc
        self.many = declared.list
        self.name = declared.name
        self.layout = getattr(layouts, declared.layout)
        self.dims = tuple(declared.dims.split())
        self.description = declared.description


class ModuleList(Sequence["Module"]):
    """The blocks of a tower. Takes negative indices, slices (which give lists) and iteration."""

    __slots__ = ("_items", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._items: list[Module] = []

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self._path} belongs to a loaded model and cannot be copied or pickled: load the model again by "
            "vlscope.load(path)."
        )

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._items[index]
        if isinstance(index, bool):
            raise TypeError(f"{self._path} takes integers and slices, not {index}")
        try:
            return self._items[operator.index(index)]
        except IndexError:
            message = f"{self._path}[{index}]: there are {len(self._items)}, 0 to {len(self) - 1}"
            raise IndexError(message) from None
        except TypeError:
            message = f"{self._path} takes integers and slices, not {type(index).__name__}"
            raise TypeError(message) from None

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<{self._path}: {len(self)} x {type(self._items[0]).__name__}>"


class Module(_core.ModuleBase):
    """A module of the model. Inside a trace its values are live tensors."""

    __slots__ = ("__weakref__", "_absent", "_children", "_parameters", "_path", "_site_path")
    _kind: _core.Kind

    def _place(self, model: StandardizedTransformer, entry: Mapping[str, Any], index: int, tracer: Any) -> None:
        """Bind to one entry of the engine's list of modules."""
        self._model = model
        self._tracer = tracer
        self._index = index
        self._children: dict[str, Any] = {}
        self._path = entry["path"]
        self._site_path = entry["site_path"]
        self._inputs = entry["inputs"]
        self._outputs = entry["outputs"]
        self._values = entry["values"]
        self._parameters = tuple(entry["parameters"])
        self._absent: dict[str, str] = entry["absent"]

    # --- reading and writing ---

    def _open(self, site: int) -> Tracer:
        """The open tracer that a read of `site` belongs to: the bound one, else the innermost of the model;
        after what it has to do by itself up to there."""
        tracer: Tracer | None = _core.tracer_at(self, site)
        if tracer is None:
            raise self._refusal(site)
        return tracer

    def _refusal(self, site: int) -> Exception:
        """Why a value cannot be had outside a trace."""
        place = self._model._sites[site]
        if place.unavailable:
            return Unavailable(f"{place.path} is unavailable: {place.unavailable}")
        if self._tracer is not None:
            return OutOfOrderError(
                f"{place.path} was asked of a trace that is not open: its values can be read and written inside "
                "its `with` block only"
            )
        return ValueError(
            f"{place.path} exists only while a forward runs: read it inside "
            "`with model.trace(prompt): ...`, and keep it with .save()."
        )

    def _write(self, site: int, value: Any) -> None:
        place = self._model._sites[site]
        if place.unavailable:
            raise Unavailable(f"{place.path} is unavailable: {place.unavailable}")
        if place.read_only:
            raise AttributeError(f"{place.path} is read-only: {place.read_only}")
        tracer = self._open(site)
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"{place.path} takes a tensor, not {type(value).__name__}. To fill it, edit in "
                f"place: {place.path}[:] = ..."
            )
        tracer._core.write(site, value)

    def _read_many(self, site: int) -> Tensors:
        return Tensors(self._open(site)._core.read_list(site))

    def _write_many(self, site: int, values: Any) -> None:
        place = self._model._sites[site]
        if not isinstance(values, (tuple, list)):
            raise InputError(f"{place.path} takes a tuple of tensors, not {type(values).__name__}")
        for k, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                raise InputError(f"{place.path}.{k} takes a tensor, not {type(value).__name__}")
        self._open(site)._core.write_list(site, values)

    def _read_fields(self, fields: Sequence[_core.Field], site: int) -> list[Any]:
        tracer = self._open(site)
        parts: list[Any] = []
        for field in fields:
            if field.slots < 0:
                parts.append(self._read_many(site) or None)
                site += 1
            elif field.slots == 1:
                parts.append(tracer._core.read(site))
                site += 1
            else:
                parts.append(tuple(tracer._core.read(site + k) for k in range(field.slots)))
                site += field.slots
        return parts

    def _write_fields(self, fields: Sequence[_core.Field], site: int, parts: Sequence[Any]) -> None:
        for field, part, old in zip(fields, parts, self._read_fields(fields, site), strict=True):
            if field.slots < 0:
                self._write_many(site, () if part is None else part)
                site += 1
                continue
            if field.slots == 1:
                if part is not old and not field.read_only:
                    self._write(site, part)
                site += 1
                continue
            if not isinstance(part, (tuple, list)) or len(part) != len(old):
                raise InputError(f"{self._site_path}: {field.name} is a tuple of {len(old)} tensors")
            for k, element in enumerate(part):
                self._write(site + k, element)
            site += field.slots

    input = property(
        *[_core.Accessor("inputs", 0)] * 2, doc="The first argument of the module's call, positional or keyword."
    )

    @property
    def inputs(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """All arguments of the call, `(args, kwargs)`, without caches and flags."""
        fields = self._kind.inputs
        parts = self._read_fields(fields, self._inputs)
        pairs = list(zip(fields, parts, strict=True))
        args = tuple(part for field, part in pairs if not field.keyword)
        kwargs = {field.name: part for field, part in pairs if field.keyword}
        return args, MappingProxyType(kwargs)

    @inputs.setter
    def inputs(self, value: tuple[Sequence[Any], Mapping[str, Any]]) -> None:
        args, kwargs = value
        positional = iter(args)
        fields = self._kind.inputs
        parts = [kwargs[field.name] if field.keyword else next(positional) for field in fields]
        self._write_fields(fields, self._inputs, parts)

    @property
    def output(self) -> Any:
        """What the call returned: a tensor, a tuple, or a record with named parts."""
        fields = self._kind.outputs
        parts = self._read_fields(fields, self._outputs)
        if self._kind.form == _core.Form.tuple:
            return tuple(parts)
        return Record(**{field.name: part for field, part in zip(fields, parts, strict=True)})

    @output.setter
    def output(self, value: Any) -> None:
        fields = self._kind.outputs
        if self._kind.form == _core.Form.record:
            value = [value[field.name] for field in fields]
        if not isinstance(value, (tuple, list)) or len(value) != len(fields):
            names = ", ".join(field.name for field in fields)
            raise InputError(f"{self._site_path}.output is a tuple of {len(fields)}: ({names})")
        self._write_fields(fields, self._outputs, value)

    def skip(self, value: Any = None) -> None:
        """Leave the module's call out of this trace: its output is `value`, by default its input.

        Nothing inside is computed, and reading it raises `NotReachedError`. Call it before reading
        anything inside or behind the module; its input may have been read.
        """
        tracer = self._open(self._inputs)
        one_tensor = self._kind.form == _core.Form.tensor or "attention_output" in vars(type(self))
        if not one_tensor:
            raise Unavailable(
                f"{self._site_path or 'the model'} ({type(self).__name__}) cannot be skipped: it gives more than one "
                "tensor. Assign the values that it gives, or skip the blocks below it."
            )
        tracer._core.check_replaceable(self._index)
        if value is None:
            value = self.input
        if isinstance(value, (tuple, list)):
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{self._site_path}.skip takes a tensor, not {type(value).__name__}")
        tracer._core.replace(self._index, value)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The module's arithmetic on any tensor: no occurrence in a trace, no value served."""
        return self._model._core.apply(self._index, x)

    # --- the tree ---

    @property
    def path(self) -> str:
        """Native path, as transformers names it: `model.language_model.layers.3`."""
        return self._path

    @property
    def parent(self) -> Module | None:
        """The module above; None at the root."""
        path = self._path.rpartition(".")[0]
        if not self._path:
            return None
        while True:
            found = self._model.get(path) if path else self._model
            if isinstance(found, Module):
                return found
            path = path.rpartition(".")[0]

    def get(self, path: str) -> Any:
        """The module, list or value at a dotted path below this one: `get("layers.0.self_attn")`."""
        found: Any = self
        names = iter(path.split("."))
        for name in names:
            if isinstance(found, (ModuleList, Tensors)):
                if not name.lstrip("-").isdigit():
                    raise AttributeError(f"{path!r}: a list takes an index, not {name!r}")
                found = found[int(name)]
            elif isinstance(found, Module) and name == "input" and (field := next(names, None)) is not None:
                found = found._get_list(f"input.{field}")
            else:
                found = getattr(found, name)
        return found

    def _get_list(self, name: str) -> Tensors:
        """The tensors of one argument that is a list, a site of its own: `input.deepstack_visual_embeds`."""
        from .sites import number

        return self._read_many(number(self._model, f"{self._path}.{name}"))

    def _names(self) -> list[str]:
        aliases = [name for name in self._kind.aliases if self._follow(name) is not None]
        return [*self._children, *aliases, *self._parameters]

    def _follow(self, alias: str) -> Any:
        found: Any = self
        for name in self._kind.aliases[alias].split("."):
            found = found._children.get(name) if isinstance(found, Module) else None
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        child = self._children.get(name)
        if child is not None:
            return child
        if name in self._kind.aliases and (child := self._follow(name)) is not None:
            self._children[name] = child
            return child
        if name in self._parameters:
            return self._model._core.parameter(self._index, name)
        raise self._unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            object.__setattr__(self, name, value)
        except AttributeError:
            if hasattr(type(self), name):
                raise
            if name in self._names():
                what = f"{self._site_path}.{name}".lstrip(".")
                raise AttributeError(f"{what} cannot be assigned: assign its input or output in a trace") from None
            raise self._unknown(name) from None

    def _unknown(self, name: str) -> AttributeError:
        where = self._site_path or "the model"
        if name in self._absent:
            return AttributeError(f"{where} has no module {name}: {self._absent[name]}")
        known = [known for known in dir(self) if not known.startswith("_")]
        return AttributeError(
            f"{where} ({type(self).__name__}) has no value or module {name!r}."
            + (near_names(name, known) or self._below(name))
        )

    def _below(self, name: str) -> str:
        """A sentence with the place of a module that is not here, but one step further down."""
        for child, module in self._children.items():
            if isinstance(module, Module) and name in module._names():
                return f" Did you mean {child}.{name}?"
        return ""

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names()})

    def support(self) -> dict[str, str | None]:
        """For each named value of this module: None if it can be read, else the reason why not."""
        return {
            value.name: self._model._sites[self._values + offset].unavailable or None
            for offset, value in enumerate(self._kind.values)
        }

    def __repr__(self) -> str:
        from .printing import module_text

        return module_text(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} belongs to a loaded model and cannot be copied or pickled: load "
            "the model again by vlscope.load(path)."
        )

    __deepcopy__ = __copy__ = lambda self, memo=None: self.__reduce__()


_TENSOR_OUTPUT = property(*[_core.Accessor("outputs", 0)] * 2, doc="The tensor that the call returned.")
Indices = int | slice | Sequence[int] | torch.Tensor


def _indices(chosen: Indices, count: int, what: str) -> list[int]:
    """The places of `chosen` among `count`: an integer, a slice, or several integers."""
    if isinstance(chosen, slice):
        return list(range(count)[chosen])
    if isinstance(chosen, torch.Tensor):
        chosen = chosen.tolist()
    try:
        listed: Any = [chosen] if isinstance(chosen, SupportsIndex) else chosen
        indices = [operator.index(index) for index in listed]
    except TypeError:
        raise TypeError(f"{what} {chosen!r}: give an integer, a slice or a list of integers") from None
    for index in indices:
        if not -count <= index < count:
            raise IndexError(f"{what} {index}: there are {count}, 0 to {count - 1}")
    return [index % count for index in indices]


def _value_site(host: Module, name: str) -> int:
    return host._values + next(i for i, value in enumerate(host._kind.values) if value.name == name)


def attention_row(
    self: Module,
    query: Indices = -1,
    heads: Indices | None = None,
    *,
    scores: bool = False,
) -> torch.Tensor:
    """Rows of `attention_probabilities`, [batch, heads, queries, keys], without making the whole.

    An integer drops its axis: by default the last position's row of every head, [batch, heads, keys].
    Costs one product of each query with its keys, so memory stays linear in the prompt, and what
    flows on is not changed. Under eager too the row is a product of its own; its last bits may
    differ from those of the whole pattern.

    Read-only: to change a pattern, edit `attention_probabilities`. The row shows the queries and keys
    as they are at the call, edits included. It is read where they are: before this block's scores,
    probabilities or anything later. A whole pattern that is read anyway has the row in it.

    Args:
        query: positions in the padded prompt; negative ones count from its end.
        heads: query heads; all by default.
        scores: gives the scaled and masked scores in place of the probabilities.

    Raises:
        OutOfOrderError, NotReachedError: as `attention_queries` does, before anything moves.
        IndexError: for a head or position that is not there.
    """
    site = _value_site(self, "attention_queries")
    chosen = _indices(slice(None) if heads is None else heads, self._model.num_heads, "head")
    if not chosen:
        raise IndexError(f"{self._site_path}.attention_row: heads is empty; give one or more")
    tracer = self._open(site)
    rows = _indices(query, tracer._core.count_queries(site), "query")
    result: torch.Tensor = tracer._core.attention_rows(site, chosen, rows, scores)
    if isinstance(query, SupportsIndex):
        result = result.squeeze(2)
    if isinstance(heads, SupportsIndex):
        result = result.squeeze(1)
    return tracer._named(result, f"{self._site_path}.attention_row")


def state_after(self: Module, token: int) -> torch.Tensor:
    """The state behind one token, [batch, linear_heads, linear_key_dim, linear_value_dim] in float32:
    `states[:, token]` without making the states of all tokens. What flows on is not changed.

    Read-only: edit the state by `set_state_after`. It shows the tensors of the recurrence as they are at
    the call, edits and states put in place included. It is read where `state` is: before this block's
    states, heads or anything later. Costs one step of the recurrence for each token up to this one.

    Args:
        token: position in the padded prompt; a negative one counts from its end. In a generation's later
            step there is one, 0.

    Raises:
        OutOfOrderError: as `state` does, before anything moves.
        IndexError: for a token that is not there.
    """
    site = _value_site(self, "state")
    tracer = self._open(site)
    (place,) = _indices(operator.index(token), tracer._core.count_tokens(site), "token")
    return tracer._named(tracer._core.state_after(site, place), f"{self._site_path}.state_after")


def set_state_after(self: Module, token: int, value: torch.Tensor) -> None:
    """Put `value` in place of the state behind one token: the token reads from it, and those behind it go
    on from it. Tokens before are not changed. `value` is as `state_after` gives it.

    Several tokens can be given states, in any order; the same token again takes the later one. To be
    called where `state_after` is.

    Args:
        token: position in the padded prompt; a negative one counts from its end.
        value: [batch, linear_heads, linear_key_dim, linear_value_dim] in the states' dtype.

    Raises:
        OutOfOrderError: as `state` does, before anything moves.
        IndexError: for a token that is not there.
        InputError: for a value of another shape, dtype or device.
    """
    site = _value_site(self, "state")
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{self._site_path}.set_state_after takes a tensor, not {type(value).__name__}")
    running = self._open(site)._core
    (place,) = _indices(operator.index(token), running.count_tokens(site), "token")
    running.set_state_after(site, place, value)


def __getitem__(self: Module, index: int) -> Module:  # of a Sequential
    """The module at a place; negative ones count from the end."""
    (place,) = _indices(index, len(self._children), f"{self._site_path}: module")
    child: Module = self._children[str(place)]
    return child


def _make_class(kind: _core.Kind) -> type[Module]:
    values = {value.name: Value(value, offset) for offset, value in enumerate(kind.values)}
    namespace = {"__slots__": (), "__doc__": kind.doc, "__module__": __name__, "_kind": kind}
    if kind.form == _core.Form.tensor:
        namespace["output"] = _TENSOR_OUTPUT
    return type(kind.name, (Module,), {**namespace, **values})


#: The class of each kind of module, by name.
KINDS: dict[str, type[Module]] = {kind.name: _make_class(kind) for kind in _core.all_kinds()}
globals().update(KINDS)

#: What a kind can be asked beside its values.
METHODS: dict[str, tuple[Callable[..., Any], ...]] = {
    "TextAttention": (attention_row,),
    "GatedAttention": (attention_row,),
    "GatedDeltaNet": (state_after, set_state_after),
    "Sequential": (__getitem__,),
}
for _kind, _methods in METHODS.items():
    for _method in _methods:
        setattr(KINDS[_kind], _method.__name__, _method)


def _add_size(kind: str, name: str, doc: str) -> None:
    """A number of the config as a read-only property."""
    part = "vision" if kind == "Vision" else "text"

    def read(host: Module) -> Any:
        return host._model._config[part][name]

    def refuse(host: Module, value: Any) -> NoReturn:
        raise AttributeError(f"{name} is fixed by the checkpoint's config")

    setattr(KINDS[kind], name, property(read, refuse, doc=doc))


#: Numbers of the config, by the kind that carries them.
SIZES_OF: dict[str, tuple[str, ...]] = {
    "CausalLM": (
        "num_layers",
        "hidden_size",
        "vocab_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "qk_head_dim",
        "intermediate_size",
    ),
    "Vision": (
        "num_layers",
        "vision_hidden_size",
        "hidden_size",
        "num_heads",
        "head_dim",
        "intermediate_size",
        "patch_size",
        "temporal_patch_size",
        "spatial_merge_size",
        "window_size",
    ),
    "TextMixture": ("num_experts", "top_k", "moe_intermediate_size"),
}
for _kind, _names in SIZES_OF.items():
    for _name in _names:
        _add_size(_kind, _name, f"{_name} of the {'vision tower' if _kind == 'Vision' else 'text model'}.")


def _image_size(host: Module) -> NoReturn:
    raise Unavailable(
        "vision.image_size is unavailable: images have any resolution; the processor cuts each into "
        "its own grid, image_grid_thw."
    )


KINDS["Vision"].image_size = property(_image_size, doc="Unavailable: it varies.")  # type: ignore[attr-defined]


def plant(root: Module, model: StandardizedTransformer, entries: Sequence[Mapping[str, Any]], tracer: Any) -> None:
    """Build the tree below `root` from the engine's list of modules."""
    planted: list[Module] = []
    for index, entry in enumerate(entries):
        module = root if index == 0 else object.__new__(KINDS[entry["kind"]])
        module._place(model, entry, index, tracer)
        planted.append(module)
        if index == 0:
            continue
        children = planted[entry["parent"]]._children
        name, _, position = entry["name"].partition(".")
        if position:
            above = entry["site_path"].rpartition(".")[0]
            children.setdefault(name, ModuleList(above))._items.append(module)
        else:
            children[name] = module
