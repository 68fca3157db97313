"""The exceptions of vlscope. All derive from `VlscopeError` and survive pickling."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "ConfigError",
    "InputError",
    "LateEditError",
    "NotReachedError",
    "OutOfMemory",
    "OutOfOrderError",
    "Unavailable",
    "UnknownSite",
    "UnsupportedFamily",
    "VlscopeError",
]


class VlscopeError(Exception):
    """Base of every error that vlscope raises on purpose."""


class ConfigError(VlscopeError, ValueError):
    """`config.json` is wrong or incomplete."""


class UnsupportedFamily(ConfigError):
    """The checkpoint is of a family that vlscope does not load."""


class CheckpointError(VlscopeError, ValueError):
    """A weight file is damaged, incomplete or at odds with the configuration."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """A checkpoint path does not lead to what it should."""


class InputError(VlscopeError, ValueError):
    """Token ids, masks, grids, pixels, images or a written value do not fit."""


class UnknownSite(InputError, KeyError):
    """No value goes by this name, or by this pattern of names."""

    __str__ = Exception.__str__  # KeyError would put the message in quotes


class Unavailable(VlscopeError, RuntimeError):
    """This model, this load or this mode cannot serve the value at all."""


class OutOfMemory(VlscopeError, MemoryError):
    """A tensor could not be allocated. The trace that asked for it has ended; the model works on."""


class OutOfOrderError(VlscopeError, RuntimeError):
    """The forward has already passed the value."""


class NotReachedError(OutOfOrderError):
    """The forward of this input never reaches the value."""


class LateEditError(VlscopeError, RuntimeError):
    """A served value was edited after the forward had moved on from it."""
