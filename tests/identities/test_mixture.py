"""What holds of a mixture of experts: sums of slots, routing by hand, ablations, and writes in both forms."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch

import tiny
import vlscope
from sites import difference, read, write
from vlscope.verify import reference

CASES = ["text", "two_images", "padded_mixed", "images_and_videos"]
VALUES = ["router_logits", "expert_weights", "expert_indices", "expert_outputs", "routed_output", "mlp_output"]


@pytest.fixture(params=tiny.QWEN3_VL_MOE)
def name(request):
    return request.param


@pytest.fixture(params=CASES)
def given(request, name, inputs):
    return inputs(name, request.param)


def mixtures(model):
    return [layer.mlp for layer in model.layers if hasattr(type(layer.mlp), "router_logits")]


def one(model):
    """A mixture with blocks behind it."""
    return mixtures(model)[0]


def logits_of(model, inputs, edit=lambda mlp: None):
    with model.trace(**inputs):
        edit(one(model))
        return model.logits.save()


def hidden_by_expert(mlp, x):
    """What every expert makes of every token: [experts, batch, seq, hidden]."""
    gate, up = torch.einsum("bth,eih->ebti", x, mlp.experts.gate_up_proj).chunk(2, -1)
    return torch.einsum("ebti,ehi->ebth", torch.nn.functional.silu(gate) * up, mlp.experts.down_proj)


def routed_by_hand(mlp, x, weights, indices):
    spread = torch.zeros(*x.shape[:2], mlp.num_experts).scatter_add_(-1, indices, weights)
    return torch.einsum("bte,ebth->bth", spread, hidden_by_expert(mlp, x))


def test_named_values_are_the_native_tensors_prompt_by_prompt(model, given):
    batch, length = given["input_ids"].shape
    with model.trace(**given):
        for mlp in mixtures(model):
            x = mlp.input.clone()
            assert torch.equal(mlp.gate.input, x.flatten(0, 1))
            scores = mlp.router_logits.clone()
            logits, weights, indices = mlp.gate.output
            assert torch.equal(logits, scores.flatten(0, 1))
            for value, native in ((mlp.expert_weights, weights), (mlp.expert_indices, indices)):
                assert value.shape == (batch, length, mlp.top_k) and native.shape == (batch * length, mlp.top_k)
                assert value.data_ptr() == native.data_ptr()
            x, top_k_index, top_k_weights = mlp.experts.inputs[0]
            assert x.shape == (batch * length, model.hidden_size)
            assert torch.equal(top_k_index, indices) and torch.equal(top_k_weights, weights)
            assert mlp.experts.act_fn.input.shape == (batch * length * mlp.top_k, mlp.moe_intermediate_size)
            mlp.expert_outputs
            assert mlp.routed_output.data_ptr() == mlp.experts.output.data_ptr()


def test_weights_and_indices_are_one_location_and_the_scores_lie_before(model, given):
    with model.trace(**given):
        mlp = one(model)
        mlp.expert_indices, mlp.expert_weights, mlp.expert_indices, mlp.gate.output
        with pytest.raises(vlscope.OutOfOrderError, match="router_logits"):
            mlp.router_logits
        mlp.expert_outputs
        with pytest.raises(vlscope.OutOfOrderError, match="expert_weights"):
            mlp.expert_weights


def test_an_index_that_names_no_expert_is_refused(model, given):
    experts = one(model).num_experts
    with model.trace(**given):
        mlp = one(model)
        mlp.expert_indices[0, 0, 0] = experts
        with pytest.raises(vlscope.InputError, match=f"mlp.expert_indices holds {experts}; the experts are 0 to"):
            mlp.mlp_output


def test_a_skipped_mixture_gives_its_value(model, given):
    with model.trace(**given):
        mlp = one(model)
        zeros = torch.zeros(*given["input_ids"].shape, model.hidden_size)
        mlp.skip(zeros)
        assert torch.equal(mlp.mlp_output, zeros)
    with model.trace(**given):
        experts = one(model).experts
        experts.skip(torch.ones(given["input_ids"].numel(), model.hidden_size))
        assert one(model).routed_output.eq(1).all()
    with model.trace(**given), pytest.raises(vlscope.Unavailable, match="more than one tensor"):
        one(model).gate.skip()


# --- gradients --------------------------------------------------------------------------------------------------


def loss_of(logits):
    return logits[0, -1].logsumexp(-1) - logits[0, -1, 5]


@pytest.mark.parametrize("value", [v for v in VALUES if v != "expert_indices"])
def test_gradients_are_those_of_transformers(name, attention, model, reference_model, inputs, value):
    given, grads = inputs(name, "two_images"), []
    layer = next(i for i, block in enumerate(model.layers) if block.mlp in mixtures(model))
    site, leaves = f"layers.{layer}.mlp.{value}", []

    def keep(tensor):
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1]

    loss_of(reference.run(reference_model(name, attention), given, {site: keep}, grad=True).logits).backward()
    for in_place in (True, False):
        with model.trace(**given):
            tensor = read(model, site)
            if in_place:
                tensor.requires_grad_()
            else:
                tensor = tensor.detach().clone().requires_grad_()
                write(model, site, tensor)
            loss_of(model.logits).backward()
        grads.append(tensor.grad)
    for grad in grads:
        assert difference(grad, leaves[0].grad, 1e-5) is None
    if not (value in ("router_logits",) and one(model).top_k == 1):  # one weight is always 1
        assert leaves[0].grad.abs().max() > 1e-6


def test_gradients_reach_the_embeddings_through_every_mixture(name, checkpoint, inputs):
    """Against a finite difference in float64."""
    model = vlscope.load(checkpoint(name), dtype=torch.float64)
    given = inputs(name, "text")

    def loss(shift):
        with model.trace(**given):
            model.token_embeddings = start + shift
            return loss_of(model.logits.save())

    with model.trace(**given):
        start = model.token_embeddings.detach().clone()
    direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shift = torch.zeros_like(start).requires_grad_()
    loss(shift).backward()
    step = 1e-6
    slope = (loss(step * direction) - loss(-step * direction)) / (2 * step)
    torch.testing.assert_close((shift.grad * direction).sum(), slope, rtol=1e-5, atol=1e-8)


def test_indices_may_be_edited_where_a_graph_is_recorded(model, given):
    with model.trace(**given):
        x = one(model).input.requires_grad_()
        one(model).expert_indices[:] = one(model).expert_indices.flip(-1)
        loss_of(model.logits).backward()
    assert torch.isfinite(x.grad).all()


# --- what is told of them ---------------------------------------------------------------------------------------


def test_support_and_printout_tell_of_the_mixture(name, model):
    support = model.support()
    sparse = [i for i, block in enumerate(model.layers) if block.mlp in mixtures(model)]
    assert model.layers[sparse[0]].mlp.support()["expert_weights"] is None
    assert "no shared expert" in str(support["shared_expert_output"])
    for i, block in enumerate(model.layers):
        if i not in sparse:
            assert "router_logits" not in block.mlp.support()
            assert support["router_logits"][i] == "a block of another kind, without router_logits"
    assert model.rank("router_logits") < model.rank("expert_weights") == model.rank("expert_indices")
    assert model.rank("expert_indices") < model.rank("expert_outputs") < model.rank("routed_output")
    printed = repr(model.layers[sparse[0]].mlp)
    for value in VALUES:
        assert value in printed
    assert model.layers[sparse[0]].mlp.num_experts == tiny.CONFIGS[name]["text_config"]["num_experts"]
    with pytest.raises(vlscope.Unavailable, match="no shared expert"):
        model.layers[sparse[0]].mlp.shared_expert_output


def test_a_dense_block_has_no_router(vlscope_model, inputs):
    model = vlscope_model("moe_hub")
    with model.trace(**inputs("moe_hub", "text")):
        with pytest.raises(AttributeError, match="router_logits"):
            model.layers[1].mlp.router_logits
        assert model.layers[1].mlp.gate_proj.output.shape[-1] == model.intermediate_size


def test_scan_tells_the_shapes(name, model, inputs):
    given = inputs(name, "padded_mixed")
    mlp, scanned = one(model), model.scan(**given)
    with model.trace(**given):
        for value in VALUES:
            served = getattr(mlp, value)
            told = scanned[f"{mlp._site_path}.{value}"]
            assert (told.shape, told.dtype) == (served.shape, served.dtype)
