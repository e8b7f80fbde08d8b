"""One case: its tensors, longspan's results, and their comparison with the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from tests.fuzz import mods
from tests.fuzz.cases import Case, custom_segments
from tests.fuzz.dense import Problem, budgets, rounding_of_out, solve
from torch import Tensor

import longspan as ls
from longspan.testing import virtual_world

Results = dict[str, Tensor]
SHARED = ("dsink",)  # gradients that ranks share: with those of captured tensors, summed over ranks


class Wrong(AssertionError):
    """A result differs from the oracle's, or a call raised. `kind` says which, without numbers."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Refused(Exception):
    """A named kernel does not support the call: the documented answer."""


def dtype_of(case: Case) -> torch.dtype:
    return getattr(torch, case["dtype"])  # type: ignore[no-any-return]


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, sinks and captured tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# -------------------------------------------------------------------------------------------------------------------------- tensors


def problem_of(case: Case, *, change: int = 0) -> Problem:
    """The tensors of a case. `change`: draws other values, for a second call."""
    dtype, device = dtype_of(case), case["device"]
    # On its device: on the host, drawing would take half of a case's time on a GPU.
    generator = torch.Generator(device).manual_seed(case["seed"] + 7919 * change)
    b, h, g, m, n, d, e = (case[name] for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "dim", "value_dim"))

    def random(name: str, *shape: int) -> Tensor:
        t = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
        kind = case["strides"].get(name)  # expanded tensors repeat their values
        t = t[:1].expand(shape) if kind == "rows" else t[:, :1].expand(shape) if kind == "heads" else t
        return t.to(dtype)

    q, k, v, grad_out = random("q", b, h, m, d), random("k", b, g, n, d), random("v", b, g, n, e), random("grad", b, h, m, e)
    grad_lse = torch.randn(b, h, m, generator=generator, dtype=torch.float64, device=device).to(wide_of(dtype))
    sink = None
    if case["sink"]:
        sink = torch.randn(h, generator=generator, dtype=torch.float64, device=device)
        none = torch.full_like(sink, -torch.inf)
        sink = {"normal": sink, "large": sink + 30, "low": sink - 30, "none": none}[case["sink"]].to(wide_of(dtype))
    seen = mods.visible(case["mask"], (b, h, m, n), device)
    through = case["through"] in ("out", "both"), case["through"] in ("lse", "both")
    problem = Problem(
        q=q, k=k, v=v, grad_out=grad_out, grad_lse=grad_lse, sink=sink, scale=case["scale"], visible=seen, score=case["score"],
        through=through,
    )  # fmt: skip
    if case["poison"]:
        _poison(problem, case)
    return problem


def _poison(p: Problem, case: Case) -> None:
    """Put NaN, inf or huge numbers into tokens, and mark the rows and keys whose results may change."""
    poison = case["poison"]
    rng, dtype = Random(poison["seed"]), dtype_of(case)
    groups, ratio = p.k.shape[1], p.q.shape[1] // p.k.shape[1]
    huge = torch.finfo(dtype).max / 4
    value = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "huge": huge}[poison["value"]]
    by_group = p.visible.unflatten(1, (groups, ratio))  # [B, G, R, Q, K]
    on_queries = poison["what"] in ("q", "grad")
    blank = ~p.visible.any(-1) if on_queries else ~by_group.any(3).any(2)  # rows that see nothing, keys that nothing sees
    if poison["where"] == "unseen":
        bad = blank
    else:
        tokens = blank.shape[-1]
        bad = torch.zeros_like(blank)
        for token in rng.sample(range(tokens), k=min(tokens, rng.choice((1, 2)))):
            bad[rng.randrange(bad.shape[0]), rng.randrange(bad.shape[1]), token] = True
    names = {"k": ["k"], "v": ["v"], "kv": ["k", "v"], "q": ["q"], "grad": ["grad_out"]}[poison["what"]]
    for name in names:
        p.poisoned[name] = getattr(p, name).clone().masked_fill_(bad[..., None], value)
    if on_queries:
        p.tainted_rows = bad
    else:
        p.tainted_rows = (by_group & bad[:, :, None, None]).any(-1).flatten(1, 2)
    p.tainted_keys = (p.visible & p.tainted_rows[..., None]).any(2).unflatten(1, (groups, ratio)).any(2)
    if poison["what"] == "q":
        p.tainted_rows = p.tainted_rows & p.visible.any(-1)


