"""Sets of plans, plans of mappings of masks, and what `plan` prints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan.testing import virtual_world

MASKS = {"full": ls.causal(), "sliding": ls.causal() & ls.sliding_window(64)}


def planned(mesh: Any = None) -> Any:
    return ls.plan(MASKS, 100, mesh or ls.Mesh.abstract(2, rank=1), layout="head_tail", strategy="exchange")


def test_a_set_is_a_mapping_whose_plans_share_shards() -> None:
    plans = planned()
    assert list(plans) == ["full", "sliding"] and len(plans) == 2 and plans["sliding"].data.mask.text == str(MASKS["sliding"])
    first = plans["full"]
    assert plans.layout is first.layout and (plans.local_len, plans.kv_local_len) == (first.local_len, first.kv_local_len)
    assert torch.equal(plans.positions, first.positions) and torch.equal(plans.kv_positions, first.kv_positions)
    moved = plans.on(ls.Mesh.abstract(2, rank=0))
    assert list(moved) == ["full", "sliding"] and not torch.equal(moved.positions, plans.positions)
    with pytest.raises(KeyError, match="no mask is called 'x'; expected one of 'full', 'sliding'"):
        plans["x"]


def test_tensors_move_by_the_first_plan() -> None:
    x, heads = torch.arange(600).view(3, 100, 2), torch.arange(400).view(4, 100)

    def rank(mesh: ls.Mesh) -> tuple[Any, ...]:
        plans = planned(mesh)
        local = plans.shard(x, 1, side="q")
        assert torch.equal(local, x[:, plans.positions])
        spread = plans.relayout(plans.shard(heads, 1), 1, to="heads", heads_dim=0, side="kv")
        return plans.unshard(local, 1, side="kv"), plans.relayout(local, 1, to="contiguous"), spread, plans.relayout(
            spread, 1, to="plan", source="heads", heads_dim=0
        ), plans.shard(heads, 1)  # fmt: skip

    for number, (whole, contiguous, spread, back, local) in enumerate(virtual_world(2).run(rank)):
        assert torch.equal(whole, x) and torch.equal(spread, heads[2 * number : 2 * number + 2]) and torch.equal(back, local)
        half = contiguous.shape[1]
        assert torch.equal(contiguous, x[:, :half] if number == 0 else x[:, -half:])


@pytest.mark.parametrize(("value", "rank", "printed"), [("1", 0, True), ("1", 1, False), (None, 0, False), ("0", 0, False)])
def test_rank_0_prints_what_auto_considered_if_asked_to(
    value: str | None, rank: int, printed: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("LONGSPAN_EXPLAIN", raising=False)
    if value is not None:
        monkeypatch.setenv("LONGSPAN_EXPLAIN", value)
    ls.plan(MASKS, 1000, ls.Mesh.abstract(2, rank=rank), heads=4)
    out, err = capsys.readouterr()
    assert not out and bool(err) is printed and (not printed or "the winner is" in err)


def test_options_of_several_masks_and_of_one() -> None:
    one = ls.plan(ls.causal(), 1000, ls.Mesh.abstract(2), heads=4, cluster="b200")
    considered = one.considered()
    assert isinstance(one, ls.Plan) and considered is not None and all(option.candidate is None for option in considered.options)
    assert one.report().cluster.name == "b200" and considered.cluster.name == "b200"
    with pytest.raises(ValueError, match="plan: expected a mask or a dict of masks, got an empty dict"):
        ls.plan({}, 1000, ls.Mesh.abstract(2))
