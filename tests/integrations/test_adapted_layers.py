"""Adapted attention layers of every family by themselves: left padding, a cache, dropout, against transformers' eager attention."""

from __future__ import annotations

import importlib
import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.integrations.families import tiny_model
from tests.integrations.tiny_models import relative

import longspan as ls
import longspan.integrations.transformers as lst
from longspan.integrations import _adapters, _one_query
from longspan.integrations._adapters import _ADAPTERS, _adapt_llama4, _alibi, _between_projections, adapt
from longspan.integrations._forward import PLAN_KEYWORD, Forward, PlanKeepingCheckpoint, current_forward, described, in_forward
from longspan.integrations._model_mask import ModelMask
from longspan.integrations._relative_bias import RelativeBias, _farthest
from longspan.testing import virtual_world

FAMILIES = ("gptj", "gpt_neo", "codegen", "bloom", "mpt", "falcon")
IDS = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(7))
REAL = (torch.arange(13) >= torch.tensor([[4], [0]])).long()


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_padded_rows_and_of_cached_steps_equal_eager(family: str) -> None:
    eager, model = (tiny_model(family, name) for name in ("eager", "longspan"))
    want = eager(IDS, attention_mask=REAL).logits
    whole = model(IDS, attention_mask=REAL)
    first = model(IDS[:, :9], attention_mask=REAL[:, :9], use_cache=True)
    second = model(IDS[:, 9:], attention_mask=REAL, past_key_values=first.past_key_values, use_cache=True)
    for got in (whole.logits, torch.cat([first.logits, second.logits], 1)):
        assert relative(got[REAL > 0], want[REAL > 0]) < 3e-5


@pytest.mark.parametrize("family", FAMILIES[:-1])  # transformers' Falcon applies none without ALiBi
def test_dropout_of_attention_raises_in_training_only(family: str) -> None:
    model = tiny_model(family, "longspan").eval()
    layers = [m for m in model.modules() if "Attention" in type(m).__name__]
    for layer in layers:
        if family == "mpt":
            layer.attn_dropout_p = 0.25
        for name in ("attn_dropout", "attention_dropout"):
            if isinstance(getattr(layer, name, None), nn.Dropout):
                setattr(layer, name, nn.Dropout(0.25))
    model(IDS)
    with pytest.raises(ValueError, match=r"expected no attention dropout, got dropout=0\.25"):
        model.train()(IDS)


def test_families_of_every_adapter_are_known() -> None:
    assert len(_ADAPTERS) == 11 and all(f"modeling_{family}" in _ADAPTERS for family in FAMILIES)


@torch.no_grad()
def test_a_layer_without_rotary_embedding_scales_queries_by_their_places_in_the_sequence() -> None:
    eager, model = (tiny_model("llama4_text", name) for name in ("eager", "longspan"))
    for made in (eager, model):
        for layer in made.model.layers:
            layer.self_attn.floor_scale, layer.self_attn.attn_scale = 3.0, 0.7
            layer.self_attn.attn_temperature_tuning = True
    want = eager(IDS, use_cache=False).logits
    batch = {"input_ids": IDS}

    def rank(mesh: Any) -> torch.Tensor:
        prepared = lst.prepare_batch(batch, mesh, config=model, layout="head_tail")
        return prepared["longspan_plan"].unshard(model(**prepared).logits, 1)

    assert not all(layer.self_attn.use_rope for layer in model.model.layers)
    for got in virtual_world(2).run(rank):
        assert relative(got, want) < 3e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_that_scale_queries_are_float32_under_every_default_dtype(dtype: torch.dtype) -> None:
    """bfloat16 has no number between 8,160 and 8,192, where the scale of Llama 4 changes."""
    modeling: Any = importlib.import_module("transformers.models.llama4.modeling_llama4")
    config = tiny_model("llama4_text", "longspan").config
    plan, queries = SimpleNamespace(positions=torch.tensor([8000, 8180, 8190, 8191])), []
    module = SimpleNamespace(**vars(modeling))
    module.Llama4TextAttention = type("Attention", (modeling.Llama4TextAttention,), {})
    _adapt_llama4(module, lambda layer, q, k, v, mask, **options: (queries.append(q), (q.transpose(1, 2), None))[1])  # type: ignore[arg-type]
    layer = next(m for m in (module.Llama4TextAttention(config, i) for i in range(config.num_hidden_layers)) if not m.use_rope)
    x = torch.randn(1, 4, config.hidden_size)
    with torch.no_grad():
        layer(x, None, None, **{PLAN_KEYWORD: plan})
        torch.set_default_dtype(dtype)
        try:
            layer(x, None, None, **{PLAN_KEYWORD: plan})
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(*queries, rtol=1e-6, atol=1e-7)


def test_alibi_adds_a_slope_per_head_and_distance() -> None:
    mod = _alibi(torch.tensor([0.5, 2.0]))
    h, q, kv = torch.arange(2)[:, None, None], torch.arange(2)[:, None], torch.arange(3)
    got = mod(torch.ones(2, 2, 3), torch.zeros(()), h, q, kv)
    assert got.tolist() == [[[1.0, 1.5, 2.0], [0.5, 1.0, 1.5]], [[1.0, 3.0, 5.0], [-1.0, 1.0, 3.0]]]


