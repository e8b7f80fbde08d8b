"""The layouts of a request by name, over the ranks of the KV axis or of the whole mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from longspan._balance import search as balance
from longspan._balance.demand import Demand
from longspan._plan import named_layouts
from longspan._plan.layout import Layout
from longspan._plan.plan_data import ulysses_groups
from longspan._plan.strategies import Strategy
from longspan._planner.mask_work import MaskWork
from longspan._planner.request import PlanRequest


class RequestLayouts:
    """Layouts of queries and of KV for a request."""

    def __init__(self, request: PlanRequest, works: Sequence[MaskWork]) -> None:
        self.request, self.works = request, works

    def over_mesh(self, strategy: Strategy, chosen: Layout | None) -> tuple[Layout, Layout]:
        """Layouts over all ranks of the mesh. `chosen`: the layout over the KV axis, where `auto` has chosen it."""
        request = self.request
        if isinstance(request.layout, tuple):
            return request.layout
        ranks = 1 if strategy.kv_axis is None else request.mesh.axes[strategy.kv_axis].size
        if chosen is not None:
            queries = kv = chosen
        elif request.q_len == request.kv_len:
            queries = kv = self._self_attention(request.layout, ranks)
        else:
            queries, kv = self._cross_attention(request.layout, ranks)
        if strategy.head_axis is None:
            return queries, kv
        groups = ulysses_groups(request.mesh, strategy.head_axis).tolist()
        split = named_layouts.split(queries, groups)
        return split, split if kv is queries else named_layouts.split(kv, groups)

    def _self_attention(self, name: str, ranks: int) -> Layout:
        length = self.request.q_len
        if name == "contiguous":
            return named_layouts.contiguous(length, ranks)
        if name == "head_tail":
            return named_layouts.head_tail(length, ranks)
        if name == "per_document":
            return self._per_document(ranks)
        unit = named_layouts.unit_for(length, ranks)
        batch_rows: Sequence[int | None] = range(self.request.sizes.batch or 1) if self.request.per_row else [None]
        by_row = []
        for batch_row in batch_rows:
            demands = [work.demand(unit, batch_row) for work in self.works]
            by_row.append(_by_demand(name, demands, ranks))
        return by_row[0] if len(by_row) == 1 else named_layouts.stack(by_row)

    def _per_document(self, ranks: int) -> Layout:
        """The layout by the documents of the first mask that has any."""
        for mask in self.request.masks:
            documents = named_layouts.documents_of(mask)
            if documents:
                by_row = [named_layouts.per_document(lengths, ranks) for lengths in documents]
                return by_row[0] if len(by_row) == 1 else named_layouts.stack(by_row)
        raise ValueError(
            f"layout 'per_document': expected a mask made with longspan.documents, got {', '.join(map(str, self.request.masks))}; "
            "use 'auto' or 'head_tail'"
        )

    def _cross_attention(self, name: str, ranks: int) -> tuple[Layout, Layout]:
        """Queries by their work, KV contiguous: the owner of a key matters less where queries and keys are different tokens."""
        q_len, kv_len = self.request.q_len, self.request.kv_len
        if name == "per_document":
            raise ValueError(
                "layout 'per_document' needs queries and keys to be the same tokens; use 'auto', 'contiguous' or 'round_robin'"
            )
        if name == "head_tail":
            return named_layouts.head_tail(q_len, ranks), named_layouts.head_tail(kv_len, ranks)
        kv = named_layouts.contiguous(kv_len, ranks)
        if name == "contiguous":
            return named_layouts.contiguous(q_len, ranks), kv
        unit = named_layouts.unit_for(q_len, ranks)
        units = -(-q_len // unit)
        pairs = torch.zeros(units, dtype=torch.float64)
        for work in self.works:
            pairs += work.pairs(unit).view(-1, units).sum(0)
        no_reads = torch.zeros(0, dtype=torch.int64)
        demand = Demand(
            length=q_len, unit=unit, work=pairs, ptr=torch.zeros(units + 1, dtype=torch.int64), first=no_reads, last=no_reads
        )  # fmt: skip
        return _by_demand(name, [demand], ranks), kv


def _by_demand(name: str, demands: Sequence[Demand], ranks: int) -> Layout:
    """The layout of a name that depends on work and reads: one layout for the demands of all masks."""
    if name == "round_robin":
        total = replace(demands[0], work=torch.stack([d.work for d in demands]).sum(0))
        return named_layouts.round_robin(total, ranks)
    if name == "auto":
        return balance.auto(demands, ranks)
    raise NotImplementedError(
        f"layout {name!r}: expected 'contiguous', 'head_tail', 'per_document', 'round_robin' or 'auto': build it in "
        "longspan._planner.layouts, for self-attention and for cross-attention"
    )
