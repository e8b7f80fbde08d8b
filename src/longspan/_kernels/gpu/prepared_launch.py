"""Launches, prepared: what one needs is found once per block table, tilings, layouts of tensors and programs, and used again.

Triton's own launch looks at every argument of every call. A prepared one keeps the compiled kernel and fills in what changed: the
tensors, the scale, and where in a larger attention this one lies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from longspan._kernels.gpu.interpreter import interpreted, quiet
from longspan._masks.block_table import BlockTable

_CHANGING = ("mask_captured", "score_captured", "grads", "scale", "first_b", "first_h")


@dataclass(kw_only=True, eq=False)
class Prepared:
    """A kernel and its arguments but for those of `_CHANGING` and the tensors, which come first in the kernel's signature.

    `options`: of the launch. `described`: which tensors the copy engine reads, and how its view of each is made. `made`: makes tensors that
    every launch has for itself; they follow those that it is given.
    """

    kernel: Any
    options: dict[str, int]
    programs: int
    device: torch.device
    described: dict[int, Callable[[Tensor], Any]]
    known: dict[str, Any]
    made: Callable[[], tuple[Tensor | None, ...]] = tuple
    _compiled: Any = field(default=None, init=False)
    _fixed: list[Any] = field(default_factory=list, init=False)
    _places: dict[str, int] = field(default_factory=dict, init=False)
    _patterns: dict[int, Any] = field(default_factory=dict, init=False)

    def __call__(self, tensors: Sequence[Tensor | None], changing: dict[str, Any]) -> None:
        if not self.programs:
            return
        tensors = [*tensors, *self.made()]
        if self._compiled is None:
            self._first(tensors, changing)
            return
        arguments = self._fixed.copy()
        arguments[: len(tensors)] = self._pointers(tensors)
        for name, place in self._places.items():
            arguments[place] = changing[name]
        if torch.cuda.current_device() == self.device.index:
            self._compiled[(self.programs, 1, 1)](*arguments)
        else:
            with torch.cuda.device(self.device):
                self._compiled[(self.programs, 1, 1)](*arguments)

    def _pointers(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        out: list[Any] = list(tensors)
        for i, describe in self.described.items():
            tensor = tensors[i]
            assert tensor is not None
            if i not in self._patterns:
                self._patterns[i] = describe(tensor)
                self._patterns[i].base = None  # it must not keep the tensor
            out[i] = _rebased(self._patterns[i], tensor)
        return out

    def _first(self, tensors: Sequence[Tensor | None], changing: dict[str, Any]) -> None:
        """Launch through Triton, which compiles; keep what it compiled. The interpreter compiles nothing."""
        names = self.kernel.arg_names
        known = {**self.known, **{name: changing[name] for name in _CHANGING if name in changing}}
        arguments = [*self._pointers(tensors), *(known[name] for name in names[len(tensors) :])]
        with quiet() if interpreted() else torch.cuda.device(self.device):
            compiled = self._launched(arguments)
        self._places = {name: i for i, name in enumerate(names) if name in _CHANGING}
        self._fixed = [None] * len(tensors) + [_address(a) for a in arguments[len(tensors) :]]
        self._compiled = compiled

    def _launched(self, arguments: list[Any]) -> Any:
        """Launch, with fewer stages in flight where a program needs more shared memory than there is: what a score program looks up by
        query and key lies in every stage.
        """
        while True:
            try:
                return self.kernel[(self.programs,)](*arguments, **self.options)
            except OutOfResources as error:
                stages = self.options.get("num_stages", 1)
                if stages == 1 or error.name != "shared memory":
                    raise
                self.options = {**self.options, "num_stages": stages - 1}


def _rebased(descriptor: Any, tensor: Tensor) -> Any:
    """A descriptor for another tensor of the same layout. To make one anew would check all of it again."""
    out = object.__new__(type(descriptor))
    out.__dict__.update(descriptor.__dict__)
    out.base = tensor
    return out


def _address(argument: Any) -> Any:
    """Tensors as the numbers that kernels take: their owners keep them alive (`Prepared.known`)."""
    if isinstance(argument, tuple):
        return tuple(map(_address, argument))
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


_kept: WeakKeyDictionary[BlockTable, dict[Hashable, Prepared]] = WeakKeyDictionary()
_KEPT_PER_TABLE = 64


def prepared(table: BlockTable, key: Hashable, make: Callable[[], Prepared]) -> Prepared:
    """The launch kept for a table under a key, which names all that `make` looks at."""
    kept = _kept.setdefault(table, {})
    found = kept.get(key)
    if found is None:
        if len(kept) >= _KEPT_PER_TABLE:
            kept.clear()
        found = kept[key] = make()
    return found


# A captured CUDA graph holds the addresses of what a launch read, and outlives all that would keep it. No one says when a graph dies.
_captured: set[Prepared] = set()


def keep_for_good(launch: Prepared) -> None:
    """Keep what a launch reads beside its tensors (block tables, tilings): a CUDA graph that is being captured will read it again."""
    _captured.add(launch)


def layout(tensor: Tensor | None) -> Hashable:
    """All of a tensor that a compiled kernel depends on: kernels are compiled for alignment and for the divisors of strides."""
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0)
