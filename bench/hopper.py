"""longspan on a Hopper GPU against cuDNN, FlashAttention-2 and compiled FlexAttention, forward and backward.

    PYTHONPATH=src:. python bench/hopper.py [--rows TEXT] [--no-flex] [--json]     measure
    PYTHONPATH=src:. python bench/hopper.py --plot RESULT.txt PICTURE.png          plot a result

B 1, bfloat16. TFLOP/s count useful work: 4·D per visible (query, key) pair forward, 2.5 times as much backward. Times are device times:
calls are enqueued behind a pause, kernels alternate in random order, medians of 20 calls. cuDNN and FlashAttention-2 support full and
causal masks only. Every output is checked once to be written completely, in memory filled with NaN.

    ours    longspan, kernel="hopper"
    fixed   its backward pass under torch.use_deterministic_algorithms, run 20 times and compared bit by bit
    ratio   longspan's speed over the fastest peer's
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
import triton
from bench.gpu_kernels import Case, document_lengths, softcap, visible_pairs
from bench.timing import deterministic, device_ms
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan as ls

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
STEPS = ("forward", "backward")
DETERMINISTIC_RUNS = 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """Sizes and mask of one problem."""

    case: str
    tokens: int
    heads: int
    kv_heads: int
    dim: int = 128

    def __str__(self) -> str:
        return f"{self.case:20}{self.tokens:6d} {self.heads}/{self.kv_heads:<3} D{self.dim:<4}"


SHAPES = ((8192, 32, 32), (8192, 32, 8), (32768, 32, 32), (32768, 32, 8))
ROWS = [Row(case=c, tokens=s, heads=h, kv_heads=g) for c in ("full", "causal") for s, h, g in SHAPES]
ROWS += [Row(case=c, tokens=32768, heads=16, kv_heads=16, dim=64) for c in ("full", "causal")]
MODS = ("16 documents", "window 1024", "causal + softcap", "causal + alibi", "causal + bias table")
ROWS += [Row(case=c, tokens=s, heads=32, kv_heads=g) for s, g in ((8192, 32), (32768, 8)) for c in MODS]


def case_of(row: Row) -> Case:
    """The row's mask and score_mod. ALiBi has one slope per head, the bias table 128 distances per head."""
    heads = row.heads
    slopes = torch.exp2(-torch.arange(1, heads + 1, device="cuda") * 8.0 / heads)
    table = torch.randn(heads, 128, device="cuda")
    ids = torch.repeat_interleave(torch.arange(16), torch.tensor(document_lengths(row.tokens))).cuda()
    cases = [
        Case(name="full", mask=ls.full()),
        Case(name="causal", mask=ls.causal()),
        Case(name="16 documents", mask=ls.causal() & ls.documents(ids=ids)),
        Case(name="window 1024", mask=ls.sliding_window(1024)),
        Case(name="causal + softcap", mask=ls.causal(), score_mod=softcap),
        Case(name="causal + alibi", mask=ls.causal(), score_mod=lambda s, b, h, q, kv: s + (kv - q) * slopes[h]),
        Case(name="causal + bias table", mask=ls.causal(), score_mod=lambda s, b, h, q, kv: s + table[h, torch.clamp(q - kv, 0, 127)]),
    ]
    return next(c for c in cases if c.name == row.case)


def poison(like: Tensor) -> None:
    """Fill memory with NaN that the caching allocator is likely to hand out for the next results."""
    for _ in range(4):
        torch.empty_like(like, dtype=torch.float32).fill_(torch.nan)


def calls_of(row: Row, case: Case, q: Tensor, k: Tensor, v: Tensor, *, flex: bool) -> dict[str, Callable[[], Tensor]]:
    """Forward calls of the kernels that support the row, by name."""
    calls: dict[str, Callable[[], Tensor]] = {}

    def sdpa(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=row.case == "causal", enable_gqa=row.heads != row.kv_heads)

    if row.case in ("full", "causal"):
        calls |= {name: lambda backend=backend: sdpa(backend) for name, backend in PEERS.items()}
    if flex:
        blocks = torch.compile(create_block_mask)(case.mask, None, None, row.tokens, row.tokens, device="cuda")
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        calls["flex"] = lambda: compiled(q, k, v, score_mod=case.score_mod, block_mask=blocks, enable_gqa=row.heads != row.kv_heads)
    calls["ours"] = lambda: ls.attention(q, k, v, mask=case.mask, score_mod=case.score_mod, kernel="hopper")
    return calls


