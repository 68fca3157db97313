"""Qwen3.5's recurrent blocks: the state behind each token, what reads it and what writes it."""

from __future__ import annotations

import torch

from ...sites import expand
from ..prompts import Inputs
from .identity import (
    Model,
    Prompts,
    close,
    equal,
    identity,
    logits_of,
    mixer,
    moved,
    recurrent,
    require,
    routes,
    text_config,
    values,
)

WRITTEN = ("attention_queries", "attention_keys", "attention_values", "decays", "betas", "states")
#: Tokens of a prompt that takes more than two chunks of the recurrence.
LONG = 150


def _recurs(model: Model) -> bool:
    return bool(recurrent(model))


def _long(prompts: Prompts) -> Inputs:
    words = prompts.text["input_ids"]
    ids = words.repeat(1, -(-LONG // words.shape[1]))[:, :LONG]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@identity(_recurs)
def a_block_has_the_one_mixer_that_its_config_names(model: Model, prompts: Prompts) -> None:
    text = text_config(model)
    every = text.get("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(model.num_layers)]
    for i, kind in enumerate(text.get("layer_types") or default):
        here, other = ("linear_attn", "self_attn")[:: 1 if kind == "linear_attention" else -1]
        require(hasattr(model.layers[i], here), f"layers.{i} has no {here}")
        require(not hasattr(model.layers[i], other), f"layers.{i} has a {other} too")
    found = expand(model, "layers.*.linear_attn.states")
    require(found == [f"{mixer(model, i)}.states" for i in recurrent(model)], f"layers.*.linear_attn is {found}")


@identity(_recurs)
def states_are_the_recurrence_and_the_heads_read_them(model: Model, prompts: Prompts) -> None:
    """S = exp(decay) S + k (beta (v - S k)), o = S q, for unit k and q, q over the root of its width."""
    at = mixer(model, recurrent(model)[0])
    names = ("attention_queries", "attention_keys", "attention_values", "decays", "betas", "state", "states")
    q, k, v, decays, betas, state, states, heads, last = values(
        model, _long(prompts), *(f"{at}.{name}" for name in (*names, "attention_head_outputs", "state_output"))
    )
    require(decays.max() <= 0 and betas.min() >= 0 and betas.max() <= 1, f"{at}.decays or {at}.betas is out of range")
    require(state.count_nonzero() == 0 and states.dtype == torch.float32, f"{at}.state")
    q, k = _unit(q) / q.shape[-1] ** 0.5, _unit(k)
    for t in range(q.shape[1]):
        state = state * decays[:, t].exp()[..., None, None]
        written = betas[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        close(states[:, t], state, f"{at}.states[:, {t}]")
    close(heads, torch.einsum("bthk,bthkv->bthv", q, states), f"{at}.attention_head_outputs", tolerance=1e-4)
    close(last, states[:, -1], f"{at}.state_output", tolerance=1e-4)


@identity(_recurs)
def reading_states_leaves_the_logits_as_they_are(model: Model, prompts: Prompts) -> None:
    prompt = _long(prompts)

    def look() -> None:
        for i in recurrent(model):
            host = model.layers[i].linear_attn
            _ = host.state_after(70), host.states, host.state_output

    equal(logits_of(model, prompt, look), logits_of(model, prompt), "logits")


@identity(_recurs)
def a_write_moves_later_logits_only(model: Model, prompts: Prompts) -> None:
    clean, position, host = logits_of(model, prompts.text), 5, model.layers[recurrent(model)[0]].linear_attn
    for name in WRITTEN:
        edited = logits_of(
            model,
            prompts.text,
            lambda name=name: getattr(host, name)[:, position:].mul_(-0.5),  # type: ignore[misc]
        )
        # Heads are made token by token from written states, where a prompt goes by chunks.
        tolerance = 1e-4 if name == "states" or routes(model) else 0.0
        close(edited[:, :position], clean[:, :position], f"logits before a write to {name}", tolerance)
        moved(edited[:, position:], clean[:, position:], f"the rest of the logits after a write to {name}")


@identity(_recurs)
def the_state_after_a_token_is_that_of_the_states(model: Model, prompts: Prompts) -> None:
    host = model.layers[recurrent(model)[0]].linear_attn
    with model.trace(**prompts.text):
        rows = [host.state_after(t) for t in (0, 4, -1)]
        states = host.states
    for row, t in zip(rows, (0, 4, -1), strict=True):
        equal(row, states[:, t].clone(), f"state_after({t})")


@identity(_recurs)
def a_state_put_behind_a_token_is_read_by_it_and_gone_on_from(model: Model, prompts: Prompts) -> None:
    block, token, prompt = recurrent(model)[0], 70, _long(prompts)
    at, host = mixer(model, block), model.layers[block].linear_attn
    names = ("attention_queries", "states", "attention_head_outputs")
    q, states, heads = values(model, prompt, *(f"{at}.{name}" for name in names))
    other = states[:, 20].clone()
    with model.trace(**prompt):
        host.set_state_after(token, other)
        after = host.state_after(token + 1)
        new_states, new_heads = host.states, host.attention_head_outputs
        last, logits = host.state_output, model.logits
    equal(new_states[:, :token], states[:, :token], "states before the token")
    equal(new_states[:, token].clone(), other, "states at the token")
    equal(new_states[:, token + 1].clone(), after, "states behind the token")
    close(new_heads[:, :token], heads[:, :token], "heads before the token", tolerance=1e-4)
    read = torch.einsum("bhk,bhkv->bhv", _unit(q[:, token]) / q.shape[-1] ** 0.5, other)
    close(new_heads[:, token], read, "heads at the token", tolerance=1e-4)
    close(last, new_states[:, -1], "state_output", tolerance=1e-4)
    clean = logits_of(model, prompt)
    close(logits[:, :token], clean[:, :token], "logits before the token", tolerance=1e-4)
    moved(logits[:, token:], clean[:, token:], "the rest of the logits")


@identity(_recurs)
def each_step_starts_from_the_state_that_the_last_one_left(model: Model, prompts: Prompts) -> None:
    hosts = [model.layers[i].linear_attn for i in recurrent(model)]
    left: list[torch.Tensor] = []
    found: list[torch.Tensor | None] = []
    with model.generate(**prompts.one_image, max_new_tokens=3, eos_token_id=[]) as tracer:
        for _ in tracer.iter[:]:
            for host in hosts:
                found.append(None if host.state_input is None else host.state_input.clone())
                left.append(host.state_output.clone())
    require(all(state is None for state in found[: len(hosts)]), "state_input of a fresh prompt is not None")
    for i, (state, before) in enumerate(zip(found[len(hosts) :], left, strict=False)):
        equal(state, before, f"state_input of step {1 + i // len(hosts)}")
