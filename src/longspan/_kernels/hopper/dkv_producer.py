"""The producer warp of the dK/dV kernel. `hopper.backward_dkv` begins with a picture of the whole."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from longspan._kernels.gpu.row_terms import first_term
from longspan._kernels.gpu.tile_access import place_in_order, run_place, span, table_row
from longspan._kernels.hopper.gluon_names import reinterpret, tma_load
from longspan._kernels.hopper.half_blocks import HALF, start_halves
from longspan._kernels.hopper.head_dim_parts import load_kv_parts, load_part_tile, part_bytes, part_slot
from longspan._kernels.hopper.isolation import bound_keys, has_bad_rows, isolate_rows
from longspan._kernels.hopper.pipeline import ring_phase, ring_slot, store_int, take_item
from longspan._kernels.hopper.tile_io import view_as

TILE = gl.constexpr(128)  # keys of an item of `hopper.backward_dkv`
GROUP_KEYS = gl.constexpr(64)  # keys of a compute warp group
STEP_SLOTS = gl.constexpr(8)  # step records in flight: the dQ warps lag behind the producer

# A step's record: int32 fields.
KIND = gl.constexpr(0)
POSITION = gl.constexpr(1)  # global position of the step's first query
ROWS_LEFT = gl.constexpr(2)  # queries from there to the end of the run
HEAD = gl.constexpr(3)
ROW = gl.constexpr(4)  # first query row in the tensor
BATCH = gl.constexpr(5)
EARLIER_ADDS = gl.constexpr(6)  # ordered dQ: additions to the step's rows of dQ that precede this one
SEMAPHORE = gl.constexpr(7)  # ordered dQ: index of the semaphore that counts the additions to those rows
STEP_FIELDS = gl.constexpr(8)

# The item's record: int32 fields.
ITEM_BATCH = gl.constexpr(0)  # STOP: no more items
ITEM_HEAD = gl.constexpr(1)  # head of dK and dV: KV head · head_parts + part
ITEM_ROW = gl.constexpr(2)  # first key row in the tensor
ITEM_POSITION = gl.constexpr(3)  # global position of that key
ITEM_KEYS_LEFT = gl.constexpr(4)  # keys of the tile
ITEM_FIELDS = gl.constexpr(5)

# Kinds of step records.
STOP = gl.constexpr(-1)  # not a step: no more items
END = gl.constexpr(0)  # not a step: end of the item
FULL = gl.constexpr(1)  # every pair is visible
PARTIAL = gl.constexpr(2)  # the mask decides
SHORT = gl.constexpr(3)  # every pair is visible, but the key tile has fewer than KEYS keys

# A leg of an item's walk with ordered dQ (`hopper.dq_order`): int32 fields.
LEG_FIRST = gl.constexpr(0)  # lowest query tile
LEG_LAST = gl.constexpr(1)  # highest query tile
LEG_FLAGS = gl.constexpr(2)  # MASKED_LEG, DOWN_LEG
LEG_HEAD = gl.constexpr(3)  # first query head, of the item's
LEG_HEADS = gl.constexpr(4)  # query heads at each tile
LEG_BEFORE = gl.constexpr(5)  # of its lowest tile, index in `DqOrder.before`
LEG_FIELDS = gl.constexpr(6)
MASKED_LEG = gl.constexpr(1)  # partial tiles
DOWN_LEG = gl.constexpr(2)  # walked from the highest tile to the lowest


class StepBuffers(NamedTuple):
    """Shared memory of the steps in flight: rings of tiles of q, dO, norm and delta, and of STEP_SLOTS step records.

    `q`, `do`: `head_dim_parts.Parts`.
    """

    q: Any
    do: Any
    norm: Any
    delta: Any
    steps: Any


class StepBarriers(NamedTuple):
    """Arrays of mbarriers, one per stage, of the rings of q and norm, and of dO and delta.

    `do_empty` is None if `q_empty` covers both rings: a second wait for the same mbarrier would delay every dO (3 % of a backward pass).
    """

    q_full: Any
    do_full: Any
    q_empty: Any
    do_empty: Any


class KeyTileBarriers(NamedTuple):
    """mbarriers of the item's keys and values."""

    k_full: Any
    v_full: Any
    empty: Any


