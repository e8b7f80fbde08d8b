"""Watchdog: names the rank that the others wait for.

Every process notes the exchange that it started last on each process group, and the one it waits for. Nothing is sent while all goes well:
a thread looks for a question in the store of the default process group. A rank whose exchange takes half its timeout, or fails, asks; the
threads of all ranks answer with their notes, also if their rank is busy elsewhere. A rank with a smaller number is late; one that does not
answer is stopped or dead.

    ask/0                     set by the first rank that asks
    note/0/<global rank>      the answer of each rank
    ask/1 …                   the next question
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from longspan._environment import switch
from longspan._torch_private import backend_timeout, default_store, flight_recorder_dump

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

DEFAULT_TIMEOUT = 600.0  # seconds; also torch's default for NCCL
_PREFIX = "longspan/watchdog"
_MAX_TEXT = 120  # characters of a note's texts
_MAX_GROUPS = 64  # in a note, the latest
_STOP_SECONDS = 5.0  # for threads to end; they take longer only if the store does not respond
_MAX_ASKED = 256  # ranks; in a larger job, only those of the group are asked

Notes = dict[int, dict[str, Any]]  # by global rank


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangeLimit:
    """How long an exchange over a group may take. As a context: exchanges that start in it get this timeout."""

    timeout: timedelta
    backend: Any = None  # whose timeout is longer
    before: timedelta | None = None

    def __enter__(self) -> None:
        if self.backend is not None:
            self.backend._set_default_timeout(self.timeout)

    def __exit__(self, *error: object) -> None:
        if self.backend is not None:
            self.backend._set_default_timeout(self.before)


# Limits of groups by device type, because reading timeouts takes longer than a small exchange.
_limits: WeakKeyDictionary[dist.ProcessGroup, dict[str, ExchangeLimit]] = WeakKeyDictionary()


def exchange_limit(group: dist.ProcessGroup, device: str) -> ExchangeLimit:
    """The least of LONGSPAN_TIMEOUT (600 s), the group's timeout and the default group's, as they are at the first exchange.

    The default group's, because `init_device_mesh` gives the groups of its axes torch's 30 minutes, whatever the user set.
    """
    by_device = _limits.setdefault(group, {})
    if device not in by_device:
        by_device[device] = _limit(group, device)
    return by_device[device]


def _limit(group: dist.ProcessGroup, device: str) -> ExchangeLimit:
    world = dist.group.WORLD
    backend, own = backend_timeout(group, device)
    _, default = (None, None) if world is None or world is group else backend_timeout(world, device)
    least = min(t for t in (configured_timeout(), own, default) if t is not None)
    return ExchangeLimit(timeout=least, backend=backend if own is not None and least < own else None, before=own)


def configured_timeout() -> timedelta:
    """LONGSPAN_TIMEOUT in seconds, by default 600."""
    text = os.environ.get("LONGSPAN_TIMEOUT", "")
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e8:
        raise ValueError(f"LONGSPAN_TIMEOUT: expected a number of seconds above 0, got {text!r}")
    return timedelta(seconds=seconds)


class StartedExchange(NamedTuple):
    """One exchange of this rank. `number`: how many this rank started on the group, from 1; the same exchange has it on every rank."""

    group: str
    number: int
    what: str
    call: str


class Waiting(NamedTuple):
    """An exchange that this rank waits for since a time, with a timeout."""

    exchange: StartedExchange
    group: dist.ProcessGroup
    since: float
    timeout: timedelta


@dataclass(kw_only=True)
class Watchdog:
    """The notes of this process, and the thread that answers. Notes are written without locks: each is one assignment."""

    call: str = ""  # the kind of the latest collective call
    waiting: Waiting | None = None
    started: dict[str, tuple[StartedExchange, float]] = field(default_factory=dict)  # the latest exchange of each group, with its time
    failed: bool = False  # an exchange of this rank has failed, so that it may start no other
    left: str = ""  # the error with which this rank left a call, unless an exchange had failed
    _started: bool = False
    _world: ref[dist.ProcessGroup] | None = None  # the default process group of the notes
    _answers: Answers | None = None  # None without a store

    def start_of(self, group: dist.ProcessGroup, what: str) -> StartedExchange:
        """Note an exchange that starts now."""
        self._start()
        name = group.group_name
        earlier = self.started.get(name)
        number = 1 if earlier is None else earlier[0].number + 1
        exchange = StartedExchange(group=name, number=number, what=what, call=self.call)
        self.started[name] = exchange, time.monotonic()
        return exchange

    def diagnosis(self, group: dist.ProcessGroup, exchange: StartedExchange) -> str | None:
        """Which ranks are late or silent, in words; None if the ranks cannot be asked."""
        self.failed = True
        answers = self._answers
        if answers is None:
            return None
        ranks = dist.get_process_group_ranks(group)
        asked = _asked(ranks)
        notes = answers.ask(asked)
        if notes is None:
            return None
        path = _dump_flight_recorder()
        recorder = "" if path is None else f". This rank's flight recorder is in {path}"
        return describe(exchange, ranks, notes, [r for r in asked if r not in notes]) + recorder

    def note(self) -> dict[str, Any]:
        """This rank's last exchanges, with their ages in seconds."""
        now = time.monotonic()
        groups = {
            name: [exchange.number, exchange.what[:_MAX_TEXT], exchange.call[:_MAX_TEXT], round(now - when, 1)]
            for name, (exchange, when) in list(self.started.items())[-_MAX_GROUPS:]
        }
        return {"groups": groups, "held up": self.waiting is not None or self.failed, "left": self.left[:_MAX_TEXT]}

    def _start(self) -> None:
        """Start the thread at the first exchange over a default process group, and again after another was initialised or after a fork."""
        world = dist.group.WORLD
        if self._started and (None if self._world is None else self._world()) is world:
            return
        answers = switch("LONGSPAN_WATCHDOG", default=True)
        self._started, self._world = True, None if world is None else ref(world)
        # Numbers count the exchanges of one group. A new default group has new groups, under the names of the old ones.
        self.started, self.waiting, self.failed, self.left = {}, None, False, ""
        if self._answers is not None:
            self._answers.stop()
        store = default_store() if answers else None
        self._answers = None
        if store is not None and world is not None:
            interval = min(2.0, max(0.3, exchange_limit(world, "cpu").timeout.total_seconds() / 8))
            self._answers = Answers(self, store, dist.get_rank(), interval)

    def restart(self) -> None:
        """Let the next exchange start the thread again: a forked process has none."""
        self._started = False


