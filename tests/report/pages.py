"""A browser for tests: Debian's Chromium (or another that is installed) driven by Playwright, which downloads nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import longspan as ls
from longspan._report.page import page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
NO_BROWSER = "no browser is installed"


@contextmanager
def browser() -> Iterator[Any]:
    """A browser, or the test is skipped with the reason."""
    api = pytest.importorskip("playwright.sync_api", reason=f"{NO_BROWSER}: playwright, which drives it, is missing")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"{NO_BROWSER}: looked for {', '.join(NAMES)}")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        try:
            yield found
        finally:
            found.close()


def page_of(plan: ls.Plan, *, title: str | None = None) -> str:
    """The HTML text of a plan's report page."""
    return page(plan.report(), plan.considered(), title=title)
