"""Prepared launches: a compiled kernel and its arguments, cached per block table, tilings, tensor layouts and programs.

Triton's own launch inspects every argument of every call. A prepared launch holds the compiled kernel with its arguments
(`longspan._kernels.gpu.driver_launch`) and fills in what changes between calls: the tensors, the captured tensors, the scale, and the first
batch row and head.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu import launch
from longspan._kernels.gpu.compilation import collected_jobs, compile_kernel
from longspan._kernels.gpu.compile_options import FUSED
from longspan._kernels.gpu.driver_launch import DriverLaunch, driver_launch, hooks_are_set
from longspan._kernels.gpu.interpreter import interpreted, quiet
from longspan._kernels.gpu.uploads import ordered_stream
from longspan._kernels.gpu.workspace import Workspace
from longspan._masks.block_table import BlockTable
from longspan._torch_private import current_cuda_device, tensor_guard

Tensors = Mapping[str, Tensor | None]  # by kernel argument, in the order of the kernel's signature
PER_CALL = ("mask_captured", "score_captured", "grads", "scale", "first_b", "first_h")  # arguments other than tensors that change
TABLES = ("order", "full", "partial", "counts")  # arguments that change too where the block table is made on the device


@dataclass(kw_only=True, eq=False)
class PreparedLaunch:
    """A kernel and its constant arguments. Its signature begins with the tensors, then the workspace.

    `options`: num_warps, num_stages and such. `descriptors`: for tensors that TMA reads, by name, the function that makes the descriptor.
    `constants`: all arguments but the tensors and those of `PER_CALL`. `workspace`: memory that each launch has to itself.
    `tables_vary`: the arguments of `TABLES` are given at each call. `by_driver`: the launch through the CUDA driver; None before `compile`,
    and where only Triton's launcher can launch the kernel.
    """

    kernel: Any
    options: dict[str, Any]
    ctas: int
    device: torch.device
    descriptors: dict[str, Callable[[Tensor], Any]]
    constants: dict[str, Any]
    workspace: Workspace | None = None
    tables_vary: bool = False
    _compiled: Any = field(default=None, init=False)
    by_driver: DriverLaunch | None = field(default=None, init=False)
    _arguments: list[Any] = field(default_factory=list, init=False)
    _varying: list[bool] = field(default_factory=list, init=False)
    _per_call_slots: list[str] = field(default_factory=list, init=False)

    def __call__(self, tensors: Tensors, per_call: dict[str, Any]) -> None:
        """Launch on the current stream of the device."""
        if not self.ctas:
            return
        if self._compiled is None:
            self.compile_and_launch(tensors, per_call)
            return
        if collected_jobs() is not None:
            return
        values: list[Any] = [t.data_ptr() for t in tensors.values() if t is not None]
        if self.workspace is not None:
            addresses, _held = self.workspace.addresses()
            values += addresses
        for name in self._per_call_slots:
            value = per_call[name]
            if type(value) is tuple:
                values += [t.data_ptr() for t in value]
            elif isinstance(value, Tensor):
                values.append(value.data_ptr())
            else:
                values.append(value)
        self.launch_at(values)

    @property
    def _changing(self) -> tuple[str, ...]:
        """Names of arguments, besides the tensors, that change between launches."""
        return (*PER_CALL, *TABLES) if self.tables_vary else PER_CALL

    @property
    def is_compiled(self) -> bool:
        """Whether `launch_at` may be called."""
        return self._compiled is not None

    def launch_at(self, values: Sequence[int | float]) -> None:
        """Launch with tensors as addresses: tensors that are not None, the workspace, and arguments of `PER_CALL`, in signature order."""
        stream = direct_stream(self.device.index)
        if stream is not None:
            self.launch_on(stream, values)
            return
        with torch.cuda.device(self.device):
            stream = direct_stream(self.device.index)
            if stream is None:
                self._launch_by_triton(values)
            else:
                self.launch_on(stream, values)

    def launch_on(self, stream: int, values: Sequence[int | float]) -> None:
        """`launch_at` on a stream from `direct_stream`."""
        if self.by_driver is None:
            self._launch_by_triton(values)
        else:
            self.by_driver(stream, values)

    def _launch_by_triton(self, values: Sequence[int | float]) -> None:
        rest = iter(values)
        arguments = [
            old if not varies
            else tuple(next(rest) for _ in old) if isinstance(old, tuple)
            else _rebased(old, _Address(next(rest))) if old is not None
            else next(rest)
            for old, varies in zip(self._arguments, self._varying, strict=True)
        ]  # fmt: skip
        self._compiled[(self.ctas, 1, 1)](*arguments)

    def _pointers(self, tensors: Tensors) -> list[Any]:
        """The first arguments: tensors, or their TMA descriptors, and the workspace."""
        pointers: list[Any] = [t if t is None or n not in self.descriptors else self.descriptors[n](t) for n, t in tensors.items()]
        return pointers if self.workspace is None else [*pointers, *self.workspace.tensors()]

    def compile_and_launch(self, tensors: Tensors, per_call: dict[str, Any]) -> None:
        """Compile and launch. The interpreter compiles nothing. Inside `collecting_jobs`, add a compile job instead of launching."""
        if interpreted():
            with quiet():
                self.kernel[(self.ctas,)](*self._all_arguments(tensors, per_call), **self.options)
            return
        jobs = collected_jobs()
        if jobs is not None:
            arguments = [_stand_in(a) for a in self._all_arguments(tensors, per_call)]
            jobs.append(partial(self._compile_in_thread, arguments))
            return
        self.compile(tensors, per_call)
        self(tensors, per_call)

    def compile(self, tensors: Tensors, per_call: dict[str, Any]) -> None:
        """Compile for tensors of these layouts and load the kernel."""
        names, arguments = self.kernel.arg_names, self._all_arguments(tensors, per_call)
        pointers = len(tensors) + (0 if self.workspace is None else self.workspace.arguments)
        varying = [i < pointers or name in self._changing for i, name in enumerate(names)]
        with torch.cuda.device(self.device):
            compiled = self._compile_with_fewer_stages(arguments)
            self.by_driver = driver_launch(compiled, arguments, varying, ctas=self.ctas, device=self.device)
        self._per_call_slots = [name for name in names if name in self._changing]
        self._arguments = [_without_tensors(a) if v else _address(a) for a, v in zip(arguments, varying, strict=True)]
        self._varying = [v and a is not None for a, v in zip(arguments, varying, strict=True)]
        self._compiled = compiled

    def _compile_in_thread(self, arguments: Sequence[Any]) -> None:
        with torch.cuda.device(self.device):
            self._compile_with_fewer_stages(arguments)

    def _all_arguments(self, tensors: Tensors, per_call: dict[str, Any]) -> list[Any]:
        """All arguments in the order of the kernel's signature."""
        names = self.kernel.arg_names
        assert list(tensors) == list(names[: len(tensors)]), f"tensors {list(tensors)}, signature {names}"
        known = {**self.constants, **{name: per_call[name] for name in self._changing if name in per_call}}
        pointers = self._pointers(tensors)
        return [*pointers, *(known[name] for name in names[len(pointers) :])]

    def _compile_with_fewer_stages(self, arguments: Sequence[Any]) -> Any:
        """The compiled kernel, with one pipeline stage less as long as a CTA needs more shared memory than there is: values that a score
        program looks up by query and key take shared memory in every stage.
        """
        limit, options = shared_memory_limit(self.device), self.options  # other threads may compile the same launch
        while True:
            compiled = compile_kernel(self.kernel, arguments, options)
            if compiled.metadata.shared <= limit:
                self.options = options
                return compiled
            stages = options.get("num_stages", 1)
            if stages == 1:
                raise OutOfResources(compiled.metadata.shared, limit, "shared memory")
            options = {**options, "num_stages": stages - 1}


