"""Prepared launches on a machine without a GPU: which arguments vary, the order of their values, and who launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from longspan._kernels.gpu import compilation, prepared_launch
from longspan._kernels.gpu.prepared_launch import PreparedLaunch, hold_for_graph, layout_launch, layouts
from longspan._kernels.gpu.workspace import Workspace

CPU = torch.device("cpu")


class Descriptor:
    """A TMA descriptor of Triton."""

    def __init__(self, base: Any) -> None:
        self.base, self.block_shape = base, [16, 24]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device whose kernels are recorded: `made` has the arguments of driver launches, `launched` the stream and the values."""
    state = SimpleNamespace(made=[], launched=[], by_triton=[], entered=[], current=None, hooks=False, stream=5)

    def driver_launch(compiled: Any, arguments: Any, varying: Any, **more: Any) -> Any:
        state.made.append(SimpleNamespace(compiled=compiled, arguments=arguments, varying=varying, **more))
        return lambda stream, values: state.launched.append((stream, list(values)))

    @contextmanager
    def device(of: torch.device) -> Iterator[None]:
        state.entered.append(of)
        before, state.current = state.current, None  # the index of the CPU
        yield
        state.current = before

    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=100))
    monkeypatch.setattr(prepared_launch, "interpreted", lambda: False)
    monkeypatch.setattr(prepared_launch, "compile_kernel", lambda *_: compiled)
    monkeypatch.setattr(prepared_launch, "shared_memory_limit", lambda device: 100)
    monkeypatch.setattr(prepared_launch, "driver_launch", driver_launch)
    monkeypatch.setattr(prepared_launch, "ordered_stream", lambda device: state.stream)
    monkeypatch.setattr(prepared_launch, "hooks_are_set", lambda: state.hooks)
    monkeypatch.setattr(prepared_launch, "current_cuda_device", lambda: state.current)
    monkeypatch.setattr(PreparedLaunch, "_launch_by_triton", lambda self, values: state.by_triton.append(list(values)))
    monkeypatch.setattr(torch.cuda, "device", device)
    return state


NAMES = ("a_ptr", "b_ptr", "c_ptr", "zeros_ptr", "none_ptr", "floats_ptr", "n", "order", "mask_captured", "scale", "first_b", "pair")


def launch_of(**changes: Any) -> PreparedLaunch:
    constants = {"n": 7, "order": torch.arange(3), "pair": (torch.zeros(4), 9)}
    known: dict[str, Any] = {
        "kernel": SimpleNamespace(arg_names=NAMES), "options": {"num_warps": 4}, "ctas": 13, "device": CPU,
        "descriptors": {"c_ptr": Descriptor}, "constants": constants, "workspace": Workspace(device=CPU, zeros=(3, 0), floats=(5,)),
    }  # fmt: skip
    return PreparedLaunch(**known | changes)


@pytest.mark.parametrize("tables_vary", [False, True])
def test_values_of_a_call_are_in_the_order_of_the_signature(tables_vary: bool, gpu: Any) -> None:
    launch, (a, c, *captured) = launch_of(tables_vary=tables_vary), torch.zeros(4, 6)
    order = torch.arange(8)
    per_call: dict[str, Any] = {"scale": 0.5, "first_b": 3, "mask_captured": tuple(captured), "unused": 4}
    if tables_vary:
        per_call["order"] = order
    assert not launch.is_compiled
    launch({"a_ptr": a, "b_ptr": None, "c_ptr": c}, per_call)
    assert launch.is_compiled and launch.by_driver is not None
    (made,) = gpu.made
    assert made.varying == [True] * 6 + [False, tables_vary, True, True, True, False] and (made.ctas, made.device) == (13, CPU)
    first, second, described, zeros, nothing, floats, n, ordered, *_ = made.arguments
    assert first is a and second is None and described.base is c and nothing is None and n == 7 and made.arguments[9:11] == [0.5, 3]
    assert zeros.shape == (3,) and floats.shape == (5,) and ordered is (order if tables_vary else launch.constants["order"])
    launch({"a_ptr": c, "b_ptr": None, "c_ptr": a}, per_call | {"scale": 0.25})
    for (stream, values), (x, y), scale in zip(gpu.launched, ((a, c), (c, a)), (0.5, 0.25), strict=True):
        assert stream == 5 and values[:2] == [x.data_ptr(), y.data_ptr()] and len(values) == 8 + tables_vary
        assert values[4:] == [*([order.data_ptr()] if tables_vary else []), *(t.data_ptr() for t in captured), scale, 3]
    assert len(gpu.made) == 1 and gpu.entered == [CPU]


