"""Gradients are torch's: equal to transformers' autograd, to finite differences in float64, and gone when dropped."""

import gc
import resource
import weakref
from pathlib import Path

import pytest
import torch

import vlscope
from sites import difference, each, read, write
from vlscope.verify import reference

NAME = "dense"


@pytest.fixture(params=["eager", "sdpa"])
def attention(request):
    return request.param


@pytest.fixture
def model(attention, vlscope_model):
    return vlscope_model(NAME, attention)


@pytest.fixture
def case(inputs):
    return inputs(NAME, "two_images")


@pytest.fixture(scope="module")
def precise(checkpoint):
    """The same checkpoint in float64, under one implementation or the other."""
    return {
        attention: vlscope.load(checkpoint(NAME), dtype=torch.float64, attn_implementation=attention)
        for attention in ("eager", "sdpa")
    }


def loss_of(logits):
    """The cross entropy of one token at the last position."""
    return logits[0, -1].logsumexp(-1) - logits[0, -1, 5]


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def gradients(value):
    return tuple(x.grad for x in (value if isinstance(value, tuple) else (value,)))


def differentiable(run):
    """The sites of floating point that a run came by, without the one that nothing can be written to."""
    first = {site: value[0] if isinstance(value, tuple) else value for site, value in run.values.items()}
    floating = {site for site, value in first.items() if value.is_floating_point()}
    return [site for site in run.order if site in floating and site != "next_token_probs"]


# --- against transformers ---------------------------------------------------------------------------------------


def test_the_gradient_of_every_value_equals_transformers(attention, model, reference_model, reference_run, case):
    theirs, faults, reached = reference_model(NAME, attention), [], 0
    for site in differentiable(reference_run(NAME, attention, "two_images")):
        leaves = []
        run = reference.run(theirs, case, {site: lambda x, kept=leaves: kept.append(leaf(x)) or kept[-1]}, grad=True)
        with model.trace(**case):
            value = read(model, site)
            each(lambda x: x.requires_grad_(), value)
            logits = model.logits
        if site == "vision.tower_output":  # read by nothing
            assert not logits.requires_grad
            continue
        loss_of(run.logits).backward()
        loss_of(logits).backward()
        reached += 1
        ours, expected = gradients(value), tuple(x.grad for x in leaves)
        scale = max(x.abs().max().item() for x in expected)
        if text := difference([x / scale for x in ours], [x / scale for x in expected], tolerance=1e-5):
            faults.append(f"{site} {text}")
    assert not faults, "\n".join(faults)
    assert reached > 80


@pytest.mark.parametrize("how", ["trace", "read", "call"])
def test_pixels_that_the_caller_lets_require_grad_get_it(how, attention, model, reference_model, case):
    theirs = reference_model(NAME, attention)
    given = {**case, "pixel_values": leaf(case["pixel_values"])}
    expected = {**case, "pixel_values": leaf(case["pixel_values"])}
    loss_of(theirs(**reference.complete(theirs, expected)).logits).backward()
    if how == "call":
        logits = model(**given).logits
    else:
        with model.trace(**given):
            if how == "read":  # served as a copy, which the forward goes on from
                assert model.inputs[1]["pixel_values"] is not given["pixel_values"]
            logits = model.logits
    loss_of(logits).backward()
    assert difference(given["pixel_values"].grad, expected["pixel_values"].grad) is None
    assert given["pixel_values"].grad.abs().max() > 0


