"""`InvariantTiles` against the dense float64 kernel: parts of a sequence, masks and scores by head, sinks, gradients by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.shards import Segments, work_of
from torch import Tensor

from longspan._kernels import invariant_tiles
from longspan._kernels.invariant_tiles import InvariantTiles, row_delta, tree_sum
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, State, Work
from longspan._kernels.tiling import Tiling
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

BATCH, HEADS, GROUPS, DIM, VALUE_DIM = 2, 4, 2, 5, 19
IDS, SLOPES, TABLE = torch.arange(400) // 90, torch.linspace(0.01, 0.3, HEADS + 2), torch.linspace(-1, 1, 9)
Mod = Callable[..., Tensor]


def everything(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q + kv >= 0


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def by_head_and_batch(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < 40 * (h + 1)) & ((IDS[q] == IDS[kv]) | (b > 1)) & (q % 7 != 3)


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s - SLOPES[h] * (q - kv).abs() + TABLE[b + (q - kv) % 5]


WHOLE: tuple[Segments, Segments] = ([(0, 140)], [(0, 140)])
PARTS: tuple[Segments, Segments] = ([(130, 128), (300, 9)], [(60, 20), (110, 128), (290, 21)])


def inputs_of(work: Work) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    q_len, kv_len = work.q_tiles.length, work.kv_tiles.length
    shapes = {"q": (HEADS, q_len, DIM), "k": (GROUPS, kv_len, DIM), "v": (GROUPS, kv_len, VALUE_DIM), "grad": (HEADS, q_len, VALUE_DIM)}
    made = {name: torch.randn(BATCH, *shape, generator=generator) for name, shape in shapes.items()}
    return made | {"grad_lse": torch.randn(BATCH, HEADS, q_len, generator=generator)}


def dense(given: dict[str, Tensor], work: Work, mask: Mod, score: Mod | None, sink: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """out, lse, max scores; gradients of q, k, v and the score's tables, in float64 by autograd."""
    q, k, v = (given[name].double().requires_grad_() for name in "qkv")
    tables = [SLOPES.double().requires_grad_(), TABLE.double().requires_grad_()]
    b = torch.arange(BATCH).view(-1, 1, 1, 1) + work.first_batch
    h = torch.arange(HEADS).view(1, -1, 1, 1) + work.first_head
    at, to = (t.positions(torch.device("cpu")) for t in (work.q_tiles, work.kv_tiles))
    at, to = at.view(-1, 1), to
    scores = q @ k.repeat_interleave(HEADS // GROUPS, 1).mT * work.scale
    if score is not None:
        scores = scores - tables[0][h] * (at - to).abs() + tables[1][b + (at - to) % 5]
    scores = torch.where(mask(b, h, at, to).expand_as(scores), scores, -torch.inf)
    largest = scores.amax(-1)
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(1, -1, 1, 1).expand(BATCH, HEADS, scores.shape[2], 1)], -1)
    blind = (scores == -torch.inf).all(-1)
    lse = torch.where(blind, -torch.inf, scores.masked_fill(blind[..., None], 0.0).logsumexp(-1))
    weights = torch.where(scores == -torch.inf, 0.0, (scores - lse.masked_fill(blind, 0.0)[..., None]).exp())
    out = weights[..., : to.numel()] @ v.repeat_interleave(HEADS // GROUPS, 1)
    loss = (out * given["grad"]).sum() + (lse.masked_fill(blind, 0.0) * given["grad_lse"].masked_fill(blind, 0.0)).sum()
    wanted = [q, k, v] if score is None else [q, k, v, *tables]
    return [out.detach(), lse.detach(), largest.detach()], list(torch.autograd.grad(loss, wanted))


@pytest.mark.parametrize(
    ("segments", "mask", "score", "sink"),
    [
        (WHOLE, everything, None, False), (WHOLE, causal, None, True), (PARTS, by_head_and_batch, None, True),
        (PARTS, by_head_and_batch, None, False), (PARTS, by_head_and_batch, alibi, True), (WHOLE, everything, alibi, False),
    ],
)  # fmt: skip
def test_results_and_gradients_match_float64(segments: Any, mask: Mod, score: Mod | None, sink: bool) -> None:
    work = replace(work_of(mask, *segments, block=128, batch=BATCH, heads=HEADS, first=(1, 2)), first_batch=1, first_head=2, scale=0.4)
    if segments is WHOLE:
        work = replace(work, q_tiles=Tiling(length=140, block=128), kv_tiles=Tiling(length=140, block=128))
    if mask is everything:
        work = replace(work, mask=None, mask_captured=())
    if score is not None:
        slopes, table = SLOPES.clone().requires_grad_(), TABLE.clone().requires_grad_()
        traced = trace(lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs() + table[b + (q - kv) % 5], "score")
        work = replace(work, score=traced.program, score_captured=traced.captured(), joint=joint_of(traced.program))
    given = inputs_of(work)
    logits = torch.tensor([-1.0, -torch.inf, 0.5, 2.0]) if sink else None
    (out, lse, largest), want = dense(given, work, mask, score, logits)
    inputs = AttentionInputs(q=given["q"], k=given["k"], v=given["v"])
    state = None
    if logits is not None:
        state = State(out=torch.zeros(out.shape), lse=logits.view(1, -1, 1).expand(lse.shape).contiguous())
    got = InvariantTiles(inputs, work).forward(state, max_scores=True)
    assert got.max_scores is not None and got.out.dtype == got.lse.dtype == torch.float32
    for x, y in ((got.out, out), (got.lse, lse), (got.max_scores, largest)):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=2e-5)
    assert InvariantTiles(inputs, work).forward(state, max_scores=False).max_scores is None
    needs = [True] * len(work.score_captured)
    seen_lse = given["grad_lse"].masked_fill(got.lse == -torch.inf, 0.0)
    terms = BackwardInputs(inputs=inputs, out=got.out, lse=got.lse, grad_out=given["grad"], grad_lse=seen_lse, needs=needs)
    delta = row_delta(got.out, given["grad"], seen_lse)
    for tensors in (terms, replace(terms, delta=delta, grad_lse=None)):
        grads = InvariantTiles(inputs, work).backward(tensors, wide=False)
        made = [grads.q, grads.k, grads.v, *(g for g in grads.captured if g is not None)]
        for x, y in zip(made, want, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=2e-4)
    for side in ("q", "kv"):
        part = InvariantTiles(inputs, work).backward(replace(terms, side=side), wide=True)  # type: ignore[arg-type]
        pairs = list(zip((part.q, part.k, part.v), (grads.q, grads.k, grads.v), ("q", "kv", "kv"), strict=True))
        assert all(torch.equal(x, y if on == side else torch.zeros_like(y)) for x, y, on in pairs)
        assert [g is None for g in part.captured] == [side == "kv"] * len(needs)


