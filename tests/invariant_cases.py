"""Random cases of `longspan.invariant()`: one document alone, and the same document in a batch, packed, chunked and over ranks.

`python -m tests.invariant_cases --seconds 60 --first 0` runs seeds 0, 1, 2, … and prints counts.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import longspan as ls
from longspan._kernels.protocol import state_dtype
from longspan.testing import oracle, virtual_world

Results = dict[str, Tensor]
LAYOUTS = ("contiguous", "head_tail", "round_robin", "per_document", "auto")
STRATEGIES = ("ring", "allgather", "exchange", "ulysses", "auto")
SCORES = ("none", "none", "alibi", "softcap", "table")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One document: its tensors [1, H, L, ...] and the names of its mask and score mod."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    sink: Tensor | None
    mask: str
    score: str
    kernel: str = "auto"
    window: tuple[int, int] = (1, 0)
    layouts: tuple[str, ...] = LAYOUTS  # of `over_ranks`
    strategies: tuple[str, ...] = STRATEGIES
    table: Tensor = field(default_factory=lambda: torch.zeros(1))

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, grad_out and grad_lse of some queries."""
        return self.q[:, :, start:stop], self.grad_out[:, :, start:stop], self.grad_lse[:, :, start:stop]

    def within_document(self) -> Any:
        """The mask of the document alone."""
        return {"causal": ls.causal(), "full": ls.full(), "window": ls.sliding_window(*self.window), "dilated": ls.mask_mod(_dilated)}[
            self.mask
        ]

    def from_query(self, first: int) -> Callable[..., Tensor]:
        """The mask of a call whose query 0 is the document's query `first`."""
        mask, start = self.within_document(), torch.tensor(first, device=self.q.device)  # a tensor: one program for every offset
        return lambda b, h, q, kv: mask(b, h, q + start, kv)

    def score_mod(self, first: int = 0) -> Callable[..., Tensor] | None:
        """The score mod of a call whose query 0 is the document's query `first`. It reads relative positions only."""
        table, slope = self.table, 0.25
        size = len(table) // 2
        if self.q.is_cuda:  # a tensor: one program, and one kernel, for every offset
            first = torch.tensor(first, device=self.q.device)  # type: ignore[assignment]
        if self.score == "alibi":
            return lambda s, b, h, q, kv: s - slope * (h + 1) * (q + first - kv).abs()
        if self.score == "softcap":
            return lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0)
        if self.score == "table":
            return lambda s, b, h, q, kv: s + table[(q + first - kv).clamp(-size, size - 1) + size]
        return None


