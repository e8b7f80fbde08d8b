"""Device functions that both passes share: which tile a program computes, where its rows lie, and loads of tiles."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs
# Triton compiles what follows a constexpr `if` that returned, so alternatives stand in `else`.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wide(x):
    """x in 64 bits, also where the interpreter holds a plain Python integer."""
    return tl.cast(x, tl.int64)


@triton.jit
def locate(order, rows, tiles, heads, group, SUBS: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr):
    """`place` of this program."""
    return place(tl.program_id(0), order, rows, tiles, heads, group, SUBS, PER_BATCH, PER_HEAD)


@triton.jit
def place(pid, order, rows, tiles, heads, group, SUBS: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr):
    """Item pid's (tile, sub-tile, batch, head): groups of heads one after the other, in each the rows of `order`."""
    sub = pid % SUBS
    pid = pid // SUBS
    g = pid // (rows * group)
    rest = pid % (rows * group)
    row = tl.load(order + rest // group)
    tile = row % tiles
    if PER_HEAD:
        h = (row // tiles) % heads
        b = g
        if PER_BATCH:
            b = row // (tiles * heads)
    else:
        h = (g % (heads // group)) * group + rest % group
        b = g // (heads // group)
        if PER_BATCH:
            b = row // tiles
    return tile, sub, b, h


@triton.jit
def place_in_order(item, order, rows, tiles, heads, groups, SUBS: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr):
    """As `place`, first of the first rows of `order` for all heads, then of the others. `groups`: (heads in a group, how many rows come
    first, heads in a group of the others, items of the rows that come first).
    """
    group, heavy, late, split = groups
    if item < split:
        tile, sub, b, h = place(item, order, heavy, tiles, heads, group, SUBS, PER_BATCH, PER_HEAD)
    else:
        tile, sub, b, h = place(item - split, order + heavy, rows - heavy, tiles, heads, late, SUBS, PER_BATCH, PER_HEAD)
    return tile, sub, b, h


@triton.jit
def table_row(tile, b, h, tiles, heads, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr):
    """The row of the block table for a tile of one batch and head."""
    row = tile
    if PER_HEAD:
        row += h * tiles
    if PER_BATCH:
        row += b * tiles * (heads if PER_HEAD else 1)
    return row


@triton.jit
def span(n, length, side, SUBS: tl.constexpr, SIZE: tl.constexpr):
    """(first row, first position, rows left in the tile) of sub-tile n; `side` holds the tiling's arrays, or Nones for a plain sequence."""
    if side[0] is None:
        start = n * SIZE
        return start, start, length - start
    else:
        tile = n // SUBS
        inner = (n % SUBS) * SIZE
        return tl.load(side[0] + tile) + inner, tl.load(side[1] + tile) + inner, tl.load(side[2] + tile) - inner


@triton.jit
def run_place(first, last, length, side, SUBS: tl.constexpr, SIZE: tl.constexpr):
    """Where a run's tiles lie: what to add to n · SIZE for the first row and position of sub-tile n, and what to subtract it from for
    the rows left. Within a run rows and positions go on (`launch.split_runs`), so that its loop looks nothing up.
    """
    if side[0] is None:
        return 0, 0, length
    else:
        start = first * (SUBS * SIZE)
        row = tl.load(side[0] + first)
        end = tl.load(side[0] + last) + tl.load(side[2] + last)
        return row - start, tl.load(side[1] + first) - start, end - row + start


@triton.jit
def run_count(full, partial, table):
    """Number of runs, full and partial, in a row of the block table."""
    fulls = tl.load(full[0] + table + 1) - tl.load(full[0] + table)
    return fulls + tl.load(partial[0] + table + 1) - tl.load(partial[0] + table)


@triton.jit
def run_at(full, partial, table, r):
    """(first tile, last tile, whether full) of run r of a row: full runs come first."""
    begin = tl.load(full[0] + table)
    fulls = tl.load(full[0] + table + 1) - begin
    if r < fulls:
        first, last = tl.load(full[1] + begin + r), tl.load(full[2] + begin + r)
    else:
        at = tl.load(partial[0] + table) + r - fulls
        first, last = tl.load(partial[1] + at), tl.load(partial[2] + at)
    return first, last, r < fulls


@triton.jit
def load_rows(base, row, left, stride, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BOUNDED: tl.constexpr):
    """A [ROWS, PADDED] tile from row `row` on; zeros past DIM and, where BOUNDED, past `left` rows."""
    i = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    at = base + wide(row) * stride + (i * stride + d * stride_d)
    inside = i < left if BOUNDED else None
    if DIM != PADDED:
        inside = (d < DIM) & inside if BOUNDED else d < DIM
    return tl.load(at, mask=inside, other=0.0 if BOUNDED or DIM != PADDED else None)


@triton.jit
def head_of(tensor, b, h, stride, TMA: tl.constexpr):
    """Where `load_tile` finds one head: a pointer to its first row, or the descriptor of the whole tensor."""
    if TMA:
        return tensor
    else:
        return tensor + wide(b) * stride[0] + wide(h) * stride[1]


@triton.jit
def load_tile(
    head, b, h, row, left, stride, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BOUNDED: tl.constexpr, TMA: tl.constexpr
):
    """`load_rows` from what `head_of` gave. The copy engine pads with zeros by itself, past the whole tensor's end only."""
    if TMA:
        return head.load([b, h, row, 0]).reshape(ROWS, PADDED)
    else:
        return load_rows(head, row, left, stride[2], stride[3], ROWS, DIM, PADDED, BOUNDED)


@triton.jit
def add_rows(base, value, row, left, stride, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """`store_rows` of the sum with what is there."""
    there = load_rows(base, row, left, stride, stride_d, ROWS, DIM, PADDED, True)
    store_rows(base, value + there.to(value.dtype), row, left, stride, stride_d, ROWS, DIM, PADDED)


@triton.jit
def store_rows(base, value, row, left, stride, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store what lies within `left` rows and DIM columns, in the tensor's dtype."""
    i = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    at = base + wide(row) * stride + (i * stride + d * stride_d)
    tl.store(at, value.to(base.dtype.element_ty), mask=(i < left) & (d < DIM))


@triton.jit
def store_where(base, value, chosen, row, left, stride, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """`store_rows` of the chosen elements [ROWS, PADDED]."""
    i = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    at = base + wide(row) * stride + (i * stride + d * stride_d)
    tl.store(at, value.to(base.dtype.element_ty), mask=chosen & (i < left) & (d < DIM))
