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
from longspan._kernels.hopper.dq_order import OrderChoice
from longspan._kernels.protocol import Work
from longspan._masks.block_table import PARTIAL

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


def steps_of(work: Work, heads: int, shared: int, choice: OrderChoice, *, ordered: bool, merged: bool = True) -> list[Step]:
    """The steps of all items of one batch row, as `produce` loads them."""
    by_keys = work.table.transposed
    table = launch.device_table(by_keys, work.q_tiles, CPU, shared=shared, positions=False)
    fixed, order = dq_order.dq_order(by_keys, work.q_tiles, choice, shared, CPU), Pointer(table.order)
    steps: list[Step] = []
    items = iter(range(10**6))
    item_tile = [0]

    def load_step(*args: Any) -> int:
        (h, row, kind, earlier, semaphore) = (args[6], args[7], args[13], args[14], args[15])
        assert semaphore is None or semaphore == h * 1000 + row // 64
        steps.append((item_tile[0], h, row // 64, int(kind), -1 if earlier is None else earlier))
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
        ptr=Pointer(fixed.ptr), legs=Pointer(fixed.legs), before=Pointer(fixed.before), semaphores_per_head=1000,
        together=shared if ordered else choice.together,
    )  # fmt: skip
    buffers = types.SimpleNamespace(steps=None)
    bars = types.SimpleNamespace(q_empty=anything, q_full=anything, do_empty=None, do_full=anything)
    item_bars = types.SimpleNamespace(empty=anything, k_full=anything)
    count, groups = by_keys.q_tiles * (heads // shared), heads // shared
    produce(
        None, count, None, None, None, None, None, None, order, *runs, args, anything if ordered else None, side, None,
        by_keys.q_tiles, by_keys.q_tiles, heads, groups, shared, 1, groups, 0, work.q_tiles.length, work.kv_tiles.length, None, None,
        buffers, None, item_bars, bars, None, False, by_keys.heads > 1, 128, 64, 2, 2, 128, 128, False, merged,
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


CHOICES = {
    "plain": OrderChoice(together=2, all_heads=True),
    "one head": OrderChoice(together=1, all_heads=True),
    "all heads": OrderChoice(together=4, all_heads=True),
    "first wave upwards": OrderChoice(together=4, all_heads=True, wave=3, upward=3),
    "first wave upwards, one head": OrderChoice(together=1, all_heads=True, wave=3, upward=4),
    "all upwards": OrderChoice(together=2, all_heads=True, wave=8, upward=8),
    "long": OrderChoice(together=1, all_heads=True, wave=2, long=(0,), begin=3, chunk=2),
    "two long": OrderChoice(together=2, all_heads=True, wave=1, long=(0, 5), begin=2, chunk=3),
}


def wanted_walk(choice: OrderChoice, tile: int, queries: list[int]) -> list[list[int]]:
    """The query tiles of an item in phases, each of which is walked through one group of heads after the other."""
    if tile in choice.long:
        parts = [q for q in queries if q >= choice.begin], [q for q in queries if q < choice.begin]
        starts = choice.begin, 0
        return [[q for q in part if (q - s) // choice.chunk == n] for part, s in zip(parts, starts, strict=True) for n in range(9)]
    return [[q for q in queries if q < choice.upward], [q for q in reversed(queries) if q >= choice.upward]]


@pytest.mark.parametrize("of", CHOICES)
@pytest.mark.parametrize("name", MODS)
def test_items_walk_their_queries_in_phases_and_wait_for_items_taken_earlier(name: str, of: str) -> None:
    heads, shared, choice = 8, 4, CHOICES[of]
    by_head = name == "by head"
    together = 1 if by_head else choice.together
    work = work_of(MODS[name], ((0, 1000),), ((0, 1000),), block=128, heads=heads)
    steps = steps_of(work, heads, shared, choice, ordered=True)
    kinds = work.table.to_dense()[0]
    others = [tile for tile in range(work.table.kv_tiles) if tile not in choice.long]
    first = others[: choice.wave] if choice.long else others[: choice.wave][::-1]
    want = [
        (tile, h, 2 * q + half)
        for tile in (*first, *choice.long, *others[choice.wave :])
        for group in range(heads // shared)
        for phase in wanted_walk(choice, tile, list(range(work.table.q_tiles)))
        for first_head in range(group * shared, (group + 1) * shared, together)
        for q in phase
        for h in range(first_head, first_head + together)
        if kinds[h if by_head else 0, q, tile] > 0
        for half in range(-(-work.q_tiles.span(q)[1] // 64))
    ]
    assert [step[:3] for step in steps] == want
    added: dict[tuple[int, int], int] = {}
    for _, h, n, _, earlier in steps:
        assert earlier == added.get((h, n), 0)
        added[h, n] = earlier + 1
    for tile, h, n, kind, _ in steps:  # the last query tile is short, and masked for that
        masked = kinds[h if by_head else 0, n // 2, tile] == PARTIAL or n // 2 == work.table.q_tiles - 1
        assert (kind == dkv_producer.PARTIAL.value) == masked


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("name", MODS)
def test_steps_without_dq_are_those_of_the_plain_order(name: str, together: int) -> None:
    """As invariant passes over ranks walk."""
    heads, shared, choice = 8, 4, OrderChoice(together=1 if name == "by head" else together, all_heads=True)
    work = work_of(MODS[name], ((0, 1000),), ((0, 1000),), block=128, heads=heads)
    of_items = []
    for ordered in (True, False):
        items: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for tile, h, *step in steps_of(work, heads, shared, choice, ordered=ordered):
            items.setdefault((tile, h // shared), []).append((h, *step[:2]))
        of_items.append(items)
    assert of_items[0] == of_items[1]


def test_every_step_is_walked_once_without_an_order() -> None:
    heads, shared, tokens = 4, 2, 700
    for mod in (lambda b, h, q, kv: kv >= 0, lambda b, h, q, kv: (q >= kv) | (kv < 300), MODS["causal"]):
        work = work_of(mod, ((0, tokens),), ((0, tokens),), block=128)
        steps = steps_of(work, heads, shared, OrderChoice(together=1, all_heads=True), ordered=False, merged=False)
        seen = work.table.to_dense()[0, 0]
        want = {(tile, h, n) for tile in range(6) for h in range(heads) for n in range(11) if seen[n // 2, tile]}
        assert len(steps) == len(want) and {step[:3] for step in steps} == want
