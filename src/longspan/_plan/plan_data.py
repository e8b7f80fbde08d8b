"""The contents of a plan: who owns which tokens and what moves when, for one mask over one mesh. A value: immutable and picklable.

A plan knows the mesh's shape, this rank's coordinate in it and the names of its groups; it holds no communicator. It can be made where no
process group exists, such as in a data-loader worker. Nothing that depends on a device or a kernel is part of it: the engine derives that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from longspan._comm.mesh import Mesh
from longspan._masks.block_table import BLOCK_SIZE, BlockTable
from longspan._masks.classify import TableShape, classify
from longspan._masks.program import Program
from longspan._plan.digest import digest_of
from longspan._plan.layout import Layout
from longspan._plan.schedule import Schedule
from longspan._plan.tile_grid import TileGrid


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedMask:
    """A mask as a plan holds it: its program, and copies of its captured tensors on the host. `program` is None for full attention."""

    text: str
    program: Program | None
    captured: tuple[Tensor, ...] = ()

    @property
    def per_batch(self) -> bool:
        """Whether the mask depends on the batch row."""
        return self.program is not None and self.program.uses_batch

    @property
    def per_head(self) -> bool:
        """Whether the mask depends on the head."""
        return self.program is not None and self.program.uses_head


@dataclass(frozen=True, kw_only=True, eq=False)
class TiledRow:
    """One batch row (all of them, where they are laid out alike) in tiles: grids of queries and of KV, and the block table over them."""

    queries: TileGrid
    kv: TileGrid
    table: BlockTable


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskTiling:
    """A mask over laid-out tokens, from which block tables of any tile size follow.

    Attributes:
        mask: The mask.
        layouts: Layouts of queries and of KV over the KV axis.
        batch, heads: Sizes of the calls to come, 1 where unknown.
    """

    mask: PlannedMask
    layouts: tuple[Layout, Layout]
    batch: int
    heads: int

    @property
    def batch_layouts(self) -> int:
        """Number of batch rows that are laid out differently; 1 where all are laid out alike."""
        return max(len(layout.rows) for layout in self.layouts)

    def grids(self, block: tuple[int, int], row: int) -> tuple[TileGrid, TileGrid]:
        """The grids of queries and of KV of a batch row; one object where both are the same."""
        queries = TileGrid.of(self.layouts[0], block[0], batch_row=row)
        if self.layouts[0] is self.layouts[1] and block[0] == block[1]:
            return queries, queries
        return queries, TileGrid.of(self.layouts[1], block[1], batch_row=row)

    def row(self, block: tuple[int, int], row: int) -> TiledRow:
        """A batch row in tiles of `block` (queries, KV) tokens."""
        queries, kv = self.grids(block, row)
        shape = TableShape(
            q_len=self.layouts[0].length,
            kv_len=self.layouts[1].length,
            block=block,
            batch=1 if self.batch_layouts > 1 else self.batch,
            heads=self.heads,
            first_batch=row,
            edges=(queries.edges, kv.edges),
        )
        table = classify(self.mask.program, self.mask.captured, shape)
        return TiledRow(queries=queries, kv=kv, table=table)

    def all_rows(self, block: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE)) -> tuple[TiledRow, ...]:
        """Every batch row that is laid out differently, in tiles."""
        return tuple(self.row(block, row) for row in range(self.batch_layouts))


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanData:
    """All that a plan says. Sizes that were not given are None and not checked.

    Heads and tokens are transposed over the mesh axis `head_axis`. Afterwards each rank along the mesh axis `kv_axis` holds the tokens of a
    whole Ulysses group and exchanges KV by the schedule. Either axis may be None.

    Attributes:
        layouts: Layouts of queries and of KV over all ranks of the mesh.
        tiling: The mask over the layouts of the KV axis, that is after the Ulysses transpose.
        tiles: `tiling` in tiles of BLOCK_SIZE tokens, one entry per batch row that is laid out differently.
        schedule: The KV moves of the forward pass.
        backward_schedule: The KV moves of the backward pass: those tokens of `schedule` that their receiver reads. Partial gradients move
            in reverse, from receiver to source. The same object as `schedule` where nothing is left out.
        grad_reduce_dtype: The dtype in which partial gradients are sent, if one was given.
    """

    mask: PlannedMask
    q_len: int
    kv_len: int
    mesh: Mesh
    layouts: tuple[Layout, Layout]
    tiling: MaskTiling
    tiles: tuple[TiledRow, ...]
    schedule: Schedule
    backward_schedule: Schedule
    head_axis: int | None = None
    kv_axis: int | None = None
    layout: str
    strategy: str
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    grad_reduce_dtype: torch.dtype | None = None

    @property
    def degree(self) -> int:
        """Number of ranks that share the heads of one attention."""
        return 1 if self.head_axis is None else self.mesh.axes[self.head_axis].size

    @property
    def batch_layouts(self) -> int:
        """Number of batch rows that are laid out differently; 1 where all are laid out alike."""
        return self.tiling.batch_layouts

    @property
    def inner(self) -> tuple[Layout, Layout]:
        """Layouts of queries and of KV over the KV axis."""
        return self.tiling.layouts

    @cached_property
    def rank_tiles(self) -> TiledRow:
        """The first batch row in tiles of BLOCK_SIZE, each tile owned by a rank of the mesh: `tiles[0]` without a Ulysses transpose."""
        if self.degree == 1 and len(self.mesh.axes) == 1:
            return self.tiles[0]
        return replace(self.tiling, layouts=self.layouts).row((BLOCK_SIZE, BLOCK_SIZE), 0)

    @property
    def groups(self) -> Tensor:
        """The mesh's ranks [KV axis, degree]: row i is the Ulysses group at coordinate i of the KV axis."""
        return ulysses_groups(self.mesh, self.head_axis)

    @property
    def kv_coordinates(self) -> Tensor:
        """The KV-axis coordinate of each rank of the mesh [N]."""
        groups = self.groups
        return torch.empty(self.mesh.size, dtype=torch.int64).index_copy_(
            0, groups.reshape(-1), torch.arange(len(groups)).repeat_interleave(groups.shape[1])
        )

    @property
    def tokens(self) -> Tensor:
        """Tokens of queries and of KV that each rank of the mesh owns, per batch row [2, N]."""
        return torch.tensor([[layout.local_len(r) for r in range(self.mesh.size)] for layout in self.layouts])

    @property
    def lengths(self) -> str:
        """The lengths in words: "4096 tokens", or "256 × 4096 tokens" where queries and KV differ."""
        return f"{self.q_len} tokens" if self.q_len == self.kv_len else f"{self.q_len} × {self.kv_len} tokens"

    def with_joined(self, joined: bool) -> PlanData:
        """The same plan with local KV computed together with the first KV that arrives, or apart from it."""
        if joined == self.schedule.joined:
            return self
        schedule = replace(self.schedule, joined=joined)
        backward_schedule = schedule if self.backward_schedule is self.schedule else replace(self.backward_schedule, joined=joined)
        return replace(self, schedule=schedule, backward_schedule=backward_schedule)

    @cached_property
    def digest(self) -> str:
        """The values that ranks compare: everything but this rank's coordinate."""
        m = self.mask
        sizes = (self.q_len, self.kv_len, self.batch, self.heads, self.kv_heads, self.head_dim, BLOCK_SIZE, self.grad_reduce_dtype)
        texts = [
            str(sizes),
            str(self.mesh.axes),
            str((self.head_axis, self.kv_axis)),
            m.program.key if m.program else "",
            self.schedule.digest,
        ]
        return digest_of([*texts, *(layout.digest for layout in self.layouts), *m.captured])


def inner_layout(layout: Layout, mesh: Mesh, head_axis: int | None) -> Layout:
    """The layout over the KV axis: each Ulysses group as one rank."""
    if head_axis is None:
        return layout
    return layout.merged(ulysses_groups(mesh, head_axis).tolist())


def ulysses_groups(mesh: Mesh, head_axis: int | None) -> Tensor:
    """Ranks of the mesh by Ulysses group [groups, members]; groups of one where no axis shares heads."""
    if head_axis is None:
        return torch.arange(mesh.size)[:, None]
    sizes = [axis.size for axis in mesh.axes]
    return torch.arange(mesh.size).view(sizes).movedim(head_axis, -1).reshape(-1, sizes[head_axis])
