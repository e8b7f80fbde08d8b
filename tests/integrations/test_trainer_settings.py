"""Settings, counts and data loaders of the Trainer's mixin, on a stand-in for the Trainer."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from longspan.integrations import trainer as spanning
    from longspan.integrations._meshes import MeshRoles
    from longspan.integrations.trainer import SpanningLogProbsMixin, SpanningMixin, _with_length

ROLES = MeshRoles(context="context mesh", context_size=5, data_size=2, data_rank=1, heads_size=3)


class TinyForMaskedLM(nn.Module):
    config = SimpleNamespace(_attn_implementation="longspan")


def stand_in(kind: type = SpanningMixin, **changes: Any) -> Any:
    """A mixin without a Trainer, with settings that are supported."""
    made = object.__new__(type("StandIn", (kind,), {}))
    args = SimpleNamespace(
        average_tokens_across_devices=True, train_sampling_strategy="random", neftune_noise_alpha=None, include_num_input_tokens_seen="no",
        train_batch_size=4, eval_batch_size=3, seed=11, data_seed=None, dataloader_drop_last=False, dataloader_num_workers=0,
        dataloader_prefetch_factor=None, dataloader_persistent_workers=False, dataloader_pin_memory=True, device=torch.device("cpu"),
    )  # fmt: skip
    values = {
        "accelerator": SimpleNamespace(num_processes=30, parallelism_config=None), "roles": ROLES, "args": args, "label_smoother": None,
        "model": SimpleNamespace(config=SimpleNamespace(_attn_implementation="longspan")), "compute_loss_func": None, "mesh": "whole mesh",
        "compute_metrics": None, "preprocess_logits_for_metrics": None, "plan_options": {"strategy": "ring"}, "train_dataset": range(21),
        "eval_dataset": {"a": range(7), "b": range(10)}, "data_collator": list,
    }  # fmt: skip
    for name, value in {**values, **changes}.items():
        target, name = (args, name[5:]) if name.startswith("args_") else (made, name)
        setattr(target, name, value)
    return made


def config(**settings: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**{"_attn_implementation": "longspan", **settings}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"args_train_sampling_strategy": "sequential", "args_loss_type": "chunked_nll", "aux_loss_enabled": False}, None),
        ({"accelerator": SimpleNamespace(num_processes=30, parallelism_config=SimpleNamespace(cp_enabled=False))}, None),
        ({"accelerator": SimpleNamespace(num_processes=10)}, "expected one of all 10 processes, got 30 ranks"),
        ({"model": config(_attn_implementation=None)}, "expected attn_implementation='longspan' .*, got None"),
        ({"model": config(is_encoder_decoder=True)}, "expected a causal LM, got the encoder-decoder SimpleNamespace"),
        ({"model": TinyForMaskedLM()}, "expected a causal LM, got TinyForMaskedLM, whose labels are not shifted"),
        ({"args_average_tokens_across_devices": False}, "expected average_tokens_across_devices=True"),
        ({"accelerator": SimpleNamespace(num_processes=30, parallelism_config=SimpleNamespace(cp_enabled=True))}, "got cp_size > 1"),
        ({"args_train_sampling_strategy": "group"}, "expected train_sampling_strategy 'random' or 'sequential', got 'group'"),
        ({"label_smoother": 1}, "neither label smoothing nor compute_loss_func"),
        ({"compute_loss_func": 1}, "neither label smoothing nor compute_loss_func"),
        ({"compute_metrics": 1}, "expected None, got a function"),
        ({"preprocess_logits_for_metrics": 1}, "expected None, got a function"),
        ({"args_neftune_noise_alpha": 0.0}, "expected neftune_noise_alpha=None"),
        ({"args_include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen='no', got 'all'"),
        ({"args_loss_type": "dft"}, "expected loss_type 'nll', got 'dft'"),
        ({"aux_loss_enabled": True}, "no load-balancing loss"),
    ],
)
def test_settings_that_the_mixin_supports(changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        stand_in(**changes)._check()
        return
    with pytest.raises(ValueError, match=message):
        stand_in(**changes)._check()


def test_log_probs_trainers_compute_their_own_reference() -> None:
    stand_in(SpanningLogProbsMixin, args_loss_type="sigmoid")._check_loss_type()
    with pytest.raises(ValueError, match="expected precompute_ref_log_probs=False"):
        stand_in(SpanningLogProbsMixin, precompute_ref_logps=True)._check_loss_type()
    with pytest.raises(ValueError, match="expected return_outputs=False"):
        stand_in(SpanningLogProbsMixin).compute_loss(None, {}, return_outputs=True)


class Model(nn.Module):
    def forward(self, **batch: Any) -> Any:
        return SimpleNamespace(loss=torch.tensor(2.5), batch=batch)


@pytest.mark.parametrize(
    ("count", "training", "expected"),
    [
        (None, True, ("whole mesh", None)),
        (None, False, ("context mesh", None)),
        (45, True, ("whole mesh", 3)),
        (45, False, ("whole mesh", 3)),
    ],
)
def test_labels_are_counted_once_per_sequence(count: Any, training: bool, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer sums the counts of all ranks, of which 5 · 3 counted the same labels."""
    calls: list[Any] = []

    def prepare(inputs: Any, mesh: Any, **options: Any) -> dict[str, Any]:
        calls.append((inputs, mesh, options))
        return {"prepared": True}

    monkeypatch.setattr(spanning, "prepare_batch", prepare)
    made, model = stand_in(model=config(num_attention_heads=6, num_key_value_heads=3)), Model().train(training)
    loss, outputs = made.compute_loss(model, "inputs", return_outputs=True, num_items_in_batch=count)
    assert float(loss) == 2.5 and outputs.batch == {"prepared": True} and float(made.compute_loss(model, "inputs")) == 2.5
    inputs, mesh, options = calls[0]
    assert (inputs, mesh, options.pop("count")) == ("inputs", *expected)
    assert options == {"config": made.model, "device": torch.device("cpu"), "heads": 2, "kv_heads": 1, "strategy": "ring"}


