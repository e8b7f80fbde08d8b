"""`longspan.plan_step`: every sample runs once, no rank holds more than its limit, short samples keep to few ranks."""

from __future__ import annotations

import random

import pytest

import longspan as ls


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
