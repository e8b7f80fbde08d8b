"""Block tables equal brute-force evaluation of every element; their transposed, dense and printed views agree."""

import io
from contextlib import redirect_stderr

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan._masks import classify as classify_module
from longspan._masks.block_table import EMPTY, FULL, PARTIAL, BlockTable
from longspan._masks.classify import TableShape, classify
from longspan._masks.tracing import trace

SIZE = 320
torch.manual_seed(0)
TABLES = {
    "sorted": torch.sort(torch.randint(0, 12, (SIZE,)))[0],
    "unsorted": torch.randint(-3, 6, (SIZE,)),
    "padded": torch.where(torch.arange(SIZE) % 23 > 19, -1, torch.arange(SIZE) // 23),
    "narrow": torch.sort(torch.randint(-100, 100, (SIZE,), dtype=torch.int8))[0],
    "shuffled": torch.randperm(SIZE).int(),
}
VALID = torch.rand(SIZE) < 0.7
GRID = torch.rand(24, 24) < 0.4
WEIGHTS = torch.randn(SIZE).sort()[0]
BATCHED = torch.sort(torch.randint(0, 9, (2, SIZE)))[0]


BINARY = {"+": torch.add, "-": torch.sub, "min": torch.minimum, "max": torch.maximum}
UNARY = {
    "*": lambda x, c: x * c,
    "//": lambda x, c: x // c,
    "%": lambda x, c: x % c,
    "abs": lambda x, c: x.long().abs(),
    "clamp": lambda x, c: x.clamp(-c, min(2 * c, 127)),  # torch rejects bounds that overflow int8
    "int32": lambda x, c: x.to(torch.int32),
    "shift": lambda x, c: x >> 3,
    "and": lambda x, c: x & c,
    "square": lambda x, c: x**2,
    "neg": lambda x, c: -x,
}


def _binary(draw, depth, make):
    a, b = draw(numbers(depth - 1)), draw(numbers(depth - 1))
    return lambda *x: make(a(*x), b(*x))


@st.composite
def numbers(draw, depth):
    """Strategy for random integer expressions, as functions of (b, h, q, kv)."""
    if depth == 0:
        leaf = draw(st.sampled_from(["q", "kv", "q", "kv", "b", "h", "constant", "lookup"]))
        if leaf == "constant":
            value = draw(st.integers(-40, 300))
            return lambda b, h, q, kv: q.new_full((), value)
        if leaf == "lookup":
            table, of_q = TABLES[draw(st.sampled_from(sorted(TABLES)))], draw(st.booleans())
            return lambda b, h, q, kv: table[q if of_q else kv]
        return {"b": lambda *x: x[0], "h": lambda *x: x[1], "q": lambda *x: x[2], "kv": lambda *x: x[3]}[leaf]
    kind = draw(st.sampled_from([*BINARY, *UNARY, "lookup", "where", "batched"]))
    if kind in BINARY:
        return _binary(draw, depth, BINARY[kind])
    inner = draw(numbers(depth - 1))
    if kind == "where":
        choice, other = draw(conditions(depth - 1)), draw(numbers(depth - 1))
        return lambda *x: torch.where(choice(*x), inner(*x), other(*x))
    if kind == "lookup":
        table, shift = TABLES[draw(st.sampled_from(sorted(TABLES)))], draw(st.sampled_from([0, 0, SIZE]))
        return lambda *x: table[inner(*x).long() % SIZE - shift]
    if kind == "batched":
        return lambda *x: BATCHED[x[0], inner(*x).long() % SIZE]
    c = draw(st.sampled_from([1, 2, 3, 7, 16, 50, 64]))
    negative = draw(st.booleans())
    c = -c if kind in ("*", "//") and negative else c
    return lambda *x: UNARY[kind](inner(*x), c)


@st.composite
def conditions(draw, depth):
    """Strategy for random boolean expressions, as functions of (b, h, q, kv)."""
    kinds = ["compare"] * 3 + ["valid", "grid", "float", "same"] + (["and", "or", "not", "xor", "and", "padded", "joined"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "compare":
        op = draw(st.sampled_from([torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge]))
        a, b = draw(numbers(max(0, depth - 1))), draw(numbers(max(0, depth - 1)))
        return lambda *x: op(a(*x), b(*x))
    if kind == "valid":
        return lambda b, h, q, kv: VALID[kv]
    if kind == "grid":
        return lambda b, h, q, kv: GRID[q // 16, kv // 16]
    if kind == "float":
        slope, bound = draw(st.sampled_from([0.01, 0.3, -1.7])), draw(st.floats(-50, 50))
        return lambda b, h, q, kv: (q - kv).float() * slope + WEIGHTS[kv] / 3 < bound
    if kind == "same":
        table = TABLES[draw(st.sampled_from(sorted(TABLES)))]
        return lambda b, h, q, kv: table[q] == table[kv]
    if kind == "padded":
        table, min_id = TABLES["padded"], draw(st.integers(-1, 3))
        more = draw(conditions(depth - 1))
        return lambda b, h, q, kv: (table[q] == table[kv]) & more(b, h, q, kv) & (table[q] >= min_id) & VALID[kv]
    if kind == "joined":
        of_q, of_kv = (TABLES[draw(st.sampled_from(sorted(TABLES)))] for _ in range(2))
        compare, number = draw(st.sampled_from([torch.ne, torch.lt, torch.ge])), draw(st.integers(-130, 300))
        limit = draw(st.sampled_from([lambda *x: number, draw(numbers(1))]))
        return lambda *x: (of_q[x[2]] == of_kv[x[3]]) & compare(of_kv[x[3]], limit(*x))
    a = draw(conditions(depth - 1))
    if kind == "not":
        return lambda *x: ~a(*x)
    b = draw(conditions(depth - 1))
    return {"and": lambda *x: a(*x) & b(*x), "or": lambda *x: a(*x) | b(*x), "xor": lambda *x: a(*x) ^ b(*x)}[kind]


def elements(mask, q_len, kv_len, batch=1, heads=1):
    """Which pairs are visible [batch, heads, q_len, kv_len].

    A mask is a function of scalars, so `torch.vmap` evaluates it: broadcasting promotes an int8 tensor and an int64 scalar to int8.
    """
    for dim in (3, 2, 1, 0):
        mask = torch.vmap(mask, in_dims=tuple(0 if i == dim else None for i in range(4)))
    return mask(*(torch.arange(n) for n in (batch, heads, q_len, kv_len)))


def kinds(visible, block):
    """Kinds of tiles [batch, heads, q_tiles, kv_tiles] from their elements."""
    padded = torch.nn.functional.pad(visible, (0, -visible.shape[3] % block[1], 0, -visible.shape[2] % block[0]))
    tiles = padded.unflatten(3, (-1, block[1])).unflatten(2, (-1, block[0])).transpose(3, 4).flatten(4)
    return torch.where(tiles.all(-1), FULL, torch.where(tiles.any(-1), PARTIAL, EMPTY)).to(torch.int8)


def brute_force(mask, q_len, kv_len, block, batch=1, heads=1):
    """Kinds of tiles [batch, heads, q_tiles, kv_tiles] by evaluating every element."""
    return kinds(elements(mask, q_len, kv_len, batch, heads), block)


def table_of(mask, q_len, kv_len, *, levels=None, progress=None, traced=None, **sizes):
    """The block table of a mask function."""
    traced = traced or trace(mask, "mask")
    shape = TableShape(q_len=q_len, kv_len=kv_len, **sizes)
    return classify(traced.program, traced.captured(), shape, levels=levels, progress=progress, mask_mod=mask)


def check_well_formed(table: BlockTable):
    """Runs of each row are ascending, disjoint, and maximal."""
    assert len(table.ptr) == table.rows + 1 and int(table.ptr[-1]) == len(table.first)
    row = torch.repeat_interleave(torch.arange(table.rows), table.ptr.diff().long())
    same_row = row[1:] == row[:-1]
    assert bool((table.first <= table.last).all()) and bool((table.first[1:] > table.last[:-1])[same_row].all())
    joinable = same_row & (table.first[1:] == table.last[:-1] + 1) & (table.kind[1:] == table.kind[:-1])
    assert not bool(joinable.any())


SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 300))
BLOCKS = st.sampled_from([(16, 16), (7, 13), (32, 16), (128, 128), (1, 5)])
LEVELS = st.sampled_from([None, (1,), (2, 1), (4, 2, 1), (8, 4, 1), (6, 3, 1)])


@pytest.mark.long
@settings(max_examples=320, suppress_health_check=list(HealthCheck))
@given(mask=conditions(3), lengths=SHAPES, tables=st.lists(st.tuples(BLOCKS, LEVELS), min_size=2, max_size=2))
def test_tables_of_random_masks_equal_brute_force(mask, lengths, tables):
    """Two tables of each mask: to trace a mask takes longer than to classify its tiles."""
    traced, visible = trace(mask, "mask"), elements(mask, *lengths, 2, 2)
    for block, levels in tables:
        table = table_of(mask, *lengths, traced=traced, block=block, levels=levels, batch=2, heads=2)
        expected = kinds(visible, block)
        assert torch.equal(table.to_dense().expand_as(expected), expected)
        check_well_formed(table)
        transposed = table.transposed
        check_well_formed(transposed)
        assert torch.equal(transposed.to_dense(), table.to_dense().transpose(2, 3))


OVERFLOWING = {
    "hash": lambda b, h, q, kv: (q * 7919 + kv * 104729) % 1024 < 8,
    "hash in 32 bits": lambda b, h, q, kv: (q.int() * 7919123 + kv.int() * 104729) % 1024 < 300,
    "hash in 8 bits": lambda b, h, q, kv: q.to(torch.int8) * 3 > kv.to(torch.int8),
    "product in 64 bits": lambda b, h, q, kv: (q * 2**61) + (kv * 2**61) > 0,
    "huge scalar": lambda b, h, q, kv: q * (2**62) < kv * (2**62 + 1),
    "shift out": lambda b, h, q, kv: (q << 60) >= (kv << 61),
    "unsigned": lambda b, h, q, kv: q.to(torch.uint8) - kv.to(torch.uint8) < 100,
    "float beyond its integers": lambda b, h, q, kv: (q + 2**24).float() <= (kv + 2**24).float(),
    "half": lambda b, h, q, kv: (q * 300).half() * 0.5 < (kv * 290).half(),
    "bfloat": lambda b, h, q, kv: q.bfloat16() + 0.3 < kv.bfloat16(),
    "divides by zero": lambda b, h, q, kv: (q.float() / (kv - 5).float()) > 1.5,
    "not a number": lambda b, h, q, kv: ~(((q - 40).float().sqrt() - (kv - 30).float().log()) < 3.0),
    "infinities": lambda b, h, q, kv: torch.where(q > kv, 0.0, -torch.inf) * (q % 2) < 0.5,
    "exponent": lambda b, h, q, kv: torch.exp((kv - q).float() * 0.1) > 0.25,
    "vector inside": lambda b, h, q, kv: (TABLES["sorted"][:7] + q > kv + 3).any(),
    "unknown integer divided by -1": lambda b, h, q, kv: (kv**3) // (-1 - q) < -kv,
    "mixed widths": lambda b, h, q, kv: TABLES["narrow"][q] * 2 + kv > TABLES["shuffled"][kv],
}


@pytest.mark.parametrize("levels", [None, (4, 2, 1)])
@pytest.mark.parametrize("name", OVERFLOWING)
def test_tables_are_exact_under_overflow_rounding_and_nan(name, levels):
    mask, block = OVERFLOWING[name], (16, 16)
    table = table_of(mask, 200, 150, block=block, levels=levels)
    assert torch.equal(table.to_dense(), brute_force(mask, 200, 150, block))


IDS = torch.arange(64) // 8
TENTHS = IDS.half() / 10
WIDE_IDS = torch.where(IDS == 3, 300, IDS)
CONJUNCTIONS = {
    "scalar that wraps in int8": lambda b, h, q, kv: (IDS.to(torch.int8)[q] == WIDE_IDS[kv]) & (WIDE_IDS[kv] < 200),
    "scalar beyond int8": lambda b, h, q, kv: (IDS.to(torch.int8)[q] == (IDS * 50)[kv]) & ((IDS * 50)[kv] < 200),
    "scalar below uint8": lambda b, h, q, kv: (IDS.to(torch.uint8)[q] == (IDS - 4)[kv]) & ((IDS - 4)[kv] > -2),
    "scalar between half and float": lambda b, h, q, kv: (TENTHS.float()[q] == TENTHS[kv]) & (TENTHS[kv] == 0.1),
    "integers rounded to float": lambda b, h, q, kv: ((IDS + 2**24)[q] == (IDS + 2**24).float()[kv]) & ((IDS + 2**24).float()[kv] <= 2**24),
    "bool and int8": lambda b, h, q, kv: (IDS.to(torch.int8)[q] == (IDS > 3)[kv]) & ((IDS > 3)[kv] < (IDS + 200)[q]),
    "operation without a rule": lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (IDS[q] <= kv**3),
    "overflow of int8": lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (IDS[q] < kv.to(torch.int8) * 3),
    "overflow on the left": lambda b, h, q, kv: (IDS[q] == IDS[kv]) & ~(kv.to(torch.int8) * 3 <= IDS[kv]),
}


@pytest.mark.parametrize("name", CONJUNCTIONS)
def test_conditions_on_equal_lookups_mask_no_visible_tile(name):
    mask = CONJUNCTIONS[name]
    table = table_of(mask, 64, 64, block=(16, 16))
    assert torch.equal(table.to_dense(), brute_force(mask, 64, 64, (16, 16)))


@pytest.mark.parametrize("lengths", [(1, 1), (128, 128), (127, 256), (256, 130), (129, 127)])
def test_without_a_mask_every_tile_of_full_size_is_full(lengths):
    table = classify(None, (), TableShape(q_len=lengths[0], kv_len=lengths[1], block=(64, 32), batch=3, heads=2))
    assert (table.batch, table.heads) == (1, 1)
    expected = brute_force(lambda b, h, q, kv: (q >= 0) & (kv >= 0), *lengths, (64, 32))
    assert torch.equal(table.to_dense(), expected)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_a_table_without_queries_or_keys_is_empty(q_len, kv_len):
    table = table_of(lambda b, h, q, kv: q >= kv, q_len, kv_len)
    assert len(table.first) == 0 and table.ptr.tolist() == [0] * (table.rows + 1)
    assert table.density == 0.0 and repr(table) == str(table)
    assert len(table.transposed.first) == 0 and table.transposed.rows == table.kv_tiles


def test_batch_and_heads_are_1_if_the_mask_does_not_use_them():
    lengths = torch.tensor([10, 60, 64])
    table = table_of(lambda b, h, q, kv: kv < lengths[b], 64, 64, block=(16, 16), batch=3, heads=5)
    assert (table.batch, table.heads) == (3, 1)
    assert table.counts() == (12, 8, 28)


def test_a_sliding_window_over_a_million_tokens_has_few_runs_per_row():
    size = 2**20
    table = table_of(lambda b, h, q, kv: (q >= kv) & (q - kv < 4096), size, size)
    assert len(table.first) < 4 * table.rows
    assert table.counts().full == sum(min(i, 31) for i in range(8192))
    transposed = table.transposed
    assert transposed.counts() == table.counts()
    assert torch.equal(transposed.transposed.first, table.first) and torch.equal(transposed.transposed.ptr, table.ptr)


@pytest.mark.parametrize("block", [(1, 8), (16, 1), (16, 8), (1, 24)])
def test_masks_that_compute_vectors_are_evaluated_in_parts(block, monkeypatch):
    points = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    shapes = []
    evaluate = classify_module._Head._evaluate
    monkeypatch.setattr(
        classify_module._Head, "_evaluate", lambda self, q, kv: (shapes.append((q.shape, kv.shape)), evaluate(self, q, kv))[1]
    )
    monkeypatch.setattr(classify_module, "MAX_ELEMENTS", 200)

    def near(b, h, q, kv):
        return (points[q] - points[kv]).square().sum(-1) < 7

    table = table_of(near, 60, 41, block=block)
    assert torch.equal(table.to_dense(), brute_force(near, 60, 41, block))
    tiles, elements_of_tiles = {q[0] for q, _ in shapes}, {q[0] * q[1] * kv[1] for q, kv in shapes}
    assert len(tiles) > 1 and min(elements_of_tiles) * 5 <= 200  # 5 numbers per element


def test_a_lookup_outside_its_table_raises():
    ids = torch.zeros(100, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"looks outside a captured tensor of shape \(100,\).*-100 to 99.*100 entries, got up to 128"):
        table_of(lambda b, h, q, kv: ids[q] == ids[kv], 129, 50)
    with pytest.raises(ValueError, match="-100 to 99 in a dim of 100 entries, got down to -130"):
        table_of(lambda b, h, q, kv: ids[kv - 130] == q, 10, 60)
    with pytest.raises(ValueError, match="looks outside a captured tensor"):
        table_of(lambda b, h, q, kv: ids[b] == q, 10, 10, batch=101)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (0, 16)}, "block: expected two sizes.*got \\(0, 16\\)"),
        ({"levels": (4, 3, 1)}, "levels: expected descending sides"),
        ({"levels": (4, 2)}, "levels: expected descending sides"),
        ({"batch": -1}, "expected non-negative q_len, kv_len, batch and heads"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        table_of(lambda b, h, q, kv: q >= kv, 10, 10, **options)


def test_slow_tables_report_progress_and_fast_tables_are_silent(monkeypatch):
    noise = torch.randint(0, 2000, (2000,))

    def mask(b, h, q, kv):
        return noise[q] == noise[kv]

    with redirect_stderr(io.StringIO()) as fast_stderr:
        table_of(lambda b, h, q, kv: q >= kv, 2000, 2000, block=(16, 16))
    assert fast_stderr.getvalue() == ""
    monkeypatch.setattr(classify_module, "REPORT_AFTER", -1.0)
    monkeypatch.setattr(classify_module, "REPORT_INTERVAL", -1.0)
    with redirect_stderr(io.StringIO()) as file:
        table_of(mask, 2000, 2000, block=(16, 16))
    assert file.getvalue().startswith("block table:") and file.getvalue().count("\n") == 1 and "\r" not in file.getvalue()
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    with redirect_stderr(terminal):
        table_of(mask, 2000, 2000, block=(16, 16))
    assert "\rblock table [" in terminal.getvalue() and "s left" in terminal.getvalue() and terminal.getvalue().endswith("\n")
    fractions: list[float] = []
    table_of(mask, 2000, 2000, block=(16, 16), progress=fractions.append)
    assert fractions == sorted(fractions) and fractions[0] >= 0 and fractions[-1] == 1.0


def test_a_table_prints_as_a_picture_of_at_most_32_lines():
    text = str(table_of(lambda b, h, q, kv: q >= kv, 2**16, 2**16))
    head, *lines = text.splitlines()
    assert head.startswith("BlockTable(65536 × 65536, block 128 × 128") and "density 0.501" in head
    assert len(lines) == 32 and {len(line) for line in lines} == {64}
    assert lines[-1].startswith("█" * 62) and lines[0].endswith(" " * 62)
    small = table_of(lambda b, h, q, kv: q >= kv, 64, 64, block=(16, 16))
    assert small.picture().splitlines() == ["▒   ", "█▒  ", "██▒ ", "███▒"]


def test_runs_are_selected_by_kind_and_rows_sorted_by_work():
    table = table_of(lambda b, h, q, kv: q >= kv, 64, 64, block=(16, 16))
    full, partial = table.runs(FULL), table.runs(PARTIAL)
    assert full.ptr.tolist() == [0, 0, 1, 2, 3] and full.last.tolist() == [0, 1, 2]
    assert partial.first.tolist() == partial.last.tolist() == [0, 1, 2, 3]
    assert table.heavy_first.tolist() == [3, 2, 1, 0]
    assert table.transposed.mask_mod(0, 0, torch.tensor(3), torch.tensor(5))


def test_one_of_two_heads_is_selected():
    traced = trace(lambda b, h, q, kv: (q >= kv) | (h == 1), "mask")
    table = classify(traced.program, traced.captured(), TableShape(q_len=300, kv_len=300, block=(64, 64), heads=2))
    q, kv = torch.tensor([3, 0, 2]), torch.tensor([0, 1, 4])
    for head in (0, 1):
        assert torch.equal(
            table.select(q, kv, heads=range(head, head + 1)).to_dense(), table.to_dense()[:, head : head + 1][:, :, q][..., kv]
        )
