"""Validation of integer arguments, and document ids: from lengths, renumbered for tight intervals, and each document's bounds.

Shapes: S tokens, B batch rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PADDING = -1


def integer(value: Any, what: str) -> int:
    """Convert an integer, a numpy integer or a 0-dim integer tensor to int; raises TypeError for bools and other types."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if is_scalar(value) and not isinstance(value, bool) and getattr(value, "dtype", None) != torch.bool:
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{what} must be an int, got {type(value).__name__}")


def is_scalar(value: Any) -> bool:
    """Whether a value is a single number: a Python number, a numpy scalar, or a 0-dim array or tensor."""
    return isinstance(value, int | float) or getattr(value, "ndim", None) == 0


def integers(values: Any, what: str, shape: str, ndims: tuple[int, ...]) -> Tensor:
    """Copy a tensor, an array or nested lists of integers into a signed integer tensor; raises ValueError for other dtypes and shapes.

    Always a copy, because masks are immutable and the caller may write to the original. Lists and arrays become CPU tensors.

    Args:
        values: The integers.
        what: Name of the argument, for error messages.
        shape: Expected dtype and shape in words, for error messages.
        ndims: Accepted numbers of dims.
    """
    tensor = values.clone() if isinstance(values, Tensor) else torch.tensor(values, device="cpu")
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool or tensor.ndim not in ndims:
        raise ValueError(f"{what} must be {shape}, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor if tensor.dtype.is_signed else tensor.long()


def document_ids(lengths: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Document ids [S] int32 from lengths, or [B, S] from one list of lengths per batch row; shorter rows end in padding (−1)."""
    ndim = getattr(lengths, "ndim", None)
    if ndim is not None and ndim not in (1, 2):
        raise ValueError(f"documents: lengths must have shape [documents] or [B, documents], got {tuple(getattr(lengths, 'shape', ()))}")
    if ndim == 2 or (ndim is None and len(lengths) > 0 and not is_scalar(lengths[0])):
        return pad_sequence([_ids_of_row(row_lengths) for row_lengths in lengths], batch_first=True, padding_value=PADDING)  # type: ignore[arg-type]
    return _ids_of_row(lengths)  # type: ignore[arg-type]


def _ids_of_row(lengths: Tensor | Sequence[int]) -> Tensor:
    """Document ids [S] int32 of one batch row from its document lengths [documents]."""
    if not is_scalar(lengths) and len(lengths) == 0:
        raise ValueError("documents: lengths must be a list of integers with at least one entry, got an empty list")
    counts = integers(lengths, "documents: lengths", "a list of integers", (1,))
    if bool((counts < 0).any()) or int(counts.sum()) == 0:
        got = counts.tolist() if counts.numel() <= 16 else f"{counts.numel()} lengths with minimum {int(counts.min())}"
        raise ValueError(f"documents: lengths must be >= 0 and not all 0, got {got}")
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32, device=counts.device), counts)


def renumbered(ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ids [S] or [B, S] int32 in order of first appearance, and `valid`, bool of the same shape, False for padding.

    Contiguous documents then have ascending ids, so the ids within a tile span a narrow interval. Padding takes the id of the document
    before it. `valid` is None without padding. Inside a compiled region values are unknown, and ids are returned unchanged.
    """
    if torch.compiler.is_compiling():
        return ids, ids >= 0
    batch_rows = [_renumbered_row(row) for row in ids.reshape(-1, ids.shape[-1])]
    new_ids = torch.stack([row_ids for row_ids, _ in batch_rows]).reshape(ids.shape)
    if all(bool(valid.all()) for _, valid in batch_rows):
        return new_ids, None
    return new_ids, torch.stack([valid for _, valid in batch_rows]).reshape(ids.shape)


def _renumbered_row(ids: Tensor) -> tuple[Tensor, Tensor]:
    """New ids [S] int32 and `valid` [S] bool of one batch row: the new id of a document is the number of its first run of tokens."""
    valid = ids >= 0
    starts = torch.ones_like(valid)
    starts[1:] = ids[1:] != ids[:-1]
    run_of_token = starts.cumsum(0) - 1
    id_of_run = ids[starts]
    distinct_ids, which_id = torch.unique(id_of_run, return_inverse=True)
    runs = torch.arange(len(id_of_run), device=ids.device)
    first_run = torch.full((len(distinct_ids),), len(id_of_run), dtype=torch.int64, device=ids.device)
    first_run.scatter_reduce_(0, which_id, runs, "amin")
    last_valid_run = torch.where(id_of_run >= 0, runs, 0).cummax(0).values  # at or before each run
    return first_run[which_id][last_valid_run][run_of_token].int(), valid


def bounds(ids: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """(first, end), int32 of the shape of `ids`: the document of each token is the tokens first … end − 1.

    Padding gets (S, 0), an empty range. Returns None if some document is not contiguous, and inside a compiled region, where values are
    unknown. `ids` and `valid` are results of `renumbered`.
    """
    if torch.compiler.is_compiling():
        return None
    batch_ids = ids.reshape(-1, ids.shape[-1])
    batch_valid: Iterable[Tensor | None] = [None] * len(batch_ids) if valid is None else valid.reshape(batch_ids.shape)
    bounds_of_rows = []
    for row_ids, row_valid in zip(batch_ids, batch_valid, strict=True):
        row_bounds = _bounds_of_row(row_ids, row_valid)
        if row_bounds is None:
            return None
        bounds_of_rows.append(row_bounds)
    first, end = (torch.stack(rows).reshape(ids.shape) for rows in zip(*bounds_of_rows, strict=True))
    return first, end


def _bounds_of_row(ids: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """(first, end), each [S] int32, of one batch row; None if some document is not contiguous."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[1:] = ids[1:] != ids[:-1]
    if valid is not None:
        starts[1:] |= valid[1:] != valid[:-1]
    run_first = starts.nonzero()[:, 0].int()
    id_of_run = ids[starts] if valid is None else ids[starts & valid]
    if len(torch.unique(id_of_run)) != len(id_of_run):
        return None
    run_of_token = starts.cumsum(0) - 1
    run_end = torch.cat([run_first[1:], run_first.new_full((1,), len(ids))])
    first, end = run_first[run_of_token], run_end[run_of_token]
    return (first, end) if valid is None else (torch.where(valid, first, len(ids)), torch.where(valid, end, 0))
