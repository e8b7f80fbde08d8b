"""Every private part of torch that longspan uses, and why no public one would do.

`BaseHOP`                 Dynamo has no public way to turn a Python callable into a graph that an operator receives; this is the class
                          through which torch lets an operator take one (see `longspan._engine.compiled`).
`_disable_current_modes`  A mod is traced on the side. Modes of the caller (selective checkpointing, fake tensors, AOTAutograd's own
                          tracing) must not see, record or replay those operations; there is no public way to step out of them.
`_len_torch_dispatch_stack`, `_len_torch_function_stack`  Whether modes are active, without building lists of them. Without any, the
                          operator may be called without torch's dispatcher.
`_get_current_function_mode_stack`  Whether a function mode of the user's would change what a mod's operations mean; torch has no public
                          way to list them.
`OpOverload`              The type of a traced operation, whose schema says whether it mutates; it has no public name.
`_resolve_process_group`  A mesh is a value that can be pickled, so it holds its groups' names. torch's own table from names to groups (the
                          one DeviceMesh uses) has no public door.
`_get_backend`            The timeout of a process group, which has no public accessor.
`ProcessGroup.alltoall`   `torch.distributed.all_to_all` without its checks of each tensor, which take as long as starting the exchange of
                          eight ranks and were made before.
`_set_default_timeout`    The timeout of the exchanges started next: `init_device_mesh` gives its groups 30 minutes, whatever the timeout of
                          the default group is, and a Gloo exchange that outlives its caller blocks the exit of the process.
`_get_default_store`      The store of the default process group: ranks that wait ask there who is late. torch has no public way to it.
`_dump_fr_trace`, `_dump_nccl_trace`  The records of torch's flight recorder; its public tools read files only.
`_pytree`                 Modules take and give nested containers of tensors; torch's own way to walk them has no public name.
`maybe_current_level`     Whether torch.vmap or a torch.func transform runs the present code. Kernels write into tensors and read them by
                          address, which fails under transforms with errors that name neither; there is no public accessor.
`is_functorch_wrapped_tensor`  Whether a tensor is one that such a transform maps or differentiates: a trace would take its present value
                          for a constant. By type it is a plain tensor.
`temporarily_clear_interpreter_stack`  A mod is traced outside of such transforms too: `make_fx` under one leaves fake tensors in the
                          place of the captured ones.
`is_legacy_batchedtensor`  `torch.autograd.grad(…, is_grads_batched=True)` has a way of its own: no transform is active, the gradient alone
                          stands for several, and by type it is a plain tensor.
`forward_ad._current_level`  Whether forward-mode differentiation is active; the public way is to unpack every tensor.
`TracingContext`          Whether Dynamo is at work. In torch 2.11 it takes the truth of every object that compiled code calls, to see if
                          there is one; for everyone else `bool(mask)` raises.
`_saved_tensors_hooks_is_enabled`  Whether saved-tensor hooks may be set: torch.func forbids them, and there is no public accessor.
`_cuda_getCurrentRawStream`, `_cuda_getDevice`  The current stream as the CUDA driver takes it, and the current device, where CUDA is known
                          to be initialised. `torch.cuda.current_stream` builds an object, which takes as long as the launch itself.
`_ForceDispatchKeyGuard`, `_dispatch_tls_…`  operators that compiled code calls run without torch.vmap: its dispatch keys are excluded there
`_cuda_isCurrentStreamCapturing`, `_cuda_getDeviceCount`  `torch.cuda.is_current_stream_capturing` without a Python function around it,
                          which takes as long; the second exists in builds with CUDA only.
`_get_deterministic_algorithms`, `_get_deterministic_algorithms_warn_only`  Torch's settings, without the Python functions around them.
`_empty_strided_cuda`     An uninitialised CUDA tensor without torch's dispatcher, which takes longer than the allocation itself.
`TensorGuards`            Whether tensors have the types, layouts and dispatch keys of earlier ones, in one call: a repeated call would ask
                          thirty times in Python.
`TorchDispatchMode`       The documented class of dispatch modes lives in a module with a private name.
`_make_wrapper_subclass`  A CPU tensor without memory: code that reads its value raises. Torch's fake tensors need sympy, whose import takes
                          seconds; meta tensors have another device.
`_should_skip_dynamo`     Whether torch keeps Dynamo out of a dispatch mode. It imports Dynamo for that, which takes seconds.
`_SetExcludeDispatchKeyGuard`  A dispatch mode runs below autograd, where `detach` gives a tensor a version of its own. With the guard, it
                          shares the version, so that later modifications in place can be seen; torch's selective checkpointing does so.
`_assert_async`           A check of values on a CUDA device without reading them on the host; no public function does it.
`_loader`                 torch.fx keeps the source of every GraphModule for tracebacks as long as the process lives. A process that traces
                          many mods would grow; there is no public way to drop it.
`FunctionMeta`            The class of custom autograd Functions. A trace of a mod must see their calls, and neither dispatch modes nor
                          function modes do; user code often holds a bound `apply`, so replacing `Function.apply` would be too late.
`_ensureCUDADeviceGuardSet`  See `_keep_device_guard`.
`_set_grad_enabled`       The node by which Dynamo's graphs begin and end `torch.no_grad()`; it has no public name.
`free_unbacked_symbols`   Which sizes of a traced tensor depend on values of tensors (`nonzero`); it has no public name.
`tracing`                 `make_fx` takes the fake mode of a compilation in progress from this context, whatever modes are active.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from threading import Event, RLock, Thread, current_thread, get_ident, main_thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _set_grad_enabled as set_grad_enabled_in_graphs
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor, maybe_current_level
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.base_hop import BaseHOP
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.function import FunctionMeta
from torch.fx import GraphModule, graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup, Work

__all__ = [
    "BaseHOP",
    "DispatchModeOutsideOfDynamo",
    "OpOverload",
    "TensorWithoutMemory",
    "TorchDispatchMode",
    "assert_on_device",
    "backend_timeout",
    "current_cuda_device",
    "current_raw_stream",
    "current_stream_is_captured",
    "default_store",
    "detach_is_recorded",
    "detached_below_autograd",
    "deterministic_algorithms",
    "deterministic_algorithms_warn_only",
    "dynamo_is_at_work",
    "empty_on_current_device",
    "empty_on_device_of",
    "fake_trace",
    "flight_recorder_dump",
    "foreign_function_modes_are_active",
    "forward_mode_is_active",
    "function_modes_are_active",
    "guarded_calls_are_intercepted",
    "intercepted_autograd_functions",
    "is_batched_gradient",
    "is_transformed",
    "is_transformed_tensor",
    "modes_are_active",
    "nothing_intercepts_calls",
    "number_of",
    "outside_of_modes",
    "process_group_by_name",
    "set_grad_enabled_in_graphs",
    "sizes_of_values",
    "tensor_guard",
    "tensors_can_be_guarded",
    "transform_is_active",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "with_vmap",
    "without_source",
]


class DispatchModeOutsideOfDynamo(TorchDispatchMode):
    """A dispatch mode in which nothing is compiled: torch does not import Dynamo to keep Dynamo out of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class TensorWithoutMemory(Tensor):
    """A 0-dim CPU tensor without a value: operations on it need a dispatch mode, reads of its value and its address raise."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, dtype: torch.dtype) -> TensorWithoutMemory:
        made: TensorWithoutMemory = torch.Tensor._make_wrapper_subclass(cls, (), dtype=dtype, device=torch.device("cpu"))
        torch._C._set_throw_on_mutable_data_ptr(made)  # else `data_ptr()` would be 0
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: expected a dispatch mode that records operations")


def identity(tensor: Tensor) -> int:
    """The address of a tensor's C++ object. `id` is that of the Python object, to which `swap_tensors` assigns another tensor."""
    return tensor._cdata  # type: ignore[attr-defined,no-any-return]


