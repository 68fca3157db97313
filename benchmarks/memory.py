"""What traces take in memory over the weights: the peak of the process, each in one of its own.

A work is run once to have every weight and every lasting buffer in memory, and counted the second time.
Tensors are returned to the system when they are freed (`MALLOC_MMAP_THRESHOLD_`), so that the peak is of
what was alive. It is set against the bytes that the widths of the model tell:

    text block    seq * (2 * hidden + 2 * intermediate)  stream, and its norm; gate and up
    vision block  patches * (hidden + 2 * intermediate)  stream; what enters and leaves the activation
    features      image tokens * hidden * (1 + taps)     what later blocks still need
    delivered     what the script has saved
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import remote
from checkpoints import folder
from inputs import image_prompt
from measure import Row, Sizes, row

import vlscope

WITHIN = 1.1  # of what the widths tell
GROWTH_MIB = 1.0  # of 200 traces

MIB = 2**20
SIDE, TEXT = 48, 1500  # 2,304 patches, 576 image tokens, 2,078 positions
RETURNED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as the tiny model runs everywhere

WORKS = {
    "one_value": "one value (block 1)",
    "last_logits": "last logits",
    "every_layer": "every text block",
    "every_vision_block": "every vision block",
    "last_rows": "last attention row, every block",  # the pattern of one block would be more than its activations
}
PEERS = {"with_hooks": "hooks", "with_nnsight": "nnsight", "with_transformer_lens": "TransformerLens"}

TRACES = """
import re, sys, torch, vlscope
from pathlib import Path
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
model = vlscope.load("demo")
run = model.encode("What color is the square?", images=[vlscope.demo.picture("red", size=(64, 64))])
def traces(count):
    for _ in range(count):
        with model.trace(**run) as tracer:
            kept = [layer.layer_output.save() for layer in model.layers]
            model.layers[-1].layer_output[:, -1] += 1
            model.logits.save()
traces(50)
before = resident()
traces(200)
print(resident() - before)
"""


def live_bytes(config: Mapping[str, Any], work: str, run: Mapping[str, Any]) -> int:
    """Bytes that a work must hold at once besides what it delivers, in float32."""
    text, vision = config["text_config"], config["vision_config"]
    patches, seq = run["pixel_values"].shape[0], run["input_ids"].shape[1]
    tokens = patches // vision["spatial_merge_size"] ** 2
    features = tokens * text["hidden_size"] * (1 + len(vision["deepstack_visual_indexes"]))
    tower = patches * (vision["hidden_size"] + 2 * vision["intermediate_size"])
    block = seq * (2 * text["hidden_size"] + 2 * text["intermediate_size"])
    return 4 * (features + (tower if work == "every_vision_block" else max(tower, block)))


def growth() -> Row:
    """What 200 traces leave behind, of the built-in model."""
    output = subprocess.check_output(
        [sys.executable, "-c", TRACES], text=True, env={**os.environ, **RETURNED_AT_ONCE, **ONE_THREAD}
    )
    return row("tiny: resident memory, growth over 200 traces", [float(output)], target=GROWTH_MIB, unit="MiB")


def run(sizes: Sizes) -> list[Row]:
    name, threads = sizes.models[-1], sizes.threads or os.cpu_count() or 1
    checkpoint = folder(name)
    config = vlscope.load(checkpoint, dispatch=False).config
    prompt = image_prompt(config, SIDE, text=TEXT)
    inputs = {"corrupted": prompt, "clean": prompt, "rows": [], "positions": [], "metric": (11, 12)}

    def peak(module: str, engine: str, work: str) -> dict[str, int]:
        with remote.started([module], checkpoint, inputs, threads, RETURNED_AT_ONCE) as processes:
            return processes[0].ask(engine, work, peak=True)

    most = None if name == "tiny" else WITHIN  # beside small widths, ids and masks count
    rows = []
    for work, what in WORKS.items():
        found = peak("ours", "ours", work)
        told = live_bytes(config, work, prompt) + found["delivered"]
        rows += [
            row(f"{name}: peak over the weights: {what}: ours", [found["peak"] / MIB], unit="MiB"),
            row(f"{name}: peak, of what the widths tell: {what}", [found["peak"] / told], target=most, unit="x"),
        ]
    pattern = peak("ours", "ours", "pattern")["peak"] / MIB
    rows.append(row(f"{name}: peak over the weights: whole pattern of a block: ours", [pattern], unit="MiB"))
    for module, engine in PEERS.items() if sizes.peers else ():
        if remote.installed(module):
            theirs = peak(module, engine, "every_layer")["peak"] / MIB
            rows.append(row(f"{name}: peak over the weights: every text block: {engine}", [theirs], unit="MiB"))
    return [*rows, growth()]
