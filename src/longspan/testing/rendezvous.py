"""Exchanges between the threads of a virtual world: the last rank to enter copies the rows of all ranks and wakes the waiting ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from longspan._comm.group import CPU, ControlGroup, Pending, check_pieces, check_whole, describe, row_counts


class RankLost(RuntimeError):
    """A rank has ended, so an exchange that needs it cannot complete."""


@dataclass(kw_only=True, eq=False)
class Turns:
    """One rank computes at a time, until it waits for an exchange.

    Threads that compute at the same time pass the GIL back and forth at every torch operation. A rank that blocks outside of an exchange
    keeps its turn; the others go on without one after `timeout` seconds.
    """

    timeout: float
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _rank: int | None = None

    def take(self, rank: int) -> None:
        if self._lock.acquire(timeout=self.timeout):
            self._rank = rank

    def give(self, rank: int) -> None:
        """End the rank's turn, if it has one."""
        if self._rank == rank:
            self._rank = None
            self._lock.release()


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """The record of one exchange. `bytes` [n, n] int64: bytes from ranks[i] to ranks[j] of the world; 0 on the diagonal."""

    what: str
    axis: str
    ranks: tuple[int, ...]
    bytes: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class _Post:
    """One rank's part in an exchange: the buffer to fill and the pieces to send."""

    out: Tensor
    pieces: tuple[Tensor, ...]
    out_splits: tuple[int, ...]
    what: str

    @cached_property
    def sent_splits(self) -> tuple[int, ...]:
        return tuple(row_counts(self.pieces))


@dataclass(kw_only=True, eq=False)
class _Slot:
    """One exchange of one group: the posts of its members by their rank in the group."""

    members: tuple[int, ...]
    changed: threading.Condition
    posts: dict[int, _Post] = field(default_factory=dict)
    done: bool = False
    error: str | None = None

    def missing(self) -> list[int]:
        """Ranks of the world that have not posted."""
        return [rank for i, rank in enumerate(self.members) if i not in self.posts]


@dataclass(kw_only=True, eq=False)
class Rendezvous:
    """The state of one run. The i-th calls of a group's members form one exchange."""

    world: str
    stream: torch.cuda.Stream | None
    record: Callable[[Exchange], None]
    turns: Turns
    lock: threading.Lock = field(default_factory=threading.Lock)
    gone: dict[int, str] = field(default_factory=dict)
    calls: dict[tuple[str, int], int] = field(default_factory=dict)
    open: dict[tuple[str, int], _Slot] = field(default_factory=dict)

    def leave(self, rank: int, how: str) -> None:
        """Mark a rank as ended, and wake the ranks that wait for it."""
        with self.lock:
            self.gone.setdefault(rank, how)
            for slot in self.open.values():
                if rank in slot.missing():
                    slot.changed.notify_all()

    def post(self, key: str, members: tuple[int, ...], rank: int, post: _Post) -> tuple[_Slot, bool]:
        """Enter the next exchange of a group: (its slot, whether this is the last member)."""
        with self.lock:
            call = self.calls.get((key, rank), 0)
            self.calls[key, rank] = call + 1
            slot = self.open.get((key, call))
            if slot is None:
                slot = self.open[key, call] = _Slot(members=members, changed=threading.Condition(self.lock))
            slot.posts[rank] = post
            last = len(slot.posts) == len(members)
            if last:
                del self.open[key, call]
            return slot, last

    def close(self, slot: _Slot, error: str | None) -> None:
        with self.lock:
            slot.error = error  # before done, which is read without the lock
            slot.done = True
            slot.posts.clear()
            slot.changed.notify_all()


