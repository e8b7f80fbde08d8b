"""Scenarios: short sequences of collective calls, such as a training step makes them.

Each call returns tensors, whose bits the harness compares with those of a run without a fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import longspan as ls
from longspan.integrations import prepare_batch
from longspan.integrations.loss import token_loss

TOKENS, HEADS, KV_HEADS, DIM = 211, 12, 12, 4  # heads divide by 3 and by 4

Call = tuple[str, Callable[[], Iterable[Tensor]]]


@dataclass(kw_only=True)
class RankState:
    """What a scenario knows of its rank. `odd`: the argument in which this rank's calls differ from all others', or ""; set before each."""

    rank: int
    size: int
    folder: str
    odd: str = ""
    results: dict[str, Any] = field(default_factory=dict)

    def tensor(self, *shape: int, seed: int = 0) -> Tensor:
        """Random numbers, the same on every rank."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _add(constant: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score + constant * (q - kv)


def _attention(state: RankState, mesh: Any, *, score_mod: bool = False, sink: bool = False, **options: Any) -> list[Call]:
    """Two layers with different masks, forward and backward, then another forward pass."""
    odd = state.odd
    tokens = TOKENS - (odd == "length")
    mask = ls.causal() if odd != "mask" else ls.causal() & ls.sliding_window(100)
    if odd == "plan" and options["strategy"] == "ulysses_ring":  # no other strategy spans two axes
        options = {**options, "layout": "head_tail"}
    elif odd == "plan":
        options.pop("stages", None)
        options = {**options, "layout": "contiguous", "strategy": "allgather" if options["strategy"] == "exchange" else "exchange"}
    first = ls.plan(mask, tokens, mesh, **options)
    second = ls.plan(ls.documents(lengths=[tokens - 90, 90]), tokens, mesh, **{**options, "layout": first.layout})

    def forward(name: str, plan: ls.Plan) -> Iterable[Tensor]:
        odd = state.odd
        batch = 1 if odd == "batch" else 2
        heads = 2 * HEADS if odd == "heads" else HEADS
        dtype = torch.float16 if odd == "dtype" else torch.float32
        shapes = ((heads, 0), (KV_HEADS, 1), (KV_HEADS, 2))
        whole = [state.tensor(2, h, TOKENS, DIM, seed=s)[:batch, :, :tokens].to(dtype) for h, s in shapes]
        q, k, v = (plan.shard(t, 2).requires_grad_() for t in whole)
        arguments: dict[str, Any] = {"scale": 0.3 if odd == "scale" else None}
        if score_mod or odd == "score_mod":
            arguments["score_mod"] = _add(0.02 if odd == "score_mod" else 0.01)
        if sink != (odd == "sink"):
            arguments["sink"] = torch.ones(heads, dtype=dtype)
        out = ls.attention(q, k, v, plan=plan, **arguments)
        state.results[name] = out, (q, k, v)
        return [out]

    def backward(name: str) -> Iterable[Tensor]:
        if name not in state.results:
            return []  # this rank skipped the forward pass
        out, inputs = state.results.pop(name)
        if state.odd == "pass":
            return forward(name, second)
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    return [
        ("forward 1", lambda: forward("1", first)),
        ("forward 2", lambda: forward("2", second)),
        ("backward 2", lambda: backward("2")),
        ("backward 1", lambda: backward("1")),
        ("next forward", lambda: forward("3", first)),
    ]


FIELDS = ("scale", "dtype", "batch", "heads", "length", "score_mod", "mask", "plan", "pass", "sink")


def ring(state: RankState) -> list[Call]:
    return _attention(state, dist.group.WORLD, layout="contiguous", strategy="ring")


def exchange(state: RankState) -> list[Call]:
    return _attention(state, dist.group.WORLD, layout="head_tail", strategy="exchange", stages=2, sink=True)


def allgather(state: RankState) -> list[Call]:
    return _attention(state, dist.group.WORLD, layout="head_tail", strategy="allgather", score_mod=True)


