"""Decoding over a mesh by triton's decode kernel: each rank's pages of a sequence as a sequence of their own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cache.cases import Case
from tests.cache.test_kv_cache import DIM, HEADS, make_cache, tokens
from torch import Tensor

import longspan as ls
from longspan._engine import cached, cached_local
from longspan._engine.cached_local import local_step, local_window
from longspan._kernels.paged import FEW_QUERIES, PagedWork, SpreadPages, query_ranges
from longspan._masks.local_positions import LocalSequences, local_program, local_trace, whole_position
from longspan._masks.tracing import ProgramError, trace
from longspan.testing import oracle, run_processes, virtual_world

decode_call: Any = pytest.importorskip("longspan._kernels.triton.decode_call")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 32 tokens or more, so that short sequences have several."""
    monkeypatch.setattr(decode_call, "SMALLEST_SPLIT", 32)


@pytest.mark.parametrize(("ranks", "seed"), [(2, 4), (2, 7), (3, 3), (3, 2)])
def test_random_caches_match_the_oracle_on_every_rank(ranks: int, seed: int) -> None:
    virtual_world(ranks).run(lambda mesh: Case(seed, mesh=mesh, kernel="triton", device=DEVICE, dtype=torch.float32, longest=100).run())


def on_processes() -> None:
    """Two random caches; then a call whose scale differs between the processes, which raises on both."""
    decode_call.SMALLEST_SPLIT = 32
    for seed in (4, 7):
        Case(seed, mesh=dist.group.WORLD, kernel="triton", dtype=torch.float32, longest=100).run()
    cache = make_cache(mesh=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"scale: rank 1 has 0\.5, rank 0 has 0\.25"):
        scale = 0.25 * (1 + dist.get_rank())
        ls.attention(*tokens(1, 1), cache=cache.step(cache.allocate(1), 1), layer=0, scale=scale, kernel="triton")


@pytest.mark.processes
def test_random_caches_match_the_oracle_in_processes() -> None:
    run_processes(on_processes, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_caches_on_a_gpu(ranks: int, seed: int) -> None:
    virtual_world(ranks).run(lambda mesh: Case(100 * ranks + seed, mesh=mesh, device="cuda", dtype=torch.bfloat16, longest=700).run())


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3])
def test_latent_kv_over_ranks_on_a_gpu(count: int) -> None:
    """Latent KV of 512 + 64 elements, which a kernel of its own decodes on Hopper, in sequences of which some ranks hold no page."""

    def run(mesh: ls.Mesh | None) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        cache = ls.KVCache(
            pages=100, page_size=64, layers=1, kv_heads=1, head_dim=576, value_dim=512, shared_kv=True, dtype=torch.bfloat16, device="cuda",
            mesh=mesh,
        )  # fmt: skip
        ids = cache.allocate(3)
        for counts in ([3000, 700, 1], [count] * 3):
            q, k = (torch.randn(1, h, sum(counts), 576, generator=generator).to("cuda", torch.bfloat16) for h in (16, 1))
            out = ls.attention(q, k, k[..., :512], cache=cache.step(ids, counts), layer=0, mask=ls.causal(), scale=0.05)
        return out.float()

    expected = run(None)
    for out in virtual_world(3).run(run):
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-3)


def test_a_long_chunk_is_decoded_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """130 queries over 40 tokens of one page, so that partial results are passed, on ranks of which one holds nothing."""
    monkeypatch.setattr(cached_local, "FEW_QUERIES", 48)
    counts = []
    attend_pages = decode_call.attend_pages

    def recorded(queries: Any, *rest: Any, **options: Any) -> Any:
        counts.append(queries.ranges.counts)
        return attend_pages(queries, *rest, **options)

    monkeypatch.setattr(decode_call, "attend_pages", recorded)
    monkeypatch.setattr("longspan._engine.cached_mesh._MeshCall._kv_is_fewer_bytes", lambda call, index: False)
    q, k, v = (x.to(DEVICE) for x in tokens(1, 130))

    def run(mesh: ls.Mesh) -> Tensor:
        cache = make_cache(pages=4, page_size=64, mesh=mesh, device=DEVICE)
        step = cache.step(cache.allocate(1), 130)
        out = ls.attention(q, k, v, cache=step, layer=0, mask=ls.causal(), kernel="triton")
        assert step.passed == {0: "partial results"}
        return out

    expected = oracle(q, k, v, mask=ls.causal())
    for out in virtual_world(4).run(run):
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    assert counts == [[48, 48, 34]] * 4


def test_calls_that_it_does_not_support_or_take_do_not_reach_the_decode_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(decode_call, "attend_pages", lambda *args, **options: calls.append(args))

    def run(mesh: ls.Mesh) -> str:
        cache = make_cache(mesh=mesh, dtype=torch.float64)
        new = [x.double() for x in tokens(1, 1)]
        with pytest.raises(ValueError, match=r"kernel 'triton' does not support this call: dtype torch.float64") as caught:
            ls.attention(*new, cache=cache.step(cache.allocate(1), 1), layer=0, kernel="triton")
        cache = make_cache(mesh=mesh)
        ls.attention(*tokens(1, 1), cache=cache.step(cache.allocate(1), 1), layer=0, kernel="cpu")
        return str(caught.value)

    virtual_world(2).run(run)
    assert not calls


