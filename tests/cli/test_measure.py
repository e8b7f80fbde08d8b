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


def test_long_calls_are_repeated_twice_and_short_ones_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = measure.Clock(CPU, 5, "cpu")
    assert clock.other is None and measure.LONG == 0.05
    for times, median in (([0.04, 9.0, 1.0, 7.0, 3.0, 5.0], 5.0), ([0.05, 4.0, 1.0], 2.5), ([0.06, 1.0, 2.0], 1.5)):
        left, calls = iter(times), []
        monkeypatch.setattr(clock, "_once", lambda fn, left=left: (fn(), next(left))[1])
        assert clock(lambda calls=calls: calls.append(1)) == median
        assert len(calls) == len(times) + 1 and not list(left)


def test_a_cpu_is_timed_by_the_clock_and_not_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = measure.Clock(CPU, 3, "cpu")
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=iter((2.0, 5.5)).__next__))
    monkeypatch.setattr(measure.ls, "attention", lambda *_, **__: pytest.fail("the CPU is kept busy"))
    clock.keep_busy()
    assert clock._once(lambda: None) == 3.5


def test_a_gpu_is_kept_busy_by_attention_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(measure.ls, "attention", lambda q, k, v, kernel: calls.append((q is k is v, kernel, torch.is_grad_enabled())))
    made: list[Any] = []
    monkeypatch.setattr(measure.torch, "randn", lambda *shape, **options: made.append((shape, options)) or object())
    clock = measure.Clock(GPU, 3, "triton")
    assert made == [((1, 32, 16384, 128), {"device": GPU, "dtype": torch.bfloat16})]
    assert calls == [(True, "triton", False)] * measure.SETTLING and measure.SETTLING == 40
    clock.keep_busy()
    assert len(calls) == 43


def test_a_launch_is_one_tile_and_a_copy_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        measure.ls, "attention",
        lambda q, k, v, kernel: calls.append((tuple(q.shape), q.dtype, q is k is v, kernel, torch.is_grad_enabled())),
    )  # fmt: skip

    def clock(fn: Any) -> float:
        fn()
        return 0.25

    assert measure._launch(cast(Any, clock), CPU, "aten", 24) == 0.25
    assert calls == [((1, 1, 128, 24), torch.float32, True, "aten", False)]
    assert measure._copy_bandwidth(cast(Any, clock), CPU) == 2 * 2**25 / 0.25


