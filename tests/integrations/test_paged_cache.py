"""`PagedCache` by itself: columns, padding, pages and rows of small caches, without a model; and the parts of its attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import Gemma2Config, LlamaConfig

from longspan._engine.cached import write_cached
from longspan.integrations import _paged_attention, _paged_cache
from longspan.integrations._forward import Forward, in_forward
from longspan.integrations._model_mask import ModelMask
from longspan.integrations._paged_attention import _checked_padding, _mask_of, _ragged, _with_padding, absorbed
from longspan.integrations._paged_cache import PagedCache, PendingUpdate, _layer_windows, _tokens_digest, take_update
from longspan.testing import virtual_world

HEADS, DIM, VALUE_DIM = 2, 3, 5
SIZES = {"hidden_size": 12, "intermediate_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 9}
LLAMA = LlamaConfig(**SIZES, num_hidden_layers=2, attn_implementation="longspan")
GEMMA = Gemma2Config(
    **SIZES, num_hidden_layers=3, sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    attn_implementation="longspan",
)  # fmt: skip


def forward(cache: PagedCache, rows: int, count: int, real: Tensor | None = None, layers: int | None = None) -> list[tuple[Any, int, Any]]:
    """The steps of a forward of so many layers, all by default, which write zeros."""
    k, v = torch.zeros(rows, HEADS, count, DIM), torch.zeros(rows, HEADS, count, VALUE_DIM)
    steps = []
    for i in range(len(cache.layers) if layers is None else layers):
        step, index, new = cache.step_for(i, k, v, real)
        if cache.mesh is None:
            write_cached(*((k, v) if new is None else (_ragged(x, new.flatten().nonzero().flatten()) for x in (k, v))), step, index)
        steps.append((step, index, new))
    return steps


def lengths(cache: PagedCache, window: int | None = None) -> list[int]:
    group = cache._groups[window]
    return [] if group.cache is None or not group.ids else list(group.cache.lengths(group.ids))


def test_layers_of_a_window_share_a_cache_and_a_step() -> None:
    cache = PagedCache(GEMMA, page_size=4)
    assert cache.windows == [5, None, 5] and [layer.is_sliding for layer in cache.layers] == [True, False, True]
    assert [layer.index for layer in cache.layers] == [0, 1, 2] and cache.free_pages == 0
    steps = forward(cache, 3, 7)
    assert [index for _, index, _ in steps] == [0, 0, 1] and steps[0][0] is steps[2][0] is not steps[1][0]
    assert all(new is None for _, _, new in steps) and lengths(cache) == lengths(cache, 5) == [7, 7, 7]
    made = [cache._groups[window].cache for window in (None, 5)]
    assert [(c.layers, c.kv_heads, c.head_dim, c.value_dim, c.page_size, c.window) for c in made] == [
        (1, HEADS, DIM, VALUE_DIM, 4, None), (2, HEADS, DIM, VALUE_DIM, 4, 5)
    ]  # fmt: skip
    assert [c.pages for c in made] == [64, 64] and cache.free_pages == 2 * (64 - 3 * 2)
    assert cache.columns == cache.get_seq_length() == 7
    for layer in cache.layers:
        assert layer.get_mask_sizes(2) == (9, 0) and layer.get_seq_length() == 7 and layer.get_max_length() == -1
        assert layer.is_croppable and not layer.supports_early_init


def test_rows_hold_the_columns_that_are_not_padding() -> None:
    cache = PagedCache(LLAMA, page_size=4)
    first = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    assert forward(cache, 3, 5, first)[1][2].tolist() == first.tolist() and lengths(cache) == [3, 4, 5]
    second = torch.cat([first, torch.tensor([[1, 0], [1, 1], [1, 1]]).bool()], 1)
    assert forward(cache, 3, 2, second)[0][2].tolist() == [[True, False], [True, True], [True, True]] and lengths(cache) == [4, 6, 7]
    third = torch.cat([second, torch.ones(3, 1, dtype=torch.bool)], 1)
    assert forward(cache, 3, 1, third)[0][2] is None and lengths(cache) == [5, 7, 8] and cache.columns == 8
    for wrong, message in (
        (None, "of all 8 earlier and 2 new columns, got none"),
        (torch.ones(3, 9, dtype=torch.bool), "earlier and 2 new columns, got 9 columns"),
        (torch.ones(3, 10, dtype=torch.bool), "other padding"),
        (torch.cat([third[:, :7], torch.tensor([[0], [1], [1]]).bool(), torch.ones(3, 2).bool()], 1), "other padding"),
    ):
        with pytest.raises(ValueError, match=message):
            forward(cache, 3, 2, wrong)
    with pytest.raises(ValueError, match="expected 3 batch rows as this cache holds, got 2"):
        forward(cache, 2, 1)
    cache.crop(-2)
    assert lengths(cache) == [4, 5, 6] and cache.columns == 6
    cache.crop(0)
    cache.crop(-4)
    assert lengths(cache) == [0, 1, 2] and cache.columns == 2
    forward(cache, 3, 1, torch.cat([first[:, :2], torch.ones(3, 1).bool()], 1))
    assert lengths(cache) == [1, 2, 3]


def test_columns_without_padding_are_one_range() -> None:
    assert PagedCache(LLAMA)._page_size == 64
    cache = PagedCache(LLAMA, page_size=4)
    for count in (3, 1, 2):
        forward(cache, 2, count)
    assert cache._columns == [(6, None)]
    real = torch.ones(2, 8, dtype=torch.bool)
    forward(cache, 2, 2, real)
    assert cache._columns == [(8, None)]
    real = torch.cat([real, torch.tensor([[0], [1]]).bool()], 1)
    forward(cache, 2, 1, real)
    forward(cache, 2, 1, torch.cat([real, torch.ones(2, 1).bool()], 1))
    assert [(n, None if r is None else r.tolist()) for n, r in cache._columns] == [(8, None), (1, [[False], [True]]), (1, None)]
    assert lengths(cache) == [9, 10]


def test_only_complete_forwards_may_be_cropped_or_reordered() -> None:
    cache = PagedCache(GEMMA, page_size=4)
    forward(cache, 2, 3)
    for wrong, message in ((1, "as a negative number, got 1"), (-4, "expected to remove at most 3 tokens, got 4")):
        with pytest.raises(ValueError, match=message):
            cache.crop(wrong)
    cache.crop(-3)
    assert cache.columns == 0 and lengths(cache) == [0, 0]
    forward(cache, 2, 3)
    forward(cache, 2, 1, layers=1)
    for call, name in ((lambda: cache.crop(-1), "crop"), (lambda: cache.batch_select_indices(torch.tensor([0])), "batch_select_indices")):
        with pytest.raises(RuntimeError, match=f"{name}: the last forward ended before layer 1"):
            call()
    with pytest.raises(RuntimeError, match=r"ended before layer 1; call cache\.reset\(\)"):
        cache.step_for(0, torch.zeros(2, HEADS, 1, DIM), torch.zeros(2, HEADS, 1, VALUE_DIM), None)
    cache.undo_forward(3)
    assert cache.columns == 3 and lengths(cache) == lengths(cache, 5) == [3, 3]
    cache.crop(-1)
    assert lengths(cache) == [2, 2]
    cache.undo_forward(0)
    assert cache.columns == 0 and lengths(cache) == [] and cache.free_pages == 128


def test_a_forward_that_cannot_be_undone_blocks_the_cache_until_reset() -> None:
    cache = PagedCache(GEMMA, page_size=2)
    for count in (9, 9, 9):
        forward(cache, 1, count)
    cache.undo_forward(3)  # the window before column 3 was given back
    with pytest.raises(RuntimeError, match="ended before layer 3"):
        forward(cache, 1, 1)
    cache.reset()
    forward(cache, 1, 1)
    assert lengths(cache) == lengths(cache, 5) == [1]


def test_rows_are_chosen_and_repeated_as_forks() -> None:
    cache = PagedCache(LLAMA, page_size=4)
    real = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
    forward(cache, 3, 3, real)
    cache.batch_select_indices(torch.tensor([2, 0, 2, 1]))
    assert lengths(cache) == [3, 1, 3, 2] and cache._columns[0][1].tolist() == real[[2, 0, 2, 1]].tolist()
    cache.reorder_cache(torch.tensor([1, 0, 3, 2]))
    assert lengths(cache) == [1, 3, 2, 3] and cache._groups[None].step is None
    cache.batch_select_indices(torch.tensor([True, False, True, False]))
    assert lengths(cache) == [1, 2]
    cache.batch_repeat_interleave(2)
    assert lengths(cache) == [1, 1, 2, 2]
    assert cache.free_pages == 64 - 2  # forks share pages
    forward(cache, 4, 1, torch.cat([real[[0, 0, 1, 1]], torch.ones(4, 1).bool()], 1))
    assert lengths(cache) == [2, 2, 3, 3]
    cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
    assert lengths(cache) == [] and cache.columns == 0 and cache.free_pages == 64
    cache.batch_repeat_interleave(3)
    assert cache.columns == 0


def test_numbers_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def pages(cache: PagedCache) -> int:
        made = cache._groups[None].cache
        assert made is not None
        return int(made.pages)

    fixed = PagedCache(LLAMA, max_tokens=9, page_size=4)
    forward(fixed, 3, 2)
    assert pages(fixed) == 3 + 2 * 3

    def rank(mesh: Any) -> int:
        cache = PagedCache(LLAMA, max_tokens=9, page_size=4, mesh=mesh)
        forward(cache, 3, 2)
        return pages(cache)

    assert virtual_world(2).run(rank) == [2 + 2 * 3] * 2
    monkeypatch.setattr(_paged_cache, "_FIRST_PAGES", 2)
    growing = PagedCache(LLAMA, page_size=2)
    for count, want in ((2, 2), (1, 4), (1, 4), (1, 8), (25, 30)):
        forward(growing, 2, count)
        assert pages(growing) == want, count
    growing.reset()
    assert growing.free_pages == 30
    short = PagedCache(LLAMA, max_tokens=4, page_size=2)
    with pytest.raises(RuntimeError, match="page"):
        forward(short, 1, 100)


def test_a_reset_over_a_mesh_makes_new_caches() -> None:
    def rank(mesh: Any) -> tuple[bool, list[int]]:
        cache = PagedCache(LLAMA, page_size=4, mesh=mesh)
        forward(cache, 2, 3)
        before = cache._groups[None].cache
        cache.reset()
        forward(cache, 1, 5)
        return cache._groups[None].cache is before, lengths(cache)

    assert virtual_world(2).run(rank) == [(False, [5])] * 2
    one = PagedCache(LLAMA, page_size=4)
    forward(one, 2, 3)
    before = one._groups[None].cache
    one.reset()
    forward(one, 1, 5)
    assert one._groups[None].cache is before and lengths(one) == [5]


def test_an_update_waits_for_the_attention_of_its_layer_once() -> None:
    cache = PagedCache(LLAMA)
    k, v = torch.zeros(1, HEADS, 1, DIM), torch.ones(1, HEADS, 1, VALUE_DIM)
    assert take_update() is None
    with pytest.raises(RuntimeError, match="got a call outside of a forward"):
        cache.layers[1].update(k, v)
    with in_forward(Forward(None)):
        assert take_update() is None
        got = cache.layers[1].update(k, v)
        assert got[0] is k and got[1] is v
        with pytest.raises(RuntimeError, match="layer 1 updated a PagedCache, but its attention did not run by longspan"):
            cache.layers[0].update(k, v)
        update = take_update()
        assert update is not None and (update.cache, update.layer) == (cache, 1) and update.k is k and update.v is v
        assert take_update() is None


def test_ranks_compare_the_tokens_of_a_forward() -> None:
    def digest(tokens: Any) -> str:
        forward = Forward(None)
        forward.tokens = tokens
        with in_forward(forward):
            return _tokens_digest()

    ids = torch.tensor([[1, 2, 3, 4]])
    assert _tokens_digest() == digest(None) == digest([1, 2]) == digest(ids.float()) == ""
    assert digest(ids) == digest(ids.clone()) and len(digest(ids)) == 16
    assert len({digest(ids), digest(ids.view(4, 1)), digest(ids + 1)}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_layers": ["global", "local"]}, "got local attention layers of LlamaConfig"),
        ({"num_kv_shared_layers": 2}, "got num_kv_shared_layers=2 in LlamaConfig"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "got 'chunked_attention' in LlamaConfig"),
    ],
)
def test_layers_that_pages_cannot_hold_raise(change: dict[str, Any], message: str) -> None:
    config = LlamaConfig(**SIZES, num_hidden_layers=2, sliding_window=3, attention_chunk_size=4)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        _layer_windows(config)


def test_windows_of_layers() -> None:
    assert _layer_windows(LLAMA) == [None, None] and _layer_windows(GEMMA) == [5, None, 5]
    other = LlamaConfig(**SIZES, num_hidden_layers=2)
    other.attention_layers, other.num_kv_shared_layers = ["global", "global"], 0
    assert _layer_windows(other) == [None, None]


# ---------------------------------------------------------------------------------------------------------------------- attention


def update_of(layer: int = 0, **sizes: Any) -> PendingUpdate:
    k, v = torch.zeros(1, HEADS, 1, DIM), torch.zeros(1, HEADS, 1, VALUE_DIM)
    return PendingUpdate(PagedCache(GEMMA), layer, sizes.get("k", k), sizes.get("v", v))


def layer_of(**attributes: Any) -> Any:
    layer = nn.Module()
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def test_masks_that_pages_cover() -> None:
    real = torch.tensor([[0, 1]]).bool()
    for layer, window in ((0, 5), (1, None)):
        assert _checked_padding(update_of(layer), layer_of(), ModelMask(mask=None, window=window)) is None
        mask = ModelMask(mask=None, window=window, padding_mask=real)
        assert _checked_padding(update_of(layer), layer_of(layer_idx=layer, is_causal=True), mask) is real
    for layer, module, mask, message in (
        (0, layer_of(layer_idx=1), ModelMask(mask=None, window=5), "expected attention of layer 0 after its cache update, got that of 1"),
        (0, layer_of(), None, "got attention_mask of type NoneType"),
        (0, layer_of(), ModelMask(mask=None, window=5, foreign="own"), "causal mask with a PagedCache, got 'own'"),
        (0, layer_of(is_causal=False), ModelMask(mask=None, window=5), "got 'a layer that is not causal'"),
        (0, layer_of(), ModelMask(mask=None), "the window 5 of layer 0 as the PagedCache has, got a mask with the window None"),
        (1, layer_of(), ModelMask(mask=None, window=5), "the window None of layer 1 .* the window 5"),
    ):
        with pytest.raises(ValueError, match=message):
            _checked_padding(update_of(layer), module, mask)


def test_columns_that_are_tokens_are_packed_and_put_back() -> None:
    x = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    columns = torch.tensor([1, 2, 3, 4, 7])  # of row 0 three, of row 1 the first and the last
    packed = _ragged(x, columns)
    assert packed.shape == (1, 3, 5, 5)
    assert torch.equal(packed[0], torch.cat([x[0, :, 1:], x[1, :, :1], x[1, :, 3:]], 1))
    want = x.clone()
    want[0, :, 0], want[1, :, 1:3] = 0, 0
    assert torch.equal(_with_padding(packed, columns, 2, 4), want)


def test_masks_of_paged_layers_are_causal_or_windows() -> None:
    q, kv, zero = torch.arange(4)[:, None], torch.arange(4), torch.zeros((), dtype=torch.int64)
    assert torch.equal(_mask_of(None)(zero, zero, q, kv), q >= kv)
    assert torch.equal(_mask_of(2)(zero, zero, q, kv), (q >= kv) & (q - kv < 2))


class Latent(nn.Module):
    """Multi-head latent attention: 3 heads, 4 dims without rotary embedding, 2 with it, 5 of values, 6 of latent vectors."""

    kv_lora_rank, qk_nope_head_dim, v_head_dim = 6, 4, 5

    def __init__(self, up: nn.Module | None = None) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(6, 3 * (4 + 5), bias=False, dtype=torch.float64) if up is None else up

    def expand_kv(self) -> None: ...


def latent_case(rows: int = 2, count: int = 7) -> tuple[Latent, Tensor, Tensor, Tensor]:
    """(layer, q [B, 3, n, 4 + 2], latent vectors [B, 1, n, 6], rotary parts [B, 1, n, 2])."""
    generator = torch.Generator().manual_seed(3)
    q, latent, rotary = (
        torch.randn(rows, heads, count, dim, generator=generator, dtype=torch.float64) for heads, dim in ((3, 6), (1, 6), (1, 2))
    )
    return Latent(), q, latent, rotary


def expanded(layer: Latent, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, 3, n, 4 + 2] and values [B, 3, n, 5] by head."""
    both = layer.kv_b_proj(latent[:, 0]).unflatten(-1, (3, 9)).transpose(1, 2)
    return torch.cat([both[..., :4], rotary.expand(-1, 3, -1, -1)], -1), both[..., 4:]


