"""Ordered dQ: every query tile accumulates its key tiles in a fixed order, and no CTA waits forever."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.calls import backward, forward
from tests.kernels.shards import table_of_pairs, work_of
from tests.kernels.test_hopper import on_hopper
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

import longspan as ls
from longspan._kernels.hopper import HopperKernel, dq_order, passes
from longspan._kernels.hopper import kernel as hopper
from longspan._kernels.hopper.dkv_producer import DOWN_LEG, LEG_FIELDS
from longspan._kernels.hopper.dq_order import MAX_TILES, OrderChoice, choose_order, ordered_dq_pays
from longspan._kernels.hopper.kernel import _one_pass
from longspan._kernels.protocol import AttentionInputs, Grads, Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton import TritonKernel
from longspan._masks.block_table import BlockTable
from longspan.testing import oracle

HOPPER = HopperKernel(fallback=TritonKernel())

CPU = torch.device("cpu")


@st.composite
def tables(draw: st.DrawFn) -> tuple[BlockTable, int]:
    shared = draw(st.integers(1, 3))
    batch, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    shape = batch, groups * shared, draw(st.integers(1, 9)), draw(st.integers(1, 7))
    torch.manual_seed(draw(st.integers(0, 999)))
    seen = torch.rand(shape) < draw(st.floats(0, 1))  # of tiles of one token: each is full or empty
    return table_of_pairs(seen, Tiling(length=shape[2], block=1), Tiling(length=shape[3], block=1)), shared


PLAIN = OrderChoice(together=1, all_heads=True)


@st.composite
def choices(draw: st.DrawFn, shared: int) -> OrderChoice:
    long = tuple(draw(st.sets(st.integers(0, 6), max_size=2))) if draw(st.booleans()) else ()
    return OrderChoice(
        together=draw(st.sampled_from([1, shared])), all_heads=True, wave=draw(st.integers(0, 8)), upward=draw(st.integers(0, 9)),
        long=tuple(sorted(long)), begin=draw(st.integers(0, 9)), chunk=draw(st.integers(1, 4)),
    )  # fmt: skip


Step = tuple[tuple[int, int, int], int]  # ((batch, head, step of queries), how many add to it before)


def steps_of_items(table: BlockTable, queries: Tiling, shared: int, choice: OrderChoice = PLAIN) -> list[list[Step]]:
    """The steps of each item in launch order, as the producer warp walks their legs; steps without a query are skipped. If the table is the
    same for all heads, those of one head group.
    """
    by_keys = table.transposed
    fixed = dq_order.dq_order(by_keys, queries, choice, shared, CPU)
    order, ptr, before = (t.tolist() for t in (fixed.order, fixed.ptr, fixed.before))
    tiles, per_head = by_keys.q_tiles, by_keys.heads > 1
    groups = by_keys.heads // shared if per_head else 1
    items = []
    for row in order[: by_keys.batch * groups * tiles]:
        b, g = row // (tiles * groups), row // tiles % groups
        steps = []
        for i in range(ptr[row], ptr[row + 1]):
            first, last, flags, head, heads, at = fixed.legs[i * LEG_FIELDS.value :][: LEG_FIELDS.value].tolist()
            walk = range(first, last + 1)
            for x in reversed(walk) if flags & DOWN_LEG.value else walk:
                halves = -(-queries.span(x)[1] // 64)
                of = range(g * shared + head, g * shared + head + heads)
                steps += [((b, h, 2 * x + half), before[at + x - first]) for h in of for half in range(halves)]
        items.append(steps)
    return items


def check_counts(items: list[list[Step]]) -> int:
    """Check that each step follows as many additions as it waits for. Returns the number of steps."""
    seen: dict[tuple[int, int, int], int] = defaultdict(int)
    for lock, before in chain(*items):
        assert before == seen[lock]
        seen[lock] += 1
    return sum(seen.values())


@settings(deadline=None, max_examples=60)
@given(tables(), st.data())
def test_each_step_counts_the_key_tiles_that_were_taken_before(case: tuple[BlockTable, int], data: st.DataObject) -> None:
    table, shared = case
    choice = data.draw(choices(shared))
    if any(tile >= table.kv_tiles for tile in choice.long):
        choice = choice._replace(long=())
    items = steps_of_items(table, Tiling(length=table.q_len, block=1), shared, choice)
    assert check_counts(items) == int(table.tiles_per_row.sum()) * (shared if table.heads == 1 else 1)


@settings(deadline=None, max_examples=60)
@given(tables(), st.integers(1, 5), st.integers(0, 99), st.data())
def test_no_deadlock_with_any_number_of_ctas(case: tuple[BlockTable, int], ctas: int, seed: int, data: st.DataObject) -> None:
    """A random interleaving of CTAs that take items from a counter and do their steps in sequence."""
    table, shared = case
    choice = data.draw(choices(shared))
    if any(tile >= table.kv_tiles for tile in choice.long):
        choice = choice._replace(long=())
    items = steps_of_items(table, Tiling(length=table.q_len, block=1), shared, choice)
    draw, taken = random.Random(seed), iter(items)
    done: dict[tuple[int, int, int], int] = defaultdict(int)
    at: list[list[Step]] = [[] for _ in range(ctas)]
    finished = [False] * ctas
    while not all(finished):
        able = [p for p in range(ctas) if not finished[p] and (not at[p] or done[at[p][0][0]] >= at[p][0][1])]
        assert able, "deadlock"
        p = draw.choice(able)
        if at[p]:
            done[at[p].pop(0)[0]] += 1
        else:
            steps = next(taken, None)
            finished[p] = steps is None
            at[p] = list(steps or ())


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_counts_match_the_producer_with_short_tiles(data: st.DataObject) -> None:
    """Short query tiles move from the full runs to the partial ones."""
    lengths = st.lists(st.integers(1, 300), min_size=1, max_size=4)

    def segments(gap: int) -> list[tuple[int, int]]:
        starts_and_lengths, at = [], 0
        for n in data.draw(lengths):
            starts_and_lengths.append((at, n))
            at += n + gap
        return starts_and_lengths

    shared, per_head, far = data.draw(st.integers(1, 2)), data.draw(st.booleans()), data.draw(st.integers(0, 400))
    work = work_of(
        (lambda b, h, q, kv: q + far >= kv + 100 * h) if per_head else (lambda b, h, q, kv: q + far >= kv),
        segments(data.draw(st.integers(0, 90))), segments(0), block=128, heads=2 * shared if per_head else 1,
    )  # fmt: skip
    check_counts(steps_of_items(work.table, work.q_tiles, shared))


def pays(mask: ls.Mask, tokens: int, items_per_tile: int, shared: int = 1, *, scored: bool = False, invariant: bool = False) -> bool:
    table = mask.block_table(tokens, tokens, block=128)
    return ordered_dq_pays(table, items_per_tile, shared, scored=scored, invariant=invariant)


def test_ordered_dq_pays_for_tables_of_limited_size() -> None:
    assert pays(ls.causal(), 2**15, 8) and pays(ls.sliding_window(1024), 2**14, 32) and not pays(ls.sliding_window(300), 2**14, 32)
    assert MAX_TILES < (2**20 // 128) ** 2 and not pays(ls.full(), 2**20, 32)


def test_ordered_dq_does_not_pay_where_items_that_start_together_are_short() -> None:
    assert all(pays(ls.full(), 2**13, n) for n in (8, 32))
    assert pays(ls.causal(), 2**13, 32) and not pays(ls.causal(), 2**11, 16, scored=False, invariant=True)


def choice(mask: ls.Mask, tokens: int, *, invariant: bool = False) -> OrderChoice:
    """Of 32 heads over 8."""
    return choose_order(mask.block_table(tokens, tokens, block=128).transposed, 8, 4, invariant=invariant)


def test_heads_are_walked_together_unless_queries_would_leave_l2() -> None:
    tokens = 2**14
    assert pays(ls.sliding_window(1024), tokens, 8, 4)
    assert choice(ls.causal(), tokens).together == choice(ls.causal() & ls.documents([1000] * 16 + [384]), tokens).together == 4
    assert choice(ls.sliding_window(1024), tokens).together == 1
    assert choice(ls.sliding_window(1024), tokens).efficiency > 0.9 > choice(ls.sliding_window(1024), tokens, invariant=True).efficiency


@pytest.mark.parametrize("mask", [ls.causal(), ls.sliding_window(700), ls.prefix(64) | ls.sliding_window(700)])
def test_the_walk_of_invariant_sums_does_not_depend_on_the_mask(mask: ls.Mask) -> None:
    assert choice(mask, 5000, invariant=True).together == 4


def test_items_of_the_same_length_are_taken_by_few_heads_at_once() -> None:
    masks = (ls.full(), ls.sliding_window(1024), ls.causal(), ls.prefix(5000) | ls.causal())
    assert [choice(mask, 2**14).all_heads for mask in masks] == [False, False, True, True]


def test_few_items_of_a_causal_mask_begin_with_their_diagonals_and_do_not_wait() -> None:
    table = ls.causal().block_table(2048, 2048, block=128).transposed
    chosen = choose_order(table, 16, 1)
    assert (chosen.wave, chosen.upward, chosen.efficiency) == (8, 8, 1.0) and pays(ls.causal(), 2048, 16)
    assert chosen.taken(16).tolist() == [*range(7, -1, -1), *range(8, 16)]
    assert choose_order(table, 16, 1, invariant=True).taken(16).tolist() == list(range(16))


def test_the_first_keys_beside_a_window_are_taken_with_the_first_wave() -> None:
    chosen = choice(ls.prefix(64) | ls.sliding_window(2048), 2**15)
    assert (chosen.long, chosen.wave, chosen.begin, chosen.chunk, chosen.together) == ((0,), 15, 16, 16, 1)
    assert chosen.taken(256)[:18].tolist() == [*range(1, 16), 0, 16, 17] and chosen.efficiency > 0.9


def test_key_tiles_are_added_in_ascending_order() -> None:
    by_keys = ls.causal().block_table(1000, 1000, block=128).transposed
    assert dq_order.dq_order(by_keys, Tiling(length=1000, block=128), PLAIN, 3, CPU).order[:8].tolist() == list(range(8))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 60), st.floats(0, 1))
def test_efficiency_is_at_most_that_of_no_waits(groups: int, tiles: int, slope: float) -> None:
    seen = torch.arange(tiles)[:, None] >= (torch.arange(tiles) * slope).floor()  # later key tiles are seen by fewer queries
    table = table_of_pairs(seen[None, None], Tiling(length=tiles, block=1), Tiling(length=tiles, block=1)).transposed
    assert 0 < choose_order(table, groups, 1).efficiency <= 1


def causal_call(heads: int, tokens: int, dim: int = 128, *, invariant: bool = False) -> tuple[AttentionInputs, Work]:
    q = torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16)
    work = work_of(lambda b, h, q, kv: q >= kv, ((0, tokens),), ((0, tokens),), block=128)
    return AttentionInputs(q=q, k=q, v=q), replace(work, invariant=invariant)


def test_deterministic_dq_takes_one_pass_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = causal_call(2, 3000), causal_call(16, 640)
    monkeypatch.setattr(hopper, "_unsupported_reason", lambda *_: None)  # as on a Hopper GPU
    assert _one_pass(*long, []) and _one_pass(*short, []) and HOPPER.capabilities(*long).concurrent_backward
    assert not HOPPER.capabilities(*long, needs=[True]).concurrent_backward
    torch.use_deterministic_algorithms(True)
    try:
        assert _one_pass(*long, []) and not _one_pass(*short, []) and not _one_pass(*long, [True])
        assert not HOPPER.capabilities(*long).concurrent_backward  # concurrent launches would add in arbitrary order
    finally:
        torch.use_deterministic_algorithms(False)


def test_invariant_dq_takes_one_pass_where_both_ways_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_unsupported_reason", lambda *_: None)
    inputs, work = causal_call(2, 3000, invariant=True)
    assert _one_pass(inputs, work, []) and not HOPPER.capabilities(inputs, work).concurrent_backward
    assert not _one_pass(*causal_call(16, 2048, invariant=True), [])
    assert not _one_pass(*causal_call(2, 3000, 192, invariant=True), [])  # hopper.dkv_parts rounds P


@pytest.fixture(params=[True, False], ids=["ordered dQ", "separate dQ kernel"])
def deterministic(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Deterministic mode, forced to ordered dQ or to a separate dQ kernel."""
    monkeypatch.setattr(hopper, "ordered_dq_pays", lambda *_, **__: request.param)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


