"""Static masks: contents that change in place give the results of the mask that they were updated to."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._masks.block_table import FULL, PARTIAL
from longspan._masks.static_table import StaticTable, with_every_row_busy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 400
BATCHES = ([400], [150, 250], [1, 128, 71, 200], [30] * 13 + [10], [390, 10])


def packed(lengths: list[int], *, padding: int = 0) -> ls.Mask:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ids[LENGTH - padding :] = -1
    return ls.causal() & ls.documents(ids=ids)


def results(mask: Any, *, kernel: str) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) of one call."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 1, LENGTH, 16, generator=generator).to(DEVICE) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = ls.attention(q, k, v, mask=mask, kernel=kernel, return_lse=True)
    return out, lse, *torch.autograd.grad(out, (q, k, v), grad)


def test_a_static_mask_is_a_mask_mod() -> None:
    three = torch.tensor(3)
    static = ls.StaticMask(ls.mask_mod(lambda b, h, q, kv: q - kv < 2 * h - three * b), device="cpu")
    b, h, q, kv = (torch.arange(n).view(shape) for n, shape in zip((2, 3, 5, 7), ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)), strict=True))
    assert torch.equal(static(b, h, q, kv), q - kv < 2 * h - 3 * b)


def test_static_tables_of_fewer_queries_than_keys_equal_the_masks() -> None:
    limits = torch.tensor([300, 10, 130])
    mask = ls.mask_mod(lambda b, h, q, kv: kv < limits[q % 3] + 0 * h)
    static = ls.StaticMask(mask, device="cpu").static_table(70, 310, (32, 64), batch=2, heads=3)
    table = mask.block_table(70, 310, block=(32, 64), batch=2, heads=3)
    assert (static.q_len, static.kv_len, static.block) == (70, 310, (32, 64))
    assert torch.equal(static.to_dense(), table.to_dense())


def test_an_updated_mask_gives_the_results_of_its_new_contents() -> None:
    pytest.importorskip("triton")
    static = ls.StaticMask(packed(BATCHES[1]), device=DEVICE)
    results(static, kernel="triton")
    mask = packed(BATCHES[2], padding=150)
    static.update(mask)
    for got, expected in zip(results(static, kernel="triton"), results(mask, kernel="dense"), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", BATCHES)
def test_a_static_table_has_the_tiles_of_its_contents_in_the_same_memory(lengths: list[int]) -> None:
    pytest.importorskip("triton")
    from longspan._kernels.gpu import launch
    from longspan._kernels.tiling import Tiling

    first, second = (packed(x).block_table(LENGTH) for x in (BATCHES[2], lengths))
    static, tiles = StaticTable.of(first, runs_per_row=4), Tiling(length=LENGTH, block=128)
    for table, plain in ((static, second), (static.transposed, second.transposed)):
        on_device = launch.device_table(table, tiles, torch.device("cpu"), shared=1, positions=False)
        addresses = [t.data_ptr() for t in (on_device.order, *on_device.full, *on_device.partial, on_device.counts)]
        static.replace_contents(second)
        again = launch.device_table(table, tiles, torch.device("cpu"), shared=1, positions=False)
        assert [t.data_ptr() for t in (again.order, *again.full, *again.partial, again.counts)] == addresses
        expected = launch.device_table(plain, tiles, torch.device("cpu"), shared=1, positions=False)
        for got, want in zip((again.order, *again.full, *again.partial, again.counts),
                             (expected.order, *expected.full, *expected.partial, expected.counts), strict=True):  # fmt: skip
            size = len(want) - 4  # without padding
            assert torch.equal(got[:size], want[:size])
        static.replace_contents(with_every_row_busy(first))
    assert torch.equal(static.to_dense(), first.to_dense()) and static.counts() == first.counts()


def test_a_mask_made_in_inference_mode_is_updated_in_and_outside_of_it() -> None:
    with torch.inference_mode():
        static = ls.StaticMask(packed(BATCHES[1]), device=DEVICE)
        static.static_table(LENGTH, LENGTH, (128, 128), batch=1, heads=1)
        static.update(packed(BATCHES[2]))
    static.update(packed(BATCHES[3]))
    expected = packed(BATCHES[3]).block_table(LENGTH)
    assert static.static_table(LENGTH, LENGTH, (128, 128), batch=1, heads=1).counts() == expected.counts()


def test_rows_without_tiles_get_one_that_the_mask_hides() -> None:
    table = packed([400], padding=300).block_table(LENGTH)
    busy = with_every_row_busy(table)
    assert table.tiles_per_row.tolist() == [1, 0, 0, 0] and busy.tiles_per_row.tolist() == [1, 1, 1, 1]
    assert busy.kind.tolist() == [PARTIAL] * 4 and busy.first.tolist() == busy.last.tolist() == [0, 1, 2, 3]
    for name in ("ptr", "first", "last", "kind"):
        assert getattr(busy, name).dtype == getattr(table, name).dtype, name
    assert with_every_row_busy(busy) is busy


def test_the_tile_of_an_empty_row_is_at_its_own_position() -> None:
    """Rows of 128 queries over KV tiles of 64 tokens, in two heads; the tiles of other rows stay."""
    mask = ls.mask_mod(lambda b, h, q, kv: (q // 128 == 1 + h) & (kv < 100))
    table = mask.block_table(500, 300, block=(128, 64), heads=2)
    busy = with_every_row_busy(table)
    runs = list(zip(busy.first.tolist(), busy.last.tolist(), busy.kind.tolist()))
    assert table.tiles_per_row.tolist() == [0, 2, 0, 0, 0, 0, 2, 0] and busy.tiles_per_row.tolist() == [1, 2, 1, 1, 1, 1, 2, 1]
    rows = [runs[a:b] for a, b in itertools.pairwise(busy.ptr.tolist())]
    own = [[(at, at, PARTIAL)] for at in (0, 2, 4, 4)]
    seen = [(0, 0, FULL), (1, 1, PARTIAL)]
    assert rows == [own[0], seen, own[2], own[3], own[0], own[1], seen, own[3]]
    assert with_every_row_busy(ls.full().block_table(5, 0)).rows == 1


def test_a_mask_of_another_form_raises_and_changes_nothing() -> None:
    static = ls.StaticMask(packed(BATCHES[1]), device="cpu")
    before = [t.clone() for t in static.traced.captured()]
    shorter = ls.causal() & ls.documents([100, 200])
    scattered = ls.causal() & ls.documents(ids=[0, 1] * 200)
    for other in (shorter, scattered, ls.documents([400]), packed([400]) & ls.sliding_window(64), ls.causal()):
        with pytest.raises(ValueError, match=r"StaticMask.update: expected a (mask of the form|tensor)"):
            static.update(other)
    assert all(torch.equal(a, b) for a, b in zip(before, static.traced.captured(), strict=True))


def test_contents_that_need_a_gradient_are_copied_without_one() -> None:
    table = torch.arange(16.0)
    static = ls.StaticMask(lambda b, h, q, kv: table[q] >= table[kv], device="cpu")
    learned = table.flip(0).requires_grad_()
    static.update(lambda b, h, q, kv: learned[q] >= learned[kv])
    (captured,) = static.traced.captured()
    assert torch.equal(captured, table.flip(0)) and not captured.requires_grad


def test_contents_without_room_raise_and_change_nothing() -> None:
    tokens = torch.arange(1024)
    static = ls.StaticMask(ls.documents(ids=tokens * 0), device="cpu", runs_per_row=1)
    table = static.static_table(1024, 1024, (128, 128), batch=1, heads=1)
    kept = table.to_dense()
    many = ls.StaticMask(ls.documents(ids=tokens // 256 % 2), device="cpu", runs_per_row=1)
    with pytest.raises(ValueError, match=r"at most 1 runs of tiles per row, got 16 in 8 rows; make it with runs_per_row=2"):
        many.static_table(1024, 1024, (128, 128), batch=1, heads=1)
    with pytest.raises(ValueError, match=r"runs_per_row|form"):
        static.update(ls.documents(ids=tokens // 256 % 2))
    assert torch.equal(table.to_dense(), kept)


def test_static_masks_reject_operators_copies_masks_without_tensors_and_other_kernels() -> None:
    static = ls.StaticMask(packed(BATCHES[1]), device="cpu")
    combinations = (lambda: static & ls.causal(), lambda: ls.causal() | static, lambda: ~static)
    for combine in combinations:
        with pytest.raises(TypeError, match="combine first"):
            combine()
    with pytest.raises(TypeError, match="expected to stay in its process"):
        copy.copy(static)
    with pytest.raises(ValueError, match="expected a mask that reads tensors"):
        ls.StaticMask(ls.causal(), device="cpu")
    with pytest.raises(TypeError, match="not static"):
        ls.StaticMask(static, device="cpu")
    with pytest.raises(ValueError, match="'cpu' does not support StaticMask"):
        results(ls.StaticMask(packed(BATCHES[1]), device=DEVICE), kernel="cpu")
    with ls.invariant(), pytest.raises(ValueError, match="does not support StaticMask"):
        results(ls.StaticMask(packed(BATCHES[1]), device=DEVICE), kernel="triton")


def test_a_capture_with_another_mask_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan._engine import attention

    monkeypatch.setattr(attention, "is_captured", lambda q: True)
    with pytest.raises(RuntimeError, match=r"cannot capture a CUDA graph: the mask reads tensors.*Use longspan\.StaticMask"):
        results(packed(BATCHES[1]), kernel="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_step_replays_on_new_documents(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        length = 2048
        q, k, v, grad = (torch.randn(1, h, length, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8))
        q, k, v = (t.requires_grad_() for t in (q, k, v))

        def lengths(seed: int) -> list[int]:
            cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(seed))[: 1 + seed % 20].sort().values + 1
            return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([length])).tolist()  # type: ignore[no-any-return]

        static = ls.StaticMask(ls.causal() & ls.documents(lengths(0)))

        def step() -> tuple[Tensor, ...]:
            out = ls.attention(q, k, v, mask=static)
            return out, *torch.autograd.grad(out, (q, k, v), grad)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        for seed in range(20):
            mask = ls.causal() & ls.documents(lengths(seed))
            static.update(mask)
            graph.replay()
            torch.cuda.synchronize()
            eager = step()
            out = ls.attention(q, k, v, mask=mask)
            for i, (got, same, other) in enumerate(zip(captured, eager, (out, *torch.autograd.grad(out, (q, k, v), grad)), strict=True)):
                assert torch.equal(got, same) or not (deterministic or i == 0), f"seed {seed}, result {i}"
                torch.testing.assert_close(got, other, atol=2e-2, rtol=2e-2)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_static_mask_without_a_cuda_device_raises() -> None:
    with pytest.raises(RuntimeError, match="StaticMask: expected a CUDA device, got device='cuda'"):
        ls.StaticMask(packed(BATCHES[1]))
