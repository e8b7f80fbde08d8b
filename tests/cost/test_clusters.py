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
