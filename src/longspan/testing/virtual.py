"""Virtual worlds: N ranks as threads of one process, on the CPU or on one GPU, running the code that real ranks run.

Each rank's thread has the caller's grad mode, context variables and current CUDA stream. Autograd runs in the same thread, so a backward
pass that communicates blocks only its own rank, on CUDA too. All ranks share one stream: kernels that a rank launched before an exchange
precede the copies of that exchange, because all ranks have entered it on the host by then. No events are needed. An exchange posted
from another stream raises.

torch's default random generators are shared by all threads: give each rank a generator of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from longspan._comm.agreement import AGREEMENT
from longspan._comm.group import Group
from longspan._comm.mesh import VIRTUAL, Axis, Mesh, coordinate_of, mesh_axes, virtual_worlds
from longspan.testing.rendezvous import Exchange, RankLost, Rendezvous, Turns, VirtualGroup

T = TypeVar("T")

_rendezvous_of_thread: contextvars.ContextVar[Rendezvous | None] = contextvars.ContextVar("longspan_rendezvous", default=None)


def virtual_world(
    shape: int | Sequence[int],
    *,
    axis_names: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    timeout: float = 60.0,
) -> VirtualWorld:
    """A world of virtual ranks.

    Args:
        shape: Number of ranks, or the sizes of two axes.
        axis_names: Names of the axes.
        device: GPU that is current in every rank's thread; the caller's by default.
        timeout: Seconds that a rank waits for the others in one exchange before it raises.
    """
    return VirtualWorld(mesh_axes(shape, axis_names), device=device, timeout=timeout)


class VirtualWorld:
    """N ranks in one process. `run(fn)` calls fn(mesh) once per rank; `exchanges` and the byte counts record the traffic between ranks."""

    def __init__(self, axes: tuple[Axis, ...], *, device: torch.device | str | None, timeout: float) -> None:
        if timeout <= 0:
            raise ValueError(f"virtual_world: expected a timeout above 0 seconds, got {timeout}")
        self.device = None if device is None else torch.device(device)
        self.timeout = timeout
        self.name = f"{VIRTUAL}{uuid.uuid4().hex}"  # unique across processes, since meshes can be pickled
        self.meshes = tuple(self._mesh(axes, rank) for rank in range(Mesh.abstract([axis.size for axis in axes]).size))
        self._members: dict[str, list[int]] = {}
        for mesh in self.meshes:
            for name in mesh.groups:
                self._members.setdefault(name, []).append(mesh.rank)
        self._axis_of = {name: axis.name for mesh in self.meshes for name, axis in zip(mesh.groups, mesh.axes)}
        self._lock = threading.Lock()
        self._running: list[Rendezvous] = []
        self.reset_counts()
        virtual_worlds[self.name] = self

    def _mesh(self, axes: tuple[Axis, ...], rank: int) -> Mesh:
        place = coordinate_of(axes, rank)
        # Ranks of one group differ in the coordinate of its axis only: the other coordinates name the group.
        groups = tuple(f"{self.name}/{i}/{','.join(str(c) for j, c in enumerate(place) if j != i)}" for i in range(len(axes)))
        return Mesh(axes=axes, coordinate=place, groups=groups)

    @property
    def size(self) -> int:
        return len(self.meshes)

    @property
    def bytes_sent(self) -> int:
        """Bytes that crossed from one rank to another. What a rank sends to itself does not count, nor do the control messages at the
        beginning of every call; `exchanges` lists those too."""
        return sum(self.sent)

    def reset_counts(self) -> None:
        self.exchanges: list[Exchange] = []
        self.sent = [0] * self.size
        self.received = [0] * self.size

    def group(self, name: str, rank: int) -> Group:
        """The group of a mesh's axis as rank `rank` sees it, in the run of the calling thread."""
        rendezvous = _rendezvous_of_thread.get()
        if rendezvous is None or rendezvous.world != self.name:
            # A thread started by torch or by the user belongs to the only run in progress.
            with self._lock:
                rendezvous = self._running[0] if len(self._running) == 1 else None
        if rendezvous is None:
            raise RuntimeError("ranks of a virtual world communicate only inside world.run: make this call in the function given to it")
        return VirtualGroup(
            name=self._axis_of[name], rank=rank, key=name, members=tuple(self._members[name]), rendezvous=rendezvous, timeout=self.timeout
        )

    def run(self, fn: Callable[[Mesh], T]) -> list[T]:
        """[fn(mesh) for each rank's mesh], each call in a thread of its own.

        If calls raise, this raises the exception of the lowest rank that failed by itself, with a note that names the rank. A rank that
        waits for one that has returned or raised raises at once.
        """
        turns = Turns(timeout=min(0.2, self.timeout / 4))
        rendezvous = Rendezvous(world=self.name, stream=self._stream(), record=self._record, turns=turns)
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def body(rank: int) -> None:
            _rendezvous_of_thread.set(rendezvous)
            end = "returned"
            rendezvous.turns.take(rank)
            try:
                with (
                    torch.inference_mode(inference),
                    torch.set_grad_enabled(grad),
                    torch.autograd.set_multithreading_enabled(False),
                    _on(rendezvous.stream),
                ):
                    results[rank] = fn(self.meshes[rank])
            except BaseException as error:  # passed to the caller; the other ranks must not wait for this one
                errors[rank] = error
                end = f"raised {type(error).__name__}: {error}"
            finally:
                rendezvous.leave(rank, end)
                rendezvous.turns.give(rank)

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(body, rank), name=f"virtual rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        with self._lock:
            self._running.append(rendezvous)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            for rank in range(self.size):
                rendezvous.leave(rank, "was abandoned: the caller of world.run was interrupted")
            raise
        finally:
            with self._lock:
                self._running.remove(rendezvous)
        if errors:
            raise _root_cause(errors, self.size)
        return [results[rank] for rank in range(self.size)]

    def _stream(self) -> torch.cuda.Stream | None:
        if self.device is not None and self.device.type == "cuda":
            return torch.cuda.current_stream(self.device)
        return torch.cuda.current_stream() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def _record(self, exchange: Exchange) -> None:
        leaving, arriving = exchange.bytes.sum(1).tolist(), exchange.bytes.sum(0).tolist()
        with self._lock:
            self.exchanges.append(exchange)
            if exchange.what.startswith(AGREEMENT):
                return
            for i, rank in enumerate(exchange.ranks):
                self.sent[rank] += leaving[i]
                self.received[rank] += arriving[i]


@contextlib.contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def _root_cause(errors: dict[int, BaseException], size: int) -> BaseException:
    """The error of the lowest rank that did not merely lose another rank; else the earliest error."""
    causes = [rank for rank in sorted(errors) if not _is_consequence(errors[rank])]
    rank = causes[0] if causes else next(iter(errors))
    also = f"; ranks that also failed by themselves: {', '.join(map(str, causes[1:]))}" if len(causes) > 1 else ""
    errors[rank].add_note(f"raised by rank {rank} of a virtual world of {size}{also}")
    return errors[rank]


def _is_consequence(error: BaseException | None) -> bool:
    """Whether an error was caused by a lost rank."""
    while error is not None:
        if isinstance(error, RankLost):
            return True
        error = error.__cause__ or error.__context__
    return False
