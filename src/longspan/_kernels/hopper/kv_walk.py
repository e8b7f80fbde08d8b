"""One warp of the backward pass by key tiles: it walks the block table, has tiles brought, and tells the others what each holds."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from longspan._kernels.gpu.tile_access import place, run_place, span, table_row, wide
from longspan._kernels.hopper.barriers import bring, place_of, round_of, write_number

KEYS = gl.constexpr(128)  # keys of an item
HALF = gl.constexpr(64)  # keys of a group of warps
SLOTS = gl.constexpr(8)  # descriptions of steps in flight: the writers lag behind
# Numbers that say what a step is: kind, position, rows left, head, row, batch; where dQ is added in turns, how many come before, its lock.
STEP = gl.constexpr(8)
ITEM = gl.constexpr(5)  # numbers that say what an item is: batch (−1: no more), key head, row, position, rows left

_NONE = gl.constexpr(2**30)  # no tile is that far

# Kinds of steps.
STOP = gl.constexpr(-1)  # no step: no more items
END = gl.constexpr(0)  # no step: the item ends
WHOLE = gl.constexpr(1)  # everything counts
PARTIAL = gl.constexpr(2)  # the mask decides
SHORT = gl.constexpr(3)  # every key of the tile counts, but the tile is short


@gluon.jit
def _send(
    it, q_ptr, do_ptr, norm_ptr, delta_ptr, b, h, row, pos, left, state, q_len, kind, before, lock, told, stores, bars,
    ALIGNED: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One step's tiles on their way, as soon as there is room."""
    q_s, do_s, norm_s, delta_s, steps = stores
    q_full, do_full, empty = bars
    s = place_of(it, STAGES)
    mbarrier.wait(empty.index(s), round_of(it, STAGES) ^ 1)
    at = place_of(it, SLOTS) * STEP
    write_number(steps, at, kind)
    write_number(steps, at + 1, pos)
    write_number(steps, at + 2, left)
    write_number(steps, at + 3, h)
    write_number(steps, at + 4, row)
    write_number(steps, at + 5, b)
    if told is not None:
        write_number(steps, at + 6, before)
        write_number(steps, at + 7, lock)
        mbarrier.arrive(told.index(place_of(it, SLOTS)), count=1)
    if ALIGNED:
        mbarrier.expect(q_full.index(s), q_ptr.block_type.nbytes + norm_ptr.block_type.nbytes)
        tma.async_copy_global_to_shared(q_ptr, [b, h, row, 0], q_full.index(s), q_s.index(s))
        tma.async_copy_global_to_shared(norm_ptr, [state + row], q_full.index(s), norm_s.index(s))
        mbarrier.expect(do_full.index(s), do_ptr.block_type.nbytes + delta_ptr.block_type.nbytes)
        tma.async_copy_global_to_shared(do_ptr, [b, h, row, 0], do_full.index(s), do_s.index(s))
        tma.async_copy_global_to_shared(delta_ptr, [state + row], do_full.index(s), delta_s.index(s))
    else:
        # Rows past the end repeat the last one: any number will do there, but it must be one.
        line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        i = gl.minimum(row + gl.arange(0, BM, layout=line), q_len - 1)
        async_copy.async_copy_global_to_shared(norm_s.index(s), norm_ptr + state + i)
        async_copy.mbarrier_arrive(q_full.index(s))
        mbarrier.expect(q_full.index(s), q_ptr.block_type.nbytes)
        tma.async_copy_global_to_shared(q_ptr, [b, h, row, 0], q_full.index(s), q_s.index(s))
        async_copy.async_copy_global_to_shared(delta_s.index(s), delta_ptr + state + i)
        async_copy.mbarrier_arrive(do_full.index(s))
        mbarrier.expect(do_full.index(s), do_ptr.block_type.nbytes)
        tma.async_copy_global_to_shared(do_ptr, [b, h, row, 0], do_full.index(s), do_s.index(s))


