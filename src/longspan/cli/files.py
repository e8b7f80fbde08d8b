"""Files that commands write: refused before anything is computed for them, or in one line where writing fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from longspan.cli.app import Refused, refusing


def check(path: Path, what: str, endings: Sequence[str] = ()) -> None:
    """Refuse a path that no file can be written to; `endings`: those that its name may have, without the dot."""
    folder = path.absolute().parent
    with refusing(f"{what}: {path}", OSError):
        if not folder.is_dir():
            raise Refused(f"{what}: there is no directory {folder}")
        if path.is_dir():
            raise Refused(f"{what}: expected a file to write, {path} is a directory")
        if endings and path.suffix.lower().removeprefix(".") not in endings:
            raise Refused(f"{what}: expected a name that ends in one of .{', .'.join(sorted(endings))}, got {path}")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise Refused(f"{what}: no permission to write {path}")


def picture_endings() -> tuple[str, ...]:
    """What matplotlib can write; nothing where it is not installed, which is said when it is to draw."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return ()
    return tuple(FigureCanvasBase.get_supported_filetypes())
