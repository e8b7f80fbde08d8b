"""A named kernel over a mesh is used on every rank, or raises on every rank before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sharded import Problem
from torch import Tensor

import longspan as ls
from longspan._kernels.cpu import CpuKernel
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Work
from longspan._masks.block_table import BlockTable
from longspan.testing import virtual_world


@pytest.mark.parametrize("kernel", ["flash", "aten", "cpu"])
@pytest.mark.parametrize("strategy", ["ring", "exchange", "ulysses"])
def test_torchs_kernels_compute_rectangular_stages(kernel: str, strategy: str) -> None:
    problem = Problem(
        mask=ls.causal(), score="none", q_len=512, kv_len=512, batch=2, heads=4, kv_heads=2, dim=16, value_dim=16, sink=False,
        dtype=torch.float32,
    )  # fmt: skip
    right, got = problem.by_oracle(), problem.over(2, kernel=kernel, strategy=strategy, layout="head_tail")
    for name in right.values:
        assert got.error(right, name) < 2e-5, name


def test_a_kernel_that_one_rank_cannot_use_raises_on_all() -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & ((q < 400) | (q % 3 > 0)))  # causal squares on the first rank only

    def rank(mesh: Any) -> str:
        plan = ls.plan(mask, 600, mesh, layout="contiguous", strategy="ring")
        with pytest.raises((ValueError, RuntimeError), match="kernel 'flash' does not support this call") as caught:
            ls.attention(*(torch.randn(1, 2, plan.local_len, 16) for _ in range(3)), plan=plan, kernel="flash")
        return str(caught.value)

    told = virtual_world(2).run(rank)
    assert "rank 1 raised" in told[0] and "raised" not in told[1]


def test_triton_computes_batch_rows_that_are_laid_out_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.interpreter import run_triton_in_one_thread

    run_triton_in_one_thread(monkeypatch)
    torch.manual_seed(0)
    mask = ls.causal() & ls.documents(ids=torch.stack([torch.arange(203) // 70, torch.arange(203) // 110]))
    q = torch.randn(2, 2, 203, 16)
    want = ls.attention(q, q, q, mask=mask, kernel="dense")

    def rank(mesh: Any) -> Tensor:
        plan = ls.plan(mask, 203, mesh, batch=2)
        assert plan.data.batch_layouts == 2
        x = plan.shard(q, dim=2)
        return plan.unshard(ls.attention(x, x, x, plan=plan, kernel="triton"), dim=2)

    for out in virtual_world(2).run(rank):
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ring", "exchange"])
def test_every_call_was_checked_before_data_was_sent(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked work is that of the tile size which the kernel prefers, and of the local KV in two parts."""
    checked: list[tuple[BlockTable, torch.Size]] = []
    used: list[tuple[BlockTable, torch.Size]] = []
    forward, backward = CpuKernel.forward, CpuKernel.backward
    monkeypatch.setattr(CpuKernel, "block_size", lambda *_: (64, 64))
    monkeypatch.setattr(CpuKernel, "check", lambda _, inputs, work, needs=(): checked.append((work.table, inputs.q.shape)))

    def recorded_forward(self: CpuKernel, inputs: AttentionInputs, work: Work, **options: Any) -> Any:
        used.append((work.table, inputs.q.shape))
        return forward(self, inputs, work, **options)

    def recorded_backward(self: CpuKernel, tensors: BackwardInputs, work: Work, **options: Any) -> Any:
        used.append((work.table, tensors.inputs.q.shape))
        return backward(self, tensors, work, **options)

    monkeypatch.setattr(CpuKernel, "forward", recorded_forward)
    monkeypatch.setattr(CpuKernel, "backward", recorded_backward)
    ids = torch.stack([torch.arange(700) // 90, torch.arange(700) // 310])
    for mask, batch in ((ls.causal(), 1), (ls.causal() & ls.documents(ids=ids), 2)):
        q = torch.randn(batch, 2, 700, 8)

        def rank(mesh: Any, mask: Any = mask, q: Tensor = q) -> None:
            plan = ls.plan(mask, 700, mesh, batch=len(q), strategy=strategy)
            x = plan.shard(q, dim=2).requires_grad_()
            ls.attention(x, x, x, plan=plan).sum().backward()

        virtual_world(3).run(rank)
    assert used and all(table.block == (64, 64) for table, _ in used)
    known = {(id(table), shape) for table, shape in checked}
    assert all((id(table), shape) in known for table, shape in used)
