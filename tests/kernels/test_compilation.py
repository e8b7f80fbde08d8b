"""Compilation of kernels: once per machine, in threads, and ahead of the call that needs them. Nothing is compiled here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.stub_launches import record_launches

import longspan as ls
from longspan._engine import compile_ahead
from longspan._kernels.gpu import compilation, prepared_launch
from longspan._kernels.gpu.prepared_launch import PreparedLaunch

# Loads the module by its path: a rank that imports torch would take seconds.
RANK = """
import importlib.util, sys, tempfile, time
from pathlib import Path
from types import ModuleType, SimpleNamespace
for name in ("longspan", "longspan._kernels", "longspan._kernels.gpu"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(Path(sys.argv[1]).parent)]
spec = importlib.util.spec_from_file_location("compilation", sys.argv[1])
compilation = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compilation)
folder = Path(sys.argv[2])
tempfile.tempdir = str(folder / "locks")
compilation.knobs.cache.dir = str(folder)

def compile(src, target=None, options=None):
    stored = folder / src.hash()
    if stored.exists():
        return stored.read_text()
    src.make_ir()
    time.sleep(0.3)
    with open(folder / "log", "a") as log:
        log.write(src.hash() + " ")
    stored.write_text("kernel")
    return "kernel"

compilation.triton = SimpleNamespace(compile=compile)
for name in ("forward", "backward"):
    source = SimpleNamespace(hash=lambda: name, make_ir=lambda: None)
    assert compilation._compile_once(source, target="sm_90", options={"num_warps": 4}) == "kernel"
