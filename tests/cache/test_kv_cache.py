"""`KVCache`: pages, forks, steps, and the errors of wrong use."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._cache import kv_cache
from longspan._kernels.cpu import CpuKernel
from longspan.testing import oracle

HEADS, GROUPS, DIM = 4, 2, 16


def make_cache(**changes: Any) -> ls.KVCache:
    sizes = {"pages": 12, "page_size": 8, "layers": 1, "kv_heads": GROUPS, "head_dim": DIM, "dtype": torch.float32} | changes
    return ls.KVCache(**sizes)


def tokens(batch: int, count: int, seed: int = 0, **changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dim = changes.get("dim", DIM)
    q, k, v = (torch.randn(batch, heads, count, dim, generator=generator) for heads in (HEADS, GROUPS, GROUPS))
    return q, k, v


def extend(cache: ls.KVCache, ids: list[int], count: int, seed: int = 0) -> Tensor:
    """out [n, H, count, D] of new random tokens in every layer."""
    step = cache.step(ids, count)
    for layer in range(cache.layers):
        out = ls.attention(*tokens(len(ids), count, seed), cache=step, layer=layer, mask=ls.causal())
    return out


def test_decoding_token_by_token_equals_one_causal_call() -> None:
    cache, (q, k, v) = make_cache(), tokens(2, 20)
    ids = cache.allocate(2)
    outs = []
    for count in (9, 1, 1, 4, 5):
        at = sum(o.shape[2] for o in outs)
        part = (slice(None), slice(None), slice(at, at + count))
        outs.append(ls.attention(q[part], k[part], v[part], cache=cache.step(ids, count), layer=0, mask=ls.causal()))
    torch.testing.assert_close(torch.cat(outs, 2).double(), oracle(q, k, v, mask=ls.causal()), rtol=0, atol=1e-6)
    assert cache.lengths(ids).tolist() == [20, 20]


def test_positions_are_rows_for_one_count_and_flat_for_several() -> None:
    cache = make_cache()
    ids = cache.allocate(2)
    assert cache.step(ids, 2).positions.tolist() == [[0, 1], [0, 1]]
    assert cache.step(ids, [1, 3]).positions.tolist() == [[2, 2, 3, 4]]


def test_bits_are_equal_alone_batched_paged_otherwise_and_forked() -> None:
    q, k, v = tokens(3, 1300)
    last = tokens(3, 2, seed=1)

    def decoded(page_size: int, rows: list[int], *, fork: bool = False) -> Tensor:
        cache = make_cache(pages=4000 // page_size + 40, page_size=page_size)
        ids = cache.allocate(len(rows))
        ls.attention(q[rows], k[rows], v[rows], cache=cache.step(ids, 1300), layer=0, mask=ls.causal())
        if fork:
            ids = [cache.fork(i) for i in ids]
        return ls.attention(*(x[rows] for x in last), cache=cache.step(ids, 2), layer=0, mask=ls.causal())

    expected = decoded(64, [0, 1, 2])
    assert torch.equal(decoded(64, [1]), expected[1:2])
    assert torch.equal(decoded(16, [2, 0]), expected[[2, 0]])
    assert torch.equal(decoded(7, [0, 1, 2], fork=True), expected)


def test_forks_share_pages_until_one_writes() -> None:
    cache = make_cache()
    (parent,) = cache.allocate(1)
    extend(cache, [parent], 12)  # one full page, one of four tokens
    assert cache.free_pages == 10
    child = cache.fork(parent)
    assert cache.free_pages == 10
    extend(cache, [child], 1, seed=1)
    assert cache.free_pages == 9  # the page of four tokens was copied
    extend(cache, [parent], 1, seed=2)
    assert cache.free_pages == 9  # its other holder is alone with it
    cache.free([parent])
    assert cache.free_pages == 10
    cache.free(child)
    assert cache.free_pages == 12


def test_writing_to_a_fork_leaves_its_parent_unchanged() -> None:
    cache, other = make_cache(), make_cache()
    (parent,), (alone,) = cache.allocate(1), other.allocate(1)
    extend(cache, [parent], 12)
    extend(other, [alone], 12)
    extend(cache, [cache.fork(parent)], 3, seed=5)
    assert torch.equal(extend(cache, [parent], 2, seed=6), extend(other, [alone], 2, seed=6))


def test_truncated_tokens_are_forgotten() -> None:
    cache, other = make_cache(), make_cache()
    (a,), (b,) = cache.allocate(1), other.allocate(1)
    extend(cache, [a], 10)
    extend(other, [b], 10)
    extend(cache, [a], 9, seed=3)
    cache.truncate([a], 10)
    assert cache.lengths([a]).tolist() == [10] and cache.free_pages == other.free_pages
    assert torch.equal(extend(cache, [a], 2, seed=4), extend(other, [b], 2, seed=4))


def test_tokens_beyond_a_sequence_change_no_bit() -> None:
    cache, other = make_cache(), make_cache()
    cache._k.fill_(float("nan"))
    cache._v.fill_(float("inf"))
    assert torch.equal(extend(cache, cache.allocate(2), 5), extend(other, other.allocate(2), 5))


def test_a_window_reads_no_earlier_pages() -> None:
    cache = make_cache(pages=200)
    ids = cache.allocate(1)
    extend(cache, ids, 1100)
    page = cache.sequence(ids[0]).pages[0]
    cache._k[:, page], cache._v[:, page] = float("nan"), float("nan")
    out = ls.attention(*tokens(1, 1, seed=1), cache=cache.step(ids, 1), layer=0, mask=ls.causal() & ls.sliding_window(30))
    assert bool(out.isfinite().all())


def test_out_of_pages_raises_and_changes_nothing() -> None:
    cache = make_cache(pages=3)
    ids = cache.allocate(2)
    extend(cache, ids[:1], 10)
    with pytest.raises(RuntimeError, match=r"expected 3 free pages for 17 new tokens, got 1"):
        cache.step(ids, [8, 9])
    assert cache.free_pages == 1 and cache.lengths(ids).tolist() == [10, 0]
    extend(cache, ids[1:], 8)
    with pytest.raises(RuntimeError, match="free pages"):
        cache.step(cache.fork(ids[0]), 1)  # a copy of the shared page does not fit


@pytest.mark.parametrize("at", ["copy to the device", "copy of a page"])
def test_a_step_that_fails_changes_nothing_and_may_be_repeated(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(*, fails: bool) -> tuple[Tensor, int]:
        cache = make_cache(page_size=4)
        ids = cache.allocate(2)
        extend(cache, ids, 6)
        ids.append(cache.fork(ids[0]))
        extend(cache, ids, 2, seed=1)
        ids.append(cache.fork(ids[0]))
        cache.truncate(ids[-1:], 7)
        if fails:
            with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                if at == "copy to the device":
                    patch.setattr(kv_cache, "query_ranges", out_of_memory)
                else:
                    patch.setattr(cache, "_k", OutOfMemory(), raising=True)
                cache.step(ids, 1)
        out = extend(cache, ids, 1, seed=2)
        return out, cache.free_pages

    for got, expected in zip(decoded(fails=True), decoded(fails=False), strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected))


class OutOfMemory:
    """Pages of which no page can be read."""

    dtype = torch.float32

    def __getitem__(self, index: Any) -> Tensor:
        return out_of_memory()


def out_of_memory(*args: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


def test_a_step_with_one_count_of_any_integer_type_has_rows_of_positions() -> None:
    cache = make_cache()
    ids = cache.allocate(2)
    for count in (1, torch.tensor(1), numpy.int64(1)):
        assert cache.step(ids, count).positions.shape == (2, 1)


def test_handles_may_come_from_an_iterator() -> None:
    cache = make_cache()
    ids = cache.allocate(2)
    extend(cache, ids, 4)
    cache.truncate(iter(ids), [1, 2])
    assert cache.lengths(iter(ids)).tolist() == [1, 2]
    cache.free(iter(ids))
    assert cache.free_pages == cache.pages


def test_a_step_made_in_inference_mode_advances_outside_of_it() -> None:
    cache = make_cache()
    ids = cache.allocate(1)
    with torch.inference_mode():
        step = cache.step(ids, 1, longest=4)
        ls.attention(*tokens(1, 1), cache=step, layer=0, mask=ls.causal())
    step.advance()
    assert step.positions.tolist() == [[1]]


def test_rejects_freed_and_unknown_sequences() -> None:
    cache = make_cache()
    a, b = cache.allocate(2)
    step = cache.step([a, b], 1)
    cache.free(b)
    for use in (lambda: cache.step([a, b], 1), lambda: cache.fork(b), lambda: cache.truncate(b, 0), lambda: cache.free(b)):
        with pytest.raises(ValueError, match=f"sequence {b} was freed"):
            use()
    with pytest.raises(ValueError, match=f"sequence {b} was freed"):
        ls.attention(*tokens(2, 1), cache=step, layer=0)
    for unknown in (b + 1, 99):
        with pytest.raises(ValueError, match=f"no sequence has the handle {unknown}"):
            cache.lengths([unknown])
    with pytest.raises(ValueError, match="expected different sequences"):
        cache.step([a, a], 1)
    assert cache.allocate(1) == [2]  # handles are not used again


def test_rejects_steps_used_twice_or_out_of_order() -> None:
    cache = make_cache(layers=2)
    ids = cache.allocate(1)
    first, second = cache.step(ids, 1), cache.step(ids, 1)
    q, k, v = tokens(1, 1)
    with pytest.raises(RuntimeError, match=r"an earlier step of sequence 0 has not written layer 0"):
        ls.attention(q, k, v, cache=second, layer=0)
    ls.attention(q, k, v, cache=first, layer=0)
    with pytest.raises(RuntimeError, match="layer 0 of this step was computed before"):
        ls.attention(q, k, v, cache=first, layer=0)
    ls.attention(q, k, v, cache=first, layer=1)
    ls.attention(q, k, v, cache=second, layer=1)
    with pytest.raises(RuntimeError, match="ascending order, got layer 0 after layer 1"):
        ls.attention(q, k, v, cache=second, layer=0)
    with pytest.raises(RuntimeError, match="has not written all 2 layers"):
        cache.fork(ids[0])
    with pytest.raises(RuntimeError, match="has not written all 2 layers"):
        cache.truncate(ids, 2)
    cache.truncate(ids, 1)
    with pytest.raises(RuntimeError, match="sequence 0 was truncated after this step"):
        ls.attention(q, k, v, cache=second, layer=0)


def test_rejects_lengths_beyond_a_sequence() -> None:
    cache = make_cache()
    ids = cache.allocate(1)
    extend(cache, ids, 3)
    with pytest.raises(ValueError, match="at most the present length 3 of sequence 0, got 4"):
        cache.truncate(ids, 4)
    with pytest.raises(ValueError, match="expected an integer >= 0, got -1"):
        cache.truncate(ids, -1)
    with pytest.raises(ValueError, match="was made for 3 tokens, got a sequence of 4"):
        ls.attention(*tokens(1, 1), cache=cache.step(ids, 1), layer=0, mask=ls.documents([1, 2]))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"dtype": torch.float64}, TypeError, "expected torch.float32 on cpu as the cache has, got torch.float64"),
        ({"dim": 8}, ValueError, "expected 2 KV heads of dim 16"),
        ({"count": 2}, ValueError, r"q: expected the step's new tokens, \[2, heads, 1, head_dim\] or \[1, heads, 2, head_dim\]"),
        ({"layer": None}, TypeError, "expected the layer's number"),
        ({"layer": 1}, ValueError, "layer: expected 0 to 0, got 1"),
        ({"cache": "x"}, TypeError, "expected a step made by KVCache.step, got str"),
        ({"kernel": "flash"}, ValueError, "kernel 'flash' does not support cache=…"),
        ({"grad": True}, RuntimeError, "has no gradients"),
        ({"plan": "x"}, ValueError, "either plan=… or cache=…"),
    ],
)
def test_rejects_arguments_that_do_not_fit_and_writes_nothing(change: dict[str, Any], error: type[Exception], match: str) -> None:
    cache = make_cache()
    before = cache._k.fill_(7.0).clone()
    options: dict[str, Any] = {"cache": cache.step(cache.allocate(2), 1), "layer": 0}
    options |= {name: value for name, value in change.items() if name in ("layer", "cache", "kernel", "plan")}
    q, k, v = (x.to(change.get("dtype", torch.float32)) for x in tokens(2, change.get("count", 1), dim=change.get("dim", DIM)))
    with pytest.raises(error, match=match):
        ls.attention(q.requires_grad_(change.get("grad", False)), k, v, **options)
    assert torch.equal(cache._k, before)


def test_rejects_a_layer_without_a_cache_and_wrong_sizes() -> None:
    with pytest.raises(ValueError, match="expected None without cache"):
        ls.attention(*tokens(1, 1), layer=0)
    with pytest.raises(ValueError, match="pages: expected an integer >= 1, got 0"):
        make_cache(pages=0)
    with pytest.raises(ValueError, match=r"dtype: expected one of .*, got torch.int8"):
        make_cache(dtype=torch.int8)
    with pytest.raises(ValueError, match="one for each of the 2 sequences, got 3"):
        cache = make_cache()
        cache.step(cache.allocate(2), [1, 2, 3])


def test_supports_inference_mode_and_autocast() -> None:
    with torch.inference_mode():
        cache = make_cache()
        ids = cache.allocate(1)
        inside = extend(cache, ids, 3)
    other = make_cache()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outside = extend(other, other.allocate(1), 3)
    assert torch.equal(inside, outside)
    extend(cache, ids, 1)  # a cache made in inference mode is writable outside of it


def test_layers_with_other_numbers_of_heads_share_no_tiles() -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & ((h >= 4) | (kv < 64)))
    cache = ls.KVCache(pages=4, layers=2, kv_heads=2, head_dim=8, dtype=torch.float64)
    step = cache.step(cache.allocate(1), 130)
    for layer, heads in enumerate((4, 8)):
        q, k, v = (torch.randn(1, n, 130, 8, dtype=torch.float64) for n in (heads, 2, 2))
        out = ls.attention(q, k, v, cache=step, layer=layer, mask=mask)
        torch.testing.assert_close(out, ls.attention(q, k, v, mask=mask, kernel="dense"))


@pytest.mark.parametrize("preferred", [(128, 128), (64, 32)])
def test_a_chunk_of_queries_has_tiles_of_the_size_that_its_kernel_prefers(
    preferred: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, forward = [], CpuKernel.forward

    def record(self: CpuKernel, inputs: Any, work: Any, **options: Any) -> Any:
        blocks.append(work.table.block)
        return forward(self, inputs, work, **options)

    monkeypatch.setattr(CpuKernel, "block_size", lambda self, inputs, table: preferred)
    monkeypatch.setattr(CpuKernel, "forward", record)
    cache, (q, k, v) = make_cache(pages=20), tokens(1, 150)
    out = ls.attention(q, k, v, cache=cache.step(cache.allocate(1), 150), layer=0, mask=ls.causal(), kernel="cpu")
    torch.testing.assert_close(out.double(), oracle(q, k, v, mask=ls.causal()), rtol=0, atol=1e-6)
    assert blocks == [preferred]


def test_layers_whose_masks_have_equal_programs_but_other_windows() -> None:
    """One mask is known to be a window, the other is not: their chunks gather different tokens."""
    window = ls.causal() & ls.sliding_window(50)
    hidden = ls.mask_mod(lambda b, h, q, kv: window(b, h, q, kv))
    assert window.traced.program.key == hidden.traced.program.key and hidden.left_reach is None
    (q, k, v), expected = tokens(1, 800), oracle(*tokens(1, 800), mask=window)
    for masks in ((window, hidden), (hidden, window)):
        cache = make_cache(pages=120, layers=2)
        ids = cache.allocate(1)
        for start, stop in ((0, 600), (600, 800)):
            step, part = cache.step(ids, stop - start), (slice(None), slice(None), slice(start, stop))
            outs = [ls.attention(q[part], k[part], v[part], cache=step, layer=i, mask=mask) for i, mask in enumerate(masks)]
        for out in outs:
            torch.testing.assert_close(out.double(), expected[:, :, 600:], rtol=0, atol=1e-6)


def test_missing_pages_are_those_that_a_step_lacks() -> None:
    """9 pages of 8 tokens: 20 and 5 tokens take 4 of them."""
    cache = make_cache(pages=9)
    ids = cache.allocate(2)
    cache.step(ids, [20, 5])
    assert [cache.missing_pages(ids, counts) for counts in ([4, 3], [28, 16], [28, 24], [29, 24], [60, 24])] == [0, 0, 1, 2, 5]


def saved(cache: ls.KVCache) -> ls.KVCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), saved])
@pytest.mark.parametrize("shared_kv", [False, True])
def test_a_copy_has_pages_addresses_and_sequences_of_its_own(copied: Callable[[ls.KVCache], ls.KVCache], shared_kv: bool) -> None:
    cache = make_cache(layers=2, value_dim=DIM - 5 if shared_kv else DIM, shared_kv=shared_kv)
    q, k, v = tokens(1, 17)
    v = k[..., : DIM - 5] if shared_kv else v

    def attend(target: ls.KVCache, first: int, last: int) -> Tensor:
        step, part = target.step([0], last - first), (slice(None), slice(None), slice(first, last))
        outs = [ls.attention(q[part], k[part], v[part], cache=step, layer=layer, mask=ls.causal()) for layer in range(2)]
        return torch.stack(outs)

    cache.allocate(1)
    attend(cache, 0, 11)
    cache.prepared["a launch"] = cache.addresses
    with torch.inference_mode():
        other = copied(cache)
    assert not other.prepared and not other._k.is_inference()
    for layer in range(2):
        pages = other.layer_pages(layer)
        assert other.layer_addresses(layer) == (pages.k.data_ptr(), pages.v.data_ptr())
    assert not set(other.addresses) & set(cache.addresses) and (other.addresses[0] == other.addresses[1]) == shared_kv
    before = cache._k.clone()
    first = attend(other, 11, 17)
    assert cache.lengths([0]).tolist() == [11] and torch.equal(cache._k.nan_to_num(), before.nan_to_num())
    assert torch.equal(attend(cache, 11, 17), first)


def test_a_copied_step_belongs_to_a_copied_cache() -> None:
    cache = make_cache()
    step = cache.step(cache.allocate(1), 3)
    step.last_call, step.prepared_calls()["a call"] = "a launch", "a launch"
    other, its_step = copy.deepcopy((cache, step))
    assert its_step.cache is other and its_step.last_call is None and not its_step.prepared_calls()
    q, k, v = tokens(1, 3)
    step.last_call = None
    want = ls.attention(q, k, v, cache=step, layer=0, mask=ls.causal())
    assert torch.equal(ls.attention(q, k, v, cache=its_step, layer=0, mask=ls.causal()), want)


def test_a_shallow_copy_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected copy\.deepcopy of a KVCache"):
        copy.copy(make_cache())
