"""Rows without visible keys, sinks, gradients through lse, and running states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.calls import forward

import longspan as ls
from longspan._engine.one_device import make_work, mask_tables
from longspan._engine.spec import Spec
from longspan._engine.values import CallOptions, CallTensors
from longspan._kernels.registry import kernel_named
from longspan._masks.algebra import Mask
from longspan._masks.block_table import BlockTable
from longspan._masks.tracing import trace
from longspan.testing import oracle

KERNELS = ["dense", "cpu", "triton"]
NOTHING: dict[str, Any] = {
    "mask": {"mask": ls.mask_mod(lambda b, h, q, kv: (q != 3) & (q < 130))},
    "score_mod": {"score_mod": lambda s, b, h, q, kv: torch.where((q != 3) & (q < 130), s, -torch.inf)},
    "both": {"mask": ls.mask_mod(lambda b, h, q, kv: q != 3), "score_mod": lambda s, b, h, q, kv: torch.where(q < 130, s, -torch.inf)},
}


def qkv(kernel: str = "", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Triton's interpreter takes seconds per head."""
    batch, heads, kv_heads = (1, 1, 1) if kernel == "triton" else (2, 4, 2)
    return [torch.randn(batch, h, n, 16, dtype=dtype, requires_grad=True) for h, n in ((heads, 140), (kv_heads, 150), (kv_heads, 150))]


# In Triton's interpreter, which is slow, both ways to see nothing at once.
@pytest.mark.parametrize(
    ("kernel", "name"), [(kernel, name) for kernel in KERNELS for name in NOTHING if kernel != "triton" or name == "both"]
)
def test_a_row_that_sees_nothing_gives_zero_and_minus_infinity(kernel: str, name: str) -> None:
    q, k, v = qkv(kernel)
    out, lse = ls.attention(q, k, v, kernel=kernel, return_lse=True, **NOTHING[name])
    empty = torch.tensor([3, *range(130, 140)])
    assert (out[:, :, empty] == 0).all()
    assert (lse[:, :, empty] == -torch.inf).all()
    dq, dk, dv = torch.autograd.grad(out.sin().sum() + torch.where(lse == -torch.inf, 0, lse).sum(), [q, k, v])
    assert (dq[:, :, empty] == 0).all()
    assert all(torch.isfinite(g).all() for g in (dq, dk, dv))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_without_any_pair_gives_zeros_everywhere(kernel: str) -> None:
    q, k, v = qkv(kernel)
    out, lse = ls.attention(q, k, v, mask=~ls.full(), kernel=kernel, return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys_are_allowed(kernel: str, q_len: int, kv_len: int) -> None:
    out, lse = ls.attention(
        torch.randn(1, 2, q_len, 8), torch.randn(1, 2, kv_len, 8), torch.randn(1, 2, kv_len, 4), kernel=kernel, return_lse=True
    )
    assert out.shape == (1, 2, q_len, 4)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", [None, ls.causal(), ls.mask_mod(lambda b, h, q, kv: (q > 20) & (q >= kv))], ids=str)
def test_sinks_equal_the_oracle_with_gradients(kernel: str, mask: Mask | None) -> None:
    q, k, v = qkv(kernel)
    sink = torch.randn(q.shape[1], requires_grad=True)
    leaves = [q, k, v, sink]
    got, want = (
        (*r, *torch.autograd.grad(r[0].sin().sum() + r[1].cos().sum(), leaves))
        for r in (
            ls.attention(q, k, v, mask=mask, sink=sink, return_lse=True, kernel=kernel),
            oracle(q, k, v, mask=mask, sink=sink, return_lse=True),
        )
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kernel", ["cpu", "triton"])
def test_two_calls_that_pass_on_their_state_equal_one(kernel: str) -> None:
    q, k, v = (t.detach() for t in qkv(kernel))
    table = torch.randn(300)
    mask = ls.causal().traced
    score = trace(lambda s, b, h, q, kv: s + table[q - kv + 150], "score")
    spec = Spec(mask=mask.program, score=score.program, kernel=kernel)
    run = kernel_named(kernel)
    inputs, options = CallTensors(q=q, k=k, v=v, score_captured=[table]), CallOptions(spec=spec, scale=0.25)
    whole = make_work(inputs, options, mask_tables(inputs, options), backward=False)
    want = forward(run, q, k, v, whole, state=None, final=True, max_scores=True)
    state = None
    for chosen in ([1], [0]):
        part = part_of(whole, chosen)
        state = forward(run, q, k, v, part, state=state, final=chosen == [0], max_scores=True)
    assert state is not None and state.max_scores is not None
    torch.testing.assert_close(state.out, want.out)
    torch.testing.assert_close(state.lse, want.lse)
    torch.testing.assert_close(state.max_scores, want.max_scores)


def part_of(work: Any, columns: list[int]) -> Any:
    """The same work over some KV tiles only."""
    dense = work.table.to_dense()[0, 0]
    ptr, first, kind = [0], [], []
    for row in dense.tolist():
        for tile, value in enumerate(row):
            if value and tile in columns:
                first.append(tile)
                kind.append(value)
        ptr.append(len(first))
    tiles = torch.tensor(first, dtype=torch.int32)
    table = BlockTable(
        q_len=work.table.q_len,
        kv_len=work.table.kv_len,
        block=work.table.block,
        ptr=torch.tensor(ptr, dtype=torch.int32),
        first=tiles,
        last=tiles.clone(),
        kind=torch.tensor(kind, dtype=torch.int8),
    )
    return replace(work, table=table)


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_a_sink_of_minus_infinity_equals_no_sink(kernel: str) -> None:
    q, k, v = (torch.randn(2, h, 37, 8, requires_grad=True) for h in (4, 2, 2))
    sink = torch.full((4,), -torch.inf, requires_grad=True)
    mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q % 5 != 0))  # rows that see nothing
    out, lse = ls.attention(q, k, v, mask=mask, sink=sink, return_lse=True, kernel=kernel)
    want, want_lse = ls.attention(q, k, v, mask=mask, return_lse=True, kernel=kernel)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and bool((lse == -torch.inf).any())
    grads = torch.autograd.grad(out.sum() + torch.where(lse == -torch.inf, 0.0, lse).sum(), [q, k, v, sink])
    assert all(bool(g.isfinite().all()) for g in grads) and not grads[3].any()
