"""Products over visible pairs: forward mode, vmap and second derivatives, with NaN and inf in hidden places."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from longspan._kernels.masked_autograd import masked_outer, masked_weighted_sum

BATCH, M, N, DIM = 3, 4, 6, 5
SEEN = (torch.arange(M)[:, None] + 2 * torch.arange(N)) % 5 < 3
SEEN[:, 2] = False


def plain_sum(a: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen, a, 0.0) @ x


def plain_outer(x: Tensor, y: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen, x @ y.mT, 0.0)


FUNCTIONS: Any = {"sum": (masked_weighted_sum, plain_sum, (M, N), (N, DIM)), "outer": (masked_outer, plain_outer, (M, DIM), (N, DIM))}


def operands(name: str, *batch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*batch, *shape, generator=generator, dtype=torch.float64) for shape in FUNCTIONS[name][2:]]


@pytest.mark.parametrize("dims", [d for d in product((0, 1, None), (0, None), (0, 2, None)) if any(x is not None for x in d)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mapped_calls_are_those_of_each_entry(name: str, dims: tuple[int | None, ...]) -> None:
    fn, plain, *_ = FUNCTIONS[name]
    seen = torch.stack([SEEN.roll(i, 0) for i in range(BATCH)])
    stacked = (*operands(name, BATCH), seen)
    given = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(stacked, dims, strict=True)]
    got = torch.vmap(fn, dims)(*given)
    want = [plain(*(t[0 if dim is None else i] for t, dim in zip(stacked, dims, strict=True))) for i in range(BATCH)]
    torch.testing.assert_close(got, torch.stack(want))


@pytest.mark.parametrize("moved", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_of_one_operand_or_both(name: str, moved: tuple[bool, bool]) -> None:
    fn, plain, *_ = FUNCTIONS[name]
    results = []
    for call in (fn, plain):
        with dual_level():
            duals = [make_dual(t, t.cos()) if on else t for t, on in zip(operands(name), moved, strict=True)]
            results.append(unpack_dual(call(*duals, SEEN)))
    torch.testing.assert_close(results[0].primal, results[1].primal)
    torch.testing.assert_close(results[0].tangent, results[1].tangent)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name: str) -> None:
    leaves = [t.requires_grad_() for t in operands(name, 2)]
    assert torch.autograd.gradcheck(lambda a, x: FUNCTIONS[name][0](a, x, SEEN.expand(2, M, N)), leaves)
    assert torch.autograd.gradgradcheck(lambda a, x: FUNCTIONS[name][0](a, x, SEEN.expand(2, M, N)), leaves)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_nobody_sees_changes_neither_results_nor_gradients(name: str, value: float) -> None:
    results = []
    for hidden in (1.0, value):
        a, x = operands(name)
        x[2] = hidden
        a, x = a.requires_grad_(), x.requires_grad_()
        out = FUNCTIONS[name][0](a, x, SEEN)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (a, x))])
    assert all(map(torch.equal, *results))


def test_a_mask_without_a_leading_dim_is_shared_by_all_mapped_operands() -> None:
    generator = torch.Generator().manual_seed(5)
    a, x = torch.randn(3, 2, 4, 5, generator=generator), torch.randn(3, 2, 5, 6, generator=generator)
    seen = torch.rand(4, 5, generator=generator) > 0.4
    got = torch.vmap(masked_weighted_sum, (0, 0, None))(a, x, seen)
    torch.testing.assert_close(got, torch.where(seen, a, 0.0) @ x)
