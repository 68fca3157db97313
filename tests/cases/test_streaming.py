"""Models larger than memory: `weights="stream"` gives the bits of a float32 load and keeps what is stored.

Every checkpoint here is stored in bfloat16, so that each large weight is widened when it is used.
"""

import functools
import json
import logging
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file

import tiny
import vlscope
from vlscope import InputError
from vlscope.sites import expand, read

#: Named values all along the forward, of every family.
SITES = (
    "vision.layers.*.layer_output",
    "vision.image_features",
    "layers.*.mlp.input",
    "layers.*.mlp.output",
    "layers.*.layer_output",
    "logits",
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """stored(name, dtype): the folder of a tiny checkpoint stored in half precision."""
    root = tmp_path_factory.mktemp("half")

    @functools.cache
    def folder(name, dtype=torch.bfloat16):
        where = root / f"{name}-{dtype}"
        tiny.build(name, where, dtype)
        tiny.restore(where, dict)  # from a multiple of 64 bytes on
        return where

    return folder


@pytest.fixture(scope="module")
def both(stored):
    """both(name): the model as a float32 load has it, and the one that streams."""
    return functools.cache(lambda name: pair(stored(name)))


def pair(folder, **options):
    return vlscope.load(folder, **{"dtype": torch.float32, **options}), vlscope.load(
        folder, weights="stream", **options
    )


def values(model, inputs, sites=SITES):
    """The values that these patterns name, by site."""
    with torch.no_grad(), model.trace(**inputs):
        return {site: read(model, site).clone() for site in expand(model, sites)}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def equal_everywhere(resident, streamed, inputs):
    assert streamed.dtype == resident.dtype
    assert_equal(values(streamed, inputs), values(resident, inputs))


def largest(model):
    """Bytes in float32 of the largest matrix that a forward multiplies by."""
    weights = (model.lm_head.weight, model.layers[0].mlp.down_proj.weight)
    return 4 * max(weight.numel() for weight in weights)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_named_values_and_generation_have_the_bits_of_a_float32_load(both, inputs, name):
    resident, streamed = both(name)
    for case in ("one_image", "text"):
        sites = [site for site in SITES if case == "one_image" or not site.startswith("vision")]
        assert_equal(values(streamed, inputs(name, case), sites), values(resident, inputs(name, case), sites))
    answers = [model.generate(**inputs(name, "one_image"), max_new_tokens=4) for model in (resident, streamed)]
    assert torch.equal(answers[0].result, answers[1].result)
    assert streamed._core.widening[0] == 1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_kinds_of_attention_have_them(stored, inputs, attention):
    equal_everywhere(*pair(stored("dense"), attn_implementation=attention), inputs("dense", "padded_mixed"))


def exchanged(tensors):
    return {key: tiny.exchanged(key, value) for key, value in tensors.items()}


@pytest.mark.parametrize("form", [exchanged, tiny.split])
def test_experts_have_them_in_every_form_of_storage(stored, inputs, tmp_path, form):
    folder = shutil.copytree(stored("moe"), tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()
    tiny.restore(folder, form)
    assert (folder / "model.safetensors").read_bytes() != before
    equal_everywhere(*pair(folder), inputs("moe", "one_image"))


def test_another_dtype_can_be_widened_to_and_from(stored, inputs):
    for kept, run in ((torch.float16, torch.float32), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float64)):
        resident, streamed = pair(stored("dense", kept), dtype=run)
        assert streamed.dtype == run
        equal_everywhere(resident, streamed, inputs("dense", "one_image"))


def test_what_is_stored_in_the_dtype_of_the_forward_is_used_in_place(checkpoint, inputs):
    resident, streamed = pair(checkpoint("dense"))
    equal_everywhere(resident, streamed, inputs("dense", "one_image"))
    assert streamed._core.widening == (0, 0)


def test_large_weights_stay_as_stored_and_small_ones_are_converted(both):
    for name in ("dense", "moe"):
        model = both(name)[1]
        mlp = model.layers[-1].mlp
        large = [model.lm_head.weight, model.embed_tokens.weight, model.vision.layers[0].attn.qkv.weight]
        large += [mlp.experts.down_proj] if name == "moe" else [mlp.down_proj.weight]
        assert {weight.dtype for weight in large} == {torch.bfloat16}
        small = [model.norm.weight, model.vision.patch_embed.proj.weight, model.vision.layers[0].attn.qkv.bias]
        assert {weight.dtype for weight in small} == {torch.float32}


def test_gradients_are_those_of_a_float32_load(both, inputs):
    for name in ("dense", "moe", "hybrid"):
        found = []
        for model in both(name):
            with torch.enable_grad(), model.trace(**inputs(name, "one_image")):
                entering = model.layers[0].input.requires_grad_()
                middle = model.layers[1].layer_output
                loss = model.logits.square().mean()
            found.append(torch.autograd.grad(loss, (entering, middle)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), name


def test_a_graph_keeps_what_it_needs_while_the_same_buffers_go_on(both, inputs):
    model = both("dense")[1]
    run = inputs("dense", "one_image")
    before = values(model, run)
    held = model._core.widening
    with torch.enable_grad(), model.trace(**run):
        entering = model.layers[0].input.requires_grad_()
        loss = model.logits.square().mean()
    assert_equal(values(model, run), before)
    first = torch.autograd.grad(loss, entering, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, entering)[0])
    assert model._core.widening == held


def test_a_weight_that_requires_grad_gets_one(stored, inputs):
    found = []
    for model in pair(stored("dense")):
        weight = model.layers[1].mlp.down_proj.weight.requires_grad_()
        with torch.enable_grad(), model.trace(**inputs("dense", "text")):
            model.logits.square().mean().backward()
        found.append(weight.grad)
    assert found[1].dtype == torch.bfloat16 and torch.equal(found[0].bfloat16(), found[1])


def test_traces_use_the_same_buffer_again(stored, inputs):
    model = vlscope.load(stored("dense"), weights="stream")
    run = inputs("dense", "one_image")
    assert model._core.widening == (0, 0)
    values(model, run)
    held = model._core.widening
    assert held[0] == 1 and largest(model) <= held[1] < largest(model) + 128
    for _ in range(20):
        values(model, run, ["layers.*.layer_output"])
        model.generate(**run, max_new_tokens=2)
    assert model._core.widening == held


def test_threads_have_a_buffer_each_and_the_same_bits(stored, inputs):
    model, run = vlscope.load(stored("moe"), weights="stream"), inputs("moe", "one_image")
    expected = values(model, run)
    wrong, count = [], 4

    def work():
        for _ in range(10):
            ours = values(model, run)
            wrong.extend(site for site in ours if not torch.equal(ours[site], expected[site]))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and model._core.widening[0] <= count


def test_an_edit_of_a_stored_weight_is_used_and_told(stored, inputs, caplog):
    resident, streamed = pair(stored("dense"))
    run = inputs("dense", "one_image")
    for model in (resident, streamed):
        model.layers[1].mlp.down_proj.weight.mul_(0.5)
        model.lm_head.weight[7] = 0
    with caplog.at_level(logging.WARNING, logger="vlscope"):
        ours = values(streamed, run)
    assert_equal(ours, values(resident, run))
    assert not ours["logits"][..., 7].any()
    assert "layers.1.mlp.down_proj.weight has been edited" in caplog.text
    assert vlscope.load(stored("dense"), weights="stream").lm_head.weight[7].any()  # the file is as it was


def test_a_tied_head_is_the_embedding(both):
    model = both("two_layers")[1]
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()


def test_experts_stored_one_by_one_are_served_as_such_and_take_edits(stored, inputs, tmp_path, caplog):
    folder = shutil.copytree(stored("moe"), tmp_path / "model")
    whole = vlscope.load(folder, weights="stream").layers[0].mlp.experts
    gate_up, down = whole.gate_up_proj.clone(), whole.down_proj.clone()
    tiny.restore(folder, tiny.split)
    resident, streamed = pair(folder)
    experts = streamed.layers[0].mlp.experts
    assert len(experts.gate_up_proj) == len(experts.down_proj) == len(down)
    for expert, (gate, up) in enumerate(experts.gate_up_proj):
        assert torch.equal(torch.cat((gate, up)), gate_up[expert])
        assert torch.equal(*experts.down_proj[expert], down[expert])
    run = inputs("moe", "text")
    values(streamed, run, ["logits"])
    for expert in range(len(down)):
        experts.gate_up_proj[expert][1].mul_(2)  # every up
    resident.layers[0].mlp.experts.gate_up_proj[:, gate_up.shape[1] // 2 :] *= 2
    with caplog.at_level(logging.WARNING, logger="vlscope"):
        ours = values(streamed, run, ["logits"])
    assert_equal(ours, values(resident, run, ["logits"]))
    assert "layers.0.mlp.experts.3.up_proj.weight has been edited" in caplog.text


#: Cuts the file before the last matrix of an expert, and sends every token to the expert that is named. To touch a page
#: behind the end of a mapped file ends the process by SIGBUS.
CUT = """
import os, sys, pathlib, torch, vlscope
file, expert = pathlib.Path(sys.argv[1]) / "model.safetensors", int(sys.argv[2])
model = vlscope.load(file.parent, weights="stream")
mlp = model.layers[-1].mlp
with torch.no_grad(), model.trace(input_ids=torch.tensor([[5, 6, 7]])):
    # A trace that is open does not look at the file again.
    os.truncate(file, file.stat().st_size - model.hidden_size * mlp.moe_intermediate_size * 2)
    mlp.expert_indices[:] = expert
    print(mlp.output.abs().sum().item() > 0)
"""


def store_last(folder, last):
    """Stores the tensor `last` behind all others."""
    tensors = load_file(folder / "model.safetensors")
    tensors[last] = tensors.pop(last)
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = (tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


@pytest.mark.parametrize("form", ["stacked", "split"])
def test_an_expert_that_is_not_hit_is_never_read(tmp_path, monkeypatch, form):
    # Every matrix of an expert takes some pages.
    large = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    config = tiny.QWEN3_VL_MOE["moe"]
    monkeypatch.setitem(tiny.CONFIGS, "large", {**config, "text_config": {**config["text_config"], **large}})
    folder = tiny.build("large", tmp_path, torch.bfloat16)
    experts = f"model.language_model.layers.{config['text_config']['num_hidden_layers'] - 1}.mlp.experts"
    if form == "split":
        tiny.restore(folder, tiny.split)
    whole = shutil.copytree(folder, tmp_path / "whole")

    def run(expert):
        copy = shutil.copytree(whole, tmp_path / f"to-{expert}")
        store_last(copy, f"{experts}.2.down_proj.weight" if form == "split" else f"{experts}.down_proj")
        return subprocess.run([sys.executable, "-c", CUT, copy, str(expert)], capture_output=True, text=True)

    unhit = run(1)
    assert (unhit.returncode, unhit.stdout) == (0, "True\n"), unhit.stderr
    assert run(2).returncode == -signal.SIGBUS


def test_recordings_and_tails_go_on_with_the_same_bits(both, inputs):
    found = []
    for model in both("dense"):
        with torch.no_grad():
            clean = model.record(**inputs("dense", "one_image"), keys=True)
            with model.trace(clean):
                model.layers[1].layer_input[:, -1] *= 2
                found.append(model.logits.clone())
            with model.trace(clean.tail(3)):
                found.append(model.logits.clone())
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_modules_and_the_lens_can_be_called_under_any_mode(both):
    resident, streamed = both("dense")
    hidden = torch.randn(2, 3, resident.hidden_size, generator=torch.Generator().manual_seed(0))
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            assert torch.equal(streamed.project_on_vocab(hidden), resident.project_on_vocab(hidden))
            proj = streamed.layers[0].self_attn.q_proj(hidden)
            assert torch.equal(proj, resident.layers[0].self_attn.q_proj(hidden))


def test_a_module_can_be_skipped(both, inputs):
    found = []
    for model in both("dense"):
        with torch.no_grad(), model.trace(**inputs("dense", "text")):
            entering = model.layers[1].self_attn.q_proj.input
            model.layers[1].self_attn.q_proj.skip(entering.new_zeros(*entering.shape[:2], 64))
            found.append(model.logits.clone())
    assert torch.equal(*found)


def test_verify_passes_on_weights_that_stream(stored):
    for name in ("dense", "hybrid_moe"):
        report = vlscope.verify.run(stored(name), weights="stream", parity=False)
        assert report.ok, report


def test_weights_can_stay_away_until_the_first_trace(stored, both, inputs):
    run = inputs("dense", "one_image")
    model = vlscope.load(stored("dense"), weights="stream", dispatch=False)
    assert not model.dispatched and model.dtype == torch.float32
    assert model.scan(**run)["layers.0.layer_output"].dtype == torch.float32
    assert_equal(values(model, run), values(both("dense")[0], run))


def test_what_does_not_go_with_it_is_refused(stored, tmp_path):
    folder = stored("dense")
    for said, options in {
        "'stream'": {"weights": "streem"},
        "copy=True": {"weights": "stream", "copy": True},
        "device_map": {"weights": "stream", "device_map": {"": "cpu"}},
        "cuda": {"weights": "stream", "device": "cuda"},
    }.items():
        with pytest.raises(InputError, match=said):
            vlscope.load(folder, dispatch=False, **options)
    model = vlscope.load(folder, weights="stream")
    with pytest.raises(InputError, match="cuda"):
        model.to("cuda")
    with pytest.raises(InputError, match="streams on the CPU alone"):
        model._core.to(torch.device("meta"))
    assert model.to("cpu") is model and model.weights == "stream"
