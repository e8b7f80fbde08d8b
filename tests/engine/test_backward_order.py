"""The backward pass splits the local KV: one part overlaps with the first transfer, the other with the last return of gradients."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sharded import Problem, check_budget, mask_named
from torch import Tensor

import longspan as ls
from longspan._engine.local_schedule import LocalSchedule
from longspan._engine.schedule_builder import ScheduleOptions, local_schedule
from longspan._kernels.cpu import CpuKernel
from longspan._kernels.protocol import Work
from longspan._plan.layout import Layout
from longspan._plan.local_split import late_share, late_tiles
from longspan.testing import virtual_world
from longspan.testing.virtual import VirtualWorld

HALF = (2, 4)  # bytes of an element of KV and of its gradient, in half precision


@dataclass
class Log:
    """Events of each rank in backward.

    Attributes:
        events: In order: the exchange of a stage's KV starts ("fetch") and ends ("got"), the return of its gradients starts ("home") and
            ends ("back"), a kernel runs ("compute").
        positions: Positions of the KV of each kernel call.
        returns: Receive buffers of returned gradients.
        alive: Number of these buffers that were alive at each kernel call.
    """

    events: dict[int, list[str]]
    positions: dict[int, list[list[int]]]
    returns: dict[int, list[weakref.ref[Tensor]]]
    alive: dict[int, list[int]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    recorded = Log(events=defaultdict(list), positions=defaultdict(list), returns=defaultdict(list), alive=defaultdict(list))
    group, backward = VirtualWorld.group, CpuKernel.backward

    class RecordingGroup:
        def __init__(self, inner: Any, rank: int) -> None:
            self.inner, self.at = inner, rank

        def __getattr__(self, name: str) -> Any:
            return self._recording(getattr(self.inner, name)) if name.startswith("all_to_all") else getattr(self.inner, name)

        def _recording(self, call: Callable[..., Any]) -> Callable[..., Any]:
            def begin(out: Tensor, *rest: Any, what: str) -> Any:
                is_return = "return of gradients" in what
                if not is_return and "backward" not in what:
                    return call(out, *rest, what=what)
                start, end = ("home", "back") if is_return else ("fetch", "got")
                stage, rank = what.split()[1], self.at
                recorded.events[rank].append(f"{start} {stage}")
                if is_return:
                    recorded.returns[rank].append(weakref.ref(out if out._base is None else out._base))
                received = torch.empty_like(out)  # threads of other ranks hold references to exchanged tensors for a while
                wait = call(received, *rest, what=what).wait
                return SimpleNamespace(wait=lambda: (wait(), out.copy_(received), recorded.events[rank].append(f"{end} {stage}")))

            return begin

    def recording_backward(self: Any, tensors: Any, work: Work, **options: Any) -> Any:
        rank = int(threading.current_thread().name.split()[-1])
        recorded.events[rank].append("compute")
        recorded.positions[rank].append(work.kv_tiles.positions(torch.device("cpu")).tolist())
        recorded.alive[rank].append(sum(r() is not None for r in recorded.returns[rank]))
        return backward(self, tensors, work, **options)

    def recording_group(self: VirtualWorld, name: str, rank: int) -> RecordingGroup:
        return RecordingGroup(group(self, name, rank), self._members[name][rank])

    monkeypatch.setattr(VirtualWorld, "group", recording_group)
    monkeypatch.setattr(CpuKernel, "backward", recording_backward)
    return recorded


def parts(plan: ls.Plan, ranks: int, split_bytes: tuple[int, int] = (8, 8)) -> list[LocalSchedule]:
    return [
        local_schedule(plan.on(ls.Mesh.abstract(ranks, rank=r)).data, ScheduleOptions(block=(128, 128), split_bytes=split_bytes))
        for r in range(ranks)
    ]


def local(plan: ls.Plan, rank: int, ranks: int) -> list[int]:
    return plan.on(ls.Mesh.abstract(ranks, rank=rank)).positions.tolist()


@pytest.mark.parametrize("stages", [1, 3])
def test_local_kv_is_computed_first_and_last_and_overlaps_with_transfers(log: Log, stages: int) -> None:
    problem = Problem(mask=ls.full(), score="none", q_len=1664, kv_len=1664, batch=1, heads=2, kv_heads=1, dim=4, value_dim=3, sink=False)
    got = problem.over(3, strategy="exchange", stages=stages, layout="head_tail", overlap=True)
    right = problem.by_oracle()
    for name in right.values:
        assert got.error(right, name) < 1e-11, name
    for rank in range(3):
        computed, local_positions = log.positions[rank], local(got.extra, rank, 3)
        assert len(computed) == stages + 2
        assert computed[-1] + computed[0] == local_positions and computed[0] and computed[-1]
        assert sorted(chain(*computed)) == list(range(1664))
        once = ["fetch 1", "compute", "got 1", "compute", "home 1", "compute", "back 1"]
        thrice = ["fetch 1", "compute", "got 1", "fetch 2", "compute", "home 1", "got 2", "fetch 3", "compute", "back 1", "home 2", "got 3"]
        thrice += ["compute", "back 2", "home 3", "compute", "back 3"]
        assert log.events[rank] == (once if stages == 1 else thrice)


def test_at_most_two_returned_buffers_are_alive_for_any_number_of_stages(log: Log) -> None:
    """The last two buffers are added together at the end, earlier ones on arrival."""
    problem = Problem(mask=ls.full(), score="none", q_len=2048, kv_len=2048, batch=1, heads=2, kv_heads=1, dim=4, value_dim=3, sink=False)
    problem.over(4, strategy="exchange", stages=6, layout="contiguous", overlap=True)
    for rank in range(4):
        assert len(log.returns[rank]) == 6 and log.alive[rank] == [0, 0, 1, 1, 1, 1, 1, 2]
        assert len(log.positions[rank]) == 8


def test_a_rank_that_sends_more_than_it_receives_holds_one_returned_buffer() -> None:
    plan = ls.plan(ls.causal(), 2048, ls.Mesh.abstract(4), strategy="exchange", stages=6, layout="contiguous", overlap=True)
    first, *_, last = parts(plan, 4)
    assert sum(step.sent_rows for step in first.steps) == 3 * 512 and not any(step.received_rows for step in first.steps)
    assert len(first.final_returns) == 1 and first.final_returns[0] is [step for step in first.steps if step.exchanges][-1]
    assert len(last.final_returns) == 2 and not any(step.sent_rows for step in last.steps)


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "per head"])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail", "round_robin"])
def test_local_kv_is_split_in_proportion_to_overlapped_transfers(mask: str, layout: str) -> None:
    sizes: dict[str, Any] = {"heads": 4, "batch": 2, "strategy": "exchange", "stages": 2, "overlap": True}
    plan = ls.plan(mask_named(mask, 12000, layout), 12000, ls.Mesh.abstract(4), layout=layout, **sizes)
    for rank in range(4):
        mine = plan.on(ls.Mesh.abstract(4, rank=rank))
        whole, halves = (local_schedule(mine.data, ScheduleOptions(block=(128, 128), split_bytes=split)) for split in (None, HALF))
        largest = max(step.received_rows for step in whole.steps[1:]) // 128
        if halves is whole:
            assert all(step.empty for step in whole.steps[1:]) or not whole.steps[-1].transfer_rows or not largest
            continue
        first, last = halves.steps[0], halves.steps[-1]
        assert halves.steps[1:-1] == whole.steps[1:] and not first.exchanges and not last.exchanges
        assert last.local == range(last.buffer_rows) and first.local == range(last.buffer_rows, whole.steps[0].buffer_rows)
        done = [sum(step.tiles[0].table.counts()[1:]) for step in (first, last)]
        assert min(done) > 0 and sum(done) == sum(whole.steps[0].tiles[0].table.counts()[1:])
        largest_tile = int(
            max(step.tiles[0].table.transposed.tiles_per_row.view(-1, step.tiles[0].kv_tiles.tiles).sum(0).max() for step in (first, last))
        )
        share = late_share(2 * whole.steps[1].transfer_rows, 4 * whole.steps[-1].transfer_rows)
        # The split is within one tile's work, or has as many tiles as a step receives: no buffer is larger.
        tiles = last.tiles[0].kv_tiles.tiles
        assert tiles <= largest
        assert abs(done[1] - share * sum(done)) <= largest_tile or (tiles == largest and done[1] < share * sum(done))


def test_the_split_is_at_the_nearest_tile_and_leaves_no_part_empty() -> None:
    for work, share, tiles in (
        ([3, 3, 3], 0.6, 2),
        ([9, 1, 1], 0.1, 1),
        ([0, 5, 0, 2], 0.9, 2),
        ([0, 4, 0], 0.5, 0),
        ([7], 0.5, 0),
        ([], 0.5, 0),
    ):
        assert late_tiles(torch.tensor(work, dtype=torch.int64), share) == tiles
    assert late_tiles(torch.tensor([4, 4]), 0.0) == 0
    assert [late_tiles(torch.tensor([2, 2, 2, 2]), 0.7, limit) for limit in (0, 1, 2, 3, 9, None)] == [0, 1, 2, 3, 3, 3]
    assert late_share(2.0, 4.0) == pytest.approx(2 / 3) and late_share(0.0, 4.0) == late_share(3.0, 0.0) == 0


def owned(shares: Sequence[int], length: int, segment: int) -> Layout:
    """A layout whose segments are dealt to ranks in proportion to `shares`; a rank of share 0 owns nothing."""
    ranks: list[list[tuple[int, int]]] = [[] for _ in shares]
    order = [rank for rank, share in enumerate(shares) for _ in range(share)]
    for i, start in enumerate(range(0, length, segment)):
        ranks[order[i % len(order)]].append((start, min(segment, length - start)))
    return Layout(length=length, rows=(tuple(tuple(r) for r in ranks),))


@settings(max_examples=12)
@example("causal", "relative bias", (5, 1, 0), 60, 11, "exchange", 3, (4, 2))  # ranks with several tiles, one tile and none
@example("custom", "none", (0, 1), 37, 40, "ring", None, (3, 1))  # ranks with one tile and none
@example("documents", "softcap", (1, 1, 1), 61, 7, "allgather", None, (5, 5))
@given(
    st.sampled_from(["causal", "documents", "window", "prefix", "custom", "per head"]),
    st.sampled_from(["none", "relative bias", "softcap"]),
    st.sampled_from([(1, 1), (3, 1), (0, 2, 1), (5, 1, 0), (1, 1, 1), (2, 0, 0, 1), (1, 2, 1, 2)]),
    st.integers(2, 150),
    st.integers(1, 40),
    st.sampled_from(["exchange", "ring", "allgather"]),
    st.sampled_from([None, 2, 3]),
    st.sampled_from([(3, 1), (4, 2), (5, 5)]),
)
def test_results_equal_the_oracle_for_any_layout(
    mask: str, score: str, shares: tuple[int, ...], length: int, segment: int, strategy: str, stages: int | None, heads: tuple[int, int]
) -> None:
    problem = Problem(
        mask=mask_named(mask, length, ""), score=score, q_len=length, kv_len=length, batch=2, heads=heads[0], kv_heads=heads[1]
    )
    layout = owned(shares, length, segment)
    stages = stages if strategy == "exchange" else None
    right, got = problem.by_oracle(), problem.over(len(shares), strategy=strategy, layout=layout, stages=stages, overlap=True)
    for name in right.values:
        assert got.error(right, name) < 1e-10, name


@pytest.mark.parametrize("kernel", ["cpu", "flash"])
@pytest.mark.parametrize("stages", [1, 2])
def test_named_kernels_compute_local_kv_in_two_parts(kernel: str, stages: int) -> None:
    sizes: dict[str, Any] = {"dim": 16, "value_dim": 16, "sink": kernel != "flash", "dtype": torch.float32}
    problem = Problem(mask=ls.causal(), score="none", q_len=1152, kv_len=1152, batch=1, heads=2, kv_heads=1, **sizes)
    right = problem.by_oracle()
    got = problem.over(3, kernel=kernel, strategy="exchange", stages=stages, layout="head_tail", overlap=True)
    assert sum(len(schedule.steps) == stages + 2 for schedule in parts(got.extra, 3)) == 3
    for name in right.values:
        assert got.error(right, name) < 3e-5, name


def test_the_interpreted_triton_kernel_computes_local_kv_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.interpreter import run_triton_in_one_thread

    run_triton_in_one_thread(monkeypatch)
    problem = Problem(mask=ls.causal(), score="none", q_len=512, kv_len=512, batch=1, heads=1, kv_heads=1, dtype=torch.float32)
    right, got = problem.by_oracle(), problem.over(2, kernel="triton", strategy="exchange", stages=2, layout="head_tail", overlap=True)
    assert all(len(schedule.steps) == 4 for schedule in parts(got.extra, 2))
    for name in right.values:
        assert got.error(right, name) < 2e-4, name


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "auto"])
@pytest.mark.parametrize(("stages", "score"), [(1, "none"), (3, "none"), (3, "relative bias")])
def test_split_local_kv_on_a_gpu_equals_the_oracle(kernel: str, stages: int, score: str) -> None:
    sizes: dict[str, Any] = {"dim": 128, "value_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    problem = Problem(mask=ls.causal(), score=score, q_len=3001, kv_len=3001, batch=2, heads=8, kv_heads=2, **sizes)
    check_budget(problem, problem.over(4, kernel=kernel, strategy="exchange", stages=stages, layout="head_tail", overlap=True))


@pytest.mark.parametrize(("shape", "kv_heads"), [((2, 2), 1), ((2, 3), 6)])
def test_split_local_kv_composes_with_ulysses_and_narrow_gradients(shape: tuple[int, int], kv_heads: int) -> None:
    problem = Problem(
        mask=mask_named("per head", 811, ""), score="relative bias", q_len=811, kv_len=811, batch=2, heads=6, kv_heads=kv_heads
    )
    options: dict[str, Any] = {"axis_names": ("ring", "ulysses"), "strategy": "ulysses_exchange", "layout": "head_tail", "stages": 2}
    right, got = problem.by_oracle(), problem.over(shape, overlap=True, **options)
    narrow = problem.over(shape, overlap=True, grad_reduce_dtype=torch.float32, **options)
    for name in right.values:
        assert got.error(right, name) < 1e-11, name
        assert narrow.error(right, name) < (1e-5 if name in ("dk", "dv") else 1e-11), name


def test_split_local_kv_gives_the_same_bits_every_time() -> None:
    problem = Problem(mask=ls.causal(), score="none", q_len=1301, kv_len=1301, batch=2, heads=4, kv_heads=2, dtype=torch.float32)
    first, second = (problem.over(3, strategy="exchange", stages=3, layout="head_tail", overlap=True) for _ in range(2))
    assert all(len(schedule.steps) == 5 for schedule in parts(first.extra, 3, (4, 4)))
    for name in first.values:
        assert torch.equal(first.values[name], second.values[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_sums_of_shared_heads_are_sent_in_grad_reduce_dtype(dtype: torch.dtype) -> None:
    sent = {}
    for grad_dtype in (None, torch.bfloat16):
        problem = Problem(mask=ls.causal(), score="none", q_len=300, kv_len=300, batch=1, heads=4, kv_heads=1, dtype=dtype)
        world = virtual_world(2)
        world.run(
            lambda mesh, p=problem, t=grad_dtype: p.on_rank(p.plan(mesh, strategy="ulysses", layout="contiguous", grad_reduce_dtype=t))
        )
        sent[grad_dtype] = sum(int(e.bytes.sum()) for e in world.exchanges if e.what.startswith("Ulysses transpose of the gradients"))
    assert sent[None] == 2 * sent[torch.bfloat16] > 0
