"""Attention over a mesh: fetch the next step's keys, compute this one's, nothing else. The same backwards.

Legend as in `longspan._kernels.protocol`; B, H, G, Q, K are of this rank's shards (after the Ulysses transpose, where there is one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan._comm.agreement import Agreement
from longspan._comm.group import Group, Pending
from longspan._engine.kv_exchange import Keys, travel_apart
from longspan._engine.local_schedule import Itinerary, Part, Step, itinerary
from longspan._engine.plan_cache import plan_cache
from longspan._engine.spec import Spec
from longspan._engine.streams import Lanes
from longspan._engine.ulysses import Transpose
from longspan._kernels.protocol import Grads, Kernel, State, Work, like_query, state_dtype
from longspan._kernels.registry import choose
from longspan._kernels.row_sums import add_last_rows, add_rows_, split_rows
from longspan._masks.block_table import BLOCK_SIZE
from longspan._plan.plan_data import PlanData


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One attention call on this rank: the plan, and what is not part of it."""

    data: PlanData
    spec: Spec
    scale: float
    score_captured: Sequence[Tensor]
    heads: int
    kv_heads: int
    agreement: Agreement

    @cached_property
    def transpose(self) -> Transpose | None:
        d = self.data
        if d.ulysses is None or d.degree == 1:
            return None
        members = next(group for group in d.groups.tolist() if d.mesh.rank in group)
        lengths, kv_lengths = (tuple(layout.local_len(r) for r in members) for layout in d.layouts)
        group = d.mesh.group(d.ulysses)
        return Transpose(group=group, lengths=lengths, kv_lengths=kv_lengths, heads=self.heads, kv_heads=self.kv_heads)

    @property
    def own_heads(self) -> range | None:
        return None if self.transpose is None else self.transpose.own

    def captured_mask(self, device: torch.device) -> list[Tensor]:
        return plan_cache.captured(self.data, device)

    def work(
        self, part: Part, q: Tensor, row: int, *, backward: bool, own: tuple[Tensor, Tensor] | None = None, beside: bool = False
    ) -> Work:  # fmt: skip
        return Work(
            table=part.table,
            q_tiles=part.q_tiles,
            kv_tiles=part.kv_tiles,
            scale=self.scale,
            mask=self.data.mask.program,
            mask_captured=self.captured_mask(q.device),
            score=self.spec.score,
            score_captured=[t.to(q.device) for t in self.score_captured],
            joint=self.spec.joint(self.score_captured) if backward else None,
            first_batch=row if self.data.rows > 1 else 0,
            first_head=0 if self.own_heads is None else self.own_heads.start,
            mask_is_fixed=True,  # copies of the plan's own
            complete=None if backward else part.complete,
            own=own,
            beside=beside,
        )

    def route(self, q: Tensor, k: Tensor, v: Tensor, *, sink: bool, backward: bool) -> tuple[Kernel, Itinerary]:
        """The kernel for this call and the itinerary in tiles that suit it. Of q, k, v only shapes, dtype and device count; kept."""
        ordered = torch.are_deterministic_algorithms_enabled()
        key = (self.spec.handle, q.shape, k.shape, v.shape, q.dtype, q.device, sink, backward, ordered)
        return plan_cache.route(self.data, key, lambda: self._route(q, k, v, sink=sink, backward=backward))

    def _route(self, q: Tensor, k: Tensor, v: Tensor, *, sink: bool, backward: bool) -> tuple[Kernel, Itinerary]:
        plain = (BLOCK_SIZE, BLOCK_SIZE)
        merged = self.apart_keys(k, v)
        route = itinerary(self.data, plain, self.own_heads, backward=backward, merged=merged)
        parts = [(part, p) for step in route.steps for p, part in enumerate(step.parts) if not part.empty or step is route.steps[0]]
        first, *more = (self.work(part, q, p, backward=True) for part, p in parts)
        staged = sink or len(parts) > self.data.rows
        kernel = choose(self.spec.kernel, q, k, v, first, more=more, staged=staged, backward=backward)
        for work in (first, *more):
            kernel.check(work, q)
        block = kernel.block(q, v, self.data.tiles[0].table)
        whole = route if block == plain else itinerary(self.data, block, self.own_heads, backward=backward, merged=merged)
        if not backward:
            return kernel, whole
        home = k.element_size(), self.travel(q.dtype).itemsize
        halves = itinerary(self.data, block, self.own_heads, backward=True, home=home, merged=merged)
        ends = [self.work(halves.steps[i].parts[0], q, 0, backward=True) for i in (0, -1)] if halves is not whole else []
        # Chosen by local keys in one part. What it would refuse in two it gets in one.
        return kernel, whole if any(kernel.refuses(q, k, v, work) is not None for work in ends) else halves

    def apart_keys(self, k: Tensor, v: Tensor) -> bool:
        """Whether keys and values travel apart. Not after a transpose, which leaves both side by side."""
        return self.transpose is None and travel_apart(self.data, k, v)

    def joins(self, kernel: Kernel, route: Itinerary, q: Tensor, v: Tensor, *, backward: bool) -> bool:
        """Whether the kernel reads local keys and the first ones that arrive from two places."""
        first = route.steps[0]
        return bool(first.arrivals) and kernel.joins(q, v, self.work(first.parts[0], q, 0, backward=backward), backward=backward)

    def travel(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of gradients of keys on their way home, for inputs of `dtype`."""
        return self.data.grad_reduce_dtype or state_dtype(dtype)

    def apart(
        self, kernel: Kernel, route: Itinerary, q: Tensor, v: Tensor, group: Group | None, needs: Sequence[bool]
    ) -> tuple[bool, bool]:
        """Whether steps of a backward pass may run at the same time, and whether they do so now. Not the first time: tables are copied to
        the device then, on the stream that asks for them first, and others would not wait for that.
        """
        if not q.is_cuda or group is None or not group.any_stream:
            return False, False
        ordered = torch.are_deterministic_algorithms_enabled()
        key = (self.spec.handle, route, q.shape, v.shape, q.dtype, q.device, tuple(needs), ordered)

        def ask() -> bool:
            works = [self.work(part, q, p, backward=True) for step in route.steps for p, part in enumerate(step.parts) if not part.empty]
            return len(works) > 1 and all(kernel.apart(q, v, work, needs) for work in works)

        allowed = plan_cache.concurrent(self.data, key, ask)
        return allowed, plan_cache.launched_before(self.data, key) and allowed

    def rehearse(self, q: Tensor, k: Tensor, v: Tensor, *, sink: bool, needs: Sequence[bool] | None) -> None:
        """Raise whatever the kernel refuses of this call, before anything is sent. needs: as in `backward`, None for a forward pass."""
        if self.spec.kernel == "dense":  # it knows neither tiles nor stages
            return
        if self.transpose is not None:
            turn = self.transpose
            of_q, of_kv = ((n, sum(lengths)) for n, lengths in zip(turn.counts, (turn.lengths, turn.kv_lengths), strict=True))
            shaped = ((q, of_q), (k, of_kv), (v, of_kv))
            q, k, v = (t.new_empty((1,)).expand(t.shape[0], heads, tokens, t.shape[3]) for t, (heads, tokens) in shaped)
        if needs is None:
            for backward in (False, True):
                self.route(q, k, v, sink=sink, backward=backward)
        else:
            kernel, route = self.route(q, k, v, sink=sink, backward=True)
            kernel.check(self.work(route.steps[0].parts[0], q, 0, backward=True), q, needs)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *, peak: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, peak) of this rank's queries over the keys of all ranks."""
    if call.transpose is None:
        result = _forward(call, q, k, v, sink, peak=peak)
        call.agreement.wait()  # where the plan moves nothing, nothing waited for it
        return result
    turn = call.transpose
    call.agreement.wait()
    inner_q, inner_k, inner_v = turn.gather_all([q], [k, v], what="Ulysses transpose of q, k, v")
    out, lse, most = _forward(call, inner_q, inner_k, inner_v, None if sink is None else sink[turn.own.start : turn.own.stop], peak=peak)
    (home,) = turn.scatter([out], what="Ulysses transpose of out")
    rows = [lse[..., None]] if most is None else [lse[..., None], most[..., None]]
    found = [r[..., 0].contiguous() for r in turn.scatter(rows, what="Ulysses transpose of lse")]
    return like_query(q, v.shape[3], q.dtype).copy_(home), found[0], found[1] if most is not None else None


def _forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *, peak: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    kernel, route = call.route(q, k, v, sink=sink is not None, backward=False)
    keys = Keys(
        call.data,
        k,
        v,
        route.steps,
        "forward",
        call.agreement,
        apart=call.apart_keys(k, v),
        joins=call.joins(kernel, route, q, v, backward=False),
    )
    queries = [q] if call.data.rows == 1 else list(q.split(1))
    states: list[State | None] = [sink_state(sink, part, v, peak) for part in queries]
    for i, step in enumerate(route.steps):
        pairs = keys.take(i)
        keys.fetch(i + 1)
        for p, (part, (k_part, v_part)) in enumerate(zip(step.parts, pairs, strict=True)):
            last = i == route.last[p]
            if part.empty and not last:
                continue
            work = call.work(part, q, p, backward=False, own=keys.own(i))
            states[p] = kernel.forward(queries[p], k_part, v_part, work, state=states[p], final=last, peak=peak)
    done = [s for s in states if s is not None]
    if len(done) == 1:
        return done[0].out, done[0].lse, done[0].peak
    out = like_query(q, v.shape[3], q.dtype)
    torch.cat([s.out for s in done], out=out)
    most = [s.peak for s in done if s.peak is not None]
    return out, torch.cat([s.lse for s in done]), torch.cat(most) if most else None


def backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Grads, Tensor | None]:
    """Gradients of this rank's q, k, v (in their dtypes), its share of those of captured tensors, and of the sink."""
    if call.transpose is None:
        result = _backward(call, q, k, v, sink, out, lse, grad_out, grad_lse, needs)
        call.agreement.wait()
        return result
    turn = call.transpose
    call.agreement.wait()
    inner_q, inner_out, inner_grad, inner_k, inner_v = turn.gather_all(
        [q, out, grad_out.to(q.dtype)], [k, v], what="Ulysses transpose of q, k, v, out and gradient"
    )
    rows = [lse[..., None]]
    if call.spec.lse:  # whether or not this rank's own loss used it
        rows.append((torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype))[..., None])
    found = [r[..., 0].contiguous() for r in turn.gather(rows, turn.lengths, what="Ulysses transpose of lse")]
    own = slice(turn.own.start, turn.own.stop)
    grads, dsink = _backward(
        call, inner_q, inner_k, inner_v, None if sink is None else sink[own], inner_out, found[0], inner_grad,
        found[1] if call.spec.lse else None, needs, wide_keys=turn.kv_heads < turn.group.size,
    )  # fmt: skip
    (dq,) = turn.scatter([grads.q], what="Ulysses transpose of the gradient of q")
    travel = call.data.grad_reduce_dtype
    partial = turn.kv_heads < turn.group.size  # then several ranks hold a part of each sum
    dk, dv = (g.to(travel) if partial and travel is not None else g for g in (grads.k, grads.v))
    dk, dv = turn.scatter_sum([dk, dv], what="Ulysses transpose of the gradients of k and v")
    if dsink is not None and sink is not None:
        dsink = torch.zeros(sink.shape, dtype=dsink.dtype, device=dsink.device).index_copy_(
            0, torch.arange(own.start, own.stop, device=dsink.device), dsink
        )
    return Grads(q=dq, k=dk.to(k.dtype), v=dv.to(v.dtype), captured=grads.captured), dsink


