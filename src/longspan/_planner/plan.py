"""Plans as users hold them: `Plan` for one mask, `PlanSet` for several masks over one layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from longspan._comm.agreement import refuse
from longspan._comm.mesh import Mesh, as_mesh
from longspan._cost.auto import Considered
from longspan._cost.clusters import cluster as cluster_of
from longspan._cost.rates import Cluster
from longspan._cost.report_data import PlanReport, report
from longspan._cost.timeline import Conditions
from longspan._engine.plan_cache import plan_cache
from longspan._plan.handle import PlanHandle
from longspan._plan.layout import Layout
from longspan._plan.plan_data import PlanData
from longspan._plan.schedule import Schedule
from longspan._plan.sharding import Tree, each_tensor, shard, unshard
from longspan._planner.request import considered_for

ClusterLike = Cluster | str | Path


class Plan(PlanHandle):
    """How one attention spans a mesh. Made by `longspan.plan`; handed to `longspan.attention(q, k, v, plan=plan)`.

    A plan is an immutable, picklable value. It can be made in a data-loader worker and sent to the process that runs it.
    """

    def __init__(self, data: PlanData, *, cluster: Cluster | None = None, considered: Considered | None = None) -> None:
        super().__init__(data)
        self._cluster, self._considered = cluster, considered

    def __reduce__(self) -> tuple[Any, ...]:
        return _plan, (self.data, self._cluster, self._considered)

    # ------------------------------------------------------------------------------------------------------------- shape and place

    @property
    def mesh(self) -> Mesh:
        """The mesh, as this rank sees it."""
        return self.data.mesh

    @property
    def layout(self) -> Layout:
        """Who owns which queries (in self-attention: which tokens)."""
        return self.data.layouts[0]

    @property
    def kv_layout(self) -> Layout:
        """Who owns which keys and values."""
        return self.data.layouts[1]

    @property
    def schedule(self) -> Schedule:
        """The KV moves of the forward pass, along the ring axis."""
        return self.data.schedule

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.data.strategy

    @property
    def digest(self) -> str:
        """A digest of the plan's contents, the same on every rank."""
        return self.data.digest

    @property
    def local_len(self) -> int:
        """Number of tokens (queries) that this rank owns."""
        return self.layout.local_len(self.mesh.rank)

    @property
    def kv_local_len(self) -> int:
        """Number of keys that this rank owns."""
        return self.kv_layout.local_len(self.mesh.rank)

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's queries, int64 [S_local], or [B, S_local] where batch rows are laid out differently."""
        return self.layout.positions(self.mesh.rank)

    @property
    def kv_positions(self) -> Tensor:
        """Global positions of this rank's keys, int64 [S_local], or [B, S_local] where batch rows are laid out differently."""
        return self.kv_layout.positions(self.mesh.rank)

    def on(self, mesh: Any) -> Plan:
        """The same plan for another rank, or for another mesh of the same shape. Nothing is planned again."""
        other = as_mesh(mesh)
        if [axis.size for axis in other.axes] != [axis.size for axis in self.mesh.axes]:
            want, got = ([axis.size for axis in m.axes] for m in (self.mesh, other))
            raise ValueError(f"plan.on: the plan was made for a mesh of shape {want}, got one of shape {got}: make a plan for that mesh")
        return Plan(replace(self.data, mesh=other), cluster=self._cluster, considered=self._considered)

    # ------------------------------------------------------------------------------------------------------------------ shards

    def shard(self, x: Tree, dim: int, *, side: Literal["q", "kv"] | None = None) -> Tree:
        """This rank's part of a whole tensor along `dim`, in local order. Differentiable.

        x may be a dict, list or tuple of tensors (nested too; other leaves stay as they are): each is sharded along `dim`. Where batch
        rows are laid out differently, dim 0 of x is the batch. `side`: "q" or "kv"; by default the one whose length x has.
        """

        def one(t: Tensor) -> Tensor:
            return shard(t, dim, self.data.layouts[self._side(t, dim, side, "shard", local=False)], self.mesh.rank)

        return each_tensor(one, x)

    def unshard(self, x: Tree, dim: int, *, side: Literal["q", "kv"] | None = None) -> Tree:
        """The whole tensor, or tensors, from every rank's part: a collective call. Its gradient is the sum of all ranks' gradients for
        this part."""

        def one(t: Tensor) -> Tensor:
            try:
                i = self._side(t, dim, side, "unshard", local=True)
            except ValueError as error:
                refuse(self.mesh, error)
            return unshard(t, dim, self.data.layouts[i], self.mesh, plan_cache.places(self.data, i, t.device))

        return each_tensor(one, x)

    def _side(self, x: Tensor, dim: int, side: str | None, what: str, *, local: bool) -> int:
        if side not in (None, "q", "kv"):
            raise ValueError(f"plan.{what}: side must be 'q', 'kv' or None, got {side!r}")
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"plan.{what}: dim {dim} is not a dim of a tensor of shape {tuple(x.shape)}")
        sizes = [self.local_len, self.kv_local_len] if local else [self.data.q_len, self.data.kv_len]
        options = [0, 1] if side is None else [0 if side == "q" else 1]
        fitting = [i for i in options if x.shape[dim] == sizes[i]]
        names = {i: f"{'q' if i == 0 else 'kv'} {sizes[i]}" for i in options}
        if not fitting:
            raise ValueError(f"plan.{what}: expected size {' or '.join(dict.fromkeys(names.values()))} in dim {dim}, got {tuple(x.shape)}")
        batch_rows = len(self.data.layouts[fitting[0]].rows)
        if batch_rows > 1 and (x.shape[0] != batch_rows or dim % x.ndim == 0):
            raise ValueError(
                f"plan.{what}: batch rows are laid out differently: dim 0 must be the batch of {batch_rows}, got {tuple(x.shape)}"
            )
        if local and len(fitting) == 2 and self.data.layouts[0] != self.data.layouts[1]:
            raise ValueError(f"plan.{what}: queries and keys have {sizes[0]} tokens here: say side='q' or side='kv'")
        return fitting[0]

    # ----------------------------------------------------------------------------------------------------------------- reports

    def report(self, cluster: ClusterLike | None = None, *, conditions: Conditions | None = None) -> PlanReport:
        """Balance, bytes, memory and predicted time on a cluster; print it.

        cluster: a name, a TOML file, a Cluster; by default the one the plan was made for, and h200 where none was given.
        """
        return report(self.data, self._cluster if cluster is None else cluster, conditions)

    def explain(self, cluster: ClusterLike | None = None) -> str:
        """Print, and return, what there was to choose from, by the cost model, and why the winner won. For a plan of one's own: what
        would have been."""
        text = self._explanation(cluster)
        print(text)
        return text

    def considered(self, cluster: ClusterLike | None = None) -> Considered | None:
        """The options of `auto` by the cost model, the best first; None where there is nothing to choose from."""
        profile = cluster_of(self._cluster if cluster is None else cluster)
        if self._considered is not None and self._considered.cluster == profile:
            return self._considered
        return considered_for(self.data, profile)

    def _explanation(self, cluster: ClusterLike | None = None) -> str:
        considered, numbers = self.considered(cluster), self.report(cluster)
        here = f"{self!r}\n  predicted: {1e3 * numbers.seconds:.3f} ms; busiest rank {numbers.balance:.3f} × the mean"
        if considered is None:
            return f"{here}\n  `auto` weighs self-attention of one layout over two ranks or more: here there was nothing to weigh"
        if self.data.heads is None:
            here += "\n  made without heads=, kv_heads= and head_dim=, so that nothing was weighed; with them `auto` would take the winner:"
        return f"{here}\n{considered}"

    def plot(self, path: str | Path | None = None, *, cluster: ClusterLike | None = None) -> Any:
        """A matplotlib figure: who computes what, the work of each rank, the timeline. Saved where a path is given."""
        from longspan._report.figure import figure

        return figure(self.report(cluster), path)

    def save_html(self, path: str | Path, *, cluster: ClusterLike | None = None) -> None:
        """The report as one HTML file that needs nothing else."""
        from longspan._report.page import save

        save(self.report(cluster), self.considered(cluster), path)

    def _repr_html_(self) -> str:
        from longspan._report.page import notebook

        return notebook(self.report(), self.considered())

    def __repr__(self) -> str:
        d = self.data
        shape = " × ".join(f"{axis.name} {axis.size}" for axis in d.mesh.axes)
        stages = f", {d.schedule.stages} stage{'s' if d.schedule.stages > 1 else ''}" if d.schedule.stages else ""
        stages += " at once" if d.schedule.joined else ""
        return f"Plan({d.mask.text}, {d.lengths} over {shape}: layout {d.layout}, {d.strategy}{stages}, rank {d.mesh.rank})"

    def __str__(self) -> str:
        from longspan._report.terminal import picture

        return f"{self!r}\n{picture(self.data)}"


def _plan(data: PlanData, cluster: Cluster | None, considered: Considered | None) -> Plan:
    return Plan(data, cluster=cluster, considered=considered)


class PlanSet(Mapping[str, Plan]):
    """Plans for several masks over one layout: `plans["sliding"]`; shards and positions are common to all."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self._plans = dict(plans)
        self._first = next(iter(self._plans.values()))

    def __getitem__(self, name: str) -> Plan:
        try:
            return self._plans[name]
        except KeyError:
            raise KeyError(f"no mask is called {name!r}; there are {', '.join(map(repr, self._plans))}") from None

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

    def shard(self, x: Tree, dim: int, *, side: Literal["q", "kv"] | None = None) -> Tree:
        """This rank's part of a whole tensor, as `Plan.shard`."""
        return self._first.shard(x, dim, side=side)

    def unshard(self, x: Tree, dim: int, *, side: Literal["q", "kv"] | None = None) -> Tree:
        """The whole tensor from every rank's part, as `Plan.unshard`."""
        return self._first.unshard(x, dim, side=side)

    def on(self, mesh: Any) -> PlanSet:
        """The same plans for another rank, or for another mesh of the same shape."""
        return PlanSet({name: plan.on(mesh) for name, plan in self._plans.items()})
