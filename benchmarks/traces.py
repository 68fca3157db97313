"""What common traces cost, beside transformers with hooks, nnsight and TransformerLens.

Each engine runs in a process of its own (`engines/`) on the same checkpoint and inputs, and each
repetition asks every one of them once, in a shuffled order. Nothing is timed that does not deliver what
transformers with forward hooks delivers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import remote
import torch
from checkpoints import folder
from inputs import patched_prompts
from measure import Row, Sizes, Times, columns, interleaved, number, ratios, row

import vlscope

#: Work -> what it is. Every one is a run of a prompt with an image.
WORKS = {
    "nothing": "nothing saved, all logits",
    "last_logits": "nothing saved, last logits",
    "one_value": "one value (block 1)",
    "every_layer": "every text block",
    "every_vision_block": "every vision block",
    "last_rows": "last attention row, every block",
    "zeroed": "image and DeepStack zeroed",
    "layer_sweep": "layer sweep, last logits",
    "position_sweep": "layer x position sweep",
}
TOLERANCE = 1e-4
TOLERANCES = {"position_sweep": 1e-5}  # whose faster mode promises as much
#: Works whose logits an edit must have moved.
EDITS = ("zeroed", "layer_sweep")
#: Patches along a side of the image, positions of the layer x position sweep.
MODELS = {"tiny": (4, 12), "cut2b": (28, 8), "2b": (28, 3)}

RECORDED_SWEEP = 0.5  # of as many forwards
POSITION_SWEEP = 1 / 7  # of transformers with hooks
POSITION_SWEEP_CACHED = 1 / 4  # of that with the vision features cached by hand

Works = Mapping[str, Mapping[str, remote.RemoteWork]]  # by work, then by engine


class WrongResult(AssertionError):
    """An engine delivered something else than the others."""


def works_of(processes: Sequence[remote.Process]) -> Works:
    return {
        work: {
            engine: remote.RemoteWork(process, engine, work)
            for process in processes
            for engine, able in process.engines.items()
            if work in able
        }
        for work in WORKS
    }


def check(works: Works) -> None:
    """Logits are those of transformers at 1e-4, what is delivered is what hooks deliver, and edits move logits."""
    plain = {work: works[work]["transformers"].deliver() for work in ("nothing", "last_logits")}
    for work, engines in works.items():
        wanted = plain.get(work) or engines["hooks"].deliver()
        for name, engine in engines.items():
            _compare(f"{name}: {WORKS[work]}", engine.deliver(), wanted, TOLERANCES.get(work, TOLERANCE))
    for work in EDITS:
        for name, engine in works[work].items():
            before = plain["nothing" if work == "zeroed" else "last_logits"][0]
            if any(torch.allclose(after, before, rtol=1e-3, atol=1e-3) for after in engine.deliver()):
                raise WrongResult(f"{name}: {WORKS[work]}: an edit did not move the logits")


def _compare(what: str, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> None:
    """Equal numbers; engines differ in the axes of size 1 that they keep."""
    if len(found) != len(wanted):
        raise WrongResult(f"{what}: {len(found)} tensors were delivered, not {len(wanted)}")
    for a, b in zip(found, wanted, strict=True):
        if a.numel() != b.numel():
            raise WrongResult(f"{what}: a tensor of {list(a.shape)} was delivered, not {list(b.shape)}")
        error = (a.double().flatten() - b.double().flatten()).abs().max().item()
        if not error <= tolerance * max(1.0, b.abs().max().item()):
            raise WrongResult(f"{what}: off by {error:.1e}")


def check_recording(works: Works) -> None:
    """A sweep over a recording is the sweep over its prompt, bit for bit."""
    sweep = works["layer_sweep"]
    for a, b in zip(sweep["ours"].deliver(), sweep["ours, no recording"].deliver(), strict=True):
        if not torch.equal(a, b):
            raise WrongResult("a sweep over a recording gave other bits than the sweep over its prompt")


def measured(name: str, sizes: Sizes) -> list[Row]:
    side, places = MODELS[name]
    checkpoint = folder(name)
    model = vlscope.load(checkpoint)
    inputs, blocks = patched_prompts(model, side, places), model.num_layers
    del model
    wanted = list(remote.MODULES) if sizes.peers else ["ours"]
    modules = [module for module in wanted if remote.installed(module)]
    threads = sizes.threads or (1 if name == "tiny" else os.cpu_count() or 1)
    reps = max(sizes.short // 10, 2) if name == "tiny" else sizes.long
    with remote.started(modules, checkpoint, inputs, threads) as processes:
        works = works_of(processes)
        if sizes.peers:
            check(works)
        check_recording(works)
        flat = {(work, engine): each for work, engines in works.items() for engine, each in engines.items()}
        found = interleaved(flat, reps)
    times = {work: {engine: found[work, engine] for engine in engines} for work, engines in works.items()}
    return [
        row(f"{name}: {WORKS[work]}: {engine}", [us / 1000 for us in each], unit="ms", peer=_peer(of, engine))
        for work, of in times.items()
        for engine, each in of.items()
    ] + _against_targets(name, times, blocks)


def _peer(times: Times, engine: str) -> list[float] | None:
    """Hooks do the same work for a user of transformers; where nothing is saved, transformers itself."""
    peer = "hooks" if "hooks" in times else "transformers"
    return [us / 1000 for us in times[peer]] if engine.startswith("ours") and peer in times else None


def _against_targets(name: str, times: Mapping[str, Times], blocks: int) -> list[Row]:
    sweep, forwards = times["layer_sweep"]["ours"], times["last_logits"]["ours, untraced"]
    share = ratios(sweep, [blocks * us for us in forwards])
    rows = [row(f"{name}: layer sweep over a recording, of as many forwards", share, target=RECORDED_SWEEP, unit="x")]
    positions = times["position_sweep"]
    for peer, target in (("hooks", POSITION_SWEEP), ("hooks, vision cached", POSITION_SWEEP_CACHED)):
        if peer in positions:
            what = f"{name}: layer x position sweep, of transformers with {peer}"
            rows.append(row(what, ratios(positions["ours"], positions[peer]), target=target, unit="x"))
    return rows


def run(sizes: Sizes) -> list[Row]:
    return [figure for name in sizes.models for figure in measured(name, sizes)]


def text(rows: Sequence[Row]) -> str:
    """A matrix of medians for each model: works down, engines across."""
    parts = []
    found = [figure.what.split(": ") for figure in rows if figure.unit == "ms"]
    cells = {figure.what: number(figure.value) for figure in rows}
    for name in dict.fromkeys(model for model, _, _ in found):
        engines = list(dict.fromkeys(engine for model, _, engine in found if model == name))
        works = list(dict.fromkeys(work for model, work, _ in found if model == name))
        lines = [[f"{name}, ms", *engines]]
        lines += [[work, *(cells.get(f"{name}: {work}: {engine}", "") for engine in engines)] for work in works]
        parts.append(columns(lines))
    return "\n\n".join(parts)
