"""Rates of kernels and sizes of shapes against scalar formulas."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch

from longspan._cost.rates import Cluster, KernelRates, Link, Rates, Shape

RATES = Rates(keys=(256.0, 1024.0, 4096.0), full=(100.0, 160.0, 200.0), causal=(80.0, 110.0, 170.0))


def picoseconds(keys: float, rates: tuple[float, ...]) -> float:
    """Per query and unit of head dim: linear between the points and beyond; below the first at least half of it and more."""
    points = [(k, 4 * k / r) for k, r in zip(RATES.keys, rates)]
    for (x0, y0), (x1, y1) in pairwise(points):
        if keys <= x1 or x1 == points[-1][0]:
            linear = y0 + (y1 - y0) * (keys - x0) / (x1 - x0)
            break
    first, value = points[0]
    return max(linear, value * (0.5 + 0.5 * keys / first)) if 0 < keys < first else max(linear, 0.0)


def row_seconds(keys: float, edges: float) -> float:
    full, causal = picoseconds(keys, RATES.full), picoseconds(keys, RATES.causal)
    share = min(max(edges, 0.0), 1.0)
    tile = (4 * 4096 / 200 - 4 * 1024 / 160) / 3072 * 128
    return (full + share * (causal - full) + max(edges - 1, 0) * tile / 2) * 1e-12


@pytest.mark.parametrize("keys", [0.0, 1.0, 128.0, 255.0, 256.0, 700.0, 1024.0, 1025.0, 4096.0, 9000.0])
@pytest.mark.parametrize("edges", [0.0, 0.4, 1.0, 2.5])
def test_seconds_of_a_query(keys: float, edges: float) -> None:
    got = RATES.seconds(torch.tensor([[keys]], dtype=torch.float64), torch.tensor([[edges]], dtype=torch.float64))
    assert got.shape == (1, 1) and float(got) == pytest.approx(row_seconds(keys, edges), rel=1e-12)


def test_strided_numbers_are_looked_up_without_a_warning() -> None:
    keys, edges = torch.rand(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 5000
    torch.set_warn_always(True)  # torch warns only once of this
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(RATES.seconds(keys.T, edges.T), RATES.seconds(keys, edges).T)
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("rows", "full", "partial"), [(0, 3, 2), (1, 3, 2), (7, 30, 8), (8, 30, 8), (9, 30, 8), (40, 0, 55), (5, 6, 0), (9, 0, 0)]
)
def test_seconds_of_a_call(rows: float, full: float, partial: float, backward: bool) -> None:
    half = Rates(keys=RATES.keys, full=tuple(r / 2 for r in RATES.full), causal=tuple(r / 2 for r in RATES.causal))
    kernel = KernelRates(name="k", source="", forward=RATES, backward=half, launch=5e-6, slots=8, dims={64: 0.5})
    numbers = {name: torch.tensor([float(x)], dtype=torch.float64) for name, x in (("rows", rows), ("full", full), ("partial", partial))}
    count = max(rows, 1)
    of_row = row_seconds((full + partial / 2) / count * 128, partial / count) * 128 * 128 * (2 * 2.5 if backward else 1)
    for dim, factor in ((128, 1.0), (64, 1.0), (80, 80 / 64)):  # 64 dims run at half the rate of 128
        got = float(kernel.seconds(**numbers, head_dim=dim, backward=backward))
        assert got == pytest.approx(5e-6 + of_row * factor * max(count, 8) if full + partial else 0.0, rel=1e-12)


def test_head_dims_take_the_rate_of_the_nearest() -> None:
    usual: dict[str, Any] = {"name": "k", "source": "", "forward": RATES, "backward": RATES, "launch": 0.0, "slots": 1}
    kernel = KernelRates(**usual, dims={64: 0.5, 256: 0.8})
    factors = {32: 0.25 / 0.5, 95: 95 / 128 / 0.5, 97: 97 / 128, 191: 191 / 128, 193: 193 / 128 / 0.8, 512: 4 / 0.8}
    assert {dim: kernel.dim_factor(dim) for dim in factors} == pytest.approx(factors)
    assert KernelRates(**usual).dims == {} and KernelRates(**usual, dims={128: 0.25}).dim_factor(128) == 4


def test_bytes_and_operations_of_shapes() -> None:
    shape = Shape(batch=3, heads=10, kv_heads=5, head_dim=7, element=2)
    assert (shape.q_bytes, shape.kv_bytes) == (3 * 10 * 7 * 2, 2 * 3 * 5 * 7 * 2) and shape.flops(11.0) == 4 * 7 * 10 * 3 * 11
    assert [shape.kv_heads_of(degree) for degree in (1, 2, 5, 10)] == [5, 2, 1, 1]
    assert Shape() == Shape(batch=1, heads=1, kv_heads=1, head_dim=128, element=2, grad_element=4)


def test_a_cluster_has_the_best_rate_and_the_inner_bandwidth() -> None:
    kernel = KernelRates(name="k", source="", forward=RATES, backward=RATES, launch=0.0, slots=1)
    inside, between = Link(bandwidth=5.0, latency=1.0), Link(bandwidth=3.0, latency=2.0)
    made = Cluster(name="c", about="", gpus_per_node=4, memory=1.0, hbm=2.0, inside=inside, between=between, kernel=kernel)
    assert (made.flops, made.bandwidth, made.contention) == (200e12, 5.0, 0.05)