def restrided(t: Tensor, kind: str) -> Tensor:
    """The same values with other strides; expanded only if the values are equal along the dim."""
    if kind in ("rows", "heads"):
        one = t[:1] if kind == "rows" else t[:, :1]
        return one.expand(t.shape) if torch.equal(one.expand(t.shape), t) else t
    if kind == "bshd":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "last":
        return t.mT.contiguous().mT
    if kind == "sliced":
        return torch.cat([t, t.flip(-1), t], -1)[..., : t.shape[-1]]
    if kind == "strided":
        return torch.stack([t, t.flip(-2)], 3).flatten(2, 3)[:, :, ::2] if t.ndim == 4 else t
    if kind == "offset":
        flat = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        flat[1:] = t.flatten()
        return flat[1:].view(t.shape)
    return t


# --------------------------------------------------------------------------------------------------------------------------- calls


def run(case: Case) -> list[tuple[Problem, Results, str]]:
    """(problem, longspan's results, which call) of each call of a case."""
    problem = problem_of(case)
    if case["entry"] == "plan":
        return [(problem, _over_mesh(case, problem), "")]
    if case["entry"] == "context":
        problems = [problem]
        if case["mesh"].get("other_kv_len") and case["form"] in ("none", "causal"):
            problems.append(problem_of({**case, "kv_len": case["mesh"]["other_kv_len"]}))
        results = _in_context(case, problems)
        return list(zip(problems, results, ("", "second call with other keys: ")))
    dtype = dtype_of(case)
    held = {
        id(leaf): mods.captured(leaf, device=case["device"]) for leaf in mods.leaves(case["mask"] or {"op": "full"}) if leaf["op"] == "mod"
    }
    captured = mods.captured(case["score"] or {}, dtype=wide_of(dtype), device=case["device"])
    mask = None if case["mask"] is None else mods.as_longspan(case["mask"], held)
    score_mod = None if case["score"] is None else mods.score_mod(case["score"], captured)
    call = _single_call(case, mask, held)
    done = [(problem, _results(case, problem, call, score_mod, captured), "")]
    if case["again"]:
        second = {**case}
        if case["again"] == "scale":
            second["scale"] = 0.7 if case["scale"] is None else None
        if case["again"] == "captures":
            second = _rewritten(case, held, captured)
        with mods.changed_state(case["mask"]) if case["again"] == "state" else contextlib.nullcontext():
            again = problem_of(second, change=int(case["again"] == "values"))
            # A mask is traced once: another mask of the same mods sees a new state, and numbers of captured tensors.
            if case["again"] == "state" or any("int(t" in leaf.get("text", "") for leaf in mods.leaves(case["mask"] or {"op": "full"})):
                mask = None if case["mask"] is None else mods.as_longspan(case["mask"], held)
                call = _single_call(case, mask, held)
            done.append((again, _results(second, again, call, score_mod, captured), f"second call with other {case['again']}: "))
    return done


def _rewritten(case: Case, held: dict[int, list[Tensor]], captured: list[Tensor]) -> Case:
    """Write new values into captured tensors, and return the case that describes them."""

    def moved(spec: mods.Spec, tensors: list[Tensor]) -> mods.Spec:
        new = {**spec, "captures": [{**c, "seed": c["seed"] + 1000} for c in spec["captures"]]}
        for t, fresh in zip(tensors, mods.captured(new, dtype=wide_of(dtype_of(case)))):
            with torch.no_grad():
                t.copy_(fresh)
        return new

    def walk(spec: mods.Spec) -> mods.Spec:
        if "args" in spec:
            return {**spec, "args": [walk(a) for a in spec["args"]]}
        return moved(spec, held[id(spec)]) if spec["op"] == "mod" else spec

    mask = None if case["mask"] is None else walk(case["mask"])
    return {**case, "mask": mask, "score": None if case["score"] is None else moved(case["score"], captured)}


