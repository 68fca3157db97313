"""Generated files: docs/values.md and the type stub of the tree from the table of named values, docs/models.md
from the shipped configs, and the sizes in docs/shape-calculator.html.

`./dev docs` writes them; `./dev docs --check` says whether they are what would be written.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import vlscope
from vlscope import _core
from vlscope.calculator import PINNED
from vlscope.printing import card_text, tree_text
from vlscope.tree import KINDS, METHODS, SIZES_OF

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "tests" / "data" / "configs"
SIZES = ("2b", "4b", "8b", "32b", "30b-a3b", "235b-a22b")
#: Released configs of the families whose modules the built-in model has not.
OTHER_FAMILIES = (
    "qwen3-vl-30b-a3b-instruct",
    "qwen3.5-4b",
    "qwen3.5-35b-a3b",
    "qwen2.5-vl-3b-instruct",
    "qwen2-vl-2b-instruct",
)

#: Where each kind that serves values stands in the tree.
HOSTS = {
    "CausalLM": "`model`",
    "TextLayer": "`model.layers[i]`",
    "TextAttention": "`model.layers[i].self_attn`",
    "GatedAttention": "`model.layers[i].self_attn`, where its heads pass a gate",
    "GatedDeltaNet": "`model.layers[i].linear_attn`",
    "TextMLP": "`model.layers[i].mlp`",
    "TextMixture": "`model.layers[i].mlp`, where it is a mixture of experts",
    "Vision": "`model.vision`",
    "VisionLayer": "`model.vision.layers[i]`",
    "VisionAttention": "`model.vision.layers[i].self_attn`",
    "VisionMLP": "`model.vision.layers[i].mlp`",
}

VALUES_HEAD = """# Values

Every named value, by host. A value is read inside a trace as an attribute, edited in place
(`value[:] = 0`) or assigned whole (same shape, dtype and device), and kept with `.save()`. Reads follow the
order of the forward; see [errors](errors.md) for what happens otherwise.

This page is generated from the engine's own table; `print(model)` shows the same for a loaded model, and
`help(type(model.layers[0]))` for one host.

A *site* is a value's dotted path: `logits`, `layers.3.self_attn.attention_queries`,
`vision.deepstack_merger_list.0.output`. `tracer.saved`, `model.scan`, `model.order` and every message use it.
Where several are taken, an index may be negative, `*` stands for every index and `a:b` for a range:
`vlscope.sites.expand(model, "layers.-2:.mlp.mlp_output")` lists them.

Besides these values, every module that the reference calls has `.input` (its first argument), `.inputs`
(`(args, kwargs)`), `.output` and `.skip(value)`, under its native path
(`model.model.language_model.layers[0].self_attn.q_proj.output`) and the short one
(`model.layers[0].self_attn.q_proj.output`). Leaf modules have `.weight` and `.bias`.

*With an image* means that a prompt without one raises `NotReachedError` there. Patch streams have a leading axis
of 1, because all images and videos of a prompt lie in one row of patches; the native modules serve and take the same
stream without that axis (`model.vision.layers[0].output`, `[patches, vision_hidden_size]`), and edits reach both.
"""

ORDER_HEAD = """## Order

The order in which a forward comes by the values; blocks follow each other, each in the order of the first. Values
on one line share a location: read and write them in any order. `model.order()` lists every location, those of the
native modules included.
"""

MODELS_HEAD = """# Models

The released sizes of every family, from their `config.json` alone; no weights were read to make this page.
Instruct and Thinking checkpoints of a size have the same shape.

