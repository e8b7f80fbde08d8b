"""The transpose of heads and tokens: shapes before the exchange are those after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longspan._comm.mesh import as_mesh
from longspan._engine.ulysses import UlyssesTranspose
from longspan.testing import virtual_world


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_shapes_that_kernels_are_chosen_for_are_those_of_gathered_tensors(kv_heads: int) -> None:
    lengths, kv_lengths = (5, 7), (11, 3)

    def rank(mesh: Any) -> bool:
        group, r = as_mesh(mesh).group(0), as_mesh(mesh).rank
        transpose = UlyssesTranspose(group=group, lengths=lengths, kv_lengths=kv_lengths, heads=6, kv_heads=kv_heads)
        q = torch.zeros(4, 6, lengths[r], 9)
        k, v = (torch.zeros(4, kv_heads, kv_lengths[r], dim) for dim in (9, 8))
        made = transpose.gathered_shapes(q, k, v)
        assert all(t.untyped_storage().nbytes() == 4 for t in made)
        return [t.shape for t in made] == [t.shape for t in transpose.gather_all([q], [k, v], what="test")]

    assert all(virtual_world(2).run(rank))
