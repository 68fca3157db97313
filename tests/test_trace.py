"""The trace as a Python program: order, saving, edits, scopes, threads, names and indices."""
# ruff: noqa: B018 - an attribute that is read and dropped is what many of these tests are about

import asyncio
import gc
import io
import random
import threading

import numpy as np
import pytest
import torch

import tiny
import vlscope
from sites import collect, read
from vlscope.verify import reference


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("dense", "eager")


@pytest.fixture(scope="module")
def clean(model, text):
    return model(**text).logits


# --- order ------------------------------------------------------------------------------------------------------

OUT_OF_ORDER = [
    ("layers.3.layer_output", "layers.2.layer_output"),
    ("vision.tower_output", "projector.output"),
    ("logits", "layers.0.input"),
    ("layers.0.layer_output", "vision.image_features"),
    ("layers.1.self_attn.attention_probabilities", "layers.1.self_attn.attention_queries"),
    ("vision.layers.1.layer_output", "vision.deepstack_merger_list.0.output"),
]


@pytest.mark.parametrize("first, second", OUT_OF_ORDER)
def test_a_passed_value_raises_naming_both_and_the_trace_goes_on(model, image, first, second):
    with model.trace(**image):
        read(model, first)
        with pytest.raises(vlscope.OutOfOrderError) as caught:
            read(model, second)
        assert not isinstance(caught.value, vlscope.NotReachedError)
        message = str(caught.value)
        for site in (first, second):
            assert site in message, message
        logits = model.logits.save()
    assert torch.equal(logits, model(**image).logits)


def test_values_of_one_location_come_in_any_order(model, text):
    with model.trace(**text):
        attn = model.layers[0].self_attn
        v, q, k = attn.attention_values.save(), attn.attention_queries.save(), attn.attention_keys.save()
        attn.attention_keys = k.clone()
        assert attn.attention_queries is q
    assert v.shape == k.shape and q.shape[1] == model.num_heads


def test_a_value_read_again_is_the_same_object(model, image):
    with model.trace(**image):
        for site in (
            "vision.patch_embeddings",
            "vision.layers.0.layer_output",
            "layers.1.layer_output",
            "layers.2.self_attn.attention_queries",
            "logits",
        ):
            assert read(model, site) is read(model, site)
        replacement = torch.zeros_like(model.logits)
        model.logits = replacement
        assert model.logits is replacement


def test_a_value_that_no_image_brings_is_foreseen(model, text, clean):
    with model.trace(**text):
        for site in ("vision.image_features", "layers.0.deepstack_output", "projector.input"):
            with pytest.raises(vlscope.NotReachedError, match="image"):
                read(model, site)
        embedded = model.token_embeddings.save()  # the forward has not moved
        logits = model.logits.save()
    assert embedded.shape[-1] == model.hidden_size and torch.equal(logits, clean)


def test_a_model_states_its_order(model):
    assert model.rank("layer_output") > model.rank("attention_output") > model.rank("attention_queries")
    assert model.rank("attention_queries") == model.rank("attention_values")
    with pytest.raises(KeyError):
        model.rank("layer_outputs")


# --- outside a trace --------------------------------------------------------------------------------------------


def test_a_value_outside_a_trace_says_so(model):
    with pytest.raises(ValueError, match="trace"):
        model.layers[0].layer_output
    with pytest.raises(ValueError, match="trace"):
        model.layers[0].layer_output = torch.zeros(1)


def test_unavailable_is_raised_inside_and_outside_and_through_hasattr(model, text):
    with pytest.raises(vlscope.Unavailable):
        hasattr(model.layers[3], "deepstack_output")
    with model.trace(**text), pytest.raises(vlscope.Unavailable):
        model.layers[3].deepstack_output
    assert issubclass(vlscope.Unavailable, RuntimeError)


def test_a_trace_without_input_needs_an_invoke(model):
    with pytest.raises(ValueError), model.trace() as tracer:
        tracer.layers[0].layer_output


