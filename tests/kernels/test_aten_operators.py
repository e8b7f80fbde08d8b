"""The operators of torch's SDPA with stubs of torch's operators: the layouts that each requires, the arguments, and the results."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan._kernels import aten_ops
from longspan._kernels.isolation import OutputTerms

BATCH, HEADS, GROUPS, M, N, DIM, SCALE = 2, 6, 3, 37, 41, 16, 0.3
CUDA_BACKENDS: list[Any] = ["flash", "efficient", "cudnn"]


def loadable(t: Tensor) -> bool:
    per = 16 // t.element_size()
    return t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and all(
        n == 1 or (s > 0 and s % per == 0) for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)
    )  # fmt: skip


def probabilities(q: Tensor, k: Tensor, lse: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse.double()
    return (scores - lse[..., None]).exp(), lse


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    p, lse = probabilities(q, k, None, causal, scale)
    return (p @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)).to(q.dtype), lse.float()


def grads_of(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> list[Tensor]:
    """From lse and out as given, as torch's operators compute them."""
    p, _ = probabilities(q, k, lse, causal, scale)
    ratio = q.shape[1] // k.shape[1]
    wide = [t.double().repeat_interleave(ratio, 1) for t in (k, v)]
    delta = (out.double() * grad.double()).sum(-1, keepdim=True)
    ds = p * (grad.double() @ wide[1].mT - delta) * scale
    dk, dv = (t.unflatten(1, (k.shape[1], ratio)).sum(2) for t in (ds.mT @ q.double(), p.mT @ grad.double()))
    return [(ds @ wide[0]).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)]


class Stubs:
    """torch's operators over CPU tensors. `lse_rank`: of cuDNN's lse."""

    def __init__(self) -> None:
        self.lse_rank = 4
        self.loaded: list[list[int]] = []

    def checked(self, *tensors: Tensor) -> None:
        assert all(map(loadable, tensors)) and len({t.dtype for t in tensors}) == 1
        self.loaded.append([t.data_ptr() for t in tensors])

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
    ) -> Any:  # fmt: skip
        self.checked(q, k, v)
        assert dropout == 0.0 and debug is False
        return (*attended(q, k, v, causal, scale), None, None)

    def _scaled_dot_product_flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
    ) -> Any:  # fmt: skip
        self.checked(grad, q, k, v, out)
        assert rest[:5] == (None, None, M, N, 0.0) and lse.is_contiguous()
        (seed, unused), causal = rest[6:8], rest[5]
        assert seed.shape == (2,) and unused.shape == () and seed.dtype == unused.dtype == torch.uint64
        return grads_of(grad, q, k, v, out, lse, causal, scale)

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float, causal: bool, *, scale: float
    ) -> Any:  # fmt: skip
        self.checked(q, k, v)
        assert bias is None and with_lse is True and dropout == 0.0 and q.shape[1] == k.shape[1] == v.shape[1]
        out, lse = attended(q, k, v, causal, scale)
        return out, torch.nn.functional.pad(lse, (0, 27), value=7.0), None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        dropout: float, needs: list[bool], causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        self.checked(grad, q, k, v, out)
        assert bias is None and dropout == 0.0 and needs == [True, True, True, False] and q.shape[1] == k.shape[1] == v.shape[1]
        assert seed.shape == offset.shape == () and seed.dtype == offset.dtype == torch.int64
        for t in (out, grad):
            assert t.transpose(1, 2).is_contiguous()
        assert lse.shape[-1] == 64 and lse.is_contiguous() and (lse[..., M:] == torch.inf).all()
        return (*grads_of(grad, q, k, v, out, lse[..., :M], causal, scale), None)

    def _scaled_dot_product_cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float, causal: bool, debug: bool, *, scale: float
    ) -> Any:  # fmt: skip
        self.checked(q, k, v)
        assert bias is None and with_lse is True and dropout == 0.0 and debug is False
        out, lse = attended(q, k, v, causal, scale)
        return out, lse if self.lse_rank == 3 else lse[..., None], None

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor, bias: None,
        *rest: Any, scale: float,
    ) -> Any:  # fmt: skip
        self.checked(grad, q, k, v, out)
        assert rest[:5] == (None, None, M, N, 0.0) and bias is None and lse.ndim == self.lse_rank and lse.is_contiguous()
        assert seed.shape == offset.shape == () and seed.dtype == offset.dtype == torch.int64
        order = sorted(range(4), key=q.stride)
        assert sorted(range(4), key=out.stride) == sorted(range(4), key=grad.stride) == order and out.dtype == q.dtype
        return grads_of(grad, q, k, v, out, lse.view(q.shape[:3]), rest[5], scale)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Stubs:
    made = Stubs()
    monkeypatch.setattr(aten_ops, "_aten", made)
    monkeypatch.setattr(aten_ops, "_cudnn_lse_rank", lambda device: made.lse_rank)
    return made


