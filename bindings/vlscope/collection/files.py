"""Files that are there whole or not at all, and the safetensors files of the parts."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import CollectionError

__all__ = ["check_size", "exclusive", "map_tensors", "replacing", "sync_folder", "write_tensors"]

TEMPORARY = ".tmp"

#: Names of the format, https://github.com/huggingface/safetensors#format.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that is written beside `path`, brought to the disk, and then takes its name; on an error
    nothing is left. An `OSError` names the path."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold a lock until the block is left or the process ends; refused where another holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CollectionError(
                f"{what} is being collected by another process or thread: wait until it ends"
            ) from None
        yield


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Write contiguous CPU tensors as a safetensors file; gives its size in bytes and its SHA-256.

    Written here, and not by the safetensors package, so that no copy of the whole is made and other
    threads run meanwhile.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    digest = hashlib.sha256()
    with replacing(path) as file:
        for chunk in (len(text).to_bytes(8, "little"), text, *map(_bytes_of, tensors.values())):
            digest.update(chunk)
            file.write(chunk)
    return 8 + len(text) + end, digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a tensor, as a buffer."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def map_tensors(path: Path, size: int) -> dict[str, torch.Tensor]:
    """The tensors of a part, mapped: nothing is read before it is used.

    Raises:
        CollectionError: a file that is not there, is of another size, or is no part.
    """
    check_size(path, size)
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    start = 8 + int.from_bytes(bytes(raw[:8].tolist()), "little")
    try:
        header = json.loads(bytes(raw[8:start].tolist()))
        return {name: _tensor(raw[start:], entry) for name, entry in header.items()}
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CollectionError(f"{path} is damaged: {error}. Remove the folder and collect it again.") from None


def _tensor(data: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    begin, end = entry["data_offsets"]
    return data[begin:end].view(_BY_NAME[entry["dtype"]]).reshape(entry["shape"])


def check_size(path: Path, size: int) -> None:
    """Refuse a part that is not there whole."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise CollectionError(f"{path} is missing: the manifest counts it with {size} bytes") from None
    if found != size:
        raise CollectionError(f"{path} has {found} bytes, and was written with {size}: it was cut off or changed")
