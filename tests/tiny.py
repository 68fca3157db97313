"""Tiny random checkpoints of every family in the hub's format, each of another shape.

Weights are scaled by fan-in, norms lie away from one and biases away from zero, so that a wrong axis, a swapped
bias or a missing add moves the logits far beyond any tolerance. Tokenizer and processor files are the built-in
model's, with the checkpoint's own patch size.
"""

import json
import math
import shutil
import zlib
from pathlib import Path

import torch

DEMO = Path(__file__).resolve().parents[1] / "demo" / "model"
PROCESSOR_FILES = (
    "chat_template.jinja",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)

CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "temporal_patch_size": 2,
    "merge_size": 2,
}

VOCABULARY = 704
PAD, IM_END, VISION_START, VISION_END, IMAGE, VIDEO = 695, 697, 698, 699, 701, 702


def _config(text, vision, tied, mrope_section, theta=5e6):
    return {
        "model_type": "qwen3_vl",
        "text_config": {
            "vocab_size": VOCABULARY,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "bos_token_id": PAD,
            "eos_token_id": IM_END,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": theta,
                "mrope_section": mrope_section,
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": tied,
            **text,
        },
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": text["hidden_size"],
            **vision,
        },
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": tied,
    }


QWEN3_VL = {
    # head_dim 16 where hidden / heads is 12; more text layers than taps; a 4 x 4 position table.
    "dense": _config(
        {
            "hidden_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
        },
        {
            "depth": 4,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2],
        },
        tied=False,
        mrope_section=[4, 2, 2],
    ),
    # One key/value head, biased projections, a vision head of 72, an 8 x 8 table, a large epsilon.
    "one_kv_head": _config(
        {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "intermediate_size": 72,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
        },
        {
            "depth": 3,
            "hidden_size": 144,
            "num_heads": 2,
            "intermediate_size": 96,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1, 2],
        },
        tied=True,
        mrope_section=[4, 4, 4],
    ),
    # As many key/value heads as query heads, a vision head of 12, three taps with gaps, five text layers.
    "ungrouped": _config(
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 5,
            "intermediate_size": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
        },
        {
            "depth": 5,
            "hidden_size": 48,
            "num_heads": 4,
            "intermediate_size": 80,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1, 4],
        },
        tied=False,
        mrope_section=[6, 5, 5],
        theta=1e4,
    ),
    # Fewer text layers than taps: the last tap's features are made and never added.
    "two_layers": _config(
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "rms_norm_eps": 1e-4,
            "attention_bias": False,
        },
        {
            "depth": 3,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 96,
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        tied=True,
        mrope_section=[4, 2, 2],
    ),
    # Taps listed out of order (merger k belongs to the k-th name, features add in the order of the blocks),
    # patches of 8 pixels, a head of eight, one vision head of 40, a 3 x 3 table.
    "unordered_taps": _config(
        {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            "rms_norm_eps": 1e-6,
            "attention_bias": True,
        },
        {
            "depth": 4,
            "hidden_size": 40,
            "num_heads": 1,
            "intermediate_size": 48,
            "num_position_embeddings": 9,
            "patch_size": 8,
            "deepstack_visual_indexes": [2, 0],
        },
        tied=False,
        mrope_section=[2, 1, 1],
    ),
}


def _qwen2(model_type, text, vision, tied, mrope_section):
    """A config of one of the Qwen2 lines, as transformers 5 spells it."""
    return {
        "model_type": model_type,
        "text_config": {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "bos_token_id": PAD,
            "eos_token_id": IM_END,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": mrope_section},
            "tie_word_embeddings": tied,
            **text,
        },
        "vision_config": vision,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": tied,
    }


def _mixture(config, **text):
    """A config of Qwen3-VL with experts for the MLPs."""
    return {**config, "model_type": "qwen3_vl_moe", "text_config": {**config["text_config"], **text}}


