"""Videos: the settings of `video_preprocessor_config.json`, and every form of clip made sampled RGB frames."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from .. import _core
from ..errors import InputError
from .images import CLIP_MEAN, CLIP_STD, ImageSettings, load_image, naming, set_option
from .text import check_return_tensors

if TYPE_CHECKING:
    from typing_extensions import Self

_ASSUMED_FPS = 24


@dataclasses.dataclass(frozen=True)
class VideoSettings(ImageSettings):
    """How videos become patches in the Qwen3 lines. The defaults are those of transformers' `Qwen3VLVideoProcessor`.

    `min_pixels` and `max_pixels` bound frames * height * width after resizing. `fps` (frames to take
    of each second) and `num_frames` exclude each other: to give one takes back the other.
    """

    patch_size: int = 16
    min_pixels: int = 128 * 32 * 32
    max_pixels: int = 32 * 32 * 768
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    do_sample_frames: bool = True
    fps: float | None = 2
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768

    _noun = "video"
    _type_key = "video_processor_type"
    _type = "Qwen3VLVideoProcessor"
    _optional = ("fps",)
    #: Whether each temporal patch stands in the prompt by itself, behind a text that tells its time.
    tells_times: ClassVar[bool] = True

    def replace(self, **changes: Any) -> Self:
        given = {name: changes[name] for name in ("fps", "num_frames") if changes.get(name) is not None}
        if len(given) == 2:
            raise InputError("fps {fps} and num_frames {num_frames} were given: give one of them".format(**given))
        cleared = dataclasses.replace(self, fps=None, num_frames=None) if given else self
        return super(VideoSettings, cleared).replace(**changes)

    def check(self) -> None:
        self.native_video().check()
        for name in ("min_frames", "max_frames", "num_frames"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value <= 0):
                raise InputError(f"{name} has to be a positive whole number, got {value!r}")
        if self.fps is not None:
            check_fps(self.fps)
        if self.min_frames > self.max_frames:
            raise InputError(f"min_frames {self.min_frames} is larger than max_frames {self.max_frames}")

    def native_video(self) -> _core.VideoOptions:
        """The settings of the pixels as the C++ side takes them."""
        options = _core.VideoOptions()
        options.frames = self.native()
        for field in dataclasses.fields(self):
            if field.name in ("cap_pixels_per_frame", "max_video_tokens"):
                set_option(options, field, getattr(self, field.name))
        return options

    def sample(self, total: int, fps: float) -> list[int]:
        """Which frames of a video of `total` frames, `fps` of them a second, are taken."""
        count = self.num_frames
        if count is None and self.fps is not None:
            count = min(max(int(total / fps * self.fps), self.min_frames), self.max_frames, total)
        if count is None:
            count = min(max(total, self.min_frames), self.max_frames)
        return np.linspace(0, total - 1, count).round().astype(int).tolist()


@dataclasses.dataclass(frozen=True)
class Qwen2VideoSettings(VideoSettings):
    """How videos become patches in the Qwen2 lines. The defaults are those of transformers' `Qwen2VLVideoProcessor`.

    `min_pixels` and `max_pixels` bound height * width of each frame. Frames are taken only on demand.
    """

    patch_size: int = 14
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 28 * 28 * 768
    image_mean: tuple[float, ...] = CLIP_MEAN
    image_std: tuple[float, ...] = CLIP_STD
    do_sample_frames: bool = False
    fps: float | None = None
    max_video_tokens: int = 128000

    _type = "Qwen2VLVideoProcessor"
    tells_times = False

    def native_video(self) -> _core.VideoOptions:
        options = super().native_video()
        options.bounds_frames = True
        return options

    def sample(self, total: int, fps: float) -> list[int]:
        """Which frames are taken: a multiple of `temporal_patch_size` at even distances; all of a shorter video."""
        depth = self.temporal_patch_size
        if self.num_frames is not None:
            count = round(self.num_frames / depth) * depth
        elif self.fps is not None:
            most = min(self.max_frames, total) // depth * depth
            wanted = min(max(total / fps * self.fps, self.min_frames), most)
            count = math.floor(wanted / depth) * depth
        else:
            count = total
        if count > total:
            raise InputError(f"num_frames is {self.num_frames}, and the video has {total}")
        return torch.arange(0, total, total / max(count, min(depth, total))).int().tolist()


@dataclasses.dataclass(frozen=True)
class Clip:
    """A list that is known to be the frames of one video, paths of pictures among them."""

    frames: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Video:
    """The frames that are taken of one video, uint8 RGB [frames, height, width, 3], the time of each temporal patch
    in seconds, and how many frames of a second were taken."""

    frames: np.ndarray
    times: list[float]
    sampled_fps: float


class VideoProcessor:
    """Turns videos into `pixel_values_videos` and `video_grid_thw`.

    >>> video_processor(videos=[frames], video_metadata=[{"fps": 24}])["video_grid_thw"]
    tensor([[ 2, 14, 14]])
    """

    def __init__(self, settings: VideoSettings) -> None:
        self.settings = settings

    def __call__(
        self, videos: Any, return_tensors: str | None = "pt", video_metadata: Any = None, **changes: Any
    ) -> dict[str, torch.Tensor]:
        """Process one video or a list. `changes` hold for this call only."""
        check_return_tensors(return_tensors)
        settings = self.settings.replace(**changes)
        return self.process(load_videos(flatten_videos(videos), video_metadata, settings), settings)

    def process(self, videos: Sequence[Video], settings: VideoSettings) -> dict[str, torch.Tensor]:
        """Patches and grids of loaded videos."""
        values, grids = _core.preprocess_videos([video.frames for video in videos], settings.native_video())
        return {"pixel_values_videos": values, "video_grid_thw": grids}

    def __repr__(self) -> str:
        return f"VideoProcessor({self.settings})"


def check_fps(fps: Any) -> None:
    """Raise `InputError` for what is no number of frames a second."""
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < float("inf"):
        raise InputError(f"fps has to be a positive number, got {fps!r}")


def frame_token_counts(videos: Sequence[Video], settings: VideoSettings) -> list[int]:
    """How many tokens each temporal patch of each video becomes. No pixel is touched."""
    options = settings.native_video()
    area = (settings.patch_size * settings.merge_size) ** 2
    counts = []
    for index, video in enumerate(videos):
        with naming("video", index):
            frames, high, wide, _ = video.frames.shape
            height, width = _core.processed_video_size(frames, high, wide, options)
        counts.append(height * width // area)
    return counts


def is_video(item: Any) -> bool:
    """True for what stands for one video: an array [frames, ...], a path, or a list of frames."""
    if isinstance(item, (np.ndarray, torch.Tensor)):
        return item.ndim == 4
    if isinstance(item, (list, tuple)):
        return len(item) > 0 and all(map(_is_frame, item))
    return isinstance(item, (str, os.PathLike, Clip))


def _is_frame(item: Any) -> bool:
    if isinstance(item, (np.ndarray, torch.Tensor)):
        return item.ndim in (2, 3)
    # Strings in a list are paths of videos, so that no list of them is taken for one video.
    return not isinstance(item, (str, os.PathLike, list, tuple, Clip, Mapping)) and item is not None


def flatten_videos(videos: Any) -> list[Any]:
    """One video, a list of videos, a list of lists, or an array with a batch axis, as a flat list."""
    if is_video(videos):
        return [videos]
    if isinstance(videos, (np.ndarray, torch.Tensor)) and videos.ndim == 5:
        return list(videos)
    if not isinstance(videos, (list, tuple)):
        raise InputError(
            f"a {type(videos).__name__} is not a video; pass a list of frames, or a uint8 array "
            "[frames, height, width, 3]"
        )
    return [video for item in videos for video in flatten_videos(item)]


def load_videos(videos: Sequence[Any], metadata: Any, settings: VideoSettings) -> list[Video]:
    """The frames to take of each video; errors name the video and the frame by their index.

    * A list of frames; each is what an image may be (see `load_images`), all of one size.
    * A uint8 array or tensor: [frames, height, width, 3], [frames, 3, height, width], or grey.
    * A folder of pictures, in the order of their names ("frame 9" before "frame 10").

    Video files are refused: no decoder is part of this package.

    `metadata` has an entry for each video, a mapping with any of `fps`, `total_num_frames` and
    `frames_indices`, the last for frames that were sampled before. Without `fps`, 24 are assumed.
    """
    entries = _metadata_of(metadata, len(videos))
    loaded = []
    for index, (video, entry) in enumerate(zip(videos, entries, strict=True)):
        with naming("video", index):
            loaded.append(_load_video(_frames_of(video), entry, settings))
    if any(entry.get("fps") is None for entry in entries):
        logging.getLogger("vlscope").warning(
            "a video came without fps: its times are counted at %d frames a second. Give "
            'video_metadata=[{"fps": ...}] with one entry for each video.',
            _ASSUMED_FPS,
        )
    return loaded


def _metadata_of(metadata: Any, count: int) -> list[Mapping[str, Any]]:
    """One entry for each video."""
    if metadata is None:
        return [{}] * count
    nested = [metadata] if isinstance(metadata, Mapping) else list(metadata)
    entries = [entry for item in nested for entry in (item if isinstance(item, (list, tuple)) else [item])]
    if len(entries) != count:
        raise InputError(f"video_metadata has {len(entries)} entries for {count} videos; give one for each")
    for index, entry in enumerate(entries):
        with naming("video_metadata of video", index):
            if not isinstance(entry, Mapping):
                raise InputError(f"it has to be a mapping with fps, got {entry!r}")
            if entry.get("fps") is not None:
                check_fps(entry["fps"])
    return entries


def _frames_of(video: Any) -> Any:
    """The frames of a video as an array with a first axis or a sequence, none of them opened."""
    if isinstance(video, Clip):
        return video.frames
    if isinstance(video, torch.Tensor):
        return video.detach().cpu().numpy()
    if not isinstance(video, (str, os.PathLike)):
        return video
    if not os.path.isdir(video):
        raise InputError(
            f"{os.fspath(video)!r} is no folder of frames, and video files are not decoded here: decode it, for "
            "example with PyAV or torchvision, and pass the frames as a list or an array [frames, height, width, 3], "
            'with video_metadata=[{"fps": ...}]'
        )
    return sorted((path for path in Path(video).iterdir() if path.name[0] != "."), key=_counting)


def _counting(path: Path) -> list[Any]:
    """A key that sorts the numbers in names by their value."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", path.name)]


