"""transformers' `generate` over a `PagedCache`: the tokens of one process with transformers' own cache, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.integrations.tiny_models import VOCAB, decoding_model

import longspan.integrations.transformers as lst
from longspan.testing import virtual_world

FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3")
NEW, FEW = 64, 12  # decoded tokens, with --whole-grid and without
PADS = (0, 37, 5, 60)


def prompts(rows: int = 2, length: int = 90) -> dict[str, Tensor]:
    """Left-padded prompts of different lengths."""
    ids = torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))
    real = torch.arange(length) >= torch.tensor(PADS)[:rows, None]
    return {"input_ids": ids.where(real, 0), "attention_mask": real.long()}


def generated(model: Any, cache: Any = None, *, batch: dict[str, Tensor] | None = None, **options: Any) -> list[list[int]]:
    """The new tokens of each row."""
    batch = prompts() if batch is None else batch
    options = {"max_new_tokens": FEW, "do_sample": False, "eos_token_id": None, **options}
    out = model.generate(**batch, past_key_values=cache, **options)
    return out[:, batch["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def on_rank(mesh: Any, family: str, new: int = FEW) -> list[list[int]]:
    """Prefill in chunks, then one forward per token, over the ranks of a mesh."""
    model = decoding_model(family, "longspan")
    cache = lst.PagedCache(model, page_size=8, mesh=mesh)
    return generated(model, cache, prefill_chunk_size=70, max_new_tokens=new)


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
    assert on_rank(None, family, new) == expected


def test_greedy_tokens_over_ranks_equal_those_of_one_process(family: str, ranks: int, new: int) -> None:
    alone = on_rank(None, family, new)
    assert virtual_world(ranks).run(lambda mesh: on_rank(mesh, family, new)) == [alone] * ranks


def test_bytes_of_a_decoded_token_are_the_least_possible() -> None:
    """Partial results are reduced and gathered in shares: no rank sends more than the two halves of an all-reduce."""
    model = decoding_model("llama", "longspan").float()
    world, ranks, sent = virtual_world(3), 3, []
    batch = prompts(rows=3)

    def run(mesh: Any) -> None:
        cache = lst.PagedCache(model, page_size=8, mesh=mesh)
        for new in (1, 11):  # the first call prefills, too
            if new == 11:
                cache.reset()
            generated(model, cache, batch=batch, max_new_tokens=new)
            if mesh.rank == 0:
                sent.append(world.bytes_sent)

    world.run(run)
    config = model.config
    decoded = (sent[1] - 2 * sent[0]) / 10  # ten decoded tokens of three sequences more than the prefill
    rows = 3 * config.num_attention_heads * config.num_hidden_layers
    least = (ranks - 1) * rows * ((config.head_dim + 1) + config.head_dim) * 4  # partial out and lse, then out, in float32
    assert decoded <= 1.1 * least


def test_sampled_and_assisted_tokens_equal_those_of_a_dynamic_cache() -> None:
    model, assistant = decoding_model("gemma3", "longspan"), decoding_model("llama", "longspan")
    one = {name: x[:1] for name, x in prompts().items()}
    for options, batch in (({"do_sample": True, "top_k": 20}, prompts()), ({"assistant_model": assistant}, one), ({"num_beams": 3}, one)):
        torch.manual_seed(1)
        expected = generated(model, batch=batch, **options)
        torch.manual_seed(1)
        assert generated(model, lst.PagedCache(model, page_size=4), batch=batch, **options) == expected, options


def test_transformers_own_static_cache_runs_with_longspan_attention() -> None:
    model = decoding_model("gemma3", "longspan")
    assert generated(model, cache_implementation="static") == generated(model)


def test_sliding_layers_hold_their_window_only() -> None:
    model = decoding_model("gemma3", "longspan")
    cache = lst.PagedCache(model, page_size=4)
    batch = {name: x[:1] for name, x in prompts().items()}
    generated(model, cache, batch=batch, max_new_tokens=40)
    full, sliding = (cache._groups[window].cache for window in (None, 23))
    held = [c.pages - c.free_pages for c in (full, sliding)]
    assert held[0] == -(-(90 + 39) // 4) and held[1] <= -(-23 // 4) + 2


def test_a_cache_is_reset_and_reused() -> None:
    model = decoding_model("llama", "longspan")
    cache = lst.PagedCache(model, max_tokens=500, page_size=8)
    first = generated(model, cache, max_new_tokens=8)
    free = cache.free_pages
    cache.reset()
    assert cache.free_pages > free and generated(model, cache, max_new_tokens=8) == first


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


class TestErrors:
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
        with torch.no_grad():
            model(**batch, past_key_values=cache)
            other = torch.cat([batch["attention_mask"].roll(1, 0), torch.ones(2, 1, dtype=torch.long)], 1)
            with pytest.raises(ValueError, match="expected the padding of earlier columns"):
                model(input_ids=torch.ones(2, 1, dtype=torch.long), attention_mask=other, past_key_values=cache)

    def test_a_plan_and_a_cache(self) -> None:
        model = decoding_model("llama", "longspan")

        def run(mesh: Any) -> None:
            batch = dict(lst.prepare_batch(prompts(rows=1), mesh, config=model.config))
            with pytest.raises(ValueError, match="either a plan or a PagedCache"), torch.no_grad():
                model(**{**batch, "use_cache": True}, past_key_values=lst.PagedCache(model))

        virtual_world(2).run(run)
