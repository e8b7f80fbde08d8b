"""Checks of `longspan verify`: results against the float64 oracle, within the error of dense attention in the same dtype.

Shapes: B batch, H query heads, G KV heads, S tokens, D head dim; q [B, H, S, D], k and v [B, G, S, D], out [B, H, S, D], lse [B, H, S].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import longspan as ls
from longspan._kernels.protocol import state_dtype
from longspan.testing import oracle
from longspan.testing.budget import budgets, error

MASKS = ("causal", "documents", "window", "custom")
SCORES = ("none", "softcap", "bias")
SHOWN = ("out", "lse", "gradients")
_NEAR = 31  # the bias depends on the distance up to this


def grid(dtypes: Sequence[torch.dtype], *, whole: bool) -> list[tuple[str, str, torch.dtype]]:
    """Masks × scores × dtypes; unless `whole`, a sample: each mask with each score in one dtype, and causal without a score in all.

    Some kernels support causal without a score only. With three dtypes, every mask and every score occurs in each dtype.
    """
    if whole:
        return list(itertools.product(MASKS, SCORES, dtypes))
    pairs = itertools.product(enumerate(MASKS), enumerate(SCORES))
    sample = [(mask, score, dtypes[(i + j) % len(dtypes)]) for (i, mask), (j, score) in pairs]
    return list(dict.fromkeys([*sample, *(("causal", "none", dtype) for dtype in dtypes)]))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention call with inputs from a fixed seed."""

    mask: str
    score: str
    dtype: torch.dtype
    device: torch.device
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    tokens: int = 149  # two tiles, the second one partial
    dim: int = 32

    def __str__(self) -> str:
        return f"{self.mask} mask, {'no' if self.score == 'none' else self.score} score"

    def _draw(self, seed: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    @cached_property
    def inputs(self) -> list[Tensor]:
        """q, k, v, and the gradients of out and of lse."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        drawn = [self._draw(i, self.batch, h, self.tokens, self.dim).to(self.dtype) for i, h in enumerate(heads)]
        return [*drawn, self._draw(4, self.batch, self.heads, self.tokens)]  # float32

    @cached_property
    def made_mask(self) -> ls.Mask:
        if self.mask == "causal":
            return ls.causal()
        if self.mask == "documents":
            lengths = [self.tokens * 5 // 12, 3, self.tokens // 4]
            return ls.causal() & ls.documents(lengths=[*lengths, self.tokens - sum(lengths)])
        if self.mask == "window":
            return ls.sliding_window(37, 5)
        until = torch.arange(1, self.heads + 1, device=self.device) * self.tokens // self.heads
        return ls.mask_mod(lambda b, h, q, kv: (q % 5 != 0) & (kv < until[h]) & (q >= kv))  # some rows see no key

    def score_mod(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor] | None, list[Tensor]]:
        """(score_mod for a call in a dtype, captured tensors that require a gradient)."""
        if self.score == "none":
            return None, []
        if self.score == "softcap":
            return lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0), []
        bias = self._draw(5, self.heads, 2 * _NEAR + 1).to(state_dtype(dtype)).requires_grad_()
        return lambda s, b, h, q, kv: s + bias[h, (q - kv).clamp(-_NEAR, _NEAR) + _NEAR], [bias]

    def results(
        self, attend: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """out, lse and every gradient of attend(q, k, v, score_mod=…) on the inputs or on shards of them, computed in a dtype."""
        q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
        score_mod, captured = self.score_mod(dtype or self.dtype)
        out, lse = attend(q, k, v, score_mod=score_mod)
        loss = (out * inputs[3]).sum() + (torch.where(lse == -torch.inf, 0.0, lse) * inputs[4]).sum()
        names = ["dq", "dk", "dv", *(["dbias"] if captured else [])]
        grads = torch.autograd.grad(loss, [q, k, v, *captured])
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}

    def by_oracle(self, dtype: torch.dtype) -> dict[str, Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
            return oracle(q, k, v, mask=self.made_mask, return_lse=True, dtype=dtype, **rest)

        return {name: t.double() for name, t in self.results(attend, self.inputs, dtype).items()}

    @cached_property
    def right(self) -> dict[str, Tensor]:
        return self.by_oracle(torch.float64)

    @cached_property
    def budgets(self) -> dict[str, float]:
        """Allowed absolute error of each result."""
        return budgets(self.right, self.by_oracle(self.dtype), v=self.inputs[2], grad_out=self.inputs[3], captured=("dbias",))

    def shares(self, got: Mapping[str, Tensor]) -> dict[str, float]:
        """Error over budget of each result: at most 1 is right. Infinity for a wrong shape or misplaced NaN or infinity."""
        return {name: error(got[name], right) / self.budgets[name] for name, right in self.right.items()}


@dataclass(kw_only=True)
class Line:
    """Outcome of one kernel and dtype, or of one strategy: the worst error over budget, failures, unsupported cases."""

    name: str
    dtype: str
    cases: int = 0
    refused: int = 0
    reason: str = ""
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHOWN, 0.0))
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures

    def add(self, problem: Problem, shares: Mapping[str, float]) -> None:
        self.cases += 1
        for name, share in shares.items():
            shown = name if name in SHOWN else "gradients"
            self.worst[shown] = max(self.worst[shown], share)
            if not share <= 1:
                self.failures.append(f"{problem}: {name} error is {share:.3g} × its budget")

    def fail(self, problem: Problem, error: BaseException) -> None:
        self.cases += 1
        self.failures.append(f"{problem}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
