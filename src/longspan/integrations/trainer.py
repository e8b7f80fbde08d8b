"""transformers' Trainer for sequences that span ranks.

    mesh = init_device_mesh("cuda", (dp, cp), mesh_dim_names=("dp_replicate", "cp"))
    trainer = SpanningTrainer(model=model, args=args, train_dataset=data, data_collator=collate, mesh=mesh)

The model has `attn_implementation="longspan"`; collated batches are whole. Ranks that share a sequence get the same batches, and the
Trainer's own DDP averages gradients over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from longspan.integrations._batch import prepare_batch
from longspan.integrations._configs import head_counts
from longspan.integrations._meshes import roles
from longspan.integrations._sampling import EpochLoader, EvalBatches, TrainBatches

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(f"longspan.integrations.trainer needs transformers and accelerate ({error}): pip install 'longspan[hf]'") from error


class SpanningTrainer(Trainer):
    """`transformers.Trainer` with a mesh: an axis "cp" shares sequences, axes "dp", "dp_replicate" hold different batches.

    plan_options: for `longspan.plan`, such as {"strategy": "ring"}.

    Datasets have a length. Training reads them in an order that depends on seed and epoch, also when it is resumed within an epoch, or
    as they are (`train_sampling_strategy` "random", "sequential"). Evaluation reads the batches that one process would read, each once,
    and its loss is that process's: the mean over samples of the loss of their batch.
    """

    def __init__(self, *args: Any, mesh: Any, plan_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mesh, self.plan_options = mesh, dict(plan_options or {})
        self.roles = roles(mesh)
        found = self.accelerator.num_processes
        if self.roles.averaged * self.roles.heads_size != found:
            raise ValueError(f"mesh: expected one of all {found} processes, got {self.roles.averaged * self.roles.heads_size} ranks")
        implementation = getattr(self._config, "_attn_implementation", None)
        if implementation != "longspan":
            raise ValueError(
                f"model: expected attn_implementation='longspan' (import longspan.integrations.transformers first), got {implementation!r}"
            )
        if not self.args.average_tokens_across_devices:
            raise ValueError("args: average_tokens_across_devices must be True: tokens are counted over all ranks")
        if getattr(self.accelerator, "parallelism_config", None) is not None and self.accelerator.parallelism_config.cp_enabled:
            raise ValueError("args: leave context parallelism out of parallelism_config; the mesh given here does it")
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if strategy not in ("random", "sequential"):
            raise ValueError(f"args: train_sampling_strategy must be 'random' or 'sequential', got {strategy!r}: others are not there")
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ValueError("args: label smoothing and compute_loss_func see a shard of the labels only; leave them out")
        self._weights: Iterator[int] = iter(())
        self._evaluated = torch.zeros(2, dtype=torch.float64)  # of this rank: losses times samples, and samples

    @property
    def _config(self) -> Any:
        return getattr(self.model, "config", None)

    def get_train_dataloader(self) -> Any:
        """Batches for this rank's place on the data axes: the same for ranks that share a sequence."""
        data = _sized(self.train_dataset, "train_dataset")
        batches = TrainBatches(
            data,
            self.args.train_batch_size,
            groups=self.roles.data_size,
            group=self.roles.data_rank,
            shuffle=self.args.train_sampling_strategy == "random",
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=self.args.dataloader_drop_last,
        )
        return self._loader(data, batches)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches as one process would read them, in turn for the ranks of the data axes."""
        own: Any = self.eval_dataset
        data = _sized(own[eval_dataset] if isinstance(eval_dataset, str) else own if eval_dataset is None else eval_dataset, "eval_dataset")
        batches = EvalBatches(
            len(data),
            self.args.eval_batch_size,
            groups=self.roles.data_size,
            group=self.roles.data_rank,
            drop_last=self.args.dataloader_drop_last,
        )
        return self._loader(data, batches)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self.get_eval_dataloader(_sized(test_dataset, "test_dataset"))

    def _loader(self, data: Any, batches: Any) -> Any:
        return EpochLoader(
            data,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The mean over all tokens that the step sees: this rank's share, for gradients that are averaged.

        In evaluation the mean over this batch alone, whatever other ranks of the data axes read: the average over those that share it.
        """
        # Every rank counted the labels of its whole batch: those that share a sequence, the same ones.
        count = None if num_items_in_batch is None else num_items_in_batch / (self.roles.context_size * self.roles.heads_size)
        alone = count is None and not model.training
        options = {**head_counts(self._config, self.roles.heads_size), **self.plan_options}
        mesh = self.roles.context if alone else self.mesh
        given = prepare_batch(inputs, mesh, config=self._config, count=count, device=self.args.device, **options)
        outputs = model(**given)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The loss that is reported is that of all ranks: a rank's share alone says nothing."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.num_processes > 1:
            dist.all_reduce(loss)
        return loss / self.accelerator.num_processes

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """transformers' own loop; of batches of `get_eval_dataloader` the loss is the mean over samples, each counted once."""
        batches = getattr(dataloader, "batch_sampler", None)
        self._weights = iter(batches.weights if isinstance(batches, EvalBatches) else ())
        self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self.accelerator.num_processes > 1:
            dist.all_reduce(self._evaluated)
        loss, samples = self._evaluated.tolist()
        if samples and output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / samples
        return output

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss alone: logits are shards, and metrics would see them out of order."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs)).detach()
        weight = next(self._weights, 0)
        if weight:
            self._evaluated += torch.stack([weight * loss.double(), torch.full_like(loss, weight, dtype=torch.float64)])
        return loss, None, None


def _sized(data: Any, name: str) -> Any:
    if data is None or not hasattr(data, "__len__"):
        got = "None" if data is None else f"{type(data).__name__}, which has none"
        raise ValueError(f"{name}: expected a dataset with a length, got {got}: ranks must know how many steps there are")
    return data
