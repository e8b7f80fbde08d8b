"""In backward a rank receives only the KV that it reads, and returns only their gradients, for any moves of forward."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.sharded import Problem, mask_named, summed

import longspan as ls
from longspan._engine import kv_exchange
from longspan.testing import virtual_world

LAYOUT = "head_tail"


def moved(problem: Problem, ranks: Any, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, int], int]:
    """(unsharded results, bytes of KV in each pass and of returned gradients, exchanges of the backward pass) over a virtual world."""
    world = virtual_world(ranks)
    plan = problem.plan(ls.Mesh.abstract(ranks), **options)
    by_rank = world.run(lambda mesh: problem.on_rank(plan.on(mesh)))
    kinds = {"forward": "forward", "backward": "backward", "returned": "return of gradients"}
    sizes = {k: sum(int(e.bytes.sum()) for e in world.exchanges if "stage" in e.what and e.what.endswith(end)) for k, end in kinds.items()}
    return summed(by_rank), sizes, sum("stage" in e.what and e.what.endswith("backward") for e in world.exchanges)


@lru_cache(maxsize=1)  # tests of one mask run one after the other
def problem_and_oracle(mask: str) -> tuple[Problem, dict[str, torch.Tensor]]:
    """A problem and its results by the oracle."""
    problem = Problem(mask=mask_named(mask, 803, LAYOUT), score="alibi", q_len=803, kv_len=803, batch=1, heads=6, kv_heads=2)
    return problem, problem.by_oracle().values


@lru_cache(maxsize=2)
def bytes_read(mask: str, overlap: bool, separate: bool) -> dict[str, int]:
    """Bytes that one exchange moves, which sends only KV that is read. `separate` is in the key because the caller patches the engine."""
    return moved(problem_and_oracle(mask)[0], 5, strategy="exchange", stages=1, layout=LAYOUT, overlap=overlap)[1]


@pytest.mark.parametrize(("overlap", "separate"), [(True, False), (False, True)], ids=["overlap, packed", "joined, separate"])
@pytest.mark.parametrize("strategy", ["ring", "allgather"])
@pytest.mark.parametrize("mask", ["window", "documents", "causal", "per head"])
def test_backward_moves_only_kv_that_is_read(
    mask: str, strategy: str, overlap: bool, separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if separate:
        monkeypatch.setattr(kv_exchange, "SEPARATE_KV_BYTES", 0)
    problem, right = problem_and_oracle(mask)
    values, sizes, _ = moved(problem, 5, strategy=strategy, layout=LAYOUT, overlap=overlap)
    least = bytes_read(mask, overlap, separate)
    assert sizes["forward"] > least["forward"] == least["backward"] == sizes["backward"]
    assert sizes["returned"] == least["returned"]
    for name, want in right.items():
        assert float((values[name] - want).abs().nan_to_num(0).max()) < 1e-11, name


def test_stages_without_moves_are_left_out() -> None:
    problem = Problem(mask=ls.sliding_window(100), score="none", q_len=1403, kv_len=1403, batch=1, heads=2, kv_heads=1)
    for overlap in (True, False):
        _, sizes, exchanges = moved(problem, 5, strategy="ring", layout="contiguous", overlap=overlap)
        assert exchanges == 1 and sizes["backward"] < sizes["forward"] / 5


def test_a_mask_without_pairs_between_ranks_moves_nothing_in_backward() -> None:
    problem = Problem(mask=ls.mask_mod(lambda b, h, q, kv: q == kv), score="none", q_len=640, kv_len=640, batch=1, heads=2, kv_heads=1)
    for overlap in (True, False):
        values, sizes, exchanges = moved(problem, 5, strategy="ring", layout="contiguous", overlap=overlap)
        assert exchanges == sizes["backward"] == sizes["returned"] == 0 < sizes["forward"]
        assert float((values["dq"] - problem.by_oracle().values["dq"]).abs().max()) < 1e-11
