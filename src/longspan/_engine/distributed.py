"""Attention over a mesh: receive the KV of the next step while this step computes. The backward pass does the same.

Legend as in `longspan._kernels.protocol`; B, H, G, Q, K are those of this rank's shards (after the Ulysses transpose, where there is one).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from longspan._engine.gradient_sums import GradientSums
from longspan._engine.sharded_call import ShardedCall
from longspan._engine.sink import sink_gradient, sink_state
from longspan._engine.step_calls import backward_layouts, forward_layouts
from longspan._engine.streams import StepStreams, is_captured
from longspan._engine.ulysses import UlyssesTranspose
from longspan._engine.values import BackwardTensors, CallTensors
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Grads, State, like_query


def forward(call: ShardedCall, inputs: CallTensors, *, max_scores: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, max scores) of this rank's queries over the KV of all ranks."""
    if call.transpose is not None:
        call.agreement.wait()
        return _forward_transposed(call, call.transpose, inputs, max_scores=max_scores)
    results = _forward_steps(call, inputs, max_scores=max_scores)
    call.agreement.wait()  # still pending where the plan has no exchanges
    return results


def _forward_transposed(
    call: ShardedCall, transpose: UlyssesTranspose, inputs: CallTensors, *, max_scores: bool
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    q, k, v = transpose.gather_all([inputs.q], [inputs.k, inputs.v], what="Ulysses transpose of q, k, v")
    sink = _local_heads(inputs.sink, transpose)
    out, lse, row_max = _forward_steps(call, CallTensors(q=q, k=k, v=v, sink=sink), max_scores=max_scores)
    (out,) = transpose.scatter([out], what="Ulysses transpose of out")
    row_values = [lse[..., None]] if row_max is None else [lse[..., None], row_max[..., None]]
    row_values = [r[..., 0] for r in transpose.scatter(row_values, what="Ulysses transpose of lse")]
    out = like_query(inputs.q, inputs.v.shape[3], inputs.q.dtype).copy_(out)
    return out, row_values[0], None if row_max is None else row_values[1]


def _forward_steps(call: ShardedCall, inputs: CallTensors, *, max_scores: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    q, v = inputs.q, inputs.v
    assert call.setup is not None
    _, schedule, _, _, step_calls = call.setup
    captured = call.captured_here
    calls = step_calls.unprepared() if is_captured(q) else step_calls.of_layouts(forward_layouts(inputs, captured, call.scale))
    exchange = call.kv_exchange(call.setup, call.kv_group(call.setup), inputs, backward=False)
    queries = [q] if call.plan.batch_layouts == 1 else list(q.split(1))
    states: list[State | None] = [sink_state(inputs.sink, part, v, max_scores=max_scores) for part in queries]
    for i, step in enumerate(schedule.steps):
        step_kv = exchange.wait(i)
        exchange.prepare(i + 1)
        for r, (tiles, kv) in enumerate(zip(step.tiles, step_kv, strict=True)):
            is_last = i == schedule.last_step[r]
            if tiles.empty and not is_last:
                continue
            states[r] = calls.forward(
                (i, r), queries[r], kv, partial(call.work, tiles, r, backward=False), captured,
                state=states[r], final=is_last, max_scores=max_scores,
            )  # fmt: skip
        exchange.send(i + 1)
    final = [state for state in states if state is not None]
    if len(final) == 1:
        return final[0].out, final[0].lse, final[0].max_scores
    out = like_query(q, v.shape[3], q.dtype)
    torch.cat([state.out for state in final], out=out)
    row_max = [state.max_scores for state in final if state.max_scores is not None]
    return out, torch.cat([state.lse for state in final]), torch.cat(row_max) if row_max else None


def backward(call: ShardedCall, tensors: BackwardTensors) -> tuple[Grads, Tensor | None]:
    """Gradients of this rank's q, k, v in their dtypes, and this rank's share of those of captured tensors and of the sink."""
    if call.transpose is not None:
        call.agreement.wait()
        return _backward_transposed(call, call.transpose, tensors)
    results = _backward_steps(call, tensors, keep_kv_wide=False)
    call.agreement.wait()  # still pending where the plan has no exchanges
    return results


def _backward_transposed(call: ShardedCall, transpose: UlyssesTranspose, tensors: BackwardTensors) -> tuple[Grads, Tensor | None]:
    inputs, lse, grad_lse = tensors.inputs, tensors.lse, tensors.grad_lse
    q, out, grad_out, k, v = transpose.gather_all(
        [inputs.q, tensors.out, tensors.grad_out],
        [inputs.k, inputs.v],
        what="Ulysses transpose of q, k, v, out and gradient",
    )
    row_values = [lse[..., None]]
    if call.spec.lse:  # also where only the other ranks' losses use lse
        row_values.append((torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype))[..., None])
    row_values = [r[..., 0].contiguous() for r in transpose.gather(row_values, transpose.lengths, what="Ulysses transpose of lse")]
    transposed = BackwardTensors(
        inputs=replace(inputs, q=q, k=k, v=v, sink=_local_heads(inputs.sink, transpose)),
        out=out,
        lse=row_values[0],
        grad_out=grad_out,
        grad_lse=row_values[1] if call.spec.lse else None,
        needs=tensors.needs,
    )
    grads, grad_sink = _backward_steps(call, transposed, keep_kv_wide=transpose.partial_kv_sums)
    (grad_q,) = transpose.scatter([grads.q], what="Ulysses transpose of the gradient of q")
    grad_k, grad_v = grads.k, grads.v
    if transpose.partial_kv_sums and call.plan.grad_reduce_dtype is not None:
        grad_k, grad_v = (g.to(call.plan.grad_reduce_dtype) for g in (grad_k, grad_v))
    grad_k, grad_v = transpose.scatter_sum([grad_k, grad_v], what="Ulysses transpose of the gradients of k and v")
    if grad_sink is not None and inputs.sink is not None:
        heads = torch.arange(transpose.local_heads.start, transpose.local_heads.stop, device=grad_sink.device)
        grad_sink = grad_sink.new_zeros(inputs.sink.shape).index_copy_(0, heads, grad_sink)
    return Grads(q=grad_q, k=grad_k.to(inputs.k.dtype), v=grad_v.to(inputs.v.dtype), captured=grads.captured), grad_sink


def _backward_steps(call: ShardedCall, tensors: BackwardTensors, *, keep_kv_wide: bool) -> tuple[Grads, Tensor | None]:
    inputs, needs, lse = tensors.inputs, tensors.needs, tensors.lse
    q = inputs.q
    assert call.setup is not None
    _, schedule, capabilities, _, step_calls = call.setup
    captured, group = call.captured_here, call.kv_group(call.setup)
    may_overlap = overlap = False
    if q.is_cuda and group is not None and group.any_stream:
        may_overlap, overlap = step_calls.may_overlap(tuple(needs), partial(call.steps_may_overlap, inputs, needs))
    layouts = backward_layouts(tensors, captured, call.scale, may_overlap=may_overlap)
    calls = step_calls.unprepared() if is_captured(q) else step_calls.of_layouts(layouts)
    grad_q, delta, norm = calls.row_terms(tensors)
    grad_sink = sink_gradient(inputs.sink, lse, delta)
    exchange = call.kv_exchange(call.setup, group, inputs, backward=True)
    terms = BackwardInputs(
        inputs=AttentionInputs(q=q, k=inputs.k, v=inputs.v), out=tensors.out, lse=lse, grad_out=tensors.grad_out, grad_lse=tensors.grad_lse,
        needs=needs, delta=delta, norm=norm,
    )  # fmt: skip
    streams = StepStreams(q, two=overlap)
    sums = GradientSums(
        inputs, needs, exchange, schedule, streams, calls, grad_q=grad_q, return_dtype=call.grad_kv_dtype(q.dtype),
        writes_once=capabilities.rounds_kv_grads_once,
    )  # fmt: skip
    # By batch row, where batch rows are laid out differently.
    terms_by_row = [terms] if call.plan.batch_layouts == 1 else [_batch_row(terms, r) for r in range(len(q))]
    with streams:
        for i, step in enumerate(schedule.steps):
            streams.use(i)
            step_kv = exchange.wait(i)
            streams.use(i + 1)
            exchange.prepare(i + 1)
            streams.use(i)
            # The first step may have to wait for a transfer, and nothing follows the last one. Not `overlap`: the first call must sum in
            # the same order as later ones.
            concurrent = may_overlap and bool(step.exchanges) and step is not schedule.steps[-1]
            buffer = sums.buffer(step)
            for r, (tiles, kv) in enumerate(zip(step.tiles, step_kv, strict=True)):
                into, scattered = sums.destination(tiles, r, buffer)
                if tiles.empty:
                    grads = into.views()
                    grads.k.zero_()
                    grads.v.zero_()
                else:
                    work = partial(call.work, tiles, r, backward=True, concurrent=concurrent)
                    calls.backward((i, r), terms_by_row[r], kv, work, captured, into)
                if scattered is not None and tiles.kv_rows is not None:
                    tiles.kv_rows.write_(buffer, scattered)
            exchange.send(i + 1)
            sums.send(i, step, buffer)
        streams.use(0)
        return sums.finish(keep_kv_wide=keep_kv_wide), grad_sink


def _batch_row(tensors: BackwardInputs, row: int) -> BackwardInputs:
    """The tensors of one batch row."""
    inputs, rows = tensors.inputs, slice(row, row + 1)
    grad_lse, delta, norm = (None if t is None else t[rows] for t in (tensors.grad_lse, tensors.delta, tensors.norm))
    return BackwardInputs(
        inputs=AttentionInputs(q=inputs.q[rows], k=inputs.k[rows], v=inputs.v[rows]), out=tensors.out[rows], lse=tensors.lse[rows],
        grad_out=tensors.grad_out[rows], grad_lse=grad_lse, needs=tensors.needs, delta=delta, norm=norm,
    )  # fmt: skip


def _local_heads(sink: Tensor | None, transpose: UlyssesTranspose) -> Tensor | None:
    return None if sink is None else sink[transpose.local_heads.start : transpose.local_heads.stop]
