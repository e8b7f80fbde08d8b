"""transformers' Trainer for sequences that are split over ranks.

    mesh = init_device_mesh("cuda", (dp, cp), mesh_dim_names=("dp_replicate", "cp"))
    trainer = SpanningTrainer(model=model, args=args, train_dataset=data, data_collator=collate, mesh=mesh)

The model has `attn_implementation="longspan"`. Collated batches are whole. Ranks that share a sequence get equal batches. The Trainer's
own DDP averages gradients over all ranks.

`SpanningMixin` does the same for subclasses of `Trainer` whose loss is the cross entropy of labels, such as TRL's:

    class SpanningSFTTrainer(SpanningMixin, SFTTrainer): ...

`SpanningLogProbsMixin` does it for trainers that compute their loss from the log-probabilities of whole sequences:

    class SpanningDPOTrainer(SpanningLogProbsMixin, DPOTrainer): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan._comm.mesh import Mesh
from longspan.integrations._batch import prepare_batch
from longspan.integrations._batch_parts import PlanOptions
from longspan.integrations._configs import NAME, head_counts, is_masked_lm
from longspan.integrations._meshes import MeshRoles, mesh_roles
from longspan.integrations._sampling import EpochLoader, EvalBatches, TrainBatches

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(f"longspan.integrations.trainer needs transformers and accelerate ({error}): pip install 'longspan[hf]'") from error

__all__ = ["SpanningLogProbsMixin", "SpanningMixin", "SpanningTrainer"]

_Base: Any = Trainer if TYPE_CHECKING else object


class SpanningMixin(_Base):  # type: ignore[misc]
    """A mesh for a `transformers.Trainer`: ranks along its axis "cp" share sequences, ranks along "dp" or "dp_replicate" do not.

    Put it before the Trainer's class. The loss is the mean cross entropy of the labels that the collator gives. A subclass's own
    loss is not computed; arguments that select one raise ValueError.

    Datasets have a length. Training reads samples in an order that depends on seed and epoch, also when a run is resumed within an epoch,
    or in the dataset's order (`train_sampling_strategy` "random" or "sequential"). Evaluation reads the batches of one process, each
    once, and reports the loss of one process: the mean over samples of their batch's loss.

    Args:
        *args: As for `transformers.Trainer`.
        mesh: A DeviceMesh over all processes.
        plan_options: Keywords of `longspan.plan`, such as {"strategy": "ring"}.
        **kwargs: As for `transformers.Trainer`.

    Raises:
        ValueError: If the mesh does not cover all processes, the model runs another attention implementation, or an argument of the
            Trainer would compute something from a shard only.
    """

    def __init__(self, *args: Any, mesh: DeviceMesh | Mesh, plan_options: PlanOptions | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mesh = mesh
        self.plan_options: PlanOptions = {**plan_options} if plan_options else {}
        self.roles: MeshRoles = mesh_roles(mesh)
        self._check()
        self._batch_weights: Iterator[int] = iter(())
        self._loss_sum = torch.zeros(2, dtype=torch.float64)  # of evaluation on this rank: Σ loss × samples, Σ samples

    def _check(self) -> None:
        processes, ranks = self.accelerator.num_processes, self.roles.averaged * self.roles.heads_size
        if ranks != processes:
            raise ValueError(f"mesh: expected one of all {processes} processes, got {ranks} ranks")
        implementation = getattr(self._config, "_attn_implementation", None)
        if implementation != NAME:
            raise ValueError(
                f"model: expected attn_implementation={NAME!r} (import longspan.integrations.transformers first), got {implementation!r}"
            )
        if getattr(self._config, "is_encoder_decoder", False):
            raise ValueError(
                f"model: expected a causal LM, got the encoder-decoder {type(self.model).__name__}, whose labels the Trainer counts "
                "otherwise; use prepare_batch(batch, mesh, config=model) in a loop of your own"
            )
        if is_masked_lm(self.model):
            raise ValueError(
                f"model: expected a causal LM, got {type(self.model).__name__}, whose labels are not shifted; use prepare_batch(batch, "
                "mesh, config=model) in a loop of your own"
            )
        if not self.args.average_tokens_across_devices:
            raise ValueError("args: expected average_tokens_across_devices=True, got False: tokens are counted over all ranks")
        if getattr(self.accelerator, "parallelism_config", None) is not None and self.accelerator.parallelism_config.cp_enabled:
            raise ValueError(
                "args: expected a parallelism_config without context parallelism, got cp_size > 1; the mesh given here does it"
            )
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if strategy not in ("random", "sequential"):
            raise ValueError(f"args: expected train_sampling_strategy 'random' or 'sequential', got {strategy!r}, which is not supported")
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ValueError("args: expected neither label smoothing nor compute_loss_func, which would see a shard of the labels only")
        if self.compute_metrics is not None or self.preprocess_logits_for_metrics is not None:
            raise ValueError(
                "compute_metrics, preprocess_logits_for_metrics: expected None, got a function, which would see a shard of the logits "
                "only; evaluation reports the loss"
            )
        if self.args.neftune_noise_alpha is not None:
            raise ValueError(
                f"args: expected neftune_noise_alpha=None, got {self.args.neftune_noise_alpha}: the noise depends on the length of a "
                "sequence, of which a rank has a shard"
            )
        if self.args.include_num_input_tokens_seen != "no":
            raise ValueError(
                f"args: expected include_num_input_tokens_seen='no', got {self.args.include_num_input_tokens_seen!r}: ranks that share a "
                "sequence would each count its tokens"
            )
        self._check_loss_type()
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError("args: expected no load-balancing loss of experts, which would see a shard of the tokens only")

    def _check_loss_type(self) -> None:
        loss_type = getattr(self.args, "loss_type", "nll")  # of TRL's SFTConfig
        if loss_type not in ("nll", "chunked_nll"):
            raise ValueError(f"args: expected loss_type 'nll', got {loss_type!r}, which is not supported with a mesh")

    @property
    def _config(self) -> Any:
        return getattr(self.model, "config", None)

    def get_train_dataloader(self) -> Any:
        """The batches of this rank's place on the data axes, equal for ranks that share a sequence."""
        data = _with_length(self.train_dataset, "train_dataset")
        batches = TrainBatches(
            data,
            self.args.train_batch_size,
            data_ranks=self.roles.data_size,
            data_rank=self.roles.data_rank,
            shuffle=self.args.train_sampling_strategy == "random",
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=self.args.dataloader_drop_last,
        )
        return self._loader(data, batches)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The batches of one process, dealt to the ranks of the data axes in turn."""
        datasets: Any = self.eval_dataset
        if isinstance(eval_dataset, str):
            eval_dataset = datasets[eval_dataset]
        data = _with_length(datasets if eval_dataset is None else eval_dataset, "eval_dataset")
        batches = EvalBatches(
            len(data),
            self.args.eval_batch_size,
            data_ranks=self.roles.data_size,
            data_rank=self.roles.data_rank,
            drop_last=self.args.dataloader_drop_last,
        )
        return self._loader(data, batches)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """As `get_eval_dataloader`, for `predict`."""
        return self.get_eval_dataloader(_with_length(test_dataset, "test_dataset"))

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
        """This rank's share of the loss, for gradients that are averaged: the mean over all tokens of the optimizer's step.

        In evaluation, the mean over this batch: the average of the shares of the ranks that share its sequences.
        """
        # The Trainer sums the labels that each rank counted in its whole batch. Ranks that share a sequence counted the same labels.
        count = None if num_items_in_batch is None else num_items_in_batch / (self.roles.context_size * self.roles.heads_size)
        is_evaluation = count is None and not model.training
        options: Any = {**head_counts(self._config, self.roles.heads_size), **self.plan_options}
        mesh: Any = self.roles.context if is_evaluation else self.mesh
        prepared = prepare_batch(inputs, mesh, config=self.model, count=count, device=self.args.device, **options)
        outputs = model(**prepared)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' step. Returns the loss of all ranks, where transformers reports a rank's own."""
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
        """transformers' loop. For batches of `get_eval_dataloader` the loss is the mean over samples, each counted once."""
        batches = getattr(dataloader, "batch_sampler", None)
        self._batch_weights = iter(batches.weights if isinstance(batches, EvalBatches) else ())
        self._loss_sum = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self.accelerator.num_processes > 1:
            dist.all_reduce(self._loss_sum)
        loss, samples = self._loss_sum.tolist()
        if samples and output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / samples
        return output

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """(loss, None, None): logits are shards, and metrics would see them out of order."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        weight = next(self._batch_weights, 0)
        if weight:
            self._loss_sum += torch.stack([weight * loss.double(), torch.full_like(loss, weight, dtype=torch.float64)])
        return loss, None, None


class SpanningTrainer(SpanningMixin, Trainer):
    """`transformers.Trainer` with a mesh (`SpanningMixin`)."""


class SpanningLogProbsMixin(SpanningMixin):
    """A mesh for trainers whose loss is a function of whole sequences' log-probabilities, such as TRL's DPOTrainer.

    Such a trainer calls its model, and its reference model, with `labels` and `fused_lm_head=True`. Each rank computes the fields by token
    of its shard. They are gathered, so that every rank computes the trainer's own loss of whole sequences.
    """

    def __init__(self, *args: Any, mesh: DeviceMesh | Mesh, **kwargs: Any) -> None:
        super().__init__(*args, mesh=mesh, **kwargs)
        if getattr(self, "ref_model", None) is not None:
            self.ref_model: Any = _WholeSequences(self.ref_model, self)
        # TRL counts the tokens of all processes and divides by the ranks that read the same batches.
        self._tp_size = getattr(self, "_tp_size", 1) * self.roles.context_size

    def _check_loss_type(self) -> None:
        if getattr(self, "precompute_ref_logps", False):
            raise ValueError("args: expected precompute_ref_log_probs=False, got True, which is not supported with a mesh")

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The trainer's loss of this rank's batch: equal on ranks that share its sequences."""
        if return_outputs:
            raise ValueError("compute_loss: expected return_outputs=False, got True: logits are shards")
        trainer: Any = super(SpanningMixin, self)
        return trainer.compute_loss(_WholeSequences(model, self), inputs, num_items_in_batch=num_items_in_batch)


