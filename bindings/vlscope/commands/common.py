"""Arguments and tables that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..model import StandardizedTransformer


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help='a checkpoint folder, a hub id, or "demo"')


def add_loading(parser: argparse.ArgumentParser) -> None:
    """MODEL, and how it is loaded."""
    add_model(parser)
    group = parser.add_argument_group("loading")
    group.add_argument("--dtype", metavar="DTYPE", help="convert the weights, e.g. float32; as stored by default")
    group.add_argument("--device", default="cpu", help='"cpu" (the default) or "cuda"')
    add_attention(group)
    add_weights(group)


def add_weights(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--weights",
        choices=("resident", "stream"),
        default="resident",
        help="stream: large weights stay in their file and are widened as they are used, in float32 by default",
    )


def add_attention(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--attention", choices=("sdpa", "eager"), default="sdpa", help="attention implementation (default: sdpa)"
    )


def load(arguments: argparse.Namespace) -> StandardizedTransformer:
    """The model; its weights stay on disk until the first forward, so that mistakes are found before."""
    from ..model import load

    return load(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        attn_implementation=arguments.attention,
        weights=arguments.weights,
        dispatch=False,
    )


def add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text; with images, one turn of a chat")
    parser.add_argument("--image", nargs="+", action="extend", metavar="FILE", help="images of the prompt, in order")


def encode(model: StandardizedTransformer, prompt: str, images: Sequence[str] | None) -> dict[str, torch.Tensor]:
    """The tensors of one prompt."""
    return model.encode(prompt, images=list(images) if images else None)


def count(text: str) -> int:
    """A number of things, for argparse: 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def check_folder(path: Path) -> None:
    """Refuses, before any compute, a file that could not be written afterwards."""
    from ..errors import InputError

    if not path.resolve().parent.is_dir():
        raise InputError(f"{path.parent} is no folder, so {path.name} cannot be written there")


def check_writable(model: StandardizedTransformer, sites: Sequence[str]) -> None:
    """Refuses, before any compute, a site that takes no other value."""
    from ..errors import InputError
    from ..sites import number

    for site in sites:
        if reason := model._sites[number(model, site)].read_only:
            raise InputError(f"{site} is read-only: {reason}")


def token_text(model: StandardizedTransformer, token: int) -> str:
    return model.tokenizer.decode([token], skip_special_tokens=False)


def answer(model: StandardizedTransformer, probabilities: torch.Tensor) -> tuple[str, float]:
    """The likeliest next token and its probability, of `next_token_probs` of one prompt."""
    probability, token = probabilities[0].max(-1)
    return token_text(model, int(token)), float(probability)


def table(rows: Sequence[Sequence[Any]], indent: str = "") -> str:
    """Rows of a table; columns of numbers are aligned on the right."""
    # Adding zero takes the sign off a zero.
    texts = [[cell if isinstance(cell, str) else f"{round(cell, 3) + 0.0:.3f}" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    numeric = [not isinstance(cell, str) for cell in rows[-1]]
    return "\n".join(
        indent
        + "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in texts
    )
