"""Generated pages: docs/values.md from the table of named values, docs/models.md from the shipped configs.

`./dev docs` writes them; `./dev docs --check` says whether they are what would be written.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import vlscope
from vlscope import _core
from vlscope.printing import card_text, tree_text

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "tests" / "data" / "configs"
SIZES = ("2b", "4b", "8b", "32b")

#: Where each kind that serves values stands in the tree.
HOSTS = {
    "CausalLM": "model",
    "TextLayer": "model.layers[i]",
    "TextAttention": "model.layers[i].self_attn",
    "TextMLP": "model.layers[i].mlp",
    "Vision": "model.vision",
    "VisionLayer": "model.vision.layers[i]",
    "VisionAttention": "model.vision.layers[i].self_attn",
    "VisionMLP": "model.vision.layers[i].mlp",
}

VALUES_HEAD = """# Values

Every named value, by host. A value is read inside a trace as an attribute, edited in place
(`value[:] = 0`) or assigned whole (same shape, dtype and device), and kept with `.save()`. Reads follow the
order of the forward; see [errors](errors.md) for what happens otherwise.

This page is generated from the engine's own table; `print(model)` shows the same for a loaded model, and
`help(type(model.layers[0]))` for one host.

A *site* is a value's dotted path: `logits`, `layers.3.self_attn.attention_queries`,
`vision.deepstack_merger_list.0.output`. `tracer.saved`, `model.scan`, `model.order` and every message use it.

Besides these values, every module that the reference calls has `.input` (its first argument), `.inputs`
(`(args, kwargs)`), `.output` and `.skip(value)`, under its native path
(`model.model.language_model.layers[0].self_attn.q_proj.output`) and the short one
(`model.layers[0].self_attn.q_proj.output`). Leaf modules have `.weight` and `.bias`.
"""

MODELS_HEAD = """# Models

The released Qwen3-VL sizes, from their `config.json` alone; no weights were read to make this page.
Instruct and Thinking checkpoints of a size have the same shape.
"""


def axes(value: _core.Value) -> str:
    return f"[{value.dims}]" if value.dims else ""


def access(value: _core.Value) -> str:
    if value.unavailable:
        return "unavailable"
    return "read" if value.read_only else "read, write"


def value_rows(kind: _core.Kind) -> Iterator[str]:
    yield "| value | layout | axes | access | what it is |"
    yield "|---|---|---|---|---|"
    for value in kind.values:
        reason = value.read_only or value.unavailable
        what = value.description + (f". {reason}" if reason else "")
        yield f"| `{value.name}` | {value.layout} | {axes(value)} | {access(value)} | {what} |"


def values_page() -> str:
    parts = [VALUES_HEAD]
    for kind in _core.all_kinds():
        if not kind.values:
            continue
        doc = kind.doc.strip().splitlines()
        parts.append(f"## `{HOSTS[kind.name]}`\n\n{fenced(doc)}\n\n" + "\n".join(value_rows(kind)) + "\n")
    return "\n".join(parts)


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


def models_page() -> str:
    parts = [MODELS_HEAD, "| size | tensors | parameters |\n|---|---|---|"]
    models = {size: CONFIGS / f"qwen3-vl-{size}-instruct.json" for size in SIZES}
    for size, config in models.items():
        tensors, parameters = vlscope.weight_counts(config)
        parts[-1] += f"\n| {size.upper()} | {tensors:,} | {parameters:,} |"
    for size, config in models.items():
        cards = shell(config)._config
        card = card_text("Config", cards["text_card"]) + "\n\n"
        card += card_text("Vision Config", cards["vision_card"])
        parts.append(f"## Qwen3-VL {size.upper()}\n\n```text\n{card}\n```")
    tree = "\n".join(tree_text(shell(models["2b"])))
    parts.append(f"## The tree\n\nOf the 2B size; the others differ in their numbers only.\n\n```text\n{tree}\n```\n")
    return "\n\n".join(parts)


PAGES = {"values.md": values_page, "models.md": models_page}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / "docs" / name, make()
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
