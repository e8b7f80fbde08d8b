"""What every kernel does: compute a set of tiles and fold them into a running state; the same backwards.

Legend: B batch, H query heads, G key/value heads (H a multiple of G), Q query tokens here, K key tokens here,
D query/key head dim, E value head dim.  q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E], out [B, H, Q, E], lse [B, H, Q].
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from longspan._masks.block_table import BlockTable, expand_ranges
from longspan._masks.joint import Joint
from longspan._masks.program import Program


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiling:
    """Where the tiles of one side lie. Tile i: rows row[i] … row[i] + count[i] − 1 of the tensor, the first at global position pos[i].

    `None` for all three is a whole sequence in order: row = pos = i · block, the last tile cut at `length`.
    """

    length: int
    block: int
    row: Tensor | None = None
    pos: Tensor | None = None
    count: Tensor | None = None

    @property
    def tiles(self) -> int:
        return -(-self.length // self.block) if self.row is None else len(self.row)

    @property
    def name(self) -> Hashable:
        """What tells tilings apart: two plain sequences of one length are the same, arrays are themselves alone."""
        return (self.length, self.block) if self.row is None else ref(self)

    def span(self, tile: int) -> tuple[int, int, int]:
        """(first row, count, first position) of one tile."""
        if self.row is None or self.pos is None or self.count is None:
            start = tile * self.block
            return start, min(self.block, self.length - start), start
        return int(self.row[tile]), int(self.count[tile]), int(self.pos[tile])

    def rows_of(self, chosen: Tensor) -> Tensor:
        """The rows of some tiles, given as a bool for each, int64."""
        if self.row is None or self.count is None:
            row = torch.nonzero(chosen).flatten() * self.block
            return expand_ranges(row, (self.length - row).clamp(max=self.block))
        return expand_ranges(self.row[chosen].long(), self.count[chosen].long())

    def positions(self, device: torch.device) -> Tensor:
        """The global position of each row [length], int64, kept per device; rows in no tile have position 0. Not to be written to."""
        if self.row is None or self.pos is None or self.count is None:
            return torch.arange(self.length, device=device)
        kept = _positions.setdefault(self, {})
        if device not in kept:
            row, pos, count = (t.cpu().long() for t in (self.row, self.pos, self.count))
            step = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
            out = torch.zeros(self.length, dtype=torch.int64)
            out[row.repeat_interleave(count) + step] = pos.repeat_interleave(count) + step
            kept[device] = out.to(device)
        return kept[device]


_positions: WeakKeyDictionary[Tiling, dict[torch.device, Tensor]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Which tiles to compute, and how each score is made. Rows and columns of `table` are tiles of `q_tiles` and `kv_tiles`.

    `mask` decides inside partial tiles; full tiles are computed whole. `score` applies to every computed score. Both see global
    positions. `mask_captured`, `score_captured` are the tensors that those programs read, on the device of the queries.

    `first_batch`, `first_head`: where the tensors at hand are a part of a larger attention, its batch row and query head that
    come first here: programs see b + first_batch and h + first_head. The table's own batch and head dims are those of the tensors at hand.

    `mask_is_fixed`: nobody writes to `mask_captured`.

    `complete` [q tiles], bool: tiles of queries that are complete with this stage, though others are not: their rows see something in it,
    in all heads, and nothing in later ones. Given in all such stages or in none, and only where every tile is complete with some stage, so
    that in the last one exactly those see nothing that were complete before. A kernel may write them to `State.done`.

    `own`: (k, v) of the first rows of `kv_tiles`, where they lie apart: the k and v beside this work hold the others then, and no tile lies
    in both. For kernels that join them (`Kernel.joins`).

    `beside`: more work is given to the device at the same time, and fills what this one leaves idle (`Kernel.apart`).
    """

    table: BlockTable
    q_tiles: Tiling
    kv_tiles: Tiling
    scale: float
    mask: Program | None = None
    mask_captured: Sequence[Tensor] = ()
    score: Program | None = None
    score_captured: Sequence[Tensor] = ()
    joint: Joint | None = None
    first_batch: int = 0
    first_head: int = 0
    mask_is_fixed: bool = False
    complete: Tensor | None = None
    own: tuple[Tensor, Tensor] | None = None
    beside: bool = False