def test_loaders_read_the_samples_of_this_ranks_data_axes() -> None:
    made = stand_in(args_train_sampling_strategy="sequential")
    train = made.get_train_dataloader()
    assert list(train) == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19, 0]] and not train.pin_memory
    dropped = stand_in(args_train_sampling_strategy="sequential", args_dataloader_drop_last=True)
    assert list(dropped.get_train_dataloader()) == list(train)[:2]
    seeds = {}, {"args_data_seed": 11}, {"args_data_seed": 12}
    shuffled, same, other = (list(stand_in(**options).get_train_dataloader()) for options in seeds)
    assert shuffled == same != other and shuffled != list(train)
    assert list(made.get_eval_dataloader("b")) == [[3, 4, 5], [9]] and list(made.get_eval_dataloader(range(4))) == [[3]]
    assert list(stand_in(eval_dataset=range(7)).get_eval_dataloader()) == [[3, 4, 5], [0, 1, 2]]
    assert list(made.get_test_dataloader(range(7))) == [[3, 4, 5], [0, 1, 2]]
    for data, got in ((None, "got None"), (iter([1]), "got list_iterator, which has none")):
        with pytest.raises(ValueError, match=f"train_dataset: expected a dataset with a length, {got}"):
            _with_length(data, "train_dataset")


def test_the_loss_of_evaluation_is_a_mean_over_samples() -> None:
    made = stand_in()
    made._batch_weights, made._loss_sum = iter([3, 0, 1]), torch.zeros(2, dtype=torch.float64)
    made.compute_loss_context_manager, made._prepare_inputs = warnings.catch_warnings, lambda inputs: inputs
    made.compute_loss = lambda model, inputs: torch.tensor(inputs)
    for value in (2.0, 5.0, 4.0, 9.0):
        assert made.prediction_step(None, value, True) == (torch.tensor(value), None, None)
    assert made._loss_sum.tolist() == [3 * 2.0 + 4.0, 4.0]


def test_the_loss_of_evaluation_is_summed_in_float64() -> None:
    made, loss = stand_in(), torch.tensor(0.1)
    made._batch_weights, made._loss_sum = iter([3, 7]), torch.zeros(2, dtype=torch.float64)
    made.compute_loss_context_manager, made._prepare_inputs = warnings.catch_warnings, lambda inputs: inputs
    made.compute_loss = lambda model, inputs: loss
    for _ in range(2):
        made.prediction_step(None, None, True)
    assert made._loss_sum.tolist() == [3 * float(loss) + 7 * float(loss), 10.0]


@pytest.mark.parametrize("reference", ["model", None])
@pytest.mark.parametrize(("before", "after"), [({"_tp_size": 3}, 15), ({}, 5)])
def test_the_reference_is_called_with_whole_sequences_and_tokens_are_counted_once(
    reference: Any, before: dict[str, int], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Base:
        def __init__(self, *args: Any, **options: Any) -> None:
            assert (args, options) == ((1,), {"beta": 2})
            vars(self).update(before)
            self.ref_model = reference

    monkeypatch.setattr(spanning, "mesh_roles", {"mesh": ROLES}.__getitem__)
    monkeypatch.setattr(SpanningMixin, "_check", lambda self: None)
    made: Any = type("StandIn", (SpanningLogProbsMixin, Base), {})(1, mesh="mesh", beta=2)
    assert made._tp_size == after and made.plan_options == {} and made._loss_sum.tolist() == [0.0, 0.0]
    if reference is None:
        assert made.ref_model is None
    else:
        assert isinstance(made.ref_model, spanning._WholeSequences) and made.ref_model.upper() == "MODEL"
    given = {"strategy": "ring"}
    options = type("StandIn", (SpanningMixin, Base), {})(1, mesh="mesh", plan_options=given, beta=2).plan_options
    assert options == given and options is not given
