"""torch's two signatures give torch's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import longspan as ls

SHAPES = [((2, 4, 9, 8), (2, 4, 13, 8)), ((5, 9, 8), (5, 13, 8)), ((9, 8), (13, 8))]


# Dims before the last two of query, key and value.
LEADING = [
    ((5,), (1,), (5,)),
    ((2, 4), (1, 4), (1, 4)),
    ((2, 4), (2, 1), (2, 1)),
    ((1, 4), (2, 4), (2, 4)),
    ((2, 1), (2, 4), (2, 1)),
    ((1, 4), (1, 4), (3, 4)),
    ((4,), (2, 4), (2, 4)),
    ((2, 4), (4,), ()),
    ((2, 3, 4), (2, 3, 4), (2, 3, 4)),
    ((2, 3, 4), (2, 1, 4), (3, 1)),
    ((2, 1, 3, 4), (2, 5, 3, 4), (2, 5, 3, 4)),
    ((0, 4), (0, 4), (0, 4)),
    ((0, 4), (1, 4), (1, 1)),
    ((2, 0, 4), (2, 0, 4), (2, 0, 4)),
    ((2, 0), (2, 0), (2, 0)),
]
GROUPED = [
    ((2, 6), (2, 2), (2, 3)),
    ((12,), (4,), (6,)),
    ((6,), (2, 3), (2, 3)),
    ((2, 3, 6), (2, 1, 2), (3, 1)),
    ((0, 6), (0, 2), (0, 3)),
]


def compare(tensors: list[Tensor], **settings: Any) -> None:
    """Values and gradients of torch's call and of ours, in float64."""
    mask = settings.get("attn_mask")
    leaves = [*tensors, mask] if mask is not None and mask.requires_grad else tensors
    want, got = (fn(*tensors, **settings) for fn in (F.scaled_dot_product_attention, ls.scaled_dot_product_attention))
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    grads = (torch.autograd.grad((t * weight).sum(), leaves) for t in (got, want))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def tensors(leading: tuple[tuple[int, ...], ...], q_len: int = 9, kv_len: int = 13) -> list[Tensor]:
    sizes = ((q_len, 8), (kv_len, 8), (kv_len, 6))
    return [torch.randn(*lead, *size, dtype=torch.float64, requires_grad=True) for lead, size in zip(leading, sizes, strict=True)]


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_sdpa_broadcasts_leading_dims_as_torch_does(leading: tuple[tuple[int, ...], ...]) -> None:
    for is_causal in (False, True):
        compare(tensors(leading), is_causal=is_causal)


@pytest.mark.parametrize("leading", GROUPED, ids=str)
def test_sdpa_supports_different_head_counts_of_key_and_value(leading: tuple[tuple[int, ...], ...]) -> None:
    compare(tensors(leading), enable_gqa=True)


MASKED = [
    ((), (9, 13)),
    ((5,), (5, 9, 13)),
    ((5,), (1, 1, 13)),
    ((2, 3, 4), (2, 3, 4, 9, 13)),
    ((2, 3, 4), (2, 1, 1, 9, 1)),
    ((2, 3, 4), (3, 1, 9, 13)),
    ((2, 3, 4), (1, 1, 4, 1, 13)),
    ((2, 3, 4), (4, 9, 13)),
]


@pytest.mark.parametrize(("leading", "shape"), MASKED, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_sdpa_masks_of_inputs_of_any_number_of_dims_equal_torchs(leading: tuple[int, ...], shape: tuple[int, ...], kind: str) -> None:
    mask = torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape, dtype=torch.float64, requires_grad=True)
    compare(tensors((leading, leading, leading)), attn_mask=mask)


def test_an_empty_batch_gives_an_empty_result_under_any_mask() -> None:
    bias = torch.randn(0, 1, 9, 13, dtype=torch.float64, requires_grad=True)
    for mask in (bias, bias > 0, torch.ones(9, 13, dtype=torch.bool)):
        empty = tensors(((0, 4),) * 3)
        out = ls.scaled_dot_product_attention(*empty, attn_mask=mask)
        assert out.shape == (0, 4, 9, 6)
        assert [g.shape for g in torch.autograd.grad(out.sum(), empty)] == [t.shape for t in empty]


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(9, 13), (13, 9), (11, 11)])
def test_causal_biases_equal_torchs(make: Any, lengths: tuple[int, int]) -> None:
    compare(tensors(((3, 4),) * 3, *lengths), attn_mask=make(*lengths))
    compare(tensors(((2, 3, 4), (2, 3, 2), (2, 3, 2)), *lengths), attn_mask=make(*lengths), enable_gqa=True)


@pytest.mark.parametrize(("q_shape", "kv_shape"), SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_equals_torchs(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], is_causal: bool) -> None:
    tensors = [torch.randn(s, requires_grad=True) for s in (q_shape, kv_shape, kv_shape)]
    want, got = (fn(*tensors, is_causal=is_causal, scale=0.7) for fn in (F.scaled_dot_product_attention, ls.scaled_dot_product_attention))
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got.sin().sum(), tensors), torch.autograd.grad(want.sin().sum(), tensors), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(9, 13), (1, 13), (1, 1), (2, 1, 1, 13), (1, 6, 9, 13), (2, 1, 9, 1)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_sdpa_masks_of_any_broadcasting_shape_equal_torchs(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = torch.randn(2, 6, 9, 8), torch.randn(2, 3, 13, 8), torch.randn(2, 3, 13, 8)
    mask = torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape, requires_grad=True)
    want, got = (fn(q, k, v, attn_mask=mask, enable_gqa=True) for fn in (F.scaled_dot_product_attention, ls.scaled_dot_product_attention))
    torch.testing.assert_close(got, want)
    if kind == "float":
        a, b = (torch.autograd.grad(t.sin().sum(), mask)[0] for t in (got, want))
        torch.testing.assert_close(a, b)


