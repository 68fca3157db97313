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
from sites import resolve, write
from vlscope.verify import reference

#: One checkpoint of each family.
FAMILIES = ["dense", "moe", "qwen2_5", "qwen2", "hybrid", "hybrid_moe"]
CASE = "images_and_videos"
THREADS = [1, 2, 3, 7]

# Distances from the exact value, relative to the largest magnitude of the tensor. That of float32 is no bound on the
# engine but on the models: were one ill-conditioned, its numbers would tell nothing.
FLOAT64, FLOAT32 = 1e-9, 1e-3
AMONG_THREADS = 1e-5
PATCHES = "vision.patch_embeddings"


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


def served(model, inputs, sites, written=None):
    """The values at `sites`, which are in the order of the forward; those in `written` are replaced once read."""
    values = {}
    with model.trace(**inputs):
        for site in sites:
            values[site] = resolve(model, site)
            if site in (written or {}):
                write(model, site, written[site])
    return values


def distance(found, exact):
    """How far a value is from the exact one at most, relative to the largest magnitude there.

    A score that the mask forbids is the least number of its dtype on both sides, and left out.
    """
    worst = scale = 0.0
    for a, b in zip(parts(found), parts(exact), strict=True):
        assert a.shape == b.shape
        masked = least(b)
        assert torch.equal(least(a), masked)
        a, b = a[~masked].double(), b[~masked].double()
        worst = max(worst, (a - b).abs().max().item())
        scale = max(scale, b.abs().max().item())
    return worst / scale if worst else 0.0


def parts(value):
    return value if isinstance(value, tuple) else (value,)


def least(tensor):
    """Where a tensor holds the least number of its dtype, or is short of it by a score."""
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor, dtype=torch.bool)
    return tensor <= torch.finfo(tensor.dtype).min / 2


def load(folder, attention, dtype):
    return vlscope.load(folder, attn_implementation=attention, dtype=dtype)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_value_in_float64_is_the_exact_one(name, attention, stored, theirs, inputs):
    exact = theirs(name, attention, torch.float64)
    found = served(load(stored(name), attention, torch.float64), inputs(name, CASE), exact)
    far = {site: gap for site in exact if (gap := distance(found[site], exact[site])) > FLOAT64}
    assert not far


@pytest.mark.parametrize("name", FAMILIES)
def test_no_value_in_float32_is_further_from_the_exact_one_than_that_of_transformers(name, stored, theirs, inputs):
    """How far float32 is depends on the model: a recurrent block and a mixture make more of what comes in. The
    reference has the same operations in the same order, and so the same distance."""
    exact, other = theirs(name, "sdpa", torch.float64), theirs(name, "sdpa", torch.float32)
    found = served(load(stored(name), "sdpa", torch.float32), inputs(name, CASE), exact)
    gaps = {site: (distance(found[site], exact[site]), distance(other[site], exact[site])) for site in exact}
    ours, limit = gaps.pop("next_token_probs")  # a row of its own product, in place of a row of the whole
    assert ours <= limit + 1e-5
    assert not {site: gap for site, gap in gaps.items() if gap[0] > gap[1]}
    assert max(limit for _, limit in gaps.values()) < FLOAT32


@pytest.mark.parametrize("name", FAMILIES)
def test_no_value_in_bfloat16_is_further_from_the_exact_one_than_that_of_transformers(name, stored, theirs, inputs):
    """The patches are projected by a matrix product here and by a convolution there, which round apart; each is as far
    from the exact projection, and what follows is compared from one and the same."""
    exact, other = theirs(name, "sdpa", torch.float64), theirs(name, "sdpa", torch.bfloat16)
    patches = {PATCHES: other[PATCHES]}
    found = served(load(stored(name), "sdpa", torch.bfloat16), inputs(name, CASE), exact, written=patches)
    error, of_other = (x[PATCHES].double().sub(exact[PATCHES]).norm() for x in (found, other))
    assert error <= 1.001 * of_other
    further = {
        site: (gap, limit)
        for site in exact
        if site != PATCHES
        and (gap := distance(found[site], exact[site])) > (limit := distance(other[site], exact[site]))
    }
    assert not further


@pytest.fixture
def threads():
    """threads(n): computes on n threads until the test is over."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def enlarged(inputs, times=24):
    """A prompt with one image, over and over in one row, until the work on it is shared out among threads."""
    tokens = ("input_ids", "attention_mask")
    return {key: value.repeat(1, times) if key in tokens else value.repeat(times, 1) for key, value in inputs.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_any_number_of_threads_gives_the_same_values_and_each_repeats_its_bits(
    name, vlscope_model, reference_model, checkpoint, inputs, threads
):
    """How a product is parted among threads decides in which order its sums are rounded. A recurrent block makes most
    of it: its norm divides each head by its own size, and the rounding of a head of a fortieth of the largest grows
    forty times. So whole tensors are held to 1e-5 by their norm, and a single element to that or to its distance from
    the exact value. transformers parts its products in the same way, and has the same bits on as many threads.
    """
    model, encoded = vlscope_model(name), enlarged(inputs(name, "one_image"))
    with Float64Throughout():
        run = reference.run(reference.load(checkpoint(name), "sdpa", torch.float64), encoded)
    exact = {site: run.values[site] for site in run.order if site in run.values}
    alone = served(model, encoded, exact)
    sites = ["vision.tower_output", *(f"layers.{i}.layer_output" for i in range(len(model.layers))), "logits"]
    for count in THREADS:
        threads(count)
        values, again = served(model, encoded, exact), served(model, encoded, exact)
        of_other = reference.run(reference_model(name, "sdpa"), encoded).values
        for site in exact:
            assert equal(values[site], again[site]), f"{site} on {count} threads"
            if site != "next_token_probs":  # a row of its own product, in place of a row of the whole
                assert equal(values[site], of_other[site]), f"{site} on {count} threads"
        for site in sites:
            apart = (values[site] - alone[site]).norm() / alone[site].norm()
            assert apart <= AMONG_THREADS, f"{site} on {count} threads"
            limit = max(AMONG_THREADS, distance(alone[site], exact[site]))
            assert distance(values[site], alone[site]) <= limit, f"{site} on {count} threads"


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(parts(one), parts(other), strict=True))
