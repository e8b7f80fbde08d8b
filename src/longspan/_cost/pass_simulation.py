"""One pass of a workload on a cluster, step by step. Legend as in `longspan._cost.workload`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from longspan._cost.rates import Cluster
from longspan._cost.timeline import Conditions, PassTimes
from longspan._cost.workload import Workload
from longspan._masks.block_table import BLOCK_SIZE

WIDE = 4  # bytes of an element of running results and gradients


class PassSimulation:
    """Simulates forward or backward of one workload."""

    def __init__(self, work: Workload, cluster: Cluster, conditions: Conditions) -> None:
        self.work, self.cluster = work, cluster
        self.compute_factor = _per_rank(work, conditions.stragglers)
        self.link_factor = _per_rank(work, conditions.slow_links)
        self.zero = torch.zeros(len(work.rank), dtype=torch.float64)
        self.transfer_seconds = self._exchange_seconds(work.kv_token_bytes)

    def run(self, *, backward: bool) -> PassTimes:
        """The pass."""
        work = self.work
        seconds = self._compute_seconds(backward)
        transfer, grad_return = self.transfer_seconds, self.transfer_seconds
        if backward:
            grad_bytes = work.kv_token_bytes * work.shape.grad_element / work.shape.element
            grad_return = self._exchange_seconds(grad_bytes)
        before, after = self._transposes(backward)
        compute, arrival, returned = torch.zeros(3, 2, *seconds.shape, dtype=torch.float64)
        stream_free = compute_done = before  # exchanges follow each other in the order in which they are started
        for i, previous, following in self._walk():
            begin = torch.maximum(compute_done, arrival[1, :, i])
            packs_first = work.joined and i == 0  # the all-to-all waits until local KV is packed
            if following is not None and float(work.exchanges[following]):
                ready = begin + seconds[:, i] if packs_first else compute_done
                arrival[0, :, following] = self._start(torch.maximum(stream_free, ready), following)
                arrival[1, :, following] = stream_free = arrival[0, :, following] + transfer[:, following]
            hidden = transfer[:, following] if following is not None and not packs_first else self.zero
            if backward and previous:
                hidden = hidden + grad_return[:, previous]
            compute[0, :, i] = begin
            compute[1, :, i] = compute_done = begin + seconds[:, i] + self.cluster.contention * torch.minimum(hidden, seconds[:, i])
            for skipped in range(i + 1, work.steps if following is None else following):
                compute[:, :, skipped] = compute_done
            if backward and i and float(work.exchanges[i]):
                returned[0, :, i] = self._start(torch.maximum(stream_free, compute_done), i)
                returned[1, :, i] = stream_free = returned[0, :, i] + grad_return[:, i]
        # The gradients that return last are added and converted on arrival; otherwise that is a part of the last step.
        convert = self._convert_bytes() / self.cluster.hbm * self.compute_factor if work.halves is not None else self.zero
        end = torch.maximum(compute_done, stream_free + convert) if backward else compute_done
        total = end + after
        return PassTimes(
            compute=(compute[0], compute[1]),
            transfer=(arrival[0], arrival[1]),
            grad_return=(returned[0], returned[1]) if backward else None,
            before=before,
            after=total - compute_done,
            total=total,
        )

    def _walk(self) -> Iterator[tuple[int, int, int | None]]:
        """(step, the step before or 0, the step after or None), without steps that neither move nor compute anything."""
        work = self.work
        used = (work.exchanges > 0) | ((work.full + work.partial).sum(0) > 0)
        steps = [0, *(i for i in range(1, work.steps) if bool(used[i]))]
        yield from zip(steps, [0, *steps], [*steps[1:], None], strict=False)

    def _start(self, ready: Tensor, step: int) -> Tensor:
        """When a step's all-to-all starts [R]: when all peers of a rank are ready, or all ranks where peers are not known."""
        if not self.work.peers:
            return ready.max().expand_as(ready)
        receiver, sender = self.work.peers[step]
        start = ready.scatter_reduce(0, receiver, ready[sender], "amax")
        return start.scatter_reduce_(0, sender, ready[receiver], "amax")

    # -------------------------------------------------------------------------------------------------------------- computation

    def _compute_seconds(self, backward: bool) -> Tensor:
        """Seconds of each step [R, K + 1]: the kernel, and the bytes that the engine reads and writes besides."""
        work, kernel = self.work, self.cluster.kernel
        every = work.query_tiles if work.query_tiles.ndim == 2 else work.query_tiles[:, None].expand_as(work.full)
        computes = work.full + work.partial > 0
        active = every if work.active_tiles is None else work.active_tiles
        if work.active_tiles is not None and not backward:
            # The first step fills the state and the last one converts it: all query tiles take part.
            active = torch.where(self._first_or_last(computes), every, active)
        seconds = kernel.seconds(rows=active, full=work.full, partial=work.partial, head_dim=work.shape.head_dim, backward=backward)
        if work.merge_bytes is not None:
            bytes_ = torch.where(computes, work.merge_bytes, 0.0) if work.steps > 1 else torch.zeros_like(seconds)
        else:
            bytes_ = self._engine_bytes(every, active, computes, backward)
        return (seconds + bytes_ / self.cluster.hbm) * self.compute_factor[:, None]

    def _first_or_last(self, computes: Tensor) -> Tensor:
        """Whether a step is a rank's first, or its last that computes anything [R, K + 1]."""
        index = torch.arange(computes.shape[1]).expand_as(computes)
        return (index == 0) | (index == torch.where(computes, index, 0).amax(1, keepdim=True))

    def _engine_bytes(self, every: Tensor, active: Tensor, computes: Tensor, backward: bool) -> Tensor:
        """Bytes that the engine reads and writes besides the kernels' own [R, K + 1]: packing, merging, adding, converting.

        Kernels were measured with reads and writes in the inputs' dtype; running results and gradients have 4 bytes. Local KV counts as
        packed. K and V that are contiguous by token are sent without packing, but strides are not part of a plan.
        """
        work, s = self.work, self.work.shape
        narrow = s.element
        tile = BLOCK_SIZE * s.head_dim
        sent, received = work.sent.sum(0), work.received.sum(0)
        local = (work.kv_tokens * work.degree * s.batch / work.scale)[:, None]  # tokens of this rank's KV
        grad_bytes = work.kv_token_bytes * WIDE / narrow
        out = torch.zeros_like(active)
        if work.gathered is not None:
            out += 2 * work.gathered * work.kv_token_bytes
        if work.steps > 1:
            out[:, :1] += 2 * local * work.kv_token_bytes
        if not backward:
            last = self._first_or_last(computes)
            last[:, 0] &= computes[:, 1:].sum(1) == 0
            has_result = computes.cumsum(1) > computes
            out += computes * has_result * active * tile * WIDE  # reads the running result,
            out += torch.where(last, 0.0, computes * active * tile * (WIDE - narrow))  # and writes it, except in the last step
            return out
        out += computes * active * tile * (2 * WIDE - narrow)  # adds to dQ
        out[:, :1] += every[:, :1] * tile * (2 * narrow + WIDE)  # computes delta, zeroes dQ
        out[:, -1] += self._convert_bytes()
        out += received * (work.kv_token_bytes * computes + grad_bytes)  # reads received KV, writes its gradient
        return out + (sent + 2 * torch.minimum(sent, local)) * grad_bytes  # adds returned gradients

    def _convert_bytes(self) -> Tensor:
        """Bytes read and written when complete gradients are converted to the inputs' dtype [R]."""
        work, s = self.work, self.work.shape
        every = work.query_tiles if work.query_tiles.ndim == 1 else work.query_tiles[:, 0]
        local = work.kv_tokens * work.degree * s.batch / work.scale
        return every * BLOCK_SIZE * s.head_dim * (WIDE + s.element) + local * work.kv_token_bytes * (1 + WIDE / s.element)

    # ------------------------------------------------------------------------------------------------------------ communication

    def _exchange_seconds(self, token_bytes: float) -> Tensor:
        """Seconds of each step's all-to-all, or of its reverse [R, K + 1]: the slower kind of link, in the slower direction."""
        by_link = []
        for i, link in enumerate((self.cluster.inside, self.cluster.between)):
            bytes_ = torch.maximum(self.work.received[i], self.work.sent[i]) * token_bytes
            seconds = bytes_ * self.link_factor[:, None] / link.bandwidth + link.latency * self.work.exchanges
            by_link.append(torch.where(bytes_ > 0, seconds, 0.0))
        return torch.maximum(by_link[0], by_link[1])

    def _token_bytes(self) -> tuple[float, float]:
        """Bytes per token of queries, and of K and V, that a Ulysses transpose sends; a KV head goes to every rank that needs it."""
        s, degree = self.work.shape, self.work.degree
        copies = max(1, degree // s.kv_heads)
        return float(s.q_bytes), float(s.kv_bytes * copies)

    def _transpose_seconds(self, per_query: float, per_key: float) -> Tensor:
        """Seconds of a Ulysses transpose, in either direction, that moves so many bytes per token of queries and of KV [R]."""
        if self.work.degree == 1:
            return self.zero
        sent = self._transpose_sent(per_query, per_key) * self.link_factor
        c, crossing = self.cluster, self.work.cross_node_share
        inside = sent * (1 - crossing) / c.inside.bandwidth + (c.inside.latency if crossing < 1 else 0)
        between = sent * crossing / c.between.bandwidth + (c.between.latency if crossing else 0)
        packing = 2 * 2 * sent / c.hbm  # packing and unpacking both read and write
        return torch.maximum(inside, between) + packing

    def _transposes(self, backward: bool) -> tuple[Tensor, Tensor]:
        """Seconds of the transposes before and after a pass [R]."""
        q, kv = self._token_bytes()
        if not backward:
            return self._transpose_seconds(q, kv), self._transpose_seconds(q, 0.0)
        return self._transpose_seconds(3 * q, kv), self._transpose_seconds(q, kv)

    def _transpose_sent(self, per_query: float, per_key: float) -> Tensor:
        """Bytes that a rank sends in a transpose [R]."""
        work = self.work
        return (work.local * per_query + work.kv_tokens * per_key) * ((work.degree - 1) / work.degree)

    def transpose_bytes(self) -> Tensor:
        """Bytes of all transposes of both passes, log-sum-exp included, inside the node and between nodes [2, R]."""
        work = self.work
        if work.degree == 1:
            return torch.zeros(2, len(work.rank), dtype=torch.float64)
        (q, kv), s = self._token_bytes(), work.shape
        grad_factor = s.grad_element / s.element if s.kv_heads < work.degree else 1.0
        sent = self._transpose_sent(6 * q + 2 * 4 * s.batch * s.heads, (2 + grad_factor) * kv)
        return torch.stack([sent * (1 - work.cross_node_share), sent * work.cross_node_share])


def _per_rank(work: Workload, factor_of: Mapping[int, float]) -> Tensor:
    """The factor of each rank of the workload [R]. A Ulysses group is as slow as its slowest member."""
    factor = torch.ones(work.ranks, dtype=torch.float64)
    for rank, value in factor_of.items():
        if rank >= work.ranks * work.degree:
            raise ValueError(f"conditions: expected ranks below {work.ranks * work.degree}, got {rank}")
        ring_rank = rank // work.degree
        factor[ring_rank] = max(float(factor[ring_rank]), value)
    return factor[work.rank]
