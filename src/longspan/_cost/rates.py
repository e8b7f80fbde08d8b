"""Rates: shapes in bytes and operations, kernels by measured tables, links by bandwidth and latency."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from longspan._masks.block_table import BLOCK_SIZE

BACKWARD = 2.5  # floating-point operations of a backward pass per one of the forward pass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that turn tokens and pairs into bytes and operations."""

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    element: int = 2  # bytes of an element of q, k, v
    grad_element: int = 4  # bytes of an element of a partial gradient in flight

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return 2 * self.batch * self.kv_heads * self.head_dim * self.element

    @property
    def q_bytes(self) -> int:
        """Bytes of the queries (or outputs) of one token."""
        return self.batch * self.heads * self.head_dim * self.element

    def kv_heads_of(self, degree: int) -> int:
        """KV heads that a rank holds when `degree` ranks share the heads."""
        return max(1, self.kv_heads // degree)

    def flops(self, pairs: float) -> float:
        """Operations of a forward pass over `pairs` pairs per batch row and head."""
        return 4.0 * self.head_dim * self.heads * self.batch * pairs


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link of a device.

    Attributes:
        bandwidth: Bytes per second that a device sends and, at the same time, receives.
        latency: Seconds until an all-to-all has begun.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured TFLOP/s of useful work, by the mean number of keys that a query sees.

    Attributes:
        keys: Mean numbers of keys.
        full: Rates over rectangles.
        causal: Rates over rows with a diagonal edge.
    """

    keys: tuple[float, ...]
    full: tuple[float, ...]
    causal: tuple[float, ...]

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """Keys [n], and picoseconds per query and unit of head dim for both kinds [2, n].

        Linear between points, so that sums of rows are exact.
        """
        keys = torch.tensor(self.keys, dtype=torch.float64)
        return keys, 4.0 * keys / torch.tensor([self.full, self.causal], dtype=torch.float64)

    def seconds(self, keys: Tensor, edges: Tensor) -> Tensor:
        """Seconds per query (of one head, per unit of head dim) that sees `keys` keys, `edges` of its tiles being partial.

        The causal rates were measured with one partial tile per row. Each further partial tile wastes half a tile.
        """
        at, table = self._tables
        full, causal = _interpolated(keys, at, table)
        seconds = torch.lerp(full, causal, edges.clamp(0, 1))
        tile = float(table[0, -1] - table[0, -2]) / float(at[-1] - at[-2]) * BLOCK_SIZE
        return (seconds + (edges - 1).clamp(min=0) * (tile / 2)) * 1e-12


def _interpolated(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """Both rows of values [2, n] at x: linear between the points and beyond them.

    Before the first point, the result is at least the line from that point to half its height at 0.
    """
    i = torch.searchsorted(at, x.contiguous()).clamp_(1, len(at) - 1)
    before = values[:, i - 1]
    linear = before + (values[:, i] - before) * ((x - at[i - 1]) / (at[i] - at[i - 1]))
    share = (0.5 + 0.5 * x / at[0]) * ((x > 0) & (x < at[0]))
    return torch.maximum(linear, values[:, 0].view(2, *[1] * x.ndim) * share)


@dataclass(frozen=True, kw_only=True)
class KernelRates:
    """Measured speed of a kernel at head dim 128.

    Attributes:
        name, source: The kernel, and where the numbers come from.
        forward, backward: Rates of the passes.
        launch: Seconds of a call besides its work: launch and drain.
        slots: CTAs that run at once. A call with fewer query tiles takes as long as one with this many.
        dims: Rates at other head dims, as a share of the rate at 128.
    """

    name: str
    source: str
    forward: Rates
    backward: Rates
    launch: float
    slots: int
    dims: dict[int, float] = field(default_factory=dict)

    def dim_factor(self, head_dim: int) -> float:
        """Seconds per query at a head dim, relative to those at 128."""
        known = {128: 1.0, **self.dims}
        nearest = min(known, key=lambda d: abs(d - head_dim))
        return head_dim / 128 / known[nearest]

    def seconds(self, *, rows: Tensor, full: Tensor, partial: Tensor, head_dim: int, backward: bool) -> Tensor:
        """Seconds of calls, elementwise: `rows` query tiles times heads, over `full` and `partial` tiles. 0 without tiles."""
        rates = self.backward if backward else self.forward
        safe = rows.clamp(min=1)
        edges, keys = partial / safe, (full + partial / 2) / safe * BLOCK_SIZE
        per_row = rates.seconds(keys, edges) * BLOCK_SIZE * 128 * self.dim_factor(head_dim) * (BACKWARD if backward else 1.0)
        busy = self.launch + per_row * torch.maximum(safe, torch.tensor(float(self.slots), dtype=torch.float64))
        return torch.where(full + partial > 0, busy, torch.zeros_like(busy))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A profile of equal devices in nodes.

    Attributes:
        name, about: The profile's name and a description.
        gpus_per_node: Devices per node.
        memory: Bytes of memory per device.
        hbm: Bytes per second, read and written together, that a copy reaches.
        inside: Links within a node.
        between: Links from a device to other nodes.
        kernel: The attention kernel's speed.
        contention: Share of a kernel's speed that is lost while an all-to-all is in flight.
    """

    name: str
    about: str
    gpus_per_node: int
    memory: float
    hbm: float
    inside: Link
    between: Link
    kernel: KernelRates
    contention: float = 0.05

    @property
    def flops(self) -> float:
        """Best measured rate of the kernel, in operations per second."""
        return max(self.kernel.forward.full) * 1e12

    @property
    def bandwidth(self) -> float:
        """Bytes per second inside a node."""
        return self.inside.bandwidth
