"""Recordings: one forward kept, from which later traces of the same prompt start in the middle."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import _core
from .errors import CheckpointError, CheckpointNotFound, InputError

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["Recording", "Tail"]

_FORMAT = "vlscope recording 1"
_INPUT = "input."


def _identity(model: StandardizedTransformer) -> dict[str, str]:
    """What must be the same for a recording to be what the model would compute."""
    config = json.dumps(dict(model.config), sort_keys=True).encode()
    return {
        "config": hashlib.sha256(config).hexdigest(),
        "dtype": str(model.dtype),
        "device": str(model.device),
        "attn_implementation": model.attn_implementation,
        "patch_embedding": model.patch_embedding,
    }


class Recording:
    """What one forward of a prompt gave its text blocks: made by `model.record`, traced by
    `model.trace(recording)`.

    Such a trace is the trace of the prompt, bit for bit, for any reads and edits. It computes less: as
    long as nothing has been changed, each block starts from the stream that was recorded for it and the
    vision tower is not run, so the forward begins at the first value that is read or edited.

    It keeps the stream [batch, seq, hidden_size] entering every text block and the final norm, and the
    features of images and videos: `(num_layers + 1) * batch * seq * hidden_size` elements and the
    tower's output, `nbytes` in all; with `keys`, also every block's keys and values. The caller's
    tensors are not copied: do not edit them while the recording is in use.
    """

    def __init__(
        self, core: _core.Recording, inputs: Mapping[str, torch.Tensor], identity: Mapping[str, str], weights: Any
    ) -> None:
        self._core = core
        self._inputs = dict(inputs)
        self._identity = dict(identity)
        self._weights = weights  # the model that it was made on, weakly, and the state of its weights

    @classmethod
    def of(cls, model: StandardizedTransformer, inputs: Mapping[str, torch.Tensor], keys: bool) -> Recording:
        """Record a forward of `inputs`; `model.record` is the usual way."""
        for name, tensor in inputs.items():
            if tensor.requires_grad:
                raise InputError(f"{name} requires grad, and a recording keeps no graph: trace the prompt itself")
        model.dispatch()
        core = model._core.record(_core.Inputs(inputs), keys)
        return cls(core, inputs, _identity(model), (weakref.ref(model), model._core.weight_version()))

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors that were run: `input_ids`, and what went with them."""
        return dict(self._inputs)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept besides the inputs."""
        return self._core.nbytes

    def tail(self, first: int = 0, copies: int = 1) -> Tail:
        """The prompt from position `first` on, `copies` times; see `Tail`."""
        return Tail(self, first, copies)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one safetensors file, inputs included."""
        from safetensors.torch import save_file

        tensors = {_INPUT + name: tensor for name, tensor in self._inputs.items()} | self._core.tensors()
        stored = {name: tensor.contiguous().cpu().clone() for name, tensor in tensors.items()}
        save_file(stored, path, {"format": _FORMAT, **self._identity})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read a file that `save` wrote. It does not tell whether the weights are the same.

        Raises:
            CheckpointNotFound, CheckpointError: no such file, or no recording in it.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise CheckpointNotFound(f"{os.fspath(path)} does not exist: give a file that Recording.save wrote")
        try:
            with safe_open(path, "pt") as stored:
                metadata = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise CheckpointError(f"{os.fspath(path)} is no safetensors file: {error}") from None
        if metadata.pop("format", None) != _FORMAT:
            raise CheckpointError(f"{os.fspath(path)} holds no recording: its metadata has no format {_FORMAT!r}")
        inputs = {name.removeprefix(_INPUT): tensors.pop(name) for name in list(tensors) if name.startswith(_INPUT)}
        device = torch.device(metadata["device"])
        return cls(_core.Recording({name: x.to(device) for name, x in tensors.items()}), inputs, metadata, None)

    def _inputs_for(self, model: StandardizedTransformer, logits_to_keep: int) -> _core.Inputs:
        """The inputs of a trace that starts from here."""
        inputs = self._checked_inputs(model, logits_to_keep)
        inputs.replay(self._core)
        return inputs

    def _checked_inputs(self, model: StandardizedTransformer, logits_to_keep: int) -> _core.Inputs:
        """The prompt. Refused where another forward was recorded."""
        model.dispatch()
        for name, here in _identity(model).items():
            recorded = self._identity[name]
            if recorded != here:
                raise InputError(
                    f"the recording was made with another {name}: {recorded}; this model's is {here}. Record it again."
                )
        if self._weights is not None:
            made_on, version = self._weights
            if made_on() is model and model._core.weight_version() != version:
                raise InputError("weights were edited after the recording was made: record it again")
        return _core.Inputs(self._inputs, logits_to_keep)

    def __repr__(self) -> str:
        batch, seq = self._inputs["input_ids"].shape
        return f"<Recording of {batch} x {seq} tokens, {self.nbytes / 2**20:.1f} MiB>"


class Tail:
    """The last positions of a recorded prompt, in several copies: made by `recording.tail(first, copies)`,
    traced by `model.trace(tail)`.

    Attention is causal: what is changed at position `first` or later changes nothing before it. So the
    forward of a tail has the positions from `first` on alone, [copies, seq - first, hidden_size], and
    looks back at the recorded keys and values of those before; and each copy can be changed in its own
    way. Values with all positions as keys (`attention_keys`, `attention_values`, patterns) have them
    all. Nothing before the text blocks is reached.

    >>> clean = model.record("The capital of France is", keys=True)
    >>> with model.trace(clean.tail(3, copies=2)):  # positions 3 and 4
    ...     model.layers[2].layer_output[1, -1] = 0  # of the second copy
    ...     probs = model.next_token_probs.save()  # [2, vocab_size]

    Values are those of the prompt's own trace within 1e-5 of the largest number: a product of fewer rows
    differs in its last bits. With `logits_to_keep=1`, a last block that nobody reads gives keys and values
    of all positions and computes the rest for the last one alone.

    `first` above 0 needs a recording with `keys=True`, and a model of attention blocks alone.

    Raises:
        InputError: when traced: a recording of a batch or without keys, a `first` beyond the prompt.
    """

    def __init__(self, recording: Recording, first: int, copies: int) -> None:
        self.recording = recording
        self.first = operator.index(first)
        self.copies = operator.index(copies)

    def _inputs_for(self, model: StandardizedTransformer, logits_to_keep: int) -> _core.Inputs:
        if model.edits:
            raise InputError(
                f"the model keeps edits ({', '.join(edit.key for edit in model.edits)}), which are of whole prompts: "
                "trace the recording, or clear_edits() first"
            )
        inputs = self.recording._checked_inputs(model, logits_to_keep)
        inputs.replay_tail(self.recording._core, self.first, self.copies)
        return inputs

    def __repr__(self) -> str:
        return f"<{self.copies} x the tail from position {self.first} of {self.recording!r}>"
