"""Plans: who owns which tokens and what moves when, for one mask over one mesh. Plain values: immutable, picklable, the same on every rank.

A plan knows the mesh's shape and this rank's place in it, and the names of its groups; no communicator. Making one takes no
communication, and it can be made where there is no process group at all, such as in a data loader's worker.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longspan._comm.mesh import Mesh, as_mesh
from longspan._cost.rates import Cluster
from longspan._masks.block_table import BlockTable
from longspan._masks.classify import classify
from longspan._masks.program import Program
from longspan._plan.digest import digest_of
from longspan._plan.layout import Layout
from longspan._plan.schedule import Reads, Schedule, only_read
from longspan._plan.sharding import Tree, each_tensor, places, shard, unshard
from longspan._plan.tile_grid import Side, reads
from longspan._torch_modes import settled


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedMask:
    """A mask as a plan keeps it: its program, and a copy of the tensors it captured, on the host."""

    text: str
    program: Program | None
    captured: tuple[Tensor, ...] = ()

    @property
    def per_batch(self) -> bool:
        return self.program is not None and self.program.uses_batch

    @property
    def per_head(self) -> bool:
        return self.program is not None and self.program.uses_head


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanData:
    """All that a plan says. Sizes that were not given are None and not checked.

    Over the mesh's axis `ulysses` heads and tokens are transposed; the ranks along axis `ring` then each hold the tokens of a whole
    Ulysses group (`inner` layouts) and exchange keys as the schedule says. Either may be None: no such axis.
    """

    mask: PlannedMask
    q_len: int
    kv_len: int
    mesh: Mesh
    layouts: tuple[Layout, Layout]  # of queries and of keys, over all ranks of the mesh
    schedule: Schedule
    ulysses: int | None = None
    ring: int | None = None
    layout: str
    strategy: str
    block: int
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    grad_reduce_dtype: torch.dtype | None = None
    cluster: Cluster | None = None  # the profile that was given; reports are for it unless told otherwise
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    @property
    def degree(self) -> int:
        """How many ranks share the heads of one attention."""
        return 1 if self.ulysses is None else self.mesh.axes[self.ulysses].size

    @property
    def rows(self) -> int:
        """Batch rows that are laid out differently; 1 where all are alike."""
        return max(len(layout.rows) for layout in self.layouts)

    @property
    def groups(self) -> Tensor:
        """The mesh's ranks [ring, degree]: a line for each rank of the ring axis, its Ulysses group."""
        return ulysses_groups(self.mesh, self.ulysses)

    @property
    def ring_of(self) -> Tensor:
        """For each rank of the mesh its place along the ring axis [N]."""
        groups = self.groups
        return torch.empty(self.mesh.size, dtype=torch.int64).index_copy_(
            0, groups.reshape(-1), torch.arange(len(groups)).repeat_interleave(groups.shape[1])
        )

    @property
    def tokens(self) -> Tensor:
        """Tokens of queries and of keys that each rank of the mesh owns, of one batch row [2, N]."""
        return torch.tensor([[layout.local_len(r) for r in range(self.mesh.size)] for layout in self.layouts])

    @property
    def lengths(self) -> str:
        """In words: 4096 tokens, or 256 × 4096 where queries and keys differ."""
        return f"{self.q_len} tokens" if self.q_len == self.kv_len else f"{self.q_len} × {self.kv_len} tokens"

    @cached_property
    def inner(self) -> tuple[Layout, Layout]:
        """Layouts over the ring axis: what a rank holds after the transpose."""
        return tuple(inner_layout(layout, self.mesh, self.ulysses) for layout in self.layouts)  # type: ignore[return-value]

    @property
    def returns(self) -> Schedule:
        """What backward brings again and sends gradients home of: of what the schedule moves, what its receiver reads."""
        if self.schedule.read or not self.schedule.stages:
            return self.schedule
        found: Schedule = self._keep(("returns", self.schedule.joined), lambda: only_read(self.schedule, self.reads()))
        return found

    def reads(self) -> list[Reads]:
        """Which keys each rank of the ring axis reads, for each batch row that is laid out differently."""
        rows, ranks, block = range(self.rows), self.inner[0].ranks, self.block
        return [
            Reads(keys=self.side(1, block, row), wanted=reads(self.table((block, block), row), self.side(0, block, row), ranks))
            for row in rows
        ]

    def side(self, which: int, block: int, row: int) -> Side:
        """Queries (0) or keys (1) of a batch row in tiles."""
        which = 0 if self.layouts[0] is self.layouts[1] else which
        return self._keep(("side", which, block, row), lambda: Side.of(self.inner[which], block, batch_row=row))

    def table(self, block: tuple[int, int], row: int) -> BlockTable:
        """The block table of a batch row (of all, where they are laid out alike), over the tiles of `side`."""

        def make() -> BlockTable:
            return classify(
                self.mask.program,
                self.mask.captured,
                self.q_len,
                self.kv_len,
                block=block,
                batch=1 if self.rows > 1 else self.batch or 1,
                heads=self.heads or 1,
                edges=(self.side(0, block[0], row).edges, self.side(1, block[1], row).edges),
                first_batch=row if self.rows > 1 else 0,
            )

        return self._keep(("table", block, row), make)

    def _keep(self, key: Any, make: Any) -> Any:
        with self._lock:
            if key not in self._kept:
                with settled():
                    self._kept[key] = make()
            return self._kept[key]

    @cached_property
    def digest(self) -> str:
        """What ranks compare: all but this rank's own place, and the cluster: what it decided is compared."""
        m = self.mask
        sizes = (self.q_len, self.kv_len, self.batch, self.heads, self.kv_heads, self.head_dim, self.block, self.grad_reduce_dtype)
        texts = [str(sizes), str(self.mesh.axes), str((self.ulysses, self.ring)), m.program.key if m.program else "", self.schedule.digest]
        return digest_of([*texts, *(layout.digest for layout in self.layouts), *m.captured])

    def __getstate__(self) -> dict[str, Any]:
        """Tables travel along; what is derived for this rank and its device does not."""
        kept = {key: value for key, value in self._kept.items() if key[0] in ("side", "table")}
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_kept", "inner")} | {"_kept": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())


