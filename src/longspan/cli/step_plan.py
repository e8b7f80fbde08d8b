"""`longspan plan --samples`: an optimizer's step over samples of different lengths, without the cluster."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from longspan._plan.strategies import LAYOUT_NAMES, STRATEGY_NAMES
from longspan.cli import parse
from longspan.cli.app import PLAN_ERRORS, UsageError, describe

MAX_SAMPLES = 100_000
_TERMS = re.compile(r"[\d.,*_kKmMgG -]*")  # lengths, not the name of a file


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
    if gpus > parse.MAX_PLANNED:
        raise UsageError(f"--gpus: expected at most {parse.MAX_PLANNED} devices with --samples, got {gpus}")
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
        text = str(made)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None
    except PLAN_ERRORS as error:
        raise UsageError(f"no plan for --samples {samples[:40]!r}, --tokens-per-gpu {tokens_per_gpu}: {describe(error)}") from None
    printing.text(text)


def parsed_lengths(text: str) -> list[int]:
    """Lengths of samples: of a file with one per line, or of terms such as 200k and 9k*12."""
    if _TERMS.fullmatch(text) and not os.path.isfile(text):  # Path.is_file raises for a text longer than a file's name may be
        terms = text.split(",")
    else:
        terms = parse.read_text(Path(text), f"--samples: {text[:80]}").split()
        if not terms:
            raise UsageError(f"--samples: {text[:80]}: expected lengths of samples, the file has none")
        if wrong := next((term for term in terms if "," in term), None):  # 100,200 would be one length of 100200
            raise UsageError(f"--samples: expected one length per line in {text}, without commas, got {wrong[:40]!r}")
    lengths: list[int] = []
    for term in terms:
        length, star, times = term.partition("*")
        count = parse.count(times, "--samples") if star else 1
        if len(lengths) + count > MAX_SAMPLES:
            raise UsageError(f"--samples: expected at most {MAX_SAMPLES} samples, got more")
        lengths += [parse.count(length, "--samples")] * count
    return lengths
