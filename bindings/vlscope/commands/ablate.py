"""Take image pathways away and ask again.

Prints the answer as it is, then with each site ablated, then with all of them. The image reaches the
text blocks on two paths: as image features among the embeddings, and, in Qwen3-VL, as DeepStack
features added behind the first blocks. These are the sites unless --site says otherwise. A site is
zeroed, or its rows become their mean over the images of --over.

Examples:
  vlscope ablate demo --prompt "What color is the square?" --image red.png
  vlscope ablate demo --prompt "What color is the square?" --image red.png --by mean --over blue.png green.png
  vlscope ablate demo --prompt "What color is the square?" --image red.png --site 'layers.2:4.mlp.mlp_output'
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import common

if TYPE_CHECKING:
    import torch

    from ..model import StandardizedTransformer

#: What else a site may be called.
SHORT = {"image_features": "vision.image_features", "deepstack": "layers.*.deepstack_output"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_loading(parser)
    common.add_prompt(parser)
    parser.add_argument(
        "--site",
        nargs="+",
        action="extend",
        metavar="SITE",
        help='sites or patterns; "image_features" and "deepstack" are understood too, and are the default',
    )
    parser.add_argument("--by", choices=("zero", "mean"), default="zero", help="what is put there (default: zero)")
    parser.add_argument(
        "--over",
        nargs="+",
        metavar="FILE",
        help="one-image prompts that the mean is taken over; the image's own by default",
    )


def run(arguments: argparse.Namespace) -> None:
    from ..errors import InputError
    from ..sites import expand

    if arguments.over and arguments.by != "mean":
        raise InputError("--over gives the images of a mean: it goes with --by mean")
    if not arguments.site and not arguments.image:
        raise InputError("the pathways of an image are ablated: give one by --image, or other sites by --site")
    model = common.load(arguments)
    patterns = [SHORT.get(site, site) for site in arguments.site or _pathways(model)]
    groups = [expand(model, pattern) for pattern in patterns]
    common.check_writable(model, [site for group in groups for site in group])
    inputs = common.encode(model, arguments.prompt, arguments.image)
    by = _replacement(model, arguments, sorted({site for group in groups for site in group}))
    if len(patterns) > 1:
        patterns.append("all of these")
        groups.append(expand(model, patterns[:-1]))
    clean = _probabilities(model, inputs, [], by)
    token = int(clean[0].argmax())
    rows: list[list[Any]] = [["nothing", *common.answer(model, clean), float(clean[0, token])]]
    for pattern, group in zip(patterns, groups, strict=True):
        ablated = _probabilities(model, inputs, group, by)
        rows.append([pattern, *common.answer(model, ablated), float(ablated[0, token])])
    heading = "zeroed" if arguments.by == "zero" else "averaged"
    first = repr(common.token_text(model, token))
    print(common.table([[heading, "answer", "probability", f"of {first}"], *rows]))


def _pathways(model: StandardizedTransformer) -> list[str]:
    """The paths of the image that this model has."""
    from ..errors import Unavailable
    from ..sites import expand

    found = []
    for site in SHORT.values():
        try:
            expand(model, site)
        except Unavailable:
            continue
        found.append(site)
    return found


def _replacement(model: StandardizedTransformer, arguments: argparse.Namespace, sites: list[str]) -> Any:
    from ..patching import mean, zero

    if arguments.by == "zero":
        return zero
    images = [[image] for image in arguments.over] if arguments.over else [arguments.image]
    prompts = [common.encode(model, arguments.prompt, each) for each in images]
    return {site: value for each in sites for site, value in mean(model, prompts, each).items()}


def _probabilities(model: StandardizedTransformer, inputs: Any, sites: list[str], by: Any) -> torch.Tensor:
    """`next_token_probs` with some sites replaced."""
    import torch

    from ..patching import replace

    with torch.no_grad(), model.trace(**inputs):
        for site in sites:
            replace(model, site, by)
        return model.next_token_probs.clone()
