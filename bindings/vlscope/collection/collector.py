"""Collection: many prompts run, rows of some values kept on disk."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CollectionError, InputError, VlscopeError
from . import forward
from .dataset import Sample, Shard, Source, arguments, chain, open_source
from .files import exclusive
from .identity import model_identity
from .manifest import Manifest
from .preflight import Preflight, amount
from .resume import open_manifest
from .rows import Selection, Site, check_rows, describe_rows, resolve
from .writer import Draft, PartWriter

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

__all__ = ["Collected", "Options", "collect", "collect_shard"]

PART_BYTES = 64 << 20
PART_SECONDS = 60.0  # a part is also closed after this long, so that a kill costs no more
_PREFLIGHT = 4  # samples that the size on disk is estimated from
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Collected:
    """What is on disk after a run of one shard.

    Attributes:
        out: the folder.
        shard: (i, N).
        samples: samples that are through, the skipped ones among them.
        rows: by site.
        skipped: (index, message) of samples that failed under on_error="skip".
    """

    out: Path
    shard: tuple[int, int]
    samples: int
    rows: Mapping[str, int]
    skipped: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, out: Path, manifest: Manifest) -> Collected:
        """What a manifest says."""
        return cls(
            out,
            (manifest.shard.index, manifest.shard.count),
            manifest.done,
            {name: site.rows for name, site in manifest.sites.items()},
            tuple((entry["sample"], entry["error"]) for entry in manifest.skipped),
        )


def collect(
    model: StandardizedTransformer,
    dataset: Any,
    sites: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    rows: Selection = "all",
    dtype: torch.dtype | str | None = None,
    batch_size: int = 1,
    shard: str | Sequence[int] = (0, 1),
    on_error: str = "stop",
    part_bytes: int = PART_BYTES,
    backend: str = "local",
    shards: int | None = None,
    ray_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Any:
    """Run every sample of a dataset and keep rows of some values in a folder.

    >>> vlscope.collect(model, "prompts.jsonl", ["layers.3.layer_output"], "acts", rows="image", dtype=torch.float16)

    The same call again goes on where the last one ended, however it ended. A row is what a value has
    for one token, or for one patch in the vision tower; the forward runs to the last site. What is
    stored does not depend on `batch_size`, but for the last bits of the numbers.

    Args:
        dataset: a JSONL file, a Hugging Face dataset, or an iterable of prompts, encodings and mappings
            `{"prompt": ..., "images": [...]}` or `{"messages": [...]}`. One that cannot be read by
            index is read from its beginning, and must then give the same samples in each run.
        sites: patterns, as in `vlscope.sites`.
        out: a folder; it is made. `vlscope.ActivationDataset` reads it.
        rows: "all", without padding; "image" or "text", those of image (and video) tokens or the
            others; "last", each prompt's last; or a function of a `RowIndex`, all rows of one prompt, that
            gives a mask or indices of them.
        dtype: what floating-point rows are stored as; as computed by default.
        batch_size: prompts to a forward.
        shard: "i/N" or (i, N): the samples k with k mod N = i, for one process of N on the same `out`.
        on_error: "stop" at a sample that cannot be run, with all before it stored; or "skip" it, and list
            it in the manifest.
        part_bytes: bytes that are gathered in memory before they are written, as one file a site. About
            three times that much is held.
        backend: "local", or "ray": `shards` tasks on the Ray cluster that is connected or that RAY_ADDRESS
            names. A task loads the model on its node; `out` and files have to be there on all nodes.
        shards: of backend="ray": as many as GPUs for a model on one, else as nodes, by default.
        ray_options: of the tasks, as in `{"num_cpus": 8}`.
        progress: the size on disk on stderr beforehand, and a progress bar on a terminal.

    Returns:
        `Collected`; with backend="ray" a list of them, one for each shard.

    Raises:
        UnknownSite, Unavailable, InputError: for what cannot be collected, before any compute.
        CollectionError: `out` holds another collection; another process is at the same shard; a sample failed
            under on_error="stop".
        OSError: what the disk refuses. What was stored before stays good.
    """
    options = Options(_sites(sites), rows, _stored_dtype(dtype), batch_size, on_error, part_bytes, progress)
    options.check()
    if backend == "local":
        return collect_shard(model, dataset, Path(out), Shard.of(shard), options)
    if backend != "ray":
        raise InputError(f'backend is {backend!r}; give "local" or "ray"')
    if tuple(shard) != (0, 1):
        raise InputError('shard is for backend="local"; with backend="ray" give the number of shards, shards=N')
    from .cluster import collect_on_ray

    return collect_on_ray(model, dataset, Path(out), shards, options, ray_options or {})


def _sites(sites: str | Sequence[str]) -> tuple[str, ...]:
    return (sites,) if isinstance(sites, str) else tuple(sites)


def _stored_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    known = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if known is not None and known not in _DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise InputError(f"dtype is {dtype!r}; rows are stored as {names}, or as computed")
    return known


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `collect` that every shard is given."""

    sites: tuple[str, ...]
    rows: Selection
    dtype: torch.dtype | None
    batch_size: int
    on_error: str
    part_bytes: int
    progress: bool

    def check(self) -> None:
        if not self.sites:
            raise InputError("sites is empty: give at least one")
        for name in ("batch_size", "part_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; give 1 or more")
        if self.on_error not in ("stop", "skip"):
            raise InputError(f'on_error is {self.on_error!r}; give "stop" or "skip"')


