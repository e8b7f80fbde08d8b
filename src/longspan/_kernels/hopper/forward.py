"""The forward kernel for Hopper: programs that stay, one per multiprocessor, each of two warpgroups that compute and warps that serve them.

An item is 128 queries of one head, 64 to a warpgroup, over all its keys or, where `hopper.split_kv` says so, over a part of
them. One warp takes items off a counter, in the order of `hopper.item_order` and no sooner than they are needed, and looks up
what they are; one keeps the copy engine ahead with queries, keys and values; where there are running results, one has them carried
(`hopper.state_mover`). All meet only at barriers in shared memory. While a warpgroup weighs the scores of one block of keys, the
tensor cores may multiply the weights of the block before with its values. (The assembler of Triton 3.6 waits for those before it computes
exponentials, so that it is the other warpgroup's products that run meanwhile.) While it writes an item's result, the next item's queries
and keys arrive.

Scores live in base-2 logarithms, as in `longspan._kernels.triton.forward`, and so does the meaning of m, total and acc.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.gpu.device_library import LN_2, LOG2_E
from longspan._kernels.gpu.tile_access import place_in_order, run_place, span, table_row, wide
from longspan._kernels.hopper.barriers import barriers, bring, numbers, place_of, read_number, round_of, rows_of, write_number
from longspan._kernels.hopper.epilogue import CUTTABLE, GROUPS, HALF, by_row, fold, hold, leave
from longspan._kernels.hopper.none_arg import given
from longspan._kernels.hopper.state_mover import carry, is_held
from longspan._kernels.hopper.tile_io import fetch_rows, load_tile

_DYNAMIC = [
    "items", "uncut", "cut", "count", "wide_piece", "rows", "tiles", "heads", "shared", "group", "heavy", "late", "split", "q_len",
    "kv_len", "own_rows", "first_b", "first_h",
]  # fmt: skip
_ITEM = gl.constexpr(12)  # numbers that say what an item is
_AHEAD = gl.constexpr(4)  # places for descriptions of items
_NEAR = gl.constexpr(4)  # blocks that are still to be brought when the next item is taken
_FIRST = gl.constexpr(2)  # blocks after which an item's running result is brought: computing begins with keys


@gluon.jit
def _scheduler(
    q_ptr, q_stride, counter, items, pieces, order, full, partial, counts, complete, q_side, rows, tiles, heads, groups, q_len, item_s,
    near, bars,
    PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr, M_SUBS: gl.constexpr, N_SUBS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One warp that takes items off the counter and looks up what they are, just before they are needed; head −1 ends.

    An item that was taken is waited for, however long the one before it takes: so the next is taken when an item comes to its end. Short
    items would be done before the next is looked up, so of them one more is taken. An item's queries have been in no cache since they were
    written: they are fetched now, so that the copy engine does not wait for memory between two items.
    """
    item_full, item_empty = bars[0], bars[1]
    uncut, cut, count, wide_piece = pieces
    t = 0
    item = gl.atomic_add(counter, 1)
    while item < items:
        whole, nth = item, 0
        if item >= uncut:
            whole, nth = uncut + (item - uncut) % cut, (item - uncut) // cut
        tile, sub, b, h = place_in_order(whole, order, rows, tiles, heads, groups, M_SUBS, PER_BATCH, PER_HEAD)
        table = table_row(tile, b, h, tiles, heads, PER_BATCH, PER_HEAD)
        row, pos, left = span(tile * M_SUBS + sub, q_len, q_side, M_SUBS, GROUPS * HALF)
        masked = gl.load(counts + 2 * table) * N_SUBS
        skip, stop = 0, masked + gl.load(counts + 2 * table + 1) * N_SUBS
        if item >= uncut:
            shares = wide_piece + count - 1
            skip, stop = stop * gl.where(nth > 0, wide_piece + nth - 1, 0) // shares, stop * (wide_piece + nth) // shares
        run, full_run = gl.load(partial[0] + table), gl.load(full[0] + table)
        slot = place_of(t, _AHEAD)
        mbarrier.wait(item_empty.index(slot), round_of(t, _AHEAD) ^ 1)
        write_number(item_s, slot * _ITEM, h)
        write_number(item_s, slot * _ITEM + 1, b)
        write_number(item_s, slot * _ITEM + 2, row)
        write_number(item_s, slot * _ITEM + 3, pos)
        write_number(item_s, slot * _ITEM + 4, left)
        write_number(item_s, slot * _ITEM + 5, masked)
        write_number(item_s, slot * _ITEM + 6, stop)
        write_number(item_s, slot * _ITEM + 7, run)
        write_number(item_s, slot * _ITEM + 8, full_run)
        write_number(item_s, slot * _ITEM + 9, skip)
        write_number(item_s, slot * _ITEM + 10, item - uncut)
        if complete is not None:
            write_number(item_s, slot * _ITEM + 11, gl.load(complete + tile))
        mbarrier.arrive(item_full.index(slot), count=1)
        fetch_rows(q_ptr + wide(b) * q_stride[0] + wide(h) * q_stride[1], row, left, q_stride[2], D, GROUPS * HALF)
        ending = gl.where(stop - skip > _NEAR, t, t - 1)
        if ending >= 0:
            mbarrier.wait(near.index(place_of(ending, 2)), round_of(ending, 2))
        t += 1
        item = gl.atomic_add(counter, 1)
    slot = place_of(t, _AHEAD)
    mbarrier.wait(item_empty.index(slot), round_of(t, _AHEAD) ^ 1)
    write_number(item_s, slot * _ITEM, -1)
    mbarrier.arrive(item_full.index(slot), count=1)


