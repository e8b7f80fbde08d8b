"""Checks of the arguments of `shard`, `unshard`, `relayout`, `gather_pooled` and `query_blocks`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan._plan.plan_data import PlanData
from longspan._plan.relayout import HeadsLayout
from longspan._planner.plan_arguments import check_block, check_keys, checked_relayout, checked_side

# Rank 1 of 2 owns queries 4 … 6 and keys 3 … 10.
Q = ls.Layout(length=7, rows=((((0, 4),), ((4, 3),)),))
KV = ls.Layout(length=11, rows=((((0, 3),), ((3, 8),)),))
BOTH = ls.Layout(length=11, rows=((((0, 8),), ((8, 3),)),))  # rank 1 owns as many keys as queries
BY_ROW = ls.Layout(length=7, rows=((((0, 4),), ((4, 3),)), (((3, 4),), ((0, 3),))))


def data(layouts: Any = (Q, KV), lengths: Any = (7, 11), **options: Any) -> PlanData:
    return ls.plan(ls.full(), lengths, ls.Mesh.abstract(2, rank=1), layout=layouts, strategy="ring", **options).data


def side_of(plan: PlanData, shape: tuple[int, ...], dim: int, side: Any, local: bool) -> int:
    return checked_side(plan, torch.zeros(shape), dim, side, "shard", local=local)


@pytest.mark.parametrize(
    ("shape", "dim", "side", "local", "index"),
    [
        ((2, 7), 1, None, False, 0),
        ((2, 11), -1, None, False, 1),
        ((7, 11), 0, None, False, 0),
        ((7, 11), 1, "kv", False, 1),
        ((3, 8), 0, None, True, 0),
        ((3, 8), -1, None, True, 1),
        ((3, 8), -2, "q", True, 0),
    ],
)
def test_tokens_are_queries_or_keys_by_their_number(shape: tuple[int, ...], dim: int, side: Any, local: bool, index: int) -> None:
    assert side_of(data(), shape, dim, side, local) == index


@pytest.mark.parametrize(
    ("shape", "dim", "side", "local", "message"),
    [
        ((2, 7), 1, "kv", False, r"plan.shard: expected size kv 11 in dim 1, got \(2, 7\)"),
        ((2, 11), 1, "q", False, r"plan.shard: expected size q 7 in dim 1, got \(2, 11\)"),
        ((2, 7), 1, None, True, r"plan.shard: expected size q 3 or kv 8 in dim 1, got \(2, 7\)"),
        ((2, 7), 2, None, False, r"plan.shard: dim 2 is not a dim of a tensor of shape \(2, 7\)"),
        ((2, 7), -3, None, False, r"plan.shard: dim -3 is not a dim"),
        ((2, 7), 1, "k", False, "plan.shard: side must be 'q', 'kv' or None, got 'k'"),
    ],
)
def test_other_numbers_of_tokens_dims_and_sides_raise(shape: tuple[int, ...], dim: int, side: Any, local: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        side_of(data(), shape, dim, side, local)


def test_equally_many_queries_and_keys_of_different_layouts_need_a_side() -> None:
    plan = data((Q, BOTH))
    with pytest.raises(ValueError, match="queries and keys have 3 tokens here: say side='q' or side='kv'"):
        side_of(plan, (3, 2), 0, None, True)
    assert (side_of(plan, (3, 2), 0, "q", True), side_of(plan, (3, 2), 0, "kv", True)) == (0, 1)
    same = data(Q, 7)
    assert side_of(same, (3, 2), 0, None, True) == 0 and side_of(same, (7, 2), 0, None, False) == 0


def test_batch_rows_with_layouts_of_their_own_are_dim_0() -> None:
    plan = data(BY_ROW, 7, batch=2)
    assert side_of(plan, (2, 3), 1, None, True) == 0
    for shape, dim in (((3, 3), 1), ((3, 2), 0), ((3, 2), -2), ((1, 3), 1)):
        with pytest.raises(ValueError, match=r"batch rows are laid out differently: dim 0 must be the batch of 2"):
            side_of(plan, shape, dim, None, True)


def move(shape: tuple[int, ...], dim: int, ends: Any, heads_dim: int | None = None, side: str = "q", plan: Any = None) -> Any:
    return checked_relayout(plan or data(), torch.zeros(shape), dim, ends, heads_dim, side)


def test_moves_between_layouts_and_heads() -> None:
    got = move((5, 3), -1, ("plan", "contiguous"))
    assert (got.before, got.after.rows, got.dim, got.heads_dim) == (Q, ((((0, 3),), ((3, 4),)),), 1, None)
    assert move((5, 8), 1, ("plan", "contiguous"), side="kv").before == KV
    heads = move((4, 3, 2), -2, ("plan", "heads"), -3)
    assert heads.after == HeadsLayout(length=7, ranks=2) and (heads.dim, heads.heads_dim) == (1, 0)
    back = move((3, 7, 2), 1, ("heads", "plan"), 0)  # heads that came from anywhere need not divide
    assert back.before == HeadsLayout(length=7, ranks=2) and back.after == Q
    assert move((2, 3), 1, (Q, BY_ROW)).batch_rows == 2


@pytest.mark.parametrize(
    ("shape", "dim", "ends", "heads_dim", "side", "message"),
    [
        ((3, 3), 1, ("plan", "contiguous"), None, None, "plan.relayout: side must be 'q' or 'kv', got None"),
        ((3, 3), 2, ("plan", "contiguous"), None, "q", r"expected different dims of a tensor of shape \(3, 3\), got \[2\]"),
        ((3, 3), -3, ("plan", "contiguous"), None, "q", r"expected different dims of a tensor of shape \(3, 3\), got \[-3\]"),
        ((4, 3), 1, ("plan", "heads"), -1, "q", r"expected different dims of a tensor of shape \(4, 3\), got \[1, -1\]"),
        ((4, 3), 1, ("plan", "heads"), 2, "q", r"expected different dims of a tensor of shape \(4, 3\), got \[1, 2\]"),
        ((4, 7), 1, ("heads", "heads"), 0, "q", "source and to are both 'heads'; give one layout of tokens"),
        ((4, 3), 1, ("plan", "heads"), None, "q", "'heads' needs heads_dim=, the dim of heads"),
        ((5, 3), 1, ("plan", "heads"), 0, "q", r"5 heads \(dim 0\) do not divide by 2 ranks: use 'contiguous'"),
        ((4, 3), 1, ("plan", "contiguous"), 0, "q", "heads_dim= is used with 'heads' only; leave it out"),
        ((4, 4), 1, ("plan", "contiguous"), None, "q", r"expected 3 tokens in dim 1, the source layout's, got \(4, 4\)"),
        ((4, 3), 1, ("plan", "diagonal"), None, "q", "expected a Layout, 'plan', 'contiguous' or 'heads', got 'diagonal'"),
        ((4, 3), 1, ("plan", KV), None, "q", "7 tokens over 2 ranks for 1 batch rows or for all, got 11 tokens over 2 ranks for 1"),
        ((3, 3), 1, (Q, BY_ROW), None, "q", r"batch rows are laid out differently: dim 0 must be the batch of 2, got \(3, 3\)"),
        ((3, 2), 0, (Q, BY_ROW), None, "q", "batch rows are laid out differently: dim 0 must be the batch of 2"),
        ((2, 3, 2), 1, (BY_ROW, "heads"), 0, "q", "batch rows are laid out differently: dim 0 must be the batch of 2"),
    ],
)  # fmt: skip
def test_other_moves_raise(shape: Any, dim: int, ends: Any, heads_dim: int | None, side: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        move(shape, dim, ends, heads_dim, side)


def test_layouts_of_moves_have_one_row_or_one_for_each_batch_row() -> None:
    plan, three = data(BY_ROW, 7, batch=2), ls.Layout(length=7, rows=(Q.rows[0],) * 3)
    assert move((2, 3), 1, ("plan", Q), plan=plan).after is Q and move((2, 3), 1, ("plan", BY_ROW), plan=plan).after is BY_ROW
    with pytest.raises(ValueError, match="7 tokens over 2 ranks for 2 batch rows or for all, got 7 tokens over 2 ranks for 3 batch rows"):
        move((2, 3), 1, ("plan", three), plan=plan)
    short = ls.Layout(length=7, rows=((((0, 4),), ((4, 2),), ((6, 1),)),))
    with pytest.raises(ValueError, match="got 7 tokens over 3 ranks for 1 batch rows"):
        move((2, 3), 1, ("plan", short))


def test_blocks_are_counts_of_tokens_of_one_layout() -> None:
    check_block("x", 1, "keys", Q)
    for block in (0, True, 2.0, "3"):
        with pytest.raises(ValueError, match=rf"plan.x: expected a block of 1 or more keys, got {block!r}"):
            check_block("x", block, "keys", Q)
    with pytest.raises(ValueError, match=r"plan.x: expected one layout for all batch rows, got one per batch row"):
        check_block("x", 4, "keys", BY_ROW)


def test_pooled_values_are_of_this_ranks_keys() -> None:
    plan = data()
    check_keys(plan, torch.zeros(8, 3), 0)
    check_keys(plan, torch.zeros(3, 8), -1)
    for x, dim in ((torch.zeros(3, 8), 0), (torch.zeros(8, 3), 2), (torch.zeros(8, 3), -3)):
        with pytest.raises(ValueError, match=rf"expected this rank's 8 keys in dim {dim}, got shape"):
            check_keys(plan, x, dim)
    for wrong, name in ((torch.zeros(8).int(), "torch.int32"), ([1.0] * 8, "list")):
        with pytest.raises(TypeError, match=f"plan.gather_pooled: expected a floating-point tensor, got {name}"):
            check_keys(plan, wrong, 0)
