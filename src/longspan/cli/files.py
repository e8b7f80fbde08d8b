"""Output files of commands, checked before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from longspan.cli.app import UsageError, usage_errors


def check(path: Path, what: str, endings: Sequence[str] = ()) -> None:
    """Raise UsageError if no file can be written to a path. `endings`: allowed file name endings, without the dot."""
    folder = path.absolute().parent
    with usage_errors(f"{what}: {path}", OSError):
        if not folder.is_dir():
            raise UsageError(f"{what}: there is no directory {folder}")
        if path.is_dir():
            raise UsageError(f"{what}: expected a file to write, {path} is a directory")
        if endings and path.suffix.lower().removeprefix(".") not in endings:
            raise UsageError(f"{what}: expected a name that ends in one of .{', .'.join(sorted(endings))}, got {path}")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise UsageError(f"{what}: no permission to write {path}")


def picture_endings() -> tuple[str, ...]:
    """Endings that matplotlib can write; empty if it is not installed, which is reported when it draws."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return ()
    return tuple(FigureCanvasBase.get_supported_filetypes())
