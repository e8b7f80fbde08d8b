"""transformers' Trainer for sequences that span ranks.

    mesh = init_device_mesh("cuda", (dp, cp), mesh_dim_names=("dp_replicate", "cp"))
    trainer = SpanningTrainer(model=model, args=args, train_dataset=data, data_collator=collate, mesh=mesh)

The model has `attn_implementation="longspan"`; collated batches are whole. Ranks that share a sequence get the same batches, and the
Trainer's own DDP averages gradients over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from longspan.integrations.batch import prepare_batch
from longspan.integrations.meshes import roles

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(f"longspan.integrations.trainer needs transformers and accelerate ({error}): pip install 'longspan[hf]'") from error


class SpanningTrainer(Trainer):
    """`transformers.Trainer` with a mesh: an axis "cp" shares sequences, axes "dp", "dp_replicate" hold different batches.

    plan_options: for `longspan.plan`, such as {"strategy": "ring"}.
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
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ValueError("args: label smoothing and compute_loss_func see a shard of the labels only; leave them out")

    @property
    def _config(self) -> Any:
        return getattr(self.model, "config", None)

    def get_train_dataloader(self) -> Any:
        """Batches for this rank's place on the data axes: the same for ranks that share a sequence."""
        if self.train_dataset is None:
            raise ValueError("train_dataset: expected a dataset, got None")
        return self._loader(self.train_dataset, self.args.train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._loader(data, self.args.eval_batch_size, shuffle=False)

    def _loader(self, data: Any, rows: int, *, shuffle: bool) -> Any:
        shuffle = shuffle and getattr(self.args, "train_sampling_strategy", "random") == "random"
        sampler: torch.utils.data.DistributedSampler[Any] = torch.utils.data.DistributedSampler(
            data, num_replicas=self.roles.data_size, rank=self.roles.data_rank, shuffle=shuffle, seed=self.args.data_seed or self.args.seed
        )
        return torch.utils.data.DataLoader(
            data,
            batch_size=rows,
            sampler=sampler,
            collate_fn=self.data_collator,
            drop_last=self.args.dataloader_drop_last,
            num_workers=self.args.dataloader_num_workers,
        )

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The mean over all tokens that the step sees: this rank's share, for gradients that are averaged."""
        # Every rank counted the labels of its whole batch: those that share a sequence, the same ones.
        count = None if num_items_in_batch is None else num_items_in_batch / (self.roles.context_size * self.roles.heads_size)
        given = prepare_batch(inputs, self.mesh, config=self._config, count=count, device=self.args.device, **self.plan_options)
        outputs = model(**given)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The loss that is reported is that of all ranks: a rank's share alone says nothing."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.num_processes > 1:
            dist.all_reduce(loss)
        return loss / self.accelerator.num_processes

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss alone: logits are shards, and metrics would see them out of order."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None
