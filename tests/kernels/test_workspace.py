"""Memory of launches: zeros from a pool, floats after them; and arguments of launches by Triton's launcher."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from longspan._kernels.gpu import workspace
from longspan._kernels.gpu.prepared_launch import PreparedLaunch, _without_tensors
from longspan._kernels.gpu.workspace import Workspace, take_flag, take_zeros

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of 32 zeros; shares are multiples of 4, that is 16 bytes."""
    monkeypatch.setattr(workspace, "_POOL_SIZE", 32)
    monkeypatch.setattr(workspace, "_pools", workspace._Pools())


def test_launches_of_a_stream_take_other_zeros_until_a_pool_is_used_up() -> None:
    taken = [take_zeros(count, CPU, 7) for count in (5, 4, 1, 15, 4, 3)]
    pool, address = taken[0][1], taken[0][0]
    assert [one - address for one, _ in taken[:4]] == [0, 32, 48, 64] and all(tensor is pool for _, tensor in taken[:4])
    assert pool.numel() == 32 and address == pool.data_ptr() and not pool.any()
    assert taken[4][1] is not pool and taken[4][0] == taken[4][1].data_ptr() and taken[5][0] == taken[4][0] + 16
    assert take_zeros(32, CPU, 7)[0] != taken[4][0]
    other, flag = take_zeros(4, CPU, 8), take_flag(CPU, 8)
    assert other[1] is not taken[5][1] and flag == (other[0] + 16, other[1])
    alone = take_flag(CPU, None)[1]
    assert alone.tolist() == [0]


@pytest.mark.parametrize(
    ("zeros", "floats", "pooled"),
    [((9,), (), 9), ((32,), (), 32), ((33,), (), 0), ((0, 9), (0, 0), 9), ((9,), (4,), 0), ((9, 3), (), 0), ((), (), 0), ((0,), (5,), 0)],
)
@pytest.mark.parametrize("stream", [None, 7])
def test_addresses_are_those_of_arrays_of_their_own(
    zeros: tuple[int, ...], floats: tuple[int, ...], pooled: int, stream: int | None
) -> None:
    made = Workspace(device=CPU, zeros=zeros, floats=floats)
    assert made.pooled_zeros == pooled and made.arguments == len(zeros) + len(floats) == len(made.tensors())
    addresses, held = made.addresses(stream)
    counts = [n for n in zeros if n]
    assert len(addresses) == len(counts) + len(floats) == made.passed
    places = list(zip(addresses, [*counts, *floats], strict=True))
    if any(floats) or not floats:
        ordered = sorted(places)
        assert all(a + 4 * n <= b for (a, n), (b, _) in itertools.pairwise(ordered))
    else:
        assert set(addresses) == {addresses[0]}, "arrays without elements have the address of another"
    for address, count in places:
        assert any(t.data_ptr() <= address and address + 4 * count <= t.data_ptr() + 4 * t.numel() for t in held)
    tensors = made.tensors()
    assert [None if t is None else t.numel() for t in tensors[: len(zeros)]] == [n or None for n in zeros]
    assert all(t is None or (t.dtype == torch.int32 and not t.any()) for t in tensors[: len(zeros)])
    if any(floats):
        assert [t.numel() for t in tensors[len(zeros) :] if t is not None] == list(floats)


class Descriptor:
    """A TMA descriptor of Triton."""

    def __init__(self, base: Any) -> None:
        self.base, self.block_shape = base, [16, 24]


def test_tritons_launcher_gets_the_values_of_a_call_in_the_place_of_arguments_that_vary() -> None:
    """A tensor, None, a TMA descriptor, a pair of tensors, a number that stays, the scale, and a pair that stays."""
    launched: list[Any] = []
    descriptor = Descriptor(torch.zeros(3))
    arguments = [torch.zeros(2), None, descriptor, (torch.zeros(1), torch.zeros(1)), 5, 0.25, (8, 9)]
    varying = [True, False, True, True, False, True, False]
    made = PreparedLaunch(kernel=None, options={}, ctas=13, device=CPU, descriptors={}, constants={})
    made._arguments = [_without_tensors(a) if v else a for a, v in zip(arguments, varying, strict=True)]
    made._varying = varying
    made._compiled = {(13, 1, 1): lambda *values: launched.append(values)}
    made.launch_on(7, [1000, 2000, 3000, 4000, 0.5])
    ((tensor, nothing, moved, pair, constant, scale, fixed),) = launched
    assert (tensor, nothing, pair, constant, scale, fixed) == (1000, None, (3000, 4000), 5, 0.5, (8, 9))
    assert moved.base.data_ptr() == 2000 and moved.block_shape == [16, 24] and descriptor.base.numel() == 3
