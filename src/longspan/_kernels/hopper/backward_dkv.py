"""The backward pass by key tiles on Hopper: dK and dV of 128 keys, and dQ as a sum over all key tiles by the copy engine's reductions.

Programs stay and take items, 128 keys each, off a counter, heaviest first unless dQ is added in turns. One warp walks the block table, has
the copy engine bring tiles, and tells the others what each holds. Two groups of four warps hold 64 keys each and compute. Where dQ is asked
for, two more warps hand the groups' dQ tiles to the copy engine; where that must happen in turns, one more looks ahead for the next turn.

A step is BM queries × 128 keys, scores and their gradients transposed, keys × queries:
Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, dV += Pᵀ dO, dSᵀ = Pᵀ (dPᵀ − delta), dK += dSᵀ Q, dQᵀ = Kᵀ dSᵀ. A group needs the other one's dSᵀ for its dQ:
it takes that of the step before, so that the groups need not wait for each other. The next step's Sᵀ runs while dQ is written out.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.barriers import barriers, numbers, place_of, read_number, round_of, rows_of
from longspan._kernels.hopper.kv_walk import END, HALF, ITEM, KEYS, SHORT, SLOTS, STEP, STOP, WHOLE, walk
from longspan._kernels.hopper.none_arg import given
from longspan._kernels.hopper.tile_io import store_tile
from longspan._kernels.hopper.tma_reduce import async_atomic_add, reduced

_DYNAMIC = [
    "items", "rows", "tiles", "heads", "kv_heads", "shared", "parts", "group", "q_len", "kv_len", "own_rows", "locks_per_head", "first_b",
    "first_h",
]  # fmt: skip


@gluon.jit
def _dq(k, ds, C: gl.constexpr):
    """A group's part of dQ, transposed, on its way: 64 of the head's 128 dims, or of 64 dims all, of half of the queries."""
    WIDE: gl.constexpr = k.shape[1] > 64
    PART: gl.constexpr = ds.shape[1] if WIDE else ds.shape[1] // 2  # queries
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART, 16])
    none = gl.full([64, PART], 0.0, gl.float32, layout=layout)
    if WIDE:
        k = k.slice(C * 64, 64, dim=1)
    else:
        ds = ds.slice(C * PART, PART, dim=1)
    return warpgroup_mma(k.permute((1, 0)), ds, none, use_acc=False, is_async=True)


@gluon.jit
def _hand_over(dq, entry, dq_s, dq_bars):
    """A part of dQ to the writer."""
    dq_full, dq_empty = dq_bars
    mbarrier.wait(dq_empty, (entry & 1) ^ 1)
    dq_s.permute((1, 0)).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full, count=1)


@gluon.jit
def _weigh(
    s, norm, kind, at_b, h, pos, left, kv_pos, kv_left, scale, mask_captured, mask_sizes, score_captured, score_sizes,
    C: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, MASKED: gl.constexpr, BM: gl.constexpr,
    dtype: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(p in `dtype`, p · ∂t/∂s) of one step's scores, keys × queries. JOINT is linear in its gradient: given p, it gives the product."""
    cols = gl.expand_dims(gl.arange(0, BM, layout=gl.SliceLayout(0, layout)), 0)
    keys = C * HALF + gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(1, layout)), 1)
    if SCORE is None:
        p = gl.exp2(s * (scale * LOG2_E) - norm)
    else:
        s = s * scale
        p = gl.exp2(SCORE(s, at_b, h, pos + cols, kv_pos + keys, score_captured, score_sizes) * LOG2_E - norm)
    if MASKED:
        # Keys past the end are garbage that must not count in dQ, nor queries past the end in dK and dV.
        valid = (cols < left) & (keys < kv_left)
        if MASK is not None:
            # Within whole runs positions need not go on: there the mask is not asked, and is given positions that exist.
            known = gl.where(kind == SHORT, 0, pos)
            valid = valid & (MASK(at_b, h, known + cols, kv_pos + keys, mask_captured, mask_sizes) | (kind == SHORT))
        p = gl.where(valid, p, 0.0)
    slope = p
    if SCORE is not None:
        slope = JOINT(p, s, at_b, h, pos + cols, kv_pos + keys, cols < BM, score_captured, score_sizes, ())
        if MASKED:
            slope = gl.where(p == 0.0, 0.0, slope)
    return p.to(dtype), slope


