"""Lists of single chosen keys that a query sees: distinct, allowed by the mask, without gaps.

    indices [B or 1, choices, rows, k]  ──►  keys [B or 1, choices, rows, k], counts [B or 1, choices, rows]

Kernels that gather keys then read the first `counts` entries of a row: no entry is −1 or repeats. If each query has a row of its own, no
entry is hidden by the mask besides the selection; otherwise kernels evaluate that mask.
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
from longspan._kernels.gpu.launch_call import LaunchCall, Pass
from longspan._kernels.gpu.prepared_launch import PreparedLaunch
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.protocol import AttentionInputs, Selection, Work

_CTAS = 2112  # 16 per SM of an H200; each has a bit per key
_DYNAMIC = ["rows", "words", "ctas", "kv_len", "first_b"]


class ChosenKeys(NamedTuple):
    """The lists of a selection of single keys."""

    keys: Tensor
    counts: Tensor


@triton.jit(do_not_specialize=_DYNAMIC)
def chosen_keys_kernel(
    indices_ptr, keys_ptr, counts_ptr, bits_ptr, mask_captured, mask_sizes, selection, rows, words, ctas, kv_len, first_b,
    MASK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The lists of rows pid, pid + ctas, … selection: (batch, choices, rows) of the indices. bits_ptr: zeros, `words`
    words per CTA.

    Each entry sets its bit; an entry whose bit is set already repeats. Which of two equal entries comes second depends on timing, so a row
    with repeats is sorted: results have the same bits in every run.
    """
    batch_rows, choices, source_rows = selection
    pid = tl.program_id(0)
    bits = bits_ptr + wide(pid) * words
    j = tl.arange(0, KP)
    for row in tl.range(pid, rows, ctas, num_stages=1):
        q, choice, b = row % source_rows, (row // source_rows) % choices, row // (source_rows * choices)
        source = indices_ptr + wide(((b % batch_rows) * choices + choice) * source_rows + q) * K
        result = keys_ptr + wide(row) * K
        entry = tl.load(source + j, mask=j < K, other=-1)
        chosen = (entry >= 0) & (entry < kv_len)
        bit = 1 << (entry & 31)
        old = tl.atomic_or(bits + entry // 32, bit, mask=chosen, sem="relaxed")
        repeats = tl.max((chosen & ((old & bit) != 0)).to(tl.int32), 0) > 0
        tl.debug_barrier()
        tl.store(bits + entry // 32, 0, mask=chosen)
        if repeats:
            ordered = tl.sort(entry)
            tl.store(result + j - (KP - K), ordered, mask=j >= KP - K)
            tl.debug_barrier()
            before = tl.load(result + j - 1, mask=(j > 0) & (j < K), other=-1)
            entry = tl.load(result + j, mask=j < K, other=-1)
            chosen = (entry >= 0) & (entry < kv_len) & (entry != before)
        if MASK is not None:
            at = tl.where(chosen, entry, 0)  # programs index captured tensors by kv: no negative or padded positions
            here = tl.zeros([KP], tl.int32)
            chosen = chosen & MASK(b + first_b, here, here + q, at, mask_captured, mask_sizes)
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
    """The launch that lists the keys of a selection."""

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
        tensors = {"indices_ptr": indices, "keys_ptr": keys, "counts_ptr": counts, "bits_ptr": bits}
        self.launch(Pass(name="chosen keys", kernel=chosen_keys_kernel, tensors=tensors))
        return ChosenKeys(keys, counts)

    def prepare(self, one: Pass) -> PreparedLaunch:
        indices, counts, bits = (one.tensors[name] for name in ("indices_ptr", "counts_ptr", "bits_ptr"))
        assert indices is not None and counts is not None and bits is not None
        k = indices.shape[3]
        constants: dict[str, Any] = {
            "mask_sizes": launch.pack_sizes(self.work.mask_captured),
            "selection": tuple(indices.shape[:3]),
            "rows": counts.numel(), "words": bits.shape[1], "ctas": bits.shape[0], "kv_len": self.kv_len,
            "MASK": launch.function(self.work.mask if self._masked else None, self.program_options),
            "K": k, "KP": triton.next_power_of_2(k),
        }  # fmt: skip
        return PreparedLaunch(
            kernel=chosen_keys_kernel, options={"num_warps": 4}, ctas=bits.shape[0], device=indices.device, descriptors={},
            constants=constants,
        )  # fmt: skip
