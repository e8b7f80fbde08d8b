"""Samplers of SpanningTrainer: a new order each epoch, the same in a resumed run; each sample once in evaluation."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import longspan as ls
from longspan.integrations._sampling import EvalBatches, TrainBatches

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def model(implementation: str = "longspan") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    import longspan.integrations.transformers  # noqa: F401

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation=implementation))


def arguments(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    quiet = {"report_to": [], "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    return TrainingArguments(output_dir=str(folder), **{**quiet, "per_device_train_batch_size": 2, **changes})


def trainer(folder: Path, data: Any, seen: list[int] | None = None, **changes: Any) -> Any:
    from longspan.integrations.trainer import SpanningTrainer

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        if seen is not None:
            seen.extend(int(row["input_ids"][0]) for row in rows)
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    options: dict[str, Any] = {"train_dataset": data, "eval_dataset": data, "data_collator": collate}
    return SpanningTrainer(model=model(), args=arguments(folder, **changes), mesh=ls.Mesh.abstract(1), **options)


def data(count: int) -> list[dict[str, Tensor]]:
    """Samples: number i begins with token i, and its first i labels do not count."""
    out = []
    for i in range(count):
        ids = torch.randint(0, SIZES["vocab_size"], (17,), generator=torch.Generator().manual_seed(i))
        ids[0] = i
        labels = ids.clone()
        labels[:i] = -100
        out.append({"input_ids": ids, "labels": labels})
    return out


def test_each_epoch_has_its_own_order_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    whole: list[int] = []
    trainer(tmp_path, data(9), whole, num_train_epochs=3, save_strategy="steps", save_steps=7).train()
    epochs = [whole[:9], whole[9:18], whole[18:]]
    assert all(sorted(epoch) == list(range(9)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]

    rest: list[int] = []
    trainer(tmp_path, data(9), rest, num_train_epochs=3).train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert rest == whole[9 + 2 * 2 :]  # an epoch is five steps of two samples: step 7 is the second step of the second epoch


def test_the_order_of_samples_depends_on_the_seed(tmp_path: Path) -> None:
    orders = []
    for changes in ({}, {"data_seed": 0}, {"data_seed": 5}, {"train_sampling_strategy": "sequential"}):
        loader = trainer(tmp_path, data(9), **changes).get_train_dataloader()
        orders.append([i for batch in loader.batch_sampler for i in batch])
    assert len({tuple(order) for order in orders}) == 4 and orders[3] == list(range(9))


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_an_unsupported_sampling_strategy_raises(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"expected train_sampling_strategy 'random' or 'sequential', got '{strategy}'"):
        trainer(tmp_path, data(3), train_sampling_strategy=strategy)


def test_a_dataset_without_a_length_raises(tmp_path: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from data(2)

    made = trainer(tmp_path, Endless(), max_steps=1)
    for get in (made.get_train_dataloader, made.get_eval_dataloader):
        with pytest.raises(ValueError, match="expected a dataset with a length, got Endless"):
            get()


@pytest.mark.parametrize(("samples", "rows", "groups"), [(7, 2, 3), (12, 2, 3), (13, 5, 2), (1, 4, 3), (8, 3, 1), (5, 1, 4), (0, 2, 2)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_evaluation_counts_each_sample_once_in_equally_many_steps_per_rank(samples: int, rows: int, groups: int, drop_last: bool) -> None:
    places = [EvalBatches(samples, rows, data_ranks=groups, data_rank=g, drop_last=drop_last) for g in range(groups)]
    assert len({len(place) for place in places}) == 1
    counted = [i for place in places for batch, weight in zip(place, place.weights, strict=True) if weight for i in batch]
    assert sorted(counted) == list(range(samples - samples % rows if drop_last else samples))
    assert all(len(batch) == weight for place in places for batch, weight in zip(place, place.weights, strict=True) if weight)
    assert all(batch for place in places for batch in place)


def test_data_ranks_read_different_samples_of_an_epoch() -> None:
    places = [TrainBatches(range(11), 2, data_ranks=3, data_rank=g, shuffle=True, seed=3, drop_last=False) for g in range(3)]
    for epoch in (0, 1):
        for place in places:
            place.set_epoch(epoch)
        read = [[i for batch in place for i in batch] for place in places]
        assert [len(r) for r in read] == [4, 4, 4] and set().union(*read) == set(range(11))


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_evaluation_loss_over_data_ranks_equals_that_of_one_process(groups: int, tmp_path: Path) -> None:
    from transformers import Trainer, default_data_collator

    samples = {"a": data(7), "b": data(3)}
    changes = {"per_device_eval_batch_size": 2}
    plain = Trainer(model=model("eager"), args=arguments(tmp_path, **changes), eval_dataset=samples, data_collator=default_data_collator)
    want = plain.evaluate()
    made = trainer(tmp_path, samples, **changes)
    roles, total = made.roles, {name: torch.zeros(2, dtype=torch.float64) for name in samples}
    for rank in range(groups):  # one after the other: in evaluation, data ranks communicate at the end only
        made.roles = replace(roles, data_size=groups, data_rank=rank)
        for name in samples:
            got = made.evaluate(name, metric_key_prefix="eval_" + name)
            total[name] += made._loss_sum
            if groups == 1:
                assert got[f"eval_{name}_loss"] == pytest.approx(want[f"eval_{name}_loss"], rel=2e-6)
    for name, (losses, counted) in total.items():
        assert int(counted) == len(samples[name])
        assert float(losses / counted) == pytest.approx(want[f"eval_{name}_loss"], rel=2e-6)
    assert made.predict(samples["b"]).metrics.keys() >= {"test_loss"}
