"""Cached block tables and device copies follow the contents of captured tensors, not their identity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import longspan as ls
from longspan._engine import table_cache
from longspan._engine.table_cache import DeviceCopies, TableCache


def test_tables_are_reused_for_equal_contents_and_rebuilt_for_others() -> None:
    ids = torch.arange(300) // 70
    traced = ls.mask_mod(lambda b, h, q, kv: ids[q] == ids[kv]).traced
    cache = TableCache()

    def table(tensor: torch.Tensor) -> object:
        return cache.tables(traced.program, [tensor], 300, 300, batch=2, heads=3).at((128, 128), [tensor])

    first = table(ids)
    assert table(ids) is first
    assert table(ids.clone()) is first
    assert table(ids + 1) is not first
    ids[150:] = 9
    changed = table(ids)
    assert changed is not first
    assert torch.equal(changed.to_dense(), ls.mask_mod(lambda b, h, q, kv: ids[q] == ids[kv]).block_table(300).to_dense())  # type: ignore[attr-defined]


def test_attention_sees_in_place_changes_of_captured_tensors() -> None:
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in range(3))
    ids = torch.arange(300) // 70
    mask = ls.mask_mod(lambda b, h, i, j: ids[i] == ids[j])
    for _ in range(2):
        torch.testing.assert_close(ls.attention(q, k, v, mask=mask), ls.attention(q, k, v, mask=mask, kernel="dense"))
        ids.copy_((torch.arange(300) + 40) // 90)


def test_backward_raises_if_a_mask_tensor_was_modified_since_forward() -> None:
    q, k, v = (torch.randn(1, 2, 300, 8, requires_grad=True) for _ in range(3))
    ids = torch.arange(300) // 70
    out = ls.attention(q, k, v, mask=lambda b, h, i, j: ids[i] == ids[j])
    ids += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_cache_is_bounded_and_copies_are_dropped_with_their_tensors() -> None:
    cache = TableCache(size=3)
    for length in range(1, 9):
        cache.tables(None, [], length, length, batch=1, heads=1)
    assert len(cache._entries) == 3
    copies = DeviceCopies()
    tensor = torch.arange(5)
    assert copies.on(tensor, torch.device("cpu")) is tensor
    assert copies.on(tensor, torch.device("meta")) is copies.on(tensor, torch.device("meta"))
    del tensor
    assert not copies._copies


def by_numpy(ids: torch.Tensor, new: torch.Tensor) -> None:
    np.copyto(ids.numpy(), new.numpy())


def by_data(ids: torch.Tensor, new: torch.Tensor) -> None:
    ids.data.copy_(new)


@pytest.mark.parametrize("write", [by_numpy, by_data])
def test_writes_without_a_version_change_are_seen_on_the_cpu(write: Any) -> None:
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in range(3))
    ids = torch.zeros(300, dtype=torch.int64)
    mask = ls.mask_mod(lambda b, h, i, j: ids[i] == ids[j])
    before = ids._version
    for _ in range(2):
        torch.testing.assert_close(ls.attention(q, k, v, mask=mask), ls.attention(q, k, v, mask=mask, kernel="dense"))
        write(ids, torch.arange(300) // 70)
    assert ids._version == before


def test_contents_are_compared_bit_for_bit() -> None:
    table = torch.tensor([0.0, torch.nan, 1.0])
    traced = ls.mask_mod(lambda b, h, q, kv: torch.signbit(table[q % 3]) | (q >= kv)).traced
    cache = TableCache()
    first = cache.tables(traced.program, [table], 30, 30, batch=1, heads=1)
    assert cache.tables(traced.program, [table.clone()], 30, 30, batch=1, heads=1) is first
    table[0] = -0.0
    assert cache.tables(traced.program, [table], 30, 30, batch=1, heads=1) is not first


def test_equal_contents_in_other_tensors_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a comparison synchronizes with the device."""
    monkeypatch.setattr(table_cache, "_version", lambda tensor: tensor._version)
    compared, same = [], table_cache._same_bits
    monkeypatch.setattr(table_cache, "_same_bits", lambda a, b: compared.append(a) or same(a, b))  # type: ignore[func-returns-value]
    ids = torch.arange(300) // 70
    program = ls.mask_mod(lambda b, h, q, kv: ids[q] == ids[kv]).traced.program
    cache = TableCache()

    def table(tensor: torch.Tensor) -> object:
        return cache.tables(program, [tensor], 300, 300, batch=1, heads=1)

    first, twin, other = table(ids), ids.clone(), ids + 1
    assert table(twin) is first and table(other) is not first and len(compared) == 3
    for _ in range(3):
        assert table(ids) is first and table(twin) is first and table(other) is not first
    assert len(compared) == 3
    twin += 1
    assert table(twin) is table(other)
    for _ in range(20):  # entries of deleted tensors make room for new ones
        assert table(ids.clone()) is first
    compared.clear()
    assert table(ids) is first and table(other) is not first and not compared


def test_a_device_copy_follows_the_contents_of_its_tensor() -> None:
    copies, array = DeviceCopies(), np.arange(5)
    tensor = torch.from_numpy(array)
    first = copies.on(tensor, torch.device("meta"))
    array[2] = 9
    second = copies.on(tensor, torch.device("meta"))
    assert second is not first
    assert copies.on(tensor, torch.device("meta")) is second


def test_a_copy_made_in_inference_mode_can_be_used_in_training() -> None:
    copies, ids = DeviceCopies(), torch.arange(6)
    with torch.inference_mode():
        made = torch.arange(7)
        copy = copies.on(ids, torch.device("meta"))
        assert copies.on(made, torch.device("cpu")) is made
    assert not copy.is_inference() and not copy.requires_grad
    assert copies.on(ids, torch.device("meta")) is copy
    copied = copies.on(made, torch.device("cpu"))
    assert torch.equal(copied, made) and not copied.is_inference()
    assert copies.on(made, torch.device("cpu")) is copied
