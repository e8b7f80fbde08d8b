"""A function of single tokens by chunks, as one node of autograd's graph.

A checkpoint for each chunk would leave thousands of small objects per layer until the backward pass, hold the gradients of all chunks until
the last one is known, and compute the chunks once more where the layer is itself recomputed. One node keeps x alone: its backward pass
computes a chunk, differentiates it, and writes its gradient into that of x.

The node must know the tensors that get gradients: the parameters that torch functions were given in any chunk (an expert's may first occur
in a later one). The first chunk runs with stand-ins of the parameters; if its graph leads to anything but the chunk and the stand-ins (a
captured tensor, a parameter in a custom `torch.autograd.Function`), chunks are checkpointed one by one. If only a later chunk's graph does,
the backward pass raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from longspan._torch_private import (
    forward_mode_is_active,
    function_modes_are_active,
    is_batched_gradient,
    is_transformed,
)
from longspan.integrations._wide_sums import Replaced, WideSums
from longspan.integrations.loss import autocast_without_cache

TokenFunction = Callable[[Tensor], Tensor]


def run_tiled(fn: TokenFunction, x: Tensor, chunk: int, dim: int) -> Tensor:
    """fn(x) by chunks of `chunk` tokens along `dim`."""
    with autocast_without_cache(x.device.type):
        if not _may_be_one_node(x):
            return _checkpointed(fn, x, chunk, dim)
        saved = _Saved.apply(x)
        call = _Call(fn, saved, chunk, dim)
        first = call.trial(x)
        if first is None:
            return _checkpointed(fn, x, chunk, dim)
        with torch.no_grad():
            call.compute(first, x)
        return _Tiled.apply(call, saved, *call.parameters)  # type: ignore[no-any-return]


def _may_be_one_node(x: Tensor) -> bool:
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not forward_mode_is_active()
        and not function_modes_are_active()
        and not is_transformed(x)
    )


def _checkpointed(fn: TokenFunction, x: Tensor, chunk: int, dim: int) -> Tensor:
    run, random = WideSums(fn), None if torch.compiler.is_compiling() else RandomStates(x.device)
    options: Any = {} if random is None else {"preserve_rng_state": False, "context_fn": random.contexts}
    parts: list[Tensor] = []
    for part in x.split(chunk, dim):
        y = checkpoint(run, part, use_reentrant=False, **options)
        parts.append(_checked_tokens(y, part, dim, first=parts[0] if parts else None))
    if random is not None:
        random.note()
    return torch.cat(parts, dim)


def _checked_tokens(y: Tensor, part: Tensor, dim: int, *, first: Tensor | None) -> Tensor:
    """y, the result of a chunk. Raises ValueError if it would be joined or broadcast wrongly.

    It must have the chunk's dims and tokens, and the dtype and other dims of `first`, the result of the first chunk.
    """
    if not isinstance(y, Tensor) or y.ndim != part.ndim or y.shape[dim] != part.shape[dim]:
        got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"memory.tiled: expected a tensor of {part.ndim} dims with {part.shape[dim]} tokens in dim {dim} as the result for a chunk "
            f"of as many, got {got}; fn must treat every token alike"
        )
    if first is not None and (y.dtype != first.dtype or _other_dims(y, dim) != _other_dims(first, dim)):
        raise ValueError(
            f"memory.tiled: expected the dtype and, except for dim {dim}, the shape of the first chunk's result for every chunk: "
            f"{first.dtype} and {tuple(first.shape)}, got {y.dtype} and {tuple(y.shape)}; fn must treat every token alike"
        )
    return y


def _other_dims(y: Tensor, dim: int) -> tuple[int, ...]:
    """The shape of y without `dim`."""
    return *y.shape[:dim], *y.shape[dim:][1:]


class _Saved(torch.autograd.Function):
    """x. Saved before any chunk is computed: the recomputation of a layer ends where its last saved tensor is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _StandIns:
    """A leaf in place of each parameter: its gradient is that of one chunk, and hooks of the parameter do not run."""

    def __init__(self) -> None:
        self.by_id: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def takes(self, parameter: nn.Parameter) -> bool:
        return type(parameter) is nn.Parameter and parameter.requires_grad and not is_transformed(parameter)

    def alias(self, parameter: nn.Parameter) -> Tensor:
        if id(parameter) not in self.by_id:
            self.by_id[id(parameter)] = parameter, parameter.detach().requires_grad_()
        return self.by_id[id(parameter)][1]

    @property
    def parameters(self) -> dict[int, nn.Parameter]:
        return {key: parameter for key, (parameter, _) in self.by_id.items()}

    @property
    def ids(self) -> set[int]:
        """Of the stand-ins."""
        return {id(alias) for _, alias in self.by_id.values()}


