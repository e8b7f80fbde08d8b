"""The Triton decode kernels over pages: in the interpreter, with short splits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cache.cases import Case
from torch import Tensor

import longspan as ls
from longspan._cache.step import tokens_first
from longspan._engine.cached import write_cached
from longspan._kernels.paged import PagedKV, PagedWork, query_ranges
from longspan._masks.tracing import trace
from longspan.testing import oracle

decode_call: Any = pytest.importorskip("longspan._kernels.triton.decode_call")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 32 tokens or more, so that short sequences have several."""
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 32)


@pytest.mark.parametrize("seed", [5, 8, 9])
def test_random_caches_match_the_oracle(seed: int) -> None:
    Case(seed, kernel="triton", device=DEVICE, dtype=torch.float32, longest=60).run()


def decoded(tokens: list[Tensor], rows: list[int], *, page_size: int, prefix: int, **options: Any) -> Tensor:
    """out of the last tokens of sequences, after a prefix that is written without attention."""
    q, k, v = (x[rows].to(DEVICE) for x in tokens)
    cache = ls.KVCache(pages=200, page_size=page_size, layers=1, kv_heads=k.shape[1], head_dim=k.shape[3], dtype=k.dtype, device=DEVICE)
    ids, count = cache.allocate(len(rows)), q.shape[2] - prefix
    cache.step(ids, prefix)
    pages = cache.layer_pages(0)
    step = cache.step(ids, count)
    pages.write(*(tokens_first(x[:, :, :prefix]) for x in (k, v)), cache.sequence(ids[0]).unfinished[0].ranges)
    for sequence_id in ids:
        del cache.sequence(sequence_id).unfinished[0]
    rest = (x[:, :, prefix:] for x in (q, k, v))
    return ls.attention(*rest, cache=step, layer=0, kernel="triton", **options)


def random_tokens(batch: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, count, 16, generator=generator) for heads in (4, 2, 2)]


def test_bits_are_equal_alone_batched_and_on_other_pages() -> None:
    tokens = random_tokens(3, 150)
    options: dict[str, Any] = {"prefix": 148, "mask": ls.causal()}
    expected = decoded(tokens, [0, 1, 2], page_size=64, **options)
    assert torch.equal(decoded(tokens, [1], page_size=64, **options), expected[1:2])
    assert torch.equal(decoded(tokens, [2, 0], page_size=16, **options), expected[[2, 0]])
    assert torch.equal(decoded(tokens, [0, 1, 2], page_size=7, **options), expected)


def test_a_shorter_sequence_with_more_splits_decodes_as_alone() -> None:
    """The size of a split doubles with the length: here 159 tokens have more splits than 160."""
    rule = decode_call.split_rule(2, shared=False, heads=4)
    assert rule.count(159) > rule.count(160)
    tokens = [x.to(DEVICE) for x in random_tokens(2, 160)]
    cache = ls.KVCache(pages=20, layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)
    ids, prefix = cache.allocate(2), [158, 159]
    step = cache.step(ids, prefix)
    joined = [torch.cat([x[i : i + 1, :, :n] for i, n in enumerate(prefix)], 2) for x in tokens]
    ls.attention(*joined, cache=step, layer=0, kernel="cpu" if DEVICE == "cpu" else "auto")
    last = [torch.stack([x[i, :, n : n + 1] for i, n in enumerate(prefix)]) for x in tokens]
    out = ls.attention(*last, cache=cache.step(ids, 1), layer=0, kernel="triton")
    for i, n in enumerate(prefix):
        expected = oracle(last[0][i : i + 1], *(x[i : i + 1, :, : n + 1] for x in tokens[1:]))
        torch.testing.assert_close(out[i : i + 1].double(), expected[0] if isinstance(expected, tuple) else expected, rtol=1e-4, atol=1e-5)


