"""The README's examples run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import longspan as ls

FIRST, SECOND = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)[:2]


def test_the_ten_lines_run_and_give_gradients(capsys: Any) -> None:
    names: dict[str, Any] = {}
    exec(FIRST, names)
    assert names["out"].shape == (1, 8, 1000, 64)
    assert all(torch.isfinite(names[n].grad).all() and names[n].grad.any() for n in ("q", "bias"))
    assert "BlockTable(1000 × 1000" in capsys.readouterr().out


def test_many_devices_give_what_one_gives(capsys: Any) -> None:
    names: dict[str, Any] = {}
    exec(SECOND, names)
    x = names["tokens"].view(1, 1000, 8, 64).transpose(1, 2)
    want = ls.attention(x, x, x, mask=names["mask"])
    assert all(torch.allclose(out, want, atol=1e-5) for out in names["outs"])
    assert "all-gather" in capsys.readouterr().out
