"""The command line application: its commands and its error messages.

A command is a module of this package with a function of the same name. To add one, write the module and add its name to COMMANDS.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

COMMANDS = ("plan", "calibrate", "verify", "bench", "demo", "train", "generate", "warm", "hub")


class UsageError(Exception):
    """An option or file that cannot be used. The message is printed in one line; the exit code is 2."""


# Of a plan whose sizes are out of range, or whose mask cannot be evaluated.
PLAN_ERRORS = (ArithmeticError, LookupError, MemoryError, RuntimeError)


@contextmanager
def usage_errors(where: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Turn errors of these kinds into a UsageError about the option or file `where`."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        raise UsageError(f"{where}: {describe(error)}") from None


def describe(error: BaseException) -> str:
    """An error as text. The type comes first unless the message is a sentence by itself, as of a ValueError."""
    if _is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, ValueError | TypeError | ImportError | SyntaxError | AttributeError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# The base class of errors about options and arguments: typer's own or click's, depending on the version of typer.
_ClickError = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def application(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """The application with these commands."""
    app = typer.Typer(
        name="longspan",
        help="Exact attention over sequences split across devices.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_callback)
    for name in commands:
        app.command(name)(getattr(importlib.import_module(f"longspan.cli.{name}"), name))
    return app


def _callback() -> None:
    """Exact attention over sequences split across devices."""


def run(arguments: Sequence[str]) -> int:
    """Run a command: its exit code."""
    named = [a for a in arguments[:1] if a in COMMANDS]
    command = " ".join(["longspan", *named])
    try:
        code = application(named or COMMANDS)(list(arguments), standalone_mode=False)
    except UsageError as error:
        return _fail(command, str(error))
    except _ClickError as error:  # type: ignore[misc]
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
            return 2
        return _fail(command, error.format_message())  # type: ignore[attr-defined]
    except (typer.Exit, SystemExit) as error:
        return int(getattr(error, "exit_code", getattr(error, "code", 0)) or 0)
    except (typer.Abort, KeyboardInterrupt):
        return _fail(command, "interrupted", 130)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        sizes = [name for name in ("--tokens", "--context") if any(a.partition("=")[0] == name for a in arguments)]
        advice = f"a smaller {sizes[0]}" if sizes else "smaller sizes"
        return _fail(command, f"out of memory; give {advice}, or more memory to this process", 1)
    return code if isinstance(code, int) else 0


def _is_out_of_memory(error: BaseException) -> bool:
    """torch raises a plain RuntimeError where the host's memory does not suffice; its words depend on the system."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in words)


def _fail(command: str, message: str, code: int = 2) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
    return code
