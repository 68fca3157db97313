"""Where the parts of a model live: on one device, or by `device_map=` on several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import InputError

__all__ = ["Part", "balanced", "check_device", "parts_of", "placed"]

#: Of a device's free memory, what weights may take: the rest is for what a trace holds.
_FOR_WEIGHTS = 0.9
#: For what fits nowhere else.
_REST = "cpu"


@dataclass(frozen=True)
class Part:
    """What is placed as one: its name as in a site ("layers.3"), its native path, the bytes of its weights."""

    name: str
    path: str
    nbytes: int


def check_device(device: str | torch.device) -> torch.device:
    """A device that this machine has. Refused here, not in the middle of a load."""
    try:
        known = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r} is unknown: {str(error).splitlines()[0]}") from None
    if known.type not in ("cpu", "cuda"):
        raise InputError(f'device is "{known}"; vlscope runs on "cpu" and "cuda"')
    if known.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f'device is "{known}", and this machine offers no CUDA device: use "cpu"')
    if known.type == "cuda" and (known.index or 0) >= torch.cuda.device_count():
        raise InputError(f'device is "{known}"; this machine has "cuda:0" to "cuda:{torch.cuda.device_count() - 1}"')
    return known


def parts_of(core: Any, dtype: torch.dtype | None) -> list[Part]:
    """The parts of a model that is not loaded yet, in the order in which a forward comes by them.

    `dtype` is what the weights will be; None for what config.json says. A tied head is no part of its own:
    it is the embedding.
    """
    entries = core.modules()
    paths = {entry["site_path"]: entry["path"] for entry in entries}
    blocks = [site for site in paths if re.fullmatch(r"layers\.\d+", site)]
    weights = {
        entry["path"]: [core.parameter(index, name) for name in entry["parameters"]]
        for index, entry in enumerate(entries)
    }
    total = sum(weight.numel() for held in weights.values() for weight in held)
    tied = total > core.count_weights()[1]  # which does not count a weight that is another's

    def nbytes(path: str) -> int:
        below = (held for of, held in weights.items() if f"{of}.".startswith(f"{path}."))
        return sum(weight.numel() * (dtype or weight.dtype).itemsize for held in below for weight in held)

    names = ["vision", "embed_tokens", *blocks, "norm", *([] if tied else ["lm_head"])]
    return [Part(name, paths[name], nbytes(paths[name])) for name in names]


def placed(parts: Sequence[Part], device_map: str | Mapping[str, str | torch.device]) -> dict[str, torch.device]:
    """The device of each part: by memory for "auto", else as the mapping says.

    Its keys are names of parts ("vision", "embed_tokens", "layers.3", "norm", "lm_head"), patterns of
    blocks ("layers.*", "layers.4:8"), or "" for every part that no other key names; of two keys the
    later one counts. "meta" as a device gives shapes without numbers, for planning.

    Raises:
        InputError: for a key that names no part, a part without a device, a device that is not here,
            or an image tower that lives elsewhere than the embedding of its tokens.
    """
    if device_map == "auto":
        return {name: torch.device(device) for name, device in balanced(parts, _room()).items()}
    if not isinstance(device_map, Mapping):
        raise InputError(f'device_map is {device_map!r}; give "auto", or a mapping of parts to devices')
    names = [part.name for part in parts]
    found: dict[str, torch.device] = {}
    for key, given in sorted(device_map.items(), key=lambda item: item[0] != ""):
        device = torch.device(given) if str(given) == "meta" else check_device(given)
        matched = _matches(key, names)
        if not matched:
            raise InputError(
                f"device_map has {key!r}, which is no part of this model: its parts are {_listed(names)}"
                f"{'' if 'lm_head' in names else ' (its head is tied to embed_tokens)'}"
            )
        found.update(dict.fromkeys(matched, device))
    missing = [name for name in names if name not in found]
    if missing:
        raise InputError(f'device_map has no device for {", ".join(missing)}: name them, or "" for the rest')
    if found["vision"] != found["embed_tokens"]:
        raise InputError(
            f"device_map has vision on {found['vision']} and embed_tokens on {found['embed_tokens']}: image features "
            "are put among the embeddings, so give both one device"
        )
    return {name: found[name] for name in names}


def _matches(key: str, names: Sequence[str]) -> list[str]:
    if key == "":
        return list(names)
    blocks = [name for name in names if name.startswith("layers.")]
    if key == "layers.*":
        return blocks
    ends = re.fullmatch(r"layers\.(-?\d*):(-?\d*)", key)
    if ends:
        return blocks[slice(*(int(end) if end else None for end in ends.groups()))]
    return [name for name in names if name == key]


def _listed(names: Sequence[str]) -> str:
    blocks = [name for name in names if name.startswith("layers.")]
    others = [name for name in names if not name.startswith("layers.")]
    return f"{', '.join(others)}, {blocks[0]} to {blocks[-1]}"


def _room() -> dict[str, float]:
    """The bytes of weights that each CUDA device takes."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {f"cuda:{index}": _FOR_WEIGHTS * torch.cuda.mem_get_info(index)[0] for index in devices}


def balanced(parts: Sequence[Part], room: Mapping[str, float]) -> dict[str, str]:
    """The device of each part where devices have `room` for so many bytes.

    Parts stay in order, so that the stream passes each device once, and no device is filled by a larger
    share of its room than must be. What fits on none, from the first such part on, goes to the CPU.
    """
    low, high = 0.0, 1.0  # The smallest share that holds all parts, if there is one, lies between.
    for _ in range(40):
        share = (low + high) / 2
        if _REST in _filled(parts, room, share).values():
            low = share
        else:
            high = share
    return _filled(parts, room, high)


def _filled(parts: Sequence[Part], room: Mapping[str, float], share: float) -> dict[str, str]:
    """Fills one device after the other, each to `share` of its room. The first two parts stay together."""
    devices = iter(room.items())
    device, left = next(devices, (_REST, float("inf")))
    left *= share if device != _REST else 1
    found: dict[str, str] = {}
    for group in (parts[:2], *([part] for part in parts[2:])):
        nbytes = sum(part.nbytes for part in group)
        while device != _REST and nbytes > left:
            device, whole = next(devices, (_REST, float("inf")))
            left = whole * share
        left -= nbytes
        found.update((part.name, device) for part in group)
    return found