def _backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Sequence[bool],
    *,
    wide_keys: bool = False,
) -> tuple[Grads, Tensor | None]:
    kernel, route = call.route(q, k, v, sink=sink is not None, backward=True)
    delta = kernel.delta(out, grad_out, grad_lse)
    dsink = sink_gradient(sink, lse, delta)
    keys = Keys(
        call.data,
        k,
        v,
        route.steps,
        "backward",
        call.agreement,
        apart=call.apart_keys(k, v),
        joins=call.joins(kernel, route, q, v, backward=True),
    )
    may_overlap, overlaps = call.apart(kernel, route, q, v, keys.group, needs)
    lanes = Lanes(q.device, two=overlaps)
    total = _Totals(call, q, k, v, needs, keys, route, lanes, narrow=kernel.rounds_once)
    row_of = (lambda p: slice(p, p + 1)) if call.data.rows > 1 else (lambda p: slice(None))
    with lanes:
        for i, step in enumerate(route.steps):
            with lanes.of(i):
                pairs = keys.take(i)
                with lanes.of(i + 1):
                    keys.fetch(i + 1)
                buffer = total.buffer(step)
                for p, (part, (k_part, v_part)) in enumerate(zip(step.parts, pairs, strict=True)):
                    into, apart = total.into(part, p, buffer)
                    if part.empty:
                        into.k.zero_()
                        into.v.zero_()
                    else:
                        r = row_of(p)
                        # What comes first may have to wait for what arrives, and nothing comes after the last. In the first call, too, lest
                        # later ones add up in another order.
                        beside = may_overlap and bool(step.arrivals) and step is not route.steps[-1]
                        work = call.work(part, q, p, backward=True, own=keys.own(i), beside=beside)
                        kernel.backward(
                            q[r], k_part, v_part, out[r], lse[r], grad_out[r], None if grad_lse is None else grad_lse[r], work,
                            needs=needs, wide=True, delta=delta[r], into=into,
                        )  # fmt: skip
                    if apart is not None and part.rows is not None:
                        part.rows.put_(buffer, apart)
                total.send(i, step, buffer)
        return total.finish(wide_keys=wide_keys), dsink


