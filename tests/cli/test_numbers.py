"""Numbers that commands print and accept: rows of tables, sizes at their limits, degrees, lengths of samples and documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

import longspan as ls
from longspan._cost.clusters import cluster
from longspan._cost.rates import Shape
from longspan._cost.timeline import Conditions
from longspan.cli import bench, parse, printing, step_plan
from longspan.cli.app import UsageError
from longspan.cli.plan import Request, _degrees, _fastest_plan


def test_a_row_of_the_table_of_ranks() -> None:
    numbers = lambda *values: torch.tensor(values, dtype=torch.float64)
    passes = [
        SimpleNamespace(busy=numbers(0.001, 0.002), exposed=numbers(0.004, 0.008)),
        SimpleNamespace(busy=numbers(0.016, 0.032), exposed=numbers(0.064, 0.128)),
    ]
    report = SimpleNamespace(
        tiles=torch.tensor([1500, 3000]), bytes_received=torch.tensor([[3 << 19, 1 << 20], [1 << 20, 5 << 20]]),
        timeline=SimpleNamespace(forward=passes[0], backward=passes[1]),
    )  # fmt: skip
    table = printing._rank_table(report)
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    assert [column.header for column in table.columns] == ["rank", "work", "", "received MiB", "compute ms", "waiting ms"]
    assert columns[:2] + columns[3:] == [
        [
            "0",
            "1",
        ],
        ["1,500", "3,000"],
        ["2.5", "6.0"],
        ["17.000", "34.000"],
        ["68.000", "136.000"],
    ]
    first, second = (len(cell.strip()) for cell in columns[2])
    assert 0 < first < second


def test_ten_simulated_strategies_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    line = SimpleNamespace(forward=SimpleNamespace(seconds=0.25), backward=SimpleNamespace(seconds=0.5))
    sizes = {"tokens": 5000, "gpus": 600, "seconds": 0.75, "computing": 0.125, "imbalance": 1.5, "flops_per_device": 3e14}
    results = [SimpleNamespace(name=f"way{i}", timeline=line, **sizes) for i in range(12)]
    printing.simulated(results, "causal", SimpleNamespace(name="h200", kernel=SimpleNamespace(name="hopper")))
    out = capsys.readouterr().out
    assert out.count("way") == 10 and "way9" in out and "5,000 tokens over 600 devices" in out


def test_counts_have_suffixes_and_limits() -> None:
    good = {"1": 1, "64k": 65536, "1.5K": 1536, "2m": 2 << 20, "3G": 3 << 30, " 8_192 ": 8192, "10,000": 10000, "262144G": 1 << 48}
    assert {text: parse.count(text, "--x") for text in good} == good
    for text in ("0", "0.5", "1.3", "-1", "k", "", "1kk", "1e3"):
        with pytest.raises(UsageError, match=r"--x: expected a number of 1 or more such as 8192, 64k or 1M, got "):
            parse.count(text, "--x")
    with pytest.raises(UsageError, match="at most 262144G, got '262145G'"):
        parse.count("262145G", "--x")


def test_heads_factors_and_seeds() -> None:
    assert [parse.heads(text) for text in ("32/8", "6", " 4/4 ")] == [(32, 8), (6, 6), (4, 4)]
    assert parse.heads(f"{1 << 48}/1") == (1 << 48, 1)
    for text in ("8/3", "0", "8/0", "2/4", "a", "8/", str(2 << 48), "9" * 5000, "8/" + "9" * 5000):
        with pytest.raises(UsageError, match="--heads: expected query heads"):
            parse.heads(text)
    assert parse.factors("3:1.5,1:2", "--x", 4) == {3: 1.5, 1: 2.0} and parse.factors(None, "--x", 4) == {} == parse.factors("", "--x", 4)
    assert parse.factors("0:0.5", "--x", 1) == {0: 0.5}
    for text in ("4:2", "1:0", "1:-2", "x:1", "1", "9" * 5000 + ":1"):
        with pytest.raises(UsageError, match="a rank below 4 and a factor above 0"):
            parse.factors(text, "--x", 4)
    with pytest.raises(UsageError, match="--x: expected one factor per rank, got several for rank 1"):
        parse.factors("1:2,0:2,01:3", "--x", 4)
    assert [parse.seed(n) for n in (-(2**63), 2**63 - 1)] == [-(2**63), 2**63 - 1]
    for wrong in (2**63, -(2**63) - 1):
        with pytest.raises(UsageError, match="--seed: expected a whole number of 64 bits"):
            parse.seed(wrong)
    assert parse.processes("64") == 64
    with pytest.raises(UsageError, match="--processes: expected at most 64, got 65; for more ranks"):
        parse.processes("65")
    assert parse.device("cpu") == torch.device("cpu")


def test_masks_take_as_many_values_as_they_have(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("3, 0\n4 5\n")
    same = {
        "causal & ~prefix(1k)": ls.causal() & ~ls.prefix(1024),
        "sliding_window(7) | full": ls.sliding_window(7) | ls.full(),
        "sliding_window(7, 0)": ls.sliding_window(7, 0),
        "documents([3, 9])": ls.documents(lengths=[3, 9]),
        f"documents({tmp_path}/lengths.txt)": ls.documents(lengths=[3, 0, 4, 5]),
    }
    for text, mask in same.items():
        assert str(parse.mask(text, 12)) == str(mask), text
    wrong = {
        "causal(1)": "causal takes 0 values",
        "prefix": "prefix takes 1 values",
        "prefix(1, 2)": "prefix takes 1 values",
        "documents": "documents takes 1 values",
        "documents([3], [9])": "documents takes 1 values",
        "mod": "mod takes 1 values",
        "mod('tests.cli.masks:even', 1)": "mod takes 1 values",
        "full(1)": "full takes 0 values",
        "x": "unknown mask 'x'",
        "sliding_window": "sliding_window takes 1 or 2 values",
        "sliding_window(1, 2, 3)": "takes 1 or 2 values",
        "documents([3, -9])": "of 0 or more",
        "documents([3, True])": "of 0 or more",
        "documents([])": "of 0 or more",
        "documents([3, 8])": "the lengths sum to 11, --tokens says 12",
        "causal + full": "cannot read 'causal",
        "prefix(length=3)": "cannot read",
        "-causal": "cannot read",
    }
    for text, why in wrong.items():
        with pytest.raises(UsageError) as raised:
            parse.mask(text, 12)
        assert why in str(raised.value), text
    for content, why in (("1\n2 x", "line 2: expected a length"), ("9" * 19, "line 1: expected a length"), (" \n", "the file has none")):
        (tmp_path / "lengths.txt").write_text(content)
        with pytest.raises(UsageError, match=why):
            parse.mask(f"documents({tmp_path}/lengths.txt)", 12)


def request(gpus: int, heads: int, kv_heads: int, degree: int | None = None, node: int = 8) -> Request:
    return Request(
        mask=ls.causal(),
        tokens=4096,
        gpus=gpus,
        shape=Shape(heads=heads, kv_heads=kv_heads),
        cluster=replace(cluster("h200"), gpus_per_node=node),
        conditions=Conditions(),
        degree=degree,
    )


def test_degrees_are_powers_of_two_of_up_to_two_nodes_that_divide_devices_and_heads() -> None:
    assert _degrees(request(64, 32, 32), "auto") == [1, 8, 16] and _degrees(request(64, 32, 32), "ulysses_ring") == [2, 4, 8, 16]
    assert _degrees(request(24, 32, 8), "auto") == [1, 4, 8] and _degrees(request(4, 32, 8), "auto") == [1, 2]
    assert _degrees(request(96, 32, 32, node=6), "ulysses_ring") == [2, 4, 8] and _degrees(request(96, 32, 32, node=2), "auto") == [1, 2, 4]
    assert _degrees(request(8, 6, 2), "ulysses_exchange") == [2] and _degrees(request(8, 6, 2), "ring") == [1]
    assert _degrees(request(12, 12, 12), "ulysses") == [12] and _degrees(request(12, 12, 12, 3), "ring") == [3]
    assert request(8, 6, 2).heads == "6/2"
    for degree, why in ((5, "--ulysses: 12 devices do not divide by 5"), (4, "--ulysses: ")):
        with pytest.raises(UsageError, match=why):
            _degrees(request(12, 6, 6, degree), "auto")


@pytest.mark.parametrize(
    ("degree", "strategy", "asked"),
    [
        (None, "auto", [("auto", (4,)), ("auto", (2, 2))]),
        (1, "auto", [("exchange", (4,))]),
        (1, "ring", [("ring", (4,))]),
        (2, "auto", [("auto", (2, 2))]),
        (4, "auto", [("ulysses", (4,))]),
        (None, "ulysses_ring", [("ulysses_ring", (2, 2))]),
    ],
)
def test_a_plan_is_made_for_each_degree(degree: int | None, strategy: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def planned(mask: Any, tokens: int, mesh: Any, *, strategy: str, **options: Any) -> Any:
        assert str(mask) == str(ls.causal()) and tokens == 4096 and options.pop("cluster").name == "h200"
        assert options == {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 128, "conditions": Conditions(), "layout": "auto"}
        calls.append((strategy, tuple(axis.size for axis in mesh.axes)))
        return SimpleNamespace(report=lambda: SimpleNamespace(seconds=1.0), number=len(calls))

    monkeypatch.setattr(ls, "plan", planned)
    assert _fastest_plan(request(4, 8, 8, degree), strategy, layout="auto").number == 1  # of equal ones the first
    assert calls == asked


def test_lengths_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_plan.parsed_lengths("2k,9*3, 1") == [2048, 9, 9, 9, 1]
    (tmp_path / "x.txt").write_text("5\n7*2\n1k")
    assert step_plan.parsed_lengths(str(tmp_path / "x.txt")) == [5, 7, 7, 1024]
    (tmp_path / "x.txt").write_text("5,6")
    with pytest.raises(UsageError, match="one length per line"):
        step_plan.parsed_lengths(str(tmp_path / "x.txt"))
    assert len(step_plan.parsed_lengths("9*100000")) == 100_000
    with pytest.raises(UsageError, match="at most 100000 samples"):
        step_plan.parsed_lengths("9*100001")
    monkeypatch.setattr(step_plan, "MAX_SAMPLES", 5)
    assert len(step_plan.parsed_lengths("1*4,2")) == 5
    with pytest.raises(UsageError, match="at most 5 samples"):
        step_plan.parsed_lengths("1*4,2,3")


@pytest.mark.parametrize(("tokens", "count"), [(2048, 16), (16, 16), (5, 5), (1001, 16)])
def test_benched_documents_go_from_short_to_long_and_fill_the_sequence(tokens: int, count: int) -> None:
    lengths = bench.BenchSizes(tokens=tokens, heads=1, kv_heads=1, dim=8, dtype="float32").lengths()
    assert len(lengths) == count and sum(lengths) == tokens and min(lengths) >= 0
    if tokens == 2048:
        assert lengths == [68, 76, 84, 92, 100, 108, 116, 124, 132, 140, 148, 156, 164, 172, 180, 188]


def test_a_ratio_is_sdpas_time_over_ours_and_results_may_differ_by_rounding() -> None:
    assert bench.Row(mask="m", name="n", density=1.0, sdpa_s=6.0, longspan_s=2.0, same=True).ratio == 3.0
    ones = torch.ones(100)
    for eps, same in ((3e-4, True), (4e-4, False)):  # the square root of float32's epsilon is 3.45e-4
        assert bench._same([ones, ones * (1 + eps)], [ones, ones]) is same
    assert bench._same([ones * 0], [ones * 0])
    assert bench._same([ones.bfloat16() * 1.0625], [ones.bfloat16()]) and not bench._same([ones.bfloat16() * 1.125], [ones.bfloat16()])


def test_the_least_of_alternating_times_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times, called = iter([5.0, 7.0, 3.0, 9.0, 4.0, 6.0]), []
    monkeypatch.setattr(bench, "_once", lambda call, device: (call(), next(times))[1])
    calls: dict[str, Any] = {"sdpa": lambda: called.append("s"), "longspan": lambda: called.append("l")}
    assert bench._seconds(calls, None, 3) == {"sdpa_s": 3.0, "longspan_s": 6.0} and called == ["s", "l"] * 4
