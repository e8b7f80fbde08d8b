"""Random selections over virtual ranks against the oracle: `python -m tests.selected.mesh_cases --seconds 60 [--seed 0]`.

A case draws sizes, heads, granularities, indices (with repeats, −1 and empty rows), the plan's mask and layout, a score_mod and a sink.
Every rank passes the choice of its own queries to one plan. out, lse and every gradient are compared with float64 dense attention; bytes
that move are compared with the bytes of the chosen blocks.
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
from longspan.testing import oracle, virtual_world

GRANULARITIES = (128, 64, 16, 4, 1)
SIDES = {"q": "q", "k": "kv", "v": "kv"}
KV_EXCHANGES = (
    "selected keys and values, forward pass", "selected keys and values, backward pass", "gradients of selected keys and values",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeshCase:
    """One random problem over ranks. `indices` are those of the whole sequence; `layout` is what `ls.plan` takes."""

    text: str
    ranks: int
    tensors: dict[str, Tensor]
    indices: Tensor
    granularity: int
    q_granularity: int
    rest: Any
    layout: Any
    strategy: str
    score_mod: Callable[..., Tensor] | None
    grads: tuple[Tensor, Tensor]

    @property
    def lengths(self) -> tuple[int, int]:
        return self.tensors["q"].shape[2], self.tensors["k"].shape[2]

    @property
    def selected(self) -> Any:
        return ls.selected(self.indices, self.granularity, self.q_granularity)


def draw(seed: int, *, ranks: int, dtype: torch.dtype = torch.float64, device: str = "cpu", longest: int = 700) -> MeshCase:
    """The case of a seed."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads, shared = rng.choice([1, 1, 2]), rng.choice([1, 2]), rng.choice([1, 2, 3])
    heads = kv_heads * shared
    q_len = rng.choice([rng.randint(1, longest), 128 * rng.randint(1, 8)])
    kv_len = q_len if rng.random() < 0.8 else rng.randint(1, longest)
    granularity, q_granularity = rng.choice(GRANULARITIES), rng.choice([1, 16, 64, 128])
    blocks, rows = -(-kv_len // granularity), -(-q_len // q_granularity)
    shape = (rng.choice([1, batch]), rng.choice([1, kv_heads, heads]), rows, rng.randint(1, min(6, blocks + 2)))
    indices = torch.randint(0, blocks, shape, generator=generator, dtype=torch.int32)
    indices[torch.rand(shape, generator=generator) < 0.2] = -1
    indices[torch.rand(shape[:3], generator=generator) < 0.15] = -1
    rests = [ls.full(), ls.causal(), ls.causal() & ls.sliding_window(rng.randint(1, 300))]
    if q_len == kv_len:
        cut = rng.randint(0, q_len)
        rests.append(ls.causal() & ls.documents([n for n in (cut, q_len - cut) if n]))
        rests.append(ls.mask_mod(lambda b, h, q, kv: (q + kv) % 3 != 0))
    rest, layout = rng.choice(rests), rng.choice(["contiguous", "head_tail", "round_robin", _scattered])
    layout = layout if isinstance(layout, str) else (layout(q_len, ranks, rng), layout(kv_len, ranks, rng))
    if q_len != kv_len and isinstance(layout, str):
        layout = "contiguous"
    strategy = rng.choice(["exchange", "ring", "allgather"])
    dims = {"q": (batch, heads, q_len, 8), "k": (batch, kv_heads, kv_len, 8), "v": (batch, kv_heads, kv_len, rng.choice([8, 12]))}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    tensors = {name: normal(*shape).requires_grad_() for name, shape in dims.items()}
    if rng.random() < 0.3:
        tensors["sink"] = normal(heads).requires_grad_()
    score_mod = None
    if rng.random() < 0.3:
        tensors["bias"] = bias = normal(heads).requires_grad_()
        score_mod = lambda s, b, h, q, kv: s + bias[h] * (q - kv) * 0.01
    out_shape = (*dims["q"][:3], dims["v"][3])
    grads = normal(*out_shape).double(), normal(*out_shape[:3]).double()
    name = layout if isinstance(layout, str) else "scattered"
    text = f"seed {seed}: {ranks} ranks, {q_len} × {kv_len}, indices {shape}, {granularity}/{q_granularity}, {rest}, layout {name}"
    return MeshCase(
        text=text, ranks=ranks, tensors=tensors, indices=indices.to(device), granularity=granularity, q_granularity=q_granularity,
        rest=rest, layout=layout, strategy=strategy, score_mod=score_mod, grads=grads,
    )  # fmt: skip


def _scattered(length: int, ranks: int, rng: random.Random) -> ls.Layout:
    """A layout of random segments in random order; some ranks may own no tokens."""
    cuts = sorted({0, *(rng.randint(0, length - 1) for _ in range(2 * ranks))})
    segments: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, stop in zip(cuts, [*cuts[1:], length], strict=True):
        rng.choice(segments).append((start, stop - start))
    for own in segments:
        rng.shuffle(own)
    return ls.Layout(length=length, rows=(tuple(map(tuple, segments)),))


def results(run: Callable[..., Any], tensors: dict[str, Tensor], grads: tuple[Tensor, Tensor], **options: Any) -> list[Tensor]:
    """out, lse and gradients by a function with the signature of the oracle."""
    out, lse = run(tensors["q"], tensors["k"], tensors["v"], sink=tensors.get("sink"), return_lse=True, **options)
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    loss = (out.double() * grads[0]).sum() + (finite.double() * torch.where(lse == -torch.inf, 0.0, grads[1])).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, list(tensors.values()))]


