"""Switches of the environment."""

from __future__ import annotations

import os


def switch(name: str, *, default: bool) -> bool:
    """Whether a variable is 1; the default if it is empty or not set.

    Raises:
        ValueError: It is neither 0 nor 1.
    """
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {text!r}")
    return text == "1" if text else default
