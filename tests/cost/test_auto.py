"""`auto`: no slower than the best choice by hand, balanced where possible, and explained."""

from __future__ import annotations

import itertools
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cost.clusters import cluster
from longspan._cost.timeline import Conditions

TOKENS, RANKS = 8192, 4
SIZES: dict[str, Any] = {"heads": 16, "kv_heads": 4, "head_dim": 128}


def _document_lengths(seed: int) -> list[int]:
    generator, lengths, left = torch.Generator().manual_seed(seed), [], TOKENS
    while left:
        lengths.append(min(left, 16 + int(torch.rand((), generator=generator) ** 3 * 3000)))
        left -= lengths[-1]
    return lengths


def _dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (((q - kv) % 2048 < 512) | (kv < 128))


MASKS = {
    "full": ls.full(),
    "causal": ls.causal(),
    "window": ls.causal() & ls.sliding_window(750),
    "both ways": ls.sliding_window(450, 350),
    "prefix": ls.causal() | ls.prefix(1500),
    "documents 0": ls.causal() & ls.documents(lengths=_document_lengths(0)),
    "documents 1": ls.causal() & ls.documents(lengths=_document_lengths(1)),
    "documents, full": ls.documents(lengths=_document_lengths(2)),
    "one long document": ls.causal() & ls.documents(lengths=[6000, *[200] * 10, 192]),
    "dilated": ls.mask_mod(_dilated),
}
# 30 by hand: layouts × strategies × stages, over one axis and over two.
LAYOUTS = ("contiguous", "head_tail", "round_robin", "auto")
ONE = [
    (1, layout, strategy, stages)
    for layout, (strategy, stages) in itertools.product(
        LAYOUTS, [("ring", None), ("allgather", None), ("exchange", None), ("exchange", 1), ("exchange", 2), ("exchange", 4)]
    )
]
HAND = [*ONE, (1, "contiguous", "ulysses", None)]
TWO = [
    (2, layout, f"ulysses_{moves}", None) for layout, moves in itertools.product(("head_tail", "auto"), ("ring", "allgather", "exchange"))
]


def _mesh(degree: int) -> ls.Mesh:
    return ls.Mesh.abstract(RANKS) if degree == 1 else ls.Mesh.abstract((RANKS // degree, degree), axis_names=("ring", "ulysses"))


def _imbalance(plan: ls.Plan, pairs: torch.Tensor) -> float:
    """Pairs of the busiest rank over the mean, counted query by query."""
    inner = plan.data.inner[0]
    work = torch.stack([pairs[inner.positions(r)].sum() for r in range(inner.ranks)])
    return float(work.max() / work.mean())


def _pairs(mask: ls.Mask) -> torch.Tensor:
    """Number of keys that each query sees [TOKENS]."""
    zero, at = torch.tensor(0), torch.arange(TOKENS, dtype=torch.int32)
    rows = [mask(zero, zero, q[:, None], at).expand(len(q), TOKENS).count_nonzero(1) for q in at.split(256)]
    return torch.cat(rows).double()


VARIATIONS = ("full", "both ways", "documents 1", "prefix")  # of masks that are tested here, or at random below


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.repetition] * (n in VARIATIONS)) for n in MASKS])
def test_auto_is_within_3_percent_of_the_best_by_hand_and_balanced_where_that_exists(name: str) -> None:
    assert len(HAND) + len(TWO) - 1 == 30
    mask, pairs = MASKS[name], _pairs(MASKS[name])
    for degree, by_hand in ((1, HAND), (2, TWO)):
        chosen = ls.plan(mask, TOKENS, _mesh(degree), cluster="h100", **SIZES)
        others = [
            ls.plan(mask, TOKENS, _mesh(degree), layout=layout, strategy=strategy, stages=stages, cluster="h100", **SIZES)
            for _, layout, strategy, stages in by_hand
        ]
        best = min(p.report("h100").seconds for p in others)
        assert chosen.report("h100").seconds <= 1.03 * best, chosen.explain("h100")
        if min(_imbalance(p, pairs) for p in others) <= 1.05:
            assert _imbalance(chosen, pairs) <= 1.05, chosen.explain("h100")


