"""What a plan takes, roughly: enough to choose between strategies, not to replace a measurement.

All times are of forward and backward together, for the busiest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

BACKWARD = 2.5  # floating-point operations of a backward pass per one of the forward pass


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One device and its links. The defaults are a Hopper-class card in a node with a fast switch, at speeds that kernels reach.

    flops:      operations per second of attention in half precision.
    bandwidth:  bytes per second that a device receives.
    latency:    seconds until an exchange has begun.
    """

    flops: float = 450e12
    bandwidth: float = 150e9
    latency: float = 30e-6


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that turn tokens and pairs into bytes and operations."""

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    element: int = 2  # bytes
    grad_element: int = 4  # bytes of a partial gradient on its way

    def compute(self, pairs: float, cluster: Cluster) -> tuple[float, float]:
        """Seconds (forward, backward) for so many pairs of one batch row and head."""
        forward = 4.0 * self.head_dim * self.heads * self.batch * pairs / cluster.flops
        return forward, BACKWARD * forward

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.batch * self.kv_heads * self.head_dim * self.element

    @property
    def kv_grad_bytes(self) -> int:
        return 2 * self.batch * self.kv_heads * self.head_dim * self.grad_element


def overlapped(*, pairs: float, received: float, stages: int, shape: Shape, cluster: Cluster) -> float:
    """Keys that travel while others are computed: whichever takes longer. Backward sends keys again and gradients home."""
    forward, backward = shape.compute(pairs, cluster)
    keys, grads = (received * b / cluster.bandwidth for b in (shape.kv_bytes, shape.kv_grad_bytes))
    start = cluster.latency * stages
    return max(forward, keys + start) + max(backward, keys + grads + 2 * start)


def transposed(*, pairs: float, local: float, degree: int, shape: Shape, cluster: Cluster) -> float:
    """Heads and tokens transposed before and after: nothing to hide it behind. `local`: a rank's own tokens."""
    forward, backward = shape.compute(pairs, cluster)
    width = shape.batch * shape.head_dim * shape.element
    away = local * (degree - 1) / degree
    query, keys = away * width * shape.heads, 2 * away * width * max(shape.kv_heads, degree if shape.kv_heads < degree else 0)
    there = query + keys, query  # forward: q, k, v in; out back
    back = 3 * query + keys, query + keys  # backward: q, k, v, out, grad in; gradients back
    return forward + backward + (sum(there) + sum(back)) / cluster.bandwidth + 4 * cluster.latency