def test_only_captured_tensors_that_need_gradients_get_them() -> None:
    work = work_of(causal, *WHOLE, block=128)
    traced = trace(alibi, "score")
    work = replace(work, score=traced.program, score_captured=traced.captured(), joint=joint_of(traced.program))
    given = inputs_of(work)
    inputs = AttentionInputs(q=given["q"], k=given["k"], v=given["v"])
    got = InvariantTiles(inputs, work).forward(None, max_scores=False)
    terms = BackwardInputs(inputs=inputs, out=got.out, lse=got.lse, grad_out=given["grad"])
    for needs in ([True, False], [False, True], []):
        grads = InvariantTiles(inputs, work).backward(replace(terms, needs=needs), wide=False)
        assert [g is not None for g in grads.captured] == (needs or [False, False])
        assert all(g is None or g.dtype == torch.float64 for g in grads.captured)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_of_results_and_gradients(dtype: torch.dtype) -> None:
    work = work_of(causal, *WHOLE, block=128)
    given = {name: t.to(dtype) for name, t in inputs_of(work).items()}
    inputs = AttentionInputs(q=given["q"].transpose(1, 2).contiguous().transpose(1, 2), k=given["k"], v=given["v"])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    got = InvariantTiles(inputs, work).forward(None, max_scores=True)
    assert got.max_scores is not None and (got.out.dtype, got.lse.dtype, got.max_scores.dtype) == (dtype, wide, wide)
    assert got.out.transpose(1, 2).is_contiguous(), "in the memory order of q"
    terms = BackwardInputs(inputs=inputs, out=got.out, lse=got.lse, grad_out=given["grad"])
    for is_wide in (False, True):
        grads = InvariantTiles(inputs, work).backward(terms, wide=is_wide)
        assert {g.dtype for g in (grads.q, grads.k, grads.v)} == {wide if is_wide else dtype}


