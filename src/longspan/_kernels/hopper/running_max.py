"""The running max of the online softmax, which follows the scores only if they grow by much.

Any running max gives the same quotients, as long as nothing overflows. A row keeps its running max as long as its exponentials stay small
enough; then nothing that was accumulated before has to be rescaled. There are two ways to see that they do:

- `checked`: the exponentials of a KV block are computed with the running max of the blocks before. They need not wait for the max of their
  own block, which most blocks never compute: their sums, which are needed anyway, tell whether a score is far above the running max. A warp
  with such a row computes the row's max, exponentials and sums once more.
- `followed`: the max of the block is computed before its exponentials. For items of few blocks in whose first block rows may see nothing:
  `checked` would compute their exponentials twice.

What a row computes does not depend on the other rows.

A thread of a tensor-core tile holds two of every eight columns of two rows. `by_lane` views a tile as [rows, columns / 8, 8], whose
reductions over dim 1 need no other thread: running max and running sums are [rows, 8] until an item ends.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs
# ruff: noqa: RET505 (Triton compiles what follows a branch that returned)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longspan._kernels.hopper.gluon_names import sums_are_trees

NEVER_SEEN = gl.constexpr(-3.4028234663852886e38)  # running max of a row that has seen nothing: no finite score is below it
_MAX_SUM = "0f44800000"  # 1,024: with a larger sum of a block's exponentials in one thread, `checked` raises the running max
_MAX_GROWTH = "0f41000000"  # 8: if a block's max is higher by more, in base-2 logarithms, `followed` raises the running max
_ONE = "0f3F800000"


@gluon.jit
def by_lane(x):
    """x [rows, columns] in a wgmma layout as [rows, columns / 8, 8]; every thread keeps its elements in their order."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])


@gluon.jit
def per_lane(ROWS: gl.constexpr, N: gl.constexpr, value, layout: gl.constexpr):
    """[ROWS, 8] of one value, in the layout of reductions over dim 1 of `by_lane` of a tile [ROWS, N] in `layout`."""
    reduced = gl.max(by_lane(gl.full([ROWS, N], 0.0, gl.float32, layout=layout)), 1)
    return gl.full([ROWS, 8], value, gl.float32, layout=reduced.type.layout)


@gluon.constexpr_function
def _instructions(count, dtype):
    """PTX for `count` tensors [rows, 8]. A thread has four elements of each: columns c and c + 1 of rows r and r + 8.

    Operands, in and out: exponentials (two registers of two per tensor), running max (4), sums (4); out: factors (4); in: scores (4 per
    tensor), scale.
    """
    m, sums, factors = 2 * count, 2 * count + 4, 2 * count + 8
    scores = 2 * count + 12 + 2 * count + 8  # after the outputs and the inputs that are tied to them
    scale = scores + 4 * count
    lines = [".reg .pred grows<2>; .reg .f32 top<2>, other<2>, part<4>, e<2>;"]
    lines.append(f"max.f32 top0, ${sums}, ${sums + 1}; max.f32 top1, ${sums + 2}, ${sums + 3}; max.f32 other0, top0, top1;")
    lines.append(f"setp.gt.f32 grows0, other0, {_MAX_SUM}; vote.sync.any.pred grows0, grows0, -1;")
    lines += [f"mov.f32 ${factors + i}, {_ONE};" for i in range(4)]
    lines.append("@!grows0 bra.uni kept;")

    of_quad = [  # the max over the four threads of a row
        f"shfl.sync.bfly.b32 other{row}, top{row}, {distance}, 31, -1; max.f32 top{row}, top{row}, other{row};"
        for distance in (1, 2)
        for row in (0, 1)
    ]
    lines += of_quad
    lines += [f"setp.gt.f32 grows{row}, top{row}, {_MAX_SUM};" for row in (0, 1)]
    for row in (0, 1):
        lines.append(f"max.f32 top{row}, ${scores + 2 * row}, ${scores + 2 * row + 1};")
        lines += [f"max.f32 top{row}, top{row}, ${scores + 4 * k + 2 * row + c};" for k in range(1, count) for c in (0, 1)]
    lines += of_quad
    for row in (0, 1):
        at, factor = m + 2 * row, factors + 2 * row
        lines.append(f"mul.f32 top{row}, top{row}, ${scale}; max.f32 top{row}, top{row}, ${at}; sub.f32 e{row}, ${at}, top{row};")
        lines.append(f"@grows{row} ex2.approx.ftz.f32 ${factor}, e{row}; @grows{row} mov.f32 ${factor + 1}, ${factor};")
        lines.append(f"@grows{row} mov.f32 ${at}, top{row}; @grows{row} mov.f32 ${at + 1}, top{row}; neg.f32 top{row}, top{row};")
    lines += [f"mov.f32 part{i}, 0f00000000;" for i in range(4)]
    for k in range(count):
        for row in (0, 1):
            for c in (0, 1):
                lines.append(f"fma.rn.f32 e{c}, ${scores + 4 * k + 2 * row + c}, ${scale}, top{row}; ex2.approx.ftz.f32 e{c}, e{c};")
                lines.append(f"add.f32 part{2 * row + c}, part{2 * row + c}, e{c};")
            lines.append(f"@grows{row} cvt.rn.{dtype}x2.f32 ${2 * k + row}, e1, e0;")
    lines += [f"@grows{i // 2} mov.f32 ${sums + i}, part{i};" for i in range(4)]
    return "{ " + " ".join(lines) + " kept: }"


