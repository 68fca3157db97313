"""What a trace costs over the model's own work, on the built-in model with an image prompt.

The cost of one read, edit or assignment is the slope between traces that make many and traces that
make none, repetition by repetition. Peer: transformers (sdpa) on the same checkpoint and inputs, and
the slope of its forward in the number of resident forward hooks.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from checkpoints import CONFIGS
from measure import Row, Sizes, Times, Work, again, interleaved, no_collection, ratios, row, slopes

import vlscope

EMPTY_TRACE = 20.0
READ = 2.0
EDIT = 3.0
IMPORT = 150_000.0
SCAN = 1_000_000.0
FORWARD_SPEEDUP = 4.0

PROMPT = "What color is the square? Answer with one word."
PLACES_PER_BLOCK = 5

Inputs = Mapping[str, torch.Tensor]


def ours(model: vlscope.StandardizedTransformer, inputs: Inputs) -> dict[str, Work]:
    """The untraced forward, and traces that differ in what they read and write."""
    blocks = list(model.layers)
    kept = []
    with model.trace(**inputs):
        for block in blocks:
            attention = block.self_attn
            values = [block.layer_input, attention.attention_queries, attention.attention_head_outputs]
            values += [attention.attention_output, block.layer_output]
            kept.append([value.clone() for value in values])
    matrix, heads = kept[0][0].clone(), kept[0][1].clone()

    def empty() -> None:
        with model.trace(**inputs):
            pass

    def to_the_logits() -> None:
        with model.trace(**inputs):
            _ = model.logits

    def read_many() -> None:
        with model.trace(**inputs):
            for block in blocks:
                _ = block.layer_input
                attention = block.self_attn
                _ = attention.attention_queries, attention.attention_head_outputs, attention.attention_output
                _ = block.layer_output
            _ = model.logits

    def edit_many() -> None:
        with model.trace(**inputs):
            for block in blocks:
                block.layer_input[0, 0, 0] += 0.0
                attention = block.self_attn
                attention.attention_queries[0, 0, 0, 0] += 0.0
                attention.attention_head_outputs[0, 0, 0, 0] += 0.0
                attention.attention_output[0, 0, 0] += 0.0
                block.layer_output[0, 0, 0] += 0.0
            _ = model.logits

    def edit_others() -> None:
        """The same reads, and as many edits of tensors outside the forward: torch's own share of an edit."""
        with model.trace(**inputs):
            for block in blocks:
                _ = block.layer_input
                matrix[0, 0, 0] += 0.0
                attention = block.self_attn
                _ = attention.attention_queries
                heads[0, 0, 0, 0] += 0.0
                _ = attention.attention_head_outputs
                heads[0, 0, 0, 0] += 0.0
                _ = attention.attention_output
                matrix[0, 0, 0] += 0.0
                _ = block.layer_output
                matrix[0, 0, 0] += 0.0
            _ = model.logits

    def assign_many() -> None:
        """Assigns what these places hold anyway, so that the forward goes on as it would."""
        with model.trace(**inputs):
            for block, values in zip(blocks, kept, strict=True):
                block.layer_input = values[0]
                attention = block.self_attn
                attention.attention_queries = values[1]
                attention.attention_head_outputs = values[2]
                attention.attention_output = values[3]
                block.layer_output = values[4]
            _ = model.logits

    works = (empty, to_the_logits, read_many, edit_many, edit_others, assign_many)
    return {"forward": Work(lambda: model(**inputs)), **{work.__name__: Work(work) for work in works}}


def hooked_parts(peer: Any) -> list[torch.nn.Module]:
    """As many modules of each text block as `read_many` reads values of it."""
    return [
        part
        for block in peer.model.language_model.layers
        for part in (block.input_layernorm, block.self_attn.q_norm, block.self_attn.o_proj, block.mlp, block)
    ]


