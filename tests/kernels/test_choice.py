"""Which kernel is fastest: rows from timings, the file that keeps them, and `auto` that reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longspan._kernels import choice
from longspan._kernels.choice import Faster, Timing
from longspan.cli.kernel_race import contest, timings
from longspan.cli.measure import Clock

ROW = Faster(kernel="cudnn", backward=True, kind="causal", dims=(64, 48), tokens=4096, capability=(8, 9))


@pytest.fixture(autouse=True)
def a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "new"))
    choice._measured_here.cache_clear()


def timing(kernel: choice.Name, tokens: int, forward: float, *, backward: float = 3.0, kv_heads: int = 8) -> Timing:
    return Timing(kernel=kernel, kind="full", dims=(64, 64), heads=(8, kv_heads), tokens=tokens, forward=forward, backward=backward)


def test_a_row_begins_where_a_kernel_is_faster_from_then_on_at_every_head_count() -> None:
    found = [timing("triton", n, 1.0, kv_heads=g) for n in (512, 1024, 2048) for g in (8, 2)]
    found += [timing("cudnn", n, 0.8, kv_heads=8) for n in (512, 1024, 2048)]
    found += [timing("cudnn", n, s, kv_heads=2) for n, s in ((512, 0.8), (1024, 1.1), (2048, 0.9))]
    found += [timing("flash", n, 0.95, kv_heads=g) for n in (512, 1024, 2048) for g in (8, 2)]
    rows = choice.winners(found, "triton", (9, 0))
    assert rows == [Faster(kernel="cudnn", backward=False, kind="full", dims=(64, 64), tokens=2048, capability=(9, 0))]
    without = [t for t in found if t.kernel != "cudnn"]
    assert [(r.kernel, r.tokens) for r in choice.winners(without, "triton", (9, 0))] == [("flash", 512)]
    assert choice.winners([replace(t, forward=1.0) for t in without], "triton", (9, 0)) == []


def test_a_kernel_that_refuses_a_length_never_wins_it() -> None:
    found = [timing("triton", 512, 1.0), timing("triton", 1024, 1.0), timing("cudnn", 512, 0.1)]
    assert choice.winners(found, "triton", (9, 0)) == []


def test_what_was_measured_here_is_kept_by_device_and_stands_before_what_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = replace(ROW, kernel="flash")
    monkeypatch.setattr(choice, "SHIPPED", (shipped,))
    assert choice.rows_for("One", (8, 9)) == (shipped,) and choice.rows_for("One", (9, 0)) == ()
    path = choice.save("One", [ROW], {"torch": "x"})
    choice.save("Two", [], {"torch": "x"})
    assert path.exists() and choice.rows_for("One", (8, 9)) == (ROW,)
    assert choice.rows_for("Two", (8, 9)) == ()  # measured: nothing is faster
    assert choice.rows_for("Three", (8, 9)) == (shipped,)


@pytest.mark.parametrize("text", ["{", '{"One": 3}', '{"One": {"rows": [{"kernel": "magic"}]}}', "[]"])
def test_a_file_that_cannot_be_read_is_said_and_left_aside(text: str) -> None:
    choice.file().parent.mkdir()
    choice.file().write_text(text)
    with pytest.warns(UserWarning, match=r"kernels.json: cannot be read .* `longspan calibrate --kernels` writes it anew"):
        assert choice.rows_for("One", (8, 9)) == ()


def test_kernels_are_timed_where_they_can_do_it() -> None:
    found = list(timings(Clock(torch.device("cpu"), 1, "cpu"), ("cudnn", "flash"), (40, 24), ((4, 2),), ((16, 16), (16, 24))))
    assert [(t.kernel, t.kind, t.tokens, t.dims) for t in found] == [
        ("flash", kind, n, (16, 16)) for n in (24, 40) for kind in ("causal", "full")
    ]
    assert all(t.forward > 0 and t.backward > 0 for t in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures, with a GPU")
def test_without_a_gpu_there_is_nothing_to_choose() -> None:
    with pytest.raises(ValueError, match="--kernels: expected a CUDA device, got none"):
        contest(quick=True)
