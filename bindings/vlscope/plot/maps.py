"""Maps over images: attention, the logit lens, norms, and any number of each token or patch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..pictures import PicturedPrompt, pictured
from ..prompts import single_token
from ..sites import expand, read
from .drawing import Canvas, Panel, draw_panels, written

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

Layers = int | Sequence[int] | None

_LONGEST = 9  # characters of a token in a cell
_MOST = 6  # maps side by side
_ROWS = 64  # of a stream that are read out at a time


@torch.no_grad()
def attention(
    model: StandardizedTransformer,
    prompt: Any = None,
    *,
    layers: Layers = None,
    heads: int | Sequence[int] | None = None,
    token: int = -1,
    figure: Canvas | None = None,
    **inputs: Any,
) -> Canvas:
    """How a token attends to the images, by block and head. The titles say what share of its
    attention the images have in all.

    >>> vlscope.plot.attention(model, "What color is this?", images=[picture], layers=4, heads=[0, 1])

    Args:
        layers: text blocks; by default all that have such an attention.
        heads: query heads, each in a map of its own; by default one map of their mean.
        token: the token that attends, among the prompt's own; negatives count from the end.

    Raises:
        InputError: several prompts, no image, no such token; UnknownSite: no such block.
    """
    seen = pictured(model, prompt, **inputs)
    position = seen.position(token)
    sites = _sites(model, "layers.{}.self_attn.attention_probabilities", layers)
    chosen = None if heads is None else _several(heads)
    rows, titles = [], []
    with model.trace(**seen.encoding):
        for site in sites:
            weights = read(model, site.rpartition(".")[0]).attention_row(position, chosen)[0].float().cpu()
            rows += [weights.mean(0)] if chosen is None else list(weights)
            titles += [_block(site)] if chosen is None else [f"{_block(site)}, head {head}" for head in chosen]
    mean = "" if chosen else f", mean of {model.num_heads} heads"
    text = seen.texts[position - seen.row.tokens.start]
    return _draw(
        seen,
        seen.token_grids(torch.stack(rows)),
        titles,
        columns=len(chosen) if chosen and len(chosen) > 1 else None,
        totals=True,
        scale="share",
        label="share of the attention",
        title=f"Attention of “{written(text)}”, token {position - seen.row.tokens.start}{mean}",
        figure=figure,
    )


@torch.no_grad()
def logit_lens(
    model: StandardizedTransformer,
    prompt: Any = None,
    *,
    layers: Layers = None,
    token: int | str | None = None,
    figure: Canvas | None = None,
    **inputs: Any,
) -> Canvas:
    """What the stream says at each image token, block by block: softmax(head(norm(layer_output)))
    (nostalgebraist 2020, "interpreting GPT: the logit lens"). Each cell shows its likeliest token and
    that one's probability; with `token` the probability of that one.

    Args:
        layers: text blocks; all by default.
        token: an id, or a text of one token.

    Raises:
        InputError: several prompts, no image, a text of several tokens; UnknownSite: no such block.
    """
    seen = pictured(model, prompt, **inputs)
    wanted = None if token is None else single_token(model, token, "a lens")
    sites = _sites(model, "layers.{}.layer_output", layers)
    positions = torch.cat([item.tokens.positions for item in seen.seen]).sort().values
    probabilities, best = [], []
    with model.trace(**seen.encoding):
        for site in sites:
            likely, ids = _read_out(model, read(model, site)[0, positions], wanted)
            probabilities.append(likely)
            best.append(ids)
    texts = None if wanted is not None else [grid.flatten(1) for grid in seen.token_grids(torch.stack(best))]
    named = "the likeliest token" if wanted is None else f"“{written(model.tokenizer.decode([wanted]))}”"
    return _draw(
        seen,
        seen.token_grids(torch.stack(probabilities)),
        [_block(site) for site in sites],
        scale="share",
        label="probability",
        title=f"Logit lens: {named} at each image token, after each block",
        texts=None if texts is None else [[_words(model, row) for row in grid.tolist()] for grid in texts],
        figure=figure,
    )


@torch.no_grad()
def patch_norms(
    model: StandardizedTransformer,
    prompt: Any = None,
    *,
    layers: Layers = None,
    site: str = "layer_output",
    figure: Canvas | None = None,
    **inputs: Any,
) -> Canvas:
    """The Euclidean norm of each patch in the vision stream, block by block.

    Args:
        layers: blocks of the tower; all by default.
        site: another value [1, patches, size] below the block, such as "mlp.mlp_output"; or one of
            the whole model, such as "vision.patch_embeddings", without `layers`.

    Raises:
        InputError: several prompts, no image; UnknownSite: no such block or value.
    """
    seen = pictured(model, prompt, **inputs)
    whole = site.startswith("vision.")
    sites = expand(model, site) if whole else _sites(model, f"vision.layers.{{}}.{site}", layers)
    norms = []
    with model.trace(**seen.encoding):
        for name in sites:
            norms.append(read(model, name)[0].float().norm(dim=-1).cpu())
    return _draw(
        seen,
        seen.patch_grids(torch.stack(norms), windowed=site != "vision.patch_embeddings"),
        [name if whole else _block(name) for name in sites],
        scale="amount",
        label="norm",
        title=f"Norm of each patch, {site if whole else f'vision.layers.*.{site}'}",
        figure=figure,
    )


def token_map(
    model: StandardizedTransformer,
    values: Any,
    prompt: Any = None,
    *,
    titles: Sequence[str] = (),
    scale: str | None = None,
    label: str = "",
    title: str = "",
    figure: Canvas | None = None,
    **inputs: Any,
) -> Canvas:
    """Any number of each image token, over the images of the prompt.

    >>> with model.trace(question, images=[picture]):
    ...     share = model.layers[4].self_attn.attention_row(-1, 2)[0]     # [seq]
    >>> vlscope.plot.token_map(model, share, question, images=[picture])

    Args:
        values: [seq] or [image_tokens], or several of these, [maps, ...]: one for each position of the
            prompt or for each image token, as `image_features` and `deepstack_output` have rows.
        titles: one for each map.
        scale: what the numbers are: a "share" of one, an "amount" from zero, or "signed"; by default
            an amount, or signed if one is negative.
        label: of the colours.

    Raises:
        InputError: several prompts, no image, another number of values or titles.
    """
    seen = pictured(model, prompt, **inputs)
    rows = _rows(values, titles)
    return _draw(
        seen, seen.token_grids(rows), titles, scale=scale or _scale(rows), label=label, title=title, figure=figure
    )


def patch_map(
    model: StandardizedTransformer,
    values: Any,
    prompt: Any = None,
    *,
    windowed: bool = True,
    titles: Sequence[str] = (),
    scale: str | None = None,
    label: str = "",
    title: str = "",
    figure: Canvas | None = None,
    **inputs: Any,
) -> Canvas:
    """Any number of each patch, over the images of the prompt.

    Args:
        values: [patches] or [maps, patches], one for each row of the vision stream.
        windowed: False for numbers made of `vision.patch_embeddings`, which lie before Qwen2.5-VL's
            order of windows. No other family has one.

    The other arguments and errors are those of `token_map`.
    """
    seen = pictured(model, prompt, **inputs)
    rows = _rows(values, titles)
    grids = seen.patch_grids(rows, windowed)
    return _draw(seen, grids, titles, scale=scale or _scale(rows), label=label, title=title, figure=figure)


# --- what they share ---


def _draw(
    seen: PicturedPrompt,
    grids: Sequence[torch.Tensor],
    titles: Sequence[str],
    *,
    scale: str,
    label: str,
    title: str = "",
    columns: int | None = None,
    totals: bool = False,
    texts: Sequence[Sequence[Sequence[str]]] | None = None,
    figure: Canvas | None = None,
) -> Canvas:
    """Each image, or frame, and beside it its map for each row of `grids`, one [maps, frames, rows, columns]
    an image; in lines of `columns` maps.

    With `totals` a title tells the sum of its map. `texts` has the words of the cells by image and map.
    """
    count = len(grids[0])
    frames = [(k, frame) for k, item in enumerate(seen.seen) for frame in range(len(item.pixels))]
    columns = columns or _balanced(count, one=len(frames) == 1)
    lines = []
    for k, frame in frames:
        pixels = seen.seen[k].pixels[frame]
        maps = []
        for row in range(count):
            cells, heading = grids[k][row, frame], titles[row] if titles else ""
            if totals:
                heading = f"{heading}: {cells.sum():.0%}"
            size = cells.numel()
            words = () if texts is None else texts[k][row][frame * size : (frame + 1) * size]
            maps.append(Panel(heading, pixels, cells.numpy(), words))
        first = Panel(_name(seen, k, frame), pixels)
        chunks = [maps[start : start + columns] for start in range(0, count, columns)]
        lines += [[None if start else first, *chunk] for start, chunk in enumerate(chunks)]
    return draw_panels(lines, scale=scale, label=label, title=title, figure=figure)


def _read_out(
    model: StandardizedTransformer, stream: torch.Tensor, wanted: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token of each row of a stream, or the one that is wanted: its probability, and its id.
    Some rows at a time, since each has as many numbers as the vocabulary has tokens."""
    likely, ids = [], []
    for rows in torch.split(stream, _ROWS):
        found = model.project_on_vocab(rows).float().softmax(-1)
        top = found.max(-1)
        likely.append((top.values if wanted is None else found[:, wanted]).cpu())
        ids.append(top.indices.cpu() if wanted is None else torch.full((len(rows),), wanted))
    return torch.cat(likely), torch.cat(ids)


