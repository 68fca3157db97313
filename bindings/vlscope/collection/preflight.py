"""How much a collection will write, told before anything is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import forward
from .dataset import Sample, arguments
from .rows import COLUMNS, Selection, Site, locate

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

__all__ = ["Preflight", "amount"]


class Preflight:
    """Rows and bytes that a sample takes, from its tensors and the shapes of a scan.

    >>> rows, nbytes = Preflight(model, sites, "image", torch.float16).of(samples)
    """

    def __init__(
        self, model: StandardizedTransformer, sites: Sequence[Site], select: Selection, dtype: torch.dtype | None
    ) -> None:
        self._model, self._sites, self._select, self._dtype = model, sites, select, dtype
        self._row_bytes: dict[str, int] = {}

    def of(self, samples: Sequence[Sample]) -> tuple[float, float] | None:
        """The means over some samples; those that cannot be read are left out, None if none can."""
        sizes = [size for sample in samples if (size := self._size(sample)) is not None]
        if not sizes:
            return None
        rows, nbytes = (sum(part) / len(sizes) for part in zip(*sizes, strict=True))
        return rows, nbytes

    def _size(self, sample: Sample) -> tuple[int, int] | None:
        try:
            encoding = forward.encode(self._model, arguments(sample.load()))
            located = locate(self._model, encoding, [sample.index], self._select)
            counts = {site.name: len(located(site.stream)) for site in self._sites}
        except Exception:  # the run itself will say
            return None
        kept = {name: count for name, count in counts.items() if count}
        if not kept.keys() <= self._row_bytes.keys():
            self._scan(encoding, kept)
        return sum(kept.values()), sum(count * self._row_bytes[name] for name, count in kept.items())

    def _scan(self, encoding: Mapping[str, torch.Tensor], names: Mapping[str, Any]) -> None:
        shapes = self._model.scan(**encoding)
        for site in self._sites:
            if site.name in names:
                self._row_bytes[site.name] = self._bytes_of_row(shapes[site.name], site)

    def _bytes_of_row(self, value: torch.Tensor, site: Site) -> int:
        """A row and its columns."""
        batched = value.ndim > len(site.axes)
        elements = (value[0] if batched else value).numel() // value.shape[site.axis + batched]
        stored = self._dtype if self._dtype is not None and value.is_floating_point() else value.dtype
        return elements * stored.itemsize + len(COLUMNS) * 8


def amount(nbytes: float) -> str:
    """Bytes as one reads them: "3.4 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
