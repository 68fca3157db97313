"""The manifest of a shard: what was collected, from what, and how it is to be read.

A shard's manifest, `OUT/shard-i-of-N.json`, is what makes a part count: the parts of all sites are
written first, then the manifest that names them takes the place of the one before. A run that is
killed leaves a manifest and, beside it, at most files that it does not name.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CollectionError
from .dataset import Shard
from .files import replacing

__all__ = ["FORMAT", "Manifest", "Part", "SiteRows", "Statistics", "find", "versions"]

FORMAT = "vlscope activations 1"
_START = "0" * 64  # digest of no samples
_BLOCK = 1 << 22  # elements that are widened to float64 at a time


@dataclasses.dataclass
class Statistics:
    """Count, mean and variance of rows, element by element, in float64.

    Two sets of rows are combined by Chan, Golub and LeVeque 1983 ("Algorithms for computing the
    sample variance"), equations 2.1:

        mean = mean_a + delta * n_b / n,    M2 = M2_a + M2_b + delta^2 * n_a * n_b / n

    with delta = mean_b - mean_a and variance = M2 / n, which is over all rows (not n - 1).
    """

    count: int
    mean: torch.Tensor
    variance: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor) -> Statistics:
        """The statistics of rows [rows, ...]."""
        zero = torch.zeros(rows.shape[1:], dtype=torch.float64)
        found = cls(0, zero, zero)
        step = max(1, _BLOCK // max(1, zero.numel()))
        for start in range(0, len(rows), step):
            wide = rows[start : start + step].double()
            found = found.merged(cls(len(wide), wide.mean(0), wide.var(0, correction=0)))
        return found

    def merged(self, other: Statistics) -> Statistics:
        """The statistics of both sets of rows."""
        if not self.count or not other.count:
            return other if other.count else self
        count = self.count + other.count
        share = other.count / count
        delta = other.mean - self.mean
        variance = self.variance * (1 - share) + other.variance * share + delta**2 * share * (1 - share)
        return Statistics(count, self.mean + delta * share, variance)


@dataclasses.dataclass
class SiteRows:
    """What a shard holds of one site.

    Attributes:
        axis: what a row is for: "seq" (a token), "patches", "image_tokens", "video_tokens".
        axes: the names of the axes of one row.
        dtype: of the rows as stored, "float16"; None as long as there are none.
        shape: of one row.
        statistics: of the rows as stored; None for integers.
    """

    axis: str
    axes: tuple[str, ...]
    rows: int = 0
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    statistics: Statistics | None = None

    def add(self, rows: torch.Tensor) -> None:
        """Count the rows of one part."""
        self.dtype, self.shape = str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:])
        self.rows += len(rows)
        if rows.is_floating_point():
            new = Statistics.of(rows)
            self.statistics = new if self.statistics is None else self.statistics.merged(new)


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a shard: the same samples of every site.

    Attributes:
        name: of its files, `part-000000.safetensors`.
        first, last: indices of its first and last sample.
        rows, bytes, sha256: by site; a site without rows in these samples has no file.
    """

    name: str
    first: int
    last: int
    rows: Mapping[str, int]
    bytes: Mapping[str, int]
    sha256: Mapping[str, str]


@dataclasses.dataclass
class Manifest:
    """What one shard holds.

    Attributes:
        config: what has to be the same for a run to go on with it.
        sites: by name, in forward order.
        done: samples that are through, the skipped ones among them.
        digest: SHA-256 over these samples, each with those before it.
        skipped: `{"sample": index, "error": message}` each.
        total: samples of the whole dataset; None until the shard is complete.
        versions: of the libraries that wrote it, each set once.
    """

    shard: Shard
    config: Mapping[str, Any]
    sites: dict[str, SiteRows]
    parts: list[Part] = dataclasses.field(default_factory=list)
    done: int = 0
    digest: str = _START
    skipped: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    total: int | None = None
    versions: list[Mapping[str, str]] = dataclasses.field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every sample of the shard is through."""
        return self.total is not None

    @property
    def next(self) -> int:
        """Index of the first sample that is still to be done."""
        return self.shard.index + self.done * self.shard.count

    def save(self, out: Path) -> None:
        """Write it in one step: what reads it sees this one or the one before."""
        text = json.dumps(self._json())
        with replacing(path_of(out, self.shard)) as file:
            file.write(text.encode())

    def _json(self) -> dict[str, Any]:
        found = {"format": FORMAT, "complete": self.complete, **vars(self)}
        found["shard"] = dataclasses.asdict(self.shard)
        found["parts"] = [dataclasses.asdict(part) for part in self.parts]
        found["sites"] = {name: site_json(site) for name, site in self.sites.items()}
        return found

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read one. Raises `CollectionError` for a file that is none."""
        found = read_json(path)
        try:
            found["shard"] = Shard(**found["shard"])
            found["parts"] = [Part(**part) for part in found["parts"]]
            found["sites"] = {name: site_of(entry) for name, entry in found["sites"].items()}
            return cls(**{field.name: found[field.name] for field in dataclasses.fields(cls)})
        except (KeyError, TypeError, AttributeError) as error:
            raise CollectionError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The content of a manifest of this format."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CollectionError(f"{path} is no manifest: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CollectionError(f"{path} is no manifest of a collection: it has no format {FORMAT!r}")
    return found


def site_json(site: SiteRows) -> dict[str, Any]:
    """A site as the manifest has it: mean and variance as lists."""
    found = dict(vars(site))
    statistics = found.pop("statistics")
    if statistics is not None:
        found |= {"mean": statistics.mean.tolist(), "variance": statistics.variance.tolist()}
    return found


def site_of(found: Mapping[str, Any]) -> SiteRows:
    """The inverse of `site_json`."""
    shape = found["shape"]
    site = SiteRows(found["axis"], tuple(found["axes"]), found["rows"], found["dtype"])
    site.shape = None if shape is None else tuple(shape)
    if "mean" in found:
        mean, variance = (torch.tensor(found[name], dtype=torch.float64) for name in ("mean", "variance"))
        site.statistics = Statistics(found["rows"], mean, variance)
    return site


def path_of(out: Path, shard: Shard) -> Path:
    """Where the manifest of a shard lies."""
    return out / f"{shard}.json"


def part_path(out: Path, site: str, shard: Shard, name: str) -> Path:
    """Where the file of a part lies."""
    return out / site / str(shard) / name


def find(out: Path) -> list[Manifest]:
    """The manifests of the shards in a folder, in their order."""
    found = [Manifest.load(path) for path in out.glob("shard-*-of-*.json")]
    return sorted(found, key=lambda manifest: manifest.shard.index)


def differences(here: Mapping[str, Any], there: Mapping[str, Any], prefix: str = "") -> Sequence[str]:
    """What differs between two configurations, a line each."""
    lines: list[str] = []
    for name in dict.fromkeys((*here, *there)):
        mine, theirs = here.get(name), there.get(name)
        if mine == theirs:
            continue
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            lines += differences(mine, theirs, f"{prefix}{name}.")
        else:
            lines.append(f"{prefix}{name} is {mine!r} here and {theirs!r} there")
    return lines


def versions() -> dict[str, str]:
    """The releases of what computes and writes."""
    from .. import __version__

    return {"vlscope": __version__, "torch": torch.__version__, "python": platform.python_version()}
