"""Selections on the device: tile lists and gathered keys, in Triton's interpreter on CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import longspan as ls
from longspan._engine import selected as engine
from longspan._kernels.gpu import selected_tables
from longspan._kernels.gpu.selected_tables import SelectedTables, pairs_of, stand_in, tiled_work
from longspan._kernels.protocol import AttentionInputs, Selection, Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton.gathered_call import GatheredKeys, without_repeats
from longspan._masks.block_table import FULL, PARTIAL
from longspan._masks.tracing import trace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tiles_of(runs: tuple[torch.Tensor, ...], row: int) -> list[int]:
    ptr, first, last = (t.tolist() for t in runs[:3])
    return [tile for i in range(ptr[2 * row], ptr[2 * row + 1]) for tile in range(first[i], last[i] + 1)]


@pytest.mark.parametrize("choices", [1, 2, 4])
def test_device_tables_list_the_chosen_tiles_of_the_rest_of_the_mask(choices: int) -> None:
    torch.manual_seed(choices)
    heads, q_len, kv_len, tiles = 4, 500, 700, (4, 6)
    indices = torch.randint(-1, 6, (1, choices, 4, 5), dtype=torch.int32, device=DEVICE)
    indices[:, 0, 1] = -1
    table = ls.causal().block_table(q_len, kv_len)
    work = Work(table=table, q_tiles=Tiling(length=q_len, block=128), kv_tiles=Tiling(length=kv_len, block=128), scale=1.0)
    q, k = torch.zeros(1, heads, q_len, 16, device=DEVICE), torch.zeros(1, 2, kv_len, 16, device=DEVICE)
    selection = Selection(indices=indices, granularity=128, q_granularity=128, heads_per_choice=heads // choices)
    tables: Any = tiled_work(AttentionInputs(q=q, k=k, v=k), work, selection, dummy=False).device_tables
    chosen = (indices[0, :, :, :, None] == torch.arange(6, device=DEVICE)).any(2).cpu().repeat_interleave(heads // choices, 0)
    kinds = torch.where(chosen, table.to_dense()[0], 0)
    table_heads = 1 if choices == 1 else heads
    for by_query, expected in ((True, kinds), (False, kinds.mT)):
        on_device = tables.of_pass(by_query=by_query, shared=2)
        assert sorted(on_device.order.tolist()) == list(
            range(table_heads * tiles[0] if by_query else table_heads // min(2, table_heads) * 6)
        )
        for row, kind_row in enumerate(expected[:table_heads].flatten(0, 1)):
            assert tiles_of(on_device.partial, row) == (kind_row == PARTIAL).nonzero().flatten().tolist()
            assert tiles_of(on_device.full, row) == (kind_row == FULL).nonzero().flatten().tolist()
            counted = on_device.counts[2 * row : 2 * row + 2].tolist()
            assert counted == [int((kind_row == PARTIAL).sum()), int((kind_row == FULL).sum())]


@pytest.mark.parametrize("chosen", [3, 9])
def test_tables_take_no_more_memory_than_lists_can_fill(chosen: int) -> None:
    indices = torch.arange(2 * 5 * chosen, dtype=torch.int32, device=DEVICE).view(1, 2, 5, chosen) % 7
    table = ls.full().block_table(5 * 64, 7 * 64, block=64)
    selection = Selection(indices=indices, granularity=64, q_granularity=64, heads_per_choice=2)
    tables = SelectedTables(selection=selection, table=table, batch=1, heads=4, dummy=False)
    listed = min(chosen, 7)  # per query tile of each of two choices; by query a dummy tile more
    for by_query, rows, entries in ((True, 4 * 5, 2 * 5 * (listed + 1)), (False, 4 * 7, 2 * 5 * listed)):
        made = tables.of_pass(by_query=by_query, shared=1)
        assert entries < made.full[1].numel() <= entries + 8 and made.order.numel() == rows
        assert all(2 * rows < t.numel() <= 2 * rows + 8 for t in (made.full[0], made.partial[0], made.counts))


@pytest.mark.parametrize(("limit", "wide"), [(147, True), (148, False)])
def test_sort_keys_that_do_not_fit_32_bits_are_wide(limit: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 key tiles of 2 heads with 10 query tiles each have keys below (2 * 10 + 1) * 7 = 147."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(selected_tables, "_NARROW_KEYS", limit)
    monkeypatch.setattr(selected_tables, "launch_kernel", lambda kernel, ctas, tensors, constants, **_: given.append(constants))
    selection = Selection(indices=torch.zeros(1, 4, 10, 3, dtype=torch.int32), granularity=64, q_granularity=64, heads_per_choice=1)
    tables = SelectedTables(selection=selection, table=ls.full().block_table(10 * 64, 7 * 64, block=64), batch=1, heads=4, dummy=False)
    tables._key_order(torch.zeros(2 * 4 * 7, dtype=torch.int32), 2)
    assert given[0]["WIDE"] is wide and (given[0]["tiles"], given[0]["groups"], given[0]["summed"]) == (7, 2, 2)


def test_rows_without_tiles_get_a_tile_past_the_last_key_where_a_kernel_needs_one() -> None:
    indices = torch.tensor([[[[-1], [0]]]], dtype=torch.int32, device=DEVICE)
    table = ls.causal().block_table(256)
    work = Work(table=table, q_tiles=Tiling(length=256, block=128), kv_tiles=Tiling(length=256, block=128), scale=1.0)
    q = torch.zeros(1, 1, 256, 16, device=DEVICE)
    selection = Selection(indices=indices, granularity=128, q_granularity=128, heads_per_choice=1)
    tables: Any = tiled_work(AttentionInputs(q=q, k=q, v=q), work, selection, dummy=True).device_tables
    rows = tables.of_pass(by_query=True, shared=1)
    assert (tiles_of(rows.partial, 0), tiles_of(rows.full, 0)) == ([2], [])
    assert (tiles_of(rows.partial, 1), tiles_of(rows.full, 1)) == ([], [0])


def listed_pairs(runs: tuple[torch.Tensor, ...], row: int) -> list[tuple[int, int]]:
    ptr, tiles = runs[0].tolist(), runs[1].tolist()
    return [(tiles[2 * i], tiles[2 * i + 1]) for i in range(ptr[2 * row], ptr[2 * row + 1])]


def test_pairs_of_half_blocks_list_each_chosen_tile_once_and_fill_odd_rows_with_a_tile_past_the_last_key() -> None:
    torch.manual_seed(0)
    heads, tokens, blocks = 4, 700, 11
    indices = torch.randint(-1, blocks, (2, 2, 11, 6), dtype=torch.int32, device=DEVICE)
    indices[:, 0, 1] = -1
    table = ls.causal().block_table(tokens, block=(64, 64))
    tiling = Tiling(length=tokens, block=64)
    q, k = torch.zeros(2, heads, tokens, 16, device=DEVICE), torch.zeros(2, 2, tokens, 16, device=DEVICE)
    selection = Selection(indices=indices, granularity=64, q_granularity=64, heads_per_choice=2)
    work = Work(table=table, q_tiles=tiling, kv_tiles=tiling, scale=1.0)
    made = tiled_work(AttentionInputs(q=q, k=k, v=k), work, selection, dummy=True, kv_pairs=True, head_pairs=True)
    assert pairs_of(work) == (False, False) and pairs_of(made) == (True, True)
    tables: Any = made.device_tables
    rows = tables.of_pass(by_query=True, shared=2)
    # One item for two heads: the rows of the first of them, both heads of a choice next to each other in no item of their own.
    assert sorted(rows.order.tolist()) == [r for r in range(2 * heads * 11) if r // 11 % 2 == 0]
    chosen = (indices[:, :, :, :, None] == torch.arange(blocks, device=DEVICE)).any(3).cpu().repeat_interleave(2, 1)
    kinds = torch.where(chosen, table.to_dense()[0, 0], 0)
    for row, kind_row in enumerate(kinds.flatten(0, 2)):
        partial, full = (listed_pairs(runs, row) for runs in (rows.partial, rows.full))
        masked, whole = ((kind_row == kind).nonzero().flatten().tolist() for kind in (PARTIAL, FULL))
        tiles = [tile for pair in partial + full for tile in pair]
        assert sorted(t for t in tiles if t < blocks) == sorted(masked + whole)
        assert len([t for t in tiles if t == blocks]) == (2 if not masked + whole else len(masked + whole) % 2)
        assert not {t for pair in full for t in pair} & {*masked, blocks}  # full pairs are not masked
        assert rows.counts[2 * row : 2 * row + 2].tolist() == [len(partial), len(full)]
    columns = tables.of_pass(by_query=False, shared=2)
    for row, kind_row in enumerate(kinds.mT.flatten(0, 2)):
        assert tiles_of(columns.partial, row) == (kind_row == PARTIAL).nonzero().flatten().tolist()
        assert tiles_of(columns.full, row) == (kind_row == FULL).nonzero().flatten().tolist()


def test_key_tiles_of_many_query_tiles_list_them_in_order() -> None:
    """100 query tiles: three whole words of bits, and 4 bits of another one."""
    torch.manual_seed(0)
    q_tiles, kv_tiles, k = 100, 70, 3
    indices = torch.randint(2, kv_tiles, (1, 2, q_tiles, k), dtype=torch.int32, device=DEVICE)
    indices[indices == 40] = -1  # chosen by none
    indices[:, 0, :, 1] = 0  # chosen by all
    indices[:, 1, 31::32, 2] = 1  # the last bits of words only
    indices[:, 1, 64:96, 0] = 60  # a whole word
    table = (ls.sliding_window(64 * 90) & ls.causal()).block_table(q_tiles * 64, kv_tiles * 64, block=(64, 64))
    tilings = [Tiling(length=n * 64, block=64) for n in (q_tiles, kv_tiles)]
    q, kv = torch.zeros(1, 2, q_tiles * 64, 16, device=DEVICE), torch.zeros(1, 2, kv_tiles * 64, 16, device=DEVICE)
    selection = Selection(indices=indices, granularity=64, q_granularity=64, heads_per_choice=1)
    work = Work(table=table, q_tiles=tilings[0], kv_tiles=tilings[1], scale=1.0)
    tables: Any = tiled_work(AttentionInputs(q=q, k=kv, v=kv), work, selection, dummy=False).device_tables
    columns = tables.of_pass(by_query=False, shared=1)
    chosen = (indices[0, :, :, :, None] == torch.arange(kv_tiles, device=DEVICE)).any(2).cpu()
    kinds = torch.where(chosen, table.to_dense()[0], 0).mT
    assert kinds[0, 0].count_nonzero() == 90 + 1 and not kinds[:, 40].any()
    for row, kind_row in enumerate(kinds.flatten(0, 1)):
        for runs, kind in ((columns.partial, PARTIAL), (columns.full, FULL)):
            assert tiles_of(runs, row) == (kind_row == kind).nonzero().flatten().tolist()


@pytest.mark.parametrize(("shared", "narrow_keys"), [(1, 2**31), (2, 2**31), (2, 0)])
def test_key_tiles_of_a_group_of_heads_come_together_after_the_longest_of_all_groups(
    shared: int, narrow_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected_tables, "_NARROW_KEYS", narrow_keys)
    monkeypatch.setattr(selected_tables, "_HEAVY_SHARE", 8)
    torch.manual_seed(shared)
    heads, tiles = 4, 90  # more tiles than a CTA of the kernel ranks at a time
    indices = torch.randint(0, tiles, (1, 2, tiles, 5), dtype=torch.int32, device=DEVICE)
    indices[..., 0] = torch.randint(0, 3, (1, 2, tiles), device=DEVICE)
    tiling, table = Tiling(length=tiles * 64, block=64), ls.causal().block_table(tiles * 64, block=(64, 64))
    q = torch.zeros(1, heads, tiles * 64, 16, device=DEVICE)
    selection = Selection(indices=indices, granularity=64, q_granularity=64, heads_per_choice=2)
    work = Work(table=table, q_tiles=tiling, kv_tiles=tiling, scale=1.0)
    tables: Any = tiled_work(AttentionInputs(q=q, k=q, v=q), work, selection, dummy=False).device_tables
    columns = tables.of_pass(by_query=False, shared=shared)
    length = columns.counts[: 2 * heads * tiles].view(heads // shared, shared, tiles, 2).sum((1, 3)).tolist()
    ranked = [[t for _, t in sorted((-work_of_tile, t) for t, work_of_tile in enumerate(of))] for of in length]
    heavy = 12  # an eighth, rounded up
    expected = [g * tiles + ranked[g][i] for i in range(heavy) for g in range(heads // shared)]
    expected += [g * tiles + t for g in range(heads // shared) for t in ranked[g][heavy:]]
    assert columns.order.tolist() == expected


@pytest.mark.parametrize(
    ("block", "heads", "by_head", "dim", "expected", "paired"),
    [
        ((64, 64), (8, 4), False, 128, (64, 64), (True, True)),
        ((128, 64), (3, 3), False, 128, (128, 64), (True, False)),
        ((64, 128), (8, 4), False, 128, (64, 128), (False, True)),
        ((256, 64), (3, 3), False, 128, (128, 64), (True, False)),
        ((64, 64), (3, 3), False, 128, (64, 64), (False, False)),  # no two heads have the same KV head
        ((64, 64), (8, 4), True, 128, (64, 64), (False, False)),  # … or see the same keys
        ((64, 64), (8, 4), False, 192, None, None),
        ((128, 128), (3, 3), True, 192, (128, 128), (False, False)),
        ((32, 64), (8, 4), False, 128, None, None),
    ],
)
def test_hopper_computes_tiles_of_64_queries_of_two_heads_that_see_the_same_keys_together(
    block: tuple[int, int], heads: tuple[int, int], by_head: bool, dim: int, expected: tuple[int, int] | None,
    paired: tuple[bool, bool] | None,
) -> None:  # fmt: skip
    from longspan._kernels.gpu.selected_tables import computes_heads_alone
    from longspan._kernels.hopper import HopperKernel
    from longspan._kernels.triton import TritonKernel

    q, k = torch.zeros(1, heads[0], 256, dim), torch.zeros(1, heads[1], 256, dim)
    indices = torch.zeros(1, heads[1], 256 // block[0], 1, dtype=torch.int32)
    selection = Selection(indices=indices, granularity=block[1], q_granularity=block[0], heads_per_choice=heads[0] // heads[1])
    inputs = AttentionInputs(q=q, k=k, v=k)
    kernel = HopperKernel(fallback=TritonKernel())
    assert kernel.selection_block(inputs, selection, captured_grads=False, by_head=by_head) == expected
    if expected is not None:
        tilings = [Tiling(length=256, block=b) for b in expected]
        rest = ls.mask_mod(lambda b, h, q, kv: q >= kv + h) if by_head else ls.causal()
        table = rest.block_table(256, block=expected, heads=heads[0])
        work = Work(table=table, q_tiles=tilings[0], kv_tiles=tilings[1], scale=1.0, mask=trace(rest, "mask").program)
        work = kernel.select(inputs, work, selection)
        assert pairs_of(work) == paired
        assert computes_heads_alone(work) == (expected[0] == 64 and paired == (False, False))


@pytest.mark.parametrize(
    ("block", "length", "rest", "masked"),
    [
        ((64, 64), 192, ls.full(), False),
        ((64, 64), 200, ls.full(), True),
        ((64, 128), 192, ls.full(), True),  # the second half of the last tile has no keys
        ((64, 128), 256, ls.full(), False),
        ((64, 64), 192, ls.causal(), True),
    ],
)
def test_heads_computed_one_by_one_mask_tiles_that_may_be_partial(
    monkeypatch: pytest.MonkeyPatch, block: tuple[int, int], length: int, rest: ls.Mask, masked: bool
) -> None:
    from longspan._kernels.gpu.launch_call import Pass
    from longspan._kernels.hopper import HopperKernel, one_group_call
    from longspan._kernels.hopper.backward_one import dq_one_kernel
    from longspan._kernels.triton import TritonKernel

    monkeypatch.setattr(one_group_call, "persistent_ctas", lambda device: 132)
    q = torch.zeros(1, 3, length, 128, dtype=torch.bfloat16)
    indices = torch.zeros(1, 3, -(-length // block[0]), 1, dtype=torch.int32)
    selection = Selection(indices=indices, granularity=block[1], q_granularity=block[0], heads_per_choice=1)
    tilings = [Tiling(length=length, block=b) for b in block]
    program = None if isinstance(rest, type(ls.full())) else trace(rest, "mask").program
    work = Work(table=rest.block_table(length, block=block), q_tiles=tilings[0], kv_tiles=tilings[1], scale=1.0, mask=program)
    inputs = AttentionInputs(q=q, k=q, v=q)
    call = one_group_call.OneGroupCall(inputs, HopperKernel(fallback=TritonKernel()).select(inputs, work, selection))
    names = dq_one_kernel.arg_names[: dq_one_kernel.arg_names.index("counter")]
    launch = call.prepare(Pass(name="dq by one group", kernel=dq_one_kernel, tensors=dict.fromkeys(names, q)))
    assert launch.constants["MASKED"] == masked
    assert (launch.constants["N"], launch.constants["N_SUBS"], launch.ctas) == (64, block[1] // 64, 3 * -(-length // 64))


def test_repeated_entries_are_dropped() -> None:
    torch.manual_seed(0)
    indices = torch.randint(-1, 9, (2, 1, 5, 6), dtype=torch.int32, device=DEVICE)
    for row, got in zip(indices.flatten(0, 2).tolist(), without_repeats(indices, 9).flatten(0, 2).tolist(), strict=True):
        assert sorted(i for i in got if i >= 0) == sorted({i for i in row if i >= 0})


def tensors(tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, h, tokens, 16, device=DEVICE, requires_grad=True) for h in (2, 1, 1)]


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The types of the device tables of all calls."""
    used: list[type] = []
    of = engine.SelectedCall.of

    def noted(*args: Any, **options: Any) -> Any:
        call = of(*args, **options)
        used.append(type(None if call is None else call.work.device_tables))
        return call

    monkeypatch.setattr(engine.SelectedCall, "of", noted)
    return used


