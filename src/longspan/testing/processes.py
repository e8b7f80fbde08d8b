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

_AFTER_A_FAILURE = 5.0  # seconds that the other ranks get to say what happened to them


def process_context() -> Any:
    """A multiprocessing context for ranks: processes fork from a server that has imported torch, without threads or a CUDA context.

    A spawned process imports torch and Dynamo by itself, which takes about 5 s of CPU time; a forked one starts in 0.1 s.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    return context


def run_processes(
    fn: Callable[..., Any], n: int, *args: Any, timeout: float = 120.0, group_timeout: float = 60.0, backend: str = "gloo", threads: int = 1
) -> list[Any]:
    """[fn(*args) of each rank]: n new processes, each with the default process group (of n ranks) set up.

    `fn`, `args` and the results are pickled: `fn` is a function at the top of a module. A rank that raises or dies makes this raise a
    RuntimeError with the tracebacks of all ranks that did. `timeout`: seconds for the whole call, after which all processes are
    killed. `group_timeout`: that of the process group. `threads`: torch's, in each process.
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
                theirs.close()  # so that the end of the process is the end of the pipe
            reports = _reports([ours for ours, _ in pipes], timeout)
            for rank in reports:
                _tell(pipes[rank][0])
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
    """What each rank reported; nothing of a rank that died, or had not reported when the time was up."""
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
        return f"gave no result (exit code {exitcode}): it died, or was killed when the time was up or another rank had failed"
    return None if report[0] else report[1].decode()


def _tell(pipe: Connection) -> None:
    with contextlib.suppress(OSError):  # it may be gone already
        pipe.send("all ranks are done")


def _main(
    pipe: Connection, rank: int, settings: tuple[int, str, str, float, int, dict[str, str]], fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    n, store, backend, group_timeout, threads, environment = settings
    os.environ |= environment  # the server has that of the first call
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=n, timeout=timedelta(seconds=group_timeout))
        pipe.send((True, pickle.dumps(fn(*args))))
    except BaseException:
        pipe.send((False, traceback.format_exc().encode()))
    # A rank that leaves early would break connections that the others still read from.
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without torch's own farewells, which wait for ranks that may be gone
