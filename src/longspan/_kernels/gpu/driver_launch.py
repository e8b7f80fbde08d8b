"""Launches of compiled Triton kernels through the CUDA driver, with an argument block that is prepared once.

Triton's launcher parses every argument and encodes every TMA descriptor at every launch: 20 to 60 µs of host time. Here the arguments lie
in host memory as the driver reads them. A launch overwrites the addresses and numbers that change between calls; a TMA descriptor gets a
new base address only if the tensor moved (`cuTensorMapReplaceAddress`).

Private parts of Triton used here, 3.6 to 3.9, because it has no public way to launch a compiled kernel without its Python launcher:

`utils.load_binary`           of the active driver: loads `CompiledKernel.kernel`. `CompiledKernel.run` would also build a launcher in C:
                              with Triton 3.6, a run of gcc per kernel.
`CompiledKernel.metadata`     warps, shared memory, scratch memory and launch attributes; `tensordesc_meta`: the shape of TMA boxes.
`CompiledKernel.src.signature`  types by argument; "constexpr" arguments are not passed. The kernel's parameters are the others in order,
                              tuples flattened, a TMA descriptor followed by its sizes and strides, then two scratch pointers.
`knobs.runtime`               launch hooks of profilers. Only Triton's launcher calls them.

The driver is asked for the size of every parameter. If one is not as expected, `driver_launch` returns None and Triton launches.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
TENSOR_MAP_BYTES = 128
ALIGNMENT = 128  # of the argument block and of TMA descriptors; the driver asks for 64
STREAM, CONFIG_BYTES = 32, 56  # offset of CUlaunchConfig.hStream, size of a CUlaunchConfig
_DEPENDENT_LAUNCH = struct.pack("<IIi60x", 6, 0, 1)  # CUlaunchAttribute: programmatic stream serialization, allowed
_INVALID_CONTEXT = 201
# Triton numbers the element types of TMA descriptors as the device does; the host's numbers of the floating-point types differ.
_HOST_ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}


@cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver's library with the argument types of the functions that are used here. OSError if there is no driver."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuTensorMapEncodeTiled.argtypes = [pointer, number, number, pointer, pointer, pointer, pointer, pointer, *[number] * 4]
    library.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
    library.cuMemsetD32Async.argtypes = [ctypes.c_uint64, number, ctypes.c_size_t, pointer]
    return library


@cache
def replace_address() -> Callable[[int, int | float], int]:
    """`cuTensorMapReplaceAddress`, which writes to host memory only: it is called without releasing Python's lock."""
    function = ctypes.PyDLL("libcuda.so.1").cuTensorMapReplaceAddress
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return function


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: its type in Triton's notation, its value, and whether the value changes between launches.

    `descriptor`: the TMA box (an entry of `tensordesc_meta`), for a descriptor.
    """

    kind: str
    value: Any
    varies: bool
    descriptor: dict[str, Any] | None = None

    @property
    def bytes(self) -> int:
        return TENSOR_MAP_BYTES if self.descriptor is not None else 8 if self.kind[0] == "*" else struct.calcsize(_FORMATS[self.kind])


def parameters(compiled: Any, arguments: Sequence[Any], varying: Sequence[bool]) -> list[Parameter]:
    """The parameters of a compiled kernel for these arguments, without the scratch pointers. varying: for each argument."""
    boxes = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    signature = compiled.src.signature.values()
    return [p for ty, value, varies in zip(signature, arguments, varying, strict=True) for p in _flat(ty, value, varies, boxes)]


def _flat(ty: Any, value: Any, varies: bool, boxes: Iterator[Any]) -> Iterator[Parameter]:
    if isinstance(ty, tuple):
        for element_ty, element in zip(ty, value, strict=True):
            yield from _flat(element_ty, element, varies, boxes)
    elif ty.startswith("tensordesc"):
        yield Parameter("tensordesc", value, varies, next(boxes, None))
        yield from (Parameter("i32", size, False) for size in value.shape)
        yield from (Parameter("i64", stride, False) for stride in value.strides)
    elif ty != "constexpr":
        yield Parameter(ty, value, varies)


class DriverLaunch:
    """One kernel with its grid and an argument block in host memory. Thread-safe: the block is shared.

    The block: CUlaunchConfig, the varying values in order, the constants, the TMA descriptors.

    Attributes:
        config, function, pointers: Addresses of the CUlaunchConfig and of the kernel, and the addresses of its parameters.
        varying: Of each varying value, its format and the index of its parameter.
    """

    def __init__(self, compiled: Any, function: int, params: Sequence[Parameter], *, ctas: int, device: int) -> None:
        varying, constants = [p for p in params if p.varies], [p for p in params if not p.varies]
        maps = [p for p in params if p.descriptor is not None]
        values = struct.Struct("<QQQ" + "".join(map(_format, varying)))  # the stream, address and number of launch attributes, the values
        fixed = struct.Struct("<" + "".join(map(_format, constants)) + "QQ")  # two null scratch pointers
        first_map = -(-(STREAM + values.size + fixed.size) // ALIGNMENT) * ALIGNMENT
        self._memory = ctypes.create_string_buffer(first_map + len(maps) * TENSOR_MAP_BYTES + ALIGNMENT)
        shift = -ctypes.addressof(self._memory) % ALIGNMENT
        self._block, base = memoryview(self._memory)[shift:], ctypes.addressof(self._memory) + shift
        meta = compiled.metadata
        struct.pack_into("<7I", self._block, 0, ctas, 1, 1, 32 * meta.num_warps, 1, 1, meta.shared)
        fixed.pack_into(self._block, STREAM + values.size, *(_number(p.value) for p in constants), 0, 0)
        addresses, end = {}, base + STREAM + 24
        for p in (*varying, *constants):
            addresses[id(p)], end = end, end + struct.calcsize("<" + _format(p))
        self._maps: list[list[int]] = []  # [index among the varying values, address of the descriptor, its present base address]
        for i, p in enumerate(maps):
            addresses[id(p)] = base + first_map + i * TENSOR_MAP_BYTES
            _encode(addresses[id(p)], p.value, p.descriptor)
            if p.varies:
                index = next(j for j, other in enumerate(varying) if other is p)
                self._maps.append([index, addresses[id(p)], p.value.base.data_ptr()])
        pointers = [*(addresses[id(p)] for p in params), end, end + 8]
        self.pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.varying = [(_format(p), i) for i, p in enumerate(params) if p.varies]
        self._attribute = ctypes.create_string_buffer(_DEPENDENT_LAUNCH, len(_DEPENDENT_LAUNCH)) if meta.launch_pdl else None
        self._attributes = (0, 0) if self._attribute is None else (ctypes.addressof(self._attribute), 1)
        struct.pack_into("<QQ", self._block, STREAM + 8, *self._attributes)
        self._pack, self._lock, self.device = values.pack_into, Lock(), device
        self.config, self.function, self._replace = base, function, replace_address()
        self._launch = launcher(base, function, self.pointers)

    def __call__(self, stream: int, values: Sequence[int | float]) -> None:
        """Launch on a stream of the device, which is current. values: of the varying parameters in order, tensors as addresses."""
        with self._lock:
            self._pack(self._block, STREAM, stream, *self._attributes, *values)
            for entry in self._maps:
                index, descriptor, address = entry
                if values[index] != address:
                    check(self._replace(descriptor, values[index]))
                    entry[2] = values[index]  # type: ignore[assignment]
            status = self._launch()
            if status:
                launch_again(self._launch, status, self.device)

    def copied_maps(self) -> list[tuple[int, bytes, int]]:
        """Of each TMA descriptor that varies: its index among the varying values, its bytes and its base address."""
        with self._lock:
            return [(index, ctypes.string_at(descriptor, TENSOR_MAP_BYTES), base) for index, descriptor, base in self._maps]


def launcher(config: int, function: int, pointers: ctypes.Array[ctypes.c_void_p]) -> Callable[[], int]:
    """`cuLaunchKernelEx` of one configuration. Its arguments are made once: from integers, ctypes would make them at each call."""
    addresses = config, function, ctypes.addressof(pointers)
    return partial(_driver().cuLaunchKernelEx, *(ctypes.byref(ctypes.c_char.from_address(address)) for address in addresses), None)


def launch_again(launch: Callable[[], int], status: int, device: int) -> None:
    """Handle a launch that returned a status other than 0: in a thread that has not used CUDA yet, launch again. Else raise."""
    if status == _INVALID_CONTEXT:
        _make_context_current(device)
        status = launch()
    check(status)


def fill_with_zeros(address: int, words: int, stream: int, device: int) -> None:
    """Set 32-bit words of device memory to 0, on a stream of the device, which is current."""
    fill = _driver().cuMemsetD32Async
    status = fill(address, 0, words, stream)
    if status == _INVALID_CONTEXT:  # in a thread that has not used CUDA yet
        _make_context_current(device)
        status = fill(address, 0, words, stream)
    if status:
        check(status)


def driver_launch(
    compiled: Any, arguments: Sequence[Any], varying: Sequence[bool], *, ctas: int, device: torch.device
) -> DriverLaunch | None:  # fmt: skip
    """A launch of a compiled kernel by `ctas` CTAs, or None if only Triton's launcher can launch it."""
    try:
        meta = compiled.metadata
        plain = not (meta.global_scratch_size or meta.profile_scratch_size or meta.launch_cooperative_grid)
        if not plain or meta.num_ctas != 1 or getattr(meta, "instrumentation_mode", ""):
            return None
        params = parameters(compiled, arguments, varying)
        function = _loaded(compiled, device.index)
        if not _driver_agrees(function, [p.bytes for p in params] + [8, 8]):
            return None
        return DriverLaunch(compiled, function, params, ctas=ctas, device=device.index)
    except (AttributeError, KeyError, OSError, TypeError, ValueError, struct.error):  # another Triton, or an old driver
        return None


