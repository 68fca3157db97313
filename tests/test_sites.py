"""Sites: what a name or a pattern of names stands for, in forward order, and how misses are answered."""

import pickle

import pytest
import torch

import vlscope
from vlscope import sites


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("dense")  # four text layers, four vision layers, DeepStack after blocks 0 and 1


STANDS_FOR = {
    "logits": ["logits"],
    "layers.3.self_attn.attention_queries": ["layers.3.self_attn.attention_queries"],
    "vision.deepstack_merger_list.0.output": ["vision.deepstack_merger_list.0.output"],
    "layers.-1.layer_output": ["layers.3.layer_output"],
    "layers.*.mlp.mlp_output": [f"layers.{i}.mlp.mlp_output" for i in range(4)],
    "layers.1:3.layer_input": ["layers.1.layer_input", "layers.2.layer_input"],
    "layers.-2:.layer_output": ["layers.2.layer_output", "layers.3.layer_output"],
    "layers.:-3.layer_output": ["layers.0.layer_output"],
    "layers.*.deepstack_output": ["layers.0.deepstack_output", "layers.1.deepstack_output"],
    "vision.layers.*.layer_output": [f"vision.layers.{i}.layer_output" for i in range(4)],
    "model.language_model.layers.3.output": ["layers.3.output"],
    "model.visual.blocks.0.attn.attention_output": ["vision.layers.0.self_attn.attention_output"],
    "vision.blocks.-1.attn.qkv.output": ["vision.layers.3.self_attn.qkv.output"],
    "model.visual.merger.input": ["projector.input"],
}


@pytest.mark.parametrize("pattern", STANDS_FOR)
def test_a_pattern_stands_for_its_sites(model, pattern):
    assert sites.expand(model, pattern) == STANDS_FOR[pattern]


def test_several_patterns_give_each_site_once_in_forward_order(model, inputs):
    patterns = ["logits", "layers.*.layer_output", "layers.0.self_attn.attention_queries", "layers.1.layer_output"]
    patterns += ["vision.image_features", "vision.layers.1.layer_output", "token_embeddings"]
    found = sites.expand(model, patterns)
    assert sorted(set(found)) == sorted(found)
    with model.trace(**inputs("dense", "one_image")):  # a read out of order would raise
        for site in found:
            assert isinstance(sites.read(model, site), torch.Tensor)
    assert found[0] == "token_embeddings" and found[-1] == "logits" and len(found) == 9


def test_every_site_of_the_model_is_found_by_its_own_name(model):
    for site in model.scan("Hello"):
        assert sites.expand(model, site) == [site]


UNKNOWN = {
    "layers.0.layer_outputs": "layer_output",
    "layer.0.layer_output": "layers",
    "layers.3.self_atn.attention_queries": "self_attn",
    "layers.*.layer_outputt": "layer_output",
    "layers.4.layer_output": "0 to 3",
    "layers.-5.layer_output": "0 to 3",
    "layers.one.layer_output": "number",
    "layers.3:1.layer_output": "empty",
    "layers.*": "layer_output",
    "layers": "module",
    "layers.0.self_attn": "module",
    "": "no ''",
}


@pytest.mark.parametrize("pattern", UNKNOWN)
def test_a_pattern_for_nothing_is_refused_with_what_is_near(model, pattern):
    with pytest.raises(vlscope.UnknownSite) as caught:
        sites.expand(model, pattern)
    assert UNKNOWN[pattern] in str(caught.value) and repr(pattern) in str(caught.value)
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, vlscope.InputError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("site", ["layers.3.deepstack_output", "vision.layers.*.self_attn.attention_scores"])
def test_a_value_that_is_never_served_is_unavailable(model, site):
    with pytest.raises(vlscope.Unavailable):
        sites.expand(model, site)


