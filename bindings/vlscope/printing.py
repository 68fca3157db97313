"""The printed model: its modules, their values with layouts, axes and descriptions, and its cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .tree import Module, ModuleList

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["card_text", "model_text", "module_text", "tree_text"]


def _value_lines(module: Module) -> Iterator[str]:
    for offset, value in enumerate(module._kind.values):
        reason = module._model._sites[module._values + offset].unavailable
        if reason:
            yield f"({value.name}) -> unavailable: {reason}"
        else:
            layout = f"tuple of {value.layout}" if value.list else value.layout
            yield f"({value.name}) -> {layout} [{value.dims}]: {value.description}"


def _aliases(module: Module) -> dict[str, str]:
    """Native name -> alias, for the aliases of direct children."""
    return {target: name for name, target in module._kind.aliases.items() if "." not in target}


def _root_aliases(module: Module) -> dict[str, str]:
    return {target: name for name, target in module._kind.aliases.items()}


def _named_children(module: Module) -> Iterator[tuple[str, Module, str]]:
    """(label, module, note) of each child; equal blocks of a list are shown once."""
    aliases = {**_aliases(module), **_root_aliases(module._model)}
    for name, child in dict(module._children).items():
        if name in module._kind.aliases:
            continue
        native = f"{module._path}.{name}" if module._path else name
        alias = aliases.get(native) or aliases.get(name)
        label = f"{alias}/{name}" if alias and alias != name else name
        if not isinstance(child, ModuleList):
            yield label, child, ""
            continue
        for alike in _alike(child):
            yield f"{label}[{', '.join(_spans(alike))}]", child[alike[0]], ""


def _alike(blocks: Sequence[Module]) -> Iterator[list[int]]:
    """The blocks of a list, those with the same modules and the same values together."""
    groups: dict[Any, list[int]] = {}
    for i, block in enumerate(blocks):
        parts = [(name, type(part)) for name, part in block._children.items()]
        groups.setdefault((*_served(block), *parts), []).append(i)
    yield from groups.values()


def _spans(indices: Sequence[int]) -> Iterator[str]:
    """Ascending numbers, stretches as `4-6`."""
    start = indices[0]
    for here, following in zip(indices, [*indices[1:], None], strict=True):
        if following != here + 1:
            yield f"{start}" if start == here else f"{start}-{here}"
            start = following if following is not None else here


def _served(block: Module) -> Iterator[bool]:
    for offset in range(len(block._kind.values)):
        yield not block._model._sites[block._values + offset].unavailable


def tree_text(module: Module, label: str = "", indent: str = "") -> Iterator[str]:
    """Lines of a module and all below it."""
    yield f"{indent}({label}): {type(module).__name__}" if label else type(module).__name__
    for line in _value_lines(module):
        yield f"{indent}  {line}"
    for name, child, _ in _named_children(module):
        yield from tree_text(child, name, indent + "  ")


def card_text(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    """A card: a title and aligned key/value rows."""
    width = max(len(key) for key, _ in rows)
    return "\n".join([title, *(f"  {key:<{width}}  {value}" for key, value in rows)])


def module_text(module: Module) -> str:
    """The printout of one module."""
    return "\n".join(tree_text(module))


def model_text(model: StandardizedTransformer) -> str:
    """The printout of a model: its tree, then its cards."""
    config = model._config
    parts = ["\n".join(tree_text(model)), card_text("Config", config["text_card"])]
    if model.task == "image-text-to-text":
        parts.append(card_text("Vision Config", config["vision_card"]))
    return "\n\n".join(parts)