@gluon.jit
def _keys(turn, keys, values, b, g, parts, row, pos, left, k_s, v_s, item_s, kv_bars):
    """An item's keys and values on their way, as soon as the last item's are not needed any more. They are those of `parts` items."""
    k_full, v_full, kv_empty = kv_bars
    mbarrier.wait(kv_empty, (turn & 1) ^ 1)
    write_number(item_s, 0, b)
    write_number(item_s, 1, g)
    write_number(item_s, 2, row)
    write_number(item_s, 3, pos)
    write_number(item_s, 4, left)
    bring(keys, b, g // parts, row, k_full, k_s.index(0))
    bring(values, b, g // parts, row, v_full, v_s.index(0))


@gluon.jit
def walk(
    counter, items, q_ptr, keys, values, do_ptr, norm_ptr, delta_ptr, order, full, partial, turns, told, q_side, kv_side,
    rows, tiles, heads, kv_heads, shared, parts, group, q_len, kv_len, k_s, v_s, stores, item_s, kv_bars, bars,
    PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr, ALIGNED: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The walker: items until none is left, and of each all steps. Given `told`, barriers that open when it has written what a step is,
    queries come in ascending order, whatever the kind of their tiles, with `turns` as in `hopper.dq_order` and how many locks
    a head has.
    """
    SUBS: gl.constexpr = KEYS // BM
    ORDERED: gl.constexpr = told is not None
    k_full, kv_empty = kv_bars[0], kv_bars[2]
    steps = stores[4]
    q_full, do_full, empty = bars
    it = 0
    turn = 0
    item = gl.atomic_add(counter, 1)
    while item < items:
        tile, _, b, g = place(item, order, rows, tiles, kv_heads, group, 1, PER_BATCH, PER_HEAD)
        kv_row, kv_pos, kv_left = span(tile, kv_len, kv_side, 1, KEYS)
        sent = 0
        for j in range(shared):
            h = g * shared + j
            table = table_row(tile, b, h, tiles, heads, PER_BATCH, PER_HEAD)
            state = (b * heads + h) * q_len if ALIGNED else (wide(b) * heads + h) * q_len
            whole, some = gl.load(full[0] + table), gl.load(partial[0] + table)
            n_whole, n_some = gl.load(full[0] + table + 1) - whole, gl.load(partial[0] + table + 1) - some
            if ORDERED:
                nth = gl.load(turns[0] + table)
                wholes = 0
            for i in range(n_whole + n_some):
                if ORDERED:
                    r, next_some = whole + wholes, some + i - wholes
                    first_some = gl.load(partial[1] + next_some, mask=i - wholes < n_some, other=_NONE)
                    masked = first_some < gl.load(full[1] + r, mask=wholes < n_whole, other=_NONE)
                    r = gl.where(masked, next_some, r)
                    wholes += gl.where(masked, 0, 1)
                else:
                    masked = i >= n_whole
                    r = gl.where(masked, some + i - n_whole, whole + i)
                first = gl.load(gl.where(masked, partial[1], full[1]) + r)
                last = gl.load(gl.where(masked, partial[2], full[2]) + r)
                kind = gl.where(masked, PARTIAL, gl.where(kv_left < KEYS, SHORT, WHOLE))
                row_from, pos_from, left_from = run_place(first, last, q_len, q_side, SUBS, BM)
                # A step without a single query is left out.
                for n in range(first * SUBS, gl.minimum((last + 1) * SUBS, (left_from + (BM - 1)) // BM)):
                    before, lock = None, None
                    if ORDERED:
                        before = gl.load(turns[1] + nth + n // SUBS - first)
                        lock = (b * heads + h) * turns[2] + n
                    _send(
                        it, q_ptr, do_ptr, norm_ptr, delta_ptr, b, h, row_from + n * BM, pos_from + n * BM, left_from - n * BM,
                        state, q_len, kind, before, lock, told, stores, bars, ALIGNED, BM, STAGES,
                    )  # fmt: skip
                    it += 1
                    # The first queries come before the keys: there is room for them earlier.
                    if sent == 0:
                        _keys(turn, keys, values, b, g, parts, kv_row, kv_pos, kv_left, k_s, v_s, item_s, kv_bars)
                    sent = 1
                if ORDERED:
                    nth += last + 1 - first
        if sent == 0:
            _keys(turn, keys, values, b, g, parts, kv_row, kv_pos, kv_left, k_s, v_s, item_s, kv_bars)
        s = place_of(it, STAGES)
        mbarrier.wait(empty.index(s), round_of(it, STAGES) ^ 1)
        write_number(steps, place_of(it, SLOTS) * STEP, END)
        if ORDERED:
            mbarrier.arrive(told.index(place_of(it, SLOTS)), count=1)
        mbarrier.arrive(q_full.index(s), count=1)
        mbarrier.arrive(do_full.index(s), count=1)
        it += 1
        turn += 1
        item = gl.atomic_add(counter, 1)
    mbarrier.wait(kv_empty, (turn & 1) ^ 1)
    write_number(item_s, 0, STOP)
    write_number(steps, place_of(it, SLOTS) * STEP, STOP)
    if ORDERED:
        mbarrier.arrive(told.index(place_of(it, SLOTS)), count=1)
    mbarrier.arrive(k_full, count=1)