BIAS = torch.randn(4, 151, generator=torch.Generator().manual_seed(3)).to(DEVICE)
SLOPES = torch.tensor([0.1, 0.02, 0.3, 0.05], device=DEVICE)
DOCUMENTS = (torch.arange(151) // 43).to(DEVICE)
GROUPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"score_mod": lambda s, b, h, q, kv: torch.tanh(s + BIAS[h, kv]) - SLOPES[h] * (q - kv)},
    "bias at two places": {"score_mod": lambda s, b, h, q, kv: s + BIAS[h, q] * BIAS[h, kv] * SLOPES[h]},
    "documents": {"mask": ls.mask_mod(lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) & (kv <= q))},
    "sink": {"sink": torch.tensor([0.3, -1.0, 2.0, 0.1])},
    "window": {"mask": ls.causal() & ls.sliding_window(75)},
    "hidden": {"mask": ls.mask_mod(lambda b, h, q, kv: (kv < 32) | (kv >= 70))},
}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(("length", "group"), [(151, 128), (151, 256), (60, 64), (20, 64)])
def test_groups_of_splits_have_the_same_bits(name: str, length: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One CTA per split or per group of splits: merged by a kernel of its own, or not at all where a sequence has one group."""
    monkeypatch.setattr(decode_call, "GROUP_TOKENS", group)
    tokens, outs = random_tokens(3, length), []
    options: dict[str, Any] = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in GROUPED[name].items()}
    for grouped in (False, True):
        monkeypatch.setattr(decode_call.SplitCounts, "groups_fill", lambda *_, grouped=grouped: grouped)
        outs.append(decoded(tokens, [0, 1, 2], page_size=16, prefix=length - 2, return_lse=True, **options))
    for x, y in zip(*outs, strict=True):
        assert torch.equal(x, y)
    q, k, v = (x.to(DEVICE) for x in tokens)
    expected = oracle(q, k, v, return_lse=True, **options)
    for x, y in zip(outs[1], expected, strict=True):
        torch.testing.assert_close(x.double(), y[:, :, -2:], rtol=0, atol=1e-5)


def merges_of(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list to which each new launch adds whether another launch merges its partial results."""
    made, make = [], decode_call._make_launches

    def spied(*arguments: Any) -> Any:
        launches = make(*arguments)
        made.append(launches.merge is not None)
        return launches

    monkeypatch.setattr(decode_call, "_make_launches", spied)
    return made


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(("length", "group", "grouped"), [(151, 128, False), (151, 128, True), (60, 256, False), (34, 64, False)])
def test_tiles_merged_by_their_last_cta_have_the_same_bits(
    name: str, length: int, group: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a launch that merges: of splits in one or two groups, or of groups."""
    monkeypatch.setattr(decode_call, "GROUP_TOKENS", group)
    monkeypatch.setattr(decode_call.SplitCounts, "groups_fill", lambda *_: grouped)
    monkeypatch.setattr(decode_call, "sm_count", lambda device: 132)
    options: dict[str, Any] = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in GROUPED[name].items()}
    outs, tokens, merged = [], random_tokens(3, length), merges_of(monkeypatch)
    for separate in (False, True):
        if separate:
            monkeypatch.setattr(decode_call.DecodeSizes, "merged_rows", lambda *_: 0)
        decode_call._launches.cache_clear()
        outs.append(decoded(tokens, [0, 1, 2], page_size=16, prefix=length - 2, return_lse=True, **options))
    assert merged == [False, True]
    for x, y in zip(*outs, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("lengths", "queries", "heads", "merged"),
    [
        ([1024], 1, (32, 8), True),
        ([4096] * 3, 1, (32, 8), True),
        ([8192] * 2, 1, (32, 8), True),
        ([8193], 1, (32, 8), False),  # three groups
        ([4096] * 5, 1, (32, 8), False),  # 320 CTAs
        ([4096, 300], 5, (32, 8), False),  # 20 rows of eight splits: more than a CTA loads at once
        ([255], 1, (32, 8), True),  # nothing to merge
    ],
)
def test_small_launches_merge_their_partial_results(
    lengths: list[int], queries: int, heads: tuple[int, int], merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 256)
    monkeypatch.setattr(decode_call, "sm_count", lambda device: 132)
    decode_call._launches.cache_clear()
    made, n = merges_of(monkeypatch), len(lengths)
    k = torch.zeros(1, heads[1], 64, 128, dtype=torch.bfloat16, device=DEVICE)
    pages = PagedKV(k=k, v=k, table=torch.zeros(n, 129, dtype=torch.int32, device=DEVICE))
    q = torch.zeros(n, heads[0], queries, 128, dtype=torch.bfloat16, device=DEVICE)
    ranges, _ = query_ranges([x - queries for x in lengths], lengths, list(range(n)), [], q.device)
    monkeypatch.setattr(decode_call.DecodeLaunch, "run", lambda self: None)
    decode_call.attend_pages(decode_call.Queries(q, ranges, False), pages, PagedWork(scale=0.1))
    assert made == [not merged]


@pytest.mark.parametrize("paged", [False, True])
def test_a_graph_captures_the_launches_of_the_call_before(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is compiled during the capture. Those of steps with longest=… leave the merge to another launch: a graph would fill
    the counters by a node of its own.
    """
    monkeypatch.setattr(decode_call, "hold_for_graph", lambda launch: None)
    monkeypatch.setattr("longspan._kernels.triton.decode_launch.hold_for_graph", lambda launch: None)
    monkeypatch.setattr(decode_call, "sm_count", lambda device: 132)
    monkeypatch.setattr(decode_call.SplitCounts, "groups_fill", lambda *_: False)
    cache = ls.KVCache(pages=9, page_size=16, layers=2, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)
    q, k, v = (x.to(DEVICE) for x in random_tokens(1, 60))
    step = cache.step(cache.allocate(1), 1, longest=60)
    decode_call._launches.cache_clear()
    made = merges_of(monkeypatch)
    for captured in (False, True):
        monkeypatch.setattr(decode_call.launch, "capturing", lambda device, captured=captured: captured)
        if paged:
            ls.attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], cache=step, layer=int(captured), kernel="triton")
        else:
            decode_call.attend_contiguous(q[:, :, -1:], k, v, PagedWork(scale=0.1))
    assert made == [paged]


