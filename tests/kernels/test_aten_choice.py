"""What the kernels over torch's SDPA operators refuse, and why; which of them is chosen. CUDA tensors here are fake ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.calls import forward
from tests.kernels.shards import work_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from longspan._kernels import aten_limits, registry
from longspan._kernels.aten import AnyAtenKernel, AtenKernel
from longspan._kernels.protocol import AttentionInputs, Kernel, Work
from longspan._kernels.registry import KernelCall, NotSupported, choose, kernel_named
from longspan._masks.tracing import trace

BACKENDS = ["flash", "efficient", "cudnn"]
BATCH, HEADS, GROUPS = 2, 6, 3
SHARD = ((0, 32), (80, 16))
Mod = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def full(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q + kv >= 0


def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv < 13) & (q >= kv)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A machine that does not exist. Its facts can be set."""
    facts = SimpleNamespace(capability=(9, 0), cudnn=91900, allowed=True, mode=FakeTensorMode())
    monkeypatch.setattr(aten_limits, "_capability", lambda device: facts.capability)
    monkeypatch.setattr(registry, "_capability", lambda device: facts.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary")
    monkeypatch.setattr(torch.cuda, "device", lambda device: facts.mode)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: facts.cudnn)

    def can_use_it(params: Any, debug: bool) -> bool:
        return facts.allowed

    monkeypatch.setattr(aten_limits, "_ALLOWED", dict.fromkeys(BACKENDS, can_use_it))
    monkeypatch.setattr(aten_limits, "_params", lambda *args: None)
    yield facts


def fakes(
    facts: SimpleNamespace, dims: tuple[int, int] = (64, 64), dtype: torch.dtype = torch.bfloat16, batch: int = 2, heads: int = HEADS
) -> list[Tensor]:  # fmt: skip
    with facts.mode:
        shapes = ((batch, heads, 48, dims[0]), (batch, GROUPS, 48, dims[0]), (batch, GROUPS, 48, dims[1]))
        return [torch.empty(s, dtype=dtype, device="cuda") for s in shapes]


