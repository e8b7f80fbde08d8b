"""Launches of the decode kernels. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.compile_options import FUSED
from longspan._kernels.gpu.device import capability
from longspan._kernels.gpu.interpreter import computable, interpreted
from longspan._kernels.gpu.launch_call import tf32_allowed
from longspan._kernels.gpu.limits import MAX_HEAD_DIM
from longspan._kernels.gpu.lookup_bounds import stays_inside
from longspan._kernels.gpu.prepared_launch import Layouts, PreparedLaunch, hold_for_graph, layouts
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork, QueryRanges
from longspan._kernels.protocol import like_query
from longspan._kernels.triton.decode import decode_kernel, merge_kernel, write_kernel

SMALLEST_SPLIT = 256  # a multiple of every `DecodeTile.n`
_MERGED_SPLITS, _MERGED_DIM = 64, 64  # splits that are merged at once, and elements of a row per CTA
_DECODE_TENSORS = ("q_ptr", "k_ptr", "v_ptr", "table_ptr", "ranges_ptr", "part_out_ptr", "part_lse_ptr")
_MERGE_TENSORS = ("part_out_ptr", "part_lse_ptr", "ranges_ptr", "sink_ptr", "out_ptr", "lse_ptr")
MAX_SHARED_DIM = 512  # elements that keys and values share
_FLOATS = torch.empty(4, dtype=torch.float32, device="cpu")  # placeholder of the partial results in cache keys: every launch allocates them
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class DecodeTile:
    """Keys per step, warps per CTA and stages of the software pipeline."""

    n: int
    warps: int
    stages: int


def choose_tile(*, dim: int, dtype: torch.dtype, page_size: int) -> DecodeTile:
    """The tile for padded head dims of at most `dim`. `page_size`: 0 for contiguous KV.

    n, the keys that are summed at a time, does not depend on the page size: a row has the same bits on pages of any size.
    """
    if dim > 256:  # latent vectors of MLA: key and value are one tile
        return DecodeTile(n=16 if dtype == torch.float32 else 64, warps=4, stages=2)
    if dtype == torch.float32:
        return DecodeTile(n=32, warps=4, stages=3)
    if dim > 128:
        return DecodeTile(n=32, warps=4, stages=4)
    return DecodeTile(n=64, warps=4, stages=5 if page_size else 4)  # loading a page's number is a stage of its own


def unsupported_reason(
    q: Tensor, dims: tuple[int, int], work: PagedWork, *, sequences: int, longest: int, shared: bool = False
) -> str | None:
    """The reason why the decode kernels do not support a call; else None. `longest`: tokens of the longest sequence.

    shared: values are the first dims[1] elements of keys.
    """
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype}: expected bfloat16, float16 or float32"
    if not interpreted() and (not q.is_cuda or capability(q.device) < (8, 0)):
        return f"tensors on {q.device}: expected a CUDA device of compute capability 8.0 or later"
    if shared and (dims[1] > MAX_SHARED_DIM or dims[0] - dims[1] > MAX_HEAD_DIM):
        return f"shared KV of {dims[1]} and {dims[0] - dims[1]} more elements: expected at most {MAX_SHARED_DIM} and {MAX_HEAD_DIM}"
    if not shared and max(dims) > MAX_HEAD_DIM:
        return f"head dims {dims[0]} and {dims[1]}: expected at most {MAX_HEAD_DIM} each"
    for program, captured in ((work.mask, work.mask_captured), (work.score, work.score_captured)):
        if program is not None and not stays_inside(program, captured, (sequences, q.shape[1], longest, longest)):
            return f"{program.name} may look outside of a tensor that it captures, for sequences of {longest} tokens"
    options = _options(work, q.dtype, longest)
    return next((r for p in (work.mask, work.score) if (r := codegen.unsupported(p, None, options)) is not None), None)


def split_count(length: int, kv_heads: int) -> int:
    """Number of splits of a sequence: as `decode.split_tokens`."""
    tokens = SMALLEST_SPLIT
    while tokens < 4 * kv_heads * (length // tokens):
        tokens *= 2
    return -(-length // tokens)


def max_split_count(longest: int, kv_heads: int) -> int:
    """Upper bound of `split_count` over all lengths up to `longest`: a shorter sequence may have more splits than a longer one."""
    tokens = SMALLEST_SPLIT
    while tokens < 4 * kv_heads * (longest // tokens):
        tokens *= 2
    shorter = tokens // 2 // (4 * kv_heads) + 1 if tokens > SMALLEST_SPLIT else 0
    return max(-(-longest // tokens), shorter)


def write_tokens(pages: PagedKV, k: Tensor, v: Tensor, ranges: QueryRanges) -> None:
    """Write new tokens k [n, G, count, D] or [1, G, T, D], and v alike, into their pages, in one launch."""
    if k.shape[0] * k.shape[2]:
        launch_, tensors = write_launch(pages, k, v, ranges)
        launch_(tensors, {})


def write_launch(pages: PagedKV, k: Tensor, v: Tensor, ranges: QueryRanges) -> tuple[PreparedLaunch, dict[str, Tensor | None]]:
    """The launch of `write_tokens`, and its tensors."""
    tensors: dict[str, Tensor | None] = {
        "k_ptr": k, "v_ptr": v, "k_pages_ptr": pages.k, "v_pages_ptr": pages.v, "table_ptr": pages.table,
        "positions_ptr": ranges.positions, "rows_ptr": ranges.token_rows,
    }  # fmt: skip
    constants = {
        **_dims(k.shape[-1], v.shape[-1]), "kv_heads": k.shape[1], "width": pages.table.shape[1], "tokens": k.shape[2],
        "PAGE": pages.page_size, "SHARED": pages.shared,
    }  # fmt: skip
    how = _How(ctas=k.shape[0] * k.shape[2] * k.shape[1], warps=1)
    return _prepared_for(write_kernel, tensors, constants, how, {}), tensors


class Queries(NamedTuple):
    """Queries of a call and where they stand. `ranges`: None for contiguous KV, whose queries are at 0, 1, …"""

    q: Tensor
    ranges: QueryRanges | None
    ragged: bool


def attend_pages(queries: Queries, pages: PagedKV, work: PagedWork) -> tuple[Tensor, Tensor]:
    """(out, lse) of all sequences with at most FEW_QUERIES queries; rows of other sequences are not initialised.

    One launch for each tile size that a sequence has: tiles follow from the sequence's own number of queries.
    """
    q = queries.q
    kv = computable(pages.k), computable(pages.v)
    out, lse = empty_results(q, kv[1].shape[-1])
    for sizes in page_sizes(queries, pages):
        decode_launch(queries, (*kv, pages.table), work, sizes, (out, lse)).run()
    return out.to(q.dtype), lse


def page_sizes(queries: Queries, pages: PagedKV) -> list[DecodeSizes]:
    """The sizes of each launch of `attend_pages`."""
    q, ranges, _ = queries
    assert ranges is not None
    kv_heads = pages.k.shape[1]
    by_tile: dict[int, list[int]] = {}
    for i, count in enumerate(ranges.counts):
        if 0 < count <= FEW_QUERIES:
            by_tile.setdefault(_tile_rows(count * (q.shape[1] // kv_heads), pages.v.shape[-1]), []).append(i)
    made = []
    for m, chosen in by_tile.items():
        counts, lengths = [ranges.counts[i] for i in chosen], [ranges.lengths[i] for i in chosen]
        longest, splits = max(lengths), max(split_count(length, kv_heads) for length in lengths)
        if ranges.longest is not None:  # a captured launch: sequences may grow to that length
            longest, splits = max(longest, ranges.longest), max_split_count(max(longest, ranges.longest), kv_heads)
        # Rounded up, so that a launch is prepared for a few decoded tokens only of a thousand: CTAs without a split end at once.
        unit = 1 << max(0, splits.bit_length() - 3)
        made.append(DecodeSizes(
            sequences=len(ranges.counts), queries=(min(counts), max(counts)), longest=_position_bound(longest),
            splits=-(-splits // unit) * unit, tile_rows=m, shared=pages.shared,
        ))  # fmt: skip
    return made


def attend_contiguous(q: Tensor, k: Tensor, v: Tensor, work: PagedWork) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries q [B, H, Q, D] at positions 0, 1, … over k [B, G, K, D] and v [B, G, K, E]."""
    k, v = computable(k), computable(v)
    out, lse = empty_results(q, v.shape[-1])
    _contiguous_launch(q, k, v, work, (out, lse)).run()
    return out.to(q.dtype), lse