def _asked(ranks: Sequence[int]) -> Sequence[int]:
    """The ranks to ask about an exchange of a group: all of the job, because a rank of another axis may hold up the group."""
    world = dist.get_world_size()
    return range(world) if world <= _MAX_ASKED else ranks


class Answers:
    """The thread of one process and one default process group: answers questions, and asks one when this rank waits for long."""

    def __init__(self, watchdog: Watchdog, store: Store, rank: int, interval: float) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self._watchdog, self._rank, self._pid, self._interval = watchdog, rank, os.getpid(), interval
        self._world = dist.group.WORLD if dist.group.WORLD is None else ref(dist.group.WORLD)
        # A connection of its own: a store that does not respond must not block the program's use of it.
        self._store = PrefixStore(_PREFIX, store.clone() if hasattr(store, "clone") else store)
        self._patience = max(1.5 * interval, 2.0)  # seconds for answers: a healthy process may be slow on a busy machine
        self._question = 0  # the next one to answer
        self._warned: StartedExchange | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []  # one answers questions, the others ask
        self._started(self._run, "longspan watchdog")
        atexit.register(self.stop)

    def _started(self, run: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()]
            thread.start()
            self._threads.append(thread)
        return thread

    def stop(self) -> None:
        """End all threads before the interpreter ends: a thread that returns from the store into it would abort the process."""
        if self._pid == os.getpid():
            self._stop.set()
            end = time.monotonic() + _STOP_SECONDS
            with self._lock:  # every listed thread has been started
                threads = list(self._threads)
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while not self._stop.wait(self._interval) and dist.group.WORLD is (None if self._world is None else self._world()):
            try:
                self._answer()
                self._warn()
            except (RuntimeError, OSError):  # the store has ended: the job is over, or its first rank is dead
                return

    def _answer(self) -> None:
        while self._store.check([f"ask/{self._question}"]):
            self._note(self._question)

    def _note(self, question: int) -> None:
        self._store.set(f"note/{question}/{self._rank}", json.dumps(self._watchdog.note()))
        self._question = max(self._question, question + 1)

    def _warn(self) -> None:
        """Print who is late once an exchange has taken half its timeout: on the first rank that waits."""
        waiting = self._watchdog.waiting
        if waiting is None or waiting.exchange is self._warned or time.monotonic() - waiting.since < waiting.timeout.total_seconds() / 2:
            return
        self._warned = waiting.exchange
        ranks = dist.get_process_group_ranks(waiting.group)
        asked = _asked(ranks)
        notes = self._collect(asked)
        if self._stop.is_set():  # before all could answer
            return
        waits = [r for r in ranks if r in notes and _number(notes[r], waiting.exchange.group) >= waiting.exchange.number]
        if waits and waits[0] == self._rank and self._watchdog.waiting is waiting:
            text = describe(waiting.exchange, ranks, notes, [r for r in asked if r not in notes])
            seconds = time.monotonic() - waiting.since
            print(f"longspan: {waiting.exchange.what}: rank {self._rank} has waited {seconds:.0f} s. {text}", file=sys.stderr, flush=True)

    def ask(self, ranks: Sequence[int]) -> Notes | None:
        """The note of every rank that answers in time; None if the store does not respond."""
        notes: list[Notes] = []

        def collect() -> None:
            try:
                notes.append(self._collect(ranks))
            except (RuntimeError, OSError):
                return

        self._started(collect, "longspan watchdog question").join(self._patience + 1.0)
        return notes[0] if notes and not self._stop.is_set() else None

    def _collect(self, ranks: Sequence[int]) -> Notes:
        question, end = self._question, time.monotonic() + self._patience
        self._store.set(f"ask/{question}", "1")
        self._note(question)
        missing, notes = [r for r in ranks if r != self._rank], {self._rank: self._watchdog.note()}
        while missing and time.monotonic() < end and not self._stop.is_set():
            self._answer()  # other ranks may ask at the same time
            for rank in list(missing):
                key = f"note/{question}/{rank}"
                if self._store.check([key]):
                    notes[rank] = json.loads(self._store.get(key))
                    missing.remove(rank)
            self._stop.wait(0.03)
        return notes


