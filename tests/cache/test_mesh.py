"""The cache over several ranks: threads of a virtual world, and Gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cache.cases import Case
from tests.cache.test_kv_cache import DIM, HEADS, make_cache, tokens
from torch import Tensor

import longspan as ls
from longspan._kernels.paged import PagedKV
from longspan.testing import oracle, run_processes, virtual_world


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_caches_match_the_oracle_on_every_rank(ranks: int) -> None:
    virtual_world(ranks).run(lambda mesh: [Case(seed, mesh=mesh, longest=150).run() for seed in range(ranks, 60, 12)])


def decode_greedily(mesh: Any) -> list[int]:
    """16 tokens of a toy model: prefill in chunks, then one token at a time, by the position of the largest output."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(40, 48, generator=generator, dtype=torch.float64)  # embeddings, also projected to q, k and v
    weights = [torch.randn(48, heads * 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    cache = ls.KVCache(pages=20, page_size=4, layers=1, kv_heads=2, head_dim=16, dtype=torch.float64, mesh=mesh)
    ids, text = cache.allocate(1), [int(t) for t in torch.randint(0, 40, (37,), generator=generator)]

    def forward(new: list[int]) -> int:
        x = table[new]
        q, k, v = (
            (x @ w).view(1, len(new), -1, 16).transpose(1, 2)
            for w in weights
        )  # fmt: skip
        out = ls.attention(q, k, v, cache=cache.step(ids, len(new)), layer=0, mask=ls.causal(), sink=torch.ones(4))
        return int((out[0, :, -1].reshape(-1)[:48] @ table.T).argmax())

    for chunk in (text[:20], text[20:]):
        last = forward(chunk)
    decoded = [last]
    while len(decoded) < 16:
        decoded.append(forward(decoded[-1:]))
    return decoded


def on_processes() -> list[int]:
    """Greedy tokens over two processes; then a call whose scale differs between them, which raises on both."""
    decoded = decode_greedily(dist.group.WORLD)
    cache = make_cache(mesh=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"scale: rank 1 has 0\.5, rank 0 has 0\.25"):
        ls.attention(*tokens(1, 1), cache=cache.step(cache.allocate(1), 1), layer=0, scale=0.25 * (1 + dist.get_rank()))
    return decoded


@pytest.mark.processes
def test_greedy_tokens_equal_those_of_one_process() -> None:
    alone = decode_greedily(None)
    assert virtual_world(3).run(decode_greedily) == [alone] * 3
    assert run_processes(on_processes, 2) == [alone] * 2


@pytest.mark.parametrize("count", [3, 200])
def test_a_mesh_of_one_rank_gives_the_bits_of_no_mesh(count: int) -> None:
    def run(mesh: ls.Mesh | None) -> Tensor:
        cache = make_cache(pages=40, mesh=mesh)
        return ls.attention(*tokens(1, count), cache=cache.step(cache.allocate(1), count), layer=0, mask=ls.causal())

    (out,) = virtual_world(1).run(run)
    assert torch.equal(out, run(None))


def test_beside_tensor_parallelism_pages_are_spread_along_cp() -> None:
    """Ranks along tp hold one KV head each, ranks along cp share its pages."""
    chunks = [tokens(1, count) for count in (37, 3, 1)]

    def run(mesh: ls.Mesh | None) -> Tensor:
        part = slice(None) if mesh is None else slice(mesh.coordinate[0], mesh.coordinate[0] + 1)
        cache = make_cache(kv_heads=2 if mesh is None else 1, pages=40, mesh=mesh)
        assert cache.ranks == (1 if mesh is None else 3)
        ids, group = cache.allocate(1), HEADS // 2
        return torch.cat(
            [
                ls.attention(
                    q.unflatten(1, (2, group))[:, part].flatten(1, 2),
                    k[:, part],
                    v[:, part],
                    cache=cache.step(ids, q.shape[2]),
                    layer=0,
                    mask=ls.causal(),
                )
                for q, k, v in chunks
            ],
            2,
        )

    expected = run(None)
    for rank, out in enumerate(virtual_world((2, 3), axis_names=("tp", "cp")).run(run)):
        torch.testing.assert_close(out, expected.unflatten(1, (2, -1))[:, rank // 3])


def test_pages_are_spread_over_ranks() -> None:
    def run(mesh: ls.Mesh) -> int:
        cache = make_cache(pages=4, page_size=8, mesh=mesh)
        ids = cache.allocate(1)
        step = cache.step(ids, 90)  # 12 pages: all of the 12 pages of three ranks
        with pytest.raises(RuntimeError, match="expected 1 free pages on rank 0 for 7 new tokens, got 0"):
            cache.step(ids, 7)
        ls.attention(*tokens(1, 90), cache=step, layer=0)
        return cache.free_pages

    assert virtual_world(3).run(run) == [0, 0, 0]


def test_ranks_send_nothing_but_partial_results() -> None:
    world = virtual_world(3)

    def run(mesh: ls.Mesh) -> None:
        cache = make_cache(mesh=mesh)
        ls.attention(*tokens(4, 1), cache=cache.step(cache.allocate(4), 1), layer=0)

    world.run(run)
    rows = 4 * HEADS  # partial out and lse in float32 to the rank that merges a row, then out to the two other ranks
    assert world.bytes_sent == 2 * rows * (DIM + 1) * 4 + 2 * rows * DIM * 4


def test_a_chunk_passes_kv_or_partial_results_whichever_is_fewer_bytes() -> None:
    world = virtual_world(3)
    passed: list[str] = []

    def run(mesh: ls.Mesh) -> None:
        cache = make_cache(pages=200, mesh=mesh)
        ids, start = cache.allocate(1), 0
        q, k, v = tokens(1, 500)
        outs = []
        for count in (400, 100):  # all tokens are new, then most are cached
            step, part = cache.step(ids, count), (slice(None), slice(None), slice(start, start + count))
            outs.append(ls.attention(q[part], k[part], v[part], cache=step, layer=0, mask=ls.causal()))
            start += count
            if mesh.rank == 0:
                passed.append(step.passed[0])
        torch.testing.assert_close(torch.cat(outs, 2).double(), oracle(q, k, v, mask=ls.causal()), rtol=0, atol=1e-5)

    world.run(run)
    assert passed == ["KV", "partial results"]


def test_ranks_that_differ_all_raise() -> None:
    def run(mesh: ls.Mesh) -> str:
        cache = make_cache(mesh=mesh)
        step = cache.step(cache.allocate(1), 1 + mesh.rank % 2)
        with pytest.raises(ValueError, match=r"lengths: rank 1 has \(2,\), rank 0 has \(1,\)"):
            ls.attention(*tokens(1, 1 + mesh.rank % 2), cache=step, layer=0)
        return "raised"

    assert virtual_world(2).run(run) == ["raised"] * 2


def test_ranks_with_different_scales_all_raise() -> None:
    def run(mesh: ls.Mesh) -> str:
        cache = make_cache(mesh=mesh)
        with pytest.raises(ValueError, match=r"scale: rank 1 has 0\.5, rank 0 has 0\.25"):
            ls.attention(*tokens(1, 1), cache=cache.step(cache.allocate(1), 1), layer=0, scale=0.25 * (1 + mesh.rank))
        return "raised"

    assert virtual_world(2).run(run) == ["raised"] * 2


def test_a_rank_that_ends_is_reported_with_the_sequences_in_flight() -> None:
    def run(mesh: ls.Mesh) -> str:
        cache = make_cache(mesh=mesh)
        ids = cache.allocate(3)
        if mesh.rank == 1:
            return "ended"
        with pytest.raises(RuntimeError, match="sequences in flight: 0, 2"):
            ls.attention(*tokens(2, 1), cache=cache.step([ids[0], ids[2]], 1), layer=0)
        return "raised"

    assert virtual_world(2).run(run) == ["raised", "ended"]


@pytest.mark.parametrize("name", ["page_size", "layers", "window", "history"])
def test_ranks_with_different_caches_all_raise(name: str) -> None:
    def run(mesh: ls.Mesh) -> str:
        values = {"page_size": (4, 8), "layers": (1, 2), "window": (None, 9)}.get(name)
        cache = make_cache(mesh=mesh, **({} if values is None else {name: values[mesh.rank]}))
        ids = cache.allocate(1)
        if name == "history":  # sequence 1: a fork begins on the rank of its parent
            ids = [cache.fork(ids[0])] if mesh.rank else cache.allocate(1)
        with pytest.raises(ValueError, match="ranks that hold" if name == "history" else r"cache \(page_size, layers"):
            ls.attention(*tokens(1, 3), cache=cache.step(ids, 3), layer=0, mask=ls.causal() & ls.sliding_window(9))
        return "raised"

    assert virtual_world(2).run(run) == ["raised"] * 2


@pytest.mark.parametrize("count", [3, 200])
def test_an_error_of_one_rank_raises_on_all_and_the_call_may_be_repeated(count: int) -> None:
    """A lookup out of bounds, for a chunk by queries of rank 0 only, else by keys of rank 1 only."""

    def run(mesh: ls.Mesh) -> Tensor:
        cache = make_cache(pages=200, page_size=2, mesh=mesh)
        step, (q, k, v) = cache.step(cache.allocate(1), count), tokens(1, count)
        q, k, v = q.repeat(1, 4, 1, 1), k[:, :1].repeat(1, 2, 1, 1), v
        small, large = (torch.zeros(n) for n in (160 if count > 3 else 2, 200))
        with pytest.raises((IndexError, RuntimeError)):
            ls.attention(q, k, v, cache=step, layer=0, score_mod=lambda s, b, h, qi, ki: s + (small[qi] if count > 3 else small[ki]))
        return ls.attention(q, k, v, cache=step, layer=0, score_mod=lambda s, b, h, qi, ki: s + large[qi])

    first, second = virtual_world(2).run(run)
    assert torch.equal(first, second)


@pytest.mark.parametrize("fails", ["gather_local", "write"])
@pytest.mark.parametrize("count", [3, 200])
def test_a_rank_without_memory_raises_on_all_ranks_and_the_call_may_be_repeated(
    count: int, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, failed = getattr(PagedKV, fails), set()

    def once(pages: PagedKV, *args: Any) -> Any:
        if pages.k.shape[0] == 201 and fails not in failed:  # the pages of rank 1
            failed.add(fails)
            raise torch.OutOfMemoryError("no memory")
        return works(pages, *args)

    monkeypatch.setattr(PagedKV, fails, once)

    def run(mesh: ls.Mesh) -> Tensor:
        cache = make_cache(pages=200 + mesh.rank, page_size=2, mesh=mesh)
        step, new = cache.step(cache.allocate(1), count), tokens(1, count)
        with pytest.raises(RuntimeError, match="no memory"):
            ls.attention(*new, cache=step, layer=0, mask=ls.causal())
        return ls.attention(*new, cache=step, layer=0, mask=ls.causal())

    first, second = virtual_world(2).run(run)
    assert failed and torch.equal(first, second)


def test_arguments_that_one_rank_rejects_raise_on_all_ranks() -> None:
    def run(mesh: ls.Mesh) -> str:
        cache = make_cache(mesh=mesh)
        step = cache.step(cache.allocate(1), 1)
        with pytest.raises((ValueError, RuntimeError), match="layer"):
            ls.attention(*tokens(1, 1), cache=step, layer=mesh.rank)
        return "raised"

    assert virtual_world(2).run(run) == ["raised"] * 2


@pytest.mark.parametrize("fault", ["pages", "freed"])
def test_a_step_that_one_rank_rejects_raises_on_all_ranks_and_later_calls_work(fault: str) -> None:
    def run(mesh: ls.Mesh) -> Tensor:
        cache = make_cache(pages=4 - (fault == "pages" and mesh.rank == 1), page_size=2, mesh=mesh)
        (kept, other), new = cache.allocate(2), tokens(1, 15)
        if fault == "freed" and mesh.rank == 1:
            cache.free([other])
        message = "rank 1 raised in this call: OutOfPages" if fault == "pages" else "rank 1 raised in this call: .* was freed"
        with pytest.raises((ValueError, RuntimeError), match="free pages on rank 0|was freed" if mesh.rank == 1 else message):
            ls.attention(*new, cache=cache.step([other], 15), layer=0)
        if mesh.rank == 0:
            cache.truncate([other], 0)
        return ls.attention(*tokens(1, 1), cache=cache.step([kept], 1), layer=0)

    first, second = virtual_world(2).run(run)
    assert torch.equal(first, second)
