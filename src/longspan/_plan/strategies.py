"""Strategies by name: which mesh axis transposes heads, which one exchanges keys, and how."""

from __future__ import annotations

from dataclasses import dataclass

from longspan._comm.mesh import Mesh

MOVES = ("ring", "allgather", "exchange")
NAMES = (*MOVES, "ulysses", *(f"ulysses_{m}" for m in MOVES), "auto")
LAYOUTS = ("contiguous", "head_tail", "per_document", "round_robin", "auto")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """`ulysses`, `ring`: axes of the mesh, or None. `moves`: how keys move along the ring axis, "none" where there is none."""

    name: str
    ulysses: int | None
    ring: int | None
    moves: str

    def stages(self, ranks: int) -> int | None:
        """In how many stages keys move along a ring axis of so many ranks; None: in as many as one likes."""
        return {"ring": ranks - 1, "allgather": min(1, ranks - 1), "none": 0}.get(self.moves)


def check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"strategy: expected one of {', '.join(map(repr, NAMES))} or a Schedule, got {name!r}")


def strategy_for(name: str, mesh: Mesh) -> Strategy:
    """A named strategy on a mesh; the mesh's axes must be those it needs."""
    check_name(name)
    axes = ", ".join(f"{axis.name!r} of size {axis.size}" for axis in mesh.axes)
    two = name.startswith("ulysses_")
    if two and len(mesh.axes) == 1:
        raise ValueError(f"strategy {name!r} needs a mesh of two axes, such as ('ulysses', 'ring'); got one axis: {axes}")
    if not two and len(mesh.axes) == 2:
        raise ValueError(
            f"strategy {name!r} runs over one axis; got two: {axes}. Pass one of them (mesh[{mesh.axes[0].name!r}]) or use 'ulysses_ring'"
        )
    if name == "ulysses":
        return Strategy(name=name, ulysses=0, ring=None, moves="none")
    if not two:
        return Strategy(name=name, ulysses=None, ring=0, moves=name)
    ulysses = ulysses_axis(mesh)
    return Strategy(name=name, ulysses=ulysses, ring=1 - ulysses, moves=name.removeprefix("ulysses_"))


def ulysses_axis(mesh: Mesh) -> int:
    """Of a mesh's two axes the one called "ulysses"; else the one beside "ring"; else the first."""
    names = [axis.name for axis in mesh.axes]
    if "ulysses" in names:
        return names.index("ulysses")
    return 1 - names.index("ring") if "ring" in names else 0


def heads_refusal(degree: int, heads: int, kv_heads: int) -> str | None:
    """Why heads cannot be shared by `degree` ranks, or None if they can.

    Each rank takes heads/degree query heads. They must belong to whole groups, or all to one: a kv head is then sent to a rank once.
    """
    if heads % degree:
        return f"{heads} query heads do not divide by a Ulysses degree of {degree}"
    own, shared = heads // degree, heads // kv_heads
    if own % shared and shared % own:
        return f"{own} query heads per rank and {shared} query heads per kv head: one must divide the other"
    return None
