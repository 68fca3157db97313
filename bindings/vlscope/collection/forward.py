"""One batch: its prompts put together, run to the last site, and its rows taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..sites import read
from .rows import Located, RowIndex, Selection, Site, locate

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

__all__ = ["Rows", "encode", "join", "run"]

Encoding = Mapping[str, torch.Tensor]
Rows = dict[str, tuple[RowIndex, torch.Tensor]]


def encode(model: StandardizedTransformer, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of one prompt, without padding."""
    encoding = dict(model.encode(**arguments))
    ids, mask = encoding["input_ids"], encoding.get("attention_mask")
    if len(ids) != 1:
        raise InputError(f"a sample is one prompt; this one is a batch of {len(ids)}")
    if mask is not None and not mask.all():
        kept = mask[0].nonzero().flatten()
        if not len(kept):
            raise InputError(f"attention_mask is 0 on all {mask.shape[1]} positions: the prompt is empty")
        own = slice(int(kept[0]), int(kept[-1]) + 1)
        encoding |= {"input_ids": ids[:, own], "attention_mask": mask[:, own]}
    return encoding


def join(encodings: Sequence[Encoding]) -> Encoding:
    """Several prompts as one batch, padded on the left."""
    if len(encodings) == 1:
        return encodings[0]
    length = max(encoding["input_ids"].shape[1] for encoding in encodings)
    ids, masks = [], []
    for encoding in encodings:
        row = encoding["input_ids"]
        mask = encoding.get("attention_mask", torch.ones_like(row))
        pads = torch.zeros(1, length - row.shape[1], dtype=torch.long)
        ids.append(torch.cat([pads, row], 1))
        masks.append(torch.cat([pads, mask], 1))
    joined = {"input_ids": torch.cat(ids), "attention_mask": torch.cat(masks)}
    rest = dict.fromkeys(name for encoding in encodings for name in encoding if name not in joined)
    return joined | {name: torch.cat([encoding[name] for encoding in encodings if name in encoding]) for name in rest}


@torch.no_grad()
def run(
    model: StandardizedTransformer,
    batch: Encoding,
    samples: Sequence[int],
    sites: Sequence[Site],
    select: Selection,
    dtype: torch.dtype | None = None,
) -> Rows:
    """The rows that `select` keeps of each site, on the CPU, floating-point ones as `dtype`.

    The forward runs to the last site that has such rows, and not at all if none has.

    Raises:
        InputError: a value beyond what `dtype` can hold, or what the model refuses.
    """
    located = locate(model, batch, samples, select)
    found = {site.name: located(site.stream) for site in sites}
    wanted = [site for site in sites if len(found[site.name])]
    rows: Rows = {}
    if wanted:
        with model.trace(**batch) as tracer:
            for site in wanted:
                rows[site.name] = _taken(site, read(tracer, site.name), found[site.name], dtype)
            tracer.stop()
    return rows


def _taken(site: Site, value: Any, located: Located, dtype: torch.dtype | None) -> tuple[RowIndex, torch.Tensor]:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{site.name} is not one tensor but {type(value).__name__}: it has no rows to collect")
    rows = site.take(value, located).detach()
    if dtype is not None and rows.is_floating_point() and rows.dtype != dtype:
        rows = _converted(rows, dtype, site.name, located.index)
    return located.index, rows.cpu().contiguous()


def _converted(rows: torch.Tensor, dtype: torch.dtype, site: str, index: RowIndex) -> torch.Tensor:
    """Rows in another dtype; refused where a finite number would become infinite."""
    converted = rows.to(dtype)
    lost = (converted.isinf() & rows.isfinite()).reshape(len(rows), -1)
    if lost.any():
        row = int(lost.any(1).nonzero()[0])
        worst = float(rows[row].abs().max())
        raise InputError(
            f"{site} has {worst:.4g} at position {int(index.position[row])}, and {dtype} ends at "
            f"{torch.finfo(dtype).max:.4g}: store bfloat16 or float32"
        )
    return converted
