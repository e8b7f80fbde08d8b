"""Serving plans: which devices share heads, parts of the prefill, headline numbers and lines."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from longspan._cost.clusters import cluster
from longspan._cost.serving import ModelSizes, crossover, passed_tensors
from longspan._planner import serving
from longspan._planner.serving import ServingPlan, plan_serving

MODEL = ModelSizes(name="m", layers=5, hidden=64, heads=12, kv_heads=6, head_dim=16, parameters=3e6)
PROFILE = replace(cluster("h200"), gpus_per_node=12)


def planned(model: ModelSizes = MODEL, **options: Any) -> ServingPlan:
    return plan_serving(model, PROFILE, **{"gpus": 4, "context": 2048, "batch": 3, "tp": 2, **options})


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 12, 24])
@pytest.mark.parametrize("kv_heads", [2, 4, 6])
def test_devices_that_share_heads_divide_devices_and_heads(tp: int, kv_heads: int) -> None:
    model = replace(MODEL, kv_heads=kv_heads)
    fits = 12 % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    if fits:
        group = plan_serving(model, PROFILE, gpus=24, context=512, batch=1, tp=tp).group
        assert (group.tp, group.cp) == (tp, 24 // tp)
        return
    message = f"tp: expected a divisor of 24 devices and 12 heads that fits {kv_heads} KV heads, got {tp}"
    with pytest.raises(ValueError, match=message):
        plan_serving(model, PROFILE, gpus=24, context=512, batch=1, tp=tp)


def test_devices_that_share_heads_are_in_one_node_and_divide_the_devices() -> None:
    small = replace(PROFILE, gpus_per_node=4)
    assert plan_serving(MODEL, small, gpus=8, context=512, batch=1, tp=2).group.cluster is small
    assert plan_serving(replace(MODEL, kv_heads=4), small, gpus=8, context=512, batch=1, tp=4).group.cp == 2
    with pytest.raises(ValueError, match="tp: expected at most the 4 devices of a node of h200, got 6"):
        plan_serving(MODEL, small, gpus=12, context=512, batch=1, tp=6)
    with pytest.raises(ValueError, match="expected a divisor of 8 devices"):
        plan_serving(MODEL, PROFILE, gpus=8, context=512, batch=1, tp=6)
    assert plan_serving(MODEL, PROFILE, gpus=4, context=512, batch=1).group.tp >= 1


def test_the_prefill_adds_layers_with_and_without_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = replace(MODEL, window=100, full_layers=2)
    asked: list[Any] = []
    monkeypatch.setattr(serving, "prefill_time", lambda *args, **options: asked.append((args, options)))
    for model in (MODEL, windowed):
        made = planned(model)
        assert made.prefill is None  # type: ignore[comparison-overlap]
        (args, options), where = asked.pop(), made.group.context_cluster
        assert args == (model, made.group, 2048)
        plans = [(model.unbounded_layers, made.attention)]
        if model.layers - model.unbounded_layers:
            plans.append((model.layers - model.unbounded_layers, made._planned(model.window)))
        forwards = [(count, plan.report(where).timeline.forward) for count, plan in plans]
        assert options["attention"] == pytest.approx(sum(count * one.seconds for count, one in forwards))
        assert options["waiting"] == pytest.approx(sum(count * float(one.exposed.max()) for count, one in forwards))
    assert made.attention.data.mask.text == "causal()" and "sliding_window(100, 0)" in made._planned(100).data.mask.text
    assert made.attention.data.heads == 6 and made.attention.data.kv_heads == 3 and made.attention.data.mesh.size == 2


@pytest.mark.parametrize(("context", "chunk"), [(8191, 8191), (8192, 8192), (8193, 8192), (20000, 8192)])
def test_the_last_chunk_of_the_prefill_has_8192_tokens_at_most(context: int, chunk: int) -> None:
    made = planned(context=context)
    assert made.chunk == chunk and made.passed == passed_tensors(MODEL, made.group, chunk, context - chunk)


def test_headline_numbers_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(context=16384)
    prefill = SimpleNamespace(seconds=1.25, attention=0.5, waiting=0.125, matrices=0.375, all_reduce=0.375)
    decode = SimpleNamespace(seconds=0.004, weights=0.001, cache=0.002, merge=0.0005, all_reduce=0.00025)
    memory = SimpleNamespace(weights=3 * 2**30, cache_per_sequence=2**29, room=5 * 2**30, largest_batch=3)
    for name, value in (("prefill", prefill), ("decode", decode), ("memory", memory)):
        monkeypatch.setitem(vars(made), name, value)
    assert made.numbers == {
        "first_token": ("time to first token, one sequence", 1.25, "s"),
        "prefill_waiting": ("of it waiting for KV", 0.125, "s"),
        "token": ("time per token, batch 3", 4.0, "ms"),
        "throughput": ("decoded tokens per second, all sequences", 750.0, ""),
        "weights": ("weights per device", 3.0, "GiB"),
        "cache": ("cache per device, batch 3", 1.5, "GiB"),
        "batch": ("largest batch that fits", 3, ""),
    }
    share = crossover(MODEL, made.group, 16384)
    lines = str(made).splitlines()
    assert lines == [
        "m, 3 × 16384 tokens on 4 devices: 2 share heads × 2 share KV",
        "  first token  1.25 s, one sequence: attention 0.50 (0.12 waiting for KV), matrix products 0.38, all-reduces 0.38",
        "  per token    4.00 ms: weights 1.00, cache 2.00, merges 0.50, all-reduces 0.25; 750 tokens/s in all",
        "  memory       3.0 GiB of weights and 1.5 GiB of cache per device; 5.0 GiB usable (h200)",
        "  batch        at most 3 sequences of 16384 tokens fit",
        f"  prefill      {made.attention.strategy}, layout {made.attention.data.layout}",
        f"  chunks       the last 8192 tokens over the cache: pass {made.passed.choice} (KV {1e3 * made.passed.kv:.2f} ms, "
        f"queries {1e3 * made.passed.q:.2f} ms per layer); KV is cheaper from {100 * share:.1f} % new tokens on",
    ]
    memory.largest_batch = 2
    assert "5.0 GiB usable (h200): too little" in str(made)
    alone = planned(gpus=2)
    assert len(str(alone).splitlines()) == 6 and "2 share heads × 1 share KV" in alone.words
