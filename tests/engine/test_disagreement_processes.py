"""Real processes that differ after calls on which they agreed: every rank raises within seconds, and the next call is right again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import longspan as ls
from longspan._comm.gather import all_gather_rows
from longspan._comm.mesh import as_mesh
from longspan.testing import run_processes

pytestmark = pytest.mark.processes
TOKENS, HEADS, DIM = 203, 4, 8
ODD_RANK = 1


def add(constant: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score + constant * (q - kv)


SOFT, HARD = add(0.01), add(0.02)


class Rank:
    """The calls of one rank. `odd`: whether it is the rank that differs."""

    def __init__(self, mesh: Any, **options: Any) -> None:
        self.odd = dist.get_rank() == ODD_RANK
        self.causal = ls.plan(ls.causal(), TOKENS, mesh, **options)
        self.window = ls.plan(ls.sliding_window(20), TOKENS, mesh, **options)
        self.shorter = ls.plan(ls.causal(), TOKENS - 1, mesh, **options)

    def call(
        self, plan: ls.Plan | None = None, *, batch: int = 2, dtype: torch.dtype = torch.float32, heads: int = HEADS, **options: Any
    ) -> Tensor:
        plan = plan or self.causal
        shape = (batch, heads, plan.local_len, DIM)
        q, k, v = (torch.ones(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        return ls.attention(q, k, v, plan=plan, **options)

    def agree_on_everything(self) -> None:
        """Every kind of call that ranks differ in later, made by all ranks."""
        for plan in (self.causal, self.window, self.shorter):
            self.call(plan).sum().backward()
        for dtype in (torch.float16, torch.bfloat16):
            self.call(dtype=dtype).sum().backward()
        for options in ({"batch": 1}, {"scale": 0.5}, {"score_mod": SOFT}, {"score_mod": HARD}, {"sink": torch.zeros(HEADS)}):
            self.call(**options).sum().backward()
        self.causal.unshard(self.causal.shard(torch.ones(TOKENS, 3), 0), 0)

    # ------------------------------------------------------------------------------------ one disagreement each

    def scale(self) -> None:
        self.call(scale=0.5 if self.odd else None)

    def half_dtype(self) -> None:
        self.call(dtype=torch.float16 if self.odd else torch.bfloat16)

    def smaller_last_batch(self) -> None:
        self.call(batch=1 if self.odd else 2)

    def length(self) -> None:
        self.call(self.shorter if self.odd else self.causal)

    def score_mod_constant(self) -> None:
        self.call(score_mod=HARD if self.odd else SOFT)

    def sink(self) -> None:
        self.call(sink=torch.zeros(HEADS) if self.odd else None)

    def skipped_call(self) -> None:
        if not self.odd:
            self.call(self.causal)
        self.call(self.window)

    def reordered_calls(self) -> None:
        for plan in (self.window, self.causal) if self.odd else (self.causal, self.window):
            self.call(plan)

    def skipped_forward_of_equal_calls(self) -> None:
        results = [self.call() for _ in range(2 if self.odd else 3)]
        for out in results:
            out.sum().backward()

    def backward_passes_in_another_order(self) -> None:
        first, second = self.call(), self.call()
        for out in (second, first) if self.odd else (first, second):
            out.sum().backward()

    def forward_beside_backward(self) -> None:
        out = self.call()
        self.call() if self.odd else out.sum().backward()

    def attention_beside_unshard(self) -> None:
        self.causal.unshard(torch.ones(self.causal.local_len, 3), 0) if self.odd else self.call()

    def refused_tensor(self) -> None:
        self.call(heads=HEADS + 1 if self.odd else HEADS)
        q = torch.ones(2, HEADS, self.causal.local_len + self.odd, DIM)
        ls.attention(q, q, q, plan=self.causal)

    def refused_argument(self) -> None:
        self.call(scale=float("nan") if self.odd else None)

    def unshard_dtype(self) -> None:
        self.causal.unshard(torch.ones(self.causal.local_len, 3, dtype=torch.int32 if self.odd else torch.float32), 0)

    def unshard_width(self) -> None:
        self.causal.unshard(torch.ones(self.causal.local_len, 4 if self.odd else 3), 0)

    def unshard_dim(self) -> None:
        size = self.causal.local_len
        self.causal.unshard(torch.ones(size, size), 1 if self.odd else 0)

    def unshard_layout(self) -> None:
        layouts = [ls.plan(ls.causal(), 210, self.causal.mesh, layout=name) for name in ("contiguous", "round_robin")]
        layouts[self.odd].unshard(torch.ones(layouts[self.odd].local_len), 0)

    def unshard_refused_length(self) -> None:
        self.causal.unshard(torch.ones(self.causal.local_len + self.odd, 3), 0)

    def unshard_of_one_rank_only(self) -> None:
        if not self.odd:
            self.causal.unshard(torch.ones(self.causal.local_len, 3), 0)
        self.call()

    def gathered_counts(self) -> None:
        counts = [2 + self.odd] * dist.get_world_size()
        all_gather_rows(self.causal.mesh, torch.ones(counts[0]), counts)


# Part of the message that every rank must raise.
EXPECTED = {
    "scale": "scale: rank 1 has 0.5",
    "half_dtype": "dtype: rank 1 has torch.float16",
    "smaller_last_batch": "batch: rank 1 has 1",
    "length": "tokens: rank 1 has 202 × 202",
    "score_mod_constant": "score_mod: rank 1 has",
    "sink": "sink: rank 1 has torch.float32[4]",
    "skipped_call": "mask: rank 1 has",
    "reordered_calls": "mask: rank 1 has",
    "skipped_forward_of_equal_calls": "call: rank 1 has attention, backward pass",
    "backward_passes_in_another_order": "forward pass: rank 1 has call",
    "forward_beside_backward": "call: rank 1 has attention, forward pass",
    "attention_beside_unshard": "call: rank 1 has unshard along dim 0",
    "refused_tensor": "heads: rank 1 has 5/5",
    "refused_argument": "expected a finite number, got nan",
    "unshard_dtype": "dtype: rank 1 has torch.int32",
    "unshard_width": "row shape: rank 1 has [4]",
    "unshard_dim": "call: rank 1 has unshard along dim 1",
    "unshard_layout": "layout: rank 1 has",
    "unshard_refused_length": "plan.unshard: expected size",
    "unshard_of_one_rank_only": "call: rank 1 has attention, forward pass",
    "gathered_counts": "tokens: rank 1 has [3, 3",
}


def _errors(rank: Rank, names: list[str]) -> list[tuple[str, float]]:
    """The message and the seconds of each disagreement. After each, a call on which all agree must be right."""
    rank.agree_on_everything()
    messages = []
    for name in names:
        started = time.monotonic()
        try:
            getattr(rank, name)()
            message = "nothing was raised"
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        messages.append((message, time.monotonic() - started))
        torch.testing.assert_close(rank.call(), torch.ones(2, HEADS, rank.causal.local_len, DIM), msg=name)
    return messages


def _on_one_axis() -> list[tuple[str, float]]:
    return _errors(Rank(as_mesh(dist.group.WORLD), layout="contiguous", strategy="ring"), list(EXPECTED))


ON_TWO_AXES = ["scale", "half_dtype", "skipped_call", "backward_passes_in_another_order", "refused_argument", "unshard_dtype"]


def _on_two_axes() -> list[tuple[str, float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    return _errors(Rank(mesh, layout="contiguous", strategy="ulysses_ring"), ON_TWO_AXES)


def _check(ranks: list[list[tuple[str, float]]], names: list[str]) -> None:
    for name, *results in zip(names, *ranks, strict=True):
        messages = [message for message, _ in results]
        assert all(EXPECTED[name] in message for message in messages), (name, messages)
        assert max(seconds for _, seconds in results) < 10, name
        if "refused" not in name:
            assert len(set(messages)) == 1, (name, messages)


def test_ranks_that_differ_after_agreed_calls_all_raise() -> None:
    _check(run_processes(_on_one_axis, 3, group_timeout=30.0), list(EXPECTED))


def test_ranks_of_two_axes_that_differ_all_raise_the_same() -> None:
    _check(run_processes(_on_two_axes, 4, group_timeout=30.0), ON_TWO_AXES)
