"""Samples of very different lengths as the batches of an optimizer's step, over data and context ranks together.

    for batch in step_batches(samples, mesh, tokens_per_rank=32768, config=model):
        model(**batch).loss.backward()
    optimizer.step()

Legend: S tokens of a packed sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from longspan._comm.mesh import MeshLike
from longspan._planner.steps import StepPlan, plan_step
from longspan.integrations._batch import prepare_batch
from longspan.integrations._batch_parts import PreparedBatch
from longspan.integrations._configs import head_counts
from longspan.integrations._meshes import mesh_roles
from longspan.integrations.loss import shift_labels, token_count

__all__ = ["packed", "planned_step", "step_batches"]


def step_batches(
    samples: Sequence[Mapping[str, Tensor]],
    mesh: MeshLike,
    *,
    tokens_per_rank: int,
    config: Any = None,
    gradients: Literal["mean", "sum"] = "mean",
    device: torch.device | str | None = None,
    **options: Any,
) -> Iterator[PreparedBatch]:
    """This rank's batches of an optimizer's step, one per forward: their gradients accumulate to those of the whole step.

    Over all ranks and forwards, the loss is the mean over all labels of the step.

    Args:
        samples: Whole samples, the same on all ranks: `input_ids` [n] and `labels` [n], not shifted, of any lengths. Without labels, the
            tokens are the labels.
        mesh: All ranks of the step, data and context ranks together: one axis, as `longspan.plan` takes it.
        tokens_per_rank: The most tokens that a rank can hold in a forward.
        config: The model or its config, as for `prepare_batch`.
        gradients: As for `prepare_batch`: "mean" if they will be averaged over the ranks of the mesh.
        device: The device of the batches; by default the mesh's.
        **options: Keywords of `longspan.plan`.

    Raises:
        ValueError: Samples do not fit together or into the ranks, or the mesh has other axes than ranks that share sequences.
    """
    step = planned_step([len(sample["input_ids"]) for sample in samples], mesh, tokens_per_rank=tokens_per_rank, config=config, **options)
    shifted = [shift_labels(sample.get("labels", sample["input_ids"])) for sample in samples]
    count = sum(int(token_count(labels)) for labels in shifted)
    for forward in step.forwards:
        batch = packed([samples[i] for i in forward.samples])
        yield prepare_batch(
            batch, mesh, config=config, count=count, gradients=gradients, device=device,
            **{**options, "layout": forward.plan.layout, "strategy": options.get("strategy", "auto")},
        )  # fmt: skip


def planned_step(lengths: Sequence[int], mesh: MeshLike, *, tokens_per_rank: int, config: Any = None, **options: Any) -> StepPlan:
    """`longspan.plan_step` with the head counts of a model or config. Raises ValueError for a mesh with axes of data or heads."""
    roles = mesh_roles(mesh)
    if roles.data_size > 1 or roles.heads_size > 1:
        raise ValueError(
            "step_batches: expected a mesh of one axis, whose ranks share all samples, got one with axes of data or heads; flatten the "
            "data and context axes: mesh['dp', 'cp']._flatten()"
        )
    heads = {} if config is None else head_counts(getattr(config, "config", config), 1)
    return plan_step(lengths, roles.context, tokens_per_rank=tokens_per_rank, **{**heads, **options})


def packed(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One row of samples, one after another: `input_ids`, `shift_labels`, `position_ids` and `document_ids`, each [1, S]."""
    for sample in samples:
        ids, labels = sample["input_ids"], sample.get("labels")
        others = sorted(set(sample) - {"input_ids", "labels"})
        if ids.ndim != 1 or (labels is not None and labels.shape != ids.shape) or others:
            shapes = {name: tuple(x.shape) for name, x in sample.items()}
            raise ValueError(f"step_batches: expected samples of input_ids [n] and labels [n] without padding, got {shapes}")
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    rows = {
        "input_ids": torch.cat([sample["input_ids"] for sample in samples]),
        "shift_labels": torch.cat([shift_labels(sample.get("labels", sample["input_ids"])) for sample in samples]),
        "position_ids": torch.cat([torch.arange(n) for n in lengths.tolist()]),
        "document_ids": torch.arange(len(samples)).repeat_interleave(lengths),
    }
    return {name: row[None] for name, row in rows.items()}
