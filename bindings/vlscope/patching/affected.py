"""Sweeps over the rows that an edit can reach, with many edits in one forward.

Attention is causal, so an edit at position p leaves all rows before p as they were. Each forward here is a
tail of the recorded prompt (`Recording.tail`): from the block of the edit on, from the first edited position
on, with a copy for each edit.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..recording import Recording
from ..sites import dims, read, write
from .edits import fitting

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

_BLOCK = re.compile(r"layers\.\d+\.")
_ROWS = 2048  # of all copies of a forward: enough to fill a matrix product, and few to hold
_COPIES = 64


class Measure(Protocol):
    """A metric of the logits [1, rows, vocab_size], and the arguments of the traces that it measures."""

    needs: Mapping[str, Any]

    def of(self, logits: torch.Tensor) -> torch.Tensor: ...


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


@dataclasses.dataclass(frozen=True)
class Tails:
    """The forwards of a sweep over affected rows.

    Attributes:
        recorded: the run without a change, with its keys.
        before: the logits [1, seq, vocab_size] of that run, which the rows before an edit keep; None
            where the metric reads the last one alone.
    """

    model: StandardizedTransformer
    recorded: Recording
    columns: Columns
    measure: Measure
    before: torch.Tensor | None

    def cells(self, site: str, donor: torch.Tensor) -> Iterator[tuple[int, float]]:
        """The number of each column, and the metric with `donor`, a value of the site's whole shape, there."""
        length = self.recorded.inputs["input_ids"].shape[1]
        cut = self.columns.along_positions and not carries_state(self.model)
        for group, first in _groups(self.columns.indices, length, cut):
            with self.model.trace(self.recorded.tail(first, len(group)), **self.measure.needs):
                self._put(site, donor, [self.columns.indices[column] for column in group])
                logits = self.model.logits
            for copy, column in enumerate(group):
                own = logits[copy : copy + 1]
                all_rows = own if self.before is None else torch.cat([self.before[:, :first], own], 1)
                yield column, self.measure.of(all_rows).item()

    def _put(self, site: str, donor: torch.Tensor, edits: Sequence[tuple[int, ...]]) -> None:
        """In each copy, the donor's elements at the indices of one edit. The tail may lack the first of them."""
        value, axis = read(self.model, site).clone(), self.columns.where - 1
        donor = donor.to(value)
        offset = donor.shape[axis + 1] - value.shape[axis + 1]
        for copy, indices in enumerate(edits):
            index = torch.tensor(indices, device=value.device)
            value[copy].index_copy_(axis, index - offset, donor[0].index_select(axis, index))
        write(self.model, site, value)


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
