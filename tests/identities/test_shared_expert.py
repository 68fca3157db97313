"""Qwen3.5-MoE: a shared expert beside the routed ones, in blocks of either mixer."""

import pytest
import torch

import tiny

VALUES = ("router_logits", "expert_weights", "expert_indices", "expert_outputs", "routed_output")


@pytest.fixture(params=tiny.QWEN3_5_MOE)
def name(request):
    return request.param


@pytest.fixture
def model(name, vlscope_model):
    return vlscope_model(name)


def test_without_its_shared_part_a_mixture_gives_the_routed_one(name, model, inputs):
    with model.trace(**inputs(name, "padded_mixed")):
        mlp = model.layers[1].mlp
        routed = mlp.routed_output.clone()
        mlp.shared_expert_output[:] = 0
        in_place = mlp.mlp_output.clone()
    with model.trace(**inputs(name, "padded_mixed")):
        mlp = model.layers[1].mlp
        mlp.shared_expert_output = torch.zeros_like(routed)
        assigned = mlp.mlp_output.clone()
    assert torch.equal(in_place, routed) and torch.equal(assigned, routed)


def test_every_value_of_the_mixture_is_there_in_every_block(model):
    support = model.support()
    assert all(support[value] is None for value in (*VALUES, "shared_expert_output", "mlp_output"))
    kinds = {type(layer.mlp).__name__ for layer in model.layers}
    assert kinds == {"TextMixture"} and "(shared_expert): SharedExpert" in repr(model)
    assert model.rank("shared_expert_output") > model.rank("routed_output")
