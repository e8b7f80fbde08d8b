"""The order of a forward launch's items: each once, as the host simulates it, few heads at a time, no long wait at the end."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")

import triton
import triton.language as tl

import longspan as ls
from longspan._kernels.gpu.interpreter import interpreted, quiet
from longspan._kernels.gpu.tile_access import place_in_order
from longspan._kernels.hopper import first_items
from longspan._kernels.hopper.item_order import ItemOrder, best_order, diagonal_first, outlier_rows, simulated_items
from longspan._kernels.hopper.makespan import MANY_ITEMS, finish_times
from longspan._kernels.hopper.split_kv import best_split

CTAS = 132


@triton.jit
def places(
    decoded, order, rows, tiles, heads, group, heavy, late, split, SUBS: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr
):
    item = tl.program_id(0)
    tile, sub, b, h = place_in_order(item, order, rows, tiles, heads, (group, heavy, late, split), SUBS, PER_BATCH, PER_HEAD)
    tl.store(decoded + 4 * item, tile)
    tl.store(decoded + 4 * item + 1, sub)
    tl.store(decoded + 4 * item + 2, b)
    tl.store(decoded + 4 * item + 3, h)


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@settings(deadline=None, max_examples=20)
@given(st.data())
def test_every_item_is_taken_once_and_has_the_length_the_host_computes(data: st.DataObject) -> None:
    rows, groups, shared = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    batches, subs, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), groups * shared
    heavy, late = data.draw(st.integers(1, rows)), data.draw(st.sampled_from([shared, heads]))
    tiles = rows + 2  # two of them see no key
    by_row = torch.randperm(tiles, generator=torch.Generator().manual_seed(rows))[:rows].int()
    work = torch.arange(100, 100 + rows).tolist()
    items = rows * heads * batches * subs
    decoded = torch.full((items, 4), -1, dtype=torch.int32)
    with quiet():
        places[(items,)](
            decoded, by_row, rows, tiles, heads, shared, heavy, late, heads * batches * subs * heavy, SUBS=subs, PER_BATCH=False,
            PER_HEAD=False,
        )  # fmt: skip
    assert len(set(map(tuple, decoded.tolist()))) == items
    assert set(decoded[:, 0].tolist()) == set(by_row.tolist()) and decoded[:, 1].max() < subs
    assert decoded[:, 2].max() < batches and decoded[:, 3].max() < heads
    order = ItemOrder(shared, heavy, late)
    sizes = {"rows": rows, "tiles": tiles, "heads": heads, "heavy_items": heads * batches * subs * heavy, "M_SUBS": subs}
    on_host = first_items.places(torch.arange(items), order, by_row.long(), sizes | {"PER_BATCH": False, "PER_HEAD": False})
    assert torch.equal(torch.stack(on_host, 1).int(), decoded)
    length = dict(zip(by_row.tolist(), work, strict=True))
    for count in (0, 1, items // 2, items):
        lengths = order.lengths(work, heads=heads * batches, subs=subs, count=count)
        assert lengths == [length[tile] for tile in decoded[items - count :, 0].tolist()]


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(("per_batch", "per_head"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("heavy", [3, 5])
def test_table_rows_per_batch_row_and_head_are_taken_once(per_batch: bool, per_head: bool, heavy: int) -> None:
    batches, heads, tiles, subs = 3, 4, 5, 2
    rows = tiles * (batches if per_batch else 1) * (heads if per_head else 1)
    items, group = batches * heads * tiles * subs, 1 if per_head else 2
    decoded = torch.full((items, 4), -1, dtype=torch.int32)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).int()
    with quiet():
        places[(items,)](
            decoded, order, rows, tiles, heads, group, heavy, 1 if per_head else heads, items // rows * heavy, SUBS=subs,
            PER_BATCH=per_batch, PER_HEAD=per_head,
        )  # fmt: skip
    assert sorted(map(tuple, decoded.tolist())) == list(product(range(tiles), range(subs), range(batches), range(heads)))
    sizes = {"rows": rows, "tiles": tiles, "heads": heads, "heavy_items": items // rows * heavy, "M_SUBS": subs}
    item_order = ItemOrder(group, heavy, 1 if per_head else heads)
    by_table = {"PER_BATCH": per_batch, "PER_HEAD": per_head}
    on_host = first_items.places(torch.arange(items), item_order, order.long(), sizes | by_table)
    assert torch.equal(torch.stack(on_host, 1).int(), decoded)


def chosen(work: list[int], *, heads: int, shared: int = 1, fit: int = 2) -> tuple[ItemOrder, float]:
    """(the order, its makespan over the makespan of a perfect balance)."""
    items = len(work) * heads
    order = best_order(
        work, heads=heads, batches=1, subs=1, shared=shared, heads_in_l2=fit, ctas=CTAS,
        end_time=lambda lengths: best_split(lengths, items, ctas=CTAS)[1],
    )  # fmt: skip
    return order, max(finish_times(order.lengths(work, heads=heads, subs=1, count=items), [0] * CTAS, cost=0)) / (sum(work) * heads / CTAS)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 4), st.integers(0, 40))
def test_the_chosen_order_finishes_no_later_than_the_default(work: list[int], groups: int, shared: int, fit: int) -> None:
    work.sort(reverse=True)
    heads = groups * shared
    order, _ = chosen(work, heads=heads, shared=shared, fit=fit)
    assert order.heavy_group in (shared, heads) and 1 <= order.heavy_rows <= len(work) and order.light_group in (shared, heads)
    items, plain = len(work) * heads, ItemOrder(shared, len(work), shared)
    ended = []
    for each in (order, plain):
        lengths = each.lengths(work, heads=heads, subs=1, count=simulated_items(items, CTAS))
        ended.append((sum(work) * heads - sum(lengths)) / CTAS + best_split(lengths, items, ctas=CTAS)[1])
    assert ended[0] <= ended[1]


def test_short_items_come_last_where_they_fill_the_last_wave() -> None:
    assert chosen([96] * 32, heads=32)[0] == ItemOrder(1, 32, 1)  # all items are equally long
    assert chosen(list(range(256, 0, -1)), heads=32 * MANY_ITEMS)[0] == ItemOrder(1, 256, 1)  # many items per CTA
    # Half of the first rank's queries see nearly all keys, half nearly none: the short items fill the last wave.
    order, last = chosen([*range(256, 240, -1), *range(16, 0, -1)], heads=32)
    assert order == ItemOrder(1, 16, 32) and last < 1.015
    plain = ItemOrder(1, 32, 1).lengths([*range(256, 240, -1), *range(16, 0, -1)], heads=32, subs=1, count=1024)
    assert max(finish_times(plain, [0] * CTAS, cost=0)) > 1.05 * sum(plain) / CTAS
    # One table row sees all keys: it starts in all heads at once if their KV fits into L2.
    assert chosen([64] + [3] * 63, heads=32, shared=4, fit=32)[0] == ItemOrder(32, 64, 32)
    # Causal, 8,192 tokens.
    work = sorted(ls.causal().block_table(8192, 8192, block=128).tiles_per_row.tolist(), reverse=True)
    assert chosen(work, heads=32, fit=8)[1] < 1.02


def test_keys_that_all_queries_see_beside_a_window_come_first_of_all_heads() -> None:
    sink = (ls.prefix(64) | ls.sliding_window(2048)) & ls.causal()
    assert outlier_rows(sink.block_table(32768, 32768, block=128).transposed) == 1
    by_head = ls.mask_mod(lambda b, h, q, kv: (kv < 64 * h) | (q - kv < 256))
    assert outlier_rows(by_head.block_table(4096, 4096, block=128, heads=2).transposed) == 0


@pytest.mark.parametrize("mask", [ls.full(), ls.causal(), ls.sliding_window(1024)], ids=["full", "causal", "window"])
def test_masks_of_even_work_have_no_outlier(mask: ls.Mask) -> None:
    assert outlier_rows(mask.block_table(8192, 8192, block=128).transposed) == 0


def test_items_begin_with_the_diagonal_if_rows_have_other_partial_tiles_before_it() -> None:
    lengths = [300, 77, 650, 973]
    causal = (ls.sliding_window(300), ls.causal() & ls.documents(lengths=lengths), ls.prefix(64) & ls.causal() | ls.sliding_window(300))
    others = (ls.causal(), ls.full(), ls.sliding_window(1, 300), ls.documents(lengths=lengths))
    assert all(diagonal_first(mask.block_table(2000)) for mask in causal)
    assert not any(diagonal_first(mask.block_table(2000)) for mask in others)
    assert not diagonal_first(ls.mask_mod(lambda b, h, q, kv: kv < 0 * q).block_table(2000))  # no tiles at all
