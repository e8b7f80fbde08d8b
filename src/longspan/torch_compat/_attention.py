"""torch's `_attention` module of context parallelism: contexts, shards and module styles under torch's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention.flex_attention import BlockMask

from longspan._comm.gather import all_gather_rows
from longspan._comm.mesh import context_mesh
from longspan._dropin.buffers import make_buffers
from longspan._dropin.context import Context
from longspan._dropin.dispatcher import AttentionDispatcher
from longspan._dropin.global_layout import chunked
from longspan._dropin.intercept import AttentionMode, intercepting
from longspan._masks.constructors import mask_mod as as_mask_value
from longspan._plan.layout import Layout
from longspan._plan.sharding import shard, unshard
from longspan._torch_private import tree_flatten
from longspan.torch_compat import _dispatcher
from longspan.torch_compat._block_mask import ShardedBlockMask
from longspan.torch_compat._cp_custom_ops import flex_cp_allgather
from longspan.torch_compat._handlers import (
    ArgsType,
    InputFnType,
    KwargsType,
    OutputFnType,
    _distribute_function,
    _replaced_functions,
    _restore_function,
    _sdpa_handler,
    aten,
    custom_ops,
    existing_custom_ops,
    logger,
)
from longspan.torch_compat._load_balancer import (
    _create_default_load_balancer,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    layout_of,
)
from longspan.torch_compat._options import (
    _CausalBehavior,
    _ContextParallelOptions,
    _cp_options,
    _is_causal_behavior,
    _RotateMethod,
    set_rotate_method,
    strategy,
)
from longspan.torch_compat._ring import (
    _AllGatherRotater,
    _AllToAllRotater,
    _AttentionOp,
    _create_rotater,
    _maybe_wait,
    _partial_update,
    _RingRotater,
    _SDPAMerger,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from longspan.torch_compat._ring_kernels import (
    _scaled_dot_product_ring_cudnn_attention,
    _scaled_dot_product_ring_cudnn_attention_backward,
    _scaled_dot_product_ring_efficient_attention,
    _scaled_dot_product_ring_efficient_attention_backward,
    _scaled_dot_product_ring_flash_attention,
    _scaled_dot_product_ring_flash_attention_backward,
)
from longspan.torch_compat._sharding_rules import register_cp_sharding_rules, unregister_cp_sharding_rules

__all__ = [
    "ArgsType",
    "CPBuffer",
    "CPBufferContainer",
    "CPBufferSeqDims",
    "InputFnType",
    "KwargsType",
    "OutputFnType",
    "_AllGatherRotater",
    "_AllToAllRotater",
    "_AttentionOp",
    "_CausalBehavior",
    "_ContextParallel",
    "_ContextParallelOptions",
    "_DispatchMode",
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_PTRRLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer",
    "_RingRotater",
    "_RotateMethod",
    "_SDPAMerger",
    "_compiled_create_block_mask",
    "_context_parallel_buffers",
    "_context_parallel_shard",
    "_cp_options",
    "_create_cp_block_mask",
    "_create_rotater",
    "_disable_context_parallel_dispatcher",
    "_disable_context_parallel_dispatcher_impl",
    "_disable_cp_dtensor_dispatcher",
    "_dispatch_mode",
    "_distribute_function",
    "_enable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher_impl",
    "_enable_cp_dtensor_dispatcher",
    "_is_causal_behavior",
    "_maybe_wait",
    "_partial_update",
    "_replaced_functions",
    "_restore_function",
    "_scaled_dot_product_ring_cudnn_attention",
    "_scaled_dot_product_ring_cudnn_attention_backward",
    "_scaled_dot_product_ring_efficient_attention",
    "_scaled_dot_product_ring_efficient_attention_backward",
    "_scaled_dot_product_ring_flash_attention",
    "_scaled_dot_product_ring_flash_attention_backward",
    "_sdpa_handler",
    "_templated_ring_attention",
    "_templated_ring_attention_backward",
    "aten",
    "context_parallel",
    "context_parallel_unshard",
    "custom_ops",
    "existing_custom_ops",
    "logger",
    "set_rotate_method",
]


class _DispatchMode(Enum):
    """How SDPA is replaced: for local shards by `context_parallel`, for DTensors by `_context_parallel_shard`'s users."""

    MONKEY_PATCH = auto()
    MODULE_WRAPPER = auto()


_dispatch_mode: _DispatchMode = _DispatchMode.MONKEY_PATCH
_compiled_create_block_mask = None  # torch compiles the creation of block masks; block tables need no compiler

