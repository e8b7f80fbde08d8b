"""Attention on one device: the whole sequence as one piece of work for one kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from weakref import WeakKeyDictionary

from torch import Tensor

from longspan._engine.sink import sink_gradient, sink_state
from longspan._engine.table_cache import TableCache
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors
from longspan._kernels.protocol import Grads, Kernel, State, Tiling, Work
from longspan._kernels.registry import choose
from longspan._masks.block_table import BLOCK_SIZE, BlockTable

_tables = TableCache()
_other_sizes: WeakKeyDictionary[BlockTable, dict[tuple[int, int], BlockTable]] = WeakKeyDictionary()


def forward(inputs: CallTensors, options: CallOptions) -> State:
    """out in the dtype of q, lse, and the max scores if asked for."""
    kernel, work = _kernel_and_work(inputs, options, backward=False)
    state = sink_state(inputs.sink, inputs.q, inputs.v, max_scores=options.max_scores)
    return kernel.forward(inputs.q, inputs.k, inputs.v, work, state=state, final=True, peak=options.max_scores)


def backward(tensors: BackwardTensors, options: CallOptions) -> tuple[Grads, Tensor | None]:
    """Gradients of q, k, v in their dtypes, of captured tensors, and of the sink."""
    inputs, out, lse, grad_out, grad_lse = tensors.inputs, tensors.out, tensors.lse, tensors.grad_out, tensors.grad_lse
    kernel, work = _kernel_and_work(inputs, options, backward=True)
    delta = None if inputs.sink is None else kernel.delta(out, grad_out, grad_lse)
    grads = kernel.backward(
        inputs.q, inputs.k, inputs.v, out, lse, grad_out, grad_lse, work, needs=tensors.needs, wide=False, delta=delta
    )  # fmt: skip
    return grads, None if delta is None else sink_gradient(inputs.sink, lse, delta)


@lru_cache(maxsize=256)
def plain_tiling(length: int, block: int) -> Tiling:
    """A whole sequence in tiles. One object per size: kernels cache what they derive from a tiling."""
    return Tiling(length=length, block=block)


def make_work(
    inputs: CallTensors, options: CallOptions, *, backward: bool, block: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE)
) -> Work:  # fmt: skip
    """The whole attention as one piece of work, in tiles of `block`."""
    q, spec = inputs.q, options.spec
    batch, heads, q_len, _ = q.shape
    kv_len = inputs.k.shape[2]
    return Work(
        table=_tables.table(spec.mask, inputs.mask_captured, q_len, kv_len, block=block, batch=batch, heads=heads),
        q_tiles=plain_tiling(q_len, block[0]),
        kv_tiles=plain_tiling(kv_len, block[1]),
        scale=options.scale,
        mask=spec.mask,
        mask_captured=[t.to(q.device) for t in inputs.mask_captured],
        score=spec.score,
        score_captured=[t.to(q.device) for t in inputs.score_captured],
        joint=spec.joint(inputs.score_captured) if backward else None,
    )


def _kernel_and_work(inputs: CallTensors, options: CallOptions, *, backward: bool) -> tuple[Kernel, Work]:
    q, k, v = inputs.q, inputs.k, inputs.v
    work = make_work(inputs, options, backward=backward)
    max_scores = options.max_scores and not backward
    kernel = choose(options.spec.kernel, q, k, v, work, staged=inputs.sink is not None, backward=backward, peak=max_scores)
    block = kernel.block(q, v, work.table)
    if block == (BLOCK_SIZE, BLOCK_SIZE):
        return kernel, work
    # The captured tensors were compared for the first table. Another tile size of the same table needs no second comparison.
    other = _other_sizes.setdefault(work.table, {})
    if block not in other:
        other[block] = make_work(inputs, options, backward=backward, block=block).table
    q_tiles, kv_tiles = plain_tiling(q.shape[2], block[0]), plain_tiling(k.shape[2], block[1])
    return kernel, replace(work, table=other[block], q_tiles=q_tiles, kv_tiles=kv_tiles)
