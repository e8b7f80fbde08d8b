"""`longspan calibrate`: seconds between events, concurrent CTAs of each kernel, rates, and links between ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

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


def test_a_link_is_measured_by_a_small_and_a_large_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, object]] = []
    monkeypatch.setattr(measure.dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(measure.dist, "all_to_all_single", lambda out, x, group: sent.append((len(out), group)))
    seconds = iter((0.001, 0.003))

    def clock(fn: Any) -> float:
        fn()
        return next(seconds)

    lines: list[str] = []
    link = measure._link(cast(Any, clock), CPU, "group", lines, "inside a node")
    assert sent == [(3 * 1024, "group"), (3 * 2**20, "group")]
    assert link.latency == 0.001 and link.bandwidth == pytest.approx(2 * 2**20 / 0.002)
    assert lines == ["links inside a node: 1.049 GB/s each way, 1e+03 µs latency, over 3 ranks"]


@pytest.mark.parametrize(("world", "here", "inside", "between"), [
    (6, 2, [2, 3], [1, 3, 5]), (6, 1, None, [0, 1, 2, 3, 4, 5]), (4, 4, [0, 1, 2, 3], None),
])  # fmt: skip
def test_links_are_those_of_this_ranks_node_and_of_its_peers_on_other_nodes(
    world: int, here: int, inside: Any, between: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    for name, value in (("is_initialized", True), ("get_world_size", world), ("get_rank", 3)):
        monkeypatch.setattr(measure.dist, name, lambda *_, value=value: value)
    monkeypatch.setattr(measure.dist, "new_group", lambda ranks: ranks)
    monkeypatch.setattr(measure, "_link", lambda clock, device, group, lines, where: (group, where))
    base = SimpleNamespace(inside="profile inside", between="profile between")
    got = measure._links(cast(Any, None), CPU, cast(Any, base), [])
    assert got[0] == ("profile inside" if inside is None else (inside, "inside a node"))
    assert got[1] == ("profile between" if between is None else (between, "between nodes"))
    assert got[2].endswith("of the h200 profile") == (between is None)


@pytest.mark.parametrize(("launch", "seconds"), [(0.5, 1.5), (1.8, 1.0)])
def test_rates_are_operations_by_seconds_without_a_launch(launch: float, seconds: float) -> None:
    def clock(fn: Any) -> float:
        fn()
        return 2.0

    # 6 and 3 heads become 4 and 4 on a CPU; up to 128 queries are batched.
    rates = measure._kernel_rates(cast(Any, clock), CPU, (64, 256), "cpu", 6, 3, 8, launch)
    pairs = {"full": (2 * 64 * 64, 128 * 256), "causal": (128 * 129 / 2, 512 * 513 / 2)}
    for kind, of_keys in pairs.items():
        want = [4.0 * 4 * 8 * n / 1e12 / seconds for n in of_keys]
        assert rates[f"forward_{kind}"] == pytest.approx(want)
        assert rates[f"backward_{kind}"] == pytest.approx([2.5 * rate for rate in want])


def test_numbers_of_keys_that_are_measured() -> None:
    assert measure.KEYS == {"cuda": (128, 256, 512, 1024, 2048, 4096, 16384, 65536), "cpu": (128, 256, 512, 1024)}
    assert measure.QUICK == {"cuda": (256, 1024, 4096, 16384), "cpu": (64, 128, 256)}