def test_a_name_below_the_block_stands_for_all_blocks_or_those_chosen(model):
    below = sites.expand_below
    assert below(model, "layer_output") == sites.expand(model, "layers.*.layer_output")
    assert below(model, "layer_output", [-1, 0]) == ["layers.0.layer_output", "layers.3.layer_output"]
    assert below(model, "mlp.mlp_output", 2) == ["layers.2.mlp.mlp_output"]
    assert below(model, "vision.layers.0:2.layer_output") == sites.expand(model, "vision.layers.:2.layer_output")
    with pytest.raises(vlscope.UnknownSite, match="layers.7"):
        below(model, "layer_output", [7])


def test_a_site_is_read_and_written_on_a_tracer_or_the_model(model, inputs):
    given = inputs("dense", "text")
    plain = model(**given).logits
    with model.trace(**given):
        model.layers[3].layer_output[:] = 1
        expected = model.logits.save()
    for root in (lambda tracer: tracer, lambda tracer: model):
        with model.trace(**given) as tracer:
            value = sites.read(root(tracer), "layers.-1.layer_output")
            assert value is model.layers[3].layer_output
            sites.write(root(tracer), "model.language_model.layers.3.output", torch.ones_like(value))
            logits = sites.read(root(tracer), "logits").save()
        assert torch.equal(logits, expected) and not torch.equal(logits, plain)
    with model.trace(**given) as tracer:
        sites.write(tracer, "logits", torch.zeros_like(plain))
        assert tracer.logits.count_nonzero() == 0


def test_the_axes_of_a_site_are_those_of_its_value(model):
    assert (
        sites.dims(model, "layers.0.output") == sites.dims(model, "layers.1.input") == ("batch", "seq", "hidden_size")
    )
    assert sites.dims(model, "layers.1.self_attn.attention_head_outputs") == ("batch", "seq", "heads", "head_dim")
    assert sites.dims(model, "vision.layers.0.layer_output") == ("images", "patches", "vision_hidden_size")
    assert sites.dims(model, "vision.layers.0.output") == ("patches", "vision_hidden_size")
    with pytest.raises(vlscope.InputError, match="no names"):
        sites.dims(model, "layers.0.self_attn.q_proj.output")


# --- the order of sites -----------------------------------------------------------------------------------------


def test_order_takes_negatives_patterns_and_lists(model):
    assert model.order("layers.-1.layer_output") == model.order("layers.3.layer_output")
    assert model.order("model.language_model.layers.3.output") == model.order("layers.3.output")
    every = model.order(["logits", "layers.*.layer_output"])
    assert list(every) == [*(f"layers.{i}.layer_output" for i in range(4)), "logits"]
    assert list(every.values()) == sorted(every.values())
    assert list(model.order("layers.2:.layer_input")) == ["layers.2.layer_input", "layers.3.layer_input"]
    with pytest.raises(KeyError, match="Did you mean layer_output"):
        model.order("layers.0.layer_outptu")


def test_rank_counts_the_locations_of_a_block(model):
    names = [
        ("layer_input",),
        ("attention_queries", "attention_keys", "attention_values"),
        ("attention_scores",),
        ("attention_probabilities",),
        ("attention_head_outputs",),
        ("attention_output",),
        ("mlp_output",),
        ("layer_output",),
    ]
    for rank, together in enumerate(names):
        assert {model.rank(name) for name in together} == {rank}


def test_ranks_with_layers_compare_across_the_forward(model):
    assert model.rank("layer_output", -1) == model.rank("layer_output", 3) == (3, 7)
    assert model.rank("layer_output", 0) < model.rank("layer_input", 1) < model.rank("mlp_output", -1)
    assert model.rank("token_embeddings", 0)[0] == -1 and model.rank("logits", 0)[0] == model.num_layers
    assert model.rank("deepstack_output", -1) is None
    with pytest.raises(IndexError, match="4"):
        model.rank("layer_output", 4)


def test_a_weight_is_no_site_and_says_so():
    model = vlscope.load("demo", dispatch=False)
    with pytest.raises(vlscope.UnknownSite, match="is a weight"):
        vlscope.sites.expand(model, "lm_head.weight")
