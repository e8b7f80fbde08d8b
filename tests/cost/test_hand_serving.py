"""Serving, computed by hand on made devices whose numbers all differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longspan._cost.rates import Cluster, KernelRates, Link, Rates, Shape
from longspan._cost.serving import (
    MODELS,
    ModelSizes,
    ServingGroup,
    ServingMemory,
    crossover,
    decode_time,
    default_tp,
    passed_tensors,
    serving_memory,
)

RATES = Rates(keys=(128.0, 1024.0), full=(3.0, 7.0), causal=(2.0, 5.0))  # the best rate: 7e12 operations per second
CLUSTER = Cluster(
    name="made", about="", gpus_per_node=8, memory=1000.0, hbm=2e9,
    inside=Link(bandwidth=3e6, latency=0.25), between=Link(bandwidth=5e5, latency=0.5),
    kernel=KernelRates(name="k", source="", forward=RATES, backward=RATES, launch=0.125, slots=1),
)  # fmt: skip
MODEL = ModelSizes(name="m", layers=3, hidden=96, heads=12, kv_heads=6, head_dim=16, parameters=1e6)


def test_an_all_reduce_sends_its_bytes_twice_but_for_its_own_part() -> None:
    for tp, seconds in ((1, 0.0), (2, 0.25 + 6000 / 3e6), (4, 0.25 + 1.5 * 6000 / 3e6)):
        assert ServingGroup(cluster=CLUSTER, tp=tp, cp=5).all_reduce(6000) == pytest.approx(seconds)


def test_groups_of_one_node_use_its_links_and_larger_ones_those_between() -> None:
    assert ServingGroup(cluster=CLUSTER, tp=4, cp=2).context_link == (3e6, 0.25)
    assert ServingGroup(cluster=CLUSTER, tp=4, cp=3).context_link == ServingGroup(cluster=CLUSTER, tp=3, cp=3).context_link == (5e5, 0.5)
    for tp, devices in ((3, 2), (8, 1), (16, 1)):
        group = ServingGroup(cluster=CLUSTER, tp=tp, cp=5)
        assert group.context_cluster == replace(CLUSTER, gpus_per_node=devices) and group.gpus == 5 * tp


def test_a_device_has_its_part_of_the_heads_and_copies_of_kv_heads() -> None:
    shapes = [ServingGroup(cluster=CLUSTER, tp=tp, cp=1).shape(MODEL) for tp in (1, 3, 12)]
    assert shapes == [Shape(heads=h, kv_heads=kv, head_dim=16, element=2) for h, kv in ((12, 6), (4, 2), (1, 1))]
    assert [ServingGroup(cluster=CLUSTER, tp=tp, cp=1).kv_copies(MODEL) for tp in (1, 6, 12)] == [1.0, 1.0, 2.0]


def test_the_default_tp_divides_devices_and_heads_inside_a_node() -> None:
    for gpus, tp in ((1, 1), (5, 1), (4, 2), (6, 6), (12, 6), (9, 3), (64, 2)):
        assert default_tp(MODEL, CLUSTER, gpus) == tp, gpus
    assert default_tp(MODEL, replace(CLUSTER, gpus_per_node=4), 12) == 3
    assert default_tp(replace(MODEL, heads=10, kv_heads=6), CLUSTER, 12) == 2


def test_a_decoded_token_by_hand() -> None:
    """7 sequences of 500 tokens, 2 × 5 devices in two nodes: 6 heads of 16 dims each; partial results have 4 bytes, merged ones 2."""
    group = ServingGroup(cluster=CLUSTER, tp=2, cp=5)
    decode = decode_time(MODEL, group, 500, 7)
    assert decode.weights == pytest.approx(2 * 1e6 / 2 / 2e9)
    assert decode.cache == pytest.approx(7 * 500 * 3 * 2 * 6 * 16 * 2 / 10 / 2e9 + 3 * 0.125)
    assert decode.merge == pytest.approx(3 * (2 * 0.5 + 0.8 * 7 * (6 * 17 * 4 + 6 * 16 * 2) / 5e5))
    assert decode.all_reduce == pytest.approx(2 * 3 * (0.25 + 7 * 96 * 2 / 3e6))
    assert decode.seconds == pytest.approx(decode.weights + decode.cache + decode.merge + decode.all_reduce)


def test_large_batches_are_bound_by_operations_and_experts_are_read_up_to_all() -> None:
    experts, group = replace(MODEL, all_parameters=5e6), ServingGroup(cluster=CLUSTER, tp=2, cp=1)
    assert decode_time(MODEL, group, 1, 10**6).weights == pytest.approx(2 * 1e6 * 1e6 / 2 / 7e12)
    assert [decode_time(experts, group, 1, batch).weights for batch in (3, 5, 9)] == pytest.approx(
        [2 * n / 2 / 2e9 for n in (3e6, 5e6, 5e6)]
    )
    assert decode_time(MODEL, group, 1, 1).merge == 0.0 and experts.weight_bytes == 1e7 and MODEL.weight_bytes == 2e6


def test_the_cache_of_windowed_layers_ends_at_the_window() -> None:
    windowed = replace(MODEL, window=100, full_layers=1)
    token = 2 * 6 * 16 * 2
    assert [m.cache_bytes(n) for m in (MODEL, windowed) for n in (40, 700)] == [t * token for t in (120, 2100, 120, 900)]
    assert (MODEL.unbounded_layers, windowed.unbounded_layers) == (3, 1)


def test_memory_by_hand_leaves_a_tenth_free() -> None:
    memory = serving_memory(MODEL, ServingGroup(cluster=CLUSTER, tp=12, cp=5), 500)
    assert memory.weights == pytest.approx(2e6 / 12) and memory.room == pytest.approx(900)
    assert memory.cache_per_sequence == pytest.approx(500 * 3 * 2 * 6 * 16 * 2 * 2 / 60)  # each KV head on two devices
    for room, batch in ((99.0, 0), (129.0, 0), (130.0, 1), (189.0, 2), (190.0, 3)):
        assert ServingMemory(weights=100.0, cache_per_sequence=30.0, room=room).largest_batch == batch


def test_passed_tensors_by_hand_where_links_or_kernels_are_slow() -> None:
    """Rings of 5 groups; 6 heads and 3 KV heads of 16 dims on a device. Slow links: transfers decide; else the kernels do."""
    for bandwidth in (1e4, 5e5, 1e12):
        cluster = replace(CLUSTER, between=Link(bandwidth=bandwidth, latency=0.001))
        got = passed_tensors(MODEL, ServingGroup(cluster=cluster, tp=2, cp=5), 1000, 250)
        compute = 4 * 16 * 6 * (200 * (250 + 500) / 5) / 7e12 + 0.125
        kv, q = (0.001 + n / bandwidth for n in (250 * 2 * 3 * 16 * 2, 200 * 6 * 16 * 2))
        returned = 0.001 + 4 * 200 * 6 * (16 * 2 + 4) / bandwidth
        assert got.kv == pytest.approx(compute + 4 * max(compute, kv)) and got.q == pytest.approx(compute + 4 * max(compute, q) + returned)
        assert got.choice == ("KV" if got.kv <= got.q else "queries")
    assert passed_tensors(MODEL, ServingGroup(cluster=CLUSTER, tp=2, cp=1), 1000, 250).choice == "KV"  # equal


def test_the_crossover_is_the_first_share_at_which_kv_wins() -> None:
    cluster = replace(CLUSTER, between=Link(bandwidth=5e5, latency=0.0), kernel=replace(CLUSTER.kernel, launch=0.0))
    group = ServingGroup(cluster=cluster, tp=2, cp=5)
    share = crossover(MODEL, group, 50_000)
    wins = [passed_tensors(MODEL, group, n, 50_000 - n).choice == "KV" for n in (round(share * 50_000) - 50, round(share * 50_000))]
    assert 0.0 < share < 1.0 and share * 1000 == pytest.approx(round(share * 1000)) and wins == [False, True]
    for total in (9, 700, 1999, 2003):  # every number of new tokens is tried up to 1,999, every second one from 2,000 on
        winners = [new for new in range(0, total, total // 1000 or 1) if passed_tensors(MODEL, group, new, total - new).choice == "KV"]
        assert crossover(MODEL, group, total) == winners[0] / total, total
    assert (
        crossover(replace(MODEL, kv_heads=12, heads=12), ServingGroup(cluster=cluster, tp=2, cp=5), 3) == 1.0
    )  # queries are always fewer bytes


def test_sizes_of_known_models() -> None:
    """layers, hidden, heads, KV heads, head dim, billions of parameters, and where they differ those in memory, window, full layers."""
    sizes = {
        "qwen3-8b": (36, 4096, 32, 8, 128, 8.2, None, None, None),
        "qwen3-32b": (64, 5120, 64, 8, 128, 32.8, None, None, None),
        "llama3-8b": (32, 4096, 32, 8, 128, 8.0, None, None, None),
        "llama3-70b": (80, 8192, 64, 8, 128, 70.6, None, None, None),
        "llama3-405b": (126, 16384, 128, 8, 128, 405.0, None, None, None),
        "gemma3-27b": (62, 5376, 32, 16, 128, 27.0, None, 1024, 10),
        "gpt-oss-120b": (36, 2880, 64, 8, 64, 5.1, 117.0, 128, 18),
    }
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim")
    assert MODELS.keys() == sizes.keys()
    for name, (*integers, used, held, window, full) in sizes.items():
        model = MODELS[name]
        assert [getattr(model, n) for n in names] == integers and (model.window, model.full_layers) == (window, full)
        assert model.parameters == pytest.approx(used * 1e9) and model.weight_bytes == pytest.approx(2e9 * (held or used))
