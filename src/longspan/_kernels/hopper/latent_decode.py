"""Decoding over latent KV (MLA) for Hopper: keys of 512 + 64 elements, whose first 512 are the values. Forward only.

One CTA per (sequence, tile of 64 query rows, split of the keys), as `triton.decode`: rows are queries × heads. The output of 64 rows,
64 × 512 float32, takes the registers of two warp groups: each sums 256 columns. Scores and probabilities are computed once, by the first
warp group, which leaves the probabilities in shared memory for the second. Time runs downwards; block b is 64 keys:

  load warp                score warp group                            value warp group
  ─────────                ────────────────                            ────────────────
                           Q columns 0 … 255, 512 … 575 ──q_full──►    Q columns 256 … 511
  K 0 ────k_full────►      S = Q K₀ᵀ
  K 1                      m₀ = max(S) ─────────────factor_full──►     rescale acc
                           P₀ = exp2(S − m₀) ────────────p_full──►
                           acc += P₀ V₀[:, :256]                       acc += P₀ V₀[:, 256:]   ──p_empty──►
                           S = Q K₁ᵀ    (queued behind P₀ V₀)          ──k_empty──►
  K 2                      ──k_empty──►
                           m₁ = max(S) …

shared memory      bytes                   written by              read by                   mbarriers (arrivals)
q_s, q_rest_s      64 × 576 × 2            both warp groups        score group               q_full (2)
k_s, rest_s        2 stages × 64 × 576 × 2 load (TMA)              both warp groups          k_full (1), k_empty (2)
p_s                64 × 64 × 2             score group             value group               p_full (1), p_empty (1)
factor_s           64 × 4                  score group             value group               factor_full (1), p_empty (1)
divisor_s          64 × 4                  score group             value group               sums_done (1)
–                  –                       value group             score group               cleaned (1)

229,888 bytes and the mbarriers: one CTA per SM. Past the last key of a split, TMA loads other rows of the page, which may hold anything:
0 · NaN would reach the sums. The value group sets these rows to 0 before scores are computed (`cleaned`). Values that a mask hides and
that are not finite leave a NaN in the sums: the CTA reports it in `flags_ptr`, and `triton.decode` computes that split again.

Numerics as in `triton.decode`; its arguments have the same names.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from longspan._kernels.gpu.decode_splits import split_of_cta
from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.epilogue import by_row
from longspan._kernels.hopper.gluon_names import barrier, reinterpret, tma_load
from longspan._kernels.hopper.none_arg import optional
from longspan._kernels.hopper.pipeline import Captured, mbarriers, ring_phase, ring_slot, tile_2d

ROWS = gl.constexpr(64)  # query rows of a CTA
KEYS = gl.constexpr(64)  # of a block
LATENT = gl.constexpr(512)  # elements of values
HALF = gl.constexpr(256)  # of them, per warp group
REST = gl.constexpr(64)  # further elements of keys
STAGES = gl.constexpr(2)
REGISTERS = gl.constexpr(240)

_DYNAMIC = [
    "sequences", "kv_heads", "row_tiles", "splits", "min_queries", "max_queries", "width", "q_len", "kv_len", "first_key", "smallest",
    "coarse", "share", "new_len",
]  # fmt: skip


class Tiles(NamedTuple):
    """Shared memory of a CTA."""

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    p: Any
    factor: Any
    divisor: Any


class Barriers(NamedTuple):
    """mbarriers of a CTA."""

    q_full: Any
    k_full: Any
    k_empty: Any
    factor_full: Any
    p_full: Any
    p_empty: Any
    cleaned: Any
    sums_done: Any


class Place(NamedTuple):
    """The part of a call that a CTA computes: KV head, tile of rows, split, sequence; position of the sequence's first query, its length,
    its number of queries; the first key, the key after the last one.
    """

    g: Any
    tile: Any
    split: Any
    n: Any
    start: Any
    length: Any
    count: Any
    begin: Any
    end: Any


class Partial(NamedTuple):
    """Where partial results go: pointers, splits and queries of a row, KV heads."""

    out: Any
    lse: Any
    flags: Any
    splits: Any
    max_queries: Any
    kv_heads: Any


@gluon.jit
def _load_queries(q_base, q_stride, place, column, to, R: gl.constexpr, layout: gl.constexpr):
    """Copy columns of the tile's query rows, from `column` on, to shared memory. Rows past the last query are 0."""
    r = place.tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    i = r // R
    d = gl.expand_dims(gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    rows = q_base + wide(place.g * R + r % R) * q_stride[1] + wide(i) * q_stride[2]
    q = gl.load(gl.expand_dims(rows, 1) + (column + d) * q_stride[3], mask=gl.expand_dims(i < place.count, 1), other=0.0)
    to.store(q)


@gluon.jit
def _start_scores(tiles, stage):
    """Start the wgmmas of S = Q Kᵀ: three commit groups."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    s = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=layout)
    s = warpgroup_mma(tiles.q.index(0), tile_2d(tiles.k, 2 * stage).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(tiles.q.index(1), tile_2d(tiles.k, 2 * stage + 1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(tiles.q_rest, tile_2d(tiles.k_rest, stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _row_max(s, layout: gl.constexpr):
    """Max of each row of s [rows, columns].

    A thread holds two of every eight columns. Reduced first over the eighths, they are two chains of dependent operations instead of one.
    """
    s = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8])
    return gl.convert_layout(gl.max(gl.max(s, 1), 1), gl.SliceLayout(1, layout))


@gluon.jit
def _row_sum(p, layout: gl.constexpr):
    """Sum of each row of p [rows, columns], as `_row_max`."""
    p = gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8])
    return gl.convert_layout(gl.sum(gl.sum(p, 1), 1), gl.SliceLayout(1, layout))


@gluon.jit
def _give_weights(
    s, m, total, b, place, scale, tiles, bars, captured, MASK: gl.constexpr, SCORE: gl.constexpr, FOLD: gl.constexpr, R: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Online softmax of block b's scores: (p, m, total, factor that rescales earlier sums). Leaves factor and p to the value group, each as
    soon as it is known.
    """
    r = place.tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    h, q_pos = gl.expand_dims(place.g * R + r % R, 1), gl.expand_dims(place.start + r // R, 1)
    first = place.begin + b * KEYS
    kv = gl.expand_dims(first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout)), 0)
    inside = gl.minimum(kv, place.length - 1)
    if not FOLD:
        s *= scale
    if SCORE is not None:
        s = SCORE(s, place.n, h, q_pos, inside, captured.score, captured.score_sizes)
    if MASK is not None:
        s = gl.where(MASK(place.n, h, q_pos, inside, captured.mask, captured.mask_sizes), s, float("-inf"))
    if place.end - first < KEYS:
        s = gl.where(kv < place.end, s, float("-inf"))
    factor = scale * LOG2_E if FOLD else LOG2_E
    m_new = gl.maximum(m, _row_max(s, layout) * factor)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: −inf − −inf would be NaN
    rescale = gl.exp2(m - base)
    mbarrier.wait(bars.p_empty.index(0), (b & 1) ^ 1)
    tiles.factor.store(rescale)
    mbarrier.arrive(bars.factor_full.index(0), count=1)
    p = gl.exp2(s * factor - gl.expand_dims(base, 1))
    rounded = p.to(tiles.p.dtype)
    tiles.p.store(rounded)
    fence_async_shared()
    mbarrier.arrive(bars.p_full.index(0), count=1)
    return rounded, m_new, total * rescale + _row_sum(p, layout), rescale


