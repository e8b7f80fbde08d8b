"""Random masks, lengths and heads: the operator equals the oracle. All sizes differ, so that a wrong dim cannot pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan.testing import oracle

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    q_len, kv_len = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    groups, ratio, batch = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**16))
    leaves = [
        ls.causal(),
        ls.sliding_window(draw(st.integers(1, 200)), draw(st.integers(0, 50))),
        ls.prefix(draw(st.integers(0, 150))),
        ls.prefix([draw(st.integers(0, 150)) for _ in range(batch)]),
        ls.mask_mod(lambda b, h, q, kv: (q + h) % 3 != kv % 2 + b),
        ls.full(),
    ]
    if q_len == kv_len:
        leaves.append(ls.documents(ids=torch.randint(-1, 3, (batch, q_len), generator=torch.Generator().manual_seed(seed))))
    mask = draw(st.sampled_from(leaves))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(st.sampled_from(leaves))
        mask = draw(st.sampled_from([mask & other, mask | other, mask & ~other]))
    return {
        "sizes": (batch, groups * ratio, groups, q_len, kv_len, draw(st.sampled_from([5, 16, 33])), draw(st.sampled_from([7, 16]))),
        "mask": mask,
        "scored": draw(st.booleans()),
        "sink": draw(st.booleans()),
        "through_lse": draw(st.booleans()),
        "seed": seed,
    }


@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(problems())
def test_the_operator_equals_the_oracle(problem: dict[str, Any]) -> None:
    batch, heads, groups, q_len, kv_len, dim, value_dim = problem["sizes"]
    generator = torch.Generator().manual_seed(problem["seed"])

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    q, k, v = draw(batch, heads, q_len, dim), draw(batch, groups, kv_len, dim), draw(batch, groups, kv_len, value_dim)
    table, sink = draw(heads, q_len + kv_len), draw(heads) if problem["sink"] else None
    score_mod = (lambda s, b, h, i, j: torch.tanh(s) + table[h, i - j + kv_len - 1]) if problem["scored"] else None
    leaves = [q, k, v, *([table] if score_mod else []), *([sink] if sink is not None else [])]
    results = []
    for call in (ls.attention, oracle):
        out, lse = call(q, k, v, mask=problem["mask"], score_mod=score_mod, sink=sink, return_lse=True)
        loss = out.sin().sum()
        if problem["through_lse"]:
            loss = loss + torch.where(lse == -torch.inf, 0.0, lse).cos().sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append([out, lse, *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