@cache
def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that a CTA may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@dataclass(frozen=True)
class _StandIn:
    """Everything about a tensor that compilation depends on."""

    dtype: torch.dtype
    alignment: int

    def data_ptr(self) -> int:
        return self.alignment


def _stand_in(argument: Any) -> Any:
    """An argument without its memory: tensors, also inside tuples and TMA descriptors, become a `_StandIn`."""
    if isinstance(argument, Tensor):
        return _StandIn(argument.dtype, argument.data_ptr() % 16)
    if hasattr(argument, "block_shape"):
        return _rebased(argument, _stand_in(argument.base))
    return tuple(map(_stand_in, argument)) if isinstance(argument, tuple) else argument


def direct_stream(device: int) -> int | None:
    """The current stream, if the device is current and no profiler wants to see launches, which only Triton's launcher reports.

    The stream waits for block tables that other streams upload.
    """
    return None if current_cuda_device() != device else unhooked_stream(device)


def unhooked_stream(device: int) -> int | None:
    """`direct_stream` of the current device."""
    stream = ordered_stream(device)
    return None if hooks_are_set() else stream


class _Address(int):
    """An address in place of the tensor of a TMA descriptor."""

    def data_ptr(self) -> int:
        return int(self)


def _without_tensors(argument: Any) -> Any:
    """An argument that changes between launches: None stays None, tuples keep their length, TMA descriptors their layout."""
    if isinstance(argument, tuple):
        return tuple(None for _ in argument)
    return _rebased(argument, None) if hasattr(argument, "block_shape") else None


