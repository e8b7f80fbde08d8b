"""Ranks for a command: processes of this machine, or the processes of torchrun. None is left behind.

Under torchrun the command is already a rank. Otherwise it starts its ranks, forwards Ctrl-C and SIGTERM, and waits until they have stopped.
Ranks end when the process that started them ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from longspan._comm.watchdog import configured_timeout
from longspan.testing.processes import process_context

_GRACE = 60.0  # seconds to write a checkpoint after Ctrl-C
_AFTER_A_FAILURE = 5.0  # seconds until the other ranks are killed after one rank failed
INTERRUPTED = 130  # exit code


def is_rank() -> bool:
    """Whether torchrun, or this module, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size(processes: int) -> int:
    """Number of ranks: torchrun's, or `processes`."""
    return int(os.environ["WORLD_SIZE"]) if is_rank() else processes


def default_processes() -> int:
    """One process per GPU, or 4 on a CPU."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 4


def run_ranks(fn: Callable[..., int], processes: int, *args: Any, threads: int = 1) -> int:
    """Run fn(device, *args) on every rank with the default process group set up. Returns the first nonzero exit code, or 0."""
    if is_rank():
        return _as_rank(fn, args)
    context = process_context(fn.__module__)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [context.Process(target=_rank, args=(r, processes, store, threads, fn, args)) for r in range(processes)]
        stop = _Stop(ranks)
        previous = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for rank in ranks:
                rank.start()
            _wait(ranks, stop)
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                if rank.pid is not None:
                    rank.join()
            for s, handler in previous.items():
                signal.signal(s, handler)
    codes = [INTERRUPTED if rank.exitcode == -signal.SIGINT else int(rank.exitcode or 0) for rank in ranks]
    # A rank that was killed or failed by itself (not 1) says more than ranks that then lost it.
    return next((abs(c) for c in codes if c not in (0, 1)), max(codes))


class _Stop:
    """Signal handler that forwards SIGINT to the ranks; the second time it kills them."""

    def __init__(self, ranks: list[Any]) -> None:
        self.ranks, self.since = ranks, None  # type: tuple[list[Any], float | None]

    def __call__(self, number: int, frame: Any) -> None:
        again, self.since = self.since is not None, self.since or time.monotonic()
        for rank in self.ranks:
            if rank.pid is not None and rank.exitcode is None:
                os.kill(rank.pid, signal.SIGKILL if again else signal.SIGINT)


def _wait(ranks: list[Any], stop: _Stop) -> None:
    failed: float | None = None
    while any(rank.exitcode is None for rank in ranks):
        time.sleep(0.05)
        now = time.monotonic()
        # Ranks that were interrupted end one by one, as soon as each has written its part of the checkpoint.
        expected = (None, 0) if stop.since is None else (None, 0, INTERRUPTED)
        if failed is None and any(rank.exitcode not in expected for rank in ranks):
            failed = now
        late = failed is not None and now - failed > _AFTER_A_FAILURE
        if late or (stop.since is not None and now - stop.since > _GRACE):
            return


def _rank(rank: int, size: int, store: str, threads: int, fn: Callable[..., int], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    raise SystemExit(_as_rank(fn, args, init_method=f"file://{store}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _as_rank(fn: Callable[..., int], args: tuple[Any, ...], init_method: str | None = None) -> int:
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # NCCL needs one GPU per rank.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", size)) <= _gpus() else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=configured_timeout())
    try:
        return fn(device, *args)
    finally:
        dist.destroy_process_group()


def _gpus() -> int:
    return torch.cuda.device_count()


class Interrupts:
    """Context in which SIGINT and SIGTERM only set `stop`, so that the caller stops at a safe point."""

    def __init__(self) -> None:
        self.stop = False
        self._previous: dict[Any, Any] = {}

    def _note(self, number: int, frame: Any) -> None:
        self.stop = True

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for s, handler in self._previous.items():
            signal.signal(s, handler)
