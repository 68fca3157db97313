"""Sites by name: reading and writing `layers.3.self_attn.attention_queries` on a model or a tracer."""

from vlscope.verify.comparison import difference

__all__ = ["collect", "difference", "each", "read", "resolve", "write"]


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


def collect(model, inputs, *sites):
    """The values of `sites`, read in the order given in one trace."""
    with model.trace(**inputs):
        return [resolve(model, site).save() for site in sites]
