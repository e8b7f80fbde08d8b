"""Masks and score mods of a case: from a JSON value to longspan's mask, to a callable, to a dense tensor, and to source text.

A mask is a tree: {"op": "causal"}, {"op": "and", "args": [...]}, …; a leaf {"op": "mod", "text": …, "captures": [...]} is a mask_mod whose
body is the text, over b, h, q, kv and the captured tensors. A score mod is such a leaf over s, b, h, q, kv.

The dense masks here are the oracle's: they share no code with longspan.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Spec = dict[str, Any]
SEED_RANGE = 1 << 20
Indices = tuple[Tensor, Tensor, Tensor, Tensor]


def captured(spec: Spec, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """The tensors that a mod captures, drawn from their seeds. Floating-point ones have `dtype`, and gradients if the case says so."""
    return [_capture(c, dtype, device) for c in spec.get("captures", ())]


def _capture(spec: Spec, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(spec["seed"])
    if spec["kind"] == "float":
        values = torch.randn(spec["shape"], generator=generator, dtype=torch.float64) * spec.get("size", 1.0)
        values = values.to(torch.bfloat16) if spec.get("coarse") else values
        return values.to(device, dtype).requires_grad_(bool(spec.get("grad")))
    if spec["kind"] == "bool":
        return (torch.rand(spec["shape"], generator=generator) < spec.get("density", 0.5)).to(device)
    integer = {"int": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8}[spec["kind"]]
    values = torch.randint(spec["low"], spec["high"], spec["shape"], generator=generator).to(integer)
    if spec.get("limits"):  # half of the values are near the limits of the dtype
        info = torch.iinfo(integer)
        limits = torch.tensor([info.min, info.min + 1, info.max - 1, info.max], dtype=integer)
        near = limits[torch.randint(4, spec["shape"], generator=generator)]
        values = torch.where(torch.rand(spec["shape"], generator=generator) < 0.5, values, near)
    return values.to(device)


_window = [5]


@functools.cache
def window() -> int:
    """A helper that mods call: its value differs under `changed_state`."""
    return _window[0]


@contextlib.contextmanager
def changed_state(spec: Spec) -> Iterator[None]:
    """Another window or torch's deterministic mode, whichever a mask reads, for the time of a call."""
    names = {leaf.get("name") for leaf in leaves(spec)}
    try:
        if "cached helper" in names:
            _window[0] = 12
            window.cache_clear()
        if "torch's state" in names:
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        _window[0] = 5
        window.cache_clear()
        torch.use_deterministic_algorithms(False)


@functools.lru_cache(maxsize=4096)
def _maker(arguments: str, text: str, names: int) -> Callable[..., Callable[..., Tensor]]:
    outer = ", ".join(f"t{i}" for i in range(names))
    scope: dict[str, Any] = {"torch": torch, "window": window}
    exec(f"def make({outer}):\n    return lambda {arguments}: {text}", scope)
    return scope["make"]  # type: ignore[no-any-return]


def mask_mod(spec: Spec, tensors: Sequence[Tensor]) -> Callable[..., Tensor]:
    """The callable of a "mod" leaf over its captured tensors. The same text gives the same code object."""
    return _maker("b, h, q, kv", spec["text"], len(tensors))(*tensors)


def score_mod(spec: Spec, tensors: Sequence[Tensor]) -> Callable[..., Tensor]:
    """The callable of a score mod over its captured tensors."""
    return _maker("s, b, h, q, kv", spec["text"], len(tensors))(*tensors)


def leaves(spec: Spec) -> Iterator[Spec]:
    """The leaves of a mask tree."""
    if spec["op"] in ("and", "or", "not"):
        for arg in spec["args"]:
            yield from leaves(arg)
    else:
        yield spec


def document_ids(rows: Sequence[Any]) -> Tensor:
    """Document ids [S] or [B, S] of lengths, −1 for padding."""
    if not rows or not isinstance(rows[0], list):
        return torch.tensor([i for i, n in enumerate(rows) for _ in range(n)])
    width = max(sum(row) for row in rows)
    ids = [[i for i, n in enumerate(row) for _ in range(n)] for row in rows]
    return torch.tensor([row + [-1] * (width - len(row)) for row in ids])


# --------------------------------------------------------------------------------------------------------------- longspan's masks


def as_longspan(spec: Spec, tensors: dict[int, list[Tensor]] | None = None) -> Any:
    """longspan's mask of a tree. `tensors`: captured tensors by id of the leaf, where the caller holds them."""
    import longspan as ls

    op = spec["op"]
    if op == "and":
        return functools.reduce(lambda x, y: x & y, (as_longspan(a, tensors) for a in spec["args"]))
    if op == "or":
        return functools.reduce(lambda x, y: x | y, (as_longspan(a, tensors) for a in spec["args"]))
    if op == "not":
        return ~as_longspan(spec["args"][0], tensors)
    if op == "mod":
        held = (tensors or {}).get(id(spec))
        return ls.mask_mod(mask_mod(spec, captured(spec) if held is None else held))
    if op == "ids":
        return ls.documents(ids=torch.tensor(spec["ids"]))
    if op == "documents":
        return ls.documents(lengths=spec["lengths"])
    if op == "window":
        return ls.sliding_window(spec["left"], spec["right"])
    if op == "prefix":
        return ls.prefix(spec["length"])
    return {"full": ls.full, "causal": ls.causal}[op]()


