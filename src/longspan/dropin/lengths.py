"""From this rank's share of a sequence to the whole one: which length, and who owns which of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import torch

from longspan.comm.gather import all_gather_rows
from longspan.comm.mesh import Mesh
from longspan.plan.layout import Layout
from longspan.plan.layouts import contiguous, head_tail

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
        for length in [*lengths, *([layout.length] if isinstance(layout, Layout) else [])]:
            self.layout(length)

    def layout(self, length: int) -> Layout:
        """That of a whole sequence; it is known from now on."""
        if length not in self.known:
            self.known[length] = self.rule(length, self.mesh.size)
        return self.known[length]

    @property
    def told_apart(self) -> bool:
        """Whether each rank can tell the known sequences apart, by the number of tokens that it holds."""
        ranks = range(self.mesh.size)
        return bool(self.known) and not any(
            a.local_len(r) == b.local_len(r) for a, b in combinations(self.known.values(), 2) for r in ranks
        )

    def of(self, held: Sequence[tuple[str, int]], device: torch.device) -> list[Layout]:
        """Layouts of sequences, given (name, tokens held here) of each. Every rank calls this."""
        if self.told_apart:
            return [self._found(name, count, [r.local_len(self.mesh.rank) for r in self.known.values()]) for name, count in held]
        row = torch.tensor([[count for _, count in held]], dtype=torch.int64, device=device if device.type == "cuda" else "cpu")
        rows = all_gather_rows(self.mesh, row, [1] * self.mesh.size, what="agreement of all ranks, tokens held").tolist()
        return [self._summed(name, [r[i] for r in rows]) for i, (name, _) in enumerate(held)]

    def _found(self, name: str, count: int, owned: list[int]) -> Layout:
        if count in owned:
            return list(self.known.values())[owned.index(count)]
        raise ValueError(self._unknown(name, f"{count} tokens", whole=count))

    def _summed(self, name: str, counts: list[int]) -> Layout:
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
