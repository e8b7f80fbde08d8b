"""`longspan.invariant()` on the triton kernel, and runs of tiles in ascending order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests import invariant_cases as cases
from tests.interpreter import run_triton_in_one_thread

import longspan as ls
from longspan._kernels.gpu.launch import ascending_runs, descending_tiles
from longspan._masks.block_table import FULL, PARTIAL, Runs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# Every mask and score mod, sinks, grouped heads, a document of two tiles, one to three ranks. With --whole-grid: more heads, eight ranks.
SEEDS, MORE_SEEDS = (2195, 2198, 2255, 2752, 2964), (1, 2, 5, 8, 9, 25)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", (*SEEDS, *MORE_SEEDS) if metafunc.config.getoption("--whole-grid") else SEEDS)


def test_a_document_has_the_same_bits_wherever_triton_computes_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        run_triton_in_one_thread(monkeypatch)
    options: dict[str, Any] = {"kernel": "triton", "device": DEVICE, "dtype": torch.float32, "longest": 200}
    assert cases.failures(seed, Counter(), **options) == []


def test_a_window_over_several_tiles_has_the_same_bits_in_chunks_and_packed() -> None:
    """Partial, full and partial tiles of one row: walked in another order, they would round differently."""
    q, k, v, grad_out = (torch.randn(1, 1, 520, 16, device=DEVICE) for _ in range(4))
    one = cases.Problem(
        q=q, k=k, v=v, grad_out=grad_out, grad_lse=torch.randn(1, 1, 520, device=DEVICE), sink=None, mask="window", score="none",
        window=(300, 0), kernel="triton",
    )  # fmt: skip
    want = cases.alone(one)
    chunk = slice(389, 520)
    part = cases.results(one, (*(t[:, :, chunk] for t in (q,)), k, v, *one.rows(389, 520)[1:]), one.from_query(389), first=389)
    assert cases.differences({name: part[name] for name in ("out", "lse", "dq")}, want, chunk) == []
    got = cases.results(one, cases.packed_tensors(one, 77, 0), cases.packed_mask(one, [77], []))
    assert cases.differences({name: x[:, :, 77:] for name, x in got.items() if name != "dsink"}, want) == []


@pytest.mark.parametrize(
    ("kinds", "lead", "full"),
    [("FFFP", 0, "0-2"), ("PFFF", 1, "1-3"), ("PPFFP", 2, "2-3"), ("FPFP", 0, "0-0"), ("PFPF", 1, "1-1"), (".PP.", 2, ""), ("..", 0, "")],
)
def test_runs_are_walked_in_ascending_order(kinds: str, lead: int, full: str) -> None:
    runs = {kind: [i for i, k in enumerate(kinds) if k == name] for kind, name in ((FULL, "F"), (PARTIAL, "P"))}
    single = {kind: Runs(torch.tensor([0, len(t)]).int(), torch.tensor(t).int(), torch.tensor(t).int()) for kind, t in runs.items()}
    got_full, got_partial, got_lead = ascending_runs(single[FULL], single[PARTIAL], 1)
    assert got_lead.tolist() == [lead]
    tiles = got_full.first.tolist()
    assert tiles == ([] if not full else list(range(int(full[0]), int(full[-1]) + 1)))
    walked = [*got_partial.first.tolist()[:lead], *tiles, *got_partial.first.tolist()[lead:]]
    assert walked == [i for i, k in enumerate(kinds) if k != "."]


@pytest.mark.parametrize(
    ("kinds", "full"), [("FFFP", [2, 1, 0]), ("PFFF", []), ("FFPFP", [1, 0]), (".PP.", []), ("FF", [1, 0]), ("..", [])]
)
def test_tiles_are_walked_in_descending_order(kinds: str, full: list[int]) -> None:
    runs = {kind: [i for i, k in enumerate(kinds) if k == name] for kind, name in ((FULL, "F"), (PARTIAL, "P"))}
    single = {kind: Runs(torch.tensor([0, len(t)]).int(), torch.tensor(t).int(), torch.tensor(t).int()) for kind, t in runs.items()}
    got_full, got_partial = descending_tiles(single[FULL], single[PARTIAL], 1)
    assert got_full.first.tolist() == got_full.last.tolist() == full
    walked = [*got_partial.first.tolist(), *got_full.first.tolist()]
    assert walked == [i for i, k in reversed(list(enumerate(kinds))) if k != "."]


def test_the_mode_is_isolated_from_calls_outside_of_it() -> None:
    q = torch.randn(1, 2, 300, 16, device=DEVICE)
    outside = ls.attention(q, q, q, mask=ls.sliding_window(200), kernel="triton")
    with ls.invariant():
        ls.attention(q, q, q, mask=ls.sliding_window(200), kernel="triton")
    assert torch.equal(ls.attention(q, q, q, mask=ls.sliding_window(200), kernel="triton"), outside)
