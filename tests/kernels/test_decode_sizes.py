"""Sizes of decode launches: splits or groups of splits, and merging in the decode kernel or in a second launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.stub_launches import record_launches

import longspan as ls
from longspan._kernels.gpu.split_kernel import SplitKernel
from longspan._kernels.paged import PagedKV, PagedWork, QueryRanges, query_ranges
from longspan._kernels.triton import decode_call
from longspan._kernels.triton.decode_call import Queries, page_sizes
from longspan._kernels.triton.decode_sizes import DecodeSizes
from longspan._kernels.triton.decode_tile import choose_tile
from longspan._kernels.triton.split_rule import SplitCounts, SplitRule
from longspan._masks.trace_cache import traces

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 12, 3, 64
SIZES = DecodeSizes(
    sequences=5, queries=(1, 3), longest=9000, splits=4, tile_rows=16, rule=SplitRule(256, 0, 12, 4096), joined=8, groups=2,
    grouped=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rows", "dim", "ctas", "merged"),
    [
        ({}, 12, 128, 264, 16),
        ({}, 8, 128, 264, 8),
        ({}, 40, 128, 264, 16),
        ({}, 1, 100, 1, 1),
        ({}, 12, 128, 265, 0),
        ({"groups": 3}, 12, 128, 264, 0),
        ({"joined": 9}, 12, 128, 264, 0),
        ({"joined": 9}, 8, 128, 264, 8),
        ({}, 12, 129, 264, 0),
        ({"splits": 1}, 12, 128, 264, 0),
        ({"shared": True}, 12, 128, 264, 0),
        ({"graphed": True}, 12, 128, 264, 0),
    ],
)
def test_a_cta_merges_few_results_of_few_groups_in_one_wave(changes: dict[str, Any], rows: int, dim: int, ctas: int, merged: int) -> None:
    """One wave on 132 SMs: 264 CTAs. 8 splits of 16 rows of 128 elements are as many results as a CTA loads at once."""
    assert SIZES._replace(**changes).merged_rows(rows, dim, ctas, 132) == merged


def ranges_of(counts: list[int], lengths: list[int]) -> QueryRanges:
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    return query_ranges(starts, lengths, list(range(len(counts))), [], CPU)[0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SplitCounts, int, int, int]]:
    """Arguments of `SplitCounts.groups_fill`, on a device of 20 SMs."""
    made: list[tuple[SplitCounts, int, int, int]] = []
    monkeypatch.setattr(decode_call, "sm_count", lambda device: 20)
    monkeypatch.setattr(SplitCounts, "groups_fill", lambda self, tiles, sms, needed: made.append((self, tiles, sms, needed)) or False)
    return made


def test_tiles_are_those_of_the_sequence_with_the_most_queries(asked: list[Any]) -> None:
    """4 heads per KV head: 3 and 1 queries take a tile of 16 rows, 9 and 20 take tiles of 64. 65 and 0 queries are not decoded."""
    counts, lengths = [3, 9, 65, 1, 0, 20], [700, 5000, 800, 90, 40, 2100]
    q = torch.zeros(6, HEADS, 65, DIM).bfloat16()
    pages = PagedKV(k=torch.zeros(2, KV_HEADS, 16, DIM), v=torch.zeros(2, KV_HEADS, 16, 40), table=torch.zeros(6, 9, dtype=torch.int32))
    made = page_sizes(Queries(q, ranges_of(counts, lengths), False), pages)
    assert [(one.tile_rows, one.queries, one.sequences) for one in made] == [(16, (1, 3), 6), (64, (9, 20), 6)]
    assert [(split.tokens, tiles, sms, needed) for split, tiles, sms, needed in asked] == [
        (790, KV_HEADS, 20, 1),
        (7100, 2 * KV_HEADS, 20, 1),
    ]
    asked.clear()
    few = page_sizes(Queries(q, ranges_of([6, 8], [700, 5000]), False), pages)
    assert [(one.tile_rows, one.queries) for one in few] == [(32, (6, 8))] and [tiles for _, tiles, *_ in asked] == [KV_HEADS]


@pytest.mark.parametrize(("longest", "taken"), [(None, (512, 4)), (2000, (0, 0))])
def test_ctas_of_another_kernel_take_groups_except_in_graphs(
    longest: int | None, taken: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 queries of 4 heads per KV head are 5 tiles of 64 rows, of 3 KV heads."""
    monkeypatch.setattr(decode_call, "sm_count", lambda device: 20)
    arguments: list[Any] = []
    monkeypatch.setattr(SplitRule, "cta_group", lambda self, *args: arguments.append(args) or 512)
    by = SplitKernel(kernel=None, options={}, descriptors={}, rows=64, coarse=0, share=lambda ratio: ratio)
    q = torch.zeros(2, HEADS, 64, DIM).bfloat16()
    pages = PagedKV(k=torch.zeros(2, KV_HEADS, 16, DIM), v=torch.zeros(2, KV_HEADS, 16, 40), table=torch.zeros(2, 9, dtype=torch.int32))
    ranges = replace(ranges_of([60, 50], [700, 1900]), longest=longest)
    (made,) = page_sizes(Queries(q, ranges, False, by=by), pages)
    assert made.taken == taken and made.by is by and made.graphed == (longest is not None)
    assert [(split.tokens, *rest) for split, *rest in arguments] == ([] if longest else [(2600, 1900, 4 * KV_HEADS, 20)])