def test_flex_attention_equals_torchs_with_every_option() -> None:
    q, k, v = torch.randn(2, 4, 150, 16), torch.randn(2, 2, 200, 16), torch.randn(2, 2, 200, 24)
    bias = torch.randn(4)
    mod = lambda s, b, h, i, j: torch.where(i % 3 == 0, s * 0.5, s) + bias[h]
    block_mask = create_block_mask(lambda b, h, i, j: (i + b >= j) | (j < 20), 2, None, 150, 200, device="cpu")
    options = {"score_mod": mod, "block_mask": block_mask, "scale": 0.2, "enable_gqa": True}
    out, aux = ls.flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True, max_scores=True))
    want, want_aux = torch_flex(q, k, v, **options, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(aux.lse, want_aux.lse)
    # torch returns no maxima on CPU: they are the scores of the dense computation.
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.2
    i, j, b = torch.arange(150)[:, None], torch.arange(200)[None, :], torch.arange(2)[:, None, None, None]
    scores = torch.where(i % 3 == 0, scores * 0.5, scores) + bias[:, None, None]
    torch.testing.assert_close(aux.max_scores, torch.where((i + b >= j) | (j < 20), scores, -torch.inf).amax(-1))


def test_flex_attention_broadcasts_batch_one_and_returns_lse() -> None:
    q, k, v = torch.randn(3, 2, 20, 16), torch.randn(1, 2, 31, 16, requires_grad=True), torch.randn(1, 2, 31, 16)
    out, lse = ls.flex_attention(q, k, v, return_lse=True)
    want, want_lse = ls.attention(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert torch.autograd.grad(out.sum(), k)[0].shape == k.shape


def test_a_block_mask_of_one_block_larger_than_any_sequence_is_no_mask() -> None:
    """As torch makes it where no mask is given. Its lengths are not those of the call."""
    q, k, v = (torch.randn(2, 3, n, 16) for n in (20, 31, 31))
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    none = BlockMask.from_kv_blocks(one, torch.zeros(1, 1, 1, 1, dtype=torch.int32), BLOCK_SIZE=1 << 30, seq_lengths=(1, 1))
    torch.testing.assert_close(ls.flex_attention(q, k, v, block_mask=none), ls.attention(q, k, v))


def test_flex_attention_accepts_torchs_kernel_options_without_effect() -> None:
    q, k, v = (torch.randn(2, 3, 20, 16) for _ in range(3))
    options = {name: 64 for name in FlexKernelOptions.__annotations__ if name != "BACKEND"}
    for supported in ({}, {"BACKEND": "AUTO"}, {"fwd_BLOCK_M": 64, "bwd_BLOCK_M1": 32, "PRESCALE_QK": True}, options):
        torch.testing.assert_close(ls.flex_attention(q, k, v, kernel_options=supported), torch_flex(q, k, v))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)])
def test_the_output_keeps_the_memory_order_of_the_query(order: tuple[int, ...]) -> None:
    sizes = [2, 4, 19, 8]
    q = torch.randn([sizes[d] for d in order]).permute([order.index(d) for d in range(4)])
    out = ls.attention(q, torch.randn(2, 2, 19, 8), torch.randn(2, 2, 19, 5))
    want = torch.empty([[*sizes[:3], 5][d] for d in order]).permute([order.index(d) for d in range(4)])
    assert out.stride() == want.stride()


DTYPES = {
    "all float32": (torch.float32,) * 3,
    "v in bfloat16": (torch.float32, torch.float32, torch.bfloat16),
    "all float16": (torch.float16,) * 3,
    "all float64": (torch.float64,) * 3,
}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_sdpa_under_autocast_casts_as_torch_does(name: str, kind: str) -> None:
    shapes = ((2, 3, 9, 8), (2, 3, 13, 8), (2, 3, 13, 5))
    inputs = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, DTYPES[name], strict=True)]
    bias = torch.randn(9, 13, dtype=torch.float64 if name == "all float64" else torch.float32)
    mask = {"none": None, "bool": bias > -1, "float": bias}[kind]
    cast = lambda x: x.bfloat16() if x is not None and x.dtype in (torch.float32, torch.float16) else x
    want = ls.scaled_dot_product_attention(*map(cast, inputs), attn_mask=cast(mask))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, torchs = (fn(*inputs, attn_mask=mask) for fn in (ls.scaled_dot_product_attention, F.scaled_dot_product_attention))
    assert got.dtype == torchs.dtype and torch.equal(got, want)


@pytest.mark.parametrize("name", DTYPES)
def test_flex_attention_under_autocast_casts_as_torch_does(name: str) -> None:
    inputs = [torch.randn(2, 3, 11, 8).to(dtype) for dtype in DTYPES[name]]
    want = ls.flex_attention(*(t if t.dtype == torch.float64 else t.bfloat16() for t in inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out, lse), torchs = ls.flex_attention(*inputs, return_lse=True), torch_flex(*inputs)
    assert out.dtype == torchs.dtype and torch.equal(out, want)
    assert lse.dtype == (torch.float64 if name == "all float64" else torch.float32)


def test_inputs_that_autocast_rejects_raise() -> None:
    q, k, v = torch.randn(2, 3, 9, 8).double(), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=r"expected the dtype of q, torch\.float64"):
        ls.scaled_dot_product_attention(q, k, v)
