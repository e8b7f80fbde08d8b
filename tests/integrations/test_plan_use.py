"""A forward with a plan raises unless every attention layer used the plan."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.families import tiny_model
from tests.integrations.tiny_models import batch_of, keep_activations, model_of, recompute, relative, results

import longspan as ls
import longspan.integrations.transformers as lst
from longspan.integrations import _decoders, memory
from longspan.integrations._batch import document_starts
from longspan.integrations._forward import Forward, current_forward, in_forward
from longspan.integrations._plan_use import run_checked, searching
from longspan.testing import virtual_world

SIZES = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}


def tiny(family: str, **settings: Any) -> Any:
    """A model of a family by its class's prefix."""
    import transformers

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def planned(**extra: Any) -> dict[str, Any]:
    return {**lst.prepare_batch(batch_of("plain"), ls.Mesh.abstract(1)), **extra}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_with_another_attention_implementation_raises_before_it_computes_anything(implementation: str) -> None:
    model = model_of("llama", implementation)
    with pytest.raises(ValueError, match=f"expected a model with attn_implementation='longspan', got '{implementation}'"):
        model(**planned())
    with pytest.raises(ValueError, match=f"got '{implementation}'"):
        torch.compile(model, backend="eager")(**planned())
    model.set_attn_implementation("longspan")
    model(**planned())


@pytest.mark.parametrize("config_from", ["the model", "its config"])
def test_prepare_batch_raises_for_another_attention_implementation(config_from: str) -> None:
    model = model_of("llama", "sdpa")
    with pytest.raises(ValueError, match="got 'sdpa'"):
        lst.prepare_batch(batch_of("plain"), ls.Mesh.abstract(2), config=model if config_from == "the model" else model.config)
    model.set_attn_implementation("longspan")
    lst.prepare_batch(batch_of("plain"), ls.Mesh.abstract(2), config=model if config_from == "the model" else model.config)


def test_prepare_batch_reads_the_windows_of_a_model_as_of_its_config() -> None:
    model = model_of("gemma2", "longspan")
    by_model, by_config = (lst.prepare_batch(batch_of("plain"), ls.Mesh.abstract(2), config=c) for c in (model, model.config))
    assert by_model["longspan_plan"]["sliding"].digest == by_config["longspan_plan"]["sliding"].digest


@pytest.mark.parametrize(("family", "recomputed"), [("StableLm", False), ("Nemotron", True)])
def test_layers_that_do_not_pass_the_plan_on_find_it_in_the_context(family: str, recomputed: bool) -> None:
    model = tiny(family, **HEADS, attn_implementation="longspan")
    batch = batch_of("packed")
    want = results(model, {**batch, "use_cache": False})
    if recomputed:
        recompute(model.train())

    def rank(mesh: Any) -> Any:
        return results(model, dict(lst.prepare_batch(batch, mesh, config=model, gradients="sum")))

    shares = virtual_world(3).run(rank)
    assert relative(sum(s[0] for s in shares), want[0]) < 2e-6
    for i, gradient in enumerate(want[2]):
        assert relative(torch.stack([s[2][i] for s in shares]).sum(0), gradient) < 5e-5


def test_a_layer_that_another_checkpoint_function_recomputes_without_its_plan_raises() -> None:
    from torch.utils.checkpoint import checkpoint

    model = tiny("StableLm", **HEADS, attn_implementation="longspan")
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, f=forward, **kwargs: checkpoint(f, *args, use_reentrant=False, **kwargs)
    loss = model(**planned()).loss
    with pytest.raises(ValueError, match=r"StableLmAttention of layer 1 is recomputed outside .*gradient_checkpointing_enable"):
        loss.backward()


