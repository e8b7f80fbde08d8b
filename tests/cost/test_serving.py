"""Predictions of serving: published figures, memory, and which tensors a chunk passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench.serving_predictions import MODEL, Figure, crossovers, figures, table

from longspan._cost.clusters import cluster
from longspan._cost.serving import (
    MODELS,
    ModelSizes,
    ServingGroup,
    decode_time,
    default_tp,
    passed_tensors,
    prefill_time,
    serving_memory,
)
from longspan._planner.serving import plan_serving

PAGE = Path(__file__).parents[2] / "docs" / "deep-dives" / "predictions.md"


@pytest.fixture(scope="module")
def compared() -> list[Figure]:
    return figures()


def test_a_million_tokens_at_the_stated_peak_are_within_15_percent(compared: list[Figure]) -> None:
    (million,) = (f for f in compared if f.name.startswith("1M") and f.profile == "h100, 800")
    assert abs(million.off) < 0.15


def test_the_page_shows_todays_predictions(compared: list[Figure]) -> None:
    assert table(compared) in PAGE.read_text(encoding="utf-8"), "run bench/serving_predictions.py and put its table into the page"


def test_a_ring_of_four_takes_three_transfers_and_queries_also_return_results() -> None:
    """64 heads over 8 devices: 2 · 8 · 128 bytes of a query, 2 · 2 · 128 of a token's KV, 8 · (2 · 128 + 4) of a result."""
    group = ServingGroup(cluster=cluster("h100"), tp=8, cp=4)
    model = replace(MODEL, heads=64, kv_heads=8, head_dim=128)
    bandwidth, latency = group.context_link
    got = passed_tensors(model, group, 8_000, 4_000)
    pairs = 8_000 / 4 * (4_000 + 8_000 / 2) / 4
    compute = 4 * 8 * 128 * pairs / group.cluster.flops + group.cluster.kernel.launch
    kv, q = (latency + tokens / 4 * size / bandwidth for tokens, size in ((12_000, 512), (8_000, 2048)))
    returned = latency + 3 * 8_000 / 4 * 8 * (256 + 4) / bandwidth
    assert got.kv == pytest.approx(compute + 3 * max(compute, kv), rel=1e-9)
    assert got.q == pytest.approx(compute + 3 * max(compute, q) + returned, rel=1e-9)


def test_fp8_kv_is_half_the_cache_and_half_the_passed_kv() -> None:
    group = ServingGroup(cluster=cluster("h200"), tp=8, cp=2)
    wide, fp8 = MODELS["qwen3-8b"], replace(MODELS["qwen3-8b"], kv_element=1)
    plans = [plan_serving(model, group.cluster, gpus=16, context=2**20, batch=4, tp=8) for model in (wide, fp8)]
    caches, weights = ([getattr(p.memory, name) for p in plans] for name in ("cache_per_sequence", "weights"))
    assert caches[0] == 2 * caches[1] and weights[0] == weights[1]
    assert plans[0].memory.largest_batch == 13 and plans[1].memory.largest_batch == 27
    launches = wide.layers * group.cluster.kernel.launch
    times = [decode_time(model, group, 2**20, 4) for model in (wide, fp8)]
    assert (times[1].cache - launches) / (times[0].cache - launches) == pytest.approx(0.5 / 0.65)
    assert times[0].weights == times[1].weights and times[0].merge == times[1].merge
    bandwidth, _ = group.context_link
    got, exact = (passed_tensors(model, group, 64, 2**20) for model in (fp8, wide))
    assert got.q == exact.q
    assert exact.kv - got.kv == pytest.approx((2**20 + 64) / 2 * 128 * 2 / bandwidth, rel=1e-6)
    assert "FP8 KV" in str(plans[1]) and "FP8" not in str(plans[0])


def test_passing_kv_wins_before_both_pass_as_many_bytes() -> None:
    """Below 2 · KV heads / heads of new tokens, queries are fewer bytes than KV; overlap hides KV earlier than partial results return."""
    shares = crossovers()
    equal = shares.pop("equal bytes")
    assert equal == 0.125 and all(0.01 < share < equal for share in shares.values())
    group = ServingGroup(cluster=cluster("h100"), tp=8, cp=4)
    assert passed_tensors(MODEL, group, 1_000, 127_000).choice == "queries"
    assert passed_tensors(MODEL, group, 64_000, 64_000).choice == "KV"


def test_one_context_rank_passes_nothing_and_two_pass_tensors() -> None:
    one, two = (passed_tensors(MODEL, ServingGroup(cluster=cluster("h100"), tp=8, cp=cp), 64_000, 0) for cp in (1, 2))
    assert (one.kv, one.q) == (0.0, 0.0) and two.q > 0.0


