"""Rows of a shard on their way: packed for sending, and summed when they come home. Not attention, but as close to memory's speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan._kernels.registry import has_triton


def copy_rows_(out: Tensor, x: Tensor) -> None:
    """out.copy_(x), in elements of 16 bytes where both allow it: strided copies of small elements run at half of memory's speed."""
    wide = torch.complex128
    if x.is_cuda and out.dtype == x.dtype and _holds_wide(out) and _holds_wide(x):
        out, x = out.view(wide), x.view(wide)
    out.copy_(x)


def _holds_wide(t: Tensor) -> bool:
    """Whether a tensor can be seen as one of 16-byte elements."""
    per = 16 // t.element_size()
    strides = all(s % per == 0 for s in t.stride()[:-1])
    return t.stride(-1) == 1 and t.shape[-1] % per == 0 and strides and t.storage_offset() % per == 0 and t.data_ptr() % 16 == 0


def add_rows_(home: Tensor, back: Tensor, rows: Sequence[Tensor], lists: tuple[Tensor, Tensor], *, unwritten: int = 0) -> None:
    """home [S, W] += rows of back [R, W], each at its place, in the order in which they lie in back.

    `rows`: for consecutive parts of back, the rows of home that they belong to; no row twice in one part. `lists`: the same seen
    from home, as (ptr [S + 1], index): what `row_lists` gives, on the device. The first `unwritten` rows of home hold nothing yet: they are
    not read and begin at 0.
    """
    if home.is_cuda and has_triton():
        from longspan._kernels.gpu.row_sums import add_rows

        add_rows(home, back, *lists, unwritten=unwritten)
        return
    home[:unwritten] = 0
    _add_parts(home, back, rows)


def _add_parts(home: Tensor, back: Tensor, rows: Sequence[Tensor]) -> None:
    start = 0
    for part in rows:
        home.index_add_(0, part.to(home.device), back[start : start + len(part)].to(home.dtype))
        start += len(part)


def add_last_rows(
    home: Tensor,
    backs: Sequence[Tensor],
    rows: Sequence[Sequence[Tensor]],
    lists: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    *,
    per_row: bool,
    late: Tensor | None = None,
) -> None:
    """`add_rows_` of one tensor or of two, then `late` [L, W] added to the first L rows, and then `split_rows`. home is used up.

    `rows`: for each of `backs` what `add_rows_` asks for. `lists`: of all of them, as if they lay one after the other.
    """
    if home.is_cuda and has_triton():
        from longspan._kernels.gpu.row_sums import add_last_rows as add_and_split

        add_and_split(home, backs[0], backs[-1], *lists, k, v, per_row=per_row, late=late)
        return
    for back, parts in zip(backs, rows, strict=True):
        _add_parts(home, back, parts)
    if late is not None:
        home[: len(late)] += late
    split_rows(home, k, v, per_row=per_row)


def split_rows(home: Tensor, k: Tensor, v: Tensor, *, per_row: bool) -> None:
    """Rows [S, B·G·(D + E)] (`per_row`: [B·S, G·(D + E)]), k and v of a head side by side, as k [B, G, S, D] and v [B, G, S, E]."""
    batch, groups, length, dim = k.shape
    shape = (batch, length, groups) if per_row else (length, batch, groups)
    whole = home.view(*shape, dim + v.shape[-1]).permute((0, 2, 1, 3) if per_row else (1, 2, 0, 3))
    k.copy_(whole[..., :dim])
    v.copy_(whole[..., dim:])


def row_lists(rows: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """For each of `count` rows the places in back that are added to it, ascending: (ptr [count + 1], index), int32."""
    every = torch.cat([*rows, torch.zeros(0, dtype=torch.int64)])
    ptr = torch.zeros(count + 1, dtype=torch.int32)
    ptr[1:] = torch.bincount(every, minlength=count).cumsum(0)
    return ptr, every.argsort(stable=True).int()
