"""Budgets of the fuzzer: errors that every kernel makes are allowed, larger ones are wrong."""

from __future__ import annotations

import pytest
import torch
from tests.fuzz import harness
from tests.fuzz.dense import Problem, budgets, rounding_of_out, solve
from torch import Tensor

CASE = {"dtype": "bfloat16", "mesh": None}


def one_key(seed: int) -> Problem:
    """Rows that see one key, mostly with a probability near 1: dP and delta cancel."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad_out = (torch.randn(3, 2, 1, 64, generator=generator, dtype=torch.float64).bfloat16() for _ in range(4))
    grad_lse, sink = torch.randn(3, 2, 1, generator=generator), torch.randn(2, generator=generator)
    visible = torch.ones(3, 2, 1, 1, dtype=torch.bool)
    return Problem(
        q=q, k=k, v=v, grad_out=grad_out, grad_lse=grad_lse, sink=sink, scale=1.0, visible=visible, score=None, through=(True, False)
    )  # fmt: skip


def dq_with_rounded_out(p: Problem) -> Tensor:
    """dQ in float64, but for delta, which is computed from out in bfloat16."""
    assert p.sink is not None and p.scale is not None
    q, k, v, grad_out = (t.double() for t in (p.q, p.k, p.v, p.grad_out))
    probability = torch.sigmoid((q * k).sum(-1) * p.scale - p.sink.double().view(1, 2, 1))
    out = (probability[..., None] * v).bfloat16().double()
    return (probability * ((grad_out * v).sum(-1) - (out * grad_out).sum(-1)))[..., None] * k * p.scale


def test_the_rounding_of_out_is_allowed_and_no_more() -> None:
    p = one_key(270)
    right, got = solve(p, torch.float64, torch.float32), dq_with_rounded_out(p)
    error = float((got - right["dq"]).abs().max())
    assert error > budgets(p, right, torch.bfloat16)["dq"]
    assert rounding_of_out(p, right, torch.bfloat16)["dq"] == pytest.approx(error, rel=1e-9)
    harness._compare(CASE, p, {"dq": got}, "")
    with pytest.raises(harness.Wrong, match="dq: error"):
        harness._compare(CASE, p, {"dq": right["dq"] + 4 * (got - right["dq"])}, "")
