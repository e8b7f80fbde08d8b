"""Steps of a cache: layers in order, values made once for all layers, and replays of a captured step."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cache.step import CacheStep, tokens_first


def make(**sizes: Any) -> ls.KVCache:
    return ls.KVCache(**{"pages": 20, "page_size": 3, "layers": 3, "kv_heads": 1, "head_dim": 4, "dtype": torch.float32} | sizes)


def finish(step: CacheStep) -> CacheStep:
    for layer in range(step.cache.layers):
        step.check_layer(layer)
        step.finish_layer(layer)
    return step


def test_positions_follow_the_tokens_before() -> None:
    cache = make()
    ids = cache.allocate(3)
    finish(cache.step(ids, [2, 0, 1]))
    assert cache.step(ids, 2).positions.tolist() == [[2, 3], [0, 1], [1, 2]]
    assert cache.step(ids, [1, 0, 2]).positions.tolist() == [[4, 3, 4]]
    assert cache.step(ids, 0).positions.shape == (3, 0) and cache.step([], 4).positions.shape == (0, 0)
    assert cache.step([], []).positions.shape == (1, 0)


def test_layers_are_written_once_in_ascending_order() -> None:
    cache = make()
    (id,) = cache.allocate(1)
    step = cache.step([id], 2)
    step.check_layer(0)
    step.finish_layer(0)
    with pytest.raises(RuntimeError, match="cache: layer 0 of this step was computed before; make a new step"):
        step.check_layer(0)
    step.check_layer(2)
    step.finish_layer(2)
    with pytest.raises(RuntimeError, match="cache: layers of a step run in ascending order, got layer 1 after layer 2"):
        step.check_layer(1)
    later = cache.step([id], 1)
    later.check_layer(0)
    with pytest.raises(RuntimeError, match=rf"an earlier step of sequence {id} has not written layer 1"):
        later.check_layer(1)
    later.check_layer(2)
    assert cache.sequence(id).unfinished == [step, later]
    step.finish_layer(1)
    assert cache.sequence(id).unfinished == [later]
    later.check_layer(1)
    cache.truncate(id, 2)
    with pytest.raises(RuntimeError, match=rf"cache: sequence {id} was truncated after this step was made"):
        later.check_layer(1)
    freed = cache.step([id], 1)
    cache.free(id)
    with pytest.raises(ValueError, match=rf"sequence {id} was freed"):
        freed.check_layer(0)


def test_a_checked_step_is_checked_again_after_the_cache_has_changed() -> None:
    cache = make()
    ids = cache.allocate(2)
    step = cache.step(ids[:1], 1)
    step.check_layer(0)
    assert step._checked == cache.version
    cache.step(ids[1:], 1)
    assert step._checked != cache.version
    cache.free(ids[0])
    with pytest.raises(ValueError, match="was freed"):
        step.check_layer(0)


def test_values_are_made_once_by_key() -> None:
    cache = make(page_size=1)
    step = cache.step(cache.allocate(1), 1)
    made: list[int] = []
    value = lambda: made.append(1) or len(made)
    assert [step.derived("a", value), step.derived("a", value), step.derived("b", value)] == [1, 1, 2]
    assert [step.derived(None, value), step.derived(None, value), step.derived("a", value)] == [3, 4, 1]
    calls = step.prepared_calls()
    calls["x"] = 1
    assert step.prepared_calls() is calls
    cache.allocate(20)  # the table moves
    assert step.prepared_calls() == {} and step.prepared_calls() is not calls
    step.last_call, step._checked = "call", 3
    copied = copy.deepcopy(step)
    assert (copied._derived, copied._addresses, copied._prepared, copied.last_call, copied._checked) == ({}, None, (-1, {}), None, -1)
    assert copied.cache is not cache and copied.ids == step.ids and step.derived("a", value) == 1


def test_a_captured_step_advances_in_the_same_tensors() -> None:
    cache = make()
    ids = cache.allocate(2)
    finish(cache.step(ids, [4, 1]))
    step = finish(cache.step(ids, 2, longest=10))
    tensors = [getattr(step.ranges, name) for name in ("device_ranges", "positions", "token_rows")]
    assert step.positions.tolist() == [[4, 5], [1, 2]] and cache.table_shape[1] == 16
    for start in (6, 8):
        step.advance()
        assert [getattr(step.ranges, name) for name in ("device_ranges", "positions", "token_rows")] == tensors
        assert step.positions.tolist() == [[start, start + 1], [start - 3, start - 2]] and cache.lengths(ids).tolist() == [
            start + 2,
            start - 1,
        ]
        assert [cache.sequence(id).unfinished for id in ids] == [[], []]
    with pytest.raises(ValueError, match="step: expected sequences of at most longest=10 tokens, got 12"):
        step.advance()
    ragged = finish(cache.step(ids, [0, 1], longest=20))
    ragged.advance()
    assert ragged.ranges.counts == step.ranges.counts[:0] + type(ragged.ranges.counts)([0, 1]) and cache.lengths(ids).tolist() == [10, 9]


def test_steps_that_cannot_advance_say_why() -> None:
    cache = make()
    ids = cache.allocate(2)
    with pytest.raises(RuntimeError, match=r"advance: expected a step made with KVCache.step\(…, longest=…\)"):
        finish(cache.step(ids, 1)).advance()
    step = cache.step(ids, 1, longest=9)
    step.finish_layer(0)
    step.finish_layer(1)
    with pytest.raises(RuntimeError, match="advance: expected all 3 layers of the step to be captured, got 2"):
        step.advance()
    step.finish_layer(2)
    other = cache.step(ids[1:], 1)
    with pytest.raises(ValueError, match=rf"advance: expected no other unfinished step, got one of sequences \[{ids[1]}\]: write all"):
        step.advance()
    finish(other)
    step.advance()
    cache.grow(1)
    with pytest.raises(RuntimeError, match="advance: the cache or its page table has grown since the step's layers were computed"):
        step.advance()
    step = finish(cache.step(ids, 1, longest=9))
    lengths = cache.lengths(ids).tolist()
    step.cache._grow_table(rows=9, width=0)
    with pytest.raises(RuntimeError, match="has grown"):
        step.advance()
    assert cache.lengths(ids).tolist() == lengths


def test_tokens_come_before_heads() -> None:
    one, several = torch.arange(24.0).view(1, 2, 4, 3), torch.arange(48.0).view(2, 2, 4, 3)
    assert torch.equal(tokens_first(one), one[0].transpose(0, 1))
    assert torch.equal(tokens_first(several), torch.stack([several[n, :, i] for n in range(2) for i in range(4)]))


def test_a_step_is_made_of_its_cache_ids_and_ranges_and_shows_no_other_state() -> None:
    cache = make()
    step = finish(cache.step(cache.allocate(2), 1))
    assert [f.name for f in dataclasses.fields(CacheStep) if f.init] == ["cache", "ids", "ranges", "ragged"]
    assert repr(step) == f"CacheStep(ids=(0, 1), ranges={step.ranges!r}, ragged=False)"
    assert step != dataclasses.replace(step) and len({step, dataclasses.replace(step)}) == 2