def measure(row: Row, *, flex: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # FlexAttention's backward pass is called many times
    shapes = (row.heads, row.kv_heads, row.kv_heads, row.heads)
    q, k, v, grad = (torch.randn(1, h, row.tokens, row.dim, device="cuda", dtype=torch.bfloat16) for h in shapes)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    case = case_of(row)
    flop = 4.0 * row.dim * row.heads * visible_pairs(case.mask, row.tokens)
    result: dict[str, Any] = {"case": row.case, "tokens": row.tokens, "heads": f"{row.heads}/{row.kv_heads}", "dim": row.dim}
    calls = calls_of(row, case, q, k, v, flex=flex)
    backs: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for name, call in calls.items():
        poison(q)
        out = call()
        backs[name] = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
        poison(q)
        assert all(bool(t.isfinite().all()) for t in (out, *backs[name]())), f"{row} {name}: an output was not written completely"
    backs["fixed"] = partial(deterministic, backs["ours"])
    for step, fns, work in (("forward", calls, flop), ("backward", backs, 2.5 * flop)):
        result |= {f"{name}_{step}": work / ms / 1e9 for name, ms in device_ms(fns).items()}
    first = backs["fixed"]()
    result["same_bits"] = all(all(map(torch.equal, first, backs["fixed"]())) for _ in range(DETERMINISTIC_RUNS))
    for step in STEPS:
        peers = [result[f"{p}_{step}"] for p in (*PEERS, "flex") if f"{p}_{step}" in result]
        result[f"{step}_ratio"] = result[f"ours_{step}"] / max(peers) if peers else None
    return result


def warm(row: Row, *, flex: bool) -> None:
    """Compile the row's kernels: ours with few tokens, FlexAttention with the row's sizes, for which it specializes."""
    q, k, v = (torch.randn(1, h, 1024, row.dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (row.heads, 8, 8))
    case = case_of(replace(row, tokens=1024))
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode, warn_only=True)
        ls.attention(q, k, v, mask=case.mask, score_mod=case.score_mod, kernel="hopper").sum().backward()
    torch.use_deterministic_algorithms(False)
    if flex:
        shapes = (row.heads, row.kv_heads, row.kv_heads)
        q, k, v = (torch.randn(1, h, row.tokens, row.dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in shapes)
        calls_of(row, case_of(row), q, k, v, flex=True)["flex"]().sum().backward()


def errors(causal: bool) -> dict[str, list[float]]:
    """Relative errors of out, dq, dk, dv against float64, of cuDNN and longspan on the same inputs."""
    inputs = [torch.randn(2, 8, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    grad = torch.randn_like(inputs[0])

    def results(fn: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
        out = fn(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cuda").triu(1), -torch.inf)
        return torch.softmax(scores, -1) @ v

    expected = results(dense, torch.float64)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        by_kernel = {"cudnn": results(lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal), torch.bfloat16)}
    mask = ls.causal() if causal else ls.full()
    by_kernel["ours"] = results(lambda *x: ls.attention(*x, mask=mask, kernel="hopper"), torch.bfloat16)
    return {
        name: [float((g.double() - e).norm() / e.norm()) for g, e in zip(got, expected, strict=True)] for name, got in by_kernel.items()
    }


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    text = f"{row['case']:20}{row['tokens']:6d} {row['heads']:6}D{row['dim']:<4}"
    for step in STEPS:
        names = ("cudnn", "flash", "flex", "ours") + (("fixed",) if step == "backward" else ())
        text += " |" + "".join(f"{row[f'{n}_{step}']:7.0f}" if f"{n}_{step}" in row else f"{'-':>7}" for n in names)
        ratio = row[f"{step}_ratio"]
        text += f"{ratio:7.2f}" if ratio else f"{'-':>7}"
    return text + ("" if row["same_bits"] else "   DIFFERENT BITS")


def plot(result: Path, picture: Path) -> None:
    """Plot a result file as bars of device speed."""
    from matplotlib import pyplot

    data = json.loads(result.read_text(encoding="utf-8").strip().splitlines()[-1])
    rows = data["rows"]
    figure, axes = pyplot.subplots(2, 1, figsize=(13, 8), sharex=True, layout="constrained")
    names = ("cudnn", "flash", "flex", "ours", "fixed")
    for axis, step in zip(axes, STEPS, strict=True):
        for i, name in enumerate(names):
            bars = [(j, r[f"{name}_{step}"]) for j, r in enumerate(rows) if f"{name}_{step}" in r]
            label = {"ours": "longspan", "fixed": "longspan, deterministic"}.get(name, name)
            if bars:
                axis.bar([j + 0.16 * (i - 2) for j, _ in bars], [value for _, value in bars], width=0.15, label=label)
        axis.set_ylabel(f"{step}, TFLOP/s")
        axis.margins(y=0.15)  # room for the legend above the tallest bar
        axis.legend(ncols=5, fontsize="small", loc="upper right")
    labels = [f"{r['case']}\n{r['tokens'] // 1024}k {r['heads']} D{r['dim']}" for r in rows]
    axes[1].set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=7)
    axes[0].set_title(f"{data['device']}, torch {data['torch']}, triton {data['triton']}, cuDNN {data['cudnn']}, {data['date']}; bfloat16")
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--no-flex", action="store_true", help="skip FlexAttention, which takes minutes to compile")
    parser.add_argument("--warm", action="store_true", help="only compile; several processes fill Triton's cache faster than one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("RESULT", "PICTURE"))
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("bench/hopper.py needs a Hopper GPU")
    about = {
        "bench": "hopper",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.date.today().isoformat(),
    }
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    columns = "".join(f"{n:>7}" for n in ("cudnn", "flash", "flex", "ours"))
    print(f"{'TFLOP/s of useful work':38} | {'forward':^35}| {'backward':^42}")
    print(f"{'':20}{'tokens':>6} {'heads':6}{'dim':5} |{columns}{'ratio':>7} |{columns}{'fixed':>7}{'ratio':>7}", flush=True)
    rows = []
    if args.warm:
        for row in (r for r in ROWS if args.rows in str(r)):
            warm(row, flex=not args.no_flex)
        return
    for row in (r for r in ROWS if args.rows in str(r)):
        rows.append(measure(row, flex=not args.no_flex))
        print(line(rows[-1]), flush=True)
    by_mask = {"full": errors(False), "causal": errors(True)}
    for name, by_kernel in by_mask.items():
        parts = [
            f"{n} {c:.2e} / {o:.2e} ({o / c:.2f})"
            for n, c, o in zip(("out", "dq", "dk", "dv"), by_kernel["cudnn"], by_kernel["ours"], strict=True)
        ]
        print(f"error against float64, {name}, cuDNN / ours: " + ", ".join(parts))
    if args.json:
        print(json.dumps({**about, "rows": rows, "errors": by_mask}))


if __name__ == "__main__":
    main()
