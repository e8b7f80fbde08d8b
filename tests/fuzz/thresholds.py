"""Smaller constants for longspan, so that tensors of a few tokens take the paths of long sequences.

`lower(tile)` installs an import hook that rewrites module-level constants before longspan is imported: values derived from them, and
default arguments, follow.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import CodeType
from typing import Any

DEFAULT_TILE = 128


def values(tile: int) -> dict[str, dict[str, int | tuple[int, ...]]]:
    """New values by module and constant. With tiles of 128 tokens every constant keeps its value."""
    if tile == DEFAULT_TILE:
        return {}
    return {
        "longspan._masks.block_table": {"BLOCK_SIZE": tile},
        "longspan._masks.classify": {"MAX_SQUARES": 64, "MAX_ELEMENTS": 1 << 10, "SAMPLES": (2, 4)},
        "longspan._masks.range_lookup": {"SUB_BLOCK": 4},
        "longspan._kernels.plain_tiles": {"TILE_KEYS": 2 * tile - 1, "TILE_ELEMENTS": 8 * tile**2},
        "longspan._kernels.rectangles": {"_TILES_AT_ONCE": 5, "_MAX_MASKED_TILES": 3},
        "longspan._kernels.aten": {"_MAX_SCORES_IN_FLIGHT": 1 << 9},
        "longspan._plan.schedule": {"STAGE_TOKENS": 3 * tile},
        "longspan._plan.sharding": {"MAX_VIEWS": 2},
        "longspan._plan.named_layouts": {"MIN_CELL": 2},
        "longspan._engine.kv_exchange": {"SEPARATE_KV_BYTES": 2048},
        "longspan._engine.spec": {"_MAX_JOINTS": 4},
        "longspan._balance.demand": {"EXACT": 1 << 10, "EVALUATIONS": 1 << 9, "CHUNK": 1 << 8},
        "longspan._balance.lead_fill": {"MAX_GROUPS": 6, "MERGE_UNITS": 2},
        "longspan._dropin.dispatcher": {"MAX_PLANS": 4},
        "longspan._dropin.mask_keys": {"MAX_BLOCK_MASKS": 2, "MAX_TENSORS": 4},
    }


def lower(tile: int) -> None:
    """Rewrite the constants of `values(tile)` when their modules are imported.

    Raises:
        RuntimeError: longspan is imported already.
    """
    new = values(tile)
    if not new:
        return
    if "longspan" in sys.modules:
        raise RuntimeError("thresholds: expected to run before longspan is imported, got an imported longspan; run in a new process")
    sys.meta_path.insert(0, _Finder(new))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, new: dict[str, dict[str, Any]]) -> None:
        self.new = new

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self.new:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            raise ImportError(f"thresholds: no module {name}; tests/fuzz/thresholds.py names one that was moved")
        loader = _Loader(name, spec.origin)
        loader.constants = self.new[name]
        return importlib.util.spec_from_file_location(name, spec.origin, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    constants: dict[str, Any]

    def get_code(self, fullname: str) -> CodeType:
        """The module's code with new constants; never from the bytecode cache."""
        tree, missing = ast.parse(self.get_data(self.path)), set(self.constants)
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(node, ast.Assign) and isinstance(target, ast.Name) and target.id in self.constants:
                node.value = ast.parse(repr(self.constants[target.id]), mode="eval").body
                missing.discard(target.id)
        if missing:
            raise ImportError(f"thresholds: {fullname} has no constants {sorted(missing)}; adapt tests/fuzz/thresholds.py")
        return compile(ast.fix_missing_locations(tree), self.path, "exec")
