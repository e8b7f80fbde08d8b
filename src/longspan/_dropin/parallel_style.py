"""`ContextParallel`: a `ParallelStyle` for modules that call attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from longspan._comm.mesh import Mesh, context_mesh
from longspan._dropin.context import Context
from longspan._dropin.dispatcher import AttentionDispatcher
from longspan._dropin.dtensor import as_dtensor, mesh_dim_of
from longspan._dropin.global_layout import chunked
from longspan._plan.layout import Layout
from longspan._plan.schedule import Schedule
from longspan._plan.strategies import StrategyName
from longspan._torch_private import tree_leaves, tree_map


class ContextParallel(ParallelStyle):
    """A module style: the attention that a module calls (SDPA, FlexAttention) runs over the mesh given to `parallelize_module`.

    During the module's forward torch's attention functions are replaced, as in `longspan.context_parallel`.

    The module's inputs are this rank's shards. Inputs that are DTensors, sharded on the mesh along any dim, reach the module as local
    tensors, and its outputs become DTensors placed like the first of them. The sequence's length is the global length of the DTensors.

    Args:
        seq_len: The whole length, or lengths, of plain inputs. Without it ranks exchange their local lengths at each call.
        layout: The layout by which the inputs were sharded: "contiguous" (the default, as by DTensor's Shard), "head_tail" or a Layout.
        strategy: How KV moves, as for `longspan.plan`.

    Example:
        ```python
        parallelize_module(block.attention, mesh, longspan.ContextParallel())
        ```
    """

    def __init__(
        self,
        *,
        seq_len: int | Sequence[int] | None = None,
        layout: str | Layout = "contiguous",
        strategy: StrategyName | Schedule = "auto",
    ) -> None:
        super().__init__()
        self.seq_len, self.layout, self.strategy = seq_len, layout, strategy

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks = _ContextHooks(context_mesh(device_mesh), self)
        module.register_forward_pre_hook(hooks.before, with_kwargs=True)
        module.register_forward_hook(hooks.after, with_kwargs=True, always_call=True)
        return module


@dataclass(frozen=True)
class _ForwardCall:
    """One forward that is running: its context, and the DTensor input that its outputs are placed like, if there is one."""

    stack: ExitStack
    placed_like: DTensor | None


class _ContextHooks:
    """Hooks around one module's forward. A module may run in several threads at once."""

    def __init__(self, mesh: Mesh, style: ContextParallel) -> None:
        self.mesh = mesh
        lengths = [] if style.seq_len is None else [style.seq_len] if isinstance(style.seq_len, int) else list(style.seq_len)
        layout = chunked if style.layout == "contiguous" else style.layout

        def context() -> Context:
            return Context(AttentionDispatcher(mesh, layout=layout, strategy=style.strategy, lengths=lengths))

        self._for_plain_inputs = context()
        self._for_dtensors = context()  # learns the lengths of the DTensors that it meets
        self._running: dict[int, list[_ForwardCall]] = {}  # by thread

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
        sharded = [x for x in dtensors if isinstance(x.placements[mesh_dim_of(self.mesh, x)], Shard)]
        if dtensors and not sharded:
            raise ValueError(
                f"ContextParallel: expected DTensors sharded on axis {self.mesh.axes[0].name!r}, got {dtensors[0].placements}; "
                "redistribute them"
            )
        context = self._for_dtensors if sharded else self._for_plain_inputs
        for x in sharded:
            context.dispatcher.sequences.layout(x.shape[_sharded_dim(self.mesh, x)])
        stack = ExitStack()
        stack.enter_context(context.active())
        self._running.setdefault(get_ident(), []).append(_ForwardCall(stack, sharded[0] if sharded else None))
        return tree_map(lambda x: x.to_local() if isinstance(x, DTensor) else x, (args, kwargs))

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        calls = self._running.get(get_ident())
        if not calls:
            return output  # `before` raised
        call = calls.pop()
        call.stack.close()
        x = call.placed_like
        return output if x is None else tree_map(lambda y: _placed_like_input(y, x) if isinstance(y, Tensor) else y, output)


def _sharded_dim(mesh: Mesh, x: DTensor) -> int:
    placement = x.placements[mesh_dim_of(mesh, x)]
    assert isinstance(placement, Shard)
    return placement.dim


def _placed_like_input(y: Tensor, x: DTensor) -> Tensor:
    """A local output as a DTensor placed like an input. A sharded dim is as long as the input's if their local lengths are equal."""
    local = x.to_local()
    shape = list(y.shape)
    for size, placement in zip(x.device_mesh.shape, x.placements, strict=True):
        if isinstance(placement, Shard):
            d = placement.dim
            if d >= y.ndim:
                return y
            same = d < local.ndim and y.shape[d] == local.shape[d]
            shape[d] = x.shape[d] if same else shape[d] * size
    placed: Tensor = as_dtensor(y, x, shape)
    return placed