def _dilated(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return ((q - kv) % 3 == 0) & (q >= kv)


def problem(
    seed: int, *, longest: int = 400, dtype: torch.dtype | None = None, kernel: str = "auto", device: str = "cpu", plain_dim: int = 0,
    masks: Sequence[str] = (), group: int = 1,
) -> Problem:  # fmt: skip
    """A random document. plain_dim: causal or a window, without score mods, in bfloat16 with these head dims: few kernels to compile.

    masks: names to choose from. group: so many consecutive seeds share what GPU kernels are compiled for: head dims, dtype, mask, score
    mod, sink, layouts and strategy.
    """
    choose, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    shared = choose if group == 1 else random.Random(f"kernels of group {seed // group}")
    plain = plain_dim > 0
    heads, kv_heads = choose.choice(((1, 1), (2, 1), (4, 2), (3, 3)))
    dim = shared.choice((8, 16, 32, 40, 64) if group == 1 else (16, 40, 64, 64, 96, 128, 128, 256))
    value_dim = dim if shared.random() < 0.6 else shared.choice((8, 16, 24, 64))
    length = max(1, int(longest ** choose.uniform(0.2, 1)))
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
    if group > 1:
        dtypes = [torch.bfloat16, torch.bfloat16, torch.float16] + [torch.float32] * (kernel == "triton" and dim <= 64)
    dtype = dtype or shared.choice(dtypes)
    if plain:
        dtype, dim, value_dim = torch.bfloat16, plain_dim, plain_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=device).to(dtype)

    wide = state_dtype(dtype)
    tensors = {
        "q": draw(1, heads, length, dim),
        "k": draw(1, kv_heads, length, dim),
        "v": draw(1, kv_heads, length, value_dim),
        "grad_out": draw(1, heads, length, value_dim),
        "grad_lse": draw(1, heads, length).to(wide) * (choose.random() < 0.5),
        "sink": draw(heads).to(wide) if shared.random() < 0.3 and not plain else None,
    }
    mask = shared.choice(masks or (("causal", "causal", "window") if plain else ("causal", "causal", "full", "window", "dilated")))
    window = (200, 150) if plain else (shared.randint(1, 200), shared.choice((0, 0, 5, 150)))
    score = "none" if plain or kernel == "hopper" else shared.choice(SCORES)  # kernel "hopper" has no score mods in invariant mode
    table = torch.randn(200, generator=generator, device=device).to(wide)
    layouts, strategies = LAYOUTS, STRATEGIES
    if group > 1:
        layouts = shared.choice((("contiguous",), ("head_tail", "round_robin"), ("per_document", "head_tail")))
        strategies = (shared.choice(("ring", "allgather", "exchange")), "ulysses")
    return Problem(
        **tensors, mask=mask, window=window, score=score, table=table, kernel=kernel, layouts=layouts, strategies=strategies
    )  # fmt: skip


def results(one: Problem, tensors: tuple[Tensor, ...], mask: Any, *, first: int = 0, plan: Any = None, attend: Any = None) -> Results:
    """out, lse and the gradients of a call in the context. tensors: q, k, v, grad_out, grad_lse."""
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
    sink = None if one.sink is None else one.sink.clone().requires_grad_()
    options: dict[str, Any] = {"mask": mask} if plan is None else {"plan": plan}
    if attend is None:
        options["kernel"] = one.kernel
    with ls.invariant():
        out, lse = (attend or ls.attention)(q, k, v, score_mod=one.score_mod(first), sink=sink, return_lse=True, **options)
    seen_lse = torch.where(lse == -torch.inf, 0.0, lse)
    loss = (out * tensors[3]).sum() + (seen_lse * tensors[4]).sum()
    leaves = [q, k, v, *([] if sink is None else [sink])]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    zeros = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dsink"), (out.detach(), lse.detach(), *zeros)))


def alone(one: Problem) -> Results:
    """The document alone on one device."""
    return results(one, (one.q, one.k, one.v, one.grad_out, one.grad_lse), one.within_document())


def batched(one: Problem, choose: random.Random) -> Results:
    """The document as a row of a batch; the other rows are random."""
    batch, row = choose.randint(2, 3), choose.randint(0, 1)
    whole = tuple(_filled(t, 0, row, batch) for t in (one.q, one.k, one.v, one.grad_out, one.grad_lse))
    got = results(one, whole, one.within_document())
    return {name: got[name][row : row + 1] for name in ("out", "lse", "dq", "dk", "dv")}


def packed_tensors(one: Problem, before: int, after: int) -> tuple[Tensor, ...]:
    """The document between random tokens."""
    return tuple(_filled(t, 2, before, before + one.length + after) for t in (one.q, one.k, one.v, one.grad_out, one.grad_lse))


def packed_mask(one: Problem, before: list[int], after: list[int]) -> Any:
    """Documents of these lengths around the document, each with the document's mask."""
    return one.within_document() & ls.documents([*before, one.length, *after])


def neighbours(choose: random.Random) -> tuple[list[int], list[int]]:
    """Lengths of documents before and after."""
    sides = [[choose.randint(1, 150) for _ in range(choose.randint(0, 2))] for _ in range(2)]
    return sides[0], sides[1]


