"""Tile shapes of the Hopper kernels: for every pair of head dims, the tiles in flight fit into shared memory."""

from __future__ import annotations

import itertools

import pytest

config = pytest.importorskip("longspan._kernels.hopper.config")

SIZES = (64, 128, 192, 256)
PAIRS = list(itertools.product(SIZES, SIZES))


def test_head_dims_are_padded_to_powers_of_two_in_at_most_two_parts() -> None:
    assert [config.head_dim_parts(d) for d in (16, 64, 72, 128, 136, 192, 200, 256)] == [
        (64, 0), (64, 0), (128, 0), (128, 0), (128, 64), (128, 64), (256, 0), (256, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(("d", "e"), PAIRS)
def test_tiles_of_the_wide_backward_kernel_fit_into_shared_memory(d: int, e: int) -> None:
    tiles = config.wide_dkv_config(d, e)
    kv, scores = 2 * tiles.n * (d + e), 2 * 2 * tiles.n * tiles.m
    assert kv + scores + 2 * tiles.m * (tiles.stages * d + tiles.second_stages * e) <= config.SHARED_BYTES
    assert tiles.stages >= 2 and tiles.second_stages >= 1


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(("d", "e"), PAIRS)
def test_tiles_of_the_dq_kernel_fit_into_shared_memory(d: int, e: int, scored: bool) -> None:
    tiles = config.dq_config(d, e, scored=scored)
    assert 2 * tiles.m * (d + e) + 2 * tiles.n * (tiles.stages * d + tiles.second_stages * e) <= config.SHARED_BYTES
    assert tiles.stages >= 2 and tiles.second_stages >= 1


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("d", "e"), PAIRS)
def test_tiles_of_the_forward_kernel_fit_into_shared_memory(d: int, e: int, with_state: bool) -> None:
    e = 256 if e == 192 else e  # the forward kernel pads values to a power of two
    if with_state and e > 128:
        pytest.skip("wide running states do not pass through shared memory")
    tiles = config.forward_config(d, e, with_state=with_state)
    output = 4 * tiles.m * e if with_state else 2 * 64 * e
    assert 2 * tiles.m * d + 2 * tiles.stages * tiles.n * (d + e) + output <= config.SHARED_BYTES


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_tiles_of_the_backward_kernel_by_key_tiles_fit_into_shared_memory(d: int, plain: bool) -> None:
    tiles = config.dkv_config(d, with_dq=True, plain=plain)
    ds = (4 if d == tiles.m == 64 else 2) * 2 * tiles.n * tiles.m
    queries, dims = config.dq_tile(d, tiles.m)
    kv, dq, outputs = 2 * 2 * tiles.n * d, 2 * 4 * queries * dims, 2 * 2 * 64 * 64
    assert kv + 2 * 2 * tiles.stages * tiles.m * d + ds + dq + outputs <= config.SHARED_BYTES
    assert tiles.stages >= 2 and (tiles.m == 128) == (d == 64 and plain)


def test_warp_groups_take_turns_in_long_items_and_without_a_mask() -> None:
    assert config.takes_turns(masked=False, blocks=33) and config.takes_turns(masked=True, blocks=130)
    assert not config.takes_turns(masked=True, blocks=33)


def test_only_short_items_of_128_dims_have_one_main_loop() -> None:
    assert config.takes_one_loop(128, 128, 5.1)
    assert not config.takes_one_loop(128, 128, 8.9) and not config.takes_one_loop(64, 64, 5.1) and not config.takes_one_loop(192, 128, 5.1)
    assert not config.takes_one_loop(128, 128, float("nan"))  # the mean of an empty table


def test_only_long_items_compute_dq_one_step_late() -> None:
    assert config.takes_late_dq(16.5) and not config.takes_late_dq(8.5)
    assert not config.takes_late_dq(float("nan"))  # the mean of an empty table


@pytest.mark.parametrize("e", [64, 128])
def test_tiles_of_the_backward_kernel_with_keys_in_two_parts_fit_into_shared_memory(e: int) -> None:
    tiles = config.dkv_config(192, with_dq=True, plain=True)
    queries, dims = config.dq_tile(192, tiles.m)
    kv, ds, dq = 2 * tiles.n * (192 + e), 2 * 2 * tiles.n * tiles.m, 2 * 4 * queries * dims
    assert kv + 2 * tiles.stages * tiles.m * (192 + e) + ds + dq + 2048 <= config.SHARED_BYTES


def test_dq_is_computed_with_dk_where_registers_suffice() -> None:
    dims = ((64, 64), (96, 128), (128, 128), (128, 64), (192, 128), (136, 40), (192, 192), (128, 192), (256, 256))
    supported = [config.computes_dq_with_dkv(d, e, scored=False) for d, e in dims]
    assert supported == [True, True, True, False, True, True, False, False, False]
    assert [config.computes_dq_with_dkv(d, e, scored=True) for d, e in dims] == [True, True, True, *[False] * 6]
