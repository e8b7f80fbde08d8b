"""Compilation of a call's backward kernels while its first forward pass runs, or, by `longspan.warm`, of all its kernels.

Compiled kernels depend on dtypes, head dims, programs and layouts, hardly on lengths. The backward pass is made with uninitialised tensors
of the same layouts, in a mode that collects the kernels to compile and launches none (`longspan._kernels.gpu.compilation`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longspan._engine import one_device
from longspan._engine.invariant_mode import is_invariant
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors
from longspan._kernels.protocol import state_dtype
from longspan._masks.block_table import BLOCK_SIZE
from longspan._torch_modes import without_user_defaults

_COMPILED = ("hopper", "triton")  # kernels that Triton compiles
_MAX_BYTES = 2**29  # of q, k and v each; the other tensors of the pass take a few times as much
_MAX_SEEN = 256
_seen: set[Hashable] = set()  # calls whose backward kernels were compiled ahead


@contextmanager
def compiling_backward(inputs: CallTensors, options: CallOptions, needs: Sequence[bool]) -> Iterator[None]:
    """Compile the backward kernels of a call on one device in threads while this context runs its forward pass; once per kind of call.

    needs: whether each tensor that the score program captures needs a gradient.
    """
    if not _may_compile(inputs.q):
        yield
        return
    from longspan._kernels.gpu.compilation import collected_jobs, compiling_meanwhile, start_driver

    q, v = inputs.q, inputs.v
    key = options.spec, q.dtype, q.device, q.shape[-1], v.shape[-1], q.shape[1] == v.shape[1], inputs.sink is None, tuple(needs)
    if key in _seen and collected_jobs() is None:
        yield
        return
    if len(_seen) >= _MAX_SEEN:
        _seen.clear()
    _seen.add(key)
    start_driver()
    try:
        jobs = _backward_jobs(inputs, options, needs)
    except Exception:  # out of memory here, or an error that the backward pass will raise too
        if collected_jobs() is not None:  # `warm` reports it
            raise
        jobs = []
    with compiling_meanwhile(jobs):
        yield


def compiles_only() -> bool:
    """Whether calls compile their kernels and launch none, as in `longspan.warm`."""
    compilation = sys.modules.get("longspan._kernels.gpu.compilation")  # imports Triton
    return compilation is not None and compilation.collected_jobs() is not None


def _may_compile(q: Tensor) -> bool:
    return q.is_cuda and q.numel() > 0 and not is_invariant() and not torch.cuda.is_current_stream_capturing()


def _backward_jobs(inputs: CallTensors, options: CallOptions, needs: Sequence[bool]) -> list[Callable[[], Any]]:
    """Jobs that compile the backward kernels of a call on one device."""
    from longspan._kernels.gpu.compilation import collecting_jobs

    inputs = replace(inputs, q=_shortened(inputs.q), k=_shortened(inputs.k), v=_shortened(inputs.v))
    q, v = inputs.q, inputs.v
    with torch.no_grad(), without_user_defaults(), collecting_jobs() as jobs:
        kernel, work = one_device.kernel_and_work(inputs, options, backward=True)
        if kernel.name in _COMPILED:
            out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty(*q.shape[:-1], v.shape[-1])
            lse = q.new_empty(q.shape[:-1], dtype=state_dtype(q.dtype))
            # Not out itself: launches are cached by which tensors are the same.
            tensors = BackwardTensors(inputs=inputs, out=out, lse=lse, grad_out=torch.empty_like(out), grad_lse=None, needs=needs)
            one_device.backward_by(kernel, work, tensors)
    return jobs


def _shortened(tensor: Tensor) -> Tensor:
    """The tensor [B, H, S, D], or one with fewer tokens and batch rows in the same order of strides if it takes more than `_MAX_BYTES`.

    The number of tokens keeps its remainder, on which the alignment of rows depends.
    """
    if tensor.numel() * tensor.element_size() <= _MAX_BYTES:
        return tensor.detach()
    batch, heads, tokens, dim = tensor.shape
    batch = min(batch, 2)
    fitting = max(4 * BLOCK_SIZE, _MAX_BYTES // (batch * heads * dim * tensor.element_size()))
    tokens = min(tokens, fitting // BLOCK_SIZE * BLOCK_SIZE + tokens % BLOCK_SIZE)
    order = sorted(range(4), key=tensor.stride, reverse=True)
    sizes = (batch, heads, tokens, dim)
    return tensor.new_empty([sizes[i] for i in order]).permute([order.index(i) for i in range(4)])
