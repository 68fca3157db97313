"""The processor: prompts and images in, ids, masks, patches and grids out."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointNotFound, ConfigError, InputError, Unavailable
from .conversation import is_conversation, split_images, user_turn
from .images import ImageProcessor, ImageSettings, flatten_images, load_images, token_counts
from .text import ChatTemplate, Encoding, Tokenizer, pad_rows, read_json

_WRITTEN_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclasses.dataclass
class _Row:
    """One prompt of a batch: its ids and the images that its placeholders stand for."""

    ids: list[int]
    images: list[Any] = dataclasses.field(default_factory=list)
    expanded: bool = False  # every placeholder is there as often as its image has tokens


@dataclasses.dataclass
class _Draft:
    """A prompt before its images are known."""

    ids: list[int]
    slots: int  # images that it expects from `images=`
    text: str | None = None
    sources: list[Any] = dataclasses.field(default_factory=list)  # of the images in messages
    expanded: bool = False


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
        chat_template: ChatTemplate | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`config` is the model's config.json: the ids of the special tokens of a folder without a tokenizer."""
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self._template = chat_template
        config = config or {}
        self.image_token_id = self._special_id(self.image_token, config.get("image_token_id"))
        self.video_token_id = self._special_id(self.video_token, config.get("video_token_id"))
        self.vision_start_token_id = self._special_id(self.vision_start_token, config.get("vision_start_token_id"))
        self.vision_end_token_id = self._special_id(self.vision_end_token, config.get("vision_end_token_id"))

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], **image_settings: Any) -> Processor:
        """Read a checkpoint folder's tokenizer, chat template and image settings.

        What the folder lacks is refused when it is first needed. `image_settings` (`min_pixels`,
        `max_pixels`, `size`, ...) win over the files, and are in turn overruled by those of a call.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointNotFound(f"there is no folder {str(folder)!r}")
        settings = _read_image_settings(folder)
        if settings is None and image_settings:
            raise ConfigError(f"{folder} has no preprocessor_config.json that {', '.join(image_settings)} could change")
        return cls(
            Tokenizer.from_folder(folder),
            None if settings is None else ImageProcessor(settings.replace(**image_settings)),
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
        **image_settings: Any,
    ) -> Encoding:
        """Encode texts whose placeholders stand for the images, in order.

        `images` is one image, a flat list, or one list per text. `image_settings` (`min_pixels`,
        `max_pixels`, `size`, `do_resize`, ...) hold for this call only. Raises `InputError` where
        the images and the placeholders of a text differ in number, and where `truncation` would
        cut an image.
        """
        _refuse_videos(videos)
        settings = self._settings({**(images_kwargs or {}), **image_settings})
        if text is None:
            if images is None:
                raise InputError("pass text=, images= or both")
            return Encoding(self._processor_of_images().process(load_images(flatten_images(images)), settings))
        texts = [text] if isinstance(text, str) else list(text)
        if not texts:
            raise InputError("the list of texts is empty")
        ids = [self._tokenizer().encode(item) for item in texts]
        slots = [self._count(row, self.image_token_id) for row in ids]
        rows = []
        for index, (row, own) in enumerate(zip(ids, _deal(images, slots), strict=True)):
            with _naming_prompt(index, len(ids)):
                self._check_placeholders(row, own)
            rows.append(_Row(row, own))
        return self._encode(
            rows,
            settings,
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

        With `tokenize=True` the images in the messages are processed too, and the ids are
        returned, or with `return_dict=True` the whole encoding. Keywords that `__call__` knows
        (`return_tensors`, `padding`, `min_pixels`, ...) go there, the others to the template,
        which has to know them.
        """
        template = self._template_of(chat_template)
        processing = {**(processor_kwargs or {})}
        processing |= {name: kwargs.pop(name) for name in list(kwargs) if name in _CALL_KEYWORDS}
        if unknown := sorted(set(kwargs) - template.variables):
            raise TypeError(f"neither the processor nor the chat template knows {unknown[0]!r}")
        single = is_conversation(conversation)
        split = [split_images(item) for item in ([conversation] if single else conversation)]
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
        images = [[source for source in sources if source is not None] for _, sources in split]
        encoding = self(text=prompts, images=images, **processing)
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
        **image_settings: Any,
    ) -> Encoding:
        """The encoding of whatever a trace accepts as its prompt, as tensors.

        * A string with placeholders is tokenised as it stands; they have to match the images.
        * A string without any, given with images, becomes one user turn of the chat template:
          the images in order, the text, the generation prompt. Without images it is tokenised raw.
        * A conversation (a list of messages) is rendered by the chat template, with the generation
          prompt unless the assistant spoke last. Its images are in the messages, or in `images`
          for the parts `{"type": "image"}` that hold none.
        * Token ids, a list or a tensor, are taken as they are, with the placeholders already
          repeated. An encoding is returned as it is.
        * A list of these is a batch, padded on the left; `images` is then one list per prompt, or
          a flat list that the placeholders divide.

        Raises `InputError`, before any pixel is resized, for an empty prompt and for placeholders
        and images that differ in number, and `Unavailable` for videos.
        """
        _refuse_videos(videos)
        settings = self._settings(image_settings)
        if isinstance(prompt, Mapping):
            return _check_encoding(prompt, images)
        prompts = _as_batch(prompt)
        if any(isinstance(item, Mapping) for item in prompts):
            parts = [
                self.encode_prompt(item, own or None, **image_settings)
                for item, own in zip(prompts, _deal(images, [0] * len(prompts)), strict=True)
            ]
            return self._join(parts, padding_side)
        drafts = []
        for index, item in enumerate(prompts):
            with _naming_prompt(index, len(prompts)):
                drafts.append(self._draft(item))
        rows = []
        dealt = _deal(images, [draft.slots for draft in drafts])
        for index, (draft, own) in enumerate(zip(drafts, dealt, strict=True)):
            with _naming_prompt(index, len(prompts)):
                rows.append(self._row(draft, own))
        return self._encode(rows, settings, padding=True, padding_side=padding_side)

    def _draft(self, prompt: Any) -> _Draft:
        """Sort out what kind of prompt this is and how many images it asks for."""
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("the prompt is empty")
            ids = self._tokenizer().encode(prompt)
            return _Draft(ids, self._count(ids, self.image_token_id), text=prompt)
        if is_conversation(prompt):
            messages, sources = split_images(prompt)
            ids = self._render(messages, messages[-1]["role"] != "assistant")
            return _Draft(ids, sum(source is None for source in sources), sources=sources)
        return _Draft(_token_ids(prompt), slots=0, expanded=True)

    def _row(self, draft: _Draft, images: list[Any]) -> _Row:
        """Put images and ids together; the two have to match in number."""
        if draft.expanded:
            return _Row(draft.ids, images, expanded=True)
        ids = draft.ids
        if draft.text is not None and images and not draft.slots:
            ids = self._render(user_turn(draft.text, len(images)), add_generation_prompt=True)
        if draft.sources:
            if len(images) != draft.slots:
                raise InputError(
                    f"the messages hold {draft.slots} image parts without an image, and "
                    f"{len(images)} images were passed beside them"
                )
            given = iter(images)
            images = [next(given) if source is None else source for source in draft.sources]
        self._check_placeholders(ids, images)
        return _Row(ids, images)

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> list[int]:
        """The ids of a conversation."""
        text = self._template_of(None).render(
            messages, **self._special_tokens(), add_generation_prompt=add_generation_prompt
        )
        return self._tokenizer().encode(text)

    def _encode(
        self,
        rows: Sequence[_Row],
        settings: ImageSettings,
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        padding_side: str | None = None,
        return_tensors: str | None = "pt",
        return_mm_token_type_ids: bool = True,
    ) -> Encoding:
        """Repeat the placeholders, pad, and cut the images into patches; checks come first."""
        images = [image for row in rows for image in row.images]
        processor = self._processor_of_images() if images else None
        pixels = load_images(images)
        counts = iter(token_counts(pixels, settings))
        expanded = []
        for index, row in enumerate(rows):
            with _naming_prompt(index, len(rows)):
                own = [next(counts) for _ in row.images]
                ids = self._expand(row, own)
                expanded.append(self._truncate(ids, own, max_length) if truncation else ids)
        encoding = self._pad(expanded, padding, max_length, padding_side, return_tensors)
        if return_mm_token_type_ids:
            encoding["mm_token_type_ids"] = self._token_types(encoding["input_ids"])
        if processor is not None:
            encoding.update(processor.process(pixels, settings))
        return encoding

    def _expand(self, row: _Row, counts: Sequence[int]) -> list[int]:
        """The row's ids with each placeholder repeated as often as its image has tokens."""
        if row.expanded:
            tokens, features = self._count(row.ids, self.image_token_id), sum(counts)
            if tokens != features:
                raise InputError(
                    f"the ids hold {tokens} image tokens, and the images give {features} features; "
                    "repeat each placeholder as often as its image has tokens, or pass text"
                )
            return row.ids
        remaining = iter(counts)
        ids: list[int] = []
        for token in row.ids:
            ids += [token] * (next(remaining) if token == self.image_token_id else 1)
        return ids

    def _truncate(self, ids: list[int], counts: Sequence[int], max_length: int | None) -> list[int]:
        """The first `max_length` ids; an image has to stay whole."""
        if max_length is None:
            raise InputError("truncation=True needs max_length=")
        kept = self._count(ids[:max_length], self.image_token_id)
        for index, count in enumerate(counts):
            if kept < count:
                raise InputError(
                    f"max_length {max_length} cuts image {index} of {len(counts)}: {kept} of its "
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
        for name in ("pixel_values", "image_grid_thw"):
            if parts := [encoding[name] for encoding in encodings if name in encoding]:
                joined[name] = torch.cat(parts)
        return joined

    def _check_placeholders(self, ids: Sequence[int], images: Sequence[Any]) -> None:
        placeholders = self._count(ids, self.image_token_id)
        if placeholders != len(images):
            advice = f"; write {_WRITTEN_PLACEHOLDER} where each image belongs" if not placeholders else ""
            raise InputError(
                f"the text holds {placeholders} image placeholders ({self.image_token}), and "
                f"{len(images)} images were passed{advice}"
            )
        if videos := self._count(ids, self.video_token_id):
            raise InputError(
                f"the text holds {videos} video placeholders ({self.video_token}), and 0 videos were "
                "passed; videos are not supported yet"
            )

    def _settings(self, changes: Mapping[str, Any]) -> ImageSettings:
        """The image settings of one call."""
        base = ImageSettings() if self.image_processor is None else self.image_processor.settings
        return base.replace(**changes)

    def _processor_of_images(self) -> ImageProcessor:
        if self.image_processor is None:
            raise InputError("images need a preprocessor_config.json, which this checkpoint lacks")
        return self.image_processor

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
                f"{_WRITTEN_PLACEHOLDER} where each image belongs"
            )
        return self._template

    def _special_tokens(self) -> dict[str, str]:
        return {} if self.tokenizer is None else self.tokenizer.special_tokens_map

    def _special_id(self, token: str, fallback: int | None) -> int | None:
        found = None if self.tokenizer is None else self.tokenizer.convert_tokens_to_ids(token)
        return fallback if found is None else found

    @staticmethod
    def _count(ids: Sequence[int], token_id: int | None) -> int:
        return 0 if token_id is None else ids.count(token_id)

    def __repr__(self) -> str:
        return f"Processor({self.tokenizer}, {self.image_processor})"


