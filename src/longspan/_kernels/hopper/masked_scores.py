"""Scores masked by bits: one predicate per score, eight of them per instruction.

A thread of a tensor-core tile holds two of every eight columns of two rows: of 32 columns, four pairs (c, c + 1) of row r and four of row
r + 8, in the order r, r, r + 8, r + 8. `gpu.row_bounds` computes a word of 32 bits for the thread's columns of each row. The assembler
moves eight consecutive bits of one word into predicates at once (R2P) if consecutive PTX instructions test them, row by row. In the order
of the elements, which alternates between rows, it would test each bit alone: 757 instructions for a masked block of packed documents
instead of 631.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_ELEMENTS = gl.constexpr(16)  # scores of a thread in 32 columns of two rows


@gluon.constexpr_function
def _instructions():
    """PTX for 16 scores: operands 0 to 15 are the masked scores, 16 to 31 the scores, 32 to 47 the words of their rows."""
    count = _ELEMENTS.value
    lines = [f".reg .pred visible<{count}>; .reg .b32 bit<{count}>;"]
    for element in sorted(range(count), key=lambda i: (i & 2, i)):  # row after row
        bit, word = (element >> 2) * 2 + (element & 1), 2 * count + (element & 2)
        lines.append(f"and.b32 bit{element}, ${word}, {1 << bit}; setp.ne.b32 visible{element}, bit{element}, 0;")
        lines.append(f"selp.f32 ${element}, ${count + element}, 0fFF800000, visible{element};")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _operands():
    count = _ELEMENTS.value
    return ",".join(["=&f"] * count + ["f"] * count + ["r"] * count)


@gluon.jit
def masked_scores(s, bits, columns):
    """s [rows, N] in a wgmma layout, −inf where the bit of the column is 0. bits: words of `bits_below`. columns: [1, N]."""
    s, bits = gl.broadcast(s, bits >> ((columns >> 5) * 8))
    return gl.inline_asm_elementwise(_instructions(), _operands(), [s, bits], dtype=gl.float32, is_pure=True, pack=_ELEMENTS)