def test_sequences_of_any_length_have_one_kernel_of_partial_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of longer sequences have fewer splits."""
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 256)
    monkeypatch.setattr(decode_call, "sm_count", lambda device: 1)  # a launch that merges has two CTAs
    monkeypatch.setattr(decode_call.SplitCounts, "groups_fill", lambda *_: False)
    monkeypatch.setattr(decode_call.DecodeLaunch, "run", lambda self: made.append(self.launches.decode.constants))
    made: list[Any] = []
    q = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    for length in (1500, 6000, 20_000, 100_000):
        k = torch.zeros(1, 8, length, 16, dtype=torch.bfloat16, device=DEVICE)
        decode_call.attend_contiguous(q, k, k, PagedWork(scale=0.1))
    compiled = [{name: x for name, x in constants.items() if name.isupper()} for constants in made]
    assert len(compiled) == 4 and all(one == compiled[0] for one in compiled[1:])


@pytest.mark.parametrize("hidden", [float("nan"), float("inf")])
@pytest.mark.parametrize("reads", [False, True])
def test_hidden_values_of_a_group_change_no_bit(hidden: float, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    visible = torch.arange(150, device=DEVICE) != 40
    mask = ls.mask_mod((lambda b, h, q, kv: visible[kv]) if reads else (lambda b, h, q, kv: kv != 40))
    monkeypatch.setattr(decode_call, "GROUP_TOKENS", 128)
    monkeypatch.setattr(decode_call.SplitCounts, "groups_fill", lambda *_: True)
    tokens = random_tokens(1, 150)
    options: dict[str, Any] = {"page_size": 16, "prefix": 149, "mask": mask}
    expected = decoded(tokens, [0], **options)
    for x in tokens[1:]:
        x[:, :, 40] = hidden
    assert torch.equal(decoded(tokens, [0], **options), expected)


@pytest.mark.parametrize(
    ("lengths", "fill"),
    [
        ([4096] * 32, True),
        ([8192] * 16, True),
        ([131072], True),
        ([4096] * 8, False),
        ([4096] * 40, False),
        ([8192] * 64, True),
        ([2**20], False),
        ([5000 + 100 * i for i in range(24)], False),
        ([4096] * 20, True),
        ([4096] * 12, False),
        ([1024] * 16, True),
        ([1024] * 8, False),
    ],
)
def test_a_cta_computes_a_group_where_groups_fill_the_device(lengths: list[int], fill: bool) -> None:
    rule = decode_call.SplitRule(256, 0, 32, 4096)
    assert rule.counts(lengths).groups_fill(8, 132) is fill


@pytest.mark.parametrize(("name", "needed"), [("plain", 1), ("window", 1), ("bias", 2), ("documents", 2)])
def test_calls_that_read_tensors_need_two_ctas_per_sm(name: str, needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(decode_call.SplitCounts, "groups_fill", lambda self, tiles, sms, needed: asked.append(needed) or False)
    decoded(random_tokens(2, 70), [0, 1], page_size=16, prefix=69, **GROUPED[name])
    assert asked == [needed]


@pytest.mark.parametrize(("longest", "needed"), [(None, 1), (40, 2)])
def test_steps_for_cuda_graphs_need_two_ctas_per_sm(longest: int | None, needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of later replays are not known."""
    asked = []
    monkeypatch.setattr(decode_call.SplitCounts, "groups_fill", lambda self, tiles, sms, needed: asked.append(needed) or False)
    cache = ls.KVCache(pages=9, page_size=16, layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)
    q, k, v = (x.to(DEVICE) for x in random_tokens(3, 1))
    ls.attention(q, k, v, cache=cache.step(cache.allocate(3), 1, longest=longest), layer=0, kernel="triton")
    assert asked == [needed]


