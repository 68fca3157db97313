"""Videos through the processor equal transformers' AutoProcessor bit for bit, and what would go wrong is refused."""

import functools
import logging
import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from PIL import Image

from vlscope import _core
from vlscope.errors import ConfigError, InputError
from vlscope.processing import Processor, VideoSettings

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
WHOLE = {"do_sample_frames": False}


def frames(count, height=48, width=64, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def pictures(count, height=48, width=64, seed=0):
    return [Image.fromarray(frame) for frame in frames(count, height, width, seed)]


@pytest.fixture(scope="session")
def folder(processor_folder):
    """folder(**settings): the built-in model's processor files with changed video settings."""
    return functools.partial(processor_folder, "video_preprocessor_config.json")


@pytest.fixture(scope="session")
def pair(folder, auto):
    path = folder()
    return Processor.from_folder(path), auto(path)


@pytest.fixture
def processor(pair):
    return pair[0]


def assert_same(mine, reference):
    assert list(mine) == list(reference)
    for name, value in reference.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(mine[name], value), name


def assert_same_call(pair, **call):
    mine, reference = (p(return_tensors="pt", **call) for p in pair)
    assert_same(mine, reference)
    return mine


# --- sizes, frames and pixels -------------------------------------------------------------------


def test_sizes_equal_the_reference_on_random_clips_and_limits():
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    draw = random.Random(0)
    refused = 0
    for _ in range(5000):
        count, depth, patch, merge = draw.randint(1, 40), draw.choice([1, 2, 3, 4]), draw.choice([8, 14, 16]), 2
        height, width = (int(2 ** draw.uniform(0, 11)) for _ in range(2))
        low = draw.randint(1, 300_000)
        high = draw.randint(low, 5_000_000)
        options = _core.VideoOptions()
        each = options.frames
        each.patch_size, each.merge_size, each.temporal_patch_size = patch, merge, depth
        each.min_pixels, each.max_pixels = low, high
        options.frames = each
        try:
            expected = smart_resize(max(count, depth), height, width, depth, patch * merge, low, high)
        except ValueError:
            refused += 1
            with pytest.raises(InputError, match="aspect ratio"):
                _core.processed_video_size(count, height, width, options)
            continue
        assert _core.processed_video_size(count, height, width, options) == expected
    assert refused > 0


@pytest.mark.parametrize("size", [{}, {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}])
def test_random_videos_equal_the_reference(folder, auto, size):
    path = folder(**size)
    both, draw = (Processor.from_folder(path), auto(path)), random.Random(1)
    for seed in range(40):
        count, height, width = draw.randint(2, 40), draw.randint(8, 100), draw.randint(8, 100)
        fps = draw.choice([None, 1, 2.5, 12, 23.976, 24, 29.97, 60])
        metadata = None if fps is None else [{"fps": fps, "total_num_frames": count}]
        text = draw.choice([VIDEO + "What?", f"a{VIDEO}b", "3 <|video_pad|>. x", f"<1{VIDEO}\n{VIDEO}"])
        videos = [frames(count, height, width, seed)] * text.count("<|video_pad|>")
        encoding = assert_same_call(both, text=text, videos=videos, video_metadata=metadata and metadata * len(videos))
        assert len(encoding["pixel_values_videos"]) == encoding["video_grid_thw"].prod(1).sum()


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 16, 17])
def test_whole_clips_of_every_length_equal_the_reference(pair, count):
    encoding = assert_same_call(
        pair,
        text=VIDEO,
        videos=[frames(count)],
        video_metadata=[{"fps": 3, "total_num_frames": 90, "frames_indices": list(range(0, 4 * count, 4))}],
        **WHOLE,
    )
    assert encoding["video_grid_thw"][0, 0] == (count + 1) // 2