def collect_shard(model: StandardizedTransformer, dataset: Any, out: Path, shard: Shard, options: Options) -> Collected:
    """One shard, in this process."""
    sites = resolve(model, options.sites)
    check_rows(options.rows, sites)
    source = open_source(dataset)
    model.dispatch()  # the stored dtype is known from then on
    config = _config(model, source, sites, shard, options)
    out.mkdir(parents=True, exist_ok=True)
    with exclusive(out / f".{shard}.lock", f"{shard} of {out}"):
        manifest = open_manifest(out, shard, config, sites)
        _Run(model, source, out, manifest, sites, options).run()
    return Collected.of(out, manifest)


def _config(
    model: StandardizedTransformer, source: Source, sites: Sequence[Site], shard: Shard, options: Options
) -> Mapping[str, Any]:
    """What has to be the same for a run to go on with a shard, or to belong beside it."""
    config = {
        "model": model_identity(model),
        "data": source.identity,
        "sites": [site.name for site in sites],
        "rows": describe_rows(options.rows),
        "dtype": None if options.dtype is None else str(options.dtype).removeprefix("torch."),
        "shards": shard.count,
    }
    return json.loads(json.dumps(config))


@dataclasses.dataclass
class _Run:
    """The loop over the samples of a shard."""

    model: StandardizedTransformer
    source: Source
    out: Path
    manifest: Manifest
    sites: Sequence[Site]
    options: Options

    def __post_init__(self) -> None:
        self.draft = Draft(self.manifest.digest)
        self.draft_since = time.monotonic()
        self.through, self.rows = self.manifest.done, 0

    def run(self) -> None:
        samples = self._left()
        first: list[Sample] = []
        if self.options.progress:
            # What has no indices may fail as it is read on: then nothing is to be lost that came before.
            first = list(itertools.islice(samples, _PREFLIGHT if self.source.count is not None else 1))
        if first:
            print(self._preflight(first), file=sys.stderr)
        failure = None
        with PartWriter(self.out, self.manifest) as writer, self._bar() as bar:
            try:
                for batch in self._batches(itertools.chain(first, samples)):
                    self._take(batch)
                    bar.show(self.through, self.rows)
                    self._close_part(writer)
                self.draft.total = self.source.count
            except Exception as error:
                failure = error
            writer.put(self.draft)  # of whole samples, also after a failure
        if failure is not None:
            raise failure from failure.__cause__

    def _left(self) -> Iterator[Sample]:
        """The samples that are still to be done, once those that are done were seen to be the same."""
        samples = self.source.samples(self.manifest.shard)
        skipped = {entry["sample"] for entry in self.manifest.skipped}
        digest, count = Manifest.digest, 0
        for sample in itertools.islice(samples, self.manifest.done):
            digest = chain(digest, sample, sample.index in skipped)
            count += 1
        if digest != self.manifest.digest:
            raise CollectionError(
                f"{self.out} holds {self.manifest.done} samples of {self.manifest.shard}, and those of this dataset "
                f"({count} so far) are not the same. Give the dataset that it was begun with, or another folder."
            )
        return samples

    def _batches(self, samples: Iterator[Sample]) -> Iterator[list[tuple[Sample, forward.Encoding]]]:
        """Samples and their tensors. One that cannot be read ends the batch before it, so that all are in order."""
        batch: list[tuple[Sample, forward.Encoding]] = []
        for sample in samples:
            try:
                encoding = forward.encode(self.model, arguments(sample.load()))
            except Exception as error:  # whatever a dataset or a decoder raises
                yield batch
                batch = []
                self._fail(sample, error)
                yield batch
                continue
            batch.append((sample, encoding))
            if len(batch) == self.options.batch_size:
                yield batch
                batch = []
        yield batch

    def _take(self, batch: Sequence[tuple[Sample, forward.Encoding]]) -> None:
        """Run a batch and put its rows into the part in work. If it fails, its samples are run one by one:
        the others are not to be lost, and the message is to name the one."""
        if not batch:
            return
        samples, encodings = zip(*batch, strict=True)
        indices = [sample.index for sample in samples]
        try:
            found = forward.run(
                self.model, forward.join(encodings), indices, self.sites, self.options.rows, self.options.dtype
            )
        except VlscopeError as error:
            if len(batch) == 1:
                self._fail(samples[0], error)
            else:
                for one in batch:
                    self._take([one])
            return
        for site, (index, rows) in found.items():
            self.draft.add(site, index, rows)
            self.rows += len(rows)
        self.draft.samples += indices
        for sample in samples:
            self._count(sample, skipped=False)

    def _fail(self, sample: Sample, error: Exception) -> None:
        if self.options.on_error == "stop":
            raise CollectionError(
                f"sample {sample.index}: {error}. The samples before it are stored; mend it and run the same again, or "
                'pass over such samples with on_error="skip".'
            ) from error
        self.draft.skipped.append({"sample": sample.index, "error": f"{type(error).__name__}: {error}"})
        self._count(sample, skipped=True)

    def _count(self, sample: Sample, skipped: bool) -> None:
        self.draft.digest = chain(self.draft.digest, sample, skipped)
        self.through += 1

    def _close_part(self, writer: PartWriter) -> None:
        late = time.monotonic() - self.draft_since > PART_SECONDS
        if self.draft.nbytes >= self.options.part_bytes or (late and self.draft.samples):
            writer.put(self.draft)
            self.draft = Draft(self.draft.digest)
            self.draft_since = time.monotonic()

    # --- what is told ---

    def _own(self) -> int | None:
        """Samples of the shard, if that is known."""
        return None if self.source.count is None else self.manifest.shard.samples(self.source.count)

    def _bar(self) -> _Bar:
        return _Bar(self._own(), self.manifest.done, self.options.progress)

    def _preflight(self, samples: Sequence[Sample]) -> str:
        """The size on disk, from a few samples."""
        size = Preflight(self.model, self.sites, self.options.rows, self.options.dtype).of(samples)
        if size is None:
            return f"{self.out}: the first {len(samples)} samples cannot be read; the size is not known"
        rows, nbytes = size
        own = self._own()
        free = amount(shutil.disk_usage(self.out).free)
        if own is None:
            return f"{self.out}: about {rows:,.0f} rows and {amount(nbytes)} a sample; {free} are free"
        left = own - self.manifest.done
        return (
            f"{self.out}: {left:,} of {own:,} samples to do, about {rows * left:,.0f} rows and "
            f"{amount(nbytes * left)}; {free} are free"
        )


class _Bar:
    """A progress bar over samples, with rows a second and the time left."""

    def __init__(self, total: int | None, done: int, shown: bool) -> None:
        from tqdm import tqdm

        quiet = None if shown else True  # None: shown on a terminal
        self._bar = tqdm(total=total, initial=done, unit="sample", disable=quiet, leave=False)
        self._started = time.monotonic()

    def show(self, through: int, rows: int) -> None:
        """`through` samples of the shard are done; `rows` were taken by this run."""
        rate = rows / max(1e-9, time.monotonic() - self._started)
        self._bar.set_postfix_str(f"{rate:,.0f} rows/s", refresh=False)
        self._bar.update(through - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *left: object) -> None:
        self._bar.close()
