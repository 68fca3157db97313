"""What generating and sweeping cost, on the built-in model with an image prompt and with a long text.

Peer: transformers (sdpa) on the same checkpoint and inputs: its `generate` with its cache, and for
the sweep a forward with a hook that patches, one for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from measure import Row, Sizes, Times, Work, interleaved, ratios, row
from overhead import PROMPT, load_peer, peer_forward

import vlscope

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

    return [
        one(f"image prompt, {NEW_TOKENS} tokens", "image", "image"),
        one(f"image prompt, {NEW_TOKENS} tokens, every block read on every step", "image, read", "image"),
        one(f"long text, {NEW_TOKENS} tokens", "text", "text"),
        one("long text, 1 token", "text, one token", "text, one token"),
        one("image prompt, a patch in each block", "sweep", "sweep"),
        one("image prompt, a patch in each block, over a recording", "sweep, recorded", "sweep"),
    ]


def run(sizes: Sizes) -> list[Row]:
    reps, peers = sizes.short, sizes.peers
    model = vlscope.load("demo")
    image = model.encode(PROMPT, images=[vlscope.demo.picture("red", size=(64, 64))])
    text = model.encode(LONG)
    peer = load_peer(model) if peers else None
    check(model, peer, image, text)
    works = ours(model, image, text) | (theirs(peer, image, text) if peer is not None else {})
    return rows(interleaved(works, max(reps // 10, 2)))
