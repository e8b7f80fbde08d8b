"""The handle of a plan: what custom operators and compiled code take in place of the plan itself."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from longspan._plan.plan_data import PlanData
from longspan._torch_modes import default_modes

_handles = itertools.count(1)

# Plans by handle. Weak: a plan lives as long as its PlanHandle or its token, which an autograd graph may hold.
live: weakref.WeakValueDictionary[int, PlanData] = weakref.WeakValueDictionary()


class PlanHandle:
    """A plan's data and its token: all that the engine needs of a plan.

    The token is a scalar tensor with the plan's number. Compiled code takes it as an input like any other tensor, so that another plan does
    not trigger a recompilation.

    Attributes:
        data: The plan's contents.
        token: Scalar int64 tensor on the CPU, the key of `data` in `live`.
        mask_sources: The caller's tensors that the mask reads, with their versions when the plan was made. Plans that were sent to
            another process have none.
    """

    mask_sources: tuple[tuple[weakref.ref[Tensor], int], ...] = ()

    def __init__(self, data: PlanData) -> None:
        self.data = data
        number = next(_handles)
        live[number] = data
        with default_modes():
            self.token: Tensor = torch.tensor(number)
        self.token.plan_data = data  # type: ignore[attr-defined]  # keeps the plan alive as long as the token

    def check_mask(self) -> None:
        """Raise ValueError if a tensor that the mask reads was modified: the plan holds the mask as it was."""
        for source, version in self.mask_sources:
            tensor = source()
            if tensor is not None and tensor._version != version:
                raise ValueError(
                    f"plan: expected the tensors that mask {self.data.mask.text} reads as they were when the plan was made, got a tensor "
                    f"of shape {tuple(tensor.shape)} that was modified in place. Make another plan, or a mask of a copy"
                )


def mask_sources(sources: Iterable[Tensor]) -> tuple[tuple[weakref.ref[Tensor], int], ...]:
    """The tensors that a mask reads with their versions, for `PlanHandle.mask_sources`. Inference tensors have no version."""
    return tuple((weakref.ref(t), t._version) for t in sources if not t.is_inference())
