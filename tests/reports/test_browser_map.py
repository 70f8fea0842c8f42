"""The image under the pointer of a map of embeddings, in a browser: by mouse, by finger, and gone again."""

from __future__ import annotations

import pytest

from tests.reports.figures.test_embedding_map import view
from tests.reports.made_errors import NASTY
from tests.reports.test_browser import Window, browser  # noqa: F401 (a fixture)
from vitclinic.reports.page import write_report

pytestmark = pytest.mark.slow

PLOT = '.plot[data-figure="embedding-map"]'
PLACE = """(number) => {
  const plot = document.querySelector('.plot[data-figure="embedding-map"]');
  plot.scrollIntoView({ block: "start", behavior: "instant" });
  const box = plot.querySelectorAll(".scatterlayer .point")[number].getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
SHOWN = "!(document.querySelector('.peek')?.hidden ?? true)"


@pytest.fixture
def open_map(browser, tmp_path):  # noqa: F811
    windows = []

    def opened(**options):
        path = write_report(tmp_path / "report.html", [view(classes=NASTY), view(1, "runs/b", classes=NASTY)])
        windows.append(Window(browser, f"{path.as_uri()}#probe-embedding_map", **options))
        windows[-1].page.wait_for_selector(f'{PLOT}[data-state="drawn"]', state="attached")
        return windows[-1].page

    yield opened
    for window in windows:
        window.close()


def hover(page, x, y):
    """Move the mouse over a point until its image is shown: plotly looks at some of the movements only."""
    for _ in range(100):
        page.mouse.move(x - 3, y)
        page.mouse.move(x, y)
        page.wait_for_timeout(100)
        if page.evaluate(SHOWN):
            return
    raise AssertionError("no image is shown")


def test_a_mouse_shows_the_image_of_its_point_and_leaves_it(open_map):
    page = open_map()
    x, y = page.evaluate(PLACE, 5)
    hover(page, x, y)
    wanted = page.evaluate(
        f"""([x, y]) => {{ const plot = document.querySelector('{PLOT}');
        return plot._hoverdata[0].customdata; }}""",
        [x, y],
    )
    listed = page.evaluate(
        "(number) => document.querySelector(`.album img[data-picture='${number}']`)?.src ?? null", wanted
    )
    shown = page.evaluate("document.querySelector('.peek').src")
    assert shown.startswith("data:image/")
    assert listed in (None, shown)
    page.mouse.move(2, 2)
    page.wait_for_function(f"!({SHOWN})")


def test_a_finger_shows_it_too_and_a_phone_does_not_scroll_sideways(open_map):
    page = open_map(width=390, height=844, has_touch=True, is_mobile=True)
    page.touchscreen.tap(*page.evaluate(PLACE, 3))
    page.wait_for_function(SHOWN)
    left, right = page.evaluate(
        "(({ left, right }) => [left, right])(document.querySelector('.peek').getBoundingClientRect())"
    )
    assert 0 <= left < right <= 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
