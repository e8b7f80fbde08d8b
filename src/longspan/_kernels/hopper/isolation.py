"""Isolation of rows and keys from NaN, ±inf and overflowing numbers that they do not see, unless LONGSPAN_ISOLATE=0.

A masked pair has P = 0 and dS = 0, but wgmma adds 0 · x for it to sums of other rows and keys, and dP of a masked pair may be infinite.
Where there is such a number, warps change tiles in shared memory before the others read them:

                    what                                                       by             if
  forward           K, V of partial blocks: values that are not finite         load warp      the item is computed again, since its output
                    become 0, and their keys NaN, so that rows that see them                  has a NaN (`hopper.repeats`)
                    become NaN
  dK, dV with dQ    K, V of each item: NaN becomes 0, larger numbers the       compute warp   the group's 64 keys or values have one
                    limit                                                      groups
  dQ alone, wide    K, V of partial blocks, and of each item: likewise         producer       the flag is set
  dK, dV
  all of backward   Q, dO of partial steps: bad rows become 0, with norm NaN   producer       the flag is set, and the step has a bad row
                    and delta 0

The flag is an int32 on the device. `row_terms_kernel` sets it if a row is bad, and for the kernels in the third line also if K or V is
unbounded. In steps of a sharded call, `unbounded_kernel` does.

A row is bad if its norm is NaN or its delta is not finite: it is not finite itself, or it sees something that is not. Its norm makes the
probabilities of its visible pairs NaN, and with them its dQ and the dK and dV of the keys that it sees, and nothing else.
`row_terms_kernel` sets norm to NaN where lse and delta do not show that a row of Q or dO is not finite.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from longspan._environment import switch
from longspan._kernels.gpu.selected_tables import computes_heads_alone, pairs_of
from longspan._kernels.gpu.tile_access import load_rows, wide
from longspan._kernels.hopper.gluon_names import barrier, reinterpret
from longspan._kernels.hopper.pipeline import lane_number, load_int, mbarriers, store_int
from longspan._kernels.hopper.warp_votes import any_vote, vote
from longspan._kernels.protocol import Work

# Limits of bfloat16 numbers: a product of V and dO over 256 dims, and its difference to delta, is less than 2^128.
VALUE_LIMIT = gl.constexpr(2.0**60)
GRAD_LIMIT = gl.constexpr(2.0**58)
DELTA_LIMIT = gl.constexpr(2.0**126)

CHECKED_ROWS = 64  # rows of K and V that a CTA of `unbounded_kernel` reads
CHECKED_TERMS = 1024  # row terms that it reads
_ROWS = gl.constexpr(4)  # rows of a piece that a warp reads at once
_DIMS = gl.constexpr(64)  # columns of a piece: TMA stores a tile as panels of 128 bytes by all rows


def isolation_enabled() -> bool:
    """Whether LONGSPAN_ISOLATE=0 is not set."""
    return switch("LONGSPAN_ISOLATE", default=True)


def isolation_demanded() -> bool:
    """Whether LONGSPAN_ISOLATE=1 is set: kernels that do not isolate rows are not used."""
    return switch("LONGSPAN_ISOLATE", default=False)


def isolates(work: Work) -> bool:
    """Whether passes are isolated (`hopper.isolation`). Without a mask, all rows see the same keys. Chosen tiles of 64 are not."""
    return work.mask is not None and isolation_enabled() and pairs_of(work) == (False, False) and not computes_heads_alone(work)


class BlockIsolation(NamedTuple):
    """`loaded`: mbarriers of the loads of a block's K and V."""

    loaded: Any


class StepIsolation(NamedTuple):
    """`unbounded`: pointer to the flag. `norm`, `delta`: pointers to [B · H · Q]. `loaded`: mbarriers of the loads of Q, dO, K and V."""

    unbounded: Any
    norm: Any
    delta: Any
    loaded: Any