def test_families_with_attention_classes_of_their_own_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("OwnModel", (nn.Module,), {"forward": lambda self: None, "base_model_prefix": "model", "__module__": __name__})
    config = type("Config", (), {"model_type": "own"})()
    adapt(kind, config, lst.attention_forward)
    first = kind.forward
    adapt(kind, config, lst.attention_forward)
    assert kind.forward is first and first._longspan_guarded
    monkeypatch.setitem(globals(), "OWN_ATTENTION_CLASSES", {"eager": 1, "longspan": 2})
    adapt(kind, config, lst.attention_forward)
    monkeypatch.setitem(globals(), "OWN_ATTENTION_CLASSES", {"eager": 1, "sdpa": 2})
    with pytest.raises(ValueError, match="got OwnModel, which has classes of its own for 'eager', 'sdpa'"):
        adapt(kind, config, lst.attention_forward)
    monkeypatch.setitem(globals(), "OWN_ATTENTION_CLASSES", 3)
    for model_type, alibi in (("falcon", False), ("other", True)):
        adapt(kind, type("Config", (), {"model_type": model_type, "alibi": alibi})(), lst.attention_forward)
    with pytest.raises(ValueError, match=r"expected config\.alibi=False for Falcon"):
        adapt(kind, type("Config", (), {"model_type": "falcon", "alibi": True})(), lst.attention_forward)


# ------------------------------------------------------------------------------------------------------------------- relative bias


