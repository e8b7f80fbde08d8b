"""The PTX pass for wgmma descriptors: rewritten descriptors have the same values, and cases it cannot prove stay unchanged."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime.errors import PTXASError

from longspan._kernels.gpu import compilation, wgmma_descriptors
from longspan._kernels.gpu.wgmma_descriptors import rewritten

UPPER = 0x40000040 << 32
ADDRESS = 0x1_2340  # of a tile in shared memory


def wgmma(*descriptors: str) -> str:
    instruction = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r90}}, {', '.join(descriptors)}, 1, 1, 1, 0, 0;"
    return f"\t// begin inline asm\n\t{instruction}\n\t// end inline asm"


def kernel(*lines: str, bits: int = 14) -> str:
    """A kernel with a field %r2 of so many bits of an address."""
    start = ("\t.reg .b32 \t%r<99>;", "\t.reg .b64 \t%rd<99>;", f"\tmov.b32 \t%r1, {ADDRESS};", field(bits=bits))
    return "\n".join((*start, *lines, "\tret;"))


def field(number: int = 2, *, of: int = 1, bits: int = 14) -> str:
    return f"\tbfe.u32 \t%r{number}, %r{of}, 4, {bits};"


def described(
    descriptor: int, *, offset: int | None, low: int, operation: str = "add.s32", upper: int = UPPER, field: int = 2
) -> list[str]:
    """Triton 3.9's lines for a descriptor %rd{descriptor} of a field; temporary registers of number `low`."""
    total = [] if offset is None else [f"\t{operation} \t%r{low}, %r{field}, {offset};"]
    source = f"%r{field if offset is None else low}"
    return [*total, f"\tcvt.u64.u32 \t%rd{low}, {source};", f"\tor.b64 \t%rd{descriptor}, %rd{low}, {upper};"]


def read_descriptors(ptx: str) -> list[list[int]]:
    """The values of the descriptors that each wgmma reads: the PTX, computed line by line."""
    values: dict[str, int] = {}
    read = []

    def value(operand: str) -> int:
        return values[operand] if operand.startswith("%") else int(operand)

    for line in ptx.split("\n"):
        if "wgmma.mma_async" in line:
            read.append([values[register] for register in re.findall(r"%rd\d+", line)])
        elif match := re.fullmatch(r"\t([a-z]+)\.[a-z]?(32|64)(?:\.u32)? \t(%\w+), (.*);", line):
            name, bits, to, operands = match[1], int(match[2]), match[3], [value(o) for o in match[4].split(", ")]
            result = {
                "mov": lambda o: o[0], "cvt": lambda o: o[0], "add": sum, "or": lambda o: o[0] | o[-1],
                "bfe": lambda o: o[0] >> o[1] & (1 << o[2]) - 1,
            }[name](operands)  # fmt: skip
            values[to] = result % 2**bits
    return read


@pytest.mark.parametrize("offset", [None, 0, 2, 1030, 67_109_760])
@pytest.mark.parametrize("bits", [14, 15])
def test_a_descriptor_is_one_sum_before_its_wgmma(offset: int | None, bits: int) -> None:
    ptx = kernel(*described(20, offset=offset, low=10), *described(21, offset=6, low=11), wgmma("%rd20", "%rd21"), bits=bits)
    changed = rewritten(ptx)
    assert "or.b64" not in changed and changed.count("cvt.u64.u32") == 1 and ".reg .b64 \t%longspan<1>;" in changed
    before = changed.split("\t// begin inline asm")[0].split("\n")
    assert [line.split()[0] for line in before[-4:-1]] == ["cvt.u64.u32", "add.s64", "add.s64"]
    assert read_descriptors(changed) == read_descriptors(ptx) == [[UPPER + (ADDRESS >> 4) % 2**bits + n for n in (offset or 0, 6)]]


def test_lines_between_a_wgmma_and_its_start_stay() -> None:
    asm = wgmma("%rd20").replace("\twgmma", "\t.loc\t7 102 14\n\twgmma")
    changed = rewritten(kernel(*described(20, offset=2, low=10), asm))
    assert "add.s64 \t%rd20, %longspan0" in changed and changed.index("add.s64") < changed.index("// begin inline asm")


