"""Checkpoint folders in every form they come in: shards, prefixes, config spellings, dtypes, ties."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
import vlscope
from vlscope import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def weights(checkpoint):
    return load_file(checkpoint("dense") / "model.safetensors")


@pytest.fixture(scope="module")
def logits(vlscope_model, inputs):
    return vlscope_model("dense")(**inputs("dense", "one_image")).logits


@pytest.fixture
def loads_equal(inputs, logits):
    """loads_equal(folder, **options): the folder is the same model, bit for bit."""

    def check(folder, **options):
        assert torch.equal(vlscope.load(folder, **options)(**inputs("dense", "one_image")).logits, logits)

    return check


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("dense"), tmp_path / "a model \u00e9")


def store(folder, tensors):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def shard(folder, tensors, parts=3):
    """Writes `tensors` as `parts` files with an index."""
    (folder / "model.safetensors").unlink()
    files = [f"model-{i + 1:05}-of-{parts:05}.safetensors" for i in range(parts)]
    where = {name: files[i % parts] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    total = sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": where})
    )
    return files, where


def configure(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


# --- files ------------------------------------------------------------------------------------------------------


def test_a_path_with_spaces_and_accents_as_string_or_path(folder, loads_equal):
    loads_equal(folder)
    loads_equal(str(folder))


def test_shards_with_an_index_are_the_same_model(folder, weights, loads_equal):
    shard(folder, weights)
    loads_equal(folder)


def test_a_missing_shard_is_named_with_the_tensors_it_held(folder, weights):
    files, where = shard(folder, weights)
    (folder / files[1]).unlink()
    held = sum(file == files[1] for file in where.values())
    with pytest.raises(CheckpointError, match=rf"(?s){files[1]}.*\b{held}\b"):
        vlscope.load(folder)


def test_shards_without_an_index_are_read_whole_or_refused(folder, weights, loads_equal):
    files, _ = shard(folder, weights)
    (folder / "model.safetensors.index.json").unlink()
    try:
        loads_equal(folder)
    except CheckpointError as error:
        assert "index" in str(error)
        return
    (folder / files[2]).unlink()
    with pytest.raises(CheckpointError):
        vlscope.load(folder)


@pytest.mark.parametrize(
    "removed",
    ["model.language_model.layers.1.self_attn.k_norm.weight", "lm_head.weight", "model.visual.pos_embed.weight"],
)
def test_a_missing_tensor_is_named(folder, weights, removed):
    store(folder, {name: t for name, t in weights.items() if name != removed})
    with pytest.raises(CheckpointError, match=removed.replace(".", r"\.")):
        vlscope.load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder, weights):
    name = "model.language_model.layers.2.self_attn.q_proj.weight"
    store(folder, {**weights, name: weights[name][:48]})
    with pytest.raises(CheckpointError, match=r"(?s)layers\.2\.self_attn\.q_proj\.weight") as caught:
        vlscope.load(folder)
    assert "48, 48" in str(caught.value) and "64, 48" in str(caught.value)


def test_tensors_that_nothing_needs_are_listed_once_and_ignored(folder, weights, loads_equal, caplog):
    store(folder, {**weights, "foo.bar": torch.zeros(2), "model.language_model.rotary_emb.inv_freq": torch.zeros(8)})
    with caplog.at_level("INFO", logger="vlscope"):
        loads_equal(folder)
    assert caplog.text.count("foo.bar") == 1 and "inv_freq" in caplog.text


@pytest.mark.parametrize(
    "extra, dtype",
    [
        ("q_proj.weight_scale_inv", torch.float32),
        ("q_proj.weight", torch.uint8),
        ("q_proj.weight", torch.float8_e4m3fn),
    ],
)
def test_packed_weights_are_refused(folder, weights, extra, dtype):
    at = "model.language_model.layers.0.self_attn."
    shape = weights[at + "q_proj.weight"]
    store(folder, {**weights, at + extra: torch.ones_like(shape).to(dtype)})
    with pytest.raises(CheckpointError, match="q_proj"):
        vlscope.load(folder)


def test_a_quantised_config_is_refused(folder):
    configure(folder, lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(ConfigError, match="fp8"):
        vlscope.load(folder)


def test_weights_are_mapped_and_outlive_the_file(folder, weights, inputs, logits):
    model = vlscope.load(folder)
    assert torch.equal(model(**inputs("dense", "one_image")).logits, logits)
    (folder / "other").mkdir()
    save_file({name: t * 2 for name, t in weights.items()}, folder / "other" / "model.safetensors")
    (folder / "other" / "model.safetensors").rename(folder / "model.safetensors")
    assert torch.equal(model(**inputs("dense", "one_image")).logits, logits)
    (folder / "model.safetensors").unlink()
    assert torch.equal(model(**inputs("dense", "one_image")).logits, logits)


def test_a_weight_edit_stays_in_this_process(folder, weights, inputs, logits):
    model = vlscope.load(folder)
    model.lm_head.weight[:] = 0
    assert model(**inputs("dense", "one_image")).logits.count_nonzero() == 0
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], weights["lm_head.weight"])
    assert torch.equal(vlscope.load(folder)(**inputs("dense", "one_image")).logits, logits)


# --- names ------------------------------------------------------------------------------------------------------


def old(name):
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def test_old_prefixes_are_the_same_model(folder, weights, loads_equal):
    store(folder, {old(name): t for name, t in weights.items()})
    loads_equal(folder)


def test_old_and_new_prefixes_may_mix(folder, weights, loads_equal):
    store(folder, {(old(name) if i % 2 else name): t for i, (name, t) in enumerate(sorted(weights.items()))})
    loads_equal(folder)


def test_two_stored_names_for_one_place_are_refused(folder, weights):
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    store(folder, {**weights, old(name): weights[name].clone()})
    with pytest.raises(CheckpointError) as caught:
        vlscope.load(folder)
    assert name in str(caught.value) and old(name) in str(caught.value)


def test_a_wrapper_prefix_works_or_is_named(folder, weights, loads_equal):
    store(folder, {f"base_model.{name}": t for name, t in weights.items()})
    try:
        loads_equal(folder)
    except CheckpointError as error:
        assert "base_model." in str(error)


# --- ties -------------------------------------------------------------------------------------------------------


def test_a_tied_head_is_the_embedding_itself(vlscope_model):
    model = vlscope_model("two_layers")
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()


def test_the_top_level_flag_ties_the_head(folder, weights, inputs):
    store(folder, {name: t for name, t in weights.items() if name != "lm_head.weight"})
    configure(
        folder,
        lambda config: (
            config.update(tie_word_embeddings=True),
            config["text_config"].update(tie_word_embeddings=False),
        ),
    )
    model = vlscope.load(folder)
    with model.trace(**inputs("dense", "text")):
        normed, logits = model.norm.output, model.logits
        assert torch.equal(normed @ model.embed_tokens.weight.T, logits)


def test_a_stored_head_wins_over_the_flag(folder, loads_equal):
    configure(folder, lambda config: config.update(tie_word_embeddings=True))
    loads_equal(folder)


# --- configs ----------------------------------------------------------------------------------------------------


def to_v4(config, key="rope_type"):
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"mrope_section": rope["mrope_section"], "mrope_interleaved": True, key: "default"}
    config["torch_dtype"] = config.pop("dtype")
    config["vision_config"].pop("rope_parameters", None)
    config["vision_config"]["model_type"] = "qwen3_vl"


def test_the_v4_spelling_of_a_config_is_the_same_model(folder, loads_equal):
    configure(folder, to_v4)
    loads_equal(folder)


@pytest.mark.parametrize("kind", ["default", "mrope"])
def test_rope_scaling_may_say_type(folder, loads_equal, kind):
    configure(
        folder, lambda config: (to_v4(config, key="type"), config["text_config"]["rope_scaling"].update(type=kind))
    )
    loads_equal(folder)


def test_a_config_without_rope_settings_is_refused_where_defaults_do_not_fit(folder):
    configure(folder, lambda config: config["text_config"].pop("rope_parameters"))
    with pytest.raises(ConfigError, match="mrope_section|rope"):
        vlscope.load(folder)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_rope_that_the_engine_does_not_compute_is_refused(folder, kind):
    configure(folder, lambda config: config["text_config"]["rope_parameters"].update(rope_type=kind, factor=2.0))
    with pytest.raises(ConfigError, match=kind):
        vlscope.load(folder)


@pytest.mark.parametrize(
    "part, key",
    [
        ("text_config", "hidden_size"),
        ("text_config", "num_hidden_layers"),
        ("vision_config", "depth"),
        ("vision_config", "out_hidden_size"),
    ],
)
def test_a_missing_or_impossible_size_is_named(folder, part, key):
    configure(folder, lambda config: config[part].update({key: 0}))
    with pytest.raises(ConfigError, match=key):
        vlscope.load(folder)


# --- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_has_the_dtype_asked_for(folder, dtype, inputs):
    model = vlscope.load(folder, dtype=dtype)
    with model.trace(**inputs("dense", "one_image")):
        for value in (
            model.token_embeddings,
            model.vision.patch_embeddings,
            model.vision.layers[1].layer_output,
            model.vision.image_features,
            model.layers[0].self_attn.attention_queries,
            model.layers[0].layer_output,
            model.layers[0].deepstack_output,
            model.layers[1].input,
            model.logits,
        ):
            assert value.dtype == dtype and value.isfinite().all()


def test_the_stored_dtype_is_kept_and_another_converts(tmp_path, inputs, logits):
    half = tiny.build("dense", tmp_path / "half", dtype=torch.bfloat16)
    assert vlscope.load(half)(**inputs("dense", "text")).logits.dtype == torch.bfloat16
    widened = vlscope.load(half, dtype=torch.float32)
    converted = widened(**inputs("dense", "one_image")).logits
    assert converted.dtype == torch.float32
    assert 0 < (converted - logits).abs().max() < 0.2


def test_mixed_dtypes_are_converted_to_one(folder, weights, inputs):
    mixed = {name: t if "norm" in name else t.bfloat16() for name, t in weights.items()}
    store(folder, mixed)
    model = vlscope.load(folder, dtype=torch.bfloat16)
    assert model.layers[0].input_layernorm.weight.dtype == torch.bfloat16
    assert model(**inputs("dense", "text")).logits.dtype == torch.bfloat16


def test_without_dispatch_the_tree_stands_and_weights_come_with_the_first_trace(folder, inputs, logits):
    model = vlscope.load(folder, dispatch=False)
    assert not model.dispatched and len(model.layers) == 4 and "layer_output" in repr(model)
    with model.trace(**inputs("dense", "one_image")):
        served = model.logits.save()
    assert model.dispatched and torch.equal(served, logits)


def test_dispatch_loads_at_once(folder, loads_equal, inputs, logits):
    model = vlscope.load(folder, dispatch=False)
    model.dispatch()
    assert model.dispatched and torch.equal(model(**inputs("dense", "one_image")).logits, logits)


def test_tokenizer_files_are_only_needed_for_text(folder, inputs, logits):
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        (folder / name).unlink()
    model = vlscope.load(folder)
    assert torch.equal(model(**inputs("dense", "one_image")).logits, logits)
    with pytest.raises(vlscope.VlscopeError, match="tokenizer"):
        model("text")


def test_both_entry_points_are_one_class(folder):
    assert isinstance(vlscope.load(folder), vlscope.StandardizedTransformer)
    assert isinstance(vlscope.StandardizedTransformer(folder, dtype=torch.float32), vlscope.StandardizedTransformer)


# --- the shipped sizes ------------------------------------------------------------------------------------------

#         hidden  mlp  layers heads tied | depth width mlp taps | tensors parameters
SHIPPED = {
    "2B": (2048, 6144, 28, 16, True, 24, 1024, 4096, [5, 11, 17], 625, 2_127_532_032),
    "4B": (2560, 9728, 36, 32, True, 24, 1024, 4096, [5, 11, 17], 713, 4_437_815_808),
    "8B": (4096, 12288, 36, 32, False, 27, 1152, 4304, [8, 16, 24], 750, 8_767_123_696),
    "32B": (5120, 25600, 64, 64, False, 27, 1152, 4304, [8, 16, 24], 1058, 33_357_390_064),
}


@pytest.mark.parametrize("size", SHIPPED)
def test_the_weight_list_of_a_shipped_size_counts_to_the_tensor_and_the_parameter(size, tmp_path):
    hidden, mlp, layers, heads, tied, depth, width, vision_mlp, taps, tensors, parameters = SHIPPED[size]
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": 151936,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "attention_bias": False,
            "rope_theta": 5000000,
            "dtype": "bfloat16",
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": vision_mlp,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": 2304,
            "hidden_act": "gelu_pytorch_tanh",
            "deepstack_visual_indexes": taps,
        },
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert vlscope.weight_counts(path) == (tensors, parameters)


#          tensors  parameters, those of multi-token prediction included
QWEN3_5 = {
    "0.8b": (488, 873_438_784),
    "2b": (632, 2_274_069_824),
    "4b": (738, 4_659_865_088),
    "9b": (775, 9_653_104_368),
    "27b": (1199, 27_781_427_952),
    "35b-a3b": (1811, 35_951_822_704),
}


@pytest.mark.parametrize("size", QWEN3_5)
def test_a_shipped_size_of_qwen3_5_counts_to_what_is_stored_but_for_multi_token_prediction(size):
    path = Path(__file__).parent / "data" / "configs" / f"qwen3.5-{size}.json"
    text = json.loads(path.read_text())["text_config"]
    hidden, dim = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * dim, text["num_key_value_heads"] * dim
    if experts := text.get("num_experts", 0):  # stored one by one; the router, the shared expert and its gate
        mlps = [text["moe_intermediate_size"]] * experts + [text["shared_expert_intermediate_size"]]
        others = (experts + 1) * hidden
    else:
        mlps, others = [text["intermediate_size"]], 0
    # fc over two streams, three norms, and one gated block: two norms, four projections and two norms of heads.
    block = 2 * hidden + hidden * (2 * queries + 2 * keys + queries) + 2 * dim + 3 * hidden * sum(mlps) + others
    prediction = 2 * hidden * hidden + 3 * hidden + block
    stored = 1 + 3 + 8 + 3 * len(mlps) + (2 if experts else 0)
    tensors, parameters = vlscope.weight_counts(path)
    assert (tensors + stored, parameters + prediction) == QWEN3_5[size]


def test_weights_of_multi_token_prediction_are_known_and_listed_as_unused(checkpoint, tmp_path, caplog):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("hybrid"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["mtp.fc.weight"] = torch.zeros(48, 96)
    weights["mtp.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 48)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with caplog.at_level("INFO", logger="vlscope"):
        vlscope.load(folder)
    (record,) = [record for record in caplog.records if "mtp." in record.message]
    assert record.levelname == "INFO" and "2 tensors are for multi-token prediction" in record.message
    assert "mtp.fc.weight, mtp.layers.0.mlp.up_proj.weight" in record.message
