"""How exact the numbers are, measured against float64 at every named value.

The weights are stored in bfloat16, so that they are the same numbers in every dtype that a model is loaded in. The
oracle is transformers in float64, with nothing on the way taken in float32: see `Float64Throughout`.
"""

import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tiny
import vlscope
from parity import reference
from parity.cases import CASES, Spelling
from sites import resolve

#: One checkpoint of each family.
FAMILIES = ["dense", "moe", "qwen2_5", "qwen2", "hybrid", "hybrid_moe"]
CASE = "images_and_videos"
THREADS = [1, 2, 3, 7]

FLOAT64 = 1e-9


def grouped_product(rows, matrices, offs, bias=None, out_dtype=None):
    """`torch._grouped_mm`, which has no float64: the rows up to each of `offs` by a matrix of their own."""
    ends = offs.tolist()
    return torch.cat([rows[i:k] @ matrix for i, k, matrix in zip([0, *ends], ends, matrices)])


class Float64Throughout(TorchFunctionMode):
    """Leaves out every cast of a float64 tensor to float32.

    transformers takes the statistics of its norms, its softmax, its router and the rotation of its queries in float32,
    whatever the dtype of the model; these casts are there for half precision. Angles and position weights are made of
    whole numbers in float32, and stay.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if function is torch.Tensor.float:
                return args[0]
            if function is torch._grouped_mm:
                return grouped_product(*args, **kwargs)
            args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """stored(name): a folder with the weights in bfloat16."""
    root = tmp_path_factory.mktemp("bfloat16")
    return functools.cache(lambda name: tiny.build(name, root / name, dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def theirs(stored, inputs):
    """theirs(name, attention, dtype): named value -> what transformers has there."""

    @functools.cache
    def values(name, attention, dtype):
        model = reference.load(stored(name), attention, dtype)
        with Float64Throughout():
            run = reference.run(model, inputs(name, CASE))
        return {site: run.values[site] for site in run.order if site in run.values}

    return values


@pytest.fixture(scope="module")
def ours(stored, inputs, theirs):
    """ours(name, attention, dtype): the same values of the engine."""

    @functools.cache
    def values(name, attention, dtype):
        model = vlscope.load(stored(name), attn_implementation=attention, dtype=dtype)
        return served(model, inputs(name, CASE), theirs(name, attention, torch.float64))

    return values


def served(model, inputs, sites):
    with model.trace(**inputs):
        return {site: resolve(model, site) for site in sites}


def parts(value):
    return value if isinstance(value, tuple) else (value,)


def distance(found, exact):
    """The largest distance of two values, relative to the largest magnitude in the exact one."""
    worst = 0.0
    for a, b in zip(parts(found), parts(exact), strict=True):
        assert a.shape == b.shape
        a, b = a.double(), b.double()
        both = a == b  # masked scores are the least number of their dtype
        scale = b[~both].abs().max().item() if not both.all() else 1.0
        worst = max(worst, (a - b)[~both].abs().max().item() / max(scale, 1e-300) if not both.all() else 0.0)
    return worst
