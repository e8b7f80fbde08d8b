"""Launches of the decode kernels. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.compile_options import FUSED
from longspan._kernels.gpu.device import capability
from longspan._kernels.gpu.interpreter import computable, interpreted
from longspan._kernels.gpu.launch_call import tf32_allowed
from longspan._kernels.gpu.limits import MAX_HEAD_DIM
from longspan._kernels.gpu.prepared_launch import Layouts, PreparedLaunch, hold_for_graph, layouts
from longspan._kernels.gpu.workspace import Workspace
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork, QueryRanges
from longspan._kernels.protocol import like_query
from longspan._kernels.triton.decode import decode_kernel, write_kernel

SMALLEST_SPLIT = 256  # a multiple of every `DecodeTile.n`
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class DecodeTile:
    """Keys per step, warps per CTA and stages of the software pipeline."""

    n: int
    warps: int
    stages: int


def choose_tile(*, dim: int, dtype: torch.dtype, page_size: int) -> DecodeTile:
    """The tile for padded head dims of at most `dim`. `page_size`: 0 for contiguous KV."""
    if dtype == torch.float32:
        return DecodeTile(n=32, warps=4, stages=3)
    if dim > 128:
        return DecodeTile(n=32, warps=4, stages=4)
    # Loading a page's number is a stage of its own.
    return DecodeTile(n=64, warps=4, stages=5 if page_size else 4)


def refusal(q: Tensor, dims: tuple[int, int], work: PagedWork, longest: int) -> str | None:
    """The reason why the decode kernels do not support a call; else None. `longest`: tokens of the longest sequence."""
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype}: expected bfloat16, float16 or float32"
    if not interpreted() and (not q.is_cuda or capability(q.device) < (8, 0)):
        return f"tensors on {q.device}: expected a CUDA device of compute capability 8.0 or later"
    if max(dims) > MAX_HEAD_DIM:
        return f"head dims {dims[0]} and {dims[1]}: expected at most {MAX_HEAD_DIM} each"
    options = _options(work, q.dtype, longest)
    return next((r for p in (work.mask, work.score) if (r := codegen.unsupported(p, None, options)) is not None), None)


def split_count(length: int, kv_heads: int) -> int:
    """Number of splits of a sequence: as `decode.split_tokens`."""
    tokens = SMALLEST_SPLIT
    while tokens < 4 * kv_heads * (length // tokens):
        tokens *= 2
    return -(-length // tokens)


def write_tokens(pages: PagedKV, k: Tensor, v: Tensor, ranges: QueryRanges) -> None:
    """Write new tokens k [n, G, count, D] or [1, G, T, D], and v alike, into their pages, in one launch."""
    count = k.shape[0] * k.shape[2]
    if not count:
        return
    tensors = {
        "k_ptr": k, "v_ptr": v, "k_pages_ptr": pages.k, "v_pages_ptr": pages.v, "table_ptr": pages.table,
        "positions_ptr": ranges.positions, "rows_ptr": ranges.token_rows,
    }  # fmt: skip
    constants = {
        **_dims(k.shape[-1], v.shape[-1]), "kv_heads": k.shape[1], "width": pages.table.shape[1], "tokens": k.shape[2],
        "PAGE": pages.page_size,
    }  # fmt: skip
    _prepared_for(write_kernel, tensors, constants, _How(ctas=count * k.shape[1], warps=1), {})(tensors, {})


class Queries(NamedTuple):
    """Queries of a call and where they stand. `ranges`: None for contiguous KV, whose queries are at 0, 1, …"""

    q: Tensor
    ranges: QueryRanges | None
    ragged: bool


def attend_pages(queries: Queries, pages: PagedKV, work: PagedWork) -> tuple[Tensor, Tensor]:
    """(out, lse) of all sequences with at most FEW_QUERIES queries; rows of other sequences are not initialised.

    One launch for each tile size that a sequence has: tiles follow from the sequence's own number of queries.
    """
    q, ranges, _ = queries
    assert ranges is not None
    kv = computable(pages.k), computable(pages.v)
    out, lse = _empty_results(q, kv[1].shape[-1])
    group = q.shape[1] // kv[0].shape[1]
    by_tile: dict[int, list[int]] = {}
    for i, count in enumerate(ranges.counts):
        if 0 < count <= FEW_QUERIES:
            by_tile.setdefault(_tile_rows(count * group), []).append(i)
    for m, chosen in by_tile.items():
        counts = [ranges.counts[i] for i in chosen]
        sizes = _Sizes(
            sequences=len(ranges.counts), queries=(min(counts), max(counts)), longest=max(ranges.lengths[i] for i in chosen), tile_rows=m
        )  # fmt: skip
        _decode_launch(queries, (*kv, pages.table), work, sizes, (out, lse)).run()
    return out.to(q.dtype), lse


def attend_contiguous(q: Tensor, k: Tensor, v: Tensor, work: PagedWork) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries q [B, H, Q, D] at positions 0, 1, … over k [B, G, K, D] and v [B, G, K, E]."""
    k, v = computable(k), computable(v)
    out, lse = _empty_results(q, v.shape[-1])
    _contiguous_launch(q, k, v, work, (out, lse)).run()
    return out.to(q.dtype), lse


