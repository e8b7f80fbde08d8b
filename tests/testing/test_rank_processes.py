"""One process of `run_processes`: process group setup, result report, and exit after all ranks have reported."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch

from longspan.testing import processes


class Ended(BaseException):
    """In place of the end of the process."""


def leave(code: int) -> None:
    raise Ended(code)


def reciprocal(value: float) -> tuple[float, int, str | None]:
    return 1 / value, torch.get_num_threads(), os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("value", [0.5, 0.0])
def test_a_rank_reports_waits_for_the_others_and_exits_with_0(value: float, released: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []
    environment = {"ONLY_HERE": "1", "GIVEN": "2"}
    monkeypatch.setattr(processes.dist, "init_process_group", lambda *args, **options: groups.append((args, options)))
    monkeypatch.setattr(processes.os, "_exit", leave)
    monkeypatch.setattr(processes.os, "environ", environment)
    ours, theirs = multiprocessing.Pipe()
    if released:
        processes._release(ours)
    threads, settings = torch.get_num_threads(), (3, "/folder/store", "gloo", 7.5, 2, {"GIVEN": "3"})
    report: Any = None

    class Pipe:
        """Ends after a report unless the rank is released."""

        def send(self, sent: Any) -> None:
            nonlocal report
            assert report is None
            report = sent

        def recv(self) -> Any:
            assert report is not None, "a rank reports before it waits"
            if not released:
                ours.close()
            return theirs.recv()

    try:
        with pytest.raises(Ended) as ended:
            processes._main(Pipe(), 1, settings, reciprocal, (value,))  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    assert ended.value.args == (0,), "also if it raised: the report says so"
    succeeded, content = report
    if value:
        assert succeeded and pickle.loads(content) == (2.0, 2, "lo" if sys.platform == "linux" else None)
    else:
        assert not succeeded and "ZeroDivisionError" in content.decode()
    assert groups == [
        (("gloo",), {"init_method": "file:///folder/store", "rank": 1, "world_size": 3, "timeout": timedelta(seconds=7.5)})
    ]  # fmt: skip
    assert environment == {"ONLY_HERE": "1", "GIVEN": "3", **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})}
