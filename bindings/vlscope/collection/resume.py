"""Where a shard goes on: the manifest that is there, if it is of the same collection, or a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CollectionError
from .dataset import Shard
from .files import check_size, sync_folder
from .manifest import Manifest, SiteRows, differences, part_path, path_of, versions
from .rows import Site

__all__ = ["open_manifest"]


def open_manifest(out: Path, shard: Shard, config: Mapping[str, Any], sites: Sequence[Site]) -> Manifest:
    """The manifest of a shard, on the disk, and beside it no file that it does not name.

    Raises:
        CollectionError: this shard or another in `out` was collected by another configuration; a part is not
            there whole; files of unknown origin are where the parts go.
    """
    path = path_of(out, shard)
    manifest = _begun(out, path, config)
    if manifest is None:
        manifest = Manifest(shard, config, {site.name: SiteRows(site.axes[site.axis], site.row_axes) for site in sites})
        _refuse_files(out, manifest)
    if versions() not in manifest.versions:
        manifest.versions.append(versions())
    _tidy(out, manifest)
    manifest.save(out)
    return manifest


def _begun(out: Path, own: Path, config: Mapping[str, Any]) -> Manifest | None:
    """The shard's manifest if there is one. Its configuration, or else that of another shard, is held
    against the one asked for."""
    others = (path for path in sorted(out.glob("shard-*-of-*.json")) if path != own)
    path = own if own.exists() else next(others, None)
    if path is None:
        return None
    manifest = Manifest.load(path)
    if lines := differences(config, manifest.config):
        raise CollectionError(
            f"{path} is of another collection: {'; '.join(lines)}. Give another folder, or ask for the same."
        )
    return manifest if path == own else None


def _folders(out: Path, manifest: Manifest) -> list[Path]:
    return [part_path(out, site, manifest.shard, "").parent for site in manifest.sites]


def _refuse_files(out: Path, manifest: Manifest) -> None:
    for folder in _folders(out, manifest):
        if folder.exists() and any(folder.iterdir()):
            raise CollectionError(f"{folder} holds files, and no manifest says of what: give another folder")


def _tidy(out: Path, manifest: Manifest) -> None:
    """Check the parts that count, and remove those of a run that ended before its manifest named them."""
    kept = {
        part_path(out, site, manifest.shard, part.name): size
        for part in manifest.parts
        for site, size in part.bytes.items()
    }
    for path, size in kept.items():
        check_size(path, size)
    for folder in _folders(out, manifest):
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        for path in folder.iterdir():
            if path not in kept:
                path.unlink()
