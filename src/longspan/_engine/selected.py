"""Attention over keys chosen at run time (`longspan.selected`), by kernels that make their tile lists on the device.

A mask of the form `selection & rest` takes this path on one device. Its programs, the block table of `rest` and the launches are cached by
sizes; a new choice costs lookups and launches. Other forms, kernels and transforms evaluate the selection as a lookup table, like any mask.
The first calls with a torch BlockMask on a GPU take the same path: its lists are not copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan._engine import one_device, ops
from longspan._engine.checks import is_plain, reject_batched_gradients
from longspan._engine.invariant_mode import is_invariant
from longspan._engine.streams import is_captured
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors, InputGrads
from longspan._kernels.protocol import AttentionInputs, Kernel, Selection, SelectsKeys, Work
from longspan._kernels.registry import first_candidate, has_triton, kernel_named
from longspan._masks.algebra import FromBlockMask, Full, Mask
from longspan._masks.block_mask import ListedMask, mask_mod_of_block_mask
from longspan._masks.block_table import BlockTable
from longspan._masks.extent import AttentionSizes
from longspan._masks.selected import split_selection
from longspan._torch_modes import without_user_defaults
from longspan._torch_private import nothing_intercepts_calls


@dataclass(frozen=True, eq=False)
class SplitMask:
    """A mask as a selection, checked against the call, and the rest of the mask; None for a full mask, or one known as a program only.

    `fixed`: the tensors that the rest of the mask reads never change.
    """

    selection: Selection
    rest: Mask | None
    fixed: bool


def split_mask(mask: Any, q: Tensor, k: Tensor, *, kernel: str) -> SplitMask | None:
    """The parts of a call's mask; None if the call takes the general path."""
    if not isinstance(mask, Mask) or not mask.has_selection or is_invariant() or not nothing_intercepts_calls():
        return None
    split = split_selection(mask)
    if split is None or not selects_keys(q, k, split.selection.indices, kernel):
        return None
    sizes = AttentionSizes(q_len=q.shape[2], kv_len=k.shape[2], batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1])
    mask.extent.check(f"mask {mask}", q_len=sizes.q_len, kv_len=sizes.kv_len, batch=sizes.batch, heads=sizes.heads)
    chosen = split.selection.checked(sizes)
    assert chosen.heads_per_choice is not None
    selection = Selection(
        indices=chosen.indices, granularity=chosen.granularity, q_granularity=chosen.q_granularity, heads_per_choice=chosen.heads_per_choice
    )  # fmt: skip
    rest = None if split.rest is None or isinstance(split.rest, Full) else split.rest
    return SplitMask(selection, rest, fixed=rest is None or rest.reads_copies)


_listed_calls: WeakKeyDictionary[FromBlockMask, int] = WeakKeyDictionary()  # calls on the device so far
# A BlockMask of more calls is no mask of one step: its block table is made on the host once, and calls are prepared.
_MAX_LISTED_CALLS = 256


def lists_tiles(mask: Any, q: Tensor, k: Tensor, *, kernel: str) -> bool:
    """Whether a call with a BlockMask may list its tiles on the device; counts calls outside of CUDA graphs."""
    if not isinstance(mask, FromBlockMask) or is_invariant() or not nothing_intercepts_calls():
        return False
    if not selects_keys(q, k, mask.listed.kinds, kernel):
        return False
    if is_captured(q):
        return True
    calls = _listed_calls.get(mask, 0)
    if calls >= _MAX_LISTED_CALLS:
        return False
    _listed_calls[mask] = calls + 1
    return True


def read_again(mask: FromBlockMask) -> FromBlockMask:
    """The mask, with its tile lists read from the BlockMask at every launch, so that a replayed CUDA graph uses the current ones."""
    return FromBlockMask(mask.block_mask, mask_mod_of_block_mask(mask.block_mask))


