"""Launches of several kernels, one after the other on one stream, from one list of values.

    values of a call        one lock, one pack           cuLaunchKernelEx of each kernel
    q, keys, out, …   ──►   the block of values   ──►    parameters: addresses in the block, and of the kernel's constants

Separate `PreparedLaunch`es each pack their own values: an address that two kernels read is packed twice.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

from longspan._kernels.gpu.driver_launch import (
    ALIGNMENT,
    CONFIG_BYTES,
    STREAM,
    TENSOR_MAP_BYTES,
    DriverLaunch,
    check,
    launch_again,
    launcher,
    replace_address,
)
from longspan._kernels.gpu.prepared_launch import PreparedLaunch

LaunchAll = Callable[[int, Sequence[int | float]], None]  # (stream from `direct_stream`, values)


def launch_sequence(launches: Sequence[PreparedLaunch], places: Sequence[Sequence[int]]) -> LaunchAll:
    """A function that launches compiled kernels in order. Thread-safe: no other call of the function launches between them, so that they
    may share memory that no other kernel uses.

    places: for each launch, the index of each of its values (as of `PreparedLaunch.launch_at`) among the values of the function. A value
    that no launch reads is an address, and not the last.
    """
    by_driver = [one.by_driver for one in launches if isinstance(one.by_driver, DriverLaunch)]
    if len(by_driver) == len(launches):
        return DriverSequence(by_driver, places)
    return partial(_launch_in_turn, launches, places, Lock())


def _launch_in_turn(
    launches: Sequence[PreparedLaunch], places: Sequence[Sequence[int]], lock: Any, stream: int, values: Sequence[int | float]
) -> None:  # fmt: skip
    with lock:
        for one, of_launch in zip(launches, places, strict=True):
            one.launch_on(stream, [values[i] for i in of_launch])


class DriverSequence:
    """`launch_sequence` through the CUDA driver, with a block of values of its own. Constants stay in the blocks of the launches.

    The block: the values, then for each launch its CUlaunchConfig and the TMA descriptors that vary.
    """

    def __init__(self, launches: Sequence[DriverLaunch], places: Sequence[Sequence[int]]) -> None:
        formats: dict[int, str] = {}
        for launch, of_launch in zip(launches, places, strict=True):
            for (kind, _), place in zip(launch.varying, of_launch, strict=True):
                if formats.setdefault(place, kind) != kind:
                    raise ValueError(f"value {place}: expected one type, got {formats[place]} and {kind}")
        ordered = [formats.get(place, "Q") for place in range(max(formats) + 1)]
        offsets = [struct.calcsize("<" + "".join(ordered[:place])) for place in range(len(ordered))]
        values = struct.Struct("<" + "".join(ordered))
        maps = [launch.copied_maps() for launch in launches]
        configs = [_aligned(values.size)]
        for copied in maps:
            configs.append(configs[-1] + _aligned(CONFIG_BYTES) + len(copied) * TENSOR_MAP_BYTES)
        self._memory = ctypes.create_string_buffer(configs[-1] + ALIGNMENT)
        shift = -ctypes.addressof(self._memory) % ALIGNMENT
        self._block, base = memoryview(self._memory)[shift:], ctypes.addressof(self._memory) + shift
        self._maps: list[list[int]] = []  # [index among the values, address of the descriptor, its present base address]
        self._pointers: list[ctypes.Array[ctypes.c_void_p]] = []
        self._launches = []
        for launch, of_launch, copied, config in zip(launches, places, maps, configs, strict=False):
            ctypes.memmove(base + config, launch.config, CONFIG_BYTES)
            pointers = type(launch.pointers)(*launch.pointers)
            for (_, parameter), place in zip(launch.varying, of_launch, strict=True):
                pointers[parameter] = base + offsets[place]
            for i, (index, contents, address) in enumerate(copied):
                descriptor = base + config + _aligned(CONFIG_BYTES) + i * TENSOR_MAP_BYTES
                ctypes.memmove(descriptor, contents, TENSOR_MAP_BYTES)
                pointers[launch.varying[index][1]] = descriptor
                self._maps.append([of_launch[index], descriptor, address])
            self._pointers.append(pointers)
            self._launches.append(launcher(base + config, launch.function, pointers))
        self._streams = [config + STREAM for config in configs[:-1]]
        self._stream: int | None = None  # of all configurations
        self._pack, self._lock = partial(values.pack_into, self._block, 0), Lock()
        self._replace, self._device = replace_address(), launches[0].device
        self._constants = tuple(launches)  # hold the memory of the constants

    def __call__(self, stream: int, values: Sequence[int | float]) -> None:
        """Launch on a stream of the device, which is current. values: tensors as addresses."""
        with self._lock:
            if stream != self._stream:
                self._set_stream(stream)
            self._pack(*values)
            for entry in self._maps:
                index, descriptor, address = entry
                if values[index] != address:
                    check(self._replace(descriptor, values[index]))
                    entry[2] = values[index]  # type: ignore[assignment]
            for launch in self._launches:
                status = launch()
                if status:
                    launch_again(launch, status, self._device)

    def _set_stream(self, stream: int) -> None:
        for offset in self._streams:
            struct.pack_into("<Q", self._block, offset, stream)
        self._stream = stream


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
