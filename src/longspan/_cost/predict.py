"""Predictions: the timeline of a workload on a cluster."""

from __future__ import annotations

from longspan._cost.pass_simulation import PassSimulation
from longspan._cost.rates import Cluster
from longspan._cost.timeline import Conditions, Timeline
from longspan._cost.workload import Workload

TIE = 1.01  # times within this factor count as equal: then the simpler option wins


def timeline(work: Workload, cluster: Cluster, conditions: Conditions | None = None) -> Timeline:
    """The predicted timeline of a workload on a cluster."""
    conditions = conditions or Conditions()
    backward_work = work.with_backward_moves()
    forward = PassSimulation(work, cluster, conditions)
    backward = PassSimulation(backward_work.split(), cluster, conditions)
    kv_bytes = (work.received + backward_work.received).sum(2) * work.kv_token_bytes
    grad_bytes = backward_work.sent.sum(2) * work.kv_token_bytes * (work.shape.grad_element / work.shape.element)
    return Timeline(
        forward=forward.run(backward=False), backward=backward.run(backward=True), bytes=kv_bytes + grad_bytes + forward.transpose_bytes()
    )


def fastest(
    work: Workload, cluster: Cluster, conditions: Conditions | None = None, *, overlap: bool | None = None
) -> tuple[Workload, Timeline]:
    """A workload that does or does not overlap local computation with the first all-to-all, and its timeline.

    Without overlap, local KV is computed together with the KV of the first all-to-all: no running result is written and read again, but no
    communication is hidden. With several steps there is a running result anyway.

    Args:
        work: The workload with local KV in step 0.
        cluster: The devices.
        conditions: Slow ranks and links.
        overlap: Whether to overlap; None for the faster of both, where there is one all-to-all.
    """
    options = [work] if overlap is not False or not work.exchange_steps else []
    if work.exchange_steps and (overlap is False or (overlap is None and work.exchange_steps == 1)):
        options.append(work.join())
    timed = [(option, timeline(option, cluster, conditions)) for option in options]
    return timed[-1] if timed[-1][1].seconds * TIE < timed[0][1].seconds else timed[0]