def selects_keys(q: Tensor, k: Tensor, indices: Tensor, kernel: str) -> bool:
    """Whether a kernel may select keys on the device for such a call."""
    if not has_triton() or kernel not in ("auto", "triton", "hopper") or not (q.is_cuda or kernel == "triton"):
        return False
    return indices.device == q.device and bool(q.numel() and k.numel())


@dataclass(frozen=True, eq=False)
class SelectedCall:
    """A call over chosen keys: its kernel, its work, and its options. Their mask program is the mask besides the selection."""

    kernel: Kernel
    work: Work
    options: CallOptions
    indices: Tensor

    @classmethod
    def of(cls, inputs: CallTensors, options: CallOptions, split: SplitMask, *, captured_grads: bool) -> SelectedCall | None:
        """The call by the first kernel that selects keys; None if no kernel supports it.

        captured_grads: Tensors that the score program captures need gradients.
        """
        kernel_inputs = AttentionInputs(q=inputs.q, k=inputs.k, v=inputs.v)
        by_head = options.spec.mask is not None and options.spec.mask.uses_head
        for kernel in _kernels_by_name(options, inputs.q.device):
            block = kernel.selection_block(kernel_inputs, split.selection, captured_grads=captured_grads, by_head=by_head)
            if block is None:
                continue
            tables = one_device.mask_tables(inputs, options)
            work = replace(one_device.make_work(inputs, options, tables, backward=False, block=block), selects=True)
            if kernel.capabilities(kernel_inputs, work).unsupported is None:
                work = replace(kernel.select(kernel_inputs, work, split.selection), mask_is_fixed=split.fixed)
                return cls(kernel, work, options, split.selection.indices)
        return None

    @classmethod
    def of_kinds(cls, inputs: CallTensors, options: CallOptions, listed: ListedMask) -> SelectedCall | None:
        """The call over the tiles of a BlockMask, whose program is the mask of `options`; None if no kernel supports it."""
        kernel_inputs, kinds = AttentionInputs(q=inputs.q, k=inputs.k, v=inputs.v), listed.kinds
        rows = torch.zeros(kinds.shape[:3].numel() + 1, dtype=torch.int32)
        table = BlockTable(
            q_len=inputs.q.shape[2], kv_len=inputs.k.shape[2], block=listed.block, batch=kinds.shape[0], heads=kinds.shape[1],
            ptr=rows, first=rows[:0], last=rows[:0], kind=rows[:0].to(torch.int8),
        )  # fmt: skip
        work = one_device.work_of_table(inputs, options, table)
        for kernel in _kernels_by_name(options, inputs.q.device):
            if kernel.capabilities(kernel_inputs, work).unsupported is None:
                over_tiles = kernel.list_tiles(kernel_inputs, work, kinds)
                if over_tiles is not None:
                    # Nothing on the host depends on tensors that the mask reads.
                    return cls(kernel, replace(over_tiles, mask_is_fixed=True), options, kinds)
        return None

    def forward(self, inputs: CallTensors) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        work = replace(self.work, score_captured=_on_device_of(inputs.q, inputs.score_captured))
        with without_user_defaults(), torch.no_grad():
            state = one_device.forward_by(self.kernel, work, inputs)
        return state.out, state.lse.contiguous()

    def backward(self, tensors: BackwardTensors) -> list[Tensor]:
        """Gradients of q, k, v, the sink if there is one, and the captured tensors that need one."""
        captured = _on_device_of(tensors.inputs.q, tensors.inputs.score_captured)
        work = replace(self.work, score_captured=captured, joint=self.options.spec.joint(captured))
        with without_user_defaults():
            grads, grad_sink = one_device.backward_by(self.kernel, work, tensors)
        return tensors.flat_grads(grads, grad_sink)


