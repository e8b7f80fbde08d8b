"""Launches through the driver with a driver that records: the arguments that it would read, and TMA descriptors of tensors that move."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from longspan._kernels.gpu import driver_launch as launching

WIDTHS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "*": ctypes.c_uint64}


class Driver:
    """In place of libcuda: sizes of parameters as given, values at the addresses that a launch names."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds, self.launches, self.encoded, self.moved, self.status = kinds, [], [], [], 0

    def cuLaunchKernelEx(self, *arguments: Any) -> int:
        config, function, params = (ctypes.addressof(one._obj) for one in arguments[:3])
        sizes = list((ctypes.c_uint32 * 7).from_address(config))
        stream, attributes, count = (ctypes.c_uint64 * 3).from_address(config + 32)
        pointers = (ctypes.c_uint64 * (len(self.kinds) + 2)).from_address(params)
        values = [a if kind == "map" else WIDTHS[kind].from_address(a).value for kind, a in zip([*self.kinds, "*", "*"], pointers)]
        self.launches.append((sizes, stream, (bool(attributes), count), function, values))
        return self.status

    def cuTensorMapEncodeTiled(self, address: int, kind: int, rank: int, base: int, *rest: Any) -> int:
        shape, strides, block, steps = (list(x) for x in rest[:4])
        self.encoded.append((address, kind, rank, base, shape, strides[: rank - 1], block, steps, *rest[4:]))
        return 0

    def cuFuncGetParamInfo(self, function: int, i: int, offset: Any, size: Any) -> int:
        every = [*self.kinds, "*", "*"]
        if i >= len(every):
            return 1
        size._obj.value = 128 if every[i] == "map" else ctypes.sizeof(WIDTHS[every[i]])
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> None:
        text._obj.value = b"stopped"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver(["*", "i32", "map", "i32", "i32", "i64", "i64", "fp32", "map", "i32", "i32", "i64", "i64", "*"])
    monkeypatch.setattr(launching, "_driver", lambda: made)
    monkeypatch.setattr(launching, "replace_address", lambda: lambda *args: made.moved.append(args) or 0)
    monkeypatch.setattr(launching, "_loaded", lambda compiled, device: 77)
    yield made


def compiled(**changes: Any) -> Any:
    """x, a compile-time number, n, the rows of a tensor by TMA, a pair of a factor and another descriptor, y."""
    box = {"fp4_padded": False, "block_size": [16, 24], "elem_size": 2, "elem_type": 10, "swizzle": 3}
    meta = {
        "num_warps": 4, "shared": 1000, "launch_pdl": False, "global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1,
        "launch_cooperative_grid": False, "tensordesc_meta": [box, {**box, "block_size": [8, 40], "elem_type": 7}],
    }  # fmt: skip
    types = {"x": "*fp32", "N": "constexpr", "n": "i32", "rows": "tensordesc<…>", "pair": ("fp32", "tensordesc<…>"), "y": "*i32"}
    return SimpleNamespace(name="kernel", metadata=SimpleNamespace(**{**meta, **changes}), src=SimpleNamespace(signature=types))


def described(base: torch.Tensor) -> Any:
    return SimpleNamespace(base=base, shape=list(base.shape), strides=list(base.stride()), padding="zero")


def test_the_driver_reads_every_argument_and_descriptors_follow_their_tensors(stub: Driver) -> None:
    x, y, rows, other = torch.zeros(3), torch.zeros(5), torch.zeros(30, 48), torch.zeros(9, 80)
    arguments = [x, 32, -7, described(rows), (0.5, described(other)), y]
    varying = [True, False, True, True, False, False]
    launch = launching.driver_launch(compiled(), arguments, varying, ctas=13, device=torch.device("cuda", 1))
    assert launch is not None
    (rows_map, *rows_form), (other_map, *other_form) = stub.encoded
    assert rows_form == [9, 2, rows.data_ptr(), [48, 30], [96], [24, 16], [1, 1], 0, 3, 2, 0]
    assert other_form == [7, 2, other.data_ptr(), [80, 9], [160], [40, 8], [1, 1], 0, 3, 2, 0]
    assert rows_map % 64 == other_map % 64 == 0 and abs(rows_map - other_map) >= 128
    fixed = [0.5, other_map, 9, 80, 80, 1, y.data_ptr(), 0, 0]
    launch(41, [1234, 17, rows.data_ptr()])
    assert stub.launches[0] == ([13, 1, 1, 128, 1, 1, 1000], 41, (False, 0), 77, [1234, 17, rows_map, 30, 48, 48, 1, *fixed])
    assert stub.moved == []
    for _ in range(2):
        launch(42, [5678, -3, 4096])
        assert stub.launches[-1][1] == 42 and stub.launches[-1][4] == [5678, -3, rows_map, 30, 48, 48, 1, *fixed]
        assert stub.moved == [(rows_map, 4096)], "the tensor did not move again"
    stub.status = 700
    with pytest.raises(RuntimeError, match="CUDA error 700 at a kernel launch: stopped"):
        launch(42, [1, 2, 4096])


def test_a_dependent_launch_has_its_attribute(stub: Driver) -> None:
    arguments = [torch.zeros(3), 32, 1, described(torch.zeros(4, 8)), (0.5, described(torch.zeros(4, 8))), torch.zeros(5)]
    launch = launching.driver_launch(compiled(launch_pdl=True), arguments, [False] * 6, ctas=2, device=torch.device("cuda", 0))
    assert launch is not None
    launch(3, [])
    assert stub.launches[0][2] == (True, 1)


@pytest.mark.parametrize(
    "changes",
    [{"num_ctas": 2}, {"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"launch_cooperative_grid": True}, {"tensordesc_meta": []}],
)
def test_kernels_that_need_tritons_launcher_get_none(changes: dict[str, Any], stub: Driver) -> None:
    arguments = [torch.zeros(3), 32, 1, described(torch.zeros(4, 8)), (0.5, described(torch.zeros(4, 8))), torch.zeros(5)]
    assert launching.driver_launch(compiled(**changes), arguments, [True] * 6, ctas=2, device=torch.device("cuda", 0)) is None


def test_a_driver_that_expects_other_parameters_gets_none(stub: Driver) -> None:
    arguments = [torch.zeros(3), 32, 1, described(torch.zeros(4, 8)), (0.5, described(torch.zeros(4, 8))), torch.zeros(5)]
    for kinds in (stub.kinds[:-1], [*stub.kinds, "i32"], ["i32", *stub.kinds[1:]]):
        stub.kinds = kinds
        assert launching.driver_launch(compiled(), arguments, [True] * 6, ctas=2, device=torch.device("cuda", 0)) is None
