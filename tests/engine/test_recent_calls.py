"""Prepared calls as their cache keeps them: bounds, the order of use, several layouts of one call, and the work of a forward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.call_cases import BIAS, CAUSAL, biased, qkv
from tests.torch_settings import matmul_precision
from torch import Tensor

import longspan as ls
from longspan._engine import call_cache, one_device
from longspan._engine.attention import AttendOptions, attend
from longspan._engine.call_cache import CallCache, CallEntry, CallKey, score_key
from longspan._engine.ops import specs
from longspan._engine.prepared_call import PreparedCall
from longspan._engine.table_cache import TableCache
from longspan._engine.values import CallOptions, CallTensors
from longspan._masks.algebra import Full

Q, K, V = (t.detach() for t in qkv())
OPTIONS = AttendOptions(mask=CAUSAL)


def entered(cache: CallCache, owner: ls.Mask, name: Any) -> CallEntry:
    return cache._entries.get(owner, name, CallEntry)


def test_calls_of_several_layouts_are_all_recent() -> None:
    cache, entries = CallCache(), []
    layouts = [[t[:, :, :n].contiguous() for t in (Q, K, V)] for n in (8, 16, 24, 32)]
    for tensors in layouts:
        entries.append(CallEntry())
        key = cache.key(*tensors, OPTIONS)
        assert key is not None
        cache.note_recent(*tensors, OPTIONS, key, entries[-1])
    assert [cache.recent(*tensors, OPTIONS) for tensors in layouts] == entries
    gone, kept = entries.pop(0), entries
    del gone, tensors
    assert [cache.recent(*tensors, OPTIONS) for tensors in layouts] == [None, *kept]


@pytest.mark.parametrize("shared", [True, False])
def test_the_calls_used_last_are_kept(shared: bool) -> None:
    """The order of use counts from half of the size on."""
    cache = CallCache(size=4)
    owner = cache._shared if shared else ls.documents([10, 30])
    entries = {name: entered(cache, owner, name) for name in "ab"}
    assert cache.entry(CallKey(owner, "a")) is entries["a"]
    for name in "cde":
        entered(cache, owner, name)
    assert cache.entry(CallKey(owner, "a")) is entries["a"] and cache.entry(CallKey(owner, "b")) is None
    assert cache.entry(CallKey(Full(), "a")) is None


@pytest.mark.parametrize("transform", ["vmap", "grad"])
@pytest.mark.parametrize("leftover", range(3))
def test_tensors_that_a_transform_left_behind_have_no_key(leftover: int, transform: str) -> None:
    tensors, kept = [Q, K, V], []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    if transform == "vmap":
        torch.vmap(keep)(torch.stack([tensors[leftover]] * 2))
    else:
        torch.func.grad(keep)(tensors[leftover])
    cache = CallCache()
    assert cache.key(*tensors, OPTIONS) is not None
    tensors[leftover] = kept[0]
    assert cache.key(*tensors, OPTIONS) is None


@pytest.mark.parametrize("negated", range(3))
def test_negated_views_have_no_key(negated: int) -> None:
    tensors = [Q, K, V]
    tensors[negated] = torch._neg_view(tensors[negated])
    assert CallCache().key(*tensors, OPTIONS) is None


def test_lse_is_returned_by_default_also_by_prepared_calls(prepared: list[PreparedCall]) -> None:
    tensors = qkv()
    for _ in range(4):
        out, lse, max_scores = attend(*tensors, OPTIONS)
        assert (lse.shape, lse.requires_grad, max_scores.shape) == (out.shape[:3], True, (0,))
    assert prepared


def test_the_work_of_a_prepared_forward_pass_has_no_gradient_program(prepared: list[PreparedCall]) -> None:
    tensors = qkv()
    for _ in range(3):
        out = ls.attention(*tensors, mask=CAUSAL, score_mod=biased)
        torch.autograd.grad(out.sum(), [*tensors, BIAS])
    assert prepared[-1]._work.joint is None
    assert all(work.joint is not None for _, work, _ in prepared[-1]._backwards.values())


def test_the_work_of_a_forward_pass_has_no_gradient_program(monkeypatch: pytest.MonkeyPatch) -> None:
    joints, forward = [], one_device.forward_by
    monkeypatch.setattr(
        one_device, "forward_by", lambda kernel, work, *a, **o: (joints.append(work.joint), forward(kernel, work, *a, **o))[1]
    )
    ls.attention(*qkv(), mask=CAUSAL, score_mod=biased, scale=0.9)
    assert joints == [None]


def test_backward_passes_of_a_prepared_call_are_bounded(prepared: list[PreparedCall]) -> None:
    tensors, counts = qkv(), []
    for _ in range(3):
        out = ls.attention(*tensors, mask=CAUSAL)
    for n in range(9):
        grad = torch.ones(1, 4, 40, 17 + n)[..., :16]  # other strides
        torch.autograd.grad(out, tensors, grad, retain_graph=True)
        counts.append(len(prepared[-1]._backwards))
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 1]


def test_work_has_the_tiles_of_its_block() -> None:
    q, k, v = torch.randn(1, 2, 70, 8), torch.randn(1, 2, 90, 8), torch.randn(1, 2, 90, 8)
    inputs = CallTensors(q=q, k=k, v=v, sink=None, mask_captured=[], score_captured=[])
    options = CallOptions(spec=specs.of(None, None, "cpu"), scale=0.5)
    tables = one_device.mask_tables(inputs, options)
    work = one_device.make_work(inputs, options, tables, backward=False, block=(64, 32))
    assert (work.q_tiles.length, work.q_tiles.block, work.kv_tiles.length, work.kv_tiles.block) == (70, 64, 90, 32)
    assert work.table.block == (64, 32) and (work.scale, work.joint, work.mask_is_fixed) == (0.5, None, False)


def test_caches_are_bounded_by_default() -> None:
    calls, tables, owner = CallCache(), TableCache(), Full()
    for n in range(200):
        entered(calls, owner, n)
        tables.tables(None, [], n + 1, 64, batch=1, heads=1)
    assert calls._entries.count(owner) == 64 and len(tables._entries) == 32
    inputs = CallTensors(q=Q, k=K, v=V, sink=None, mask_captured=[], score_captured=[])
    counts = []
    for n in range(17):
        calls.add(CallKey(calls._shared, "layouts"), f"score {n}", inputs, CallOptions(spec=specs.of(None, None, "cpu"), scale=0.5))
        counts.append(len(entered(calls, calls._shared, "layouts").calls))
    assert counts == [*range(1, 17), 1]


def test_the_precision_of_matmuls_is_part_of_the_key_of_float32_only() -> None:
    def keys() -> list[Any]:
        return [CallCache().key(*(t.to(dtype) for t in (Q, K, V)), OPTIONS) for dtype in (torch.float32, torch.float64)]

    with matmul_precision("ieee"):
        before = keys()
    with matmul_precision("tf32"):
        after = keys()
    assert before[0].layouts != after[0].layouts and before[1].layouts == after[1].layouts


def test_recent_calls_of_many_scales_are_bounded() -> None:
    cache, counts = CallCache(size=3), []
    for n in range(7):
        options = OPTIONS._replace(scale=0.5 + n)
        key = cache.key(Q, K, V, options)
        assert key is not None
        cache.note_recent(Q, K, V, options, key, CallEntry())
        counts.append(len(cache._recent))
    assert counts == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("misaligned", range(3))
def test_misaligned_tensors_have_no_key(misaligned: int) -> None:
    tensors = [Q, K, V]
    cache, x = CallCache(), tensors[misaligned]
    key, entry = cache.key(*tensors, OPTIONS), CallEntry()
    assert key is not None
    cache.note_recent(*tensors, OPTIONS, key, entry)
    tensors[misaligned] = torch.zeros(x.numel() + 1)[1:].view(x.shape)
    assert cache.key(*tensors, OPTIONS) is None and cache.recent(*tensors, OPTIONS) is None
    assert cache.recent(Q, K, V, OPTIONS) is entry


def test_a_recent_score_mod_is_found_by_its_guard_alone_for_aligned_tensors() -> None:
    entry, t, u = CallEntry(), torch.zeros(8, 8), torch.zeros(5)
    call: Any = SimpleNamespace(is_current=lambda: True)
    entry.calls[score_key("a", [t, u])] = call
    assert entry.call_with_score("a", [t, u]) is call
    entry.calls.clear()
    assert entry.call_with_score("a", [t.clone(), u.clone()]) is call
    for other in ([torch.zeros(65)[1:].view(8, 8), u], [t, torch.zeros(6)[1:]], [t, torch.zeros(6)]):
        assert entry.call_with_score("a", other) is None
    negated: Any = [t, torch._neg_view(u)]
    entry.calls[score_key("a", negated)] = call
    entry._recent_score = None
    assert entry.call_with_score("a", negated) is None and entry.call_with_score("a", [t, u]) is call
    entry = CallEntry({score_key("a", [torch.zeros(65)[1:].view(8, 8)]): call})
    assert entry.call_with_score("a", [torch.zeros(65)[1:].view(8, 8)]) is call and entry._recent_score is None


def test_versions_tell_modifications_of_a_callers_own_tensors_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, inference in ((True, False), (True, True), (False, False), (False, True)):
        tensor: Any = SimpleNamespace(is_cuda=cuda, is_inference=lambda inference=inference: inference)
        assert call_cache._is_versioned(tensor) is (cuda and not inference)
    first, second = torch.zeros(40, dtype=torch.int64), torch.ones(40, dtype=torch.int64)
    mask = ls.mask_mod(lambda b, h, q, kv: (first[q] == first[kv]) & (second[q] == second[kv]))
    uncounted: list[Tensor] = []
    monkeypatch.setattr(call_cache, "_is_versioned", lambda tensor: not any(tensor is u for u in uncounted))
    assert call_cache._versions_tell(mask, [first, second])
    assert not call_cache._versions_tell(mask, [first, second.clone()]) and not call_cache._versions_tell(mask, [first.clone(), second])
    uncounted.append(second)
    assert not call_cache._versions_tell(mask, [first, second])
    uncounted.clear()
    computed = ls.mask_mod(lambda b, h, q, kv: first.int()[q] == first.int()[kv])
    assert not call_cache._versions_tell(computed, list(computed.traced.sources))


def test_four_layouts_of_a_call_are_recent() -> None:
    cache, entries = CallCache(), []
    layouts = [[t[:, :, :n].contiguous() for t in (Q, K, V)] for n in (8, 16, 24, 32, 40)]
    for tensors in layouts:
        entries.append(CallEntry())
        key = cache.key(*tensors, OPTIONS)
        assert key is not None
        cache.note_recent(*tensors, OPTIONS, key, entries[-1])
    assert [cache.recent(*tensors, OPTIONS) for tensors in layouts] == [None, *entries[1:]]