@pytest.mark.parametrize(
    "settings",
    [
        {"num_frames": 7, "fps": None},
        {"fps": 6},
        {"fps": 0.5},
        {"do_resize": False},
        {"do_rescale": False},
        {"do_normalize": False},
        {"cap_pixels_per_frame": True},
        {"size": {"shortest_edge": 1024, "longest_edge": 8192}},
        {"videos_kwargs": {"size": {"shortest_edge": 1024, "longest_edge": 8192}, "do_sample_frames": False}},
    ],
)
def test_settings_of_a_call_equal_the_reference(pair, settings):
    metadata = [{"fps": 24, "total_num_frames": 50, "frames_indices": list(range(50))}]
    assert_same_call(pair, text=VIDEO, videos=[frames(50, 96, 64)], video_metadata=metadata, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"fps": 4, "min_frames": 2, "max_frames": 6},
        {"fps": None},
        {"fps": None, "num_frames": 9},
        {"do_sample_frames": False},
        {"cap_pixels_per_frame": True, "max_video_tokens": 4},
        {"patch_size": 14, "temporal_patch_size": 4},
        {"merge_size": 1, "temporal_patch_size": 3},
    ],
)
def test_settings_of_a_file_equal_the_reference(folder, auto, settings):
    path = folder(**settings)
    both = Processor.from_folder(path), auto(path)
    for count in (8, 31):
        metadata = [{"fps": 25, "total_num_frames": count, "frames_indices": list(range(count))}]
        assert_same_call(both, text=VIDEO, videos=[frames(count, 70, 50)], video_metadata=metadata)


def test_the_defaults_are_those_of_the_reference(folder, auto):
    path = folder()
    (path / "video_preprocessor_config.json").write_text("{}")
    theirs = auto(path).video_processor
    assert Processor.from_folder(path).video_processor.settings == VideoSettings()
    for name in ("patch_size", "temporal_patch_size", "merge_size", "min_frames", "max_frames", "fps", "num_frames"):
        assert getattr(theirs, name) == getattr(VideoSettings(), name), name
    assert (theirs.size.shortest_edge, theirs.size.longest_edge) == (VideoSettings.min_pixels, VideoSettings.max_pixels)
    assert list(theirs.image_mean) == list(VideoSettings.image_mean)


def test_a_folder_saved_by_transformers_and_one_without_a_video_file_are_read(pair, folder, auto, tmp_path):
    pair[1].save_pretrained(tmp_path)
    assert Processor.from_folder(tmp_path).video_processor.settings == pair[0].video_processor.settings
    bare = folder()
    (bare / "video_preprocessor_config.json").unlink()
    assert_same_call((Processor.from_folder(bare), auto(bare)), text=VIDEO, videos=[frames(6)])
    with pytest.raises(ConfigError, match="Qwen2VLVideoProcessor"):
        Processor.from_folder(folder(video_processor_type="Qwen2VLVideoProcessor"))


def test_every_form_of_a_video_gives_the_same_pixels(pair, tmp_path):
    ours, theirs = pair
    clip = frames(12)
    expected = ours.video_processor(clip)
    for index, picture in enumerate(pictures(12)):
        picture.save(tmp_path / f"frame {index}.png")  # by name alone, frame 10 would come before frame 2
    forms = (
        [clip],
        clip[None],
        clip.transpose(0, 3, 1, 2),
        torch.from_numpy(clip),
        torch.from_numpy(clip).permute(0, 3, 1, 2),
        list(clip),
        pictures(12),
        [pictures(12)],
        [[pictures(12)]],
    )
    for form in forms:
        assert_same(ours.video_processor(form), expected)
        assert_same(expected, theirs.video_processor(form, return_tensors="pt"))
    for form in (tmp_path, str(tmp_path), [str(tmp_path)]):
        assert_same(ours.video_processor(form), expected)
    grey = clip[..., :1]
    assert_same(ours.video_processor(grey), theirs.video_processor(grey, return_tensors="pt"))


def test_videos_keep_their_order_and_stand_alone(processor):
    wide, tall = frames(8, 64, 96, 1), frames(5, 96, 64, 2)
    both = processor.video_processor([wide, tall])
    alone = [processor.video_processor(clip) for clip in (wide, tall)]
    for name, value in both.items():
        assert torch.equal(value, torch.cat([one[name] for one in alone]))


