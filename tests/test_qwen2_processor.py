"""The processor on the files of the Qwen2 lines equals transformers' AutoProcessor bit for bit."""

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
import vlscope
from vlscope.errors import ConfigError, InputError
from vlscope.processing import Processor, Qwen2VideoSettings

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
LINES = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen2_vl": "Qwen2VLProcessor"}


def frames(count, height=48, width=64, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """pair(line): our processor and transformers' of one folder, as the hub has them."""
    from transformers import AutoProcessor

    made = {}

    def make(line):
        if line not in made:
            folder = tmp_path_factory.mktemp(line)
            tiny.copy_processor_files(folder, 14, qwen2=True)
            (folder / "config.json").write_text(json.dumps({"model_type": line}))
            path = folder / "preprocessor_config.json"
            settings = json.loads(path.read_text()) | {"processor_class": LINES[line], "min_pixels": 3136}
            path.write_text(json.dumps(settings | {"max_pixels": 12845056}))
            made[line] = Processor.from_folder(folder), AutoProcessor.from_pretrained(folder)
        return made[line]

    return make


def assert_same_call(pair, **call):
    mine, reference = (processor(return_tensors="pt", **call) for processor in pair)
    assert set(mine) == set(reference)
    for name, value in reference.items():
        assert torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(value)), name
    return mine


@pytest.mark.parametrize("line", LINES)
def test_random_images_equal_the_reference(line, pair):
    assert type(pair(line)[1]).__name__ == LINES[line]
    draw = random.Random(0)
    for seed in range(15):
        height, width = draw.randint(10, 120), draw.randint(10, 120)
        pictures = [Image.fromarray(frame) for frame in frames(2, height, width, seed)]
        assert_same_call(pair(line), text=f"a{IMAGE}b{IMAGE} What?", images=pictures)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("sampled", [{}, {"fps": 2}, {"num_frames": 5}])
def test_random_videos_equal_the_reference(line, sampled, pair):
    draw = random.Random(1)
    for seed in range(6):
        count = draw.randint(6, 24)
        clip, fps = frames(count, draw.randint(20, 80), draw.randint(20, 80), seed), draw.choice([3, 12.5, 24])
        metadata = [{"fps": fps, "total_num_frames": count}]
        options = {"do_sample_frames": True, **sampled} if sampled else {}
        both = assert_same_call(pair(line), text=f"<{VIDEO} What?", videos=[clip], video_metadata=metadata, **options)
        assert ("second_per_grid_ts" in both) == (line == "qwen2_5_vl")


def test_the_seconds_follow_the_frames_that_were_taken(pair):
    ours, _ = pair("qwen2_5_vl")
    call = {"text": VIDEO, "videos": [frames(24)], "return_tensors": "pt"}
    whole = ours(**call, video_metadata=[{"fps": 12}])
    assert whole["second_per_grid_ts"].tolist() == pytest.approx([2 / 12])
    taken = ours(**call, video_metadata=[{"fps": 12}], fps=2, do_sample_frames=True)
    assert taken["video_grid_thw"][0, 0] == 2 and taken["second_per_grid_ts"].tolist() == [1.0]


def test_a_video_is_one_run_of_tokens_without_times(pair):
    ours, _ = pair("qwen2_vl")
    ids = ours(text=VIDEO, videos=[frames(8)], return_tensors="pt")["input_ids"][0]
    inside = (ids == tiny.VIDEO).nonzero().flatten()
    assert len(inside) == int(inside[-1] - inside[0]) + 1 and len(ids) == len(inside) + 2


def test_a_shorter_video_than_is_asked_for_is_refused(pair):
    ours, _ = pair("qwen2_vl")
    with pytest.raises(InputError, match="num_frames is 12, and the video has 6"):
        ours(text=VIDEO, videos=[frames(6)], num_frames=12, do_sample_frames=True)


def test_the_files_of_another_line_are_refused(tmp_path):
    tiny.copy_processor_files(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    with pytest.raises(ConfigError, match="Qwen3VLVideoProcessor"):
        Processor.from_folder(tmp_path)


def test_a_model_takes_videos_of_its_own_processor(checkpoint):
    model = vlscope.load(checkpoint("qwen2_5"))
    assert isinstance(model.processor.video_processor.settings, Qwen2VideoSettings)
    with model.trace("What?", videos=[frames(8)], video_metadata=[{"fps": 2}]):
        seconds = model.model.inputs[1]["second_per_grid_ts"].clone()
        features = model.vision.video_features.shape[0]
    assert seconds.tolist() == [1.0] and features > 0