def packed(one: Problem, choose: random.Random) -> Results:
    """The document among others in one sequence."""
    before, after = neighbours(choose)
    got = results(one, packed_tensors(one, sum(before), sum(after)), packed_mask(one, before, after))
    return {name: got[name][:, :, sum(before) : sum(before) + one.length] for name in ("out", "lse", "dq", "dk", "dv")}


def chunked(one: Problem, choose: random.Random) -> tuple[Results, slice]:
    """Some of the document's queries, over the keys up to the last one that they may see. Gradients of KV are those of these queries."""
    first = choose.randrange(one.length)
    last = choose.randint(first + 1, one.length)
    keys = last if one.mask in ("causal", "dilated") else one.length
    q, grad_out, grad_lse = one.rows(first, last)
    got = results(one, (q, one.k[:, :, :keys], one.v[:, :, :keys], grad_out, grad_lse), one.from_query(first), first=first)
    return {name: got[name] for name in ("out", "lse", "dq")}, slice(first, last)


def over_ranks(one: Problem, choose: random.Random) -> tuple[Results, str]:
    """The document, packed or alone, over virtual ranks; also the sink's gradient where it is alone."""
    ranks = choose.choice((1, 2, 3, 4, 8))
    before, after = neighbours(choose) if choose.random() < 0.5 else ([], [])
    is_packed = bool(before or after)
    mask = packed_mask(one, before, after) if is_packed else one.within_document()
    whole = packed_tensors(one, sum(before), sum(after)) if is_packed else (one.q, one.k, one.v, one.grad_out, one.grad_lse)
    heads, kv_heads, length = one.q.shape[1], one.k.shape[1], whole[0].shape[2]
    strategy = choose.choice(
        [s for s in one.strategies if s != "ulysses" or (heads % ranks == 0 and (kv_heads % ranks == 0 or kv_heads == 1))]
    )
    # Tables of masks that intervals do not decide take long for the many short tiles of a round robin.
    dealt = one.mask != "dilated" and length <= 250
    possible = [name for name in one.layouts if (name != "per_document" or is_packed) and (name != "round_robin" or dealt)]
    layout = choose.choice(possible)
    if layout == "per_document" and strategy == "auto":
        strategy = "exchange"
    sizes = {"batch": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": one.q.shape[3]}
    made = ls.plan(mask, length, ls.Mesh.abstract(ranks), layout=layout, strategy=strategy, **sizes)

    def rank(mesh: Any) -> Results:
        plan = made.on(mesh)
        got = results(one, tuple(plan.shard(t, 2) for t in whole), None, plan=plan)
        return {name: x if name == "dsink" else plan.unshard(x, 2) for name, x in got.items()}

    # Ranks wait for one that compiles kernels.
    by_rank = virtual_world(ranks, timeout=600.0 if one.q.is_cuda else 60.0).run(rank)
    at = slice(sum(before), sum(before) + one.length)
    got = {name: x[:, :, at] for name, x in by_rank[0].items() if name != "dsink"}
    if one.sink is not None and not is_packed:
        got["dsink"] = torch.stack([r["dsink"] for r in by_rank]).sum(0)
    return got, f"{ranks} ranks, {layout}, {strategy}"


def _filled(t: Tensor, dim: int, start: int, size: int) -> Tensor:
    """A random tensor of `size` along dim, with t at `start`."""
    shape = list(t.shape)
    shape[dim] = size
    out = torch.randn(shape, dtype=torch.float32, device=t.device).to(t.dtype)
    out.narrow(dim, start, t.shape[dim]).copy_(t)
    return out


def differences(got: Results, want: Results, at: slice = slice(None)) -> list[str]:
    """Names of results that differ in a bit from the document alone."""
    return [name for name, x in got.items() if not torch.equal(x, want[name] if name == "dsink" else want[name][:, :, at])]


def errors_against_oracle(one: Problem, got: Results) -> list[str]:
    """Results whose error is more than that of rounding, at most a few hundred terms, in the dtype of the inputs."""
    leaves = [t.double().detach().requires_grad_() for t in (one.q, one.k, one.v)]
    sink = None if one.sink is None else one.sink.double().detach().requires_grad_()
    out, lse = oracle(*leaves, mask=one.within_document(), score_mod=one.score_mod(), sink=sink, return_lse=True)
    loss = (out * one.grad_out).sum() + (torch.where(lse == -torch.inf, 0.0, lse) * one.grad_lse).sum()
    grads = torch.autograd.grad(loss, [*leaves, *([] if sink is None else [sink])])
    want = dict(zip(("out", "lse", "dq", "dk", "dv", "dsink"), (out.detach(), lse.detach(), *grads)))
    eps, wide_eps = torch.finfo(one.q.dtype).eps, torch.finfo(state_dtype(one.q.dtype)).eps
    wrong = []
    for name, x in got.items():
        finite = want[name].isfinite()
        same = torch.equal(finite, x.isfinite()) and torch.equal(want[name][~finite].float(), x[~finite].float())
        size = float(want[name][finite].abs().max()) if bool(finite.any()) else 0.0
        # Gradients are computed with out rounded to the dtype of q.
        budget = 4 * eps * max(1.0, size) + 64 * wide_eps * max(1.0, size) * one.length**0.5
        budget *= 1 if name in ("out", "lse") else one.q.shape[3] ** 0.5
        if not same or float((x.double() - want[name])[finite].abs().max() if bool(finite.any()) else 0.0) > budget:
            wrong.append(name)
    return wrong


def failures(seed: int, counts: Counter[str], *, repeats: int = 1, **options: Any) -> list[str]:
    """Run one seed: every kind of variation of one random document; `repeats`: of all but the ranks."""
    one, choose = problem(seed, **options), random.Random(seed + 1)
    torch.manual_seed(seed)
    want, failed = alone(one), []
    counts["documents"] += 1
    if wrong := errors_against_oracle(one, want):
        failed.append(f"oracle: {wrong}")
    everything = slice(None)
    compared: list[tuple[str, Results, slice]] = []
    for _ in range(repeats):
        compared += [("batched", batched(one, choose), everything), ("packed", packed(one, choose), everything)]
        compared += [("chunked", *chunked(one, choose)) for _ in range(2)]
    got, where = over_ranks(one, choose)
    for name, values, rows in [*compared, (where, got, everything)]:
        counts[name.split(",")[0]] += 1
        if differ := differences(values, want, rows):
            failed.append(f"{name}: {differ}")
    about = f"{one.mask}, {one.score}, {tuple(one.q.shape)}, {one.q.dtype}, sink {one.sink is not None}"
    return [f"seed {seed} ({about}): {failure}" for failure in failed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=1 << 30, help="documents at most")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--repeats", type=int, default=2, help="variations of each kind on one rank")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--longest", type=int, default=400, help="tokens of a document at most")
    parser.add_argument("--plain", type=int, default=0, metavar="DIM", help="only causal or windowed bfloat16 documents of this head dim")
    parser.add_argument("--masks", type=lambda names: tuple(names.split(",")), default=(), help="names of masks, by commas; all if empty")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    start, wrong, seed = time.monotonic(), 0, args.first
    while time.monotonic() - start < args.seconds and seed < args.first + args.cases:
        for failure in failures(
            seed, counts, repeats=args.repeats, kernel=args.kernel, device=args.device, longest=args.longest, plain_dim=args.plain,
            masks=args.masks,
        ):  # fmt: skip
            wrong += 1
            print(failure, flush=True)
        seed += 1
    took = time.monotonic() - start
    compared = sum(counts.values()) - counts["documents"]
    print(
        f"{counts['documents']} documents, {compared} comparisons in {took:.0f} s, {wrong} wrong; seeds from {args.first}; {dict(counts)}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
