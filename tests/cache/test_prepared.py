"""Decode calls that repeat: the launches of a prepared call are those of a call that is not. Launches are recorded, not made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.cache.test_kv_cache import make_cache, tokens
from tests.kernels.stub_launches import Launches, record_launches
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._engine import attention, cached_prepared
from longspan._engine.cached import CachedCall

decode_call: Any = pytest.importorskip("longspan._kernels.triton.decode_call")
decode_prepared: Any = pytest.importorskip("longspan._kernels.triton.decode_prepared")
KERNELS = ["decode_kernel", "merge_kernel"]  # the second if a sequence has several splits


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """CPU tensors pass for tensors on a GPU."""
    recorded = record_launches(monkeypatch)
    decode_call._launches.cache_clear()  # some tests change the number of SMs
    monkeypatch.setattr(decode_prepared, "interpreted", lambda: False)
    monkeypatch.setattr(cached_prepared, "_on_gpu", lambda q: True)
    monkeypatch.setattr(cached_prepared, "current_stream_is_captured", lambda: False)
    return recorded


def call(step: Any, layer: int, launches: Launches, count: int = 1, **options: Any) -> list[tuple[int | float, ...]]:
    """Values of the launches of a layer."""
    launches.clear()
    ls.attention(*tokens(len(step.ids), count), cache=step, layer=layer, kernel="triton", **options)
    assert launches.names in (KERNELS[:1], KERNELS)
    return list(launches.values)


def call_unprepared(step: Any, layer: int, launches: Launches, **options: Any) -> list[tuple[int | float, ...]]:
    kept, step.cache.prepared = step.cache.prepared, {}
    try:
        return call(step, layer, launches, **options)
    finally:
        step.cache.prepared = kept


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ls.causal()},
    "window": {"mask": ls.causal() & ls.sliding_window(9)},
    "sink": {"sink": torch.zeros(4)},
    "softcap": {"score_mod": lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0), "scale": 0.3},
    "four tokens": {"count": 4},
}


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_prepared_call_launches_the_same(name: str, merged: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 16 if merged else 64)
    monkeypatch.setattr(decode_call, "GROUP_TOKENS", 0)
    options, count = dict(OPTIONS[name]), OPTIONS[name].get("count", 1)
    cache = make_cache(pages=40, layers=3)
    ids = cache.allocate(2)
    cache.step(ids, 20)
    for sequence_id in ids:
        del cache.sequence(sequence_id).unfinished[0]
    step = cache.step(ids, count)
    call(step, 0, launches, **options)
    assert len(cache.prepared) == 1
    prepared = call(step, 1, launches, **options)
    assert prepared[0][1:5] == _read(cache, step, layer=1)
    step._used.remove(1)
    unprepared = call_unprepared(step, 1, launches, **options)
    # The new tokens, partial results and results are other tensors.
    assert prepared[0][1:5] == unprepared[0][1:5] and prepared[0][-1] == unprepared[0][-1] and len(prepared[0]) == len(unprepared[0])
    assert len(prepared) == len(unprepared) == 1 + merged
    if merged:
        assert prepared[1][2] == unprepared[1][2] and len(prepared[1]) == len(unprepared[1])
    call(step, 2, launches, **options)
    later = cache.step(ids, count)
    assert call(later, 0, launches, **options)[0][1:5] == _read(cache, later, layer=0)
    assert len(cache.prepared) == 1


@pytest.mark.parametrize("name", OPTIONS)
def test_a_prepared_launch_that_merges_its_tiles_has_the_same_values(
    name: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counters are zeros in the scratch memory of the call, of two sequences and two KV heads."""
    monkeypatch.setattr(decode_call, "sm_count", lambda device: 132)
    (step,) = merged_steps(1, monkeypatch, layers=3)
    options = {key: x for key, x in OPTIONS[name].items() if key != "count"}
    call(step, 0, launches, **options)
    (prepared,) = call(step, 1, launches, **options)
    (made,) = step.cache.prepared.values()
    names = decode_prepared._scratch_names(made._launches)
    assert launches.names == ["decode_kernel"] and names == ("part_out", "part_lse", "counters")
    held = made._held.memory
    counters = held.view(torch.int32)[made._offsets[2] // 4 :]
    assert prepared[-4] == counters.data_ptr() and not counters[: made._counters].any() and made._counters == 6
    step._used.remove(1)
    (unprepared,) = call_unprepared(step, 1, launches, **options)
    assert prepared[1:5] == unprepared[1:5] and prepared[-1] == unprepared[-1] and len(prepared) == len(unprepared)
    assert [x - held.data_ptr() for x in prepared[7:9]] == made._offsets[:2]


def merged_steps(count: int, monkeypatch: pytest.MonkeyPatch, layers: int = 2) -> list[Any]:
    """Steps of one cache, whose sequences of 21 tokens have two splits each."""
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 16)
    monkeypatch.setattr(decode_call, "GROUP_TOKENS", 0)
    cache, steps = make_cache(pages=80, layers=layers), []
    for _ in range(count):
        ids = cache.allocate(3)
        cache.step(ids, 20)
        for sequence_id in ids:
            del cache.sequence(sequence_id).unfinished[0]
        steps.append(cache.step(ids, 1))
    return steps


