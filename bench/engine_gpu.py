"""Efficiency of one rank of N: the time of 1/N of the whole sequence on one device over the time of the rank's part.

    PYTHONPATH=src:. python bench/engine_gpu.py [--case S N] [--kernel NAME] [--kv-heads N] [--way NAME …] [--link KIND …]
        [--profile] [--json]

Causal, B 1, H 32, D 128, bfloat16, head-tail layout. q, k, v are [B, S, H, D] in memory, as projections write them; torch's ring gets
[B, H, S, D], because it would copy them. One GPU runs single ranks of the mesh: the first, the middle and the last. The slowest counts.
KV of other ranks are copied from the rank's own KV on the same GPU, or, in rows with "no copies", not at all (see bench/link.py). Rows
without copies measure kernels, packing, gradient sums and conversions. torch's ring (FlashAttention-2 and cuDNN) runs the same way.

    exchange, 1 stage    one exchange of all KV; memory grows with the sequence
    exchange at once     the same, local KV computed together with it, in one launch
    joined               local KV computed together with the first KV that arrives: one merge less, the first exchange is not overlapped
    bf16 grads           partial gradients are sent in bfloat16
    eff                  from device time: calls are queued ahead, host time excluded
    wall                 from wall time: host time included, nothing else keeps the device busy
    host                 microseconds of host time per call, measured while the device is busy with something else
    peak                 MiB that a rank allocates beyond q, k, v in forward and backward, and as a multiple of its shard of q

`--profile` prints the kernels of the first and the last rank instead.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bench.link import KINDS, EchoMesh, Link
from torch import Tensor
from torch.autograd import DeviceType

import longspan as ls

HEADS, DIM = 32, 128
CASES = ((32768, 8), (131072, 8), (131072, 32))
STEPS = ("forward", "backward")
WAYS: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"},
    "exchange": {"strategy": "exchange"},
    "exchange, 1 stage": {"strategy": "exchange", "stages": 1},
    "exchange at once": {"strategy": "exchange", "stages": 1, "overlap": False},
    "ring joined": {"strategy": "ring", "overlap": False},
    "exchange joined": {"strategy": "exchange", "overlap": False},
    "ring bf16 grads": {"strategy": "ring", "grad_reduce_dtype": torch.bfloat16},
    "exchange bf16 grads": {"strategy": "exchange", "grad_reduce_dtype": torch.bfloat16},
}
PROFILED_KERNELS = 12  # kernels listed in a profile


class Clock:
    """Median milliseconds of a call: device time, wall time and host time."""

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat

    def __call__(self, fn: Callable[[], Any]) -> dict[str, float]:
        fn()
        once, _ = self._time(fn, 1, 1, ahead=False)
        # Long calls vary little: measure one call, three times.
        calls, repeat = (3, self.repeat) if once < 50 else (1, min(3, self.repeat))
        device, host = self._time(fn, calls, repeat, ahead=True)
        wall, _ = self._time(fn, calls, repeat, ahead=False)
        return {"device": device, "wall": wall, "host": host}

    def _time(self, fn: Callable[[], Any], calls: int, repeat: int, *, ahead: bool) -> tuple[float, float]:
        """(milliseconds on the device, on the host) of a call. ahead: all calls are queued while the device sleeps."""
        device, host = [], []
        for _ in range(repeat):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            if ahead:
                torch.cuda._sleep(120_000_000)  # about 60 ms for the host to queue all calls; sleeping keeps the device cool
            start.record()
            begin = time.perf_counter()
            for _ in range(calls):
                fn()
            host.append(1e3 * (time.perf_counter() - begin) / calls)
            end.record()
            end.synchronize()
            device.append(start.elapsed_time(end) / calls)
        return statistics.median(device), statistics.median(host)


def qkv(tokens: int, kv_heads: int = HEADS) -> list[Tensor]:
    """q, k, v [B, H, S, D], in memory [B, S, H, D] as projections write them."""
    torch.manual_seed(0)
    heads = (HEADS, kv_heads, kv_heads)
    return [torch.randn(1, tokens, h, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for h in heads]


def contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous [B, H, S, D], which torch's ring sends without a copy."""
    return [t.detach().contiguous() for t in tensors]


