"""A packed batch over processes by every strategy, against one process: what `longspan demo` runs on each rank.

Legend: S tokens, H query heads, G key heads, D head dim, N ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan._engine.attention import attention
from longspan._masks.algebra import Mask
from longspan._masks.constructors import causal, documents
from longspan._plan.strategies import StrategyName, ulysses_error
from longspan._planner.planning import plan

STRATEGIES: tuple[StrategyName, ...] = ("auto", "ring", "allgather", "exchange", "ulysses")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    tokens: int = 16384
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64

    def lengths(self) -> list[int]:
        """A long document, and ever shorter ones."""
        left, out = self.tokens, []
        for share in (0.35, 0.5, 0.3, 0.6, 0.4, 0.2, 0.5, 0.3):
            out.append(max(1, int(left * share)))
            left -= out[-1]
        return [*out, left] if left else out

    def mask(self) -> Mask:
        return causal() & documents(lengths=self.lengths())


@dataclass(frozen=True, kw_only=True)
class Line:
    """One strategy: relative errors of out and of the gradients, the busiest rank over the mean, bytes, seconds of both passes."""

    strategy: str
    layout: str
    error: float
    error_gradients: float
    balance: float
    received: float
    memory: float
    seconds: float


def inputs(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of out: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, h, sizes.tokens, sizes.dim) for h in (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)]
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def both_passes(given: list[Tensor], **options: Any) -> list[Tensor]:
    """out and the gradients of q, k and v."""
    q, k, v = (t.detach().requires_grad_() for t in given[:3])
    out = attention(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], given[3])]


def on_rank(device: torch.device, sizes: Sizes) -> tuple[float, list[Line]]:
    """Seconds of one process alone, and a line per strategy; on rank 0, nothing elsewhere."""
    whole = inputs(sizes, device)
    want: list[Tensor] = []
    alone = 0.0
    if dist.get_rank() == 0:
        both_passes([t[:, :, :256] for t in whole], mask=causal())  # the first call of a process loads and compiles
        start = _now(device)
        want = both_passes(whole, mask=sizes.mask())
        alone = _now(device) - start
    dist.barrier()
    lines = []
    for strategy in STRATEGIES:
        if strategy == "ulysses" and ulysses_error(dist.get_world_size(), sizes.heads, sizes.kv_heads):
            continue
        lines += _line(device, sizes, strategy, whole, want)
    return alone, lines


def _line(device: torch.device, sizes: Sizes, strategy: StrategyName, whole: list[Tensor], want: list[Tensor]) -> list[Line]:
    known: dict[str, Any] = {"batch": 1, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.dim}
    made = plan(sizes.mask(), sizes.tokens, dist.group.WORLD, strategy=strategy, **known)
    mine = [made.shard(t, 2) for t in whole]
    dist.barrier()
    start = _now(device)
    got = both_passes(mine, plan=made)
    dist.barrier()
    seconds = _now(device) - start
    got = [made.unshard(t, 2) for t in got]
    if dist.get_rank():
        return []
    errors = [float((g - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]
    told = made.report()
    wide = 4 / told.shape.element  # float32 here
    received = float(told.bytes_received.sum(0).max()) * wide
    return [
        Line(
            strategy=strategy if strategy != "auto" else f"auto: {made.strategy}", layout=made.data.layout, error=errors[0],
            error_gradients=max(errors[1:]), balance=told.balance, received=received,
            memory=sum(told.memory_parts.values()) * wide, seconds=seconds,
        )
    ]  # fmt: skip


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