@gluon.jit
def _bring_queries(q_desc, b, h, row, q_full, q_s):
    mbarrier.expect(q_full, q_desc.block_type.nbytes * GROUPS)
    for c in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(q_desc, [b, h, row + c * HALF, 0], q_full, q_s.index(c))


@gluon.jit
def _loader(
    q_desc, keys, values, full, partial, kv_side, shared, kv_len, q_s, k_s, v_s, item_s, where, near, begun, bars,
    N: gl.constexpr, N_SUBS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp that keeps the copy engine busy: an item's queries, and its blocks of keys and values, partial ones first. `begun`: barriers
    for whoever brings more, or None.
    """
    item_full, item_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    i = 0
    t = 0
    mbarrier.wait(item_full.index(0), 0)
    h = read_number(item_s, 0)
    while h >= 0:
        slot = place_of(t, _AHEAD)
        b = read_number(item_s, slot * _ITEM + 1)
        row = read_number(item_s, slot * _ITEM + 2)
        masked = read_number(item_s, slot * _ITEM + 5)
        stop = read_number(item_s, slot * _ITEM + 6)
        run = read_number(item_s, slot * _ITEM + 7)
        full_run = read_number(item_s, slot * _ITEM + 8)
        skip = read_number(item_s, slot * _ITEM + 9)
        mbarrier.arrive(item_empty.index(slot), count=1)
        ending, beginning = gl.maximum(stop - _NEAR, skip), gl.minimum(skip + _FIRST, stop - 1)
        g = h // shared
        if t == 0:
            _bring_queries(q_desc, b, h, row, q_full, q_s)
        at = 0
        while at < stop:
            if at < masked:
                first, last = gl.load(partial[1] + run), gl.load(partial[2] + run)
                run += 1
            else:
                first, last = gl.load(full[1] + full_run), gl.load(full[2] + full_run)
                full_run += 1
            row_from, pos_from, left_from = run_place(first, last, kv_len, kv_side, N_SUBS, N)
            size = (last + 1 - first) * N_SUBS
            for j in range(gl.maximum(at, skip), gl.minimum(at + size, stop)):
                n = first * N_SUBS + j - at
                s = place_of(i, STAGES)
                free = round_of(i, STAGES) ^ 1
                mbarrier.wait(k_empty.index(s), free)
                write_number(where, 2 * s, pos_from + n * N)
                write_number(where, 2 * s + 1, left_from - n * N)
                bring(keys, b, g, row_from + n * N, k_full.index(s), k_s.index(s))
                if (j == skip) & (t > 0):
                    # After the first keys: their place is free before that of the queries is.
                    mbarrier.wait(q_empty, (t & 1) ^ 1)
                    _bring_queries(q_desc, b, h, row, q_full, q_s)
                mbarrier.wait(v_empty.index(s), free)
                bring(values, b, g, row_from + n * N, v_full.index(s), v_s.index(s))
                if begun is not None:  # noqa: SIM102 (the compiler knows this one)
                    if j == beginning:
                        mbarrier.arrive(begun.index(place_of(t, 2)), count=1)
                if j == ending:
                    mbarrier.arrive(near.index(place_of(t, 2)), count=1)
                i += 1
            at += size
        t += 1
        mbarrier.wait(item_full.index(place_of(t, _AHEAD)), round_of(t, _AHEAD))
        h = read_number(item_s, place_of(t, _AHEAD) * _ITEM)


@gluon.jit
def _weigh(
    s, m, total, peak, q_first, kv_first, left, at_b, at_h, scale, mask_captured, mask_sizes, score_captured, score_sizes,
    MASK: gl.constexpr, SCORE: gl.constexpr, FLAT: gl.constexpr, CORNERS: gl.constexpr, PARTIAL: gl.constexpr, FOLD: gl.constexpr,
    PEAK: gl.constexpr, N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Weights of one block's scores, and the running maximum, sum and peak with it; `shrink` is for what was summed before."""
    q_pos = gl.expand_dims(q_first + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout)), 1)
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    kv = gl.expand_dims(kv_first + columns, 0)
    if not FOLD:
        s *= scale
    if SCORE is not None:
        if FLAT is None:
            s = SCORE(s, at_b, at_h, q_pos, kv, score_captured, score_sizes)
        else:
            low, high = CORNERS(at_b, at_h, q_first, q_first + (HALF - 1), kv_first, kv_first + (N - 1), score_captured, score_sizes)
            if low == high:
                s = FLAT(s, at_b, at_h, q_pos, kv, low, score_captured, score_sizes)
            else:
                s = SCORE(s, at_b, at_h, q_pos, kv, score_captured, score_sizes)
    if PARTIAL:
        if MASK is not None:
            s = gl.where(MASK(at_b, at_h, q_pos, kv, mask_captured, mask_sizes), s, float("-inf"))
        if left < N:
            s = gl.where(gl.expand_dims(columns, 0) < left, s, float("-inf"))
    factor = scale * LOG2_E if FOLD else LOG2_E
    top = gl.max(s, 1) * factor
    m_new = gl.maximum(m, top)
    if PEAK:
        peak = gl.maximum(peak, top)
    base = m_new
    if PARTIAL or SCORE is not None:
        # Nothing seen yet: any finite base gives exp2(−inf) = 0 where −inf − −inf would give NaN.
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * factor - gl.expand_dims(base, 1))
    shrink = gl.exp2(m - base)
    total = total * shrink + gl.sum(p, 1)
    return p, m_new, total, peak, shrink


