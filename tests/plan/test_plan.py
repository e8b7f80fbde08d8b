"""Plans as values: legal and illegal arguments, sharding, pickling, memory."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._plan.handle import live
from longspan._plan.strategies import LAYOUT_NAMES, Strategy
from longspan.testing import virtual_world

MESH = ls.Mesh.abstract(4, rank=1)


def test_one_layout_serves_several_masks() -> None:
    plans = ls.plan({"full": ls.causal(), "sliding": ls.causal() & ls.sliding_window(64)}, 1000, MESH)
    assert list(plans) == ["full", "sliding"]
    assert plans["full"].layout == plans["sliding"].layout
    assert torch.equal(plans.positions, plans["sliding"].positions) and plans.local_len == plans["full"].local_len
    assert plans["sliding"].report().received.sum() < plans["full"].report().received.sum()
    with pytest.raises(KeyError, match="'full', 'sliding'"):
        plans["global"]
    x = torch.randn(2, 1000)
    assert torch.equal(plans.shard(x, 1), x[:, plans.positions])


def test_a_ring_has_one_stage_fewer_than_ranks_and_an_all_gather_one() -> None:
    stages = {s: ls.plan(ls.causal(), 1000, MESH, strategy=s).schedule.stages for s in ("ring", "allgather")}
    assert stages == {"ring": 3, "allgather": 1}
    assert ls.plan(ls.causal(), 1000, MESH, strategy="exchange", stages=2).schedule.stages == 2
    assert ls.plan(ls.causal(), 1000, MESH, strategy="ring", stages=3).schedule.stages == 3
    two = ls.Mesh.abstract((3, 2), axis_names=("ring", "ulysses"))
    assert ls.plan(ls.causal(), 1000, two, strategy="ulysses_exchange", stages=4).schedule.stages == 4
    with pytest.raises(ValueError, match=r"has 2 stages, .* use strategy='ulysses_exchange'"):
        ls.plan(ls.causal(), 1000, two, strategy="ulysses_ring", stages=3)


@pytest.mark.parametrize("strategy", ["ring", "allgather", "exchange"])
def test_moves_are_sorted_and_neighbours_are_one_move(strategy: Any) -> None:
    mask = ls.causal() & ls.documents(lengths=[[300, 100, 111], [11, 200, 300]])
    for layout in ("head_tail", "per_document"):  # per_document: one layout per batch row
        options = {"stages": 3} if strategy == "exchange" else {}
        moves = ls.plan(mask, 511, ls.Mesh.abstract(5), layout=layout, strategy=strategy, batch=2, **options).schedule
        columns = (moves.stage, moves.receiver, moves.source, moves.row, moves.start, moves.length)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        assert rows == sorted(rows)
        for (*key, start, length), (*next_key, next_start, _) in pairwise(rows):
            assert key != next_key or layout == "per_document" or start + length < next_start


def test_a_user_layout_and_a_user_schedule_are_used() -> None:
    layout = ls.Layout(length=1000, rows=((((0, 100), (900, 100)), ((100, 1),), (), ((101, 799),)),))
    plan = ls.plan(ls.causal(), 1000, MESH, layout=layout, strategy="exchange")
    assert plan.local_len == 1 and plan.positions.tolist() == [100]
    again = ls.plan(ls.causal(), 1000, MESH, layout=layout, strategy=plan.schedule)
    assert again.schedule is plan.schedule
    with pytest.raises(ValueError, match="the given schedule has"):
        ls.plan(ls.causal(), 1000, MESH, layout=layout, strategy=plan.schedule, stages=plan.schedule.stages + 1)
    with pytest.raises(ValueError, match="must arrive exactly once"):
        ls.plan(ls.full(), 1000, MESH, layout=layout, strategy=plan.schedule)


def test_tokens_that_a_rank_does_not_read_may_arrive_once_but_not_twice() -> None:
    """By a causal mask over contiguous shards, rank 0 reads tokens of its own only."""
    every = ls.plan(ls.full(), 1024, MESH, layout="contiguous", strategy="exchange").schedule
    assert ls.plan(ls.causal(), 1024, MESH, layout="contiguous", strategy=every).schedule is not None
    again = torch.cat([torch.arange(len(every.stage)), torch.nonzero((every.receiver == 0) & (every.source == 3)).flatten()[:1]])
    columns = {name: getattr(every, name)[again] for name in ("stage", "receiver", "source", "row", "start", "length")}
    with pytest.raises(ValueError, match=r"tokens 768… arrive 2 times at rank 0; .* must arrive exactly once"):
        ls.plan(ls.causal(), 1024, MESH, layout="contiguous", strategy=replace(every, **columns))


@pytest.mark.parametrize(("strategy", "degree", "copies"), [("ring", 1, 1), ("ulysses", 4, 2)])
def test_the_report_counts_the_memory_of_each_part(strategy: str, degree: int, copies: int) -> None:
    """Batch 3, 8 query and 2 KV heads of 64 dims in 2 bytes, 256 tokens of each rank; over 4 ranks, KV heads are sent twice."""
    made = ls.plan(
        ls.full(), 1024, ls.Mesh.abstract(4), layout="contiguous", strategy=strategy, batch=3, heads=8, kv_heads=2, head_dim=64
    )  # fmt: skip
    q, k = 256 * 3 * 8 * 64, 256 * 3 * 2 * 64
    parts = made.report().memory_parts
    assert parts["q, k, v, out, lse"] == 2 * (2 * q + 2 * k) + 4 * 256 * 3 * 8
    assert parts["gradients, float32"] == 4 * (q + 2 * k * copies)
    assert parts["transposed copies"] == (2 * (3 * q + 2 * k * copies) if degree > 1 else 0)


def test_the_report_has_balance_bytes_memory_and_time() -> None:
    plan = ls.plan(ls.causal(), 4096, MESH, layout="head_tail", strategy="ring", heads=8, kv_heads=2, head_dim=64)
    report = plan.report()
    assert report.balance < 1.01 and report.received.shape == (3, 4) and report.share == 1.0
    assert int(report.bytes_received[0, 0]) == 1024 * 2 * 2 * 64 * 2
    assert report.seconds > 0 and "all-gather" in str(report) and report.in_flight <= 2 * 16384


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layout": "diagonal"}, "'contiguous', 'head_tail', 'per_document', 'round_robin', 'auto'"),
    ({"strategy": "carrier pigeon"}, "'ring', 'allgather', 'exchange', 'ulysses'"),
    ({"strategy": "ulysses_ring"}, "needs a mesh of two axes"),
    ({"strategy": "ulysses", "heads": 6}, "6 query heads do not divide by a Ulysses degree of 4"),
    ({"strategy": "ulysses", "heads": 12, "kv_heads": 6}, "one must divide the other"),
    ({"seq_len": 0}, "1 or more"),
    ({"seq_len": (10, 20, 30)}, "q_len, kv_len"),
    ({"heads": 6, "kv_heads": 4}, "multiple of kv_heads"),
    ({"batch": 0}, "batch must be an int of 1 or more"),
    ({"layout": "per_document"}, "longspan.documents"),
    ({"layout": "per_document", "seq_len": (10, 20)}, "same tokens"),
    ({"layout": ls.Layout(length=5, rows=((((0, 5),),),))}, "over 4 ranks"),
    ({"stages": 0}, "stages must be 1 or more"),
    ({"stages": 1.5}, "stages must be 1 or more"),
    ({"stages": 2, "strategy": "ring"}, "'ring' over 4 ranks has 3 stages, .* got stages=2: leave it out, or use strategy='exchange'"),
    ({"stages": 2, "strategy": "allgather"}, "'allgather' over 4 ranks has 1 stages"),
    ({"stages": 1, "strategy": "ulysses"}, "'ulysses' over 4 ranks has 0 stages"),
    ({"stages": 2, "strategy": "ring", "mask": {"a": ls.causal(), "b": ls.full()}}, "got stages=2"),
    ({"grad_reduce_dtype": torch.int32}, "floating-point"),
    ({"grad_reduce_dtype": "bfloat16"}, "a torch.dtype such as torch.bfloat16, got 'bfloat16'"),
    ({"mask": ls.documents(lengths=[5, 6])}, "q_len=11"),
    ({"mask": ls.mask_mod(lambda b, h, q, kv: q + h >= kv)}, "say heads="),
    ({"mask": {}}, "empty dict"),
]


@pytest.mark.parametrize(("wrong", "says"), REFUSED, ids=[says[:24] for _, says in REFUSED])
def test_illegal_arguments_raise(wrong: dict[str, Any], says: str) -> None:
    options = {"mask": ls.causal(), "seq_len": 1000, **wrong}
    with pytest.raises((ValueError, TypeError), match=says):
        ls.plan(options.pop("mask"), options.pop("seq_len"), MESH, **options)


def test_a_mesh_with_two_axes_needs_a_two_axis_strategy() -> None:
    mesh = ls.Mesh.abstract((2, 3), axis_names=("ring", "ulysses"))
    with pytest.raises(ValueError, match="runs over one axis"):
        ls.plan(ls.causal(), 1000, mesh, strategy="ring")
    assert ls.plan(ls.causal(), 1000, mesh, heads=6).strategy == "ulysses_exchange"


@pytest.mark.parametrize("names", [("dp", "cp"), ("cp", "dp_shard"), ("tp", "cp")], ids=str)
def test_of_axes_of_batches_or_heads_beside_cp_a_plan_takes_cp(names: tuple[str, str]) -> None:
    mesh = ls.Mesh.abstract((2, 3), rank=5, axis_names=names)
    planned = ls.plan(ls.causal(), 1000, mesh, strategy="ring").mesh
    along = names.index("cp")
    assert (planned.axes, planned.coordinate) == ((("cp", (2, 3)[along]),), ((1, 2)[along],))


@pytest.mark.parametrize("names", [("pp", "cp"), ("dp", "tp"), ("dp", "ring")], ids=str)
def test_axes_of_which_not_all_names_are_roles_beside_cp_raise(names: tuple[str, str]) -> None:
    mesh = ls.Mesh.abstract((2, 3), axis_names=names)
    with pytest.raises(ValueError, match="expected an axis 'cp' beside any of"):
        ls.plan(ls.causal(), 1000, mesh, heads=6)
    with pytest.raises(ValueError, match="expected an axis 'cp' beside any of"):
        ls.KVCache(pages=4, layers=1, kv_heads=2, head_dim=8, mesh=mesh)


@pytest.mark.parametrize("lengths", [1000, (1000, 500)], ids=["self", "cross"])
def test_a_layout_name_without_a_layout_raises(lengths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan._planner.request.LAYOUT_NAMES", (*LAYOUT_NAMES, "spiral"))
    with pytest.raises(NotImplementedError, match=r"layout 'spiral': expected 'contiguous', .* or 'auto'"):
        ls.plan(ls.full(), lengths, MESH, layout="spiral")  # type: ignore[arg-type]


def test_moves_without_a_schedule_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Strategy(name="tree", head_axis=None, kv_axis=0, moves="tree")  # type: ignore[arg-type]
    monkeypatch.setattr("longspan._planner.build.strategy_for", lambda name, mesh: tree)
    with pytest.raises(NotImplementedError, match=r"strategy 'tree': expected moves 'ring', .* got 'tree'"):
        ls.plan(ls.causal(), 1000, MESH, strategy="exchange")


def test_shard_and_unshard_raise_for_tensors_of_another_size() -> None:
    plan = ls.plan(ls.causal(), 1000, MESH)
    with pytest.raises(ValueError, match="expected size q 1000"):
        plan.shard(torch.zeros(3, 999), 1)
    with pytest.raises(ValueError, match="not a dim"):
        plan.shard(torch.zeros(3, 1000), 2)
    cross = ls.plan(ls.full(), (1000, 1001), ls.Mesh.abstract(1), layout="contiguous")
    assert cross.shard(torch.zeros(1001), 0).shape == (1001,)


@pytest.mark.parametrize("dim", [1.0, "1", None, True])
def test_dims_that_are_not_integers_raise(dim: Any) -> None:
    plan = ls.plan(ls.causal(), 1000, ls.Mesh.abstract(1))
    whole = torch.zeros(3, 1000, 7)
    calls = {
        "plan.shard": lambda: plan.shard(whole, dim),
        "plan.unshard": lambda: plan.unshard(whole, dim),
        "plan.relayout": lambda: plan.relayout(whole, dim, to="contiguous"),
        "plan.gather_pooled": lambda: plan.gather_pooled(whole, 8, dim),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name}: expected an integer dim, got {dim!r}, a {type(dim).__name__}$"):
            call()
    index = torch.tensor(1)
    assert torch.equal(plan.shard(whole, index), whole)


def test_shard_and_unshard_are_differentiable() -> None:
    x = torch.randn(3, 50, dtype=torch.float64)

    def rank(mesh: Any) -> Any:
        plan = ls.plan(ls.causal(), 50, mesh, layout="round_robin")
        leaf = x.clone().requires_grad_()
        part = plan.shard(leaf, 1)
        weight = torch.arange(50.0, dtype=torch.float64) * (mesh.rank + 1)
        (plan.unshard(part * 2, 1) * weight).sum().backward()
        return leaf.grad

    total = sum(virtual_world(3).run(rank))
    assert torch.allclose(total, (2 * 6 * torch.arange(50.0, dtype=torch.float64)).expand(3, 50))


@pytest.mark.long
def test_many_plans_do_not_leak() -> None:
    ids = torch.zeros(600, dtype=torch.int64)

    def make(i: int) -> None:
        ids[: 1 + i % 599] = i
        ls.plan(ls.causal() & ls.documents(ids=ids), 600, MESH, layout="contiguous", strategy="ring")

    def traced() -> int:
        gc.collect()
        # CPython's method cache holds names of attributes that torch looks up from C: up to 4,096 strings that belong to no plan.
        (getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache)()
        return tracemalloc.get_traced_memory()[0]

    for i in range(30):
        make(i)
    gc.collect()
    before = len(live)
    tracemalloc.start()
    for i in range(60):
        make(i)
    first = traced()
    for i in range(150):
        make(i)
    grown = traced() - first
    tracemalloc.stop()
    assert len(live) == before and grown < 150 * 20


def _plan_in_worker(_: int) -> bytes:
    mask = ls.causal() & ls.documents(lengths=[300, 500, 224])
    return pickle.dumps(ls.plan(mask, 1024, ls.Mesh.abstract(4, rank=2), layout="auto", strategy="exchange"))


def test_a_plan_made_in_a_data_loader_worker_is_the_same() -> None:
    loader = torch.utils.data.DataLoader([0], batch_size=None, num_workers=1, collate_fn=_plan_in_worker)
    there = pickle.loads(next(iter(loader)))
    assert there.digest == pickle.loads(_plan_in_worker(0)).digest
    assert there.on(ls.Mesh.abstract(4, rank=0)).local_len == 256


def test_trees_of_tensors_are_sharded_leaf_by_leaf() -> None:
    plan = ls.plan(ls.causal(), 300, ls.Mesh.abstract(3), layout="head_tail")
    x, y = torch.randn(2, 300, 5), torch.arange(600).view(2, 300)
    got = plan.shard({"x": x, "more": [y, (x, "name", None)]}, 1)
    assert torch.equal(got["x"], plan.shard(x, 1)) and torch.equal(got["more"][0], plan.shard(y, 1))
    assert torch.equal(got["more"][1][0], plan.shard(x, 1)) and got["more"][1][1:] == ("name", None)
    whole = ls.testing.virtual_world(3).run(lambda mesh: plan.on(mesh).unshard(plan.on(mesh).shard([x, y], 1), 1))
    assert all(torch.equal(a, b) for of_rank in whole for a, b in zip(of_rank, (x, y), strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_plans_do_not_depend_on_inference_mode_or_default_device(device: str) -> None:
    mask, sizes = ls.causal() & ls.documents(lengths=[100, 57, 46]), {"heads": 6, "kv_heads": 3, "head_dim": 8}
    x = torch.randn(203, 5)
    with torch.inference_mode(), torch.device(device):
        made = [ls.plan(mask, 203, ls.Mesh.abstract(3, rank=r), **sizes) for r in range(3)]
    assert made[0].digest == ls.plan(mask, 203, ls.Mesh.abstract(3), **sizes).digest
    assert not made[0].token.is_inference() and made[0].token.device.type == "cpu"

    def rank(mesh: Any) -> torch.Tensor:
        plan = made[mesh.rank].on(mesh)
        with torch.inference_mode():
            plan.unshard(plan.shard(x, 0), 0)
        leaf = x.clone().requires_grad_()
        plan.unshard(plan.shard(leaf, 0), 0).sum().backward()
        return leaf.grad

    assert torch.equal(torch.stack(virtual_world(3).run(rank)).sum(0), torch.full_like(x, 3.0))


def test_a_plan_raises_after_a_tensor_of_its_mask_was_modified_in_place() -> None:
    ids = torch.zeros(64, dtype=torch.int64)
    plan = ls.plan(ls.mask_mod(lambda b, h, q, kv: (kv <= q) & (ids[q] == ids[kv])), 64, ls.Mesh.abstract(1))
    copied = ls.plan(ls.causal() & ls.documents(ids=ids), 64, ls.Mesh.abstract(1))
    plans = plan, plan.on(ls.Mesh.abstract(1)), copy.copy(plan), copy.deepcopy(plan), copy.deepcopy({"a": [plan]})["a"][0]
    x = torch.randn(1, 2, 64, 8)
    outs = [ls.attention(x, x, x, plan=one) for one in plans]
    assert all(torch.equal(out, outs[0]) for out in outs)
    ids[30:] = 1
    for one in plans:
        with pytest.raises(ValueError, match=r"tensor of shape \(64,\) that was modified in place\. Make another plan"):
            ls.attention(x, x, x, plan=one)
    ls.attention(x, x, x, plan=copied)  # documents copies its ids
