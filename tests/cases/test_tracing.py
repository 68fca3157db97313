"""Order, saving, nesting and naming in traces: what each case asks of them."""
# ruff: noqa: B018 - an attribute that is read and dropped is what many of these tests are about

import code
import contextlib
import io

import numpy as np
import pytest
import torch

import vlscope


@pytest.mark.parametrize(
    "later, earlier",
    [
        ("layers.3.layer_output", "layers.2.layer_output"),
        ("projector.output", "vision.tower_output"),
        ("vision.image_features", "vision.tower_output"),
        ("logits", "layers.0.input"),
        ("layers.0.layer_output", "vision.image_features"),
    ],
)
def test_tr_01_a_pair_read_backwards_is_refused_naming_both_and_their_order(model, image, later, earlier):
    """`vision.tower_output` is served as the tower returns, after the projector: design, section 8."""
    if model.order(later) < model.order(earlier):
        later, earlier = earlier, later
    plain = model(**image).logits
    with model.trace(**image):
        model.get(later)
        with pytest.raises(vlscope.OutOfOrderError) as caught:
            model.get(earlier)
        kept = model.get(later)
    assert earlier in str(caught.value) and later in str(caught.value) and kept is not None
    assert torch.equal(model(**image).logits, plain)


def test_tr_02_a_value_is_read_as_often_as_one_likes_and_under_either_name(model, text):
    with model.trace(**text):
        first = model.layers[1].layer_output.save()
        second = model.layers[1].layer_output.save()
        snapshot = first.clone()
        first[:] += 1
        third = model.layers[1].layer_output.save()
    assert first is second and torch.equal(third, snapshot + 1) and torch.equal(first, third)
    with model.trace(**text):
        out = model.layers[0].layer_output.save()
        entering = model.layers[1].input.save()
        assert torch.equal(out, entering)
        out[:] = 2
        assert (entering == 2).all()


def test_tr_04_what_was_not_saved_is_an_ordinary_tensor(model, text, capsys):
    kept = []
    with model.trace(**text) as tracer:
        x = model.layers[0].layer_output
        kept.append(model.layers[1].layer_output.save())
        y = x.mean().save()
    with model.trace(**text):
        again = model.layers[0].layer_output
        assert torch.equal(x, again) and torch.equal(x + 1, again + 1)
    assert x.shape == (1, 9, 48) and torch.equal(y, x.mean())
    print(x)
    assert "tensor(" in capsys.readouterr().out and kept[0].shape == x.shape
    assert list(tracer.saved) == ["layers.1.layer_output", "saved.0"]
    with pytest.raises(KeyError, match=r"layers\.0\.layer_output' was not saved"):
        tracer.saved["layers.0.layer_output"]


def test_tr_06_a_trace_or_a_generation_inside_a_trace_has_a_state_of_its_own(model, vlscope_model, text, image):
    other = vlscope_model("ungrouped")
    plain, plain_other = model(**text).logits, other(**text).logits
    tokens = model.generate(**image, max_new_tokens=3).result

    def inner():
        with model.trace(**image):
            model.layers[2].layer_output[:] = 0
            return model.logits.clone()

    alone = inner()
    with model.trace(**text):
        before = model.layers[0].layer_output.clone()
        assert torch.equal(inner(), alone)
        with other.trace(**text):
            assert torch.equal(other.logits, plain_other)
        assert torch.equal(model.generate(**image, max_new_tokens=3).result, tokens)
        assert torch.equal(model.layers[0].layer_output, before)
        assert torch.equal(model.logits, plain)


def test_tr_08_the_body_is_plain_python_wherever_it_stands(model, text):
    with model.trace(**text):
        straight = [model.layers[k].layer_output.save() for k in range(4)]

    def check(values):
        assert len(values) == 4 and all(torch.equal(a, b) for a, b in zip(values, straight, strict=True))

    with model.trace(**text):
        check([layer.layer_output.save() for layer in model.layers])
    with model.trace(**text):
        check([(lambda k=k: model.layers[k].layer_output)() for k in range(4)])
    with model.trace(**text):
        check([vlscope.sites.read(model, f"layers.{k}.layer_output") for k in range(4)])  # a helper of another file
    with model.trace(**text): check([layer.layer_output for layer in model.layers])  # fmt: skip # noqa: E701
    names = {"model": model, "text": text}
    body = "with model.trace(**text):\n    seen = [layer.layer_output.save() for layer in model.layers]\n"
    exec(body, names)  # noqa: S102
    check(names["seen"])
    del names["seen"]
    console = code.InteractiveConsole(names)
    with contextlib.redirect_stderr(io.StringIO()):
        for line in [*body.splitlines(), ""]:
            console.push(line)
    check(names["seen"])
    with model.trace(**text):
        assert len(list(model.layers[0].layer_output)) == 1


