"""Compilation of Triton kernels: once per machine, in threads, and without the parts of Triton that take seconds but compile nothing.

- A file lock per kernel: of the ranks of a machine, one compiles and the others find the result in Triton's cache on disk.
- Kernels may be compiled in threads (`compile_in_threads`). LLVM and the assembler run without Python's lock. Tracing holds it, so one
  kernel is traced at a time: two at once would both take twice as long.
- Triton's key, a hash of its own 400 MB, takes up to 2 s per process. Kernels compiled here are found in Triton's cache by the sizes and
  times of modification of these files, and the versions of the assembler and of rewritten PTX, instead.
- Not by an assembler that is known to be wrong (`assembler`), and, by Triton 3.9, from rewritten PTX (`wgmma_descriptors`).
- Tracing creates a million Python objects. The garbage collector would search all of torch's objects for unreachable ones meanwhile.

Private parts of Triton used here, 3.6 to 3.9. Without one of them, Triton compiles as it does by itself:

`JITFunction.device_caches`     looking up a device sets `JITFunction.compile`.
`JITFunction.cache_key`         a hash of the sources of the kernel and of all functions that it calls; computed once.
`JITFunction.compile`           called with the source, target and options of a kernel that this process has not compiled.
`ASTSource.make_ir`, `.hash`    tracing; a hash of the source, the signature and the constants.
`triton.runtime.cache.triton_key`
`GluonSemantic.warp_specialize`, `GluonCallerContext`, `CodeGenerator.caller_context`
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime import cache as triton_cache
from triton.runtime import driver

from longspan._kernels.gpu import assembler, wgmma_descriptors

Job = Callable[[], Any]
_MAX_WAIT_S = 300.0  # for another process that compiles; then compile without the lock
_POLL_S = 0.01
_HEAD_START_S = 0.1  # of a traced kernel, until it is in code that runs without Python's lock, over kernels that wait to be traced
_tracing = threading.Lock()
_collection_paused = threading.Event()
_collected: ContextVar[list[Job] | None] = ContextVar("longspan_collected_compile_jobs", default=None)
# Version of the assembler, and of rewritten PTX, of the kernel that this thread compiles here; None while it compiles none.
_assembler: ContextVar[str | None] = ContextVar("longspan_assembler", default=None)
_waiting: ContextVar[list[Job] | None] = ContextVar("longspan_waiting_compile_jobs", default=None)


def compile_kernel(kernel: Any, arguments: Sequence[Any], options: dict[str, int]) -> Any:
    """The compiled kernel for these arguments, from Triton's caches if they have it. Nothing is loaded or launched."""
    _shorten_triton_key()
    from longspan._kernels.gpu.prebuilt import may_be_prebuilt

    starting = start_driver()
    if not may_be_prebuilt(kernel, arguments):
        with suppress(AttributeError):
            _ = kernel.cache_key  # a hash of all functions that it calls, which Triton needs later, made while the driver starts
    starting.join()
    with suppress(AttributeError):
        kernel.device_caches[driver.active.get_current_device()]  # sets `compile`
        kernel.compile = _take_or_compile
    # Triton traces an overflow check for every integer operation, and drops it unless it compiles for debugging.
    return kernel.warmup(*arguments, grid=(1,), sanitize_overflow=knobs.runtime.debug, **options)


@cache
def start_driver() -> threading.Thread:
    """The thread that makes Triton's driver. With an empty cache, Triton runs a C compiler for it, which takes 0.4 s."""

    def make() -> None:
        with suppress(Exception):  # whoever uses the driver makes it again and raises
            _ = driver.active

    thread = threading.Thread(target=make, name="longspan-driver")
    thread.start()
    return thread