@pytest.mark.parametrize(("biased", "needed"), [(False, 1), (True, 2)])
def test_contiguous_calls_that_read_tensors_need_two_ctas_per_sm(biased: bool, needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(decode_call.SplitCounts, "groups_fill", lambda self, tiles, sms, needed: asked.append(needed) or False)
    q, k, v = (x.to(DEVICE) for x in random_tokens(1, 70))
    traced = trace(lambda s, b, h, q, kv: s + BIAS[h, kv], "score")
    read = {"score": traced.program, "score_captured": traced.captured()} if biased else {}
    decode_call.attend_contiguous(q[:, :, -1:], k, v, PagedWork(scale=0.2, **read))
    assert asked == [needed]


@pytest.mark.parametrize(
    ("lengths", "tiles", "group"),
    [
        ([4096] * 32, 2, 2048),  # one wave instead of two
        ([4096] * 32, 1, 0),  # one wave of splits
        ([4096] * 128, 2, 4096),
        ([8192] * 64, 1, 4096),
        ([8192] * 64, 2, 8192),
        ([131072], 2, 0),
        ([100] * 300, 1, 0),
    ],
)
def test_a_cta_of_latent_kv_takes_several_splits_where_that_ends_first(lengths: list[int], tiles: int, group: int) -> None:
    rule = decode_call.SplitRule(256, 1024, 16 if tiles == 2 else 4)
    assert rule.cta_group(rule.counts(lengths), max(lengths), tiles, 132) == group


def test_groups_of_programs_that_read_tensors_need_two_ctas_per_sm() -> None:
    rule = decode_call.SplitRule(256, 0, 32, 4096)
    assert [rule.counts([4096] * n).groups_fill(8, 132, 2) for n in (12, 20, 29, 30, 33)] == [False, False, False, True, True]


def test_new_tokens_that_no_query_sees_are_written() -> None:
    cache = ls.KVCache(pages=9, page_size=16, layers=1, kv_heads=1, head_dim=16, dtype=torch.float32, device=DEVICE)
    (sequence,) = cache.allocate(1)
    for count in (63, 3):  # the first of 3 is the last key of a tile
        q, k, v = (torch.randn(1, 1, count, 16, device=DEVICE) for _ in range(3))
        step = cache.step([sequence], count)
        ls.attention(q, k, v, cache=step, layer=0, mask=ls.sliding_window(0, 5), kernel="triton")
        start, stop = step.ranges.starts[0], step.ranges.lengths[0]
        for written, new in zip(cache.layer_pages(0).gather(step.ranges.rows[0], start, stop), (k, v), strict=True):
            assert torch.equal(written, new[0])


def test_lookups_beyond_a_table_raise() -> None:
    bias = torch.randn(40, device=DEVICE)
    cache = ls.KVCache(pages=2, layers=1, kv_heads=1, head_dim=16, dtype=torch.float32, device=DEVICE)
    ids, x = cache.allocate(1), torch.randn(1, 1, 50, 16, device=DEVICE)
    with pytest.raises(ValueError, match="may look outside of a tensor that it captures"):
        ls.attention(x, x, x, cache=cache.step(ids, 50), layer=0, score_mod=lambda s, b, h, q, kv: s + bias[kv], kernel="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_keys_of_a_step_do_not_depend_on_the_batch(dtype: torch.dtype, dim: int) -> None:
    assert len({decode_call.choose_tile(dim=dim, dtype=dtype, rows=16, waves=waves).n for waves in (0.1, 1, 4, 40)}) == 1


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_no_length_has_more_splits_than_the_bound(kv_heads: int, shared: bool) -> None:
    rule = decode_call.SplitRule(32, 128 if shared else 0, 4 * kv_heads)
    rule = rule._replace(group=256)
    for grouped in (False, True):
        counts = [rule.count(length, grouped=grouped) for length in range(1, 3000)]
        for longest in (1, 31, 32, 33, 127, 128, 129, 513, 1000, 2999):
            assert rule.max_count(longest, grouped=grouped) == max(counts[:longest])


@pytest.mark.parametrize("hidden", [float("nan"), float("inf")])
def test_hidden_values_change_no_bit(hidden: float) -> None:
    tokens = random_tokens(1, 70)
    options: dict[str, Any] = {"page_size": 16, "prefix": 69, "mask": ls.mask_mod(lambda b, h, q, kv: kv != 40)}
    expected = decoded(tokens, [0], **options)
    for x in tokens[1:]:
        x[:, :, 40] = hidden
    assert torch.equal(decoded(tokens, [0], **options), expected)


def test_visible_infinite_values_reach_the_output() -> None:
    tokens = random_tokens(1, 70)
    tokens[2][:, 0, 40, 3] = float("inf")
    out = decoded(tokens, [0], page_size=16, prefix=69)
    assert out[0, :2, 0, 3].tolist() == [float("inf")] * 2 and int(out.isfinite().logical_not().sum()) == 2


def test_named_kernel_rejects_wide_heads() -> None:
    cache = ls.KVCache(pages=2, layers=1, kv_heads=1, head_dim=300, dtype=torch.float32, device=DEVICE)
    x = torch.zeros(1, 1, 1, 300, device=DEVICE)
    with pytest.raises(ValueError, match="kernel 'triton' does not support this call: head dims 300 and 300"):
        ls.attention(x, x, x, cache=cache.step(cache.allocate(1), 1), layer=0, kernel="triton")


@pytest.mark.parametrize(("queries", "few"), [(1, 16), (9, 2)])
def test_contiguous_keys_match_the_oracle(queries: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences have five splits: merged at once, or two at a time."""
    monkeypatch.setattr(decode_call, "_FEW_MERGED", (few, 256))
    monkeypatch.setattr(decode_call, "_MANY_MERGED", (2, 16))
    decode_call._launches.cache_clear()
    q, k, v = (x.to(DEVICE) for x in random_tokens(2, 600))
    q, mask = q[:, :, :queries], ls.mask_mod(lambda b, h, q, kv: (kv + b) % (h + 2) != 0)
    out, lse = ls.attention(q, k, v, mask=mask, score_mod=lambda s, b, h, i, j: s + 0.001 * (j - i), return_lse=True, kernel="triton")
    right = oracle(q, k, v, mask=mask, score_mod=lambda s, b, h, i, j: s + 0.001 * (j - i), return_lse=True)
    for got, expected in zip((out, lse), right):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("heads", "dtype"), [(16, torch.float16), (16, torch.float32), (128, torch.float16)])
def test_latent_heads_match_the_oracle_and_hide_a_nan(heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of 576 elements, of which the first 512 are values, in two splits; a hidden key changes no bit."""
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 64)
    monkeypatch.setattr(decode_call, "_FEW_LATENT", 2)  # fewer CTAs: the interpreter takes 10 ms for each
    decode_call._launches.cache_clear()
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, n, 576, generator=generator).to(DEVICE, dtype) for h, n in ((heads, 1), (1, 100)))
    outs = []
    for hidden in (0.0, float("nan")):
        k[:, :, 40] = hidden
        paged = torch.nn.functional.pad(k, (0, 0, 0, 12)).view(7, 1, 16, 576)
        table = torch.arange(7, dtype=torch.int32, device=DEVICE)[None]
        pages = PagedKV(k=paged, v=paged[..., :512], table=table, shared=True)
        queries = decode_call.Queries(q, query_ranges([99], [100], [0], [], q.device)[0], False)
        mask = trace(lambda b, h, q, kv: kv != 40, "mask").program
        outs.append(decode_call.attend_pages(queries, pages, PagedWork(scale=0.1, mask=mask))[0])
    assert torch.equal(*outs)
    k[:, :, 40] = 0
    expected = oracle(q, k, k[..., :512], mask=ls.mask_mod(lambda b, h, q, kv: kv != 40), scale=0.1)
    torch.testing.assert_close(outs[0].double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.skipif(DEVICE == "cuda", reason="needs 4 GiB")
def test_heads_of_a_long_prefill_are_further_apart_than_32_bits() -> None:
    """Keys [1, 3, 1, 16] of which head 2 begins at element 2³¹, in 4 GiB of memory that is not touched otherwise."""
    try:
        k = torch.empty(2**31 + 16, dtype=torch.float16).as_strided((1, 3, 1, 16), (2**31 + 16, 2**30, 16, 1))
    except RuntimeError:
        pytest.skip("4 GiB of memory are not available")
    k.copy_(torch.arange(1.0, 4.0)[None, :, None, None])
    cache = ls.KVCache(pages=1, page_size=4, layers=1, kv_heads=3, head_dim=16, dtype=torch.float16)
    step = cache.step(cache.allocate(1), 1)
    pages = cache.layer_pages(0)
    decode_call.write_tokens(pages, k, k, step.ranges)
    assert pages.k[0, :, 0, 0].tolist() == pages.v[0, :, 0, 15].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 90), (17, 77), (32, 64)])