class _Call:
    """One call of a tiled function: computes its chunks, and recomputes and differentiates them in the backward pass."""

    def __init__(self, fn: TokenFunction, saved: Tensor, chunk: int, dim: int) -> None:
        self.fn, self.chunk, self.dim = fn, chunk, dim
        self.node: Any = saved.grad_fn
        self.random = RandomStates(saved.device)
        self.given: dict[int, nn.Parameter] = {}  # by id, what torch functions were given in the forward pass
        self.versions: list[int] = []  # of these parameters
        self.out: Tensor | None = None
        kinds = sorted({saved.device.type, "cpu"})
        self.autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that may get gradients."""
        return list(self.given.values())

    def trial(self, x: Tensor) -> Tensor | None:
        """The result of the first chunk; None if anything else needs a gradient than the chunk and parameters given to torch functions."""
        self.random.note()
        part, stand_ins = next(iter(x.split(self.chunk, self.dim))).detach().requires_grad_(), _StandIns()
        with saved_tensors_hooks(_nothing, _nothing), Replaced(stand_ins):  # never differentiated
            y = _checked_tokens(self.fn(part), part, self.dim, first=None)
        leaves = _leaves(y)
        if not leaves or not leaves <= stand_ins.ids | {id(part)}:
            self.random.restore(0)
            return None
        self.given |= stand_ins.parameters
        return y.detach()

    def compute(self, first: Tensor, x: Tensor) -> None:
        """Set `out`, the result of all chunks, and the parameters that they use."""
        shape = list(first.shape)
        shape[self.dim] = x.shape[self.dim]
        out = first.new_empty(shape)
        for i, (part, target) in enumerate(zip(x.split(self.chunk, self.dim), out.split(self.chunk, self.dim), strict=True)):
            if i == 0:
                target.copy_(first)
                continue
            self.random.note()
            stand_ins = _StandIns()
            with Replaced(stand_ins):
                target.copy_(_checked_tokens(self.fn(part), part, self.dim, first=first))
            self.given |= stand_ins.parameters
        self.random.note()
        self.versions = [p._version for p in self.parameters]
        self.out = out

    def check_unmodified(self) -> None:
        """Raise RuntimeError if a parameter was modified in place since the forward pass: chunks would be recomputed with other values."""
        for parameter, version in zip(self.parameters, self.versions, strict=True):
            if parameter._version != version:
                raise RuntimeError(
                    f"memory.tiled: a parameter of shape {tuple(parameter.shape)} was modified in place between the forward and the "
                    "backward pass: expected an optimizer step after the backward pass, or a parameter that no other layer shares"
                )

    def backward(self, grad: Tensor, needs: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of x and of the parameters; those of 16-bit parameters are summed in float32."""
        (x,) = self.node.saved_tensors
        whole = x.new_empty(x.shape)
        totals: list[Tensor | None] = [None] * len(needs)
        chunks = zip(*(t.split(self.chunk, self.dim) for t in (x, grad, whole)), strict=True)
        for i, (part, part_grad, target) in enumerate(chunks):
            part, stand_ins = part.detach().requires_grad_(), _StandIns()
            with self.as_in_forward(i), Replaced(stand_ins):
                y = self.fn(part)
            if not stand_ins.by_id.keys() <= self.given.keys():
                raise RuntimeError("memory.tiled: expected the parameters of the forward pass in the recomputation, got others")
            if not _leaves(y) <= stand_ins.ids | {id(part)}:
                raise RuntimeError(
                    f"memory.tiled: chunk {i} needs a gradient of a tensor that is no parameter, or of a parameter in a custom "
                    "torch.autograd.Function, and chunk 0 does not: its gradient would be lost. Let all chunks use it, or do not tile"
                )
            wanted = [(j, stand_ins.alias(p)) for j, p in enumerate(self.parameters) if needs[j]]
            dx, *grads = torch.autograd.grad(y, [part, *(alias for _, alias in wanted)], part_grad, allow_unused=True)
            target.zero_() if dx is None else target.copy_(dx)
            for (j, _), g in zip(wanted, grads, strict=True):
                totals[j] = _added(totals[j], g)
        return whole, [t if t is None else t.to(p.dtype) for t, p in zip(totals, self.parameters, strict=True)]

    def differentiable_backward(self, grad: Tensor, needs: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """`backward` by torch operations only, for gradients of gradients and for batches of gradients."""
        (x,) = self.node.saved_tensors
        create_graph = torch.is_grad_enabled()
        with self.as_in_forward(0):
            y = _checkpointed(self.fn, x, self.chunk, self.dim)
        wanted = [p for p, need in zip(self.parameters, needs, strict=True) if need]
        dx, *grads = torch.autograd.grad(y, [x, *wanted], grad, create_graph=create_graph, allow_unused=True)
        rest = iter(grads)
        return dx, [next(rest) if need else None for need in needs]

    def as_in_forward(self, index: int) -> ExitStack:
        """The context of the forward pass: autograd, autocast, and the random numbers from a chunk on."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(self.random.restored(index))
            return stack.pop_all()


def _nothing(_saved: Any) -> Any:
    """Saves nothing. A hook that saved its tensor itself would make a cycle of a node and its result, which Python cannot free."""
    return


def _leaves(y: Any) -> set[int]:
    """Ids of the leaf tensors in the autograd graph of y; empty if y is no plain tensor or has no graph."""
    leaves, seen, nodes = set(), set(), [y.grad_fn if type(y) is Tensor else None]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return leaves


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The sum of gradients, in float32 for 16-bit ones."""
    if grad is None:
        return total
    wide = grad.float() if grad.dtype.itemsize == 2 else grad
    if total is not None:
        return total.add_(wide)
    return wide.clone() if wide is grad else wide  # autograd may share the memory of a gradient


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        out, call.out = call.out, None  # not an argument, whose view would be returned
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        ctx.call.check_unmodified()
        by_operations = torch.is_grad_enabled() or is_batched_gradient(grad)
        backward = ctx.call.differentiable_backward if by_operations else ctx.call.backward
        dx, grads = backward(grad, list(ctx.needs_input_grad[2:]))
        return None, dx, *grads


class RandomStates:
    """Random numbers of chunks on one device: the recomputation of a chunk draws those of its forward pass.

    One state serves consecutive chunks that draw none. If no chunk does, the recomputation leaves the generators alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states: list[tuple[Tensor, list[int], list[Tensor]]] = []  # of the CPU; devices and their states
        self._of_chunk: list[int] = []

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the next chunk's forward pass and of its recomputation, for a checkpoint with `preserve_rng_state=False`."""
        self.note()
        return nullcontext(), self.restored(len(self._of_chunk) - 1)

    def note(self) -> None:
        """Note the state before the next chunk, or after the last one."""
        state = torch.get_rng_state(), *get_device_states(torch.empty(0, device=self.device))
        if not self.states or not _equal(self.states[-1], state):
            self.states.append(state)
        self._of_chunk.append(len(self.states) - 1)

    def restore(self, chunk: int) -> None:
        """Set the generators as before a chunk."""
        cpu, devices, states = self.states[self._of_chunk[chunk]]
        torch.set_rng_state(cpu)
        set_device_states(devices, states, device_type=self.device.type)

    def restored(self, chunk: int) -> AbstractContextManager[Any]:
        """Context with the generators as before a chunk; it may be entered several times."""
        return _Restored(self, chunk)


class _Restored:
    def __init__(self, random: RandomStates, chunk: int) -> None:
        self._random, self._chunk = random, chunk
        self._fork: Any = None

    def __enter__(self) -> None:
        if len(self._random.states) > 1:
            self._fork = torch.random.fork_rng(devices=self._random.states[0][1], device_type=self._random.device.type)
            self._fork.__enter__()
            self._random.restore(self._chunk)

    def __exit__(self, *error: Any) -> None:
        fork, self._fork = self._fork, None
        if fork is not None:
            fork.__exit__(None, None, None)


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a[0], b[0]) and a[1] == b[1] and all(map(torch.equal, a[2], b[2]))
