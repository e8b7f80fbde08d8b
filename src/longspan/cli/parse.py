"""Parsers of option values: masks, sizes, ranks. Errors name the option, the expected value and the given one."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import longspan as ls
from longspan.cli.app import UsageError, describe, usage_errors

if TYPE_CHECKING:
    import torch

SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MAX_COUNT = 1 << 48  # exact as a float, and small enough to multiply in int64
MAX_RANKS = 64  # processes, or virtual ranks, that a command starts
MAX_PLANNED = 512  # devices that share a sequence in a plan
MASKS = ("full", "causal", "sliding_window", "documents", "prefix", "mod")


def count(text: str, what: str) -> int:
    """A whole number, with k, M or G for 1024 and its powers: 8k, 1M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text.strip().replace("_", "").replace(",", ""))
    value = float(match[1]) * SUFFIXES[match[2].lower()] if match else 0
    if not match or not 1 <= value <= MAX_COUNT or value != int(value):
        limit = f", at most {MAX_COUNT >> 30}G" if value > MAX_COUNT else ""
        raise UsageError(f"{what}: expected a number of 1 or more such as 8192, 64k or 1M{limit}, got {text[:40]!r}")
    return int(value)


def processes(text: str) -> int:
    """A number of processes to start."""
    value = count(text, "--processes")
    if value > MAX_RANKS:
        raise UsageError(f"--processes: expected at most {MAX_RANKS}, got {value}; for more ranks, start the command with torchrun")
    return value


def seed(value: int) -> int:
    """A seed that torch accepts."""
    if not -(2**63) <= value < 2**63:
        raise UsageError(f"--seed: expected a whole number of 64 bits, got {value}")
    return value


def heads(text: str) -> tuple[int, int]:
    """(query heads, KV heads): "32/8", or "32" for equal numbers."""
    match = re.fullmatch(r"(\d{1,15})(?:/(\d{1,15}))?", text.strip())
    query_heads, kv_heads = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= kv_heads <= query_heads <= MAX_COUNT or query_heads % kv_heads:
        raise UsageError(
            f"--heads: expected query heads, or query/KV heads such as 32/8, one a multiple of the other, at most {MAX_COUNT}; "
            f"got {text[:40]!r}"
        )
    return query_heads, kv_heads


def device(text: str) -> torch.device:
    """A device from cpu, cuda or auto (the GPU if there is one)."""
    if text not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device: expected auto, cpu or cuda, got {text!r}")
    import torch

    if text == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device: torch finds no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device()) if text != "cpu" and torch.cuda.is_available() else torch.device("cpu")


def factors(text: str | None, what: str, ranks: int) -> dict[int, float]:
    """Factors by rank: "3:1.5,17:2"."""
    by_rank: dict[int, float] = {}
    for part in filter(None, (text or "").split(",")):
        match = re.fullmatch(r"\s*(\d{1,15}):(\d+(?:\.\d+)?)\s*", part)
        if not match or not 0 < float(match[2]) <= MAX_COUNT or int(match[1]) >= ranks:
            raise UsageError(
                f"{what}: expected rank:factor with a rank below {ranks} and a factor above 0, such as 3:1.5, got {part[:40]!r}"
            )
        rank = int(match[1])
        if rank in by_rank:
            raise UsageError(f"{what}: expected one factor per rank, got several for rank {rank}")
        by_rank[rank] = float(match[2])
    return by_rank


# ------------------------------------------------------------------------------------------------------------------------- masks


def mask(text: str, tokens: int) -> Any:
    """A mask from an expression: full, causal, sliding_window(1024), prefix(4096), documents(lengths.txt), mod("module:function"),
    combined with & | ~ and parentheses; or module:function alone."""
    if re.fullmatch(r"[\w.]+:[\w.]+", text.strip()):
        return _imported(text.strip())
    # A path need not be quoted: documents(data/my lengths.txt).
    quoted = re.sub(r"documents\(\s*([^\s\"'\[(][^()]*?)\s*\)", lambda m: f"documents({m[1]!r})", text.strip())
    quoted = re.sub(r"(?<=[(,\s])\d+[kKmMgG](?=\s*[,)])", lambda m: str(count(m[0], "--mask")), quoted)
    try:
        made = _MaskExpression(quoted, tokens).read(_parsed(quoted, text))
        str(made)
        return made
    except (RecursionError, MemoryError):
        raise UsageError(f"--mask: masks nested too deeply: {text[:40]!r}…") from None


def _parsed(quoted: str, text: str) -> ast.expr:
    try:
        return ast.parse(quoted, mode="eval").body
    except (SyntaxError, ValueError):
        raise UsageError(f"--mask: cannot read {text!r}: expected masks such as causal, combined with & | ~ and parentheses") from None


