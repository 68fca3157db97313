"""The text model: what a token sees, which head serves which, and what a norm or a pattern is."""

import pytest
import torch

import vlscope


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", ["text", "one_image"])
def test_tx_01_no_token_sees_a_later_one(vlscope_model, inputs, attention, case):
    model, given = vlscope_model("dense", attention), inputs("dense", case)
    changed = {**given, "input_ids": given["input_ids"].clone()}
    changed["input_ids"][0, -1] += 1
    sites = [
        *(f"layers.{k}.{leaf}" for k in range(4) for leaf in ("input", "mlp.mlp_output", "layer_output")),
        *(f"layers.{k}.self_attn.attention_output" for k in range(4)),
        "logits",
    ]
    sites = sorted(sites, key=model.order)

    def read(inputs):
        with model.trace(**inputs):
            return {site: model.get(site).clone() for site in sites}

    before, after = read(given), read(changed)
    for site in sites:
        assert torch.equal(before[site][:, :-1], after[site][:, :-1]), site
        assert not torch.equal(before[site][:, -1], after[site][:, -1]), site
    length = given["input_ids"].shape[1]
    for k in range(4):
        with model.trace(**given):
            pattern = model.layers[k].self_attn.attention_probabilities
            assert not pattern.triu(1).any() and (pattern.tril().sum(-1) - 1).abs().max() < 1e-6
            assert (pattern[..., torch.ones(length, length).tril().bool()] > 0).all()


@pytest.mark.parametrize("name, heads, shared", [("dense", 4, 2), ("one_kv_head", 5, 1)])
def test_tx_02_keys_and_values_have_heads_of_their_own_and_serve_their_group(
    vlscope_model, inputs, name, heads, shared
):
    """Head h reads key head h // group: repeated one by one, not as a whole."""
    model = vlscope_model(name, "eager")
    attention = model.layers[1].self_attn
    with model.trace(**inputs(name, "one_image")):
        queries, keys = attention.attention_queries, attention.attention_keys
        values, pattern = attention.attention_values, attention.attention_probabilities
        out = attention.attention_head_outputs
    dim, length = model.head_dim, queries.shape[2]
    assert queries.shape == (1, heads, length, dim) and keys.shape == values.shape == (1, shared, length, dim)
    for head in range(heads):
        served = head // (heads // shared)
        scores = queries[0, head] @ keys[0, served].T * dim**-0.5
        expected = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
        torch.testing.assert_close(pattern[0, head], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out[0, :, head], expected @ values[0, served], rtol=1e-5, atol=1e-5)


def test_tx_04_a_norm_is_served_after_its_weight_and_read_as_it_is_served(model, image):
    readers = [
        ("layers.1.input_layernorm", "layers.1.self_attn.q_proj", 1e-6),
        ("layers.1.post_attention_layernorm", "layers.1.mlp.up_proj", 1e-6),
        ("norm", "lm_head", 1e-6),
    ]
    for path, reader, eps in readers:
        norm = model.get(path)
        with model.trace(**image):
            x, y = norm.input, norm.output
            assert torch.equal(y, norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)))
            assert torch.equal(model.get(reader).input, y)
            assert not torch.allclose(y, y / norm.weight, atol=1e-2)
    for name in ("q_norm", "k_norm"):
        norm = getattr(model.layers[1].self_attn, name)
        with model.trace(**image):
            x, y = norm.input, norm.output
            assert torch.equal(y, norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))


def test_tx_06_a_pattern_is_true_under_the_default_attention_and_takes_a_write(model, vlscope_model, image):
    assert model.attn_implementation == "sdpa"
    eager, plain = vlscope_model("dense", "eager"), model(**image).logits

    def pattern(which, write=False):
        with which.trace(**image):
            value = which.layers[1].self_attn.attention_probabilities
            if write:
                value[:] = torch.eye(value.shape[-1])
            return value.clone(), which.logits.clone()

    (seen, logits), (expected, _) = pattern(model), pattern(eager)
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, plain)
    (_, written), (_, expected) = pattern(model, write=True), pattern(eager, write=True)
    torch.testing.assert_close(written, expected, rtol=1e-5, atol=1e-5)
    assert (written - plain).abs().max() > 1e-2


def test_tx_06_the_pattern_of_the_tower_is_one_for_each_image_or_unavailable(model, inputs):
    given = inputs("dense", "two_images")
    sizes = [int(h * w) for _, h, w in given["image_grid_thw"]]
    plain = model(**given).logits
    with model.trace(**given):
        with pytest.raises(vlscope.Unavailable, match="once per image"):
            _ = model.vision.layers[1].self_attn.attention_probabilities
        patterns = model.vision.layers[1].self_attn.image_attention_probabilities
        assert [tuple(pattern.shape) for pattern in patterns] == [(2, size, size) for size in sizes]
        for pattern in patterns:
            torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:2]))
        patterns[0][:] = torch.eye(sizes[0])
        assert (model.logits - plain).abs().max() > 1e-3