MASKS: dict[str, Callable[[], ls.Mask]] = {
    "full": ls.full,
    "causal": ls.causal,
    "what comes after": lambda: ls.mask_mod(lambda b, h, q, kv: q <= kv),
    "documents": lambda: ls.causal() & ls.documents([300, 1, 512, 450]),
    "window": lambda: ls.sliding_window(260),
    "by head": lambda: ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q - kv < 100 * (h + 1))),
    "most keys unseen": lambda: ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (kv < 200)),
    "every third tile of keys seen": lambda: ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (kv // 128 % 3 == 2)),
}


Score = Callable[..., Tensor] | None


def check_repeated_gradients(inputs: list[Tensor], mask: ls.Mask, score: Score) -> None:
    """Check that ten backward passes have the same bits, and an error not above that of bfloat16."""
    out = ls.attention(*inputs, mask=mask, score_mod=score, kernel="hopper")
    grad = torch.randn_like(out)
    runs = [torch.autograd.grad(out, inputs, grad, retain_graph=True) for _ in range(10)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))

    def of_oracle(dtype: torch.dtype) -> Sequence[Tensor]:
        return torch.autograd.grad(oracle(*inputs, mask=mask, score_mod=score, dtype=dtype), inputs, grad.to(dtype))

    torch.use_deterministic_algorithms(False)
    for got, want, dense in zip(runs[0], of_oracle(torch.float64), of_oracle(torch.bfloat16), strict=True):
        assert float((got.double() - want.double()).norm()) <= 1.1 * float((dense.double() - want.double()).norm())


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("score", [None, lambda s, b, h, q, kv: 20 * torch.tanh(s / 20)], ids=["no score", "soft cap"])
@pytest.mark.parametrize(
    ("name", "dim"), [*((name, 128) for name in MASKS), *((name, 64) for name in ("full", "by head")), ("documents", 40)]
)
def test_gradients_are_right_and_the_same_in_every_run(name: str, dim: int, score: Score) -> None:
    on_hopper()
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, 1263, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (6, 2, 2)]
    check_repeated_gradients(inputs, MASKS[name](), score)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("heads", "dim"), [((66, 33), 128), ((44, 44), 64)])
