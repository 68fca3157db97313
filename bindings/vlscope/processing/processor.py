"""The processor: prompts, images and videos in, ids, masks, patches and grids out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointNotFound, ConfigError, InputError
from .conversation import Sources, is_conversation, split_media, user_turn
from .images import ImageProcessor, ImageSettings, flatten_images, load_images, token_counts
from .text import ChatTemplate, Encoding, Tokenizer, pad_rows, read_json
from .videos import (
    Qwen2VideoSettings,
    Video,
    VideoProcessor,
    VideoSettings,
    flatten_videos,
    frame_token_counts,
    is_video,
    load_videos,
)

_WRITTEN_PLACEHOLDER = "<|vision_start|><|{}_pad|><|vision_end|>"


@dataclasses.dataclass
class _Row:
    """One prompt of a batch: its ids and what its placeholders stand for."""

    ids: list[int]
    text: str | None = None  # None where the ids were given, with each placeholder repeated
    images: list[Any] = dataclasses.field(default_factory=list)
    videos: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Draft:
    """A prompt before its images and videos are known."""

    ids: list[int]
    images: int = 0  # how many it expects from `images=`
    videos: int = 0
    text: str | None = None
    sources: Sources | None = None  # of a conversation


@dataclasses.dataclass
class _Media:
    """The loaded images and videos of a batch, and the tokens that they become."""

    pixels: list[np.ndarray]
    image_tokens: list[int]
    clips: list[Video]
    frame_tokens: list[int]  # for each video, of one temporal patch


@dataclasses.dataclass
class _Call:
    """The settings of one call. Those of videos are made when there is a video."""

    images: ImageSettings
    videos: Callable[[], VideoSettings]
    video_metadata: Any = None


class Processor:
    """Called like transformers' `AutoProcessor`, and equal to it bit for bit.

    It differs where silence would hide a mistake: placeholders and images that do not match in
    number, floating-point pixels, unknown keywords and contradictory limits are refused; batches
    are padded on the left unless `padding_side` says otherwise; one of `min_pixels` and
    `max_pixels` may be passed without the other.
    """

    image_token = "<|image_pad|>"
    video_token = "<|video_pad|>"
    vision_start_token = "<|vision_start|>"
    vision_end_token = "<|vision_end|>"

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        image_processor: ImageProcessor | None,
        video_processor: VideoProcessor | None = None,
        chat_template: ChatTemplate | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`config` is the model's config.json: its family, and the ids of the special tokens of a folder without a
        tokenizer."""
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor
        self._template = chat_template
        config = config or {}
        #: Whether the model places a video in time by the seconds between its frames.
        self._counts_seconds = config.get("model_type") == "qwen2_5_vl"
        self._config = config

    @functools.cached_property
    def image_token_id(self) -> int | None:
        """Its id in the vocabulary, or in config.json for a folder without one; likewise the three below."""
        return self._special_id(self.image_token, "image_token_id")

    @functools.cached_property
    def video_token_id(self) -> int | None:
        return self._special_id(self.video_token, "video_token_id")

    @functools.cached_property
    def vision_start_token_id(self) -> int | None:
        return self._special_id(self.vision_start_token, "vision_start_token_id")

    @functools.cached_property
    def vision_end_token_id(self) -> int | None:
        return self._special_id(self.vision_end_token, "vision_end_token_id")

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], **image_settings: Any) -> Processor:
        """Read a checkpoint folder's tokenizer, chat template, image and video settings.

        What the folder lacks is refused when it is first needed. `image_settings` (`min_pixels`,
        `max_pixels`, `size`, ...) win over the files, and are in turn overruled by those of a call.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointNotFound(f"there is no folder {str(folder)!r}")
        settings = read_image_settings(folder)
        if settings is None and image_settings:
            raise ConfigError(f"{folder} has no preprocessor_config.json that {', '.join(image_settings)} could change")
        return cls(
            Tokenizer.from_folder(folder),
            None if settings is None else ImageProcessor(settings.replace(**image_settings)),
            _read_video_processor(folder),
            ChatTemplate.from_folder(folder),
            read_json(folder / "config.json"),
        )

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        return None if self._template is None else self._template.source

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        videos: Any = None,
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_mm_token_type_ids: bool = True,
        images_kwargs: Mapping[str, Any] | None = None,
        videos_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Encoding:
        """Encode texts whose placeholders stand for the images and videos, in order.

        `images` is one image, a flat list, or one list per text; `videos` likewise, each of them a
        list of frames or an array (see `load_videos`). `settings` hold for this call only: those of
        images (`min_pixels`, `max_pixels`, ...), those of videos (`fps`, `num_frames`,
        `do_sample_frames`, `video_metadata`, ...), and those that both have (`size`, `do_resize`,
        ...). Raises `InputError` where a text's placeholders and its images or videos differ in
        number, and where `truncation` would cut one of them.
        """
        call = self._call(settings, images_kwargs, videos_kwargs)
        if text is None:
            if images is None and videos is None:
                raise InputError("pass text=, images= or videos=")
            flat = [] if images is None else flatten_images(images), [] if videos is None else flatten_videos(videos)
            return Encoding(self._patches(self._media(*flat, call), call))
        texts = [text] if isinstance(text, str) else list(text)
        if not texts:
            raise InputError("the list of texts is empty")
        ids = [self._tokenizer().encode(item) for item in texts]
        pictures = _deal_images(images, [self._count(row, self.image_token_id) for row in ids])
        clips = _deal_videos(videos, [self._count(row, self.video_token_id) for row in ids])
        rows = []
        for index, row in enumerate(map(_Row, ids, texts, pictures, clips)):
            with _naming_prompt(index, len(ids)):
                self._check_placeholders(row)
            rows.append(row)
        return self._encode(
            rows,
            call,
            padding=padding,
            max_length=max_length,
            truncation=truncation,
            padding_side=padding_side,
            return_tensors=return_tensors,
            return_mm_token_type_ids=return_mm_token_type_ids,
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        chat_template: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        return_dict: bool = False,
        processor_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The prompt of a conversation, or of each of several.

        With `tokenize=True` the images and videos in the messages are processed too, and the ids
        are returned, or with `return_dict=True` the whole encoding. Keywords that `__call__` knows
        (`return_tensors`, `padding`, `min_pixels`, ...) go there, the others to the template,
        which has to know them.
        """
        template = self._template_of(chat_template)
        processing = {**(processor_kwargs or {})}
        processing |= {name: kwargs.pop(name) for name in list(kwargs) if name in _CALL_KEYWORDS}
        if unknown := sorted(set(kwargs) - template.variables):
            raise TypeError(f"neither the processor nor the chat template knows {unknown[0]!r}")
        single = is_conversation(conversation)
        split = [split_media(item) for item in ([conversation] if single else conversation)]
        if not split:
            raise InputError("the conversation is empty")
        prompts = [
            template.render(
                messages,
                **{
                    **self._special_tokens(),
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                    **kwargs,
                },
            )
            for messages, _ in split
        ]
        if not tokenize:
            return prompts[0] if single else prompts
        if processing.get("fps") is not None or processing.get("num_frames") is not None:
            processing.setdefault("do_sample_frames", True)
        images = [[source for source in sources.images if source is not None] for _, sources in split]
        videos = [[source for source in sources.videos if source is not None] for _, sources in split]
        encoding = self(text=prompts, images=images, videos=videos, **processing)
        return encoding if return_dict else encoding["input_ids"]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str | list[str]:
        """The text of ids (see `Tokenizer.decode`)."""
        return self._tokenizer().decode(ids, skip_special_tokens)

    def batch_decode(self, batch: Any, skip_special_tokens: bool = False) -> list[str]:
        """The text of each sequence of a batch."""
        return self._tokenizer().batch_decode(batch, skip_special_tokens)

    def encode_prompt(
        self,
        prompt: Any,
        images: Any = None,
        videos: Any = None,
        *,
        padding_side: str = "left",
        **settings: Any,
    ) -> Encoding:
        """The encoding of whatever a trace accepts as its prompt, as tensors.

        * A string with placeholders is tokenised as it stands; they have to match the images and
          videos.
        * A string without any, given with images or videos, becomes one user turn of the chat
          template: the images in order, the videos in order, the text, the generation prompt.
          Without either it is tokenised raw.
        * A conversation (a list of messages) is rendered by the chat template, with the generation
          prompt unless the assistant spoke last. Its images and videos are in the messages, or in
          `images` and `videos` for the parts `{"type": "image"}` and `{"type": "video"}` that hold
          none.
        * Token ids, a list or a tensor, are taken as they are, with the placeholders already
          repeated. An encoding is returned as it is.
        * A list of these is a batch, padded on the left; `images` and `videos` are then one list
          per prompt, or a flat list that the placeholders divide.

        `settings` are those of `__call__`. Raises `InputError`, before any pixel is resized, for an
        empty prompt and for placeholders that differ in number from the images and videos.
        """
        call = self._call(settings)
        if isinstance(prompt, Mapping):
            return _check_encoding(prompt, images, videos)
        prompts = _as_batch(prompt)
        if any(isinstance(item, Mapping) for item in prompts):
            none = [0] * len(prompts)
            parts = [
                self.encode_prompt(item, pictures or None, clips or None, **settings)
                for item, pictures, clips in zip(
                    prompts, _deal_images(images, none), _deal_videos(videos, none), strict=True
                )
            ]
            return self._join(parts, padding_side)
        drafts = []
        for index, item in enumerate(prompts):
            with _naming_prompt(index, len(prompts)):
                drafts.append(self._draft(item))
        rows = []
        pictures = _deal_images(images, [draft.images for draft in drafts])
        clips = _deal_videos(videos, [draft.videos for draft in drafts])
        for index, parts_of_row in enumerate(zip(drafts, pictures, clips, strict=True)):
            with _naming_prompt(index, len(prompts)):
                rows.append(self._row(*parts_of_row))
        return self._encode(rows, call, padding=True, padding_side=padding_side)

    def _draft(self, prompt: Any) -> _Draft:
        """Sort out what kind of prompt this is and how many images and videos it asks for."""
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("the prompt is empty")
            ids = self._tokenizer().encode(prompt)
            return _Draft(
                ids, self._count(ids, self.image_token_id), self._count(ids, self.video_token_id), text=prompt
            )
        if is_conversation(prompt):
            messages, sources = split_media(prompt)
            text = self._render(messages, messages[-1]["role"] != "assistant")
            ids = self._tokenizer().encode(text)
            return _Draft(ids, _missing(sources.images), _missing(sources.videos), text, sources)
        return _Draft(_token_ids(prompt))

    def _row(self, draft: _Draft, images: list[Any], videos: list[Any]) -> _Row:
        """Put images, videos and ids together; they have to match in number."""
        row = _Row(draft.ids, draft.text, images, videos)
        if draft.text is None:
            return row
        if draft.sources is not None:
            row.images = _filled(draft.sources.images, images, "image")
            row.videos = _filled(draft.sources.videos, videos, "video")
        elif (images or videos) and not draft.images and not draft.videos:
            row.text = self._render(user_turn(draft.text, len(images), len(videos)), add_generation_prompt=True)
            row.ids = self._tokenizer().encode(row.text)
        self._check_placeholders(row)
        return row

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The text of a conversation."""
        return self._template_of(None).render(
            messages, **self._special_tokens(), add_generation_prompt=add_generation_prompt
        )

    def _encode(
        self,
        rows: Sequence[_Row],
        call: _Call,
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        padding_side: str | None = None,
        return_tensors: str | None = "pt",
        return_mm_token_type_ids: bool = True,
    ) -> Encoding:
        """Repeat the placeholders, pad, and cut images and frames into patches; checks come first."""
        media = self._media(
            [image for row in rows for image in row.images], [video for row in rows for video in row.videos], call
        )
        image_tokens = iter(media.image_tokens)
        clips = iter(zip(media.clips, media.frame_tokens, strict=True))
        expanded = []
        for index, row in enumerate(rows):
            own = {"image": [next(image_tokens) for _ in row.images]}
            own_clips = [next(clips) for _ in row.videos]
            own["video"] = [len(clip.times) * tokens for clip, tokens in own_clips]
            with _naming_prompt(index, len(rows)):
                ids = self._expand(row, own, own_clips)
                expanded.append(self._truncate(ids, own, max_length) if truncation else ids)
        encoding = self._pad(expanded, padding, max_length, padding_side, return_tensors)
        if return_mm_token_type_ids:
            encoding["mm_token_type_ids"] = self._token_types(encoding["input_ids"])
        encoding.update(self._patches(media, call))
        return encoding

    def _media(self, images: Sequence[Any], videos: Sequence[Any], call: _Call) -> _Media:
        """Open images and videos and find how many tokens each becomes."""
        if images and self.image_processor is None:
            raise InputError("images need a preprocessor_config.json, which this checkpoint lacks")
        if videos and self.video_processor is None:
            raise InputError("videos need a video_preprocessor_config.json, which this checkpoint lacks")
        pixels = load_images(images)
        if not videos:
            return _Media(pixels, token_counts(pixels, call.images), [], [])
        clips = load_videos(videos, call.video_metadata, call.videos())
        return _Media(pixels, token_counts(pixels, call.images), clips, frame_token_counts(clips, call.videos()))

    def _patches(self, media: _Media, call: _Call) -> dict[str, torch.Tensor]:
        """Patches and grids of the images and of the videos, of what there is."""
        patches: dict[str, torch.Tensor] = {}
        if media.pixels and self.image_processor:
            patches |= self.image_processor.process(media.pixels, call.images)
        if media.clips and self.video_processor:
            settings = call.videos()
            patches |= self.video_processor.process(media.clips, settings)
            if self._counts_seconds:
                patches["second_per_grid_ts"] = torch.tensor(
                    [settings.temporal_patch_size / clip.sampled_fps for clip in media.clips]
                )
        return patches

    def _expand(self, row: _Row, counts: Mapping[str, Sequence[int]], clips: Sequence[tuple[Video, int]]) -> list[int]:
        """The row's ids with each placeholder repeated as often as its image or video has tokens."""
        if row.text is None:
            for noun, token in self._placeholder_ids().items():
                tokens, features = self._count(row.ids, token), sum(counts[noun])
                if tokens != features:
                    raise InputError(
                        f"the ids hold {tokens} {noun} tokens, and the {noun}s give {features} features; "
                        f"repeat each placeholder as often as its {noun} has tokens, or pass text"
                    )
            return row.ids
        ids = row.ids
        if clips:  # the times are text, whose tokens depend on what stands beside them
            head, *tails = row.text.split(self.video_token)
            written = [self._written_video(clip.times, tokens) for clip, tokens in clips]
            pieces = [frames + tail for frames, tail in zip(written, tails, strict=True)]
            ids = self._tokenizer().encode("".join([head, *pieces]))
        repeats = iter(counts["image"])
        return [same for token in ids for same in [token] * (next(repeats) if token == self.image_token_id else 1)]

    def _written_video(self, times: Sequence[float], tokens: int) -> str:
        """What a video's placeholder becomes: each temporal patch behind its time, or all in one run."""
        if self.video_processor and not self.video_processor.settings.tells_times:
            return self.video_token * (len(times) * tokens)
        patch = self.vision_start_token + self.video_token * tokens + self.vision_end_token
        return "".join(f"<{time:.1f} seconds>{patch}" for time in times)

    def _truncate(self, ids: list[int], counts: Mapping[str, Sequence[int]], max_length: int | None) -> list[int]:
        """The first `max_length` ids; an image or video has to stay whole."""
        if max_length is None:
            raise InputError("truncation=True needs max_length=")
        for noun, token in self._placeholder_ids().items():
            kept = self._count(ids[:max_length], token)
            for index, count in enumerate(counts[noun]):
                if kept < count:
                    raise InputError(
                        f"max_length {max_length} cuts {noun} {index} of {len(counts[noun])}: {kept} of its "
                        f"{count} tokens would stay; use at least {len(ids)} or a smaller max_pixels"
                    )
                kept -= count
        return ids[:max_length]

    def _pad(
        self,
        rows: Sequence[Sequence[int]],
        padding: bool | str,
        max_length: int | None,
        side: str | None,
        return_tensors: str | None,
    ) -> Encoding:
        if self.tokenizer is not None:
            return self.tokenizer.pad(rows, padding, max_length, side, return_tensors)
        return pad_rows(rows, None, max(map(len, rows)), side or "left", return_tensors)

    def _token_types(self, ids: Any) -> Any:
        """0 for text, 1 for image tokens, 2 for video tokens."""
        if isinstance(ids, torch.Tensor):
            types = torch.zeros_like(ids)
            types[ids == self.image_token_id] = 1
            types[ids == self.video_token_id] = 2
            return types
        kinds = {self.image_token_id: 1, self.video_token_id: 2}
        return [[kinds.get(token, 0) for token in row] for row in ids]

    def _join(self, encodings: Sequence[Encoding], side: str) -> Encoding:
        """One batch of several encodings."""
        rows = [
            ids[mask.bool()].tolist()
            for encoding in encodings
            for ids, mask in zip(encoding["input_ids"], _mask_of(encoding), strict=True)
        ]
        joined = self._pad(rows, True, None, side, "pt")
        joined["mm_token_type_ids"] = self._token_types(joined["input_ids"])
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"):
            if parts := [encoding[name] for encoding in encodings if name in encoding]:
                joined[name] = torch.cat(parts)
        return joined

    def _check_placeholders(self, row: _Row) -> None:
        for noun, token_id in self._placeholder_ids().items():
            placeholders = self._count(row.ids, token_id)
            token, given = getattr(self, f"{noun}_token"), getattr(row, f"{noun}s")
            if placeholders != len(given):
                written = _WRITTEN_PLACEHOLDER.format(noun)
                advice = f"; write {written} where each {noun} belongs" if not placeholders else ""
                raise InputError(
                    f"the text holds {placeholders} {noun} placeholders ({token}), and "
                    f"{len(given)} {noun}s were passed{advice}"
                )

    def _placeholder_ids(self) -> dict[str, int | None]:
        return {"image": self.image_token_id, "video": self.video_token_id}

    def _call(
        self,
        settings: Mapping[str, Any],
        images: Mapping[str, Any] | None = None,
        videos: Mapping[str, Any] | None = None,
    ) -> _Call:
        """The settings of one call: those for both, and those for images and for videos alone."""
        of_images = {name: value for name, value in settings.items() if name not in _VIDEO_KEYWORDS - _IMAGE_KEYWORDS}
        of_videos = {name: value for name, value in settings.items() if name in _VIDEO_KEYWORDS} | dict(videos or {})
        metadata = of_videos.pop("video_metadata", None)
        base = ImageSettings() if self.image_processor is None else self.image_processor.settings
        video_base = VideoSettings() if self.video_processor is None else self.video_processor.settings
        return _Call(base.replace(**{**(images or {}), **of_images}), lambda: video_base.replace(**of_videos), metadata)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(
                "text needs a tokenizer.json (or vocab.json and merges.txt), which this checkpoint "
                "lacks; pass token ids"
            )
        return self.tokenizer

    def _template_of(self, source: str | None) -> ChatTemplate:
        if source is not None:
            return ChatTemplate(source)
        if self._template is None:
            raise InputError(
                "this checkpoint has no chat template; write the prompt as a string, with "
                f"{_WRITTEN_PLACEHOLDER.format('image')} where each image belongs"
            )
        return self._template

    def _special_tokens(self) -> dict[str, str]:
        return {} if self.tokenizer is None else self.tokenizer.special_tokens_map

    def _special_id(self, token: str, name: str) -> int | None:
        found: int | None = None if self.tokenizer is None else self.tokenizer.convert_tokens_to_ids(token)
        return self._config.get(name) if found is None else found

    @staticmethod
    def _count(ids: Sequence[int], token_id: int | None) -> int:
        return 0 if token_id is None else ids.count(token_id)

    def __repr__(self) -> str:
        return f"Processor({self.tokenizer}, {self.image_processor}, {self.video_processor})"


