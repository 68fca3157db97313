"""States of one token of many prompts."""

import pytest
import torch

import vlscope
from vlscope.collection import (
    collect_last_token_activations_session,
    collect_token_activations_batched,
    compute_next_token_probs,
    get_token_activations,
)

from .samples import image_prompt

PROMPTS = ["The capital of France is", "Hello", image_prompt(0), image_prompt(1), "What is this?"]


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo")


@pytest.fixture(scope="module")
def wanted(model):
    """[layers, prompts, hidden_size], the last token of each prompt traced alone."""

    def states(prompt):
        given = prompt if isinstance(prompt, dict) else {"prompt": prompt}
        with torch.no_grad(), model.trace(**given):
            return torch.stack([layer.layer_output[0, -1].clone() for layer in model.layers])

    return torch.stack([states(prompt) for prompt in PROMPTS], 1)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_last_token_of_each_prompt_of_a_batch_is_that_of_the_prompt_alone(model, wanted):
    found = get_token_activations(model, PROMPTS)
    assert found.shape == (6, 5, 64) and not found.requires_grad
    close(found, wanted)
    assert torch.equal(get_token_activations(model, PROMPTS[0]), wanted[:, :1])
    assert torch.equal(get_token_activations(model, PROMPTS[2]), wanted[:, 2:3])


def test_layers_come_in_the_order_asked_for(model, wanted):
    close(get_token_activations(model, PROMPTS, layers=[4, -1, 0]), wanted[[4, 5, 0]])
    close(get_token_activations(model, PROMPTS, layers=2), wanted[2:3])


def test_a_function_or_an_open_trace_give_the_same_states(model, wanted):
    def mlp(model, layer):
        return model.layers[layer].mlp.mlp_output

    texts = [PROMPTS[0], PROMPTS[1]]
    with torch.no_grad(), model.trace(texts):
        outputs = torch.stack([model.layers[k].mlp.mlp_output[:, -1].clone() for k in (1, 3)])
    assert torch.equal(get_token_activations(model, texts, [1, 3], mlp), outputs)
    with model.trace(texts) as tracer:
        inside = get_token_activations(model, texts, [1, 3], tracer=tracer)
        logits = model.logits.save()
    assert torch.equal(inside, get_token_activations(model, texts, [1, 3])) and logits.shape[0] == 2


def test_any_token_is_counted_without_padding(model):
    texts = [PROMPTS[0], PROMPTS[1]]
    first = get_token_activations(model, texts, idx=0)
    for k, text in enumerate(texts):
        close(first[:, k : k + 1], get_token_activations(model, text, idx=0))
    with pytest.raises(vlscope.InputError, match=r"idx is 3, and prompt 1 has 3 tokens"):
        get_token_activations(model, texts, idx=3)


def test_many_prompts_run_in_batches(model, wanted):
    shown = []

    def bar(steps):
        shown.extend(steps)
        return steps

    close(collect_token_activations_batched(model, PROMPTS, 2, layers=[1, 5], tqdm=bar), wanted[[1, 5]])
    assert shown == [0, 2, 4]
    close(collect_last_token_activations_session(model, PROMPTS, 3), wanted)
    with pytest.raises(vlscope.InputError, match="batch_size is 0"):
        collect_token_activations_batched(model, PROMPTS, 0)
    with pytest.raises(vlscope.InputError, match="empty"):
        collect_token_activations_batched(model, [], 2)


def test_next_token_probabilities_are_the_models(model):
    with model.trace(PROMPTS[0]):
        alone = model.next_token_probs.clone()
    assert torch.equal(compute_next_token_probs(model, PROMPTS[0]), alone)
    assert torch.equal(
        compute_next_token_probs(model, **{"prompts": PROMPTS[2]}), compute_next_token_probs(model, PROMPTS[2])
    )
    assert compute_next_token_probs(model, PROMPTS).shape == (5, 704)
    with pytest.raises(vlscope.InputError, match="runs in this process"):
        compute_next_token_probs(model, PROMPTS[0], remote=True)