@triton.jit
def _is_unbounded(ptr, stride, batch, head, row, left, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Whether M rows of a head have NaN or a number that is not less than `VALUE_LIMIT`."""
    base = ptr + wide(batch) * stride[0] + wide(head) * stride[1]
    x = load_rows(base, row, left, stride[2], stride[3], M, D, DP, True)
    return tl.max(tl.max(tl.where(tl.abs(x.to(tl.float32)) < VALUE_LIMIT, 0, 1), 1), 0) > 0


@triton.jit
def flag_unbounded(
    k_ptr, v_ptr, flag_ptr, k_stride, v_stride, heads, length, cta,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Set the int32 at flag_ptr to 1 if M rows of K or V [B, heads, length, D or E], the `cta`-th, are unbounded."""
    blocks = tl.cdiv(length, M)
    row, head = (cta % blocks) * M, cta // blocks
    flagged = _is_unbounded(v_ptr, v_stride, head // heads, head % heads, row, length - row, M, E, EP)
    flagged = flagged | _is_unbounded(k_ptr, k_stride, head // heads, head % heads, row, length - row, M, D, DP)
    if flagged:
        tl.store(flag_ptr, 1)


@triton.jit(do_not_specialize=["heads", "length", "terms"])
def unbounded_kernel(
    k_ptr, v_ptr, norm_ptr, delta_ptr, flag_ptr, k_stride, v_stride, heads, length, terms,
    M: tl.constexpr, TERMS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Set the int32 at flag_ptr to 1 if K or V [B, heads, length, D or E] is unbounded or a row term [terms] is of a bad row.

    k_ptr, v_ptr: None to check row terms alone.
    """
    pid = tl.program_id(0)
    if v_ptr is not None:
        flag_unbounded(k_ptr, v_ptr, flag_ptr, k_stride, v_stride, heads, length, pid, M, D, DP, E, EP)
    # CTA p starts at term p · TERMS, and goes on by the TERMS of all CTAs.
    for first in range(pid * TERMS, terms, tl.num_programs(0) * TERMS):
        i = first + tl.arange(0, TERMS)
        norm = tl.load(norm_ptr + i, mask=i < terms, other=0.0)
        delta = tl.load(delta_ptr + i, mask=i < terms, other=0.0)
        if tl.max(is_bad(norm, delta).to(tl.int32), 0) > 0:
            tl.store(flag_ptr, 1)


@triton.jit
def is_bad(norm, delta):
    """Whether rows with these terms are bad, as defined above."""
    return (norm != norm) | (((delta <= DELTA_LIMIT) & (delta >= -DELTA_LIMIT)) == 0)


@triton.jit
def has_non_finite(ptr, row, rows, stride, M: tl.constexpr, D: tl.constexpr):
    """Whether each of M rows of a head has a NaN or ±inf, bool [M]. rows: which to read.

    By column: a tile would take registers that hold the kernel's own tiles. D is a multiple of 8.
    """
    at = ptr + wide(row + tl.arange(0, M)) * stride[2]
    total = tl.zeros((M,), tl.float32)
    if tl.max(rows.to(tl.int32), 0) > 0:
        for d in range(0, D, 8):
            for i in tl.static_range(8):
                total += tl.load(at + (d + i) * stride[3], mask=rows, other=0.0).to(tl.float32) * 0.0
    return total != 0.0


@gluon.jit
def _pieces(tile):
    """A tile [1, 1, rows, dims] of 16-bit floats in shared memory as pieces [number, 4, 64], panel after panel.

    Within a row of a panel, the 16-byte parts are permuted (the swizzle that wgmma reads), which does not matter here.
    """
    NUMBER: gl.constexpr = tile.shape[2] * tile.shape[3] // (_ROWS * _DIMS)
    return reinterpret(tile, tile.dtype, [NUMBER, _ROWS, _DIMS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def block_isolation():
    """The mbarriers of `BlockIsolation`."""
    return BlockIsolation(mbarriers(2, 1))


@gluon.jit
def _ints(tile):
    """A tile [1, 1, rows, dims] of 16-bit floats in shared memory as int32, two floats each: panels of 64 dims, 32 words of each row."""
    return reinterpret(tile, gl.int32, [tile.shape[2] * tile.shape[3] // 2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def isolate_values(k, v, isolation, isolated):
    """Wait for the loads of a forward block (one warp). Set values that are not finite to 0 and the keys of these values to NaN.

    k: the keys, or the first columns of keys in two parts. isolated: blocks that were isolated before.
    A lane has whole rows, through addresses that are scalars to the compiler (`pipeline.lane_number`): those of a tensor depend on the
    thread number alone, so the compiler would compute them at the begin of the kernel, in registers that all warps lack.
    """
    zero = isolated >> 30  # 0, but unknown to the compiler, which would otherwise unroll the loops
    phase = isolated & 1
    mbarrier.wait(isolation.loaded.index(0), phase)
    mbarrier.wait(isolation.loaded.index(1), phase)
    values, keys, lane = _ints(v), _ints(k), lane_number(isolated)
    ROWS: gl.constexpr = v.shape[2]
    BELOW: gl.constexpr = 0x0400 if v.dtype == gl.float16 else 0x0080  # + x reaches the highest bit of a half from inf on
    for first in range(0, ROWS + zero, 32):
        row, in_row = first + lane, 0
        for i in range(v.shape[3] // 2 + zero):
            at = (i // 32 * ROWS + row) * 32 + ((i + lane) & 31)  # a bank of its own for each lane
            x = load_int(values, at)
            bad = (((x & 0x7FFF7FFF) + BELOW * 0x10001) >> 15) & 0x10001  # of both halves
            store_int(values, at, x & ~(bad * 0xFFFF))
            in_row |= bad
        poison = gl.where(in_row == 0, 0, 0x7FFF7FFF)  # all ones are NaN
        for i in range(k.shape[3] // 2 + zero):
            at = (i // 32 * ROWS + row) * 32 + ((i + lane) & 31)
            store_int(keys, at, load_int(keys, at) | poison)
    fence_async_shared()


@gluon.jit
def isolate_block(k, v, stage, isolation, isolated, bars):
    """`isolate_values` for the block in a stage of the rings k and v, which then is signalled to the consumers.

    isolated: blocks that were isolated before. Returns their number after this block. bars: `KvBarriers`.
    """
    isolate_values(k.index(stage), v.index(stage), isolation, isolated)
    mbarrier.arrive(bars.k_full.index(stage), count=1)
    mbarrier.arrive(bars.v_full.index(stage), count=1)
    return isolated + 1


@gluon.jit
def _bound(tile, LIMIT: gl.constexpr):
    """Set NaN in a tile [1, 1, rows, dims] to 0, and clamp numbers to ±LIMIT, or to the range of float16 (one warp)."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    LARGEST: gl.constexpr = 65504.0 if tile.dtype == gl.float16 else LIMIT
    pieces = _pieces(tile)
    for i in range(tile.shape[2] * tile.shape[3] // (_ROWS * _DIMS)):
        x = pieces.index(i).load(layout).to(gl.float32)
        x = gl.where(x == x, gl.minimum(gl.maximum(x, -LARGEST), LARGEST), 0.0)
        pieces.index(i).store(x.to(tile.dtype))


@gluon.jit
def bound_keys(k, v, k_loaded, v_loaded, phase):
    """Wait for the loads of keys and values (one warp) and make them finite. k, v: slots of tiles (`Parts`)."""
    mbarrier.wait(k_loaded, phase)
    mbarrier.wait(v_loaded, phase)
    _bound(k.main, 3.3e38)
    _bound(v.main, VALUE_LIMIT)
    if k.tail.shape[3] != k.main.shape[3]:
        _bound(k.tail, 3.3e38)
    if v.tail.shape[3] != v.main.shape[3]:
        _bound(v.tail, VALUE_LIMIT)
    fence_async_shared()


@gluon.constexpr_function
def _larger_instruction(dtype):
    return f"max.NaN.xorsign.abs.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2 $0, $1, $2;"


@gluon.jit
def _group_words(tile, piece, GROUP: gl.constexpr):
    """Two floats per int32 [16, 32]: a piece of a warp group's 64 of 128 rows of a tile [1, 1, rows, dims]. Four warps."""
    words = reinterpret(tile, gl.int32, [tile.shape[3] // _DIMS * 8, 16, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return words.index(piece // 4 * 8 + GROUP * 4 + piece % 4).load(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _largest(tile, largest, GROUP: gl.constexpr):
    """The larger of each word of `largest` and the words of all pieces (`_group_words`), by magnitude; NaN is the largest."""
    for piece in gl.static_range(tile.shape[3] // _DIMS * 4):
        words = _group_words(tile, piece, GROUP)
        largest = gl.inline_asm_elementwise(
            _larger_instruction(tile.dtype), "=r,r,r", [largest, words], dtype=gl.int32, is_pure=True, pack=1
        )
    return largest


@gluon.jit
def _bound_group(tile, LIMIT: gl.constexpr, zero, GROUP: gl.constexpr):
    """`_bound` for a warp group's rows (`_group_words`). zero: 0, but unknown to the compiler, which would otherwise unroll the loop."""
    LARGEST: gl.constexpr = 65504.0 if tile.dtype == gl.float16 else LIMIT
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pieces = reinterpret(tile, tile.dtype, [tile.shape[3] // _DIMS * 8, 16, _DIMS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for piece in range(tile.shape[3] // _DIMS * 4 + zero):
        at = piece // 4 * 8 + GROUP * 4 + piece % 4
        x = pieces.index(at).load(layout).to(gl.float32)
        x = gl.where(x == x, gl.minimum(gl.maximum(x, -LARGEST), LARGEST), 0.0)
        pieces.index(at).store(x.to(tile.dtype))


@gluon.jit
def largest_keys(k, k_tail, GROUP: gl.constexpr):
    """The largest of the warp group's keys, int32 [16, 32] (`_largest`). k_tail: the last columns of keys in two parts, or k."""
    largest = _largest(k, gl.full([16, 32], 0, gl.int32, gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])), GROUP)
    if k_tail.shape[3] != k.shape[3]:
        largest = _largest(k_tail, largest, GROUP)
    return largest


@gluon.jit
def bound_group_keys(k, k_tail, v, largest, votes, zero, GROUP: gl.constexpr):
    """`bound_keys` by the warp group that computes with 64 of the item's 128 keys and values, before it reads them.

    k, k_tail, largest: of `largest_keys`. votes: `warp_votes.ballots`. zero: of `_bound_group`. The other warp group multiplies dS by these
    keys too, when it has waited for this one.
    """
    largest = _largest(v, largest, GROUP)
    # + x reaches the highest bit of a half from the limit on: 2^60, or inf in float16.
    BELOW: gl.constexpr = 0x0400 if v.dtype == gl.float16 else 0x8000 - ((127 + 60) << 7)
    over = ((largest & 0x7FFF7FFF) + BELOW * 0x10001) & -0x7FFF8000
    in_thread = gl.max(gl.reshape(gl.where(over == 0, 0, 1), [4, 4, 8, 4]), 3)
    vote(votes, GROUP, gl.reshape(in_thread, [128]))
    if any_vote(votes, GROUP) != 0:
        _bound_group(v, VALUE_LIMIT, zero, GROUP)
        _bound_group(k, 3.3e38, zero, GROUP)
        if k_tail.shape[3] != k.shape[3]:
            _bound_group(k_tail, 3.3e38, zero, GROUP)
        fence_async_shared()
        barrier()


@gluon.jit
def has_bad_rows(isolation, at, left, BM: gl.constexpr):
    """Whether any of the BM rows from `at` on is bad. `left`: rows from there to the end of the head; later ones are not read. One warp."""
    layout: gl.constexpr = gl.BlockedLayout([BM // 32], [32], [1], [0])
    i = gl.arange(0, BM, layout=layout)
    norm = gl.load(isolation.norm + at + i, mask=i < left, other=0.0)
    delta = gl.load(isolation.delta + at + i, mask=i < left, other=0.0)
    return gl.max(gl.where(is_bad(norm, delta), 1, 0), 0) > 0


@gluon.jit
def isolated_terms(norm, delta):
    """(norm, delta) with NaN and 0 for bad rows."""
    bad = is_bad(norm, delta)
    return gl.where(bad, float("nan"), norm), gl.where(bad, 0.0, delta)


@gluon.jit
def _zero_bad_rows(tile, isolation, at, left):
    """Set the bad rows of a tile [1, 1, rows, dims] to 0. One warp; arguments as of `has_bad_rows`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    PER_PANEL: gl.constexpr = tile.shape[2] // _ROWS
    pieces = _pieces(tile)
    for i in range(tile.shape[2] * tile.shape[3] // (_ROWS * _DIMS)):
        row = i % PER_PANEL * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
        norm = gl.load(isolation.norm + at + row, mask=row < left, other=0.0)
        delta = gl.load(isolation.delta + at + row, mask=row < left, other=0.0)
        x = pieces.index(i).load(layout)
        pieces.index(i).store(gl.where(gl.expand_dims(is_bad(norm, delta), 1), 0.0, x).to(x.dtype))


@gluon.jit
def zero_bad_rows(tile, isolation, at, left):
    """Set the bad rows of a tile (`Parts`) to 0. One warp; arguments as of `has_bad_rows`."""
    _zero_bad_rows(tile.main, isolation, at, left)
    if tile.tail.shape[3] != tile.main.shape[3]:
        _zero_bad_rows(tile.tail, isolation, at, left)


@gluon.jit
def isolate_rows(q, do, norm_s, delta_s, isolation, at, left, phase):
    """Wait for the loads of a step (one warp) and set its bad rows to 0, their norm to NaN and their delta to 0.

    q, do: slots of tiles (`Parts`). norm_s, delta_s: float32 [rows]. at, left: as of `has_bad_rows`.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(isolation.loaded.index(0), phase)
    mbarrier.wait(isolation.loaded.index(1), phase)
    zero_bad_rows(q, isolation, at, left)
    zero_bad_rows(do, isolation, at, left)
    norm, delta = isolated_terms(norm_s.load(layout), delta_s.load(layout))
    norm_s.store(norm)
    delta_s.store(delta)
    fence_async_shared()
