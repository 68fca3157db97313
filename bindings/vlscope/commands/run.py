"""Run a prompt, print what comes next, save values of the forward.

Prints the likeliest next tokens. --save takes sites as a script names them (`vlscope values MODEL`
lists them) or patterns: `*` stands for every block and `a:b` for a range, and -1 is the last. The
forward runs once, to the last site that is asked for.

Examples:
  vlscope run demo --prompt "What color is this?" --image red.png
  vlscope run demo --prompt "What color is this?" --image red.png --max-new-tokens 5
  vlscope run demo --prompt "What color is this?" --image red.png \\
      --save vision.image_features 'layers.*.layer_output' -o out.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import common

if TYPE_CHECKING:
    import torch

TOP = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_loading(parser)
    common.add_prompt(parser)
    parser.add_argument("--save", nargs="+", action="extend", default=[], metavar="SITE", help="sites or patterns")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the safetensors file of what is saved")
    parser.add_argument(
        "--max-new-tokens", type=common.count, metavar="N", help="also generate an answer of up to N tokens"
    )


def run(arguments: argparse.Namespace) -> None:
    import torch

    from ..errors import InputError
    from ..sites import expand, read

    if arguments.out and not arguments.save:
        raise InputError(f"there is nothing to write to {arguments.out}: give sites by --save")
    if arguments.out:
        common.check_folder(arguments.out)
    model = common.load(arguments)
    wanted = expand(model, arguments.save) if arguments.save else []
    inputs: dict[str, Any] = common.encode(model, arguments.prompt, arguments.image)
    saved: dict[str, torch.Tensor] = {}
    with torch.no_grad(), model.trace(**inputs):
        for site in expand(model, [*wanted, "next_token_probs"]):
            if site in wanted:
                saved.update(_tensors(site, read(model, site)))
        probabilities = model.next_token_probs.clone()
    print(f"{inputs['input_ids'].shape[1]} tokens; the next one is")
    top = probabilities[0].topk(TOP)
    rows = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    print(common.table([[repr(common.token_text(model, token)), share] for share, token in rows], "  "))
    if arguments.max_new_tokens:
        text = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens).text
        print(f"\nanswer\n  {text}")
    if saved:
        print("\nsaved")
        parts = [
            [site, str(list(value.shape)), str(value.dtype).removeprefix("torch.")] for site, value in saved.items()
        ]
        print(common.table(parts, "  "))
    if arguments.out:
        _write(arguments.out, saved, {"prompt": arguments.prompt, "model": arguments.model})


def _tensors(site: str, value: Any) -> dict[str, torch.Tensor]:
    """A value under its name; the parts of a tuple (one for each image) under numbered ones."""
    import torch

    from ..errors import InputError

    if isinstance(value, tuple) and all(isinstance(part, torch.Tensor) for part in value):
        return {f"{site}.{i}": part.clone() for i, part in enumerate(value)}
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{site} is a {type(value).__name__} and no tensor: save a site that is one")
    return {site: value.clone()}


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    save_file({site: value.cpu().contiguous() for site, value in tensors.items()}, path, metadata)
    print(f"\n{path}: {len(tensors)} tensors, {path.stat().st_size:,} bytes")
