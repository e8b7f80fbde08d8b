"""Long training steps on one GPU: one rank's share of a million-token step of Qwen3-8B, and whole steps of a Llama-3.2-1B shape.

    PYTHONPATH=src:. python bench/long_step_gpu.py share [--tokens 1048576] [--ranks 8] [--masks causal …] [--calls 2] [--json]
    PYTHONPATH=src:. python bench/long_step_gpu.py whole [--tokens 524288] [--only compare | long] [--seconds 200] [--json]
    PYTHONPATH=src:. python bench/long_step_gpu.py gradients [--tokens 8192] [--json]

share: one decoder layer with the sizes of Qwen3-8B runs forward and backward as one rank of N, by `memory.checkpoint`: attention once, the
rest again in the backward pass. KV of other ranks arrive in memory that already holds random numbers (bench/link.py): transfers over a real
link take no SM and are listed in bytes. The step is 36 layers, the embedding, the tiled loss and the optimizer's share, each measured
at its full size; the first call, which compiles or loads kernels, is printed and not counted. Masks: causal, packed documents, and four
layers with a window of 4,096 tokens to one without. `--calls 0` only compiles.

whole: forward, backward and AdamW of a model with the sizes of Llama-3.2-1B and random bfloat16 weights, by `memory.long_context`; where
transformers is not installed, of the same layers in plain torch by `memory.checkpoint`. `compare`: the loss of a shorter sequence against
the plain path (SDPA, all logits, no recomputation). `long`: the step, with a line for each layer and an estimate before. If a layer of the
backward pass would end later than `--seconds` after the start, the step stops before it and its time is extrapolated. Memory peaks in the
first layer of the backward pass, which always runs.

gradients: the bfloat16 gradients of both paths against the plain path in float32 (float64 on a CPU) with the same weights, by parameter.

`--tiny` runs all on a CPU, to test this file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from bench.link import EchoMesh, Link
from bench.long_step_layer import (
    DEVICE,
    DTYPE,
    LLAMA_1B,
    QWEN3_8B,
    TINY,
    Layer,
    Shape,
    peak_gib,
    reset_peak,
    rotary_of,
    say,
    timed,
)
from bench.long_step_whole import gradients, whole
from torch import Tensor
from torch.nn.functional import embedding, rms_norm
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._engine import ops
from longspan.integrations import memory
from longspan.integrations.loss import linear_token_loss

PARTS = ("attention, forward", "attention, backward", "rest, forward", "rest, recomputed and backward")


class CountAttention(TorchDispatchMode):
    """Counts calls of attention's forward operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is ops.attend._opoverload
        return func(*args, **(kwargs or {}))


class HostLink(Link):
    """A link for tests on a CPU."""

    def __init__(self) -> None:
        self.kind, self.buffers = "copy", {}


