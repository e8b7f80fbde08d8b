"""Simulated passes of random workloads against the model of `longspan._cost.timeline`, rank by rank and step by step, in plain numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longspan._cost.pass_simulation import PassSimulation
from longspan._cost.rates import Cluster, KernelRates, Link, Rates, Shape
from longspan._cost.timeline import Conditions
from longspan._cost.workload import Workload

R = 4
RATES = Rates(keys=(128.0, 1024.0), full=(300.0, 500.0), causal=(200.0, 400.0))
CLUSTER = Cluster(
    name="x", about="", gpus_per_node=2, memory=1e9, hbm=3e12, inside=Link(bandwidth=4e11, latency=2e-6),
    between=Link(bandwidth=5e10, latency=7e-6), contention=0.3,
    kernel=KernelRates(name="k", source="", forward=RATES, backward=RATES, launch=3e-6, slots=20, dims={64: 0.8}),
)  # fmt: skip
CONDITIONS = Conditions(stragglers={2: 1.5, 3: 1.25}, slow_links={0: 2.0, 1: 3.0})


def random_work(seed: int, steps: int, **options: Any) -> Workload:
    """A workload whose numbers differ between ranks and steps; some steps of some ranks are empty."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, high: int = 60, empty: float = 0.0) -> torch.Tensor:
        values = torch.randint(1, high, shape, generator=generator).double()
        return values * (torch.rand(shape, generator=generator) >= empty)

    full, partial = draw(R, steps, empty=0.4), draw(R, steps, high=9, empty=0.4)
    moved = [draw(2, R, steps, high=4000, empty=0.3) for _ in range(2)]
    exchanges = torch.tensor([0, *(1 + i % 2 for i in range(steps - 1))], dtype=torch.float64)
    for tokens in moved:
        tokens[:, :, 0] = 0
    pairs = tuple((torch.tensor([i % R, 1]), torch.tensor([(i + 1) % R, 3])) for i in range(steps))
    usual: dict[str, Any] = {
        "ranks": R, "degree": 1, "rank": torch.arange(R), "query_tiles": draw(R, high=90) + 20, "full": full, "partial": partial,
        "received": moved[0], "sent": moved[1], "exchanges": exchanges, "local": draw(R, high=3000), "cross_node_share": 0.25,
        "shape": Shape(batch=3, heads=8, kv_heads=2, head_dim=64), "scale": 3, "active_tiles": draw(R, steps, high=20),
        "gathered": draw(R, steps, high=900), "peers": pairs, "local_kv": draw(R, high=2000),
    }  # fmt: skip
    return Workload(**usual | options)


