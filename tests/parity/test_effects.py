"""Writes: the same edit through vlscope and through a transformers hook gives the same logits, bit for bit."""

import pytest
import torch

import vlscope
from sites import difference, each, read, write
from vlscope.verify import reference

# Heads made from a written pattern go by plain matrix products; under sdpa both sides leave the fused kernel there.
RECOMPUTED = ("attention_scores", "attention_probabilities")
# Of a linear attention: heads made token by token from written states, where a prompt goes by chunks.
BY_TOKEN = ".linear_attn.states"
MASKS = {f"vision.{kind}_token_mask" for kind in ("image", "video", "visual")}
READ_ONLY = {*MASKS, "next_token_probs", "input_ids", "attention_mask"}
# Every kind of site at its first and its last place; `vision.tower_output` moves nothing on either side.
MODELS = ["dense", "unordered_taps", "moe_hub", "hybrid", "hybrid_uneven", "hybrid_moe", "qwen2_5", "qwen2"]


def writable(run):
    return [site for site in run.order if site in run.values and site not in READ_ONLY]


def change(tensor):
    """A change that no norm undoes and that keeps magnitudes."""
    return tensor.roll(1, dims=-1)


@pytest.mark.parametrize("visual", ["two_images", "images_and_videos"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_write_at_each_value_does_what_the_same_hook_does(
    name, attention, visual, vlscope_model, reference_model, reference_run, inputs
):
    model, theirs = vlscope_model(name, attention), reference_model(name, attention)
    case, faults = inputs(name, visual), []
    for i, site in enumerate(writable(reference_run(name, attention, visual))):
        expected = reference.run(theirs, case, {site: change}).logits
        with model.trace(**case):
            if i % 2:
                write(model, site, each(change, read(model, site)))
            else:
                each(lambda part: part.copy_(change(part)), read(model, site))
            logits = model.logits.save()
        if text := difference(logits, expected):
            faults.append(f"{site} written {'by assignment' if i % 2 else 'in place'}: logits {text}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", MODELS)
def test_a_write_at_each_module_does_what_the_same_hook_does(
    name, vlscope_model, reference_model, reference_run, inputs
):
    model, theirs = vlscope_model(name, "eager"), reference_model(name, "eager")
    case, faults = inputs(name, "one_image"), []
    run = reference_run(name, "eager", "one_image")
    leaves = [
        path
        for path, call in run.calls.items()
        if isinstance(call.output, torch.Tensor) and call.args and call.args[0].is_floating_point()
    ]
    for i, path in enumerate(leaves):
        site = f"{path}.{('input', 'output')[i % 2]}"
        expected = reference.run(theirs, case, {site: change}).logits
        with model.trace(**case):
            write(model, site, change(read(model, site)))
            logits = model.logits.save()
        if text := difference(logits, expected):
            faults.append(f"{site}: logits {text}")
    assert len(leaves) > 50
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["dense", "one_kv_head", "hybrid"])
def test_assigning_any_value_to_itself_is_neutral(name, attention, vlscope_model, reference_run, inputs):
    model, case = vlscope_model(name, attention), inputs(name, "padded_mixed")
    clean, faults = model(**case).logits, []
    for site in writable(reference_run(name, attention, "padded_mixed")):
        with model.trace(**case):
            write(model, site, read(model, site))
            same = model.logits.save()
        if text := difference(same, clean):
            faults.append(f"{site} assigned as it was served: logits {text}")
        if site.endswith(BY_TOKEN) or (attention == "sdpa" and site.endswith(RECOMPUTED)):
            continue
        with model.trace(**case):
            write(model, site, each(torch.clone, read(model, site)))
            copied = model.logits.save()
        if text := difference(copied, clean):
            faults.append(f"{site} assigned a copy: logits {text}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("site", sorted(READ_ONLY - {"input_ids", "attention_mask"}))
def test_a_computed_value_refuses_assignment_and_says_what_to_assign(site, vlscope_model, inputs):
    model = vlscope_model("dense")
    with model.trace(**inputs("dense", "one_image")), pytest.raises(AttributeError, match="assign"):
        write(model, site, torch.zeros(1))


@pytest.mark.parametrize(
    "site",
    [
        "layers.1.layer_output",
        "vision.layers.1.layer_output",
        "logits",
        "layers.0.deepstack_output",
        "layers.1.self_attn.attention_keys",
    ],
)
def test_a_wrong_shape_dtype_or_device_is_refused_naming_both_sides(site, vlscope_model, inputs):
    model, case = vlscope_model("dense"), inputs("dense", "one_image")
    clean = model(**case).logits
    with model.trace(**case):
        value = read(model, site)
        shape = list(value.shape)
        for wrong in (value[..., :-1], value[..., 0], torch.tensor(1.0), torch.empty(0)):
            with pytest.raises(ValueError) as caught:
                write(model, site, wrong)
            assert str(shape[-1]) in str(caught.value) and site.rpartition(".")[2] in str(caught.value)
        with pytest.raises((ValueError, TypeError), match="(?s)float64.*float32|float32.*float64"):
            write(model, site, value.double())
        with pytest.raises(ValueError, match="(?s)meta.*cpu|cpu.*meta"):
            write(model, site, value.to("meta"))
        logits = model.logits.save()
    assert torch.equal(logits, clean)


def test_a_write_into_a_model_in_half_precision_keeps_the_dtype(checkpoint, inputs):
    model = vlscope.load(checkpoint("dense"), dtype=torch.bfloat16)
    with model.trace(**inputs("dense", "one_image")):
        model.layers[0].layer_output += torch.ones(model.hidden_size)
        entering = model.layers[1].input.save()
        logits = model.logits.save()
    assert entering.dtype == logits.dtype == torch.bfloat16
