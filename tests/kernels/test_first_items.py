"""Records of the first items of a forward launch: the fields that the scheduler and the load warp would look up in the device table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from tests.kernels.calls import forward
from tests.kernels.test_hopper import on_hopper

import longspan as ls
from longspan._kernels.gpu import launch
from longspan._kernels.hopper import HopperKernel, first_items, passes
from longspan._kernels.hopper import forward_producer as producer
from longspan._kernels.hopper.item_order import ItemOrder
from longspan._kernels.protocol import Work
from longspan._kernels.tiling import Tiling
from longspan._kernels.triton import TritonKernel
from longspan._masks.tracing import trace
from longspan.testing import oracle

MASKS = {
    "causal": ls.causal(),
    "full": ls.full(),
    "documents": ls.causal() & ls.documents(lengths=[300, 200, 500, 277]),
    "window of later keys": ls.sliding_window(100, 300),
    "rows that see nothing": ls.mask_mod(lambda b, h, q, kv: (q >= 300) & (kv < 600)),
    "by head": ls.mask_mod(lambda b, h, q, kv: q - kv < 100 * (h + 1)),
    "by batch row and head": ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (kv >= 130 * (b + h))),
}


def made(mask: ls.Mask, order: ItemOrder | None = None, *, ctas: int = 11, unsplit: int = 10**6, length: int = 1277) -> Any:
    """(records [CTAs, fields] or None, the work, its sizes) for two batch rows and four heads."""
    batch, heads, tiles = 2, 4, Tiling(length=length, block=128)
    table = mask.block_table(length, length, block=128, batch=batch, heads=heads)
    work = Work(table=table, q_tiles=tiles, kv_tiles=tiles, scale=1.0)
    per_batch, per_head, rows = table.batch > 1, table.heads > 1, launch.busy_rows(table)
    items = rows * (1 if per_batch else batch) * (1 if per_head else heads)
    order = order or ItemOrder(1 if per_head else 2, rows, 1 if per_head else 2)
    sizes = {
        "rows": rows, "tiles": table.q_tiles, "heads": heads, "M_SUBS": 1, "N_SUBS": 2, "PER_BATCH": per_batch, "PER_HEAD": per_head,
        "heavy_items": items // rows * order.heavy_rows,
    }  # fmt: skip
    records = first_items.first_records(work, order, sizes, q_len=length, items=items, unsplit=min(unsplit, items), ctas=ctas)
    return None if records is None else records.view(-1, producer.ITEM_FIELDS.value), work, sizes


@pytest.mark.parametrize("name", MASKS)
def test_records_hold_what_the_device_table_says(name: str) -> None:
    records, work, sizes = made(MASKS[name])
    device = launch.device_table(work.table, work.kv_tiles, torch.device("cpu"), shared=1, positions=False)
    assert len(records) == 11 and len({tuple(r[:3].tolist()) for r in records}) == 11
    lengths = []
    for i, record in enumerate(records.tolist()):
        head, batch, tile = record[producer.HEAD.value], record[producer.BATCH.value], record[producer.ROW.value] // 128
        row = tile + (head * sizes["tiles"] if sizes["PER_HEAD"] else 0)
        row += batch * sizes["tiles"] * (sizes["heads"] if sizes["PER_HEAD"] else 1) if sizes["PER_BATCH"] else 0
        partial, full = device.counts[2 * row : 2 * row + 2].tolist()
        partial_run, full_run = int(device.partial[0][2 * row]), int(device.full[0][2 * row])
        runs, at = (device.partial, partial_run) if partial else (device.full, full_run)
        leading = int(device.partial[2][device.partial[0][2 * row + 1] - 1]) if partial else 0
        items = sizes["rows"] * (1 if sizes["PER_BATCH"] else 2) * (1 if sizes["PER_HEAD"] else 4)
        assert record == [
            head, batch, tile * 128, tile * 128, 1277 - tile * 128, 2 * partial, 2 * (partial + full), partial_run, full_run, 0,
            i - items, 0, int(runs[1][at]), int(runs[2][at]), leading, 0,
        ]  # fmt: skip
        assert partial + full > 0
        lengths.append(partial + full)
    assert lengths[0] == int(work.table.tiles_per_row.max())


def test_fields_of_records_are_those_of_the_kernel() -> None:
    names = ("HEAD", "BATCH", "ROW", "POSITION", "ROWS_LEFT", "PARTIAL_BLOCKS", "END_BLOCK", "PARTIAL_RUN", "FULL_RUN", "FIRST_BLOCK",
             "SPLIT_PART", "COMPLETE", "FIRST_TILE", "LAST_TILE", "LEADING_TILE")  # fmt: skip
    assert [getattr(producer, name).value for name in names] == list(range(len(names)))


def test_large_launches_and_launches_that_begin_with_split_items_have_no_records() -> None:

    assert made(ls.causal(), ctas=10)[0] is not None and made(ls.causal(), ctas=9)[0] is None  # 80 items
    assert made(ls.causal(), unsplit=11)[0] is not None and made(ls.causal(), unsplit=10)[0] is None


def test_a_launch_with_fewer_items_than_ctas_has_a_record_for_each_item() -> None:
    records, _, _ = made(ls.full(), ctas=132)
    assert len(records) == 80


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "documents", "window of later keys"])
def test_records_change_no_bit_and_one_main_loop_matches_the_oracle(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One main loop raises the running max at other scores than two (`hopper.running_max`)."""
    on_hopper()
    kernel, traced, tiles = HopperKernel(fallback=TritonKernel()), trace(MASKS[name], "mask"), Tiling(length=1277, block=128)
    q, k, v = (torch.randn(2, h, 1277, 128, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    table, constants, prepare = MASKS[name].block_table(1277, 1277, block=128), [], passes.HopperCall.prepare

    def recorded(*arguments: Any) -> Any:
        constants.append(prepare(*arguments).constants)
        return prepare(*arguments)

    def run() -> Any:
        captured = [t.cuda() for t in traced.captured()]
        # A copy of the table: launches are prepared once for each table.
        work = Work(table=replace(table), q_tiles=tiles, kv_tiles=tiles, scale=0.1, mask=traced.program, mask_captured=captured)
        return forward(kernel, q, k, v, work)

    monkeypatch.setattr(passes.HopperCall, "prepare", recorded)
    results = []
    for one_loop in (True, False):
        monkeypatch.setattr(passes, "takes_one_loop", lambda *_, one_loop=one_loop: one_loop)
        with_records = run()
        with monkeypatch.context() as patched:
            patched.setattr(passes, "first_records", lambda *_, **__: None)
            without = run()
        assert torch.equal(with_records.out, without.out) and torch.equal(with_records.lse, without.lse)
        results.append(without)
    records = min(80, passes.persistent_ctas(q.device))
    assert [(c["ONE_LOOP"], c["first_items"]) for c in constants] == [(True, records), (True, 0), (False, records), (False, 0)]
    # Documents begin with the diagonal, and keep the max that they have there.
    leads = 1 if name == "documents" else None
    assert [(c["lead"], c["FOLLOWED"]) for c in constants] == [(leads, not leads)] * 2 + [(leads, False)] * 2
    want, want_lse = oracle(q, k, v, mask=MASKS[name], scale=0.1, return_lse=True)
    dense = oracle(q, k, v, mask=MASKS[name], scale=0.1, dtype=q.dtype)
    for result in results:
        assert float((result.out.double() - want).norm()) <= 1.5 * float((dense.double() - want).norm())
        torch.testing.assert_close(result.lse.double(), want_lse, atol=1e-4, rtol=0)
