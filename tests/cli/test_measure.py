"""`longspan calibrate` on a GPU: seconds between events, and the concurrent CTAs of each kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")

from longspan.cli import measure

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_a_gpu_has_two_ctas_per_sm_but_for_persistent_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from longspan._kernels.hopper import passes

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=57))
    monkeypatch.setattr(passes, "persistent_ctas", lambda device: 131)
    assert (measure._slots(GPU, "triton"), measure._slots(GPU, "hopper"), measure._slots(CPU, "cpu")) == (114, 131, torch.get_num_threads())
    for first, slots in (("hopper", 131), ("triton", 114)):
        monkeypatch.setattr(measure, "first_candidate", lambda device, first=first: first)
        assert measure._slots(GPU, "auto") == slots


def test_seconds_are_those_between_events_with_the_device_kept_busy_before(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 1500.0 if end is not self else 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("all"))
    monkeypatch.setattr(measure.Clock, "keep_busy", lambda self, times=3: done.append("busy"))
    clock = measure.Clock(CPU, 3, "auto")
    clock.other = torch.empty(0)
    done.clear()
    assert clock._once(lambda: done.append("call")) == 1.5
    assert done == ["all", "busy", "event", "call", "event", "wait"]
