"""One attention call on one device that repeats: its kernel, its work and, where the kernel has them, prepared passes.

Everything here follows from the layouts of the tensors, the mask, the programs and torch's settings, which the key of the call covers
(`longspan._engine.call_cache`). A call allocates its results, launches, and makes one autograd node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan._engine import one_device
from longspan._engine.checks import reject_batched_gradients
from longspan._engine.eager import backward_by_operator
from longspan._engine.streams import is_captured
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors, InputGrads
from longspan._kernels.protocol import MISALIGNED, AttentionInputs, BackwardInputs, Kernel, PreparedBackward, PreparesCalls, Work
from longspan._torch_modes import without_user_defaults
from longspan._torch_private import deterministic_algorithms, deterministic_algorithms_warn_only, is_batched_gradient, tensor_guard

_MAX_BACKWARDS = 8  # layouts of the gradient of out, and settings, for which a backward pass is prepared


class _RecentBackward(NamedTuple):
    """The last prepared backward pass, looked up without its key: by a guard over its tensors. Holds no tensor."""

    guard: Callable[..., bool]
    needs: tuple[bool, ...]
    deterministic: tuple[bool, bool]
    prepared: PreparedBackward


class PreparedCall:
    """A call with fixed tensor layouts. Of the caller's tensors it holds only the mask's captured tensors.

    `fixed_mask`: the mask reads its own copies of tensors, which never change. Otherwise `is_current` compares versions and addresses of
    the tensors. They are saved for the backward pass in both cases, as by calls that are not prepared: activation checkpointing compares
    the saved tensors of a call and of its recomputation.
    """

    def __init__(self, inputs: CallTensors, options: CallOptions, *, fixed_mask: bool) -> None:
        self._options, self._fixed_mask = options, fixed_mask
        self._kernel, work = one_device.kernel_and_work(inputs, options, backward=False)
        self._work, self.mask_captured = replace(work, score_captured=()), tuple(inputs.mask_captured)
        self._versioned: tuple[Tensor, ...] = () if fixed_mask else self.mask_captured
        self._versions = [(t._version, t.data_ptr()) for t in self._versioned]
        self._forward = None
        if isinstance(self._kernel, PreparesCalls) and inputs.sink is None:
            self._forward = self._kernel.prepare_forward(AttentionInputs(q=inputs.q, k=inputs.k, v=inputs.v), work)
        self._no_prepared_backward = inputs.sink is not None
        self._recent_backward: _RecentBackward | None = None
        self._backwards: dict[Hashable, tuple[Kernel, Work, PreparedBackward | None]] = {}

    def is_current(self) -> bool:
        """Whether the tensors that the mask reads are unmodified."""
        return not self._versioned or [(t._version, t.data_ptr()) for t in self._versioned] == self._versions

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, score_captured: Sequence[Tensor], *, lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse), differentiable. lse: whether lse is needed; without it, it may be None."""
        needs_grad = torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
            or (score_captured and any(t.requires_grad for t in score_captured))
        )  # fmt: skip
        if not needs_grad:
            return self.forward(q, k, v, sink, score_captured)
        results = _apply(self, lse, q, k, v, sink, *score_captured)
        return results if lse else (results, None)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, score_captured: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(out, lse)."""
        if self._forward is not None and not is_captured(q):
            return self._forward(q, k, v, score_captured)
        inputs = CallTensors(q=q, k=k, v=v, sink=sink, mask_captured=self.mask_captured, score_captured=score_captured)
        work = self._work if not score_captured else replace(self._work, score_captured=score_captured)
        with without_user_defaults(), torch.no_grad():
            state = one_device.forward_by(self._kernel, work, inputs)
        return state.out, state.lse.contiguous()

    def backward_again(self, saved: Sequence[Tensor], grad_out: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...] | None:
        """Gradients of q, k, v, the sink (None) and the captured tensors by a prepared pass; None if there is none for these tensors.

        saved: q, k, v, sink, out, lse, tensors of the mask and of the score program. Gradients of lse are not supported.
        """
        if self._no_prepared_backward or torch.is_grad_enabled() or is_batched_gradient(grad_out):
            return None
        q, k, v, _, out, lse = saved[:6]
        score_captured = saved[6 + len(self.mask_captured) :] if needs else ()
        prepared, recent = None, self._recent_backward
        if recent is not None and recent.guard(q, k, v, out, lse, grad_out, *score_captured) and recent.needs == needs:
            addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | lse.data_ptr() | grad_out.data_ptr()
            for t in score_captured:
                addresses |= t.data_ptr()
            if not addresses & MISALIGNED and recent.deterministic == _deterministic():
                prepared = recent.prepared
        if prepared is None:
            prepared = self._prepared_backward(q, k, v, out, lse, grad_out, score_captured, needs)
        if prepared is None or is_captured(q):
            return None
        dq, dk, dv, captured = prepared(q, k, v, out, lse, grad_out, score_captured)
        if not needs:
            return dq, dk, dv, None
        return dq, dk, dv, None, *[
            g if g is None or g.dtype == t.dtype else g.to(t.dtype) for g, t in zip(captured, score_captured, strict=True)
        ]  # fmt: skip

    def _prepared_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, score_captured: Sequence[Tensor],
        needs: tuple[bool, ...],
    ) -> PreparedBackward | None:  # fmt: skip
        """The prepared pass of these tensors, if there is one. The next call tries this pass first, by its guard."""
        key = _backward_key(q, k, v, out, lse, grad_out, score_captured, needs)
        prepared = self._backwards.get(key, (None, None, None))[2]
        if prepared is not None and not key[0] and not any(t.data_ptr() & MISALIGNED for t in score_captured):
            guard = tensor_guard(q, k, v, out, lse, grad_out, *score_captured)
            self._recent_backward = _RecentBackward(guard, needs, _deterministic(), prepared)
        return prepared

    def backward(self, tensors: BackwardTensors) -> list[Tensor]:
        """Gradients as of `ops.attend_backward`. The pass is prepared for `backward_again` if the kernel can prepare it."""
        inputs = tensors.inputs
        key = _backward_key(
            inputs.q, inputs.k, inputs.v, tensors.out, tensors.lse, tensors.grad_out, inputs.score_captured, tuple(tensors.needs)
        )
        entry = self._backwards.get(key)
        with without_user_defaults():
            kernel, work = entry[:2] if entry is not None else one_device.kernel_and_work(inputs, self._options, backward=True)
            work = work if not inputs.score_captured else replace(work, score_captured=inputs.score_captured)
            grads, grad_sink = one_device.backward_by(kernel, work, tensors)
            if entry is None and tensors.grad_lse is None and not is_captured(inputs.q):
                self._prepare_backward(key, kernel, work, tensors)
        return tensors.flat_grads(grads, grad_sink)

    def _prepare_backward(self, key: Hashable, kernel: Kernel, work: Work, tensors: BackwardTensors) -> None:
        prepared, inputs, lse = None, tensors.inputs, tensors.lse
        if isinstance(kernel, PreparesCalls) and inputs.sink is None:
            prepared = kernel.prepare_backward(
                BackwardInputs(
                    inputs=AttentionInputs(q=inputs.q, k=inputs.k, v=inputs.v), out=tensors.out, lse=lse, grad_out=tensors.grad_out,
                    grad_lse=tensors.grad_lse, needs=tensors.needs,
                ),
                work,
            )  # fmt: skip
        if len(self._backwards) >= _MAX_BACKWARDS:
            self._backwards.clear()
        self._backwards[key] = kernel, replace(work, score_captured=()), prepared

    def backward_node(
        self, saved: Sequence[Tensor], grad_out: Tensor | None, grad_lse: Tensor | None, needs: tuple[bool, ...]
    ) -> tuple[Any, ...]:  # fmt: skip
        """The autograd node's backward: gradients of q, k, v, the sink and the captured tensors. saved: as in `backward_again`."""
        reject_batched_gradients(grad_out, grad_lse)
        q, k, v, sink, out, lse, *captured = saved
        score_captured = captured[len(self.mask_captured) :]
        tensors = BackwardTensors(
            inputs=CallTensors(q=q, k=k, v=v, sink=sink, mask_captured=self.mask_captured, score_captured=score_captured),
            out=out, lse=lse, grad_out=torch.zeros_like(out) if grad_out is None else grad_out, grad_lse=grad_lse, needs=needs,
        )  # fmt: skip
        if torch.is_grad_enabled():  # create_graph=True
            flat = backward_by_operator(tensors, self._options, None)
        else:
            flat = self.backward(tensors)
        grads = InputGrads.of(flat, sink, needs)
        return *grads[:4], *grads.captured