def _single_call(case: Case, mask: Any, held: dict[int, list[Tensor]]) -> Callable[..., Any]:
    if case["entry"] == "attention":
        if isinstance(case["mask"], dict) and case["mask"]["op"] == "mod" and case["seed"] % 2:
            mask = mods.mask_mod(case["mask"], held[id(case["mask"])])  # a plain callable

        def attention(q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, sink: Any, scale: Any, lse: bool) -> Any:
            return ls.attention(q, k, v, mask=mask, score_mod=score_mod, sink=sink, scale=scale, return_lse=lse, kernel=case["kernel"])

        return torch.compile(attention, fullgraph=True, backend="aot_eager") if case.get("compile") else attention
    if case["entry"] == "flex":
        given = _block_mask(case, mask)

        def flex(q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, sink: Any, scale: Any, lse: bool) -> Any:
            from torch.nn.attention.flex_attention import AuxRequest

            options = {"score_mod": score_mod, "block_mask": given, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
            if case.get("aux"):
                out, aux = ls.flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True), **options)
                return out, aux.lse, aux.max_scores
            return ls.flex_attention(q, k, v, return_lse=lse, **options)

        return flex

    def sdpa(q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, sink: Any, scale: Any, lse: bool) -> Any:
        return ls.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **_sdpa_mask(case, score_mod))

    return sdpa


def _sdpa_mask(case: Case, score_mod: Any) -> dict[str, Any]:
    if case["form"] == "causal":
        return {"is_causal": True}
    if case["form"] == "bool":
        sizes = (case["batch"], case["heads"], case["q_len"], case["kv_len"])
        rows, heads = mods.uses(case["mask"])
        return {"attn_mask": mods.visible(case["mask"], sizes, case["device"])[: None if rows else 1, : None if heads else 1]}
    if case["form"] == "float":
        return {"attn_mask": score_mod.__closure__[0].cell_contents}
    return {}


def _block_mask(case: Case, mask: Any) -> Any:
    """The mask of a FlexAttention call: longspan's, a callable, or torch's BlockMask."""
    if mask is None or case["block_mask"] == "mask":
        return mask
    if case["block_mask"] == "table":
        return mask.block_table(case["q_len"], case["kv_len"], batch=case["batch"], heads=case["heads"]).to_block_mask()
    if case["block_mask"] == "mod":
        return lambda b, h, q, kv: mask(b, h, q, kv)
    from torch.nn.attention.flex_attention import create_block_mask

    rows, heads = mods.uses(case["mask"])
    sizes = case["batch"] if rows else None, case["heads"] if heads else None, case["q_len"], case["kv_len"]
    return create_block_mask(_broadcast_mod(case), *sizes, device=case["device"], BLOCK_SIZE=max(8, case["tile"]))


def _broadcast_mod(case: Case) -> Callable[..., Tensor]:
    """The mask as one lookup in a dense table: torch's create_block_mask maps it with vmap."""
    sizes = (case["batch"], case["heads"], case["q_len"], case["kv_len"])
    table = mods.visible(case["mask"], sizes, case["device"]).contiguous()
    rows, heads = mods.uses(case["mask"])
    if rows and heads:
        return lambda b, h, q, kv: table[b, h, q, kv]
    if heads:
        return lambda b, h, q, kv: table[0, h, q, kv]
    return (lambda b, h, q, kv: table[b, 0, q, kv]) if rows else (lambda b, h, q, kv: table[0, 0, q, kv])


