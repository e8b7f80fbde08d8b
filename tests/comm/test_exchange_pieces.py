"""Exchanges of pieces: overlapping views, in virtual worlds, and over NCCL without packing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.exchanges import exchange_of_pieces, rows_between
from torch import Tensor

import longspan as ls
from longspan._comm.group import Alone
from longspan._comm.mesh import Mesh
from longspan._comm.process_group import C10dGroup
from longspan._engine.schedule_builder import ScheduleOptions, local_schedule
from longspan.testing import virtual_world


class FakeGroup:
    """The parts of a ProcessGroup that describe it."""

    group_name = "fake"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


@pytest.mark.parametrize("n", range(1, 10))
def test_pieces_that_overlap_arrive_at_every_number_of_ranks(n: int) -> None:
    assert all(virtual_world(n).run(lambda mesh: exchange_of_pieces(mesh.group(0))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.bool, torch.float8_e4m3fn], ids=str)
def test_ranks_of_one_exchange_may_send_in_different_forms(dtype: torch.dtype) -> None:
    world = virtual_world(5)
    assert all(world.run(lambda mesh: exchange_of_pieces(mesh.group(0), dtype=dtype, gathered=mesh.rank % 2 == 0)))


def test_a_group_of_one_rank_copies_its_piece() -> None:
    assert exchange_of_pieces(Mesh.abstract(1).group(0))


def test_bytes_of_overlapping_pieces_count_once_per_receiver() -> None:
    n, width = 4, 6
    world = virtual_world(n)
    world.run(lambda mesh: exchange_of_pieces(mesh.group(0), width=width, dtype=torch.float16))
    matrix = torch.tensor([[rows_between(i, j) * width * 2 * (i != j) for j in range(n)] for i in range(n)])
    (record,) = world.exchanges
    assert torch.equal(record.bytes, matrix)
    assert (world.sent, world.received) == (matrix.sum(1).tolist(), matrix.sum(0).tolist())


@pytest.mark.parametrize(
    "out, pieces, out_splits, message",
    [
        (torch.empty(2, 3), [torch.empty(1, 3)], [1, 1], r"one piece per rank, 2 \(.*\), got 1"),
        (torch.empty(2, 3), [torch.empty(1, 3), torch.empty(3, 2).T], [1, 1], r"`pieces\[1\]` to be contiguous rows"),
        (torch.empty(2, 3), [torch.empty(1, 3), torch.empty(())], [1, 1], r"`pieces\[1\]` to be contiguous rows"),
        (torch.empty(2, 3), [torch.empty(1, 3), torch.empty(2, 3, dtype=torch.float64)], [1, 1], "one shape, dtype and device"),
        (torch.empty(2, 3), [torch.empty(1, 3), torch.empty(2, 4)], [1, 1], r"one shape, dtype and device, got out \[3\] .* \[4\]"),
        (torch.empty(2, 3), [torch.empty(2, 3), torch.empty(1, 3)], [1, 1], "got 2 rows sent and 1 received"),
        (torch.empty(2, 3), [torch.empty(1, 3), torch.empty(1, 3)], [1, 2], "add up to the 2 rows of `out`"),
    ],
)
def test_inconsistent_arguments_of_one_rank_raise(out: Tensor, pieces: list[Tensor], out_splits: list[int], message: str) -> None:
    group = C10dGroup(name="cp", group=FakeGroup(0, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^stage 1: rank 0 of 2 on axis 'cp'.*{message}"):
        group.all_to_all_pieces(out, pieces, out_splits, what="stage 1")


def test_a_group_of_one_rank_copies_what_it_sends() -> None:
    sent, alone = torch.arange(6.0).view(2, 3), Alone(name="cp")
    for exchange in (
        lambda out: alone.all_to_all(out, sent, [2], [2], what="stage 1"),
        lambda out: alone.all_to_all_pieces(out, [sent], [2], what="stage 1"),
    ):
        out = torch.zeros(2, 3)
        exchange(out).wait()
        assert torch.equal(out, torch.arange(6.0).view(2, 3))


def test_different_counts_of_sender_and_receiver_raise_on_both() -> None:
    def fn(mesh: Mesh) -> None:
        pieces = [torch.zeros(rows, 3) for rows in ([1, 2], [4, 1])[mesh.rank]]
        out_splits = ([1, 3], [2, 1])[mesh.rank]
        mesh.group(0).all_to_all_pieces(torch.empty(sum(out_splits), 3), pieces, out_splits, what="stage 2").wait()

    with pytest.raises(RuntimeError, match=r"stage 2: .*rank 1 sends 4 rows to rank 0, which expects 3"):
        virtual_world(2).run(fn)


class OnGpu(torch.Tensor):
    """A CPU tensor that reports CUDA as its device."""

    is_cuda = True


class Calls:
    """Replacements of torch's two all-to-alls that record their arguments instead of sending."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: str | Exception) -> None:
        self.lists: list[tuple[list[Tensor], list[Tensor]]] = []
        self.singles: list[tuple[Any, ...]] = []
        self.error: RuntimeError | None = None
        process_group: Any = FakeGroup(1, 3)
        process_group.alltoall = lambda into, leaving, options: self._recorded(self.lists)(
            into, leaving, group=process_group, async_op=options.asyncOp
        )
        self.group = C10dGroup(name="cp", group=process_group)
        monkeypatch.setattr(dist, "get_backend_config", lambda group: self._backend_config(config))
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6])
        monkeypatch.setattr(dist, "all_to_all_single", self._recorded(self.singles))

    @staticmethod
    def _backend_config(config: str | Exception) -> str:
        if isinstance(config, Exception):
            raise config
        return config

    def _recorded(self, into: list[Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any, async_op: bool) -> Any:
            assert group is self.group.group and async_op
            into.append(args)
            if self.error is not None:
                raise self.error
            return SimpleNamespace(wait=lambda: None)

        return call


def rows_on(kind: type[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out [5, 2], sent [7, 2], overlapping pieces of sent) of rank 1 of 3, which receives 0, 2 and 3 rows and sends 4, 2 and 0."""
    sent = torch.arange(14.0).reshape(7, 2).as_subclass(kind)
    return torch.zeros(5, 2).as_subclass(kind), sent, [sent[1:5], sent[3:5], sent[:0]]


@pytest.mark.parametrize("config", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_over_nccl_both_forms_are_sent_as_views(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    calls = Calls(monkeypatch, config)
    out, sent, pieces = rows_on(OnGpu)
    calls.group.all_to_all_pieces(out, pieces, [0, 2, 3], what="stage 1").wait()
    calls.group.all_to_all(out, sent[:6], [0, 2, 3], [4, 2, 0], what="stage 2").wait()
    half, halves = out.bfloat16(), [piece.bfloat16() for piece in pieces]
    calls.group.all_to_all_pieces(half, halves, [0, 2, 3], what="stage 3").wait()
    narrow, narrows = out.to(torch.int16), [piece.to(torch.int16) for piece in pieces]
    calls.group.all_to_all_pieces(narrow, narrows, [0, 2, 3], what="stage 4").wait()
    assert not calls.singles
    for (into, leaving), rows in zip(calls.lists, (out, out, half, narrow), strict=True):
        assert [len(part) for part in into] == [0, 2, 3] and [len(part) for part in leaving] == [4, 2, 0]
        assert [part.data_ptr() for part in into[1:]] == [rows.data_ptr(), rows[2:].data_ptr()]
    starts = [[part.data_ptr() for part in leaving[:2]] for _, leaving in calls.lists]
    assert starts[:2] == [[p.data_ptr() for p in pieces[:2]], [sent.data_ptr(), sent[4:].data_ptr()]]
    assert starts[2:] == [[p.data_ptr() for p in halves[:2]], [p.data_ptr() for p in narrows[:2]]]
    dtypes = [{part.dtype for part in (*into, *leaving)} for into, leaving in calls.lists]
    assert dtypes == [{torch.float32}, {torch.float32}, {torch.bfloat16}, {torch.uint8}]


@pytest.mark.parametrize(
    "config, kind",
    [
        ("cpu:gloo,cuda:nccl", Tensor),
        ("cpu:gloo,cuda:gloo", OnGpu),
        ("cpu:mpi,cuda:mpi", OnGpu),
        ("cuda:nccl_of_my_own", OnGpu),
        (TypeError("no such group"), OnGpu),
    ],
    ids=str,
)
def test_other_backends_send_packed_pieces(monkeypatch: pytest.MonkeyPatch, config: str | Exception, kind: type[Tensor]) -> None:
    calls = Calls(monkeypatch, config)
    out, sent, pieces = rows_on(kind)
    calls.group.all_to_all_pieces(out, pieces, [0, 2, 3], what="stage 1").wait()
    calls.group.all_to_all(out, sent[:6], [0, 2, 3], [4, 2, 0], what="stage 2").wait()
    assert not calls.lists
    (_, gathered, *splits), (_, whole, *_) = calls.singles
    assert torch.equal(gathered, torch.cat(pieces)) and splits == [[0, 2, 3], [4, 2, 0]]
    assert whole.data_ptr() == sent.data_ptr()


def test_a_failed_exchange_over_nccl_names_the_ranks_it_expected_rows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "cuda:nccl")
    calls.error = RuntimeError("a link is down")
    out, sent, pieces = rows_on(OnGpu)
    text = r"^stage 1: the exchange failed on rank 1 of 3 on axis 'cp' \(global rank 5\): a link is down. Cause: .* from global ranks 6"
    with pytest.raises(RuntimeError, match=text):
        calls.group.all_to_all_pieces(out, pieces, [0, 2, 3], what="stage 1")
    with pytest.raises(RuntimeError, match=text):
        calls.group.all_to_all(out, sent[:6], [0, 2, 3], [4, 2, 0], what="stage 1")


@pytest.mark.parametrize("rank", range(5))
def test_a_head_tail_layout_sends_contiguous_views_of_local_rows(rank: int) -> None:
    for mask in (ls.causal(), ls.causal() & ls.sliding_window(700)):
        plan = ls.plan(mask, 5120, Mesh.abstract(5, rank=rank), layout="head_tail", strategy="exchange", heads=3, kv_heads=3, head_dim=32)
        schedule = local_schedule(plan.data, ScheduleOptions(block=(128, 128)))
        assert all(exchange.sends_views for step in schedule.steps for exchange in step.exchanges)
