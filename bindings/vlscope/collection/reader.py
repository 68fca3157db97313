"""Collected activations as a dataset of torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..errors import InputError
from .dataset import Shard
from .files import check_size, map_tensors
from .manifest import SiteRows, Statistics, part_path
from .merge import combined, opened
from .rows import COLUMNS

__all__ = ["ActivationDataset", "ActivationStream", "Column"]

_OPEN_PARTS = 512  # that are kept mapped
_CHUNK = 1024  # rows that stay together until a pool is shuffled

Rows = Any  # a slice, a sequence of indices, a mask, or a tensor of them


@dataclasses.dataclass(frozen=True)
class _Part:
    """One part of a shard: `rows` of each site, from row `start` of the dataset."""

    shard: Shard
    name: str
    start: int
    rows: int
    bytes: Mapping[str, int]


class ActivationDataset(Dataset[dict[str, torch.Tensor]]):
    """The rows of a collection, mapped from disk: row i is the same row of every site.

    >>> acts = vlscope.ActivationDataset("acts")
    >>> acts[0]["layers.3.layer_output"], acts[0]["position"]
    >>> acts["layers.3.layer_output"][:1000]                        # one column, [1000, hidden_size]
    >>> for batch in acts["layers.3.layer_output"].batches(4096, seed=0): ...   # shuffled, each row once
    >>> loader = DataLoader(acts.stream(4096, seed=0), batch_size=None, num_workers=4)

    It holds what is on disk when it is opened, also of a collection that still runs. It pickles, and so
    works in the workers of a `DataLoader`.

    Args:
        path: the folder that `vlscope.collect` wrote.
        sites: sites to read; by default all, which must have the same rows.

    Attributes:
        path: the folder.
        sites: in forward order.
        columns: names of the columns: the sites, then sample, position, token_id, image, grid_row,
            grid_col (int64, -1 where there is none; see `RowIndex`).
        statistics: `Statistics` by site, of all rows as stored; None for integers.
        complete: whether every sample of every shard is through.

    Raises:
        CollectionError: no collection; shards of two collections; a part that was cut off.
        InputError: sites that it does not hold, or whose rows are not the same.
    """

    def __init__(self, path: str | os.PathLike[str], sites: str | Sequence[str] | None = None) -> None:
        self.path = Path(path)
        manifests = opened(self.path)
        self._sites = _chosen(combined(manifests), sites)
        self.sites = tuple(self._sites)
        self.columns = (*self.sites, *COLUMNS)
        self.statistics: dict[str, Statistics | None] = {name: site.statistics for name, site in self._sites.items()}
        self.complete = len(manifests) == manifests[0].shard.count and all(found.complete for found in manifests)
        self._parts: list[_Part] = []
        start = 0
        for manifest in manifests:
            for part in manifest.parts:
                counts = {part.rows.get(site, 0) for site in self.sites}
                if len(counts) > 1:
                    raise _unaligned(self._sites)
                (rows,) = counts
                if rows:
                    sizes = {site: part.bytes[site] for site in self.sites}
                    self._parts.append(_Part(manifest.shard, part.name, start, rows, sizes))
                    start += rows
        self._count = start
        self._starts = torch.tensor([part.start for part in self._parts], dtype=torch.long)
        for number, held in enumerate(self._parts):
            for site, size in held.bytes.items():
                check_size(self._path(number, site), size)
        self._mapped = functools.lru_cache(_OPEN_PARTS)(self._map)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: str) -> Column: ...
    @overload
    def __getitem__(self, index: Rows) -> dict[str, torch.Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        """A row by its number, rows by a slice, indices or a mask, each as a dict of columns; or a column by name."""
        if isinstance(index, str):
            return Column(self, index)
        return self.take(index, self.columns)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Several rows at once, as a `DataLoader` asks for them."""
        found = self.take(list(indices), self.columns)
        return [{name: column[k] for name, column in found.items()} for k in range(len(indices))]

    def take(self, index: Any, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        """Some rows of some columns, copied from the files."""
        wanted = self._indices(index)
        flat = wanted.reshape(-1)
        owners = torch.searchsorted(self._starts, flat, right=True) - 1
        pieces = []
        for number in sorted(set(owners.tolist())):
            at = (owners == number).nonzero().flatten()
            pieces.append((number, at, flat[at] - self._starts[number]))
        found = {name: self._gathered(name, pieces, len(flat)) for name in columns}
        return {name: rows.reshape([*wanted.shape, *self.shape(name)]) for name, rows in found.items()}

    def shape(self, column: str) -> tuple[int, ...]:
        """Of one row of a column."""
        return (self._site(column).shape or ()) if self._is_site(column) else ()

    def dtype(self, column: str) -> torch.dtype:
        """Of a column as stored."""
        return getattr(torch, self._site(column).dtype or "float32") if self._is_site(column) else torch.int64

    def stream(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        columns: Sequence[str] | None = None,
        pool: int = 64,
        shard: tuple[int, int] = (0, 1),
    ) -> ActivationStream:
        """The rows in batches, for a `DataLoader` with `batch_size=None`; see `ActivationStream`."""
        return ActivationStream(self, batch_size, seed=seed, columns=columns, pool=pool, shard=shard)

    def chunks(self) -> list[tuple[int, int]]:
        """Runs of rows that lie together in one file, as (first, end)."""
        return [
            (first, min(first + _CHUNK, part.start + part.rows))
            for part in self._parts
            for first in range(part.start, part.start + part.rows, _CHUNK)
        ]

    # --- inside ---

    def _is_site(self, column: str) -> bool:
        if column not in self.columns:
            raise InputError(f"there is no column {column!r}; there are {', '.join(self.columns)}")
        return column in self._sites

    def _site(self, column: str) -> SiteRows:
        return self._sites[column]

    def _indices(self, index: Any) -> torch.Tensor:
        """Row numbers counted from the front, in the shape that was asked for."""
        if isinstance(index, slice):
            return torch.arange(*index.indices(self._count))
        found = torch.as_tensor(index)
        if found.dtype == torch.bool:
            if found.shape != (self._count,):
                raise InputError(f"a mask of {list(found.shape)} was given for {self._count} rows")
            return found.nonzero().flatten()
        if not found.numel():
            return torch.empty(0, dtype=torch.long)
        if found.is_floating_point():
            raise InputError(f"rows are asked for by integers, a slice or a mask, and {found.dtype} was given")
        wrong = (found < -self._count) | (found >= self._count)
        if wrong.any():
            raise IndexError(f"row {int(found[wrong][0])}: there are {self._count}, 0 to {self._count - 1}")
        return found.long() % self._count

    def _gathered(self, name: str, pieces: Sequence[Any], count: int) -> torch.Tensor:
        found = torch.empty(count, *self.shape(name), dtype=self.dtype(name))
        site, tensor = (name, "rows") if self._is_site(name) else (self.sites[0], name)
        for number, at, rows in pieces:
            found[at] = self._mapped(number, site)[tensor][rows]
        return found

    def _path(self, number: int, site: str) -> Path:
        part = self._parts[number]
        return part_path(self.path, site, part.shard, part.name)

    def _map(self, number: int, site: str) -> dict[str, torch.Tensor]:
        return map_tensors(self._path(number, site), self._parts[number].bytes[site])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_mapped"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._mapped = functools.lru_cache(_OPEN_PARTS)(self._map)

    def __repr__(self) -> str:
        return f"<ActivationDataset of {self._count:,} rows: {', '.join(self.sites)}>"


def _chosen(held: Mapping[str, SiteRows], sites: str | Sequence[str] | None) -> dict[str, SiteRows]:
    """The sites to read, which are of one kind."""
    wanted = list(held) if sites is None else [sites] if isinstance(sites, str) else list(sites)
    for name in wanted:
        if name not in held:
            raise InputError(f"{name!r} was not collected; there are {', '.join(held)}")
    chosen = {name: site for name, site in held.items() if name in wanted}
    if not chosen:
        raise InputError(f"sites is empty; there are {', '.join(held)}")
    if len({(site.axis == "patches", site.rows) for site in chosen.values()}) > 1:
        raise _unaligned(chosen)
    return chosen


def _unaligned(sites: Mapping[str, SiteRows]) -> InputError:
    listed = ", ".join(f"{name} ({site.rows} rows along {site.axis})" for name, site in sites.items())
    return InputError(f"the rows of these sites are not the same; open one with sites=: {listed}")


class Column:
    """One column of a dataset: indexed like a tensor [rows, ...], read from the files when it is.

    >>> column = acts["layers.3.layer_output"]
    >>> column.shape, column.dtype, column[-1], column[:4096]
    """

    def __init__(self, dataset: ActivationDataset, name: str) -> None:
        self._dataset, self.name = dataset, name
        self.shape = torch.Size([len(dataset), *dataset.shape(name)])
        self.dtype = dataset.dtype(name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._dataset.take(index, [self.name])[self.name]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for first, end in self._dataset.chunks():
            yield from self[first:end]

    def batches(
        self, batch_size: int, *, seed: int | None = None, epochs: int | None = 1, pool: int = 64
    ) -> Iterator[torch.Tensor]:
        """Batches [batch, ...] of the column: with a `seed` shuffled, anew in each epoch; `epochs=None`
        goes on for ever, as what trains a sparse autoencoder takes it."""
        stream = self._dataset.stream(batch_size, seed=seed, columns=[self.name], pool=pool)
        for epoch in itertools.count() if epochs is None else range(epochs):
            stream.set_epoch(epoch)
            for batch in stream:
                yield batch[self.name]

    def __repr__(self) -> str:
        return f"<Column {self.name} {list(self.shape)} {self.dtype}>"


class ActivationStream(IterableDataset[dict[str, torch.Tensor]]):
    """The rows of a dataset in batches, each row once an epoch over all workers and shards.

    With a `seed` they are shuffled: runs of 1,024 rows that lie together are put in a random order, and
    the rows of `pool` such runs mixed at a time, so that reading stays local on the disk. Workers of a
    `DataLoader` and `shard` (i, N), as of a process of N that train together, take every Nth run. The last
    batch of each is smaller. The order follows from seed, epoch and the number of workers alone.

    Args:
        dataset: what to read.
        batch_size: rows to a batch.
        seed: None reads in the order of the files.
        columns: by default all.
        pool: runs that are mixed at a time.
        shard: (i, N).
    """

    def __init__(
        self,
        dataset: ActivationDataset,
        batch_size: int,
        *,
        seed: int | None = None,
        columns: Sequence[str] | None = None,
        pool: int = 64,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        if batch_size < 1 or pool < 1:
            raise InputError(f"batch_size is {batch_size} and pool {pool}; give 1 or more of each")
        self._dataset, self._batch_size, self._seed, self._pool = dataset, batch_size, seed, pool
        self._columns = dataset.columns if columns is None else tuple(columns)
        self._shard = Shard.of(shard)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it before the `DataLoader` starts its workers."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        left = torch.empty(0, dtype=torch.long)
        for pool in self._pools():
            left = torch.cat([left, pool])
            while len(left) >= self._batch_size:
                yield self._dataset.take(left[: self._batch_size], self._columns)
                left = left[self._batch_size :]
        if len(left):
            yield self._dataset.take(left, self._columns)

    def _pools(self) -> Iterator[torch.Tensor]:
        """The rows of this worker, a pool of runs at a time."""
        random = None if self._seed is None else np.random.default_rng([self._seed, self._epoch])
        runs = self._dataset.chunks()
        if random is not None:
            random.shuffle(runs)
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        own = runs[self._shard.index * count + index :: self._shard.count * count]
        for start in range(0, len(own), self._pool):
            pool = torch.cat([torch.arange(first, end) for first, end in own[start : start + self._pool]])
            yield pool if random is None else pool[torch.from_numpy(random.permutation(len(pool)))]