DESCRIBED = described(20, offset=2, low=10)


def test_two_wgmmas_of_a_block_share_a_descriptor() -> None:
    ptx = kernel(*described(20, offset=2, low=10), wgmma("%rd20"), wgmma("%rd20"))
    changed = rewritten(ptx)
    assert changed.count("add.s64") == 1 and read_descriptors(changed) == read_descriptors(ptx)


def test_descriptors_of_a_field_in_two_blocks_are_sums_of_their_own() -> None:
    first = (*described(20, offset=2, low=10), wgmma("%rd20"))
    ptx = kernel(*first, "\t@%p1 bra \t$L__BB0_2;", *described(21, offset=4, low=11), wgmma("%rd21"))
    changed = rewritten(ptx)
    assert changed.count("cvt.u64.u32") == 2 and "%longspan<2>" in changed and read_descriptors(changed) == read_descriptors(ptx)


def test_a_field_of_a_loop_may_be_written_before_its_descriptors() -> None:
    lines = ("$L__BB0_1:", field(3), *described(20, offset=2, low=10, field=3), wgmma("%rd20"), "\t@%p1 bra \t$L__BB0_1;")
    assert "add.s64" in rewritten(kernel(*lines)) and read_descriptors(rewritten(kernel(*lines))) == read_descriptors(kernel(*lines))


def test_labels_of_line_information_do_not_end_a_block() -> None:
    ptx = kernel(DESCRIBED[0], "$L__tmp17:", *DESCRIBED[1:], "$L__tmp18:", wgmma("%rd20"))
    assert "add.s64" in rewritten(ptx) and read_descriptors(rewritten(ptx)) == read_descriptors(ptx)


def test_an_or_is_a_sum_where_bits_do_not_overlap() -> None:
    ptx = kernel(*described(20, offset=1 << 14, low=10, operation="or.b32"), wgmma("%rd20"))
    assert "add.s64" in rewritten(ptx) and read_descriptors(rewritten(ptx)) == read_descriptors(ptx)