def assert_on_device(condition: Tensor, message: str) -> None:
    """Assert a 0-dim bool: on CUDA by the device, which fails asynchronously; elsewhere at once, by RuntimeError."""
    torch._assert_async(condition, message)


def fake_trace(fn: Callable[..., Any], *examples: Tensor) -> GraphModule:
    """The operations of fn on fake tensors like the examples; real tensors that it captures become attributes."""
    if torch.version.cuda is not None and not torch.cuda.is_available():
        _keep_device_guard()
    return without_source(make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples))


def sizes_of_values(traced: Any) -> set[Any]:
    """Symbols for the sizes of a traced tensor, or of several, that depend on the values of tensors."""
    sizes = [n for t in tree_leaves(traced) if isinstance(t, Tensor) for n in t.shape if isinstance(n, torch.SymInt)]
    if not sizes:
        return set()
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # imports sympy, as tracing with such sizes did

    return set(free_unbacked_symbols(sizes))


@cache
def _keep_device_guard() -> None:
    """Create torch's CUDA device guard in a thread that never ends, for CUDA builds without a GPU.

    Otherwise the first fake tensors create the guard in their thread. torch 2.11 deletes the guard when that thread ends, and the next fake
    tensors crash the process.
    """
    if current_thread() is main_thread():
        torch._C._ensureCUDADeviceGuardSet()
        return
    made = Event()

    def make_and_stay() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        made.set()
        Event().wait()

    Thread(target=make_and_stay, name="longspan-device-guard", daemon=True).start()
    made.wait()


