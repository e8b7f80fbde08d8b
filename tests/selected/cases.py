"""Random selections against the oracle: `python -m tests.selected.cases --seconds 60 [--kernel cpu] [--seed 0]`.

A case draws sizes, heads, granularities, indices (with repeats, −1 and empty rows), `counts`, a mask to combine with, a score_mod and a
sink, and compares out, lse and every gradient with float64.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import longspan as ls
from longspan.testing import oracle
from longspan.testing.budget import budgets, error

GRANULARITIES = (128, 64, 16, 4, 1)
OTHER_DRAWS = 4  # of the inputs, for error budgets of single numbers


@dataclass(frozen=True, kw_only=True)
class Case:
    """One random problem: tensors that get gradients, the mask and the score_mod."""

    text: str
    tensors: dict[str, Tensor]
    mask: Any
    score_mod: Callable[..., Tensor] | None
    grad_out: Tensor
    kernel: str = "auto"
    families: tuple[str, ...] = ()


def draw(seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu", longest: int = 300, group: int = 1) -> Case:
    """The case of a seed. group: so many consecutive seeds share what GPU kernels are compiled for, and draw a dtype and a kernel: they
    differ in lengths, batch, heads, indices, counts and documents.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shared = rng if group == 1 else random.Random(f"kernels of group {seed // group}")
    granularity = shared.choice(GRANULARITIES)
    if group == 1:
        batch, kv_heads, ratio = rng.choice([1, 1, 2]), rng.choice([1, 2]), rng.choice([1, 2, 3])
        rows_differ = rng.random() < 0.5
    else:  # kernels are specialised on sizes of 1 and on the number of query heads of a KV head
        rows_differ, ratio = shared.random() < 0.5, shared.choice([1, 2, 8, 16, 64] if granularity == 1 else [1, 2, 3])
        batch, kv_heads = (rng.choice([2, 3]) if shared.random() < p else 1 for p in (1.0 if rows_differ else 0.4, 0.6))
        longest = longest if ratio < 8 else longest // 3
    heads = kv_heads * ratio
    q_len = rng.randint(1, longest)
    kv_len = q_len if shared.random() < 0.7 else rng.randint(1, longest)
    q_granularity = shared.choice([None, 1, 16, 64, 128])
    blocks, rows = -(-kv_len // granularity), -(-q_len // (q_granularity or granularity))
    by_head = shared.choice(["none", "kv_heads", "heads"])
    choices = shared.randint(1, 12 if group > 1 else min(12, blocks + 2))
    if group > 1 and granularity == 1 and shared.random() < 0.6:  # more than one tile of keys
        choices = shared.choice([65, 100, 150])
    shape = (batch if rows_differ else 1, {"none": 1, "kv_heads": kv_heads, "heads": heads}[by_head], rows, choices)
    indices = torch.randint(0, blocks, shape, generator=generator, dtype=torch.int32)
    indices[torch.rand(shape, generator=generator) < 0.2] = -1
    indices[torch.rand(shape[:3], generator=generator) < 0.15] = -1
    counts = torch.randint(0, shape[3] + 1, shape[:3], generator=generator) if shared.random() < 0.3 else None
    selected = ls.selected(indices.to(device), granularity, q_granularity, None if counts is None else counts.to(device))
    other = shared.choice(["", "", "& causal", "& causal", "& documents", "| window", "& ~prefix", "& mask_mod"])
    # Tables of a mask that depends on the head are built on the host, head by head.
    if ("documents" in other and q_len != kv_len) or ("mask_mod" in other and ratio >= 8):
        other = "& causal"
    mask = _combined(selected, other, q_len, shared, rng)
    dim, value_dim, kernel = 16, shared.choice([16, 32]), "auto"
    if group > 1:
        dim, value_dim = shared.choice([(16, 16), (64, 64), (64, 64), (128, 128), (128, 128), (96, 32)])
        kernel = shared.choice(["auto", "auto", "triton"])
        dtype = shared.choice(
            [torch.float32, torch.float16, torch.bfloat16, torch.bfloat16] if dim < 128 else [torch.bfloat16, torch.float16]
        )
    dims = {"q": (batch, heads, q_len, dim), "k": (batch, kv_heads, kv_len, dim), "v": (batch, kv_heads, kv_len, value_dim)}
    tensors = {n: torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for n, s in dims.items()}
    if shared.random() < 0.25:
        tensors["sink"] = torch.randn(heads, generator=generator).to(device, dtype).requires_grad_()
    score_mod = None
    if shared.random() < 0.25:
        tensors["bias"] = bias = torch.randn(heads, generator=generator).to(device).requires_grad_()
        score_mod = lambda s, b, h, q, kv: s + bias[h] * (q - kv) * 0.01
    grad_out = torch.randn(*dims["q"][:3], dims["v"][3], generator=generator).to(device, dtype)
    families = [f"granularity {granularity}", f"queries {q_granularity or granularity}", f"with {other or 'nothing'}", f"kernel {kernel}"]
    families += [f"dims {dim}/{value_dim}", str(dtype).removeprefix("torch."), f"choices by {by_head}"]
    families += [name for name in ("sink", "bias") if name in tensors]
    families += ["counts"] * (counts is not None) + ["cross lengths"] * (q_len != kv_len) + ["gqa"] * (ratio > 1)
    return Case(
        text=f"seed {seed}: {mask} {other} H {heads}/{kv_heads}", tensors=tensors, mask=mask, score_mod=score_mod, grad_out=grad_out,
        kernel=kernel, families=tuple(families),
    )  # fmt: skip


def _combined(selected: Any, other: str, q_len: int, shared: random.Random, rng: random.Random) -> Any:
    if other == "& causal":
        return selected & ls.causal()
    if other == "& documents":
        cut = rng.randint(0, q_len)
        return ls.causal() & selected & ls.documents([n for n in (cut, q_len - cut) if n])
    if other == "| window":
        return (selected | ls.sliding_window(shared.randint(1, 40))) & ls.causal()
    if other == "& ~prefix":
        return selected & ~ls.prefix(shared.randint(0, 50))
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


def _dense(case: Case) -> dict[str, Tensor]:
    return results(case, oracle, dtype=case.tensors["q"].dtype)


def _other_draws(case: Case) -> list[Case]:
    """The case with other q, k, v and gradients of out."""
    generator, draws = torch.Generator().manual_seed(0), []
    for _ in range(OTHER_DRAWS):
        drawn = [torch.randn(t.shape, generator=generator).to(t) for t in (*(case.tensors[n] for n in "qkv"), case.grad_out)]
        tensors = {**case.tensors, **{n: t.requires_grad_() for n, t in zip("qkv", drawn[:3], strict=True)}}
        draws.append(replace(case, tensors=tensors, grad_out=drawn[3]))
    return draws


def check(case: Case, **options: Any) -> None:
    """Compare longspan with the oracle; raises AssertionError."""
    right, got = results(case, oracle), results(case, ls.attention, **options)
    sizes: dict[str, Any] = {"v": case.tensors["v"].detach(), "grad_out": case.grad_out}
    captured = [n for n in ("sink", "bias") if n in right]
    allowed = budgets(right, _dense(case), captured=captured, **sizes)
    if any(error(got[name], right[name]) > 4 * allowed[name] for name in captured):
        # The sum of all gradients of scores is one number: in one draw, its roundings may cancel.
        others = [(results(other, oracle), _dense(other)) for other in _other_draws(case)]
        allowed = budgets(right, _dense(case), captured=captured, others=others, **sizes)
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
    parser.add_argument("--group", type=int, default=1, help="seeds that share GPU kernels; they draw dtype and kernel")
    options = parser.parse_args()
    end, seed = time.monotonic() + options.seconds, options.seed
    while time.monotonic() < end and seed < options.seed + options.cases:
        sizes = {"longest": options.longest, "group": options.group}
        case = draw(seed, dtype=getattr(torch, options.dtype), device=options.device, **sizes)
        check(case, kernel=options.kernel if options.group == 1 else case.kernel)
        seed += 1
    print(f"{seed - options.seed} selections right (seeds {options.seed} to {seed - 1}, kernel {options.kernel})")


if __name__ == "__main__":
    main()
