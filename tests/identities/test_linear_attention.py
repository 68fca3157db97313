"""Qwen3.5's blocks: recurrent ones with a state behind each token, and gated ones in between."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch

import tiny
import vlscope
from sites import collect, difference

NAMES = list(tiny.QWEN3_5)
INTERIOR = ("attention_queries", "attention_keys", "attention_values", "decays", "betas", "state", "states")
WRITTEN = ("attention_queries", "attention_keys", "attention_values", "decays", "betas", "states")


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def text(name, inputs):
    return inputs(name, "text")


@pytest.fixture
def image(name, inputs):
    return inputs(name, "one_image")


def long(model, length=150):
    """A prompt of more than two chunks of the recurrence."""
    ids = torch.randint(0, tiny.PAD, (1, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def recurrent(model):
    return [i for i, layer in enumerate(model.layers) if hasattr(layer, "linear_attn")]


def logits_of(model, inputs, edit=lambda: None):
    with model.trace(**inputs):
        edit()
        return model.logits.save()


def unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


# --- the tree ---------------------------------------------------------------------------------------------------


def test_a_block_has_the_one_mixer_that_its_config_names(model):
    for layer, kind in zip(model.layers, model.config["text_config"]["layer_types"], strict=True):
        here, other = ("linear_attn", "self_attn")[:: 1 if kind == "linear_attention" else -1]
        assert hasattr(layer, here) and not hasattr(layer, other) and other not in dir(layer)
        with pytest.raises(AttributeError, match=f"has no module {other}: this block's mixer is {here}"):
            getattr(layer, other)


def test_support_says_which_blocks_lack_what(model):
    support, linear = model.support(), recurrent(model)
    full = [i for i in range(model.num_layers) if i not in linear]
    assert support["attention_queries"] is None and support["attention_output"] is None
    assert support["states"] == dict.fromkeys(full, "this block's mixer is self_attn")
    assert support["attention_scores"] == dict.fromkeys(linear, "this block's mixer is linear_attn")
    assert sorted(support["deepstack_output"]) == list(range(model.num_layers))
    assert "states" in model.support(layer=linear[0]) and "states" not in model.support(layer=full[0])
    with pytest.raises(vlscope.Unavailable, match="this family has no DeepStack"):
        model.layers[0].deepstack_output
    assert model.rank("attention_queries") < model.rank("states") < model.rank("state_output")


def test_the_printout_shows_alike_blocks_once(vlscope_model):
    text = repr(vlscope_model("hybrid_by_two"))
    assert "(layers[0, 2]): TextLayer" in text and "(layers[1, 3]): TextLayer" in text
    assert text.count("GatedDeltaNet") == text.count("GatedAttention") == 1
    assert "(states) -> States [batch seq linear_heads linear_key_dim linear_value_dim]" in text


def test_axes_are_those_of_the_config(model, image):
    config, at = model.config["text_config"], recurrent(model)[0]
    batch, seq = image["input_ids"].shape
    sizes = {
        "batch": batch,
        "seq": seq,
        "hidden_size": model.hidden_size,
        "linear_heads": config["linear_num_value_heads"],
        "linear_key_dim": config["linear_key_head_dim"],
        "linear_value_dim": config["linear_value_head_dim"],
    }
    with model.trace(**image):
        host = model.layers[at].linear_attn
        for value in type(host)._kind.values:
            declared, tensor = getattr(type(host), value.name), getattr(host, value.name)
            if value.name == "state_input":
                assert tensor is None
                continue
            assert isinstance(tensor, declared.layout), value.name
            assert tuple(tensor.shape) == tuple(sizes[axis] for axis in declared.dims), value.name
    mixer = model.layers[at].linear_attn
    width = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    width += config["linear_num_value_heads"] * config["linear_value_head_dim"]
    assert tuple(mixer.in_proj_qkv.weight.shape) == (width, model.hidden_size)
    assert tuple(mixer.conv1d.weight.shape) == (width, 1, config["linear_conv_kernel_dim"])
    assert tuple(mixer.A_log.shape) == tuple(mixer.dt_bias.shape) == (config["linear_num_value_heads"],)


# --- sums -------------------------------------------------------------------------------------------------------


def test_the_heads_of_a_gated_block_pass_their_gate(model, text):
    (at,) = [i for i in range(model.num_layers) if i not in recurrent(model)][:1]
    names = ("q_proj.output", "attention_head_outputs", "o_proj.input", "attention_output")
    gated, heads, entering, out = collect(model, text, *(f"layers.{at}.self_attn.{value}" for value in names))
    gate = gated.unflatten(-1, (model.num_heads, 2, model.head_dim))[:, :, :, 1]
    assert torch.equal(heads.flatten(2) * gate.flatten(2).sigmoid(), entering)
    assert torch.equal(model.layers[at].self_attn.o_proj(entering), out)


# --- the recurrence ---------------------------------------------------------------------------------------------


def test_a_state_to_start_from_is_what_the_tokens_go_on_from(model, text):
    at = recurrent(model)[0]
    site = f"layers.{at}.linear_attn"
    ids = text["input_ids"]
    (carried,) = collect(model, text, f"{site}.state_output")
    with model.trace(input_ids=ids):
        model.layers[at].linear_attn.state = carried
        states = model.layers[at].linear_attn.states.save()
        moved = model.logits.save()
    with model.trace(input_ids=ids):
        clean = model.layers[at].linear_attn.states.save()
    assert (states - clean).abs().max() > 1e-3
    assert (moved - logits_of(model, text)).abs().max() > 1e-4


def test_written_states_are_what_the_tokens_read(model, text):
    at = recurrent(model)[0]
    with model.trace(**text):
        mixer = model.layers[at].linear_attn
        mixer.states[:, 3] = 0
        heads, last = mixer.attention_head_outputs.save(), mixer.state_output.save()
        assert torch.equal(mixer.state_output, last)
    (states,) = collect(model, text, f"layers.{at}.linear_attn.states")
    assert heads[:, 3].count_nonzero() == 0 and heads[:, 4].count_nonzero() > 0
    assert torch.equal(last, states[:, -1])


# --- the state behind one token -----------------------------------------------------------------------------------


def test_the_state_after_a_token_is_that_of_the_states(model, text):
    at = recurrent(model)[0]
    with model.trace(**text):
        mixer = model.layers[at].linear_attn
        mixer.attention_keys[:, 2] *= -1
        rows = [mixer.state_after(t) for t in (0, 4, -1)]
        assert mixer.state.count_nonzero() == 0
        states = mixer.states
    for row, t in zip(rows, (0, 4, -1), strict=True):
        assert torch.equal(row, states[:, t])


def test_a_saved_state_goes_by_the_name_of_its_method(model, text):
    k = recurrent(model)[0]
    with model.trace(**text) as tracer:
        state = model.layers[k].linear_attn.state_after(-1).save()
    assert list(tracer.saved) == [f"layers.{k}.linear_attn.state_after"] and [*tracer.saved.values()][0] is state


def test_a_state_put_in_its_own_place_is_neutral(model):
    prompt = long(model)
    clean = logits_of(model, prompt)

    def edit():
        for i in recurrent(model):
            mixer = model.layers[i].linear_attn
            for t in (0, 70, 63, -1):
                mixer.set_state_after(t, mixer.state_after(t))

    torch.testing.assert_close(logits_of(model, prompt, edit), clean, rtol=1e-4, atol=1e-4)


def test_the_later_of_two_states_for_a_token_counts(model, text):
    at = recurrent(model)[0]
    with model.trace(**text):
        mixer = model.layers[at].linear_attn
        zeros = torch.zeros_like(mixer.state)
        mixer.set_state_after(-1, zeros + 1)
        mixer.set_state_after(2, zeros)
        mixer.set_state_after(-1, zeros + 2)
        heads, last = mixer.attention_head_outputs.save(), mixer.state_output.save()
    assert heads[:, 2].count_nonzero() == 0 and torch.equal(last, zeros + 2)


def test_what_is_no_state_or_no_token_is_refused(model, text):
    at = recurrent(model)[0]
    clean = logits_of(model, text)
    with model.trace(**text):
        mixer = model.layers[at].linear_attn
        state = mixer.state_after(0)
        with pytest.raises(IndexError, match="token 9: there are 9"):
            mixer.state_after(9)
        with pytest.raises(vlscope.InputError, match=r"set_state_after takes .*float32.*float64"):
            mixer.set_state_after(0, state.double())
        with pytest.raises(vlscope.InputError, match="set_state_after takes"):
            mixer.set_state_after(0, state[..., :-1])
        with pytest.raises(vlscope.InputError, match="takes a tensor, not float"):
            mixer.set_state_after(0, 0.0)
        with pytest.raises(vlscope.InputError, match="state_input is None here"):
            model.layers[recurrent(model)[1]].linear_attn.state_input = state
        with pytest.raises(vlscope.OutOfOrderError, match="state_after"):
            mixer.state_after(0)
        assert torch.equal(model.logits, clean)


# --- padding ----------------------------------------------------------------------------------------------------


def test_a_padded_row_is_the_row_alone(name, model, inputs):
    batch = inputs(name, "padded_text")
    at = recurrent(model)[-1]
    together = collect(model, batch, f"layers.{at}.linear_attn.state_output", "logits")
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
        alone = collect(model, {"input_ids": ids[mask][None]}, f"layers.{at}.linear_attn.state_output", "logits")
        torch.testing.assert_close(together[0][row], alone[0][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together[1][row, mask], alone[1][0], rtol=1e-4, atol=1e-4)


# --- generation ---------------------------------------------------------------------------------------------------


def test_steps_of_a_generation_are_a_forward_over_all_tokens(model, image):
    at = recurrent(model)[-1]
    logits, states = [], []
    with model.generate(**image, max_new_tokens=6, eos_token_id=[]) as tracer:
        for _ in tracer.iter[:]:
            mixer = model.layers[at].linear_attn
            states.append(mixer.states[:, -1].clone())
            logits.append(model.logits.clone())
    ids = tracer.result
    whole = {**image, "input_ids": ids[:, :-1], "attention_mask": torch.ones_like(ids[:, :-1])}
    all_states, all_logits = collect(model, whole, f"layers.{at}.linear_attn.states", "logits")
    torch.testing.assert_close(torch.stack(states, 1), all_states[:, -6:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(logits, 1), all_logits[:, -6:], rtol=1e-4, atol=1e-4)


def test_an_edited_state_lasts_for_the_steps_that_follow(model, text):
    at = recurrent(model)[0]

    def run(edit):
        rows = []
        with model.generate(**text, max_new_tokens=4, eos_token_id=[]) as tracer:
            for step in tracer.iter[:]:
                mixer = model.layers[at].linear_attn
                edit(step, mixer)
                rows.append(model.logits.clone())
        return rows

    def zero_output(step, mixer):
        if step == 0:
            mixer.state_output[:] = 0

    def zero_last(step, mixer):
        if step == 0:
            mixer.set_state_after(-1, torch.zeros_like(mixer.state))

    clean = run(lambda step, mixer: None)
    edited = run(zero_output)
    assert torch.equal(edited[0], clean[0]) and not torch.equal(edited[1], clean[1])
    assert not torch.equal(run(zero_last)[0], clean[0])


def test_a_mixer_skipped_on_one_step_is_missed_on_the_next(model, text):
    at = recurrent(model)[0]
    with (
        pytest.raises(vlscope.InputError, match="holds the state behind 9 positions, but 10 came before"),
        model.generate(**text, max_new_tokens=3, eos_token_id=[]) as tracer,
    ):
        for step in tracer.iter[:]:
            if step == 1:
                model.layers[at].linear_attn.skip()
            model.logits


def test_a_recording_with_what_the_blocks_remember_generates_as_the_prompt_does(model, image, tmp_path):
    plain = model.generate(**image, max_new_tokens=5, eos_token_id=[]).result
    recording = model.record(**image, keys=True)
    assert torch.equal(model.generate(recording, max_new_tokens=5, eos_token_id=[]).result, plain)
    recording.save(tmp_path / "prompt.safetensors")
    read = vlscope.Recording.load(tmp_path / "prompt.safetensors")
    assert read.nbytes == recording.nbytes
    assert torch.equal(model.generate(read, max_new_tokens=5, eos_token_id=[]).result, plain)
    with model.trace(recording):
        logits = model.logits.save()
    assert torch.equal(logits, logits_of(model, image))


# --- gradients and dtypes -------------------------------------------------------------------------------------------


def test_gradients_reach_the_recurrence_by_either_form(model, text):
    at = recurrent(model)[0]
    grads = []
    for read_states in (False, True):
        with model.trace(**text):
            mixer = model.layers[at].linear_attn
            keys = mixer.attention_keys.requires_grad_()
            if read_states:
                mixer.states.retain_grad()
            model.logits[0, -1, :8].sum().backward()
        grads.append(keys.grad)
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-5)


def test_a_state_can_be_edited_where_a_graph_is_recorded(model, text):
    at = recurrent(model)[0]
    with model.trace(**text):
        stream = model.layers[at].layer_input.requires_grad_()
        mixer = model.layers[at].linear_attn
        mixer.betas.mul_(0.5)
        mixer.state_output.mul_(2)
        model.logits.sum().backward()
    assert stream.grad.isfinite().all() and stream.grad.abs().max() > 0


def test_in_half_precision_states_stay_in_float32(checkpoint, inputs, name):
    model = vlscope.load(checkpoint(name), dtype=torch.bfloat16)
    at = recurrent(model)[0]
    names = ("attention_queries", "decays", "betas", "states", "attention_head_outputs", "state_output")
    sites = [f"layers.{at}.linear_attn.{value}" for value in names]
    dtypes = [value.dtype for value in collect(model, inputs(name, "one_image"), *sites)]
    half, full = torch.bfloat16, torch.float32
    assert dtypes == [half, full, half, full, half, full]


def test_shapes_are_known_without_weights(model, image):
    at = recurrent(model)[0]
    found = model.scan(**image)
    states = found[f"layers.{at}.linear_attn.states"]
    (real,) = collect(model, image, f"layers.{at}.linear_attn.states")
    assert states.shape == real.shape and states.dtype == real.dtype


def test_a_long_prompt_equals_transformers(name, attention, model, reference_model):
    from vlscope.verify import reference

    prompt = long(model)
    run = reference.run(reference_model(name, attention), prompt)
    sites = [site for site in run.order if ".linear_attn." in site and site in run.values]
    assert len(sites) == 10 * len(recurrent(model))
    values = collect(model, prompt, *sites, "logits")
    faults = [site for site, ours in zip([*sites, "logits"], values, strict=True) if difference(ours, run.values[site])]
    assert not faults
