"""Prepared calls: used for calls that repeat, and for no call that differs in anything that a result depends on."""

from __future__ import annotations

import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.call_cases import BIAS, CAUSAL, biased, deterministic, qkv, same_as_dense, strided
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._engine import call_cache, one_device
from longspan._engine.attention import AttendOptions
from longspan._engine.call_cache import CallCache, CallEntry, CallKey, score_key
from longspan._engine.prepared_call import PreparedCall
from longspan._engine.values import CallTensors
from longspan._masks import remembered_mask as remembered_masks
from longspan._masks import trace_cache
from longspan._masks.remembered_mask import remembered_mask

CALLS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"mask": CAUSAL},
    "window": {"mask": ls.sliding_window(7) & CAUSAL},
    "documents": {"mask": CAUSAL & ls.documents([10, 30])},
    "score mod": {"mask": CAUSAL, "score_mod": biased},
    "scale": {"scale": 0.3},
    "sink": {"mask": CAUSAL, "sink": torch.tensor([0.5, -0.5, 1.0, 0.0], requires_grad=True)},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_prepared_the_second_time_and_right_every_time(name: str, prepared: list[PreparedCall]) -> None:
    options = CALLS[name]
    captured = [BIAS] if "score_mod" in options else [options["sink"]] if "sink" in options else []
    for times in range(5):
        tensors = qkv()
        same_as_dense(tensors, captured, **options)
        assert len(prepared) == max(0, times - 1)


def test_a_repeated_call_chooses_no_kernel_and_builds_no_work(prepared: list[PreparedCall], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv()
    grad = torch.randn(1, 4, 40, 16)
    for _ in range(3):
        first = torch.autograd.grad(ls.attention(*tensors, mask=CAUSAL), tensors, grad)
    monkeypatch.setattr(one_device, "kernel_and_work", None)
    again = torch.autograd.grad(ls.attention(*tensors, mask=ls.causal()), tensors, grad)
    assert prepared and all(map(torch.equal, first, again))


def test_calls_alternate_and_each_gets_its_own_result(prepared: list[PreparedCall]) -> None:
    for _ in range(4):
        for options in CALLS.values():
            same_as_dense(qkv(), [], **options)
        same_as_dense(qkv(torch.float64), [], mask=CAUSAL)
        same_as_dense(qkv(tokens=24), [], mask=CAUSAL)
        same_as_dense([t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in qkv()], [], mask=CAUSAL)
    assert len(prepared) == 2 * (len(CALLS) + 3)


Q, K, V = (t.detach() for t in qkv())
BASE: dict[str, Any] = {"q": Q, "k": K, "v": V, "mask": CAUSAL, "kernel": "auto"}
# One component of the key each: arguments that differ from BASE, and a context.
DIFFERENT: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "shape of q": ({"q": Q[:, :, :32].contiguous()}, nullcontext),
    "strides of q": ({"q": strided(Q)}, nullcontext),
    "dtype of q": ({"q": Q.double()}, nullcontext),
    "device of q": ({"q": Q.to("meta")}, nullcontext),
    "shape of k": ({"k": K[:, :, :32].contiguous()}, nullcontext),
    "strides of k": ({"k": strided(K)}, nullcontext),
    "dtype of k": ({"k": K.double()}, nullcontext),
    "device of k": ({"k": K.to("meta")}, nullcontext),
    "shape of v": ({"v": V[..., :8].contiguous()}, nullcontext),
    "strides of v": ({"v": strided(V)}, nullcontext),
    "dtype of v": ({"v": V.double()}, nullcontext),
    "device of v": ({"v": V.to("meta")}, nullcontext),
    "no mask": ({"mask": None}, nullcontext),
    "another mask": ({"mask": ls.sliding_window(5)}, nullcontext),
    "another width": ({"mask": ls.sliding_window(6)}, nullcontext),
    "mask with tensors": ({"mask": ls.documents([10, 30])}, nullcontext),
    "scale": ({"scale": 0.5}, nullcontext),
    "another scale": ({"scale": 0.25}, nullcontext),
    "sink": ({"sink": torch.zeros(4)}, nullcontext),
    "dtype of the sink": ({"sink": torch.zeros(4, dtype=torch.float64)}, nullcontext),
    "strides of the sink": ({"sink": torch.zeros(8)[::2]}, nullcontext),
    "device of the sink": ({"sink": torch.zeros(4, device="meta")}, nullcontext),
    "kernel": ({"kernel": "cpu"}, nullcontext),
    "deterministic algorithms": ({}, deterministic),
    "warnings of deterministic algorithms": ({}, lambda: deterministic(warn_only=True)),
    "inference mode": ({}, torch.inference_mode),
}


