"""`longspan bench`: defaults, rows, masks that fit, times on a clock and between events."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

import longspan as ls
from longspan.cli import bench
from longspan.cli.app import run

CPU = torch.device("cpu")


def row(same: bool, name: str = "forward") -> bench.Row:
    return bench.Row(mask="causal", name=name, density=0.625, sdpa_s=0.0045, longspan_s=0.002, same=same)


@pytest.mark.parametrize(
    ("options", "gpu", "sizes", "repeat"),
    [
        ("", False, (2048, 8, 8, 64, "float32"), 3),
        ("", True, (16384, 8, 8, 64, "bfloat16"), 3),
        ("--tokens 1k --heads 6/3 --dim 8 --dtype float16 --repeat 5", True, (1024, 6, 3, 8, "float16"), 5),
    ],
)
def test_sizes_have_defaults_of_the_device(
    options: str, gpu: bool, sizes: tuple[Any, ...], repeat: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = torch.device("cuda", 1) if gpu else CPU
    monkeypatch.setattr(bench.parse, "device", lambda text: {"auto": device}[text])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: f"GPU {place.index}")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    calls: list[Any] = []
    monkeypatch.setattr(bench, "measured", lambda *arguments: calls.append(arguments) or iter([row(True), row(True, "backward")]))
    assert run(["bench", *options.split()]) == 0
    named = bench.BenchSizes(**dict(zip(("tokens", "heads", "kv_heads", "dim", "dtype"), sizes, strict=True)))
    assert calls == [(named, device, repeat)]
    lines = capsys.readouterr().out.splitlines()
    where = "GPU 1" if gpu else f"{bench.platform.machine()} CPU, 7 threads"
    assert lines[0] == f"longspan {ls.__version__}, torch {torch.__version__}, {where}"
    assert lines[1:3] == [f"{sizes[0]:,} tokens, {sizes[1]} query heads over {sizes[2]} KV heads of {sizes[3]}, {sizes[4]}", ""]
    assert lines[3] == "mask                   computed  pass         SDPA ms  longspan ms   ratio"
    assert lines[4] == "causal                    0.625  forward         4.50         2.00    2.25"
    assert lines[5] == "causal                    0.625  backward        4.50         2.00    2.25"
    assert len(lines) == 8 and lines[7].startswith("ratio: SDPA's time over longspan's")


@pytest.mark.parametrize(("limit", "skipped"), [(1 << 30, False), ((1 << 30) - 1, True)])
def test_a_mask_that_does_not_fit_is_named_and_json_is_the_last_line(
    limit: int, skipped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "MAX_MASK_BYTES", limit)
    monkeypatch.setattr(bench, "measured", lambda *_: iter([row(True), row(False, "backward")]))
    assert run(["bench", "--tokens", "32k", "--device", "cpu", "--repeat", "2", "--json"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    said = "packed documents are skipped: a dense mask for SDPA would take 1 GiB"
    assert (said in lines) == skipped and lines[5].endswith("   DIFFERENT RESULTS") and lines[4].endswith("2.25")
    report = json.loads(last)
    assert (report["repeat"], report["tokens"], report["dtype"]) == (2, 32768, "float32")
    assert report["rows"][1] == {
        "mask": "causal", "name": "backward", "density": 0.625, "sdpa_s": 0.0045, "longspan_s": 0.002, "same": False, "ratio": 2.25
    }  # fmt: skip


@pytest.mark.parametrize(("error", "code"), [(MemoryError(), 2), (RuntimeError("out of memory"), 2), (RuntimeError("other"), None)])
def test_too_little_memory_is_a_usage_error(
    error: Exception, code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(bench, "measured", fails)
    if code is None:
        with pytest.raises(RuntimeError, match="other"):
            run(["bench", "--device", "cpu"])
        return
    assert run(["bench", "--device", "cpu", "--tokens", "77"]) == code
    said = "--tokens: 77 tokens do not fit into memory here; give fewer tokens or heads"
    assert capsys.readouterr().err == f"longspan bench: {said}\n"


@pytest.mark.parametrize(("limit", "names"), [(90000, ["causal", "16 packed documents"]), (89999, ["causal"])])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_each_mask_has_a_forward_and_a_backward_row(
    heads: tuple[int, int], limit: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MAX_MASK_BYTES", limit)
    outs: list[dict[str, Any]] = []

    def seconds(calls: dict[str, Any], device: Any, repeat: int) -> dict[str, float]:
        assert (device, repeat) == (CPU, 9)
        outs.append({who: call() for who, call in calls.items()})
        return {"sdpa_s": 3.0, "longspan_s": float(len(outs))}

    monkeypatch.setattr(bench, "_seconds", seconds)
    sizes = bench.BenchSizes(tokens=300, heads=heads[0], kv_heads=heads[1], dim=8, dtype="float32")
    rows = list(bench.measured(sizes, CPU, 9))
    assert [(r.mask, r.name) for r in rows] == [(mask, name) for mask in names for name in ("forward", "backward")]
    assert all(r.same for r in rows) and [r.longspan_s for r in rows] == list(range(1, len(rows) + 1))
    assert {round(r.density, 6) for r in rows[:2]} == {round(6 / 9, 6)}
    for i, out in enumerate(outs):
        ours, theirs = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (out["longspan"], out["sdpa"]))
        shapes = [(1, heads[0], 300, 8)] + ([(1, heads[1], 300, 8)] * 2 if i % 2 else [])
        assert [tuple(t.shape) for t in ours] == shapes and all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs, strict=True))


def test_a_call_on_a_cpu_is_timed_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=iter((2.0, 5.5)).__next__))
    assert bench._once(lambda: called.append("call"), CPU) == 3.5 and called == ["call"]


def test_a_call_on_a_gpu_is_timed_between_events_after_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 2500.0 if end is not self else 0.0

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    assert bench._once(lambda: done.append("call"), gpu) == 2.5
    assert done == [gpu, "call", "event", "call", "event", "wait"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_inputs_and_results_have_the_dtype_that_was_asked_for(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def seconds(calls: dict[str, Any], device: Any, repeat: int) -> dict[str, float]:
        seen.append(calls["longspan"]() if not seen else calls["longspan"]()[0])
        return {"sdpa_s": 1.0, "longspan_s": 1.0}

    monkeypatch.setattr(bench, "_seconds", seconds)
    monkeypatch.setattr(bench, "MAX_MASK_BYTES", 0)
    assert all(r.same for r in bench.measured(bench.BenchSizes(tokens=70, heads=3, kv_heads=1, dim=8, dtype=dtype), CPU, 1))
    assert [t.dtype for t in seen] == [getattr(torch, dtype)] * 2


def test_errors_of_16_bit_results_are_summed_in_float32() -> None:
    """The norms of these results, and of their differences, are above float16's largest number."""
    right = torch.full((40000,), 30000.0, dtype=torch.float16)
    assert bench._same([right * 1.02], [right]) and not bench._same([right * 1.5], [right])
