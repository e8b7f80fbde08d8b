"""The command line: printed text, written files, and usage errors in one line with exit code 2."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cost.clusters import cluster, dump
from longspan._cost.rates import Shape
from longspan._cost.timeline import Conditions

pytest.importorskip("typer")
pytest.importorskip("rich")

from longspan.cli import main
from longspan.cli.app import UsageError, run
from longspan.cli.parse import _imported
from longspan.cli.plan import Request, _degrees, _fastest_plan


def called(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_prints_a_picture_and_a_table(capsys: Any) -> None:
    code, out, err = called(capsys, "plan", "--mask", "causal", "--tokens", "16k", "--gpus", "4", "--heads", "8/2", "--explain")
    assert code == 0 and err == ""
    assert (
        "busiest rank" in out and "TFLOP/s per device" in out and "considered on h200" in out and any(rank * 10 in out for rank in "0123")
    )


def test_plan_writes_a_page_a_picture_and_a_trace(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "my lengths.txt").write_text("3000, 1000\n4000\n192", encoding="utf-8-sig")  # with a byte order mark
    files = {name: tmp_path / name for name in ("report.html", "plan.png", "trace.json")}
    code, _, err = called(
        capsys, "plan", "--mask", f"causal & documents({tmp_path}/my lengths.txt)", "--tokens", "8192", "--gpus", "4", "--cluster", "a100",
        "--strategy", "exchange", "--html", str(files["report.html"]), "--png", str(files["plan.png"]), "--trace", str(files["trace.json"]),
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "<canvas" in files["report.html"].read_text() and files["plan.png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["trace.json"].read_text())["traceEvents"]


def test_plan_predicts_serving_and_writes_the_page(capsys: Any, tmp_path: Path) -> None:
    page = tmp_path / "serve.html"
    arguments = ["--context", "64k", "--batch", "4", "--gpus", "16", "--model", "qwen3-8b", "--html", str(page)]
    code, out, err = called(capsys, "plan", "--serve", *arguments)
    assert (code, err) == (0, "") and all(word in out for word in ("first token", "per token", "cache per device", "at most", "pass KV"))
    assert 'data-name="first_token"' in page.read_text() and "<canvas" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "--model", "gpt-9"], "--model: expected one of qwen3-8b"),
        (["--serve", "--tokens", "1M"], "--tokens not supported with --serve"),
        (["--serve", "--tp", "3", "--gpus", "8"], "longspan plan: --tp: expected a divisor of 8 devices"),
        (["--context", "1M"], "expected --serve with them"),
        (["--kv-dtype", "fp8"], "expected --serve with them"),
        (["--serve", "--kv-dtype", "int8"], "--kv-dtype: expected one of bf16, fp8, got 'int8'"),
        (["--samples", "3k*60", "--kv-dtype", "fp8"], "--kv-dtype not supported with --samples"),
        (["--serve", "--gpus", "100k"], "--gpus: expected at most 512 devices that share a sequence, got 102400 devices, 8 of which"),
    ],
)
def test_wrong_options_of_serving_are_usage_errors(capsys: Any, arguments: list[str], message: str) -> None:
    code, _, err = called(capsys, "plan", *arguments)
    assert code == 2 and message in err


def test_generate_streams_tokens_and_prints_rates(capsys: Any) -> None:
    pytest.importorskip("transformers")
    code, out, err = called(capsys, "generate", "--context", "70", "--chunk", "32", "--new", "9", "--page-size", "16")
    assert code == 0 and len(out.rstrip("\n")) == 9 and "prefill 70 tokens" in err and "decode 8 tokens" in err and "one process" in err


def test_generate_prints_text_whose_end_changes_as_more_tokens_are_decoded(capsys: Any) -> None:
    from longspan.cli.generate import _Output

    class Tokenizer:
        texts = ("", "a", "a\ufffd", "aé", "xé", "xé\ufffd")

        def decode(self, tokens: list[int], **_: Any) -> str:
            return self.texts[len(tokens)]

    output = _Output(Tokenizer(), 1, 5, shown=True)
    for token in range(5):
        output.decoded(token)
    output.end("rates")
    assert capsys.readouterr().out == "aé\nxé\ufffd\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--checkpoint", "."], "generate: --checkpoint: expected a folder with config.json"),
        (["generate", "--prompt", "a", "--context", "9"], "generate: --context: expected either --prompt or --context"),
        (["generate", "--prompt", b"\xff".decode(errors="surrogateescape")], "generate: --prompt: expected UTF-8 text"),
        (["generate", "--seed", str(2**63)], "generate: --seed: expected a whole number of 64 bits"),
        (["generate", "--page-size", "1G"], "generate: --page-size: expected at most 65536 tokens, got 1G"),
        (["generate", "--processes", "100k"], "generate: --processes: expected at most 64, got 102400"),
        (["train", "--out", ".", "--processes", "100k"], "train: --processes: expected at most 64, got 102400"),
        (["demo", "--processes", "100k"], "demo: --processes: expected at most 64, got 102400"),
        (["warm", "--kernel", "cpu"], "warm: --kernel: expected one of auto, hopper, triton, got 'cpu'"),
    ],
)
def test_wrong_options_of_other_commands_are_usage_errors(capsys: Any, arguments: list[str], message: str) -> None:
    code, _, err = called(capsys, *arguments)
    assert code == 2 and message in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_warm_without_a_gpu_names_no_option(capsys: Any) -> None:
    code, _, err = called(capsys, "warm")
    assert code == 2 and err.startswith("longspan warm: torch finds no CUDA device here")


MASKS = ["full", "causal()", "sliding_window(1k) & causal", "~prefix(64) | (causal & documents([1000, 1048]))"]
MASKS += ["mod('tests.cli.masks:even')", "tests.cli.masks:even"]


@pytest.mark.parametrize("expression", MASKS)
def test_masks_are_read_from_expressions(capsys: Any, expression: str) -> None:
    code, out, err = called(capsys, "plan", "--mask", expression, "--tokens", "2k", "--gpus", "2", "--heads", "4")
    assert (code, err) == (0, "") and "2048 tokens over 2 ranks" in out


def test_thousands_of_devices_are_simulated(capsys: Any) -> None:
    code, out, _ = called(capsys, "plan", "--tokens", "1M", "--gpus", "1024", "--ulysses", "8", "--stragglers", "5:2")
    assert code == 0 and "ulysses_" in out and "8 × 128" in out


@pytest.mark.parametrize(("option", "degrees"), [([], None), (["--ulysses", "8"], [8])])
def test_a_simulation_tries_the_degree_given_or_all(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, option: list[str], degrees: list[int] | None
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("longspan._cost.simulate.simulate", lambda *_, **options: asked.append(options["degrees"]) or [])
    code, _, err = called(capsys, "plan", "--tokens", "1M", "--gpus", "1024", *option)
    assert asked == [degrees] and code == 2 and "cannot share the heads" in err


@pytest.mark.parametrize(
    "option", [["--strategy", "ring"], ["--layout", "contiguous"], ["--stages", "3"], ["--no-overlap"], ["--overlap"], ["--explain"]]
)
def test_options_that_a_simulation_cannot_honour_are_usage_errors(capsys: Any, option: list[str]) -> None:
    code, _, err = called(capsys, "plan", "--tokens", "1M", "--gpus", "1024", *option)
    assert code == 2 and option[0] in err and "up to 512 devices" in err


TYPO = dump(cluster("h100")).replace("gpus_per_node", "gpus_per_nod")
NO_TOML = dump(cluster("h100")).replace("[inside]", "[inside")
NEGATIVE = dump(cluster("h100")).replace("memory_gib = 80", "memory_gib = -80")
LISTS = dump(cluster("h100")).replace("forward_full = [400, ", "forward_full = [")
BAD: list[tuple[list[str], str]] = [
    (["--mask", "causl"], "unknown mask 'causl'"),
    (["--mask", "causal &"], "cannot read 'causal &'"),
    (["--mask", "causal + full"], "cannot read 'causal + full'"),
    (["--mask", "__import__('os')"], "unknown mask '__import__'"),
    (["--mask", "sliding_window"], "takes 1 or 2 values"),
    (["--mask", "sliding_window(wide)"], "got 'wide'"),
    (["--mask", "no.such:thing"], "cannot import 'no.such:thing'"),
    (["--mask", "tests.cli.masks:NUMBER"], "is a int"),
    (["--mask", "documents(nowhere.txt)"], "nowhere.txt"),
    (["--mask", "documents(words.txt)"], "words.txt, line 2: expected a length"),
    (["--mask", "documents(squares.txt)"], "squares.txt, line 1: expected a length"),
    (["--mask", "documents(short.txt)"], "sum to 600, --tokens says 8192"),
    (["--mask", "documents([1, -2])"], "whole numbers of 0 or more"),
    (["--tokens", "many"], "--tokens: expected a number"),
    (["--tokens", "0"], "--tokens: expected a number"),
    (["--gpus", "1.5"], "--gpus: expected a number"),
    (["--heads", "32/5"], "--heads: expected query heads"),
    (["--dim", "x"], "--dim"),
    (["--layout", "diagonal"], "--layout: expected one of contiguous"),
    (["--strategy", "pigeon"], "--strategy: expected one of ring"),
    (["--strategy", "ulysses", "--heads", "6"], "do not divide by a Ulysses degree"),
    (["--ulysses", "3"], "4 devices do not divide by 3"),
    (["--stages", "-1"], "--stages"),
    (["--stragglers", "9:2"], "--stragglers: expected rank:factor with a rank below 4"),
    (["--slow-links", "1:fast"], "--slow-links"),
    (["--cluster", "h900"], "--cluster: expected one of a100"),
    (["--cluster", "missing.toml"], "missing.toml: No such file"),
    (["--cluster", "typo.toml"], "typo.toml: unknown key 'gpus_per_nod'; expected name"),
    (["--cluster", "broken.toml"], "broken.toml: not TOML"),
    (["--cluster", "negative.toml"], "memory_gib must be a number above 0, got -80"),
    (["--cluster", "lists.toml"], "lists of rates of the same length"),
    (["--mask", "sliding_window(0)"], "--mask: sliding_window(0): "),
    (["--mask", "broken_syntax:f"], "--mask: cannot import 'broken_syntax:f': invalid syntax (broken_syntax.py, line 1)"),
    (["--mask", "broken_import:f"], "RuntimeError: two lines"),
    (["--mask", "broken_exit:f"], "--mask: cannot import 'broken_exit:f': SystemExit: 3"),
    (["--mask", "broken_mods:raises"], "--mask: 'broken_mods:raises' cannot be used as a mask: "),
    (["--mask", "broken_mods:leaves"], "--mask: 'broken_mods:leaves' cannot be used as a mask: SystemExit"),
    (["--mask", "broken_mods:by_zero"], "no plan for --mask 'broken_mods:by_zero'"),
    (["--mask", "broken_mods:missing"], "--mask: cannot import 'broken_mods:missing'"),
    (["--mask", "..relative:f"], "--mask: expected module:function"),
    (["--tokens", "9" * 400], "--tokens: expected a number"),
    (["--batch", "99999999G"], "--batch: expected a number of 1 or more such as 8192, 64k or 1M, at most 262144G"),
    (["--stragglers", "1:" + "9" * 400], "--stragglers: expected rank:factor"),
    (["--html", "."], "--html: expected a file to write, . is a directory"),
    (["--trace", "."], "--trace: expected a file to write, . is a directory"),
    (["--png", "."], "--png: expected a file to write, . is a directory"),
    (["--png", "x.xyz"], "--png: expected a name that ends in one of "),
    (["--html", "x" * 300], "File name too long"),
    (["--html", "/dev/full"], "--html: /dev/full: No space left on device"),
    (["--trace", "/dev/full"], "--trace: /dev/full: No space left on device"),
    (["--html", "no/such/place.html"], "--html: there is no directory"),
    (["--gpus", "4096", "--html", "x.html"], "up to 512 devices"),
    (["--frobnicate"], "No such option"),
]


def test_a_module_of_the_working_directory_comes_before_others(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, window in (("here", 3), ("elsewhere", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_masks_of_a_test.py").write_text(f"import longspan as ls\nmask = ls.sliding_window({window})")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    monkeypatch.delitem(sys.modules, "my_masks_of_a_test", raising=False)
    assert repr(_imported("my_masks_of_a_test:mask")) == repr(ls.sliding_window(3)) != repr(ls.sliding_window(5))
    assert sys.path[0] == str(tmp_path / "elsewhere")


def test_a_picture_without_matplotlib_is_a_one_line_error(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan._report import figure

    def missing(*_: Any) -> None:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(figure, "figure", missing)
    code, _, err = called(capsys, "plan", "--tokens", "2k", "--gpus", "2", "--png", str(tmp_path / "plan.png"))
    assert code == 2 and "--png: No module named 'matplotlib'" in err and err.count("\n") == 1


BROKEN = {
    "broken_syntax.py": "def f(:",
    "broken_import.py": "raise RuntimeError('two\\nlines')",
    "broken_exit.py": "raise SystemExit(3)",
    "broken_mods.py": """
