"""Launches of the decode kernels. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.device import capability, sm_count
from longspan._kernels.gpu.hoisted_lookups import early_function, early_options
from longspan._kernels.gpu.interpreter import computable, interpreted
from longspan._kernels.gpu.launch_call import tf32_allowed
from longspan._kernels.gpu.limits import MAX_HEAD_DIM
from longspan._kernels.gpu.lookup_bounds import stays_inside
from longspan._kernels.gpu.prepared_launch import PreparedLaunch, hold_for_graph, layouts
from longspan._kernels.gpu.split_kernel import SplitKernel
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork, QueryRanges
from longspan._kernels.protocol import like_query
from longspan._kernels.triton.decode import decode_kernel, write_kernel
from longspan._kernels.triton.decode_launch import FLAGS, FLOATS, LaunchShape, prepared_for, stride_of
from longspan._kernels.triton.decode_merge import merge_kernel
from longspan._kernels.triton.decode_sizes import FEW_GROUPS, GROUPED_RESULTS, DecodeSizes
from longspan._kernels.triton.decode_tile import DecodeTile, choose_tile, tile_rows
from longspan._kernels.triton.split_rule import RESIDENT, SplitCounts, SplitRule

SMALLEST_SPLIT = 256  # a multiple of every `DecodeTile.n`, and a power of two
GROUP_TOKENS = 4096  # of splits that one CTA may compute: 32 sequences of so many tokens, 8 KV heads, are 256 groups for 132 SMs
COARSE_SPLIT = 1024  # of latent KV: partial results have 512 floats per row
# (groups of splits merged at once, elements of a row per CTA): of sequences with at most so many groups; of others, elements per warp.
_FEW_MERGED, _MANY_MERGED = (FEW_GROUPS, 512), (32, 32)
_MERGE_REGISTERS = 64  # per thread, of few groups of latent KV; the assembler would take 48: fewer loads at once. 64 × 8k: 0.98 of the time
# Groups at once, for latent KV, whose groups are single splits: of sequences with at most so many groups; with at most _MEDIUM_GROUPS; of
# others. H200, 128 heads, 32 × 16k tokens, of 16 groups each: 377 µs with 64 at once, whose CTAs merge a quarter of a row, 309 with 16.
_FEW_LATENT, _MEDIUM_LATENT, _MANY_LATENT = 8, 16, 64
_MEDIUM_GROUPS = 32
_MERGED_DIM = 128  # elements of a row per warp of a merging CTA: a thread holds the same elements of all splits that are merged at once
_DECODE_TENSORS = (
    "q_ptr", "k_ptr", "v_ptr", "k_desc", "rest_desc", "table_ptr", "ranges_ptr", "k_new_ptr", "v_new_ptr", "part_out_ptr", "part_lse_ptr",
    "flags_ptr", "sink_ptr",
)  # fmt: skip
_RESULTS = ("out_ptr", "lse_ptr")  # further tensors of triton's kernel, which may merge partial results itself
_WRITTEN: dict[str, Tensor | None] = {"k_new_ptr": None, "v_new_ptr": None}  # the new tokens are in their pages
_MERGE_TENSORS = ("part_out_ptr", "part_lse_ptr", "ranges_ptr", "sink_ptr", "out_ptr", "lse_ptr")
_SAFE_DIM = 128  # columns of out that are computed again at a time, if a value is not finite
MAX_SHARED_DIM = 512  # elements that keys and values share
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported_reason(q: Tensor, dims: tuple[int, int], work: PagedWork, *, sequences: int, longest: int, shared: bool) -> str | None:
    """The reason why the decode kernels do not support a call; else None. `longest`: tokens of the longest sequence.

    shared: values are the first dims[1] elements of keys.
    """
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype}: expected bfloat16, float16 or float32"
    if not interpreted() and (not q.is_cuda or capability(q.device) < (8, 0)):
        return f"tensors on {q.device}: expected a CUDA device of compute capability 8.0 or later"
    if work.scales is not None and not interpreted() and (torch.version.hip is not None or capability(q.device) < (8, 9)):
        return f"FP8 KV on {q.device}: expected a CUDA device of compute capability 8.9 or later"
    if shared and (dims[1] > MAX_SHARED_DIM or dims[0] - dims[1] > MAX_HEAD_DIM):
        return f"shared KV of {dims[1]} and {dims[0] - dims[1]} more elements: expected at most {MAX_SHARED_DIM} and {MAX_HEAD_DIM}"
    if not shared and max(dims) > MAX_HEAD_DIM:
        return f"head dims {dims[0]} and {dims[1]}: expected at most {MAX_HEAD_DIM} each"
    for program, captured in ((work.mask, work.mask_captured), (work.score, work.score_captured)):
        if program is not None and not stays_inside(program, captured, (sequences, q.shape[1], longest, longest)):
            return f"{program.name} may look outside of a tensor that it captures, for sequences of {longest} tokens"
    return unsupported_program(work, q.dtype, longest)


def unsupported_program(work: PagedWork, dtype: torch.dtype, longest: int) -> str | None:
    """The reason why a program cannot be compiled; else None."""
    options = _options(work, dtype, longest)
    return next((r for p in (work.mask, work.score) if (r := codegen.unsupported(p, None, options)) is not None), None)


def split_rule(kv_heads: int, *, shared: bool, heads: int, by: SplitKernel | None = None) -> SplitRule:
    """How sequences are split. shared: keys hold the values. heads: query heads."""
    if by is not None:
        return SplitRule(SMALLEST_SPLIT, by.coarse, by.share(heads // kv_heads) * kv_heads)
    return SplitRule(SMALLEST_SPLIT, COARSE_SPLIT if shared else 0, 4 * kv_heads, 0 if shared else GROUP_TOKENS)


def write_tokens(pages: PagedKV, k: Tensor, v: Tensor, ranges: QueryRanges) -> None:
    """Write new tokens k [n, G, count, D] or [1, G, T, D], and v alike, into their pages, in one launch."""
    if pages.scales is not None and interpreted():  # which truncates to FP8
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        pages.write(k, v, ranges)
    elif k.shape[0] * k.shape[2]:
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
        "PAGE": pages.page_size, "SHARED": pages.shared, **_scales(pages.scales),
    }  # fmt: skip
    how = LaunchShape(ctas=k.shape[0] * k.shape[2] * k.shape[1], warps=1)
    return prepared_for(write_kernel, tensors, constants, how, {}), tensors


class Queries(NamedTuple):
    """Queries of a call and where they stand. `ranges`: None for contiguous KV, whose queries are at 0, 1, …

    new: k and v of the new tokens, as `write_tokens` takes them, if the decode kernel is to write them; None: they are in their pages.
    by: the kernel that computes partial results in tiles of its number of rows; None: `decode_kernel`.
    """

    q: Tensor
    ranges: QueryRanges | None
    ragged: bool
    new: tuple[Tensor, Tensor] | None = None
    by: SplitKernel | None = None


def attend_new_tokens(queries: Queries, pages: PagedKV, work: PagedWork) -> tuple[Tensor, Tensor]:
    """`write_tokens` of queries.new, then `attend_pages`: in one launch if the decode kernel computes all sequences."""
    assert queries.new is not None and queries.ranges is not None
    if not writes_new_tokens(pages, queries.ranges):
        write_tokens(pages, *queries.new, queries.ranges)
        queries = queries._replace(new=None)
    return attend_pages(queries, pages, work)


def writes_new_tokens(pages: PagedKV, ranges: QueryRanges) -> bool:
    """Whether the decode kernel can write the new tokens: it computes all sequences that have some, from the pages themselves."""
    return max(ranges.counts, default=0) <= FEW_QUERIES and computable(pages.k) is pages.k


def attend_pages(queries: Queries, pages: PagedKV, work: PagedWork, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of all sequences with at most FEW_QUERIES queries. Rows of others, and of sequences without keys, are not initialised.

    One launch for each tile size that a sequence has: tiles follow from the sequence's own number of queries. dtype: of out; None: that of
    the queries.
    """
    q = queries.q
    kv = computable(pages.k), computable(pages.v)
    out, lse = empty_results(q, kv[1].shape[-1], dtype)
    for sizes in page_sizes(queries, pages, reads=_reads_tensors(work)):
        decode_launch(queries, (*kv, pages.table), work, sizes, (out, lse)).run()
    return out.to(dtype or q.dtype), lse


