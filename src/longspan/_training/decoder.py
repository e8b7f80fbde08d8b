"""A small decoder to train and to measure with: rotary positions, grouped key heads, SwiGLU, RMS norms.

Legend: B batch, L tokens of this rank, H query heads, G key heads, D head dim, C width.
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
    """Sizes of a decoder. `recompute`: keep only each block's input for the backward pass."""

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
            raise ValueError(f"decoder: head_dim must be even, for rotary positions turn pairs; got {self.head_dim}")


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-5)


class Block(nn.Module):
    """x [B, L, C] → x [B, L, C]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c, d = config.width, config.head_dim
        self.head_dim = d
        self.before_attention, self.before_mlp = Norm(c), Norm(c)
        self.q, self.k, self.v = (nn.Linear(c, n * d, bias=False) for n in (config.heads, config.kv_heads, config.kv_heads))
        self.o = nn.Linear(config.heads * d, c, bias=False)
        self.gate, self.up = nn.Linear(c, config.hidden, bias=False), nn.Linear(c, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, c, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], plan: Any, attend: Attend | None) -> Tensor:
        h = self.before_attention(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = turn(q, turns), turn(k, turns)
        out = attention(q, k, v, plan=plan) if attend is None else attend(q, k, v)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        h = self.before_mlp(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.last = Norm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def initialise(self, seed: int) -> Decoder:
        """Weights from a seed: the same on every rank and machine."""
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
        """tokens, positions [B, L] → logits [B, L, V]; with labels (shifted before sharding), this rank's share of the loss instead.

        plan:   of the tokens' sequence. attend: another attention (q, k, v) → out instead, with a mask of its own.
        count, averaged: as in `loss.token_loss`.
        """
        x = self.tokens(tokens)
        turns = turns_at(positions, self.config, x.dtype)
        for block in self.blocks:
            if self.config.recompute and self.training:
                x = checkpoint(block, x, turns, plan, attend, use_reentrant=False)
            else:
                x = block(x, turns, plan, attend)
        x = self.last(x)
        if labels is None:
            return linear(x, self.head.weight)
        return linear_token_loss(x, self.head.weight, labels, count=count, averaged=averaged)

    def flops_per_token(self, pairs_per_token: float) -> float:
        """Of forward and backward: 6 per weight that is multiplied, 12 per head dim and pair of tokens that attend."""
        weights = sum(p.numel() for p in self.parameters()) - self.tokens.weight.numel()
        return 6 * weights + 12 * self.config.layers * self.config.heads * self.config.head_dim * pairs_per_token


def turns_at(positions: Tensor, config: DecoderConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary positions, [B, 1, L, D/2]; angles in float32."""
    half = config.head_dim // 2
    speed = config.rope_base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * speed
    return angle.cos().to(dtype), angle.sin().to(dtype)


def turn(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on x [B, H, L, D]."""
    cos, sin = turns
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
