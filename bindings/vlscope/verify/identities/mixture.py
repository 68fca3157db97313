"""Mixtures of experts: sums of slots, routing by hand, ablations, writes in both forms."""

from __future__ import annotations

from typing import Any

import torch

from ...sites import read, write
from ..prompts import Inputs
from .identity import Model, Prompts, close, equal, identity, logits_of, mixtures, moved, require

VALUES = ("router_logits", "expert_weights", "expert_indices", "expert_outputs", "routed_output", "mlp_output")


def _mixed(model: Model) -> bool:
    return bool(mixtures(model))


def _shared(model: Model) -> bool:
    return _mixed(model) and hasattr(mixtures(model)[0], "shared_expert")


def _given(prompts: Prompts) -> tuple[Inputs, ...]:
    return prompts.text, prompts.padded_mixed, prompts.images_and_videos


def _expert(weights: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    """The matrix of one expert, in the dtype of `x`; a model that streams may have it in parts."""
    matrix = weights[expert]
    return (torch.cat(matrix) if isinstance(matrix, tuple) else matrix).to(x.dtype)


def _by_hand(mlp: Any, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """What the experts at `indices` make of each token: [batch, seq, top_k, hidden]."""
    slots = torch.empty(*indices.shape, x.shape[-1])
    for expert in set(indices.flatten().tolist()):
        batch, token, slot = (indices == expert).nonzero(as_tuple=True)
        rows = x[batch, token]
        gate, up = (rows @ _expert(mlp.experts.gate_up_proj, expert, x).T).chunk(2, -1)
        slots[batch, token, slot] = (torch.nn.functional.silu(gate) * up) @ _expert(mlp.experts.down_proj, expert, x).T
    return slots


@identity(_mixed)
def the_slots_sum_to_the_routed_output(model: Model, prompts: Prompts) -> None:
    for inputs in _given(prompts):
        with model.trace(**inputs):
            for mlp in mixtures(model):
                slots = mlp.expert_outputs
                shape = (*inputs["input_ids"].shape, mlp.top_k, model.hidden_size)
                require(tuple(slots.shape) == shape, f"expert_outputs is {tuple(slots.shape)}, not {shape}")
                equal(slots.sum(2), mlp.routed_output.clone(), "routed_output")


@identity(_mixed)
def a_mixture_is_its_routed_part_and_its_shared_expert(model: Model, prompts: Prompts) -> None:
    with model.trace(**prompts.padded_mixed):
        for mlp in mixtures(model):
            routed = mlp.routed_output.clone()
            total = routed + mlp.shared_expert_output if _shared(model) else routed
            equal(mlp.mlp_output.clone(), total, "mlp_output")


@identity(_shared)
def the_shared_expert_passes_its_gate(model: Model, prompts: Prompts) -> None:
    for mlp in mixtures(model):
        with model.trace(**prompts.two_images):
            x, shared = mlp.input.clone(), mlp.shared_expert_output.clone()
        own = mlp.shared_expert
        made = own.down_proj(torch.nn.functional.silu(own.gate_proj(x)) * own.up_proj(x))
        close(shared, mlp.shared_expert_gate(x).sigmoid() * made, "shared_expert_output")


@identity(_mixed)
def weights_are_the_largest_of_the_softmax_and_sum_to_one(model: Model, prompts: Prompts) -> None:
    for inputs in _given(prompts):
        with model.trace(**inputs):
            for mlp in mixtures(model):
                found, indices = mlp.router_logits.softmax(-1, dtype=torch.float32).topk(mlp.top_k)
                equal(mlp.expert_indices.clone(), indices, "expert_indices")
                equal(mlp.expert_weights.clone(), found / found.sum(-1, keepdim=True), "expert_weights")


@identity(_mixed)
def each_slot_is_its_expert_computed_by_hand(model: Model, prompts: Prompts) -> None:
    for mlp in mixtures(model):
        with model.trace(**prompts.two_images):
            x = mlp.input.clone()
            weights, indices = mlp.expert_weights.clone(), mlp.expert_indices.clone()
            slots = mlp.expert_outputs.clone()
        close(slots, _by_hand(mlp, x, indices) * weights[..., None], "expert_outputs")


@identity(_mixed)
def a_weight_of_zero_takes_out_exactly_its_slot(model: Model, prompts: Prompts) -> None:
    inputs, mlp = prompts.two_images, mixtures(model)[0]
    with model.trace(**inputs):
        slots = mlp.expert_outputs.clone()
    with model.trace(**inputs):
        mlp.expert_weights[..., -1] = 0
        kept, routed = mlp.expert_outputs.clone(), mlp.routed_output.clone()
        logits = model.logits
    slots[..., -1, :] = 0
    equal(kept, slots, "expert_outputs")
    equal(routed, slots.sum(2), "routed_output")
    equal(logits_of(model, inputs, lambda: mlp.expert_outputs[..., -1, :].zero_()), logits, "logits of a zeroed slot")
    moved(logits, logits_of(model, inputs), "the logits without a slot")


@identity(_mixed)
def a_masked_expert_is_chosen_by_no_token(model: Model, prompts: Prompts) -> None:
    with model.trace(**prompts.padded_mixed):
        for mlp in mixtures(model):
            mlp.router_logits[..., 0] = -torch.inf
            found, indices = mlp.router_logits.softmax(-1).topk(mlp.top_k)
            require(not (mlp.expert_indices == 0).any(), "expert_indices names the masked expert")
            equal(mlp.expert_indices.clone(), indices, "expert_indices")
            equal(mlp.expert_weights.clone(), found / found.sum(-1, keepdim=True), "expert_weights")
            require(mlp.mlp_output.isfinite().all(), "mlp_output is not finite")


@identity(_mixed)
def a_changed_index_keeps_its_weight(model: Model, prompts: Prompts) -> None:
    mlp = mixtures(model)[0]
    with model.trace(**prompts.two_images):
        x, weights = mlp.input.clone(), mlp.expert_weights.clone()
        indices = (mlp.expert_indices + 1) % mlp.num_experts
        mlp.expert_indices = indices
        slots = mlp.expert_outputs.clone()
    close(slots, _by_hand(mlp, x, indices) * weights[..., None], "expert_outputs")


@identity(_mixed)
def an_edit_in_place_an_assignment_and_the_flat_form_do_the_same(model: Model, prompts: Prompts) -> None:
    mlp = mixtures(model)[0]
    for name in VALUES:
        site = f"{mlp._site_path}.{name}"

        def rolled(site: str = site) -> torch.Tensor:
            value: torch.Tensor = read(model, site)
            return value.roll(1, -1)

        forms = (
            lambda site=site, rolled=rolled: read(model, site).copy_(rolled()),
            lambda site=site, rolled=rolled: write(model, site, rolled()),
            lambda site=site, rolled=rolled: write(model, site, rolled().flatten(0, 1)),
        )
        usable = forms[:2] if name == "mlp_output" else forms  # the native output of the whole has the axis of prompts
        first, *others = (logits_of(model, prompts.padded_mixed, form) for form in usable)
        for other in others:
            equal(other, first, f"logits after a write to {site}")


@identity(_mixed)
def rows_of_one_prompt_are_edited_alone(model: Model, prompts: Prompts) -> None:
    inputs, mlp = prompts.padded_mixed, mixtures(model)[0]
    clean = logits_of(model, inputs)
    edited = logits_of(model, inputs, lambda: mlp.expert_outputs[1].zero_())
    # Where the edit sends tokens to other experts further on, those of the other prompts share theirs with
    # other rows, and the last bits of a row of a matrix product depend on how many rows there are.
    close(edited[[0, 2]], clean[[0, 2]], "logits of the other prompts")
    moved(edited[1], clean[1], "the logits of the edited prompt")