def count_allocations(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that a prepared call allocates from now on."""
    allocated: list[torch.Tensor] = []
    empty = prepared._empty
    monkeypatch.setattr(prepared, "_empty", lambda *layout: allocated.append(empty(*layout)) or allocated[-1])
    return allocated


@pytest.mark.parametrize("with_lse", [False, True])
def test_lse_that_the_caller_does_not_use_is_stored_behind_the_partial_results(
    with_lse: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (step,), new = merged_steps(1, monkeypatch), tokens(3, 1)
    ls.attention(*new, cache=step, layer=0, kernel="triton")
    (prepared,) = step.cache.prepared.values()
    allocated = count_allocations(prepared, monkeypatch)
    launches.clear()
    result = ls.attention(*new, cache=step, layer=1, kernel="triton", return_lse=with_lse)
    parts = next(t for t in allocated if t.ndim == 1)
    part_out, part_lse, *_, lse_address = launches.values[1]
    splits, rows, dim = 2, 3 * 4, new[2].shape[-1]
    assert part_out == parts.data_ptr() and part_lse >= part_out + 4 * rows * splits * dim
    if with_lse:
        assert lse_address == result[1].data_ptr() and result[1].shape == (3, 4, 1)
    else:
        assert len(allocated) == 2 and part_lse + 4 * rows * splits <= lse_address <= part_out + 4 * (parts.numel() - rows)


class TestScratchMemory:
    """Memory of partial results, which calls on one stream share."""

    def test_later_calls_on_a_stream_allocate_their_results_alone(self, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
        steps = merged_steps(2, monkeypatch, layers=3)
        call(steps[0], 0, launches)
        (prepared,) = steps[0].cache.prepared.values()
        first = call(steps[0], 1, launches)
        allocated = count_allocations(prepared, monkeypatch)
        for step, layer in ((steps[0], 2), (steps[1], 0)):
            allocated.clear()
            values = call(step, layer, launches)
            assert [t.ndim for t in allocated] == [4] and values[1][-2] == allocated[0].data_ptr()
            assert values[1][:2] == first[1][:2] == values[0][7:9]

    def test_another_stream_has_its_own(self, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
        from longspan._kernels.gpu import prepared_launch

        (step,) = merged_steps(1, monkeypatch, layers=5)
        call(step, 0, launches)
        (prepared,) = step.cache.prepared.values()
        call(step, 1, launches)
        held, streams = prepared._held, []
        for layer, stream in ((2, 8), (3, 8), (4, 9)):
            monkeypatch.setattr(prepared_launch, "ordered_stream", lambda device, stream=stream: stream)
            assert call(step, layer, launches)[1][0] == prepared._held.memory.data_ptr()
            streams.append((prepared._held.stream, prepared._held.memory))
        assert [stream for stream, _ in streams] == [8, 8, 9] and streams[0][1] is streams[1][1]
        assert len({id(held.memory), *(id(memory) for _, memory in streams)}) == 3

    @pytest.mark.parametrize("why", ["captured", "large"])
    def test_memory_of_a_graph_and_large_memory_are_not_held(self, why: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
        (step,) = merged_steps(1, monkeypatch, layers=4)
        call(step, 0, launches)
        (prepared,) = step.cache.prepared.values()
        if why == "captured":
            call(step, 1, launches)
        held = prepared._held
        if why == "captured":
            monkeypatch.setattr(cached_prepared, "current_stream_is_captured", lambda: True)
            monkeypatch.setattr(decode_prepared, "hold_for_graph", lambda launch: None)
            step.ranges = dataclasses.replace(step.ranges, longest=64)
        else:
            monkeypatch.setattr(decode_prepared, "MAX_HELD_BYTES", 64)
        allocated = count_allocations(prepared, monkeypatch)
        for layer in (2, 3):
            allocated.clear()
            values = call(step, layer, launches)
            assert sorted(t.ndim for t in allocated) == [1, 4] and prepared._held is held
            assert values[1][0] in [t.data_ptr() for t in allocated]


def _read(cache: Any, step: Any, *, layer: int) -> tuple[int, ...]:
    """Addresses of a layer's pages, of the page table and of the step's ranges."""
    return *(x.data_ptr() for x in cache.layer_pages(layer).kv), cache.addresses[2], step.ranges.device_ranges.data_ptr()


def test_a_prepared_call_reads_its_own_new_tokens(launches: Launches) -> None:
    cache = make_cache(pages=40, layers=2)
    step, new = cache.step(cache.allocate(2), 1), [tokens(2, 1) for _ in range(2)]
    for layer, (q, k, v) in enumerate(new):
        launches.clear()
        ls.attention(q, k, v, cache=step, layer=layer, kernel="triton")
        values = launches.values[0]
        assert (values[0], *values[5:7]) == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert len(cache.prepared) == 1


def test_a_table_that_grew_is_read_at_its_new_address(launches: Launches) -> None:
    cache = make_cache(pages=40, layers=3)
    step = cache.step(cache.allocate(1), 1)
    call(step, 0, launches)
    cache.allocate(20)
    assert call(step, 1, launches)[0][3] == cache.addresses[2]


@pytest.mark.parametrize("options", [{"mask": torch.ones(64, dtype=torch.bool)}, {"score_mod": torch.zeros(64)}], ids=str)
def test_programs_that_read_tensors_are_not_prepared(options: dict[str, Any], launches: Launches) -> None:
    cache, ((name, table),) = make_cache(pages=40, layers=2), options.items()
    mod = ls.mask_mod(lambda b, h, q, kv: table[kv]) if name == "mask" else lambda s, b, h, q, kv: s + table[kv]
    call(cache.step(cache.allocate(1), 1), 0, launches, **{name: mod})
    assert not cache.prepared


def test_masks_made_for_a_length_are_checked_at_every_call(launches: Launches) -> None:
    cache = make_cache(pages=40, layers=1)
    ids = cache.allocate(1)
    mask = ls.causal() & ls.documents(lengths=[2])
    for _ in range(2):
        ls.attention(*tokens(1, 1), cache=cache.step(ids, 1), layer=0, kernel="triton", mask=mask)
    with pytest.raises(ValueError, match="was made for 2 tokens"):
        ls.attention(*tokens(1, 1), cache=cache.step(ids, 1), layer=0, kernel="triton", mask=mask)


def test_a_prepared_call_checks_its_layer_and_gradients(launches: Launches) -> None:
    cache = make_cache(pages=40, layers=2)
    step = cache.step(cache.allocate(1), 1)
    call(step, 0, launches)
    with pytest.raises(RuntimeError, match="layer 0 of this step was computed before"):
        call(step, 0, launches)
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        call(step, 2, launches)
    q, k, v = tokens(1, 1)
    with pytest.raises(RuntimeError, match="no gradients"):
        ls.attention(q.requires_grad_(), k, v, cache=step, layer=1, kernel="triton")


def half_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = tokens(2, 1)
    return q.half(), k.half(), v.half()


def repeated_step(launches: Launches) -> tuple[Any, ls.Mask]:
    """A step of five layers, of which the first two were computed: the call is prepared and is the step's last one."""
    cache, mask = make_cache(pages=40, layers=5, dtype=torch.float16), ls.causal()
    step = cache.step(cache.allocate(2), 1)
    for layer in range(2):
        ls.attention(*half_tokens(), cache=step, layer=layer, kernel="triton", mask=mask)
    assert step.last_call is not None
    return step, mask


def test_a_call_like_the_last_one_is_compared_and_needs_no_key(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    step, mask = repeated_step(launches)
    q, k, v = half_tokens()
    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend_cached", None)
        launches.clear()
        ls.attention(q, k, v, cache=step, layer=2, kernel="triton", mask=mask)
        same = launches.values[0]
    launches.clear()
    step.last_call = None
    ls.attention(q, k, v, cache=step, layer=3, kernel="triton", mask=mask)
    assert same[0] == q.data_ptr() and same[5:7] == (k.data_ptr(), v.data_ptr()) and len(same) == len(launches.values[0])
    assert same[1:3] == tuple(x.data_ptr() for x in step.cache.layer_pages(2).kv)


@pytest.mark.parametrize(
    "change",
    [
        {"mask": None},
        {"mask": ls.causal()},
        {"scale": 0.5},
        {"score_mod": lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0)},
        {"sink": torch.zeros(4)},
        {"kernel": "auto"},
        {"q": lambda q: q.float()},
        {"q": lambda q: q.transpose(1, 3).contiguous().transpose(1, 3)},
        {"q": lambda q: torch.zeros(q.numel() + 1).half()[1:].view(q.shape)},
        {"q": lambda q: q.requires_grad_()},
        {"layer": 5},
        {"layer": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_call_than_the_last_one_is_not_taken_for_it(change: dict[str, Any], launches: Launches) -> None:
    step, mask = repeated_step(launches)
    q, k, v = half_tokens()
    q = change.get("q", lambda q: q)(q)
    options: dict[str, Any] = {"mask": mask, "kernel": "triton", "layer": 2} | {n: x for n, x in change.items() if n != "q"}
    assert cached_prepared.attend_same(q, k, v, CachedCall(step=step, **options)) is None
    with torch.inference_mode():
        assert cached_prepared.attend_same(*half_tokens(), CachedCall(step=step, layer=2, mask=mask, kernel="triton")) is None
    step.cache.allocate(30)  # the page table moves
    assert cached_prepared.attend_same(*half_tokens(), CachedCall(step=step, layer=2, mask=mask, kernel="triton")) is None


class Intercepting(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_vmap(run: Any) -> Any:
    results = []
    torch.vmap(lambda x: (results.append(run()), x)[1])(torch.ones(2))
    return results[0]


def under_grad(run: Any) -> Any:
    results = []
    torch.func.grad(lambda x: (results.append(run()), x.sum())[1])(torch.ones(2))
    return results[0]


def inside(context: Any) -> Any:
    def entered(run: Any) -> Any:
        with context():
            return run()

    return entered


@pytest.mark.parametrize(
    "way",
    [
        inside(Intercepting), inside(Dispatching), inside(FakeTensorMode), inside(torch.autograd.forward_ad.dual_level),
        inside(ls.invariant), under_vmap, under_grad, inside(lambda: torch.autocast("cpu")),
    ],
    ids=["function mode", "dispatch mode", "torch's dispatch mode", "forward mode", "invariant", "vmap", "grad", "autocast"],
)  # fmt: skip
def test_a_call_that_something_intercepts_is_not_taken_for_the_last_one(way: Any, launches: Launches) -> None:
    step, mask = repeated_step(launches)
    new, arguments = half_tokens(), CachedCall(step=step, layer=2, mask=mask, kernel="triton")
    assert way(lambda: cached_prepared.attend_same(*new, arguments)) is None
    assert cached_prepared.attend_same(*new, arguments) is not None


@pytest.mark.parametrize("kind", ["half", "float32", "needs gradient", "score_mod", "sink", "mask_mod"])
def test_only_a_call_that_a_comparison_can_tell_from_others_is_the_last_one(kind: str, launches: Launches) -> None:
    dtype = torch.float32 if kind == "float32" else torch.float16
    step = (cache := make_cache(pages=40, layers=5, dtype=dtype)).step(cache.allocate(2), 1)
    q, k, v = (t.to(dtype) for t in tokens(2, 1))
    options: dict[str, Any] = {
        "score_mod": {"score_mod": lambda s, b, h, q, kv: s}, "sink": {"sink": torch.zeros(4)},
        "mask_mod": {"mask": lambda b, h, q, kv: q >= kv},
    }.get(kind, {})  # fmt: skip
    for tensor in (q, k, v):
        tensor.requires_grad_(kind == "needs gradient")
        cached_prepared._remember(q, k, v, CachedCall(step=step, layer=0, kernel="triton", **options), "prepared")
        assert (step.last_call is not None) == (kind == "half")
        tensor.requires_grad_(False)


class TestGraphSteps:
    def test_advance_writes_into_the_same_tensors(self) -> None:
        cache = make_cache(layers=1)
        ids = cache.allocate(2)
        step = cache.step(ids, 1, longest=20)
        addresses = [getattr(step.ranges, n).data_ptr() for n in ("device_ranges", "positions", "token_rows")]
        for length in (1, 2, 9):
            if length == 1:
                ls.attention(*tokens(2, 1), cache=step, layer=0)
            assert step.positions.tolist() == [[length - 1]] * 2 and step.ranges.device_ranges[2].tolist() == [length] * 2
            assert [getattr(step.ranges, n).data_ptr() for n in ("device_ranges", "positions", "token_rows")] == addresses
            for _ in range(6 if length == 2 else 0):
                step.advance()
            step.advance()
        assert cache.lengths(ids).tolist() == [10, 10]
        cache.truncate(ids, 3)  # replays have finished the steps

    @pytest.mark.parametrize("move", [lambda cache: cache.grow(2), lambda cache: cache.allocate(20)], ids=["pages", "table"])
    def test_memory_that_moved_before_the_first_advance_raises(self, move: Any) -> None:
        cache = make_cache(layers=1)
        ids = cache.allocate(1)
        step = cache.step(ids, 1, longest=20)
        ls.attention(*tokens(1, 1), cache=step, layer=0)
        move(cache)
        with pytest.raises(RuntimeError, match="capture the graph again"):
            step.advance()
        assert cache.lengths(ids).tolist() == [1]

    def test_another_unfinished_step_raises(self) -> None:
        cache = make_cache(layers=1)
        ids = cache.allocate(1)
        step = cache.step(ids, 1, longest=20)
        ls.attention(*tokens(1, 1), cache=step, layer=0)
        other = cache.step(ids, 1)
        with pytest.raises(ValueError, match="no other unfinished step"):
            step.advance()
        ls.attention(*tokens(1, 1), cache=other, layer=0)
        step.advance()

    def test_a_mask_must_serve_the_longest_sequence(self) -> None:
        cache = make_cache(layers=1)
        step = cache.step(cache.allocate(1), 1, longest=20)
        with pytest.raises(ValueError, match="was made for 10 tokens, got a sequence of 20"):
            ls.attention(*tokens(1, 1), cache=step, layer=0, mask=ls.causal() & ls.documents(lengths=[4, 6]))

    def test_steps_that_cannot_advance_raise(self) -> None:
        cache = make_cache(pages=3, layers=1)
        ids = cache.allocate(1)
        plain = cache.step(ids, 1)
        ls.attention(*tokens(1, 1), cache=plain, layer=0)
        with pytest.raises(RuntimeError, match="longest"):
            plain.advance()
        step = cache.step(ids, 1, longest=3)
        with pytest.raises(RuntimeError, match="expected all 1 layers"):
            step.advance()
        ls.attention(*tokens(1, 1), cache=step, layer=0)
        step.advance()
        with pytest.raises(ValueError, match="at most longest=3 tokens, got 4"):
            step.advance()
        assert cache.lengths(ids).tolist() == [3] and cache.free_pages == 2
        cache.grow(2)
        cache.truncate(ids, 2)
        with pytest.raises(RuntimeError, match="capture the graph again"):
            step.advance()
        assert cache.lengths(ids).tolist() == [2]
