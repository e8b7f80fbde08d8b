"""Activation checkpointing whose recomputation takes attention's results from the forward pass.

Two dispatch modes surround the forward pass and its recomputation. The first records the results (out and lse) of every call of the
operator; the second returns them in the same order instead of calling the operator: attention is computed once, and a call with a plan
communicates once. Autograd records the operator in both cases, so that its backward pass is the usual one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longspan._engine import ops
from longspan._torch_private import TorchDispatchMode, detached_below_autograd
from longspan.integrations._host_store import HostStore, HostTensor


class _OnDevice:
    """A result where it was computed. The layer must not have modified it in place."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = detached_below_autograd(tensor)
        self._version = self._tensor._version

    def read(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError("memory.checkpoint: the result of attention was modified in place: expected an operation with a new result")
        return self._tensor


Results = list[tuple[_OnDevice | HostTensor, ...]]


class _Record(TorchDispatchMode):
    """Records the results of attention."""

    def __init__(self, results: Results, keep: Callable[[Tensor], _OnDevice | HostTensor]) -> None:
        super().__init__()
        self._results, self._keep = results, keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func is ops.attend._opoverload:
            self._results.append(tuple(self._keep(t) for t in outputs))
        return outputs


class _Replay(TorchDispatchMode):
    """Returns recorded results in the order of the calls; from the first one again each time that it is entered."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results, self._next = results, 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not ops.attend._opoverload:
            return func(*args, **(kwargs or {}))
        if self._next == len(self._results):
            raise RuntimeError(
                f"memory.checkpoint: expected {len(self._results)} attention calls in the recomputation, as in the forward pass, got more: "
                "the function must do the same each time"
            )
        self._next += 1
        return tuple(t.read() for t in self._results[self._next - 1])


def record_and_replay(store: HostStore | None) -> tuple[_Record, _Replay]:
    """The contexts of the forward pass and of its recomputation. store: for results in host memory; None leaves them on the device."""
    results: Results = []
    return _Record(results, _OnDevice if store is None else store.put), _Replay(results)