@dataclass(frozen=True, kw_only=True, eq=False)
class VirtualGroup:
    """A group of a virtual world as one of its ranks sees it. `members`: its ranks in the world."""

    name: str
    rank: int
    key: str
    members: tuple[int, ...]
    rendezvous: Rendezvous
    timeout: float
    any_stream: ClassVar[bool] = False  # all ranks share one stream

    @property
    def size(self) -> int:
        return len(self.members)

    def control(self) -> ControlGroup:
        return ControlGroup(self, CPU)

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        check_whole(self, out, sent, out_splits, sent_splits, what=what)
        with torch.no_grad():
            return self._begin(out, sent.split(list(sent_splits)), out_splits, what)

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> Pending:
        check_pieces(self, out, pieces, out_splits, what=what)
        return self._begin(out, pieces, out_splits, what)

    def _begin(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], what: str) -> Pending:
        if out.is_cuda:
            self._check_stream(out, what)
        post = _Post(out=out, pieces=tuple(pieces), out_splits=tuple(out_splits), what=what)
        slot, last = self.rendezvous.post(self.key, self.members, self.rank, post)
        if last:
            self._complete(slot)
        return _VirtualPending(group=self, slot=slot, what=what)

    def _check_stream(self, out: Tensor, what: str) -> None:
        shared = self.rendezvous.stream
        if shared is None or shared.device != out.device:
            shared = torch.cuda.default_stream(out.device)
        current = torch.cuda.current_stream(out.device)
        if current != shared:
            raise RuntimeError(
                f"{what}: ranks of a virtual world share the CUDA stream that was current when world.run was called ({shared}), but this "
                f"exchange was posted from {current}; use the shared one, and give virtual_world the device of the tensors"
            )

    def _complete(self, slot: _Slot) -> None:
        posts = [slot.posts[i] for i in range(self.size)]
        error = _mismatch(posts, self.members)
        try:
            if error is None:
                _copy(posts)
                self.rendezvous.record(self._exchange(posts))
        except BaseException as failed:
            error = f"copying failed with {type(failed).__name__}: {failed}"
            raise
        finally:
            self.rendezvous.close(slot, error)

    def _exchange(self, posts: Sequence[_Post]) -> Exchange:
        row = posts[0].out.shape[1:].numel() * posts[0].out.element_size()
        sizes = torch.tensor([post.sent_splits for post in posts], dtype=torch.int64, device="cpu") * row
        return Exchange(what=posts[0].what, axis=self.name, ranks=self.members, bytes=sizes.fill_diagonal_(0))


@dataclass(kw_only=True, eq=False)
class _VirtualPending:
    group: VirtualGroup
    slot: _Slot
    what: str

    def wait(self) -> None:
        group, slot, rendezvous = self.group, self.slot, self.group.rendezvous
        if not slot.done:
            rank = group.members[group.rank]
            rendezvous.turns.give(rank)
            try:
                self._wait_for_others()
            finally:
                rendezvous.turns.take(rank)
        if slot.error is not None:
            raise RuntimeError(f"{self._place}: {slot.error}")

    @property
    def _place(self) -> str:
        group = self.group
        return f"{self.what}: rank {group.members[group.rank]} of the virtual world, on axis {group.name!r}"

    def _wait_for_others(self) -> None:
        group, slot, rendezvous, at = self.group, self.slot, self.group.rendezvous, self._place
        deadline = time.monotonic() + group.timeout
        with rendezvous.lock:
            while not slot.done:
                missing = slot.missing()
                gone = [f"rank {rank}, which {rendezvous.gone[rank]}" for rank in missing if rank in rendezvous.gone]
                if gone:
                    raise RankLost(f"{at}, waited for {', and '.join(gone)}: every rank of the axis must make this call")
                left = deadline - time.monotonic()
                if missing and left <= 0:
                    raise RuntimeError(
                        f"{at}, waited {group.timeout:g} s for ranks {', '.join(map(str, missing))}, which have not come to this exchange. "
                        "Check that all ranks make the same calls in the same order; give virtual_world a longer timeout if they are slow"
                    )
                slot.changed.wait(left if missing else None)  # no timeout once all have posted: the last rank is copying


def _mismatch(posts: Sequence[_Post], members: Sequence[int]) -> str | None:
    """A message that says how the posts of one exchange disagree, or None."""
    first = posts[0]
    for post, rank in zip(posts, members):
        if post.what != first.what:
            return f"rank {rank} is at {post.what!r}, rank {members[0]} at {first.what!r}; all make the same calls in the same order"
        if describe(post.out) != describe(first.out):
            return f"rank {rank} has rows of {describe(post.out)}, rank {members[0]} of {describe(first.out)}"
    if list(zip(*(post.out_splits for post in posts))) == [post.sent_splits for post in posts]:
        return None
    wrong = [
        f"rank {members[i]} sends {sends} rows to rank {members[j]}, which expects {posts[j].out_splits[i]}"
        for i, post in enumerate(posts)
        for j, sends in enumerate(post.sent_splits)
        if sends != posts[j].out_splits[i]
    ]
    return "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more such pairs" if len(wrong) > 8 else "")


def _copy(posts: Sequence[_Post]) -> None:
    with torch.no_grad():
        for j, post in enumerate(posts):
            pieces = [posts[i].pieces[j] for i, rows in enumerate(post.out_splits) if rows]
            if pieces:
                torch.cat(pieces, out=post.out)
