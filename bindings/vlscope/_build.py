"""What the extension was built for, checked before it is loaded: the dynamic linker's messages help nobody."""

from __future__ import annotations

import platform

#: The engine's binary interface is that of this release of torch.
TORCH = "2.11"

try:
    import torch
except ImportError as error:
    raise ImportError(f"vlscope was built for torch {TORCH}, and torch cannot be imported here: {error}") from error
if not hasattr(torch, "Tensor"):
    raise ImportError(f"{torch.__file__} hides the package torch: rename it, or start Python from another folder")
if str(torch.__version__).split(".")[:2] != TORCH.split("."):
    raise ImportError(
        f"vlscope was built for torch {TORCH}, and torch {torch.__version__} is installed: install torch=={TORCH}.*, "
        "or build vlscope anew"
    )
try:
    from . import _core  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"the engine of vlscope cannot be loaded by Python {platform.python_version()} with torch "
        f"{torch.__version__}; it was built for torch {TORCH}: {error}"
    ) from error