*Published* says whether these are the totals that the hub publishes for the checkpoint, to the last tensor and
parameter.
Where there is a dash, no published total was at hand to compare with. `vlscope.weight_counts("config.json")` counts
any other.
"""

#: Of each line: its released sizes, those of them whose published totals are these, and a remark.
LINES = {
    "Qwen3-VL": (
        ("qwen3-vl-2b-instruct", "qwen3-vl-4b-instruct", "qwen3-vl-8b-instruct", "qwen3-vl-32b-instruct"),
        {"qwen3-vl-8b-instruct"},
        "The file of the 2B size has as many bytes as these parameters take, and its header.",
    ),
    "Qwen3-VL-MoE": (
        ("qwen3-vl-30b-a3b-instruct", "qwen3-vl-235b-a22b-instruct"),
        {"qwen3-vl-30b-a3b-instruct", "qwen3-vl-235b-a22b-instruct"},
        "",
    ),
    "Qwen3.5": (
        ("qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b"),
        {"qwen3.5-4b"},
        "Checkpoints also hold the weights of multi-token prediction, which are not run and not counted here;\n"
        "published totals include them.",
    ),
    "Qwen3.5-MoE": (
        ("qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b"),
        {"qwen3.5-35b-a3b"},
        "Of multi-token prediction the same holds.",
    ),
    "Qwen2.5-VL": (
        ("qwen2.5-vl-3b-instruct", "qwen2.5-vl-7b-instruct", "qwen2.5-vl-32b-instruct", "qwen2.5-vl-72b-instruct"),
        set[str](),
        "",
    ),
    "Qwen2-VL": (("qwen2-vl-2b-instruct", "qwen2-vl-7b-instruct", "qwen2-vl-72b-instruct"), set[str](), ""),
}


def axes(value: _core.Value) -> str:
    return f"[{value.dims}]" if value.dims else ""


def access(value: _core.Value) -> str:
    if value.unavailable:
        return "unavailable"
    return "read" if value.read_only else "read, write"


def hosts(model: vlscope.StandardizedTransformer, kind: _core.Kind) -> list[vlscope.Module]:
    entries = [entry for entry in model._entries if entry["kind"] == kind.name]
    return [model.get(entry["path"]) if entry["path"] else model for entry in entries]


class Forward:
    """When a model comes by its values, found without running it."""

    def __init__(self, model: vlscope.StandardizedTransformer) -> None:
        self.model = model
        text = _core.Inputs({"input_ids": torch.tensor([[0]])})
        self._on_text = {order for order, *_ in self.model._core.scan(text)}

    def hosts(self, kind: _core.Kind) -> list[vlscope.Module]:
        return hosts(self.model, kind)

    def place(self, host: vlscope.Module, offset: int) -> int | None:
        """Number of a value's location in the forward; None where it is not served."""
        site = host._values + offset
        return None if self.model._sites[site].unavailable else self.model._core.order_of(site)

    def when(self, kind: _core.Kind, offset: int) -> str:
        places = [self.place(host, offset) for host in self.hosts(kind)]
        served = [place for place in places if place is not None]
        if not served:
            return "never"
        needs = {"": "an image or video", "image": "an image", "video": "a video"}[kind.values[offset].needs]
        when = "always" if served[0] in self._on_text else f"with {needs}"
        return when if len(served) == len(places) else f"{when}, not in every block"

    def order(self) -> Iterator[str]:
        """The values of the whole model and of the first block of each tower; those of one location on a line."""
        lines: dict[int, list[str]] = {}
        for kind in _core.all_kinds():
            for host in self.hosts(kind)[:1]:
                for offset in range(len(kind.values)):
                    place = self.place(host, offset)
                    if place is not None:
                        lines.setdefault(place, []).append(self.model._sites[host._values + offset].path)
        for _, paths in sorted(lines.items()):
            yield ", ".join([paths[0], *(path.rpartition(".")[2] for path in paths[1:])])


def value_rows(kind: _core.Kind, forward: Forward) -> Iterator[str]:
    yield "| value | layout | axes | access | served | what it is |"
    yield "|---|---|---|---|---|---|"
    for offset, value in enumerate(kind.values):
        reason = value.read_only or value.unavailable
        what = value.description + (f". {reason}" if reason else "")
        layout = f"tuple of {value.layout}" if value.list else value.layout
        cells = [f"`{value.name}`", layout, axes(value), access(value), forward.when(kind, offset), what]
        yield f"| {' | '.join(cells)} |"


def shortened(config: Path) -> dict[str, Any]:
    """A released config with two blocks to each tower: all kinds of modules are there, and it is built at once."""
    short = json.loads(config.read_text(encoding="utf-8"))
    text = short.get("text_config", short)
    text["num_hidden_layers"] = 2
    if "layer_types" in text:
        text["layer_types"] = sorted(set(text["layer_types"]))
    vision = short["vision_config"]
    vision["depth"] = 2
    for key in {"deepstack_visual_indexes", "fullatt_block_indexes"} & vision.keys():
        vision[key] = [0]
    return short


@functools.cache
def models() -> list[vlscope.StandardizedTransformer]:
    """The built-in model, and one of every other family."""
    found = [vlscope.load("demo", dispatch=False)]
    for name in OTHER_FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shortened(CONFIGS / f"{name}.json")))
            found.append(vlscope.load(folder, dispatch=False))
    return found


