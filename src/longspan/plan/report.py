"""What a plan costs, without running it: balance, bytes, memory, predicted time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan.plan.clusters import cluster as cluster_of
from longspan.plan.cost import Cluster, Shape
from longspan.plan.plan import PlanData
from longspan.plan.timeline import Conditions, Timeline, timeline
from longspan.plan.workload import Workload, of_plan, shape_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """Per rank of the ring axis where not said otherwise. Bytes are of bfloat16 keys and values for the sizes the plan knows (1 where not).

    tiles:      tiles computed by each rank [R], over all heads and batch rows of the table.
    received:   tokens of keys received in each stage by each rank [stages, R].
    balance:    the busiest rank's tiles over the mean.
    share:      keys received, mean over ranks, as a share of what an all-gather brings.
    in_flight:  tokens of keys in buffers at once, at most: the step being computed and the one being fetched.
    timeline:   when each rank computes and waits, by the cost model (`longspan.plan.timeline`).
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
    work: Workload
    timeline: Timeline
    matrix: Tensor  # bytes of keys and values that rank s (row) sends rank r (column) in a forward pass [R, R], along the ring axis

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
        return self.work.key_bytes

    @cached_property
    def memory_parts(self) -> dict[str, int]:
        """Bytes on the rank that needs most, during the backward pass: what is saved, what is summed up, what is under way."""
        shape, most = self.shape, max(self.tokens)
        saved = most * (2 * shape.q_bytes + shape.kv_bytes + 4 * shape.batch * shape.heads)
        sums = most * (2 * shape.q_bytes + shape.kv_bytes) * 4 // (2 * shape.element)
        turned = 0 if self.degree == 1 else most * (3 * shape.q_bytes + shape.kv_bytes * max(1, self.degree // shape.kv_heads))
        flight = self.memory + self.memory * shape.grad_element // shape.element
        return {"q, k, v, out, lse": saved, "gradients, float32": sums, "transposed copies": turned, "keys and gradients in flight": flight}

    @property
    def memory(self) -> int:
        """Bytes of buffers in flight, at most, on one rank, forward."""
        return self.in_flight * self._bytes_per_token

    @property
    def seconds(self) -> float:
        """Predicted time of forward and backward on the slowest rank."""
        return self.timeline.seconds

    @property
    def exposed(self) -> float:
        """Seconds of both passes in which the rank that waits longest waits for data."""
        return float((self.timeline.forward.exposed + self.timeline.backward.exposed).max())

    @property
    def flops_per_device(self) -> float:
        """Useful operations per second and device, forward and backward: what is predicted of the kernel's speed."""
        pairs = float((self.work.full + self.work.partial / 2).sum()) * 128 * 128 * self.work.degree
        return 3.5 * 4 * self.shape.head_dim * pairs / self.ranks / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        moved = self.bytes_received.sum(0).double()
        forward, backward = self.timeline.forward, self.timeline.backward
        lines = [
            self.plan,
            f"  balance      busiest rank {self.balance:.3f} × the mean ({int(self.tiles.max())} of {int(self.tiles.sum())} tiles)",
            f"  tokens       {min(self.tokens)} to {max(self.tokens)} per rank",
            f"  received     {float(moved.mean()) / 2**20:.2f} MiB per rank and forward pass, at most {float(moved.max()) / 2**20:.2f}; "
            f"{100 * self.share:.2f} % of an all-gather",
            f"  stages       {len(self.received)}, computed in {self.steps + 1} steps; at most {self.in_flight} tokens in flight "
            f"({self.memory / 2**20:.2f} MiB)",
            f"  memory       {sum(self.memory_parts.values()) / 2**20:.2f} MiB per rank at most",
            f"  predicted    {1e3 * self.seconds:.2f} ms: forward {1e3 * forward.seconds:.2f}, backward {1e3 * backward.seconds:.2f}; "
            f"{1e3 * self.exposed:.2f} of it waiting for data",
            f"               {self.flops_per_device / 1e12:.0f} TFLOP/s per device ({self.cluster.name}: {self.cluster.kernel.name})",
        ]
        return "\n".join(lines)


def report(data: PlanData, cluster: Cluster | str | None = None, conditions: Conditions | None = None) -> Report:
    """A plan's report, from its tables."""
    found = cluster_of(cluster)
    ranks = data.inner[0].ranks
    work = of_plan(data, found.gpus_per_node)
    received = data.schedule.received(ranks)
    per_step = [int(received[s.start : s.stop].sum(0).max()) for s in data.schedule.steps]
    return Report(
        plan=f"{data.mask.text}, {data.q_len} tokens over {data.mesh.size} ranks: {data.strategy}, layout {data.layout}",
        strategy=data.strategy,
        layout=data.layout,
        ranks=data.mesh.size,
        degree=data.degree,
        tokens=tuple(data.layouts[0].local_len(r) for r in range(data.mesh.size)),
        tiles=((work.full + work.partial).sum(1) * data.degree).round().long(),
        received=received,
        steps=len(data.schedule.steps),
        in_flight=max([a + b for a, b in zip([0, *per_step], [*per_step, 0], strict=True)]),
        shape=shape_of(data),
        cluster=found,
        work=work,
        timeline=timeline(work, found, conditions),
        matrix=_matrix(data, ranks) * work.key_bytes,
    )


def _matrix(data: PlanData, ranks: int) -> Tensor:
    """Tokens from each rank (row) to each (column)."""
    s = data.schedule
    return torch.zeros(ranks * ranks, dtype=torch.int64).index_add_(0, s.source * ranks + s.receiver, s.length).view(ranks, ranks)