class DqOrderArgs(NamedTuple):
    """The tensors of `hopper.dq_order.DqOrder` as pointers, or None, and the number of semaphores per head.

    together: query heads that are walked together; with ordered dQ, all of an item.
    """

    ptr: Any
    legs: Any
    before: Any
    semaphores_per_head: Any
    together: Any


@gluon.jit
def step_record(it):
    """The index of the first field of step record `it`."""
    return ring_slot(it, STEP_SLOTS) * STEP_FIELDS


@gluon.jit
def _load_step(
    it, q_ptr, do_ptr, norm_ptr, delta_ptr, b, h, row, term, pos, left, head_row, q_len, kind, earlier_adds, semaphore, described, buffers,
    bars, isolation, unbounded, isolated, BM: gl.constexpr, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr,
):  # fmt: skip
    """Write the step's record and start the loads of its query rows, as soon as its stages are empty. q_ptr, do_ptr: `Parts`.

    head_row: the head's number over all batch rows. term: the index of the step's first row in norm and delta, a multiple of 4.
    isolation: `StepIsolation`, or None. unbounded: its flag. isolated: isolated steps so far. Returns their number after this step.
    """
    isolates = False
    if isolation is not None:  # noqa: SIM102 (a compile-time condition)
        if (unbounded != 0) & (kind != FULL):
            isolates = has_bad_rows(isolation, first_term(head_row, q_len) + row, q_len - row, BM)
    stage = ring_slot(it, Q_STAGES)
    mbarrier.wait(bars.q_empty.index(stage), ring_phase(it, Q_STAGES) ^ 1)
    record = step_record(it)
    steps = buffers.steps
    store_int(steps, record + KIND, kind)
    store_int(steps, record + POSITION, pos)
    store_int(steps, record + ROWS_LEFT, left)
    store_int(steps, record + HEAD, h)
    store_int(steps, record + ROW, row)
    store_int(steps, record + BATCH, b)
    if described is not None:
        store_int(steps, record + EARLIER_ADDS, earlier_adds)
        store_int(steps, record + SEMAPHORE, semaphore)
        mbarrier.arrive(described.index(ring_slot(it, STEP_SLOTS)), count=1)
    do_stage = ring_slot(it, DO_STAGES)
    q_full, do_full = bars.q_full.index(stage), bars.do_full.index(do_stage)
    if isolation is not None:  # noqa: SIM102 (a compile-time condition)
        if isolates:  # the consumers wait for the isolated tiles
            q_full, do_full = isolation.loaded.index(0), isolation.loaded.index(1)
    _load_rows(stage, q_ptr, norm_ptr, b, h, row, term, head_row, buffers.q, buffers.norm, q_full)
    if bars.do_empty is not None:
        mbarrier.wait(bars.do_empty.index(do_stage), ring_phase(it, DO_STAGES) ^ 1)
    _load_rows(do_stage, do_ptr, delta_ptr, b, h, row, term, head_row, buffers.do, buffers.delta, do_full)
    if isolation is not None:  # noqa: SIM102 (a compile-time condition)
        if isolates:
            q, do, norm, delta = part_slot(buffers.q, stage), part_slot(buffers.do, do_stage), buffers.norm, buffers.delta
            at = first_term(head_row, q_len) + row
            isolate_rows(q, do, norm.index(stage), delta.index(do_stage), isolation, at, q_len - row, isolated & 1)
            isolated += 1
            mbarrier.arrive(bars.q_full.index(stage), count=1)
            mbarrier.arrive(bars.do_full.index(do_stage), count=1)
    return isolated