_VMAP_KEYS = tuple(
    getattr(torch._C.DispatchKey, f"FuncTorch{name}") for name in ("DynamicLayerBackMode", "Batched", "VmapMode", "DynamicLayerFrontMode")
)  # fmt: skip


def with_vmap() -> AbstractContextManager[Any]:
    """A context in which torch.vmap works. Operators that code compiled by Inductor calls run without it otherwise."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    if not excluded.has(torch._C.DispatchKey.FuncTorchBatched):
        return nullcontext()
    for key in _VMAP_KEYS:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)  # type: ignore[no-any-return]


def without_source(module: GraphModule) -> GraphModule:
    """The module itself. torch.fx forgets the source of its `forward`, which only tracebacks read."""
    key = type(module).forward.__code__.co_filename
    if key.startswith("<eval_with_key>"):
        linecache.cache.pop(key, None)
        graph_module._loader.eval_cache.pop(key, None)
    return module


def _of_cuda_builds(name: str, otherwise: Any) -> Any:
    """A function of torch without a Python function around it, whose call would take as long; `otherwise` in builds without CUDA."""
    return getattr(torch._C, name) if hasattr(torch._C, "_cuda_getDeviceCount") else otherwise


def _without_cuda(*_: Any) -> Any:
    raise RuntimeError("expected a build of torch with CUDA")


# The index of the current CUDA device. CUDA must be initialised: a CUDA tensor exists.
current_cuda_device: Callable[[], int] = _of_cuda_builds("_cuda_getDevice", _without_cuda)

# (index of a CUDA device) → the CUstream of its current stream.
current_raw_stream: Callable[[int], int] = _of_cuda_builds("_cuda_getCurrentRawStream", _without_cuda)

# Whether the current CUDA stream is being captured into a graph. False before CUDA is initialised.
current_stream_is_captured: Callable[[], bool] = _of_cuda_builds("_cuda_isCurrentStreamCapturing", bool)

# (size, strides, dtype) → an uninitialised tensor on the current CUDA device, unseen by dispatch modes. CUDA must be initialised. Not a
# Python function, whose call would take as long as the allocation.
empty_on_current_device: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
empty_on_current_device = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


def empty_on_device_of(like: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor on the device of another; by `empty_on_current_device` where that is the current device."""
    if not like.is_cuda or like.get_device() != current_cuda_device():
        return torch.empty(size, dtype=dtype, device=like.device)
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(1, n)
    return empty_on_current_device(tuple(size), tuple(reversed(strides)), dtype)  # no torch.Size: it takes plain tuples only


