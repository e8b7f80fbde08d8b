"""What things cost: shapes in bytes and operations, kernels by measured tables, links by bandwidth and latency."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from longspan._masks.block_table import BLOCK_SIZE

BACKWARD = 2.5  # floating-point operations of a backward pass per one of the forward pass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that turn tokens and pairs into bytes and operations."""

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    element: int = 2  # bytes
    grad_element: int = 4  # bytes of a partial gradient on its way

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.batch * self.kv_heads * self.head_dim * self.element

    @property
    def q_bytes(self) -> int:
        """Bytes of one token's queries (or outputs)."""
        return self.batch * self.heads * self.head_dim * self.element

    def kv_heads_of(self, degree: int) -> int:
        """Key heads that a rank holds when `degree` ranks share the heads."""
        return max(1, self.kv_heads // degree)

    def flops(self, pairs: float) -> float:
        """Operations of a forward pass over so many pairs of one batch row and head."""
        return 4.0 * self.head_dim * self.heads * self.batch * pairs


@dataclass(frozen=True, kw_only=True)
class Link:
    """bandwidth: bytes per second that a device sends, and receives, at the same time. latency: seconds until an exchange has begun."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """TFLOP/s of useful work where a query sees so many keys on average: over rectangles (`full`) and over rows with an edge (`causal`)."""

    keys: tuple[float, ...]
    full: tuple[float, ...]
    causal: tuple[float, ...]

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """Keys [n], and picoseconds per query and unit of head dim for both kinds [2, n]: linear between points, so that sums of rows are
        exact.
        """
        keys = torch.tensor(self.keys, dtype=torch.float64)
        return keys, 4.0 * keys / torch.tensor([self.full, self.causal], dtype=torch.float64)

    def seconds(self, keys: Tensor, edges: Tensor) -> Tensor:
        """Seconds per query row (of one head, per unit of head dim) that sees `keys` keys, `edges` of its tiles being partial ones.

        Up to one partial tile per row is what the causal table measured. Each further one computes half a tile in vain.
        """
        at, table = self._tables
        full, causal = _interpolated(keys, at, table)
        found = torch.lerp(full, causal, edges.clamp(0, 1))
        tile = float(table[0, -1] - table[0, -2]) / float(at[-1] - at[-2]) * BLOCK_SIZE
        return (found + (edges - 1).clamp(min=0) * (tile / 2)) * 1e-12


def _interpolated(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """Both rows of values [2, n] at x: linear between the points and beyond them; before the first, never below the line from it to half
    its height at 0.
    """
    i = torch.searchsorted(at, x.contiguous()).clamp_(1, len(at) - 1)
    before = values[:, i - 1]
    found = before + (values[:, i] - before) * ((x - at[i - 1]) / (at[i] - at[i - 1]))
    share = (0.5 + 0.5 * x / at[0]) * ((x > 0) & (x < at[0]))
    return torch.maximum(found, values[:, 0].view(2, *[1] * x.ndim) * share)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """How fast a kernel was measured to be, at head dim 128. `dims`: its rate at other head dims, as a share.

    launch:   seconds of a call beyond its work: start and drain.
    slots:    programs that run at once. With fewer rows of work than that, the longest row counts.
    """

    name: str
    source: str
    forward: Rates
    backward: Rates
    launch: float
    slots: int
    dims: dict[int, float] = field(default_factory=dict)

    def dim_factor(self, head_dim: int) -> float:
        """Seconds per query at this head dim over those at 128, all else equal."""
        known = {128: 1.0, **self.dims}
        nearest = min(known, key=lambda d: abs(d - head_dim))
        return head_dim / 128 / known[nearest]

    def seconds(self, *, rows: Tensor, full: Tensor, partial: Tensor, head_dim: int, backward: bool) -> Tensor:
        """Seconds of calls, elementwise: `rows` tiles of queries times heads, over so many full and partial tiles. 0 without tiles."""
        rates = self.backward if backward else self.forward
        safe = rows.clamp(min=1)
        edges, keys = partial / safe, (full + partial / 2) / safe * BLOCK_SIZE
        per_row = rates.seconds(keys, edges) * BLOCK_SIZE * 128 * self.dim_factor(head_dim) * (BACKWARD if backward else 1.0)
        busy = self.launch + per_row * torch.maximum(safe, torch.tensor(float(self.slots), dtype=torch.float64))
        return torch.where(full + partial > 0, busy, torch.zeros_like(busy))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices. `inside`: links within a node; `between`: from a device to those of other nodes.

    hbm:         bytes per second, read and written together, that a copy reaches.
    contention:  share of a kernel's speed that is lost while data travels: the communication library's own kernels.
    """

    name: str
    about: str
    gpus_per_node: int
    memory: float
    hbm: float
    inside: Link
    between: Link
    kernel: Kernel
    contention: float = 0.05

    @property
    def flops(self) -> float:
        """The best measured rate of the kernel, operations per second."""
        return max(self.kernel.forward.full) * 1e12

    @property
    def bandwidth(self) -> float:
        return self.inside.bandwidth
