"""Work of a mask per unit, and the layouts that requests name, against numbers counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cost.clusters import cluster
from longspan._cost.timeline import Conditions
from longspan._plan import named_layouts
from longspan._plan.plan_data import MaskTiling
from longspan._plan.strategies import strategy_for
from longspan._planner.layouts import RequestLayouts
from longspan._planner.mask_work import MaskWork, considered_for, search_space
from longspan._planner.request import CallSizes, PlanRequest, RequestedOptions, planned_mask


def growing(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 10 * (h + 1) * (b + 1))


def work_of(mask: Any, lengths: tuple[int, int] = (90, 90), **sizes: int) -> MaskWork:
    call = CallSizes(**sizes)
    return MaskWork(planned_mask(mask, *lengths, call), *lengths, call)


def allowed(mask: Any, q_len: int, kv_len: int, batch: int, heads: int) -> torch.Tensor:
    """Number of keys that each query sees [batch, heads, q_len]."""
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    return mask(b, h, torch.arange(q_len)[:, None], torch.arange(kv_len)).expand(batch, heads, q_len, kv_len).sum(3).double()


def test_pairs_of_units_by_row_head_and_member() -> None:
    work, seen = work_of(ls.mask_mod(growing), batch=2, heads=4), allowed(growing, 90, 90, 2, 4)
    by_unit = torch.stack([part.sum(2) for part in seen.split(16, 2)], 2)
    assert torch.equal(work.pairs(16).view(2, 4, 6), by_unit) and work.pairs(16) is work.pairs(16) and work.table(16) is work.table(16)
    assert torch.equal(work.demand(16).work, by_unit.sum((0, 1))) and torch.equal(work.demand(16, 1).work, by_unit[1].sum(0))
    assert torch.equal(work.pairs_by_member(16, 2), by_unit.sum(0).view(2, 2, 6).sum(1))
    # The table of a mask without batch rows or heads has one row: it counts for all of them.
    plain = work_of(ls.causal(), batch=3, heads=6)
    one = torch.stack([part.sum() for part in torch.arange(1.0, 91).split(16)]).double()
    assert torch.equal(plain.pairs(16), one) and torch.equal(plain.pairs_by_member(16, 3), (one * 3 * 2).expand(3, 6))
    later = lambda b, h, q, kv: q + b >= kv
    rows = work_of(ls.mask_mod(later), batch=2, heads=3)
    want = torch.stack([part.sum() for part in allowed(later, 90, 90, 2, 3).sum((0, 1)).split(16)])
    assert torch.equal(rows.pairs_by_member(16, 1), want[None])


def test_the_space_of_several_masks_adds_their_pairs() -> None:
    works = [work_of(mask, heads=4) for mask in (ls.causal(), ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q - kv < 10 + h)))]
    conditions, profile, mesh = Conditions(stragglers={1: 2.0}), cluster("h100"), ls.Mesh.abstract(3)
    shape = CallSizes(heads=4).shape
    space = search_space(works, mesh, shape, profile, conditions)
    assert (space.length, space.mesh, space.cluster, space.conditions, space.shape) == (90, mesh, profile, conditions, shape)
    assert [demand.work.tolist() for demand in space.demands(16)] == [work.demand(16).work.tolist() for work in works]
    assert torch.equal(space.pairs_by_member(16, 2), works[0].pairs_by_member(16, 2) + works[1].pairs_by_member(16, 2))
    assert (space.strategy, space.layout, space.stages, space.overlap) == ("auto", "auto", None, None)


def test_existing_tables_are_taken_where_the_layout_cuts_no_tile() -> None:
    work = work_of(ls.causal(), (512, 512))
    tiling = lambda layout: MaskTiling(mask=work.mask, layouts=(layout, layout), batch=1, heads=1)
    whole, cut = named_layouts.contiguous(512, 2), ls.Layout(length=512, rows=((((0, 200),), ((200, 312),)),))
    (before,) = work.tiles(tiling(whole))
    assert work.pairs_in((before,)) is None
    table, pairs = work.table(128), work.pairs(128)
    (after,) = work.tiles(tiling(whole))
    assert after.table is table is not before.table and work.pairs_in((after,)) is pairs
    assert after.queries.owner.tolist() == [0, 0, 1, 1]
    (other,) = work.tiles(tiling(cut))
    assert other.table is not table and other.table.q_tiles == 5 and work.pairs_in((other,)) is None
    rows = ls.Layout(length=512, rows=(whole.rows[0], whole.rows[0][::-1]))
    assert len(work.tiles(tiling(rows))) == 2


@pytest.mark.parametrize(
    ("lengths", "mesh", "options", "chooses"),
    [
        (1024, 2, {}, True),
        (1024, 1, {}, False),
        ((1024, 512), 2, {}, False),
        (1024, 2, {"batch": 2, "mask": ls.documents(lengths=[[500, 524], [1, 1023]]), "layout": "auto"}, False),
    ],
)
def test_plans_of_one_layout_over_several_ranks_have_options(lengths: Any, mesh: int, options: dict[str, Any], chooses: bool) -> None:
    plan = ls.plan(options.pop("mask", ls.full()), lengths, ls.Mesh.abstract(mesh), strategy="exchange", heads=4, **options)
    slow = Conditions(slow_links={0: 2.0})
    got = considered_for(plan.data, cluster("b200"), slow)
    assert (got is not None) is chooses
    assert got is None or (got.cluster is cluster("b200") and got.conditions is slow and all(not o.exact for o in got.options))


def layouts_of(masks: list[Any], lengths: Any, mesh: ls.Mesh, name: str, strategy: str = "exchange", **sizes: int) -> Any:
    request = PlanRequest.of(masks, lengths, mesh, CallSizes(**sizes), RequestedOptions(layout=name))
    works = [MaskWork(mask, request.q_len, request.kv_len, request.sizes) for mask in request.planned]
    return RequestLayouts(request, works).over_mesh(strategy_for(strategy, mesh), None)


def test_queries_and_keys_of_one_sequence_share_a_layout() -> None:
    mesh = ls.Mesh.abstract(3)
    for name, want in (("contiguous", named_layouts.contiguous(1000, 3)), ("head_tail", named_layouts.head_tail(1000, 3))):
        queries, kv = layouts_of([ls.causal()], 1000, mesh, name)
        assert queries is kv and queries == want
    documents = ls.causal() & ls.documents(lengths=[300, 700])
    assert layouts_of([ls.causal(), documents], 1000, mesh, "per_document")[0] == named_layouts.per_document([300, 700], 3)
    rows = ls.documents(lengths=[[300, 700], [999, 1]])
    stacked = named_layouts.stack([named_layouts.per_document(lengths, 3) for lengths in ([300, 700], [999, 1])])
    assert layouts_of([rows], 1000, mesh, "per_document", batch=2)[0] == stacked
    with pytest.raises(ValueError, match=r"expected a mask made with longspan.documents, got causal\(\), full\(\); use 'auto' or"):
        layouts_of([ls.causal(), ls.full()], 1000, mesh, "per_document")


def test_units_of_round_robin_are_dealt_by_the_work_of_all_masks() -> None:
    masks = [ls.causal(), ls.mask_mod(lambda b, h, q, kv: (kv >= q) & (kv < 2 * q))]
    queries, kv = layouts_of(masks, 1000, ls.Mesh.abstract(3), "round_robin")
    unit = named_layouts.unit_for(1000, 3)
    at = torch.arange(1000)
    pairs = sum(mask(0, 0, at[:, None], at).sum(1).double() for mask in masks)
    work = torch.stack([part.sum() for part in pairs.split(unit)])
    owner = named_layouts.round_robin_owner(work, 3, short_last=1000 % unit != 0)
    assert queries is kv and [queries.local_len(r) for r in range(3)] == [
        sum(min(unit, 1000 - t * unit) for t, o in enumerate(owner.tolist()) if o == r) for r in range(3)
    ]
    by_row = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q >= 500 * b))
    rows = layouts_of([by_row], 1000, ls.Mesh.abstract(3), "round_robin", batch=2)[0].rows
    assert len(rows) == 2 and len(layouts_of([by_row], 1000, ls.Mesh.abstract(3), "round_robin", batch=1)[0].rows) == 1


def test_layouts_of_cross_attention() -> None:
    mesh, mask = ls.Mesh.abstract(3), ls.mask_mod(lambda b, h, q, kv: (kv < q) & (q > 300))
    assert layouts_of([mask], (1000, 700), mesh, "contiguous") == (named_layouts.contiguous(1000, 3), named_layouts.contiguous(700, 3))
    assert layouts_of([mask], (1000, 700), mesh, "head_tail") == (named_layouts.head_tail(1000, 3), named_layouts.head_tail(700, 3))
    with pytest.raises(ValueError, match="needs queries and keys to be the same tokens; use 'auto', 'contiguous' or 'round_robin'"):
        layouts_of([mask], (1000, 700), mesh, "per_document")
    seen = (torch.arange(1000).clamp(max=700) * (torch.arange(1000) > 300)).double()
    for name in ("round_robin", "auto"):
        queries, kv = layouts_of([mask, mask], (1000, 700), mesh, name)
        assert kv == named_layouts.contiguous(700, 3)
        work = [float(seen[queries.positions(r)].sum()) for r in range(3)]
        assert max(work) < 1.25 * min(work)
        unit = named_layouts.unit_for(1000, 3)
        assert all(start % unit == 0 for r in range(3) for start, _ in queries.segments(r)) and unit == 16


def test_a_ulysses_group_shares_the_tokens_of_its_place() -> None:
    mesh = ls.Mesh.abstract((2, 3), axis_names=("ulysses", "ring"))
    queries, kv = layouts_of([ls.full()], (1200, 600), mesh, "contiguous", "ulysses_ring")
    for made, whole in ((queries, named_layouts.contiguous(1200, 3)), (kv, named_layouts.contiguous(600, 3))):
        for ring_rank in range(3):  # devices r and r + 3 are a group
            positions = torch.cat([made.positions(ring_rank), made.positions(ring_rank + 3)])
            assert torch.equal(positions, whole.positions(ring_rank))
            assert abs(made.local_len(ring_rank) - made.local_len(ring_rank + 3)) <= 16
    same = layouts_of([ls.full()], 1200, mesh, "contiguous", "ulysses_ring")
    assert same[0] is same[1] and same[0] == queries
    alone = layouts_of([ls.full()], 1200, ls.Mesh.abstract(3), "contiguous", "ulysses")[0]
    assert torch.equal(torch.cat([alone.positions(r) for r in range(3)]), torch.arange(1200)) and alone.ranks == 3
    chosen = named_layouts.head_tail(1200, 3)
    request = PlanRequest.of([ls.full()], 1200, mesh, CallSizes(), RequestedOptions())
    split, again = RequestLayouts(request, []).over_mesh(strategy_for("ulysses_ring", mesh), chosen)
    assert split is again == named_layouts.split(chosen, [[0, 3], [1, 4], [2, 5]])
    given = (named_layouts.contiguous(1200, 6), named_layouts.head_tail(1200, 6))
    request = PlanRequest.of([ls.full()], 1200, mesh, CallSizes(), RequestedOptions(layout=given))
    assert RequestLayouts(request, []).over_mesh(strategy_for("ulysses_ring", mesh), None) == given
