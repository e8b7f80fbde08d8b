"""The backward pass by query tiles on Hopper: dQ of 128 queries, each written by one program that adds in a fixed order, and the gradients
of captured tensors. Used where results must be the same in every run, and where captured tensors need gradients.

One warp walks the block table and has the copy engine bring tiles; two groups of four warps compute 64 queries each. While a group weighs
the scores of a block of keys, the tensor cores compute dO Vᵀ of that block; dQ of the block and the scores of the next one follow.

Of blocks of 64 keys, the tensor cores would read as many bytes of queries as of keys for every product, all that shared memory gives: the
queries are read into registers once for all blocks of an item instead. At head dims up to 64 there are registers for dO too, whatever the
block.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs
# ruff: noqa: RET505 (what follows a branch that returned is compiled too)

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.row_terms import base_two
from longspan._kernels.gpu.tile_access import load_rows, place, run_place, span, table_row, wide
from longspan._kernels.hopper.barriers import barriers, bring, numbers, place_of, read_number, round_of, rows_of, write_number
from longspan._kernels.hopper.none_arg import given
from longspan._kernels.hopper.tile_io import load_tile, store_tile

_DYNAMIC = ["items", "rows", "tiles", "heads", "shared", "group", "q_len", "kv_len", "own_rows", "first_b", "first_h"]

QUERIES = gl.constexpr(128)  # queries of an item
HALF = gl.constexpr(64)  # queries of a group of warps
_STEP = gl.constexpr(3)  # numbers that say what a block is: kind, position, rows left
_ITEM = gl.constexpr(5)  # numbers that say what an item is: batch, head, row, position, rows left
SLOTS = gl.constexpr(4)

# Kinds of blocks.
END = gl.constexpr(0)
WHOLE = gl.constexpr(1)
PARTIAL = gl.constexpr(2)


@triton.jit(do_not_specialize=["heads", "q_len"])
def rows_kernel(
    out_ptr, do_ptr, lse_ptr, grad_lse_ptr, norm_ptr, delta_ptr, out_stride, do_stride, heads, q_len,
    M: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """What both passes ask of each row: norm, lse in base 2 (`base_two`), and delta = Σ out · grad_out − grad_lse. No out: norm alone."""
    blocks = tl.cdiv(q_len, M)
    pid = tl.program_id(0)
    row, head = (pid % blocks) * M, pid // blocks
    left = q_len - row
    i = tl.arange(0, M)
    at = wide(head) * q_len + row + i
    tl.store(norm_ptr + at, base_two(tl.load(lse_ptr + at, mask=i < left, other=0.0)), mask=i < left)
    if out_ptr is not None:
        b64, h64 = wide(head // heads), wide(head % heads)
        out = load_rows(out_ptr + b64 * out_stride[0] + h64 * out_stride[1], row, left, out_stride[2], out_stride[3], M, E, EP, True)
        do = load_rows(do_ptr + b64 * do_stride[0] + h64 * do_stride[1], row, left, do_stride[2], do_stride[3], M, E, EP, True)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
        if grad_lse_ptr is not None:
            delta -= tl.load(grad_lse_ptr + at, mask=i < left, other=0.0)
        tl.store(delta_ptr + at, delta, mask=i < left)


@gluon.jit
def _send(it, keys, values, b, g, row, pos, left, kind, k_s, v_s, steps, bars, STAGES: gl.constexpr):
    """One block on its way, as soon as there is room."""
    k_full, k_empty, v_full, v_empty = bars
    s = place_of(it, STAGES)
    free = round_of(it, STAGES) ^ 1
    mbarrier.wait(k_empty.index(s), free)
    at = place_of(it, SLOTS) * _STEP
    write_number(steps, at, kind)
    write_number(steps, at + 1, pos)
    write_number(steps, at + 2, left)
    bring(keys, b, g, row, k_full.index(s), k_s.index(s))
    mbarrier.wait(v_empty.index(s), free)
    bring(values, b, g, row, v_full.index(s), v_s.index(s))


@gluon.jit
def _queries(turn, q_ptr, do_ptr, b, h, row, pos, left, q_s, do_s, item_s, q_bars):
    """An item's queries on their way, as soon as the last item's are not needed any more."""
    q_full, q_empty = q_bars
    mbarrier.wait(q_empty, (turn & 1) ^ 1)
    write_number(item_s, 0, b)
    write_number(item_s, 1, h)
    write_number(item_s, 2, row)
    write_number(item_s, 3, pos)
    write_number(item_s, 4, left)
    mbarrier.expect(q_full, 2 * q_ptr.block_type.nbytes + 2 * do_ptr.block_type.nbytes)
    for c in gl.static_range(2):
        tma.async_copy_global_to_shared(q_ptr, [b, h, row + c * HALF, 0], q_full, q_s.index(c))
        tma.async_copy_global_to_shared(do_ptr, [b, h, row + c * HALF, 0], q_full, do_s.index(c))


@gluon.jit
def _walk(
    counter, items, q_ptr, keys, values, do_ptr, order, full, partial, q_side, kv_side,
    rows, tiles, heads, shared, group, q_len, kv_len, q_s, k_s, v_s, do_s, steps, item_s, q_bars, bars,
    PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The walker: items until none is left, and of each all blocks."""
    SUBS: gl.constexpr = QUERIES // N
    q_full, q_empty = q_bars
    k_full, k_empty, v_full, v_empty = bars
    it = 0
    turn = 0
    item = gl.atomic_add(counter, 1)
    while item < items:
        tile, _, b, h = place(item, order, rows, tiles, heads, group, 1, PER_BATCH, PER_HEAD)
        row, pos, left = span(tile, q_len, q_side, 1, QUERIES)
        table = table_row(tile, b, h, tiles, heads, PER_BATCH, PER_HEAD)
        whole, first_partial = gl.load(full[0] + table), gl.load(partial[0] + table)
        n_whole, n_partial = gl.load(full[0] + table + 1) - whole, gl.load(partial[0] + table + 1) - first_partial
        sent = 0
        for i in range(n_whole + n_partial):
            masked = i >= n_whole
            r = gl.where(masked, first_partial + i - n_whole, whole + i)
            first = gl.load(gl.where(masked, partial[1], full[1]) + r)
            last = gl.load(gl.where(masked, partial[2], full[2]) + r)
            row_from, pos_from, left_from = run_place(first, last, kv_len, kv_side, SUBS, N)
            # A block without a single key is left out.
            for n in range(first * SUBS, gl.minimum((last + 1) * SUBS, (left_from + (N - 1)) // N)):
                _send(
                    it, keys, values, b, h // shared, row_from + n * N, pos_from + n * N, left_from - n * N,
                    gl.where(masked, PARTIAL, WHOLE), k_s, v_s, steps, bars, STAGES,
                )  # fmt: skip
                it += 1
                # The first keys come before the queries: there is room for them earlier.
                if sent == 0:
                    _queries(turn, q_ptr, do_ptr, b, h, row, pos, left, q_s, do_s, item_s, q_bars)
                sent = 1
        if sent == 0:
            _queries(turn, q_ptr, do_ptr, b, h, row, pos, left, q_s, do_s, item_s, q_bars)
        s = place_of(it, STAGES)
        free = round_of(it, STAGES) ^ 1
        mbarrier.wait(k_empty.index(s), free)
        write_number(steps, place_of(it, SLOTS) * _STEP, END)
        mbarrier.arrive(k_full.index(s), count=1)
        mbarrier.wait(v_empty.index(s), free)
        mbarrier.arrive(v_full.index(s), count=1)
        it += 1
        turn += 1
        item = gl.atomic_add(counter, 1)
    mbarrier.wait(q_empty, (turn & 1) ^ 1)
    write_number(item_s, 0, -1)
    mbarrier.arrive(q_full, count=1)


@gluon.jit
def _weigh(
    s, norm, at_b, at_h, q_pos, q_left, kv, left, scale, mask_captured, mask_sizes, score_captured, score_sizes,
    MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, SCATTER: gl.constexpr, MASKED: gl.constexpr,
    N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(p · ∂t/∂s, p) of one block's scores. JOINT is linear in its gradient: given p, it gives the product. Where it also adds up the
    gradients of captured tensors it must wait for the true gradient: (the scores, p) instead.
    """
    cols = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, layout)), 0)
    if SCORE is None:
        p = gl.exp2(s * (scale * LOG2_E) - norm)
    else:
        s = s * scale
        p = gl.exp2(SCORE(s, at_b, at_h, q_pos, kv + cols, score_captured, score_sizes) * LOG2_E - norm)
    if MASKED:
        line = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(1, layout)), 1)
        valid = (cols < left) & (line < q_left)
        if MASK is not None:
            valid = valid & MASK(at_b, at_h, q_pos, kv + cols, mask_captured, mask_sizes)
        p = gl.where(valid, p, 0.0)
    if SCATTER:
        return s, p
    else:
        slope = p
        if SCORE is not None:
            slope = JOINT(p, s, at_b, at_h, q_pos, kv + cols, cols < N, score_captured, score_sizes, ())
            if MASKED:
                slope = gl.where(p == 0.0, 0.0, slope)
        return slope, p


@gluon.jit
def _begin(held, tiles, which, columns, none, HELD: gl.constexpr):
    """A product of rows with columns on its way. Its rows are what registers hold, or tile `which` of shared memory."""
    if HELD:
        return warpgroup_mma(held, columns.permute((1, 0)), none, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(rows_of(tiles, which), columns.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _compute(
    norm_ptr, delta_ptr, dq_ptr, dq_stride, mask_captured, mask_sizes, score_captured, score_sizes, grads,
    heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, do_s, steps, item_s, q_bars, bars,
    C: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, SCATTER: gl.constexpr,
    ADD: gl.constexpr, N: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group of four warps: 64 of the item's 128 queries."""
    q_full, q_empty = q_bars
    k_full, k_empty, v_full, v_empty = bars
    dtype: gl.constexpr = k_s.dtype
    s_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    dq_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DP, 16])
    ds_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq_l, k_width=2)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    HOLD_DO: gl.constexpr = DP <= 64
    HOLD_Q: gl.constexpr = HOLD_DO or N == 64
    line = gl.arange(0, HALF, layout=gl.SliceLayout(1, s_l))
    cols = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, s_l)), 0)
    none = gl.full([HALF, N], 0.0, gl.float32, layout=s_l)
    it = 0
    turn = 0
    mbarrier.wait(q_full, 0)
    b = read_number(item_s, 0)
    while b >= 0:
        h = read_number(item_s, 1)
        row, pos = read_number(item_s, 2) + C * HALF, read_number(item_s, 3) + C * HALF
        left = read_number(item_s, 4) - C * HALF
        state = (wide(b) * heads + h) * q_len + row + line
        norm = gl.expand_dims(gl.load(norm_ptr + state, mask=line < left, other=0.0), 1)
        delta = gl.expand_dims(gl.load(delta_ptr + state, mask=line < left, other=0.0), 1)
        q_pos = pos + gl.expand_dims(line, 1)
        dq = gl.full([HALF, DP], 0.0, gl.float32, layout=dq_l)
        q, do = none, none  # not read where they are not held
        if HOLD_Q:
            q = rows_of(q_s, C).load(operand)
        if HOLD_DO:
            do = rows_of(do_s, C).load(operand)
        mbarrier.wait(k_full.index(place_of(it, STAGES)), round_of(it, STAGES))
        kind = read_number(steps, place_of(it, SLOTS) * _STEP)
        s_next = _begin(q, q_s, C, rows_of(k_s, place_of(it, STAGES)), none, HOLD_Q)
        s = warpgroup_mma_wait(0, deps=[s_next])
        while kind != END:
            stage = place_of(it, STAGES)
            # C, which the compiler cannot know: it would compute the places of all operands once and for all, and spill them.
            which = (it >> 30) + C
            k = rows_of(k_s, stage)
            about = place_of(it, SLOTS) * _STEP
            mbarrier.wait(v_full.index(stage), round_of(it, STAGES))
            dp_next = _begin(do, do_s, which, rows_of(v_s, stage), none, HOLD_DO)
            if kind == WHOLE:
                slope, p = _weigh(
                    s, norm, b + first_b, h + first_h, q_pos, left, read_number(steps, about + 1), N, scale,
                    mask_captured, mask_sizes, score_captured, score_sizes, MASK, SCORE, JOINT, SCATTER, False, N, s_l,
                )  # fmt: skip
            else:
                slope, p = _weigh(
                    s, norm, b + first_b, h + first_h, q_pos, left, read_number(steps, about + 1), read_number(steps, about + 2), scale,
                    mask_captured, mask_sizes, score_captured, score_sizes, MASK, SCORE, JOINT, SCATTER, True, N, s_l,
                )  # fmt: skip
            dp = warpgroup_mma_wait(0, deps=[dp_next])
            mbarrier.arrive(v_empty.index(stage), count=1)
            ds = slope * (dp - delta)
            if SCATTER:
                valid = (p != 0.0) & (gl.expand_dims(line, 1) < left)
                kv_at = read_number(steps, about + 1) + cols
                ds = JOINT(p * (dp - delta), slope, b + first_b, h + first_h, q_pos, kv_at, valid, score_captured, score_sizes, grads)
                ds = gl.where(valid, ds, 0.0)
            dq_next = warpgroup_mma(gl.convert_layout(ds.to(dtype), ds_l), k, dq, is_async=True)
            after = it + 1
            mbarrier.wait(k_full.index(place_of(after, STAGES)), round_of(after, STAGES))
            kind = read_number(steps, place_of(after, SLOTS) * _STEP)
            s_next = _begin(q, q_s, which, rows_of(k_s, place_of(after, STAGES)), none, HOLD_Q)
            dq = warpgroup_mma_wait(1, deps=[dq_next])
            mbarrier.arrive(k_empty.index(stage), count=1)
            s = warpgroup_mma_wait(0, deps=[s_next])
            it = after
        # The entry that ends an item passes through all barriers as a block does.
        mbarrier.arrive(q_empty, count=1)
        mbarrier.wait(v_full.index(place_of(it, STAGES)), round_of(it, STAGES))
        mbarrier.arrive(k_empty.index(place_of(it, STAGES)), count=1)
        mbarrier.arrive(v_empty.index(place_of(it, STAGES)), count=1)
        it += 1
        turn += 1
        head = dq_ptr + wide(b) * dq_stride[0] + wide(h) * dq_stride[1]
        step = dq_stride[2] + (it >> 30) * 16  # as above: 0 is added; a multiple of 16, so that the compiler still knows where rows begin
        dq = dq * scale
        if ADD:
            dq += load_tile(head, row, left, step, D, DP, dq_l)
        store_tile(head, dq, row, left, step, D, DP)
        mbarrier.wait(q_full, turn & 1)
        b = read_number(item_s, 0)