QWEN3_VL_MOE = {
    # Every block a mixture: two of six experts.
    "moe": _mixture(
        QWEN3_VL["dense"],
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    # The hub's order of the experts' axes; three of eight; the second block and the last but one are dense.
    "moe_hub": _mixture(
        QWEN3_VL["ungrouped"],
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        decoder_sparse_step=1,
        mlp_only_layers=[1, 3],
    ),
    # The hub's order where one of its shapes does not tell: hidden == 2 * moe_intermediate. Every second block.
    "moe_square": _mixture(
        QWEN3_VL["one_kv_head"],
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=20,
        decoder_sparse_step=2,
        mlp_only_layers=[],
    ),
}

#: Checkpoints whose experts are stored as the hub has them, [experts, in, out].
EXPERTS_EXCHANGED = {"moe_hub", "moe_square"}

QWEN2_5_VL = {
    # Windows of 2 x 2 image tokens in all blocks but the second; a time step of 2 a second.
    "qwen2_5": _qwen2(
        "qwen2_5_vl",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "intermediate_size": 96,
            "rms_norm_eps": 1e-6,
        },
        {
            "depth": 3,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 52,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        tied=False,
        mrope_section=[2, 3, 3],
    ),
    # One key/value head, tied; windows of 3 x 3, of 8-pixel patches; whole frames in the first and last block.
    "qwen2_5_one_kv_head": _qwen2(
        "qwen2_5_vl",
        {
            "hidden_size": 72,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "rms_norm_eps": 1e-3,
        },
        {
            "depth": 4,
            "hidden_size": 80,
            "num_heads": 1,
            "intermediate_size": 44,
            "out_hidden_size": 72,
            "patch_size": 8,
            "window_size": 48,
            "fullatt_block_indexes": [0, 3],
            "tokens_per_second": 5,
        },
        tied=True,
        mrope_section=[4, 4, 4],
    ),
    # Windows of one image token, and no block that sees a whole frame.
    "qwen2_5_ungrouped": _qwen2(
        "qwen2_5_vl",
        {
            "hidden_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 80,
            "rms_norm_eps": 1e-5,
        },
        {
            "depth": 2,
            "hidden_size": 48,
            "num_heads": 4,
            "intermediate_size": 40,
            "out_hidden_size": 48,
            "window_size": 28,
            "fullatt_block_indexes": [],
            "tokens_per_second": 1,
        },
        tied=False,
        mrope_section=[2, 6, 4],
    ),
}

QWEN2_VL = {
    "qwen2": _qwen2(
        "qwen2_vl",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "intermediate_size": 96,
            "rms_norm_eps": 1e-6,
        },
        {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 4},
        tied=False,
        mrope_section=[2, 3, 3],
    ),
    # One key/value head, tied; a vision head of 72, an MLP of three times the width, 8-pixel patches.
    "qwen2_one_kv_head": _qwen2(
        "qwen2_vl",
        {
            "hidden_size": 72,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "rms_norm_eps": 1e-3,
        },
        {"depth": 2, "embed_dim": 72, "hidden_size": 72, "num_heads": 1, "mlp_ratio": 3, "patch_size": 8},
        tied=True,
        mrope_section=[4, 4, 4],
    ),
}


def _hybrid(text, vision, tied, mrope_section, partial):
    """A config of Qwen3.5: without taps, with recurrent blocks and a part of each head rotated."""
    config = _config(text, vision, tied, mrope_section, theta=1e5)
    config["text_config"]["rope_parameters"]["partial_rotary_factor"] = partial
    return {**config, "model_type": "qwen3_5"}


