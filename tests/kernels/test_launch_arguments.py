"""Launches of the Triton kernels, all of their arguments, against `launch_arguments.json`: as on GPUs of 132 SMs, nothing is launched.

After a deliberate change: `PYTHONPATH=src:. python tests/kernels/test_launch_arguments.py` writes the file anew; read its diff.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.shards import work_of

import longspan as ls
from longspan._kernels.gpu import codegen, hoisted_lookups, launch
from longspan._kernels.gpu.split_kernel import SplitKernel
from longspan._kernels.paged import FP8, PagedKV, PagedWork, query_ranges
from longspan._kernels.protocol import AttentionInputs, Selection, State
from longspan._kernels.triton import config, decode_call, decode_launch, gather_pages, gathered_call, passes
from longspan._kernels.triton.decode import decode_kernel
from longspan._kernels.triton.decode_tile import choose_tile, tile_rows
from longspan._kernels.triton.split_rule import SplitRule
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

RECORD = Path(__file__).with_name("launch_arguments.json")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
IDS, SLOPES = torch.arange(700) // 90, torch.linspace(0.1, 1.2, 12)


def plain(value: Any) -> Any:
    """An argument as JSON: tensors by dtype, shape and strides, and small integer tensors by their elements too; functions by name."""
    if isinstance(value, Tensor):
        elements = [value.tolist()] if value.dtype is torch.int32 and 0 < value.numel() <= 24 else []
        return [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride()), *elements]
    if isinstance(value, dict):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, partial):
        return [plain(value.func), *map(plain, value.args), plain(value.keywords)]
    if isinstance(value, tuple | list):
        return [plain(x) for x in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return round(value, 6)
    name = getattr(getattr(value, "fn", value), "__name__", None)
    return str(value) if name is None else re.sub(r"_[0-9a-f]{12}", "", name)


class Recorder:
    """Takes the place of `PreparedLaunch`, and records the launches of one call: how they are made and what they are called with."""

    made: list[Any] = []  # noqa: RUF012

    def __init__(self, **arguments: Any) -> None:
        self.ctas, self.device, self.constants = arguments["ctas"], arguments["device"], arguments["constants"]
        self.arguments = plain({name: x for name, x in arguments.items() if name != "device"})

    def __call__(self, tensors: dict[str, Tensor | None], per_call: dict[str, Any]) -> None:
        given = {name: None if t is None else plain(t)[:3] for name, t in tensors.items()}
        self.made.append([self.arguments, given, plain(per_call)])

    @classmethod
    def of(cls, call: Callable[[], Any]) -> Any:
        cls.made = []
        call()
        return cls.made


def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (passes, gathered_call, decode_launch):
        monkeypatch.setattr(module, "PreparedLaunch", Recorder)
    monkeypatch.setattr(decode_call, "interpreted", lambda: False)
    monkeypatch.setattr(decode_call, "computable", lambda tensor: tensor)
    monkeypatch.setattr(decode_call, "capability", lambda device: (9, 0))
    monkeypatch.setattr(decode_call, "sm_count", lambda device: 132)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "computable", lambda tensor: tensor)
    monkeypatch.setattr(launch, "programs_in_flight", lambda device: 264)
    monkeypatch.setattr(gathered_call, "layout_launch", layout_launch)
    monkeypatch.setattr(gather_pages, "layout_launch", layout_launch)
    clear_caches()


def layout_launch(kernel: Any, tensors: Any, constants: dict[str, Any], ctas: int) -> Recorder:
    return Recorder(kernel=kernel, ctas=ctas, device=CPU, constants=constants)


def clear_caches() -> None:
    for function in (decode_call._launches, decode_launch._prepared, codegen._program_function, hoisted_lookups._lookup_function):
        function.cache_clear()


# ------------------------------------------------------------------------------------------------ decoding


def paged_work(mask: Any = None, score: Any = None, **more: Any) -> PagedWork:
    traced = [None if mod is None else trace(mod, kind) for mod, kind in ((mask, "mask"), (score, "score"))]  # type: ignore[arg-type]
    programs = [None if t is None else t.program for t in traced]
    captured = [() if t is None else t.captured() for t in traced]
    return PagedWork(
        **{"scale": 0.25, **more}, mask=programs[0], mask_captured=captured[0], score=programs[1], score_captured=captured[1]
    )  # fmt: skip


ALIBI = lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv)
CAUSAL, DOCUMENTS = ls.causal(), ls.causal() & ls.documents(ids=IDS)
BY = SplitKernel(
    kernel=decode_kernel, options={"num_warps": 9}, descriptors={"k_desc": str}, rows=64, coarse=2048, share=lambda shared: shared + 5
)


def decode_pages(
    starts: list[int], counts: list[int], *, heads: tuple[int, int] = (12, 4), dims: tuple[int, int] = (64, 48), page: int = 32,
    dtype: torch.dtype = BF16, shared: bool = False, work: PagedWork | None = None, by: SplitKernel | None = None, new: bool = False,
    longest: int | None = None, scales: tuple[float, float] | None = None,
) -> Any:  # fmt: skip
    """The launches of a step of sequences with `counts` new tokens after `starts`."""
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    ranges, _ = query_ranges(starts, lengths, list(range(len(starts))), (), CPU)
    ranges = replace(ranges, longest=longest)
    ragged = len(set(counts)) > 1
    n, count = (1, sum(counts)) if ragged else (len(counts), counts[0])
    q = torch.zeros(n, count, heads[0], dims[0], dtype=dtype).transpose(1, 2)
    k = torch.zeros(7, heads[1], page, dims[0], dtype=dtype)
    table = torch.zeros(len(counts), 23, dtype=torch.int32)
    v = k[..., : dims[1]] if shared else torch.zeros(7, heads[1], page, dims[1], dtype=dtype)
    if scales is not None:
        k, v = k.to(FP8), v.to(FP8)
    pages = PagedKV(k=k, v=v, table=table, shared=shared, scales=scales)
    tokens = tuple(torch.zeros(n, heads[1], count, dim, dtype=dtype) for dim in dims) if new else None
    queries = decode_call.Queries(q, ranges, ragged, tokens, by)  # type: ignore[arg-type]
    attend = decode_call.attend_new_tokens if new else decode_call.attend_pages
    return Recorder.of(lambda: attend(queries, pages, work or paged_work()))


def decode_contiguous(
    batch: int, heads: tuple[int, int], q_len: int, kv_len: int, dims: tuple[int, int], dtype: torch.dtype = BF16, work: Any = None
) -> Any:  # fmt: skip
    q = torch.zeros(batch, heads[0], q_len, dims[0], dtype=dtype)
    k, v = (torch.zeros(batch, heads[1], kv_len, dim, dtype=dtype) for dim in dims)
    return Recorder.of(lambda: decode_call.attend_contiguous(q, k, v, work or paged_work()))


LATENT: dict[str, Any] = {"dims": (576, 512), "shared": True, "page": 64}
DECODE: dict[str, Callable[[], Any]] = {
    "one short": lambda: decode_pages([100], [1]),
    "one split exactly": lambda: decode_pages([255], [1]),
    "two splits": lambda: decode_pages([256], [1]),
    "long": lambda: decode_pages([70_001], [1]),
    "lengths that differ": lambda: decode_pages([70_001, 300, 5000], [1, 1, 1]),
    "several tokens": lambda: decode_pages([700, 20], [3, 3]),
    "tiles of all sizes": lambda: decode_pages([700, 20, 900, 5, 60], [3, 9, 21, 64, 65]),
    "groups": lambda: decode_pages([5000] * 50, [1] * 50),
    "groups that read tensors": lambda: decode_pages([600] * 50, [1] * 50, work=paged_work(DOCUMENTS)),
    "many groups": lambda: decode_pages([20_000] * 33, [1] * 33, heads=(8, 8)),
    "groups of large tiles": lambda: decode_pages([5000] * 50, [9] * 50),
    "groups of wide rows": lambda: decode_pages([5000] * 50, [1] * 50, dims=(256, 256)),
    "float32": lambda: decode_pages([3000, 10], [1, 1], dtype=FP32, page=16),
    "float32 wide": lambda: decode_pages([3000], [1], dtype=FP32, dims=(200, 160)),
    "float16 of 200": lambda: decode_pages([3000] * 700, [1] * 700, dtype=FP16, dims=(200, 130)),
    "several waves": lambda: decode_pages([3000] * 700, [1] * 700),
    "sink": lambda: decode_pages([100, 900], [1, 1], work=paged_work(sink=torch.zeros(24)[::2])),
    "window": lambda: decode_pages([900], [1], work=paged_work(window=70)),
    "window of none": lambda: decode_pages([900], [1], work=paged_work(window=0)),
    "mask and score": lambda: decode_pages([600, 80], [1, 1], work=paged_work(DOCUMENTS, ALIBI)),
    "score without a sign": lambda: decode_pages([90], [1], work=paged_work(CAUSAL, scale=-0.5)),
    "scale of 0": lambda: decode_pages([90], [1], work=paged_work(scale=0.0)),
    "new tokens": lambda: decode_pages([600, 80], [2, 2], new=True),
    "new ragged tokens": lambda: decode_pages([600, 80], [2, 3], new=True),
    "too many new tokens": lambda: decode_pages([600, 80], [2, 65], new=True),
    "captured": lambda: decode_pages([600, 80], [1, 1], longest=10_000),
    "captured for groups": lambda: decode_pages([600] * 50, [1] * 50, longest=9000),
    "captured and long": lambda: decode_pages([codegen.SHORT - 2], [1], longest=codegen.SHORT),
    "past 23 bits": lambda: decode_pages([codegen.SHORT], [1]),
    "latent": lambda: decode_pages([9000, 40], [1, 1], heads=(16, 1), **LATENT),
    "latent of pages that tiles do not divide": lambda: decode_pages([900], [1], heads=(16, 1), **{**LATENT, "page": 48}),
    "latent of 32": lambda: decode_pages([900], [1], heads=(16, 1), **{**LATENT, "page": 32}),
    "latent of many heads": lambda: decode_pages([9000, 40], [2, 2], heads=(128, 1), **LATENT),
    "latent float32": lambda: decode_pages([900], [1], heads=(128, 1), dtype=FP32, **LATENT),
    "latent without a rest": lambda: decode_pages([900], [1], heads=(16, 1), **{**LATENT, "dims": (512, 512)}),
    "latent of 384": lambda: decode_pages([900], [1], heads=(16, 1), **{**LATENT, "dims": (448, 384)}),
    "split kernel": lambda: decode_pages([9000, 40], [1, 1], heads=(128, 1), by=BY, **LATENT),
    "split kernel of groups": lambda: decode_pages([9000] * 90, [1] * 90, heads=(128, 1), by=BY, **LATENT),
    "split kernel, captured": lambda: decode_pages([9000] * 90, [1] * 90, heads=(128, 1), by=BY, longest=9999, **LATENT),
    "split kernel of a mask": lambda: decode_pages([9000] * 9, [1] * 9, heads=(128, 1), by=BY, work=paged_work(CAUSAL), **LATENT),
    "split kernel of few rows": lambda: decode_pages([900], [1], heads=(16, 1), by=BY, **LATENT),
    "documents": lambda: decode_pages([600], [1], work=paged_work(DOCUMENTS)),
    "other documents": lambda: decode_pages([600], [1], work=paged_work(ls.documents(ids=IDS) & ~ls.causal())),
    "counts that differ": lambda: decode_pages([5000] * 50, [4] + [1] * 49, heads=(32, 4)),
    "FP8": lambda: decode_pages([600, 80], [1, 1], new=True, scales=(0.5, 2.0), work=paged_work(scales=(0.5, 2.0))),
    "FP8 of 17 rows": lambda: decode_pages([600], [6], scales=(0.5, 2.0), work=paged_work(scales=(0.5, 2.0))),
    "64 new tokens": lambda: decode_pages([600, 80], [64, 2], new=True),
    "split kernel of lengths that differ": lambda: decode_pages([9000, 90_000, 7] * 30, [1] * 90, heads=(128, 1), by=BY, **LATENT),
    "split kernel of two tokens": lambda: decode_pages([9000] * 70, [2] * 70, heads=(128, 2), by=BY, **LATENT),
    "contiguous": lambda: decode_contiguous(2, (12, 4), 3, 700, (64, 48)),
    "contiguous of groups": lambda: decode_contiguous(50, (12, 4), 1, 5000, (64, 48)),
    "contiguous of groups that read": lambda: decode_contiguous(5, (12, 4), 1, 5000, (64, 48), work=paged_work(None, ALIBI)),
    "contiguous float32": lambda: decode_contiguous(1, (2, 1), 20, 5000, (16, 80), FP32),
    "contiguous of 17 rows": lambda: decode_contiguous(1, (17, 1), 1, 300, (16, 16), FP16, paged_work(DOCUMENTS, ALIBI)),
}


# ------------------------------------------------------------------------------------------------ attention


def attend(
    mask: Any, score: Any = None, *, capability: tuple[int, int] = (9, 0), dims: tuple[int, int] = (64, 48), dtype: torch.dtype = BF16,
    heads: tuple[int, int] = (6, 2), batch: int = 2, block: int = 128, q: Any = ((0, 300),), kv: Any = ((0, 300),), **more: Any,
) -> Any:  # fmt: skip
    """The launches of the three passes."""
    first = (1, 2) if more.pop("moved", False) else (0, 0)
    work = work_of(mask, q, kv, block=block, batch=batch, heads=heads[0], first=first)
    traced = None if score is None else trace(score, "score")
    if traced is not None:
        work = replace(work, score=traced.program, score_captured=traced.captured(), joint=joint_of(traced.program))
    work = replace(work, **more)
    q_len, kv_len = work.q_tiles.length, work.kv_tiles.length
    query, grad_out = (torch.zeros(batch, heads[0], q_len, dim, dtype=dtype) for dim in dims)
    keys, values = (torch.zeros(batch, kv_len, heads[1], dim, dtype=dtype).transpose(1, 2) for dim in dims)
    lse, delta, wide = torch.zeros(3, batch, heads[0], q_len), torch.zeros(batch, heads[0], q_len), torch.zeros(keys.shape)
    call = passes.TritonCall(AttentionInputs(q=query, k=keys, v=values), work, capability=capability, config=None)
    state, terms = State(out=grad_out.clone(), lse=lse[0]), passes.RowTerms(lse=lse[1], norm=lse[2], delta=delta)

    def run() -> None:
        call.forward(state, None, busy_only=False)
        call.forward(state, state, busy_only=True)
        captured = [torch.zeros_like(c) if c.is_floating_point() else None for c in work.score_captured]
        call.dq(grad_out, terms, query.float(), captured, add=True)
        call.dq(grad_out, replace(terms, out=grad_out, grad_lse=delta), query.clone(), [None] * len(captured), add=False)
        call.dkdv(grad_out, terms, wide, values.clone())

    return Recorder.of(run)


def by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (kv > 7 * h - 200)


def by_batch(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q < 200 + 90 * b)


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (IDS[q] == IDS[kv])


PARTS: dict[str, Any] = {"q": ((30, 150), (250, 80)), "kv": ((0, 130), (200, 97))}
PASSES: dict[str, Callable[[], Any]] = {
    "causal": lambda: attend(causal),
    "causal on Ampere": lambda: attend(causal, capability=(8, 0)),
    "float32": lambda: attend(causal, dtype=FP32),
    "scored": lambda: attend(causal, ALIBI),
    "by head": lambda: attend(by_head, ALIBI, dims=(128, 80)),
    "by batch row": lambda: attend(by_batch, dims=(128, 128)),
    "documents of 128": lambda: attend(documents, dims=(80, 128)),
    "wide": lambda: attend(documents, dims=(192, 128)),
    "fine": lambda: attend(documents, dims=(128, 128), block=64),
    "parts": lambda: attend(documents, ALIBI, dims=(128, 100), block=64, **PARTS),
    "moved": lambda: attend(by_head, batch=1, heads=(4, 4), moved=True),
    "invariant": lambda: attend(by_batch, ALIBI, invariant=True, **PARTS),
    "tiles that do not cover": lambda: attend(causal, dims=(128, 128), q=((0, 130),), kv=((0, 130),)),
}


def attend_gathered(dims: tuple[int, int], dtype: torch.dtype, score: Any, per_choice: int, heads: tuple[int, int], k: int) -> Any:
    """The launches of a call over single chosen keys: indices without repeats, forward, backward."""
    work = work_of(causal, ((0, 64),), ((0, 96),), block=64)
    traced = None if score is None else trace(score, "score")
    if traced is not None:
        work = replace(work, score=traced.program, score_captured=traced.captured(), joint=joint_of(traced.program))
    indices = torch.zeros(2, heads[0] // per_choice, 32, k, dtype=torch.int32)
    selection = Selection(indices=indices, granularity=3, q_granularity=2, heads_per_choice=per_choice)
    query, grad_out = (torch.zeros(2, heads[0], 64, dim, dtype=dtype) for dim in dims)
    keys, values = (torch.zeros(2, heads[1], 96, dim, dtype=dtype) for dim in dims)
    lse = torch.zeros(2, heads[0], 64)

    def run() -> None:
        chosen = gathered_call.gathered_work(work, selection)
        call = gathered_call.GatheredCall(AttentionInputs(q=query, k=keys, v=values), chosen)
        call.forward(None)
        call.forward(State(out=grad_out.float(), lse=lse))
        call.backward(grad_out, lse, lse)

    return Recorder.of(run)


def gather(start: int, stop: int, *, shared: bool) -> Any:
    k = torch.zeros(7, 3, 16, 40)
    v = k[..., :24] if shared else torch.zeros(7, 3, 16, 24)
    pages = PagedKV(k=k, v=v, table=torch.zeros(4, 9, dtype=torch.int32), shared=shared)
    return Recorder.of(lambda: gather_pages.gather_pages(pages, 2, start, stop))


OTHERS: dict[str, Callable[[], Any]] = {
    "gathered": lambda: attend_gathered((64, 48), BF16, None, 4, (12, 3), 5),
    "gathered scored": lambda: attend_gathered((16, 32), FP16, ALIBI, 2, (12, 3), 9),
    "gathered wide": lambda: attend_gathered((192, 128), BF16, None, 6, (6, 1), 40),
    "gathered values of 160": lambda: attend_gathered((32, 160), BF16, None, 1, (4, 4), 1),
    "gathered float32": lambda: attend_gathered((32, 16), FP32, None, 20, (20, 1), 16),
    "gathered pages": lambda: [gather(start, stop, shared=shared) for start, stop in ((0, 5), (37, 140)) for shared in (False, True)],
}


# ------------------------------------------------------------------------------------------------ rules


def configurations() -> Any:
    rows: Iterable[Any] = itertools.product(((8, 0), (8, 9), (9, 0), (10, 0)), (16, 64, 128, 256), (64, 128, 256), (FP32, BF16))
    chosen = [
        str(config.choose(capability=c, d=d, e=e, dtype=dtype, scored=scored, looks_up=looks_up, fine=fine))
        for c, d, e, dtype in rows
        for scored, looks_up, fine in itertools.product((False, True), repeat=3)
        if c == (9, 0) or (scored and looks_up and fine)
    ]
    kinds = sorted(set(chosen))
    return [kinds, [kinds.index(c) for c in chosen]]


def fine_tables() -> Any:
    cases: Iterable[Any] = itertools.product(((8, 9), (9, 0)), (128, 256), (128, 256), (FP32, BF16), (0.1, 0.11))
    return [
        config.prefers_fine_tables(capability=c, d=d, e=e, dtype=dtype, partial_share=share) for c, d, e, dtype, share in cases
    ]  # fmt: skip


RULES = [SplitRule(256, 0, 16, 4096), SplitRule(256, 1024, 4), SplitRule(32, 0, 5, 128), SplitRule(64, 512, 3, 700), SplitRule(16, 64, 1)]


def splits() -> Any:
    made: list[Any] = []
    for rule in RULES:
        edges = {rule.smallest << i for i in range(9)} | {rule.share * (rule.smallest << 2 * i) for i in range(4)} | {4 * rule.coarse}
        lengths = sorted({0, 1} | {n + step for n in edges for step in (-1, 0, 1) if n})
        made.append([[n, rule.tokens(n), rule.count(n), rule.count(n, grouped=True), rule.max_count(n)] for n in lengths])
        made.append([rule.max_count(n, grouped=True) for n in lengths])
        for chosen in (lengths[2:3], lengths[3::5], lengths[-2:]):
            counts = rule.counts(chosen)
            made.append([list(counts), list(rule.largest_counts(chosen[-1], len(chosen)))])
            tiles = (1, 7, 64)
            made.append([[rule.cta_group(counts, max(chosen), t, sms) for t in tiles] for sms in (1, 20, 132)])
            made.append([[counts.groups_fill(t, sms, needed) for t in tiles] for sms in (1, 20, 132) for needed in (1, 2)])
    return made


def decode_tiles() -> Any:
    dims: Iterable[Any] = itertools.product((64, 128, 256, 512), (FP32, BF16), (16, 17, 32, 33, 63, 64), (4.0, 4.1))
    tiles = [choose_tile(dim=dim, dtype=dtype, rows=rows, waves=waves) for dim, dtype, rows, waves in dims]
    tiles += [
        choose_tile(dim=dim, dtype=dtype, rows=rows, waves=1.0, fp8=True)
        for dim in (64, 128, 256)
        for dtype in (FP32, FP16)
        for rows in (16, 32)
    ]
    rows = [tile_rows(n, dim, dtype) for n in (1, 16, 17, 32, 33, 99) for dim in (256, 257) for dtype in (FP32, BF16)]
    kinds = sorted(set(map(str, tiles)))
    registers = [decode_call._registers(tile, n) for tile in tiles for n in (16, 17)]
    return [kinds, [kinds.index(str(t)) for t in tiles], [[t.stages(paged=p) for p in (False, True)] for t in tiles], rows, registers]


ARGUMENTS: dict[str, Callable[[], Any]] = {
    **{f"decode: {name}": call for name, call in DECODE.items()},
    **{f"passes: {name}": call for name, call in PASSES.items()},
    **OTHERS,
    "configurations": configurations, "fine tables": fine_tables, "splits": splits, "decode tiles": decode_tiles,
}  # fmt: skip


@cache
def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_as_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_gpus(monkeypatch)
    try:
        assert ARGUMENTS[name]() == recorded()[name]
    finally:
        clear_caches()


def test_calls_that_differ_have_launches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are kept from call to call."""
    as_on_gpus(monkeypatch)
    try:
        for name in [*DECODE, *reversed(DECODE)]:
            assert DECODE[name]() == recorded()[f"decode: {name}"], name
    finally:
        clear_caches()