@lru_cache(maxsize=1024)
def _loaded(compiled: Any, device: int) -> int:
    """The CUfunction of a compiled kernel, loaded on the current device. Its module stays loaded, as Triton's modules do."""
    function: int = driver.active.utils.load_binary(compiled.name, compiled.kernel, compiled.metadata.shared, device)[1]
    return function


def hooks_are_set() -> bool:
    """Whether a profiler wants to see launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # a tool has replaced a chain of hooks by None or a function
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _driver_agrees(function: int, sizes: Sequence[int]) -> bool:
    """Whether the driver expects parameters of these sizes."""
    offset, size, info = ctypes.c_size_t(), ctypes.c_size_t(), _driver().cuFuncGetParamInfo
    for i, expected in enumerate(sizes):
        if info(function, i, ctypes.byref(offset), ctypes.byref(size)) != 0 or size.value != expected:
            return False
    return info(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)) != 0


def _format(p: Parameter) -> str:
    return "Q" if p.descriptor is not None or p.kind[0] == "*" else _FORMATS[p.kind]


def _number(value: Any) -> int | float:
    """A constant argument as a number: tensors and descriptors as addresses."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if hasattr(value, "base"):
        return int(value.base.data_ptr())
    return int(value) if isinstance(value, bool) else value  # type: ignore[no-any-return]


