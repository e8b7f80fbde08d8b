"""The handle of a plan: what custom operators and compiled code take in place of the plan itself."""

from __future__ import annotations

import itertools
import weakref

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
    """

    def __init__(self, data: PlanData) -> None:
        self.data = data
        number = next(_handles)
        live[number] = data
        with default_modes():
            self.token: Tensor = torch.tensor(number)
        self.token.plan_data = data  # type: ignore[attr-defined]  # keeps the plan alive as long as the token