@pytest.mark.parametrize("site", ["vision.image_features", "vision.layers.0.layer_output", "projector.output"])
def test_tr_10_an_image_value_on_a_text_prompt_says_that_there_is_no_image(model, text, site):
    with model.trace(**text):
        with pytest.raises(vlscope.NotReachedError, match="no image") as caught:
            model.get(site)
        assert site.rpartition(".")[0] in str(caught.value)
        assert not model.vision.image_token_mask.any()


def test_tr_11_indices_are_those_of_a_python_list(model, text):
    assert model.layers[-1].path == model.layers[3].path == model.layers[np.int64(3)].path
    assert model.vision.layers[-1].path == model.vision.layers[3].path
    assert [layer.path for layer in model.layers[1:3]] == [model.layers[1].path, model.layers[2].path]
    assert len(list(model.layers)) == 4 and len(list(model.vision.deepstack_merger_list)) == 2
    for layers in (model.layers, model.vision.layers):
        for index in (4, 36, -5, np.int64(4)):
            with pytest.raises(IndexError, match="there are 4, 0 to 3"):
                layers[index]
    with pytest.raises(IndexError, match="2"):
        model.vision.deepstack_merger_list[2]
    for index in (1.0, "1", None, True):
        with pytest.raises(TypeError):
            model.layers[index]


def test_tr_12_a_wrong_name_is_an_error_at_once_and_an_alias_works(model, text):
    with model.trace(**text):
        with pytest.raises(AttributeError, match="layer_output"):
            model.layers[0].layer_outputs
        assert model.layers[0].mlp.output is not None
        assert torch.equal(model.model.language_model.layers[0].output, model.layers[0].layer_output)
    with pytest.raises(AttributeError, match=r"model\.visual"):
        model.visual
    assert model.model.visual.path == model.vision.path


def test_tr_14_empty_inputs_and_ids_beyond_the_vocabulary_are_refused_by_number(model):
    plain = model("hi").logits
    with model.trace("hi"):
        pass
    for empty in ("", [], torch.zeros(1, 0, dtype=torch.long)):
        with pytest.raises(vlscope.InputError, match=r"empty|no token|no prompt"), model.trace(empty):
            model.logits
    with pytest.raises(vlscope.InputError, match="no prompt"):
        model.trace(None)
    for wrong in (model.vocab_size, -1, 10**9):
        with pytest.raises(vlscope.InputError, match=str(wrong)), model.trace([1, wrong]):
            model.logits
    with model.trace([5]):
        assert model.logits.shape == (1, 1, model.vocab_size)
    assert torch.equal(model("hi").logits, plain)


def test_tr_15_no_value_is_kept_in_memory_that_a_later_one_reuses(model, text):
    sites = vlscope.sites.expand(
        model,
        ["layers.*.input", "layers.*.self_attn.attention_output", "layers.*.mlp.mlp_output", "layers.*.layer_output"],
    )
    with model.trace(**text) as tracer:
        together = {site: model.get(site).save() for site in sites}
    for site in sites:
        with model.trace(**text):
            alone = model.get(site).clone()
        assert torch.equal(together[site], alone), site
    with model.generate(**text, max_new_tokens=4, eos_token_id=[]) as tracer:
        steps = [model.layers[1].layer_output.save() for _ in tracer.iter[:]]
    for wanted, value in enumerate(steps):
        with model.generate(**text, max_new_tokens=4, eos_token_id=[]) as tracer:
            for _ in tracer.iter[wanted]:
                assert torch.equal(model.layers[1].layer_output, value)