@gluon.jit
def _load_rows(stage, desc, terms_desc, b, h, row, term, head_row, tiles, terms, full):
    """Start the loads of a step's tile of q or of dO and of its row terms, norm or delta. All are 0 past the end of the head: a NaN of the
    next head would reach dK through 0 · NaN.
    """
    if terms_desc.block_type.shape[1] < terms.shape[1]:  # a step of two heads
        PANELS: gl.constexpr = tiles.main.shape[4] // HALF
        mbarrier.expect(full, 2 * (PANELS * desc.main.block_type.nbytes + terms_desc.block_type.nbytes))
        start_halves(desc.main, b, h, row, h + 1, row, full, tiles.main, stage)
        halves = reinterpret(terms, terms_desc.dtype, [terms.shape[0] * 2, HALF], terms.layout)
        tma_load(terms_desc, [head_row, term], full, view_as(halves.index(stage * 2), terms_desc))
        tma_load(terms_desc, [head_row + 1, term], full, view_as(halves.index(stage * 2 + 1), terms_desc))
    else:
        mbarrier.expect(full, part_bytes(desc.main.block_type.nbytes, desc.tail.block_type.nbytes) + terms_desc.block_type.nbytes)
        load_part_tile(desc, b, h, row, full, part_slot(tiles, stage))
        tma_load(terms_desc, [head_row, term], full, view_as(terms.index(stage), terms_desc))


