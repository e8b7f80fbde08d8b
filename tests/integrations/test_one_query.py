"""A step of `generate`: one query per batch row, in torch's operations on a CPU, against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import longspan as ls
from longspan.integrations import _one_query
from longspan.integrations._adapters import _alibi
from longspan.integrations._model_mask import ModelMask
from longspan.integrations._one_query import attend_one_query
from longspan.integrations.transformers import _softcap, attention_forward
from longspan.testing import oracle

BATCH, HEADS, KV_HEADS, KEYS, DIM, VALUE_DIM = 3, 6, 2, 19, 8, 5
SLOPES = torch.linspace(0.1, 0.6, HEADS)
MODS = {"none": None, "softcap": _softcap(1.5), "alibi": _alibi(SLOPES)}


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value, and which keys are visible [B, S]: none in row 2."""
    generator = torch.Generator().manual_seed(4)
    sizes = (HEADS, 1, DIM), (KV_HEADS, KEYS, DIM), (KV_HEADS, KEYS, VALUE_DIM)
    q, k, v = (torch.randn(BATCH, *size, generator=generator).to(dtype) for size in sizes)
    visible = torch.rand(BATCH, KEYS, generator=generator) < 0.7
    visible[2] = False
    return q, k, v, visible


@pytest.mark.parametrize(("mod", "sink"), [("none", True), ("softcap", False), ("softcap", True), ("alibi", False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equals_the_reference_and_ignores_hidden_keys(mod: str, sink: bool, dtype: torch.dtype) -> None:
    q, k, v, visible = tensors(dtype)
    logits = torch.linspace(-1, 2, HEADS, dtype=dtype) if sink else None
    want = oracle(q, k, v, mask=ls.mask_mod(lambda b, h, q, kv: visible[b, kv]), score_mod=MODS[mod], scale=0.3, sink=logits)
    hidden = ~visible[:, None, :, None]
    k, v = (t.masked_fill(hidden, float("nan")) for t in (k, v))
    got = attend_one_query(q, k, v, ModelMask(mask=None, row=visible), scale=0.3, sink=logits, score_mod=MODS[mod])
    assert got is not None and got.dtype == dtype and got.shape == (BATCH, 1, HEADS, VALUE_DIM)
    budget = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-12}[dtype]
    reference = want[0] if isinstance(want, tuple) else want
    assert torch.allclose(got.transpose(1, 2).double(), reference.double(), rtol=budget, atol=budget)


@pytest.mark.parametrize("mod", ["softcap", "alibi"])
def test_autocast_does_not_round_scores(mod: str) -> None:
    """Under autocast, q, k and v are bfloat16; the result has their bits without autocast."""
    q, k, v, visible = tensors(torch.bfloat16)
    mask = ModelMask(mask=None, row=visible)
    want = attend_one_query(q, k, v, mask, scale=None, sink=None, score_mod=MODS[mod])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend_one_query(q, k, v, mask, scale=None, sink=None, score_mod=MODS[mod])
    assert got is not None and want is not None and torch.equal(got, want)


def test_gradients_equal_those_of_the_engine() -> None:
    q, k, v, _ = tensors(torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v, torch.linspace(-1, 2, HEADS, dtype=torch.float64))]
    one = attend_one_query(*leaves[:3], ModelMask(mask=None), scale=None, sink=leaves[3], score_mod=MODS["softcap"])
    engine = ls.attention(*leaves[:3], sink=leaves[3], score_mod=MODS["softcap"]).transpose(1, 2)
    assert one is not None and torch.allclose(one, engine)
    grad = torch.randn(one.shape, dtype=one.dtype, generator=torch.Generator().manual_seed(1))
    for a, b in zip(torch.autograd.grad(one, leaves, grad), torch.autograd.grad(engine, leaves, grad), strict=True):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("case", ["two queries", "a mask", "a user's score mod", "invariant"])
def test_other_calls_are_left_to_the_engine(case: str) -> None:
    q, k, v, _ = tensors()
    options: dict[str, Any] = {"scale": None, "sink": None, "score_mod": MODS["softcap"]}
    mask: Any = ModelMask(mask=ls.causal() if case == "a mask" else None)
    if case == "two queries":
        q = q.expand(-1, -1, 2, -1)
    if case == "a user's score mod":
        options["score_mod"] = lambda score, b, h, q_idx, kv_idx: score * 2
    if case == "invariant":
        with ls.invariant():
            assert attend_one_query(q, k, v, mask, **options) is None
    else:
        assert attend_one_query(q, k, v, mask, **options) is None


def test_a_layer_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, visible = tensors()
    calls: list[int] = []
    by_scores = _one_query._by_scores
    monkeypatch.setattr(_one_query, "_by_scores", lambda *args: calls.append(1) or by_scores(*args))
    out, _ = attention_forward(torch.nn.Module(), q, k, v, ModelMask(mask=None, row=visible), softcap=1.5)
    with ls.invariant():
        want, _ = attention_forward(torch.nn.Module(), q, k, v, ModelMask(mask=None, row=visible), softcap=1.5)
    assert len(calls) == 1 and torch.allclose(out, want, atol=1e-6)