@gluon.jit
def _compute(
    dk_ptr, dv_ptr, dk_stride, dv_stride, mask_captured, mask_sizes, score_captured, score_sizes,
    scale, first_b, first_h, k_s, v_s, ds_s, dq_s, stores, item_s, kv_bars, bars, ds_bars, dq_bars,
    C: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, DQ: gl.constexpr,
    BM: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, STAGES: gl.constexpr, DS: gl.constexpr,
):  # fmt: skip
    """A group of four warps: 64 of the item's 128 keys."""
    k_full, v_full, kv_empty = kv_bars
    q_s, do_s, norm_s, delta_s, steps = stores
    q_full, do_full, empty = bars
    dtype: gl.constexpr = k_s.dtype
    st_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    dk_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DP, 16])
    dv_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EP, 16])
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv_l, k_width=2)
    s_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk_l, k_width=2)
    row_l: gl.constexpr = gl.SliceLayout(0, st_l)
    # Keys and values are read into registers once for all steps of an item, where there are registers for it: a product of 64 by 64 takes
    # all that shared memory gives if both sides come from there.
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=st_l, k_width=2)
    HOLD: gl.constexpr = DP <= 64
    none = gl.full([HALF, BM], 0.0, gl.float32, layout=st_l)
    it = 0
    turn = 0
    mbarrier.wait(k_full, 0)
    b = read_number(item_s, 0)
    while b >= 0:
        g, kv_row = read_number(item_s, 1), read_number(item_s, 2) + C * HALF
        kv_pos, kv_left = read_number(item_s, 3), read_number(item_s, 4)
        dk = gl.full([HALF, DP], 0.0, gl.float32, layout=dk_l)
        dv = gl.full([HALF, EP], 0.0, gl.float32, layout=dv_l)
        mbarrier.wait(q_full.index(place_of(it, STAGES)), round_of(it, STAGES))
        kind = read_number(steps, place_of(it, SLOTS) * STEP)
        k_w = rows_of(k_s, 0).slice(C * HALF, HALF, dim=0)
        if HOLD:
            k_w = k_w.load(operand)
        s_next = warpgroup_mma(k_w, rows_of(q_s, place_of(it, STAGES)).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full, turn & 1)
        if HOLD:
            v_w = rows_of(v_s, 0).slice(C * HALF, HALF, dim=0).load(operand)
        s = warpgroup_mma_wait(0, deps=[s_next])
        start = it
        while kind != END:
            stage = place_of(it, STAGES)
            # Always 0, which the compiler cannot know: it would compute the places of all operands once and for all, and spill them.
            zero = it >> 30
            k = rows_of(k_s, zero)
            if not HOLD:
                k_w = k.slice(C * HALF, HALF, dim=0)
                v_w = rows_of(v_s, zero).slice(C * HALF, HALF, dim=0)
            q, do = rows_of(q_s, stage), rows_of(do_s, stage)
            about = place_of(it, SLOTS) * STEP
            mbarrier.wait(do_full.index(stage), round_of(it, STAGES))
            dp_next = warpgroup_mma(v_w, do.permute((1, 0)), none, use_acc=False, is_async=True)
            norm = gl.expand_dims(norm_s.index(stage).load(row_l), 0)
            if kind == WHOLE:
                p, slope = _weigh(
                    s, norm, kind, b + first_b, read_number(steps, about + 3) + first_h, read_number(steps, about + 1), BM,
                    kv_pos, kv_left, scale, mask_captured, mask_sizes, score_captured, score_sizes,
                    C, MASK, SCORE, JOINT, False, BM, dtype, st_l,
                )  # fmt: skip
            else:
                p, slope = _weigh(
                    s, norm, kind, b + first_b, read_number(steps, about + 3) + first_h, read_number(steps, about + 1),
                    read_number(steps, about + 2), kv_pos, kv_left, scale, mask_captured, mask_sizes, score_captured, score_sizes,
                    C, MASK, SCORE, JOINT, True, BM, dtype, st_l,
                )  # fmt: skip
            dv_next = warpgroup_mma(gl.convert_layout(p, p_l), do, dv, is_async=True)
            delta = gl.expand_dims(delta_s.index(stage).load(row_l), 0)
            dp = warpgroup_mma_wait(1, deps=[dp_next])
            ds = (slope * (dp - delta)).to(dtype)
            if DQ:
                ds_full, ds_empty = ds_bars
                mbarrier.wait(ds_empty.index(place_of(it, DS)), round_of(it, DS) ^ 1)
                ds_s.index(place_of(it, DS)).slice(C * HALF, HALF, dim=0).store(ds)
                fence_async_shared()
                mbarrier.arrive(ds_full.index(place_of(it, DS)), count=1)
            dk_next = warpgroup_mma(gl.convert_layout(ds, s_l), q, dk, is_async=True)
            dv = warpgroup_mma_wait(1, deps=[dv_next])
            # An item's first step has no step before: what it computes of dQ then is not used.
            before = it - 1
            source = gl.maximum(before, start)
            slot = place_of(source, DS)
            if DQ:
                ds_full, ds_empty = ds_bars
                mbarrier.wait(ds_full.index(slot), round_of(source, DS))
                dq_next = _dq(k, ds_s.index(slot), C)
            after = it + 1
            mbarrier.wait(q_full.index(place_of(after, STAGES)), round_of(after, STAGES))
            kind = read_number(steps, place_of(after, SLOTS) * STEP)
            s_next = warpgroup_mma(k_w, rows_of(q_s, place_of(after, STAGES)).permute((1, 0)), none, use_acc=False, is_async=True)
            if DQ:
                ds_full, ds_empty = ds_bars
                dk, dq = warpgroup_mma_wait(1, deps=[dk_next, dq_next])
                mbarrier.arrive(empty.index(stage), count=1)
                if before >= start:
                    mbarrier.arrive(ds_empty.index(slot), count=1)
                    _hand_over(dq * scale, before, dq_s, dq_bars)
            else:
                dk = warpgroup_mma_wait(1, deps=[dk_next])
                mbarrier.arrive(empty.index(stage), count=1)
            s = warpgroup_mma_wait(0, deps=[s_next])
            it = after
        # The entry that ends an item passes through all barriers as a step does.
        mbarrier.wait(do_full.index(place_of(it, STAGES)), round_of(it, STAGES))
        mbarrier.arrive(empty.index(place_of(it, STAGES)), count=1)
        if DQ:
            ds_full, ds_empty = ds_bars
            before = it - 1
            if before >= start:
                mbarrier.wait(ds_full.index(place_of(before, DS)), round_of(before, DS))
                dq_next = _dq(rows_of(k_s, 0), ds_s.index(place_of(before, DS)), C)
                dq = warpgroup_mma_wait(0, deps=[dq_next])
                mbarrier.arrive(kv_empty, count=1)
                mbarrier.arrive(ds_empty.index(place_of(before, DS)), count=1)
                _hand_over(dq * scale, before, dq_s, dq_bars)
            else:
                mbarrier.arrive(kv_empty, count=1)
        else:
            mbarrier.arrive(kv_empty, count=1)
        zero = (it >> 30) * 16  # as above; a multiple of 16, so that the compiler still knows where rows begin
        head, left = dk_ptr + wide(b) * dk_stride[0] + wide(g) * dk_stride[1], kv_left - C * HALF
        store_tile(head, dk * scale, kv_row, left, dk_stride[2] + zero, D, DP)
        head = dv_ptr + wide(b) * dv_stride[0] + wide(g) * dv_stride[1]
        store_tile(head, dv, kv_row, left, dv_stride[2] + zero, E, EP)
        if DQ:
            ds_full, ds_empty = ds_bars
            dq_full, dq_empty = dq_bars
            mbarrier.wait(ds_empty.index(place_of(it, DS)), round_of(it, DS) ^ 1)
            mbarrier.arrive(ds_full.index(place_of(it, DS)), count=1)
            mbarrier.arrive(ds_empty.index(place_of(it, DS)), count=1)
            mbarrier.wait(dq_empty, (it & 1) ^ 1)
            mbarrier.arrive(dq_full, count=1)
        it += 1
        turn += 1
        mbarrier.wait(k_full, turn & 1)
        b = read_number(item_s, 0)
    if DQ:
        dq_full, dq_empty = dq_bars
        mbarrier.wait(dq_empty, (it & 1) ^ 1)
        mbarrier.arrive(dq_full, count=1)