def raises(b, h, q, kv): raise KeyError(q)
def leaves(b, h, q, kv): raise SystemExit(1)
def by_zero(b, h, q, kv): return q // 0 >= kv
""",
}


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=[" ".join(a)[:60] for a, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("words.txt", "100\nmany 3"),
        ("squares.txt", "10²"),
        ("short.txt", "100 500"),
        ("typo.toml", TYPO),
        ("broken.toml", NO_TOML),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "negative.toml").write_text(NEGATIVE)
    (tmp_path / "lists.toml").write_text(LISTS)
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text)
        sys.modules.pop(name.removesuffix(".py"), None)
    if "/dev/full" in arguments and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    defaults = {"--tokens": "8192", "--gpus": "4", "--heads": "8/2"}
    options = [x for name, value in defaults.items() if name not in arguments for x in (name, value)]
    code, out, err = called(capsys, "plan", *options, *arguments)
    assert code == 2 and out == "" and says in err
    assert err.startswith("longspan plan: ") and err.count("\n") == 1 and "Traceback" not in err


def test_an_unknown_command_is_a_usage_error_and_help_exits_with_0(capsys: Any) -> None:
    code, _, err = called(capsys, "plann")
    assert code == 2 and "plann" in err and err.count("\n") == 1
    assert called(capsys, "--help")[0] == 0 and called(capsys, "plan", "--help")[0] == 0


def test_bad_files_and_numbers_of_other_commands_are_usage_errors(capsys: Any, tmp_path: Path) -> None:
    for arguments, says in (
        (("calibrate", str(tmp_path)), "is a directory"),
        (("train", "--out", str(tmp_path / "run"), "--rate", "nan"), "--rate: expected a number above 0"),
        (("train", "--out", str(tmp_path / "run"), "--seed", "9" * 30), "--seed: expected a whole number of 64 bits"),
    ):
        code, out, err = called(capsys, *arguments)
        assert (code, out) == (2, "") and says in err and err.count("\n") == 1


@pytest.mark.parametrize("module", ["longspan", "longspan.cli"])
def test_python_m_longspan_runs_the_command_line(module: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [module, "plan", "--gpus", "none"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module(module, run_name="__main__")  # as `python -m` does
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("longspan plan: --gpus: expected a number")


def test_calibrate_writes_a_profile_that_plan_can_use(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    code, out, err = called(capsys, "calibrate", str(path), "--quick", "--name", "here", "--kernel", "cpu", "--heads", "2", "--dim", "16")
    assert (code, err) == (0, "") and "forward full" in out
    profile = cluster(path)
    assert profile.name == "here" and profile.kernel.name == "cpu" and min(profile.kernel.backward.causal) > 0 and profile.hbm > 1e8
    first = next(line for line in out.splitlines() if line.split()[:1] == ["64"])  # keys, and TFLOP/s at this head dim
    assert profile.kernel.forward.full[0] * 16 / 128 / profile.kernel.dim_factor(16) == pytest.approx(float(first.split()[1]), rel=1e-3)
    assert called(capsys, "plan", "--cluster", str(path), "--tokens", "4k", "--gpus", "2", "--heads", "4")[0] == 0


def test_without_typer_the_command_line_names_the_extra_to_install(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)  # then `import typer` raises
    with pytest.raises(SystemExit, match="1"):
        main(["plan"])
    assert "longspan[cli]" in capsys.readouterr().err


def test_main_with_arguments_does_not_end_the_process_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--tokens", "few"])


@pytest.mark.parametrize("mask", ["~" * 3000 + "causal", "causal & " * 1500 + "causal"], ids=["not", "and"])
def test_masks_nested_too_deeply_are_usage_errors(mask: str, capsys: Any) -> None:
    code, _, err = called(capsys, "plan", "--mask", mask, "--tokens", "1k", "--gpus", "2")
    assert code == 2 and err.count("\n") == 1 and "masks nested too deeply" in err


def test_a_plan_larger_than_device_memory_is_reported(capsys: Any) -> None:
    _, out, _ = called(capsys, "plan", "--tokens", "32M", "--gpus", "8", "--strategy", "ring", "--layout", "head_tail")
    assert "MiB per rank at most: more than the 139.8 GiB of a device (h200)" in out
    _, out, _ = called(capsys, "plan", "--tokens", "64k", "--gpus", "8")
    assert "MiB per rank at most\n" in out


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--layout", "diagonal"], ["train", "--width", "7"], ["plan", "--mask", "nope"]])
def test_help_and_option_errors_come_before_torch_is_loaded(arguments: list[str]) -> None:
    """torch takes seconds to import."""
    code = f"""
