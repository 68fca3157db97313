"""What holds of M-RoPE: three positions per token, folded into one cos and sin, applied to queries and keys."""

import pytest
import torch

from identities.models import ALL, QWEN3_VL
from sites import collect

QWEN2 = [name for name in ALL if name not in QWEN3_VL]


def positions_of(model, inputs):
    with model.trace(**inputs):
        args, kwargs = model.model.language_model.rotary_emb.inputs
        return (args[1] if len(args) > 1 else kwargs["position_ids"]).save()


def test_text_positions_count_up_on_all_three_axes(model, prompts):
    positions = positions_of(model, prompts.text)
    length = prompts.text["input_ids"].shape[1]
    assert torch.equal(positions[-3:], torch.arange(length).expand(3, 1, -1))


def test_an_image_takes_one_time_and_its_rows_and_columns(model, prompts):
    inputs = prompts.one_image
    positions = positions_of(model, inputs)[-3:, 0]
    (mask,) = collect(model, inputs, "vision.image_token_mask")
    _, height, width = (inputs["image_grid_thw"][0] // torch.tensor([1, 2, 2])).tolist()
    time, row, column = positions[:, mask[0]]
    start = int(mask[0].int().argmax())
    assert torch.equal(time, torch.full_like(time, start))
    assert torch.equal(row, start + torch.arange(height).repeat_interleave(width))
    assert torch.equal(column, start + torch.arange(width).repeat(height))
    assert not torch.equal(row, column)
    after = start + height * width
    assert positions[:, after].tolist() == [start + max(height, width)] * 3
    assert positions[0, after] < after


def test_padding_counts_for_nothing(model, prompts):
    positions = positions_of(model, prompts.padded_text)[-3:]
    for row, mask in enumerate(prompts.padded_text["attention_mask"].bool()):
        assert torch.equal(positions[:, row, mask], torch.arange(int(mask.sum())).expand(3, -1))


def test_a_padded_row_gives_the_logits_it_gives_alone(model, prompts):
    inputs = prompts.padded_text
    together = model(**inputs).logits
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        alone = model(input_ids=inputs["input_ids"][row : row + 1, mask]).logits
        torch.testing.assert_close(together[row, mask], alone[0], rtol=1e-4, atol=1e-4)


def rotate(x, cos, sin):
    """Dimension i turns together with dimension i + head_dim / 2."""
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


@pytest.mark.parametrize("name", QWEN3_VL)
def test_queries_and_keys_are_normed_then_rotated(model, prompts):
    for inputs in (prompts.text, prompts.two_images):
        with model.trace(**inputs):
            cos, sin = model.model.language_model.rotary_emb.output
            attn = model.layers[1].self_attn
            raw_q, raw_k = attn.q_norm.output.transpose(1, 2), attn.k_norm.output.transpose(1, 2)
            q, k = attn.attention_queries.save(), attn.attention_keys.save()
        assert torch.equal(q, rotate(raw_q, cos, sin)) and torch.equal(k, rotate(raw_k, cos, sin))


@pytest.mark.parametrize("name", QWEN2)
def test_queries_and_keys_of_the_qwen2_lines_are_projected_then_rotated(model, prompts):
    for inputs in (prompts.text, prompts.two_images):
        with model.trace(**inputs):
            cos, sin = model.model.language_model.rotary_emb.output
            attn = model.layers[1].self_attn
            raw_q, raw_k = (
                x.unflatten(-1, (-1, model.head_dim)).transpose(1, 2) for x in (attn.q_proj.output, attn.k_proj.output)
            )
            q, k = attn.attention_queries.save(), attn.attention_keys.save()
        assert torch.equal(q, rotate(raw_q, cos, sin)) and torch.equal(k, rotate(raw_k, cos, sin))


@pytest.mark.parametrize("name", QWEN3_VL)
def test_the_tables_interleave_the_axes(model, prompts):
    """Frequency j turns by time, height or width as T H W T H W ... until a section is used up, then by time."""
    inputs = prompts.two_images
    rope = model.config["text_config"]["rope_parameters"]
    axis = torch.zeros(model.head_dim // 2, dtype=torch.long)
    for k in (1, 2):
        axis[k : rope["mrope_section"][k] * 3 : 3] = k
    assert_tables(model, inputs, axis)


@pytest.mark.parametrize("name", QWEN2)
def test_the_tables_of_the_qwen2_lines_give_each_axis_a_section(model, prompts):
    rope = model.config["text_config"]["rope_parameters"]
    axis = torch.arange(3).repeat_interleave(torch.tensor(rope["mrope_section"]))
    assert_tables(model, prompts.two_images, axis)


def assert_tables(model, inputs, axis):
    """cos and sin are those of angles whose frequency j turns by the position on axis[j]."""
    rope = model.config["text_config"]["rope_parameters"]
    half = len(axis)
    positions = positions_of(model, inputs)[-3:, 0].float()
    angles = positions[axis].T / rope["rope_theta"] ** (torch.arange(half) / half)
    with model.trace(**inputs):
        cos, sin = (x.clone() for x in model.model.language_model.rotary_emb.output)
    torch.testing.assert_close(cos[0], torch.cat([angles, angles], -1).cos(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sin[0], torch.cat([angles, angles], -1).sin(), rtol=1e-4, atol=1e-5)