def test_auto_cuts_few_tiles_where_ranks_do_not_divide_the_blocks() -> None:
    """Units are smaller than a tile there. Units dealt round-robin would all be tiles of their own, most of each wasted."""
    tokens, ranks, sizes = 3000, 5, {"heads": 32, "kv_heads": 8, "head_dim": 128}
    chosen = ls.plan(MASKS["causal"], tokens, ls.Mesh.abstract(ranks), **sizes)
    assert chosen.report().balance <= 1.05 and chosen.data.tiles[0].queries.tiles < 2 * -(-tokens // 128)
    cut = ls.plan(MASKS["causal"], tokens, ls.Mesh.abstract(ranks), layout="round_robin", **sizes)
    assert chosen.report().seconds < 0.9 * cut.report().seconds


def _random_mask(generator: random.Random, tokens: int) -> ls.Mask:
    kind, causal = generator.randrange(5), ls.causal()
    if kind == 0:
        return causal & ls.sliding_window(generator.randint(20, tokens))
    if kind == 1:
        return causal | ls.prefix(generator.randint(1, tokens))
    if kind == 2:
        period, slope = generator.randint(9, 900), generator.randint(1, 40)
        return ls.mask_mod(lambda b, h, q, kv: ((q * slope + kv) % (2 * period) < period) & (q + period >= kv))
    lengths, left = [], tokens
    while left:
        lengths.append(min(left, generator.randint(1, tokens // 2)))
        left -= lengths[-1]
    return ls.documents(lengths=lengths) if kind == 3 else causal & ls.documents(lengths=lengths)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.repetition] * (n >= 8)) for n in range(12)])
def test_auto_is_balanced_where_possible_and_reports_the_same_count(seed: int) -> None:
    generator = random.Random(seed)
    tokens, ranks = generator.randint(400, 3000), generator.randint(2, 8)
    mask, mesh = _random_mask(generator, tokens), ls.Mesh.abstract(ranks)
    for sizes in ({}, {"heads": generator.choice([5, 7, 8]), "head_dim": 64}):
        plan = ls.plan(mask, tokens, mesh, **sizes)
        hand = [ls.plan(mask, tokens, mesh, layout=layout, strategy="exchange", **sizes) for layout in LAYOUTS[:3]]
        comparison = considered(plan)
        if sizes:
            # The winner's figure is the report's own; others that were only estimated are counted in units instead of tiles.
            assert comparison.winner.imbalance == plan.report().balance
            assert f"busiest rank {plan.report().balance:.3f} × the mean" in plan._explanation()
        least = min([p.report().balance for p in hand] + [o.imbalance for o in comparison.options if o.exact])
        assert plan.report().balance <= max(1.05, least * 1.05 if least > 1.05 else 0), plan._explanation()


def considered(plan: ls.Plan) -> Any:
    plan._explanation()
    return plan.considered()


def test_balance_is_counted_in_pairs_as_explain_does() -> None:
    mask = ls.causal() & ls.documents(lengths=[600, 1000, 448])
    plan = ls.plan(mask, 2048, _mesh(1), heads=8, kv_heads=2, head_dim=64)
    seen = mask(torch.tensor(0), torch.tensor(0), torch.arange(2048)[:, None], torch.arange(2048)).sum(1).double()
    assert plan.report().balance == considered(plan).winner.imbalance == pytest.approx(_imbalance(plan, seen), abs=1e-12)
    assert plan.report().balance <= 1.05


def test_auto_accounts_for_heads_with_different_work_under_ulysses() -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q - kv < 200 * (h + 1) ** 2))
    uneven = ls.plan(mask, 4000, _mesh(1), strategy="ulysses", heads=4, head_dim=64)
    plan = ls.plan(mask, 4000, _mesh(1), heads=4, head_dim=64)
    assert uneven.report().balance > 1.3 and plan.report().balance <= 1.05 and plan.strategy != "ulysses"
    assert all(o.imbalance > 1.3 for o in considered(plan).options if o.strategy.name == "ulysses")


