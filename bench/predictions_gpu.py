"""Predicted against measured on one GPU: the compute of the busiest rank of 12 plans over 4 masks.

    PYTHONPATH=src:. python bench/predictions_gpu.py [--profile FILE] [--calibrate FILE] [--mask NAME] [--kernels] [--json]

One GPU plays the busiest rank of each mesh: what others would send is copied from its own rows. The prediction is of computing alone, and
so is the measurement: exchanges run in the stream that computes, each between two events, and what they took is taken off. All else
that the rank's device does counts: kernels, packing, folding, adding up what comes home. "copies": what was taken off.

Without --profile the kernel is calibrated first, on squares and triangles only, in the same run, and --calibrate writes that profile.
Neither the plans nor the whole sequences under "kernel alone" take any part in it.
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
from torch import Tensor

import longspan as ls
from link import echoed
from longspan._comm.group import Done, Pending
from longspan._cost.clusters import cluster, dump
from longspan._cost.rates import Cluster, Link
from longspan._cost.report_data import report
from longspan.cli import measure

HEADS, KV_HEADS, DIM = 32, 8, 128
WITHIN = 0.10
PASSES = ("forward", "backward")


def _documents(tokens: int) -> ls.Mask:
    generator, found, left = torch.Generator().manual_seed(3), [], tokens
    while left:
        found.append(min(left, 64 + int(torch.empty(()).log_normal_(8.0, 1.2, generator=generator))))
        left -= found[-1]
    return ls.causal() & ls.documents(lengths=found)


def _equal(tokens: int, length: int) -> ls.Mask:
    whole, rest = divmod(tokens, length)
    return ls.causal() & ls.documents(lengths=[length] * whole + [rest] * (rest > 0))


MASKS: dict[str, Callable[[int], ls.Mask]] = {
    "causal": lambda tokens: ls.causal(),
    "documents": _documents,
    "window 4096": lambda tokens: ls.causal() & ls.sliding_window(4096),
    "prefix": lambda tokens: ls.causal() | ls.prefix(tokens // 4),
}
PLANS = ((65536, 8, "head_tail", "ring"), (65536, 8, "auto", "exchange"), (131072, 16, "round_robin", "allgather"))
ALONE: dict[str, Callable[[int], ls.Mask]] = {
    **MASKS,
    **{f"documents of {n}": partial(_equal, length=n) for n in (300, 700, 1500, 3100, 6300)},
    "window 300": lambda tokens: ls.causal() & ls.sliding_window(300),
    "window 1100": lambda tokens: ls.causal() & ls.sliding_window(1100),
}
LENGTHS = (8192, 32768)

Spans = list[tuple[torch.cuda.Event, torch.cuda.Event]]


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A group of which one rank exists: what it expects from others is copied from its own rows, between events that are kept."""

    name: str
    rank: int
    size: int
    spans: Spans
    any_stream: ClassVar[bool] = False  # copies are timed on the stream that computes

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


class ApartMesh(ls.Mesh):
    def group(self, axis: int | str) -> Any:
        return Apart(name="apart", rank=self.rank, size=self.size, spans=SPANS)


