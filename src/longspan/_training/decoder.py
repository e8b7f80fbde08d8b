"""A small decoder-only transformer for training and benchmarks: RoPE, GQA, SwiGLU, RMSNorm.

Shapes: B batch, L local tokens, H query heads, G KV heads, D head dim, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from torch.utils.checkpoint import checkpoint

from longspan._engine.attention import attention
from longspan.integrations.loss import linear_token_loss

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder. `recompute`: activation checkpointing of every block."""

    vocab: int = 257
    width: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 352
    rope_base: float = 10000.0
    recompute: bool = False

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if not isinstance(size, bool) and size < 1:
                raise ValueError(f"decoder: {name} must be 1 or more, got {size}")
        if self.heads % self.kv_heads:
            raise ValueError(f"decoder: heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"decoder: head_dim must be even for rotary positions, got {self.head_dim}")


class Norm(nn.Module):
    """RMSNorm over the last dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-5)


class Block(nn.Module):
    """Attention and MLP with residuals: x [B, L, C] → [B, L, C]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c, d = config.width, config.head_dim
        self.head_dim = d
        self.before_attention, self.before_mlp = Norm(c), Norm(c)
        self.q, self.k, self.v = (nn.Linear(c, n * d, bias=False) for n in (config.heads, config.kv_heads, config.kv_heads))
        self.o = nn.Linear(config.heads * d, c, bias=False)
        self.gate, self.up = nn.Linear(c, config.hidden, bias=False), nn.Linear(c, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, c, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], plan: Any, attend: Attend | None) -> Tensor:
        h = self.before_attention(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        out = attention(q, k, v, plan=plan) if attend is None else attend(q, k, v)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        h = self.before_mlp(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """tokens [B, L] → logits [B, L, V], or a loss."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.last = Norm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def initialise(self, seed: int) -> Decoder:
        """Draw the weights from a seed: the same on every rank and machine."""
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            if p.ndim > 1:
                p.data.copy_(torch.randn(p.shape, generator=generator) * 0.02)
        return self

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        plan: Any = None,
        attend: Attend | None = None,
        labels: Tensor | None = None,
        count: Tensor | float = 1,
        averaged: int = 1,
    ) -> Tensor:
        """Logits [B, L, V] of tokens and positions [B, L]; with labels (shifted before sharding), this rank's share of the loss.

        Args:
            plan: Plan of the tokens' sequence.
            attend: Attention (q, k, v) → out to use instead of `longspan.attention`; it has its own mask.
            count, averaged: See `longspan.integrations.loss.token_loss`.
        """
        x = self.tokens(tokens)
        rotary = rotary_angles(positions, self.config, x.dtype)
        for block in self.blocks:
            if self.config.recompute and self.training:
                x = checkpoint(block, x, rotary, plan, attend, use_reentrant=False)
            else:
                x = block(x, rotary, plan, attend)
        x = self.last(x)
        if labels is None:
            return linear(x, self.head.weight)
        return linear_token_loss(x, self.head.weight, labels, count=count, averaged=averaged)


def flops_per_token(config: DecoderConfig, pairs_per_token: float) -> float:
    """FLOPs of forward and backward: 6 per matmul weight, 12 per head dim and visible (query, key) pair."""
    heads, kv_heads, d = config.heads, config.kv_heads, config.head_dim
    block = config.width * (2 * heads * d + 2 * kv_heads * d + 3 * config.hidden)
    weights = config.layers * block + config.vocab * config.width
    return 6 * weights + 12 * config.layers * heads * d * pairs_per_token


def rotary_angles(positions: Tensor, config: DecoderConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the rotary angles [B, 1, L, D/2]; angles are computed in float32."""
    half = config.head_dim // 2
    frequency = config.rope_base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rotary(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, H, L, D] with rotary positions applied."""
    cos, sin = rotary
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
