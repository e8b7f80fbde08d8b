"""Lightning: a strategy whose ranks share sequences.

    strategy = SpanningStrategy(context_size=4)
    trainer = Trainer(accelerator="gpu", devices=8, strategy=strategy)

Ranks along the axis "cp" of `strategy.mesh` get the same batches; a module's `training_step` splits them:

    def training_step(self, batch, batch_idx):
        return self.model(**prepare_batch(batch, self.trainer.strategy.mesh, config=self.model)).loss
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    try:
        from pytorch_lightning.strategies import DDPStrategy
    except ImportError as error:
        raise ImportError(f"longspan.integrations.lightning needs lightning ({error}): pip install lightning") from error

__all__ = ["SpanningStrategy"]


class SpanningStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's DDP over data × context ranks: groups of `context_size` consecutive ranks share their sequences.

    Gradients are averaged over all ranks, as `prepare_batch` expects (`gradients="mean"`).

    Args:
        context_size: Ranks that share a sequence. It divides the number of processes.
        **kwargs: As for `DDPStrategy`.
    """

    def __init__(self, *, context_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.context_size = context_size
        self._mesh: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The axes "dp" and "cp", after Lightning has set up the processes."""
        if self._mesh is None:
            raise ValueError("SpanningStrategy.mesh: expected a call in a hook or a step of training, got one before processes were set up")
        return self._mesh

    def setup_environment(self) -> None:
        """Lightning's hook: process groups and the mesh."""
        super().setup_environment()
        if self.world_size % self.context_size:
            raise ValueError(f"SpanningStrategy: expected a context_size that divides {self.world_size} processes, got {self.context_size}")
        shape = (self.world_size // self.context_size, self.context_size)
        self._mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("dp", "cp"))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Lightning's sampler gives ranks that share a sequence the same samples."""
        return {"num_replicas": self.world_size // self.context_size, "rank": self.global_rank // self.context_size}