@dataclass(kw_only=True, eq=False)
class State:
    """A running result. `out` is normalised: softmax over what was seen so far, times the values. Rows that saw nothing: out 0, lse −inf.

    `lse` is in natural log and float32 (float64 for float64 inputs). `out` is in that dtype too between stages and in the
    query's after the last. `peak`, if asked for, is the largest score of each row. `done`, where a kernel made it, is the `out` that will
    be, and holds the rows that were complete by now (`Work.complete`): in `out` they are not.
    """

    out: Tensor
    lse: Tensor
    peak: Tensor | None = None
    done: Tensor | None = None

    def rows(self, start: int, stop: int) -> State:
        """Views of some rows."""
        peak = None if self.peak is None else self.peak[..., start:stop]
        return State(out=self.out[..., start:stop, :], lse=self.lse[..., start:stop], peak=peak)


@dataclass(kw_only=True, eq=False)
class Grads:
    """Gradients; `captured[i]` is None where score_captured[i] needs none, else float32 or float64, of its shape."""

    q: Tensor
    k: Tensor
    v: Tensor
    captured: list[Tensor | None]


class Kernel(Protocol):
    """One way to compute tiles. Stateless; an instance per name, in `longspan._kernels.registry`."""

    @property
    def name(self) -> str: ...

    @property
    def rounds_once(self) -> bool:
        """Whether `backward` writes gradients of k and v once, when they are complete: then `into` may hold them in a narrow dtype."""

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> str | None:
        """Why this kernel cannot do this work, or None if it can."""

    def check(self, work: Work, q: Tensor, needs: Sequence[bool] = ()) -> None:
        """Raise what `forward`, or with `needs` `backward`, would raise when it runs: over a mesh others are under way by then."""

    def joins(self, q: Tensor, v: Tensor, work: Work, *, backward: bool) -> bool:
        """Whether it reads keys from two places (`Work.own`) without laying them side by side first; backward, with `into` only."""

    def apart(self, q: Tensor, v: Tensor, work: Work, needs: Sequence[bool]) -> bool:
        """Whether `backward` into given tensors may run at the same time as over other keys of the same queries."""

    def block(self, q: Tensor, v: Tensor, table: BlockTable) -> tuple[int, int]:
        """The tile size that suits this kernel for such a table: the table's own, or another one for the same mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, state: State | None, final: bool, peak: bool) -> State:
        """Attend over `work`'s tiles, folded into `state`, which is spent: its tensors may be written to and may come back in the result.

        `final`: `out` comes back in the query's dtype, its dims in memory in the order of the query's (`like_query`); else in the state's.
        `peak`: also the rows' largest scores.
        """

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        work: Work,
        *,
        needs: Sequence[bool],
        wide: bool,
        delta: Tensor | None = None,
        into: Grads | None = None,
    ) -> Grads:
        """Gradients of `work`'s tiles, given the final out and lse over all tiles of all stages.

        `needs[i]`: whether score_captured[i] needs a gradient. `wide`: gradients of q, k, v in the dtype of lse (to be summed over
        stages), else in the inputs'. `delta` [B, H, Q]: what `delta` gives for these gradients, where it was computed before.
        `into` (with `wide` only): the gradients go there. That of q and of captured tensors is added to what is there; those of k
        and v replace it. Its tensors may be strided views, their last dim contiguous; `into` itself is returned.
        """

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        """Σ out·grad_out − grad_lse [B, H, Q], in the dtype of lse: rows' share of every score's gradient."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores, sums and running results are held for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def plain_delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """`delta` in plain torch."""
    wide = state_dtype(out.dtype)
    delta = (out.to(wide) * grad_out.to(wide)).sum(-1)
    return delta if grad_lse is None else delta - grad_lse.to(wide)


def like_query(q: Tensor, last: int, dtype: torch.dtype) -> Tensor:
    """An empty tensor of q's shape but for the last dim, its dims in memory in the order of q's."""
    shape = (*q.shape[:-1], last)
    order: list[int] = []  # outermost dim first; an insertion sort, since compilers cannot sort symbolic strides
    for dim in range(q.ndim):
        at = len(order)
        while at > 0 and q.stride(order[at - 1]) < q.stride(dim) and q.stride(order[at - 1]) > 0:
            at -= 1
        order.insert(at, dim)
    strides, step = [0] * q.ndim, 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim]
    return torch.empty_strided(shape, strides, dtype=dtype, device=q.device)