CPBuffer: TypeAlias = Tensor | BlockMask
CPBufferContainer: TypeAlias = Sequence[CPBuffer] | Mapping[str, CPBuffer]
CPBufferSeqDims: TypeAlias = Sequence[int] | Mapping[str, int]


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """`longspan.context_parallel` under torch's options; it replaces `flex_attention` too while it is active.

    The layout is head-tail if `_cp_options.enable_load_balance` is set and 2N divides every length, else contiguous. KV moves as
    `set_rotate_method` says.
    """
    global _dispatch_mode
    _dispatch_mode = _DispatchMode.MONKEY_PATCH
    made = make_buffers(list(buffers or []), list(buffer_seq_dims or []), list(no_restore_buffers or []))
    lengths = list(dict.fromkeys(b.length for b in made))
    ranks, enabled = context_mesh(mesh).size, _cp_options.enable_load_balance
    balanced = enabled and bool(lengths) and all(n % (2 * ranks) == 0 for n in lengths)
    layout = partial(_head_tail_or_contiguous, balanced=balanced)
    context = Context(AttentionDispatcher(mesh, layout=layout, strategy=strategy(), lengths=lengths), made)
    _cp_options.enable_load_balance = balanced
    try:
        with context:
            yield
    finally:
        _cp_options.enable_load_balance = enabled


def _head_tail_or_contiguous(length: int, ranks: int, *, balanced: bool) -> Layout:
    return layout_of(_HeadTailLoadBalancer(length, ranks, "cpu") if balanced else None, length, ranks)


def _enable_context_parallel_dispatcher() -> None:
    """Run SDPA on DTensors that are sharded along the sequence over their mesh, in this thread, from now on."""
    _enable_cp_dtensor_dispatcher()


def _disable_context_parallel_dispatcher() -> None:
    """Undo `_enable_context_parallel_dispatcher`."""
    _disable_cp_dtensor_dispatcher()


def _enable_cp_dtensor_dispatcher() -> None:
    """Run SDPA, and torch's attention operators, on DTensors that are sharded along the sequence over their mesh."""
    register_cp_sharding_rules()


def _disable_cp_dtensor_dispatcher() -> None:
    """Undo `_enable_cp_dtensor_dispatcher`."""
    unregister_cp_sharding_rules(clear_the_cache=False)


def _enable_context_parallel_dispatcher_impl(seq_dim: int, mesh: DeviceMesh) -> None:
    """Enable the dispatcher as `_dispatch_mode` says: by its monkey patch, `F.scaled_dot_product_attention` takes local shards too."""
    if _dispatch_mode is _DispatchMode.MONKEY_PATCH:
        style = _ContextParallel(seq_dim, _ContextParallel.AttentionType.SDPA)
        _distribute_function(F.scaled_dot_product_attention, F, mesh, style.sdpa_input_fn, style.sdpa_output_fn)
    _enable_cp_dtensor_dispatcher()


def _disable_context_parallel_dispatcher_impl() -> None:
    """Undo `_enable_context_parallel_dispatcher_impl`."""
    if _dispatch_mode is _DispatchMode.MONKEY_PATCH:
        _restore_function(F.scaled_dot_product_attention, F)
    _disable_cp_dtensor_dispatcher()


# ------------------------------------------------------------------------------------------------------------------------ shards


def _context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Any] | Mapping[str, Any],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: _LoadBalancer | None = None,
) -> Any:
    """This rank's shards of tensors, and of BlockMasks over whole sequences, in the structure of `buffers`. Differentiable.

    `seq_dims`: a sequence dim for each; ignored for BlockMasks.
    """
    global _dispatch_mode
    _dispatch_mode = _DispatchMode.MODULE_WRAPPER
    _cp_options.enable_load_balance = load_balancer is not None
    flat, spec = tree_flatten(buffers, is_leaf=lambda x: isinstance(x, BlockMask))
    dims, _ = tree_flatten(seq_dims)
    if len(buffers) != len(seq_dims) or len(flat) != len(dims):
        raise ValueError(f"`seq_dims` must have the same structure as `buffers`: expected {len(flat)} dims, got {len(dims)}")
    return spec.unflatten(_context_parallel_buffers(mesh, flat, dims, load_balancer))


def _context_parallel_buffers(
    mesh: DeviceMesh, buffers: list[CPBuffer], buffer_seq_dims: list[int], load_balancer: _LoadBalancer | None = None
) -> list[CPBuffer]:
    """`_context_parallel_shard` of a flat list, which changes no option."""
    shards: list[Any] = []
    layouts: dict[int, Layout] = {}
    for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
        if isinstance(buffer, BlockMask):
            shards.append(_shard_block_mask(mesh, buffer, load_balancer))
            layouts |= {layout.length: layout for layout in shards[-1].layouts}
        elif isinstance(buffer, Tensor):
            local, layout = _shard_tensor(mesh, buffer, dim, load_balancer)
            shards.append(local)
            layouts[layout.length] = layout
        else:
            raise ValueError(f"buffers: expected tensors and BlockMasks, got {type(buffer).__name__}")
    _dispatcher.declare_layouts(mesh.get_group().group_name, layouts)
    return shards


