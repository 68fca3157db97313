"""Edits that stand in every trace, and caches of values that nobody reads one by one."""
# ruff: noqa: B018 - an attribute that is read and dropped is what many of these tests are about

import pytest
import torch

import vlscope


@pytest.fixture
def model(vlscope_model):
    model = vlscope_model("dense")
    yield model
    model.clear_edits()


def halve(value):
    value *= 0.5


def traced(model, given, act=lambda: None):
    with model.trace(**given):
        act()
        return model.logits.clone()


def written_out(model):
    model.layers[1].layer_output[:] *= 0.5


@pytest.mark.parametrize("function", [halve, lambda value: value * 0.5], ids=["in place", "returned"])
def test_an_edit_is_the_one_that_a_trace_writes_out(model, image, function):
    expected = traced(model, image, lambda: written_out(model))
    plain = model(**image).logits
    model.edit("layers.1.layer_output", function)
    assert torch.equal(traced(model, image), expected) and not torch.equal(plain, expected)
    assert torch.equal(model(**image).logits, expected)
    model.clear_edits()
    assert torch.equal(traced(model, image), plain)


def test_the_script_sees_what_the_edit_made_and_may_go_on_from_there(model, image):
    model.edit("layers.1.layer_output", torch.zero_)
    with model.trace(**image):
        model.layers[1].mlp.mlp_output
        assert not model.layers[1].layer_output.any()
        model.layers[1].layer_output[:] = 1
        assert (model.layers[2].layer_input[0, 0] == 1).all()


def test_an_edit_at_every_site_of_a_pattern(model, image):
    def all_written_out():
        for layer in model.layers:
            layer.mlp.mlp_output[:] *= 0.5

    expected = traced(model, image, all_written_out)
    edit = model.edit("layers.*.mlp.mlp_output", halve)
    assert edit.sites == tuple(f"layers.{k}.mlp.mlp_output" for k in range(4))
    assert torch.equal(traced(model, image), expected)
    assert torch.equal(traced(model, image, lambda: [layer.layer_output for layer in model.layers]), expected)


def test_edits_of_the_tower_act_before_anything_of_the_text_model_is_read(model, image):
    with model.edit("vision.image_features", torch.zero_), model.trace(**image):
        blind = model.layers[0].layer_input.save()
    with model.trace(**image):
        model.vision.image_features[:] = 0
        assert torch.equal(blind, model.layers[0].layer_input)


def test_what_a_forward_does_not_reach_is_passed_over(model, text):
    plain = model(**text).logits
    model.edit(["vision.image_features", "layers.0.deepstack_output"], torch.zero_)
    assert torch.equal(traced(model, text), plain)


def test_an_edit_inside_a_skipped_block_is_passed_over(model, text):
    expected = traced(model, text, lambda: model.skip_layer(2))
    model.edit("layers.2.mlp.mlp_output", torch.zero_)
    assert torch.equal(traced(model, text, lambda: model.skip_layer(2)), expected)


def test_the_same_key_replaces_and_others_add(model, text):
    model.edit("layers.1.layer_output", torch.zero_, key="a")
    model.edit("layers.1.layer_output", halve, key="a")
    assert [edit.key for edit in model.edits] == ["a"]
    assert torch.equal(traced(model, text), traced_without(model, text, lambda: written_out(model)))
    model.edit("layers.1.layer_output", halve, key="b")

    def twice():
        model.layers[1].layer_output[:] *= 0.25

    assert torch.equal(traced(model, text), traced_without(model, text, twice))
    model.clear_edits("a")
    assert [edit.key for edit in model.edits] == ["b"]
    with pytest.raises(KeyError, match="'a'"):
        model.clear_edits("a")


def traced_without(model, given, act):
    standing, model._edits = model._edits, {}
    try:
        return traced(model, given, act)
    finally:
        model._edits = standing


def test_as_a_context_manager_it_lasts_for_the_block(model, text):
    plain = model(**text).logits
    with model.edit("layers.0.layer_output", torch.zero_) as edit:
        assert model.edits == (edit,) and not torch.equal(model(**text).logits, plain)
    assert model.edits == () and torch.equal(model(**text).logits, plain)
    with pytest.raises(ZeroDivisionError), model.edit("layers.0.layer_output", torch.zero_):
        1 / 0
    assert model.edits == ()


def test_an_open_trace_keeps_the_edits_it_began_with(model, text):
    plain = model(**text).logits
    with model.trace(**text):
        model.edit("layers.0.layer_output", torch.zero_)
        assert torch.equal(model.logits, plain)


def test_an_edit_acts_on_every_step_of_a_generation(model, text):
    def steered():
        with model.generate(**text, max_new_tokens=8, eos_token_id=[]) as tracer:
            for _ in tracer.iter[:]:
                written_out(model)
        return tracer.result

    expected, plain = steered(), model.generate(**text, max_new_tokens=8, eos_token_id=[]).result
    model.edit("layers.1.layer_output", halve)
    found = model.generate(**text, max_new_tokens=8, eos_token_id=[]).result
    assert torch.equal(found, expected) and not torch.equal(found, plain)


def test_edits_act_in_traces_of_a_recording(model, image):
    clean = model.record(**image)
    model.edit("layers.1.layer_output", halve)
    with model.trace(clean):
        found = model.logits.save()
    assert torch.equal(found, traced(model, image))
    assert torch.equal(model.record(**image)._core.tensors()["streams.4"], clean._core.tensors()["streams.4"])


