"""A browser for tests: an installed Chromium, driven by Playwright. Nothing is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
NO_BROWSER = "no browser is installed"


@contextmanager
def browser() -> Iterator[Any]:
    """A headless browser. Skips the test if there is none."""
    api = pytest.importorskip("playwright.sync_api", reason=f"{NO_BROWSER}: playwright, which drives it, is missing")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"{NO_BROWSER}: looked for {', '.join(NAMES)}")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        try:
            yield chromium
        finally:
            chromium.close()


def open_page(chromium: Any, path: Path) -> tuple[Any, list[str]]:
    """(page, list that collects its errors, warnings, dialogs and network requests), once the page has drawn itself."""
    page, complaints = chromium.new_page(viewport={"width": 1100, "height": 800}), []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("dialog", lambda d: (complaints.append("a dialog"), d.dismiss()))
    page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(("file:", "blob:", "data:")) else None)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    return page, complaints


def colour_count(page: Any, selector: str) -> int:
    """Number of colours of a canvas, in a sample of its pixels."""
    script = """(s) => {
        const c = document.querySelector(s), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
        for (let i = 0; i < d.length; i += 4 * 37) if (d[i + 3] > 200) seen.add([d[i], d[i + 1], d[i + 2]].join());
        return seen.size;
    }"""
    return int(page.evaluate(script, selector))


def point_at(page: Any, selector: str, x: float, y: float) -> None:
    """Move the mouse over an element; x and y in 0 … 1 of its width and height."""
    element = page.locator(selector)
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
