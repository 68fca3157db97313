"""The operators of `torch.ops.vlscope` by themselves: what they compute, what they refuse, and torch's own checks."""

import math

import pytest
import torch
from torch.library import opcheck

pytest.importorskip("vlscope")

OPS = torch.ops.vlscope
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def close(value, expected):
    tolerance = TOLERANCE[value.dtype]
    torch.testing.assert_close(value.float(), expected.float(), rtol=tolerance, atol=tolerance)


def segments(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def reference(q, k, v, allowed, scale):
    """softmax(q k^T * scale) v in float32 over `[..., n, d]`, where `allowed` is True."""
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    pattern = scores.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num(0)
    return pattern @ v.float(), pattern


def vision(dtype, rows=11):
    return (torch.randn(rows, 4, 24).to(dtype) for _ in range(3))


def text(dtype, queries=5, keys=9):
    q = torch.randn(2, 6, queries, 16).to(dtype)
    return q, *(torch.randn(2, 2, keys, 16).to(dtype) for _ in range(2))


def behind(queries, keys):
    return torch.arange(keys) <= torch.arange(keys - queries, keys).unsqueeze(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segmented_attention_sees_its_own_segment(dtype):
    q, k, v = vision(dtype)
    lengths = [3, 1, 0, 7]
    allowed = torch.block_diag(*(torch.ones(n, n) for n in lengths if n)).bool()
    expected, pattern = reference(*(x.transpose(0, 1) for x in (q, k, v)), allowed, 0.2)
    close(OPS.segmented_attention(q, k, v, segments(lengths), 0.2), expected.transpose(0, 1))
    rows = OPS.segmented_attention_rows(q, k, segments(lengths), 7, 0.2, heads=[2, 0], rows=[9, 0])
    close(rows[:, 0], pattern[[2, 0], 9, 4:])
    close(rows[:, 1, :3], pattern[[2, 0], 0, :3])
    assert (rows[:, 1, 3:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 5, 9])
def test_causal_attention_has_its_queries_at_the_end_of_the_keys(dtype, queries):
    q, k, v = text(dtype, queries)
    whole = [x.repeat_interleave(3, 1) for x in (k, v)]
    expected, pattern = reference(q, *whole, behind(queries, 9), 0.3)
    close(OPS.causal_attention(q, k, v, scale=0.3), expected.transpose(1, 2))
    rows = OPS.causal_attention_rows(q, k, scale=0.3, heads=[5, 1], queries=[queries - 1])
    close(rows, pattern[:, [5, 1], -1:])


def test_a_window_hides_older_keys():
    q, k, v = text(torch.float32)
    allowed = behind(5, 9) & ~behind(5, 9).roll(-3, 1).tril(9 - 5 - 3)
    distance = torch.arange(4, 9).unsqueeze(1) - torch.arange(9)
    assert torch.equal(allowed, (distance >= 0) & (distance < 3))
    expected, pattern = reference(q, *(x.repeat_interleave(3, 1) for x in (k, v)), allowed, 0.3)
    close(OPS.causal_attention(q, k, v, scale=0.3, window=3), expected.transpose(1, 2))
    close(OPS.causal_attention_rows(q, k, scale=0.3, window=3, heads=[4], queries=[0, 3]), pattern[:, 4:5, [0, 3]])


def test_a_mask_takes_the_place_of_the_causal_rule():
    q, k, v = text(torch.float32)
    allowed = torch.rand(2, 1, 5, 9) > 0.3
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected, pattern = reference(q, *(x.repeat_interleave(3, 1) for x in (k, v)), allowed, 0.3)
    for mask in (allowed, additive):
        close(OPS.causal_attention(q, k, v, mask, scale=0.3), expected.transpose(1, 2))
        close(OPS.causal_attention_rows(q, k, mask, scale=0.3, heads=[3], queries=[2]), pattern[:, 3:4, 2:3])


def test_scores_are_what_their_softmax_is_taken_of():
    q, k, _ = text(torch.float32)
    chosen = {"scale": 0.3, "heads": [3, 0], "queries": [4, 1]}
    scores = OPS.causal_attention_rows(q, k, probabilities=False, **chosen)
    close(scores.softmax(-1), OPS.causal_attention_rows(q, k, **chosen))
    close(scores[1, 0, 0], (q[1, 3, 4] * 0.3) @ k[1, 1].T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rotation_and_gate_are_the_formulas(dtype):
    x, weight = torch.randn(3, 5, 24).to(dtype), torch.randn(24).to(dtype)
    normalised = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    close(OPS.rms_norm(x, weight, 1e-6), normalised * weight.float())
    close(OPS.rms_norm(x, weight, 1e-6, zero_centered=True), normalised * (1 + weight.float()))
    cos, sin = torch.rand(3, 1, 16), torch.rand(3, 1, 16)
    turned = x[..., :16].float()
    half = torch.cat((-turned[..., 8:], turned[..., :8]), -1)
    expected = torch.cat((turned * cos + half * sin, x[..., 16:].float()), -1)
    close(OPS.rotate(x, cos, sin), expected)
    gate, up = torch.randn(2, 7, 6).to(dtype)
    close(OPS.swiglu(gate, up), torch.nn.functional.silu(gate.float()) * up.float())


def samples():
    """One call of each operator, as opcheck takes it."""
    q, k, v = vision(torch.float32)
    bounds = segments([3, 1, 7])
    yield "segmented_attention", (q, k, v, bounds, 0.2), {}
    yield "segmented_attention_rows", (q, k, bounds, 7, 0.2), {"heads": [2, 0], "rows": [9, 0, 0]}
    q, k, v = text(torch.float32)
    mask = torch.rand(2, 1, 5, 9) > 0.3
    yield "causal_attention", (q, k, v), {"scale": 0.3}
    yield "causal_attention", (q, k, v, mask), {"scale": 0.3}
    yield "causal_attention_rows", (q, k, mask), {"scale": 0.3, "heads": [1], "queries": [0, 4]}
    x = torch.randn(2, 5, 3, 24).transpose(1, 2)
    yield "rms_norm", (torch.randn(5, 24), torch.randn(24), 1e-6), {"zero_centered": True}
    yield "rotate", (x, torch.rand(2, 1, 5, 16), torch.rand(2, 1, 5, 16)), {}
    yield "rotate", (x.bfloat16(), torch.rand(2, 1, 5, 24), torch.rand(2, 1, 5, 24)), {}
    yield "swiglu", (torch.randn(5, 6), torch.randn(5, 6)), {}


@pytest.mark.parametrize("name, args, kwargs", [pytest.param(*s, id=f"{s[0]}-{i}") for i, s in enumerate(samples())])
def test_an_operator_passes_the_checks_of_torch(name, args, kwargs):
    opcheck(getattr(OPS, name).default, args, kwargs)


@pytest.mark.parametrize("name, args, kwargs", [pytest.param(*s, id=f"{s[0]}-{i}") for i, s in enumerate(samples())])
def test_a_graph_is_recorded_through_an_operator(name, args, kwargs):
    def precise(x):
        return x.double().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    torch.autograd.gradcheck(lambda *inputs: getattr(OPS, name)(*inputs, **kwargs), tuple(map(precise, args)))


@pytest.mark.parametrize("name, args, kwargs", [pytest.param(*s, id=f"{s[0]}-{i}") for i, s in enumerate(samples())])
def test_shapes_alone_are_those_of_the_result(name, args, kwargs):
    result = getattr(OPS, name)(*args, **kwargs)
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    shape = getattr(OPS, name)(*meta, **kwargs)
    assert (shape.shape, shape.dtype, shape.stride()) == (result.shape, result.dtype, result.stride())


def test_what_does_not_fit_is_refused_by_name():
    q, k, v = vision(torch.float32)
    for call, message in [
        (
            lambda: OPS.segmented_attention(q, k, v, segments([3, 9]), 1.0),
            "cu_seqlens goes from 0 to 12; q has rows 0 to 11",
        ),
        (lambda: OPS.segmented_attention(q, k, v, torch.tensor([0, 8, 3, 11]), 1.0), "does not ascend"),
        (lambda: OPS.segmented_attention(q, k.half(), v, segments([11]), 1.0), "same dtype"),
        (lambda: OPS.segmented_attention(q[0], k[0], v[0], segments([11]), 1.0), "2 axes; 3 are expected"),
        (
            lambda: OPS.segmented_attention_rows(q, k, segments([4, 7]), 6, 1.0, heads=[0], rows=[0]),
            "max_seqlen is 6, and a segment has 7 rows",
        ),
        (
            lambda: OPS.segmented_attention_rows(q, k, segments([11]), 11, 1.0, heads=[4], rows=[0]),
            "heads holds 4; there are 4, from 0 to 3",
        ),
        (lambda: OPS.rms_norm(q, torch.ones(23), 1e-6), r"x is \[11, 4, 24\].*weight is \[23\]"),
        (lambda: OPS.rotate(q, torch.ones(11, 1, 3), torch.ones(11, 1, 3)), "even number"),
        (lambda: OPS.swiglu(q, q[:5]), "must be alike"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    q, k, v = text(torch.float32)
    for call, message in [
        (lambda: OPS.causal_attention(k, q, q, scale=1.0), "multiple"),
        (lambda: OPS.causal_attention(q, k[:, :, :3], v[:, :, :3], scale=1.0), "5 queries and 3 keys"),
        (lambda: OPS.causal_attention(q, k, v, torch.ones(2, 1, 5, 8), scale=1.0), "must broadcast"),
        (lambda: OPS.causal_attention(q, k, v, torch.ones(2, 1, 5, 9), scale=1.0, window=2), "takes its place"),
        (lambda: OPS.causal_attention_rows(q, k, scale=1.0, heads=[0], queries=[5]), "queries holds 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
