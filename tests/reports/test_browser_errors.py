"""Errors as images in a browser: by keyboard, on a phone, on paper, with hostile names, many classes and networks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reports.made import measurement
from tests.reports.made_errors import LONG, NASTY, RTL, errors
from tests.reports.test_browser import Window, browser  # noqa: F401 (a fixture)
from vitclinic._core.records import Finding, Scalar, Suggestion
from vitclinic.reports.figure import ExamView
from vitclinic.reports.page import LIMIT, write_report

pytestmark = pytest.mark.slow

COMMAND = "vitclinic train '<b>my runs</b>/recipe.yaml' 'treatments=[sam]'"
UNNAMED = """() => [...document.querySelectorAll('main a, main button, main summary, main img, main [role=region]')]
  .filter((one) => one.checkVisibility() && !(one.getAttribute('aria-label') || one.getAttribute('alt')
    || one.textContent.trim())).map((one) => one.outerHTML.slice(0, 120))"""
UNLOADED = (
    """() => [...document.querySelectorAll('.album img')].filter((one) => !one.src.startsWith('data:image/')).length"""
)


def exam(seed=0, name="runs/plain", classes=NASTY, **options):
    made = errors(np.random.default_rng(seed), classes, folder=f"/home/me/{NASTY[1]}", **options)
    finding = Finding(
        rule="made",
        title=NASTY[0],
        severity="problem",
        statement=LONG,
        numbers={"slices.weak": Scalar(value=1.0)},
        threshold="ours.",
        basis="heuristic",
        suggestions=(Suggestion(treatment="sam", paper="P", why="W.", command=COMMAND),),
        again="vitclinic examine x",
    )
    measurements = {probe: measurement(probe, seed, **parts) for probe, parts in made.items()}
    return ExamView(name, measurements, (finding,))


@pytest.fixture
def open_page(browser, tmp_path):  # noqa: F811
    """Writes a page about some networks and opens it; nothing may go wrong in it."""
    windows = []

    def opened(exams, **options):
        path = write_report(tmp_path / "report.html", exams)
        assert path.stat().st_size < LIMIT
        windows.append(Window(browser, path.as_uri(), **options))
        windows[-1].page.wait_for_function("document.querySelectorAll('.album img:not([src])').length === 0")
        return windows[-1].page

    yield opened
    for window in windows:
        window.close()


def is_narrow(page, width):
    outside = page.evaluate(
        """(width) => [...document.querySelectorAll('main *')].filter((one) => !one.closest('.scroll, svg, .unseen')
        && one.getBoundingClientRect().right > width + 1).map((one) => one.className || one.tagName)""",
        width,
    )
    return outside == [] and page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_cell_opens_its_images_again_after_they_were_closed(open_page):
    page = open_page([exam(classes=("disc", "ring", "square"))])
    cell = page.locator(".matrix td.wrong a").first
    target = cell.get_attribute("href")
    for _ in range(2):
        cell.click()
        page.wait_for_function("(id) => document.querySelector(id).open", arg=target)
        page.evaluate("(id) => { document.querySelector(id).open = false; }", target)


def test_a_cell_opens_its_images_by_keyboard(open_page):
    page = open_page([exam(classes=("disc", "ring", "square"))])
    cell = page.locator(".matrix td.wrong a").first
    name = cell.get_attribute("aria-label")
    assert "taken for" in name
    assert "images" in name
    target = page.locator(cell.get_attribute("href"))
    assert target.get_attribute("open") is None
    cell.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("(id) => document.querySelector(id).open", arg=cell.get_attribute("href"))
    image = target.locator("img").first
    assert image.is_visible()
    assert image.evaluate("(one) => one.decode().then(() => one.naturalWidth)") == 24
    label, _, predicted = name.partition(":")[0].partition(" taken for ")
    assert image.get_attribute("alt").startswith(f"{label} taken for {predicted}")
    row = page.locator("#probe-errors details.row > summary").nth(1)
    row.focus()
    page.keyboard.press("Space")
    assert row.evaluate("(one) => one.parentElement.open")
    assert page.evaluate(UNNAMED) == []


def test_hostile_names_are_text_and_a_phone_never_scrolls_sideways(open_page):
    page = open_page([exam(), exam(1, NASTY[0])], width=390, height=844, has_touch=True, is_mobile=True)
    page.evaluate("document.querySelectorAll('main details').forEach((one) => { one.open = true; })")
    text = page.inner_text("#main")
    for name in (NASTY[0], NASTY[1], NASTY[2], COMMAND):
        assert name in text
    assert RTL in page.evaluate("document.querySelector('#main').textContent")
    assert page.evaluate("document.querySelectorAll('main script, main b, img:not([data-picture])').length") == 0
    assert page.evaluate("document.querySelectorAll('[onclick], [onerror]').length") == 0
    assert "/home/me" not in page.content()
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(UNLOADED) == 0
    assert is_narrow(page, 390)


def test_on_paper_all_images_are_there(open_page):
    page = open_page([exam(classes=("disc", "ring", "square"))])
    page.evaluate("window.print = () => { window.printed = true; }")
    page.locator("#print").click()
    page.wait_for_function("window.printed")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    hidden = "[...document.querySelectorAll('.album img')].filter((one) => !one.checkVisibility()).length"
    assert page.evaluate(hidden) == 0
    assert page.evaluate(UNLOADED) == 0
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator(".album details.row[open]").count() == 1  # as before: the first suspects


def test_a_thousand_classes(open_page):
    classes = [f"{number} {NASTY[number % len(NASTY)][:40]}" for number in range(1000)]
    page = open_page([exam(classes=classes, images=5000, shown=160)], width=390, height=844)
    assert page.locator(".matrix tbody tr").count() <= 16
    page.locator(".matrix td.wrong a").first.click()
    assert page.locator("#probe-errors details.row[open] img").first.is_visible()
    assert is_narrow(page, 390)


def test_twenty_networks(open_page):
    page = open_page([exam(seed, f"runs/{seed}", shown=160, side=72) for seed in range(20)])
    assert page.locator("#probe-errors .matrix").count() == 20
    fold = page.locator("#probe-errors details.heavy > summary").last
    fold.click()
    assert page.locator("#probe-errors .matrix").last.is_visible()
