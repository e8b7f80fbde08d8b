"""Decode calls that repeat: one or two launches with new addresses, and nothing else. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._kernels.gpu.compilation import collected_jobs
from longspan._kernels.gpu.interpreter import interpreted
from longspan._kernels.gpu.launch import pack_captured
from longspan._kernels.gpu.launch_sequence import LaunchAll, launch_sequence
from longspan._kernels.gpu.prepared_launch import direct_stream, hold_for_graph
from longspan._kernels.gpu.split_kernel import SplitKernel
from longspan._kernels.gpu.uploads import note_upload
from longspan._kernels.paged import FEW_QUERIES, PagedKV, PagedWork, QueryRanges
from longspan._kernels.protocol import ALIGNMENT
from longspan._kernels.triton.decode_call import (
    Launches,
    Queries,
    contiguous_launch,
    decode_launch,
    empty_results,
    page_sizes,
    writes_new_tokens,
)
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
    and flags or counters, and the scale.
    """

    stream: int
    memory: Tensor
    unused_lse: int
    values: tuple[int | float, ...]


class StepDecode(NamedTuple):
    """`PreparedDecode.run` and its first argument for one step."""

    run: Callable[..., tuple[Tensor, Tensor | None] | None]
    step: tuple[int, int]


class _DecodeMemory:
    """Layouts of a call's results, and the scratch memory of its launches."""

    def __init__(self, q: Tensor, results: tuple[Tensor, Tensor], launches: Launches, last_values: tuple[int | float, ...]) -> None:
        """last_values: of the launches, after the addresses of scratch memory."""
        out, lse = results
        self._out = tuple(out.shape), out.stride(), out.dtype
        self._lse = tuple(lse.shape), lse.stride(), lse.dtype
        # Byte offsets in one tensor of partial outputs, partial log-sum-exps, flags or counters, and lse.
        self._counters = launches.counters
        sizes = (4 * count for count in (*launches.parts, launches.flags or self._counters))
        *offsets, self._lse_offset = accumulate((0, *sizes), lambda end, size: end + -(-size // ALIGNMENT) * ALIGNMENT)
        self._offsets = offsets[: len(_scratch_names(launches))]
        self._floats = self._lse_offset // 4 + lse.numel()
        self._last_values = last_values
        self._held: _Scratch | None = None
        # A launch on a stream of `direct_stream` is on the current device.
        self._empty = empty_on_current_device if q.is_cuda else partial(_empty_strided, q.device)

    def _scratch(self, stream: int, *, hold: bool) -> _Scratch:
        """Memory for launches on the current stream; `hold` it for later calls if it is small.

        Kernels of a stream run in order, so that calls on one stream may share it (`launch_sequence`). Memory of a CUDA graph belongs to
        the graph.
        """
        memory = self._empty((self._floats,), (1,), torch.float32)
        address = memory.data_ptr()
        if self._counters:  # kernels leave them 0
            memory[self._offsets[2] // 4 :].zero_()
        values = *(address + offset for offset in self._offsets), *self._last_values
        scratch = _Scratch(stream, memory, address + self._lse_offset, values)
        if hold and 4 * self._floats <= MAX_HELD_BYTES:
            self._held = scratch
        return scratch


class PreparedDecode(_DecodeMemory):
    """`attend_new_tokens` of a call whose tensors have fixed layouts, over sequences with fixed numbers of new tokens."""

    def __init__(self, tensors: LayerTensors, pages: PagedKV, place: StepPlace, work: PagedWork) -> None:
        q, k, v, sink = tensors
        queries = Queries(q, place.ranges, place.ragged, (k, v), place.by)
        (sizes,) = page_sizes(queries, pages)
        results = empty_results(q, v.shape[-1])
        made = decode_launch(queries, (pages.k, pages.v, pages.table), work, sizes, results)
        super().__init__(q, results, made.launches, (float(work.scale),))
        self._launches, self._index = made.launches, q.device.index
        sinks = () if sink is None else ("sink",)
        described = [name for name in ("k_desc", "rest_desc") if made.tensors[name] is not None]
        of_launches = _values_by_name(
            made.launches, ("q", "keys", "values", *("keys" for _ in described), "table", "ranges"), new=("k", "v"), sink=sinks,
            captured=("q", "q"),  # programs capture no tensors: their places hold q (`launch.pack_captured`)
        )  # fmt: skip
        order = "table", "ranges", "keys", "values", "q", "k", "v", *sinks, "out", "lse", *_scratch_names(made.launches), "scale"
        self._launch = _sequence(made.launches, of_launches, order)

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


class DecodeForward(_DecodeMemory):
    """`attend_contiguous` of a call that repeats (`PreparedForward`)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, work: PagedWork) -> None:
        results = empty_results(q, v.shape[-1])
        made = contiguous_launch(q, k, v, work, results)
        # Holds the mask's captured tensors and no other tensor of the caller: an empty list is packed as (q,) at each call.
        self._mask_captured = made.per_call["mask_captured"] if work.mask_captured else None
        for packed, given in zip(self._mask_captured or (), work.mask_captured, strict=True):
            if packed.data_ptr() != given.data_ptr():
                note_upload(packed)  # a contiguous copy, made on the current stream
        self._made = made._replace(tensors=dict.fromkeys(made.tensors), per_call={"scale": made.per_call["scale"]})
        self._index = q.device.index
        masks = [t.data_ptr() for t in self._mask_captured or ()]
        super().__init__(q, results, made.launches, (*masks, float(work.scale)))
        mask_names, score_names = [f"mask{i}" for i in range(len(masks))], [f"score{i}" for i in range(len(work.score_captured))]
        of_launches = _values_by_name(
            made.launches, ("q", "keys", "values"), new=(), sink=(), captured=(*(mask_names or ["q"]), *(score_names or ["q"]))
        )
        order = "q", "keys", "values", *score_names, "out", "lse", *_scratch_names(made.launches), *mask_names, "scale"
        self._compiled = partial(_sequence, made.launches, of_launches, order)
        self._launch: LaunchAll | None = None  # before the kernels are compiled

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, score_captured: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        stream = direct_stream(self._index)
        if stream is None or self._launch is None or collected_jobs() is not None:
            return self._run(q, k, v, score_captured)
        scratch = self._held
        if scratch is None or scratch.stream != stream:
            scratch = self._scratch(stream, hold=True)
        packed = pack_captured(score_captured, q) if score_captured else ()
        scores = [t.data_ptr() for t in packed]
        out, lse = self._empty(*self._out), self._empty(*self._lse)
        self._launch(stream, (q.data_ptr(), k.data_ptr(), v.data_ptr(), *scores, out.data_ptr(), lse.data_ptr(), *scratch.values))
        return out, lse

    def _run(self, q: Tensor, k: Tensor, v: Tensor, score_captured: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The call where a profiler watches launches, another device is current or a kernel is not compiled."""
        out, lse = empty_results(q, v.shape[-1])
        tensors = {**self._made.tensors, "q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse}
        mask_captured = pack_captured((), q) if self._mask_captured is None else self._mask_captured
        per_call = {**self._made.per_call, "mask_captured": mask_captured, "score_captured": pack_captured(score_captured, q)}
        self._made._replace(tensors=tensors, per_call=per_call).run()
        if self._launch is None and all(one.is_compiled for one in self._made.launches.all):
            self._launch = self._compiled()
        return out, lse


def _scratch_names(launches: Launches) -> tuple[str, ...]:
    """The values that are addresses of scratch memory."""
    if not any(launches.parts):
        return ()
    counted = ("counters",) if launches.merge is None else () if launches.repair is None else ("flags",)
    return "part_out", "part_lse", *counted


def _values_by_name(
    launches: Launches, read: tuple[str, ...], *, new: tuple[str, ...], sink: tuple[str, ...], captured: tuple[str, ...]
) -> list[tuple[str, ...]]:  # fmt: skip
    """The values of each launch, in the order of its kernel's arguments: tensors that are not None, then captured tensors and the scale."""
    results = _scratch_names(launches)
    if not results:
        return [(*read, *new, "out", "lse", *sink, *captured, "scale")]
    if launches.merge is None:
        return [(*read, *new, "part_out", "part_lse", *sink, "out", "lse", "counters", *captured, "scale")]
    ranges = [name for name in read if name == "ranges"]
    made = [(*read, *new, *results, *captured, "scale"), ("part_out", "part_lse", *ranges, *sink, "out", "lse")]
    if launches.repair is not None:
        made.insert(1, (*read, *results, *captured, "scale"))
    return made


def _sequence(launches: Launches, of_launches: Sequence[Sequence[str]], order: tuple[str, ...]) -> LaunchAll:
    """The launches of a call by values in this order."""
    return launch_sequence(launches.all, [[order.index(name) for name in names] for names in of_launches])


def _empty_strided(device: torch.device, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=device)
