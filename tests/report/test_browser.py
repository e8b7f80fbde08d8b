"""The page in a real browser: it renders, answers to mouse and keyboard, shows the report's numbers, and runs nothing of the users'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.report.pages import browser
from tests.report.test_page import EVIL, evil_mask

import longspan as ls
from longspan._report.page import figures


def opened(found: Any, path: Path, **options: Any) -> tuple[Any, list[str]]:
    page, complaints = found.new_page(viewport={"width": 1100, "height": 800}, **options), []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("dialog", lambda d: (complaints.append("a dialog"), d.dismiss()))
    page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(("file:", "blob:", "data:")) else None)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    return page, complaints


def colours(page: Any, selector: str) -> int:
    """How many colours a canvas shows, of a sample of its pixels."""
    script = """(s) => {
        const c = document.querySelector(s), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
        for (let i = 0; i < d.length; i += 4 * 37) if (d[i + 3] > 200) seen.add([d[i], d[i + 1], d[i + 2]].join());
        return seen.size;
    }"""
    return int(page.evaluate(script, selector))


def test_a_million_tokens_in_the_browser(tmp_path: Path) -> None:
    with browser() as found:
        lengths = [300_000, *[10_000] * 40, 348_576]
        plan = ls.plan(
            ls.causal() & ls.documents(lengths=lengths),
            1 << 20,
            ls.Mesh.abstract(16),
            layout="auto",
            strategy="exchange",
            heads=32,
            kv_heads=8,
        )
        plan.save_html(tmp_path / "big.html")
        page, complaints = opened(found, tmp_path / "big.html")
        for canvas in ("#grid", "#work", "#time", "#matrix"):
            assert colours(page, canvas) >= (1 if canvas == "#matrix" else 3), canvas

        script = "Object.fromEntries([...document.querySelectorAll('[data-name]')].map((e) => [e.dataset.name, e.dataset.value]))"
        values = page.evaluate(script)
        assert {k: float(v) for k, v in values.items()} == {k: float(v) for k, (_, v, _) in figures(plan.report()).items()}

        grid, box = page.locator("#grid"), page.locator("#grid").bounding_box()
        grid.scroll_into_view_if_needed()
        box = grid.bounding_box()
        q = 150_000  # a query of the first document, and a key before it
        x, y = box["x"] + box["width"] * 20_000.0 / 2**20, box["y"] + box["height"] * q / 2**20
        page.mouse.move(x, y)
        text = page.locator("#tile").inner_text()
        tile = int(text.split()[1])
        side = plan.data.tiles[0].queries
        assert "full, computed by rank" in text and abs(int(side.edges[tile]) - q) < 5000
        assert f"computed by rank {int(side.owner[tile])}" in text and ("step" in text)

        whole = page.get_attribute("#grid", "data-view")
        page.mouse.wheel(0, -300)
        page.wait_for_function("(v) => document.querySelector('#grid').dataset.view !== v", arg=whole)
        width = int(page.get_attribute("#grid", "data-view").split()[2])
        assert width < 2**20
        grid.focus()
        page.keyboard.press("+")
        page.wait_for_function("(w) => Number(document.querySelector('#grid').dataset.view.split(' ')[2]) < w", arg=width)
        before = page.get_attribute("#grid", "data-view")
        page.keyboard.press("ArrowRight")
        page.wait_for_function("(v) => document.querySelector('#grid').dataset.view !== v", arg=before)
        page.keyboard.press("0")
        page.wait_for_function("(v) => document.querySelector('#grid').dataset.view === v", arg=whole)
        page.locator("#work").hover()
        assert "× the mean" in page.locator("#work-tip").inner_text()
        assert complaints == []


def test_names_of_users_run_nothing_and_dark_light_and_print_all_show(tmp_path: Path) -> None:
    with browser() as found:
        plan = ls.plan(evil_mask(), 4096, ls.Mesh.abstract(3), heads=4)
        plan.save_html(tmp_path / "evil.html")
        page, complaints = opened(found, tmp_path / "evil.html")
        assert EVIL in page.locator("h1").inner_text() and page.title() != "owned"
        assert page.locator("img").count() == 0

        background = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(background)
        page.emulate_media(color_scheme="dark")
        dark = page.evaluate(background)
        assert light != dark and colours(page, "#grid") >= 3
        page.locator("#theme").click()
        assert page.evaluate(background) == light
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate(background) == "rgb(255, 255, 255)" and not page.locator("#theme").is_visible()
        assert complaints == []


def test_ranks_that_share_heads_are_named_and_counted_one_by_one(tmp_path: Path) -> None:
    with browser() as found:
        mesh = ls.Mesh.abstract((2, 3), axis_names=("ring", "ulysses"))
        plan = ls.plan(ls.causal(), 4096, mesh, strategy="ulysses_ring", layout="contiguous", heads=6, kv_heads=3)
        plan.save_html(tmp_path / "two.html")
        page, complaints = opened(found, tmp_path / "two.html")
        grid = page.locator("#grid")
        grid.scroll_into_view_if_needed()
        box = grid.bounding_box()
        page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 0.9 * box["height"])
        text = page.locator("#tile").inner_text()
        assert "computed by ranks 3, 4, 5 (each its heads)" in text and "keys from ranks 0, 1, 2 (each its heads), step 1 of 1" in text
        work = page.locator("#work")
        work.scroll_into_view_if_needed()
        box = work.bounding_box()
        page.mouse.move(box["x"] + 0.99 * box["width"], box["y"] + 0.5 * box["height"])
        assert page.locator("#work-tip").inner_text().startswith("Rank 5: ")
        matrix = page.locator("#matrix")
        matrix.scroll_into_view_if_needed()
        box = matrix.bounding_box()
        cell = min(box["width"], box["height"]) / 6
        page.mouse.move(box["x"] + 1.5 * cell, box["y"] + 0.5 * cell)
        told = page.locator("#matrix-tip").inner_text()
        assert told.startswith("From rank 0 to rank 1: ") and f"{int(plan.report().matrix[0, 1]) / 2**20:.2f}".rstrip("0") in told
        assert complaints == []
