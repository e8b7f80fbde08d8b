"""longspan beside the strongest attention kernels for one GPU: flash-attn-4, cudnn.flex_attention, FlexAttention, cuDNN and flash.

    PYTHONPATH=src:. python bench/peers.py [--rows TEXT] [--peers NAME,…] [--json]     measure what is importable
    PYTHONPATH=src:. python bench/peers.py --plot RESULT.txt PICTURE.png              draw a committed result

B 1, bfloat16. TFLOP/s count useful work: 4·D per visible (query, key) pair forward, 2.5 times that backward. `device`: calls enqueued
behind a pause, host time excluded. `as called`: one eager call on an idle device, host time included. Peers take turns in random order;
medians of twenty. Every peer gets its own memory layout ([B, H, S, D] or [B, S, H, D]) and a mask prepared beforehand. `first`: seconds of
the first forward and backward, compilation included. `error`: relative error of out against float64 over 64 rows. `MiB`: peak memory of
forward and backward beyond the inputs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from bench.timing import as_called_ms, device_ms, host_us
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan as ls

PASSES = ("forward", "backward")
SOFTCAP = 30.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem: `kind` names the mask, `value_dim` is the value head dim."""

    kind: str
    tokens: int
    heads: int
    kv_heads: int
    dim: int = 128
    value_dim: int | None = None

    @property
    def dims(self) -> tuple[int, int]:
        return self.dim, self.value_dim or self.dim

    def __str__(self) -> str:
        dims = f"D{self.dim}" if self.value_dim is None else f"D{self.dim}/{self.value_dim}"
        return f"{self.kind} {self.tokens // 1024}k {self.heads}/{self.kv_heads} {dims}"


ROWS = (
    Row(kind="full", tokens=8192, heads=32, kv_heads=32),
    Row(kind="full", tokens=32768, heads=32, kv_heads=8),
    Row(kind="causal", tokens=8192, heads=32, kv_heads=32),
    Row(kind="causal", tokens=32768, heads=32, kv_heads=8),
    Row(kind="causal", tokens=32768, heads=16, kv_heads=16, dim=64),
    Row(kind="causal", tokens=16384, heads=16, kv_heads=4, dim=256),
    Row(kind="causal", tokens=16384, heads=16, kv_heads=16, dim=192, value_dim=128),
    Row(kind="window 1024", tokens=32768, heads=32, kv_heads=8),
    Row(kind="softcap", tokens=16384, heads=32, kv_heads=8),
    Row(kind="documents ~4096", tokens=65536, heads=32, kv_heads=8),
    Row(kind="documents ~512", tokens=65536, heads=32, kv_heads=8),
    Row(kind="causal", tokens=2048, heads=16, kv_heads=16),
    Row(kind="sink 64 + window 2048", tokens=32768, heads=32, kv_heads=8),
    Row(kind="prefix 5000", tokens=32768, heads=32, kv_heads=8),
    Row(kind="own mask", tokens=32768, heads=32, kv_heads=8),
)


def document_lengths(tokens: int, mean: int) -> list[int]:
    """Lengths drawn once (seed 0), exponential around `mean`, that add up to `tokens`."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = 1 + int(-mean * math.log(1 - float(torch.rand((), generator=generator))))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A row's mask in every peer's terms. `intervals` [n, S]: per query the endpoints of visible KV ranges [0, F0) ∪ [F1, F2) …"""

    mask: ls.Mask
    intervals: Tensor | None
    score_mod: Callable[..., Tensor] | None = None
    causal: bool = False
    window: int | None = None
    lengths: list[int] | None = None


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(score / SOFTCAP)


