"""A PTX pass for Triton 3.9 and later: computes each wgmma descriptor by one 64-bit addition right before its wgmma.

Triton 3.9 computes the lower 32 bits of each descriptor by a separate 32-bit addition, far ahead of the wgmma. ptxas keeps all of them in
uniform registers and needs two moves before each wgmma. Triton 3.6 to 3.8 emit the 64-bit addition. `docs/deep-dives/hopper.md` has times.

The pass leaves a descriptor unchanged if it is computed outside the basic block of its wgmmas. If ptxas rejects the rewritten PTX, Triton's
own PTX is assembled. Triton's cache stores its own PTX beside the code that was assembled from the rewritten one.

Private parts of Triton used here: `CUDABackend.make_cubin`, whose first argument is PTX as LLVM prints it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from triton.backends.nvidia import compiler as nvidia_compiler
from triton.runtime.errors import PTXASError

from longspan._kernels.gpu.compile_options import triton_version

KEY = "descriptors3"  # of caches: to be changed with what this module writes
_FIRST_VERSION = (3, 9)

_REGISTER = re.compile(r"%[a-z]+\d+")
_FIELD = re.compile(r"\tbfe\.u32 \t(%r\d+), %r\d+, \d+, (\d+);")  # so many bits of a number
_SUM = re.compile(r"\t(add\.s32|or\.b32) \t(%r\d+), (%r\d+), (\d+);")
_DESTINATION = re.compile(r"\t(?:@!?%p\d+ )?[a-z][\w.:]* +\t?(\{[^}]*\}|[^,;]*)")  # of an instruction
_WIDER = re.compile(r"\tcvt\.u64\.u32 \t(%rd\d+), (%r\d+);")
_DESCRIPTOR = re.compile(r"\tor\.b64 \t(%rd\d+), (%rd\d+), (\d+);")
_STARTS_BLOCK = re.compile(r"\$L(?!__tmp\d+:)")  # a label, but not one of line information, to which nothing jumps
_ENDS_BLOCK = re.compile(r"\t(@!?%p\d+ )?(bra|brx|ret|exit|trap)\b")
_DECLARATION = re.compile(r"(\t\.reg \.b64 \t%rd<\d+>;)")


def rewrites() -> bool:
    """Whether PTX of this Triton is rewritten."""
    return triton_version() >= _FIRST_VERSION


@cache
def use_rewritten(compiles_here: Callable[[], bool]) -> None:
    """Let Triton assemble rewritten PTX for kernels that are compiled while `compiles_here()` is true."""
    backend = getattr(nvidia_compiler, "CUDABackend", None)
    make = getattr(backend, "make_cubin", None)
    if make is None or not rewrites():
        return

    def make_cubin(self: Any, src: str, *args: Any, **kwargs: Any) -> Any:
        if compiles_here():
            with suppress(PTXASError):
                return make(self, rewritten(src), *args, **kwargs)
        return make(self, src, *args, **kwargs)

    backend.make_cubin = make_cubin  # type: ignore[union-attr]


def rewritten(ptx: str) -> str:
    """The kernel's PTX with descriptors computed by 64-bit additions right before the first wgmma that reads them.

    Rewrites descriptors of the form (field + offset) | upper half, if the 32-bit addition cannot overflow, all wgmmas that read them are in
    the same basic block, and each register involved has one definition.
    """
    if len(re.findall(r"^(?:\.visible |\.weak )*\.(?:entry|func) ", ptx, re.MULTILINE)) > 1:
        return ptx
    lines = ptx.split("\n")
    blocks, block = [], 0
    for line in lines:
        block += _STARTS_BLOCK.match(line) is not None
        blocks.append(block)
        block += _ENDS_BLOCK.match(line) is not None
    where: dict[str, list[int]] = {}  # lines that have a register
    for i, line in enumerate(lines):
        for register in set(_REGISTER.findall(line)):
            where.setdefault(register, []).append(i)
    fields = {m[1]: (int(m[2]), i) for i, m in enumerate(map(_FIELD.fullmatch, lines)) if m}
    fields = {register: field for register, field in fields.items() if _written_once(register, [lines[i] for i in where[register]])}
    sums = {m[2]: (m[1], m[3], int(m[4]), i) for i, m in enumerate(map(_SUM.fullmatch, lines)) if m}
    wider = {m[1]: (m[2], i) for i, m in enumerate(map(_WIDER.fullmatch, lines)) if m}
    removed: set[int] = set()
    inserted: dict[int, list[tuple[str, str, int]]] = {}  # by line before which to insert: (descriptor register, field register, addend)
    for at, m in enumerate(map(_DESCRIPTOR.fullmatch, lines)):
        if m is None or m[2] not in wider:
            continue
        descriptor, wide, upper = m[1], m[2], int(m[3])
        low, wide_at = wider[wide]
        if low in fields:
            operation, field, offset, sum_at = "add.s32", low, 0, wide_at
        else:
            operation, field, offset, sum_at = sums.get(low, ("", "", 0, 0))
        if field not in fields or where[wide] != [wide_at, at] or (field != low and where[low] != [sum_at, wide_at]):
            continue
        bits, field_at = fields[field]
        end = 1 << bits
        fits = upper % 2**32 == 0 and offset + end <= 2**32 and (operation == "add.s32" or offset % end == 0)
        readers = [i for i in where[descriptor] if i != at]
        by_wgmma = bool(readers) and all("wgmma.mma_async" in lines[i] for i in readers)
        one_block = len({blocks[i] for i in (sum_at, wide_at, at, *readers)}) == 1
        if not fits or not by_wgmma or not one_block or (blocks[field_at] == blocks[at] and field_at > sum_at):
            continue
        first = min(readers)
        while first > at and "begin inline asm" not in lines[first]:
            first -= 1
        if first > at:
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


def _written_once(register: str, lines: list[str]) -> bool:
    """Whether exactly one of the lines that mention a register defines it. Inline assembly counts as a possible further definition."""
    matches = [_DESTINATION.match(line) for line in lines]
    return all(matches) and sum(register in _REGISTER.findall(match[1]) for match in matches if match) == 1
