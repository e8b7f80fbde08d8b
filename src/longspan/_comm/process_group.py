"""A group of real processes, over any c10d backend that has `all_to_all_single`: NCCL, Gloo, MPI.

Over NCCL every exchange goes as a list of pieces (`all_to_all`): a send and a receive for each pair of ranks, straight from where the rows
lie. Other backends want the rows in one tensor. A group has one of both ways for all exchanges, because torch holds one for another
collective than the other: its checks of TORCH_DISTRIBUTED_DEBUG=DETAIL refuse ranks that differ in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from longspan._comm.group import CPU, Alone, ControlGroup, Done, Pending, check_pieces, check_whole, row_counts
from longspan._torch_private import process_group_timeout

# What every backend carries. Gloo refuses float8 and int16, MPI the half dtypes too: those travel as bytes, which costs no copy.
_CARRIED = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8})


@dataclass(frozen=True, kw_only=True)
class ProcessGroupGroup:
    """One axis of a mesh over a ProcessGroup. `rank` is the rank in that group.

    An exchange that fails, or does not end within the group's timeout, raises a RuntimeError from `wait()` with Gloo and MPI. NCCL makes
    the current stream wait, not the host: there torch's watchdog ends the process, unless TORCH_NCCL_BLOCKING_WAIT=1.
    """

    name: str
    group: dist.ProcessGroup
    any_stream: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def control(self) -> ControlGroup:
        if not _lacks_cpu_backend(self.group):
            return ControlGroup(self, CPU)
        companion = _gloo_companion(self.group)
        if companion is None:
            return ControlGroup(self, torch.device("cuda", torch.cuda.current_device()))
        return ControlGroup(ProcessGroupGroup(name=self.name, group=companion), CPU)

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        if self.size == 1:
            return Alone(name=self.name).all_to_all(out, sent, out_splits, sent_splits, what=what)
        check_whole(self, out, sent, out_splits, sent_splits, what=what)
        if self._sends_pieces(out):
            return self._from_pieces(out, _cut(sent, sent_splits), out_splits, what)
        return self._from_whole(out, sent, out_splits, sent_splits, what)

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> Pending:
        if self.size == 1:
            return Alone(name=self.name).all_to_all_pieces(out, pieces, out_splits, what=what)
        check_pieces(self, out, pieces, out_splits, what=what)
        if self._sends_pieces(out):
            return self._from_pieces(out, pieces, out_splits, what)
        return self._from_whole(out, torch.cat(list(pieces)), out_splits, row_counts(pieces), what)

    def _sends_pieces(self, out: Tensor) -> bool:
        if not out.is_cuda:
            return False
        try:
            return "cuda:nccl" in dist.get_backend_config(self.group).split(",")
        except (TypeError, ValueError):  # a group that was not made by torch.distributed, which does not know what it runs on
            return False

    def _from_whole(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], what: str) -> Pending:
        return self._begin(out, (sent,), out_splits, what, lambda: dist.all_to_all_single(
            _carried(out), _carried(sent), list(out_splits), list(sent_splits), group=self.group, async_op=True
        ))  # fmt: skip

    def _from_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], what: str) -> Pending:
        return self._begin(out, pieces, out_splits, what, lambda: dist.all_to_all(
            [_carried(part) for part in _cut(out, out_splits)], [_carried(piece) for piece in pieces], group=self.group, async_op=True
        ))  # fmt: skip

    def _begin(
        self, out: Tensor, sent: Sequence[Tensor], out_splits: Sequence[int], what: str, call: Callable[[], dist.Work | None]
    ) -> Pending:
        if out.shape[1:].numel() == 0:
            return Done()  # rows without elements, here and so on every rank; backends divide by their size
        pending = _ProcessGroupPending(at=self, out=out, sent=tuple(sent), out_splits=tuple(out_splits), what=what)
        try:
            pending.work = call()
        except RuntimeError as error:
            raise pending.failure(error) from error
        if pending.work is None:  # torch warns and does nothing for a group that this process is not in, or no longer in
            raise RuntimeError(f"{what}: this process is not in the process group of axis {self.name!r}; make the mesh again, on its ranks")
        return pending


@dataclass(kw_only=True, eq=False)
class _ProcessGroupPending:
    """Holds its tensors until waited for: a backend may read and write them until then."""

    at: ProcessGroupGroup
    out: Tensor | None
    sent: tuple[Tensor, ...] | None
    out_splits: tuple[int, ...]
    what: str
    work: dist.Work | None = None

    def wait(self) -> None:
        if self.work is None:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.failure(error) from error
        self.work = self.out = self.sent = None

    def failure(self, error: RuntimeError) -> RuntimeError:
        ranks = dist.get_process_group_ranks(self.at.group)
        me = self.at.rank
        expected = [f"{r} (global rank {ranks[r]})" for r, rows in enumerate(self.out_splits) if rows and r != me]
        return RuntimeError(
            f"{self.what}: the exchange failed on rank {me} of {self.at.size} on axis {self.at.name!r} (global rank {ranks[me]}), which "
            f"expected rows from {'ranks ' + ', '.join(expected) if expected else 'no other rank'}: {str(error).strip()}. "
            "Check that these ranks are alive and made the same calls in the same order (their logs show what they did last), and that "
            "the group's timeout (`timeout=` of init_process_group or new_group) is longer than the slowest rank takes to get here."
        )


def _lacks_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether torch knows that no backend of this group carries CPU tensors, as in a group that was made for NCCL alone."""
    try:
        return not any(backend.startswith("cpu:") for backend in dist.get_backend_config(group).split(","))
    except (TypeError, ValueError):  # a group that was not made by torch.distributed
        return False


# Gloo groups for the control messages of groups without a CPU backend. torch holds both until destroy_process_group.
_companions: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()


def _gloo_companion(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A Gloo group of the same ranks, made by all of them at their first control message. None where this torch has no Gloo."""
    if group not in _companions:
        ranks = dist.get_process_group_ranks(group)
        _companions[group] = (
            dist.new_group(
                ranks, process_group_timeout(group, "cuda"), "gloo", use_local_synchronization=True, group_desc="longspan control"
            )
            if dist.is_gloo_available()
            else None
        )
    return _companions[group]


def _cut(rows: Tensor, splits: Sequence[int]) -> tuple[Tensor, ...]:
    """Rows as a view for each rank. Most ranks get nothing in most exchanges, and share one."""
    ends, none = accumulate(splits), rows[:0]
    return tuple(rows[end - count : end] if count else none for end, count in zip(ends, splits, strict=True))


def _carried(x: Tensor) -> Tensor:
    return x if x.dtype in _CARRIED else x.unsqueeze(-1).view(torch.uint8)
