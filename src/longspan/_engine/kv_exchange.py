"""The all-to-all of keys and values: sent from their own memory or packed first, and handed to kernels as views of the receive buffers.

Legend as in `longspan._kernels.protocol`. A buffer holds rows: K and V of a token side by side [T, B, G, D + E], or, where K and V are sent
separately, one buffer each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._comm.agreement import Agreement
from longspan._comm.group import Group, Pending
from longspan._engine.buffer_rows import RowViews
from longspan._engine.local_schedule import ComputeStep
from longspan._engine.streams import current_stream, issue_stream, run_on
from longspan._kernels.protocol import AttentionInputs, KVAddresses
from longspan._kernels.row_sums import copy_rows_
from longspan._plan.plan_data import PlanData
from longspan._torch_private import empty_on_device_of

# Bytes of a shard's K and V from which each is sent in an all-to-all of its own, without packing. Below this size, packing K and V is
# cheaper than a second collective.
SEPARATE_KV_BYTES = 32 * 2**20


def sends_kv_separately(plan: PlanData, k: Tensor, v: Tensor) -> bool:
    """Whether K and V are sent separately. The same on every rank: it depends on sizes only, not on strides."""
    layout = plan.inner[1]
    batch, kv_heads, _, dim = k.shape
    return layout.length // layout.ranks * batch * kv_heads * (dim + v.shape[3]) * k.element_size() >= SEPARATE_KV_BYTES


def empty_rows(like: Tensor, rows: int, width: int) -> Tensor:
    """An uninitialized buffer of rows."""
    return empty_on_device_of(like, (rows, width), like.dtype)


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """How KV is laid out in buffers.

    Attributes:
        separate: K and V have buffers and exchanges of their own.
        per_batch_row: A row is (batch row, token): batch rows are laid out differently.
        two_buffers: In a joined schedule, the kernel reads local and received KV from two buffers. Otherwise the local KV of such a step is
            copied in front of the received KV.
    """

    separate: bool
    per_batch_row: bool
    two_buffers: bool


class StepKV(NamedTuple):
    """K and V that a step computes with: their addresses, and a function that makes a kernel's inputs from q and views of them."""

    addresses: KVAddresses
    inputs: Callable[[Tensor], AttentionInputs]


@dataclass(kw_only=True, eq=False)
class _Transfer:
    """The exchanges of one step.

    Attributes:
        buffers: Where KV arrives.
        issue: Start the exchanges; None before they are bound to the rows that they send, empty once they are in flight.
        packed: An event after packing, where the exchanges are issued from another stream.
        pending: The exchanges in flight.
    """

    buffers: list[Tensor]
    issue: list[Callable[[], Pending]] | None = None
    packed: torch.cuda.Event | None = None
    pending: list[Pending] = field(default_factory=list)


