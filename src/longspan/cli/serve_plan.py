"""`longspan plan --serve`: predict serving on a cluster, without the cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan.cli import files, parse
from longspan.cli.app import PLAN_ERRORS, UsageError, describe, usage_errors

_KV_BYTES = {"bf16": 2, "fp8": 1}  # of an element


def predict(*, model: str, context: int, batch: int, gpus: int, cluster: str, tp: int | None, kv_dtype: str, html: Path | None) -> None:
    """Print the serving report, and write its page if asked for."""
    if html is not None:
        files.check(html, "--html")
    from longspan._cost.clusters import cluster as profile_of
    from longspan._cost.serving import MODELS
    from longspan._planner.serving import plan_serving
    from longspan._report import page
    from longspan.cli import printing

    if model not in MODELS:
        raise UsageError(f"--model: expected one of {', '.join(MODELS)}, got {model!r}")
    if kv_dtype not in _KV_BYTES:
        raise UsageError(f"--kv-dtype: expected one of {', '.join(_KV_BYTES)}, got {kv_dtype!r}")
    try:
        profile: Any = profile_of(cluster)
    except (ValueError, OSError) as error:
        raise UsageError(f"--cluster: {describe(error).removeprefix('cluster: ')}") from None
    try:
        sizes = replace(MODELS[model], kv_element=_KV_BYTES[kv_dtype])
        made = plan_serving(sizes, profile, gpus=gpus, context=context, batch=batch, tp=tp)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    if made.group.cp > parse.MAX_PLANNED:
        raise UsageError(
            f"--gpus: expected at most {parse.MAX_PLANNED} devices that share a sequence, got {gpus} devices, {made.group.tp} of which "
            "share heads; give fewer devices: further ones serve other sequences"
        )
    with usage_errors(f"no plan for --context {context}, --batch {batch}, --gpus {gpus}", *PLAN_ERRORS):
        printing.text(str(made))
    if html is not None:
        report = made.attention.report(made.group.context_cluster)
        with usage_errors(f"--html: {html}", OSError):
            page.save(report, made.attention.considered(made.group.context_cluster), html, title=made.words, numbers=made.numbers)