def key_of(cache: CallCache, **changed: Any) -> Any:
    arguments = {**BASE, **changed}
    q, k, v = (arguments.pop(name) for name in "qkv")
    return cache.key(q, k, v, AttendOptions(**arguments))


def test_every_component_of_a_call_is_part_of_its_key() -> None:
    cache = CallCache()
    keys = [key_of(cache)]
    for changed, context in DIFFERENT.values():
        with context():
            keys.append(key_of(cache, **changed))
    assert None not in keys
    identities = [(id(key.owner), key.layouts) for key in keys]
    assert len(set(identities)) == len(identities)


def test_masks_that_are_equal_as_values_share_a_key() -> None:
    cache = CallCache()
    first, second = (key_of(cache, mask=ls.causal() & ~ls.sliding_window(3) | ls.prefix(2)) for _ in range(2))
    assert first == second


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


class Counting(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# Calls that are never prepared.
UNCACHED: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "dispatch mode": ({}, Seen),
    "torch's dispatch mode": ({}, FakeTensorMode),
    "function mode": ({}, Counting),
    "default device": ({}, lambda: torch.device("cpu")),
    "invariant": ({}, ls.invariant),
    "forward-mode differentiation": ({}, forward_ad.dual_level),
    "subclass": ({"q": Q.as_subclass(Subclass)}, nullcontext),
    "subclass as a sink": ({"sink": torch.zeros(4).as_subclass(Subclass)}, nullcontext),
    "unaligned": ({"q": torch.empty(Q.numel() + 1)[1:].view(Q.shape)}, nullcontext),
    "callable object": ({"mask": functools.partial(lambda n, b, h, q, kv: q >= kv + n, 0)}, nullcontext),
    "mod that cannot be traced": ({"mask": lambda b, h, q, kv: bool(q >= kv)}, nullcontext),
    "dense": ({"kernel": "dense"}, nullcontext),
    "torch's kernels": ({"kernel": "flash"}, nullcontext),
    "max scores": ({"max_scores": True}, nullcontext),
    "bool as a scale": ({"scale": True}, nullcontext),
    "scale of zero": ({"scale": -0.0}, nullcontext),
    "sparse": ({"q": torch.zeros(2, 2).to_sparse()}, nullcontext),
    "unhashable kernel": ({"kernel": []}, nullcontext),
}


@pytest.mark.parametrize("name", UNCACHED)
def test_unusual_calls_have_no_key(name: str) -> None:
    changed, context = UNCACHED[name]
    with context():
        assert key_of(CallCache(), **changed) is None


def test_no_key_under_transforms() -> None:
    keys = []
    cache, _ = with_recent_call()

    def seen(q: Tensor) -> Tensor:
        keys.extend([key_of(CallCache(), q=q), recent_of(cache, q=q)])
        return q

    torch.vmap(seen)(torch.stack([Q, Q]))
    torch.func.grad(lambda q: seen(q).sum())(Q)
    assert keys == [None] * 4


def with_recent_call(**options: Any) -> tuple[CallCache, CallEntry]:
    """A cache with a recent call, and the entry of the call."""
    cache, entry = CallCache(), CallEntry()
    key = key_of(cache, **options)
    cache.note_recent(Q, K, V, AttendOptions(**{"mask": CAUSAL, "kernel": "auto", **options}), key, entry)
    return cache, entry


def recent_of(cache: CallCache, **changed: Any) -> Any:
    arguments = {**BASE, **changed}
    q, k, v = (arguments.pop(name) for name in "qkv")
    return cache.recent(q, k, v, AttendOptions(**arguments))


