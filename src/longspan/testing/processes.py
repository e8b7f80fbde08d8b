"""Real ranks for tests: N processes of this machine with a process group over loopback."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import Any, cast

import torch
import torch.distributed as dist

# Modules that the fork server imports before it forks ranks. Missing ones are ignored.
PRELOADED: tuple[str, ...] = ("torch", "torch.distributed", "torch._dynamo", "longspan.testing.processes")
_AFTER_A_FAILURE = 5.0  # seconds in which the other ranks may report after one rank failed


def process_context(*modules: str) -> Any:
    """A multiprocessing context for ranks: processes fork from a server that has imported torch, without threads or a CUDA context.

    A spawned process imports torch and Dynamo by itself, which takes about 5 s of CPU time; a forked one starts in 0.1 s.

    Args:
        modules: Further modules for a server that has not started yet, such as the one of the function that the ranks run.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *modules])
    return context


def run_processes(
    fn: Callable[..., Any], n: int, *args: Any, timeout: float = 120.0, group_timeout: float = 60.0, backend: str = "gloo", threads: int = 1
) -> list[Any]:
    """Run fn(*args) in n new processes, each with a default process group of n ranks: the list of results by rank.

    `fn`, `args` and the results are pickled, so `fn` must be a top-level function of a module.

    Args:
        timeout: Seconds for the whole call; then all processes are killed.
        group_timeout: Timeout of the process group in seconds.
        backend: Backend of the process group.
        threads: torch threads of each process.

    Raises:
        RuntimeError: If a rank raises or dies; the message has the traceback of every rank that failed.
    """
    context = process_context()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = [context.Pipe() for _ in range(n)]
        settings = (n, store, backend, group_timeout, threads, dict(os.environ))
        processes = [
            context.Process(target=_main, args=(theirs, rank, settings, fn, args), name=f"rank {rank}", daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process, (_, theirs) in zip(processes, pipes):
                process.start()
                theirs.close()  # then the pipe ends when the process does
            reports = _reports([ours for ours, _ in pipes], timeout)
            for rank in reports:
                _release(pipes[rank][0])
            for rank in reports:
                processes[rank].join(_AFTER_A_FAILURE)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()
            for ours, _ in pipes:
                ours.close()
    failures = [f"rank {rank} of {n}: {text}" for rank in range(n) if (text := _failure(reports.get(rank), processes[rank].exitcode))]
    if failures:
        raise RuntimeError("\n\n".join(failures))
    return [pickle.loads(reports[rank][1]) for rank in range(n)]


def _reports(pipes: list[Connection], timeout: float) -> dict[int, tuple[bool, bytes]]:
    """(succeeded, pickled result or traceback) by rank; ranks that died or ran out of time are missing."""
    deadline = time.monotonic() + timeout
    reports: dict[int, tuple[bool, bytes]] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in cast(list[Connection], wait_for_any(list(waiting), left)):
            rank = waiting.pop(pipe)
            with contextlib.suppress(EOFError):
                reports[rank] = pipe.recv()
            if rank not in reports or not reports[rank][0]:
                deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
    return reports


def _failure(report: tuple[bool, bytes] | None, exitcode: int | None) -> str | None:
    if report is None:
        return f"gave no result (exit code {exitcode}): it died, or it was killed after the timeout or after another rank failed"
    return None if report[0] else report[1].decode()


def _release(pipe: Connection) -> None:
    """Let a rank exit."""
    with contextlib.suppress(OSError):  # the process may have ended
        pipe.send("all ranks are done")


def _main(
    pipe: Connection, rank: int, settings: tuple[int, str, str, float, int, dict[str, str]], fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    n, store, backend, group_timeout, threads, environment = settings
    os.environ |= environment  # the fork server has the environment of its first call
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=n, timeout=timedelta(seconds=group_timeout))
        pipe.send((True, pickle.dumps(fn(*args))))
    except BaseException:
        pipe.send((False, traceback.format_exc().encode()))
    # Wait for all ranks: an early exit would close connections that other ranks still read from.
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skip torch's exit handlers, which may wait for ranks that have ended