@pytest.mark.parametrize(
    ("dims", "shared", "words"),
    [
        ((256, 256), False, None),
        ((257, 8), False, "head dims 257 and 8: expected at most 256 each"),
        ((8, 264), False, "head dims 8 and 264: expected at most 256 each"),
        ((768, 512), True, None),
        ((769, 512), True, "shared KV of 512 and 257 more elements: expected at most 512 and 256"),
        ((600, 520), True, "shared KV of 520 and 80 more elements: expected at most 512 and 256"),
    ],
)
def test_head_dims_that_decode_kernels_support(
    dims: tuple[int, int], shared: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(decode_call, "interpreted", lambda: True)
    q = torch.zeros(1, 2, 1, dims[0])
    assert decode_call.unsupported_reason(q, dims, paged_work(), sequences=1, longest=9, shared=shared) == words


def test_devices_dtypes_and_programs_that_decode_kernels_support(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(q: Any, work: PagedWork | None = None, longest: int = 700, sequences: int = 2) -> str | None:
        return decode_call.unsupported_reason(q, (16, 16), work or paged_work(), sequences=sequences, longest=longest, shared=False)

    q = torch.zeros(1, 12, 1, 16)
    assert reason(q.double()) == "dtype torch.float64: expected bfloat16, float16 or float32"
    words = "expected a CUDA device of compute capability 8.0 or later"
    monkeypatch.setattr(decode_call, "interpreted", lambda: False)
    assert reason(q) == f"tensors on cpu: {words}"
    device: Any = SimpleNamespace(dtype=FP32, is_cuda=True, device=CPU, shape=q.shape)
    for capability, wanted in (((7, 5), f"tensors on cpu: {words}"), ((8, 0), None), ((9, 0), None)):
        monkeypatch.setattr(decode_call, "capability", lambda device, capability=capability: capability)
        assert reason(device) == wanted
    words = "FP8 KV on cpu: expected a CUDA device of compute capability 8.9 or later"
    for capability, wanted in (((8, 6), words), ((8, 9), None), ((9, 0), None)):
        monkeypatch.setattr(decode_call, "capability", lambda device, capability=capability: capability)
        assert reason(device, paged_work(scales=(1.0, 1.0))) == wanted
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert reason(device, paged_work(scales=(1.0, 1.0))) == words
    monkeypatch.setattr(decode_call, "interpreted", lambda: True)
    assert reason(q, paged_work(DOCUMENTS, ALIBI)) is None
    assert "for sequences of 701 tokens" in str(reason(q, paged_work(DOCUMENTS, ALIBI), longest=701))
    assert "may look outside" in str(reason(torch.zeros(1, 13, 1, 16), paged_work(DOCUMENTS, ALIBI)))
    by_sequence = paged_work(lambda b, h, q, kv: IDS[b] < q)
    assert reason(q, by_sequence, sequences=700) is None and reason(q, by_sequence, sequences=701) is not None
    sums = paged_work(None, lambda s, b, h, q, kv: s + torch.atan2(s, s))
    assert "uses atan2" in str(reason(q, sums)) and "uses atan2" in str(reason(q, paged_work(lambda b, h, q, kv: torch.atan2(q, kv) > 0)))


@pytest.mark.parametrize("rule", RULES)
def test_no_shorter_sequence_has_more_splits_than_the_bound(rule: SplitRule) -> None:
    for grouped in (False, True):
        most = 0
        for length in range(1, 700):
            most = max(most, rule.count(length, grouped=grouped))
            assert most <= rule.max_count(length, grouped=grouped)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        as_on_gpus(patch)
        lines = [f"{json.dumps(name)}: {json.dumps(make())}" for name, make in ARGUMENTS.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