_IMAGE_KEYWORDS = frozenset({field.name for field in dataclasses.fields(ImageSettings)} | {"size"})
# A flat min_pixels is for images, as it is for transformers: for videos, the limits are in `videos_kwargs`.
_VIDEO_KEYWORDS = frozenset(
    {field.name for field in dataclasses.fields(VideoSettings)} | {"size", "video_metadata"}
) - {"min_pixels", "max_pixels"}
_CALL_KEYWORDS = frozenset(
    {
        name
        for name, parameter in inspect.signature(Processor.__call__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    | _IMAGE_KEYWORDS
    | _VIDEO_KEYWORDS
)


def read_image_settings(folder: Path) -> ImageSettings | None:
    """The image part of processor_config.json, else preprocessor_config.json."""
    path = folder / "processor_config.json"
    config = (read_json(path) or {}).get("image_processor")
    if config is None:
        path = folder / "preprocessor_config.json"
        config = read_json(path)
    return None if config is None else ImageSettings.from_config(config, str(path))


def _read_video_processor(folder: Path) -> VideoProcessor | None:
    """The video part of processor_config.json, else video_preprocessor_config.json, else the file of images.

    The model's family says of which class they are; in a folder without a model, the file itself.
    """
    path = folder / "processor_config.json"
    config = (read_json(path) or {}).get("video_processor")
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if config is None:
            path = folder / name
            config = read_json(path)
    if config is None:
        return None
    family = (read_json(folder / "config.json") or {}).get("model_type") or config.get("video_processor_type")
    kind = Qwen2VideoSettings if str(family).lower().startswith("qwen2") else VideoSettings
    return VideoProcessor(kind.from_config(config, str(path)))


def _missing(sources: Sequence[Any]) -> int:
    return sum(source is None for source in sources)


def _filled(sources: Sequence[Any], given: Sequence[Any], noun: str) -> list[Any]:
    """The sources of a conversation with those that it lacks taken from beside it."""
    missing = _missing(sources)
    if sources and len(given) != missing:
        article = "an" if noun == "image" else "a"
        raise InputError(
            f"the messages hold {missing} {noun} parts without {article} {noun}, and "
            f"{len(given)} {noun}s were passed beside them"
        )
    rest = iter(given)
    return [next(rest) if source is None else source for source in sources] if sources else list(given)


@contextlib.contextmanager
def _naming_prompt(index: int, total: int) -> Iterator[None]:
    """In a batch, put the prompt's index before the message of an `InputError`."""
    try:
        yield
    except InputError as error:
        if total == 1:
            raise
        raise InputError(f"prompt {index}: {error}") from error.__cause__


def _deal_images(images: Any, slots: Sequence[int]) -> list[list[Any]]:
    """The images of each prompt; `slots` says how many each asks for, to divide a flat list."""
    nested = isinstance(images, (list, tuple)) and any(isinstance(item, (list, tuple)) for item in images)
    return _deal("image", images, slots, nested)


def _deal_videos(videos: Any, slots: Sequence[int]) -> list[list[Any]]:
    """The same of videos."""
    nested = isinstance(videos, (list, tuple)) and not is_video(videos)
    nested = nested and any(isinstance(item, (list, tuple)) and not is_video(item) for item in videos)
    return _deal("video", videos, slots, nested)


def _deal(noun: str, items: Any, slots: Sequence[int], nested: bool) -> list[list[Any]]:
    flatten = flatten_images if noun == "image" else flatten_videos
    if items is None:
        return [[] for _ in slots]
    if nested:
        if len(items) != len(slots):
            raise InputError(f"{len(items)} lists of {noun}s were passed for {len(slots)} prompts")
        return [[] if own is None else flatten(own) for own in items]
    if isinstance(items, (list, tuple)) and any(item is None for item in items):
        missing = next(index for index, item in enumerate(items) if item is None)
        raise InputError(f"{noun} {missing} is None, of {len(items)} passed; was its file read?")
    flat = flatten(items)
    if len(slots) == 1:
        return [flat]
    if sum(slots) != len(flat):
        raise InputError(
            f"the {len(slots)} prompts hold {sum(slots)} {noun} placeholders, and {len(flat)} {noun}s "
            f"were passed; pass one list of {noun}s per prompt, {noun}s=[[...], [...]]"
        )
    rest = iter(flat)
    return [[next(rest) for _ in range(count)] for count in slots]


def _as_batch(prompt: Any) -> list[Any]:
    """The prompts of a batch; a single one is a batch of one."""
    if prompt is None:
        raise InputError("the prompt is None")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, (torch.Tensor, np.ndarray)):
        prompt = prompt.tolist()
    if not isinstance(prompt, (list, tuple)):
        raise InputError(
            f"a {type(prompt).__name__} is not a prompt; pass a string, chat messages, token ids, an "
            "encoding, or a list of these"
        )
    if not prompt:
        raise InputError("the prompt is empty")
    if is_conversation(prompt) or isinstance(prompt[0], (int, np.integer)):
        return [prompt]
    return list(prompt)


def _token_ids(prompt: Any) -> list[int]:
    """A sequence of ids as a list of ints."""
    ids = prompt.tolist() if isinstance(prompt, (torch.Tensor, np.ndarray)) else prompt
    if not isinstance(ids, (list, tuple)):
        raise InputError(f"a {type(prompt).__name__} is not a prompt: {prompt!r}")
    if not ids:
        raise InputError("the prompt is empty")
    try:
        return [operator.index(token) for token in ids]
    except TypeError:
        raise InputError(f"token ids have to be integers, got {ids!r}") from None


def _check_encoding(encoding: Mapping[str, Any], images: Any, videos: Any) -> Encoding:
    """An encoding made earlier, as it is."""
    if not isinstance(encoding.get("input_ids"), torch.Tensor):
        raise InputError("an encoding needs input_ids as a tensor; make it with return_tensors='pt'")
    if images is not None or videos is not None:
        noun = "videos" if images is None else "images"
        raise InputError(f"the encoding has its {noun} already; pass them to the processor instead")
    return Encoding(encoding)


def _mask_of(encoding: Encoding) -> torch.Tensor:
    mask = encoding.get("attention_mask")
    return torch.ones_like(encoding["input_ids"]) if mask is None else mask
