"""Models larger than memory: what it costs to widen weights as they are used, and what memory that takes.

The checkpoint is stored in bfloat16. A model that streams it is set beside a resident one in float32, in
one process, in turns: the last logits of an image prompt, and a step of a generation, where every weight is
widened for one token. Their logits are the same bits before anything is timed. Memory is that of
processes of their own: what is theirs alone (anonymous), and the peak with the mapped file.

`8b-bf16` is run when it is asked for (`./dev bench streaming --shape 8b-bf16`): 17.5 GB, of which no resident
model in float32 is made. Its trace begins with a file that is not in memory.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import folder
from inputs import image_prompt
from measure import Row, Sizes, Work, interleaved, ratios, row, threads

import vlscope

IMAGE_PROMPT = 1.25  # of the resident model's time
#: Of the head in float32 and the activations: room for small weights and what the allocator keeps.
ANONYMOUS = 1.25
SIDE = 28  # patches along the image
STEPS = 4  # of a generation
RESIDENT, STREAMED = {"dtype": "float32"}, {"weights": "stream"}
LARGEST_RESIDENT = 8 << 30  # stored bytes

#: One image trace: its seconds, and MiB at the peak. What is saved are the last rows of every block.
TRACE = """
import json, os, re, sys, threading, time
from pathlib import Path
import torch, vlscope
def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
folder, options, inputs, cold = sys.argv[1], json.loads(sys.argv[2]), torch.load(sys.argv[3]), sys.argv[4] == "cold"
if cold:
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
base, peak, done = memory("RssAnon"), 0.0, threading.Event()
def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, memory("RssAnon"))
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
model = vlscope.load(folder, **options)
start = time.perf_counter()
with torch.no_grad(), model.trace(**inputs, logits_to_keep=1):
    features = model.vision.image_features.save()
    rows = [layer.layer_output[:, -1].save() for layer in model.layers]
    logits = model.logits.save()
seconds = time.perf_counter() - start
done.set()
watcher.join()
assert logits.isfinite().all()
print(json.dumps({"seconds": seconds, "anonymous": peak - base, "peak": memory("VmHWM")}))
"""


def stored_in_half(name: str) -> str:
    return name if name.endswith("-bf16") else f"{name}-bf16"


def one_trace(
    checkpoint: Path, options: Mapping[str, Any], inputs: Mapping[str, Any], count: int, cold: bool
) -> dict[str, Any]:
    """What a process of its own, of `count` threads, tells of one image trace."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "inputs.pt"
        torch.save(dict(inputs), path)
        command = [sys.executable, "-c", TRACE, checkpoint, json.dumps(options), path, "cold" if cold else "warm"]
        variables = {**os.environ, "OMP_NUM_THREADS": str(count)}
        output = subprocess.check_output(list(map(str, command)), text=True, env=variables)
    return json.loads(output.splitlines()[-1])


def widened_bytes(config: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> int:
    """The head in float32, and the activations of a text block, as memory.py counts them."""
    text = config["text_config"]
    seq = inputs["input_ids"].shape[1]
    block = seq * (text["hidden_size"] + 3 * text["intermediate_size"])
    return 4 * (text["vocab_size"] * text["hidden_size"] + block)


def last_logits(model: vlscope.StandardizedTransformer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad(), model.trace(**inputs, logits_to_keep=1):
        return model.logits.clone()


def steps(model: vlscope.StandardizedTransformer, inputs: Mapping[str, torch.Tensor], count: int) -> None:
    assert model.generate(**inputs, max_new_tokens=count, eos_token_id=[]).result.shape[1] >= count


def times(name: str, checkpoint: Path, inputs: Mapping[str, torch.Tensor], reps: int) -> list[Row]:
    """The two kinds of models in turns."""
    models = {"resident": vlscope.load(checkpoint, **RESIDENT), "streamed": vlscope.load(checkpoint, **STREAMED)}
    given = [last_logits(model, inputs) for model in models.values()]
    if not torch.equal(*given):
        raise AssertionError("the two have other logits")
    text = {"input_ids": inputs["input_ids"][:, :5]}
    works: dict[tuple[str, str], Work] = {}
    for kind, model in models.items():
        works[kind, "prompt"] = Work(lambda model=model: last_logits(model, inputs))
        works[kind, "one"] = Work(lambda model=model: steps(model, text, 1))
        works[kind, "steps"] = Work(lambda model=model: steps(model, text, 1 + STEPS))
    found = interleaved(works, reps)
    step = {kind: [(a - b) / STEPS for a, b in zip(found[kind, "steps"], found[kind, "one"])] for kind in models}
    rows = []
    for what, by_kind, target in (
        ("image prompt, last logits", {kind: found[kind, "prompt"] for kind in models}, IMAGE_PROMPT),
        ("a token of a generation", step, None),
    ):
        rows += [row(f"{name}: {what}: {kind}", _ms(us), unit="ms") for kind, us in by_kind.items()]
        shares = ratios(by_kind["streamed"], by_kind["resident"])
        rows.append(row(f"{name}: {what}, streamed, of the resident", shares, target=target, unit="x"))
    return rows


def _ms(us: Sequence[float]) -> list[float]:
    return [each / 1000 for each in us]


def run(sizes: Sizes) -> list[Row]:
    name = stored_in_half(sizes.models[-1])
    checkpoint, count = folder(name), sizes.threads or os.cpu_count() or 1
    config = vlscope.load(checkpoint, dispatch=False).config
    inputs = image_prompt(config, SIDE)
    stored = (checkpoint / "model.safetensors").stat().st_size
    resident = stored <= LARGEST_RESIDENT
    rows = []
    with threads(count):
        if resident:
            rows += times(name, checkpoint, inputs, sizes.long)
            gc.collect()  # a model is held in circles, and its memory is wanted below
    for kind, options in {"resident": RESIDENT, "streamed": STREAMED}.items():
        if kind == "resident" and not resident:
            continue
        told = one_trace(checkpoint, options, inputs, count, cold=not resident)
        mib = stored / 2**20
        rows.append(row(f"{name}: anonymous memory at its peak: {kind}", [told["anonymous"]], unit="MiB"))
        rows.append(row(f"{name}: peak with the file of {mib:,.0f} MiB: {kind}", [told["peak"]], unit="MiB"))
        if not resident:
            rows.append(row(f"{name}: image trace, from the disk: {kind}", [told["seconds"]], unit="s"))
    most = None if name == "tiny-bf16" else ANONYMOUS  # beside small widths, the interpreter counts
    share = told["anonymous"] * 2**20 / widened_bytes(config, inputs)
    rows.append(
        row(f"{name}: anonymous memory, of the head widened and a block's values", [share], target=most, unit="x")
    )
    return rows