@gluon.jit(do_not_specialize=_DYNAMIC)
def queries_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, norm_ptr, delta_ptr, dq_ptr, own_k_ptr, own_v_ptr, counter, dq_stride,
    order, full, partial, q_side, kv_side, mask_captured, mask_sizes, score_captured, score_sizes, grads,
    items, rows, tiles, heads, shared, group, q_len, kv_len, own_rows, scale, first_b, first_h,
    MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, SCATTER: gl.constexpr, ADD: gl.constexpr,
    PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, E: gl.constexpr, EP: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ of tiles of queries, stored or, with ADD, added to what is there; the gradients of captured tensors are added up here too.

    `counter`: one int32, 0. SCATTER: JOINT adds to `grads`. Given own_k_ptr and own_v_ptr, those describe the first `own_rows` keys and
    values, k_ptr and v_ptr the others.
    """
    gl.static_assert(STAGES <= SLOTS, "what a step is must be known until it is computed")
    dtype: gl.constexpr = k_ptr.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, 1, HALF, DP], q_ptr.layout)
    do_s = gl.allocate_shared_memory(dtype, [2, 1, 1, HALF, EP], do_ptr.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, DP], k_ptr.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, EP], v_ptr.layout)
    steps, item_s = numbers(SLOTS * _STEP), numbers(_ITEM)
    q_bars = (barriers(1, 1).index(0), barriers(1, 2).index(0))
    bars = (barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2))
    fence_async_shared()
    q_side = (given(q_side[0]), given(q_side[1]), given(q_side[2]))
    kv_side = (given(kv_side[0]), given(kv_side[1]), given(kv_side[2]))
    keys, values = (k_ptr, given(own_k_ptr), own_rows), (v_ptr, given(own_v_ptr), own_rows)
    gl.warp_specialize([
        (_compute, (
            norm_ptr, delta_ptr, dq_ptr, dq_stride, mask_captured, mask_sizes, score_captured, score_sizes, grads,
            heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, do_s, steps, item_s, q_bars, bars,
            0, MASK, SCORE, JOINT, SCATTER, ADD, N, D, DP, STAGES,
        )),
        (_compute, (
            norm_ptr, delta_ptr, dq_ptr, dq_stride, mask_captured, mask_sizes, score_captured, score_sizes, grads,
            heads, q_len, scale, first_b, first_h, q_s, k_s, v_s, do_s, steps, item_s, q_bars, bars,
            1, MASK, SCORE, JOINT, SCATTER, ADD, N, D, DP, STAGES,
        )),
        (_walk, (
            counter, items, q_ptr, keys, values, do_ptr, order, full, partial, q_side, kv_side,
            rows, tiles, heads, shared, group, q_len, kv_len, q_s, k_s, v_s, do_s, steps, item_s, q_bars, bars,
            PER_BATCH, PER_HEAD, N, STAGES,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
