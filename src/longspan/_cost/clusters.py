"""Cluster profiles: built-in ones by name, or from a TOML file. `longspan calibrate` writes such a file for this machine."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from longspan._cost.rates import Cluster, KernelRates, Link, Rates

_PROFILES = Path(__file__).parent / "profiles"
ETHERNET = "_ethernet"  # suffix of a name: the same nodes, connected by 100 Gbit/s Ethernet per GPU
_TOP = {"name": str, "about": str, "gpus_per_node": int, "memory_gib": float, "hbm_gb_s": float, "contention": float}
_LINK = {"bandwidth_gb_s": float, "latency_us": float}
_RATES = ("keys", "forward_full", "forward_causal", "backward_full", "backward_causal")
_KERNEL = {"name": str, "source": str, "launch_us": float, "slots": int, **dict.fromkeys(_RATES, list)}


class ClusterError(ValueError):
    """A profile that does not exist or cannot be parsed. The message names the file and the key."""


@cache
def names() -> tuple[str, ...]:
    """Names of the built-in profiles."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.toml")))


def cluster(value: Cluster | str | Path | None = None) -> Cluster:
    """A profile by name ("h200", "h100_ethernet", …), from a TOML file, or a `Cluster` unchanged. None: h200."""
    if isinstance(value, Cluster):
        return value
    if value is None:
        return _built_in("h200")
    text = str(value)
    if text.removesuffix(ETHERNET) in names():
        return _built_in(text)
    path = Path(text)
    if path.suffix == ".toml" or path.is_file():
        return load(path)
    known = ", ".join(names())
    raise ClusterError(f"cluster: expected one of {known}, one of these followed by {ETHERNET!r}, or a TOML file; got {text!r}")


@cache
def _built_in(text: str) -> Cluster:
    profile = load(_PROFILES / f"{text.removesuffix(ETHERNET)}.toml")
    if not text.endswith(ETHERNET):
        return profile
    slow = Link(bandwidth=10e9, latency=50e-6)
    about = f"{profile.about.split(', one')[0]}, 100 Gbit/s Ethernet per GPU between"
    return replace(profile, name=text, about=about, between=slow)


def load(path: Path) -> Cluster:
    """A profile from a TOML file. An unknown key is an error."""
    if path.exists() and not path.is_file():  # opening a FIFO would block
        raise ClusterError(f"cluster file {path}: expected a regular file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cluster file {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    try:
        profile = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"cluster file {path}: not TOML: {error}") from None
    top = _checked(profile, _TOP, path, "", also=("inside", "between", "kernel"))
    inside, between = (_checked(profile[name], _LINK, path, f"[{name}] ") for name in ("inside", "between"))
    kernel = _checked(profile["kernel"], _KERNEL, path, "[kernel] ", also=("dims",), optional=("dims",))
    rates = {name: _numbers(kernel[name], path, name) for name in _RATES}
    if len({len(r) for r in rates.values()}) > 1 or len(rates["keys"]) < 2 or list(rates["keys"]) != sorted(set(rates["keys"])):
        raise ClusterError(f"cluster file {path}: [kernel] expected two or more ascending keys and lists of rates of the same length")
    dims = profile["kernel"].get("dims", {})
    if not all(str(d).isdigit() and _positive(share) for d, share in dims.items()):
        raise ClusterError(f"cluster file {path}: [kernel.dims] expected head dims and shares above 0, got {dims}")
    return Cluster(
        name=top["name"],
        about=top["about"],
        gpus_per_node=top["gpus_per_node"],
        memory=top["memory_gib"] * 2**30,
        hbm=top["hbm_gb_s"] * 1e9,
        contention=top["contention"],
        inside=_link(inside),
        between=_link(between),
        kernel=KernelRates(
            name=kernel["name"],
            source=kernel["source"],
            forward=Rates(keys=rates["keys"], full=rates["forward_full"], causal=rates["forward_causal"]),
            backward=Rates(keys=rates["keys"], full=rates["backward_full"], causal=rates["backward_causal"]),
            launch=kernel["launch_us"] * 1e-6,
            slots=kernel["slots"],
            dims={int(d): float(share) for d, share in dims.items()},
        ),
    )


def _link(link: dict[str, Any]) -> Link:
    return Link(bandwidth=link["bandwidth_gb_s"] * 1e9, latency=link["latency_us"] * 1e-6)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _numbers(values: list[Any], path: Path, name: str) -> tuple[float, ...]:
    if not all(_positive(v) for v in values):
        raise ClusterError(f"cluster file {path}: [kernel] {name} must be numbers above 0, got {values}")
    return tuple(float(v) for v in values)


def _checked(
    table: Any, expected: Mapping[str, type], path: Path, where: str, also: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ClusterError(f"cluster file {path}: {where.strip()} must be a table")
    for name in table:
        if name not in (*expected, *also):
            raise ClusterError(f"cluster file {path}: {where}unknown key {name!r}; expected {', '.join((*expected, *also))}")
    for name in (*expected, *also):
        if name not in table and name not in optional:
            raise ClusterError(f"cluster file {path}: {where}{name!r} is missing")
    for name, kind in expected.items():
        value = table[name]
        if kind in (int, float):
            least = 0 if name in ("contention", "latency_us", "launch_us") else None
            number = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
            if not number or not (value > 0 or value == least):
                raise ClusterError(f"cluster file {path}: {where}{name} must be a number above 0, got {value!r}")
        elif not isinstance(value, kind):
            raise ClusterError(f"cluster file {path}: {where}{name} must be a {kind.__name__}, got {value!r}")
    return table


def dump(profile: Cluster) -> str:
    """The profile as TOML text that `load` reads."""
    k = profile.kernel
    lists = {
        "keys": k.forward.keys,
        "forward_full": k.forward.full,
        "forward_causal": k.forward.causal,
        "backward_full": k.backward.full,
        "backward_causal": k.backward.causal,
    }
    lines = [f"name = {_text(profile.name)}", f"about = {_text(profile.about)}", f"gpus_per_node = {profile.gpus_per_node}"]
    lines += [f"memory_gib = {profile.memory / 2**30:.6g}", f"hbm_gb_s = {profile.hbm / 1e9:.6g}", f"contention = {profile.contention:.6g}"]
    for name, link in (("inside", profile.inside), ("between", profile.between)):
        lines += ["", f"[{name}]", f"bandwidth_gb_s = {link.bandwidth / 1e9:.6g}", f"latency_us = {link.latency * 1e6:.6g}"]
    lines += ["", "[kernel]", f"name = {_text(k.name)}", f"source = {_text(k.source)}"]
    lines += [f"launch_us = {k.launch * 1e6:.6g}", f"slots = {k.slots}"]
    lines += [f"{name} = [{', '.join(f'{v:.6g}' for v in values)}]" for name, values in lists.items()]
    if k.dims:
        lines += ["", "[kernel.dims]", *(f"{d} = {share:.6g}" for d, share in k.dims.items())]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'