@gluon.jit
def _wait_for_turns(locks, steps, turn_bars):
    """A warp that looks ahead: it lets the writers add a step's dQ when as many were added as come before it."""
    if locks is not None:
        told, opened = turn_bars
        it = 0
        mbarrier.wait(told.index(0), 0)
        kind = read_number(steps, 0)
        while kind != STOP:
            slot = place_of(it, SLOTS)
            if kind != END:
                before, lock = read_number(steps, slot * STEP + 6), locks + read_number(steps, slot * STEP + 7)
                while gl.atomic_add(lock, 0, sem="acquire") < before * 2:
                    pass
            mbarrier.arrive(opened.index(slot), count=1)
            it += 1
            mbarrier.wait(told.index(place_of(it, SLOTS)), round_of(it, SLOTS))
            kind = read_number(steps, place_of(it, SLOTS) * STEP)


@gluon.jit
def _write(dq_ptr, locks, dq_s, steps, dq_bars, turn_bars, C: gl.constexpr, WIDE: gl.constexpr):
    """A writer: hands one group's dQ tiles to the copy engine and gives the buffer back when that has read it. Given `locks`, each tile
    waits for its turn, and the next one's begins when it is added. Reductions happen in the L2 cache: one that was added before this one is
    begun comes first, with no fence between what was waited for and the copy engine.
    """
    dq_full, dq_empty = dq_bars
    it = 0
    mbarrier.wait(dq_full, 0)
    kind = read_number(steps, 0)
    while kind != STOP:
        about = place_of(it, SLOTS) * STEP
        if locks is not None:  # where an item ends too: else who looks ahead could fall behind all others
            mbarrier.wait(turn_bars[1].index(place_of(it, SLOTS)), round_of(it, SLOTS))
        if kind != END:
            h, row, b = read_number(steps, about + 3), read_number(steps, about + 4), read_number(steps, about + 5)
            if WIDE:
                async_atomic_add(dq_ptr, [b, h, row, C * 64], dq_s)
            else:
                async_atomic_add(dq_ptr, [b, h, row + C * dq_s.shape[2], 0], dq_s)
            tma.store_wait(0)
        mbarrier.arrive(dq_empty, count=1)
        if locks is not None:  # noqa: SIM102 (the compiler knows this one)
            if kind != END:
                reduced()
                gl.atomic_add(locks + read_number(steps, about + 7), 1, sem="release")
        it += 1
        mbarrier.wait(dq_full, it & 1)
        kind = read_number(steps, place_of(it, SLOTS) * STEP)


