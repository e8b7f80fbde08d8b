"""The application: which commands there are, and how they fail.

A command is a module of this package with `register(app)`. To add one, write the module and put its name into COMMANDS.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

COMMANDS = ("plan", "calibrate", "verify", "bench", "demo", "train")


class Refused(Exception):
    """Input that cannot be used. Its one-line message says what and where; the exit code is 2."""


@contextmanager
def refusing(where: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Errors of these kinds inside are about what the user gave, in the option or file `where`."""
    try:
        yield
    except Refused:
        raise
    except kinds as error:
        raise Refused(f"{where}: {said(error)}") from None


def said(error: BaseException) -> str:
    """An error in words. Where its message does not stand alone (a key, an assertion, somebody else's code), its type comes first."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, ValueError | TypeError | ImportError | SyntaxError | AttributeError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# The class of all errors about options and arguments: typer's own or click's, by the version of typer.
_Usage = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def application() -> typer.Typer:
    app = typer.Typer(
        name="longspan",
        help="Attention over sequences too long for one device: see a plan before renting the cluster.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_nothing)
    for name in COMMANDS:
        importlib.import_module(f"longspan.cli.{name}").register(app)
    return app


def _nothing() -> None:
    """Attention over sequences too long for one device: see a plan before renting the cluster."""


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command."""
    command = " ".join(["longspan", *[a for a in arguments[:1] if a in COMMANDS]])
    try:
        code = application()(list(arguments), standalone_mode=False)
    except Refused as error:
        return _refuse(command, str(error))
    except _Usage as error:  # type: ignore[misc]
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
            return 2
        return _refuse(command, error.format_message())  # type: ignore[attr-defined]
    except (typer.Exit, SystemExit) as error:
        return int(getattr(error, "exit_code", getattr(error, "code", 0)) or 0)
    except (typer.Abort, KeyboardInterrupt):
        return _refuse(command, "interrupted", 130)
    return code if isinstance(code, int) else 0


def _refuse(command: str, message: str, code: int = 2) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
    return code