def test_a_program_that_does_not_compile_for_local_positions_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_call, "unsupported_program", lambda work, dtype, longest: f"{work.mask.name} of {len(work.mask.captured)}")

    def run(mesh: ls.Mesh) -> None:
        cache = make_cache(mesh=mesh)
        cache_step = cache.step(cache.allocate(1), 2)
        with pytest.raises(ValueError, match=r"does not support this call: causal.* of 2"):  # offsets of queries and keys
            ls.attention(*tokens(1, 2), cache=cache_step, layer=0, mask=ls.causal(), kernel="triton")

    monkeypatch.setattr(decode_call, "unsupported_reason", lambda *args, **options: None)
    virtual_world(2).run(run)


def test_a_program_that_cannot_be_traced_for_local_positions_is_no_error_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ProgramError("no trace")

    monkeypatch.setattr(cached, "local_programs", fail)
    monkeypatch.setattr(cached, "has_triton", lambda: True)

    def run(mesh: ls.Mesh) -> None:
        q, _, v = tokens(1, 1)
        step, work = make_cache(mesh=mesh).step([], 1), PagedWork(scale=1.0)
        step.ranges = replace(step.ranges, spread=SpreadPages(ranks=2, rank=0, shifts=(), page_size=4))
        with pytest.raises(ValueError, match="does not support this call: no trace"):
            cached._decodes_by_kernel(q, v, step, work, "triton")
        on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=q.dtype, shape=q.shape, device=q.device)
        assert not cached._decodes_by_kernel(on_gpu, v, step, work, "auto")

    virtual_world(2).run(run)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_local_tokens_are_the_tokens_of_the_rank(ranks: int, page_size: int) -> None:
    for rank in range(ranks):
        spread = SpreadPages(ranks=ranks, rank=rank, shifts=(0, 1, 4), page_size=page_size)
        for index, shift in enumerate(spread.shifts):
            owned = [t for t in range(60) if (t // page_size + shift) % ranks == rank]
            assert spread.first_page(index) == spread.local_pages(index, 0, ranks)[0]
            first = torch.tensor(spread.first_page(index) * page_size)
            for length in (0, 1, 3, 4, 5, 8, 11, 12, 29, 60):
                assert spread.local_length(index, length) == sum(t < length for t in owned)
            assert [int(whole_position(torch.tensor(i), first, ranks, page_size)) for i in range(len(owned))] == owned


@pytest.mark.parametrize(("ranks", "page_size"), [(2, 4), (3, 1), (3, 5), (4, 16)])
@pytest.mark.parametrize("window", [0, 1, 2, 6, 17, 40])
def test_a_local_window_has_every_local_key_of_the_window(ranks: int, page_size: int, window: int) -> None:
    """And at most a page more than it needs, and the keys after the query."""
    for rank in range(ranks):
        spread = SpreadPages(ranks=ranks, rank=rank, shifts=(0,), page_size=page_size)
        for length, count in ((90, 1), (91, 3), (64, 7)):
            local, start = spread.local_length(0, length), length - count
            held = [t for t in range(length) if (t // page_size) % ranks == rank]
            wide = local_window(window, spread, length - start)
            for i in range(count):
                seen = [j for j, t in enumerate(held) if start + i - max(window, 1) < t <= start + i]
                assert all(local - count + i - j < wide for j in seen)
            assert wide <= (max(window, 1) - 1 + count) // ranks + 2 * page_size


def test_windows_of_chunks_are_few() -> None:
    spread = SpreadPages(ranks=2, rank=0, shifts=(0,), page_size=1)
    assert [local_window(100, spread, later) for later in (1, FEW_QUERIES)] == [50, 82]
    assert {local_window(100, spread, later) for later in range(FEW_QUERIES + 1, 157)} == {128}


def test_local_sequences_of_a_step() -> None:
    """Sequence 0: 9 tokens, 2 of them new; 1: no new tokens; 2: 70 tokens, all new, in two blocks of queries. Pages of 4, rank 1 of 2."""
    spread = SpreadPages(ranks=2, rank=1, shifts=(0, 0, 1), page_size=4)
    ranges, _ = query_ranges([7, 5, 0], [9, 5, 70], [2, 0, 1], [], torch.device("cpu"), spread)
    table = torch.arange(3)[:, None] * 100 + torch.arange(20)
    local = local_step(ranges, (0, 1, 2), table.int())
    assert local.ranges.lengths == (4, 36, 36)  # of 9 tokens, page 1; of 70, pages 0, 2, …, 16
    assert local.ranges.counts == [2, 64, 6] and local.first_tokens == (0, 2, 66)
    assert local.ranges.device_ranges.tolist() == [[0, 1, 2], [2, -28, 30], [4, 36, 36], [0, 2, 66]]
    assert local.ranges.device_ranges.dtype == local.table.dtype == torch.int32
    batch, query_offset, key_offset = (x.tolist() for x in local.sequences)
    assert batch == [0, 2, 2] and key_offset == [4, 0, 0]
    assert query_offset == [7 - 2, 0 + 28, 64 - 30]  # local positions of the first queries to whole ones
    assert local.table[0, :1].tolist() == [201] and local.table[1, :9].tolist() == local.table[2, :9].tolist() == list(range(100, 118, 2))
    assert local.table.shape == (3, 16)
    assert local.later == 70
    assert local_step(ranges, (0,), table.int()).later == 2
    nothing = local_step(ranges, (1,), table.int())
    assert nothing.ranges.counts == [] and nothing.table.shape[0] == 0


@pytest.mark.parametrize(("tokens_", "width"), [(1, 16), (64, 16), (65, 32), (128, 32), (129, 64)])
def test_the_page_tables_of_growing_sequences_have_few_widths(tokens_: int, width: int) -> None:
    """Launches are made anew for each width. Pages of 2, of which the rank has every second one."""
    spread = SpreadPages(ranks=2, rank=0, shifts=(0,), page_size=2)
    ranges, _ = query_ranges([tokens_ - 1], [tokens_], [0], [], torch.device("cpu"), spread)
    local = local_step(ranges, (0,), torch.arange(70).int()[None])
    held = -(-tokens_ // 4)
    assert local.table.shape == (1, width) and local.table[0, :held].tolist() == list(range(0, 2 * held, 2))


def test_programs_convert_batch_indices_and_positions() -> None:
    scale, table = torch.tensor(3.0), torch.arange(24.0).view(2, 12)
    score = trace(lambda s, b, h, q, kv: s * (2 * scale) + table[b, kv] - q * h, "score")
    sequences = LocalSequences(*(torch.tensor(x, dtype=torch.int32) for x in ([1, 0], [5, 2], [0, 4])))
    program, captured = local_program(score.program, score.captured(), sequences, ranks=3, page_size=2)
    s, n, h, q, kv = (torch.tensor(x) for x in ([0.5, 0.5], [0, 1], [1, 2], [-3, 4], [3, 3]))
    whole_kv = torch.tensor([7, 11])  # the second tokens of the second local pages: pages 3 and 5
    expected = s * 6 + table[torch.tensor([1, 0]), whole_kv] - (q + torch.tensor([5, 2])) * h
    assert torch.equal(program(s, n, h, q, kv, *captured), expected)
    assert program is not score.program and program.name == score.program.name
    again, _ = local_program(score.program, score.captured(), sequences, ranks=3, page_size=2)
    assert again is program
    assert local_trace(score.program, 2, 2).program is not program and local_trace(score.program, 3, 4).program is not program


def test_programs_read_the_present_captured_tensors() -> None:
    for value in (2.0, 7.0):
        scale = torch.tensor(value)
        traced = trace(lambda s, b, h, q, kv, scale=scale: s * scale.exp(), "score")
        sequences = LocalSequences(*(torch.zeros(1, dtype=torch.int32) for _ in range(3)))
        program, captured = local_program(traced.program, traced.captured(), sequences, ranks=2, page_size=1)
        zero = torch.zeros(1, dtype=torch.int64)
        assert torch.equal(program(torch.ones(1), zero, zero, zero, zero, *captured), scale.exp()[None])


def test_ranks_without_pages_pass_empty_results() -> None:
    """One page of one rank, and more new tokens than some ranks hold."""
    q, k, v = (x.to(DEVICE) for x in tokens(1, 6))

    def run(mesh: ls.Mesh) -> Tensor:
        cache = make_cache(pages=2, page_size=4, mesh=mesh, device=DEVICE)
        ids = cache.allocate(1)
        first = ls.attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], cache=cache.step(ids, 2), layer=0, mask=ls.causal(), kernel="triton")
        rest = ls.attention(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], cache=cache.step(ids, 4), layer=0, mask=ls.causal(), kernel="triton")
        return torch.cat([first, rest], 2)

    expected = oracle(q, k, v, mask=ls.causal())
    for out in virtual_world(3).run(run):
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_queries_of_several_batch_rows() -> None:
    q, k, v = (x.to(DEVICE) for x in tokens(2, 3))

    def run(mesh: ls.Mesh) -> tuple[Tensor, Tensor]:
        cache = make_cache(pages=3, page_size=2, mesh=mesh, device=DEVICE)
        return ls.attention(q, k, v, cache=cache.step(cache.allocate(2), 3), layer=0, kernel="triton", return_lse=True)

    expected = oracle(q, k, v)
    for out, lse in virtual_world(2).run(run):
        assert out.shape == (2, HEADS, 3, DIM) and lse.shape == (2, HEADS, 3) and lse.dtype == torch.float32
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