@gluon.jit
def _attend(
    acc, total, m, peak, weights, i, count, q, q_first, at_b, at_h, scale, k_s, v_s, where, bars,
    mask_captured, mask_sizes, score_captured, score_sizes,
    MASK: gl.constexpr, SCORE: gl.constexpr, FLAT: gl.constexpr, CORNERS: gl.constexpr, PARTIAL: gl.constexpr, FOLD: gl.constexpr,
    PEAK: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr, out_layout: gl.constexpr,
):  # fmt: skip
    """`count` blocks more. On entry and on exit the weights of block i − 1 have not met their values yet."""
    k_full, k_empty, v_full, v_empty = bars
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    nothing = gl.full([HALF, N], 0.0, gl.float32, layout=layout)
    for _ in range(count):
        st, last = place_of(i, STAGES), place_of(i - 1, STAGES)
        mbarrier.wait(k_full.index(st), round_of(i, STAGES))
        kv, left = 0, 0
        if PARTIAL or SCORE is not None:
            kv, left = read_number(where, 2 * st), read_number(where, 2 * st + 1)
        s_next = warpgroup_mma(q, rows_of(k_s, st).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(last), round_of(i - 1, STAGES))
        acc_next = warpgroup_mma(weights, rows_of(v_s, last), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_next])
        mbarrier.arrive(k_empty.index(st), count=1)
        p, m, total, peak, shrink = _weigh(
            s, m, total, peak, q_first, kv, left, at_b, at_h, scale,
            mask_captured, mask_sizes, score_captured, score_sizes, MASK, SCORE, FLAT, CORNERS, PARTIAL, FOLD, PEAK, N, layout,
        )  # fmt: skip
        acc, weights = warpgroup_mma_wait(0, deps=[acc_next, gl.convert_layout(p.to(v_s.dtype), operand)])
        mbarrier.arrive(v_empty.index(last), count=1)
        acc = acc * by_row(shrink, out_layout)
        i += 1
    return acc, total, m, peak, weights, i