def _load_video(frames: Any, metadata: Mapping[str, Any], settings: VideoSettings) -> Video:
    if len(frames) == 0:
        raise InputError("the video has no frames")
    fps = metadata.get("fps") or _ASSUMED_FPS
    taken, moments = _taken(len(frames), fps, metadata, settings)
    times = _times(moments, fps, settings.temporal_patch_size)
    return Video(_stacked(frames, taken), times, _sampled_fps(len(taken), len(frames), metadata, settings))


def _sampled_fps(taken: int, given: int, metadata: Mapping[str, Any], settings: VideoSettings) -> float:
    """How many of a second's frames were taken: those of the video, unless it says that some were left out."""
    fps = metadata.get("fps")
    total = given if settings.do_sample_frames else metadata.get("total_num_frames")
    known = settings.do_sample_frames or metadata.get("frames_indices") is not None
    return taken / total * fps if fps and total and known else fps or _ASSUMED_FPS


def _taken(count: int, fps: float, metadata: Mapping[str, Any], settings: VideoSettings) -> tuple[list[int], list[int]]:
    """Which of the `count` frames given are taken, and where each stood in the video."""
    total, indices = metadata.get("total_num_frames"), metadata.get("frames_indices")
    if settings.do_sample_frames:
        if total not in (None, count):
            raise InputError(
                f"{count} frames were given, and video_metadata counts {total}; pass do_sample_frames=False for frames "
                "that were sampled before, with their frames_indices"
            )
        sampled = settings.sample(count, fps)
        return sampled, sampled
    moments = list(range(count)) if indices is None else np.asarray(indices).tolist()
    if len(moments) != count:
        raise InputError(f"{count} frames were given, and video_metadata has {len(moments)} frames_indices")
    return list(range(count)), moments


def _stacked(frames: Any, taken: Sequence[int]) -> np.ndarray:
    loaded = []
    for index in taken:
        with naming("frame", index):
            loaded.append(load_image(frames[index]))
            if loaded[-1].shape != loaded[0].shape:
                (high, wide), (first_high, first_wide) = loaded[-1].shape[:2], loaded[0].shape[:2]
                raise InputError(
                    f"it is {high} pixels high and {wide} wide, the first one {first_high} and {first_wide}; the "
                    "frames of a video have one size"
                )
    return np.stack(loaded)


def _times(moments: Sequence[int], fps: float, depth: int) -> list[float]:
    """The time of each temporal patch: the mean of its first and its last frame's."""
    filled = [*moments, *[moments[-1]] * (-len(moments) % depth)]
    seconds = [moment / fps for moment in filled]
    return [(seconds[i] + seconds[i + depth - 1]) / 2 for i in range(0, len(seconds), depth)]