# Dtypes in which kernels write gradients. In others they are converted when they are sent.
_WRITTEN = (torch.bfloat16, torch.float16, torch.float32)


class _Totals:
    """Gradients as they add up, in the dtype of lse. Those of keys from elsewhere go home and are added there.

    The order of sums is fixed: a row's own gradients, then what comes home, by steps and in each by ranks. Of the rows of local keys that
    are computed last, own gradients come last, unless nothing had been added by then. What comes home from the last two steps is added in
    one pass, where there is memory for both (`Itinerary.ending`).
    """

    def __init__(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, needs: Sequence[bool], keys: Keys, route: Itinerary, lanes: Lanes,
        *, narrow: bool,
    ) -> None:  # fmt: skip
        self.call, self.k, self.v, self.keys, self.route, self.lanes = call, k, v, keys, route, lanes
        self.dtype = state_dtype(q.dtype)
        self.q_dtype = q.dtype
        travel = call.travel(q.dtype)
        self.leaving_dtype = travel if narrow and travel in _WRITTEN else self.dtype  # of what is written to be sent
        self.q = torch.zeros(q.shape, dtype=self.dtype, device=q.device)
        self.captured = [torch.zeros(c.shape, dtype=self.dtype, device=q.device) if n else None for c, n in zip(call.score_captured, needs)]
        batch, groups, length, _ = k.shape
        self.rows = batch * length if keys.per_row else length
        # Of local keys, and in a joined schedule of the first ones that arrive: token by token like a buffer of keys, so that what comes
        # home is added row by row.
        width = (groups if keys.per_row else batch * groups) * keys.width
        self.first = torch.empty((self.rows + keys.steps[0].arriving, width), dtype=self.dtype, device=k.device)
        self.home = self.first[: self.rows]
        last = keys.steps[-1]
        self.last = None if last.arrivals or last is keys.steps[0] else last
        self.unwritten = 0 if self.last is None else self.last.tokens  # first rows of home that hold nothing yet
        self.late: Tensor | None = None  # gradients of those rows, where they hold something by the time they are computed
        self.going_home: tuple[int, Step, Tensor, list[Pending]] | None = None
        self.at_home: list[Tensor] = []  # of the last two steps: what has come home and is not added yet
        self.added: torch.cuda.Event | None = None  # home holds all that was added so far

    def buffer(self, step: Step) -> Tensor:
        """Where a step's gradients of keys and values go."""
        if step is self.keys.steps[0] or (step is self.last and self.unwritten):
            return self.first[step.own.start : step.own.stop + step.arriving]
        if step is self.last:
            self.late = torch.empty((step.tokens, self.home.shape[1]), dtype=self.dtype, device=self.home.device)
            return self.late
        return torch.empty((step.tokens, self.home.shape[1]), dtype=self.leaving_dtype, device=self.home.device)

    def into(self, part: Part, p: int, buffer: Tensor) -> tuple[Grads, Tensor | None]:
        """Where a part's gradients go; where its rows lie scattered in the buffer, that is a tensor apart, given too."""
        rows, q, apart = buffer, self.q, None
        if self.keys.per_row:
            tokens, q = self.k.shape[2], self.q[p : p + 1]
            if part.rows is None:
                rows = buffer[p * tokens : (p + 1) * tokens]
            else:
                rows = apart = buffer.new_empty((part.rows.count, buffer.shape[1]))
        dk, dv = self.keys.views(rows)
        return Grads(q=q, k=dk, v=dv, captured=self.captured), apart

    def send(self, i: int, step: Step, buffer: Tensor) -> None:
        """Begin to send step i's gradients home; wait for those of the step before, and add them unless they are among the last ones."""
        if step is self.last:
            return
        if i == 0:
            self.added = self.lanes.done()
        self._collect()
        if not step.arrivals:
            return
        assert self.keys.group is not None
        travel = self.call.travel(self.q_dtype)
        back = torch.empty((step.leaving, buffer.shape[1]), dtype=travel, device=buffer.device)
        pending, start = [], 0
        for arrival in step.arrivals:
            leaving = buffer[arrival.start : arrival.stop].to(travel)
            out = back[start : start + arrival.sent.count]
            what = f"{arrival.what}, gradients on their way home"
            pending.append(self.keys.group.all_to_all(out, leaving, arrival.leaving, arrival.arriving, what=what))
            start += arrival.sent.count
        self.going_home = i, step, back, pending

    def _collect(self) -> None:
        """In the lane of the step that went: what it sent and what came back are its own."""
        if self.going_home is None:
            return
        i, step, back, pending = self.going_home
        self.going_home = None
        with self.lanes.of(i):
            for p in pending:
                p.wait()
            if step in self.route.ending:
                self.at_home.append(back)
                return
            self.lanes.after(self.added)
            add_rows_(self.home, back, step.home.parts, step.home.lists(self.rows, self.home.device), unwritten=self.unwritten)
            self.added = self.lanes.done()
        self.unwritten = 0

    def finish(self, *, wide_keys: bool) -> Grads:
        """What has come home last is waited for in its lane: the lanes join after it."""
        self._collect()
        self.lanes.join()
        dtype = self.dtype if wide_keys else self.k.dtype
        dk, dv = (torch.empty(t.shape, dtype=dtype, device=t.device) for t in (self.k, self.v))
        if not self.at_home:
            split_rows(self.home, dk, dv, per_row=self.keys.per_row)
        else:
            parts = [step.home.parts for step in self.route.ending]
            lists = self.route.ending_home.lists(self.rows, self.home.device)
            add_last_rows(self.home, self.at_home, parts, lists, dk, dv, per_row=self.keys.per_row, late=self.late)
        return Grads(q=self.q.to(self.q_dtype), k=dk, v=dv, captured=self.captured)


def sink_state(sink: Tensor | None, q: Tensor, v: Tensor, peak: bool) -> State | None:
    """A sink is a key of value 0 that every row has seen already."""
    if sink is None:
        return None
    wide = state_dtype(q.dtype)
    lse = torch.empty(q.shape[:3], dtype=wide, device=q.device).copy_(sink[None, :, None])  # never the sink itself: states are spent
    out = torch.zeros((*q.shape[:3], v.shape[-1]), dtype=wide, device=q.device)
    return State(out=out, lse=lse, peak=torch.full_like(lse, -torch.inf) if peak else None)


def sink_gradient(sink: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    """Of a sink [H]: minus its share of each row's softmax times the row's delta, summed over rows."""
    if sink is None:
        return None
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(sink.to(lse.dtype)[:, None] - lse))  # a sink of −inf takes nothing of nothing
    return -(share * delta).sum((0, 2))