@gluon.jit
def _consumer(
    out_ptr, lse_ptr, peak_ptr, old_out_ptr, old_lse_ptr, old_peak_ptr, done_ptr, part_out, part_lse, counter, pieces,
    out_stride, old_out_stride, done_stride,
    heads, q_len, scale, first_b, first_h,
    q_s, k_s, v_s, item_s, where, bars, out_desc, done_desc, held, lse_s, held_bars,
    mask_captured, mask_sizes, score_captured, score_sizes,
    WHICH: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, FLAT: gl.constexpr, CORNERS: gl.constexpr, FOLD: gl.constexpr,
    N: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    item_full, item_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    cut = pieces[1]
    stream = (k_full, k_empty, v_full, v_empty)
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EP, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    PEAK: gl.constexpr = peak_ptr is not None
    WIDE: gl.constexpr = EP > CUTTABLE
    HELD: gl.constexpr = held is not None
    rows = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    nothing = gl.full([HALF, N], 0.0, gl.float32, layout=layout)
    HOLD: gl.constexpr = q_s.shape[4] <= 64 and EP <= 64  # there are registers for the queries: they are read once, not once for each block
    if not HOLD:
        q = rows_of(q_s, WHICH)
    i = 0
    t = 0
    mbarrier.wait(item_full.index(0), 0)
    h = read_number(item_s, 0)
    while h >= 0:
        slot = place_of(t, _AHEAD)
        b = read_number(item_s, slot * _ITEM + 1)
        row = read_number(item_s, slot * _ITEM + 2) + WHICH * HALF
        q_first = read_number(item_s, slot * _ITEM + 3) + WHICH * HALF
        rows_left = read_number(item_s, slot * _ITEM + 4) - WHICH * HALF
        skip = read_number(item_s, slot * _ITEM + 9)
        blocks = read_number(item_s, slot * _ITEM + 6) - skip
        partial = gl.minimum(gl.maximum(read_number(item_s, slot * _ITEM + 5) - skip, 0), blocks)
        whole = blocks - partial
        state = (wide(b) * heads + h) * q_len + row
        inside = rows < rows_left
        at_b, at_h = b + first_b, h + first_h

        m = gl.full([HALF], -float("inf"), gl.float32, layout=gl.SliceLayout(1, layout))
        total = gl.full([HALF], 0.0, gl.float32, layout=gl.SliceLayout(1, layout))
        peak = gl.full([HALF], -float("inf"), gl.float32, layout=gl.SliceLayout(1, layout))
        acc = gl.full([HALF, EP], 0.0, gl.float32, layout=out_layout)
        mbarrier.wait(q_full, t & 1)
        if HOLD:
            q = rows_of(q_s, WHICH).load(gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2))
        st = place_of(i, STAGES)
        mbarrier.wait(k_full.index(st), round_of(i, STAGES))
        kv, left = read_number(where, 2 * st), read_number(where, 2 * st + 1)
        s_next = warpgroup_mma(q, rows_of(k_s, st).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s_next])
        mbarrier.arrive(k_empty.index(st), count=1)
        if partial > 0:
            p, m, total, peak, _ = _weigh(
                s, m, total, peak, q_first, kv, left, at_b, at_h, scale,
                mask_captured, mask_sizes, score_captured, score_sizes, MASK, SCORE, FLAT, CORNERS, True, FOLD, PEAK, N, layout,
            )  # fmt: skip
        else:
            p, m, total, peak, _ = _weigh(
                s, m, total, peak, q_first, kv, left, at_b, at_h, scale,
                mask_captured, mask_sizes, score_captured, score_sizes, MASK, SCORE, FLAT, CORNERS, False, FOLD, PEAK, N, layout,
            )  # fmt: skip
        weights = gl.convert_layout(p.to(v_s.dtype), operand)
        i += 1
        acc, total, m, peak, weights, i = _attend(
            acc, total, m, peak, weights, i, gl.maximum(partial - 1, 0), q, q_first, at_b, at_h, scale, k_s, v_s, where, stream,
            mask_captured, mask_sizes, score_captured, score_sizes, MASK, SCORE, FLAT, CORNERS, True, FOLD, PEAK, N, STAGES,
            layout, out_layout,
        )  # fmt: skip
        acc, total, m, peak, weights, i = _attend(
            acc, total, m, peak, weights, i, gl.where(partial > 0, whole, whole - 1), q, q_first, at_b, at_h, scale, k_s, v_s,
            where, stream, mask_captured, mask_sizes, score_captured, score_sizes, MASK, SCORE, FLAT, CORNERS, False, FOLD, PEAK, N, STAGES,
            layout, out_layout,
        )  # fmt: skip
        mbarrier.arrive(q_empty, count=1)
        last = place_of(i - 1, STAGES)
        mbarrier.wait(v_full.index(last), round_of(i - 1, STAGES))
        acc_next = warpgroup_mma(weights, rows_of(v_s, last), acc, is_async=True)
        # Always 0, which the compiler cannot know: it would compute all places of a tile once for all items, in registers that the loops
        # need. A multiple of 16, so that it still knows that rows begin on 16 bytes.
        zero = (i >> 30) * 16
        piece = read_number(item_s, slot * _ITEM + 10)
        complete = 0
        if done_ptr is not None:
            complete = read_number(item_s, slot * _ITEM + 11)
        mbarrier.arrive(item_empty.index(slot), count=1)
        part = piece * GROUPS + WHICH
        # A previous state comes in last, where the registers of scores and weights are free. Of an item that was cut, with the first piece.
        share, old_share = total, total
        through = is_held(rows_left + WHICH * HALF, piece, GROUPS * HALF)
        if HELD:
            mbarrier.wait(held_bars[0], t & 1)
        if old_lse_ptr is not None:
            old_left = gl.where(piece < cut, rows_left, 0)
            head = old_out_ptr + wide(b) * old_out_stride[0] + wide(h) * old_out_stride[1]
            if HELD:
                if through:
                    old_m = lse_s.index(WHICH).load(gl.SliceLayout(1, layout)) * LOG2_E
                    old = rows_of(held, WHICH).load(out_layout)
                else:
                    old_m = gl.load(old_lse_ptr + state + rows, mask=rows < old_left, other=-float("inf")) * LOG2_E
                    old = load_tile(head, row, old_left, old_out_stride[2] + zero, E, EP, out_layout)
            else:
                old_m = gl.load(old_lse_ptr + state + rows, mask=rows < old_left, other=-float("inf")) * LOG2_E
                if not WIDE:
                    old = load_tile(head, row, old_left, old_out_stride[2] + zero, E, EP, out_layout)
            m, total, share, old_share = fold(m, total, old_m)
        if old_peak_ptr is not None:
            peak = gl.maximum(peak, gl.load(old_peak_ptr + state + rows, mask=inside, other=-float("inf")) * LOG2_E)
        seen = total > 0.0
        divisor = gl.where(seen, total, 1.0)
        if piece < 0:
            gl.store(lse_ptr + state + rows, gl.where(seen, m * LN_2 + gl.log(divisor), -float("inf")), mask=inside)
        else:
            gl.store(part_lse + part * HALF + rows, gl.where(seen, m + gl.log2(divisor), -float("inf")), mask=inside)
        if PEAK:
            gl.store(peak_ptr + state + rows, peak * LN_2, mask=inside)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(v_empty.index(last), count=1)
        if old_lse_ptr is None:
            acc = acc * by_row(1.0 / divisor, out_layout)
        else:
            if WIDE:  # two such tiles at once are more than there are registers: this one may come bit by bit
                old = load_tile(head, row, old_left, old_out_stride[2] + zero, E, EP, out_layout)
            acc = acc * by_row(share / divisor, out_layout) + old * by_row(old_share / divisor, out_layout)
        if HELD:
            if through:
                hold(held, out_desc, done_desc, complete, acc, WHICH)
            else:
                leave(
                    out_ptr, lse_ptr, done_ptr, part_out, part_lse, counter, pieces, out_stride, done_stride, complete, acc, b, h, row,
                    rows, rows_left, state, piece, zero, WHICH, E, EP, not HELD, out_layout,
                )  # fmt: skip
            mbarrier.arrive(held_bars[1], count=1)
        else:
            leave(
                out_ptr, lse_ptr, done_ptr, part_out, part_lse, counter, pieces, out_stride, done_stride, complete, acc, b, h, row,
                rows, rows_left, state, piece, zero, WHICH, E, EP, not HELD, out_layout,
            )  # fmt: skip
        t += 1
        mbarrier.wait(item_full.index(place_of(t, _AHEAD)), round_of(t, _AHEAD))
        h = read_number(item_s, place_of(t, _AHEAD) * _ITEM)


