"""`SpanningAccelerator`: masks outside of its context, and batches that it cannot split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations.tiny_models import model_of

import longspan as ls
from longspan.integrations import accelerate as spanning


@contextmanager
def inside(mesh: Any, ids: torch.Tensor, *buffers: torch.Tensor) -> Iterator[None]:
    """The context of an accelerator that splits ids and buffers [B, S] over a mesh."""
    with ls.context_parallel(mesh, buffers=[ids, *buffers], buffer_seq_dims=[1] * (1 + len(buffers))) as context:
        token = spanning._context.set(context)
        try:
            yield
        finally:
            spanning._context.reset(token)


def test_masks_are_dropped_in_the_context_only_and_padding_raises_there() -> None:
    model, ids = model_of("llama", "sdpa"), torch.arange(2, 14).view(2, 6)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    want = model(ids, attention_mask=padded).logits
    spanning._check_model(model)
    spanning._drop_masks(model)
    assert torch.equal(model(ids, attention_mask=padded).logits, want)
    with inside(ls.Mesh.abstract(1), ids):
        with pytest.raises(ValueError, match="got padding"):
            model(ids, attention_mask=padded)
        torch.testing.assert_close(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits)


@pytest.mark.parametrize("first", [2, 4, 8])
@pytest.mark.parametrize("rank", [0, 1])
def test_positions_of_other_tokens_raise_in_the_context(rank: int, first: int) -> None:
    """Documents of `first` and 8 − `first` tokens (8: one document) over two ranks, which hold tokens 0, 1, 6, 7 and 2, 3, 4, 5."""
    model, ids = model_of("llama", "sdpa"), torch.arange(2, 10)[None]
    spanning._check_model(model)
    with inside(ls.Mesh.abstract(2, rank), ids, positions := (torch.arange(8) % first)[None]):
        if first == 8:
            spanning._check_batch(model, (ids,), {"position_ids": positions})
        else:
            with pytest.raises(ValueError, match="got others, as of packed documents"):
                model(ids, position_ids=positions)
        with pytest.raises(ValueError, match="got none: give positions"):
            model(ids)


def test_layers_with_windows_are_not_supported() -> None:
    with pytest.raises(ValueError, match="expected full causal attention, got other layers in Gemma3ForCausalLM"):
        spanning._check_model(model_of("gemma3", "sdpa"))


@pytest.mark.parametrize("config", [{"sliding_window": 5}, {"layer_types": ["full_attention", "conv"]}])
def test_layers_of_other_kinds_are_found_by_their_windows_or_types(config: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 3)
    for settings in ({}, {"sliding_window": None, "layer_types": None}, {"layer_types": ["full_attention"]}):
        model.config = SimpleNamespace(**settings)  # type: ignore[assignment]
        spanning._check_model(model)
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="got other layers in Linear"):
        spanning._check_model(model)


class StandIn(spanning.SpanningAccelerator):
    """An accelerator without accelerate's own state. `prepared`: what accelerate prepares."""

    parallelism_config: Any = None
    torch_device_mesh: Any = None

    def __init__(self, **options: Any) -> None:
        for name, value in options.items():
            setattr(self, name, value)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of accelerate's own `prepare`."""
    calls: list[Any] = []
    monkeypatch.setattr(spanning.Accelerator, "prepare", lambda self, *args, **kwargs: calls.append((args, kwargs)) or "prepared")
    return calls


CP, NO_CP = SimpleNamespace(cp_enabled=True), SimpleNamespace(cp_enabled=False)


