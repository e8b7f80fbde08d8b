"""The README's example runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch


def test_the_ten_lines_run_and_give_gradients(capsys: Any) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["out"].shape == (1, 8, 1000, 64)
    assert all(torch.isfinite(names[n].grad).all() and names[n].grad.any() for n in ("q", "bias"))
    assert "BlockTable(1000 × 1000" in capsys.readouterr().out
