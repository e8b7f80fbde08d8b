"""Which kernel is fastest for one rectangle on a GPU: torch's flash, efficient and cuDNN operators, or triton.

    PYTHONPATH=src python bench/aten_choice.py [--tokens N …] [--dims 128 64 192/128] [--heads 32/32 32/8] [--repeat N] [--json]

B 1, bfloat16, whole sequences: every query against every key, and causal. Kernels are called through the protocol, forward and backward
apart; `stage` is a forward that folds a full rectangle into a float32 state, as a stage of many does. Times are of the device, medians.
TFLOP/s: 4·D per pair and head (2·D + 2·E where dims differ), 2.5 times that backward. Errors are the largest difference of out, and of dq,
to float32 on 64 rows. At the end, rows for the table FASTER of `longspan.kernels.registry`: where one of torch's beats triton by more than
3 % at a length and at every longer one.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

import longspan as ls
from gpu_kernels import Clock
from longspan.kernels.protocol import Kernel, State, Tiling, Work
from longspan.kernels.registry import kernel_named
from longspan.masks.tracing import trace

KERNELS = ("triton", "cudnn", "flash", "efficient")
STEPS = ("forward", "backward", "stage")
MARGIN = 1.03


def work_for(kind: str, tokens: int, block: tuple[int, int], scale: float) -> Work:
    mask = ls.causal() if kind == "causal" else ls.full()
    tilings = {"q_tiles": Tiling(length=tokens, block=block[0]), "kv_tiles": Tiling(length=tokens, block=block[1])}
    table = mask.block_table(tokens, tokens, block=block)
    return Work(table=table, scale=scale, mask=trace(mask, "mask").program if kind == "causal" else None, **tilings)


def some_rows(kind: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out and dq of some rows, in float32."""
    shared = q.shape[1] // k.shape[1]
    found = []
    for head in range(q.shape[1]):
        query = q[:, head, rows].float().requires_grad_()
        key, value = (t[:, head // shared].float() for t in (k, v))
        scores = query @ key.mT * scale
        if kind == "causal":
            scores = torch.where(rows[:, None] >= torch.arange(k.shape[2], device=q.device), scores, -torch.inf)
        out = torch.softmax(scores, -1) @ value
        found.append((out.detach(), torch.autograd.grad(out, query, grad[:, head, rows].float())[0]))
    return torch.stack([o for o, _ in found], 1), torch.stack([d for _, d in found], 1)


def calls_of(kernel: Kernel, tensors: list[Tensor], grad: Tensor, work: Work) -> dict[str, Callable[[], Any]]:
    q, k, v = tensors
    done = kernel.forward(q, k, v, work, state=None, final=True, peak=False)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: kernel.forward(q, k, v, work, state=None, final=True, peak=False),
        "backward": lambda: kernel.backward(q, k, v, done.out, done.lse, grad, None, work, needs=[], wide=False),
    }
    if work.mask is None:
        state = State(out=done.out.float(), lse=done.lse.clone())
        calls["stage"] = lambda: kernel.forward(q, k, v, work, state=state, final=False, peak=False)
    return calls


def measure(kind: str, tokens: int, heads: tuple[int, int], dims: tuple[int, int], clock: Clock) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1]))
    q, k, v, grad = (torch.randn(1, h, tokens, d, device="cuda", dtype=torch.bfloat16) for h, d in shapes)
    scale = dims[0] ** -0.5
    rows = torch.randint(0, tokens, (64,), device="cuda")
    want = some_rows(kind, q, k, v, grad, rows, scale)
    flop = 2.0 * sum(dims) * heads[0] * (tokens * (tokens + 1) / 2 if kind == "causal" else tokens**2)
    found = []
    for name in KERNELS:
        row: dict[str, Any] = {"kernel": name, "kind": kind, "tokens": tokens, "heads": heads, "dims": dims}
        kernel = kernel_named(name)
        work = work_for(kind, tokens, (128, 128), scale)
        block = kernel.block(q, v, work.table)
        work = work if block == (128, 128) else work_for(kind, tokens, block, scale)
        row["refused"] = kernel.refuses(q, k, v, work)
        if row["refused"] is None:
            calls = calls_of(kernel, [q, k, v], grad, work)
            got = calls["forward"]().out[:, :, rows], calls["backward"]().q[:, :, rows]
            row["errors"] = [float((g.float() - w).abs().max()) for g, w in zip(got, want, strict=True)]
            for step, call in calls.items():
                row[f"{step}_ms"], row[f"{step}_host_us"] = clock(call, calls=3 if tokens > 8192 else 10)
                row[f"{step}_tflops"] = (2.5 if step == "backward" else 1.0) * flop / row[f"{step}_ms"] / 1e9
        found.append(row)
    return found


