"""Layers that mix tokens without attention run on whole sequences: hybrids on several ranks equal one process."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.families import tiny_model
from tests.integrations.tiny_models import recompute

import longspan as ls
import longspan.integrations.transformers as lst
from longspan._plan.named_layouts import head_tail
from longspan._plan.relayout import Relayout, RowsLayout, relayout
from longspan.integrations import _mixers
from longspan.integrations._mixers import _check_others, mixers_of, reject_compiled
from longspan.testing import virtual_world

LENGTH = 37


def batch_of(rows: int, kind: str = "plain") -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 61, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind != "plain":
        real = torch.arange(LENGTH) >= torch.arange(rows)[:, None] * 3 + 2
        real = real if kind == "left" else real.flip(1)
        batch |= {"attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}
        if kind == "left":
            batch["labels"].scatter_(1, real.int().argmax(1, keepdim=True), -100)
    return batch


def results(model: Any, arguments: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    params = list(model.parameters())
    loss = model(**arguments).loss
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return loss.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads)]


def assert_ranks_equal_one(model: Any, batch: dict[str, Any], ranks: int, **options: Any) -> None:
    wanted = results(model, {**batch, "use_cache": False})

    def rank(mesh: Any) -> Any:
        return results(model, lst.prepare_batch(batch, mesh, config=model, gradients="sum", **options))

    shares = virtual_world(ranks).run(rank)
    assert abs(float(sum(s[0] for s in shares) - wanted[0])) < 1e-5 * float(wanted[0])
    largest = max(float(g.abs().max()) for g in wanted[1])
    for i, grad in enumerate(wanted[1]):
        assert float((sum(s[1][i] for s in shares) - grad).abs().max()) < 2e-5 * largest, i


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# More rows than ranks, as many, fewer (each rank computes all rows), and an uneven share.
@pytest.mark.parametrize(("rows", "ranks", "kind"), [(5, 2, "right"), (3, 3, "left"), (1, 3, "plain"), (2, 4, "left")])
def test_a_hybrid_on_ranks_gives_the_loss_and_gradients_of_one_process(rows: int, ranks: int, kind: str) -> None:
    assert_ranks_equal_one(tiny_model("lfm2", "longspan"), batch_of(rows, kind), ranks)


def test_recomputed_layers_of_a_hybrid_find_the_plan() -> None:
    model = tiny_model("qwen3_next", "longspan").train()
    recompute(model)
    assert_ranks_equal_one(model, batch_of(2), 2, layout="head_tail")


@pytest.mark.parametrize(("family", "rows", "ranks", "kind"), [("qwen3_next", 1, 2, "plain"), ("qwen3_5_text", 2, 4, "left")])
def test_a_gated_delta_net_is_divided_by_heads(
    family: str, rows: int, ranks: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    model = tiny_model(family, "longspan")
    calls: list[Any] = []
    run = _mixers.run_by_heads
    monkeypatch.setattr(_mixers, "run_by_heads", lambda *args: calls.append(args[1].shape) or run(*args))
    assert_ranks_equal_one(model, batch_of(rows, kind), ranks)
    assert len(calls) == ranks
    assert not _mixers.splits_by_heads(mixers_of(model)[0], 3)  # 16 key heads
    if ranks == 2:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.1)
        assert_ranks_equal_one(other, batch_of(rows, kind), ranks)


def test_a_recomputation_that_ends_inside_of_a_mixer_leaves_no_mixer_behind() -> None:
    """torch stops a recomputation at the last tensor that the backward pass needs: here within the mixer, the last module of its block."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = tiny_model("nemotron_h", "longspan").config.to_dict() | {"layers_block_type": ["attention", "mamba"], "num_hidden_layers": 2}
    config |= {"layer_types": ["full_attention", "linear_attention"], "hybrid_override_pattern": "*M"}
    model = NemotronHForCausalLM(NemotronHConfig(**config)).train()
    model.set_attn_implementation("longspan")
    assert mixers_of(model)
    recompute(model)
    assert_ranks_equal_one(model, batch_of(2), 2)


def test_rows_move_to_their_ranks_and_back() -> None:
    x = torch.randn(5, LENGTH, 3, dtype=torch.float64)
    before = head_tail(LENGTH, 3)
    after = RowsLayout(length=LENGTH, ranks=3, batch=5)

    def rank(mesh: Any) -> None:
        plan = ls.plan(ls.causal(), LENGTH, mesh, layout=before)
        local = plan.shard(x, 1).requires_grad_()
        there = Relayout(mesh=plan.mesh, before=before, after=after, dim=1)
        back = Relayout(mesh=plan.mesh, before=after, after=before, dim=1)
        rows = relayout(local, there, lambda b: there.moves(local.device, back=b))
        assert torch.equal(rows, x[list(after.local_rows(mesh.rank))])
        again = relayout(rows, back, lambda b: back.moves(local.device, back=b))
        assert torch.equal(again, local)
        weight = torch.randn_like(again)
        (grad,) = torch.autograd.grad((again * weight).sum(), local)
        assert torch.equal(grad, weight)

    virtual_world(3).run(rank)


def test_mixers_are_found_by_their_parts() -> None:
    assert [type(m).__name__ for m in mixers_of(tiny_model("lfm2", "longspan"))] == ["Lfm2ShortConv"]
    assert mixers_of(tiny_model("llama", "longspan")) == []


