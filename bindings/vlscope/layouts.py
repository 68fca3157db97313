"""Layouts: what kind of tensor a value is. `isinstance(x, Residual)` checks rank and dtype kind.

>>> type(model.layers[0]).layer_output.layout
<layout Residual [batch seq hidden_size]>
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "ExpertIndices",
    "ExpertOutputs",
    "ExpertWeights",
    "Gates",
    "HeadOutputs",
    "ImageFeatures",
    "ImagePattern",
    "ImageTokenMask",
    "Keys",
    "LinearQK",
    "LinearV",
    "Logits",
    "NextTokenProbs",
    "Patches",
    "Pattern",
    "Queries",
    "Residual",
    "RouterLogits",
    "State",
    "States",
    "Tokens",
    "Values",
]


class Layout(type):
    """The class of all layouts: a name, the axes that its values usually have, and a dtype kind."""

    axes: str
    kind: str

    def __new__(cls, name: str, axes: str, kind: str = "float") -> Layout:
        return super().__new__(cls, name, (), {"axes": axes, "kind": kind, "__slots__": ()})

    def __init__(cls, name: str, axes: str, kind: str = "float") -> None:
        super().__init__(name, (), {})

    def __instancecheck__(cls, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.ndim != len(cls.axes.split()):
            return False
        if cls.kind == "bool":
            return value.dtype == torch.bool
        return value.is_floating_point() == (cls.kind == "float") and value.dtype != torch.bool

    def __repr__(cls) -> str:
        return f"<layout {cls.__name__} [{cls.axes}]>"


Residual = Layout("Residual", "batch seq hidden_size")
Tokens = Layout("Tokens", "batch seq", "int")
Logits = Layout("Logits", "batch seq vocab_size")
NextTokenProbs = Layout("NextTokenProbs", "batch vocab_size")
Queries = Layout("Queries", "batch heads seq head_dim")
Keys = Layout("Keys", "batch kv_heads seq head_dim")
Values = Layout("Values", "batch kv_heads seq head_dim")
Pattern = Layout("Pattern", "batch heads query key")
ImagePattern = Layout("ImagePattern", "heads query key")
HeadOutputs = Layout("HeadOutputs", "batch seq heads head_dim")
LinearQK = Layout("LinearQK", "batch seq linear_heads linear_key_dim")
LinearV = Layout("LinearV", "batch seq linear_heads linear_value_dim")
Gates = Layout("Gates", "batch seq linear_heads")
State = Layout("State", "batch linear_heads linear_key_dim linear_value_dim")
States = Layout("States", "batch seq linear_heads linear_key_dim linear_value_dim")
RouterLogits = Layout("RouterLogits", "batch seq experts")
ExpertWeights = Layout("ExpertWeights", "batch seq top_k")
ExpertIndices = Layout("ExpertIndices", "batch seq top_k", "int")
ExpertOutputs = Layout("ExpertOutputs", "batch seq top_k hidden_size")
Patches = Layout("Patches", "images patches vision_hidden_size")
ImageTokenMask = Layout("ImageTokenMask", "batch seq", "bool")
ImageFeatures = Layout("ImageFeatures", "image_tokens hidden_size")
