"""What holds of every family's text model: aliases, sums, patterns, writes, helpers, sizes."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch

import vlscope
from identities.models import QWEN3_VL
from sites import collect, difference

INTERIOR = (
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_scores",
    "attention_probabilities",
    "attention_head_outputs",
)


def logits_of(model, inputs, edit=lambda: None):
    with model.trace(**inputs):
        edit()
        return model.logits.save()


def test_short_names_and_native_paths_are_one_object(model, prompts):
    native = model.model.language_model.layers[1]
    with model.trace(**prompts.text):
        assert model.embed_tokens.output is model.model.language_model.embed_tokens.output
        assert model.token_embeddings is model.embed_tokens.output
        layer = model.layers[1]
        assert layer.layer_input is layer.input is native.input
        assert layer.self_attn.attention_output is native.self_attn.output[0]
        assert layer.mlp.mlp_output is native.mlp.output
        assert layer.layer_output is layer.output is native.output
        assert model.norm.output is model.model.language_model.norm.output
        assert model.logits is model.lm_head.output


def test_a_block_adds_its_attention_and_mlp_to_the_stream(model, prompts):
    for inputs in (prompts.text, prompts.two_images, prompts.padded_mixed):
        for i in range(model.num_layers):
            at = f"layers.{i}"
            x, attn, mlp, out = collect(
                model,
                inputs,
                f"{at}.layer_input",
                f"{at}.self_attn.attention_output",
                f"{at}.mlp.mlp_output",
                f"{at}.layer_output",
            )
            assert torch.equal(x + attn + mlp, out)


def test_the_norms_feed_the_attention_and_the_mlp(model, prompts):
    normed, attn, second, mlp = collect(
        model,
        prompts.one_image,
        "layers.1.input_layernorm.output",
        "layers.1.self_attn.input",
        "layers.1.post_attention_layernorm.output",
        "layers.1.mlp.input",
    )
    assert torch.equal(normed, attn) and torch.equal(second, mlp)


def test_a_norm_is_served_after_its_weight(model, prompts):
    x, normed = collect(model, prompts.text, "layers.1.input", "layers.1.input_layernorm.output")
    weight = model.layers[1].input_layernorm.weight
    eps = model.config["text_config"]["rms_norm_eps"]
    assert torch.equal(weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)), normed)
    assert (weight - 1).abs().max() > 1e-3


def test_a_pattern_is_causal_and_its_rows_sum_to_one(model, prompts):
    queries, scores, pattern = collect(
        model,
        prompts.one_image,
        *(f"layers.1.self_attn.{n}" for n in ("attention_queries", "attention_scores", "attention_probabilities")),
    )
    batch, heads, length, _ = queries.shape
    assert pattern.shape == (batch, heads, length, length) and pattern.dtype == queries.dtype
    assert pattern.triu(1).count_nonzero() == 0
    torch.testing.assert_close(pattern.sum(-1), torch.ones(batch, heads, length))
    assert torch.equal(scores.softmax(-1), pattern)


def test_two_traces_give_the_same_bits(model, prompts):
    assert torch.equal(logits_of(model, prompts.two_images), logits_of(model, prompts.two_images))


@pytest.mark.parametrize("value", INTERIOR)
def test_an_interior_write_moves_later_logits_only(model, prompts, value):
    clean, position = logits_of(model, prompts.text), 5

    def edit():
        tensor = getattr(model.layers[1].self_attn, value)
        rows = tensor[:, position:] if value == "attention_head_outputs" else tensor[:, :, position:]
        rows.mul_(-0.5)

    edited = logits_of(model, prompts.text, edit)
    # sdpa makes its heads another way, once a pattern is written; and where later tokens go to other experts, the
    # products of their experts have other numbers of rows, on which the last bits of each row depend.
    if value in ("attention_scores", "attention_probabilities") or model.family.endswith("moe"):
        torch.testing.assert_close(edited[:, :position], clean[:, :position], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(edited[:, :position], clean[:, :position])
    assert (edited[:, position:] - clean[:, position:]).abs().max() > 1e-3


def test_an_assigned_pattern_moves_the_logits(model, prompts):
    clean = logits_of(model, prompts.text)

    def edit():
        attn = model.layers[0].self_attn
        attn.attention_probabilities = (
            torch.eye(attn.attention_scores.shape[-1]).expand_as(attn.attention_scores).clone()
        )

    assert (logits_of(model, prompts.text, edit) - clean).abs().max() > 1e-3


def test_a_zeroed_head_moves_the_logits_and_is_zero_where_it_is_read(model, prompts):
    clean = logits_of(model, prompts.one_image)

    def edit():
        model.layers[1].self_attn.attention_head_outputs[:, :, 1] = 0
        shape = model.layers[1].self_attn.attention_head_outputs.shape
        assert model.layers[1].self_attn.o_proj.input.view(shape)[:, :, 1].count_nonzero() == 0

    assert (logits_of(model, prompts.one_image, edit) - clean).abs().max() > 1e-3


def test_without_heads_every_position_gets_the_same_attention_output(model, prompts):
    with model.trace(**prompts.text):
        model.layers[1].self_attn.attention_head_outputs[:] = 0
        output = model.layers[1].self_attn.attention_output.save()
    assert torch.equal(output, output[:, :1].expand_as(output))


def test_a_key_head_serves_its_own_group_of_query_heads(model, prompts):
    heads = [f"layers.1.self_attn.{n}" for n in ("attention_head_outputs",)]
    (clean,) = collect(model, prompts.text, *heads)
    with model.trace(**prompts.text):
        model.layers[1].self_attn.attention_keys[:, 0] = 0
        changed = model.layers[1].self_attn.attention_head_outputs.save()
    group = model.num_heads // model.num_kv_heads
    moved = (changed != clean).flatten(0, 1).any(0).any(-1)
    assert moved.tolist() == [True] * group + [False] * (model.num_heads - group)


def test_skipped_layers_pass_the_stream_through(model, prompts):
    with model.trace(**prompts.text):
        first = model.layers[0].layer_output.save()
        model.skip_layers(1, model.num_layers - 1)
        last = model.layers[-1].layer_output.save()
        logits = model.logits.save()
    assert torch.equal(first, last)
    assert torch.equal(logits, model.project_on_vocab(first))


def test_skipping_with_a_tensor_puts_it_in_the_stream(model, prompts):
    shape = (*prompts.text["input_ids"].shape, model.hidden_size)
    with model.trace(**prompts.text):
        model.skip_layer(0, skip_with=torch.zeros(shape))
        entering = model.layers[1].input.save()
        logits = model.logits.save()
    assert entering.count_nonzero() == 0 and logits.isfinite().all()


def test_the_inside_of_a_skipped_layer_is_never_reached(model, prompts):
    with model.trace(**prompts.text):
        model.skip_layer(1)
        with pytest.raises(vlscope.NotReachedError, match=r"layers\.1\.self_attn"):
            model.layers[1].self_attn.attention_output
        logits = model.logits.save()
    assert logits.isfinite().all()


def test_steering_adds_the_vector_at_the_positions_named(model, prompts):
    vector = torch.linspace(-1, 1, model.hidden_size)
    (clean,) = collect(model, prompts.text, "layers.0.layer_output")
    with model.trace(**prompts.text):
        model.steer(0, vector, 2, -1)
        steered = model.layers[0].layer_output.save()
    assert torch.equal(steered[:, :-1], clean[:, :-1])
    assert torch.equal(steered[:, -1], clean[:, -1] + 2 * vector)


def test_steering_several_layers_moves_all_positions(model, prompts):
    vector = torch.ones(model.hidden_size)
    clean = collect(model, prompts.text, "layers.0.layer_output", "layers.1.layer_output")
    with model.trace(**prompts.text):
        model.steer([0, 1], vector, factor=0.5)
        second = model.layers[1].layer_output.save()
    assert (second - clean[1]).abs().amin(dim=(0, 1)).max() > 0.1


def test_the_last_block_projected_is_the_logits(model, prompts):
    out, logits = collect(model, prompts.text, f"layers.{model.num_layers - 1}.layer_output", "logits")
    assert torch.equal(model.project_on_vocab(out), logits)


def test_sizes_name_the_axes(model, prompts):
    """`.dims` says what each axis is; wherever it names a size of the model, the tensor has that size."""
    batch, seq = prompts.one_image["input_ids"].shape
    patches = len(prompts.one_image["pixel_values"])
    sizes = {
        "batch": batch,
        "seq": seq,
        "query": seq,
        "key": seq,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "kv_heads": model.num_kv_heads,
        "images": 1,
        "patches": patches,
        "image_tokens": patches // 4,
        "vision_hidden_size": model.vision.vision_hidden_size,
    }
    layer, block = model.layers[0], model.vision.layers[1]
    interior = [*INTERIOR, "attention_output"]
    per_image = [name for name in interior if name not in ("attention_scores", "attention_probabilities")]
    deepstack = [] if layer.support()["deepstack_output"] else ["deepstack_output"]
    reads = [
        (model, model, ["input_ids", "attention_mask"]),
        (model.vision, model.vision, ["image_token_mask"]),
        (model, model, ["token_embeddings"]),
        (model.vision, model.vision, ["patch_embeddings"]),
        (model.vision, block, ["layer_input"]),
        (model.vision, block.self_attn, per_image),
        (model.vision, block.mlp, ["mlp_output"]),
        (model.vision, block, ["layer_output"]),
        (model.vision, model.vision, ["tower_output", "image_features"]),
        (model, layer, ["layer_input"]),
        (model, layer.self_attn, interior),
        (model, layer.mlp, ["mlp_output"]),
        (model, layer, ["layer_output", *deepstack]),
        (model, model, ["logits", "next_token_probs"]),
    ]
    with model.trace(**prompts.one_image):
        for tower, host, names in reads:
            known = {**sizes, "heads": tower.num_heads, "head_dim": tower.head_dim}
            for name in names:
                declared, tensor = getattr(type(host), name), getattr(host, name)
                axes = declared.dims.split() if isinstance(declared.dims, str) else declared.dims
                assert isinstance(tensor, declared.layout), name
                assert tuple(tensor.shape) == tuple(known[axis] for axis in axes), (name, axes)


def test_assigned_ids_and_mask_are_another_prompt(model, prompts):
    other = logits_of(model, prompts.padded_text)
    with model.trace(input_ids=torch.ones_like(prompts.padded_text["input_ids"])):
        model.input_ids = prompts.padded_text["input_ids"]
        model.attention_mask = prompts.padded_text["attention_mask"]
        logits = model.logits.save()
    assert torch.equal(logits, other)


def test_the_result_carries_the_logits_as_they_were_left(model, prompts):
    with model.trace(**prompts.text) as tracer:
        logits = model.logits.save()
        logits[:, 0] = 0
        assert tracer.result.logits is logits
        assert model.output.logits is logits
    assert logits[:, 0].count_nonzero() == 0 and logits[:, 1].count_nonzero() > 0


def test_next_token_probs_are_the_softmax_of_the_last_row(model, prompts):
    logits, probabilities = collect(model, prompts.padded_mixed, "logits", "next_token_probs")
    assert difference(probabilities, logits[:, -1].softmax(-1), 1e-5) is None
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(len(probabilities)))
    (alone,) = collect(model, prompts.padded_mixed, "next_token_probs")
    assert torch.equal(alone, probabilities)


def test_next_token_probs_follow_written_logits(model, prompts):
    with model.trace(**prompts.text):
        model.logits[:, -1, 7] = 1e3
        probabilities = model.next_token_probs.save()
    assert probabilities[0, 7] == 1


def test_sizes_are_those_of_the_weights(model):
    attn = model.layers[0].self_attn
    mlp = next(layer.mlp for layer in model.layers if not hasattr(type(layer.mlp), "router_logits"))
    assert tuple(model.lm_head.weight.shape) == (model.vocab_size, model.hidden_size)
    assert tuple(attn.q_proj.weight.shape) == (model.num_heads * model.head_dim, model.hidden_size)
    assert tuple(attn.k_proj.weight.shape) == (model.num_kv_heads * model.head_dim, model.hidden_size)
    assert tuple(mlp.gate_proj.weight.shape) == (model.intermediate_size, model.hidden_size)
    assert model.qk_head_dim == model.head_dim
    assert len(model.layers) == model.num_layers and len(model.vision.layers) == model.vision.num_layers
    with pytest.raises(AttributeError):
        model.hidden_size = 3


def test_the_printout_names_every_value(model):
    text = repr(model)
    for value in (
        "logits",
        "token_embeddings",
        "layer_output",
        "attention_queries",
        "attention_probabilities",
        "mlp_output",
        "deepstack_output",
        "image_features",
        "patch_embeddings",
        "tower_output",
        "image_token_mask",
        "next_token_probs",
    ):
        assert value in text, value


@pytest.mark.parametrize("name", QWEN3_VL)
def test_support_is_what_can_be_read(model, prompts):
    support = model.support()
    assert support["layer_output"] is None and support["vision.image_features"] is None
    taps = min(len(model.config["vision_config"]["deepstack_visual_indexes"]), model.num_layers)
    missing = support["deepstack_output"] or {}
    assert sorted(missing) == list(range(taps, model.num_layers))
    for layer, reason in missing.items():
        with pytest.raises(vlscope.Unavailable) as caught:
            model.layers[layer].deepstack_output
        assert reason in str(caught.value)
        assert model.support(layer=layer)["deepstack_output"] == reason
        assert not hasattr(model.layers[layer], "nothing_of_that_name")
    assert model.support(layer=0)["deepstack_output"] is None
    assert sorted(support["vision.attention_scores"]) == list(range(model.vision.num_layers))
    for name in INTERIOR:
        assert support[name] is None
