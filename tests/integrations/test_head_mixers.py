"""Which layers are gated delta nets that ranks divide by heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from longspan.integrations._head_mixers import splits_by_heads


def layer(**changes: Any) -> nn.Module:
    """A gated delta net of 6 key heads and 12 value heads of 5, without code. None removes a part."""
    made = nn.Module()
    sizes = {"num_k_heads": 6, "num_v_heads": 12, "key_dim": 24, "value_dim": 60, "conv_dim": 108, "head_v_dim": 5}
    parts: dict[str, Any] = {name: nn.Linear(2, 3) for name in ("out_proj", "in_proj_qkvz", "in_proj_ba")}
    parts |= {"conv1d": nn.Conv1d(108, 108, 4, groups=108), "norm": nn.LayerNorm(5, bias=False)}
    weights = {name: nn.Parameter(torch.ones(12)) for name in ("A_log", "dt_bias")}
    for name, value in {**sizes, **parts, **weights, **changes}.items():
        if value is not None:
            setattr(made, name, value)
    return made


SEPARATE: dict[str, Any] = {
    "in_proj_qkvz": None, "in_proj_ba": None, **{f"in_proj_{name}": nn.Linear(2, 3) for name in ("qkv", "z", "b", "a")}
}  # fmt: skip


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("ranks", "divides"), [(1, True), (2, True), (3, True), (6, True), (4, False), (12, False)])
def test_ranks_that_divide_the_key_heads_divide_a_layer(ranks: int, divides: bool, separate: bool) -> None:
    assert splits_by_heads(layer(**(SEPARATE if separate else {})), ranks) is divides


@pytest.mark.parametrize(
    "changes",
    [
        {"gate": nn.Linear(2, 3)},
        {"in_proj_ba": None},
        {"in_proj_qkv": nn.Linear(2, 3)},
        {"scale": nn.Parameter(torch.ones(12))},
        {"dt_bias": None},
        {"conv_dim": None},
        {"key_dim": None},
        {"conv1d": nn.Conv1d(108, 108, 4, groups=54)},
        {"conv1d": nn.Conv1d(216, 216, 4, groups=216)},
        {"conv1d": nn.Linear(108, 108)},
        {"norm": nn.LayerNorm(60, bias=False)},
        {"norm": nn.ParameterList([torch.ones(5), torch.ones(60)])},
    ],
    ids=str,
)
def test_other_layers_are_not_divided(changes: dict[str, Any]) -> None:
    assert not splits_by_heads(layer(**changes), 2)
    assert not splits_by_heads(nn.Linear(2, 3), 1)