def rank_results(case: MeshCase, mesh: Any, **options: Any) -> list[Tensor]:
    """One rank's shards of out, lse and the gradients."""
    heads, kv_heads = case.tensors["q"].shape[1], case.tensors["k"].shape[1]
    plan = ls.plan(
        case.rest, case.lengths, mesh, layout=case.layout, strategy=case.strategy, batch=case.tensors["q"].shape[0], heads=heads,
        kv_heads=kv_heads,
    )  # fmt: skip
    parts = {n: plan.shard(t.detach(), 2, side=SIDES[n]) if n in SIDES else t.detach().clone() for n, t in case.tensors.items()}
    local = {n: t.requires_grad_() for n, t in parts.items()}
    score_mod = None
    if case.score_mod is not None:
        bias = local["bias"]
        score_mod = lambda s, b, h, q, kv: s + bias[h] * (q - kv) * 0.01
    choice = ls.selected(
        case.indices[:, :, plan.query_blocks(case.q_granularity).to(case.indices.device)], case.granularity, case.q_granularity
    )
    grads = tuple(plan.shard(g, 2, side="q") for g in case.grads)
    return results(ls.attention, local, grads, plan=plan, mask=choice, score_mod=score_mod, **options)


def expected(case: MeshCase, by_rank: list[list[Tensor]]) -> list[tuple[str, Tensor, Tensor]]:
    """(name, result of all ranks put together, result of the oracle)."""
    right = results(oracle, case.tensors, case.grads, mask=case.selected & case.rest, score_mod=case.score_mod)
    plan = ls.plan(case.rest, case.lengths, ls.Mesh.abstract(case.ranks), layout=case.layout, strategy="exchange")
    triples = []
    for i, (name, side) in enumerate([("out", "q"), ("lse", "q"), *((n, SIDES.get(n)) for n in case.tensors)]):
        parts = [parts[i] for parts in by_rank]
        if side is None:  # shares of captured tensors and of the sink
            whole = torch.stack(parts).sum(0)
        else:
            layout = plan.layout if side == "q" else plan.kv_layout
            order = torch.cat([layout.positions(rank) for rank in range(case.ranks)]).argsort().to(parts[0].device)
            whole = torch.cat(parts, 2).index_select(2, order)
        triples.append((name, whole.double(), right[i].double()))
    return triples


def check_over_mesh(case: MeshCase, **options: Any) -> None:
    """Compare virtual ranks with the oracle, and bytes that move with those of the chosen blocks; raises AssertionError."""
    world = virtual_world(case.ranks)
    close = {torch.float64: 1e-9, torch.float32: 2e-4}[case.tensors["q"].dtype]
    for name, got, right in expected(case, world.run(lambda mesh: rank_results(case, mesh, **options))):
        torch.testing.assert_close(got, right, atol=close, rtol=close, msg=lambda m, name=name: f"{case.text}: {name}: {m}")
    moved = {what: sum(int(e.bytes.sum()) for e in world.exchanges if e.what == what) for what in KV_EXCHANGES}
    wide = 8 if case.tensors["k"].dtype == torch.float64 else 4
    elements = chosen_elements(case)
    sizes = dict(zip(KV_EXCHANGES, (case.tensors["k"].element_size(),) * 2 + (wide,), strict=True))
    assert all(moved[what] <= elements * size for what, size in sizes.items()), f"{case.text}: {moved} for {elements} elements"


def chosen_elements(case: MeshCase) -> int:
    """Elements of K and V of other ranks that the ranks' queries chose: each block, KV head and batch row once per rank."""
    plan = ls.plan(case.rest, case.lengths, ls.Mesh.abstract(case.ranks), layout=case.layout, strategy="exchange")
    batch, kv_heads, kv_len, dim = case.tensors["k"].shape
    block, total = torch.arange(kv_len) // case.granularity, 0
    for rank in range(case.ranks):
        choice = case.indices.cpu()[:, :, plan.layout.blocks(rank, case.q_granularity)]
        chosen = torch.zeros(*choice.shape[:2], int(block[-1]) + 2, dtype=torch.bool)
        chosen.scatter_(2, torch.where(choice < 0, chosen.shape[2] - 1, choice).long().flatten(2), True)
        by_kv_head = chosen.unflatten(1, (-1, max(1, chosen.shape[1] // kv_heads))).any(2).expand(batch, kv_heads, -1)
        mine = torch.zeros(kv_len, dtype=torch.bool).index_fill_(0, plan.kv_layout.positions(rank), True)
        total += int((by_kv_head[..., block] & ~mine).sum())
    return total * (dim + case.tensors["v"].shape[3])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float64")
    options = parser.parse_args()
    end, seed = time.monotonic() + options.seconds, options.seed
    while time.monotonic() < end and seed < options.seed + options.cases:
        check_over_mesh(draw(seed, ranks=(2, 3, 4, 8)[seed % 4], dtype=getattr(torch, options.dtype), device=options.device))
        seed += 1
    print(f"{seed - options.seed} selections over ranks right (seeds {options.seed} to {seed - 1})")


if __name__ == "__main__":
    main()
