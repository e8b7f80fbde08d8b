"""The work of each rank, step by step: tiles to compute, KV to receive and to send.

Legend: R ranks of the KV axis (or some of them), K + 1 steps, T KV tiles. Step 0 is over local KV; it is empty where the schedule is
joined. Backward has one more step, at the end, where local KV is computed in two parts: before the KV that arrives and after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._comm.mesh import Mesh
from longspan._cost.rates import Shape
from longspan._plan.local_split import late_share

Peers = tuple[tuple[Tensor, Tensor], ...]  # (receivers, senders) of each step


class BackwardMoves(NamedTuple):
    """KV that backward receives again, and whose partial gradients it returns: fields as in `Workload`."""

    received: Tensor
    sent: Tensor
    gathered: Tensor | None
    exchanges: Tensor
    peers: Peers = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """The work of R ranks in K + 1 steps. Tensors are float64.

    Attributes:
        ranks: Ranks of the KV axis; `rank` [R] says which of them these are.
        degree: Ranks that share the heads.
        query_tiles: Query tiles times heads and batch rows that a rank computes for [R], or in each step [R, K + 1].
        full, partial: Tiles times heads and batch rows of each step [R, K + 1].
        received, sent: KV tokens of each step, from and to ranks of the same node and of other nodes [2, R, K + 1].
        exchanges: Exchanges that a step waits for [K + 1].
        local: Tokens (queries) of one batch row that a rank of the mesh owns, the most of a Ulysses group [R].
        cross_node_share: Share of a Ulysses transpose that crosses nodes.
        shape: Sizes that turn tokens into bytes.
        scale: Batch rows per token counted in `received` and `sent`.
        active_tiles: Query tiles that see any KV of a step [R, K + 1]; None: all of them, in every step that computes anything.
        gathered: Tokens of `sent` that are not contiguous and are packed first [R, K + 1]; None: none.
        merge_bytes: Bytes read and written besides the kernels' own [R, K + 1], in both passes; None: as the engine does it.
        peers: Receivers and senders of each step; () where only some ranks are looked at.
        local_kv: KV tokens of one batch row that a rank of the mesh owns [R]; None: as many as queries.
        joined: Local KV is computed together with the KV of step 1.
        halves: Full, partial and active tiles of the two parts of local KV in backward [3, R, 2]; None: estimated. If given, the last of
            the K + 1 columns stands for the second part and is empty.
        backward: Moves of backward; None: those of forward.
    """

    ranks: int
    degree: int
    rank: Tensor
    query_tiles: Tensor
    full: Tensor
    partial: Tensor
    received: Tensor
    sent: Tensor
    exchanges: Tensor
    local: Tensor
    cross_node_share: float
    shape: Shape
    scale: int = 1
    active_tiles: Tensor | None = None
    gathered: Tensor | None = None
    merge_bytes: Tensor | None = None
    peers: Peers = ()
    local_kv: Tensor | None = None
    joined: bool = False
    halves: Tensor | None = None
    backward: BackwardMoves | None = None

    @property
    def steps(self) -> int:
        """Number of steps, K + 1."""
        return self.full.shape[1]

    @property
    def exchange_steps(self) -> int:
        """Number of steps that wait for an all-to-all."""
        return int((self.exchanges > 0).sum())

    @property
    def kv_tokens(self) -> Tensor:
        """KV tokens of one batch row that a rank of the mesh owns [R]."""
        return self.local if self.local_kv is None else self.local_kv

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token as they move along the KV axis."""
        s = self.shape
        return 2 * self.scale * s.kv_heads_of(self.degree) * s.head_dim * s.element

    def with_backward_moves(self) -> Workload:
        """The same work with the moves of backward."""
        return self if self.backward is None else replace(self, **self.backward._asdict(), backward=None)

    def join(self) -> Workload:
        """The same work with local KV computed together with the KV of step 1, by all query tiles that see any of either."""
        if self.halves is not None:
            return self._with_columns(-1).join()
        full, partial = self.full.clone(), self.partial.clone()
        for tiles in (full, partial):
            tiles[:, 1] += tiles[:, 0]
            tiles[:, 0] = 0
        active = None if self.active_tiles is None else self.active_tiles.clone()
        if active is not None:
            active[:, 1] = active[:, :2].amax(1)
            active[:, 0] = 0
        return replace(self, full=full, partial=partial, active_tiles=active, joined=True)

    def split(self) -> Workload:
        """The same work as backward does it: the last step is over the second part of local KV. Unchanged where that is one part."""
        if self.joined or self.merge_bytes is not None or not self.exchange_steps:
            return self
        work = self if self.halves is not None else self._with_columns(1)
        full, partial = work.full.clone(), work.partial.clone()
        active = work.active_tiles
        if active is None:
            active = work.query_tiles if work.query_tiles.ndim == 2 else work.query_tiles[:, None].expand_as(full)
        active = active.clone()
        halves = self.halves
        if halves is None:
            # In proportion to bytes. Query tiles that see any local KV are assumed to see both parts.
            share = self.late_fraction[:, None]
            local = torch.cat([1 - share, share], 1)
            halves = torch.stack([full[:, :1] * local, partial[:, :1] * local, active[:, :1] * (local > 0)])
        for tiles, half in zip((full, partial, active), halves, strict=True):
            tiles[:, 0], tiles[:, -1] = half[:, 0], half[:, 1]
        return replace(work, full=full, partial=partial, active_tiles=active, halves=halves)

    @property
    def late_fraction(self) -> Tensor:
        """Share of the local work that backward computes last [R]; 0 where no received KV is computed."""
        moved = torch.maximum(self.received.sum(0), self.sent.sum(0))
        moving_steps = moved.sum(0).nonzero()[:, 0].tolist() or [0]
        first = moved[:, moving_steps[0]] * self.shape.element
        last = moved[:, moving_steps[-1]] * self.shape.grad_element
        computes = (self.full + self.partial)[:, 1:].sum(1) > 0
        shares = [late_share(a, b) if c else 0.0 for a, b, c in zip(first.tolist(), last.tolist(), computes.tolist(), strict=True)]
        return torch.tensor(shares, dtype=torch.float64)

    def _with_columns(self, more: int) -> Workload:
        """The same work with an empty step more at the end (1), or without that step (−1)."""

        def padded(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, more))

        def padded_if(x: Tensor | None) -> Tensor | None:
            return None if x is None else padded(x)

        def peers_of(peers: Peers) -> Peers:
            return peers if more < 0 or not peers else (*peers, peers[0])

        back, query_tiles = self.backward, self.query_tiles
        if query_tiles.ndim == 2:
            query_tiles = torch.cat([query_tiles, query_tiles[:, :1]], 1)[:, : self.steps + more]
        if back is not None:
            back = BackwardMoves(
                padded(back.received), padded(back.sent), padded_if(back.gathered), padded(back.exchanges), peers_of(back.peers)
            )
        return replace(
            self,
            query_tiles=query_tiles,
            full=padded(self.full),
            partial=padded(self.partial),
            received=padded(self.received),
            sent=padded(self.sent),
            exchanges=padded(self.exchanges),
            active_tiles=padded_if(self.active_tiles),
            gathered=padded_if(self.gathered),
            peers=peers_of(self.peers),
            halves=None,
            backward=back,
        )

    def with_halves(self, halves: Tensor) -> Workload:
        """The same work with the two parts of local KV in backward [3, R, 2], and the empty last step that they need."""
        return replace(self._with_columns(1), halves=halves)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where ranks are: rank j of the KV axis is device j · stride.

    Attributes:
        per_node: Devices per node.
        stride: Devices between neighbours of the KV axis.
        degree: Members of a Ulysses group.
        member_stride: Devices between neighbours of a Ulysses group.
    """

    per_node: int
    stride: int = 1
    degree: int = 1
    member_stride: int = 1

    @classmethod
    def of(cls, mesh: Mesh, head_axis: int | None, kv_axis: int | None, per_node: int) -> Placement:
        """The placement of a mesh whose devices are numbered in row-major order."""
        sizes = [axis.size for axis in mesh.axes]
        strides = [sizes[1], 1] if len(sizes) == 2 else [1]
        return cls(
            per_node=per_node,
            stride=1 if kv_axis is None else strides[kv_axis],
            degree=1 if head_axis is None else sizes[head_axis],
            member_stride=1 if head_axis is None else strides[head_axis],
        )

    def node(self, rank: Tensor) -> Tensor:
        """The node of each rank of the KV axis."""
        return rank * self.stride // self.per_node

    @property
    def cross_node_share(self) -> float:
        """The share of a Ulysses transpose's traffic that leaves the node, seen from the group's first device."""
        members = torch.arange(self.degree) * self.member_stride // self.per_node
        return float((members != members[0]).sum()) / max(1, self.degree - 1)
