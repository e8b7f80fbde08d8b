"""A decoder under context parallelism with FSDP2, tensor parallelism, accumulation, recomputation and compilation."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from longspan._training.decoder import Block, Decoder, DecoderConfig
from longspan.integrations import PreparedBatch, prepare_batch

CONFIG = DecoderConfig(vocab=53, width=40, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=36)
LENGTHS = (203, 151)  # of two batches: with data parallelism, one each


def decoder(**changes: Any) -> Decoder:
    model = Decoder(DecoderConfig(**{**CONFIG.__dict__, **changes})).initialise(4).double()
    for p in model.parameters():
        p.data *= 5
    return model


def batch_at(i: int) -> dict[str, Tensor]:
    """A batch of packed documents, with prompts of different lengths that do not count."""
    generator = torch.Generator().manual_seed(i)
    length = LENGTHS[i]
    ids = torch.randint(0, CONFIG.vocab, (1, length), generator=generator)
    labels = ids.clone()
    labels[0, : 17 + 80 * i] = -100
    documents = torch.bucketize(torch.arange(length), torch.tensor([29, 90 + i, 140]), right=True)[None]
    return {"input_ids": ids, "labels": labels, "document_ids": documents}


def loss_of(model: nn.Module, prepared: PreparedBatch) -> Tensor:
    """This rank's share of the loss."""
    plan, count = prepared["longspan_plan"]["full"], prepared["num_items_in_batch"]
    return model(prepared["input_ids"], prepared["position_ids"], plan=plan, labels=prepared["labels"], count=count)


def shares(model: nn.Module, mesh: Any, batches: list[int], **options: Any) -> Tensor:
    """This rank's share of the loss of these batches, after backward. Gradients of several batches accumulate: the count is that of all."""
    count = None if len(batches) == 1 else sum(int((batch_at(i)["labels"][:, 1:] != -100).sum()) for i in batches)
    total = torch.zeros((), dtype=torch.float64)
    for i in batches:
        loss = loss_of(model, prepare_batch(batch_at(i), mesh, gradients="sum", count=count, **options))
        loss.backward()
        total += loss.detach()
    return total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    outputs = {}
    for name, p in model.named_parameters():
        grad = p.grad
        assert grad is not None, name
        outputs[name.replace("_orig_mod.", "")] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return outputs


def summed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    for value in values.values():
        dist.all_reduce(value)
    return values


def expected(batches: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process that reads all batches."""
    import longspan as ls

    model = decoder()
    total = shares(model, ls.Mesh.abstract(1), batches)
    return total, gradients(model)


# ------------------------------------------------------------------------------------------------------------------- on a rank


def sharded_weights(mesh: DeviceMesh, world: DeviceMesh, **changes: Any) -> Decoder:
    """A decoder under FSDP2 over all ranks of the data and context axes. Gloo cannot average: gradients are summed."""
    model = decoder(**changes)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=world)
    for part in model.modules():
        if hasattr(part, "set_gradient_divide_factor"):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return model


def data_and_context(folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    model = sharded_weights(mesh, world)
    loss = shares(model, mesh, [mesh.get_local_rank("dp_shard")])
    dist.all_reduce(loss)
    outputs = {"loss": loss, "gradients": gradients(model)}
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return outputs


def heads_and_context() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = decoder()
    styles: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    styles |= {"o": RowwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], styles)
    loss = shares(model, mesh, [0])
    dist.all_reduce(loss, group=mesh.get_group("cp"))
    for p in model.parameters():
        local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        dist.all_reduce(local, group=mesh.get_group("cp"))
    return {"loss": loss, "gradients": gradients(model)}


def accumulated() -> dict[str, Any]:
    model = decoder()
    loss = shares(model, dist.group.WORLD, [0, 1])
    dist.all_reduce(loss)
    return {"loss": loss, "gradients": summed(gradients(model))}


def recomputed(how: str) -> dict[str, Any]:
    model = decoder(recompute=how == "full").train()
    if how == "selective":
        _recompute_selectively(model)
    loss = shares(model, dist.group.WORLD, [0])
    dist.all_reduce(loss)
    return {"loss": loss, "gradients": summed(gradients(model))}


def _recompute_selectively(model: Decoder) -> None:
    """Recompute everything but attention in backward."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.longspan.attend.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    plain = Block.forward
    for block in model.blocks:
        block.forward = functools.partial(  # type: ignore[method-assign]
            lambda b, *args: checkpoint(functools.partial(plain, b), *args, use_reentrant=False, context_fn=contexts), block
        )


def compiled() -> dict[str, Any]:
    model = decoder()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    loss = shares(model, dist.group.WORLD, [0])
    dist.all_reduce(loss)
    return {"loss": loss, "gradients": summed(gradients(model))}
