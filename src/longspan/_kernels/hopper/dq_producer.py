"""The producer warp of the dQ kernel, and its records. `hopper.backward_dq` begins with a picture of the whole."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from longspan._kernels.gpu.row_terms import first_term
from longspan._kernels.gpu.tile_access import place, run_place, span, table_row
from longspan._kernels.hopper.half_blocks import HALF, group_place, load_halves, of_halves
from longspan._kernels.hopper.head_dim_parts import load_kv_parts, load_part_tile, part_bytes, part_slot
from longspan._kernels.hopper.isolation import bound_keys, zero_bad_rows
from longspan._kernels.hopper.pipeline import load_int, ring_phase, ring_slot, store_int, take_item

QUERIES = gl.constexpr(128)  # queries of an item
GROUP_ROWS = gl.constexpr(64)  # queries of a compute warp group
BLOCK_SLOTS = gl.constexpr(4)  # block records in flight

# A block's record: int32 fields.
KIND = gl.constexpr(0)
POSITION = gl.constexpr(1)  # global position of the block's first key
KEYS_LEFT = gl.constexpr(2)  # keys from there to the end of the run
SECOND_POSITION = gl.constexpr(3)  # of the second half of a block (`hopper.half_blocks`)
SECOND_KEYS_LEFT = gl.constexpr(4)
BLOCK_FIELDS = gl.constexpr(5)

# The item's record: int32 fields.
ITEM_BATCH = gl.constexpr(0)  # −1: no more items
ITEM_HEAD = gl.constexpr(1)
ITEM_ROW = gl.constexpr(2)  # first query row in the tensor
ITEM_POSITION = gl.constexpr(3)  # global position of that row
ITEM_ROWS_LEFT = gl.constexpr(4)  # queries of the tile
ITEM_FIELDS = gl.constexpr(5)

# Kinds of block records.
END = gl.constexpr(0)  # not a block: end of the item
FULL = gl.constexpr(1)  # every pair is visible
PARTIAL = gl.constexpr(2)  # the mask decides


@gluon.jit
def block_field(blocks_s, slot, FIELD: gl.constexpr):
    """A field of the block record in `slot`."""
    return load_int(blocks_s, slot * BLOCK_FIELDS + FIELD)


@gluon.jit
def key_positions(blocks_s, slot, cols, KV_PAIRS: gl.constexpr):
    """The position of a block's first key, to which its columns are added; with KV_PAIRS, of each column [1, N]."""
    if KV_PAIRS:
        return of_halves(cols, block_field(blocks_s, slot, POSITION), block_field(blocks_s, slot, SECOND_POSITION) - HALF, KV_PAIRS)
    else:  # noqa: RET505 (Triton compiles what follows a branch that returned)
        return block_field(blocks_s, slot, POSITION)


@gluon.jit
def keys_left(blocks_s, slot, cols, KV_PAIRS: gl.constexpr):
    """Columns below this number have a key; of each column with KV_PAIRS."""
    if KV_PAIRS:
        return of_halves(cols, block_field(blocks_s, slot, KEYS_LEFT), block_field(blocks_s, slot, SECOND_KEYS_LEFT) + HALF, KV_PAIRS)
    else:  # noqa: RET505 (as above)
        return block_field(blocks_s, slot, KEYS_LEFT)


