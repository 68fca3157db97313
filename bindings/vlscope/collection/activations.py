"""States of one token of many prompts, in memory: the collector's rows without its files.

Prompts are what `model.trace` takes, or dicts of its arguments, `{"prompt": ..., "images": [...]}`. A position
counts in the prompt's own tokens, padding left out; negatives count from its end. Results are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..recording import Recording
from . import forward
from .dataset import arguments
from .rows import RowIndex, resolve

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

__all__ = [
    "collect_last_token_activations_session",
    "collect_token_activations_batched",
    "compute_next_token_probs",
    "get_token_activations",
]

GetActivations = Callable[["StandardizedTransformer", int], torch.Tensor]


def get_token_activations(
    nn_model: StandardizedTransformer,
    prompts: Any = None,
    layers: int | Sequence[int] | None = None,
    get_activations: GetActivations | None = None,
    remote: bool = False,
    idx: int | None = None,
    tracer: Any = None,
    **inputs: Any,
) -> torch.Tensor:
    """The state of one token of each prompt behind each block, from one forward that stops at the last.

    >>> get_token_activations(model, ["The capital of France is", "Hello"], layers=[2, 4]).shape
    torch.Size([2, 2, 64])

    Args:
        prompts: one, or several as a batch.
        layers: blocks, in the order of the result; all by default.
        get_activations: called with the model and a block within the trace, gives [batch, seq, ...] of
            tokens; by default the block's `layer_output`.
        idx: the token; the last by default.
        tracer: an open trace of these prompts, read instead of a forward of its own.
        inputs: of the trace, such as `images=`.

    Returns:
        [layers, prompts, hidden_size].

    Raises:
        InputError: a prompt without the token `idx`, before any compute.
    """
    _check_local(remote)
    if tracer is not None:
        return _read(nn_model, _encoding_of(tracer), _blocks(nn_model, layers), get_activations, idx)
    batch = _encode_batch(nn_model, prompts, inputs)
    if get_activations is None:
        return _collected(nn_model, batch, _blocks(nn_model, layers), idx)
    with torch.no_grad(), nn_model.trace(**batch) as own:
        found = _read(nn_model, batch, _blocks(nn_model, layers), get_activations, idx)
        own.stop()
    return found
