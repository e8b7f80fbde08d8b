"""Predicted against measured compute time of the busiest rank of 12 plans over 4 masks, on one GPU.

    PYTHONPATH=src:. python bench/predictions_gpu.py [--profile FILE] [--calibrate FILE] [--mask NAME] [--kernels] [--json]

One GPU runs the busiest rank of each mesh; KV of other ranks are copied from its own. Prediction and measurement are of compute without
exchanges: exchanges run on the compute stream, each between two events, and their time is subtracted ("copies"). Kernels, packing, merging
and gradient sums count.

Without --profile, the kernel is calibrated first, in the same run, on full and causal squares only; --calibrate writes that profile. The
calibration uses neither the plans nor the whole sequences of "kernel alone".
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from bench.link import echoed
from torch import Tensor

import longspan as ls
from longspan._comm.group import Done, Pending
from longspan._cost.clusters import cluster, dump
from longspan._cost.rates import Cluster, Link
from longspan._cost.report_data import report
from longspan.cli import measure

HEADS, KV_HEADS, DIM = 32, 8, 128
WITHIN = 0.10
PASSES = ("forward", "backward")


def _documents(tokens: int) -> ls.Mask:
    """Causal packed documents with log-normal lengths."""
    generator, lengths, left = torch.Generator().manual_seed(3), [], tokens
    while left:
        lengths.append(min(left, 64 + int(torch.empty(()).log_normal_(8.0, 1.2, generator=generator))))
        left -= lengths[-1]
    return ls.causal() & ls.documents(lengths=lengths)


def _equal_documents(tokens: int, length: int) -> ls.Mask:
    """Causal packed documents of `length` tokens; the last one may be shorter."""
    whole, rest = divmod(tokens, length)
    return ls.causal() & ls.documents(lengths=[length] * whole + [rest] * (rest > 0))


MASKS: dict[str, Callable[[int], ls.Mask]] = {
    "causal": lambda tokens: ls.causal(),
    "documents": _documents,
    "window 4096": lambda tokens: ls.causal() & ls.sliding_window(4096),
    "prefix": lambda tokens: ls.causal() | ls.prefix(tokens // 4),
}
PLANS = ((65536, 8, "head_tail", "ring"), (65536, 8, "auto", "exchange"), (131072, 16, "round_robin", "allgather"))
WHOLE_MASKS: dict[str, Callable[[int], ls.Mask]] = {
    **MASKS,
    **{f"documents of {n}": partial(_equal_documents, length=n) for n in (300, 700, 1500, 3100, 6300)},
    "window 300": lambda tokens: ls.causal() & ls.sliding_window(300),
    "window 1100": lambda tokens: ls.causal() & ls.sliding_window(1100),
}
LENGTHS = (8192, 32768)

Spans = list[tuple[torch.cuda.Event, torch.cuda.Event]]


@dataclass(frozen=True, kw_only=True)
class TimedEcho:
    """A process group with one real rank: data of other ranks is copied from the rank's own, between recorded events."""

    name: str
    rank: int
    size: int
    spans: Spans
    any_stream: ClassVar[bool] = False  # copies are timed on the compute stream

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        return self._copied(out, [sent], what)

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> Pending:
        return self._copied(out, pieces, what)

    def _copied(self, out: Tensor, sources: Sequence[Tensor], what: str) -> Pending:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if out.is_cuda else []
        for event in events[:1]:
            event.record()
        for part, source in echoed(out, sources, what):
            part.copy_(source)
        for event in events[1:]:
            event.record()
        if events:
            self.spans.append((events[0], events[1]))
        return Done()


SPANS: Spans = []


class TimedEchoMesh(ls.Mesh):
    """A mesh with one real rank and timed exchanges."""

    def group(self, axis: int | str) -> Any:
        return TimedEcho(name="timed_echo", rank=self.rank, size=self.size, spans=SPANS)