def test_memory_and_largest_batch_follow_from_sizes() -> None:
    model, group = MODELS["qwen3-8b"], ServingGroup(cluster=cluster("h200"), tp=8, cp=2)
    memory = serving_memory(model, group, 1 << 20)
    assert memory.cache_per_sequence == 36 * 2 * 8 * 128 * 2 * (1 << 20) / 16
    assert memory.weights + memory.largest_batch * memory.cache_per_sequence <= memory.room
    assert memory.weights + (memory.largest_batch + 1) * memory.cache_per_sequence > memory.room


def test_windows_bound_the_cache() -> None:
    model = MODELS["gpt-oss-120b"]
    assert model.cache_bytes(1 << 20) == (18 * (1 << 20) + 18 * 128) * 2 * 8 * 64 * 2


def test_kv_heads_that_several_devices_hold_are_counted() -> None:
    model, profile = MODELS["qwen3-8b"], replace(cluster("h200"), gpus_per_node=16)
    few, many = (serving_memory(model, ServingGroup(cluster=profile, tp=tp, cp=1), 1 << 16) for tp in (8, 16))
    assert few.cache_per_sequence == many.cache_per_sequence
    assert default_tp(model, profile, 16) == 8


def test_decoding_takes_longer_with_more_context_and_less_per_token_in_a_batch() -> None:
    model, group = MODELS["llama3-8b"], ServingGroup(cluster=cluster("h200"), tp=1, cp=1)
    short, long = (decode_time(model, group, context, 1).seconds for context in (1 << 10, 1 << 17))
    assert short < long
    assert decode_time(model, group, 1 << 10, 32).seconds / 32 < short


def test_a_tp_that_does_not_fit_raises() -> None:
    assert plan_serving(MODELS["qwen3-8b"], cluster("h200"), gpus=16, context=1 << 14, batch=1, tp=1).group.cp == 16
    with pytest.raises(ValueError, match="tp: expected at most the 8 devices of a node of h200, got 16"):
        plan_serving(MODELS["qwen3-8b"], cluster("h200"), gpus=16, context=1 << 14, batch=1, tp=16)
    for tp in (3, 0):
        with pytest.raises(ValueError, match="tp: expected a divisor of 16 devices and 32 heads"):
            plan_serving(MODELS["qwen3-8b"], cluster("h200"), gpus=16, context=1 << 14, batch=1, tp=tp)


def test_a_prefill_over_a_prime_number_of_devices_takes_about_as_long_as_over_one_more() -> None:
    odd, even = (plan_serving(MODELS["qwen3-8b"], cluster("h200"), gpus=n, context=1 << 17, batch=1, tp=1) for n in (127, 128))
    assert odd.attention.data.tiles[0].queries.tiles < 2 * even.attention.data.tiles[0].queries.tiles
    assert odd.prefill.attention == pytest.approx(even.prefill.attention, rel=0.3)


def test_numbers_of_a_plan_are_in_their_units() -> None:
    """131,072 tokens of 36 layers with 8 KV heads of 128 dims, K and V in 2 bytes, over 4 × 2 devices."""
    plan = plan_serving(MODELS["qwen3-8b"], cluster("h200"), gpus=8, context=1 << 17, batch=3, tp=4)
    numbers = {name: value for name, (_, value, _) in plan.numbers.items()}
    assert numbers["weights"] == pytest.approx(2 * MODELS["qwen3-8b"].parameters / 4 / 2**30, rel=0.02)
    assert numbers["cache"] == pytest.approx(3 * (1 << 17) * 36 * 8 * 128 * 2 * 2 / 8 / 2**30, rel=0.02)
    assert numbers["token"] == 1e3 * plan.decode.seconds and numbers["throughput"] == pytest.approx(3e3 / numbers["token"])
    assert numbers["first_token"] == plan.prefill.seconds > numbers["prefill_waiting"] >= 0 and numbers["batch"] > 3


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 4)])
def test_parts_of_a_prefill_and_of_a_decoded_token_by_hand(tp: int, cp: int) -> None:
    model = ModelSizes(name="m", layers=3, hidden=64, heads=8, kv_heads=4, head_dim=16, parameters=1e6)
    group = ServingGroup(cluster=cluster("h200"), tp=tp, cp=cp)
    flops, hbm = group.cluster.flops, group.cluster.hbm
    prefill = prefill_time(model, group, 1000, attention=0.25, waiting=0.125)
    assert prefill.matrices == pytest.approx(2 * 1e6 * 1000 / (tp * cp) / flops)
    assert prefill.all_reduce == pytest.approx(2 * 3 * group.all_reduce(1000 / cp * 64 * 2))
    assert prefill.seconds == pytest.approx(0.25 + prefill.matrices + prefill.all_reduce) and prefill.waiting == 0.125
    decode = decode_time(model, group, 5000, 7)
    assert decode.weights == pytest.approx(max(2 * 1e6 / tp / hbm, 2 * 7 * 1e6 / tp / flops))
    read = 7 * model.cache_bytes(5000) * group.kv_copies(model) / (tp * cp)
    assert decode.cache == pytest.approx(read / hbm + 3 * group.cluster.kernel.launch)
    assert (decode.merge > 0) == (cp > 1)
