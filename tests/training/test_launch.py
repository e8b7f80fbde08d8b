"""Ranks of a command without processes: exit codes, signals, the grace period, backends and devices."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspan._training import launch


class Process:
    """A rank that ends with `code` when it is started; None: it runs until it is killed."""

    codes: tuple[int | None, ...] = ()
    made: list[Process]

    def __init__(self, *, target: Any, args: tuple[Any, ...]) -> None:
        self.target, self.args, self.exitcode, self.pid, self.done = target, args, None, None, []
        Process.made.append(self)

    def start(self) -> None:
        self.pid = 1000 + self.args[0]
        self.exitcode = Process.codes[self.args[0]]

    def is_alive(self) -> bool:
        return self.pid is not None and self.exitcode is None

    def kill(self) -> None:
        self.done.append("killed")
        self.exitcode = -9

    def join(self) -> None:
        self.done.append("joined")


def main_of_ranks(device: torch.device, *args: Any) -> int:
    return 7


@pytest.mark.parametrize(
    ("codes", "code", "killed"),
    [
        ((0, 0, 0), 0, []),
        ((0, 1, 0), 1, []),
        ((1, 3, 2), 3, []),
        ((1, -9, 0), 9, []),
        ((-2, 0), 130, []),
        ((1, -2), 130, []),
        ((0, 1, None), 9, [2]),
        ((5,), 5, []),
    ],
)
def test_the_exit_code_is_the_first_that_is_not_of_a_lost_rank(
    codes: tuple[int | None, ...], code: int, killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: list[str] = []

    def context(*names: str) -> Any:
        modules.extend(names)
        return SimpleNamespace(Process=Process)

    monkeypatch.setattr(launch, "is_rank", lambda: False)
    monkeypatch.setattr(launch, "process_context", context)
    monkeypatch.setattr(launch, "_AFTER_A_FAILURE", 0.01)
    Process.codes, Process.made = codes, []
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    assert launch.run_ranks(main_of_ranks, len(codes), "a", 2, threads=3) == code
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers and modules == [__name__]
    for rank, process in enumerate(Process.made):
        first, size, store, threads, fn, args = process.args
        assert (first, size, threads, fn, args) == (rank, len(codes), 3, main_of_ranks, ("a", 2)) and process.target is launch._rank
        assert process.args[2] == Process.made[0].args[2] and os.path.basename(store) == "store"
        assert process.done == (["killed", "joined"] if rank in killed else ["joined"])


def test_a_failure_to_start_kills_the_ranks_that_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_rank", lambda: False)
    monkeypatch.setattr(launch, "process_context", lambda *_: SimpleNamespace(Process=Process))
    Process.codes, Process.made = (None,), []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(IndexError):  # of the second code
        launch.run_ranks(main_of_ranks, 3)
    assert [process.done for process in Process.made] == [["killed", "joined"], ["killed", "joined"], []]
    assert signal.getsignal(signal.SIGINT) is handler and {process.args[3] for process in Process.made} == {1}  # threads


def test_a_rank_runs_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_rank", lambda: True)
    monkeypatch.setattr(launch, "_as_rank", lambda fn, args: (fn, args))
    assert launch.run_ranks(main_of_ranks, 4, 1, 2) == (main_of_ranks, (1, 2))  # type: ignore[comparison-overlap]


def test_the_first_signal_interrupts_running_ranks_and_the_second_kills_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(launch.time, "monotonic", lambda: 12.5)
    ranks = [SimpleNamespace(pid=pid, exitcode=code) for pid, code in ((11, None), (None, None), (13, 0), (14, None))]
    stop = launch._Stop(ranks)
    assert stop.since is None
    stop(signal.SIGTERM, None)
    assert sent == [(11, signal.SIGINT), (14, signal.SIGINT)] and stop.since == 12.5
    monkeypatch.setattr(launch.time, "monotonic", lambda: 20.0)
    stop(signal.SIGINT, None)
    assert sent[2:] == [(11, signal.SIGKILL), (14, signal.SIGKILL)] and stop.since == 12.5


@pytest.mark.parametrize(
    ("codes", "interrupted", "looks"),
    [
        ([{}, {0: 0}, {1: 0, 2: 0}], None, 3),  # all end
        ([{0: 1}], None, 7),  # 5 s after the failure and one look later
        ([{0: 0}, {1: 4}], None, 8),
        ([], 3.0, 64),  # 60 s of grace
        ([{0: 130}], 3.0, 64),  # a rank that was interrupted did not fail
        ([{0: 130}, {1: -2}], 3.0, 8),  # one that was not ready to be interrupted did
        ([{0: 130}], None, 7),
    ],
)
def test_ranks_have_5_seconds_after_a_failure_and_60_after_an_interruption(
    codes: list[dict[int, int]], interrupted: float | None, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [SimpleNamespace(exitcode=None) for _ in range(3)]
    clock = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 200:
            raise AssertionError("no end")
        clock[0] += 1.0
        for rank, code in (codes[len(slept) - 1] if len(slept) <= len(codes) else {}).items():
            ranks[rank].exitcode = code

    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0]))
    launch._wait(ranks, SimpleNamespace(since=interrupted))  # type: ignore[arg-type]
    assert len(slept) == looks and set(slept) == {0.05}


@pytest.mark.parametrize(
    ("environment", "gpus", "device", "backend"),
    [
        ({}, 0, "cpu", "gloo"),
        ({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "4"}, 4, "cuda:1", "cpu:gloo,cuda:nccl"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "5"}, 4, "cuda:2", "gloo"),
        ({}, 6, "cuda:0", "cpu:gloo,cuda:nccl"),
        ({}, 5, "cuda:0", "gloo"),
    ],
)
def test_nccl_is_used_if_every_local_rank_has_a_gpu(
    environment: dict[str, str], gpus: int, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "4", "WORLD_SIZE": "6", **environment}.items():
        monkeypatch.setenv(name, value)
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: calls.append(d))
    monkeypatch.setattr(launch, "configured_timeout", lambda: timedelta(seconds=33))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))

    def fn(on: torch.device, *args: Any) -> int:
        calls.append((str(on), args))
        raise KeyError(3)

    with pytest.raises(KeyError):
        launch._as_rank(fn, (8, 9), "file://store")
    group = ((backend,), {"init_method": "file://store", "rank": 4, "world_size": 6, "timeout": timedelta(seconds=33)})
    assert calls == [*([torch.device(device)] if gpus else []), group, (device, (8, 9)), "destroyed"]
    assert launch.default_processes() == (gpus or 4)


def test_a_process_becomes_a_rank_with_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    calls: list[Any] = []
    ended = threading.Event()
    monkeypatch.setattr(launch, "_end_with_parent", ended.set)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(launch.sys, "platform", "linux")

    def as_rank(fn: Any, args: Any, init_method: Any) -> int:
        calls.append((fn, args, init_method, *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME"))))
        return 5

    monkeypatch.setattr(launch, "_as_rank", as_rank)
    with pytest.raises(SystemExit) as exit_:
        launch._rank(2, 7, "/a/store", 3, main_of_ranks, ("x",))
    assert exit_.value.code == 5 and ended.wait(10)
    assert calls == [3, (main_of_ranks, ("x",), "file:///a/store", "2", "7", "2", "lo")]


def test_a_rank_ends_with_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(launch.multiprocessing, "parent_process", lambda: SimpleNamespace(join=lambda: done.append("joined")))
    monkeypatch.setattr(os, "_exit", done.append)
    launch._end_with_parent()
    assert done == ["joined", 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_only_set_a_flag_inside_of_the_context(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with launch.Interrupts() as interrupts:
        assert interrupts.stop is False
        os.kill(os.getpid(), number)
        assert interrupts.stop is True
    assert signal.getsignal(number) is before
    others: list[bool] = []

    def other() -> None:
        with launch.Interrupts() as made:
            others.append(made.stop or signal.getsignal(number) is not before)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert others == [False]