@gluon.constexpr_function
def _operands(count):
    tied = 2 * count + 8
    outputs = ["=r"] * (2 * count) + ["=f"] * 8 + ["=&f"] * 4
    return ",".join(outputs + [str(i) for i in range(tied)] + ["f"] * (4 * count + 4))


@gluon.constexpr_function
def _types(count, dtype):
    return tuple([dtype] * count + [gl.float32] * 3)


@gluon.jit
def _columns(x):
    """x [rows, 2ⁿ, 8] as a tuple of tensors [rows, 8]. Split into four at a time: the compiler takes long for each reshape."""
    if x.shape[1] == 1:
        return (gl.reshape(x, [x.shape[0], 8]),)
    elif x.shape[1] == 2:
        first, second = gl.split(gl.permute(x, (0, 2, 1)))
        return (first, second)
    elif x.shape[1] == 4:
        low, high = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, 2, 8]), (0, 3, 2, 1)))
        return gl.split(low) + gl.split(high)
    else:
        x = gl.reshape(x, [x.shape[0], 2, 2, x.shape[1] // 4, 8])
        low, high = gl.split(gl.permute(x, (0, 3, 4, 2, 1)))
        first, second = gl.split(low)
        third, fourth = gl.split(high)
        return _columns(first) + _columns(second) + _columns(third) + _columns(fourth)


@gluon.jit
def _join(columns):
    """The inverse of `_columns`."""
    COUNT: gl.constexpr = len(columns)
    if COUNT == 1:
        return gl.reshape(columns[0], [columns[0].shape[0], 1, 8])
    elif COUNT == 2:
        return gl.permute(gl.join(columns[0], columns[1]), (0, 2, 1))
    elif COUNT == 4:
        x = gl.permute(gl.join(gl.join(columns[0], columns[1]), gl.join(columns[2], columns[3])), (0, 3, 2, 1))
        return gl.reshape(x, [x.shape[0], 4, 8])
    else:
        QUARTER: gl.constexpr = COUNT // 4
        low = gl.join(_join(columns[:QUARTER]), _join(columns[QUARTER : 2 * QUARTER]))
        high = gl.join(_join(columns[2 * QUARTER : 3 * QUARTER]), _join(columns[3 * QUARTER :]))
        x = gl.permute(gl.join(low, high), (0, 4, 3, 1, 2))
        return gl.reshape(x, [x.shape[0], COUNT, 8])


@gluon.jit
def summed(p):
    """p [rows, 2ⁿ, 8] of `by_lane`, summed over dim 1 one column after the other.

    A sum in the order of a tree needs all exponentials of a block at once: registers are spilled, and the tensor cores wait.
    """
    if sums_are_trees():
        layout: gl.constexpr = gl.SliceLayout(1, p.type.layout)
        columns = _columns(p)
        sums = columns[0]
        for i in gl.static_range(1, p.shape[1]):
            sums += columns[i]
        return gl.convert_layout(sums, layout)
    else:
        return gl.sum(p, 1)


@gluon.jit
def checked(p, sums, m, s, scale):
    """(p, sums, m, factor) of a block, where a row's sums are too large with a higher running max.

    p: exp2(s · scale − m) [rows, columns / 8, 8] in 16 bits; s: scores (`by_lane`); sums of p and running max m [rows, 8].
    factor [rows, 8]: by which the earlier O and row sums are multiplied; 1 in rows whose m has not changed.
    """
    COUNT: gl.constexpr = s.shape[1]
    DTYPE: gl.constexpr = p.dtype
    NAME: gl.constexpr = "bf16" if p.dtype == gl.bfloat16 else "f16"
    ps, ss = _columns(p), _columns(s)
    layout: gl.constexpr = ss[0].type.layout
    sums_in, m_in = gl.convert_layout(sums, layout), gl.convert_layout(m, layout)
    factor = gl.full([s.shape[0], 8], scale, gl.float32, layout=layout)
    operands = ps + (m_in, sums_in) + ss + (factor,)  # noqa: RUF005 (Triton does not compile starred expressions)
    result = gl.inline_asm_elementwise(
        _instructions(COUNT, NAME), _operands(COUNT), operands, dtype=_types(COUNT, DTYPE), is_pure=True, pack=4
    )
    own: gl.constexpr = m.type.layout
    p = gl.convert_layout(_join(result[:COUNT]), p.type.layout)
    m, sums, factor = (
        gl.convert_layout(result[COUNT], own), gl.convert_layout(result[COUNT + 1], own), gl.convert_layout(result[COUNT + 2], own)
    )  # fmt: skip
    return p, sums, m, factor


@gluon.constexpr_function
def _followed_instructions():
    """PTX for two rows of a thread. Operands, in and out: running max (4); out: factors (4); in: max of the block (4), scale."""
    rows = ((0, 8, 0), (1, 10, 2))  # number, first operand of the block's max, first operand of the results
    lines = [".reg .pred grows; .reg .f32 top<2>, other<2>, growth<2>;"]
    for row, block, m in rows:
        lines.append(f"max.f32 top{row}, ${block}, ${block + 1}; mul.f32 top{row}, top{row}, $16;")
        lines.append(f"sub.f32 growth{row}, top{row}, ${m};")
    lines += [f"mov.f32 ${i}, {_ONE};" for i in range(4, 8)]
    lines.append(f"max.f32 growth0, growth0, growth1; setp.gt.f32 grows, growth0, {_MAX_GROWTH}; vote.sync.any.pred grows, grows, -1;")
    lines.append("@!grows bra.uni kept;")
    for distance in (1, 2):
        for row in (0, 1):
            lines.append(f"shfl.sync.bfly.b32 other{row}, top{row}, {distance}, 31, -1; max.f32 top{row}, top{row}, other{row};")
    for row, _, m in rows:
        lines.append(f"sub.f32 growth{row}, top{row}, ${m}; setp.gt.f32 grows, growth{row}, {_MAX_GROWTH};")
        lines.append(f"neg.f32 growth{row}, growth{row}; @grows ex2.approx.ftz.f32 ${m + 4}, growth{row};")
        lines.append(f"@grows mov.f32 ${m + 5}, ${m + 4}; @grows mov.f32 ${m}, top{row}; @grows mov.f32 ${m + 1}, top{row};")
    return "{ " + " ".join(lines) + " kept: }"


@gluon.jit
def followed(m, top, scale):
    """(m, factor) [rows, 8]: the running max m after a block, and what rescales earlier sums, as of `checked`.

    top: max of the block's scores over dim 1 of `by_lane`, to be multiplied by `scale`.
    """
    scale = gl.full(top.shape, scale, gl.float32, layout=top.type.layout)
    operands: gl.constexpr = "=f,=f,=f,=f,=&f,=&f,=&f,=&f,f,f,f,f,0,1,2,3,f,f,f,f"
    return gl.inline_asm_elementwise(
        _followed_instructions(), operands, [top, m, scale], dtype=(gl.float32, gl.float32), is_pure=True, pack=4
    )


@gluon.constexpr_function
def _rescale_instructions(count):
    """PTX for `count` elements of a thread. Operands, in and out: the elements; in: their factors."""
    first, second = 2 * count, 2 * count + 2  # factors of rows r and r + 8
    lines = [f".reg .pred scaled, other; setp.neu.f32 scaled, ${first}, {_ONE}; setp.neu.f32 other, ${second}, {_ONE};"]
    lines.append("or.pred scaled, scaled, other; vote.sync.any.pred scaled, scaled, -1; @!scaled bra.uni kept;")
    lines += [f"mul.f32 ${i}, ${i}, ${first + (i & 2)};" for i in range(count)]
    return "{ " + " ".join(lines) + " kept: }"


@gluon.constexpr_function
def _rescale_operands(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(acc, factor, layout: gl.constexpr):
    """acc [rows, columns] in the wgmma layout `layout`, times factor [rows, 8] of `checked` or `followed`.

    Warps whose factors are all 1 skip it.
    """
    COUNT: gl.constexpr = acc.shape[1] // 2 if acc.shape[1] < 128 else 64
    lanes = by_lane(acc)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, lanes.type.layout))
    lanes, factor = gl.broadcast(lanes, gl.expand_dims(factor, 1))
    lanes = gl.inline_asm_elementwise(
        _rescale_instructions(COUNT), _rescale_operands(COUNT), [lanes, factor], dtype=gl.float32, is_pure=True, pack=COUNT
    )
    return gl.convert_layout(gl.reshape(lanes, [acc.shape[0], acc.shape[1]]), layout)
