"""Shapes that other benchmarks leave out, beside torch's cuDNN and flash attention: short sequences, head dims, heads of decoding.

    PYTHONPATH=src:. python bench/shapes.py [--warm] [--rows TEXT] [--json]

bfloat16. Device times: calls are enqueued behind a pause and alternate in random order; medians. Training rows: TFLOP/s of useful work,
4·D per visible pair forward and 2.5 times as much backward. Decoding rows: one query per sequence; TB/s of keys and values; torch's flash
attention computes contiguous KV only. A ratio is longspan's speed over that of the fastest peer.

    pages      longspan from a KVCache with pages of 64, whose new token the call writes
    --warm     only compile; several processes (`--rows D96`, …) fill Triton's cache faster than one
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from bench.decode import Row as CachedRow
from bench.decode import paged_calls
from bench.timing import device_ms
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import longspan as ls

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
REPEAT = 8


@dataclass(frozen=True, kw_only=True)
class Training:
    """Sizes of a forward and backward pass."""

    batch: int = 1
    q_len: int
    kv_len: int
    heads: tuple[int, int] = (16, 16)
    dim: int
    causal: bool = True

    def __str__(self) -> str:
        lengths = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len} over {self.kv_len}"
        return f"{self.batch} x {lengths}, {self.heads[0]}/{self.heads[1]} D{self.dim} {'causal' if self.causal else 'full'}"


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Sizes of a call with one query per sequence."""

    batch: int
    tokens: int
    heads: tuple[int, int]
    dim: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens}, {self.heads[0]}/{self.heads[1]} D{self.dim}"


DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
TRAINING = [Training(q_len=8192, kv_len=8192, dim=dim) for dim in DIMS]
for _dim in (64, 128):
    TRAINING += [
        Training(batch=256, q_len=128, kv_len=128, dim=_dim, causal=False),
        Training(batch=64, q_len=512, kv_len=512, dim=_dim),
        Training(batch=32, q_len=1024, kv_len=1024, heads=(32, 8), dim=_dim),
        Training(batch=16, q_len=2048, kv_len=2048, heads=(16, 4), dim=_dim),
        Training(batch=4, q_len=1024, kv_len=16384, dim=_dim, causal=False),
        Training(q_len=16384, kv_len=1024, dim=_dim, causal=False),
        Training(q_len=8192, kv_len=8192, heads=(4, 1), dim=_dim),
    ]
HEADS = (((32, 8), 64), ((64, 8), 64), ((64, 8), 128), ((40, 8), 128), ((32, 1), 128), ((32, 32), 128), ((16, 8), 256), ((32, 8), 96))
SEQUENCES = ((32, 4096), (16, 16384), (1, 131072), (4, 2048))
DECODING = [Decoding(batch=n, tokens=length, heads=heads, dim=dim) for heads, dim in HEADS for n, length in SEQUENCES]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def peer_calls(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> dict[str, Callable[[], Tensor]]:
    """The calls of torch's backends that support the inputs."""

    def call(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    calls: dict[str, Callable[[], Tensor]] = {}
    for name, backend in PEERS.items():
        try:
            call(backend)
        except RuntimeError:  # such as a head dim that the backend does not support
            continue
        calls[name] = lambda backend=backend: call(backend)
    return calls


def train(row: Training, *, warm: bool) -> dict[str, Any]:
    """Speeds of both passes by kernel; nothing if `warm`."""
    (heads, kv_heads), mask = row.heads, ls.causal() if row.causal else None
    q = randn(row.batch, heads, row.q_len, row.dim).requires_grad_()
    k, v = (randn(row.batch, kv_heads, row.kv_len, row.dim).requires_grad_() for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {"longspan": lambda: ls.attention(q, k, v, mask=mask)}
    if not warm:
        calls |= peer_calls(q, k, v, causal=row.causal)
    grad = randn(row.batch, heads, row.q_len, row.dim)
    passes: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        out = call()
        passes[name] = lambda out=out: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    if warm:
        passes["longspan"]()
        torch.cuda.synchronize()
        return {}
    with torch.no_grad():
        forward = device_ms(calls, repeat=REPEAT)
    teraflop = 4e-12 * row.batch * heads * row.q_len * row.kv_len * row.dim * (0.5 if row.causal else 1)
    result: dict[str, Any] = {"row": str(row), "unit": "TFLOP/s"}
    for step, work, times in (("forward", teraflop, forward), ("backward", 2.5 * teraflop, device_ms(passes, repeat=REPEAT))):
        result[step] = {name: 1e3 * work / ms for name, ms in times.items()}
    return result


def decode(row: Decoding) -> dict[str, Any]:
    """Speeds over contiguous KV, and from pages."""
    heads, kv_heads = row.heads
    q, k, v = (randn(row.batch, h, n, row.dim) for h, n in ((heads, 1), (kv_heads, row.tokens), (kv_heads, row.tokens)))
    cached = CachedRow(name=str(row), lengths=[row.tokens] * row.batch, page_size=64, heads=heads, kv=(kv_heads, row.dim))
    calls: dict[str, Callable[[], Any]] = {"longspan": lambda: ls.attention(q, k, v), "pages": paged_calls(cached)["longspan"]}
    calls |= {name: call for name, call in peer_calls(q, k, v, causal=False).items() if name == "flash"}
    with torch.no_grad():
        times = device_ms(calls, repeat=REPEAT)
    return {"row": str(row), "unit": "TB/s", "forward": {name: cached.gigabytes / ms for name, ms in times.items()}}


def line(result: dict[str, Any]) -> str:
    """A row of the printed table."""
    text = f"{result['row']:40}"
    for step in ("forward", "backward"):
        speeds = result.get(step, {})
        best = max((speed for name, speed in speeds.items() if name in PEERS), default=math.nan)
        if speeds:
            cells = ", ".join(f"{name} {speed:.{0 if speed > 20 else 2}f}" for name, speed in speeds.items())
            text += f" | {step}: {cells} {result['unit']}, ratio {speeds['longspan'] / best:.2f}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--warm", action="store_true", help="only compile the kernels of training rows")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    results = []
    for row in (r for r in (*TRAINING, *DECODING) if options.rows in str(r)):
        torch.cuda.empty_cache()
        if isinstance(row, Training):
            result = train(row, warm=options.warm)
        else:
            result = {} if options.warm else decode(row)
        if result:
            results.append(result)
            print(line(result), flush=True)
    if options.json:
        print(json.dumps({"bench": "shapes", "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": results}))


if __name__ == "__main__":
    main()
