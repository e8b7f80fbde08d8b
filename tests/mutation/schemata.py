"""All mutants of a file in one program: each mutated expression E becomes `E' if on(number) else E`.

One import then serves every mutant, and a run of the unchanged program tells which tests reach which mutants. Expressions that run when a
module is imported (constants, default arguments, class bodies) need a new process for each mutant: `Instrumented.at_import`. Every
test that calls a function of the file is run for them.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from tests.mutation.make import Mutant, is_compiled

PROBE = "longspan_mutant_probe"
_NAME = "__mutant__"
_NO_VALUE = (ast.Slice, ast.Starred, ast.FormattedValue)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Path = list[tuple[str, int | None]]  # fields and indices from the root of a tree


@dataclass(frozen=True, kw_only=True)
class Instrumented:
    """text: the program with all of its mutants. at_import: mutants that run at import. without: mutants that it does not contain."""

    text: str
    at_import: set[int]
    without: set[int]


def instrument(text: str, mutants: dict[int, Mutant], file_number: int) -> Instrumented:
    """mutants: of this file, by number. file_number: recorded where a function of the file begins, if a mutant runs at import."""
    tree = ast.parse(text)
    changes: list[tuple[Path, int, ast.expr]] = []
    at_import, without = set(), set()
    for number, mutant in mutants.items():
        try:
            changed = ast.parse(mutant.applied(text))
        except SyntaxError:
            without.add(number)
            continue
        path = _replaceable(tree, _difference(tree, changed))
        if path is None:
            without.add(number)
            continue
        if not _in_function(tree, path):
            at_import.add(number)
        changes.append((path, number, _at(changed, path)))
    # The deepest first: an outer change keeps the inner ones in its unchanged form.
    for path, number, new in sorted(changes, key=lambda change: -len(change[0])):
        _replace(tree, path, ast.IfExp(test=_call(number), body=new, orelse=_at(tree, path)))
    if at_import:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not any(map(is_compiled, node.decorator_list)):
                node.body.insert(_has_docstring(node), ast.Expr(_call(file_number)))
    tree.body.insert(_imports_end(tree), ast.Import(names=[ast.alias(name=PROBE, asname=_NAME)]))
    return Instrumented(text=ast.unparse(ast.fix_missing_locations(tree)), at_import=at_import, without=without)


def _call(number: int) -> ast.Call:
    on = ast.Attribute(value=ast.Name(_NAME, ast.Load()), attr="on", ctx=ast.Load())
    return ast.Call(func=on, args=[ast.Constant(number)], keywords=[])


def _difference(a: ast.AST, b: ast.AST) -> Path | None:
    """The path to the smallest node that contains all differences; None for equal trees."""
    if type(a) is not type(b):
        return []
    different: list[tuple[str, int | None, Path]] = []
    for field in a._fields:
        x, y = getattr(a, field, None), getattr(b, field, None)
        pairs: list[tuple[int | None, Any, Any]] = [(None, x, y)]
        if isinstance(x, list) and isinstance(y, list):
            if len(x) != len(y):
                return []
            pairs = [(i, *pair) for i, pair in enumerate(zip(x, y))]
        for i, left, right in pairs:
            if isinstance(left, ast.AST) and isinstance(right, ast.AST):
                inner = _difference(left, right)
                if inner is not None:
                    different.append((field, i, inner))
            elif type(left) is not type(right) or left != right:
                return []
    if len(different) != 1:
        return [] if different else None
    field, i, inner = different[0]
    return [(field, i), *inner]


def _replaceable(tree: ast.AST, path: Path | None) -> Path | None:
    """The path to the nearest expression, here or above, in whose place another one may stand."""
    while path:
        node, parent = _at(tree, path), _at(tree, path[:-1])
        is_value = isinstance(node, ast.expr) and not isinstance(node, _NO_VALUE) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if is_value and not isinstance(parent, ast.JoinedStr | ast.pattern):
            return path
        path = path[:-1]
    return None


def _in_function(tree: ast.AST, path: Path) -> bool:
    """Whether a node runs when a function is called, not when it is defined."""
    for depth in range(len(path)):
        node, field = _at(tree, path[:depth]), path[depth][0]
        if isinstance(node, _FUNCTIONS) and field == "body":
            return True
    return False


def _at(tree: ast.AST, path: Path) -> Any:
    node: Any = tree
    for field, i in path:
        node = getattr(node, field) if i is None else getattr(node, field)[i]
    return node


def _replace(tree: ast.AST, path: Path, new: ast.AST) -> None:
    parent, (field, i) = _at(tree, path[:-1]), path[-1]
    if i is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[i] = new


def _has_docstring(node: ast.Module | ast.FunctionDef) -> int:
    return int(ast.get_docstring(node, clean=False) is not None)


def _imports_end(tree: ast.Module) -> int:
    """The index after the docstring and `from __future__` imports."""
    future = [i for i, s in enumerate(tree.body) if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
    return max([_has_docstring(tree), *(i + 1 for i in future)])
