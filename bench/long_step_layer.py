"""A decoder in plain torch for benchmarks of long steps: its sizes, its layer, and times of calls on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from longspan.integrations import memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
START = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    rope_base: float
    qk_norm: bool = False
    chunk: int = 8192  # tokens at a time in MLPs and the loss


QWEN3_8B = Shape(
    layers=36, width=4096, heads=32, kv_heads=8, head_dim=128, hidden=12288, vocab=151936, rope_base=1e6, qk_norm=True
)  # fmt: skip
LLAMA_1B = Shape(layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, hidden=8192, vocab=128256, rope_base=5e5)
TINY = Shape(layers=3, width=64, heads=4, kv_heads=2, head_dim=16, hidden=96, vocab=211, rope_base=1e4, qk_norm=True, chunk=64)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of a call, nothing else running."""
    synchronize()
    start = time.perf_counter()
    result = fn()
    synchronize()
    return time.perf_counter() - start, result


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0


def reset_peak() -> None:
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Layer(nn.Module):
    """A decoder layer: x [1, L, C] → [1, L, C]. RMSNorm, rotary positions, GQA, SwiGLU by `memory.tiled`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        c, d = shape.width, shape.head_dim
        self.shape = shape
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(n)) for n in (c, c, d, d)])
        sizes = [(c, shape.heads * d), (c, shape.kv_heads * d), (c, shape.kv_heads * d), (shape.heads * d, c)]
        self.q, self.k, self.v, self.o = (nn.Linear(*size, bias=False) for size in sizes)
        self.gate, self.up = (nn.Linear(c, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, c, bias=False)

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, H, L, D], k and v [1, G, L, D]."""
        d = self.shape.head_dim
        x = rms_norm(x, x.shape[-1:], self.norms[0], 1e-6)
        q, k, v = (w(x).unflatten(-1, (-1, d)) for w in (self.q, self.k, self.v))
        if self.shape.qk_norm:
            q, k = rms_norm(q, (d,), self.norms[2], 1e-6), rms_norm(k, (d,), self.norms[3], 1e-6)
        return rotated(q.transpose(1, 2), rotary), rotated(k.transpose(1, 2), rotary), v.transpose(1, 2)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        x = x + self.o(attend(*self.project(x, rotary)).transpose(1, 2).flatten(2))
        return x + memory.tiled(self.mlp, rms_norm(x, x.shape[-1:], self.norms[1], 1e-6), chunk=self.shape.chunk)


def rotary_of(positions: Tensor, shape: Shape, dtype: torch.dtype = DTYPE) -> tuple[Tensor, Tensor]:
    """(cos, sin) [1, 1, L, D / 2]."""
    half = shape.head_dim // 2
    frequency = shape.rope_base ** (-torch.arange(half, device=DEVICE, dtype=torch.float32) / half)
    angle = positions.to(DEVICE).float()[None, None, :, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