@pytest.mark.parametrize(("heads", "kv_heads", "q", "kv"), [(6, 3, 4, 4), (8, 2, 4, 2), (3, 1, 3, 1), (32, 8, 4, 4), (3, 3, 3, 3)])
def test_a_cpu_is_measured_with_up_to_4_heads(heads: int, kv_heads: int, q: int, kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []
    attention = measure.ls.attention

    def called(query: Any, key: Any, v: Any, **options: Any) -> Any:
        shapes.append((tuple(query.shape), tuple(key.shape), tuple(v.shape), options["mask"] is None))
        return attention(query, key, v, **options)

    monkeypatch.setattr(measure.ls, "attention", called)

    def clock(fn: Any) -> float:
        fn()
        return 1.0

    measure._kernel_rates(cast(Any, clock), CPU, (32, 160), "cpu", heads, kv_heads, 8, 0.0)
    want = []
    for batch, q_len, kv_len, full in ((4, 32, 32, True), (2, 64, 64, False), (1, 128, 160, True), (1, 320, 320, False)):
        want += [((batch, q, q_len, 8), *[(batch, kv, kv_len, 8)] * 2, full)] * 2
    assert shapes == want


@pytest.mark.parametrize(("name", "quick", "rank"), [(None, True, 0), ("mine", False, 0), ("mine", True, 1)])
def test_a_profile_has_the_measured_numbers(name: str | None, quick: bool, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = (64, 128, 256) if quick else (128, 256, 512, 1024)
    asked: list[Any] = []

    def rates(clock: Any, *arguments: Any) -> Any:
        asked.append(arguments)
        return {kind: tuple(10.0 * i + j for j in range(len(keys))) for i, kind in enumerate(measure._NAMES, 1)}

    inside, between = measure.Link(bandwidth=3e9, latency=1e-5), measure.Link(bandwidth=1e9, latency=1e-4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(measure.dist, "is_initialized", lambda: rank > 0)
    monkeypatch.setattr(measure.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(measure, "Clock", lambda device, repeat, kernel: asked.append((device, repeat, kernel)))
    monkeypatch.setattr(measure, "_launch", lambda clock, *arguments: asked.append(arguments) or 2e-6)
    monkeypatch.setattr(measure, "_kernel_rates", rates)
    monkeypatch.setattr(measure, "_copy_bandwidth", lambda clock, device: 2.5e10)
    monkeypatch.setattr(measure, "_links", lambda clock, device, base, lines: (inside, between, "what was measured"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if not quick:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    profile, lines = measure.measured(name=name, kernel="cpu", heads=6, kv_heads=3, head_dim=64, quick=quick)
    assert asked == [(CPU, 3 if quick else 7, "cpu"), (CPU, "cpu", 64), (CPU, keys, "cpu", 6, 3, 64, 2e-6)]
    if rank:
        assert (profile, lines) == (None, [])
        return
    base = measure.cluster("h200")
    assert profile is not None and (profile.name, profile.about) == (name or "cpu", "what was measured")
    assert (profile.inside, profile.between, profile.hbm, profile.contention) == (inside, between, 2.5e10, base.contention)
    assert (profile.gpus_per_node, profile.memory) == (8 if quick else 5, 2.0**34)
    kernel = profile.kernel
    assert kernel.source == f"longspan calibrate: CPU, torch {torch.__version__}, 6/3 heads of dim 64"
    assert (kernel.name, kernel.launch, kernel.slots, kernel.dims) == ("cpu", 2e-6, 7, base.kernel.dims)
    share = 0.5 / base.kernel.dim_factor(64)
    for i, values in enumerate((kernel.forward.full, kernel.forward.causal, kernel.backward.full, kernel.backward.causal), 1):
        assert values == pytest.approx([(10 * i + j) / share for j in range(len(keys))])
    assert kernel.forward.keys == kernel.backward.keys == tuple(float(k) for k in keys)
    assert lines[0] == "    keys  forward full      causal  backward full      causal   TFLOP/s"
    assert lines[2] == f"{keys[1]:8d}            11          21             31          41"
    assert lines[-1] == "copies: 25 GB/s, read and written" and len(lines) == len(keys) + 2


def test_measured_lengths_ascend_and_fill_whole_tiles() -> None:
    for device, tile in (("cuda", 128), ("cpu", 64)):
        for keys in (measure.KEYS[device], measure.QUICK[device]):
            assert list(keys) == sorted(set(keys)) and not any(k % tile for k in keys)


@pytest.mark.parametrize("size", [None, "1"])
def test_links_of_one_process_are_those_of_the_profile(size: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size:
        monkeypatch.setenv("WORLD_SIZE", size)
    base, lines = SimpleNamespace(inside="inside", between="between"), []  # type: tuple[Any, list[str]]
    about = "measured kernels and copies; links of the h200 profile"
    assert measure._links(cast(Any, None), CPU, base, lines) == ("inside", "between", about)
    assert lines == ["links: not measured with one process, taken from the h200 profile; run under torchrun to measure them"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("initialized", [True, False])
def test_links_are_measured_over_a_group_of_the_devices_backend(device: str, initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(measure.dist, "is_initialized", lambda: initialized)
    monkeypatch.setattr(measure.dist, "init_process_group", calls.append)
    monkeypatch.setattr(measure.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(measure.dist, "get_rank", lambda: 2)
    monkeypatch.setattr(measure.dist, "new_group", tuple)
    monkeypatch.setattr(measure, "_link", lambda clock, device, group, lines, where: (group, where))
    made = measure._links(cast(Any, None), torch.device(device), SimpleNamespace(between="between"), [])  # type: ignore[arg-type]
    about = "measured kernels, copies and links; links between nodes of the h200 profile"
    assert made == (((0, 1, 2), "inside a node"), "between", about)
    assert calls == ([] if initialized else ["nccl" if device == "cuda" else "gloo"])
