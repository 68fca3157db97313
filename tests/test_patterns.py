"""Patterns of each image, readable and writable, and rows of a text pattern without the whole."""

import json
import subprocess
import sys

import pytest
import torch

import vlscope
from sites import read, write

IMPLEMENTATIONS = ["eager", "sdpa"]
VALUES = ["image_attention_scores", "image_attention_probabilities"]
NAME = "dense"


@pytest.fixture(params=IMPLEMENTATIONS)
def attention(request):
    return request.param


@pytest.fixture
def model(attention, vlscope_model):
    return vlscope_model(NAME, attention)


@pytest.fixture
def images(inputs):
    return inputs(NAME, "two_images")


@pytest.fixture
def padded(inputs):
    return inputs(NAME, "padded_mixed")


# --- patterns of each image -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", VALUES)
def test_there_is_one_pattern_for_each_image_and_reading_again_gives_the_same_objects(model, images, value):
    patches = images["image_grid_thw"].prod(-1).tolist()
    with model.trace(**images):
        patterns = read(model, f"vision.layers.1.self_attn.{value}")
        again = read(model, f"vision.layers.1.self_attn.{value}")
        assert isinstance(patterns, tuple) and all(a is b for a, b in zip(patterns, again, strict=True))
    assert patches[0] != patches[1]
    assert [p.shape for p in patterns] == [(model.vision.num_heads, n, n) for n in patches]
    assert all(isinstance(p, vlscope.layouts.ImagePattern) for p in patterns)


def test_reading_patterns_changes_nothing(model, images):
    clean = model(**images).logits
    with model.trace(**images):
        for block in model.vision.layers:
            scores, probabilities = (
                block.self_attn.image_attention_scores,
                block.self_attn.image_attention_probabilities,
            )
        logits = model.logits.save()
    assert all(torch.equal(s.softmax(-1), p) for s, p in zip(scores, probabilities, strict=True))
    assert torch.equal(logits, clean)


def test_an_edit_of_one_pattern_touches_the_rows_of_its_image_only(attention, model, images):
    first = int(images["image_grid_thw"][0].prod())

    def heads(edit):
        with model.trace(**images):
            attn = model.vision.layers[1].self_attn
            edit(attn.image_attention_probabilities[1])
            return attn.attention_head_outputs.save()

    clean, edited = heads(lambda p: None), heads(lambda p: p.copy_(torch.eye(p.shape[-1])))
    if attention == "eager":
        assert torch.equal(edited[:, :first], clean[:, :first])
    torch.testing.assert_close(edited[:, :first], clean[:, :first], rtol=1e-5, atol=1e-5)
    with model.trace(**images):
        values = model.vision.layers[1].self_attn.attention_values.save()
    assert torch.equal(edited[0, first:], values[0, :, first:].transpose(0, 1))  # each patch sees itself alone


@pytest.mark.parametrize("value", VALUES)
def test_a_written_pattern_gives_the_same_logits_under_both_implementations(vlscope_model, images, value):
    logits = []
    for attention in IMPLEMENTATIONS:
        model = vlscope_model(NAME, attention)
        with model.trace(**images):
            site = f"vision.layers.1.self_attn.{value}"
            write(model, site, [p.roll(1, -1) for p in read(model, site)])
            logits.append(model.logits.save())
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    assert (logits[1] - vlscope_model(NAME, "sdpa")(**images).logits).abs().max() > 1e-3


def test_written_scores_are_what_the_probabilities_are_made_of(model, images):
    with model.trace(**images):
        attn = model.vision.layers[0].self_attn
        attn.image_attention_scores[0][:, :, 3] = -1e9
        first, second = attn.image_attention_probabilities
    assert first[:, :, 3].count_nonzero() == 0 and second[:, :, 3].count_nonzero() > 0


def test_assigning_the_patterns_as_served_is_no_write(model, images):
    clean = model(**images).logits
    with model.trace(**images):
        attn = model.vision.layers[1].self_attn
        attn.image_attention_probabilities = attn.image_attention_probabilities
        same = model.logits.save()
    assert torch.equal(same, clean)


