"""The page in a browser: from disk, offline, by keyboard, in the dark, on a phone. Needs chromium."""

from __future__ import annotations

import shutil
from urllib.parse import urlsplit

import pytest

from tests.reports.made import HOSTILE, several
from vitclinic.reports.page import write_report

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("There is no chromium (apt-get install chromium) to open a report in.", allow_module_level=True)
api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright).")

SOFTWARE_GL = (
    *("--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"),
    "--ignore-gpu-blocklist",
)
PATIENCE = 120_000
"""Milliseconds: drawing in software on a busy machine."""

EMPTY = """() => [...document.querySelectorAll('.plot')].filter((plot) => {
  const marks = '.trace path, .trace circle, .points path, .point path, .lines path, .hm image, .heatmaplayer image,'
    + ' .contourlayer path, .polar path, .barlayer path, .shapelayer path, .scatterlayer path, .imagelayer image';
  const drawn = [...plot.querySelectorAll(marks)].some((mark) => mark.getBBox().width + mark.getBBox().height > 0);
  const canvas = plot.querySelector('.gl-container canvas');
  return !drawn && !(canvas && canvas.width > 0);
}).map((plot) => plot.dataset.figure)"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("page") / "report.html", several()).as_uri()


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SOFTWARE_GL)
        yield browser
        browser.close()


class Window:
    """A window with the page, and whatever goes wrong in it."""

    def __init__(self, browser, address, width=1200, height=900, **options):
        self.context = browser.new_context(viewport={"width": width, "height": height}, **options)
        self.context.set_offline(True)
        self.trouble = []
        self.page = page = self.context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda said: self.trouble.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.trouble.append(str(error)))
        page.on("dialog", lambda dialog: (self.trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: _local(request.url) or self.trouble.append(request.url))
        page.goto(address)

    def close(self):
        self.context.close()
        assert self.trouble == []  # nothing went wrong, and nothing has left the disk


@pytest.fixture
def opened(browser, address):
    """Opens the page in a window of its own."""
    windows = []

    def open_page(**options):
        windows.append(Window(browser, address, **options))
        return windows[-1].page

    yield open_page
    for window in windows:
        window.close()


@pytest.fixture(scope="module")
def whole(browser, address):
    """The page with everything drawn, and how many figures waited until they were in sight, or opened."""
    window = Window(browser, address)
    draw_one(window.page)
    waiting = window.page.evaluate("document.querySelectorAll('.plot:not([data-state])').length")
    closed = window.page.evaluate("document.querySelectorAll('.heavy .plot[data-state]').length")
    draw_all(window.page)
    yield window.page, waiting, closed
    window.close()


def _local(url):
    return urlsplit(url).scheme in ("file", "data", "blob")


def draw_all(page):
    """Open what is drawn when opened, and pass every figure, as a reader would."""
    page.evaluate("document.querySelectorAll('main details').forEach((details) => { details.open = true; })")
    for name in page.evaluate("[...document.querySelectorAll('.plot')].map((plot) => plot.dataset.figure)"):
        page.locator(f".plot[data-figure='{name}']").scroll_into_view_if_needed()
        page.wait_for_selector(f".plot[data-figure='{name}'][data-state=drawn]")


def draw_one(page):
    page.locator(".plot").first.scroll_into_view_if_needed()
    page.wait_for_selector(".plot[data-state=drawn]")


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def ink(page):
    """The colour of the first drawn figure's tick labels."""
    return page.evaluate("getComputedStyle(document.querySelector('.plot[data-state=drawn] .ytick text')).fill")


def test_every_figure_is_drawn_when_it_is_seen(whole):
    page, waiting, opened_early = whole
    assert waiting > 0
    assert opened_early == 0
    assert page.evaluate(EMPTY) == []
    assert page.evaluate("document.querySelectorAll('.heavy canvas').length") > 0


def test_hostile_names_are_text(whole):
    page, *_ = whole
    assert page.evaluate("document.querySelectorAll('main script').length") == 0
    assert HOSTILE in page.inner_text("h1")
    legends = page.evaluate("[...document.querySelectorAll('.legendtext')].map((entry) => entry.textContent)")
    assert any(HOSTILE in entry for entry in legends)
    labels = page.evaluate("[...document.querySelectorAll('.plot text')].map((label) => label.textContent).join('|')")
    assert "&lt;" not in labels


def test_sections_open_and_close_by_keyboard(opened):
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    section = page.locator("#probe-cka")
    section.locator("> summary").focus()
    page.keyboard.press("Enter")
    assert section.get_attribute("open") is None
    page.keyboard.press("Space")
    assert section.get_attribute("open") is not None
    page.locator("#fold").focus()
    page.keyboard.press("Enter")
    assert page.locator("details.probe[open]").count() == 0
    assert page.locator("#fold").inner_text() == "Open all"
    page.locator(".contents a", has_text="Cost").click()  # leads into a closed section, and opens it
    page.wait_for_selector("#probe-cost[open]")


def test_dark_follows_the_system_until_somebody_chooses(opened):
    light, dark = opened(color_scheme="light"), opened(color_scheme="dark")
    for page in (light, dark):
        draw_one(page)
    assert background(light) != background(dark)
    bright, dim = ink(light), ink(dark)
    assert bright != dim
    light.locator("#theme").focus()
    light.keyboard.press("Space")
    light.wait_for_selector(".plot[data-theme=dark][data-state=drawn]")
    assert light.get_attribute("#theme", "aria-pressed") == "true"
    assert background(light) == background(dark)
    assert ink(light) == dim
    light.emulate_media(color_scheme="dark")
    light.emulate_media(color_scheme="light")
    assert background(light) == background(dark)  # chosen is chosen


def test_a_phone_never_scrolls_sideways(opened):
    page = opened(width=390, height=844, has_touch=True, is_mobile=True)
    draw_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    outside = page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter((one) => !one.closest('.scroll, svg, .unseen')
        && one.getBoundingClientRect().right > 391).map((one) => one.className || one.tagName)"""
    )
    assert outside == []


def test_numbers_are_shown_and_saved(opened, tmp_path):
    page = opened()
    figure = page.locator("#probe-shape_bias figure").first
    figure.locator("details.table > summary").click()
    figure.locator("table tbody tr").first.wait_for()
    shown = figure.locator("table").inner_text()
    with page.expect_download() as saving:
        figure.locator("button[data-save=csv]").click()
    saving.value.save_as(tmp_path / "numbers.csv")
    text = (tmp_path / "numbers.csv").read_text()
    assert text.splitlines()[0].split(",") == shown.splitlines()[0].split("\t")
    assert len(text.splitlines()) == len(shown.splitlines())


@pytest.mark.parametrize(("form", "begins"), [("png", b"\x89PNG"), ("svg", b"<svg")])
def test_figures_are_saved_as_images(opened, tmp_path, form, begins):
    page = opened()
    with page.expect_download() as saving:
        page.locator(f"#probe-cka button[data-save={form}]").first.click()
    saving.value.save_as(tmp_path / "figure")
    content = (tmp_path / "figure").read_bytes()
    assert content.startswith(begins)
    assert len(content) > 5000


def test_printing_opens_and_draws_everything_in_light(opened):
    page = opened(color_scheme="dark")
    draw_one(page)
    page.evaluate("window.print = () => { window.printed = true; }")
    page.locator("#fold").click()
    page.locator("#print").click()
    page.wait_for_function("window.printed")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function("document.querySelectorAll('.plot:not([data-state=drawn])').length === 0")
    assert page.evaluate("document.querySelectorAll('details.probe:not([open])').length") == 0
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("details.probe[open]").count() == 0
