"""Attention whose rows have the same bits in every batch, packing, chunk and layout (`longspan.invariant()`).

    pass          a rank computes     from                                order of each sum
    forward, dQ   its own queries     KV of all ranks, gathered           blocks of KV of the row's document, by position
    dK, dV        its own KV          q, dO, lse, delta of all ranks      blocks of queries of the document, by position

Each result is computed by one rank in one kernel call, so ranks merge nothing: a rank count, a layout or a strategy decides only where a
row is computed. Kernels (`Work.invariant`) compute each row independently of the other rows of its tile. Blocks are counted from the start
of the row's document (`longspan._engine.document_tiles`), so packing does not matter either.

Legend as in `longspan._kernels.protocol`; Q and K are those of this rank's shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspan._engine.document_tiles import DocumentTiles, RankTiles
from longspan._engine.one_device import mask_tables
from longspan._engine.plan_cache import plan_cache
from longspan._engine.sink import sink_state, sink_terms
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors
from longspan._kernels.invariant_tiles import row_delta, tree_sum
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Grads, Kernel, State, Work, like_query
from longspan._kernels.registry import KernelCall, NotSupported, choose
from longspan._masks.program import Program
from longspan._plan.plan_data import PlanData
from longspan._plan.sharding import unshard


def forward(inputs: CallTensors, options: CallOptions) -> State:
    """out in the dtype of q, lse, and max scores if asked for, on one device."""
    call = _Call.on_one_device(inputs, options)
    return call.forward(inputs, _sequence_tiles(inputs, options))


def backward(tensors: BackwardTensors, options: CallOptions) -> tuple[Grads, Tensor | None]:
    """Gradients of q, k, v in their dtypes, of captured tensors, and of the sink, on one device."""
    inputs = tensors.inputs
    call, tiles = _Call.on_one_device(inputs, options), _sequence_tiles(inputs, options)
    kernel = call.kernel(inputs, tiles)
    terms = _terms(kernel, tensors)
    return call.backward(kernel, terms, tiles), _sink_gradient(inputs.sink, terms)


def forward_over_mesh(plan: PlanData, inputs: CallTensors, options: CallOptions) -> State:
    """`forward` of this rank's queries. Gathers k and v."""
    k, v = _gathered(plan, 1, inputs.k, inputs.v)
    return _Call.over_mesh(plan, inputs, options).forward(replace(inputs, k=k, v=v), _rank_tiles(plan, inputs).by_query)


def backward_over_mesh(plan: PlanData, tensors: BackwardTensors, options: CallOptions) -> tuple[Grads, Tensor | None]:
    """Gradients of this rank's q, k, v and its share of those of captured tensors. The sink's gradient is rank 0's share, else 0.

    Gathers k and v for dQ; q, the gradient of out, lse and delta for dK and dV.
    """
    inputs, tiles = tensors.inputs, _rank_tiles(plan, tensors.inputs)
    call = _Call.over_mesh(plan, inputs, options)
    kernel = call.kernel(inputs, tiles.by_query)
    terms = _terms(kernel, tensors)
    assert terms.delta is not None
    k, v = _gathered(plan, 1, inputs.k, inputs.v)
    of_q = call.backward(kernel, replace(terms, inputs=AttentionInputs(q=inputs.q, k=k, v=v), side="q"), tiles.by_query)
    del k, v
    q, grad_out = _gathered(plan, 0, inputs.q, tensors.grad_out)
    lse, delta = (x[..., 0] for x in _gathered(plan, 0, tensors.lse[..., None], terms.delta[..., None]))
    all_terms = BackwardInputs(
        inputs=AttentionInputs(q=q, k=inputs.k, v=inputs.v), out=grad_out, lse=lse, grad_out=grad_out,
        needs=[False] * len(tensors.needs), delta=delta, side="kv",
    )  # fmt: skip
    of_kv = call.backward(kernel, all_terms, tiles.by_kv)
    grad_sink = _sink_gradient(inputs.sink, all_terms)
    if grad_sink is not None and plan.mesh.rank > 0:
        grad_sink = torch.zeros_like(grad_sink)  # the sum over ranks has the bits of rank 0
    return Grads(q=of_q.q, k=of_kv.k, v=of_kv.v, captured=of_q.captured), grad_sink


