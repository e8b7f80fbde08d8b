"""The mesh for which sharding rules give placements."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor._op_schema import OpStrategy

from longspan.torch_compat import _sharding_rules as rules


class Asked(Exception):
    """The mesh was asked for."""


class Schema:
    """An operator's arguments, of which none is a tensor."""

    args_schema: tuple[OpStrategy | None, ...] = (None,) * 20

    def get_mesh_from_args(self, validate: bool = True) -> Any:
        raise Asked(validate)


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("backward", [False, True])
def test_tensors_of_a_forward_have_one_mesh(kind: str, backward: bool) -> None:
    """In a backward pass, random states may be on none."""
    rule = getattr(rules, f"_scaled_dot_product_{kind}_attention{'_backward' * backward}_cp_strategy")
    with pytest.raises(Asked) as asked:
        rule(Schema())
    assert asked.value.args == (not backward,)
