"""The typed user script runs; `make lint` checks its types."""

from __future__ import annotations

from tests.typing.user_script import main


def test_the_typed_user_script_runs() -> None:
    main()