import runpy, sys
class Reject:
    def find_spec(self, name, *_):
        assert name not in ("torch", "numpy"), f"{{name}} was imported"
sys.meta_path.insert(0, Reject())
sys.argv = ["-m"]
import longspan
sys.argv = ["longspan", *{arguments!r}]
from longspan.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "was imported" not in done.stderr and done.returncode == (0 if arguments == ["--help"] else 2), done.stderr


def test_a_step_of_samples_is_shown(capsys: Any, tmp_path: Path) -> None:
    listed = tmp_path / "lengths.txt"
    listed.write_text("9000\n500\n4k\n")
    options = ("--gpus", "4", "--tokens-per-gpu", "2560", "--heads", "4/2", "--dim", "16")
    code, out, _ = called(capsys, "plan", "--samples", str(listed), *options)
    assert code == 0 and out.startswith(
        "3 samples of 500 to 9000 tokens, 13596 in all, over 4 ranks: 2 forwards, at most 2560 tokens per rank"
    )
    listed.write_text("9000\n500\n4k\n", encoding="utf-8-sig")  # with a byte order mark
    assert called(capsys, "plan", "--samples", str(listed), *options)[1] == out
    assert called(capsys, "plan", "--samples", "9000,500,4k", *options)[1] == out
    assert called(capsys, "plan", "--samples", "300*4", *options)[1].startswith("4 samples of 300 to 300 tokens")
    assert called(capsys, "plan", "--samples", "1.5k,2k", *options)[1].startswith("2 samples of 1536 to 2048 tokens")
    many = ",".join(["70"] * 130)  # longer than a file's name may be
    assert called(capsys, "plan", "--samples", many, *options)[1].startswith("130 samples of 70 to 70 tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "9k"], "--samples, --tokens-per-gpu: expected both of them"),
        (["--tokens-per-gpu", "9k"], "--samples, --tokens-per-gpu: expected both of them"),
        (["--samples", "9k", "--tokens-per-gpu", "1k", "--mask", "full"], "--samples: --mask not supported with --samples"),
        (["--samples", "90k", "--tokens-per-gpu", "1k", "--gpus", "4"], "a sample of 92160 tokens exceeds 4 ranks"),
        (["--samples", "x", "--tokens-per-gpu", "1k"], "--samples"),
        (["--samples", "missing.txt", "--tokens-per-gpu", "1k"], "--samples: missing.txt"),
        (["--samples", "9", "--tokens-per-gpu", "1k", "--layout", "x"], "--layout: expected one of"),
        (["--samples", "5*9999999999999", "--tokens-per-gpu", "1k"], "--samples: expected at most 100000 samples"),
        (["--samples", "9k", "--tokens-per-gpu", "1k", "--gpus", "100k"], "--gpus: expected at most 512 devices with --samples"),
        (["--samples", "5*", "--tokens-per-gpu", "1k"], "--samples: expected a number of 1 or more"),
    ],
)
def test_wrong_options_of_a_step_are_usage_errors(capsys: Any, arguments: list[str], message: str) -> None:
    code, _, err = called(capsys, "plan", *arguments)
    assert code == 2 and message in err