QWEN3_5 = {
    # Three recurrent blocks and a gated one; two value heads share a key head; values wider than keys.
    "hybrid": _hybrid(
        {
            "hidden_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "rms_norm_eps": 1e-6,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "num_position_embeddings": 16},
        tied=False,
        mrope_section=[2, 1, 1],
        partial=0.25,
    ),
    # Every second block gated, as many key as value heads, keys wider than values, a convolution over three tokens.
    "hybrid_by_two": _hybrid(
        {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 72,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
        },
        {"depth": 2, "hidden_size": 144, "num_heads": 2, "intermediate_size": 96, "num_position_embeddings": 64},
        tied=True,
        mrope_section=[2, 1, 1],
        partial=0.5,
    ),
    # A gated block first and a recurrent one last; three value heads share a key head; patches of 8 pixels.
    "hybrid_uneven": _hybrid(
        {
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_hidden_layers": 3,
            "intermediate_size": 64,
            "rms_norm_eps": 1e-5,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
        },
        {
            "depth": 2,
            "hidden_size": 40,
            "num_heads": 1,
            "intermediate_size": 48,
            "num_position_embeddings": 9,
            "patch_size": 8,
        },
        tied=False,
        mrope_section=[3, 3, 2],
        partial=0.25,
    ),
}


def _shared_mixture(dense, shared, **mixture):
    """The config of a mixture with a shared expert, which is a dense one but for its MLPs."""
    text = {key: value for key, value in dense["text_config"].items() if key != "intermediate_size"}
    text |= {"shared_expert_intermediate_size": shared, **mixture}
    return {**dense, "model_type": "qwen3_5_moe", "text_config": text}


QWEN3_5_MOE = {
    "hybrid_moe": _shared_mixture(
        QWEN3_5["hybrid"], shared=56, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40
    ),
    # Many experts, few of which are hit; a gated block first.
    "hybrid_moe_uneven": _shared_mixture(
        QWEN3_5["hybrid_uneven"], shared=24, num_experts=16, num_experts_per_tok=5, moe_intermediate_size=24
    ),
}

CONFIGS = {**QWEN3_VL, **QWEN3_VL_MOE, **QWEN2_5_VL, **QWEN2_VL, **QWEN3_5, **QWEN3_5_MOE}

#: Families in which a video is one run of tokens, as against a run for each frame.
WHOLE_VIDEOS = {*QWEN2_5_VL, *QWEN2_VL}


def _is_zero_centered(model, name):
    """Whether the gain of a norm is one plus its weight."""
    return model.config.model_type.startswith("qwen3_5") and "visual" not in name and "linear_attn" not in name


@torch.no_grad()
def randomise(model, seed):
    """Fills every parameter, in the order of names: matrices by fan-in, norms in 0.5 .. 1.5, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "embed_tokens" in name:  # a tied embedding is the head as well: keep the logits of order one
            std = 1.4 / math.sqrt(parameter.shape[1]) if model.config.tie_word_embeddings else 1.0
            parameter.normal_(0, std, generator=generator)
        elif "pos_embed" in name:
            parameter.normal_(0, 0.5, generator=generator)
        elif "experts" in name:
            parameter.normal_(0, 1.2 / math.sqrt(parameter.shape[-1]), generator=generator)
        elif parameter.ndim >= 2:
            parameter.normal_(0, 1.2 / math.sqrt(parameter[0].numel()), generator=generator)
        elif "norm" in name and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
            if _is_zero_centered(model, name):
                parameter.sub_(1)
        else:
            parameter.normal_(0, 0.2, generator=generator)


def copy_processor_files(folder, patch_size=16, qwen2=False):
    """Gives a checkpoint folder the tokenizer, the chat template and the processor settings of the built-in model.

    Those of the Qwen2 lines say by `min_pixels` and `max_pixels` what the others do by `size`, normalise otherwise, and
    have no file for videos.
    """
    for name in PROCESSOR_FILES:
        shutil.copyfile(DEMO / name, folder / name)
    if qwen2:
        (folder / "video_preprocessor_config.json").unlink()
        limits = {"min_pixels": 16 * patch_size**2, "max_pixels": 64 * patch_size**2}
        settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch_size, **CLIP, **limits}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return
    settings = json.loads((DEMO / "preprocessor_config.json").read_text())
    settings["patch_size"] = patch_size
    settings["size"] = {"shortest_edge": 16 * patch_size**2, "longest_edge": 64 * patch_size**2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def is_experts(key):
    return key.endswith(("experts.gate_up_proj", "experts.down_proj"))


def exchanged(key, value):
    """A tensor as the hub stores it: that of experts with its last two axes exchanged."""
    return value.transpose(1, 2).contiguous() if is_experts(key) else value


def split(stored):
    """The same tensors with every expert's matrices stored by themselves."""
    parts = {}
    for key, value in stored.items():
        names = ("gate_proj", "up_proj") if key.endswith("gate_up_proj") else ("down_proj",)
        for expert, matrix in enumerate(value if is_experts(key) else ()):
            for name, part in zip(names, matrix.chunk(len(names)), strict=True):
                parts[f"{key.rpartition('.')[0]}.{expert}.{name}.weight"] = part.contiguous()
    return parts | {key: value for key, value in stored.items() if not is_experts(key)}


def restore(folder, change):
    """Stores what `change` makes of the tensors of a checkpoint of one file.

    The tensors begin at a multiple of 64 bytes: the last bits of a product may depend on where its
    factors stand in memory (with MKL on some CPUs they do), and forms of one model are compared.
    """
    from safetensors.torch import load_file, save

    path = folder / "model.safetensors"
    stored = change({key: value.clone() for key, value in load_file(path).items()})
    file = save(stored, {"format": "pt"})
    size = int.from_bytes(file[:8], "little")
    header = file[8 : 8 + size].ljust(-(-(8 + size) // 64) * 64 - 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + file[8 + size :])


def build(name, folder, dtype=torch.float32, **save_options):
    """Writes the checkpoint `name` of `CONFIGS` into `folder` and returns the folder."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = json.loads(json.dumps(CONFIGS[name]))
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForImageTextToText.from_config(config)
    randomise(model, seed=zlib.crc32(name.encode()))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder, **save_options)
    if name in EXPERTS_EXCHANGED:
        restore(folder, lambda stored: {key: exchanged(key, value) for key, value in stored.items()})
    copy_processor_files(folder, config.vision_config.patch_size, config.model_type.startswith("qwen2"))
    return folder
