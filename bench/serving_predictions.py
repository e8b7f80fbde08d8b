"""Predictions of serving beside Meta's published figures for context-parallel inference. Nothing is fitted to them.

    PYTHONPATH=src:. python bench/serving_predictions.py

Source: "Context Parallelism for Scalable Million-Token Inference" (arXiv 2411.01783): Llama 3 405B, 16 nodes of 8 H100, tensor parallelism
inside a node and context parallelism between nodes; 1M tokens prefilled in 77 s (93 % parallelization efficiency, 63 % FLOPS utilization),
128K in 3.8 s. Two profiles are compared:

    h100           the built-in profile: FlashAttention-3's published rates on an H100 SXM of 700 W
    h100, 800      the same scaled to a peak of 800 TFLOP/s: 63 % utilization at 77 s is 4.9e18 operations / (128 · 77 s) / 0.63 ≈ 790e12
                   per device, so their devices run below the 989 TFLOP/s of that profile's device
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longspan._cost.clusters import cluster
from longspan._cost.rates import Cluster, Rates
from longspan._cost.serving import MODELS, ServingGroup, crossover
from longspan._planner.serving import ServingPlan

NODES, GPUS = 16, 8
PEAK, SLOWER_PEAK = 989.0, 800.0  # TFLOP/s, dense bfloat16
MODEL = MODELS["llama3-405b"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published figure and its prediction."""

    name: str
    profile: str
    published: float
    predicted: float
    unit: str

    @property
    def off(self) -> float:
        return self.predicted / self.published - 1


def scaled(profile: Cluster, share: float) -> Cluster:
    """The profile with a share of the kernel's rates."""

    def slower(rates: Rates) -> Rates:
        return replace(rates, full=tuple(share * r for r in rates.full), causal=tuple(share * r for r in rates.causal))

    kernel = replace(profile.kernel, forward=slower(profile.kernel.forward), backward=slower(profile.kernel.backward))
    return replace(profile, kernel=kernel)


def profiles() -> dict[str, Cluster]:
    return {"h100": cluster("h100"), "h100, 800": scaled(cluster("h100"), SLOWER_PEAK / PEAK)}


def seconds(profile: Cluster, tokens: int, nodes: int = NODES) -> float:
    """Predicted seconds of a prefill."""
    group = ServingGroup(cluster=profile, tp=GPUS, cp=nodes)
    return ServingPlan(model=MODEL, group=group, context=tokens, batch=1).prefill.seconds


def figures() -> list[Figure]:
    made = []
    for name, profile in profiles().items():
        million = seconds(profile, 1_000_000)
        efficiency = seconds(profile, 1_000_000, nodes=1) / NODES / million
        made += [
            Figure(name="1M tokens, 16 nodes", profile=name, published=77.0, predicted=million, unit="s"),
            Figure(name="parallel efficiency", profile=name, published=93.0, predicted=100 * efficiency, unit="%"),
            Figure(name="128K tokens, 16 nodes", profile=name, published=3.8, predicted=seconds(profile, 128_000), unit="s"),
        ]
    return made


def crossovers(tokens: int = 128_000, nodes: int = 4) -> dict[str, float]:
    """The share of new tokens from which passing KV is faster, predicted; and the share where both pass as many bytes, 2 · 8 / 128."""
    predicted = {n: crossover(MODEL, ServingGroup(cluster=p, tp=GPUS, cp=nodes), tokens) for n, p in profiles().items()}
    return {**predicted, "equal bytes": 2 * MODEL.kv_heads / MODEL.heads}


def table(rows: list[Figure]) -> str:
    lines = ["| figure | profile | published | predicted | off |", "|---|---|---|---|---|"]
    lines += [f"| {r.name} | {r.profile} | {r.published:g} {r.unit} | {r.predicted:.1f} {r.unit} | {100 * r.off:+.1f} % |" for r in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(figures()))
    for profile, share in crossovers().items():
        print(f"128K tokens in all on 4 nodes, {profile}: KV from {100 * share:.1f} % new tokens on")
