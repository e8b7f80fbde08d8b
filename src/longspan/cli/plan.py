"""`longspan plan`: predict an attention plan on a cluster, without the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

import longspan as ls
from longspan._cost import simulate as scale
from longspan._cost.clusters import cluster as cluster_of
from longspan._cost.timeline import Conditions
from longspan._plan.strategies import LAYOUT_NAMES, STRATEGY_NAMES, StrategyName, ulysses_error
from longspan.cli import files, parse
from longspan.cli import printing as show
from longspan.cli.app import UsageError, describe, usage_errors

MAX_PLANNED = 512  # devices; larger clusters are simulated


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    mask: Annotated[str, typer.Option(help='such as "causal & documents(lengths.txt)", or module:function')] = "causal",
    tokens: Annotated[str, typer.Option(help="tokens of the whole sequence: 8192, 64k, 1M (k = 1024)")] = "64k",
    gpus: Annotated[str, typer.Option(help="devices")] = "8",
    cluster: Annotated[str, typer.Option(help="h200, h100, b200, a100, h800, any of them with _ethernet, or a TOML file")] = "h200",
    heads: Annotated[str, typer.Option(help="query heads, or query/KV heads: 32/8")] = "32/8",
    dim: Annotated[str, typer.Option(help="head dim")] = "128",
    batch: Annotated[str, typer.Option(help="batch rows")] = "1",
    layout: Annotated[str, typer.Option(help=", ".join(LAYOUT_NAMES))] = "auto",
    strategy: Annotated[str, typer.Option(help=", ".join(STRATEGY_NAMES))] = "auto",
    ulysses: Annotated[str | None, typer.Option(help="Ulysses degree: devices that share the heads; default: chosen")] = None,
    stages: Annotated[str | None, typer.Option(help="stages of an exchange")] = None,
    overlap: Annotated[bool | None, typer.Option(help="overlap local KV with the first exchange; default: chosen")] = None,
    stragglers: Annotated[str | None, typer.Option(help="slower ranks, rank:factor: 3:1.5,17:2")] = None,
    slow_links: Annotated[str | None, typer.Option(help="ranks with slower links, rank:factor: 0:4")] = None,
    html: Annotated[Path | None, typer.Option(help="write the report page")] = None,
    png: Annotated[Path | None, typer.Option(help="write a picture (needs matplotlib)")] = None,
    trace: Annotated[Path | None, typer.Option(help="write a trace for Chrome or Perfetto")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="print the options that were compared")] = False,
) -> None:
    """Plan an attention over many devices and predict its time. Runs on this machine's CPU."""
    length, devices = parse.count(tokens, "--tokens"), parse.count(gpus, "--gpus")
    q_heads, kv_heads = parse.heads(heads)
    sizes = {"batch": parse.count(batch, "--batch"), "heads": q_heads, "kv_heads": kv_heads, "head_dim": parse.count(dim, "--dim")}
    conditions = Conditions(
        stragglers=parse.factors(stragglers, "--stragglers", devices), slow_links=parse.factors(slow_links, "--slow-links", devices)
    )
    for what, given, legal in (("--layout", layout, LAYOUT_NAMES), ("--strategy", strategy, STRATEGY_NAMES)):
        if given not in legal:
            raise UsageError(f"{what}: expected one of {', '.join(legal)}, got {given!r}")
    try:
        profile = cluster_of(cluster)
    except (ValueError, OSError) as error:
        raise UsageError(f"--cluster: {describe(error).removeprefix('cluster: ')}") from None
    for what, path in (("--html", html), ("--png", png), ("--trace", trace)):
        if path is not None:
            files.check(path, what, files.picture_endings() if what == "--png" else ())
    found = parse.mask(mask, length)
    degree = None if ulysses is None else parse.count(ulysses, "--ulysses")
    try:
        if devices > MAX_PLANNED:
            chosen = {"--layout": layout != "auto", "--strategy": strategy != "auto", "--stages": stages is not None, "--explain": explain}
            chosen |= {"--overlap": overlap is True, "--no-overlap": overlap is False}
            chosen |= {"--html": html is not None, "--png": png is not None, "--trace": trace is not None}
            _simulated(found, length, devices, sizes, profile, conditions, degree, [name for name, is_so in chosen.items() if is_so])
            return
        options = {"layout": layout, "overlap": overlap, "stages": None if stages is None else parse.count(stages, "--stages")}
        made = _best(found, length, devices, sizes, profile, strategy, degree, options)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None
    except (ArithmeticError, LookupError, MemoryError, RuntimeError) as error:  # a mask that cannot be evaluated, or sizes out of range
        raise UsageError(f"no plan for --mask {mask!r}, --tokens {tokens}, --gpus {gpus}: {describe(error)}") from None
    _written(made, profile, conditions, html, png, trace)
    show.plan(made, profile, conditions)
    if explain:
        made.explain(profile)


