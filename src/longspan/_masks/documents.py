"""Document ids: from lengths, renumbered so that equal stays equal and intervals stay tight, and where documents begin and end."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PADDING = -1


def integer(value: Any, what: str) -> int:
    """A Python int from any integer: of numpy and a tensor of no dims too, as `operator.index` takes them, but no bool."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if is_scalar(value) and not isinstance(value, bool) and getattr(value, "dtype", None) != torch.bool:
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{what} must be an int, got {type(value).__name__}")


def is_scalar(value: Any) -> bool:
    """Whether a value is one number rather than several: numpy's numbers and tensors of no dims have ndim 0."""
    return isinstance(value, int | float) or getattr(value, "ndim", None) == 0


def integers(values: Any, what: str, shape: str, ndims: tuple[int, ...]) -> Tensor:
    """A tensor of signed integers from a tensor, an array or a list of them, of as many dims as `ndims` names; `shape` says it in words.

    Always a copy: what was given may be written to later, masks are values. From lists and arrays it lies on the CPU.
    """
    tensor = values.clone() if isinstance(values, Tensor) else torch.tensor(values, device="cpu")
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool or tensor.ndim not in ndims:
        raise ValueError(f"{what} must be {shape}, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor if tensor.dtype.is_signed else tensor.long()


def document_ids(lengths: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Ids [S] from lengths, or [B, S] from one list of lengths per batch row; rows shorter than the longest end in padding (−1)."""
    ndim = getattr(lengths, "ndim", None)
    if ndim is not None and ndim not in (1, 2):
        raise ValueError(f"documents: lengths must have shape [documents] or [B, documents], got {tuple(getattr(lengths, 'shape', ()))}")
    if ndim == 2 or (ndim is None and len(lengths) > 0 and not is_scalar(lengths[0])):
        return pad_sequence([_one_row(row) for row in lengths], batch_first=True, padding_value=PADDING)  # type: ignore[arg-type]
    return _one_row(lengths)  # type: ignore[arg-type]


def _one_row(lengths: Tensor | Sequence[int]) -> Tensor:
    n = integers(lengths, "documents: lengths", "a list of integers", (1,))
    if n.numel() == 0:
        raise ValueError("documents: lengths must be a list of integers, got none")
    if bool((n < 0).any()) or int(n.sum()) == 0:
        raise ValueError(
            f"documents: lengths must be >= 0 and not all 0, got {n.tolist() if n.numel() <= 16 else f'{int(n.min())} as the least'}"
        )
    return torch.repeat_interleave(torch.arange(len(n), dtype=torch.int32, device=n.device), n)


def renumbered(ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """(ids, real): ids numbered by first appearance, padding joined to the document before it and marked False in `real`.

    Ids then ascend wherever documents are contiguous, whatever numbers they came with, so that the ids of a tile are a narrow interval.
    `real` is None where nothing is padding. Inside a compiled region, where values are unknown, ids are kept as they are.
    """
    if torch.compiler.is_compiling():
        return ids, ids >= 0
    rows = [_renumber_row(row) for row in ids.reshape(-1, ids.shape[-1])]
    new = torch.stack([row for row, _ in rows]).reshape(ids.shape)
    if all(bool(real.all()) for _, real in rows):
        return new, None
    return new, torch.stack([real for _, real in rows]).reshape(ids.shape)


def _renumber_row(ids: Tensor) -> tuple[Tensor, Tensor]:
    real = ids >= 0
    starts = torch.ones_like(real)
    starts[1:] = ids[1:] != ids[:-1]
    run = starts.cumsum(0) - 1
    values = ids[starts]
    distinct, which = torch.unique(values, return_inverse=True)
    first = torch.full((len(distinct),), len(values), dtype=torch.int64, device=ids.device)
    first.scatter_reduce_(0, which, torch.arange(len(values), device=ids.device), "amin")
    order = torch.arange(len(values), device=ids.device)
    before = torch.where(values >= 0, order, 0).cummax(0).values
    return first[which][before][run].int(), real


def bounds(ids: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """(first, end) of each token's document, int32 like ids: it is tokens first … end − 1. Of padding S and 0, between which nothing is.

    None where some document is not one stretch of tokens. Ids and real: as `renumbered` gives them.
    """
    if torch.compiler.is_compiling():
        return None
    rows = ids.reshape(-1, ids.shape[-1])
    flags: Iterable[Tensor | None] = [None] * len(rows) if real is None else real.reshape(rows.shape)
    found = [_bounds_of_row(row, flag) for row, flag in zip(rows, flags, strict=True)]
    if any(row is None for row in found):
        return None
    first, end = (torch.stack(column).reshape(ids.shape) for column in zip(*(row for row in found if row is not None), strict=True))
    return first, end


def _bounds_of_row(ids: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor] | None:
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[1:] = ids[1:] != ids[:-1]
    if real is not None:
        starts[1:] |= real[1:] != real[:-1]
    begin = starts.nonzero()[:, 0].int()
    kept = ids[starts] if real is None else ids[starts & real]
    if len(torch.unique(kept)) != len(kept):
        return None
    run = starts.cumsum(0) - 1
    last = torch.cat([begin[1:], begin.new_full((1,), len(ids))])
    first, end = begin[run], last[run]
    return (first, end) if real is None else (torch.where(real, first, len(ids)), torch.where(real, end, 0))
