"""The kernel calls of one kind of pass over a mesh, by step and batch row. A call that repeats is prepared by its kernel.

A step is found by the strides and the alignment of its tensors. Everything else that it depends on is part of the key under which
`longspan._engine.plan_cache` holds the steps. A step is prepared when it is made for the second time with tensors of the same layouts:
preparation takes longer than a call, and a plan may be used once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Generic, TypeVar

from torch import Tensor

from longspan._kernels.protocol import (
    MISALIGNED,
    AttentionInputs,
    BackwardInputs,
    ComputesNorm,
    Grads,
    Kernel,
    PreparedBackwardStep,
    PreparedForwardStep,
    PreparesSteps,
    State,
    Work,
)

LAYOUTS_PER_STEP = 16  # layouts of tensors, and scales, for which a step is prepared


class _Mark(Enum):
    """In step_key of a prepared step: made once, or not supported by the kernel."""

    SEEN_ONCE = 0
    NOT_SUPPORTED = 1


Step = TypeVar("Step")


class _StepCache(Generic[Step]):
    """Prepared steps by key: at most `size`, least recently used dropped first. Uses are noted once half of `size` is in use."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._steps: OrderedDict[Hashable, Step | _Mark] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, key: Hashable) -> Step | _Mark | None:
        step = self._steps.get(key)
        if step is not None and 2 * len(self._steps) >= self._size:
            with suppress(KeyError):  # another thread dropped it meanwhile
                self._steps.move_to_end(key)
        return step

    def put(self, key: Hashable, step: Step | _Mark) -> None:
        self._steps[key] = step
        if len(self._steps) > self._size:
            self._steps.popitem(last=False)


class StepCalls:
    """The kernel calls of one kind of pass of `steps` steps. Not prepared without `prepare`, and where the kernel does not prepare steps.

    `step_key` in its methods: the step, the batch row, and settings of this call that the work depends on. `captured`: the tensors that the
    score program reads, on the device of the queries.
    """

    def __init__(self, kernel: Kernel, *, steps: int = 1, prepare: bool = True) -> None:
        self._kernel = kernel
        self.with_norm: ComputesNorm | None = kernel if isinstance(kernel, ComputesNorm) else None  # tests for protocols are slow
        self._prepares: PreparesSteps | None = kernel if prepare and isinstance(kernel, PreparesSteps) else None
        self._forward: _StepCache[PreparedForwardStep] = _StepCache(LAYOUTS_PER_STEP * steps)
        self._backward: _StepCache[PreparedBackwardStep] = _StepCache(LAYOUTS_PER_STEP * steps)
        self._overlap: dict[tuple[bool, ...], bool] = {}

    def forward(
        self, step_key: Hashable, inputs: AttentionInputs, work: Callable[[], Work], captured: Sequence[Tensor], *,
        state: State | None, final: bool, max_scores: bool,
    ) -> State:  # fmt: skip
        """`Kernel.forward`. Calls with max scores are not prepared."""
        kernel, prepares = self._kernel, self._prepares
        if prepares is None or max_scores:
            return kernel.forward(inputs, work(), state=state, final=final, max_scores=max_scores)
        key = step_key, _inputs_key(inputs), None if state is None else state.layout, _captured_key(captured)
        step = self._forward.get(key)
        if step is not None and not isinstance(step, _Mark):
            return step(inputs, state, captured)
        step_work = work()
        result = kernel.forward(inputs, step_work, state=state, final=final, max_scores=False)
        if step is None:
            self._forward.put(key, _Mark.SEEN_ONCE)
        elif step is _Mark.SEEN_ONCE:
            prepared = prepares.prepare_forward_step(inputs, step_work, state=state, result=result, final=final)
            self._forward.put(key, _Mark.NOT_SUPPORTED if prepared is None else prepared)
        return result

    def may_overlap(self, needs: tuple[bool, ...], ask: Callable[[], bool]) -> tuple[bool, bool]:
        """Whether steps of a backward pass may run at the same time, by `ask`, and whether they do so in this call.

        Not in the first call: kernels then copy tables to the device on one stream, and the other stream would not wait for the copy.
        """
        known = self._overlap.get(needs)
        if known is None:
            known = self._overlap[needs] = ask()
            return known, False
        return known, known

    def backward(
        self, step_key: Hashable, tensors: BackwardInputs, work: Callable[[], Work], captured: Sequence[Tensor], into: Grads
    ) -> None:  # fmt: skip
        """`Kernel.backward` with `into`: dQ and gradients of captured tensors are added to it, dK and dV overwrite it."""
        kernel, prepares = self._kernel, self._prepares
        if prepares is None:
            kernel.backward(tensors, work(), wide=True, into=into)
            return
        key = step_key, _inputs_key(tensors.inputs), _gradients_key(tensors, into), _captured_key(captured)
        step = self._backward.get(key)
        if step is not None and not isinstance(step, _Mark):
            step(tensors, into, captured)
            return
        step_work = work()
        kernel.backward(tensors, step_work, wide=True, into=into)
        if step is None:
            self._backward.put(key, _Mark.SEEN_ONCE)
        elif step is _Mark.SEEN_ONCE:
            prepared = prepares.prepare_backward_step(tensors, step_work, into=into)
            self._backward.put(key, _Mark.NOT_SUPPORTED if prepared is None else prepared)


def _inputs_key(inputs: AttentionInputs) -> Hashable:
    q, k, v = inputs.q, inputs.k, inputs.v
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    if inputs.local_kv is None:
        return q.stride(), k.stride(), v.stride(), addresses & MISALIGNED
    local_k, local_v = inputs.local_kv
    addresses |= local_k.data_ptr() | local_v.data_ptr()
    return q.stride(), k.stride(), v.stride(), addresses & MISALIGNED, local_k.stride(), local_v.stride()


def _gradients_key(tensors: BackwardInputs, into: Grads) -> Hashable:
    grad_out, norm, delta, dk, dv = tensors.grad_out, tensors.norm, tensors.delta, into.k, into.v
    addresses = grad_out.data_ptr() | into.q.data_ptr() | dk.data_ptr() | dv.data_ptr()
    for rows in (norm, delta):
        addresses |= 0 if rows is None else rows.data_ptr()
    return (
        grad_out.dtype, grad_out.stride(), into.q.stride(), dk.dtype, dk.stride(), dv.stride(), addresses & MISALIGNED,
        None if norm is None else norm.stride(), None if delta is None else delta.stride(), tensors.grad_lse is None,
    )  # fmt: skip


def _captured_key(captured: Sequence[Tensor]) -> Hashable:
    return tuple([(t.dtype, t.shape, t.stride(), t.data_ptr() & MISALIGNED) for t in captured]) if captured else None
