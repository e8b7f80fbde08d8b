"""Workloads as values: joining, splitting and adding steps, bytes of tokens, and places of devices."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cost.clusters import cluster
from longspan._cost.predict import TIE, fastest, timeline
from longspan._cost.rates import Shape
from longspan._cost.workload import BackwardMoves, Placement, Workload


def work_of(seed: int = 0, steps: int = 3, **options: Any) -> Workload:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(1, 99, shape, generator=generator).double()
    moved = [draw(2, 2, steps) for _ in range(4)]
    for tokens in moved:
        tokens[:, :, 0] = 0
    pair = lambda n: (torch.tensor([n]), torch.tensor([1 - n]))
    usual: dict[str, Any] = {
        "ranks": 2, "degree": 1, "rank": torch.arange(2), "query_tiles": draw(2), "full": draw(2, steps), "partial": draw(2, steps),
        "received": moved[0], "sent": moved[1], "exchanges": torch.tensor([0.0, *[1.0] * (steps - 1)]), "local": draw(2),
        "cross_node_share": 0.0, "shape": Shape(batch=3, heads=8, kv_heads=2, head_dim=16), "active_tiles": draw(2, steps),
        "gathered": draw(2, steps), "peers": tuple(pair(i % 2) for i in range(steps)),
        "backward": BackwardMoves(moved[2], moved[3], draw(2, steps), torch.ones(steps), tuple(pair(1) for _ in range(steps))),
    }  # fmt: skip
    return Workload(**usual | options)


def snapshot(work: Workload) -> dict[str, Any]:
    values = {f.name: getattr(work, f.name) for f in fields(work)}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else str(value) for name, value in values.items()}


@pytest.mark.parametrize("change", ["join", "split", "with_backward_moves"])
@pytest.mark.parametrize("options", [{}, {"active_tiles": None}, {"query_tiles": torch.ones(2, 3).double() * 9, "active_tiles": None}])
def test_the_original_is_left_as_it_was(change: str, options: dict[str, Any]) -> None:
    work = work_of(**options)
    before = snapshot(work)
    changed = getattr(work, change)()
    assert snapshot(work) == before and snapshot(changed) != before
    halves = work.with_halves(torch.ones(3, 2, 2).double())
    before = snapshot(halves)
    changed = getattr(halves, change)()
    assert snapshot(halves) == before


def test_joined_and_split_work_adds_up() -> None:
    work = work_of(steps=4)
    joined = work.join()
    assert joined.joined and joined.full[:, 1].tolist() == (work.full[:, 0] + work.full[:, 1]).tolist()
    assert joined.partial[:, 1].tolist() == (work.partial[:, 0] + work.partial[:, 1]).tolist() and not joined.partial[:, 0].any()
    assert joined.split() is joined and work_of(active_tiles=None).join().active_tiles is None
    split = work.split()
    assert torch.allclose(split.full.sum(1), work.full.sum(1)) and torch.allclose(split.partial.sum(1), work.partial.sum(1))
    assert split.halves is not None and split.steps == 5
    merged = work_of(merge_bytes=torch.ones(2, 3))
    assert merged.split() is merged
    still = work_of(exchanges=torch.zeros(3))
    assert still.split() is still and still.exchange_steps == 0 and work.exchange_steps == 3
    given = torch.arange(12.0).double().view(3, 2, 2)
    halves = work.with_halves(given).split()
    for i, tiles in enumerate((halves.full, halves.partial, halves.active_tiles)):
        assert tiles is not None and tiles[:, [0, -1]].tolist() == given[i].tolist()
    assert halves.full[:, 1:4].tolist() == work.full[:, 1:].tolist() and halves.steps == 5


def test_the_late_share_is_of_the_first_and_the_last_move() -> None:
    moved = torch.zeros(2, 2, 4).double()
    moved[0, 0, 1], moved[1, 0, 1], moved[1, 0, 3] = 3.0, 4.0, 5.0  # rank 0: 7 first, 5 last
    moved[0, 1, 2] = 9.0
    work = work_of(steps=4, received=moved, sent=moved / 2)
    assert work.late_fraction.tolist() == pytest.approx([5 * 4 / (7 * 2 + 5 * 4), 0.0])
    assert replace(work, received=moved / 2, sent=moved).late_fraction.tolist() == work.late_fraction.tolist()
    none = torch.zeros_like(work.full)
    idle = replace(work, full=none, partial=none)
    assert idle.late_fraction.tolist() == [0.0, 0.0]
    only = none.clone()
    only[0, 3] = 1
    assert replace(work, full=only, partial=none).late_fraction[0] > 0 < replace(work, full=none, partial=only).late_fraction[0]
    assert replace(work, received=moved * 0, sent=moved * 0).late_fraction.tolist() == [0.0, 0.0]


def test_moves_of_backward_replace_those_of_forward() -> None:
    work = work_of()
    back = work.with_backward_moves()
    assert work.backward is not None and back.backward is None and back.received is work.backward.received
    assert back.sent is work.backward.sent and back.gathered is work.backward.gathered and back.peers is work.backward.peers
    assert back.with_backward_moves() is back


def test_bytes_and_tokens_of_kv() -> None:
    work = work_of(scale=3)
    assert work.kv_token_bytes == 2 * 3 * 2 * 16 * 2 and work.kv_tokens is work.local
    shared = work_of(degree=4, local_kv=torch.tensor([4.0, 5.0]))
    assert shared.kv_token_bytes == 2 * 1 * 1 * 16 * 2 and shared.kv_tokens.tolist() == [4, 5]
    assert work_of(degree=2, shape=Shape(kv_heads=6)).kv_token_bytes == 2 * 3 * 128 * 2


@pytest.mark.parametrize(
    ("shape", "head_axis", "kv_axis", "want"),
    [
        (6, None, 0, (1, 1, 1)),
        (6, 0, None, (1, 6, 1)),
        ((2, 3), 1, 0, (3, 3, 1)),
        ((2, 3), 0, 1, (1, 2, 3)),
        ((2, 3), None, 0, (3, 1, 1)),
        ((2, 3), 0, None, (1, 2, 3)),
    ],
)
def test_places_of_a_mesh(shape: Any, head_axis: int | None, kv_axis: int | None, want: tuple[int, ...]) -> None:
    place = Placement.of(ls.Mesh.abstract(shape), head_axis, kv_axis, 4)
    assert (place.stride, place.degree, place.member_stride, place.per_node) == (*want, 4)


def test_shares_of_transposes_that_cross_nodes() -> None:
    shares = {(4, 3, 2): 0.5, (2, 4, 1): 2 / 3, (1, 2, 1): 1.0, (8, 4, 3): 1 / 3, (8, 1, 1): 0.0, (4, 4, 1): 0.0}
    for (per_node, degree, stride), share in shares.items():
        assert Placement(per_node=per_node, degree=degree, member_stride=stride).cross_node_share == pytest.approx(share)
    assert Placement(per_node=3, stride=2).node(torch.arange(4)).tolist() == [0, 0, 1, 2]
    assert Placement(per_node=3) == Placement(per_node=3, stride=1, degree=1, member_stride=1)


def test_joined_work_is_taken_where_it_is_more_than_a_tie_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TIE == 1.01
    from longspan._cost import predict

    seconds = {False: 1.0, True: 0.98}
    monkeypatch.setattr(predict, "timeline", lambda work, *_: type("Line", (), {"seconds": seconds[work.joined]})())
    one, two, none = work_of(steps=2), work_of(steps=3), work_of(steps=2, exchanges=torch.zeros(2))
    where = cluster("h100")
    got = lambda work, overlap: fastest(work, where, overlap=overlap)[0].joined
    assert [got(one, overlap) for overlap in (None, True, False)] == [True, False, True]
    assert [got(two, overlap) for overlap in (None, True, False)] == [False, False, True]
    assert [got(none, overlap) for overlap in (None, True, False)] == [False, False, False]
    seconds[True] = 0.995
    assert [got(one, overlap) for overlap in (None, False)] == [False, True]


def test_bytes_of_a_timeline_are_kv_twice_and_gradients() -> None:
    work = work_of(scale=3)
    assert work.backward is not None
    token = work.kv_token_bytes
    kv = (work.received + work.backward.received).sum(2) * token
    want = kv + work.backward.sent.sum(2) * token * 2
    assert torch.equal(timeline(work, cluster("h100")).bytes, want)
    shared = replace(work, degree=2, cross_node_share=1.0)
    extra = timeline(shared, cluster("h100")).bytes - (want * shared.kv_token_bytes / token)
    assert not extra[0].any() and bool((extra[1] > 0).all())
