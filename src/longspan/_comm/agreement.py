"""Agreement: before a collective call moves data, its ranks compare descriptions of the call. Ranks that differ all raise.

Each rank sends one control message of fixed size, so that no two messages can mismatch in a backend, whatever calls the ranks make:

    [magic, status, kind, call number, digest of field 0, digest of field 1, …]     WORDS int64 numbers on the CPU

All ranks of the mesh see all messages. If one differs, or one rank has raised an error, every rank sends its description as text
and raises an error that names the ranks and the fields.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from longspan._comm.group import Pending
from longspan._comm.mesh import Mesh
from longspan._comm.watchdog import watchdog

AGREEMENT = "agreement of all ranks"  # `what` of control messages

MAX_FIELDS = 20
_HEADER = 4
WORDS = _HEADER + MAX_FIELDS
_MAGIC = 0x6C6F6E677370616E
_AGREES, _RAISED = 0, 1
_NUMBER = 3  # place in the header
_BYTES = 8  # of a word
_NUMBER_WORD = struct.Struct("=q")

_numbers = itertools.count(1)


@dataclass(frozen=True, eq=False)
class CallDescription:
    """One rank's description of a collective call. Ranks agree if their descriptions are equal.

    Attributes:
        kind: The call in words, such as "attention, forward pass".
        fields: The call's arguments as text, by name, at most MAX_FIELDS. Names and order depend on `kind` only: messages hold a digest per
            field and no names, so that digest i of one rank is compared with digest i of another.
    """

    kind: str
    fields: Mapping[str, str]

    @cached_property
    def digests(self) -> tuple[int, ...]:
        """A 64-bit digest of the kind, and one of each field."""
        if len(self.fields) > MAX_FIELDS:
            raise ValueError(f"agreement: expected at most {MAX_FIELDS} fields, got {len(self.fields)}")
        return tuple(_digest(text) for text in (self.kind, *(f"{name}={value}" for name, value in self.fields.items())))

    @cached_property
    def words(self) -> tuple[bytes, bytes]:
        """The words of a message before and after the call number, of a rank that agrees. A call that repeats sends the same."""
        kind, *fields = self.digests
        return _message_words(_AGREES, kind, fields)


class Agreement:
    """A control message in flight. `wait()` returns when all ranks agree, and raises on every rank when they do not.

    As a context, around the exchanges of the call: an error that is not a disagreement leaves this rank out of step with its peers, which
    go on exchanging. The context then marks the mesh as broken: later calls on it raise on this rank, and peers raise after the timeout.
    Without it, a rank that catches the error would send its next message into an exchange of this call.
    """

    def __init__(self, mesh: Mesh, call: CallDescription | None, *, forward: int | None = None, error: Exception | None = None) -> None:
        """forward: of a backward pass, the `number` of its forward pass; 0 if unknown. error: this rank raises it."""
        self._mesh, self._call, self._error = mesh, call, error
        self._is_backward = forward is not None
        self._disagreed = False
        self.number = 0  # of the call, the same on every rank: rank 0 chose it
        self._exchange: _AllGather | None = None
        if mesh.size > 1:
            watchdog.call = "a call that raised" if call is None else call.kind
            self._sent_number = next(_numbers) if forward is None else forward
            if call is not None and error is None:
                before, after = call.words
            else:
                kind, *fields = (0,) if call is None else call.digests
                before, after = _message_words(_AGREES if error is None else _RAISED, kind, fields)
            self._exchange = _AllGather(mesh, b"".join((before, _NUMBER_WORD.pack(self._sent_number), after)))

    @classmethod
    def none(cls) -> Agreement:
        """An agreement of one rank with itself: sends nothing."""
        return cls(Mesh.abstract(1), None)

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None and not self._disagreed:
            self._mesh.mark_broken("a call" if self._call is None else self._call.kind, error)

    @property
    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        return self._exchange is None

    def wait(self) -> None:
        """Return once all ranks are known to make the same call. Later calls return at once."""
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            with self:
                gathered = exchange.wait()
                if self._error is None and gathered == exchange.row * self._mesh.size:  # all ranks sent the same, the number too
                    self.number = self._sent_number
                    return
                rows = exchange.rows_of(gathered)
                if not self._all_agree(rows):
                    self._raise([_words(row) for row in rows])
            self.number = _number(rows[0])
        if self._error is not None:
            raise self._error

    def _all_agree(self, rows: Sequence[bytes]) -> bool:
        """Whether all ranks sent the same words, apart from the call number, which is compared in backward passes."""
        before, after = rows[0][: _BYTES * _NUMBER], rows[0][_BYTES * (_NUMBER + 1) :]
        same = all(row.startswith(before) and row.endswith(after) for row in rows)
        return same and self._error is None and len(self._forwards([_number(row) for row in rows])) <= 1

    def _forwards(self, numbers: Sequence[int]) -> set[int]:
        """Of a backward pass, the different call numbers of the forward pass that ranks sent; empty in a forward pass.

        All ranks must differentiate the same forward call: more than one number is a disagreement. A rank that runs a compiled model does
        not know the number and sends 0, which is left out.
        """
        return set(numbers) - {0} if self._is_backward else set()

    def _raise(self, messages: Sequence[Sequence[int]]) -> NoReturn:
        if self._error is not None and all(m[1] == _RAISED for m in messages):
            self._disagreed = True
            raise self._error
        fields = {} if self._call is None else dict(self._call.fields)
        if self._is_backward and len(self._forwards([m[_NUMBER] for m in messages])) > 1:
            fields["forward pass"] = f"call {messages[self._mesh.rank][_NUMBER]}"
        views = _all_gather_texts(self._mesh, json.dumps({
            "kind": None if self._call is None else self._call.kind,
            "fields": fields,
            "error": None if self._error is None else f"{type(self._error).__name__}: {self._error}",
        }))  # fmt: skip
        self._disagreed = True
        if self._error is not None:
            raise self._error
        raise _difference(self._mesh, [json.loads(view) for view in views])


def agree(mesh: Mesh, call: CallDescription) -> Agreement:
    """Return if all ranks of the mesh make this call; raise ValueError on every rank if they do not. Use as a context: see `Agreement`."""
    agreement = Agreement(mesh, call)
    agreement.wait()
    return agreement


def raise_on_all_ranks(mesh: Mesh, error: Exception) -> NoReturn:
    """Raise `error` on this rank. Ranks that wait for this rank in an agreement raise a RuntimeError that quotes it."""
    if mesh.size > 1 and mesh.groups:
        Agreement(mesh, None, error=error).wait()
    raise error


class raising_on_all_ranks:  # named as a function: it is used as one
    """Context of local work before an agreement: with an exception in it, every rank raises at once, and the call may be repeated.

    Not around exchanges: the ranks of a failed exchange are out of step. Without a mesh, exceptions pass.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._mesh is not None and isinstance(error, Exception):
            raise_on_all_ranks(self._mesh, error)


