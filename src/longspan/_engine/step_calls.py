"""The kernel calls of one kind of pass over a mesh, by step and batch row. A call that repeats is prepared by its kernel.

Prepared steps are looked up by the layouts of the pass's tensors, once per pass: the layouts of a step's buffers follow from them and from
the schedule. Everything else that a step depends on is part of the key under which `longspan._engine.plan_cache` holds the calls. A step is
prepared when it is made for the second time with tensors of the same layouts: preparation takes longer than a call, and a plan may be used
once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from longspan._engine.kv_exchange import StepKV
from longspan._engine.values import BackwardTensors, CallTensors
from longspan._kernels.protocol import (
    MISALIGNED,
    AttentionInputs,
    BackwardInputs,
    ComputesNorm,
    GradTargets,
    Kernel,
    PreparedBackwardStep,
    PreparedForwardStep,
    PreparedRowTerms,
    PreparesSteps,
    State,
    Work,
    state_dtype,
)
from longspan._kernels.row_sums import RepeatedSum
from longspan._torch_private import empty_on_device_of

MAX_LAYOUTS = 16  # layouts of tensors, and scales, for which the steps of a pass are prepared

Place = tuple[int, int]  # the step and the batch row


class _Mark(Enum):
    """State of a step that is not prepared: called once so far, or the kernel cannot prepare it."""

    SEEN_ONCE = 0
    NOT_SUPPORTED = 1


class LayoutCalls:
    """The kernel calls of passes with tensors of one layout. Not prepared without `prepares`.

    `final_sum`: of `GradientSums`. `captured` in its methods: the tensors that the score program reads, on the device of the queries.
    """

    final_sum: RepeatedSum | None = None

    def __init__(self, kernel: Kernel, prepares: PreparesSteps | None, with_norm: ComputesNorm | None) -> None:
        self._kernel, self._prepares, self._with_norm = kernel, prepares, with_norm
        self._row_terms: PreparedRowTerms | _Mark | None = None
        self._forward: dict[Place, PreparedForwardStep | _Mark] = {}
        self._backward: dict[Place, PreparedBackwardStep | _Mark] = {}

    def forward(
        self, place: Place, q: Tensor, kv: StepKV, work: Callable[[], Work], captured: Sequence[Tensor], *,
        state: State | None, final: bool, max_scores: bool,
    ) -> State:  # fmt: skip
        """`Kernel.forward`. Calls with max scores are not prepared."""
        kernel, prepares = self._kernel, self._prepares
        if prepares is None or max_scores:
            return kernel.forward(kv.inputs(q), work(), state=state, final=final, max_scores=max_scores)
        step = self._forward.get(place)
        if step is not None and not isinstance(step, _Mark):
            return step(q, kv.addresses, state, captured)
        inputs, step_work = kv.inputs(q), work()
        result = kernel.forward(inputs, step_work, state=state, final=final, max_scores=False)
        if step is None:
            self._forward[place] = _Mark.SEEN_ONCE
        elif step is _Mark.SEEN_ONCE:
            prepared = prepares.prepare_forward_step(inputs, step_work, state=state, result=result, final=final)
            self._forward[place] = _Mark.NOT_SUPPORTED if prepared is None else prepared
        return result

    def backward(
        self, place: Place, tensors: BackwardInputs, kv: StepKV, work: Callable[[], Work], captured: Sequence[Tensor], into: GradTargets
    ) -> None:  # fmt: skip
        """`Kernel.backward` with `into`: dQ and gradients of captured tensors are added to it, dK and dV overwrite it.

        Of `tensors.inputs`, only q is read.
        """
        step = self._backward.get(place)
        if step is not None and not isinstance(step, _Mark):
            step(tensors, kv.addresses, into, captured)
            return
        step_tensors, step_work, grads = replace(tensors, inputs=kv.inputs(tensors.inputs.q)), work(), into.views()
        self._kernel.backward(step_tensors, step_work, wide=True, into=grads)
        if self._prepares is None:
            return
        if step is None:
            self._backward[place] = _Mark.SEEN_ONCE
        elif step is _Mark.SEEN_ONCE:
            prepared = self._prepares.prepare_backward_step(step_tensors, step_work, into=grads)
            self._backward[place] = _Mark.NOT_SUPPORTED if prepared is None else prepared

    def row_terms(self, tensors: BackwardTensors) -> tuple[Tensor, Tensor, Tensor | None]:
        """(zeros for the gradient of q in the dtype of lse, delta, norm if the kernel reads it)."""
        prepared, kernel, q = self._row_terms, self._kernel, tensors.inputs.q
        if prepared is not None and not isinstance(prepared, _Mark):
            return prepared(q, tensors.out, tensors.lse, tensors.grad_out)
        if self._with_norm is None:
            grad_q = torch.zeros(q.shape, dtype=state_dtype(q.dtype), device=q.device)
            return grad_q, kernel.delta(tensors.out, tensors.grad_out, tensors.grad_lse), None
        grad_q = empty_on_device_of(q, q.shape, state_dtype(q.dtype))
        terms = BackwardInputs(
            inputs=AttentionInputs(q=q, k=tensors.inputs.k, v=tensors.inputs.v), out=tensors.out, lse=tensors.lse,
            grad_out=tensors.grad_out, grad_lse=tensors.grad_lse,
        )  # fmt: skip
        delta, norm = self._with_norm.row_terms(terms, grad_q)
        if prepared is None:
            self._row_terms = _Mark.SEEN_ONCE
        elif prepared is _Mark.SEEN_ONCE:
            terms = replace(terms, delta=delta, norm=norm)
            self._row_terms = self._with_norm.prepare_row_terms(terms, grad_q) or _Mark.NOT_SUPPORTED
        return grad_q, delta, norm


class StepCalls:
    """The kernel calls of one kind of pass, with prepared steps for at most MAX_LAYOUTS layouts, least recently used dropped first."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._with_norm: ComputesNorm | None = kernel if isinstance(kernel, ComputesNorm) else None  # tests for protocols are slow
        self._prepares: PreparesSteps | None = kernel if isinstance(kernel, PreparesSteps) else None
        self._layouts: OrderedDict[Hashable, LayoutCalls] = OrderedDict()
        self._overlap: dict[tuple[bool, ...], bool] = {}

    def __len__(self) -> int:
        return len(self._layouts)

    def unprepared(self) -> LayoutCalls:
        """Calls that are neither prepared nor cached, such as calls in a CUDA graph capture."""
        return LayoutCalls(self._kernel, None, self._with_norm)

    def of_layouts(self, layouts: Hashable) -> LayoutCalls:
        """The calls of passes with these layouts (`forward_layouts`, `backward_layouts`)."""
        if self._prepares is None:
            return self.unprepared()
        calls = self._layouts.get(layouts)
        if calls is None:
            calls = self._layouts[layouts] = LayoutCalls(self._kernel, self._prepares, self._with_norm)
            if len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        elif 2 * len(self._layouts) >= MAX_LAYOUTS:
            with suppress(KeyError):  # another thread dropped it meanwhile
                self._layouts.move_to_end(layouts)
        return calls

    def may_overlap(self, needs: tuple[bool, ...], ask: Callable[[], bool]) -> tuple[bool, bool]:
        """Whether steps of a backward pass may run at the same time, by `ask`, and whether they do so in this call.

        Not in the first call: kernels then copy tables to the device on one stream, and the other stream would not wait for the copy.
        """
        known = self._overlap.get(needs)
        if known is None:
            known = self._overlap[needs] = ask()
            return known, False
        return known, known


