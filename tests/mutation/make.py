"""Mutants of source files: random one-line changes of src/, without device code, messages, annotations and docstrings."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "src/longspan"
DEVICE_CODE = ("_kernels/hopper/", "_kernels/triton/forward.py", "_kernels/triton/backward.py", "_kernels/gpu/row_sum_kernels.py")
COMPILED = ("triton.jit", "gluon.jit", "jit", "core.extern")
COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+", ast.BitAnd: "|", ast.BitOr: "&"}
CASTS = ("float", "double", "to", "contiguous", "clone", "detach", "long", "int", "bool", "abs", "expand", "flatten", "cpu")
# Calls whose first two arguments may be swapped, or need not be told apart.
SYMMETRIC = ("isinstance", "getattr", "setattr", "hasattr", "range", "zip", "min", "max", "minimum", "maximum", "equal")
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum", "amax": "amin", "amin": "amax"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one line: characters [start, stop) of `line` become `new`."""

    file: str
    line: int
    start: int
    stop: int
    old: str
    new: str
    kind: str

    @property
    def package(self) -> str:
        parts = self.file.split("/")
        return parts[2] if len(parts) > 3 else "top level"

    def applied(self, text: str) -> str:
        """The text of the file with this change."""
        lines = text.splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        lines[self.line - 1] = (line[: self.start] + self.new.encode() + line[self.stop :]).decode()
        return "".join(lines)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.old!r} → {self.new!r}"


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file."""
    text = path.read_text()
    return list(_Finder(str(path.relative_to(ROOT)), text).walk(ast.parse(text)))


class _Finder:
    def __init__(self, file: str, text: str) -> None:
        self.file, self.lines = file, text.splitlines()

    def walk(self, node: ast.AST) -> Iterator[Mutant]:
        """Mutants of a node and its children, without code that no test should notice or that a GPU compiles."""
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom) or _is_message(node):
            return
        if isinstance(node, ast.FunctionDef) and (node.name in ("__repr__", "__str__") or any(map(is_compiled, node.decorator_list))):
            return
        yield from self._here(node)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_comment", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                    yield from self.walk(child)

    def _here(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._between(node.left, node.comparators[0], COMPARE[type(node.ops[0])], "comparison")
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield from self._between(node.left, node.right, ARITHMETIC[type(node.op)], "arithmetic")
        elif isinstance(node, ast.BoolOp):
            yield from self._between(node.values[0], node.values[1], "or" if isinstance(node.op, ast.And) else "and", "and/or")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from self._replaced(node, self._text(node.operand), "dropped not")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield from self._replaced(node, str(not node.value), "constant")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield from self._replaced(node, str(node.value + 1), "constant")
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield from self._replaced(node, repr(node.value * 2 + 1), "constant")
        elif isinstance(node, ast.Call):
            yield from self._calls(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "key" in node.targets[0].id:
            yield from self._key(node.value)

    def _calls(self, node: ast.Call) -> Iterator[Mutant]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        if isinstance(node.func, ast.Attribute) and name in CASTS:
            yield from self._replaced(node, self._text(node.func.value), "dropped cast")
        if name in NAMES:
            yield from self._replaced(node, self._text(node).replace(name, NAMES[name], 1), "min/max, any/all")
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        if len(plain) >= 2 and plain == node.args and name not in SYMMETRIC:
            first, second = self._text(plain[0]), self._text(plain[1])
            if first and second and first != second and plain[0].lineno == plain[1].end_lineno:
                at, stop = plain[0].col_offset, plain[1].end_col_offset or 0
                between = self._slice(plain[0].lineno, plain[0].end_col_offset or 0, plain[1].col_offset)
                yield from self._edit(plain[0].lineno, at, stop, f"{second}{between}{first}", "swapped arguments")
        if name in ("get", "cached") and node.args and isinstance(node.args[0], ast.Tuple):
            yield from self._key(node.args[0])

    def _key(self, value: ast.AST) -> Iterator[Mutant]:
        for element in value.elts if isinstance(value, ast.Tuple) else ():
            if not isinstance(element, ast.Starred):
                yield from self._replaced(element, "None", "dropped key component")

    def _between(self, left: ast.expr, right: ast.expr, operator: str, kind: str) -> Iterator[Mutant]:
        if left.end_lineno == right.lineno:
            between = self._slice(right.lineno, left.end_col_offset or 0, right.col_offset)
            before, after = (")" * between.count(")"), "(" * between.count("("))
            yield from self._edit(right.lineno, left.end_col_offset or 0, right.col_offset, f"{before} {operator} {after}", kind)

    def _replaced(self, node: ast.expr, new: str, kind: str) -> Iterator[Mutant]:
        if new and node.lineno == node.end_lineno:
            yield from self._edit(node.lineno, node.col_offset, node.end_col_offset or 0, new, kind)

    def _edit(self, line: int, start: int, stop: int, new: str, kind: str) -> Iterator[Mutant]:
        old = self._slice(line, start, stop)
        if old.strip() != new.strip():
            yield Mutant(file=self.file, line=line, start=start, stop=stop, old=old, new=new, kind=kind)

    def _slice(self, line: int, start: int, stop: int) -> str:
        return self.lines[line - 1].encode()[start:stop].decode()

    def _text(self, node: ast.expr) -> str:
        return self._slice(node.lineno, node.col_offset, node.end_col_offset or 0) if node.lineno == node.end_lineno else ""


def is_compiled(decorator: ast.expr) -> bool:
    text = ast.unparse(decorator)
    return text.split("(")[0].endswith(COMPILED)


def _is_message(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def sources(only: list[str]) -> list[Path]:
    """Files to mutate, without device code."""
    roots = [ROOT / name for name in only] or [ROOT / PACKAGE]
    files = sorted(f for root in roots for f in ([root] if root.suffix == ".py" else root.rglob("*.py")))
    return [f for f in files if not any(part in f.as_posix() for part in DEVICE_CODE)]


def sample(only: list[str], count: int, seed: int) -> list[Mutant]:
    """A random sample: packages in proportion to their mutants."""
    every = [mutant for path in sources(only) for mutant in mutants_of(path)]
    return random.Random(seed).sample(every, min(count, len(every)))


def given(path: Path) -> list[Mutant]:
    """Mutants of a file, each found by its old text, which must be in one line."""
    mutants = []
    for entry in json.loads(path.read_text()):
        lines = (ROOT / entry["file"]).read_text().splitlines()
        at = [i for i, text in enumerate(lines) if entry["old"] in text]
        if len(at) != 1:
            raise SystemExit(f"{entry['file']}: expected {entry['old']!r} in one line, got lines {[i + 1 for i in at]}")
        start = len(lines[at[0]].split(entry["old"])[0].encode())
        size = len(entry["old"].encode())
        mutants.append(Mutant(line=at[0] + 1, start=start, stop=start + size, kind="given", **entry))
    return mutants


def survivors(path: Path) -> list[Mutant]:
    """The mutants of an earlier run that were not killed. Their files must not have changed since."""
    verdicts = [json.loads(line) for line in path.read_text().splitlines()]
    names = [f.name for f in fields(Mutant)]
    return [Mutant(**{name: one[name] for name in names}) for one in verdicts if "killed" not in one["verdict"]]