def _best(mask: Any, tokens: int, gpus: int, sizes: Any, cluster: Any, strategy: str, degree: int | None, options: dict[str, Any]) -> Any:
    """The fastest plan over the factorisations of the devices into Ulysses × ring that the strategy and the heads allow."""
    found: list[tuple[float, int, Any]] = []
    for d in _degrees(gpus, sizes, cluster, strategy, degree):
        mesh = ls.Mesh.abstract(gpus) if d in (1, gpus) else ls.Mesh.abstract((gpus // d, d), axis_names=("ring", "ulysses"))
        name = "ulysses" if d == gpus > 1 else strategy
        if d == 1 and strategy == "auto" and degree == 1:
            name = "exchange"
        made = ls.plan(mask, tokens, mesh, strategy=cast(StrategyName, name), cluster=cluster, **options, **sizes)
        found.append((made.report(cluster).seconds, len(found), made))
    if not found:
        raise UsageError(f"--strategy: {strategy}: no Ulysses degree below {gpus} divides the heads {sizes['heads']}/{sizes['kv_heads']}")
    return min(found)[2]


def _degrees(gpus: int, sizes: Any, cluster: Any, strategy: str, degree: int | None) -> list[int]:
    if degree is not None:
        if gpus % degree:
            raise UsageError(f"--ulysses: {gpus} devices do not divide by {degree}")
        reason = ulysses_error(degree, sizes["heads"], sizes["kv_heads"])
        if reason:
            raise UsageError(f"--ulysses: {reason}")
        return [degree]
    if strategy == "ulysses":
        return [gpus]
    two = [2**i for i in range(1, 10) if 2**i < gpus and gpus % 2**i == 0 and 2**i <= 2 * cluster.gpus_per_node]
    fits = [d for d in two if not ulysses_error(d, sizes["heads"], sizes["kv_heads"])]
    if strategy == "auto":
        # One axis includes Ulysses over all devices. Of two axes, the two largest degrees suffice.
        return [1, *fits[-2:]]
    return fits if strategy.startswith("ulysses_") else [1]


def _written(made: Any, cluster: Any, conditions: Conditions, html: Path | None, png: Path | None, trace: Path | None) -> None:
    from longspan._report import figure, page
    from longspan._report import trace as tracing

    if html is not None:
        with usage_errors(f"--html: {html}", OSError):
            page.save(made.report(cluster, conditions=conditions), made.considered(cluster), html)
    if png is not None:
        with usage_errors("--png", ImportError), usage_errors(f"--png: {png}", OSError):
            figure.figure(made.report(cluster), png)
    if trace is not None:
        with usage_errors(f"--trace: {trace}", OSError):
            tracing.save(made.report(cluster, conditions=conditions), trace)


def _simulated(
    mask: Any, tokens: int, gpus: int, sizes: Any, cluster: Any, conditions: Conditions, degree: int | None, chosen: list[str]
) -> None:
    if chosen:
        raise UsageError(
            f"{', '.join(chosen)}: plans and pages are made for up to {MAX_PLANNED} devices, got --gpus {gpus}; larger clusters "
            "are simulated over all strategies. Leave out the option, or give fewer devices"
        )
    degrees = None if degree is None else [degree]
    found = scale.simulate(mask, tokens, gpus, cluster=cluster, conditions=conditions, degrees=degrees, **sizes)
    if not found:
        raise UsageError(f"--ulysses: {degree} devices cannot share the heads {sizes['heads']}/{sizes['kv_heads']} of {gpus} devices")
    show.simulated(found, str(mask), cluster)
