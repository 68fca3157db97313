"""What is collected from: a JSONL file, a dataset, a sequence or an iterable of samples.

A sample is one prompt: a string, token ids, a processor's encoding, or a mapping
`{"prompt": ..., "images": [...], "videos": [...]}` or `{"messages": [...]}`; further keys are passed over.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CollectionError, InputError

__all__ = ["Sample", "Shard", "Source", "arguments", "chain", "open_source"]

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # http:, file:, data:
_MEDIA = ("image", "video")
_PATH_KEYS = (*_MEDIA, "url", "path")  # of a part of a message


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`: the samples k with k mod count == index."""

    index: int
    count: int

    @classmethod
    def of(cls, shard: str | Sequence[int]) -> Shard:
        """Read `"i/N"` or (i, N)."""
        parts = shard.split("/") if isinstance(shard, str) else list(shard)
        try:
            index, count = (int(part) for part in parts)
        except ValueError:
            raise InputError(f'shard is {shard!r}; give "i/N", as in "0/4"') from None
        if not 0 <= index < count:
            raise InputError(f"shard is {index}/{count}; of {count} shards the first is 0 and the last {count - 1}")
        return cls(index, count)

    def __str__(self) -> str:
        return f"shard-{self.index}-of-{self.count}"

    def samples(self, total: int) -> int:
        """How many of `total` samples are its own."""
        return len(range(self.index, total, self.count))


@dataclass(frozen=True)
class Sample:
    """A sample by its index in the dataset; it is loaded when it is needed."""

    index: int
    load: Callable[[], Any]
    digest: Callable[[], bytes]


@dataclass
class Source:
    """A dataset as it is collected from.

    Attributes:
        identity: what has to be the same for two runs to be over the same data, as far as it is
            known beforehand; the digests of the samples tell the rest.
        count: the number of samples; None where only reading to the end tells, until it was.
        samples: the samples of one shard, in order.
    """

    identity: Mapping[str, Any]
    count: int | None
    samples: Callable[[Shard], Iterator[Sample]]


def open_source(dataset: Any) -> Source:
    """`dataset` as a source: a path is a JSONL file, an object of Hugging Face's `datasets` or
    anything with a length and indices is read by index, anything else from its beginning.

    Raises:
        FileNotFoundError, InputError: a file that is not there; what is no dataset.
    """
    if isinstance(dataset, (str, os.PathLike)):
        return _open_jsonl(Path(dataset))
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        kind = "a mapping of splits or one sample" if isinstance(dataset, Mapping) else type(dataset).__name__
        raise InputError(f"dataset is {kind}; give the path of a JSONL file, a dataset or an iterable of samples")
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return _open_sequence(dataset)
    return _open_iterable(dataset)


def chain(digest: str, sample: Sample, skipped: bool) -> str:
    """The digest of a run of samples and one more. A skipped one may be readable at another time: what
    it holds does not count."""
    own = b"skipped" if skipped else sample.digest()
    return hashlib.sha256(bytes.fromhex(digest) + own).hexdigest()


def arguments(sample: Any) -> dict[str, Any]:
    """A sample as the arguments of `model.encode`."""
    if not isinstance(sample, Mapping) or "input_ids" in sample:
        return {"prompt": sample}
    if ("prompt" in sample) == ("messages" in sample):
        which = "both" if "prompt" in sample else "neither"
        raise InputError(f'a sample has "prompt" or "messages"; this one has {which}, among {", ".join(sample)}')
    for name in _MEDIA:
        if name in sample:
            raise InputError(f'a sample has "{name}s", a list; this one has "{name}"')
    found = {"prompt": sample.get("prompt", sample.get("messages"))}
    return found | {name: sample[name] for name in ("images", "videos") if sample.get(name)}


# --- JSONL ---


