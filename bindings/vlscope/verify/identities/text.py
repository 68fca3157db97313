"""The text model: aliases, sums, patterns, writes, helpers, sizes."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import Unavailable
from ...sites import dims, expand, read
from ...tree import KINDS
from .identity import (
    Model,
    Prompts,
    attending,
    close,
    equal,
    has_several_blocks,
    identity,
    logits_of,
    mixer,
    moved,
    raises,
    require,
    routes,
    text_config,
    values,
)

INTERIOR = (
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_scores",
    "attention_probabilities",
    "attention_head_outputs",
)


@identity()
def short_names_and_native_paths_are_one_object(model: Model, prompts: Prompts) -> None:
    native = model.model.language_model
    last = model.num_layers - 1
    with model.trace(**prompts.text):
        tokens = native.embed_tokens.output
        require(model.token_embeddings is tokens and model.embed_tokens.output is tokens, "token_embeddings")
        layer = model.layers[last]
        stream = native.layers[last].input
        require(layer.layer_input is stream and layer.input is stream, f"layers.{last}.layer_input")
        require(layer.mlp.mlp_output is native.layers[last].mlp.output, f"layers.{last}.mlp.mlp_output")
        stream = native.layers[last].output
        require(layer.layer_output is stream and layer.output is stream, f"layers.{last}.layer_output")
        require(model.norm.output is native.norm.output, "norm.output")
        require(model.logits is model.lm_head.output, "logits")


@identity()
def a_block_adds_its_mixer_and_its_mlp_to_the_stream(model: Model, prompts: Prompts) -> None:
    for inputs in (prompts.text, prompts.two_images, prompts.padded_mixed):
        parts = [
            (f"layers.{i}.layer_input", f"{mixer(model, i)}.attention_output", f"layers.{i}.mlp.mlp_output")
            for i in range(model.num_layers)
        ]
        for i, sites in enumerate(parts):
            x, attention, mlp, out = values(model, inputs, *sites, f"layers.{i}.layer_output")
            equal(x + attention + mlp, out, f"layers.{i}.layer_output")


@identity()
def the_norms_feed_the_mixer_and_the_mlp(model: Model, prompts: Prompts) -> None:
    for i in range(model.num_layers):
        at = f"layers.{i}"
        fed = ("input_layernorm.output", f"{mixer(model, i).rpartition('.')[2]}.input")
        normed, into_mixer, second, into_mlp = values(
            model,
            prompts.one_image,
            *(f"{at}.{site}" for site in (*fed, "post_attention_layernorm.output", "mlp.input")),
        )
        equal(into_mixer, normed, f"{mixer(model, i)}.input")
        equal(into_mlp, second, f"{at}.mlp.input")


@identity()
def a_norm_is_served_after_its_weight(model: Model, prompts: Prompts) -> None:
    eps = text_config(model)["rms_norm_eps"]
    x, normed = values(model, prompts.text, "layers.0.input", "layers.0.input_layernorm.output")
    weight = model.layers[0].input_layernorm.weight
    gain = 1 + weight if model.family.startswith("qwen3_5") else weight
    equal(normed, gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)), "layers.0.input_layernorm.output")


@identity()
def a_pattern_is_causal_and_its_rows_sum_to_one(model: Model, prompts: Prompts) -> None:
    for i in attending(model):
        at = f"layers.{i}.self_attn"
        names = ("attention_queries", "attention_scores", "attention_probabilities")
        queries, scores, pattern = values(model, prompts.one_image, *(f"{at}.{name}" for name in names))
        batch, heads, length, _ = queries.shape
        require(pattern.shape == (batch, heads, length, length), f"{at}.attention_probabilities is {pattern.shape}")
        require(pattern.triu(1).count_nonzero() == 0, f"{at}.attention_probabilities looks ahead")
        close(pattern.sum(-1), torch.ones(batch, heads, length), f"rows of {at}.attention_probabilities")
        equal(pattern, scores.softmax(-1), f"{at}.attention_probabilities")


@identity()
def two_traces_give_the_same_bits(model: Model, prompts: Prompts) -> None:
    equal(logits_of(model, prompts.two_images), logits_of(model, prompts.two_images), "logits")


@identity()
def what_is_read_leaves_the_logits_as_they_are(model: Model, prompts: Prompts) -> None:
    inputs = prompts.padded_mixed
    with torch.no_grad():
        untraced = model(**inputs).logits
    *_, logits = values(model, inputs, *expand(model, ["layers.*.layer_output", "logits"]))
    equal(logits, untraced, "logits")


@identity()
def an_interior_write_moves_later_logits_only(model: Model, prompts: Prompts) -> None:
    clean, position, at = logits_of(model, prompts.text), 5, attending(model)[0]
    for value in INTERIOR:
        # Heads are made another way, once a pattern is written; and where later tokens go to other experts, the
        # products of their experts have other numbers of rows, on which the last bits of each row depend.
        same = close if value in ("attention_scores", "attention_probabilities") or routes(model) else equal

        def edit(value: str = value) -> None:
            tensor = getattr(model.layers[at].self_attn, value)
            rows = tensor[:, position:] if value == "attention_head_outputs" else tensor[:, :, position:]
            rows.mul_(-0.5)

        edited = logits_of(model, prompts.text, edit)
        same(edited[:, :position], clean[:, :position], f"logits before a write to {value}")
        moved(edited[:, position:], clean[:, position:], f"the rest of the logits after a write to {value}")


@identity()
def an_assigned_pattern_is_what_the_heads_are_made_from(model: Model, prompts: Prompts) -> None:
    """Where each token sees itself alone, its head outputs are its values."""
    attention = model.layers[attending(model)[0]].self_attn
    with model.trace(**prompts.text):
        rows, scores = attention.attention_values, attention.attention_scores
        attention.attention_probabilities = torch.eye(scores.shape[-1]).expand_as(scores).clone()
        heads, edited = attention.attention_head_outputs, model.logits
    group = model.num_heads // model.num_kv_heads
    close(heads.transpose(1, 2), rows.repeat_interleave(group, 1), "attention_head_outputs")
    moved(edited, logits_of(model, prompts.text), "the logits")


@identity()
def a_zeroed_head_is_zero_where_it_is_read_and_moves_the_logits(model: Model, prompts: Prompts) -> None:
    def edit() -> None:
        attention = model.layers[attending(model)[0]].self_attn
        heads = attention.attention_head_outputs
        heads[:, :, -1] = 0
        require(attention.o_proj.input.view(heads.shape)[:, :, -1].count_nonzero() == 0, "o_proj.input")

    moved(logits_of(model, prompts.one_image, edit), logits_of(model, prompts.one_image), "the logits")


@identity()
def without_heads_every_position_gets_the_same_attention_output(model: Model, prompts: Prompts) -> None:
    with model.trace(**prompts.text):
        attention = model.layers[attending(model)[0]].self_attn
        attention.attention_head_outputs[:] = 0
        output = attention.attention_output
    equal(output, output[:, :1].expand_as(output).clone(), "attention_output")


@identity()
def a_key_head_serves_its_own_group_of_query_heads(model: Model, prompts: Prompts) -> None:
    at = attending(model)[0]
    (clean,) = values(model, prompts.text, f"layers.{at}.self_attn.attention_head_outputs")
    with model.trace(**prompts.text):
        model.layers[at].self_attn.attention_keys[:, 0] = 0
        changed = model.layers[at].self_attn.attention_head_outputs
    group = model.num_heads // model.num_kv_heads
    touched = (changed != clean).flatten(0, 1).any(0).any(-1).tolist()
    require(
        touched == [True] * group + [False] * (model.num_heads - group),
        f"key head 0 moved query heads {[head for head, moves in enumerate(touched) if moves]}, not the first {group}",
    )


@identity(has_several_blocks)
def skipped_layers_pass_the_stream_through(model: Model, prompts: Prompts) -> None:
    with model.trace(**prompts.text):
        first = model.layers[0].layer_output
        model.skip_layers(1, model.num_layers - 1)
        last = model.layers[-1].layer_output
        logits = model.logits
    equal(last, first, f"layers.{model.num_layers - 1}.layer_output")
    equal(logits, model.project_on_vocab(first), "logits")


@identity(has_several_blocks)
def skipping_with_a_tensor_puts_it_in_the_stream(model: Model, prompts: Prompts) -> None:
    zeros = torch.zeros(*prompts.text["input_ids"].shape, model.hidden_size)
    with model.trace(**prompts.text):
        model.skip_layer(0, skip_with=zeros)
        entering = model.layers[1].input
    equal(entering, zeros, "layers.1.input")


@identity()
def steering_adds_the_vector_at_the_positions_named(model: Model, prompts: Prompts) -> None:
    vector = torch.linspace(-1, 1, model.hidden_size)
    (clean,) = values(model, prompts.text, "layers.0.layer_output")
    with model.trace(**prompts.text):
        model.steer(0, vector, 2, -1)
        steered = model.layers[0].layer_output
    equal(steered[:, :-1], clean[:, :-1], "layers.0.layer_output before the last position")
    equal(steered[:, -1], clean[:, -1] + 2 * vector, "layers.0.layer_output at the last position")


@identity()
def the_last_block_projected_is_the_logits(model: Model, prompts: Prompts) -> None:
    out, logits = values(model, prompts.text, f"layers.{model.num_layers - 1}.layer_output", "logits")
    equal(model.project_on_vocab(out), logits, "logits")


@identity()
def assigned_ids_and_mask_are_another_prompt(model: Model, prompts: Prompts) -> None:
    other = prompts.padded_text
    first = prompts.text["input_ids"][:, :1].expand_as(other["input_ids"]).clone()
    with model.trace(input_ids=first):
        model.input_ids = other["input_ids"]
        model.attention_mask = other["attention_mask"]
        logits = model.logits
    equal(logits, logits_of(model, other), "logits")


@identity()
def the_result_carries_the_logits_as_they_were_left(model: Model, prompts: Prompts) -> None:
    with model.trace(**prompts.text) as tracer:
        logits = model.logits
        logits[:, 0] = 0
        require(tracer.result.logits is logits and model.output.logits is logits, "the result has other logits")
    require(logits[:, 0].count_nonzero() == 0 and logits[:, 1].count_nonzero() > 0, "logits[:, 0]")


@identity()
def next_token_probs_are_the_softmax_of_the_last_row(model: Model, prompts: Prompts) -> None:
    logits, probabilities = values(model, prompts.padded_mixed, "logits", "next_token_probs")
    close(probabilities, logits[:, -1].softmax(-1), "next_token_probs")
    close(probabilities.sum(-1), torch.ones(len(probabilities)), "the sum of next_token_probs")
    (alone,) = values(model, prompts.padded_mixed, "next_token_probs")
    equal(alone, probabilities, "next_token_probs, read alone")
    with model.trace(**prompts.text):
        model.logits[:, -1, -1] = 1e4
        written = model.next_token_probs
    require(written[0, -1] == 1, "next_token_probs after a write to the logits")


@identity()
def sizes_are_those_of_the_weights(model: Model, prompts: Prompts) -> None:
    attention = model.layers[attending(model)[0]].self_attn
    gated = 2 if model.family.startswith("qwen3_5") else 1
    sizes = {
        "lm_head": (model.lm_head.weight, (model.vocab_size, model.hidden_size)),
        "embed_tokens": (model.embed_tokens.weight, (model.vocab_size, model.hidden_size)),
        "q_proj": (attention.q_proj.weight, (gated * model.num_heads * model.head_dim, model.hidden_size)),
        "k_proj": (attention.k_proj.weight, (model.num_kv_heads * model.head_dim, model.hidden_size)),
    }
    for name, (weight, shape) in sizes.items():
        require(tuple(weight.shape) == shape, f"{name}.weight is {tuple(weight.shape)}, not {shape}")
    require(len(model.layers) == model.num_layers, "num_layers")
    require(len(model.vision.layers) == model.vision.num_layers, "vision.num_layers")


def _values(model: Model) -> list[tuple[Any, str, str | None]]:
    """(host, name, reason why it is unavailable) of every declared value."""
    hosts = [model.get(entry["path"]) if entry["path"] else model for entry in model._entries]
    return [
        (host, value.name, model._sites[host._values + offset].unavailable or None)
        for host in hosts
        for offset, value in enumerate(host._kind.values)
    ]


def _site(host: Any, name: str) -> str:
    return f"{host._site_path}.{name}".lstrip(".")


@identity()
def support_says_what_can_be_read(model: Model, prompts: Prompts) -> None:
    for host, name, reason in _values(model):
        if reason:
            message = raises(Unavailable, lambda host=host, name=name: getattr(host, name), _site(host, name))  # type: ignore[misc]
            require(reason in message, f"{_site(host, name)} says {message!r}, not {reason!r}")
    served = expand(model, [_site(host, name) for host, name, reason in _values(model) if not reason])
    values(model, prompts.images_and_videos, *served)


@identity()
def axes_of_one_name_have_one_size(model: Model, prompts: Prompts) -> None:
    """And those that name a size of the model have that size."""
    sizes: dict[tuple[bool, str], int] = {
        (False, "hidden_size"): model.hidden_size,
        (False, "vocab_size"): model.vocab_size,
        (False, "heads"): model.num_heads,
        (False, "kv_heads"): model.num_kv_heads,
        (False, "head_dim"): model.head_dim,
        (True, "vision_hidden_size"): model.vision.vision_hidden_size,
        (True, "heads"): model.vision.num_heads,
        (True, "head_dim"): model.vision.head_dim,
        (True, "patches"): len(prompts.one_image["pixel_values"]),
        (True, "image_tokens"): len(prompts.one_image["pixel_values"]) // 4,
    }
    declared = {_site(host, name): (host, name) for host, name, reason in _values(model) if not reason}
    sites = [site for site in expand(model, list(declared)) if not site.endswith("video_features")]
    with model.trace(**prompts.one_image):
        for site in sites:
            value = read(model, site)
            host, name = declared[site]
            if not isinstance(value, torch.Tensor):  # one tensor for each image, or no state yet
                continue
            require(isinstance(value, getattr(KINDS[host._kind.name], name).layout), f"{site} has another layout")
            for axis, size in zip(dims(model, site), value.shape, strict=True):
                known = sizes.setdefault((site.startswith("vision."), axis), size)
                require(size == known, f"{site} has {size} on the axis {axis}, which elsewhere has {known}")