def _kernels_by_name(options: CallOptions, device: torch.device) -> Iterator[Any]:
    """Kernels that select keys, in the order in which a call tries them."""
    requested = options.spec.kernel
    for name in dict.fromkeys((first_candidate(device), "triton")) if requested == "auto" else (requested,):
        kernel = kernel_named(name)
        assert isinstance(kernel, SelectsKeys)
        yield kernel


def _on_device_of(q: Tensor, captured: Sequence[Tensor]) -> list[Tensor]:
    """Captured tensors on the device of q: single numbers may be on the host."""
    return [t.to(q.device) for t in captured]


def attend(inputs: CallTensors, options: CallOptions, split: SplitMask) -> tuple[Tensor, Tensor] | None:
    """(out, lse), differentiable; None if no kernel selects keys for this call."""
    if not is_plain([*inputs.differentiable, *inputs.mask_captured]):
        return None
    return _attend(inputs, SelectedCall.of(inputs, options, split, captured_grads=any(t.requires_grad for t in inputs.score_captured)))


def attend_listed(inputs: CallTensors, options: CallOptions, listed: ListedMask) -> tuple[Tensor, Tensor] | None:
    """`attend` over the tiles of a BlockMask. `listed`: its mask_mod, the mask program of `options`."""
    if not is_plain([*inputs.differentiable, *inputs.mask_captured]):
        return None
    return _attend(inputs, SelectedCall.of_kinds(inputs, options, listed))


def _attend(inputs: CallTensors, call: SelectedCall | None) -> tuple[Tensor, Tensor] | None:
    if call is None:
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs.differentiable):
        tensors = inputs.q, inputs.k, inputs.v, inputs.sink, *inputs.score_captured
        return _AttendSelected.apply(call, inputs.mask_captured, *tensors)  # type: ignore[no-untyped-call,no-any-return]
    return call.forward(inputs)


class _AttendSelected(torch.autograd.Function):
    """Autograd sees q, k, v, the sink and the score program's captured tensors as arguments after the first two."""

    @staticmethod
    def forward(ctx: Any, call: SelectedCall, mask_captured: Sequence[Tensor], *tensors: Any) -> tuple[Tensor, Tensor]:
        q, k, v, sink, *score_captured = tensors
        inputs = CallTensors(q=q, k=k, v=v, sink=sink, mask_captured=mask_captured, score_captured=score_captured)
        out, lse = call.forward(inputs)
        # The indices are saved too, so that torch raises if they were modified in place before the backward pass.
        ctx.save_for_backward(q, k, v, sink, out, lse, call.indices, *mask_captured, *score_captured)
        ctx.call, ctx.mask_count = call, len(mask_captured)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        reject_batched_gradients(grad_out, grad_lse)
        call: SelectedCall = ctx.call
        q, k, v, sink, out, lse, _indices, *captured = ctx.saved_tensors
        inputs = CallTensors(
            q=q, k=k, v=v, sink=sink, mask_captured=captured[: ctx.mask_count], score_captured=captured[ctx.mask_count :]
        )  # fmt: skip
        needs = [bool(n) for n in ctx.needs_input_grad[6:]]
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.resolve_neg()
        grad_lse = None if grad_lse is None else grad_lse.resolve_neg()
        tensors = BackwardTensors(inputs=inputs, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse, needs=needs)
        with torch.no_grad():
            grads = InputGrads.of(call.backward(tensors), sink, needs)
        results = *grads[:4], *grads.captured
        if torch.is_grad_enabled():  # create_graph=True
            sources = q, k, v, sink, *inputs.score_captured, grad_out, grad_lse
            results = tuple(None if g is None else _NotDifferentiable.apply(g, *sources) for g in results)  # type: ignore[no-untyped-call]
        return None, None, *results


class _NotDifferentiable(torch.autograd.Function):
    """A gradient that raises when it is differentiated. torch.autograd.grad never calls the error of torch's `once_differentiable`."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Any) -> Tensor:
        return gradient.clone()  # torch forbids in-place operations on a view that a function returns

    backward = staticmethod(ops.reject_double_backward)
