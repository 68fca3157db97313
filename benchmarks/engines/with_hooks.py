"""transformers: untraced under both attention implementations, with forward hooks, and with hooks and the
vision features cached by hand. All share one set of weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch

Hook = Callable[[torch.nn.Module, Any, Any], Any]


def load(checkpoint: Path, attention: str, weights_of: torch.nn.Module | None = None) -> Any:
    """A model; with `weights_of`, on that model's own tensors."""
    from transformers import Qwen3VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, attn_implementation=attention, dtype=torch.float32
    ).eval()
    if weights_of is not None:
        model.load_state_dict(weights_of.state_dict(), assign=True)
        model.tie_weights()
    return model


@contextlib.contextmanager
def hooked(hooks: list[tuple[torch.nn.Module, Hook]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Untraced:
    def __init__(self, model: Any, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        types = (inputs["corrupted"]["input_ids"] == model.config.image_token_id).int()
        options = {"mm_token_type_ids": types, "use_cache": False}
        self.run, self.clean = ({**inputs[name], **options} for name in ("corrupted", "clean"))

    def nothing(self) -> list[torch.Tensor]:
        return [self.model(**self.run).logits]

    def last_logits(self) -> list[torch.Tensor]:
        return [self.model(**self.run, logits_to_keep=1).logits]


class Hooks(Untraced):
    """Hooks that are registered and removed inside each run; `eager` serves where patterns are asked for."""

    nothing = last_logits = None

    def __init__(self, model: Any, eager: Any, inputs: Mapping[str, Any]) -> None:
        super().__init__(model, inputs)
        self.eager = eager
        self.layers, self.blocks = model.model.language_model.layers, model.model.visual.blocks

    def _kept(self, modules: Any) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with hooked([(module, lambda _m, _i, output: kept.append(output)) for module in modules]):
            self.model(**self.run)
        return kept

    def one_value(self) -> list[torch.Tensor]:
        return self._kept([self.layers[1]])

    def every_layer(self) -> list[torch.Tensor]:
        return self._kept(self.layers)

    def every_vision_block(self) -> list[torch.Tensor]:
        return self._kept(self.blocks)

    def last_rows(self) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []

        def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            kept.append(output[1][:, :, -1].clone())

        with hooked([(layer.self_attn, keep) for layer in self.eager.model.language_model.layers]):
            self.eager(**self.run)
        return kept

    def zeroed(self) -> list[torch.Tensor]:
        visual = self.model.model.visual
        with hooked(
            [
                (merger, lambda _m, _i, output: torch.zeros_like(output))
                for merger in (*visual.deepstack_merger_list, visual.merger)
            ]
        ):
            return [self.model(**self.run).logits]

    def _patched(self, layer: int, position: Any, row: torch.Tensor) -> torch.Tensor:
        """The last row's logits with `row` in place of the block's output at `position`."""

        def patch(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            output[:, position] = row

        with hooked([(self.layers[layer], patch)]):
            return self.model(**self.run, logits_to_keep=1).logits

    def layer_sweep(self) -> list[torch.Tensor]:
        return [self._patched(layer, -1, row) for layer, row in enumerate(self.inputs["rows"])]

    def position_sweep(self) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        with hooked([(layer, lambda _m, _i, output: values.append(output)) for layer in self.layers]):
            self.model(**self.clean, logits_to_keep=1)
        first, second = self.inputs["metric"]
        with self._ready():
            logits = [
                [self._patched(layer, position, value[:, position]) for position in self.inputs["positions"]]
                for layer, value in enumerate(values)
            ]
        return [torch.stack([torch.stack([x[0, -1, first] - x[0, -1, second] for x in row]) for row in logits])]

    def _ready(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class CachedVision(Hooks):
    """What a careful user writes for a sweep: the tower runs once and its features serve every forward."""

    one_value = every_layer = every_vision_block = last_rows = zeroed = None

    @contextlib.contextmanager
    def _ready(self) -> Iterator[None]:
        model = self.model.model
        features = model.get_image_features(self.run["pixel_values"], self.run["image_grid_thw"], return_dict=True)
        model.get_image_features = lambda *_args, **_options: features
        try:
            yield
        finally:
            del model.get_image_features

    def layer_sweep(self) -> list[torch.Tensor]:
        with self._ready():
            return super().layer_sweep()


def engines(checkpoint: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    sdpa = load(checkpoint, "sdpa")
    eager = load(checkpoint, "eager", sdpa)
    return {
        "transformers": Untraced(sdpa, inputs),
        "transformers, eager": Untraced(eager, inputs),
        "hooks": Hooks(sdpa, eager, inputs),
        "hooks, vision cached": CachedVision(sdpa, eager, inputs),
    }
