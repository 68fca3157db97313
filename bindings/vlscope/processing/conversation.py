"""Chat messages: which of their parts are images and videos, and where each comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from .images import decode_base64
from .videos import Clip

Message = Mapping[str, Any]


@dataclasses.dataclass
class Sources:
    """Where the images and the videos of a conversation come from, in order; None for a part that holds none."""

    images: list[Any] = dataclasses.field(default_factory=list)
    videos: list[Any] = dataclasses.field(default_factory=list)


def is_conversation(value: Any) -> bool:
    """True for a list of messages: mappings with a role."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def split_media(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], Sources]:
    """The messages in the form that templates know, and the sources of their images and videos.

    A source is None for a part `{"type": "image"}` (or "video") whose image is passed beside the
    conversation. The messages given are left as they are.
    """
    sources = Sources()
    normalised = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            message = {**message, "content": [_normalise(part, sources) for part in content]}
        normalised.append(dict(message))
    return normalised, sources


def user_turn(text: str, images: int, videos: int) -> list[dict[str, Any]]:
    """One user message: the images in order, the videos in order, then the text."""
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in range(images)]
    parts += [{"type": "video"} for _ in range(videos)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def _normalise(part: Any, sources: Sources) -> Any:
    if not isinstance(part, Mapping):
        raise InputError(f"a part of a message has to be a mapping with a type, got {part!r}")
    kind = part.get("type")
    if kind in ("image_url", "video_url"):  # the spelling of web interfaces
        address = part[kind]
        kind = kind.removesuffix("_url")
        part = {"type": kind, "url": address["url"] if isinstance(address, Mapping) else address}
    if kind == "image":
        sources.images.append(_image_source(part))
    elif kind == "video":
        video = _first_of(part, "video", "url", "path")
        sources.videos.append(Clip(video) if isinstance(video, (list, tuple)) else video)
    return part


def _image_source(part: Mapping[str, Any]) -> Any:
    return decode_base64(part["base64"]) if "base64" in part else _first_of(part, "image", "url", "path")


def _first_of(part: Mapping[str, Any], *keys: str) -> Any:
    return next((part[key] for key in keys if part.get(key) is not None), None)