def _contiguous_launch(q: Tensor, k: Tensor, v: Tensor, work: PagedWork, results: tuple[Tensor, Tensor]) -> DecodeLaunch:
    rows = _tile_rows(q.shape[2] * (q.shape[1] // k.shape[1]), v.shape[-1])
    sizes = DecodeSizes(
        sequences=q.shape[0], queries=(q.shape[2], q.shape[2]), longest=k.shape[2], splits=split_count(k.shape[2], k.shape[1]),
        tile_rows=rows,
    )  # fmt: skip
    return decode_launch(Queries(q, None, False), (k, v, None), work, sizes, results)


class DecodeForward:
    """`attend_contiguous` of a call that repeats (`PreparedForward`)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, work: PagedWork) -> None:
        made = _contiguous_launch(q, k, v, work, empty_results(q, v.shape[-1]))
        # Holds the mask's captured tensors and no other tensor of the caller: an empty list is packed as (q,) at each call.
        self._mask_captured = made.per_call["mask_captured"] if work.mask_captured else None
        self._launch = made._replace(tensors=dict.fromkeys(made.tensors), per_call={"scale": made.per_call["scale"]})

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, score_captured: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        out, lse = empty_results(q, v.shape[-1])
        tensors = {**self._launch.tensors, "q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse}
        mask_captured = launch.pack_captured((), q) if self._mask_captured is None else self._mask_captured
        per_call = {**self._launch.per_call, "mask_captured": mask_captured, "score_captured": launch.pack_captured(score_captured, q)}
        self._launch._replace(tensors=tensors, per_call=per_call).run()
        return out, lse


class DecodeSizes(NamedTuple):
    """Sizes of a launch: sequences, fewest and most queries of a sequence, tokens of the longest sequence, most splits of a sequence, rows
    of a tile; whether values are the first elements of keys.
    """

    sequences: int
    queries: tuple[int, int]
    longest: int
    splits: int
    tile_rows: int
    shared: bool = False


def _tile_rows(rows: int, dim: int) -> int:
    """Rows of a tile for a sequence with so many query rows of a KV head. `dim`: of values; registers hold rows × dim results."""
    return 16 if rows <= 16 or dim > 256 else 32 if rows <= 32 else 64


def empty_results(q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    q = computable(q)
    return like_query(q, dim, q.dtype), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


class DecodeLaunch(NamedTuple):
    """The two launches of a call and their arguments."""

    decode: PreparedLaunch
    merge: PreparedLaunch
    tensors: dict[str, Tensor | None]
    per_call: dict[str, Any]
    parts: tuple[int, int]

    def run(self) -> None:
        device = self.decode.device
        part_out = torch.empty(self.parts[0], dtype=torch.float32, device=device)
        part_lse = torch.empty(self.parts[1], dtype=torch.float32, device=device)
        tensors: dict[str, Tensor | None] = {**self.tensors, "part_out_ptr": part_out, "part_lse_ptr": part_lse}
        self.decode({name: tensors[name] for name in _DECODE_TENSORS}, self.per_call)
        self.merge({name: tensors[name] for name in _MERGE_TENSORS}, {})


def decode_launch(
    queries: Queries, kv: tuple[Tensor, Tensor, Tensor | None], work: PagedWork, sizes: DecodeSizes, results: tuple[Tensor, Tensor]
) -> DecodeLaunch:  # fmt: skip
    """The launches that fill out and lse of the sequences with a number of queries in `sizes.queries`."""
    (k, v, table), q = kv, computable(queries.q)
    tensors = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "table_ptr": table,
        "ranges_ptr": None if queries.ranges is None else queries.ranges.device_ranges,
        "sink_ptr": None if work.sink is None else computable(work.sink.contiguous()), "out_ptr": results[0], "lse_ptr": results[1],
        "part_out_ptr": _FLOATS, "part_lse_ptr": _FLOATS,
    }  # fmt: skip
    mask_captured, score_captured = (launch.pack_captured(x, q) for x in (work.mask_captured, work.score_captured))
    per_call = {"mask_captured": mask_captured, "score_captured": score_captured, "scale": float(work.scale)}
    key = (
        layouts(tensors.values()), layouts(mask_captured), layouts(score_captured), sizes, queries.ragged, q.device,
        work.window, work.scale > 0, None if work.mask is None else work.mask.key, None if work.score is None else work.score.key,
        tf32_allowed(), SMALLEST_SPLIT,
    )  # fmt: skip
    decode, merge, parts = _launches(ByContents(key, partial(_make_launches, queries.ragged, tensors, work, sizes, per_call)))
    if launch.capturing(q.device):
        hold_for_graph(decode)
        hold_for_graph(merge)
    return DecodeLaunch(decode, merge, tensors, per_call, parts)


class ByContents:
    """A key for `lru_cache` and the function that makes its value. Keys with equal contents are equal."""

    def __init__(self, contents: Hashable, make: Callable[[], Any]) -> None:
        self._contents, self._hash, self.make = contents, hash(contents), make

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByContents) and self._contents == other._contents

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=256)
def _launches(key: ByContents) -> tuple[PreparedLaunch, PreparedLaunch, tuple[int, int]]:
    launches, key.make = key.make(), _made  # the function holds tensors
    return launches  # type: ignore[no-any-return]


def _made() -> Any:
    raise AssertionError("the launches of this key were made before")


def _make_launches(
    ragged: bool, tensors: dict[str, Tensor | None], work: PagedWork, sizes: DecodeSizes, per_call: dict[str, Any]
) -> tuple[PreparedLaunch, PreparedLaunch, tuple[int, int]]:  # fmt: skip
    """(decode, merge, sizes of the partial results)."""
    q, k, v, table = (tensors[name] for name in ("q_ptr", "k_ptr", "v_ptr", "table_ptr"))
    assert q is not None and k is not None and v is not None
    page_size = 0 if table is None else k.shape[2]
    heads, kv_heads, d, e, m = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], sizes.tile_rows
    splits, max_queries = sizes.splits, sizes.queries[1]
    row_tiles = -(-max_queries * (heads // kv_heads) // m)
    rest = d - e if sizes.shared else 0
    tile = choose_tile(dim=max(launch.padded(d - rest), launch.padded(e)), dtype=q.dtype, page_size=page_size)
    options = _options(work, q.dtype, sizes.longest)
    shared = {
        "sequences": sizes.sequences, "kv_heads": kv_heads, "splits": splits, "min_queries": sizes.queries[0], "max_queries": max_queries,
        "q_len": q.shape[2], "kv_len": sizes.longest, "first_key": 0, "smallest": SMALLEST_SPLIT,
        "WINDOW": work.window, "RAGGED": ragged, "R": heads // kv_heads, "M": m, "N": tile.n,
    }  # fmt: skip
    constants = {
        **shared, **_dims(d - rest, e), "REST": rest, "RESTP": launch.padded(rest), "SHARED": sizes.shared,
        "row_tiles": row_tiles, "width": 0 if table is None else table.shape[1], "PAGE": page_size,
        "mask_sizes": launch.pack_sizes(work.mask_captured), "score_sizes": launch.pack_sizes(work.score_captured),
        "MASK": launch.function(work.mask, options), "SCORE": launch.function(work.score, options),
        "FOLD": work.score is None and work.scale > 0,
        "PRECISION": "ieee" if q.dtype == torch.float32 and not tf32_allowed() else "tf32",
    }  # fmt: skip
    rows = sizes.sequences * heads * max_queries
    part = min(_MERGED_DIM, launch.padded(e))
    decode = _How(ctas=sizes.sequences * splits * row_tiles * kv_heads, warps=tile.warps, stages=tile.stages)
    merge = _How(ctas=rows * (launch.padded(e) // part), warps=4)
    merged = {**shared, "S": _MERGED_SPLITS, "E": e, "EP": launch.padded(e), "PART": part}
    return (
        _prepared_for(decode_kernel, {name: tensors[name] for name in _DECODE_TENSORS}, constants, decode, per_call),
        _prepared_for(merge_kernel, {name: tensors[name] for name in _MERGE_TENSORS}, merged, merge, {}),
        (rows * splits * e, rows * splits),
    )


def _dims(d: int, e: int) -> dict[str, int]:
    return {"D": d, "DP": launch.padded(d), "E": e, "EP": launch.padded(e)}


def _options(work: PagedWork, dtype: torch.dtype, longest: int) -> codegen.Options:
    """Compile options of the programs. `longest`: an upper bound of positions."""
    tables: Sequence[Tensor] = [*work.mask_captured, *work.score_captured]
    return codegen.Options(
        max_position=_position_bound(longest),
        fast=dtype != torch.float32,
        big_tables=any(t.numel() >= 2**31 for t in tables),
        interpreted=interpreted(),
    )


def _position_bound(longest: int) -> int:
    """The bound of positions for which programs are compiled."""
    return codegen.SHORT if longest <= codegen.SHORT else codegen.LONG


class _How(NamedTuple):
    """How a kernel is launched: CTAs, warps, pipeline stages."""

    ctas: int
    warps: int
    stages: int = 1


def _prepared_for(
    kernel: Any, tensors: dict[str, Tensor | None], constants: dict[str, Any], how: _How, per_call: dict[str, Any]
) -> PreparedLaunch:  # fmt: skip
    """The launch of a kernel, cached by the layouts of tensors and by constants."""
    device = next(t.device for t in reversed(tensors.values()) if t is not None and t is not _FLOATS)
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
    return PreparedLaunch(
        kernel=kernel, options={"num_warps": how.warps, "num_stages": how.stages, **FUSED}, ctas=how.ctas, device=device, descriptors={},
        constants=dict(constants),
    )  # fmt: skip
