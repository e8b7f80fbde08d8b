"""The command line. `longspan --help` lists the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code: 0, or 2 with one line on standard error if an option is wrong."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f"longspan: the command line needs typer and rich ({error}): pip install 'longspan[cli]'", file=sys.stderr)
        raise SystemExit(1) from None
    from longspan.cli.app import run

    code = run(list(sys.argv[1:] if arguments is None else arguments))
    if arguments is None and "TORCHELASTIC_RUN_ID" in os.environ:
        # Skip interpreter shutdown: a process group thread that frees a tensor during it aborts the finished rank.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)
