"""The cost of a plan, predicted without running it: balance, bytes, memory, time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from longspan._cost.clusters import cluster as cluster_of
from longspan._cost.pair_counts import balance_of, counts
from longspan._cost.plan_workload import of_plan, shape_of
from longspan._cost.predict import timeline
from longspan._cost.rates import Cluster, Shape
from longspan._cost.timeline import Conditions, Timeline
from longspan._cost.traffic import Traffic, traffic
from longspan._cost.workload import Workload
from longspan._masks.block_table import BLOCK_SIZE
from longspan._plan.plan_data import PlanData
from longspan._plan.schedule import Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanReport:
    """The predictions of a plan for each of the mesh's N ranks.

    Bytes are of bfloat16 tensors of the sizes that the plan knows; unknown sizes count as 1, the head dim as 128.

    Attributes:
        data: The plan's contents.
        plan: The plan in words.
        strategy, layout: Names.
        ranks, degree: Ranks of the mesh, and ranks that share the heads.
        tokens, kv_tokens: Queries and KV tokens that each rank owns.
        tiles: Tiles that each rank computes, over its heads and all batch rows [N], int64.
        pairs: (query, key) pairs in these tiles that the mask allows [N], float64.
        received: KV tokens that each rank receives along the KV axis in each stage [stages, N].
        allgather_tokens: KV tokens that all ranks together would receive in an all-gather along the KV axis.
        steps: Number of steps of a forward pass.
        in_flight, in_flight_backward: Largest number of KV tokens in buffers at once: of the step being computed and the one being fetched.
        shape, cluster: The sizes and the devices that were assumed.
        work: The workload per rank of the KV axis.
        timeline: When each rank computes and waits.
        traffic: The bytes of every all-to-all.
    """

    data: PlanData
    plan: str
    strategy: str
    layout: str
    ranks: int
    degree: int
    tokens: tuple[int, ...]
    kv_tokens: tuple[int, ...]
    tiles: Tensor
    pairs: Tensor
    received: Tensor
    allgather_tokens: int
    steps: int
    in_flight: int
    in_flight_backward: int
    shape: Shape
    cluster: Cluster
    work: Workload
    timeline: Timeline
    traffic: Traffic

    @property
    def balance(self) -> float:
        """Pairs of the busiest rank over the mean."""
        return balance_of(self.pairs)

    @property
    def share(self) -> float:
        """KV tokens received along the KV axis, as a share of an all-gather."""
        return float(self.received.sum()) / self.allgather_tokens if self.allgather_tokens else 0.0

    @property
    def bytes_received(self) -> Tensor:
        """Bytes that each rank receives in each stage of a forward pass [stages, N].

        With Ulysses [1 + stages + 1, N]: the first row is the transpose of q, k and v, the last that of the output. `traffic.names` names
        the rows.
        """
        return self.traffic.forward

    @property
    def bytes_received_backward(self) -> Tensor:
        """Bytes of a backward pass, in the rows of `bytes_received`: KV again, and the returned gradients of KV that a rank has sent."""
        return self.traffic.backward

    @property
    def matrix(self) -> Tensor:
        """Bytes that each rank (row) sends to each rank (column) in a forward pass [N, N]."""
        return self.traffic.matrix

    @cached_property
    def memory_parts(self) -> dict[str, int]:
        """Bytes on the rank that needs the most memory: saved tensors, gradients, and buffers of the pass that needs more."""
        sizes = sorted(set(zip(self.tokens, self.kv_tokens, strict=True)))
        return max((self._memory_of(q, kv) for q, kv in sizes), key=lambda parts: sum(parts.values()))

    def _memory_of(self, q: int, kv: int) -> dict[str, int]:
        """The parts on a rank that owns so many queries and KV tokens."""
        shape = self.shape
        copies = max(1, self.degree // shape.kv_heads)
        received_again = self.in_flight_backward * self.work.kv_token_bytes
        in_flight = max(self.memory, received_again + received_again * shape.grad_element // shape.element)
        return {
            "q, k, v, out, lse": q * (2 * shape.q_bytes + 4 * shape.batch * shape.heads) + kv * shape.kv_bytes,
            "gradients, float32": (q * shape.q_bytes + kv * shape.kv_bytes * copies) * 4 // shape.element,
            "transposed copies": 0 if self.degree == 1 else q * 3 * shape.q_bytes + kv * shape.kv_bytes * copies,
            "KV and gradients in flight": in_flight,
        }

    @property
    def memory(self) -> int:
        """Largest number of bytes in buffers of received KV, on one rank, in forward."""
        return self.in_flight * self.work.kv_token_bytes

    @property
    def seconds(self) -> float:
        """Predicted seconds of forward and backward on the slowest rank."""
        return self.timeline.seconds

    @property
    def exposed(self) -> float:
        """Seconds, of both passes, that the rank which waits longest waits for data."""
        return float((self.timeline.forward.exposed + self.timeline.backward.exposed).max())

    @property
    def flops_per_device(self) -> float:
        """Useful operations per second and device, forward and backward."""
        pairs = float((self.work.full + self.work.partial / 2).sum()) * BLOCK_SIZE**2 * self.work.degree
        return 3.5 * 4 * self.shape.head_dim * pairs / self.ranks / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        moved = self.bytes_received.sum(0).double()
        forward, backward = self.timeline.forward, self.timeline.backward
        lines = [
            self.plan,
            f"  balance      busiest rank {self.balance:.3f} × the mean ({float(self.pairs.max()):.4g} of {float(self.pairs.sum()):.4g} "
            f"pairs of a query and a key, in {int(self.tiles[self.pairs.argmax()])} of {int(self.tiles.sum())} tiles)",
            f"  tokens       {self._tokens()} per rank",
            f"  received     {float(moved.mean()) / 2**20:.2f} MiB per rank and forward pass, at most {float(moved.max()) / 2**20:.2f}"
            f"{self._transposed()}; {100 * self.share:.2f} % of an all-gather of KV",
            f"  stages       {len(self.received)}, computed in {self.steps} step{'s' if self.steps > 1 else ''}; at most {self.in_flight} "
            f"tokens in flight ({self.memory / 2**20:.2f} MiB)",
            f"  memory       {sum(self.memory_parts.values()) / 2**20:.2f} MiB per rank at most{self._over_memory()}",
            f"  predicted    {1e3 * self.seconds:.2f} ms: forward {1e3 * forward.seconds:.2f}, backward {1e3 * backward.seconds:.2f}; "
            f"{1e3 * self.exposed:.2f} of it waiting for data",
            f"               {self.flops_per_device / 1e12:.0f} TFLOP/s per device ({self.cluster.name}: {self.cluster.kernel.name})",
        ]
        return "\n".join(lines)

    def _over_memory(self) -> str:
        room = self.cluster.memory
        if sum(self.memory_parts.values()) <= room:
            return ""
        return f": more than the {room / 2**30:.1f} GiB of a device ({self.cluster.name})"

    def _tokens(self) -> str:
        q, kv = (f"{min(n)} to {max(n)}" for n in (self.tokens, self.kv_tokens))
        return q if self.tokens == self.kv_tokens else f"{q} queries, {kv} keys"

    def _transposed(self) -> str:
        """The part of the received bytes that Ulysses transposes bring, in words."""
        if self.degree == 1:
            return ""
        transposed = self.bytes_received[[0, -1]].sum(0).double()
        return f", {float(transposed.mean()) / 2**20:.2f} of it by transposes of heads"


def _in_flight(moves: Schedule, received: Tensor) -> int:
    """Largest number of tokens of two consecutive steps. Steps without moves do not count."""
    steps = [n for n in (int(received[s.start : s.stop].sum(0).max()) for s in moves.steps) if n]
    return max(a + b for a, b in zip([0, *steps], [*steps, 0], strict=True))


def report(data: PlanData, cluster: Cluster | str | Path | None = None, conditions: Conditions | None = None) -> PlanReport:
    """The report of a plan on a cluster (h200 by default), from its block tables and its schedule."""
    profile = cluster_of(cluster)
    kv_axis_size = data.inner[0].ranks
    work, shape, counted = of_plan(data, profile.gpus_per_node), shape_of(data), counts(data)
    received = data.schedule.received(kv_axis_size)
    tokens = data.tokens.tolist()
    return PlanReport(
        data=data,
        plan=f"{data.mask.text}, {data.lengths} over {data.mesh.size} ranks: {data.strategy}, layout {data.layout}",
        strategy=data.strategy,
        layout=data.layout,
        ranks=data.mesh.size,
        degree=data.degree,
        tokens=tuple(tokens[0]),
        kv_tokens=tuple(tokens[1]),
        tiles=counted.tiles.round().long(),
        pairs=counted.pairs,
        received=received[:, data.kv_coordinates],
        allgather_tokens=data.kv_len * data.batch_layouts * (kv_axis_size - 1) * data.degree,
        steps=len(data.schedule.steps) + (not data.schedule.joined),
        in_flight=_in_flight(data.schedule, received),
        in_flight_backward=_in_flight(data.backward_schedule, data.backward_schedule.received(kv_axis_size)),
        shape=shape,
        cluster=profile,
        work=work,
        timeline=timeline(work, profile, conditions).select(data.kv_coordinates),
        traffic=traffic(data, shape, work.kv_token_bytes),
    )
