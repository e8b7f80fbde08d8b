"""Problems of bench/peers.py: one mask per row, in the terms of every peer, and a float64 reference.

Shapes: S tokens, H query heads, D head dim, E value head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import longspan as ls

SOFTCAP = 30.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """Sizes and mask of one problem. `kind`: name of the mask; `value_dim`: head dim of the values, `dim` if None."""

    kind: str
    tokens: int
    heads: int
    kv_heads: int
    dim: int = 128
    value_dim: int | None = None

    @property
    def dims(self) -> tuple[int, int]:
        return self.dim, self.value_dim or self.dim

    def __str__(self) -> str:
        dims = f"D{self.dim}" if self.value_dim is None else f"D{self.dim}/{self.value_dim}"
        return f"{self.kind} {self.tokens // 1024}k {self.heads}/{self.kv_heads} {dims}"


ROWS = (
    Row(kind="full", tokens=8192, heads=32, kv_heads=32),
    Row(kind="full", tokens=32768, heads=32, kv_heads=8),
    Row(kind="causal", tokens=8192, heads=32, kv_heads=32),
    Row(kind="causal", tokens=32768, heads=32, kv_heads=8),
    Row(kind="causal", tokens=32768, heads=16, kv_heads=16, dim=64),
    Row(kind="causal", tokens=16384, heads=16, kv_heads=4, dim=256),
    Row(kind="causal", tokens=16384, heads=16, kv_heads=16, dim=192, value_dim=128),
    Row(kind="window 1024", tokens=32768, heads=32, kv_heads=8),
    Row(kind="softcap", tokens=16384, heads=32, kv_heads=8),
    Row(kind="documents ~4096", tokens=65536, heads=32, kv_heads=8),
    Row(kind="documents ~512", tokens=65536, heads=32, kv_heads=8),
    Row(kind="causal", tokens=2048, heads=16, kv_heads=16),
    Row(kind="sink 64 + window 2048", tokens=32768, heads=32, kv_heads=8),
    Row(kind="prefix 5000", tokens=32768, heads=32, kv_heads=8),
    Row(kind="custom mask", tokens=32768, heads=32, kv_heads=8),
)


def document_lengths(tokens: int, mean: int) -> list[int]:
    """Exponentially distributed lengths with mean `mean` and sum `tokens`; seed 0."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = 1 + int(-mean * math.log(1 - float(torch.rand((), generator=generator))))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A row's mask, in the terms of every peer.

    Attributes:
        mask: For longspan and FlexAttention.
        intervals: For cudnn.flex_attention: endpoints of the visible KV ranges [0, F0) ∪ [F1, F2) … of every query [n, S]; None if the
            mask has no such form.
        score_mod: Of longspan and FlexAttention.
        causal, window, lengths: For kernels with such options: a causal mask, the size of a sliding window, lengths of packed documents.
    """

    mask: ls.Mask
    intervals: Tensor | None
    score_mod: Callable[..., Tensor] | None = None
    causal: bool = False
    window: int | None = None
    lengths: list[int] | None = None


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(score / SOFTCAP)


def problem_of(row: Row) -> Problem:
    """The problem of a row."""
    i = torch.arange(row.tokens, dtype=torch.int32)
    zero = torch.zeros_like(i)
    if row.kind == "full":
        return Problem(mask=ls.full(), intervals=(zero + row.tokens)[None])
    if row.kind == "causal":
        return Problem(mask=ls.causal(), intervals=(i + 1)[None], causal=True)
    if row.kind == "softcap":
        return Problem(mask=ls.causal(), intervals=None, score_mod=softcap, causal=True)
    if row.kind == "window 1024":
        return Problem(mask=ls.sliding_window(1024), intervals=torch.stack([zero, (i - 1023).clamp(min=0), i + 1]), window=1024)
    if row.kind.startswith("documents"):
        lengths = document_lengths(row.tokens, int(row.kind.split("~")[1]))
        sizes = torch.tensor(lengths)
        starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes).int()
        mask = ls.causal() & ls.documents(lengths=lengths)
        return Problem(mask=mask, intervals=torch.stack([zero, starts, i + 1]), causal=True, lengths=lengths)
    if row.kind.startswith("sink"):
        mask = (ls.prefix(64) | ls.sliding_window(2048)) & ls.causal()
        edge = (i - 2047).clamp(min=0)
        return Problem(mask=mask, intervals=torch.stack([(i + 1).clamp(max=64), edge.clamp(min=64).minimum(i + 1), i + 1]))
    if row.kind.startswith("prefix"):
        return Problem(mask=ls.prefix(5000) | ls.causal(), intervals=(i + 1).clamp(min=5000)[None])
    if row.kind == "custom mask":  # a user's mask_mod: the local blocks of 512 tokens and every eighth block before them
        mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & ((q // 512 - kv // 512 < 2) | (kv // 512 % 8 == 0)))
        return Problem(mask=mask, intervals=None)
    raise ValueError(f"kind: expected one of {sorted({r.kind for r in ROWS})}, got {row.kind!r}")


def visible_pairs(row: Row, problem: Problem) -> float:
    """Number of visible (query, key) pairs."""
    table = problem.mask.block_table(row.tokens)
    if problem.intervals is not None:
        ends = problem.intervals.double()
        total = ends[0].sum()
        for n in range(1, len(ends), 2):
            total += (ends[n + 1] - ends[n]).clamp(min=0).sum()
        return float(total)
    if problem.causal:
        return row.tokens * (row.tokens + 1) / 2
    counts = table.counts()
    return (counts.full + counts.partial / 2) * 128 * 128  # partial tiles are on the causal diagonal, half visible


def reference(row: Row, problem: Problem, q: Tensor, k: Tensor, v: Tensor, queries: Tensor) -> Tensor:
    """Out of the queries at positions `queries` [n] in float64 [H, n, E]."""
    scores = torch.einsum("hqd,hkd->hqk", q[0, :, queries].double(), k[0].double().repeat_interleave(row.heads // row.kv_heads, 0))
    scores *= row.dim**-0.5
    i, j = queries[:, None], torch.arange(row.tokens, device="cuda")[None]
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    if problem.score_mod is not None:
        scores = problem.score_mod(scores, zero, zero, i, j)
    if problem.lengths is not None:
        ids = torch.repeat_interleave(torch.tensor(problem.lengths)).cuda()
        visible = (i >= j) & (ids[i] == ids[j])
    else:
        visible = torch.broadcast_to(problem.mask(zero, zero, i, j), (len(queries), row.tokens))
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    return torch.einsum("hqk,hke->hqe", weights, v[0].double().repeat_interleave(row.heads // row.kv_heads, 0))