def test_one_frame_is_one_group_and_counts_as_a_still_video(processor):
    metadata = {"video_metadata": [{"fps": 24}], "return_tensors": "pt", **WHOLE}
    clip = frames(1)
    one = processor(text=VIDEO, videos=[clip], **metadata)
    twice = processor(text=VIDEO, videos=[np.concatenate([clip, clip])], **metadata)
    assert one["video_grid_thw"][0, 0] == 1
    assert torch.equal(one["pixel_values_videos"], twice["pixel_values_videos"])
    assert "<0.0 seconds>" in processor.decode(one["input_ids"][0])


# --- text ---------------------------------------------------------------------------------------


def test_each_group_stands_behind_the_mean_time_of_its_frames(processor):
    metadata = [{"fps": 24, "total_num_frames": 60, "frames_indices": [0, 12, 24, 36, 48]}]
    encoding = processor(text=VIDEO, videos=[frames(5)], video_metadata=metadata, return_tensors="pt", **WHOLE)
    text = processor.decode(encoding["input_ids"][0])
    t, h, w = encoding["video_grid_thw"][0].tolist()
    patch = "<|vision_start|>" + "<|video_pad|>" * (h * w // 4) + "<|vision_end|>"
    times = ["<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>"]
    assert t == 3
    assert text == "<|vision_start|>" + "".join(time + patch for time in times) + "<|vision_end|>"


def test_times_go_by_temporal_patches_and_not_by_merge_blocks(folder):
    processor = Processor.from_folder(folder(temporal_patch_size=4))
    metadata = [{"fps": 1, "frames_indices": list(range(8))}]
    ids = processor(text=VIDEO, videos=[frames(8)], video_metadata=metadata, **WHOLE)["input_ids"][0]
    assert processor.decode(ids).count("seconds") == 2
    assert "<1.5 seconds>" in processor.decode(ids) and "<5.5 seconds>" in processor.decode(ids)


def test_without_fps_24_are_assumed_and_said(processor, caplog):
    with caplog.at_level(logging.WARNING, logger="vlscope"):
        assumed = processor(text=VIDEO, videos=[frames(48)])
    assert "24 frames a second" in caplog.text and "video_metadata" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="vlscope"):
        given = processor(text=VIDEO, videos=[frames(48)], video_metadata={"fps": 24})
    assert not caplog.text
    assert assumed["input_ids"] == given["input_ids"]


def test_images_and_videos_in_a_batch_equal_the_reference(pair):
    ours, theirs = pair
    text = [f"{VIDEO} then {IMAGE}", "none", f"x{IMAGE}{VIDEO}{VIDEO}y"]
    images = [Image.fromarray(frames(1, 40, 90, seed)[0]) for seed in (1, 2)]
    videos = [frames(9, 48, 64, 3), frames(4, 64, 32, 4), frames(30, 32, 32, 5)]
    options = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    reference = theirs(text=text, images=images, videos=videos, **options)
    nested = [videos[:1], [], videos[1:]]
    for clips in (videos, nested):
        for pictured in (images, [images[:1], [], images[1:]]):
            assert_same(ours(text=text, images=pictured, videos=clips, **options), reference)
            assert_same(ours.encode_prompt(text, pictured, clips), reference)
    assert set(reference["mm_token_type_ids"].unique().tolist()) == {0, 1, 2}


def conversation(clip, picture):
    return [
        {
            "role": "user",
            "content": [
                {"type": "video", "video": clip},
                {"type": "text", "text": "And this?"},
                {"type": "image", "image": picture},
            ],
        }
    ]


def test_messages_with_videos_equal_the_reference(pair):
    ours, theirs = pair
    picture = pictures(1)[0]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    for clip in (frames(20), pictures(20)):
        for kwargs in ({}, {"fps": 4}, {"num_frames": 6, "fps": None}):
            messages = conversation(clip, picture)
            mine = ours.apply_chat_template(messages, **options, **kwargs)
            reference = theirs.apply_chat_template(messages, **options, processor_kwargs={**kwargs})
            assert_same(mine, reference)
            assert_same(ours.encode_prompt(messages, **kwargs), reference)
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)