def simulated(work: Workload, backward: bool) -> dict[str, Any]:
    """Start and end of each rank's steps, and the seconds before, after and in all."""
    s, steps, c = work.shape, work.steps, CLUSTER
    slow = [max([1.0, *(f for r, f in CONDITIONS.stragglers.items() if r // work.degree == rank)]) for rank in range(R)]
    slow_link = [max([1.0, *(f for r, f in CONDITIONS.slow_links.items() if r // work.degree == rank)]) for rank in range(R)]
    full, partial, received, sent = (t.tolist() for t in (work.full, work.partial, work.received, work.sent))
    token = 2 * work.scale * max(1, s.kv_heads // work.degree) * s.head_dim * s.element
    grad_token = token * s.grad_element / s.element
    kv_tokens = (work.local if work.local_kv is None else work.local_kv).tolist()
    exchanges, tile = work.exchanges.tolist(), 128 * s.head_dim

    def every(r: int, i: int) -> float:
        return float(work.query_tiles[r, i] if work.query_tiles.ndim == 2 else work.query_tiles[r])

    def convert(r: int) -> float:
        local = kv_tokens[r] * work.degree * s.batch / work.scale
        return every(r, 0) * tile * (4 + s.element) + local * token * (1 + 4 / s.element)

    def exchange(arriving: Any, leaving: Any, size: float) -> list[list[float]]:
        out = [[0.0] * steps for _ in range(R)]
        for i in range(steps):
            for r in range(R):
                for kind, link in enumerate((c.inside, c.between)):
                    most = max(arriving[kind][r][i], leaving[kind][r][i]) * size
                    if most:
                        out[r][i] = max(out[r][i], most * slow_link[r] / link.bandwidth + link.latency * exchanges[i])
        return out

    def compute(r: int, i: int) -> float:
        runs = [full[r][j] + partial[r][j] > 0 for j in range(steps)]
        last = max((j for j in range(steps) if runs[j]), default=0)
        active = every(r, i) if work.active_tiles is None else float(work.active_tiles[r, i])
        if not backward and i in (0, last):
            active = every(r, i)
        numbers = (torch.tensor(x, dtype=torch.float64) for x in (active, full[r][i], partial[r][i]))
        rows, f, p = numbers
        seconds = float(c.kernel.seconds(rows=rows, full=f, partial=p, head_dim=s.head_dim, backward=backward))
        moved = 0.0
        if work.merge_bytes is not None:
            moved = float(work.merge_bytes[r, i]) if runs[i] and steps > 1 else 0.0
            return (seconds + moved / c.hbm) * slow[r]
        local = kv_tokens[r] * work.degree * s.batch / work.scale
        sends, gets = (sum(t[kind][r][i] for kind in range(2)) for t in (sent, received))
        if work.gathered is not None:
            moved += 2 * float(work.gathered[r, i]) * token
        if steps > 1 and i == 0:
            moved += 2 * local * token
        if not backward:
            if steps > 1 and runs[i]:
                if any(runs[:i]):
                    moved += active * tile * 4
                is_last = i == last if i else not any(runs[1:])
                if not is_last:
                    moved += active * tile * (4 - s.element)
        else:
            wide = token * 4 / s.element
            if runs[i]:
                moved += active * tile * (8 - s.element) + gets * token
            if i == 0:
                moved += every(r, 0) * tile * (2 * s.element + 4)
            if i == steps - 1:
                moved += convert(r)
            moved += gets * wide + (sends + 2 * min(sends, local)) * wide
        return (seconds + moved / c.hbm) * slow[r]

    def transpose(r: int, queries: float, keys: float) -> float:
        if work.degree == 1:
            return 0.0
        copies = max(1, work.degree // s.kv_heads)
        per_rank = queries * float(work.local[r]) * s.q_bytes + keys * kv_tokens[r] * s.kv_bytes * copies
        bytes_ = per_rank * (work.degree - 1) / work.degree * slow_link[r]
        share = work.cross_node_share
        inside = bytes_ * (1 - share) / c.inside.bandwidth + c.inside.latency * (share < 1)
        return max(inside, bytes_ * share / c.between.bandwidth + c.between.latency * (share > 0)) + 4 * bytes_ / c.hbm

    seconds = [[compute(r, i) for i in range(steps)] for r in range(R)]
    transfer, returns = exchange(received, sent, token), exchange(sent, received, grad_token)
    before = [transpose(r, 3 if backward else 1, 1) for r in range(R)]
    after = [transpose(r, 1, 1 if backward else 0) for r in range(R)]

    def start(ready: list[float], i: int) -> list[float]:
        if not work.peers:
            return [max(ready)] * R
        out = list(ready)
        for a, b in zip(*(t.tolist() for t in work.peers[i])):
            out[a], out[b] = max(out[a], ready[b]), max(out[b], ready[a])
        return out

    spans = {name: [[[0.0, 0.0] for _ in range(steps)] for _ in range(R)] for name in ("compute", "transfer", "return")}
    stream, done = list(before), list(before)
    used = [i for i in range(steps) if i == 0 or exchanges[i] > 0 or any(full[r][i] + partial[r][i] > 0 for r in range(R))]
    for place, i in enumerate(used):
        following = used[place + 1] if place + 1 < len(used) else None
        begin = [max(done[r], spans["transfer"][r][i][1]) for r in range(R)]
        packs = work.joined and i == 0
        if following is not None and exchanges[following]:
            ready = [begin[r] + seconds[r][i] if packs else done[r] for r in range(R)]
            at = start([max(a, b) for a, b in zip(stream, ready)], following)
            stream = [at[r] + transfer[r][following] for r in range(R)]
            for r in range(R):
                spans["transfer"][r][following] = [at[r], stream[r]]
        for r in range(R):
            hidden = transfer[r][following] if following is not None and not packs else 0.0
            if backward and place > 1:
                hidden += returns[r][used[place - 1]]
            done[r] = begin[r] + seconds[r][i] + c.contention * min(hidden, seconds[r][i])
            spans["compute"][r][i] = [begin[r], done[r]]
            for skipped in range(i + 1, steps if following is None else following):
                spans["compute"][r][skipped] = [done[r], done[r]]
        if backward and i and exchanges[i]:
            at = start([max(a, b) for a, b in zip(stream, done)], i)
            stream = [at[r] + returns[r][i] for r in range(R)]
            for r in range(R):
                spans["return"][r][i] = [at[r], stream[r]]
    end = list(done)
    if backward:
        late = [convert(r) / c.hbm * slow[r] if work.halves is not None else 0.0 for r in range(R)]
        end = [max(done[r], stream[r] + late[r]) for r in range(R)]
    total = [end[r] + after[r] for r in range(R)]
    return {**spans, "before": before, "after": [total[r] - done[r] for r in range(R)], "total": total}


def check(work: Workload) -> None:
    for backward in (False, True):
        got, want = PassSimulation(work, CLUSTER, CONDITIONS).run(backward=backward), simulated(work, backward)
        spans = {"compute": got.compute, "transfer": got.transfer, **({"return": got.grad_return} if got.grad_return else {})}
        assert (got.grad_return is not None) is backward
        for name, (begin, end) in spans.items():
            torch.testing.assert_close(torch.stack([begin, end], 2), torch.tensor(want[name], dtype=torch.float64), rtol=1e-9, atol=1e-15)
        for name in ("before", "after", "total"):
            assert getattr(got, name).tolist() == pytest.approx(want[name], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_passes_of_random_workloads(seed: int, steps: int) -> None:
    work = random_work(seed, steps)
    check(work)
    check(replace(work, peers=(), gathered=None, local_kv=None, scale=1))


@pytest.mark.parametrize("seed", range(3))
def test_passes_of_other_kinds(seed: int) -> None:
    work = random_work(seed, 4)
    check(replace(work, active_tiles=None, query_tiles=work.full + 30))
    check(replace(work, merge_bytes=work.full * 1e6 + 1e5))
    check(replace(random_work(seed, 1), merge_bytes=torch.full((R, 1), 1e6, dtype=torch.float64)))
    check(work.split())
    check(replace(work, degree=2, rank=torch.arange(R)))
    for share in (0.0, 1.0):  # all transposes inside a node, or all between nodes
        check(replace(work, degree=2, rank=torch.arange(R), cross_node_share=share))
    check(replace(work, degree=8, shape=replace(work.shape, element=4)))
    if work.steps > 1:
        check(work.join())
    empty = work.exchanges.clone()
    empty[2] = 0
    full, partial = work.full.clone(), work.partial.clone()
    full[:, 2] = partial[:, 2] = 0  # a step without work and without an exchange
    check(replace(work, full=full, partial=partial, exchanges=empty, received=work.received * (empty > 0), sent=work.sent * (empty > 0)))


@pytest.mark.parametrize(("seed", "step"), [(0, 1), (1, 3), (2, 2)])
def test_steps_that_only_move_or_only_compute(seed: int, step: int) -> None:
    work = random_work(seed, 4)
    full, partial, equal = work.full.clone(), work.partial.clone(), work.exchanges.clone()
    full[:, step] = partial[:, step] = 0
    check(replace(work, full=full, partial=partial))
    equal[step] = 0
    received, sent = work.received.clone(), work.sent.clone()
    received[:, :, step] = sent[:, :, step] = 0
    same = work.full.clone()
    same[:, step] = work.partial[:, step]  # as many full as partial tiles
    check(replace(work, full=same, exchanges=equal, received=received, sent=sent))
    only = torch.zeros_like(work.full)
    only[:, step] = 5.0
    check(replace(work, full=only, partial=only * 0))


@pytest.mark.parametrize("rank", [7, 8])
def test_conditions_of_ranks_past_the_mesh_raise(rank: int) -> None:
    work = replace(random_work(0, 2), degree=2)
    conditions = Conditions(stragglers={rank: 2.0})
    if rank < 8:
        assert PassSimulation(work, CLUSTER, conditions).compute_factor.tolist() == [1, 1, 1, 2]
        return
    with pytest.raises(ValueError, match="conditions: expected ranks below 8, got 8"):
        PassSimulation(work, CLUSTER, conditions)
