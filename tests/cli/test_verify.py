"""`longspan verify` and `longspan bench`: results, exit codes and JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scripts import run_script

import longspan as ls
from longspan._kernels import registry
from longspan._kernels.cpu import CpuKernel

pytest.importorskip("typer")
pytest.importorskip("rich")

from longspan.cli import oracle_checks as checking
from longspan.cli import strategy_checks as spanning
from longspan.cli import verify
from longspan.cli.app import run
from longspan.testing import oracle
from longspan.testing.budget import FEW, budgets

CPU = torch.device("cpu")


def called(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer checks: two masks, two scores, one case over ranks, no Triton kernel (it is interpreted in tests)."""
    monkeypatch.setattr(registry, "NAMES", ("auto", "dense", "cpu", "hopper"))
    monkeypatch.setattr(checking, "MASKS", ("causal", "custom"))
    monkeypatch.setattr(checking, "SCORES", ("none", "bias"))
    monkeypatch.setattr(spanning, "CASES", (("documents", "bias"),))


@pytest.mark.usefixtures("few_checks")
def test_a_line_has_the_checks_of_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[str, torch.dtype]] = []
    monkeypatch.setattr(checking.Line, "add", lambda line, problem, shares: added.append((line.dtype, problem.dtype)))
    monkeypatch.setattr(checking.Problem, "results", lambda problem, call, inputs: {})
    monkeypatch.setattr(checking.Problem, "shares", lambda problem, results: {})
    list(verify.kernel_lines(CPU, whole=False))
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    kernels = len(registry.NAMES) - 1
    assert added == [(str(p[2])[6:], p[2]) for _ in range(kernels) for d in dtypes for p in checking.grid(dtypes, whole=False) if p[2] == d]


@pytest.mark.long
@pytest.mark.usefixtures("few_checks")
def test_verify_passes_and_prints_a_table_and_json(capsys: Any) -> None:
    code, out, err = called(capsys, "verify", "--device", "cpu", "--ranks", "4", "--json")
    report = json.loads(out.splitlines()[-1])
    assert (code, err) == (0, "") and report["ok"] and "checks passed" in out and "over 4 virtual ranks" in out
    kernels = {(row["name"], row["dtype"]): row for row in report["kernels"]}
    for name in ("dense", "cpu"):
        for dtype in ("float32", "bfloat16", "float64"):
            row = kernels[name, dtype]
            assert row["cases"] and not row["refused"] and 0 < max(row[part] for part in report["shown"]) <= 1
    assert kernels["hopper", ""]["cases"] == 0 and kernels["hopper", ""]["reason"]
    names = [row["name"] for row in report["strategies"]]
    assert names == ["ring", "allgather", "exchange", "ulysses", "ulysses_ring", "ulysses_allgather", "ulysses_exchange", "auto"]


