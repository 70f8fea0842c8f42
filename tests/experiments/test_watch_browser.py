"""The live page in a browser: curves grow while rows are written; by keyboard, on a phone, offline. Needs chromium."""

import shutil
import threading
from itertools import pairwise
from urllib.parse import urlsplit

import pytest

from tests.experiments.test_watch import HOSTILE, append, row, write_run
from vitclinic.experiments.watch.server import WatchServer

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("There is no chromium (apt-get install chromium).", allow_module_level=True)
api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright).")

LAST_STEP = """() => { const plot = document.querySelector('[data-panel="loss"] .plot');
  const traces = (plot?.data ?? []).filter((trace) => trace.hovertemplate);
  return Math.max(0, ...traces.flatMap((trace) => trace.x)); }"""


@pytest.fixture
def folder(tmp_path):
    for number, lr in enumerate((1e-4, 1e-3, 1e-2)):
        rows = [row(step, loss=2.0 - number * step / 100) for step in range(1, 21)]
        results = {"test": {"accuracy": 0.5 + number / 10}}
        write_run(tmp_path / f"done-{number}", rows, "finished", lr=lr, results=results)
    write_run(tmp_path / HOSTILE, [row(step) for step in range(1, 11)], started="2026-06-01T00:00:00Z")
    return tmp_path


@pytest.fixture
def page(folder):
    trouble = []
    with WatchServer(folder, port=0) as server, api.sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda said: trouble.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda asked: _ours(asked.url, server) or trouble.append(asked.url))
        page.goto(server.address)
        page.wait_for_function("document.documentElement.dataset.looks > 0")
        yield page
        assert trouble == []
        browser.close()
        server.shutdown()


def _ours(url, server):
    parts = urlsplit(url)
    return parts.scheme in ("data", "blob") or parts.netloc == f"127.0.0.1:{server.server_port}"


def test_the_live_page_as_a_user_meets_it(page, folder):
    # Curves grow while rows are written.
    assert page.evaluate(LAST_STEP) == 10
    append(folder / HOSTILE, [row(step) for step in range(11, 31)] + [row(30, "val", accuracy=0.75)])
    page.wait_for_function(f"({LAST_STEP})() === 30")
    page.wait_for_selector("[data-panel=accuracy] .plot .point")
    assert HOSTILE in page.locator("#cards h3").first.text_content()
    assert "left" in page.locator("#cards").text_content()
    # Every run is in the table; heads sort it, words filter it.
    names = "[...document.querySelectorAll('#table tbody th')].map((cell) => cell.textContent)"
    assert set(page.evaluate(names)) == {HOSTILE, "done-0", "done-1", "done-2"}
    page.get_by_role("button", name="test accuracy").click()
    assert page.evaluate(names)[0] == "done-2"
    page.get_by_role("button", name="test accuracy").click()
    assert page.evaluate(names) == ["done-0", "done-1", "done-2", HOSTILE]
    page.get_by_label("Filter").fill("lr>5e-4 status=finished")
    assert page.evaluate(names) == ["done-1", "done-2"]
    assert page.locator("#count").text_content() == "2 of 4 runs"
    assert page.locator("#parallel .scatterlayer .trace").count() == 2
    # Runs are shown by keyboard.
    box = page.get_by_label("show done-1")
    box.focus()
    page.keyboard.press("Space")
    page.wait_for_function("document.querySelectorAll('#cards article').length === 2")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "show done-1"
    page.wait_for_function("document.querySelector('[data-panel=loss] .plot').data.length >= 4")
    # Nothing overflows on a phone, and the dark theme reaches the figures.
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_function("document.documentElement.scrollWidth <= 390")
    row_heights = "[...document.querySelectorAll('#table tbody tr')].map((line) => line.getBoundingClientRect().height)"
    assert max(page.evaluate(row_heights)) < 120  # names wrap, as they often differ at their end alone
    page.get_by_role("button", name="Dark").click()
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    page.wait_for_function(
        "getComputedStyle(document.querySelector('[data-panel=loss] .ytick text')).fill === 'rgb(215, 220, 226)'"
    )
    # On paper it is light, and dark again on the screen.
    fill = "getComputedStyle(document.querySelector('[data-panel=loss] .ytick text')).fill"
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(f"{fill} !== 'rgb(215, 220, 226)'")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    page.wait_for_function(f"{fill} === 'rgb(215, 220, 226)'")
    # A constant learning rate can be read off, as numbers between powers of ten; looks are not read aloud.
    ticks = """(panel) => [...document.querySelectorAll(`[data-panel='${panel}'] .ytick text`)]
      .map((tick) => tick.textContent)"""
    assert all(float(tick) >= 0 for tick in page.evaluate(ticks, "learning rate"))
    assert "0.001" in page.evaluate(ticks, "learning rate")
    assert "0.5" in page.evaluate(ticks, "gradient norm")
    assert page.locator("#pulse[role]").count() == 0


