"""`longspan plan --samples`: an optimizer's step over samples of different lengths, without the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longspan._plan.strategies import LAYOUT_NAMES, STRATEGY_NAMES
from longspan.cli import parse
from longspan.cli.app import UsageError, describe, usage_errors

MAX_SAMPLES = 100_000


def predict(
    samples: str | None,
    tokens_per_gpu: str | None,
    *,
    gpus: int,
    cluster: str,
    heads: tuple[int, int],
    dim: int,
    layout: str,
    strategy: str,
) -> None:
    """Print the forwards of the step."""
    if samples is None or tokens_per_gpu is None:
        raise UsageError("--samples, --tokens-per-gpu: expected both of them")
    for option, name, legal in (("--layout", layout, LAYOUT_NAMES), ("--strategy", strategy, STRATEGY_NAMES)):
        if name not in legal:
            raise UsageError(f"{option}: expected one of {', '.join(legal)}, got {name!r}")
    lengths, limit = parsed_lengths(samples), parse.count(tokens_per_gpu, "--tokens-per-gpu")

    import longspan as ls
    from longspan._cost.clusters import cluster as profile_of
    from longspan.cli import printing

    try:
        profile: Any = profile_of(cluster)
    except (ValueError, OSError) as error:
        raise UsageError(f"--cluster: {describe(error).removeprefix('cluster: ')}") from None
    try:
        made = ls.plan_step(
            lengths, ls.Mesh.abstract(gpus), tokens_per_rank=limit, heads=heads[0], kv_heads=heads[1], head_dim=dim, layout=layout,
            strategy=strategy, cluster=profile,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from None
    printing.text(str(made))


def parsed_lengths(text: str) -> list[int]:
    """Lengths of samples: of a file with one per line, or of terms such as 200k and 9k*12."""
    path = Path(text)
    if path.suffix or path.is_file():
        with usage_errors(f"--samples: {text}", OSError, UnicodeDecodeError):
            terms = path.read_text().split()
    else:
        terms = text.split(",")
    lengths: list[int] = []
    for term in terms:
        length, _, times = term.partition("*")
        lengths += [parse.count(length, "--samples")] * (parse.count(times, "--samples") if times else 1)
        if len(lengths) > MAX_SAMPLES:
            raise UsageError(f"--samples: expected at most {MAX_SAMPLES} samples, got more")
    return lengths