def _leaves(case: Case, tensors: Sequence[Tensor], sink: Tensor | None, captured: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors that need gradients, by the name of the gradient."""
    needs = {"q": ("dq",), "k": ("dk",), "v": ("dv",), "kv": ("dk", "dv"), "captured": (), "none": ()}.get(case["needs"])
    leaves = {name: t for name, t in zip(("dq", "dk", "dv"), tensors) if needs is None or name in needs}
    for t in leaves.values():
        t.requires_grad_()
    if sink is not None and case["needs"] in ("all", "captured"):
        leaves["dsink"] = sink.requires_grad_()
    floats = [t for t in captured if t.is_floating_point() and t.requires_grad]
    if case["needs"] in ("all", "captured"):
        return leaves | {f"captured {i}": t for i, t in enumerate(captured) if t.is_floating_point() and t.requires_grad}
    for t in floats:
        t.requires_grad_(False)
    return leaves


def _results(
    case: Case, p: Problem, call: Callable[..., Any], score_mod: Any, captured: Sequence[Tensor],
    shard: Callable[[Tensor, str], Tensor] = lambda t, side: t,
) -> Results:  # fmt: skip
    """out, lse and gradients of one call, on the whole tensors or on this rank's shards."""
    strides = case["strides"]
    tensors = [
        restrided(shard(p.given(name), side).detach(), strides[name]).detach() for name, side in (("q", "q"), ("k", "kv"), ("v", "kv"))
    ]
    grad_out = restrided(shard(p.given("grad_out"), "q").detach(), strides["grad"])
    sink = None if p.sink is None else p.sink.clone()
    leaves = _leaves(case, tensors, sink, captured)
    with contextlib.ExitStack() as modes:
        if case["needs"] == "none":
            modes.enter_context(torch.no_grad())
        if case.get("invariant"):
            modes.enter_context(ls.invariant())
        outputs = call(*tensors, score_mod=score_mod, sink=sink, scale=p.scale, lse=case["lse"])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = dict(zip(("out", "lse", "max_scores"), (t.detach() for t in outputs)))
    pairs = [(t, g) for t, g, used in zip(outputs, (grad_out, shard(p.grad_lse, "q")), p.through) if used and t.requires_grad]
    if leaves and pairs:
        grads = torch.autograd.grad([t for t, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True)
        results |= {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), grads)}
        for name, t in leaves.items():
            if results[name].dtype != t.dtype:
                raise Wrong(f"dtype {name}", f"{name}: expected {t.dtype}, got {results[name].dtype}")
    if results["out"].dtype != tensors[0].dtype:
        raise Wrong("dtype out", f"out: expected {tensors[0].dtype}, got {results['out'].dtype}")
    return results


def _summed(by_rank: list[Results]) -> Results:
    parts = [name for name in by_rank[0] if name in SHARED or name.startswith("captured")]
    return by_rank[0] | {name: torch.stack([r[name].double() for r in by_rank]).sum(0) for name in parts}


