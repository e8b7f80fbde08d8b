"""Check the kernels of the package against the common calls: a process of its own, without Triton's interpreter and without a GPU.

Fails if a call asks for a kernel that the package does not have, if a file belongs to no call, if a call compiles, or if a kernel calls a
function that its key does not cover.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import triton
from tests.kernels.common_calls import CALLS, TARGET, Call, Request, common_requests, prepare_anew
from tests.kernels.stub_launches import RecordedLaunch
from tests.kernels_of_calls import SHARED_MEMORY
from triton.runtime.jit import DependenciesFinder

from longspan._kernels.gpu import prepared_launch
from longspan._kernels.gpu.driver_launch import parameters
from longspan._kernels.gpu.prebuilt import FOLDER, prebuilt_kernel
from longspan._kernels.gpu.source_digest import source_texts


def check_files(wanted: dict[str, Request]) -> None:
    """The folder has a file for each kernel and no other."""
    files = {path.stem for path in FOLDER.glob("*.xz")}
    missing = sorted(f"{wanted[key].source.name} {key}" for key in wanted.keys() - files)
    if missing:
        raise SystemExit(f"{len(missing)} of {len(wanted)} kernels of common calls are missing: run `make kernels`. First: {missing[0]}")
    if files != wanted.keys():
        raise SystemExit(f"no common call asks for {sorted(files - wanted.keys())}: run `make kernels`")


def check_kernel(request: Request) -> None:
    """The kernel is taken, and its metadata describes the launch that its source asks for."""
    kernel = prebuilt_kernel(request.source, TARGET, request.options)
    assert kernel is not None, f"{request.source.name} {request.key}: not taken"
    again = prebuilt_kernel(request.source, TARGET, request.options)  # from Triton's cache
    assert again is not None and again.kernel == kernel.kernel
    meta = kernel.metadata
    assert kernel.name == request.source.name and 0 <= meta.shared <= SHARED_MEMORY and meta.target == TARGET
    assert not (meta.global_scratch_size or meta.profile_scratch_size or meta.launch_cooperative_grid) and meta.num_ctas == 1
    descriptors = [kind for kind in request.source.signature.values() if str(kind).startswith("tensordesc")]
    assert len(meta.tensordesc_meta or ()) == len(descriptors)


def check_sources(function: Any) -> None:
    """Triton hashes no function of this package that the key does not cover."""
    called: set[str] = set()
    update = DependenciesFinder._update_hash

    def note(self: Any, callee: Any) -> None:
        name = f"{callee.fn.__module__}.{callee.fn.__qualname__}"
        if name.startswith("longspan.") and name.removeprefix("longspan") not in called:
            called.add(name.removeprefix("longspan"))
            callee.hash = None  # a hash of before would hide the functions that it calls
        update(self, callee)

    DependenciesFinder._update_hash = note
    try:
        function.hash = None
        _ = function.cache_key
    finally:
        DependenciesFinder._update_hash = update
    uncovered = called - source_texts(function).keys()
    assert called or function.fn.__name__ == "round_kernel", function.fn.__name__
    assert not uncovered, f"{function.fn.__name__} calls {sorted(uncovered)}, which its key does not cover"


def check_call(call: Call) -> None:
    """A call compiles nothing, forward and backward, and its kernels have the parameters that a launch through the driver passes."""
    launched = []

    def prepare(kernel: Any, arguments: list[Any], varying: list[bool], **_: Any) -> RecordedLaunch:
        assert all(p.bytes for p in parameters(kernel, arguments, varying))
        launched.append(kernel.name)
        return RecordedLaunch(kernel.name)

    def refuse(source: Any, **_: Any) -> None:
        raise SystemExit(f"{call}: {source.name} is compiled")

    with pytest.MonkeyPatch.context() as patch:
        prepare_anew(patch)
        patch.setattr(prepared_launch, "driver_launch", prepare)
        patch.setattr(triton, "compile", refuse)
        call.make()
    assert any(name.startswith("forward") for name in launched) and "dkv_kernel" in launched, launched


def main() -> None:
    wanted = common_requests()
    check_files(wanted)
    for function in {id(r.source.fn): r.source.fn for r in wanted.values()}.values():
        check_sources(function)
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        for request in wanted.values():
            check_kernel(request)
        prepared_launch.shared_memory_limit.cache_clear()
        for call in CALLS[:: len(CALLS) // 8]:
            check_call(call)
    print(f"{len(wanted)} kernels")


if __name__ == "__main__":
    main()
