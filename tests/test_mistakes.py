"""Mistakes that would pass in silence if nobody looked: wrong shapes that broadcast, dead scopes, odd arguments."""
# ruff: noqa: B018 - an attribute that is read and dropped is what many of these tests are about

import contextvars

import numpy as np
import pytest
import torch

import tiny
import vlscope

# --- skips ------------------------------------------------------------------------------------------------------

WRONG_SKIPS = [
    ("layers.1.self_attn.q_proj", lambda m: torch.zeros(1, 1, 64)),
    ("layers.1.mlp.down_proj", lambda m: torch.zeros(1, 1, 1)),
    ("layers.1.input_layernorm", lambda m: torch.zeros(m.hidden_size)),
    ("embed_tokens", lambda m: torch.zeros(1, 1, m.hidden_size)),
    ("projector", lambda m: torch.zeros(1, m.hidden_size)),
    ("vision.patch_embed", lambda m: torch.zeros(1, m.vision.hidden_size)),
    ("vision.deepstack_merger_list.0", lambda m: torch.zeros(1, m.hidden_size)),
    ("vision.layers.1.mlp.linear_fc1", lambda m: torch.zeros(1, 64)),
    ("lm_head", lambda m: torch.zeros(1, 1, m.vocab_size)),
    ("layers.2.mlp", lambda m: torch.zeros(1, 1, m.hidden_size)),
]


@pytest.mark.parametrize("path, value", WRONG_SKIPS, ids=[path for path, _ in WRONG_SKIPS])
def test_a_skip_by_what_would_broadcast_is_refused_naming_both_shapes(model, image, path, value):
    with pytest.raises(vlscope.InputError, match="is skipped with .* but what leaves it is"), model.trace(**image):
        model.get(path).skip(value(model))
        model.logits


FAMILIES = [name for name in ("dense", "qwen2_5", "qwen2", "moe", "qwen3_5") if name in tiny.CONFIGS]


def leaves(module):
    """The modules of a tree whose output is one tensor and that can be skipped."""
    for name in module._names():
        child = getattr(module, name)
        if isinstance(child, vlscope.ModuleList):
            yield from leaves(child[0])
        elif isinstance(child, vlscope.Module):
            yield from leaves(child)
            if child._kind.form == vlscope._core.Form.tensor or "attention_output" in vars(type(child)):
                yield child.path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_skip_by_what_any_module_gives_is_taken_and_changes_nothing(vlscope_model, inputs, name):
    model, given = vlscope_model(name), inputs(name, "one_image")
    plain, skipped = model(**given).logits, 0
    for path in sorted(set(leaves(model))):
        with model.trace(**given):
            try:
                output = model.get(path).output
            except vlscope.VlscopeError:
                continue  # not called on this prompt
        if isinstance(output, tuple):
            output = output[0]
        with model.trace(**given):
            model.get(path).skip(output.clone())
            torch.testing.assert_close(model.logits, plain, rtol=1e-4, atol=1e-5, msg=path)
        skipped += 1
    assert skipped > 25


def test_the_next_token_follows_a_skipped_head(model, image):
    logits = torch.randn(1, image["input_ids"].shape[1], model.vocab_size)
    with model.trace(**image):
        model.lm_head.skip(logits)
        probs = model.next_token_probs.save()
    assert torch.equal(probs, logits[:, -1].softmax(-1))


def test_a_skip_that_comes_too_late_speaks_of_skipping(model, image):
    with model.trace(**image):
        model.layers[1].self_attn.attention_queries
        with pytest.raises(vlscope.OutOfOrderError, match=r"layers\.1 cannot be skipped"):
            model.layers[1].skip()


# --- scopes -----------------------------------------------------------------------------------------------------


def test_a_trace_that_ended_elsewhere_is_innermost_nowhere(model, image):
    """A task that was started inside a block outlives it, with the block's context."""
    seen = {}

    def late():
        for name, act in (("read", lambda: model.logits), ("save", lambda: torch.ones(1).save())):
            with pytest.raises(ValueError, match="with model.trace"):
                act()
            seen[name] = True

    with model.trace(**image):
        context = contextvars.copy_context()
    context.run(late)
    assert seen == {"read": True, "save": True}


def test_two_objects_saved_at_one_site_are_both_kept(model, image):
    with model.trace(**image) as tracer:
        before = model.layers[0].layer_output.save()
        model.layers[0].layer_output = torch.zeros_like(before)
        after = model.layers[0].layer_output.save()
    assert tracer.saved["layers.0.layer_output"] is before and tracer.saved["layers.0.layer_output#2"] is after
    with pytest.raises(AttributeError):
        tracer.saved = 3


# --- arguments --------------------------------------------------------------------------------------------------


def test_blocks_are_given_as_any_kind_of_integer_and_as_nothing_else(model, image):
    vector = torch.ones(model.hidden_size)

    def steered(layers):
        with model.trace(**image):
            model.steer(layers, vector)
            return model.logits.clone()

    for layers in (np.int64(2), [np.int32(2)], torch.tensor(2), np.array([2]), range(2, 3), -2):
        assert torch.equal(steered(layers), steered(2))
    for layers in (True, 2.0, "2", [False]):
        with pytest.raises(TypeError, match="give the number of a block"):
            steered(layers)


@pytest.mark.parametrize("keep", [1.5, "2", -1, True])
def test_a_number_of_logits_that_is_none_is_refused(model, image, keep):
    with pytest.raises(vlscope.InputError, match="logits_to_keep is"):
        model.trace(**image, logits_to_keep=keep)


def test_a_dtype_goes_by_its_name_too(model):
    assert vlscope.load(model.folder, dtype="bfloat16").dtype == torch.bfloat16
    assert vlscope.load(model.folder, dtype="auto").dtype == torch.float32
    for dtype in ("bf17", torch.int32, 3):
        with pytest.raises(vlscope.InputError, match="dtype is"):
            vlscope.load(model.folder, dtype=dtype)


def test_nothing_is_no_prompt_and_no_path(model):
    with pytest.raises(vlscope.InputError, match="there is no prompt"):
        model.trace(None)
    with pytest.raises(vlscope.CheckpointNotFound, match="the path is empty"):
        vlscope.load("")


def test_a_load_without_a_processor_lists_no_value_of_images(model):
    rows = vlscope.load(model.folder, task="text-generation").support()
    assert "deepstack_output" not in rows and not any(name.startswith("vision.") for name in rows)


def test_a_module_cannot_be_assigned_and_is_not_suggested(model):
    with pytest.raises(AttributeError, match=r"layers cannot be assigned") as caught:
        model.layers = 3
    assert "Did you mean" not in str(caught.value)


def test_a_row_of_attention_is_asked_for_by_integers(model, image):
    with model.trace(**image), pytest.raises(TypeError, match=r"query 1\.5: give an integer"):
        model.layers[0].self_attn.attention_row(1.5)


def test_a_column_of_a_sweep_that_selects_nothing_is_refused(model, image):
    with pytest.raises(vlscope.InputError, match="column 0 of positions selects none"):
        vlscope.patching.sweep(model, image, image, layers=[0], positions=[[]], metric=lambda logits: logits.sum())
