"""Masks, score mods and shapes for tests against the oracle, and the comparison with error budgets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

import longspan as ls
from longspan._kernels.protocol import state_dtype
from longspan.testing import oracle
from longspan.testing.budget import budgets, error


def cuts(length: int, parts: int) -> list[int]:
    """`parts` uneven document lengths with sum `length`."""
    ends = sorted({length * (i * i + i) // (parts * parts + parts) for i in range(1, parts)} | {0, length})
    return [b - a for a, b in itertools.pairwise(ends)]


def masks(length: int, device: str = "cpu") -> dict[str, Any]:
    """Masks by name, for sequences of `length` tokens."""
    generator = torch.Generator().manual_seed(7)
    shuffled = torch.randint(0, 4, (length,), generator=generator).to(device)
    lookup = (torch.rand(length // 16 + 1, length // 16 + 1, generator=generator) < 0.6).to(device)
    limits = torch.randint(0, length + 1, (16,), generator=generator).to(device)
    return {
        "full": ls.full(),
        "causal": ls.causal(),
        "window": ls.sliding_window(37, 5),
        "documents": ls.causal() & ls.documents(lengths=cuts(length, 5)),
        "prefix": ls.causal() | ls.prefix(max(1, length // 3)),
        "dilated": ls.mask_mod(lambda b, h, q, kv: ((q - kv) % 3 == 0) & (q >= kv)),
        "per_head_window": ls.mask_mod(lambda b, h, q, kv: (q - kv).abs() < 9 * (h + 1)),
        "shuffled_ids": ls.mask_mod(lambda b, h, q, kv: shuffled[q] == shuffled[kv]) & ls.causal(),
        "block_lookup": ls.mask_mod(lambda b, h, q, kv: lookup[q // 16, kv // 16]),
        "empty_rows": ls.mask_mod(lambda b, h, q, kv: (q % 5 != 0) & (kv < limits[h]) & (q >= kv)),
    }


def score_mods(
    length: int, heads: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, tuple[Callable[..., Tensor] | None, list[Tensor]]]:
    """(score_mod, captured tensors with gradients) by name."""
    generator = torch.Generator().manual_seed(11)
    slopes = torch.exp2(-torch.arange(1, heads + 1) * 8.0 / heads).to(device)
    table = (0.5 * torch.randn(2 * length, generator=generator)).to(device, dtype).requires_grad_()
    bias = torch.randn(heads, generator=generator).to(device, dtype).requires_grad_()
    return {
        "none": (None, []),
        "alibi": (lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs(), []),
        "softcap": (lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0), []),
        "relative_bias": (lambda s, b, h, q, kv: s + table[q - kv + length], [table]),
        "head_bias": (lambda s, b, h, q, kv: s * torch.sigmoid(bias[h]) + bias[h], [bias]),
    }


T = TypeVar("T")
HEADS = {"mha": (4, 4), "gqa": (8, 2), "mqa": (3, 1)}
DIMS = {"64": (64, 64), "128": (128, 128), "192/128": (192, 128)}
LENGTHS = (1, 7, 128, 300, 1000)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Names of a mask, a score mod, head counts and head dims, and the number of tokens."""

    mask: str
    score: str
    heads: str
    dims: str
    length: int

    def __str__(self) -> str:
        return f"{self.mask}-{self.score}-{self.heads}-{self.dims}-{self.length}"


def whole_grid(lengths: Sequence[int] = LENGTHS) -> list[Case]:
    """Every combination of the choices."""
    names = (masks(64), score_mods(64, 4), HEADS, DIMS, lengths)
    return [Case(mask=m, score=s, heads=h, dims=d, length=n) for m, s, h, d, n in itertools.product(*names)]


def covering_sample(grid: list[T]) -> list[T]:
    """A small sample in which every pair of choices occurs, picked greedily by the number of new pairs."""
    pairs = [set(itertools.combinations(vars(case).items(), 2)) for case in grid]
    todo = set().union(*pairs)
    sample = []
    while todo:
        best = max(range(len(grid)), key=lambda i: len(pairs[i] & todo))
        todo -= pairs[best]
        sample.append(grid[best])
    return sample


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of one attention call: q [B, H, S, D], k [B, G, S, D], v [B, G, S, E], and gradients of out and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    captured: list[Tensor] = field(default_factory=list)


