"""The shards of a collection as one: whether they are all there, and their statistics together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CollectionError
from .files import check_size, replacing
from .manifest import FORMAT, Manifest, SiteRows, Statistics, differences, find, part_path, path_of, site_json

__all__ = ["Merged", "combined", "merge", "opened"]

_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Merged:
    """A whole collection.

    Attributes:
        out: its folder.
        samples: of the dataset, the skipped ones among them.
        rows: by site.
        statistics: of the rows of each site; see `Statistics`.
        skipped: (index, message) of the samples that were passed over.
    """

    out: Path
    samples: int
    rows: Mapping[str, int]
    statistics: Mapping[str, Statistics | None]
    skipped: tuple[tuple[int, str], ...]


def merge(out: str | os.PathLike[str], *, hashes: bool = False) -> Merged:
    """Check that a collection is whole, and write `OUT/manifest.json` with its statistics.

    Every shard is there and complete, all are of one configuration and dataset, and every part is there
    with its size; with `hashes`, every byte of them is read and compared with the hash taken when it
    was written.

    Raises:
        CollectionError: naming the shards or the file at fault.
    """
    out = Path(out)
    manifests = opened(out)
    total = _check_coverage(out, manifests)
    for manifest in manifests:
        _check_parts(out, manifest, hashes)
    sites = combined(manifests)
    skipped = sorted((entry for manifest in manifests for entry in manifest.skipped), key=lambda entry: entry["sample"])
    found: dict[str, Any] = {
        "format": FORMAT,
        "complete": True,
        "samples": total,
        "config": manifests[0].config,
        "sites": {name: site_json(site) for name, site in sites.items()},
        "skipped": skipped,
        "shards": [path_of(out, manifest.shard).name for manifest in manifests],
    }
    with replacing(out / "manifest.json") as file:
        file.write(json.dumps(found).encode())
    return Merged(
        out,
        total,
        {name: site.rows for name, site in sites.items()},
        {name: site.statistics for name, site in sites.items()},
        tuple((entry["sample"], entry["error"]) for entry in skipped),
    )


def opened(out: Path) -> list[Manifest]:
    """The manifests of a folder, which are of one collection."""
    manifests = find(out)
    if not manifests:
        raise CollectionError(f"{out} holds no collection: there is no manifest shard-i-of-N.json in it")
    first = manifests[0]
    for manifest in manifests[1:]:
        if lines := differences(manifest.config, first.config):
            raise CollectionError(
                f"{path_of(out, manifest.shard)} and {path_of(out, first.shard)} are of two collections: "
                f"{'; '.join(lines)}"
            )
    return manifests


def combined(manifests: Sequence[Manifest]) -> dict[str, SiteRows]:
    """The sites of several shards as those of one."""
    found: dict[str, SiteRows] = {}
    for manifest in manifests:
        for name, site in manifest.sites.items():
            if name not in found or not found[name].rows:
                found[name] = dataclasses.replace(site)
            elif site.rows:
                own = found[name]
                own.rows += site.rows
                if own.statistics is not None and site.statistics is not None:
                    own.statistics = own.statistics.merged(site.statistics)
    return found


def _check_coverage(out: Path, manifests: Sequence[Manifest]) -> int:
    """The number of samples, if every one of them is in a shard."""
    count = manifests[0].shard.count
    missing = sorted(set(range(count)) - {manifest.shard.index for manifest in manifests})
    if missing:
        raise CollectionError(
            f"{out} lacks {len(missing)} of {count} shards: {', '.join(f'{i}/{count}' for i in missing)}"
        )
    for manifest in manifests:
        if not manifest.complete:
            raise CollectionError(
                f"{manifest.shard} of {out} is not complete: {manifest.done} of its samples are done. Run it again."
            )
    totals = {manifest.total for manifest in manifests if manifest.total is not None}
    if len(totals) != 1:
        raise CollectionError(f"the shards of {out} saw datasets of {' and '.join(map(str, sorted(totals)))} samples")
    (total,) = totals
    for manifest in manifests:
        expected = manifest.shard.samples(total)
        if manifest.done != expected:
            raise CollectionError(f"{manifest.shard} of {out} has {manifest.done} samples, and {expected} are its own")
    return total


def _check_parts(out: Path, manifest: Manifest, hashes: bool) -> None:
    for part in manifest.parts:
        for site, size in part.bytes.items():
            path = part_path(out, site, manifest.shard, part.name)
            check_size(path, size)
            if hashes and _sha256(path) != part.sha256[site]:
                raise CollectionError(f"{path} is not what was written: its SHA-256 is not {part.sha256[site]}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
