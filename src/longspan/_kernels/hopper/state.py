"""`HopperState`: the running state of the Hopper kernels between steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from longspan._kernels.gpu.buffers import empty_state, usable
from longspan._kernels.hopper.passes import streamable
from longspan._kernels.protocol import State


@dataclass(kw_only=True, eq=False)
class HopperState(State):
    """A running state of this kernel.

    `completed_out`: the final out, allocated before the last step; it holds the rows of query tiles that are complete
    (`Work.complete_q_tiles`), whose rows in `out` are undefined. None if no tile was complete early.
    """

    completed_out: Tensor | None = None

    @property
    def layout(self) -> Hashable:
        out, lse, completed = self.out, self.lse, self.completed_out
        if completed is None:
            return HopperState, out.dtype, out.stride(), lse.stride(), (out.data_ptr() | lse.data_ptr()) & 15
        misaligned = (out.data_ptr() | lse.data_ptr() | completed.data_ptr()) & 15
        return HopperState, out.dtype, out.stride(), lse.stride(), misaligned, completed.stride()


def final_state(q: Tensor, v: Tensor, old: State | None) -> tuple[State, dict[str, Tensor | None]]:
    """(an uninitialised final state, its tensors and those of `old` by argument of the kernels that merge `old` into it)."""
    result = empty_state(q, v.shape[-1], q.dtype, max_scores=False)
    old = None if old is None else usable(old, max_scores=False)
    return result, {
        "out_ptr": result.out, "lse_ptr": result.lse,
        "old_out_ptr": None if old is None else streamable(old.out), "old_lse_ptr": None if old is None else old.lse,
    }  # fmt: skip
