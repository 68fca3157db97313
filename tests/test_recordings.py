"""Recordings: the same traces, bit for bit, from the middle of the forward."""
# ruff: noqa: B018 - an attribute that is read and dropped is what many of these tests are about

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
import vlscope

CASES = ["text", "one_image", "two_images", "padded_mixed"]


def reached(model, given):
    """The named values that a forward of an input reaches."""
    calls = {"input", "output"}
    return [site for site in model.scan(**given) if not calls & set(site.split("."))]


def values_of(model, prompt, sites, edit=None):
    """Copies of `sites` and the logits of a trace; `edit` is a site and what is done to its value."""
    wanted = sorted({*sites, *([edit[0]] if edit else [])}, key=model.order)
    found = {}
    with model.trace(**prompt) if isinstance(prompt, dict) else model.trace(prompt):
        for site in wanted:
            value = model.get(site)
            if edit and site == edit[0]:
                edit[1](value)
            parts = value if isinstance(value, tuple) else (value,)
            found[site] = [part.clone() for part in parts if isinstance(part, torch.Tensor)]
        found["logits"] = [model.logits.clone()]
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for site in expected:
        for a, b in zip(found[site], expected[site], strict=True):
            assert torch.equal(a, b), site


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*tiny.CONFIGS, "demo"])
def test_any_reads_give_the_bits_of_the_prompts_own_trace(vlscope_model, inputs, name, case, attention):
    model, given = vlscope_model(name, attention), inputs(name, case)
    recording, sites = model.record(**given), reached(model, given)
    choose = random.Random(f"{name} {case} {attention}")
    for count in (0, 1, 2, 5, len(sites)):
        some = choose.sample(sites, count)
        assert_same(values_of(model, recording, some), values_of(model, given, some))


def halve(value):
    value *= 0.5


@pytest.mark.parametrize("case", CASES)
def test_an_edit_anywhere_gives_the_bits_of_the_same_edit_in_the_prompts_own_trace(vlscope_model, inputs, case):
    model, given = vlscope_model("dense"), inputs("dense", case)
    recording = model.record(**given)
    candidates = [
        "token_embeddings",
        *(f"layers.{k}.{name}" for k in (0, 1, 3) for name in ("layer_input", "layer_output", "mlp.mlp_output")),
        *(f"layers.{k}.self_attn.attention_values" for k in (0, 2)),
        *(f"layers.{k}.input_layernorm.input" for k in (0, 2, 3)),
        *(f"layers.{k}.self_attn.input" for k in (1, 3)),
        "norm.output",
        *("vision.patch_embeddings", "vision.layers.2.layer_output", "vision.image_features"),
        *(f"layers.{k}.deepstack_output" for k in (0, 1)),
    ]
    sites, plain = set(reached(model, given)), model(**given).logits
    for site in candidates:
        if site not in sites and not site.endswith(".input"):
            continue
        edit, watched = (site, halve), ["layers.1.layer_output", "layers.3.layer_input"]
        found = values_of(model, recording, watched, edit)
        assert_same(found, values_of(model, given, watched, edit))
        assert not torch.equal(found["logits"][0], plain), site


def test_an_edit_does_not_reach_the_recording(model, image):
    recording = model.record(**image)
    kept = {name: tensor.clone() for name, tensor in recording._core.tensors().items()}
    for site in ("layers.2.layer_input", "layers.0.deepstack_output", "vision.image_features", "norm.input"):
        values_of(model, recording, [], (site, halve))
    for name, tensor in recording._core.tensors().items():
        assert torch.equal(tensor, kept[name]), name


def test_a_skip_and_an_assignment_are_those_of_the_prompts_own_trace(model, image):
    recording = model.record(**image)

    def logits(prompt, act):
        with model.trace(**prompt) if isinstance(prompt, dict) else model.trace(prompt):
            act()
            return model.logits.clone()

    def skip():
        model.skip_layers(1, 2)

    def skip_late():
        model.layers[3].self_attn.skip(torch.zeros(1, image["input_ids"].shape[1], model.hidden_size))
        model.layers[1].layer_output

    def assign():
        model.layers[2].layer_output = torch.ones_like(model.layers[2].layer_output)

    def other_ids():
        model.input_ids[0, 0] = 7

    for act in (skip, skip_late, assign, other_ids):
        assert torch.equal(logits(recording, act), logits(image, act))
        assert not torch.equal(logits(recording, act), model(**image).logits)


def test_gradients_start_at_the_value_that_requires_them(model, image):
    recording = model.record(**image)

    def gradient(prompt):
        with model.trace(**prompt) if isinstance(prompt, dict) else model.trace(prompt):
            stream = model.layers[1].layer_input
            stream.requires_grad_()
            model.logits[0, -1].sum().backward()
        return stream.grad

    assert torch.equal(gradient(recording), gradient(image))


def test_what_is_recorded_is_not_computed_again(model, image):
    """Weights of the parts that need not run are made worthless: nothing changes."""
    copy = vlscope.load(model.folder)
    recording = copy.record(**image)
    recording._weights = None
    expected = values_of(copy, recording, ["layers.3.mlp.mlp_output"])
    for weight in (
        copy.vision.layers[0].attn.qkv.weight,
        copy.layers[0].mlp.up_proj.weight,
        copy.layers[2].mlp.down_proj.weight,
    ):
        weight.fill_(float("nan"))
    assert_same(values_of(copy, recording, ["layers.3.mlp.mlp_output"]), expected)


