"""Attention over single chosen keys for Hopper: the query heads of one query and KV head are the rows of wgmma.

One work item is one query in ROWS heads of one KV head that share a choice. The load warp group gathers K and V rows by cp.async through
the list of the query's keys (`gpu.chosen_keys`), N keys at a time; each of GROUPS warp groups computes 64 heads. CTAs are persistent: the
ring of stages continues from one item to the next, so that gathers do not wait for epilogues. Time runs downwards; block b is N keys:

  load warp group          warp group of 64 rows
  ───────────────          ─────────────────────
  K 0 ────k_full────►      S₀ = Q K₀ᵀ                                 ──k_empty──►
  K 1 ────k_full────►      P₀ = exp2(S₀ − m), while S₁ = Q K₁ᵀ runs   ──k_empty──►
  V 0 ────v_full────►
  K 2 ────k_full────►      acc += P₀ V₀  started
                           P₁ = exp2(S₁ − m), while P₀ V₀ runs
                           S₂ = Q K₂ᵀ    started
                           wait for P₀ V₀, rescale acc                ──v_empty──►
                           wait for S₂                                ──k_empty──►
  V 1 ────v_full────►
  K 3 ────k_full────►      acc += P₁ V₁  started
                           …

The running max m follows the scores only if they grow by much (`hopper.running_max`): most blocks need no max and no rescaling of acc. Its
check ends a basic block of the assembler, which would wait for P V before the exponentials otherwise.

A thread's copies arrive at `full` on their own (128 arrivals). cp.async writes through the generic proxy and wgmma reads through the async
proxy: readers fence after `full`, once for V and the next K, since a fence waits for all memory accesses of its thread. Rows past the end
of a list are filled with zeros, and their scores are −inf.

Keys are read once per item: ROWS · 4 D FLOP for 4 D bytes. Where ROWS is 64, the bandwidth of L2 bounds the speed.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.tile_access import wide, wide_unsigned
from longspan._kernels.hopper.epilogue import ForwardTensors, by_row, merge, store_final_lse
from longspan._kernels.hopper.gluon_names import copy_async
from longspan._kernels.hopper.none_arg import optional
from longspan._kernels.hopper.online_softmax import end_rows, softmax_block, start_rows
from longspan._kernels.hopper.pipeline import Captured, KvBarriers, mbarriers, next_use
from longspan._kernels.hopper.running_max import rescaled

HEADS = gl.constexpr(64)  # rows of a warp group
LOAD_WARPS = gl.constexpr(4)

DYNAMIC = ["heads", "shared", "q_len", "entries", "items", "first_b", "first_h"]


class Items(NamedTuple):
    """Work items: their number, query heads, query heads per KV head, queries, entries of a list; batch rows, choices, rows, queries per
    row and heads per choice of the lists.
    """

    items: Any
    heads: Any
    shared: Any
    q_len: Any
    entries: Any
    batch_rows: Any
    choices: Any
    list_rows: Any
    per_row: Any
    per_choice: Any


class Lists(NamedTuple):
    """Pointers to the lists of keys and their lengths."""

    keys: Any
    counts: Any


@gluon.jit
def place_item(item, items, H: gl.constexpr, QUERIES: gl.constexpr):
    """(batch row, KV head, first head, first query, row of the lists) of an item."""
    blocks, units = (items.q_len + QUERIES - 1) // QUERIES, items.heads // H
    q = item % blocks * QUERIES
    first_head = (item // blocks) % units * H
    b = item // (blocks * units)
    choice = (first_head // items.per_choice) % items.choices
    row = ((b % items.batch_rows) * items.choices + choice) * items.list_rows + q // items.per_row
    return b, first_head // items.shared, first_head, q, row


@gluon.jit
def place_rows(first, first_head, first_q, items, H: gl.constexpr, QUERIES: gl.constexpr, layout: gl.constexpr):
    """(head, query, whether there is such a row) of rows first … first + 63 of an item, [64] in a slice of a layout."""
    i = first + gl.arange(0, HEADS, layout=layout)
    q = first_q + i // H
    return first_head + i % H, q, (i < H * QUERIES) & (q < items.q_len)


@gluon.jit
def copy_rows(head, stride, kv, to, DIM: gl.constexpr, BYTES: gl.constexpr, layout: gl.constexpr):
    """Start copies of the rows kv of a head to shared memory: zeros where kv is −1.

    BYTES: compute addresses in bytes, by two instructions each instead of four. Backward kernels would spill more registers.
    """
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    kv = gl.convert_layout(kv, gl.SliceLayout(1, layout))
    # Unsigned: one multiplication instead of three. Rows at −1 are not read.
    if BYTES:
        offsets = wide_unsigned(kv) * wide_unsigned(stride * (head.dtype.element_ty.primitive_bitwidth // 8))
        columns = (head + d).to(gl.pointer_type(gl.int8), bitcast=True)
        cells = (gl.expand_dims(columns, 0) + gl.expand_dims(offsets, 1)).to(head.dtype, bitcast=True)
        cells = gl.max_contiguous(gl.multiple_of(cells, [16, 16]), [1, 8])  # not known behind a bitcast, from Triton 3.9 on
    else:
        cells = gl.expand_dims(head + wide_unsigned(kv) * wide_unsigned(stride), 1) + gl.expand_dims(d, 0)
    copy_async(to, cells, mask=gl.expand_dims(kv >= 0, 1))


@gluon.jit
def gather(
    k_ptr, v_ptr, k_stride, v_stride, lists, items, k_s, v_s, bars,
    H: gl.constexpr, QUERIES: gl.constexpr, N: gl.constexpr, D: gl.constexpr, E: gl.constexpr, LAG: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """The load warp group. LAG: blocks of K that are loaded before V of the first block, 0 or 1. BYTES: as in `copy_rows`."""
    k_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [LOAD_WARPS, 1], [1, 0])
    v_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [LOAD_WARPS, 1], [1, 0])
    j = gl.arange(0, N, layout=gl.SliceLayout(1, k_layout))
    k_slot, k_phase, v_slot, v_phase = 0, 0, 0, 0
    for item in range(gl.program_id(0), items.items, gl.num_programs(0)):
        b, g, _, _, row = place_item(item, items, H, QUERIES)
        count = gl.load(lists.counts + row)
        keys = lists.keys + wide(row) * items.entries
        k_head = k_ptr + wide(b) * k_stride[0] + wide(g) * k_stride[1]
        v_head = v_ptr + wide(b) * v_stride[0] + wide(g) * v_stride[1]
        kv = gl.load(keys + j, mask=j < count, other=-1)
        last = gl.full_like(kv, -1)  # not kv: the compiler would take the loop's first assignment of kv for no change
        for n in range(0, count + LAG * N, N):
            later = gl.load(keys + n + N + j, mask=n + N + j < count, other=-1)
            if n < count:
                mbarrier.wait(bars.k_empty.index(k_slot), k_phase ^ 1)
                copy_rows(k_head, k_stride[2], kv, k_s.index(k_slot), D, BYTES, k_layout)
                async_copy.mbarrier_arrive(bars.k_full.index(k_slot), increment_count=False)
                k_slot, k_phase = next_use(k_slot, k_phase, k_s.shape[0])
            if n >= LAG * N:
                mbarrier.wait(bars.v_empty.index(v_slot), v_phase ^ 1)
                copy_rows(v_head, v_stride[2], last if LAG else kv, v_s.index(v_slot), E, BYTES, v_layout)
                async_copy.mbarrier_arrive(bars.v_full.index(v_slot), increment_count=False)
                v_slot, v_phase = next_use(v_slot, v_phase, v_s.shape[0])
            last = kv
            kv = later
    async_copy.wait_group(0)


@gluon.jit
def load_query(ptr, stride, b, q, head, is_row, DIM: gl.constexpr, layout: gl.constexpr):
    """[HEADS, DIM] rows of queries and heads [HEADS] in the slice of the layout."""
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    rows = ptr + wide(b) * stride[0] + wide(q) * stride[2] + wide(head) * stride[1]
    return gl.load(gl.expand_dims(rows, 1) + gl.expand_dims(d, 0), mask=gl.expand_dims(is_row, 1), other=0.0)


@gluon.jit
def _softmax(
    s, m, total, visible, left, scale, FIRST: gl.constexpr, MASKED: gl.constexpr, PARTIAL: gl.constexpr, SCALE_IN_EXP: gl.constexpr,
    N: gl.constexpr, DTYPE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Online softmax of a block of scores: (p in DTYPE, m, total, factor that rescales earlier sums), as of `softmax_block`.

    PARTIAL: only the first `left` keys exist. MASKED: rows see the pairs of `visible` only.
    """
    if not SCALE_IN_EXP:  # before −inf, whose product with a negative scale is inf
        s = s * scale
        scale = 1.0
    if MASKED:
        s = gl.where(visible, s, -float("inf"))
    p, m, total, _, rescale = softmax_block(
        s, m, total, total, 0, 0, left, True, 0, 0, scale, None,
        None, None, None, None, None, PARTIAL, True, False, FIRST, True, N, DTYPE, layout,
    )  # fmt: skip
    return p, m, total, rescale