@gluon.jit
def _load_block(
    i, keys, values, b, kv_head, row, pos, left, second, kind, k_s, v_s, blocks_s, bars, isolation, unbounded, isolated,
    STAGES: gl.constexpr, V_STAGES: gl.constexpr, KV_PAIRS: gl.constexpr,
):  # fmt: skip
    """Write the block's record and start the loads of its keys and values, as soon as their stages are empty.

    second: with KV_PAIRS, the first row of the second half. Rows are then positions, and `left` counts keys to the end of the sequence.
    isolation: `StepIsolation`, or None. unbounded: its flag. isolated: isolated blocks so far. Returns their number after this block.
    """
    stage, v_stage = ring_slot(i, STAGES), ring_slot(i, V_STAGES)
    mbarrier.wait(bars.k_empty.index(stage), ring_phase(i, STAGES) ^ 1)
    record = ring_slot(i, BLOCK_SLOTS) * BLOCK_FIELDS
    store_int(blocks_s, record + KIND, kind)
    store_int(blocks_s, record + POSITION, pos)
    store_int(blocks_s, record + KEYS_LEFT, left)
    if KV_PAIRS:
        store_int(blocks_s, record + SECOND_POSITION, second)
        store_int(blocks_s, record + SECOND_KEYS_LEFT, left + row - second)
    k_full, v_full = bars.k_full.index(stage), bars.v_full.index(v_stage)
    isolates = False
    if isolation is not None:
        isolates = (unbounded != 0) & (kind != FULL)
        if isolates:  # the consumers wait for the isolated tiles
            k_full, v_full = isolation.loaded.index(2), isolation.loaded.index(3)
    if KV_PAIRS:
        load_halves(keys.rest.main, b, kv_head, row, second, k_full, k_s.main, stage)
    else:
        load_kv_parts(keys, b, kv_head, row, k_full, part_slot(k_s, stage))
    mbarrier.wait(bars.v_empty.index(v_stage), ring_phase(i, V_STAGES) ^ 1)
    if KV_PAIRS:
        load_halves(values.rest.main, b, kv_head, row, second, v_full, v_s.main, v_stage)
    else:
        load_kv_parts(values, b, kv_head, row, v_full, part_slot(v_s, v_stage))
    if isolation is not None:  # noqa: SIM102 (a compile-time condition)
        if isolates:
            k, v, loaded = part_slot(k_s, stage), part_slot(v_s, v_stage), isolation.loaded
            bound_keys(k, v, loaded.index(2), loaded.index(3), isolated & 1)
            isolated += 1
            mbarrier.arrive(bars.k_full.index(stage), count=1)
            mbarrier.arrive(bars.v_full.index(v_stage), count=1)
    return isolated


@gluon.jit
def _load_item(
    item_number, q_ptr, do_ptr, b, h, row, pos, left, terms_at, q_len, q_s, do_s, item_s, q_bars, isolation, unbounded,
    HEAD_PAIRS: gl.constexpr,
):  # fmt: skip
    """Write the item's record and start the loads of its queries and dO, as soon as the CTA's item before no longer needs the buffers.

    q_ptr, do_ptr, q_s, do_s: `Parts`. terms_at: `first_term` of the head. isolation, unbounded: as of `_load_block`.
    """
    mbarrier.wait(q_bars.empty, (item_number & 1) ^ 1)
    store_int(item_s, ITEM_BATCH, b)
    store_int(item_s, ITEM_HEAD, h)
    store_int(item_s, ITEM_ROW, row)
    store_int(item_s, ITEM_POSITION, pos)
    store_int(item_s, ITEM_ROWS_LEFT, left)
    Q_BYTES: gl.constexpr = part_bytes(q_ptr.main.block_type.nbytes, q_ptr.tail.block_type.nbytes)
    DO_BYTES: gl.constexpr = part_bytes(do_ptr.main.block_type.nbytes, do_ptr.tail.block_type.nbytes)
    full = q_bars.full
    if isolation is not None:  # noqa: SIM102 (a compile-time condition)
        if unbounded != 0:
            full = isolation.loaded.index(0)
    mbarrier.expect(full, 2 * (Q_BYTES + DO_BYTES))
    for group in gl.static_range(2):
        head, first = group_place(h, row, group, GROUP_ROWS, HEAD_PAIRS)
        load_part_tile(q_ptr, b, head, first, full, part_slot(q_s, group))
        load_part_tile(do_ptr, b, head, first, full, part_slot(do_s, group))
    if isolation is not None:  # noqa: SIM102 (a compile-time condition)
        if unbounded != 0:
            mbarrier.wait(full, item_number & 1)
            for half in range(2):
                first = row + half * GROUP_ROWS
                zero_bad_rows(part_slot(q_s, half), isolation, terms_at + first, q_len - first)
                zero_bad_rows(part_slot(do_s, half), isolation, terms_at + first, q_len - first)
            fence_async_shared()
            mbarrier.arrive(q_bars.full, count=1)


