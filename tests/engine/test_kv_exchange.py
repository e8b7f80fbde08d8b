"""Which KV is sent how, and the addresses of views that steps compute with."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._engine import kv_exchange
from longspan._engine.kv_exchange import _is_contiguous, _tokens, empty_rows, sends_kv_separately


def test_k_and_v_are_sent_separately_from_a_number_of_bytes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ls.plan(ls.causal(), (100, 90), ls.Mesh.abstract(4)).data  # 90 keys over 4 ranks: 22 tokens
    k, v = torch.zeros(2, 3, 24, 8).bfloat16(), torch.zeros(2, 3, 24, 5).bfloat16()
    size = 22 * 2 * 3 * (8 + 5) * 2
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
