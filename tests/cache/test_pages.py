"""Pages of cached sequences: random operations against a model of tokens, and the limits of steps, windows and tables."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cache.arguments import integer, integers, is_several, one_each
from longspan._cache.page_accounts import PageAccounts, TakenPages, WantedPages
from longspan._cache.page_pool import OutOfPages, PagePool
from longspan._cache.sequence import RELEASED, CachedSequence


def make(**sizes: Any) -> ls.KVCache:
    return ls.KVCache(**{"pages": 9, "page_size": 3, "layers": 2, "kv_heads": 1, "head_dim": 4, "dtype": torch.float64} | sizes)


def write(cache: ls.KVCache, step: Any, values: list[list[float]]) -> None:
    """Write a step's tokens in all layers, as attention does: through the page table."""
    for id, new, start in zip(step.ids, values, step.ranges.starts, strict=True):
        row = cache.sequence(id).row
        for i, value in enumerate(new):
            page = int(cache._table[row, (start + i) // cache.page_size])
            for x in (cache._k, cache._v):
                x[:, page, :, (start + i) % cache.page_size] = value
    for layer in range(cache.layers):
        step.check_layer(layer)
        step.finish_layer(layer)


def read(cache: ls.KVCache, id: int, position: int) -> list[float]:
    page = int(cache._table[cache.sequence(id).row, position // cache.page_size])
    k, v, table = (getattr(cache.layer_pages(1), name) for name in ("k", "v", "table"))
    assert table is cache._table
    return [float(x[page, 0, position % cache.page_size, 0]) for x in (k, v)]


def check(cache: ls.KVCache, model: dict[int, list[float]]) -> None:
    """Lengths, contents, references and free pages are those of the model."""
    held: dict[int, int] = {}
    for id, tokens in model.items():
        sequence = cache.sequence(id)
        assert sequence.length == len(tokens) and len(sequence.pages) == -(-len(tokens) // cache.page_size)
        least = 0 if cache.window is None else max(0, len(tokens) - cache.window + 1) // cache.page_size
        assert sequence.released <= least and sequence.pages[: sequence.released] == [RELEASED] * sequence.released
        for page in sequence.held_pages:
            held[page] = held.get(page, 0) + 1
        assert all(read(cache, id, i) == [tokens[i]] * 2 for i in range(sequence.released * cache.page_size, len(tokens)))
    pool = cache._pool
    assert [pool.references(page) for page in range(cache.pages)] == [held.get(page, 0) for page in range(cache.pages)]
    assert cache.free_pages == pool.free(0) == cache.pages - len(held)
    assert cache.lengths(list(model)).tolist() == [len(tokens) for tokens in model.values()]


@pytest.mark.parametrize(("window", "seed"), [(None, 0), (None, 1), (1, 2), (4, 3), (7, 4), (5, 5)])
def test_random_operations_keep_the_tokens_of_every_sequence(window: int | None, seed: int) -> None:
    draw, cache, model, value, refused = random.Random(seed), make(window=window), {}, 0.0, 0
    for _ in range(120):
        action = draw.choice(["allocate", "step", "step", "step", "fork", "truncate", "free"])
        ids = draw.sample(list(model), min(len(model), draw.randint(1, 3)))
        if action == "allocate" and len(model) < 11:
            new = cache.allocate(draw.randint(0, 3))
            assert not set(new) & set(model)
            model |= {id: [] for id in new}
        elif action == "step" and ids:
            counts = [draw.randint(0, 7) for _ in ids]
            missing, before = cache.missing_pages(ids, counts), cache.version
            if missing:
                refused += 1
                with pytest.raises(OutOfPages, match=f"for {sum(counts)} new tokens, got {cache.free_pages}; free or truncate"):
                    cache.step(ids, counts)
                check(cache, model)
                assert cache.version == before
                if draw.random() < 0.5:
                    cache.grow(missing)
                    assert cache.missing_pages(ids, counts) == 0
                check(cache, model)
                continue
            step = cache.step(ids, counts)
            assert cache.version == before + 1
            starts = [len(model[id]) for id in ids]
            assert step.positions.tolist() == [[s + i for s, c in zip(starts, counts) for i in range(c)]]
            values = [[value := value + 1.0 for _ in range(count)] for count in counts]
            write(cache, step, values)
            for id, new_tokens in zip(ids, values):
                model[id] = model[id] + new_tokens
        elif action == "fork" and ids and len(model) < 11:
            model[cache.fork(ids[0])] = list(model[ids[0]])
        elif action == "truncate" and ids:
            keep = [draw.randint(max(0, len(model[id]) - 4), len(model[id])) for id in ids]
            firsts = [cache.sequence(id).released * cache.page_size for id in ids]
            allowed = all(window is None or k == 0 or max(0, k - window + 1) >= first for k, first in zip(keep, firsts))
            if allowed:
                cache.check_truncate(ids, keep)
                cache.truncate(ids, keep)
                model |= {id: model[id][:k] for id, k in zip(ids, keep)}
            else:
                with pytest.raises(ValueError, match="were given back"):
                    cache.truncate(ids, keep)
        elif action == "free" and ids and draw.random() < 0.5:
            cache.free(ids)
            for id in ids:
                del model[id]
        check(cache, model)
    assert model and (refused or window)


def test_pages_before_the_window_are_given_back_once_no_step_reads_them() -> None:
    """Pages of 3 tokens, a window of 4: the next token, at n, sees n − 3 … n; before it, tokens before n − 3 are not read."""
    cache = make(window=4)
    (id,) = cache.allocate(1)
    held = []
    for length in range(1, 14):
        write(cache, cache.step([id], 1), [[float(length)]])
        held.append(cache.sequence(id).released)
    assert held == [max(0, length - 1 - 4 + 1) // 3 for length in range(1, 14)]
    assert cache.sequence(id).released == 3 and cache.sequence(id).length == 13
    cache.check_truncate([id], 12)
    cache.check_truncate([id], 0)
    message = (
        rf"truncate: expected 0 or at least 12 tokens of sequence {id}, got 11: the pages before token 9 were given back, as they were "
        "outside of the window of 4 tokens"
    )
    with pytest.raises(ValueError, match=message):
        cache.truncate([id], 11)
    first = cache.step([id], 5)  # not written: its tokens see back to token 10
    cache.step([id], 5)
    assert cache.sequence(id).released == 3
    cache.truncate([id], 13)
    write(cache, cache.step([id], 5), [[1.0] * 5])
    write(cache, cache.step([id], 1), [[1.0]])
    assert cache.sequence(id).released == (18 - 3) // 3 and first not in cache.sequence(id).unfinished
    cache.truncate([id], 0)
    assert cache.sequence(id).released == 0 and cache.free_pages == 9 and cache.sequence(id).pages == []


def test_tables_at_least_double() -> None:
    cache = make(pages=60, page_size=1)
    shapes, versions = [tuple(cache.table_shape)], [cache.table_version]
    ids: list[int] = []
    for new in (0, 1, 7, 1, 7, 1, 40):
        ids += cache.allocate(new)
        shapes.append(tuple(cache.table_shape))
        versions.append(cache.table_version)
    assert [rows for rows, _ in shapes] == [0, 0, 8, 8, 16, 16, 32, 64 if len(ids) <= 64 else len(ids)]
    assert versions == [0, 0, 1, 1, 2, 2, 3, 4] and {width for _, width in shapes} == {0}
    widths = []
    for tokens in (1, 15, 1, 0, 20):
        cache.truncate(ids[0], 0) if tokens == 20 else None
        write(cache, cache.step([ids[0]], tokens), [[1.0] * tokens])
        widths.append(cache.table_shape[1])
    assert widths == [16, 16, 32, 32, 32] and cache.table_version == 6
    cache.step([ids[1]], 0, longest=33)
    assert cache.table_shape[1] == 64
    assert len({cache.sequence(id).row for id in ids}) == len(ids)
    row = cache.sequence(ids[3]).row
    cache.free([ids[3]])
    assert cache.sequence(cache.allocate(1)[0]).row == row and cache.table_shape[0] == 64


def test_rows_of_a_table_are_given_in_order() -> None:
    cache = make()
    assert [cache.sequence(id).row for id in cache.allocate(10)] == list(range(10))
    assert cache.table_shape == (10, 0)


def test_a_table_keeps_its_entries_when_it_grows() -> None:
    cache = make(pages=40, page_size=1)
    ids = cache.allocate(3)
    write(cache, cache.step(ids, [2, 3, 1]), [[1.0, 2.0], [3.0, 4.0, 5.0], [6.0]])
    cache.allocate(9)
    write(cache, cache.step(ids[:1], 17), [[7.0] * 17])
    check(cache, {ids[0]: [1.0, 2.0, *[7.0] * 17], ids[1]: [3.0, 4.0, 5.0], ids[2]: [6.0]})


def test_steps_of_graphs_may_grow_to_the_longest_length() -> None:
    cache = make()
    (id,) = cache.allocate(1)
    with pytest.raises(ValueError, match="step: expected sequences of at most longest=4 tokens, got 5"):
        cache.step([id], 5, longest=4)
    with pytest.raises(ValueError, match="step: longest: expected an integer >= 1, got 0"):
        cache.step([id], 5, longest=0)
    step = cache.step([id], 5, longest=5)
    assert step.ranges.longest == 5 and not step.ragged and step.positions.tolist() == [[0, 1, 2, 3, 4]]
    assert cache.step([id], [2]).ragged


@pytest.mark.parametrize(("pages", "count", "missing"), [(2, 6, 0), (2, 7, 1), (2, 0, 0), (1, 7, 2), (3, 7, 0)])
def test_missing_pages_are_those_beyond_the_free_ones(pages: int, count: int, missing: int) -> None:
    cache = make(pages=pages)
    assert cache.missing_pages(cache.allocate(1), count) == missing
    cache.allocate(1)
    with pytest.raises(ValueError, match="grow: pages: expected an integer >= 1, got 0"):
        cache.grow(0)
    before = cache.addresses
    cache.grow(1)
    assert cache.pages == cache.free_pages == pages + 1 and cache.addresses[0] != before[0] and cache.missing_pages([], []) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_addresses_of_layers_are_those_of_their_pages(shared: bool) -> None:
    cache = make(value_dim=3, shared_kv=shared)
    for _ in range(2):
        assert cache.addresses == (cache._k.data_ptr(), cache._v.data_ptr(), cache._table.data_ptr())
        for layer in range(2):
            pages = cache.layer_pages(layer)
            assert cache.layer_addresses(layer) == (pages.k.data_ptr(), pages.v.data_ptr()) and pages.shared is shared
            assert (pages.k.shape[-1], pages.v.shape[-1]) == (4, 3)
        cache.grow(2)
    assert (cache._k.data_ptr() == cache._v.data_ptr()) == shared
    if shared:
        assert not cache._k.any()


@pytest.mark.parametrize("name", ["pages", "page_size", "layers", "kv_heads", "head_dim", "value_dim", "window"])
def test_sizes_are_one_or_more(name: str) -> None:
    make(**{name: 1})
    with pytest.raises(ValueError, match=f"{name}: expected an integer >= 1, got 0"):
        make(**{name: 0})


def test_dtypes_and_shared_values_are_checked() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert make(dtype=dtype).dtype == make(dtype=dtype)._v.dtype == dtype
    assert make(dtype=None).dtype == torch.get_default_dtype() and make().value_dim == 4
    with pytest.raises(ValueError, match=r"dtype: expected one of torch.bfloat16, .*, got torch.int8"):
        make(dtype=torch.int8)
    make(shared_kv=True, value_dim=4)
    with pytest.raises(ValueError, match="shared_kv: expected value_dim of at most head_dim = 4, got 5"):
        make(shared_kv=True, value_dim=5)
    make(value_dim=5)


def test_tensors_that_do_not_fit_name_what_was_expected() -> None:
    cache = make(kv_heads=2, value_dim=3)
    k, v = torch.zeros(1, 2, 1, 4, dtype=torch.float64), torch.zeros(1, 2, 1, 3, dtype=torch.float64)
    assert [cache.check_tensors(k, v, layer) for layer in (0, 1)] == [0, 1]
    wrong: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (k, v, None, TypeError, "layer: expected the layer's number"),
        (k, v, 2, ValueError, "layer: expected 0 to 1, got 2"),
        (k, v, -1, ValueError, "layer: expected an integer >= 0, got -1"),
        (k.float(), v, 0, TypeError, "k: expected torch.float64 on cpu as the cache has, got torch.float32 on cpu"),
        (k, v.half(), 0, TypeError, "v: expected torch.float64 on cpu as the cache has, got torch.float16 on cpu"),
        (k, v.to("meta"), 0, TypeError, "v: expected torch.float64 on cpu as the cache has, got torch.float64 on meta"),
        (k[:, :1], v, 0, ValueError, "k: expected 2 KV heads of dim 4 as the cache has, got 1 of dim 4"),
        (k, k, 0, ValueError, "v: expected 2 KV heads of dim 3 as the cache has, got 2 of dim 4"),
        (v, v, 0, ValueError, "k: expected 2 KV heads of dim 4 as the cache has, got 2 of dim 3"),
    ]
    for k_, v_, layer, error, message in wrong:
        with pytest.raises(error, match=message):
            cache.check_tensors(k_, v_, layer)
    shared = make(kv_heads=2, value_dim=3, shared_kv=True)
    shared.check_tensors(k, k[..., :3], 0)
    shared.check_tensors(k[:, :, :0], v[:, :, :0], 0)
    one_head, vectors = make(kv_heads=1, value_dim=3, shared_kv=True), torch.randn(2, 1, 4, dtype=torch.float64)
    one_head.check_tensors(vectors.view(2, 1, 1, 4), vectors[..., :3].view(2, 1, 1, 3), 0)  # strides differ in dims of one element
    for other in (v, k[..., 1:], k.flip(1)[..., :3]):
        with pytest.raises(ValueError, match=r"v: expected k\[..., :3\], a view of k"):
            shared.check_tensors(k, other, 0)


def test_unknown_freed_and_repeated_handles_raise() -> None:
    cache = make()
    ids = cache.allocate(3)
    assert ids == [0, 1, 2]
    cache.free([1])
    for call in (lambda id: cache.lengths([id]), lambda id: cache.fork(id), lambda id: cache.truncate([id], 0), lambda id: cache.free(id)):
        with pytest.raises(ValueError, match="cache: sequence 1 was freed; expected a handle"):
            call(1)
        with pytest.raises(ValueError, match="cache: no sequence has the handle 3; expected a handle"):
            call(3)
    with pytest.raises(ValueError, match=r"step: expected different sequences, got \[2, 0, 2\]"):
        cache.step([2, 0, 2], 1)
    with pytest.raises(ValueError, match="allocate: n: expected an integer >= 0, got -1"):
        cache.allocate(-1)


def test_unfinished_tokens_may_be_dropped_but_not_kept_or_forked() -> None:
    cache = make()
    ids = cache.allocate(2)
    write(cache, cache.step(ids, 2), [[1.0, 2.0], [3.0, 4.0]])
    cache.step(ids, [2, 0])
    for call in (lambda: cache.fork(ids[0]), lambda: cache.truncate(ids[0], 3)):
        with pytest.raises(RuntimeError, match="a step of sequence 0 has not written all 2 layers: finish the step"):
            call()
    cache.check_truncate(ids[0], 2)
    version = cache.version
    assert cache.fork(ids[1]) == 2 and cache.version == version + 1  # no token of it is unfinished
    cache.truncate(ids[0], 2)
    assert cache.version == version + 2 and cache.sequence(ids[0]).unfinished == []
    cache.free(ids)
    assert cache.version == version + 3


# ------------------------------------------------------------------------------------------------------------------ pool and accounts


def test_pages_of_ranks_are_numbered_in_turn_and_freed_last_taken_first() -> None:
    pool = PagePool(2, ranks=3)
    assert [pool.free(rank) for rank in range(3)] == [2, 2, 2] and pool.free_of_all == 6
    assert [pool.take(rank) for rank in (1, 1, 0, 2)] == [1, 4, 0, 2] and pool.free_of_all == 2
    assert [(pool.owner(page), pool.local(page)) for page in (0, 2, 4, 5)] == [(0, 0), (2, 0), (1, 1), (2, 1)]
    pool.share([1, 4])
    pool.release([1])
    assert (pool.references(1), pool.references(4), pool.references(3), pool.free(1)) == (1, 2, 0, 0)
    pool.release([1, 4, 4])
    assert pool.free(1) == 2 and [pool.take(1), pool.take(1)] == [4, 1]
    pool.grow(2)
    assert [pool.free(rank) for rank in range(3)] == [3, 2, 3] and [pool.take(1), pool.take(1)] == [7, 10]
    assert [pool.take(0) for _ in range(3)] == [3, 6, 9] and [pool.take(2) for _ in range(3)] == [5, 8, 11]


def test_steps_take_pages_and_copies_rank_by_rank_and_give_them_back() -> None:
    pool = PagePool(3, ranks=2)
    accounts = PageAccounts(pool, page_size=4)
    assert [accounts.pages_of(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    a = CachedSequence(row=0, shift=1)
    (wanted,) = accounts.wanted([a], [9])
    assert wanted == WantedPages(a, 3, False) and accounts.needed([wanted]) == [1, 2]
    assert accounts.take(wanted) == TakenPages(0, None, None)
    a.length = 9
    assert [pool.owner(page) for page in a.pages] == [1, 0, 1] and [pool.free(rank) for rank in (0, 1)] == [2, 1]
    b = CachedSequence(row=1, shift=1, pages=list(a.pages), length=9)
    c = CachedSequence(row=2, shift=1, pages=list(a.pages), length=9)
    pool.share(a.pages), pool.share(a.pages)
    both = accounts.wanted([a, b], [1, 4])
    assert both == [WantedPages(a, 0, True), WantedPages(b, 1, True)]  # c keeps the page
    assert accounts.needed(both) == [1, 2]
    all_three = accounts.wanted([a, b, c], [1, 1, 1])
    assert [w.copies_last for w in all_three] == [True, True, False]  # the last one writes in place
    assert [w.copies_last for w in accounts.wanted([a, b, c], [0, 1, 1])] == [False, True, True]
    accounts.check_room(accounts.wanted([a], [1]), 1)
    with pytest.raises(OutOfPages, match="step: expected 2 free pages on rank 1 for 5 new tokens, got 1; free or truncate"):
        accounts.check_room(both, 5)
    before = list(b.pages)
    taken = accounts.take(WantedPages(b, 1, True))
    assert taken.first == 3 and taken.shared == before[2] and b.pages[:3] == [*before[:2], taken.copy] and len(b.pages) == 4
    assert pool.references(before[2]) == 2 and [pool.owner(page) for page in b.pages] == [1, 0, 1, 0]
    accounts.give_back(b, taken)
    assert b.pages == before and pool.references(before[2]) == 3 and [pool.free(rank) for rank in (0, 1)] == [2, 1]
    full = CachedSequence(row=3, shift=0, pages=list(a.pages[:2]), length=8)
    pool.share(full.pages)
    assert accounts.wanted([full], [3]) == [WantedPages(full, 1, False)]  # shared pages that are full are not written to


def test_arguments_are_integers_or_iterables_of_them() -> None:
    assert integer(torch.tensor(3), "n", least=3) == 3 and integers(5, "n") == [5] and integers(torch.tensor([0, 2]), "n") == [0, 2]
    assert [is_several(x) for x in (3, torch.tensor(3), [3], torch.tensor([3]), ())] == [False, False, True, True, True]
    assert one_each(2, 3, "n") == [2, 2, 2] and one_each([2], 1, "n") == [2] and one_each([], 0, "n") == [] and one_each(4, 0, "n") == []
    for value, error, message in (
        (2.0, TypeError, "n: expected an integer, got float"), (True, ValueError, "n: expected an integer >= 0, got True"),
        ([1, -1], ValueError, "n: expected an integer >= 0, got -1"), (torch.ones(2), TypeError, "n: expected an integer, got float"),
        (torch.ones(1, device="meta"), TypeError, "n: expected integers on the host, got a tensor on meta; reading it would synchronise"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            integers(value, "n")
    for values in ([1, 2], [], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=f"n: expected one integer, or one for each of the 3 sequences, got {len(values)}"):
            one_each(values, 3, "n")
    with pytest.raises(ValueError, match="n: expected an integer >= 1, got 0"):
        one_each([1, 0], 2, "n", least=1)


def test_a_cache_has_pages_of_64_tokens_and_may_be_as_small_as_one() -> None:
    assert ls.KVCache(pages=1, layers=1, kv_heads=1, head_dim=1).page_size == 64
    cache = ls.KVCache(pages=1, page_size=1, layers=1, kv_heads=1, head_dim=3, value_dim=1, window=1, dtype=torch.float32)
    (id,) = cache.allocate(1)
    q, k, v = torch.randn(1, 2, 1, 3), torch.randn(1, 1, 1, 3), torch.randn(1, 1, 1, 1)
    step = cache.step(id, 1, longest=1)
    out = ls.attention(q, k, v, cache=step, layer=0, mask=ls.causal() & ls.sliding_window(1))
    assert torch.equal(out, v.expand(1, 2, 1, 1)) and cache.sequence(id).released == 0
    for size in ("pages", "page_size", "layers", "kv_heads", "head_dim", "value_dim", "window"):
        with pytest.raises(ValueError, match=f"{size}: expected an integer >= 1, got 0"):
            ls.KVCache(**{"pages": 1, "layers": 1, "kv_heads": 1, "head_dim": 1, size: 0})