# --- observation changes nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", ["two_images", "padded_text"])
def test_no_set_of_reads_changes_a_bit_of_the_logits(attention, case, vlscope_model, reference_run, inputs):
    model, given = vlscope_model("dense", attention), inputs("dense", case)
    plain = model(**given).logits
    sites = [site for site, _ in reference.reading_list(reference_run("dense", attention, case))]
    sites = [site for site in sites if site != "next_token_probs"]
    choose = random.Random(case + attention)
    for _ in range(30):
        chosen = [site for site in sites if choose.random() < choose.choice([0.02, 0.2, 0.8])]
        with model.trace(**given):
            for site in chosen:
                read(model, site)
            logits = model.logits.save()
        assert torch.equal(logits, plain), chosen


def test_values_saved_together_are_those_saved_one_by_one(model, image):
    sites = [
        f"layers.{i}.{part}"
        for i in range(model.num_layers)
        for part in ("input", "self_attn.attention_output", "mlp.mlp_output", "layer_output")
    ]
    for site, together in zip(sites, collect(model, image, *sites), strict=True):
        assert torch.equal(together, collect(model, image, site)[0])


# --- saving -----------------------------------------------------------------------------------------------------


def test_saved_values_stand_in_a_mapping_by_site(model, image):
    with model.trace(**image) as tracer:
        features = model.vision.image_features.save()
        out = model.layers[-2].layer_output.save()
        mean = out.mean().save()
    assert list(tracer.saved) == ["vision.image_features", "layers.2.layer_output", "saved.0"]
    assert tracer.saved["vision.image_features"] is features
    assert tracer.saved["layers.2.layer_output"] is out and tracer.saved["saved.0"] is mean


def test_save_returns_the_tensor_itself_and_copies_nothing(model, text):
    with model.trace(**text):
        value = model.layers[0].layer_output
        assert value.save() is value is vlscope.save(value)
        before = value.clone().save()
        value[:] = 0
        assert model.layers[0].layer_output is value
    assert value.count_nonzero() == 0 and before.count_nonzero() > 0


def test_save_outside_a_trace_is_refused():
    with pytest.raises(ValueError, match="trace"):
        torch.zeros(1).save()


def test_an_unsaved_value_stays_an_ordinary_tensor(model, text):
    with model.trace(**text):
        x = model.layers[0].layer_output
    assert (x + 1).shape == x.shape


def test_a_saved_slice_has_storage_of_its_own_after_the_block(model, text):
    with model.trace(**text):
        row = model.layers[1].layer_output[0, -1].save()
        expected = row.clone()
    assert row.untyped_storage().nbytes() == model.hidden_size * 4
    assert torch.equal(row, expected)
    buffer = io.BytesIO()
    torch.save(row, buffer)
    assert buffer.tell() < 5000


def test_an_edit_of_a_saved_value_after_the_block_reaches_nothing(model, text, clean):
    with model.trace(**text):
        embedded = model.token_embeddings.save()
        out = model.layers[0].layer_output.save()
        following = model.layers[1].layer_output.save()
    kept = following.clone()
    embedded.zero_(), out.zero_()
    assert torch.equal(following, kept) and torch.equal(model(**text).logits, clean)


def test_the_callers_own_tensors_are_never_written(model, image):
    given = {key: value.clone() for key, value in image.items()}
    with model.trace(**given):
        model.input_ids[:, 0] = 5
        model.attention_mask[:, 0] = 0
        model.vision.input[:] = 0
        model.vision.patch_embed.proj.input[:] = 0
        model.logits
    for key, value in image.items():
        assert torch.equal(given[key], value), key


# --- edits ------------------------------------------------------------------------------------------------------


def test_rebinding_a_name_edits_nothing(model, text, clean):
    with model.trace(**text):
        x = model.layers[1].layer_output
        x = x * 0  # noqa: F841
        logits = model.logits.save()
    assert torch.equal(logits, clean)


def test_every_alias_sees_an_edit(model, text):
    with model.trace(**text):
        model.layers[0].layer_output[:] = 1
        assert model.layers[0].output.eq(1).all() and model.layers[1].input.eq(1).all()
        replacement = torch.full_like(model.layers[1].input, 2)
        model.layers[1].layer_input = replacement
        assert model.layers[1].input is replacement


def test_a_masked_assignment_lands_and_a_masked_copy_does_not(model, image):
    clean = model(**image).logits
    with model.trace(**image):
        mask = model.vision.image_token_mask
        model.layers[1].layer_output[mask] *= 0  # read, multiplied, stored again
        landed = model.logits.save()
    with model.trace(**image):
        part = model.layers[1].layer_output[image["input_ids"] == tiny.IMAGE]
        part *= 0
        untouched = model.logits.save()
    assert not torch.equal(landed, clean) and torch.equal(untouched, clean)