def tensors(dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """q, k, v, grad_out."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((HEADS, M), (GROUPS, N), (GROUPS, N), (HEADS, M))
    return [layout(torch.randn(BATCH, *shape, DIM, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def shifted(t: Tensor) -> Tensor:
    """One element past an aligned address."""
    return torch.cat([torch.zeros(1, dtype=t.dtype), t.flatten()])[1:].view(t.shape)


def wide_rows(t: Tensor) -> Tensor:
    """Rows of DIM + 1 elements."""
    return torch.nn.functional.pad(t, (0, 1))[..., :DIM]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "tokens first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "dims before tokens": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "odd address": shifted,
    "odd rows": wide_rows,
    "one of a batch": lambda t: t[:1].expand(BATCH, -1, -1, -1),
}
TAKEN_AS_THEY_ARE = ("contiguous", "tokens first")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
def test_operators_get_layouts_that_they_can_load(backend: Any, layout: str, causal: bool, stubs: Stubs) -> None:
    """Of float16 tensors, the results that float64 tensors have, up to rounding; no copies where none are needed."""
    for rank in (3, 4) if backend == "cudnn" else (4,):
        stubs.lse_rank, stubs.loaded = rank, []
        op = aten_ops._CUDA[backend]
        q, k, v, grad = tensors(torch.float16, LAYOUTS[layout])
        out, lse = op.forward(q, k, v, causal=causal, scale=SCALE)
        want_out, want_lse = attended(q, k, v, causal, SCALE)
        assert lse.shape == (BATCH, HEADS, M) and lse.is_contiguous()
        torch.testing.assert_close((out, lse), (want_out, want_lse), rtol=0, atol=2e-3)
        want = grads_of(grad, q, k, v, want_out, want_lse, causal, SCALE)
        got = op.backward(q, k, v, OutputTerms(grad, want_out, want_lse), causal=causal, scale=SCALE)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=1e-2)
        if layout in TAKEN_AS_THEY_ARE and backend != "efficient":
            assert stubs.loaded[0] == [t.data_ptr() for t in (q, k, v)] and stubs.loaded[1][1:4] == stubs.loaded[0]


@pytest.mark.parametrize(("backend", "place"), [("flash", 5), ("efficient", 6), ("cudnn", 5)])
def test_operators_read_lse_as_a_dense_array(backend: Any, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows as the efficient operator reads without padding."""
    read: list[Tensor] = []

    def record(*args: Any, scale: float) -> Any:
        read.append(args[place])
        return (*args[1:4], None) if backend == "efficient" else args[1:4]

    monkeypatch.setattr(aten_ops, "_aten", SimpleNamespace(**{f"_scaled_dot_product_{backend}_attention_backward": record}))
    monkeypatch.setattr(aten_ops, "_cudnn_lse_rank", lambda device: 3)
    q, lse = torch.randn(2, 3, 64, 16), torch.randn(2, 64, 3).transpose(1, 2)
    aten_ops._CUDA[backend].backward(q, q, q, OutputTerms(q, q, lse), causal=False, scale=SCALE)
    assert read[0].is_contiguous() and torch.equal(read[0], lse)


def test_keys_of_every_query_head_are_not_copied(stubs: Stubs) -> None:
    q, k, _, _ = tensors(torch.float32, LAYOUTS["contiguous"])
    op, keys = aten_ops._CUDA["efficient"], k.repeat_interleave(2, 1)
    op.forward(q, keys, keys, causal=False, scale=SCALE)
    assert stubs.loaded == [[t.data_ptr() for t in (q, keys, keys)]]


def test_gradients_of_the_heads_of_a_group_are_summed_in_float32() -> None:
    grads = torch.tensor([1.0, 2**-11, 3.0, 4.0]).half().view(1, 4, 1, 1)
    assert aten_ops._summed(grads, 2).flatten().tolist() == [1 + 2**-11, 7.0]
    assert aten_ops._summed(grads, 4) is grads


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_gradient_of_lse_goes_through_additional_columns(dtype: torch.dtype, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten_ops, "operator", lambda backend, device: aten_ops._CUDA[backend])
    q, k, v, grad = tensors(dtype, LAYOUTS["contiguous"])
    v, grad = torch.cat([v, v], -1), torch.cat([grad, grad], -1)
    out, lse = attended(q, k, v, True, SCALE)
    grad_lse = torch.randn(BATCH, HEADS, M, generator=torch.Generator().manual_seed(2))
    got = aten_ops.backward_through_lse(q, k, v, OutputTerms(grad, out, lse, grad_lse), causal=True, scale=SCALE)
    assert [t.shape for t in got] == [t.shape for t in (q, k, v)]
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    p, wide_lse = probabilities(leaves[0], leaves[1], None, True, SCALE)
    wide_out = p @ leaves[2].repeat_interleave(2, 1)
    want = torch.autograd.grad((wide_out, wide_lse), leaves, (grad.double(), grad_lse.double()))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=3e-2 if dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_columns_sum_to_the_gradient_of_lse(dtype: torch.dtype, count: int) -> None:
    grad_lse = torch.tensor([[[0.0, 1.0, -1.5, 0.1, 1e-3, -3.14159, 20000.1, 50000.0, 7.0]]])
    left, right = aten_ops._columns(grad_lse, dtype, count)
    assert left.shape == right.shape == (1, 1, 9, count) and left.dtype == right.dtype == dtype
    sums = (left.double() * right.double()).sum(-1)
    bits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}[dtype]
    tolerance = 2.0 ** -min(22, bits * min(3, count))
    assert ((sums + grad_lse).abs() <= tolerance * grad_lse.abs() + 1e-12).all()
    assert left.abs().max() <= 2 and (left[..., 3:] == 0).all()
    assert (torch.frexp(right.float())[0] == 0.5).all()


