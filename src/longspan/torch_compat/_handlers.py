"""torch's ways to put context parallelism under a function or under DTensor's dispatch of attention operators."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from longspan._torch_private import OpOverload
from longspan.torch_compat import _ring_kernels as ring

aten = torch.ops.aten
logger = logging.getLogger(__name__)

ArgsType = tuple[Any, ...]
KwargsType = dict[str, Any]
InputFnType = Callable[[nn.Module | None, ArgsType, KwargsType, DeviceMesh], Any]
OutputFnType = Callable[[nn.Module | None, Any, Any, DeviceMesh], Any]

# Of each operator: its ring form, and how many of its first results are sharded along the sequence.
_RING_FORMS: dict[OpOverload, tuple[Callable[..., tuple[Any, ...]], int]] = {
    aten._scaled_dot_product_flash_attention.default: (ring._scaled_dot_product_ring_flash_attention, 2),
    aten._scaled_dot_product_flash_attention_backward.default: (ring._scaled_dot_product_ring_flash_attention_backward, 3),
    aten._scaled_dot_product_efficient_attention.default: (ring._scaled_dot_product_ring_efficient_attention, 2),
    aten._scaled_dot_product_efficient_attention_backward.default: (ring._scaled_dot_product_ring_efficient_attention_backward, 3),
    aten._scaled_dot_product_cudnn_attention.default: (ring._scaled_dot_product_ring_cudnn_attention, 2),
    aten._scaled_dot_product_cudnn_attention_backward.default: (ring._scaled_dot_product_ring_cudnn_attention_backward, 3),
}


def _sdpa_handler(op_call: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """An attention operator on DTensors that are sharded along the sequence over one mesh axis: its ring form on the local shards."""
    if op_call not in _RING_FORMS:
        raise NotImplementedError(f"CP only supports {', '.join(str(op) for op in _RING_FORMS)}, got {op_call}")
    form, sharded_results = _RING_FORMS[op_call]
    logger.debug("ring form of %s", op_call)
    first = next(x for x in (*args, *kwargs.values()) if isinstance(x, DTensor))
    mesh, placements = first.device_mesh, first.placements
    results = form(mesh, *map(_local, args), **{name: _local(x) for name, x in kwargs.items()})
    return tuple(
        DTensor.from_local(x, mesh, placements) if i < sharded_results and isinstance(x, Tensor) else x for i, x in enumerate(results)
    )


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


custom_ops: dict[OpOverload, Callable[..., object]] = dict.fromkeys(_RING_FORMS, _sdpa_handler)
existing_custom_ops: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

_enabled_threads: set[int] = set()
_lock = Lock()


def install_handlers() -> None:
    """Let DTensor run the ring forms, in all threads, until every thread that called this called `remove_handlers`."""
    with _lock:
        _enabled_threads.add(get_ident())
        DTensor._op_dispatcher._custom_op_handlers = {**existing_custom_ops, **custom_ops}


def remove_handlers() -> None:
    """Undo `install_handlers` for this thread."""
    with _lock:
        _enabled_threads.discard(get_ident())
        if not _enabled_threads:
            DTensor._op_dispatcher._custom_op_handlers = existing_custom_ops


# -------------------------------------------------------------------------------------------------------------- replaced functions

_replaced_functions: dict[Callable[..., Any], tuple[str, Callable[..., Any]]] = {}  # by replacement: name and original


def _distribute_function(
    fn: Callable[..., Any], fn_module: types.ModuleType, device_mesh: DeviceMesh, input_fn: InputFnType, output_fn: OutputFnType
) -> None:
    """Replace a function of a module by one whose arguments pass through `input_fn` and whose results through `output_fn`."""
    if fn in _replaced_functions:
        return

    def replacement(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = input_fn(None, args, kwargs, device_mesh)
        return output_fn(None, (args, kwargs), fn(*args, **kwargs), device_mesh)

    setattr(fn_module, fn.__name__, replacement)
    _replaced_functions[replacement] = (fn.__name__, fn)


def _restore_function(fn: Callable[..., Any], fn_module: types.ModuleType) -> None:
    """Undo `_distribute_function`. `fn`: the replacement."""
    if fn in _replaced_functions:
        name, original = _replaced_functions.pop(fn)
        setattr(fn_module, name, original)
