"""The forward kernel's epilogue: merge of an old state, combination of split-KV parts, and the store of outputs.

Outputs go from registers to global memory (`store_output`), or to shared memory for the state warp's TMA store (`stage_output`).
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from longspan._kernels.gpu.device_library import LN_2
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.forward_producer import GROUP_ROWS, GROUPS
from longspan._kernels.hopper.gluon_names import barrier
from longspan._kernels.hopper.pipeline import load_int
from longspan._kernels.hopper.repeats import is_stored, note_poison, note_rows
from longspan._kernels.hopper.tile_io import load_tile, row_wise, store_tile, view_as

MAX_SPLIT_DIM = gl.constexpr(128)  # widest value dim whose items may be split along KV: combining wider parts lacks registers


class Outputs(NamedTuple):
    """Pointers to outputs, and to the old state if there is one; None for tensors that do not exist.

    `complete_out`: output of complete query tiles. `part_out`, `part_lse`: partial results of split items.
    """

    out: Any
    lse: Any
    max_scores: Any
    old_out: Any
    old_lse: Any
    old_max_scores: Any
    complete_out: Any
    part_out: Any
    part_lse: Any


class OutputStrides(NamedTuple):
    """Strides of the tensors of `Outputs` that are not contiguous."""

    out: Any
    old_out: Any
    complete_out: Any


class ForwardTensors(NamedTuple):
    """Pointers and strides of q, out and the old state; of the lse. The old state may be None. For kernels without split-KV."""

    q: Any
    out: Any
    lse: Any
    old_out: Any
    old_lse: Any
    q_stride: Any
    out_stride: Any
    old_out_stride: Any


@gluon.jit
def by_row(x, layout: gl.constexpr):
    """x [rows] as [rows, 1], to be broadcast against a tile in `layout`."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def merge(m, total, old_m):
    """(max, sum, factor of the new sums, factor of the old output): merge with an old state whose weights sum to 1 at max old_m."""
    top = gl.maximum(m, old_m)
    base = gl.where(top == float("-inf"), 0.0, top)
    factor, old_factor = gl.exp2(m - base), gl.exp2(old_m - base)
    return top, total * factor + old_factor, factor, old_factor


@gluon.jit
def store_final_lse(at, m, total, inside):
    """Store the lse of rows at pointers `at`. Returns what their accumulated values are divided by: 1 for rows that see no key."""
    seen = total != 0.0  # also where total is NaN: a row that sees a NaN has lse NaN
    divisor = gl.where(seen, total, 1.0)
    gl.store(at, gl.where(seen, m * LN_2 + gl.log(divisor), -float("inf")), mask=inside)
    return divisor


@gluon.jit
def store_lse(to, m, divisor, seen, split_part, part, lse_at, rows, inside):
    """Store the lse of an item, or in base 2 that of part `part` of a split item (split_part ≥ 0). seen: rows that see a key."""
    if split_part < 0:
        gl.store(to.lse + lse_at + rows, gl.where(seen, m * LN_2 + gl.log(divisor), -float("inf")), mask=inside)
    else:
        gl.store(to.part_lse + part * GROUP_ROWS + rows, gl.where(seen, m + gl.log2(divisor), -float("inf")), mask=inside)


