"""The tail of a recording: the last positions of a prompt, in several copies."""
# ruff: noqa: B018 - an attribute that is read and dropped is what many of these tests are about

import pytest
import torch

import tiny
import vlscope
from vlscope import patching

SITES = [
    "layers.0.layer_input",
    "layers.0.self_attn.attention_queries",
    "layers.1.self_attn.attention_probabilities",
    "layers.1.self_attn.attention_head_outputs",
    "layers.1.mlp.mlp_output",
    "layers.1.layer_output",
    "norm.output",
]
RECURRENT = {**tiny.QWEN3_5, **tiny.QWEN3_5_MOE}
ATTENTION_ONLY = [name for name in (*tiny.CONFIGS, "demo") if name not in RECURRENT]


def rows_from(value, whole, first):
    """The rows of `whole` that a tail has: those of its axis that is shorter there."""
    shorter = [k for k in range(1, whole.ndim) if value.shape[k] != whole.shape[k]]
    return whole.narrow(shorter[0], first, whole.shape[shorter[0]] - first) if shorter else whole


def assert_close(value, expected):
    """Equal but for the last bits: within 1e-5 of the largest magnitude."""
    assert (value - expected).abs().max() <= 1e-5 * expected.abs().max()


def saved(model, prompt, sites, **options):
    with model.trace(prompt, **options) if not isinstance(prompt, dict) else model.trace(**prompt, **options):
        found = {site: vlscope.save(vlscope.sites.read(model, site)) for site in sites}
        return found | {"logits": model.logits.save()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["text", "one_image", "two_images"])
