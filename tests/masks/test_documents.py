"""Bounds of documents from ids: contiguous documents with padding, brute force."""

from __future__ import annotations

import pytest
import torch

from longspan._masks.documents import bounds, renumbered


@pytest.mark.parametrize("ids", [
    [0, 1, 2], [7, 7, 7, 2, 2, 9], [-1, 4, 4, -1, -1, 3, -1], [-1, -1], [5], [1, 1, -1, 1], [0, 1, 0],
    [[0, 0, 1], [3, 2, 2]], [[0, -1], [1, 1]],
    [[0, 1, 0], [0, 0, 0]],
], ids=str)  # fmt: skip
def test_bounds_are_the_ends_of_each_tokens_document(ids: list[int]) -> None:
    given = torch.tensor(ids, dtype=torch.int32)
    got = bounds(*renumbered(given))
    rows, length = given.reshape(-1, given.shape[-1]).tolist(), given.shape[-1]
    want, contiguous = [], True
    for row in rows:
        for i in row:
            tokens = [j for j, other in enumerate(row) if other == i]
            contiguous &= i < 0 or tokens == list(range(tokens[0], tokens[-1] + 1))
            want.append((length, 0) if i < 0 else (tokens[0], tokens[-1] + 1))
    if not contiguous:
        assert got is None
        return
    assert got is not None and got[0].dtype == got[1].dtype == torch.int32
    assert list(zip(got[0].flatten().tolist(), got[1].flatten().tolist(), strict=True)) == want
