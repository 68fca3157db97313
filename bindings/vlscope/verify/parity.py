"""Every named value and every module's inputs and output, against transformers with hooks, in one trace of a prompt.

The list of what to read is what transformers went through, in its order: a site that the engine
lacks, serves in another order or with other bits is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..sites import read
from . import reference
from .comparison import difference

if TYPE_CHECKING:
    from ..model import StandardizedTransformer
    from .prompts import Inputs

__all__ = ["EXCEPTIONS", "Comparison", "compare", "compare_logits"]

#: Site pattern -> (tolerance, reason). docs/parity.md tells the same.
EXCEPTIONS = {
    r"next_token_probs": (
        1e-5,
        "made from the last row of each prompt alone; a row of a matrix product alone "
        "differs in its last bits from the row of the whole",
    ),
}

# What transformers tells a module about caching and the form of its answer, and the token types that follow from the
# ids; `rope_deltas` comes back for the decoding steps to come.
_NO_VALUES = {"past_key_values", "use_cache", "return_dict", "mm_token_type_ids", "rope_deltas"}


class Comparison(NamedTuple):
    """One site: what is wrong there, and whether its bits are those of transformers."""

    site: str
    fault: str | None
    bits: bool


def compare(model: StandardizedTransformer, inputs: Inputs, run: reference.Run) -> Iterator[Comparison]:
    """Each site that transformers came by in `run`, in that order, against a trace of the same inputs."""
    served, faults = {}, {}
    with model.trace(**inputs) as tracer:
        for site, key in reference.reading_list(run):
            try:
                served[site] = key, read(model, site)
            except Exception as error:  # whatever a read raises is what is wrong with the site
                faults[site] = f"{type(error).__name__}: {error}"
        result = tracer.result.logits
    for site, _ in reference.reading_list(run):
        if site in faults:
            yield Comparison(site, faults[site], False)
        else:
            key, ours = served[site]
            yield _compared(site, _shaped(site, ours), _expected(run, key))
    yield _compared("tracer.result.logits", result, run.logits)


def compare_logits(model: StandardizedTransformer, inputs: Inputs, run: reference.Run) -> Comparison:
    """The logits of a forward that nobody watches."""
    with torch.no_grad():
        return _compared("logits, untraced", model(**inputs).logits, run.logits)


def _compared(site: str, ours: Any, theirs: Any) -> Comparison:
    differs = difference(ours, theirs)
    tolerance = next((limit for pattern, (limit, _) in EXCEPTIONS.items() if re.fullmatch(pattern, site)), 0.0)
    return Comparison(site, difference(ours, theirs, tolerance) if differs else None, differs is None)


def _without_absent(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in _NO_VALUES and value is not None}


def _expected(run: reference.Run, site: str) -> Any:
    """What transformers has at a site of the reading list."""
    if site in run.values:
        return run.values[site]
    path, _, side = site.rpartition(".")
    call = run.calls[path]
    if side == "inputs":
        kwargs = _without_absent(call.kwargs)
        if path == "model":  # given to transformers where it would count padding; vlscope makes them inside
            kwargs.pop("position_ids", None)
        return call.args, kwargs
    if side == "input":  # the text model is called by keyword, with input_ids=None first
        first = call.kwargs.get("inputs_embeds")
        return first if first is not None else next(iter((*call.args, *call.kwargs.values())))
    return _without_absent(call.output) if isinstance(call.output, Mapping) else call.output


def _shaped(site: str, ours: Any) -> Any:
    """The engine's answer in the form of `_expected`: mappings without empty entries, output objects as mappings."""
    if site.endswith(".inputs"):
        args, kwargs = ours
        return tuple(args), _without_absent(kwargs)
    if not isinstance(ours, (torch.Tensor, tuple, list)) and site.endswith("output"):
        return _without_absent(ours if isinstance(ours, Mapping) else vars(ours))
    return ours
