"""vlscope: untraced, and traced under both attention implementations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import vlscope
from vlscope import patching

#: The faster mode of a sweep, where the engine has it.
AFFECTED = {"rows": "affected"} if "rows" in inspect.signature(patching.sweep).parameters else {}


class Untraced:
    def __init__(self, model: vlscope.StandardizedTransformer, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        self.run = inputs["corrupted"]

    def nothing(self) -> list[torch.Tensor]:
        return [self.model(**self.run).logits]

    def last_logits(self) -> list[torch.Tensor]:
        return [self.model(**self.run, logits_to_keep=1).logits]


class Traced(Untraced):
    def nothing(self) -> list[torch.Tensor]:
        with self.model.trace(**self.run):
            logits = self.model.logits
        return [logits]

    def last_logits(self) -> list[torch.Tensor]:
        with self.model.trace(**self.run, logits_to_keep=1):
            logits = self.model.logits
        return [logits]

    def one_value(self) -> list[torch.Tensor]:
        with self.model.trace(**self.run):
            value = self.model.layers[1].layer_output.save()
        return [value]

    def every_layer(self) -> list[torch.Tensor]:
        with self.model.trace(**self.run):
            return [layer.layer_output.save() for layer in self.model.layers]

    def every_vision_block(self) -> list[torch.Tensor]:
        with self.model.trace(**self.run):
            return [block.layer_output.save() for block in self.model.vision.layers]

    def last_rows(self) -> list[torch.Tensor]:
        with self.model.trace(**self.run):
            return [layer.self_attn.attention_row().save() for layer in self.model.layers]

    def pattern(self) -> list[torch.Tensor]:
        with self.model.trace(**self.run):
            return [self.model.layers[1].self_attn.attention_probabilities.save()]

    def zeroed(self) -> list[torch.Tensor]:
        model = self.model
        with model.trace(**self.run):
            model.vision.image_features[:] = 0
            for k in range(len(model.config["vision_config"]["deepstack_visual_indexes"])):
                model.layers[k].deepstack_output[:] = 0
            logits = model.logits.save()
        return [logits]


class Recorded(Traced):
    """Sweeps over a recording of the prompt, which is made on the clock."""

    def layer_sweep(self) -> list[torch.Tensor]:
        return sweep(self, {"prompt": self.model.record(**self.run)})

    def position_sweep(self) -> list[torch.Tensor]:
        cells = patching.sweep(
            self.model,
            self.inputs["clean"],
            self.run,
            "layer_output",
            positions=self.inputs["positions"],
            metric=self.inputs["metric"],
            progress=False,
            **AFFECTED,
        )
        return [cells.values]


class Unrecorded(Untraced):
    """The same layer sweep by traces of the prompt itself."""

    nothing = last_logits = None

    def layer_sweep(self) -> list[torch.Tensor]:
        return sweep(self, self.run)


def sweep(engine: Untraced, prompt: Mapping[str, Any]) -> list[torch.Tensor]:
    """The last row's logits, once for each block with the clean run's value at its last position."""
    model, logits = engine.model, []
    for layer, row in zip(model.layers, engine.inputs["rows"], strict=True):
        with model.trace(**prompt, logits_to_keep=1):
            layer.layer_output[:, -1] = row
            logits.append(model.logits.save())
    return logits


def engines(checkpoint: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    sdpa = vlscope.load(checkpoint, task="image-text-to-text")
    eager = vlscope.load(checkpoint, attn_implementation="eager")
    return {
        "ours, untraced": Untraced(sdpa, inputs),
        "ours, untraced eager": Untraced(eager, inputs),
        "ours": Recorded(sdpa, inputs),
        "ours, eager": Traced(eager, inputs),
        "ours, no recording": Unrecorded(sdpa, inputs),
    }
