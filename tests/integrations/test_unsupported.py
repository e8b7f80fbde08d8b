"""transformers without a plan, under torch.compile, and settings that raise with a plan."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.tiny_models import FAMILIES, VOCAB, batch_of, model_of, relative, results

import longspan as ls
import longspan.integrations.transformers as lst
from longspan.integrations._model_mask import foreign_part
from longspan.testing import oracle, virtual_world


@pytest.mark.parametrize(("family", "kind"), list(zip(FAMILIES, ("packed", "left", "right", "packed", "plain"))))
def test_without_a_plan_a_model_equals_eager_attention(family: str, kind: str) -> None:
    batch = {**batch_of(kind), "use_cache": False}
    loss, logits, grads = results(model_of(family, "longspan"), batch)
    want_loss, want_logits, want_grads = results(model_of(family), batch)
    rows = batch["attention_mask"].bool() if "attention_mask" in batch else slice(None)
    assert relative(loss, want_loss) < 2e-6 and relative(logits[rows], want_logits[rows]) < 2e-5
    assert all(relative(g, w) < 5e-5 for g, w in zip(grads, want_grads))


def test_generate_without_a_plan_gives_the_tokens_of_eager() -> None:
    for family in ("llama", "gemma2"):
        ids = batch_of("plain", length=37)["input_ids"]
        made = [model_of(family, name).generate(ids, max_new_tokens=6, do_sample=False) for name in ("eager", "longspan")]
        assert made[0].equal(made[1])


@pytest.mark.long
def test_a_whole_model_compiles_to_one_graph_and_a_new_plan_does_not_recompile(pytestconfig: pytest.Config) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager" if pytestconfig.getoption("--whole-grid") else "eager")
    model = model_of("gemma2", "longspan")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for kind, length in (("plain", 157), ("packed", 157), ("packed", 181), ("plain", 199)):
        prepared = lst.prepare_batch(batch_of(kind, length=length), ls.Mesh.abstract(1), config=model.config)
        with torch.no_grad():
            assert relative(compiled(**prepared).logits, model(**prepared).logits) < 1e-6
    assert counter.frame_count <= 2
    with pytest.raises(Exception, match=r"under torch\.compile a model needs longspan_plan"):
        compiled(batch_of("plain")["input_ids"], attention_mask=torch.ones(2, 157), use_cache=False)


def test_layers_that_are_not_causal_see_all_keys_without_a_mask_whatever_their_window() -> None:
    q, k = (torch.randn(2, 4, tokens, 8, generator=torch.Generator().manual_seed(tokens)) for tokens in (5, 13))
    layer = torch.nn.Module()
    out, _ = lst.attention_forward(layer, q, k, k, None, sliding_window=3, is_causal=False)
    assert relative(out.transpose(1, 2), oracle(q, k, k)) < 1e-6


def prepared_for(model: Any, **extra: Any) -> dict[str, Any]:
    return {**lst.prepare_batch(batch_of("plain"), ls.Mesh.abstract(1), config=model.config), **extra}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"attention_mask": torch.ones(2, 157)}, "give attention_mask to prepare_batch"),
        ({"attention_mask": torch.ones(2, 1, 157, 157)}, "expected no mask beside a plan"),
        ({"output_attentions": True}, "output_attentions"),
        ({"segment_bias": 3}, "'segment_bias'"),
    ],
)
def test_arguments_that_a_plan_does_not_cover_raise(extra: dict[str, Any], message: str) -> None:
    model = model_of("llama", "longspan")
    with pytest.raises(ValueError, match=message):
        model(**prepared_for(model, **extra))


def test_dropout_and_caches_raise() -> None:
    model = model_of("llama", "longspan")
    prepared = prepared_for(model)
    cache = model(**{**prepared, "use_cache": True}).past_key_values
    with pytest.raises(ValueError, match="a cache holds a shard"):
        model(**{**prepared, "past_key_values": cache, "use_cache": True})
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        model.train()(**prepared)


def test_layers_that_are_not_causal_and_windows_without_a_plan_raise() -> None:
    model = model_of("gemma3", "longspan")
    plan = ls.plan(ls.causal(), 157, ls.Mesh.abstract(1))
    with pytest.raises(ValueError, match="window of 23 tokens"):
        model(batch_of("plain")["input_ids"], use_cache=False, longspan_plan=plan)
    plans = ls.plan({"full": ls.causal(), "sliding": ls.causal() & ls.sliding_window(23)}, 157, ls.Mesh.abstract(1))
    got = model(batch_of("plain")["input_ids"], use_cache=False, longspan_plan=plans).logits
    assert relative(got, model_of("gemma3")(batch_of("plain")["input_ids"]).logits) < 2e-5
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"expected a causal layer, .* got not a causal layer"):
        model(**prepared_for(model))


def test_a_soft_cap_beside_a_score_mod_raises() -> None:
    layer, x = model_of("llama", "longspan").model.layers[0].self_attn, torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="expected softcap or score_mod, got both"):
        lst.attention_forward(layer, x, x, x, softcap=5.0, score_mod=lambda s, b, h, q, kv: s + 1)


def test_documents_of_cu_seq_lens_that_the_mask_does_not_separate_raise() -> None:
    model, ids = model_of("llama", "longspan"), batch_of("plain")["input_ids"][:1, :20]
    flash = {"cu_seq_lens_q": torch.tensor([0, 8, 20]), "cu_seq_lens_k": torch.tensor([0, 8, 20]), "max_length_q": 12, "max_length_k": 12}
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    both = model(ids, position_ids=positions, **flash, use_cache=False).logits
    assert relative(both[:, 8:], model(ids[:, 8:], use_cache=False).logits) < 1e-5
    with pytest.raises(ValueError, match="beside cu_seq_lens_q"):
        model(ids, **flash, use_cache=False)
    with pytest.raises(ValueError, match="to prepare_batch"):
        model(**prepared_for(model, **flash))


def test_the_error_for_a_foreign_mask_function_names_it() -> None:
    from transformers.masking_utils import and_masks, blockwise_overlay, causal_mask_function, sliding_window_causal_mask_function

    assert foreign_part(causal_mask_function) == foreign_part(sliding_window_causal_mask_function(5)) == ""
    assert foreign_part(and_masks(causal_mask_function, blockwise_overlay(torch.zeros(1, 4)))) == "blockwise_overlay"
    assert foreign_part(and_masks(causal_mask_function, lambda b, h, q, kv: q > kv)).startswith("test_the_error")


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_changing_one_token_changes_exactly_the_tokens_that_see_it(family: str) -> None:
    """In one layer, the tokens of the same document after a token see it, within the window if the layer has one."""
    model = model_of(family, "longspan")
    model.model.layers = model.model.layers[:1]  # gpt-oss: the sliding one
    model.config.num_hidden_layers = 1
    window = FAMILIES[family][2].get("sliding_window", 10**9)
    length, starts, changed = 150, [0, 43, 44, 101], 60
    place = torch.arange(length)
    document = torch.bucketize(place, torch.tensor(starts[1:]), right=True)
    ids = torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(2))
    other = ids.clone()
    other[0, changed] = (other[0, changed] + 5) % VOCAB

    def rank(mesh: Any) -> Any:
        out = []
        for tokens in (ids, other):
            batch = {"input_ids": tokens, "document_ids": document[None]}
            prepared = lst.prepare_batch(batch, mesh, config=model.config, layout="head_tail")
            with torch.no_grad():
                out.append(prepared["longspan_plan"].unshard(model(**prepared).logits, 1))
        return out

    before, after = virtual_world(3).run(rank)[0]
    moved = (before != after).any(-1)[0]
    reached = (document == document[changed]) & (place >= changed) & (place - changed < window)
    assert torch.equal(moved, reached)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_under_autocast_a_layer_casts_as_torch_does(compiled: bool) -> None:
    layer = torch.nn.Module()
    plan = ls.plan(ls.causal(), 37, ls.Mesh.abstract(1))
    q, k, v = (torch.randn(2, heads, 37, dim) for heads, dim in ((6, 8), (2, 8), (2, 5)))

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return lst.attention_forward(layer, *tensors, longspan_plan=plan)[0]

    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    want = attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(q, k, v.bfloat16()), want)
        assert run(q.double(), k.double(), v.double()).dtype == torch.float64


def test_each_layer_under_one_plan_set_uses_its_own_scale_sink_softcap_and_window() -> None:
    layer, window = torch.nn.Module(), 5
    plans = ls.plan({"full": ls.causal(), "sliding": ls.causal() & ls.sliding_window(window)}, 37, ls.Mesh.abstract(1))
    q, k, v = (torch.randn(2, heads, 37, 8) for heads in (6, 2, 2))
    sink = torch.randn(6)

    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return 0.7 * torch.tanh(score / 0.7)

    for scale, sinks, softcap, sliding in product((None, 0.3), (None, sink, 2 * sink), (None, 0.7), (None, window)):
        got, _ = lst.attention_forward(
            layer, q, k, v, scaling=scale, s_aux=sinks, softcap=softcap, sliding_window=sliding, longspan_plan=plans
        )
        mask = ls.causal() if sliding is None else ls.causal() & ls.sliding_window(window)
        want = oracle(q, k, v, mask=mask, scale=scale, sink=sinks, score_mod=None if softcap is None else cap)
        assert relative(got.transpose(1, 2).double(), want) < 1e-5


def test_a_transformers_without_a_function_that_longspan_wraps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from transformers import masking_utils

    monkeypatch.delattr(masking_utils, "_preprocess_mask_arguments")
    with pytest.raises(ImportError, match=r"needs transformers 5\.22, with which it is tested \(cannot import name '_preprocess_mask"):
        importlib.reload(lst)
