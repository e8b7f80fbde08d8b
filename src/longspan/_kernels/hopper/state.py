"""`HopperState`: the running state of the Hopper kernels between steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

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