@gluon.jit
def _store_sums(acc, divisor, place, to, first, R: gl.constexpr, layout: gl.constexpr):
    """Store columns first … first + HALF − 1 of the partial output; report NaNs in them."""
    r = place.tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    i = r // R
    at = ((wide(place.n) * to.kv_heads * R + place.g * R + r % R) * to.max_queries + i) * to.splits + place.split
    inside = gl.expand_dims((i < place.count) & (place.begin < place.end), 1)
    e = gl.expand_dims(first + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout)), 0)
    acc = acc * by_row(1.0 / divisor, layout)
    gl.store(gl.expand_dims(to.out + at * LATENT, 1) + e, acc, mask=inside)
    if to.flags is not None:
        bad = gl.max(gl.max(gl.where((acc != acc) & inside, 1, 0), 1), 0)
        gl.store(to.flags + 2 * gl.program_id(0) + first // HALF, bad)


@gluon.jit
def _score_group(
    q_base, q_stride, scale, place, to, tiles, bars, captured,
    MASK: gl.constexpr, SCORE: gl.constexpr, FOLD: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """The warp group that computes scores and the first half of the columns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    _load_queries(q_base, q_stride, place, 0, tiles.q.index(0), R, gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
    _load_queries(q_base, q_stride, place, LATENT, tiles.q_rest, R, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    fence_async_shared()
    mbarrier.arrive(bars.q_full.index(0), count=1)
    mbarrier.wait(bars.q_full.index(0), 0)
    blocks = (place.end - place.begin + KEYS - 1) // KEYS
    short = (place.end - place.begin) % KEYS > 0
    m = gl.full([ROWS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, layout))
    total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, layout))
    acc = gl.full([ROWS, HALF], 0.0, gl.float32, layout=out_layout)
    if blocks > 0:
        mbarrier.wait(bars.k_full.index(0), 0)
        if (blocks == 1) & short:
            mbarrier.wait(bars.cleaned.index(0), 0)
        s = warpgroup_mma_wait(0, deps=[_start_scores(tiles, 0)])
        p, m, total, rescale = _give_weights(s, m, total, 0, place, scale, tiles, bars, captured, MASK, SCORE, FOLD, R, layout)
        weights = gl.convert_layout(p, operand)
        for b in range(1, blocks):
            stage, last = ring_slot(b, STAGES), ring_slot(b - 1, STAGES)
            acc_next = warpgroup_mma(weights, tile_2d(tiles.k, 2 * last), acc, is_async=True)
            mbarrier.wait(bars.k_full.index(stage), ring_phase(b, STAGES))
            if (b == blocks - 1) & short:
                mbarrier.wait(bars.cleaned.index(0), 0)
            s_next = _start_scores(tiles, stage)
            acc = warpgroup_mma_wait(3, deps=[acc_next])
            mbarrier.arrive(bars.k_empty.index(last), count=1)
            s = warpgroup_mma_wait(0, deps=[s_next])
            p, m, total, rescale = _give_weights(s, m, total, b, place, scale, tiles, bars, captured, MASK, SCORE, FOLD, R, layout)
            weights = gl.convert_layout(p, operand)
            acc = acc * by_row(rescale, out_layout)
        acc_next = warpgroup_mma(weights, tile_2d(tiles.k, 2 * ring_slot(blocks - 1, STAGES)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
    seen = total != 0.0  # also where total is NaN: a row that sees a NaN has lse NaN
    divisor = gl.where(seen, total, 1.0)
    tiles.divisor.store(divisor)
    mbarrier.arrive(bars.sums_done.index(0), count=1)
    r = place.tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    at = ((wide(place.n) * to.kv_heads * R + place.g * R + r % R) * to.max_queries + r // R) * to.splits + place.split
    inside = (r // R < place.count) & (place.begin < place.end)
    gl.store(to.lse + at, gl.where(seen, m + gl.log2(divisor), -float("inf")), mask=inside)
    _store_sums(acc, divisor, place, to, 0, R, out_layout)


@gluon.jit
def _clean_rows(tile, left):
    """Set the rows from `left` on of a tile [1, 1, KEYS, HALF] in shared memory to 0.

    TMA stores panels of 64 columns; within a row of a panel, 16-byte parts are permuted, which does not matter here.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PIECES: gl.constexpr = KEYS * HALF // (16 * 64)
    pieces = reinterpret(tile, tile.dtype, [PIECES, 16, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for i in range(PIECES):
        row = i % (KEYS // 16) * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
        x = pieces.index(i).load(layout)
        pieces.index(i).store(gl.where(gl.expand_dims(row < left, 1), x, 0.0).to(tile.dtype))


@gluon.jit
def _value_group(q_base, q_stride, place, to, tiles, bars, R: gl.constexpr):
    """The warp group that computes the second half of the columns."""
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    _load_queries(q_base, q_stride, place, HALF, tiles.q.index(1), R, gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
    fence_async_shared()
    mbarrier.arrive(bars.q_full.index(0), count=1)
    acc = gl.full([ROWS, HALF], 0.0, gl.float32, layout=out_layout)
    blocks = (place.end - place.begin + KEYS - 1) // KEYS
    for b in range(blocks):
        stage = ring_slot(b, STAGES)
        left = place.end - place.begin - b * KEYS
        mbarrier.wait(bars.k_full.index(stage), ring_phase(b, STAGES))
        if left < KEYS:
            _clean_rows(tiles.k.index(2 * stage), left)
            _clean_rows(tiles.k.index(2 * stage + 1), left)
            fence_async_shared()
            mbarrier.arrive(bars.cleaned.index(0), count=1)
        mbarrier.wait(bars.factor_full.index(0), b & 1)
        acc = acc * gl.expand_dims(tiles.factor.load(gl.SliceLayout(1, out_layout)), 1)
        mbarrier.wait(bars.p_full.index(0), b & 1)
        acc_next = warpgroup_mma(tiles.p, tile_2d(tiles.k, 2 * stage + 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(bars.p_empty.index(0), count=1)
        mbarrier.arrive(bars.k_empty.index(stage), count=1)
    mbarrier.wait(bars.sums_done.index(0), 0)
    _store_sums(acc, tiles.divisor.load(gl.SliceLayout(1, out_layout)), place, to, HALF, R, out_layout)


@gluon.jit
def _load(k_desc, rest_desc, table, place, tiles, bars, PAGE: gl.constexpr):
    """The load warp. table: pointer to the page of the sequence's first tokens."""
    BYTES: gl.constexpr = 2 * k_desc.block_type.nbytes + rest_desc.block_type.nbytes
    blocks = (place.end - place.begin + KEYS - 1) // KEYS
    for b in range(blocks):
        stage = ring_slot(b, STAGES)
        at = place.begin + b * KEYS
        page = gl.load(table + at // PAGE)
        mbarrier.wait(bars.k_empty.index(stage), ring_phase(b, STAGES) ^ 1)
        full = bars.k_full.index(stage)
        mbarrier.expect(full, BYTES)
        tma_load(k_desc, [page, place.g, at % PAGE, 0], full, tiles.k.index(2 * stage))
        tma_load(k_desc, [page, place.g, at % PAGE, HALF], full, tiles.k.index(2 * stage + 1))
        tma_load(rest_desc, [page, place.g, at % PAGE, LATENT], full, tiles.k_rest.index(stage))


@gluon.jit
def _write_new(
    new_ptr, new_stride, k_ptr, k_stride, g, first, start, begin, end, new_len, table, column, PAGE: gl.constexpr, COLUMNS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Write columns of the new tokens at positions begin … end − 1 into their pages. `first`: index of the token at `start`."""
    TOKENS: gl.constexpr = 16
    d = column + gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)), 0)
    for at in range(begin, end, TOKENS):
        kv = at + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
        inside, t = kv < end, first + kv - start
        rows = new_ptr + wide(t // new_len) * new_stride[0] + wide(g) * new_stride[1] + wide(t % new_len) * new_stride[2]
        x = gl.load(gl.expand_dims(rows, 1) + d * new_stride[3], mask=gl.expand_dims(inside, 1))
        page = wide(gl.load(table + kv // PAGE, mask=inside, other=0))
        to = k_ptr + page * k_stride[0] + wide(g) * k_stride[1] + wide(kv % PAGE) * k_stride[2]
        gl.store(gl.expand_dims(to, 1) + d, x, mask=gl.expand_dims(inside, 1))


@gluon.jit(do_not_specialize=_DYNAMIC)
def latent_decode_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, rest_desc, table_ptr, ranges_ptr, k_new_ptr, v_new_ptr, part_out_ptr, part_lse_ptr, flags_ptr,
    sink_ptr, q_stride, k_stride, v_stride, k_new_stride, v_new_stride, mask_captured, mask_sizes, score_captured, score_sizes,
    sequences, kv_heads, row_tiles, splits, min_queries, max_queries, width, q_len, kv_len, first_key, smallest, coarse, share, new_len,
    scale,
    MASK: gl.constexpr, SCORE: gl.constexpr, WINDOW: gl.constexpr, PAGE: gl.constexpr, RAGGED: gl.constexpr, FOLD: gl.constexpr,
    R: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Partial results of one split. Arguments as in `triton.decode.decode_kernel`; flags_ptr: int32 [CTAs, 2], or None. sink_ptr: None."""
    if EARLY:
        gdc_launch_dependents()
    g, tile, split, n, row, start, length, first, count, begin, end, _ = split_of_cta(
        ranges_ptr, sequences, kv_heads, row_tiles, splits, min_queries, max_queries, q_len, kv_len, first_key, smallest, coarse, share,
        0, WINDOW, R, ROWS, KEYS,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    table = table_ptr + wide(row) * width
    if k_new_ptr is not None:  # noqa: SIM102 (a compile-time condition)
        if (begin < end) & (end > start):
            new = gl.maximum(begin, start)
            _write_new(
                k_new_ptr, k_new_stride, k_ptr, k_stride, g, first, start, new, end, new_len, table, 0, PAGE, LATENT,
                gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]),
            )  # fmt: skip
            _write_new(
                k_new_ptr, k_new_stride, k_ptr, k_stride, g, first, start, new, end, new_len, table, LATENT, PAGE, REST,
                gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
            )  # fmt: skip
            gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            barrier()
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = Tiles(
        gl.allocate_shared_memory(dtype, [2, ROWS, HALF], half),
        gl.allocate_shared_memory(dtype, [ROWS, REST], narrow),
        gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, KEYS, HALF], k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, REST], rest_desc.layout),
        gl.allocate_shared_memory(dtype, [ROWS, KEYS], narrow),
        gl.allocate_shared_memory(gl.float32, [ROWS], plain),
        gl.allocate_shared_memory(gl.float32, [ROWS], plain),
    )
    bars = Barriers(
        mbarriers(1, 2), mbarriers(STAGES, 1), mbarriers(STAGES, 2), mbarriers(1, 1), mbarriers(1, 1), mbarriers(1, 1), mbarriers(1, 1),
        mbarriers(1, 1),
    )  # fmt: skip
    place = Place(g, tile, split, n, start, length, count, begin, end)
    to = Partial(part_out_ptr, part_lse_ptr, optional(flags_ptr), splits, max_queries, kv_heads)
    captured = Captured(mask_captured, mask_sizes, score_captured, score_sizes)
    q_base = q_ptr + (wide(first) * q_stride[2] if RAGGED else wide(n) * q_stride[0])
    fence_async_shared()
    gl.warp_specialize(
        [
            (_score_group, (q_base, q_stride, scale, place, to, tiles, bars, captured, MASK, SCORE, FOLD, R)),
            (_value_group, (q_base, q_stride, place, to, tiles, bars, R)),
            (_load, (k_desc, rest_desc, table, place, tiles, bars, PAGE)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
