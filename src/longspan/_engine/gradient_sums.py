"""Gradients of one backward pass, summed over its steps. Partial gradients of received KV are returned to their owner rank and added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._comm.group import Pending
from longspan._engine.kv_exchange import KVExchange
from longspan._engine.local_schedule import ComputeStep, LocalSchedule, StepTiles
from longspan._engine.step_calls import LayoutCalls
from longspan._engine.streams import StepStreams
from longspan._engine.values import CallTensors
from longspan._kernels.protocol import Grads, GradTargets, state_dtype
from longspan._kernels.row_sums import ReturnedGrads, add_returned_and_split, add_returned_rows_, split_rows
from longspan._torch_private import empty_on_device_of

# Dtypes in which kernels write gradients. Others are converted to when gradients are sent.
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Return:
    """Partial gradients of one step in flight: `received` are those of local rows, from the ranks that computed with them."""

    index: int
    step: ComputeStep
    received: Tensor
    pending: list[Pending]


class GradientSums:
    """Running sums in the dtype of lse.

    The order of sums is fixed: a row's local gradient, then returned ones, by step and in each step by rank. The local KV that is computed
    last (`late_step`) is added last, unless nothing had been added to its rows before. Returned gradients of the last two steps are added
    in one pass, where there is memory for both (`LocalSchedule.final_returns`).
    """

    def __init__(
        self,
        inputs: CallTensors,
        needs: Sequence[bool],
        exchange: KVExchange,
        schedule: LocalSchedule,
        streams: StepStreams,
        calls: LayoutCalls,
        *,
        grad_q: Tensor,
        return_dtype: torch.dtype,
        writes_once: bool,
    ) -> None:
        """grad_q: zeros in the dtype of lse, to which kernels add. return_dtype: of partial gradients in flight. writes_once: the kernel
        writes a gradient of KV once, when it is complete.
        """
        q, k, v = inputs.q, inputs.k, inputs.v
        self._k, self._v, self._exchange, self._schedule, self._streams = k, v, exchange, schedule, streams
        self._q_dtype, self._dtype, self._return_dtype = q.dtype, state_dtype(q.dtype), return_dtype
        self._sent_dtype = return_dtype if writes_once and return_dtype in _KERNEL_DTYPES else self._dtype
        self._grad_q, self._calls = grad_q, calls
        self._grad_captured = [
            torch.zeros(c.shape, dtype=self._dtype, device=q.device) if n else None for c, n in zip(inputs.score_captured, needs)
        ]
        batch, kv_heads, length, _ = k.shape
        per_batch_row, first, last = exchange.format.per_batch_row, schedule.steps[0], schedule.steps[-1]
        self._local_rows = batch * length if per_batch_row else length
        # Rows of local KV, in a joined schedule followed by the first received ones, in the order of KV buffers: returned rows are added
        # row by row.
        width = (kv_heads if per_batch_row else batch * kv_heads) * exchange.width
        self._first_buffer = empty_on_device_of(k, (self._local_rows + first.received_rows, width), self._dtype)
        self._grad_kv = self._first_buffer[: self._local_rows] if first.received_rows else self._first_buffer
        self._late_step = None if last.exchanges or last is first else last
        self._unwritten = 0 if self._late_step is None else self._late_step.buffer_rows  # first rows of _grad_kv that hold nothing yet
        self._late_grad_kv: Tensor | None = None  # gradients of these rows, if they hold something when the late step is computed
        self._in_flight: _Return | None = None
        self._final_returned: list[Tensor] = []
        self._added: torch.cuda.Event | None = None  # after the latest addition to _grad_kv

    def buffer(self, step: ComputeStep) -> Tensor:
        """The buffer for a step's gradients of KV [buffer_rows, …]."""
        if step is self._schedule.steps[0] or (step is self._late_step and self._unwritten):
            return self._first_buffer[step.local.start : step.local.stop + step.received_rows]
        dtype = self._dtype if step is self._late_step else self._sent_dtype
        buffer = empty_on_device_of(self._k, (step.buffer_rows, self._grad_kv.shape[1]), dtype)
        if step is self._late_step:
            self._late_grad_kv = buffer
        return buffer

    def destination(self, tiles: StepTiles, row: int, buffer: Tensor) -> tuple[GradTargets, Tensor | None]:
        """Where a kernel writes the gradients of a step's tiles of batch row `row`; also the rows to copy into the buffer afterwards, where
        they are scattered in it.
        """
        rows, grad_q, scattered = buffer, self._grad_q, None
        if self._exchange.format.per_batch_row:
            tokens, grad_q = self._k.shape[2], self._grad_q[row : row + 1]
            if tiles.kv_rows is None:
                rows = buffer[row * tokens : (row + 1) * tokens]
            else:
                rows = scattered = buffer.new_empty((tiles.kv_rows.count, buffer.shape[1]))

        def views() -> Grads:
            grad_k, grad_v = self._exchange.split(rows)
            return Grads(q=grad_q, k=grad_k, v=grad_v, captured=self._grad_captured)

        grad_k = rows.data_ptr()
        grad_v = grad_k + self._k.shape[3] * rows.element_size()
        return GradTargets(grad_q, self._grad_captured, grad_k, grad_v, views), scattered

    def send(self, i: int, step: ComputeStep, buffer: Tensor) -> None:
        """Start to return step i's gradients to their owner ranks; wait for those of the step before, add them unless they are final."""
        if step is self._late_step:
            return
        if i == 0:
            self._added = self._streams.record()
        self._receive()
        if not step.exchanges:
            return
        group = self._exchange.group
        assert group is not None
        received = empty_on_device_of(buffer, (step.sent_rows, buffer.shape[1]), self._return_dtype)
        pending, start = [], 0
        for exchange in step.exchanges:
            sent = buffer if exchange.stop - exchange.start == buffer.shape[0] else buffer[exchange.start : exchange.stop]
            if sent.dtype != self._return_dtype:
                sent = sent.to(self._return_dtype)
            out = received if exchange.sent.count == step.sent_rows else received[start : start + exchange.sent.count]
            what = f"{exchange.what}, return of gradients"
            pending.append(group.all_to_all(out, sent, exchange.send_counts, exchange.recv_counts, what=what))
            start += exchange.sent.count
        self._in_flight = _Return(index=i, step=step, received=received, pending=pending)

    def _receive(self) -> None:
        """Wait for the return in flight, on the stream of its step, to which its tensors belong."""
        if self._in_flight is None:
            return
        returned, self._in_flight = self._in_flight, None
        before = self._streams.use(returned.index)
        for pending in returned.pending:
            pending.wait()
        if returned.step in self._schedule.final_returns:
            self._final_returned.append(returned.received)
        else:
            self._streams.wait(self._added)
            rows = returned.step.returned
            lists = rows.lists(self._local_rows, self._grad_kv.device)
            grads = ReturnedGrads(buffers=(returned.received,), parts=(rows.parts,), lists=lists)
            add_returned_rows_(self._grad_kv, grads, unwritten=self._unwritten)
            self._added = self._streams.record()
            self._unwritten = 0
        self._streams.use(before)

    def finish(self, *, keep_kv_wide: bool) -> Grads:
        """The gradients: of q in its dtype, of k and v in theirs, or, with `keep_kv_wide`, in the dtype of the sums."""
        self._receive()  # on its step's stream, before the streams join
        self._streams.join()
        dtype = self._dtype if keep_kv_wide else self._k.dtype
        grad_k, grad_v = (empty_on_device_of(t, t.shape, dtype) for t in (self._k, self._v))
        per_row = self._exchange.format.per_batch_row
        if not self._final_returned:
            split_rows(self._grad_kv, grad_k, grad_v, per_row=per_row)
        else:
            parts = [step.returned.parts for step in self._schedule.final_returns]
            lists = self._schedule.final_returned_rows.lists(self._local_rows, self._grad_kv.device)
            grads = ReturnedGrads(buffers=self._final_returned, parts=parts, lists=lists)
            if self._calls.final_sum is None:
                self._calls.final_sum = add_returned_and_split(
                    self._grad_kv, grads, grad_k, grad_v, per_row=per_row, local_grads=self._late_grad_kv
                )
            else:
                self._calls.final_sum(self._grad_kv, grads, grad_k, grad_v, self._late_grad_kv)
        return Grads(q=self._grad_q.to(self._q_dtype), k=grad_k, v=grad_v, captured=self._grad_captured)