def _over_mesh(case: Case, p: Problem) -> Results:
    mesh, ranks = case["mesh"], 1
    for size in mesh["shape"]:
        ranks *= size
    shape = mesh["shape"][0] if len(mesh["shape"]) == 1 else tuple(mesh["shape"])
    mask = ls.full() if case["mask"] is None else mods.as_longspan(case["mask"])
    sizes = {
        name: case[name]
        for name in ("batch", "heads", "kv_heads", "head_dim")
        if mesh["heads" if "head" in name else "batch"] and name != "head_dim"
    }
    if "heads" in sizes:
        sizes["head_dim"] = case["dim"]
    reduce = mesh["grad_reduce_dtype"]
    options: dict[str, Any] = {
        "layout": _layout(case, ranks), "strategy": mesh["strategy"], "stages": mesh["stages"], "overlap": mesh["overlap"],
        "grad_reduce_dtype": None if reduce is None else getattr(torch, reduce), **sizes,
    }  # fmt: skip
    lengths = case["q_len"] if case["q_len"] == case["kv_len"] else (case["q_len"], case["kv_len"])
    made = {"a": mask, "b": ls.causal()} if mesh["sibling"] else mask

    def plan(mesh: Any) -> ls.Plan:
        both = ls.plan(made, lengths, mesh, **options)
        return both["a"] if isinstance(both, ls.PlanSet) else both

    world = _world(case, shape, mesh["names"])
    shared = None if mesh["own_plan"] else plan(ls.Mesh.abstract(shape, axis_names=mesh["names"]))

    def rank(here: Any) -> Results:
        mine = plan(here) if shared is None else shared.on(here)
        captured = mods.captured(case["score"] or {}, dtype=wide_of(dtype_of(case)), device=case["device"])
        score_mod = None if case["score"] is None else mods.score_mod(case["score"], captured)

        def call(q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, sink: Any, scale: Any, lse: bool) -> Any:
            return ls.attention(q, k, v, plan=mine, score_mod=score_mod, sink=sink, scale=scale, return_lse=lse, kernel=case["kernel"])

        results = _results(case, p, call, score_mod, captured, lambda t, side: mine.shard(t, 2, side=side))
        for name, t in results.items():
            if name not in SHARED and not name.startswith("captured"):
                results[name] = mine.unshard(t, 2, side="kv" if name in ("dk", "dv") else "q")
        return results

    return _summed(world.run(rank))


def _world(case: Case, shape: Any, names: Sequence[str] | None = None) -> Any:
    """Virtual ranks. On a GPU, they wait long for a rank that compiles kernels."""
    on_gpu = case["device"] != "cpu"
    return virtual_world(shape, axis_names=names, device=case["device"] if on_gpu else None, timeout=600.0 if on_gpu else 60.0)


def _layout(case: Case, ranks: int) -> Any:
    mesh = case["mesh"]
    if mesh["layout"] != "custom":
        return mesh["layout"]
    rows = case["batch"] if mesh["seed"] % 3 == 0 and mesh["batch"] else 1
    layouts = [
        ls.Layout(length=length, rows=custom_segments(length, ranks, mesh["seed"] + i, rows=rows))
        for i, length in enumerate((case["q_len"], case["kv_len"]))
    ]
    return layouts[0] if case["q_len"] == case["kv_len"] and mesh["seed"] % 2 else tuple(layouts)


def _in_context(case: Case, problems: list[Problem]) -> list[Results]:
    """Results of one call for each problem, all in one context."""
    from torch.nn.attention.flex_attention import flex_attention

    mesh = case["mesh"]
    block_mask = _block_mask(case, object()) if case["form"] == "flex" and case["mask"] is not None else None
    lengths = sorted({length for p in problems for length in (p.q.shape[2], p.k.shape[2])})

    def rank(here: Any) -> list[Results]:
        captured = mods.captured(case["score"] or {}, dtype=wide_of(dtype_of(case)), device=case["device"])
        score_mod = None if case["score"] is None else mods.score_mod(case["score"], captured)
        with torch.inference_mode(mesh["buffers"] == "inference"):
            buffers = {name: problems[0].given(name).clone() for name in ("q", "k", "v")} if mesh["buffers"] else {}
        given = {"buffers": list(buffers.values()), "buffer_seq_dims": [2, 2, 2]} if buffers else {}
        with ls.context_parallel(here, layout=mesh["layout"], strategy=mesh["strategy"], seq_len=lengths, **given) as cp:

            def call(q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, sink: Any, scale: Any, lse: bool) -> Any:
                grouped = q.shape[1] != k.shape[1]
                if case["form"] == "flex":
                    options = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": grouped, "return_lse": lse}
                    return flex_attention(q, k, v, **options)
                return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped, **_sdpa_mask(case, score_mod))

            def shard(t: Tensor, side: str) -> Tensor:
                for name, buffer in buffers.items():
                    if t is problems[0].given(name):
                        if buffer.shape[:2] != t.shape[:2]:
                            raise Wrong(
                                "shape of a buffer", f"buffer {name}: expected {tuple(t.shape[:2])} before dim 2, got {tuple(buffer.shape)}"
                            )
                        return buffer + 0 if mesh["buffers"] == "inference" else buffer.clone()
                return cp.shard(t, 2)

            by_call = []
            for p in problems:
                results = _results(case, p, call, score_mod, captured, shard)
                by_call.append({n: t if n in SHARED or n.startswith("captured") else cp.unshard(t, 2) for n, t in results.items()})
            return by_call

    by_rank = _world(case, mesh["shape"][0]).run(rank)
    return [_summed([results[i] for results in by_rank]) for i in range(len(problems))]