def tensor_guard(*tensors: Tensor) -> Callable[..., bool]:
    """A function that returns whether its arguments match these tensors and torch's state is the same as now.

    The arguments must be as many tensors, all distinct objects. Compared are types, dtypes, devices, shapes, strides, `requires_grad` and
    dispatch keys: a lazily negated view, a tensor of a transform or of inference mode differs from a plain tensor. No tensors match if a
    transform, inference mode or autocast has become active. Addresses, function modes, dispatch modes and forward-mode differentiation are
    not compared: guards pass under torch's own dispatch modes, such as `FakeTensorMode`. The function holds no tensor.
    """
    guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None:
        return lambda *_: False
    return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[no-any-return]


def tensors_can_be_guarded(q: Any, k: Any, v: Any) -> bool:
    """Whether guards of `tensor_guard` may be called with q, k and v: tensors, none of them nested, which would end the process."""
    try:
        return not (q.is_nested or k.is_nested or v.is_nested)
    except AttributeError:
        return False


def dynamo_is_at_work() -> bool:
    """Whether Dynamo, in the midst of a compilation, runs the present code itself: not code that it compiles."""
    return not torch.compiler.is_dynamo_compiling() and TracingContext.try_get() is not None


def modes_are_active() -> bool:
    """Whether a dispatch mode would see operators that are called now."""
    return bool(torch._C._len_torch_dispatch_stack())


_function_modes: Callable[[], int] = torch._C._len_torch_function_stack  # type: ignore[attr-defined]
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


# `torch.are_deterministic_algorithms_enabled` and `torch.is_deterministic_algorithms_warn_only_enabled`.
deterministic_algorithms: Callable[[], bool] = torch._C._get_deterministic_algorithms
deterministic_algorithms_warn_only: Callable[[], bool] = torch._C._get_deterministic_algorithms_warn_only


def forward_mode_is_active() -> bool:
    """Whether this code runs inside of forward-mode differentiation."""
    return forward_ad._current_level >= 0


def nothing_intercepts_calls() -> bool:
    """Whether no dispatch mode, no function mode, no transform of torch.func and no forward-mode differentiation is active."""
    return (
        not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()  # type: ignore[attr-defined]
        and maybe_current_level() is None
        and forward_ad._current_level < 0
    )


def guarded_calls_are_intercepted() -> bool:
    """Whether `nothing_intercepts_calls` is false for tensors that pass a `tensor_guard`, which compares transforms."""
    return _function_modes() > 0 or _dispatch_modes() > 0 or forward_ad._current_level >= 0


def function_modes_are_active() -> bool:
    """Whether any `TorchFunctionMode` is active; torch's default device is one."""
    return bool(torch._C._len_torch_function_stack())  # type: ignore[attr-defined]


def foreign_function_modes_are_active() -> bool:
    """Whether a `TorchFunctionMode` that belongs neither to torch nor to longspan sees the functions called now."""
    return any(type(m).__module__.split(".")[0] not in ("torch", "longspan") for m in _get_current_function_mode_stack())


def transform_is_active() -> bool:
    """Whether this code runs inside torch.vmap or a transform of torch.func."""
    return maybe_current_level() is not None


def is_transformed(value: object) -> bool:
    """Whether a value is a tensor that a transform maps or differentiates."""
    return isinstance(value, Tensor) and is_functorch_wrapped_tensor(value)


# torch's functions without a Python function around them, because repeated calls ask a dozen times. The first is `is_transformed` for
# tensors. The second: whether a gradient is a batch of gradients (is_grads_batched=True).
is_transformed_tensor = is_functorch_wrapped_tensor
is_batched_gradient = is_legacy_batchedtensor


_one_at_a_time = RLock()


