"""`plan.report(density=…)`: the cost of keys chosen at run time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tests.selected.mesh_cases import KV_EXCHANGES

import longspan as ls
from longspan._cost.clusters import cluster
from longspan.testing import virtual_world

TOKENS, RANKS = 4096, 4


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
