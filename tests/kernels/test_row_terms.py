"""Row terms of backward passes: their values, and their layout for TMA."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import longspan as ls
from longspan._kernels.gpu import launch
from longspan._kernels.gpu.row_terms import delta, empty_padded_rows, is_padded, padded_length, padded_rows, rows_by_tile
from longspan._kernels.hopper.passes import HopperCall, RowGrads, row_norm, row_terms_launch
from longspan._kernels.protocol import AttentionInputs, Work
from longspan._kernels.tiling import Tiling


@pytest.mark.parametrize("length", [1, 5, 64, 67, 130])
def test_each_head_takes_a_multiple_of_16_bytes_and_ends_with_zeros(length: int) -> None:
    torch.manual_seed(0)
    q, out, grad = (torch.randn(2, 3, length, 16, dtype=torch.bfloat16) for _ in range(3))
    lse, grad_lse = torch.randn(2, 3, length), torch.randn(2, 3, length)
    lse[0, 1, 0] = -torch.inf
    norm, delta, dq = empty_padded_rows(lse), empty_padded_rows(lse), torch.ones(q.shape)
    tensors = {
        "q_ptr": None, "out_ptr": out, "do_ptr": grad, "lse_ptr": lse, "grad_lse_ptr": grad_lse, "norm_ptr": norm,
        "delta_ptr": delta, "dq_ptr": dq, "counters_ptr": None,
        "k_ptr": None, "v_ptr": None, "flag_ptr": None,
    }  # fmt: skip
    row_terms_launch(q.shape, tensors)(tensors, {})
    want = torch.where(lse == -torch.inf, torch.inf, lse * torch.log2(torch.tensor(torch.e)))
    torch.testing.assert_close(norm, want)
    torch.testing.assert_close(delta, (out.float() * grad.float()).sum(-1) - grad_lse)
    torch.testing.assert_close(row_norm(lse), want)
    assert not dq.any()
    for rows in (norm, delta):
        assert is_padded(rows) and padded_rows(rows) is rows
        whole = rows.as_strided((2, 3, padded_length(length)), (3 * padded_length(length), padded_length(length), 1))
        assert not whole[..., length:].any()


def test_rows_in_another_layout_are_copied() -> None:
    rows = torch.randn(2, 3, 7)
    copy = padded_rows(rows)
    assert not is_padded(rows) and is_padded(copy) and torch.equal(rows, copy)
    view = torch.randn(2, 3, 9)[..., 1:]  # 8 rows per head, but neither the base nor the heads are aligned
    assert not is_padded(view) and torch.equal(padded_rows(view), view)
    assert is_padded(copy[1:]) and is_padded(torch.randn(2, 3, 8))


@pytest.mark.parametrize(("starts", "aligned"), [([0, 128, 256], True), ([0, 37, 165], False)])
def test_terms_of_tiles_that_begin_at_any_row_are_in_the_order_of_tiles(starts: list[int], aligned: bool) -> None:
    """TMA reads norm and delta at multiples of 16 bytes only."""
    row = torch.tensor(starts, dtype=torch.int32)
    count = torch.tensor([*row.diff().tolist(), 270 - starts[-1]], dtype=torch.int32)
    tiles = Tiling(length=270, block=128, row=row, pos=row, count=count)
    assert launch.facts(tiles).aligned == aligned
    q, norm = torch.randn(1, 2, 270, 64, dtype=torch.bfloat16), torch.randn(1, 2, 270)
    table = ls.full().block_table(384, 384, block=128)
    call = HopperCall(AttentionInputs(q=q, k=q, v=q), Work(table=table, q_tiles=tiles, kv_tiles=tiles, scale=1.0))
    one = call.dkdv_pass(RowGrads(q, norm, norm + 1), q, q, None, ordered=False, rounded=True)
    assert one.settings["BY_TILE"] is not aligned
    if aligned:
        assert one.tensors["norm_ptr"] is norm
        return
    by_tile = rows_by_tile(norm, tiles)
    assert by_tile.shape == (1, 2, 3 * 128) and torch.equal(by_tile, one.tensors["norm_ptr"])
    assert torch.equal(one.tensors["delta_ptr"], by_tile + 1)
    for t, (start, n) in enumerate(zip(starts, count.tolist(), strict=True)):
        assert torch.equal(by_tile[..., t * 128 : t * 128 + n], norm[..., start : start + n])


def test_terms_of_one_row_fill_its_tile() -> None:
    zero, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    tiles = Tiling(length=1, block=64, row=zero, pos=zero, count=one)
    assert rows_by_tile(torch.full((2, 3, 1), 7.0), tiles).eq(7.0).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter")
@pytest.mark.parametrize("queries", [1, 64, 70])
def test_delta_of_strided_gradients(queries: int) -> None:
    out, grad_out = torch.randn(2, queries, 3, 24).transpose(1, 2), torch.randn(2, 3, 24, queries).mT
    grad_lse = torch.randn(2, queries, 3).mT
    want = (out * grad_out).sum(-1)
    for subtracted in (None, grad_lse, torch.tensor(0.5).expand(2, 3, queries)):
        made = delta(out, grad_out, subtracted)
        torch.testing.assert_close(made, want if subtracted is None else want - subtracted)
        assert made.is_contiguous()
    assert delta(out[:, :, :0], grad_out[:, :, :0], None).shape == (2, 3, 0)
