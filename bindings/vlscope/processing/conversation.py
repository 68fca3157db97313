"""Chat messages: which of their parts are images, and where each image comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError, Unavailable
from .images import decode_base64

Message = Mapping[str, Any]
_VIDEO_KEYS = ("video", "video_url")


def is_conversation(value: Any) -> bool:
    """True for a list of messages: mappings with a role."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def split_images(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The messages in the form that templates know, and the source of each image in order.

    The source is None for a part `{"type": "image"}`, whose image is passed beside the
    conversation. The messages given are left as they are.
    """
    sources: list[Any] = []
    normalised = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            message = {**message, "content": [_normalise(part, sources) for part in content]}
        normalised.append(dict(message))
    return normalised, sources


def user_turn(text: str, images: int) -> list[dict[str, Any]]:
    """One user message: the images in order, then the text."""
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in range(images)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def _normalise(part: Any, sources: list[Any]) -> Any:
    if not isinstance(part, Mapping):
        raise InputError(f"a part of a message has to be a mapping with a type, got {part!r}")
    kind = part.get("type")
    if kind in _VIDEO_KEYS:
        raise Unavailable("videos are not supported yet; pass single frames as images")
    if kind == "image_url":  # the spelling of web interfaces
        address = part["image_url"]
        part = {"type": "image", "url": address["url"] if isinstance(address, Mapping) else address}
    elif kind != "image":
        return part
    sources.append(_source(part))
    return part


def _source(part: Mapping[str, Any]) -> Any:
    if "base64" in part:
        return decode_base64(part["base64"])
    return next((part[key] for key in ("image", "url", "path") if part.get(key) is not None), None)