# --- against finite differences ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "site",
    [
        "token_embeddings",
        "vision.patch_embeddings",
        "vision.layers.0.self_attn.attention_keys",
        "vision.layers.1.self_attn.image_attention_scores",
        "vision.layers.1.self_attn.image_attention_probabilities",
        "vision.layers.2.layer_output",
        "vision.image_features",
        "layers.0.deepstack_output",
        "layers.1.self_attn.attention_queries",
        "layers.1.self_attn.attention_values",
        "layers.1.self_attn.attention_scores",
        "layers.1.self_attn.attention_probabilities",
        "layers.1.self_attn.attention_head_outputs",
        "layers.2.mlp.mlp_output",
        "layers.3.layer_output",
    ],
)
def test_the_slope_along_a_direction_is_that_of_finite_differences(site, attention, precise, case):
    model, step = precise[attention], 1e-5
    generator = torch.Generator().manual_seed(0)

    def run(edit):
        with model.trace(**case):
            value = read(model, site)
            each(edit, value)
            return loss_of(model.logits), value

    loss, value = run(lambda x: x.requires_grad_())
    loss.backward()
    grads = gradients(value)
    directions = [torch.randn(grad.shape, generator=generator, dtype=torch.float64) for grad in grads]
    with torch.no_grad():
        losses = []
        for sign in (1, -1):
            moves = iter(directions)
            losses.append(run(lambda x, s=sign, m=moves: x.add_(s * step * next(m)))[0])
    slope = ((losses[0] - losses[1]) / (2 * step)).item()
    expected = sum((grad * direction).sum().item() for grad, direction in zip(grads, directions, strict=True))
    assert abs(expected) > 1e-4
    assert slope == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_pixels_and_a_written_vector_have_the_slope_of_finite_differences(attention, precise, case):
    model, step = precise[attention], 1e-5
    generator = torch.Generator().manual_seed(1)
    pixels = case["pixel_values"].double()
    vector = torch.randn(model.hidden_size, generator=generator, dtype=torch.float64)

    def run(pixels, vector):
        with model.trace(**{**case, "pixel_values": pixels}):
            model.layers[1].layer_output[:, 2:4] += vector
            return loss_of(model.logits)

    leaves = leaf(pixels), leaf(vector)
    run(*leaves).backward()
    for i, at in enumerate((pixels, vector)):
        direction = torch.randn(at.shape, generator=generator, dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            moved = [pixels, vector]
            moved[i] = at + sign * step * direction
            ends.append(run(*moved))
        slope = ((ends[0] - ends[1]) / (2 * step)).item()
        assert slope == pytest.approx((leaves[i].grad * direction).sum().item(), rel=1e-6, abs=1e-9)
        assert abs(slope) > 1e-4


# --- edits inside a graph ---------------------------------------------------------------------------------------


def test_an_edit_in_place_inside_a_graph_gives_the_gradient_of_the_assigned_one(attention, model, reference_run, case):
    def run(site, edit):
        pixels, embeddings = leaf(case["pixel_values"]), None
        with model.trace(**{**case, "pixel_values": pixels}):
            embeddings = leaf(model.token_embeddings)
            model.token_embeddings = embeddings * 1
            edit(site)
            logits = model.logits
        loss_of(logits).backward()
        return pixels.grad, embeddings.grad

    def in_place(site):
        each(lambda x: x.mul_(0.5), read(model, site))

    def assigned(site):
        write(model, site, each(lambda x: x * 0.5, read(model, site)))

    faults = []
    for site in differentiable(reference_run(NAME, attention, "two_images")):
        try:
            text = difference(run(site, in_place), run(site, assigned), tolerance=1e-6)
        except RuntimeError as error:
            text = f"fails: {str(error).splitlines()[0]}"
        if text:
            faults.append(f"{site} {text}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("written", ["slice", "whole", "vision"])
def test_a_written_tensor_gets_its_gradient(model, case, written):
    with model.trace(**case):
        if written == "vision":
            value = leaf(model.vision.layers[1].layer_output)
            model.vision.layers[1].layer_output = value
        elif written == "whole":
            value = leaf(model.layers[1].layer_output)
            model.layers[1].layer_output = value
        else:
            value = torch.ones(model.hidden_size, requires_grad=True)
            model.layers[1].layer_output[0, -1] = value
        logits = model.logits
    loss_of(logits).backward()
    assert value.grad.shape == value.shape and value.grad.abs().sum() > 0


# --- attribution ------------------------------------------------------------------------------------------------


def test_one_backward_gives_the_gradient_at_every_layer_and_module(model, case):
    with model.trace(**case):
        model.vision.patch_embeddings.requires_grad_()
        streams = [block.layer_output for block in model.vision.layers]
        natives = [block.output for block in model.vision.layers[-1:]]
        for layer in model.layers:
            streams += [layer.self_attn.attention_head_outputs, layer.mlp.mlp_output, layer.layer_output]
        for stream in (*streams, *natives):
            stream.retain_grad()
        loss_of(model.logits).backward()
    alone = []
    for i, site in enumerate(["vision.layers.0.layer_output", "layers.1.mlp.mlp_output", "layers.3.layer_output"]):
        with model.trace(**case):
            value = read(model, site).requires_grad_()
            loss_of(model.logits).backward()
        alone.append(value.grad)
        together = streams[{0: 0, 1: len(model.vision.layers) + 4, 2: -1}[i]].grad
        torch.testing.assert_close(together, value.grad, rtol=1e-4, atol=1e-7)
    assert all(stream.grad.abs().sum() > 0 for stream in streams)
    torch.testing.assert_close(natives[0].grad, streams[len(model.vision.layers) - 1].grad[0])


def test_attribution_is_the_derivative_of_the_patch_at_every_layer_and_position(attention, precise, inputs):
    """(clean - corrupted) * gradient, summed over the width: how fast the loss moves when that row moves to clean."""
    model, step = precise[attention], 1e-5
    corrupted = inputs(NAME, "one_image")
    clean = {**corrupted, "pixel_values": -corrupted["pixel_values"]}
    with model.trace(**clean):
        target = [layer.layer_output for layer in model.layers]
    with model.trace(**corrupted):
        model.token_embeddings.requires_grad_()
        streams = [layer.layer_output for layer in model.layers]
        for stream in streams:
            stream.retain_grad()
        loss_of(model.logits).backward()
    found = torch.stack([((t - s) * s.grad).sum(-1)[0] for t, s in zip(target, streams, strict=True)]).detach()
    length = corrupted["input_ids"].shape[1]
    assert found.shape == (model.num_layers, length)
    with torch.no_grad():
        for layer in range(model.num_layers):
            for position in range(0, length, 5):
                ends = []
                for sign in (1, -1):
                    with model.trace(**corrupted):
                        row = model.layers[layer].layer_output[0, position]
                        row += sign * step * (target[layer][0, position] - row)
                        ends.append(loss_of(model.logits))
                slope = ((ends[0] - ends[1]) / (2 * step)).item()
                assert found[layer, position].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)
    assert found.abs().max() > 1e-3


# --- what is kept -----------------------------------------------------------------------------------------------


def test_nothing_is_recorded_unless_something_requires_grad(model, case):
    with model.trace(**case):
        hidden = model.layers[1].layer_output
        logits = model.logits
    assert not hidden.requires_grad and not logits.requires_grad
    with torch.no_grad(), model.trace(**case):
        model.layers[1].layer_output.requires_grad_()
        assert not model.logits.requires_grad


def test_the_weights_and_later_traces_hear_nothing_of_a_backward(model, case):
    clean = model(**case).logits
    with model.trace(**case):
        model.vision.patch_embeddings.requires_grad_()
        loss_of(model.logits).backward()
    assert model.layers[0].self_attn.q_proj.weight.grad is None
    assert torch.equal(model(**case).logits, clean)


def resident():
    """MiB of this process's memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def test_memory_returns_to_the_start_after_a_backward_and_needs_no_collector(vlscope_model):
    model = vlscope_model("demo", "eager")

    def record():
        with model.trace(input_ids=torch.arange(400)[None]):
            model.token_embeddings.requires_grad_()
            streams = [layer.layer_output for layer in model.layers]
            for stream in streams:
                stream.retain_grad()
            return loss_of(model.logits), streams

    gc.disable()
    try:
        start = resident()
        kept = [record() for _ in range(4)]
        held = resident() - start
        kept.clear()  # what the allocator keeps of these is what the next ones use
        for _ in range(12):
            loss, streams = record()
            loss.backward()
            refs = [weakref.ref(tensor) for stream in streams for tensor in (stream, stream.grad)]
            del loss, streams
            assert len(refs) == 12 and all(ref() is None for ref in refs)
        grown = resident() - start
    finally:
        gc.enable()
    assert held > 100  # MiB: four graphs
    assert grown < 1.5 * held, f"{grown:.0f} MiB after 12 graphs, {held:.0f} MiB with 4 of them alive"


def test_a_graph_that_is_dropped_without_a_backward_is_freed(model, case):
    with model.trace(**case):
        embeddings = model.token_embeddings.requires_grad_()
        ref = weakref.ref(model.layers[2].layer_output)
        loss = loss_of(model.logits)
    assert loss.requires_grad and embeddings.grad is None
    del loss
    assert ref() is None