def _contiguous_launch(q: Tensor, k: Tensor, v: Tensor, work: PagedWork, results: tuple[Tensor, Tensor]) -> _Launch:
    rows = _tile_rows(q.shape[2] * (q.shape[1] // k.shape[1]))
    sizes = _Sizes(sequences=q.shape[0], queries=(q.shape[2], q.shape[2]), longest=k.shape[2], tile_rows=rows)
    return _decode_launch(Queries(q, None, False), (k, v, None), work, sizes, results)


class DecodeForward:
    """`attend_contiguous` of a call that repeats (`PreparedForward`)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, work: PagedWork) -> None:
        self._launch = _contiguous_launch(q, k, v, work, _empty_results(q, v.shape[-1]))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, score_captured: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        prepared, tensors, per_call = self._launch
        out, lse = _empty_results(q, v.shape[-1])
        tensors = {**tensors, "q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse}
        if score_captured:
            per_call = {**per_call, "score_captured": launch.pack_captured(score_captured, q)}
        prepared(tensors, per_call)
        return out, lse


class _Sizes(NamedTuple):
    """Sizes of a launch: sequences, fewest and most queries of a sequence, tokens of the longest sequence, rows of a tile."""

    sequences: int
    queries: tuple[int, int]
    longest: int
    tile_rows: int


def _tile_rows(rows: int) -> int:
    """Rows of a tile for a sequence with so many query rows of a KV head."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _empty_results(q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    q = computable(q)
    return like_query(q, dim, q.dtype), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


class _Launch(NamedTuple):
    """A launch and its arguments."""

    prepared: PreparedLaunch
    tensors: dict[str, Tensor | None]
    per_call: dict[str, Any]

    def run(self) -> None:
        self.prepared(self.tensors, self.per_call)


def _decode_launch(
    queries: Queries, kv: tuple[Tensor, Tensor, Tensor | None], work: PagedWork, sizes: _Sizes, results: tuple[Tensor, Tensor]
) -> _Launch:  # fmt: skip
    """The launch that fills out and lse of the sequences with a number of queries in `sizes.queries`."""
    (k, v, table), q, ranges, page_size = kv, computable(queries.q), queries.ranges, 0 if kv[2] is None else kv[0].shape[2]
    heads, kv_heads, d, e, m = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], sizes.tile_rows
    splits, most = split_count(sizes.longest, kv_heads), sizes.queries[1]
    row_tiles = -(-most * (heads // kv_heads) // m)
    tile = choose_tile(dim=max(launch.padded(d), launch.padded(e)), dtype=q.dtype, page_size=page_size)
    options = _options(work, q.dtype, sizes.longest)
    tensors = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "table_ptr": table, "ranges_ptr": None if ranges is None else ranges.device_ranges,
        "sink_ptr": None if work.sink is None else computable(work.sink.contiguous()), "out_ptr": results[0], "lse_ptr": results[1],
    }  # fmt: skip
    constants = {
        "sequences": sizes.sequences, "kv_heads": kv_heads, "row_tiles": row_tiles, "splits": splits, "min_queries": sizes.queries[0],
        "max_queries": most, "width": 0 if table is None else table.shape[1], "q_len": q.shape[2], "kv_len": sizes.longest,
        "first_key": 0, "smallest": SMALLEST_SPLIT, "WINDOW": work.window, "RAGGED": queries.ragged, "PAGE": page_size,
        "mask_sizes": launch.pack_sizes(work.mask_captured), "score_sizes": launch.pack_sizes(work.score_captured),
        "MASK": launch.function(work.mask, options), "SCORE": launch.function(work.score, options),
        "FOLD": work.score is None and work.scale > 0, "R": heads // kv_heads, "M": m, "N": tile.n, **_dims(d, e),
        "PRECISION": "ieee" if q.dtype == torch.float32 and not tf32_allowed() else "tf32",
    }  # fmt: skip
    per_call = {
        "mask_captured": launch.pack_captured(work.mask_captured, q),
        "score_captured": launch.pack_captured(work.score_captured, q),
        "scale": float(work.scale),
    }
    parts = sizes.sequences * heads * most * splits if splits > 1 else 1
    how = _How(
        ctas=sizes.sequences * splits * row_tiles * kv_heads, warps=tile.warps, stages=tile.stages,
        counters=sizes.sequences * row_tiles * kv_heads, floats=(parts * e, parts),
    )  # fmt: skip
    return _Launch(_prepared_for(decode_kernel, tensors, constants, how, per_call), tensors, per_call)


def _dims(d: int, e: int) -> dict[str, int]:
    return {"D": d, "DP": launch.padded(d), "E": e, "EP": launch.padded(e)}


def _options(work: PagedWork, dtype: torch.dtype, longest: int) -> codegen.Options:
    """Compile options of the programs. `longest`: an upper bound of positions."""
    tables: Sequence[Tensor] = [*work.mask_captured, *work.score_captured]
    return codegen.Options(
        max_position=codegen.SHORT if longest <= codegen.SHORT else codegen.LONG,
        fast=dtype != torch.float32,
        big_tables=any(t.numel() >= 2**31 for t in tables),
        interpreted=interpreted(),
    )


class _How(NamedTuple):
    """How a kernel is launched: CTAs, warps, pipeline stages; counters that begin at 0 and float32 workspaces, if it has any."""

    ctas: int
    warps: int
    stages: int = 1
    counters: int = 0
    floats: tuple[int, ...] = ()


def _prepared_for(
    kernel: Any, tensors: Mapping[str, Tensor | None], constants: dict[str, Any], how: _How, per_call: dict[str, Any]
) -> PreparedLaunch:  # fmt: skip
    """The launch of a kernel, cached by the layouts of tensors and by constants."""
    device = next(t.device for t in tensors.values() if t is not None)
    captured = [t for name in ("mask_captured", "score_captured") for t in per_call.get(name, ())]
    names = [name for name in kernel.arg_names if name.endswith("_stride")]
    strides = {name: _stride(tensors[f"{name.removesuffix('_stride')}_ptr"]) for name in names}
    prepared = _prepared(kernel, device, layouts([*tensors.values(), *captured]), tuple({**constants, **strides}.items()), how)
    if launch.capturing(device):
        hold_for_graph(prepared)
    return prepared


def _stride(tensor: Tensor | None) -> tuple[int, ...]:
    assert tensor is not None
    return tensor.stride()


@lru_cache(maxsize=512)
def _prepared(
    kernel: Any, device: torch.device, _layouts: Layouts, constants: tuple[tuple[str, Any], ...], how: _How
) -> PreparedLaunch:  # fmt: skip
    workspace = Workspace(device=device, zeros=(how.counters,), floats=how.floats) if how.counters else None
    return PreparedLaunch(
        kernel=kernel, options={"num_warps": how.warps, "num_stages": how.stages, **FUSED}, ctas=how.ctas, device=device, descriptors={},
        constants=dict(constants), workspace=workspace,
    )  # fmt: skip
