"""`HopperKernel`: the kernel protocol over the Hopper kernels. Shapes and names as in `longspan.kernels.protocol`."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.kernels.hopper.passes import HopperCall, streamable
from longspan.kernels.protocol import State, Work
from longspan.kernels.triton import launch
from longspan.kernels.triton.interpreter import interpreted
from longspan.kernels.triton.kernel import TritonKernel, capability, empty_state, prefill, usable
from longspan.masks.table import BlockTable

HOPPER = (9, 0)
TILE = 128


class HopperKernel(TritonKernel):
    """Numerics as the `triton` kernel's: scores, sums and the running state in float32, probabilities in the values' dtype where they
    meet the values.
    """

    name = "hopper"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> str | None:
        if interpreted():
            return "TRITON_INTERPRET=1 is set: the interpreter has no Gluon"
        if not q.is_cuda:
            return f"tensors on {q.device}: it needs a Hopper GPU"
        if capability(q.device) != HOPPER:
            found = ".".join(map(str, capability(q.device)))
            return f"{torch.cuda.get_device_name(q.device)} has compute capability {found}: it needs 9.0 (Hopper)"
        if q.dtype not in (torch.bfloat16, torch.float16):
            return f"dtype {q.dtype}: it computes bfloat16 and float16"
        if q.shape[-1] % 8 or v.shape[-1] % 8:
            return f"head dims {q.shape[-1]} and {v.shape[-1]}: both must be multiples of 8, the copy engine's 16 bytes"
        if any(block % TILE for block in work.table.block):
            return f"table block {work.table.block}: both sizes must be multiples of {TILE}"
        return super().refuses(q, k, v, work)

    def block(self, q: Tensor, v: Tensor, table: BlockTable) -> tuple[int, int]:
        return table.block

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, state: State | None, final: bool, peak: bool) -> State:
        # Past a tile's end the copy engine reads on: what lies there must be rows of other tiles, not memory that nobody wrote.
        if not q.numel() or not k.numel() or not launch.facts(work.kv_tiles).covers:
            return super().forward(q, k, v, work, state=state, final=final, peak=peak)
        old = None if state is None else usable(state, peak=peak)
        in_place = old is not None and not final
        result = old if in_place else empty_state(q, v.shape[-1], q.dtype if final else torch.float32, peak=peak)
        assert result is not None
        if not in_place and not (launch.facts(work.q_tiles).covers and bool((work.table.tiles_per_row > 0).all())):
            prefill(result, old)
        HopperCall(streamable(q), streamable(k), streamable(v), work, capability=HOPPER, config=None).forward(result, old, busy_only=True)
        return result