@gluon.jit
def _load_item(item_number, keys, values, b, head, head_parts, row, pos, left, k_s, v_s, item_s, bars, isolation, unbounded):
    """Write the item's record and start the loads of its keys and values, as soon as the CTA's item before no longer needs the buffers.

    k_s, v_s: `Parts`. isolation, unbounded: as of `_load_step`.
    """
    mbarrier.wait(bars.empty, (item_number & 1) ^ 1)
    store_int(item_s, ITEM_BATCH, b)
    store_int(item_s, ITEM_HEAD, head)
    store_int(item_s, ITEM_ROW, row)
    store_int(item_s, ITEM_POSITION, pos)
    store_int(item_s, ITEM_KEYS_LEFT, left)
    k_full, v_full = bars.k_full, bars.v_full
    if isolation is not None:  # noqa: SIM102 (a compile-time condition)
        if unbounded != 0:
            k_full, v_full = isolation.loaded.index(2), isolation.loaded.index(3)
    load_kv_parts(keys, b, head // head_parts, row, k_full, part_slot(k_s, 0))
    load_kv_parts(values, b, head // head_parts, row, v_full, part_slot(v_s, 0))
    if isolation is not None:  # noqa: SIM102 (a compile-time condition)
        if unbounded != 0:
            bound_keys(part_slot(k_s, 0), part_slot(v_s, 0), isolation.loaded.index(2), isolation.loaded.index(3), item_number & 1)
            mbarrier.arrive(bars.k_full, count=1)
            mbarrier.arrive(bars.v_full, count=1)


@gluon.jit
def _next_run(fulls, partials, full, partial, full_end, full_runs, partial_end, partial_runs):
    """(first tile, last tile, whether partial, full runs so far) of the next run of a table row, from the last tile to the first.

    fulls, partials: runs so far. full_end, partial_end: where the row's runs end.
    """
    of_full, of_partial = full_end - 1 - fulls, partial_end - 1 - partials
    next_full = gl.load(full.first + of_full, mask=fulls < full_runs, other=-1)
    next_partial = gl.load(partial.first + of_partial, mask=partials < partial_runs, other=-1)
    masked = next_partial > next_full
    last = gl.load(gl.where(masked, partial.last + of_partial, full.last + of_full))
    return gl.where(masked, next_partial, next_full), last, masked, fulls + gl.where(masked, 0, 1)


@gluon.jit
def produce(
    counter, items, q_ptr, keys, values, do_ptr, norm_ptr, delta_ptr, order, full, partial, dq_order, described, q_side, kv_side,
    rows, tiles, heads, kv_heads, shared, head_parts, group, heavy_rows, q_len, kv_len, k_s, v_s, buffers, item_s, item_bars, bars,
    isolation, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr,
    KEYS: gl.constexpr, BM: gl.constexpr, Q_STAGES: gl.constexpr, DO_STAGES: gl.constexpr, Q_TILE: gl.constexpr, KV_TILE: gl.constexpr,
    BY_TILE: gl.constexpr, MERGED: gl.constexpr,
):  # fmt: skip
    """The producer warp: takes items (KEYS keys) from the global counter and loads each item's keys, values and steps of queries.

    q_ptr, do_ptr, k_s, v_s: `Parts`.
    MERGED: full and partial runs are walked from the last query tile to the first, for each tile the steps of several heads
    (`DqOrderArgs`). Otherwise heads come one after the other, each with its full runs first. With ordered dQ, `described` holds mbarriers
    that complete when a step's record is written, and legs are walked instead of the table's runs; otherwise it is None.
    isolation: `StepIsolation`, or None. Q_TILE, KV_TILE: queries and keys of a tile of the block table. If a
    step has more queries than a tile, it has the same queries of two heads (`hopper.half_blocks`).
    BY_TILE: norm and delta are in the order of tiles (`row_terms.rows_by_tile`).
    """
    HEADS: gl.constexpr = 2 if Q_TILE < BM else 1  # of a step
    QUERIES: gl.constexpr = BM // HEADS
    SUBS: gl.constexpr = Q_TILE // QUERIES
    KEY_SUBS: gl.constexpr = KV_TILE // KEYS
    ORDERED: gl.constexpr = described is not None
    groups = (kv_heads, heavy_rows, group, items // rows * heavy_rows)
    steps = buffers.steps
    unbounded = 0
    if isolation is not None:
        unbounded = gl.load(isolation.unbounded)
    isolated = 0  # isolated steps so far
    item_isolation = isolation
    if KEYS == TILE:  # the compute warp groups isolate keys and values themselves
        item_isolation = None
    it = 0  # step records so far
    t = 0  # items so far
    item = take_item(counter)
    while item < items:
        tile, sub, b, head = place_in_order(item, order, rows, tiles, kv_heads, groups, KEY_SUBS, PER_BATCH, PER_HEAD)
        kv_row, kv_pos, kv_left = span(tile * KEY_SUBS + sub, kv_len, kv_side, KEY_SUBS, KEYS)
        kv_loaded = 0
        # The second half of a short tile may have no key.
        item_heads = gl.where(kv_left > 0, shared, 0) if KEY_SUBS > 1 else shared
        for j in range(0, item_heads, dq_order.together if MERGED else HEADS):
            first_head = head * shared + j
            last_head = first_head + (dq_order.together if MERGED else 1)
            if ORDERED:
                walk = dq_order.ptr + table_row(tile, b, head, tiles, kv_heads, PER_BATCH, PER_HEAD)
                first_leg = gl.load(walk)
                runs = gl.load(walk + 1) - first_leg
            else:
                table = table_row(tile, b, first_head, tiles, heads, PER_BATCH, PER_HEAD)
                full_run, partial_run = gl.load(full.ptr + 2 * table), gl.load(partial.ptr + 2 * table)
                full_end, partial_end = gl.load(full.ptr + 2 * table + 1), gl.load(partial.ptr + 2 * table + 1)
                full_runs, partial_runs = full_end - full_run, partial_end - partial_run
                runs = full_runs + partial_runs
                fulls = 0
            for i in range(runs):
                if ORDERED:
                    leg = dq_order.legs + (first_leg + i) * LEG_FIELDS
                    first, last, flags = gl.load(leg + LEG_FIRST), gl.load(leg + LEG_LAST), gl.load(leg + LEG_FLAGS)
                    masked, down = (flags & MASKED_LEG) != 0, (flags & DOWN_LEG) != 0
                    before = dq_order.before + gl.load(leg + LEG_BEFORE) - first
                    first_head = head * shared + gl.load(leg + LEG_HEAD)
                    last_head = first_head + gl.load(leg + LEG_HEADS)
                elif MERGED:
                    first, last, masked, fulls = _next_run(
                        fulls, i - fulls, full, partial, full_end, full_runs, partial_end, partial_runs
                    )  # fmt: skip
                else:
                    masked = i >= full_runs
                    r = gl.where(masked, partial_run + i - full_runs, full_run + i)
                    first = gl.load(gl.where(masked, partial.first, full.first) + r)
                    last = gl.load(gl.where(masked, partial.last, full.last) + r)
                kind = gl.where(masked, PARTIAL, gl.where(kv_left < KEYS, SHORT, FULL))
                row_from, pos_from, left_from = run_place(first, last, q_len, q_side, SUBS, QUERIES)
                # Steps without a query are skipped.
                end = gl.minimum((last + 1) * SUBS, (left_from + (QUERIES - 1)) // QUERIES)
                for m in range(last + 1 - first if MERGED else 1):
                    begin, stop = first * SUBS, end
                    if MERGED:
                        begin = (gl.where(down, last - m, first + m) if ORDERED else last - m) * SUBS
                        stop = gl.minimum(begin + SUBS, end)
                    for h in range(first_head, last_head):
                        for n in range(begin, stop):
                            earlier_adds, semaphore = None, None
                            if ORDERED:
                                earlier_adds = gl.load(before + n // SUBS)
                                semaphore = (b * heads + h) * dq_order.semaphores_per_head + n
                            at = n * QUERIES
                            isolated = _load_step(
                                it, q_ptr, do_ptr, norm_ptr, delta_ptr, b, h, row_from + at, at if BY_TILE else row_from + at,
                                pos_from + at, left_from - at,
                                b * heads + h, q_len, kind, earlier_adds, semaphore, described, buffers, bars, isolation, unbounded,
                                isolated, BM, Q_STAGES, DO_STAGES,
                            )  # fmt: skip
                            it += 1
                            # After the first step: its stage is empty before the buffers of keys and values are.
                            if kv_loaded == 0:
                                _load_item(
                                    t, keys, values, b, head, head_parts, kv_row, kv_pos, kv_left, k_s, v_s, item_s, item_bars,
                                    item_isolation, unbounded,
                                )  # fmt: skip
                            kv_loaded = 1
        if kv_loaded == 0:
            _load_item(
                t, keys, values, b, head, head_parts, kv_row, kv_pos, kv_left, k_s, v_s, item_s, item_bars, item_isolation, unbounded
            )  # fmt: skip
        mbarrier.wait(bars.q_empty.index(ring_slot(it, Q_STAGES)), ring_phase(it, Q_STAGES) ^ 1)
        store_int(steps, step_record(it) + KIND, END)
        if ORDERED:
            mbarrier.arrive(described.index(ring_slot(it, STEP_SLOTS)), count=1)
        mbarrier.arrive(bars.q_full.index(ring_slot(it, Q_STAGES)), count=1)
        if bars.do_empty is not None:
            mbarrier.wait(bars.do_empty.index(ring_slot(it, DO_STAGES)), ring_phase(it, DO_STAGES) ^ 1)
        mbarrier.arrive(bars.do_full.index(ring_slot(it, DO_STAGES)), count=1)
        it += 1
        t += 1
        item = take_item(counter)
    mbarrier.wait(item_bars.empty, (t & 1) ^ 1)
    store_int(item_s, ITEM_BATCH, STOP)
    store_int(steps, step_record(it) + KIND, STOP)
    if ORDERED:
        mbarrier.arrive(described.index(ring_slot(it, STEP_SLOTS)), count=1)
    mbarrier.arrive(item_bars.k_full, count=1)