class Clock(measure.Clock):
    """The clock that calibrates: the device as warm, calls queued ahead."""

    def apart(self, fn: Callable[[], Any], calls: int = 3) -> tuple[float, float]:
        """(milliseconds of a call without its exchanges, milliseconds of these), medians."""
        fn()
        self._apart(fn, calls)
        found = [self._apart(fn, calls) for _ in range(self.repeat)]
        return statistics.median(f[0] for f in found), statistics.median(f[1] for f in found)

    def _apart(self, fn: Callable[[], Any], calls: int) -> tuple[float, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        SPANS.clear()
        self.keep_busy()
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        apart = sum(a.elapsed_time(b) for a, b in SPANS)
        return (start.elapsed_time(end) - apart) / calls, apart / calls


def timed(call: Callable[[], Tensor], inputs: list[Tensor], clock: Clock, kernels: bool) -> dict[str, Any]:
    """Both passes; with `kernels`, also (name, microseconds) of every kernel in the order of their beginning."""
    found: dict[str, Any] = {}
    with torch.no_grad():
        found["forward"] = clock.apart(call)
    out = call()
    grad = torch.randn_like(out)

    def back() -> Any:
        return torch.autograd.grad(out, inputs, grad, retain_graph=True)

    found["backward"] = clock.apart(back)
    if kernels:
        with torch.no_grad():
            found["kernels"] = {"forward": profiled(call)}
        found["kernels"]["backward"] = profiled(back)
    return found


def profiled(fn: Callable[[], Any]) -> list[tuple[str, float]]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        fn()
        torch.cuda.synchronize()
    events = sorted((e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    return [(e.name.split("<")[0][-60:], round(e.time_range.elapsed_us(), 1)) for e in events]


def _inputs(tokens: int) -> list[Tensor]:
    return [torch.randn(1, h, tokens, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)]


def alone(name: str, tokens: int, profile: Cluster, kernel: str, clock: Clock) -> dict[str, Any]:
    """A whole sequence on one device: how far the kernel's table alone is off."""
    mask = ALONE[name](tokens)
    counts = mask.block_table(tokens, block=128).counts()
    rows, full, partial = (HEADS * torch.tensor([float(n)], dtype=torch.float64) for n in (-(-tokens // 128), counts.full, counts.partial))
    guess = [1e3 * float(profile.kernel.seconds(rows=rows, full=full, partial=partial, head_dim=DIM, backward=b)) for b in (False, True)]
    inputs = _inputs(tokens)
    took = timed(lambda: ls.attention(*inputs, mask=mask, kernel=kernel), inputs, clock, False)
    return _row({"mask": name, "tokens": tokens, "ranks": 1, "plan": "kernel alone"}, guess, took)


def planned(
    name: str, tokens: int, ranks: int, layout: str, strategy: str, profile: Cluster, kernel: str, clock: Clock, kernels: bool
) -> dict[str, Any]:
    """The busiest rank of a plan, by the prediction."""
    sizes: dict[str, Any] = {"layout": layout, "strategy": strategy, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "overlap": True}
    mask, mesh = MASKS[name](tokens), ls.Mesh.abstract(ranks)
    free = Link(bandwidth=1e18, latency=0.0)
    found = report(ls.plan(mask, tokens, mesh, **sizes).data, replace(profile, inside=free, between=free, contention=0.0))
    passes = found.timeline.forward, found.timeline.backward
    rank = int((passes[0].busy + passes[1].busy).argmax())
    plan = ls.plan(mask, tokens, ApartMesh(axes=mesh.axes, coordinate=(rank,)), **sizes)
    inputs = _inputs(plan.local_len)
    took = timed(lambda: ls.attention(*inputs, plan=plan, kernel=kernel), inputs, clock, kernels)
    row = {"mask": name, "tokens": tokens, "ranks": ranks, "plan": f"{layout[:6]} {strategy}", "rank": rank}
    w = found.work
    if kernels:
        row["steps"] = [[round(float(t[rank, i]) / HEADS, 1) for t in (w.full, w.partial, w.busy)] for i in range(w.steps)]  # type: ignore[index]
        row["steps_ms"] = [[round(1e3 * float(s), 4) for s in (p.compute[1] - p.compute[0])[rank]] for p in passes]
    return _row(row, [1e3 * float(p.busy[rank]) for p in passes], took)


def _row(row: dict[str, Any], guess: list[float], took: dict[str, Any]) -> dict[str, Any]:
    real, copies = [took[p][0] for p in PASSES], [took[p][1] for p in PASSES]
    off = [p / m - 1 for p, m in zip(guess, real, strict=True)]
    both = sum(guess) / sum(real) - 1
    more = {"kernels": took["kernels"]} if "kernels" in took else {}
    return {**row, "predicted_ms": guess, "measured_ms": real, "copies_ms": copies, "off": off, "off_both": both, **more}


def line(row: dict[str, Any], held: bool) -> str:
    parts = "".join(
        f"{p:10.3f}{m:10.3f}{100 * o:+8.1f}%" for p, m, o in zip(row["predicted_ms"], row["measured_ms"], row["off"], strict=True)
    )
    mark = "  MISSED" if held and abs(row["off_both"]) > WITHIN else ""
    copies = sum(row["copies_ms"])
    return f"{row['mask']:18}{row['tokens']:8d}{row['ranks']:4d}  {row['plan']:17}{parts}{100 * row['off_both']:+8.1f}%{copies:8.2f}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="a profile by name or file, in place of calibrating")
    parser.add_argument("--calibrate", type=Path, help="write the calibrated profile here")
    parser.add_argument("--mask", default="", help="only masks whose name contains this")
    parser.add_argument("--kernel", default="triton")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--kernels", action="store_true", help="with --json: the times of single kernels, by torch's profiler")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.profile:
        profile = cluster(args.profile)
    else:
        found, lines = measure.measured(name="h200", kernel=args.kernel, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, quick=False)
        assert found is not None
        profile = found
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
    clock, rows, whole = Clock(torch.device("cuda"), args.repeat, args.kernel), [], []
    for name in (name for name in ALONE if args.mask in name):
        for tokens in LENGTHS:
            whole.append(alone(name, tokens, profile, args.kernel, clock))
            print(line(whole[-1], False), flush=True)
    for name in (name for name in MASKS if args.mask in name):
        for shape in PLANS:
            rows.append(planned(name, *shape, profile, args.kernel, clock, args.kernels and args.json))
            print(line(rows[-1], True), flush=True)
    kept = sum(abs(row["off_both"]) <= WITHIN for row in rows)
    print(f"{kept} of {len(rows)} plans within {100 * WITHIN:.0f} %, both passes together")
    if args.json:
        print(json.dumps({**about, "profile": dump(profile), "alone": whole, "rows": rows}))


if __name__ == "__main__":
    main()