@gluon.jit(do_not_specialize=_DYNAMIC)
def keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, norm_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr, own_k_ptr, own_v_ptr, counter, locks, dk_stride, dv_stride,
    order, full, partial, turn_ptr, turns, q_side, kv_side, mask_captured, mask_sizes, score_captured, score_sizes,
    items, rows, tiles, heads, kv_heads, shared, parts, group, q_len, kv_len, own_rows, locks_per_head, scale, first_b, first_h,
    MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, E: gl.constexpr, EP: gl.constexpr,
    ALIGNED: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, DS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV of tiles of keys, summed over `shared` query heads. Given dq_ptr, float32, dQ is added to it. Heads of dK and dV: each
    head of keys `parts` times, for as many parts of the query heads that read it.

    `counter`: one int32, 0. DS: buffers of dS. ALIGNED: the copy engine brings norm and delta too, each described as one line [B · H · Q]
    in tiles of BM: it can where every step's rows begin on 16 bytes of that line. Else they are pointers.
    Given `locks`, int32 zeros, one for each step of queries of each head, additions to dQ take turns (`longspan._kernels.hopper.dq_order`).
    Given own_k_ptr and own_v_ptr, those describe the first `own_rows` keys and values, k_ptr and v_ptr the others; dK and dV are of both.
    """
    # Writers still read what a step is when the walker is STAGES + 3 steps ahead.
    gl.static_assert(STAGES + 3 < SLOTS, "what a step is must be known until its dQ is added")
    DQ: gl.constexpr = dq_ptr is not None
    dtype: gl.constexpr = k_ptr.dtype
    k_s = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, DP], k_ptr.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, EP], v_ptr.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, DP], q_ptr.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, EP], do_ptr.layout)
    line: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    plain: gl.constexpr = line if ALIGNED else gl.SwizzledSharedLayout(1, 1, 1, [0])
    norm_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], plain)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], plain)
    steps, item_s = numbers(SLOTS * STEP), numbers(ITEM)
    stores = (q_s, do_s, norm_s, delta_s, steps)
    kv_bars = (barriers(1, 1).index(0), barriers(1, 1).index(0), barriers(1, 2).index(0))
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 2))
    q_side = (given(q_side[0]), given(q_side[1]), given(q_side[2]))
    kv_side = (given(kv_side[0]), given(kv_side[1]), given(kv_side[2]))
    keys, values = (k_ptr, given(own_k_ptr), own_rows), (v_ptr, given(own_v_ptr), own_rows)
    locks, of_turns, turn_bars = given(locks), (given(turn_ptr), given(turns), locks_per_head), (given(None), given(None))
    if locks is not None:
        turn_bars = (barriers(SLOTS, 1), barriers(SLOTS, 1))
    if DQ:
        ds_s = gl.allocate_shared_memory(dtype, [DS, KEYS, BM], gl.NVMMASharedLayout.get_default_for([KEYS, BM], dtype))
        dq_s = gl.allocate_shared_memory(gl.float32, [2, 1, 1, dq_ptr.block_type.shape[2], dq_ptr.block_type.shape[3]], dq_ptr.layout)
        ds_bars = (barriers(DS, 2), barriers(DS, 2))
        dq_full, dq_empty = barriers(2, 1), barriers(2, 1)
        fence_async_shared()
        gl.warp_specialize([
            (_compute, (
                dk_ptr, dv_ptr, dk_stride, dv_stride, mask_captured, mask_sizes, score_captured, score_sizes,
                scale, first_b, first_h, k_s, v_s, ds_s, rows_of(dq_s, 0), stores, item_s, kv_bars, bars,
                ds_bars, (dq_full.index(0), dq_empty.index(0)),
                0, MASK, SCORE, JOINT, True, BM, D, DP, E, EP, STAGES, DS,
            )),
            (_compute, (
                dk_ptr, dv_ptr, dk_stride, dv_stride, mask_captured, mask_sizes, score_captured, score_sizes,
                scale, first_b, first_h, k_s, v_s, ds_s, rows_of(dq_s, 1), stores, item_s, kv_bars, bars,
                ds_bars, (dq_full.index(1), dq_empty.index(1)),
                1, MASK, SCORE, JOINT, True, BM, D, DP, E, EP, STAGES, DS,
            )),
            (walk, (
                counter, items, q_ptr, keys, values, do_ptr, norm_ptr, delta_ptr, order, full, partial, of_turns, turn_bars[0],
                q_side, kv_side, rows, tiles, heads, kv_heads, shared, parts, group, q_len, kv_len, k_s, v_s, stores, item_s, kv_bars,
                bars,
                PER_BATCH, PER_HEAD, ALIGNED, BM, STAGES,
            )),
            (_write, (dq_ptr, locks, dq_s.index(0), steps, (dq_full.index(0), dq_empty.index(0)), turn_bars, 0, DP > 64)),
            (_write, (dq_ptr, locks, dq_s.index(1), steps, (dq_full.index(1), dq_empty.index(1)), turn_bars, 1, DP > 64)),
            (_wait_for_turns, (locks, steps, turn_bars)),
        ], [4, 1, 1, 1, 1], [REGISTERS, 24, 24, 24, 24])  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize([
            (_compute, (
                dk_ptr, dv_ptr, dk_stride, dv_stride, mask_captured, mask_sizes, score_captured, score_sizes,
                scale, first_b, first_h, k_s, v_s, given(None), given(None), stores, item_s, kv_bars, bars, given(None), given(None),
                0, MASK, SCORE, JOINT, False, BM, D, DP, E, EP, STAGES, DS,
            )),
            (_compute, (
                dk_ptr, dv_ptr, dk_stride, dv_stride, mask_captured, mask_sizes, score_captured, score_sizes,
                scale, first_b, first_h, k_s, v_s, given(None), given(None), stores, item_s, kv_bars, bars, given(None), given(None),
                1, MASK, SCORE, JOINT, False, BM, D, DP, E, EP, STAGES, DS,
            )),
            (walk, (
                counter, items, q_ptr, keys, values, do_ptr, norm_ptr, delta_ptr, order, full, partial, of_turns, turn_bars[0],
                q_side, kv_side, rows, tiles, heads, kv_heads, shared, parts, group, q_len, kv_len, k_s, v_s, stores, item_s, kv_bars,
                bars,
                PER_BATCH, PER_HEAD, ALIGNED, BM, STAGES,
            )),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
