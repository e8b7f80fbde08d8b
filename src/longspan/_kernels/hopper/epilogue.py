"""What becomes of an item's result in the forward kernel: a previous state is folded in, pieces are put together, and it goes to memory, or
to where the copy engine takes it from.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from longspan._kernels.gpu.device_library import LN_2
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.state_mover import narrow
from longspan._kernels.hopper.tile_io import load_tile, store_tile

GROUPS = gl.constexpr(2)  # warpgroups that compute
HALF = gl.constexpr(64)  # queries of each
CUTTABLE = gl.constexpr(128)  # dims of values up to which items may be cut: wider results leave no registers to put pieces together


@gluon.jit
def by_row(x, layout: gl.constexpr):
    """A number per row, for rows held in another layout."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def fold(m, total, old_m):
    """(maximum, sum, share of what was summed, share of the previous state) with a previous state whose weights sum to 1 at old_m."""
    top = gl.maximum(m, old_m)
    base = gl.where(top == float("-inf"), 0.0, top)
    share, old_share = gl.exp2(m - base), gl.exp2(old_m - base)
    return top, total * share + old_share, share, old_share


@gluon.jit
def _together(
    part_out, part_lse, flag, first, cut, count, rows, rows_left, zero,
    WHICH: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """After a piece's state was left: (whether those of all pieces of its item are there, and then their maximum, sum and result). They
    are read in the same order whoever comes last, so that the bits do not depend on it.
    """
    m = gl.full([HALF], -float("inf"), gl.float32, layout=rows.type.layout)
    total = gl.full([HALF], 0.0, gl.float32, layout=rows.type.layout)
    acc = gl.full([HALF, EP], 0.0, gl.float32, layout=layout)
    gl.thread_barrier()
    done = gl.atomic_add(flag, 1, sem="acq_rel") == count - 1
    if done:
        for i in range(count):
            part = (first + i * cut) * GROUPS + WHICH
            m_i = gl.load(part_lse + part * HALF + rows, mask=rows < rows_left, other=-float("inf"))
            out_i = load_tile(part_out + wide(part) * (HALF * EP), 0, rows_left, EP + zero, E, EP, layout)
            m, total, share, share_i = fold(m, total, m_i)
            acc = acc * by_row(share, layout) + out_i * by_row(share_i, layout)
    return done, m, total, acc


@gluon.jit
def _write(
    out_ptr, done_ptr, out_stride, done_stride, complete, acc, b, h, row, rows_left, zero,
    E: gl.constexpr, EP: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """A result: a running one, or where there is another tensor for those that are complete, there."""
    if done_ptr is None:  # noqa: SIM114 (the compiler knows this one)
        store_tile(out_ptr + wide(b) * out_stride[0] + wide(h) * out_stride[1], acc, row, rows_left, out_stride[2] + zero, E, EP, LINES)
    elif complete == 0:
        store_tile(out_ptr + wide(b) * out_stride[0] + wide(h) * out_stride[1], acc, row, rows_left, out_stride[2] + zero, E, EP, LINES)
    else:
        store_tile(done_ptr + wide(b) * done_stride[0] + wide(h) * done_stride[1], acc, row, rows_left, done_stride[2] + zero, E, EP, LINES)


@gluon.jit
def leave(
    out_ptr, lse_ptr, done_ptr, part_out, part_lse, counter, pieces, out_stride, done_stride, complete, acc, b, h, row, rows, rows_left,
    state, piece, zero, WHICH: gl.constexpr, E: gl.constexpr, EP: gl.constexpr, LINES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """An item's result to memory. That of a piece to where pieces are put together, which whoever comes last does."""
    if EP > CUTTABLE:  # noqa: SIM114 (the compiler knows this one)
        _write(out_ptr, done_ptr, out_stride, done_stride, complete, acc, b, h, row, rows_left, zero, E, EP, LINES)
    elif piece < 0:
        _write(out_ptr, done_ptr, out_stride, done_stride, complete, acc, b, h, row, rows_left, zero, E, EP, LINES)
    else:
        cut, count = pieces[1], pieces[2]
        part = piece * GROUPS + WHICH
        store_tile(part_out + wide(part) * (HALF * EP), acc, 0, rows_left, EP + zero, E, EP)
        done, m, total, acc = _together(
            part_out, part_lse, counter + 1 + piece % cut * GROUPS + WHICH, piece % cut, cut, count, rows, rows_left, zero,
            WHICH, E, EP, layout,
        )  # fmt: skip
        if done:
            seen = total > 0.0
            divisor = gl.where(seen, total, 1.0)
            gl.store(lse_ptr + state + rows, gl.where(seen, m * LN_2 + gl.log(divisor), -float("inf")), mask=rows < rows_left)
            acc = acc * by_row(1.0 / divisor, layout)
            _write(out_ptr, done_ptr, out_stride, done_stride, complete, acc, b, h, row, rows_left, zero, E, EP, LINES)


@gluon.jit
def hold(held, out_desc, done_desc, complete, acc, WHICH: gl.constexpr):
    """A result to where the copy engine takes it from, as `_write` to memory."""
    if done_desc is None:
        _put(held, out_desc, acc, WHICH)
    else:
        if complete == 0:
            _put(held, out_desc, acc, WHICH)
        else:
            _put(held, done_desc, acc, WHICH)
    fence_async_shared()


@gluon.jit
def _put(held, desc, acc, WHICH: gl.constexpr):
    if desc.dtype != gl.float32:  # its rows lie where others' running results did
        gl.thread_barrier()
    place = narrow(held.index(WHICH), desc)
    place.reshape([place.shape[2], place.shape[3]]).store(acc.to(desc.dtype))
