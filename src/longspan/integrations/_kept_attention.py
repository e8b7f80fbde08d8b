"""Activation checkpointing whose recomputation takes attention's results from the forward pass.

Two dispatch modes surround the forward pass and its recomputation. The first records the results (out and lse) of every call of the
operator; the second returns them in the same order instead of calling the operator: attention is computed once, and a call with a plan
communicates once. Autograd records the operator in both cases, so that its backward pass is the usual one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longspan._engine import ops
from longspan._engine.selected_mesh_ops import attend_selected_shards
from longspan._engine.selected_ops import attend_selected
from longspan._torch_private import TorchDispatchMode, detached_below_autograd
from longspan.integrations._host_store import HostStore, HostTensor

# The operators whose results are kept.
ATTENTION = tuple(op._opoverload for op in (ops.attend, attend_selected, attend_selected_shards))


class Unmodified:
    """A detached tensor that nobody may modify in place before it is read."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def read(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "memory.checkpoint: an argument or a result of attention was modified in place: expected an operation with a new result"
            )
        return self._tensor


def _on_device(tensor: Tensor) -> Unmodified:
    """A result of attention where it was computed."""
    return Unmodified(detached_below_autograd(tensor))


Results = list[tuple[Unmodified | HostTensor, ...]]


class _Record(TorchDispatchMode):
    """Records the results of attention: on their device, or those of a GPU in `store`.

    Results in host memory are compared with their versions at the end of the forward pass: holding them longer would keep their memory.
    """

    def __init__(self, results: Results, store: HostStore | None) -> None:
        super().__init__()
        self._results, self._store = results, store
        self._copied: list[Unmodified] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in ATTENTION:
            self._results.append(tuple(self._kept(t) for t in outputs))
        return outputs

    def _kept(self, tensor: Tensor) -> Unmodified | HostTensor:
        here = _on_device(tensor)
        if self._store is None or not tensor.is_cuda:
            return here
        self._copied.append(here)
        return self._store.put(tensor)

    def __exit__(self, error_type: Any, error: Any, traceback: Any) -> None:
        super().__exit__(error_type, error, traceback)
        copied, self._copied = self._copied, []
        if error_type is None:
            for tensor in copied:
                tensor.read()


class _Replay(TorchDispatchMode):
    """Returns recorded results in the order of the calls; from the first one again each time that it is entered."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results, self._next = results, 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ATTENTION:
            return func(*args, **(kwargs or {}))
        if self._next == len(self._results):
            raise RuntimeError(
                f"memory.checkpoint: expected {len(self._results)} attention calls in the recomputation, as in the forward pass, got more: "
                "the function must do the same each time"
            )
        self._next += 1
        # New tensors: autograd makes these results of the recomputed graph, which would live as long as the recorded ones.
        return tuple(detached_below_autograd(t.read()) for t in self._results[self._next - 1])


def record_and_replay(store: HostStore | None) -> tuple[_Record, _Replay]:
    """The contexts of the forward pass and of its recomputation. store: for results in host memory; None leaves them on the device."""
    results: Results = []
    return _Record(results, store), _Replay(results)
