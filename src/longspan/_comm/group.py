"""A group: one axis of a mesh as one rank sees it. Its one primitive is an asynchronous all-to-all of rows, sent from one tensor or
from pieces.

Legend: R rows that arrive here, T rows that leave here.  out [R, ...], sent [T, ...], pieces[r] [T_r, ...]: rows of the same shape and
dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Return when `out` holds its rows and `sent` may be changed: on CUDA, as seen from the current stream."""


class Group(Protocol):
    """The ranks that differ from this one along one axis only. They make the same calls in the same order."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def any_stream(self) -> bool:
        """Whether exchanges of CUDA tensors may be begun and waited for on any stream."""

    def control(self) -> ControlGroup:
        """The same ranks, over a backend that carries small messages without a device synchronization where there is one."""

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        """Send the rows of `sent` (`sent_splits[r]` of them to rank r, in order), and fill `out` (`out_splits[r]` rows from rank r).

        Both tensors are contiguous; splits count rows of dim 0 and may be 0. No rank may read `out` or change `sent` before `wait()`.
        `what` says in errors what was being done. It is the same on every rank.
        """

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> Pending:
        """The same exchange, of rows that need not lie one after the other: `pieces[r]` go to rank r.

        Each piece is contiguous. Pieces may overlap, as views of one tensor; `out` overlaps with none of them. Ranks of one exchange may
        each send in the form that suits them.
        """


class ControlGroup(NamedTuple):
    """Ranks that exchange control messages, and the device of these messages' tensors."""

    group: Group
    device: torch.device


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Done:
    """An exchange that is over."""

    def wait(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Alone:
    """The group of a rank that has no others: an exchange is a copy."""

    name: str
    rank: int = 0
    size: int = 1
    any_stream: ClassVar[bool] = True

    def control(self) -> ControlGroup:
        return ControlGroup(self, CPU)

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        check_whole(self, out, sent, out_splits, sent_splits, what=what)
        return self._copy(out, sent)

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> Pending:
        check_pieces(self, out, pieces, out_splits, what=what)
        return self._copy(out, pieces[0])

    def _copy(self, out: Tensor, sent: Tensor) -> Pending:
        with torch.no_grad():
            out.copy_(sent)
        return Done()


def check_whole(group: Group, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> None:
    """What one rank can see to be wrong with its own part of an exchange."""
    at = _at(group, what)
    _check_rows(at, {"out": out, "sent": sent})
    for name, x, splits in (("out", out, out_splits), ("sent", sent, sent_splits)):
        _check_splits(at, name, x, splits, group.size)
    _check_own(at, group.rank, out_splits, sent_splits)


def check_pieces(group: Group, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> None:
    """The same of an exchange that sends pieces."""
    at = _at(group, what)
    if len(pieces) != group.size:
        raise ValueError(f"{at}: expected a piece for each of {group.size} ranks (of 0 rows for those that get nothing), got {len(pieces)}")
    _check_rows(at, {"out": out, **{f"pieces[{r}]": piece for r, piece in enumerate(pieces)}})
    _check_splits(at, "out", out, out_splits, group.size)
    _check_own(at, group.rank, out_splits, row_counts(pieces))


def row_counts(pieces: Sequence[Tensor]) -> list[int]:
    """How many rows go to each rank."""
    return [piece.shape[0] for piece in pieces]


def _at(group: Group, what: str) -> str:
    return f"{what}: rank {group.rank} of {group.size} on axis {group.name!r}"


def _check_rows(at: str, tensors: Mapping[str, Tensor]) -> None:
    out = tensors["out"]
    for name, x in tensors.items():
        if x.ndim < 1 or not x.is_contiguous():
            raise ValueError(
                f"{at}: expected `{name}` to be contiguous rows, got {list(x.shape)}, strides {x.stride()}; call .contiguous()"
            )
        if out.dtype != x.dtype or out.shape[1:] != x.shape[1:] or out.device != x.device:
            raise ValueError(
                f"{at}: expected rows of one shape, dtype and device, got out {describe(out)} and {name} {describe(x)}; "
                "what differs goes in an exchange of its own"
            )


def _check_splits(at: str, name: str, x: Tensor, splits: Sequence[int], size: int) -> None:
    if len(splits) != size or min(splits) < 0 or sum(splits) != x.shape[0]:
        raise ValueError(f"{at}: expected {size} splits of 0 or more that add up to the {x.shape[0]} rows of `{name}`, got {list(splits)}")


def _check_own(at: str, rank: int, out_splits: Sequence[int], sent_splits: Sequence[int]) -> None:
    if out_splits[rank] != sent_splits[rank]:
        raise ValueError(f"{at}: sends itself {sent_splits[rank]} rows and expects {out_splits[rank]} of them")


def describe(x: Tensor) -> str:
    """The rows of a tensor in words."""
    return f"{list(x.shape[1:])} {str(x.dtype).removeprefix('torch.')} on {x.device}"
