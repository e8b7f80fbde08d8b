"""DTensor's sharding rules for SDPA.

torch registers rules by which DTensor accepts tensors that are sharded along the sequence, and runs its ring on them. The rules here are
the same; the engine runs the attention (`_handlers`). SDPA itself is intercepted above DTensor, in the thread that registers the rules.

torch has no sharding rule for the CPU's flash attention and derives one that shards the sequence, which is wrong. The rule below is that
of torch's CUDA kernels: batch and heads may be sharded, the sequence may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from longspan.torch_compat._dispatcher import disable, enable
from longspan.torch_compat._handlers import install_handlers, remove_handlers

aten = torch.ops.aten
SEQ_DIM = 2
_cpu_flash = aten._scaled_dot_product_flash_attention_for_cpu
_sequence = Shard(SEQ_DIM)


@register_sharding(_cpu_flash.default)
def _cpu_flash_rule(query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> Any:
    """Placements of (out, lse) for those of (q, k, v, dropout_p, is_causal); attn_mask and scale are keywords."""
    placements = (Replicate(), Shard(0), Shard(1))
    mask = kwargs.get("attn_mask")
    return [([p, p], [p, p, p, *([None] * len(rest))]) for p in placements if mask is None or isinstance(p, Replicate)]


@contextmanager
def _op_strategy_context(op_overload: Any, strategy_func: Callable[..., Any], schema_info: Any = None) -> Iterator[tuple[Any, Any]]:
    """A context in which DTensor asks `strategy_func` for an operator's placements. Yields the strategy and schema before, or None."""
    from torch.distributed.tensor._ops.utils import register_op_strategy

    propagator = DTensor._op_dispatcher.sharding_propagator
    tables: tuple[dict[Any, Any], ...] = (propagator.op_strategy_funcs, propagator.op_to_schema_info)
    before = tuple(table.get(op_overload) for table in tables)
    register_op_strategy(op_overload, schema_info=schema_info)(strategy_func)
    try:
        yield before[0], before[1]
    finally:
        for table, original in zip(tables, before):
            table.pop(op_overload, None)
            if original is not None:
                table[op_overload] = original


def _with_sequence(op_schema: Any, kind: str, placements: list[Any], *, inputs_at: int, validate: bool = True) -> Any:
    """torch's placements of an operator (`kind`: flash, efficient or cudnn; forward or backward), and these.

    placements: of the operator's results, then of its tensor arguments, which begin at `inputs_at`.
    """
    from torch.distributed.tensor._ops import _matrix_ops
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    mesh = op_schema.get_mesh_from_args() if validate else op_schema.get_mesh_from_args(validate=False)
    base = getattr(_matrix_ops, f"_scaled_dot_product_{kind}_base_strategies", None)
    if base is None:
        raise NotImplementedError(f"this torch ({torch.__version__}) has no sharding strategies for {kind}; torch 2.11 to 2.13 have")
    return expand_to_full_mesh_op_strategy(mesh, op_schema, [*base(op_schema), placements], input_index=inputs_at)


def _scaled_dot_product_flash_attention_cp_strategy(op_schema: Any) -> Any:
    """Placements of flash attention: torch's, and sharded along the sequence."""
    returns_debug_mask = len(op_schema.args_schema) >= 6 and op_schema.args_schema[5]
    debug_mask = _sequence if returns_debug_mask else Replicate()
    results = [_sequence, _sequence, None, None, None, None, Replicate(), None, debug_mask]
    return _with_sequence(op_schema, "flash_attention", [*results, *[_sequence] * 3], inputs_at=9)


def _scaled_dot_product_flash_attention_backward_cp_strategy(op_schema: Any) -> Any:
    """Placements of flash attention's backward. Its tensors: grad_out, q, k, v, out and lse, then random states and lengths."""
    from torch.distributed.tensor._op_schema import OpStrategy

    tensors = sum(isinstance(argument, OpStrategy) for argument in op_schema.args_schema)
    placements = [*[_sequence] * 3, *[_sequence] * 6, *[Replicate()] * (tensors - 6)]
    return _with_sequence(op_schema, "flash_attention_backward", placements, inputs_at=3, validate=False)


