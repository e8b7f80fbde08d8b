"""Batches and masks on a device that is not the CPU: tensors that are computed on the CPU are moved to it and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.small_parts import ids, two
from tests.integrations.test_decoder_inputs import EMBEDS, LENGTH, ROWS, plans_of, run
from tests.other_device import OTHER, OtherDevice
from torch import Tensor, nn

import longspan as ls
from longspan.integrations import _meshes, _one_query, prepare_batch
from longspan.integrations._adapters import _adapt_llama4
from longspan.integrations._configs import default_positions
from longspan.integrations._cross_plans import CrossPlans, _check_padding, _is_mask_of
from longspan.integrations._decoders import _local_features
from longspan.integrations._head_mixers import run_by_heads
from longspan.integrations._meshes import MeshRoles, sum_over_data_ranks
from longspan.integrations._model_mask import ModelMask
from longspan.integrations._pair_masks import _check_padding as check_pairs

REAL = torch.tensor([[1] * 9, [0, 0] + [1] * 7])
ENTRIES: dict[str, Any] = {
    "padding": {"attention_mask": REAL, "labels": ids()},
    "positions": {"position_ids": torch.arange(9)[None] % 5, "labels": ids()},
    "documents": {"document_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1]] * 2), "labels": ids()},
    "bounds": {
        "position_ids": torch.arange(9)[None] % 5, "cu_seq_lens_q": torch.tensor([0, 5, 9, 14, 18]),
        "cu_seq_lens_k": torch.tensor([0, 5, 9, 14, 18]), "shift_labels": ids(),
    },
}  # fmt: skip


def on_host(made: Any) -> dict[str, Any]:
    return {name: value.cpu().tolist() for name, value in made.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.parametrize("moved", ["tokens and labels", "all"])
def test_a_batch_on_a_device_equals_one_on_the_host(kind: str, moved: str) -> None:
    """Masks and document ids may stay on the host; what the model gets is on the device of its tokens."""
    config = SimpleNamespace(model_type="opt")
    batch = {"input_ids": ids(), **ENTRIES[kind]}
    options: Any = {"layout": "contiguous", "strategy": "allgather", "config": config}
    want = on_host(prepare_batch(batch, ls.Mesh.abstract(2, 1), **options))
    with OtherDevice():
        names = batch if moved == "all" else [n for n in batch if n in ("input_ids", "labels", "shift_labels")]
        made: Any = prepare_batch({n: x.to(OTHER) if n in names else x for n, x in batch.items()}, ls.Mesh.abstract(2, 1), **options)
        devices = {n: x.device for n, x in made.items() if isinstance(x, Tensor)}
        if moved != "all" and "position_ids" in batch:
            assert devices.pop("position_ids").type == "cpu"
        assert set(devices.values()) == {OTHER} and on_host(made) == want


@pytest.mark.parametrize("kind", ["roberta", "opt", "llama"])
def test_positions_are_on_the_device_of_their_tokens(kind: str) -> None:
    config = SimpleNamespace(model_type=kind, pad_token_id=3)
    for tokens in (ids(), torch.zeros(2, 9, 4)):
        want = default_positions(config, tokens, REAL > 0)
        with OtherDevice():
            made = default_positions(config, tokens.to(OTHER), REAL > 0)
            assert made.device == OTHER and torch.equal(made.cpu(), want)


def test_a_decoder_on_a_device_gets_positions_and_features_there() -> None:
    is_image = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    is_image[0, [3, 5, 8]], is_image[1, [0, 4]] = True, True
    features, positions = torch.arange(15.0).view(5, 3), torch.arange(LENGTH)[None] + 2
    given: dict[str, Any] = {
        "inputs_embeds": EMBEDS,
        "visual_pos_masks": is_image,
        "deepstack_visual_embeds": [features],
        "attention_mask": REAL,
    }
    plans = plans_of(attention_mask=REAL)
    want, _ = run(plans, **given, position_ids=positions)
    with OtherDevice():
        there: Any = {name: [x.to(OTHER) for x in t] if isinstance(t, list) else t.to(OTHER) for name, t in given.items()}
        for place in ("cpu", OTHER):
            made, _ = run(plans, **there, position_ids=positions.to(place))
            assert made["position_ids"].device == OTHER and torch.equal(made["position_ids"].cpu(), want["position_ids"])
            assert torch.equal(made["deepstack_visual_embeds"][0].cpu(), want["deepstack_visual_embeds"][0])


def test_features_may_be_on_another_device_than_their_numbers() -> None:
    features, chosen = torch.arange(15.0).view(5, 3), torch.tensor([1, 4])
    want = features[chosen].tolist()
    with OtherDevice():
        there = chosen.to(OTHER)
        assert _local_features(features[None], there, in_place=True).tolist() == want
        assert _local_features([features], there, in_place=False)[0].tolist() == want
        assert _local_features({6: features}, there, in_place=False)[6].tolist() == want


def test_the_padding_of_two_stacks_is_compared_on_the_host() -> None:
    plans = two({"input_ids": ids(), "decoder_input_ids": ids(2, 7), "attention_mask": REAL})["longspan_plan"]
    assert isinstance(plans, CrossPlans)
    with OtherDevice():
        mask = ModelMask(mask=None, padding_mask=(REAL > 0).to(OTHER), bidirectional=True)
        _check_padding({"attention_mask": mask}, plans.encoder, "encoder")
        wrong = ModelMask(mask=None, padding_mask=(REAL < 2).to(OTHER), bidirectional=True)
        with pytest.raises(ValueError, match="expected the padding that prepare_batch was told of"):
            _check_padding({"attention_mask": wrong}, plans.encoder, "encoder")


def test_masks_of_the_host_are_moved_to_the_device_of_attention() -> None:
    query, key, value = (torch.randn(2, h, n, 4, generator=torch.Generator().manual_seed(h + n)) for h, n in ((3, 1), (3, 9), (3, 8)))
    value = torch.cat([value, value[:, :, :1]], 2)
    mask: Any = ModelMask(mask=None, row=REAL > 0)
    want = _one_query.attend_one_query(query, key, value, mask, scale=None, sink=None, score_mod=None)
    pairs = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    tokens = ModelMask(mask=None, padding_mask=torch.ones(2, 9, dtype=torch.bool))
    with OtherDevice():
        q, k, v = (x.to(OTHER) for x in (query, key, value))
        made = _one_query.attend_one_query(q, k, v, mask, scale=None, sink=None, score_mod=None)
        assert made is not None and want is not None and torch.allclose(made.cpu(), want)
        check_pairs(tokens, pairs.to(OTHER))
        with pytest.raises(ValueError, match="shows tokens of padding on the left"):
            check_pairs(ModelMask(mask=None, padding_mask=REAL > 0), pairs.to(OTHER))


def test_layers_without_rotary_embeddings_scale_queries_on_their_device_and_in_their_dtype() -> None:
    calls: list[Any] = []

    class Layer:
        use_rope, attn_temperature_tuning, training = False, True, False
        head_dim, scaling, floor_scale, attn_scale = 4, 0.5, 2.0, 0.7
        q_proj = k_proj = v_proj = o_proj = staticmethod(lambda x: x)

        def forward(self) -> None: ...

    def attend(_layer: Any, query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        calls.append((query, key))
        return query.transpose(1, 2), None

    _adapt_llama4(SimpleNamespace(Llama4TextAttention=Layer), attend)  # type: ignore[arg-type]
    plan = SimpleNamespace(positions=torch.tensor([0, 3, 8]))
    with OtherDevice():
        Layer().forward(torch.ones(2, 3, 8, dtype=torch.bfloat16).to(OTHER), None, None, longspan_plan=plan)  # type: ignore[call-arg]
        ((query, key),) = calls
        assert query.device == OTHER and query.dtype == key.dtype == torch.bfloat16
        scale = 1 + 0.7 * torch.log1p(torch.tensor([0.0, 2.0, 4.0]))
        assert torch.equal(query.cpu()[1, 1, :, 2], scale.bfloat16()) and bool((key.cpu() == 1).all())


def test_a_number_is_summed_over_data_ranks_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    axis = SimpleNamespace(size=lambda: 3, device_type="meta")
    monkeypatch.setattr(_meshes, "as_mesh", lambda mesh: mesh)
    monkeypatch.setattr(_meshes, "all_gather_rows", lambda mesh, x, counts, what: torch.cat([x] * len(counts)))
    with OtherDevice():
        made = sum_over_data_ranks(torch.tensor(5), MeshRoles(context=None, context_size=1, data=(axis,)))
        assert made.device == OTHER and int(made.cpu()) == 15


def test_padding_of_a_layer_divided_by_heads_is_moved_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr("longspan.integrations._head_mixers._projections", lambda module, hidden, plan: seen.append(hidden))
    monkeypatch.setattr("longspan.integrations._head_mixers._layer_of_some_heads", lambda *_: None)
    plan: Any = SimpleNamespace(shard=lambda x, dim: x, layout=SimpleNamespace(length=9))

    class Layer(nn.Module):
        forward = staticmethod(lambda layer, whole: whole)  # type: ignore[assignment]

    with OtherDevice():
        whole = run_by_heads(Layer(), torch.ones(2, 9, 3).to(OTHER), plan, REAL > 0)
        assert whole.shape == (2, 9, 3) and torch.equal(seen[0].cpu(), REAL[:, :, None].expand(2, 9, 3).float())


def test_positions_in_an_accelerators_context_are_compared_on_the_host() -> None:
    spanning = pytest.importorskip("longspan.integrations.accelerate")
    model, mesh, tokens = nn.Module(), ls.Mesh.abstract(2, 1), torch.arange(10).view(1, 10)
    with ls.context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]) as context, OtherDevice():
        token = spanning._context.set(context)
        try:
            given = {"input_ids": torch.ones(1, 5).to(OTHER), "position_ids": context.positions(10)[None].to(OTHER)}
            spanning._check_batch(model, (), given)
            with pytest.raises(ValueError, match="got others"):
                spanning._check_batch(model, (), {**given, "position_ids": given["position_ids"] + 1})
        finally:
            spanning._context.reset(token)


def test_masks_of_an_encoder_decoder_are_compared_on_the_host() -> None:
    real = REAL > 0
    with OtherDevice():
        assert _is_mask_of(real, REAL.to(OTHER)) and _is_mask_of(None, torch.ones(2, 9).to(OTHER))
        assert not _is_mask_of(None, REAL.to(OTHER)) and not _is_mask_of(real, torch.ones(2, 9).to(OTHER))
        assert not _is_mask_of(real, torch.ones(2, 8).to(OTHER)) and not _is_mask_of(real, 2 * REAL.to(OTHER))
