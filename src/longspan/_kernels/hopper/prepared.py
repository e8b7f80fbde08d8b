"""Passes of calls that repeat: all arguments but addresses are known, so that a pass allocates its results and launches.

Legend as in `longspan._kernels.protocol`. A call has a fixed list of tensors, its roles; each launch takes the addresses of some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import itemgetter, mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.buffers import empty_grads, empty_state, prefill
from longspan._kernels.gpu.driver_launch import fill_with_zeros
from longspan._kernels.gpu.launch_call import Pass
from longspan._kernels.gpu.launch_sequence import LaunchAll, launch_sequence
from longspan._kernels.gpu.prepared_launch import PreparedLaunch, unhooked_stream
from longspan._kernels.gpu.row_terms import empty_padded_rows
from longspan._kernels.gpu.workspace import take_flag, take_zeros
from longspan._kernels.hopper.gqa_split import head_parts_of
from longspan._kernels.hopper.isolation import isolates
from longspan._kernels.hopper.passes import HopperCall, RowGrads, round_tensors
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, State, Work
from longspan._torch_private import current_cuda_device, empty_on_current_device

_ROW_ALIGNMENT = 32  # floats: arrays of the workspace begin at multiples of 128 bytes


def is_preparable(inputs: AttentionInputs, work: Work) -> bool:
    """Whether kernels read the tensors themselves, not copies of them."""
    captured = (*work.mask_captured, *work.score_captured)
    tensors = inputs.q, inputs.k, inputs.v, *(inputs.local_kv or ())
    return all(map(launch.describable, tensors)) and all(t.is_contiguous() for t in captured)


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedPass:
    """A launch over tiles. `pick`: from the addresses of a call by role, those of the tensors of its signature.

    `captured`: addresses of `mask_captured`, the tensors that the mask program reads. `numbers`: scale, first batch row and head.
    `takes_counter`: whether the workspace is one item counter, which the caller may provide. `zeros`: size of a workspace
    that is one array of zeros, to which all `workspace_arguments` point; 0 for other workspaces.
    """

    launch: PreparedLaunch
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    captured: tuple[int, ...]
    mask_captured: tuple[Tensor, ...]
    numbers: tuple[float, int, int]
    takes_counter: bool
    zeros: int
    workspace_arguments: int

    @classmethod
    def of(cls, call: HopperCall, one: Pass, tensors: Sequence[Tensor | None]) -> PreparedPass:
        """tensors: distinct objects, which stand for the addresses of a call."""
        role, work = {id(t): i for i, t in enumerate(tensors)}, call.work
        roles = tuple(role[id(t)] for t in one.tensors.values() if t is not None)
        captured = tuple(t.data_ptr() for t in work.mask_captured)
        numbers, prepared = (float(work.scale), work.first_batch, work.first_head), call.prepared(one)
        workspace = prepared.workspace
        assert workspace is not None
        return cls(
            launch=prepared, pick=itemgetter(*roles), captured=captured, mask_captured=tuple(work.mask_captured), numbers=numbers,
            takes_counter=sum(workspace.zeros) == 1 and not workspace.floats, zeros=workspace.pooled_zeros,
            workspace_arguments=workspace.passed,
        )  # fmt: skip

    def __call__(
        self, stream: int | None, addresses: Sequence[int], score_captured: Sequence[int], grads: Sequence[int] = (), counter: int = 0
    ) -> None:  # fmt: skip
        """addresses: by role; the first stands for lists of captured tensors that are empty. counter: the address of an int32 zero."""
        if counter and self.takes_counter:
            workspace: Sequence[int] = (counter,)
        elif stream is not None and self.zeros:
            address, _pool = take_zeros(self.zeros, self.launch.device, stream)
            workspace = (address,) * self.workspace_arguments
        else:
            assert self.launch.workspace is not None
            workspace, _held = self.launch.workspace.addresses(stream)
        spare = addresses[:1]
        values = (
            *self.pick(addresses), *workspace, *(self.captured or spare), *(score_captured or spare), *grads, *self.numbers
        )  # fmt: skip
        by_driver = self.launch.by_driver
        if stream is None or by_driver is None:
            self.launch.launch_at(values)
        else:
            by_driver(stream, values)


def launch_prepared(prepared: PreparedLaunch, stream: int | None, values: Sequence[int | float]) -> None:
    """Launch on a stream from `unhooked_stream`, or, if it is None, wherever the launch belongs."""
    by_driver = prepared.by_driver
    if stream is None or by_driver is None:
        prepared.launch_at(values)
    else:
        by_driver(stream, values)


def _zeros(empty: Callable[[], Tensor], stream: int | None, device: int) -> Tensor:
    """A float32 tensor of zeros; by the driver where `unhooked_stream` has a stream, which takes a third of the time of torch's fill."""
    tensor = empty()
    if stream is None or not tensor.numel():
        return tensor.zero_()
    fill_with_zeros(tensor.data_ptr(), tensor.numel(), stream, device)
    return tensor


