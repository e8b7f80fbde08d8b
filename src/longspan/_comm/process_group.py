"""A group of real processes over any c10d backend with `all_to_all_single`: NCCL, Gloo, MPI.

Over NCCL, every exchange is an `all_to_all` of a list of pieces: one send and one receive per pair of ranks, without packing. Other
backends need the rows in one tensor. All exchanges of a group use the same collective, because TORCH_DISTRIBUTED_DEBUG=DETAIL raises if
ranks call different ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from longspan._comm.group import CPU, Alone, ControlGroup, Done, Pending, check_pieces, check_whole, row_counts
from longspan._comm.watchdog import ExchangeLimit, StartedExchange, Waiting, exchange_limit, watchdog
from longspan._torch_private import backend_timeout, start_all_to_all

# Dtypes that every backend supports. Gloo rejects float8 and int16, MPI the half dtypes too: those are sent as bytes, without a copy.
_SUPPORTED = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8})
_SUPPORTED_BY_NCCL = _SUPPORTED | {torch.bfloat16, torch.float16}  # views as bytes of all pieces take longer than starting the exchange


@dataclass(frozen=True, kw_only=True)
class C10dGroup:
    """One axis of a mesh over a ProcessGroup. `rank` is the rank in that group.

    With Gloo and MPI, `wait()` raises RuntimeError if an exchange fails or exceeds the group's timeout. NCCL makes the current stream wait,
    not the host: there torch's watchdog ends the process, unless TORCH_NCCL_BLOCKING_WAIT=1.
    """

    name: str
    group: dist.ProcessGroup
    any_stream: ClassVar[bool] = True

    @cached_property
    def rank(self) -> int:
        return self.group.rank()

    @cached_property
    def size(self) -> int:
        return self.group.size()

    @cached_property
    def _backends(self) -> list[str] | None:
        """device:backend of each device type, None for a group that was not made by torch.distributed."""
        try:
            return dist.get_backend_config(self.group).split(",")
        except (TypeError, ValueError):
            return None

    def control(self) -> ControlGroup:
        self._check_in_step()
        if self._backends is None or any(backend.startswith("cpu:") for backend in self._backends):
            return ControlGroup(self, CPU)
        companion = _gloo_companion(self.group)
        if companion is None:
            return ControlGroup(self, torch.device("cuda", torch.cuda.current_device()))
        return ControlGroup(C10dGroup(name=self.name, group=companion), CPU)

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        if self.size == 1:
            return Alone(name=self.name).all_to_all(out, sent, out_splits, sent_splits, what=what)
        check_whole(self, out, sent, out_splits, sent_splits, what=what)
        if self._is_nccl(out):
            return self._from_pieces(out, _cut(sent, sent_splits), out_splits, what)
        return self._from_whole(out, sent, out_splits, sent_splits, what)

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> Pending:
        if self.size == 1:
            return Alone(name=self.name).all_to_all_pieces(out, pieces, out_splits, what=what)
        check_pieces(self, out, pieces, out_splits, what=what)
        if self._is_nccl(out):
            return self._from_pieces(out, pieces, out_splits, what)
        return self._from_whole(out, torch.cat(list(pieces)), out_splits, row_counts(pieces), what)

    def _is_nccl(self, out: Tensor) -> bool:
        return out.is_cuda and self._backends is not None and "cuda:nccl" in self._backends

    def _from_whole(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], what: str) -> Pending:
        return self._begin(out, (sent,), out_splits, what, lambda: dist.all_to_all_single(
            _as_supported(out), _as_supported(sent), list(out_splits), list(sent_splits), group=self.group, async_op=True
        ))  # fmt: skip

    def _from_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], what: str) -> Pending:
        received, sent = list(_cut(out, out_splits)), list(pieces)
        if out.dtype not in _SUPPORTED_BY_NCCL:
            received, sent = ([_as_supported(piece) for piece in views] for views in (received, sent))
        return self._begin(out, pieces, out_splits, what, lambda: start_all_to_all(self.group, received, sent))

    def _begin(
        self, out: Tensor, sent: Sequence[Tensor], out_splits: Sequence[int], what: str, call: Callable[[], dist.Work | None]
    ) -> Pending:
        self._check_in_step()
        if out.shape[1:].numel() == 0:
            return Done()  # rows without elements, on every rank; backends divide by the row size
        limit = None if self._is_nccl(out) else exchange_limit(self.group, out.device.type)
        pending = _ProcessGroupPending(
            at=self, out=out, sent=tuple(sent), out_splits=tuple(out_splits), exchange=watchdog.start_of(self.group, what), limit=limit
        )
        try:
            if limit is None:
                pending.work = call()
            else:
                with limit:
                    pending.work = call()
        except RuntimeError as error:
            raise pending.failure(error) from error
        if pending.work is None:  # torch only warns for a group that this process is not in
            raise RuntimeError(f"{what}: this process is not in the process group of axis {self.name!r}; make the mesh again, on its ranks")
        return pending

    def _check_in_step(self) -> None:
        reason = _broken.get(self.group) if _broken else None
        if reason is not None:
            raise RuntimeError(
                f"the ranks of axis {self.name!r} are out of step: {reason}. Nothing was sent. End this process, or call "
                "destroy_process_group and init_process_group on every rank and make meshes and plans again"
            )


# Groups of which this rank left a call in the middle, and why. Its peers wait for an exchange of that call: any message that this rank sent
# now would be taken for it. Gloo aborts the process if the sizes differ.
_broken: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def mark_broken(group: dist.ProcessGroup, call: str, error: BaseException) -> None:
    """Make later exchanges of this process over the group raise: it left a call with an error. The first one is kept."""
    if group not in _broken:
        _broken[group] = f"{call} ended on this rank with {type(error).__name__}: {error}"
        if not watchdog.failed:
            watchdog.left = f"{call} ended there with {type(error).__name__}: {error}"


@dataclass(kw_only=True, eq=False)
class _ProcessGroupPending:
    """Holds the tensors until `wait()`: the backend reads and writes them until then."""

    at: C10dGroup
    out: Tensor | None
    sent: tuple[Tensor, ...] | None
    out_splits: tuple[int, ...]
    exchange: StartedExchange
    limit: ExchangeLimit | None  # None: the host does not wait
    work: dist.Work | None = None

    def wait(self) -> None:
        if self.work is None:
            return
        try:
            if self.limit is not None:
                watchdog.waiting = Waiting(self.exchange, self.at.group, time.monotonic(), self.limit.timeout)
            self.work.wait()
        except RuntimeError as error:
            raise self.failure(error) from error
        finally:
            watchdog.waiting = None
        self.work = self.out = self.sent = None

    def failure(self, error: RuntimeError) -> RuntimeError:
        ranks, me = dist.get_process_group_ranks(self.at.group), self.at.rank
        cause = watchdog.diagnosis(self.at.group, self.exchange)
        if cause is None:
            expected = [str(ranks[r]) for r, rows in enumerate(self.out_splits) if rows and r != me]
            cause = f"it expected rows from {'global ranks ' + ', '.join(expected) if expected else 'no other rank'}"
        limit = (
            "" if self.limit is None else f" of {self.limit.timeout.total_seconds():g} s (LONGSPAN_TIMEOUT, or the process group's timeout)"
        )
        return RuntimeError(
            f"{self.exchange.what}: the exchange failed on rank {me} of {self.at.size} on axis {self.at.name!r} (global rank {ranks[me]}): "
            f"{str(error).strip()}. Cause: {cause}. See the logs of the ranks named; all ranks must make the same calls in the same order, "
            f"within the timeout{limit}"
        )


# Gloo groups for the control messages of groups without a CPU backend. torch holds both until destroy_process_group.
_companions: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()


def _gloo_companion(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A Gloo group of the same ranks, made by all of them at their first control message. None where this torch has no Gloo."""
    if group not in _companions:
        ranks = dist.get_process_group_ranks(group)
        _companions[group] = (
            dist.new_group(ranks, backend_timeout(group, "cuda")[1], "gloo", use_local_synchronization=True, group_desc="longspan control")
            if dist.is_gloo_available()
            else None
        )
    return _companions[group]


def _cut(rows: Tensor, splits: Sequence[int]) -> Sequence[Tensor]:
    """The rows of each rank, as tensors over the same memory. Ranks without rows share one, because most ranks receive nothing in most
    exchanges. Not slices of `rows`, which take twice as long: torch tracks each as a view.
    """
    counts = [count for count in splits if count]
    cut = rows.unsafe_split_with_sizes(counts) if counts else ()
    if len(cut) == len(splits):
        return cut
    none, rest = rows[:0], iter(cut)
    return [next(rest) if count else none for count in splits]


def _as_supported(x: Tensor) -> Tensor:
    """The tensor, as bytes if some backend does not support its dtype."""
    return x if x.dtype in _SUPPORTED else x.unsqueeze(-1).view(torch.uint8)
