"""Random cases for a GPU, where compiling a kernel costs seconds: MEMBERS consecutive seeds share their kernels, and little else.

A group draws what kernels are compiled for: entry point, kernel, dtype, head dims, the programs of mask and score mod with their constants,
whether there is a sink, which gradients are needed, the sign of the scale, and the class of each tensor's strides. A member draws the rest:
lengths, batch, heads, strides of the class, poison, values, document ids, limits and tables that programs look up, layouts of a mesh.

Triton also compiles again for integers that are 1 or divisible by 16, and for addresses that are not. Strides are such integers: of head
dims that are multiples of 16, all but those of the classes "last" and "offset" are divisible. With other head dims or the class "last", a
group has either lengths that are multiples of 2 or 16, or odd lengths and head counts: a stride is divisible in all members or in none.
"""

from __future__ import annotations

import copy
from random import Random
from typing import Any

from tests.fuzz import mods
from tests.fuzz.cases import (
    SINKS,
    Case,
    document_lengths,
    draw_call,
    draw_mask,
    draw_mesh,
    draw_outputs,
    draw_poison,
    draw_score,
    reseed,
    sized,
    token_ids,
    ulysses_fits,
    valid,
)

MEMBERS = 64
LARGEST = 5  # the member that has the lengths of its group
MAX_SCORES = 1 << 24  # of one call: the oracle has a dozen float64 tensors of them
LENGTHS = (1, 2, 17, 64, 127, 129, 256, 259, 384, 517, 640, 1024, 1287, 2048)
# Strides that kernels see alike: by class, its members and its weight.
STRIDES: dict[str, tuple[tuple[str, ...], float]] = {
    "aligned": (("plain", "plain", "bshd", "sliced", "strided"), 8),
    "expanded": (("rows", "heads"), 0.7),
    "last": (("last",), 0.7),
    "offset": (("offset",), 0.6),
}
DIMS = {64: 4, 128: 5, 16: 2, 40: 2, 96: 2, 32: 1, 80: 1, 192: 2, 256: 1.5}
NARROW = {64: 4, 128: 3, 16: 3, 40: 2, 96: 1, 32: 1, 256: 0.3}  # float32: kernels of wide heads compile for 20 s each


def member(seed: int, tile: int, *, device: str) -> Case:
    """The case of a seed, one of the group seed // MEMBERS."""
    number, index = divmod(seed, MEMBERS)
    group, rng = _group(number, tile, device), Random(f"member {seed}")
    case = copy.deepcopy({name: value for name, value in group.items() if name != "rules"})
    case["seed"] = seed
    rules = group["rules"]
    _draw_sizes(case, rules, rng, largest=index == LARGEST)
    if case["mask"] is not None:
        case["mask"] = _redrawn(case["mask"], case, rng)
    sized(case)
    reseed(case, rng)
    case["scale"] = rng.choice((None, None, 0.5, 1.0) if rules["positive"] else (-0.3, 0.0, -1.0))
    case["sink"] = rng.choice(SINKS) if rules["sink"] else None
    case["strides"] = {name: rng.choice(kinds) for name, kinds in rules["strides"].items()}
    draw_poison(case, rng)
    if case["kernel"] != "triton":
        case["poison"] = None  # kernel "hopper" lets NaN and inf pass within a tile
    if case.get("mesh"):
        _vary_mesh(case, rules["layouts"], rng)
    forms = {name: case[name] for name in ("block_mask", "form") if name in case}
    draw_call(case, rng)
    case |= forms
    if forms.get("block_mask") in ("mask", "mod"):
        case["block_mask"] = rng.choice(("mask", "mod"))
    if case["again"] == "scale" and not rules["positive"]:
        case["again"] = "values"
    return valid(case)


def group_of(seed: int) -> int:
    return seed // MEMBERS


def _group(number: int, tile: int, device: str) -> Case:
    """What the members of a group share, at the largest sizes of a member; "rules": what limits their draws."""
    rng = Random(f"kernels of group {number}")
    case: Case = {"seed": number * MEMBERS, "tile": tile, "device": device}
    case["entry"] = rng.choices(("attention", "flex", "sdpa", "plan", "context"), (66, 12, 7, 10, 4))[0]
    plain = case["entry"] in ("flex", "sdpa", "context")
    kernel = rng.choices(("auto", "triton", "hopper"), (2, 4, 4))[0]
    case["kernel"] = "auto" if plain else kernel
    case["dtype"] = rng.choices(("float32", "bfloat16", "float16"), (0 if case["kernel"] == "hopper" else 1, 5, 3))[0]
    dims = NARROW if case["dtype"] == "float32" else DIMS
    if case["entry"] in ("plan", "context"):  # many kernels: none twice for strides that are not divisible by 16
        dims = {dim: weight for dim, weight in dims.items() if dim % 16 == 0}
    case["dim"], other = rng.choices(list(dims), list(dims.values()), k=2)
    case["value_dim"] = case["dim"] if rng.random() < 0.7 else other
    case["q_len"] = rng.choice((640, 640, 640, 1287, 2048))
    case["kv_len"] = case["q_len"] if rng.random() < 0.65 else rng.choice((512, 653, 1300))
    case["batch"], case["kv_heads"] = 3, rng.choice((2, 3))
    case["heads"] = case["kv_heads"] * rng.choice((1, 2, 3))
    draw_mask(case, rng)
    draw_score(case, rng)
    draw_outputs(case, rng)
    draw_call(case, rng)
    if case["entry"] in ("plan", "context"):
        draw_mesh(case, rng)
    case["invariant"] = case["entry"] in ("attention", "plan") and rng.random() < 0.08
    case["compile"] = False
    rules: dict[str, Any] = {"square": case["q_len"] == case["kv_len"], "sink": False, "positive": rng.random() < 0.85}
    if case["entry"] in ("attention", "plan"):
        rules["sink"] = rng.random() < 0.4
    # Tables by batch row, and tilings by arrays, have kernels of their own.
    by_row = mods.uses(case["mask"])[0] or any("b" in compile(m["text"], "", "eval").co_names for m in [case["score"]] if m)
    rules["batches"] = (1, 1, 2, 3) if not by_row else rng.choice(((1,), (2, 3), (2, 3)))
    rules["layouts"] = rng.choice((("contiguous",), ("head_tail", "round_robin", "custom", "custom")))
    rules["lengths"] = LENGTHS if "mesh" not in case else [n for n in LENGTHS if n > 128]
    divisible = case["dim"] % 16 == case["value_dim"] % 16 == 0
    classes = rng.choices(list(STRIDES), [weight for _, weight in STRIDES.values()], k=4)
    # A stride of class "last" is a length: a multiple of 16, or neither that nor 1.
    rules["multiple"] = 16 if "last" in classes else 1 if divisible else 2
    rules["odd"] = rules["multiple"] > 1 and rng.random() < 0.5
    rules["odd heads"] = rules["odd"] and not divisible
    aligned = STRIDES["aligned"][0] if divisible else ("plain", "sliced")
    rules["strides"] = {n: aligned if c == "aligned" else STRIDES[c][0] for n, c in zip(("q", "k", "v", "grad"), classes)}
    return {**case, "rules": rules}


