"""Cluster profiles: built-in ones, and TOML files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from longspan._cost.clusters import ClusterError, _checked, cluster, dump, load, names
from longspan._cost.rates import Rates


@pytest.mark.parametrize("name", names())
def test_profiles_round_trip_through_toml_and_name_their_sources(name: str, tmp_path: Path) -> None:
    profile = cluster(name)
    (tmp_path / "x.toml").write_text(dump(profile))
    assert load(tmp_path / "x.toml") == profile and profile.kernel.source and profile.about
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "x.toml").read_bytes())  # a byte order mark
    assert load(tmp_path / "x.toml") == profile
    rates = profile.kernel
    for r in (rates.forward, rates.backward):
        # Measured triangles may be a little faster than squares: their rows of many lengths leave no slot idle at the end.
        assert len(r.keys) == len(r.full) == len(r.causal) and all(c <= 1.1 * f for c, f in zip(r.causal, r.full, strict=True))
    assert profile.between.bandwidth < profile.inside.bandwidth < profile.hbm


def test_rates_need_two_points(tmp_path: Path) -> None:
    profile = cluster("h100")

    def with_points(count: int) -> str:
        def cut(rates: Rates) -> Rates:
            return replace(rates, keys=rates.keys[:count], full=rates.full[:count], causal=rates.causal[:count])

        kernel = replace(profile.kernel, forward=cut(profile.kernel.forward), backward=cut(profile.kernel.backward))
        return dump(replace(profile, kernel=kernel))

    (tmp_path / "x.toml").write_text(with_points(2))
    assert len(load(tmp_path / "x.toml").kernel.forward.keys) == 2
    (tmp_path / "x.toml").write_text(with_points(1))
    with pytest.raises(ClusterError, match="expected two or more ascending keys"):
        load(tmp_path / "x.toml")


def test_ethernet_between_the_same_nodes_is_slower() -> None:
    plain, ethernet = cluster("h100"), cluster("h100_ethernet")
    assert ethernet.kernel == plain.kernel and ethernet.between.bandwidth < plain.between.bandwidth


def test_a_cluster_passes_through_and_none_is_the_h200() -> None:
    mine = replace(cluster("b200"), name='quoted "name"\\')
    assert cluster(mine) is mine and cluster(None).name == "h200"


def test_text_with_quotes_round_trips(tmp_path: Path) -> None:
    mine = replace(cluster("b200"), name='quoted "name"\\', about="two\nlines")
    (tmp_path / "x.toml").write_text(dump(mine))
    assert load(tmp_path / "x.toml").name == mine.name


def test_missing_profiles_and_keys_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(dump(cluster("h100")).replace("[between]", "[betwen]"))
    with pytest.raises(ClusterError, match="unknown key 'betwen'"):
        load(tmp_path / "x.toml")
    (tmp_path / "y.toml").write_text(dump(cluster("h100")).replace("latency_us = 15\n", ""))
    with pytest.raises(ClusterError, match=r"\[inside\] 'latency_us' is missing"):
        load(tmp_path / "y.toml")


def test_numbers_are_above_0_but_for_latencies_and_contention() -> None:
    for name in ("contention", "latency_us", "launch_us"):
        assert _checked({name: 0}, {name: float}, Path("x"), "") == {name: 0}
    for value in (0, 0.0, -1, True, "1", float("nan")):
        with pytest.raises(ClusterError, match="bandwidth must be a number above 0"):
            _checked({"bandwidth": value}, {"bandwidth": float}, Path("x"), "")
    with pytest.raises(ClusterError, match="launch_us must be a number above 0"):
        _checked({"launch_us": -1e-9}, {"launch_us": float}, Path("x"), "")
    with pytest.raises(ClusterError, match="gpus must be a number above 0"):
        _checked({"gpus": 1.5}, {"gpus": int}, Path("x"), "")


MADE = """name = "made"
about = "for a test"
gpus_per_node = 3
memory_gib = 5
hbm_gb_s = 7
contention = 0.125
[inside]
bandwidth_gb_s = 11
latency_us = 13
[between]
bandwidth_gb_s = 17
latency_us = 19
[kernel]
name = "k"
source = "s"
launch_us = 23
slots = 29
keys = [128, 1024]
forward_full = [1, 2]
forward_causal = [3, 4]
backward_full = [5, 6]
backward_causal = [7, 8]
[kernel.dims]
64 = 0.5
"""


def test_numbers_of_a_file_in_their_units(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(MADE)
    made = cluster(tmp_path / "x.toml")
    assert (made.name, made.about, made.gpus_per_node, made.contention) == ("made", "for a test", 3, 0.125)
    assert (made.memory, made.hbm, made.bandwidth, made.flops) == (5 * 2**30, 7e9, 11e9, 2e12)
    links = (made.inside.bandwidth, made.inside.latency, made.between.bandwidth, made.between.latency)
    assert links == pytest.approx((11e9, 13e-6, 17e9, 19e-6)) and made.kernel.launch == pytest.approx(23e-6)
    assert (made.kernel.name, made.kernel.source, made.kernel.slots, made.kernel.dims) == ("k", "s", 29, {64: 0.5})
    assert made.kernel.forward == Rates(keys=(128.0, 1024.0), full=(1.0, 2.0), causal=(3.0, 4.0))
    assert made.kernel.backward == Rates(keys=(128.0, 1024.0), full=(5.0, 6.0), causal=(7.0, 8.0))
    assert [made.kernel.dim_factor(d) for d in (128, 64, 80, 256)] == [1.0, 1.0, 1.25, 2.0]
    (tmp_path / "y.toml").write_text(MADE.partition("[kernel.dims]")[0])
    assert load(tmp_path / "y.toml").kernel.dims == {}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[1, 2]", "[1, 0]", "forward_full must be numbers above 0"),
        ("[1, 2]", "[1, true]", "forward_full must be numbers above 0"),
        ("[1, 2]", "[1, 2, 3]", "two or more ascending keys"),
        ("[128, 1024]", "[1024, 128]", "two or more ascending keys"),
        ("[128, 1024]", "[128, 128]", "two or more ascending keys"),
        ("[128, 1024]", "128", "keys must be a list, got 128"),
        ("64 = 0.5", "64 = 0", r"\[kernel.dims\] expected head dims and shares above 0"),
        ("64 = 0.5", "wide = 0.5", r"\[kernel.dims\] expected head dims and shares above 0"),
        ('"made"', "1", "name must be a str, got 1"),
        ("slots = 29", "slots = 2.5", "slots must be a number above 0, got 2.5"),
        ("gpus_per_node = 3", "gpus_per_node = 0", "gpus_per_node must be a number above 0, got 0"),
        ("slots = 29", "slots = 29\nwarps = 4", r"\[kernel\] unknown key 'warps'"),
        ("[between]\nbandwidth_gb_s = 17\nlatency_us = 19\n", "", "'between' is missing"),
        ("[inside]", "inside", "not TOML"),
    ],
)
def test_files_that_are_wrong_raise_what_is_expected(tmp_path: Path, old: str, new: str, why: str) -> None:
    assert old in MADE
    (tmp_path / "x.toml").write_text(MADE.replace(old, new, 1))
    with pytest.raises(ClusterError, match=why):
        load(tmp_path / "x.toml")


def test_names_and_files_that_do_not_exist_raise(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"expected one of a100, b200, .*, or a TOML file; got 'h900'"):
        cluster("h900")
    with pytest.raises(ClusterError, match=r"no.toml: No such file"):
        cluster(tmp_path / "no.toml")
    with pytest.raises(ClusterError, match="expected a regular file"):
        load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="not UTF-8 text"):
        load(tmp_path / "binary.toml")
    (tmp_path / "profile").write_text(MADE)
    assert cluster(str(tmp_path / "profile")).name == "made"  # a file of any name


def test_ethernet_has_a_name_a_description_and_100_gbit() -> None:
    ethernet = cluster("h200_ethernet")
    assert ethernet.name == "h200_ethernet" and (ethernet.between.bandwidth, ethernet.between.latency) == (10e9, 50e-6)
    assert ethernet.about.endswith(" inside, 100 Gbit/s Ethernet per GPU between") and ethernet.inside == cluster("h200").inside