@pytest.mark.parametrize("family", ["gpt_oss", "OPT"])
def test_packed_position_ids_raise_for_a_model_that_does_not_look_for_documents_in_them(family: str) -> None:
    sizes = {"ffn_dim": 40, "num_attention_heads": 4, "word_embed_proj_dim": 64, "max_position_embeddings": 256}
    model = model_of(family, "longspan") if family == "gpt_oss" else tiny(family, **sizes, attn_implementation="longspan")
    batch = batch_of("packed")
    with pytest.raises(ValueError, match="expected document_ids, got position_ids that start again"):
        model(**lst.prepare_batch(batch, ls.Mesh.abstract(1), config=model))
    document_ids = document_starts(batch["position_ids"]).cumsum(1)
    separated = model(**lst.prepare_batch({**batch, "document_ids": document_ids}, ls.Mesh.abstract(1), config=model))
    assert relative(separated.logits, model(**batch).logits) > 1e-3


@pytest.mark.parametrize(("family", "kind"), [("OPT", "left"), ("Roberta", "plain")])
def test_tokens_get_the_positions_that_the_model_would_give_to_a_whole_batch(family: str, kind: str) -> None:
    sizes = {"ffn_dim": 40, "word_embed_proj_dim": 64} if family == "OPT" else {"intermediate_size": 40, "is_decoder": True}
    settings = {**sizes, "num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": 1}
    model = tiny(family, **settings, attn_implementation="longspan")
    batch = batch_of(kind)

    def rank(mesh: Any) -> float:
        return float(model(**lst.prepare_batch(batch, mesh, config=model, gradients="sum")).loss.detach())

    want = float(model(**batch).loss.detach())
    assert sum(virtual_world(3).run(rank)) == pytest.approx(want, rel=5e-6)
    with pytest.raises(ValueError, match=r"give the model to prepare_batch"):
        model(**lst.prepare_batch(batch, ls.Mesh.abstract(1)))


def test_a_model_that_takes_no_position_ids_raises() -> None:
    settings = {"d_model": 64, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 40, "vocab_size": 61}
    model = tiny("Bart", **settings, attn_implementation="longspan")
    with pytest.raises(ValueError, match="expected a model that takes position_ids, got BartForCausalLM"):
        model(**planned())


def test_a_model_that_mixes_tokens_without_longspans_attention_raises() -> None:
    settings = {"d_model": 64, "n_layer": 1, "n_head": 4, "d_inner": 40, "vocab_size": 61}
    from transformers import XLNetConfig, XLNetLMHeadModel

    model = XLNetLMHeadModel(XLNetConfig(**settings, attn_implementation="longspan")).eval()
    with pytest.raises((ValueError, NotImplementedError), match="longspan"):
        model(**planned())


def test_layers_that_did_not_use_the_plan_are_named() -> None:
    model = model_of("llama", "longspan")
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM was given longspan_plan, but model\.layers\.1\.self_attn did not use it"):
        model(**planned())


def test_layers_that_mix_tokens_without_attention_are_named() -> None:
    """A convolution inside of attention, and a layer without attention beside layers that have it."""
    model = model_of("llama", "longspan")
    model.model.layers[0].self_attn.local = torch.nn.Conv1d(48, 48, 4)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.local did not use it"):
        model(**planned())
    model = model_of("llama", "longspan")
    model.model.layers[1].self_attn = type(
        "Mixer", (torch.nn.Module,), {"forward": lambda self, hidden_states, **_: (hidden_states, None)}
    )()
    with pytest.raises(ValueError, match=r"model\.layers\.1 did not use it"):
        model(**planned())


def test_a_forward_without_a_plan_works_after_one_that_raised() -> None:
    model = model_of("llama", "longspan")
    with pytest.raises(ValueError, match="segment_bias"):
        model(**planned(segment_bias=3))
    ids = batch_of("plain")["input_ids"]
    assert relative(model(ids).logits, model_of("llama")(ids).logits) < 2e-5


