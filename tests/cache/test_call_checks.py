"""Argument checks of cached attention calls: mask extents, gradients, CUDA graph capture, unmasked steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cache.test_kv_cache import make_cache, tokens
from torch.nn.attention.flex_attention import create_block_mask

import longspan as ls
from longspan._engine import cached
from longspan._engine.cached import CachedCall, _check_captured, _checked
from longspan._kernels.paged import FEW_QUERIES, PagedWork
from longspan._kernels.registry import NotSupported
from longspan.testing import virtual_world

CAUSAL = ls.causal()


def work(counts: Any = 1, *, before: int = 0, options: dict[str, Any] | None = None, **call: Any) -> PagedWork:
    """The checked programs of a call with two sequences. options: of the cache."""
    cache = make_cache(pages=40, **(options or {}))
    ids = cache.allocate(2)
    if before:
        ls.attention(*tokens(2, before), cache=cache.step(ids, before), layer=0, mask=call.get("mask"))
    ragged = isinstance(counts, list)
    q, k, v = tokens(1 if ragged else 2, sum(counts) if ragged else counts)
    layer, checked = _checked(q, k, v, CachedCall(step=cache.step(ids, counts), layer=0, **call))
    assert layer == 0
    return checked


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (None, "all tokens"),
        (CAUSAL, "all tokens"),
        (CAUSAL & ls.sliding_window(6), "6 tokens back"),
        (CAUSAL & ls.sliding_window(7), "7 tokens back"),
    ],
    ids=str,
)
def test_a_mask_must_not_see_further_back_than_the_window_of_the_cache(mask: Any, seen: str) -> None:
    with pytest.raises(ValueError, match=f"a window of at most 5 tokens as the cache holds, got a mask that sees {seen}; combine"):
        work(mask=mask, options={"window": 5})


@pytest.mark.parametrize("width", [1, 4, 5])
def test_a_mask_may_see_as_far_as_the_window_of_the_cache(width: int) -> None:
    assert work(mask=CAUSAL & ls.sliding_window(width), options={"window": 5}).window == width
    assert work(mask=CAUSAL & ls.sliding_window(width + 30)).window == width + 30 and work().window is None


def test_the_last_token_of_a_sequence_needs_no_causal_mask() -> None:
    assert work(mask=CAUSAL).mask is None and work([1, 1], mask=CAUSAL).mask is None and work([0, 1], mask=CAUSAL).mask is None
    assert work(2, mask=CAUSAL).mask is not None and work([1, 2], mask=CAUSAL).mask is not None
    assert work(mask=CAUSAL & ls.sliding_window(3)).mask is not None and work(mask=ls.full()).mask is None


def test_a_mask_must_be_made_for_the_heads_and_sequences_of_the_call() -> None:
    def mask_of(heads: int, batch: int = 1) -> Any:
        table = torch.ones(batch, heads, dtype=torch.bool)
        mod = lambda b, h, q, kv: (q >= kv) & table[b if batch > 1 else 0, h if heads > 1 else 0]
        return create_block_mask(mod, batch, heads, 12, 12, device="cpu", BLOCK_SIZE=4)

    for heads, batch in ((4, 1), (1, 1), (4, 2)):
        assert work(3, mask=mask_of(heads, batch)).mask is not None
    with pytest.raises(ValueError, match="heads=3, got heads=4"):
        work(3, mask=mask_of(3))
    with pytest.raises(ValueError, match="batch=3, got batch=2"):
        work(3, mask=mask_of(1, 3))


def test_a_mask_may_be_made_for_as_many_tokens_as_a_sequence_has() -> None:
    mask = ls.documents([2, 3])
    assert work(1, before=4, mask=mask).mask is not None
    with pytest.raises(ValueError, match="was made for 5 tokens, got a sequence of 6"):
        work(2, before=4, mask=mask)


@pytest.mark.parametrize("name", ["q", "k", "v", "sink", "table"])
def test_one_tensor_that_requires_gradients_is_enough_to_raise(name: str) -> None:
    q, k, v = tokens(2, 1)
    given = {"q": q, "k": k, "v": v, "sink": torch.zeros(4), "table": torch.linspace(-1.0, 1.0, 4)}
    given[name].requires_grad_()
    table = given["table"]
    cache = make_cache()
    step = cache.step(cache.allocate(2), 1)
    call = CachedCall(step=step, layer=0, sink=given["sink"], score_mod=lambda s, b, h, q, kv: s + table[h])
    with pytest.raises(RuntimeError, match="attention over a cache has no gradients"):
        _checked(given["q"], given["k"], given["v"], call)
    with torch.no_grad():
        out = ls.attention(given["q"], given["k"], given["v"], cache=step, layer=0, sink=given["sink"], score_mod=call.score_mod)
    assert out.shape == q.shape and not out.requires_grad


def test_a_captured_step_can_advance_and_has_few_new_tokens() -> None:
    def check(counts: Any, *, longest: int | None = 90, mesh: ls.Mesh | None = None) -> None:
        cache = make_cache(pages=40, mesh=mesh)
        _check_captured(cache.step(cache.allocate(2), counts, longest=longest))

    check(1)
    check(FEW_QUERIES)
    check([1, FEW_QUERIES])
    with pytest.raises(RuntimeError, match=r"made with KVCache.step\(…, longest=…\) in a CUDA graph"):
        check(1, longest=None)
    for counts in (FEW_QUERIES + 1, [1, FEW_QUERIES + 1]):
        with pytest.raises(RuntimeError, match=f"at most {FEW_QUERIES} new tokens per sequence and no mesh"):
            check(counts)

    def over_mesh(mesh: ls.Mesh) -> str:
        with pytest.raises(RuntimeError) as caught:
            check(1, mesh=mesh)
        return str(caught.value)

    assert all("and no mesh in a CUDA graph" in message for message in virtual_world(2).run(over_mesh))


@pytest.mark.parametrize("counts", [3, 40, [1, 30]], ids=str)
def test_without_gradients_every_tensor_may_require_them(counts: Any) -> None:
    """Parameters of a model in `torch.no_grad()`: the results are those of plain tensors, and hold no graph."""
    ragged = isinstance(counts, list)
    plain = tokens(1 if ragged else 2, sum(counts) if ragged else counts)
    limit, bias, sink = torch.tensor(25.5), torch.randn(4, generator=torch.Generator().manual_seed(1)), torch.ones(4)

    def results(grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, low, added, logits = (t.clone().requires_grad_(grad) for t in (*plain, limit, bias, sink))
        cache = make_cache(pages=40)
        step = cache.step(cache.allocate(2), counts)
        return ls.attention(
            q, k, v, cache=step, layer=0, mask=CAUSAL & ls.mask_mod(lambda b, h, i, j: j < low), sink=logits, return_lse=True,
            score_mod=lambda s, b, h, i, j: s + added[h],
        )  # fmt: skip

    with torch.no_grad():
        got = results(True)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(got, results(False), strict=True))


@pytest.mark.parametrize(("count", "gathered"), [(FEW_QUERIES, False), (FEW_QUERIES + 1, True)])
def test_pages_are_gathered_for_more_than_a_few_queries(count: int, gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a mesh, KV is passed instead of partial results, where it is fewer bytes."""
    chunks: list[int] = []
    attend = cached.attend_chunk
    monkeypatch.setattr(cached, "attend_chunk", lambda *args: (chunks.append(1), attend(*args))[1])
    cache, (q, k, v) = make_cache(pages=40), tokens(1, count)
    ls.attention(q, k, v, cache=cache.step(cache.allocate(1), count), layer=0, mask=CAUSAL)
    assert bool(chunks) == gathered

    def run(mesh: ls.Mesh) -> dict[int, str]:
        cache = make_cache(mesh=mesh, pages=40)
        step = cache.step(cache.allocate(1), count)
        ls.attention(q, k, v, cache=step, layer=0, mask=CAUSAL)
        return step.passed

    assert virtual_world(2).run(run) == [{0: "KV" if gathered else "partial results"}] * 2


def test_tritons_kernel_writes_and_decodes_on_the_cpu_where_it_is_named() -> None:
    pytest.importorskip("triton")
    cache = make_cache()
    step, (q, _, v) = cache.step(cache.allocate(2), 1), tokens(2, 1)
    plain = PagedWork(scale=0.25, mask=None, mask_captured=[], score=None, score_captured=[], sink=None, window=None)
    assert [cached._decodes_by_kernel(q, v, step, plain, kernel) for kernel in ("cpu", "auto", "triton")] == [False, False, True]
    with pytest.raises(NotSupported, match=r"kernel 'triton' does not support this call: .*kernel='auto' picks one that does"):
        cached._decodes_by_kernel(q.double(), v.double(), step, plain, "triton")
