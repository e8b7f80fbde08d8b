"""Launches through the driver with a driver that records: the arguments that it would read, and TMA descriptors of tensors that move."""

from __future__ import annotations

import ctypes
import struct
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
        self.attributes: list[tuple[int, int]] = []  # of launches: CUlaunchAttribute.id and .value

    def cuLaunchKernelEx(self, *arguments: Any) -> int:
        config, function, params = (ctypes.addressof(one._obj) for one in arguments[:3])
        sizes = list((ctypes.c_uint32 * 7).from_address(config))
        stream, attributes, count = (ctypes.c_uint64 * 3).from_address(config + 32)
        if attributes:
            number, _, value = struct.unpack_from("<3I", ctypes.string_at(attributes, 72))
            self.attributes.append((number, value))
        pointers = (ctypes.c_uint64 * (len(self.kinds) + 2)).from_address(params)
        values = [a if kind == "map" else WIDTHS[kind].from_address(a).value for kind, a in zip([*self.kinds, "*", "*"], pointers)]
        self.launches.append((sizes, stream, (bool(attributes), count), function, values))
        return self.status

    def cuTensorMapEncodeTiled(self, address: int, kind: int, rank: int, base: int, *rest: Any) -> int:
        shape, strides, block, steps = (list(x) for x in rest[:4])
        self.encoded.append((address, kind, rank, base, shape, strides[: rank - 1], block, steps, *rest[4:]))
        ctypes.memset(address, len(self.encoded), 128)
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


def described(base: torch.Tensor, padding: str = "zero") -> Any:
    return SimpleNamespace(base=base, shape=list(base.shape), strides=list(base.stride()), padding=padding)


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
    assert stub.attributes == [(6, 1)], "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed"


@pytest.mark.parametrize("varies", [False, True])
def test_descriptors_lie_in_the_memory_of_their_launch(varies: bool, stub: Driver) -> None:
    tensors = [torch.zeros(30, 48), torch.zeros(9, 80), torch.zeros(20, 56)]
    stub.kinds = ["map", "i32", "i32", "i64", "i64"] * 3
    box = compiled().metadata.tensordesc_meta[0]
    made = compiled(tensordesc_meta=[box] * 3)
    made.src.signature = dict.fromkeys(("first", "second", "third"), "tensordesc<…>")
    launch = launching.driver_launch(made, [described(t) for t in tensors], [varies] * 3, ctas=5, device=torch.device("cuda", 0))
    assert launch is not None
    begin = ctypes.addressof(launch._memory)
    addresses = [one[0] for one in stub.encoded]
    assert begin <= min(addresses) and max(addresses) + 128 <= begin + len(launch._memory)
    launch(3, [t.data_ptr() for t in tensors] if varies else [])
    values = stub.launches[0][4]
    assert [values[i] for i in (0, 5, 10)] == addresses and values[-2:] == [0, 0]
    assert [ctypes.string_at(address, 128) for address in addresses] == [bytes([i]) * 128 for i in (1, 2, 3)]


@pytest.mark.parametrize(("device_type", "host_type"), [(2, 2), (6, 6), (7, 7), (8, 10), (9, 8), (10, 9)])
def test_element_types_of_descriptors_are_those_of_the_host(device_type: int, host_type: int, stub: Driver) -> None:
    """On the host, CUtensorMapDataType: UINT32 2, FLOAT16 6, FLOAT32 7, FLOAT64 8, BFLOAT16 9, FLOAT32_FTZ 10."""
    box = {"fp4_padded": False, "block_size": [16, 24], "elem_size": 2, "elem_type": device_type, "swizzle": 3}
    memory = ctypes.create_string_buffer(128)
    launching._encode(ctypes.addressof(memory), described(torch.zeros(4, 8)), box)
    assert stub.encoded[0][1] == host_type


@pytest.mark.parametrize(("padding", "number"), [("zero", 0), ("nan", 1)])
def test_descriptors_pad_as_tritons_do(padding: str, number: int, stub: Driver) -> None:
    box = {"fp4_padded": False, "block_size": [16, 24], "elem_size": 2, "elem_type": 6, "swizzle": 3}
    memory = ctypes.create_string_buffer(128)
    launching._encode(ctypes.addressof(memory), described(torch.zeros(4, 8), padding), box)
    assert stub.encoded[0][-1] == number


