"""The table of options, line by line, and the order in which options are proposed, timed and chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cost import auto
from longspan._cost.clusters import cluster
from longspan._cost.options import Considered, ExactTiming, Option, pass_seconds
from longspan._cost.timeline import PassTimes, Timeline
from longspan._plan.strategies import one_axis_strategy


def option(name: str = "x", forward: float = 0.001, backward: float = 0.003, **fields: Any) -> Option:
    usual: dict[str, Any] = {"computing": 0.0025, "imbalance": 1.02, "received": 0.5, "stages": None, "candidate": None}
    return Option(
        **{"strategy": one_axis_strategy("exchange"), "layout": name, "forward": forward, "backward": backward, **usual, **fields}
    )


def timeline(busy: tuple[float, float], forward: tuple[float, float], backward: tuple[float, float]) -> Timeline:
    def one(total: tuple[float, float]) -> PassTimes:
        zero, spans = torch.zeros(2, 1, dtype=torch.float64), torch.tensor(busy, dtype=torch.float64)[:, None]
        return PassTimes(
            compute=(zero, spans), transfer=(zero, zero), grad_return=None, before=zero[:, 0], after=zero[:, 0],
            total=torch.tensor(total, dtype=torch.float64),
        )  # fmt: skip

    return Timeline(forward=one(forward), backward=one(backward), bytes=torch.zeros(2, 2))


def test_the_table_of_options_line_by_line() -> None:
    options = (
        option("best", exact=True, stages=2),
        option("even", 0.001, 0.00304, received=0.25, stages=1, joined=True),
        option("heavy", 0.002, 0.003, imbalance=1.25),
        option("waits", 0.002, 0.004, computing=0.003),
        option("slow", 0.002, 0.004, computing=0.0045, exact=True),
    )
    text = str(Considered(options=options, not_possible=(("ulysses", "3 heads"),), cluster=cluster("h100"))).splitlines()
    assert text[0] == "considered on h100: 5 options; the winner is exchange in 2 stages, best: 4.000 ms"
    assert text[1].split() == ["ms", "slower", "computing", "busiest", "received", "why", "not"]
    assert [" ".join(line.split()) for line in text[2:-1]] == [
        "exchange in 2 stages, best 4.000 0.0% 2.500 1.020 50.0% the winner",
        "exchange in 1 stage at once, even 4.040 1.0% 2.500 1.020 25.0% as fast, but not simpler ~",
        "exchange, heavy 5.000 25.0% 2.500 1.250 50.0% busiest rank 1.25 × the mean ~",
        "exchange, waits 6.000 50.0% 3.000 1.020 50.0% waits 1.500 ms longer for data ~",
        "exchange, slow 6.000 50.0% 4.500 1.020 50.0% computes 2.000 ms longer",
        "ulysses not possible: 3 heads",
    ]
    assert len({len(line.split("%")[0]) for line in text[2:7]}) == 1, "columns are aligned"


@pytest.mark.parametrize(("count", "last"), [(12, None), (13, "  … and 1 slower ones"), (15, "  … and 3 slower ones")])
def test_the_table_shows_twelve_options(count: int, last: str | None) -> None:
    text = str(Considered(options=tuple(option(f"o{i}") for i in range(count)), not_possible=(), cluster=cluster("h100"))).splitlines()
    assert len(text) == 3 + 12 + (last is not None) and (last is None or text[-2] == last)


def test_an_option_without_balance_is_not_told_so_where_the_best_has_none() -> None:
    text = str(
        Considered(options=(option("a", imbalance=1.3), option("b", 0.002, imbalance=1.4)), not_possible=(), cluster=cluster("h100"))
    )
    assert "the mean ~" not in text and "waits 1.000 ms longer" in text


def test_seconds_of_masks_are_summed_and_times_are_scaled_and_replaced() -> None:
    lines = [timeline((1.0, 2.0), (3.0, 5.0), (11.0, 7.0)), timeline((0.5, 0.25), (20.0, 10.0), (30.0, 40.0))]
    assert pass_seconds(lines) == (25.0, 51.0, 5.0)
    got = option(joined=True).timed(ExactTiming(timelines=lines, imbalance=1.5, joined=False))
    assert (got.forward, got.backward, got.computing, got.imbalance, got.joined, got.exact) == (25.0, 51.0, 5.0, 1.5, False, True)
    double = option().scaled(2.0)
    assert (double.forward, double.backward, double.computing, double.seconds) == pytest.approx((0.002, 0.006, 0.005, 0.008))
    assert not double.exact and double.received == 0.5


def exactly(times: dict[str, float], imbalance: dict[str, float] | None = None) -> Any:
    """A function that times options by layout, and the layouts that it was called for."""
    called: list[str] = []

    def time(one: Option) -> ExactTiming:
        called.append(one.layout)
        seconds = times[one.layout]
        line = timeline((0.0, 0.0), (seconds, 0.0), (0.0, 0.0))
        return ExactTiming(timelines=[line], imbalance=(imbalance or {}).get(one.layout, 1.0), joined=False)

    return time, called


def of_seconds(*seconds: float, **fields: Any) -> list[Option]:
    return [option(name, s, 0.0, candidate=object(), **fields) for name, s in zip("abcdefgh", seconds)]  # type: ignore[arg-type]


def names(options: list[Option]) -> str:
    return "".join(o.layout for o in options)


def test_balanced_options_come_first_and_near_ties_go_to_the_first_proposed() -> None:
    assert names(auto._ordered([], None)) == ""
    assert names(auto._ordered(of_seconds(1.009, 1.0, 1.005, 2.0), None)) == "abcd"
    assert names(auto._ordered(of_seconds(1.02, 1.0, 1.005, 0.999), None)) == "bdca"
    mixed = [replace(o, imbalance=i) for o, i in zip(of_seconds(1.0, 3.0, 0.5, 2.0), (1.06, 1.05, 1.2, 1.0), strict=True)]
    assert names(auto._ordered(mixed, None)) == "dbca"
    at_the_limit = [replace(o, imbalance=i) for o, i in zip(of_seconds(3.0, 1.0), (1.05, 1.08), strict=True)]
    assert names(auto._ordered(at_the_limit, None)) == "ab" == names(auto._ordered(of_seconds(1.01, 1.0), None))
    # Where none is balanced, those within 5 % of the least imbalance come first.
    none = [replace(o, imbalance=i) for o, i in zip(of_seconds(3.0, 2.0, 1.0), (1.2, 1.25, 1.3), strict=True)]
    assert names(auto._ordered(none, None)) == "bac"


def test_options_are_timed_until_no_estimate_is_near_the_best_exact_time() -> None:
    time, called = exactly({"a": 2.0, "b": 1.8, "c": 9.0})
    got = auto._ordered(of_seconds(1.0, 1.05, 1.2, 1.1), time, 4)  # exact times are twice as long: estimates are scaled by that
    assert called == ["a", "b"] and names(got) == "badc"
    ratio = (2.0 + 1.8 / 1.05) / 2
    assert [o.seconds for o in got] == pytest.approx([1.8, 2.0, 1.1 * ratio, 1.2 * ratio]) and [o.exact for o in got] == [True] * 2 + [
        False
    ] * 2
    time, called = exactly({"a": 1.0, "b": 1.10, "c": 1.11})
    auto._ordered(of_seconds(1.0, 1.10, 1.11), time, 4)
    assert called == ["a", "b"]  # b is exactly at the limit
    time, called = exactly(dict.fromkeys("abcd", 1.0))
    assert names(auto._ordered(of_seconds(1.0, 1.01, 1.02, 1.03), time, 2)) == "abcd" and called == ["a", "b"]


def test_a_layout_that_proves_not_balanced_is_discarded_with_its_other_options() -> None:
    options = of_seconds(1.0, 1.01, 1.02, 1.03)
    options[1] = replace(options[1], candidate=options[0].candidate)
    time, called = exactly(dict.fromkeys("abcd", 1.0), {"a": 1.5})
    got = auto._ordered(options, time, 2)
    assert called == ["a", "c"] and names(got)[0] == "c" and names(got)[-1] == "a"
    time, called = exactly({"a": 1.0, "b": 1.2, "c": 1.3}, {"a": 1.05})
    assert names(auto._ordered(of_seconds(1.0, 1.0, 1.2), time, 4)) == "abc" and called == ["a", "b"]  # a counts as balanced
    time, called = exactly(dict.fromkeys("ab", 1.0), dict.fromkeys("ab", 1.5))
    assert names(auto._ordered(of_seconds(1.0, 1.1), time, 1)) == "ab" and called == ["a", "b"], (
        "if no option proves balanced, all are timed"
    )


def test_options_with_equal_predictions_are_listed_once() -> None:
    same = [option("a", stages=4), option("a", stages=8), option("b", stages=8), option("a", 0.002), option("a", backward=0.004)]
    assert [(o.layout, o.stages, o.seconds) for o in auto._distinct(same)] == [
        ("a", 4, 0.004), ("b", 8, 0.004), ("a", None, 0.005), ("a", None, 0.005),
    ]  # fmt: skip


def test_strategies_of_one_axis_and_of_two_the_preferred_first() -> None:
    one = [s.name for s in auto.strategies(ls.Mesh.abstract(4), "auto")]
    assert one == ["exchange", "ring", "allgather", "ulysses"]
    assert [s.name for s in auto.strategies(ls.Mesh.abstract(4), "ring")] == ["ring"] and auto.strategies(ls.Mesh.abstract(4), "no") == []
    two = auto.strategies(ls.Mesh.abstract((4, 2)), "auto")
    assert [s.name for s in two] == 2 * ["ulysses_exchange", "ulysses_ring", "ulysses_allgather"]
    assert [(s.head_axis, s.kv_axis) for s in two] == [(0, 1)] * 3 + [(1, 0)] * 3
    named = auto.strategies(ls.Mesh.abstract((4, 2), axis_names=("ring", "ulysses")), "auto")
    assert [(s.head_axis, s.kv_axis) for s in named] == [(1, 0)] * 3
    assert len(auto.strategies(ls.Mesh.abstract((4, 2)), "ulysses_ring")) == 1


def test_exchange_is_estimated_with_up_to_eight_stages() -> None:
    exchange, ring = one_axis_strategy("exchange"), one_axis_strategy("ring")
    assert auto._stage_counts(exchange, None) == ((None, 1), (2, 4, 8)) and auto._stage_counts(exchange, 3) == ((3,), ())
    assert auto._stage_counts(ring, None) == auto._stage_counts(ring, 3) == ((None,), ())


@pytest.mark.parametrize(("computing", "reason"), [(2.0, "computes 1000.000 ms longer"), (1.5, "waits 1500.000 ms longer for data")])
def test_a_slower_option_is_told_the_larger_of_its_delays_and_computation_of_equal_ones(computing: float, reason: str) -> None:
    best, slower = option("best", 1.0, 1.0, computing=1.0), option("slower", 2.0, 2.0, computing=computing)
    text = str(Considered(options=(best, slower), not_possible=(), cluster=cluster("h100"))).splitlines()
    assert text[3].endswith(f"%  {reason} ~")