def test_blocks_take_tile_lists_and_single_keys_are_gathered(paths: list[type]) -> None:
    q, k, v = tensors(64)
    ls.attention(q, k, v, mask=ls.selected(torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=DEVICE), 64), kernel="triton")
    ls.attention(q, k, v, mask=ls.selected(torch.zeros(1, 1, 64, 1, dtype=torch.int32, device=DEVICE), 1), kernel="triton")
    assert paths == [SelectedTables, GatheredKeys]


def test_deterministic_algorithms_do_not_gather_keys(paths: list[type]) -> None:
    q, k, v = tensors(32)
    mask = ls.selected(torch.arange(32, dtype=torch.int32, device=DEVICE).view(1, 1, 32, 1), 1)
    torch.use_deterministic_algorithms(True)
    try:
        out = ls.attention(q, k, v, mask=mask, kernel="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    assert paths == [type(None)]
    assert torch.allclose(out, v.expand_as(out), atol=1e-5)  # every query sees its own key only


@pytest.mark.parametrize(("granularity", "tokens"), [(64, 128), (4, 24)])
def test_non_finite_keys_that_a_query_does_not_see_change_no_bit(granularity: int, tokens: int) -> None:
    q, k, v = tensors(tokens)
    rows = tokens // granularity
    indices = torch.arange(rows, dtype=torch.int32, device=DEVICE).view(1, 1, rows, 1)
    mask = ls.selected(indices, granularity) & ls.causal()
    grad = torch.randn_like(q)

    def results() -> list[torch.Tensor]:
        out = ls.attention(q, k, v, mask=mask, kernel="triton")
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

    before = results()
    with torch.no_grad():
        k[:, :, -1], v[:, :, -1] = torch.nan, torch.inf
    after = results()
    # The last query sees the key, so the other keys that it sees get a NaN gradient.
    for name, a, b, hidden in zip(("out", "dq", "dk", "dv"), before, after, (1, 1, granularity, granularity), strict=True):
        assert torch.equal(a[:, :, :-hidden], b[:, :, :-hidden]), name


@pytest.mark.parametrize("granularity", [16, 64])
@pytest.mark.parametrize("scored", [False, True])
def test_non_finite_keys_of_a_short_block_change_no_bit_of_queries_before_them(granularity: int, scored: bool) -> None:
    """The kernel loads every key of a chosen block that exists, also the keys that the causal mask hides from the query."""
    torch.manual_seed(0)
    tokens, bias = 40, torch.randn(40, device=DEVICE)
    q, k, v, grad = (torch.randn(1, h, tokens, 32, device=DEVICE, dtype=torch.float16) for h in (2, 1, 1, 2))
    q.requires_grad_()
    last = torch.arange(tokens, dtype=torch.int32, device=DEVICE) // granularity
    indices = torch.stack([last, torch.zeros_like(last), -torch.ones_like(last)], -1)[None, None].contiguous()
    mask = ls.selected(indices, granularity, 1) & ls.causal()

    def results() -> list[Tensor]:
        score_mod = (lambda s, b, h, i, j: s.tanh() + bias[j]) if scored else None
        out = ls.attention(q, k, v, mask=mask, score_mod=score_mod, kernel="triton")
        return [out.detach(), *torch.autograd.grad(out, q, grad)]

    before = results()
    k[:, :, 37:], v[:, :, 35:] = torch.nan, torch.inf
    for a, b in zip(before, results(), strict=True):
        assert torch.equal(a[:, :, :35], b[:, :, :35]) and not a[:, :, 35:].isnan().any()


def test_a_new_choice_builds_no_block_table_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan._engine import table_cache

    q, k, v = tensors(128)
    choices = [torch.full((1, 1, 2, 1), block, dtype=torch.int32, device=DEVICE) for block in range(2)]
    ls.attention(q, k, v, mask=ls.selected(choices[0], 64) & ls.causal(), kernel="triton")
    monkeypatch.setattr(table_cache, "classify", None)
    out = ls.attention(q, k, v, mask=ls.selected(choices[1], 64) & ls.causal(), kernel="triton")
    assert not out[:, :, :64].any() and out[:, :, 64:].any()


def test_programs_that_look_up_by_key_read_no_padding() -> None:
    q, k, v = (torch.randn(1, 2, 4, 16, device=DEVICE), *torch.randn(2, 1, 1, 32, 16, device=DEVICE))
    table = torch.randn(32, device=DEVICE)
    mask = ls.selected(torch.tensor([3, -1], dtype=torch.int32, device=DEVICE).expand(1, 1, 4, 2).contiguous(), granularity=1)

    def biased(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s + table[kv_idx]

    out = ls.attention(q, k, v, mask=mask, score_mod=biased, kernel="triton")
    torch.testing.assert_close(out, v[:, :, 3:4].expand(1, 2, 4, 16))


def test_non_finite_keys_that_one_head_of_a_group_sees_reach_no_other() -> None:
    q, k, v = (torch.randn(1, 2, 4, 16, device=DEVICE), *torch.randn(2, 1, 1, 32, 16, device=DEVICE))
    v[:, :, 5] = float("nan")
    chosen = ls.selected(torch.tensor([3, 5, 7, -1], dtype=torch.int32, device=DEVICE).expand(1, 1, 4, 4).contiguous(), granularity=1)
    out = ls.attention(q, k, v, mask=chosen & ls.mask_mod(lambda b, h, q_idx, kv_idx: (h == 0) | (kv_idx != 5)), kernel="triton")
    assert bool(out[:, 0].isnan().all()) and bool(out[:, 1].isfinite().all())


@pytest.mark.parametrize(("granularity", "tokens", "inside", "outside"), [(1, 32, 3, 20), (64, 128, 0, 1)])
def test_lookups_are_checked_at_chosen_pairs_only(granularity: int, tokens: int, inside: int, outside: int) -> None:
    q, k, v = tensors(tokens)
    rows = tokens // granularity
    short = torch.zeros(tokens // 2, device=DEVICE)

    def attend(block: int) -> Tensor:
        indices = torch.full((1, 1, rows, 1), block, dtype=torch.int32, device=DEVICE)
        return ls.attention(q, k, v, mask=ls.selected(indices, granularity), score_mod=lambda s, b, h, i, j: s + short[j], kernel="triton")

    attend(inside)
    short = torch.zeros(tokens // 2 - 1, device=DEVICE)  # a table of another size is checked again
    with pytest.raises(ValueError, match="looks outside a captured tensor"):
        attend(outside)


@pytest.mark.parametrize(
    ("tiles", "keys", "rows", "columns"), [(2, 500, 2, 3), (9, 500, 4, 5), (0, 500, 0, 0), (1, 500, 1, 2), (3, 100, 1, 5), (3, 0, 0, 0)]
)
def test_the_stand_in_of_a_choice_has_as_many_tiles_in_every_row_and_column(tiles: int, keys: int, rows: int, columns: int) -> None:
    """5 tiles of 64 queries and up to 4 of 128 keys, for 2 batch rows and 3 heads."""
    table = stand_in((300, keys), (64, 128), 2, 3, tiles)
    for made, count, each in ((table, 2 * 3 * 5, rows), (table.transposed, 2 * 3 * -(-keys // 128), columns)):
        assert made.tiles_per_row.tolist() == [each] * count
        assert int(made.ptr[-1]) == len(made.first) == len(made.last) == len(made.kind) and made.rows == count
        assert made.ptr.dtype == made.first.dtype == made.last.dtype == torch.int32 and made.kind.dtype == torch.int8
    assert (table.block, table.transposed.block, table.transposed.q_len) == ((64, 128), (128, 64), keys)
