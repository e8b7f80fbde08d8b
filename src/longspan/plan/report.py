"""What a plan costs, without running it: balance, bytes, memory, predicted time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.plan.cost import Cluster, Shape, overlapped, transposed
from longspan.plan.plan import PlanData


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """Per rank of the ring axis where not said otherwise. Bytes are of bfloat16 keys and values for the sizes the plan knows (1 where not).

    tiles:      tiles computed by each rank [R], over all heads and batch rows of the table.
    received:   tokens of keys received in each stage by each rank [stages, R].
    balance:    the busiest rank's tiles over the mean.
    share:      keys received, mean over ranks, as a share of what an all-gather brings.
    in_flight:  tokens of keys in buffers at once, at most: the step being computed and the one being fetched.
    """

    plan: str
    strategy: str
    layout: str
    ranks: int
    degree: int
    tokens: tuple[int, ...]
    tiles: Tensor
    received: Tensor
    steps: int
    in_flight: int
    shape: Shape
    cluster: Cluster

    @property
    def balance(self) -> float:
        mean = float(self.tiles.double().mean())
        return float(self.tiles.max()) / mean if mean else 1.0

    @property
    def share(self) -> float:
        every = sum(self.tokens) * (len(self.tiles) - 1)
        return float(self.received.sum()) / every if every else 0.0

    @property
    def bytes_received(self) -> Tensor:
        """Bytes of keys and values in each stage for each rank, forward [stages, R]."""
        return self.received * self._bytes_per_token

    @property
    def _bytes_per_token(self) -> int:
        """Of the key heads that one rank holds after the Ulysses transpose."""
        return self.shape.kv_bytes // min(self.degree, self.shape.kv_heads)

    @property
    def memory(self) -> int:
        """Bytes of buffers in flight, at most, on one rank, forward."""
        return self.in_flight * self._bytes_per_token

    @property
    def seconds(self) -> float:
        """Predicted time of forward and backward on the busiest rank."""
        pairs = float(self.tiles.max()) * 128 * 128 / (self.degree * self.shape.heads * self.shape.batch)
        if not len(self.received):
            return transposed(pairs=pairs, local=max(self.tokens), degree=self.ranks, shape=self.shape, cluster=self.cluster)
        moved = float(self.received.sum(0).max())
        return overlapped(pairs=pairs, received=moved, stages=self.steps, shape=self.shape, cluster=self.cluster)

    def __str__(self) -> str:
        moved = self.bytes_received.sum(0).double()
        lines = [
            self.plan,
            f"  balance      busiest rank {self.balance:.3f} × the mean ({int(self.tiles.max())} of {int(self.tiles.sum())} tiles)",
            f"  tokens       {min(self.tokens)} to {max(self.tokens)} per rank",
            f"  received     {float(moved.mean()) / 2**20:.2f} MiB per rank and forward pass, at most {float(moved.max()) / 2**20:.2f}; "
            f"{100 * self.share:.2f} % of an all-gather",
            f"  stages       {len(self.received)}, computed in {self.steps + 1} steps; at most {self.in_flight} tokens in flight "
            f"({self.memory / 2**20:.2f} MiB)",
            f"  predicted    {1e3 * self.seconds:.2f} ms forward and backward "
            f"({self.cluster.flops / 1e12:.0f} TFLOP/s, {self.cluster.bandwidth / 1e9:.0f} GB/s)",
        ]
        return "\n".join(lines)


def report(data: PlanData, cluster: Cluster | None = None) -> Report:
    """A plan's report, from its tables."""
    ranks = data.inner[0].ranks
    tiles = torch.zeros(ranks, dtype=torch.int64)
    for row in range(data.rows):
        table = data.table((data.block, data.block), row)
        side = data.side(0, data.block, row)
        per_tile = table.tiles_per_row.view(-1, table.q_tiles).sum(0)
        scale = (data.heads or 1) // table.heads * ((data.batch or 1) // table.batch if data.rows == 1 else 1)
        tiles.index_add_(0, side.owner, per_tile * scale)
    received = data.schedule.received(ranks)
    per_step = [int(received[s.start : s.stop].sum(0).max()) for s in data.schedule.steps]
    heads = data.heads or 1
    shape = Shape(batch=data.batch or 1, heads=heads, kv_heads=data.kv_heads or heads, head_dim=data.head_dim or 128)
    return Report(
        plan=f"{data.mask.text}, {data.q_len} tokens over {data.mesh.size} ranks: {data.strategy}, layout {data.layout}",
        strategy=data.strategy,
        layout=data.layout,
        ranks=data.mesh.size,
        degree=data.degree,
        tokens=tuple(data.layouts[0].local_len(r) for r in range(data.mesh.size)),
        tiles=tiles,
        received=received,
        steps=len(data.schedule.steps),
        in_flight=max([a + b for a, b in zip([0, *per_step], [*per_step, 0], strict=True)]),
        shape=shape,
        cluster=cluster or Cluster(),
    )