def both_passes(call: Callable[[], Tensor], inputs: list[Tensor], clock: Clock) -> dict[str, dict[str, float]]:
    """Times of forward (without saved tensors) and of backward, and peak memory of both."""
    with torch.no_grad():
        forward = clock(call)
    out = call()
    grad = torch.randn_like(out)
    backward = clock(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))
    memory = peak_mib(lambda: torch.autograd.grad(call(), inputs, grad))
    return {"forward": forward, "backward": backward, "memory": {"peak": memory}}


def peak_mib(fn: Callable[[], Any]) -> float:
    """Peak memory of a call in MiB, beyond memory allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def rank_call(tokens: int, ranks: int, rank: int, way: str, kernel: str, kv_heads: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """(the attention call of one rank, its [q, k, v])."""
    mesh = EchoMesh(axes=ls.Mesh.abstract(ranks).axes, coordinate=(rank,))
    plan = ls.plan(ls.causal(), tokens, mesh, layout="head_tail", heads=HEADS, kv_heads=kv_heads, head_dim=DIM, **WAYS[way])
    inputs = qkv(plan.local_len, kv_heads)
    return lambda: ls.attention(*inputs, plan=plan, kernel=kernel), inputs


def slowest_rank(tokens: int, ranks: int, way: str, kernel: str, kv_heads: int, clock: Clock) -> dict[str, dict[str, float]]:
    """Times and memory of the slowest of three ranks."""
    by_rank = []
    for rank in sorted({0, ranks // 2, ranks - 1}):
        call, inputs = rank_call(tokens, ranks, rank, way, kernel, kv_heads)
        kind, EchoMesh.link.kind = EchoMesh.link.kind, "copy"
        call()  # the first call compares the arguments of all ranks, which needs copied data
        EchoMesh.link.kind = kind
        by_rank.append(both_passes(call, inputs, clock))
    worst: dict[str, dict[str, float]] = {s: {k: max(r[s][k] for r in by_rank) for k in by_rank[0][s]} for s in STEPS}
    if EchoMesh.link.kind == "copy":  # otherwise receive buffers are shared and not counted
        worst["memory"] = {"peak": max(r["memory"]["peak"] for r in by_rank)}
    EchoMesh.link.buffers.clear()
    return worst


def profile(title: str, call: Callable[[], Tensor], inputs: list[Tensor]) -> None:
    """Print the kernels of one forward and one backward by name: microseconds and calls, the longest first."""
    out = call()
    grad = torch.randn_like(out)
    torch.autograd.grad(out, inputs, grad)
    out = call()
    steps: dict[str, Callable[[], Any]] = {"forward": call, "backward": lambda: torch.autograd.grad(out, inputs, grad)}
    for step, fn in steps.items():
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profiler:
            fn()
            torch.cuda.synchronize()
        spans: dict[str, list[float]] = {}
        device = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
        for event in device:
            spans.setdefault(event.name, []).append(event.time_range.elapsed_us())
        whole = max(e.time_range.end for e in device) - min(e.time_range.start for e in device) if device else 0.0
        print(f"{title}, {step}: {whole:.0f} µs from the first kernel to the last, {sum(map(sum, spans.values())):.0f} µs in kernels")
        for name, times in sorted(spans.items(), key=lambda item: -sum(item[1]))[:PROFILED_KERNELS]:
            print(f"{sum(times):12.1f} µs{len(times):5d} ×  {name[:110]}")
    print(flush=True)


def profiles(cases: Sequence[tuple[int, int]], ways: Sequence[str], kernel: str, kv_heads: int) -> None:
    """Print profiles of the whole sequence, and of the first and the last rank."""
    for tokens, ranks in cases:
        inputs = qkv(tokens, kv_heads)
        profile(f"{tokens} on one device", lambda inputs=inputs: ls.attention(*inputs, mask=ls.causal(), kernel=kernel), inputs)
        del inputs
        for way in ways:
            for rank in (0, ranks - 1):
                profile(f"{tokens} on {ranks}, {way}, rank {rank}", *rank_call(tokens, ranks, rank, way, kernel, kv_heads))


def torch_ring(tokens: int, ranks: int, backend: str, clock: Clock, known: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(times of the whole sequence, of the slowest rank) of torch's ring, with copies for collectives. `known`: cached whole times."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp

    aten = torch.ops.aten
    if backend == "flash":
        op, back, options = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward.default, {}
    else:
        op, back = aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward.default
        options = {"attn_bias": None, "compute_log_sumexp": True, "return_debug_mask": False}
    options = {**options, "dropout_p": 0.0}

    def saved(r: Any) -> dict[str, Any]:
        bias = {} if backend == "flash" else {"attn_bias": None}
        names = {"cum_seq_q": r[2], "cum_seq_k": r[3], "max_q": r[4], "max_k": r[5], "philox_seed": r[6], "philox_offset": r[7]}
        return {**names, **bias, "dropout_p": 0.0}

    cp.ft_c.all_gather_single = cp.ft_c.all_gather_tensor = lambda t, gather_dim=0, group=None: _copies(t, ranks)  # type: ignore[assignment]
    cp.ft_c.permute_tensor = lambda t, d, g=None: _copies(t)  # type: ignore[assignment]
    cp._maybe_wait = lambda t: (EchoMesh.link.wait(), t)[1]  # type: ignore[assignment]
    cp.dist.get_world_size = lambda g=None: ranks  # type: ignore[assignment]
    cp.dist.ProcessGroup = object  # type: ignore[assignment,misc]
    if (tokens, backend) not in known:
        known[tokens, backend] = _times(
            lambda q, k, v: op(q, k, v, is_causal=True, **options),
            lambda g, q, k, v, r: back(grad_out=g, query=q, key=k, value=v, out=r[0], logsumexp=r[1], is_causal=True, **saved(r)),
            contiguous(qkv(tokens)),
            clock,
        )
    whole = known[tokens, backend]
    by_rank = []
    for rank in sorted({0, ranks // 2, ranks - 1}):
        cp.dist.get_rank = lambda g=None, rank=rank: rank  # type: ignore[assignment]
        by_rank.append(
            _times(
                lambda q, k, v: cp._templated_ring_attention(object(), 2, op, q, k, v, is_causal=True, **options),
                lambda g, q, k, v, r: cp._templated_ring_attention_backward(
                    object(), 2, back, grad_out=g, grad_out_name="grad_out", query=q, key=k, value=v, out=r[0], logsumexp=r[1],
                    is_causal=True, **saved(r),
                ),
                contiguous(qkv(tokens // ranks)),
                clock,
            )
        )  # fmt: skip
    return whole, {s: {k: max(r[s][k] for r in by_rank) for k in by_rank[0][s]} for s in STEPS}


def _copies(t: Tensor, times: int = 1) -> Tensor:
    """`times` copies of a flat tensor, concatenated; copied on the link's stream, as an exchange is."""
    out = EchoMesh.link.receive_buffer(t, (times * t.shape[0], *t.shape[1:]))
    EchoMesh.link.move([(part, t) for part in out.chunk(times)])
    for tensor in (t, out):
        tensor.record_stream(EchoMesh.link.stream)
    return out


