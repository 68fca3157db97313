"""What the large models would take on H200s, on paper: no such device was used. `./dev python benchmarks/scale.py`
prints the tables of docs/performance.md; `--write` puts them there.

A stage takes the longer of its arithmetic and its memory traffic at the device's peaks; the host takes its time for
each kernel that it launches; a forward takes the longer of the two sums.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "tests" / "data" / "configs"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- benchmarks/scale.py -->\n", "<!-- end -->\n"
MODELS = {
    "2B": "qwen3-vl-2b-instruct",
    "8B": "qwen3-vl-8b-instruct",
    "32B": "qwen3-vl-32b-instruct",
    "30B-A3B": "qwen3-vl-30b-a3b-instruct",
    "235B-A22B": "qwen3-vl-235b-a22b-instruct",
}
HALF = 2  # bytes of bfloat16


@dataclass(frozen=True)
class Device:
    """An H200 by its data sheet, and what is assumed of a program that runs on it."""

    flops: float = 989e12  # bfloat16, dense
    bandwidth: float = 4.8e12  # bytes a second
    memory: float = 141e9
    link: float = 450e9  # bytes a second to another device, one way
    efficiency: float = 0.6  # of both peaks
    launch: float = 5e-6  # seconds of the host for one operator


@dataclass(frozen=True)
class Prompt:
    """One image of 448 x 448 pixels and 40 tokens of text."""

    patches: int = 784
    text: int = 40

    @property
    def image_tokens(self) -> int:
        return self.patches // 4

    @property
    def tokens(self) -> int:
        return self.image_tokens + self.text


@dataclass(frozen=True)
class Stage:
    """FLOPs (two for a multiply-add), bytes of weights read, kernels launched."""

    name: str
    flops: float
    read: float
    launches: int

    def seconds(self, device: Device) -> float:
        return max(self.flops / device.flops, self.read / device.bandwidth)


def experts_hit(tokens: int, experts: int, top_k: int) -> float:
    """How many experts at least one of the tokens goes to, if each chooses evenly."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


