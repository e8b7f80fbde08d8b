"""Attention over a cache whose pages are spread over ranks: partial results of each rank's pages, merged by their log-sum-exp.

All ranks hold all new tokens. Ranks exchange partial results only: each rank merges a share of the rows (reduce-scatter), and sends the
merged rows to all (all-gather). Legend as in `longspan._kernels.paged`; rows: (token, head) pairs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longspan._comm.all_reduce import all_reduce_rows
from longspan._comm.mesh import Mesh
from longspan._engine.cached_tokens import StepQueries, StepResults
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork
from longspan._kernels.paged_splits import attend_sequence, gathered_keys, merge_ranks
from longspan._kernels.protocol import like_query, state_dtype


def attend_over_mesh(
    queries: StepQueries, pages: PagedKV, work: PagedWork, mesh: Mesh, *, with_lse: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse), the same bits on every rank, after the new tokens were written. lse is None unless asked for."""
    q, step, layer = queries
    heads, dim, wide = q.shape[1], pages.v.shape[-1], state_dtype(q.dtype)
    local = _local_results(queries, pages, replace(work, sink=None))
    packed = torch.cat([local.out, local.lse[..., None]], -1).transpose(1, 2).flatten(0, 2)  # [n · count · H, E + 1]
    sink = None if work.sink is None else work.sink.to(wide)

    def reduce(parts: Tensor) -> Tensor:
        out, lse = merge_ranks(parts[..., :-1], parts[..., -1], None)
        return torch.cat([out, lse[..., None]], -1)

    def finish(rows: Tensor, indices: range) -> Tensor:
        out, lse = rows[:, :-1], rows[:, -1]
        if sink is not None:
            logits = sink[torch.arange(indices.start, indices.stop, device=sink.device) % heads]
            out, lse = merge_ranks(out[None], lse[None], logits)
        columns = [out.to(q.dtype).contiguous(), lse[:, None].contiguous()]
        return torch.cat([x.view(torch.uint8) for x in columns[: 1 + with_lse]], -1)

    fields = {
        "layer": str(layer), "sequences": str(step.ids), "starts": str(step.ranges.starts), "lengths": str(step.ranges.lengths),
        "mask": "" if work.mask is None else work.mask.key, "score_mod": "" if work.score is None else work.score.key,
        "scale": repr(work.scale), "queries": f"{tuple(q.shape)} {q.dtype}", "return_lse": str(with_lse),
        "sink": "" if work.sink is None else str(tuple(work.sink.shape)),
        "captured tensors": str([(tuple(t.shape), t.dtype) for t in (*work.mask_captured, *work.score_captured)]),
    }  # fmt: skip
    merged = all_reduce_rows(mesh, packed, reduce, finish, what="attention over a cache", fields=fields)
    merged = merged.view(q.shape[0], q.shape[2], heads, merged.shape[-1]).transpose(1, 2)
    out_bytes = dim * q.element_size()
    out = merged[..., :out_bytes].contiguous().view(q.dtype)
    lse = merged[..., out_bytes:].contiguous().view(wide)[..., 0] if with_lse else None
    return like_query(q, dim, q.dtype).copy_(out), lse


def _local_results(queries: StepQueries, pages: PagedKV, work: PagedWork) -> StepResults:
    """Partial results of the pages that this rank holds, in the dtype of running results."""
    q, step, _ = queries
    wide = state_dtype(q.dtype)
    out = torch.empty((*q.shape[:3], pages.v.shape[-1]), dtype=wide, device=q.device)
    local = StepResults(queries, out, torch.empty(q.shape[:3], dtype=wide, device=q.device))
    for i, count in enumerate(step.ranges.counts):
        keys = gathered_keys(pages, step.ranges, i, work) if count else None
        for first in range(0, count, FEW_QUERIES):
            assert keys is not None
            block = slice(first, min(first + FEW_QUERIES, count))
            local.add(i, *attend_sequence(local.queries(i)[:, block], keys, step.ranges.starts[i] + first, work), block)
    return local
