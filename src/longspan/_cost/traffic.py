"""The bytes that a plan's exchanges bring to each rank of the mesh: Ulysses transposes, and KV and gradients along the KV axis.

Counted as the engine sends them, without local data: tensors in the inputs' dtype, log-sum-exp in 4 bytes, partial gradients of KV in the
plan's `grad_reduce_dtype`. Values are assumed to be as wide as keys. Not counted: control messages, and the gradient of a log-sum-exp that
was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._cost.rates import Shape
from longspan._plan.plan_data import PlanData

LSE_BYTES = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """Bytes between the mesh's N ranks, int64.

    Attributes:
        names: What the exchanges are: the stages and, with Ulysses, one transpose before and one after them.
        forward, backward: Bytes that each rank receives in each exchange [exchanges, N].
        matrix: Bytes that each rank (row) sends to each rank (column) in a forward pass [N, N].
    """

    names: tuple[str, ...]
    forward: Tensor
    backward: Tensor
    matrix: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class _TransposeBytes:
    """One Ulysses transpose: bytes per token of queries and of KV that one member sends to each other member."""

    query: float
    key: float


def traffic(data: PlanData, shape: Shape, kv_token_bytes: int) -> Traffic:
    """The traffic of a plan. `kv_token_bytes`: of K and V of one token as they move along the KV axis."""
    groups, degree = data.groups, data.degree
    kv_axis_size, kv_coordinates = len(groups), data.kv_coordinates
    forward, received_again, grads = (
        tokens(kv_axis_size)[:, kv_coordinates] * kv_token_bytes
        for tokens in (data.schedule.received, data.backward_schedule.received, data.backward_schedule.sent)
    )
    backward = received_again + grads * shape.grad_element // shape.element
    names = tuple(f"stage {i + 1}" for i in range(data.schedule.stages))
    matrix = torch.zeros(data.mesh.size, data.mesh.size, dtype=torch.int64)
    kv_matrix = _tokens_between(data, kv_axis_size) * kv_token_bytes
    for members in groups.T:
        matrix[members[:, None], members] = kv_matrix
    if degree == 1:
        return Traffic(names=names, forward=forward, backward=backward, matrix=matrix)

    # Bytes of one token in the heads that one rank computes: its queries, its K and V, its log-sum-exp.
    q, kv = shape.q_bytes / degree, 2 * shape.batch * shape.kv_heads_of(degree) * shape.head_dim * shape.element
    lse = LSE_BYTES * shape.batch * shape.heads / degree
    # Gradients of KV heads that several ranks share are summed at their owner, and sent in the dtype of partial gradients.
    grad_kv = kv * shape.grad_element / shape.element if shape.kv_heads < degree else kv
    qkv, out = _TransposeBytes(query=q, key=kv), _TransposeBytes(query=q + lse, key=0)
    saved_and_grad, grad_qkv = _TransposeBytes(query=3 * q + lse, key=kv), _TransposeBytes(query=q, key=grad_kv)
    tokens_owned = data.tokens.double()
    forward = torch.stack([_gathered(qkv, tokens_owned, groups), *forward, _scattered(out, tokens_owned, degree)])
    backward = torch.stack([_gathered(saved_and_grad, tokens_owned, groups), *backward, _scattered(grad_qkv, tokens_owned, degree)])
    for members in groups:
        q_tokens, kv_tokens = tokens_owned[:, members]
        pairs = (qkv.query * q_tokens + qkv.key * kv_tokens)[:, None] + (out.query * q_tokens + out.key * kv_tokens)
        matrix[members[:, None], members] += pairs.fill_diagonal_(0).round().long()
    names = ("transpose of q, k and v", *names, "transpose of out")
    return Traffic(names=names, forward=forward, backward=backward, matrix=matrix)


def _tokens_between(data: PlanData, ranks: int) -> Tensor:
    """KV tokens from each rank of the KV axis (row) to each (column) [ranks, ranks]."""
    s = data.schedule
    return torch.zeros(ranks * ranks, dtype=torch.int64).index_add_(0, s.source * ranks + s.receiver, s.length).view(ranks, ranks)


def _gathered(transpose: _TransposeBytes, tokens: Tensor, groups: Tensor) -> Tensor:
    """Bytes received by each rank [N] where all other members send it their tokens. `tokens` [2, N]: queries and KV."""
    sent = transpose.query * tokens[0] + transpose.key * tokens[1]
    received = torch.empty(tokens.shape[1], dtype=torch.int64)
    received[groups] = (sent[groups].sum(1, keepdim=True) - sent[groups]).round().long()
    return received


def _scattered(transpose: _TransposeBytes, tokens: Tensor, degree: int) -> Tensor:
    """Bytes received by each rank [N] where all other members send it the tokens that it owns."""
    return ((degree - 1) * (transpose.query * tokens[0] + transpose.key * tokens[1])).round().long()
