"""From a fresh interpreter to the first logits of an image prompt, and what the weights take meanwhile.

Peer: transformers with its own processor, which users need for such a prompt. Every run is a new process
on files that lie in the page cache; ours and theirs take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints import folder
from measure import Row, Sizes, interleaved, ratios, row

FIRST_LOGITS = 1 / 2  # of transformers' time
LOAD = 1 / 3  # of `from_pretrained`
#: Less than any matrix of a text block of the cut 2B shape (8 MiB): a second copy of one would show.
COPIED_MIB = 8.0

#: What each process begins with, and tells at its end: seconds of the load, MiB that it took.
HEAD = """
import json, re, sys, time
from pathlib import Path
def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
from PIL import Image
picture = Image.effect_noise((448, 448), 60).convert("RGB")
"""
OURS = """
import vlscope
before, start = memory("RssAnon"), time.perf_counter()
model = vlscope.load(sys.argv[1])
loaded, took = time.perf_counter() - start, memory("RssAnon") - before
with model.trace("What is this?", images=[picture], logits_to_keep=1):
    logits = model.logits.save()
"""
THEIRS = """
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
before, start = memory("RssAnon"), time.perf_counter()
model = Qwen3VLForConditionalGeneration.from_pretrained(sys.argv[1])
loaded, took = time.perf_counter() - start, memory("RssAnon") - before
processor = AutoProcessor.from_pretrained(sys.argv[1])
content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
)
with torch.no_grad():
    logits = model(**inputs, logits_to_keep=1).logits
"""
TAIL = """
print(json.dumps({"token": int(logits[0, -1].argmax()), "logit": float(logits.max()), "load": loaded, "took": took,
                  "peak": memory("VmHWM")}))
"""


@dataclass
class Fresh:
    """A script in an interpreter of its own; `told` is what its runs have told."""

    script: str
    checkpoint: Path
    threads: int
    told: list[dict[str, float]] = field(default_factory=list)

    def time(self) -> float:
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-c", HEAD + self.script + TAIL, str(self.checkpoint)]
        start = time.perf_counter()
        output = subprocess.run(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True
        ).stdout
        us = (time.perf_counter() - start) * 1e6
        self.told.append(json.loads(output.splitlines()[-1]))
        return us

    def counted(self, what: str, count: int) -> list[float]:
        """A figure of the last `count` runs, those that are not for warming up."""
        return [told[what] for told in self.told[-count:]]


def check(engines: Mapping[str, Fresh]) -> None:
    """Both see the same prompt: the likeliest token and its logit agree."""
    ours, theirs = (engine.told[-1] for engine in engines.values())
    if ours["token"] != theirs["token"] or abs(ours["logit"] - theirs["logit"]) > 1e-4:
        raise AssertionError(f"first logits differ: {ours} and {theirs}")


def run(sizes: Sizes) -> list[Row]:
    name = sizes.models[-1]
    checkpoint, threads, reps = folder(name), sizes.threads or os.cpu_count() or 1, sizes.long
    engines = {"ours": Fresh(OURS, checkpoint, threads)}
    if sizes.peers:
        engines["transformers"] = Fresh(THEIRS, checkpoint, threads)
    times = interleaved(engines, reps)
    seconds = {engine: [us / 1e6 for us in each] for engine, each in times.items()}
    weights = (checkpoint / "model.safetensors").stat().st_size / 2**20
    rows = []
    for engine, fresh in engines.items():
        rows += [
            row(f"{name}: fresh interpreter to first logits: {engine}", seconds[engine], unit="s"),
            row(f"{name}: load: {engine}", fresh.counted("load", reps), unit="s"),
            row(f"{name}: peak of the process, weights of {weights:,.0f} MiB: {engine}", fresh.counted("peak", reps), unit="MiB"),
        ]
    # Memory that is no mapped file's: weights that were copied are in it.
    copied = engines["ours"].counted("took", reps)
    rows.append(row(f"{name}: memory of load besides the mapped file", copied, target=COPIED_MIB, unit="MiB"))
    if sizes.peers:
        check(engines)
        loads = [engine.counted("load", reps) for engine in engines.values()]
        rows += [
            row(f"{name}: first logits, of transformers' time", ratios(seconds["ours"], seconds["transformers"]), target=FIRST_LOGITS, unit="x"),
            row(f"{name}: load, of from_pretrained", ratios(*loads), target=LOAD, unit="x"),
        ]
    return rows