def test_operators_by_device() -> None:
    for backend in CUDA_BACKENDS:
        assert aten_ops.operator(backend, torch.device("cpu")) is aten_ops._CPU
        assert aten_ops.operator(backend, torch.device("cuda")) is aten_ops._CUDA[backend]
    facts = {name: (op.step, op.same_dims) for name, op in [("cpu", aten_ops._CPU), *aten_ops._CUDA.items()]}
    assert facts == {"cpu": (1, True), "flash": (8, True), "efficient": (8, False), "cudnn": (8, False)}


def test_the_rank_of_cudnns_lse_follows_from_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Stubs()
    monkeypatch.setattr(aten_ops, "_aten", made)
    for rank in (3, 4):
        made.lse_rank = rank
        assert aten_ops._cudnn_lse_rank.__wrapped__(torch.device("cpu")) == rank
    stub: Any = SimpleNamespace()
    monkeypatch.setattr(aten_ops, "_aten", stub)


def test_tensors_keep_their_memory_where_they_have_the_order_of_queries() -> None:
    q = torch.zeros(2, 3, 5, 16).transpose(1, 2)
    same, other = torch.zeros(2, 3, 5, 24).transpose(1, 2), torch.arange(720.0).view(2, 5, 3, 24)
    assert aten_ops.in_order_of(q, same) is same
    moved = aten_ops.in_order_of(q, other)
    assert moved.stride() == same.stride() and torch.equal(moved, other)
    odd = shifted(same.transpose(1, 2)).transpose(1, 2)
    assert odd.stride() == same.stride() and aten_ops.in_order_of(q, odd) is not odd
    one = torch.zeros(2, 1, 3, 16).transpose(1, 2)
    assert aten_ops.in_order_of(one, one.as_strided(one.shape, (48, 16, 1000, 1))).stride(2) == 1000
