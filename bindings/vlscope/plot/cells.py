"""Heat maps: one number for each row, as a block, and column, as a position with its token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from .drawing import SCALES, SMALL, TITLE, Canvas, bar, canvas, norm, written

if TYPE_CHECKING:
    from ..patching import Cells

_CELL = (0.34, 0.26)  # inches
_SMALLEST, _WIDEST, _HIGHEST = 2.4, 14.0, 9.0  # inches
_LINE = 0.15  # inches from a label to the next
_RUN = 3  # so many equal tokens in a row have one label


def heat_map(
    values: Any,
    rows: Sequence[Any],
    columns: Sequence[Any],
    *,
    scale: str | None = None,
    limit: float | None = None,
    label: str = "",
    row_label: str = "block",
    column_label: str = "",
    title: str = "",
    figure: Canvas | None = None,
) -> Canvas:
    """A heat map with labels, the first row on top.

    >>> vlscope.plot.heat_map(norms, rows=range(model.num_layers), columns=tokens, label="norm")

    Args:
        values: [rows, columns].
        rows, columns: their labels, such as blocks and tokens. A run of one token, as an image's, is
            labelled once.
        scale: what the numbers are: a "share" of one, an "amount" from zero, or "signed"; by default
            an amount, or signed if one is negative.
        limit: the number of the strongest colour; by default the largest.
        label: of the colours.

    Raises:
        InputError: nothing to draw, or another number of labels than of rows or columns.
    """
    table = torch.as_tensor(values).detach().float().cpu()
    if not table.numel() or table.shape != (len(rows), len(columns)):
        raise InputError(f"the values have shape {list(table.shape)}; the labels ask for {[len(rows), len(columns)]}")
    kind = scale or ("signed" if bool((table < 0).any()) else "amount")
    texts = [str(column) for column in columns]
    width = min(_WIDEST, max(_SMALLEST, _CELL[0] * len(columns)))
    height = min(_HIGHEST, max(1.0, _CELL[1] * len(rows)))
    beside, below = 1.4, 0.9 + 0.07 * max(map(len, texts))  # the bar; the labels of the columns
    figure = canvas(figure, (width + beside, height + below))
    width, height = figure.bbox.width / figure.dpi - beside, figure.bbox.height / figure.dpi - below
    axes = figure.subplots()
    limits = norm(kind, [table.numpy()], limit)
    drawn = axes.imshow(table.numpy(), cmap=SCALES[kind], norm=limits, aspect="auto", interpolation="nearest")
    bar(figure, drawn, axes, label)
    across, down = (_apart(side, count) for side, count in ((width, len(columns)), (height, len(rows))))
    axes.set_yticks(*zip(*_spaced(((k, str(row)) for k, row in enumerate(rows)), down)))
    places, names = zip(*_spaced(_runs(texts), across))
    axes.set_xticks(places, names, rotation=90 if max(map(len, names)) > 2 else 0)
    axes.tick_params(labelsize=SMALL, length=0)
    axes.set_ylabel(row_label, fontsize=SMALL)
    axes.set_xlabel(column_label, fontsize=SMALL)
    axes.spines[:].set(color="0.7", linewidth=0.5)
    axes.set_title(title, fontsize=TITLE)
    return figure


def draw_cells(cells: Cells, figure: Canvas | None = None) -> Canvas:
    """`Cells.plot`."""
    known = cells.clean is not None and cells.clean != cells.corrupted
    label = f"change of the metric, from {cells.corrupted:.3g}"
    if known:
        label = f"recovered: 0 is {cells.corrupted:.3g}, 1 is {cells.clean:.3g}"
    names = {site.replace(f"layers.{layer}.", "layers.*.") for site, layer in zip(cells.sites, cells.layers)}
    below = len(names) == 1 and None not in cells.layers
    return heat_map(
        cells.recovered if known else cells.effects,
        rows=cells.layers if below else cells.sites,
        columns=cells.tokens,
        scale="signed",
        limit=max(1.0, float(cells.recovered.abs().max())) if known else None,
        label=label,
        row_label="block" if below else "",
        column_label="" if cells.axis in ("seq", "query") else cells.axis,
        title=names.pop() if below else "",
        figure=figure,
    )


def _apart(inches: float, count: int) -> float:
    """How many cells two labels have to be apart to be read, in a side of so many cells."""
    return _LINE * count / max(inches, _LINE)


def _spaced(labels: Iterable[tuple[float, str]], apart: float) -> Iterator[tuple[float, str]]:
    """The labels that have room, from the first on."""
    last = -math.inf
    for place, text in labels:
        if place - last >= apart:
            yield place, text
            last = place


def _runs(texts: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Where each label stands, and what it says; a run of one text has one in its middle."""
    start = 0
    for text, group in itertools.groupby(texts):
        count = len(list(group))
        if count >= _RUN:
            yield start + (count - 1) / 2, f"{written(text)} × {count}"
        else:
            yield from ((start + k, written(text)) for k in range(count))
        start += count