def test_an_edit_of_one_row_stays_in_its_row(model, inputs):
    given = inputs("dense", "padded_text")
    clean = model(**given).logits
    with model.trace(**given):
        model.layers[1].layer_output[1, 2] = 0
        logits = model.logits.save()
    assert torch.equal(logits[[0, 2]], clean[[0, 2]]) and not torch.equal(logits[1], clean[1])


def test_an_edit_of_the_present_value_through_an_earlier_alias_is_taken(model, text):
    with model.trace(**text):
        x = model.layers[0].layer_output
        model.layers[1].input  # the same storage, where the forward now stands
        x[:] = 3
        assert model.layers[1].input_layernorm.input.eq(3).all()


LATE = {
    "a block's output, two blocks later": ("layers.0.layer_output", "layers.2.layer_output"),
    "a block's input, after its output": ("layers.0.input", "layers.0.layer_output"),
    "an attention's output, after its block's": ("layers.1.self_attn.attention_output", "layers.1.layer_output"),
    "a block's input, after its norm has read it": ("layers.1.input", "layers.1.input_layernorm.output"),
    "image features, after the scatter": ("vision.image_features", "layers.0.input"),
}


@pytest.mark.parametrize("early, later", LATE.values(), ids=LATE)
@pytest.mark.parametrize("noticed", ["at the next read", "at the next write", "on leaving the block"])
def test_a_late_edit_is_refused_by_name(model, image, early, later, noticed):
    clean = model(**image).logits
    with pytest.raises(vlscope.LateEditError) as caught, model.trace(**image):
        x = read(model, early)
        read(model, later)
        x[:] = 0
        if noticed == "at the next read":
            model.logits
            pytest.fail("the read went through")
        if noticed == "at the next write":
            model.logits = clean
            pytest.fail("the write went through")
    names = {early, early.replace(".input", ".layer_input"), early.replace(".layer_input", ".input")}
    assert any(name in str(caught.value) for name in names), caught.value
    assert torch.equal(model(**image).logits, clean)


def test_assigning_a_passed_value_is_out_of_order(model, text, clean):
    with model.trace(**text):
        new = torch.zeros_like(model.layers[0].layer_output)
        model.layers[2].layer_output
        with pytest.raises(vlscope.OutOfOrderError, match=r"layers\.0\.layer_output"):
            model.layers[0].layer_output = new
        logits = model.logits.save()
    assert torch.equal(logits, clean)


def test_a_misspelt_assignment_is_an_error_and_stores_nothing(model, text):
    with model.trace(**text), pytest.raises(AttributeError, match="layer_output"):
        model.layers[1].layer_outptu = torch.zeros(1)
    assert "layer_outptu" not in vars(model.layers[1]) if hasattr(model.layers[1], "__dict__") else True


def test_patching_the_residual_stream_from_another_run(model, text, inputs):
    other = dict(text, input_ids=text["input_ids"].flip(1))
    (source,) = collect(model, text, "layers.1.layer_output")
    with model.trace(**other):
        model.layers[1].layer_output[:] = source
        logits = model.logits.save()
    assert torch.equal(logits, model(**text).logits)


# --- scopes -----------------------------------------------------------------------------------------------------


def test_two_prompts_in_lockstep(model, text):
    other = dict(text, input_ids=text["input_ids"].flip(1))
    with model.trace(**text) as x, model.trace(**other) as y:
        x.layers[1].layer_output[:] = y.layers[1].layer_output
        patched, source = x.logits.save(), y.logits.save()
    assert torch.equal(patched, source) and torch.equal(source, model(**other).logits)
    assert x.saved["logits"] is patched and y.saved["logits"] is source


def test_a_bare_model_means_the_innermost_trace(model, text):
    other = dict(text, input_ids=text["input_ids"].flip(1))
    with model.trace(**text) as outer:
        first = model.layers[0].layer_output.save()
        with model.trace(**other):
            second = model.layers[0].layer_output.save()
            inner = model.logits.save()
        logits = model.logits.save()
    assert list(outer.saved) == ["layers.0.layer_output", "logits"]
    assert not torch.equal(first, second)
    assert torch.equal(logits, model(**text).logits) and torch.equal(inner, model(**other).logits)