def test_order_is_kept_as_in_any_trace(model, image):
    with model.trace(model.record(**image)):
        model.layers[3].layer_input
        with pytest.raises(vlscope.OutOfOrderError):
            model.layers[2].layer_input


def test_a_late_edit_of_a_recorded_value_is_noticed(model, image):
    with pytest.raises(vlscope.LateEditError), model.trace(model.record(**image)):
        stream = model.layers[1].layer_input
        model.layers[3].layer_output
        stream[:] = 0


def test_only_the_last_logits_are_computed_where_that_is_asked_for(model, image):
    with model.trace(model.record(**image), logits_to_keep=2):
        kept = model.logits.save()
    with model.trace(**image, logits_to_keep=2):
        assert torch.equal(kept, model.logits)


# --- generation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_generation_from_a_recording_is_that_of_its_prompt(vlscope_model, inputs, case, keys):
    model, given = vlscope_model("dense"), inputs("dense", case)
    recording = model.record(**given, keys=keys)
    expected = model.generate(**given, max_new_tokens=5, eos_token_id=[]).result
    for _ in range(2):
        assert torch.equal(model.generate(recording, max_new_tokens=5, eos_token_id=[]).result, expected)

    def edited(prompt):
        with model.generate(max_new_tokens=5, eos_token_id=[], **prompt) as tracer:
            for _ in tracer.iter[1]:
                model.layers[2].self_attn.attention_values[:] = 0
                model.layers[2].layer_output[:] *= 3
        return tracer.result

    assert torch.equal(edited({"prompt": recording}), edited(given))


def test_an_edited_state_does_not_reach_the_recording(vlscope_model, inputs):
    model, given = vlscope_model("hybrid"), inputs("hybrid", "text")
    recording = model.record(**given, keys=True)

    def edited(**prompt):
        with model.generate(max_new_tokens=3, eos_token_id=[], **prompt) as tracer:
            for _ in tracer.iter[1]:
                model.layers[0].linear_attn.state_input.mul_(0.5)
            return model.logits.clone()

    expected = edited(**given)
    for _ in range(2):
        assert torch.equal(edited(prompt=recording), expected)


# --- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [True, False])
def test_a_saved_recording_gives_the_same_bits(model, image, tmp_path, keys):
    recording = model.record(**image, keys=keys)
    recording.save(tmp_path / "clean.safetensors")
    loaded = vlscope.Recording.load(tmp_path / "clean.safetensors")
    assert loaded.nbytes == recording.nbytes
    sites = ["layers.0.layer_input", "layers.2.mlp.mlp_output"]
    assert_same(values_of(model, loaded, sites), values_of(model, image, sites))


def test_what_is_no_recording_is_refused(model, image, tmp_path):
    with pytest.raises(vlscope.CheckpointNotFound, match="does not exist"):
        vlscope.Recording.load(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("not tensors")
    with pytest.raises(vlscope.CheckpointError, match="no safetensors file"):
        vlscope.Recording.load(tmp_path / "text.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(vlscope.CheckpointError, match="holds no recording"):
        vlscope.Recording.load(tmp_path / "other.safetensors")


def damaged(recording, tmp_path, change):
    path = tmp_path / "damaged.safetensors"
    recording.save(path)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "vlscope recording 1", **recording._identity})
    return vlscope.Recording.load(path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("streams.4"), "4 streams, but 5 are expected"),
        (lambda t: t.update({"streams.1": t["streams.1"][:, :-1].contiguous()}), "a stream of shape"),
        (lambda t: t.pop("merged"), "0 sets of visual features, but 1"),
        (lambda t: t.pop("deepstack.1"), "1 DeepStack levels, but 2"),
    ],
    ids=["streams", "shape", "features", "levels"],
)
def test_a_recording_that_lacks_something_is_refused_before_any_compute(model, image, tmp_path, change, message):
    with (
        pytest.raises(vlscope.InputError, match=message),
        model.trace(damaged(model.record(**image), tmp_path, change)),
    ):
        pass


def test_a_recording_of_another_model_or_mode_is_refused_naming_both(model, vlscope_model, inputs):
    given = inputs("dense", "text")
    for other, name in ((vlscope_model("dense", "eager"), "attn_implementation"), (vlscope_model("demo"), "config")):
        with pytest.raises(vlscope.InputError, match=f"another {name}"):
            other.trace(model.record(**given))


def test_what_would_need_a_graph_behind_the_recording_is_refused(model, image):
    pixels = image["pixel_values"].clone().requires_grad_()
    with pytest.raises(vlscope.InputError, match="pixel_values requires grad"):
        model.record(**{**image, "pixel_values": pixels})
    with pytest.raises(TypeError, match="logits_to_keep is for the traces"):
        model.record(**image, logits_to_keep=2)


def test_a_recording_is_stale_once_a_weight_is_edited(model, inputs):
    copy = vlscope.load(model.folder)
    recording = copy.record(**inputs("dense", "text"))
    copy.layers[0].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(vlscope.InputError, match="weights were edited"):
        copy.trace(recording)


def test_its_size_is_what_the_docs_say(model, image):
    recording = model.record(**image)
    batch, seq = image["input_ids"].shape
    stream = (model.num_layers + 1) * batch * seq * model.hidden_size
    features = (1 + 2) * (image["input_ids"] == tiny.IMAGE).sum().item() * model.hidden_size
    assert recording.nbytes == 4 * (stream + features)
