"""Dtypes, strides and memory of what layers, caches and trainers return: of inputs in several dtypes and of views."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.other_device import OTHER, OtherDevice

import longspan as ls
import longspan.integrations.transformers as lst
from longspan.integrations import _paged_attention
from longspan.integrations._model_mask import ModelMask
from longspan.integrations._paged_attention import absorbed, attend_paged
from longspan.integrations._paged_cache import PagedCache, PendingUpdate
from longspan.integrations._pair_masks import attend_pairs
from longspan.integrations._recent_plans import _contents
from longspan.integrations.transformers import _real_keys, attention_forward

REAL = torch.tensor([[1] * 9, [0, 0] + [1] * 7])
NONE: dict[str, Any] = {"scale": None, "sink": None, "score_mod": None}


@pytest.mark.parametrize("kind", ["alone", "a plan", "pairs", "features", "features that some see"])
def test_attention_is_contiguous_as_transformers_functions_return_it(kind: str) -> None:
    query, key, value = (torch.randn(2, h, 9, d, generator=torch.Generator().manual_seed(h)) for h, d in ((4, 3), (2, 3), (2, 5)))
    pairs = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    if kind.startswith("features"):
        out = attend_pairs(query, key, value, None if kind == "features" else pairs, to_tokens=False, **NONE)
    else:
        plan = ls.plan(ls.causal(), 9, ls.Mesh.abstract(1)) if kind == "a plan" else None
        out, _ = attention_forward(nn.Module(), query, key, value, pairs if kind == "pairs" else None, longspan_plan=plan)
    assert out.shape == (2, 9, 4, 5) and out.is_contiguous()


def test_masks_by_token_are_bool_and_on_the_device_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _real_keys(REAL, 4, 1)
    assert real.dtype == torch.bool and real.tolist() == [[True] * 4, [False, True, True, True]]
    seen = torch.arange(9)[None] != 3
    with OtherDevice():
        monkeypatch.setattr(lst, "visible_keys", lambda *_: seen.to(OTHER))
        made: Any = lst.attention_mask(2, 1, 9, q_offset=8, mask_function=lambda *_: None, attention_mask=REAL)
        assert made.row.device == OTHER
        assert made.row.cpu().tolist() == [[True] * 3 + [False] + [True] * 5, [False, False, True, False] + [True] * 5]


# --------------------------------------------------------------------------------------------------------------------------- caches


def cache_of(*columns: tuple[int, Tensor | None]) -> Any:
    """A cache of these ranges of columns, without layers."""
    cache = object.__new__(PagedCache)
    cache._columns, cache._groups, cache._left = list(columns), {}, set()
    return cache


def test_a_cache_holds_a_copy_of_new_padding_on_the_host() -> None:
    first = torch.tensor([[0, 1], [1, 1]]).bool()
    real = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    cache = cache_of((2, first), (1, None))
    new = cache._checked_real(real, 2, 2)
    real[:, 4] = True
    assert new.tolist() == [[True, False], [True, True]] and cache._checked_real(real, 2, 2) is None
    assert cache_of()._checked_real(torch.tensor([[True, False]]), 3, 2).tolist() == [[True, False]] * 3
    real[1, 4] = False
    with OtherDevice():
        there = cache._checked_real(real.to(OTHER), 2, 2)
        assert there.device.type == "cpu" and there.tolist() == [[True, True], [True, False]]
        with pytest.raises(ValueError, match="expected the padding of earlier columns"):
            cache._checked_real((~real).to(OTHER), 2, 2)


@pytest.mark.parametrize("place", ["cpu", OTHER])
@pytest.mark.parametrize("chosen", [torch.tensor([True, False, True, True]), torch.tensor([0, 2, 3])])
def test_rows_are_chosen_by_number_or_by_mask(chosen: Tensor, place: Any) -> None:
    real = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]]).bool()
    cache = cache_of((2, real), (3, None))
    with OtherDevice():
        cache.batch_select_indices(chosen.to(place))
    assert cache._columns[0][1].tolist() == real[[0, 2, 3]].tolist() and cache._columns[1] == (3, None)


def test_latent_attention_computes_in_the_dtype_of_queries() -> None:
    """One KV head of r + t = 5 + 2 dims for 3 heads, from up-projections and latents of float64."""
    torch.manual_seed(1)
    module = SimpleNamespace(
        kv_b_proj=nn.Linear(5, 3 * (4 + 6), bias=False, dtype=torch.float64), qk_nope_head_dim=4, v_head_dim=6, kv_lora_rank=5
    )
    latent, rotary = torch.randn(2, 1, 7, 5).double(), torch.randn(2, 1, 7, 2).double()
    made = absorbed(module, torch.randn(2, 3, 7, 6), PendingUpdate(None, 0, latent, rotary))  # type: ignore[arg-type]
    assert [t.dtype for t in made[:3]] == [torch.float32] * 3 and [t.shape[-1] for t in made[:3]] == [7, 7, 5]
    assert made.restore(torch.randn(2, 3, 7, 5)).dtype == torch.float32


def test_columns_without_padding_are_packed_on_the_device_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []
    new = torch.tensor([[False, True, True], [True, True, True]])
    monkeypatch.setattr(_paged_attention, "attention", lambda q, k, v, **_: shapes.append((q.shape, k.shape)) or 2 * q)
    cache = SimpleNamespace(step_for=lambda *_, **__: ("step", 0, new), windows=[None])
    query, key = torch.randn(2, 4, 3, 5), torch.randn(2, 2, 3, 5)
    with OtherDevice():
        q, k = query.to(OTHER), key.to(OTHER)
        update: Any = PendingUpdate(cache, 0, k, k)  # type: ignore[arg-type]
        out = attend_paged(update, nn.Module(), (q, k, k), ModelMask(mask=None), {})
        assert out is not None and out.device == OTHER and out.is_contiguous()
        assert torch.equal(out.cpu(), (2 * query * new[:, None, :, None]).transpose(1, 2)) and shapes == [((1, 4, 5, 5), (1, 2, 5, 5))]
    cache.step_for = lambda *_, **__: ("step", 0, None)
    whole = attend_paged(PendingUpdate(cache, 0, key, key), nn.Module(), (query, key, key), ModelMask(mask=None), {})  # type: ignore[arg-type]
    assert whole is not None and whole.is_contiguous() and torch.equal(whole, 2 * query.transpose(1, 2))


# -------------------------------------------------------------------------------------------------------------------------- trainer


def test_losses_of_an_evaluation_are_summed_in_float64() -> None:
    trainer = pytest.importorskip("longspan.integrations.trainer")
    loss = torch.tensor(1.0078125, dtype=torch.bfloat16)
    one = SimpleNamespace(
        compute_loss=lambda model, inputs: loss, _prepare_inputs=lambda inputs: inputs, compute_loss_context_manager=nullcontext,
        _batch_weights=iter([3, 0]), _loss_sum=torch.zeros(2, dtype=torch.float64),
    )  # fmt: skip
    for _ in range(3):  # weights 3 and 0, and none
        assert trainer.SpanningMixin.prediction_step(one, None, {}, True) == (loss, None, None)
    assert one._loss_sum.tolist() == [3.0234375, 3.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64])
def test_fields_by_token_are_gathered_as_numbers_and_keep_their_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pytest.importorskip("longspan.integrations.trainer")
    gathered: list[torch.dtype] = []
    plan = SimpleNamespace(unshard=lambda x, dim: gathered.append(x.dtype) or torch.cat([x, x], dim))
    monkeypatch.setattr(trainer, "prepare_batch", lambda *_, **__: {"labels": 1, "num_items_in_batch": 2, "longspan_plan": plan})
    monkeypatch.setattr(trainer, "head_counts", lambda *_: {})
    field, whole = torch.tensor([[1, 0, 0]] * 2).to(dtype), torch.zeros(2, 3, 4)
    outputs = {"field": field, "logits": whole, "loss": torch.tensor(2.0)}
    owner = SimpleNamespace(
        _config=None, roles=SimpleNamespace(heads_size=1, context=None), plan_options={}, model=None, args=SimpleNamespace(device="cpu")
    )
    got = trainer._WholeSequences(lambda **_: dict(outputs), owner)(labels=torch.ones(1), fused_lm_head=True)
    assert got["field"].dtype == dtype and got["field"].tolist() == torch.tensor([[1, 0, 0, 1, 0]] * 2).to(dtype).tolist()
    assert gathered == [torch.uint8 if dtype == torch.bool else dtype] and got["logits"] is whole and got["loss"] is None


def test_contents_of_a_view_are_those_of_its_copy() -> None:
    whole = torch.arange(12).view(3, 4)
    for view in (whole[:, ::2], whole.T, whole[0].expand(5, 4)):
        assert _contents(view) == _contents(view.clone(memory_format=torch.contiguous_format)) != _contents(view + 1)