@pytest.mark.parametrize("value", VALUES)
def test_a_wrong_count_or_shape_is_refused_naming_both_sides_and_nothing_is_written(model, images, value):
    clean, site = model(**images).logits, f"vision.layers.1.self_attn.{value}"
    with model.trace(**images):
        a, b = read(model, site)
        zeros = torch.zeros_like(a)
        with pytest.raises(vlscope.InputError, match=rf"{value} is a tuple of 2 tensors; 1 were assigned"):
            write(model, site, [zeros])
        with pytest.raises(vlscope.InputError) as caught:
            write(model, site, (zeros, a))
        for side in (f"{value}.1", str(b.shape[-1]), str(a.shape[-1])):
            assert side in str(caught.value)
        with pytest.raises(vlscope.InputError, match="float64"):
            write(model, site, (zeros, b.double()))
        with pytest.raises(vlscope.InputError, match="not Tensor"):
            write(model, site, zeros)
        with pytest.raises(vlscope.InputError, match=rf"{value}.1 takes a tensor, not NoneType"):
            write(model, site, (zeros, None))
        logits = model.logits.save()
    assert torch.equal(logits, clean)


def test_patterns_come_between_the_queries_and_the_head_outputs(model, images):
    attn = model.vision.layers[1].self_attn
    with model.trace(**images):
        attn.image_attention_scores  # noqa: B018
        with pytest.raises(vlscope.OutOfOrderError, match="attention_queries"):
            attn.attention_queries  # noqa: B018
        attn.image_attention_probabilities  # noqa: B018
        with pytest.raises(vlscope.OutOfOrderError, match="image_attention_scores"):
            attn.image_attention_scores  # noqa: B018
        attn.attention_head_outputs  # noqa: B018
        with pytest.raises(vlscope.OutOfOrderError, match="image_attention_probabilities"):
            attn.image_attention_probabilities = ()


def test_a_late_edit_of_a_pattern_is_refused_by_its_name(model, images):
    late = pytest.raises(vlscope.LateEditError, match=r"image_attention_probabilities\.1 was edited")
    with late, model.trace(**images):
        pattern = model.vision.layers[1].self_attn.image_attention_probabilities[1]
        model.vision.layers[1].layer_output  # noqa: B018
        pattern[:] = 0
        model.logits  # noqa: B018


@pytest.mark.parametrize("value", VALUES)
def test_a_gradient_reaches_the_pattern_of_each_image_and_what_made_it(model, images, value):
    with model.trace(**images):
        entering = model.vision.layers[1].layer_input.requires_grad_()
        patterns = read(model, f"vision.layers.1.self_attn.{value}")
        for pattern in patterns:
            pattern.retain_grad()
        loss = model.logits[0, -1].max()
    loss.backward()
    assert all(pattern.grad.abs().sum() > 0 for pattern in patterns)
    assert entering.grad.abs().sum() > 0
    clean = entering.grad.clone()
    with model.trace(**images):
        entering = model.vision.layers[1].layer_input.requires_grad_()
        loss = model.logits[0, -1].max()
    loss.backward()
    torch.testing.assert_close(entering.grad, clean, rtol=1e-4, atol=1e-5)


def test_a_scan_lists_the_patterns_of_an_input(model, images):
    patches = images["image_grid_thw"].prod(-1).tolist()
    for value in VALUES:
        found = model.scan(**images)[f"vision.layers.1.self_attn.{value}"]
        assert [part.shape for part in found] == [(model.vision.num_heads, n, n) for n in patches]


def test_elements_and_the_whole_are_saved_under_their_names(model, images):
    site = "vision.layers.1.self_attn.image_attention_probabilities"
    with model.trace(**images) as tracer:
        attn = model.vision.layers[1].self_attn
        scores = [p.save() for p in attn.image_attention_scores]
        kept = attn.image_attention_probabilities.save()
        assert vlscope.save(kept) is kept
        assert model.get(f"{site}.1") is kept[1]
    assert list(tracer.saved) == [
        "vision.layers.1.self_attn.image_attention_scores.0",
        "vision.layers.1.self_attn.image_attention_scores.1",
        site,
    ]
    assert tracer.saved[site] is kept
    assert all(torch.equal(s.softmax(-1), p) for s, p in zip(scores, kept, strict=True))


# --- rows of a text pattern -------------------------------------------------------------------------------------


