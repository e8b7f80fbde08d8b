"""Numbers of reports that follow from their parts, and the lines that show them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cost import report_data, simulate
from longspan._cost.clusters import cluster
from longspan._cost.rates import Shape
from longspan._cost.simulate import Simulated, curve, demand_for, owner_of
from longspan._cost.timeline import Conditions, PassTimes, Timeline

LAYOUT = ls.Layout(length=1000, rows=((((0, 500),), ((500, 200),), ((700, 300),)),))


@pytest.fixture
def report() -> Any:
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "batch": 3}
    return ls.plan(ls.causal(), 1000, ls.Mesh.abstract(3), layout=LAYOUT, strategy="ring", **sizes).report("h100")


def test_numbers_of_a_report(report: Any) -> None:
    at = torch.arange(1, 1001).double()
    pairs = [12 * float(at[a:b].sum()) for a, b in ((0, 500), (500, 700), (700, 1000))]
    assert report.pairs.tolist() == pairs and report.balance == pytest.approx(max(pairs) * 3 / sum(pairs))
    assert report.received.tolist() == [[300, 500, 200], [200, 300, 500]] and report.allgather_tokens == 2000 and report.share == 1.0
    assert report.tokens == report.kv_tokens == (500, 200, 300) and report.ranks == 3 and report.degree == 1
    token = 2 * 3 * 2 * 64 * 2
    assert report.in_flight == 800 and report.memory == 800 * token  # both stages are one step
    assert report.steps == 2 - report.data.schedule.joined
    times = report.timeline
    assert report.seconds == times.forward.seconds + times.backward.seconds
    assert report.exposed == float((times.forward.exposed + times.backward.exposed).max())
    work = report.work
    tiles = float((work.full + work.partial / 2).sum())
    assert report.flops_per_device == pytest.approx(3.5 * 4 * 64 * tiles * 128**2 / 3 / report.seconds)


def test_lines_of_a_report(report: Any) -> None:
    moved, times = report.bytes_received.sum(0).double() / 2**20, report.timeline
    busiest = int(report.pairs.argmax())
    memory = sum(report.memory_parts.values()) / 2**20
    assert str(report).splitlines() == [
        "causal(), 1000 tokens over 3 ranks: ring, layout given",
        f"  balance      busiest rank {report.balance:.3f} × the mean ({float(report.pairs[busiest]):.4g} of "
        f"{float(report.pairs.sum()):.4g} pairs of a query and a key, in {int(report.tiles[busiest])} of {int(report.tiles.sum())} tiles)",
        "  tokens       200 to 500 per rank",
        f"  received     {moved.mean():.2f} MiB per rank and forward pass, at most {moved.max():.2f}; 100.00 % of an all-gather of KV",
        f"  stages       2, computed in {report.steps} step{'s' if report.steps > 1 else ''}; at most {report.in_flight} tokens in flight "
        f"({report.memory / 2**20:.2f} MiB)",
        f"  memory       {memory:.2f} MiB per rank at most",
        f"  predicted    {1e3 * report.seconds:.2f} ms: forward {1e3 * times.forward.seconds:.2f}, backward "
        f"{1e3 * times.backward.seconds:.2f}; {1e3 * report.exposed:.2f} of it waiting for data",
        f"               {report.flops_per_device / 1e12:.0f} TFLOP/s per device (h100: {report.cluster.kernel.name})",
    ]
    parts = sum(report.memory_parts.values())
    for room, text in ((parts, ""), (parts - 1, f": more than the {parts / 2**30:.1f} GiB of a device (h100)")):
        assert replace(report, cluster=replace(report.cluster, memory=room))._over_memory() == text


@pytest.mark.parametrize(
    ("stages", "tokens", "want"), [(4, [5, 3, 0, 4], 8), (3, [0, 6, 0], 6), (3, [2, 9, 3], 12), (1, [7], 7), (2, [0, 0], 0)]
)
def test_tokens_of_two_consecutive_steps_are_in_flight(stages: int, tokens: list[int], want: int) -> None:
    received = torch.tensor([[n, n // 2] for n in tokens])
    moves: Any = SimpleNamespace(steps=tuple(range(i, i + 1) for i in range(stages)))
    assert report_data._in_flight(moves, received) == want
    joined: Any = SimpleNamespace(steps=(range(stages),))
    assert report_data._in_flight(joined, received) == sum(tokens)


def of_times(busy: tuple[list[float], list[float]], total: tuple[list[float], list[float]]) -> Timeline:
    def one(spans: list[float], end: list[float]) -> PassTimes:
        zero, spent = torch.zeros(2, 1).double(), torch.tensor(spans).double()[:, None]
        none = zero[:, 0]
        return PassTimes(
            compute=(zero, spent), transfer=(zero, zero), grad_return=None, before=none, after=none, total=torch.tensor(end).double()
        )

    return Timeline(forward=one(busy[0], total[0]), backward=one(busy[1], total[1]), bytes=torch.zeros(2, 2))


def test_numbers_and_names_of_simulations() -> None:
    line = of_times(([1.0, 4.0], [5.0, 1.0]), ([2.0, 5.0], [6.0, 7.0]))
    usual: dict[str, Any] = {
        "layout": "x",
        "gpus": 8,
        "tokens": 9,
        "stages": 1,
        "imbalance": 1.0,
        "work": None,
        "timeline": line,
        "flops": 96.0,
    }
    made = Simulated(strategy="ulysses_ring", degree=2, **usual)
    assert (made.seconds, made.computing, made.flops_per_device, made.name) == (12.0, 6.0, 1.0, "ulysses_ring 2 × 4, x")
    assert [Simulated(strategy="s", degree=degree, **usual).name for degree in (1, 8)] == ["s, x", "s, x"]
    nothing = of_times(([0.0, 0.0], [0.0, 0.0]), ([0.0, 0.0], [0.0, 0.0]))
    assert Simulated(strategy="s", degree=1, **{**usual, "timeline": nothing}).flops_per_device == 0.0


def test_only_simulations_that_fit_the_memory_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"shape": Shape(heads=4, kv_heads=4), "cluster": "h100", "degrees": [1], "layouts": ["contiguous"]}
    every = simulate.simulate(ls.sliding_window(100), 4096, 4, **options)
    sizes = sorted(made.in_flight for made in every)
    assert len({*sizes}) > 1
    room = cluster("h100").memory
    assert simulate.KV_MEMORY == 0.5
    monkeypatch.setattr(simulate, "KV_MEMORY", sizes[0] / room)
    assert [made.in_flight for made in simulate.simulate(ls.sliding_window(100), 4096, 4, **options)] == [n for n in sizes if n == sizes[0]]
    monkeypatch.setattr(simulate, "KV_MEMORY", 0.0)
    assert len(simulate.simulate(ls.sliding_window(100), 4096, 4, **options)) == len(every)


def test_degrees_are_powers_of_two_up_to_a_node_and_all_devices() -> None:
    shape = Shape(heads=48, kv_heads=48)
    options: dict[str, Any] = {"shape": shape, "cluster": "h100", "layouts": ["contiguous"]}
    assert {made.degree for made in simulate.simulate(ls.full(), 4800, 48, **options)} == {1, 2, 4, 8, 48}
    assert {made.degree for made in simulate.simulate(ls.full(), 4800, 6, **options)} == {1, 2, 6}
    assert {made.degree for made in simulate.simulate(ls.full(), 4800, 6, **options, degrees=[3, 3, 4])} == {3}
    names = {made.name for made in simulate.simulate(ls.full(), 4800, 6, **{**options, "layouts": ["head_tail", "contiguous"]})}
    assert {"exchange, head_tail", "ring, contiguous", "ulysses_allgather 2 × 3, head_tail", "ulysses, contiguous"} <= names
    assert not {"ulysses, head_tail"} & names
    alone = simulate.simulate(ls.full(), 4800, 1, **options)
    assert [(made.strategy, made.stages, made.imbalance) for made in alone] == [("none", 0, 1.0)]


def test_owners_of_named_layouts() -> None:
    demand = demand_for(ls.causal(), 1280, 5)
    assert owner_of("contiguous", demand, 5).bincount().tolist() == [demand.units // 5] * 5
    assert owner_of("head_tail", demand, 5)[[0, -1]].tolist() == [0, 0]
    assert int(owner_of("round_robin", demand, 5).max()) == 4
    assert float(demand.work.sum()) == 1280 * 1281 / 2
    with pytest.raises(ValueError, match="documents"):
        demand_for(ls.documents(lengths=[5, 6]), 1280, 5)


def test_a_curve_has_the_fastest_way_for_each_size() -> None:
    asked: list[int] = []
    options: dict[str, Any] = {"shape": Shape(heads=4, kv_heads=4), "cluster": "h100", "conditions": Conditions(stragglers={0: 2.0})}
    got = curve(lambda tokens: asked.append(tokens) or ls.causal(), [(2, 1024), (4, 2048)], **options)
    assert asked == [1024, 2048] and [(made.gpus, made.tokens) for made in got] == [(2, 1024), (4, 2048)]
    best = [
        min(made.seconds for made in simulate.simulate(ls.causal(), tokens, gpus, **options)) for gpus, tokens in ((2, 1024), (4, 2048))
    ]
    assert [made.seconds for made in got] == best


@pytest.mark.parametrize(("tokens", "short"), [(1280, False), (1300, True)])
def test_a_short_last_unit_is_known_to_round_robin(tokens: int, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    dealt = simulate.round_robin_owner
    monkeypatch.setattr(
        simulate, "round_robin_owner", lambda *args, short_last: asked.append(short_last) or dealt(*args, short_last=short_last)
    )
    owner_of("round_robin", demand_for(ls.causal(), tokens, 5), 5)
    assert asked == [short]
