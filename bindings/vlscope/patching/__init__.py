"""Causal experiments: patching, ablation, attribution, attention knockout, path patching.

All of it is a few lines over `model.trace`, and ordinary code can mix it with edits of its own:
`replace` and `knockout` act on an open trace; `collect`, `mean` and `resample` gather what to put in;
`sweep`, `ablate`, `attribution` and `path` run whole experiments.

Prompts are whatever `model.trace` takes; a prompt with images is the dict of the arguments, `{"prompt":
"What color is this?", "images": [picture]}`. A list of prompts of the same length is run as a batch.

A metric is a function of the logits [batch, seq, vocab_size] that gives one number, or a pair of tokens
(texts or ids): the logit of the first minus that of the second at the last position. For a batch it
is the mean of these, and pairs may be given for each prompt.

Sites are named as in `vlscope.sites`. Where `layers=` is taken, `site` is the part below the block.
"""

from __future__ import annotations

from .donors import collect, mean, noise, resample, zero
from .edits import knockout, replace, windows
from .experiments import Cells, ablate, attribution, path, sweep

__all__ = [
    "Cells",
    "ablate",
    "attribution",
    "collect",
    "knockout",
    "mean",
    "noise",
    "path",
    "replace",
    "resample",
    "sweep",
    "windows",
    "zero",
]