@contextlib.contextmanager
def hooks(parts: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Resident forward hooks that each keep a reference to their module's output."""
    kept: dict[torch.nn.Module, Any] = {}

    def keep(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        kept[module] = output

    handles = [part.register_forward_hook(keep) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def peer_forward(peer: Any, inputs: Inputs, **options: Any) -> Callable[[], torch.Tensor]:
    types = (inputs["input_ids"] == peer.config.image_token_id).int()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return peer(**inputs, mm_token_type_ids=types, use_cache=False, **options).logits

    return forward


def theirs(peer: Any, inputs: Inputs) -> dict[str, Work]:
    """transformers without a hook, with one, and with as many as `read_many` reads values."""
    forward, parts = peer_forward(peer, inputs), hooked_parts(peer)
    return {
        "peer": Work(forward),
        "peer, one hook": Work(forward, lambda: hooks(parts[-1:])),
        "peer, hooks": Work(forward, lambda: hooks(parts)),
    }


def check(model: vlscope.StandardizedTransformer, inputs: Inputs, peer: Any) -> None:
    """Nothing is timed that is not right: equal logits, and edits that move them."""
    plain = model(**inputs).logits
    with model.trace(**inputs):
        traced = model.logits.save()
    with model.trace(**inputs):
        model.layers[0].layer_output[:, -1] += 1.0
        edited = model.logits.save()
    with model.trace(**inputs):
        model.layers[0].layer_output = torch.ones_like(model.layers[0].layer_output)
        assigned = model.logits.save()
    if not torch.equal(plain, traced):
        raise AssertionError("a trace moved the logits")
    for name, moved in (("edit", edited), ("assignment", assigned)):
        if torch.allclose(plain, moved, rtol=1e-3, atol=1e-3):
            raise AssertionError(f"an {name} did not move the logits")
    if peer is not None:
        torch.testing.assert_close(plain, peer_forward(peer, inputs)(), rtol=1e-4, atol=1e-4)


def reads_in_place(model: vlscope.StandardizedTransformer, inputs: Inputs, reps: int) -> dict[str, list[float]]:
    """Reads in the middle of a forward between which it computes nothing.

    `first` is what another read costs when the forward has just run: its value was read already, but
    Python and the way into the engine have left the caches. `next` is then that of the next location,
    and `repeated` that of a value once more.
    """
    times: dict[str, list[float]] = {"first": [], "next": [], "repeated": []}
    attention = model.layers[2].self_attn
    projection, count = attention.q_proj, 100

    def repeat() -> None:
        for _ in range(count):
            _ = projection.input

    with no_collection():
        for _ in range(reps):
            with model.trace(**inputs):
                _ = attention.input
                times["first"].append(Work(lambda: attention.input).time())
                times["next"].append(Work(lambda: projection.input).time())
                times["repeated"].append(Work(repeat).time() / count)
    return times


def bare_hook(reps: int) -> list[float]:
    """A resident hook's share in calling a module that does nothing, with everything in the caches."""
    module, x, count = torch.nn.Identity(), torch.zeros(1), 100

    def calls() -> None:
        for _ in range(count):
            module(x)

    works = {"plain": Work(calls), "hooked": Work(calls, lambda: hooks([module]))}
    times = interleaved(works, reps)
    return slopes(times["hooked"], times["plain"], count)


def import_times(count: int) -> list[float]:
    """Microseconds of `import vlscope` in fresh interpreters that have imported torch."""
    script = "import time, torch; t = time.perf_counter(); import vlscope; print((time.perf_counter() - t) * 1e6)"
    return [float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(count)]


#: From the import to what a scan of an image prompt tells, of a model that is a config.json alone.
FIRST_SCAN = """
import sys, time, torch, vlscope
start = time.perf_counter()
model = vlscope.load(sys.argv[1], dispatch=False)
ids = [1, model.config["vision_start_token_id"], *[model.config["image_token_id"]] * 196, *range(2, 42)]
grid, pixels = torch.tensor([[1, 28, 28]]), torch.zeros(784, 1536)
shapes = model.scan(input_ids=torch.tensor([ids]), pixel_values=pixels, image_grid_thw=grid)
us = (time.perf_counter() - start) * 1e6
assert shapes["logits"].shape == (1, len(ids), model.config["text_config"]["vocab_size"])
print(us)
"""


def scan_times(config: str, count: int) -> list[float]:
    """Microseconds of the first scan in fresh interpreters, with the load before it, of a released size."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(CONFIGS / f"{config}.json", f"{folder}/config.json")
        return [float(subprocess.check_output([sys.executable, "-c", FIRST_SCAN, folder])) for _ in range(count)]


def our_rows(times: Times, works: dict[str, Work], blocks: int, reps: int) -> list[Row]:
    peer = times.get("peer")
    places = blocks * PLACES_PER_BLOCK
    hook = slopes(times["peer, hooks"], times["peer"], places) if peer else None
    to_the_logits = slopes(times["to_the_logits"], times["forward"], 1)
    read = slopes(times["read_many"], times["to_the_logits"], places)
    edit = slopes(times["edit_many"], times["edit_others"], places)
    assignment = slopes(times["assign_many"], times["to_the_logits"], places)
    speedup = (
        row(
            "times as fast as transformers, untraced",
            ratios(peer, times["forward"]),
            target=FORWARD_SPEEDUP,
            unit="x",
            at_least=True,
        )
        if peer
        else None
    )
    return [
        *([speedup] if speedup else []),
        row("untraced forward", times["forward"], peer=peer),
        row("trace to the logits", times["to_the_logits"], peer=peer),
        row("trace to the logits, over the untraced forward", to_the_logits),
        row("empty trace", times["empty"], target=EMPTY_TRACE),
        row("empty trace, again at once", again(works["empty"].run, reps), target=EMPTY_TRACE),
        row("one read", read, target=READ, peer=hook),
        row("one edit in place, over torch's own", edit, target=EDIT, peer=hook),
        row("one assignment", assignment, target=EDIT, peer=hook),
    ]


def peer_rows(times: Times, blocks: int) -> list[Row]:
    hook = slopes(times["peer, hooks"], times["peer"], blocks * PLACES_PER_BLOCK)
    return [
        row("transformers: forward", times["peer"]),
        row("transformers: forward with one resident hook", times["peer, one hook"]),
        row("transformers: one resident hook", hook),
    ]


def run(sizes: Sizes) -> list[Row]:
    reps, peers = sizes.short, sizes.peers
    model = vlscope.load("demo")
    red = vlscope.demo.picture("red", size=(64, 64))
    encoding = model.processor.encode_prompt(PROMPT, images=[red])
    inputs = {key: encoding[key] for key in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")}
    peer = load_peer(model) if peers else None
    check(model, inputs, peer)

    works = ours(model, inputs) | (theirs(peer, inputs) if peers else {})
    times = interleaved(works, reps)
    rows = our_rows(times, works, model.num_layers, reps)
    bare = bare_hook(reps)
    reads = reads_in_place(model, inputs, reps)
    rows += [
        row("read again, first after computing", reads["first"], target=READ, peer=bare),
        row("read of the next location, right after", reads["next"], target=READ, peer=bare),
        row("read again and again", reads["repeated"], target=READ, peer=bare),
        row("import vlscope, after torch", import_times(min(reps, 5)), target=IMPORT),
        row("scan in a fresh interpreter, 235B", scan_times("qwen3-vl-235b-a22b-instruct", min(reps, 5)), target=SCAN),
    ]
    if peers:
        rows += peer_rows(times, model.num_layers)
    return [*rows, row("torch: one resident hook on a module that does nothing", bare)]


def load_peer(model: vlscope.StandardizedTransformer) -> Any:
    from transformers import Qwen3VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    return Qwen3VLForConditionalGeneration.from_pretrained(model.folder, attn_implementation="sdpa").eval()
