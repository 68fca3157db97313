"""What generating and sweeping cost, on the built-in model with an image prompt and with a long text.

Peer: transformers (sdpa) on the same checkpoint and inputs: its `generate` with its cache, and for
the sweep a forward with a hook that patches, one for each block. At real widths a token cannot take
less than reading the weights once, and that is what it is set against.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from checkpoints import folder
from inputs import image_prompt
from measure import Row, Sizes, Times, Work, interleaved, ratios, row, slopes, threads
from overhead import PROMPT, load_peer, peer_forward

import vlscope

TIMES_AS_FAST = 3.0  # as transformers, on the built-in model
OF_READING = 0.8  # of the time that reading the weights once takes, for a token at real widths

NEW_TOKENS = 32
LONG = "The capital of France is Paris. " * 60

Inputs = Mapping[str, torch.Tensor]


def ours(model: vlscope.StandardizedTransformer, image: Inputs, text: Inputs) -> dict[str, Work]:
    """Generations with nothing read and with a value of every block read, and a layer sweep of patches."""
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": []}

    def read_every_step() -> None:
        with model.generate(**image, **options) as tracer:
            for _ in tracer.iter[:]:
                for layer in model.layers:
                    _ = layer.layer_output

    def sweep(prompt: Mapping[str, Any]) -> None:
        for layer in model.layers:
            with model.trace(**prompt):
                layer.layer_output[:, -1] = 0
                _ = model.logits

    recording = {"prompt": model.record(**image)}
    return {
        "image": Work(lambda: model.generate(**image, **options).result),
        "image, read": Work(read_every_step),
        "text": Work(lambda: model.generate(**text, **options).result),
        "text, one token": Work(lambda: model.generate(**text, max_new_tokens=1).result),
        "sweep": Work(lambda: sweep(image)),
        "sweep, recorded": Work(lambda: sweep(recording)),
    }


def peer_generate(peer: Any, inputs: Inputs, count: int = NEW_TOKENS) -> Callable[[], torch.Tensor]:
    types = (inputs["input_ids"] == peer.config.image_token_id).int() if "pixel_values" in inputs else None
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return lambda: peer.generate(**inputs, mm_token_type_ids=types, **options)


def theirs(peer: Any, image: Inputs, text: Inputs) -> dict[str, Work]:
    forward = peer_forward(peer, image)

    def patch(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        output[:, -1] = 0
        return output

    def sweep() -> None:
        for layer in peer.model.language_model.layers:
            handle = layer.register_forward_hook(patch)
            forward()
            handle.remove()

    return {
        "peer: image": Work(peer_generate(peer, image)),
        "peer: text": Work(peer_generate(peer, text)),
        "peer: text, one token": Work(peer_generate(peer, text, 1)),
        "peer: sweep": Work(sweep),
    }


def check(model: vlscope.StandardizedTransformer, peer: Any, image: Inputs, text: Inputs) -> None:
    """Nothing is timed that is not right: the tokens are the peer's, and a recording changes no logits."""
    recording = model.record(**image)
    for layer in model.layers:
        patched = []
        for prompt in ({"prompt": recording}, image):
            with model.trace(**prompt):
                layer.layer_output[:, -1] = 0
                patched.append(model.logits.clone())
        if not torch.equal(*patched):
            raise AssertionError("a sweep over a recording gave other logits")
    if peer is None:
        return
    for inputs in (image, text):
        tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, eos_token_id=[]).result
        if not torch.equal(tokens, peer_generate(peer, inputs)()):
            raise AssertionError("transformers generated other tokens")


def rows(times: Times) -> list[Row]:
    def one(what: str, name: str, peer: str) -> Row:
        return row(what, times[name], peer=times.get(f"peer: {peer}"))

    speedup = []
    if "peer: image" in times:
        for prompt in ("image", "text"):
            faster = ratios(times[f"peer: {prompt}"], times[prompt])
            what = f"{prompt} prompt, {NEW_TOKENS} tokens, times as fast as transformers"
            speedup.append(row(what, faster, target=TIMES_AS_FAST, unit="x", at_least=True))
    return [
        *speedup,
        one(f"image prompt, {NEW_TOKENS} tokens", "image", "image"),
        one(f"image prompt, {NEW_TOKENS} tokens, every block read on every step", "image, read", "image"),
        one(f"long text, {NEW_TOKENS} tokens", "text", "text"),
        one("long text, 1 token", "text, one token", "text, one token"),
        one("image prompt, a patch in each block", "sweep", "sweep"),
        one("image prompt, a patch in each block, over a recording", "sweep, recorded", "sweep"),
    ]


def at_real_widths(name: str, sizes: Sizes) -> list[Row]:
    """Tokens beside the time of reading the weights once, by a sum or by a product with a vector."""
    model = vlscope.load(folder(name))
    weights = [part.weight for part in projections(model)]
    ids = image_prompt(model.config, 2)["input_ids"][:, :5]
    options: dict[str, Any] = {"input_ids": ids, "eos_token_id": []}
    vectors = {weight.shape[1]: torch.ones(weight.shape[1]) for weight in weights}

    def traced() -> None:
        with model.generate(**options, max_new_tokens=NEW_TOKENS) as tracer:
            for _ in tracer.iter[:]:
                for layer in model.layers:
                    _ = layer.layer_output

    works = {
        "one token": Work(lambda: model.generate(**options, max_new_tokens=1).result),
        "untraced": Work(lambda: model.generate(**options, max_new_tokens=NEW_TOKENS).result),
        "traced, every block read": Work(traced),
        "sums": Work(lambda: [weight.sum() for weight in weights]),
        "products": Work(lambda: [weight @ vectors[weight.shape[1]] for weight in weights]),
    }
    times = interleaved(works, sizes.long)
    reading = [min(both) for both in zip(times["sums"], times["products"], strict=True)]
    read = sum(weight.nbytes for weight in weights)
    rows = [row(f"{name}: reading the weights", [read / us / 1e3 for us in reading], unit="GB/s")]
    for how in ("untraced", "traced, every block read"):
        token = slopes(times[how], times["one token"], NEW_TOKENS - 1)
        rows += [
            row(f"{name}: one more token, {how}", [us / 1000 for us in token], unit="ms"),
            row(
                f"{name}: of what reading the weights allows, {how}",
                ratios(reading, token),
                target=OF_READING,
                unit="x",
                at_least=True,
            ),
        ]
    return rows


def projections(model: vlscope.StandardizedTransformer) -> list[Any]:
    """The modules whose matrices every token goes through."""
    found: list[Any] = [model.lm_head]
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        found += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return found


def run(sizes: Sizes) -> list[Row]:
    model = vlscope.load("demo")
    image = model.encode(PROMPT, images=[vlscope.demo.picture("red", size=(64, 64))])
    text = model.encode(LONG)
    peer = load_peer(model) if sizes.peers else None
    check(model, peer, image, text)
    works = ours(model, image, text) | (theirs(peer, image, text) if peer is not None else {})
    found = rows(interleaved(works, max(sizes.short // 10, 2)))
    for name in sizes.models[1:]:
        with threads(sizes.threads or os.cpu_count() or 1):
            found += at_real_widths(name, sizes)
    return found
