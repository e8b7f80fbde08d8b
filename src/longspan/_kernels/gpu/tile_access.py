"""Device functions of all passes: the tile of a CTA, the place of its rows, loads and stores of tiles."""

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
def wide_unsigned(x):
    """x ≥ 0 in 64 bits. The upper word is a constant, not a register that holds a sign."""
    return tl.cast(tl.cast(x, tl.uint32), tl.int64)


@triton.jit
def locate(order, rows, tiles, heads, group, SUBS: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr):
    """`place` of this CTA."""
    return place(tl.program_id(0), order, rows, tiles, heads, group, SUBS, PER_BATCH, PER_HEAD)


@triton.jit
def place(pid, order, rows, tiles, heads, group, SUBS: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr):
    """(tile, sub-tile, batch row, head) of item pid: groups of heads in sequence, in each group the rows of `order`."""
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
    """`place` in two phases: the first `heavy` rows of `order` for all heads, then the remaining rows.

    `groups`: (heads per group of the heavy rows, number of heavy rows, heads per group of the other rows, items of the heavy rows).
    """
    group, heavy, late, split = groups
    if item < split:
        tile, sub, b, h = place(item, order, heavy, tiles, heads, group, SUBS, PER_BATCH, PER_HEAD)
    else:
        tile, sub, b, h = place(item - split, order + heavy, rows - heavy, tiles, heads, late, SUBS, PER_BATCH, PER_HEAD)
    return tile, sub, b, h


@triton.jit
def table_row(tile, b, h, tiles, heads, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr):
    """The block table row of a tile of one batch row and head."""
    row = tile
    if PER_HEAD:
        row += h * tiles
    if PER_BATCH:
        row += b * tiles * (heads if PER_HEAD else 1)
    return row


@triton.jit
def span(n, length, side, SUBS: tl.constexpr, SIZE: tl.constexpr):
    """(first row, first position, rows left in the tile) of sub-tile n. `side`: (row, pos, count), or Nones for a whole sequence."""
    if side[0] is None:
        start = n * SIZE
        return start, start, length - start
    else:
        tile = n // SUBS
        inner = (n % SUBS) * SIZE
        return tl.load(side[0] + tile) + inner, tl.load(side[1] + tile) + inner, tl.load(side[2] + tile) - inner


@triton.jit
def run_place(first, last, length, side, SUBS: tl.constexpr, SIZE: tl.constexpr):
    """(row, pos, left) of a run: sub-tile n begins at row + n · SIZE and pos + n · SIZE and has left − n · SIZE rows.

    Rows and positions of a run are contiguous (`launch.split_runs`), so that the loop over its tiles loads no offsets.
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
    fulls = tl.load(full[0] + 2 * table + 1) - tl.load(full[0] + 2 * table)
    return fulls + tl.load(partial[0] + 2 * table + 1) - tl.load(partial[0] + 2 * table)


@triton.jit
def lead_runs(partial, table, LEAD: tl.constexpr):
    """Number of a row's partial runs that are walked before its full runs: 0 without LEAD."""
    if LEAD:
        return tl.load(partial[3] + table)
    else:
        return 0


@triton.jit
def run_at(full, partial, table, r, LEAD: tl.constexpr):
    """(first tile, last tile, whether full) of run r of a row: `lead_runs`, full runs, the other partial runs."""
    lead = lead_runs(partial, table, LEAD)
    begin = tl.load(full[0] + 2 * table)
    fulls = tl.load(full[0] + 2 * table + 1) - begin
    whole = (r >= lead) & (r < lead + fulls)
    if whole:
        first, last = tl.load(full[1] + begin + r - lead), tl.load(full[2] + begin + r - lead)
    else:
        at = tl.load(partial[0] + 2 * table) + tl.where(r < lead, r, r - fulls)
        first, last = tl.load(partial[1] + at), tl.load(partial[2] + at)
    return first, last, whole


@triton.jit
def load_rows(base, row, left, stride, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BOUNDED: tl.constexpr):
    """A [ROWS, PADDED] tile that begins at `row`; zeros past DIM and, if BOUNDED, past `left` rows."""
    i = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    at = base + wide(row) * stride + (i * stride + d * stride_d)
    inside = i < left if BOUNDED else None
    if DIM != PADDED:
        inside = (d < DIM) & inside if BOUNDED else d < DIM
    return tl.load(at, mask=inside, other=0.0 if BOUNDED or DIM != PADDED else None)


@triton.jit
def head_of(tensor, b, h, stride, TMA: tl.constexpr):
    """The base of one head for `load_tile`: a pointer to its first row, or with TMA the descriptor of the whole tensor."""
    if TMA:
        return tensor
    else:
        return tensor + wide(b) * stride[0] + wide(h) * stride[1]


@triton.jit
def load_tile(
    head, b, h, row, left, stride, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BOUNDED: tl.constexpr, TMA: tl.constexpr
):
    """`load_rows` from the base that `head_of` returned. TMA fills zeros past the end of the whole tensor only."""
    if TMA:
        return head.load([b, h, row, 0]).reshape(ROWS, PADDED)
    else:
        return load_rows(head, row, left, stride[2], stride[3], ROWS, DIM, PADDED, BOUNDED)


@triton.jit
def add_rows(base, value, row, left, stride, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Add a tile to the stored rows."""
    there = load_rows(base, row, left, stride, stride_d, ROWS, DIM, PADDED, True)
    store_rows(base, value + there.to(value.dtype), row, left, stride, stride_d, ROWS, DIM, PADDED)


@triton.jit
def store_rows(base, value, row, left, stride, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store the first `left` rows and DIM columns of a tile, in the tensor's dtype."""
    i = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    at = base + wide(row) * stride + (i * stride + d * stride_d)
    tl.store(at, value.to(base.dtype.element_ty), mask=(i < left) & (d < DIM))


@triton.jit
def store_where(base, value, chosen, row, left, stride, stride_d, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """`store_rows` of the elements that are `chosen` [ROWS, PADDED]."""
    i = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    at = base + wide(row) * stride + (i * stride + d * stride_d)
    tl.store(at, value.to(base.dtype.element_ty), mask=chosen & (i < left) & (d < DIM))