def inputs(case: Case, dtype: torch.dtype, device: str = "cpu", *, batch: int = 2, seed: int = 0) -> Inputs:
    """Random tensors for a case."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = HEADS[case.heads]
    dim, value_dim = DIMS[case.dims]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    q, k = draw(batch, heads, case.length, dim), draw(batch, kv_heads, case.length, dim)
    v, grad_out = draw(batch, kv_heads, case.length, value_dim), draw(batch, heads, case.length, value_dim)
    q, k, v, grad_out = (t.to(dtype) for t in (q, k, v, grad_out))
    return Inputs(
        q=q.requires_grad_(), k=k.requires_grad_(), v=v.requires_grad_(), grad_out=grad_out, grad_lse=draw(batch, heads, case.length)
    )


def results(fn: Callable[[], tuple[Tensor, Tensor]], tensors: Inputs, captured: list[Tensor], *, through_lse: bool) -> dict[str, Tensor]:
    """out, lse and all gradients of a call, by name."""
    out, lse = fn()
    loss = (out * tensors.grad_out.to(out.dtype)).sum()
    if through_lse:
        loss = loss + (torch.where(lse == -torch.inf, 0.0, lse) * tensors.grad_lse.to(lse.dtype)).sum()
    leaves = {"dq": tensors.q, "dk": tensors.k, "dv": tensors.v, **{f"captured {i}": t for i, t in enumerate(captured)}}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    zeros = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves.values(), strict=True)]
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, zeros, strict=True))}


@lru_cache(maxsize=1)  # several kernels are compared on one case in a row
def by_oracle(
    case: Case, dtype: torch.dtype, device: str, through_lse: bool, batch: int, seed: int = 0
) -> tuple[Inputs, dict[str, Tensor], dict[str, Tensor]]:
    """(inputs, oracle results in float64, oracle results in `dtype`)."""
    tensors, mask = inputs(case, dtype, device, batch=batch, seed=seed), masks(case.length, device)[case.mask]
    by_dtype = []
    for wide in (torch.float64, dtype):
        score_mod, captured = score_mods(case.length, HEADS[case.heads][0], device, state_dtype(wide))[case.score]
        call = partial(oracle, tensors.q, tensors.k, tensors.v, mask=mask, score_mod=score_mod, return_lse=True, dtype=wide)
        by_dtype.append(results(call, tensors, captured, through_lse=through_lse))
    return tensors, by_dtype[0], by_dtype[1]


def check_against_oracle(
    case: Case, kernel: str, dtype: torch.dtype, device: str = "cpu", *, through_lse: bool = False, batch: int = 2
) -> None:
    """Assert that every error is within its budget. If one is not, budgets of small results include the errors of two more draws."""
    tensors, right, dense = by_oracle(case, dtype, device, through_lse, batch)
    mask = masks(case.length, device)[case.mask]
    score_mod, captured = score_mods(case.length, HEADS[case.heads][0], device, state_dtype(dtype))[case.score]
    call = lambda: ls.attention(tensors.q, tensors.k, tensors.v, mask=mask, score_mod=score_mod, return_lse=True, kernel=kernel)
    got = results(call, tensors, captured, through_lse=through_lse)
    assert got.keys() == right.keys()
    sizes = {"v": tensors.v.detach(), "grad_out": tensors.grad_out, "captured": [f"captured {i}" for i in range(len(captured))]}
    errors, allowed = {name: error(got[name], want) for name, want in right.items()}, budgets(right, dense, **sizes)
    if any(errors[name] > allowed[name] for name in errors):
        others = [by_oracle.__wrapped__(case, dtype, device, through_lse, batch, seed)[1:] for seed in (1, 2)]
        allowed = budgets(right, dense, **sizes, others=others)
    for name in errors:
        message = f"{case} {kernel} {name}: error {errors[name]:.2e}, budget {allowed[name]:.2e}"
        assert errors[name] <= allowed[name], (
            f"{message} (inf: another shape than {tuple(right[name].shape)}, or NaN or inf in wrong places)"
        )