def test_auto_honours_stages_and_lists_strategies_with_other_numbers() -> None:
    for stages, legal in ((2, {"exchange"}), (3, {"exchange", "ring"}), (1, {"exchange", "allgather"})):
        plan = ls.plan(MASKS["causal"], TOKENS, _mesh(1), stages=stages, **SIZES)
        comparison = considered(plan)
        assert plan.schedule.stages == stages and {o.strategy.name for o in comparison.options} == legal
        assert {name for name, _ in comparison.not_possible} == {"exchange", "ring", "allgather", "ulysses"} - legal
    assert f"not possible: 0 stages, where {stages} are asked for" in plan._explanation()
    several = ls.plan({"a": MASKS["causal"], "b": MASKS["window"]}, TOKENS, _mesh(1), stages=2, **SIZES)
    assert [p.schedule.stages for p in several.values()] == [2, 2]
    assert ls.plan(MASKS["causal"], TOKENS, _mesh(2), stages=3, **SIZES).schedule.stages == 3
    assert ls.plan(MASKS["causal"], TOKENS, _mesh(1), stages=5).schedule.stages == 5  # nothing is compared without heads


def test_a_plan_is_reported_for_the_cluster_it_was_made_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("LONGSPAN_EXPLAIN", "1")
    plan = ls.plan(MASKS["causal"], 2048, _mesh(1), cluster="a100", **SIZES)
    assert "considered on a100" in capsys.readouterr().err
    plain = ls.plan(MASKS["causal"], 2048, _mesh(1), **SIZES)
    for one in (plan, pickle.loads(pickle.dumps(plan)), plan.on(ls.Mesh.abstract(RANKS, rank=2))):
        assert one.report().cluster.name == "a100" and one.report("h100").cluster.name == "h100"
        assert one.report().seconds == plan.report("a100").seconds != plain.report().seconds
        assert "considered on a100" in one._explanation() and "considered on h200" in one._explanation("h200")
        one.save_html(tmp_path / "page.html")
        assert "<p>a100: " in (tmp_path / "page.html").read_text(encoding="utf-8") and "srcdoc" in one._repr_html_()
    assert plain.report().cluster.name == "h200"
    # What ranks compare is what a cluster decided, not its name.
    fixed: dict[str, Any] = {"layout": "head_tail", "strategy": "ring", **SIZES}
    assert (
        ls.plan(MASKS["causal"], 2048, _mesh(1), cluster="a100", **fixed).digest == ls.plan(MASKS["causal"], 2048, _mesh(1), **fixed).digest
    )


SLOW = Conditions(stragglers={0: 4.0}, slow_links={3: 30.0})


def test_a_plan_is_chosen_reported_and_explained_for_slow_ranks() -> None:
    plan, plain = (ls.plan(MASKS["causal"], TOKENS, _mesh(1), conditions=c, **SIZES) for c in (SLOW, None))
    assert plain.report(conditions=SLOW).seconds > plan.report().seconds > 2 * plain.report().seconds
    for one in (plan, pickle.loads(pickle.dumps(plan)), plan.on(ls.Mesh.abstract(RANKS, rank=2))):
        assert one.report().seconds == plan.report(conditions=SLOW).seconds == considered(one).winner.seconds
        assert f"predicted: {1e3 * plan.report().seconds:.3f} ms" in one._explanation()
        assert one.report(conditions=Conditions()).seconds < 0.5 * one.report().seconds