def test_a_recent_call_is_found_by_tensors_of_the_same_layouts_and_an_equal_mask() -> None:
    cache, entry = with_recent_call()
    assert recent_of(cache, q=Q.clone(), k=K.clone(), v=V.clone(), mask=ls.causal()) is entry
    documents = ls.documents([10, 30])
    cache, entry = with_recent_call(mask=documents)
    assert recent_of(cache, mask=documents) is entry and recent_of(cache, mask=ls.documents([10, 30])) is None


@pytest.mark.parametrize("name", [*DIFFERENT, *UNCACHED])
def test_a_call_that_differs_from_a_recent_one_is_not_taken_for_it(name: str) -> None:
    cache, _ = with_recent_call()
    changed, context = (DIFFERENT | UNCACHED)[name]
    with context():
        assert recent_of(cache, **changed) is None


def test_negated_views_and_tensors_that_require_gradients_are_not_taken_for_plain_ones() -> None:
    cache, _ = with_recent_call()
    assert recent_of(cache, k=torch._neg_view(K)) is None
    assert recent_of(cache, v=V.clone().requires_grad_()) is None
    assert recent_of(cache, scale=torch.tensor(0.5)) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_arguments_without_strides_are_not_compared_with_a_recent_call() -> None:
    """Torch's guard ends the process for a nested tensor: C++ asks it for strides."""
    cache, _ = with_recent_call()
    for other in (torch._nested_tensor_from_mask(Q[0], torch.ones(4, 40, dtype=torch.bool)), Q.to_sparse(), Q.to_mkldnn(), None, 3):
        assert [recent_of(cache, **{name: other}) for name in "qkv"] == [None] * 3


def test_recent_calls_are_bounded_and_dropped_with_their_entries() -> None:
    cache = CallCache(size=4)
    entries = [CallEntry() for _ in range(9)]
    for n, entry in enumerate(entries):
        tokens = [t[:, :, : 8 + n].contiguous() for t in (Q, K, V)]
        cache.note_recent(*tokens, AttendOptions(mask=CAUSAL), key_of(cache), entry)
        cache.note_recent(Q, K, V, AttendOptions(mask=CAUSAL, scale=0.5 + n), key_of(cache), entry)
    assert len(cache._recent) <= 4 and all(len(calls) <= 4 for calls in cache._recent.values())
    assert recent_of(cache, scale=8.5) is entries[-1]
    del entry
    entries.clear()
    assert recent_of(cache, scale=8.5) is None


def test_a_call_that_was_prepared_again_is_found_though_the_recent_one_is_outdated() -> None:
    entry, t = CallEntry(), torch.zeros(8, 8)
    outdated: Any = SimpleNamespace(is_current=lambda: True)
    again: Any = SimpleNamespace(is_current=lambda: True)
    entry.calls[score_key("a", [t])] = outdated
    assert entry.call_with_score("a", [t]) is outdated
    outdated.is_current = lambda: False  # a tensor of the mask was modified
    assert entry.call_with_score("a", [t]) is None
    entry.calls[score_key("a", [t])] = again
    assert entry.call_with_score("a", [t]) is again


def test_calls_with_one_tensor_in_two_places_do_not_displace_recent_calls(prepared: list[PreparedCall], fresh: CallCache) -> None:
    q, k, v = (t.detach() for t in qkv())
    for _ in range(3):
        ls.attention(q, k, v, mask=CAUSAL)
    for _ in range(8):  # the guard compares distinct tensors
        ls.attention(q, k, k, mask=CAUSAL)
    assert len(prepared) == 9 and recent_of(fresh, q=q, k=k, v=v) is not None


def test_a_recent_call_with_a_score_mod_is_found_by_its_program_and_captured_layouts() -> None:
    entry, t = CallEntry(), torch.zeros(8, 8)
    call: Any = SimpleNamespace(is_current=lambda: True)
    entry.calls[score_key("a", [t])] = call
    assert entry.call_with_score("a", [t]) is call  # from now on by a guard
    assert entry.call_with_score("a", [t.clone()]) is call
    others = [t.double(), t[:4], t.t(), t.to("meta"), torch.zeros(65)[1:].view(8, 8), torch._neg_view(t), t.as_subclass(Subclass)]
    for other in others:
        assert entry.call_with_score("a", [other]) is None
    assert entry.call_with_score("b", [t]) is None
    assert entry.call_with_score("c", []) is None
    assert torch.vmap(lambda x: torch.tensor(entry.call_with_score("a", [x]) is None))(torch.stack([t, t])).all()
    call.is_current = lambda: False
    assert entry.call_with_score("a", [t]) is None


