"""Random selections against the oracle: `python -m tests.selected.cases --seconds 60 [--kernel cpu] [--seed 0]`.

A case draws sizes, heads, granularities, indices (with repeats, −1 and empty rows), `counts`, a mask to combine with, a score_mod and a
sink, and compares out, lse and every gradient with float64.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import longspan as ls
from longspan.testing import oracle
from longspan.testing.budget import budgets, error

GRANULARITIES = (128, 64, 16, 4, 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One random problem: tensors that get gradients, the mask and the score_mod."""

    text: str
    tensors: dict[str, Tensor]
    mask: Any
    score_mod: Callable[..., Tensor] | None
    grad_out: Tensor


def draw(seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu", longest: int = 300, kinds: int = 10**9) -> Case:
    """The case of a seed. kinds: number of different sizes, masks and mods: a GPU compiles kernels for each."""
    rng = random.Random(seed % kinds)
    generator = torch.Generator().manual_seed(seed)
    batch, kv_heads, shared = rng.choice([1, 1, 2]), rng.choice([1, 2]), rng.choice([1, 2, 3])
    heads = kv_heads * shared
    q_len = rng.randint(1, longest)
    kv_len = q_len if rng.random() < 0.7 else rng.randint(1, longest)
    granularity = rng.choice(GRANULARITIES)
    q_granularity = rng.choice([None, 1, 16, 64, 128])
    blocks, rows = -(-kv_len // granularity), -(-q_len // (q_granularity or granularity))
    shape = (rng.choice([1, batch]), rng.choice([1, kv_heads, heads]), rows, rng.randint(1, min(12, blocks + 2)))
    indices = torch.randint(0, blocks, shape, generator=generator, dtype=torch.int32)
    indices[torch.rand(shape, generator=generator) < 0.2] = -1
    indices[torch.rand(shape[:3], generator=generator) < 0.15] = -1
    counts = torch.randint(0, shape[3] + 1, shape[:3], generator=generator) if rng.random() < 0.3 else None
    selected = ls.selected(indices.to(device), granularity, q_granularity, None if counts is None else counts.to(device))
    other = rng.choice(["", "", "& causal", "& causal", "& documents", "| window", "& ~prefix", "& mask_mod"])
    if "documents" in other and q_len != kv_len:
        other = "& causal"
    mask = _combined(selected, other, q_len, rng)
    dims = {"q": (batch, heads, q_len, 16), "k": (batch, kv_heads, kv_len, 16), "v": (batch, kv_heads, kv_len, rng.choice([16, 32]))}
    tensors = {n: torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for n, s in dims.items()}
    if rng.random() < 0.25:
        tensors["sink"] = torch.randn(heads, generator=generator).to(device, dtype).requires_grad_()
    score_mod = None
    if rng.random() < 0.25:
        tensors["bias"] = bias = torch.randn(heads, generator=generator).to(device).requires_grad_()
        score_mod = lambda s, b, h, q, kv: s + bias[h] * (q - kv) * 0.01
    grad_out = torch.randn(*dims["q"][:3], dims["v"][3], generator=generator).to(device, dtype)
    return Case(
        text=f"seed {seed}: {mask} {other} H {heads}/{kv_heads}", tensors=tensors, mask=mask, score_mod=score_mod, grad_out=grad_out
    )


def _combined(selected: Any, other: str, q_len: int, rng: random.Random) -> Any:
    if other == "& causal":
        return selected & ls.causal()
    if other == "& documents":
        cut = rng.randint(0, q_len)
        return ls.causal() & selected & ls.documents([n for n in (cut, q_len - cut) if n])
    if other == "| window":
        return (selected | ls.sliding_window(rng.randint(1, 40))) & ls.causal()
    if other == "& ~prefix":
        return selected & ~ls.prefix(rng.randint(0, 50))
    if other == "& mask_mod":
        return selected & (lambda b, h, q, kv: (q + kv + h) % 3 != 0)
    return selected


def results(case: Case, run: Callable[..., Any], **options: Any) -> dict[str, Tensor]:
    """out, lse and gradients by a function with the signature of the oracle."""
    t = case.tensors
    out, lse = run(
        t["q"], t["k"], t["v"], mask=case.mask, score_mod=case.score_mod, sink=t.get("sink"), return_lse=True, **options
    )  # fmt: skip
    grads = torch.autograd.grad(out, list(t.values()), case.grad_out.to(out.dtype))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(t, grads, strict=True))}


def check(case: Case, **options: Any) -> None:
    """Compare longspan with the oracle; raises AssertionError."""
    right, got = results(case, oracle), results(case, ls.attention, **options)
    dense = results(case, oracle, dtype=case.tensors["q"].dtype)
    allowed = budgets(
        right, dense, v=case.tensors["v"].detach(), grad_out=case.grad_out, captured=[n for n in ("sink", "bias") if n in right]
    )
    for name, budget in allowed.items():
        assert error(got[name], right[name]) <= 4 * budget, f"{case.text}: {name} off by {error(got[name], right[name])}, allowed {budget}"
    dead = right["lse"] == -torch.inf
    assert not got["out"][dead].any() and (got["lse"][dead] == -torch.inf).all() and not got["q"][dead].any(), case.text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--longest", type=int, default=300)
    parser.add_argument("--kinds", type=int, default=10**9)
    options = parser.parse_args()
    end, seed = time.monotonic() + options.seconds, options.seed
    while time.monotonic() < end and seed < options.seed + options.cases:
        sizes = {"longest": options.longest, "kinds": options.kinds}
        check(draw(seed, dtype=getattr(torch, options.dtype), device=options.device, **sizes), kernel=options.kernel)
        seed += 1
    print(f"{seed - options.seed} selections right (seeds {options.seed} to {seed - 1}, kernel {options.kernel})")


if __name__ == "__main__":
    main()
