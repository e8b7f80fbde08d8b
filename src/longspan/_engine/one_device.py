"""Attention on one device: the whole sequence as one piece of work for one kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from longspan._engine.sink import sink_gradient, sink_state
from longspan._engine.table_cache import MaskTables, StaticTables, TableCache
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors
from longspan._kernels.few_queries import is_decoding
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Grads, Kernel, State, Work
from longspan._kernels.registry import STATIC, KernelCall, NotSupported, choose, has_triton, kernel_named
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BLOCK_SIZE, BlockTable
from longspan._masks.static_mask import static_mask_of

_PLAIN_BLOCK = (BLOCK_SIZE, BLOCK_SIZE)
_tables = TableCache()


def forward(inputs: CallTensors, options: CallOptions) -> State:
    """out in the dtype of q, lse, and the max scores if asked for."""
    return forward_by(*kernel_and_work(inputs, options, backward=False), inputs, max_scores=options.max_scores)


def forward_by(kernel: Kernel, work: Work, inputs: CallTensors, *, max_scores: bool = False) -> State:
    """`forward` by a given kernel and work."""
    state = sink_state(inputs.sink, inputs.q, inputs.v, max_scores=max_scores)
    return kernel.forward(_kernel_inputs(inputs), work, state=state, final=True, max_scores=max_scores)


def backward(tensors: BackwardTensors, options: CallOptions) -> tuple[Grads, Tensor | None]:
    """Gradients of q, k, v in their dtypes, of captured tensors, and of the sink."""
    return backward_by(*kernel_and_work(tensors.inputs, options, backward=True), tensors)


def backward_by(kernel: Kernel, work: Work, tensors: BackwardTensors) -> tuple[Grads, Tensor | None]:
    """`backward` by a given kernel and work."""
    inputs, out, lse, grad_out, grad_lse = tensors.inputs, tensors.out, tensors.lse, tensors.grad_out, tensors.grad_lse
    delta = None if inputs.sink is None else kernel.delta(out, grad_out, grad_lse)
    kernel_tensors = BackwardInputs(
        inputs=_kernel_inputs(inputs), out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse, needs=tensors.needs, delta=delta
    )  # fmt: skip
    grads = kernel.backward(kernel_tensors, work, wide=False)
    return grads, None if delta is None else sink_gradient(inputs.sink, lse, delta)


def _kernel_inputs(inputs: CallTensors) -> AttentionInputs:
    return AttentionInputs(q=inputs.q, k=inputs.k, v=inputs.v)


@lru_cache(maxsize=256)
def plain_tiling(length: int, block: int) -> Tiling:
    """A whole sequence in tiles. One object per size: kernels cache what they derive from a tiling."""
    return Tiling(length=length, block=block)


def make_work(
    inputs: CallTensors, options: CallOptions, tables: MaskTables | StaticTables, *, backward: bool, block: tuple[int, int] = _PLAIN_BLOCK
) -> Work:  # fmt: skip
    """The whole attention as one piece of work, in tiles of `block`."""
    work = work_of_table(inputs, options, tables.at(block, inputs.mask_captured))
    joint = options.spec.joint(inputs.score_captured) if backward else None
    return replace(work, joint=joint, mask_is_fixed=isinstance(tables, StaticTables))


def work_of_table(inputs: CallTensors, options: CallOptions, table: BlockTable) -> Work:
    """The whole attention as one piece of work over the tiles of a table, for a forward pass."""
    q, spec = inputs.q, options.spec
    return Work(
        table=table,
        q_tiles=plain_tiling(q.shape[2], table.block[0]),
        kv_tiles=plain_tiling(inputs.k.shape[2], table.block[1]),
        scale=options.scale,
        mask=spec.mask,
        mask_captured=[t.to(q.device) for t in inputs.mask_captured],
        score=spec.score,
        score_captured=[t.to(q.device) for t in inputs.score_captured],
    )


def mask_tables(inputs: CallTensors, options: CallOptions) -> MaskTables | StaticTables:
    """The block tables of the call's mask, cached."""
    batch, heads, q_len, _ = inputs.q.shape
    static = static_mask_of(inputs.mask_captured)
    if static is not None:
        return StaticTables(static, q_len, inputs.k.shape[2], batch=batch, heads=heads)
    return _tables.tables(options.spec.mask, inputs.mask_captured, q_len, inputs.k.shape[2], batch=batch, heads=heads)


def kernel_and_work(inputs: CallTensors, options: CallOptions, *, backward: bool) -> tuple[Kernel, Work]:
    """The kernel of a pass and its work, in the kernel's tile size."""
    tables = mask_tables(inputs, options)
    work = make_work(inputs, options, tables, backward=backward)
    kernel_inputs = _kernel_inputs(inputs)
    static = isinstance(tables, StaticTables)
    decodes = not backward and inputs.sink is None and not options.max_scores and not static
    kernel = _pass_kernel(options.spec.kernel, KernelCall(kernel_inputs, work), decodes=decodes)
    if static and kernel.name not in STATIC:
        raise NotSupported(f"kernel {kernel.name!r} does not support StaticMask: expected one of {', '.join(map(repr, STATIC))}")
    block = kernel.block_size(kernel_inputs, work.table.nominal)
    if block == _PLAIN_BLOCK:
        return kernel, work
    q_tiles, kv_tiles = plain_tiling(inputs.q.shape[2], block[0]), plain_tiling(inputs.k.shape[2], block[1])
    return kernel, replace(work, table=tables.at(block, inputs.mask_captured), q_tiles=q_tiles, kv_tiles=kv_tiles)


def _pass_kernel(name: str, call: KernelCall, *, decodes: bool) -> Kernel:
    """The kernel of a pass. If `decodes`, "auto" takes triton, which has a decode kernel, for few queries over many keys."""
    if name == "auto" and decodes and call.inputs.q.is_cuda and has_triton() and is_decoding(*call):
        triton = kernel_named("triton")
        if triton.capabilities(*call).unsupported is None:
            return triton
    return choose(name, [call]).kernel
