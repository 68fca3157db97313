"""The exceptions of vlscope. All derive from `VlscopeError` and survive pickling."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "CollectionError",
    "ConfigError",
    "InputError",
    "LateEditError",
    "MissingPackage",
    "NonFiniteError",
    "NotReachedError",
    "OutOfMemory",
    "OutOfOrderError",
    "TokenizationError",
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


class CollectionError(VlscopeError, RuntimeError):
    """A folder of collected activations cannot be gone on with or read, or a sample cannot be collected."""


class InputError(VlscopeError, ValueError):
    """Token ids, masks, grids, pixels, images or a written value do not fit."""


class TokenizationError(InputError):
    """A word has no first token that is its own."""


class UnknownSite(InputError, KeyError):
    """No value goes by this name, or by this pattern of names."""

    __str__ = Exception.__str__  # KeyError would put the message in quotes


class Unavailable(VlscopeError, RuntimeError):
    """This model, this load or this mode cannot serve the value at all."""


class MissingPackage(VlscopeError, ImportError):
    """A part of vlscope needs a package that is not installed."""


class OutOfMemory(VlscopeError, MemoryError):
    """A tensor could not be allocated. The trace that asked for it has ended; the model works on."""


class NonFiniteError(VlscopeError, ArithmeticError):
    """The logits of a step of a generation are no numbers to choose a token by."""


class OutOfOrderError(VlscopeError, RuntimeError):
    """The forward has already passed the value."""


class NotReachedError(OutOfOrderError):
    """The forward of this input never reaches the value."""


class LateEditError(VlscopeError, RuntimeError):
    """A served value was edited after the forward had moved on from it."""