def without_saved_tensor_hooks() -> AbstractContextManager[Any]:
    """Context that hides saved tensors from the caller's hooks. Under torch.func, which forbids hooks, there are none."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Trace here: as if no dispatch mode, no transform and no compilation were active, one thread at a time (`make_fx` patches torch)."""
    with _one_at_a_time, temporarily_clear_interpreter_stack(), _disable_current_modes(), tracing(None):
        yield


@contextmanager
def intercepted_autograd_functions(on_call: Callable[[type, tuple[Any, ...], bool], None]) -> Iterator[None]:
    """Context in which a custom autograd Function on this thread first calls `on_call(cls, args, grad_is_enabled)`.

    Use it inside `outside_of_modes`. Every `apply`, of Python or C++, looks up `_backward_cls` in the caller's grad mode, then `forward`.
    """
    thread, outer = get_ident(), vars(FunctionMeta).get("__getattribute__")
    grad_is_enabled: list[bool] = []

    def look_up(cls: type, name: str) -> Any:
        value = type.__getattribute__(cls, name)
        if name == "_backward_cls" and get_ident() == thread:
            grad_is_enabled.append(torch.is_grad_enabled())
        elif name == "forward" and grad_is_enabled and get_ident() == thread:
            enabled = grad_is_enabled.pop()

            def forward(*args: Any, **kwargs: Any) -> Any:
                on_call(cls, args, enabled)
                return value(*args, **kwargs)

            return forward
        return value

    setattr(FunctionMeta, "__getattribute__", look_up)  # noqa: B010 (no type checker accepts an assignment)
    try:
        yield
    finally:
        if outer is None:
            delattr(FunctionMeta, "__getattribute__")
        else:
            setattr(FunctionMeta, "__getattribute__", outer)  # noqa: B010


@cache
def detach_is_recorded() -> bool:
    """Whether `make_fx` records `detach` as such; newer versions of torch record a view that has a gradient."""
    return any(node.target is torch.ops.aten.detach.default for node in fake_trace(Tensor.detach, torch.zeros(())).graph.nodes)


def number_of(scalar: Tensor) -> float | int | bool:
    """The value of a tensor of one element, whatever modes are active. Takes no lock: it is called within traces."""
    with _disable_current_modes():
        return scalar.item()


def detached_below_autograd(tensor: Tensor) -> Tensor:
    """`tensor.detach()` inside of a dispatch mode, with the tensor's version."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # type: ignore[attr-defined]
        return tensor.detach()


def process_group_by_name(name: str) -> ProcessGroup | None:
    """The process group of this process that torch knows under a name, if any."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    try:
        return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return None


def backend_timeout(group: ProcessGroup, device: str) -> tuple[Any, timedelta | None]:
    """(backend, timeout) of a process group's collectives on tensors of a device type. None if the backend does not tell."""
    try:
        backend = group._get_backend(torch.device(device))
        timeout = backend.options._timeout
    except (AttributeError, RuntimeError, TypeError):
        return None, None
    return backend, timeout if isinstance(timeout, timedelta) and hasattr(backend, "_set_default_timeout") else None


def start_all_to_all(group: ProcessGroup, received: list[Tensor], sent: list[Tensor]) -> Work:
    """Start `torch.distributed.all_to_all`. The caller has checked the tensors."""
    return group.alltoall(received, sent, _asynchronous())


@cache
def _asynchronous() -> Any:
    from torch.distributed import AllToAllOptions

    options = AllToAllOptions()
    options.asyncOp = True
    return options


def default_store() -> Store | None:
    """The store of the default process group, if there is one."""
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (ValueError, KeyError, AttributeError):
        return None


def flight_recorder_dump() -> bytes | None:
    """The pickled records of torch's flight recorder, None if this torch has none."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_fr_trace", None) or getattr(_distributed_c10d, "_dump_nccl_trace", None)
    try:
        return None if dump is None else bytes(dump())
    except RuntimeError:
        return None
