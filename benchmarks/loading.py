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
from measure import Row, Sizes, Times, interleaved, ratios, row

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
picture = Image.linear_gradient("L").resize((448, 448)).convert("RGB")
"""
WEIGHTS = """
import vlscope
before, start = memory("RssAnon"), time.perf_counter()
model = vlscope.load(sys.argv[1], task="text-generation")
print(json.dumps({"load": time.perf_counter() - start, "took": memory("RssAnon") - before}))
"""
OURS = """
import vlscope
start = time.perf_counter()
model = vlscope.load(sys.argv[1])
loaded = prepared = time.perf_counter() - start
with model.trace("What is this?", images=[picture], logits_to_keep=1):
    logits = model.logits.save()
"""
THEIRS = """
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
start = time.perf_counter()
model = Qwen3VLForConditionalGeneration.from_pretrained(sys.argv[1])
loaded = time.perf_counter() - start
processor = AutoProcessor.from_pretrained(sys.argv[1])
prepared = time.perf_counter() - start
content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
)
with torch.no_grad():
    logits = model(**inputs, logits_to_keep=1).logits
"""
TAIL = """
print(json.dumps({"token": int(logits[0, -1].argmax()), "logit": float(logits.max()), "load": loaded,
                  "prepared": prepared, "peak": memory("VmHWM")}))
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
        command = [sys.executable, "-c", HEAD + self.script, str(self.checkpoint)]
        start = time.perf_counter()
        output = subprocess.run(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True
        ).stdout
        us = (time.perf_counter() - start) * 1e6
        self.told.append(json.loads(output.splitlines()[-1]))
        return us

    def counted(self, count: int) -> dict[str, list[float]]:
        """The figures of the last `count` runs, those that are not for warming up."""
        return {what: [told[what] for told in self.told[-count:]] for what in self.told[-1]}


def check(*engines: Fresh) -> None:
    """Both see the same prompt: the likeliest token and its logit agree."""
    ours, theirs = (engine.told[-1] for engine in engines)
    if ours["token"] != theirs["token"] or abs(ours["logit"] - theirs["logit"]) > 1e-4:
        raise AssertionError(f"first logits differ: {ours} and {theirs}")


def run(sizes: Sizes) -> list[Row]:
    name, threads, reps = sizes.models[-1], sizes.threads or os.cpu_count() or 1, sizes.long
    scripts = {"weights": WEIGHTS, "ours": OURS + TAIL}
    if sizes.peers:
        scripts["transformers"] = THEIRS + TAIL
    fresh = {engine: Fresh(script, folder(name), threads) for engine, script in scripts.items()}
    times = interleaved(fresh, reps)
    seconds = {engine: [us / 1e6 for us in each] for engine, each in times.items()}
    told = {engine: each.counted(reps) for engine, each in fresh.items()}
    mebibytes = (folder(name) / "model.safetensors").stat().st_size / 2**20
    rows = [
        row(f"{name}: weights alone, load", told["weights"]["load"], unit="s"),
        row(f"{name}: memory of load besides the mapped file", told["weights"]["took"], target=COPIED_MIB, unit="MiB"),
    ]
    for engine in list(scripts)[1:]:
        peak = f"{name}: peak of the process, {mebibytes:,.0f} MiB of it the file: {engine}"
        rows += [
            row(f"{name}: fresh interpreter to first logits: {engine}", seconds[engine], unit="s"),
            row(f"{name}: weights and processor, load: {engine}", told[engine]["prepared"], unit="s"),
            row(peak, told[engine]["peak"], unit="MiB"),
        ]
    return rows + (_against_transformers(name, seconds, told, fresh) if sizes.peers else [])


def _against_transformers(
    name: str, seconds: Times, told: Mapping[str, Mapping[str, list[float]]], fresh: Mapping[str, Fresh]
) -> list[Row]:
    check(fresh["ours"], fresh["transformers"])
    ours, theirs = told["ours"], told["transformers"]
    shares = {
        "first logits, of transformers' time": (seconds["ours"], seconds["transformers"], FIRST_LOGITS),
        "weights alone, of from_pretrained": (told["weights"]["load"], theirs["load"], LOAD),
        "weights and processor, of transformers' two": (ours["prepared"], theirs["prepared"], LOAD),
    }
    return [row(f"{name}: {what}", ratios(a, b), target=most, unit="x") for what, (a, b, most) in shares.items()]
