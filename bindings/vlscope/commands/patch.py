"""Patch the values of one run into another, block by block.

The prompt is run once for each site and column with the donor's value in place of its own there. The
table shows how far each patch leads from the prompt's own answer (0) to the donor's (1),
measured by the difference of two logits. Without --columns a prompt with images has three columns: the
image tokens, the other tokens, and the last one. Both prompts must have as many tokens.

Examples:
  vlscope patch demo --prompt "What color is the square?" --image red.png --donor-image blue.png
  vlscope patch demo --prompt "The day after Monday is" --donor-prompt "The day after Friday is"
  vlscope patch demo --prompt "What color is the square?" --image red.png --donor-image blue.png \\
      --site self_attn.attention_head_outputs --axis heads --picture heads.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import common

if TYPE_CHECKING:
    from ..model import StandardizedTransformer
    from ..patching import Cells

WIDTH = 100  # of the table, in characters
LABEL = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_loading(parser)
    common.add_prompt(parser)
    donor = parser.add_argument_group("donor, whose values are put in")
    donor.add_argument("--donor-prompt", metavar="TEXT", help="its text; that of the prompt by default")
    donor.add_argument("--donor-image", nargs="+", action="extend", metavar="FILE", help="its images; likewise")
    parser.add_argument(
        "--site",
        default="layer_input",
        help="a value of every block (default: layer_input), or a site or pattern of the whole model",
    )
    parser.add_argument("--axis", help='patch along another axis of the value than its tokens, e.g. "heads"')
    parser.add_argument(
        "--columns", choices=("groups", "each", "all"), help="groups of tokens, each token by itself, or all at once"
    )
    parser.add_argument(
        "--metric", nargs=2, metavar="TOKEN", help="the two answers, donor's first; by default what each run answers"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the table (needs matplotlib)")


def run(arguments: argparse.Namespace) -> None:
    from ..errors import InputError
    from ..patching import sweep
    from ..sites import expand_below

    if arguments.donor_prompt is None and arguments.donor_image is None:
        raise InputError("give a donor that differs from the prompt: --donor-prompt, --donor-image or both")
    if arguments.picture:
        _check_picture(arguments.picture)
    model = common.load(arguments)
    common.check_writable(model, expand_below(model, arguments.site))
    prompt, donor_prompt = arguments.prompt, arguments.donor_prompt or arguments.prompt
    target = common.encode(model, prompt, arguments.image)
    source = common.encode(model, donor_prompt, arguments.donor_image or arguments.image)
    labels, positions = _columns(model, target, arguments)
    metric = arguments.metric or _answers(model, source, target)
    cells = sweep(model, source, target, arguments.site, positions=positions, metric=metric, axis=arguments.axis)
    first, second = (token if isinstance(token, str) else common.token_text(model, token) for token in metric)
    print(f"logit of {first!r} minus logit of {second!r}: {cells.corrupted:.2f} here, {cells.clean:.2f} in the donor")
    print(f"share of the way there, with {arguments.site} taken from the donor\n")
    print(_table(cells, labels or cells.tokens))
    if arguments.picture:
        _draw(arguments.picture, cells, labels or cells.tokens, arguments.site)
        print(f"\n{arguments.picture}")


def _columns(model: StandardizedTransformer, target: Any, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Labels and positions of the columns; None for each place along the axis by itself."""
    from ..patching.edits import POSITION_AXES
    from ..sites import dims, expand_below

    axes = dims(model, expand_below(model, arguments.site)[0])
    axis = arguments.axis or next((name for name in axes if name in POSITION_AXES), None)
    images = model.image_tokens(**target) if "image_grid_thw" in target else []
    kind = arguments.columns or ("groups" if images and axis == "seq" else "all" if axis == "patches" else "each")
    if kind == "each":
        return None, None
    if kind == "all" or axis != "seq" or not images:
        return ["all"], [slice(None)]
    length = target["input_ids"].shape[1]
    visual = [index for image in images for index in range(length)[image.span]]
    rest = sorted(set(range(length - 1)) - set(visual))
    return ["image", "other", "last"], [visual, rest, [length - 1]]


def _answers(model: StandardizedTransformer, source: Any, target: Any) -> list[int]:
    """What the donor's run and the prompt's own answer."""
    import torch

    from ..errors import InputError

    tokens = []
    for inputs in (source, target):
        with torch.no_grad(), model.trace(**inputs):
            tokens.append(int(model.next_token_probs[0].argmax()))
    if tokens[0] == tokens[1]:
        raise InputError(
            f"both runs answer {common.token_text(model, tokens[0])!r}: give the two answers to compare by --metric"
        )
    return tokens


def _table(cells: Cells, labels: Any) -> str:
    """Sites by columns; where they do not fit beside each other, in several parts."""
    short = [repr(text)[1:-1][-LABEL:] for text in labels]
    step = max(1, (WIDTH - max(map(len, cells.sites))) // (max(5, *map(len, short)) + 2))
    shares = cells.recovered.tolist()
    parts = []
    for start in range(0, len(short), step):
        here = slice(start, start + step)
        rows = [[site, *row[here]] for site, row in zip(cells.sites, shares, strict=True)]
        parts.append(common.table([["", *short[here]], *rows]))
    return "\n\n".join(parts)


def _check_picture(path: Path) -> None:
    """Refuses, before any compute, a picture that could not be written afterwards."""
    from ..errors import InputError

    common.check_folder(path)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise InputError("--picture needs matplotlib, which is not installed: pip install matplotlib") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise InputError(f"{path.name} ends in no format of pictures; these are known: {', '.join(sorted(known))}")


def _draw(path: Path, cells: Cells, labels: Any, site: str) -> None:
    from matplotlib.figure import Figure

    rows, columns = cells.values.shape
    names = 0.08 * max(map(len, cells.sites))  # inches that the names of the rows take
    figure = Figure(figsize=(2.5 + names + 0.45 * columns, 1.6 + 0.3 * rows), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(cells.recovered, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    axes.set_xticks(range(columns), [repr(text)[1:-1] for text in labels], rotation=60, ha="right")
    axes.set_yticks(range(rows), cells.sites)
    axes.set_title(f"{site} from the donor", loc="left")
    figure.colorbar(picture, label="share of the way to the donor's answer")
    figure.savefig(path, dpi=120)
