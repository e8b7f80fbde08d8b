"""bench/link.py: one rank of a mesh runs alone, with a copy of its own data in place of every message."""

from __future__ import annotations

import pytest
import torch
from bench.link import EchoMesh

import longspan as ls


@pytest.mark.parametrize("strategy", ["ring", "exchange"])
def test_one_rank_of_an_echo_mesh_runs_forward_and_backward(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EchoMesh, "link", None, raising=False)  # only CUDA tensors need a link
    mesh = EchoMesh(axes=ls.Mesh.abstract(4).axes, coordinate=(1,))
    plan = ls.plan(ls.causal(), 1100, mesh, layout="head_tail", strategy=strategy, heads=2, kv_heads=1, head_dim=16)
    q, k, v = (torch.randn(1, heads, plan.local_len, 16, requires_grad=True) for heads in (2, 1, 1))
    for _ in range(2):  # the first call and a repeated one: every call compares descriptions
        out = ls.attention(q, k, v, plan=plan, kernel="cpu")
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(t.isfinite().all() for t in (out, *grads))
