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
from longspan.integrations import _paged_attention, memory, prepare_batch
from longspan.integrations._batch_parts import own_labels
from longspan.integrations._forward import Forward, in_forward
from longspan.integrations._host_store import HostStore
from longspan.integrations._mixers import _gather_inputs
from longspan.integrations._model_mask import ModelMask
from longspan.integrations._one_query import attend_one_query
from longspan.integrations._paged_attention import absorbed, attend_paged
from longspan.integrations._paged_cache import PagedCache, PendingUpdate
from longspan.integrations._pair_masks import attend_pairs
from longspan.integrations._recent_plans import _contents
from longspan.integrations.loss import linear_token_loss
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


# --------------------------------------------------------------------------------------------------------------------------- memory


def test_a_tensor_on_the_host_is_stored_without_its_graph_and_may_not_change() -> None:
    x = torch.arange(6.0, requires_grad=True) * 2
    stored = HostStore().put(x)
    assert stored.read().data_ptr() == x.data_ptr() and not stored.read().requires_grad
    x.add_(1)
    with pytest.raises(RuntimeError, match="was modified in place"):
        stored.read()


def test_gradients_that_share_memory_are_summed_apart() -> None:
    """The gradient of each weight is that of the chunk's result itself."""
    first, second = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))
    x = torch.zeros(9, 2, requires_grad=True)
    grad = torch.arange(18.0).view(9, 2)
    memory.tiled(lambda part: part + first + second, x, chunk=3).backward(grad.clone())
    want = grad.view(3, 3, 2).sum(0)
    assert first.grad is not None and second.grad is not None and x.grad is not None
    assert torch.equal(first.grad, want) and torch.equal(second.grad, want) and torch.equal(x.grad, grad)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="needs a torch with Tensor.grad_dtype")
def test_the_gradient_of_a_weight_of_several_chunks_is_rounded_to_its_dtype() -> None:
    weight = torch.zeros(5, 3, dtype=torch.bfloat16, requires_grad=True)
    weight.grad_dtype = None  # type: ignore[attr-defined]  # any dtype: autograd does not cast
    hidden, labels = torch.ones(1, 7, 3, dtype=torch.bfloat16), torch.zeros(1, 7, dtype=torch.long)
    linear_token_loss(hidden, weight, labels, count=7, chunk=2, kernel="tiled").backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


def test_values_of_two_dtypes_may_be_close() -> None:
    assert memory._all_close((torch.ones(2).bfloat16(), torch.ones(2)), (torch.ones(2).double(), torch.ones(2).bfloat16()))
    assert not memory._all_close((torch.ones(2), torch.ones(2)), (torch.ones(2).bfloat16(), torch.zeros(2)))


# --------------------------------------------------------------------------------------------------------------------------- layers


def test_a_sink_of_another_dtype_leaves_that_of_queries() -> None:
    query, key = torch.randn(2, 4, 1, 3), torch.randn(2, 2, 5, 3)
    for dtype in (torch.float64, torch.bfloat16):
        out = attend_one_query(query, key, key, ModelMask(mask=None), scale=None, sink=torch.ones(4, dtype=dtype), score_mod=None)
        assert out is not None and out.dtype == torch.float32 and out.is_contiguous()


def test_a_layer_without_attention_gets_the_padding_as_numbers_on_its_device() -> None:
    class Mixer(nn.Module):
        def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> None: ...

    plans = prepare_batch({"input_ids": torch.ones(2, 9, dtype=torch.long), "attention_mask": REAL}, ls.Mesh.abstract(1))["longspan_plan"]
    with in_forward(Forward(plans)):
        for place in ("cpu", OTHER):
            with OtherDevice():
                given = _gather_inputs(Mixer(), (torch.zeros(2, 9, 3).to(place),), {})
                assert given is not None
                mask = given[1]["attention_mask"]
                assert mask.dtype == torch.long and mask.device == torch.device(place) and torch.equal(mask.cpu(), REAL)


def test_labels_of_an_encoder_are_masked_on_their_device() -> None:
    with OtherDevice():
        labels = own_labels({"labels": REAL.to(OTHER)}, REAL == 0, "an encoder")
        assert labels is not None and labels.cpu().tolist() == REAL.masked_fill(REAL == 0, -100).tolist()
