"""Parts: rows are gathered in memory, and written by a thread while the model computes the next ones."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .files import write_tensors
from .manifest import Manifest, Part, part_path
from .rows import COLUMNS, RowIndex

__all__ = ["Draft", "PartWriter"]


@dataclasses.dataclass
class Draft:
    """A part in work: what its samples gave so far.

    Attributes:
        digest: that of the manifest once these samples are in it.
        pieces: for each site rows and where they come from, in the order of the samples.
        nbytes: of all rows and columns.
        total: samples of the whole dataset, in the last part of a shard.
    """

    digest: str
    samples: list[int] = dataclasses.field(default_factory=list)
    skipped: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    pieces: dict[str, list[tuple[RowIndex, torch.Tensor]]] = dataclasses.field(default_factory=dict)
    nbytes: int = 0
    total: int | None = None

    def add(self, site: str, index: RowIndex, rows: torch.Tensor) -> None:
        """Take the rows of one batch."""
        if len(index):
            self.pieces.setdefault(site, []).append((index, rows))
            self.nbytes += rows.nbytes + len(COLUMNS) * 8 * len(index)


class PartWriter:
    """Writes drafts as parts, one after the other, in a thread of its own.

    At most one draft waits while another is written, so that memory is bounded by three. As a context
    manager it has written everything on leaving the block; left by an exception, only what it was at.
    """

    def __init__(self, out: Path, manifest: Manifest) -> None:
        self._out, self._manifest = out, manifest
        self._queue: queue.Queue[Draft | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vlscope part writer", daemon=True)

    def put(self, draft: Draft) -> None:
        """Hand a draft over; waits for the one before. Raises what writing raised."""
        while self._thread.is_alive():
            try:
                self._queue.put(draft, timeout=0.1)
                return
            except queue.Full:
                continue
        self._raise()

    def __enter__(self) -> PartWriter:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._abandoned.set()
        while self._thread.is_alive():
            try:
                self._queue.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._thread.join()
        if kind is None:
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (draft := self._queue.get()) is not None:
                if self._abandoned.is_set():
                    return
                self._write(draft)
        except BaseException as error:  # handed to the thread that computes
            self._error = error

    def _write(self, draft: Draft) -> None:
        """The files of a part, then the manifest that makes them count."""
        manifest = self._manifest
        name = f"part-{len(manifest.parts):06d}.safetensors"
        rows, sizes, hashes = {}, {}, {}
        for site in list(draft.pieces):
            if self._abandoned.is_set():
                return
            tensors = _joined(draft.pieces.pop(site))  # dropped when written
            path = part_path(self._out, site, manifest.shard, name)
            sizes[site], hashes[site] = write_tensors(path, tensors)
            rows[site] = len(tensors["rows"])
            manifest.sites[site].add(tensors["rows"])
        if draft.samples:
            manifest.parts.append(Part(name, draft.samples[0], draft.samples[-1], rows, sizes, hashes))
        manifest.skipped += draft.skipped
        manifest.done += len(draft.samples) + len(draft.skipped)
        manifest.digest, manifest.total = draft.digest, draft.total
        manifest.save(self._out)


def _joined(pieces: Sequence[tuple[RowIndex, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of a part; the columns first, which are the wider ones, so that all are aligned."""
    columns = {name: torch.cat([getattr(index, name) for index, _ in pieces]) for name in COLUMNS}
    return {**columns, "rows": torch.cat([rows for _, rows in pieces])}
