"""`ContextParallel`: a module whose attention spans a mesh, by `parallelize_module`."""

from __future__ import annotations

from contextlib import ExitStack
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from longspan._comm.mesh import Mesh, as_mesh
from longspan._dropin.context import Context
from longspan._dropin.dtensor import axis_of, placed
from longspan._dropin.global_layout import chunked
from longspan._plan.layout import Layout
from longspan._torch_private import tree_leaves, tree_map


class ContextParallel(ParallelStyle):
    """Makes the attention that a module calls (SDPA, FlexAttention) span the mesh that `parallelize_module` is given.

    The module's inputs are this rank's shards. Inputs that are DTensors, sharded on that mesh along any dim, reach the module as local
    tensors; its outputs are then DTensors placed like the first of them. Their global length is the sequence's.

    layout:    "contiguous" (the default, and what DTensor means by Shard), "head_tail" or a Layout, for shards that were made so.
    seq_len:   the whole length of plain inputs (or several). Without it ranks tell each other what they hold at each call.
    strategy:  as for `longspan.plan`.
    """

    def __init__(self, *, seq_len: Any = None, layout: str | Layout = "contiguous", strategy: Any = "auto") -> None:
        super().__init__()
        self.seq_len, self.layout, self.strategy = seq_len, layout, strategy

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        lengths = [] if self.seq_len is None else [self.seq_len] if isinstance(self.seq_len, int) else list(self.seq_len)
        hooks = _Hooks(as_mesh(device_mesh), lengths, self)
        module.register_forward_pre_hook(hooks.before, with_kwargs=True)
        module.register_forward_hook(hooks.after, with_kwargs=True, always_call=True)
        return module


class _Hooks:
    """Around one module's forward. What a call entered is kept by thread: a module may run in several."""

    def __init__(self, mesh: Mesh, lengths: list[int], style: ContextParallel) -> None:
        self.mesh, self.layout, self.strategy = mesh, chunked if style.layout == "contiguous" else style.layout, style.strategy
        self.plain = self._context(lengths)
        self.sharded = self._context(lengths)  # knows the lengths of the DTensors it met
        self.entered: dict[int, list[tuple[Context, ExitStack, DTensor | None]]] = {}

    def _context(self, lengths: list[int]) -> Context:
        return Context(self.mesh, [], lengths, self.layout, self.strategy)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        met = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
        ours = [x for x in met if isinstance(x.placements[axis_of(self.mesh, x)], Shard)]
        if met and not ours:
            raise ValueError(
                f"ContextParallel: expected DTensors sharded on axis {self.mesh.axes[0].name!r}, got {met[0].placements}; redistribute them"
            )
        context = self.sharded if ours else self.plain
        for x in ours:
            context.span.lengths.layout(x.shape[_dim(self.mesh, x)])
        stack = ExitStack()
        stack.enter_context(context.held())
        self.entered.setdefault(get_ident(), []).append((context, stack, ours[0] if ours else None))
        return tree_map(lambda x: x.to_local() if isinstance(x, DTensor) else x, (args, kwargs))

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        calls = self.entered.get(get_ident())
        if not calls:
            return output
        _, stack, x = calls.pop()
        stack.close()
        return output if x is None else tree_map(lambda y: _like(y, x) if isinstance(y, Tensor) else y, output)


def _dim(mesh: Mesh, x: DTensor) -> int:
    placement = x.placements[axis_of(mesh, x)]
    assert isinstance(placement, Shard)
    return placement.dim


def _like(y: Tensor, x: DTensor) -> Tensor:
    """A local output as a DTensor placed like an input; its sharded dims are as long as the input's where its shards are."""
    local = x.to_local()
    shape = list(y.shape)
    for size, placement in zip(x.device_mesh.shape, x.placements, strict=True):
        if isinstance(placement, Shard):
            d = placement.dim
            if d >= y.ndim:
                return y
            same = d < local.ndim and y.shape[d] == local.shape[d]
            shape[d] = x.shape[d] if same else shape[d] * size
    found: Tensor = placed(y, x, shape)
    return found
