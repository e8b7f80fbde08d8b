"""Prepared decode calls over contiguous KV, with recorded launches: their launches are those of a call that is not prepared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.stub_launches import Launches, record_launches

import longspan as ls
from longspan._kernels.gpu import prepared_launch
from longspan._kernels.gpu.compilation import collecting_jobs
from longspan._kernels.gpu.prepared_launch import PreparedLaunch
from longspan._kernels.paged import PagedWork
from longspan._kernels.triton import decode_call, decode_launch, decode_prepared
from longspan._kernels.triton.decode_prepared import DecodeForward
from longspan._masks.trace_cache import traces

SEEN, SLOPES = torch.ones(64, dtype=torch.bool), torch.ones(4)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 16)
    monkeypatch.setattr(decode_call, "GROUP_TOKENS", 0)
    return record_launches(monkeypatch)


def qkv(keys: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, 1, 32).half(), torch.randn(2, 2, keys, 32).half(), torch.randn(2, 2, keys, 32).half()


def work_of(kind: str) -> PagedWork:
    work = PagedWork(scale=0.3)
    if "mask" in kind:
        seen = SEEN[:40] if kind == "mask" else SEEN[::2]  # the second is copied to be contiguous
        mask = ls.mask_mod(lambda b, h, q, kv: seen[kv % 20]).traced
        work = replace(work, mask=mask.program, mask_captured=mask.captured())
    if "score" in kind:
        score = traces.trace(lambda s, b, h, q, kv: s * SLOPES[h], "score", score_dtype=torch.float32)
        work = replace(work, score=score.program, score_captured=score.captured())
    return work


def repeated(work: PagedWork, keys: int = 40) -> DecodeForward:
    """A prepared call after its first call, which launches as a call that is not prepared."""
    q, k, v = qkv(keys)
    decode_call.attend_contiguous(q, k, v, work)
    made = DecodeForward(q, k, v, work)
    made(q, k, v, work.score_captured)
    assert made._launch is not None
    return made


@pytest.mark.parametrize("keys", [16, 40])
@pytest.mark.parametrize("kind", ["plain", "mask", "strided mask", "score", "mask and score"])
def test_a_prepared_call_launches_the_same(kind: str, keys: int, launches: Launches) -> None:
    work, (q, k, v) = work_of(kind), qkv(keys)
    made = repeated(work, keys)
    launches.clear()
    expected = made._run(q, k, v, work.score_captured)
    unprepared = list(launches.values)
    launches.clear()
    out, lse = made(q, k, v, work.score_captured)
    assert [x.stride() for x in (out, lse)] == [x.stride() for x in expected] and out.dtype == q.dtype and lse.dtype == torch.float32
    merged = keys > 16
    assert launches.names == ["decode_kernel", "merge_kernel"][: 1 + merged]
    results = out.data_ptr(), lse.data_ptr()
    decode, before = launches.values[0], unprepared[0]
    assert decode[:3] == before[:3] == (q.data_ptr(), k.data_ptr(), v.data_ptr()) and decode[5:] == before[5:] and decode[-1] == 0.3
    if merged:
        assert launches.values[1] == (*decode[3:5], *results) and len(unprepared[1]) == 4
    else:
        assert decode[3:5] == results


@pytest.mark.parametrize("kind", ["plain", "mask", "score"])
def test_a_prepared_call_that_merges_its_tiles_launches_the_same(kind: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_call, "sm_count", lambda device: 132)
    work, (q, k, v) = work_of(kind), qkv(60)
    made = repeated(work, 60)
    launches.clear()
    made._run(q, k, v, work.score_captured)
    (unprepared,) = launches.values
    launches.clear()
    out, lse = made(q, k, v, work.score_captured)
    assert launches.names == ["decode_kernel"]
    (values,) = launches.values
    assert values[:3] == (q.data_ptr(), k.data_ptr(), v.data_ptr()) and values[5:7] == (out.data_ptr(), lse.data_ptr())
    assert values[8:] == unprepared[8:] and made._held is not None
    counters = made._held.memory.view(torch.int32)[made._offsets[2] // 4 :]
    assert values[7] == counters.data_ptr() and not counters[: made._counters].any() and made._counters == 4
    assert made._offsets[2] + 4 * made._counters <= made._lse_offset <= 4 * made._floats - 4 * lse.numel()


def test_tensors_of_a_score_mod_are_those_of_the_call(launches: Launches) -> None:
    made, (q, k, v), other = repeated(work_of("score")), qkv(), torch.zeros(4)
    launches.clear()
    made(q, k, v, [other])
    assert other.data_ptr() in launches.values[0] and SLOPES.data_ptr() not in launches.values[0]


def test_a_call_allocates_its_results_alone(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    made, (q, k, v), allocated = repeated(work_of("plain")), qkv(), []
    made(q, k, v, ())
    empty = made._empty
    monkeypatch.setattr(made, "_empty", lambda *layout: allocated.append(empty(*layout)) or allocated[-1])
    for _ in range(2):
        results = made(q, k, v, ())
        assert [id(t) for t in allocated] == [id(t) for t in results]
        allocated.clear()
    monkeypatch.setattr(prepared_launch, "ordered_stream", lambda device: 9)
    made(q, k, v, ())
    assert len(allocated) == 3 and made._held is not None and made._held.stream == 9


def test_a_profilers_hook_or_another_device_takes_the_way_of_other_calls(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    made, (q, k, v), by_triton = repeated(work_of("plain")), qkv(), []
    with monkeypatch.context() as patch:
        patch.setattr(prepared_launch, "hooks_are_set", lambda: True)
        patch.setattr(PreparedLaunch, "_launch_by_triton", lambda self, values: by_triton.append(values))
        launches.clear()
        made(q, k, v, ())
    assert len(by_triton) == 2 and not launches.names
    assert by_triton[0][:3] == [t.data_ptr() for t in (q, k, v)]
    devices = iter([1, 1, None, 1, None])  # the other device until the launch makes its own current
    monkeypatch.setattr(prepared_launch, "current_cuda_device", lambda: next(devices))
    made(q, k, v, ())
    assert launches.names == ["decode_kernel", "merge_kernel"]


def test_nothing_is_launched_where_kernels_are_only_compiled(launches: Launches) -> None:
    made, (q, k, v) = repeated(work_of("plain")), qkv()
    launches.clear()
    with collecting_jobs():
        made(q, k, v, ())
    assert not launches.names


def test_a_call_whose_kernels_are_not_compiled_compiles_them(launches: Launches) -> None:
    work, (q, k, v) = work_of("plain"), qkv(keys=56)
    decode_call._launches.cache_clear()
    decode_launch._prepared.cache_clear()
    made = DecodeForward(q, k, v, work)
    assert made._launch is None
    for _ in range(2):
        launches.clear()
        made(q, k, v, ())
        assert launches.names == ["decode_kernel", "merge_kernel"] and made._launch is not None


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_small_scratch_memory_is_held(limit: int, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_prepared, "MAX_HELD_BYTES", limit)
    made, (q, k, v) = repeated(work_of("plain")), qkv()
    made(q, k, v, ())
    assert (made._held is not None) == bool(limit)