@gluon.jit
def _combine_parts(
    to, arrivals, item, split, rows, rows_left, zero, group, E: gl.constexpr, EP: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """After the store of a part: (whether it is the last of its item; if so, the max, sum and output over all parts).

    Parts are read in the same order whichever of them is last, so that the bits do not depend on it.
    """
    m = gl.full([GROUP_ROWS], -float("inf"), gl.float32, layout=rows.type.layout)
    total = gl.full([GROUP_ROWS], 0.0, gl.float32, layout=rows.type.layout)
    acc = gl.full([GROUP_ROWS, EP], 0.0, gl.float32, layout=layout)
    barrier()
    is_last = gl.atomic_add(arrivals, 1, sem="acq_rel") == split.parts - 1
    if is_last:
        for i in range(split.parts):
            part = (item + i * split.split_items) * GROUPS + group
            part_m = gl.load(to.part_lse + part * GROUP_ROWS + rows, mask=rows < rows_left, other=-float("inf"))
            part_out = load_tile(to.part_out + wide(part) * (GROUP_ROWS * EP), 0, rows_left, EP + zero, E, EP, layout)
            m, total, factor, part_factor = merge(m, total, part_m)
            acc = acc * by_row(factor, layout) + part_out * by_row(part_factor, layout)
    return is_last, m, total, acc


@gluon.jit
def _store(to, strides, complete, acc, b, h, row, rows_left, zero, E: gl.constexpr, EP: gl.constexpr, ROW_WISE: gl.constexpr):
    """Store an output tile to `to.out`, or to `to.complete_out` if the tile is complete and there is such a tensor."""
    out, of_complete = strides.out, strides.complete_out
    if to.complete_out is None:  # noqa: SIM114 (a compile-time condition)
        store_tile(to.out + wide(b) * out[0] + wide(h) * out[1], acc, row, rows_left, out[2] + zero, E, EP, ROW_WISE)
    elif complete == 0:
        store_tile(to.out + wide(b) * out[0] + wide(h) * out[1], acc, row, rows_left, out[2] + zero, E, EP, ROW_WISE)
    else:
        head = to.complete_out + wide(b) * of_complete[0] + wide(h) * of_complete[1]
        store_tile(head, acc, row, rows_left, of_complete[2] + zero, E, EP, ROW_WISE)


@gluon.jit
def _store_part(
    to, counter, split, strides, complete, acc, b, h, row, rows, rows_left, lse_at, split_part, zero,
    group, E: gl.constexpr, EP: gl.constexpr, ROW_WISE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Store a part of a split item. The last part combines all of them."""
    part = split_part * GROUPS + group
    store_tile(to.part_out + wide(part) * (GROUP_ROWS * EP), acc, 0, rows_left, EP + zero, E, EP)
    item = split_part % split.split_items
    arrivals = counter + 1 + item * GROUPS + group
    is_last, m, total, acc = _combine_parts(to, arrivals, item, split, rows, rows_left, zero, group, E, EP, layout)
    if is_last:
        seen = total != 0.0  # also where total is NaN
        divisor = gl.where(seen, total, 1.0)
        gl.store(to.lse + lse_at + rows, gl.where(seen, m * LN_2 + gl.log(divisor), -float("inf")), mask=rows < rows_left)
        acc = acc * by_row(1.0 / divisor, layout)
        _store(to, strides, complete, acc, b, h, row, rows_left, zero, E, EP, ROW_WISE)


@gluon.jit
def _store_whole(
    to, strides, complete, acc, b, h, row, rows_left, zero, E: gl.constexpr, EP: gl.constexpr, ROW_WISE: gl.constexpr, late
):  # fmt: skip
    """`_store`. late: of `store_output`."""
    if late is not None:
        acc = row_wise(acc, to.out.dtype.element_ty)
        note_rows(acc, late.noted, late.i)
        mbarrier.arrive(late.item_empty, count=1)
    _store(to, strides, complete, acc, b, h, row, rows_left, zero, E, EP, ROW_WISE)


@gluon.jit
def store_output(
    to, counter, split, strides, complete, acc, b, h, row, rows, rows_left, lse_at, split_part, stored, zero,
    group, E: gl.constexpr, EP: gl.constexpr, ROW_WISE: gl.constexpr, layout: gl.constexpr, ISOLATE: gl.constexpr, late=None,
):  # fmt: skip
    """Store an item's output to global memory. Of a split item (split_part ≥ 0), store the part.

    stored: with ISOLATE, whether the part is stored, or comes once more (`hopper.repeats`).
    late: None, or of 16-bit outputs an `ItemNote`: note here whether the item has to be repeated, and release its record.
    """
    if EP > MAX_SPLIT_DIM:  # noqa: SIM114 (a compile-time condition)
        _store_whole(to, strides, complete, acc, b, h, row, rows_left, zero, E, EP, ROW_WISE, late)
    elif split_part < 0:
        _store_whole(to, strides, complete, acc, b, h, row, rows_left, zero, E, EP, ROW_WISE, late)
    else:
        if late is not None:
            note_poison(acc, late.noted, late.i)
            stored = is_stored(late.noted, late.i, load_int(late.items_s, late.repeated_at), group)
            mbarrier.arrive(late.item_empty, count=1)
        if ISOLATE:
            if stored:
                _store_part(
                    to, counter, split, strides, complete, acc, b, h, row, rows, rows_left, lse_at, split_part, zero, group, E, EP,
                    ROW_WISE, layout,
                )  # fmt: skip
        else:
            _store_part(
                to, counter, split, strides, complete, acc, b, h, row, rows, rows_left, lse_at, split_part, zero, group, E, EP, ROW_WISE,
                layout,
            )  # fmt: skip


@gluon.jit
def stage_output(state_s, out_desc, complete_out_desc, complete, acc, group):
    """Write an item's output to shared memory, in the dtype of the tensor to which the state warp stores it."""
    if complete_out_desc is None:
        _stage(state_s, out_desc, acc, group)
    else:
        if complete == 0:
            _stage(state_s, out_desc, acc, group)
        else:
            _stage(state_s, complete_out_desc, acc, group)
    fence_async_shared()


@gluon.jit
def _stage(state_s, desc, acc, group):
    if desc.dtype != gl.float32:  # a narrower tile overlaps rows of the old state that other warps of the group may still read
        barrier()
    tile = view_as(state_s.index(group), desc)
    tile.reshape([tile.shape[2], tile.shape[3]]).store(acc.to(desc.dtype))