class Clock(measure.Clock):
    """The clock of the calibration (a warm device, calls queued ahead), with exchanges timed separately."""

    def without_exchanges(self, fn: Callable[[], Any], calls: int = 3) -> tuple[float, float]:
        """(milliseconds of a call without its exchanges, milliseconds of its exchanges), medians."""
        fn()
        self._sample(fn, calls)
        samples = [self._sample(fn, calls) for _ in range(self.repeat)]
        return statistics.median(s[0] for s in samples), statistics.median(s[1] for s in samples)

    def _sample(self, fn: Callable[[], Any], calls: int) -> tuple[float, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        SPANS.clear()
        self.keep_busy()
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        exchanges = sum(a.elapsed_time(b) for a, b in SPANS)
        return (start.elapsed_time(end) - exchanges) / calls, exchanges / calls


def timed(call: Callable[[], Tensor], inputs: list[Tensor], clock: Clock, kernels: bool) -> dict[str, Any]:
    """Times of both passes; with `kernels`, also (name, microseconds) of every kernel in order of start."""
    times: dict[str, Any] = {}
    with torch.no_grad():
        times["forward"] = clock.without_exchanges(call)
    out = call()
    grad = torch.randn_like(out)

    def back() -> Any:
        return torch.autograd.grad(out, inputs, grad, retain_graph=True)

    times["backward"] = clock.without_exchanges(back)
    if kernels:
        with torch.no_grad():
            times["kernels"] = {"forward": profiled(call)}
        times["kernels"]["backward"] = profiled(back)
    return times


def profiled(fn: Callable[[], Any]) -> list[tuple[str, float]]:
    """(name, microseconds) of the kernels of a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        fn()
        torch.cuda.synchronize()
    events = sorted((e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    return [(e.name.split("<")[0][-60:], round(e.time_range.elapsed_us(), 1)) for e in events]


def _inputs(tokens: int) -> list[Tensor]:
    return [torch.randn(1, h, tokens, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """The measurement: predictions by `profile`, times of `kernel` by `clock`. `kernels`: record times of single kernels too."""

    profile: Cluster
    kernel: str
    clock: Clock
    kernels: bool


def whole_sequence(name: str, tokens: int, setup: Setup) -> dict[str, Any]:
    """A row of the result: a whole sequence on one device, which tests the kernel's rates alone."""
    mask = WHOLE_MASKS[name](tokens)
    counts = mask.block_table(tokens, block=128).counts()
    rows, full, partial = (HEADS * torch.tensor([float(n)], dtype=torch.float64) for n in (-(-tokens // 128), counts.full, counts.partial))
    predicted = [
        1e3 * float(setup.profile.kernel.seconds(rows=rows, full=full, partial=partial, head_dim=DIM, backward=b)) for b in (False, True)
    ]
    inputs = _inputs(tokens)
    times = timed(lambda: ls.attention(*inputs, mask=mask, kernel=setup.kernel), inputs, setup.clock, False)
    return _row({"mask": name, "tokens": tokens, "ranks": 1, "plan": "kernel alone"}, predicted, times)


def planned(name: str, tokens: int, ranks: int, layout: str, strategy: str, setup: Setup) -> dict[str, Any]:
    """A row of the result: the rank of a plan that is predicted to be busiest."""
    sizes: dict[str, Any] = {"layout": layout, "strategy": strategy, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "overlap": True}
    mask, mesh = MASKS[name](tokens), ls.Mesh.abstract(ranks)
    free = Link(bandwidth=1e18, latency=0.0)
    prediction = report(ls.plan(mask, tokens, mesh, **sizes).data, replace(setup.profile, inside=free, between=free, contention=0.0))
    passes = prediction.timeline.forward, prediction.timeline.backward
    rank = int((passes[0].busy + passes[1].busy).argmax())
    plan = ls.plan(mask, tokens, TimedEchoMesh(axes=mesh.axes, coordinate=(rank,)), **sizes)
    inputs = _inputs(plan.local_len)
    times = timed(lambda: ls.attention(*inputs, plan=plan, kernel=setup.kernel), inputs, setup.clock, setup.kernels)
    row = {"mask": name, "tokens": tokens, "ranks": ranks, "plan": f"{layout[:6]} {strategy}", "rank": rank}
    if setup.kernels:
        w = prediction.work
        row["steps"] = [[round(float(t[rank, i]) / HEADS, 1) for t in (w.full, w.partial, w.active_tiles)] for i in range(w.steps)]
        row["steps_ms"] = [[round(1e3 * float(s), 4) for s in (p.compute[1] - p.compute[0])[rank]] for p in passes]
    return _row(row, [1e3 * float(p.busy[rank]) for p in passes], times)


def _row(row: dict[str, Any], predicted: list[float], times: dict[str, Any]) -> dict[str, Any]:
    measured, copies = [times[p][0] for p in PASSES], [times[p][1] for p in PASSES]
    off = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    both = sum(predicted) / sum(measured) - 1
    kernels = {"kernels": times["kernels"]} if "kernels" in times else {}
    return {**row, "predicted_ms": predicted, "measured_ms": measured, "copies_ms": copies, "off": off, "off_both": both, **kernels}


def line(row: dict[str, Any], *, tested: bool) -> str:
    """A row of the printed table; with `tested`, a prediction that is off by more than WITHIN is marked."""
    parts = "".join(
        f"{p:10.3f}{m:10.3f}{100 * o:+8.1f}%" for p, m, o in zip(row["predicted_ms"], row["measured_ms"], row["off"], strict=True)
    )
    mark = "  MISSED" if tested and abs(row["off_both"]) > WITHIN else ""
    copies = sum(row["copies_ms"])
    return f"{row['mask']:18}{row['tokens']:8d}{row['ranks']:4d}  {row['plan']:17}{parts}{100 * row['off_both']:+8.1f}%{copies:8.2f}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="name or file of a profile, instead of calibrating")
    parser.add_argument("--calibrate", type=Path, help="file for the calibrated profile")
    parser.add_argument("--mask", default="", help="only masks whose name contains this")
    parser.add_argument("--kernel", default="triton")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--kernels", action="store_true", help="with --json: times of single kernels by torch's profiler")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.profile:
        profile = cluster(args.profile)
    else:
        calibrated, lines = measure.measured(name="h200", kernel=args.kernel, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, quick=False)
        assert calibrated is not None
        profile = calibrated
        print("\n".join(lines), flush=True)
        if args.calibrate:
            args.calibrate.write_text(dump(profile), encoding="utf-8")
    about = {
        "bench": "predictions_gpu",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernel": args.kernel,
        "date": datetime.date.today().isoformat(),
    }
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    print(f"{'':49}{'forward, ms':^29}{'backward, ms':^29}{'both':^8}")
    columns = f"{'predicted':>10}{'measured':>10}{'off':>9}"
    print(f"{'mask':18}{'tokens':>8}{'N':>4}  {'plan':17}{columns}{columns}{'off':>9}{'copies':>8}", flush=True)
    clock = Clock(torch.device("cuda"), args.repeat, args.kernel)
    setup = Setup(profile=profile, kernel=args.kernel, clock=clock, kernels=args.kernels and args.json)
    rows: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    for name in (name for name in WHOLE_MASKS if args.mask in name):
        for tokens in LENGTHS:
            whole.append(whole_sequence(name, tokens, setup))
            print(line(whole[-1], tested=False), flush=True)
    for name in (name for name in MASKS if args.mask in name):
        for shape in PLANS:
            rows.append(planned(name, *shape, setup))
            print(line(rows[-1], tested=True), flush=True)
    within = sum(abs(row["off_both"]) <= WITHIN for row in rows)
    print(f"{within} of {len(rows)} plans within {100 * WITHIN:.0f} %, both passes together")
    if args.json:
        print(json.dumps({**about, "profile": dump(profile), "alone": whole, "rows": rows}))


if __name__ == "__main__":
    main()
