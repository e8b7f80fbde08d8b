"""Prepared launches: a compiled kernel and its arguments, cached per block table, tilings, tensor layouts and programs.

Triton's own launch inspects every argument of every call. A prepared launch holds the compiled kernel and fills in what changes between
calls: the tensors, the captured tensors, the scale, and the first batch row and head.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from longspan._derived_cache import DerivedCache
from longspan._kernels.gpu.interpreter import interpreted, quiet
from longspan._masks.block_table import BlockTable

Tensors = Mapping[str, Tensor | None]  # by kernel argument, in the order of the kernel's signature
PER_CALL = ("mask_captured", "score_captured", "grads", "scale", "first_b", "first_h")  # arguments other than tensors that change


@dataclass(kw_only=True, eq=False)
class PreparedLaunch:
    """A kernel and its constant arguments. Its signature begins with the tensors, then the workspace.

    `options`: num_warps, num_stages and such. `descriptors`: for tensors that TMA reads, by name, the function that makes the descriptor.
    `constants`: all arguments but the tensors and those of `PER_CALL`. `workspace`: allocates tensors that each launch has to itself.
    """

    kernel: Any
    options: dict[str, int]
    ctas: int
    device: torch.device
    descriptors: dict[str, Callable[[Tensor], Any]]
    constants: dict[str, Any]
    workspace: Callable[[], tuple[Tensor | None, ...]] = tuple
    _compiled: Any = field(default=None, init=False)
    _arguments: list[Any] = field(default_factory=list, init=False)
    _per_call_slots: dict[str, int] = field(default_factory=dict, init=False)
    _descriptors: dict[str, Any] = field(default_factory=dict, init=False)

    def __call__(self, tensors: Tensors, per_call: dict[str, Any]) -> None:
        """Launch on the current stream of the device."""
        if not self.ctas:
            return
        if self._compiled is None:
            self.compile_and_launch(tensors, per_call)
            return
        pointers = self._pointers(tensors)
        arguments = self._arguments.copy()
        arguments[: len(pointers)] = pointers
        for name, slot in self._per_call_slots.items():
            arguments[slot] = per_call[name]
        if torch.cuda.current_device() == self.device.index:
            self._compiled[(self.ctas, 1, 1)](*arguments)
        else:
            with torch.cuda.device(self.device):
                self._compiled[(self.ctas, 1, 1)](*arguments)

    def _pointers(self, tensors: Tensors) -> list[Any]:
        """The first arguments: tensors, or their TMA descriptors, and the workspace."""
        if not self.descriptors:
            return [*tensors.values(), *self.workspace()]
        return [*(self._descriptor(n, t) if n in self.descriptors else t for n, t in tensors.items()), *self.workspace()]

    def _descriptor(self, name: str, tensor: Tensor | None) -> Any:
        assert tensor is not None
        if name not in self._descriptors:
            self._descriptors[name] = self.descriptors[name](tensor)
            self._descriptors[name].base = None  # the template must not keep the tensor alive
        return _rebased(self._descriptors[name], tensor)

    def compile_and_launch(self, tensors: Tensors, per_call: dict[str, Any]) -> None:
        """Launch through Triton, which compiles, and cache the compiled kernel. The interpreter compiles nothing."""
        names = self.kernel.arg_names
        assert list(tensors) == list(names[: len(tensors)]), f"tensors {list(tensors)}, signature {names}"
        known = {**self.constants, **{name: per_call[name] for name in PER_CALL if name in per_call}}
        pointers = self._pointers(tensors)
        arguments = [*pointers, *(known[name] for name in names[len(pointers) :])]
        with quiet() if interpreted() else torch.cuda.device(self.device):
            compiled = self._launch_with_fewer_stages(arguments)
        self._per_call_slots = {name: i for i, name in enumerate(names) if name in PER_CALL}
        self._arguments = [None] * len(pointers) + [_address(a) for a in arguments[len(pointers) :]]
        self._compiled = compiled

    def _launch_with_fewer_stages(self, arguments: list[Any]) -> Any:
        """Launch, with one pipeline stage less as long as a CTA needs more shared memory than there is: values that a score program looks
        up by query and key take shared memory in every stage.
        """
        while True:
            try:
                return self.kernel[(self.ctas,)](*arguments, **self.options)
            except OutOfResources as error:
                stages = self.options.get("num_stages", 1)
                if stages == 1 or error.name != "shared memory":
                    raise
                self.options = {**self.options, "num_stages": stages - 1}


def _rebased(descriptor: Any, tensor: Tensor) -> Any:
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


# A captured CUDA graph holds addresses of block tables and tilings and may outlive them. CUDA does not say when a graph dies, so these
# launches are held for the life of the process: one per call that a graph captured.
_held_for_graphs: set[PreparedLaunch] = set()


def hold_for_graph(launch: PreparedLaunch) -> None:
    """Keep a launch's constant arguments alive for replays of the CUDA graph that is being captured."""
    _held_for_graphs.add(launch)


def layout(tensor: Tensor | None) -> Hashable:
    """All properties of a tensor that a compiled kernel depends on: Triton specialises on alignment and on divisors of strides."""
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0)


def layouts(tensors: Iterable[Tensor | None]) -> Hashable:
    return tuple(map(layout, tensors))
