"""What holds of every vision tower: the mask, the scatter, the tower's blocks, prompts without images."""

import pytest
import torch

import vlscope
from identities.models import QWEN3_VL

STAGES = (
    "vision.patch_embeddings",
    "vision.layers.0.layer_input",
    "vision.layers.1.self_attn.attention_queries",
    "vision.layers.1.self_attn.attention_keys",
    "vision.layers.1.self_attn.attention_values",
    "vision.layers.1.self_attn.attention_head_outputs",
    "vision.layers.1.self_attn.attention_output",
    "vision.layers.1.mlp.mlp_output",
    "vision.layers.1.layer_output",
    "projector.input",
    "projector.output",
    "vision.image_features",
)


def test_a_text_only_load_serves_no_vision_value(checkpoint, name, attention, prompts):
    model = vlscope.load(checkpoint(name), task="text-generation", attn_implementation=attention)
    reads = (
        lambda: model.vision.image_features,
        lambda: model.vision.layers[0].layer_output,
        lambda: model.vision.image_token_mask,
        lambda: model.vision.video_token_mask,
        lambda: model.vision.visual_token_mask,
        lambda: model.vision.video_features,
        lambda: model.projector.output,
        *([lambda: model.layers[0].deepstack_output] if name in QWEN3_VL else []),
    )
    for read in reads:
        with pytest.raises(vlscope.Unavailable, match="text-generation"):
            read()
    with model.trace(**prompts.text):
        for read in reads:
            with pytest.raises(vlscope.Unavailable, match="text-generation"):
                read()
        logits = model.logits.save()
    whole = vlscope.load(checkpoint(name), attn_implementation=attention)
    assert torch.equal(logits, whole(**prompts.text).logits)
    assert not any(row.startswith("vision.") for row in model.support())
