"""Ids and bounds of documents, brute force and by hand, and the integers that they are made from."""

from __future__ import annotations

import pytest
import torch

from longspan._masks.documents import bounds, document_ids, integer, integers, renumbered


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


@pytest.mark.parametrize(
    ("ids", "expected", "valid"),
    [
        ([5, 5, 2, 2, 2, 9], [0, 0, 1, 1, 1, 2], None),
        ([5, 2, 5, 7], [0, 1, 0, 3], None),
        ([-1, 4, 4, -3, -1, 1], [0, 1, 1, 1, 1, 4], [False, True, True, False, False, True]),
        ([-1, -1], [0, 0], [False, False]),
        ([[3, 3, 1], [2, -1, 2]], [[0, 0, 1], [0, 0, 0]], [[True] * 3, [True, False, True]]),
    ],
)
def test_documents_are_numbered_by_their_first_run_and_padding_joins_the_one_before(ids, expected, valid):
    got, is_valid = renumbered(torch.tensor(ids))
    assert got.tolist() == expected and got.dtype == torch.int32
    assert (None if is_valid is None else is_valid.tolist()) == valid


def test_documents_in_two_runs_have_no_bounds_even_when_another_is_contiguous():
    for ids in ([0, 0, 1, 0], [[0, 1, 2], [0, 1, 0]], [[0, 1, 0], [0, 1, 2]], [0, -1, 0]):
        assert bounds(*renumbered(torch.tensor(ids))) is None
    first, end = bounds(*renumbered(torch.tensor([0, -1, -2, 1, 1]))) or ((), ())
    assert (first.tolist(), end.tolist()) == ([0, 5, 5, 3, 3], [1, 0, 0, 5, 5])


def test_document_ids_of_lengths():
    assert document_ids([2, 0, 3]).tolist() == [0, 0, 2, 2, 2] and document_ids([2, 0, 3]).dtype == torch.int32
    rows = [[0, 1, 1, -1], [0, 0, 0, 1]]
    assert document_ids([[1, 2], [3, 1]]).tolist() == document_ids(torch.tensor([[1, 2], [3, 1]])).tolist() == rows
    assert document_ids(torch.tensor([[4]])).tolist() == [[0] * 4] and document_ids((1,)).tolist() == [0]
    many = "17 lengths with minimum -2"
    for lengths, message in (
        ([], "at least one entry, got an empty list"),
        ([0, 0], r"must be >= 0 and not all 0, got \[0, 0\]"),
        ([3, -1], r"must be >= 0 and not all 0, got \[3, -1\]"),
        ([-2] + [3] * 15, r"got \[-2, 3"),
        ([-2] + [3] * 16, many),
        ([0.5], "must be a list of integers"),
        (torch.zeros((), dtype=torch.int64), r"must have shape \[documents\] or \[B, documents\], got \(\)"),
        (torch.ones(1, 1, 1, dtype=torch.int64), r"must have shape \[documents\] or \[B, documents\], got \(1, 1, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            document_ids(lengths)


def test_integers_are_copied_into_signed_tensors():
    values = torch.tensor([1, 2], dtype=torch.uint8)
    copied = integers(values, "x", "integers", (1,))
    assert copied.dtype == torch.int64 and integers(torch.tensor([1], dtype=torch.int8), "x", "integers", (1, 2)).dtype == torch.int8
    signed = torch.tensor([1, 2])
    copied = integers(signed, "x", "integers", (1,))
    signed[0] = 9
    assert copied.tolist() == [1, 2]
    for wrong in ([True], [0.5], [1j], [[1]], 1):
        with pytest.raises(ValueError, match="x must be integers, got torch"):
            integers(wrong, "x", "integers", (1,))


def test_integers_are_python_numpy_or_tensor_numbers():
    numpy = pytest.importorskip("numpy")
    assert [integer(x, "x") for x in (3, numpy.int32(4), torch.tensor(5), torch.tensor(6, dtype=torch.uint8))] == [3, 4, 5, 6]
    for wrong in (True, 1.0, "1", None, [1], torch.tensor([1]), torch.tensor(1.0), torch.tensor(True), numpy.bool_(True), numpy.float32(1)):
        with pytest.raises(TypeError, match=f"x must be an int, got {type(wrong).__name__}"):
            integer(wrong, "x")
