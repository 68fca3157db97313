"""The forward on the CPU at real widths: beside transformers sdpa, what is not computed, and how much of it is
the machine's own matrix product.

The share of matrix products and their speed come from torch's profiler: operations and seconds of every
`mm`, `addmm` and `bmm`. The machine's own speed is the best of large products, measured in the same run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from checkpoints import folder
from inputs import image_prompt
from measure import Row, Sizes, Times, Work, interleaved, ratios, row, threads
from overhead import load_peer, peer_forward

import vlscope

NOT_SLOWER = 1.0  # than transformers sdpa
PATCHES_AS_PRODUCT = 4.0  # times as fast at that op
IMAGES = 16
SIDE, SMALL_SIDE = 28, 14  # patches along an image, and along each of several

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
CONVOLUTIONS = ("aten::mkldnn_convolution", "aten::slow_conv3d_forward", "aten::convolution_overrideable")
LARGE = 2048  # rows and columns of the product that tells the machine's speed

Inputs = Mapping[str, torch.Tensor]
Model = vlscope.StandardizedTransformer


def ours(model: Model, run: Inputs) -> dict[str, Callable[[], Any]]:
    def last_logits() -> None:
        with model.trace(**run, logits_to_keep=1):
            _ = model.logits

    def next_token() -> None:
        with model.trace(**run):
            _ = model.next_token_probs

    def early_stop() -> None:
        with model.trace(**run):
            _ = model.layers[0].layer_output

    def skipped() -> None:
        with model.trace(**run):
            for layer in model.layers[1:]:
                layer.skip(layer.input)
            _ = model.next_token_probs

    works = (last_logits, next_token, early_stop, skipped)
    return {"forward": lambda: model(**run).logits, **{work.__name__: work for work in works}}


def images(model: Model, several: Inputs, one: Inputs) -> dict[str, Callable[[], Any]]:
    def features(run: Inputs) -> torch.Tensor:
        with model.trace(**run):
            return model.vision.image_features

    return {
        "images together": lambda: features(several),
        "images one by one": lambda: [features(one) for _ in range(IMAGES)],
    }


def operations(event: Any) -> int:
    """Floating-point operations of a matrix product, from the shapes that it was called with."""
    shapes = [shape for shape in event.input_shapes if len(shape) >= 2]
    left, right = shapes[-2:]
    return 2 * math.prod(left) * right[-1]


def profiled(model: Model, run: Inputs) -> dict[str, float]:
    """Shares of the forward's time, and the speed of its products in operations a second."""
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        model(**run)
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CPU]

    def seconds(*names: str) -> float:
        return sum(event.self_cpu_time_total for event in events if event.name in names) / 1e6

    total = sum(event.self_cpu_time_total for event in events) / 1e6
    done = sum(operations(event) for event in events if event.name in PRODUCTS)
    return {
        "products": seconds(*PRODUCTS) / total,
        "attention": seconds(ATTENTION) / total,
        "patches": seconds(*CONVOLUTIONS) / total,
        "speed": done / seconds(*PRODUCTS),
    }


def machine_speed(reps: int = 5) -> float:
    """Operations a second of the best of a few large products."""
    a, b = torch.randn(2, LARGE, LARGE)
    return 2 * LARGE**3 / (min(Work(lambda: a @ b).time() for _ in range(reps)) / 1e6)


def check(model: Model, peer: Any, run: Inputs, several: Inputs) -> None:
    """Logits are transformers', and an image's features do not depend on the images beside it."""
    torch.testing.assert_close(model(**run).logits, peer_forward(peer, run)(), rtol=1e-4, atol=1e-4)
    first = {**several, "pixel_values": several["pixel_values"][: SMALL_SIDE**2]}
    first["image_grid_thw"] = several["image_grid_thw"][:1]
    one = image_prompt(model.config, SMALL_SIDE)
    first["input_ids"], first["attention_mask"] = one["input_ids"], one["attention_mask"]
    works = images(model, several, first)
    together, alone = works["images together"](), works["images one by one"]()[0]
    torch.testing.assert_close(together[: len(alone)], alone, rtol=1e-4, atol=1e-4)


def run(sizes: Sizes) -> list[Row]:
    with threads(sizes.threads or os.cpu_count() or 1):
        return measured(sizes.models[-1], sizes)


def measured(name: str, sizes: Sizes) -> list[Row]:
    model = vlscope.load(folder(name))
    prompt = image_prompt(model.config, SIDE)
    several, one = image_prompt(model.config, SMALL_SIDE, images=IMAGES), image_prompt(model.config, SMALL_SIDE)
    works = ours(model, prompt) | images(model, several, one)
    if sizes.peers:
        peer = load_peer(model)
        check(model, peer, prompt, several)
        works["peer"], works["peer, last logits"] = (
            peer_forward(peer, prompt),
            peer_forward(peer, prompt, logits_to_keep=1),
        )
    with torch.no_grad():
        times = interleaved({what: Work(work) for what, work in works.items()}, sizes.long)
        rows = _time_rows(name, times) + _profile_rows(name, model, prompt, sizes.long)
        rows += patch_embedding(name, model, prompt, sizes.long)
        return rows + packing(name, model, prompt, sizes.long)


