"""`longspan.plan_step`: every sample runs once, no rank holds more than its limit, short samples keep to few ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest

import longspan as ls
from longspan._planner import steps
from longspan._planner.steps import Forward, StepPlan, _grouped, _spans


@pytest.mark.parametrize("seed", range(6))
def test_every_sample_runs_once_within_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 3, 5, 8])
    lengths = [rng.choice([rng.randint(1, 40), rng.randint(200, 900), rng.randint(2000, 6000)]) for _ in range(rng.randint(3, 25))]
    limit = max(max(lengths) // ranks + 200, sum(lengths) // (ranks * rng.randint(1, 3)) + 200)
    mesh = ls.Mesh.abstract(ranks)
    step = ls.plan_step(lengths, mesh, tokens_per_rank=limit)
    assert sorted(i for forward in step.forwards for i in forward.samples) == list(range(len(lengths)))
    assert step.accumulation >= -(-sum(lengths) // (limit * ranks))
    for forward in step.forwards:
        assert forward.lengths == tuple(lengths[i] for i in forward.samples)
        layout = forward.plan.layout
        assert layout.length == forward.tokens and all(0 < layout.local_len(rank) <= limit for rank in range(ranks))
        starts = [sum(forward.lengths[:i]) for i in range(len(forward.lengths))]
        for start, length, span in zip(starts, forward.lengths, forward.spans):
            owners = {r for r in range(ranks) for first, n in layout.segments(r) if first < start + length and first + n > start}
            assert span == len(owners)
    again = ls.plan_step(lengths, mesh, tokens_per_rank=limit)
    assert [f.samples for f in again.forwards] == [f.samples for f in step.forwards]


def test_short_samples_keep_to_few_ranks_and_long_ones_span_more() -> None:
    lengths = [60_000, *[1500] * 20, *[4000] * 6]
    step = ls.plan_step(lengths, ls.Mesh.abstract(8), tokens_per_rank=16384, heads=32, kv_heads=8, head_dim=128, strategy="exchange")
    spans = {length: [] for length in lengths}
    for forward in step.forwards:
        for length, span in zip(forward.lengths, forward.spans):
            spans[length].append(span)
    assert min(spans[60_000]) > 3
    assert sum(spans[1500]) / len(spans[1500]) < 3
    text = str(step)
    assert text.startswith("27 samples of 1500 to 60000 tokens, 114000 in all, over 8 ranks: 1 forward, at most 16384 tokens per rank")
    assert "predicted attention of a layer" in text


def test_the_number_of_forwards_follows_from_the_limit() -> None:
    mesh = ls.Mesh.abstract(4)
    lengths = [700, 900, 1100, 1300] * 4
    assert [ls.plan_step(lengths, mesh, tokens_per_rank=limit).accumulation for limit in (4224, 2176, 1152)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("lengths", "limit", "message"),
    [
        ([], 10, "expected lengths of 1 or more tokens, got 'none'"),
        ([3, 0], 10, "expected lengths of 1 or more tokens, got 0"),
        ([1, -2], 10, "expected lengths of 1 or more tokens, got -2"),
        ([4, True], 10, "expected lengths of 1 or more tokens, got True"),
        ([4, 2.5], 10, r"expected lengths of 1 or more tokens, got 2\.5"),
        ([3, 9], 0, "expected tokens_per_rank of 1 or more, got 0"),
        ([100, 9], 10, "a sample of 100 tokens exceeds 4 ranks × tokens_per_rank=10"),
        ([2, 1], 10, "expected at least one token per rank"),
    ],
)
def test_what_does_not_fit_raises(lengths: list[int], limit: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ls.plan_step(lengths, ls.Mesh.abstract(4), tokens_per_rank=limit)


def test_a_mesh_with_an_axis_of_data_or_heads_raises() -> None:
    for names in (("dp", "cp"), ("cp", "tp")):
        with pytest.raises(ValueError, match=r"plan_step: expected a mesh of one axis.*mesh\['dp', 'cp'\]._flatten"):
            ls.plan_step([300, 500], ls.Mesh.abstract((2, 3), axis_names=names), tokens_per_rank=400)


@pytest.mark.parametrize(
    ("lengths", "count", "capacity", "groups"),
    [
        ([5, 9, 1, 7], 1, 22, [[1, 3, 0, 2]]),
        ([5, 9, 1, 7], 1, 21, None),
        ([5, 9, 1, 7], 2, 12, [[1, 2], [3, 0]]),
        ([5, 9, 1, 7], 2, 11, None),
        ([4, 4, 4, 4], 2, 8, [[0, 2], [1, 3]]),
        ([4, 4], 3, 8, None),
        ([2, 8, 3], 3, 8, [[1], [2], [0]]),
        ([2, 8, 3], 3, 7, None),
    ],
)
def test_samples_go_into_the_group_with_the_fewest_tokens(lengths: list[int], count: int, capacity: int, groups: Any) -> None:
    assert _grouped(lengths, count, capacity) == groups


def test_spans_count_the_ranks_that_own_tokens_of_each_sample() -> None:
    layout = ls.Layout(length=12, rows=((((0, 3), (9, 3)), ((3, 2),), ((5, 4),)),))
    assert _spans(layout, [3, 2, 4, 3]) == (1, 1, 1, 1) and _spans(layout, [12]) == (3,) and _spans(layout, [4, 1, 7]) == (2, 1, 2)
    assert _spans(layout, [2, 1, 1, 2, 6]) == (1, 1, 1, 2, 2) and _spans(layout, [1] * 12) == (1,) * 12


def fixed_seconds(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
    """Predicted seconds of steps by their number of forwards."""
    monkeypatch.setattr(StepPlan, "seconds", property(lambda step: seconds[step.accumulation]))


@pytest.mark.parametrize(("more", "taken"), [(0.91, 1), (0.9, 1), (0.89, 2)])
def test_a_forward_more_is_taken_if_it_saves_a_tenth(more: float, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (steps.MORE_FORWARDS, steps.GAIN) == (1, 0.9)
    fixed_seconds(monkeypatch, {1: 1.0, 2: more, 3: 0.1})
    lengths, mesh = [400, 300, 200, 100], ls.Mesh.abstract(2)
    step = ls.plan_step(lengths, mesh, tokens_per_rank=1000, heads=2, strategy="ring", layout="contiguous")
    assert step.accumulation == taken
    assert ls.plan_step(lengths, mesh, tokens_per_rank=1000, strategy="ring", layout="contiguous").accumulation == 1  # no head counts


def test_groups_of_fewer_tokens_than_ranks_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_seconds(monkeypatch, {1: 1.0, 2: 0.5, 3: 0.1})
    options: dict[str, Any] = {"tokens_per_rank": 400, "heads": 2, "strategy": "ring", "layout": "contiguous"}
    assert ls.plan_step([200, 200, 3], ls.Mesh.abstract(4), **options).accumulation == 2
    monkeypatch.setattr(steps, "MORE_FORWARDS", 2)
    assert ls.plan_step([200, 200, 3], ls.Mesh.abstract(4), **options).accumulation == 2  # of three, one has 3 tokens for 4 ranks
    assert ls.plan_step([200, 200, 4], ls.Mesh.abstract(4), **options).accumulation == 3


def test_no_division_within_the_limit_raises() -> None:
    uneven = ls.Layout(length=100, rows=((((0, 90),), ((90, 10),)),))
    options: dict[str, Any] = {"strategy": "ring", "layout": uneven}
    assert ls.plan_step([100], ls.Mesh.abstract(2), tokens_per_rank=90, **options).forwards[0].plan.layout == uneven
    with pytest.raises(ValueError, match=r"no division of 1 samples, 100 tokens, keeps 2 ranks within tokens_per_rank=89; give a larger"):
        ls.plan_step([100], ls.Mesh.abstract(2), tokens_per_rank=89, **options)


def test_limits_of_a_step_are_inclusive() -> None:
    step = ls.plan_step([4], ls.Mesh.abstract(4), tokens_per_rank=1, layout="contiguous", strategy="ring")
    assert step.accumulation == 1 and str(step.forwards[0].plan.data.mask.text) == "causal()" and step.forwards[0].plan.data.batch == 1
    with pytest.raises(ValueError, match=r"expected tokens_per_rank of 1 or more, got 2\.5"):
        ls.plan_step([4], ls.Mesh.abstract(4), tokens_per_rank=2.5)  # type: ignore[arg-type]
    two = ls.plan_step([5, 4], ls.Mesh.abstract(2), tokens_per_rank=30, layout="contiguous", strategy="ring", batch=3)
    assert two.forwards[0].samples == (0, 1) and two.forwards[0].plan.data.batch == 3
    assert two.forwards[0].plan.data.mask.text == str(ls.causal() & ls.documents(lengths=[5, 4]))


def test_the_table_of_a_step_line_by_line() -> None:
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "strategy": "exchange", "layout": "contiguous"}
    mesh = ls.Mesh.abstract(2)
    groups = (((2, 0), (1500, 100)), ((1,), (700,)))
    forwards = []
    for samples, lengths in groups:
        mask = ls.causal() & ls.documents(lengths=list(lengths)) if len(lengths) > 1 else ls.causal()
        forwards.append(Forward(samples=samples, lengths=lengths, plan=ls.plan(mask, sum(lengths), mesh, batch=1, **sizes)))
    step = StepPlan(forwards=tuple(forwards), tokens_per_rank=900)
    assert [forward.spans for forward in forwards] == [(2, 1), (2,)] and [forward.tokens for forward in forwards] == [1600, 700]
    reports = [forward.plan.report() for forward in forwards]
    assert step.seconds == reports[0].seconds + reports[1].seconds
    lines = str(step).splitlines()
    assert lines[0] == "3 samples of 100 to 1500 tokens, 2300 in all, over 2 ranks: 2 forwards, at most 900 tokens per rank"
    for number, (line, most, report) in enumerate(zip(lines[2:4], (832, 352), reports)):
        received = float(report.bytes_received.sum(0).double().mean()) / 2**20
        want = [
            number,
            len(groups[number][0]),
            forwards[number].tokens,
            most,
            (1, 0)[number],
            2,
            f"{report.balance:.3f}",
            f"{received:.1f}",
        ]
        assert line.split() == [*map(str, want), "MiB", f"{1e3 * report.seconds:.2f}", "ms"]
    assert lines[4] == f"  predicted attention of a layer, forward and backward: {1e3 * step.seconds:.2f} ms" and len(lines) == 5
    assert (
        str(StepPlan(forwards=tuple(forwards[:1]), tokens_per_rank=900)).splitlines()[0].endswith("1 forward, at most 900 tokens per rank")
    )
