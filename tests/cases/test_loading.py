"""Checkpoint folders: what is missing, misnamed, packed or replaced, and what each case makes of it."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import vlscope
from checkpoint_folders import configure, old, shard, store, to_v4
from vlscope import CheckpointError, CheckpointNotFound, ConfigError, InputError, UnsupportedFamily

QUERIES = "model.language_model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def weights(checkpoint):
    return load_file(checkpoint("dense") / "model.safetensors")


@pytest.fixture(scope="module")
def logits(vlscope_model, image):
    return vlscope_model("dense")(**image).logits


@pytest.fixture
def loads_equal(image, logits):
    """loads_equal(folder): the folder is the same model, bit for bit."""

    def check(folder):
        assert torch.equal(vlscope.load(folder)(**image).logits, logits)

    return check


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("dense"), tmp_path / "model")


def refused(folder, kind, *said, **options):
    """The folder is refused with an error of `kind` whose message holds each of `said`."""
    with pytest.raises(kind) as caught:
        vlscope.load(folder, **options)
    for part in said:
        assert str(part) in str(caught.value), caught.value


def test_ld_01_shards_are_accounted_for_to_the_last_tensor(folder, weights, loads_equal):
    files, where = shard(folder, weights)
    loads_equal(folder)
    held = sum(file == files[1] for file in where.values())
    (folder / files[1]).rename(folder / "away")
    refused(folder, CheckpointError, files[1], held)
    (folder / "away").rename(folder / files[1])
    (folder / "model.safetensors.index.json").unlink()
    loads_equal(folder)
    (folder / files[2]).unlink()
    refused(folder, CheckpointError, "is not stored", f"{sum(file == files[2] for file in where.values())} of")


def test_ld_03_a_tied_head_is_the_embedding_and_another_is_its_own(vlscope_model, checkpoint, reference_run, inputs):
    stored = load_file(checkpoint("two_layers") / "model.safetensors")
    tied, untied = vlscope_model("two_layers"), vlscope_model("dense")
    assert "lm_head.weight" not in stored
    assert tied.lm_head.weight.data_ptr() == tied.embed_tokens.weight.data_ptr()
    assert not torch.equal(untied.lm_head.weight, untied.embed_tokens.weight)
    for name, model in (("two_layers", tied), ("dense", untied)):
        with model.trace(**inputs(name, "text")):
            normed, logits = model.norm.output, model.logits
            assert torch.equal(normed @ model.lm_head.weight.T, logits)
            assert torch.equal(logits, reference_run(name, "sdpa", "text").logits)


def test_ld_03_an_edit_of_a_tied_weight_shows_under_either_name(checkpoint, inputs):
    model = vlscope.load(checkpoint("two_layers"))
    model.embed_tokens.weight[5] = 0
    assert not model.lm_head.weight[5].any()
    assert not model(**inputs("two_layers", "text")).logits[..., 5].any()


@pytest.mark.parametrize("form", ["old", "a mixture of both"])
def test_ld_05_old_prefixes_are_the_same_model(folder, weights, loads_equal, form):
    store(
        folder,
        {(old(name) if form == "old" or k % 2 else name): t for k, (name, t) in enumerate(sorted(weights.items()))},
    )
    loads_equal(folder)


def test_ld_05_two_stored_names_of_one_place_are_refused_naming_both(folder, weights):
    store(folder, {**weights, old(QUERIES): weights[QUERIES].clone()})
    refused(folder, CheckpointError, QUERIES, old(QUERIES))


def test_ld_05_a_wrapper_prefix_is_refused_by_the_first_name_that_fits_nothing(folder, weights):
    store(folder, {f"base_model.{name}": t for name, t in weights.items()})
    refused(folder, CheckpointError, f"base_model.{min(weights)}", len(weights))


@pytest.mark.parametrize(
    "name",
    ["model.language_model.layers.1.self_attn.k_norm.weight", "lm_head.weight", "model.visual.pos_embed.weight"],
)
def test_ld_06_a_missing_tensor_is_named(folder, weights, name):
    store(folder, {key: t for key, t in weights.items() if key != name})
    refused(folder, CheckpointError, name, list(weights[name].shape))


def test_ld_06_a_tensor_of_another_shape_is_named_with_both_shapes(folder, weights):
    store(folder, {**weights, QUERIES: weights[QUERIES][:48]})
    refused(folder, CheckpointError, QUERIES, "[48, 48]", "[64, 48]")


def test_ld_06_tensors_that_nothing_needs_are_listed_once(folder, weights, loads_equal, caplog):
    store(folder, {**weights, "foo.bar": torch.zeros(2), "model.language_model.rotary_emb.inv_freq": torch.zeros(8)})
    with caplog.at_level("INFO", logger="vlscope"):
        loads_equal(folder)
    (record,) = [record for record in caplog.records if "foo.bar" in record.message]
    assert "inv_freq" in record.message and "2 tensors" in record.message


def test_ld_07_the_width_of_a_head_is_that_of_the_config(vlscope_model, inputs, reference_run):
    """Hidden 48 over 4 heads would be 12; the config says 16."""
    model = vlscope_model("dense", "eager")
    attention = model.layers[1].self_attn
    assert attention.q_proj.weight.shape == (64, 48) and attention.o_proj.weight.shape == (48, 64)
    with model.trace(**inputs("dense", "text")):
        queries, keys = attention.attention_queries, attention.attention_keys
        scores, logits = attention.attention_scores, model.logits
    assert queries.shape == (1, 4, 9, 16) and keys.shape == (1, 2, 9, 16)
    expected = queries @ keys.repeat_interleave(2, 1).transpose(2, 3) * 16**-0.5
    seen = torch.ones(9, 9).tril().bool()
    assert torch.equal(scores[..., seen], expected[..., seen])
    assert torch.equal(logits, reference_run("dense", "eager", "text").logits)


def test_ld_09_every_spelling_of_the_rotary_settings_is_the_same_model(folder, loads_equal):
    """The shared checkpoint has that of transformers 5."""
    stored = (folder / "config.json").read_text()
    for spelling in (
        lambda config: to_v4(config),
        lambda config: to_v4(config, key="type"),
        lambda config: (to_v4(config, key="type"), config["text_config"]["rope_scaling"].update(type="mrope")),
    ):
        (folder / "config.json").write_text(stored)
        configure(folder, spelling)
        loads_equal(folder)


def test_ld_09_without_rotary_settings_the_defaults_must_fit_and_are_told(folder, caplog):
    configure(folder, lambda config: config["text_config"].pop("rope_parameters"))
    refused(folder, ConfigError, "mrope_section", "[24, 20, 20]", "64", "8")

    def widened(config):
        config["text_config"]["head_dim"] = 128
        config["text_config"]["rope_theta"] = 5e6

    configure(folder, widened)
    with caplog.at_level("INFO", logger="vlscope"):
        model = vlscope.load(folder, dispatch=False)
    assert "rope_theta               5000000" in repr(model)
    assert "5000000" in caplog.text and "[24, 20, 20]" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ld_11_every_value_has_the_dtype_asked_for(checkpoint, dtype, image):
    """But for the angles of the tower, which the reference makes in float32 too."""
    model = vlscope.load(checkpoint("dense"), dtype=dtype)
    others = set()
    for site, value in values(model, image):
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, torch.Tensor) and part.is_floating_point() and part.dtype != dtype:
                others.add((site, part.dtype))
    assert others == {("vision.rotary_pos_emb.output", torch.float32)}


def values(model, inputs):
    """(site, value) of everything that a forward reaches."""
    with model.trace(**inputs):
        for site in sorted(model.scan(**inputs), key=model.order):
            yield site, model.get(site)


def test_ld_11_mixed_files_load_and_what_cannot_run_is_refused_at_load(folder, weights, image):
    store(folder, {name: t if "norm" in name else t.bfloat16() for name, t in weights.items()})
    model = vlscope.load(folder)
    assert model.layers[0].input_layernorm.weight.dtype == model(**image).logits.dtype == torch.bfloat16
    refused(folder, InputError, "int8", dtype=torch.int8)
    refused(folder, InputError, "float8", dtype=torch.float8_e4m3fn)
    refused(folder, InputError, "meta", device="meta")
    if not torch.cuda.is_available():
        refused(folder, InputError, "cuda", device="cuda")


@pytest.mark.parametrize(
    "name, tensor, said",
    [
        (QUERIES, torch.ones(64, 48, dtype=torch.float8_e4m3fn), "F8_E4M3"),
        (QUERIES, torch.ones(64, 24, dtype=torch.uint8), "U8"),
        (QUERIES + "_scale_inv", torch.ones(1, 1), "quantis"),
        (QUERIES.replace("weight", "qweight"), torch.ones(6, 64, dtype=torch.int32), "quantis"),
    ],
)
def test_ld_12_packed_weights_are_refused_by_name(folder, weights, name, tensor, said):
    store(folder, {**weights, name: tensor})
    refused(folder, CheckpointError, name, said)


@pytest.mark.parametrize("method", ["fp8", "gptq", "bitsandbytes"])
def test_ld_12_a_quantised_config_is_refused_by_its_method(folder, method):
    configure(folder, lambda config: config.update(quantization_config={"quant_method": method}))
    refused(folder, ConfigError, "quantization_config", method)


def test_ld_13_a_folder_that_is_no_checkpoint_is_refused_by_path_and_field(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", CheckpointNotFound, tmp_path / "empty", "config.json")
    refused(folder / "config.json", CheckpointNotFound, folder / "config.json", "is a file")
    refused(tmp_path / "nowhere", CheckpointNotFound, tmp_path / "nowhere")
    configure(folder, lambda config: config.update(model_type="llama"))
    refused(folder, UnsupportedFamily, folder / "config.json", "model_type", "llama", "qwen3_vl")
    configure(folder, lambda config: config.pop("model_type"))
    refused(folder, ConfigError, folder / "config.json", "model_type")
    (folder / "config.json").write_text('{"model_type": ')
    refused(folder, ConfigError, folder / "config.json")
    (folder / "config.json").unlink()
    refused(folder, CheckpointNotFound, folder / "config.json")


def test_ld_13_tokenizer_files_are_needed_for_text_alone(folder, image, logits):
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        (folder / name).unlink()
    model = vlscope.load(folder)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        model("text")
    assert torch.equal(model(**image).logits, logits)


def test_ld_13_a_path_may_hold_spaces_and_accents(folder, loads_equal):
    moved = folder.rename(folder.with_name("a model \u00e9"))
    loads_equal(moved)
    loads_equal(str(moved))


def test_ld_14_a_file_may_be_deleted_or_replaced_under_a_model(folder, weights, image, logits):
    model, path = vlscope.load(folder), folder / "model.safetensors"
    save_file({name: t * 2 for name, t in weights.items()}, folder / "other")
    (folder / "other").rename(path)
    assert torch.equal(model(**image).logits, logits)
    path.unlink()
    assert torch.equal(model(**image).logits, logits)


def overwrite(path):
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0" * 4)


def append(path):
    with path.open("ab") as file:
        file.write(b"\0")


#: What may be done to a file in place. To be touched is to be written to: the times of both are all that shows.
WRITES = {
    "overwritten": overwrite,
    "cut": lambda path: os.truncate(path, 8),
    "extended": append,
    "touched": os.utime,
}


@pytest.fixture(params=WRITES)
def write(request):
    return WRITES[request.param]


def test_ld_14_a_file_that_was_written_to_is_noticed_before_anything_runs(write, folder, weights, image):
    files, _ = shard(folder, weights)
    written = folder / files[1]
    model = vlscope.load(folder)
    model(**image)
    with model.trace(**image):  # the error is of a trace that begins, and leaves one that runs alone
        first = model.layers[0].layer_output
        sizes = [written.stat().st_size]
        write(written)
        sizes.append(written.stat().st_size)
    hidden = first.detach().clone()
    for use in (
        lambda: model(**image),
        lambda: model.trace(**image).__enter__(),
        lambda: model.generate(**image, max_new_tokens=1).result,
        lambda: model.record(**image),
        lambda: model.project_on_vocab(hidden),
        lambda: model.to("cpu"),
    ):
        with pytest.raises(CheckpointError) as caught:
            use()
        message = str(caught.value)
        assert str(written) in message and files[0] not in message
        assert all(f"{size} bytes" in message for size in sizes) and message.count(" UTC") == 2
        assert "Load the model again" in message and "copy=True" in message


def test_ld_14_a_model_loaded_again_is_that_of_the_file_as_it_is_now(folder, image, logits):
    model = vlscope.load(folder)
    overwrite(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="written to"):
        model(**image)
    again = vlscope.load(folder)(**image).logits
    assert torch.equal(vlscope.load(folder, copy=True)(**image).logits, again)
    assert not torch.equal(again, logits)


def test_ld_14_a_file_stays_watched_after_a_move_to_where_its_weights_lie_in_place(folder, image, logits):
    model = vlscope.load(folder).to("cpu")
    assert torch.equal(model(**image).logits, logits)
    overwrite(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="written to"):
        model(**image)


@pytest.mark.parametrize("options", [{"copy": True}, {"dtype": torch.float64}], ids=["copied", "converted"])
def test_ld_14_weights_in_memory_outlive_whatever_becomes_of_their_file(write, options, folder, image):
    model = vlscope.load(folder, **options)
    before = model(**image).logits
    write(folder / "model.safetensors")
    assert torch.equal(model(**image).logits, before)
