"""Attention over a mesh with keys chosen at run time: `attention(q, k, v, plan=plan, mask=selected(…))`.

The plan fixes who owns which tokens and the rest of the mask. Its schedule is not used: which KV moves follows from the choice at each call
(`longspan._engine.selected_exchange`). Each rank has the choice of its own queries. It computes over local KV while the chosen KV is in
flight, then over the received KV. The backward pass moves the same KV again, and returns its gradients to their owner ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longspan._comm.agreement import Agreement, CallDescription, raising_on_all_ranks
from longspan._engine.call_agreement import check, described_fields
from longspan._engine.plan_cache import plan_cache
from longspan._engine.selected_exchange import KVMoves, add_returned_, exchange_requests, kv_moves, needed_blocks, return_grads, send_kv
from longspan._engine.selected_grid import SelectionGrid
from longspan._engine.sink import sink_gradient, sink_state
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, ComputesNorm, Grads, Kernel, State, Work, state_dtype
from longspan._kernels.registry import KernelCall, NotSupported, choose
from longspan._masks.algebra import Mask
from longspan._masks.extent import AttentionSizes
from longspan._masks.joint import Joint
from longspan._masks.selected import Selected
from longspan._masks.selected_shard import PairForm, captured_in_order, chosen_bits, pair_program, selected_table, tile_kinds
from longspan._plan.plan_data import PlanData
from longspan._torch_modes import without_user_defaults

MAX_BITS_BYTES = 1 << 32  # of one rank's choice while a pass runs: rows of queries × blocks of keys / 8
_KERNELS = "'auto', 'cpu', 'triton' or 'hopper'"


def checked_selection(plan: PlanData, mask: Mask, inputs: CallTensors, options: CallOptions) -> Selected:
    """The selection of a call with a plan, checked against this rank's shards."""
    q, k = inputs.q, inputs.k
    if not isinstance(mask, Selected):
        raise ValueError(
            f"attention: expected mask=longspan.selected(…) alone with plan=…, got {mask}: make the plan for the rest of the mask, and "
            "pass the selection by itself"
        )
    if len(plan.mesh.axes) > 1:
        raise ValueError("mask=longspan.selected(…): expected a plan over a mesh of one axis, got two; make the plan for a flattened mesh")
    if plan.batch_layouts > 1:
        raise ValueError(
            "mask=longspan.selected(…): expected a plan that lays out all batch rows alike, got one layout per batch row; "
            "make the plan with layout='contiguous' or another layout without batch rows"
        )
    if options.spec.invariant:
        raise ValueError("mask=longspan.selected(…) with plan=… is not supported in longspan.invariant()")
    if options.spec.kernel not in ("auto", "cpu", "triton", "hopper"):
        raise NotSupported(f"kernel {options.spec.kernel!r} does not support mask=longspan.selected(…) with plan=…: expected {_KERNELS}")
    if mask.indices.device != q.device:
        raise ValueError(f"mask {mask}: expected indices on the device of q, {q.device}, got {mask.indices.device}")
    check(plan, q, k, inputs.v)
    shard = AttentionSizes(q_len=q.shape[2], kv_len=plan.kv_len, batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1])
    chosen = mask.checked_shard(shard, rows=len(_grid(plan, mask).rows), rank=plan.mesh.rank)
    blocks = _grid(plan, mask).blocks
    size = 4 * chosen.indices.shape[:3].numel() * -(-blocks // 32)
    if size > MAX_BITS_BYTES:
        raise ValueError(
            f"mask {mask}: a bit for each row of queries and each of {blocks} blocks of keys takes {size / 2**30:.1f} GiB on rank "
            f"{plan.mesh.rank}, expected at most {MAX_BITS_BYTES / 2**30:g} GiB; use larger blocks, larger rows of queries or more ranks"
        )
    return chosen


def _grid(plan: PlanData, mask: Selected) -> SelectionGrid:
    sizes = (mask.granularity, mask.q_granularity)
    return plan_cache.selection_grid(plan, sizes, lambda: SelectionGrid.of(plan, *sizes))


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardChoice:
    """The choice of one rank's queries, as kernels take it. Made without communication, in both passes.

    Attributes:
        indices: int32 [B or 1, choices, rows, k], rows ascending.
        heads: Query heads.
    """

    plan: PlanData
    grid: SelectionGrid
    form: PairForm
    indices: Tensor
    heads: int

    @classmethod
    def of(cls, plan: PlanData, selection: Selected, heads: int) -> ShardChoice:
        """The choice of a checked selection."""
        grid, indices = _grid(plan, selection), selection.indices
        if grid.ascending is not None:
            indices = indices[:, :, grid.ascending]
        form = PairForm(
            granularity=selection.granularity,
            q_granularity=selection.q_granularity,
            heads_per_choice=selection.heads_per_choice or 1,
            per_batch=indices.shape[0] > 1,
            per_choice=indices.shape[1] > 1,
        )
        return cls(plan=plan, grid=grid, form=form, indices=indices, heads=heads)

    @cached_property
    def _kinds(self) -> Tensor:
        device = self.indices.device
        rows, spans = self.grid.row_spans.to(device), self.grid.block_spans.to(device)
        return tile_kinds(self.indices, self.grid.blocks, rows, spans).cpu()

    @cached_property
    def _program(self) -> tuple[Any, list[Tensor]]:
        device = self.indices.device
        program, origins = pair_program(self.plan.mask.program, self.form)
        bits = chosen_bits(self.indices, self.grid.blocks)
        return program, captured_in_order(
            origins, plan_cache.captured(self.plan, device), bits, self.grid.local_row.to(device), self.form
        )  # fmt: skip

    def work(self, kv_tiles: Tensor, options: CallOptions, score_captured: Sequence[Tensor], *, joint: Joint | None = None) -> Work:
        """The chosen pairs of this rank's queries with the KV of these coarse tiles, which follow each other in a buffer."""
        program, captured = self._program
        return Work(
            table=selected_table(self._kinds[..., kv_tiles], self.grid.table(kv_tiles), self.heads),
            q_tiles=self.grid.q_tiling,
            kv_tiles=self.grid.tiling(kv_tiles),
            scale=options.scale,
            mask=program,
            mask_captured=captured,
            mask_is_checked=True,  # lookups of the plan's mask: by `plan_work`; the others are in bounds by construction
            score=options.spec.score,
            score_captured=[t.to(self.indices.device) for t in score_captured],
            joint=joint,
        )

    def plan_work(self, options: CallOptions) -> Work | None:
        """The plan's mask alone over this rank's queries, for checks of its lookups. None if the mask captures no tensor."""
        mask, captured = self.plan.mask.program, plan_cache.captured(self.plan, self.indices.device)
        if mask is None or not captured:
            return None
        table, kv_tiles = self.grid.every_tile
        return Work(
            table=table, q_tiles=self.grid.q_tiling, kv_tiles=kv_tiles, scale=options.scale, mask=mask, mask_captured=captured
        )  # fmt: skip


@without_user_defaults()
def forward(inputs: CallTensors, options: CallOptions, plan: PlanData, selection: Selected) -> tuple[Tensor, Tensor, KVMoves, int]:
    """(out, lse, the moves that the backward pass repeats, `Agreement.number`). selection: from `checked_selection`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    with raising_on_all_ranks(plan.mesh):
        choice = ShardChoice.of(plan, selection, q.shape[1])
        local = choice.work(choice.grid.local_tiles, options, inputs.score_captured)
        whole = AttentionInputs(q=q, k=k, v=v)
        kernel, _ = choose(options.spec.kernel, [KernelCall(whole, local)])
        for work in (choice.plan_work(options), local):
            if work is not None:
                kernel.check(whole, work)
        needed = needed_blocks(choice.indices, choice.grid.blocks, k.shape[1]).cpu()
    agreement = Agreement(plan.mesh, _description(plan, options, inputs, selection, None))
    with agreement:
        agreement.wait()
        group = plan.mesh.group(0)
        requests = exchange_requests(group, choice.grid, needed)
        moves = kv_moves(choice.grid, needed, requests, (k.shape[0], k.shape[1]))
        in_flight = send_kv(group, moves, k, v, what="forward pass")
        received = choice.work(moves.tiles, options, inputs.score_captured) if len(moves.tiles) else None
        state = sink_state(inputs.sink, q, v, max_scores=False)
        if received is None or len(local.table.first):
            state = _step(kernel, AttentionInputs(q=q, k=k, v=v), local, state, final=received is None)
        received_k, received_v = in_flight.wait()
        if received is not None:
            state = _step(kernel, AttentionInputs(q=q, k=received_k, v=received_v), received, state, final=True)
    assert state is not None
    return state.out, state.lse.contiguous(), moves, agreement.number


def _step(kernel: Kernel, inputs: AttentionInputs, work: Work, state: State | None, *, final: bool) -> State:
    return kernel.forward(inputs, work, state=state, final=final, max_scores=False)


@without_user_defaults()
def backward(
    tensors: BackwardTensors, options: CallOptions, plan: PlanData, selection: Selected, moves: KVMoves, *, forward_number: int
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, the sink if there is one, and the captured tensors that need one: this rank's share."""
    inputs = tensors.inputs
    q, k, v, wide = inputs.q, inputs.k, inputs.v, state_dtype(inputs.q.dtype)
    whole = AttentionInputs(q=q, k=k, v=v)
    with raising_on_all_ranks(plan.mesh):
        joint = options.spec.joint(inputs.score_captured)
        choice = ShardChoice.of(plan, selection, q.shape[1])
        local = choice.work(choice.grid.local_tiles, options, inputs.score_captured, joint=joint)
        received = choice.work(moves.tiles, options, inputs.score_captured, joint=joint) if len(moves.tiles) else None
        kernel, _ = choose(options.spec.kernel, [KernelCall(whole, local)])
        for work in (local, received):
            if work is not None:
                kernel.check(whole, work, needs=tensors.needs)
    agreement = Agreement(plan.mesh, _description(plan, options, inputs, selection, tensors.needs), forward=forward_number)
    with agreement:
        agreement.wait()
        group = plan.mesh.group(0)
        in_flight = send_kv(group, moves, k, v, what="backward pass")
        delta = kernel.delta(tensors.out, tensors.grad_out, tensors.grad_lse)
        norm = kernel.norm(tensors.lse) if isinstance(kernel, ComputesNorm) else None
        grad_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        captured = [
            torch.zeros(c.shape, dtype=wide, device=q.device) if need else None for c, need in zip(inputs.score_captured, tensors.needs)
        ]

        def step(step_k: Tensor, step_v: Tensor, work: Work | None) -> tuple[Tensor, Tensor]:
            """Gradients of the KV of one step, in the dtype of lse."""
            grads = tuple(torch.zeros(t.shape, dtype=wide, device=t.device) for t in (step_k, step_v))
            if work is not None and len(work.table.first):
                into = Grads(q=grad_q, k=grads[0], v=grads[1], captured=captured)
                kernel.backward(BackwardInputs(
                    inputs=AttentionInputs(q=q, k=step_k, v=step_v), out=tensors.out, lse=tensors.lse, grad_out=tensors.grad_out,
                    grad_lse=tensors.grad_lse, needs=tensors.needs, delta=delta, norm=norm,
                ), work, wide=True, into=into)  # fmt: skip
            return grads[0], grads[1]

        local_grads = step(k, v, local)
        received_grads = step(*in_flight.wait(), received)
        rows, pending = return_grads(group, moves, received_grads, plan.grad_reduce_dtype or wide)
        pending.wait()
        add_returned_(local_grads, rows, moves)
    grads = Grads(q=grad_q.to(q.dtype), k=local_grads[0].to(k.dtype), v=local_grads[1].to(v.dtype), captured=captured)
    return tensors.flat_grads(grads, sink_gradient(inputs.sink, tensors.lse, delta))


def _description(
    plan: PlanData, options: CallOptions, inputs: CallTensors, selection: Selected, needs: Sequence[bool] | None
) -> CallDescription:  # fmt: skip
    """The description of a call, equal on all ranks. The number of entries per row may differ between ranks."""
    batch, choices = selection.indices.shape[:2]
    form = (selection.granularity, selection.q_granularity, batch, choices)
    q, k, v = inputs.q, inputs.k, inputs.v
    key = (
        "selected", form, q.shape, k.shape, v.shape, q.dtype, q.device, options.spec.handle, options.scale,
        None if inputs.sink is None else (inputs.sink.shape, inputs.sink.dtype), tuple((t.shape, t.dtype) for t in inputs.score_captured),
        None if needs is None else tuple(needs),
    )  # fmt: skip

    def describe() -> CallDescription:
        text = f"{form[0]} keys, {form[1]} queries, {choices} choices, batch {batch}"
        kind = "attention over selected keys, forward pass" if needs is None else "attention over selected keys, backward pass"
        return CallDescription(kind, {**described_fields(plan, options, inputs), "selection": text})

    return plan_cache.description(plan, key, describe)
