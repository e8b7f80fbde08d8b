"""Arguments that travel together through the engine. Only the custom operators take them one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter

from longspan._engine.spec import Spec
from longspan._kernels.protocol import Grads

PLAIN = (Tensor, Parameter)  # not subclasses, whose operations may differ


@dataclass(frozen=True, kw_only=True, eq=False)
class CallTensors:
    """The tensors of one attention call.

    Attributes:
        q, k, v: [B, H, Q, D], [B, G, K, D], [B, G, K, E].
        sink: [H], or None.
        mask_captured: Tensors that the mask program reads; none over a mesh, where the plan holds them.
        score_captured: Tensors that the score program reads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    mask_captured: Sequence[Tensor] = ()
    score_captured: Sequence[Tensor] = ()

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that may get gradients."""
        return [self.q, self.k, self.v, *(() if self.sink is None else (self.sink,)), *self.score_captured]


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardTensors:
    """The tensors of a backward pass.

    Attributes:
        inputs: The tensors of the forward pass.
        out, lse: Its results, [B, H, Q, E] and [B, H, Q].
        grad_out, grad_lse: Their gradients; grad_lse is None where lse was not used.
        needs: Whether each of `inputs.score_captured` needs a gradient.
    """

    inputs: CallTensors
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    needs: Sequence[bool]

    def flat_grads(self, grads: Grads, grad_sink: Tensor | None, *, strided: bool = False) -> list[Tensor]:
        """Gradients of q, k, v, the sink if there is one, and the captured tensors with `needs`, in their tensors' dtypes.

        strided: Those of q, k and v may have the strides of their tensors. Otherwise all are contiguous.
        """
        q, k, v = (self.inputs.q, self.inputs.k, self.inputs.v) if strided else (None, None, None)
        grads.q = _laid_out(grads.q, q)  # one after the other: a copy replaces its source
        grads.k = _laid_out(grads.k, k)
        grads.v = _laid_out(grads.v, v)
        flat = [grads.q, grads.k, grads.v]
        if self.inputs.sink is not None and grad_sink is not None:
            flat.append(grad_sink.to(self.inputs.sink.dtype).contiguous())
        for need, grad, tensor in zip(self.needs, grads.captured, self.inputs.score_captured, strict=False):
            if need and grad is not None:
                flat.append(grad.to(tensor.dtype).to(tensor.device).contiguous())
        return flat


def _laid_out(grad: Tensor, like: Tensor | None) -> Tensor:
    """A gradient with the strides of its tensor `like`, or else contiguous."""
    return grad if like is not None and grad.stride() == like.stride() else grad.contiguous()


class InputGrads(NamedTuple):
    """Gradients of q, k, v, the sink and the captured tensors; None where there is none."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    captured: list[Tensor | None]

    @classmethod
    def of(cls, flat: Iterable[Tensor], sink: Tensor | None, needs: Sequence[bool]) -> InputGrads:
        """The gradients of a flat list (`BackwardTensors.flat_grads`)."""
        rest = iter(flat)
        q, k, v = next(rest), next(rest), next(rest)
        return cls(q, k, v, None if sink is None else next(rest), [next(rest) if need else None for need in needs])


def empty_flat_grads(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, score_captured: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor]:  # fmt: skip
    """Uninitialised tensors of the shapes of `BackwardTensors.flat_grads`, for fake implementations of operators."""
    inputs = [q, k, v] + ([sink] if sink is not None else []) + [t for t, need in zip(score_captured, needs, strict=True) if need]
    return [t.new_empty(t.shape) for t in inputs]


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The programs, the kernel's name and the scale of a call, and whether it returns each row's largest score."""

    spec: Spec
    scale: float
    max_scores: bool = False
