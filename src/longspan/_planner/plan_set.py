"""`PlanSet`: plans for several masks over one layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from longspan._comm.mesh import MeshLike
from longspan._plan.layout import Layout
from longspan._plan.sharding import Tree
from longspan._planner.plan import Plan
from longspan._planner.plan_arguments import LayoutLike, Side


class PlanSet(Mapping[str, Plan]):
    """Plans for several masks over one layout, by the masks' names. Shards and positions are common to all of them.

    Example:
        >>> import longspan as ls
        >>> masks = {"full": ls.causal(), "sliding": ls.causal() & ls.sliding_window(64)}
        >>> plans = ls.plan(masks, 1000, ls.Mesh.abstract(4))
        >>> plans["sliding"].layout == plans["full"].layout
        True
    """

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self._plans = dict(plans)
        self._first = next(iter(self._plans.values()))

    def __getitem__(self, name: str) -> Plan:
        try:
            return self._plans[name]
        except KeyError:
            raise KeyError(f"no mask is called {name!r}; expected one of {', '.join(map(repr, self._plans))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def layout(self) -> Layout:
        """The common layout of queries."""
        return self._first.layout

    @property
    def local_len(self) -> int:
        """Number of tokens (queries) that this rank owns."""
        return self._first.local_len

    @property
    def kv_local_len(self) -> int:
        """Number of keys that this rank owns."""
        return self._first.kv_local_len

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's queries, as `Plan.positions`."""
        return self._first.positions

    @property
    def kv_positions(self) -> Tensor:
        """Global positions of this rank's keys, as `Plan.kv_positions`."""
        return self._first.kv_positions

    def shard(self, x: Tree, dim: int, *, side: Side | None = None) -> Tree:
        """This rank's part of a whole tensor, as `Plan.shard`."""
        return self._first.shard(x, dim, side=side)

    def unshard(self, x: Tree, dim: int, *, side: Side | None = None) -> Tree:
        """The whole tensor from every rank's part, as `Plan.unshard`."""
        return self._first.unshard(x, dim, side=side)

    def relayout(
        self, x: Tree, dim: int, *, to: LayoutLike, source: LayoutLike = "plan", heads_dim: int | None = None, side: Side = "q"
    ) -> Tree:
        """Move tokens between ranks to another layout, as `Plan.relayout`."""
        return self._first.relayout(x, dim, to=to, source=source, heads_dim=heads_dim, side=side)

    def on(self, mesh: MeshLike) -> PlanSet:
        """The same plans for another rank, or for another mesh of the same shape."""
        return PlanSet({name: plan.on(mesh) for name, plan in self._plans.items()})