def _open_jsonl(path: Path) -> Source:
    digest, count = hashlib.sha256(), 0
    with path.open("rb") as lines:
        for line in lines:
            digest.update(line)
            count += bool(line.strip())

    def samples(shard: Shard) -> Iterator[Sample]:
        with path.open("rb") as lines:
            filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            for index, (number, line) in enumerate(filled):
                if index % shard.count == shard.index:
                    yield Sample(index, _line_loader(path, number, line), hashlib.sha256(line).digest)

    return Source({"kind": "jsonl", "sha256": digest.hexdigest(), "samples": count}, count, samples)


def _line_loader(path: Path, number: int, line: bytes) -> Callable[[], Any]:
    def load() -> Any:
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(sample, dict):
            raise InputError(f"{path}, line {number} holds {type(sample).__name__}; an object is expected")
        return _resolve(sample, path.parent)

    return load


def _resolve(sample: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A sample with its relative paths made relative to the working directory."""
    sample = copy.deepcopy(sample)
    for name in ("images", "videos"):
        if name in sample:
            sample[name] = _under(folder, sample[name])
    for message in sample.get("messages") or ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in _MEDIA:
                part |= {key: _under(folder, part[key]) for key in _PATH_KEYS if key in part}
    return sample


def _under(folder: Path, value: Any) -> Any:
    """A path or lists of paths under a folder; addresses and absolute paths stay."""
    if isinstance(value, list):
        return [_under(folder, item) for item in value]
    if not isinstance(value, str) or _ADDRESS.match(value):
        return value
    return str(folder / value)


# --- Python objects ---


def _open_sequence(dataset: Any) -> Source:
    """Read by index, so that a resumed run does not load what is done where the data say who they are."""
    count = len(dataset)
    fingerprint = getattr(dataset, "_fingerprint", None)  # of Hugging Face's datasets: the hash of their making
    identity = {"kind": "sequence", "samples": count}
    if isinstance(fingerprint, str):
        identity |= {"kind": "datasets", "fingerprint": fingerprint}

    def samples(shard: Shard) -> Iterator[Sample]:
        for index in range(shard.index, count, shard.count):
            yield _object_sample(index, partial(dataset.__getitem__, index), isinstance(fingerprint, str))

    return Source(identity, count, samples)


def _open_iterable(dataset: Iterable[Any]) -> Source:
    def samples(shard: Shard) -> Iterator[Sample]:
        count = 0
        for index, value in enumerate(dataset):
            count += 1
            if index % shard.count == shard.index:
                yield _object_sample(index, partial(_as_it_is, value), False)
        source.count = count

    source = Source({"kind": "iterable"}, None, samples)
    return source


def _as_it_is(value: Any) -> Any:
    return value


def _object_sample(index: int, load: Callable[[], Any], known: bool) -> Sample:
    """`known`: a fingerprint of the whole already tells the sample."""
    load = cache(load)  # once for its tensors and its digest

    def digest() -> bytes:
        state = hashlib.sha256()
        if not known:
            _feed(state, load())
        return state.digest()

    return Sample(index, load, digest)


def _feed(state: Any, value: Any) -> None:
    """Take a sample into a hash: the same for equal samples of another process."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _feed(state, key)
            _feed(state, value[key])
    elif isinstance(value, (list, tuple)):
        state.update(f"list {len(value)}".encode())
        for item in value:
            _feed(state, item)
    elif isinstance(value, (str, os.PathLike)):
        _feed(state, os.fspath(value).encode())
    elif isinstance(value, (bytes, bytearray)):
        state.update(f"bytes {len(value)}".encode())
        state.update(value)
    elif isinstance(value, torch.Tensor):
        state.update(f"{value.dtype} {list(value.shape)}".encode())
        state.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype} {value.shape}".encode())
        state.update(np.ascontiguousarray(value).tobytes())
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # an image of Pillow
        state.update(f"{value.mode} {value.size}".encode())
        state.update(value.tobytes())
    elif value is None or isinstance(value, (bool, int, float)):
        state.update(repr(value).encode())
    else:
        raise CollectionError(
            f"a sample holds {type(value).__name__}, which cannot be told from another on resuming: give paths, "
            "Pillow images, arrays or tensors"
        )
