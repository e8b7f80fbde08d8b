"""torch's ring over an operator of the caller, and the ring forms of torch's kernels, on virtual ranks against one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan.testing import virtual_world
from longspan.torch_compat import _attention as tc
from longspan.torch_compat import _ring, _ring_kernels
from longspan.torch_compat._dispatcher import default_layout

RANKS, LOCAL = 3, 4
SCALE = 0.3
BATCH, HEADS, DIM, VALUE_DIM = 2, 3, 5, 7


@pytest.fixture(autouse=True)
def options() -> Iterator[None]:
    before = dict(vars(tc._cp_options))
    yield
    vars(tc._cp_options).update(before)


@pytest.fixture
def groups_are_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_ring` takes the mesh of a virtual rank for a process group."""
    dist = SimpleNamespace(ProcessGroup=ls.Mesh, get_rank=lambda mesh: mesh.rank, get_world_size=lambda mesh: mesh.size)
    monkeypatch.setattr(_ring, "dist", dist)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def scores(q: Tensor, k: Tensor, is_causal: bool, scale: float = SCALE) -> Tensor:
    s = q @ k.mT * scale
    return s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf) if is_causal else s


def dense(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    s = scores(q, k, is_causal, scale)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def forward_op(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, note: str) -> tuple[Any, ...]:
    assert note == "given" and isinstance(is_causal, bool) and q.is_contiguous()
    out, lse = dense(q.double(), k.double(), v.double(), is_causal)
    return out.to(q.dtype), lse, "rest"


def backward_op(
    *, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, note: str
) -> tuple[Any, ...]:
    assert note == "given" and isinstance(is_causal, bool)
    dtype, (dout, query, key, value, out) = query.dtype, (x.double() for x in (dout, query, key, value, out))
    p = (scores(query, key, is_causal) - logsumexp[..., None]).exp()
    ds = p * (dout @ value.mT - (dout * out).sum(-1, keepdim=True))
    return *(x.to(dtype) for x in (ds @ key * SCALE, ds.mT @ query * SCALE, p.mT @ dout)), "rest"


def whole_tensors(kv_length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of out; the head dim of values is another than that of keys."""
    sizes = ((LOCAL * RANKS, DIM), (kv_length, DIM), (kv_length, VALUE_DIM), (LOCAL * RANKS, VALUE_DIM))
    return [random(i, BATCH, HEADS, *size, dtype=dtype) for i, size in enumerate(sizes)]


def on_one_device(whole: list[Tensor], is_causal: bool, scale: float = SCALE) -> list[Tensor]:
    """out, lse and the gradients of q, k and v."""
    *qkv, grad = (t.double() for t in whole)
    inputs = [t.clone().requires_grad_() for t in qkv]
    out, lse = dense(*inputs, is_causal, scale)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out * grad).sum(), inputs)]


def on_ranks(whole: list[Tensor], is_balanced: bool, attend: Callable[[Any, list[Tensor]], tuple[Any, ...]]) -> list[Tensor]:
    """out, lse and gradients of all ranks, in the order of the whole sequence. `attend` gets a mesh and this rank's shards."""

    def positions(length: int, rank: int) -> Tensor:
        return default_layout(length, RANKS).positions(rank) if is_balanced else torch.arange(length).chunk(RANKS)[rank]

    def run(mesh: Any) -> list[Tensor]:
        return list(attend(mesh, [t[:, :, positions(t.shape[2], mesh.rank)] for t in whole])[:5])

    results = virtual_world(RANKS).run(run)
    lengths = [whole[i].shape[2] for i in (0, 0, 0, 1, 2)]
    joined = [torch.cat([positions(n, rank) for rank in range(RANKS)]).argsort() for n in lengths]
    return [torch.cat(parts, 2)[:, :, order] for parts, order in zip(zip(*results, strict=True), joined, strict=True)]


def template(is_causal: bool) -> Callable[[Any, list[Tensor]], tuple[Any, ...]]:
    def attend(mesh: Any, shards: list[Tensor]) -> tuple[Any, ...]:
        q, k, v, grad = shards
        out, lse, rest = _ring._templated_ring_attention(mesh, 2, forward_op, q, k, v, is_causal=is_causal, note="given")
        *grads, rest_of_grads = _ring._templated_ring_attention_backward(
            mesh, 2, backward_op, grad, "dout", q, k, v, out, lse, is_causal, note="given"
        )
        assert (rest, rest_of_grads) == ("rest", "rest") and len(grads) == 3
        return out, lse, *grads

    return attend


@pytest.mark.usefixtures("groups_are_meshes")
@pytest.mark.parametrize("method", ["alltoall", "allgather"])
@pytest.mark.parametrize(("is_causal", "balanced", "kv_length"), [(True, True, 12), (True, False, 12), (False, False, 6)])
def test_the_ring_over_an_operator_equals_one_device(is_causal: bool, balanced: bool, kv_length: int, method: str) -> None:
    tc.set_rotate_method(method)
    tc._cp_options.enable_load_balance, tc._cp_options.convert_to_f32 = balanced, False
    whole = whole_tensors(kv_length)
    got = on_ranks(whole, balanced, template(is_causal))
    torch.testing.assert_close(got, on_one_device(whole, is_causal), rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("groups_are_meshes")
@pytest.mark.parametrize("balanced", [True, False])
def test_the_ring_accumulates_in_float32_and_returns_the_inputs_dtypes(balanced: bool) -> None:
    tc._cp_options.enable_load_balance = balanced
    whole = whole_tensors(12, torch.bfloat16)
    got, want = on_ranks(whole, balanced, template(True)), on_one_device(whole, True)
    assert [t.dtype for t in got] == [torch.bfloat16, torch.float64, *[torch.bfloat16] * 3]
    for part, expected in zip(got, want, strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("groups_are_meshes")
def test_blocks_that_ranks_compute_are_the_visible_halves() -> None:
    calls: dict[int, list[Any]] = {rank: [] for rank in range(RANKS)}

    def run(mesh: Any) -> None:
        def op(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, note: str) -> tuple[Any, ...]:
            calls[mesh.rank].append((q.shape[2], k.shape[2], v.shape[2], is_causal))
            return forward_op(q, k, v, is_causal=is_causal, note=note)

        shards = [t.chunk(RANKS, 2)[mesh.rank].contiguous() for t in whole_tensors(12)[:3]]
        _ring._templated_ring_attention(mesh, 2, op, *shards, is_causal=True, note="given")

    diagonal, first_kv, last_queries = (4, 4, 4, True), (4, 2, 2, False), (2, 4, 4, False)
    virtual_world(RANKS).run(run)
    assert calls == {0: [diagonal, last_queries, last_queries], 1: [diagonal, first_kv, last_queries], 2: [diagonal, first_kv, first_kv]}
    calls = {rank: [] for rank in range(RANKS)}
    tc._cp_options.enable_load_balance = False
    virtual_world(RANKS).run(run)
    whole = (4, 4, 4, False)
    assert calls == {0: [diagonal], 1: [diagonal, whole], 2: [diagonal, whole, whole]}


@pytest.mark.usefixtures("groups_are_meshes")
def test_calls_that_the_ring_does_not_support_raise() -> None:
    q = torch.zeros(1, 1, 4, 2)
    with pytest.raises(RuntimeError, match="requires `is_causal=True`"):
        _ring._templated_ring_attention(None, 2, forward_op, q, q, q)
    with pytest.raises(RuntimeError, match="requires `is_causal=True`"):
        _ring._templated_ring_attention_backward(None, 2, backward_op, q, "dout", q, q, q, q, q[..., 0], False)
    tc._cp_options.enable_load_balance = False
    with pytest.raises(AssertionError, match="expected a ProcessGroup, got NoneType"):
        _ring._templated_ring_attention(None, 2, forward_op, q, q, q)
    with pytest.raises(AssertionError, match="at least one step before"):
        _ring._SDPAMerger(True, 2).results()
    with pytest.raises(NotImplementedError, match="got 'broadcast'"):
        _ring._create_rotater(None, 2, "broadcast")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", list(_ring._RotateMethod))
def test_a_rotater_gives_the_buffer_of_the_previous_ranks(method: Any) -> None:
    def run(mesh: Any) -> list[float]:
        rotater = _ring._create_rotater(mesh, 2, method)
        with pytest.raises(AssertionError, match="expected exchange_buffers before"):
            rotater.next_buffer()
        buffer, received = torch.stack([torch.arange(5.0) + 100 * mesh.rank, torch.zeros(5)], 1)[:, 0], []
        for _ in range(4):
            rotater.exchange_buffers(buffer)
            buffer = rotater.next_buffer()
            assert torch.equal(buffer - buffer[0], torch.arange(5.0))
            received.append(float(buffer[0]) / 100)
        return received

    assert virtual_world(4).run(run) == [[3, 2, 1, 0], [0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3]]


def test_the_default_rotater_is_that_of_the_rotate_method() -> None:
    for method, kind in (("alltoall", _ring._AllToAllRotater), ("allgather", _ring._AllGatherRotater)):
        tc.set_rotate_method(method)
        assert type(_ring._create_rotater(ls.Mesh.abstract(1), 2)) is kind


def test_tensors_of_functional_collectives_are_waited_for() -> None:
    plain = torch.zeros(2)
    pending: Any = SimpleNamespace(wait=lambda: plain)
    assert tc._maybe_wait(pending) is plain and tc._maybe_wait(plain) is plain


def test_merged_results_keep_dtypes_and_the_form_of_lse() -> None:
    for lse_dims in (3, 4):  # cuDNN's lse has a last dim of 1
        parts = [(random(i, 2, 3, 6, 4, dtype=torch.bfloat16), random(i + 5, 2, 3, 6)) for i in range(2)]
        merger = _ring._SDPAMerger(True, 2)
        for out, lse in parts:
            merger.step(out, lse if lse_dims == 3 else lse[..., None], False)
        out, lse = merger.results()
        weights = torch.stack([lse for _, lse in parts]).softmax(0)[..., None]
        assert (out.dtype, lse.dtype, lse.ndim) == (torch.bfloat16, torch.float64, lse_dims)
        want = sum(w * o.double() for w, (o, _) in zip(weights, parts, strict=True))
        torch.testing.assert_close(out.double(), want, rtol=8e-3, atol=4e-3)


# ------------------------------------------------------------------------------------------------------- ring forms of torch's kernels


def flash(mesh: Any, shards: list[Tensor], **options: Any) -> tuple[Any, ...]:
    q, k, v, grad = shards
    out, lse, *rest = tc._scaled_dot_product_ring_flash_attention(mesh, q, k, v, **options)
    scale, is_causal = options.get("scale"), options.get("is_causal", False)
    assert rest[:4] == [None, None, q.shape[2], k.shape[2]] and [(t.shape, t.dtype) for t in rest[4:]] == [((0,), torch.int64)] * 3
    padded = torch.cat([lse, torch.full_like(lse, torch.nan)], 2)
    seed, offset = rest[4:6]
    grads = tc._scaled_dot_product_ring_flash_attention_backward(
        mesh, grad, q, k, v, out, padded, None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, offset, scale=scale
    )
    return out, lse, *grads


def efficient(mesh: Any, shards: list[Tensor], **options: Any) -> tuple[Any, ...]:
    q, k, v, grad = shards
    out, lse, seed, offset = tc._scaled_dot_product_ring_efficient_attention(mesh, q, k, v, **options)
    scale, is_causal = options.get("scale"), {n: x for n, x in options.items() if n == "is_causal"}
    *grads, grad_bias = tc._scaled_dot_product_ring_efficient_attention_backward(
        mesh, grad, q, k, v, None, out, lse, seed, offset, 0.0, (True, True, True, False), **is_causal, scale=scale
    )
    assert grad_bias is None
    return out, lse, *grads


def cudnn(mesh: Any, shards: list[Tensor], **options: Any) -> tuple[Any, ...]:
    q, k, v, grad = shards
    out, lse, *rest = tc._scaled_dot_product_ring_cudnn_attention(mesh, q, k, v, **options)
    scale, is_causal = options.get("scale"), options.get("is_causal", False)
    assert rest[:4] == [None, None, q.shape[2], k.shape[2]] and rest[6] is None and lse.shape == (*q.shape[:3], 1)
    seed, offset = rest[4:6]
    grads = tc._scaled_dot_product_ring_cudnn_attention_backward(
        mesh, grad, q, k, v, out, lse, seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, is_causal, scale=scale
    )
    return out, lse[..., 0], *grads


FORMS = [flash, efficient, cudnn]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("is_causal", "balanced", "kv_length"), [(True, True, 12), (True, False, 12), (False, True, 6)])
def test_ring_forms_equal_one_device(form: Any, is_causal: bool, balanced: bool, kv_length: int) -> None:
    tc._cp_options.enable_load_balance = balanced
    whole = whole_tensors(kv_length)
    options = {"is_causal": True, "scale": SCALE} if is_causal else {}
    got = on_ranks(whole, is_causal and balanced, lambda mesh, shards: form(mesh, shards, **options))
    want = on_one_device(whole, is_causal, SCALE if is_causal else 1 / math.sqrt(DIM))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_plans_of_ring_forms_follow_the_options() -> None:
    mesh = ls.Mesh.abstract(RANKS)
    q, k = torch.zeros(2, 3, LOCAL, 5), torch.zeros(2, 3, 2, 5)
    made = []
    for balanced, method in ((True, "alltoall"), (True, "allgather"), (False, "allgather")):
        tc._cp_options.enable_load_balance = balanced
        tc.set_rotate_method(method)
        made.append(_ring_kernels._plan_of(mesh, q, q, True, 0.0))
    assert [p.layout.positions(0).tolist() for p in made] == [[0, 1, 10, 11], [0, 1, 10, 11], [0, 1, 2, 3]]
    assert [p.strategy for p in made] == ["ring", "allgather", "allgather"]
    cross = _ring_kernels._plan_of(mesh, q, k, False, 0.0)
    assert (cross.layout.length, cross.kv_layout.length) == (12, 6)
    assert _ring_kernels._plan_of(mesh, q, q, True, 0.0) is made[-1]


def test_arguments_that_ring_forms_do_not_support_raise() -> None:
    q = torch.zeros(1, 1, 4, 2)
    mesh, lse, state = ls.Mesh.abstract(2), q[..., 0], q.new_empty(0)
    for forward in (
        tc._scaled_dot_product_ring_flash_attention,
        tc._scaled_dot_product_ring_efficient_attention,
        tc._scaled_dot_product_ring_cudnn_attention,
    ):
        with pytest.raises(NotImplementedError, match=r"dropout_p: expected 0, got 0\.5"):
            forward(mesh, q, q, q, dropout_p=0.5)
        with pytest.raises(NotImplementedError, match="same query and context"):
            forward(mesh, q, q[:, :, :2], q[:, :, :2], is_causal=True)
    with pytest.raises(NotImplementedError, match="attn_bias"):
        tc._scaled_dot_product_ring_cudnn_attention(mesh, q, q, q, q)
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        tc._scaled_dot_product_ring_cudnn_attention(mesh, q, q, q, return_debug_mask=True)
    with pytest.raises(NotImplementedError, match="bias is not supported"):
        tc._scaled_dot_product_ring_efficient_attention_backward(mesh, q, q, q, q, q, q, lse, state, state, 0.0, (True,) * 4)
    with pytest.raises(NotImplementedError, match="attn_bias is not supported"):
        tc._scaled_dot_product_ring_cudnn_attention_backward(
            mesh, q, q, q, q, q, lse, state, state, q, None, None, 4, 4, 0.0, False
        )  # fmt: skip