def unusual_box(**changes: Any) -> dict[str, Any]:
    box, other = compiled().metadata.tensordesc_meta
    return {"tensordesc_meta": [box, other | changes]}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ctas": 2}, {"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"launch_cooperative_grid": True},
        {"instrumentation_mode": "profile"}, {"tensordesc_meta": []}, unusual_box(fp4_padded=True), unusual_box(is_im2col=True),
    ],
)  # fmt: skip
def test_kernels_that_need_tritons_launcher_get_none(changes: dict[str, Any], stub: Driver) -> None:
    arguments = [torch.zeros(3), 32, 1, described(torch.zeros(4, 8)), (0.5, described(torch.zeros(4, 8))), torch.zeros(5)]
    assert launching.driver_launch(compiled(**changes), arguments, [True] * 6, ctas=2, device=torch.device("cuda", 0)) is None


def test_a_driver_that_expects_other_parameters_gets_none(stub: Driver) -> None:
    arguments = [torch.zeros(3), 32, 1, described(torch.zeros(4, 8)), (0.5, described(torch.zeros(4, 8))), torch.zeros(5)]
    for kinds in (stub.kinds[:-1], [*stub.kinds, "i32"], ["i32", *stub.kinds[1:]]):
        stub.kinds = kinds
        assert launching.driver_launch(compiled(), arguments, [True] * 6, ctas=2, device=torch.device("cuda", 0)) is None


def test_descriptors_that_round_get_none(stub: Driver) -> None:
    rounded = described(torch.zeros(4, 8))
    rounded.round_f32_to_tf32 = True
    arguments = [torch.zeros(3), 32, 1, rounded, (0.5, described(torch.zeros(4, 8))), torch.zeros(5)]
    assert launching.driver_launch(compiled(), arguments, [True] * 6, ctas=2, device=torch.device("cuda", 0)) is None


@pytest.mark.parametrize("kind", ["argument", "element"])
def test_a_signature_of_more_arguments_gets_none(kind: str, stub: Driver) -> None:
    arguments = [torch.zeros(3), 32, 1, described(torch.zeros(4, 8)), (0.5, described(torch.zeros(4, 8))), torch.zeros(5)]
    made = compiled()
    types = made.src.signature
    made.src.signature = types | ({"z": "i32"} if kind == "argument" else {"pair": (*types["pair"], "i32")})
    assert launching.driver_launch(made, arguments, [True] * 6, ctas=2, device=torch.device("cuda", 0)) is None


class Binary:
    name, kernel, metadata = "kernel", b"cubin", SimpleNamespace(shared=1000)


def test_a_kernel_is_loaded_by_triton_once_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[tuple[Any, ...]] = []
    utils = SimpleNamespace(load_binary=lambda *args: loads.append(args) or ("module", 50 + args[3], 128, 0, 1024))
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    binary = Binary()
    assert [launching._loaded(binary, device) for device in (2, 2, 3)] == [52, 52, 53]
    assert loads == [("kernel", b"cubin", 1000, 2), ("kernel", b"cubin", 1000, 3)]


class Contexts(Driver):
    """A thread without a context, until the primary context of a device is made current."""

    def __init__(self) -> None:
        super().__init__([])
        self.current = None

    def cuDeviceGet(self, handle: Any, number: int) -> int:
        handle._obj.value = 30 + number
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = 400 + handle.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current = context.value
        return 0

    def cuMemsetD32Async(self, address: int, value: int, words: int, stream: int) -> int:
        if self.current is None:
            return 201
        (ctypes.c_uint32 * words).from_address(address)[:] = [value] * words
        return 700 if stream == 9 else 0


def test_zeros_are_filled_in_a_thread_that_has_not_used_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Contexts()
    monkeypatch.setattr(launching, "_driver", lambda: driver)
    for _ in range(2):
        words = torch.full((7,), 5, dtype=torch.int32)
        launching.fill_with_zeros(words.data_ptr(), 6, 41, 3)
        assert words.tolist() == [0] * 6 + [5] and driver.current == 433
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        launching.fill_with_zeros(words.data_ptr(), 6, 9, 3)
