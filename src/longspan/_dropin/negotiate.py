"""Negotiation: the ranks' views of one attention call made into one.

A rank knows its own tensors and its own part of attn_mask. That is enough if it recognises the sequences by their local lengths and its
mask is whole. Otherwise ranks exchange one row of numbers each. Shapes alone decide whether they do, never a rank's history, so that all
ranks do or none. Every later step of the call begins with an agreement of all ranks (`_comm/agreement.py`): a rank that refuses its own
arguments takes part in it, and the others raise an error that quotes the refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan._comm.agreement import raise_on_all_ranks
from longspan._dropin.attn_mask import CallShape, MaskForm, MaskPart, agreed_form, check_fits
from longspan._dropin.global_layout import SequenceLayouts, all_gather_ints
from longspan._dropin.mask_keys import MaskRequest
from longspan._engine.checks import reject_transforms
from longspan._plan.layout import Layout

NO_SIZE = (-1, -1)
DIGEST_WORDS = 4  # of int64


@dataclass(frozen=True, kw_only=True)
class LocalCall:
    """One rank's view of a call: q, k, v [B, H, S_local, D], and either `mask` or `attn_mask`.

    mask:      a mask over whole sequences.
    attn_mask: this rank's tensor of four dims.
    mask_size: (queries, keys) of the BlockMask or attn_mask, if it has a size.
    digest:    of attn_mask's contents, if ranks have to compare them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: MaskRequest | None = None
    attn_mask: Tensor | None = None
    mask_size: tuple[int, int] = NO_SIZE
    digest: str = ""

    @property
    def local_lengths(self) -> list[tuple[str, int]]:
        return [("query", self.q.shape[2]), ("key", self.k.shape[2])]

    def as_numbers(self) -> list[int]:
        """Local lengths, mask size and digest, for the other ranks."""
        words = (bytes.fromhex(self.digest[16 * i : 16 * i + 16]) for i in range(DIGEST_WORDS))
        return [*(n for _, n in self.local_lengths), *self.mask_size, *(int.from_bytes(w, "little", signed=True) for w in words)]


@dataclass(frozen=True, kw_only=True)
class AgreedCall:
    """A call as all ranks see it.

    form:  of attn_mask, on all ranks.
    parts: each rank's attn_mask, if they exchanged them.
    """

    local: LocalCall
    shape: CallShape
    form: MaskForm = "whole"
    parts: tuple[MaskPart, ...] = ()


def negotiate(sequences: SequenceLayouts, query: Any, check: Callable[[], LocalCall]) -> AgreedCall:
    """The call that `check` returns or refuses, agreed by all ranks. A collective call if shapes do not say enough.

    `query` is the user's argument: its device carries the exchange.
    """
    mesh = sequences.mesh
    shape = None
    try:
        reject_transforms(planned=True)
        local = check()
        if mesh.size == 1:
            shape = _shape(sequences, local, [sequences.of_counts(name, [n]) for name, n in local.local_lengths])
        elif sequences.distinguishable:
            shape = _shape(sequences, local, [sequences.of_local_length(name, n) for name, n in local.local_lengths])
        if shape is not None:
            _check_mask_size(shape, local, {mesh.rank: local.mask_size})
    except (ValueError, TypeError, RuntimeError) as error:
        raise_on_all_ranks(mesh, error)
    if shape is not None and (mesh.size == 1 or local.attn_mask is None or _is_surely_whole(shape, local.mask_size)):
        return AgreedCall(local=local, shape=shape)
    device = query.device if isinstance(query, Tensor) and query.is_cuda else torch.device("cpu")
    rows = all_gather_ints(mesh, local.as_numbers(), device, "arguments of each rank")
    # All ranks hold the same rows: from here on all raise or none does.
    if shape is None:
        counts = [[row[i] for row in rows] for i in (0, 1)]
        layouts = [sequences.of_counts(name, count) for (name, _), count in zip(local.local_lengths, counts, strict=True)]
        shape = _shape(sequences, local, layouts)
    parts = tuple(MaskPart(row[2], row[3], tuple(row[4:])) for row in rows)
    _check_mask_size(shape, local, {rank: (part.rows, part.columns) for rank, part in enumerate(parts)})
    form = "whole" if local.attn_mask is None else agreed_form(parts, shape)
    return AgreedCall(local=local, shape=shape, form=form, parts=parts)


def _shape(sequences: SequenceLayouts, local: LocalCall, layouts: list[Layout]) -> CallShape:
    return CallShape(mesh=sequences.mesh, q=layouts[0], kv=layouts[1], batch=local.q.shape[0], heads=local.q.shape[1])


def _is_surely_whole(shape: CallShape, size: tuple[int, int]) -> bool:
    """Whether an attn_mask of this size can only be the whole mask, on this rank and, judging by the layouts, on every other."""
    ranks = range(shape.mesh.size)
    if any(layout.local_len(r) in (0, 1, layout.length) for layout in (shape.q, shape.kv) for r in ranks):
        return False
    return shape.forms(shape.mesh.rank, *size) == {"whole"}


def _check_mask_size(shape: CallShape, local: LocalCall, sizes: dict[int, tuple[int, int]]) -> None:
    """Raise ValueError if attn_mask has none of its forms, or if the BlockMask of one of these ranks is not over the whole sequence."""
    if local.attn_mask is not None:
        check_fits(local.attn_mask, shape)
        return
    whole = (shape.q.length, shape.kv.length)
    for rank, got in sizes.items():
        if got not in (NO_SIZE, whole):
            raise ValueError(
                f"block_mask: expected one over the whole sequence, {whole[0]} queries by {whole[1]} keys, got {got[0]} by {got[1]} on "
                f"rank {rank}; make it with create_block_mask(mask_mod, B, H, {whole[0]}, {whole[1]}), the same on every rank"
            )
