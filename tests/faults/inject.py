"""Faults of one rank, injected at numbered points: the places of a rank's run where exchanges start or are awaited, kernels run, and
checkpoint files are written or read.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from tests.faults import hosts

# Kinds that strike at a point. The rank that is struck is the victim.
KILL = "kill"  # SIGKILL
STOP = "stop"  # SIGSTOP; SIGCONT once the other ranks have reported
DELAY = "delay"  # sleeps for less than the timeout: every result must be right
LATE = "delay past the timeout"
RAISE = "raise"  # raises and exits
CATCH = "raise and go on"  # raises, catches the error and makes the next call
POINT_KINDS = (KILL, STOP, DELAY, LATE, RAISE, CATCH)

# Kinds that strike the cable between two hosts.
CUT = "cut"  # for good
FLAP = "flap"  # for less than the timeout: every result must be right
SLOW = "slow"  # 4 Mbit/s: every result must be right
CABLE_KINDS = (CUT, FLAP, SLOW)
HARMLESS = (DELAY, FLAP, SLOW)

# Kinds that change the victim's sequence of calls or one of its arguments.
SKIP, REORDER, DIVERGE = "skip", "reorder", "diverge"


class InjectedError(Exception):
    """Raised by the kinds RAISE and CATCH; not an error that longspan raises itself."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to the victim. `at`: the point, or the index of the first call that is skipped, exchanged or different."""

    kind: str
    victim: int
    at: int = 0
    name: str = ""  # of the point, or the field that differs


@dataclass(kw_only=True)
class Injector:
    """Counts the points that this rank passes in `calls` and strikes at the fault's. `points` are their names."""

    fault: Fault | None
    timeout: float
    report: Callable[..., None]
    points: list[str] = field(default_factory=list)
    call: str | None = None  # name of the call that runs; points outside of calls are not counted

    def point(self, name: str) -> None:
        if self.call is None:
            return
        number = len(self.points)
        self.points.append(f"{self.call}: {name}")
        if self.fault is not None and self.fault.kind in (*POINT_KINDS, *CABLE_KINDS) and number == self.fault.at:
            self._strike(self.fault.kind)

    def _strike(self, kind: str) -> None:
        self.report("fault", self.points[-1])
        if kind == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == DELAY:
            time.sleep(0.2 * self.timeout)
        elif kind == LATE:
            time.sleep(self.timeout + 1.5)
        elif kind in CABLE_KINDS:
            hosts.slow_down() if kind == SLOW else hosts.cut()
            if kind == FLAP:
                time.sleep(0.2 * self.timeout)
                hosts.plug_in()
        else:
            raise InjectedError(f"injected at {self.points[-1]}")

    def install(self) -> None:
        """Patch longspan and torch in this process, for its lifetime."""
        from longspan._comm import process_group
        from longspan._engine import distributed

        pending: Any = process_group._ProcessGroupPending
        self._before(process_group.C10dGroup, "_begin", lambda self, out, sent, splits, what, call: f"start of {what}")
        self._before(pending, "wait", lambda self: f"wait for {self.exchange.what}" if self.work is not None else None)
        self._before(distributed, "AttentionInputs", lambda *_, **__: "kernel")  # made for each launch
        for name in ("all_reduce", "barrier"):
            self._before(dist, name, lambda *_, name=name, **__: f"{name} of torch")

    def install_checkpoint_points(self) -> None:
        from torch.distributed.checkpoint import filesystem

        from longspan._training import checkpoints

        for name in ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"):
            self._before(dist, name, lambda *_, name=name, **__: f"{name} of torch")
        for method in ("prepare_local_plan", "write_data", "finish"):
            self._before(filesystem.FileSystemWriter, method, lambda *_, method=method, **__: f"writer's {method}")
        for method in ("read_metadata", "read_data"):
            owner: Any = checkpoints._CheckpointReader if method == "read_metadata" else filesystem.FileSystemReader
            self._before(owner, method, lambda *_, method=method, **__: f"reader's {method}")
        for function in ("_digest", "_sync", "save_distributed", "load_distributed", "get_state_dict", "set_state_dict"):
            self._before(checkpoints, function, lambda *_, function=function, **__: function.strip("_"))
        self._before(os, "replace", lambda *_: "rename")

    def _before(self, owner: Any, name: str, describe: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            text = describe(*args, **kwargs)
            if text is not None:
                self.point(text)
            return original(*args, **kwargs)

        setattr(owner, name, patched)
