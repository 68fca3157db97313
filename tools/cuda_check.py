"""Checks vlscope on a CUDA device, in some minutes: the kernels against torch's operations on the CPU, traces of the
built-in model against those of the CPU, what must not wait for the device; and takes their times.

    ./dev build && .venv/bin/python tools/cuda_check.py --json cuda.json

It needs this repository as built, torch and a driver. `--device cpu` goes through all of it without a device, on the
operators' CPU implementations. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bindings"))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention, silu  # noqa: E402

import vlscope  # noqa: E402
from vlscope.demo import QUESTION, picture  # noqa: E402

OPS = torch.ops.vlscope
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Of results of size one, against the same in float32.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
#: Of traces in float32, relative to the largest number of a value.
TRACE_TOLERANCE = 1e-4


@dataclass
class Report:
    """What was found: checks by name, times in microseconds by name."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    times: list[dict[str, Any]] = field(default_factory=list)

    def check(self, name: str, off: float, allowed: float) -> None:
        met = off <= allowed  # False for NaN
        self.checks.append({"name": name, "off": off, "allowed": allowed, "met": met})
        if not met:
            print(f"DIFFERS  {name}: {off:.3g}, {allowed:.3g} is allowed", flush=True)

    @property
    def failed(self) -> int:
        return sum(not check["met"] for check in self.checks)


def difference(value: Tensor, expected: Tensor) -> float:
    """The largest, over the size of the numbers or one; where both are infinite they agree."""
    value, expected = value.detach().double().cpu(), expected.detach().double().cpu()
    if value.shape != expected.shape:
        return math.inf
    if value.numel() == 0:
        return 0.0
    same = value == expected
    return ((value - expected).abs() / expected.abs().clamp(min=1)).masked_fill(same, 0).max().item()


# --- the operators ---


@dataclass(frozen=True)
class Case:
    """A call of an operator, and the dtype whose rounding its result has."""

    name: str
    op: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    options: dict[str, Any]
    dtype: torch.dtype

    def run(self, device: str, dtype: torch.dtype) -> Tensor:
        """On `device`, with the numbers as `dtype` and indices and masks as they are."""
        moved = [x.to(device, dtype if x.is_floating_point() else x.dtype) for x in self.inputs]
        return self.op(*moved, **self.options)


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype).float()

    for head_dim in (16, 33, 64, 72, 80, 128, 256):
        bounds = torch.tensor([0, 1, 65, 65, 70, 198, 300], dtype=torch.int32)
        q, k, v = (numbers(300, 3, head_dim) for _ in range(3))
        scale = head_dim**-0.5
        yield Case(f"segmented, {head_dim}", OPS.segmented_attention, (q, k, v, bounds), {"scale": scale}, dtype)
        chosen = {"max_seqlen": 128, "scale": scale, "heads": [2, 0], "rows": [299, 0, 66, 66]}
        yield Case(f"segmented rows, {head_dim}", OPS.segmented_attention_rows, (q, k, bounds), chosen, dtype)
        for queries, keys in ((1, 1), (1, 515), (7, 130), (200, 200)):
            q = numbers(2, 6, queries, head_dim)
            k, v = numbers(2, 2, keys, head_dim), numbers(2, 2, keys, head_dim)
            name, options = f"causal, {queries} of {keys}, {head_dim}", {"scale": scale}
            yield Case(name, OPS.causal_attention, (q, k, v), options, dtype)
            yield Case(f"{name}, window", OPS.causal_attention, (q, k, v), {**options, "window": 17}, dtype)
            seen = torch.rand(2, 1, queries, keys, generator=random) > 0.3
            seen[..., 0] = True
            yield Case(f"{name}, mask", OPS.causal_attention, (q, k, v, seen), options, dtype)
            rows = {**options, "heads": [5, 0], "queries": [queries - 1, 0]}
            yield Case(f"{name}, rows", OPS.causal_attention_rows, (q, k, seen), rows, dtype)
            scores = {**rows, "probabilities": False}
            yield Case(f"{name}, scores", OPS.causal_attention_rows, (q, k), scores, dtype)


