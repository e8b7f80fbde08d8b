"""Kernel calls with tensors one by one, as tests have them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Grads, Kernel, State, Work

KV = tuple[Tensor, Tensor]


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, work: Work, *,
    local_kv: KV | None = None, state: State | None = None, final: bool = True, max_scores: bool = False,
) -> State:  # fmt: skip
    inputs = AttentionInputs(q=q, k=k, v=v, local_kv=local_kv)
    return kernel.forward(inputs, work, state=state, final=final, max_scores=max_scores)


def backward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, work: Work, *,
    local_kv: KV | None = None, needs: Sequence[bool] = (), wide: bool = True, delta: Tensor | None = None, into: Grads | None = None,
) -> Grads:  # fmt: skip
    tensors = BackwardInputs(
        inputs=AttentionInputs(q=q, k=k, v=v, local_kv=local_kv),
        out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse, needs=needs, delta=delta,
    )  # fmt: skip
    return kernel.backward(tensors, work, wide=wide, into=into)


def unsupported_reason(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, work: Work) -> str | None:
    return kernel.capabilities(AttentionInputs(q=q, k=k, v=v), work).unsupported