class _MaskExpression:
    def __init__(self, text: str, tokens: int) -> None:
        self.text, self.tokens = text, tokens

    def read(self, node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
            left, right = self.read(node.left), self.read(node.right)
            return left & right if isinstance(node.op, ast.BitAnd) else left | right
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ~self.read(node.operand)
        if isinstance(node, ast.Name):
            return self._named(node, node.id, [])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._named(node, node.func.id, node.args)
        raise UsageError(f"--mask: cannot read {self._source(node)!r} in {self.text!r}: expected masks combined with & | ~")

    def _source(self, node: ast.expr) -> str:
        return ast.get_source_segment(self.text, node) or self.text

    def _named(self, node: ast.expr, name: str, arguments: list[ast.expr]) -> Any:
        if name not in MASKS:
            raise UsageError(f"--mask: unknown mask {name!r} in {self.text!r}: expected one of {', '.join(MASKS)}, or module:function")
        limits = {"full": (0, 0), "causal": (0, 0), "sliding_window": (1, 2), "prefix": (1, 1), "documents": (1, 1), "mod": (1, 1)}
        least, largest = limits[name]
        if not least <= len(arguments) <= largest:
            raise UsageError(
                f"--mask: {name} takes {least if least == largest else f'{least} or {largest}'} values, got {self._source(node)!r}"
            )
        if name in ("full", "causal"):
            return getattr(ls, name)()
        if name == "documents":
            return ls.documents(lengths=self._lengths(arguments[0]))
        if name == "mod":
            return _imported(str(self._value(arguments[0])))
        values = [count(self._source(a), f"--mask: {name}") if self._source(a) != "0" else 0 for a in arguments]
        with usage_errors(f"--mask: {self._source(node)}", ValueError, TypeError, ArithmeticError):
            return getattr(ls, name)(*values)

    def _value(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:
            return self._source(node)

    def _lengths(self, node: ast.expr) -> list[int]:
        value = self._value(node)
        if isinstance(value, list | tuple):
            where, lengths = "--mask: documents([…])", list(value)
            if not lengths or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in lengths):
                raise UsageError(f"{where}: expected whole numbers of 0 or more, got {self._source(node)!r}")
        else:
            where, lengths = f"--mask: documents({value})", _read_lengths(Path(str(value)))
        if sum(lengths) != self.tokens:
            raise UsageError(f"{where}: the lengths sum to {sum(lengths)}, --tokens says {self.tokens}")
        return lengths


def _read_lengths(path: Path) -> list[int]:
    """Document lengths from a file of whole numbers separated by spaces, commas or lines."""
    text = read_text(path, f"--mask: documents({path})")
    lengths = []
    for number, line in enumerate(text.splitlines(), 1):
        for word in line.replace(",", " ").split():
            if not word.isdecimal() or len(word) > 18:
                raise UsageError(f"{path}, line {number}: expected a length, a whole number of 0 or more, got {word[:40]!r}")
            lengths.append(int(word))
    if not lengths:
        raise UsageError(f"{path}: expected document lengths, the file has none")
    return lengths


def read_text(path: Path, where: str) -> str:
    """The text of a regular file. Raises a UsageError that begins with `where`."""
    try:
        if path.exists() and not path.is_file():  # opening a FIFO would block
            raise UsageError(f"{where}: expected a regular file")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"{where}: {describe(error) if isinstance(error, OSError) else 'not a text file'}") from None


def _imported(text: str) -> Any:
    """The mask of "module:function", traced. User code may raise anything: every exception becomes a UsageError."""
    module, _, name = text.partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"--mask: expected module:function, got {text!r}")
    sys.path.insert(0, "")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--mask: cannot import {text!r}: {describe(error)}{_where(error)}") from None
    finally:
        sys.path.remove("")
    if not isinstance(value, ls.Mask) and not callable(value):
        raise UsageError(f"--mask: {text!r} is a {type(value).__name__}, expected a mask or a mask_mod function (b, h, q_idx, kv_idx)")
    try:
        made = value if isinstance(value, ls.Mask) else ls.mask_mod(value)
        _ = made.traced
    except (Exception, SystemExit) as error:
        raise UsageError(f"--mask: {text!r} cannot be used as a mask: {describe(error)}") from None
    return made


def _where(error: BaseException) -> str:
    """File and line of the user's module that raised, or nothing."""
    ours = ("<", str(Path(ls.__file__).parent), str(Path(importlib.__file__).parent))
    steps = [step for step in traceback.extract_tb(error.__traceback__) if not step.filename.startswith(ours)]
    return f" ({steps[-1].filename}, line {steps[-1].lineno})" if steps else ""
