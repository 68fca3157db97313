"""Edits: what is taken, what is refused, and what an edit reaches."""
# ruff: noqa: B018 - an attribute that is read and dropped is what many of these tests are about

import pytest
import torch

import vlscope
from vlscope.verify.prompts import SQUARE, WIDE


@pytest.fixture(scope="module")
def half(checkpoint):
    return vlscope.load(checkpoint("dense"), dtype=torch.bfloat16)


def ids(count):
    return torch.arange(5, 5 + count)[None]


def test_iv_01_a_saved_value_shows_later_edits_and_a_clone_does_not(model, text):
    with model.trace(**text):
        value = model.layers[1].layer_output
        before, snapshot = value.save(), value.clone().save()
        value[:] = 0
        after = model.layers[1].layer_output.save()
    assert before is after and not before.any() and snapshot.any()
    plain = model(**text).logits
    with model.trace(**text):
        x = model.layers[1].layer_output
        x = x * 0
        assert torch.equal(model.logits, plain)
    with model.trace(**text):
        before = model.layers[1].layer_output.save()
        model.layers[1].layer_output = torch.zeros_like(before)
        after = model.layers[1].layer_output.save()
        moved = model.logits.save()
    assert torch.equal(before, snapshot) and not after.any() and not torch.equal(moved, plain)


@pytest.mark.parametrize("shape", [(1, 6, 48), (48,), (7, 1), (1, 7, 1), (7, 48), (2, 7, 48), (), (0,), (1, 48, 7)])
def test_iv_02_an_assignment_of_another_shape_is_refused_with_both(model, shape):
    plain = model(ids(7)).logits
    with model.trace(ids(7)):
        with pytest.raises(vlscope.InputError) as caught:
            model.layers[1].layer_output = torch.zeros(shape)
        assert "[1, 7, 48]" in str(caught.value) and f"[{', '.join(map(str, shape))}]" in str(caught.value)
        assert torch.equal(model.logits, plain)


@pytest.mark.parametrize("value", [0.0, None, [[0.0] * 48] * 7])
def test_iv_02_what_is_no_tensor_is_refused(model, value):
    with model.trace(ids(7)), pytest.raises(vlscope.InputError, match="takes a tensor"):
        model.layers[1].layer_output = value


def test_iv_02_an_indexed_assignment_follows_torch(model):
    with model.trace(ids(7)):
        x = model.layers[1].layer_output
        before = x.clone()
        x[:, 3] = torch.ones(48)
        x[:, 4] = torch.full((1, 48), 2.0)
        with pytest.raises(RuntimeError, match="7"):
            x[:, 3] = torch.ones(7)
        read = model.layers[2].input  # what the next block takes
        assert (read[:, 3] == 1).all() and (read[:, 4] == 2).all()
        kept = [0, 1, 2, 5, 6]
        assert torch.equal(read[:, kept], before[:, kept])
    with model.trace(ids(48)), pytest.raises(vlscope.InputError):  # as many tokens as hidden channels
        model.layers[1].layer_output = torch.zeros(48, 48)


def test_iv_04_a_float32_vector_added_in_place_is_rounded_once_and_the_run_stays_bfloat16(half, text):
    """An assignment of float32 is refused naming both dtypes, as section 2 of the design has it."""
    vector = torch.linspace(-1, 1, 48)
    with half.trace(**text):
        x = half.layers[1].layer_output
        expected = (x.float() + vector).bfloat16()
        x[:] += vector
        assert torch.equal(half.layers[1].layer_output, expected)
        assert half.layers[3].layer_output.dtype == half.logits.dtype == torch.bfloat16
    with half.trace(**text):
        with pytest.raises(vlscope.InputError, match=r"holds .* bfloat16 .* is .* float32"):
            half.layers[1].layer_output = half.layers[1].layer_output + vector
        assert half.logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "tensor, said",
    [
        (torch.zeros(1, 9, 48, device="meta"), r"cpu.*meta|meta.*cpu"),
        (torch.zeros(1, 9, 48).to_sparse(), "(?i)sparse"),
    ],
)
def test_iv_06_a_tensor_of_another_device_or_layout_is_refused_naming_it(model, text, tensor, said):
    plain = model(**text).logits
    with model.trace(**text):
        with pytest.raises(vlscope.InputError, match=said):
            model.layers[1].layer_output = tensor
        assert torch.equal(model.logits, plain)
    assert model.device.type == "cpu"


def test_iv_08_an_edit_of_one_row_reaches_no_other(model, inputs):
    batch = inputs("dense", "padded_mixed")
    plain = model(**batch).logits
    first = int(batch["attention_mask"][1].argmax())
    for token in (first + 2, -1):
        with model.trace(**batch):
            model.layers[1].layer_output[1, token] = 0
            edited = model.logits.save()
        assert torch.equal(edited[[0, 2]], plain[[0, 2]])
        assert not torch.equal(edited[1, token], plain[1, token])
        assert torch.equal(edited[1, first:token], plain[1, first:token])


