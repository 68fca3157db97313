"""Checkpoint folders: ties, sizes, dtypes, options. What is wrong in them: `tests/cases/test_loading.py`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
import vlscope
from checkpoint_folders import configure, store
from vlscope import ConfigError


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


# --- weights ----------------------------------------------------------------------------------------------------


def test_a_weight_edit_stays_in_this_process(folder, weights, inputs, logits):
    model = vlscope.load(folder)
    model.lm_head.weight[:] = 0
    assert model(**inputs("dense", "one_image")).logits.count_nonzero() == 0
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], weights["lm_head.weight"])
    assert torch.equal(vlscope.load(folder)(**inputs("dense", "one_image")).logits, logits)


# --- ties -------------------------------------------------------------------------------------------------------


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


def test_the_stored_dtype_is_kept_and_another_converts(tmp_path, inputs, logits):
    half = tiny.build("dense", tmp_path / "half", dtype=torch.bfloat16)
    assert vlscope.load(half)(**inputs("dense", "text")).logits.dtype == torch.bfloat16
    widened = vlscope.load(half, dtype=torch.float32)
    converted = widened(**inputs("dense", "one_image")).logits
    assert converted.dtype == torch.float32
    assert 0 < (converted - logits).abs().max() < 0.2


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


# --- the patch embedding ----------------------------------------------------------------------------------------


def test_patches_are_projected_by_the_matrix_product_on_request(checkpoint, vlscope_model, inputs):
    given = inputs("dense", "one_image")
    model = vlscope.load(checkpoint("dense"), patch_embedding="matmul")
    assert model.patch_embedding == "matmul"
    with model.trace(**given):
        found = model.vision.patch_embeddings.clone()
        logits = model.logits
    projection = model.vision.patch_embed.proj
    weight, bias = projection.weight.flatten(1), projection.bias
    assert torch.equal(found.squeeze(0), torch.nn.functional.linear(given["pixel_values"], weight, bias))
    expected = vlscope_model("dense")(**given).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_an_unknown_patch_embedding_is_refused_by_name(checkpoint):
    with pytest.raises(ConfigError, match='patch_embedding is "product"; give "convolution" or "matmul"'):
        vlscope.load(checkpoint("dense"), patch_embedding="product")


def test_a_recording_belongs_to_its_patch_embedding(checkpoint, vlscope_model, inputs):
    recording = vlscope_model("dense").record(**inputs("dense", "one_image"))
    other = vlscope.load(checkpoint("dense"), patch_embedding="matmul")
    with pytest.raises(vlscope.InputError, match="another patch_embedding"):
        other.trace(recording)