def test_commas_in_a_file_of_lengths_are_a_usage_error(capsys: Any, tmp_path: Path) -> None:
    """As an argument, 100,200 is two lengths: one length of 100200 from a file would be another step."""
    listed = tmp_path / "lengths.csv"
    listed.write_text("100,200\n300\n")
    code, _, err = called(capsys, "plan", "--samples", str(listed), "--tokens-per-gpu", "64k", "--gpus", "4")
    assert code == 2 and "without commas, got '100,200'" in err


@pytest.mark.parametrize(
    ("strategy", "heads", "degrees"),
    [
        ("ulysses_ring", (12, 4), [2, 4]),
        ("auto", (12, 4), [1, 2, 4]),
        ("auto", (32, 8), [1, 8, 16]),
        ("ring", (12, 4), [1]),
        ("ulysses", (12, 4), [64]),
    ],
)
def test_ulysses_degrees_to_try_divide_the_heads_and_the_devices(strategy: str, heads: tuple[int, int], degrees: list[int]) -> None:
    """64 devices, 8 in a node: powers of two up to 16."""
    shape = Shape(heads=heads[0], kv_heads=heads[1], head_dim=64)
    request = Request(
        mask=ls.causal(), tokens=1 << 14, gpus=64, shape=shape, cluster=cluster("h200"), conditions=Conditions(), degree=None
    )  # fmt: skip
    assert _degrees(request, strategy) == degrees
    with pytest.raises(UsageError, match="--ulysses"):
        _degrees(replace(request, degree=3), strategy)
    assert _degrees(replace(request, degree=4), strategy) == [4]