class KVExchange:
    """Local and received KV, step by step, with the transfer of step i + 1 in flight while step i is computed.

    Per step i, call `wait(i)`, `prepare(i + 1)`, launch the kernel, `send(i + 1)`. No KV is sent before all ranks agree on the call.

    Normally `prepare` packs and sends, and `send` does nothing. One case differs: on CUDA, while the agreement of all ranks is pending.
    There `prepare` only allocates and packs, so that the kernel is launched first. `send` then waits for the agreement while the kernel
    runs, and sends from another stream.
    """

    def __init__(
        self,
        group: Group | None,
        kv: tuple[Tensor, Tensor],
        steps: Sequence[ComputeStep],
        fmt: KVFormat,
        what: str,
        agreement: Agreement,
    ) -> None:
        """group: the KV axis, None where no step has exchanges. what: the pass, for error messages."""
        self.k, self.v = kv
        self.group, self.steps, self.format, self._agreement = group, steps, fmt, agreement
        self.width = self.k.shape[3] + self.v.shape[3]
        self._transfers: dict[int, _Transfer] = {}
        if group is not None:
            self._names = (f"keys, {what}", f"values, {what}") if fmt.separate else (what,)
            spare_rows = 0 if fmt.two_buffers else steps[0].received_rows
            sources = [[self.k], [self.v]] if fmt.separate else [[self.k, self.v]]
            self._first_buffers = [self._packed(tensors, spare_rows=spare_rows) for tensors in sources]
            self._local = [RowViews(buffer[: buffer.shape[0] - spare_rows] if spare_rows else buffer) for buffer in self._first_buffers]
            self.prepare(0)
            self.send(0)

    def prepare(self, i: int) -> None:
        """Pack and send the rows of step i. Only pack them while the agreement is pending on CUDA (see the class): `send` sends them."""
        if i >= len(self.steps) or not self.steps[i].exchanges:
            return
        assert self.group is not None
        step = self.steps[i]
        own_buffer = i > 0 or self.format.two_buffers
        buffers = self._first_buffers
        if own_buffer:
            buffers = [empty_rows(local.x, step.received_rows, local.x.shape[1]) for local in self._local]
        transfer = self._transfers[i] = _Transfer(buffers=buffers)
        if self._agreement.done or not self.k.is_cuda or not self.group.any_stream:
            self.send(i)
            return
        if step.gathers_rows:
            transfer.issue = self._bound(step, transfer, own_buffer=own_buffer)
        transfer.packed = current_stream(self.k).record_event()

    def _bound(self, step: ComputeStep, transfer: _Transfer, *, own_buffer: bool) -> list[Callable[[], Pending]]:
        """The step's exchanges, bound to their tensors. Rows that are not contiguous are gathered now."""
        group, issue = self.group, []
        assert group is not None
        skipped = len(step.local) if own_buffer else 0
        for exchange in step.exchanges:
            for name, local, buffer in zip(self._names, self._local, transfer.buffers, strict=True):
                received = exchange.stop - exchange.start
                out = buffer if received == buffer.shape[0] else buffer[exchange.start - skipped : exchange.stop - skipped]
                what = f"{exchange.what}, {name}"
                if exchange.sends_views:
                    ranges, range_of_rank = exchange.sent_ranges
                    views = [local.of(start, stop) for start, stop in ranges]
                    pieces = [views[i] for i in range_of_rank]
                    issue.append(_bind(group.all_to_all_pieces, out, pieces, exchange.recv_counts, what=what))
                else:
                    rows = exchange.sent
                    sent = local.of(rows.start, rows.stop) if rows.index is None else rows.take(local.x)
                    issue.append(_bind(group.all_to_all, out, sent, exchange.recv_counts, exchange.send_counts, what=what))
        return issue

    def send(self, i: int) -> None:
        """Wait until all ranks agree, then start the exchanges of step i. Does nothing if `prepare` started them."""
        transfer = self._transfers.get(i)
        if transfer is None or transfer.pending:
            return
        if transfer.issue is None:
            transfer.issue = self._bound(self.steps[i], transfer, own_buffer=i > 0 or self.format.two_buffers)
        self._agreement.wait()
        started = transfer.issue
        if transfer.packed is None:
            transfer.pending = [issue() for issue in started]
        else:
            # A backend's stream waits for the stream that issues the all-to-all. On the current stream, it would wait for the kernel of the
            # step before: issue from another stream that waits for the packing only.
            stream = issue_stream(self.k.get_device())
            stream.wait_event(transfer.packed)
            transfer.pending = run_on(stream, lambda: [issue() for issue in started])
        transfer.issue = []

    def wait(self, i: int) -> list[StepKV]:
        """K and V of step i for each of its `tiles`, once received."""
        step, (k, v) = self.steps[i], (self.k, self.v)
        if not step.exchanges:
            if self.format.per_batch_row:
                return [_whole(k[r : r + 1], v[r : r + 1]) for r in range(len(step.tiles))]
            return [_tokens(k, v, step.local)]
        transfer = self._transfers.pop(i)
        for pending in transfer.pending:
            pending.wait()
        local = [rows.x for rows in self._local] if i == 0 and self.format.two_buffers else ()
        return [
            self._step_kv([buffer if tiles.kv_rows is None else tiles.kv_rows.take(buffer) for buffer in transfer.buffers], local)
            for tiles in step.tiles
        ]

    def _step_kv(self, rows: Sequence[Tensor], local: Sequence[Tensor]) -> StepKV:
        """K and V in rows of one buffer or two, and local K and V in two buffers (`AttentionInputs.local_kv`) if `local` is not empty."""
        k = rows[0].data_ptr()
        v = rows[1].data_ptr() if len(rows) == 2 else k + self.k.shape[3] * self.k.element_size()
        local_k, local_v = (local[0].data_ptr(), local[1].data_ptr()) if local else (0, 0)

        def inputs(q: Tensor) -> AttentionInputs:
            step_k, step_v = self._two_views(rows) if len(rows) == 2 else self.split(rows[0])
            return AttentionInputs(q=q, k=step_k, v=step_v, local_kv=self._two_views(local) if local else None)

        return StepKV(KVAddresses(k, v, local_k, local_v), inputs)

    def _two_views(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Rows of two buffers as views k [B, G, T, D] and v [B, G, T, E]."""
        return self._view(rows[0], self.k.shape[3]), self._view(rows[1], self.v.shape[3])

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows with K and V side by side as views k [B, G, T, D] and v [B, G, T, E]."""
        both, dim = self._view(rows, self.width), self.k.shape[3]
        return both[..., :dim], both[..., dim:]

    def _view(self, rows: Tensor, width: int) -> Tensor:
        """Rows as [B, G, T, width]."""
        batch, kv_heads, _, _ = self.k.shape
        return rows.view(rows.shape[0], 1 if self.format.per_batch_row else batch, kv_heads, width).permute(1, 2, 0, 3)

    def _packed(self, tensors: Sequence[Tensor], *, spare_rows: int) -> Tensor:
        """Local tensors side by side as rows [S, B·G·W] ([B·S, G·W] where batch rows differ), followed by uninitialized spare rows.

        A single tensor that is contiguous in this order already is not copied, if there are no spare rows.
        """
        batch, kv_heads, length, dim = tensors[0].shape
        if len(tensors) > 1:
            dim = self.width
        per_row = self.format.per_batch_row
        rows, width = (batch * length, kv_heads * dim) if per_row else (length, batch * kv_heads * dim)
        order = (0, 2, 1, 3) if per_row else (2, 0, 1, 3)
        if len(tensors) == 1 and not spare_rows and _is_contiguous(tensors[0], order):
            return tensors[0].as_strided((rows, width), (width, 1))
        permuted = [t.permute(order) for t in tensors]
        shape = (*permuted[0].shape[:3], dim)
        buffer = empty_rows(self.k, rows + spare_rows, width)
        start = 0
        for t in permuted:
            copy_rows_(buffer[:rows].view(shape)[..., start : start + t.shape[3]], t)
            start += t.shape[3]
        return buffer


def _is_contiguous(t: Tensor, order: Sequence[int]) -> bool:
    """`t.permute(order).is_contiguous()` without a view."""
    shape, strides, step = t.shape, t.stride(), 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != step:
            return False
        step *= shape[dim]
    return True


def _bind(exchange: Callable[..., Pending], *args: object, what: str) -> Callable[[], Pending]:
    return lambda: exchange(*args, what=what)


def _whole(k: Tensor, v: Tensor) -> StepKV:
    """All of k and v."""
    return StepKV(KVAddresses(k.data_ptr(), v.data_ptr()), lambda q: AttentionInputs(q=q, k=k, v=v))


def _tokens(k: Tensor, v: Tensor, tokens: range) -> StepKV:
    """A contiguous range of the tokens of k and v."""
    if len(tokens) == k.shape[2]:
        return _whole(k, v)
    start, stop, size = tokens.start, tokens.stop, k.element_size()
    addresses = KVAddresses(k.data_ptr() + start * k.stride(2) * size, v.data_ptr() + start * v.stride(2) * size)
    return StepKV(addresses, lambda q: AttentionInputs(q=q, k=k[:, :, start:stop], v=v[:, :, start:stop]))
