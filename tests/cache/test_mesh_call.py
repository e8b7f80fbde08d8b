"""One layer's attention over a cache on ranks: what ranks compare, which tensors they pass, and what an error names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cache.test_kv_cache import make_cache, tokens
from torch import Tensor

import longspan as ls
from longspan._engine import cached_chunk, cached_mesh
from longspan._engine.cached_chunk import Chunk, first_gathered
from longspan._engine.cached_mesh import _MeshCall, _tokens_of, attend_over_mesh
from longspan._engine.cached_tokens import StepQueries, StepResults
from longspan._kernels.paged import PagedWork
from longspan.testing import virtual_world


@pytest.mark.parametrize(
    ("length", "count", "shared", "window", "fewer"),
    [
        # Two KV heads of 16 + 24 elements of two bytes: 160 bytes per token. Partial results of four heads, 4 · 25 · 4 bytes per new token.
        (5, 2, False, None, False),
        (4, 2, False, None, True),
        # Latent KV: two heads of 16 elements, 64 bytes per token.
        (25, 4, True, None, False),
        (24, 4, True, None, True),
        # A window of 20 tokens of queries from 300 on: tokens from 256 on are gathered.
        (330, 30, False, 20, True),
        (329, 29, False, 20, False),
    ],
)
def test_kv_is_passed_where_it_is_fewer_bytes(length: int, count: int, shared: bool, window: int | None, fewer: bool) -> None:
    call = SimpleNamespace(
        q=torch.zeros(1, 4, 7, 16).bfloat16(), heads=4, dim=24, wide=torch.float32, work=paged_work(window=window),
        step=SimpleNamespace(ranges=SimpleNamespace(lengths=(9, length), starts=(8, length - count), counts=(1, count))),
        pages=SimpleNamespace(k=torch.zeros(3, 2, 8, 16).bfloat16(), shared=shared),
    )  # fmt: skip
    assert _MeshCall._kv_is_fewer_bytes(call, 1) is fewer  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "fewer"), [(10, False), (9, True)])
def test_fp8_kv_is_half_the_bytes(length: int, fewer: bool) -> None:
    call = SimpleNamespace(
        q=torch.zeros(1, 4, 7, 16).bfloat16(), heads=4, dim=24, wide=torch.float32, work=paged_work(),
        step=SimpleNamespace(ranges=SimpleNamespace(lengths=(9, length), starts=(8, length - 2), counts=(1, 2))),
        pages=SimpleNamespace(k=torch.zeros(3, 2, 8, 16).to(torch.float8_e4m3fn), shared=False),
    )  # fmt: skip
    assert _MeshCall._kv_is_fewer_bytes(call, 1) is fewer  # type: ignore[arg-type]


def paged_work(**changes: Any) -> PagedWork:
    empty = {"mask": None, "mask_captured": [], "score": None, "score_captured": [], "sink": None, "window": None}
    return PagedWork(scale=0.25, **(empty | changes))


def test_positions_of_pages_are_those_inside_the_range() -> None:
    assert _tokens_of(range(1, 5, 2), 4, 5, 14).tolist() == [5, 6, 7, 12, 13]
    assert _tokens_of(range(2), 3, 0, 6).tolist() == [0, 1, 2, 3, 4, 5]
    empty = _tokens_of(range(2, 2), 4, 0, 99)
    assert empty.tolist() == [] and empty.dtype == torch.int64


def test_ranks_compare_every_property_of_the_call() -> None:
    def run(mesh: ls.Mesh) -> dict[str, str]:
        cache = make_cache(mesh=mesh, page_size=4, layers=3, window=9, pages=20)
        ids = cache.allocate(2)
        step = cache.step(ids, [2, 3])
        mask, score = ls.causal().traced.program, SimpleNamespace(key="score")
        work = paged_work(
            mask=mask, mask_captured=[torch.zeros(5).int()], score=score, score_captured=[torch.zeros(2, 3)], sink=torch.zeros(4).half()
        )
        q = torch.zeros(1, 4, 5, 16)
        call = _MeshCall(StepQueries(q, step, 2), cache.layer_pages(2), work, mesh, kernel="cpu", with_lse=True)
        assert (call.heads, call.dim, call.wide) == (4, 16, torch.float32)
        assert call.fields["mask"] == mask.key != ""
        plain = _MeshCall(StepQueries(q, step, 0), cache.layer_pages(0), paged_work(), mesh, kernel="auto", with_lse=False)
        different = {name for name, text in plain.fields.items() if text != call.fields[name]}
        assert different == {"layer", "mask", "score_mod", "return_lse", "kernel", "sink", "captured tensors"}
        assert [plain.fields[name] for name in ("mask", "score_mod", "sink", "captured tensors")] == ["", "", "", "[]"]
        return call.fields

    first, second = virtual_world(2).run(run)
    assert first == second
    assert first | {"mask": "", "ranks that hold the first pages": ""} == {
        "cache (page_size, layers, kv_heads, head_dim, value_dim, window, shared_kv, dtype)": "(4, 3, 2, 16, 16, 9, False, torch.float32)",
        "k_scale and v_scale of the cache": "None",
        "ranks that hold the first pages": "", "layer": "2", "sequences": "(0, 1)", "starts": "(0, 0)", "lengths": "(2, 3)", "mask": "",
        "score_mod": "score", "scale": "0.25", "queries": "(1, 4, 5, 16) torch.float32", "return_lse": "True", "kernel": "cpu",
        "sink": "(4,) torch.float16", "captured tensors": "[((5,), torch.int32), ((2, 3), torch.float32)]",
    }  # fmt: skip


@pytest.mark.parametrize(("count", "named"), [(1, "0"), (32, ", ".join(map(str, range(32)))), (33, ", ".join(map(str, range(32))) + ", …")])
def test_an_error_names_the_first_32_sequences(count: int, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("a rank is late", 7)

    monkeypatch.setattr(cached_mesh, "_MeshCall", fail)
    queries = StepQueries(torch.zeros(1), SimpleNamespace(ids=tuple(range(count))), 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as caught:
        attend_over_mesh(queries, None, None, None, kernel="auto", with_lse=False)  # type: ignore[arg-type]
    assert caught.value.args[0].endswith(f"; sequences in flight: {named}") and caught.value.args[1:] == (7,)


@pytest.mark.parametrize("shape", ["rows", "ragged"])
def test_queries_and_results_of_a_sequence_are_its_rows(shape: str) -> None:
    ids, ranges = (3, 5), SimpleNamespace(firsts=[0, 2], counts=[2, 4] if shape == "ragged" else [2, 2])
    step: Any = SimpleNamespace(ids=ids, ranges=ranges)
    size = (1, 4, 6, 8) if shape == "ragged" else (2, 4, 2, 8)
    q = torch.arange(4 * 6 * 8 if shape == "ragged" else 2 * 4 * 2 * 8).float().view(size)
    results = StepResults(StepQueries(q, step), torch.zeros(size), torch.zeros(size[:3]))
    count = ranges.counts[1]
    want = q[0, :, 2:6] if shape == "ragged" else q[1]
    assert results.of.layer == 0 and torch.equal(results.queries(1), want)
    results.add(1, want, want[..., 0])
    results.add(1, -want[:, 1:2], -want[:, 1:2, 0], slice(1, 2))
    expected = want.clone()
    expected[:, 1:2] *= -1
    where = (0, slice(None), slice(2, 6)) if shape == "ragged" else (1,)
    assert torch.equal(results.out[where], expected) and torch.equal(results.lse[where], expected[..., 0])
    assert int((results.out != 0).sum()) == int((expected != 0).sum()) and want.shape == (4, count, 8)


@pytest.mark.parametrize(("start", "window", "first"), [(0, None, 0), (500, None, 0), (129, 2, 128), (129, 3, 0), (700, 100, 512)])
def test_a_chunk_gathers_whole_tiles_from_the_first_key_of_its_window(start: int, window: int | None, first: int) -> None:
    work = paged_work(window=window)
    assert first_gathered(work, start) == first
    assert work.first_key(start) in range(first, first + 128) or window is None


def test_the_work_of_a_chunk_is_cut_at_its_own_queries_and_at_tiles_of_keys() -> None:
    work = paged_work(mask=ls.causal().traced.program)
    made = cached_chunk._chunk_work(work, Chunk(3, 300, 450, 128, 450), heads=4, block=(64, 128))
    assert made.first_batch == 3 and (made.scale, made.mask) == (0.25, work.mask)
    assert (made.table.q_len, made.table.kv_len) == (150, 322)
    tiles = [(t.length, t.row.tolist(), t.pos.tolist(), t.count.tolist()) for t in (made.q_tiles, made.kv_tiles)]
    assert tiles[0] == (150, [0, 64, 128], [300, 364, 428], [64, 64, 22])
    assert tiles[1] == (322, [0, 128, 256], [128, 256, 384], [128, 128, 66])
    assert made.table.to_dense()[0, 0].tolist() == [[2, 1, 0], [2, 1, 1], [1, 1, 1]]
    whole = cached_chunk._chunk_work(work, Chunk(0, 0, 200, 0, 200), heads=4, block=(128, 128))
    assert (whole.kv_tiles.length, whole.kv_tiles.block, whole.kv_tiles.row) == (200, 128, None)


def test_layers_share_the_tiles_of_a_chunk_unless_the_mask_reads_tensors() -> None:
    work, chunk, block = paged_work(mask=ls.causal().traced.program), Chunk(0, 0, 200, 0, 200), (128, 128)
    different = [
        (work, chunk, 4, block),
        (paged_work(), chunk, 4, block),
        (work, Chunk(0, 0, 200, 128, 200), 4, block),
        (work, chunk, 8, block),
        (work, chunk, 4, (64, 128)),
    ]
    assert len({cached_chunk._key(*parts) for parts in different}) == len(different)
    assert cached_chunk._key(paged_work(mask_captured=[torch.zeros(1)]), chunk, 4, block) is None


def test_a_chunk_over_a_mesh_has_the_bits_of_every_rank_and_dtypes_of_its_queries() -> None:
    def run(mesh: ls.Mesh) -> list[torch.Tensor]:
        cache = make_cache(mesh=mesh, dtype=torch.bfloat16, pages=40)
        q, k, v = (t.bfloat16() for t in tokens(1, 90))
        step = cache.step(cache.allocate(1), 90)
        out, lse = ls.attention(q, k, v, cache=step, layer=0, mask=ls.causal(), sink=torch.ones(4), return_lse=True)
        assert step.passed == {0: "KV"} and (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        return [out, lse]

    first, *others = virtual_world(3).run(run)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("count", [2, 90])
def test_odd_dims_and_strided_queries_give_the_results_of_one_device(count: int) -> None:
    """A row of out and lse has 5 · 2 + 4 bytes. 90 new tokens pass KV, two pass partial results."""
    generator = torch.Generator().manual_seed(count)
    q, k, v = (torch.randn(1, h, d, count, generator=generator).bfloat16().mT for h, d in ((4, 6), (2, 6), (2, 5)))
    sink = torch.randn(4, generator=generator, dtype=torch.float64)

    def run(mesh: ls.Mesh | None) -> tuple[torch.Tensor, torch.Tensor]:
        cache = make_cache(mesh=mesh, dtype=torch.bfloat16, pages=40, head_dim=6, value_dim=5)
        step = cache.step(cache.allocate(1), count)
        out, lse = ls.attention(q, k, v, cache=step, layer=0, mask=ls.causal(), sink=sink, return_lse=True)
        assert mesh is None or step.passed == {0: "KV" if count == 90 else "partial results"}
        return out, lse

    want = run(None)
    for out, lse in virtual_world(2).run(run):
        assert (out.dtype, lse.dtype, lse.is_contiguous()) == (torch.bfloat16, torch.float32, True)
        torch.testing.assert_close(out, want[0], rtol=0, atol=0.01)
        torch.testing.assert_close(lse, want[1])


def test_one_row_of_an_odd_dim_has_its_lse() -> None:
    def run(mesh: ls.Mesh) -> tuple[Tensor, Tensor]:
        cache = ls.KVCache(pages=4, page_size=8, layers=1, kv_heads=1, head_dim=8, value_dim=5, dtype=torch.float16, mesh=mesh)
        q, k = torch.ones(2, 1, 1, 1, 8, dtype=torch.float16)
        out, lse = ls.attention(q, k, k[..., :5], cache=cache.step(cache.allocate(1), 1), layer=0, return_lse=True, scale=0.5)
        return out, lse

    for out, lse in virtual_world(2).run(run):
        assert (out == 1).all() and lse.item() == 4.0
