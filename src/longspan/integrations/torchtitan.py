"""torchtitan: its Trainer with sequences that are split over the axis "cp" by longspan's plans.

    config = SpanningTrainer.Config(model_spec=model_registry("8B", attn_backend="flex"), …)
    config.parallelism.context_parallel_degree = 8
    config.override.imports = ["longspan.integrations.torchtitan.spanning_attention"]
    config.training.disable_cuda_graphs = True

The override replaces `FlexAttention` of a model by `SpanningAttention`. `SpanningTrainer` plans every batch from its positions, shards it,
and gives the plan to the model in place of the `BlockMask`. Both are extension points that torchtitan documents: `torchtitan/overrides` and
`Trainer.post_dataloading_process`.

Tested with torchtitan 0.3.0. A version whose `FlexAttention.forward` or hooks have other arguments raises ImportError.

Legend, as torchtitan's: B batch, L tokens of this rank, N heads, H head dim; S tokens of the whole sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan._comm.mesh import Mesh
from longspan._engine.attention import attention
from longspan._masks.constructors import causal, documents
from longspan._planner.plan import Plan
from longspan._planner.planning import plan

try:
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.module import Module
    from torchtitan.protocols.sharding import LocalMapConfig
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise ImportError(f"longspan.integrations.torchtitan needs torchtitan 0.3.0 ({error}): pip install torchtitan==0.3.0") from error

__all__ = ["SpanningAttention", "SpanningTrainer", "spanning_attention"]


def _check_arguments(function: Callable[..., Any], expected: tuple[str, ...]) -> None:
    """Raise ImportError unless torchtitan's function begins with these arguments: other names may be other shapes."""
    names = tuple(name for name in inspect.signature(function).parameters if name != "self")
    if names[: len(expected)] != expected:
        raise ImportError(
            f"longspan.integrations.torchtitan: expected {function.__qualname__}({', '.join(expected)}, …) as in torchtitan 0.3.0, got "
            f"({', '.join(names)}); pip install torchtitan==0.3.0"
        )


_check_arguments(FlexAttention.forward, ("q_BLNH", "k_BLNH", "v_BLNH", "attention_masks"))
_check_arguments(Trainer.post_dataloading_process, ("input_dict", "labels"))


class SpanningAttention(Module):  # type: ignore[misc]
    """torchtitan's inner attention over the ranks of a plan, which comes in place of the `BlockMask`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc, name-defined]
        """No settings: the plan has them."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        score_mod: Callable[..., Tensor] | None = None,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **rest: Any,
    ) -> Tensor:
        """Attention of this rank's queries to all keys: [B, L, N, H]. Raises ValueError without a plan and for an unknown setting."""
        if not isinstance(attention_masks, Plan):
            raise ValueError(
                f"SpanningAttention: expected a plan as attention_masks, got {type(attention_masks).__name__}; train with "
                "longspan.integrations.torchtitan.SpanningTrainer"
            )
        rest.pop("enable_gqa", None)  # by the numbers of heads
        unknown = [name for name, value in rest.items() if value is not None]
        if unknown:
            raise ValueError(f"SpanningAttention: got {', '.join(unknown)}, which is not supported; ignoring it could be wrong")
        query, key, value = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        if out_transform is None:
            out: Tensor = attention(query, key, value, plan=attention_masks, scale=scale, score_mod=score_mod)
            return out.transpose(1, 2)
        out, lse = attention(query, key, value, plan=attention_masks, scale=scale, score_mod=score_mod, return_lse=True)
        return out_transform(out.transpose(1, 2), lse.transpose(1, 2))


@override(target=FlexAttention.Config, description="attention over ranks by longspan's plans")  # type: ignore[untyped-decorator]
def spanning_attention(config: Any) -> SpanningAttention.Config:
    """torchtitan's override: `SpanningAttention` for `FlexAttention`, with KV that stay sharded over "cp"."""
    sharding = config.sharding_config
    if sharding is not None:
        queries = sharding.in_src_shardings["q_BLNH"]
        sharding = replace(
            sharding, in_dst_shardings=dict(sharding.in_src_shardings), local_map=LocalMapConfig(in_grad_placements=(queries,) * 3)
        )
    return derive(config, SpanningAttention.Config, sharding_config=sharding)  # type: ignore[no-any-return]


class SpanningTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's Trainer, which plans attention for every batch.

    Packed documents begin where positions are 0, as in torchtitan. Ranks that share a sequence get equally many tokens of it.

    Raises:
        ValueError: A setting is not supported: the spmd_backend "full_dtensor", CUDA graphs, pipeline parallelism, validation, models with
            masks of their own or without the override.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc, name-defined]
        """torchtitan's settings, and the plan's: names of a layout and a strategy, as `longspan.plan` takes them."""

        layout: str = "head_tail"
        strategy: str = "auto"

    def __init__(self, config: Config) -> None:
        _check(config)
        spec: Any = config.model_spec  # type: ignore[attr-defined]
        settings: Any = {"model_spec": replace(spec, parallelize_fn=_without_context(spec.parallelize_fn))}
        super().__init__(replace(config, **settings))
        model = self.model_parts[0]
        if not isinstance(model, Decoder) or type(model).get_attention_masks is not Decoder.get_attention_masks:
            raise ValueError(f"SpanningTrainer: expected a decoder with torchtitan's causal mask of documents, got {type(model).__name__}")
        others = [m for m in model.modules() if isinstance(m, FlexAttention)]
        if others or not any(isinstance(m, SpanningAttention) for m in model.modules()):
            raise ValueError(
                "SpanningTrainer: expected a model with SpanningAttention, got one without; make it with attn_backend='flex' and give "
                f"override.imports = [{__name__ + '.spanning_attention'!r}]"
            )

    def post_dataloading_process(self, input_dict: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """torchtitan's hook: this rank's tokens, labels and positions, and the plan of the batch."""
        inputs = input_dict["input"]
        others = sorted(set(input_dict) - {"input", "positions"})
        if others:
            raise ValueError(f"SpanningTrainer: expected the entries 'input' and 'positions' in a batch, got {', '.join(others)}")
        positions = input_dict.get("positions")
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device)
        positions = positions.expand(inputs.shape)
        made = self._plan(positions)
        inputs, labels, positions = (made.shard(x, 1) for x in (inputs, labels, positions))
        extra = {"positions": positions, "attention_masks": made}
        self.ntokens_seen += labels.numel()
        if self.config.parallelism.spmd_backend == "spmd_types":
            inputs, labels, extra = annotate_input_spmd_types(self.parallel_dims, inputs, labels, extra)
        return inputs, labels, extra

    def _plan(self, positions: Tensor) -> Plan:
        """The plan of a batch with these positions [B, S]."""
        batch, length = positions.shape
        ids = (positions == 0).cumsum(1).cpu()
        mask = causal()
        if bool((ids != ids[:, :1]).any()):
            mask = mask & documents(ids=ids[0] if bool((ids == ids[:1]).all()) else ids)
        layer = self.model_config.first_attention
        ranks = self.config.parallelism.tensor_parallel_degree  # they share the heads
        heads, kv_heads = layer.n_heads // ranks, (layer.n_kv_heads or layer.n_heads) // ranks
        made = plan(
            mask, length, self._context_mesh, layout=self.config.layout, strategy=self.config.strategy, batch=batch, heads=heads,
            kv_heads=kv_heads,
        )  # fmt: skip
        lengths = {made.layout.local_len(rank) for rank in range(made.mesh.size)}
        if len(lengths) > 1:
            raise ValueError(
                f"SpanningTrainer: expected equally many tokens on all ranks, as torchtitan does, got {sorted(lengths)} with "
                f"layout={self.config.layout!r}; use 'head_tail' or 'contiguous'"
            )
        return made

    @property
    def _context_mesh(self) -> Any:
        mesh = self.parallel_dims.get_optional_mesh("cp")
        return Mesh.abstract(1) if mesh is None else mesh


class _OtherDims:
    """torchtitan's `ParallelDims` that says there is no context parallelism. Meshes are the same."""

    cp_enabled = False

    def __init__(self, dims: Any) -> None:
        self._dims = dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


def _without_context(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    """A model's parallelize_fn that leaves attention alone: with "partial_dtensor" it would gather KV, or raise for our attention."""

    @functools.wraps(parallelize)
    def parallelize_others(model: Any, *, parallel_dims: Any, parallelism: Any, **options: Any) -> Any:
        dims = _OtherDims(parallel_dims) if parallelism.spmd_backend == "partial_dtensor" else parallel_dims
        return parallelize(model, parallel_dims=dims, parallelism=parallelism, **options)

    return parallelize_others


def _check(config: Any) -> None:
    """Raise ValueError for settings that are not supported."""
    if config.parallelism.spmd_backend == "full_dtensor":
        raise ValueError("SpanningTrainer: expected spmd_backend 'spmd_types' or 'partial_dtensor', got 'full_dtensor'")
    if not config.training.disable_cuda_graphs:
        raise ValueError("SpanningTrainer: expected training.disable_cuda_graphs=True: every batch has a plan of its own")
    if config.parallelism.pipeline_parallel_degree > 1:
        raise ValueError("SpanningTrainer: expected pipeline_parallel_degree=1: plans are not passed to pipeline stages")
    if config.validator.enable:
        raise ValueError("SpanningTrainer: expected validator.enable=False: torchtitan's Validator shards batches by itself")
