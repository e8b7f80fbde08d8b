"""Which kernel is fastest for one rectangle on a GPU: torch's flash, efficient and cuDNN operators, or triton.

    PYTHONPATH=src python bench/aten_choice.py [--tokens N …] [--dims 128 64 192/128] [--heads 32/32 32/8] [--repeat N] [--json]

B 1, bfloat16, whole sequences: every query against every key, and causal. Kernels are called through the protocol, forward and backward
apart; `stage` is a forward that folds a full rectangle into a float32 state, as a stage of many does. Times are of the device, medians.
TFLOP/s: 4·D per pair and head (2·D + 2·E where dims differ), 2.5 times that backward. Errors are the largest difference of out, and of dq,
to float32 on 64 rows. At the end, rows for the table SHIPPED of `longspan._kernels.choice`: where a kernel beats triton by
more than 3 % at a length and at every longer one. `longspan calibrate --kernels` does so on any machine.
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

from gpu_kernels import Clock
from longspan._kernels.choice import Faster, Timing, winners
from longspan._kernels.protocol import Kernel, State, Work
from longspan._kernels.registry import kernel_named, usual
from longspan.cli.kernel_race import KERNELS, rectangle

STEPS = ("forward", "backward", "stage")


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
        work = rectangle(kind, tokens, (128, 128), scale)
        block = kernel.block(q, v, work.table)
        work = work if block == (128, 128) else rectangle(kind, tokens, block, scale)
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


def found_faster(rows: list[dict[str, Any]]) -> list[Faster]:
    timed = [
        Timing(kernel=r["kernel"], kind=r["kind"], dims=r["dims"], heads=r["heads"], tokens=r["tokens"], forward=r["forward_ms"],
               backward=r["backward_ms"])
        for r in rows if r["refused"] is None
    ]  # fmt: skip
    return winners(timed, usual(torch.device("cuda")), torch.cuda.get_device_capability())


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
    print("for SHIPPED in longspan/_kernels/choice.py:")
    for row in found_faster(rows) or ["nothing"]:
        print(f"    {row}")
    if args.json:
        print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