@pytest.mark.parametrize("slow", [["--stragglers", "0:4"], ["--slow-links", "1:40"]])
def test_slow_ranks_are_part_of_the_choice_the_report_and_the_explanation(slow: list[str], capsys: Any, tmp_path: Path) -> None:
    seconds = {}
    for options in ([], slow):
        page = tmp_path / "page.html"
        code, out, _ = called(capsys, "plan", "--tokens", "8k", "--gpus", "4", "--explain", "--html", str(page), *options)
        predicted, explained = re.search(r"predicted    ([\d.]+) ms", out), re.search(r"predicted: ([\d.]+) ms", out)
        won = re.search(r"the winner is (.*): ([\d.]+) ms", out)
        assert code == 0 and predicted and explained and won
        assert float(explained[1]) == float(won[2]) and float(predicted[1]) == pytest.approx(float(won[2]), abs=0.01)
        assert won[1].split(",")[0] in page.read_text(encoding="utf-8")
        seconds[bool(options)] = float(won[2])
    assert seconds[True] > 2 * seconds[False]


def test_degrees_are_compared_with_slow_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = Conditions(slow_links={1: 40.0})
    request = Request(
        mask=ls.causal(), tokens=8192, gpus=4, shape=Shape(heads=32, kv_heads=8), cluster=cluster("h200"), conditions=conditions,
        degree=None,
    )  # fmt: skip
    chosen = _fastest_plan(request, "auto")
    plans = [_fastest_plan(replace(request, degree=degree), "auto") for degree in _degrees(request, "auto")]
    assert len(plans) > 1 and chosen.report().seconds == min(p.report("h200", conditions=conditions).seconds for p in plans)


