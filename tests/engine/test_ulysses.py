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


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("cross", [False, True])
def test_a_rank_gets_all_tokens_of_its_heads_and_returns_them(kv_heads: int, cross: bool) -> None:
    """Three ranks, six heads."""
    lengths, dim = (5, 7, 3), 4
    kv_lengths = (2, 0, 6) if cross else lengths
    generator = torch.Generator().manual_seed(kv_heads)
    q, k, v = (
        torch.randn(2, h, sum(n), d, generator=generator)
        for h, n, d in ((6, lengths, 4), (kv_heads, kv_lengths, 4), (kv_heads, kv_lengths, 5))
    )
    reads = [sorted({h // (6 // kv_heads) for h in (2 * r, 2 * r + 1)}) for r in range(3)]
    grads = [[torch.randn(2, len(reads[r]), sum(kv_lengths), d, generator=generator) for d in (4, 5)] for r in range(3)]
    starts = [(sum(lengths[:r]), sum(kv_lengths[:r])) for r in range(3)]

    def rank(mesh: Any) -> bool:
        group, r = as_mesh(mesh).group(0), as_mesh(mesh).rank
        transpose = UlyssesTranspose(group=group, lengths=lengths, kv_lengths=kv_lengths, heads=6, kv_heads=kv_heads)
        mine, here = starts[r], (slice(2 * r, 2 * r + 2), slice(reads[r][0], reads[r][-1] + 1))
        local = [x[:, :, mine[side] : mine[side] + n[r]] for x, side, n in ((q, 0, lengths), (k, 1, kv_lengths), (v, 1, kv_lengths))]
        got = transpose.gather_all([local[0]], local[1:], what="test")
        right = all(torch.equal(a, b) for a, b in zip(got, (q[:, here[0]], k[:, here[1]], v[:, here[1]]), strict=True))
        assert transpose.local_heads == range(2 * r, 2 * r + 2) and transpose.partial_kv_sums == (kv_heads < 3)
        back, twice = transpose.scatter([got[0], 2 * got[0][..., :3]], what="test")
        right &= torch.equal(back, local[0]) and torch.equal(twice, 2 * local[0][..., :3])
        sums = transpose.scatter_sum(grads[r], what="test")
        for x, total in enumerate(sums):
            want = torch.zeros(2, kv_heads, sum(kv_lengths), (dim, 5)[x])
            for other in range(3):
                want[:, reads[other]] += grads[other][x]
            right &= torch.allclose(total, want[:, :, mine[1] : mine[1] + kv_lengths[r]], atol=1e-6)
        half = transpose.scatter_sum([g.bfloat16() for g in grads[r]], what="test")
        return right and [g.dtype for g in half] == [torch.float32] * 2 and sums[0].dtype == torch.float32

    assert all(virtual_world(3).run(rank))
