"""From this rank's share of a sequence to the whole one: which length, and who owns which of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from longspan._comm.gather import all_gather_rows
from longspan._comm.mesh import Mesh
from longspan._plan.layout import Layout
from longspan._plan.named_layouts import contiguous, head_tail

BY_LENGTH: dict[str, Callable[[int, int], Layout]] = {"contiguous": contiguous, "head_tail": head_tail}


def rule_of(layout: str | Layout | Callable[[int, int], Layout]) -> Callable[[int, int], Layout]:
    """(length, ranks) → Layout. A name, a Layout (for sequences of its length alone) or such a function."""
    if isinstance(layout, Layout):
        given = layout

        def only(length: int, ranks: int) -> Layout:
            if (length, ranks) != (given.length, given.ranks):
                raise ValueError(
                    f"layout: the given one is for {given.length} tokens over {given.ranks} ranks, got a sequence of {length} over {ranks}"
                )
            return given

        return only
    if isinstance(layout, str):
        if layout not in BY_LENGTH:
            names = ", ".join(map(repr, BY_LENGTH))
            raise ValueError(
                f"layout: expected {names} or a Layout, got {layout!r}. Layouts by work or by documents need the mask: "
                "give that of a plan, layout=longspan.plan(mask, seq_len, mesh, layout=…).layout"
            )
        return BY_LENGTH[layout]
    if not callable(layout):
        raise TypeError(f"layout: expected a name, a Layout or a function (length, ranks) -> Layout, got {type(layout).__name__}")
    return layout


def in_rank_order(counts: Sequence[int]) -> Layout:
    """Rank r owns the r-th stretch of tokens, counts[r] of them."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return Layout(length=sum(counts), rows=(tuple(((s, n),) if n else () for s, n in zip(starts, counts)),))


def chunked(length: int, ranks: int) -> Layout:
    """What DTensor's Shard and `torch.chunk` do: equal stretches, rounded up, in the order of ranks, the last ones shorter or empty."""
    chunk = -(-length // ranks)
    return in_rank_order([max(0, min(chunk, length - rank * chunk)) for rank in range(ranks)])


class Lengths:
    """The sequences of one context. Known ones are told apart by the tokens that a rank holds of them.

    Where none is known, or where two cannot be told apart on some rank, ranks tell each other how many tokens they hold: a small
    exchange at each call. Tokens of an unknown sequence lie in the order of ranks.
    """

    def __init__(self, mesh: Mesh, layout: str | Layout | Callable[[int, int], Layout], lengths: Iterable[int]) -> None:
        self.mesh, self.rule = mesh, rule_of(layout)
        self.known: dict[int, Layout] = {}
        self._held: list[set[int]] = [set() for _ in range(mesh.size)]  # numbers of tokens that each rank holds of known sequences
        self._here: dict[int, Layout] = {}  # known sequences by what this rank holds of them
        self._apart = True
        for length in [*lengths, *([layout.length] if isinstance(layout, Layout) else [])]:
            self.layout(length)

    def layout(self, length: int) -> Layout:
        """That of a whole sequence; it is known from now on."""
        return self.known[length] if length in self.known else self.add(self.rule(length, self.mesh.size))

    def add(self, layout: Layout) -> Layout:
        """The layout of sequences of its length, which is known from now on: this one, unless there was another."""
        if layout.length in self.known:
            return self.known[layout.length]
        self.known[layout.length] = layout
        for rank, held in enumerate(self._held):
            count = layout.local_len(rank)
            self._apart &= count not in held
            held.add(count)
        self._here.setdefault(layout.local_len(self.mesh.rank), layout)
        return layout

    @property
    def told_apart(self) -> bool:
        """Whether each rank can tell the known sequences apart, by the number of tokens that it holds."""
        return bool(self.known) and self._apart

    def of(self, held: Sequence[tuple[str, int]], device: torch.device) -> list[Layout]:
        """Layouts of sequences, given (name, tokens held here) of each. Every rank calls this."""
        if self.told_apart:
            return [self.found(name, count) for name, count in held]
        rows = tell(self.mesh, [count for _, count in held], device, "tokens held")
        return [self.summed(name, [row[i] for row in rows]) for i, (name, _) in enumerate(held)]

    def found(self, name: str, count: int) -> Layout:
        """The sequence of which this rank holds `count` tokens, where ranks can tell sequences apart."""
        if count not in self._here:
            raise ValueError(self._unknown(name, f"{count} tokens", whole=count))
        return self._here[count]

    def summed(self, name: str, counts: list[int]) -> Layout:
        """The sequence of which each rank holds so many tokens. Where one refuses, all do."""
        if not self.known:
            return in_rank_order(counts)
        layout = self.known.get(sum(counts))
        if layout is None or [layout.local_len(r) for r in range(self.mesh.size)] != counts:
            raise ValueError(self._unknown(name, f"{counts} tokens on the ranks", whole=counts[self.mesh.rank]))
        return layout

    def _unknown(self, name: str, got: str, *, whole: int) -> str:
        rank = self.mesh.rank
        known = ", ".join(f"{layout.local_len(rank)} of {length}" for length, layout in self.known.items())
        hint = ": it has a whole sequence's length and must be sharded" if whole in self.known else ""
        return (
            f"{name}: in this context rank {rank} holds {known} tokens, got {got}{hint}. List the tensors that it was made from in "
            "buffers=, or name its whole length in seq_len="
        )


def tell(mesh: Mesh, row: list[int], device: torch.device | str, what: str) -> list[list[int]]:
    """Every rank's numbers, on every rank: a small collective call."""
    sent = torch.tensor([row], dtype=torch.int64, device=device if torch.device(device).type == "cuda" else "cpu")
    found: list[list[int]] = all_gather_rows(mesh, sent, [1] * mesh.size, what=f"agreement of all ranks, {what}").tolist()
    return found
