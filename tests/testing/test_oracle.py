"""The oracle against attention written out row by row, and error budgets by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan.testing import budget, oracle
from longspan.testing.budget import budgets, error

B, H, G, Q, K, D, E = 2, 6, 3, 5, 7, 4, 3


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, Q, D), (B, G, K, D), (B, G, K, E))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def row_by_row(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, mod: Any = None, scale: Any = None, sink: Any = None) -> Any:
    """(out, lse) for float64 tensors; differentiable."""
    outs, sums = [], []
    for b in range(B):
        for h in range(H):
            for i in range(Q):
                visible = [j for j in range(K) if mask is None or mask(b, h, i, j)]
                scores = [(q[b, h, i] * k[b, h // (H // G), j]).sum() * (D**-0.5 if scale is None else scale) for j in visible]
                if mod is not None:
                    scores = [mod(s, b, h, i, j) for s, j in zip(scores, visible)]
                extra = [] if sink is None else [sink[h]]
                if not scores + extra:
                    outs.append(q.new_zeros(E))
                    sums.append(q.new_tensor(-math.inf))
                    continue
                lse = torch.stack(scores + extra).logsumexp(0)
                sums.append(lse)
                parts = [(s - lse).exp() * v[b, h // (H // G), j] for s, j in zip(scores, visible)]
                outs.append(torch.stack(parts).sum(0) if parts else q.new_zeros(E))
    return torch.stack(outs).view(B, H, Q, E), torch.stack(sums).view(B, H, Q)


def some(b: Any, h: Any, i: Any, j: Any) -> Any:
    return ((i + 2 * j + h + 3 * b) % 3 != 0) & (i != 2)  # row 2 sees nothing


def shifted(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * (1 + 0.1 * h) - 0.2 * (i - j) + 0.3 * b


@pytest.mark.parametrize("mask", [None, some])
@pytest.mark.parametrize("mod", [None, shifted])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_results_and_gradients_equal_attention_row_by_row(mask: Any, mod: Any, with_sink: bool, scale: float | None) -> None:
    leaves = [t.requires_grad_() for t in inputs()]
    sink = torch.linspace(-1, 2, H, dtype=torch.float64).requires_grad_() if with_sink else None
    if sink is not None:
        leaves.append(sink)
    given = None if mask is None else ls.mask_mod(mask)
    out, lse = oracle(*leaves[:3], mask=given, score_mod=mod, scale=scale, sink=sink, return_lse=True)
    want, want_lse = row_by_row(*leaves[:3], mask, mod, scale, sink)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert torch.equal(oracle(*leaves[:3], mask=given, score_mod=mod, scale=scale, sink=sink), out)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for got, right in zip(torch.autograd.grad((out * weight).sum(), leaves), torch.autograd.grad((want * weight).sum(), leaves)):
        torch.testing.assert_close(got, right)


def test_mods_read_tables_by_tensors_and_numbers() -> None:
    q, k, v = inputs()
    table = torch.randn(H, Q, K, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    first = torch.arange(12.0, dtype=torch.float64).view(2, 6)
    mod = lambda s, b, h, i, j: s + table[h, i, j] + first[1, h] + first[0][h]
    got = oracle(q, k, v, score_mod=mod)
    want = row_by_row(q, k, v, mod=mod)[0]
    torch.testing.assert_close(got, want)
    (grad,), (right,) = (torch.autograd.grad(x.square().sum(), table) for x in (got, want))
    torch.testing.assert_close(grad, right)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_hidden_tokens_change_nothing_and_visible_ones_do(bad: float) -> None:
    q, k, v = inputs()
    hidden = lambda b, h, i, j: (j != 4) & (j != 1)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    right = oracle(*leaves, mask=ls.mask_mod(hidden))
    right_grads = torch.autograd.grad(right.square().sum(), leaves)
    for t in (k, v):
        t[:, :, 4] = bad
    v[0, 0, 1, 2] = bad
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    got = oracle(*leaves, mask=ls.mask_mod(hidden))
    assert torch.equal(got, right)
    for grad, want in zip(torch.autograd.grad(got.square().sum(), leaves), right_grads):
        torch.testing.assert_close(grad, want)
    one_row = oracle(*(t.detach() for t in (q, k, v)), mask=ls.mask_mod(lambda b, h, i, j: (j != 4) & ((j != 1) | (i == 3))))
    assert one_row[:, :, [0, 1, 2, 4]].isfinite().all() and not one_row[0, :2, 3, 2].isfinite().any()
    v[0, 0, 1, 2] = 0.5
    finite = oracle(*(t.detach() for t in (q, k, v)), mask=ls.mask_mod(lambda b, h, i, j: (j != 4) & ((j != 1) | (i == 3))))
    assert torch.equal(one_row[0, :2, 3, :2], finite[0, :2, 3, :2])
    assert one_row[0, :2, 3, :2].isfinite().all() and one_row[1].isfinite().all() and one_row[0, 2:].isfinite().all()


def test_masks_of_tables_and_dtypes() -> None:
    q, k, v = inputs()
    dense = torch.rand(Q, K, generator=torch.Generator().manual_seed(5)) < 0.6
    got = oracle(q, k, v, mask=ls.mask_mod(lambda b, h, i, j: dense[i, j]))
    torch.testing.assert_close(got, row_by_row(q, k, v, lambda b, h, i, j: bool(dense[i, j]))[0])
    narrow = oracle(q.float(), k.float(), v.float(), dtype=torch.bfloat16, sink=torch.zeros(H), return_lse=True)
    assert narrow[0].dtype == narrow[1].dtype == torch.bfloat16 and narrow[1].shape == (B, H, Q)
    assert oracle(q.float(), k.float(), v.float()).dtype == torch.float64
    mod = lambda s, b, h, i, j: s.float() * 2
    assert oracle(q, k, v, score_mod=mod, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("got", "right", "want"),
    [
        ([1.0, 2.5], [1.0, 2.0], 0.5),
        ([1.0, -4.0], [1.0, 2.0], 6.0),
        ([1.0, math.inf], [1.5, math.inf], 0.5),
        ([1.0, -math.inf], [1.0, math.inf], math.inf),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, math.inf], math.inf),
        ([1.0, 2.0, 3.0], [1.0, 2.0], math.inf),
        ([-math.inf, -math.inf], [-math.inf, -math.inf], 0.0),
        ([], [], 0.0),
    ],
)
def test_errors_are_the_largest_where_infinities_agree(got: list[float], right: list[float], want: float) -> None:
    assert error(torch.tensor(got, dtype=torch.float32), torch.tensor(right, dtype=torch.float64)) == want


def test_budgets_by_hand() -> None:
    """One KV head serves two query heads, whose rows of grad_out are (4, 2) and (4, −6)."""
    v = torch.tensor([[2.0, 0.0], [-1.0, 4.0]]).bfloat16()[None, None]
    grad_out = torch.tensor([[[4.0, 2.0]], [[4.0, -6.0]]]).bfloat16()[None]
    terms = products = 28.0  # |−4 − 24|, and 4 + 24
    narrow, wide = 2.0**-7, 2.0**-23
    right = {"out": torch.tensor([1.0, -3.0] * 9), "lse": torch.tensor([0.5, 100.0] * 9), "bias": torch.tensor([2.0] * 17)}
    right = {name: t.double() for name, t in right.items()}
    dense = {"out": right["out"] + 0.25, "lse": right["lse"] - 0.125, "bias": right["bias"].clone()}
    made = budgets(right, dense, v=v, grad_out=grad_out, captured=["bias"])
    assert made["out"] == pytest.approx(2 * 0.25 + 2 * wide * terms + narrow * 3, rel=1e-12)
    assert made["lse"] == pytest.approx(2 * 0.125 + 2 * wide * 100 + wide * 100, rel=1e-12)
    assert made["bias"] == pytest.approx(2 * wide * products * 2**0.5 + wide * 2, rel=1e-12)  # two query rows
    dense["bias"] = right["bias"] + 0.5
    signs = torch.tensor([[[4.0, 6.0]], [[4.0, -6.0]]]).bfloat16()[None]
    mixed = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]).bfloat16()[None, None]
    made = budgets(right, dense, v=mixed, grad_out=signs, captured=["bias"])  # sums to 10; so do the absolute values
    assert made["bias"] == pytest.approx(2 * 0.5 + 2 * wide * 10 * 2**0.5 + wide * 2, rel=1e-12)
    opposed = torch.tensor([[4.0, -6.0]]).bfloat16()[None, None]
    ones = torch.ones(1, 1, 1, 2).bfloat16()  # 4 − 6 = −2, of 10
    exact = budgets(right, {**dense, "bias": right["bias"]}, v=ones, grad_out=opposed, captured=["bias"])["bias"]
    assert exact == pytest.approx(2 * wide * 10 + wide * 2, rel=1e-12)
    off = budgets(right, dense, v=ones, grad_out=opposed, captured=["bias"])["bias"]
    assert off == pytest.approx(1 + 2 * wide * 2 + wide * 2, rel=1e-12)


@pytest.mark.parametrize(("elements", "used"), [(15, True), (16, True), (17, False)])
def test_other_draws_count_for_few_elements(elements: int, used: bool) -> None:
    assert budget.FEW == 16
    zero = {"dq": torch.zeros(elements, dtype=torch.float64)}
    others = [(zero, {"dq": zero["dq"] + 3}), (zero, {"dq": zero["dq"] - 5})]
    one = torch.zeros(1, 1, 1, 1)
    assert budgets(zero, zero, v=one, grad_out=one, others=others)["dq"] == (10.0 if used else 0.0)


def test_a_score_mod_in_a_wider_dtype_leaves_results_in_the_oracles_dtype() -> None:
    q, k, v = inputs()
    wide = torch.full((K,), 0.25, dtype=torch.float64)
    results = [
        oracle(q, k, v, score_mod=lambda s, b, h, i, j: s + wide[j], return_lse=True, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    ]
    assert [[t.dtype for t in made] for made in results] == [[torch.float32] * 2, [torch.float64] * 2]
    torch.testing.assert_close([t.double() for t in results[0]], list(results[1]), rtol=1e-5, atol=1e-5)


def test_rows_whose_keys_all_get_a_score_of_minus_infinity_are_empty() -> None:
    q, k, v = (t.requires_grad_() for t in inputs())
    out, lse = oracle(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i == 2, -torch.inf, s), return_lse=True)
    assert not out[:, :, 2].any() and (lse[:, :, 2] == -torch.inf).all()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(out[:, :, others], oracle(q, k, v)[:, :, others])
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert not grads[0][:, :, 2].any() and all(g.isfinite().all() for g in grads)


def test_a_score_mod_may_take_rows_of_a_table() -> None:
    q, k, v = inputs()
    table = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    row = torch.tensor(1)
    out = oracle(q, k, v, score_mod=lambda s, b, h, i, j: s * table[row, :].sum() / 12 + table[row, 2] * j)
    torch.testing.assert_close(out, oracle(q, k, v, score_mod=lambda s, b, h, i, j: s + 5.0 * j))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_everything_is_computed_in_the_given_dtype(dtype: torch.dtype) -> None:
    """Also where inputs, the sink or the results of a score_mod have others."""
    q, k, v = (x.to(torch.bfloat16) for x in inputs())
    sink = torch.randn(H, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    want = oracle(*(x.to(dtype) for x in (q, k, v)), mask=some, score_mod=shifted, sink=sink.to(dtype), return_lse=True, dtype=dtype)
    assert [x.dtype for x in want] == [dtype] * 2
    for given in ((q.double(), k, v), (q, k.double(), v), (q, k, v.double()), (q, k, v)):
        for sink_dtype in (torch.float64, torch.float32):
            got = oracle(*given, mask=some, score_mod=shifted, sink=sink.to(sink_dtype), return_lse=True, dtype=dtype)
            assert [x.dtype for x in got] == [dtype] * 2 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    out, lse = oracle(q, k, v, score_mod=lambda s, b, h, i, j: s.double(), return_lse=True, dtype=dtype)
    assert out.dtype == lse.dtype == dtype


def test_errors_of_results_in_other_dtypes() -> None:
    right = torch.tensor([math.inf, 1.5, -math.inf], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert error(torch.tensor([math.inf, 1.25, -math.inf], dtype=dtype), right) == 0.25
        assert error(right, torch.tensor([math.inf, 1.25, -math.inf], dtype=dtype)) == 0.25
        assert error(torch.tensor([math.inf, 1.25, math.inf], dtype=dtype), right) == math.inf
