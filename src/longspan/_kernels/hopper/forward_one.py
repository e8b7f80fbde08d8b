"""The forward kernel with one consumer warp group: items of 64 queries of one head over tiles that were chosen on the device.

Two CTAs share an SM: one computes exponentials while the other one runs wgmma. `hopper.forward` gives an item of 64 queries to two warp
groups, which compute two heads; this kernel computes heads that cannot be paired with one of the same choice and KV head. Queries and
probabilities are in registers. CTAs are persistent: the rings of stages continue from one item to the next. They take items from a global
counter, so that all of them work on the same few heads, whose KV stays in L2. Time runs downwards:

  load warp                 warp group
  ─────────                 ──────────
  item ──item_full──►
  K 0 ────k_full────►       S₀ = Q K₀ᵀ                                 ──k_empty──►
  K 1 ────k_full────►       P₀ = exp2(S₀ − m), while S₁ = Q K₁ᵀ runs   ──k_empty──►
  V 0 ────v_full────►
  K 2 ────k_full────►       acc += P₀ V₀  started
                            P₁ = exp2(S₁ − m), while P₀ V₀ runs
                            S₂ = Q K₂ᵀ    started
                            wait for P₀ V₀, rescale acc                ──v_empty──►
                            wait for S₂                                ──k_empty──►
  V 1 …                     …                                          last block: queries of the next item are loaded

A list of KV tiles begins with its partial tiles (`gpu.selected_tables`). Each block of 64 keys is read for 64 queries: 4 D bytes per key
for 256 D FLOP. The bandwidth of L2 bounds the speed, at about 600 TFLOP/s (`docs/deep-dives/hopper.md`).
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.tile_access import place, table_row, wide
from longspan._kernels.hopper.epilogue import ForwardTensors, by_row, merge, store_final_lse
from longspan._kernels.hopper.forward_producer import GROUP_ROWS
from longspan._kernels.hopper.gluon_names import tma_load
from longspan._kernels.hopper.none_arg import optional
from longspan._kernels.hopper.online_softmax import end_rows, softmax_block, start_rows
from longspan._kernels.hopper.pipeline import (
    Captured,
    KvBarriers,
    load_int,
    mbarriers,
    next_use,
    ring_phase,
    ring_slot,
    shared_ints,
    store_int,
    take_item,
    tile_2d,
)
from longspan._kernels.hopper.running_max import rescaled
from longspan._kernels.hopper.tile_io import load_tile, store_tile

DYNAMIC = ["items", "rows", "tiles", "heads", "shared", "group", "q_len", "kv_len", "first_b", "first_h"]


class Items(NamedTuple):
    """Work items: their number, the order of table rows and its length, query tiles, heads, heads of a group (`place`). Pairs by table row:
    counts, its numbers of partial and of full tiles; begins, where its list begins and where its partial tiles end.
    """

    number: Any
    order: Any
    rows: Any
    tiles: Any
    heads: Any
    group: Any
    counts: Any
    begins: Any


ITEM_SLOTS = gl.constexpr(2)  # item numbers in flight


class ItemSlots(NamedTuple):
    """A ring of item numbers in shared memory and its mbarriers."""

    numbers: Any
    full: Any
    empty: Any


@gluon.jit
def place_item(item, items, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr):
    """(batch row, head, query tile, first entry of its list, its partial tiles, all its tiles) of an item."""
    tile, _, b, h = place(item, items.order, items.rows, items.tiles, items.heads, items.group, 1, PER_BATCH, PER_HEAD)
    row = 2 * table_row(tile, b, h, items.tiles, items.heads, PER_BATCH, PER_HEAD)
    partials = gl.load(items.counts + row)
    return b, h, tile, gl.load(items.begins + row), partials, partials + gl.load(items.counts + row + 1)


@gluon.jit
def load_operand(ptr, stride, b, h, row, q_len, D: gl.constexpr, DP: gl.constexpr, layout: gl.constexpr):
    """[GROUP_ROWS, DP] rows of a head from `row` on, in their dtype; zeros past its end and past column D."""
    i = gl.expand_dims(gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout)), 1)
    d = gl.expand_dims(gl.arange(0, DP, layout=gl.SliceLayout(0, layout)), 0)
    first = ptr + wide(b) * stride[0] + wide(h) * stride[1] + wide(row) * stride[2]
    return gl.load((first + i * stride[2]) + d, mask=(i < q_len - row) & (d < D), other=0.0)


@gluon.jit
def item_slots():
    """An empty ring of item numbers."""
    return ItemSlots(shared_ints(ITEM_SLOTS), mbarriers(ITEM_SLOTS, 1), mbarriers(ITEM_SLOTS, 1))


@gluon.jit
def _publish(item, t, slots):
    """Hand over the number of this CTA's item t, as soon as there is room."""
    slot = ring_slot(t, ITEM_SLOTS)
    mbarrier.wait(slots.empty.index(slot), ring_phase(t, ITEM_SLOTS) ^ 1)
    store_int(slots.numbers, slot, item)
    mbarrier.arrive(slots.full.index(slot), count=1)


