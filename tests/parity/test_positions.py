"""Positions of random prompts equal those of transformers' `get_rope_index`."""

import random

import pytest
import torch

import tiny
from vlscope.verify.prompts import Spelling


def random_prompt(draw, spelling):
    """One to three prompts of texts, images and videos in any order, padded on the left."""
    rows, images, videos = [], [], []
    for _ in range(draw.randint(1, 3)):
        ids = []
        for _ in range(draw.randint(1, 6)):
            kind = draw.choice(["text", "image", "video"])
            grid = (draw.randint(1, 4), 2 * draw.randint(1, 4), 2 * draw.randint(1, 4))
            run = grid[1] * grid[2] // 4
            ids += [draw.randrange(tiny.PAD) for _ in range(draw.randint(1, 5))]
            if kind == "image":
                images.append((1, *grid[1:]))
                ids += [tiny.IMAGE] * run
            elif kind == "video":
                videos.append(grid)
                if spelling.one_run:
                    ids += [tiny.VIDEO] * (run * grid[0])
                for _ in range(0 if spelling.one_run else grid[0]):
                    ids += [draw.randrange(tiny.PAD), tiny.VISION_START] + [tiny.VIDEO] * run + [tiny.VISION_END]
        rows.append(ids)
    length = max(map(len, rows))
    inputs = {
        "input_ids": torch.tensor([[tiny.PAD] * (length - len(ids)) + ids for ids in rows]),
        "attention_mask": torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in rows]),
    }
    for pixels, grid_name, grids in (
        ("pixel_values", "image_grid_thw", images),
        ("pixel_values_videos", "video_grid_thw", videos),
    ):
        if grids:
            inputs[grid_name] = torch.tensor(grids)
            patches = int(inputs[grid_name].prod(1).sum())
            inputs[pixels] = torch.zeros(patches, 3 * 2 * spelling.patch_size**2)
    if videos and spelling.by_second and draw.random() < 0.8:
        inputs["second_per_grid_ts"] = torch.tensor([draw.uniform(0, 4) for _ in videos])
    return inputs


@pytest.mark.parametrize("name", ["dense", "qwen2", "qwen2_5", "qwen2_5_one_kv_head"])
def test_positions_of_random_mixes_equal_get_rope_index(name, vlscope_model, reference_model):
    model, theirs = vlscope_model(name), reference_model(name, "sdpa").model
    draw, mixed, spelling = random.Random(0), 0, Spelling.of(model.config)
    for _ in range(150):
        inputs = random_prompt(draw, spelling)
        mixed += "image_grid_thw" in inputs and "video_grid_thw" in inputs
        ids = inputs["input_ids"]
        types = (ids == tiny.IMAGE).int() + 2 * (ids == tiny.VIDEO).int()
        told = {name: value for name, value in inputs.items() if not name.startswith("pixel_values")}
        expected, _ = theirs.get_rope_index(mm_token_type_ids=types, **told)
        with model.trace(**inputs):
            positions = model.model.language_model.inputs[1]["position_ids"].clone()
        assert torch.equal(positions, expected)
    assert mixed > 50
