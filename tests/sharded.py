"""Attention over a virtual mesh compared with the float64 oracle; shared by tests of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import longspan as ls
from longspan._kernels.protocol import state_dtype
from longspan._plan.strategies import ulysses_error
from longspan.testing import oracle, virtual_world

MASKS = ("causal", "documents", "window", "prefix", "custom", "per head")
SCORES = ("none", "alibi", "relative bias", "softcap")
STRATEGIES = ("ring", "allgather", "exchange", "ulysses", "ulysses_ring", "auto")
LAYOUTS = ("contiguous", "head_tail", "per_document", "round_robin", "auto")
RANKS = (1, 2, 3, 4, 8)
SHAPES = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2), 8: (2, 4)}
HEADS = {1: (4, 2), 2: (6, 2), 3: (6, 3), 4: (8, 2), 8: (8, 2)}
LENGTH = 203


@dataclass(frozen=True)
class Case:
    """Names of a mask, a score mod, a strategy and a layout, and the number of ranks."""

    mask: str
    score: str
    strategy: str
    layout: str
    ranks: int

    def __str__(self) -> str:
        return "-".join(map(str, (self.mask, self.score, self.strategy, self.layout, self.ranks))).replace(" ", "_")


def whole_grid() -> list[Case]:
    """Every combination of the choices."""
    return [Case(*c) for c in itertools.product(MASKS, SCORES, STRATEGIES, LAYOUTS, RANKS)]


def documents(length: int) -> list[int]:
    """Uneven document lengths with sum `length`."""
    parts = [length * 5 // 12, 3, length // 4]
    return [n for n in (*parts, length - sum(parts)) if n > 0] if length > 20 else [length]


def mask_named(name: str, length: int, layout: str) -> Any:
    """A mask by name. For the layout "per_document" every mask has documents."""
    masks: dict[str, Callable[[], Any]] = {
        "causal": ls.causal,
        "documents": lambda: ls.causal() & ls.documents(lengths=documents(length)),
        "window": lambda: ls.causal() & ls.sliding_window(length // 5 + 1),
        "prefix": lambda: ls.causal() | ls.prefix(length // 3),
        "custom": lambda: ls.mask_mod(lambda b, h, q, kv: (q * 3 + kv * 5 + b) % 7 < 3),
        "per head": lambda: ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q - kv < 20 * (h + 1))),
    }
    mask = masks[name]()
    return mask & ls.documents(lengths=documents(length)) if layout == "per_document" and name != "documents" else mask


def score_named(name: str, length: int, heads: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, list[Tensor]]:
    """(score_mod, captured tensors with gradients) by name."""
    if name == "none":
        return None, []
    if name == "alibi":
        slopes = torch.exp2(-torch.arange(1, heads + 1) * 8.0 / heads).to(device, dtype)
        return lambda s, b, h, q, kv: s + (kv - q) * slopes[h], []
    if name == "softcap":
        return lambda s, b, h, q, kv: 5 * torch.tanh(s / 5), []
    table = torch.randn(heads, 2 * length - 1, generator=torch.Generator().manual_seed(3)).to(device, dtype).requires_grad_()
    return lambda s, b, h, q, kv: s + table[h, q - kv + length - 1], [table]


@dataclass
class Results:
    """Unsharded results by name. Gradients of captured tensors and of the sink are summed over ranks."""

    values: dict[str, Tensor]
    bytes_sent: int = 0
    extra: Any = None

    def error(self, other: Results, name: str) -> float:
        """Largest difference of a result. Shapes and infinities must be equal."""
        a, b = self.values[name].double(), other.values[name].double()
        finite = torch.isfinite(b)
        assert a.shape == b.shape and torch.equal(torch.isfinite(a), finite), (
            f"{name}: different shapes, or NaN or infinities at other places"
        )
        return float((a - b)[finite].abs().max()) if finite.any() else 0.0


@dataclass
class Problem:
    """Unsharded inputs of one attention call. All sizes differ."""

    mask: Any
    score: str
    q_len: int
    kv_len: int
    batch: int
    heads: int
    kv_heads: int
    dtype: torch.dtype = torch.float64
    dim: int = 8
    value_dim: int = 5
    sink: bool = True
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.device)

        self.q = draw(self.batch, self.heads, self.q_len, self.dim).to(self.dtype)
        self.k = draw(self.batch, self.kv_heads, self.kv_len, self.dim).to(self.dtype)
        self.v = draw(self.batch, self.kv_heads, self.kv_len, self.value_dim).to(self.dtype)
        self.grad_out = draw(self.batch, self.heads, self.q_len, self.value_dim).to(self.dtype)
        self.grad_lse = draw(self.batch, self.heads, self.q_len).to(state_dtype(self.dtype))
        self.sinks = draw(self.heads).to(state_dtype(self.dtype)) if self.sink else None

    def results(
        self, attend: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], grads: tuple[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        """out, lse and all gradients of a call on the inputs or their shards, by name."""
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        sink = None if self.sinks is None else self.sinks.clone().requires_grad_()
        score_mod, captured = score_named(self.score, max(self.q_len, self.kv_len), self.heads, state_dtype(self.dtype), self.device)
        out, lse = attend(*leaves, score_mod=score_mod, sink=sink)
        loss = (out * grads[0]).sum() + (torch.where(lse == -torch.inf, 0.0, lse) * grads[1]).sum()
        with_grad = {"dq": leaves[0], "dk": leaves[1], "dv": leaves[2], **({} if sink is None else {"dsink": sink})}
        with_grad |= {f"captured {i}": t for i, t in enumerate(captured)}
        leaf_grads = torch.autograd.grad(loss, list(with_grad.values()), allow_unused=True)
        zeros = [torch.zeros_like(t) if g is None else g for g, t in zip(leaf_grads, with_grad.values(), strict=True)]
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(with_grad, zeros, strict=True))}

    def by_oracle(self, dtype: torch.dtype = torch.float64) -> Results:
        """Results of dense attention in `dtype`."""

        def attend(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
            return oracle(q, k, v, mask=self.mask, return_lse=True, dtype=dtype, **rest)

        return Results(self.results(attend, [self.q, self.k, self.v], (self.grad_out, self.grad_lse)))

    def on_rank(self, plan: ls.Plan, *, kernel: str = "auto", attend: Any = None) -> dict[str, Tensor]:
        """This rank's results, unsharded. A collective call."""

        def call(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
            return (attend or ls.attention)(q, k, v, plan=plan, return_lse=True, kernel=kernel, **rest)

        shards = [plan.shard(t, 2, side=s) for t, s in ((self.q, "q"), (self.k, "kv"), (self.v, "kv"))]
        grads = plan.shard(self.grad_out, 2, side="q"), plan.shard(self.grad_lse, 2, side="q")
        results = self.results(call, shards, grads)
        for name, side in (("out", "q"), ("lse", "q"), ("dq", "q"), ("dk", "kv"), ("dv", "kv")):
            results[name] = plan.unshard(results[name], 2, side=side)
        return results

    def plan(self, mesh: Any, **options: Any) -> ls.Plan:
        """The plan of this problem on a mesh."""
        sizes = {"batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.dim}
        return ls.plan(self.mask, (self.q_len, self.kv_len), mesh, **sizes, **options)

    def over(self, shape: int | tuple[int, ...], *, kernel: str = "auto", axis_names: Any = None, **options: Any) -> Results:
        """Results over a virtual mesh. The plan is made once; other tests check that ranks make equal plans."""
        world = virtual_world(shape, axis_names=axis_names)
        made = self.plan(ls.Mesh.abstract(shape, axis_names=axis_names), **options)

        def rank(mesh: Any) -> tuple[dict[str, Tensor], ls.Plan]:
            plan = made.on(mesh)
            return self.on_rank(plan, kernel=kernel), plan

        by_rank = world.run(rank)
        return Results(summed([values for values, _ in by_rank]), bytes_sent=world.bytes_sent, extra=by_rank[0][1])


def summed(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Unsharded results of the first rank, with per-rank shares (gradients of captured tensors and of the sink) summed."""
    parts = [name for name in ranks[0] if name == "dsink" or name.startswith("captured")]
    return {**ranks[0], **{name: torch.stack([r[name].double() for r in ranks]).sum(0) for name in parts}}


def problem_of(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Problem, dict[str, Any]]:
    """(problem of a case, arguments of `Problem.over`)."""
    heads, kv_heads = HEADS[case.ranks]
    problem = Problem(
        mask=mask_named(case.mask, LENGTH, case.layout), score=case.score, q_len=LENGTH, kv_len=LENGTH, batch=2, heads=heads,
        kv_heads=kv_heads, dtype=dtype,
    )  # fmt: skip
    two_axes = case.strategy == "ulysses_ring"
    shape = SHAPES[case.ranks] if two_axes else case.ranks
    assert not case.strategy.startswith("ulysses") or ulysses_error(shape[0] if two_axes else case.ranks, heads, kv_heads) is None
    return problem, {
        "shape": shape,
        "axis_names": ("ulysses", "ring") if two_axes else None,
        "layout": case.layout,
        "strategy": case.strategy,
    }


def check_case(case: Case) -> None:
    """Assert that all results equal the oracle up to float64 rounding."""
    problem, options = problem_of(case)
    right, got = problem.by_oracle(), problem.over(**options)
    for name in right.values:
        size = float(right.values[name][torch.isfinite(right.values[name])].abs().max())
        error = got.error(right, name)
        assert error <= 1e-11 * max(1.0, size), f"{case} {name}: {error:.1e}"


def check_budget(problem: Problem, got: Results) -> None:
    """Assert that every error is at most twice the error of dense attention in the same dtype, plus rounding."""
    right, dense = problem.by_oracle(), problem.by_oracle(problem.dtype)
    wide = state_dtype(problem.dtype)
    for name, want in right.values.items():
        finite = want[torch.isfinite(want)]
        size = float(finite.abs().max()) if finite.numel() else 0.0
        summed_over = problem.batch * problem.heads * problem.q_len if name.startswith(("captured", "dsink")) else 1
        terms = float(problem.grad_out.double().abs().amax() * problem.v.double().abs().amax()) * problem.value_dim**0.5
        budget = 2 * dense.error(right, name) + torch.finfo(problem.dtype).eps * size
        budget += 2 * torch.finfo(wide).eps * max(size, terms * summed_over**0.5)
        error = got.error(right, name)
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"