@pytest.mark.parametrize("name", ["document_ids", "position_ids"])
def test_documents_that_a_mixer_would_not_separate_raise(name: str) -> None:
    model = tiny_model("lfm2", "longspan")
    place = torch.arange(LENGTH).expand(2, -1)
    batch = {**batch_of(2), name: place // 20 if name == "document_ids" else place % 20}
    with pytest.raises(ValueError, match="expected one document per row for Lfm2ShortConv"):
        model(**lst.prepare_batch(batch, ls.Mesh.abstract(1), config=model))


@pytest.mark.parametrize("part", ["", "model.layers.0", "model.layers.0.conv", "model.layers.0.conv.conv"])
def test_a_model_with_a_compiled_mixer_or_a_compiled_module_around_it_raises(part: str) -> None:
    model = tiny_model("lfm2", "longspan")
    model.get_submodule(part).compile(backend="eager")
    with pytest.raises(ValueError, match=r"not supported with a plan under torch\.compile"):
        model(**lst.prepare_batch(batch_of(1), ls.Mesh.abstract(1), config=model))


def test_a_tensor_that_may_be_a_shard_raises() -> None:
    model = tiny_model("lfm2", "longspan")
    for value in (torch.arange(3), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match="got 'lengths' for Conv1d"):
            _check_others(torch.nn.Conv1d(1, 1, 2), {"lengths": value, "scale": torch.tensor(2.0)}, ())
    _check_others(mixers_of(model)[0], {"scale": torch.tensor(2.0), "position_ids": torch.zeros(2, 3)}, ("position_ids",))


def test_layers_are_recomputed_without_a_plan_after_a_forward_with_one() -> None:
    model = tiny_model("lfm2", "longspan").train()
    recompute(model)
    model(**lst.prepare_batch(batch_of(1), ls.Mesh.abstract(1), config=model)).loss.backward()
    model(**batch_of(1), use_cache=False).loss.backward()


def test_a_plan_that_does_not_know_the_padding_raises() -> None:
    model = tiny_model("lfm2", "longspan")
    plan = ls.plan(ls.causal(), LENGTH, ls.Mesh.abstract(1))
    with pytest.raises(ValueError, match="expected a plan from prepare_batch for Lfm2ShortConv"):
        model(input_ids=batch_of(1)["input_ids"], position_ids=torch.arange(LENGTH)[None], longspan_plan=plan, use_cache=False)


def test_a_compiled_hybrid_with_a_plan_raises() -> None:
    model = tiny_model("lfm2", "longspan")
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM has layers that mix tokens .* not supported with a plan under torch\.compile"):
        reject_compiled(model)
    prepared = lst.prepare_batch(batch_of(1), ls.Mesh.abstract(1), config=model)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported)):
        torch.compile(model, backend="eager", fullgraph=True)(**prepared)


def test_plans_of_a_batch_travel_with_its_padding() -> None:
    plans = lst.prepare_batch(batch_of(2, "left"), ls.Mesh.abstract(2))["longspan_plan"]
    again = pickle.loads(pickle.dumps(plans)).on(ls.Mesh.abstract(2, 1))
    assert plans.real_tokens is not None and torch.equal(again.real_tokens, plans.real_tokens)


@pytest.mark.parametrize("kind", ["plain", "left"])
def test_layers_with_chunks_and_scaled_queries_equal_one_process(kind: str) -> None:
    assert_ranks_equal_one(tiny_model("llama4_text", "longspan"), batch_of(2, kind), 3, layout="head_tail")


@pytest.mark.parametrize("layout", ["head_tail", "per_document"])
def test_chunks_of_packed_documents_are_counted_as_on_one_process(layout: str) -> None:
    """By places in the row before transformers 5.23, by positions of the documents since; the second row is one document."""
    restarts = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])
    positions = torch.stack([restarts, torch.arange(LENGTH) + 3])
    model = tiny_model("llama4_text", "longspan")
    assert_ranks_equal_one(model, batch_of(2) | {"position_ids": positions}, 3, layout=layout)


def test_outputs_by_token_are_sharded_and_others_are_kept() -> None:
    """Of a tuple: a tensor [B, S, D] of all tokens; not a state, a tensor of other tokens or one of another rank."""
    module, outputs = (
        torch.nn.Linear(1, 1),
        (torch.randn(2, 9, 5), torch.randn(2, 8, 5), torch.randn(2, 9, 3, 2), torch.randn(2, 9), "state"),
    )
    call = SimpleNamespace(module=module, plan=SimpleNamespace(layout=SimpleNamespace(length=9)), by_heads=False, shard=lambda x: x[:, :4])
    forward: Any = SimpleNamespace(mixer=call, module_ids=set())
    token = _mixers.current_forward.set(forward)
    try:
        got = _mixers._shard_outputs(module, (), outputs)
    finally:
        _mixers.current_forward.reset(token)
    assert [x if isinstance(x, str) else tuple(x.shape) for x in got] == [(2, 4, 5), (2, 8, 5), (2, 9, 3, 2), (2, 9), "state"]
    assert forward.mixer is None and forward.module_ids == {id(module)}