def test_an_error_in_an_edit_reaches_the_script_and_the_model_works_on(model, text):
    plain = model(**text).logits

    def fail(value):
        raise ZeroDivisionError

    with model.edit("layers.1.layer_output", fail), pytest.raises(ZeroDivisionError), model.trace(**text):
        model.logits
    assert torch.equal(model(**text).logits, plain)


def test_a_replacement_of_another_shape_is_refused(model, text):
    with (
        model.edit("layers.1.layer_output", lambda value: value[:, :1]),
        pytest.raises(vlscope.InputError, match=r"layers\.1\.layer_output holds"),
        model.trace(**text),
    ):
        model.logits


def test_a_result_that_is_no_tensor_is_refused_naming_the_site(model, text):
    with (
        model.edit("layers.1.layer_output", lambda value: 3),
        pytest.raises(vlscope.InputError, match=r"the edit of layers\.1\.layer_output returned int"),
    ):
        model(**text)


def test_what_cannot_be_edited_is_refused_at_once(model):
    for site, error, message in (
        ("layers.9.layer_output", vlscope.UnknownSite, "layers"),
        ("layers.0.layer_outptu", vlscope.UnknownSite, "layer_output"),
        ("vision.layers.0.self_attn.attention_scores", vlscope.Unavailable, "unavailable"),
        ("next_token_probs", vlscope.InputError, "read-only"),
        ("vision.image_token_mask", vlscope.InputError, "read-only"),
    ):
        with pytest.raises(error, match=message):
            model.edit(site, halve)
    with pytest.raises(vlscope.InputError, match="a function of the value"):
        model.edit("logits", 3)
    assert model.edits == ()


def test_edits_of_two_traces_in_lockstep_do_not_meet(model, text, image):
    model.edit("layers.1.layer_output", halve)
    expected = [traced(model, text), traced(model, image)]
    with model.trace(**text) as one, model.trace(**image) as two:
        for k in range(4):
            one.layers[k].layer_output, two.layers[k].layer_output
        assert torch.equal(one.logits, expected[0]) and torch.equal(two.logits, expected[1])


def test_an_edit_describes_itself(model):
    assert repr(model.edit("layers.1.layer_output", halve, key="k")) == "<Edit 'k': halve at layers.1.layer_output>"


# --- caches -----------------------------------------------------------------------------------------------------


def test_a_cache_holds_every_site_of_its_patterns(model, image):
    with model.trace(**image) as tracer:
        kept = tracer.cache(["layers.*.layer_output", "vision.image_features", "vision.layers.-1.layer_output"])
    assert list(kept) == [
        "vision.layers.3.layer_output",
        "vision.image_features",
        *(f"layers.{k}.layer_output" for k in range(4)),
    ]
    with model.trace(**image):
        for site, value in kept.items():
            assert torch.equal(value, model.get(site))


def test_a_cache_runs_no_further_than_its_last_site(model, image):
    """The rest of the model is worthless, and nobody notices."""
    copy = vlscope.load(model.folder)
    copy.layers[2].mlp.up_proj.weight.fill_(float("nan"))
    with copy.trace(**image) as tracer:
        kept = tracer.cache("layers.1.layer_output")
    assert kept["layers.1.layer_output"].isfinite().all() and not tracer.saved


def test_a_cache_shows_the_scripts_edits_and_takes_values_of_any_form(model, image):
    with model.trace(**image) as tracer:
        kept = tracer.cache(["layers.1.layer_output", "vision.layers.0.self_attn.image_attention_probabilities"])
        model.layers[1].layer_output[:] = 3
        model.logits
    assert (kept["layers.1.layer_output"] == 3).all()
    (pattern,) = kept["vision.layers.0.self_attn.image_attention_probabilities"]
    torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))


def test_a_cache_moves_what_it_keeps(model, image):
    with model.trace(**image) as tracer:
        kept = tracer.cache("layers.1.layer_output", dtype=torch.float16)
    assert kept["layers.1.layer_output"].dtype == torch.float16


def test_a_cache_of_a_generation_is_a_list_of_steps(model, image):
    with model.generate(**image, max_new_tokens=3, eos_token_id=[]) as tracer:
        kept = tracer.cache(["layers.0.layer_output", "vision.image_features"])
    length = image["input_ids"].shape[1]
    assert [value.shape[1] for value in kept["layers.0.layer_output"]] == [length, 1, 1]
    assert len(kept["vision.image_features"]) == 1


def test_a_cache_that_comes_too_late_is_refused(model, image):
    with model.trace(**image) as tracer:
        model.layers[2].layer_output
        with pytest.raises(vlscope.OutOfOrderError, match=r"layers\.0\.layer_output"):
            tracer.cache("layers.*.layer_output")
        kept = tracer.cache("layers.3.layer_output")
    assert list(kept) == ["layers.3.layer_output"]
    with pytest.raises(vlscope.OutOfOrderError, match="not open"):
        tracer.cache("layers.0.layer_output")


def test_a_session_can_be_left_from_inside(model, text):
    seen = []
    with model.session() as session:
        for k in range(3):
            with model.trace(**text):
                seen.append(model.layers[k].layer_output.save())
                if k == 1:
                    session.stop()
    assert len(seen) == 2 and torch.equal(model(**text).logits, traced(model, text))
