"""Layouts of whole sequences from the number of tokens that ranks hold of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from longspan._comm.gather import all_gather_rows
from longspan._comm.mesh import Mesh
from longspan._plan.layout import Layout
from longspan._plan.named_layouts import contiguous, head_tail

LayoutRule: TypeAlias = Callable[[int, int], Layout]  # (length, ranks) → Layout

NAMED_RULES: dict[str, LayoutRule] = {"contiguous": contiguous, "head_tail": head_tail}


def layout_rule(layout: str | Layout | LayoutRule) -> LayoutRule:
    """The function (length, ranks) → Layout for a name, a Layout (for its length and ranks only) or such a function."""
    if isinstance(layout, Layout):
        fixed = layout

        def fixed_layout(length: int, ranks: int) -> Layout:
            if (length, ranks) != (fixed.length, fixed.ranks):
                raise ValueError(
                    f"layout: expected a sequence of {fixed.length} tokens over {fixed.ranks} ranks, for which the layout was made, got "
                    f"{length} tokens over {ranks} ranks"
                )
            return fixed

        return fixed_layout
    if isinstance(layout, str):
        if layout not in NAMED_RULES:
            names = ", ".join(map(repr, NAMED_RULES))
            raise ValueError(
                f"layout: expected {names} or a Layout, got {layout!r}. Layouts by work or by documents depend on the mask: "
                "pass layout=longspan.plan(mask, seq_len, mesh, layout=…).layout"
            )
        return NAMED_RULES[layout]
    if not callable(layout):
        raise TypeError(f"layout: expected a name, a Layout or a function (length, ranks) -> Layout, got {type(layout).__name__}")
    return layout


def in_rank_order(counts: Sequence[int]) -> Layout:
    """The layout in which rank r owns the r-th contiguous range, of counts[r] tokens."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return Layout(length=sum(counts), rows=(tuple(((s, n),) if n else () for s, n in zip(starts, counts)),))


def chunked(length: int, ranks: int) -> Layout:
    """The layout of DTensor's Shard and of `torch.chunk`: contiguous ranges of ceil(length / ranks), the last ones shorter or empty."""
    chunk = -(-length // ranks)
    return in_rank_order([max(0, min(chunk, length - rank * chunk)) for rank in range(ranks)])


class SequenceLayouts:
    """Layouts of the sequences of one context. A sequence is recognised by the number of tokens that this rank holds of it.

    If no sequence is known, or two known sequences have equally many tokens on some rank, ranks exchange their counts at each call.
    Tokens of an unknown sequence lie in the order of ranks.
    """

    def __init__(self, mesh: Mesh, layout: str | Layout | LayoutRule, lengths: Iterable[int]) -> None:
        self.mesh, self._rule = mesh, layout_rule(layout)
        self.by_length: dict[int, Layout] = {}
        self._by_local_length: dict[int, Layout] = {}
        self._local_lengths: list[set[int]] = [set() for _ in range(mesh.size)]  # of the known sequences, per rank
        self._all_differ = True
        for length in [*lengths, *([layout.length] if isinstance(layout, Layout) else [])]:
            self.layout(length)

    def layout(self, length: int) -> Layout:
        """The layout of a whole sequence, which is known from now on."""
        return self.by_length[length] if length in self.by_length else self.add(self._rule(length, self.mesh.size))

    def add(self, layout: Layout) -> Layout:
        """Make a layout known. Returns the layout of sequences of its length: another one if that was known before."""
        if layout.length in self.by_length:
            return self.by_length[layout.length]
        self.by_length[layout.length] = layout
        for rank, local_lengths in enumerate(self._local_lengths):
            count = layout.local_len(rank)
            self._all_differ &= count not in local_lengths
            local_lengths.add(count)
        self._by_local_length.setdefault(layout.local_len(self.mesh.rank), layout)
        return layout

    @property
    def distinguishable(self) -> bool:
        """Whether every rank can tell the known sequences apart by the number of tokens that it holds."""
        return bool(self.by_length) and self._all_differ

    def lookup(self, name: str, count: int, device: torch.device) -> Layout:
        """The layout of the sequence of which this rank holds `count` tokens. A collective call unless sequences are distinguishable."""
        if self.distinguishable:
            return self.of_local_length(name, count)
        counts = all_gather_ints(self.mesh, [count], device, "tokens held")
        return self.of_counts(name, [row[0] for row in counts])

    def of_local_length(self, name: str, count: int) -> Layout:
        """The layout of the sequence of which this rank holds `count` tokens, if sequences are distinguishable."""
        if count not in self._by_local_length:
            raise ValueError(self._unknown(name, f"{count} tokens", count))
        return self._by_local_length[count]

    def of_counts(self, name: str, counts: list[int]) -> Layout:
        """The layout of the sequence of which rank r holds counts[r] tokens. Raises on every rank or on none."""
        if not self.by_length:
            return in_rank_order(counts)
        layout = self.by_length.get(sum(counts))
        if layout is None or [layout.local_len(r) for r in range(self.mesh.size)] != counts:
            raise ValueError(self._unknown(name, f"{counts} tokens on the ranks", counts[self.mesh.rank]))
        return layout

    def _unknown(self, name: str, got: str, local_length: int) -> str:
        rank = self.mesh.rank
        known = ", ".join(f"{layout.local_len(rank)} of {length}" for length, layout in self.by_length.items())
        hint = ", the length of a whole sequence: shard the tensor" if local_length in self.by_length else ""
        return (
            f"{name}: expected a tensor of a sequence of this context, of which rank {rank} holds {known} tokens, got {got}{hint}. List "
            "the tensors that it was made from in buffers=, or name its whole length in seq_len="
        )


def all_gather_ints(mesh: Mesh, row: list[int], device: torch.device | str, what: str) -> list[list[int]]:
    """Every rank's numbers on every rank: a small collective call."""
    sent = torch.tensor([row], dtype=torch.int64, device=device if torch.device(device).type == "cuda" else "cpu")
    rows: list[list[int]] = all_gather_rows(mesh, sent, [1] * mesh.size, what=f"agreement of all ranks, {what}").tolist()
    return rows
