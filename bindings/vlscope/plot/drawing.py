"""What the pictures share: figures, the colours of each meaning, and maps laid over images."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure, SubFigure

from ..errors import InputError

Canvas = Figure | SubFigure
Array = np.ndarray[Any, Any]

TITLE, SMALL = 10, 8  # points
_PANEL = 1.7  # inches, the shorter side of a map
_WIDEST = 15.0  # inches, of a figure
_HEADING = 0.36  # inches, a title
_BESIDE = 1.0  # inches, the bar with its numbers
_BAR = (0.12, 3.0)  # inches
_PALE = 0.8  # how far an image goes to white under a map
_OPAQUE = 0.92  # of the strongest colour: the image still shows


class Picture(Figure):
    """A figure that a notebook shows without pyplot, which keeps every figure of a session alive."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def canvas(figure: Canvas | None, size: tuple[float, float]) -> Canvas:
    """The caller's figure, or a new one of this size in inches."""
    return Picture(figsize=size, layout="constrained") if figure is None else figure


def _ramp(name: str, color: str) -> Colormap:
    """From nothing to a colour: what is weak lets the image through."""
    return LinearSegmentedColormap.from_list(name, [(*to_rgb(color), 0.0), (*to_rgb(color), _OPAQUE)])


def _two_sided(name: str, less: str, more: str) -> Colormap:
    ends = [(*to_rgb(less), _OPAQUE), (*to_rgb(less), 0.0), (*to_rgb(more), 0.0), (*to_rgb(more), _OPAQUE)]
    return LinearSegmentedColormap.from_list(name, list(zip((0.0, 0.5, 0.5, 1.0), ends)))


#: The colours of each meaning.
SCALES = {
    "share": _ramp("share", "#4b1d8f"),
    "amount": _ramp("amount", "#00594c"),
    "signed": _two_sided("signed", "#1f5fa8", "#b3261e"),
}


def norm(scale: str, values: Sequence[Array], top: float | None = None) -> Normalize:
    """One scale for all maps of a picture: from zero to the largest value, or as far on both sides."""
    if scale not in SCALES:
        raise InputError(f"scale is {scale!r}; it can be {', '.join(map(repr, SCALES))}")
    largest = max((float(np.nanmax(np.abs(part))) for part in values if part.size), default=0.0)
    top = top or largest or 1.0
    return Normalize(-top if scale == "signed" else 0.0, top)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One map over one image.

    Attributes:
        title: above it.
        pixels: [height, width, 3], uint8, the image.
        values: [rows, columns] in raster order, over the whole image; None shows the image alone.
        texts: one for each value, written into its cell.
    """

    title: str
    pixels: Array
    values: Array | None = None
    texts: Sequence[str] = ()


def draw_panels(
    lines: Sequence[Sequence[Panel | None]], *, scale: str, label: str, title: str = "", figure: Canvas | None = None
) -> Canvas:
    """Lines of panels, None leaving a place empty, in one scale of colours whose bar stands beside them."""
    panels = [panel for line in lines for panel in line if panel is not None]
    columns = max(map(len, lines))
    heights = [max(_size(panel)[1] for panel in line if panel is not None) + _HEADING for line in lines]
    width = columns * max(_size(panel)[0] for panel in panels) + _BESIDE
    height = sum(heights) + (_HEADING if title else 0.0)
    shrink = min(1.0, _WIDEST / width)
    figure = canvas(figure, (width * shrink, height * shrink))
    grid = figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights)
    limits = norm(scale, [panel.values for panel in panels if panel.values is not None])
    image = None
    for axes in grid.flat:
        axes.set_axis_off()
    for places, line in zip(grid, lines):
        for axes, panel in zip(places, line):
            if panel is not None:
                image = draw_panel(axes, panel, SCALES[scale], limits, (SMALL - 2) * shrink) or image
    if image is not None:
        bar(figure, image, grid, label)
    if title:
        figure.suptitle(title, fontsize=TITLE)
    return figure


def bar(figure: Canvas, image: Any, axes: Any, label: str) -> None:
    """The bar of the colours, beside `axes`; of one size in every picture that is large enough."""
    height = figure.bbox.height / figure.dpi
    length = min(0.9 * height, _BAR[1])
    colors = figure.colorbar(image, ax=axes, label=label, shrink=length / height, aspect=length / _BAR[0], pad=0.02)
    colors.outline.set_visible(False)
    colors.ax.tick_params(labelsize=SMALL)
    colors.ax.yaxis.label.set_fontsize(SMALL)


def draw_panel(axes: Axes, panel: Panel, colors: Colormap, limits: Normalize, text_size: float) -> Any:
    """The image, and over it the map, both in pixels of the image from its left upper corner."""
    height, width = panel.pixels.shape[:2]
    extent = (0.0, float(width), float(height), 0.0)
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color="0.7", linewidth=0.5)
    axes.set_title(panel.title, fontsize=SMALL)
    under = panel.pixels if panel.values is None else _pale(panel.pixels)
    axes.imshow(under, extent=extent, interpolation="nearest")
    if panel.values is None:
        return None
    drawn = axes.imshow(panel.values, extent=extent, cmap=colors, norm=limits, interpolation="nearest")
    _write(axes, panel, colors, limits, text_size)
    return drawn


def _write(axes: Axes, panel: Panel, colors: Colormap, limits: Normalize, size: float) -> None:
    """The texts of a panel, each in its cell."""
    if panel.values is None or not panel.texts:
        return
    (height, width), (rows, columns) = panel.pixels.shape[:2], panel.values.shape
    for index, text in enumerate(panel.texts):
        row, column = divmod(index, columns)
        strong = colors(limits(panel.values[row, column]))[3] > 0.55
        axes.text(
            (column + 0.5) * width / columns,
            (row + 0.5) * height / rows,
            text,
            size=size,
            color="white" if strong else "black",
            ha="center",
            va="center",
            clip_on=True,
        )


def _size(panel: Panel) -> tuple[float, float]:
    """Width and height of a panel in inches: room for the texts where there are some."""
    height, width = panel.pixels.shape[:2]
    side = _PANEL
    if panel.texts and panel.values is not None:
        columns = panel.values.shape[1]
        side = max(side, 0.1 * max(map(len, panel.texts)) * columns * min(1.0, height / width))
    return side * max(1.0, width / height), side * max(1.0, height / width)


def _pale(pixels: Array) -> Array:
    """An image in light greys, so that the colours over it mean one thing."""
    grey = pixels @ np.array([0.299, 0.587, 0.114])
    grey = grey + (255 - grey) * _PALE
    return np.repeat(grey[..., None], 3, axis=-1).round().astype(np.uint8)


def written(text: str) -> str:
    """The text of a token as a label: blanks and line ends visible, quotes and `$` harmless."""
    shown = text.replace("\n", "\\n").replace("\t", "\\t").replace("$", r"\$")
    return shown if shown.strip() else f"'{shown}'"
