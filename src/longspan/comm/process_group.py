"""A group of real processes, over any c10d backend that has `all_to_all_single`: NCCL, Gloo, MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.group import Alone, Done, Pending, check_exchange

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

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        if self.size == 1:
            return Alone(name=self.name).all_to_all(out, sent, out_splits, sent_splits, what=what)
        check_exchange(self, out, sent, out_splits, sent_splits, what=what)
        if out.shape[1:].numel() == 0:
            return Done()  # rows without elements, here and so on every rank; backends divide by their size
        pending = _ProcessGroupPending(at=self, out=out, sent=sent, out_splits=tuple(out_splits), what=what)
        try:
            pending.work = dist.all_to_all_single(
                _carried(out), _carried(sent), list(out_splits), list(sent_splits), group=self.group, async_op=True
            )
        except RuntimeError as error:
            raise pending.failure(error) from error
        if pending.work is None:  # torch warns and does nothing for a group that this process is not in, or no longer in
            raise RuntimeError(f"{what}: this process is not in the process group of axis {self.name!r}; make the mesh again, on its ranks")
        return pending


@dataclass(kw_only=True, eq=False)
class _ProcessGroupPending:
    """Holds both tensors until waited for: a backend may read and write them until then."""

    at: ProcessGroupGroup
    out: Tensor | None
    sent: Tensor | None
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


def _carried(x: Tensor) -> Tensor:
    return x if x.dtype in _CARRIED else x.unsqueeze(-1).view(torch.uint8)
