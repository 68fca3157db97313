"""What to put in the place of a value: those of another run, zeros, noise, means."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..prompts import encode_batch
from ..sites import expand, expand_below, read
from ..trace import save
from .edits import Replacement, axis_of, fitting

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

Prompt = Any  # what a trace takes, or a dict of its arguments, or a list of these


def collect(model: StandardizedTransformer, prompt: Prompt, sites: str | Iterable[str]) -> dict[str, Any]:
    """The values of sites and patterns in a run of a prompt or a batch, by site: a tensor each, or a tuple
    of them. No gradient is recorded."""
    names = expand(model, sites)
    if not names:
        return {}
    with torch.no_grad(), model.trace(**encoded(model, prompt)):
        return {name: save(read(model, name)) for name in names}


def zero(value: torch.Tensor, site: str) -> torch.Tensor:
    """Zero ablation: zeros in place of a value."""
    return torch.zeros_like(value)


def noise(scale: float = 3.0, seed: int = 0) -> Replacement:
    """Noise ablation: Gaussian noise added to a value, its deviation `scale` times that of the value's
    own elements. At `token_embeddings` this is the corruption of Meng et al. 2022
    (arXiv:2202.05262, section 2.1). The noise of a site is the same in every run of one `seed`."""

    def add(value: torch.Tensor, site: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(site.encode()))
        drawn = torch.randn(value.shape, generator=generator).to(value)
        return value + scale * value.detach().std() * drawn

    return add


def mean(
    model: StandardizedTransformer,
    prompts: Sequence[Prompt],
    site: str = "layer_output",
    layers: int | Sequence[int] | None = None,
    *,
    per_position: bool = False,
) -> dict[str, torch.Tensor]:
    """Mean ablation: the mean of a value over several prompts, by site.

    Over all positions too, so that prompts of any length go together and the mean fits any of them
    (axes of length 1 are repeated); or with `per_position`, over prompts that align, position by
    position, as in Wang et al. 2022 (arXiv:2211.00593).
    """
    names = expand_below(model, site, layers)
    sums: dict[str, torch.Tensor] = {}
    counts = dict.fromkeys(names, 0)
    for prompt in _several(prompts):
        for name, value in collect(model, _single(model, prompt), names).items():
            if not isinstance(value, torch.Tensor):
                raise InputError(f"{name} is several tensors, one for each image: take their means in a trace")
            where = axis_of(model, name, None, value.ndim)
            total = value.double() if per_position else value.double().sum(where, keepdim=True)
            if name in sums:
                total = total + fitting(sums[name], total, name)
            sums[name] = total
            counts[name] += 1 if per_position else value.shape[where]
    return {name: (sums[name] / counts[name]).to(model.dtype) for name in names}


def resample(
    model: StandardizedTransformer,
    prompts: Sequence[Prompt],
    site: str = "layer_output",
    layers: int | Sequence[int] | None = None,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Resample ablation: for each site the value of one of several prompts, drawn anew for each site
    (Chan et al. 2022, "Causal scrubbing"). The prompts must align with the run they are put in."""
    names = expand_below(model, site, layers)
    runs = [collect(model, _single(model, prompt), names) for prompt in _several(prompts)]
    drawn = torch.randint(len(runs), (len(names),), generator=torch.Generator().manual_seed(seed)).tolist()
    return {name: runs[choice][name] for name, choice in zip(names, drawn, strict=True)}


def _several(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, (str, Mapping)) or not prompts:
        raise InputError("give a list of prompts")
    return prompts


def _single(model: StandardizedTransformer, prompt: Prompt) -> dict[str, torch.Tensor]:
    """The arguments of a trace of one prompt."""
    run = encoded(model, prompt)
    count = len(run["input_ids"])
    if count != 1:
        raise InputError(f"a batch of {count} prompts stands in the list of prompts: give each by itself")
    return run


def encoded(model: StandardizedTransformer, prompt: Prompt) -> dict[str, torch.Tensor]:
    """The arguments of a trace of one prompt, or of several of the same length; images processed."""
    run = encode_batch(model, prompt)
    mask = run.get("attention_mask")
    if mask is not None and (mask != mask[0]).any():
        lengths = ", ".join(map(str, mask.sum(1).tolist()))
        raise InputError(
            f"the prompts of the batch have {lengths} tokens: a position stands for the same in each only where they "
            "have the same number"
        )
    return run