def test_the_device_is_made_current_for_a_launch(gpu: Any) -> None:
    launch = launch_of(kernel=SimpleNamespace(arg_names=("a_ptr", "n")), workspace=None)
    tensors = {"a_ptr": torch.zeros(3)}
    launch.compile(tensors, {})
    gpu.entered.clear()
    launch.launch_at([1])
    assert not gpu.entered and gpu.launched == [(5, [1])]
    gpu.current = 2
    launch.launch_at([2])
    assert gpu.entered == [CPU] and gpu.launched[1:] == [(5, [2])] and not gpu.by_triton
    gpu.hooks = True
    for gpu.current in (2, None):
        launch.launch_at([3])
    assert gpu.by_triton == [[3], [3]] and len(gpu.launched) == 2 and len(gpu.entered) == 3
    launch.by_driver = None
    launch.launch_on(6, [4])
    assert gpu.by_triton[2:] == [[4]]


def test_nothing_is_launched_without_ctas_or_while_kernels_are_collected(gpu: Any) -> None:
    kernel = SimpleNamespace(arg_names=("a_ptr", "n"))
    launch_of(kernel=kernel, workspace=None, ctas=0)({"a_ptr": torch.zeros(3)}, {})
    assert not gpu.made and not gpu.launched
    launch = launch_of(kernel=kernel, workspace=None)
    launch({"a_ptr": torch.zeros(3)}, {})
    with compilation.collecting_jobs() as jobs:
        launch({"a_ptr": torch.zeros(3)}, {})
    assert not jobs and len(gpu.launched) == 1


@pytest.mark.parametrize(("options", "needed"), [({"num_warps": 4}, 101), ({"num_stages": 3}, 301)])
def test_kernels_that_need_too_much_shared_memory_with_one_stage_raise(
    options: dict[str, int], needed: int, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[dict[str, int]] = []

    def compile_kernel(kernel: Any, arguments: Any, options: dict[str, int]) -> Any:
        tried.append(options)
        return SimpleNamespace(metadata=SimpleNamespace(shared=needed))

    monkeypatch.setattr(prepared_launch, "compile_kernel", compile_kernel)
    with pytest.raises(OutOfResources, match=rf"Required: {needed}, Hardware limit: 100"):
        launch_of(options=options).compile({"a_ptr": None, "b_ptr": None, "c_ptr": None}, {"scale": 1.0, "first_b": 0, "mask_captured": ()})
    assert tried == [options | ({"num_stages": n} if "num_stages" in options else {}) for n in range(options.get("num_stages", 1), 0, -1)]


def test_layouts_tell_apart_alignment_and_repeated_tensors() -> None:
    whole = torch.zeros(9)
    assert layouts([whole, None, whole[1:], whole]) == (
        ((torch.float32, torch.Size([9]), (1,), True), (torch.float32, torch.Size([8]), (1,), False)), (0, -1, 1, 0)
    )  # fmt: skip
    stand_in = prepared_launch._stand_in((whole[1:], 3, Descriptor(whole)))
    assert (stand_in[0].data_ptr(), stand_in[0].dtype, stand_in[1], stand_in[2].base.data_ptr()) == (4, torch.float32, 3, 0)


def test_kernels_of_layouts_have_four_warps_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, tensors = "kernel of this test", {"a_ptr": torch.zeros(4)}
    made = layout_launch(kernel, tensors, {"n": 3}, 7)
    assert made.options == {"num_warps": 4, "enable_fp_fusion": True} and (made.ctas, made.constants) == (7, {"n": 3})
    assert layout_launch(kernel, tensors, {"n": 3}, 7, num_warps=1).options["num_warps"] == 1
    held: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(prepared_launch, "_held_for_graphs", set())
    monkeypatch.setattr(prepared_launch, "_tensors_held_for_graphs", held)
    hold_for_graph(made, [tensors["a_ptr"]])
    assert prepared_launch._held_for_graphs == {made} and held[id(tensors["a_ptr"])] is tensors["a_ptr"]
