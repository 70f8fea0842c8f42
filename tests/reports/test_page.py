"""The page as a text: what is in it, what is not, and what is escaped."""

import base64
import csv
import gzip
import html
import io
import json
import re
import struct
from html.parser import HTMLParser

import numpy as np
import plotly.graph_objects as go
import pytest

from tests.reports.made import HOSTILE, exact, measurement, plugin, several, vit
from vitclinic._core.errors import RecipeError
from vitclinic.reports.figure import DRAWERS, ExamView, Figure, Picture, Table
from vitclinic.reports.frame import format_csv
from vitclinic.reports.page import LIMIT, render, write_report
from vitclinic.reports.summary import USABLE, order_probes

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", 30, 20) + b" made up"


@pytest.fixture
def drawn(monkeypatch):
    """Draws of `accuracy` one figure of the test's choice instead of what it would have."""

    def instead(**parts):
        plain = {
            "name": "made",
            "title": "Made",
            "reading": "Up. Down.",
            "paper": "P (1)",
            "table": Table(("a",), [(1,)]),
        }
        monkeypatch.setitem(DRAWERS, "accuracy", lambda exams: [Figure(**{**plain, **parts})])

    return instead


@pytest.fixture(scope="module")
def page():
    return render(several())


class Tags(HTMLParser):
    """All start tags with their attributes, and all text outside of scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self._inside = [], "", None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag if tag in ("script", "style") else None

    def handle_data(self, data):
        self.text += "" if self._inside else data

    def handle_endtag(self, tag):
        self._inside = None


def carried(page, name):
    """What the page carries packed under this name."""
    content = re.search(f'<script type="text/plain" id="packed-{re.escape(name)}">([^<]*)</script>', page)[1]
    return gzip.decompress(base64.b64decode(content)).decode()


def test_what_users_named_is_text(page):
    found = Tags(page)
    ours = [attributes for tag, attributes in found.tags if tag == "script"]
    assert all(set(one) == {"type", "id"} for one in ours[:-1])
    assert "<script>alert" not in page
    assert HOSTILE in found.text
    for name in re.findall(r'id="packed-(plot-[^"]+)"', page):
        assert "<script" not in carried(page, name), name


def test_nothing_is_loaded_from_elsewhere(page):
    for _, attributes in Tags(page).tags:
        for key in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(key, "#")
            assert value.startswith(("#", "data:")), value
    assert "/home/me" not in html.unescape(page)


def test_long_names_may_break_after_an_underscore_and_stay_text():
    made = measurement("accuracy", scalars={"<b>_x": exact(1)})
    assert "&lt;b&gt;_<wbr>x" in render([ExamView("a", {"accuracy": made})])


def test_the_page_is_small_enough(page):
    assert len(page.encode()) < LIMIT / 2


def test_every_id_is_there_once_and_every_link_leads_somewhere(page):
    found = Tags(page)
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = {attributes["href"][1:] for tag, attributes in found.tags if tag == "a"}
    assert links - {""} <= set(ids)


def test_findings_come_first_and_problems_before_what_is_healthy():
    text = Tags(render([vit()]).partition('id="main"')[2]).text
    order = ["Over-smoothed patches", "Over-confident", "Steady training", "Under a value", "Accuracy and calibration"]
    places = [text.index(word) for word in order]
    assert places == sorted(places)
    for shown in (
        "0.71",
        "0.69 to 0.73",
        "Above 0.6",
        "relative to the published range",
        "patch_diversity",
        "Gong et al.",
    ):
        assert shown in text
    assert "Problem" in text  # by its word, not by its colour alone


def test_every_probe_has_its_section_in_the_order_of_the_groups(page):
    sections = [attributes["id"] for tag, attributes in Tags(page).tags if attributes.get("class") == "probe"]
    assert len(sections) == len(order_probes(several()))
    assert sections.index("probe-accuracy") < sections.index("probe-fourier") < sections.index("probe-cost")


def test_settings_cost_and_date_are_shown(page):
    text = Tags(page).text
    assert "1,000 images, 5 s, 2026-11-16" in text
    assert "2026-11-16 03:54:21 UTC" in text
    assert re.search(r"bins\s+15", text)


def test_what_failed_is_there_with_its_reason_and_what_does_not_apply_in_one_list():
    failed = measurement("fgsm", status="failed", reason="ValueError: it broke")
    reason = "This network has no attention."
    missing = {
        probe: measurement(probe, status="does_not_apply", reason=reason)
        for probe in ("attention_entropy", "attention_distance")
    }
    text = Tags(render([ExamView("a", {"fgsm": failed, **missing})])).text
    assert re.search(r"Failed\s*: ValueError: it broke", text)
    assert text.count(reason) == 1
    assert "attention_entropy, attention_distance" in text
    assert "Attention entropy" not in text


def test_what_was_not_measured_is_one_line_a_reason_for_all_networks():
    late = {"sharpness": "there was no time for it: at least 20 s.", "ntk": "there was no time for it: at least 3 min."}
    unknown = "no family is known for mine.Own: register one as docs/anatomy.md shows."
    other = {"cka": measurement("cka", status="does_not_apply", reason=unknown)}
    exams = [
        ExamView("a", {"accuracy": vit().measurements["accuracy"]}, left_out=late),
        ExamView("b", other, left_out=late),
    ]
    page = Tags(render(exams)).text
    section = page[page.rindex("Not measured") :]
    assert len(re.findall(r"sharpness, ntk\s*: There was no time for it\.", section)) == 1
    assert "sharpness: at least 20 s." in section
    assert re.search(r"cka\s+B\s*b\s*: No family is known for mine\.Own\.", section)
    assert unknown in section


def test_a_probe_without_a_drawer_has_its_numbers_and_a_line_for_each_value():
    page = render([ExamView("a", {"my.own probe": plugin()})])
    assert re.search(r"odd_one\s+0\.5", Tags(page).text)
    plots = [json.loads(carried(page, f"plot-my-own-probe-value-{number}")) for number in (1, 2)]
    assert [len(plot["data"][0]["y"]) if isinstance(plot["data"][0]["y"], list) else 11 for plot in plots] == [11, 11]
    assert plots[1]["layout"]["yaxis"]["title"]["text"] == "&lt;script&gt;alert(1)&lt;/script&gt;"


def test_a_drawer_that_fails_does_not_take_the_page_along(monkeypatch, caplog):
    def broken(exams):
        raise KeyError("an array of another version")

    monkeypatch.setitem(DRAWERS, "norms", broken)
    page = render([vit()])
    assert "cannot be drawn" in caplog.text
    assert "packed-plot-norms-value-1" in page


def test_numbers_are_there_as_csv(drawn):
    drawn(table=Table(("class", "accuracy"), [(HOSTILE, 0.5), ('a,"b"\nc', np.float64(0.25)), ("=1+1", None)]))
    rows = list(csv.reader(io.StringIO(carried(render([vit()]), "csv-made"))))
    assert rows == [["class", "accuracy"], [HOSTILE, "0.5"], ['a,"b"\nc', "0.25"], ["'=1+1", ""]]


def test_numbers_below_zero_stay_numbers():
    assert format_csv(Table(("a",), [(-1.5,), ("-x",)])) == "a\r\n-1.5\r\n'-x\r\n"


def test_pictures_can_be_left_out(drawn):
    plot = go.Figure([go.Image(z=np.zeros((2, 2, 3), dtype=np.uint8)), go.Scatter(y=[1, 2])])
    plot.add_layout_image(source="data:image/png;base64,AAAA")
    drawn(pictures=[Picture(f"of {HOSTILE}", PNG)], plot=plot)
    encoded = base64.b64encode(PNG).decode()
    with_them, without = render([vit()]), render([vit()], images=False)
    assert encoded in with_them
    assert encoded not in without
    assert "1 picture left out" in Tags(without).text
    assert "image" in carried(with_them, "plot-made")
    assert "image" not in carried(without, "plot-made")
    assert "data:image" not in without


def test_heavy_figures_wait_until_they_are_opened(drawn):
    drawn(plot=go.Figure(go.Scatter(y=[1])), heavy=True)
    tags = Tags(render([vit()])).tags
    place = next(at for at, (_, attributes) in enumerate(tags) if attributes.get("id") == "figure-made")
    above = [attributes for tag, attributes in tags[:place] if tag == "details"][-1]
    assert above == {"class": "heavy"}


def test_figures_of_one_name_do_not_collide(monkeypatch):
    made = Figure("same", "T", "R.", "", Table(("a",), []))
    monkeypatch.setitem(DRAWERS, "accuracy", lambda exams: [made, made])
    ids = [attributes.get("id") for _, attributes in Tags(render([vit()])).tags]
    assert "figure-same" in ids
    assert "figure-same-2" in ids


def test_the_title_is_the_networks_or_the_user_s():
    assert "<title>Report: runs/plain</title>" in render([vit()])
    assert "<title>runs/plain, runs/with-sam and &lt;script&gt;" in render(several())
    assert "<title>&lt;i&gt;Mine</title>" in render([vit()], title="<i>Mine")


def test_a_report_is_written_whole_and_is_the_same_again(tmp_path):
    path = write_report(tmp_path / "new" / "report.html", [vit(name="caf\udce9")])
    first = path.read_bytes()
    assert write_report(path, [vit(name="caf\udce9")]).read_bytes() == first
    assert sorted(file.name for file in path.parent.iterdir()) == ["report-labels.csv", "report.html"]


def test_nothing_to_report_on_is_a_sentence():
    with pytest.raises(RecipeError, match="nothing to report on"):
        render([])
    assert "Nothing measured yet" in render([ExamView("a", {})])


def test_a_number_that_is_none_is_shown_as_such():
    one = measurement("accuracy", scalars={"nll": exact(float("nan")), "accuracy": exact(float("inf"))})
    assert one.status in USABLE
    text = Tags(render([ExamView("a", {"accuracy": one})])).text
    assert "not a number" in text
    assert "∞" in text
