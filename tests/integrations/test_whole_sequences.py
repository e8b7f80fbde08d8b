"""Trainers whose loss needs whole sequences: fields by token of all ranks' shards, in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from longspan.integrations._meshes import mesh_roles
from longspan.integrations.trainer import _WholeSequences
from longspan.testing import virtual_world

IDS = torch.randint(3, 61, (2, 41), generator=torch.Generator().manual_seed(0))


class Model:
    """Returns fields by token of the shard that it is called with, and others."""

    name = "tiny"

    def __call__(self, *, input_ids: torch.Tensor, shift_labels: torch.Tensor, fused_lm_head: bool, **rest: Any) -> dict[str, Any]:
        assert fused_lm_head and "labels" not in rest and "num_items_in_batch" not in rest
        return {
            "log_probs": -1.5 * input_ids, "correct": input_ids % 2 == 0, "next": shift_labels, "hidden": input_ids[..., None].double(),
            "aux": torch.ones(()), "loss": torch.ones(()), "name": "x",
        }  # fmt: skip


def test_fields_by_token_are_gathered_without_the_last_token_and_others_stay() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)

    def rank(mesh: Any) -> dict[str, Any]:
        options = {"layout": "head_tail", "strategy": "ring"}
        trainer: Any = SimpleNamespace(
            roles=mesh_roles(mesh), model=SimpleNamespace(config=config), _config=config, plan_options=options,
            args=SimpleNamespace(device="cpu"),
        )  # fmt: skip
        model = _WholeSequences(Model(), trainer)
        assert model.name == "tiny"
        for call in ({"labels": IDS}, {"fused_lm_head": True}):
            with pytest.raises(ValueError, match="expected a call with labels and fused_lm_head=True"):
                model(input_ids=IDS, **call)
        return model(input_ids=IDS, labels=IDS, fused_lm_head=True, use_cache=False)  # type: ignore[no-any-return]

    for outputs in virtual_world(3).run(rank):
        whole = IDS[:, :-1]
        wanted = {"log_probs": -1.5 * whole, "correct": whole % 2 == 0, "next": IDS[:, 1:]}
        for name, value in wanted.items():
            assert outputs[name].dtype == value.dtype and torch.equal(outputs[name], value), name
        assert outputs["loss"] is None and outputs["aux"] == 1 and outputs["name"] == "x" and outputs["hidden"].shape[1] in (13, 14)