def _shard_tensor(mesh: DeviceMesh, x: Tensor, dim: int, balancer: _LoadBalancer | None) -> tuple[Tensor, Layout]:
    dim = dim % x.ndim
    length, ranks = x.shape[dim], mesh.size()
    layout = layout_of(balancer, length, ranks)
    batch_rows = len(layout.rows)
    if batch_rows > 1 and (dim == 0 or x.shape[0] != batch_rows):
        raise ValueError(
            f"load_balancer: expected dim 0 to be the batch of {batch_rows} rows, for which it was made, got shape {tuple(x.shape)} with "
            f"sequence dim {dim}"
        )
    even = all(layout.local_len(r) == chunked(length, ranks).local_len(r) for r in range(ranks))
    if x.requires_grad or not even:
        return shard(x, dim, layout, mesh.get_local_rank()), layout
    # Through DTensor, which knows its rank also if torch runs several ranks in one process.
    order = torch.cat([torch.atleast_2d(layout.positions(r)) for r in range(ranks)], 1).to(x.device)
    if balancer is None:
        permuted = x
    elif batch_rows == 1:
        permuted = x.index_select(dim, order[0])
    else:
        permuted = torch.stack([part.index_select(dim - 1, row) for part, row in zip(x.unbind(0), order)])
    return distribute_tensor(permuted, mesh, [Shard(dim)], src_data_rank=None).to_local(), layout


def _shard_block_mask(mesh: DeviceMesh, block_mask: BlockMask, balancer: _LoadBalancer | None) -> ShardedBlockMask:
    q, kv = (layout_of(balancer, n, mesh.size()) for n in block_mask.seq_lengths)
    return ShardedBlockMask(block_mask, (q, kv), mesh.get_local_rank(), block_mask.BLOCK_SIZE[0])


def _create_cp_block_mask(
    mask_mod: Callable[..., Tensor],
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    device_mesh: DeviceMesh,
    load_balancer: _LoadBalancer | None = None,
) -> BlockMask:
    """A BlockMask of this rank's queries over the keys of all ranks, from a mask of global positions, for sequences of any length.

    Without a balancer the layout is torch's default, as for `context_parallel_unshard`.
    """
    balancer = load_balancer or _create_default_load_balancer(Q_LEN, device_mesh.size(), device_mesh.device_type)
    whole = as_mask_value(mask_mod).block_table(Q_LEN, KV_LEN, batch=B, heads=H).to_block_mask(device_mesh.device_type)
    layouts = (layout_of(balancer, Q_LEN, device_mesh.size()), layout_of(balancer, KV_LEN, device_mesh.size()))
    return ShardedBlockMask(whole, layouts, device_mesh.get_local_rank(), whole.BLOCK_SIZE[0], (B, H))


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: _LoadBalancer | None = None
) -> list[Tensor]:
    """Whole tensors from every rank's shards. A collective call. Differentiable.

    Without a balancer the layout is torch's default: head-tail if `_cp_options.enable_load_balance` is set and 2N divides the length.
    """
    if len(buffers) != len(seq_dims):
        raise ValueError(f"`seq_dims` must have the same number of elements as `buffers`: expected {len(buffers)}, got {len(seq_dims)}")
    cp_mesh = context_mesh(mesh)
    local_lengths = torch.tensor([[b.shape[d] for b, d in zip(buffers, seq_dims)]], device=buffers[0].device)
    counts = all_gather_rows(cp_mesh, local_lengths, [1] * cp_mesh.size, what="agreement of all ranks, tokens held").T.tolist()
    whole = []
    for buffer, dim, held in zip(buffers, seq_dims, counts):
        balancer = load_balancer or _create_default_load_balancer(sum(held), cp_mesh.size, buffer.device)
        layout = layout_of(balancer, sum(held), cp_mesh.size)
        expected = [layout.local_len(r) for r in range(cp_mesh.size)]
        if expected != held:
            raise ValueError(f"buffers: expected {expected} tokens on the ranks, got {held}; pass the load_balancer that sharded them")
        whole.append(unshard(buffer, dim, layout, cp_mesh))
    return whole


# ------------------------------------------------------------------------------------------------------------------------ style


