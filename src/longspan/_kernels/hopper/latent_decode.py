"""Decoding over latent KV (MLA) for Hopper: keys of 512 + 64 elements, whose first 512 are the values. Forward only.

One CTA per (sequence, tile of 64 query rows, split of the keys), as `triton.decode`: rows are queries × heads; or per group of splits,
whose scores start while the sums of the split before are stored. The output of 64 rows, 64 × 512 float32, takes the registers of two warp
groups: each sums 256 columns. A third computes scores and probabilities. Time runs downwards; block b is 64 keys:

  load warp                    score warp group                         two value warp groups
  ─────────                    ────────────────                         ─────────────────────
                               Q columns 0 … 255, in registers          Q columns 256 … 511; 512 … 575 ──q_full──►
  K 0: rest, left, right       S = Q K₀ᵀ
  K 1: rest, left, right       P₀ = exp2(S − m); raise m if P₀ is large
  K 2: rest, left                            ──────────p_full──►        rescale acc if m was raised
                               S = Q K₁ᵀ                                acc += P₀ V₀, 256 columns each
  K 2: right, K 3: rest, left  P₁ = exp2(S − m) …                       ──k.empty, rest.empty──►

shared memory      bytes                   written by              read by                   mbarriers (arrivals)
q, q_rest          64 × 320 × 2            value groups            score group               q_full (2)
k                  5 halves × 64 × 256 × 2 load (TMA)              all warp groups           k.full (1), k.empty (1)
k_rest             3 × 64 × 64 × 2         load (TMA)              score group               rest.full (1)
 – then P          the same                score group             value groups              p_full (1), rest.empty (2)
max                3 × 64 × 4              score group             value groups              p_full (1), rest.empty (2)
divisor            2 × 64 × 4              score group             value groups              sums_done (1)

P takes the place of the last 64 elements of its block's keys, which only scores read. The 64 × 256 elements of Q in registers make room
for the fifth half, and halve what their wgmmas read from shared memory. One CTA per SM. Measured and slower: to start the scores of block
b + 1 before the softmax of block b, to leave P of block b to the value groups after the scores of block b + 1, and two warp groups that
compute scores of every other block beside their columns (`bench/results/decode.txt`).

Past the last key of a split, TMA loads other rows of the page, which may hold anything: 0 · NaN would reach the sums, so each value group
sets these rows of its half to 0 before it multiplies them; their scores are −inf whatever they hold. Values that a mask hides and that are
not finite leave a NaN in the sums: the CTA reports it in `flags_ptr`, and `triton.decode` computes that split again.

A row keeps its running max m until its exponentials grow large (`hopper.running_max`); other numerics as in `triton.decode`, whose
arguments have the same names.
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
from longspan._kernels.hopper.pipeline import BufferBarriers, Captured, mbarriers, ring_phase, ring_slot, tile_2d
from longspan._kernels.hopper.running_max import NEVER_SEEN, by_lane, checked, per_lane, rescaled, summed

ROWS = gl.constexpr(64)  # query rows of a CTA
KEYS = gl.constexpr(64)  # of a block
LATENT = gl.constexpr(512)  # elements of values
HALF = gl.constexpr(256)  # of them, per warp group
REST = gl.constexpr(64)  # further elements of keys
HALVES = gl.constexpr(5)  # buffers of half a block's values
RESTS = gl.constexpr(3)  # buffers of a block's further elements
REGISTERS = gl.constexpr(160)  # of value groups; 168 are left for the score group

_DYNAMIC = [
    "sequences", "kv_heads", "row_tiles", "splits", "min_queries", "max_queries", "width", "q_len", "kv_len", "first_key", "smallest",
    "coarse", "share", "new_len", "cta_group", "cta_groups",
]  # fmt: skip


class Tiles(NamedTuple):
    """Shared memory of a CTA."""

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    max: Any
    divisor: Any


class Barriers(NamedTuple):
    """mbarriers of a CTA. k, rest: of the buffers of keys."""

    q_full: Any
    k: Any
    rest: Any
    p_full: Any
    sums_done: Any


class Place(NamedTuple):
    """The part of a call that a CTA computes: KV head, tile of rows, split, sequence; position of the sequence's first query, its length,
    its number of queries; the first key, the key after the last one; tokens of a split.
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
    tokens: Any


