"""Decoding: few queries over many keys, contiguous and from a paged cache, beside torch's flash attention and flash-attn-4.

    PYTHONPATH=src:. python bench/decode.py [--rows TEXT] [--peers] [--json]

--peers: only rows that peers compute too, contiguous KV; ends with a table of speeds. A peer's result is compared with longspan's first.
flash-attn-4 runs as called by default, and once more with the splits that its heuristic chooses, where it supports them.

GQA 32/8, head dim 128, bfloat16; MLA rows: one latent KV head of 576 elements, whose first 512 are values. TB/s count the keys and values
of all sequences once, also where a window hides some. Calls alternate in random order; medians of 20.

    device      calls enqueued behind a pause: host time excluded
    as called   one eager call on an idle device: host time included
    host        microseconds of host time of a call
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from bench.timing import as_called_ms, device_ms, host_us

import longspan as ls

HEADS, KV_HEADS, DIM = 32, 8, 128
LATENT = (576, 512)
DEVICE, DTYPE = "cuda", torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem: tokens of each sequence, new tokens of each, page size (0: contiguous), and options of the call by name.

    kv: KV heads and their dim. latent: one KV head of LATENT elements, whose first elements are values. fp8: pages hold FP8 elements.
    """

    name: str
    lengths: list[int]
    queries: int = 1
    page_size: int = 0
    options: Callable[[int], dict[str, Any]] = field(default=lambda longest: {})
    heads: int = HEADS
    kv: tuple[int, int] = (KV_HEADS, DIM)
    latent: bool = False
    fp8: bool = False

    @property
    def kv_heads(self) -> int:
        return 1 if self.latent else self.kv[0]

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of keys and values."""
        return LATENT if self.latent else (self.kv[1], self.kv[1])

    @property
    def gigabytes(self) -> float:
        stored = self.dims[0] if self.latent else sum(self.dims)
        return sum(self.lengths) * self.kv_heads * stored * (1 if self.fp8 else DTYPE.itemsize) / 1e9

    @property
    def teraflops(self) -> float:
        return 2 * self.queries * sum(self.lengths) * self.heads * sum(self.dims) / 1e12


def log_normal(total: int, sequences: int) -> list[int]:
    """Lengths with sum `total` and a log-normal distribution."""
    raw = torch.randn(sequences, generator=torch.Generator().manual_seed(0)).exp()
    return [max(1, int(x)) for x in raw / raw.sum() * total]


def causal(longest: int) -> dict[str, Any]:
    return {"mask": ls.causal()}


def windowed(longest: int) -> dict[str, Any]:
    return {"mask": ls.causal() & ls.sliding_window(longest // 8)}


def with_sink(longest: int) -> dict[str, Any]:
    return {"sink": torch.zeros(HEADS, device=DEVICE)}


def softcapped(longest: int) -> dict[str, Any]:
    return {"score_mod": lambda s, b, h, q, kv: 50.0 * torch.tanh(s / 50.0)}


def biased(longest: int) -> dict[str, Any]:
    bias = torch.randn(HEADS, longest, device=DEVICE)
    return {"score_mod": lambda s, b, h, q, kv: s + bias[h, kv]}


ROWS = [
    Row(name="32 x 4k", lengths=[4096] * 32),
    Row(name="16 x 8k", lengths=[8192] * 16),
    Row(name="64 x 8k", lengths=[8192] * 64),
    Row(name="1 x 1k", lengths=[1024]),
    Row(name="1 x 131k", lengths=[131072]),
    Row(name="1 x 1M", lengths=[2**20]),
    Row(name="1 x 1k, pages of 64", lengths=[1024], page_size=64),
    Row(name="3 x 4k, pages of 64", lengths=[4096] * 3, page_size=64),
    *(Row(name=f"32 x 4k, pages of {size}", lengths=[4096] * 32, page_size=size) for size in (16, 64, 128)),
    *(Row(name=f"1 x 131k, pages of {size}", lengths=[131072], page_size=size) for size in (16, 64)),
    Row(name="mixed, total 512k, pages of 64", lengths=log_normal(2**19, 64), page_size=64),
    Row(name="32 x 4k, causal, pages of 64", lengths=[4096] * 32, page_size=64, options=causal),
    Row(name="32 x 4k, window of 512, pages of 64", lengths=[4096] * 32, page_size=64, options=windowed),
    Row(name="32 x 4k, softcap, pages of 64", lengths=[4096] * 32, page_size=64, options=softcapped),
    Row(name="32 x 4k, sink, pages of 64", lengths=[4096] * 32, page_size=64, options=with_sink),
    Row(name="32 x 4k, captured bias, pages of 64", lengths=[4096] * 32, page_size=64, options=biased),
    Row(name="4 queries, 32 x 4k, causal, pages of 64", lengths=[4096] * 32, queries=4, page_size=64, options=causal),
    *(
        Row(name=f"FP8, {name}, pages of 64", lengths=lengths, page_size=64, fp8=True)
        for name, lengths in (("32 x 4k", [4096] * 32), ("64 x 8k", [8192] * 64), ("1 x 131k", [131072]), ("1 x 1k", [1024]))
    ),
    Row(name="FP8, chunk of 512 over 131k, pages of 64", lengths=[131072], queries=512, page_size=64, options=causal, fp8=True),
    *(
        Row(name=f"MLA, {heads} heads, {name}, pages of 64", lengths=lengths, page_size=64, heads=heads, latent=True)
        for heads in (16, 64, 128)
        for name, lengths in (
            ("32 x 4k", [4096] * 32), ("32 x 16k", [16384] * 32), ("128 x 8k", [8192] * 128), ("1 x 131k", [131072]),
        )
    ),
    Row(name="chunk of 512 over 131k, pages of 64", lengths=[131072], queries=512, page_size=64, options=causal),
]  # fmt: skip


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def contiguous_calls(row: Row) -> dict[str, Callable[[], Any]]:
    """longspan and its peers over contiguous KV."""
    batch, length = len(row.lengths), row.lengths[0]
    key_dim, value_dim = row.dims
    q, k, v = (
        randn(batch, heads, n, dim)
        for heads, n, dim in ((row.heads, row.queries, key_dim), (row.kv_heads, length, key_dim), (row.kv_heads, length, value_dim))
    )
    calls: dict[str, Callable[[], Any]] = {"longspan": lambda: ls.attention(q, k, v)}
    flash, backend = torch.nn.functional.scaled_dot_product_attention, torch.nn.attention.SDPBackend.FLASH_ATTENTION

    def torch_flash() -> Any:
        with torch.nn.attention.sdpa_kernel(backend):
            return flash(q, k, v, enable_gqa=True)

    calls["torch flash"] = torch_flash
    return calls | flash_attn_calls(q, k, v, calls["longspan"]())


def flash_attn_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, expected: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """flash-attn-4's calls that run here and match `expected`."""
    try:
        flash_attn_func = import_module("flash_attn.cute.interface").flash_attn_func
    except Exception:
        return {}
    tokens_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    calls: dict[str, Callable[[], Any]] = {}
    for name, options in (("flash-attn-4", {}), ("flash-attn-4, split", {"num_splits": 0})):
        call = partial(flash_attn_func, *tokens_first, **options)
        try:
            out = call()
        except Exception as error:  # its releases support different options
            print(f"  {name}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            continue
        out = (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
        difference = (out - expected).abs().max().item() / expected.abs().max().item()
        if difference < 0.05:
            calls[name] = call
        else:
            print(f"  {name}: not timed, differs from longspan by {difference:.1e} of the largest value", flush=True)
    return calls


def print_table(results: list[dict[str, Any]]) -> None:
    """Speeds by row and kernel, and longspan's over that of the best peer."""
    names = list(dict.fromkeys(name for one in results for name in one["speed"]))
    print(f"{'':24}" + "".join(f"{name:>22}" for name in names) + f"{'longspan / best':>18}")
    for one in results:
        speeds = one["speed"]
        cells = [f"{speeds[n]:.2f} {one['unit']} {one['device_us'][n]:5.0f} us" if n in speeds else "" for n in names]
        best = max((speed for name, speed in speeds.items() if name != "longspan"), default=math.nan)
        print(f"{one['row']:24}" + "".join(f"{cell:>22}" for cell in cells) + f"{speeds['longspan'] / best:18.2f}", flush=True)


def paged_calls(row: Row) -> dict[str, Callable[[], Any]]:
    """longspan over a cache. A step is used again and again: only a layer's attention is measured."""
    pages = sum(-(-length // row.page_size) for length in row.lengths)
    cache = ls.KVCache(
        pages=pages, page_size=row.page_size, layers=1, kv_heads=row.kv_heads, head_dim=row.dims[0], value_dim=row.dims[1],
        shared_kv=row.latent, dtype=torch.float8_e4m3fn if row.fp8 else DTYPE, device=DEVICE,
    )  # fmt: skip
    for pages_of_kv in (cache._k,) if row.latent else (cache._k, cache._v):
        pages_of_kv.copy_(torch.randn(pages_of_kv.shape, device=DEVICE, dtype=DTYPE))
    ids = cache.allocate(len(row.lengths))
    cache.step(ids, [length - row.queries for length in row.lengths])
    step = cache.step(ids, row.queries)
    for sequence_id in ids:
        del cache.sequence(sequence_id).unfinished[0]
    cache.layers = math.inf  # type: ignore[assignment]  # the step never ends
    q, k = (randn(len(ids), heads, row.queries, row.dims[0]) for heads in (row.heads, row.kv_heads))
    v = k[..., : row.dims[1]] if row.latent else randn(len(ids), row.kv_heads, row.queries, row.dims[1])
    options = row.options(max(row.lengths))

    def call() -> Any:
        step._used.clear()
        return ls.attention(q, k, v, cache=step, layer=0, **options)

    return {"longspan": call}


def measure(row: Row) -> dict[str, Any]:
    """One row of the result: TB/s (TFLOP/s for many queries), microseconds, and host time by call."""
    calls = paged_calls(row) if row.page_size else contiguous_calls(row)
    with torch.no_grad():
        device, called = device_ms(calls), as_called_ms(calls)
        host = {name: host_us(call, repeat=30) for name, call in calls.items()}
    amount, unit = (row.teraflops, "TFLOP/s") if row.queries > 64 else (row.gigabytes, "TB/s")
    speeds = {name: amount / ms * (1000 if unit == "TFLOP/s" else 1) for name, ms in device.items()}
    return {
        "row": row.name, "unit": unit, "speed": speeds, "device_us": {n: 1e3 * ms for n, ms in device.items()},
        "as_called_us": {n: 1e3 * ms for n, ms in called.items()}, "host_us": host,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows whose name contains this text")
    parser.add_argument("--peers", action="store_true", help="only rows that peers compute too; end with a table")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    results = []
    for row in (r for r in ROWS if options.rows in r.name and not (options.peers and r.page_size)):
        torch.cuda.empty_cache()
        results.append(measure(row))
        one = results[-1]
        cells = [
            f"{name} {speed:.2f} {one['unit']}, "
            + ", ".join(f"{kind} {one[f'{kind}_us'][name]:.0f} us" for kind in ("device", "as_called", "host"))
            for name, speed in one["speed"].items()
        ]
        print(f"{row.name}: " + "; ".join(cells), flush=True)
    if options.peers:
        print_table(results)
    if options.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": results}))


if __name__ == "__main__":
    main()
