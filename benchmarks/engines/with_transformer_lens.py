"""TransformerLens 4.3.0's bridge for Qwen3-VL, with `run_with_hooks`. It is built on the eager forward,
which its pattern hooks need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from with_hooks import Untraced, load

TAPS = 3


class Bridge(Untraced):
    def __init__(self, bridge: Any, model: Any, inputs: Mapping[str, Any]) -> None:
        super().__init__(model, inputs)
        self.bridge = bridge
        self.ids = self.run.pop("input_ids")
        self.layers, self.blocks = len(model.model.language_model.layers), len(model.model.visual.blocks)

    def nothing(self) -> list[torch.Tensor]:
        return [self.bridge(self.ids, **self.run)]

    def last_logits(self) -> list[torch.Tensor]:
        return [self.bridge(self.ids, **self.run, logits_to_keep=1)]

    def _hooked(self, names: list[str], hook: Callable[..., Any], **options: Any) -> torch.Tensor:
        return self.bridge.run_with_hooks(self.ids, fwd_hooks=[(name, hook) for name in names], **self.run, **options)

    def _kept(self, names: list[str], part: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []

        def keep(value: torch.Tensor, hook: Any) -> None:
            kept.append(part(value))

        self._hooked(names, keep)
        return kept

    def one_value(self) -> list[torch.Tensor]:
        return self._kept(["blocks.1.hook_out"], lambda value: value)

    def every_layer(self) -> list[torch.Tensor]:
        return self._kept([f"blocks.{k}.hook_out" for k in range(self.layers)], lambda value: value)

    def every_vision_block(self) -> list[torch.Tensor]:
        return self._kept([f"vision_encoder.blocks.{k}.hook_out" for k in range(self.blocks)], lambda value: value)

    def last_rows(self) -> list[torch.Tensor]:
        names = [f"blocks.{k}.attn.hook_pattern" for k in range(self.layers)]
        return self._kept(names, lambda pattern: pattern[:, :, -1].clone())

    def zeroed(self) -> list[torch.Tensor]:
        names = [f"vision_encoder.deepstack_mergers.{k}.hook_out" for k in range(TAPS)]
        return [self._hooked([*names, "vision_projector.hook_out"], lambda value, hook: torch.zeros_like(value))]

    def layer_sweep(self) -> list[torch.Tensor]:
        kept = []
        for layer, row in enumerate(self.inputs["rows"]):

            def patch(value: torch.Tensor, hook: Any, row: torch.Tensor = row) -> torch.Tensor:
                value[:, -1] = row
                return value

            kept.append(self._hooked([f"blocks.{layer}.hook_out"], patch, logits_to_keep=1))
        return kept


def engines(checkpoint: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = load(checkpoint, "eager")
    bridge = build_bridge_from_module(
        model, "Qwen3VLForConditionalGeneration", hf_config=model.config, model_name=checkpoint.name
    )
    return {"TransformerLens": Bridge(bridge, model, inputs)}
