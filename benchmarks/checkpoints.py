"""Checkpoints with random weights at real widths, made when first asked for and kept in an ignored folder.

    python benchmarks/checkpoints.py cut2b

`cut2b` is Qwen3-VL-2B cut to 4 text and 6 vision blocks, in float32 (2.8 GB); `2b` is the whole shape
(8.5 GB). `cut2b-bf16` and `2b-bf16` are the same in bfloat16 (1.4 GB, 4.3 GB), and `8b-bf16` is the 8B
shape (17.5 GB), which nothing makes unasked. All have a tokenizer of the real size (its merges are made
up) and the built-in model's processor and template. `tiny-bf16` is the built-in model in bfloat16.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("VLSCOPE_BENCH_CACHE", Path(__file__).resolve().parent / ".cache"))
DEMO = ROOT / "demo" / "model"
CONFIGS = ROOT / "tests" / "data" / "configs"

#: Name -> released config, what is cut (text blocks, vision blocks, taps of DeepStack), stored dtype.
SHAPES: dict[str, tuple[str, tuple[int, int, list[int]] | None, torch.dtype]] = {
    "cut2b": ("qwen3-vl-2b-instruct", (4, 6, [1, 3, 5]), torch.float32),
    "cut2b-bf16": ("qwen3-vl-2b-instruct", (4, 6, [1, 3, 5]), torch.bfloat16),
    "2b": ("qwen3-vl-2b-instruct", None, torch.float32),
    "2b-bf16": ("qwen3-vl-2b-instruct", None, torch.bfloat16),
    "8b-bf16": ("qwen3-vl-8b-instruct", None, torch.bfloat16),
}
#: Tokens before the special ones, in the released tokenizers.
ORDINARY_TOKENS = 151_643
#: Those after them, in their order.
SPECIAL = (
    *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"),
    *("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
)
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def folder(name: str) -> Path:
    """The checkpoint's folder, made if it is not there. "tiny" is the built-in model."""
    if name == "tiny":
        return DEMO
    made = CACHE / "models" / name
    if not made.is_dir():
        print(f"making {made} (once)", file=sys.stderr)
        partial = made.with_name(f"{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(name, partial)
        partial.rename(made)
    return made


def _write(name: str, where: Path) -> None:
    if name == "tiny-bf16":
        _write_tiny(where)
        return
    released, cut, dtype = SHAPES[name]
    config = json.loads((CONFIGS / f"{released}.json").read_text(encoding="utf-8"))
    if cut is not None:
        config["text_config"]["num_hidden_layers"] = cut[0]
        config["vision_config"].update(depth=cut[1], deepstack_visual_indexes=cut[2])
    config["dtype"] = str(dtype).removeprefix("torch.")
    for part in (config["text_config"], config["vision_config"]):
        part.pop("dtype", None)
    (where / "config.json").write_text(json.dumps(config, indent=1))
    _write_processor(where)
    _write_weights(_shapes(where), dtype, where / "model.safetensors")


def _write_tiny(where: Path) -> None:
    shutil.copytree(DEMO, where, dirs_exist_ok=True)
    stored = load_file(DEMO / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in stored.items()}, where / "model.safetensors")


def _write_processor(where: Path) -> None:
    """The built-in model's files, with a vocabulary of the real size and images of the real sizes."""
    for name in ("chat_template.jinja", "video_preprocessor_config.json"):
        shutil.copy(DEMO / name, where / name)
    images = json.loads((DEMO / "preprocessor_config.json").read_text())
    images["size"] = {"shortest_edge": 65536, "longest_edge": 16777216}
    (where / "preprocessor_config.json").write_text(json.dumps(images))
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    options = json.loads((DEMO / "tokenizer_config.json").read_text())
    like = tokenizer["added_tokens"][0]
    special = {ORDINARY_TOKENS + offset: f"<|{name}|>" for offset, name in enumerate(SPECIAL)}
    tokenizer["added_tokens"] = [{**like, "id": index, "content": content} for index, content in special.items()]
    options["added_tokens_decoder"] = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"}
        for token in tokenizer["added_tokens"]
    }
    vocab, merges = _vocabulary(tokenizer["model"]["vocab"])
    tokenizer["model"].update(vocab=vocab, merges=merges)
    (where / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (where / "tokenizer_config.json").write_text(json.dumps(options))


def _vocabulary(known: dict[str, int]) -> tuple[dict[str, int], list[list[str]]]:
    """All pairs of bytes, then triples: as many tokens and merges as the released tokenizers have."""
    single = [token for token, _ in sorted(known.items(), key=lambda item: item[1]) if len(token) == 1]
    merges: list[list[str]] = [[a, b] for a in single for b in single]
    triples = ([a + b, c] for a in single for b in single for c in single)
    while len(single) + len(merges) < ORDINARY_TOKENS:
        merges.append(next(triples))
    del merges[ORDINARY_TOKENS - len(single) :]
    tokens = [*single, *(a + b for a, b in merges)]
    return {token: index for index, token in enumerate(tokens)}, merges


def _write_weights(shapes: dict[str, list[int]], dtype: torch.dtype, path: Path) -> None:
    """One safetensors file, tensor by tensor, so that no checkpoint has to fit into memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            out.write(_random(name, shape, generator).to(dtype).flatten().view(torch.uint8).numpy())


def _shapes(where: Path) -> dict[str, list[int]]:
    """What transformers would store for this config."""
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    config = AutoConfig.from_pretrained(where)
    with torch.device("meta"):
        stored = Qwen3VLForConditionalGeneration(config).state_dict()
    if config.tie_word_embeddings:
        del stored["lm_head.weight"]
    return {name: list(tensor.shape) for name, tensor in stored.items()}


def _random(name: str, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Scaled by the fan-in, with norms and biases of some size: nothing degenerate, logits of order 1."""
    if len(shape) >= 2:
        deviation = 0.02 if "embed_tokens" in name else 0.1 if "pos_embed" in name else math.prod(shape[1:]) ** -0.5
        return torch.empty(shape).normal_(0, deviation, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return torch.empty(shape).normal_(1, 0.1, generator=generator)
    return torch.empty(shape).normal_(0, 0.05, generator=generator)


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(folder(wanted))