def source(spec: Spec) -> str:
    """Python source of a mask tree."""
    op = spec["op"]
    if op in ("and", "or"):
        return "(" + {"and": " & ", "or": " | "}[op].join(source(a) for a in spec["args"]) + ")"
    if op == "not":
        return f"~{source(spec['args'][0])}"
    if op == "mod":
        return f"ls.mask_mod({mod_source('b, h, q, kv', spec)})"
    if op == "ids":
        return f"ls.documents(ids=torch.tensor({spec['ids']}))"
    if op == "documents":
        return f"ls.documents(lengths={spec['lengths']})"
    if op == "window":
        return f"ls.sliding_window({spec['left']}, {spec['right']})"
    return f"ls.prefix({spec['length']})" if op == "prefix" else f"ls.{op}()"


def mod_source(arguments: str, spec: Spec) -> str:
    """Python source of a mod: a lambda, called with its captured tensors where it has some."""
    captures = spec.get("captures", ())
    inner = f"lambda {arguments}: {spec['text']}"
    if not captures:
        return inner
    names = ", ".join(f"t{i}" for i in range(len(captures)))
    return f"(lambda {names}: {inner})(*captured({{'captures': {list(captures)!r}}}))"


# ------------------------------------------------------------------------------------------------------------- the oracle's masks


def visible(spec: Spec | None, sizes: tuple[int, int, int, int], device: str = "cpu") -> Tensor:
    """Which (query, key) pairs exist, bool [B, H, Q, K]."""
    if spec is None:
        return torch.ones(sizes, dtype=torch.bool, device=device)
    return _dense(spec, indices(sizes, device), device).expand(sizes)


def indices(sizes: tuple[int, int, int, int], device: str = "cpu") -> Indices:
    """Index tensors b, h, q, kv that broadcast to [B, H, Q, K]."""
    views = [[1] * d + [-1] + [1] * (3 - d) for d in range(4)]
    b, h, q, kv = (torch.arange(n, device=device).view(shape) for n, shape in zip(sizes, views))
    return b, h, q, kv


def _dense(spec: Spec, at: Indices, device: str) -> Tensor:
    op, (b, h, q, kv) = spec["op"], at
    if op in ("and", "or"):
        args = [_dense(a, at, device) for a in spec["args"]]
        return functools.reduce(torch.logical_and if op == "and" else torch.logical_or, args)
    if op == "not":
        return ~_dense(spec["args"][0], at, device)
    if op == "mod":
        mod = mask_mod(spec, captured(spec, device=device))
        if not spec.get("vectors"):
            return mod(b, h, q, kv)
        whole = torch.broadcast_tensors(b, h, q, kv)  # one pair at a time: a vector does not broadcast against all of them
        seen: Tensor = torch.vmap(mod)(*(x.flatten() for x in whole))
        return seen.view(whole[0].shape)
    if op in ("ids", "documents"):
        ids = (torch.tensor(spec["ids"]) if op == "ids" else document_ids(spec["lengths"])).to(device)
        of_q, of_kv = (ids[i] if ids.ndim == 1 else ids[b, i] for i in (q, kv))
        return (of_q == of_kv) & (of_q >= 0)
    if op == "window":
        return (q - kv < spec["left"]) & (kv - q <= spec["right"])
    if op == "prefix":
        return kv < (torch.tensor(spec["length"], device=device)[b] if isinstance(spec["length"], list) else spec["length"])
    return q >= kv if op == "causal" else (q >= 0) & (kv >= 0)


def uses(spec: Spec | None) -> tuple[bool, bool]:
    """Whether a mask may depend on the batch row, and on the head."""
    rows, heads = False, False
    for leaf in leaves(spec) if spec is not None else ():
        if leaf["op"] == "mod":
            names = set(compile(leaf["text"], "", "eval").co_names)
            rows, heads = rows or "b" in names, heads or "h" in names
        for key in ("ids", "lengths", "length"):
            value = leaf.get(key)
            if isinstance(value, list) and (key == "length" or (value and isinstance(value[0], list))):
                rows = True
    return rows, heads


def has_documents(spec: Spec | None) -> bool:
    """Whether a mask is documents, alone or combined with `&`."""
    if spec is None:
        return False
    return spec["op"] in ("ids", "documents") or (spec["op"] == "and" and any(map(has_documents, spec["args"])))
