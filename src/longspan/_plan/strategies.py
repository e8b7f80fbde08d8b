"""Strategies by name: which mesh axis transposes heads (Ulysses), which one exchanges KV, and how KV moves along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from longspan._comm.mesh import Mesh

Moves = Literal["ring", "allgather", "exchange", "none"]
StrategyName = Literal["ring", "allgather", "exchange", "ulysses", "ulysses_ring", "ulysses_allgather", "ulysses_exchange", "auto"]
LayoutName = Literal["contiguous", "head_tail", "per_document", "round_robin", "auto"]

STRATEGY_NAMES: tuple[StrategyName, ...] = get_args(StrategyName)
LAYOUT_NAMES: tuple[LayoutName, ...] = get_args(LayoutName)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A strategy on a mesh.

    Attributes:
        name: The name that users give.
        head_axis: Index of the mesh axis over which heads and tokens are transposed, or None.
        kv_axis: Index of the mesh axis along which KV moves, or None.
        moves: How KV moves along the KV axis; "none" without such an axis.
    """

    name: str
    head_axis: int | None
    kv_axis: int | None
    moves: Moves

    def stages(self, ranks: int) -> int | None:
        """Number of stages along a KV axis of `ranks` ranks; None where any number is possible."""
        return {"ring": ranks - 1, "allgather": min(1, ranks - 1), "none": 0}.get(self.moves)


def strategy_for(name: str, mesh: Mesh) -> Strategy:
    """A named strategy on a mesh. "auto" is "exchange", or "ulysses_exchange" on two axes.

    Raises:
        ValueError: The name is unknown, or the mesh has another number of axes than the strategy needs.
    """
    if name not in STRATEGY_NAMES:
        raise ValueError(f"strategy: expected one of {', '.join(map(repr, STRATEGY_NAMES))} or a Schedule, got {name!r}")
    if name == "auto":
        name = "exchange" if len(mesh.axes) == 1 else "ulysses_exchange"
    axes = ", ".join(f"{axis.name!r} of size {axis.size}" for axis in mesh.axes)
    needs_two_axes = name.startswith("ulysses_")
    if needs_two_axes and len(mesh.axes) == 1:
        raise ValueError(f"strategy {name!r} needs a mesh of two axes, such as ('ulysses', 'ring'); got one axis: {axes}")
    if not needs_two_axes and len(mesh.axes) == 2:
        raise ValueError(
            f"strategy {name!r} runs over one axis; got two: {axes}. Pass the one whose ranks share a sequence, mesh[name], or use "
            "'ulysses_ring'"
        )
    if name == "ulysses":
        return Strategy(name=name, head_axis=0, kv_axis=None, moves="none")
    if not needs_two_axes:
        return one_axis_strategy(name)
    return two_axis_strategy(name.removeprefix("ulysses_"), ulysses_axis(mesh))


def one_axis_strategy(moves: str) -> Strategy:
    """KV moves along the only axis of a mesh; heads are not shared."""
    return Strategy(name=moves, head_axis=None, kv_axis=0, moves=moves)  # type: ignore[arg-type]


def two_axis_strategy(moves: str, head_axis: int) -> Strategy:
    """Heads are shared along axis `head_axis`; KV moves along the other axis."""
    return Strategy(name=f"ulysses_{moves}", head_axis=head_axis, kv_axis=1 - head_axis, moves=moves)  # type: ignore[arg-type]


def ulysses_axis(mesh: Mesh) -> int:
    """The Ulysses axis of a two-axis mesh: the one called "ulysses", else the one next to "ring", else the first."""
    names = [axis.name for axis in mesh.axes]
    if "ulysses" in names:
        return names.index("ulysses")
    return 1 - names.index("ring") if "ring" in names else 0


def ulysses_error(degree: int, heads: int, kv_heads: int) -> str | None:
    """Why `degree` ranks cannot share the heads, or None if they can.

    Each rank takes heads / degree query heads. These must form whole groups of query heads per KV head, or all belong to one group, so that
    a KV head is sent to a rank once.
    """
    if heads % degree:
        return f"{heads} query heads do not divide by a Ulysses degree of {degree}"
    heads_per_rank, heads_per_kv_head = heads // degree, heads // kv_heads
    if heads_per_rank % heads_per_kv_head and heads_per_kv_head % heads_per_rank:
        return f"{heads_per_rank} query heads per rank and {heads_per_kv_head} query heads per kv head: one must divide the other"
    return None