@gluon.jit
def receive_item(t, slots):
    """The number of this CTA's item t; not below the number of items if there is none."""
    slot = ring_slot(t, ITEM_SLOTS)
    mbarrier.wait(slots.full.index(slot), ring_phase(t, ITEM_SLOTS))
    item = load_int(slots.numbers, slot)
    mbarrier.arrive(slots.empty.index(slot), count=1)
    return item


@gluon.jit
def load(
    counter, k_desc, v_desc, listed, items, shared, slots, k_s, v_s, places_s, bars,
    LAG: gl.constexpr, N: gl.constexpr, N_SUBS: gl.constexpr, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """The load warp, which also takes items from the counter.

    LAG: blocks of K that are loaded before V of the first block. places_s: first key of each block of K.
    """
    k_slot, k_phase, v_slot, v_phase = 0, 0, 0, 0
    t = 0  # items so far
    item = gl.program_id(0)
    while item < items.number:
        _publish(item, t, slots)
        following = take_item(counter)
        b, h, _, begin, _, tiles = place_item(item, items, PER_BATCH, PER_HEAD)
        kv_head, blocks = h // shared, tiles * N_SUBS
        tile = gl.load(listed + begin, mask=tiles > 0, other=0)
        before = tile * 0
        for n in range(blocks + LAG):
            later = gl.load(listed + begin + (n + 1) // N_SUBS, mask=n + 1 < blocks, other=0)
            first = (tile * N_SUBS + n % N_SUBS) * N
            if n < blocks:
                mbarrier.wait(bars.k_empty.index(k_slot), k_phase ^ 1)
                store_int(places_s, k_slot, first)
                mbarrier.expect(bars.k_full.index(k_slot), k_desc.block_type.nbytes)
                tma_load(k_desc, [b, kv_head, first, 0], bars.k_full.index(k_slot), k_s.index(k_slot))
                k_slot, k_phase = next_use(k_slot, k_phase, k_s.shape[0])
            if n >= LAG:
                mbarrier.wait(bars.v_empty.index(v_slot), v_phase ^ 1)
                mbarrier.expect(bars.v_full.index(v_slot), v_desc.block_type.nbytes)
                tma_load(v_desc, [b, kv_head, before if LAG else first, 0], bars.v_full.index(v_slot), v_s.index(v_slot))
                v_slot, v_phase = next_use(v_slot, v_phase, v_s.shape[0])
            before = first
            tile = later
        item = gl.num_programs(0) + following
        t += 1
    _publish(item, t, slots)


@gluon.jit
def _next_item(
    item, tensors, items, q_len, D: gl.constexpr, DP: gl.constexpr, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """(batch row, head, query tile, partial tiles, tiles, queries) of an item; of the last one if there is no such item."""
    b, h, tile, _, partials, tiles = place_item(gl.minimum(item, items.number - 1), items, PER_BATCH, PER_HEAD)
    return b, h, tile, partials, tiles, load_operand(tensors.q, tensors.q_stride, b, h, tile * GROUP_ROWS, q_len, D, DP, layout)


@gluon.jit
def start_product(q, k_s, slot, zero):
    """Start the product of rows with the rows of the block in a slot."""
    return warpgroup_mma(q, tile_2d(k_s, slot).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(
    s, m, total, q_first, kv_first, kv_len, masked, b, h, scale, captured,
    MASK: gl.constexpr, VISIBLE: gl.constexpr, FIRST: gl.constexpr, MASKED: gl.constexpr, SCALE_IN_EXP: gl.constexpr, N: gl.constexpr,
    DTYPE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Online softmax of a block of scores: (p in DTYPE, m, total, factor that rescales earlier sums), as of `softmax_block`."""
    p, m, total, _, rescale = softmax_block(
        s, m, total, total, q_first, kv_first, kv_len - kv_first, masked, b, h, scale, captured,
        MASK, VISIBLE, None, None, None, MASKED, SCALE_IN_EXP, False, FIRST, True, N, DTYPE, layout,
    )  # fmt: skip
    return p, m, total, rescale


@gluon.jit
def attend(
    tensors, items, q_len, kv_len, scale, first_b, first_h, captured, slots, k_s, v_s, places_s, bars,
    MASK: gl.constexpr, BOUNDS: gl.constexpr, VISIBLE: gl.constexpr, MASKED: gl.constexpr, SCALE_IN_EXP: gl.constexpr, N: gl.constexpr,
    N_SUBS: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, E: gl.constexpr, EP: gl.constexpr,
    PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """The warp group that computes."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EP, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    dtype: gl.constexpr = k_s.dtype
    rows = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
    zero = gl.full([GROUP_ROWS, N], 0.0, gl.float32, layout=layout)
    k_slot, k_phase, v_slot, v_phase = 0, 0, 0, 0
    t = 0  # items so far
    item = receive_item(t, slots)
    b_next, h_next, tile_next, partials_next, tiles_next, q_next = _next_item(
        item, tensors, items, q_len, D, DP, PER_BATCH, PER_HEAD, q_layout
    )
    while item < items.number:
        t += 1
        b, h, q, q_first = b_next, h_next, q_next, tile_next * GROUP_ROWS
        partials, blocks = partials_next * N_SUBS, tiles_next * N_SUBS
        global_b, global_h = b + first_b, h + first_h
        of_head = captured
        if BOUNDS is not None:
            bounds = BOUNDS(global_b, global_h, gl.expand_dims(q_first + rows, 1), captured.mask, captured.mask_sizes)
            of_head = Captured(bounds, captured.mask_sizes, captured.score, captured.score_sizes)
        m, total, max_scores = start_rows(True, N, layout)
        acc = gl.full([GROUP_ROWS, EP], 0.0, gl.float32, layout=out_layout)
        if blocks > 0:
            mbarrier.wait(bars.k_full.index(k_slot), k_phase)
            kv = load_int(places_s, k_slot)
            s = warpgroup_mma_wait(0, deps=[start_product(q, k_s, k_slot, zero)])
            mbarrier.arrive(bars.k_empty.index(k_slot), count=1)
            k_slot, k_phase = next_use(k_slot, k_phase, k_s.shape[0])
            if blocks > 1:
                mbarrier.wait(bars.k_full.index(k_slot), k_phase)
                kv_next = load_int(places_s, k_slot)
                s_next = start_product(q, k_s, k_slot, zero)
                p, m, total, rescale = _softmax(
                    s, m, total, q_first, kv, kv_len, partials > 0, global_b, global_h, scale, of_head, MASK, VISIBLE, True, MASKED,
                    SCALE_IN_EXP, N, dtype, layout,
                )  # fmt: skip
                weights = gl.convert_layout(p, p_layout)
                s, weights = warpgroup_mma_wait(0, deps=[s_next, weights])
                mbarrier.arrive(bars.k_empty.index(k_slot), count=1)
                k_slot, k_phase = next_use(k_slot, k_phase, k_s.shape[0])
                kv = kv_next
                for n in range(2, blocks):  # P of block n − 2 and the scores of block n − 1 are known
                    mbarrier.wait(bars.v_full.index(v_slot), v_phase)
                    acc_next = warpgroup_mma(weights, tile_2d(v_s, v_slot), acc, is_async=True)
                    p, m, total, rescale = _softmax(
                        s, m, total, q_first, kv, kv_len, n - 1 < partials, global_b, global_h, scale, of_head, MASK, VISIBLE, False,
                        MASKED, SCALE_IN_EXP, N, dtype, layout,
                    )  # fmt: skip
                    weights = gl.convert_layout(p, p_layout)
                    mbarrier.wait(bars.k_full.index(k_slot), k_phase)
                    kv = load_int(places_s, k_slot)
                    s_next = start_product(q, k_s, k_slot, zero)
                    acc, weights = warpgroup_mma_wait(1, deps=[acc_next, weights])
                    mbarrier.arrive(bars.v_empty.index(v_slot), count=1)
                    v_slot, v_phase = next_use(v_slot, v_phase, v_s.shape[0])
                    acc = rescaled(acc, rescale, out_layout)
                    s = warpgroup_mma_wait(0, deps=[s_next])
                    mbarrier.arrive(bars.k_empty.index(k_slot), count=1)
                    k_slot, k_phase = next_use(k_slot, k_phase, k_s.shape[0])
                mbarrier.wait(bars.v_full.index(v_slot), v_phase)
                acc_next = warpgroup_mma(weights, tile_2d(v_s, v_slot), acc, is_async=True)
                p, m, total, rescale = _softmax(
                    s, m, total, q_first, kv, kv_len, blocks - 1 < partials, global_b, global_h, scale, of_head, MASK, VISIBLE, False,
                    MASKED, SCALE_IN_EXP, N, dtype, layout,
                )  # fmt: skip
                acc, p = warpgroup_mma_wait(0, deps=[acc_next, p])
                mbarrier.arrive(bars.v_empty.index(v_slot), count=1)
                v_slot, v_phase = next_use(v_slot, v_phase, v_s.shape[0])
                acc = rescaled(acc, rescale, out_layout)
            else:
                p, m, total, rescale = _softmax(
                    s, m, total, q_first, kv, kv_len, partials > 0, global_b, global_h, scale, of_head, MASK, VISIBLE, True, MASKED,
                    SCALE_IN_EXP, N, dtype, layout,
                )  # fmt: skip
            weights = gl.convert_layout(p, p_layout)
            mbarrier.wait(bars.v_full.index(v_slot), v_phase)
            acc_next = warpgroup_mma(weights, tile_2d(v_s, v_slot), acc, is_async=True)
            item = receive_item(t, slots)
            b_next, h_next, tile_next, partials_next, tiles_next, q_next = _next_item(
                item, tensors, items, q_len, D, DP, PER_BATCH, PER_HEAD, q_layout
            )
            acc = warpgroup_mma_wait(0, deps=[acc_next])
            mbarrier.arrive(bars.v_empty.index(v_slot), count=1)
            v_slot, v_phase = next_use(v_slot, v_phase, v_s.shape[0])
        else:
            item = receive_item(t, slots)
            b_next, h_next, tile_next, partials_next, tiles_next, q_next = _next_item(
                item, tensors, items, q_len, D, DP, PER_BATCH, PER_HEAD, q_layout
            )
        m, total, max_scores = end_rows(m, total, max_scores, layout)
        rows_left = q_len - q_first
        lse_at = wide(b * items.heads + h) * q_len + q_first
        inside = rows < rows_left
        if tensors.old_lse is not None:
            stride = tensors.old_out_stride
            old_m = gl.load(tensors.old_lse + lse_at + rows, mask=inside, other=-float("inf")) * LOG2_E
            old_head = tensors.old_out + wide(b) * stride[0] + wide(h) * stride[1]
            old = load_tile(old_head, q_first, rows_left, stride[2], E, EP, out_layout)
            m, total, new, factor = merge(m, total, old_m)
            acc = acc * by_row(new, out_layout) + old * by_row(factor, out_layout)
        divisor = store_final_lse(tensors.lse + lse_at + rows, m, total, inside)
        acc = acc * by_row(1.0 / divisor, out_layout)
        stride = tensors.out_stride
        store_tile(tensors.out + wide(b) * stride[0] + wide(h) * stride[1], acc, q_first, rows_left, stride[2], E, EP, False)


@gluon.jit(do_not_specialize=DYNAMIC)
def forward_one_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, old_out_ptr, old_lse_ptr, counter, q_stride, out_stride, old_out_stride,
    order, partial, counts, mask_captured, mask_sizes, items, rows, tiles, heads, shared, group, q_len, kv_len, scale, first_b, first_h,
    MASK: gl.constexpr, BOUNDS: gl.constexpr, VISIBLE: gl.constexpr, MASKED: gl.constexpr, PER_BATCH: gl.constexpr,
    PER_HEAD: gl.constexpr, SCALE_IN_EXP: gl.constexpr, N: gl.constexpr, N_SUBS: gl.constexpr, D: gl.constexpr, DP: gl.constexpr,
    E: gl.constexpr, EP: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """out and lse of all query tiles, merged into an old state where there is one. counter: int32 zero.

    partial, counts: lists of KV tiles by query tile (`gpu.selected_tables`); full tiles of a list follow its partial ones.
    MASKED: whether a tile may be partial. BOUNDS, VISIBLE: of a mask of comparisons (`longspan._kernels.gpu.row_bounds`), or None.
    """
    dtype: gl.constexpr = k_desc.dtype
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, DP], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, N, EP], v_desc.layout)
    places_s, slots = shared_ints(STAGES), item_slots()
    bars = KvBarriers(mbarriers(STAGES, 1), mbarriers(STAGES, 1), mbarriers(V_STAGES, 1), mbarriers(V_STAGES, 1))
    numbered = Items(items, order, rows, tiles, heads, group, counts, partial[0])
    tensors = ForwardTensors(
        q_ptr, out_ptr, lse_ptr, optional(old_out_ptr), optional(old_lse_ptr), q_stride, out_stride, old_out_stride
    )  # fmt: skip
    captured = Captured(mask_captured, mask_sizes, (), ())
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (
                tensors, numbered, q_len, kv_len, scale, first_b, first_h, captured, slots, k_s, v_s, places_s, bars, MASK, BOUNDS,
                VISIBLE, MASKED, SCALE_IN_EXP, N, N_SUBS, D, DP, E, EP, PER_BATCH, PER_HEAD,
            )),
            (load, (
                counter, k_desc, v_desc, partial[1], numbered, shared, slots, k_s, v_s, places_s, bars, 1, N, N_SUBS, PER_BATCH, PER_HEAD,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
