"""Determinism of gradients of captured tensors, which GPU kernels sum by atomic additions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from longspan._kernels.protocol import Work
from longspan._masks.joint import Joint
from longspan._masks.program import Program, op_name


def check_order(work: Work, needs: Sequence[bool], q: Tensor) -> None:
    """Raise or warn, as torch does, if deterministic algorithms are required and captured gradients would use atomic additions."""
    if not any(needs) or not torch.are_deterministic_algorithms_enabled() or work.score is None or work.joint is None:
        return
    if all(written_once(work.score, work.joint, i, batch=q.shape[0], heads=q.shape[1]) for i, need in enumerate(needs) if need):
        return
    message = (
        f"score_mod {work.score.name!r}: the kernels 'triton' and 'hopper' sum the gradients of captured tensors by atomic additions, in "
        "an order that may differ from run to run, and torch.use_deterministic_algorithms(True) is set. Use kernel='cpu' (any device) or "
        "kernel='dense', which sum them in a fixed order; or detach the captured tensors, or set warn_only=True"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def written_once(program: Program, joint: Joint, captured: int, *, batch: int, heads: int) -> bool:
    """Whether each element of a captured tensor's gradient has one pair that adds to it: the lookup uses b, h, q and kv as indices."""
    reads = [n for n in program.graph.nodes if n.op == "call_function" and program.captured_nodes[captured] in n.all_input_nodes]
    if len(reads) != 1 or joint.reads.count(captured) != 1 or op_name(reads[0]) != "index":
        return False
    b, h, q, kv = program.index_nodes
    needed = {q, kv, *([b] if batch > 1 else []), *([h] if heads > 1 else [])}
    return needed <= set(reads[0].args[1])  # type: ignore[arg-type]