def rows_and_whole(model, inputs, layer=1, **choice):
    """What attention_row gives, and the scores and probabilities of a trace of their own."""
    attn = model.layers[layer].self_attn
    with model.trace(**inputs):
        rows = attn.attention_row(**choice)
    with model.trace(**inputs):
        scores, probabilities = attn.attention_scores.save(), attn.attention_probabilities.save()
    return rows, scores, probabilities


@pytest.mark.parametrize("case", ["text", "two_images", "padded_mixed", "padded_text"])
@pytest.mark.parametrize("name", ["dense", "one_kv_head", "ungrouped", "demo"])
def test_every_row_equals_that_of_the_pattern(name, attention, case, vlscope_model, inputs):
    model = vlscope_model(name, attention)
    rows, _, whole = rows_and_whole(model, inputs(name, case), query=slice(None))
    torch.testing.assert_close(rows, whole, rtol=0, atol=1e-6)
    assert torch.equal(rows == 0, whole == 0)  # nothing of a masked key; a row that is padding is uniform in both


def test_score_rows_are_scaled_and_masked(model, padded):
    rows, scores, _ = rows_and_whole(model, padded, query=[2, -1], scores=True)
    torch.testing.assert_close(rows, scores[:, :, [2, -1]], rtol=1e-5, atol=1e-5)
    assert (rows == torch.finfo(rows.dtype).min).any()


@pytest.mark.parametrize(
    "choice, index",
    [
        ({}, (slice(None), slice(None), -1)),
        ({"query": 4, "heads": 2}, (slice(None), 2, 4)),
        ({"query": [4], "heads": [-1, 0]}, (slice(None), [3, 0], slice(4, 5))),
        ({"query": slice(-3, None), "heads": slice(1, 3)}, (slice(None), slice(1, 3), slice(-3, None))),
        ({"query": torch.tensor([5, 5, 0])}, (slice(None), slice(None), [5, 5, 0])),
        ({"query": torch.tensor(-2), "heads": range(2)}, (slice(None), slice(0, 2), -2)),
        ({"query": []}, (slice(None), slice(None), slice(0, 0))),
    ],
)
def test_an_integer_drops_its_axis_and_a_list_or_slice_keeps_it(model, padded, choice, index):
    rows, _, whole = rows_and_whole(model, padded, **choice)
    torch.testing.assert_close(rows, whole[index], rtol=0, atol=1e-6)


def test_rows_change_nothing_and_come_with_the_queries(model, padded):
    clean = model(**padded).logits
    with model.trace(**padded):
        for layer in model.layers:
            before = layer.self_attn.attention_row()
            values = layer.self_attn.attention_values  # the same location: in any order
            assert torch.equal(layer.self_attn.attention_row(), before) and values is not None
        logits = model.logits.save()
    assert torch.equal(logits, clean)


@pytest.mark.parametrize("passed", ["attention_scores", "attention_probabilities", "attention_head_outputs", "output"])
def test_a_row_asked_for_too_late_says_so_and_the_trace_goes_on(model, padded, passed):
    clean = model(**padded).logits
    with model.trace(**padded):
        read(model, f"layers.1.self_attn.{passed}")
        with pytest.raises(vlscope.OutOfOrderError, match=r"layers\.1\.self_attn\.attention_row was asked for"):
            model.layers[1].self_attn.attention_row()
        logits = model.logits.save()
    assert torch.equal(logits, clean)


def test_a_row_shows_edits_of_queries_keys_and_mask(attention, model, padded):
    def edited(attn):
        if attention == "eager":
            attn.inputs[1]["attention_mask"][..., -2] = torch.finfo(torch.float32).min
        attn.attention_queries[:, 1] *= 3
        attn.attention_keys = attn.attention_keys.flip(-1)

    attn = model.layers[1].self_attn
    with model.trace(**padded):
        edited(attn)
        rows = attn.attention_row([-1, -3])
    with model.trace(**padded):
        edited(attn)
        whole = attn.attention_probabilities.save()
    torch.testing.assert_close(rows, whole[:, :, [-1, -3]], rtol=0, atol=1e-6)
    assert attention == "sdpa" or not rows[..., -2].any()


