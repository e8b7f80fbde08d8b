"""A group: one axis of a mesh as one rank sees it. Its primitive is an asynchronous all-to-all of rows.

Legend: R received rows, T sent rows. out [R, ...], sent [T, ...], pieces[r] [T_r, ...]: rows of the same shape and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """An exchange in flight."""

    def wait(self) -> None:
        """Return when `out` is filled and `sent` may be modified; on CUDA, make the current stream wait for that."""


class Group(Protocol):
    """The ranks along one axis of a mesh. They make the same calls in the same order."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def any_stream(self) -> bool:
        """Whether exchanges of CUDA tensors may be started and waited for on any stream."""

    def control(self) -> ControlGroup:
        """The same ranks, over a backend that carries small messages without a device synchronization where there is one."""

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        """Send `sent_splits[r]` consecutive rows of `sent` to each rank r, and receive `out_splits[r]` rows from it into `out`.

        Both tensors are contiguous; splits count rows of dim 0 and may be 0. `out` must not be read and `sent` not be modified before
        `wait()`. `what` names the exchange in error messages; it is the same on every rank.
        """

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> Pending:
        """The same exchange of rows that are not adjacent: `pieces[r]` is sent to rank r.

        Each piece is contiguous. Pieces may overlap each other, as views of one tensor, but not `out`. Some ranks of an exchange may call
        `all_to_all` and others this method.
        """


class ControlGroup(NamedTuple):
    """Ranks that exchange control messages, and the device of these messages' tensors."""

    group: Group
    device: torch.device


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Done:
    """A completed exchange."""

    def wait(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A group of one rank: an exchange is a copy."""

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
    """Raise ValueError if this rank's arguments of `all_to_all` are inconsistent."""
    if _are_alike(out, (sent,)) and _splits_fit(group, out, out_splits, sent_splits) and sum(sent_splits) == sent.shape[0]:
        return
    at = _at(group, what)
    _check_rows(at, {"out": out, "sent": sent})
    for name, x, splits in (("out", out, out_splits), ("sent", sent, sent_splits)):
        _check_splits(at, name, x, splits, group.size)
    _check_own(at, group.rank, out_splits, sent_splits)


def check_pieces(group: Group, out: Tensor, pieces: Sequence[Tensor], out_splits: Sequence[int], *, what: str) -> None:
    """Raise ValueError if this rank's arguments of `all_to_all_pieces` are inconsistent."""
    distinct = {id(piece): piece for piece in pieces}.values()  # most ranks of a ring get the same piece, or nothing
    if _are_alike(out, distinct) and _splits_fit(group, out, out_splits, row_counts(pieces)):
        return
    at = _at(group, what)
    if len(pieces) != group.size:
        raise ValueError(f"{at}: expected one piece per rank, {group.size} (with 0 rows where nothing is sent), got {len(pieces)}")
    _check_rows(at, {"out": out, **{f"pieces[{r}]": piece for r, piece in enumerate(pieces)}})
    _check_splits(at, "out", out, out_splits, group.size)
    _check_own(at, group.rank, out_splits, row_counts(pieces))


def _are_alike(out: Tensor, sent: Iterable[Tensor]) -> bool:
    """Whether all tensors are contiguous rows of one shape, dtype and device. `_check_rows` names the one that differs, in more time."""
    row, dtype, device = out.shape[1:], out.dtype, out.device
    if not out.ndim or not out.is_contiguous():
        return False
    return all(x.ndim and x.is_contiguous() and x.dtype == dtype and x.shape[1:] == row and x.device == device for x in sent)


def _splits_fit(group: Group, out: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int]) -> bool:
    """Whether `_check_splits` of received rows and `_check_own` pass, and each rank has a number of sent rows, none negative."""
    size, rank = group.size, group.rank
    if len(out_splits) != size or len(sent_splits) != size or min(out_splits) < 0 or min(sent_splits) < 0:
        return False
    return sum(out_splits) == out.shape[0] and out_splits[rank] == sent_splits[rank]


def row_counts(pieces: Sequence[Tensor]) -> list[int]:
    """Rows sent to each rank."""
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
                "use separate exchanges for different rows"
            )


def _check_splits(at: str, name: str, x: Tensor, splits: Sequence[int], size: int) -> None:
    if len(splits) != size or min(splits) < 0 or sum(splits) != x.shape[0]:
        raise ValueError(f"{at}: expected {size} splits of 0 or more that add up to the {x.shape[0]} rows of `{name}`, got {list(splits)}")


def _check_own(at: str, rank: int, out_splits: Sequence[int], sent_splits: Sequence[int]) -> None:
    if out_splits[rank] != sent_splits[rank]:
        raise ValueError(
            f"{at}: expected equal splits for the rank itself, got {sent_splits[rank]} rows sent and {out_splits[rank]} received"
        )


def describe(x: Tensor) -> str:
    """Row shape, dtype and device in words."""
    return f"{list(x.shape[1:])} {str(x.dtype).removeprefix('torch.')} on {x.device}"