@pytest.mark.parametrize(
    ("mesh", "config", "checks", "drops"),
    [
        (None, None, False, False),
        (None, NO_CP, False, False),
        (None, CP, True, False),
        ("mesh", None, True, True),
        ("mesh", NO_CP, True, True),
    ],
)
def test_models_are_checked_where_sequences_are_split(mesh: Any, config: Any, checks: bool, drops: bool, prepared: list[Any]) -> None:
    accelerator = StandIn(context_mesh=mesh, parallelism_config=config)
    model, windowed, optimizer = model_of("llama", "sdpa"), model_of("gemma3", "sdpa"), object()
    assert accelerator.prepare(model, optimizer, torch.nn.Linear(2, 3), device_placement=None) == "prepared"
    ((args, kwargs),) = prepared
    assert args[:2] == (model, optimizer) and kwargs == {"device_placement": None}
    assert len(model._forward_pre_hooks) == checks
    hooked = [name for name, module in model.named_modules() if name and module._forward_pre_hooks]
    assert hooked == ([f"model.layers.{i}.self_attn" for i in range(len(model.model.layers))] if drops else [])
    if checks:
        with pytest.raises(ValueError, match="expected full causal attention"):
            accelerator.prepare(optimizer, windowed)
    else:
        accelerator.prepare(optimizer, windowed)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize(
    ("mesh", "config", "layout", "tokens"),
    [
        (None, None, None, range(8)),
        (None, NO_CP, None, range(8)),
        (None, CP, None, (2, 3, 4, 5)),
        (ls.Mesh.abstract(4, 1), CP, None, (1, 6)),
        (ls.Mesh.abstract(4, 1), None, "contiguous", (2, 3)),
    ],
)
def test_buffers_are_shards_inside_of_the_context(mesh: Any, config: Any, layout: str | None, tokens: Any, raises: bool) -> None:
    accelerator = StandIn(context_mesh=mesh, parallelism_config=config, torch_device_mesh={"cp": ls.Mesh.abstract(2, 1)})
    accelerator.context_options = {"layout": layout} if layout else {}
    ids, positions, lost = torch.arange(24).view(3, 8), torch.arange(8)[None], torch.arange(8)[None]
    buffers = {"buffers": [ids, positions, lost], "buffer_seq_dims": [1, 1, 1], "no_restore_buffers": {lost}}
    with pytest.raises(KeyError) if raises else nullcontext(), accelerator.maybe_context_parallel(**buffers):
        assert positions[0].tolist() == lost[0].tolist() == list(tokens) and ids[2].tolist() == [16 + t for t in tokens]
        assert (spanning._context.get() is None) == (mesh is None and config is not CP)
        if raises:
            raise KeyError
    assert spanning._context.get() is None and torch.equal(ids, torch.arange(24).view(3, 8)) and positions.shape == (1, 8)
    assert lost.shape == (1, len(tokens))


def test_an_accelerator_keeps_a_copy_of_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(spanning.Accelerator, "__init__", lambda self, *args, **kwargs: given.append((args, kwargs)))
    options = {"layout": "contiguous"}
    made = spanning.SpanningAccelerator(True, context_mesh="mesh", context_options=options, cpu=True)
    assert made.context_options == options and made.context_options is not options and made.context_mesh == "mesh"
    assert spanning.SpanningAccelerator().context_options == {} and given == [((True,), {"cpu": True}), ((), {})]


def test_attention_in_the_context_is_causal_and_hooks_see_what_it_gets() -> None:
    model, ids = model_of("llama", "sdpa"), torch.arange(2, 14).view(2, 6)
    want, seen = model(ids).logits, []
    spanning._check_model(model)
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(dict(kwargs)), with_kwargs=True)
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True)
    spanning._check_model(model)  # its check comes before other hooks
    spanning._drop_masks(model)
    plain = torch.nn.TransformerEncoderLayer(4, 2, 5)  # has a self_attn that is none of transformers
    spanning._drop_masks(plain)
    assert not any(module._forward_pre_hooks for module in plain.modules())
    with inside(ls.Mesh.abstract(1), ids):
        torch.testing.assert_close(model(ids, attention_mask=torch.ones_like(ids)).logits, want)
        with pytest.raises(ValueError, match="got padding"):
            model(ids, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]] * 2))
        assert seen[-1]["attention_mask"] is None and seen[-1]["is_causal"] is True
    model(ids)
    assert "is_causal" not in seen[-1]


@pytest.mark.parametrize("length", [8, 7])
def test_tokens_may_be_the_shard_of_any_buffer_and_other_tensors_are_not_checked(length: int) -> None:
    model, mesh = model_of("llama", "sdpa"), ls.Mesh.abstract(2)
    buffers = [torch.arange(n)[None] for n in (8, 7)]
    with ls.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1]) as context:
        token = spanning._context.set(context)
        try:
            ids, positions = torch.ones(1, 4, dtype=torch.long), context.positions(length)[None]
            assert positions.shape == (1, 4)
            spanning._check_batch(model, (ids,), {"position_ids": positions})
            embeddings = {"inputs_embeds": torch.ones(1, 4, 48), "position_ids": positions}
            spanning._check_batch(model, (), embeddings)
            with pytest.raises(ValueError, match="got others"):
                spanning._check_batch(model, (), {**embeddings, "position_ids": positions + 1})
            spanning._check_batch(model, (ids[:, :3],), {})  # no buffer has a shard of 3 tokens
            spanning._check_batch(model, (), {"attention_mask": torch.zeros(1, 1, 4, 4)})  # neither padding nor tokens
        finally:
            spanning._context.reset(token)
