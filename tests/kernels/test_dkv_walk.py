"""The steps that the producer warp of the dK/dV kernel loads, by its own source with Python integers for scalars."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from tests.kernels.shards import work_of

pytest.importorskip("triton.experimental.gluon")

from longspan._kernels.gpu import launch, tile_access
from longspan._kernels.hopper import dkv_producer, dq_order
from longspan._kernels.protocol import Work

CPU = torch.device("cpu")
Step = tuple[int, int, int, int, int]  # (key tile, head, step of queries, kind, additions before)


class Pointer:
    """A pointer into a tensor on the host, as device code adds to it and loads from it."""

    def __init__(self, tensor: torch.Tensor, at: int = 0) -> None:
        self.tensor, self.at = tensor, at

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.tensor, self.at + int(offset))

    def __sub__(self, offset: int) -> Pointer:
        return self + -offset


def load(pointer: Pointer, mask: bool = True, other: int = 0) -> int:
    return int(pointer.tensor[pointer.at]) if mask else other


def steps_of(work: Work, heads: int, shared: int, together: int, *, ordered: bool) -> list[Step]:
    """The steps of all items of one batch row, as `produce` loads them."""
    by_keys = work.table.transposed
    table = launch.device_table(by_keys, work.q_tiles, CPU, shared=shared, positions=False)
    fixed, order = dq_order.dq_order(by_keys, shared, CPU), Pointer(table.order)
    steps: list[Step] = []
    items = iter(range(10**6))
    item_tile = [0]

    def load_step(*args: Any) -> int:
        (h, kind, earlier, semaphore) = (args[6], args[13], args[14], args[15])
        steps.append((item_tile[0], h, -1 if semaphore is None else semaphore - h * 1000, int(kind), -1 if earlier is None else earlier))
        return 0

    def place(item: int, *_: Any) -> tuple[int, int, int, int]:
        groups = heads // shared
        row = int((fixed.order if ordered else order.tensor)[item if by_keys.heads > 1 else item // groups])
        item_tile[0] = row % by_keys.q_tiles
        return item_tile[0], 0, 0, row // by_keys.q_tiles % groups if by_keys.heads > 1 else item % groups

    anything: Any = types.SimpleNamespace(wait=lambda *_: None, arrive=lambda *_, **__: None, index=lambda *_: None)
    device = types.SimpleNamespace(
        where=lambda c, a, b: a if c else b, minimum=min, load=load, constexpr=lambda x: x, jit=lambda f: f,
    )  # fmt: skip
    names = {
        **{n: getattr(v, "value", v) for n, v in vars(dkv_producer).items()},
        "gl": device, "mbarrier": anything, "take_item": lambda _: next(items), "place_in_order": place,
        "ring_slot": lambda *_: 0, "ring_phase": lambda *_: 0, "store_int": lambda *_: None, "step_record": lambda *_: 0,
        "_load_step": load_step, "_load_item": lambda *_: None,
        "span": lambda n, *_: (int(work.kv_tiles.span(n)[0]), 0, int(work.kv_tiles.span(n)[1])),
        "run_place": _plain("run_place", tile_access, {"tl": device}), "table_row": _plain("table_row", tile_access, {"tl": device}),
    }  # fmt: skip
    names["_next_run"] = _plain("_next_run", dkv_producer, names)
    produce = _plain("produce", dkv_producer, names)
    runs = [types.SimpleNamespace(ptr=Pointer(r[0]), first=Pointer(r[1]), last=Pointer(r[2])) for r in (table.full, table.partial)]
    side = tuple(None if t is None else Pointer(t) for t in (work.q_tiles.row, work.q_tiles.pos, work.q_tiles.count))
    args = types.SimpleNamespace(
        ptr=Pointer(fixed.ptr), before=Pointer(fixed.before), semaphores_per_head=1000, upward=0, together=together
    )  # fmt: skip
    buffers = types.SimpleNamespace(steps=None)
    bars = types.SimpleNamespace(q_empty=anything, q_full=anything, do_empty=None, do_full=anything)
    item_bars = types.SimpleNamespace(empty=anything, k_full=anything)
    count, groups = by_keys.q_tiles * (heads // shared), heads // shared
    produce(
        None, count, None, None, None, None, None, None, order, *runs, args, anything if ordered else None, side, None,
        by_keys.q_tiles, by_keys.q_tiles, heads, groups, shared, 1, groups, 0, work.q_tiles.length, work.kv_tiles.length, None, None,
        buffers, None, item_bars, bars, None, False, by_keys.heads > 1, 128, 64, 2, 2, 128, 128, False, True,
    )  # fmt: skip
    return steps


def _plain(name: str, module: Any, names: dict[str, Any]) -> Any:
    """A device function as a Python function with other globals."""
    function = getattr(module, name).fn
    return types.FunctionType(function.__code__, {**vars(module), **names}, name, function.__defaults__)


MODS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q - kv < 300) & (kv - q < 130),
    "by head": lambda b, h, q, kv: (q >= kv) & (q - kv < 200 * (h + 1)),
}


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("name", MODS)
def test_items_walk_their_queries_downwards_and_wait_for_earlier_key_tiles(name: str, together: int) -> None:
    heads, shared = 8, 4
    by_head = name == "by head"
    together = 1 if by_head else together
    work = work_of(MODS[name], ((0, 1000),), ((0, 1000),), block=128, heads=heads)
    steps = steps_of(work, heads, shared, together, ordered=True)
    kinds = work.table.to_dense()[0]
    want = [
        (tile, h, 2 * q + half)
        for tile in range(work.table.kv_tiles)
        for group in range(heads // shared)
        for first in range(group * shared, (group + 1) * shared, together)
        for q in range(work.table.q_tiles - 1, -1, -1)
        for h in range(first, first + together)
        if kinds[h if by_head else 0, q, tile] > 0
        for half in range(-(-work.q_tiles.span(q)[1] // 64))
    ]
    assert [step[:3] for step in steps] == want
    added: dict[tuple[int, int], int] = {}
    for _, h, n, _, earlier in steps:
        assert earlier == added.get((h, n), 0)
        added[h, n] = earlier + 1
    unordered = steps_of(work, heads, shared, together, ordered=False)  # as invariant passes without dQ walk
    by_item = [sorted(((tile, h // shared), i, h) for i, (tile, h, *_) in enumerate(of)) for of in (steps, unordered)]
    assert [(item, h) for item, _, h in by_item[0]] == [(item, h) for item, _, h in by_item[1]]
