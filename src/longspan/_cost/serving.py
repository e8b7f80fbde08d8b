"""Serving, predicted: time to first token, time per token, memory, and which tensors a chunked prefill passes.

Devices are tp × cp: tp devices share heads and weights inside a node, cp groups of them share each sequence's KV. Assumptions: matrix
products run at the attention kernel's best measured rate; weights and KV are read at the copy bandwidth, FP8 KV at a share of it;
tp groups sum activations twice per layer by a ring all-reduce, which nothing hides. A prefill without cached tokens passes KV in bfloat16.

Legend: N = cp groups, T new tokens, P cached tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from longspan._cost.rates import Cluster, Shape

ELEMENT = 2  # bytes of an element of weights, activations, keys and values
WIDE = 4  # bytes of an element of partial results
_FP8_RATE = 0.65  # of the copy bandwidth, for FP8 KV; on an H200, 0.61 at 32 × 4k and 131k tokens, 0.72 at 64 × 8k
_RESERVED = 0.1  # share of a device's memory that serving leaves free: activations, buffers, fragmentation


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder.

    Attributes:
        parameters: Parameters that a token uses; `all_parameters`: that memory holds, None for the same.
        kv_element: Bytes of an element of keys and values in the cache, 1 or 2.
        window, full_layers: Layers without a window are `full_layers`, None for all; the others see `window` tokens.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    all_parameters: float | None = None
    window: int | None = None
    full_layers: int | None = None
    kv_element: int = ELEMENT

    @property
    def weight_bytes(self) -> float:
        """Bytes of all parameters."""
        return ELEMENT * (self.parameters if self.all_parameters is None else self.all_parameters)

    @property
    def unbounded_layers(self) -> int:
        """Layers without a window."""
        return self.layers if self.full_layers is None else self.full_layers

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of keys and values of one sequence in all layers."""
        windowed = 0 if self.window is None else (self.layers - self.unbounded_layers) * min(tokens, self.window)
        return (self.unbounded_layers * tokens + windowed) * 2 * self.kv_heads * self.head_dim * self.kv_element


