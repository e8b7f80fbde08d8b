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
    monkeypatch.setattr(table_cache, "_same_bits", lambda a, b: compared.append(a.shape) or same(a, b))  # type: ignore[func-returns-value]
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


def test_a_device_copy_is_not_used_for_another_tensor_or_device() -> None:
    copies, tensor, other = DeviceCopies(), torch.arange(5), torch.arange(5)
    meta = torch.device("meta")
    copy = copies.on(tensor, meta)
    copies._copies[id(other)] = copies._copies[id(tensor)]  # a number that a deleted tensor had
    assert copies.on(other, meta) is not copy
    copies._copies[id(tensor)] = copies._copies[id(tensor)][0], torch.arange(5)  # of another device
    assert copies.on(tensor, meta).device == meta


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


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_floats_of_every_width_are_compared_by_their_bits(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, torch.nan, 1.0]).to(dtype)
    same = table_cache._same_bits
    assert same(values, values.clone()) and not same(values[:2], torch.tensor([-0.0, 0.0]).to(dtype)) and not same(values[:1], values[1:2])
    assert not same(values, values[:3]) and not same(values.float(), values.half())
    assert not same(values, torch.tensor([0.0, -0.0, torch.nan, 2.0]).to(dtype))


def test_integers_are_compared_in_shape_dtype_and_value() -> None:
    values, same = torch.arange(6), table_cache._same_bits
    assert same(values, values.clone()) and not same(values, values.int()) and not same(values, values.view(2, 3))
    assert not same(values, values + 1) and same(values > 2, values > 2)


def test_tables_are_kept_by_lengths_and_by_batch_and_heads_where_the_mask_depends_on_them() -> None:
    cache = TableCache()
    causal, by_batch, by_head = (
        ls.mask_mod(fn).traced.program
        for fn in (lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q >= kv + b, lambda b, h, q, kv: q >= kv + h)
    )

    def tables(program: Any, q_len: int = 40, kv_len: int = 40, batch: int = 2, heads: int = 3) -> Any:
        return cache.tables(program, [], q_len, kv_len, batch=batch, heads=heads)

    different = [tables(causal), tables(by_batch), tables(by_head), tables(None), tables(causal, 41), tables(causal, 40, 41)]
    assert len({id(t) for t in different}) == 6
    assert tables(causal, batch=5, heads=7) is different[0] and tables(None, batch=5, heads=7) is different[3]
    assert tables(by_batch, heads=7) is different[1] is not tables(by_batch, batch=5)
    assert tables(by_head, batch=5) is different[2] is not tables(by_head, heads=7)
    sizes = [(t.batch, t.heads) for t in (made.at((16, 32), []) for made in different[:3])]
    assert sizes == [(1, 1), (2, 1), (1, 3)]
    table = different[4].at((16, 32), [])
    assert (table.q_len, table.kv_len, table.block) == (41, 40, (16, 32)) and different[4].at((16, 32), []) is table


@pytest.mark.parametrize(("size", "kept"), [(2, [False, True, True]), (3, [True, True, True])])
def test_the_least_recently_used_tables_are_dropped_first(size: int, kept: list[bool]) -> None:
    cache, lengths = TableCache(size=size), (10, 20, 30)
    tables = lambda length: cache.tables(None, [], length, length, batch=1, heads=1)
    made = [tables(length) for length in lengths]
    assert [tables(length) is t for length, t in zip(lengths[::-1], made[::-1], strict=True)] == kept[::-1]


def test_contents_of_one_program_are_bounded() -> None:
    ids = torch.arange(40) // 7
    program, cache = ls.mask_mod(lambda b, h, q, kv: ids[q] == ids[kv]).traced.program, TableCache(contents_per_key=2)
    tables = lambda offset: cache.tables(program, [ids + offset], 40, 40, batch=1, heads=1)
    made = [tables(offset) for offset in range(3)]
    assert tables(2) is made[2] and tables(1) is made[1] and tables(0) is not made[0]


def test_device_copies_are_bounded() -> None:
    copies, meta = DeviceCopies(size=2), torch.device("meta")
    tensors = [torch.arange(n) for n in (3, 4, 5)]
    made = [copies.on(t, meta) for t in tensors]
    assert copies.on(tensors[2], meta) is made[2] and copies.on(tensors[1], meta) is made[1]
    assert copies.on(tensors[0], meta) is not made[0] and len(copies._copies) == 2
    assert copies.on(tensors[0], torch.device("cpu")) is tensors[0]
