"""`plan.report(density=…)`: the cost of keys chosen at run time."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.selected.mesh_cases import KV_EXCHANGES

import longspan as ls
from longspan._cost import selected_report
from longspan._cost.clusters import cluster
from longspan._cost.timeline import Conditions
from longspan.testing import virtual_world

TOKENS, RANKS = 4096, 4


def growing(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 200 * (h + 1))


def by_batch_row(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 150 * (b + 1))


def plan_on(mesh: ls.Mesh, **options: object) -> ls.Plan:
    return ls.plan(ls.causal(), TOKENS, mesh, layout="contiguous", strategy="exchange", heads=8, kv_heads=8, head_dim=8, **options)


def test_everything_chosen_costs_what_the_plan_costs() -> None:
    plan = plan_on(ls.Mesh.abstract(RANKS))
    chosen, whole = plan.report(density=1.0), plan.report()
    assert torch.equal(chosen.bytes_received.long(), whole.bytes_received.sum(0).long())
    assert torch.equal(chosen.bytes_received_backward.long(), whole.bytes_received_backward.sum(0).long())
    assert torch.equal(chosen.tiles.long(), whole.tiles) and chosen.balance == pytest.approx(1.75, abs=0.05)
    assert chosen.share == pytest.approx(whole.share) and chosen.seconds > 0


def test_work_on_local_keys_hides_the_exchange() -> None:
    # Most work is on local keys, few keys are of the rank before: a link of an eighth of the bandwidth is still faster than that work.
    profile, length = cluster("h200"), 2048
    slow = replace(profile, inside=replace(profile.inside, bandwidth=profile.inside.bandwidth / 8))
    mask = ls.mask_mod(lambda b, h, q, kv: (q // length == kv // length) | ((kv // length == q // length - 1) & (kv % length < 256)))
    sizes = {"heads": 8, "kv_heads": 8, "head_dim": 64}
    plan = ls.plan(mask, RANKS * length, ls.Mesh.abstract(RANKS), layout="contiguous", strategy="exchange", **sizes)
    assert plan.report(slow, density=1.0).seconds == pytest.approx(plan.report(profile, density=1.0).seconds, rel=0.03)


def test_fewer_keys_cost_less() -> None:
    plan = plan_on(ls.Mesh.abstract(RANKS))
    reports = [plan.report(density=d) for d in (0.0, 0.01, 0.1, 1.0)]
    assert reports[0].share == 0 and float(reports[0].tiles.sum()) == 0
    for less, more in pairwise(reports):
        assert less.share < more.share and less.seconds < more.seconds
    assert "10 % of the visible keys chosen" in str(reports[2])


def test_predicted_tokens_are_those_that_random_choices_move() -> None:
    density, generator = 0.1, torch.Generator().manual_seed(0)
    blocks = TOKENS // 128
    indices = torch.where(torch.rand(1, 8, blocks, blocks, generator=generator) < density, torch.arange(blocks), -1).int()
    world = virtual_world(RANKS)

    def rank(mesh: ls.Mesh) -> None:
        plan = plan_on(mesh)
        q = torch.zeros(1, 8, plan.local_len, 8)
        ls.attention(q, q, q, plan=plan, mask=ls.selected(indices[:, :, plan.query_blocks(128)]))

    world.run(rank)
    moved = sum(int(e.bytes.sum()) for e in world.exchanges if e.what == KV_EXCHANGES[0]) / 2  # float32, predicted for bfloat16
    predicted = float(plan_on(ls.Mesh.abstract(RANKS)).report(density=density).bytes_received.sum())
    assert moved == pytest.approx(predicted, rel=0.15)


@pytest.mark.parametrize("density", [-0.1, 1.5, True, "half"])
def test_densities_outside_of_0_to_1_raise(density: float) -> None:
    with pytest.raises(ValueError, match="density must be a number from 0 to 1"):
        plan_on(ls.Mesh.abstract(RANKS)).report(density=density)


def test_links_between_nodes_count_where_tokens_cross_nodes_only() -> None:
    profile = cluster("h200")
    slow = replace(profile, between=replace(profile.between, bandwidth=profile.between.bandwidth / 50))
    one_node, two_nodes = (plan_on(ls.Mesh.abstract(n)) for n in (8, 12))
    seconds = lambda plan, where: plan.report(where, density=0.5).seconds
    assert seconds(one_node, slow) == seconds(one_node, profile)
    assert seconds(two_nodes, slow) > 2 * seconds(two_nodes, profile)
    inside = replace(profile, inside=replace(profile.inside, bandwidth=profile.inside.bandwidth / 50))
    assert seconds(one_node, inside) > 2 * seconds(one_node, profile)


@pytest.mark.parametrize(
    ("mask", "lengths", "mesh", "options"),
    [
        (growing, 1100, ls.Mesh.abstract(3), {"heads": 4, "kv_heads": 2, "batch": 3, "head_dim": 16}),
        (growing, 1100, ls.Mesh.abstract((2, 3), axis_names=("ring", "ulysses")), {"heads": 6, "kv_heads": 3, "strategy": "ulysses_ring"}),
        (by_batch_row, 900, ls.Mesh.abstract(2), {"heads": 2, "batch": 3, "layout": "contiguous"}),
        (lambda b, h, q, kv: (q + kv) % 500 < 300, (1300, 700), ls.Mesh.abstract(4), {"grad_reduce_dtype": torch.bfloat16}),
    ],
)
@pytest.mark.parametrize(("density", "per_node"), [(0.25, 2), (0.6, 3)])
def test_expected_tiles_and_tokens_counted_one_by_one(
    mask: Any, lengths: Any, mesh: ls.Mesh, options: dict[str, Any], density: float, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    timed = selected_report.timeline
    monkeypatch.setattr(selected_report, "timeline", lambda *args: made.append(args) or timed(*args))
    options = {"strategy": "ring", **options}
    plan = ls.plan(ls.mask_mod(mask), lengths, mesh, **options)
    profile, conditions = replace(cluster("h100"), gpus_per_node=per_node), Conditions(stragglers={1: 3.0})
    report = selected_report.selected_report(plan.data, density, profile, conditions)
    data, ranks = plan.data, plan.mesh.size
    q_len, kv_len = (lengths, lengths) if isinstance(lengths, int) else lengths
    tiles, table = data.rank_tiles, data.rank_tiles.table
    kinds = table.to_dense()
    batch, heads, copies = data.batch or 1, data.heads or 1, table.batch * table.heads
    query_owner, kv_owner, count = tiles.queries.owner.tolist(), tiles.kv.owner.tolist(), tiles.kv.edges.diff().tolist()
    moved = torch.zeros(ranks, ranks, dtype=torch.float64)
    full, partial = torch.zeros(2, ranks, 2, dtype=torch.float64)
    for rank in range(ranks):
        mine = [i for i, owner in enumerate(query_owner) if owner == rank]
        for t, owner in enumerate(kv_owner):
            column = kinds[:, :, mine, t]
            for total, kind in ((full, 2), (partial, 1)):
                total[rank, int(owner != rank)] += float((column == kind).sum()) / copies * density * heads * batch
            if owner != rank:
                moved[owner, rank] += (1 - (1 - density) ** (float((column > 0).sum()) / copies)) * count[t]
    torch.testing.assert_close(report.moved, moved)
    torch.testing.assert_close(report.tiles, (full + partial).sum(1))
    assert report.balance == pytest.approx(float(report.tiles.max() / report.tiles.mean()))
    key_bytes = 2 * batch * (data.kv_heads or heads) * (data.head_dim or 128) * 2
    grad_bytes = key_bytes * (1 if data.grad_reduce_dtype else 2)
    assert (report.kv_token_bytes, report.grad_token_bytes) == (key_bytes, grad_bytes)
    assert report.allgather_tokens == kv_len * (ranks - 1) and report.share == pytest.approx(float(moved.sum()) / kv_len / (ranks - 1))
    torch.testing.assert_close(report.bytes_received, moved.sum(0) * key_bytes)
    torch.testing.assert_close(report.bytes_received_backward, moved.sum(0) * key_bytes + moved.sum(1) * grad_bytes)

    ((work, used, given),) = made
    counted = [getattr(work, f.name) for f in fields(work) if f.name != "rank"] + [report.tiles, report.moved]
    assert {t.dtype for t in counted if isinstance(t, torch.Tensor)} == {torch.float64}
    assert used is profile and given is conditions and (work.ranks, work.degree, work.scale) == (ranks, 1, batch)
    torch.testing.assert_close(torch.stack([work.full, work.partial]), torch.stack([full, partial]))
    for rank in range(ranks):
        for dim, by_step in ((0, work.received), (1, work.sent)):
            of_rank = moved.select(1 - dim, rank)
            crossing = sum(float(of_rank[other]) for other in range(ranks) if other // per_node != rank // per_node)
            assert by_step[:, rank].flatten().tolist() == pytest.approx([0, float(of_rank.sum()) - crossing, 0, crossing])
        assert float(work.query_tiles[rank]) == query_owner.count(rank) * heads * batch
    assert work.exchanges.tolist() == [0, 1] and work.cross_node_share == 0
    torch.testing.assert_close(work.gathered, torch.stack([torch.zeros(ranks).double(), moved.sum(1)], 1))
    assert (work.local.tolist(), work.local_kv.tolist()) == tuple([layout.local_len(r) for r in range(ranks)] for layout in data.layouts)
    assert sum(work.local.tolist()) == q_len


def test_the_text_of_a_report() -> None:
    plan = plan_on(ls.Mesh.abstract(RANKS))
    report = plan.report("h100", density=0.125)
    received = report.bytes_received / 2**20
    forward, backward = (1e3 * one.seconds for one in (report.timeline.forward, report.timeline.backward))
    assert str(report).splitlines() == [
        "causal(), 4096 tokens over 4 ranks, layout contiguous, 12.5 % of the visible keys chosen at run time",
        f"  balance      busiest rank {report.balance:.3f} × the mean",
        f"  received     {received.mean():.2f} MiB per rank and forward pass, at most {received.max():.2f}; "
        f"{100 * report.share:.2f} % of an all-gather of KV",
        f"  predicted    {1e3 * report.seconds:.2f} ms: forward {forward:.2f}, backward {backward:.2f} "
        f"(h100: {report.cluster.kernel.name})",
    ]
    assert report.seconds == report.timeline.seconds and report.density == 0.125
    alone = plan_on(ls.Mesh.abstract(1)).report(density=1)
    assert alone.share == 0.0 and alone.allgather_tokens == 0 and alone.density == 1.0


def test_batch_rows_with_layouts_of_their_own_raise() -> None:
    mask = ls.causal() & ls.documents(lengths=[[700, 324], [1000, 24]])
    plan = ls.plan(mask, 1024, ls.Mesh.abstract(2), batch=2, layout="auto", strategy="exchange")
    assert plan.data.batch_layouts == 2
    with pytest.raises(ValueError, match="density= needs one layout for all batch rows, got one per batch row; give another layout="):
        plan.report(density=0.5)
