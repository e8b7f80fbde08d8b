"""Rows of KV buffers: selections of rows, and the local rows that returned gradients are added to.

A row is one token's keys and values, of all batch rows, or of one batch row where batch rows are laid out differently.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan._kernels.row_sums import row_lists


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSelection:
    """Rows [start, stop) of a tensor, or the rows `index` [stop − start], int64. The index is copied to each device once."""

    start: int
    stop: int
    index: Tensor | None = None
    _device_copies: dict[torch.device, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, index: Tensor) -> RowSelection:
        """The selection of these rows [n], int64: a contiguous range where they are one."""
        if not len(index):
            return cls(start=0, stop=0)
        start, stop = int(index[0]), int(index[-1]) + 1
        contiguous = stop - start == len(index) and bool((index.diff() == 1).all())
        return cls(start=start, stop=stop) if contiguous else cls(start=0, stop=len(index), index=index)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def indices(self) -> Tensor:
        """The row numbers [count], int64, on the CPU."""
        return torch.arange(self.start, self.stop) if self.index is None else self.index

    def take(self, x: Tensor) -> Tensor:
        """The selected rows of x: a view where they are contiguous, else a copy."""
        return x[self.start : self.stop] if self.index is None else x.index_select(0, self._index_on(x.device))

    def write_(self, x: Tensor, rows: Tensor) -> None:
        """Write `rows` to the selected rows of x."""
        if self.index is None:
            x[self.start : self.stop] = rows
        else:
            x.index_copy_(0, self._index_on(x.device), rows)

    def _index_on(self, device: torch.device) -> Tensor:
        assert self.index is not None
        if device not in self._device_copies:
            self._device_copies[device] = self.index.to(device)
        return self._device_copies[device]


class RowViews:
    """Views of contiguous ranges of x's rows, each made once: a ring sends the same rows to many ranks, in every step."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._views: dict[tuple[int, int], Tensor] = {(0, x.shape[0]): x}

    def of(self, start: int, stop: int) -> Tensor:
        """The rows [start, stop)."""
        view = self._views.get((start, stop))
        if view is None:
            view = self._views[start, stop] = self.x[start:stop]
        return view


@dataclass(frozen=True, kw_only=True, eq=False)
class ReturnedRows:
    """The local rows that a buffer of returned gradients belongs to: parts[i] [n_i], int64, for consecutive parts of the buffer."""

    parts: tuple[Tensor, ...]
    _lists: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def lists(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`row_lists` of the parts for `count` local rows, on a device. Copied to each device once."""
        if (count, device) not in self._lists:
            ptr, index = row_lists(self.parts, count)
            self._lists[count, device] = ptr.to(device), index.to(device)
        return self._lists[count, device]