def test_a_plan_is_explained_for_slow_ranks_that_it_was_not_made_for(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ls.plan(MASKS["causal"], TOKENS, _mesh(1), **SIZES)
    numbers, comparison = plan.report(conditions=SLOW), plan.considered(conditions=SLOW)
    assert comparison is not None and comparison.winner.seconds > 2 * considered(plan).winner.seconds
    text = plan.explain(conditions=SLOW)
    assert f"predicted: {1e3 * numbers.seconds:.3f} ms" in text and f"{1e3 * comparison.winner.seconds:.3f} ms" in text
    given = ls.plan(MASKS["causal"], TOKENS, _mesh(1), conditions=SLOW, strategy="ring", layout="head_tail", **SIZES)
    assert considered(given).winner.seconds == comparison.winner.seconds


def test_overlap_is_chosen_for_slow_ranks() -> None:
    options: dict[str, Any] = {"strategy": "allgather", "layout": "head_tail", **SIZES}
    slow = Conditions(stragglers={0: 8.0})
    plan, plain = (ls.plan(MASKS["causal"], TOKENS, _mesh(1), conditions=c, **options) for c in (slow, None))
    assert plan.data.schedule.joined and not plain.data.schedule.joined
    assert plan.report().seconds < 0.9 * plain.report(conditions=slow).seconds


def test_conditions_of_ranks_that_the_mesh_does_not_have_raise() -> None:
    for conditions in (Conditions(stragglers={4: 2.0}), Conditions(slow_links={4: 2.0})):
        with pytest.raises(ValueError, match="conditions: expected ranks below 4, got 4"):
            ls.plan(MASKS["causal"], TOKENS, _mesh(1), conditions=conditions)
    with pytest.raises(TypeError, match="conditions must be Conditions or None"):
        ls.plan(MASKS["causal"], TOKENS, _mesh(1), conditions={0: 2.0})  # type: ignore[call-overload]


def test_two_clusters_of_one_name_are_distinguished() -> None:
    slow = replace(cluster("h100"), inside=replace(cluster("h100").inside, bandwidth=1e8))
    plan = ls.plan(MASKS["causal"], 2048, _mesh(1), cluster="h100", **SIZES)
    assert considered(plan).winner.seconds < 0.5 * ls.plan(MASKS["causal"], 2048, _mesh(1), cluster=slow, **SIZES).report().seconds
    assert plan._explanation(slow) != plan._explanation()


def test_explain_prints_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ls.plan(MASKS["causal"], 2048, _mesh(1), **SIZES)
    text = plan.explain()
    captured = capsys.readouterr()
    assert captured.out == text + "\n" and captured.err == "" and "the winner is" in text


def test_explain_lists_options_and_why_the_winner_won() -> None:
    plan = ls.plan(MASKS["causal"], TOKENS, _mesh(1), **{**SIZES, "heads": 6, "kv_heads": 6})
    text = plan.explain()
    assert "the winner" in text and "contiguous" in text and "× the mean" in text
    assert "not possible: 6 query heads do not divide by a Ulysses degree of 4" in text
    assert f"predicted: {1e3 * plan.report().seconds:.3f} ms" in text
    ring = ls.plan(MASKS["causal"], TOKENS, _mesh(1), strategy="ring", layout="contiguous", **SIZES)
    assert "the winner" in ring.explain("a100")
    assert "nothing to choose" in ls.plan(ls.full(), (100, 200), _mesh(1)).explain()
    assert "so that nothing was compared" in ls.plan(ls.causal(), 4096, _mesh(1)).explain() and "nothing was compared" not in text


def test_longspan_explain_prints_the_explanation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ls.plan(MASKS["causal"], 4096, _mesh(1), **SIZES)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("LONGSPAN_EXPLAIN", "1")
    ls.plan(MASKS["causal"], 4096, _mesh(1), **SIZES)
    assert "considered on h200" in capsys.readouterr().err


def test_the_choice_is_the_same_on_every_rank_and_carries_the_gradients_dtype() -> None:
    plans = [
        ls.plan(MASKS["documents 0"], TOKENS, ls.Mesh.abstract(RANKS, rank=r), grad_reduce_dtype=torch.bfloat16, **SIZES) for r in (0, 3)
    ]
    assert plans[0].digest == plans[1].digest and plans[0].data.grad_reduce_dtype is torch.bfloat16


def test_slow_links_between_nodes_favour_less_traffic() -> None:
    mesh = ls.Mesh.abstract(16)
    mask = ls.causal() & ls.documents(lengths=[1024] * 64)
    plan = ls.plan(mask, 65536, mesh, cluster="a100_ethernet", heads=16, kv_heads=16)
    assert plan.strategy == "exchange" and plan.report("a100_ethernet").share < 0.05


def test_either_of_two_unnamed_axes_may_share_heads() -> None:
    plan = ls.plan(ls.causal(), TOKENS, ls.Mesh.abstract((2, 8)), heads=2, kv_heads=2)
    assert plan.data.degree == 2 and plan.data.inner[0].ranks == 8
    with pytest.raises(ValueError, match="do not divide"):
        ls.plan(ls.causal(), TOKENS, ls.Mesh.abstract((2, 8), axis_names=("ring", "ulysses")), heads=2, kv_heads=2)
