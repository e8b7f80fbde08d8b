"""The passes of one call as launches of the Hopper kernels: as many programs as the device has multiprocessors, which share the items."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longspan.kernels.hopper.config import forward_step
from longspan.kernels.hopper.forward import forward_kernel
from longspan.kernels.protocol import State
from longspan.kernels.triton import launch
from longspan.kernels.triton.passes import Call
from longspan.kernels.triton.prepared import Prepared

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
_L2_BYTES = 32 * 2**20  # of keys and values that the heads at work should not exceed


class HopperCall(Call):
    """The tensors of one call, each as the copy engine can read it. Its methods launch."""

    def forward(self, result: State, old: State | None, *, busy_only: bool) -> None:
        """Fill the rows of `result` that see something, folding `old` in; they may be the same."""
        before = (None, None, None) if old is None else (old.out, old.lse, old.peak)
        counter = torch.zeros(1, dtype=torch.int32, device=self.q.device)
        tensors = (self.q, self.k, self.v, result.out, result.lse, result.peak, *before, counter)
        strided = (result.out, result.out if old is None else old.out)
        known = {"FOLD": self.work.score is None and self.work.scale > 0}
        self._launch("forward", tensors, strided, known, busy_only=True)

    def _prepare(
        self,
        which: str,
        tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor, ...],
        known: dict[str, Any],
        needs: tuple[bool, ...] | None,
        busy_only: bool,
    ) -> Prepared:
        q, v = self.q, self.v
        step = forward_step(launch.padded(q.shape[-1]), launch.padded(v.shape[-1]))
        programs = multiprocessors(q.device)
        items, shared = self._arguments(
            which, forward_kernel, strided, m=step.m, n=step.n, l2_bytes=_L2_BYTES, in_flight=programs, needs=needs, busy_only=busy_only
        )
        return Prepared(
            kernel=forward_kernel,
            options={"num_warps": 4, "maxnreg": step.start_registers},
            programs=min(items, programs),
            device=q.device,
            described={0: partial(described, rows=step.m // 2), 1: partial(described, rows=step.n), 2: partial(described, rows=step.n)},
            known={**known, **shared, "items": items, "STAGES": step.stages, "REGISTERS": step.registers},
        )


def described(tensor: Tensor, *, rows: int) -> TensorDescriptor:
    """`launch.described`, its tiles of `rows` laid out in shared memory as the matrix units read them."""
    plain = launch.described(tensor, rows)
    layout = gl.NVMMASharedLayout.get_default_for(plain.block_shape, _DTYPES[tensor.dtype])
    return TensorDescriptor(tensor, plain.shape, plain.strides, plain.block_shape, layout)


def streamable(tensor: Tensor) -> Tensor:
    """A tensor as the copy engine can read it: itself, or a copy."""
    return tensor if launch.describable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
