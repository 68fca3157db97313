"""Pictures of what a model does with its images, drawn by matplotlib (`pip install vlscope[plot]`).

`attention`, `logit_lens` and `patch_norms` run a forward and draw what they read; `token_map`,
`patch_map` and `heat_map` draw numbers of your own, as they come out of a trace. The maps lie over the
images as the model sees them, each in raster order, whatever the grids; a video has a map for each
temporal patch.

All give a matplotlib `Figure`, to show in a notebook or to save: `figure.savefig("attention.png")`. With
`figure=` they draw into a figure, or a subfigure, of yours. A colour has one meaning throughout: purple
is a share of one, green an amount, red and blue are more and less.

Prompts are what `model.trace` takes, one at a time; standing edits (`model.edit`) are seen.
"""

from __future__ import annotations

from ..errors import MissingPackage

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise MissingPackage(f"pictures need matplotlib ({error}): pip install 'vlscope[plot]'") from None

from .cells import heat_map
from .maps import attention, logit_lens, patch_map, patch_norms, token_map

__all__ = ["attention", "heat_map", "logit_lens", "patch_map", "patch_norms", "token_map"]
