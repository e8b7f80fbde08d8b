"""Lookups out of bounds raise where the error is certain, and only there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.shards import work_of

import longspan as ls
from longspan._kernels.gpu import lookup_bounds as lookups
from longspan._kernels.gpu.lookup_bounds import check_lookups
from longspan._kernels.gpu.sample_pairs import Pairs
from longspan._kernels.protocol import Work
from longspan._kernels.tiling import Tiling
from longspan._masks.classify import TableShape, classify
from longspan._masks.tracing import trace

Mod = Callable[..., Tensor]
SMALL, LARGE = 250, 20_000
SHORT, HEADS = torch.randn(32), torch.randn(3)
NEAR, FAR = torch.tensor(32), torch.tensor(40)
CODES = torch.arange(2 * LARGE) % 32
ODD = CODES.clone()
ODD[13_001] = 32


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def window(width: int) -> Mod:
    return lambda b, h, q, kv: (q >= kv) & (q - kv < width)


def work(mask: Mod | None, score: Mod | None, length: int) -> Work:
    traced = [None if mod is None else trace(mod, kind) for mod, kind in ((mask, "mask"), (score, "score"))]  # type: ignore[arg-type]
    programs = [None if t is None else t.program for t in traced]
    captured = [[] if t is None else t.captured() for t in traced]
    tiles = Tiling(length=length, block=128)
    return Work(
        table=classify(programs[0], captured[0], TableShape(q_len=length, kv_len=length)), q_tiles=tiles, kv_tiles=tiles, scale=0.3,
        mask=programs[0], mask_captured=captured[0], score=programs[1], score_captured=captured[1],
    )  # fmt: skip


OUTSIDE: dict[str, tuple[Mod | None, Mod]] = {
    "distance": (None, lambda s, b, h, q, kv: s + SHORT[(q - kv).abs()]),
    "one too far": (window(33), lambda s, b, h, q, kv: s + SHORT[q - kv]),
    "below": (causal, lambda s, b, h, q, kv: s + SHORT[kv - q]),
    "head": (causal, lambda s, b, h, q, kv: s + HEADS[h]),
    "query": (window(7), lambda s, b, h, q, kv: s + SHORT[q // 7]),
    "key": (window(7), lambda s, b, h, q, kv: s * SHORT[kv]),
    "guarded too late": (causal, lambda s, b, h, q, kv: torch.where(q - kv < 40, SHORT[q - kv] + s, s)),
    "a captured distance": (causal, lambda s, b, h, q, kv: torch.where(q - kv < FAR, SHORT[q - kv] + s, s)),
    "a constant tensor": (causal, lambda s, b, h, q, kv: torch.where(q - kv < torch.tensor(40), SHORT[q - kv] + s, s)),
    "a later condition": (causal, lambda s, b, h, q, kv: torch.where(SHORT[(q - kv).clamp(max=31)] > -100, SHORT[q - kv] + s, s)),
    "constant": (causal, lambda s, b, h, q, kv: s + SHORT[h * 0 + 32]),
}
INSIDE: dict[str, tuple[Mod | None, Mod]] = {
    "masked": (window(32), lambda s, b, h, q, kv: s + SHORT[q - kv]),
    "where": (None, lambda s, b, h, q, kv: torch.where((q - kv).abs() < 32, s + SHORT[(q - kv).abs()], s)),
    "a captured distance": (causal, lambda s, b, h, q, kv: torch.where(q - kv < NEAR, SHORT[q - kv] + s, s)),
    "a constant tensor": (causal, lambda s, b, h, q, kv: torch.where(q - kv < torch.tensor(32), SHORT[q - kv] + s, s)),
    "other branch": (causal, lambda s, b, h, q, kv: torch.where(q - kv >= 32, s, s + SHORT[q - kv])),
    "filled": (causal, lambda s, b, h, q, kv: s + SHORT[q - kv].masked_fill(q - kv > 31, 0.0)),
    "factor": (causal, lambda s, b, h, q, kv: s + SHORT[q - kv] * (q - kv < 32)),
    "by the score": (causal, lambda s, b, h, q, kv: torch.where(s > 0, s + SHORT[q - kv], s)),
    "at the score": (causal, lambda s, b, h, q, kv: s + SHORT[(40 + s).int()]),
    "clamped": (causal, lambda s, b, h, q, kv: s + SHORT[(q - kv).clamp(max=31)]),
    "remainder": (causal, lambda s, b, h, q, kv: s + SHORT[(q - kv) % 32]),
    "from the end": (causal, lambda s, b, h, q, kv: s + SHORT[-1 - q % 32]),
    "a table of indices": (causal, lambda s, b, h, q, kv: s + SHORT[CODES[q - kv]]),
}


@pytest.mark.parametrize("length", [SMALL, LARGE])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_visible_pair_that_looks_out_of_bounds_raises(name: str, length: int) -> None:
    with pytest.raises(ValueError, match=r"score_mod .* looks outside a captured tensor of shape \((32|3),\).*has (32|3) entries"):
        check_lookups(work(*OUTSIDE[name], length), 1, 5)


@pytest.mark.parametrize("length", [SMALL, LARGE])
@pytest.mark.parametrize("name", INSIDE)
def test_discarded_lookups_may_be_out_of_bounds(name: str, length: int) -> None:
    check_lookups(work(*INSIDE[name], length), 1, 5)


@pytest.mark.parametrize("side", ["q", "kv"])
def test_one_bad_entry_in_a_long_index_table_is_detected(side: str) -> None:
    score: Mod = lambda s, b, h, q, kv: s + SHORT[ODD[q if side == "q" else kv]]
    with pytest.raises(ValueError, match="query 13001" if side == "q" else "key 13001"):
        check_lookups(work(window(50), score, LARGE), 1, 1)
    seldom: Mod = lambda b, h, q, kv: (q >= kv) & (q != 13_001) & (kv != 13_001)
    check_lookups(work(seldom, score, LARGE), 1, 1)


def test_the_last_entry_of_an_index_table_may_be_the_bad_one() -> None:
    codes = torch.zeros(SMALL, dtype=torch.int64)
    codes[-1] = 40
    with pytest.raises(ValueError, match="query 249"):
        check_lookups(work(causal, lambda s, b, h, q, kv: s + SHORT[codes[q]], SMALL), 1, 1)
    hidden: Mod = lambda b, h, q, kv: q < SMALL - 1
    check_lookups(work(hidden, lambda s, b, h, q, kv: s + SHORT[codes[q]], SMALL), 1, 1)


@pytest.mark.parametrize("axis", range(4))
def test_bounds_prove_lookups_by_the_sizes_of_their_axis(axis: int) -> None:
    """3 batch rows, 5 heads, 7 queries, 11 keys: an index of twice the position needs one entry less than twice the size."""
    ends = (3, 5, 7, 11)

    def inside(entries: int, ends: tuple[int, int, int, int] = ends) -> bool:
        table = torch.randn(entries)
        traced = trace(lambda s, *places: s + table[places[axis] * 2], "score")
        return lookups.stays_inside(traced.program, traced.captured(), ends)

    size = 2 * ends[axis] - 1
    assert inside(size) and not inside(size - 1)
    assert inside(1, ends=(3, 0, 7, 11)) and not inside(1, ends=(3, 2, 7, 11) if axis != 1 else (1, 2, 7, 11))


def test_of_many_places_batch_rows_and_heads_some_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    here = work(lambda b, h, q, kv: q + b + h >= kv, lambda s, b, h, q, kv: s + SHORT[CODES[q] + 1] + HEADS[CODES[b * h] % 3], SMALL)
    assert here.score is not None
    place = torch.arange(6)
    b, h, *_ = lookups._indices_at(Pairs(place, place, place, place), here.score, here, 9, 11)
    assert (b.flatten().tolist(), h.flatten().tolist()) == ([0, 8], [0, 3, 6, 10])
    places: list[Tensor] = []
    around = lookups.around
    monkeypatch.setattr(lookups, "around", lambda *args: (places.append(args[3]), around(*args))[1])
    odd = torch.full((LARGE,), 40)
    check_lookups(work(lambda b, h, q, kv: q >= kv + LARGE - 1, lambda s, b, h, q, kv: s + SHORT[odd[q] * (q != LARGE - 1)], LARGE), 1, 1)
    assert [len(p) for p in places] == [64]


def test_a_mask_out_of_bounds_between_tile_corners_raises() -> None:
    with pytest.raises(ValueError, match=r"mask .* looks outside"):
        check_lookups(work(lambda b, h, q, kv: (q >= kv) & (SHORT[q % 50] > -100), None, SMALL), 1, 1)


def test_padding_rows_of_a_shard_are_not_checked() -> None:
    ids = torch.arange(70) // 9
    check_lookups(work_of(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), [(40, 30)], [(0, 70)], block=16), 1, 1)


def test_a_shard_is_checked_at_its_global_batch_rows_and_heads() -> None:
    score = trace(lambda s, b, h, q, kv: s + HEADS[h], "score")
    whole = replace(work(causal, None, SMALL), score=score.program, score_captured=score.captured())
    check_lookups(replace(whole, first_head=1), 1, 2)
    with pytest.raises(ValueError, match="head 3"):
        check_lookups(replace(whole, first_head=2), 1, 2)


def test_the_same_work_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = lookups._check_pairs
    monkeypatch.setattr(lookups, "_check_pairs", lambda *args: (looks.append(1), look(*args))[1])
    here = work(*INSIDE["masked"], SMALL)
    for _ in range(3):
        check_lookups(here, 1, 2)
    assert len(looks) == 1
    check_lookups(work(None, lambda s, b, h, q, kv: s + CODES[q - kv + LARGE], SMALL), 1, 2)
    assert len(looks) == 1, "interval bounds prove this one in bounds"


@pytest.mark.parametrize("at", [13_001, 13_200])
@pytest.mark.parametrize("side", ["q", "kv"])
def test_of_many_bad_entries_the_first_or_the_last_may_be_the_only_visible_one(side: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "sampled", lambda *_: Pairs(*torch.zeros(4, 1, dtype=torch.int64)))  # the sample misses the entry
    codes = CODES.clone()
    codes[13_001:13_201] = 32
    score: Mod = lambda s, b, h, q, kv: s + SHORT[codes[q if side == "q" else kv]]
    hidden: Mod = lambda b, h, q, kv: (q >= kv) & (((q if side == "q" else kv) // 300 != 43) & ((q if side == "q" else kv) // 300 != 44))
    check_lookups(work(hidden, score, LARGE), 1, 1)
    with pytest.raises(ValueError, match=f"{'query' if side == 'q' else 'key'} {at}"):
        check_lookups(work(lambda b, h, q, kv: hidden(b, h, q, kv) | ((q if side == "q" else kv) == at), score, LARGE), 1, 1)


@pytest.mark.parametrize("dim", ["batch", "heads", "first_batch", "first_head"])
def test_calls_of_other_batch_rows_and_heads_are_checked_again(dim: str) -> None:
    """A table of 3 batch rows or heads, whose index interval bounds do not know, with the work of one block table."""
    by_batch = "batch" in dim
    here = work(causal, lambda s, b, h, q, kv: s + HEADS[CODES[b if by_batch else h]], SMALL)
    sizes = (3, 5) if by_batch else (5, 3)
    check_lookups(here, *sizes)
    with pytest.raises(ValueError, match="head 3" if dim in ("heads", "first_head") else "batch row 3"):
        if dim.startswith("first"):
            check_lookups(replace(here, **{dim: 1}), *sizes)
        else:
            check_lookups(here, *((4, 5) if by_batch else (5, 4)))


def test_other_captured_tensors_and_programs_are_checked_again() -> None:
    index, sizes = torch.arange(300), (2, 3)
    long, short = torch.randn(250), torch.randn(249)
    scores = [trace(lambda s, b, h, q, kv, t=t: s + t[index[kv]], "score") for t in (long, short)]
    scores.append(trace(lambda s, b, h, q, kv: s + long[index[kv] + 1], "score"))
    here = work(causal, None, SMALL)
    works = [replace(here, score=score.program, score_captured=score.captured()) for score in scores]
    check_lookups(works[0], *sizes)
    for other in works[1:]:
        with pytest.raises(ValueError, match="key 249"):
            check_lookups(other, *sizes)


@pytest.mark.parametrize("side", ["q_tiles", "kv_tiles"])
def test_tiles_at_other_positions_are_checked_again(side: str) -> None:
    """A table of 256 entries for positions below 250, then for tiles of the same rows that begin at 7."""
    table, index = torch.randn(256), torch.arange(300)
    score: Mod = lambda s, b, h, q, kv: s + table[index[q if side == "q_tiles" else kv]]
    here = work(None, score, SMALL)
    row = torch.tensor([0, 128])
    moved = [Tiling(length=SMALL, block=128, row=row, pos=row + start, count=torch.tensor([128, 122])) for start in (3, 7)]
    check_lookups(here, 1, 2)
    check_lookups(replace(here, **{side: moved[0]}), 1, 2)
    with pytest.raises(ValueError, match="looks outside a captured tensor"):
        check_lookups(replace(here, **{side: moved[1]}), 1, 2)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_raises_where_torch_raises(backward: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.randn(32, device=device, requires_grad=backward)
    q, k, v = (torch.randn(1, 2, 90, 16, device=device) for _ in range(3))
    with pytest.raises(ValueError, match="looks outside a captured tensor"):
        ls.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[(i - j).abs()], kernel="triton")
