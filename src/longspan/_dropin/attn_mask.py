"""`attn_mask` of a call whose ranks each hold a part of the sequence.

Legend: B batch, H heads, Q and K the whole lengths, q and k this rank's share of them.

A mask has one of three forms, the same on every rank. Every dim may also be of size 1.

    whole       [B, H, Q, K]   the whole mask, the same on every rank
    query_rows  [B, H, q, K]   the rows of this rank's queries
    kv_flags    [B, H, 1, k]   one flag or bias per local key: a padding mask that was sharded like the tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan._comm.mesh import Mesh
from longspan._masks.algebra import Mask
from longspan._masks.constructors import mask_mod
from longspan._plan.layout import Layout
from longspan._plan.sharding import unshard

MaskForm: TypeAlias = Literal["whole", "query_rows", "kv_flags"]


class MaskPart(NamedTuple):
    """One rank's attn_mask as the other ranks know it: rows, columns, and the words of a digest of its contents."""

    rows: int
    columns: int
    digest: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """Mesh, layouts and sizes of one attention call over all ranks."""

    mesh: Mesh
    q: Layout
    kv: Layout
    batch: int
    heads: int

    def forms(self, rank: int, rows: int, columns: int) -> set[MaskForm]:
        """The forms that a mask of this size on this rank may have; empty if none."""
        all_columns = columns in (1, self.kv.length)
        forms: set[MaskForm] = set()
        if all_columns and rows in (1, self.q.length):
            forms.add("whole")
        if all_columns and rows == self.q.local_len(rank):
            forms.add("query_rows")
        if rows == 1 and columns == self.kv.local_len(rank):
            forms.add("kv_flags")
        return forms


def with_four_dims(attn_mask: Any, batch: int, heads: int) -> Tensor:
    """The mask as [1 or B, 1 or H, rows, columns], with type and dtype checked. Rows and columns depend on layouts: `check_fits`."""
    if type(attn_mask) is not Tensor:
        raise TypeError(
            f"attn_mask: expected a plain tensor or None, got {type(attn_mask).__name__}; for a causal mask pass is_causal=True"
        )
    if attn_mask.dtype != torch.bool and not attn_mask.dtype.is_floating_point:
        raise TypeError(f"attn_mask: expected bool or floating point, got {attn_mask.dtype}; convert it with .bool()")
    if attn_mask.ndim > 4:
        raise ValueError(f"attn_mask: expected at most 4 dims, got shape {tuple(attn_mask.shape)}")
    mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
    if mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, heads):
        raise ValueError(f"attn_mask: expected a shape that broadcasts to ({batch}, {heads}, queries, keys), got {tuple(attn_mask.shape)}")
    return mask


def check_fits(mask: Tensor, shape: CallShape) -> None:
    """Raise ValueError if this rank's mask [B, H, rows, columns] has none of the three forms."""
    if shape.forms(shape.mesh.rank, *mask.shape[2:]):
        return
    sizes, (whole_q, whole_k) = (shape.batch, shape.heads), (shape.q.length, shape.kv.length)
    q, k = (layout.local_len(shape.mesh.rank) for layout in (shape.q, shape.kv))
    raise ValueError(
        f"attn_mask: expected a shape that broadcasts to {(*sizes, whole_q, whole_k)} (the whole mask, the same on every rank), to "
        f"{(*sizes, q, whole_k)} (the rows of this rank's queries) or to {(*sizes, 1, k)} (flags of this rank's keys), got "
        f"{tuple(mask.shape)}"
    )


def agreed_form(parts: Sequence[MaskPart], shape: CallShape) -> MaskForm:
    """The form that the masks of all ranks have. Raises ValueError on every rank if there is none or several.

    A rank that holds one query or key cannot tell the forms apart by size. A mask that may be whole on every rank is whole if its
    contents are equal on all ranks.
    """
    forms = set.intersection(*(shape.forms(rank, part.rows, part.columns) for rank, part in enumerate(parts)))
    if len(forms) > 1 and any(part.digest != parts[0].digest for part in parts):
        forms -= {"whole"}
    if "whole" in forms:
        return "whole"
    if len(forms) == 1:
        return forms.pop()
    sizes = ", ".join(f"rank {rank} {part.rows} × {part.columns}" for rank, part in enumerate(parts))
    raise ValueError(
        "attn_mask: expected on every rank the whole mask, or on every rank the rows of its queries, or on every rank flags of its keys; "
        f"got masks of {sizes}, which {'may be rows of queries or flags of keys' if forms else 'differ in form'}: pass the whole mask"
    )


def gather_mask(mask: Tensor, form: MaskForm, shape: CallShape) -> Tensor:
    """The whole mask from every rank's part. A collective call unless the mask is whole."""
    if form == "whole":
        return mask
    return unshard(mask, 2, shape.q, shape.mesh) if form == "query_rows" else unshard(mask, 3, shape.kv, shape.mesh)


def as_mask_mod(mask: Tensor) -> Mask:
    """A whole bool mask [B, H, Q, K] as a mask_mod over global positions."""
    table, used_dims = _squeezed(mask)
    if not any(used_dims):
        visible = bool(table)
        return mask_mod(lambda b, h, q, kv: (q >= 0) & visible)
    return mask_mod(lambda b, h, q, kv: table[tuple(i for i, used in zip((b, h, q, kv), used_dims) if used)])


def as_score_mod(mask: Tensor, form: MaskForm, shape: CallShape, *, queries_stay: bool) -> Callable[..., Tensor]:
    """A floating-point mask as a score_mod that adds it.

    queries_stay: whether each rank computes its own queries. Then rows of local queries are indexed by local position and are not
    gathered. In all other cases a mask in parts is gathered (a collective call).
    """
    is_local = form == "query_rows" and queries_stay
    if is_local:
        longest = max(shape.q.local_len(r) for r in range(shape.mesh.size))
        mask = F.pad(mask, (0, 0, 0, longest - mask.shape[2]))  # ranks compare the shapes of captured tensors
    else:
        mask = gather_mask(mask, form, shape)
    table, used_dims = _squeezed(mask)
    if not any(used_dims):
        return lambda score, b, h, q, kv: score + table
    if not is_local:
        return lambda score, b, h, q, kv: score + table[tuple(i for i, used in zip((b, h, q, kv), used_dims) if used)]
    positions = shape.q.positions(shape.mesh.rank)
    if positions.ndim > 1:
        raise ValueError(
            "attn_mask: expected the whole mask, because the layout differs between batch rows, got the rows of this rank's queries; "
            "pass the whole mask"
        )
    local_index = torch.zeros(shape.q.length, dtype=torch.int64)
    local_index[positions] = torch.arange(len(positions))
    local_index = local_index.to(mask.device)
    return lambda score, b, h, q, kv: score + table[tuple(i for i, used in zip((b, h, local_index[q], kv), used_dims) if used)]


def _squeezed(mask: Tensor) -> tuple[Tensor, tuple[bool, ...]]:
    """The mask without dims of size 1, and a flag per dim: whether it is left."""
    return mask.reshape([size for size in mask.shape if size != 1]), tuple(size != 1 for size in mask.shape)