def line(rows: list[dict[str, Any]]) -> str:
    one = rows[0]
    cells = []
    for step in STEPS:
        cells.append("".join(f"{row[f'{step}_tflops']:7.0f}" if f"{step}_tflops" in row else f"{'–':>7}" for row in rows))
    errors = " ".join(f"{row['errors'][0]:.0e}/{row['errors'][1]:.0e}" if "errors" in row else "–" for row in rows)
    shape = f"{one['kind']:7}{one['tokens']:8d}  {one['heads'][0]}/{one['heads'][1]}  {one['dims'][0]}/{one['dims'][1]}"
    return f"{shape:32} |{cells[0]} |{cells[1]} |{cells[2]} | {errors}"


def winners(rows: list[dict[str, Any]]) -> list[str]:
    """Rows for the table of what is faster, per pass, kind and dims: the shortest length from which on it holds, for all head counts."""
    out = []
    for step in ("forward", "backward"):
        for kind, dims in sorted({(r["kind"], tuple(r["dims"])) for r in rows}):
            here = [r for r in rows if (r["kind"], tuple(r["dims"])) == (kind, dims)]
            ours = {(r["tokens"], r["heads"]): r[f"{step}_ms"] for r in here if r["kernel"] == "triton"}
            best: tuple[float, str, int] | None = None
            for name in KERNELS[1:]:
                theirs = {(r["tokens"], r["heads"]): r[f"{step}_ms"] for r in here if r["kernel"] == name and f"{step}_ms" in r}
                ratios = {at: ours[at] / theirs[at] if at in theirs else 0.0 for at in ours}
                lengths = sorted({t for t, _ in ratios})
                good = [n for n in lengths if all(ratio > MARGIN for (t, _), ratio in ratios.items() if t >= n)]
                if good:
                    longest = min(ratio for (t, _), ratio in ratios.items() if t == lengths[-1])
                    best = max(best or (0.0, "", 0), (longest, name, good[0]))
            if best is not None:
                capability = torch.cuda.get_device_capability()
                row = f'kernel="{best[1]}", backward={step == "backward"}, kind="{kind}", dims={dims}, tokens={best[2]}'
                out.append(f"Faster({row}, capability={capability}),  # {best[0]:.2f} times as fast at the longest")
    return out


def pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    return int(first), int(second or first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--dims", type=pair, nargs="+", default=[(128, 128), (64, 64)])
    parser.add_argument("--heads", type=pair, nargs="+", default=[(32, 32), (32, 8)])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    about = {
        "bench": "aten_choice",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.date.today().isoformat(),
    }
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    columns = "".join(f"{name[:6]:>7}" for name in KERNELS)
    print(f"{'TFLOP/s on the device':32} |{'forward':^28} |{'backward':^28} |{'stage':^28} | largest errors, out/dq")
    print(f"{'':32} |{columns} |{columns} |{columns} | {' '.join(KERNELS)}")
    clock, rows, refused = Clock(args.repeat), [], {}
    for dims in args.dims:
        for heads in args.heads:
            for tokens in sorted(args.tokens):
                for kind in ("causal", "full"):
                    rows += measure(kind, tokens, heads, dims, clock)
                    print(line(rows[-len(KERNELS) :]), flush=True)
                    refused |= {(r["kernel"], dims): r["refused"] for r in rows[-len(KERNELS) :] if r["refused"]}
    for (name, dims), reason in refused.items():
        print(f"{name} refused {dims[0]}/{dims[1]}: {reason}")
    print("for FASTER in longspan/kernels/registry.py (see there what a row for the backward pass gives up):")
    for row in winners(rows) or ["nothing"]:
        print("    " + row)
    if args.json:
        print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
