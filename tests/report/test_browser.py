"""The report page in a real browser: drawing, mouse, keyboard, themes, and user text that must not run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.browser import browser, colour_count, open_page, point_at
from tests.report.test_page import EVIL, evil_mask

import longspan as ls
from longspan._report.page_tables import headline_numbers


@pytest.fixture(scope="module", name="chromium")
def one_browser() -> Iterator[Any]:
    """One browser for all tests of this module: it takes seconds to start."""
    with browser() as chromium:
        yield chromium


def test_a_page_of_a_million_tokens_draws_and_answers_to_mouse_and_keyboard(chromium: Any, tmp_path: Path) -> None:
    mask = ls.causal() & ls.documents(lengths=[300_000, *[10_000] * 40, 348_576])
    plan = ls.plan(mask, 1 << 20, ls.Mesh.abstract(16), layout="auto", strategy="exchange", heads=32, kv_heads=8)
    plan.save_html(tmp_path / "big.html")
    page, complaints = open_page(chromium, tmp_path / "big.html")
    for canvas in ("#grid", "#work", "#time", "#matrix"):
        assert colour_count(page, canvas) >= (1 if canvas == "#matrix" else 3), canvas

    script = "Object.fromEntries([...document.querySelectorAll('[data-name]')].map((e) => [e.dataset.name, e.dataset.value]))"
    values = page.evaluate(script)
    assert {k: float(v) for k, v in values.items()} == {k: float(v) for k, (_, v, _) in headline_numbers(plan.report()).items()}

    query, key = 150_000, 20_000  # both in the first document
    point_at(page, "#grid", key / 2**20, query / 2**20)
    text = page.locator("#tile").inner_text()
    tile = int(text.split()[1])
    queries = plan.data.tiles[0].queries
    assert f"full, computed by rank {int(queries.owner[tile])}" in text and "step" in text
    assert abs(int(queries.edges[tile]) - query) < 5000

    whole = page.get_attribute("#grid", "data-view")
    page.mouse.wheel(0, -300)
    page.wait_for_function("(v) => document.querySelector('#grid').dataset.view !== v", arg=whole)
    width = int(page.get_attribute("#grid", "data-view").split()[2])
    assert width < 2**20
    page.locator("#grid").focus()
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


def test_user_names_do_not_run_and_dark_light_and_print_themes_draw(chromium: Any, tmp_path: Path) -> None:
    plan = ls.plan(evil_mask(), 4096, ls.Mesh.abstract(3), heads=4)
    plan.save_html(tmp_path / "evil.html")
    page, complaints = open_page(chromium, tmp_path / "evil.html")
    assert EVIL in page.locator("h1").inner_text() and page.title() != "owned"
    assert page.locator("img").count() == 0

    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    assert light != dark and colour_count(page, "#grid") >= 3
    page.locator("#theme").click()
    assert page.evaluate(background) == light
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(background) == "rgb(255, 255, 255)" and not page.locator("#theme").is_visible()
    assert complaints == []


def test_ulysses_groups_are_named_and_their_ranks_counted(chromium: Any, tmp_path: Path) -> None:
    mesh = ls.Mesh.abstract((2, 3), axis_names=("ring", "ulysses"))
    plan = ls.plan(ls.causal(), 4096, mesh, strategy="ulysses_ring", layout="contiguous", heads=6, kv_heads=3)
    plan.save_html(tmp_path / "two.html")
    page, complaints = open_page(chromium, tmp_path / "two.html")
    point_at(page, "#grid", 0.1, 0.9)
    text = page.locator("#tile").inner_text()
    assert "computed by ranks 3, 4, 5 (each some heads)" in text and "KV from ranks 0, 1, 2 (each some heads), step 1 of 1" in text
    point_at(page, "#work", 0.99, 0.5)
    assert page.locator("#work-tip").inner_text().startswith("Rank 5: ")
    point_at(page, "#matrix", 1.5 / 6, 0.5 / 6)  # the canvas is square
    text = page.locator("#matrix-tip").inner_text()
    assert text.startswith("From rank 0 to rank 1: ") and f"{int(plan.report().matrix[0, 1]) / 2**20:.2f}".rstrip("0") in text
    assert complaints == []


def test_the_timeline_names_the_step_that_the_mouse_points_at(chromium: Any, tmp_path: Path) -> None:
    plan = ls.plan(ls.causal(), 8192, ls.Mesh.abstract(2), strategy="ring", layout="contiguous", heads=8, overlap=True)
    plan.save_html(tmp_path / "time.html")
    page, complaints = open_page(chromium, tmp_path / "time.html")
    timeline = plan.report().timeline
    begin, end = (t[1, 1].item() for t in timeline.forward.compute)  # rank 1 computes rank 0's KV
    width = page.locator("#time").bounding_box()["width"]
    x = 44 + (begin + end) / 2 * (width - 52) / timeline.seconds  # margins of the canvas
    point_at(page, "#time", x / width, 0.6)
    assert page.locator("#time-tip").inner_text().startswith("Rank 1, forward, ")
    assert page.locator("#time-tip").inner_text().endswith("computing step 1.")
    assert complaints == []
