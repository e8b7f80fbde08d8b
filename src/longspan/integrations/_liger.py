"""Liger's fused linear and cross entropy, where it is installed: whether it can compute a call, and whether it is the faster one.

Legend: T tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

DEVICES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_TOKENS = 1024  # fewer tokens take less time than a measurement is worth
LONGEST_SAMPLE = 32768  # tokens of a measurement at most
ROUNDS = 2

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [T, D], weight [V, D], targets [T] → the sum of losses


def unsupported(hidden: Tensor, weight: Tensor, chunk: int) -> str:
    """Why Liger cannot compute this call; "" if it can. hidden: [T, D]."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not installed: pip install liger-kernel"
    if hidden.device.type not in DEVICES:
        return f"expected tensors on {' or '.join(DEVICES)}, got {hidden.device}"
    if hidden.dtype not in DTYPES or weight.dtype != hidden.dtype or torch.is_autocast_enabled(hidden.device.type):
        return f"expected hidden states and weight of one dtype up to float32 and no autocast, got {hidden.dtype} and {weight.dtype}"
    if type(weight) not in (Tensor, nn.Parameter) or type(hidden) is not Tensor:
        return f"expected plain tensors, got {type(hidden).__name__} and {type(weight).__name__}"
    if torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled():
        return "expected neither torch.compile nor deterministic algorithms"
    tokens = liger_chunk(hidden.shape[0], hidden.shape[1], weight.shape[0])
    return "" if tokens <= chunk else f"its logits of {tokens} tokens at a time exceed chunk={chunk}"


def liger_chunk(tokens: int, dim: int, vocabulary: int) -> int:
    """Tokens whose logits Liger has in memory at once: about as many elements as the hidden states have."""
    per_chunk = -(-tokens // -(-vocabulary // dim))
    return min(tokens, 1 << max(0, per_chunk - 1).bit_length())


def liger_sum(hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int) -> Tensor:
    """The sum of the losses by Liger's kernel. Gradients of the weight are summed in float32."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    total = liger_fused_linear_cross_entropy(
        hidden, weight, targets, ignore_index=ignore_index, reduction="sum", accum_dtype=torch.float32
    )  # fmt: skip
    return _Once.apply(total)  # type: ignore[no-any-return]


class _Once(torch.autograd.Function):
    """Its input. A second backward pass raises: Liger scales its gradients in place, so that they would be scaled twice."""

    @staticmethod
    def forward(ctx: Any, total: Tensor) -> Tensor:
        ctx.is_used = False
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if ctx.is_used:
            raise RuntimeError("linear_token_loss: Liger's loss supports one backward pass; give kernel='tiled' for several")
        ctx.is_used = True
        return grad


def is_faster(liger: Loss, tiled: Loss, hidden: Tensor, weight: Tensor) -> bool:
    """Whether Liger's loss takes less time than the tiled one, measured once per process, device, D, V, dtype and number of tokens."""
    if hidden.shape[0] < MIN_TOKENS:
        return False
    key = hidden.device, sample_tokens(hidden.shape[0]), hidden.shape[1], weight.shape[0], hidden.dtype
    return _measured(key, _Calls(liger, tiled))


def sample_tokens(tokens: int) -> int:
    """Tokens of the measurement for a call: the power of two below, up to LONGEST_SAMPLE.

    Liger's chunks grow with the number of tokens: with the sizes of Llama-3.2-1B on an H200 it takes 1.6 times the tiled loss's time
    at 4,096 tokens and 0.46 of it at 131,072.
    """
    return min(LONGEST_SAMPLE, 1 << (tokens.bit_length() - 1))


class _Calls:
    """Both losses. All instances are equal, so that a cache keyed by one returns an earlier measurement."""

    def __init__(self, liger: Loss, tiled: Loss) -> None:
        self.liger, self.tiled = liger, tiled

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Calls)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=64)
def _measured(key: tuple[torch.device, int, int, int, torch.dtype], calls: _Calls) -> bool:
    device, tokens, dim, vocabulary, dtype = key
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        hidden = torch.randn(tokens, dim, device=device, dtype=dtype, requires_grad=True)
        weight = torch.zeros(vocabulary, dim, device=device, dtype=dtype, requires_grad=True)
        targets = torch.randint(vocabulary, (tokens,), device=device)
        return seconds(calls.liger, hidden, weight, targets) < seconds(calls.tiled, hidden, weight, targets)


def seconds(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """The least time of a forward and backward pass, after one to warm up."""
    times = []
    for _ in range(ROUNDS + 1):
        _wait(hidden.device)
        started = time.perf_counter()
        torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))
        _wait(hidden.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