def row_cases(dtype: torch.dtype) -> Iterator[Case]:
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype).float()

    for width in (1, 72, 128, 2048, 5120):
        x, weight = numbers(9, width), numbers(width)
        for zero_centered in (False, True):
            options = {"eps": 1e-6, "zero_centered": zero_centered}
            yield Case(f"norm, {width}, {zero_centered}", OPS.rms_norm, (x, weight), options, dtype)
    x, cos, sin = numbers(2, 7, 5, 128).transpose(1, 2), numbers(2, 1, 7, 128).cos(), numbers(2, 1, 7, 128).sin()
    yield Case("rotate", OPS.rotate, (x, cos.to(dtype).float(), sin.to(dtype).float()), {}, dtype)
    yield Case("rotate, part", OPS.rotate, (x, cos[..., :64], sin[..., :64]), {}, dtype)
    yield Case("swiglu", OPS.swiglu, (numbers(9, 6145) * 4, numbers(9, 6145)), {}, dtype)


def check_operators(report: Report, device: str) -> None:
    """Every operator on the device against the same in float32 on the CPU."""
    for dtype in DTYPES:
        for case in (*attention_cases(dtype), *row_cases(dtype)):
            # A key that is hidden has the least score that the dtype has, or less.
            found, expected = (
                case.run(*where).float().clamp(min=torch.finfo(dtype).min)
                for where in ((device, dtype), ("cpu", torch.float32))
            )
            off = difference(found, expected)
            # Scores and gated products grow with their terms; their roundings do so, too.
            report.check(f"{case.name}, {dtype}", off, 4 * TOLERANCE[dtype])


def check_bits(report: Report, device: str) -> None:
    """Where no sum is taken, the kernels give the bits of torch's own operations on the device."""
    for dtype in DTYPES:
        gate, up = torch.randn(2, 33, 517, device=device).to(dtype)
        report.check(f"swiglu to the bit, {dtype}", float((OPS.swiglu(gate, up) != silu(gate) * up).sum()), 0)
        x = torch.randn(2, 5, 9, 64, device=device).to(dtype)
        cos, sin = torch.rand(2, 2, 1, 9, 64, device=device).to(dtype)
        half = torch.cat((-x[..., 32:], x[..., :32]), -1)
        report.check(f"rotate to the bit, {dtype}", float((OPS.rotate(x, cos, sin) != x * cos + half * sin).sum()), 0)


# --- traces ---


def demo_inputs() -> dict[str, Any]:
    return {"images": [picture("red"), picture("blue", size=(128, 64))]}


def on(device: str, **options: Any) -> vlscope.StandardizedTransformer:
    return vlscope.load("demo", device=device, **options)


def values(model: vlscope.StandardizedTransformer) -> dict[str, Tensor]:
    """The values of one trace that a study reads most, by site."""
    sites = ["vision.layers.*.layer_output", "vision.image_features", "layers.*.layer_output", "logits"]
    with model.trace(demo_messages(), **demo_inputs()) as tracer:
        kept = tracer.cache(sites)
        rows = [block.self_attn.attention_row(-1).save() for block in model.layers]
    return {**kept, **{f"row {k}": row for k, row in enumerate(rows)}}


def demo_messages() -> list[dict[str, Any]]:
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}]


def check_traces(report: Report, device: str) -> None:
    cpu, other = on("cpu", dtype=torch.float32), on(device, dtype=torch.float32)
    expected, found = values(cpu), values(other)
    for site, value in expected.items():
        size = value.abs().max().item()
        report.check(f"trace: {site}", difference(found[site].cpu() / size, value / size), TRACE_TOLERANCE)
    for name, run in {"ablated": ablated, "edited gate": edited_gate, "gradient": gradient}.items():
        value = run(cpu)
        size = value.abs().max().item()
        report.check(f"trace: {name}", difference(run(other).cpu() / size, value / size), TRACE_TOLERANCE)
    tokens = [model.generate(demo_messages(), **demo_inputs(), max_new_tokens=4).result for model in (cpu, other)]
    report.check("generated tokens", float((tokens[0] != tokens[1].cpu()).sum()), 0)