def test_latent_attention_in_absorbed_form() -> None:
    layer, q, latent, rotary = latent_case()
    inputs = absorbed(layer, q, update_of(k=latent, v=rotary))
    assert inputs.q.shape == (2, 3, 7, 8) and inputs.k.shape == (2, 1, 7, 8) and inputs.v.shape == (2, 1, 7, 6)
    key, value = expanded(layer, latent, rotary)
    scores, want = inputs.q @ inputs.k.transpose(2, 3), q @ key.transpose(2, 3)
    torch.testing.assert_close(scores, want)
    torch.testing.assert_close(inputs.restore(want.softmax(-1) @ inputs.v), want.softmax(-1) @ value)
    narrow = absorbed(layer, q.float(), update_of(k=latent, v=rotary))
    assert narrow.q.dtype == narrow.k.dtype == torch.float32


@torch.no_grad()
def test_rows_with_padding_attend_to_their_own_tokens() -> None:
    """A chunk of five columns and one of two, with padding in both, against a softmax over the tokens of each row."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, heads, 7, dim, generator=generator, dtype=torch.float64) for heads, dim in ((4, 3), (2, 3), (2, 5)))
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()
    seen = real[:, None, None] & real[:, None, :, None] & torch.ones(7, 7, dtype=torch.bool).tril()
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3)).masked_fill(~seen, -torch.inf)
    want = (scores.softmax(-1).nan_to_num() @ v.repeat_interleave(2, 1)).transpose(1, 2)
    cache, layer = PagedCache(LLAMA, page_size=4), nn.Module()
    layer.expand_kv = lambda: None  # type: ignore[assignment]  # of a latent layer, which gave KV by head to the cache
    for begin, stop in ((0, 5), (5, 7)):
        part = [x[:, :, begin:stop] for x in (q, k, v)]
        mask = ModelMask(mask=None, padding_mask=real[:, :stop])
        for i in (0, 1):
            out = _paged_attention.attend_paged(PendingUpdate(cache, i, part[1], part[2]), layer, tuple(part), mask, {"scale": 1.0})
            torch.testing.assert_close(out, want[:, begin:stop])
            assert out is not None and out.is_contiguous()
    assert lengths(cache) == [4, 7]


def test_latent_layers_with_other_projections_raise() -> None:
    _, q, latent, rotary = latent_case()
    biased, narrow = nn.Linear(6, 27, dtype=torch.float64), nn.Linear(6, 27, bias=False).to(torch.float8_e4m3fn)

    class OwnLinear(nn.Linear):
        pass

    own = OwnLinear(6, 27, bias=False)
    for layer in (Latent(biased), Latent(narrow), Latent(own)):
        with pytest.raises(ValueError, match=r"expected latent vectors \[B, 1, n, 6\] and a torch\.nn\.Linear kv_b_proj without bias"):
            absorbed(layer, q, update_of(k=latent, v=rotary))
    with pytest.raises(ValueError, match=r"got \(2, 1, 7, 5\)"):
        absorbed(Latent(), q, update_of(k=latent[..., :5], v=rotary))


@torch.no_grad()
@pytest.mark.parametrize("few_queries", [3, 7, 99])
def test_a_long_first_chunk_of_latent_vectors_is_computed_by_head(few_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then KV is written and the caller computes. Later chunks, short ones, and results are as by head."""
    monkeypatch.setattr(_paged_attention, "FEW_QUERIES", few_queries)
    layer, q, latent, rotary = latent_case(count=11)
    key, value = expanded(layer, latent, rotary)
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    want = ((q @ key.transpose(2, 3)).masked_fill(~causal, -torch.inf).softmax(-1) @ value).transpose(1, 2)
    cache = PagedCache(LLAMA, page_size=4)
    for begin, stop in ((0, 7), (7, 11)):
        update = PendingUpdate(cache, 0, latent[:, :, begin:stop], rotary[:, :, begin:stop])
        qkv = q[:, :, begin:stop], key[:, :, begin:stop], value[:, :, begin:stop]
        out = _paged_attention.attend_paged(update, layer, qkv, ModelMask(mask=None), {"scale": 1.0})
        assert (out is None) == (begin == 0 and few_queries < 7)
        if out is not None:
            torch.testing.assert_close(out, want[:, begin:stop])
        cache._left = set()
    made = cache._groups[None].cache
    assert made is not None and made.shared_kv and (made.kv_heads, made.head_dim, made.value_dim) == (1, 8, 6)
