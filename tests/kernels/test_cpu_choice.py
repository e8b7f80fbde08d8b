"""Which calls of the CPU kernel torch's flash operator computes: those without a score mod whose keys and values have one dim."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan._kernels import cpu


@pytest.mark.parametrize(
    ("value_dim", "options", "computed"),
    [(8, {}, True), (5, {}, False), (8, {"score_mod": lambda s, b, h, q, kv: s / 2}, False), (8, {"mask": ls.sliding_window(9)}, True)],
)
def test_torchs_operator_computes_plain_calls(
    value_dim: int, options: dict[str, Any], computed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for name in ("_operator", "_backward_operator"):
        operator = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *args, name=name, operator=operator, **rest: names.append(name) or operator(*args, **rest))
    q, k, v = torch.randn(1, 4, 30, 8, requires_grad=True), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, value_dim)
    ls.attention(q, k, v, kernel="cpu", **options).sum().backward()
    assert set(names) == ({"_operator", "_backward_operator"} if computed else set())