@gluon.jit(do_not_specialize=_DYNAMIC)
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, peak_ptr, old_out_ptr, old_lse_ptr, old_peak_ptr, done_ptr, q_ptr,
    out_desc, done_desc, old_desc, own_k_desc, own_v_desc, counter, part_out, part_lse,
    out_stride, old_out_stride, done_stride, q_stride, order, full, partial, counts, complete, q_side, kv_side,
    mask_captured, mask_sizes, score_captured, score_sizes,
    items, uncut, cut, count, wide_piece, rows, tiles, heads, shared, group, heavy, late, split, q_len, kv_len, own_rows,
    scale, first_b, first_h,
    MASK: gl.constexpr, SCORE: gl.constexpr, FLAT: gl.constexpr, CORNERS: gl.constexpr,
    PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr, FOLD: gl.constexpr,
    M_SUBS: gl.constexpr, N: gl.constexpr, N_SUBS: gl.constexpr, D: gl.constexpr, E: gl.constexpr, DP: gl.constexpr, EP: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """`counts` [table rows, 2]: how many tiles a row's partial and full runs hold, not both 0 in any of the first `rows` of `order`.
    Each table tile has M_SUBS items of queries and N_SUBS blocks of keys. Of the `items`, those from `uncut` on are pieces
    (`hopper.split_kv`), each of which leaves a state in part_out and part_lse. `group`, `heavy`, `late`, `split`: in which
    order they come (`place_in_order`). `counter`: int32, 0s: one, and two for each item that was cut. `q_ptr`, `q_stride`: the tensor that
    q_desc describes. Given own_k_desc and own_v_desc, those hold the first `own_rows` keys and values, k_desc and v_desc the others. Given
    `done_ptr`, results of tiles of queries whose `complete` is 1 go there instead of to out_ptr. FLAT and CORNERS: a score whose lookup may
    be the same all over a tile (`longspan._kernels.gpu.uniform_lookup`), or None.
    """
    dtype: gl.constexpr = q_desc.dtype
    out_desc, done_desc, old_desc = given(out_desc), given(done_desc), given(old_desc)
    HELD: gl.constexpr = 0 if out_desc is None else 1
    q_s = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, HALF, DP], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, DP], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, EP], v_desc.layout)
    item_s, where, near = numbers(_AHEAD * _ITEM), numbers(2 * STAGES), barriers(2, 1)
    bars = (
        barriers(_AHEAD, 1), barriers(_AHEAD, GROUPS + 1 + HELD), barriers(1, 1).index(0), barriers(1, GROUPS).index(0),
        barriers(STAGES, 1), barriers(STAGES, GROUPS), barriers(STAGES, 1), barriers(STAGES, GROUPS),
    )  # fmt: skip
    pieces, groups = (uncut, cut, count, wide_piece), (group, heavy, late, split)
    peak_ptr, old_out_ptr, old_lse_ptr, old_peak_ptr = given(peak_ptr), given(old_out_ptr), given(old_lse_ptr), given(old_peak_ptr)
    done_ptr, complete = given(done_ptr), given(complete)
    keys, values = (k_desc, given(own_k_desc), own_rows), (v_desc, given(own_v_desc), own_rows)
    q_side = (given(q_side[0]), given(q_side[1]), given(q_side[2]))
    kv_side = (given(kv_side[0]), given(kv_side[1]), given(kv_side[2]))
    if HELD:
        like: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, HALF, EP], gl.float32)
        held = gl.allocate_shared_memory(gl.float32, [GROUPS, 1, 1, HALF, EP], like)
        lse_s = gl.allocate_shared_memory(gl.float32, [GROUPS, HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        held_bars, begun = (barriers(1, 2).index(0), barriers(1, GROUPS).index(0)), barriers(2, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consumer, (
                    out_ptr, lse_ptr, peak_ptr, old_out_ptr, old_lse_ptr, old_peak_ptr, done_ptr, part_out, part_lse, counter, pieces,
                    out_stride, old_out_stride, done_stride, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, item_s, where, bars,
                    out_desc, done_desc, held, lse_s, held_bars, mask_captured, mask_sizes, score_captured, score_sizes,
                    0, MASK, SCORE, FLAT, CORNERS, FOLD, N, E, EP, STAGES,
                )),
                (_consumer, (
                    out_ptr, lse_ptr, peak_ptr, old_out_ptr, old_lse_ptr, old_peak_ptr, done_ptr, part_out, part_lse, counter, pieces,
                    out_stride, old_out_stride, done_stride, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, item_s, where, bars,
                    out_desc, done_desc, held, lse_s, held_bars, mask_captured, mask_sizes, score_captured, score_sizes,
                    1, MASK, SCORE, FLAT, CORNERS, FOLD, N, E, EP, STAGES,
                )),
                (_scheduler, (
                    q_ptr, q_stride, counter, items, pieces, order, full, partial, counts, complete, q_side, rows, tiles, heads, groups,
                    q_len, item_s, near, bars, PER_BATCH, PER_HEAD, M_SUBS, N_SUBS, D,
                )),
                (_loader, (
                    q_desc, keys, values, full, partial, kv_side, shared, kv_len, q_s, k_s, v_s, item_s, where, near, begun, bars,
                    N, N_SUBS, STAGES,
                )),
                (carry, (
                    out_desc, done_desc, old_desc, old_lse_ptr, heads, q_len, held, lse_s, item_s, (bars[0], bars[1]), held_bars, begun,
                    GROUPS, HALF, _AHEAD, _ITEM,
                )),
            ],
            [4, 1, 1, 1],
            [REGISTERS, 24, 24, 24],
        )  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consumer, (
                    out_ptr, lse_ptr, peak_ptr, old_out_ptr, old_lse_ptr, old_peak_ptr, done_ptr, part_out, part_lse, counter, pieces,
                    out_stride, old_out_stride, done_stride, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, item_s, where, bars,
                    given(None), given(None), given(None), given(None), given(None), mask_captured, mask_sizes, score_captured, score_sizes,
                    0, MASK, SCORE, FLAT, CORNERS, FOLD, N, E, EP, STAGES,
                )),
                (_consumer, (
                    out_ptr, lse_ptr, peak_ptr, old_out_ptr, old_lse_ptr, old_peak_ptr, done_ptr, part_out, part_lse, counter, pieces,
                    out_stride, old_out_stride, done_stride, heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, item_s, where, bars,
                    given(None), given(None), given(None), given(None), given(None), mask_captured, mask_sizes, score_captured, score_sizes,
                    1, MASK, SCORE, FLAT, CORNERS, FOLD, N, E, EP, STAGES,
                )),
                (_scheduler, (
                    q_ptr, q_stride, counter, items, pieces, order, full, partial, counts, complete, q_side, rows, tiles, heads, groups,
                    q_len, item_s, near, bars, PER_BATCH, PER_HEAD, M_SUBS, N_SUBS, D,
                )),
                (_loader, (
                    q_desc, keys, values, full, partial, kv_side, shared, kv_len, q_s, k_s, v_s, item_s, where, near, given(None), bars,
                    N, N_SUBS, STAGES,
                )),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )  # fmt: skip
