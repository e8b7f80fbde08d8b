"""Kernel selection per pass, work facts shared by the calls of a pass, and capabilities and block sizes of the Triton kernel."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.shards import work_of
from torch import Tensor

from longspan._kernels import registry
from longspan._kernels.protocol import AttentionInputs, Capabilities, Selection, Work
from longspan._kernels.registry import KernelCall, NotSupported, choose, combined_capabilities, kernel_named

CPU = torch.device("cpu")


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def everything(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q + kv >= 0


class FakeKernel:
    """Capabilities by the scale of the work."""

    def __init__(self, name: str, by_scale: dict[float, Capabilities]) -> None:
        self.name, self.by_scale = name, by_scale
        self.needs: list[Any] = []

    def capabilities(self, inputs: Any, work: Any, *, needs: Any = ()) -> Capabilities:
        self.needs.append(needs)
        return self.by_scale[work.scale]


def fake_calls(*scales: float, is_cuda: bool = True, invariant: tuple[float, ...] = ()) -> list[KernelCall]:
    inputs: Any = SimpleNamespace(q=SimpleNamespace(is_cuda=is_cuda, device=CPU))
    return [KernelCall(inputs, SimpleNamespace(scale=scale, invariant=scale in invariant)) for scale in scales]  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["two_kv_buffers", "concurrent_backward", "rounds_kv_grads_once"])
def test_a_pass_may_do_what_the_kernel_can_in_all_of_its_calls(field: str) -> None:
    able, every = Capabilities(**{field: True}), ("two_kv_buffers", "concurrent_backward", "rounds_kv_grads_once")
    kernel: Any = FakeKernel("fake", {1.0: able, 2.0: able, 3.0: Capabilities()})
    both = combined_capabilities(kernel, fake_calls(1.0, 2.0), needs=(True, False))
    assert [getattr(both, name) for name in every] == [name == field for name in every] and both.unsupported is None
    assert kernel.needs == [(True, False)] * 2
    for scales in ((1.0, 3.0), (3.0, 1.0)):
        assert not getattr(combined_capabilities(kernel, fake_calls(*scales)), field)


def test_the_first_reason_of_a_call_is_that_of_the_pass() -> None:
    kernel: Any = FakeKernel("fake", {1.0: Capabilities(), 2.0: Capabilities(unsupported="two"), 3.0: Capabilities(unsupported="three")})
    reasons = [combined_capabilities(kernel, fake_calls(*scales)).unsupported for scales in ((1.0,), (1.0, 2.0), (3.0, 1.0, 2.0))]
    assert reasons == [None, "two", "three"]


@pytest.mark.parametrize(("name", "supported"), [("cpu", True), ("triton", True), ("hopper", True), ("dense", False), ("flash", False)])
def test_one_invariant_call_needs_a_kernel_that_supports_it(name: str, supported: bool) -> None:
    kernel: Any = FakeKernel(name, {1.0: Capabilities(), 2.0: Capabilities()})
    assert combined_capabilities(kernel, fake_calls(1.0, 2.0)).unsupported is None
    reason = combined_capabilities(kernel, fake_calls(1.0, 2.0, invariant=(2.0,))).unsupported
    assert (reason is None) == supported
    assert supported or reason == "longspan.invariant(): expected kernel 'auto' or one of 'cpu', 'triton', 'hopper'"


@pytest.mark.parametrize(
    ("unsupported", "first", "expected"),
    [
        ((), "hopper", "hopper"), (("hopper",), "hopper", "triton"), (("hopper", "triton"), "hopper", "cpu"), ((), "triton", "triton"),
        (("triton",), "triton", "cpu"),
    ],
)  # fmt: skip
def test_auto_is_the_first_candidate_that_supports_all_calls(
    unsupported: tuple[str, ...], first: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {
        name: FakeKernel(name, {1.0: Capabilities(), 2.0: Capabilities(unsupported="no" if name in unsupported else None)})
        for name in ("hopper", "triton", "cpu")
    }
    monkeypatch.setattr(registry, "kernel_named", kernels.__getitem__)
    monkeypatch.setattr(registry, "first_candidate", lambda device: first)
    assert choose("auto", fake_calls(1.0, 2.0)).kernel is kernels[expected]
    assert choose("auto", fake_calls(1.0, 2.0, is_cuda=False)).kernel is kernels["cpu"]
    monkeypatch.setattr(registry, "has_triton", lambda: False)
    assert choose("auto", fake_calls(1.0, 2.0)).kernel is kernels["cpu"]


def test_a_named_kernel_that_is_not_installed_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "has_gluon", lambda: False)
    with pytest.raises(NotSupported, match=r"kernel 'hopper' needs Gluon of Triton 3\.6 to 3\.9"):
        kernel_named.__wrapped__("hopper")
    monkeypatch.setattr(registry, "has_triton", lambda: False)
    with pytest.raises(NotSupported, match="kernel 'triton' needs the triton package"):
        kernel_named.__wrapped__("triton")
    assert kernel_named.__wrapped__("cpu").name == "cpu"
    with pytest.raises(ValueError, match=r"kernel: expected one of 'auto', .*, got 'fast'"):
        registry.check_name("fast")
    for name in registry.NAMES:
        registry.check_name(name)


def test_gluon_is_there_if_the_hopper_kernels_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon")
    has_gluon: Callable[[], bool] = registry.has_gluon.__wrapped__
    assert registry.has_triton() and has_gluon()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "longspan._kernels.hopper", None)
        assert not has_gluon()
    monkeypatch.setattr(registry, "has_triton", lambda: False)
    assert not has_gluon()


def test_a_fallback_is_the_kernel_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(registry, "kernel_named", lambda name: made.append(name) or SimpleNamespace(name=name))
    fallback = registry._LoadedAtFirstUse("triton")
    assert not made and fallback.name == "triton" and made == ["triton"]


@pytest.mark.parametrize("way", ["hopper", "no gluon", "rocm", "interpreter", "ampere", "blackwell"])
def test_hopper_is_a_candidate_on_its_gpu_alone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from longspan._kernels.gpu import interpreter
    from longspan._kernels.hopper import kernel

    capability = {"ampere": (8, 0), "blackwell": (10, 0)}.get(way, (9, 0))
    monkeypatch.setattr(registry, "has_gluon", lambda: way != "no gluon")
    monkeypatch.setattr(torch.version, "hip", "6.4" if way == "rocm" else None)
    monkeypatch.setattr(interpreter, "interpreted", lambda: way == "interpreter")
    monkeypatch.setattr(registry, "_capability", lambda device: capability)
    monkeypatch.setattr(kernel, "untested_triton", lambda: None)
    assert registry.first_candidate(CPU) == ("hopper" if way == "hopper" else "triton")


def test_an_untested_triton_on_hopper_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from longspan._kernels.gpu import interpreter
    from longspan._kernels.hopper import kernel

    monkeypatch.setattr(registry, "has_gluon", lambda: True)
    monkeypatch.setattr(interpreter, "interpreted", lambda: False)
    monkeypatch.setattr(registry, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel, "untested_triton", lambda: "Triton 9.9 was not tested")
    registry._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [registry.first_candidate(CPU) for _ in range(2)] == ["triton", "triton"]
    (one,) = told
    assert str(one.message) == "kernel='auto' uses 'triton' on this Hopper GPU, which is slower than 'hopper': Triton 9.9 was not tested"
    assert one.filename == registry.__file__
    registry._warn_once.cache_clear()


@pytest.mark.parametrize("backend", ["flash", "mem_efficient", "cudnn"])
def test_choices_are_made_again_under_other_settings_of_torch(backend: str) -> None:
    before, enable = registry.torch_settings(), getattr(torch.backends.cuda, f"enable_{backend}_sdp")
    enable(False)
    other = registry.torch_settings()
    enable(True)
    torch.use_deterministic_algorithms(True)
    try:
        strict = registry.torch_settings()
        torch.use_deterministic_algorithms(True, warn_only=True)
        warns = registry.torch_settings()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len({before, other, strict, warns}) == 4 and registry.torch_settings() == before


# ------------------------------------------------------------------------------------------------ the Triton kernel


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its module, on a machine with an Ampere GPU."""
    pytest.importorskip("triton")
    from longspan._kernels.triton import kernel

    monkeypatch.setattr(kernel, "interpreted", lambda: False)
    monkeypatch.setattr(kernel, "capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary")
    return kernel


