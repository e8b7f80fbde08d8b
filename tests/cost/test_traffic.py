"""Bytes, work and memory of reports, rank by rank, against the traffic of virtual ranks and the pairs of masks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.report.pages import page_of

import longspan as ls
from longspan._report.trace import events
from longspan.testing import virtual_world

MESHES: dict[str, tuple[Any, Any]] = {
    "one": (4, None),
    "ring first": ((3, 2), ("ring", "ulysses")),
    "ulysses first": ((2, 3), ("ulysses", "ring")),
}
ONE, TWO = ("ring", "allgather", "exchange", "ulysses"), ("ulysses_ring", "ulysses_allgather", "ulysses_exchange")
CASES = [("one", s) for s in ONE] + [(m, s) for m in ("ring first", "ulysses first") for s in TWO]
DOCUMENTS = ls.causal() & ls.documents(lengths=[390, 11, 599])


def _sizes(degree: int, shared: bool) -> dict[str, Any]:
    """`shared`: fewer KV heads than members of a Ulysses group."""
    return {"batch": 2, "heads": 12, "kv_heads": 1 if shared else degree * (2 if degree < 4 else 1), "head_dim": 8}


def _run(mask: Any, lengths: Any, mesh: tuple[Any, Any], options: dict[str, Any]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(plan, bytes from rank to rank in forward, and in backward) of a call with bfloat16 tensors, without control messages."""
    batch, heads, kv_heads, dim = (options[n] for n in ("batch", "heads", "kv_heads", "head_dim"))
    world = virtual_world(mesh[0], axis_names=mesh[1])
    made = ls.plan(mask, lengths, ls.Mesh.abstract(mesh[0], axis_names=mesh[1]), **options)  # other tests: ranks make equal plans

    def forward(mesh: Any) -> Any:
        plan = made.on(mesh)
        q = torch.randn(batch, heads, plan.local_len, dim, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn(batch, kv_heads, plan.kv_local_len, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        return plan, ls.attention(q, k, v, plan=plan)

    def counted() -> torch.Tensor:
        matrix = torch.zeros(world.size, world.size, dtype=torch.int64)
        for exchange in world.exchanges:
            if "agreement" not in exchange.what:
                at = torch.tensor(exchange.ranks)
                matrix[at[:, None], at] += exchange.bytes
        world.reset_counts()
        return matrix

    by_rank = world.run(forward)
    there = counted()
    world.run(lambda mesh: by_rank[mesh.rank][1].float().sum().backward())
    return by_rank[0][0], there, counted()


def _agrees(plan: ls.Plan, forward: torch.Tensor, backward: torch.Tensor) -> None:
    report = plan.report()
    assert report.traffic.forward.dtype == report.traffic.backward.dtype == torch.int64
    assert torch.equal(report.bytes_received.sum(0), forward.sum(0)) and torch.equal(report.matrix, forward)
    assert torch.equal(report.bytes_received_backward.sum(0), backward.sum(0))


# Strategies of one axis with both numbers of KV heads, of two axes with both on one of the two meshes each.
SHARING = [
    pytest.param(mesh, strategy, shared, marks=() if mesh == "one" or (i + shared) % 2 else pytest.mark.repetition)
    for i, (mesh, strategy) in enumerate(CASES)
    for shared in (False, True)
]


@pytest.mark.parametrize(("mesh", "strategy", "shared"), SHARING)
def test_predicted_bytes_equal_received_bytes_forward_and_backward(mesh: str, strategy: str, shared: bool) -> None:
    degree = 1 if strategy in ONE[:3] else 4 if strategy == "ulysses" else 2
    options = {**_sizes(degree, shared), "strategy": strategy}
    plan, forward, backward = _run(DOCUMENTS, 1000, MESHES[mesh], options)
    _agrees(plan, forward, backward)
    report = plan.report()
    assert report.bytes_received.shape == report.bytes_received_backward.shape == (len(report.traffic.names), plan.mesh.size)
    assert len(report.traffic.names) == plan.schedule.stages + (2 if degree > 1 else 0)


@pytest.mark.parametrize(("mesh", "strategy"), [("one", "exchange"), ("one", "ulysses"), ("ring first", "ulysses_ring")])
def test_bytes_of_cross_attention_and_of_bfloat16_gradients(mesh: str, strategy: str) -> None:
    options = {**_sizes(4, True), "strategy": strategy, "grad_reduce_dtype": torch.bfloat16}
    mask = ls.mask_mod(lambda b, h, q, kv: (q + kv) % 700 < 500)
    _agrees(*_run(mask, (290, 1100), MESHES[mesh], options))


def test_bytes_where_batch_rows_have_different_layouts() -> None:
    mask = ls.causal() & ls.documents(lengths=[[700, 300], [111, 889]])
    options = {**_sizes(1, False), "strategy": "exchange"}
    plan, forward, backward = _run(mask, 1000, (3, None), options)
    _agrees(plan, forward, backward)
    assert plan.data.batch_layouts == 2 and 0 < plan.report().share <= 1.0
    everything = ls.plan(mask, 1000, ls.Mesh.abstract(3), **{**options, "strategy": "allgather"}).report()
    assert everything.share == 1.0


def _allowed(mask: ls.Mask, tokens: int, heads: int) -> torch.Tensor:
    """Number of keys that each query of each head sees [heads, tokens]."""
    at = torch.arange(tokens)
    return torch.stack(
        [mask(torch.tensor(0), torch.tensor(h), at[:, None], at).expand(tokens, tokens).sum(1) for h in range(heads)]
    ).double()


def _growing(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 60 * (h + 1))


@pytest.mark.parametrize(
    ("mesh", "strategy"), [("one", "ring"), ("one", "ulysses"), ("ring first", "ulysses_ring"), ("ulysses first", "ulysses_ring")]
)
def test_work_is_counted_for_every_rank_and_its_heads(mesh: str, strategy: str) -> None:
    shape, names = MESHES[mesh]
    plan = ls.plan(ls.mask_mod(_growing), 777, ls.Mesh.abstract(shape, axis_names=names), strategy=strategy, heads=8, kv_heads=4, batch=3)
    report, seen = plan.report(), _allowed(ls.mask_mod(_growing), 777, 8)
    data, right = plan.data, []
    for rank in range(plan.mesh.size):
        coordinate = int(data.kv_coordinates[rank])
        place, local_heads = data.groups[coordinate].tolist().index(rank), 8 // data.degree
        right.append(3 * float(seen[place * local_heads : (place + 1) * local_heads, data.inner[0].positions(coordinate)].sum()))
    assert report.pairs.tolist() == right and report.balance == max(right) * len(right) / sum(right)
    assert report.tiles.dtype == torch.int64
    assert report.tiles.shape == (plan.mesh.size,) and int(report.tiles.sum()) == 3 * int(data.tiles[0].table.tiles_per_row.sum())


@pytest.mark.parametrize(("shape", "names", "strategy"), [(4, None, "ulysses"), ((2, 2), ("ring", "ulysses"), "ulysses_ring")])
def test_text_page_and_trace_cover_every_rank_and_the_transposes(shape: Any, names: Any, strategy: str) -> None:
    plan = ls.plan(ls.causal(), 2048, ls.Mesh.abstract(shape, axis_names=names), strategy=strategy, heads=8, kv_heads=2, head_dim=64)
    report = plan.report()
    moved = report.bytes_received.sum(0).double() / 2**20
    assert f"{float(moved.mean()):.2f} MiB per rank" in str(report) and "by transposes of heads" in str(report) and float(moved.min()) > 0
    assert {len(t) for t in (report.tokens, report.tiles, report.pairs, report.received.T, report.matrix)} == {4}
    assert report.timeline.forward.total.shape == report.timeline.backward.busy.shape == (4,)
    text = page_of(plan)
    values = dict(re.findall(r'data-name="(\w+)" data-value="([^"]+)"', text))
    assert float(values["received"]) == float(moved.mean()) and float(values["received_max"]) == float(moved.max())
    table = text.split('<th scope="col">waiting, ms</th>')[1].split("</table>")[0]
    assert table.count("<tr>") == 4 and f"<td>{float(moved[3]):,.1f}</td>" in table
    assert {e["pid"] for e in events(report)} == {0, 1, 2, 3}


@pytest.mark.parametrize("lengths", [(256, 4096), (4096, 256)])
def test_cross_attention_is_measured_by_both_lengths(lengths: tuple[int, int]) -> None:
    report = ls.plan(ls.full(), lengths, ls.Mesh.abstract(4), strategy="allgather", heads=8, kv_heads=2, head_dim=64).report()
    assert report.share == 1.0 and f"{lengths[0]} × {lengths[1]} tokens over 4 ranks" in report.plan
    assert report.tokens == (lengths[0] // 4,) * 4 and report.kv_tokens == (lengths[1] // 4,) * 4
    assert f"{lengths[0] // 4} to {lengths[0] // 4} queries, {lengths[1] // 4} to {lengths[1] // 4} keys per rank" in str(report)
    q, kv = lengths[0] // 4, lengths[1] // 4
    parts = report.memory_parts
    assert parts["q, k, v, out, lse"] == q * (2 * 8 * 64 * 2 + 8 * 4) + kv * 2 * 2 * 64 * 2
    assert parts["gradients, float32"] == q * 8 * 64 * 4 + kv * 2 * 2 * 64 * 4


def test_backward_buffers_hold_only_kv_that_is_read() -> None:
    window, full = (
        ls.plan(mask, 8192, ls.Mesh.abstract(8), strategy="allgather", layout="contiguous", heads=8, kv_heads=2, head_dim=64).report()
        for mask in (ls.sliding_window(200), ls.full())
    )
    assert window.in_flight == full.in_flight == full.in_flight_backward == 7 * 1024 and window.in_flight_backward == 256
    key = 2 * 2 * 64 * 2  # bytes of a token's keys and values
    assert window.memory_parts["KV and gradients in flight"] == 7 * 1024 * key  # forward, more than backward's
    assert full.memory_parts["KV and gradients in flight"] == 7 * 1024 * key * 3


def test_a_ulysses_transpose_of_cross_attention_takes_time_by_both_lengths() -> None:
    few, many = (ls.plan(ls.full(), (1024, n), ls.Mesh.abstract(4), strategy="ulysses", heads=8, kv_heads=4).report() for n in (512, 65536))
    assert float(many.timeline.forward.before.max()) > 5 * float(few.timeline.forward.before.max())
    assert torch.equal(many.timeline.forward.after > 0, torch.ones(4, dtype=torch.bool))


def test_bytes_of_transposes_of_long_sequences_are_exact() -> None:
    tokens, q, kv, lse = 3_000_001, 3 * 40 * 2, 2 * 40 * 2, 3 * 4  # bytes of a token in the heads of one rank
    options: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 40, "strategy": "ulysses", "layout": "contiguous"}
    report = ls.plan(ls.full(), tokens, ls.Mesh.abstract(2), **options).report()
    first, second = report.tokens
    assert first + second == tokens and first != second
    assert report.traffic.forward.tolist() == [[second * (q + kv), first * (q + kv)], [first * (q + lse), second * (q + lse)]]
    sent = [first * (q + kv) + second * (q + lse), second * (q + kv) + first * (q + lse)]
    assert report.matrix.tolist() == [[0, sent[0]], [sent[1], 0]]