def values_page() -> str:
    forwards = [Forward(model) for model in models()]
    parts = [VALUES_HEAD]
    for kind in _core.all_kinds():
        if not kind.values:
            continue
        forward = next(forward for forward in forwards if forward.hosts(kind))
        doc = kind.doc.strip().splitlines()
        rows = "\n".join(value_rows(kind, forward))
        parts.append(f"## {HOSTS[kind.name]}\n\n{fenced(doc)}\n\n{rows}\n")
    order = "\n".join(forwards[0].order())
    return "\n".join([*parts, ORDER_HEAD, f"```text\n{order}\n```\n"])


def fenced(lines: list[str]) -> str:
    """A kind's help text, with its indented equations as a code block."""
    text: list[str] = []
    inside = False
    for line in lines:
        equation = line.startswith("    ")
        if equation != inside:
            text.append("```text" if equation else "```")
            inside = equation
        text.append(line[4:] if equation else line)
    return "\n".join([*text, "```"] if inside else text)


def shell(config: Path) -> vlscope.StandardizedTransformer:
    """The model of a config, without weights."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(config, Path(folder) / "config.json")
        return vlscope.load(folder, dispatch=False)


def counts_table(names: Iterable[str], published: set[str]) -> str:
    rows = ["| size | tensors | parameters | published |", "|---|---|---|---|"]
    for name in names:
        tensors, parameters = vlscope.weight_counts(CONFIGS / f"{name}.json")
        size = re.sub(r"^qwen[\d.]+(-vl)?-|-instruct$", "", name).upper()
        rows.append(f"| {size} | {tensors:,} | {parameters:,} | {'agrees' if name in published else '—'} |")
    return "\n".join(rows)


def models_page() -> str:
    parts = [MODELS_HEAD.rstrip()]
    for line, (names, published, remark) in LINES.items():
        parts.append(f"## {line}\n\n{counts_table(names, published)}" + (f"\n\n{remark}" if remark else ""))
    shells = {size: shell(CONFIGS / f"qwen3-vl-{size}-instruct.json") for size in SIZES}
    for size, model in shells.items():
        card = card_text("Config", model._config["text_card"]) + "\n\n"
        card += card_text("Vision Config", model._config["vision_card"])
        parts.append(f"## Qwen3-VL {size.upper()}\n\n```text\n{card}\n```")
    tree = "\n".join(tree_text(shells["2b"]))
    parts.append(
        "## The tree\n\nOf the 2B size; the other dense sizes differ in their numbers only. In 30B-A3B and 235B-A22B\n"
        f"each `mlp` is a mixture of experts, see [families](families.md).\n\n```text\n{tree}\n```\n"
    )
    return "\n\n".join(parts)


def calculator_page() -> str:
    """The page with the released sizes that the library knows."""
    page = (ROOT / "docs" / "shape-calculator.html").read_text(encoding="utf-8")
    rows = [f"  {json.dumps(name)}: {json.dumps(size)}," for name, size in PINNED.items()]
    return re.sub(r"(?<=^const PINNED = \{\n).*?(?=^\};)", "\n".join(rows) + "\n", page, flags=re.M | re.S)


STUB_HEAD = '''"""Types of the module tree. Generated by tools/docs.py from the table of named values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, NoReturn, TypeVar, overload

import torch

from . import _core, layouts
from .model import StandardizedTransformer
from .trace import Tracer

_M = TypeVar("_M", bound="Module")

OPEN: ContextVar[tuple[Tracer, ...]]
KINDS: dict[str, type[Module]]
Indices = int | slice | Sequence[int] | torch.Tensor
METHODS: dict[str, tuple[Callable[..., Any], ...]]
SIZES_OF: dict[str, tuple[str, ...]]

def near_names(name: str, known: Sequence[str]) -> str: ...
def plant(
    root: Module, model: StandardizedTransformer, entries: Sequence[Mapping[str, Any]], tracer: Any
) -> None: ...

class Record(Mapping[str, Any]):
    def __init__(self, **parts: Any) -> None: ...
    def __getitem__(self, name: str) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...

class Tensors(tuple[torch.Tensor, ...]):
    def save(self) -> Tensors: ...

class Value(property):
    name: str
    layout: layouts.Layout
    dims: tuple[str, ...]
    many: bool
    description: str
    def __init__(self, declared: _core.Value, offset: int) -> None: ...

