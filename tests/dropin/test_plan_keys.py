"""Calls that differ in one property only get plans of their own: one test per component of the drop-in's cache keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.dropin.helpers import DIM, assert_close, random
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import longspan as ls
from longspan._dropin import mask_keys
from longspan._dropin.context import context_parallel
from longspan._dropin.mask_keys import _stamp
from longspan._plan.layout import Layout
from longspan.testing import virtual_world
from longspan.torch_compat import set_rotate_method
from longspan.torch_compat._dispatcher import DispatcherCache

LENGTH = 43
Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def tensors(batch: int = 2, heads: int = 3, q_len: int = LENGTH, kv_len: int = LENGTH) -> list[Tensor]:
    return [random(batch, heads, n, DIM, seed=seed) for seed, n in enumerate((q_len, kv_len, kv_len))]


def check_in_one_context(calls: Sequence[tuple[list[Tensor], dict[str, Any]]], *, layout: Any = None, ranks: int = 2) -> None:
    """Each (q, k, v whole, keywords of `flex_attention`), in both orders in one context, gives the result of one device."""
    want = [ls.flex_attention(*whole, **options) for whole, options in calls]
    lengths = sorted({t.shape[2] for whole, _ in calls for t in whole})

    def rank(mesh: Any) -> list[Tensor]:
        out: list[Tensor] = []
        for order in (calls, calls[::-1]):
            with context_parallel(mesh, seq_len=lengths, layout=layout) as cp:
                out += [cp.unshard(flex_attention(*(cp.shard(t, 2) for t in whole), **options), 2) for whole, options in order]
        return out

    for outputs in virtual_world(ranks, timeout=30).run(rank):
        assert_close(outputs, want + want[::-1])


def seen_by_row(rows: Tensor) -> Mod:
    """Every query of batch row b sees the first rows[b] keys."""
    return lambda b, h, q, kv: kv < rows[b]


def test_two_key_lengths_for_one_query_length_get_two_plans() -> None:
    check_in_one_context([(tensors(kv_len=n), {"block_mask": ls.causal()}) for n in (203, 64)])


def test_two_query_lengths_for_one_key_length_get_two_plans() -> None:
    check_in_one_context([(tensors(q_len=n), {"block_mask": ls.causal()}) for n in (203, 64)])


def test_two_batch_sizes_under_a_mask_that_depends_on_the_batch_row_get_two_plans() -> None:
    mask = seen_by_row(torch.tensor([3, 40, 17, 25]))
    check_in_one_context([(tensors(batch=n), {"block_mask": mask}) for n in (2, 4)])


def test_two_numbers_of_heads_under_a_mask_that_depends_on_the_head_get_two_plans() -> None:
    counts = torch.tensor([3, 40, 17, 25])
    check_in_one_context([(tensors(heads=n), {"block_mask": lambda b, h, q, kv: kv < counts[h]}) for n in (2, 4)])


def test_a_layout_that_depends_on_the_batch_row_is_planned_with_the_batch_size() -> None:
    layout = Layout(length=LENGTH, rows=((((0, 20),), ((20, 23),)), (((23, 20),), ((0, 23),))))
    check_in_one_context([(tensors(), {"block_mask": ls.causal()}), (tensors(), {"block_mask": ls.full()})], layout=layout)


def test_two_programs_over_one_table_get_two_plans() -> None:
    ids = torch.arange(LENGTH) // 10
    masks: list[Mod] = [lambda b, h, q, kv: ids[q] == ids[kv], lambda b, h, q, kv: ids[q] >= ids[kv]]
    check_in_one_context([(tensors(), {"block_mask": mask}) for mask in masks])


def test_two_tables_in_one_program_get_two_plans() -> None:
    def same(ids: Tensor) -> Mod:
        return lambda b, h, q, kv: ids[q] == ids[kv]

    check_in_one_context([(tensors(), {"block_mask": same(torch.arange(LENGTH) // n)}) for n in (10, 17)])


def test_two_computations_on_one_table_before_it_is_indexed_get_two_plans() -> None:
    ids = torch.arange(LENGTH)

    def same(n: int) -> Mod:
        return lambda b, h, q, kv: (ids // n)[q] == (ids // n)[kv]

    check_in_one_context([(tensors(), {"block_mask": same(n)}) for n in (10, 17)])


def test_a_mask_for_another_length_raises_although_an_equal_program_over_an_equal_table_was_planned() -> None:
    whole, documents = tensors(), ls.documents(ids=torch.arange(LENGTH + 7) // 10)
    program = ls.mask_mod(lambda b, h, q, kv: documents(b, h, q, kv))  # has no lengths

    def rank(mesh: Any) -> None:
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            flex_attention(*parts, block_mask=program)
            with pytest.raises(ValueError, match=f"q_len={LENGTH + 7}"):
                flex_attention(*parts, block_mask=documents)

    virtual_world(2, timeout=30).run(rank)


@pytest.mark.parametrize("changed", ["mask_mod", "BLOCK_SIZE"])
def test_a_block_mask_with_a_replaced_attribute_gets_a_new_plan(changed: str) -> None:
    """With equal block lists: one partial block, whose tokens mask_mod decides, or full blocks, whose tokens BLOCK_SIZE decides."""
    whole = tensors()

    def made() -> BlockMask:
        block = 128 if changed == "mask_mod" else 16
        return create_block_mask(lambda b, h, q, kv: kv < 16, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=block)

    def change(mask: BlockMask) -> BlockMask:
        if changed == "mask_mod":
            mask.mask_mod = lambda b, h, q, kv: kv < 3
        else:
            mask.BLOCK_SIZE = (32, 32)
        return mask

    want = [ls.flex_attention(*whole, block_mask=mask) for mask in (made(), change(made()))]
    assert not torch.allclose(*want)

    def rank(mesh: Any) -> list[Tensor]:
        mask = made()
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            before = flex_attention(*parts, block_mask=mask)
            return [cp.unshard(t, 2) for t in (before, flex_attention(*parts, block_mask=change(mask)))]

    for outputs in virtual_world(2, timeout=30).run(rank):
        assert_close(outputs, want)


def test_one_tensor_may_be_attn_mask_per_batch_row_and_per_head() -> None:
    mask = random(3, LENGTH, LENGTH, seed=5) > 0
    q, k, v = tensors(batch=3, heads=3)
    want = [
        ls.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], attn_mask=mask),
        ls.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    ]

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2) for t in (q, k, v)]
            rows = F.scaled_dot_product_attention(*(t[:, 0] for t in parts), attn_mask=mask)
            return [cp.unshard(rows, 1), cp.unshard(F.scaled_dot_product_attention(*parts, attn_mask=mask), 2)]

    for outputs in virtual_world(2, timeout=30).run(rank):
        assert_close(outputs, want)


def test_calls_under_one_plan_use_their_own_scale_and_score_mod() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    mods: list[Any] = [None, lambda s, b, h, q, kv: s + slopes[h] * (kv - q), lambda s, b, h, q, kv: s * slopes[h]]
    options = [{"scale": scale, "score_mod": mod} for scale in (None, 0.7) for mod in mods]
    check_in_one_context([(tensors(), {"block_mask": ls.causal(), **each}) for each in options])


STAMPS: dict[str, Callable[[Tensor], Any]] = {
    "a write that torch counts": lambda t: t.add_(1),
    "other memory": lambda t: t.set_(t.clone()),
    "another shape": lambda t: t.unsqueeze_(0),
    "other strides": lambda t: t.t_(),
    "another view of its memory": lambda t: t.set_(t.untyped_storage(), 1, t.shape, t.stride()),
}


@pytest.mark.parametrize("change", STAMPS)
def test_a_changed_tensor_has_another_stamp(change: str) -> None:
    tensor = torch.arange(17.0)[:16].view(4, 4)
    before = _stamp(tensor)
    assert before == _stamp(tensor)
    with torch.no_grad():
        STAMPS[change](tensor)
    version, *rest = _stamp(tensor)  # type: ignore[misc]
    assert (version, *rest) != before and (change == "a write that torch counts" or rest != list(before[1:]))  # type: ignore[index]


def test_torchs_options_and_layouts_each_get_plans_of_their_own() -> None:
    dispatchers, mesh = DispatcherCache(), ls.Mesh.abstract(2)
    plain = {8: Layout(length=8, rows=((((0, 4),), ((4, 4),)),))}
    swapped = {8: Layout(length=8, rows=((((4, 4),), ((0, 4),)),))}
    made = [dispatchers.of(mesh, plain), dispatchers.of(mesh, swapped)]
    set_rotate_method("alltoall")
    try:
        made.append(dispatchers.of(mesh, plain))
    finally:
        set_rotate_method("allgather")
    assert len({id(d) for d in made}) == 3 and dispatchers.of(mesh, plain) is made[0]
    assert [d.strategy for d in made] == ["allgather", "allgather", "ring"]
    assert [d.positions(8).tolist() for d in made] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_an_unchanged_block_mask_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[BlockMask] = []
    monkeypatch.setattr(mask_keys, "as_mask", lambda mask: (converted.append(mask), ls.causal())[1])
    keys = mask_keys.MaskKeys()
    first, second = (create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, device="cpu") for _ in range(2))
    for mask in (first, first, second, first):
        keys._of_block_mask(mask)
    assert converted == [first, second]
