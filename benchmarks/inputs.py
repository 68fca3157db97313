"""Inputs of the benchmarks: prompts of random ids and random pixels, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import vlscope

TEXT_TOKENS = 17  # 5 before the image, 12 after it; two more enclose it


def image_prompt(
    config: Mapping[str, Any], side: int, seed: int = 0, images: int = 1, text: int = TEXT_TOKENS
) -> dict[str, torch.Tensor]:
    """`images` images of `side` x `side` patches in a row, and `text` tokens of text around them.

    Prompts that differ in `seed` alone have the same ids and other pixels.
    """
    vision = config["vision_config"]
    ordinary = min(100_000, config["vision_start_token_id"] - 8)
    words = torch.randint(10, ordinary, (text,), generator=torch.Generator().manual_seed(7)).tolist()
    tokens = side * side // vision["spatial_merge_size"] ** 2
    image = [config["vision_start_token_id"], *[config["image_token_id"]] * tokens, config["vision_end_token_id"]]
    ids = torch.tensor([words[:5] + image * images + words[5:]])
    width = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    pixels = torch.randn(images * side * side, width, generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, side, side]] * images),
    }


def patched_prompts(model: vlscope.StandardizedTransformer, side: int, places: int) -> dict[str, Any]:
    """A corrupted prompt, a clean one with another image, the clean run's value at the last position of
    each block, and `places` positions spread over the prompt."""
    corrupted, clean = (image_prompt(model.config, side, seed) for seed in (0, 1))
    with torch.no_grad(), model.trace(**clean):
        rows = [layer.layer_output[:, -1].clone() for layer in model.layers]
    last = corrupted["input_ids"].shape[1] - 1
    positions = sorted({round(k * last / (places - 1)) for k in range(places)})
    return {"corrupted": corrupted, "clean": clean, "rows": rows, "positions": positions, "metric": (11, 12)}