def problem(row: Row) -> Problem:
    i = torch.arange(row.tokens, dtype=torch.int32)
    zero = torch.zeros_like(i)
    if row.kind == "full":
        return Problem(mask=ls.full(), intervals=(zero + row.tokens)[None])
    if row.kind == "causal":
        return Problem(mask=ls.causal(), intervals=(i + 1)[None], causal=True)
    if row.kind == "softcap":
        return Problem(mask=ls.causal(), intervals=None, score_mod=softcap, causal=True)
    if row.kind == "window 1024":
        return Problem(mask=ls.sliding_window(1024), intervals=torch.stack([zero, (i - 1023).clamp(min=0), i + 1]), window=1024)
    if row.kind.startswith("documents"):
        lengths = document_lengths(row.tokens, int(row.kind.split("~")[1]))
        sizes = torch.tensor(lengths)
        starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes).int()
        mask = ls.causal() & ls.documents(lengths=lengths)
        return Problem(mask=mask, intervals=torch.stack([zero, starts, i + 1]), causal=True, lengths=lengths)
    if row.kind.startswith("sink"):
        mask = (ls.prefix(64) | ls.sliding_window(2048)) & ls.causal()
        edge = (i - 2047).clamp(min=0)
        return Problem(mask=mask, intervals=torch.stack([(i + 1).clamp(max=64), edge.clamp(min=64).minimum(i + 1), i + 1]))
    if row.kind.startswith("prefix"):
        return Problem(mask=ls.prefix(5000) | ls.causal(), intervals=(i + 1).clamp(min=5000)[None])
    if row.kind == "own mask":  # local blocks and every eighth block before them, as a user would write it
        own = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & ((q // 512 - kv // 512 < 2) | (kv // 512 % 8 == 0)))
        return Problem(mask=own, intervals=None)
    raise ValueError(f"no row of kind {row.kind!r}")


def visible_pairs(row: Row, task: Problem) -> float:
    table = task.mask.block_table(row.tokens)
    if task.intervals is not None:
        ends = task.intervals.double()
        total = ends[0].sum()
        for n in range(1, len(ends), 2):
            total += (ends[n + 1] - ends[n]).clamp(min=0).sum()
        return float(total)
    if task.causal:
        return row.tokens * (row.tokens + 1) / 2
    counts = table.counts()
    return (counts.full + counts.partial / 2) * 128 * 128  # block-shaped: partial tiles are the causal diagonal


# -------------------------------------------------------------------------------------------------------------------- peers


class Unsupported(Exception):
    """A peer cannot compute a row; the text says why."""


Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def transposed(t: Tensor) -> Tensor:
    """[B, H, S, D] → contiguous [B, S, H, D]."""
    return t.detach().transpose(1, 2).contiguous()


def longspan_call(row: Row, task: Problem, inputs: list[Tensor]) -> Run:
    return lambda q, k, v: ls.attention(q, k, v, mask=task.mask, score_mod=task.score_mod)


def sdpa_call(backend: SDPBackend) -> Callable[[Row, Problem, list[Tensor]], Run]:
    def prepare(row: Row, task: Problem, inputs: list[Tensor]) -> Run:
        if row.kind not in ("full", "causal"):
            raise Unsupported("full and causal masks only")

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=task.causal, enable_gqa=row.heads != row.kv_heads)

        return run

    return prepare


def flex_call(row: Row, task: Problem, inputs: list[Tensor]) -> Run:
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # backward runs many times on one graph
    blocks = None
    if row.kind != "full":
        on_device = (
            ls.documents(ids=torch.repeat_interleave(torch.tensor(task.lengths)).cuda()) & ls.causal() if task.lengths else task.mask
        )
        blocks = torch.compile(create_block_mask)(on_device, None, None, row.tokens, row.tokens, device="cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score_mod=task.score_mod, block_mask=blocks, enable_gqa=row.heads != row.kv_heads)


def fa4_call(row: Row, task: Problem, inputs: list[Tensor]) -> Run:
    interface = import_module("flash_attn.cute.interface")
    options: dict[str, Any] = {"softcap": SOFTCAP} if task.score_mod is softcap else {}
    if task.lengths is not None:
        ends = F.pad(torch.tensor(task.lengths).cumsum(0), (1, 0)).int().cuda()
        longest = max(task.lengths)

        def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = interface.flash_attn_varlen_func(
                q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
            )
            return (out[0] if isinstance(out, tuple) else out)[None]

        return varlen
    if task.window is not None:
        options |= {"window_size": (task.window - 1, 0)}
    elif task.causal:
        options |= {"causal": True}
    elif row.kind != "full":
        raise Unsupported("this mask would need a mask written in its own language")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = interface.flash_attn_func(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return run


def cudnn_flex_call(row: Row, task: Problem, inputs: list[Tensor]) -> Run:
    module = import_module("cudnn.flex_attention")
    if task.intervals is None:
        raise Unsupported("no score_mod, and masks as KV intervals only")
    plan = module.create_mask_plan(task.intervals[None].contiguous().cuda(), *inputs, build_backward=True)
    return lambda q, k, v: module.flex_attn_func(q, k, v, mask_plan=plan)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """`package`: what must be importable. `tokens_first`: whether tensors are [B, S, H, D]."""

    name: str
    package: str
    distribution: str
    prepare: Callable[[Row, Problem, list[Tensor]], Run]
    tokens_first: bool = False

    def missing(self) -> str | None:
        try:
            import_module(self.package)
        except Exception as error:  # a broken install fails in many ways
            return f"{self.distribution}: {type(error).__name__}: {error}"
        return None

    @property
    def version(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:  # run from a checkout
            return str(getattr(import_module(self.package), "__version__", "?"))


PEERS = (
    Peer(name="longspan", package="longspan", distribution="longspan", prepare=longspan_call),
    Peer(name="fa4", package="flash_attn.cute.interface", distribution="flash-attn-4", prepare=fa4_call, tokens_first=True),
    Peer(
        name="cudnn.flex", package="cudnn.flex_attention", distribution="nvidia-cudnn-frontend", prepare=cudnn_flex_call, tokens_first=True
    ),
    Peer(name="flex", package="torch", distribution="torch", prepare=flex_call),
    Peer(name="cudnn", package="torch", distribution="torch", prepare=sdpa_call(SDPBackend.CUDNN_ATTENTION)),
    Peer(name="flash", package="torch", distribution="torch", prepare=sdpa_call(SDPBackend.FLASH_ATTENTION)),
)


# -------------------------------------------------------------------------------------------------------------------- measuring


def reference(row: Row, task: Problem, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Out of some query rows in float64 [H, rows, E]."""
    scores = torch.einsum("hqd,hkd->hqk", q[0, :, rows].double(), k[0].double().repeat_interleave(row.heads // row.kv_heads, 0))
    scores *= row.dim**-0.5
    i, j = rows[:, None], torch.arange(row.tokens, device="cuda")[None]
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    if task.score_mod is not None:
        scores = task.score_mod(scores, zero, zero, i, j)
    if task.lengths is not None:
        ids = torch.repeat_interleave(torch.tensor(task.lengths)).cuda()
        seen = (i >= j) & (ids[i] == ids[j])
    else:
        seen = torch.broadcast_to(task.mask(zero, zero, i, j), (len(rows), row.tokens))
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return torch.einsum("hqk,hke->hqe", weights, v[0].double().repeat_interleave(row.heads // row.kv_heads, 0))


def measure(row: Row, peers: list[Peer]) -> dict[str, Any]:
    task, (dim, value_dim) = problem(row), row.dims
    shapes = ((row.heads, dim), (row.kv_heads, dim), (row.kv_heads, value_dim), (row.heads, value_dim))
    *inputs, grad = (torch.randn(1, h, row.tokens, d, device="cuda", dtype=torch.bfloat16) for h, d in shapes)
    rows = torch.randint(row.tokens, (64,), device="cuda")
    want = reference(row, task, *inputs, rows)
    flop = 2.0 * (dim + value_dim) * row.heads * visible_pairs(row, task)
    result: dict[str, Any] = {"row": str(row), "skipped": {}, "first_s": {}, "error": {}, "peak_mib": {}, "mask_ms": {}}
    calls: dict[str, dict[str, Callable[[], Any]]] = {step: {} for step in PASSES}
    for peer in peers:
        order = transposed if peer.tokens_first else torch.Tensor.detach
        leaves, grad_out = [order(t).requires_grad_() for t in inputs], order(grad)
        try:
            run = peer.prepare(row, task, leaves)
            torch.cuda.synchronize()
            start, before = time.perf_counter(), torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = run(*leaves)
            grads = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
            torch.cuda.synchronize()
        except Unsupported as reason:
            result["skipped"][peer.name] = str(reason)
            continue
        except Exception as error:
            result["skipped"][peer.name] = f"{type(error).__name__}: {str(error)[:160]}"
            continue
        result["first_s"][peer.name] = time.perf_counter() - start
        result["peak_mib"][peer.name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        start = time.perf_counter()
        peer.prepare(row, task, leaves)
        torch.cuda.synchronize()
        result["mask_ms"][peer.name] = 1e3 * (time.perf_counter() - start)
        heads_first = out.transpose(1, 2) if peer.tokens_first else out
        error = (heads_first.detach()[0][:, rows].double() - want).norm() / want.norm()
        result["error"][peer.name] = float(error)
        assert all(bool(t.isfinite().all()) for t in (out, *grads)), f"{row} {peer.name}: non-finite results"
        calls["forward"][peer.name] = lambda run=run, leaves=leaves: run(*leaves)
        calls["backward"][peer.name] = lambda out=out, leaves=leaves, g=grad_out: torch.autograd.grad(out, leaves, g, retain_graph=True)
        del grads
    for step, factor in zip(PASSES, (1.0, 2.5), strict=True):
        for column, clock in (("device", device_ms), ("called", as_called_ms)):
            result[f"{step}_{column}"] = {name: factor * flop / ms / 1e9 for name, ms in clock(calls[step]).items()}
    result["host_us"] = {step: {name: host_us(call, repeat=20) for name, call in calls[step].items()} for step in PASSES}
    return result


def ratio(row: dict[str, Any], step: str, column: str) -> float | None:
    """longspan's speed over the best peer's."""
    speeds = row[f"{step}_{column}"]
    others = [speed for name, speed in speeds.items() if name != "longspan"]
    return speeds["longspan"] / max(others) if others and "longspan" in speeds else None


def line(row: dict[str, Any], names: list[str]) -> str:
    text = f"{row['row']:38}"
    for column in ("device", "called"):
        for step in PASSES:
            speeds, best = row[f"{step}_{column}"], ratio(row, step, column)
            text += " |" + "".join(f"{speeds[n]:6.0f}" if n in speeds else f"{'-':>6}" for n in names)
            text += f"{best:6.2f}" if best is not None else f"{'-':>6}"
    return text


def plot(result: Path, picture: Path) -> None:
    from matplotlib import pyplot

    data = json.loads(result.read_text(encoding="utf-8").strip().splitlines()[-1])
    rows, names = data["rows"], list(data["versions"])
    figure, axes = pyplot.subplots(2, 1, figsize=(13, 8), sharex=True, layout="constrained")
    width = 0.8 / len(names)
    for axis, step in zip(axes, PASSES, strict=True):
        for n, name in enumerate(names):
            bars = [(i, row[f"{step}_device"][name]) for i, row in enumerate(rows) if name in row[f"{step}_device"]]
            places = [i + width * (n - (len(names) - 1) / 2) for i, _ in bars]
            axis.bar(places, [speed for _, speed in bars], width=width * 0.95, label=f"{name} {data['versions'][name]}")
        axis.set_ylabel(f"{step}, TFLOP/s")
        axis.margins(y=0.18)
    axes[0].legend(ncols=3, fontsize="small", loc="upper right")
    axes[1].set_xticks(range(len(rows)), [row["row"] for row in rows], rotation=45, ha="right", fontsize=8)
    axes[0].set_title(f"{data['device']}, torch {data['torch']}, triton {data['triton']}, {data['date']}; bfloat16, device time")
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--peers", default="", help="only these peers, separated by commas")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("RESULT", "PICTURE"))
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return
    if not torch.cuda.is_available():
        sys.exit("this bench needs a CUDA GPU")
    import triton

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted = [p for p in PEERS if not args.peers or p.name in args.peers.split(",")]
    absent = {p.name: reason for p in wanted if (reason := p.missing()) is not None}
    peers = [p for p in wanted if p.name not in absent]
    about = {
        "bench": "peers",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "versions": {p.name: p.version for p in peers},
        "missing": absent,
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    names = [p.name for p in peers]
    columns = "".join(f"{n[:6]:>6}" for n in names) + f"{'ratio':>6}"
    print(f"{'TFLOP/s':38}" + "".join(f" |{f'{s}, {c}':^{len(columns)}}" for c in ("device", "as called") for s in PASSES))
    print(f"{'':38}" + f" |{columns}" * 4, flush=True)
    rows = []
    try:
        for row in (r for r in ROWS if args.rows in str(r)):
            rows.append(measure(row, peers))
            print(line(rows[-1], names), flush=True)
    except KeyboardInterrupt:  # also SIGTERM: the rows measured so far are printed
        print(f"stopped after {len(rows)} rows")
    for row in rows:
        details = [f"{n} {row['error'][n]:.1e}, {row['peak_mib'][n]:.0f} MiB, first {row['first_s'][n]:.1f} s, "
                   f"host {row['host_us']['forward'][n]:.0f}/{row['host_us']['backward'][n]:.0f} µs" for n in row["error"]]  # fmt: skip
        print(f"{row['row']}: " + "; ".join(details + [f"{n} skipped ({why})" for n, why in row["skipped"].items()]))
    if args.json:
        print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
