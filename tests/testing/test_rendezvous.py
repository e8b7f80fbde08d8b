"""Parts of virtual worlds without threads: turns, slots, records, disagreements, causes; and reports of processes."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan._comm.agreement import AGREEMENT
from longspan.testing import processes, virtual, virtual_world
from longspan.testing.rendezvous import Exchange, RankLost, Rendezvous, Turns, VirtualGroup, _copy, _mismatch, _Post


def post_of(sends: list[int], expects: list[int], *, what: str = "stage 1", width: int = 2, value: float = 0.0) -> _Post:
    """Rank r sends sends[j] rows of `value` + j to rank j."""
    pieces = tuple(torch.full((rows, width), value + j) for j, rows in enumerate(sends))
    return _Post(out=torch.full((sum(expects), width), -1.0), pieces=pieces, out_splits=tuple(expects), what=what)


def rendezvous(**options: Any) -> tuple[Rendezvous, list[Exchange]]:
    records: list[Exchange] = []
    return Rendezvous(world="w", stream=None, record=records.append, turns=Turns(timeout=0.01), **options), records


def test_the_last_member_completes_an_exchange_of_each_group_and_call() -> None:
    meeting, records = rendezvous()
    groups = [
        VirtualGroup(name="ring", rank=r, key="k", members=(4, 7, 9), rendezvous=meeting, timeout=1.0) for r in range(3)
    ]  # fmt: skip
    sends = [[0, 2, 1], [3, 1, 0], [0, 0, 2]]
    outs = []
    for rank, group in enumerate(groups):
        expects = [row[rank] for row in sends]
        out = torch.full((sum(expects), 2), -1.0)
        pieces = [torch.full((rows, 2), 10.0 * rank + j) for j, rows in enumerate(sends[rank])]
        outs.append((out, group.all_to_all_pieces(out, pieces, expects, what="swap")))
        assert len(records) == (rank == 2)
    assert [out[:, 0].tolist() for out, _ in outs] == [[10.0] * 3, [1.0, 1.0, 11.0], [2.0, 22.0, 22.0]]
    for _, pending in outs:
        pending.wait()
    (record,) = records
    assert (record.what, record.axis, record.ranks) == ("swap", "ring", (4, 7, 9))
    assert record.bytes.tolist() == [[0, 2 * 8, 8], [3 * 8, 0, 0], [0, 0, 0]] and meeting.open == {}
    assert meeting.calls == {("k", 0): 1, ("k", 1): 1, ("k", 2): 1} and groups[1].size == 3


def test_calls_of_a_rank_meet_the_calls_of_the_same_number() -> None:
    meeting, _ = rendezvous()
    slots = [meeting.post("k", (0, 1), 0, post_of([0, 0], [0, 0], what=str(i))) for i in range(2)]
    assert [last for _, last in slots] == [False, False] and slots[0][0] is not slots[1][0]
    assert slots[0][0].missing() == [1]
    slot, last = meeting.post("k", (0, 1), 1, post_of([0, 0], [0, 0]))
    assert last and slot is slots[0][0] and slot.missing() == []
    other, _ = meeting.post("other", (0, 1), 0, post_of([0, 0], [0, 0]))
    assert other is not slots[1][0] and set(meeting.open) == {("k", 1), ("other", 0)}
    meeting.leave(1, "returned")
    meeting.leave(1, "raised")
    assert meeting.gone == {1: "returned"}
    meeting.close(slot, "wrong")
    assert slot.done and slot.error == "wrong" and slot.posts == {}


def test_a_rank_that_is_missing_is_named_by_its_place_in_the_world() -> None:
    meeting, _ = rendezvous()
    groups = [VirtualGroup(name="x", rank=r, key="k", members=(5, 8, 6), rendezvous=meeting, timeout=0.02) for r in range(3)]
    pending = groups[1].all_to_all_pieces(torch.empty(0, 1), [torch.empty(0, 1)] * 3, [0, 0, 0], what="stage 2")
    with pytest.raises(RuntimeError, match=r"stage 2: rank 8 of the virtual world, on axis 'x', waited 0.02 s for ranks 5, 6, which have"):
        pending.wait()
    meeting.leave(6, "returned")
    with pytest.raises(RankLost, match=r"waited for rank 6, which returned: every rank of the axis must make this call"):
        pending.wait()


def test_disagreements_name_the_first_two_ranks_that_differ() -> None:
    members = (3, 5)
    agree = [post_of([1, 2], [1, 4]), post_of([4, 3], [2, 3])]
    assert _mismatch(agree, members) is None
    assert _mismatch([agree[0], post_of([4, 3], [2, 3], what="stage 2")], members) == (
        "rank 5 is at 'stage 2', rank 3 at 'stage 1'; all make the same calls in the same order"
    )
    text = _mismatch([agree[0], post_of([4, 3], [2, 3], width=3)], members)
    assert text is not None and text.startswith("rank 5 has rows of [3] float32") and "rank 3 of [2] float32" in text
    text = _mismatch([post_of([1, 2], [1, 7]), post_of([4, 3], [9, 3])], members)
    assert text == "rank 3 sends 2 rows to rank 5, which expects 9; rank 5 sends 4 rows to rank 3, which expects 7"
    one = [post_of([1] * 9, [0] * 9), *(post_of([1] * 9, [1] * 9) for _ in range(8))]
    text = _mismatch(one, range(9))
    assert text is not None and text.count("rows to rank") == 8 and text.endswith("expects 0; and 1 more such pairs")
    eight = [post_of([1] * 8, [0] * 8), *(post_of([1] * 8, [1] * 8) for _ in range(7))]
    text = _mismatch(eight, range(8))
    assert text is not None and text.count("rows to rank") == 8 and "more" not in text


def test_rows_are_copied_by_sender() -> None:
    posts = [post_of([1, 2], [1, 1], value=10), post_of([1, 0], [2, 0], value=20)]
    _copy(posts)
    assert posts[0].out[:, 0].tolist() == [10, 20] and posts[1].out[:, 0].tolist() == [11, 11]
    untouched = post_of([0], [0])
    _copy([untouched])
    assert untouched.out.numel() == 0


def test_turns_end_with_their_rank_and_time_out() -> None:
    turns = Turns(timeout=0.01)
    turns.take(3)
    turns.take(4)  # goes on without a turn
    turns.give(4)
    assert turns._rank == 3 and turns._lock.locked()
    turns.give(3)
    assert turns._rank is None and not turns._lock.locked()


def test_ranks_wait_in_turns_of_a_fifth_of_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []

    class Recorded(Turns):
        def __init__(self, *, timeout: float) -> None:
            made.append(timeout)
            super().__init__(timeout=timeout)

    monkeypatch.setattr(virtual, "Turns", Recorded)
    for timeout in (60.0, 0.8, 0.4):
        virtual_world(1, timeout=timeout).run(lambda mesh: None)
    assert made == [0.2, 0.2, 0.1] and virtual_world(1).timeout == 60.0


def test_meshes_name_the_groups_of_their_axes() -> None:
    world = virtual_world((2, 3), axis_names=("a", "b"))
    groups = [mesh.groups for mesh in world.meshes]
    assert [g[0] for g in groups] == [f"{world.name}/0/{j}" for _ in range(2) for j in range(3)]
    assert [g[1] for g in groups] == [f"{world.name}/1/{i}" for i in range(2) for _ in range(3)]
    assert world.size == 6 and len({virtual_world(1).name for _ in range(3)}) == 3
    with pytest.raises(ValueError, match="virtual_world: expected a timeout above 0 seconds, got -1"):
        virtual_world(1, timeout=-1)
    assert virtual_world(1, device="cpu").device == torch.device("cpu") and world.device is None


def test_agreements_are_recorded_but_their_bytes_do_not_count() -> None:
    world = virtual_world(3)
    bytes_ = torch.tensor([[0, 2], [5, 0]])
    world._record(Exchange(what=f"{AGREEMENT} x", axis="a", ranks=(0, 2), bytes=bytes_))
    assert world.sent == world.received == [0, 0, 0] and len(world.exchanges) == 1
    world._record(Exchange(what="rows", axis="a", ranks=(0, 2), bytes=bytes_))
    assert (world.sent, world.received, world.bytes_sent) == ([2, 0, 5], [5, 0, 2], 7)


def test_the_lowest_rank_that_failed_by_itself_is_the_cause() -> None:
    def lost(cause: BaseException | None = None, context: BaseException | None = None) -> BaseException:
        error = RuntimeError("later")
        error.__cause__, error.__context__ = cause, context
        return error

    own, other = KeyError("a"), ValueError("b")
    assert virtual._root_cause({0: RankLost(), 5: other, 2: own}, 7) is own
    assert own.__notes__ == ["raised by rank 2 of a virtual world of 7; ranks that also failed by themselves: 5"]
    chained = {3: lost(cause=RankLost()), 4: lost(context=lost(cause=RankLost())), 6: other}
    alone = ValueError("c")
    assert virtual._root_cause({**chained, 6: alone}, 7) is alone and alone.__notes__ == ["raised by rank 6 of a virtual world of 7"]
    first = RankLost("x")
    assert virtual._root_cause({4: first, 1: RankLost("y")}, 5) is first and first.__notes__ == ["raised by rank 4 of a virtual world of 5"]
    assert virtual._is_consequence(None) is False and virtual._is_consequence(own) is False


def test_reports_of_ranks_that_die_are_missing_and_others_have_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes._AFTER_A_FAILURE == 5.0
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    pipes[0][1].send((True, pickle.dumps(7)))
    pipes[1][1].close()  # died
    pipes[2][1].send((False, b"Traceback"))
    got = processes._reports([ours for ours, _ in pipes], 10.0)
    assert got == {0: (True, pickle.dumps(7)), 2: (False, b"Traceback")}
    for failure in ("died", "raised"):
        pair, silent = multiprocessing.Pipe(), multiprocessing.Pipe()
        pair[1].close() if failure == "died" else pair[1].send((False, b"Traceback"))
        monkeypatch.setattr(processes, "_AFTER_A_FAILURE", 0.05)
        start = time.monotonic()
        assert processes._reports([silent[0], pair[0]], 20.0) == ({} if failure == "died" else {1: (False, b"Traceback")})
        assert time.monotonic() - start < 10
    silent = multiprocessing.Pipe()
    assert processes._reports([silent[0]], 0.01) == {}


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ((True, b"x"), None),
        ((False, "Zeile 1: \u00fc".encode()), "Zeile 1: \u00fc"),
        (None, "gave no result (exit code -9): it died, or it was killed after the timeout or after another rank failed"),
    ],
)
def test_failures_are_tracebacks_or_exit_codes(report: Any, text: str | None) -> None:
    assert processes._failure(report, -9) == text


def test_ranks_are_released_even_if_they_have_ended() -> None:
    ours, theirs = multiprocessing.Pipe()
    processes._release(ours)
    assert theirs.recv() == "all ranks are done"
    theirs.close()
    processes._release(ours)


def test_exchanges_of_gpu_tensors_are_posted_from_the_stream_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, other = torch.device("cuda", 1), torch.device("cuda", 0)
    current: Any = None
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: SimpleNamespace(device=device, name="default"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    out: Any = SimpleNamespace(device=gpu)
    assert not VirtualGroup.any_stream
    for stream, shared in (
        (None, SimpleNamespace(device=gpu, name="default")),
        (SimpleNamespace(device=other, name="own"), SimpleNamespace(device=gpu, name="default")),
        (SimpleNamespace(device=gpu, name="own"), SimpleNamespace(device=gpu, name="own")),
    ):
        meeting, _ = rendezvous()
        meeting.stream = stream  # type: ignore[assignment]
        group = VirtualGroup(name="x", rank=0, key="k", members=(3,), rendezvous=meeting, timeout=1.0)
        current = shared
        group._check_stream(out, "stage 1")
        current = SimpleNamespace(device=gpu, name="side")
        with pytest.raises(RuntimeError, match=r"^stage 1: ranks of a virtual world share the CUDA stream .*name='side'"):
            group._check_stream(out, "stage 1")


def test_the_stream_of_a_run_is_that_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    for available, initialized in ((False, False), (True, False), (False, True), (True, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda value=available: value)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda value=initialized: value)
        streams = [virtual_world(1, device=device)._stream() for device in ("cuda:1", "cpu", None)]
        shared = "stream of None" if available and initialized else None
        assert streams == ["stream of cuda:1", shared, shared]


def test_ranks_of_an_interrupted_run_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    world, left = virtual_world(2), []
    joined = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "virtual rank 0":
            raise KeyboardInterrupt
        joined(thread, timeout)

    monkeypatch.setattr(Rendezvous, "leave", lambda self, rank, how: left.append((rank, how)))
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.run(lambda mesh: None)
    abandoned = "was abandoned: the caller of world.run was interrupted"
    assert [(rank, how) for rank, how in left if how != "returned"] == [(0, abandoned), (1, abandoned)] and world._running == []


class FakeProcess:
    """Runs its rank at once in this process, without a group."""

    alive = False

    def __init__(self, *, target: Any, args: tuple[Any, ...], name: str, daemon: bool) -> None:
        self.args, self.name, self.daemon, self.pid, self.exitcode, self.done = args, name, daemon, None, 0, []
        made.append(self)

    def start(self) -> None:
        self.pid = 1
        pipe, rank, _, fn, args = self.args
        try:
            pipe.send((True, pickle.dumps(fn(rank, *args))))
        except ValueError:
            pipe.send((False, f"rank {rank} failed".encode()))

    def is_alive(self) -> bool:
        return self.alive

    def kill(self) -> None:
        self.done.append("killed")

    def join(self, timeout: float | None = None) -> None:
        self.done.append(timeout)


made: list[FakeProcess] = []


def work(rank: int, factor: int) -> int:
    if factor < 0 and rank != 1:
        raise ValueError
    return rank * factor


@pytest.mark.parametrize("alive", [False, True])
def test_results_come_by_rank_and_failures_together(alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(Process=FakeProcess, Pipe=multiprocessing.Pipe)
    monkeypatch.setattr(processes, "process_context", lambda: context)
    monkeypatch.setattr(FakeProcess, "alive", alive)
    made.clear()
    assert processes.run_processes(work, 3, 5) == [0, 5, 10]
    assert [(p.name, p.daemon, p.done) for p in made] == [
        (f"rank {r}", True, [5.0, *(["killed"] if alive else []), None]) for r in range(3)
    ]
    n, store, backend, group_timeout, threads, environment = made[2].args[2]
    assert (n, backend, group_timeout, threads) == (3, "gloo", 60.0, 1) and store.endswith("/store") and "PATH" in environment
    with pytest.raises(RuntimeError, match=r"^rank 0 of 3: rank 0 failed\n\nrank 2 of 3: rank 2 failed$"):
        processes.run_processes(work, 3, -1, timeout=5.0)
    reports, limits = processes._reports, []
    monkeypatch.setattr(processes, "_reports", lambda pipes, timeout: limits.append(timeout) or reports(pipes, timeout))
    for options in ({}, {"timeout": 7.0}):
        processes.run_processes(work, 2, 5, **options)  # type: ignore[arg-type]
    assert limits == [120.0, 7.0]


def test_ranks_fork_from_a_server_that_has_imported_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[list[str]] = []
    server = SimpleNamespace(set_forkserver_preload=loaded.append)
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: server if name == "forkserver" else name)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["fork", "spawn", "forkserver"])
    assert processes.process_context("mine") is server and loaded == [[*processes.PRELOADED, "mine"]]
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert processes.process_context() == "spawn"


def test_runs_of_two_worlds_at_once_are_told_apart() -> None:
    one, two = virtual_world(1), virtual_world(1)
    inside, done = threading.Event(), threading.Event()

    def blocked(mesh: Any) -> None:
        inside.set()
        assert done.wait(30)

    thread = threading.Thread(target=one.run, args=(blocked,))
    thread.start()
    assert inside.wait(30)
    (name,) = one.meshes[0].groups
    assert one.group(name, 0).rank == 0  # the only run in progress
    with pytest.raises(RuntimeError, match=r"communicate only inside world\.run"):
        two.group(two.meshes[0].groups[0], 0)
    again = threading.Thread(target=one.run, args=(blocked,))
    inside.clear()
    again.start()
    assert inside.wait(30)
    with pytest.raises(RuntimeError, match=r"communicate only inside world\.run"):
        one.group(name, 0)
    done.set()
    thread.join()
    again.join()
    assert one._running == []
