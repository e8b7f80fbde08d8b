"""Which KV is sent how, and the addresses of views that steps compute with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._engine import kv_exchange
from longspan._engine.kv_exchange import KVExchange, KVFormat, _is_contiguous, _tokens, empty_rows, sends_kv_separately
from longspan._engine.schedule_builder import ScheduleOptions, local_schedule


def test_k_and_v_are_sent_separately_from_a_number_of_bytes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ls.plan(ls.causal(), (100, 90), ls.Mesh.abstract(4)).data  # 90 keys over 4 ranks: 22 tokens
    k, v = torch.zeros(2, 3, 24, 8).bfloat16(), torch.zeros(2, 3, 24, 5).bfloat16()
    size = 22 * 2 * 3 * (8 + 5) * 2
    assert kv_exchange.SEPARATE_KV_BYTES == 32 * 2**20
    for limit, separate in ((size - 1, True), (size, True), (size + 1, False)):
        monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", limit)
        assert sends_kv_separately(plan, k, v) is separate
    assert empty_rows(k, 3, 7).shape == (3, 7) and empty_rows(k, 3, 7).dtype == torch.bfloat16


def layouts(x: Tensor) -> list[Tensor]:
    """Views of the same shape by every order of dims, some with gaps."""
    made = []
    for order in itertools.permutations(range(4)):
        dense = torch.empty([x.shape[i] for i in order]).permute([order.index(i) for i in range(4)])
        wider = torch.empty([x.shape[i] + (i == order[-1]) for i in order]).permute([order.index(i) for i in range(4)])
        made += [dense, wider[tuple(slice(n) for n in x.shape)]]
    return made


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 3, 5, 4), (2, 1, 5, 4), (2, 3, 1, 4), (1, 1, 5, 1)], ids=str)
def test_contiguity_in_another_order_is_that_of_the_permuted_tensor(shape: tuple[int, ...]) -> None:
    for x in layouts(torch.empty(shape)):
        for order in ((0, 2, 1, 3), (2, 0, 1, 3)):
            assert _is_contiguous(x, order) == x.permute(order).is_contiguous()


@pytest.mark.parametrize("tokens", [range(7), range(2, 5), range(3), range(4, 7)])
def test_tokens_of_local_kv_are_views_at_their_addresses(tokens: range) -> None:
    k, v = torch.randn(2, 3, 7, 8), torch.randn(2, 7, 3, 5).transpose(1, 2)
    step = _tokens(k, v, tokens)
    inputs = step.inputs(q := torch.randn(2, 6, 4, 8))
    part = slice(tokens.start, tokens.stop)
    assert inputs.q is q and torch.equal(inputs.k, k[:, :, part]) and torch.equal(inputs.v, v[:, :, part])
    assert tuple(step.addresses)[:2] == (inputs.k.data_ptr(), inputs.v.data_ptr())


@dataclass
class Received:
    """In place of a group: each exchange receives rows of its own number, counted from one."""

    ranks: int
    outs: list[Tensor] = field(default_factory=list)
    any_stream: bool = False

    def all_to_all(self, out: Tensor, sent: Tensor, recv_counts: Sequence[int], send_counts: Sequence[int], *, what: str) -> Any:
        assert (out.shape[0], sent.shape[0]) == (sum(recv_counts), sum(send_counts)) and len(recv_counts) == self.ranks
        self.outs.append(out)
        number = len(self.outs)
        return SimpleNamespace(wait=lambda: out.fill_(number))

    def all_to_all_pieces(self, out: Tensor, pieces: Sequence[Tensor], recv_counts: Sequence[int], *, what: str) -> Any:
        return self.all_to_all(out, torch.cat(list(pieces)), recv_counts, [len(p) for p in pieces], what=what)


@pytest.mark.parametrize(("separate", "two_buffers"), [(False, False), (True, False), (True, True)])
def test_exchanges_of_one_step_arrive_side_by_side(separate: bool, two_buffers: bool) -> None:
    """Of a joined schedule of three stages in two steps: behind the local rows, or in a buffer of their own."""
    plan = ls.plan(ls.causal(), 700, ls.Mesh.abstract(4, rank=2), layout="head_tail", strategy="ring").data
    plan = replace(plan, schedule=replace(plan.schedule, steps=(range(2), range(2, 3)), joined=True))
    steps = local_schedule(plan, ScheduleOptions(block=(64, 32))).steps
    assert [len(step.exchanges) for step in steps] == [2, 1]
    tokens, group = len(steps[0].local), Received(ranks=4)
    k, v = torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 5)
    fmt = KVFormat(separate=separate, per_batch_row=False, two_buffers=two_buffers)
    agreement: Any = SimpleNamespace(done=True, wait=lambda: None)
    exchange = KVExchange(group, (k, v), steps, fmt, "forward", agreement)  # type: ignore[arg-type]
    number = 0
    for i, step in enumerate(steps):
        (kv,) = exchange.wait(i)
        inputs = kv.inputs(torch.empty(1, 4, 3, 8))
        for x, local, offset in ((inputs.k, k, 0), (inputs.v, v, 1)):
            rows = x if i or not two_buffers else torch.cat([local, x], 2)
            assert rows.shape[2] == step.buffer_rows and torch.equal(rows[:, :, : len(step.local)], local[:, :, : len(step.local)])
            for n, one in enumerate(step.exchanges):
                want = number + n * (2 if separate else 1) + 1 + (offset if separate else 0)
                assert bool((rows[:, :, one.start : one.stop] == want).all())
        given = (inputs.k, inputs.v, *(inputs.local_kv or ()))
        assert tuple(kv.addresses) == (*(x.data_ptr() for x in given), *[0] * (4 - len(given)))
        if two_buffers and not i:
            assert inputs.local_kv is not None and all(map(torch.equal, inputs.local_kv, (k, v)))
        number = len(group.outs)
        exchange.prepare(i + 1)
    assert number == (6 if separate else 3)