def _time_rows(name: str, times: Times) -> list[Row]:
    def milliseconds(what: str) -> list[float]:
        return [us / 1000 for us in times[what]]

    titles = {
        "forward": "untraced forward, all logits",
        "last_logits": "trace, last logits",
        "next_token": "trace, next-token probabilities",
        "early_stop": "trace, one value of block 0",
        "skipped": "trace, all blocks but the first skipped",
    }
    peer = milliseconds("peer") if "peer" in times else None
    rows = [row(f"{name}: {title}", milliseconds(work), unit="ms", peer=peer) for work, title in titles.items()]
    if peer:
        last = ratios(times["last_logits"], times["peer, last logits"])
        rows += [
            row(
                f"{name}: untraced forward, of transformers sdpa",
                ratios(times["forward"], times["peer"]),
                target=NOT_SLOWER,
                unit="x",
            ),
            row(f"{name}: last logits, of transformers sdpa with logits_to_keep=1", last, target=NOT_SLOWER, unit="x"),
        ]
    for work in ("next_token", "early_stop", "skipped"):
        share = ratios(times[work], times["forward"])
        rows.append(row(f"{name}: {titles[work]}, of the whole forward", share, target=NOT_SLOWER, unit="x"))
    together = ratios(times["images together"], times["images one by one"])
    return [
        *rows,
        row(
            f"{name}: {IMAGES} images in one prompt, of {IMAGES} runs of the tower",
            together,
            target=NOT_SLOWER,
            unit="x",
        ),
    ]


def _profile_rows(name: str, model: Model, prompt: Inputs, reps: int) -> list[Row]:
    found = [{**profiled(model, prompt), "machine": machine_speed()} for _ in range(reps)]
    speeds = [each["speed"] / each["machine"] for each in found]

    def of(what: str, scale: float = 1.0) -> list[float]:
        return [each[what] * scale for each in found]

    return [
        row(f"{name}: matrix products, share of the forward", of("products"), unit="x"),
        row(f"{name}: attention kernels, share of the forward", of("attention"), unit="x"),
        row(f"{name}: patch convolution, share of the forward", of("patches"), unit="x"),
        row(f"{name}: matrix products, speed", of("speed", 1e-9), unit="GF/s"),
        row(f"{name}: the machine's own products, speed", of("machine", 1e-9), unit="GF/s"),
        row(f"{name}: matrix products, of the machine's own speed", speeds, unit="x"),
    ]


def patch_embedding(name: str, model: Model, prompt: Inputs, reps: int) -> list[Row]:
    """The convolution that keeps the reference's bits, and the same numbers as a matrix product."""
    other = vlscope.load(model.folder, patch_embedding="matmul")

    def embed(which: Model) -> Callable[[], Any]:
        def embedding() -> None:
            with which.trace(**prompt):
                _ = which.vision.patch_embeddings

        return embedding

    works = {"convolution": Work(embed(model)), "product": Work(embed(other))}
    times = interleaved(works, max(reps, 5))
    faster = ratios(times["convolution"], times["product"])
    title = f"{name}: patch embedding as a product, times as fast"
    return [row(title, faster, target=PATCHES_AS_PRODUCT, unit="x", at_least=True)]


def packing(name: str, model: Model, prompt: Inputs, reps: int) -> list[Row]:
    """What it would give to keep weights once more, in the layout that their kernel wants."""
    rows, width = prompt["input_ids"].shape[1], model.config["text_config"]["hidden_size"]
    weight, x = model.layers[0].mlp.up_proj.weight, torch.randn(rows, width)
    works = {"product": Work(lambda: torch.nn.functional.linear(x, weight))}
    if torch.backends.mkl.is_available():
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
        works["packed product"] = Work(lambda: torch.ops.mkl._mkl_linear(x, packed, weight, None, rows))
    kernel = model.vision.patch_embed.proj.weight
    patches = prompt["pixel_values"].view(-1, *kernel.shape[1:])
    steps = ([0, 0, 0], kernel.shape[2:], [1, 1, 1], 1)
    works["convolution"] = Work(lambda: torch.conv3d(patches, kernel, stride=kernel.shape[2:]))
    if torch.backends.mkldnn.is_available():
        reordered = torch._C._nn.mkldnn_reorder_conv3d_weight(kernel.to_mkldnn(), *steps, patches.shape)
        works["packed convolution"] = Work(lambda: torch.mkldnn_convolution(patches, reordered, None, *steps))
    times = interleaved(works, max(reps, 5))
    return [
        row(
            f"{name}: {what} with a packed weight, of the plain one",
            ratios(times[f"packed {what}"], times[what]),
            unit="x",
        )
        for what in ("product", "convolution")
        if f"packed {what}" in times
    ]