class _AllGather:
    """A row of int64 words of every rank, on every rank: one exchange per axis, the first of which is begun at once.

    Words are bytes: making tensors of lists, and lists of tensors, takes longer than a message between threads.
    """

    def __init__(self, mesh: Mesh, row: bytes) -> None:
        """row: of the same size on every rank, a multiple of 8 bytes."""
        self._mesh, self.row = mesh, row
        self._begin(len(mesh.axes) - 1, row)

    def _begin(self, axis: int, rows: bytes) -> None:
        control, device = self._mesh.group(axis).control()
        size, words = control.size, len(rows) // _BYTES
        self._axis, self._received = axis, bytearray(len(rows) * size)
        sent, self._out = _tensor(bytearray(rows * size)), _tensor(self._received)
        if device.type != "cpu":
            sent, self._out = sent.to(device), self._out.to(device)
        splits = [words] * size
        self._pending: Pending = control.all_to_all(self._out, sent, splits, splits, what=AGREEMENT)

    def _wait(self) -> bytes:
        self._pending.wait()
        if self._out.is_cuda:
            _tensor(self._received).copy_(self._out)
        return bytes(self._received)

    def wait(self) -> bytes:
        """The rows of all ranks, in the order of ranks."""
        rows = self._wait()
        while self._axis > 0:
            self._begin(self._axis - 1, rows)
            rows = self._wait()
        return rows

    def rows_of(self, gathered: bytes) -> list[bytes]:
        """The result of `wait` by rank."""
        size = len(self.row)
        return [gathered[i : i + size] for i in range(0, len(gathered), size)]


def _tensor(words: bytearray) -> Tensor:
    """Words as a tensor over the same memory."""
    return torch.frombuffer(words, dtype=torch.int64)


def _message_words(status: int, kind: int, fields: Sequence[int]) -> tuple[bytes, bytes]:
    """The words of a message before and after the call number."""
    return struct.pack("=3q", _MAGIC, status, kind), struct.pack(f"={MAX_FIELDS}q", *fields, *[0] * (MAX_FIELDS - len(fields)))


def _words(row: bytes) -> tuple[int, ...]:
    return struct.unpack(f"={len(row) // _BYTES}q", row)


def _number(row: bytes) -> int:
    """The call number of a message."""
    return int.from_bytes(row[_BYTES * _NUMBER : _BYTES * (_NUMBER + 1)], sys.byteorder, signed=True)


def _all_gather_texts(mesh: Mesh, text: str) -> list[str]:
    """Every rank's text. Sizes first, then words of a common size, so that these messages cannot mismatch either."""
    data = text.encode()
    sizes = _words(_AllGather(mesh, _NUMBER_WORD.pack(len(data))).wait())
    texts = _AllGather(mesh, data.ljust(-(-max(sizes) // _BYTES) * _BYTES, b"\0"))
    return [row[:size].decode() for row, size in zip(texts.rows_of(texts.wait()), sizes, strict=True)]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _difference(mesh: Mesh, views: Sequence[Mapping[str, Any]]) -> Exception:
    """The error of ranks that do not agree, the same on all ranks without an error of their own."""
    raised = [f"rank {r} raised in this call: {view['error']}" for r, view in enumerate(views) if view["error"] is not None]
    if raised:
        return RuntimeError("; ".join(raised))
    if text := _differing_values("call", [view["kind"] for view in views]):
        differ = [text]
    else:
        names = dict.fromkeys(name for view in views for name in view["fields"])
        differ = [text for name in names if (text := _differing_values(name, [view["fields"].get(name) for view in views]))]
    return ValueError(
        f"the {mesh.size} ranks of this mesh do not agree: {'; '.join(differ)}. All ranks must make the same calls in the same order, "
        "with the same plan and arguments (each with its own shards). No data was exchanged in this call"
    )


def _differing_values(name: str, values: Sequence[str | None]) -> str | None:
    """The ranks of each value of a field, None where all are equal. Values of the most ranks come last, on a tie those of the lowest."""
    if all(value == values[0] for value in values):
        return None
    common = max(dict.fromkeys(values), key=values.count)  # max returns the first of equals, and values are ordered by rank
    uncommon = [value for value in dict.fromkeys(values) if value != common]
    parts = []
    for value in (*uncommon, common):
        ranks = [rank for rank, other in enumerate(values) if other == value]
        parts.append(f"{_rank_list(ranks)} {'has' if len(ranks) == 1 else 'have'} {'no such field' if value is None else value}")
    return f"{name}: {', '.join(parts)}"


def _rank_list(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more}"