def ulysses(state: RankState) -> list[Call]:
    return _attention(state, dist.group.WORLD, layout="contiguous", strategy="ulysses")


def ulysses_ring(state: RankState) -> list[Call]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    return _attention(state, mesh, layout="contiguous", strategy="ulysses_ring")


def separate_kv(state: RankState) -> list[Call]:
    from longspan._engine import kv_exchange

    kv_exchange.SEPARATE_KV_BYTES = 0
    return _attention(state, dist.group.WORLD, layout="head_tail", strategy="ring")


def invariant(state: RankState) -> list[Call]:
    calls = _attention(state, dist.group.WORLD, layout="contiguous", strategy="exchange")

    def inside(fn: Callable[[], Iterable[Tensor]]) -> Iterable[Tensor]:
        with ls.invariant():
            return fn()

    return [(name, lambda fn=fn: inside(fn)) for name, fn in calls]


def unshard(state: RankState) -> list[Call]:
    plan = ls.plan(ls.causal(), TOKENS, dist.group.WORLD, layout="contiguous" if state.odd == "layout" else "head_tail")

    def gather(name: str, width: int) -> Iterable[Tensor]:
        odd = state.odd
        x = state.tensor(TOKENS, 6, seed=3)[:, : 5 if odd == "width" else 6].to(torch.float16 if odd == "dtype" else torch.float32)
        part = plan.shard(x[:, :width], 0).requires_grad_()
        if odd == "dim":
            part = part.detach().T.requires_grad_()
        whole = plan.unshard(part, 1 if odd == "dim" else 0)
        state.results[name] = whole, part
        return [whole]

    def backward(name: str) -> Iterable[Tensor]:
        if name not in state.results:
            return []
        whole, part = state.results.pop(name)
        return torch.autograd.grad(whole, part, torch.full_like(whole, state.rank + 1.0))

    return [
        ("unshard 1", lambda: gather("1", 6)),
        ("unshard 2", lambda: gather("2", 4)),
        ("backward of unshard 2", lambda: backward("2")),
        ("backward of unshard 1", lambda: backward("1")),
        ("next unshard", lambda: gather("3", 6)),
    ]


def relayout(state: RankState) -> list[Call]:
    plan = ls.plan(ls.causal(), TOKENS, dist.group.WORLD, layout="contiguous" if state.odd == "layout" else "head_tail")

    def move(name: str, to: str) -> Iterable[Tensor]:
        odd = state.odd
        x = state.tensor(2, HEADS, TOKENS, DIM, seed=4).to(torch.float16 if odd == "dtype" else torch.float32)
        x = x[:1] if odd == "batch" else x
        part = plan.shard(x, 2).requires_grad_()
        to = "contiguous" if odd == "target" else to
        moved = plan.relayout(part, 2, to=to, heads_dim=1 if to == "heads" else None)
        state.results[name] = moved, part
        return [moved]

    def backward(name: str) -> Iterable[Tensor]:
        if name not in state.results:
            return []
        moved, part = state.results.pop(name)
        return torch.autograd.grad(moved, part, torch.full_like(moved, state.rank + 1.0))

    return [
        ("relayout to heads", lambda: move("1", "heads")),
        ("relayout to contiguous", lambda: move("2", "contiguous")),
        ("backward of relayout 2", lambda: backward("2")),
        ("backward of relayout 1", lambda: backward("1")),
        ("next relayout", lambda: move("3", "heads")),
    ]


