"""PTX of Triton 3.9 and later, rewritten before it is assembled: each wgmma descriptor is one 64-bit sum right before its wgmma.

Triton 3.9 computes the lower half of every descriptor by a sum of its own, far ahead of the wgmma. The assembler keeps all of them in
registers and moves two to a pair before each wgmma. Until 3.8, Triton writes what is written here. `docs/deep-dives/hopper.md` has times.

Descriptors that are not as expected here stay as they are, and so does PTX that the assembler refuses after the change.

Private parts of Triton used here: `CUDABackend.make_cubin`, whose first argument is PTX as LLVM prints it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import triton
from triton.backends.nvidia.compiler import CUDABackend

KEY = "descriptors1"  # of caches: to be changed with what this module writes
_FIRST_VERSION = (3, 9)

_REGISTER = re.compile(r"%[a-z]+\d+")
_FIELD = re.compile(r"\tbfe\.u32 \t(%r\d+), %r\d+, \d+, (\d+);")  # so many bits of a number
_SUM = re.compile(r"\t(add\.s32|or\.b32) \t(%r\d+), (%r\d+), (\d+);")
_WIDER = re.compile(r"\tcvt\.u64\.u32 \t(%rd\d+), (%r\d+);")
_DESCRIPTOR = re.compile(r"\tor\.b64 \t(%rd\d+), (%rd\d+), (\d+);")
_ENDS_BLOCK = re.compile(r"\t(@!?%p\d+ )?(bra|brx|ret|exit|trap)\b")
_DECLARATION = re.compile(r"(\t\.reg \.b64 \t%rd<\d+>;)")


def rewrites() -> bool:
    """Whether PTX of this Triton is rewritten."""
    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2]) >= _FIRST_VERSION


@cache
def use_rewritten(compiles_here: Callable[[], bool]) -> None:
    """Let Triton assemble rewritten PTX for kernels that are compiled while `compiles_here()` is true."""
    make = getattr(CUDABackend, "make_cubin", None)
    if make is None or not rewrites():
        return

    def make_cubin(self: Any, src: str, *args: Any, **kwargs: Any) -> Any:
        changed = rewritten(src) if compiles_here() else src
        if changed != src:
            try:
                return make(self, changed, *args, **kwargs)
            except Exception:
                pass
        return make(self, src, *args, **kwargs)

    CUDABackend.make_cubin = make_cubin


def rewritten(ptx: str) -> str:
    """PTX that computes the same, with descriptors as 64-bit sums right before the first wgmma that reads them.

    Only descriptors that are computed as ((field + offset) | upper half), whose sum cannot overflow its 32 bits, and that are read by
    wgmmas of their own basic block alone.
    """
    lines = ptx.split("\n")
    blocks, block = [], 0
    for line in lines:
        block += line.startswith("$L")
        blocks.append(block)
        block += _ENDS_BLOCK.match(line) is not None
    where: dict[str, list[int]] = {}  # lines that have a register
    for i, line in enumerate(lines):
        for register in set(_REGISTER.findall(line)):
            where.setdefault(register, []).append(i)
    fields = {m[1]: int(m[2]) for m in map(_FIELD.fullmatch, lines) if m}
    sums = {m[2]: (m[1], m[3], int(m[4])) for m in map(_SUM.fullmatch, lines) if m}
    wider = {m[1]: (m[2], i) for i, m in enumerate(map(_WIDER.fullmatch, lines)) if m}
    removed: set[int] = set()
    inserted: dict[int, list[tuple[str, str, int]]] = {}  # before a line: (descriptor, its field, what is added)
    for at, m in enumerate(map(_DESCRIPTOR.fullmatch, lines)):
        if m is None or m[2] not in wider:
            continue
        descriptor, wide, upper = m[1], m[2], int(m[3])
        low, wide_at = wider[wide]
        operation, field, offset = ("add.s32", low, 0) if low in fields else sums.get(low, ("", "", 0))
        if field not in fields:
            continue
        end = 1 << fields[field]
        fits = upper % 2**32 == 0 and offset + end <= 2**32 and (operation == "add.s32" or offset % end == 0)
        readers = [i for i in where[descriptor] if i != at]
        by_wgmma = bool(readers) and all("wgmma.mma_async" in lines[i] for i in readers)
        if not fits or not by_wgmma or where[wide] != [wide_at, at] or {blocks[i] for i in readers} != {blocks[at]}:
            continue
        first = min(readers)
        while "begin inline asm" not in lines[first]:
            first -= 1
        if first < at:
            continue
        removed |= {at, wide_at}
        inserted.setdefault(first, []).append((descriptor, field, upper + offset))
    names: dict[tuple[int, str], str] = {}  # 64-bit registers of fields, by basic block
    result = []
    for i, line in enumerate(lines):
        for descriptor, field, added in inserted.get(i, []):
            name = names.get((blocks[i], field))
            if name is None:
                name = names[blocks[i], field] = f"%longspan{len(names)}"
                result.append(f"\tcvt.u64.u32 \t{name}, {field};")
            result.append(f"\tadd.s64 \t{descriptor}, {name}, {added};")
        if i not in removed:
            result.append(line)
    changed, functions = _DECLARATION.subn(rf"\1\n\t.reg .b64 \t%longspan<{len(names)}>;", "\n".join(result))
    return changed if names and functions == 1 else ptx