class _ContextParallel(ParallelStyle):
    """torch's module style: a module whose forward takes the arguments of SDPA or FlexAttention runs it over a mesh."""

    class AttentionType(Enum):
        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"

    def __init__(self, seq_dim: int, attention_type: AttentionType) -> None:
        super().__init__()
        self.seq_dim, self.attention_type = seq_dim, attention_type

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not isinstance(self.attention_type, self.AttentionType):
            raise ValueError(f"attention_type: expected one of {list(self.AttentionType)}, got {self.attention_type!r}")
        hooks = _ForwardHooks(self, mesh)
        module.register_forward_pre_hook(hooks.before, with_kwargs=True)
        module.register_forward_hook(hooks.after, always_call=True)
        return module

    def flex_input_fn(self, module: nn.Module | None, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        """Arguments of FlexAttention with the KV of all ranks in place of this rank's."""
        names = ("query", "key", "value")
        qkv = dict(zip(names, args)) | {n: kwargs[n] for n in names if n in kwargs}
        for name in names:
            if not isinstance(qkv.get(name), Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(qkv.get(name)).__name__}")
        group_name = mesh.get_group().group_name
        qkv["key"], qkv["value"] = flex_cp_allgather(qkv["key"].contiguous(), qkv["value"].contiguous(), self.seq_dim, group_name)
        positional = names[: len(args)]
        kwargs = kwargs | {n: qkv[n] for n in names if n not in positional}
        return (*(qkv[n] for n in positional), *args[3:]), kwargs

    def sdpa_input_fn(self, module: nn.Module | None, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        """Arguments of SDPA with q, k and v as DTensors sharded along the sequence."""

        def sharded(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if not isinstance(x, DTensor):
                return DTensor.from_local(x, mesh, [Shard(self.seq_dim)])
            if tuple(x.placements) != (Shard(self.seq_dim),):
                raise ValueError(f"expected a DTensor placed (Shard({self.seq_dim}),), got {x.placements}; redistribute it")
            return x

        names = ("query", "key", "value")
        return (*map(sharded, args[:3]), *args[3:]), {n: sharded(x) if n in names else x for n, x in kwargs.items()}

    def sdpa_output_fn(self, module: nn.Module | None, inputs: Any, outputs: Any, mesh: DeviceMesh) -> Any:
        """Outputs as local tensors."""
        if isinstance(outputs, Tensor):
            return outputs.to_local() if isinstance(outputs, DTensor) else outputs
        return tuple(x.to_local() if isinstance(x, DTensor) else x for x in outputs)


class _ForwardHooks:
    """Hooks around one module's forward. A module may run in several threads at once."""

    def __init__(self, style: _ContextParallel, mesh: DeviceMesh) -> None:
        self.style, self.mesh = style, mesh
        self._dispatchers = _dispatcher.DispatcherCache()
        self._running: dict[int, list[ExitStack]] = {}  # by thread

    @property
    def _is_flex(self) -> bool:
        return self.style.attention_type is _ContextParallel.AttentionType.FLEX

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        stack = ExitStack()
        self._running.setdefault(get_ident(), []).append(stack)
        if not self._is_flex:
            stack.enter_context(intercepting(AttentionMode(sdpa=self._dispatchers.sdpa)))
            return self.style.sdpa_input_fn(module, args, kwargs, self.mesh)
        score_mod = args[3] if len(args) > 3 else kwargs.get("score_mod")
        block_mask = args[4] if len(args) > 4 else kwargs.get("block_mask")
        if block_mask is None or isinstance(block_mask, ShardedBlockMask):
            stack.enter_context(intercepting(AttentionMode(flex=self._flex)))
            return args, kwargs
        if score_mod is not None:
            raise ValueError(
                "block_mask: expected one that _context_parallel_shard returned, because score_mod needs the global positions of this "
                "rank's queries, got another; shard the whole block_mask together with q, k and v"
            )
        return self.style.flex_input_fn(module, args, kwargs, self.mesh)

    def _flex(
        self, query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        mesh = context_mesh(self.mesh)
        if isinstance(block_mask, ShardedBlockMask):
            layouts, block_mask = {layout.length: layout for layout in block_mask.layouts}, block_mask.whole
        else:
            layouts = _dispatcher.declared_layouts.get(mesh.groups[0], {})
        return self._dispatchers.of(mesh, layouts).flex(query, key, value, score_mod, block_mask, *args, **kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        stacks = self._running.get(get_ident())
        if not stacks:
            return output
        stacks.pop().close()
        return output if self._is_flex or output is None else self.style.sdpa_output_fn(module, args, output, self.mesh)
