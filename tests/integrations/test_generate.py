"""transformers' `generate` over a `PagedCache`: the tokens of one process with transformers' own cache, on any number of ranks."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.integrations.decoding_grid import FAMILIES, NEW, PADS, decode, least_bytes, on_threads, prompts
from tests.integrations.tiny_models import VOCAB, decoding_model
from transformers import DynamicCache

import longspan.integrations.transformers as lst
from longspan._cache.kv_cache import KVCache
from longspan._kernels.paged import to_fp8
from longspan.integrations._paged_attention import absorbed
from longspan.testing import virtual_world

FEW = 12  # decoded tokens; NEW with --whole-grid


def generated(model: Any, cache: Any = None, *, batch: dict[str, Tensor] | None = None, **options: Any) -> list[list[int]]:
    """The new tokens of each row."""
    batch = prompts() if batch is None else batch
    options = {"max_new_tokens": FEW, "do_sample": False, "eos_token_id": None, **options}
    out = model.generate(**batch, past_key_values=cache, **options)
    return out[:, batch["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("--whole-grid")
    if "new" in metafunc.fixturenames:
        metafunc.parametrize("new", [NEW if whole else FEW])
    if "ranks" in metafunc.fixturenames:
        grid = [(family, ranks) for family in FAMILIES for ranks in (2, 3, 4)]
        metafunc.parametrize(("family", "ranks"), grid if whole else [("gemma3", 3)])
    elif "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES if whole else ("gpt_oss", "deepseek_v3"))


def test_greedy_tokens_equal_those_of_eager_attention_without_padding(family: str, new: int) -> None:
    model, ids = decoding_model(family, "eager"), prompts()["input_ids"]
    alone = [ids[i : i + 1, pads:] for i, pads in enumerate(PADS[:2])]
    expected = [generated(model, batch={"input_ids": x, "attention_mask": torch.ones_like(x)}, max_new_tokens=new)[0] for x in alone]
    assert decode(None, family, new).tokens == expected


def test_greedy_tokens_over_ranks_equal_those_of_one_process(family: str, ranks: int, new: int) -> None:
    results = on_threads(family, ranks, new)
    assert [r.tokens for r in results] == [decode(None, family, new).tokens] * ranks
    assert sum(r.data for r in results) <= 1.1 * least_bytes(family, ranks)


def test_sampled_and_assisted_tokens_equal_those_of_a_dynamic_cache() -> None:
    model, assistant = decoding_model("gemma3", "longspan"), decoding_model("llama", "longspan")
    one = {name: x[:1] for name, x in prompts().items()}
    for options, batch in (({"do_sample": True, "top_k": 20}, prompts()), ({"assistant_model": assistant}, one), ({"num_beams": 3}, one)):
        torch.manual_seed(1)
        expected = generated(model, batch=batch, max_new_tokens=7, **options)
        torch.manual_seed(1)
        assert generated(model, lst.PagedCache(model, page_size=4), batch=batch, max_new_tokens=7, **options) == expected, options


class RoundedCache(DynamicCache):
    """transformers' own cache, of keys and values rounded to FP8."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        k, v = (to_fp8(x, 1.0).to(x.dtype) for x in (key_states, value_states))
        return super().update(k, v, *args, **kwargs)


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])
def test_logits_over_fp8_pages_are_those_of_a_cache_rounded_to_fp8(kind: str) -> None:
    model, eager, ids = decoding_model(kind, "longspan"), decoding_model(kind, "eager"), prompts()["input_ids"]

    @torch.no_grad()
    def logits(model: Any, cache: Any) -> Tensor:
        """Of a prompt, then of one more token."""
        parts = [model(x, past_key_values=cache).logits for x in (ids[:, :-1], ids[:, -1:])]
        return torch.cat(parts, 1)

    def by_pages(mesh: Any) -> Tensor:
        return logits(model, lst.PagedCache(model, page_size=4, mesh=mesh, dtype=torch.float8_e4m3fn))

    expected = logits(eager, RoundedCache(config=model.config))
    exact = logits(eager, DynamicCache(config=model.config))
    assert (expected - exact).abs().max() > 100 * (by_pages(None) - expected).abs().max()
    for got in (by_pages(None), *virtual_world(2).run(by_pages)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("deepseek_v3", torch.float8_e4m3fn, "dtype: expected torch.float64, the model's, of latent KV, got torch.float8_e4m3fn"),
        ("llama", torch.float8_e5m2, "dtype: expected torch.float64, the model's, or torch.float8_e4m3fn, got torch.float8_e5m2"),
        ("llama", torch.bfloat16, "dtype: expected torch.float64, the model's, or torch.float8_e4m3fn, got torch.bfloat16"),
    ],
)
def test_dtypes_that_pages_of_a_model_cannot_have(kind: str, dtype: torch.dtype, message: str) -> None:
    model = decoding_model(kind, "longspan")
    with pytest.raises(ValueError, match=re.escape(message)):
        generated(model, lst.PagedCache(model, dtype=dtype))
    with pytest.raises(TypeError, match=r"dtype: expected a torch\.dtype, got str"):
        lst.PagedCache(model, dtype="fp8")


