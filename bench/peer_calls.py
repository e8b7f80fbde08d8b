"""Peers of bench/peers.py: one adapter per attention kernel.

An adapter `prepare(row, problem, inputs)` builds the peer's mask once and returns the call (q, k, v) → out that is timed. It raises
Unsupported if the peer cannot compute the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from bench.peer_problems import SOFTCAP, Problem, Row, softcap
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan as ls


class Unsupported(Exception):
    """A peer cannot compute a row. The message is the reason."""


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def transposed(t: Tensor) -> Tensor:
    """[B, H, S, D] → contiguous [B, S, H, D]."""
    return t.detach().transpose(1, 2).contiguous()


def longspan_call(row: Row, problem: Problem, inputs: list[Tensor]) -> Call:
    return lambda q, k, v: ls.attention(q, k, v, mask=problem.mask, score_mod=problem.score_mod)


def sdpa_call(backend: SDPBackend) -> Callable[[Row, Problem, list[Tensor]], Call]:
    def prepare(row: Row, problem: Problem, inputs: list[Tensor]) -> Call:
        if row.kind not in ("full", "causal"):
            raise Unsupported("full and causal masks only")

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=row.heads != row.kv_heads)

        return run

    return prepare


def flex_call(row: Row, problem: Problem, inputs: list[Tensor]) -> Call:
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # backward runs many times on one graph
    blocks = None
    if row.kind != "full":
        on_device = (
            ls.documents(ids=torch.repeat_interleave(torch.tensor(problem.lengths)).cuda()) & ls.causal()
            if problem.lengths
            else problem.mask
        )
        blocks = torch.compile(create_block_mask)(on_device, None, None, row.tokens, row.tokens, device="cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score_mod=problem.score_mod, block_mask=blocks, enable_gqa=row.heads != row.kv_heads)


def fa4_call(row: Row, problem: Problem, inputs: list[Tensor]) -> Call:
    interface = import_module("flash_attn.cute.interface")
    options: dict[str, Any] = {"softcap": SOFTCAP} if problem.score_mod is softcap else {}
    if problem.lengths is not None:
        ends = F.pad(torch.tensor(problem.lengths).cumsum(0), (1, 0)).int().cuda()
        longest = max(problem.lengths)

        def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = interface.flash_attn_varlen_func(
                q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
            )
            return (out[0] if isinstance(out, tuple) else out)[None]

        return varlen
    if problem.window is not None:
        options |= {"window_size": (problem.window - 1, 0)}
    elif problem.causal:
        options |= {"causal": True}
    elif row.kind != "full":
        raise Unsupported("the mask would have to be written in CuTe DSL")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = interface.flash_attn_func(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return run


def cudnn_flex_call(row: Row, problem: Problem, inputs: list[Tensor]) -> Call:
    module = import_module("cudnn.flex_attention")
    if problem.intervals is None:
        raise Unsupported("no score_mod; masks are KV intervals per query")
    plan = module.create_mask_plan(problem.intervals[None].contiguous().cuda(), *inputs, build_backward=True)
    return lambda q, k, v: module.flex_attn_func(q, k, v, mask_plan=plan)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A kernel to compare with.

    Attributes:
        package: Module that must be importable.
        distribution: Name of the installed package, for its version.
        prepare: The adapter.
        tokens_first: Whether tensors are [B, S, H, D] instead of [B, H, S, D].
    """

    name: str
    package: str
    distribution: str
    prepare: Callable[[Row, Problem, list[Tensor]], Call]
    tokens_first: bool = False

    def missing(self) -> str | None:
        """Why the peer cannot be imported; None if it can."""
        try:
            import_module(self.package)
        except Exception as error:  # a broken installation may raise anything
            return f"{self.distribution}: {type(error).__name__}: {error}"
        return None

    @property
    def version(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:  # imported from a checkout
            return str(getattr(import_module(self.package), "__version__", "?"))


PEERS = (
    Peer(name="longspan", package="longspan", distribution="longspan", prepare=longspan_call),
    Peer(name="fa4", package="flash_attn.cute.interface", distribution="flash-attn-4", prepare=fa4_call, tokens_first=True),
    Peer(
        name="cudnn.flex", package="cudnn.flex_attention", distribution="nvidia-cudnn-frontend", prepare=cudnn_flex_call, tokens_first=True
    ),
    Peer(name="flex", package="torch", distribution="torch", prepare=flex_call),
    Peer(name="cudnn", package="torch", distribution="torch", prepare=sdpa_call(SDPBackend.CUDNN_ATTENTION)),
    Peer(name="flash", package="torch", distribution="torch", prepare=sdpa_call(SDPBackend.FLASH_ATTENTION)),
)
