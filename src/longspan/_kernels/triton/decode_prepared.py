"""A decode call that repeats: one or two launches with new addresses, and nothing else. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._kernels.gpu.interpreter import interpreted
from longspan._kernels.gpu.prepared_launch import direct_stream, hold_for_graph
from longspan._kernels.gpu.split_kernel import SplitKernel
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork, QueryRanges
from longspan._kernels.protocol import ALIGNMENT
from longspan._kernels.triton.decode_call import Queries, decode_launch, empty_results, page_sizes, writes_new_tokens
from longspan._torch_private import empty_on_current_device


class LayerTensors(NamedTuple):
    """New tokens of a layer, and its sink if there is one."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None


class StepPlace(NamedTuple):
    """Where a step's queries stand; `ragged` and `by` as in `Queries`."""

    ranges: QueryRanges
    ragged: bool
    by: SplitKernel | None = None


class PreparedDecode:
    """`attend_new_tokens` of a call whose tensors have fixed layouts, over sequences with fixed numbers of new tokens."""

    def __init__(self, tensors: LayerTensors, pages: PagedKV, place: StepPlace, work: PagedWork) -> None:
        q, k, v, _ = tensors
        queries = Queries(q, place.ranges, place.ragged, (k, v), place.by)
        (sizes,) = page_sizes(queries, pages)
        results = empty_results(q, v.shape[-1])
        made = decode_launch(queries, (pages.k, pages.v, pages.table), work, sizes, results)
        self._described = sum(made.tensors[name] is not None for name in ("k_desc", "rest_desc"))
        self._launches, self._scale = made.launches, float(work.scale)
        self._decode, self._repair, self._merge, parts, _ = made.launches
        self._direct = not any(parts)
        self._out = tuple(results[0].shape), results[0].stride(), q.dtype
        self._lse = tuple(results[1].shape), results[1].stride(), torch.float32
        # Bytes before what follows the partial outputs in one tensor: partial log-sum-exps, flags, and lse if the caller does not want it.
        part_bytes = 4 * parts[0], 4 * parts[1], 4 * made.launches.flags
        self._part_lse, self._flags, self._unused_lse = accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in part_bytes)
        self._floats = self._unused_lse // 4 + results[1].numel()
        self._index = q.device.index
        # A launch on a stream of `direct_stream` is on the current device.
        self._empty = empty_on_current_device if q.is_cuda else partial(_empty_strided, q.device)

    @staticmethod
    def supports(tensors: LayerTensors, pages: PagedKV, place: StepPlace, work: PagedWork) -> bool:
        """Whether a call can be prepared: one launch computes all sequences, and no program reads tensors."""
        ranges = place.ranges
        if interpreted() or work.mask_captured or work.score_captured or not ranges.counts:
            return False
        if not 0 < min(ranges.counts) <= max(ranges.counts) <= FEW_QUERIES or ranges.spread is not None:
            return False
        if not writes_new_tokens(pages, ranges):
            return False
        if any(t is not None and t.data_ptr() % ALIGNMENT for t in (*tensors, pages.k, pages.v, ranges.device_ranges)):
            return False
        if tensors.sink is not None and not tensors.sink.is_contiguous():
            return False
        return len(page_sizes(Queries(tensors.q, ranges, place.ragged, by=place.by), pages)) == 1

    @property
    def is_compiled(self) -> bool:
        """Whether all kernels were compiled, by a call that was not prepared."""
        return all(one.is_compiled for one in self._launches.all)

    def at(self, pages: PagedKV, ranges: QueryRanges) -> Callable[..., tuple[Tensor, Tensor | None] | None]:
        """`run` over the sequences of one step. `pages`: of any layer."""
        return partial(self.run, (pages.table.data_ptr(), ranges.device_ranges.data_ptr()))

    def run(
        self, step: tuple[int, int], pages: tuple[int, int], new: tuple[int, ...], *, with_lse: bool, captured: bool
    ) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
        """(out, lse) of a layer; lse may be None if not with_lse. captured: by a CUDA graph.

        Addresses: `step`, the page table and the sequences' ranges; `pages`, the layer's keys and values; `new`, q, k, v and the sink.
        None if a profiler watches launches or another device is current.
        """
        stream = direct_stream(self._index)
        if stream is None:
            return None
        q, k, v, *sinks = new
        keys, values = pages
        empty = self._empty
        out, lse = empty(*self._out), None
        pages_read = q, keys, values, *self._described * (keys,), *step
        programs = q, q, self._scale  # programs capture no tensors: their places hold q (`launch.pack_captured`)
        if self._direct:
            lse = empty(*self._lse)
            self._decode.launch_on(stream, (*pages_read, k, v, out.data_ptr(), lse.data_ptr(), *sinks, *programs))
        else:
            parts = empty((self._floats,), (1,), torch.float32)
            part_out = parts.data_ptr()
            if with_lse:
                lse = empty(*self._lse)
            results = out.data_ptr(), part_out + self._unused_lse if lse is None else lse.data_ptr()
            partial_results: tuple[int, ...] = part_out, part_out + self._part_lse
            if self._repair is not None:
                partial_results = *partial_results, part_out + self._flags
            if self._merge is None:
                assert self._decode.workspace is not None
                counters, _held = self._decode.workspace.addresses(None if captured else stream)
                self._decode.launch_on(stream, (*pages_read, k, v, *partial_results, *sinks, *results, *counters, *programs))
            else:
                self._decode.launch_on(stream, (*pages_read, k, v, *partial_results, *programs))
                if self._repair is not None:
                    self._repair.launch_on(stream, (*pages_read, *partial_results, *programs))
                self._merge.launch_on(stream, (*partial_results[:2], step[1], *sinks, *results))
        if captured:
            for one in self._launches.all:
                hold_for_graph(one)
        return out, lse


def _empty_strided(device: torch.device, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=device)