def document_lengths(tokens: int) -> list[int]:
    """Log-normal lengths with sum `tokens`: median 8,000 tokens, some over 100,000."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        draw = int(torch.empty(()).log_normal_(9.0, 1.4, generator=generator))
        lengths.append(max(16, min(draw, tokens - sum(lengths))))
    lengths[-1] -= sum(lengths) - tokens
    return [n for n in lengths if n > 0]


def plan_of(mask: Any, tokens: int, ranks: int, shape: Shape) -> Any:
    """The plan of the rank with the most (query, key) pairs."""
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    plan = ls.plan(mask, tokens, EchoMesh(axes=ls.Mesh.abstract(ranks).axes, coordinate=(0,)), **heads)
    busiest = int(plan.report().pairs.argmax())
    return plan.on(EchoMesh(axes=ls.Mesh.abstract(ranks).axes, coordinate=(busiest,)))


def layer_seconds(layer: Layer, plan: Any, calls: int) -> Iterator[dict[str, float]]:
    """Seconds of the parts of a layer's step on this rank's tokens, of the first and of `calls` further calls.

    The layer runs with q in place of attention's result, then as it trains: the difference is attention's.
    """
    x = torch.randn(1, plan.local_len, layer.shape.width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    grad = torch.randn_like(x)
    rotary = rotary_of(plan.positions, layer.shape)

    def both(attend: Callable[..., Tensor]) -> tuple[float, float]:
        forward, y = timed(lambda: memory.checkpoint(layer, x, rotary, attend))
        backward, _ = timed(lambda: y.backward(grad))
        layer.zero_grad(set_to_none=True)
        x.grad = None
        return forward, backward

    both(lambda q, k, v: q + k.mean() + v.mean())
    for _ in range(1 + calls):
        rest = both(lambda q, k, v: q + k.mean() + v.mean())
        with CountAttention() as count:
            whole_layer = both(lambda q, k, v: ls.attention(q, k, v, plan=plan))
        assert count.calls == 1, f"expected one forward of attention, got {count.calls}"
        yield dict(zip(PARTS, (whole_layer[0] - rest[0], whole_layer[1] - rest[1], *rest)))


def loss_seconds(shape: Shape, tokens: int) -> float:
    """Seconds of the tiled loss of a rank's tokens, forward and backward."""
    hidden = torch.randn(1, tokens, shape.width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    weight = torch.randn(shape.vocab, shape.width, device=DEVICE, dtype=DTYPE).mul_(0.02).requires_grad_()
    labels = torch.randint(shape.vocab, (1, tokens), device=DEVICE)
    return timed(lambda: linear_token_loss(hidden, weight, labels, count=tokens, chunk=shape.chunk).backward())[0]


def embedding_seconds(shape: Shape, tokens: int) -> float:
    """Seconds of the embedding of a rank's tokens and of the last norm, forward and backward."""
    weight = torch.randn(shape.vocab, shape.width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    scale = torch.ones(shape.width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    ids = torch.randint(shape.vocab, (1, tokens), device=DEVICE)
    return timed(
        lambda: rms_norm(embedding(ids, weight), (shape.width,), scale, 1e-6).backward(
            torch.ones((), device=DEVICE, dtype=DTYPE).expand(1, tokens, shape.width)
        )
    )[0]


def optimizer_seconds(parameters: int) -> float:
    """Seconds of AdamW on this many float32 parameters, the second step."""
    weight = torch.zeros(parameters, device=DEVICE, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=DEVICE == "cuda")
    optimizer.step()
    return timed(optimizer.step)[0]


def share(shape: Shape, tokens: int, ranks: int, window: int, args: argparse.Namespace) -> dict[str, Any]:
    EchoMesh.use(Link("none") if DEVICE == "cuda" else HostLink())
    with torch.device(DEVICE):
        layer = Layer(shape).to(DTYPE)
    causal = ls.causal()
    masks = {
        "causal": causal,
        "documents": causal & ls.documents(lengths=document_lengths(tokens)),
        "window": causal & ls.sliding_window(window),
    }
    results = {name: measured_layer(layer, name, masks[name], tokens, ranks, args.calls) for name in args.masks}
    parameters = sum(p.numel() for p in layer.parameters()) * shape.layers + 2 * shape.vocab * shape.width
    del layer
    reset_peak()
    local = tokens // ranks
    for what in (loss_seconds, embedding_seconds):
        what(shape, min(local, 2 * shape.chunk))
    if not args.calls:
        say("compiled")
        return {}
    ends = {
        "embedding and last norm": embedding_seconds(shape, local),
        "loss": loss_seconds(shape, local),
        "optimizer": optimizer_seconds(parameters // ranks),
    }
    gathered = parameters * DTYPE.itemsize * (ranks - 1) / ranks / 1e9
    say(
        f"not measured: links. A step of FSDP with {parameters / 1e9:.2f} G parameters receives {2 * gathered:.1f} GB of weights and "
        f"{gathered:.1f} GB of gradients per rank; KV above"
    )
    window_layers = round(shape.layers * 4 / 5)
    layers = {
        "causal": {"causal": shape.layers},
        "documents": {"documents": shape.layers},
        f"4 layers with window {window} : 1": {"window": window_layers, "causal": shape.layers - window_layers},
    }
    steps = {
        name: {part: sum(n * results[mask][part] for mask, n in counts.items()) for part in PARTS} | ends
        for name, counts in layers.items()
        if counts.keys() <= results.keys()
    }
    print(f"\n{f'seconds, {shape.layers} × one measured layer':34}" + "".join(f"{name:>32}" for name in steps))
    for part in [*PARTS, *ends]:
        print(f"{part:34}" + "".join(f"{parts[part]:32.2f}" for parts in steps.values()))
    print(f"{'step':34}" + "".join(f"{sum(parts.values()):32.1f}" for parts in steps.values()))
    return {"tokens": tokens, "ranks": ranks, "layer_seconds": results, "step_seconds": steps, "parameters": parameters}


def measured_layer(layer: Layer, name: str, mask: Any, tokens: int, ranks: int, calls: int) -> dict[str, float]:
    """Seconds of the parts of a layer: medians of all calls but the first."""
    shape = layer.shape
    planning, plan = timed(lambda: plan_of(mask, tokens, ranks, shape))
    report, rank = plan.report(), plan.mesh.rank
    moved = [float(x[..., rank].sum()) / 1e9 for x in (report.bytes_received, report.bytes_received_backward)]
    say(
        f"{name}: rank {rank} of {ranks}, {plan.local_len} tokens, {plan.strategy}, layout {plan.data.layout}, balance "
        f"{report.balance:.3f}, planned in {planning:.2f} s; received {moved[0]:.2f} GB forward, {moved[1]:.2f} backward"
    )
    reset_peak()
    results = []
    for result in layer_seconds(layer, plan, calls):
        results.append(result)
        parts = ", ".join(f"{part} {1e3 * value:.0f} ms" for part, value in result.items())
        say(f"  call {len(results)} of a layer: {parts}")
    EchoMesh.link.buffers.clear()
    flops = 4 * int(report.pairs[rank]) * shape.head_dim / 1e12  # pairs of all heads
    medians = {part: median(r[part] for r in results[1:] or results) for part in PARTS}
    forward, backward = (medians[f"attention, {what}"] for what in ("forward", "backward"))
    say(f"  attention {flops / forward:.0f} and {2.5 * flops / backward:.0f} TFLOP/s; peak {peak_gib():.1f} GiB")
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("share", "whole", "gradients"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--masks", nargs="+", choices=("causal", "documents", "window"), default=["causal", "documents", "window"])
    parser.add_argument("--calls", type=int, default=2, help="measured calls of a layer in `share`; 0: only compile")
    parser.add_argument("--only", choices=("compare", "long"), help="one half of `whole`")
    parser.add_argument("--seconds", type=float, default=200, help="seconds after the start at which `whole` stops its step")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this file on a CPU")
    args = parser.parse_args()
    shape = TINY if args.tiny else QWEN3_8B if args.part == "share" else LLAMA_1B
    about = {
        "bench": f"long_step_gpu {args.part}", "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    print("# bench {bench}, {device}, torch {torch}, {date}".format(**about), flush=True)
    if args.part == "share":
        results = share(shape, args.tokens or (2048 if args.tiny else 1 << 20), args.ranks, 128 if args.tiny else 4096, args)
    elif args.part == "gradients":
        results = gradients(shape, args.tokens or (512 if args.tiny else 1 << 13))
    else:
        results = whole(shape, args.tokens or (1024 if args.tiny else 1 << 19), 256 if args.tiny else 1 << 15, args)
    if args.json:
        print(json.dumps(about | results), flush=True)


if __name__ == "__main__":
    main()
