"""Lists of single chosen keys that a query sees: distinct, allowed by the mask, without gaps.

    indices [B or 1, choices, rows, k]  ──►  keys [B or 1, choices, rows, k], counts [B or 1, choices, rows]

Kernels that gather keys then read the first `counts` entries of a row: no entry is −1 or repeats. If each query has a row of its own, no
entry is hidden by the mask besides the selection; otherwise kernels evaluate that mask.

Two launches: rows whose keys ascend need no search for repeats; the other rows follow.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.compile_options import FUSED
from longspan._kernels.gpu.launch_call import LaunchCall, Pass
from longspan._kernels.gpu.prepared_launch import PreparedLaunch
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.protocol import AttentionInputs, Selection, Work

_CTAS = 2112  # of four warps, 16 per SM of an H200; each has a bit per key
_ASCENDING_CTAS = 4224  # of one warp
_CHUNK = 512  # entries that a warp of `ascending_keys_kernel` reads at a time: with all 2,048, few warps fit on an SM
_PEEK = 32  # entries that it compares before it lists any: rows in no order cost one small load
_DYNAMIC = ["rows", "words", "ctas", "kv_len", "first_b"]


class ChosenKeys(NamedTuple):
    """The lists of a selection of single keys."""

    keys: Tensor
    counts: Tensor


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b)


@triton.jit
def _source_of(row, indices_ptr, selection, K: tl.constexpr):
    """(batch row, row of queries, pointer to its indices) of row `row` of the lists. selection: (batch, choices, rows) of the indices."""
    batch_rows, choices, source_rows = selection
    q, choice, b = row % source_rows, (row // source_rows) % choices, row // (source_rows * choices)
    return b, q, indices_ptr + wide(((b % batch_rows) * choices + choice) * source_rows + q) * K


@triton.jit
def _seen(entry, chosen, b, q, mask_captured, mask_sizes, MASK: tl.constexpr, KP: tl.constexpr):
    """The chosen entries that query q sees."""
    if MASK is not None:
        at = tl.where(chosen, entry, 0)  # programs index captured tensors by kv: no negative or padded positions
        here = tl.zeros([KP], tl.int32)
        chosen = chosen & MASK(b, here, here + q, at, mask_captured, mask_sizes)
    return chosen


@triton.jit(do_not_specialize=_DYNAMIC)
def ascending_keys_kernel(
    indices_ptr, keys_ptr, counts_ptr, mask_captured, mask_sizes, selection, rows, ctas, kv_len, first_b,
    MASK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PEEK: tl.constexpr,
):  # fmt: skip
    """The lists of rows pid, pid + ctas, … whose keys ascend: they do not repeat. The other rows get the count −1.

    Two neighbours of the first PEEK entries that fall end the search, also where the mask hides them.
    """
    j = tl.arange(0, KP)
    near = tl.arange(0, PEEK)
    for row in tl.range(tl.program_id(0), rows, ctas, num_stages=1):
        b, q, source = _source_of(row, indices_ptr, selection, K)
        result = keys_ptr + wide(row) * K
        count, highest = 0, 0
        start = tl.load(source + near, mask=near < K, other=-1)
        following = tl.load(source + near + 1, mask=near + 1 < K, other=-1)
        falls = tl.max(((following >= 0) & (following <= start)).to(tl.int32), 0)
        for first in tl.range(0, K, KP, num_stages=1):
            if falls == 0:
                entry = tl.load(source + first + j, mask=first + j < K, other=-1)
                chosen = _seen(entry, (entry >= 0) & (entry < kv_len), b + first_b, q, mask_captured, mask_sizes, MASK, KP)
                number = chosen.to(tl.int32)
                place = count + tl.cumsum(number, 0) - number
                ahead = tl.where(chosen, entry - place, 0)  # does not fall from key to key if keys ascend
                before = tl.maximum(tl.associative_scan(ahead, 0, _higher), highest)
                falls = tl.max((before > ahead).to(tl.int32) * number, 0)
                tl.store(result + place, entry, mask=chosen)
                count += tl.sum(number, 0)
                highest = tl.maximum(highest, tl.max(ahead, 0))
        tl.store(counts_ptr + row, tl.where(falls > 0, -1, count))


@triton.jit(do_not_specialize=_DYNAMIC)
def chosen_keys_kernel(
    indices_ptr, keys_ptr, counts_ptr, bits_ptr, mask_captured, mask_sizes, selection, rows, words, ctas, kv_len, first_b,
    MASK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The lists of rows pid, pid + ctas, … that have the count −1. bits_ptr: zeros, `words` words per CTA.

    Each entry sets its bit; an entry whose bit is set already repeats. Which of two equal entries comes second depends on timing, so a row
    with repeats is sorted: results have the same bits in every run.
    """
    pid = tl.program_id(0)
    bits = bits_ptr + wide(pid) * words
    j = tl.arange(0, KP)
    for row in tl.range(pid, rows, ctas, num_stages=1):
        if tl.load(counts_ptr + row) < 0:
            b, q, source = _source_of(row, indices_ptr, selection, K)
            result = keys_ptr + wide(row) * K
            entry = tl.load(source + j, mask=j < K, other=-1)
            chosen = (entry >= 0) & (entry < kv_len)
            bit = 1 << (entry & 31)
            old = tl.atomic_or(bits + entry // 32, bit, mask=chosen, sem="relaxed")
            repeats = tl.max((chosen & ((old & bit) != 0)).to(tl.int32), 0) > 0
            tl.debug_barrier()
            if words <= 8 * K:  # neighbouring words share sectors of L2: fewer stores than one per entry
                for first in tl.range(0, words, KP, num_stages=1):
                    tl.store(bits + first + j, 0, mask=first + j < words)
            else:
                tl.store(bits + entry // 32, 0, mask=chosen)
            if repeats:
                ordered = tl.sort(entry)
                tl.store(result + j - (KP - K), ordered, mask=j >= KP - K)
                tl.debug_barrier()
                before = tl.load(result + j - 1, mask=(j > 0) & (j < K), other=-1)
                entry = tl.load(result + j, mask=j < K, other=-1)
                chosen = (entry >= 0) & (entry < kv_len) & (entry != before)
            chosen = _seen(entry, chosen, b + first_b, q, mask_captured, mask_sizes, MASK, KP)
            number = chosen.to(tl.int32)
            place = tl.cumsum(number, 0) - number
            tl.debug_barrier()
            tl.store(result + place, entry, mask=chosen)
            tl.store(counts_ptr + row, tl.sum(number, 0))
            tl.debug_barrier()


def adds_grads(selection: Selection) -> bool:
    """Whether torch's present settings allow kernels that gather keys: they add dK and dV in arrival order."""
    return not torch.are_deterministic_algorithms_enabled() and selection.indices.shape[3] > 0


class ChosenKeysCall(LaunchCall):
    """The launches that list the keys of a selection."""

    def __init__(self, inputs: AttentionInputs, work: Work, selection: Selection) -> None:
        super().__init__(inputs, work, variant=(selection.q_granularity, tuple(selection.indices.shape)))
        self._selection = selection

    @property
    def _masked(self) -> bool:
        return self.work.mask is not None and self._selection.q_granularity == 1

    def lists(self) -> ChosenKeys:
        indices = self._selection.indices.contiguous()
        shape = (self.q.shape[0] if self._masked else indices.shape[0], *indices.shape[1:3])
        keys, counts = (torch.empty(s, dtype=torch.int32, device=indices.device) for s in ((*shape, indices.shape[3]), shape))
        bits = torch.zeros(min(counts.numel(), _CTAS), -(-self.kv_len // 32), dtype=torch.int32, device=indices.device)
        tensors = {"indices_ptr": indices, "keys_ptr": keys, "counts_ptr": counts}
        self.launch(Pass(name="ascending keys", kernel=ascending_keys_kernel, tensors=tensors))
        self.launch(Pass(name="chosen keys", kernel=chosen_keys_kernel, tensors=tensors | {"bits_ptr": bits}))
        return ChosenKeys(keys, counts)

    def prepare(self, one: Pass) -> PreparedLaunch:
        indices, counts = (one.tensors[name] for name in ("indices_ptr", "counts_ptr"))
        assert indices is not None and counts is not None
        k, rows, words = indices.shape[3], counts.numel(), -(-self.kv_len // 32)
        ascending = one.kernel is ascending_keys_kernel
        ctas = min(rows, _ASCENDING_CTAS if ascending else _CTAS)
        own: dict[str, Any] = {"PEEK": _PEEK} if ascending else {"words": words}
        constants: dict[str, Any] = {
            "mask_sizes": launch.pack_sizes(self.work.mask_captured),
            "selection": tuple(indices.shape[:3]), "rows": rows, "ctas": ctas, "kv_len": self.kv_len,
            "MASK": launch.function(self.work.mask if self._masked else None, self.program_options),
            "K": k, "KP": triton.next_power_of_2(min(k, _CHUNK) if ascending else k), **own,
        }  # fmt: skip
        return PreparedLaunch(
            kernel=one.kernel, options={"num_warps": 1 if ascending else 4, **FUSED}, ctas=ctas, device=indices.device, descriptors={},
            constants=constants,
        )  # fmt: skip
