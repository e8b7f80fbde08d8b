"""Exchanges of uneven rows that virtual and real ranks run alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan._comm.group import Group
from longspan._comm.mesh import Mesh


def rows_between(sender: int, receiver: int) -> int:
    """How many rows go from one rank to another: uneven, some of them none."""
    return (3 * sender + 5 * receiver + sender * receiver) % 4


def rows_of(sender: int, receiver: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows [rows, width] whose values encode sender and receiver and are exact in every dtype."""
    rows = rows_between(sender, receiver)
    return (torch.arange(rows * width).reshape(rows, width) % 3 + sender * 7 + receiver).to(dtype)


def uneven_exchange(group: Group, *, width: int = 5, dtype: torch.dtype = torch.float32, device: str = "cpu") -> bool:
    """Whether every row arrived where it should."""
    n, me = group.size, group.rank
    sent = torch.cat([rows_of(me, r, width, dtype) for r in range(n)]).to(device)
    expected = torch.cat([rows_of(r, me, width, dtype) for r in range(n)])
    out = torch.zeros_like(expected, device=device)
    splits = [rows_between(r, me) for r in range(n)], [rows_between(me, r) for r in range(n)]
    group.all_to_all(out, sent, *splits, what=f"uneven exchange of {dtype}").wait()
    return torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))


def exchange_of_pieces(
    group: Group, *, width: int = 5, dtype: torch.dtype = torch.float32, device: str = "cpu", gathered: bool = False
) -> bool:
    """Whether pieces that overlap arrived where they should. `gathered`: this rank sends the same rows from one tensor."""
    n, me = group.size, group.rank
    mine = overlapping(me, n, width, dtype, device)
    expected = torch.cat([overlapping(r, n, width, dtype)[me] for r in range(n)])
    out = torch.zeros_like(expected, device=device)
    arriving, what = [rows_between(r, me) for r in range(n)], f"pieces of {dtype}"
    if gathered:
        pending = group.all_to_all(out, torch.cat(mine), arriving, [len(piece) for piece in mine], what=what)
    else:
        pending = group.all_to_all_pieces(out, mine, arriving, what=what)
    pending.wait()
    return torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))


def overlapping(sender: int, ranks: int, width: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """What a rank sends to each: views [rows, width] of one tensor, which begin one row after the other."""
    numbers = torch.arange((ranks + 3) * width).reshape(ranks + 3, width)
    rows = (numbers % 3 + numbers // width + 7 * sender).to(dtype).to(device)
    return [rows[r : r + rows_between(sender, r)] for r in range(ranks)]


def counts_of(size: int) -> list[int]:
    """Rows that each rank owns: uneven, one of them nothing."""
    return [(r * 4 + 3) % 5 if r != 1 else 0 for r in range(size)]


class _Transposed(torch.autograd.Function):
    """Rank r's block i becomes rank i's block r. Its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: int) -> Tensor:
        ctx.mesh, ctx.axis = mesh, axis
        return _transposed(mesh.group(axis), x, "forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _transposed(ctx.mesh.group(ctx.axis), grad, "backward"), None, None


def _transposed(group: Group, x: Tensor, what: str) -> Tensor:
    out, each = torch.empty_like(x), x.shape[0] // group.size
    group.all_to_all(out, x.contiguous(), [each] * group.size, [each] * group.size, what=what).wait()
    return out


def gradient_through_an_exchange(mesh: Mesh, axis: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(got, expected): the gradient of Σ w · exchange(x²) with respect to x."""
    n, me, each, width = mesh.axes[axis].size, mesh.coordinate[axis], 3, 4
    x = (torch.arange(n * each * width, dtype=torch.float64).reshape(n * each, width) + me).to(device).requires_grad_()
    w = [torch.full((n * each, width), float(r + 2), dtype=torch.float64, device=device) for r in range(n)]
    (w[me] * _Transposed.apply(x * x, mesh, axis)).sum().backward()
    back = torch.cat([w[r][me * each : (me + 1) * each] for r in range(n)])
    assert x.grad is not None
    return x.grad.cpu(), (2 * x.detach() * back).cpu()
