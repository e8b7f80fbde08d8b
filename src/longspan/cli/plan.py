"""`longspan plan`: predict an attention plan on a cluster, without the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import longspan as ls
from longspan._plan.strategies import LAYOUT_NAMES, STRATEGY_NAMES, StrategyName, ulysses_error
from longspan.cli import files, parse, serve_plan, step_plan
from longspan.cli.app import PLAN_ERRORS, UsageError, describe, usage_errors

if TYPE_CHECKING:
    from longspan._cost.rates import Cluster, Shape
    from longspan._cost.timeline import Conditions


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """The problem of a command line: fields as the options. `degree`: of --ulysses, None to choose one."""

    mask: ls.Mask
    tokens: int
    gpus: int
    shape: Shape
    cluster: Cluster
    conditions: Conditions
    degree: int | None

    @property
    def heads(self) -> str:
        return f"{self.shape.heads}/{self.shape.kv_heads}"


def plan(
    mask: Annotated[str | None, typer.Option(help='such as "causal & documents(lengths.txt)", or module:function; default: causal')] = None,
    tokens: Annotated[str | None, typer.Option(help="tokens of the whole sequence: 8192, 64k, 1M (k = 1024); default: 64k")] = None,
    gpus: Annotated[str, typer.Option(help="devices")] = "8",
    cluster: Annotated[str, typer.Option(help="h200, h100, b200, a100, h800, any of them with _ethernet, or a TOML file")] = "h200",
    heads: Annotated[str | None, typer.Option(help="query heads, or query/KV heads; default: 32/8")] = None,
    dim: Annotated[str | None, typer.Option(help="head dim; default: 128")] = None,
    batch: Annotated[str, typer.Option(help="batch rows")] = "1",
    layout: Annotated[str | None, typer.Option(help=f"{', '.join(LAYOUT_NAMES)}; default: auto")] = None,
    strategy: Annotated[str | None, typer.Option(help=f"{', '.join(STRATEGY_NAMES)}; default: auto")] = None,
    ulysses: Annotated[str | None, typer.Option(help="Ulysses degree: devices that share the heads; default: chosen")] = None,
    stages: Annotated[str | None, typer.Option(help="stages of strategy 'exchange'")] = None,
    overlap: Annotated[bool | None, typer.Option(help="overlap local KV with the first all-to-all; default: chosen")] = None,
    stragglers: Annotated[str | None, typer.Option(help="slower ranks, rank:factor: 3:1.5,17:2")] = None,
    slow_links: Annotated[str | None, typer.Option(help="ranks with slower links, rank:factor: 0:4")] = None,
    html: Annotated[Path | None, typer.Option(help="write the report page")] = None,
    png: Annotated[Path | None, typer.Option(help="write a picture (needs matplotlib)")] = None,
    trace: Annotated[Path | None, typer.Option(help="write a trace for Chrome or Perfetto")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="print the options that were compared")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="predict serving of --model: first token, time per token, memory")] = False,
    model: Annotated[str | None, typer.Option(help="with --serve: qwen3-8b (default), llama3-70b, …; a wrong name lists all")] = None,
    context: Annotated[str | None, typer.Option(help="with --serve: tokens of each sequence; default: 128k")] = None,
    tp: Annotated[str | None, typer.Option(help="with --serve: devices that share heads; default: chosen")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="with --serve: dtype of the KV cache, bf16 or fp8; default: bf16")] = None,
    samples: Annotated[str | None, typer.Option(help="plan a step of samples: a file with a length per line, or 200k,9k*12,3k*60")] = None,
    tokens_per_gpu: Annotated[str | None, typer.Option(help="with --samples: tokens that a device holds at once")] = None,
) -> None:
    """Predict attention over many devices, on this CPU.

    Prints balance, traffic, memory and time of the plan; with --serve, of serving a model; with --samples, of an optimizer's step whose
    samples are planned together over all devices, with as many forwards as the devices' memory needs.
    """
    if samples is not None or tokens_per_gpu is not None:
        other = {
            "--mask": mask, "--tokens": tokens, "--ulysses": ulysses, "--stragglers": stragglers, "--slow-links": slow_links,
            "--html": html, "--png": png, "--trace": trace, "--explain": explain or None, "--serve": serve or None, "--model": model,
            "--context": context, "--tp": tp, "--kv-dtype": kv_dtype,
            "--batch": None if batch == "1" else batch, "--stages": stages, "--overlap": overlap,
        }  # fmt: skip
        given = [name for name, value in other.items() if value is not None]
        if given:
            raise UsageError(
                f"--samples: {', '.join(given)} not supported with --samples; expected --tokens-per-gpu, --gpus, --heads, --dim"
            )
        step_plan.predict(
            samples, tokens_per_gpu, gpus=parse.count(gpus, "--gpus"), cluster=cluster, heads=parse.heads(heads or "32/8"),
            dim=parse.count(dim or "128", "--dim"), layout=layout or "auto", strategy=strategy or "auto",
        )  # fmt: skip
        return
    if serve:
        training = {
            "--mask": mask, "--tokens": tokens, "--heads": heads, "--dim": dim, "--layout": layout, "--strategy": strategy,
            "--ulysses": ulysses, "--stages": stages, "--overlap": overlap, "--stragglers": stragglers, "--slow-links": slow_links,
            "--png": png, "--trace": trace, "--explain": explain or None,
        }  # fmt: skip
        given = [name for name, value in training.items() if value is not None]
        if given:
            raise UsageError(
                f"--serve: {', '.join(given)} not supported with --serve; expected --model, --context, --batch, --gpus, --tp, --kv-dtype"
            )
        serve_plan.predict(
            model=model or "qwen3-8b", context=parse.count(context or "128k", "--context"), batch=parse.count(batch, "--batch"),
            gpus=parse.count(gpus, "--gpus"), cluster=cluster, tp=None if tp is None else parse.count(tp, "--tp"), html=html,
            kv_dtype=kv_dtype or "bf16",
        )  # fmt: skip
        return
    if any(value is not None for value in (model, context, tp, kv_dtype)):
        raise UsageError("--model, --context, --tp, --kv-dtype: expected --serve with them; without it give --tokens, --heads and --dim")
    mask, tokens, heads, dim = mask or "causal", tokens or "64k", heads or "32/8", dim or "128"
    layout, strategy = layout or "auto", strategy or "auto"
    length, devices = parse.count(tokens, "--tokens"), parse.count(gpus, "--gpus")
    q_heads, kv_heads = parse.heads(heads)
    sizes = {"batch": parse.count(batch, "--batch"), "heads": q_heads, "kv_heads": kv_heads, "head_dim": parse.count(dim, "--dim")}
    slow_ranks = parse.factors(stragglers, "--stragglers", devices)
    slow_link_ranks = parse.factors(slow_links, "--slow-links", devices)
    for option, name, legal in (("--layout", layout, LAYOUT_NAMES), ("--strategy", strategy, STRATEGY_NAMES)):
        if name not in legal:
            raise UsageError(f"{option}: expected one of {', '.join(legal)}, got {name!r}")
    degree = None if ulysses is None else parse.count(ulysses, "--ulysses")
    stage_count = None if stages is None else parse.count(stages, "--stages")
    for option, path in (("--html", html), ("--png", png), ("--trace", trace)):
        if path is not None:
            files.check(path, option, files.picture_endings() if option == "--png" else ())

    masked = parse.mask(mask, length)

    # From here on torch is needed.
    from longspan._cost.clusters import cluster as profile_of
    from longspan._cost.rates import Shape
    from longspan._cost.timeline import Conditions
    from longspan.cli import printing

    try:
        profile = profile_of(cluster)
    except (ValueError, OSError) as error:
        raise UsageError(f"--cluster: {describe(error).removeprefix('cluster: ')}") from None
    request = Request(
        mask=masked,
        tokens=length,
        gpus=devices,
        shape=Shape(**sizes),
        cluster=profile,
        conditions=Conditions(stragglers=slow_ranks, slow_links=slow_link_ranks),
        degree=degree,
    )
    try:
        if devices > parse.MAX_PLANNED:
            options = {"--layout": layout != "auto", "--strategy": strategy != "auto", "--stages": stages is not None, "--explain": explain}
            options |= {"--overlap": overlap is True, "--no-overlap": overlap is False}
            options |= {"--html": html is not None, "--png": png is not None, "--trace": trace is not None}
            _simulate(request, [name for name, is_set in options.items() if is_set])
            return
        made = _fastest_plan(request, strategy, layout=layout, overlap=overlap, stages=stage_count)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None
    except PLAN_ERRORS as error:
        raise UsageError(f"no plan for --mask {mask!r}, --tokens {tokens}, --gpus {gpus}: {describe(error)}") from None
    _write_files(made, request, html=html, png=png, trace=trace)
    printing.plan(made, profile, request.conditions)
    if explain:
        made.explain(profile)


def _fastest_plan(request: Request, strategy: str, **options: Any) -> Any:
    """The fastest plan over the factorisations of the devices into Ulysses × ring that the strategy and the heads allow."""
    gpus, shape = request.gpus, request.shape
    sizes: dict[str, Any] = {"batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    plans: list[tuple[float, int, Any]] = []
    for degree in _degrees(request, strategy):
        two_axes = degree not in (1, gpus)
        mesh = ls.Mesh.abstract((gpus // degree, degree), axis_names=("ring", "ulysses")) if two_axes else ls.Mesh.abstract(gpus)
        name = "ulysses" if degree == gpus > 1 else strategy
        if degree == 1 and strategy == "auto" and request.degree == 1:
            name = "exchange"
        made = ls.plan(
            request.mask, request.tokens, mesh, strategy=cast(StrategyName, name), cluster=request.cluster, conditions=request.conditions,
            **options, **sizes,
        )  # fmt: skip
        plans.append((made.report().seconds, len(plans), made))
    if not plans:
        raise UsageError(f"--strategy: {strategy}: no Ulysses degree below {gpus} divides the heads {request.heads}")
    return min(plans)[2]


def _degrees(request: Request, strategy: str) -> list[int]:
    """Ulysses degrees to try."""
    gpus, shape = request.gpus, request.shape
    if request.degree is not None:
        if gpus % request.degree:
            raise UsageError(f"--ulysses: {gpus} devices do not divide by {request.degree}")
        reason = ulysses_error(request.degree, shape.heads, shape.kv_heads)
        if reason:
            raise UsageError(f"--ulysses: {reason}")
        return [request.degree]
    if strategy == "ulysses":
        return [gpus]
    powers = [2**i for i in range(1, 10) if 2**i < gpus and gpus % 2**i == 0 and 2**i <= 2 * request.cluster.gpus_per_node]
    fits = [degree for degree in powers if not ulysses_error(degree, shape.heads, shape.kv_heads)]
    if strategy == "auto":
        # One axis includes Ulysses over all devices. Of two axes, the two largest degrees suffice.
        return [1, *fits[-2:]]
    return fits if strategy.startswith("ulysses_") else [1]


def _write_files(made: Any, request: Request, *, html: Path | None, png: Path | None, trace: Path | None) -> None:
    """Write the files that were asked for."""
    from longspan._report import figure, page
    from longspan._report import trace as tracing

    cluster, conditions = request.cluster, request.conditions
    if html is not None:
        with usage_errors(f"--html: {html}", OSError):
            page.save(made.report(cluster, conditions=conditions), made.considered(cluster), html)
    if png is not None:
        with usage_errors("--png", ImportError), usage_errors(f"--png: {png}", OSError):
            figure.figure(made.report(cluster, conditions=conditions), png)
    if trace is not None:
        with usage_errors(f"--trace: {trace}", OSError):
            tracing.save(made.report(cluster, conditions=conditions), trace)


def _simulate(request: Request, unsupported: list[str]) -> None:
    """Simulate the strategies and print a table. `unsupported`: options on the command line that a simulation cannot honour."""
    from longspan._cost.simulate import simulate
    from longspan.cli import printing

    if unsupported:
        raise UsageError(
            f"{', '.join(unsupported)}: plans and pages are made for up to {parse.MAX_PLANNED} devices, got --gpus {request.gpus}; larger "
            "clusters are simulated over all strategies. Leave out the option, or give fewer devices"
        )
    simulated = simulate(
        request.mask,
        request.tokens,
        request.gpus,
        shape=request.shape,
        cluster=request.cluster,
        conditions=request.conditions,
        degrees=None if request.degree is None else [request.degree],
    )
    if not simulated:
        raise UsageError(f"--ulysses: {request.degree} devices cannot share the heads {request.heads} of {request.gpus} devices")
    printing.simulated(simulated, str(request.mask), request.cluster)
