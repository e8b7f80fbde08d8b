"""The arguments of `longspan.plan`, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from longspan._comm.mesh import Mesh
from longspan._cost.clusters import cluster as cluster_of
from longspan._cost.rates import Cluster, Shape
from longspan._cost.timeline import Conditions
from longspan._masks.algebra import Full, Mask
from longspan._masks.extent import AttentionSizes
from longspan._plan.layout import Layout
from longspan._plan.plan_data import PlannedMask
from longspan._plan.schedule import Schedule
from longspan._plan.strategies import LAYOUT_NAMES


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, kw_only=True)
class CallSizes:
    """Sizes of the attention calls to come; None where they are not known."""

    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is not None and not _is_count(size):
                raise ValueError(f"plan: {name} must be an int of 1 or more, got {size!r}")
        if self.kv_heads is not None and self.heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"plan: heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")

    def completed_by(self, mask: Mask) -> CallSizes:
        """The sizes, with batch and heads from a mask that knows them."""
        extent = mask.extent
        batch = extent.batch if self.batch is None else self.batch
        heads = extent.heads if self.heads is None else self.heads
        return replace(self, batch=batch, heads=heads)

    @property
    def shape(self) -> Shape:
        """The shape that the cost model assumes: unknown sizes count as 1, the head dim as 128."""
        heads = self.heads or 1
        return Shape(batch=self.batch or 1, heads=heads, kv_heads=self.kv_heads or heads, head_dim=self.head_dim or 128)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """The arguments of `longspan.plan`, checked. Masks are traced and their captured tensors copied to the host.

    Attributes:
        masks: The masks as users gave them.
        planned: The masks as plans hold them.
        layout: A name, or layouts of queries and of KV over all ranks.
        strategy: A name or a schedule.
        cluster: The cluster profile that was given, if one was; `profile` is the one in use.
        conditions: Slow ranks and slow links of the mesh.
    """

    masks: tuple[Mask, ...]
    planned: tuple[PlannedMask, ...]
    q_len: int
    kv_len: int
    mesh: Mesh
    sizes: CallSizes
    layout: str | tuple[Layout, Layout]
    strategy: str | Schedule
    stages: int | None
    overlap: bool | None
    grad_reduce_dtype: torch.dtype | None
    cluster: Cluster | None
    conditions: Conditions

    @classmethod
    def of(cls, masks: Sequence[Mask], seq_len: Any, mesh: Mesh, sizes: CallSizes, options: RequestedOptions) -> PlanRequest:
        """A checked request.

        Raises:
            ValueError: A size or a name is not legal, or a mask does not fit the lengths.
            TypeError: An argument has the wrong type.
        """
        q_len, kv_len = _checked_lengths(seq_len)
        for mask in masks:
            sizes = sizes.completed_by(mask)
        return cls(
            masks=tuple(masks),
            planned=tuple(planned_mask(mask, q_len, kv_len, sizes) for mask in masks),
            q_len=q_len,
            kv_len=kv_len,
            mesh=mesh,
            sizes=sizes,
            layout=_checked_layout(options.layout, (q_len, kv_len), mesh, sizes.batch),
            strategy=_checked_strategy(options.strategy),
            stages=_checked_stages(options.stages),
            overlap=_checked_overlap(options.overlap),
            grad_reduce_dtype=_checked_dtype(options.grad_reduce_dtype),
            cluster=None if options.cluster is None else cluster_of(options.cluster),
            conditions=_checked_conditions(options.conditions, mesh),
        )

    @property
    def profile(self) -> Cluster:
        """The cluster profile in use: h200 where none was given."""
        return cluster_of(self.cluster)

    @property
    def per_row(self) -> bool:
        """Whether batch rows get different layouts: the batch has several and a mask depends on the row."""
        return (self.sizes.batch or 1) > 1 and any(mask.per_batch for mask in self.planned)


@dataclass(frozen=True, kw_only=True)
class RequestedOptions:
    """The choices of `longspan.plan` as they were given, unchecked."""

    layout: Any = "auto"
    strategy: Any = "auto"
    stages: Any = None
    overlap: Any = None
    grad_reduce_dtype: Any = None
    cluster: Cluster | str | Path | None = None
    conditions: Any = None


def planned_mask(mask: Mask, q_len: int, kv_len: int, sizes: CallSizes) -> PlannedMask:
    """A mask as a plan holds it: traced, its captured tensors copied to the host."""
    known = {name: size for name in ("batch", "heads") if (size := getattr(sizes, name)) is not None}
    mask.extent.check(f"mask {mask}", q_len=q_len, kv_len=kv_len, **known)
    if isinstance(mask, Full):
        return PlannedMask(text=str(mask), program=None)
    if mask.has_selection:
        mask = mask.for_sizes(
            AttentionSizes(q_len=q_len, kv_len=kv_len, batch=sizes.batch or 1, heads=sizes.heads or 1, kv_heads=sizes.kv_heads)
        )
    with torch.no_grad():
        captured = tuple(t.to("cpu", copy=True) for t in mask.traced.captured())
    planned = PlannedMask(text=str(mask), program=mask.traced.program, captured=captured)
    for name, depends in (("batch", planned.per_batch), ("heads", planned.per_head)):
        if depends and getattr(sizes, name) is None:
            raise ValueError(f"plan: mask {mask} depends on the {name.removesuffix('s')}: say {name}=… when planning")
    return planned


def _checked_lengths(seq_len: Any) -> tuple[int, int]:
    pair = tuple(seq_len) if isinstance(seq_len, tuple | list) else (seq_len, seq_len)
    if len(pair) != 2 or not all(map(_is_count, pair)):
        raise ValueError(f"plan: seq_len must be an int of 1 or more, or (q_len, kv_len), got {seq_len!r}")
    return pair[0], pair[1]


def _checked_layout(layout: Any, lengths: tuple[int, int], mesh: Mesh, batch: int | None) -> str | tuple[Layout, Layout]:
    if isinstance(layout, str):
        if layout not in LAYOUT_NAMES:
            raise ValueError(f"layout: expected one of {', '.join(map(repr, LAYOUT_NAMES))} or a Layout, got {layout!r}")
        return layout
    pair = (layout, layout) if isinstance(layout, Layout) else layout
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(one, Layout) for one in pair):
        raise TypeError(f"layout: expected a name, a Layout or a pair of Layouts (queries, keys), got {type(layout).__name__}")
    for side, one, length in zip(("queries", "keys"), pair, lengths, strict=True):
        if (one.length, one.ranks) != (length, mesh.size):
            raise ValueError(f"layout of {side}: expected {length} tokens over {mesh.size} ranks, got {one.length} over {one.ranks}")
        if len(one.rows) not in (1, batch or 1):
            raise ValueError(f"layout of {side}: expected 1 batch row or batch={batch} of them, got {len(one.rows)}")
    return pair


def _checked_strategy(strategy: Any) -> str | Schedule:
    if not isinstance(strategy, str | Schedule):
        raise TypeError(f"strategy: expected a name or a Schedule, got {type(strategy).__name__}")
    return strategy


def _checked_stages(stages: Any) -> int | None:
    if stages is not None and not _is_count(stages):
        raise ValueError(f"plan: stages must be 1 or more, or None, got {stages!r}")
    return stages  # type: ignore[no-any-return]


def _checked_overlap(overlap: Any) -> bool | None:
    if overlap is not None and not isinstance(overlap, bool):
        raise TypeError(f"plan: overlap must be True, False or None, got {overlap!r}")
    return overlap


def _checked_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"plan: grad_reduce_dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"plan: grad_reduce_dtype must be a floating-point dtype, got {dtype}")
    return dtype


def _checked_conditions(conditions: Any, mesh: Mesh) -> Conditions:
    if conditions is None:
        return Conditions()
    if not isinstance(conditions, Conditions):
        raise TypeError(f"plan: conditions must be Conditions or None, got {conditions!r}")
    rank = max([-1, *conditions.stragglers, *conditions.slow_links])
    if rank >= mesh.size:
        raise ValueError(f"plan: conditions: expected ranks below {mesh.size}, got {rank}")
    return conditions