@pytest.mark.parametrize("case", ["two_images", "padded_mixed"])
def test_on_every_step_of_a_generation_the_row_is_that_of_the_newest_token(model, inputs, case):
    attn = model.layers[1].self_attn
    rows, wholes = [], []
    for read_all, kept in ((False, rows), (True, wholes)):
        with model.generate(**inputs(NAME, case), max_new_tokens=4) as tracer:
            for _ in tracer.iter[:]:
                kept.append(attn.attention_probabilities[:, :, -1] if read_all else attn.attention_row())
    length = inputs(NAME, case)["input_ids"].shape[1]
    assert [row.shape[-1] for row in rows] == [length + step for step in range(4)]
    for row, whole in zip(rows, wholes, strict=True):
        torch.testing.assert_close(row, whole, rtol=0, atol=1e-6)


def test_a_row_of_a_head_or_position_that_is_not_there_is_refused(model, inputs):
    prompt = inputs(NAME, "text")
    length = prompt["input_ids"].shape[1]
    attn = model.layers[0].self_attn
    with model.trace(**prompt):
        with pytest.raises(IndexError, match=f"query {length}: there are {length}, 0 to {length - 1}"):
            attn.attention_row(length)
        with pytest.raises(IndexError, match="head -5: there are 4, 0 to 3"):
            attn.attention_row(heads=-5)
        with pytest.raises(IndexError, match="heads is empty"):
            attn.attention_row(heads=[])
        with pytest.raises(TypeError):
            attn.attention_row(1.5)
        assert attn.attention_row(-length).shape == (1, 4, length)
    with pytest.raises(ValueError, match="inside"):
        attn.attention_row()
    with pytest.raises(AttributeError, match="attention_row"):
        model.vision.layers[0].self_attn.attention_row  # noqa: B018


def test_a_row_carries_gradients_and_is_an_ordinary_tensor(model, padded):
    with model.trace(**padded):
        entering = model.layers[1].layer_input.requires_grad_()
        row = model.layers[1].self_attn.attention_row(heads=0)
        row[:, :3] = 0
        row.square().sum().backward()
        assert entering.grad.abs().sum() > 0
    with torch.inference_mode(), model.trace(**padded):
        row = model.layers[1].self_attn.attention_row()
    assert not row.is_inference() and not row.requires_grad


def test_a_saved_row_goes_by_its_name_in_the_trace_that_made_it(model, inputs):
    prompt = inputs(NAME, "text")
    attn = "layers.1.self_attn.attention_row"
    with model.trace(**prompt) as one, model.trace(**prompt) as other:
        row = one.layers[1].self_attn.attention_row().save()
        head = one.layers[1].self_attn.attention_row(heads=0).save()
        half = (row / 2).save()
        theirs = other.layers[1].self_attn.attention_row(query=0, heads=0).save()
    assert list(one.saved) == [attn, f"{attn}#2"] and one.saved[attn] is row and one.saved[f"{attn}#2"] is head
    assert list(other.saved) == ["saved.0", attn] and other.saved["saved.0"] is half and other.saved[attn] is theirs
    with model.generate(**prompt, max_new_tokens=3) as tracer:
        rows = [model.layers[1].self_attn.attention_row().save() for _ in tracer.iter[:]]
    assert list(tracer.saved) == [attn] and all(a is b for a, b in zip(tracer.saved[attn], rows, strict=True))


LINEAR = """
import json, pathlib, re, sys, torch, vlscope
torch.set_num_threads(1)
model = vlscope.load(sys.argv[1])

def peak():  # MiB
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024

ids = torch.arange(16_000)[None] % 600
with model.trace(input_ids=ids[:, :500]):
    [layer.self_attn.attention_row() for layer in model.layers]
pathlib.Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts anew
before = peak()
with model.trace(input_ids=ids):
    rows = [layer.self_attn.attention_row() for layer in model.layers]
print(json.dumps({"shapes": [list(row.shape) for row in rows], "sums": [row.sum().item() for row in rows],
                  "grown": peak() - before}))
"""


def test_a_row_at_every_layer_of_16000_tokens_takes_linear_memory(checkpoint):
    """The boolean mask alone would be 244 MiB, the pattern of one layer 3.8 GiB."""
    run = subprocess.run(
        [sys.executable, "-c", LINEAR, str(checkpoint("two_layers"))], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    assert found["shapes"] == [[1, 4, 16_000]] * 2
    assert found["sums"] == pytest.approx([4, 4], rel=1e-4)
    assert 10 < found["grown"] < 100, f"{found['grown']:.0f} MiB"