def test_transformers_own_static_cache_runs_with_longspan_attention() -> None:
    model = decoding_model("gemma3", "longspan")
    assert generated(model, cache_implementation="static") == generated(model)


def test_sliding_layers_hold_their_window_only() -> None:
    model = decoding_model("gemma3", "longspan")
    cache = lst.PagedCache(model, page_size=4)
    batch = {name: x[:1] for name, x in prompts().items()}
    generated(model, cache, batch=batch, max_new_tokens=9)
    full, sliding = (cache._groups[window].cache for window in (None, 23))
    held = [c.pages - c.free_pages for c in (full, sliding)]
    assert held[0] == -(-(90 + 8) // 4) and held[1] <= -(-23 // 4) + 2


def test_a_cache_is_reset_and_reused() -> None:
    model = decoding_model("llama", "longspan")
    cache = lst.PagedCache(model, max_tokens=500, page_size=8)
    first = generated(model, cache, max_new_tokens=8)
    free = cache.free_pages
    cache.reset()
    assert cache.free_pages > free and generated(model, cache, max_new_tokens=8) == first


@pytest.mark.parametrize("world", [1, 3])
def test_copies_of_a_prefilled_cache_serve_several_continuations(world: int) -> None:
    model, prompt = decoding_model("gemma3", "longspan"), one_prompt(37)
    tails = [(one_prompt(5) + i) % VOCAB for i in range(3)]

    def continued(cache: Any) -> list[list[int]]:
        with torch.inference_mode():
            model(prompt, past_key_values=cache)
            copies = [copy.deepcopy(cache) for _ in tails]
        batches = ({"input_ids": torch.cat([prompt, tail], 1)} for tail in tails)
        return [generated(model, one, batch=batch, max_new_tokens=6)[0] for one, batch in zip(copies, batches, strict=True)]

    want = continued(DynamicCache(config=model.config))
    assert len(set(map(tuple, want))) == 3

    def on_rank(mesh: Any) -> tuple[list[list[int]], int]:
        cache = lst.PagedCache(model, page_size=4, mesh=mesh)
        return continued(cache), cache.get_seq_length()

    assert (virtual_world(world).run(on_rank) if world > 1 else [on_rank(None)]) == [(want, 37)] * world


def test_a_paged_cache_is_pickled_but_not_copied_by_reference() -> None:
    model, prompt = decoding_model("gemma3", "longspan"), one_prompt(37)
    cache = lst.PagedCache(model, page_size=4)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        other = pickle.loads(pickle.dumps(cache))
        logits = [model(one_prompt(3), past_key_values=c).logits for c in (other, cache)]
    assert torch.equal(*logits) and all(layer.cache is other for layer in other.layers)
    with pytest.raises(TypeError, match=r"expected copy\.deepcopy of a PagedCache"):
        copy.copy(cache)


def test_right_padding_then_decoding_equals_no_padding() -> None:
    model = decoding_model("qwen3", "longspan")
    ids = prompts(rows=1)["input_ids"]
    padded = torch.cat([ids, torch.zeros(1, 7, dtype=torch.long)], 1)
    real = torch.cat([torch.ones_like(ids), torch.zeros(1, 7, dtype=torch.long)], 1)
    cache, plain = lst.PagedCache(model, page_size=8), lst.PagedCache(model, page_size=8)
    token, position = torch.tensor([[5]]), torch.tensor([[90]])
    with torch.no_grad():
        model(input_ids=padded, attention_mask=real, past_key_values=cache)
        mask = torch.cat([real, torch.ones(1, 1, dtype=torch.long)], 1)
        got = model(input_ids=token, attention_mask=mask, position_ids=position, past_key_values=cache).logits
        model(input_ids=ids, past_key_values=plain)
        torch.testing.assert_close(got, model(input_ids=token, position_ids=position, past_key_values=plain).logits)


class ScaledLinear(torch.nn.Linear):
    """A linear layer with an 8-bit weight and a scale."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.scale = float(weight.detach().abs().max() / 448)
        self.weight = torch.nn.Parameter((weight.detach() / self.scale).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def one_prompt(length: int = 60) -> Tensor:
    return torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(0))


def failing(*_: Any) -> None:
    raise KeyError("failed")


class TestFailedForwards:
    @pytest.fixture(autouse=True)
    def _no_grad(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def test_a_rejected_forward_leaves_nothing_behind(self) -> None:
        model, ids = decoding_model("llama", "longspan"), one_prompt(9)
        expected = model(ids, use_cache=False).logits
        cache = lst.PagedCache(model)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="output_attentions"):
            model(ids, past_key_values=cache, output_attentions=True)
        assert torch.equal(model(ids, use_cache=False).logits, expected) and cache.columns == 9

    @pytest.mark.parametrize("layer", [0, 1])
    def test_a_forward_that_fails_can_be_repeated(self, layer: int) -> None:
        model, ids = decoding_model("gemma3", "longspan"), one_prompt()
        expected = model(ids, use_cache=False).logits[:, -1:]
        cache = lst.PagedCache(model, page_size=4)
        for end in (50, 59):
            model(ids[:, cache.columns : end], past_key_values=cache)
        hook = model.model.layers[layer].mlp.register_forward_pre_hook(failing)
        with pytest.raises(KeyError):
            model(ids[:, 59:], past_key_values=cache)
        hook.remove()
        assert cache.columns == 59
        torch.testing.assert_close(model(ids[:, 59:], past_key_values=cache).logits, expected)

    def test_a_first_forward_that_fails_leaves_an_empty_cache(self) -> None:
        model, ids = decoding_model("llama", "longspan"), one_prompt()
        cache = lst.PagedCache(model)
        hook = model.lm_head.register_forward_pre_hook(failing)
        with pytest.raises(KeyError):
            model(ids, past_key_values=cache)
        hook.remove()
        assert cache.columns == 0
        torch.testing.assert_close(model(ids.expand(2, -1), past_key_values=cache).logits[:1], model(ids, use_cache=False).logits)

    def test_a_second_forward_that_fails_keeps_the_one_token_before(self) -> None:
        model, ids = decoding_model("llama", "longspan"), one_prompt(5)
        cache = lst.PagedCache(model)
        model(ids[:, :1], past_key_values=cache)
        hook = model.lm_head.register_forward_pre_hook(failing)
        with pytest.raises(KeyError):
            model(ids[:, 1:], past_key_values=cache)
        hook.remove()
        assert cache.columns == 1
        torch.testing.assert_close(model(ids[:, 1:], past_key_values=cache).logits, model(ids, use_cache=False).logits[:, 1:])

    @pytest.mark.parametrize("part", ["model.layers.0.mlp", "model.layers.1.mlp", "lm_head"])
    def test_after_a_forward_that_is_not_undone_all_calls_raise_until_a_reset(self, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, ids = decoding_model("llama", "longspan"), one_prompt(9)
        expected = model(ids, use_cache=False).logits
        cache = lst.PagedCache(model)
        model(ids[:, :7], past_key_values=cache)

        def refuses(*_: Any) -> None:
            raise ValueError("pages were given back")

        hook = model.get_submodule(part).register_forward_pre_hook(failing)
        with monkeypatch.context() as patched, pytest.raises(KeyError):
            patched.setattr(KVCache, "check_truncate", refuses)
            model(ids[:, 7:], past_key_values=cache)
        hook.remove()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"the last forward with this cache ended before .* call cache.reset\(\)"):
                model(ids[:, 7:], past_key_values=cache)
        with pytest.raises(RuntimeError, match="the last forward ended before"):
            cache.crop(-1)
        cache.reset()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected)

    def test_a_cache_without_free_pages_stays_as_it_was(self) -> None:
        model, ids = decoding_model("llama", "longspan"), one_prompt()
        cache = lst.PagedCache(model, max_tokens=8, page_size=4)
        model(ids[:, :12], past_key_values=cache)
        with pytest.raises(RuntimeError, match="free pages"):
            model(ids[:, 12:60], past_key_values=cache)
        assert cache.columns == 12
        cache.crop(-2)
        expected = model(ids[:, :12], use_cache=False).logits[:, -2:]
        torch.testing.assert_close(model(ids[:, 10:12], past_key_values=cache).logits, expected)

    def test_a_crop_that_raises_changes_no_layer(self) -> None:
        model, ids = decoding_model("gemma3", "longspan"), one_prompt()
        cache = lst.PagedCache(model, page_size=4)
        for end in (50, 51, 52, 53, 54, 55, 56, 57, 58, 59):
            model(ids[:, cache.columns : end], past_key_values=cache)
        with pytest.raises(ValueError, match="were given back"):
            cache.crop(-9)
        expected = model(ids, use_cache=False).logits[:, -1:]
        torch.testing.assert_close(model(ids[:, 59:], past_key_values=cache).logits, expected)

    def test_selecting_no_row_empties_the_cache(self) -> None:
        model, ids = decoding_model("llama", "longspan"), one_prompt()
        cache = lst.PagedCache(model)
        model(ids, past_key_values=cache)
        cache.batch_select_indices(torch.zeros(1, dtype=torch.bool))
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits)


def test_pages_are_freed_with_the_last_reference_to_the_cache() -> None:
    cache = lst.PagedCache(decoding_model("llama", "longspan"))
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_a_first_chunk_of_padding_only_is_skipped() -> None:
    model, ids = decoding_model("deepseek_v3", "longspan"), one_prompt(200)
    real = (torch.arange(200) >= 120).long()[None]
    alone = {"input_ids": ids[:, 120:], "attention_mask": real[:, 120:]}
    expected = generated(model, batch=alone)
    batch = {"input_ids": ids, "attention_mask": real}
    assert generated(model, lst.PagedCache(model, page_size=8), batch=batch, prefill_chunk_size=100) == expected


def test_ranks_with_different_tokens_all_raise() -> None:
    model = decoding_model("llama", "longspan")

    def run(mesh: Any) -> str:
        cache = lst.PagedCache(model, mesh=mesh)
        with torch.no_grad():
            model(one_prompt(), past_key_values=cache)
            with pytest.raises(ValueError, match="new tokens: rank 1 has"):
                model(torch.tensor([[3 + mesh.rank]]), past_key_values=cache)
        return f"{cache.columns} columns"

    assert virtual_world(2).run(run) == ["60 columns"] * 2


def test_ranks_generate_the_tokens_that_rank_0_samples() -> None:
    from longspan.integrations.generation import GenerateOptions, generate

    model = decoding_model("llama", "longspan")

    def run(mesh: Any) -> list[int]:
        tokens: list[int] = []
        generate(model, one_prompt(9), GenerateOptions(new_tokens=8, temperature=1.0, seed=mesh.rank), mesh=mesh, decoded=tokens.append)
        return tokens

    first, second = virtual_world(2).run(run)
    assert first == second and len(first) == 8


class TestErrors:
    def test_prompts_and_options_of_generation(self) -> None:
        from longspan.integrations.generation import GenerateOptions, generate

        for wrong in ({"new_tokens": 0}, {"chunk": 0}, {"page_size": -1}, {"temperature": -1.0}, {"temperature": float("nan")}):
            with pytest.raises(ValueError, match=f"GenerateOptions: expected .*{next(iter(wrong))}"):
                GenerateOptions(**wrong)  # type: ignore[arg-type]
        for prompt in (one_prompt(9).expand(2, -1), one_prompt(9)[:, :0], one_prompt(9)[0]):
            with pytest.raises(ValueError, match=r"expected a prompt \[1, S\]"):
                generate(decoding_model("llama", "longspan"), prompt, GenerateOptions(new_tokens=1))

    def test_quantized_projections_of_latent_vectors(self) -> None:
        model = decoding_model("deepseek_v3", "longspan").float()
        for layer in model.model.layers:
            up = layer.self_attn.kv_b_proj
            layer.self_attn.kv_b_proj = ScaledLinear(up.weight)
        with pytest.raises(ValueError, match=r"expected latent vectors .* got .* ScaledLinear of torch.float8_e4m3fn"), torch.no_grad():
            model(one_prompt(), past_key_values=lst.PagedCache(model))

    @pytest.mark.parametrize("kind", ["subclass", "bias", "weight", "dtype", "rank"])
    def test_other_projections_of_latent_vectors(self, kind: str) -> None:
        class Special(torch.nn.Linear):
            pass

        up = (Special if kind == "subclass" else torch.nn.Linear)(6, 10, bias=kind == "bias")
        if kind == "weight":
            up.weight.__class__ = type("Sharded", (torch.nn.Parameter,), {})
        if kind == "dtype":
            up.weight = torch.nn.Parameter(up.weight.to(torch.float8_e4m3fn), requires_grad=False)
        module = SimpleNamespace(kv_b_proj=up, qk_nope_head_dim=3, v_head_dim=2, kv_lora_rank=7 if kind == "rank" else 6)
        update = SimpleNamespace(k=torch.ones(1, 1, 4, 6), v=torch.ones(1, 1, 4, 5))
        with pytest.raises(ValueError, match="expected latent vectors"):
            absorbed(module, torch.ones(1, 2, 4, 8), update)  # type: ignore[arg-type]

    def test_local_attention_layers(self) -> None:
        from transformers import GPTNeoConfig

        config = GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]], attn_implementation="longspan")
        with pytest.raises(ValueError, match="local attention layers of GPTNeoConfig"):
            lst.PagedCache(config)

    def test_another_attention_implementation(self) -> None:
        with pytest.raises(ValueError, match="expected a model with attn_implementation='longspan'"):
            lst.PagedCache(decoding_model("llama", "sdpa"))

    def test_too_few_pages(self) -> None:
        model = decoding_model("llama", "longspan")
        with pytest.raises(RuntimeError, match="free pages"):
            generated(model, lst.PagedCache(model, max_tokens=60, page_size=8))

    def test_another_batch_size(self) -> None:
        model = decoding_model("llama", "longspan")
        cache = lst.PagedCache(model)
        generated(model, cache, max_new_tokens=2)
        with pytest.raises(ValueError, match="expected 2 batch rows as this cache holds, got 1"):
            model(input_ids=torch.ones(1, 1, dtype=torch.long), past_key_values=cache)

    def test_changed_padding(self) -> None:
        model = decoding_model("llama", "longspan")
        cache, batch = lst.PagedCache(model), prompts()
        batch["attention_mask"][1, [36, 37, 38, 39]] = torch.tensor([0, 1, 1, 0])
        with torch.no_grad():
            model(**batch, past_key_values=cache)
            other = torch.cat([batch["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
            other[1, [36, 37, 38, 39]] = torch.tensor([1, 0, 0, 1])  # as many tokens, with the same sum of places
            with pytest.raises(ValueError, match="expected the padding of earlier columns"):
                model(input_ids=torch.ones(2, 1, dtype=torch.long), attention_mask=other, past_key_values=cache)

    def test_padding_of_columns_that_had_none(self) -> None:
        model = decoding_model("llama", "longspan")
        cache, ids = lst.PagedCache(model), one_prompt(9)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
            other = torch.ones(1, 10, dtype=torch.long)
            other[0, 4] = 0
            with pytest.raises(ValueError, match="expected the padding of earlier columns"):
                model(input_ids=ids[:, :1], attention_mask=other, past_key_values=cache)

    def test_a_plan_and_a_cache(self) -> None:
        model = decoding_model("llama", "longspan")

        def run(mesh: Any) -> None:
            batch = dict(lst.prepare_batch(prompts(rows=1), mesh, config=model.config))
            with pytest.raises(ValueError, match="either a plan or a PagedCache"), torch.no_grad():
                model(**{**batch, "use_cache": True}, past_key_values=lst.PagedCache(model))

        virtual_world(2).run(run)


@pytest.mark.parametrize(
    ("kv_length", "kv_offset", "want"), [(5, 0, "11011"), (3, 2, "011"), (7, 0, "1101100"), (4, 3, "1100"), (2, 6, "00")]
)
def test_keys_of_a_static_cache_that_a_mask_does_not_cover_are_not_real(kv_length: int, kv_offset: int, want: str) -> None:
    real = lst._real_keys(torch.tensor([[1, 1, 0, 1, 1], [0, 1, 0, 1, 1]]), kv_length, kv_offset)
    assert real.dtype == torch.bool and "".join(str(int(x)) for x in real[0]) == want


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_few_tokens_after_a_dynamic_cache_see_what_they_would_in_one_forward(last: int) -> None:
    model, ids = decoding_model("gemma3", "longspan"), one_prompt(23)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        cache = model(input_ids=ids[:, :-last], use_cache=True).past_key_values
        logits = model(input_ids=ids[:, -last:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(logits, whole[:, -last:], rtol=1e-4, atol=1e-5)
