"""Serving on a cluster, predicted from the plan of the prefill's attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longspan._comm.mesh import Mesh
from longspan._cost.rates import Cluster
from longspan._cost.serving import (
    DecodeTime,
    ModelSizes,
    PassedTensors,
    PrefillTime,
    ServingGroup,
    ServingMemory,
    crossover,
    decode_time,
    default_tp,
    passed_tensors,
    prefill_time,
    serving_memory,
)
from longspan._masks.constructors import causal, sliding_window
from longspan._planner.plan import Plan
from longspan._planner.planning import plan

CHUNK = 8192  # tokens of a chunk of the prefill whose passed tensors are reported


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """A model served by a group of devices, `batch` sequences of `context` tokens at a time."""

    model: ModelSizes
    group: ServingGroup
    context: int
    batch: int

    @cached_property
    def attention(self) -> Plan:
        """The plan of a full layer's attention in the prefill, over the cp groups."""
        return self._planned(None)

    def _planned(self, window: int | None) -> Plan:
        shape = self.group.shape(self.model)
        mask = causal() if window is None else causal() & sliding_window(window)
        return plan(
            mask, self.context, Mesh.abstract(self.group.cp), heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            cluster=self.group.context_cluster,
        )  # fmt: skip

    @cached_property
    def prefill(self) -> PrefillTime:
        """The prefill of one sequence."""
        model, seconds, waiting = self.model, 0.0, 0.0
        windowed = model.layers - model.unbounded_layers
        layers = [(model.unbounded_layers, self.attention)] + ([(windowed, self._planned(model.window))] if windowed else [])
        for count, made in layers:
            forward = made.report(self.group.context_cluster).timeline.forward
            seconds += count * forward.seconds
            waiting += count * float(forward.exposed.max())
        return prefill_time(model, self.group, self.context, attention=seconds, waiting=waiting)

    @cached_property
    def decode(self) -> DecodeTime:
        """One step of the batch at the end of its context."""
        return decode_time(self.model, self.group, self.context, self.batch)

    @cached_property
    def memory(self) -> ServingMemory:
        return serving_memory(self.model, self.group, self.context)

    @property
    def chunk(self) -> int:
        """Tokens of the prefill's last chunk."""
        return min(CHUNK, self.context)

    @cached_property
    def passed(self) -> PassedTensors:
        """The last chunk of the prefill, over all tokens before it."""
        return passed_tensors(self.model, self.group, self.chunk, self.context - self.chunk)

    @property
    def numbers(self) -> dict[str, tuple[str, float, str]]:
        """The headline numbers by name: label, value, unit."""
        prefill, decode, memory = self.prefill, self.decode, self.memory
        return {
            "first_token": ("time to first token, one sequence", prefill.seconds, "s"),
            "prefill_waiting": ("of it waiting for KV", prefill.waiting, "s"),
            "token": (f"time per token, batch {self.batch}", 1e3 * decode.seconds, "ms"),
            "throughput": ("decoded tokens per second, all sequences", self.batch / decode.seconds, ""),
            "weights": ("weights per device", memory.weights / 2**30, "GiB"),
            "cache": (f"cache per device, batch {self.batch}", self.batch * memory.cache_per_sequence / 2**30, "GiB"),
            "batch": ("largest batch that fits", memory.largest_batch, ""),
        }

    @property
    def words(self) -> str:
        """The problem in words."""
        group = self.group
        return (
            f"{self.model.name}, {self.batch} × {self.context} tokens on {group.gpus} devices: {group.tp} share heads × {group.cp} share KV"
            + (", FP8 KV" if self.model.kv_element == 1 else "")
        )

    def __str__(self) -> str:
        prefill, decode, memory = self.prefill, self.decode, self.memory
        fits, cache = memory.largest_batch >= self.batch, self.batch * memory.cache_per_sequence
        lines = [
            self.words,
            f"  first token  {prefill.seconds:.2f} s, one sequence: attention {prefill.attention:.2f} ({prefill.waiting:.2f} waiting for "
            f"KV), matrix products {prefill.matrices:.2f}, all-reduces {prefill.all_reduce:.2f}",
            f"  per token    {1e3 * decode.seconds:.2f} ms: weights {1e3 * decode.weights:.2f}, cache {1e3 * decode.cache:.2f}, merges "
            f"{1e3 * decode.merge:.2f}, all-reduces {1e3 * decode.all_reduce:.2f}; {self.batch / decode.seconds:.0f} tokens/s in all",
            f"  memory       {memory.weights / 2**30:.1f} GiB of weights and {cache / 2**30:.1f} GiB of cache per device; "
            f"{memory.room / 2**30:.1f} GiB usable ({self.group.cluster.name}){'' if fits else ': too little'}",
            f"  batch        at most {memory.largest_batch} sequences of {self.context} tokens fit",
            f"  prefill      {self.attention.strategy}, layout {self.attention.data.layout}",
        ]
        if self.group.cp > 1:
            share = crossover(self.model, self.group, self.context)
            lines.append(
                f"  chunks       the last {self.chunk} tokens over the cache: pass {self.passed.choice} (KV {1e3 * self.passed.kv:.2f} ms, "
                f"queries {1e3 * self.passed.q:.2f} ms per layer); KV is cheaper from {100 * share:.1f} % new tokens on"
            )
        return "\n".join(lines)


def plan_serving(model: ModelSizes, cluster: Cluster, *, gpus: int, context: int, batch: int, tp: int | None = None) -> ServingPlan:
    """The serving plan of a model on `gpus` devices. `tp`: devices that share heads; None: as many as a node and the KV heads allow.

    Raises:
        ValueError: tp does not divide the devices, or the heads.
    """
    chosen = default_tp(model, cluster, gpus) if tp is None else tp
    if chosen < 1 or gpus % chosen or model.heads % chosen or (model.kv_heads % chosen and chosen % model.kv_heads):
        raise ValueError(
            f"tp: expected a divisor of {gpus} devices and {model.heads} heads that fits {model.kv_heads} KV heads, got {chosen}"
        )
    if chosen > cluster.gpus_per_node:
        raise ValueError(f"tp: expected at most the {cluster.gpus_per_node} devices of a node of {cluster.name}, got {chosen}")
    return ServingPlan(model=model, group=ServingGroup(cluster=cluster, tp=chosen, cp=gpus // chosen), context=context, batch=batch)