TICKS = """() => [...document.querySelectorAll('[data-panel="gradient norm"] .ytick text')]
  .map((tick) => tick.getBoundingClientRect())"""


@pytest.mark.parametrize("top", [2.3, 4, 9, 14, 60, 90, 300, 1e6])
def test_the_ticks_of_gradient_norms_can_be_read_whatever_they_span(page, folder, top):
    """From 2 up to `top`: less than a decade, about one, nearly two, many."""
    norms = [2 * (top / 2) ** (step / 30) for step in range(31)]
    rows = [row(step, grad_norm=norm) for step, norm in enumerate(norms[1:], 11)]
    for run in folder.iterdir():
        if run.name == HOSTILE:
            (run / "metrics.jsonl").write_text("")
            append(run, [row(10, grad_norm=2.0), *rows])
    page.wait_for_function(f"({LAST_STEP})() === 40")
    page.wait_for_timeout(300)
    boxes = sorted(page.evaluate(TICKS), key=lambda box: box["top"])
    assert len(boxes) >= 2
    assert all(above["bottom"] <= below["top"] + 2 for above, below in pairwise(boxes))


def test_a_run_whose_recipe_lacks_a_key_keeps_its_line(page, folder):
    recipe = folder / "done-1" / "recipe.yaml"
    recipe.write_text("".join(line for line in recipe.open() if "optimizer" not in line))
    page.wait_for_function("document.querySelector('#parallel').textContent.includes('not set')")
    lines = page.evaluate("document.querySelector('#parallel').data.map((trace) => trace.y)")
    assert len(lines) == 3
    assert all(isinstance(place, int | float) for line in lines for place in line)


def test_a_run_that_diverged_leaves_the_losses_of_others_to_be_read(page, folder):
    append(folder / HOSTILE, [row(11, loss=2e10)])
    append(folder / "done-0", [row(21, loss=1.5)])
    page.get_by_label("show done-0").click()
    page.wait_for_function("document.querySelector('[data-panel=loss] .plot').layout.yaxis.type === 'log'")


def test_axes_are_those_in_which_the_drawn_runs_differ_and_their_names_keep_apart(page, folder):
    for number in range(3):
        recipe = folder / f"done-{number}" / "recipe.yaml"
        keys = "".join(f"  a_long_name_of_a_key_{key}: {number}\n" for key in range(8))
        recipe.write_text(recipe.read_text().replace("name: vit_tiny}", "name: vit_tiny}\nothers:\n" + keys))
    running = folder / HOSTILE / "recipe.yaml"  # it has no result, so that its keys are no axes
    running.write_text(running.read_text().replace("batch_size: 50", "batch_size: 51"))
    page.wait_for_function("document.querySelector('#parallel').textContent.includes('of_a_key')")
    label = page.locator("#parallel").get_attribute("aria-label")
    assert label.endswith("test accuracy")
    assert "batch_size" not in label
    places = "[...document.querySelectorAll('#parallel .annotation-text')].map((one) => one.getBoundingClientRect())"
    top = sorted(page.evaluate(places), key=lambda box: (box["top"], box["left"]))[:9]
    assert all(left["right"] < right["left"] for left, right in pairwise(top))


def test_runs_started_by_the_clock_of_the_page(page, folder):
    there = page.context.browser.new_context(timezone_id="Asia/Tokyo").new_page()
    there.goto(page.url)
    there.wait_for_selector("#table tbody tr")
    assert "2026-06-01 09:00:00" in there.locator("#table").text_content()
