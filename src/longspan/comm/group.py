"""A group: one axis of a mesh as one rank sees it. Its one primitive is an asynchronous all-to-all of rows.

Legend: R rows that arrive here, T rows that leave here.  out [R, ...], sent [T, ...]: rows of the same shape and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        """Send the rows of `sent` (`sent_splits[r]` of them to rank r, in order), and fill `out` (`out_splits[r]` rows from rank r).

        Both tensors are contiguous; splits count rows of dim 0 and may be 0. No rank may read `out` or change `sent` before `wait()`.
        `what` says in errors what was being done. It is the same on every rank.
        """


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

    def all_to_all(self, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> Pending:
        check_exchange(self, out, sent, out_splits, sent_splits, what=what)
        with torch.no_grad():
            out.copy_(sent)
        return Done()


def check_exchange(group: Group, out: Tensor, sent: Tensor, out_splits: Sequence[int], sent_splits: Sequence[int], *, what: str) -> None:
    """What one rank can see to be wrong with its own part of an exchange."""
    at = f"{what}: rank {group.rank} of {group.size} on axis {group.name!r}"
    for name, x, splits in (("out", out, out_splits), ("sent", sent, sent_splits)):
        if x.ndim < 1 or not x.is_contiguous():
            raise ValueError(
                f"{at}: expected `{name}` to be contiguous rows, got {list(x.shape)}, strides {x.stride()}; call .contiguous()"
            )
        if len(splits) != group.size or min(splits) < 0 or sum(splits) != x.shape[0]:
            raise ValueError(
                f"{at}: expected {group.size} splits of 0 or more that add up to the {x.shape[0]} rows of `{name}`, got {list(splits)}"
            )
    if out.dtype != sent.dtype or out.shape[1:] != sent.shape[1:] or out.device != sent.device:
        raise ValueError(
            f"{at}: expected rows of one shape, dtype and device, got out {describe(out)} and sent {describe(sent)}; "
            "what differs goes in an exchange of its own"
        )
    if out_splits[group.rank] != sent_splits[group.rank]:
        raise ValueError(f"{at}: sends itself {sent_splits[group.rank]} rows and expects {out_splits[group.rank]} of them")


def describe(x: Tensor) -> str:
    """The rows of a tensor in words."""
    return f"{list(x.shape[1:])} {str(x.dtype).removeprefix('torch.')} on {x.device}"