def _take_or_compile(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
    """The kernel that the package has, or else a compiled one."""
    from longspan._kernels.gpu.prebuilt import prebuilt_kernel

    return prebuilt_kernel(src, target, options or {}) or _compile_once(src, target, options, **more)


def _compile_once(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
    """`triton.compile`, in one process of the machine at a time for the same kernel."""
    trace = src.make_ir

    def trace_alone(*args: Any, **kwargs: Any) -> Any:
        with _tracing, _without_garbage_collection(), _partitions_share_functions():
            module = trace(*args, **kwargs)
        _start_waiting(after_s=_HEAD_START_S)
        return module

    src.make_ir = trace_alone
    with right_assembler(target):
        return _compile_locked(src, target, assembler.options_for(src, target, options), more)


@contextmanager
def right_assembler(target: Any) -> Iterator[None]:
    """Kernels that this thread compiles for the target in this context are longspan's: assembled without known faults."""
    assembler.use_right_assembler(_compiles_here)
    wgmma_descriptors.use_rewritten(_compiles_here)
    token = _assembler.set(f"{assembler.version(target)}{wgmma_descriptors.KEY if wgmma_descriptors.rewrites() else ''}")
    try:
        yield
    finally:
        _assembler.reset(token)


def _compiles_here() -> bool:
    return _assembler.get() is not None


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect no garbage in this context, which one thread enters at a time. Processes forked meanwhile collect garbage."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _collection_paused.set()
    try:
        yield
    finally:
        _collection_paused.clear()
        gc.enable()


@contextmanager
def _partitions_share_functions() -> Iterator[None]:
    """In Gluon kernels, let the default partition call the same functions as other partitions of as many warps.

    Gluon names functions by the number of warps of the calling partition, but not in the default partition: it would trace, and optimize,
    each function of two equal warp groups twice. One thread enters this context at a time.
    """
    try:
        from triton.experimental.gluon.language import _semantic

        semantic, context = _semantic.GluonSemantic, _semantic.GluonCallerContext
        specialize = semantic.warp_specialize
    except (ImportError, AttributeError):  # another Triton
        yield
        return

    def warp_specialize(self: Any, functions_and_args: Any, warps: Any, registers: Any, generator: Any) -> Any:
        if generator.caller_context is not None:
            return specialize(self, functions_and_args, warps, registers, generator)
        generator.caller_context = context(num_warps=self.builder.options.num_warps)
        try:
            return specialize(self, functions_and_args, warps, registers, generator)
        finally:
            generator.caller_context = None

    semantic.warp_specialize = warp_specialize
    try:
        yield
    finally:
        semantic.warp_specialize = specialize


def _resume_collection() -> None:
    """In a forked process: the thread that traces, and would resume collection, exists in the parent only."""
    if _collection_paused.is_set():
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resume_collection)


def _compile_locked(src: Any, target: Any, options: Any, more: dict[str, Any]) -> Any:
    """`triton.compile` under the file lock of this kernel."""
    text = f"{src.hash()} {target} {sorted((options or {}).items())} {knobs.cache.dir}"
    with file_lock(lock_folder() / hashlib.sha256(text.encode()).hexdigest()):
        return triton.compile(src, target=target, options=options, **more)


def compile_in_threads(jobs: Sequence[Job], *, after_s: float = 0.0) -> list[Future[Any]]:
    """Run every job in a thread of its own, `after_s` seconds from now. Python waits for the threads at exit: one inside LLVM must not be
    ended.
    """
    started = []
    for job in jobs:
        future: Future[Any] = Future()
        thread = threading.Timer(after_s, _run, (job, future))
        thread.name = "longspan-compile"
        thread.start()
        started.append(future)
    return started


def _run(job: Job, future: Future[Any]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # for whoever asks the future; the call that needs the kernel compiles it again and raises
        future.set_exception(error)


@contextmanager
def collecting_jobs() -> Iterator[list[Job]]:
    """Launch nothing in this context; the list gets a job for each kernel that has to be compiled. A job holds no memory of the device."""
    jobs: list[Job] = []
    token = _collected.set(jobs)
    try:
        yield jobs
    finally:
        _collected.reset(token)


def collected_jobs() -> list[Job] | None:
    """The list of the innermost `collecting_jobs`; None outside."""
    return _collected.get()


@contextmanager
def compiling_meanwhile(jobs: Sequence[Job]) -> Iterator[None]:
    """Start compile jobs in threads as soon as the first kernel that this context compiles is traced, at the latest at the end.

    In `collecting_jobs`, add them to its list.
    """
    collected = collected_jobs()
    if collected is not None:
        collected.extend(jobs)
        yield
        return
    token = _waiting.set(list(jobs))
    try:
        yield
    finally:
        _start_waiting()
        _waiting.reset(token)


def _start_waiting(*, after_s: float = 0.0) -> None:
    jobs = _waiting.get()
    if jobs:
        compile_in_threads(jobs, after_s=after_s)
        jobs.clear()


def lock_folder() -> Path:
    """The folder of this machine's lock files. Not in Triton's cache, which may be on a network drive without locks."""
    return Path(tempfile.gettempdir()) / f"longspan-{os.getuid() if hasattr(os, 'getuid') else 0}"


@contextmanager
def file_lock(path: Path, *, max_wait_s: float = _MAX_WAIT_S) -> Iterator[None]:
    """Hold an exclusive lock on a file, among processes and threads. Without it if locks are not supported or after `max_wait_s`."""
    try:
        import fcntl

        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except (ImportError, OSError):
        yield
        return
    try:
        until = time.monotonic() + max_wait_s
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:  # not supported by the file system
                break
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a forked process may have the descriptor too
        os.close(descriptor)


@cache
def _shorten_triton_key() -> None:
    """Replace Triton's cache key of kernels that `compile_kernel` compiles by one of names, sizes and times of Triton's files.

    Triton hashes the contents of these files, which takes 1.7 s. Kernels of other code keep Triton's key.
    """
    compute = getattr(triton_cache, "triton_key", None)
    if compute is None:
        return
    try:
        short = f"longspan-{_triton_files_digest()}"
    except OSError:
        return
    triton_cache.triton_key = lambda: f"{short}-{_assembler.get()}" if _compiles_here() else compute()


def _triton_files_digest() -> str:
    """A hash of the names, sizes and times of modification of Triton's files."""
    root = Path(triton.__file__).parent
    folders = ("_C", "compiler", "backends", "experimental", "language", "runtime")
    files = [path for folder in folders for path in (root / folder).rglob("*")]
    stamps = sorted((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.suffix in (".py", ".so"))
    return hashlib.sha256(repr((triton.__version__, sys.version, stamps)).encode()).hexdigest()[:32]