def check_over_mesh(plan: PlanData, inputs: CallTensors, options: CallOptions, needs: Sequence[bool] | None) -> None:
    """Raise whatever a kernel would raise for this call. needs: as in `BackwardTensors`, None in a forward pass."""
    call, tiles = _Call.over_mesh(plan, inputs, options), _rank_tiles(plan, inputs)
    for parts in (tiles.by_query, tiles.by_kv):
        kernel = call.kernel(inputs, parts)
        for part in parts:
            kernel.check(_part_inputs(inputs, part), call.work(part, backward=True), needs=needs or ())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """The programs of a call and their captured tensors, on the device of the queries."""

    options: CallOptions
    mask: Program | None
    mask_captured: Sequence[Tensor]
    score_captured: Sequence[Tensor]
    mask_is_fixed: bool

    @classmethod
    def on_one_device(cls, inputs: CallTensors, options: CallOptions) -> _Call:
        return cls._of(inputs, options, options.spec.mask, inputs.mask_captured, fixed=False)

    @classmethod
    def over_mesh(cls, plan: PlanData, inputs: CallTensors, options: CallOptions) -> _Call:
        return cls._of(inputs, options, plan.mask.program, plan_cache.captured(plan, inputs.q.device), fixed=True)

    @classmethod
    def _of(cls, inputs: CallTensors, options: CallOptions, mask: Program | None, captured: Sequence[Tensor], *, fixed: bool) -> _Call:
        mask_captured, score_captured = ([t.to(inputs.q.device) for t in ts] for ts in (captured, inputs.score_captured))
        return cls(options=options, mask=mask, mask_captured=mask_captured, score_captured=score_captured, mask_is_fixed=fixed)

    def work(self, part: DocumentTiles, *, backward: bool) -> Work:
        spec = self.options.spec
        return Work(
            table=part.table,
            q_tiles=part.q_tiles,
            kv_tiles=part.kv_tiles,
            scale=self.options.scale,
            mask=self.mask,
            mask_captured=self.mask_captured,
            score=spec.score,
            score_captured=self.score_captured,
            joint=spec.joint(self.score_captured) if backward else None,
            first_batch=part.row or 0,
            mask_is_fixed=self.mask_is_fixed,
            invariant=True,
        )

    def kernel(self, inputs: CallTensors, tiles: Sequence[DocumentTiles]) -> Kernel:
        """The kernel for these tiles. Raises NotSupported where none supports them."""
        calls = [KernelCall(_part_inputs(inputs, part), self.work(part, backward=True)) for part in tiles]
        kernel, capabilities = choose(self.options.spec.kernel, calls)
        if capabilities.unsupported is not None:
            raise NotSupported(f"longspan.invariant(): no kernel supports this call: {capabilities.unsupported}")
        return kernel

    def forward(self, inputs: CallTensors, tiles: Sequence[DocumentTiles]) -> State:
        kernel, max_scores = self.kernel(inputs, tiles), self.options.max_scores
        states = []
        for part in tiles:
            part_inputs = _part_inputs(inputs, part)
            state = sink_state(inputs.sink, part_inputs.q, part_inputs.v, max_scores=max_scores)
            work = self.work(part, backward=False)
            states.append(kernel.forward(part_inputs, work, state=state, final=True, max_scores=max_scores))
        if len(states) == 1:
            return states[0]
        out = like_query(inputs.q, inputs.v.shape[3], inputs.q.dtype)
        torch.cat([state.out for state in states], out=out)
        row_max = [state.max_scores for state in states if state.max_scores is not None]
        return State(out=out, lse=torch.cat([state.lse for state in states]), max_scores=torch.cat(row_max) if row_max else None)

    def backward(self, kernel: Kernel, terms: BackwardInputs, tiles: Sequence[DocumentTiles]) -> Grads:
        """The gradients that `terms.side` names, in the dtypes of q, k and v."""
        parts = [kernel.backward(_part_terms(terms, part), self.work(part, backward=True), wide=False) for part in tiles]
        if len(parts) == 1:
            return parts[0]
        captured = [None if grads[0] is None else torch.stack(grads).sum(0) for grads in zip(*(p.captured for p in parts), strict=True)]
        q, k, v = (torch.cat(grads) for grads in zip(*((p.q, p.k, p.v) for p in parts), strict=True))
        return Grads(q=q, k=k, v=v, captured=captured)


def _sequence_tiles(inputs: CallTensors, options: CallOptions) -> tuple[DocumentTiles, ...]:
    return mask_tables(inputs, options).by_document(inputs.mask_captured)


def _rank_tiles(plan: PlanData, inputs: CallTensors) -> RankTiles:
    batch = inputs.q.shape[0] if plan.mask.per_batch else 1
    heads = inputs.q.shape[1] if plan.mask.per_head else 1
    return plan_cache.rank_tiles(plan, batch, heads)


def _part_inputs(inputs: CallTensors, part: DocumentTiles) -> AttentionInputs:
    return AttentionInputs(q=inputs.q[part.batch], k=inputs.k[part.batch], v=inputs.v[part.batch])


def _part_terms(terms: BackwardInputs, part: DocumentTiles) -> BackwardInputs:
    """The batch rows of these tiles."""
    rows, inputs = part.batch, terms.inputs
    return replace(
        terms,
        inputs=AttentionInputs(q=inputs.q[rows], k=inputs.k[rows], v=inputs.v[rows]),
        out=terms.out[rows],
        lse=terms.lse[rows],
        grad_out=terms.grad_out[rows],
        delta=None if terms.delta is None else terms.delta[rows],
    )


def _terms(kernel: Kernel, tensors: BackwardTensors) -> BackwardInputs:
    """The tensors of a backward pass, with delta, of which the gradient of lse is a part."""
    inputs = tensors.inputs
    delta = row_delta if inputs.q.device.type == "cpu" else kernel.delta  # GPU kernels sum each row in a fixed order
    return BackwardInputs(
        inputs=AttentionInputs(q=inputs.q, k=inputs.k, v=inputs.v),
        out=tensors.out,
        lse=tensors.lse,
        grad_out=tensors.grad_out,
        needs=tensors.needs,
        delta=delta(tensors.out, tensors.grad_out, tensors.grad_lse),
    )


def _sink_gradient(sink: Tensor | None, terms: BackwardInputs) -> Tensor | None:
    """The sink's gradient [H], summed over the batch and all queries in a fixed order."""
    if sink is None:
        return None
    assert terms.delta is not None
    return -tree_sum(sink_terms(sink, terms.lse, terms.delta).transpose(0, 1).flatten(1))[:, 0]


def _gathered(plan: PlanData, side: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two shards of one shape but for the last dim, of queries (side 0) or KV (side 1), as whole tensors in the order of positions."""
    place = plan_cache.places(plan, side, a.device)
    whole = unshard(torch.cat([a, b], -1), 2, plan.layouts[side], plan.mesh, place)
    return whole[..., : a.shape[-1]].contiguous(), whole[..., a.shape[-1] :].contiguous()