def test_messages_take_their_videos_from_beside_and_paths_as_frames(processor, tmp_path):
    picture, clip = pictures(1)[0], pictures(6)
    inside = processor.encode_prompt(conversation(clip, picture))
    beside = [{"role": "user", "content": [{"type": "video"}, *conversation(clip, picture)[0]["content"][1:]]}]
    assert_same(processor.encode_prompt(beside, videos=[clip]), inside)
    paths = []
    for index, frame in enumerate(clip):
        paths.append(str(tmp_path / f"{index}.png"))
        frame.save(paths[-1])
    assert_same(processor.encode_prompt(conversation(paths, picture)), inside)
    assert_same(processor.encode_prompt(conversation(str(tmp_path), picture)), inside)


def test_a_string_without_placeholders_becomes_a_user_turn_around_images_and_videos(pair):
    ours, theirs = pair
    picture, clip = pictures(1)[0], frames(6)
    text = f"<|im_start|>user\n{IMAGE}{VIDEO}What?<|im_end|>\n<|im_start|>assistant\n"
    reference = theirs(text=text, images=[picture], videos=[clip], return_tensors="pt")
    assert_same(ours.encode_prompt("What?", picture, [clip]), reference)


def test_ids_pass_through_with_their_placeholders_repeated(processor):
    clip = frames(6)
    encoding = processor.encode_prompt("What?", videos=clip)
    assert_same(processor.encode_prompt(encoding["input_ids"], videos=[clip]), encoding)
    assert_same(
        processor.encode_prompt([encoding, encoding]), processor.encode_prompt(["What?"] * 2, videos=[[clip]] * 2)
    )


def test_truncation_keeps_a_video_whole(processor):
    whole = processor(text=VIDEO + " and more text", videos=[frames(4)])["input_ids"][0]
    last = len(whole) - whole[::-1].index(processor.video_token_id)
    call = {"text": VIDEO + " and more text", "videos": [frames(4)], "truncation": True}
    assert processor(**call, max_length=last)["input_ids"][0] == whole[:last]
    with pytest.raises(InputError, match=f"max_length {last - 1} cuts video 0 of 1: .* use at least {len(whole)}"):
        processor(**call, max_length=last - 1)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        ({"text": VIDEO}, r"1 video placeholders .* 0 videos"),
        ({"text": VIDEO * 2, "videos": [frames(4)]}, r"2 video placeholders .* 1 videos"),
        ({"text": "hi", "videos": [frames(4)]}, r"0 video placeholders .* 1 videos .*video_pad"),
        ({"text": IMAGE, "videos": [frames(4)]}, r"1 image placeholders .* 0 images"),
        ({"text": [VIDEO, VIDEO], "videos": [frames(4)]}, "2 prompts hold 2 video placeholders, and 1 videos"),
        ({"text": VIDEO, "videos": ["clip.mp4"]}, "video 0: 'clip.mp4' is no folder of frames, .* decode it"),
        ({"text": VIDEO, "videos": "https://example.org/clip.mp4"}, "not decoded here"),
        ({"text": VIDEO, "videos": 7}, "a int is not a video"),
        ({"text": VIDEO, "videos": [frames(0)]}, "video 0: the video has no frames"),
        ({"text": VIDEO, "videos": [frames(4).astype(np.float32)]}, "video 0: frame 0: pixels have to be uint8"),
        ({"text": VIDEO, "videos": [frames(4)[:, :0]]}, "video 0: .*empty: 0 pixels high"),
        ({"text": VIDEO, "videos": [frames(4, 2, 500)]}, "video 0: .* aspect ratio of 250"),
        (
            {"text": VIDEO, "videos": [[*pictures(2), *pictures(1, 20, 30)]], **WHOLE},
            "video 0: frame 2: it is 20 pixels high and 30 wide, the first one 48 and 64",
        ),
        ({"text": VIDEO, "videos": [frames(4)], "video_metadata": [{}, {}]}, "2 entries for 1 videos"),
        ({"text": VIDEO, "videos": [frames(4)], "video_metadata": {"fps": 0}}, "video 0: fps has to be .* got 0"),
        ({"text": VIDEO, "videos": [frames(4)], "video_metadata": [24]}, "mapping with fps, got 24"),
        (
            {"text": VIDEO, "videos": [frames(4)], "video_metadata": {"total_num_frames": 96}},
            "video 0: 4 frames were given, and video_metadata counts 96; pass do_sample_frames=False",
        ),
        (
            {"text": VIDEO, "videos": [frames(4)], "video_metadata": {"frames_indices": [0, 8]}, **WHOLE},
            "4 frames were given, and video_metadata has 2 frames_indices",
        ),
        ({"text": VIDEO, "videos": [frames(4)], "fps": 2, "num_frames": 3}, "fps 2 and num_frames 3 were given"),
        ({"text": VIDEO, "videos": [frames(4)], "fps": -1}, "fps has to be a positive number, got -1"),
        ({"text": VIDEO, "videos": [frames(4)], "num_frames": 0}, "num_frames has to be .* got 0"),
        ({"text": VIDEO, "videos": [frames(4)], "max_frames": 2}, "min_frames 4 is larger than max_frames 2"),
        ({"text": VIDEO, "videos": [frames(4)], "max_video_tokens": 0}, "max_video_tokens has to be positive"),
        ({"text": VIDEO, "videos": [frames(4)], "resample": 2}, "resample 2"),
    ],
)
def test_videos_that_do_not_fit_are_refused_before_any_pixel_work(processor, monkeypatch, call, message):
    monkeypatch.setattr(processor.video_processor, "process", lambda *_: pytest.fail("pixels were touched"))
    with pytest.raises(InputError, match=message):
        processor(**call)