def test_head_dims_are_padded_to_16_and_empty_tiles_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(invariant_tiles, "_invariant_product", lambda *args: asked.append(args) or invariant_tiles._bmm)
    work = work_of(causal, [(0, 300)], [(0, 300)], block=128, batch=BATCH, heads=HEADS)
    given = inputs_of(work)
    tiles = InvariantTiles(AttentionInputs(q=given["q"], k=given["k"], v=given["v"]), work)
    assert asked == [(torch.float32, 16, 32)], "head dims 5 and 19"
    computed: list[tuple[int, int]] = []
    scores = tiles._scores
    monkeypatch.setattr(tiles, "_scores", lambda rows, i, j: computed.append((i, j)) or scores(rows, i, j))
    tiles.forward(None, max_scores=False)
    assert computed == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]


def test_tiles_wider_than_a_block_raise() -> None:
    work = work_of(causal, [(0, 300)], [(0, 300)], block=256)
    given = inputs_of(work)
    with pytest.raises(AssertionError):
        InvariantTiles(AttentionInputs(q=given["q"], k=given["k"], v=given["v"]), work)


def test_sums_by_halves() -> None:
    for count in range(1, 20):
        x = torch.arange(3.0 * count).view(3, count) ** 2
        assert torch.equal(tree_sum(x), x.sum(-1, keepdim=True))
    # (a + c) + (b + d), and e at last: 1e8 hides ones that are added to it.
    assert tree_sum(torch.tensor([1e8, 1.0, -1e8, 1.0, 1.0])).item() == 3.0
    assert tree_sum(torch.tensor([1e8, 1.0, 1.0, 1.0, -1e8])).item() != 3.0
    out, grad, grad_lse = torch.tensor([[1.0, 2.0, 3.0]]).half(), torch.tensor([[4.0, 5.0, 6.0]]).half(), torch.tensor([10.0])
    assert row_delta(out, grad, None).tolist() == [32.0] and row_delta(out, grad, grad_lse).tolist() == [22.0]


def test_products_and_their_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    a, x = torch.randn(3, 128, 32, generator=generator), torch.randn(3, 32, 40, generator=generator)
    want = a.double() @ x.double()
    for product in (invariant_tiles._bmm, invariant_tiles._bmm_of_wider, invariant_tiles._sum_of_outer_products):
        got = product(a.mT.contiguous().mT, x)
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)
    asked: list[Any] = []

    def choice(*invariant: Any) -> Any:
        def is_invariant(one: Any, dtype: torch.dtype, width: int, threads: int) -> bool:
            asked.append((dtype, width))
            return (one, width) in invariant

        asked.clear()
        monkeypatch.setattr(invariant_tiles, "_is_invariant", is_invariant)
        return invariant_tiles._invariant_product(torch.float64, 16, 48)

    first, second = invariant_tiles._bmm, invariant_tiles._bmm_of_wider
    assert choice((first, 16), (first, 48)) is first and sorted(asked) == [(torch.float64, 16), (torch.float64, 48)]
    assert choice((first, 16), (second, 16), (second, 48)) is second
    assert choice((first, 48), (second, 16)) is invariant_tiles._sum_of_outer_products


def test_transposed_operands_are_multiplied_as_contiguous_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    product = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, x: given.extend((a, x)) or product(a, x))
    a, x = torch.randn(3, 32, 128), torch.randn(3, 40, 32)
    for product_of in (invariant_tiles._bmm, invariant_tiles._bmm_of_wider):
        product_of(a.mT, x.mT)
    assert len(given) == 4 and all(t.is_contiguous() for t in given)


def test_a_product_that_depends_on_places_is_not_invariant() -> None:
    check = invariant_tiles._is_invariant.__wrapped__
    exact = invariant_tiles._sum_of_outer_products
    assert check(exact, torch.float32, 16, 1)

    def by_row(a: Tensor, x: Tensor) -> Tensor:
        return exact(a, x) * torch.linspace(1, 2, a.shape[1])[:, None]

    def by_column(a: Tensor, x: Tensor) -> Tensor:
        return exact(a, x) * torch.linspace(1, 2, x.shape[2])

    def by_batch(a: Tensor, x: Tensor) -> Tensor:
        return exact(a, x) * torch.linspace(1, 2, len(a))[:, None, None]

    def by_row_of_sums(a: Tensor, x: Tensor) -> Tensor:
        return by_row(a, x) if a.shape[2] == 128 else exact(a, x)

    def by_batch_of_sums(a: Tensor, x: Tensor) -> Tensor:
        return by_batch(a, x) if a.shape[2] == 128 else exact(a, x)

    for product in (by_row, by_column, by_batch, by_row_of_sums, by_batch_of_sums):
        assert not check(product, torch.float32, 16, 1)
