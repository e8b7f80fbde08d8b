"""`Plan`: how one attention spans a mesh, as users hold it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from longspan._comm.agreement import raising_on_all_ranks
from longspan._comm.mesh import Mesh, MeshLike, context_mesh
from longspan._cost.clusters import cluster as cluster_of
from longspan._cost.options import Considered
from longspan._cost.rates import Cluster
from longspan._cost.report_data import PlanReport, report
from longspan._cost.selected_report import SelectedReport, selected_report
from longspan._cost.timeline import Conditions
from longspan._engine.plan_cache import plan_cache
from longspan._plan.handle import PlanHandle
from longspan._plan.layout import Layout
from longspan._plan.plan_data import PlanData
from longspan._plan.pooling import gather_pooled
from longspan._plan.relayout import relayout
from longspan._plan.schedule import Schedule
from longspan._plan.sharding import Tree, each_tensor, shard, unshard
from longspan._planner.mask_work import considered_for
from longspan._planner.plan_arguments import LayoutLike, Side, check_block, check_keys, checked_relayout, checked_side

ClusterLike = Cluster | str | Path


class Plan(PlanHandle):
    """How one attention spans a mesh. Made by `longspan.plan`; passed to `longspan.attention(q, k, v, plan=plan)`.

    A plan is an immutable, picklable value. It can be made in a data-loader worker and sent to the process that runs it.

    Example:
        >>> import longspan as ls
        >>> plan = ls.plan(ls.causal(), 4096, ls.Mesh.abstract(4), layout="head_tail", strategy="ring", heads=8, head_dim=64)
        >>> plan.local_len, plan.schedule.stages
        (1024, 3)
        >>> round(plan.report().balance, 2)
        1.0
    """

    def __init__(
        self,
        data: PlanData,
        *,
        cluster: Cluster | None = None,
        conditions: Conditions | None = None,
        considered: Considered | None = None,
    ) -> None:
        super().__init__(data)
        self._cluster, self._conditions, self._considered = cluster, conditions or Conditions(), considered

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.data, self._cluster, self._conditions, self._considered)

    def __copy__(self) -> Plan:
        return self._with(self.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self._with(self.data)  # which is immutable

    def _with(self, data: PlanData) -> Plan:
        """A plan of these contents, whose mask reads the same tensors."""
        made = Plan(data, cluster=self._cluster, conditions=self._conditions, considered=self._considered)
        made.mask_sources = self.mask_sources
        return made

    # ------------------------------------------------------------------------------------------------------------- shape and place

    @property
    def mesh(self) -> Mesh:
        """The mesh, as this rank sees it."""
        return self.data.mesh

    @property
    def layout(self) -> Layout:
        """The ranks that own the queries (in self-attention: the tokens)."""
        return self.data.layouts[0]

    @property
    def kv_layout(self) -> Layout:
        """The ranks that own the keys and values."""
        return self.data.layouts[1]

    @property
    def schedule(self) -> Schedule:
        """The KV moves of the forward pass, along the KV axis."""
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

    def on(self, mesh: MeshLike) -> Plan:
        """Bind the plan to another rank, or to another mesh of the same shape. Nothing is planned again.

        Args:
            mesh: What `longspan.plan` takes as a mesh.

        Returns:
            The same plan as the rank of `mesh` sees it.

        Raises:
            ValueError: The mesh has another shape than the plan.

        Example:
            >>> import longspan as ls
            >>> plan = ls.plan(ls.causal(), 1000, ls.Mesh.abstract(4, rank=0))
            >>> plan.on(ls.Mesh.abstract(4, rank=3)).mesh.rank
            3
        """
        other = context_mesh(mesh)
        want, got = ([axis.size for axis in m.axes] for m in (self.mesh, other))
        if want != got:
            raise ValueError(f"plan.on: expected a mesh of shape {want}, for which the plan was made, got {got}: make a plan for that mesh")
        return self._with(replace(self.data, mesh=other))

    # ------------------------------------------------------------------------------------------------------------------ shards

    def shard(self, x: Tree, dim: int, *, side: Side | None = None) -> Tree:
        """Take this rank's part of a whole tensor along `dim`, in local order. Differentiable; no communication.

        Args:
            x: A tensor, or a (nested) dict, list or tuple of tensors. Other leaves are returned as they are. Where batch rows are laid out
                differently, dim 0 is the batch.
            dim: The dim of tokens.
            side: "q" or "kv"; by default the side whose length the tensor has.

        Returns:
            x with `local_len` (or `kv_local_len`) tokens in `dim`, contiguous.

        Raises:
            ValueError: A tensor's size in `dim` is not the sequence's length.
            TypeError: `dim` is not an integer.

        Example:
            >>> import torch, longspan as ls
            >>> plan = ls.plan(ls.causal(), 1000, ls.Mesh.abstract(4), layout="contiguous")
            >>> plan.shard(torch.arange(1000), 0)[:3]
            tensor([0, 1, 2])
        """

        def one(t: Tensor) -> Tensor:
            return shard(t, dim, self.data.layouts[checked_side(self.data, t, dim, side, "shard", local=False)], self.mesh.rank)

        return each_tensor(one, x)

    def unshard(self, x: Tree, dim: int, *, side: Side | None = None) -> Tree:
        """Gather the whole tensor from every rank's part. A collective call: every rank of the mesh makes it.

        The gradient of a part is the sum of all ranks' gradients for it. Differentiable any number of times.

        Args:
            x: This rank's part, or a (nested) dict, list or tuple of parts, as `shard` returns them.
            dim: The dim of tokens.
            side: "q" or "kv"; by default the side whose local length the tensor has.

        Returns:
            x with all tokens in `dim`, in the order of the sequence, the same on every rank.

        Raises:
            ValueError: A tensor's size in `dim` is not this rank's local length, or fits both sides.

        Example:
            >>> import torch, longspan as ls
            >>> from longspan.testing import virtual_world
            >>> x = torch.arange(10)
            >>> def rank(mesh):
            ...     plan = ls.plan(ls.causal(), 10, mesh)
            ...     return plan.unshard(plan.shard(x, 0), 0)
            >>> all(torch.equal(whole, x) for whole in virtual_world(2).run(rank))
            True
        """

        def one(t: Tensor) -> Tensor:
            with raising_on_all_ranks(self.mesh):
                i = checked_side(self.data, t, dim, side, "unshard", local=True)
            return unshard(t, dim, self.data.layouts[i], self.mesh, plan_cache.places(self.data, i, t.device))

        return each_tensor(one, x)

    def relayout(
        self, x: Tree, dim: int, *, to: LayoutLike, source: LayoutLike = "plan", heads_dim: int | None = None, side: Side = "q"
    ) -> Tree:
        """Move tokens between ranks to another layout. Differentiable. A collective call: every rank of the mesh makes it.

        Layers that mix neighbouring tokens (convolutions, linear attention, state-space models) need contiguous tokens, or all tokens of
        some heads; attention needs the plan's layout. Each rank receives the tokens that it owns afterwards and nothing else.

        Args:
            x: This rank's part in the layout `source`, or a (nested) dict, list or tuple of parts.
            dim: The dim of tokens.
            to: A `Layout`; "plan", the plan's own; "contiguous", one range of tokens per rank, in the order of ranks; or
                "heads", all tokens in the order of the sequence, of 1/N of the heads, heads in the order of ranks.
            source: The layout of x, in the same terms.
            heads_dim: The dim of heads, if heads move.
            side: "q" or "kv": whose layout "plan" is.

        Returns:
            x in the layout `to`, contiguous.

        Raises:
            ValueError: A tensor's size in `dim` is not this rank's number of tokens in `source`, or the ranks do not divide the heads.

        Example:
            >>> import torch, longspan as ls
            >>> from longspan.testing import virtual_world
            >>> x = torch.arange(10)
            >>> def rank(mesh):
            ...     plan = ls.plan(ls.causal(), 10, mesh, layout="head_tail")
            ...     y = plan.relayout(plan.shard(x, 0), 0, to="contiguous")
            ...     return y.tolist(), torch.equal(plan.relayout(y, 0, source="contiguous", to="plan"), plan.shard(x, 0))
            >>> virtual_world(2).run(rank)
            [([0, 1, 2, 3, 4], True), ([5, 6, 7, 8, 9], True)]
        """

        def one(t: Tensor) -> Tensor:
            with raising_on_all_ranks(self.mesh):
                move = checked_relayout(self.data, t, dim, (source, to), heads_dim, side)
            device = t.device  # not t: the moves live until the backward pass
            return relayout(t, move, lambda back: plan_cache.moves(self.data, move, device, back=back))

        return each_tensor(one, x)

    # -------------------------------------------------------------------------------------------------- keys chosen at run time

    def query_blocks(self, block: int) -> Tensor:
        """The blocks of `block` queries of which this rank owns tokens, int64 [rows], in the order in which its tokens come to them.

        With `mask=longspan.selected(indices, …, q_granularity=block)` and this plan, row i of the indices is the choice of block
        `query_blocks(block)[i]`: `indices[:, :, plan.query_blocks(block)]` of a whole sequence's indices.

        Raises:
            ValueError: `block` is less than 1, or batch rows are laid out differently.

        Example:
            >>> import longspan as ls
            >>> ls.plan(ls.causal(), 1024, ls.Mesh.abstract(4), layout="head_tail").query_blocks(128)
            tensor([0, 7])
        """
        check_block("query_blocks", block, "queries", self.layout)
        return self.layout.blocks(self.mesh.rank, block)

    def gather_pooled(self, x: Tensor, block: int, dim: int = -2) -> Tensor:
        """Means of blocks of `block` keys over all ranks, from which models choose blocks. A collective call.

        A block whose tokens belong to several ranks is the mean over all of them. Each rank sends one row per block that it owns
        tokens of; the gradient of a token is the sum over all ranks' gradients of its block's mean, divided by the block's length.
        Differentiable any number of times.

        Args:
            x: This rank's keys, index keys or other values of its KV tokens, such as k [B, G, S_local, D].
            block: Keys per block. The last block of the sequence may be shorter.
            dim: The dim of tokens.

        Returns:
            x with ceil(kv_len / block) means in `dim`, in the order of the sequence, the same on every rank.

        Raises:
            ValueError: The size of x in `dim` is not `kv_local_len`, or batch rows are laid out differently.

        Example:
            >>> import torch, longspan as ls
            >>> from longspan.testing import virtual_world
            >>> x = torch.arange(10.0)[:, None]
            >>> def rank(mesh):
            ...     plan = ls.plan(ls.causal(), 10, mesh)
            ...     return plan.gather_pooled(plan.shard(x, 0), 4).flatten().tolist()
            >>> virtual_world(2).run(rank)
            [[1.5, 5.5, 8.5], [1.5, 5.5, 8.5]]
        """
        with raising_on_all_ranks(self.mesh):
            check_block("gather_pooled", block, "keys", self.kv_layout)
            check_keys(self.data, x, dim)
        pooling = plan_cache.pooling(self.data, block)
        return gather_pooled(x, dim % x.ndim, pooling)

    # ----------------------------------------------------------------------------------------------------------------- reports

    @overload
    def report(
        self, cluster: ClusterLike | None = None, *, conditions: Conditions | None = None, density: None = None
    ) -> PlanReport: ...  # fmt: skip
    @overload
    def report(
        self, cluster: ClusterLike | None = None, *, conditions: Conditions | None = None, density: float
    ) -> SelectedReport: ...  # fmt: skip
    def report(
        self, cluster: ClusterLike | None = None, *, conditions: Conditions | None = None, density: float | None = None
    ) -> PlanReport | SelectedReport:  # fmt: skip
        """Predict balance, bytes, memory and time on a cluster, without running anything.

        Args:
            cluster: A profile's name, a TOML file or a `Cluster`; by default the one the plan was made for, "h200" if none was given.
            conditions: Slow ranks and slow links to assume; by default those the plan was made for.
            density: Predict calls with `mask=longspan.selected(…)` instead, in which each tile of 128 queries chooses this share of the
                KV tiles that the plan's mask lets it see, at random.

        Returns:
            A `PlanReport`, or a `SelectedReport` for a density; `print` shows it.

        Example:
            >>> import longspan as ls
            >>> plan = ls.plan(ls.causal(), 4096, ls.Mesh.abstract(4), layout="contiguous", strategy="ring", heads=8, head_dim=64)
            >>> round(plan.report("h100").balance, 2)
            1.75
        """
        profile = self._cluster if cluster is None else cluster
        assumed = self._conditions if conditions is None else conditions
        return report(self.data, profile, assumed) if density is None else selected_report(self.data, density, profile, assumed)

    def explain(self, cluster: ClusterLike | None = None, *, conditions: Conditions | None = None) -> str:
        """Print, and return, the options that `auto` has for this mask and mesh, and why the winner won.

        For a plan whose layout and strategy were given, the options are those that `auto` would have had.

        Args:
            cluster, conditions: As in `report`.

        Returns:
            The printed text.
        """
        text = self._explanation(cluster, conditions)
        print(text)
        return text

    def considered(self, cluster: ClusterLike | None = None, *, conditions: Conditions | None = None) -> Considered | None:
        """The options of `auto` by the cost model, the best first; None where there is nothing to choose from. Arguments as in `report`."""
        profile = cluster_of(self._cluster if cluster is None else cluster)
        assumed = self._conditions if conditions is None else conditions
        made = self._considered
        if made is not None and (made.cluster, made.conditions) == (profile, assumed):
            return made
        return considered_for(self.data, profile, assumed)

    def _explanation(self, cluster: ClusterLike | None = None, conditions: Conditions | None = None) -> str:
        considered, numbers = self.considered(cluster, conditions=conditions), self.report(cluster, conditions=conditions)
        here = f"{self!r}\n  predicted: {1e3 * numbers.seconds:.3f} ms; busiest rank {numbers.balance:.3f} × the mean"
        if considered is None:
            return f"{here}\n  nothing to choose: `auto` compares options for self-attention of one layout over two or more ranks"
        if self.data.heads is None:
            here += (
                "\n  made without heads=, kv_heads= and head_dim=, so that nothing was compared; with them `auto` would take the winner:"
            )
        return f"{here}\n{considered}"

    def plot(self, path: str | Path | None = None, *, cluster: ClusterLike | None = None) -> Any:
        """Draw who computes which tiles, the work of each rank and the predicted timeline with matplotlib.

        Args:
            path: Where to save the figure; None to only return it.
            cluster: As in `report`.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed; `pip install 'longspan[viz]'`.
        """
        from longspan._report.figure import figure

        return figure(self.report(cluster), path)

    def save_html(self, path: str | Path, *, cluster: ClusterLike | None = None) -> None:
        """Write the report as one self-contained HTML file.

        Args:
            path: The file to write.
            cluster: As in `report`.
        """
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


def _restored(data: PlanData, cluster: Cluster | None, conditions: Conditions, considered: Considered | None) -> Plan:
    return Plan(data, cluster=cluster, conditions=conditions, considered=considered)