def test_groups_of_all_batch_rows_fill_the_device(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """5 batch rows of 9000 keys are 5 · 3 groups of up to 4096 keys; 80 rows of each of 3 KV heads are 2 tiles."""
    record_launches(monkeypatch)
    q, k, v = (
        torch.zeros(5, heads, tokens, dim).half() for heads, tokens, dim in ((HEADS, 20, 48), (KV_HEADS, 9000, 48), (KV_HEADS, 9000, 72))
    )
    decode_call.contiguous_launch(q, k, v, PagedWork(scale=0.3), decode_call.empty_results(q, 72))
    assert not asked, "64 rows of 72 elements are more results than a CTA may have beside those of a group"
    v = v[..., :64]
    decode_call.contiguous_launch(q, k, v, PagedWork(scale=0.3), decode_call.empty_results(q, 64))
    ((split, tiles, sms, needed),) = asked
    assert (split.all_groups, split.groups, split.tokens, split.largest) == (15, 3, 45_000, 4096)
    assert (tiles, sms, needed) == (2 * KV_HEADS, 20, 1)


@pytest.mark.parametrize("kind", ["mask", "score"])
def test_calls_whose_captured_tensors_have_other_sizes_have_launches_of_their_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of captured tensors are constants of a launch: indices are clamped to them."""
    record_launches(monkeypatch)
    q, k = torch.zeros(2, HEADS, 1, DIM).half(), torch.zeros(2, KV_HEADS, 600, DIM).half()

    def launches(table: Tensor) -> Any:
        work = PagedWork(scale=0.3)
        if kind == "mask":
            mask = ls.mask_mod(lambda b, h, q, kv: table[kv % 20] > 0).traced
            work = replace(work, mask=mask.program, mask_captured=mask.captured())
        else:
            score = traces.trace(lambda s, b, h, q, kv: s + table[kv % 20], "score", score_dtype=torch.float32)
            work = replace(work, score=score.program, score_captured=score.captured())
        return decode_call.contiguous_launch(q, k, k, work, decode_call.empty_results(q, DIM)).launches

    first, other, again = (launches(torch.ones(size)) for size in (20, 30, 20))
    assert first is again and first is not other


@pytest.mark.parametrize(("dtype", "fast"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)])
def test_functions_of_mods_are_approximate_in_half_precision_only(dtype: torch.dtype, fast: bool) -> None:
    assert decode_call._options(PagedWork(scale=0.3), dtype, 100).fast is fast


@pytest.mark.parametrize("kind", ["mask", "score"])
def test_programs_over_tables_of_two_billion_elements_have_wide_indices(kind: str) -> None:
    for size, big in ((2**31 - 1, False), (2**31, True)):
        tables = [torch.empty(3, device="meta"), torch.empty(size, dtype=torch.int8, device="meta")]
        captured: dict[str, Any] = {f"{kind}_captured": tables}
        assert decode_call._options(PagedWork(scale=0.3, **captured), torch.float16, 100).big_tables is big


@pytest.mark.parametrize(
    ("interpreted", "hip", "capability", "expected"),
    [
        (False, None, (9, 0), True), (False, None, (10, 0), True), (False, None, (8, 9), False), (False, "6.4", (9, 4), False),
        (True, None, (9, 0), False),
    ],
)  # fmt: skip
def test_tma_is_used_on_hopper_gpus_and_later_ones(
    interpreted: bool, hip: str | None, capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles that pages divide, of keys that TMA can describe and whose shared elements need no padding."""
    monkeypatch.setattr(decode_call, "interpreted", lambda: interpreted)
    monkeypatch.setattr(decode_call, "capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert decode_call._is_hopper_or_later(CPU) is expected
    tile = choose_tile(dim=512, dtype=torch.bfloat16, rows=16, waves=1.0)
    keys, odd = torch.zeros(3, 1, 128, 576).bfloat16(), torch.zeros(3, 1, 96, 576).bfloat16()
    assert decode_call._loads_by_tma(keys, 512, True, tile) is expected
    assert decode_call._loads_by_tma(odd, 512, False, tile) is expected and not decode_call._loads_by_tma(odd, 512, True, tile)
    assert not decode_call._loads_by_tma(keys, 500, True, tile) and not decode_call._loads_by_tma(keys[..., 1:], 512, True, tile)
    assert not decode_call._loads_by_tma(keys, 512, True, replace(tile, tma=False))
