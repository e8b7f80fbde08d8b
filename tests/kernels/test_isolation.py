"""Whatever stands in a key, value, query or gradient, rows that may not see it and keys that it may not see keep every bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._kernels import nonfinite
from longspan.testing import oracle, virtual_world

LENGTH, DIM = 300, 8
POSITIONS = [17, 40, 129, 200, 299]  # of the non-finite vectors; 40 is padding in "padded"


def ids(length: int = LENGTH) -> Tensor:
    """Documents of uneven lengths with padding between."""
    out = torch.arange(length) // 70
    out[35:60] = -1
    out[250:] = -1
    out[290:] = 9
    return out


MASKS: dict[str, Any] = {
    "causal": ls.causal(),
    "documents": ls.causal() & ls.documents(lengths=[100, 33, 167]),
    "padded": ls.causal() & ls.documents(ids=ids()),
    "window": ls.sliding_window(30, 0),
    "prefix": ls.causal() | ls.prefix(90),
    "per_head": ls.mask_mod(lambda b, h, q, kv: (q - kv).abs() < 40 * (h + 1)),
    "blocks": ls.mask_mod(lambda b, h, q, kv: (q >= kv) | ((kv // 128 == 2) & (q // 128 == 0))),
}
MASKS["keys"] = ls.mask_mod(lambda b, h, q, kv: kv < 140)
MASKS["two_squares"] = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & ((q < 128) == (kv < 128)))
BAD = [torch.inf, -torch.inf, torch.inf, 3e38]


def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 4 * torch.tanh(score / 4)


def tensors(value_dim: int = DIM) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": (2, 4, DIM), "k": (2, 2, DIM), "v": (2, 2, value_dim), "grad": (2, 4, value_dim)}
    return {name: torch.randn(b, h, LENGTH, d, generator=generator) for name, (b, h, d) in shapes.items()}


Results = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def results(call: Callable[..., Any], given: dict[str, Tensor], *, through_lse: bool = False) -> dict[str, Tensor]:
    q, k, v = (given[name].clone().requires_grad_() for name in "qkv")
    out, lse = call(q, k, v, return_lse=True)
    outputs, grads = ([out, lse], [given["grad"].to(out.dtype), torch.ones_like(lse)]) if through_lse else ([out], [given["grad"].to(out)])
    dq, dk, dv = torch.autograd.grad(outputs, [q, k, v], grads)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def visible(mask: Any) -> Tensor:
    """[2, 4, LENGTH, LENGTH]."""
    b, h = torch.arange(2).view(-1, 1, 1, 1), torch.arange(4).view(1, -1, 1, 1)
    q, kv = torch.arange(LENGTH).view(-1, 1), torch.arange(LENGTH)
    return mask(b, h, q, kv).expand(2, 4, LENGTH, LENGTH)


def affected(name: str, where: int, seen: Tensor) -> dict[str, Tensor]:
    """Which vectors of each result may change, [2, heads, LENGTH], when vector `where` of an input does."""
    none = torch.zeros(2, 4, LENGTH, dtype=torch.bool)
    this = none.clone()
    this[:, :, where] = True
    rows = seen[..., where] if name in "kv" else this
    # A row that changed gives other gradients to all keys that it sees.
    keys = (seen & rows[..., None]).any(-2) | (this if name in "kv" else none)
    keys = keys.unflatten(1, (2, 2)).any(2)
    return {"out": none if name == "grad" else rows, "lse": rows if name in "qk" else none, "dq": rows, "dk": keys, "dv": keys}


def check(compute: Results, mask: Any, given: dict[str, Tensor]) -> None:
    seen = visible(mask)
    right = compute(given)
    empty = ~seen.any(-1)
    assert (
        bool((right["out"][empty] == 0).all()) and bool((right["lse"][empty] == -torch.inf).all()) and bool((right["dq"][empty] == 0).all())
    )
    for i, name in enumerate(given):
        # One value and place per batch row, in one call.
        poison = ((torch.nan, POSITIONS[i]), (BAD[i], POSITIONS[i + 1]))
        changed = {n: t.clone() for n, t in given.items()}
        for row, (value, where) in enumerate(poison):
            changed[name][row, :, where] = value
        got = compute(changed)
        for row, (value, where) in enumerate(poison):
            for result, may in affected(name, where, seen).items():
                same = (got[result] == right[result]) | (got[result].isnan() & right[result].isnan())
                same = same if result == "lse" else same.all(-1)
                at = torch.nonzero(~same[row] & ~may[row]).tolist()
                assert not at, f"{name}[{where}] = {value}: {result} changed in {len(at)} vectors that may not see it, such as {at[:3]}"
            if value != value and name != "grad":
                rows = (affected(name, where, seen)["out"] & seen.any(-1))[row]
                nans = [got[result][row].isnan().any(-1) for result in ("out", "dq")]
                assert torch.equal(nans[0], rows) and torch.equal(nans[1], rows), f"{name}[{where}]"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["flash", "score_mod", "value_dim", "through_lse"])
def test_the_cpu_kernel_isolates_rows(mask: str, kind: str) -> None:
    score_mod = soft_cap if kind == "score_mod" else None
    given = tensors(DIM - 3 if kind == "value_dim" else DIM)
    call = lambda q, k, v, **how: ls.attention(q, k, v, mask=MASKS[mask], score_mod=score_mod, kernel="cpu", **how)
    check(partial(results, call, through_lse=kind == "through_lse"), MASKS[mask], given)


@pytest.mark.parametrize("mask", MASKS)
def test_the_dense_kernel_and_the_oracle_isolate_rows(mask: str) -> None:
    given = tensors()
    dense, by_definition = partial(ls.attention, mask=MASKS[mask], kernel="dense"), partial(oracle, mask=MASKS[mask])
    check(partial(results, dense), MASKS[mask], given)
    check(partial(results, by_definition), MASKS[mask], {name: t.double() for name, t in given.items()})


@pytest.mark.parametrize("mask", MASKS)
def test_a_nan_in_one_query_head_reaches_the_gradients_of_all_keys_that_it_sees(mask: str) -> None:
    given, where = tensors(), 129
    given["q"][0, 1, where] = torch.nan
    seen = visible(MASKS[mask])[0, 1, where]
    got = results(partial(ls.attention, mask=MASKS[mask], kernel="cpu"), given)
    for name in ("dk", "dv"):
        nans = got[name].isnan().any(-1)
        assert torch.equal(nans[0, 0], seen) and not nans[0, 1].any() and not nans[1].any(), name


@pytest.mark.parametrize("through_lse", [False, True])
@pytest.mark.parametrize("mask", ["causal", "two_squares"])
def test_the_flash_kernel_isolates_rows_on_cpu(mask: str, through_lse: bool) -> None:
    call = lambda q, k, v, **how: ls.attention(q, k, v, mask=MASKS[mask], kernel="flash", scale=-0.4, **how)
    check(partial(results, call, through_lse=through_lse), MASKS[mask], tensors())


@pytest.mark.parametrize("strategy", ["ring", "exchange", "ulysses"])
def test_ranks_isolate_rows(strategy: str) -> None:
    mask, world = MASKS["padded"], virtual_world(2)
    made = ls.plan(
        mask, LENGTH, ls.Mesh.abstract(2), layout="head_tail", strategy=strategy, batch=2, heads=4, kv_heads=2, head_dim=DIM
    )  # fmt: skip

    def compute(given: dict[str, Tensor]) -> dict[str, Tensor]:
        def rank(mesh: Any) -> dict[str, Tensor]:
            plan = made.on(mesh)
            local = {name: plan.shard(t, 2) for name, t in given.items()}
            return {name: plan.unshard(t, 2) for name, t in results(partial(ls.attention, plan=plan), local).items()}

        return world.run(rank)[0]

    check(compute, mask, tensors())


def test_vectors_of_the_largest_norm_are_within_it() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 5.5], [torch.nan, 0.0], [torch.inf, 0.0]])
    assert [nonfinite.within(5.0, row) for row in x] == [True, False, False, False]
    assert nonfinite.beyond(5.0, x).tolist() == [False, True, True, True]
    assert nonfinite.within(5.0) and not nonfinite.within(5.0, x[0], x[1]) and nonfinite.within(5.0, x[0], x[0])
    assert nonfinite.beyond(5.0, x[:2], x[1:3]).tolist() == [True, True]
    largest = nonfinite.largest_norm(torch.float32, 4.0)
    assert (2 * largest) ** 2 * 4.0 == pytest.approx(torch.finfo(torch.float32).max)
    assert nonfinite.largest_norm(torch.float32, -0.25) == nonfinite.largest_norm(torch.float32, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_products_of_masked_matrices_with_infinities_and_nans_equal_sums_of_visible_terms(dtype: torch.dtype) -> None:
    """Each entry of x beside each factor of a, visible and hidden: 0 · inf is NaN where it is visible."""
    entries = [0.0, 2.0, torch.inf, -torch.inf, torch.nan]
    a = torch.tensor([0.0, 3.0, -3.0], dtype=dtype).repeat_interleave(2).repeat_interleave(2)[:, None].expand(12, 2).clone()
    seen = torch.tensor([[True, True], [True, False], [False, True], [False, False]]).repeat(3, 1)
    for first in entries:
        for second in entries:
            x = torch.tensor([[first], [second]], dtype=dtype)
            terms = torch.where(seen, a * x.mT, 0.0)
            torch.testing.assert_close(nonfinite.masked_product(torch.matmul, a, x, seen), terms.sum(1, keepdim=True), equal_nan=True)
