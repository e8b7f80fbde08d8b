"""Tile sizes of the triton kernel next to compiled FlexAttention, on one GPU: PYTHONPATH=src python bench/triton_variants.py

Checks every case against float32 on a small size, then times. FLOP: 4·D per allowed pair and head forward, 2.5 times that backward.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from longspan.kernels.protocol import Tiling, Work
from longspan.kernels.triton import Config, Tile, TritonKernel
from longspan.kernels.triton.config import choose
from longspan.kernels.triton.kernel import _Common
from longspan.masks.joint import joint_of
from longspan.masks.table import BlockTable
from longspan.masks.tracing import trace

BUDGET_S = 320.0
START = time.monotonic()
Mod = Callable[..., Tensor]
BLOCK = 128


def left() -> float:
    return BUDGET_S - (time.monotonic() - START)


def clock(fn: Callable[[], Any], repeats: int = 8) -> float:
    """Median milliseconds."""
    for _ in range(2):
        fn()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        fn()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[len(times) // 2]


def runs_of(kinds: Tensor, q_len: int, kv_len: int) -> BlockTable:
    ptr, first, last, kind = [0], [], [], []
    for row in kinds.tolist():
        for j, value in enumerate(row):
            if value and j and row[j - 1] == value:
                last[-1] = j
            elif value:
                first.append(j)
                last.append(j)
                kind.append(value)
        ptr.append(len(first))
    p, f, z, k = (torch.tensor(x, dtype=torch.int32) for x in (ptr, first, last, kind))
    return BlockTable(q_len=q_len, kv_len=kv_len, block=(BLOCK, BLOCK), ptr=p, first=f, last=z, kind=k)


def table_of(mask: Mod, length: int) -> tuple[BlockTable, int]:
    """The table by brute force on the GPU, one row of tiles at a time, and the number of allowed pairs."""
    tiles = -(-length // BLOCK)
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    kv = torch.arange(tiles * BLOCK, device="cuda")
    inside, kv = kv < length, kv.clamp(max=length - 1)
    kinds, pairs = [], 0
    for i in range(tiles):
        q = torch.arange(i * BLOCK, min(length, (i + 1) * BLOCK), device="cuda")[:, None]
        allowed = mask(zero, zero, q, kv[None])
        pairs += int((allowed & inside).sum())
        some = (allowed & inside).view(len(q), tiles, BLOCK).any(2).any(0)
        full = (allowed | ~inside).view(len(q), tiles, BLOCK).all(2).all(0)
        kinds.append(torch.where(some, 1 + full.int(), 0))
    dense = torch.stack(kinds).cpu()
    table = runs_of(dense, length, length)
    table.__dict__["transposed"] = runs_of(dense.T, length, length)
    return table, pairs


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < 1024)


def documents(length: int) -> Mod:
    generator = torch.Generator().manual_seed(0)
    cuts = torch.sort(torch.randperm(length - 1, generator=generator)[:15] + 1).values
    ids = torch.zeros(length, dtype=torch.int32)
    ids[cuts] = 1
    ids = ids.cumsum(0, dtype=torch.int32).cuda()
    return lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 30 * torch.tanh(s / 30)


def alibi(heads: int) -> Mod:
    slopes = torch.exp2(-torch.arange(1, heads + 1, device="cuda") * 8.0 / heads)
    return lambda s, b, h, q, kv: s + (kv - q) * slopes[h]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    mask: Mod
    score: Mod | None = None
    heads: int = 32
    kv_heads: int = 32
    length: int = 8192


def cases(length: int, heads: int = 32) -> list[Case]:
    shape = {"length": length, "heads": heads, "kv_heads": heads}
    return [
        Case(name="causal", mask=causal, **shape),
        Case(name="softcap", mask=causal, score=softcap, **shape),
        Case(name="alibi", mask=causal, score=alibi(heads), **shape),
        Case(name="window 1024", mask=window, **shape),
        Case(name="16 documents", mask=documents(length), **shape),
    ]


class Problem:
    """A case with its tensors, work and results."""

    def __init__(self, case: Case, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.case = case
        shapes = [(1, n, case.length, dim) for n in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
        self.q, self.k, self.v, self.do = (torch.randn(s, device="cuda", dtype=dtype) for s in shapes)
        table, pairs = table_of(case.mask, case.length)
        self.flop = 4.0 * dim * pairs * case.heads
        mask = trace(case.mask, "mask")
        score = trace(case.score, "score") if case.score else None
        tiling = Tiling(length=case.length, block=BLOCK)
        self.work = Work(
            table=table, q_tiles=tiling, kv_tiles=tiling, scale=dim**-0.5, mask=mask.program, mask_captured=mask.captured(),
            score=score.program if score else None, score_captured=score.captured() if score else [],
            joint=joint_of(score.program) if score else None,
        )  # fmt: skip
        self.needs = [False] * len(self.work.score_captured)

    def forward(self, config: Config | None) -> Any:
        return TritonKernel(config=config).forward(self.q, self.k, self.v, self.work, state=None, final=True, peak=False)

    def prepare(self) -> None:
        state = self.forward(None)
        self.out, self.lse = state.out, state.lse
        self.delta = TritonKernel().delta(self.out, self.do, None)
        self.dq, self.dk, self.dv = (torch.empty_like(t) for t in (self.q, self.k, self.v))

    def backward(self, config: Config | None) -> Any:
        kernel = TritonKernel(config=config)
        delta = kernel.delta(self.out, self.do, None)
        return kernel.backward(
            self.q, self.k, self.v, self.out, self.lse, delta, self.do, self.work, needs=self.needs, wide=False, through_lse=False
        )

    def one_pass(self, name: str, config: Config) -> None:
        common = _Common(TritonKernel(config=config), self.q, self.k, self.v, self.work)
        if name == "dkdv":
            common.keys(self.do, self.lse, self.delta, self.dk, self.dv)
        else:
            common.queries(self.do, self.lse, self.delta, self.dq, [None] * len(self.needs))


def reference(p: Problem) -> tuple[Tensor, ...]:
    q, k, v = (t.float().requires_grad_() for t in (p.q, p.k, p.v))
    index = [
        torch.arange(n, device="cuda").view([-1 if i == j else 1 for j in range(4)])
        for i, n in enumerate((1, p.case.heads, p.case.length, p.case.length))
    ]
    repeat = p.case.heads // p.case.kv_heads
    s = q @ k.repeat_interleave(repeat, 1).mT * p.work.scale
    s = p.case.score(s, *index) if p.case.score else s
    out = torch.softmax(s.masked_fill(~p.case.mask(*index), -torch.inf), -1) @ v.repeat_interleave(repeat, 1)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), p.do.float()))


def check(case: Case, config: Config | None, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> str:
    """Largest errors of out, dq, dk, dv relative to the largest value of each."""
    p = Problem(case, dim, dtype)
    state = p.forward(config)
    p.out, p.lse = state.out, state.lse
    grads = p.backward(config)
    got = (state.out, grads.q, grads.k, grads.v)
    errors = [float((g.float() - w).abs().max() / w.abs().max()) for g, w in zip(got, reference(p), strict=True)]
    limit = 2e-2 if dtype != torch.float32 else 1e-4
    return ("ok   " if max(errors) < limit else "WRONG") + " " + " ".join(f"{e:.1e}" for e in errors)


FLEX = torch.compile(flex_attention, dynamic=False)


def flex_times(p: Problem) -> tuple[float, float]:
    length = p.case.length
    block_mask = create_block_mask(p.case.mask, None, None, length, length, device="cuda", _compile=length > 8192)
    q, k, v = (t.detach().requires_grad_() for t in (p.q, p.k, p.v))
    gqa = p.case.heads != p.case.kv_heads

    def forward() -> Tensor:
        return FLEX(q, k, v, score_mod=p.case.score, block_mask=block_mask, enable_gqa=gqa)  # type: ignore[return-value]

    out = forward()
    return clock(forward), clock(lambda: torch.autograd.grad(out, (q, k, v), p.do, retain_graph=True))


def variants(name: str) -> Iterator[Tile]:
    sizes = {
        "forward": [
            (128, 128, 8, 2),
            (128, 64, 8, 3),
            (128, 64, 4, 3),
            (128, 64, 8, 2),
            (64, 128, 4, 2),
            (128, 64, 4, 2),
            (128, 32, 4, 3),
            (64, 64, 4, 3),
        ],
        "dkdv": [
            (64, 128, 8, 2),
            (64, 128, 8, 3),
            (32, 128, 8, 3),
            (64, 64, 4, 2),
            (32, 128, 4, 2),
            (32, 64, 4, 3),
            (128, 128, 8, 1),
            (32, 128, 8, 2),
        ],
        "dq": [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3), (128, 128, 8, 1), (128, 32, 4, 3)],
    }[name]
    for (m, n, warps, stages), tma in product(sizes, (False, True)):
        yield Tile(m=m, n=n, warps=warps, stages=stages, tma=tma)


def built_in(case: Case) -> Config:
    return choose(capability=(9, 0), d=128, e=128, dtype=torch.bfloat16, scored=case.score is not None, fine=BLOCK == 64)


def short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__} {lines[0][:120] if lines else ''}"


def label(tile: Tile) -> str:
    return f"m{tile.m:<4d}n{tile.n:<4d}w{tile.warps} s{tile.stages} {'tma' if tile.tma else '   '}"


def search(p: Problem, name: str, tiles: list[Tile], flex_ms: float | None) -> list[tuple[float, Tile]]:
    """Time one pass with each tile, print a line each, best first."""
    factor = {"forward": 1.0, "dkdv": 1.5, "dq": 1.0}[name]
    found = []
    for tile in tiles:
        if left() < 0:
            print("   (time is up)")
            break
        config = replace(built_in(p.case), **{name: tile})
        try:
            ms = clock(lambda c=config: p.forward(c) if name == "forward" else p.one_pass(name, c))  # type: ignore[misc]
            found.append((ms, tile))
            ratio = f" {flex_ms / ms:5.2f}x flex" if flex_ms else ""
            print(f"   {name:8s} {label(tile)} {ms:8.3f} ms {factor * p.flop / ms / 1e9:6.0f} TF/s{ratio}", flush=True)
        except Exception as error:
            print(f"   {name:8s} {label(tile)} failed: {short(error)}", flush=True)
    return sorted(found, key=lambda f: f[0])


def correctness() -> None:
    print("correctness (out dq dk dv), length 1000")
    for case in [*cases(1000, heads=4), Case(name="grouped 8/2", mask=causal, score=softcap, heads=8, kv_heads=2, length=1000)]:
        config = built_in(case)
        tma = replace(config, **{n: replace(getattr(config, n), tma=True) for n in ("forward", "dkdv", "dq")})
        for label, c in (("built in", None), ("tma", tma)):
            try:
                print(f"   {case.name:14s} {label:9s} {check(case, c)}", flush=True)
            except Exception as error:
                print(f"   {case.name:14s} {label:9s} failed: {type(error).__name__} {str(error)[:300]}", flush=True)
                traceback.print_exc(limit=3)
    for dim, dtype in ((64, torch.bfloat16), (256, torch.float16), (96, torch.bfloat16), (64, torch.float32), (128, torch.float32)):
        try:
            print(f"   causal D{dim} {dtype} {check(cases(500, heads=2)[0], None, dim, dtype)}", flush=True)
        except Exception as error:
            print(f"   causal D{dim} {dtype} failed: {type(error).__name__} {str(error)[:300]}", flush=True)


def main() -> None:
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    correctness()
    summary, best = [], {n: list(variants(n)) for n in ("forward", "dkdv", "dq")}
    todo = [*cases(8192), Case(name="causal 32/8", mask=causal, kv_heads=8, length=32768)]
    for case in todo:
        if left() < 5:
            print(f"(no time for {case.name})")
            continue
        try:
            p = Problem(case)
            p.prepare()
            flex = (0.0, 0.0)
            try:
                flex = flex_times(p)
            except Exception as error:
                print(f"flex failed: {type(error).__name__} {str(error)[:200]}")
            fwd, bwd = clock(lambda p=p: p.forward(None)), clock(lambda p=p: p.backward(None))  # type: ignore[misc]
            built = f"built in fwd {fwd:.3f} ms {flex[0] / fwd:.2f}x flex, bwd {bwd:.3f} ms {flex[1] / bwd:.2f}x flex"
            print(f"{case.name}: {built}  [{left():.0f} s left]", flush=True)
            top: dict[str, tuple[float, Tile]] = {}
            for name in best:
                whole = case.name == "causal"
                found = search(p, name, best[name] if whole else best[name][:4], flex[0] if name == "forward" else None)
                if whole and found:
                    best[name] = [tile for _, tile in found]
                if found:
                    top[name] = found[0]
            f, b = top["forward"][0], top["dkdv"][0] + top["dq"][0]
            forward = f"fwd {f:8.3f} ms {p.flop / f / 1e9:6.0f} TF/s {flex[0] / f:5.2f}x"
            backward = f"bwd {b:8.3f} ms {2.5 * p.flop / b / 1e9:6.0f} TF/s {flex[1] / b:5.2f}x"
            summary += [f"{case.name:14s} {forward} | {backward}", *(f"    {n:8s} {label(t)} {ms:.3f} ms" for n, (ms, t) in top.items())]
        except Exception as error:
            print(f"{case.name} failed: {type(error).__name__} {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()
    print("best of each pass, ratio to compiled FlexAttention (backward without delta)")
    print("\n".join(summary))


if __name__ == "__main__":
    main()