def test_slow_ranks_are_part_of_the_picture_the_page_and_the_trace(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan._report import figure, page, trace

    seconds: dict[str, float] = {}
    monkeypatch.setattr(figure, "figure", lambda report, path: seconds.update({path.name: report.seconds}))
    monkeypatch.setattr(page, "save", lambda report, considered, path: seconds.update({path.name: report.seconds}))
    monkeypatch.setattr(trace, "save", lambda report, path: seconds.update({path.name: report.seconds}))
    files = [str(tmp_path / name) for name in ("a.png", "b.html", "c.json")]
    arguments = ["plan", "--tokens", "2k", "--gpus", "2", "--strategy", "ring", "--stragglers", "1:50", "--slow-links", "0:9"]
    code, _, err = called(capsys, *arguments, "--png", files[0], "--html", files[1], "--trace", files[2])
    made = ls.plan(ls.causal(), 2048, ls.Mesh.abstract(2), strategy="ring", heads=32, kv_heads=8, head_dim=128)
    slow = made.report("h200", conditions=Conditions(stragglers={1: 50.0}, slow_links={0: 9.0})).seconds
    assert (code, err) == (0, "") and seconds == {name: pytest.approx(slow) for name in ("a.png", "b.html", "c.json")}
    assert slow > 2 * made.report("h200").seconds