_CALL_KEYWORDS = frozenset(
    {
        name
        for name, parameter in inspect.signature(Processor.__call__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    | {field.name for field in dataclasses.fields(ImageSettings)}
    | {"size"}
)


def _read_image_settings(folder: Path) -> ImageSettings | None:
    """The image part of processor_config.json, else preprocessor_config.json."""
    path = folder / "processor_config.json"
    config = (read_json(path) or {}).get("image_processor")
    if config is None:
        path = folder / "preprocessor_config.json"
        config = read_json(path)
    return None if config is None else ImageSettings.from_config(config, str(path))


def _refuse_videos(videos: Any) -> None:
    if videos is not None:
        raise Unavailable("videos are not supported yet; pass single frames as images")


@contextlib.contextmanager
def _naming_prompt(index: int, total: int) -> Iterator[None]:
    """In a batch, put the prompt's index before the message of an `InputError`."""
    try:
        yield
    except InputError as error:
        if total == 1:
            raise
        raise InputError(f"prompt {index}: {error}") from error.__cause__


def _deal(images: Any, slots: Sequence[int]) -> list[list[Any]]:
    """The images of each prompt; `slots` says how many each asks for, to divide a flat list."""
    if images is None:
        return [[] for _ in slots]
    if isinstance(images, (list, tuple)) and any(isinstance(item, (list, tuple)) for item in images):
        if len(images) != len(slots):
            raise InputError(f"{len(images)} lists of images were passed for {len(slots)} prompts")
        return [[] if own is None else flatten_images(own) for own in images]
    if isinstance(images, (list, tuple)) and any(item is None for item in images):
        missing = next(index for index, item in enumerate(images) if item is None)
        raise InputError(f"image {missing} is None, of {len(images)} passed; was its file read?")
    flat = flatten_images(images)
    if len(slots) == 1:
        return [flat]
    if sum(slots) != len(flat):
        raise InputError(
            f"the {len(slots)} prompts hold {sum(slots)} image placeholders, and {len(flat)} images "
            "were passed; pass one list of images per prompt, images=[[...], [...]]"
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


def _check_encoding(encoding: Mapping[str, Any], images: Any) -> Encoding:
    """An encoding made earlier, as it is."""
    if not isinstance(encoding.get("input_ids"), torch.Tensor):
        raise InputError("an encoding needs input_ids as a tensor; make it with return_tensors='pt'")
    if images is not None:
        raise InputError("the encoding has its images already; pass them to the processor instead")
    return Encoding(encoding)


def _mask_of(encoding: Encoding) -> torch.Tensor:
    mask = encoding.get("attention_mask")
    return torch.ones_like(encoding["input_ids"]) if mask is None else mask
