"""Attention over a cache whose pages are spread over ranks. All ranks hold all new tokens, and get all results.

    passed             each rank computes                        exchanged
    ──────             ──────────────────                        ─────────
    partial results    all queries over its pages                partial results: reduce-scatter, then all-gather
    KV                 its share of the queries over all pages   KV of the sequence, then results: two all-gathers

Few queries pass partial results. A chunk of a prefill passes whichever is fewer bytes: KV where most tokens are new, partial results where
most are cached. Legend as in `longspan._kernels.paged`; W bytes of an element of partial results.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longspan._comm.agreement import raising_on_all_ranks
from longspan._comm.all_reduce import all_reduce_rows
from longspan._comm.gather import all_gather_rows
from longspan._comm.mesh import Mesh
from longspan._engine.cached_chunk import Chunk, attend_chunk, first_gathered
from longspan._engine.cached_local import attend_local
from longspan._engine.cached_tokens import StepQueries, StepResults
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork, indexable
from longspan._kernels.paged_splits import attend_sequence, gathered_keys, merge_ranks
from longspan._kernels.protocol import like_query, state_dtype

_WHAT = "attention over a cache"
_NAMED = 32  # sequences that an error message names


def attend_over_mesh(
    queries: StepQueries, pages: PagedKV, work: PagedWork, mesh: Mesh, *, kernel: str, with_lse: bool, by_kernel: bool = False
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse), the same bits on every rank, after the new tokens were written. lse is None unless asked for.

    by_kernel: whether the decode kernel computes this rank's partial results; a rank without Triton computes them by torch operations.

    Raises:
        RuntimeError: A rank is late, dead or has failed. The message names the sequences in flight.
    """
    try:
        return _MeshCall(queries, pages, work, mesh, kernel=kernel, with_lse=with_lse, by_kernel=by_kernel).run()
    except RuntimeError as error:
        sequences = ", ".join(map(str, queries.step.ids[:_NAMED])) + (", …" if len(queries.step.ids) > _NAMED else "")
        error.args = (f"{error}; sequences in flight: {sequences}", *error.args[1:])
        raise


