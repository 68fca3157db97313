"""Sweeps over the rows that an edit can reach, with many edits in one forward.

Attention is causal, so an edit at position p leaves all rows before p as they were. Each forward here is a
tail of the recorded prompt (`Recording.tail`): from the block of the edit on, from the first edited position
on, with a copy for each edit.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..recording import Recording
from ..sites import dims, read, write
from .edits import fitting

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

_BLOCK = re.compile(r"layers\.\d+\.")
_ROWS = 2048  # of all copies of a forward: enough to fill a matrix product, and few to hold
_COPIES = 64


@dataclasses.dataclass(frozen=True)
class Columns:
    """What a sweep changes at one site at a time: indices along an axis of its value."""

    indices: Sequence[tuple[int, ...]]
    where: int  # the axis
    along_positions: bool  # of the prompt's tokens


def reaches_rows_alone(model: StandardizedTransformer, sites: Sequence[str]) -> bool:
    """True if edits of all these sites can be run on the tail of a recording: values of text blocks with
    a row for each prompt. Edits that the model keeps are of whole prompts."""
    return not model.edits and all(_BLOCK.match(site) and dims(model, site)[0] == "batch" for site in sites)


def carries_state(model: StandardizedTransformer) -> bool:
    """True if blocks pass a state from token to token, so that a forward begins at position 0."""
    return any("linear_attn" in block._names() for block in model.layers)


def run_affected(
    model: StandardizedTransformer,
    recorded: Recording,
    site: str,
    donor: torch.Tensor,
    columns: Columns,
    measure: Callable[[torch.Tensor], torch.Tensor],
    needs: Mapping[str, int],
    before: torch.Tensor | None,
) -> Iterator[tuple[int, float]]:
    """The metric for each column, with its number.

    Args:
        donor: what is put in place of the site's value, in its whole shape.
        needs: arguments of the traces that the metric measures.
        before: the logits [1, seq, vocab_size] of the run without a change, which the rows before an
            edit keep; None where the metric reads the last one alone.
    """
    length = recorded.inputs["input_ids"].shape[1]
    cut = columns.along_positions and not carries_state(model)
    for group, first in _groups(columns.indices, length, cut):
        with model.trace(recorded.tail(first, len(group)), **needs):
            value = read(model, site).clone()
            offset = donor.shape[columns.where] - value.shape[columns.where]
            for copy, column in enumerate(group):
                index = torch.tensor(columns.indices[column])
                new = donor.select(0, 0).index_select(columns.where - 1, index)
                value[copy].index_copy_(columns.where - 1, index - offset, new.to(value))
            write(model, site, value)
            logits = model.logits
        for copy, column in enumerate(group):
            own = logits[copy : copy + 1]
            whole = own if before is None else torch.cat([before[:, :first], own], 1)
            yield column, measure(whole).item()


def whole(value: torch.Tensor, shape: torch.Size, site: str) -> torch.Tensor:
    """A replacement in the shape that it takes the place of; axes of length 1 are repeated."""
    return fitting(value, torch.empty(shape, dtype=value.dtype), site).expand(shape)


def _groups(indices: Sequence[tuple[int, ...]], length: int, cut: bool) -> Iterator[tuple[list[int], int]]:
    """The columns that share a forward, and the position where it begins."""
    first = [min(column) if cut else 0 for column in indices]
    order = sorted(range(len(indices)), key=first.__getitem__)
    while order:
        start = first[order[0]]
        count = max(1, min(_COPIES, _ROWS // (length - start)))
        yield order[:count], start
        order = order[count:]