def test_two_models_nested(model, text, vlscope_model):
    fused = vlscope_model("dense", "sdpa")
    with model.trace(**text):
        with fused.trace(**text):
            theirs = fused.logits.save()
        ours = model.logits.save()
    assert torch.equal(theirs, fused(**text).logits) and torch.equal(ours, model(**text).logits)


def test_invokes_run_where_they_stand_and_values_pass_between_them(model, text, image):
    with model.trace() as tracer:
        with tracer.invoke(**text):
            source = model.layers[2].layer_output[:, -1].save()
        with tracer.invoke(**image):
            features = model.vision.image_features.save()
            model.layers[2].layer_output[:, -1] = source
            patched = model.logits.save()
    assert len(features) and not torch.equal(patched, model(**image).logits)
    with pytest.raises(ValueError, match="list"), model.trace() as tracer, tracer.invoke():
        pass


def test_stop_ends_the_block_and_keeps_what_was_saved(model, text):
    after = False
    with model.trace(**text) as tracer:
        out = model.layers[0].layer_output.save()
        tracer.stop()
        after = True
    assert not after and out.shape[-1] == model.hidden_size


def test_an_exception_leaves_the_model_as_it_was(model, text, clean):
    with pytest.raises(ZeroDivisionError), model.trace(**text):
        model.layers[1].layer_output[:] = 0
        1 / 0
    with pytest.raises(ValueError, match="trace"):
        model.layers[0].layer_output
    assert torch.equal(model(**text).logits, clean)


def test_an_empty_body_runs_nothing_and_fails_nowhere(model, text):
    with model.trace(**text) as tracer:
        pass
    assert not tracer.saved


def _collect_outputs(model):
    return [layer.layer_output.save() for layer in model.layers]


def test_helpers_comprehensions_lambdas_and_exec_work(model, text):
    with model.trace(**text):
        helper = _collect_outputs(model)
    with model.trace(**text):
        comprehension = [layer.layer_output.save() for layer in model.layers]
    names = {"model": model, "text": text}
    exec("with model.trace(**text): outs = [layer.layer_output.save() for layer in model.layers]", names)
    with model.trace(**text):
        lazily = [(lambda i=i: model.layers[i].layer_output)().save() for i in range(len(model.layers))]
    for outs in (comprehension, names["outs"], lazily):
        assert len(outs) == len(helper) == model.num_layers
        assert all(torch.equal(a, b) for a, b in zip(outs, helper, strict=True))
    with model.trace(**text):
        assert len(list(model.layers[0].layer_output)) == 1


def test_two_threads_trace_one_model_as_one_would(model, text, image):
    def work(given, factor):
        with model.trace(**given):
            model.layers[1].layer_output.mul_(factor)
            return model.logits.save()

    jobs = [(text, 0.5), (image, 2.0)]
    expected = [work(*job) for job in jobs]
    got, faults = [[], []], []

    def run(index):
        try:
            torch.set_num_threads(1)
            got[index] = [work(*jobs[index]) for _ in range(100)]
        except Exception as error:  # reported by the main thread
            faults.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    for results, one in zip(got, expected, strict=True):
        assert len(results) == 100 and all(torch.equal(result, one) for result in results)


def test_tasks_of_one_event_loop_each_have_their_own_innermost_trace(model, text, image):
    async def work(given, factor, turns):
        with model.trace(**given):
            for layer in model.layers:
                layer.layer_output.mul_(factor)
                await asyncio.sleep(0)
                turns.append(factor)
            return model.logits.save()

    async def together(turns):
        return await asyncio.gather(*(work(*job, turns) for job in jobs))

    jobs = [(text, 0.5), (image, 2.0), (text, 3.0)]
    turns = []
    got = asyncio.run(together(turns))
    assert turns != sorted(turns)
    for result, job in zip(got, jobs, strict=True):
        assert torch.equal(result, asyncio.run(work(*job, [])))


def test_prompts_follow_each_other_without_a_trace_of_the_last(model, text, image, inputs):
    other = inputs("dense", "two_images")
    fresh = [model(**given).logits for given in (text, image, other)]
    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        for i in order:
            assert torch.equal(model(**(text, image, other)[i]).logits, fresh[i])