def _rebased(descriptor: Any, tensor: Any) -> Any:
    """The descriptor for another tensor of the same layout. The constructor would validate everything again."""
    out = object.__new__(type(descriptor))
    out.__dict__.update(descriptor.__dict__)
    out.base = tensor
    return out


def _address(argument: Any) -> Any:
    """Tensors as addresses, also inside tuples. `PreparedLaunch.constants` keeps the tensors alive."""
    if isinstance(argument, tuple):
        return tuple(map(_address, argument))
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


_launches: DerivedCache[BlockTable, PreparedLaunch] = DerivedCache(64)  # by pass, layouts and programs


def prepared_launch(table: BlockTable, key: Hashable, prepare: Callable[[], PreparedLaunch]) -> PreparedLaunch:
    """The cached launch of a table. `key` covers everything that `prepare` reads."""
    return _launches.get(table, key, prepare)


class _RecentLaunch(NamedTuple):
    """The launch of a kernel that was asked for last, looked up by a guard over its tensors, all of them aligned. Holds no tensor."""

    guard: Callable[..., bool]
    settings: tuple[Any, ...]  # the place of each tensor among the distinct ones, constants, and number of CTAs
    launch: PreparedLaunch


# By kernel: a handful. By id, because Triton's kernels hash their source.
_recent_launches: dict[int, _RecentLaunch] = {}


def layout_launch(kernel: Any, tensors: Tensors, constants: Mapping[str, Any], ctas: int, *, num_warps: int = 4) -> PreparedLaunch:
    """The cached launch of a kernel that depends on nothing but the layouts of its tensors and on constants. constants: hashable."""
    distinct, places = _distinct(tensors.values())
    settings = places, tuple(constants.items()), ctas, num_warps
    aligned = not reduce(or_, [t.data_ptr() for t in distinct]) % 16
    recent, device = _recent_launches.get(id(kernel)), distinct[0].device
    if recent is not None and aligned and recent.settings == settings and recent.guard(*distinct) and not launch.capturing(device):
        return recent.launch
    prepared = _layout_launch(kernel, device, layouts(tensors.values()), tuple(constants.items()), ctas, num_warps)
    if launch.capturing(device):
        hold_for_graph(prepared)
    elif aligned:
        _recent_launches[id(kernel)] = _RecentLaunch(tensor_guard(*distinct), settings, prepared)
    return prepared


@lru_cache(maxsize=512)
def _layout_launch(
    kernel: Any, device: torch.device, _layouts: Layouts, constants: tuple[tuple[str, Any], ...], ctas: int, num_warps: int
) -> PreparedLaunch:
    return PreparedLaunch(
        kernel=kernel, options={"num_warps": num_warps, **FUSED}, ctas=ctas, device=device, descriptors={}, constants=dict(constants)
    )  # fmt: skip


# A captured CUDA graph holds addresses of block tables and tilings and may outlive them. CUDA does not say when a graph dies, so these
# launches are held for the life of the process: one per call that a graph captured.
_held_for_graphs: set[PreparedLaunch] = set()
_tensors_held_for_graphs: dict[int, Tensor] = {}  # by id: tensors that a mask reads


def hold_for_graph(launch: PreparedLaunch, mask_captured: Sequence[Tensor] = ()) -> None:
    """Keep a launch's constant arguments, and tensors that its mask reads, alive for replays of the CUDA graph that is being captured."""
    _held_for_graphs.add(launch)
    _tensors_held_for_graphs.update((id(t), t) for t in mask_captured)


# All properties of a tensor that a compiled kernel depends on: Triton specialises on alignment and on divisors of strides.
# (dtype, shape, strides, whether the address is divisible by 16). A plain tuple: a launch makes a dozen of them.
Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]


# Layouts of the distinct tensors of a list, and for each tensor the index of its layout; −1 for None. A launch names the same tensor as a
# pointer, by TMA descriptors and as a running state.
Layouts = tuple[tuple[Layout, ...], tuple[int, ...]]


def layouts(tensors: Iterable[Tensor | None]) -> Layouts:
    distinct, places = _distinct(tensors)
    return tuple([(t.dtype, t.shape, t.stride(), t.data_ptr() % 16 == 0) for t in distinct]), places


def _distinct(tensors: Iterable[Tensor | None]) -> tuple[list[Tensor], tuple[int, ...]]:
    """(the distinct tensors of a list, for each of its elements the index among them; −1 for None)."""
    distinct: list[Tensor] = []
    index_of = {id(None): -1}
    indices = []
    for t in tensors:
        index = index_of.get(id(t))
        if index is None:
            assert t is not None
            index = index_of[id(t)] = len(distinct)
            distinct.append(t)
        indices.append(index)
    return distinct, tuple(indices)
