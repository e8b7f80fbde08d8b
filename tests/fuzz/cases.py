"""Random cases: `draw(seed, tile)` is a JSON value that says everything about one attention call.

GROUP consecutive seeds share sizes, mask and score mod, with other values in captured tensors: their traces are cached, so that cases are
fast, and stale cache entries become visible. On a GPU, where a new kernel costs seconds of compiling, cases come from `tests.fuzz.groups`.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from random import Random
from typing import Any

from tests.fuzz import mods
from tests.fuzz.mods import SEED_RANGE
from tests.fuzz.scores import draw_score
from tests.fuzz.vectors import vector_mask

Case = dict[str, Any]
GROUP = 5
SINKS = ("normal", "large", "low", "none")
FULL: mods.Spec = {"op": "full"}


def draw(seed: int, tile: int, *, device: str = "cpu") -> Case:
    """The case of a seed, for tiles of `tile` tokens."""
    if device != "cpu":
        from tests.fuzz.groups import member

        return member(seed, tile, device=device)
    rng, shared = Random(f"{seed} {tile}"), Random(f"group {seed // GROUP} {tile}")
    case: Case = {"seed": seed, "tile": tile, "device": device}
    case["entry"] = rng.choices(("attention", "flex", "sdpa", "plan", "context"), (60, 12, 9, 13, 6))[0]
    plain = case["entry"] in ("flex", "sdpa", "context")
    kernel = rng.choices(("auto", "cpu", "dense", "aten"), (4, 2, 1, 0.6))[0]
    case["kernel"] = "auto" if plain else kernel
    case["dtype"] = rng.choices(("float32", "float64", "bfloat16", "float16"), (5, 3, 1, 1))[0]
    _draw_sizes(case, shared)
    draw_mask(case, shared)
    draw_score(case, shared)
    reseed(case, rng)
    case["value_dim"] = case["dim"] if rng.random() < 0.65 else rng.choice((case["dim"], 3, 8))
    wraps = any("negative index" in leaf.get("name", "") for leaf in mods.leaves(case["mask"] or FULL))  # which kernels emit themselves
    is_small = max(case["q_len"], case["kv_len"]) <= 40 and case["batch"] * case["heads"] <= 4
    if not plain and is_small and rng.random() < (0.4 if wraps else 0.05):
        case["kernel"], case["dtype"] = "triton", "float32"  # the interpreter rounds half precision its own way
    if case["kernel"] == "aten":
        case["score"] = None
    case["scale"] = rng.choice((None, None, None, 0.5, 1.0, -0.3, 0.0))
    case["sink"] = rng.choice((None, None, None, *SINKS)) if case["entry"] in ("attention", "plan") else None
    draw_outputs(case, rng)
    strides = ("plain", "plain", "plain", "bshd", "sliced", "strided", "last", "rows", "heads", "offset")
    case["strides"] = {name: rng.choice(strides) for name in ("q", "k", "v", "grad")}
    draw_poison(case, rng)
    if case["entry"] in ("plan", "context"):
        draw_mesh(case, rng)
    draw_call(case, rng)
    case["invariant"] = case["entry"] in ("attention", "plan") and case["kernel"] in ("auto", "cpu") and rng.random() < 0.08
    case["compile"] = case["entry"] == "attention" and rng.random() < 0.0005
    return valid(sized(case))


def draw_outputs(case: Case, rng: Random) -> None:
    """Which results a call returns, and which gradients it needs."""
    case["lse"] = case["entry"] != "sdpa" and rng.random() < 0.6
    case["through"] = rng.choice(("out", "out", "both", "lse")) if case["lse"] else "out"
    case["needs"] = rng.choice(("all", "all", "all", "all", "all", "all", "q", "k", "v", "kv", "captured", "none"))


def draw_poison(case: Case, rng: Random) -> None:
    """In a quarter of the cases, NaN, inf or huge numbers in some tokens."""
    case["poison"] = None
    if rng.random() < 0.25:
        what, value = rng.choice(("k", "v", "kv", "q", "grad")), rng.choice(("nan", "inf", "-inf", "huge"))
        case["poison"] = {"what": what, "value": value, "where": rng.choice(("unseen", "any")), "seed": rng.randrange(SEED_RANGE)}


def draw_call(case: Case, rng: Random) -> None:
    """A second call with something changed, and the forms in which FlexAttention and SDPA take a mask."""
    entry = case["entry"]
    changes = ("state", "state", None, "scale") if _reads_state(case) else (None, None, None, "scale", "captures", "values")
    if any(leaf.get("name") == "captured number" for leaf in mods.leaves(case["mask"] or FULL)):
        changes = ("captures",)
    case["again"] = rng.choice(changes) if entry == "attention" else None
    if entry in ("flex", "context"):
        case["block_mask"] = rng.choice(("mask", "mod", "BlockMask", "table")) if entry == "flex" else "BlockMask"
        case["aux"] = entry == "flex" and case["lse"] and rng.random() < 0.5
    if entry in ("sdpa", "context"):
        case["form"] = (
            rng.choice(("none", "causal", "bool", "float")) if entry == "sdpa" else rng.choice(("flex", "causal", "bool", "none"))
        )


def captures_of(case: Case) -> list[mods.Spec]:
    """The captured tensors of mask and score mod."""
    leaves = [*mods.leaves(case["mask"] or FULL), case["score"] or {}]
    return [capture for leaf in leaves for capture in leaf.get("captures", ())]


def sized(case: Case) -> Case:
    """The case with numbers for the names of sizes ("q_len", "heads", "longest") in the specs of captured tensors."""
    sizes = {**case, "longest": max(case["q_len"], case["kv_len"])}
    for capture in captures_of(case):
        capture["shape"] = [sizes.get(n, n) if isinstance(n, str) else n for n in capture["shape"]]
        if isinstance(capture.get("high"), str):
            capture["high"] = sizes[capture["high"]]
    return case


def reseed(case: Case, rng: Random) -> None:
    """Give captured tensors values of their own."""
    for capture in captures_of(case):
        capture["seed"] = rng.randrange(SEED_RANGE)


def valid(case: Case) -> Case:
    """The case with choices removed that do not go together. Also applied to each step of a minimisation."""
    if case["entry"] == "sdpa":
        if case["form"] in ("none", "causal"):
            case["mask"] = None if case["form"] == "none" else {"op": "causal"}
        if case["form"] == "float":
            case["mask"], case["score"] = None, {"name": "bias", "text": "s + t0[h, q, kv]", "captures": [
                {"kind": "float", "shape": [case["heads"], case["q_len"], case["kv_len"]], "seed": 5, "grad": True}
            ]}  # fmt: skip
        else:
            case["score"] = None
        if case["form"] == "bool" and case["mask"] is None:
            case["form"] = "none"
    if case["entry"] == "context" and case["form"] != "flex":
        case["score"], case["lse"], case["through"] = None, False, "out"
        if case["form"] in ("none", "causal"):
            case["mask"] = None if case["form"] == "none" else {"op": "causal"}
        if case["form"] == "bool" and case["mask"] is None:
            case["form"] = "none"
    if case.get("compile") or case["kernel"] in ("dense", "aten"):
        case["invariant"] = False
    if (case.get("mesh") or {}).get("buffers") == "inference":
        case["needs"] = "none"
    if case["again"] == "state" and not _reads_state(case):
        case["again"] = None
    if case["needs"] == "captured" and not any(c.get("grad") for c in (case["score"] or {}).get("captures", ())):
        case["needs"] = "all"
    if (
        case["score"] is None
        and case["again"] == "captures"
        and not any(leaf.get("captures") for leaf in mods.leaves(case["mask"] or FULL))
    ):
        case["again"] = None
    return case


def _reads_state(case: Case) -> bool:
    """Whether the mask reads what `mods.changed_state` changes."""
    texts = [leaf.get("text", "") for leaf in mods.leaves(case["mask"] or FULL)]
    return any("window()" in text or "torch.are" in text for text in texts)


def _draw_sizes(case: Case, rng: Random) -> None:
    tile = case["tile"]
    lengths = [1, tile - 1, tile + 1, 2 * tile, 2 * tile + 3, 3 * tile, 4 * tile + 5, 5 * tile]
    if tile >= 64:
        lengths = [300, 500] if rng.random() < 0.1 else [1, 5, 17, 40, 130]
    case["q_len"] = rng.choice(lengths)
    case["kv_len"] = case["q_len"] if rng.random() < 0.6 else rng.choice(lengths)
    case["batch"] = rng.choice((1, 1, 2, 3))
    case["kv_heads"] = rng.choice((1, 1, 2, 3))
    case["heads"] = case["kv_heads"] * rng.choice((1, 1, 2, 3) if case["batch"] * case["kv_heads"] < 4 else (1, 2))
    case["dim"] = rng.choice((4, 8, 16, 5, 1))
    case["value_dim"] = case["dim"] if rng.random() < 0.65 else rng.choice((4, 8, 16, 5, 1))


# --------------------------------------------------------------------------------------------------------------------------- masks


def draw_mask(case: Case, rng: Random) -> None:
    if rng.random() < 0.08:
        case["mask"] = None
        return
    mask = _leaf(case, rng)
    # Blocks are mostly alone: combined with other masks, they are rarely constant inside tiles.
    others = (85, 10, 4, 1) if mask.get("name", "").startswith("blocks") else (45, 35, 15, 5)
    for _ in range(rng.choices((0, 1, 2, 3), others)[0]):
        other = _leaf(case, rng)
        if rng.random() < 0.2:
            other = {"op": "not", "args": [other]}
        args = [mask, other] if rng.random() < 0.7 else [other, mask]
        mask = {"op": "and" if rng.random() < 0.6 else "or", "args": args}
    case["mask"] = {"op": "not", "args": [mask]} if rng.random() < 0.06 else mask


def _leaf(case: Case, rng: Random) -> mods.Spec:
    longest = max(case["q_len"], case["kv_len"])
    tile, square = case["tile"], case["q_len"] == case["kv_len"]
    kinds = {"causal": 5, "window": 4, "prefix": 2, "prefix rows": 1, "full": 0.3, "blocks": 8, "mod": 6, "expression": 3, "state": 2.5}
    if case["device"] == "cpu":  # kernels of GPUs take elementwise masks only
        kinds["vectors"] = 1.5
    if square:
        kinds |= {"documents": 3, "documents rows": 1.5, "ids": 1.5, "ids rows": 1}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if kind in ("causal", "full"):
        return {"op": kind}
    if kind == "window":
        right = rng.choice((0, 0, 1, tile // 2, tile + 1))
        return {"op": "window", "left": rng.choice((1, 2, tile - 1, tile, tile + 1, 2 * tile - 3, 4 * tile)), "right": right}
    if kind == "prefix":
        return {"op": "prefix", "length": rng.choice((0, 1, tile - 1, tile, 2 * tile + 1, longest + 5))}
    if kind == "prefix rows":
        return {"op": "prefix", "length": [rng.choice((0, 1, tile, tile + 3)) for _ in range(case["batch"])]}
    if kind == "documents":
        return {"op": "documents", "lengths": document_lengths(case["q_len"], tile, rng)}
    if kind == "documents rows":
        rows = [document_lengths(case["q_len"], tile, rng) for _ in range(case["batch"])]
        for row in rows[1:]:
            if rng.random() < 0.4 and sum(row[:-1]) > 0:
                row.pop()  # padding
        return {"op": "documents", "lengths": rows}
    if kind in ("ids", "ids rows"):
        return {"op": "ids", "ids": token_ids(case, rng) if kind == "ids" else [token_ids(case, rng) for _ in range(case["batch"])]}
    if kind == "state":
        every = {
            "torch's state": "(q >= kv) if torch.are_deterministic_algorithms_enabled() else (q <= kv)",
            "cached helper": "q - kv < window()",
        }
        name = rng.choice(list(every))
        return _mod(name, every[name])
    if kind == "blocks":
        return _block_shaped(case, rng)
    if kind == "vectors":
        return vector_mask(case, rng, rng.randrange(SEED_RANGE))
    return _template(case, rng) if kind == "mod" else _expression(case, rng)


def document_lengths(length: int, tile: int, rng: Random) -> list[int]:
    lengths = []
    while length:
        n = min(length, rng.choice((1, tile // 2, tile - 1, tile, tile + 1, 2 * tile + 3, 3 * tile)))
        lengths.append(n)
        length -= n
    if rng.random() < 0.1:
        lengths.insert(rng.randrange(len(lengths) + 1), 0)
    return lengths


def token_ids(case: Case, rng: Random) -> list[int]:
    """Ids of tokens: shuffled ones, or contiguous documents with padding between or after them."""
    if rng.random() < 0.4:
        return [rng.randint(-1, 2) for _ in range(case["q_len"])]
    ids = [i for i, n in enumerate(document_lengths(case["q_len"], case["tile"], rng)) for _ in range(n)]
    padding = rng.sample(sorted(set(ids)), k=rng.choice((0, 1)) if len(set(ids)) > 1 else 0)
    return [-1 if i in padding else i for i in ids]


def _block_shaped(case: Case, rng: Random) -> mods.Spec:
    """A mask that is constant inside tiles: a table of tiles, tiles of global tokens, single tiles beside a causal mask."""
    tile = case["tile"] if rng.random() < 0.75 else max(1, case["tile"] // 2)
    rows, columns = (-(-case[side] // tile) for side in ("q_len", "kv_len"))
    kind = rng.choices(("table", "bigbird", "corner", "per head", "causal blocks"), (1, 1, 4, 1, 1))[0]
    seed = rng.randrange(SEED_RANGE)
    if kind == "corner":
        row = rng.randrange(max(1, rows - 1))
        column = rng.choice((row + 1, row + 1, rng.randrange(columns)))  # mostly beside the diagonal, in one part with it
        return _mod(f"blocks {kind}", f"(q >= kv) | ((kv // {tile} == {column}) & (q // {tile} == {row}))")
    if kind == "bigbird":
        return _mod(f"blocks {kind}", f"(kv // {tile} == 0) | (q // {tile} == 0) | ((q // {tile} - kv // {tile}).abs() < 2)")
    if kind == "causal blocks":
        return _mod(f"blocks {kind}", f"q // {tile} >= kv // {tile}")
    shape = [rows, columns] if kind == "table" else [case["heads"], rows, columns]
    lookup = f"t0[q // {tile}, kv // {tile}]" if kind == "table" else f"t0[h, q // {tile}, kv // {tile}]"
    text = f"(q >= kv) | {lookup}" if rng.random() < 0.4 else lookup
    return _mod(f"blocks {kind}", text, {"kind": "bool", "shape": shape, "seed": seed, "density": rng.choice((0.2, 0.5, 0.9))})


def _mod(name: str, text: str, *captures: mods.Spec) -> mods.Spec:
    return {"op": "mod", "name": name, "text": text, "captures": list(captures)}


def _template(case: Case, rng: Random) -> mods.Spec:
    """A mask_mod as users write them, most of them with captured tensors, whose sizes have names (`sized`)."""
    tile, longest, seed = case["tile"], max(case["q_len"], case["kv_len"]), rng.randrange(SEED_RANGE)
    n = rng.choice((2, 3, 7))
    integers = {"kind": rng.choice(("int", "int", "int32", "int16", "uint8")), "seed": seed, "low": 0}
    limits = {**integers, "kind": "int", "high": longest + 1}
    bools = {"kind": "bool", "seed": seed}
    signed = {"kind": "int", "seed": seed, "low": -7, "high": 7}
    every = {
        "dilated": (f"((q - kv) % {n} == 0) & (q >= kv)",),
        "checker": (f"(q * 3 + kv * 5 + b) % {n} < 2",),
        "window per head": (f"(q - kv).abs() < {tile // 2} * (h + 1)",),
        "not every row": (f"(q % {n} != 0) & (q >= kv)",),
        "no row": ("q < 0",),
        "shifted": (f"q + {rng.choice((1, tile, -1, -tile))} >= kv",),
        "square": (f"(q - kv).square() < {rng.choice((100, 9, 500))}",),
        "heads differ": (f"(q + h) % {n} != kv % 2 + b",),
        "ids": ("t0[q] == t0[kv]", {**integers, "shape": ["longest"], "high": 3}),
        "ids per row": ("t0[b, q] == t0[b, kv]", {**integers, "shape": ["batch", "longest"], "high": 3}),
        "limits": ("kv < t0[q]", {**limits, "shape": ["q_len"]}),
        "captured number": ("(q - kv < int(t0)) & (q >= kv)", {**limits, "shape": []}),
        "limits per head": ("kv < t0[h]", {**limits, "shape": ["heads"]}),
        "limits per row and head": ("(kv <= t0[b, h]) & (q >= kv)", {**limits, "shape": ["batch", "heads"]}),
        "range of keys": ("(kv >= t0[q]) & (kv < t1[q])", {**limits, "shape": ["q_len"]}, {**limits, "shape": ["q_len"]}),
        "padding": ("t0[b, kv]", {**bools, "shape": ["batch", "kv_len"], "density": 0.7}),
        "dense": ("t0[q, kv]", {**bools, "shape": ["q_len", "kv_len"], "density": rng.choice((0.05, 0.5))}),
        "dense per head": ("t0[h, q, kv]", {**bools, "shape": ["heads", "q_len", "kv_len"], "density": 0.5}),
        "nested lookup": ("t0[t1[q]] >= kv", {**limits, "shape": ["longest"]}, {**limits, "high": "longest", "shape": ["q_len"]}),
        "negative index": (f"t0[(q - kv) % -{longest}] > 0", {**integers, "shape": [longest], "high": 2}),
        "captured negative index": ("t0[t1[kv]] > 0", {**integers, "shape": [7], "high": 2}, {**signed, "shape": ["kv_len"]}),
        "scalar": ("kv < t0 + q", {**limits, "shape": []}),
        "float": ("t0[q] > t0[kv]", {"kind": "float", "shape": ["longest"], "seed": seed}),
        "with a constant": (f"(q >= kv) & {rng.choice((True, False))} | (kv < {n})",),
    }  # fmt: skip
    name = rng.choice(list(every))
    return _mod(name, *every[name])


def _expression(case: Case, rng: Random) -> mods.Spec:
    """A comparison of random integer expressions of the indices, which exercises the rules of interval arithmetic."""
    while True:
        spec = integer_comparison(case, rng)
        with contextlib.suppress(RuntimeError, TypeError):  # such as `~` of a float
            mods.visible(spec, (1, 1, 2, 2))
            return spec


def integer_comparison(case: Case, rng: Random) -> mods.Spec:
    captures: list[mods.Spec] = []

    def term(depth: int) -> str:
        if depth == 0 or rng.random() < 0.25:
            return rng.choice(("q", "kv", "q", "kv", "q", "kv", "(q - kv)", "(kv - q)", "(q + kv)", "h", "b"))
        inner, n = term(depth - 1), rng.choice((1, 2, 3, 7, case["tile"]))
        unary = (
            "({x}).abs()", "-({x})", "({x}) * {n}", "({x}) * -{n}", "({x}) // {n}", "({x}) % {n}", "({x}) % -{n}", "{n} - ({x})",
            "({x}).clamp(min=-{n}, max={n} + 9)", "({x}).square()", "({x}) ** 2", "torch.minimum({x}, kv)", "torch.maximum({x}, q)",
            "torch.where(q > kv, {x}, -{n})", "({x}) & {n}", "({x}) ^ {n}", "({x}) | {n}", "~({x})", "({x}) >> 1", "({x}) << 1",
            "torch.remainder({x}, {n})", "torch.fmod({x}, {n})", "torch.sign({x})", "torch.div({x}, {n}, rounding_mode='trunc')",
            "torch.div({x}, {n}, rounding_mode='floor')", "({x}).float().sqrt().nan_to_num(0.0)", "({x}) / {n}", "({x}).to(torch.int32)",
            "torch.tanh(({x}) / {n}) * {n}", "torch.exp2(-({x}).abs().float() / {n})", "({x}).bool().long()", "torch.floor(({x}) / {n})",
        )  # fmt: skip
        if rng.random() < 0.2 and len(captures) < 2:
            kind = rng.choice(("int", "int32", "int16", "int8", "uint8"))
            table = {"kind": kind, "shape": [11], "seed": rng.randrange(100), "low": 0, "high": 9}
            captures.append({**table, "limits": True} if kind != "int" and rng.random() < 0.5 else table)
            return f"t{len(captures) - 1}[({inner}).long() % 11]"
        if rng.random() < 0.3:
            return f"({inner}) {rng.choice('+-*')} ({term(depth - 1)})"
        return rng.choice(unary).format(x=inner, n=n)

    left, right = term(rng.choice((1, 2, 3))), rng.choice(("0", "1", "7", str(case["tile"]), "q", "kv", "q // 2"))
    return _mod("expression", f"({left}) {rng.choice(('<', '<=', '>', '>=', '==', '!='))} {right}", *captures)


# --------------------------------------------------------------------------------------------------------------------------- meshes


def ulysses_fits(degree: int, heads: int, kv_heads: int) -> bool:
    """Whether `degree` ranks can share the heads."""
    if heads % degree:
        return False
    here, group = heads // degree, heads // kv_heads
    return here % group == 0 or group % here == 0


def draw_mesh(case: Case, rng: Random) -> None:
    two = case["entry"] == "plan" and rng.random() < 0.35
    shape = (
        rng.choice(((1, 2), (2, 1), (2, 2), (2, 2), (2, 2), (3, 2), (2, 3), (2, 4)))
        if two
        else (rng.choices((1, 2, 3, 4, 5, 8), (1, 6, 6, 4, 1, 1))[0],)
    )
    names = rng.choice((None, ("ulysses", "ring"), ("ring", "ulysses"))) if two else None
    strategies = (
        ["ulysses_ring", "ulysses_allgather", "ulysses_exchange"] if two else ["ring", "allgather", "exchange", "exchange", "ulysses"]
    )
    degree = shape[0 if names != ("ring", "ulysses") else 1]
    if not ulysses_fits(degree, case["heads"], case["kv_heads"]):
        if two:
            case["kv_heads"], case["heads"] = degree, degree * rng.choice((1, 2))
            draw_mask(case, rng)
            draw_score(case, rng)
        else:
            strategies.remove("ulysses")
    strategies += ["auto"] * (rng.random() < 0.2)
    layouts = ["contiguous", "contiguous", "head_tail", "head_tail", "round_robin", "custom", "custom"]
    if mods.has_documents(case["mask"]):
        layouts.append("per_document")
    layouts += ["auto"] * (rng.random() < 0.2)
    rows, heads = mods.uses(case["mask"])
    strategy = rng.choice(strategies)
    mesh = {
        "shape": list(shape), "names": names and list(names), "strategy": strategy, "layout": rng.choice(layouts),
        "stages": rng.choice((None, None, 1, 2, 3)) if strategy in ("exchange", "ulysses_exchange") else None,
        "overlap": rng.choice((None, None, True, False)),
        "grad_reduce_dtype": rng.choice((None, None, None, "bfloat16")) if case["dtype"] in ("bfloat16", "float32") else None,
        "batch": rows or rng.random() < 0.7, "heads": heads or rng.random() < 0.7, "seed": rng.randrange(SEED_RANGE),
        "own_plan": rng.random() < 0.2, "sibling": rng.random() < 0.1,
    }  # fmt: skip
    if case["entry"] == "context":
        mesh["layout"], mesh["names"] = rng.choice(("contiguous", "head_tail")), None
        mesh["stages"] = mesh["overlap"] = mesh["grad_reduce_dtype"] = None
        mesh["buffers"] = rng.choice((None, None, "plain", "inference"))
        mesh["other_kv_len"] = rng.choice((None, 1, case["tile"] + 3))
    case["mesh"] = mesh


def custom_segments(length: int, ranks: int, seed: int, *, rows: int = 1) -> tuple[Any, ...]:
    """Random segments of tokens by batch row and rank; ranks own equally many tokens of each row, perhaps none."""
    rng = Random(seed)
    cuts = sorted(rng.randrange(length + 1) for _ in range(ranks - 1))
    owned = [b - a for a, b in pairwise([0, *cuts, length])]
    layout = []
    for _ in range(rows):
        edges = sorted({0, length, *(rng.randrange(length + 1) for _ in range(rng.choice((1, 3, 6))))})
        pieces = [(a, b - a) for a, b in pairwise(edges)]
        rng.shuffle(pieces)
        segments: list[Any] = []
        for tokens in owned:
            mine = []
            while tokens:
                start, n = pieces.pop()
                take = min(n, tokens)
                mine.append((start, take))
                if take < n:
                    pieces.append((start + take, n - take))
                tokens -= take
            segments.append(tuple(mine))
        layout.append(tuple(segments))
    return tuple(layout)


def families(case: Case) -> set[str]:
    """Names of what a case exercises, for counts."""
    mesh = case.get("mesh") or {}
    names = {
        f"entry {case['entry']}",
        f"kernel {case['kernel']}",
        f"dtype {case['dtype']}",
        f"tile {case['tile']}",
        f"needs {case['needs']}",
    }
    names |= {f"mask {leaf.get('name', leaf['op'])}" for leaf in mods.leaves(case["mask"])} if case["mask"] else {"mask none"}
    names |= {f"mask op {op}" for op in _operators(case["mask"])} if case["mask"] else set()
    names |= {f"score {case['score']['name']}"} if case["score"] else {"score none"}
    names |= {f"strides {kind}" for kind in case["strides"].values()}
    names |= {f"through {case['through']}"}
    names |= {f"{key} {case[key]}" for key in ("again", "block_mask", "form") if case.get(key)}
    names |= {f"sink {case['sink']}"} if case["sink"] else set()
    names |= {f"poison {case['poison']['value']} in {case['poison']['what']}"} if case["poison"] else set()
    names |= {"cross lengths"} if case["q_len"] != case["kv_len"] else set()
    names |= {"value dim != key dim"} if case["dim"] != case["value_dim"] else set()
    names |= {"gqa"} if case["heads"] != case["kv_heads"] else set()
    names |= {"invariant"} if case.get("invariant") else set()
    names |= {"compile"} if case.get("compile") else set()
    if mesh:
        names |= {f"strategy {mesh['strategy']}", f"layout {mesh['layout']}", f"mesh {'x'.join(map(str, mesh['shape']))}"}
        names |= {"plan set"} if mesh.get("sibling") else set()
    return names


def _operators(spec: mods.Spec) -> set[str]:
    inner = set().union(*(_operators(a) for a in spec.get("args", ())))
    return inner | {spec["op"]} if spec["op"] in ("and", "or", "not") else inner
