"""Rows of bench/selected.py: random choices of keys and the pairs that they show."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import longspan as ls

DIM = 128


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kind of choice: `keys` per query in blocks of `granularity`, chosen by rows of `q_granularity` queries for each KV head."""

    name: str
    granularity: int
    q_granularity: int
    keys: int
    kv_heads: int = 8
    heads: int = 64
    causal: bool = True

    def mask(self, indices: Tensor) -> ls.Mask:
        chosen = ls.selected(indices, self.granularity, self.q_granularity)
        return chosen & ls.causal() if self.causal else chosen


ROWS = (
    Row(name="block128", granularity=128, q_granularity=128, keys=4096),
    Row(name="block64", granularity=64, q_granularity=64, keys=2048),
    Row(name="nsa", granularity=64, q_granularity=1, keys=1024),
    Row(name="micro16", granularity=16, q_granularity=1, keys=2048),
    Row(name="token", granularity=1, q_granularity=1, keys=2048, kv_heads=1),
    Row(name="token128", granularity=1, q_granularity=1, keys=2048, kv_heads=1, heads=128),
    Row(name="token_gqa", granularity=1, q_granularity=1, keys=2048),
    # Whole blocks, without causal: peers with lists of blocks. Not all of them have a backward pass for shared KV heads.
    Row(name="whole128", granularity=128, q_granularity=128, keys=4096, causal=False),
    Row(name="whole64", granularity=64, q_granularity=64, keys=2048, causal=False),
    Row(name="whole128_mha", granularity=128, q_granularity=128, keys=4096, kv_heads=32, heads=32, causal=False),
    Row(name="whole64_mha", granularity=64, q_granularity=64, keys=2048, kv_heads=32, heads=32, causal=False),
)


def choose(row: Row, tokens: int, *, seed: int = 0) -> Tensor:
    """Random indices [1, KV heads, rows, k] int32 without repeats: past blocks, the query's own block included, −1 where there are few."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows, blocks, k = tokens // row.q_granularity, tokens // row.granularity, row.keys // row.granularity
    own = (torch.arange(rows, device="cuda") + 1) * row.q_granularity - 1
    last = (own // row.granularity)[:, None]
    # One block of each of k − 1 parts of the past, and the own block: nearly all distinct, without a sort.
    jitter = torch.rand(1, row.kv_heads, rows, k, generator=generator, device="cuda")
    step = torch.arange(k, device="cuda")
    picked = torch.where(last < k, step, ((step + jitter) * (last / max(1, k - 1))).floor().long())
    picked = torch.where((last >= k) & (step == k - 1), last, picked)
    picked = torch.where(picked <= last, picked, -1).int()
    repeats = torch.zeros_like(picked, dtype=torch.bool)
    repeats[..., 1:] = picked[..., 1:] == picked[..., :-1]
    assert int(picked.max()) < blocks
    return torch.where(repeats, -1, picked).contiguous()


def pairs(row: Row, indices: Tensor, tokens: int) -> int:
    """Visible (query, key) pairs of one choice, averaged over KV heads."""
    if not row.causal:
        return int((indices >= 0).sum()) * row.granularity * row.q_granularity // row.kv_heads
    start = torch.arange(tokens // row.q_granularity, device="cuda")[:, None] * row.q_granularity
    total = 0.0
    for i in range(row.q_granularity):  # queries of a row
        seen = (start + i - indices * row.granularity + 1).clamp(0, row.granularity)
        total += float(torch.where(indices >= 0, seen, 0).sum(dtype=torch.float64))
        if row.q_granularity > 8 and i == 0:  # linear in i up to the query's own block
            last = (start + row.q_granularity - 1 - indices * row.granularity + 1).clamp(0, row.granularity)
            return int((total + float(torch.where(indices >= 0, last, 0).sum(dtype=torch.float64))) * row.q_granularity / 2 / row.kv_heads)
    return int(total / row.kv_heads)


def qkv(row: Row, tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((1, row.heads, tokens, DIM), (1, row.kv_heads, tokens, DIM), (1, row.kv_heads, tokens, DIM))
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