def _times(forward: Callable[..., Any], backward: Callable[..., Any], inputs: list[Tensor], clock: Clock) -> dict[str, dict[str, float]]:
    """Times of a forward call and of its backward."""
    result = forward(*inputs)
    grad = torch.randn_like(result[0])
    return {"forward": clock(lambda: forward(*inputs)), "backward": clock(lambda: backward(grad, *inputs, result))}


def row(name: str, tokens: int, ranks: int, whole: dict[str, Any], rank: dict[str, Any]) -> dict[str, Any]:
    """One row of the result: a rank against 1/N of the whole sequence."""
    out: dict[str, Any] = {"name": name, "tokens": tokens, "ranks": ranks}
    for s in STEPS:
        for k in ("device", "wall"):
            out[f"{s}_{k}_ms"] = rank[s][k]
            out[f"{s}_{k}_efficiency"] = whole[s]["device"] / ranks / rank[s][k]
        out[f"{s}_whole_ms"], out[f"{s}_host_us"] = whole[s]["device"], 1e3 * rank[s]["host"]
    if "memory" in rank:
        out["peak_mib"], out["shard_mib"] = rank["memory"]["peak"], tokens // ranks * HEADS * DIM * 2 / 2**20
    return out


def line(r: dict[str, Any]) -> str:
    """A row of the printed table."""
    parts = []
    for s in STEPS:
        ideal, rank, device, wall = (r[f"{s}_{k}"] for k in ("whole_ms", "device_ms", "device_efficiency", "wall_efficiency"))
        parts.append(f"{ideal / r['ranks']:8.3f}{rank:8.3f}{device:6.2f}{wall:6.2f}{r[f'{s}_host_us']:7.0f}")
    memory = f" |{r['peak_mib']:7.0f} = {r['peak_mib'] / r['shard_mib']:4.1f} × q" if "peak_mib" in r else ""
    return f"{r['tokens']:7d}{r['ranks']:4d}  {r['name']:44} |{parts[0]} |{parts[1]}{memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, nargs=2, metavar=("S", "N"), help="only this number of tokens and ranks")
    parser.add_argument("--kernel", default="triton")
    parser.add_argument("--kv-heads", type=int, default=HEADS, help="KV heads; with fewer than 32, torch's ring is skipped")
    parser.add_argument("--step-tokens", type=int, help="minimum KV tokens of a step")
    parser.add_argument("--way", nargs="+", choices=list(WAYS), default=list(WAYS), help="only these rows of longspan")
    parser.add_argument("--link", nargs="+", choices=KINDS, default=list(KINDS), help="stand-ins for the network")
    parser.add_argument("--without-torch", action="store_true", help="skip torch's ring")
    parser.add_argument("--profile", action="store_true", help="print kernels instead of times")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = [tuple(args.case)] if args.case else list(CASES)
    if args.step_tokens:
        importlib.import_module("longspan._plan.schedule").STAGE_TOKENS = args.step_tokens  # type: ignore[attr-defined]
    EchoMesh.use(Link("copy"))
    about = {
        "bench": "engine_gpu",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernel": args.kernel,
        "heads": f"{HEADS}/{args.kv_heads}",
        "date": datetime.date.today().isoformat(),
    }
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    if args.profile:
        profiles(cases, args.way, args.kernel, args.kv_heads)
        return
    columns = f"{'ideal':>8}{'rank':>8}{'eff':>6}{'wall':>6}{'host':>7}"
    print(f"{'':57} |{'forward, ms; host µs':^35} |{'backward, ms; host µs':^35} | peak MiB, both passes")
    print(f"{'tokens':>7}{'N':>4}  {'':44} |{columns} |{columns}", flush=True)
    clock, rows = Clock(args.repeat), []
    known: dict[Any, Any] = {}
    for tokens, ranks in cases:
        if tokens not in known:
            inputs = qkv(tokens, args.kv_heads)
            known[tokens] = both_passes(lambda inputs=inputs: ls.attention(*inputs, mask=ls.causal(), kernel=args.kernel), inputs, clock)
            del inputs
        whole = known[tokens]
        for kind in args.link:
            EchoMesh.link.kind, suffix = kind, "" if kind == "copy" else ", no copies"
            for way in args.way:
                rows.append(
                    row(
                        f"longspan {way}{suffix}", tokens, ranks, whole, slowest_rank(tokens, ranks, way, args.kernel, args.kv_heads, clock)
                    )
                )
                print(line(rows[-1]), flush=True)
            if not args.without_torch and args.kv_heads == HEADS:
                for backend in ("flash", "cudnn"):
                    rows.append(row(f"torch ring {backend}{suffix}", tokens, ranks, *torch_ring(tokens, ranks, backend, clock, known)))
                    print(line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
