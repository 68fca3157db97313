"""Identities: what holds of every checkpoint, whatever its weights.

Each is a function of a model and its prompts that raises `Broken` where it does not hold. They need
no other library: what is compared are the engine's own values, with each other and with the
arithmetic that they obey.
"""

from . import deepstack, linear_attention, mixture, positions, text, video, vision
from .identity import ALL, Broken, Identity

__all__ = ["ALL", "Broken", "Identity"]

del deepstack, linear_attention, mixture, positions, text, video, vision