def split(device: str) -> dict[str, str]:
    """Every other block on the last device there is, or on the CPU where there is one device alone."""
    count = torch.cuda.device_count() if torch.device(device).type == "cuda" else 0
    other = f"cuda:{count - 1}" if count > 1 else "cpu"
    blocks = vlscope.load("demo", dispatch=False).num_layers
    return {"": device, **{f"layers.{k}": other for k in range(1, blocks, 2)}}


def place(device: torch.device) -> tuple[str, int]:
    """A device as what it is: "cuda" is "cuda:0"."""
    return device.type, device.index or 0


def check_placements(report: Report, device: str) -> None:
    """Blocks of a model on several devices, against all on one."""
    expected = values(on("cpu", dtype=torch.float32))
    for name, device_map in {"split": split(device), "auto": "auto"}.items():
        model = vlscope.load("demo", dtype=torch.float32, device_map=device_map)
        found = values(model)
        for k in range(model.num_layers):
            away = place(found[f"layers.{k}.layer_output"].device) != place(model.device_map[f"layers.{k}"])
            report.check(f"{name}: block {k} on its device", float(away), 0)
        for site, value in expected.items():
            size = value.abs().max().item()
            report.check(f"{name}: {site}", difference(found[site].cpu() / size, value / size), TRACE_TOLERANCE)


def ablated(model: vlscope.StandardizedTransformer) -> Tensor:
    with model.trace(demo_messages(), **demo_inputs()):
        model.vision.image_features[:] = 0
        return model.logits.save()


def edited_gate(model: vlscope.StandardizedTransformer) -> Tensor:
    with model.trace(demo_messages(), **demo_inputs()):
        model.layers[1].mlp.act_fn.output[:] *= 0.5
        return model.logits.save()


def gradient(model: vlscope.StandardizedTransformer) -> Tensor:
    with model.trace(demo_messages(), **demo_inputs()):
        features = model.vision.image_features
        features.requires_grad_()
        model.logits[:, -1].max().backward()
    assert features.grad is not None
    return features.grad


def check_promises(report: Report, device: str) -> None:
    """Reading changes no bit, and does not wait for the device."""
    model = on(device)
    inputs = model.encode(demo_messages(), **demo_inputs())
    plain = model(inputs).logits
    with model.trace(inputs):
        for block in model.vision.layers:
            _ = block.self_attn.image_attention_probabilities
        for block in model.layers:
            _ = block.self_attn.attention_probabilities
            _ = block.mlp.act_fn.output
        watched = model.logits.save()
    report.check("reads leave the bits of the logits", float((watched != plain).sum()), 0)
    saved: list[Tensor] = []
    try:
        with waiting_forbidden(device), model.trace(inputs):
            saved += [block.layer_output.save() for block in model.vision.layers]
            saved += [block.layer_output.save() for block in model.layers]
            saved.append(model.logits.save())
        waited = 0
    except RuntimeError as error:
        print(error)
        waited = 1
    report.check("a trace waits for nothing", waited, 0)
    report.check(
        "saved values are on the device", float(any(x.device.type != torch.device(device).type for x in saved)), 0
    )


@contextlib.contextmanager
def waiting_forbidden(device: str) -> Iterator[None]:
    """torch raises where it would wait for the device."""
    if torch.device(device).type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- times ---


def microseconds(run: Callable[[], Any], device: str, reps: int) -> list[float]:
    """Of each run, after one to warm up. On CUDA from the device's own clock."""
    run()
    times = []
    for _ in range(reps):
        if torch.device(device).type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e6)
    return times


