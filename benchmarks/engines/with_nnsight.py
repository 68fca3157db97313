"""nnsight 0.8.1 around transformers' module; its forward is sdpa's except where patterns are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from with_hooks import Untraced, load


class Traced(Untraced):
    def __init__(self, model: Any, eager: Any, inputs: Mapping[str, Any]) -> None:
        import nnsight

        super().__init__(model, inputs)
        self.save = nnsight.save
        self.traced, self.eager = nnsight.NNsight(model), nnsight.NNsight(eager)
        self.layers, self.blocks = self.traced.model.language_model.layers, self.traced.model.visual.blocks

    def nothing(self) -> list[torch.Tensor]:
        with self.traced.trace(**self.run):
            logits = self.traced.output.logits.save()
        return [logits]

    def last_logits(self) -> list[torch.Tensor]:
        with self.traced.trace(**self.run, logits_to_keep=1):
            logits = self.traced.output.logits.save()
        return [logits]

    def one_value(self) -> list[torch.Tensor]:
        with self.traced.trace(**self.run):
            value = self.layers[1].output.save()
        return [value]

    def every_layer(self) -> list[torch.Tensor]:
        with self.traced.trace(**self.run):
            kept = self.save([])
            for layer in self.layers:
                kept.append(layer.output)
        return kept

    def every_vision_block(self) -> list[torch.Tensor]:
        with self.traced.trace(**self.run):
            kept = self.save([])
            for block in self.blocks:
                kept.append(block.output)
        return kept

    def last_rows(self) -> list[torch.Tensor]:
        with self.eager.trace(**self.run):
            kept = self.save([])
            for layer in self.eager.model.language_model.layers:
                kept.append(layer.self_attn.output[1][:, :, -1].clone())
        return kept

    def zeroed(self) -> list[torch.Tensor]:
        traced = self.traced
        with traced.trace(**self.run):
            for merger in traced.model.visual.deepstack_merger_list:
                merger.output = torch.zeros_like(merger.output)
            traced.model.visual.merger.output = torch.zeros_like(traced.model.visual.merger.output)
            logits = traced.output.logits.save()
        return [logits]

    def layer_sweep(self) -> list[torch.Tensor]:
        kept = []
        for layer, row in zip(self.layers, self.inputs["rows"], strict=True):
            with self.traced.trace(**self.run, logits_to_keep=1):
                layer.output[:, -1] = row
                logits = self.traced.output.logits.save()
            kept.append(logits)
        return kept


def engines(checkpoint: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    sdpa = load(checkpoint, "sdpa")
    return {"nnsight": Traced(sdpa, load(checkpoint, "eager", sdpa), inputs)}
