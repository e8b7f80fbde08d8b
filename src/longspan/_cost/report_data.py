"""What a plan costs, without running it: balance, bytes, memory, predicted time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from longspan._cost.clusters import cluster as cluster_of
from longspan._cost.pair_counts import balance_of, counts
from longspan._cost.rates import Cluster, Shape
from longspan._cost.timeline import Conditions, Timeline, timeline
from longspan._cost.traffic import Traffic, traffic
from longspan._cost.workload import Workload, of_plan, shape_of
from longspan._masks.block_table import BLOCK_SIZE
from longspan._plan.plan_data import PlanData
from longspan._plan.schedule import Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanReport:
    """N ranks of the mesh, one by one. Bytes are of bfloat16 tensors of the sizes that the plan knows (1 where not, head dim 128).

    tokens, kv_tokens: queries and keys that each rank owns.
    tiles:      tiles computed by each rank [N], over its heads and all batch rows.
    pairs:      the (query, key) pairs in them that the mask allows [N], float64.
    received:   tokens of keys received along the ring axis in each stage by each rank [stages, N].
    balance:    the busiest rank's pairs over the mean: what `auto` and `explain` call the busiest.
    share:      keys received along the ring axis, as a share of what an all-gather there brings.
    in_flight:  tokens of keys in buffers at once, at most: the step being computed and the one being fetched; `in_flight_back`: backward.
    traffic:    the bytes of every exchange (`longspan._cost.traffic`); matrix: bytes that rank s (row) sends rank r (column) in a forward
                pass [N, N]. Both count Ulysses transposes.
    timeline:   when each rank computes and waits, by the cost model (`longspan._cost.timeline`).
    work:       what the model was asked, per rank of the ring axis.
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
    every: int  # tokens of keys that all ranks together receive in an all-gather along the ring axis
    steps: int
    in_flight: int
    in_flight_back: int
    shape: Shape
    cluster: Cluster
    work: Workload
    timeline: Timeline
    traffic: Traffic

    @property
    def balance(self) -> float:
        return balance_of(self.pairs)

    @property
    def share(self) -> float:
        return float(self.received.sum()) / self.every if self.every else 0.0

    @property
    def bytes_received(self) -> Tensor:
        """Bytes for each rank in each stage, forward [stages, N]; where heads are transposed, [1 + stages + 1, N]: before and after the
        stages one row for the transposes of q, k and v and of the output. `traffic.names` says what the rows are.
        """
        return self.traffic.forward

    @property
    def bytes_received_backward(self) -> Tensor:
        """The same rows of a backward pass: keys and values come again, and the gradients of those a rank has sent come home."""
        return self.traffic.backward

    @property
    def matrix(self) -> Tensor:
        return self.traffic.matrix

    @property
    def _bytes_per_token(self) -> int:
        """Of the key heads that one rank holds after the Ulysses transpose."""
        return self.work.key_bytes

    @cached_property
    def memory_parts(self) -> dict[str, int]:
        """Bytes on the rank that needs most: what is saved, what backward sums up, what is under way in the pass in which that is more."""
        found = [self._memory_of(q, kv) for q, kv in sorted(set(zip(self.tokens, self.kv_tokens, strict=True)))]
        return max(found, key=lambda parts: sum(parts.values()))

    def _memory_of(self, q: int, kv: int) -> dict[str, int]:
        """Of a rank that owns so many queries and keys."""
        shape = self.shape
        copies = max(1, self.degree // shape.kv_heads)
        again = self.in_flight_back * self._bytes_per_token
        flight = max(self.memory, again + again * shape.grad_element // shape.element)
        return {
            "q, k, v, out, lse": q * (2 * shape.q_bytes + 4 * shape.batch * shape.heads) + kv * shape.kv_bytes,
            "gradients, float32": (q * shape.q_bytes + kv * shape.kv_bytes * copies) * 4 // shape.element,
            "transposed copies": 0 if self.degree == 1 else q * 3 * shape.q_bytes + kv * shape.kv_bytes * copies,
            "keys and gradients in flight": flight,
        }

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
            f"{self._turned()}; {100 * self.share:.2f} % of an all-gather of keys",
            f"  stages       {len(self.received)}, computed in {self.steps} step{'s' if self.steps > 1 else ''}; at most {self.in_flight} "
            f"tokens in flight ({self.memory / 2**20:.2f} MiB)",
            f"  memory       {sum(self.memory_parts.values()) / 2**20:.2f} MiB per rank at most{self._too_much()}",
            f"  predicted    {1e3 * self.seconds:.2f} ms: forward {1e3 * forward.seconds:.2f}, backward {1e3 * backward.seconds:.2f}; "
            f"{1e3 * self.exposed:.2f} of it waiting for data",
            f"               {self.flops_per_device / 1e12:.0f} TFLOP/s per device ({self.cluster.name}: {self.cluster.kernel.name})",
        ]
        return "\n".join(lines)

    def _too_much(self) -> str:
        room = self.cluster.memory
        if sum(self.memory_parts.values()) <= room:
            return ""
        return f": more than the {room / 2**30:.1f} GiB of a device ({self.cluster.name})"

    def _tokens(self) -> str:
        q, kv = (f"{min(n)} to {max(n)}" for n in (self.tokens, self.kv_tokens))
        return q if self.tokens == self.kv_tokens else f"{q} queries, {kv} keys"

    def _turned(self) -> str:
        """What of that Ulysses transposes bring."""
        if self.degree == 1:
            return ""
        turned = self.bytes_received[[0, -1]].sum(0).double()
        return f", {float(turned.mean()) / 2**20:.2f} of it by transposes of heads"


def _in_flight(moves: Schedule, received: Tensor) -> int:
    """Tokens of a step and the next, at most. Steps for which nothing moves are none."""
    steps = [n for n in (int(received[s.start : s.stop].sum(0).max()) for s in moves.steps) if n]
    return max(a + b for a, b in zip([0, *steps], [*steps, 0], strict=True))


def report(data: PlanData, cluster: Cluster | str | Path | None = None, conditions: Conditions | None = None) -> PlanReport:
    """A plan's report, from its tables."""
    found = cluster_of(cluster)
    ring = data.inner[0].ranks
    work, shape, counted = of_plan(data, found.gpus_per_node), shape_of(data), counts(data)
    received = data.schedule.received(ring)
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
        received=received[:, data.ring_of],
        every=data.kv_len * data.rows * (ring - 1) * data.degree,
        steps=len(data.schedule.steps) + (not data.schedule.joined),
        in_flight=_in_flight(data.schedule, received),
        in_flight_back=_in_flight(data.returns, data.returns.received(ring)),
        shape=shape,
        cluster=found,
        work=work,
        timeline=timeline(work, found, conditions).at(data.ring_of),
        traffic=traffic(data, shape, work.key_bytes),
    )