@gluon.jit
def _scores(q, k_s, bars, slot, phase, zero):
    """Start the scores of the next block of keys."""
    mbarrier.wait(bars.k_full.index(slot), phase)
    fence_async_shared()
    return warpgroup_mma(q, k_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _values(weights, v_s, bars, slot, phase, acc):
    """Start acc += weights V of the next block of values."""
    mbarrier.wait(bars.v_full.index(slot), phase)
    fence_async_shared()
    return warpgroup_mma(weights, v_s.index(slot), acc, is_async=True)


@gluon.jit
def _visible(keys, n, count, b, head, q, first_b, first_h, captured, MASK: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """Whether rows see keys n … n + N − 1 of a list, [HEADS, N]; True without a mask."""
    if MASK is None:
        return True
    else:  # noqa: RET505 (Triton compiles what follows a branch that returned)
        j = n + gl.arange(0, N, layout=gl.SliceLayout(0, layout))
        kv = gl.load(keys + j, mask=j < count, other=0)
        rows = gl.expand_dims(head + first_h, 1), gl.expand_dims(q, 1)
        return MASK(b + first_b, rows[0], rows[1], gl.expand_dims(kv, 0), captured.mask, captured.mask_sizes)


@gluon.jit
def _load_item(
    item, tensors, lists, items, FIRST: gl.constexpr, H: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """(number of keys, queries of a warp group) of an item, or of the last one if there is no such item."""
    b, _, first_head, first_q, row = place_item(gl.minimum(item, items.items - 1), items, H, QUERIES)
    head, q_idx, is_row = place_rows(FIRST, first_head, first_q, items, H, QUERIES, gl.SliceLayout(1, layout))
    return gl.load(lists.counts + row), load_query(tensors.q, tensors.q_stride, b, q_idx, head, is_row, D, layout)


@gluon.jit
def attend(
    tensors, lists, items, scale, first_b, first_h, captured, k_s, v_s, bars, GROUP: gl.constexpr, MASK: gl.constexpr,
    SCALE_IN_EXP: gl.constexpr, H: gl.constexpr, QUERIES: gl.constexpr, N: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
):  # fmt: skip
    """A warp group that computes rows 64 GROUP … of each item."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, E, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    MASKED: gl.constexpr = MASK is not None
    FIRST: gl.constexpr = GROUP * HEADS
    dtype: gl.constexpr = k_s.dtype
    zero = gl.full([HEADS, N], 0.0, gl.float32, layout=layout)
    k_slot, k_phase, v_slot, v_phase = 0, 0, 0, 0
    count_next, q_next = _load_item(gl.program_id(0), tensors, lists, items, FIRST, H, QUERIES, D, q_layout)
    for item in range(gl.program_id(0), items.items, gl.num_programs(0)):
        b, _, first_head, first_q, row = place_item(item, items, H, QUERIES)
        keys = lists.keys + wide(row) * items.entries
        count, q = count_next, q_next
        head, q_idx, is_row = place_rows(FIRST, first_head, first_q, items, H, QUERIES, gl.SliceLayout(1, layout))
        m, total, max_scores = start_rows(True, N, layout)
        acc = gl.full([HEADS, E], 0.0, gl.float32, layout=out_layout)
        if count > 0:
            s_next = _scores(q, k_s, bars, k_slot, k_phase, zero)
            s = warpgroup_mma_wait(0, deps=[s_next])
            mbarrier.arrive(bars.k_empty.index(k_slot), count=1)
            k_slot, k_phase = next_use(k_slot, k_phase, k_s.shape[0])
            left = count - (count - 1) // N * N  # keys of the last block
            visible = _visible(keys, 0, count, b, head, q_idx, first_b, first_h, captured, MASK, N, layout)
            if count > N:
                s_next = _scores(q, k_s, bars, k_slot, k_phase, zero)
                p, m, total, rescale = _softmax(s, m, total, visible, N, scale, True, MASKED, False, SCALE_IN_EXP, N, dtype, layout)
                weights = gl.convert_layout(p, p_layout)
                s, weights = warpgroup_mma_wait(0, deps=[s_next, weights])
                mbarrier.arrive(bars.k_empty.index(k_slot), count=1)
                k_slot, k_phase = next_use(k_slot, k_phase, k_s.shape[0])
                for n in range(2 * N, count, N):  # P of the block at n − 2 N and the scores of the block at n − N are known
                    mbarrier.wait(bars.k_full.index(k_slot), k_phase)
                    acc_next = _values(weights, v_s, bars, v_slot, v_phase, acc)
                    visible = _visible(keys, n - N, count, b, head, q_idx, first_b, first_h, captured, MASK, N, layout)
                    p, m, total, rescale = _softmax(s, m, total, visible, N, scale, False, MASKED, False, SCALE_IN_EXP, N, dtype, layout)
                    weights = gl.convert_layout(p, p_layout)
                    s_next = warpgroup_mma(q, k_s.index(k_slot).permute((1, 0)), zero, use_acc=False, is_async=True)
                    acc, weights = warpgroup_mma_wait(1, deps=[acc_next, weights])
                    mbarrier.arrive(bars.v_empty.index(v_slot), count=1)
                    v_slot, v_phase = next_use(v_slot, v_phase, v_s.shape[0])
                    acc = rescaled(acc, rescale, out_layout)
                    s = warpgroup_mma_wait(0, deps=[s_next])
                    mbarrier.arrive(bars.k_empty.index(k_slot), count=1)
                    k_slot, k_phase = next_use(k_slot, k_phase, k_s.shape[0])
                acc_next = _values(weights, v_s, bars, v_slot, v_phase, acc)
                visible = _visible(keys, count - left, count, b, head, q_idx, first_b, first_h, captured, MASK, N, layout)
                p, m, total, rescale = _softmax(s, m, total, visible, left, scale, False, MASKED, True, SCALE_IN_EXP, N, dtype, layout)
                acc, p = warpgroup_mma_wait(0, deps=[acc_next, p])
                mbarrier.arrive(bars.v_empty.index(v_slot), count=1)
                v_slot, v_phase = next_use(v_slot, v_phase, v_s.shape[0])
                acc = rescaled(acc, rescale, out_layout)
            else:
                p, m, total, rescale = _softmax(s, m, total, visible, left, scale, True, MASKED, True, SCALE_IN_EXP, N, dtype, layout)
            acc_next = _values(gl.convert_layout(p, p_layout), v_s, bars, v_slot, v_phase, acc)
            count_next, q_next = _load_item(item + gl.num_programs(0), tensors, lists, items, FIRST, H, QUERIES, D, q_layout)
            acc = warpgroup_mma_wait(0, deps=[acc_next])
            mbarrier.arrive(bars.v_empty.index(v_slot), count=1)
            v_slot, v_phase = next_use(v_slot, v_phase, v_s.shape[0])
        else:
            count_next, q_next = _load_item(item + gl.num_programs(0), tensors, lists, items, FIRST, H, QUERIES, D, q_layout)
        m, total, max_scores = end_rows(m, total, max_scores, layout)
        state_row = (wide(b) * items.heads + head) * items.q_len + q_idx
        out_head, out_q, is_out = place_rows(FIRST, first_head, first_q, items, H, QUERIES, gl.SliceLayout(1, out_layout))
        if tensors.old_lse is not None:
            old_m = gl.load(tensors.old_lse + state_row, mask=is_row, other=-float("inf")) * LOG2_E
            old = load_query(tensors.old_out, tensors.old_out_stride, b, out_q, out_head, is_out, E, out_layout).to(gl.float32)
            m, total, new, factor = merge(m, total, old_m)
            acc = acc * by_row(new, out_layout) + old * by_row(factor, out_layout)
        divisor = store_final_lse(tensors.lse + state_row, m, total, is_row)
        acc = acc * by_row(1.0 / divisor, out_layout)
        stride = tensors.out_stride
        e = gl.arange(0, E, layout=gl.SliceLayout(0, out_layout))
        rows = tensors.out + wide(b) * stride[0] + wide(out_q) * stride[2] + wide(out_head) * stride[1]
        gl.store(gl.expand_dims(rows, 1) + gl.expand_dims(e, 0), acc.to(dtype), mask=gl.expand_dims(is_out, 1))


@gluon.jit(do_not_specialize=DYNAMIC)
def gathered_forward_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, counts_ptr, out_ptr, lse_ptr, old_out_ptr, old_lse_ptr,
    q_stride, k_stride, v_stride, out_stride, old_out_stride, mask_captured, mask_sizes, list_sizes,
    heads, shared, q_len, entries, items, scale, first_b, first_h,
    MASK: gl.constexpr, SCALE_IN_EXP: gl.constexpr, H: gl.constexpr, QUERIES: gl.constexpr, GROUPS: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, V_STAGES: gl.constexpr, D: gl.constexpr, E: gl.constexpr, REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse of all items, merged into an old state where there is one.

    list_sizes: (batch rows, choices, rows, queries per row, heads per choice) of the lists.
    """
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    k_s = gl.allocate_shared_memory(dtype, [STAGES, N, D], gl.NVMMASharedLayout.get_default_for([N, D], dtype))
    v_s = gl.allocate_shared_memory(dtype, [V_STAGES, N, E], gl.NVMMASharedLayout.get_default_for([N, E], dtype))
    bars = KvBarriers(
        mbarriers(STAGES, 32 * LOAD_WARPS), mbarriers(STAGES, GROUPS), mbarriers(V_STAGES, 32 * LOAD_WARPS), mbarriers(V_STAGES, GROUPS)
    )  # fmt: skip
    batch_rows, choices, list_rows, per_row, per_choice = list_sizes
    everything = Items(items, heads, shared, q_len, entries, batch_rows, choices, list_rows, per_row, per_choice)
    lists = Lists(keys_ptr, counts_ptr)
    tensors = ForwardTensors(
        q_ptr, out_ptr, lse_ptr, optional(old_out_ptr), optional(old_lse_ptr), q_stride, out_stride, old_out_stride
    )  # fmt: skip
    captured = Captured(mask_captured, mask_sizes, (), ())
    fence_async_shared()
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (attend, (
                    tensors, lists, everything, scale, first_b, first_h, captured, k_s, v_s, bars, 0, MASK, SCALE_IN_EXP, H, QUERIES, N,
                    D, E,
                )),
                (gather, (k_ptr, v_ptr, k_stride, v_stride, lists, everything, k_s, v_s, bars, H, QUERIES, N, D, E, 1, True)),
            ],
            [LOAD_WARPS],
            [LOAD_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (
                    tensors, lists, everything, scale, first_b, first_h, captured, k_s, v_s, bars, 0, MASK, SCALE_IN_EXP, H, QUERIES, N,
                    D, E,
                )),
                (attend, (
                    tensors, lists, everything, scale, first_b, first_h, captured, k_s, v_s, bars, 1, MASK, SCALE_IN_EXP, H, QUERIES, N,
                    D, E,
                )),
                (gather, (k_ptr, v_ptr, k_stride, v_stride, lists, everything, k_s, v_s, bars, H, QUERIES, N, D, E, 1, True)),
            ],
            [4, LOAD_WARPS],
            [REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
