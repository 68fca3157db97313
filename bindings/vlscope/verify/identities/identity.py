"""What an identity is, and the few words that identities are written in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ...sites import read
from ..comparison import difference

if TYPE_CHECKING:
    from ...model import StandardizedTransformer
    from ..prompts import Inputs

__all__ = ["ALL", "Broken", "Identity", "Model", "Prompts"]

Model = Any  # a StandardizedTransformer: which modules it has differs from family to family
Prompts = SimpleNamespace
Check = Callable[[Model, Prompts], None]

#: Of the largest magnitude: how far two ways of computing the same thing may lie apart in float32.
ROUNDING = 1e-5


class Broken(AssertionError):
    """An identity does not hold: the message names the values and how they differ."""


@dataclass(frozen=True)
class Identity:
    """One sentence that holds of every checkpoint that `applies`.

    Attributes:
        suite: what it is about: "text", "vision", "positions", ...
        sentence: in words.
        check: raises `Broken` where it does not hold.
        applies: whether a model has what it is about.
    """

    suite: str
    sentence: str
    check: Check
    applies: Callable[[Model], bool]

    def fault(self, model: StandardizedTransformer, prompts: Prompts) -> str | None:
        """None where it holds, else what is wrong."""
        try:
            with torch.no_grad():
                self.check(model, prompts)
        except Broken as broken:
            return str(broken)
        except Exception as error:  # whatever a check runs into is what is wrong
            return f"{type(error).__name__}: {error}"
        return None


#: Every identity, in the order in which `vlscope verify` goes through them.
ALL: list[Identity] = []


def always(model: Model) -> bool:
    return True


def identity(applies: Callable[[Model], bool] = always) -> Callable[[Check], Check]:
    """Adds a function to `ALL`: its module is the suite, its name the sentence."""

    def add(check: Check) -> Check:
        suite = check.__module__.rpartition(".")[2].replace("_", " ")
        ALL.append(Identity(suite, check.__name__.replace("_", " "), check, applies))
        return check

    return add


def require(condition: Any, message: str) -> None:
    if not condition:
        raise Broken(message)


def equal(ours: Any, theirs: Any, what: str) -> None:
    """Both are the same bits."""
    if (text := difference(ours, theirs)) is not None:
        raise Broken(f"{what}: {text}")


def close(ours: Any, theirs: Any, what: str, tolerance: float = ROUNDING) -> None:
    """Both are the same, up to the rounding of another order of sums."""
    if (text := difference(ours, theirs, tolerance)) is not None:
        raise Broken(f"{what}: {text}")


def moved(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Both differ by more than rounding."""
    least = ROUNDING * max(1.0, float(theirs.abs().max()))
    require((ours - theirs).abs().max() > least, f"{what} is as it was, and should have moved")


def raises(error: type[Exception], call: Callable[[], object], what: str) -> str:
    """The message of the error that `call` raises."""
    try:
        call()
    except error as caught:
        return str(caught)
    raise Broken(f"{what} raises no {error.__name__}")


def values(model: Model, inputs: Inputs, *sites: str) -> list[Any]:
    """The values of `sites`, read in the order given in one trace."""
    with model.trace(**inputs):
        return [read(model, site) for site in sites]


def logits_of(model: Model, inputs: Inputs, edit: Callable[[], object] = lambda: None) -> torch.Tensor:
    """The logits of a trace in which `edit` was made."""
    with model.trace(**inputs):
        edit()
        logits: torch.Tensor = model.logits
    return logits


def text_config(model: Model) -> Mapping[str, Any]:
    """The text model's part of config.json."""
    config: Mapping[str, Any] = model.config
    part: Mapping[str, Any] = config.get("text_config", config)
    return part


def attending(model: Model) -> list[int]:
    """The text blocks that attend; in Qwen3.5 one of several."""
    return [i for i, layer in enumerate(model.layers) if hasattr(layer, "self_attn")]


def recurrent(model: Model) -> list[int]:
    """The text blocks with a state in place of attention."""
    return [i for i, layer in enumerate(model.layers) if hasattr(layer, "linear_attn")]


def mixer(model: Model, i: int) -> str:
    """The site of what mixes the tokens in block i."""
    return f"layers.{i}.{'self_attn' if hasattr(model.layers[i], 'self_attn') else 'linear_attn'}"


def mixtures(model: Model) -> list[Any]:
    """The MLPs that are mixtures of experts."""
    return [layer.mlp for layer in model.layers if hasattr(layer.mlp, "experts")]


def has_several_blocks(model: Model) -> bool:
    return min(model.num_layers, model.vision.num_layers) > 1


def routes(model: Model) -> bool:
    """Whether which rows a product has may depend on the values: then an edit of some tokens moves
    the last bits of others."""
    return bool(mixtures(model))


def cells(grid: torch.Tensor) -> int:
    """Tokens that a grid of patches makes."""
    return math.prod(grid.tolist()) // 4