def inner_layout(layout: Layout, mesh: Mesh, ulysses: int | None) -> Layout:
    """Each Ulysses group as one rank of the ring axis."""
    if ulysses is None:
        return layout
    return layout.merged(ulysses_groups(mesh, ulysses).tolist())


def ulysses_groups(mesh: Mesh, ulysses: int | None) -> Tensor:
    """Ranks of the mesh that share the heads, group by group [groups, members]; groups of one where nobody does."""
    if ulysses is None:
        return torch.arange(mesh.size)[:, None]
    sizes = [axis.size for axis in mesh.axes]
    return torch.arange(mesh.size).view(sizes).movedim(ulysses, -1).reshape(-1, sizes[ulysses])


_handles = itertools.count(1)
live: weakref.WeakValueDictionary[int, PlanData] = weakref.WeakValueDictionary()


class Plan:
    """How one attention spans a mesh. Made by `longspan.plan`; handed to `longspan.attention(q, k, v, plan=plan)`."""

    def __init__(self, data: PlanData) -> None:
        self.data = data
        handle = next(_handles)
        live[handle] = data
        # The handle is a tensor: compiled code takes it as an input like any other and is not compiled anew for another plan.
        # While anything holds this tensor, an autograd graph for instance, the plan behind its number lives.
        with settled():
            self.token = torch.tensor(handle)
        self.token.plan_data = data  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.data,)

    # ------------------------------------------------------------------------------------------------------------- shape and place

    @property
    def mesh(self) -> Mesh:
        return self.data.mesh

    @property
    def layout(self) -> Layout:
        """Who owns which queries (in self-attention: which tokens)."""
        return self.data.layouts[0]

    @property
    def kv_layout(self) -> Layout:
        return self.data.layouts[1]

    @property
    def schedule(self) -> Schedule:
        return self.data.schedule

    @property
    def strategy(self) -> str:
        return self.data.strategy

    @property
    def digest(self) -> str:
        return self.data.digest

    @property
    def local_len(self) -> int:
        """Tokens (queries) that this rank owns."""
        return self.layout.local_len(self.mesh.rank)

    @property
    def kv_local_len(self) -> int:
        return self.kv_layout.local_len(self.mesh.rank)

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's queries, int64 [S_local], or [B, S_local] where batch rows are laid out differently."""
        return self.layout.positions(self.mesh.rank)

    @property
    def kv_positions(self) -> Tensor:
        return self.kv_layout.positions(self.mesh.rank)

    def on(self, mesh: Any) -> Plan:
        """The same plan for another rank, or for a mesh of the same shape: nothing is planned again."""
        found = as_mesh(mesh)
        if [axis.size for axis in found.axes] != [axis.size for axis in self.mesh.axes]:
            want, got = ([axis.size for axis in m.axes] for m in (self.mesh, found))
            raise ValueError(f"plan.on: the plan was made for a mesh of shape {want}, got one of shape {got}: make a plan for that mesh")
        kept = {key: value for key, value in self.data._kept.items() if key[0] in ("side", "table")}
        return Plan(replace(self.data, mesh=found, _kept=kept, _lock=threading.RLock()))

    # ------------------------------------------------------------------------------------------------------------------ shards

    def shard(self, x: Tree, dim: int, *, side: str | None = None) -> Tree:
        """This rank's part of a whole tensor along `dim`, in local order. Differentiable.

        x may be a dict, list or tuple of tensors (nested too; other leaves stay as they are): each is sharded along `dim`. Where batch
        rows are laid out differently, dim 0 of x is the batch. `side`: "q" or "kv"; by default the one whose length x has.
        """

        def one(t: Tensor) -> Tensor:
            return shard(t, dim, self.data.layouts[self._side(t, dim, side, "shard", local=False)], self.mesh.rank)

        return each_tensor(one, x)

    def unshard(self, x: Tree, dim: int, *, side: str | None = None) -> Tree:
        """The whole tensor, or tensors, from every rank's part: a collective call. Its gradient is the sum of all ranks' gradients for
        this part."""

        def one(t: Tensor) -> Tensor:
            i = self._side(t, dim, side, "unshard", local=True)

            def kept(layout: Layout, device: torch.device) -> Tensor:
                found: Tensor = self.data._keep(("places", i, device), lambda: places(layout, device))
                return found

            return unshard(t, dim, self.data.layouts[i], self.mesh, kept)

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
        rows = len(self.data.layouts[fitting[0]].rows)
        if rows > 1 and (x.shape[0] != rows or dim % x.ndim == 0):
            raise ValueError(f"plan.{what}: batch rows are laid out differently: dim 0 must be the batch of {rows}, got {tuple(x.shape)}")
        if local and len(fitting) == 2 and self.data.layouts[0] != self.data.layouts[1]:
            raise ValueError(f"plan.{what}: queries and keys have {sizes[0]} tokens here: say side='q' or side='kv'")
        return fitting[0]

    def report(self, cluster: Any = None) -> Any:
        """Balance, bytes, memory and predicted time on a cluster; print it.

        cluster: a name, a TOML file, a Cluster; by default the one the plan was made for, and h200 where none was given.
        """
        from longspan._cost.report_data import report

        return report(self.data, cluster)

    def explain(self, cluster: Any = None) -> str:
        """Print, and return, what there was to choose from, by the cost model, and why the winner won. For a plan of one's own: what
        would have been."""
        text = self._explanation(cluster)
        print(text)
        return text

    def _explanation(self, cluster: Any = None) -> str:
        from longspan._cost.report_data import cluster_for
        from longspan._planner.request import considered_for

        found = cluster_for(self.data, cluster)
        considered = self.data._keep(("considered", repr(found)), lambda: considered_for(self.data, found))
        report = self.report(found)
        here = f"{self!r}\n  predicted: {1e3 * report.seconds:.3f} ms; busiest rank {report.balance:.3f} × the mean"
        if considered is None:
            return f"{here}\n  `auto` weighs self-attention of one layout over two ranks or more: here there was nothing to weigh"
        if self.data.heads is None:
            here += "\n  made without heads=, kv_heads= and head_dim=, so that nothing was weighed; with them `auto` would take the winner:"
        return f"{here}\n{considered}"

    def plot(self, path: Any = None, *, cluster: Any = None) -> Any:
        """A matplotlib figure: who computes what, the work of each rank, the timeline. Saved where a path is given."""
        from longspan._report.figure import figure

        return figure(self, path, cluster=cluster)

    def save_html(self, path: Any, *, cluster: Any = None) -> None:
        """The report as one HTML file that needs nothing else."""
        from longspan._report.page import save

        save(self, path, cluster=cluster)

    def _repr_html_(self) -> str:
        from longspan._report.page import notebook

        return notebook(self)

    def __repr__(self) -> str:
        d = self.data
        shape = " × ".join(f"{axis.name} {axis.size}" for axis in d.mesh.axes)
        stages = f", {d.schedule.stages} stage{'s' if d.schedule.stages > 1 else ''}" if d.schedule.stages else ""
        stages += " at once" if d.schedule.joined else ""
        return f"Plan({d.mask.text}, {d.lengths} over {shape}: layout {d.layout}, {d.strategy}{stages}, rank {d.mesh.rank})"

    def __str__(self) -> str:
        from longspan._report.terminal import picture

        return f"{self!r}\n{picture(self.data)}"


class PlanSet(Mapping[str, Plan]):
    """Plans for several masks over one layout: `plans["sliding"]`; shards and positions are common to all."""

    def __init__(self, plans: dict[str, Plan]) -> None:
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
        return self._first.layout

    @property
    def local_len(self) -> int:
        return self._first.local_len

    @property
    def kv_local_len(self) -> int:
        return self._first.kv_local_len

    @property
    def positions(self) -> Tensor:
        return self._first.positions

    @property
    def kv_positions(self) -> Tensor:
        return self._first.kv_positions

    def shard(self, x: Tree, dim: int, *, side: str | None = None) -> Tree:
        return self._first.shard(x, dim, side=side)

    def unshard(self, x: Tree, dim: int, *, side: str | None = None) -> Tree:
        return self._first.unshard(x, dim, side=side)

    def on(self, mesh: Any) -> PlanSet:
        return PlanSet({name: plan.on(mesh) for name, plan in self._plans.items()})