@pytest.mark.parametrize("how", ["a layer's compile()", "torch.compile of a layer", "checkpointing"])
def test_compiled_and_recomputed_layers_count_as_layers_that_used_the_plan(how: str) -> None:
    model = model_of("llama", "longspan")
    want = model(**planned()).loss
    if how == "checkpointing":
        recompute(model.train())
    for i, layer in enumerate(model.model.layers):
        if how == "a layer's compile()":
            layer.compile(backend="aot_eager", fullgraph=True)
        if how == "torch.compile of a layer":
            model.model.layers[i] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    loss = model(**planned()).loss
    loss.backward()
    assert relative(loss, want) < 1e-6


def test_a_compiled_model_with_graph_breaks_uses_the_plan(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--whole-grid"):
        pytest.skip("compiling takes 16 s: runs with --whole-grid")
    model = model_of("llama", "longspan")
    want = model(**planned()).loss
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert relative(compiled(**planned()).loss, want) < 1e-6


def test_ranks_that_are_threads_of_one_model_are_checked_each() -> None:
    model = model_of("gemma2", "longspan")

    def rank(mesh: Any) -> float:
        prepared = lst.prepare_batch(batch_of("plain"), mesh, config=model, gradients="sum")
        return float(model(**prepared).loss.detach())

    want = float(model_of("gemma2")(**batch_of("plain"), use_cache=False).loss.detach())
    assert sum(virtual_world(3).run(rank)) == pytest.approx(want, rel=2e-6)


def test_the_window_of_the_mask_holds_for_layers_that_do_not_state_theirs() -> None:
    sizes = {"num_local_experts": 2, "sliding_window": 11, "max_position_embeddings": 256}
    model = tiny("Phimoe", **HEADS, **sizes, attn_implementation="longspan")
    prepared = lst.prepare_batch(batch_of("plain"), ls.Mesh.abstract(1), config=model)
    want = model(**batch_of("plain"), use_cache=False).loss
    assert relative(model(**prepared).loss, want) < 2e-6


def test_a_model_that_computes_its_loss_by_code_of_its_own_raises() -> None:
    model = model_of("llama", "longspan")
    prepared = planned()
    model(**prepared)
    own_forward = model.forward

    def forward(labels: Any = None, shift_labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        output = own_forward(**kwargs)
        output.loss = output.logits.mean()
        return output

    model.forward = forward
    with pytest.raises(ValueError, match="LlamaForCausalLM computes its loss by code of its own"):
        model(**prepared)
    model(**{name: value for name, value in prepared.items() if name not in ("labels", "shift_labels")})


def test_a_loss_in_compiled_code_is_not_taken_for_the_models_own() -> None:
    model, prepared = model_of("llama", "longspan"), planned()
    want = model(**prepared).loss
    model.compile(backend="eager")
    assert relative(model(**prepared).loss, want) < 2e-6


def test_an_inner_model_with_embeddings_has_the_tokens_of_the_outer_one() -> None:
    model, tokens = model_of("llama", "longspan"), torch.arange(7)[None]
    seen = []

    def inner(**kwargs: Any) -> None:
        forward = current_forward.get()
        seen.append(None if forward is None else forward.tokens)

    def outer(input_ids: torch.Tensor) -> None:
        run_checked(model, inner, (), {"inputs_embeds": torch.zeros(1, 7, 4)})

    run_checked(model, outer, (), {"input_ids": tokens})
    assert seen[0] is tokens


def test_a_mask_in_a_list_of_tensors_raises_with_the_models_name() -> None:
    mask = lst.attention_mask(1, 3, 3)
    with pytest.raises(ValueError, match="gives the mask to cat"):
        torch.cat([torch.zeros(3), mask])  # type: ignore[list-item]


def test_a_call_of_the_forward_method_with_a_plan_raises() -> None:
    model = model_of("llama", "longspan")
    with pytest.raises(ValueError, match="got a call of its forward method"):
        model.forward(**planned())


@pytest.mark.parametrize("family", ["mamba", "gptj"])
def test_long_context_with_a_models_own_loss_uses_the_plan(family: str) -> None:
    """Families whose causal LM does not pass keyword arguments on."""
    batch = {**batch_of("plain", length=29)}
    made = tiny_model(family, "longspan").train()
    want = made(**batch, use_cache=False).loss
    copies = [deepcopy(made) for _ in range(2)]

    def rank(mesh: Any) -> Any:
        model = lst.long_context(copies[mesh.rank], mesh, loss_chunk=None, gradients="sum")
        return model(**batch).loss.detach()

    assert relative(sum(virtual_world(2).run(rank)), want) < 1e-5


def test_cross_attention_that_does_not_run_needs_no_plan() -> None:
    heads = {"num_attention_heads": 4, "multi_query": False, "add_cross_attention": True}
    model = tiny("GPTBigCode", **heads, attn_pdrop=0.0, attn_implementation="longspan")
    want = model(**batch_of("plain"), use_cache=False).loss
    assert relative(model(**planned()).loss, want) < 2e-6


@pytest.mark.parametrize("by", ["its class", "an attribute"])
def test_cross_attention_does_not_take_a_plan_of_one_sequence(by: str) -> None:
    module = type("OwnCrossAttention" if by == "its class" else "OwnAttention", (torch.nn.Module,), {})()
    module.layer_idx, module.is_cross_attention = 3, by == "an attribute"
    plan = ls.plan(ls.causal(), 13, ls.Mesh.abstract(1), heads=4, kv_heads=2)
    query, key = torch.randn(2, 4, 13, 8), torch.randn(2, 2, 13, 8)  # as many keys as tokens: sizes do not tell
    with pytest.raises(ValueError, match=r"got cross-attention, \w+ of layer 3"):
        lst.attention_forward(module, query, key, key, longspan_plan=plan)
    module = type("OwnAttention", (torch.nn.Module,), {})()
    lst.attention_forward(module, query, key, key, longspan_plan=plan)


def test_documents_are_searched_in_positions_unless_a_plan_separates_them(monkeypatch: pytest.MonkeyPatch) -> None:
    find = searching(lambda position_ids, extra=0: ("found", position_ids, extra))
    assert find(1, extra=2) == ("found", 1, 2)
    with in_forward(without := Forward(None)):
        assert find(position_ids=1) == ("found", 1, 0) and not without.searched_documents
    with in_forward(forward := Forward(plan := planned()["longspan_plan"])):
        assert find(1) is None and forward.searched_documents
    checked: list[Any] = []
    monkeypatch.setattr(_decoders, "check_no_documents", lambda *args: checked.append(args[:2]))
    for plan.whole_inputs, in_decoder in ((True, False), (False, True), (True, True)):
        with in_forward(forward := Forward(plan)):
            forward.in_decoder = in_decoder
            assert find(1, 2) is None and find(position_ids=3) is None
    assert checked == [(forward, 1), (forward, 3)], "by the decoder of a model with other inputs"


def test_the_rule_of_positions_is_noted_if_prepare_batch_made_them() -> None:
    batch = batch_of("plain")
    positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    for given, rule in ({}, "by place"), ({"position_ids": positions}, None):
        assert lst.prepare_batch({**batch, **given}, ls.Mesh.abstract(2))["longspan_plan"].position_rule == rule


def test_another_checkpoint_function_after_long_context_raises() -> None:
    def rank(mesh: Any) -> None:
        model, batch = memory.long_context(model_of("llama").train(), mesh), batch_of("plain", 19)
        model(**batch)  # with a plan, checkpoint functions are wrapped
        model(**batch)
        keep_activations(model)
        model(**batch)
        recompute(model)
        for training_batch in (batch, {"input_ids": batch["input_ids"]}):
            with pytest.raises(ValueError, match=r"gradient_checkpointing_enable\(\) was called after long_context"):
                model(**training_batch)
        model.eval()(**batch)
        memory.long_context(model.train(), mesh)(**batch)

    virtual_world(1).run(rank)
