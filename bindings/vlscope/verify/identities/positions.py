"""M-RoPE: three positions for each token, folded into one cos and sin, applied to queries and keys."""

from __future__ import annotations

from typing import Any

import torch

from ..prompts import Inputs
from .identity import Model, Prompts, attending, close, equal, identity, logits_of, recurrent, require, text_config


def _positions(model: Model, inputs: Inputs) -> torch.Tensor:
    """[3, batch, seq]: time, row and column."""
    with model.trace(**inputs):
        args, kwargs = model.model.language_model.rotary_emb.inputs
    positions: torch.Tensor = args[1] if len(args) > 1 else kwargs["position_ids"]
    return positions[-3:]


def _rope(model: Model) -> dict[str, Any]:
    """Of config.json, in either form of its keys."""
    text = text_config(model)
    return {"rope_theta": text.get("rope_theta"), **(text.get("rope_parameters") or text["rope_scaling"])}


@identity()
def text_positions_count_up_on_all_three_axes(model: Model, prompts: Prompts) -> None:
    length = prompts.text["input_ids"].shape[1]
    equal(_positions(model, prompts.text), torch.arange(length).expand(3, 1, -1).clone(), "positions")


@identity()
def an_image_takes_one_time_and_its_rows_and_columns(model: Model, prompts: Prompts) -> None:
    inputs = prompts.one_image
    positions = _positions(model, inputs)[:, 0]
    mask = (inputs["input_ids"] == model.config["image_token_id"])[0]
    _, height, width = (inputs["image_grid_thw"][0] // torch.tensor([1, 2, 2])).tolist()
    time, row, column = positions[:, mask]
    start = int(mask.int().argmax())
    equal(time, torch.full_like(time, start), "times of an image")
    equal(row, start + torch.arange(height).repeat_interleave(width), "rows of an image")
    equal(column, start + torch.arange(width).repeat(height), "columns of an image")
    after = positions[:, start + height * width].tolist()
    require(after == [start + max(height, width)] * 3, f"the token after the image stands at {after}")


@identity()
def padding_counts_for_nothing(model: Model, prompts: Prompts) -> None:
    inputs = prompts.padded_text
    positions, together = _positions(model, inputs), logits_of(model, inputs)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        equal(positions[:, row, mask], torch.arange(int(mask.sum())).expand(3, -1).clone(), f"positions of row {row}")
        alone = logits_of(model, {"input_ids": inputs["input_ids"][row : row + 1, mask]})
        close(together[row, mask], alone[0], f"logits of row {row}", tolerance=1e-4)


@identity(lambda model: not recurrent(model))
def queries_and_keys_are_the_rotated_projections(model: Model, prompts: Prompts) -> None:
    """Dimension i turns together with dimension i + head_dim / 2; Qwen3-VL norms each head before."""
    attention = model.layers[attending(model)[0]].self_attn
    normed = hasattr(attention, "q_norm")
    for inputs in (prompts.text, prompts.two_images):
        with model.trace(**inputs):
            cos, sin = (x.clone()[:, None] for x in model.model.language_model.rotary_emb.output)
            modules = (attention.q_norm, attention.k_norm) if normed else (attention.q_proj, attention.k_proj)
            raw = [module.output if normed else module.output.unflatten(-1, (-1, model.head_dim)) for module in modules]
            served = attention.attention_queries, attention.attention_keys
        for name, x, rotated in zip(("queries", "keys"), raw, served, strict=True):
            x = x.transpose(1, 2)
            a, b = x.chunk(2, dim=-1)
            equal(rotated, x * cos + torch.cat((-b, a), dim=-1) * sin, f"attention_{name}")


@identity()
def cos_and_sin_turn_each_frequency_by_its_axis(model: Model, prompts: Prompts) -> None:
    """The Qwen2 lines give each axis a section of the frequencies, the others deal them out in turn."""
    rope, inputs = _rope(model), prompts.two_images
    with model.trace(**inputs):
        cos, sin = (x.clone() for x in model.model.language_model.rotary_emb.output)
    half = cos.shape[-1] // 2
    sections = rope["mrope_section"]
    if model.family.startswith("qwen2"):
        axis = torch.arange(3).repeat_interleave(torch.tensor(sections))
    else:
        axis = torch.zeros(half, dtype=torch.long)
        for k in (1, 2):
            axis[k : sections[k] * 3 : 3] = k
    positions = _positions(model, inputs)[:, 0].double()
    angles = positions[axis].T / rope["rope_theta"] ** (torch.arange(half).double() / half)
    close(cos[0], torch.cat([angles, angles], -1).cos().float(), "cos", tolerance=1e-4)
    close(sin[0], torch.cat([angles, angles], -1).sin().float(), "sin", tolerance=1e-4)
