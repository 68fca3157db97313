"""Sites by name: reading and writing `layers.3.self_attn.attention_queries` on a model or a tracer."""

from collections.abc import Mapping

import torch


def resolve(root, path):
    """The object at a dotted path; digits index."""
    for part in filter(None, path.split(".")):
        root = root[int(part)] if part.lstrip("-").isdigit() else getattr(root, part)
    return root


def read(root, site):
    return resolve(root, site)


def write(root, site, value):
    owner, _, name = site.rpartition(".")
    setattr(resolve(root, owner), name, value)


def each(function, value):
    """`function` of a value that is one tensor, or of each of a tuple."""
    return tuple(function(part) for part in value) if isinstance(value, tuple) else function(value)


def difference(ours, theirs, tolerance=0.0):
    """None where both agree (to the bit, or within `tolerance` of the largest magnitude), else how they do not."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor):
            return f"is a {type(ours).__name__}, not a tensor"
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"is {ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
        if torch.equal(ours, theirs):
            return None
        worst = (ours.double() - theirs.double()).abs().max().item()
        scale = max(1.0, theirs.double().abs().max().item())
        unequal = (ours != theirs).sum().item()
        if worst <= tolerance * scale:
            return None
        return f"differs in {unequal} of {theirs.numel()} elements, by {worst:.3g} at most"
    if isinstance(theirs, Mapping):
        if not isinstance(ours, Mapping) or set(ours) != set(theirs):
            return f"holds {sorted(ours) if isinstance(ours, Mapping) else ours!r}, not {sorted(theirs)}"
        pairs = [(f"[{key!r}]", ours[key], theirs[key]) for key in theirs]
    elif isinstance(theirs, (tuple, list)):
        if not isinstance(ours, (tuple, list)) or len(ours) != len(theirs):
            return f"holds {len(ours) if isinstance(ours, (tuple, list)) else ours!r} elements, not {len(theirs)}"
        pairs = [(f"[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return None if ours == theirs else f"is {ours!r}, not {theirs!r}"
    found = [f"{key} {text}" for key, a, b in pairs if (text := difference(a, b, tolerance))]
    return "; ".join(found) or None


def collect(model, inputs, *sites):
    """The values of `sites`, read in the order given in one trace."""
    with model.trace(**inputs):
        return [resolve(model, site).save() for site in sites]