def _draw_sizes(case: Case, rules: dict[str, Any], rng: Random, *, largest: bool) -> None:
    """Lengths, batch and heads of a member, at most those of the group; `largest`: the lengths of the group."""
    longest = case["q_len"], case["kv_len"]
    if not largest:
        case["q_len"], case["kv_len"] = (
            rng.choice([n for n in rules["lengths"] if n <= limit]) if rng.random() < 0.6 else rng.randint(1, limit) for limit in longest
        )
    if rules["square"]:
        case["kv_len"] = case["q_len"]
    case["batch"] = rng.choice(rules["batches"])
    heads = [(g, g * r) for g in range(1, case["kv_heads"] + 1) for r in range(1, case["heads"] // case["kv_heads"] + 1)]
    mesh = case.get("mesh")
    if mesh and ("ulysses" in mesh["strategy"] or "ulysses" in (mesh["names"] or ())):  # a named axis binds "auto" too
        degree = mesh["shape"][0 if mesh["names"] != ["ring", "ulysses"] else 1]
        heads = [(g, h) for g, h in heads if ulysses_fits(degree, h, g)] or [(case["kv_heads"], case["heads"])]
    elif rules["odd heads"]:
        heads = [(g, h) for g, h in heads if h % 2]
    case["kv_heads"], case["heads"] = rng.choice(heads)
    pairs = case["q_len"] * case["kv_len"]
    if case["batch"] * case["heads"] * pairs > MAX_SCORES:
        case["batch"] = min(rules["batches"])
        case["kv_heads"], case["heads"] = rng.choice([one for one in heads if case["batch"] * one[1] * pairs <= MAX_SCORES] or heads[:1])
    for side in ("q_len", "kv_len"):
        if rules["odd"]:
            case[side] = max(case[side] - 1 + case[side] % 2, 3)
        else:
            case[side] = max(case[side] // rules["multiple"], 1) * rules["multiple"]


def _redrawn(spec: mods.Spec, case: Case, rng: Random) -> mods.Spec:
    """A mask of the same program for a member: with documents and prefixes of its own lengths."""
    if "args" in spec:
        return {**spec, "args": [_redrawn(a, case, rng) for a in spec["args"]]}
    length, tile, batch = case["q_len"], case["tile"], case["batch"]
    if spec["op"] == "documents":
        if not isinstance(spec["lengths"][0], list):
            return {**spec, "lengths": document_lengths(length, tile, rng)}
        rows = [document_lengths(length, tile, rng) for _ in range(batch)]
        for row in rows[1:]:
            if rng.random() < 0.4 and sum(row[:-1]) > 0:
                row.pop()  # padding
        return {**spec, "lengths": rows}
    if spec["op"] == "ids":
        by_row = isinstance(spec["ids"][0], list)
        return {**spec, "ids": [token_ids(case, rng) for _ in range(batch)] if by_row else token_ids(case, rng)}
    if spec["op"] == "prefix" and isinstance(spec["length"], list):
        return {**spec, "length": [rng.choice((0, 1, tile, tile + 3, length)) for _ in range(batch)]}
    return spec


def _vary_mesh(case: Case, layouts: tuple[str, ...], rng: Random) -> None:
    """Another layout, and other options that no kernel is compiled for."""
    mesh = case["mesh"]
    if case["entry"] == "plan":
        if mods.has_documents(case["mask"]) and "custom" in layouts:
            layouts += ("per_document",)
        rows, heads = mods.uses(case["mask"])
        mesh |= {"batch": rows or rng.random() < 0.7, "heads": heads or rng.random() < 0.7, "own_plan": rng.random() < 0.2}
        mesh["sibling"] = rng.random() < 0.1
    else:
        layouts = ("contiguous",) if layouts == ("contiguous",) else ("head_tail",)
    mesh |= {"layout": rng.choice(layouts), "seed": rng.randrange(1 << 20)}