def loss(state: RankState) -> list[Call]:
    """The exact loss over data and context ranks: labels are counted over all ranks, and attention runs over the context ranks."""
    shape = (state.size // 2, 2) if state.size % 2 == 0 else (1, state.size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    data_rank = mesh.get_local_rank("dp")
    tokens = torch.randint(0, 50, (1, TOKENS), generator=torch.Generator().manual_seed(data_rank))
    labels = tokens.clone()
    labels[:, : 20 * (1 + data_rank)] = -100
    width = HEADS * DIM
    table, weight = state.tensor(50, width, seed=5).requires_grad_(), state.tensor(50, width, seed=6).requires_grad_()

    def prepare() -> Iterable[Tensor]:
        batch = prepare_batch({"input_ids": tokens, "labels": labels}, mesh, gradients="sum", strategy="ring", heads=HEADS)
        state.results["batch"] = batch
        return [batch["num_items_in_batch"]]

    def forward() -> Iterable[Tensor]:
        if "batch" not in state.results:
            return []
        batch = state.results["batch"]
        x = table[batch["input_ids"]].unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        out = ls.attention(x, x, x, plan=batch["longspan_plan"]["full"]).transpose(1, 2).flatten(2)
        share = token_loss(out @ weight.T, batch["labels"], count=batch["num_items_in_batch"])
        state.results["loss"] = share
        return [share]

    def backward() -> Iterable[Tensor]:
        if "loss" not in state.results:
            return []
        return torch.autograd.grad(state.results.pop("loss"), (table, weight))

    return [("count of labels", prepare), ("forward", forward), ("backward", backward), ("next count of labels", prepare)]


def drop_in(state: RankState) -> list[Call]:
    """`context_parallel` around SDPA; ranks exchange their lengths because the context does not know the sequence."""
    whole = state.tensor(2, HEADS, TOKENS, DIM, seed=7)
    sizes = [TOKENS // state.size] * (state.size - 1)
    part = whole.split([*sizes, TOKENS - sum(sizes)], 2)[state.rank].contiguous()
    context = ls.context_parallel(dist.group.WORLD)

    def forward(name: str, causal: bool) -> Iterable[Tensor]:
        odd, q = state.odd, part.clone().requires_grad_()
        with context:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, q, q, is_causal=causal != (odd == "mask"), scale=0.3 if odd == "scale" else None
            )
        state.results[name] = out, q
        return [out]

    def backward(name: str) -> Iterable[Tensor]:
        if name not in state.results:
            return []
        out, q = state.results.pop(name)
        return torch.autograd.grad(out, q, torch.ones_like(out))

    return [
        ("SDPA 1", lambda: forward("1", True)),
        ("SDPA 2", lambda: forward("2", False)),
        ("backward of SDPA 2", lambda: backward("2")),
        ("backward of SDPA 1", lambda: backward("1")),
        ("next SDPA", lambda: forward("3", True)),
    ]


def _model(state: RankState) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (state.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def _weights(model: Any) -> list[Tensor]:
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def checkpoint(state: RankState) -> list[Call]:
    """Two saves into an empty folder, and a load of the newest checkpoint."""
    from longspan._training.checkpoints import load, pick, save

    model, optimizer = _model(state)
    out = os.path.join(state.folder, "checkpoints")

    def write(step: int) -> Iterable[Tensor]:
        save(out, step, {"width": 8}, model, optimizer)
        return _weights(model)

    def read() -> Iterable[Tensor]:
        load(pick(out, None), model, optimizer)
        return _weights(model)

    return [("save 1", lambda: write(1)), ("save 2", lambda: write(2)), ("load", read)]


SCENARIOS: dict[str, Callable[[RankState], list[Call]]] = {
    fn.__name__: fn
    for fn in (
        ring, exchange, allgather, ulysses, ulysses_ring, separate_kv, invariant, unshard, relayout, loss, drop_in, checkpoint,
    )
}  # fmt: skip
SEVERAL_GROUPS = ("loss",)  # a fault of one group's calls need not reach the ranks of another
DIVERGING: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ring", "exchange", "allgather", "ulysses", "ulysses_ring", "separate_kv", "invariant"), FIELDS),
    "unshard": ("dtype", "width", "dim", "layout"),
    "relayout": ("dtype", "batch", "layout", "target"),
    "drop_in": ("scale", "mask"),
}
PLANNED = ("length", "mask", "plan", "layout", "pass")  # fields that are those of the plan, or of another call than the last
DIVERGING_LATER = {name: tuple(f for f in fields if f not in PLANNED or name == "drop_in") for name, fields in DIVERGING.items()}
