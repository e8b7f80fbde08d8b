"""Linear layer and cross entropy without logits [S, V] on one GPU: Liger's fused kernel, the tiled loss, and which of them `auto` takes.

    PYTHONPATH=src:. python bench/loss_gpu.py [--tokens N …] [--repeat 5] [--chunk 4096] [--only errors | times] [--json]

Forward and backward with the sizes of Llama-3.2-1B and Qwen3-8B in bfloat16, random hidden states and weights; a tenth of the labels do not
count. Milliseconds are medians of calls that alternate; "peak" is memory above the inputs. Errors of the loss, of the gradients of the
hidden states and of the weight are relative, against float64.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from typing import Any

import torch
from bench.long_step_layer import DEVICE, LLAMA_1B, QWEN3_8B, TINY, Shape, peak_gib, reset_peak, say, timed
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from longspan.integrations import _liger
from longspan.integrations.loss import IGNORED, linear_token_loss

SHAPES = {"Llama-3.2-1B": LLAMA_1B, "Qwen3-8B": QWEN3_8B}
CHECKED_TOKENS = 2048
RESULTS = ("loss", "hidden", "weight")


def inputs(shape: Shape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, D], weight [V, D], labels [T]."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, shape.width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(shape.vocab, shape.width, device=DEVICE, dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    labels = torch.randint(shape.vocab, (tokens,), device=DEVICE)
    labels[torch.rand(tokens, device=DEVICE) < 0.1] = IGNORED
    return hidden, weight, labels


def step(tensors: tuple[Tensor, Tensor, Tensor], kernel: Any, chunk: int) -> tuple[Tensor, ...]:
    """The loss, and gradients of hidden states and weight."""
    hidden, weight, labels = tensors
    value = linear_token_loss(hidden, weight, labels, count=labels.numel(), chunk=chunk, kernel=kernel)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight))


def errors(shape: Shape, kernels: list[str], chunk: int) -> dict[str, list[float]]:
    """Relative errors of (loss, gradient of hidden, gradient of weight) against float64."""
    hidden, weight, labels = inputs(shape, CHECKED_TOKENS)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    value = cross_entropy(linear(*wide), labels, reduction="sum") / labels.numel()
    wanted = value.detach(), *torch.autograd.grad(value, wide)
    results = {kernel: step((hidden, weight, labels), kernel, chunk) for kernel in kernels}
    return {k: [float((got.double() - want).norm() / want.norm()) for got, want in zip(v, wanted)] for k, v in results.items()}


def measured(shape: Shape, tokens: int, kernels: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and peak memory of each kernel, and auto's choice."""
    tensors = inputs(shape, tokens)
    before = torch.cuda.memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    times: dict[str, list[float]] = {kernel: [] for kernel in kernels}
    peaks = {}
    for round_number in range(1 + args.repeat):
        for kernel in kernels:
            if not round_number:
                reset_peak()
            seconds, _ = timed(functools.partial(step, tensors, kernel, args.chunk))
            if round_number:
                times[kernel].append(1e3 * seconds)
            else:
                peaks[kernel] = peak_gib() - before
    row: dict[str, Any] = {"tokens": tokens, "ms": {k: statistics.median(v) for k, v in times.items()}, "peak_gib": peaks}
    row["auto"] = "liger" if "liger" in kernels and _takes_liger(tensors, args.chunk) else "tiled"
    return row


def _takes_liger(tensors: tuple[Tensor, Tensor, Tensor], chunk: int) -> bool:
    """Whether `auto` calls Liger's kernel."""
    step(tensors, "auto", chunk)  # measures both, once
    calls, original = [], _liger.liger_sum

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return original(*args, **kwargs)

    _liger.liger_sum = counted
    try:
        step(tensors, "auto", chunk)
    finally:
        _liger.liger_sum = original
    return bool(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 32768, 131072])
    parser.add_argument("--chunk", type=int, default=4096, help="tokens whose logits are in memory at once")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=("errors", "times"), help="one half")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this file on a CPU")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shapes = {"tiny": TINY} if args.tiny else SHAPES
    reason = _liger.unsupported(*inputs(next(iter(shapes.values())), CHECKED_TOKENS)[:2], args.chunk)
    kernels = ["tiled"] if reason else ["tiled", "liger"]
    about = {
        "bench": "loss_gpu", "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", "torch": torch.__version__,
        "liger": None if reason else _liger_version(), "date": time.strftime("%Y-%m-%d"), "chunk": args.chunk,
    }  # fmt: skip
    print("bench loss_gpu, {device}, torch {torch}, liger-kernel {liger}, chunk {chunk}, {date}".format(**about), flush=True)
    if reason:
        say(f"without Liger: {reason}")
    rows, checked = [], {}
    for name, shape in shapes.items() if args.only != "times" else ():
        checked[name] = errors(shape, kernels, args.chunk)
        listed = "; ".join(f"{k} " + ", ".join(f"{r} {e:.1e}" for r, e in zip(RESULTS, v)) for k, v in checked[name].items())
        print(f"error against float64, {name}, {CHECKED_TOKENS} tokens: {listed}", flush=True)
    if args.only != "errors":
        columns = "".join(f"{k + ', ms':>12}" for k in kernels)
        print(f"{'sizes':14} {'tokens':>8} {columns}{'tiled / liger':>15}{'auto':>8}   peak GiB")
        for name, shape in shapes.items():
            for tokens in args.tokens:
                row = measured(shape, tokens, kernels, args)
                rows.append({"sizes": name, **row})
                ratio = row["ms"]["tiled"] / row["ms"]["liger"] if "liger" in row["ms"] else float("nan")
                times = "".join(f"{row['ms'][k]:12.1f}" for k in kernels)
                peaks = ", ".join(f"{k} {v:.1f}" for k, v in row["peak_gib"].items())
                print(f"{name:14} {tokens:8} {times}{ratio:15.2f}{row['auto']:>8}   {peaks}", flush=True)
    if args.json:
        print(json.dumps(about | {"errors": checked, "rows": rows}), flush=True)


def _liger_version() -> str:
    from importlib.metadata import version

    return version("liger-kernel")


if __name__ == "__main__":
    main()