def test_a_video_in_a_batch_is_refused_by_its_prompt(processor):
    with pytest.raises(InputError, match=r"prompt 1: .*1 video placeholders .* 0 videos"):
        processor.encode_prompt(["hi", VIDEO])
    with pytest.raises(InputError, match="1 video parts without a video, and 2 videos"):
        processor.encode_prompt([{"role": "user", "content": [{"type": "video"}]}], videos=[frames(4), frames(4)])
    with pytest.raises(InputError, match="4 video tokens, and the videos give 0 features"):
        processor.encode_prompt([processor.video_token_id] * 4)
    with pytest.raises(InputError, match="not decoded here"):
        address = {"type": "video_url", "video_url": {"url": "https://example.org/clip.mp4"}}
        processor.encode_prompt([{"role": "user", "content": [address]}])
    with pytest.raises(InputError, match="the encoding has its videos already"):
        processor.encode_prompt(processor.encode_prompt("hi"), videos=[frames(4)])


def test_a_refused_call_changes_nothing(processor):
    before = processor.encode_prompt("What?", videos=[frames(6)])
    with pytest.raises(InputError):
        processor.encode_prompt("What?", videos=[frames(6)], fps=0)
    with pytest.raises(TypeError, match="unknown video setting 'frames'"):
        processor(text=VIDEO, videos=[frames(6)], videos_kwargs={"frames": 5})
    assert_same(processor.encode_prompt("What?", videos=[frames(6)]), before)


def test_settings_of_images_and_of_videos_stay_apart(processor):
    picture, clip = pictures(1, 96, 96)[0], frames(4, 96, 96)
    call = {"text": IMAGE + VIDEO, "images": picture, "videos": [clip], "return_tensors": "pt"}
    plain = processor(**call)
    smaller = processor(**call, max_pixels=4096)
    assert torch.equal(smaller["video_grid_thw"], plain["video_grid_thw"])
    assert not torch.equal(smaller["image_grid_thw"], plain["image_grid_thw"])
    smaller = processor(**call, videos_kwargs={"max_pixels": 4096})
    assert torch.equal(smaller["image_grid_thw"], plain["image_grid_thw"])
    assert not torch.equal(smaller["video_grid_thw"], plain["video_grid_thw"])