@pytest.mark.parametrize("is_decoder", [True, False])
@pytest.mark.parametrize("past", [0, 5])
def test_the_relative_bias_of_t5_is_that_of_its_table(is_decoder: bool, past: int) -> None:
    """Also beyond the distance from which all have the last bucket."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=12, d_kv=4, num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=11, is_decoder=is_decoder
    )
    torch.manual_seed(2)
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    assert _farthest(layer) == 11
    mod = RelativeBias(layer).score_mod(past)
    assert mod is not None and RelativeBias(T5Attention(config, layer_idx=0)).score_mod(past) is None
    q, kv, h = torch.arange(20)[:, None], torch.arange(25), torch.arange(3)[:, None, None]
    buckets = layer._relative_position_bucket(kv - q - past, bidirectional=not is_decoder, num_buckets=8, max_distance=11)
    want = layer.relative_attention_bias(buckets).permute(2, 0, 1) + 1
    torch.testing.assert_close(mod(torch.ones(3, 20, 25), torch.zeros(()), h, q, kv), want)
    half = RelativeBias(T5Attention(config, has_relative_attention_bias=True, layer_idx=0).bfloat16()).score_mod(past)
    assert half is not None and half(torch.ones(3, 20, 25).bfloat16(), torch.zeros(()), h, q, kv).dtype == torch.float32
    layer.relative_attention_max_distance = 8 // (2 if is_decoder else 4) + 1
    assert _farthest(layer) == layer.relative_attention_max_distance
    layer.relative_attention_max_distance -= 1
    with pytest.raises(ValueError, match=f"above {4 if is_decoder else 2}, the distances of T5Attention .*=8, got"):
        _farthest(layer)


# ------------------------------------------------------------------------------------------------------------------------ one query


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -1.0, 0.0, 2.0])])
@pytest.mark.parametrize("grouped", [True, False])
def test_one_query_equals_a_softmax(sink: Any, grouped: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, s, d, generator=generator) for n, s, d in ((4, 1, 3), (4 - 2 * grouped, 5, 3), (4 - 2 * grouped, 5, 6)))
    row = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    repeated = [x.repeat_interleave(4 // x.shape[1], 1) for x in (k, v)]
    for scale in (None, 0.7):
        for visible in (None, row, row[:1]):
            scores = q @ repeated[0].transpose(2, 3) * (3**-0.5 if scale is None else scale)
            scores = scores if visible is None else scores.masked_fill(~visible[:, None, None], -torch.inf)
            columns = scores if sink is None else torch.cat([scores, sink[:, None, None].expand(2, 4, 1, 1)], -1)
            want = (columns.softmax(-1)[..., :5] @ repeated[1]).transpose(1, 2)
            got = _one_query.attend_one_query(q, k, v, ModelMask(mask=None, row=visible), scale=scale, sink=sink, score_mod=None)
            torch.testing.assert_close(got, want)
            assert got is not None and got.is_contiguous()
    assert _one_query.attend_one_query(q, k, v, None, scale=None, sink=sink, score_mod=None) is None


# ------------------------------------------------------------------------------------------------------------------- checkpoints


def test_a_recomputed_function_runs_in_the_forward_of_its_first_run() -> None:
    runs: list[Any] = []
    checkpoint = PlanKeepingCheckpoint(lambda run, *args, **kwargs: (run, args, kwargs))

    def run(fails: bool = False) -> int:
        forward = current_forward.get()
        runs.append((forward, None if forward is None else forward.in_decoder))
        if forward is not None:
            forward.mixer, forward.in_decoder = "other", False
        if fails:
            raise KeyError
        return 3

    assert checkpoint(run, 1, a=2) == (run, (1,), {"a": 2})
    forward = Forward(1)
    forward.in_decoder = True
    with in_forward(forward):
        within, args, kwargs = checkpoint(run, 1, a=2)
    assert args == (1,) and kwargs == {"a": 2}
    forward.in_decoder, forward.mixer = False, "mine"
    assert within() == 3 and runs[-1] == (forward, True) and (forward.in_decoder, forward.mixer) == (False, "mine")
    with pytest.raises(KeyError):
        within(fails=True)
    assert (forward.in_decoder, forward.mixer) == (False, "mine") and current_forward.get() is None
    layer = nn.Linear(2, 2)
    assert described(layer) == "Linear"
    layer.layer_idx = 0  # type: ignore[assignment]
    assert described(layer) == "Linear of layer 0"


# ----------------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(("family", "name"), [("falcon", "FalconAttention"), ("bloom", "BloomAttention"), ("mpt", "MptAttention")])
def test_adapted_layers_have_the_parameters_and_defaults_of_transformers(family: str, name: str) -> None:
    model = tiny_model(family, "longspan")
    layer = next(m for m in model.modules() if type(m).__name__ == name)
    ours = inspect.signature(type(layer).forward, follow_wrapped=False).parameters
    theirs = inspect.signature(type(layer).forward.__wrapped__).parameters
    named = [parameter for parameter in ours.values() if parameter.kind is not parameter.VAR_KEYWORD]
    assert [p.name for p in named] == list(theirs)[: len(named)] and len(named) > 4
    defaults = {p.name: p.default for p in theirs.values()}
    assert {p.name: p.default for p in named} == {p.name: defaults[p.name] for p in named}


@pytest.mark.parametrize("tokens", [None, 7])
@pytest.mark.parametrize("training", [True, False])
def test_queries_and_keys_get_the_dtype_of_values(tokens: int | None, training: bool) -> None:
    """Rotary embeddings and half precision leave float32 queries and keys beside 16-bit values."""
    calls: list[Any] = []

    def attend(*args: Any, **options: Any) -> tuple[torch.Tensor, str]:
        calls.append((args, options))
        return torch.zeros(2, 5, 3, 4), "weights"

    own = lambda *args: ("own", *args)
    attn = _between_projections(lambda self: 0.5, lambda self: tokens)(attend, own)
    layer = nn.Module().train(training)
    layer.attn_dropout = nn.Dropout(0.25)
    query, key, value = (torch.ones(2, 3, 5, 4, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.bfloat16))
    assert attn(layer, query, key, value, "a tensor") == ("own", layer, query, key, value, "a tensor")
    out, weights = attn(layer, query, key, value, mask := ModelMask(mask=ls.causal()))
    assert out.shape == (2, 3, 5, 4) and weights == "weights"
    (((module, *qkv, given), options),) = calls
    assert module is layer and [t.dtype for t in qkv] == [torch.bfloat16] * 3 and (given is mask) == (tokens is None)
    assert options == {"scaling": 0.5, "dropout": 0.25 if training else 0.0, "sliding_window": tokens}


@torch.no_grad()
def test_clipped_projections_of_mpt_equal_eager() -> None:
    eager, model = (tiny_model("mpt", name) for name in ("eager", "longspan"))
    for made in (eager, model):
        for layer in made.modules():
            if type(layer).__name__ == "MptAttention":
                layer.clip_qkv = 0.05
    assert relative(model(IDS).logits, eager(IDS).logits) < 3e-5
    assert relative(tiny_model("mpt", "eager")(IDS).logits, eager(IDS).logits) > 1e-3


def test_models_and_parts_that_ask_for_longspan_are_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(_adapters, "adapt", lambda *args: made.append(args))

    class Model(nn.Module):
        base_model_prefix = "model"

        def __init__(self, config: Any, part: nn.Module | None = None) -> None:
            super().__init__()
            self.config, self.part, self.linear = config, part, nn.Linear(2, 3)

    class Part(Model):
        pass

    attend: Any = object()
    configs = {name: SimpleNamespace(_attn_implementation=name) for name in ("longspan", "eager")}
    init = _adapters.adapting(lambda self, config, *args: made.append((config, args)), attend)
    init(Model(None), configs["eager"], 1)
    init(Model(None), configs["longspan"], 2)
    init(Model(None), SimpleNamespace())
    assert made[:3] == [(configs["eager"], (1,)), (configs["longspan"], (2,)), (Model, configs["longspan"], attend)] and len(made) == 4
    later = _adapters.adapting_later(lambda self, name: setattr(self, "asked", name), attend)
    for outer, inner in (("eager", "longspan"), ("longspan", "eager"), ("longspan", "longspan")):
        made.clear()
        model = Model(configs[outer], Part(configs[inner]))
        model.part.linear.config = configs["longspan"]  # type: ignore[union-attr]  # of no model
        later(model, "given")
        asks = [(kind, configs[name]) for kind, name in ((Model, outer), (Part, inner)) if name == "longspan"]
        assert model.asked == "given" and made == [(kind, config, attend) for kind, config in asks]
