"""Several launches from one list of values, with a driver that records: each kernel reads its values, and no other launch comes between."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.test_driver_launch import Driver, described

from longspan._kernels.gpu import driver_launch as launching
from longspan._kernels.gpu import launch_sequence as sequences
from longspan._kernels.gpu.driver_launch import DriverLaunch
from longspan._kernels.gpu.launch_sequence import DriverSequence, launch_sequence

SPLIT, MERGE, PAIR = 77, 78, 79  # functions: x, n, rows by TMA, scale; y, x, n; and two tensors by TMA
DESCRIBED = ["map", "i32", "i32", "i64", "i64"]
KINDS = {SPLIT: ["*", "i32", *DESCRIBED, "fp32"], MERGE: ["*", "*", "i32"], PAIR: 2 * DESCRIBED}
TYPES: dict[int, dict[str, Any]] = {
    SPLIT: {"x": "*fp32", "n": "i32", "rows": "tensordesc<…>", "scale": "fp32"},
    MERGE: {"y": "*i32", "x": "*fp32", "n": "i32"},
    PAIR: {"rows": "tensordesc<…>", "more": "tensordesc<…>"},
}


class Functions(Driver):
    """A driver with several functions."""

    def __init__(self) -> None:
        super().__init__([])
        self.statuses: list[int] = []
        self.pause = 0.0

    def cuLaunchKernelEx(self, *arguments: Any) -> int:
        self.kinds = KINDS[ctypes.addressof(arguments[1]._obj)]
        self.status = self.statuses.pop(0) if self.statuses else 0
        time.sleep(self.pause)
        return super().cuLaunchKernelEx(*arguments)

    def cuFuncGetParamInfo(self, function: int, i: int, offset: Any, size: Any) -> int:
        self.kinds = KINDS[function]
        return super().cuFuncGetParamInfo(function, i, offset, size)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Functions:
    made = Functions()
    monkeypatch.setattr(launching, "_driver", lambda: made)
    for module in (launching, sequences):
        monkeypatch.setattr(module, "replace_address", lambda: lambda *args: made.moved.append(args) or 0)
    monkeypatch.setattr(launching, "_loaded", lambda compiled, device: compiled.function)
    return made


def driver_launch(function: int, arguments: Sequence[Any], varying: Sequence[bool], *, early: bool = False) -> DriverLaunch:
    box = {"fp4_padded": False, "block_size": [16, 24], "elem_size": 2, "elem_type": 10, "swizzle": 3}
    meta = SimpleNamespace(
        num_warps=4, shared=1000 + function, launch_pdl=early, global_scratch_size=0, profile_scratch_size=0, num_ctas=1,
        launch_cooperative_grid=False, tensordesc_meta=[box, box],
    )  # fmt: skip
    compiled = SimpleNamespace(name="kernel", metadata=meta, src=SimpleNamespace(signature=TYPES[function]), function=function)
    made = launching.driver_launch(compiled, arguments, varying, ctas=function - 70, device=torch.device("cuda", 1))
    assert made is not None
    return made


def two_launches(rows: torch.Tensor) -> list[DriverLaunch]:
    """`split` with x, rows and scale that vary, dependent `merge` with y and x that vary."""
    x, y = torch.zeros(3), torch.zeros(5)
    split = driver_launch(SPLIT, [x, 5, described(rows), 0.5], [True, False, True, True])
    return [split, driver_launch(MERGE, [y, x, 9], [True, True, False], early=True)]


def test_each_kernel_reads_its_values_on_the_stream_of_the_call(driver: Functions) -> None:
    rows = torch.zeros(30, 48)
    launches = two_launches(rows)
    # Values by place: scale, x, rows, y.
    both = DriverSequence(launches, [[1, 2, 0], [3, 1]])
    first_map = driver.encoded[0][0]
    for stream, values in ((41, [0.25, 1234, rows.data_ptr(), 99]), (41, [0.5, 5678, 4096, 98]), (42, [0.5, 5678, 4096, 98])):
        driver.launches.clear()
        both(stream, values)
        (split_sizes, *split), (merge_sizes, *merge) = driver.launches
        assert split_sizes == [7, 1, 1, 128, 1, 1, 1077] and merge_sizes == [8, 1, 1, 128, 1, 1, 1078]
        assert split[:3] == [stream, (False, 0), SPLIT] and merge[:3] == [stream, (True, 1), MERGE]
        scale, x, _, y = values
        own_map = split[3][2]
        assert split[3] == [x, 5, own_map, 30, 48, 48, 1, scale, 0, 0] and merge[3] == [y, x, 9, 0, 0]
        assert own_map != first_map and own_map % 64 == 0
    assert driver.moved == [(own_map, 4096)], "the tensor did not move again"


def test_launches_of_a_sequence_and_its_kernels_alone_do_not_disturb_each_other(driver: Functions) -> None:
    rows = torch.zeros(30, 48)
    split, merge = launches = two_launches(rows)
    split(40, [11, 8192, 0.75])
    both = DriverSequence(launches, [[1, 2, 0], [3, 1]])
    driver.launches.clear()
    split(41, [21, 8192, 2.0])
    both(42, [0.25, 1234, 8192, 99])
    merge(43, [31, 32])
    assert [(one[1], one[4][0]) for one in driver.launches] == [(41, 21), (42, 1234), (42, 99), (43, 31)]
    assert [one[4][7] for one in driver.launches[:2]] == [2.0, 0.25]
    own_map, shared_map = driver.launches[0][4][2], driver.launches[1][4][2]
    assert driver.moved == [(own_map, 8192)] and shared_map != own_map, "a copied descriptor has the address that it was copied with"


def test_a_sequence_has_copies_of_all_descriptors(driver: Functions) -> None:
    """Of two launches of two descriptors each; the first two tensors move at the second call."""
    tensors = [torch.zeros(30, 48), torch.zeros(9, 80), torch.zeros(20, 56), torch.zeros(7, 64)]
    launches = [driver_launch(PAIR, [described(t) for t in pair], [True, True]) for pair in (tensors[:2], tensors[2:])]
    both = DriverSequence(launches, [[3, 1], [0, 2]])
    addresses = [t.data_ptr() for t in tensors]
    both(41, [addresses[2], addresses[1], addresses[3], addresses[0]])
    maps = [one[4][i] for one in driver.launches for i in (0, 5)]
    assert [ctypes.string_at(at, 128) for at in maps] == [bytes([i]) * 128 for i in (1, 2, 3, 4)], "the bytes of the launches' descriptors"
    assert not {one[0] for one in driver.encoded} & set(maps) and not driver.moved
    begin = ctypes.addressof(both._memory)
    assert begin <= min(maps) and max(maps) + 128 <= begin + len(both._memory)
    both(41, [addresses[2], 8192, addresses[3], 4096])
    assert driver.moved == [(maps[0], 4096), (maps[1], 8192)]


@pytest.mark.parametrize("places", [[[1, 2, 0]], [[1, 2], [3, 1]], [[1, 2, 0], [3, 1], [3, 1]]])
@pytest.mark.parametrize("by_driver", [True, False])
def test_places_of_other_launches_are_an_error(places: list[list[int]], by_driver: bool, driver: Functions) -> None:
    if by_driver:
        with pytest.raises(ValueError, match="argument"):
            DriverSequence(two_launches(torch.zeros(30, 48)), places)
    elif len(places) != 2:
        made: list[Any] = []
        both: Any = launch_sequence([InTurn("split", made), InTurn("merge", made)], places)  # type: ignore[list-item]
        with pytest.raises(ValueError, match="argument"):
            both(41, [0.5, 1234, 4096, 7])


def test_values_that_no_launch_reads_take_their_place(driver: Functions) -> None:
    both = DriverSequence(two_launches(torch.zeros(30, 48)), [[1, 3, 5], [4, 1]])
    both(41, [7, 1234, 8, 4096, 99, 0.25])
    assert driver.launches[0][4][0] == 1234 and driver.launches[0][4][7] == 0.25 and driver.launches[1][4][:2] == [99, 1234]


def test_values_of_two_types_at_one_place_are_an_error(driver: Functions) -> None:
    with pytest.raises(ValueError, match="value 1: expected one type, got Q and f"):
        DriverSequence(two_launches(torch.zeros(30, 48))[:1], [[0, 1, 1]])


def test_a_launch_that_fails_ends_the_sequence(driver: Functions) -> None:
    both = DriverSequence(two_launches(torch.zeros(30, 48)), [[1, 2, 0], [3, 1]])
    driver.statuses = [700]
    with pytest.raises(RuntimeError, match="CUDA error 700 at a kernel launch: stopped"):
        both(41, [0.25, 1234, 4096, 99])
    assert len(driver.launches) == 1
    both(41, [0.25, 1234, 4096, 99])
    assert len(driver.launches) == 3


def test_a_thread_without_a_context_launches_again(driver: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(launching, "_make_context_current", current.append)
    both = DriverSequence(two_launches(torch.zeros(30, 48)), [[1, 2, 0], [3, 1]])
    driver.statuses = [201]
    both(41, [0.25, 1234, 4096, 99])
    assert current == [1] and [one[3] for one in driver.launches] == [SPLIT, SPLIT, MERGE]


@dataclass
class InTurn:
    """A compiled launch that Triton's launcher makes."""

    name: str
    made: list[tuple[str, int, list[int | float]]] = field(default_factory=list)
    by_driver: None = None

    def launch_on(self, stream: int, values: Sequence[int | float]) -> None:
        time.sleep(0.001)
        self.made.append((self.name, stream, list(values)))


@pytest.mark.parametrize("by_driver", [True, False])
def test_no_launch_of_another_thread_comes_between(by_driver: bool, driver: Functions) -> None:
    made: list[Any] = []
    if by_driver:
        launches: list[Any] = [SimpleNamespace(by_driver=one) for one in two_launches(torch.zeros(30, 48))]
        driver.pause = 0.001
    else:
        launches = [InTurn("split", made), InTurn("merge", made)]
    both = launch_sequence(launches, [[1, 2, 0], [3, 1]])
    assert isinstance(both, DriverSequence) == by_driver

    def repeat(number: int) -> None:
        for i in range(10):
            both(number, [0.5, 100 * number + i, 4096, 7])

    threads = [Thread(target=repeat, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if by_driver:
        made = [("split" if one[3] == SPLIT else "merge", one[1], one[4]) for one in driver.launches]
    assert len(made) == 60 and [name for name, *_ in made] == ["split", "merge"] * 30
    for (_, stream, split), (_, also, merge) in zip(made[::2], made[1::2], strict=True):
        assert stream == also == split[0] // 100 and split[0] == merge[1]