class _WholeSequences:
    """A model that is called with whole batches and returns the fields by token of whole sequences. Other attributes are the model's."""

    def __init__(self, model: Any, trainer: SpanningMixin) -> None:
        self._model, self._trainer = model, trainer

    def __call__(self, *, labels: Any = None, fused_lm_head: bool = False, use_cache: bool = False, **batch: Any) -> Any:
        if labels is None or not fused_lm_head:
            raise ValueError(
                "longspan: expected a call with labels and fused_lm_head=True, whose results are by token, got another, whose results "
                "would be those of a shard"
            )
        trainer = self._trainer
        options: Any = {**head_counts(trainer._config, trainer.roles.heads_size), **trainer.plan_options}
        prepared: Any = prepare_batch(
            {**batch, "labels": labels}, trainer.roles.context, config=trainer.model, count=1, device=trainer.args.device, **options
        )
        del prepared["labels"], prepared["num_items_in_batch"]  # shift_labels remain
        outputs, plan = self._model(**prepared, fused_lm_head=True), prepared["longspan_plan"]
        for name, value in list(outputs.items()):
            if isinstance(value, torch.Tensor) and value.ndim == 2:
                # The last token has no label. A bool is gathered as a number.
                whole = plan.unshard(value.to(torch.uint8) if value.dtype == torch.bool else value, 1)[:, :-1]
                outputs[name] = whole.to(value.dtype)
        outputs["loss"] = None  # of a shard
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _with_length(data: Any, name: str) -> Any:
    """The dataset. Raises ValueError if it has no length: ranks must know the number of steps."""
    if data is None or not hasattr(data, "__len__"):
        got = "None" if data is None else f"{type(data).__name__}, which has none"
        raise ValueError(f"{name}: expected a dataset with a length, got {got}; ranks must know the number of steps")
    return data
