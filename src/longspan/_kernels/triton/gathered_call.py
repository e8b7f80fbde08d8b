"""Launches of the kernels over single chosen keys (`longspan._kernels.triton.gathered`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.buffers import empty_state, usable
from longspan._kernels.gpu.compile_options import FUSED
from longspan._kernels.gpu.launch_call import LaunchCall, Pass
from longspan._kernels.gpu.lookup_bounds import check_lookups
from longspan._kernels.gpu.prepared_launch import PreparedLaunch, layout_launch
from longspan._kernels.protocol import AttentionInputs, Grads, Selection, State, Work
from longspan._kernels.triton.gathered import gathered_backward_kernel, gathered_forward_kernel, unique_rows_kernel

_UNIQUE_CTAS = 1056  # of `unique_rows_kernel`: eight per SM of an H200; each has a bit per block of keys


@dataclass(frozen=True, kw_only=True, eq=False)
class GatheredKeys:
    """A selection whose entries do not repeat: repeated ones are −1."""

    selection: Selection

    @property
    def signature(self) -> Hashable:
        return "gathered", self.selection.granularity, self.selection.q_granularity, tuple(self.selection.indices.shape)


def gathered_work(work: Work, selection: Selection) -> Work:
    """`work` over single chosen keys."""
    blocks = -(-work.kv_tiles.length // selection.granularity)
    return replace(work, device_tables=GatheredKeys(selection=replace(selection, indices=without_repeats(selection.indices, blocks))))


def without_repeats(indices: Tensor, blocks: int) -> Tensor:
    """indices [..., k] with −1 in place of entries that repeat. A row that has repeats is sorted. blocks: number above all indices."""
    indices = indices.contiguous()
    result, k = torch.empty_like(indices), indices.shape[-1]
    rows, words = indices.numel() // k, -(-blocks // 32)
    ctas = min(rows, _UNIQUE_CTAS)
    tensors = {
        "indices_ptr": indices, "result_ptr": result,
        "bits_ptr": torch.zeros(ctas, words, dtype=torch.int32, device=indices.device),
    }  # fmt: skip
    constants = {"rows": rows, "words": words, "ctas": ctas, "K": k, "KP": triton.next_power_of_2(k)}
    layout_launch(unique_rows_kernel, tensors, constants, ctas)(tensors, {})
    return result


def _shape(m: int, granularity: int, *, backward: bool, wide: bool) -> tuple[int, int, int]:
    """(warps, stages, keys per step) for m rows of a tile. wide: head dims over 128, or float32.

    Up to 16 rows, bound by L2: CTAs of one warp, without barriers between warps. H200, NSA's rows of one query (8 heads, blocks of 64 keys,
    D 128), TFLOP/s with 4 warps: forward 55, backward 28; with one: 75 and 34. Blocks of 16 keys: forward 49 and 66.
    """
    if wide:
        return 4, 1, 32
    if m == 16 and granularity >= 16:
        return (1, 3, 16) if backward else (1, 2, 32)
    return 4, 2, 32 if backward else 64


class GatheredCall(LaunchCall):
    """The tensors of one call over single chosen keys."""

    def __init__(self, inputs: AttentionInputs, work: Work) -> None:
        super().__init__(inputs, work)
        assert isinstance(work.device_tables, GatheredKeys)
        self._selection = work.device_tables.selection

    def forward(self, old: State | None) -> State:
        """The final state, merged with `old`."""
        result = empty_state(self.q, self.v.shape[-1], self.q.dtype, max_scores=False)
        old = None if old is None else usable(old, max_scores=False)
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v, "indices_ptr": self._selection.indices,
            "out_ptr": result.out, "lse_ptr": result.lse,
            "old_out_ptr": None if old is None else old.out, "old_lse_ptr": None if old is None else old.lse,
        }  # fmt: skip
        self.launch(Pass(name="gathered forward", kernel=gathered_forward_kernel, tensors=tensors))
        return result

    def backward(self, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Grads:
        """Gradients of q in its dtype, of k and v in float32."""
        dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (self.k, self.v))
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v, "indices_ptr": self._selection.indices, "do_ptr": grad_out,
            "lse_ptr": lse, "delta_ptr": delta, "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv,
        }  # fmt: skip
        needs = (False,) * len(self.work.score_captured)
        self.launch(Pass(name="gathered backward", kernel=gathered_backward_kernel, tensors=tensors, needs=needs))
        return Grads(q=dq, k=dk, v=dv, captured=[None for _ in needs])

    def prepare(self, one: Pass) -> PreparedLaunch:
        q, work, selection = self.q, self.work, self._selection
        check_lookups(work, q.shape[0], q.shape[1])
        batch, heads, q_len, d = q.shape
        shared, e = heads // self.k.shape[1], self.v.shape[-1]
        rows = min(shared, selection.heads_per_choice)  # query heads of one KV head with one choice
        options = launch.options(work, q.dtype)
        joint: Any = None
        if work.score is not None and work.joint is not None and one.needs is not None:
            joint = codegen.joint_function(work.score, work.joint, one.needs, options)
        m = max(16, 1 << (rows - 1).bit_length())
        backward = one.kernel is gathered_backward_kernel
        warps, stages, n = _shape(m, selection.granularity, backward=backward, wide=max(d, e) > 128 or q.dtype == torch.float32)
        return PreparedLaunch(
            kernel=one.kernel,
            options={"num_warps": warps, "num_stages": stages, **FUSED},
            ctas=batch * (heads // rows) * q_len,
            device=q.device,
            descriptors={},
            constants={
                **self._strides(one),
                "mask_sizes": launch.pack_sizes(work.mask_captured), "score_sizes": launch.pack_sizes(work.score_captured),
                "selection": (*selection.indices.shape, selection.q_granularity, selection.heads_per_choice),
                "heads": heads, "shared": shared, "q_len": q_len, "kv_len": self.kv_len,
                "MASK": launch.function(work.mask, options), "SCORE": launch.function(work.score, options), "JOINT": joint,
                "GRANULARITY": selection.granularity, "M": m, "ROWS": rows, "N": n,
                "D": d, "DP": launch.padded(d), "E": e, "EP": launch.padded(e), "PRECISION": self.precision,
            },
        )  # fmt: skip