def test_abandoned_traces_leave_memory_flat(model, image):
    def live():
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    def abandon():
        with model.trace(**image):
            model.layers[1].layer_output

    abandon()
    before = live()
    for _ in range(50):
        abandon()
    assert live() <= before + 2


# --- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "site",
    [
        "layers.1.layer_output",
        "layers.0.deepstack_output",
        "vision.image_features",
        "vision.layers.0.layer_output",
        "layers.1.self_attn.attention_queries",
    ],
)
def test_a_gradient_reaches_a_served_value(model, image, site):
    def logit(edit):
        with model.trace(**image):
            value = read(model, site)
            edit(value)
            return model.logits[0, -1, 5].save(), value

    score, value = logit(lambda x: x.requires_grad_())
    score.backward()
    direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    step = 1e-3
    with torch.no_grad():
        up, down = (logit(lambda x, s=s: x.add_(direction * s * step))[0] for s in (1, -1))
    slope = (up - down).item() / (2 * step)
    assert value.grad is not None and abs(slope) > 1e-3
    assert (value.grad * direction).sum().item() == pytest.approx(slope, rel=0.05, abs=5e-3)


# --- names and indices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "owner, wrong, near",
    [
        ("layers.0", "layer_outputs", "layer_output"),
        ("", "logit", "logits"),
        ("layers.0.self_attn", "attention_query", "attention_queries"),
        ("vision", "image_feature", "image_features"),
    ],
)
def test_a_misspelt_name_is_answered_with_near_ones(model, text, owner, wrong, near):
    host = read(model, owner)
    for _ in range(2):
        with pytest.raises(AttributeError, match=rf"\b{near}\b"):
            getattr(host, wrong)
        with model.trace(**text), pytest.raises(AttributeError, match=rf"\b{near}\b"):
            getattr(host, wrong)


def test_layers_take_the_indices_of_a_list(model, text):
    (last,) = collect(model, text, "layers.3.layer_output")
    for index in (-1, 3, np.int64(3), np.int64(-1)):
        with model.trace(**text):
            assert torch.equal(model.layers[index].layer_output, last)
    for index in (4, -5, 10**9):
        with pytest.raises(IndexError, match=r"\b4\b"):
            model.layers[index]
    with pytest.raises(TypeError):
        model.layers[1.0]
    with pytest.raises(IndexError, match=r"\b2\b"):
        model.vision.deepstack_merger_list[2]
    assert len(list(model.layers)) == len(model.layers[:]) == 4 and len(model.layers[1:3]) == 2


def test_completion_and_help_advance_nothing(model, text):
    with model.trace(**text):
        assert "layer_output" in dir(model.layers[0]) and "self_attn" in dir(model.layers[0])
        assert type(model.layers[0]).layer_output.__doc__
        embedded = model.token_embeddings
    assert embedded.shape[-1] == model.hidden_size


def test_containers_are_read_only(model, image):
    with model.trace(**image):
        args, kwargs = model.vision.layers[1].self_attn.inputs
        with pytest.raises(TypeError):
            kwargs["cu_seqlens"] = torch.zeros(1)
        with pytest.raises(TypeError):
            args[0] = torch.zeros(1)
        output = model.layers[0].self_attn.output
        assert isinstance(output, tuple) and len(output) == 2


def test_skipping_a_module_answers_for_it(model, text):
    with model.trace(**text):
        mlp_input = model.layers[1].mlp.input.save()
        model.layers[1].mlp.skip(torch.zeros_like(mlp_input))
        output = model.layers[1].mlp.mlp_output.save()
    assert output.count_nonzero() == 0


def test_get_finds_a_module_by_its_path(model):
    assert model.get("layers.0.self_attn") is model.layers[0].self_attn


def test_a_skip_of_another_shape_is_refused_naming_both(model, text):
    clean = model(**text).logits
    with pytest.raises(vlscope.InputError, match=r"layers\.1 .*\[1, 2, 3\].*48\]"), model.trace(**text):
        model.layers[1].skip(torch.zeros(1, 2, 3))
        model.logits
    assert torch.equal(model(**text).logits, clean)