def allocator(size: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that allocates uninitialised tensors on a device, which must be current."""
    if device.type == "cuda":
        return partial(empty_on_current_device, tuple(size), tuple(strides), dtype)
    return partial(torch.empty_strided, tuple(size), tuple(strides), dtype=dtype, device=device)


def allocator_like(tensor: Tensor) -> Callable[[], Tensor]:
    """`allocator` of tensors of this shape, dtype and strides."""
    return allocator(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def contiguous_allocator(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """`allocator` of contiguous tensors."""
    strides = accumulate((max(1, n) for n in reversed(size[1:])), mul, initial=1)
    return allocator(size, tuple(strides)[::-1], dtype, device)


def distinct(inputs: AttentionInputs) -> AttentionInputs:
    """The same tensors as distinct objects: q, k and v may be one."""
    local_kv = None if inputs.local_kv is None else (inputs.local_kv[0].detach(), inputs.local_kv[1].detach())
    return AttentionInputs(q=inputs.q.detach(), k=inputs.k.detach(), v=inputs.v.detach(), local_kv=local_kv)


@dataclass(frozen=True, kw_only=True, eq=False)
class OnDevice:
    """A pass that allocates on the current device and launches there. Calling it makes its device current."""

    device: int

    def run(self, *tensors: Any, **_: Any) -> Any:
        raise NotImplementedError

    def __call__(self, *tensors: Any) -> Any:
        if current_cuda_device() == self.device:
            return self.run(*tensors)
        with torch.cuda.device(self.device):
            return self.run(*tensors)


@dataclass(frozen=True, kw_only=True, eq=False)
class HopperForward(OnDevice):
    """A prepared forward pass. Roles: q, k, v, out, lse. `idle`: ranges of query rows that see no key."""

    kernel_pass: PreparedPass
    empty_out: Callable[[], Tensor]
    empty_lse: Callable[[], Tensor]
    idle: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, inputs: AttentionInputs, work: Work) -> HopperForward | None:
        inputs = distinct(inputs)
        q, dim = inputs.q, inputs.v.shape[-1]
        result = empty_state(q, dim, q.dtype, max_scores=False)
        if not is_preparable(inputs, work) or result.out.stride(3) != 1:
            return None
        call = HopperCall(inputs, work)
        kernel_pass = PreparedPass.of(call, call.forward_pass(result, None), (q, inputs.k, inputs.v, result.out, result.lse))
        if not kernel_pass.launch.is_compiled:
            return None
        return cls(
            kernel_pass=kernel_pass, device=q.device.index, empty_out=allocator_like(result.out), empty_lse=allocator_like(result.lse),
            idle=launch.idle_spans(work.table, work.q_tiles),
        )  # fmt: skip

    def run(self, q: Tensor, k: Tensor, v: Tensor, score_captured: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        out, lse = self.empty_out(), self.empty_lse()
        for start, stop in self.idle:
            prefill(State(out=out, lse=lse).rows(start, stop), None)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()
        self.kernel_pass(unhooked_stream(self.device), addresses, [t.data_ptr() for t in score_captured] if score_captured else ())
        return out, lse


_ROLES = "q", "k", "v", "grad_out", "norm", "delta", "dq", "to_dk", "to_dv", "total", "flag"  # of a `HopperBackward`


class _BackwardLaunches(NamedTuple):
    """The launches of a `HopperBackward`."""

    row_terms: PreparedLaunch
    dq: PreparedPass | None
    dkdv: PreparedPass
    rounding: PreparedLaunch | None
    parts: bool
    isolated: bool

    def sequence(self, *, scores: int, grads: int) -> LaunchAll | None:
        """The launches by the values of `HopperBackward.run`; None if a launch needs a workspace besides an item counter.

        scores, grads: number of tensors that the score program captures, and of their gradients.
        """
        row_terms, dq, dkdv, rounding, parts, isolated = self
        if not dkdv.takes_counter or (dq is not None and not dq.takes_counter):
            return None
        masks, of_scores, of_grads = ([f"{kind}{i}" for i in range(n)] for kind, n in zip("msg", (len(dkdv.captured), scores, grads)))
        programs, numbers = (*(masks or ["q"]), *(of_scores or ["q"])), ("scale", "first_b", "first_h")
        of_rows = ["out", "grad_out", "lse", "norm", "delta", *(["total"] if dq is None else []), "counters"]
        if isolated:
            of_rows = ["q", *of_rows, *([] if dq is None else ["k", "v"]), "flag"]
        launches, values = [row_terms], [of_rows]
        if dq is not None:
            launches.append(dq.launch)
            values.append([*dq.pick(_ROLES), "counters", *programs, *(of_grads or ["norm"]), *numbers])
        launches.append(dkdv.launch)
        values.append([*dkdv.pick(_ROLES), "next_counters", *programs, *numbers])
        if rounding is not None:
            launches.append(rounding)
            rounded = ["total", "dq"] if dq is None else []
            values.append([*rounded, *(["to_dk", "dk", "to_dv", "dv"] if parts else []), "rounding_scale"])
        order = *_ROLES, "out", "lse", "counters", "next_counters", "dk", "dv", *of_scores, *of_grads, *masks
        order = *order, *(() if rounding is None else ("rounding_scale",)), *numbers
        return launch_sequence(launches, [[order.index(name) for name in names] for names in values])


@dataclass(frozen=True, kw_only=True, eq=False)
class HopperBackward(OnDevice):
    """A prepared backward pass: row terms, dQ (if `dq` is not None), dK and dV with or without dQ, rounding.

    Roles: q, k, v, grad_out, norm, delta, dq, dk, dv, total, flag. total: dQ in float32, where dK and dV are computed with it. flag: of
    `hopper.isolation`, if `isolated`.
    `sequence`: all launches, if each takes its item counter from the workspace. `last_values`: of the sequence, the same in all calls.
    `starts`: offsets in bytes of norm, delta, total, the parts of dK and of dV and the item counters in the workspace. `parts`: whether the
    kernel computes parts of dK and dV. `empty_dq`, `empty_dk`, `empty_dv`: make the gradients. `empty_captured`: the same for each tensor
    that the score program captures, None for one that gets no gradient.
    """

    row_terms: PreparedLaunch
    dq: PreparedPass | None
    dkdv: PreparedPass
    rounding: PreparedLaunch | None
    rounding_scale: float
    starts: tuple[int, int, int, int, int, int]
    empty_workspace: Callable[[], Tensor]
    empty_dq: Callable[[], Tensor]
    empty_dk: Callable[[], Tensor]
    empty_dv: Callable[[], Tensor]
    parts: bool
    isolated: bool
    empty_captured: tuple[Callable[[], Tensor] | None, ...]
    sequence: LaunchAll | None
    last_values: tuple[int | float, ...]

    @classmethod
    def of(cls, tensors: BackwardInputs, work: Work, *, one_pass: bool, ordered: bool) -> HopperBackward | None:
        inputs, lse, grad_out = distinct(tensors.inputs), tensors.lse, tensors.grad_out.detach()
        q, k, v = inputs.q, inputs.k, inputs.v
        readable = is_preparable(inputs, work) and launch.describable(grad_out) and lse.is_contiguous()
        if not readable or tensors.grad_lse is not None or tensors.delta is not None:
            return None
        call, grads = HopperCall(inputs, work), empty_grads(inputs, work, tensors.needs, wide=False)
        (norm, delta), parts = (empty_padded_rows(lse) for _ in range(2)), head_parts_of(q, v, work)
        total = torch.empty(q.shape, dtype=torch.float32, device=q.device) if one_pass else None
        dk, dv = grads.k, grads.v
        if parts > 1:
            dk, dv = (torch.empty((t.shape[0], t.shape[1] * parts, *t.shape[2:]), dtype=torch.float32, device=t.device) for t in (dk, dv))
        isolated, scanned = isolates(work), isolates(work) and not one_pass
        flag = torch.empty(1, dtype=torch.int32, device=q.device) if isolated else None
        row_terms = call.row_terms({
            "q_ptr": q if isolated else None, "out_ptr": tensors.out, "do_ptr": grad_out, "lse_ptr": lse, "grad_lse_ptr": None,
            "norm_ptr": norm, "delta_ptr": delta, "dq_ptr": total,
            "counters_ptr": torch.empty(8, dtype=torch.int32, device=q.device),
            "k_ptr": k if scanned else None, "v_ptr": v if scanned else None, "flag_ptr": flag,
        })  # fmt: skip
        roles = q, k, v, grad_out, norm, delta, grads.q, dk, dv, total, flag
        dq, row_grads = None, RowGrads(grad_out, norm, delta, flag)
        if not one_pass:
            dq = PreparedPass.of(call, call.dq_pass(row_grads, grads.q, grads.captured, add=False), roles)
        dkdv = PreparedPass.of(call, call.dkdv_pass(row_grads, dk, dv, total, ordered=ordered, rounded=True), roles)
        rounding = call.rounding(round_tensors(total, grads, (dk, dv), parts), parts) if one_pass or parts > 1 else None
        if not all(p is None or p.is_compiled for p in (row_terms, None if dq is None else dq.launch, dkdv.launch, rounding)):
            return None
        launches = _BackwardLaunches(row_terms, dq, dkdv, rounding, parts > 1, isolated)
        row_terms_size = q.shape[0] * q.shape[1] * norm.stride(1)
        sizes = row_terms_size, row_terms_size, q.numel() * one_pass, dk.numel() * (parts > 1), dv.numel() * (parts > 1), 8
        a, b, c, d, e, f, floats = accumulate((-(-n // _ROW_ALIGNMENT) * _ROW_ALIGNMENT for n in sizes), initial=0)
        return cls(
            row_terms=row_terms, dq=dq, dkdv=dkdv, rounding=rounding, rounding_scale=call.rounding_scale,
            starts=(4 * a, 4 * b, 4 * c, 4 * d, 4 * e, 4 * f), device=q.device.index,
            empty_workspace=allocator((floats,), (1,), torch.float32, q.device), empty_dq=contiguous_allocator(q.shape, q.dtype, q.device),
            empty_dk=contiguous_allocator(k.shape, k.dtype, k.device), empty_dv=contiguous_allocator(v.shape, v.dtype, v.device),
            parts=parts > 1, isolated=isolated,
            empty_captured=tuple(
                contiguous_allocator(c.shape, torch.float32, c.device) if n else None
                for c, n in zip(work.score_captured, tensors.needs, strict=True)
            ),
            sequence=launches.sequence(scores=len(work.score_captured), grads=sum(tensors.needs)),
            last_values=(*dkdv.captured, *(() if rounding is None else (call.rounding_scale,)), *dkdv.numbers),
        )  # fmt: skip

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, score_captured: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor | None]]:  # fmt: skip
        workspace, dq, dk, dv = self.empty_workspace(), self.empty_dq(), self.empty_dk(), self.empty_dv()
        base, (norm, delta, total, dk_parts, dv_parts, counters) = workspace.data_ptr(), self.starts
        norm, delta, total, counters = base + norm, base + delta, base + total, base + counters
        captured: Sequence[Tensor | None] = ()
        score_at: Sequence[int] = ()
        stream = unhooked_stream(self.device)
        if score_captured:
            captured = [None if empty is None else _zeros(empty, stream, self.device) for empty in self.empty_captured]
            score_at = [t.data_ptr() for t in score_captured]
        do_at, dq_at, dk_at, dv_at = grad_out.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        to_dk, to_dv = (base + dk_parts, base + dv_parts) if self.parts else (dk_at, dv_at)
        q_at, k_at, v_at, flag = q.data_ptr(), k.data_ptr(), v.data_ptr(), 0
        of_rows: tuple[int, ...] = out.data_ptr(), do_at, lse.data_ptr(), norm, delta
        if self.dq is None:
            of_rows = *of_rows, total
        of_rows = *of_rows, counters
        if self.isolated:
            flag, _pool = take_flag(self.row_terms.device, stream)
            of_rows = (q_at, *of_rows, flag) if self.dq is None else (q_at, *of_rows, k_at, v_at, flag)
        addresses = q_at, k_at, v_at, do_at, norm, delta, dq_at, to_dk, to_dv, total, flag
        if stream is not None and self.sequence is not None:
            rest = out.data_ptr(), lse.data_ptr(), counters, counters + 16, dk_at, dv_at
            grads_at = [g.data_ptr() for g in captured if g is not None]
            self.sequence(stream, (*addresses, *rest, *score_at, *grads_at, *self.last_values))
            return dq, dk, dv, captured
        launch_prepared(self.row_terms, stream, of_rows)
        if self.dq is not None:
            self.dq(stream, addresses, score_at, [g.data_ptr() for g in captured if g is not None] or (norm,), counters)
        self.dkdv(stream, addresses, score_at, (), counters + 16)
        if self.rounding is not None:
            rounded = (total, dq_at) if self.dq is None else ()
            parts = (to_dk, dk_at, to_dv, dv_at) if self.parts else ()
            launch_prepared(self.rounding, stream, (*rounded, *parts, self.rounding_scale))
        return dq, dk, dv, captured