@pytest.mark.usefixtures("few_checks")
@pytest.mark.parametrize("wrong", ["forward", "backward", "raises"])
def test_a_wrong_kernel_is_named_and_the_exit_code_is_1(wrong: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = CpuKernel.forward, CpuKernel.backward

    def wrong_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = forward(self, *args, **kwargs)
        state.out[..., -1, :] *= 1.001
        return state

    def wrong_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        grads = backward(self, *args, **kwargs)
        grads.k[..., 0, :] *= 1.001
        return grads

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such\ninstruction")

    monkeypatch.setattr(checking, "MASKS", ("causal",))
    monkeypatch.setattr(spanning, "STRATEGY_NAMES", ("ring", "ulysses"))
    patches = {"forward": ("forward", wrong_forward), "backward": ("backward", wrong_backward), "raises": ("forward", fails)}
    monkeypatch.setattr(CpuKernel, *patches[wrong])
    code, out, err = called(capsys, "verify", "--device", "cpu", "--ranks", "2", "--json")
    report = json.loads(out.splitlines()[-1])
    assert (code, err, report["ok"]) == (1, "", False)
    rows = {row["name"]: row for row in report["kernels"] if row["dtype"] == "float32"}
    assert rows["dense"]["ok"] and not rows["cpu"]["ok"]
    says = {"forward": "out error is", "backward": "dk error is", "raises": "RuntimeError: no such instruction"}[wrong]
    assert any(says in failure for failure in rows["cpu"]["failures"]) and says in out and "lines failed" in out
    assert len(report["strategies"]) == 2 and not any(row["ok"] for row in report["strategies"])


def test_the_error_of_nan_or_of_another_shape_is_infinite() -> None:
    problem = checking.Problem(mask="custom", score="bias", dtype=torch.float32, device=CPU, batch=1, heads=2, tokens=37, dim=8)
    right = problem.right
    assert max(problem.shares(right).values()) == 0 and (right["lse"] == -torch.inf).any()
    for name, t in right.items():
        for bad in (torch.where(torch.arange(t.shape[-1]) == 0, torch.nan, t), t[..., :-1], t.clamp(min=-1e4)):
            if not torch.equal(bad, t):
                assert problem.shares({**right, name: bad})[name] == float("inf"), name


def test_the_expected_gradient_of_a_bias_is_summed_in_float64() -> None:
    sizes: dict[str, Any] = {"mask": "causal", "score": "bias", "device": CPU, "batch": 1, "heads": 2, "tokens": 41, "dim": 8}
    narrow, wide = (checking.Problem(dtype=dtype, **sizes).right["dbias"] for dtype in (torch.float32, torch.float64))
    assert narrow.any() and torch.equal(narrow, wide)


def test_other_draws_widen_the_budgets_of_small_results_only() -> None:
    v, grad_out = torch.ones(1, 2, 5, 3), torch.ones(1, 4, 7, 3)
    right = {"dq": torch.zeros(FEW + 1), "head bias": torch.zeros(FEW)}
    off = {name: t + 1 for name, t in right.items()}
    alone = budgets(right, right, v=v, grad_out=grad_out, captured=["head bias"])
    among = budgets(right, right, v=v, grad_out=grad_out, captured=["head bias"], others=[(right, right), (right, off)])
    eps = torch.finfo(torch.float32).eps
    assert alone == {"dq": 2 * eps * 3, "head bias": 2 * eps * 3 * (4 * 7) ** 0.5}
    assert among == {"dq": alone["dq"], "head bias": 2 + alone["head bias"]}


def test_the_sample_covers_every_pair_of_choices_and_causal_in_every_dtype() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    sample, whole = checking.grid(dtypes, whole=False), checking.grid(dtypes, whole=True)
    assert set(sample) < set(whole) and len(whole) == len(set(whole)) == 36 and len(sample) == len(set(sample))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert {(c[a], c[b]) for c in sample} == {(c[a], c[b]) for c in whole}
    assert {c[2] for c in sample if c[:2] == ("causal", "none")} == set(dtypes)


BAD_OPTIONS = [
    (["verify", "--ranks", "0"], "--ranks: expected a number"),
    (["verify", "--ranks", "65"], "--ranks: expected up to 64"),
    (["verify", "--device", "tpu"], "--device: expected auto, cpu or cuda"),
    (["bench", "--dtype", "int8"], "--dtype: expected one of float32"),
    (["bench", "--tokens", "few"], "--tokens: expected a number"),
    (["bench", "--heads", "5/2"], "--heads: expected query heads"),
    (["bench", "--repeat", "0"], "--repeat: expected a number"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD_OPTIONS, ids=[" ".join(a) for a, _ in BAD_OPTIONS])
def test_bad_options_are_one_line_and_exit_code_2(arguments: list[str], says: str, capsys: Any) -> None:
    code, out, err = called(capsys, *arguments)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1


@pytest.mark.parametrize("heads", ["3", "4/2"])
def test_bench_prints_ratios_and_json(heads: str, capsys: Any) -> None:
    sizes = ("--tokens", "150", "--heads", heads, "--dim", "8", "--repeat", "1", "--device", "cpu")
    code, out, err = called(capsys, "bench", *sizes, "--json")
    report = json.loads(out.splitlines()[-1])
    assert (code, err) == (0, "") and "SDPA ms" in out and (report["tokens"], report["dim"], report["dtype"]) == (150, 8, "float32")
    rows = [(row["mask"], row["name"]) for row in report["rows"]]
    assert rows == [(mask, name) for mask in ("causal", "16 packed documents") for name in ("forward", "backward")]
    assert all(row["ratio"] == row["sdpa_s"] / row["longspan_s"] > 0 and row["same"] for row in report["rows"])


def test_bench_reports_different_results_with_exit_code_1(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CpuKernel.forward

    def wrong_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = forward(self, *args, **kwargs)
        state.out *= 1.01
        return state

    monkeypatch.setattr(CpuKernel, "forward", wrong_forward)
    code, out, _ = called(capsys, "bench", "--tokens", "90", "--heads", "2", "--dim", "8", "--repeat", "1", "--device", "cpu")
    assert code == 1 and "DIFFERENT RESULTS" in out


@pytest.mark.processes
def test_verify_uses_the_processes_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "few.py"
    script.write_text(
        "from longspan._kernels import registry\n"
        "from longspan.cli import oracle_checks, strategy_checks\n"
        "from longspan.cli.app import run\n"
        "oracle_checks.MASKS, oracle_checks.SCORES, strategy_checks.CASES = ('causal',), ('none',), (('documents', 'bias'),)\n"
        "registry.NAMES = ('auto', 'dense', 'cpu')\n"
        "assert run(['verify', '--device', 'cpu', '--json']) == 0\n"
    )
    printed = run_script(script, 2)
    report = json.loads(printed[0].splitlines()[-1])
    assert report["ok"] and (report["ranks"], report["virtual"]) == (2, False) and "over 2 processes" in printed[0]
    assert printed[0].count("all ") == 1 and printed[1] == "", "only rank 0 prints"


def line(name: str, *, cases: int = 3, failures: tuple[str, ...] = (), refused: int = 0, reason: str = "") -> checking.Line:
    worst = {"out": 0.25, "lse": 0.125, "gradients": float("inf") if failures else 0.5}
    kwargs: dict[str, Any] = {"cases": cases, "refused": refused, "reason": reason, "worst": worst, "failures": list(failures)}
    return checking.Line(name=name, dtype="float32" if cases else "", **kwargs)


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("wrong", [False, True])
def test_lines_are_printed_by_rank_0_and_counted(rank: int | None, wrong: bool, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "hopper does not support this call: no GPU. kernel='auto' chooses another"
    kernels = [line("dense"), line("cpu", refused=2), line("hopper", cases=0, reason=reason)]
    strategies = [line("ring", failures=("out error", "lse error") if wrong else ()), line("ulysses", cases=5)]
    asked: list[Any] = []
    elsewhere = ["rank 2: ring float32, out error"] if wrong and rank is not None else []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(verify, "kernel_lines", lambda device, whole: asked.append((device, whole)) or iter(kernels))
    monkeypatch.setattr(spanning, "lines", lambda device, ranks, virtual: asked.append((device, ranks, virtual)) or iter(strategies))
    monkeypatch.setattr(spanning, "failures_elsewhere", lambda lines: elsewhere if lines == [*kernels, *strategies] else None)
    before = torch.backends.cuda.matmul.allow_tf32
    assert verify._run_checks(CPU, True, True, 6, rank) == int(wrong) and torch.backends.cuda.matmul.allow_tf32 == before
    assert asked == [(CPU, True), (CPU, 6, rank is None)]
    out = capsys.readouterr().out.splitlines()
    if rank:
        assert out == []
        return
    assert out[0].endswith(", CPU, 7 threads") and out[2] == ""
    numbers = "float32         3    0.250    0.125      0.500"
    assert out[3:7] == [
        "kernel             dtype       cases      out      lse  gradients",
        f"dense              {numbers}",
        f"cpu                {numbers}   2 not supported",
        "hopper             not supported: no GPU",
    ]
    assert out[7:9] == ["", f"strategy           over 6 {'virtual ranks' if rank is None else 'processes'}"]
    failed = f"ring               {numbers.replace('  0.500', '    inf')}   WRONG"
    assert out[9] == (failed if wrong else f"ring               {numbers}")
    assert out[10:-1] == [
        *(["    out error", "    lse error"] if wrong else []),
        f"ulysses            {numbers.replace('3    0', '5    0')}",
        *elsewhere,
        "",
        f"{1 + len(elsewhere)} of 5 lines failed" if wrong else "all 14 checks passed",
    ]
    report = json.loads(out[-1])
    assert (report["ok"], report["device"], report["ranks"], report["virtual"]) == (not wrong, "CPU, 7 threads", 6, rank is None)
    assert (report["elsewhere"], report["shown"]) == (elsewhere, ["out", "lse", "gradients"])
    row = {"name": "ring", "dtype": "float32", "cases": 3, "refused": 0, "reason": "", "out": 0.25, "lse": 0.125}
    ends = (
        {"failures": ["out error", "lse error"], "gradients": None, "ok": False}
        if wrong
        else {"failures": [], "gradients": 0.5, "ok": True}
    )
    assert report["strategies"][0] == row | ends


def test_a_reason_without_advice_is_kept() -> None:
    assert verify._reason("no Triton here") == "no Triton here"


@pytest.mark.parametrize(("options", "code"), [((), 7), (("--ranks", "3"), 7), (("--ranks", "4"), 2)])
def test_torchruns_processes_are_the_ranks(options: tuple[str, ...], code: int, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan._training import launch

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    calls: list[Any] = []
    monkeypatch.setattr(launch, "run_ranks", lambda *arguments: calls.append(arguments) or 7)
    assert run(["verify", "--device", "cpu", "--whole", *options]) == code
    assert calls == ([(verify._rank, 3, "cpu", True, False)] if code == 7 else [])
    said = "longspan verify: --ranks: torchrun started 3 processes, got 4; leave out the option\n"
    assert capsys.readouterr().err == ("" if code == 7 else said)


def test_virtual_ranks_are_4_and_at_most_64(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(verify, "_run_checks", lambda *arguments: calls.append(arguments) or 0)
    assert run(["verify", "--device", "cpu"]) == run(["verify", "--device", "cpu", "--ranks", "64", "--json"]) == 0
    assert calls == [(CPU, False, False, 4, None), (CPU, False, True, 64, None)]
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    gpu = torch.device("cuda", 2)
    assert verify._rank(gpu, "cuda", True, False) == verify._rank(gpu, "cpu", True, False) == 0
    assert calls[2:] == [(gpu, True, False, 3, 1), (CPU, True, False, 3, 1)]


@pytest.mark.parametrize(
    ("ranks", "heads", "two"), [(4, (8, 2), (2, 2)), (6, (12, 2), (3, 2)), (9, (18, 9), (3, 3)), (5, (10, 5), None), (2, (4, 2), None)]
)
def test_strategies_are_checked_over_factors_of_the_ranks(
    ranks: int, heads: tuple[int, int], two: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def over(kind: str) -> Any:
        def checked(problem: Any, strategy: str, shape: tuple[int, ...]) -> dict[str, Any]:
            asked.append((kind, problem.mask, problem.score, (problem.heads, problem.kv_heads), strategy, shape))
            raise RuntimeError("not computed")

        return checked

    monkeypatch.setattr(spanning, "_over_threads", over("threads"))
    monkeypatch.setattr(spanning, "_over_processes", over("processes"))
    for virtual in (True, False):
        asked.clear()
        lines = list(spanning.lines(CPU, ranks, virtual=virtual))
        names = [name for name in spanning.STRATEGY_NAMES if two or not name.startswith("ulysses_")]
        assert [made.name for made in lines] == names and all(made.cases == 2 == len(made.failures) for made in lines)
        kind = "threads" if virtual else "processes"
        assert asked == [
            (kind, mask, score, heads, name, two if name.startswith("ulysses_") else (ranks,))
            for name in names
            for mask, score in (("documents", "bias"), ("window", "none"))
        ]


def test_failures_of_other_ranks_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(by_rank: list[Any], own: list[str]) -> None:
        by_rank[:] = [["of rank 0"], own, ["a b, c"]]

    monkeypatch.setattr(spanning.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(spanning.dist, "all_gather_object", gather)
    lines = [line("ring", failures=("x", "y")), line("auto")]
    assert spanning.failures_elsewhere(lines) == ["rank 1: ring float32, x", "rank 1: ring float32, y", "rank 2: a b, c"]


def test_errors_over_their_budget_fail() -> None:
    problem = checking.Problem(mask="causal", score="none", dtype=torch.float32, device=CPU)
    made = checking.Line(name="cpu", dtype="float32")
    made.add(problem, {"out": 1.0, "dq": 0.5, "dk": 0.75, "dbias": 0.25})
    assert made.ok and made.worst == {"out": 1.0, "lse": 0.0, "gradients": 0.75} and made.cases == 1
    made.add(problem, {"out": 0.5, "lse": 1.25})
    assert not made.ok and made.cases == 2 and made.failures == ["causal mask, no score: lse error is 1.25 × its budget"]
    softcapped = checking.Problem(mask="window", score="softcap", dtype=torch.float32, device=CPU)
    made.fail(softcapped, ValueError("two\n lines" + "x" * 400))
    assert made.cases == 3 and made.failures[1] == "window mask, softcap score: ValueError: two lines" + "x" * 291


def test_masks_and_scores_of_problems_are_those_of_their_names() -> None:
    sizes: dict[str, Any] = {"dtype": torch.float64, "device": CPU}
    documents = ls.causal() & ls.documents(lengths=[62, 3, 37, 47])
    for name, mask in (("causal", ls.causal()), ("documents", documents), ("window", ls.sliding_window(37, 5))):
        made = checking.Problem(mask=name, score="none", **sizes).made_mask
        assert torch.equal(made.block_table(149, 149, block=1).to_dense(), mask.block_table(149, 149, block=1).to_dense())
    softcap, captured = checking.Problem(mask="causal", score="softcap", **sizes).score_mod(torch.float64)
    scores, zero = torch.tensor([1e-3, 5.0, 1e3], dtype=torch.float64), torch.tensor(0)
    assert softcap is not None and captured == []
    torch.testing.assert_close(softcap(scores, zero, zero, zero, zero), torch.tensor([1e-3, 5 * math.tanh(1), 5.0]).double())


@pytest.mark.parametrize(("ranks", "shape", "strategy"), [(2, (2,), "ring"), (4, (2, 2), "ulysses_exchange")])
def test_virtual_ranks_compute_right_results(ranks: int, shape: tuple[int, ...], strategy: Any) -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads": 4, "kv_heads": 2, "tokens": 45, "dim": 8}
    problem = checking.Problem(mask="documents", score="bias", dtype=torch.float32, device=CPU, **sizes)
    threads = torch.get_num_threads()
    got = spanning._over_threads(problem, strategy, shape)
    assert {name: t.shape for name, t in got.items()} == {name: t.shape for name, t in problem.right.items()}
    assert all(share <= 1 for share in problem.shares(got).values()) and torch.get_num_threads() == threads


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_processes_form_a_mesh_of_one_or_two_axes_and_sum_gradients_of_the_bias(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = checking.Problem(mask="causal", score="bias", dtype=torch.float32, device=CPU)
    made, summed, results = object(), [], {"out": torch.zeros(2), "dbias": torch.ones(3)}
    asked: list[Any] = []
    monkeypatch.setattr(spanning.dist.device_mesh, "init_device_mesh", lambda *args, **names: asked.append((args, names)) or made)
    monkeypatch.setattr(spanning, "_on_rank", lambda problem, strategy, mesh: asked.append((strategy, mesh)) or results)
    monkeypatch.setattr(spanning.dist, "all_reduce", summed.append)
    assert spanning._over_processes(problem, "ring", shape) is results and summed == [results["dbias"]]
    two = [(("cpu", shape), {"mesh_dim_names": ("ring", "ulysses")})] if len(shape) == 2 else []
    assert asked == [*two, ("ring", made if two else spanning.dist.group.WORLD)]


def test_rows_without_keys_and_heads_that_differ_are_checked() -> None:
    mask = checking.Problem(mask="custom", score="none", dtype=torch.float64, device=CPU, tokens=43).made_mask
    h, q, kv = torch.arange(4)[:, None, None], torch.arange(43)[:, None], torch.arange(43)
    visible = mask(torch.tensor(0), h, q, kv)
    assert (visible.any(-1) == (q[:, 0] % 5 != 0)).all() and visible[:, 42].sum(-1).tolist() == [10, 21, 32, 43]
    assert not (visible & (kv > q)).any()


def test_gradients_are_those_of_given_gradients_of_out_and_of_lse() -> None:
    problem = checking.Problem(mask="window", score="bias", dtype=torch.float64, device=CPU, tokens=41, dim=8)
    q, k, v = (t.clone().requires_grad_() for t in problem.inputs[:3])
    score_mod, captured = problem.score_mod(torch.float64)
    results = oracle(q, k, v, mask=problem.made_mask, score_mod=score_mod, return_lse=True)
    grads = torch.autograd.grad(results, [q, k, v, *captured], [problem.inputs[3], problem.inputs[4].double()])
    torch.testing.assert_close(problem.right, dict(zip(("out", "lse", "dq", "dk", "dv", "dbias"), (*results, *grads), strict=True)))


def test_inputs_are_of_the_problems_device_and_dtype_and_no_leaves_of_the_results() -> None:
    problem = checking.Problem(mask="custom", score="none", dtype=torch.bfloat16, device=CPU, tokens=43)
    results = problem.by_oracle(torch.float32)
    assert [t.dtype for t in problem.inputs] == [torch.bfloat16] * 4 + [torch.float32]
    assert {t.dtype for t in results.values()} == {torch.float64} and not any(t.requires_grad for t in (*problem.inputs, *results.values()))
    there = checking.Problem(mask="custom", score="bias", dtype=torch.float32, device=torch.device("meta"))
    assert {t.device.type for t in (*there.inputs, *there.score_mod(torch.float32)[1])} == {"meta"}