class Partial(NamedTuple):
    """Where partial results go: pointers, splits and queries of a row, KV heads."""

    out: Any
    lse: Any
    flags: Any
    splits: Any
    max_queries: Any
    kv_heads: Any


@gluon.jit
def _query_columns(q_base, q_stride, place, column, COLUMNS: gl.constexpr, R: gl.constexpr, layout: gl.constexpr):
    """COLUMNS columns of the tile's query rows, from `column` on. Rows past the last query are 0."""
    r = place.tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    i = r // R
    d = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)), 0)
    rows = q_base + wide(place.g * R + r % R) * q_stride[1] + wide(i) * q_stride[2]
    return gl.load(gl.expand_dims(rows, 1) + (column + d) * q_stride[3], mask=gl.expand_dims(i < place.count, 1), other=0.0)


@gluon.jit
def _splits(place):
    """The first split of a CTA, and the one after the last. A CTA without keys has one split without keys."""
    first = place.begin // place.tokens
    return first, gl.maximum(first + 1, (place.end + place.tokens - 1) // place.tokens)


@gluon.jit
def _split(place, split):
    """The place of one split of a CTA."""
    begin, end = gl.maximum(place.begin, split * place.tokens), gl.minimum(place.end, (split + 1) * place.tokens)
    return Place(
        place.g, place.tile, split, place.n, place.start, place.length, place.count, begin, gl.maximum(begin, end), place.tokens
    )  # fmt: skip


@gluon.jit
def _advance(slot, phase, STEP: gl.constexpr, COUNT: gl.constexpr):
    """(slot, phase) of the use of a ring that is STEP uses later."""
    slot += STEP
    wraps = slot >= COUNT
    return gl.where(wraps, slot - COUNT, slot), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _start_scores(q_left, tiles, bars, left, left_phase, right, right_phase, rest, rest_phase):
    """Start the wgmmas of S = Q Kᵀ of a block as its parts arrive."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    s = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=layout)
    mbarrier.wait(bars.rest.full.index(rest), rest_phase)
    s = warpgroup_mma(tiles.q_rest, tile_2d(tiles.k_rest, rest).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(bars.k.full.index(left), left_phase)
    s = warpgroup_mma(q_left, tile_2d(tiles.k, left).permute((1, 0)), s, is_async=True)
    mbarrier.wait(bars.k.full.index(right), right_phase)
    return warpgroup_mma(tiles.q, tile_2d(tiles.k, right).permute((1, 0)), s, is_async=True)


@gluon.jit
def _give_weights(
    s, m, total, b, place, scale, tiles, bars, slot, captured, MASK: gl.constexpr, SCORE: gl.constexpr, FOLD: gl.constexpr, R: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Online softmax of block b's scores: (m, total), both [ROWS, 8] (`running_max.by_lane`). Leaves P and m to the value groups: P in the
    place `slot` of the block's last elements.
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
    s = by_lane(s)
    p = gl.exp2(s * factor - gl.expand_dims(m, 1))
    sums, p = summed(p), p.to(tiles.k_rest.dtype)
    p, sums, m, rescale = checked(p, sums, m, s, factor)
    tiles.max.index(slot).store(gl.convert_layout(gl.max(m, 1), gl.SliceLayout(1, layout)))
    # No barrier before P replaces keys: scores are one wgmma group of all four warps, so none of them reads the keys after the wait.
    tile_2d(tiles.k_rest, slot).store(gl.convert_layout(gl.reshape(p, [ROWS, KEYS]), layout))
    fence_async_shared()
    mbarrier.arrive(bars.p_full.index(slot), count=1)
    return m, total * rescale + sums


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
    """The warp group that computes scores and probabilities."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    q_left = _query_columns(q_base, q_stride, place, 0, HALF, R, operand)
    mbarrier.wait(bars.q_full.index(0), 0)
    left, left_phase, right, right_phase, rest, rest_phase = 0, 0, 1, 0, 0, 0
    first, last = _splits(place)
    for split in range(first, last):
        part = _split(place, split)
        blocks = (part.end - part.begin + KEYS - 1) // KEYS
        m, total = per_lane(ROWS, KEYS, NEVER_SEEN, layout), per_lane(ROWS, KEYS, 0.0, layout)
        if blocks > 0:
            s_next = _start_scores(q_left, tiles, bars, left, left_phase, right, right_phase, rest, rest_phase)
            s = warpgroup_mma_wait(0, deps=[s_next])
            for b in range(blocks - 1):
                slot = rest
                left, left_phase = _advance(left, left_phase, 2, HALVES)
                right, right_phase = _advance(right, right_phase, 2, HALVES)
                rest, rest_phase = _advance(rest, rest_phase, 1, RESTS)
                m, total = _give_weights(s, m, total, b, part, scale, tiles, bars, slot, captured, MASK, SCORE, FOLD, R, layout)
                s_next = _start_scores(q_left, tiles, bars, left, left_phase, right, right_phase, rest, rest_phase)
                s = warpgroup_mma_wait(0, deps=[s_next])
            m, total = _give_weights(s, m, total, blocks - 1, part, scale, tiles, bars, rest, captured, MASK, SCORE, FOLD, R, layout)
            left, left_phase = _advance(left, left_phase, 2, HALVES)
            right, right_phase = _advance(right, right_phase, 2, HALVES)
            rest, rest_phase = _advance(rest, rest_phase, 1, RESTS)
        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, layout))
        m = gl.convert_layout(gl.max(m, 1), gl.SliceLayout(1, layout))
        seen = total != 0.0  # also where total is NaN: a row that sees a NaN has lse NaN
        divisor = gl.where(seen, total, 1.0)
        tiles.divisor.index(ring_slot(split - first, 2)).store(divisor)
        mbarrier.arrive(bars.sums_done.index(ring_slot(split - first, 2)), count=1)
        r = part.tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        at = ((wide(part.n) * to.kv_heads * R + part.g * R + r % R) * to.max_queries + r // R) * to.splits + part.split
        inside = (r // R < part.count) & (part.begin < part.end)
        gl.store(to.lse + at, gl.where(seen, m + gl.log2(divisor), -float("inf")), mask=inside)


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
def _value_group(q_base, q_stride, place, to, tiles, bars, R: gl.constexpr, W: gl.constexpr):
    """The warp group that computes columns W · HALF … of the output."""
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    if W == 0:
        tiles.q.store(_query_columns(q_base, q_stride, place, HALF, HALF, R, gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])))
    else:
        tiles.q_rest.store(_query_columns(q_base, q_stride, place, LATENT, REST, R, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    fence_async_shared()
    mbarrier.arrive(bars.q_full.index(0), count=1)
    slot, phase, rest, rest_phase = W, 0, 0, 0
    first, last = _splits(place)
    for split in range(first, last):
        part = _split(place, split)
        acc = gl.full([ROWS, HALF], 0.0, gl.float32, layout=out_layout)
        m = per_lane(ROWS, HALF, NEVER_SEEN, out_layout)
        blocks = (part.end - part.begin + KEYS - 1) // KEYS
        for b in range(blocks):
            mbarrier.wait(bars.p_full.index(rest), rest_phase)
            new_m = gl.expand_dims(tiles.max.index(rest).load(gl.SliceLayout(1, m.type.layout)), 1)
            acc = rescaled(acc, gl.exp2(m - new_m), out_layout)
            m = gl.broadcast(m, new_m)[1]
            mbarrier.wait(bars.k.full.index(slot), phase)
            left = part.end - part.begin - b * KEYS
            if left < KEYS:
                _clean_rows(tiles.k.index(slot), left)
                fence_async_shared()
                barrier()
            acc_next = warpgroup_mma(tile_2d(tiles.k_rest, rest), tile_2d(tiles.k, slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_next])
            mbarrier.arrive(bars.k.empty.index(slot), count=1)
            mbarrier.arrive(bars.rest.empty.index(rest), count=1)
            slot, phase = _advance(slot, phase, 2, HALVES)
            rest, rest_phase = _advance(rest, rest_phase, 1, RESTS)
        sums = ring_slot(split - first, 2)
        mbarrier.wait(bars.sums_done.index(sums), ring_phase(split - first, 2))
        _store_sums(acc, tiles.divisor.index(sums).load(gl.SliceLayout(1, out_layout)), part, to, W * HALF, R, out_layout)


@gluon.jit
def _load_part(desc, page, place, at, column, ring, slot, phase, to):
    """Load a part of a block from `column` on when buffer `slot` is empty."""
    mbarrier.wait(ring.empty.index(slot), phase ^ 1)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
    tma_load(desc, [page, place.g, at, column], ring.full.index(slot), to.index(slot))


@gluon.jit
def _load(k_desc, rest_desc, table, place, tiles, bars, PAGE: gl.constexpr):
    """The load warp. table: pointer to the page of the sequence's first tokens."""
    slot, phase, rest, rest_phase = 0, 0, 0, 0
    page = gl.load(table + place.begin // PAGE, mask=place.begin < place.end, other=0)
    for at in range(place.begin, place.end, KEYS):
        next_page = gl.load(table + gl.minimum(at + KEYS, place.end - 1) // PAGE)
        _load_part(rest_desc, page, place, at % PAGE, LATENT, bars.rest, rest, rest_phase, tiles.k_rest)
        _load_part(k_desc, page, place, at % PAGE, 0, bars.k, slot, phase, tiles.k)
        slot, phase = _advance(slot, phase, 1, HALVES)
        _load_part(k_desc, page, place, at % PAGE, HALF, bars.k, slot, phase, tiles.k)
        slot, phase = _advance(slot, phase, 1, HALVES)
        rest, rest_phase = _advance(rest, rest_phase, 1, RESTS)
        page = next_page


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
    cta_group, cta_groups, scale,
    MASK: gl.constexpr, SCORE: gl.constexpr, WINDOW: gl.constexpr, PAGE: gl.constexpr, RAGGED: gl.constexpr, FOLD: gl.constexpr,
    R: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Partial results of a split, or of each split of a group. Arguments as in `triton.decode.decode_kernel`; flags_ptr: int32 [CTAs, 2],
    or None if a CTA has several splits. sink_ptr: None. cta_group: tokens of a group (`decode_splits.group_tokens`), 0 for one split per
    CTA; cta_groups: of a sequence, at most.
    """
    if EARLY:
        gdc_launch_dependents()
    g, tile, split, n, row, start, length, first, count, begin, end, tokens = split_of_cta(
        ranges_ptr, sequences, kv_heads, row_tiles, cta_groups, min_queries, max_queries, q_len, kv_len, first_key, smallest, coarse, share,
        cta_group, WINDOW, R, ROWS, KEYS,
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
        gl.allocate_shared_memory(dtype, [ROWS, HALF], half),
        gl.allocate_shared_memory(dtype, [ROWS, REST], narrow),
        gl.allocate_shared_memory(dtype, [HALVES, 1, 1, KEYS, HALF], k_desc.layout),
        gl.allocate_shared_memory(dtype, [RESTS, 1, 1, KEYS, REST], rest_desc.layout),
        gl.allocate_shared_memory(gl.float32, [RESTS, ROWS], plain),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], plain),
    )
    bars = Barriers(
        mbarriers(1, 2), BufferBarriers(mbarriers(HALVES, 1), mbarriers(HALVES, 1)),
        BufferBarriers(mbarriers(RESTS, 1), mbarriers(RESTS, 2)), mbarriers(RESTS, 1), mbarriers(2, 1),
    )  # fmt: skip
    place = Place(g, tile, split, n, start, length, count, begin, end, tokens)
    to = Partial(part_out_ptr, part_lse_ptr, optional(flags_ptr), splits, max_queries, kv_heads)
    captured = Captured(mask_captured, mask_sizes, score_captured, score_sizes)
    q_base = q_ptr + (wide(first) * q_stride[2] if RAGGED else wide(n) * q_stride[0])
    fence_async_shared()
    gl.warp_specialize(
        [
            (_score_group, (q_base, q_stride, scale, place, to, tiles, bars, captured, MASK, SCORE, FOLD, R)),
            (_value_group, (q_base, q_stride, place, to, tiles, bars, R, 0)),
            (_value_group, (q_base, q_stride, place, to, tiles, bars, R, 1)),
            (_load, (k_desc, rest_desc, table, place, tiles, bars, PAGE)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )
