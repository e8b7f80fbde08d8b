"""The ranks of `longspan demo`: a packed sequence split over processes by every strategy, compared with one process.

Shapes: S tokens, H query heads, G KV heads, D head dim.
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
class DemoSizes:
    """DemoSizes of the demo's attention."""

    tokens: int = 16384
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64

    def lengths(self) -> list[int]:
        """Lengths of the packed documents: one long, the rest ever shorter."""
        left, out = self.tokens, []
        for share in (0.35, 0.5, 0.3, 0.6, 0.4, 0.2, 0.5, 0.3):
            out.append(max(1, int(left * share)))
            left -= out[-1]
        return [*out, left] if left else out

    def mask(self) -> Mask:
        return causal() & documents(lengths=self.lengths())


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """One strategy: relative errors, balance (busiest rank over the mean), bytes per rank, seconds of forward and backward."""

    strategy: str
    layout: str
    error: float
    error_gradients: float
    balance: float
    received: float
    memory: float
    seconds: float


def inputs(sizes: DemoSizes, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of out, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, h, sizes.tokens, sizes.dim) for h in (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)]
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def forward_backward(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """[out, dq, dk, dv] of attention over `tensors` = [q, k, v, grad_out]."""
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    out = attention(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], tensors[3])]


def on_rank(device: torch.device, sizes: DemoSizes) -> tuple[float, list[StrategyResult]]:
    """(seconds of one process, results of each strategy) on rank 0; (0, []) on other ranks."""
    whole = inputs(sizes, device)
    want: list[Tensor] = []
    alone = 0.0
    if dist.get_rank() == 0:
        forward_backward([t[:, :, :256] for t in whole], mask=causal())  # warm up: the first call imports and compiles
        start = _now(device)
        want = forward_backward(whole, mask=sizes.mask())
        alone = _now(device) - start
    dist.barrier()
    results = []
    for strategy in STRATEGIES:
        if strategy == "ulysses" and ulysses_error(dist.get_world_size(), sizes.heads, sizes.kv_heads):
            continue
        results += _run_strategy(device, sizes, strategy, whole, want)
    return alone, results


def _run_strategy(
    device: torch.device, sizes: DemoSizes, strategy: StrategyName, whole: list[Tensor], want: list[Tensor]
) -> list[StrategyResult]:
    known: dict[str, Any] = {"batch": 1, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.dim}
    strategy_plan = plan(sizes.mask(), sizes.tokens, dist.group.WORLD, strategy=strategy, **known)
    local = [strategy_plan.shard(t, 2) for t in whole]
    dist.barrier()
    start = _now(device)
    got = forward_backward(local, plan=strategy_plan)
    dist.barrier()
    seconds = _now(device) - start
    got = [strategy_plan.unshard(t, 2) for t in got]
    if dist.get_rank():
        return []
    errors = [float((g - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]
    report = strategy_plan.report()
    scale = 4 / report.shape.element  # the report counts bfloat16, the demo runs float32
    received = float(report.bytes_received.sum(0).max()) * scale
    return [
        StrategyResult(
            strategy=strategy if strategy != "auto" else f"auto: {strategy_plan.strategy}",
            layout=strategy_plan.data.layout, error=errors[0],
            error_gradients=max(errors[1:]), balance=report.balance, received=received,
            memory=sum(report.memory_parts.values()) * scale, seconds=seconds,
        )
    ]  # fmt: skip


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