def test_gathered_pages_are_the_tokens_of_a_sequence(start: int, stop: int, shared: bool) -> None:
    from longspan._kernels.triton.gather_pages import gather_pages

    k = torch.randn(30, 2, 7, 24, device=DEVICE).bfloat16()
    table = torch.randperm(30).to(DEVICE, torch.int32).view(2, 15)
    pages = PagedKV(k=k, v=k[..., :16] if shared else torch.randn(30, 2, 7, 40, device=DEVICE).bfloat16(), table=table, shared=shared)
    for row in range(2):
        for got, expected in zip(gather_pages(pages, row, start, stop), pages.gather(row, start, stop), strict=True):
            assert got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.gpu
def test_few_splits_have_the_same_bits_beside_a_sequence_of_many() -> None:
    """Sequences of 17 and of 5 splits: merged by other parts of the kernel, which is compiled for both or for the second only."""
    generator = torch.Generator().manual_seed(3)
    cache = ls.KVCache(pages=160, page_size=16, layers=1, kv_heads=1, head_dim=128, dtype=torch.float16, device=DEVICE)
    long, short = cache.allocate(2)
    for sequence_id, count in ((long, 2100), (short, 300)):
        k, v = (torch.randn(1, 1, count, 128, generator=generator).to(DEVICE, torch.float16) for _ in range(2))
        write_cached(k, v, cache.step([sequence_id], count), 0)
    q, k, v = (torch.randn(2, heads, 1, 128, generator=generator).to(DEVICE, torch.float16) for heads in (4, 1, 1))
    both = ls.attention(q, k, v, cache=cache.step([long, short], 1), layer=0, kernel="triton")
    cache.truncate([short], [300])
    alone = ls.attention(q[1:], k[1:], v[1:], cache=cache.step([short], 1), layer=0, kernel="triton")
    assert torch.equal(both[1:], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [False, True])