def _encode(address: int, descriptor: Any, box: dict[str, Any] | None) -> None:
    """Write the TMA descriptor of `descriptor.base` to an address. box: an entry of `tensordesc_meta`."""
    if box is None or box["fp4_padded"] or box.get("is_im2col", False) or getattr(descriptor, "round_f32_to_tf32", False):
        raise ValueError("expected a TMA descriptor of plain tiles")
    shape, strides, block = (list(reversed(x)) for x in (descriptor.shape, descriptor.strides, box["block_size"]))
    rank, size, kind = len(shape), box["elem_size"], box["elem_type"]
    u64, u32 = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    padding = 1 if descriptor.padding == "nan" else 0
    # Innermost dim first; its stride, 1, is not passed. No interleaving, L2 promotion to 128 bytes as Triton has it.
    check(_driver().cuTensorMapEncodeTiled(
        address, _HOST_ELEMENT_TYPES.get(kind, kind), rank, descriptor.base.data_ptr(), u64(*shape),
        u64(*(s * size for s in strides[1:])), u32(*block), u32(*[1] * rank), 0, box["swizzle"], 2, padding,
    ))  # fmt: skip


def _make_context_current(device: int) -> None:
    handle, context, driver = ctypes.c_int(), ctypes.c_void_p(), _driver()
    check(driver.cuDeviceGet(ctypes.byref(handle), device))
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    check(driver.cuCtxSetCurrent(context))


def check(status: int) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {status} at a kernel launch: {(text.value or b'unknown').decode()}")