@gluon.jit
def produce(
    counter, items, q_ptr, keys, values, do_ptr, order, full, partial, lead, q_side, kv_side,
    rows, tiles, heads, shared, group, q_len, kv_len, q_s, k_s, v_s, do_s, blocks_s, item_s, q_bars, bars,
    isolation, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    KV_PAIRS: gl.constexpr, HEAD_PAIRS: gl.constexpr,
):  # fmt: skip
    """The producer warp: takes items (query tiles) from the global counter and loads each item's queries, dO and KV blocks.

    q_ptr, do_ptr, q_s, k_s, v_s, do_s: `Parts`. isolation: `StepIsolation`, or None. lead: as in `dkv_producer.produce`.
    """
    unbounded = 0
    if isolation is not None:
        unbounded = gl.load(isolation.unbounded)
    isolated = 0  # isolated blocks so far
    SUBS: gl.constexpr = QUERIES // N
    i = 0  # block records so far
    t = 0  # items so far
    item = take_item(counter)
    while item < items:
        tile, _, b, h = place(item, order, rows, tiles, heads, group, 1, PER_BATCH, PER_HEAD)
        row, pos, left = span(tile, q_len, q_side, 1, GROUP_ROWS if HEAD_PAIRS else QUERIES)
        table = table_row(tile, b, h, tiles, heads, PER_BATCH, PER_HEAD)
        full_run, partial_run = gl.load(full.ptr + 2 * table), gl.load(partial.ptr + 2 * table)
        full_runs, partial_runs = gl.load(full.ptr + 2 * table + 1) - full_run, gl.load(partial.ptr + 2 * table + 1) - partial_run
        terms_at = first_term(b * heads + h, q_len)
        queries_loaded = 0
        first_runs = gl.load(lead + table) if lead is not None else 0  # partial runs before the full ones
        for run in range(full_runs + partial_runs):
            masked, nth_partial = run >= full_runs, run - full_runs
            if lead is not None:
                masked = (run < first_runs) | (run >= first_runs + full_runs)
                nth_partial = gl.where(run < first_runs, run, run - full_runs)
            r = gl.where(masked, partial_run + nth_partial, full_run + run - first_runs)
            if KV_PAIRS:  # both kinds are in one list
                first, second = gl.load(partial.first + 2 * r) * HALF, gl.load(partial.first + 2 * r + 1) * HALF
                row_from, pos_from, left_from, begin, end = first, first, kv_len - first, 0, 1
            else:
                first = gl.load(gl.where(masked, partial.first, full.first) + r)
                last = gl.load(gl.where(masked, partial.last, full.last) + r)
                row_from, pos_from, left_from = run_place(first, last, kv_len, kv_side, SUBS, N)
                # Blocks without a key are skipped.
                begin, end, second = first * SUBS, gl.minimum((last + 1) * SUBS, (left_from + (N - 1)) // N), 0
            for n in range(begin, end):
                isolated = _load_block(
                    i, keys, values, b, h // shared, row_from + n * N, pos_from + n * N, left_from - n * N, second,
                    gl.where(masked, PARTIAL, FULL), k_s, v_s, blocks_s, bars, isolation, unbounded, isolated, STAGES, V_STAGES, KV_PAIRS,
                )  # fmt: skip
                i += 1
                # After the first block: its stage is empty before the buffers of queries are.
                if queries_loaded == 0:
                    _load_item(
                        t, q_ptr, do_ptr, b, h, row, pos, left, terms_at, q_len, q_s, do_s, item_s, q_bars, isolation, unbounded, HEAD_PAIRS
                    )  # fmt: skip
                queries_loaded = 1
        if queries_loaded == 0:
            _load_item(
                t, q_ptr, do_ptr, b, h, row, pos, left, terms_at, q_len, q_s, do_s, item_s, q_bars, isolation, unbounded, HEAD_PAIRS
            )  # fmt: skip
        mbarrier.wait(bars.k_empty.index(ring_slot(i, STAGES)), ring_phase(i, STAGES) ^ 1)
        store_int(blocks_s, ring_slot(i, BLOCK_SLOTS) * BLOCK_FIELDS + KIND, END)
        mbarrier.arrive(bars.k_full.index(ring_slot(i, STAGES)), count=1)
        mbarrier.wait(bars.v_empty.index(ring_slot(i, V_STAGES)), ring_phase(i, V_STAGES) ^ 1)
        mbarrier.arrive(bars.v_full.index(ring_slot(i, V_STAGES)), count=1)
        i += 1
        t += 1
        item = take_item(counter)
    mbarrier.wait(q_bars.empty, (t & 1) ^ 1)
    store_int(item_s, ITEM_BATCH, -1)
    mbarrier.arrive(q_bars.full, count=1)