def _balanced(count: int, one: bool) -> int:
    """How many of some maps go into a line: of one image about twice as many as there are lines."""
    lines = math.ceil(count / min(_MOST, math.ceil(math.sqrt(2 * count)) if one else count))
    return math.ceil(count / lines)


def _name(seen: PicturedPrompt, index: int, frame: int) -> str:
    """What stands over an image."""
    item = seen.seen[index].tokens
    name = item.kind if len(seen.seen) == 1 else f"{item.kind} {item.image}"
    return name if item.shape[0] == 1 else f"{name}, frame {frame}"


def _block(site: str) -> str:
    """ "block 3" of "layers.3.layer_output"."""
    return f"block {site.partition('layers.')[2].partition('.')[0]}"


def _several(indices: int | Sequence[int]) -> list[int]:
    return [indices] if isinstance(indices, int) else list(indices)


def _sites(model: StandardizedTransformer, pattern: str, layers: Layers) -> list[str]:
    """The sites of a pattern in some blocks, in forward order, by default in all that have them."""
    return expand(model, [pattern.format(layer) for layer in (["*"] if layers is None else _several(layers))])


def _words(model: StandardizedTransformer, ids: Sequence[int]) -> list[str]:
    """Tokens as they fit into cells."""
    texts = (written(model.tokenizer.decode([token], skip_special_tokens=False)).strip() for token in ids)
    return [text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…" for text in texts]


def _rows(values: Any, titles: Sequence[str]) -> torch.Tensor:
    """The numbers of the caller, [maps, n]."""
    rows = torch.as_tensor(values).detach().float().cpu()
    rows = rows[None] if rows.ndim == 1 else rows
    if rows.ndim != 2:
        raise InputError(f"the values have shape {list(rows.shape)}; give [n] or [maps, n]")
    if titles and len(titles) != len(rows):
        raise InputError(f"there are {len(titles)} titles and {len(rows)} maps; give one for each")
    return rows


def _scale(values: torch.Tensor) -> str:
    return "signed" if bool((values < 0).any()) else "amount"