def test_a_small_batch_has_the_bits_of_a_large_one(sink: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last CTA of a tile merges two sequences, also in prepared calls; a second launch merges 40."""
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 256)
    generator = torch.Generator(device="cuda").manual_seed(4)
    cache = ls.KVCache(pages=40 * 48, page_size=64, layers=3, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
    q, k, v = (torch.randn(40, heads, 1, 128, generator=generator, device="cuda").bfloat16() for heads in (32, 8, 8))
    options = {"sink": torch.linspace(-1, 1, 32, device="cuda")} if sink else {}
    cache._k.normal_(generator=generator), cache._v.normal_(generator=generator)
    ids = cache.allocate(40)
    cache.step(ids, 2999)
    for sequence_id in ids:
        del cache.sequence(sequence_id).unfinished[0]
    outs = []
    for chosen in (slice(None), slice(2)):
        step = cache.step(ids[chosen], 1)
        for layer in range(3):
            attended = ls.attention(q[chosen], k[chosen], v[chosen], cache=step, layer=layer, return_lse=True, **options)
            outs.append(tuple(x[:2] for x in attended))
        cache.truncate(ids[chosen], [2999] * len(ids[chosen]))
    for large, small in zip(outs[:3], outs[3:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(large, small, strict=True))


@pytest.mark.parametrize(("dims", "shared", "says"), [
    ((256, 256), False, None), ((257, 64), False, "head dims 257 and 64"), ((64, 257), False, "head dims 64 and 257"),
    ((768, 512), True, None), ((769, 512), True, "shared KV of 512 and 257"), ((600, 513), True, "shared KV of 513 and 87"),
], ids=str)  # fmt: skip
def test_head_dims_up_to_256_and_shared_ones_up_to_512_are_supported(dims: tuple[int, int], shared: bool, says: str | None) -> None:
    work: Any = SimpleNamespace(mask=None, mask_captured=(), score=None, score_captured=(), scales=None)
    reason = decode_call.unsupported_reason(torch.empty(2, 4, 1, dims[0]), dims, work, sequences=2, longest=100, shared=shared)
    assert reason is None if says is None else reason is not None and says in reason
    assert "dtype" in str(
        decode_call.unsupported_reason(torch.empty(2, 4, 1, 8, dtype=torch.float64), (8, 8), work, sequences=2, longest=100, shared=False)
    )


def test_keys_of_caches_are_equal_by_contents() -> None:
    one, same, other = (decode_call.ByContents((size, "tile"), lambda: None) for size in (16, 16, 32))
    assert one == same and hash(one) == hash(same)
    assert one != other and one != (16, "tile")