def inputs(dims: tuple[int, int] = (64, 48), dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> Any:
    q, v = (SimpleNamespace(is_cuda=is_cuda, device=CPU, dtype=dtype, shape=(2, heads, 90, dim)) for heads, dim in zip((6, 3), dims))
    return SimpleNamespace(q=q, k=q, v=v, local_kv=None)


def test_devices_and_dtypes_that_the_triton_kernel_supports(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work, kernel = work_of(causal, [(0, 90)], [(0, 90)], block=64), module.TritonKernel()

    def reason(given: Any) -> str | None:
        return kernel.capabilities(given, work).unsupported  # type: ignore[no-any-return]

    assert reason(inputs()) is None and reason(inputs(dtype=torch.float32)) is None and reason(inputs((256, 256))) is None
    assert reason(inputs(dtype=torch.float64)) == "dtype torch.float64: expected bfloat16, float16 or float32"
    assert reason(inputs(is_cuda=False)) == "tensors on cpu: expected a CUDA device"
    assert reason(inputs((64, 264))) == "head dims 64 and 264: expected at most 256 each"
    for capability, supported in (((7, 5), False), ((7, 9), False), ((8, 6), True), ((9, 0), True)):
        monkeypatch.setattr(module, "capability", lambda device, capability=capability: capability)
        assert (reason(inputs()) is None) == supported
        assert supported or reason(inputs()) == "Imaginary: expected compute capability 8.0 (Ampere) or later"
    assert kernel.capabilities(inputs(), work).rounds_kv_grads_once
    monkeypatch.setattr(module, "interpreted", lambda: True)
    assert reason(inputs()) == "TRITON_INTERPRET=1 is set: the interpreter supports CPU tensors only"
    assert reason(inputs(is_cuda=False)) is None and not kernel.capabilities(inputs(is_cuda=False), work).rounds_kv_grads_once


@pytest.mark.parametrize(
    ("mod", "dims", "dtype", "capability", "fine"),
    [
        (causal, (64, 48), torch.bfloat16, (9, 0), True),
        (causal, (128, 72), torch.bfloat16, (9, 0), True),
        (causal, (64, 136), torch.bfloat16, (9, 0), False),
        (causal, (136, 64), torch.bfloat16, (9, 0), False),
        (causal, (64, 48), torch.float32, (9, 0), False),
        (causal, (64, 48), torch.bfloat16, (8, 9), False),
        (everything, (64, 48), torch.bfloat16, (9, 0), False),
        (lambda b, h, q, kv: q + kv < 0, (64, 48), torch.bfloat16, (9, 0), False),
        (lambda b, h, q, kv: q + kv > 0, (64, 48), torch.bfloat16, (9, 0), False),
    ],
)
def test_many_partial_tiles_make_fine_tables_faster(
    mod: Any,
    dims: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    fine: bool,
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a causal mask, 3 of 9 visible tiles are partial; of everything and of nothing, none; of everything but one pair, 1 of 12."""
    monkeypatch.setattr(module, "capability", lambda device: capability)
    table = work_of(mod, [(0, 128)], [(0, 96)], block=32).table
    assert module.TritonKernel().block_size(inputs(dims, dtype), table) == ((64, 64) if fine else (32, 32))


def test_lookups_are_checked_except_in_a_capture(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, ordered, given, work = [], [], inputs(), work_of(causal, [(0, 90)], [(0, 90)], block=64)
    monkeypatch.setattr(module, "check_lookups", lambda *args: checked.append(args))
    monkeypatch.setattr(module, "check_order", lambda *args: ordered.append(args))
    for capturing in (True, False):
        monkeypatch.setattr(module.launch, "capturing", lambda device, capturing=capturing: capturing)
        module.TritonKernel().check(given, work, needs=(True,))
        assert checked == ([] if capturing else [(work, 2, 6)])
    assert ordered == [(work, (True,), given.q)] * 2


def test_only_calls_of_few_queries_are_prepared(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kernel, work = [], module.TritonKernel(), work_of(causal, [(0, 90)], [(0, 90)], block=64)
    monkeypatch.setattr(module, "DecodeForward", lambda *args: made.append(args) or "prepared")
    for interpreted, decoding, prepared in ((False, True, True), (True, True, False), (False, False, False)):
        monkeypatch.setattr(module, "interpreted", lambda interpreted=interpreted: interpreted)
        monkeypatch.setattr(module, "is_decoding", lambda inputs, work, decoding=decoding: decoding)
        assert kernel.prepare_forward(inputs(), work) == ("prepared" if prepared else None)
    ((*_, decode_work),) = made
    assert (decode_work.scale, decode_work.mask, decode_work.window) == (0.3, work.mask, None)


@pytest.mark.parametrize(
    ("blocks", "entries", "options", "expected"),
    [
        ((64, 64), 5, {}, (64, 64)),
        ((128, 256), 5, {}, (128, 128)),
        ((128, 256), 5, {"captured_grads": True, "by_head": True}, (128, 128)),
        ((32, 4), 5, {}, (128, 128)),
        ((32, 4), 0, {}, None),
        ((32, 4), 5, {"captured_grads": True}, None),
        ((32, 4), 5, {"by_head": True}, None),
    ],
)
def test_tiles_of_a_selection(
    blocks: tuple[int, int], entries: int, options: dict[str, bool], expected: tuple[int, int] | None, module: Any
) -> None:
    """blocks: of keys and of queries. Small blocks are gathered where heads of a group see the same keys."""
    selection = Selection(
        indices=torch.zeros(1, 1, 9, entries, dtype=torch.int32), granularity=blocks[0], q_granularity=blocks[1], heads_per_choice=6
    )
    asked = {"captured_grads": False, "by_head": False} | options
    assert module.TritonKernel().selection_block(inputs(), selection, **asked) == expected


@pytest.mark.parametrize(("block", "listed"), [((64, 128), True), ((128, 64), True), ((64, 32), False), ((256, 64), False)])
def test_tile_lists_are_made_on_the_device_for_tiles_of_64_and_128(
    block: tuple[int, int], listed: bool, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(module, "listed_work", lambda *args, **options: made.append((args, options)) or "listed")
    work, kinds = work_of(causal, [(0, 90)], [(0, 90)], block=64), torch.zeros(1)
    work = replace(work, table=replace(work.table, block=block))
    assert module.TritonKernel().list_tiles(inputs(), work, kinds) == ("listed" if listed else None)
    assert made == ([((work, kinds), {"dummy": False})] if listed else [])


def test_a_backward_pass_needs_the_derivative_of_the_score_mod(module: Any) -> None:
    from longspan._kernels.protocol import BackwardInputs
    from longspan._masks.tracing import trace

    q = torch.zeros(1, 2, 90, 8)
    score = trace(lambda s, b, h, q, kv: s * 2, "score").program
    work: Work = replace(work_of(causal, [(0, 90)], [(0, 90)], block=64), score=score)
    tensors = BackwardInputs(inputs=AttentionInputs(q=q, k=q, v=q), out=q, lse=q[..., 0], grad_out=q)
    with pytest.raises(ValueError, match=r"expected work\.joint for a backward pass, got None"):
        module.TritonKernel().backward(tensors, work, wide=False)