def works(device: str, dtype: torch.dtype, scale: int) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """What is timed, with torch's way to the same; sizes of the 8B model, divided by `scale`."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for images in (1, 16):
        patches = 784 // scale
        q, k, v = (numbers(images * patches, 16, 72) for _ in range(3))
        bounds = torch.arange(images + 1, dtype=torch.int32) * patches

        def one_by_one(q: Tensor = q, k: Tensor = k, v: Tensor = v, images: int = images) -> Tensor:
            parts = [[part.transpose(0, 1)[None] for part in x.chunk(images)] for x in (q, k, v)]
            return torch.cat([scaled_dot_product_attention(*part) for part in zip(*parts)], 2)

        def at_once(q: Tensor = q, k: Tensor = k, v: Tensor = v, bounds: Tensor = bounds) -> Tensor:
            return OPS.segmented_attention(q, k, v, bounds, 72**-0.5)

        yield f"vision attention, {images} images", at_once, one_by_one
    for queries, keys in ((236, 236), (4096, 4096), (1, 4096)):
        queries, keys = max(queries // scale, 1), keys // scale
        q, k, v = numbers(1, 32, queries, 128), numbers(1, 8, keys, 128), numbers(1, 8, keys, 128)

        def ours(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return OPS.causal_attention(q, k, v, scale=128**-0.5)

        def torchs(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)

        yield f"text attention, {queries} of {keys}", ours, torchs

        def row(q: Tensor = q, k: Tensor = k) -> Tensor:
            return OPS.causal_attention_rows(q, k, scale=128**-0.5, heads=list(range(32)), queries=[q.shape[2] - 1])

        def composed_row(q: Tensor = q, k: Tensor = k) -> Tensor:
            return (q[:, :, -1:] @ k.repeat_interleave(4, 1).transpose(2, 3) * 128**-0.5).softmax(-1)

        yield f"last row of 32 heads, {keys} keys", row, composed_row
    x, weight, gate, up = numbers(236, 4096), numbers(4096), numbers(236, 12288), numbers(236, 12288)
    heads, tables = numbers(1, 32, 236, 128), numbers(2, 1, 1, 236, 128)

    def composed_norm() -> Tensor:
        wide = x.float()
        return weight * (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(dtype)

    def composed_rotate() -> Tensor:
        return heads * tables[0] + torch.cat((-heads[..., 64:], heads[..., :64]), -1) * tables[1]

    yield "RMSNorm", lambda: OPS.rms_norm(x, weight, 1e-6), composed_norm
    yield "rotary embedding", lambda: OPS.rotate(heads, tables[0], tables[1]), composed_rotate
    yield "SwiGLU", lambda: OPS.swiglu(gate, up), lambda: silu(gate) * up


def take_times(report: Report, device: str, reps: int, scale: int) -> None:
    def note(name: str, dtype: torch.dtype, times: list[float], peer: list[float] | None) -> None:
        row = {"name": name, "dtype": str(dtype), "us": statistics.median(times), "all": times}
        row["torch_us"] = None if peer is None else statistics.median(peer)
        report.times.append(row)
        beside = "" if peer is None else f"   torch {row['torch_us']:10.1f}"
        print(f"{name:36} {dtype!s:16} {row['us']:10.1f} us{beside}", flush=True)

    for dtype in (torch.float32, torch.bfloat16):
        for name, ours, torchs in works(device, dtype, scale):
            note(name, dtype, microseconds(ours, device, reps), microseconds(torchs, device, reps))
    start = time.perf_counter()
    model = on(device)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    note("load of the built-in model", model.dtype, [(time.perf_counter() - start) * 1e6], None)
    inputs = model.encode(demo_messages(), **demo_inputs())
    note("forward of the built-in model", model.dtype, microseconds(lambda: model(inputs), device, reps), None)


# --- the whole ---


def about(device: str) -> dict[str, Any]:
    is_cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "vlscope": vlscope.__version__,
        "kernels": vlscope.cuda_kernels(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all that was found here")
    parser.add_argument("--reps", type=int, default=50, help="timed runs of each work; 0 for none")
    parser.add_argument("--scale", type=int, default=1, help="divides the lengths of what is timed")
    arguments = parser.parse_args()
    device, report = arguments.device, Report()
    if torch.device(device).type == "cuda" and not vlscope.cuda_kernels():
        parser.error("vlscope was built without its CUDA library, or there is no device: build it where nvcc is")
    found = about(device)
    print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    torch.manual_seed(0)
    for part in (check_operators, check_bits, check_traces, check_placements, check_promises):
        part(report, device)
        print(f"{part.__name__}: {len(report.checks)} checks so far, {report.failed} differ", flush=True)
    if arguments.reps:
        take_times(report, device, arguments.reps, arguments.scale)
    if arguments.json:
        arguments.json.write_text(json.dumps({**found, "checks": report.checks, "times": report.times}, indent=1))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