def _scaled_dot_product_efficient_attention_cp_strategy(op_schema: Any) -> Any:
    """Placements of memory-efficient attention. A bias is replicated."""
    bias = [Replicate()] if op_schema.args_schema[3] is not None else []
    return _with_sequence(op_schema, "efficient_attention", [_sequence, _sequence, None, None, *[_sequence] * 3, *bias], inputs_at=4)


def _scaled_dot_product_efficient_attention_backward_cp_strategy(op_schema: Any) -> Any:
    """Placements of memory-efficient attention's backward. A bias is sharded by heads."""
    has_bias = op_schema.args_schema[4] is not None
    grads = [_sequence, _sequence, _sequence, Shard(1) if has_bias else None]
    tensors = [*[_sequence] * 4, *([Shard(1)] if has_bias else []), *[_sequence] * 2, Replicate(), Replicate()]
    return _with_sequence(op_schema, "efficient_attention_backward", [*grads, *tensors], inputs_at=4, validate=False)


def _scaled_dot_product_cudnn_attention_cp_strategy(op_schema: Any) -> Any:
    """Placements of cuDNN's attention. A bias is replicated."""
    _, _, _, bias, computes_lse, *rest = op_schema.args_schema
    debug_mask = _sequence if len(op_schema.args_schema) >= 8 and rest[2] else None
    results = [_sequence, _sequence if computes_lse else Replicate(), *[None] * 6, debug_mask]
    tensors = [*[_sequence] * 3, *([Replicate()] if bias is not None else [])]
    return _with_sequence(op_schema, "cudnn_attention", [*results, *tensors], inputs_at=9)


def _scaled_dot_product_cudnn_attention_backward_cp_strategy(op_schema: Any) -> Any:
    """Placements of cuDNN's backward: grad_out, q, k, v, out, lse, two random states, a bias, and six arguments that are no tensors."""
    bias = _sequence if op_schema.args_schema[8] is not None else None
    placements = [*[_sequence] * 3, *[_sequence] * 6, Replicate(), Replicate(), bias, *[None] * 6]
    return _with_sequence(op_schema, "cudnn_attention_backward", placements, inputs_at=3, validate=False)


# The active contexts, and the strategies and schemas before, by operator. For the whole process, as DTensor's own tables.
_cp_strategy_contexts: dict[Any, Any] = {}
_original_strategies: dict[Any, tuple[Any, Any]] = {}


def register_cp_sharding_rules() -> None:
    """Run SDPA on DTensors that are sharded along the sequence over their mesh, in this thread. A second call changes nothing."""
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    enable()
    install_handlers()
    if _cp_strategy_contexts:
        return
    for op, strategy, static_from in (
        (aten._scaled_dot_product_flash_attention, _scaled_dot_product_flash_attention_cp_strategy, 5),
        (aten._scaled_dot_product_flash_attention_backward, _scaled_dot_product_flash_attention_backward_cp_strategy, None),
        (aten._scaled_dot_product_efficient_attention, _scaled_dot_product_efficient_attention_cp_strategy, 4),
        (aten._scaled_dot_product_efficient_attention_backward, _scaled_dot_product_efficient_attention_backward_cp_strategy, None),
        (aten._scaled_dot_product_cudnn_attention, _scaled_dot_product_cudnn_attention_cp_strategy, 4),
        (aten._scaled_dot_product_cudnn_attention_backward, _scaled_dot_product_cudnn_attention_backward_cp_strategy, None),
    ):
        context = _op_strategy_context(op.default, strategy, None if static_from is None else RuntimeSchemaInfo(static_from))
        _original_strategies[op.default] = context.__enter__()
        _cp_strategy_contexts[op.default] = context


def unregister_cp_sharding_rules(clear_the_cache: bool = False) -> None:
    """Undo `register_cp_sharding_rules`.

    clear_the_cache: Whether DTensor forgets the placements that it derived, of all operators.
    """
    disable()
    remove_handlers()
    for context in _cp_strategy_contexts.values():
        context.__exit__(None, None, None)
    _cp_strategy_contexts.clear()
    _original_strategies.clear()
    if clear_the_cache:
        from torch.distributed.tensor import debug

        for name in ("_clear_fast_path_sharding_prop_cache", "_clear_python_sharding_prop_cache", "_clear_sharding_prop_cache"):
            getattr(debug, name, lambda: None)()
