"""What a trace costs over the model's own work, on the built-in model.

Everything is timed interleaved, run by run, in one process; a figure is a median, in microseconds. The cost of
one read is the slope between traces that read many values and few. Peer: transformers with forward hooks on the
same weights and inputs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import vlscope

TARGETS = {
    "empty trace": 20.0,
    "empty trace, after another": 20.0,
    "one read": 2.0,
    "one read, nothing computed since the last": 2.0,
    "one read again": 2.0,
    "one edit in place": 3.0,
    "import vlscope, after torch": 150_000.0,
}
PROMPT = "What color is the square? Answer with one word."
VALUES = ("layer_input", "layer_output")
INSIDE = ("attention_queries", "attention_head_outputs", "attention_output")


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def interleaved(works: dict[str, Callable[[], Any]], reps: int) -> dict[str, list[float]]:
    """Run times of each work, in turn; the first tenth warms up and does not count."""
    for _ in range(max(reps // 10, 1)):
        for work in works.values():
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(reps):
        for name, work in works.items():
            times[name].append(timed(work))
    return times


def median(times: list[float]) -> float:
    return statistics.median(times)


def ours(model: vlscope.StandardizedTransformer, inputs: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    blocks = list(model.layers)

    def empty() -> None:
        with model.trace(**inputs):
            pass

    def to_the_end() -> None:
        with model.trace(**inputs):
            _ = model.logits

    def read_all() -> None:
        with model.trace(**inputs):
            for block in blocks:
                _ = block.layer_input
                attention = block.self_attn
                _ = attention.attention_queries, attention.attention_head_outputs, attention.attention_output
                _ = block.layer_output
            _ = model.logits

    def edit_all() -> None:
        with model.trace(**inputs):
            for block in blocks:
                block.layer_output[0, 0, 0] += 0.0
            _ = model.logits

    def read_outputs() -> None:
        with model.trace(**inputs):
            for block in blocks:
                _ = block.layer_output
            _ = model.logits

    return {
        "untraced forward": lambda: model(**inputs),
        "empty": empty,
        "to the logits": to_the_end,
        "read all": read_all,
        "read outputs": read_outputs,
        "edit outputs": edit_all,
    }


def hot(work: Callable[[], Any], count: int = 500) -> float:
    """The same again and again, with nothing in between to push it out of the caches."""
    return median([timed(work) for _ in range(count)])


def bare_edit(reps: int) -> float:
    """The edit that `edit outputs` makes, on a tensor of nobody's: torch's own share of it."""
    x = torch.zeros(1, 30, 64)

    def edit() -> None:
        x[0, 0, 0] += 0.0

    return median([timed(edit) for _ in range(max(reps, 50))])


def read_again(model: vlscope.StandardizedTransformer, inputs: dict[str, torch.Tensor], count: int = 1000) -> float:
    with model.trace(**inputs):
        block = model.layers[2]
        _ = block.layer_output
        start = time.perf_counter()
        for _ in range(count):
            _ = block.layer_output
        return (time.perf_counter() - start) * 1e6 / count


def read_next(model: vlscope.StandardizedTransformer, inputs: dict[str, torch.Tensor], count: int = 300) -> float:
    """Reads at the two next locations, between which the forward computes nothing."""
    times = []
    for _ in range(count):
        with model.trace(**inputs):
            block = model.layers[0]
            attention, projection = block.self_attn, block.self_attn.q_proj
            _ = block.input_layernorm.output
            start = time.perf_counter()
            _ = attention.input, projection.input
            times.append((time.perf_counter() - start) * 1e6 / 2)
    return median(times)


def theirs(models: tuple[Any, Any], inputs: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """transformers on the same checkpoint twice: plain, and with resident hooks."""

    def forward(model: Any) -> Callable[[], Any]:
        types = (inputs["input_ids"] == model.config.image_token_id).int()

        def work() -> None:
            with torch.no_grad():
                model(**inputs, mm_token_type_ids=types, use_cache=False)

        return work

    return {"transformers": forward(models[0]), "transformers, hooks": forward(models[1])}


def add_hooks(model: Any) -> int:
    """Resident forward hooks that keep each block's parts' outputs; returns how many."""
    parts = [
        part
        for block in model.model.language_model.layers
        for part in (block.input_layernorm, block.self_attn.q_norm, block.self_attn.o_proj, block.mlp, block)
    ]
    for part in parts:
        kept: list[torch.Tensor] = []

        def keep(module: Any, arguments: Any, output: torch.Tensor, kept: list[torch.Tensor] = kept) -> None:
            kept[:] = [output]

        part.register_forward_hook(keep)
    return len(parts)


def import_time() -> float:
    """Microseconds of `import vlscope` in a fresh interpreter that has torch; the least of three."""
    script = "import time, torch; t = time.perf_counter(); import vlscope; print((time.perf_counter() - t) * 1e6)"
    return min(float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(3))


def check(model: vlscope.StandardizedTransformer, inputs: dict[str, torch.Tensor], peer: Any) -> None:
    """Nothing is timed that is not right: equal logits, and an edit that moves them."""
    plain = model(**inputs).logits
    with model.trace(**inputs):
        model.vision.image_features[:] = 0
        model.layers[0].deepstack_output[:] = 0
        edited = model.logits.save()
    assert not torch.equal(plain, edited), "an edit did not move the logits"
    if peer is not None:
        types = (inputs["input_ids"] == peer.config.image_token_id).int()
        with torch.no_grad():
            reference = peer(**inputs, mm_token_type_ids=types, use_cache=False).logits
        torch.testing.assert_close(plain, reference, rtol=1e-4, atol=1e-4)


def run(reps: int, peers: bool = True) -> list[dict[str, Any]]:
    model = vlscope.load("demo")
    red = vlscope.demo.picture("red", size=(64, 64))
    encoding = model.processor.encode_prompt(PROMPT, images=[red])
    inputs = {key: encoding[key] for key in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")}
    peer = None
    works = ours(model, inputs)
    if peers:
        from transformers import Qwen3VLForConditionalGeneration

        peer, hooked = (
            Qwen3VLForConditionalGeneration.from_pretrained(model.folder, attn_implementation="sdpa").eval()
            for _ in range(2)
        )
        hooks = add_hooks(hooked)
        works |= theirs((peer, hooked), inputs)
    check(model, inputs, peer)

    times = interleaved(works, reps)
    half = {name: median(values) for name, values in times.items()}
    reads = model.num_layers * (len(VALUES) + len(INSIDE))
    edit = (half["edit outputs"] - half["read outputs"]) / model.num_layers
    rows = [
        row("untraced forward", half["untraced forward"], half.get("transformers")),
        row("trace to the logits", half["to the logits"], half.get("transformers")),
        row("empty trace", half["empty"]),
        row("empty trace, after another", hot(works["empty"])),
        row("one read", paired_slope(times["read all"], times["to the logits"], reads)),
        row("one read, nothing computed since the last", read_next(model, inputs)),
        row("one read again", statistics.median(read_again(model, inputs) for _ in range(9))),
        row("one edit in place", edit - bare_edit(reps)),
        row("import vlscope, after torch", import_time()),
    ]
    if peers:
        hook = paired_slope(times["transformers, hooks"], times["transformers"], hooks)
        for entry in rows:
            if entry["what"] in (
                "one read",
                "one read, nothing computed since the last",
                "one read again",
                "one edit in place",
            ):
                entry["peer"], entry["ratio"] = hook, entry["us"] / hook if hook > 0 else None
        rows.append(row("transformers: one resident forward hook", hook))
    return rows


def paired_slope(more: list[float], fewer: list[float], count: int) -> float:
    """Cost of one of `count` additions: the median over runs of the difference to the run beside it."""
    return statistics.median((a - b) / count for a, b in zip(more, fewer, strict=True))


def row(what: str, us: float, peer: float | None = None) -> dict[str, Any]:
    target = TARGETS.get(what)
    return {
        "what": what,
        "us": us,
        "target": target,
        "met": None if target is None else us <= target,
        "peer": peer,
        "ratio": None if peer is None else us / peer,
    }


def table(rows: list[dict[str, Any]]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.2f}"

    verdict = {True: "met", False: "MISSED", None: ""}
    lines = [f"{'':48}{'us':>12}{'target':>12}{'':>8}{'transformers':>14}{'ratio':>8}"]
    for entry in rows:
        lines.append(
            f"{entry['what']:48}{number(entry['us']):>12}{number(entry['target']):>12}{verdict[entry['met']]:>8}"
            f"{number(entry['peer']):>14}{number(entry['ratio']):>8}"
        )
    return "\n".join(lines)
