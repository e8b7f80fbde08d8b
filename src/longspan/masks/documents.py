"""Document ids: from lengths, and renumbered so that equal stays equal and intervals stay tight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PADDING = -1


def document_ids(lengths: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Ids [S] from lengths, or [B, S] from one list of lengths per batch row; rows shorter than the longest end in padding (−1)."""
    nested = lengths.ndim == 2 if isinstance(lengths, Tensor) else len(lengths) > 0 and not isinstance(lengths[0], int | Tensor)
    if isinstance(lengths, Tensor) and lengths.ndim not in (1, 2):
        raise ValueError(f"documents: lengths must have shape [documents] or [B, documents], got {tuple(lengths.shape)}")
    if nested:
        return pad_sequence([_one_row(row) for row in lengths], batch_first=True, padding_value=PADDING)  # type: ignore[arg-type]
    return _one_row(lengths)  # type: ignore[arg-type]


def _one_row(lengths: Tensor | Sequence[int]) -> Tensor:
    n = torch.as_tensor(lengths)
    if n.ndim != 1 or n.numel() == 0 or n.dtype.is_floating_point or n.dtype == torch.bool:
        raise ValueError(f"documents: lengths must be a list of integers, got {n.dtype} of shape {tuple(n.shape)}")
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
