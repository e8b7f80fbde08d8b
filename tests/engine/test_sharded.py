"""Attention over many ranks equals the oracle: every strategy, layout, mask and score, in the virtual world."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from tests.cases import covering_sample
from tests.sharded import LAYOUTS, Case, Problem, Results, check_budget, check_case, mask_named, problem_of, whole_grid

import longspan as ls
from longspan._engine.schedule_builder import ScheduleOptions, local_schedule
from longspan.testing import virtual_world

SAMPLE = covering_sample(whole_grid())


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_results_equal_the_float64_oracle_up_to_rounding(case: Case) -> None:
    check_case(case)


# Each case in one dtype, each dtype twice.
DTYPES = [
    pytest.param(case, dtype, marks=() if i % 3 == j else pytest.mark.repetition, id=f"{case}-{dtype}")
    for i, case in enumerate(SAMPLE[::8])
    for j, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
]


@pytest.mark.parametrize(("case", "dtype"), DTYPES)
def test_errors_stay_within_the_budget_of_the_dtype(case: Case, dtype: torch.dtype) -> None:
    problem, options = problem_of(case, dtype)
    check_budget(problem, problem.over(**options))


@lru_cache(maxsize=1)
def cross_attention() -> tuple[Problem, Results]:
    """A problem whose queries and KV have different lengths, and its results by the oracle."""
    mask = ls.mask_mod(lambda b, h, q, kv: (q * 2 + kv) % 9 < 4 + h % 2)
    problem = Problem(mask=mask, score="relative bias", q_len=131, kv_len=303, batch=2, heads=6, kv_heads=3)
    return problem, problem.by_oracle()


def test_cross_attention_has_its_own_lengths_layouts_and_shards(cross_case: tuple[str, str]) -> None:
    strategy, layout = cross_case
    problem, right = cross_attention()
    got = problem.over(3, strategy=strategy, layout=layout)
    for name in right.values:
        assert got.error(right, name) < 1e-11, name


@lru_cache(maxsize=1)
def documents_by_row() -> tuple[Problem, Results]:
    """A problem whose batch rows have different documents, and its results by the oracle."""
    mask = ls.causal() & ls.documents(lengths=[[100, 3, 57, 141], [20, 201, 80], [301]])
    problem = Problem(mask=mask, score="alibi", q_len=301, kv_len=301, batch=3, heads=8, kv_heads=2)
    return problem, problem.by_oracle()


def test_batch_rows_may_be_laid_out_differently(by_row_case: tuple[str, str]) -> None:
    strategy, layout = by_row_case
    problem, right = documents_by_row()
    got = problem.over(4, strategy=strategy, layout=layout)
    for name in right.values:
        assert got.error(right, name) < 1e-11, name
    per_row = layout in ("per_document", "round_robin", "auto")
    assert got.extra.positions.ndim == (2 if per_row else 1)


TOGETHER = [
    ("causal", 3, {"strategy": "exchange", "stages": 1, "layout": "head_tail"}),
    ("window", 5, {"strategy": "allgather", "layout": "round_robin"}),
    ("per head", 3, {"strategy": "exchange", "stages": 3, "layout": "auto"}),
    ("documents", 7, {"strategy": "ring", "layout": "contiguous"}),
    ("documents by row", 3, {"strategy": "exchange", "layout": "auto"}),
    ("documents by row", 4, {"strategy": "ring", "layout": "per_document"}),
    ("prefix", (2, 3), {"strategy": "ulysses_allgather", "layout": "head_tail", "axis_names": ("ring", "ulysses")}),
]


@pytest.mark.parametrize(("mask", "ranks", "options"), TOGETHER)
def test_joined_schedules_compute_local_and_first_received_kv_together(mask: str, ranks: Any, options: dict[str, Any]) -> None:
    rows = ls.causal() & ls.documents(lengths=[[100, 3, 57, 43], [20, 101, 82]])
    problem_mask = rows if mask == "documents by row" else mask_named(mask, 203, options["layout"])
    problem = Problem(mask=problem_mask, score="relative bias", q_len=203, kv_len=203, batch=2, heads=6, kv_heads=3)
    right, got, overlapped = (problem.by_oracle(), *(problem.over(ranks, overlap=overlap, **options) for overlap in (False, True)))
    assert got.extra.schedule.joined and not overlapped.extra.schedule.joined and got.bytes_sent == overlapped.bytes_sent
    steps = [len(local_schedule(p.extra.data, ScheduleOptions(block=(128, 128))).steps) for p in (got, overlapped)]
    assert steps[0] == steps[1] - 1
    for name in right.values:
        assert got.error(right, name) < 1e-11, name


@lru_cache(maxsize=3)
def per_head(kv_heads: int) -> tuple[Problem, Results]:
    """A problem whose heads have different masks, and its results by the oracle."""
    mask = mask_named("per head", 203, "")
    problem = Problem(mask=mask, score="relative bias", q_len=203, kv_len=203, batch=2, heads=6, kv_heads=kv_heads)
    return problem, problem.by_oracle()


# Every pair of two of the three. Two KV heads fit degree 2 only.
ULYSSES = [
    pytest.param(shape, inner, kv_heads, marks=() if (i == 1 if kv_heads == 2 else (i + j + k) % 2 == 0) else pytest.mark.repetition)
    for k, kv_heads in enumerate((1, 6, 2))
    for j, inner in enumerate(("ring", "exchange", "allgather"))
    for i, shape in enumerate(((2, 3), (3, 2)))
]


@pytest.mark.parametrize(("shape", "inner", "kv_heads"), ULYSSES)
def test_ulysses_composes_with_every_schedule(shape: tuple[int, int], inner: str, kv_heads: int) -> None:
    if (6 // shape[1]) % (6 // kv_heads) and (6 // kv_heads) % (6 // shape[1]):
        pytest.skip("these head counts do not allow the degree; refused elsewhere")
    problem, right = per_head(kv_heads)
    got = problem.over(shape, axis_names=("ring", "ulysses"), strategy=f"ulysses_{inner}", layout="head_tail")
    for name in right.values:
        assert got.error(right, name) < 1e-11, name


def test_rows_that_see_nothing_give_zeros_on_every_rank() -> None:
    mask = ls.mask_mod(lambda b, h, q, kv: (q >= kv) & (q % 5 > 1) & (kv > 40))
    problem = Problem(mask=mask, score="none", q_len=203, kv_len=203, batch=2, heads=4, kv_heads=2, sink=False)
    right = problem.by_oracle()
    for strategy in ("ring", "exchange", "ulysses"):
        got = problem.over(4 if strategy != "ulysses" else 2, strategy=strategy, layout="contiguous")
        for name in right.values:
            assert got.error(right, name) < 1e-12
        blind = torch.isinf(got.values["lse"])
        assert blind.any() and not got.values["out"][blind].any() and not got.values["dq"][blind].any()


@pytest.mark.parametrize("strategy", ["ring", "exchange"])
def test_same_inputs_and_plan_give_the_same_bits(strategy: str) -> None:
    problem = Problem(mask=ls.causal(), score="none", q_len=517, kv_len=517, batch=2, heads=6, kv_heads=3, dtype=torch.float32)
    first, second = (problem.over(5, strategy=strategy, layout="head_tail") for _ in range(2))
    for name in first.values:
        assert torch.equal(first.values[name], second.values[name]), name


def test_sixteen_ring_stages_in_bfloat16_lose_no_more_than_one_kernel() -> None:
    problem = Problem(
        mask=ls.causal(), score="none", q_len=2048, kv_len=2048, batch=1, heads=3, kv_heads=3, dim=32, value_dim=32, dtype=torch.bfloat16,
        sink=False,
    )  # fmt: skip
    right = problem.by_oracle()
    one, many = problem.over(1), problem.over(17, strategy="ring", layout="head_tail")
    assert many.extra.schedule.stages == 16
    for name in right.values:
        # lse is float32 in both: its own last digits are allowed on top.
        digits = 4 * torch.finfo(torch.float32).eps * float(right.values[name].abs().max())
        assert many.error(right, name) <= 1.1 * one.error(right, name) + digits, name


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_a_rank_may_leave_lse_out_of_its_loss(strategy: str) -> None:
    problem = Problem(mask=ls.causal(), score="none", q_len=203, kv_len=203, batch=2, heads=6, kv_heads=3)
    plans = [ls.plan(ls.causal(), 203, ls.Mesh.abstract(3, rank=r), strategy=strategy, heads=6, kv_heads=3) for r in range(3)]
    problem.grad_lse[..., plans[1].positions] = 0
    right = problem.by_oracle()

    def rank(mesh: Any) -> list[torch.Tensor]:
        plan = ls.plan(ls.causal(), 203, mesh, strategy=strategy, heads=6, kv_heads=3)
        inputs = [plan.shard(t, 2).requires_grad_() for t in (problem.q, problem.k, problem.v)]
        out, lse = ls.attention(*inputs, plan=plan, sink=problem.sinks, return_lse=True)
        loss = (out * plan.shard(problem.grad_out, 2)).sum()
        if mesh.rank != 1:
            loss = loss + (lse * plan.shard(problem.grad_lse, 2)).sum()
        return [plan.unshard(g, 2) for g in torch.autograd.grad(loss, inputs)]

    for result in virtual_world(3).run(rank):
        for name, grad in zip(("dq", "dk", "dv"), result, strict=True):
            torch.testing.assert_close(grad, right.values[name], rtol=0, atol=1e-11)


def test_partial_gradients_may_be_sent_in_bfloat16() -> None:
    problem = Problem(mask=ls.causal(), score="none", q_len=257, kv_len=257, batch=2, heads=4, kv_heads=2, dtype=torch.float32)
    right = problem.by_oracle()
    wide = problem.over(3, strategy="ring", layout="head_tail")
    narrow = problem.over(3, strategy="ring", layout="head_tail", grad_reduce_dtype=torch.bfloat16)
    assert narrow.bytes_sent < wide.bytes_sent
    assert wide.error(right, "dk") < 1e-5 < narrow.error(right, "dk") < 0.1


def test_the_dense_kernel_runs_over_a_mesh() -> None:
    problem = Problem(mask=ls.causal(), score="relative bias", q_len=203, kv_len=203, batch=2, heads=4, kv_heads=2)
    right, got = problem.by_oracle(), problem.over(3, kernel="dense", layout="round_robin")
    for name in right.values:
        assert got.error(right, name) < 1e-11, name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without --whole-grid, every other pair of strategy and layout: each of both at least twice."""
    whole = metafunc.config.getoption("--whole-grid")
    if "any_case" in metafunc.fixturenames:
        metafunc.parametrize("any_case", whole_grid() if whole else [], ids=str)
    strategies = ("ring", "allgather", "exchange", "ulysses", "auto")
    pairs = {
        "cross_case": list(product(strategies[:4], ("contiguous", "head_tail", "round_robin", "auto"))),
        "by_row_case": list(product(strategies, LAYOUTS)),
    }
    for name in pairs.keys() & metafunc.fixturenames:
        layouts = list(dict.fromkeys(layout for _, layout in pairs[name]))
        sample = [p for p in pairs[name] if (strategies.index(p[0]) + layouts.index(p[1])) % 2 == 0]
        metafunc.parametrize(name, pairs[name] if whole else sample, ids="-".join)


def test_the_whole_grid_over_ranks(any_case: Case) -> None:
    check_case(any_case)
