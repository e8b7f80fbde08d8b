"""Records of kernels that a script has compiled and checked: it compiles only kernels that its record does not have.

The file of a script, in `compiled/`, has the kernels by key: everything that a compilation depends on but the compiler
(`longspan._kernels.gpu.prebuilt.kernel_key`). It holds for one Triton, one assembler, and one text of the code that compiles and checks;
otherwise every kernel is compiled. `make kernels` writes the files; `make test-all` compiles every kernel.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from longspan._kernels.gpu import assembler, compilation
from longspan._kernels.gpu.prebuilt import _OPTIONS, kernel_key
from longspan._kernels.gpu.source_digest import NoDigest

HERE = Path(__file__).parent
TARGET = GPUTarget("cuda", 90, 32)
# Code that compiles and checks, beside the script itself.
CHECKS = (compilation.__file__, __file__, HERE / "hopper_compile.py", HERE / "calls.py", HERE.parent / "kernels_of_calls.py")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A kernel that passed its checks: its shared memory and the sizes of its parameters, all in bytes, and its TMA descriptors."""

    name: str
    shared: int
    parameters: list[int]
    tensordesc_meta: list[Any] | None


class Record:
    """The kernels of one script. `--anew` ignores its file, `--record` writes it."""

    def __init__(self, script: str) -> None:
        self.path = HERE / "compiled" / f"{Path(script).stem}.json"
        text = b"\0".join(Path(path).read_bytes() for path in (*CHECKS, script))
        self.holds_for = f"Triton {triton.__version__}, {assembler.version(TARGET)}, {hashlib.sha256(text).hexdigest()[:16]}"
        self.used: dict[str, Entry] = {}

    @cached_property
    def known(self) -> dict[str, Entry]:
        if "--anew" in sys.argv or not self.path.exists():
            return {}
        content = json.loads(self.path.read_text())
        return {key: Entry(**entry) for key, entry in content["kernels"].items()} if content["holds for"] == self.holds_for else {}

    def take_or_compile(self, compile: Callable[..., Any], source: Any, target: Any, options: dict[str, Any], **more: Any) -> Any:
        """The compiled kernel, or what the record has of it: `is_recorded` tells them apart."""
        try:
            key = kernel_key(source, target, {**dict.fromkeys(_OPTIONS), **options})
        except NoDigest:
            return compile(source, target=target, options=options, **more)
        entry = self.known.get(key)
        if entry is None:
            kernel = compile(source, target=target, options=options, **more)
            meta = kernel.metadata
            self.used[key] = Entry(
                name=source.name, shared=meta.shared, parameters=parameter_bytes(kernel), tensordesc_meta=meta.tensordesc_meta
            )  # fmt: skip
            return kernel
        self.used[key] = entry
        metadata = SimpleNamespace(shared=entry.shared, tensordesc_meta=entry.tensordesc_meta)
        return SimpleNamespace(name=entry.name, hash=key, src=source, metadata=metadata, parameters=entry.parameters)

    def save(self) -> None:
        """With `--record`, write the kernels that were used. Call it after all checks."""
        if "--record" in sys.argv:
            kernels = ",\n".join(f"{json.dumps(key)}: {json.dumps(asdict(entry))}" for key, entry in sorted(self.used.items()))
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(f'{{"holds for": {json.dumps(self.holds_for)}, "kernels": {{\n{kernels}\n}}}}\n')
        print(f"{len(self.used)} kernels, {len(self.used.keys() - self.known.keys())} of them compiled")


def is_recorded(kernel: Any) -> bool:
    return isinstance(kernel, SimpleNamespace)


def parameter_bytes(kernel: Any) -> list[int]:
    """Sizes of a kernel's parameters in PTX."""
    if is_recorded(kernel):
        return list(kernel.parameters)
    entry = re.search(r"\.entry [^(]*\((.*?)\)", kernel.asm["ptx"], re.DOTALL)
    assert entry is not None
    declared = re.findall(r"\.param (?:\.align \d+ )?\.([a-z]+)(\d+)[^,\[]*(?:\[(\d+)\])?", entry[1])
    return [int(bits) // 8 * int(count or 1) for _, bits, count in declared]
