"""A trace is reused only where nothing that the mod reads has changed."""

from __future__ import annotations

import types
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import longspan as ls
from longspan.masks.trace_cache import TraceCache
from longspan.masks.tracing import trace

WINDOW = 3


class Config:
    cap = 4.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2))
        self.config = types.SimpleNamespace(window=5)

    def mod(self):  # type: ignore[no-untyped-def]
        return lambda s, b, h, q, kv: self.adjusted(s, h) + self.config.window

    def adjusted(self, score: Tensor, h: Tensor) -> Tensor:
        return score * Config.cap + self.bias[h]


def traced_twice(cache: TraceCache, first, second) -> bool:  # type: ignore[no-untyped-def]
    before = cache.hits
    a = cache.trace(first, "score", score_dtype=torch.float32)
    b = cache.trace(second, "score", score_dtype=torch.float32)
    assert b.program.key == trace(second, "score").program.key, "a hit must be what a fresh trace gives"
    assert all(x is y for x, y in zip(b.sources, trace(second, "score").sources, strict=True))
    del a
    return cache.hits > before


def test_a_closure_made_anew_over_other_tensors_hits_and_is_bound_to_them() -> None:
    make = lambda t: lambda s, b, h, q, kv: s + t[h] * 2
    assert traced_twice(TraceCache(), make(torch.randn(3)), make(torch.randn(3)))


def test_a_tensor_of_another_shape_or_a_changed_number_misses() -> None:
    make = lambda t, n: lambda s, b, h, q, kv: s + t[h] * n + t.shape[0]
    t = torch.randn(3)
    assert not traced_twice(TraceCache(), make(t, 2), make(torch.randn(4), 2))
    assert not traced_twice(TraceCache(), make(t, 2), make(t, 3))
    assert not traced_twice(TraceCache(), make(t, 1), make(t, True))


def test_changes_behind_attributes_globals_classes_and_methods_are_noticed() -> None:
    global WINDOW
    model, cache = Model(), TraceCache()
    assert traced_twice(cache, model.mod(), model.mod())
    model.config.window = 6
    assert not traced_twice(cache, lambda s, b, h, q, kv: s, model.mod())
    Config.cap = 5.0
    assert not traced_twice(cache, lambda s, b, h, q, kv: s, model.mod())
    model.bias = nn.Parameter(torch.randn(2))
    assert traced_twice(cache, model.mod(), model.mod())
    by_global = lambda s, b, h, q, kv: torch.where(q - kv < WINDOW, s, -torch.inf)
    cache.trace(by_global, "score", score_dtype=torch.float32)
    WINDOW = 4
    before = cache.hits
    cache.trace(by_global, "score", score_dtype=torch.float32)
    assert cache.hits == before


def test_what_the_walk_does_not_understand_is_traced_every_time() -> None:
    names = {"n": 2}
    mod = lambda s, b, h, q, kv: s * getattr(types.SimpleNamespace(**names), "n")  # noqa: B009
    assert not traced_twice(TraceCache(), mod, mod)


def test_a_mod_that_calls_a_module_is_traced_every_time() -> None:
    scale = nn.Hardtanh()
    mod = lambda s, b, h, q, kv: scale(s)
    assert not traced_twice(TraceCache(), mod, mod)


def test_masks_are_kept_too() -> None:
    cache = TraceCache()
    for seed in range(3):
        mask = ls.causal() & ls.documents(ids=torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(seed)).sort().values)
        traced = cache.trace(mask, "mask", score_dtype=torch.float32)
        assert traced.sources[0] is mask.b.first
    assert cache.hits == 2
    assert ls.sliding_window(3).traced.program.key != ls.sliding_window(4).traced.program.key


def test_the_cache_is_bounded() -> None:
    cache = TraceCache(size=2)
    for n in range(5):
        cache.trace(lambda s, b, h, q, kv, n=n: s * n, "score", score_dtype=torch.float32)
    assert len(cache._entries) == 2


def test_threads_may_call_the_operator_at_once() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    scales = [1.0, 2.0, 3.0, 4.0]

    def call(scale: float) -> Tensor:
        return ls.attention(q, k, v, mask=ls.sliding_window(int(scale)), score_mod=lambda s, b, h, i, j: s * scale)

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(call, scales * 3))
    for scale, out in zip(scales * 3, got, strict=True):
        torch.testing.assert_close(out, ls.attention(q, k, v, mask=ls.sliding_window(int(scale)), scale=scale * 8**-0.5))