def describe(exchange: StartedExchange, ranks: Sequence[int], notes: Notes, silent: Sequence[int]) -> str:
    """The ranks that hold up an exchange of the group of `ranks`, and what each did last.

    A rank that waits for another exchange, or whose exchange failed, is held up itself, perhaps by a rank outside of the group: it is not
    named unless nobody else is.
    """
    name = repr(exchange.what) + (f" of {exchange.call!r}" if exchange.call else "")
    late = [r for r in ranks if r in notes and _number(notes[r], exchange.group) < exchange.number]
    held_up = [r for r in late if notes[r]["held up"]]
    culprits = [r for r in (*ranks, *(r for r in (*silent, *notes) if r not in ranks)) if r in silent or (r in notes and notes[r]["left"])]
    culprits += [r for r in late if r not in held_up and r not in culprits]
    named = culprits or held_up
    if not named:
        return f"every rank has started {name}, and all respond: check the network between them"
    causes = [f"global rank {r} {_state(notes.get(r), exchange.group, name)}" for r in named]
    others = [r for r in ranks if r not in named]
    if others:
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        causes.append(f"not to blame: global {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others[:8]))}{more}")
    return "; ".join(causes)


def _state(note: dict[str, Any] | None, group: str, name: str) -> str:
    if note is None:
        return "does not respond: it has ended or is stopped"
    if note["left"]:
        return f"has left its call: {note['left']}"
    return f"is late, it has not started {name}: its last exchange is {_last(note, group)}"


def _number(note: dict[str, Any], group: str) -> int:
    return int(note["groups"].get(group, [0])[0])


def _last(note: dict[str, Any], group: str) -> str:
    if not note["groups"]:
        return "none"
    number, what, call, age = note["groups"][group if group in note["groups"] else list(note["groups"])[-1]]
    return f"{what!r} of {call or 'no call'!r}, number {number}, started {age:g} s before it answered"


def _dump_flight_recorder() -> Path | None:
    """Write the records of torch's flight recorder to the file that torch's own dumps use, if both are configured."""
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    data = flight_recorder_dump() if prefix else None
    if not prefix or data is None:
        return None
    path = Path(f"{prefix}{dist.get_rank()}")
    try:
        path.write_bytes(data)
    except OSError:
        return None
    return path


watchdog = Watchdog()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=watchdog.restart)
