"""The timeline of a plan: when each rank computes, when its keys and gradients travel, and what of that is exposed.

It follows the engine: while step i is computed, the keys of step i + 1 travel; an exchange begins when the one before it has ended and
the computation before the one it hides behind is done. Backward, the gradients of a step's keys go home while the next one is computed,
those of the last while the second part of the local keys is. In a joined schedule nothing is computed while the first keys travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan._cost.rates import Cluster
from longspan._cost.workload import Workload
from longspan._masks.block_table import BLOCK_SIZE

TIE = 1.01  # times within this are equal: then what is simpler


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What goes wrong on the day. `stragglers`: rank → how many times slower it computes; `slow_links`: rank → how many times slower it
    sends and receives."""

    stragglers: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, given in (("stragglers", self.stragglers), ("slow_links", self.slow_links)):
            for rank, factor in given.items():
                if rank < 0 or factor <= 0:
                    raise ValueError(f"{what}: expected ranks of 0 or more and factors above 0, got {rank}: {factor}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """Forward or backward. Seconds from its begin, float64 [R, K + 1]. Where local keys have a second part, that is one more step at the
    end, empty in the forward pass of a plan.

    compute:  when each step's computation begins and ends; travel: the same of the exchange that brings its keys (empty for step 0).
    home:     when a step's gradients go home, backward only.
    before:   seconds of the Ulysses transpose before, after: of the one that follows, and of what comes home last.
    total:    [R].
    """

    compute: tuple[Tensor, Tensor]
    travel: tuple[Tensor, Tensor]
    home: tuple[Tensor, Tensor] | None
    before: Tensor
    after: Tensor
    total: Tensor

    @property
    def busy(self) -> Tensor:
        """Seconds of computation of each rank [R]."""
        return (self.compute[1] - self.compute[0]).sum(1)

    @property
    def exposed(self) -> Tensor:
        """Seconds that each rank waits for data [R]."""
        return self.total - self.busy

    @property
    def seconds(self) -> float:
        return float(self.total.max())

    def at(self, rank: Tensor) -> Pass:
        """The same with line rank[i] as its line i."""
        compute, travel = ((a[rank], b[rank]) for a, b in (self.compute, self.travel))
        home = None if self.home is None else (self.home[0][rank], self.home[1][rank])
        return Pass(compute=compute, travel=travel, home=home, before=self.before[rank], after=self.after[rank], total=self.total[rank])


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Both passes, and the bytes that they move per rank: inside the node and between nodes [2, R]."""

    forward: Pass
    backward: Pass
    bytes: Tensor

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    def at(self, rank: Tensor) -> Timeline:
        """The same with rank rank[i] in place i."""
        return Timeline(forward=self.forward.at(rank), backward=self.backward.at(rank), bytes=self.bytes[:, rank])


def timeline(work: Workload, cluster: Cluster, conditions: Conditions | None = None) -> Timeline:
    """What the model predicts for a workload on a cluster."""
    again = work.back()
    sim, back = (_Simulation(w, cluster, conditions or Conditions()) for w in (work, again.split()))
    forward, backward = sim.run(backward=False), back.run(backward=True)
    keys = (work.received + again.received).sum(2) * work.key_bytes
    grads = again.sent.sum(2) * work.key_bytes * (work.shape.grad_element / work.shape.element)
    return Timeline(forward=forward, backward=backward, bytes=keys + grads + sim.turn_bytes())


def fastest(
    work: Workload, cluster: Cluster, conditions: Conditions | None = None, *, overlap: bool | None = None
) -> tuple[Workload, Timeline]:
    """A workload whose local keys are computed while the first exchange travels (`overlap`) or together with what it brings, and its
    timeline. None: what is faster, where there is one exchange.

    Computed together, no running result is written and read again, and nothing is hidden. With more steps there is one anyway.
    """
    options = [work] if overlap is not False or not work.travels else []
    if work.travels and (overlap is False or (overlap is None and work.travels == 1)):
        options.append(work.join())
    found = [(option, timeline(option, cluster, conditions)) for option in options]
    return found[-1] if found[-1][1].seconds * TIE < found[0][1].seconds else found[0]


class _Simulation:
    def __init__(self, work: Workload, cluster: Cluster, conditions: Conditions) -> None:
        self.work, self.cluster = work, cluster
        self.slow = _per_rank(work, conditions.stragglers)
        self.link = _per_rank(work, conditions.slow_links)
        self.zero = torch.zeros(len(work.rank), dtype=torch.float64)
        self.fetch = self._exchange(work.received, work.sent, work.key_bytes)

    def run(self, *, backward: bool) -> Pass:
        work = self.work
        seconds = self._compute(backward)
        fetch, home = self.fetch, self.fetch
        if backward:
            home = self._exchange(work.sent, work.received, work.key_bytes * work.shape.grad_element / work.shape.element)
        before, after = self._turns(backward)
        compute, travel, back = torch.zeros(3, 2, *seconds.shape, dtype=torch.float64)
        free = before.clone()  # when the exchanges' stream is free: they follow each other in the order in which they are begun
        done = before.clone()  # when the last computation ended
        for i, before_it, after_it in self._walked():
            begin = torch.maximum(done, travel[1, :, i])
            waits = work.joined and i == 0  # for what is packed
            if after_it is not None and float(work.exchanges[after_it]):
                ready = begin + seconds[:, i] if waits else done
                travel[0, :, after_it] = self._together(torch.maximum(free, ready), after_it)
                travel[1, :, after_it] = free = travel[0, :, after_it] + fetch[:, after_it]
            hidden = fetch[:, after_it] if after_it is not None and not waits else self.zero
            if backward and before_it:
                hidden = hidden + home[:, before_it]
            compute[0, :, i] = begin
            compute[1, :, i] = done = begin + seconds[:, i] + self.cluster.contention * torch.minimum(hidden, seconds[:, i])
            for left_out in range(i + 1, work.steps if after_it is None else after_it):
                compute[:, :, left_out] = done
            if backward and i and float(work.exchanges[i]):
                back[0, :, i] = self._together(torch.maximum(free, done), i)
                back[1, :, i] = free = back[0, :, i] + home[:, i]
        # What comes home last is added and converted when it is there: a part of the last step, where that is over local keys.
        late = self._converts() / self.cluster.hbm * self.slow if work.halves is not None else self.zero
        end = torch.maximum(done, free + late) if backward else done
        total = end + after
        return Pass(
            compute=(compute[0], compute[1]),
            travel=(travel[0], travel[1]),
            home=(back[0], back[1]) if backward else None,
            before=before,
            after=total - done,
            total=total,
        )

    def _walked(self) -> Iterator[tuple[int, int, int | None]]:
        """Steps with the one before (0 where there is none) and the one after. Steps for which nothing moves and that compute nothing are
        left out.
        """
        work = self.work
        some = (work.exchanges > 0) | ((work.full + work.partial).sum(0) > 0)
        walked = [0, *(i for i in range(1, work.steps) if bool(some[i]))]
        yield from zip(walked, [0, *walked], [*walked[1:], None], strict=False)

    def _together(self, ready: Tensor, step: int) -> Tensor:
        """An exchange begins when those that a rank sends to and receives from are there; all of them, where pairs are not known."""
        if not self.work.pairs:
            return ready.max().expand_as(ready)
        to, source = self.work.pairs[step]
        begin = ready.scatter_reduce(0, to, ready[source], "amax")
        return begin.scatter_reduce_(0, source, ready[to], "amax")

    def _compute(self, backward: bool) -> Tensor:
        """Seconds of each step [R, K + 1]: the kernel, and what the engine reads and writes beside it."""
        work, kernel = self.work, self.cluster.kernel
        every = work.rows if work.rows.ndim == 2 else work.rows[:, None].expand_as(work.full)
        there = work.full + work.partial > 0
        rows = every if work.busy is None else work.busy
        if work.busy is not None and not backward:
            # The first step fills the state and the last one converts it: all rows take part.
            rows = torch.where(self._ends(there), every, rows)
        seconds = kernel.seconds(rows=rows, full=work.full, partial=work.partial, head_dim=work.shape.head_dim, backward=backward)
        if work.fold is not None:
            bytes_ = torch.where(there, work.fold, 0.0) if work.steps > 1 else torch.zeros_like(seconds)
        else:
            bytes_ = self._beside(every, rows, there, backward)
        return (seconds + bytes_ / self.cluster.hbm) * self.slow[:, None]

    def _ends(self, there: Tensor) -> Tensor:
        """Which steps are a rank's first or the last that computes anything [R, K + 1]."""
        index = torch.arange(there.shape[1]).expand_as(there)
        return (index == 0) | (index == torch.where(there, index, 0).amax(1, keepdim=True))

    def _beside(self, every: Tensor, rows: Tensor, there: Tensor, backward: bool) -> Tensor:
        """Bytes that the engine moves through memory beside the kernels' own work [R, K + 1]: what it packs, folds, adds up and converts.

        Kernels were measured reading and writing elements of the inputs' dtype. Running results and gradients are of 4 bytes. Local keys
        count as packed, though many that lie token by token are sent as they are: how they lie is not part of a plan.
        """
        work, s = self.work, self.work.shape
        wide, narrow = 4, s.element
        tile = BLOCK_SIZE * s.head_dim
        sent, received = work.sent.sum(0), work.received.sum(0)
        local = (work.keys * work.degree * s.batch / work.scale)[:, None]  # tokens of this rank's keys
        grads = work.key_bytes * wide / narrow
        out = torch.zeros_like(rows)
        if work.gathered is not None:
            out += 2 * work.gathered * work.key_bytes
        if work.steps > 1:
            out[:, :1] += 2 * local * work.key_bytes
        if not backward:
            if work.steps > 1:
                last = self._ends(there)
                last[:, 0] &= there[:, 1:].sum(1) == 0
                begun = there.cumsum(1) > there.long()
                out += there * begun * rows * tile * wide  # reads the state …
                out += torch.where(last, 0.0, there * rows * tile * (wide - narrow))  # … and writes it, where it is not the last
            return out
        out += there * rows * tile * (2 * wide - narrow)  # adds to the gradient of q
        out[:, :1] += every[:, :1] * tile * (2 * narrow + wide)  # delta, and zeros to add to
        out[:, -1] += self._converts()
        out += received * (work.key_bytes * there + grads)  # reads every key that arrived, writes its gradient
        return out + (sent + 2 * torch.minimum(sent, local)) * grads  # adds what comes home

    def _converts(self) -> Tensor:
        """Bytes that are read and written when gradients are complete [R]: in the dtype of sums and in that of the inputs."""
        work, s = self.work, self.work.shape
        every = work.rows if work.rows.ndim == 1 else work.rows[:, 0]
        local = work.keys * work.degree * s.batch / work.scale
        return every * BLOCK_SIZE * s.head_dim * (4 + s.element) + local * work.key_bytes * (1 + 4 / s.element)

    def _exchange(self, arriving: Tensor, leaving: Tensor, size: float) -> Tensor:
        """Seconds of each step's exchange [R, K + 1]: the slower of both kinds of links, of both directions."""
        c, found = self.cluster, None
        for i, link in enumerate((c.inside, c.between)):
            bytes_ = torch.maximum(arriving[i], leaving[i]) * size
            seconds = torch.where(bytes_ > 0, bytes_ * self.link[:, None] / link.bandwidth + link.latency * self.work.exchanges, 0.0)
            found = seconds if found is None else torch.maximum(found, seconds)
        assert found is not None
        return found

    def _widths(self) -> tuple[float, float]:
        """Bytes per token of queries and of keys and values that leave in a transpose; key heads go to every rank that needs one."""
        s, degree = self.work.shape, self.work.degree
        copies = max(1, degree // s.kv_heads)
        return float(s.q_bytes), float(s.kv_bytes * copies)

    def _turn(self, per_query: float, per_key: float) -> Tensor:
        """Seconds of a Ulysses transpose, forth or back, that moves so many bytes per token of queries and of keys."""
        if self.work.degree == 1:
            return self.zero
        away = self._away(per_query, per_key) * self.link
        c, turned = self.cluster, self.work.turned
        inside = away * (1 - turned) / c.inside.bandwidth + (c.inside.latency if turned < 1 else 0)
        between = away * turned / c.between.bandwidth + (c.between.latency if turned else 0)
        # Packing and unpacking read and write what is sent.
        packing = 2 * 2 * away / c.hbm
        return torch.maximum(inside, between) + packing

    def _turns(self, backward: bool) -> tuple[Tensor, Tensor]:
        q, kv = self._widths()
        if not backward:
            return self._turn(q, kv), self._turn(q, 0.0)
        return self._turn(3 * q, kv), self._turn(q, kv)

    def _away(self, per_query: float, per_key: float) -> Tensor:
        """Bytes that leave a rank in a transpose [R]."""
        work = self.work
        return (work.local * per_query + work.keys * per_key) * ((work.degree - 1) / work.degree)

    def turn_bytes(self) -> Tensor:
        """Of all transposes of both passes [2, R], logsumexp too."""
        work = self.work
        if work.degree == 1:
            return torch.zeros(2, len(work.rank), dtype=torch.float64)
        (q, kv), s = self._widths(), work.shape
        home = s.grad_element / s.element if s.kv_heads < work.degree else 1.0
        away = self._away(6 * q + 2 * 4 * s.batch * s.heads, (2 + home) * kv)
        return torch.stack([away * (1 - work.turned), away * work.turned])


def _per_rank(work: Workload, given: Mapping[int, float]) -> Tensor:
    """Factors of the ranks looked at. A Ulysses group is as slow as its slowest member, and is counted as a rank of the ring axis."""
    factor = torch.ones(work.ranks, dtype=torch.float64)
    for rank, value in given.items():
        if rank >= work.ranks * work.degree:
            raise ValueError(f"conditions: rank {rank} does not exist, there are {work.ranks * work.degree}")
        at = rank // work.degree
        factor[at] = max(float(factor[at]), value)
    return factor[work.rank]
