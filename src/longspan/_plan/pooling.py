"""Means of blocks of tokens, gathered over ranks: pooled keys and index keys, from which models choose blocks.

Legend: n tokens of a rank, m blocks of which it owns tokens, N blocks of the sequence, P most ranks that share one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longspan._comm.gather import all_gather_rows, reduce_scatter_rows
from longspan._comm.mesh import Mesh
from longspan._plan.layout import Layout
from longspan._torch_modes import default_modes


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPooling:
    """Which blocks each rank owns tokens of, and where their parts lie when the parts of all ranks are concatenated."""

    layout: Layout
    mesh: Mesh
    block: int

    @property
    def blocks(self) -> int:
        """N."""
        return -(-self.layout.length // self.block)

    @cached_property
    @default_modes()
    def by_rank(self) -> list[Tensor]:
        """The blocks of each rank, ascending [m]."""
        return [(self.layout.positions(rank) // self.block).unique() for rank in range(self.layout.ranks)]

    @cached_property
    def counts(self) -> list[int]:
        return [len(blocks) for blocks in self.by_rank]

    @cached_property
    @default_modes()
    def local_block(self) -> Tensor:
        """The place of each local token's block among this rank's blocks [n]."""
        rank = self.mesh.rank
        return torch.searchsorted(self.by_rank[rank], self.layout.positions(rank) // self.block)

    @cached_property
    @default_modes()
    def parts(self) -> Tensor:
        """The rows of the gathered parts of each block [N, P], in the order of ranks; the number of rows where there are fewer."""
        block = torch.cat(self.by_rank)
        order = block.argsort(stable=True)
        count = torch.bincount(block, minlength=self.blocks)
        place = torch.arange(len(block)) - (count.cumsum(0) - count)[block[order]]
        parts = torch.full((self.blocks, int(count.max())), len(block))
        parts[block[order], place] = order
        return parts

    @cached_property
    @default_modes()
    def tokens(self) -> Tensor:
        """Tokens of each block [N]."""
        return (self.layout.length - torch.arange(self.blocks) * self.block).clamp(max=self.block)


def gather_pooled(x: Tensor, dim: int, pooling: BlockPooling) -> Tensor:
    """Means of blocks of x along `dim`, in the order of the sequence, the same bits on every rank. Differentiable.

    Sums are float32 (float64 for float64) and are sent as such; the result has the dtype of x.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.movedim(dim, 0).to(wide)
    local = rows.new_zeros(pooling.counts[pooling.mesh.rank], *rows.shape[1:])
    local = local.index_add(0, pooling.local_block.to(x.device), rows)
    what = f"gather_pooled along dim {dim} of {x.ndim}"
    gathered: Tensor = _GatherParts.apply(local, pooling, what)  # type: ignore[no-untyped-call]
    padded = torch.cat([gathered, gathered.new_zeros(1, *gathered.shape[1:])])
    total = padded[pooling.parts.to(x.device)].sum(1)
    tokens = pooling.tokens.to(device=x.device, dtype=wide).view(-1, *[1] * (total.ndim - 1))
    return (total / tokens).to(x.dtype).movedim(0, dim)


class _GatherParts(torch.autograd.Function):
    """Every rank's block sums, rank by rank. Backward: each rank's rows of the gradient, summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pooling: BlockPooling, what: str) -> Tensor:
        ctx.pooling, ctx.what = pooling, what
        ctx.fields = {"layout": pooling.layout.digest[:12], "block": str(pooling.block)}
        return all_gather_rows(pooling.mesh, x.contiguous(), pooling.counts, what=what, fields=ctx.fields)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        what = f"{ctx.what}, backward pass"
        return reduce_scatter_rows(ctx.pooling.mesh, grad.contiguous(), ctx.pooling.counts, what=what, fields=ctx.fields), None, None