OTHERS = {
    "bits overlap": kernel(*described(20, offset=2, low=10, operation="or.b32"), wgmma("%rd20")),
    "some bits overlap": kernel(*described(20, offset=3 << 13, low=10, operation="or.b32"), wgmma("%rd20")),
    "the sum may overflow": kernel(*described(20, offset=2**32 - 2, low=10), wgmma("%rd20")),
    "no sum": kernel(*described(20, offset=2, low=10, operation="xor.b32"), wgmma("%rd20")),
    "the upper half has lower bits": kernel(*described(20, offset=2, low=10, upper=UPPER + 1), wgmma("%rd20")),
    "another block reads it": kernel(*DESCRIBED, "$L__BB0_1:", wgmma("%rd20")),
    "also another block reads it": kernel(*DESCRIBED, wgmma("%rd20"), "\t@%p1 bra \t$L__BB0_1;", wgmma("%rd20")),
    "a block after another branch reads it": kernel(*DESCRIBED, "\t@!%p1 bra \t$L__BB0_1;", wgmma("%rd20")),
    "a block after a return reads it": kernel(*DESCRIBED, "\tret;", wgmma("%rd20")),
    "its sum is in another block": kernel(DESCRIBED[0], "$L__BB0_1:", *DESCRIBED[1:], wgmma("%rd20")),
    "also another instruction reads it": kernel(*DESCRIBED, wgmma("%rd20"), "\tst.global.b64 \t[%rd1], %rd20;"),
    "also another instruction reads its half": kernel(*DESCRIBED, wgmma("%rd20"), "\tst.global.b64 \t[%rd1], %rd10;"),
    "its field is written again": kernel(*DESCRIBED, field(2, of=5), wgmma("%rd20")),
    "its field is written by a sum too": kernel(*DESCRIBED, "\tadd.s32 \t%r2, %r2, 1024;", wgmma("%rd20")),
    "its field is written by inline assembly": kernel(*DESCRIBED, "\t{ .reg .pred p; mov.b32 %r2, 7; }", wgmma("%rd20")),
    "its field is written by a load of two": kernel(*DESCRIBED, "\tld.shared.v2.b32 \t{%r3, %r2}, [%r1];", wgmma("%rd20")),
    "its field is written after its sum": kernel(
        "$L__BB0_1:", *described(20, offset=2, low=10, field=3), field(3), wgmma("%rd20"), "\t@%p1 bra \t$L__BB0_1;"
    ),
    "its sum is written again": kernel(*DESCRIBED, wgmma("%rd20"), "\tadd.s32 \t%r10, %r2, 1030;"),
    "two sums meet": kernel("\tadd.s32 \t%r10, %r2, 2;", "$L__BB0_1:", "\tadd.s32 \t%r10, %r2, 1026;", *DESCRIBED[1:], wgmma("%rd20")),
    "no field of a number": kernel(
        "\tadd.s32 \t%r10, %r1, 2;", "\tcvt.u64.u32 \t%rd10, %r10;", f"\tor.b64 \t%rd20, %rd10, {UPPER};", wgmma("%rd20")
    ),
    "it is computed after its wgmma": kernel(wgmma("%rd20"), *DESCRIBED),
    "a wgmma without marks of inline assembly": kernel(*DESCRIBED, wgmma("%rd20").split("\n")[1]),
    "no wgmma": kernel(*DESCRIBED),
    "two declarations": kernel(*DESCRIBED, wgmma("%rd20"), "\t.reg .b64 \t%rd<9>;"),
    "two functions": ".visible .entry a(\n" + kernel(*DESCRIBED, wgmma("%rd20")) + "\n.func b(\n\tadd.s32 \t%r11, %r2, 4;",
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_descriptors_stay(case: str) -> None:
    assert rewritten(OTHERS[case]) == OTHERS[case]


@pytest.mark.parametrize(("version", "rewrites"), [((3, 6), False), ((3, 8), False), ((3, 9), True), ((3, 10), True), ((4, 0), True)])
def test_only_ptx_of_triton_3_9_and_later(version: tuple[int, int], rewrites: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_descriptors, "triton_version", lambda: version)
    assert wgmma_descriptors.rewrites() == rewrites


def assembled(monkeypatch: pytest.MonkeyPatch, *, here: bool, refuses: str = "nothing") -> list[str]:
    """What Triton's assembler is given, one after the other, for a kernel with a descriptor. It fails for PTX that contains `refuses`."""
    given = []

    class Backend:
        def make_cubin(self, src: str, metadata: Any, opt: Any, capability: int) -> bytes:
            given.append(src)
            if refuses in src:
                raise PTXASError("ptxas fatal")
            return b"code"

    monkeypatch.setattr(wgmma_descriptors.nvidia_compiler, "CUDABackend", Backend)
    monkeypatch.setattr(wgmma_descriptors, "rewrites", lambda: True)
    wgmma_descriptors.use_rewritten.__wrapped__(lambda: here)
    assert Backend().make_cubin(kernel(*described(20, offset=2, low=10), wgmma("%rd20")), {}, None, 90) == b"code"
    return given


def test_only_kernels_of_this_package_are_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ["%longspan" in src for src in assembled(monkeypatch, here=True)] == [True]
    assert ["%longspan" in src for src in assembled(monkeypatch, here=False)] == [False]


def test_tritons_own_ptx_is_assembled_if_the_rewritten_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ["%longspan" in src for src in assembled(monkeypatch, here=True, refuses="%longspan")] == [True, False]


def test_caches_tell_rewritten_code_from_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for rewrites in (False, True):
        monkeypatch.setattr(wgmma_descriptors, "rewrites", lambda rewrites=rewrites: rewrites)
        with compilation.right_assembler(SimpleNamespace(backend="none", arch=90)):
            keys.append(compilation._assembler.get())
    assert keys == ["", wgmma_descriptors.KEY]
