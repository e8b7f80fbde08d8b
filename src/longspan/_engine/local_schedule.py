"""A rank's local schedule: which KV arrives in each compute step, which KV is sent, and which tiles the step computes.

Derived from the plan, once per plan and tile size, and cached (`longspan._engine.plan_cache`). Rows of a buffer are tokens, or (batch row,
token) pairs where batch rows are laid out differently.

In the forward pass, the local KV is computed first and overlaps with the first transfer. In the backward pass, the local KV is split: the
first part overlaps with the first transfer, the second part comes last and overlaps with the last return of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from longspan._engine.buffer_rows import ReturnedRows, RowSelection
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BlockTable


@dataclass(frozen=True, kw_only=True, eq=False)
class StageExchange:
    """One all-to-all of KV rows, of one stage of the plan's schedule or of several merged ones.

    Attributes:
        what: The stages in words, for error messages.
        start, stop: The rows of the step's buffer that are received.
        recv_counts, send_counts: Rows received from and sent to each rank of the KV axis.
        sent: All local rows that are sent, ordered by receiver.
        sent_to: The local rows sent to each rank.
    """

    what: str
    start: int
    stop: int
    recv_counts: tuple[int, ...]
    send_counts: tuple[int, ...]
    sent: RowSelection
    sent_to: tuple[RowSelection, ...]

    @cached_property
    def sends_views(self) -> bool:
        """Whether each rank's rows are contiguous while all of them are not: then views are sent, and nothing is gathered first."""
        return self.sent.index is not None and all(rows.index is None for rows in self.sent_to)

    @cached_property
    def sent_ranges(self) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """The distinct contiguous ranges (start, stop) of `sent_to`, and for each rank the index of its range: see `sends_views`."""
        ranges = [(rows.start, rows.stop) for rows in self.sent_to]
        distinct = tuple(dict.fromkeys(ranges))
        return distinct, tuple(distinct.index(r) for r in ranges)

    @property
    def gathers_rows(self) -> bool:
        """Whether rows are copied before they are sent."""
        return self.sent.index is not None and not self.sends_views


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTiles:
    """The tiles that a step computes for one batch row, or for all of them where they are laid out alike.

    Attributes:
        kv_rows: The rows of the step's KV buffer that these tiles read; None for all.
        complete_q_tiles: As in `longspan._kernels.protocol.Work`.
    """

    table: BlockTable
    q_tiles: Tiling
    kv_tiles: Tiling
    kv_rows: RowSelection | None = None
    complete_q_tiles: Tensor | None = None

    @cached_property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not len(self.table.first)


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputeStep:
    """Tiles that are computed together, and the exchanges that bring their KV.

    Attributes:
        buffer_rows: Rows of the step's KV buffer. The first `len(local)` rows are local; the rest are received.
        local: The local rows in the buffer. A step has local rows or exchanges, or both in a joined schedule.
        exchanges: The exchanges to wait for before the step.
        tiles: One entry per batch row that is laid out differently.
    """

    buffer_rows: int
    local: range
    exchanges: tuple[StageExchange, ...]
    tiles: tuple[StepTiles, ...]

    @cached_property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return all(tiles.empty for tiles in self.tiles)

    @cached_property
    def received_rows(self) -> int:
        """Rows of the buffer that other ranks send."""
        return self.buffer_rows - len(self.local)

    @cached_property
    def sent_rows(self) -> int:
        """Local rows that are sent, and whose partial gradients return."""
        return sum(exchange.sent.count for exchange in self.exchanges)

    @property
    def transfer_rows(self) -> int:
        """Rows of the larger transfer: the larger of received and sent rows."""
        return max(self.received_rows, self.sent_rows)

    @cached_property
    def gathers_rows(self) -> bool:
        """Whether an exchange copies rows before it sends them."""
        return any(exchange.gathers_rows for exchange in self.exchanges)

    @cached_property
    def returned(self) -> ReturnedRows:
        """The local rows that returned gradients belong to: by exchange, then by rank."""
        return ReturnedRows(parts=tuple(rows.indices() for exchange in self.exchanges for rows in exchange.sent_to if rows.count))


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalSchedule:
    """One rank's steps. `last_step[i]`: the last step in which batch row i has tiles to compute, 0 if none."""

    steps: tuple[ComputeStep, ...]
    last_step: tuple[int, ...]

    @cached_property
    def exchanges(self) -> bool:
        """Whether a step has exchanges."""
        return any(step.exchanges for step in self.steps)

    @cached_property
    def final_returns(self) -> tuple[ComputeStep, ...]:
        """The steps whose returned gradients are added in one pass at the end: the last two steps with exchanges, or only the last one.

        With two, the returned gradients of the earlier step stay in memory until those of the later step have arrived. The later step's
        (`sent_rows` rows) must then fit into the memory of two buffers that were only needed to compute the later step: the earlier step's
        gradients in flight (`received_rows` rows) and the later step's KV (`received_rows` rows, half as many bytes per row).
        """
        last = tuple(step for step in self.steps if step.exchanges)[-2:]
        if len(last) == 2 and last[1].sent_rows > last[0].received_rows + last[1].received_rows // 2:
            return last[-1:]
        return last

    @cached_property
    def final_returned_rows(self) -> ReturnedRows:
        """`returned` of all `final_returns`, concatenated."""
        return ReturnedRows(parts=tuple(part for step in self.final_returns for part in step.returned.parts))