class ModuleList(Sequence[_M], Generic[_M]):
    def __init__(self, path: str) -> None: ...
    @overload
    def __getitem__(self, index: int) -> _M: ...
    @overload
    def __getitem__(self, index: slice) -> list[_M]: ...
    def __len__(self) -> int: ...

class Module:
    _kind: _core.Kind
    _model: StandardizedTransformer
    _children: dict[str, Any]
    _parameters: tuple[str, ...]
    _path: str
    _site_path: str
    _inputs: int
    _outputs: int
    _values: int
    input: torch.Tensor
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]]
    output: Any
    @property
    def path(self) -> str: ...
    @property
    def parent(self) -> Module | None: ...
    def skip(self, value: Any = None) -> None: ...
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...
    def get(self, path: str) -> Any: ...
    def support(self) -> dict[str, str | None]: ...
    def _names(self) -> list[str]: ...
    def __reduce__(self) -> NoReturn: ...
'''

INDENT = "    "

#: Parts of a tuple output that one attention implementation leaves as None.
NONE_IN_OUTPUT = {"attention_probabilities"}
#: Values that a prompt does not have yet.
NONE_AT_FIRST = {"state_input"}


def attribute_types(models: list[vlscope.StandardizedTransformer]) -> dict[str, dict[str, str]]:
    """For each kind of module: the modules and parameters below it and their types, as these models have them."""
    types: dict[str, dict[str, dict[str, None]]] = {}
    for model in models:
        for entry in model._entries:
            module = model.get(entry["path"]) if entry["path"] else model
            found = types.setdefault(entry["kind"], {})
            for name in (*module._children, *module._kind.aliases):
                child = module.get(module._kind.aliases.get(name, name))
                many = isinstance(child, vlscope.ModuleList)
                type_ = f"ModuleList[{type(child[0]).__name__}]" if many else type(child).__name__
                found.setdefault(name, {})[type_] = None
            for name in entry["parameters"]:
                found.setdefault(name, {})["torch.Tensor"] = None
    return {kind: {name: " | ".join(found) for name, found in names.items()} for kind, names in types.items()}


def optional_tensor(name: str, sometimes_none: set[str]) -> str:
    return "torch.Tensor" + (" | None" if name in sometimes_none else "")


def output_type(kind: _core.Kind) -> str:
    if kind.form == _core.Form.tensor:
        return "torch.Tensor"
    if kind.form == _core.Form.record:
        return "Record"
    parts = [optional_tensor(part.name, NONE_IN_OUTPUT) for part in kind.outputs]
    return f"tuple[{', '.join(parts)}]"


def class_stub(kind: _core.Kind, attributes: dict[str, str], sizes: dict[str, str]) -> str:
    """The class of a kind: modules, sizes and named values, with the table's words as docstrings."""
    lines = [f"class {kind.name}(Module):", f'    """{kind.doc}"""', "", f"    output: {output_type(kind)}"]
    named = {name: type_ for name, type_ in {**attributes, **sizes}.items() if name.isidentifier()}
    lines += [f"    {name}: {type_}" for name, type_ in sorted(named.items())]
    for value in kind.values:
        doc = f'"""{getattr(KINDS[kind.name], value.name).__doc__}"""'
        lines += [
            f"    {value.name}: {'Tensors' if value.list else optional_tensor(value.name, NONE_AT_FIRST)}",
            *textwrap.wrap(doc, 116, initial_indent=INDENT, subsequent_indent=INDENT),
        ]
    for method in METHODS.get(kind.name, ()):
        signature = str(inspect.signature(method)).replace("'", "").replace("self: Module", "self")
        doc = inspect.cleandoc(method.__doc__ or "")
        lines += [f"    def {method.__name__}{signature}:", textwrap.indent(f'"""{doc}"""', INDENT * 2)]
    return "\n".join(lines) + "\n"


def stub() -> str:
    planted = models()
    attributes = attribute_types(planted)
    parts = [STUB_HEAD]
    for kind in _core.all_kinds():
        host = next(host for model in planted for host in hosts(model, kind))
        names = SIZES_OF.get(kind.name, ())
        sizes = {name: "int" if getattr(host, name) is not None else "int | None" for name in names}
        parts.append(class_stub(kind, attributes[kind.name], sizes))
    return "\n".join(parts)


TYPES = "bindings/vlscope/tree.pyi"
PAGES = {
    "docs/values.md": values_page,
    "docs/models.md": models_page,
    "docs/shape-calculator.html": calculator_page,
    TYPES: stub,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'stale' if check else 'wrote'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
