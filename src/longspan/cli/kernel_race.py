"""`longspan calibrate --kernels`: every kernel that can do it, over whole rectangles, both passes; what is fastest is kept for `auto`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import longspan as ls
from longspan._kernels import choice
from longspan._kernels.choice import Kind, Name, Timing
from longspan._kernels.protocol import Tiling, Work
from longspan._kernels.registry import KernelRefused, choose, usual
from longspan._masks.tracing import trace
from longspan.cli.measure import Clock

KERNELS: tuple[Name, ...] = ("hopper", "triton", "cudnn", "flash", "efficient")
KINDS: tuple[Kind, ...] = ("causal", "full")
LENGTHS = (1024, 4096, 16384)
HEADS = ((32, 32), (32, 8))
DIMS = ((64, 64), (128, 128))


def rectangle(kind: Kind, tokens: int, block: tuple[int, int], scale: float) -> Work:
    """All queries against all keys, or a causal square."""
    mask = ls.causal() if kind == "causal" else ls.full()
    q_tiles, kv_tiles = (Tiling(length=tokens, block=b) for b in block)
    program = trace(mask, "mask").program if kind == "causal" else None
    return Work(table=mask.block_table(tokens, tokens, block=block), q_tiles=q_tiles, kv_tiles=kv_tiles, scale=scale, mask=program)


def timings(
    clock: Clock, kernels: Sequence[Name], lengths: Sequence[int], heads: Sequence[tuple[int, int]], dims: Sequence[tuple[int, int]]
) -> Iterator[Timing]:
    """One for every kernel that can do it; longest last."""
    dtype = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    for tokens in sorted(lengths):
        for q_heads, kv_heads in heads:
            for d, e in dims:
                shapes = ((q_heads, d), (kv_heads, d), (kv_heads, e), (q_heads, e))
                q, k, v, grad = (torch.randn(1, h, tokens, n, device=clock.device, dtype=dtype) for h, n in shapes)
                for kind in KINDS:
                    for name in kernels:
                        forward, backward = _both(clock, name, kind, q, k, v, grad)
                        if forward is not None and backward is not None:
                            yield Timing(
                                kernel=name, kind=kind, dims=(d, e), heads=(q_heads, kv_heads), tokens=tokens, forward=forward,
                                backward=backward,
                            )  # fmt: skip


def _both(clock: Clock, name: Name, kind: Kind, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[float | None, float | None]:
    """Seconds of both passes; Nones where the kernel refuses."""
    scale = q.shape[-1] ** -0.5
    work = rectangle(kind, q.shape[2], (128, 128), scale)
    try:
        kernel = choose(name, q, k, v, work)
    except KernelRefused:
        return None, None
    block = kernel.block(q, v, work.table)
    work = work if block == (128, 128) else rectangle(kind, q.shape[2], block, scale)
    done = kernel.forward(q, k, v, work, state=None, final=True, peak=False)
    forward = clock(lambda: kernel.forward(q, k, v, work, state=None, final=True, peak=False))
    backward = clock(lambda: kernel.backward(q, k, v, done.out, done.lse, grad, None, work, needs=[], wide=False))
    return forward, backward


def contest(*, quick: bool) -> list[str]:
    """Measure this GPU's kernels, keep the winners, and say what was found."""
    if not torch.cuda.is_available():
        raise ValueError("--kernels: expected a CUDA device, got none; on CPU there is one kernel to choose")
    device = torch.device("cuda", torch.cuda.current_device())
    clock = Clock(device, 3 if quick else 7, "auto")
    found = list(timings(clock, KERNELS, LENGTHS[:2] if quick else LENGTHS, HEADS[1:] if quick else HEADS, DIMS))
    lines = [f"{'kind':8}{'tokens':>8}{'heads':>8}{'dims':>9}  {'kernel':10}{'forward':>10}{'backward':>10}   ms"]
    for t in found:
        where = f"{t.kind:8}{t.tokens:8d}{t.heads[0]:5d}/{t.heads[1]:<3d}{t.dims[0]:5d}/{t.dims[1]:<3d}"
        lines.append(f"{where}  {t.kernel:10}{1e3 * t.forward:10.3f}{1e3 * t.backward:10.3f}")
    default = usual(device)
    rows = choice.winners(found, default, torch.cuda.get_device_capability(device))
    about = {"torch": torch.__version__, "date": datetime.date.today().isoformat()}
    path = choice.save(torch.cuda.get_device_name(device), rows, about)
    for row in rows:
        lines.append(f"{'backward' if row.backward else 'forward'}, {row.kind}, dims {row.dims}, from {row.tokens} tokens on: {row.kernel}")
    lines.append(f"all else: {default}; written to {path}")
    return lines
