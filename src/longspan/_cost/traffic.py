"""The bytes that a plan's exchanges bring to each rank of the mesh: Ulysses transposes, and keys and gradients along the ring axis.

Counted as the engine sends them, what a rank keeps left out: tensors in the inputs' dtype, logsumexp in 4 bytes, gradients of keys on their
way home in the dtype that the plan says. Values are taken to be as wide as keys. Not counted: what ranks tell each other before a first
call, and the gradient of a logsumexp that was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._cost.rates import Shape
from longspan._plan.plan_data import PlanData

LSE = 4  # bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """N ranks of the mesh. All int64, in bytes.

    names:     what the rows are: the stages, and where heads are transposed one row before them and one after.
    forward, backward: received by each rank in each of them [rows, N].
    matrix:    from each rank (row) to each (column) in a forward pass [N, N].
    """

    names: tuple[str, ...]
    forward: Tensor
    backward: Tensor
    matrix: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class _Turn:
    """One transpose: of every token that a member holds, its queries and its keys take so many bytes to each other member."""

    query: float
    key: float


def traffic(data: PlanData, shape: Shape, key_bytes: int) -> Traffic:
    """`key_bytes`: of one token's keys and values as they move along the ring axis."""
    groups, degree = data.groups, data.degree
    ring = len(groups)
    at = data.ring_of
    forward, again, sent = (s(ring)[:, at] * key_bytes for s in (data.schedule.received, data.returns.received, data.returns.sent))
    names = tuple(f"stage {i + 1}" for i in range(data.schedule.stages))
    backward = again + sent * shape.grad_element // shape.element
    matrix = torch.zeros(data.mesh.size, data.mesh.size, dtype=torch.int64)
    moved = _between(data, ring) * key_bytes
    for members in groups.T:
        matrix[members[:, None], members] = moved
    if degree == 1:
        return Traffic(names=names, forward=forward, backward=backward, matrix=matrix)
    # Bytes of one token in the heads that one rank computes: its queries, its keys and values, its logsumexp.
    q, kv = shape.q_bytes / degree, 2 * shape.batch * shape.kv_heads_of(degree) * shape.head_dim * shape.element
    lse = LSE * shape.batch * shape.heads / degree
    # Gradients of key heads that several ranks share are summed where they belong, and travel wide.
    home = kv * shape.grad_element / shape.element if shape.kv_heads < degree else kv
    there, back = _Turn(query=q, key=kv), _Turn(query=q + lse, key=0)
    there_again, grads = _Turn(query=3 * q + lse, key=kv), _Turn(query=q, key=home)
    tokens = data.tokens.double()
    forward = torch.stack([_gathered(there, tokens, groups), *forward, _scattered(back, tokens, degree)])
    backward = torch.stack([_gathered(there_again, tokens, groups), *backward, _scattered(grads, tokens, degree)])
    for members in groups:
        mine = tokens[:, members]
        pairs = (there.query * mine[0] + there.key * mine[1])[:, None] + (back.query * mine[0] + back.key * mine[1])
        matrix[members[:, None], members] += pairs.fill_diagonal_(0).round().long()
    names = ("transpose of q, k and v", *names, "transpose of out")
    return Traffic(names=names, forward=forward, backward=backward, matrix=matrix)


def _between(data: PlanData, ranks: int) -> Tensor:
    """Tokens from each rank of the ring axis (row) to each (column)."""
    s = data.schedule
    return torch.zeros(ranks * ranks, dtype=torch.int64).index_add_(0, s.source * ranks + s.receiver, s.length).view(ranks, ranks)


def _gathered(turn: _Turn, tokens: Tensor, groups: Tensor) -> Tensor:
    """Received by each rank [N] where all others of its group send it their tokens. `tokens` [2, N]: of queries and of keys."""
    leaving = turn.query * tokens[0] + turn.key * tokens[1]
    out = torch.empty(tokens.shape[1], dtype=torch.int64)
    out[groups] = (leaving[groups].sum(1, keepdim=True) - leaving[groups]).round().long()
    return out


def _scattered(turn: _Turn, tokens: Tensor, degree: int) -> Tensor:
    """Received by each rank [N] where all others of its group send it its own tokens."""
    return ((degree - 1) * (turn.query * tokens[0] + turn.key * tokens[1])).round().long()
