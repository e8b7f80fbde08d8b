"""The cost of keys chosen at run time, predicted before any choice exists (`longspan._engine.selected_mesh`).

Each tile of BLOCK_SIZE queries is assumed to choose, independently and uniformly, the share `density` of the KV tiles that the plan's mask
lets it see. A rank receives a KV tile once if any of its queries chose it: with probability 1 − (1 − density)^n for n query tiles that may.
Choices that resemble each other move less.

Legend: N ranks, T KV tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longspan._cost.clusters import cluster as cluster_of
from longspan._cost.pair_counts import balance_of
from longspan._cost.plan_workload import computed_tiles, shape_of
from longspan._cost.predict import timeline
from longspan._cost.rates import Cluster
from longspan._cost.timeline import Conditions, Timeline
from longspan._cost.workload import Placement, Workload
from longspan._masks.block_table import FULL, PARTIAL
from longspan._plan.plan_data import PlanData


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectedReport:
    """Predictions of attention over chosen keys for each of the mesh's N ranks.

    Bytes are of bfloat16 tensors of the sizes that the plan knows; unknown sizes count as 1, the head dim as 128.

    Attributes:
        plan: The plan in words.
        density: Share of the visible KV tiles that a query tile chooses.
        moved: Expected KV tokens of one batch row and KV head that each rank (row) sends to each rank (column) [N, N].
        tiles: Expected tiles that each rank computes, over heads and batch rows [N], float64.
        allgather_tokens: KV tokens that all ranks together would receive in an all-gather.
        kv_token_bytes: Bytes of K and V of one token; `grad_token_bytes`: of their gradients.
        cluster: The devices that were assumed.
        timeline: When each rank computes and waits.
    """

    plan: str
    density: float
    moved: Tensor
    tiles: Tensor
    allgather_tokens: int
    kv_token_bytes: int
    grad_token_bytes: int
    cluster: Cluster
    timeline: Timeline

    @property
    def balance(self) -> float:
        """Tiles of the busiest rank over the mean."""
        return balance_of(self.tiles)

    @property
    def share(self) -> float:
        """KV tokens received, as a share of an all-gather."""
        return float(self.moved.sum()) / self.allgather_tokens if self.allgather_tokens else 0.0

    @property
    def bytes_received(self) -> Tensor:
        """Expected bytes that each rank receives in a forward pass [N]."""
        return self.moved.sum(0) * self.kv_token_bytes

    @property
    def bytes_received_backward(self) -> Tensor:
        """Expected bytes of a backward pass [N]: KV again, and the returned gradients of KV that the rank has sent."""
        return self.bytes_received + self.moved.sum(1) * self.grad_token_bytes

    @property
    def seconds(self) -> float:
        """Predicted seconds of forward and backward on the slowest rank."""
        return self.timeline.seconds

    def __str__(self) -> str:
        received, forward, backward = self.bytes_received, self.timeline.forward, self.timeline.backward
        return "\n".join([
            f"{self.plan}, {100 * self.density:g} % of the visible keys chosen at run time",
            f"  balance      busiest rank {self.balance:.3f} × the mean",
            f"  received     {float(received.mean()) / 2**20:.2f} MiB per rank and forward pass, at most "
            f"{float(received.max()) / 2**20:.2f}; {100 * self.share:.2f} % of an all-gather of KV",
            f"  predicted    {1e3 * self.seconds:.2f} ms: forward {1e3 * forward.seconds:.2f}, backward {1e3 * backward.seconds:.2f} "
            f"({self.cluster.name}: {self.cluster.kernel.name})",
        ])  # fmt: skip


def selected_report(
    data: PlanData, density: float, cluster: Cluster | str | Path | None = None, conditions: Conditions | None = None
) -> SelectedReport:  # fmt: skip
    """The report of choices of one density, by the plan's layout and mask. The plan's schedule is not used."""
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 <= density <= 1:
        raise ValueError(
            f"plan.report: density must be a number from 0 to 1, the share of visible keys that queries choose, got {density!r}"
        )
    if data.batch_layouts > 1:
        raise ValueError("plan.report: density= needs one layout for all batch rows, got one per batch row; give another layout=")
    profile, shape, ranks = cluster_of(cluster), shape_of(data), data.mesh.size
    tiles = data.rank_tiles
    table, owner = tiles.table, tiles.kv.owner
    kinds = {kind: computed_tiles(table, kind, tiles.queries.owner, range(ranks)).double() for kind in (FULL, PARTIAL)}  # [N, T]
    copies = table.batch * table.heads
    readers = (kinds[FULL] + kinds[PARTIAL]) / copies
    received = (1 - (1 - density) ** readers) * tiles.kv.count
    received[owner, torch.arange(len(owner))] = 0.0
    moved = torch.zeros(ranks, ranks, dtype=torch.float64).index_add_(0, owner, received.T)
    local = owner == torch.arange(ranks)[:, None]
    repeats = density * shape.heads * shape.batch / copies
    full, partial = (
        torch.stack([(kinds[kind] * here).sum(1) for here in (local, ~local)], 1) * repeats for kind in (FULL, PARTIAL)
    )  # fmt: skip
    node = Placement(per_node=profile.gpus_per_node).node(torch.arange(ranks))
    crosses = node[:, None] != node
    by_step = [
        torch.nn.functional.pad(torch.stack([(moved * ~crosses).sum(dim), (moved * crosses).sum(dim)])[..., None], (1, 0)) for dim in (0, 1)
    ]  # [2, N, 2]
    tokens = data.tokens.double()
    work = Workload(
        ranks=ranks,
        degree=1,
        rank=torch.arange(ranks),
        query_tiles=torch.bincount(tiles.queries.owner, minlength=ranks).double() * shape.heads * shape.batch,
        full=full,
        partial=partial,
        received=by_step[0],
        sent=by_step[1],
        exchanges=torch.tensor([0.0, 1.0], dtype=torch.float64),
        local=tokens[0],
        local_kv=tokens[1],
        cross_node_share=0.0,
        shape=shape,
        scale=shape.batch,
        gathered=torch.nn.functional.pad(moved.sum(1)[:, None], (1, 0)),
    )
    return SelectedReport(
        plan=f"{data.mask.text}, {data.lengths} over {ranks} ranks, layout {data.layout}",
        density=float(density),
        moved=moved,
        tiles=(full + partial).sum(1),
        allgather_tokens=data.kv_len * (ranks - 1),
        kv_token_bytes=work.kv_token_bytes,
        grad_token_bytes=work.kv_token_bytes * shape.grad_element // shape.element,
        cluster=profile,
        timeline=timeline(work, profile, conditions),
    )
