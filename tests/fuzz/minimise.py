"""Shrink a wrong case feature by feature, and write it as a script."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz import mods
from tests.fuzz.cases import Case, valid
from tests.fuzz.harness import Refused, Wrong, check

MAX_TRIES = 250
PLAIN: dict[str, Any] = {
    "poison": None, "again": None, "compile": False, "invariant": False, "sink": None, "score": None, "scale": None,
    "needs": "all", "kernel": "auto",
    "through": "out", "lse": False, "aux": False, "dtype": "float64", "entry": "attention", "mask": None,
}  # fmt: skip
PLAIN_MESH = {"stages": None, "overlap": None, "grad_reduce_dtype": None, "own_plan": False, "sibling": False, "layout": "contiguous",
              "buffers": None, "other_kv_len": None, "strategy": "exchange", "names": None}  # fmt: skip


def minimised(case: Case, kind: str) -> Case:
    """The smallest case found that is wrong in the same way."""
    best, tries = case, 0
    improved = True
    while improved and tries < MAX_TRIES:
        improved = False
        for smaller in _smaller(best):
            tries += 1
            if _same(smaller, kind):
                best, improved = smaller, True
                break
            if tries >= MAX_TRIES:
                break
    return best


def _same(case: Case, kind: str) -> bool:
    try:
        check(copy.deepcopy(case))
    except Wrong as error:
        return error.kind.split()[0] == kind.split()[0]
    except Refused:
        return False
    return False


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one feature less, the largest steps first."""
    for key, value in PLAIN.items():
        if case.get(key, value) != value:
            changed = {**copy.deepcopy(case), key: value}
            if key == "entry":
                changed.pop("mesh", None)
            yield valid(changed)
    for key, value in PLAIN_MESH.items():
        if case.get("mesh") and case["mesh"].get(key, value) != value:
            changed = copy.deepcopy(case)
            changed["mesh"][key] = value
            yield valid(changed)
    if case.get("mesh") and len(case["mesh"]["shape"]) == 1 and case["mesh"]["shape"][0] > 1:
        changed = copy.deepcopy(case)
        changed["mesh"]["shape"] = [case["mesh"]["shape"][0] - 1]
        yield changed
    if any(kind != "plain" for kind in case["strides"].values()):
        yield {**copy.deepcopy(case), "strides": dict.fromkeys(case["strides"], "plain")}
        for name, kind in case["strides"].items():
            if kind != "plain":
                changed = copy.deepcopy(case)
                changed["strides"][name] = "plain"
                yield changed
    for mask in _smaller_masks(case["mask"]) if case["mask"] else ():
        yield valid({**copy.deepcopy(case), "mask": mask})
    for size in ("batch", "kv_heads", "heads", "dim", "value_dim", "q_len", "kv_len"):
        for n in (1, case[size] // 2, case[size] - 1):
            if 1 <= n < case[size]:
                changed = copy.deepcopy(case)
                changed[size] = n
                if size == "dim" and case["dim"] == case["value_dim"]:
                    changed["value_dim"] = n
                if size == "q_len" and case["q_len"] == case["kv_len"]:
                    changed["kv_len"] = n
                if size in ("kv_heads", "heads") and changed["heads"] % changed["kv_heads"]:
                    changed["heads"] = changed["kv_heads"]
                if _fits(changed):
                    yield changed


def _fits(case: Case) -> bool:
    """Whether documents still have the lengths of the case."""
    for leaf in mods.leaves(case["mask"]) if case["mask"] else ():
        if leaf["op"] in ("ids", "documents"):
            ids = mods.document_ids(leaf["lengths"]) if leaf["op"] == "documents" else leaf["ids"]
            length = ids.shape[-1] if hasattr(ids, "shape") else len(ids[0]) if isinstance(ids[0], list) else len(ids)
            if length != case["q_len"] or length != case["kv_len"]:
                return False
            if (leaf.get("lengths") or leaf.get("ids")) and isinstance((leaf.get("lengths") or leaf.get("ids"))[0], list):
                return len(leaf.get("lengths") or leaf.get("ids")) == case["batch"]
        if leaf["op"] == "prefix" and isinstance(leaf["length"], list) and len(leaf["length"]) != case["batch"]:
            return False
    return True


def _smaller_masks(spec: mods.Spec) -> Iterator[mods.Spec]:
    yield from spec.get("args", ())
    for i, arg in enumerate(spec.get("args", ())):
        for smaller in _smaller_masks(arg):
            yield {**spec, "args": [*spec["args"][:i], smaller, *spec["args"][i + 1 :]]}


# -------------------------------------------------------------------------------------------------------------------------- scripts


def report(case: Case, error: Wrong, folder: Path) -> Path:
    """Minimise a wrong case; write it as JSON and as a script; print the script."""
    small = minimised(copy.deepcopy(case), error.kind)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"seed_{case['seed']}_tile_{case['tile']}"
    (folder / f"{name}.json").write_text(json.dumps(small, indent=1) + "\n")
    path = folder / f"{name}.py"
    path.write_text(script(small, error, name))
    print(path.read_text())
    return path


def script(case: Case, error: Wrong, name: str) -> str:
    """A script that makes the call of a case and raises if its result is wrong."""
    mask = "None" if case["mask"] is None else mods.source(case["mask"])
    score = "None" if case["score"] is None else mods.mod_source("s, b, h, q, kv", case["score"])
    shapes = (
        f"q [{case['batch']}, {case['heads']}, {case['q_len']}, {case['dim']}], k and v {case['kv_heads']} heads, {case['kv_len']} keys"
    )
    single = case["entry"] == "attention" and not (case["poison"] or case["again"] or case.get("compile") or case.get("invariant"))
    lines = [
        f'"""{name}: {error.kind}. {shapes}, value dim {case["value_dim"]}, {case["dtype"]}; run with PYTHONPATH=src:."""',
        "",
        "from tests.fuzz.thresholds import lower",
        "",
        f"lower({case['tile']})  # tokens per tile; see the file for the other constants",
        "",
    ]
    if not single:
        lines += ["from tests.fuzz.harness import check", "", f"# mask: {mask}", f"# score_mod: {score}", f"check({case!r})"]
        return "\n".join([*lines, 'print("right")', ""])
    through = {"out": "out.mul(grad).sum()", "lse": "lse.masked_fill(lse == -torch.inf, 0).mul(grad[..., 0]).sum()"}
    loss = f"{through['out']} + {through['lse']}" if case["through"] == "both" else through[case["through"]]
    sink = {None: "None", "normal": "0.0", "large": "30.0", "low": "-30.0", "none": "-torch.inf"}[case["sink"]]
    sink = sink if case["sink"] is None else f"torch.full(({case['heads']},), {sink}, dtype=lse_dtype, requires_grad=True)"
    b, h, g, m, n, d, e = (case[key] for key in ("batch", "heads", "kv_heads", "q_len", "kv_len", "dim", "value_dim"))
    return "\n".join([
        *lines, "import torch", "from tests.fuzz.mods import captured", "",
        "import longspan as ls", "from longspan.testing import oracle", "",
        "torch.manual_seed(0)",
        f"dtype, lse_dtype = torch.{case['dtype']}, torch.{'float64' if case['dtype'] == 'float64' else 'float32'}",
        f"q, k, v, grad = (torch.randn(s, dtype=torch.float64).to(dtype) for s in (({b}, {h}, {m}, {d}), ({b}, {g}, {n}, {d}), "
        f"({b}, {g}, {n}, {e}), ({b}, {h}, {m}, {e})))",
        f"mask = {mask}", f"score_mod = {score}", f"sink = {sink}", "", "",
        "def results(attend, **options):",
        "    leaves = [t.detach().requires_grad_() for t in (q, k, v)]",
        f"    out, lse = attend(*leaves, mask=mask, score_mod=score_mod, scale={case['scale']}, sink=sink, return_lse=True, **options)",
        f"    return [out, lse, *torch.autograd.grad({loss}, leaves, allow_unused=True)]", "", "",
        f"for name, got, want in zip(('out', 'lse', 'dq', 'dk', 'dv'), results(ls.attention, kernel={case['kernel']!r}), results(oracle)):",
        "    if got is not None and want is not None:",
        "        print(name, 'largest difference', float((got.double() - want).nan_to_num(0.0, 0.0, 0.0).abs().max()))", "",
    ])  # fmt: skip
