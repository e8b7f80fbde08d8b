"""What ranks tell each other before a call: whether one refuses it, how many tokens each holds, what part of a mask.

They talk in the first call, where sequences cannot be told apart by what a rank holds of them, and where each rank may hold its part of
attn_mask: one small exchange of a fixed form. Nothing that a rank remembers decides whether they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan._comm.agreement import refuse
from longspan._dropin.attn_mask import Around, check_fits, form_of
from longspan._dropin.global_layout import Lengths, tell
from longspan._dropin.mask_keys import Asked
from longspan._engine.checks import refuse_transforms
from longspan._plan.layout import Layout

NO_SIZE = (-1, -1)
WORDS = 4  # int64 words of a digest


@dataclass(frozen=True, kw_only=True)
class Given:
    """A call that this rank found right: q, k, v of four dims, and its mask, as what was asked for or as a table of four dims.

    size: of the mask, queries and keys, where it has one. digest: of the table, where it matters whether ranks hold the same.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    asked: Asked | None = None
    table: Tensor | None = None
    size: tuple[int, int] = NO_SIZE
    digest: str = ""

    @property
    def held(self) -> list[tuple[str, int]]:
        return [("query", self.q.shape[2]), ("key", self.k.shape[2])]

    def row(self) -> list[int]:
        """The call in numbers, as the other ranks get it."""
        words = (bytes.fromhex(self.digest[16 * i : 16 * i + 16]) for i in range(WORDS))
        return [*(n for _, n in self.held), *self.size, *(int.from_bytes(w, "little", signed=True) for w in words)]


@dataclass(frozen=True, kw_only=True)
class Met:
    """A call with the layouts of its queries and keys.

    form: of its table, on all ranks. told: each rank's rows, columns and digest of it, where they talked.
    """

    given: Given
    layouts: list[Layout]
    around: Around
    form: str = "whole"
    told: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


def meet(lengths: Lengths, query: Any, check: Callable[[], Given], *, first: bool) -> Met:
    """The call that `check` gives, on all ranks. What one refuses, all learn."""
    mesh = lengths.mesh
    layouts = None
    try:
        refuse_transforms(planned=True)
        given = check()
        if lengths.told_apart:
            layouts = [lengths.found(name, count) for name, count in given.held]
            _check_size(_around(lengths, given, layouts), given, {mesh.rank: given.size})
    except (ValueError, TypeError, RuntimeError) as error:
        refuse(mesh, error)
    apart = given.table is not None and layouts is not None and _in_parts(_around(lengths, given, layouts), given.size)
    if mesh.size == 1 or not (first or apart or not lengths.told_apart):
        layouts = layouts or [lengths.summed(name, [count]) for name, count in given.held]
        around = _around(lengths, given, layouts)
        _check_size(around, given, {mesh.rank: given.size})
        return Met(given=given, layouts=layouts, around=around)
    device = query.device if isinstance(query, Tensor) and query.is_cuda else torch.device("cpu")
    rows = tell(mesh, given.row(), device, "what each was given")
    # From here on all ranks know the same: where one refuses, all do.
    layouts = layouts or [lengths.summed(name, [row[i] for row in rows]) for i, (name, _) in enumerate(given.held)]
    around = _around(lengths, given, layouts)
    told = tuple((row[2], row[3], tuple(row[4:])) for row in rows)
    _check_size(around, given, {rank: (r, c) for rank, (r, c, _) in enumerate(told)})
    form = "whole" if given.table is None else form_of(told, around)
    return Met(given=given, layouts=layouts, around=around, form=form, told=told)


def _around(lengths: Lengths, given: Given, layouts: list[Layout]) -> Around:
    return Around(mesh=lengths.mesh, q=layouts[0], kv=layouts[1], batch=given.q.shape[0], heads=given.q.shape[1])


def _in_parts(around: Around, size: tuple[int, int]) -> bool:
    """Whether ranks must ask each other what their masks are: where this one is not whole, and where some rank could not tell."""
    ranks = range(around.mesh.size)
    if any(layout.local_len(r) in (0, 1, layout.length) for layout in (around.q, around.kv) for r in ranks):
        return True
    return around.forms(around.mesh.rank, *size) != {"whole"}


def _check_size(around: Around, given: Given, sizes: dict[int, tuple[int, int]]) -> None:
    """A table must fit as some form; a BlockMask must be for the whole sequence, on each of these ranks."""
    if given.table is not None:
        check_fits(given.table, around)
        return
    whole = (around.q.length, around.kv.length)
    for rank, got in sizes.items():
        if got not in (NO_SIZE, whole):
            raise ValueError(
                f"block_mask: expected one over the whole sequence, {whole[0]} queries by {whole[1]} keys, got {got[0]} by {got[1]} on "
                f"rank {rank}; make it with create_block_mask(mask_mod, B, H, {whole[0]}, {whole[1]}), the same on every rank"
            )
