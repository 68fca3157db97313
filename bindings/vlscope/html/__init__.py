"""Pages to look around in: one HTML file each, without anything from elsewhere.

>>> vlscope.html.attention(model, "What color is this?", images=[picture]).save("attention.html")
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from ..errors import InputError
from ..pictures import PicturedPrompt, Seen, pictured
from ..sites import expand, read

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

__all__ = ["Page", "attention"]

_TEMPLATE = Path(__file__).parent / "attention.html"
_LARGEST = 64 * 2**20  # bytes of weights: what a browser still opens at once
_STEPS = 2**16 - 1  # a share is stored in 16 bits


@dataclasses.dataclass(frozen=True, repr=False)
class Page:
    """An HTML page. A notebook shows it in place.

    Attributes:
        text: the whole page.
    """

    text: str

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, and give its path."""
        path = Path(path)
        path.write_text(self.text, encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"Page({len(self.text):,} characters)"

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.text)}" width="100%" height="620" frameborder="0"></iframe>'


@torch.no_grad()
def attention(
    model: StandardizedTransformer,
    prompt: Any = None,
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    **inputs: Any,
) -> Page:
    """A page that shows the attention of every token on the images of a prompt, and on its other tokens.

    Pointing at a token, in the text or on an image, shows where it attends to; a click keeps it. Block
    and head are chosen from lists; "mean" is the mean of the heads on the page. The address may end
    in what to begin with: `attention.html#layer=3&head=1&token=20`. Shares are stored in 16 bits, to
    within 1e-5.

    Args:
        layers: text blocks; by default all that have such an attention.
        heads: query heads; all by default.
        prompt, inputs: what `model.trace` takes, one prompt with an image.

    Raises:
        InputError: several prompts, no image, or more weights than a browser opens; UnknownSite,
            IndexError: no such block or head.
    """
    seen = pictured(model, prompt, **inputs)
    blocks = ["*"] if layers is None else [layers] if isinstance(layers, int) else layers
    sites = expand(model, [f"layers.{layer}.self_attn.attention_probabilities" for layer in blocks])
    chosen = _heads(model, heads)
    _check_size(len(sites) * len(chosen), len(seen.texts))
    data = {
        "layers": [int(site.split(".")[1]) for site in sites],
        "heads": chosen,
        "tokens": seen.texts,
        "images": [image for item in seen.seen for image in _images(seen, item)],
        "weights": base64.b64encode(_weights(model, seen, sites, chosen)).decode(),
    }
    written = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # no text ends the script
    return Page(_TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", written))


def _heads(model: StandardizedTransformer, heads: int | Sequence[int] | None) -> list[int]:
    count = model.num_heads
    chosen = list(range(count)) if heads is None else [heads] if isinstance(heads, int) else list(heads)
    for head in chosen:
        if not -count <= head < count:
            raise IndexError(f"head {head}: there are {count}, 0 to {count - 1}")
    return [head % count for head in chosen]


def _check_size(maps: int, tokens: int) -> None:
    size = maps * tokens * (tokens + 1)  # two bytes for each pair
    if size > _LARGEST:
        raise InputError(
            f"{maps} maps of {tokens} tokens are {size / 2**20:.0f} MiB of weights, and a page holds "
            f"{_LARGEST // 2**20}: choose some layers= or heads="
        )


def _weights(model: StandardizedTransformer, seen: PicturedPrompt, sites: Sequence[str], heads: Sequence[int]) -> bytes:
    """[layers, heads, tokens * (tokens + 1) / 2]: of each token the attention to those up to itself."""
    own, count = seen.row.tokens, len(seen.texts)
    rows, columns = torch.tril_indices(count, count)
    parts = []
    with model.trace(**seen.encoding):
        for site in sites:
            pattern = read(model, site)[0][list(heads), own, own].float().cpu()
            parts.append((pattern[:, rows, columns] * _STEPS).round().to(torch.uint16).numpy().astype("<u2").tobytes())
    return b"".join(parts)


def _images(seen: PicturedPrompt, item: Seen) -> list[dict[str, Any]]:
    """An image, or each frame of a video, with its tokens in raster order."""
    tokens, (frames, rows, columns) = item.tokens, item.tokens.shape
    name = f"{tokens.kind} {tokens.image}" if len(seen.seen) > 1 else tokens.kind
    grid = (tokens.positions - seen.row.tokens.start).reshape(frames, -1)
    width, height = tokens.size
    return [
        {
            "name": name if frames == 1 else f"{name}, frame {frame}",
            "source": _png(item.pixels[frame]),
            "width": width,
            "height": height,
            "rows": rows,
            "columns": columns,
            "tokens": grid[frame].tolist(),
        }
        for frame in range(frames)
    ]


def _png(pixels: Any) -> str:
    """An image as an address that holds it."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
