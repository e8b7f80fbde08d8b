"""Steps of sharded calls that repeat: a step launches its kernels at the addresses of this call's tensors.

Legend as in `longspan._kernels.protocol`; roles as in `longspan._kernels.hopper.prepared`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.buffers import prefill
from longspan._kernels.gpu.prepared_launch import PreparedLaunch, unhooked_stream
from longspan._kernels.gpu.row_terms import is_padded
from longspan._kernels.gpu.workspace import take_flag
from longspan._kernels.hopper.gqa_split import head_parts_of
from longspan._kernels.hopper.isolation import isolates, isolation_enabled
from longspan._kernels.hopper.passes import HopperCall, RowGrads, row_terms_launch
from longspan._kernels.hopper.prepared import (
    OnDevice,
    PreparedPass,
    allocator_like,
    contiguous_allocator,
    distinct,
    is_preparable,
    launch_prepared,
)
from longspan._kernels.hopper.state import HopperState
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Grads, GradTargets, KVAddresses, State, Work

_Check = tuple[PreparedLaunch, Callable[[Sequence[int]], tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class HopperForwardStep(OnDevice):
    """A prepared forward step. Roles: q, k, v, local k, local v, old out, old lse, out, lse, completed out.

    Attributes:
        target: Where out and lse are written: to new tensors, to those of the running state, or out to `HopperState.completed_out`.
        empty_completed: Makes `HopperState.completed_out`, in the step in which the first query tiles are complete.
        idle: Ranges of query rows that see no key of this step; copied from the running state where `target` is new.
    """

    kernel_pass: PreparedPass
    target: Literal["new", "state", "completed"]
    final: bool
    empty_out: Callable[[], Tensor]
    empty_lse: Callable[[], Tensor]
    empty_completed: Callable[[], Tensor] | None
    idle: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, inputs: AttentionInputs, work: Work, *, state: State | None, result: State, final: bool) -> HopperForwardStep | None:
        """The step that computed `result`; None if its launch cannot be repeated with the addresses of other tensors."""
        inputs = distinct(inputs)
        q, (local_k, local_v) = inputs.q, inputs.local_kv or (None, None)
        outs = [result.out] if state is None else [result.out, state.out]
        contiguous = result.lse.is_contiguous() and (state is None or state.lse.is_contiguous())
        if not is_preparable(inputs, work) or not contiguous or any(out.stride(3) != 1 for out in outs) or result.max_scores is not None:
            return None
        before = state.completed_out if isinstance(state, HopperState) else None
        after = result.completed_out if isinstance(result, HopperState) else None
        target: Literal["new", "state", "completed"] = "new"
        if state is not None and result.out is before:
            target = "completed"
        elif state is not None and result.out is state.out:
            target = "state"
        call = HopperCall(inputs, work)
        old = None if state is None else State(out=state.out, lse=state.lse)
        one = call.forward_pass(
            State(out=result.out, lse=result.lse), old, done=None if final or work.complete_q_tiles is None else after
        )  # fmt: skip
        old_out, old_lse = (None, None) if old is None else (old.out, old.lse)
        roles = q, inputs.k, inputs.v, local_k, local_v, old_out, old_lse, result.out, result.lse, after
        kernel_pass = PreparedPass.of(call, one, roles)
        if not kernel_pass.launch.is_compiled:
            return None
        return cls(
            kernel_pass=kernel_pass, device=q.device.index, target=target, final=final, empty_out=allocator_like(result.out),
            empty_lse=contiguous_allocator(q.shape[:3], torch.float32, q.device),
            empty_completed=allocator_like(after) if before is None and after is not None else None,
            idle=launch.idle_spans(work.table, work.q_tiles) if target == "new" else (),
        )  # fmt: skip

    def run(self, q: Tensor, kv: KVAddresses, state: State | None, score_captured: Sequence[Tensor]) -> State:
        completed, old_out, old_lse = None, 0, 0
        if state is not None:
            completed = state.completed_out if type(state) is HopperState else None
            old_out, old_lse = state.out.data_ptr(), state.lse.data_ptr()
        if self.target == "new":
            out, lse = self.empty_out(), self.empty_lse()
            for start, stop in self.idle:
                prefill(State(out=out, lse=lse).rows(start, stop), None if state is None else state.rows(start, stop))
        else:
            assert state is not None
            out, lse = state.out, state.lse
            if self.target == "completed":
                assert completed is not None
                out = completed
        if self.empty_completed is not None:
            completed = self.empty_completed()
        addresses = (
            q.data_ptr(), *kv, old_out, old_lse, out.data_ptr(), lse.data_ptr(), 0 if completed is None else completed.data_ptr()
        )  # fmt: skip
        self.kernel_pass(unhooked_stream(self.device), addresses, [t.data_ptr() for t in score_captured])
        return State(out=out, lse=lse) if self.final else HopperState(out=out, lse=lse, completed_out=completed)


@dataclass(frozen=True, kw_only=True, eq=False)
class HopperRowTerms(OnDevice):
    """A prepared launch of `row_terms_kernel`, once per backward pass."""

    launch: PreparedLaunch
    isolated: bool
    empty_dq: Callable[[], Tensor]
    empty_rows: Callable[[], Tensor]

    @classmethod
    def of(cls, tensors: BackwardInputs, zeroed: Tensor) -> HopperRowTerms | None:
        """The launch that computed `tensors.delta` and `tensors.norm`."""
        lse, norm, delta = tensors.lse, tensors.norm, tensors.delta
        if norm is None or delta is None or tensors.grad_lse is not None or not lse.is_contiguous() or lse.shape[2] % 4:
            return None
        launched = row_tensors(tensors, zeroed, norm, delta)
        prepared, isolated = row_terms_launch(zeroed.shape, launched), launched["q_ptr"] is not None
        if not prepared.is_compiled:
            return None
        return cls(
            launch=prepared, isolated=isolated, device=lse.device.index, empty_dq=allocator_like(zeroed), empty_rows=allocator_like(norm)
        )  # fmt: skip

    def run(self, q: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, delta, norm = self.empty_dq(), self.empty_rows(), self.empty_rows()
        of_rows = out.data_ptr(), grad_out.data_ptr(), lse.data_ptr(), norm.data_ptr(), delta.data_ptr(), dq.data_ptr()
        self.launch.launch_at((q.data_ptr(), *of_rows) if self.isolated else of_rows)
        return dq, delta, norm


@dataclass(frozen=True, kw_only=True, eq=False)
class HopperBackwardStep(OnDevice):
    """A prepared backward step: dQ (if `dq` is not None), then dK and dV with or without dQ, then the sum of their parts.

    Roles: q, k, v, grad_out, norm, delta, dq, dk, dv, local k, local v, flag (`hopper.isolation`). `empty_parts`: make dK and dV in `parts`
    parts, where the query heads of a KV head are divided among CTAs. `checks`: set the flag, by the roles of their tensors.
    """

    checks: tuple[_Check, ...]

    dq: PreparedPass | None
    dkdv: PreparedPass
    parts: int
    empty_parts: tuple[Callable[[], Tensor], Callable[[], Tensor]] | None

    @classmethod
    def of(
        cls, tensors: BackwardInputs, work: Work, *, into: Grads, one_pass: bool, ordered: bool
    ) -> HopperBackwardStep | None:  # fmt: skip
        inputs, grad_out = distinct(tensors.inputs), tensors.grad_out.detach()
        norm, delta = tensors.norm, tensors.delta
        if norm is None or delta is None or not is_padded(norm) or not is_padded(delta) or not launch.facts(work.q_tiles).aligned:
            return None
        if not is_preparable(inputs, work) or not launch.describable(grad_out):
            return None
        (local_k, local_v), parts = inputs.local_kv or (None, None), head_parts_of(inputs.q, inputs.v, work)
        call, dk, dv, empty_parts = HopperCall(inputs, work), into.k, into.v, None
        if parts > 1:
            dk, dv = (torch.empty((t.shape[0], t.shape[1] * parts, *t.shape[2:]), dtype=torch.float32, device=t.device) for t in (dk, dv))
            empty_parts = allocator_like(dk), allocator_like(dv)
        flag = torch.empty(1, dtype=torch.int32, device=norm.device) if isolates(work) else None
        roles = inputs.q, inputs.k, inputs.v, grad_out, norm, delta, into.q, dk, dv, local_k, local_v, flag
        dq, row_grads = None, RowGrads(grad_out, norm, delta, flag)
        checks: tuple[_Check, ...] = ()
        if flag is not None:
            role = {id(t): i for i, t in enumerate(roles)}
            checks = tuple(
                (check, itemgetter(*(role[id(t)] for t in checked.values() if t is not None)))
                for check, checked in call.unbounded(norm, delta, flag, scanned=not one_pass)
            )
        if not one_pass:
            dq = PreparedPass.of(call, call.dq_pass(row_grads, into.q, into.captured, add=True), roles)
        total = into.q if one_pass else None
        dkdv = PreparedPass.of(call, call.dkdv_pass(row_grads, dk, dv, total, ordered=ordered, rounded=False), roles)
        if not dkdv.launch.is_compiled or (dq is not None and not dq.launch.is_compiled) or not all(c.is_compiled for c, _ in checks):
            return None
        return cls(checks=checks, dq=dq, dkdv=dkdv, device=inputs.q.device.index, parts=parts, empty_parts=empty_parts)

    def run(self, tensors: BackwardInputs, kv: KVAddresses, into: GradTargets, score_captured: Sequence[Tensor]) -> None:
        norm, delta, parts = tensors.norm, tensors.delta, None
        assert norm is not None and delta is not None
        dk, dv = into.k, into.v
        if self.empty_parts is not None:
            parts = self.empty_parts[0](), self.empty_parts[1]()
            dk, dv = parts[0].data_ptr(), parts[1].data_ptr()
        norm_at = norm.data_ptr()
        addresses: tuple[int, ...] = (
            tensors.inputs.q.data_ptr(), kv.k, kv.v, tensors.grad_out.data_ptr(), norm_at, delta.data_ptr(), into.q.data_ptr(), dk, dv,
            kv.local_k, kv.local_v,
        )  # fmt: skip
        stream, captured = unhooked_stream(self.device), [t.data_ptr() for t in score_captured]
        if self.checks:
            flag, _pool = take_flag(self.dkdv.launch.device, stream)
            addresses = *addresses, flag
            for check, pick in self.checks:
                launch_prepared(check, stream, pick(addresses))
        if self.dq is not None:
            self.dq(stream, addresses, captured, [g.data_ptr() for g in into.captured if g is not None] or (norm_at,))
        self.dkdv(stream, addresses, captured)
        if parts is not None:
            grads = into.views()
            for summed, by_part in zip((grads.k, grads.v), parts, strict=True):
                summed.copy_(by_part.unflatten(1, (-1, self.parts)).sum(2))


def row_tensors(tensors: BackwardInputs, zeroed: Tensor, norm: Tensor, delta: Tensor) -> dict[str, Tensor | None]:
    """The tensors of `row_terms_launch` for a sharded call, where all steps add to dQ: `zeroed`."""
    grad_lse = tensors.grad_lse
    return {
        "q_ptr": tensors.inputs.q if isolation_enabled() else None, "out_ptr": tensors.out, "do_ptr": tensors.grad_out,
        "lse_ptr": tensors.lse.contiguous(), "grad_lse_ptr": None if grad_lse is None else grad_lse.float().contiguous(),
        "norm_ptr": norm, "delta_ptr": delta, "dq_ptr": zeroed, "counters_ptr": None,
        "k_ptr": None, "v_ptr": None, "flag_ptr": None,
    }  # fmt: skip
