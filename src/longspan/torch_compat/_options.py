"""torch's global options, and the strategies that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from longspan._plan.strategies import StrategyName


class _CausalBehavior(Enum):
    SKIP = None
    NOT_IS_CAUSAL = False
    IS_CAUSAL = True


class _RotateMethod(Enum):
    ALL_TO_ALL = auto()
    ALL_GATHER = auto()


@dataclass
class _ContextParallelOptions:
    """torch's options. `convert_to_f32` has no effect: partial results are always float32."""

    convert_to_f32: bool = True
    enable_load_balance: bool = True
    rotate_method: _RotateMethod = _RotateMethod.ALL_GATHER


_cp_options = _ContextParallelOptions()

_ROTATIONS = {"allgather": _RotateMethod.ALL_GATHER, "alltoall": _RotateMethod.ALL_TO_ALL}


def set_rotate_method(rotate_method: str) -> None:
    """Set how the KV of SDPA moves: "allgather", all at once, or "alltoall", around a ring."""
    if rotate_method not in _ROTATIONS:
        raise NotImplementedError(f"rotate_method: expected one of {', '.join(map(repr, _ROTATIONS))}, got {rotate_method!r}")
    _cp_options.rotate_method = _ROTATIONS[rotate_method]


def strategy() -> StrategyName:
    """The strategy of `longspan.plan` for the current rotate method."""
    return "ring" if _cp_options.rotate_method is _RotateMethod.ALL_TO_ALL else "allgather"


def _is_causal_behavior(rank: int, world_size: int, i: int, is_causal: bool) -> _CausalBehavior:
    """How a rank attends in ring step i to the KV of rank − i: causally, to all of it, or not at all.

    The engine does not call this function: block tables say the same.
    """
    if not is_causal:
        return _CausalBehavior.NOT_IS_CAUSAL
    if i == 0:
        return _CausalBehavior.IS_CAUSAL
    return _CausalBehavior.NOT_IS_CAUSAL if i <= rank or _cp_options.enable_load_balance else _CausalBehavior.SKIP