def page_sizes(queries: Queries, pages: PagedKV, *, reads: bool = False) -> list[DecodeSizes]:
    """The sizes of each launch of `attend_pages`. reads: programs read tensors."""
    q, ranges = queries.q, queries.ranges
    assert ranges is not None
    heads, kv_heads = q.shape[1], pages.k.shape[1]
    by_tile: dict[int, list[int]] = {}
    for i, count in enumerate(ranges.counts):
        if 0 < count <= FEW_QUERIES and ranges.lengths[i]:
            by_tile.setdefault(tile_rows(count * (heads // kv_heads), pages.v.shape[-1], q.dtype), []).append(i)
    made = []
    for m, chosen in by_tile.items():
        by = queries.by if queries.by is not None and m == queries.by.rows else None
        rule = split_rule(kv_heads, shared=pages.shared, by=by, heads=heads)
        counts, lengths = [ranges.counts[i] for i in chosen], [ranges.lengths[i] for i in chosen]
        longest, split = max(lengths), rule.counts(lengths)
        if ranges.longest is not None:  # a captured launch: sequences may grow to that length
            longest = max(longest, ranges.longest)
            split = rule.largest_counts(longest, len(lengths))
        needed = RESIDENT if reads or ranges.longest is not None else 1
        grouped = _takes_groups(q, kv_heads, m, pages.v.shape[-1], max(counts), split, needed)
        splits = split.groups if grouped else split.splits
        # Rounded up: of a thousand decoded tokens, only a few then need a new launch. CTAs without a split end at once.
        unit = 1 << max(0, splits.bit_length() - 3)
        taken = (0, 0)
        if by is not None and ranges.longest is None:
            group = rule.cta_group(split, longest, -(-max(counts) * (heads // kv_heads) // m) * kv_heads, sm_count(q.device))
            if group:
                taken = (group, max(rule._replace(group=group).count(n, grouped=True) for n in lengths))
        made.append(DecodeSizes(
            sequences=len(ranges.counts), queries=(min(counts), max(counts)), longest=_position_bound(longest),
            splits=-(-splits // unit) * unit, tile_rows=m, rule=rule, shared=pages.shared, by=by, joined=1 if grouped else split.joined,
            groups=split.groups, grouped=grouped, taken=taken, graphed=ranges.longest is not None,
            fp8=pages.scales is not None,
        ))  # fmt: skip
    return made


def attend_contiguous(q: Tensor, k: Tensor, v: Tensor, work: PagedWork) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries q [B, H, Q, D] at positions 0, 1, … over k [B, G, K, D] and v [B, G, K, E]."""
    k, v = computable(k), computable(v)
    out, lse = empty_results(q, v.shape[-1])
    contiguous_launch(q, k, v, work, (out, lse)).run()
    return out.to(q.dtype), lse


def contiguous_launch(q: Tensor, k: Tensor, v: Tensor, work: PagedWork, results: tuple[Tensor, Tensor]) -> DecodeLaunch:
    """The launches of `attend_contiguous` that fill out and lse."""
    rows = tile_rows(q.shape[2] * (q.shape[1] // k.shape[1]), v.shape[-1], q.dtype)
    rule = split_rule(k.shape[1], shared=False, heads=q.shape[1])
    split = rule.counts([k.shape[2]])
    every = split._replace(all_groups=q.shape[0] * split.groups, tokens=q.shape[0] * k.shape[2])
    needed = RESIDENT if _reads_tensors(work) else 1
    grouped = _takes_groups(q, k.shape[1], rows, v.shape[-1], q.shape[2], every, needed)
    sizes = DecodeSizes(
        sequences=q.shape[0], queries=(q.shape[2], q.shape[2]), longest=k.shape[2], splits=split.groups if grouped else split.splits,
        tile_rows=rows, rule=rule, joined=1 if grouped else split.joined, groups=split.groups, grouped=grouped,
    )  # fmt: skip
    return decode_launch(Queries(q, None, False), (k, v, None), work, sizes, results)


def _reads_tensors(work: PagedWork) -> bool:
    """Whether programs read tensors: a CTA that waits for these does not take the bandwidth of its SM alone."""
    return bool(work.mask_captured or work.score_captured)


def _takes_groups(q: Tensor, kv_heads: int, rows: int, dim: int, queries: int, split: SplitCounts, needed: int) -> bool:
    """Whether a CTA computes a group of splits. Registers then hold the results of a group beside those of a split, rows × dim each.

    needed: of `SplitCounts.groups_fill`.
    """
    tiles = -(-queries * (q.shape[1] // kv_heads) // rows) * kv_heads
    return rows * launch.padded(dim) <= GROUPED_RESULTS and split.groups_fill(tiles, sm_count(q.device), needed)


def empty_results(q: Tensor, dim: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries; dtype: of out, if it is not that of the queries."""
    q = computable(q)
    return like_query(q, dim, dtype or q.dtype), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


class Launches(NamedTuple):
    """The launches of a call, and the sizes of partial outputs and log-sum-exps.

    repair: `decode_kernel` for the splits whose flags a `SplitKernel` has set; None if it sets none. merge: None if `decode` stores the
    results. parts: zeros if it stores no partial results before. reads: names of its tensors.
    """

    decode: PreparedLaunch
    repair: PreparedLaunch | None
    merge: PreparedLaunch | None
    parts: tuple[int, int]
    reads: tuple[str, ...]

    @property
    def all(self) -> list[PreparedLaunch]:
        return [one for one in (self.decode, self.repair, self.merge) if one is not None]

    @property
    def flags(self) -> int:
        """Number of flags: two for each CTA."""
        return 0 if self.repair is None else 2 * self.decode.ctas

    @property
    def counters(self) -> int:
        """Number of tiles whose partial results `decode` counts, to merge them."""
        return 0 if self.decode.workspace is None else self.decode.workspace.zeros[0]


class DecodeLaunch(NamedTuple):
    """The launches of a call and their arguments."""

    launches: Launches
    tensors: dict[str, Tensor | None]
    per_call: dict[str, Any]

    def run(self) -> None:
        decode, repair, merge, parts, reads = self.launches
        if not any(parts):
            decode(_read_tensors(self.tensors, direct=True), self.per_call)
            return
        part_out, part_lse = (torch.empty(size, dtype=torch.float32, device=decode.device) for size in parts)
        tensors: dict[str, Tensor | None] = {**self.tensors, "part_out_ptr": part_out, "part_lse_ptr": part_lse}
        if repair is not None:
            tensors["flags_ptr"] = torch.empty(self.launches.flags, dtype=torch.int32, device=decode.device)
        read = _read_tensors(tensors, merges=merge is None)
        decode({name: read[name] for name in reads}, self.per_call)
        if merge is None:
            return
        if repair is not None:
            repair(read | _WRITTEN, self.per_call)
        merge({name: tensors[name] for name in _MERGE_TENSORS}, {})


def _read_tensors(tensors: dict[str, Tensor | None], *, direct: bool = False, merges: bool = False) -> dict[str, Tensor | None]:
    """Tensors of triton's decode kernel, in the order of its arguments. direct: of a launch that stores results instead of partial ones.
    merges: of one that merges its partial results.
    """
    read = {name: tensors[name] for name in (*_DECODE_TENSORS, *_RESULTS)}
    if merges:
        return read
    results = {"part_out_ptr": tensors["out_ptr"], "part_lse_ptr": tensors["lse_ptr"]} if direct else {"sink_ptr": None}
    return read | results | dict.fromkeys(_RESULTS)


def decode_launch(
    queries: Queries, kv: tuple[Tensor, Tensor, Tensor | None], work: PagedWork, sizes: DecodeSizes, results: tuple[Tensor, Tensor]
) -> DecodeLaunch:  # fmt: skip
    """The launches that fill out and lse of the sequences with a number of queries in `sizes.queries`."""
    (k, v, table), q = kv, computable(queries.q)
    rest = q.shape[-1] - v.shape[-1] if sizes.shared else 0
    described = sizes.by is not None or (sizes.shared and _loads_by_tma(k, v.shape[-1], table is not None, _tile(q, k, v, sizes)))
    k_new, v_new = queries.new or (None, None)
    tensors = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "k_desc": k if described else None, "rest_desc": k if described and rest else None,
        "table_ptr": table,
        "ranges_ptr": None if queries.ranges is None else queries.ranges.device_ranges, "k_new_ptr": k_new, "v_new_ptr": v_new,
        "sink_ptr": None if work.sink is None else computable(work.sink.contiguous()), "out_ptr": results[0], "lse_ptr": results[1],
        "part_out_ptr": FLOATS, "part_lse_ptr": FLOATS, "flags_ptr": None if sizes.by is None or work.mask is None else FLAGS,
    }  # fmt: skip
    mask_captured, score_captured = (launch.pack_captured(x, q) for x in (work.mask_captured, work.score_captured))
    per_call = {"mask_captured": mask_captured, "score_captured": score_captured, "scale": float(work.scale)}
    key = (
        layouts(tensors.values()), layouts(mask_captured), layouts(score_captured), sizes, queries.ragged, q.device,
        work.window, work.scale > 0, None if work.mask is None else work.mask.key, None if work.score is None else work.score.key,
        tf32_allowed(), SMALLEST_SPLIT, COARSE_SPLIT, work.scales,
    )  # fmt: skip
    launches = _launches(ByContents(key, partial(_make_launches, queries.ragged, tensors, work, sizes, per_call)))
    if launch.capturing(q.device):
        for one in launches.all:
            hold_for_graph(one)
    return DecodeLaunch(launches, tensors, per_call)


def _tile(q: Tensor, k: Tensor, v: Tensor, sizes: DecodeSizes) -> DecodeTile:
    d, e = q.shape[-1], v.shape[-1]
    dim = max(launch.padded(e if sizes.shared else d), launch.padded(e))
    waves = 0.0 if sizes.grouped else _ctas(q, k, sizes) / sm_count(q.device)
    return choose_tile(dim=dim, dtype=q.dtype, rows=sizes.tile_rows, waves=waves, fp8=sizes.fp8)


def _ctas(q: Tensor, k: Tensor, sizes: DecodeSizes) -> int:
    """CTAs of the decode kernel."""
    return sizes.sequences * sizes.splits * _row_tiles(q, k, sizes) * k.shape[1]


def _row_tiles(q: Tensor, k: Tensor, sizes: DecodeSizes) -> int:
    """Tiles of query rows per KV head, for the sequence with the largest number of queries."""
    return -(-sizes.queries[1] * (q.shape[1] // k.shape[1]) // sizes.tile_rows)


def _loads_by_tma(k: Tensor, shared_dim: int, paged: bool, tile: DecodeTile) -> bool:
    """Whether TMA can load tiles of keys: they are in one page, and the elements shared with values need no padding."""
    if not tile.tma or not _is_hopper_or_later(k.device):
        return False
    return launch.describable(k) and launch.padded(shared_dim) == shared_dim and not (paged and k.shape[2] % tile.n)


def _is_hopper_or_later(device: torch.device) -> bool:
    """Whether a device has TMA and dependent launches. ROCm builds of torch report 9.4 for AMD's devices, which have neither."""
    return not interpreted() and torch.version.hip is None and capability(device) >= (9, 0)


class ByContents:
    """A key for `lru_cache` and the function that makes its value. Keys with equal contents are equal."""

    def __init__(self, contents: Hashable, make: Callable[[], Any]) -> None:
        self._contents, self._hash, self.make = contents, hash(contents), make

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByContents) and self._contents == other._contents

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=256)
def _launches(key: ByContents) -> Launches:
    launches, key.make = key.make(), _made  # the function holds tensors
    return launches  # type: ignore[no-any-return]


def _made() -> Any:
    raise AssertionError("the launches of this key were made before")


def _make_launches(
    ragged: bool, tensors: dict[str, Tensor | None], work: PagedWork, sizes: DecodeSizes, per_call: dict[str, Any]
) -> Launches:  # fmt: skip
    q, k, v, table = (tensors[name] for name in ("q_ptr", "k_ptr", "v_ptr", "table_ptr"))
    assert q is not None and k is not None and v is not None
    page_size = 0 if table is None else k.shape[2]
    heads, kv_heads, d, e, m = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], sizes.tile_rows
    splits, max_queries = sizes.splits, sizes.queries[1]
    rest = d - e if sizes.shared else 0
    tile = _tile(q, k, v, sizes)
    options = _options(work, q.dtype, sizes.longest)
    mask_options = score_options = options
    if sizes.by is None:
        options = replace(options, direct=not interpreted() and torch.version.hip is None)
        mask_options, score_options = early_options(work.mask, options), early_options(work.score, options)
    k_new = tensors["k_new_ptr"]
    cta_group, cta_groups = sizes.taken if sizes.taken[0] and tensors["flags_ptr"] is None else (0, splits)
    early = _is_hopper_or_later(q.device)
    window = None if work.window is None else max(1, work.window)  # 0 hides a query's own key, which the query's CTA writes
    shared = {
        "sequences": sizes.sequences, "kv_heads": kv_heads, "splits": splits, "min_queries": sizes.queries[0], "max_queries": max_queries,
        "q_len": q.shape[2], "kv_len": sizes.longest, "first_key": 0, **sizes.rule._asdict(),
        "WINDOW": window, "RAGGED": ragged, "R": heads // kv_heads, "M": m, "N": tile.n, "EARLY": early,
        "GROUPED": sizes.grouped,
    }  # fmt: skip
    constants = {
        **shared, **_dims(d - rest, e), "REST": rest, "RESTP": launch.padded(rest), "SHARED": sizes.shared,
        "SAFE_DIM": min(_SAFE_DIM, launch.padded(e)), "TMA": tensors["k_desc"] is not None,
        "row_tiles": _row_tiles(q, k, sizes), "width": 0 if table is None else table.shape[1], "PAGE": page_size,
        "new_len": 1 if k_new is None else k_new.shape[2], "cta_group": cta_group, "cta_groups": cta_groups,
        "mask_sizes": launch.pack_sizes(work.mask_captured), "score_sizes": launch.pack_sizes(work.score_captured),
        "MASK": launch.function(work.mask, mask_options), "MASK_LOOKUPS": early_function(work.mask, mask_options),
        "SCORE": launch.function(work.score, score_options), "SCORE_LOOKUPS": early_function(work.score, score_options),
        "FOLD": work.score is None and work.scale > 0,
        "PRECISION": "ieee" if q.dtype == torch.float32 and not tf32_allowed() else "tf32", "DIRECT": sizes.direct,
        **_scales(work.scales),
    }  # fmt: skip
    rows = sizes.sequences * heads * max_queries
    few, many = (_FEW_LATENT, _MANY_LATENT) if sizes.shared else (_FEW_MERGED[0], _MANY_MERGED[0])
    medium, medium_groups = (_MEDIUM_LATENT, _MEDIUM_GROUPS) if sizes.shared else (0, few)
    merge_warps = max(1, launch.padded(e) // _MERGED_DIM)  # of all launches: the order of sums follows from it
    few_part, many_part = min(_FEW_MERGED[1], launch.padded(e)), min(_MANY_MERGED[1] * merge_warps, launch.padded(e))
    medium, many = medium if sizes.groups > few else 0, many if sizes.groups > medium_groups else 0
    parts = launch.padded(e) // (many_part if many else few_part)
    decode = LaunchShape(
        ctas=_ctas(q, k, sizes) // splits * cta_groups,
        warps=tile.warps,
        stages=tile.stages(paged=table is not None),
        registers=_registers(tile, m),
    )
    merge = LaunchShape(ctas=rows * parts, warps=merge_warps, early=early, registers=0 if medium or not sizes.shared else _MERGE_REGISTERS)
    merged = {
        **shared, "E": e, "PARTS": parts, "FEW": few, "FEW_PART": few_part, "MEDIUM": medium, "MEDIUM_GROUPS": medium_groups,
        "MANY": many, "MANY_PART": many_part, "SPLITS": sizes.joined,
    }  # fmt: skip
    merged_rows = sizes.merged_rows(max_queries * heads // kv_heads, e, decode.ctas, sm_count(q.device))
    stores = sizes.direct or merged_rows > 0
    constants |= {f"{name}_stride": stride_of(tensors[f"{name}_ptr"] if stores else None) for name in ("out", "lse")}
    # Groups of longer sequences have fewer splits: one kernel serves all of them if it does not merge.
    constants |= {"MERGED_ROWS": merged_rows, "SPLITS": sizes.joined if merged_rows else 1}
    constants |= {} if merged_rows else {"counters_ptr": None}
    read, part_sizes = _read_tensors(tensors, direct=sizes.direct, merges=merged_rows > 0), (rows * splits * e, rows * splits)
    if merged_rows:
        decode = decode._replace(counters=-(-decode.ctas // splits))
    reads = _DECODE_TENSORS if sizes.by is not None else (*_DECODE_TENSORS, *_RESULTS)
    first, repair = prepared_for(sizes.by or decode_kernel, {name: read[name] for name in reads}, constants, decode, per_call), None
    if read["flags_ptr"] is not None:
        repair = prepared_for(decode_kernel, read | _WRITTEN, constants, decode._replace(early=early), per_call)
    if stores:
        return Launches(first, repair, None, (0, 0) if sizes.direct else part_sizes, reads)
    last = prepared_for(merge_kernel, {name: tensors[name] for name in _MERGE_TENSORS}, merged, merge, {})
    return Launches(first, repair, last, part_sizes, reads)


def _registers(tile: DecodeTile, rows: int) -> int:
    """Registers of a thread: as many as the CTAs have for which shared memory of Hopper has room; 0: as many as the assembler likes.

    It spills some, for one CTA more than there is room for.
    """
    if tile.tma or tile.warps != 4 or rows > 16:
        return 0
    return 232 if tile.buffers > 2 else 160 if tile.n >= 64 else 0


def _scales(scales: tuple[float, float] | None) -> dict[str, float | None]:
    return {"K_SCALE": None, "V_SCALE": None} if scales is None else {"K_SCALE": scales[0], "V_SCALE": scales[1]}


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
