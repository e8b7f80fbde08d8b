"""What `attn_mask` means across ranks.

Legend: B batch, H heads, Q, K whole lengths, q, k what this rank holds of them.
Accepted, each dim also of size 1, in one of three forms that is the same on every rank: "whole", [B, H, Q, K], the whole mask, the same
everywhere; "rows", [B, H, q, K], this rank's rows of it; and "keys", [B, H, 1, k], for each key that this rank holds whether it is seen
(a padding mask that was sharded like the tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan._comm.mesh import Mesh
from longspan._masks.algebra import Mask, mask_mod
from longspan._plan.layout import Layout
from longspan._plan.sharding import unshard


@dataclass(frozen=True, kw_only=True)
class Around:
    """The attention that a mask is for."""

    mesh: Mesh
    q: Layout
    kv: Layout
    batch: int
    heads: int

    def forms(self, rank: int, rows: int, columns: int) -> set[str]:
        """What a rank's mask of so many rows and columns may be; nothing where it does not fit."""
        q, k = self.q.local_len(rank), self.kv.local_len(rank)
        broadcast = columns in (1, self.kv.length)
        fits = {"whole": broadcast and rows in (1, self.q.length), "rows": broadcast and rows == q, "keys": rows == 1 and columns == k}
        return {form for form, fit in fits.items() if fit}


def four_dims(attn_mask: Any, batch: int, heads: int) -> Tensor:
    """The mask as [1 or B, 1 or H, rows, columns]: all that can be checked before the sequences are known."""
    if type(attn_mask) is not Tensor:
        raise TypeError(
            f"attn_mask: expected a plain tensor or None, got {type(attn_mask).__name__}; for a causal mask pass is_causal=True"
        )
    if attn_mask.dtype != torch.bool and not attn_mask.dtype.is_floating_point:
        raise TypeError(f"attn_mask: expected bool or floating point, got {attn_mask.dtype}")
    if attn_mask.ndim > 4:
        raise ValueError(f"attn_mask: expected at most 4 dims, got shape {tuple(attn_mask.shape)}")
    table = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
    if table.shape[0] not in (1, batch) or table.shape[1] not in (1, heads):
        raise ValueError(f"attn_mask: expected a shape that broadcasts to ({batch}, {heads}, queries, keys), got {tuple(attn_mask.shape)}")
    return table


def check_fits(table: Tensor, around: Around) -> None:
    """This rank's mask must be of one of the forms."""
    if around.forms(around.mesh.rank, *table.shape[2:]):
        return
    each, (whole_q, whole_k) = (around.batch, around.heads), (around.q.length, around.kv.length)
    q, k = (layout.local_len(around.mesh.rank) for layout in (around.q, around.kv))
    raise ValueError(
        f"attn_mask: expected a shape that broadcasts to {(*each, whole_q, whole_k)} (the whole mask, the same on every rank), to "
        f"{(*each, q, whole_k)} (this rank's rows) or to {(*each, 1, k)} (flags of this rank's keys), got {tuple(table.shape)}"
    )


def form_of(told: Sequence[tuple[int, int, Any]], around: Around) -> str:
    """The form of all ranks' masks, from each rank's rows, columns and digest of contents. The same on every rank, an error too.

    A rank that holds one query or key cannot tell by the shape alone. What may be whole on every rank is so where all hold the same.
    """
    found = set.intersection(*(around.forms(rank, rows, columns) for rank, (rows, columns, _) in enumerate(told)))
    if len(found) > 1 and any(digest != told[0][2] for _, _, digest in told):
        found -= {"whole"}
    if "whole" in found or len(found) == 1:
        return "whole" if "whole" in found else found.pop()
    held = ", ".join(f"rank {rank} {rows} × {columns}" for rank, (rows, columns, _) in enumerate(told))
    raise ValueError(
        "attn_mask: expected on every rank the whole mask, or on every rank its own queries' rows, or flags of its own keys; got masks of "
        f"{held}, which {'may be either of the latter' if found else 'differ'}: pass the whole mask"
    )


def gathered(table: Tensor, form: str, around: Around) -> Tensor:
    """The whole mask from every rank's part: a collective call, but for one that is whole."""
    if form == "whole":
        return table
    return unshard(table, 2, around.q, around.mesh) if form == "rows" else unshard(table, 3, around.kv, around.mesh)


def as_mask_mod(mask: Tensor) -> Mask:
    """A whole bool mask as a mask over whole positions."""
    kept, used = _squeezed(mask)
    if not any(used):
        seen = bool(kept)
        return mask_mod(lambda b, h, q, kv: (q >= 0) & seen)
    return mask_mod(lambda b, h, q, kv: kept[tuple(i for i, wanted in zip((b, h, q, kv), used) if wanted)])


def as_score_mod(mask: Tensor, form: str, around: Around, *, stay: bool) -> Callable[..., Tensor]:
    """A floating-point mask as what is added to scores.

    Where queries stay on their ranks, rows of this rank alone are read through a table of where they lie. All else that comes in parts
    is gathered (a collective call).
    """
    own = form == "rows" and stay
    if own:
        most = max(around.q.local_len(r) for r in range(around.mesh.size))
        mask = F.pad(mask, (0, 0, 0, most - mask.shape[2]))  # of one shape on every rank
    else:
        mask = gathered(mask, form, around)
    kept, used = _squeezed(mask)
    if not any(used):
        return lambda score, b, h, q, kv: score + kept
    if not own:
        return lambda score, b, h, q, kv: score + kept[tuple(i for i, wanted in zip((b, h, q, kv), used) if wanted)]
    positions = around.q.positions(around.mesh.rank)
    if positions.ndim > 1:
        raise ValueError("attn_mask: rows of this rank alone need a layout that is the same for every batch row; pass the whole mask")
    row = torch.zeros(around.q.length, dtype=torch.int64)
    row[positions] = torch.arange(len(positions))
    row = row.to(mask.device)
    return lambda score, b, h, q, kv: score + kept[tuple(i for i, wanted in zip((b, h, row[q], kv), used) if wanted)]


def _squeezed(mask: Tensor) -> tuple[Tensor, tuple[bool, ...]]:
    """Without dims of size 1, and which dims are left."""
    return mask.reshape([size for size in mask.shape if size != 1]), tuple(size != 1 for size in mask.shape)