def test_the_score_key_covers_the_program_and_every_captured_layout() -> None:
    t = torch.zeros(8, 8)
    captured = [t, t.double(), t[:4], t.t(), t.to("meta"), torch.zeros(65)[1:].view(8, 8)]
    keys = [None, *(score_key("a", [c]) for c in captured), score_key("b", [t]), score_key("a", [t, t]), score_key("a", [])]
    assert len(set(keys)) == len(keys)
    assert score_key(None, []) is None


def test_changed_values_of_tensors_that_a_mask_captures_are_noticed(prepared: list[PreparedCall]) -> None:
    ids = torch.arange(40) // 10
    mask = ls.mask_mod(lambda b, h, q, kv: ids[q] == ids[kv])
    for width in (10, 10, 10, 7):
        ids.copy_(torch.arange(40) // width)
        same_as_dense(qkv(), [], mask=mask)
    assert not prepared, "on the CPU, modifications cannot be seen by versions"


def test_changed_versions_of_captured_tensors_are_noticed(prepared: list[PreparedCall], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_is_versioned", lambda tensor: True)
    ids = torch.arange(40) // 10
    mask = ls.mask_mod(lambda b, h, q, kv: ids[q] == ids[kv])
    for _ in range(3):
        same_as_dense(qkv(), [], mask=mask)
    assert len(prepared) == 1
    ids.copy_(torch.arange(40) // 7)
    same_as_dense(qkv(), [], mask=mask)
    assert len(prepared) == 1
    for _ in range(2):
        same_as_dense(qkv(), [], mask=mask)
    before = len(prepared)
    ids.data = torch.arange(40) // 3  # another address, the same version
    same_as_dense(qkv(), [], mask=mask)
    assert len(prepared) == before > 1
    out = ls.attention(*qkv(), mask=mask)
    ids.copy_(torch.arange(40) // 5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_changed_tensor_behind_a_preamble_is_noticed(prepared: list[PreparedCall], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_is_versioned", lambda tensor: True)
    ids = (torch.arange(40) // 10).to(torch.int32)
    mask = ls.mask_mod(lambda b, h, q, kv: ids.long()[q] == ids.long()[kv])
    for width in (10, 10, 10, 7):
        ids.copy_(torch.arange(40) // width)
        same_as_dense(qkv(), [], mask=mask)
    assert not prepared, "the program reads the results of a preamble, whose versions never change"


def test_single_numbers_on_another_device_are_not_prepared(fresh: CallCache) -> None:
    inputs = CallTensors(q=torch.zeros(1, device="meta"), k=BIAS, v=BIAS, sink=None, mask_captured=[], score_captured=[torch.tensor(0.5)])
    key = CallKey(fresh._shared, "layouts")
    for _ in range(2):
        fresh.add(key, "score", inputs, None)  # type: ignore[arg-type]
    assert fresh.entry(key) is None


def test_calls_that_only_compile_are_not_prepared() -> None:
    compilation = pytest.importorskip("longspan._kernels.gpu.compilation")
    fresh, q = CallCache(), torch.zeros(1, 1, 4, 4)
    inputs, key = CallTensors(q=q, k=q, v=q, sink=None), CallKey(fresh._shared, "layouts")
    with compilation.collecting_jobs():
        fresh.add(key, None, inputs, None)  # type: ignore[arg-type]
    assert fresh.entry(key) is None


def test_a_rebound_value_of_a_score_mod_is_noticed(prepared: list[PreparedCall]) -> None:
    slopes = torch.linspace(0.1, 0.4, 4)
    factor = 2.0

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * factor + slopes[h] * (kv - q)

    def rebind(new_factor: float, new_slopes: Tensor) -> None:
        nonlocal factor, slopes
        factor, slopes = new_factor, new_slopes

    tables = slopes, slopes * 2
    for new in ((2.0, tables[0]),) * 3 + ((3.0, tables[0]), (3.0, tables[1]), (2.0, torch.ones(4))):
        rebind(*new)
        same_as_dense(qkv(torch.float64), [], score_mod=score)
    assert prepared


def test_a_function_as_a_mask_is_prepared_and_its_changes_are_noticed(prepared: list[PreparedCall]) -> None:
    tensors, window = qkv(), 3

    def local(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv < window)

    for window in (3, 5):
        prepared.clear()
        for _ in range(3):
            torch.testing.assert_close(ls.attention(*tensors, mask=local), ls.attention(*tensors, mask=CAUSAL & ls.sliding_window(window)))
        assert sum(call is prepared[0] for call in prepared) >= 1
    gone = weakref.ref(local)
    del local
    assert gone() is None  # without the garbage collector: a step's closure may capture large tensors


def test_a_function_as_a_mask_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, ids = qkv(), torch.arange(64) // 10

    def same_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ids[q] == ids[kv]

    first = ls.attention(*tensors, mask=same_document)
    monkeypatch.setattr(trace_cache, "trace", None)
    for mask in (same_document, ls.mask_mod(same_document)):
        assert torch.equal(ls.attention(*tensors, mask=mask), first)
    assert pickle.loads(pickle.dumps(same_document.__dict__)) == {"_longspan_mask": None}


def test_a_block_mask_is_remembered_until_its_lists_or_its_mod_change(monkeypatch: pytest.MonkeyPatch) -> None:
    block_mask = CAUSAL.block_table(256).to_block_mask()
    assert remembered_mask(block_mask) is None  # modifications of CPU tensors may go unnoticed
    first = remembered_masks._of_block_mask(block_mask)
    assert remembered_masks._of_block_mask(block_mask) is first
    block_mask.kv_num_blocks.add_(0)
    second = remembered_masks._of_block_mask(block_mask)
    assert second is not first and remembered_masks._of_block_mask(block_mask) is second
    block_mask.mask_mod = lambda b, h, q, kv: q == kv
    third = remembered_masks._of_block_mask(block_mask)
    assert third is not second and third.traced.program.key != second.traced.program.key
    gone = weakref.ref(block_mask)
    del block_mask
    assert gone() is None


def test_a_block_mask_without_full_blocks_is_remembered_and_one_of_inference_tensors_is_not() -> None:
    num, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    partial = BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=128, mask_mod=lambda b, h, q, kv: q >= kv)
    assert partial.full_kv_num_blocks is None
    assert remembered_masks._of_block_mask(partial) is remembered_masks._of_block_mask(partial)
    with torch.inference_mode():
        inference = BlockMask.from_kv_blocks(num.clone(), indices.clone(), BLOCK_SIZE=128, mask_mod=lambda b, h, q, kv: q >= kv)
    assert remembered_masks._of_block_mask(inference) is not remembered_masks._of_block_mask(inference)


def test_autocast_does_not_change_a_prepared_call(prepared: list[PreparedCall]) -> None:
    tensors = qkv()
    outs = []
    for enabled in (False, False, False, True, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            outs.append(ls.attention(*tensors, mask=CAUSAL))
    assert len(prepared) == 3
    assert all(torch.equal(out, outs[0]) and out.dtype == torch.float32 for out in outs)


def test_calls_are_dropped_with_their_mask_and_hold_no_tensor(prepared: list[PreparedCall]) -> None:
    mask, tensors = CAUSAL & ls.documents([10, 30]), qkv()
    for _ in range(3):
        ls.attention(*tensors, mask=mask)
    call, q, ids = weakref.ref(prepared[-1]), weakref.ref(tensors[0]), weakref.ref(mask.traced.captured()[0])
    prepared.clear()
    del tensors
    gc.collect()
    assert q() is None and call() is not None
    del mask
    gc.collect()
    assert call() is None and ids() is None


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan._engine import attention

    cache = CallCache(size=4, variants=3)
    monkeypatch.setattr(attention, "calls", cache)
    for n in range(9):
        for _ in range(2):
            ls.attention(*qkv(tokens=8 + n), scale=0.5)
            ls.attention(*qkv(), score_mod=lambda s, b, h, q, kv, n=n: s * (n + 1))
    assert cache._entries.count(cache._shared) == 4
    assert all(len(entry.calls) <= 3 for entry in cache._entries._owners[cache._shared].values.values())
