"""A decode call that repeats: one or two launches with new addresses, and nothing else. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._kernels.gpu.interpreter import interpreted
from longspan._kernels.gpu.launch_sequence import LaunchAll, launch_sequence
from longspan._kernels.gpu.prepared_launch import direct_stream, hold_for_graph
from longspan._kernels.gpu.split_kernel import SplitKernel
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork, QueryRanges
from longspan._kernels.protocol import ALIGNMENT
from longspan._kernels.triton.decode_call import Launches, Queries, decode_launch, empty_results, page_sizes, writes_new_tokens
from longspan._torch_private import empty_on_current_device

MAX_HELD_BYTES = 1 << 20  # of scratch memory between calls: calls with more take longer on the device than on the host


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


class _Scratch(NamedTuple):
    """Memory that only the launches of a call use, on one stream.

    unused_lse: the address of an lse that the caller does not want. values: the last values of the launches, addresses of partial results
    and flags, and the scale.
    """

    stream: int
    memory: Tensor
    unused_lse: int
    values: tuple[int | float, ...]


class StepDecode(NamedTuple):
    """`PreparedDecode.run` and its first argument for one step."""

    run: Callable[..., tuple[Tensor, Tensor | None] | None]
    step: tuple[int, int]


class PreparedDecode:
    """`attend_new_tokens` of a call whose tensors have fixed layouts, over sequences with fixed numbers of new tokens."""

    def __init__(self, tensors: LayerTensors, pages: PagedKV, place: StepPlace, work: PagedWork) -> None:
        q, k, v, sink = tensors
        queries = Queries(q, place.ranges, place.ragged, (k, v), place.by)
        (sizes,) = page_sizes(queries, pages)
        results = empty_results(q, v.shape[-1])
        made = decode_launch(queries, (pages.k, pages.v, pages.table), work, sizes, results)
        described = sum(made.tensors[name] is not None for name in ("k_desc", "rest_desc"))
        self._launches, self._scale = made.launches, float(work.scale)
        self._launch = _sequence(made.launches, described, has_sink=sink is not None)
        self._out = tuple(results[0].shape), results[0].stride(), q.dtype
        self._lse = tuple(results[1].shape), results[1].stride(), torch.float32
        # Bytes before what follows the partial outputs in one tensor: partial log-sum-exps, flags, lse.
        part_bytes = 4 * made.launches.parts[0], 4 * made.launches.parts[1], 4 * made.launches.flags
        *self._offsets, self._lse_offset = accumulate((0, *part_bytes), lambda end, size: end + -(-size // ALIGNMENT) * ALIGNMENT)
        del self._offsets[0 if made.launches.merge is None else 2 if made.launches.repair is None else 3 :]
        self._floats = self._lse_offset // 4 + results[1].numel()
        self._held: _Scratch | None = None
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

    def at(self, pages: PagedKV, ranges: QueryRanges) -> StepDecode:
        """The call over the sequences of one step. `pages`: of any layer."""
        return StepDecode(self.run, (pages.table.data_ptr(), ranges.device_ranges.data_ptr()))

    def run(
        self, step: tuple[int, int], pages: tuple[int, int], new: tuple[int, ...], with_lse: bool, captured: bool
    ) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
        """(out, lse) of a layer; lse may be None if not with_lse. captured: by a CUDA graph.

        Addresses: `step`, the page table and the sequences' ranges; `pages`, the layer's keys and values; `new`, q, k, v and the sink.
        None if a profiler watches launches or another device is current.
        """
        stream = direct_stream(self._index)
        if stream is None:
            return None
        scratch = self._held
        if scratch is None or scratch.stream != stream or captured:
            scratch = self._scratch(stream, hold=not captured)
        _, _, lse_address, last_values = scratch
        out, lse = self._empty(*self._out), None
        if with_lse:
            lse = self._empty(*self._lse)
            lse_address = lse.data_ptr()
        self._launch(stream, (*step, *pages, *new, out.data_ptr(), lse_address, *last_values))
        if captured:
            for one in self._launches.all:
                hold_for_graph(one)
        return out, lse

    def _scratch(self, stream: int, *, hold: bool) -> _Scratch:
        """Memory for launches on the current stream; `hold` it for later calls if it is small.

        Kernels of a stream run in order, so that calls on one stream may share it (`launch_sequence`). Memory of a CUDA graph belongs to
        the graph.
        """
        memory = self._empty((self._floats,), (1,), torch.float32)
        address = memory.data_ptr()
        values = *(address + offset for offset in self._offsets), self._scale
        scratch = _Scratch(stream, memory, address + self._lse_offset, values)
        if hold and 4 * self._floats <= MAX_HELD_BYTES:
            self._held = scratch
        return scratch


def _sequence(launches: Launches, described: int, *, has_sink: bool) -> LaunchAll:
    """The launches of a call, by the values that `PreparedDecode.run` passes. described: number of TMA descriptors of keys."""
    sink = ("sink",) if has_sink else ()
    read = "q", "keys", "values", *("keys",) * described, "table", "ranges"
    captured = "q", "q"  # programs capture no tensors: their places hold q (`launch.pack_captured`)
    results: tuple[str, ...] = ()
    if launches.merge is None:
        of_launches = [(*read, "k", "v", "out", "lse", *sink, *captured, "scale")]
    else:
        results = "part_out", "part_lse", *(("flags",) if launches.repair is not None else ())
        of_launches = [(*read, "k", "v", *results, *captured, "scale")]
        if launches.repair is not None:
            of_launches.append((*read, *results, *captured, "scale"))
        of_launches.append(("part_out", "part_lse", "ranges", *sink, "out", "lse"))
    order = "table", "ranges", "keys", "values", "q", "k", "v", *sink, "out", "lse", *results, "scale"
    return launch_sequence(launches.all, [[order.index(name) for name in names] for names in of_launches])


def _empty_strided(device: torch.device, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=device)
