"""Means of blocks of tokens, gathered over ranks: pooled keys and index keys, from which models choose blocks.

Legend: m blocks of which a rank owns tokens, N blocks of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longspan._comm.mesh import Mesh
from longspan._plan.layout import Layout
from longspan._plan.sharding import Gather
from longspan._torch_modes import default_modes


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGroups:
    """Groups of n rows.

    Attributes:
        group: The group of each row [n].
        members: The rows of each group, ascending [groups, P]; n where a group has fewer than P rows.
    """

    group: Tensor
    members: Tensor

    @classmethod
    def of(cls, group: Tensor, groups: int) -> RowGroups:
        """group: int64, on the host."""
        order, count = group.argsort(stable=True), torch.bincount(group, minlength=groups)
        place = torch.arange(len(group)) - (count.cumsum(0) - count)[group[order]]
        members = torch.full((groups, int(count.max()) if groups else 0), len(group))
        members[group[order], place] = order
        return cls(group=group, members=members)

    def sums(self, rows: Tensor) -> Tensor:
        """Sums of the groups' rows: [n, ...] → [groups, ...]. Differentiable. Deterministic, unlike `index_add` on CUDA."""
        return _GroupSums.apply(rows, self)  # type: ignore[no-untyped-call,no-any-return]


class _GroupSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: RowGroups) -> Tensor:
        ctx.groups = groups
        if bool((groups.members == len(rows)).any()):
            rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return rows[groups.members].sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad.index_select(0, ctx.groups.group.to(grad.device)), None


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPooling:
    """The blocks of which each rank owns tokens, and the places of their parts among the concatenated parts of all ranks."""

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
    def local(self) -> RowGroups:
        """The local tokens of each of this rank's blocks."""
        rank = self.mesh.rank
        group = torch.searchsorted(self.by_rank[rank], self.layout.positions(rank) // self.block)
        return RowGroups.of(group, self.counts[rank])

    @cached_property
    @default_modes()
    def gathered(self) -> RowGroups:
        """The parts of each block, in the order of ranks, among the parts of all ranks."""
        return RowGroups.of(torch.cat(self.by_rank), self.blocks)

    @cached_property
    @default_modes()
    def tokens(self) -> Tensor:
        """Tokens of each block [N]."""
        return (self.layout.length - torch.arange(self.blocks) * self.block).clamp(max=self.block)


def gather_pooled(x: Tensor, dim: int, pooling: BlockPooling) -> Tensor:
    """Means of blocks of x along `dim`, in the order of the sequence, the same bits on every rank.

    Sums are float32 (float64 for float64) and are sent as such; the result has the dtype of x. Differentiable any number of times.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.movedim(dim, 0).to(wide)
    fields = {"layout": pooling.layout.digest[:12], "block": str(pooling.block)}
    gather = Gather(mesh=pooling.mesh, counts=tuple(pooling.counts), what=f"gather_pooled along dim {dim} of {x.ndim}", fields=fields)
    total = pooling.gathered.sums(gather(pooling.local.sums(rows)))
    tokens = pooling.tokens.to(x.device).view(-1, *[1] * (total.ndim - 1))
    return (total / tokens).to(x.dtype).movedim(0, dim)
