"""Keys and values on their way: sent from where they lie, or packed first, and handed to kernels as they were received.

Legend as in `longspan._kernels.protocol`. A step's keys and values lie token by token as they were received, side by side in one buffer
[T, B, G, D + E] or, where they travel apart, in two; kernels read views of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan._comm.agreement import Agreement
from longspan._comm.group import Group, Pending
from longspan._engine.local_schedule import Step
from longspan._kernels.row_sums import copy_rows_
from longspan._plan.plan_data import PlanData

# Bytes of a shard's keys and values from which they travel apart: then each tensor that lies token by token, as a projection leaves it, is
# sent from where it lies. To lay fewer side by side takes less time than to begin a second exchange.
APART_BYTES = 32 * 2**20


def travel_apart(data: PlanData, k: Tensor, v: Tensor) -> bool:
    """Whether keys and values are so many that they travel in exchanges of their own. The same on every rank: of sizes alone, not of how
    tensors lie. All stages of a step go as one exchange then: what it costs the host is not paid twice.
    """
    keys = data.inner[1]
    batch, groups, _, dim = k.shape
    return keys.length // keys.ranks * batch * groups * (dim + v.shape[3]) * k.element_size() >= APART_BYTES


def room_for(like: Tensor, rows: int, width: int) -> Tensor:
    """Memory for rows that arrive."""
    return like.new_empty((rows, width))


class Keys:
    """Keys and values step by step: the local ones as they are, the others as they arrive, one step ahead of their use.

    In a joined schedule the local ones are copied to where the first step's others arrive, so that one buffer holds both; unless they
    travel apart, batch rows are laid out alike, and the kernel `joins` them from where they lie.
    """

    def __init__(
        self, data: PlanData, k: Tensor, v: Tensor, steps: Sequence[Step], what: str, agreement: Agreement, *, apart: bool, joins: bool
    ) -> None:  # fmt: skip
        self.k, self.v, self.steps, self.agreement = k, v, steps, agreement
        self.per_row = data.rows > 1  # batch rows are laid out differently
        self.width = k.shape[3] + v.shape[3]
        self.group: Group | None = None
        self.two_places = False
        self.under_way: dict[int, tuple[list[Tensor], list[Pending]]] = {}
        if any(step.arrivals for step in steps):
            assert data.ring is not None
            self.group = data.mesh.group(data.ring)
            self.kinds = (f"keys, {what}", f"values, {what}") if apart else (what,)
            self.two_places = apart and joins and bool(steps[0].arrivals) and not self.per_row
            room = 0 if self.two_places else steps[0].arriving
            self.first = [self._rows(kind, room=room) for kind in ([[k], [v]] if apart else [[k, v]])]
            self.local = [rows[: len(rows) - room] for rows in self.first]
            self.fetch(0)

    def _rows(self, tensors: Sequence[Tensor], *, room: int) -> Tensor:
        """Local keys, values or both side by side, token by token: rows [S, B·G·W], or [B·S, G·W] where batch rows differ, and after them
        room for more. One tensor that lies like this already is not copied where no room is asked for.
        """
        order = (0, 2, 1, 3) if self.per_row else (2, 0, 1, 3)
        turned = [t.permute(order) for t in tensors]
        shape = torch.Size((*turned[0].shape[:3], sum(t.shape[3] for t in turned)))
        outer = 2 if self.per_row else 1
        rows, width = shape[:outer].numel(), shape[outer:].numel()
        if len(turned) == 1 and not room and turned[0].is_contiguous():
            return turned[0].view(rows, width)
        buffer = room_for(self.k, rows + room, width)
        start = 0
        for t in turned:
            copy_rows_(buffer[:rows].view(shape)[..., start : start + t.shape[3]], t)
            start += t.shape[3]
        return buffer

    def fetch(self, i: int) -> None:
        """Begin the exchanges of step i, the first of them once all ranks agree."""
        if i >= len(self.steps) or not self.steps[i].arrivals:
            return
        self.agreement.wait()
        assert self.group is not None
        step = self.steps[i]
        alone = i > 0 or self.two_places  # what arrives has a buffer to itself
        buffers = [room_for(rows, step.arriving, rows.shape[1]) for rows in self.first] if alone else self.first
        before = len(step.own) if alone else 0
        pending = []
        for arrival in step.arrivals:
            for kind, rows, buffer in zip(self.kinds, self.local, buffers, strict=True):
                out, what = buffer[arrival.start - before : arrival.stop - before], f"{arrival.what}, {kind}"
                if arrival.in_pieces:
                    pieces = [part.take(rows) for part in arrival.home]
                    pending.append(self.group.all_to_all_pieces(out, pieces, arrival.arriving, what=what))
                else:
                    sent = arrival.sent.take(rows)
                    pending.append(self.group.all_to_all(out, sent, arrival.arriving, arrival.leaving, what=what))
        self.under_way[i] = buffers, pending

    def own(self, i: int) -> tuple[Tensor, Tensor] | None:
        """(k, v) of step i that what `take` gives does not hold: local ones, as they are sent."""
        if i or not self.two_places:
            return None
        return self._view(self.local[0], self.k.shape[3]), self._view(self.local[1], self.v.shape[3])

    def take(self, i: int) -> list[tuple[Tensor, Tensor]]:
        """(k, v) of step i for each of its parts, waited for."""
        parts = self.steps[i].parts
        if not self.steps[i].arrivals:
            if self.per_row:
                return [(self.k[p : p + 1], self.v[p : p + 1]) for p in range(len(parts))]
            own = self.steps[i].own
            return [(self.k[:, :, own.start : own.stop], self.v[:, :, own.start : own.stop])]
        buffers, pending = self.under_way.pop(i)
        for p in pending:
            p.wait()
        found = []
        for part in parts:
            taken = [buffer if part.rows is None else part.rows.take(buffer) for buffer in buffers]
            if len(taken) == 1:
                found.append(self.views(taken[0]))
            else:
                found.append((self._view(taken[0], self.k.shape[3]), self._view(taken[1], self.v.shape[3])))
        return found

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of keys and values side by side as k [B, G, T, D] and v [B, G, T, E]."""
        both, dim = self._view(rows, self.width), self.k.shape[3]
        return both[..., :dim], both[..., dim:]

    def _view(self, rows: Tensor, width: int) -> Tensor:
        """Rows as [B, G, T, width]."""
        batch, groups, _, _ = self.k.shape
        return rows.view(rows.shape[0], 1 if self.per_row else batch, groups, width).permute(1, 2, 0, 3)