def test_gradients_of_several_rounds_of_key_tiles_are_right(heads: tuple[int, int], dim: int) -> None:
    on_hopper()
    torch.manual_seed(0)
    inputs = [torch.randn(1, h, 2611, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (heads[0], heads[1], heads[1])]
    check_repeated_gradients(inputs, ls.causal(), None)


def _window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv < 300) & (q >= kv) | (kv < 40)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "order",
    [
        *(OrderChoice(together=n, all_heads=True) for n in (1, 2, 4)),
        OrderChoice(together=4, all_heads=True, wave=5, upward=5),
        OrderChoice(together=1, all_heads=True, wave=15, upward=15),
        OrderChoice(together=1, all_heads=True, wave=4, long=(0,), begin=5, chunk=2),
        OrderChoice(together=2, all_heads=True, wave=0, long=(0, 7), begin=1, chunk=4),
    ],
)
def test_gradients_are_right_in_every_order(order: OrderChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, h, 1911, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8))
    work = work_of(_window, ((0, 1911),), ((0, 1911),), block=128, scale=128**-0.5)
    monkeypatch.setattr(hopper, "ordered_dq_pays", lambda *_, **__: True)
    monkeypatch.setattr(hopper, "head_parts_of", lambda *_: 1)
    monkeypatch.setattr(passes, "head_parts_of", lambda *_: 1)
    monkeypatch.setattr(passes, "choose_order", lambda *_, **__: order)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = oracle(*exact, mask=ls.mask_mod(_window), return_lse=True)
    torch.use_deterministic_algorithms(True)
    try:
        got = backward(HOPPER, q, k, v, out.detach().to(q.dtype), lse.detach().float(), grad, None, work, wide=False)
    finally:
        torch.use_deterministic_algorithms(False)
    for x, want in zip((got.q, got.k, got.v), torch.autograd.grad(out, exact, grad.double()), strict=True):
        assert float((x.double() - want).norm()) < 5e-3 * float(want.norm())


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_bits_do_not_depend_on_the_number_of_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 1100, 128, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    grads_by_ctas = []
    for ctas in (132, 7, 1):
        monkeypatch.setattr(passes, "persistent_ctas", lambda device, ctas=ctas: ctas)
        work = work_of(lambda b, h, q, kv: q >= kv, ((0, 700), (800, 400)), ((0, 1100),), block=128)
        of = HOPPER
        state = forward(of, q, k, v, work, state=None, final=True, max_scores=False)
        if not grads_by_ctas:
            out, lse, grad = state.out, state.lse, torch.randn_like(state.out)
        into = Grads(q=torch.zeros(q.shape, device="cuda"), k=torch.empty_like(k), v=torch.empty_like(v), captured=[])
        backward(of, q, k, v, out, lse, grad, None, work, needs=[], wide=True, into=into)
        grads_by_ctas.append(into)
    first, *others = grads_by_ctas
    assert all(torch.equal(getattr(first, name), getattr(other, name)) for other in others for name in ("q", "k", "v"))