# --------------------------------------------------------------------------------------------------------------------- comparison


def check(case: Case) -> None:
    """Raise `Wrong` if a result of longspan differs from the oracle's, and `Refused` if a named kernel does not support the call."""
    try:
        calls = run(case)
    except Wrong:
        raise
    except Exception as error:
        if "does not support this call" in str(error) and case["kernel"] not in ("auto", "cpu", "dense"):
            raise Refused(str(error)) from None
        if case["again"] == "state" and case["needs"] in ("all", "captured") and "by atomic additions" in str(error):
            raise Refused(str(error)) from None  # the state that changes is that of deterministic algorithms
        raise Wrong(f"raised {type(error).__name__}", f"{type(error).__name__}: {error}") from error
    for problem, got, which in calls:
        _compare(case, problem, got, which)


def _compare(case: Case, p: Problem, got: Results, which: str) -> None:
    dtype = dtype_of(case)
    right = solve(p, torch.float64, wide_of(dtype))
    allowed: dict[str, float] | None = None
    for name, t in got.items():
        want = right[name]
        if t.shape != want.shape:
            raise Wrong(f"{which}shape {name}", f"{which}{name}: expected shape {tuple(want.shape)}, got {tuple(t.shape)}")
        t, want = _untainted(p, name, t.double(), want)
        if t is None:
            continue
        finite = torch.isfinite(want)
        if not torch.equal(torch.isfinite(t), finite) or not torch.equal(t[~finite], want[~finite]):
            raise Wrong(f"{which}finite {name}", f"{which}{name}: NaN or infinities at other places than the oracle's")
        error = float((t - want)[finite].abs().max()) if finite.any() else 0.0
        allowed = budgets(p, right, dtype) if allowed is None else allowed
        budget = allowed[name]
        reduce = (case.get("mesh") or {}).get("grad_reduce_dtype")
        if reduce and name in ("dk", "dv"):
            budget += 8 * torch.finfo(getattr(torch, reduce)).eps * float(right[name].abs().max() + 1)
        if not error <= budget:  # out has its own rounding and that of probabilities
            budget += 2 * rounding_of_out(p, right, dtype).get(name, 0.0)
        if not error <= budget:
            raise Wrong(f"{which}value {name}", f"{which}{name}: error {error:.2e}, budget {budget:.2e}")


def _untainted(p: Problem, name: str, got: Tensor, want: Tensor) -> tuple[Any, Tensor]:
    """The entries that poison may not change; (None, …) where it may change all."""
    if p.tainted_rows is None or p.tainted_keys is None:
        return got, want
    if name in ("dk", "dv"):
        return got[~p.tainted_keys], want[~p.tainted_keys]
    if name in ("out", "lse", "max_scores", "dq"):
        rows = ~(p.tainted_rows & p.visible.any(-1))  # a row that sees nothing has out and dq of 0 whatever is in it
        if name in ("out", "lse", "max_scores") and "grad_out" in p.poisoned:
            rows = torch.ones_like(rows)
        return got[rows], want[rows]
    return (None, want) if bool(p.tainted_rows.any()) else (got, want)
