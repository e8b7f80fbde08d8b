"""Which cluster and conditions the reports of a plan assume."""

from __future__ import annotations

from typing import Any

import pytest

import longspan as ls
from longspan._cost.clusters import cluster
from longspan._cost.report_data import PlanReport
from longspan._cost.selected_report import SelectedReport
from longspan._cost.timeline import Conditions

SLOW = Conditions(stragglers={2: 3.0})
TOKENS = 1500


def planned() -> ls.Plan:
    return ls.plan(ls.causal(), TOKENS, ls.Mesh.abstract(3), heads=4, kv_heads=2, head_dim=64, cluster="h100", conditions=SLOW)


def test_options_are_those_that_were_compared_where_the_assumptions_are_the_same() -> None:
    plan = planned()
    made = plan.considered()
    assert made is not None and made.winner.exact and (made.cluster, made.conditions) == (cluster("h100"), SLOW)
    assert plan.considered("h100") is made is plan.considered(conditions=Conditions(stragglers={2: 3.0}))
    for other in (plan.considered("a100"), plan.considered(conditions=Conditions()), plan.considered(cluster("a100"), conditions=SLOW)):
        assert other is not None and not any(option.exact for option in other.options)
    elsewhere, even = plan.considered("a100"), plan.considered(conditions=Conditions())
    assert elsewhere is not None and (elsewhere.cluster.name, elsewhere.conditions) == ("a100", SLOW)
    assert even is not None and (even.cluster.name, even.conditions) == ("h100", Conditions())


def test_reports_assume_the_cluster_and_conditions_of_the_plan_or_those_given() -> None:
    plan = planned()
    whole, chosen = plan.report(), plan.report(density=0.25)
    assert isinstance(whole, PlanReport) and isinstance(chosen, SelectedReport)
    assert whole.cluster == chosen.cluster == cluster("h100")
    assert plan.report("a100").cluster == plan.report("a100", density=0.25).cluster == cluster("a100")
    even = plan.report(conditions=Conditions())
    assert even.seconds < whole.seconds == plan.report("h100", conditions=SLOW).seconds
    assert plan.report(density=0.25, conditions=Conditions()).seconds < chosen.seconds


def test_an_explanation_is_of_the_given_cluster_and_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned()
    assumptions: tuple[dict[str, Any], ...] = ({}, {"cluster": "a100", "conditions": Conditions()})
    for options in assumptions:
        text, numbers, considered = plan.explain(**options), plan.report(**options), plan.considered(**options)
        assert considered is not None and capsys.readouterr().out == text + "\n"
        first, predicted, *table = text.splitlines()
        assert first == repr(plan) and table == str(considered).splitlines()
        assert predicted == f"  predicted: {1e3 * numbers.seconds:.3f} ms; busiest rank {numbers.balance:.3f} × the mean"
