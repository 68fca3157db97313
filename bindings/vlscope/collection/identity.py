"""What tells one model's activations from another's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..recording import _identity

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

__all__ = ["model_identity"]

_SAMPLES, _BLOCK = 64, 4096
#: Files of a checkpoint that decide which tokens and patches a prompt becomes.
_PROCESSOR_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)


def model_identity(model: StandardizedTransformer) -> Mapping[str, Any]:
    """What decides the activations of a prompt: the configuration, dtype and attention, the weights, the
    processor, and the edits that stand. The device and the folder's name are not among it."""
    known = {name: value for name, value in _identity(model).items() if name != "device"}
    return {
        "family": model.family,
        **known,
        "weights": _weights(model.folder),
        "weights_edited": model._core.weight_version(),  # how often, in this process
        "processor": _processor(model),
        "edits": [edit.key for edit in model.edits],
    }


def _weights(folder: Path) -> str:
    """A hash of the weight files: of their sizes, and of blocks spread evenly over each, its header
    first. To read all of a large model would take as long as to run it."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for block in range(_SAMPLES):
                file.seek(block * max(0, size - _BLOCK) // (_SAMPLES - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _processor(model: StandardizedTransformer) -> str | None:
    """A hash of the processor's files and settings; of another kind of processor, its name."""
    from ..processing import Processor

    processor = model.processor
    if processor is not None and not isinstance(processor, Processor):
        return f"{type(processor).__module__}.{type(processor).__qualname__}"
    digest = hashlib.sha256()
    for name in _PROCESSOR_FILES:
        path = model.folder / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    if processor is not None and processor.image_processor is not None:
        digest.update(repr(processor.image_processor.settings).encode())
    return digest.hexdigest()
