"""States of one token of many prompts, in memory: the collector's rows without its files.

Prompts are what `model.trace` takes, or dicts of its arguments, `{"prompt": ..., "images": [...]}`. A position
counts in the prompt's own tokens, padding left out; negatives count from its end. Results are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..recording import Recording
from . import forward
from .dataset import arguments
from .rows import RowIndex, Selection, Stream, locate, resolve

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
    blocks = [nn_model._layer_index(layer, nn_model.num_layers) for layer in _several(nn_model, layers)]
    select = _token(-1 if idx is None else idx)
    with torch.no_grad():
        if tracer is not None:
            return _read(nn_model, {"attention_mask": tracer.attention_mask}, blocks, get_activations, select)
        batch = _encoded(nn_model, prompts, inputs)
        if get_activations is None:
            return _collected(nn_model, batch, blocks, select)
        with nn_model.trace(**batch):
            return _read(nn_model, batch, blocks, get_activations, select)


def collect_token_activations_batched(
    nn_model: StandardizedTransformer,
    prompts: Sequence[Any],
    batch_size: int,
    layers: int | Sequence[int] | None = None,
    get_activations: GetActivations | None = None,
    remote: bool = False,
    idx: int | None = None,
    tqdm: Callable[..., Any] | None = None,
    use_session: bool = True,
) -> torch.Tensor:
    """`get_token_activations` of many prompts, `batch_size` at a time.

    Args:
        tqdm: wraps the batches, as `tqdm.tqdm` does; by default nothing is shown.
        use_session: makes no difference: a trace runs where it stands.

    Returns:
        [layers, prompts, hidden_size].
    """
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; give 1 or more")
    if not len(prompts):
        raise InputError("the list of prompts is empty")
    starts: Any = range(0, len(prompts), batch_size)
    found = [
        get_token_activations(
            nn_model, prompts[start : start + batch_size], layers, get_activations, remote=remote, idx=idx
        )
        for start in (starts if tqdm is None else tqdm(starts))
    ]
    return torch.cat(found, 1)


def collect_last_token_activations_session(
    nn_model: StandardizedTransformer,
    prompts: Sequence[Any],
    batch_size: int,
    layers: int | Sequence[int] | None = None,
    get_activations: GetActivations | None = None,
    remote: bool = False,
    idx: int | None = None,
) -> torch.Tensor:
    """`collect_token_activations_batched` by the name that it has where traces run elsewhere, in one session."""
    return collect_token_activations_batched(
        nn_model, prompts, batch_size, layers, get_activations, remote=remote, idx=idx
    )


def compute_next_token_probs(
    nn_model: StandardizedTransformer, prompts: Any, remote: bool = False, **inputs: Any
) -> torch.Tensor:
    """The next token's probabilities of one prompt or a batch: [prompts, vocab_size]."""
    _check_local(remote)
    with torch.no_grad(), nn_model.trace(**_encoded(nn_model, prompts, inputs)):
        return nn_model.next_token_probs.cpu()


def _check_local(remote: bool) -> None:
    if remote:
        raise InputError("remote=True: the forward runs in this process; leave it out")


def _several(model: StandardizedTransformer, layers: int | Sequence[int] | None) -> Sequence[int]:
    if layers is None:
        return range(model.num_layers)
    return [layers] if isinstance(layers, int) else layers


def _token(idx: int) -> Callable[[RowIndex], list[int]]:
    """The rows of one token."""

    def select(index: RowIndex) -> list[int]:
        if not -len(index) <= idx < len(index):
            raise InputError(f"idx is {idx}, and prompt {int(index.sample[0])} has {len(index)} tokens")
        return [idx]

    return select


def _collected(
    model: StandardizedTransformer, batch: Mapping[str, torch.Tensor], blocks: Sequence[int], select: Selection
) -> torch.Tensor:
    names = [f"layers.{block}.layer_output" for block in blocks]
    rows = forward.run(model, batch, range(len(batch["input_ids"])), resolve(model, names), select)
    return torch.stack([rows[name][1] for name in names])


def _read(
    model: StandardizedTransformer,
    batch: Mapping[str, torch.Tensor],
    blocks: Sequence[int],
    get_activations: GetActivations | None,
    select: Selection,
) -> torch.Tensor:
    """The token's states in the open trace of a batch, of which the mask is needed alone."""
    mask = batch.get("attention_mask")
    ids = torch.zeros_like(batch["input_ids"] if mask is None else mask)
    tokens = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
    located = locate(model, tokens, range(len(ids)), select)(Stream.TOKENS)
    states = {}
    for block in sorted(set(blocks)):
        value = model.layers[block].layer_output if get_activations is None else get_activations(model, block)
        states[block] = value[located.prompts, located.places].cpu()
    return torch.stack([states[block] for block in blocks])


def _encoded(model: StandardizedTransformer, prompts: Any, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The tensors of a prompt or a batch; a batch may hold dicts of arguments."""
    if isinstance(prompts, Recording):
        return prompts.inputs
    if _is_sample(prompts):
        return model.encode(**arguments(prompts), **inputs)
    if isinstance(prompts, (list, tuple)) and any(map(_is_sample, prompts)):
        if inputs:
            raise InputError(
                f"{', '.join(inputs)} cannot be given beside prompts that are dicts: give them in the dicts"
            )
        return forward.join([forward.encode(model, arguments(prompt)) for prompt in prompts])
    return model.encode(prompts, **inputs)


def _is_sample(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and ("prompt" in prompt or "messages" in prompt)