"""


def test_ranks_of_one_machine_compile_each_kernel_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK, str(compilation.__file__), str(tmp_path)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, errors
    assert (tmp_path / "log").read_text().split() == ["forward", "backward"]


def test_a_file_lock_excludes_threads_and_gives_up_waiting(tmp_path: Path) -> None:
    entered: list[float] = []

    def enter(max_wait_s: float) -> None:
        with compilation.file_lock(tmp_path / "lock", max_wait_s=max_wait_s):
            entered.append(time.monotonic())

    with compilation.file_lock(tmp_path / "lock"):
        enter(0.05)  # waits for itself, gives up
        thread = threading.Thread(target=enter, args=(60.0,))
        thread.start()
        time.sleep(0.1)
        left = time.monotonic()
    thread.join()
    assert len(entered) == 2 and entered[0] < left <= entered[1]


def test_a_folder_without_locks_does_not_stop_compilation(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with compilation.file_lock(tmp_path / "file" / "lock"):
        pass


def test_waiting_jobs_start_when_the_first_kernel_is_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    started = threading.Event()
    monkeypatch.setattr(compilation, "lock_folder", lambda: tmp_path)

    def compile_traced(src: Any, **_: Any) -> None:
        src.make_ir()
        assert started.wait(10)
        order.append("compiled")

    def job() -> None:
        order.append("job")
        started.set()

    monkeypatch.setattr(compilation.triton, "compile", compile_traced)
    source = SimpleNamespace(hash=lambda: "kernel", make_ir=lambda: order.append("traced"))
    with compilation.compiling_meanwhile([job]):
        compilation._compile_once(source)
    assert order == ["traced", "job", "compiled"]


def test_the_driver_is_made_once_in_a_thread_before_the_first_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: list[str] = []

    class Driver:
        @property
        def active(self) -> Any:
            makers.append(threading.current_thread().name)
            return SimpleNamespace(get_current_device=lambda: 0)

    class Kernel:
        device_caches = (None,)
        compile: Any = None

        def warmup(self, *arguments: Any, **options: Any) -> str:
            return "kernel"

    compilation.start_driver.cache_clear()
    monkeypatch.setattr(compilation, "driver", Driver())
    compilation.start_driver()
    assert [compilation.compile_kernel(Kernel(), (), {}) for _ in range(2)] == ["kernel"] * 2
    assert makers == ["longspan-driver", "MainThread", "MainThread"]
    compilation.start_driver.cache_clear()


def test_waiting_jobs_start_at_the_end_if_nothing_is_compiled() -> None:
    done = threading.Event()
    with compilation.compiling_meanwhile([done.set]):
        assert not done.wait(0.05)
    assert done.wait(10)


def test_an_error_of_a_job_is_that_of_its_future() -> None:
    def fail() -> None:
        raise ValueError("a kernel that does not compile")

    (future,) = compilation.compile_in_threads([fail])
    with pytest.raises(ValueError, match="does not compile"):
        future.result(10)


def test_a_collected_job_holds_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(prepared_launch, "interpreted", lambda: False)
    monkeypatch.setattr(PreparedLaunch, "_compile_in_thread", lambda self, arguments: seen.extend(arguments))
    monkeypatch.setattr(PreparedLaunch, "launch_at", lambda self, values: pytest.fail("launched"))
    one = PreparedLaunch(
        kernel=SimpleNamespace(arg_names=("x", "pair", "n")), options={}, ctas=1, device=torch.device("cpu"), descriptors={},
        constants={"pair": (torch.zeros(2), 3), "n": 7},
    )  # fmt: skip
    with compilation.collecting_jobs() as jobs:
        one({"x": torch.zeros(8, dtype=torch.int32)}, {})
    assert compilation.collected_jobs() is None and len(jobs) == 1 and not seen
    jobs[0]()
    x, (first, second), n = seen
    assert not isinstance(x, torch.Tensor) and x.dtype == torch.int32 and x.data_ptr() < 16
    assert not isinstance(first, torch.Tensor) and (second, n) == (3, 7)


def test_kernels_compiled_here_have_a_short_key_and_others_have_tritons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys: list[str] = []
    monkeypatch.setattr(compilation, "lock_folder", lambda: tmp_path)
    monkeypatch.setattr(compilation.triton_cache, "triton_key", lambda: "3.6-abc")
    monkeypatch.setattr(compilation.triton, "compile", lambda src, **_: keys.append(compilation.triton_cache.triton_key()))
    compilation._shorten_triton_key.__wrapped__()
    for _ in range(2):
        compilation._compile_once(SimpleNamespace(hash=lambda: "kernel", make_ir=None))
    keys.append(compilation.triton_cache.triton_key())
    short = f"longspan-{compilation._triton_files_digest()}-"
    assert keys == [short, short, "3.6-abc"]


def test_no_garbage_is_collected_while_a_kernel_is_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    enabled: list[bool] = []
    monkeypatch.setattr(compilation, "lock_folder", lambda: tmp_path)
    monkeypatch.setattr(compilation.triton, "compile", lambda src, **_: src.make_ir())

    def trace() -> None:
        enabled.append(compilation.gc.isenabled())
        raise ValueError("a kernel that does not compile")

    with pytest.raises(ValueError, match="does not compile"):
        compilation._compile_once(SimpleNamespace(hash=lambda: "kernel", make_ir=trace))
    assert enabled == [False] and compilation.gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of threads in a process that forks
def test_a_process_forked_while_a_kernel_is_traced_collects_garbage() -> None:
    with compilation._without_garbage_collection():
        child = os.fork()
        if child == 0:
            os._exit(0 if compilation.gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0 and compilation.gc.isenabled()


@pytest.mark.parametrize("scored", [False, True])
def test_the_first_forward_pass_compiles_the_kernels_of_backward(scored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[PreparedLaunch] = []
    needed: list[PreparedLaunch] = []
    compile_launch = PreparedLaunch.compile

    def note(self: PreparedLaunch, *args: Any) -> None:
        needed.append(self)
        compile_launch(self, *args)

    record_launches(monkeypatch)
    monkeypatch.setattr(compile_ahead, "_may_compile", lambda q: True)
    monkeypatch.setattr(compilation, "compile_in_threads", lambda jobs, **_: ahead.extend(job.func.__self__ for job in jobs))
    monkeypatch.setattr(PreparedLaunch, "compile", note)
    q, k, v = (torch.zeros(1, h, 300, 64, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    slope = torch.ones(4, requires_grad=True)
    score_mod = (lambda s, b, h, i, j: s + slope[h] * (i - j)) if scored else None
    out = ls.attention(q, k, v, mask=ls.sliding_window(70 + scored), score_mod=score_mod, kernel="hopper")
    forward = len(needed)
    out.backward(torch.zeros_like(out))
    assert forward == 1 and len(needed) >= 3
    assert set(map(id, needed[forward:])) <= set(map(id, ahead))


def test_long_calls_are_compiled_with_short_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_MAX_BYTES", 2**20)
    long = torch.zeros(3, 3000, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    short = compile_ahead._shortened(long)
    assert short.shape == (2, 4, 1024 + 3000 % 128, 64)
    assert short.stride(1) == 64 and short.stride(3) == 1 and short.stride(2) == 256
    assert compile_ahead._shortened(long[:1, :, :100]).shape == (1, 4, 100, 64)


def test_warm_needs_a_cuda_device() -> None:
    with pytest.raises(ValueError, match="expected a CUDA device, got cpu"):
        ls.warm(heads=4, head_dim=64, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="torch finds none"):
            ls.warm(heads=4, head_dim=64)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_a_warm_call_compiles_nothing(kernel: str) -> None:
    code = f"""
import torch, triton, longspan as ls
compiled = []
triton.knobs.compilation.listener = lambda src, cache_hit, **_: None if cache_hit else compiled.append(src.name)
assert ls.warm(ls.causal(), 1000, heads=4, kv_heads=2, head_dim=64, kernel={kernel!r}) >= 3
assert compiled
compiled.clear()
q, k, v = (torch.randn(1, h, 1000, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for h in (4, 2, 2))
for _ in range(3):
    out = ls.attention(q, k, v, mask=ls.causal(), kernel={kernel!r})
    out.backward(torch.randn_like(out))
assert not compiled, compiled
"""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "LONGSPAN_PREBUILT": "0"}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
