"""Activations of many prompts on disk: collected, resumed, spread over machines, and read back.

>>> vlscope.collect(model, "prompts.jsonl", ["layers.3.layer_output"], "acts", rows="image", dtype=torch.float16)
>>> rows = vlscope.ActivationDataset("acts")["layers.3.layer_output"]
"""

from .activations import (
    collect_last_token_activations_session,
    collect_token_activations_batched,
    compute_next_token_probs,
    get_token_activations,
)
from .collector import Collected, collect
from .manifest import Statistics
from .merge import Merged, merge
from .reader import ActivationDataset, ActivationStream, Column
from .rows import RowIndex

__all__ = [
    "ActivationDataset",
    "ActivationStream",
    "Collected",
    "Column",
    "Merged",
    "RowIndex",
    "Statistics",
    "collect",
    "collect_last_token_activations_session",
    "collect_token_activations_batched",
    "compute_next_token_probs",
    "get_token_activations",
    "merge",
]