def test_iv_08_an_edit_in_one_forward_of_a_trace_reaches_no_other(model, text, image):
    plain_text, plain_image = model(**text).logits, model(**image).logits
    with model.trace() as tracer:
        with tracer.invoke(**image):
            model.layers[1].layer_output[0, 2] = 0
            edited = model.logits.save()
        with tracer.invoke(**text):
            after_text = model.logits.save()
        with tracer.invoke(**image):
            after_image = model.logits.save()
    assert torch.equal(after_text, plain_text) and torch.equal(after_image, plain_image)
    assert not torch.equal(edited, plain_image)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["text", "two_images"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_iv_09_writing_back_any_value_changes_no_bit(checkpoint, inputs, attention, case, dtype):
    """A written score or pattern makes its block compute the heads from it: the same bits under eager, and another
    path of the same numbers under sdpa (design, section 3), where only float32 has a bound."""
    name = "two_layers"
    run, given = vlscope.load(checkpoint(name), dtype=dtype, attn_implementation=attention), inputs(name, case)
    plain = run(**given).logits
    bits, written = 0, 0
    for site in run.scan(**given):
        place = run._sites[vlscope.sites.number(run, site)]
        if place.read_only or place.unavailable:
            continue
        with run.trace(**given):
            try:
                value = run.get(site)
            except (vlscope.VlscopeError, AttributeError):
                continue  # passed together with what it is made of
            if isinstance(value, vlscope.Record):
                continue  # the record of the whole forward, whose parts are values
            parts = value if isinstance(value, tuple) else (value,)
            if any(part is None for part in parts):
                continue
            parts = tuple(part.clone() for part in parts)
            if all(part.is_floating_point() for part in parts):
                parts = tuple(part + 0.0 for part in parts)
            try:
                vlscope.sites.write(run, site, tuple(parts) if isinstance(value, tuple) else parts[0])
            except AttributeError as error:  # a part of a container, which is assigned as a whole
                assert "read-only" in str(error) or "cannot be assigned here" in str(error), site
                continue
            after = run.logits.clone()
        written += 1
        pattern = "attention_scores" in site or "attention_probabilities" in site or "attn.output.1" in site
        if pattern and attention == "sdpa":
            if dtype == torch.float32:
                assert (after - plain).abs().max() <= 1e-5 * plain.abs().max().clamp(min=1), site
        else:
            assert torch.equal(after, plain), site
            bits += 1
    assert bits > 40 and (written > bits) == (attention == "sdpa")


def test_iv_11_pixels_have_a_gradient_and_it_is_that_of_finite_differences(checkpoint, image):
    precise = vlscope.load(checkpoint("dense"), dtype=torch.float64)
    pixels = image["pixel_values"].double().requires_grad_()
    given = {**image, "pixel_values": pixels}
    with precise.trace(**given):
        tapped = precise.vision.layers[0].layer_output
        added = precise.layers[0].deepstack_output
        tapped.retain_grad(), added.retain_grad()
        loss = precise.logits[0, -1, 7]
    loss.backward()
    direction = torch.randn(pixels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def at(step):
        return precise(**{**image, "pixel_values": pixels.detach() + step * direction}).logits[0, -1, 7]

    slope = (at(1e-6) - at(-1e-6)) / 2e-6
    torch.testing.assert_close((pixels.grad * direction).sum(), slope.detach(), rtol=1e-5, atol=1e-9)
    for grad in (pixels.grad, tapped.grad, added.grad):
        assert grad.isfinite().all() and grad.abs().sum() > 0


def test_iv_12_gradients_come_in_any_order_and_a_second_backward_is_torchs_error(model, image):
    def losses(order, **options):
        with model.trace(**image):
            model.layers[0].layer_output.requires_grad_()
            kept = {k: model.layers[k].layer_output for k in (1, 2, 3)}
            for value in kept.values():
                value.retain_grad()
            loss = model.logits[0, -1].max()
        loss.backward(**options)
        return [kept[k] for k in order], loss

    down, loss = losses((3, 2, 1))
    up, _ = losses((1, 2, 3))
    for a, b in zip(down, reversed(up), strict=True):  # nothing adds up over two traces either
        assert torch.equal(a.grad, b.grad) and a.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    twice, loss = losses((3, 2, 1), retain_graph=True)
    loss.backward()
    for a, b in zip(twice, down, strict=True):
        torch.testing.assert_close(a.grad, 2 * b.grad)


def test_iv_12_a_value_off_the_path_has_a_gradient_of_zero_and_a_gradient_can_be_edited(model, image):
    with model.trace(**image):
        features = model.vision.image_features.requires_grad_()
        before_image = model.logits[0, 1].max()
    (grad,) = torch.autograd.grad(before_image, features)
    assert not grad.any()
    with model.trace(**image):
        first = model.layers[0].layer_output.requires_grad_()
        model.layers[2].layer_output.register_hook(torch.zeros_like)
        loss = model.logits[0, -1].max()
    loss.backward()
    assert not first.grad.any()


def test_iv_13_prompts_of_other_lengths_and_images_do_not_align_by_themselves(model):
    def given(tokens, grid, seed):
        rows, images = grid[1] * grid[2], grid[1] * grid[2] // 4
        config = model.config
        ids = [
            *range(10, 10 + tokens),
            config["vision_start_token_id"],
            *[config["image_token_id"]] * images,
            config["vision_end_token_id"],
        ]
        pixels = torch.randn(rows, 1536, generator=torch.Generator().manual_seed(seed))
        return {"input_ids": torch.tensor([ids]), "pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}

    a, b = given(3, (1, 4, 4), 0), given(5, (1, 6, 6), 1)
    assert a["input_ids"].shape[1] == 9 and SQUARE == (1, 4, 4) != WIDE
    with model.trace(**a):
        features = model.vision.image_features.save()
        stream = model.layers[1].layer_output.save()
    with model.trace(**b):
        with pytest.raises(vlscope.InputError, match=r"\[9, 48\].*\[4, 48\]"):
            model.vision.image_features = features
        with pytest.raises(vlscope.InputError, match=r"\[1, 16, 48\].*\[1, 9, 48\]"):
            model.layers[1].layer_output = stream
        model.layers[1].layer_output[:, 2] = stream[:, 2]
        assert torch.equal(model.layers[1].layer_output[:, 2], stream[:, 2])


def test_iv_15_an_assignment_to_no_value_stores_nothing(vlscope_model, text):
    model = vlscope_model("dense")
    with model.trace(**text):
        with pytest.raises(AttributeError, match="layer_output"):
            model.layers[1].layer_outptu = torch.zeros(1)
        with pytest.raises(AttributeError, match="read-only"):
            model.vision.image_token_mask = torch.zeros(1, 9, dtype=torch.bool)
    assert not hasattr(model.layers[1], "layer_outptu")
    with pytest.raises(ValueError, match="only while a forward runs"):
        model.layers[1].layer_output = torch.zeros(1, 9, 48)
    with pytest.raises(AttributeError):
        model.nonsense = 1


LATE = [
    ("layers.0.layer_output", "layers.2.layer_output"),
    ("layers.0.input", "layers.0.layer_output"),
    ("layers.1.self_attn.attention_output", "layers.1.layer_output"),
]


@pytest.mark.parametrize("early, later", LATE)
def test_iv_16_an_edit_of_what_was_already_used_is_refused_by_name(model, text, early, later):
    plain = model(**text).logits
    with pytest.raises(vlscope.LateEditError) as caught, model.trace(**text):
        value = model.get(early)
        model.get(later)
        value[:] = 0
        model.logits
    assert early in str(caught.value)
    assert torch.equal(model(**text).logits, plain)


def test_iv_16_an_edit_after_the_trace_reaches_nothing(model, text):
    plain = model(**text).logits
    with model.trace(**text):
        first, second = model.layers[0].layer_output.save(), model.layers[2].layer_output.save()
    kept = second.clone()
    first[:] = 0
    assert torch.equal(second, kept) and torch.equal(model(**text).logits, plain)


def test_iv_18_a_key_head_serves_its_own_query_heads_and_no_other(model, text):
    def heads(edit=lambda: None):
        with model.trace(**text):
            edit()
            return model.layers[1].self_attn.attention_head_outputs.clone()

    def zero(name, head):
        def edit():
            getattr(model.layers[1].self_attn, name)[:, head] = 0

        return edit

    plain = heads()
    assert plain.shape[-2:] == (4, 16) or plain.shape[1] == 4
    axis = plain.dim() - 2 if plain.shape[-2] == 4 else 1

    def moved(other):
        return [k for k in range(4) if not torch.equal(plain.select(axis, k), other.select(axis, k))]

    assert moved(heads(zero("attention_keys", 0))) == [0, 1]
    assert moved(heads(zero("attention_queries", 3))) == [3]
    with model.trace(**text), pytest.raises(vlscope.InputError, match=r"\[1, 2, 9, 16\].*\[1, 4, 9, 16\]"):
        model.layers[1].self_attn.attention_keys = torch.zeros(1, 4, 9, 16)