@pytest.mark.parametrize("name", ATTENTION_ONLY)
def test_every_copy_of_a_tail_is_the_end_of_the_whole(vlscope_model, inputs, name, case, attention):
    model, given = vlscope_model(name, attention), inputs(name, case)
    seq = given["input_ids"].shape[1]
    recording = model.record(**given, keys=True)
    whole = saved(model, given, SITES)
    for first in (0, 1, seq // 2, seq - 1):
        for site, value in saved(model, recording.tail(first, copies=3), SITES).items():
            assert value.shape[0] == 3
            expected = rows_from(value, whole[site], first).expand_as(value)
            assert_close(value, expected)


@pytest.mark.parametrize("case", ["text", "one_image", "two_images"])
@pytest.mark.parametrize(
    "site", ["layers.0.layer_output", "layers.1.self_attn.attention_values", "layers.2.mlp.output"]
)
def test_each_copy_takes_an_edit_of_its_own(vlscope_model, inputs, case, site):
    model, given = vlscope_model("dense"), inputs("dense", case)
    seq = given["input_ids"].shape[1]
    first = seq // 2
    axis = vlscope.sites.dims(model, site).index("seq")

    def zero(value, copy, position):
        value[copy].select(axis - 1, position).zero_()

    with model.trace(model.record(**given, keys=True).tail(first, copies=seq - first)):
        value = vlscope.sites.read(model, site)
        for copy in range(seq - first):
            zero(value, copy, copy - (seq - first))  # counted from the end: values have all positions
        found = model.logits.save()
    for copy in range(seq - first):
        with model.trace(**given):
            zero(vlscope.sites.read(model, site), 0, first + copy)
            expected = model.logits[:, first:].clone()
        torch.testing.assert_close(found[copy : copy + 1], expected, rtol=1e-5, atol=1e-5)


def test_deepstack_is_added_at_the_image_tokens_of_a_tail(vlscope_model, inputs):
    model, given = vlscope_model("dense"), inputs("dense", "two_images")
    image = (given["input_ids"][0] == model.config["image_token_id"]).nonzero().flatten()
    first = int(image[len(image) // 2])  # in the middle of the images
    with model.trace(model.record(**given, keys=True).tail(first, copies=2)):
        level = model.layers[0].deepstack_output
        assert level.shape[0] == 2 * int((image >= first).sum())
        level[: len(level) // 2] = 0  # of the first copy
        found = model.logits.save()
    with model.trace(**given):
        model.layers[0].deepstack_output[int((image < first).sum()) :] = 0
        ablated = model.logits[0, first:].clone()
    torch.testing.assert_close(found[0], ablated, rtol=1e-5, atol=1e-5)
    with model.trace(**given):
        plain = model.logits[0, first:].clone()
    torch.testing.assert_close(found[1], plain, rtol=1e-5, atol=1e-5)


def test_a_tail_has_the_rows_of_a_video_and_of_an_image_behind_it(vlscope_model):
    model = vlscope_model("demo")
    red, blue = vlscope.demo.picture("red"), vlscope.demo.picture("blue")
    content = [{"type": "video", "video": [red, blue]}, {"type": "image", "image": blue}, {"type": "text", "text": "?"}]
    given = model.encode([{"role": "user", "content": content}], video_metadata=[{"fps": 4}], do_sample_frames=False)
    visual = torch.isin(
        given["input_ids"][0], torch.tensor([model.config["image_token_id"], model.config["video_token_id"]])
    )
    rows = visual.nonzero().flatten()
    first = int(rows[5])
    whole = saved(model, given, ["layers.0.deepstack_output", "layers.1.deepstack_output"])
    tail = saved(model, model.record(**given, keys=True).tail(first), list(whole)[:2])
    for site in list(whole)[:2]:
        assert torch.equal(tail[site], whole[site][5:])
    torch.testing.assert_close(tail["logits"], whole["logits"][:, first:], rtol=1e-5, atol=1e-4)


def test_gradients_reach_each_copy(vlscope_model, inputs):
    model, given = vlscope_model("dense"), inputs("dense", "one_image")
    seq = given["input_ids"].shape[1]
    with model.trace(model.record(**given, keys=True).tail(seq - 2, copies=2)):
        value = model.layers[1].layer_output.requires_grad_()
        (model.logits[0, -1, 3] + 2 * model.logits[1, -1, 3]).backward()
    torch.testing.assert_close(2 * value.grad[0], value.grad[1], rtol=1e-4, atol=1e-6)
    assert value.grad.abs().sum() > 0


def test_tracing_a_tail_leaves_its_recording_as_it_was(vlscope_model, inputs):
    model, given = vlscope_model("dense"), inputs("dense", "one_image")
    recording = model.record(**given, keys=True)
    before = {name: tensor.clone() for name, tensor in recording._core.tensors().items()}
    for first in (0, 3):
        with model.trace(recording.tail(first)):
            for layer in model.layers:
                layer.layer_input[:] = 0
                layer.self_attn.attention_keys[:] = 0
                if "deepstack_output" in layer.support() and layer.support()["deepstack_output"] is True:
                    layer.deepstack_output[:] = 0
            model.logits
    for name, tensor in recording._core.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("site", ["token_embeddings", "vision.image_features", "vision.layers.0.layer_output"])
def test_what_comes_before_the_text_blocks_is_refused_and_the_trace_goes_on(vlscope_model, inputs, site):
    model, given = vlscope_model("dense"), inputs("dense", "one_image")
    recording = model.record(**given, keys=True)
    with model.trace(recording.tail(2)):
        with pytest.raises(vlscope.NotReachedError, match="the tail of a recording begins at"):
            vlscope.sites.read(model, site)
        logits = model.logits.save()
    assert logits.shape[1] == given["input_ids"].shape[1] - 2


def test_a_tail_that_is_not_there_is_refused(vlscope_model, inputs):
    model, given = vlscope_model("dense"), inputs("dense", "text")
    seq = given["input_ids"].shape[1]
    recording, plain = model.record(**given, keys=True), model.record(**given)
    for tail, message in (
        (recording.tail(seq), f"position {seq}; the prompt has {seq}"),
        (recording.tail(-1), "position -1"),
        (recording.tail(0, copies=0), "0 copies"),
        (plain.tail(1), "no keys"),
    ):
        with pytest.raises(vlscope.InputError, match=message), model.trace(tail):
            pass
    batch = model.record(**inputs("dense", "padded_text"), keys=True)
    with pytest.raises(vlscope.InputError, match="a batch of"), model.trace(batch.tail(0)):
        pass
    with pytest.raises(vlscope.InputError, match="cannot be generated from"):
        model.generate(recording.tail(0))
    edit = model.edit("layers.0.layer_output", lambda value: value * 2, key="twice")
    with edit, pytest.raises(vlscope.InputError, match="keeps edits .twice."):
        model.trace(recording.tail(0))
    assert torch.equal(saved(model, given, [])["logits"], saved(model, plain, [])["logits"])


def test_a_model_that_carries_a_state_has_tails_from_the_start_alone(vlscope_model, inputs):
    model, given = vlscope_model("hybrid"), inputs("hybrid", "one_image")
    recording = model.record(**given, keys=True)
    with pytest.raises(vlscope.InputError, match="carry a state"), model.trace(recording.tail(1)):
        pass
    with model.trace(recording.tail(0, copies=2)):
        found = model.logits.save()
    with model.trace(**given):
        whole = model.logits.save()
    assert_close(found, whole.expand_as(found))


PAIRS = {
    "text": ("The capital of France is", "The capital of Italy is", (" Paris", " Rome")),
    "image": (
        {"prompt": "What color is the square?", "images": [vlscope.demo.picture("red", size=(128, 96))]},
        {"prompt": "What color is the square?", "images": [vlscope.demo.picture("blue", size=(128, 96))]},
        ("Red", "Blue"),
    ),
}


@pytest.mark.parametrize("prompts", PAIRS)
@pytest.mark.parametrize(
    ("site", "options"),
    [
        ("layer_input", {}),
        ("layer_output", {"positions": [slice(2, 4), -1, [0, 3]]}),
        ("self_attn.attention_values", {}),
        ("self_attn.attention_head_outputs", {"axis": "heads"}),
        ("self_attn.attention_queries", {"layers": [0, -1]}),
    ],
)
def test_a_sweep_over_the_affected_rows_is_the_sweep(vlscope_model, prompts, site, options):
    model, (clean, corrupted, metric) = vlscope_model("demo"), PAIRS[prompts]
    whole = patching.sweep(model, clean, corrupted, site, metric=metric, **options)
    affected = patching.sweep(model, clean, corrupted, site, metric=metric, rows="affected", **options)
    assert (whole.rows, affected.rows) == ("all", "affected")
    torch.testing.assert_close(affected.values, whole.values, rtol=1e-5, atol=1e-4)
    assert (affected.sites, affected.positions, affected.tokens) == (whole.sites, whole.positions, whole.tokens)


@pytest.mark.parametrize("by", [patching.zero, patching.noise(2.0, seed=3)])
def test_an_ablation_of_the_affected_rows_takes_metrics_of_all_logits(vlscope_model, by):
    model = vlscope_model("demo")

    def metric(logits):
        return logits[0, 1, 5] + logits[0, 2:].logsumexp(-1).sum()

    found = [
        patching.ablate(model, "The capital of France is", by, "mlp.mlp_output", metric=metric, rows=rows)
        for rows in ("all", "affected")
    ]
    assert found[1].rows == "affected"
    torch.testing.assert_close(found[1].values, found[0].values, rtol=1e-5, atol=1e-4)


def test_a_sweep_says_where_all_rows_had_to_be_run(vlscope_model):
    model, (clean, corrupted, metric) = vlscope_model("demo"), PAIRS["image"]
    options = {"metric": metric, "rows": "affected"}
    tower = patching.sweep(model, clean, corrupted, "vision.layers.0.layer_output", positions=[0], **options)
    assert tower.rows == "all"
    with model.edit("layers.0.layer_output", lambda value: value):
        kept = patching.sweep(model, clean, corrupted, "layer_output", [1], positions=[0], **options)
    assert kept.rows == "all"
    with pytest.raises(vlscope.InputError, match="rows is 'some'"):
        patching.sweep(model, clean, corrupted, "layer_output", metric=metric, rows="some")


# --- the last position alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*tiny.CONFIGS, "demo"])
def test_logits_of_the_last_position_are_those_of_the_whole(vlscope_model, inputs, name, attention):
    model, given = vlscope_model(name, attention), inputs(name, "one_image")
    last = model(**given).logits[:, -1:]
    first = 0 if name in RECURRENT else given["input_ids"].shape[1] // 2
    tail = model.record(**given, keys=True).tail(first, copies=2)
    with model.trace(tail, logits_to_keep=1):
        assert_close(model.logits, last.expand(2, -1, -1))
    with model.trace(tail, logits_to_keep=1):
        assert_close(model.next_token_probs, last[:, 0].softmax(-1).expand(2, -1))


@pytest.mark.parametrize("site", ["layers.-1.layer_input", "layers.-1.mlp.output", "norm.output", "model.output"])
def test_what_is_read_of_the_last_block_or_behind_it_has_every_position(vlscope_model, inputs, site):
    model, given = vlscope_model("dense"), inputs("dense", "one_image")
    site = site.replace("-1", str(model.num_layers - 1))
    tail = model.record(**given, keys=True).tail(3, copies=2)
    with model.trace(tail, logits_to_keep=1):
        value = vlscope.sites.read(model, site)
        value = getattr(value, "last_hidden_state", value)
        assert value.shape[:2] == (2, given["input_ids"].shape[1] - 3)
        assert model.logits.shape[:2] == (2, 1)


def test_an_edit_before_the_last_block_moves_its_last_position(vlscope_model, inputs):
    model, given = vlscope_model("dense"), inputs("dense", "one_image")
    tail = model.record(**given, keys=True).tail(3, copies=1)
    edited = {}
    for keep in (0, 1):
        with model.trace(tail, logits_to_keep=keep):
            model.layers[model.num_layers - 1].layer_input[:, 0] += 1.0  # seen by the last position as a key
            edited[keep] = model.logits[:, -1:].clone()
    assert_close(edited[1], edited[0])


def test_what_is_skipped_in_the_last_block_has_every_position(vlscope_model, inputs):
    model, given = vlscope_model("dense"), inputs("dense", "one_image")
    tail = model.record(**given, keys=True).tail(3, copies=1)
    block = model.layers[model.num_layers - 1]
    with model.trace(tail):
        branch = block.mlp.output.clone() * 0.5
    found = {}
    for keep in (0, 1):
        with model.trace(tail, logits_to_keep=keep):
            block.mlp.skip(branch)
            found[keep] = model.logits[:, -1:].clone()
    assert_close(found[1], found[0])


def test_a_prompt_padded_on_the_right_ends_at_its_last_token(vlscope_model, inputs):
    model, given = vlscope_model("dense"), dict(inputs("dense", "text"))
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][:, -2:] = 0
    with model.trace(**given):
        expected = model.next_token_probs.clone()
    with model.trace(model.record(**given, keys=True).tail(2, copies=1), logits_to_keep=1):
        assert_close(model.next_token_probs, expected)