MODELS = {
    model.name: model
    for model in (
        ModelSizes(name="qwen3-8b", layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, parameters=8.2e9),
        ModelSizes(name="qwen3-32b", layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, parameters=32.8e9),
        ModelSizes(name="llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, parameters=8.0e9),
        ModelSizes(name="llama3-70b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, parameters=70.6e9),
        ModelSizes(name="llama3-405b", layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, parameters=405e9),
        ModelSizes(
            name="gemma3-27b", layers=62, hidden=5376, heads=32, kv_heads=16, head_dim=128, parameters=27.0e9, window=1024, full_layers=10
        ),
        ModelSizes(
            name="gpt-oss-120b", layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, parameters=5.1e9, all_parameters=117e9,
            window=128, full_layers=18,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServingGroup:
    """The devices: `tp` share heads and weights, `cp` groups of them share KV."""

    cluster: Cluster
    tp: int
    cp: int

    @property
    def gpus(self) -> int:
        return self.tp * self.cp

    @property
    def context_cluster(self) -> Cluster:
        """The profile of the cp groups, as one device each: a device's peers are in other nodes once tp fills a node."""
        return replace(self.cluster, gpus_per_node=max(1, self.cluster.gpus_per_node // self.tp))

    def shape(self, model: ModelSizes) -> Shape:
        """Heads of one device."""
        return Shape(heads=model.heads // self.tp, kv_heads=max(1, model.kv_heads // self.tp), head_dim=model.head_dim, element=ELEMENT)

    def kv_copies(self, model: ModelSizes) -> float:
        """Number of devices of a tp group that hold the same KV head."""
        return max(1.0, self.tp / model.kv_heads)

    def all_reduce(self, size: float) -> float:
        """Seconds of one all-reduce of `size` bytes over a tp group."""
        if self.tp == 1:
            return 0.0
        return self.cluster.inside.latency + 2 * (self.tp - 1) / self.tp * size / self.cluster.inside.bandwidth

    @property
    def context_link(self) -> tuple[float, float]:
        """(bytes per second, latency) between cp groups."""
        link = self.cluster.inside if self.tp * self.cp <= self.cluster.gpus_per_node else self.cluster.between
        return link.bandwidth, link.latency


def default_tp(model: ModelSizes, cluster: Cluster, gpus: int) -> int:
    """Devices that share heads: a node, but no more than there are KV heads, and a divisor of the devices."""
    limit = min(cluster.gpus_per_node, model.kv_heads, gpus)
    return max(d for d in range(1, limit + 1) if gpus % d == 0 and model.kv_heads % d == 0 and model.heads % d == 0)


class PrefillTime(NamedTuple):
    """Seconds of a prefill by part; `waiting` is the part of `attention` that waits for KV."""

    attention: float
    matrices: float
    all_reduce: float
    waiting: float

    @property
    def seconds(self) -> float:
        return self.attention + self.matrices + self.all_reduce


def prefill_time(model: ModelSizes, group: ServingGroup, tokens: int, *, attention: float, waiting: float) -> PrefillTime:
    """The prefill of one sequence. `attention`, `waiting`: seconds of all layers' attention over the cp groups, as plans predict them."""
    return PrefillTime(
        attention=attention,
        matrices=2 * model.parameters * tokens / group.gpus / group.cluster.flops,
        all_reduce=2 * model.layers * group.all_reduce(tokens / group.cp * model.hidden * ELEMENT),
        waiting=waiting,
    )


class DecodeTime(NamedTuple):
    """Seconds of one decoded token per sequence by part."""

    weights: float
    cache: float
    merge: float
    all_reduce: float

    @property
    def seconds(self) -> float:
        return sum(self)


def decode_time(model: ModelSizes, group: ServingGroup, context: int, batch: int) -> DecodeTime:
    """One step of `batch` sequences of `context` tokens. Weights are read once per step, KV once per sequence."""
    cluster, device = group.cluster, group.shape(model)
    read = min(batch * model.parameters, model.weight_bytes / ELEMENT)  # of a mixture of experts, tokens use different parameters
    weights = max(ELEMENT * read / group.tp / cluster.hbm, 2 * batch * model.parameters / group.tp / cluster.flops)
    cache = batch * model.cache_bytes(context) * group.kv_copies(model) / group.gpus / cluster.hbm
    cache /= _FP8_RATE if model.kv_element < ELEMENT else 1.0
    merge = 0.0
    if group.cp > 1:
        bandwidth, latency = group.context_link
        partial, merged = device.heads * (device.head_dim + 1) * WIDE, device.heads * device.head_dim * ELEMENT
        merge = model.layers * (2 * latency + (group.cp - 1) / group.cp * batch * (partial + merged) / bandwidth)
    launches = model.layers * cluster.kernel.launch
    return DecodeTime(
        weights=weights,
        cache=cache + launches,
        merge=merge,
        all_reduce=2 * model.layers * group.all_reduce(batch * model.hidden * ELEMENT),
    )


class ServingMemory(NamedTuple):
    """Bytes on one device."""

    weights: float
    cache_per_sequence: float
    room: float

    @property
    def largest_batch(self) -> int:
        """Sequences of which weights and cache fit."""
        return max(0, int((self.room - self.weights) // self.cache_per_sequence))


def serving_memory(model: ModelSizes, group: ServingGroup, context: int) -> ServingMemory:
    """Weights, and the cache of one sequence of `context` tokens, on one device."""
    return ServingMemory(
        weights=model.weight_bytes / group.tp,
        cache_per_sequence=model.cache_bytes(context) * group.kv_copies(model) / group.gpus,
        room=group.cluster.memory * (1 - _RESERVED),
    )


class PassedTensors(NamedTuple):
    """Seconds that a layer's chunk takes if ranks pass KV around the ring, or queries, and which is faster."""

    kv: float
    q: float

    @property
    def choice(self) -> str:
        return "KV" if self.kv <= self.q else "queries"


def passed_tensors(model: ModelSizes, group: ServingGroup, new: int, cached: int) -> PassedTensors:
    """One layer's attention of `new` tokens over `cached` + `new` tokens, both spread evenly over the cp groups.

    Each of N ring steps computes T / N queries over (P + T) / N keys, while the next KV or queries arrive. Passed queries leave partial
    results on every rank: an all-to-all returns them, which nothing hides.
    """
    n, device, cluster = group.cp, group.shape(model), group.cluster
    if n == 1:
        return PassedTensors(0.0, 0.0)
    bandwidth, latency = group.context_link
    pairs = new / n * (cached + new / 2) / n
    compute = device.flops(pairs) / cluster.flops + cluster.kernel.launch
    q_bytes, kv_bytes = new / n * device.q_bytes, (cached + new) / n * device.kv_bytes * model.kv_element / ELEMENT
    returned = (n - 1) * new / n * device.heads * (device.head_dim * ELEMENT + WIDE)
    ring = [compute + (n - 1) * max(compute, latency + size / bandwidth) for size in (kv_bytes, q_bytes)]
    return PassedTensors(kv=ring[0], q=ring[1] + latency + returned / bandwidth)


def crossover(model: ModelSizes, group: ServingGroup, total: int) -> float:
    """The share of new tokens among `total` above which passing KV is faster; 1 if passing queries always is."""
    for new in range(total // 1000, total, max(1, total // 1000)):
        if passed_tensors(model, group, new, total - new).choice == "KV":
            return new / total
    return 1.0