class _MeshCall:
    """One layer's attention. Results are rows of bytes [T, H, …] in the order of tokens: out, then lse if asked for."""

    def __init__(
        self, queries: StepQueries, pages: PagedKV, work: PagedWork, mesh: Mesh, *, kernel: str, with_lse: bool, by_kernel: bool = False
    ) -> None:  # fmt: skip
        self.by_kernel = by_kernel
        self.queries, self.pages, self.work, self.mesh, self.kernel, self.with_lse = queries, pages, work, mesh, kernel, with_lse
        self.q, self.step, layer = queries
        self.what = f"{_WHAT} of {pages.k.dtype}"  # ranks choose the exchange by the dtype
        self.wide, self.heads, self.dim = state_dtype(self.q.dtype), self.q.shape[1], pages.v.shape[-1]
        ranges, cache = self.step.ranges, self.step.cache
        assert ranges.spread is not None
        sizes = (cache.page_size, cache.layers, cache.kv_heads, cache.head_dim, cache.value_dim, cache.window, cache.shared_kv, cache.dtype)
        self.fields = {
            "cache (page_size, layers, kv_heads, head_dim, value_dim, window, shared_kv, dtype)": str(sizes),
            "k_scale and v_scale of the cache": str(cache.scales),
            "ranks that hold the first pages": str(ranges.spread.shifts),
            "layer": str(layer), "sequences": str(self.step.ids), "starts": str(ranges.starts), "lengths": str(ranges.lengths),
            "mask": "" if work.mask is None else work.mask.key, "score_mod": "" if work.score is None else work.score.key,
            "scale": repr(work.scale), "queries": f"{tuple(self.q.shape)} {self.q.dtype}", "return_lse": str(with_lse), "kernel": kernel,
            "sink": "" if work.sink is None else f"{tuple(work.sink.shape)} {work.sink.dtype}",
            "captured tensors": str([(tuple(t.shape), t.dtype) for t in (*work.mask_captured, *work.score_captured)]),
        }  # fmt: skip

    def run(self) -> tuple[Tensor, Tensor | None]:
        ranges, q = self.step.ranges, self.q
        by_kv = [i for i, count in enumerate(ranges.counts) if count > FEW_QUERIES and self._kv_is_fewer_bytes(i)]
        by_partial = [i for i in range(len(ranges.counts)) if i not in by_kv]
        passed = [name for name, chosen in (("KV", by_kv), ("partial results", by_partial)) if any(ranges.counts[i] for i in chosen)]
        self.step.passed[self.queries.layer] = " and ".join(passed)
        out_bytes = self.dim * q.element_size()
        row_bytes = out_bytes + (self.wide.itemsize if self.with_lse else 0)
        with raising_on_all_ranks(self.mesh):
            rows = torch.empty((sum(ranges.counts), self.heads, row_bytes), dtype=torch.uint8, device=q.device)
        for i in by_kv:
            self._pass_kv(i, into=rows[ranges.firsts[i] : ranges.firsts[i] + ranges.counts[i]])
        if not by_kv:
            rows[:] = self._by_passing_partial_results(by_partial, slice(None))
        elif by_partial:
            tokens = [t for i in by_partial for t in range(ranges.firsts[i], ranges.firsts[i] + ranges.counts[i])]
            index = torch.tensor(tokens, dtype=torch.int64, device="cpu").to(q.device)
            rows[index] = self._by_passing_partial_results(by_partial, index)
        rows = rows.view(q.shape[0], q.shape[2], self.heads, row_bytes).transpose(1, 2)
        out = rows[..., :out_bytes].view(q.dtype)
        lse = rows[..., out_bytes:].clone(memory_format=torch.contiguous_format).view(self.wide)[..., 0] if self.with_lse else None
        return like_query(q, self.dim, q.dtype).copy_(out), lse

    def _kv_is_fewer_bytes(self, index: int) -> bool:
        """Whether the KV that a sequence's new tokens see is fewer bytes than their partial results. Both send the merged results."""
        ranges, element = self.step.ranges, self.pages.k.element_size()
        tokens = ranges.lengths[index] - first_gathered(self.work, ranges.starts[index])
        kv = tokens * self.pages.k.shape[1] * (self.pages.k.shape[3] + (0 if self.pages.shared else self.dim)) * element
        partial = ranges.counts[index] * self.heads * (self.dim + 1) * self.wide.itemsize
        return kv < partial

    # -------------------------------------------------------------------------------------------- partial results

    def _by_passing_partial_results(self, indices: list[int], tokens: Tensor | slice) -> Tensor:
        """Result bytes [t, H, …] of the tokens of some sequences, which are the new tokens at the indices `tokens`."""
        with raising_on_all_ranks(self.mesh):
            out, lse = self._local_results(indices)
            packed = torch.cat([out, lse[..., None]], -1).transpose(1, 2).flatten(0, 1)[tokens].flatten(0, 1)
        merged = all_reduce_rows(self.mesh, packed, _merged, self._finished, what=self.what, fields=self.fields)
        return merged.view(-1, self.heads, merged.shape[-1])

    def _local_results(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """(out, lse) over the pages that this rank holds, in the dtype of running results. Rows of other sequences are not initialised."""
        if self.by_kernel:
            return attend_local(self.queries, self.pages, self.work, indices, self.kernel)
        q, step, work = self.q, self.step, replace(self.work, sink=None)
        out = torch.empty((*q.shape[:3], self.dim), dtype=self.wide, device=q.device)
        local = StepResults(self.queries, out, torch.empty(q.shape[:3], dtype=self.wide, device=q.device))
        for i in indices:
            count = step.ranges.counts[i]
            keys = gathered_keys(self.pages, step.ranges, i, work) if count else None
            for first in range(0, count, FEW_QUERIES):
                assert keys is not None
                block = slice(first, min(first + FEW_QUERIES, count))
                local.add(i, *attend_sequence(local.queries(i)[:, block], keys, step.ranges.starts[i] + first, work), block)
        return local.out, local.lse

    def _finished(self, rows: Tensor, indices: range) -> Tensor:
        """Result bytes of merged rows, with the sink. `indices`: of (token, head) pairs."""
        out, lse = rows[:, :-1], rows[:, -1]
        if self.work.sink is not None:
            heads = torch.arange(indices.start, indices.stop, device=out.device) % self.heads
            out, lse = merge_ranks(out[None], lse[None], self.work.sink[heads])
        return self._as_bytes(out, lse)

    def _as_bytes(self, out: Tensor, lse: Tensor) -> Tensor:
        """Results [..., E] and [...] as bytes."""
        columns = [out.to(self.q.dtype).contiguous(), lse[..., None].to(self.wide)]
        return torch.cat([x.view(torch.uint8) for x in columns[: 1 + self.with_lse]], -1)

    # -------------------------------------------------------------------------------------------- KV

    def _pass_kv(self, index: int, into: Tensor) -> None:
        """Write the result bytes [count, H, …] of one sequence. Each rank computes two ranges of queries, of the head and of the tail."""
        ranges, ranks, work = self.step.ranges, self.mesh.size, self.work
        start, count, length = ranges.starts[index], ranges.counts[index], ranges.lengths[index]
        first = first_gathered(work, start)
        k, v = self._gathered_kv(index, first, length)
        edges = [count * i // (2 * ranks) for i in range(2 * ranks + 1)]
        parts = [[(edges[i], edges[i + 1]) for i in (rank, 2 * ranks - 1 - rank)] for rank in range(ranks)]
        q, made = self.queries.part(self.q, index), []
        with raising_on_all_ranks(self.mesh):
            for low, high in parts[self.mesh.rank]:
                if low < high:
                    chunk = Chunk(index, start + low, start + high, first, length)
                    out, lse = attend_chunk((q[:, low:high], k, v), chunk, self.step, work, self.kernel)
                    made.append(self._as_bytes(out, lse).transpose(0, 1))
            empty = self._as_bytes(q.new_empty(self.heads, 0, self.dim), q.new_empty(self.heads, 0)).transpose(0, 1)
            results = torch.cat([*made, empty])
            order = torch.cat([torch.arange(low, high, device=q.device) for part in parts for low, high in part])
        counts = [sum(high - low for low, high in part) for part in parts]
        into.index_copy_(0, order, all_gather_rows(self.mesh, results, counts, what=self.what, fields=self.fields))

    def _gathered_kv(self, index: int, first: int, length: int) -> tuple[Tensor, Tensor]:
        """(k [G, t, D], v [G, t, E]) of the tokens first … length − 1 of a sequence, from all ranks."""
        pages, ranges, size = self.pages, self.step.ranges, self.pages.page_size
        assert ranges.spread is not None
        columns = [replace(ranges.spread, rank=r).local_pages(index, first // size, -(-length // size)) for r in range(self.mesh.size)]
        with raising_on_all_ranks(self.mesh):
            k, v, _ = pages.gather_local(ranges.rows[index], first, length, columns[self.mesh.rank])
            k, v = indexable(k), indexable(v)
            packed = (k if pages.shared else torch.cat([k, v], -1)).transpose(0, 1)  # [t, G, D + E]
            tokens = [_tokens_of(cs, size, first, length) for cs in columns]
        gathered = all_gather_rows(self.mesh, packed, [len(t) for t in tokens], what=f"{self.what}, KV", fields=self.fields)
        with raising_on_all_ranks(self.mesh):  # before the all-gather of results
            order = (torch.cat(tokens) - first).to(gathered.device)
            joined = torch.empty_like(gathered).index_copy_(0, order, gathered).transpose(0, 1)
        joined = joined.view(pages.k.dtype)
        k_dim = pages.k.shape[3]
        return (joined, joined[..., : self.dim]) if pages.shared else (joined[..., :k_dim], joined[..., k_dim:])


def _tokens_of(columns: range, size: int, first: int, stop: int) -> Tensor:
    """Positions first … stop − 1 of the tokens in some pages, int64 on the host."""
    tokens = torch.tensor(columns, dtype=torch.int64, device="cpu")[:, None] * size + torch.arange(size, device="cpu")
    return tokens[(tokens >= first) & (tokens < stop)]


def _merged(parts: Tensor) -> Tensor:
    """Partial results [ranks, rows, E + 1], lse last, merged: [rows, E + 1]."""
    out, lse = merge_ranks(parts[..., :-1], parts[..., -1], None)
    return torch.cat([out, lse[..., None]], -1)