class _AttendPrepared(torch.autograd.Function):
    """The autograd node of a prepared call. Results: out, or out and lse."""

    @staticmethod
    def forward(
        ctx: Any, call: PreparedCall, returns_lse: bool, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *score_captured: Tensor
    ) -> Any:  # fmt: skip
        out, lse = call.forward(q, k, v, sink, score_captured)
        ctx.save_for_backward(q, k, v, sink, out, lse, *call.mask_captured, *score_captured)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (out, lse) if returns_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Any, ...]:  # type: ignore[override]
        call: PreparedCall = ctx.call
        saved = ctx.saved_tensors  # once: hooks of activation checkpointing raise the second time
        needs = ctx.needs_input_grad[6:] if len(saved) > 6 else ()
        if grad_out is not None and grad_out.is_neg():
            grad_out = grad_out.resolve_neg()
        if grad_lse is None and grad_out is not None:
            grads = call.backward_again(saved, grad_out, needs)
            if grads is not None:
                return None, None, *grads
        grad_lse = None if grad_lse is None else grad_lse.resolve_neg()
        return None, None, *call.backward_node(saved, grad_out, grad_lse, needs)


# The same as `_AttendPrepared.apply` where no transform of torch.func is active, which the key of a call ensures: torch's own wrapper looks
# for transforms in Python.
_apply = super(torch.autograd.Function, _AttendPrepared).apply


def _backward_key(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, score_captured: Sequence[Tensor], needs: tuple[bool, ...]
) -> tuple[Hashable, ...]:  # fmt: skip
    """The key of a prepared backward pass. Its first element has the bits of misaligned addresses.

    Addresses and strides are those of now: hooks of saved tensors may have replaced them by copies.
    """
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | lse.data_ptr() | grad_out.data_ptr()
    return (
        addresses & MISALIGNED, q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(), grad_out.stride(), grad_out.dtype, needs,
        tuple([(t.stride(), t.data_ptr() & MISALIGNED) for t in score_captured]) if score_captured else None, _deterministic(),
    )  # fmt: skip


def _deterministic() -> tuple[bool, bool]:
    """Torch's settings of deterministic algorithms."""
    return deterministic_algorithms(), deterministic_algorithms_warn_only()