def forward_layouts(inputs: CallTensors, captured: Sequence[Tensor], scale: float) -> Hashable:
    """Layouts of the tensors of a forward pass, and its scale, on which its steps depend. captured: as in `LayoutCalls`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    misaligned = q.data_ptr() & MISALIGNED, k.data_ptr() & MISALIGNED, v.data_ptr() & MISALIGNED
    return q.stride(), k.stride(), v.stride(), misaligned, inputs.sink is None, _captured_layouts(captured), scale


def backward_layouts(tensors: BackwardTensors, captured: Sequence[Tensor], scale: float, *, may_overlap: bool) -> Hashable:
    """Layouts of the tensors of a backward pass, and its settings, on which its steps depend. may_overlap: from `StepCalls`."""
    grad_out, grad_lse, out, lse = tensors.grad_out, tensors.grad_lse, tensors.out, tensors.lse
    return (
        forward_layouts(tensors.inputs, captured, scale), grad_out.dtype, grad_out.stride(), grad_out.data_ptr() & MISALIGNED,
        lse.stride(), lse.data_ptr() & MISALIGNED, out.stride(), out.data_ptr() & MISALIGNED, grad_lse is None, tuple(tensors.needs),
        may_overlap,
    )  # fmt: skip


def _captured_layouts(captured: Sequence[Tensor]) -> Hashable:
    return tuple([(t.dtype, t.shape, t.stride(), t.data_ptr() & MISALIGNED) for t in captured]) if captured else None