def on_cpu(dims: tuple[int, int] = (24, 24), dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    shapes = ((BATCH, HEADS, 48, dims[0]), (BATCH, GROUPS, 48, dims[0]), (BATCH, GROUPS, 48, dims[1]))
    return [torch.empty(s, dtype=dtype, device=device) for s in shapes]


def work_for(mod: Mod) -> Work:
    return work_of(mod, SHARD, SHARD, block=16, batch=BATCH, heads=HEADS)


def inputs(tensors: list[Tensor]) -> AttentionInputs:
    q, k, v = tensors
    return AttentionInputs(q=q, k=k, v=v)


def chosen(name: str, tensors: list[Tensor], *works: Work) -> Kernel:
    return choose(name, [KernelCall(inputs(tensors), work) for work in works]).kernel


@pytest.mark.parametrize(
    ("name", "tensors", "reason"),
    [
        ("efficient", on_cpu(), "tensors on cpu: expected a CUDA device$"),
        ("cudnn", on_cpu(), "tensors on cpu: expected a CUDA device$"),
        ("flash", on_cpu(device="meta"), "tensors on meta: expected a CUDA device or the CPU$"),
        ("flash", on_cpu(dtype=torch.int32), "dtype torch.int32 on cpu: expected float64, float32, bfloat16, float16$"),
        ("flash", on_cpu(dims=(24, 40)), "head dims 24 of keys and 40 of values: expected the same$"),
    ],
)
def test_it_says_which_tensors_it_rejects(name: str, tensors: list[Tensor], reason: str) -> None:
    with pytest.raises(NotSupported, match=reason.replace("$", r"\. kernel='auto' picks one that does$")):
        chosen(name, tensors, work_for(causal))


def test_it_rejects_a_score_mod_and_a_mask_that_decides_inside_rectangles() -> None:
    score = trace(lambda s, b, h, q, kv: s * 2, "score").program
    with pytest.raises(
        NotSupported, match=r"kernel 'flash' does not support this call: score_mod .*: torch's SDPA operators do not support"
    ):
        chosen("flash", on_cpu(), replace(work_for(causal), score=score))
    with pytest.raises(
        NotSupported,
        match=r"\d+ of \d+ rectangles of the mask are neither full nor causal .* queries \d+ to \d+ and keys \d+ to \d+",
    ):
        chosen("flash", on_cpu(), work_for(window))
    with pytest.raises(NotSupported, match=r"cudnn: tensors on cpu.*; flash: .* of the mask are neither.*; efficient: tensors on cpu"):
        chosen("aten", on_cpu(), work_for(window))


def test_a_later_stage_that_needs_its_mask_is_an_error_and_not_a_wrong_answer() -> None:
    with pytest.raises(NotSupported, match="neither full nor causal squares"):
        chosen("flash", on_cpu(), work_for(full), work_for(window))
    for name in ("flash", "aten"):
        with pytest.raises(ValueError, match=r"(the mask is neither|are neither full nor) .*kernel='auto' picks"):
            forward(kernel_named(name), *on_cpu(), work_for(window), state=None, final=True, max_scores=False)


@pytest.mark.parametrize(
    ("name", "settings", "machine", "reason"),
    [
        ("flash", {"dtype": torch.float32}, {}, "dtype torch.float32 on cuda: expected bfloat16, float16"),
        ("cudnn", {"dtype": torch.float64}, {}, "dtype torch.float64 on cuda"),
        ("flash", {"dims": (192, 128)}, {}, "expected the same"),
        ("flash", {"dims": (264, 264)}, {}, "head dim 264: expected at most 256"),
        ("flash", {"dims": (208, 208)}, {"capability": (8, 9)}, r"head dim 208 on Imaginary \(compute capability 8.9\)"),
        ("flash", {"dims": (224, 224)}, {"capability": (12, 0)}, r"head dim 224 on Imaginary \(compute capability 12.0\)"),
        ("flash", {}, {"capability": (7, 5)}, r"Imaginary \(compute capability 7.5\): expected 8.0 \(Ampere\) or later$"),
        ("efficient", {}, {"capability": (7, 5)}, r"expected 8.0 \(Ampere\) or later for bfloat16"),
        ("efficient", {"dims": (60, 64)}, {}, "head dims 60 and 64: expected multiples of 8"),
        ("efficient", {"dims": (64, 66), "dtype": torch.float32}, {}, "head dims 64 and 66: expected multiples of 4"),
        ("efficient", {"batch": 65536}, {}, "batch 65536, heads 6: expected at most 65535 each"),
        ("cudnn", {"dims": (256, 256)}, {}, "head dims 256 and 256 with cuDNN 91900: expected at most 128 each"),
        ("cudnn", {"dims": (192, 128)}, {"cudnn": 91000}, "with cuDNN 91000"),
        ("cudnn", {}, {"cudnn": 91002}, "48 queries and 48 keys with cuDNN 91002|32 queries"),
        ("cudnn", {}, {"cudnn": None}, "48 queries and 48 keys with cuDNN 0: before 91501|32 queries"),
        ("cudnn", {"dims": (136, 128)}, {}, "head dims 136 and 128 with cuDNN 91900"),
        ("cudnn", {"dims": (64, 136)}, {}, "head dims 64 and 136 with cuDNN 91900"),
        ("cudnn", {"dims": (128, 192)}, {}, "head dims 128 and 192 with cuDNN 91900"),
        ("cudnn", {}, {"capability": (7, 5)}, r"expected 8.0 \(Ampere\) or later$"),
        ("flash", {"dims": (200, 200)}, {"capability": (8, 6)}, "its backward pass does not support 193 to 224 there"),
        ("efficient", {"dims": (0, 64)}, {}, "head dims 0 and 64: expected multiples of 8"),
        ("efficient", {"dims": (64, 0)}, {}, "head dims 64 and 0: expected multiples of 8"),
        ("efficient", {"heads": 65538}, {}, "batch 2, heads 65538: expected at most 65535 each"),
        ("cudnn", {}, {"allowed": False}, r"torch.backends.cuda.can_use_it returns False on this machine \(with debug=True"),
    ],
)
def test_it_says_what_it_rejects_on_cuda(
    name: str, settings: dict[str, Any], machine: dict[str, Any], reason: str, cuda: SimpleNamespace
) -> None:
    vars(cuda).update(machine)
    with pytest.raises(NotSupported, match=reason.replace("$", r"\. kernel='auto'")):
        chosen(name, fakes(cuda, **settings), work_for(causal))


@pytest.mark.parametrize(
    ("name", "settings", "machine"),
    [
        ("flash", {"dims": (256, 256)}, {}),
        ("flash", {"dims": (208, 208)}, {}),
        ("flash", {"dims": (208, 208)}, {"capability": (10, 0)}),
        ("flash", {"dims": (208, 208)}, {"capability": (8, 0)}),
        ("flash", {"dims": (192, 192)}, {"capability": (8, 6)}),
        ("flash", {"dims": (232, 232)}, {"capability": (12, 0)}),
        ("flash", {"dtype": torch.float16}, {}),
        ("efficient", {"dims": (192, 128)}, {}),
        ("efficient", {"dims": (20, 12), "dtype": torch.float32}, {}),
        ("efficient", {"dtype": torch.float16}, {"capability": (7, 5)}),
        ("efficient", {"batch": 65535}, {}),
        ("cudnn", {"dims": (128, 64)}, {}),
        ("cudnn", {"dims": (192, 128)}, {}),
        ("cudnn", {"dims": (192, 128)}, {"cudnn": 91501}),
        ("cudnn", {}, {"cudnn": 91501}),
    ],
)
def test_it_rejects_no_more_than_it_must_on_cuda(
    name: str, settings: dict[str, Any], machine: dict[str, Any], cuda: SimpleNamespace
) -> None:
    vars(cuda).update(machine)
    assert chosen(name, fakes(cuda, **settings), work_for(causal)).name == name


@pytest.mark.parametrize(("name", "kv_heads", "grouped"), [("flash", GROUPS, True), ("cudnn", GROUPS, True), ("efficient", HEADS, False)])
def test_torch_is_asked_about_the_shapes_of_a_call(
    name: str, kv_heads: int, grouped: bool, cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each rectangle once, without the warnings of debug=True. The efficient operator gets keys of all query heads."""
    asked: list[Any] = []
    monkeypatch.setattr(aten_limits, "_params", lambda *args: args)
    monkeypatch.setitem(aten_limits._ALLOWED, name, lambda params, debug: asked.append((params, debug)) or True)
    assert chosen(name, fakes(cuda, dims=(64, 64), batch=BATCH), work_for(causal)).name == name
    shapes = [(params[0].shape[2], params[1].shape[2], params[5]) for params, _ in asked]
    assert shapes == [(32, 32, True), (16, 32, False), (16, 16, True)]
    for (q, k, v, mask, dropout, _, gqa), debug in asked:
        assert (mask, dropout, gqa, debug) == (None, 0.0, grouped, False)
        assert [(t.shape[0], t.shape[1], t.shape[3], t.dtype) for t in (q, k, v)] == [
            (BATCH, heads, 64, torch.bfloat16) for heads in (HEADS, kv_heads, kv_heads)
        ]


@pytest.mark.parametrize(("queries", "keys", "odd"), [(256, 128, None), (256, 100, (256, 100)), (96, 128, (96, 128)), (128, 256, None)])
def test_an_old_cudnn_needs_lengths_that_are_multiples_of_128(
    queries: int, keys: int, odd: tuple[int, int] | None, cuda: SimpleNamespace
) -> None:
    """Lengths are those of the work, also where the tensors have others."""
    work = work_of(full, ((300, queries),), ((0, keys),), block=64, batch=BATCH, heads=HEADS)
    for version in (91101, 91500):
        cuda.cudnn = version
        if odd is None:
            assert chosen("cudnn", fakes(cuda), work).name == "cudnn"
        else:
            with pytest.raises(NotSupported, match=f"{odd[0]} queries and {odd[1]} keys with cuDNN {version}: before 91501"):
                chosen("cudnn", fakes(cuda), work)
    cuda.cudnn = 91501
    assert chosen("cudnn", fakes(cuda), work).name == "cudnn"


@pytest.mark.parametrize(("version", "supported"), [(91099, False), (91100, True), (91101, True)])
def test_cudnn_computes_latent_head_dims_from_its_release_on(
    version: int, supported: bool, cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.cudnn = version
    reason = aten_limits.unsupported_reason(
        "cudnn", inputs(fakes(cuda, dims=(192, 128))), work_of(full, ((0, 256),), ((0, 128),), block=64, batch=BATCH, heads=HEADS)
    )
    assert (reason is None) == supported and (supported or f"192 and 128 with cuDNN {version}" in str(reason))


def test_work_without_tiles_needs_no_lengths(cuda: SimpleNamespace) -> None:
    nothing = work_of(lambda b, h, q, kv: q + kv < 0, SHARD, SHARD, block=16, batch=BATCH, heads=HEADS)
    cuda.allowed = False
    assert chosen("cudnn", fakes(cuda), nothing).name == "cudnn"


def test_rocm_builds_are_not_supported(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(NotSupported, match="a ROCm build of torch: not tested"):
        chosen("efficient", fakes(cuda), work_for(causal))


def test_flash_attention_needs_no_more_than_ampere(cuda: SimpleNamespace) -> None:
    cuda.capability = (8, 0)
    assert chosen("flash", fakes(cuda), work_for(causal)).name == "flash"


def test_cudnn_raises_where_results_must_be_the_same_each_time(cuda: SimpleNamespace) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NotSupported, match="accumulates the gradient of q in arbitrary order"):
            chosen("cudnn", fakes(cuda), work_for(causal))
        assert chosen("flash", fakes(cuda), work_for(causal)).name == "flash"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert chosen("cudnn", fakes(cuda), work_for(causal)).name == "cudnn"
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_never_takes_torch_operators_on_cuda(cuda: SimpleNamespace) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert chosen("auto", fakes(cuda, dtype=dtype), work_for(causal)).name in ("hopper", "triton", "cpu")


def test_aten_takes_the_fastest_that_takes_the_work(cuda: SimpleNamespace) -> None:
    kernel = kernel_named("aten")
    assert isinstance(kernel, AnyAtenKernel)
    picks = {
        "cudnn": fakes(cuda),
        "flash": fakes(cuda, dims=(256, 256)),
        "efficient": fakes(cuda, dims=(256, 64)),
    }
    for name, tensors in picks.items():
        assert kernel.pick(inputs(tensors), work_for(causal)) == AtenKernel(name), name  # type: ignore[arg-type]
    assert kernel.pick(inputs(on_cpu()), work_for(causal)) == AtenKernel("flash")
    assert chosen("auto", on_cpu(), work_for(causal)).name == "cpu"
