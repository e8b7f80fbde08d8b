"""The calls whose kernels are prebuilt (`longspan._kernels.gpu.prebuilt`), and the compilations that they request from Triton.

No GPU is needed: CPU tensors stand for CUDA tensors (`stub_launches`), and Triton gets a driver that knows the target only. For a process
of its own, without Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.kernels.stub_launches import record_launches
from tests.kernels_of_calls import pretend_device
from triton.backends.compiler import GPUTarget

import longspan as ls
from longspan._kernels.gpu import prepared_launch
from longspan._kernels.gpu.prebuilt import kernel_key

TARGET = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention call, forward and backward: heads and KV heads, tokens, head dim, and the mask of so many tokens."""

    heads: tuple[int, int]
    tokens: int
    dim: int
    mask: Callable[[int], Any]
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1

    def make(self) -> None:
        query_heads, kv_heads = self.heads
        shapes = [(self.batch, heads, self.tokens, self.dim) for heads in (query_heads, kv_heads, kv_heads)]
        q, k, v = (torch.zeros(shape, dtype=self.dtype, requires_grad=True) for shape in shapes)
        out = ls.attention(q, k, v, mask=self.mask(self.tokens), kernel="hopper")
        out.backward(torch.zeros_like(out))


def _window(left: int) -> Callable[[int], Any]:
    return lambda tokens: ls.sliding_window(left)


def _documents(length: int) -> Callable[[int], Any]:
    return lambda tokens: ls.causal() & ls.documents(ids=torch.arange(tokens) // length)


# Sizes of every variant: KV heads that leave SMs idle or not, items that are split along KV or not, short and long rows.
SIZES = (
    ((8, 2), 2048), ((4, 4), 8192), ((4, 2), 2048), ((16, 4), 1500), ((32, 8), 8192), ((16, 2), 512), ((64, 16), 256), ((128, 32), 1024),
    ((16, 8), 16384), ((8, 2), 32768), ((4, 1), 32768), ((128, 16), 1900), ((256, 32), 1024), ((256, 32), 512),
)  # fmt: skip
MASKS: tuple[Callable[[int], Any], ...] = (
    lambda tokens: None, lambda tokens: ls.causal(), _window(1024), _documents(700), _documents(2900), _documents(9000),
)  # fmt: skip
DIMS = (64, 128)
WINDOWS = {64: 128, 128: 4096}  # by head dim, of models that are widely used
CALLS = [
    Call(heads=heads, tokens=tokens, dim=dim, mask=mask)
    for dim in DIMS
    for mask in (*MASKS, _window(WINDOWS[dim]))
    for heads, tokens in SIZES
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `triton.compile` is called with, and the key of the kernel."""

    source: Any
    options: dict[str, Any]
    key: str


class _Asked(Exception):
    """Carries the arguments of `triton.compile` out of Triton."""


def requested(self: Any, arguments: Any) -> Request:
    """What a launch asks Triton to compile."""

    def ask(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        raise _Asked(source, options)

    self.kernel.device_caches[0]  # sets `compile`
    before, self.kernel.compile = self.kernel.compile, ask
    try:
        self.kernel.warmup(*arguments, grid=(1,), sanitize_overflow=False, **self.options)
    except _Asked as asked:
        source, options = asked.args
    finally:
        self.kernel.compile = before
    return Request(source=source, options=options, key=kernel_key(source, TARGET, options))


def requests(patch: pytest.MonkeyPatch) -> dict[str, Request]:
    """By key, what later launches ask Triton to compile: they fill the dict."""
    collected: dict[str, Request] = {}

    def collect(self: Any, arguments: Any) -> str:
        request = requested(self, arguments)
        collected.setdefault(request.key, request)
        return str(request.source.name)

    prepare_anew(patch)
    patch.setattr(prepared_launch.PreparedLaunch, "_compile_with_fewer_stages", collect)
    return collected


def prepare_anew(patch: pytest.MonkeyPatch) -> None:
    """`record_launches` for a GPU that Triton can compile for. No launch is prepared yet."""
    compile_for_launch = prepared_launch.PreparedLaunch._compile_with_fewer_stages
    record_launches(patch)
    patch.setattr(prepared_launch.PreparedLaunch, "_compile_with_fewer_stages", compile_for_launch)
    pretend_device()
    patch.setattr(prepared_launch, "_launches", type(prepared_launch._launches)(64))  # launches of before are compiled
    prepared_launch._layout_launch.cache_clear()
    prepared_launch._recent_launches.clear()


def common_requests() -> dict[str, Request]:
    """What the common calls ask Triton to compile, by key."""
    with pytest.MonkeyPatch.context() as patch:
        collected = requests(patch)
        for call in CALLS:
            call.make()
    return collected