@dataclass(frozen=True)
class Model:
    """The arithmetic of one config.json of Qwen3-VL."""

    text: dict[str, Any]
    vision: dict[str, Any]
    tied: bool

    @classmethod
    def read(cls, path: Path) -> Model:
        config = json.loads(path.read_text())
        return cls(config["text_config"], config["vision_config"], config["tie_word_embeddings"])

    @property
    def is_mixture(self) -> bool:
        return "num_experts" in self.text

    # --- weights, in numbers ---

    @property
    def attention_weights(self) -> int:
        """q, k, v and o of one text block."""
        hidden, head = self.text["hidden_size"], self.text["head_dim"]
        return 2 * hidden * head * (self.text["num_attention_heads"] + self.text["num_key_value_heads"])

    @property
    def mlp_weights(self) -> int:
        """Of one text block, or of one expert."""
        inner = self.text["moe_intermediate_size" if self.is_mixture else "intermediate_size"]
        return 3 * self.text["hidden_size"] * inner

    @property
    def embedding(self) -> int:
        return self.text["vocab_size"] * self.text["hidden_size"]

    @property
    def tower_weights(self) -> dict[str, int]:
        hidden, inner, depth = (self.vision[key] for key in ("hidden_size", "intermediate_size", "depth"))
        mergers = 1 + len(self.vision["deepstack_visual_indexes"])
        return {
            "patch embedding": 1536 * hidden,
            "vision projections": depth * 4 * hidden**2,
            "vision MLP": depth * 2 * hidden * inner,
            "mergers": mergers * (16 * hidden**2 + 4 * hidden * self.vision["out_hidden_size"]),
        }

    @property
    def bytes(self) -> float:
        """Of all weights in bfloat16; norms, biases and the position table, below 0.2 %, are left out."""
        blocks = self.text["num_hidden_layers"]
        experts = self.text["num_experts"] if self.is_mixture else 1
        router = experts * self.text["hidden_size"] if self.is_mixture else 0
        text = blocks * (self.attention_weights + experts * self.mlp_weights + router)
        return HALF * (sum(self.tower_weights.values()) + text + self.embedding * (1 if self.tied else 2))

    # --- one forward ---

    def see(self, prompt: Prompt) -> Iterator[Stage]:
        """The tower."""
        weights, depth, patches = self.tower_weights, self.vision["depth"], prompt.patches
        rows = {"mergers": prompt.image_tokens}
        launches = {"patch embedding": 10, "vision projections": 2 * depth, "vision MLP": 3 * depth}
        launches["mergers"] = 4 * (1 + len(self.vision["deepstack_visual_indexes"]))
        for name, count in weights.items():
            yield Stage(name, 2 * rows.get(name, patches) * count, HALF * count, launches[name])
        attention = depth * 4 * patches**2 * self.vision["hidden_size"]
        yield Stage("vision attention, norms, sums", attention, 0, 8 * depth)

    def read_text(self, tokens: int, past: int, logits: int) -> Iterator[Stage]:
        """The text model over `tokens` behind `past` others, and `logits` rows of the head."""
        blocks, heads = self.text["num_hidden_layers"], self.text["num_attention_heads"]
        projections = blocks * self.attention_weights
        yield Stage("text projections", 2 * tokens * projections, HALF * projections, 4 * blocks)
        attention = blocks * 4 * tokens * (past + tokens) * heads * self.text["head_dim"]
        cache = past * self.cache_bytes
        yield Stage("text attention, norms, sums", attention, cache, 9 * blocks)
        if self.is_mixture:
            yield self._experts(tokens)
        else:
            mlp = blocks * self.mlp_weights
            yield Stage("text MLP", 2 * tokens * mlp, HALF * mlp, 4 * blocks)
        yield Stage("head", 2 * logits * self.embedding, HALF * self.embedding, 5)

    def _experts(self, tokens: int) -> Stage:
        blocks, top_k = self.text["num_hidden_layers"], self.text["num_experts_per_tok"]
        hit = experts_hit(tokens, self.text["num_experts"], top_k)
        router = self.text["num_experts"] * self.text["hidden_size"]
        flops = blocks * 2 * tokens * (top_k * self.mlp_weights + router)
        # Two products for each expert that is hit, and what sorts the tokens and puts them back.
        launches = round(blocks * (2 * hit + 26))
        return Stage("experts", flops, blocks * HALF * (hit * self.mlp_weights + router), launches)

    def prefill(self, prompt: Prompt) -> list[Stage]:
        return [*self.see(prompt), *self.read_text(prompt.tokens, 0, 1)]

    def decode(self, prompt: Prompt) -> list[Stage]:
        return list(self.read_text(1, prompt.tokens, 1))

    # --- memory ---

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one position."""
        heads = self.text["num_key_value_heads"] * self.text["head_dim"]
        return 2 * HALF * heads * self.text["num_hidden_layers"]

    def live_bytes(self, prompt: Prompt) -> float:
        """The most that one block holds: the stream twice, and what is widest in it, three times."""
        vision = 2 * self.vision["hidden_size"] + 3 * self.vision["intermediate_size"]
        top_k = self.text["num_experts_per_tok"] if self.is_mixture else 1
        inner = self.text["moe_intermediate_size" if self.is_mixture else "intermediate_size"]
        text = 2 * self.text["hidden_size"] + 3 * top_k * inner
        return HALF * max(prompt.patches * vision, prompt.tokens * text)

    def stored_stream(self, prompt: Prompt) -> float:
        """What `model.record` keeps: the stream before each block and behind the last."""
        return HALF * prompt.tokens * self.text["hidden_size"] * (self.text["num_hidden_layers"] + 1)


@dataclass(frozen=True)
class Forward:
    """Seconds of one forward."""

    floor: float  # of the device, at its peaks
    host: float

    @classmethod
    def of(cls, stages: list[Stage], device: Device) -> Forward:
        launches = sum(stage.launches for stage in stages)
        return cls(sum(stage.seconds(device) for stage in stages), launches * device.launch)

    def predicted(self, device: Device) -> float:
        return max(self.floor / device.efficiency, self.host)


def devices_needed(model: Model, device: Device) -> int:
    """Devices whose memory holds the weights, a tenth left free: 1, 2, 4 or 8."""
    return next(count for count in (1, 2, 4, 8) if model.bytes <= 0.9 * count * device.memory)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def one_device(models: dict[str, Model], prompt: Prompt, device: Device) -> str:
    rows = []
    for name, model in models.items():
        prefill, decode = (Forward.of(stages, device) for stages in (model.prefill(prompt), model.decode(prompt)))
        fits = devices_needed(model, device) == 1
        predicted = [f"{1e3 * forward.predicted(device):.1f}" if fits else "-" for forward in (prefill, decode)]
        rows.append(
            [
                name,
                f"{model.bytes / 1e9:.1f}",
                f"{model.cache_bytes / 1024:.0f}",
                f"{model.live_bytes(prompt) / 1e6:.0f}",
                f"{model.stored_stream(prompt) / 1e6:.0f}",
                f"{1e3 * prefill.floor:.2f}",
                f"{1e3 * prefill.host:.1f}",
                predicted[0],
                f"{1e3 * decode.floor:.2f}",
                f"{1e3 * decode.host:.1f}",
                predicted[1],
            ]
        )
    header = [
        "one H200",
        "weights, GB",
        "cache, KiB a position",
        "live in a block, MB",
        "recording, MB",
        "prompt: device, ms",
        "host, ms",
        "**predicted, ms**",
        "a token: device, ms",
        "host, ms",
        "**predicted, ms**",
    ]
    return markdown(header, rows)


def eight_devices(models: dict[str, Model], prompt: Prompt, device: Device) -> str:
    rows = []
    for name, model in models.items():
        prefill, decode = (Forward.of(stages, device) for stages in (model.prefill(prompt), model.decode(prompt)))
        stream = HALF * prompt.tokens * model.text["hidden_size"]
        hops = 7 * (stream / device.link + 2 * device.launch)
        needed = devices_needed(model, device)
        rows.append(
            [
                name,
                f"{model.bytes / 8e9:.1f}",
                f"{1e3 * (prefill.predicted(device) + hops):.1f}",
                f"{1e3 * (decode.predicted(device) + 7 * 2 * device.launch):.1f}",
                f"{8 // needed} x {needed}",
                f"{8 // needed / prefill.predicted(device):.0f}",
            ]
        )
    header = [
        "eight H200",
        "weights on each, GB",
        "prompt, ms",
        "a token, ms",
        "best for collecting",
        "prompts/s",
    ]
    return markdown(header, rows)


def section() -> str:
    """The tables, as they stand in docs/performance.md."""
    device, prompt = Device(), Prompt()
    models = {name: Model.read(CONFIGS / f"{file}.json") for name, file in MODELS.items()}
    return f"{one_device(models, prompt, device)}\n{eight_devices(models, prompt, device)}"


def page_with(page: str, tables: str) -> str:
    """`page` with `tables` between the two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    if parser.parse_args().write:
        PAGE.write_text(page_with(PAGE.read_text(), section()))
    else:
        print(section(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
