"""The page of a study and the index of all: what is drawn, what is said, and what is escaped."""

import json
import math

import pytest

from tests.reports.made_studies import DIFFERENCES, HOSTILE_ARM, compared, stored
from tests.reports.test_page import Tags, carried
from vitclinic._core.errors import RunError
from vitclinic.experiments.study.catalogue import open_study
from vitclinic.experiments.study.store import describe_changes, tally
from vitclinic.reports.study_page import Claim, count_outcomes, list_entries, render_index, render_study
from vitclinic.reports.study_result import parse_result, read_result


@pytest.fixture(scope="module")
def page():
    return render_study(parse_result(stored()))


def one_seed():
    """One seed: no interval; one run failed, so that the other comparison has no number at all."""
    plain = stored(seeds=[0])
    values = {arm: {"0": seeds["0"]} for arm, seeds in plain["values"].items()}
    del values["AdamW"]["0"]["accuracy"]
    return {
        **plain,
        "values": values,
        "comparisons": [
            compared("SAM lowers the missing rate", "missing_rate", {0: -0.12}, -1, "undecided"),
            compared("and is more accurate", "accuracy", {0: math.nan}, 1, "undecided"),
        ],
        "runs": {HOSTILE_ARM: {"0": "00abcdef"}, "AdamW": {"0": ""}},
        "statuses": {HOSTILE_ARM: {"0": "finished"}, "AdamW": {"0": "Out of <memory>."}},
    }


def test_every_seed_the_mean_and_the_interval_are_drawn_against_the_claimed_side(page):
    plot = json.loads(carried(page, "plot-comparisons"))
    seeds, mean = plot["data"][:2]
    assert seeds["x"] == list(DIFFERENCES)
    found = stored()["comparisons"][0]
    assert mean["x"] == [found["mean"]]
    assert mean["x"][0] + mean["error_x"]["array"][0] == pytest.approx(found["high"])
    assert mean["x"][0] - mean["error_x"]["arrayminus"][0] == pytest.approx(found["low"])
    lower, _, higher, _ = plot["layout"]["shapes"]
    assert (lower["x1"], higher["x0"]) == (0, 0)  # the claim says less, and then greater
    assert lower["x0"] < min(DIFFERENCES)
    assert higher["x1"] > found["high"]


def test_arms_have_their_points_means_and_intervals(page):
    plot = json.loads(carried(page, "plot-measure-3"))
    assert [len(trace["x"]) for trace in plot["data"]] == [5, 1, 4, 1]  # one run has no accuracy
    shares = json.loads(carried(page, "plot-measure-2"))
    assert shares["data"][3]["x"] == [0.2]
    text = Tags(page).text
    assert "1 of 5" in text
    assert "0.3638 to 0.4762" in text  # t's interval of the lower missing rates


def test_every_run_is_linked_with_its_status(page):
    links = [attributes["href"] for tag, attributes in Tags(page).tags if tag == "a" and "pool/" in attributes["href"]]
    assert links == [f"pool/{place}{seed}abcdef/" for place in (0, 1) for seed in range(5)]
    assert Tags(page).text.count("diverged") > 0


def test_the_verdict_comes_first_and_everything_behind_it_is_there(page):
    text = " ".join(Tags(page).text.split())
    places = [
        text.index(words) for words in ("1 of 2 comparisons as claimed", "Table 6: 57.9 -> 39.6%", "97.5% interval")
    ]
    assert text.index("undecided") < places[0]
    for words in ("2026-11-16", "70 min", "vitclinic study C6 --data cifar10 --seeds 5 epochs=5", "Bonferroni"):
        assert words in text
    assert "4 seeds with all numbers, and a verdict takes five" in text


def test_the_command_is_one_that_a_shell_takes_and_names_the_study_s_file():
    changed = {"named": "my study.yaml", "data": ["my photos"], "words": ["treatments=[{sam: {rho: 0.1}}]"]}
    assert parse_result(stored(**changed, scale="paper")).command == (
        "vitclinic study 'my study.yaml' --data 'my photos' --scale paper --seeds 5 'treatments=[{sam: {rho: 0.1}}]'"
    )
    assert "--data" not in parse_result(stored(data=["a", "b"])).command  # which would have both arms take one of them


def test_a_study_that_is_not_blind_says_so(page):
    plain = stored()
    seen = render_study(parse_result({**plain, "study": {**plain["study"], "blind": False}}))
    assert "The rule and the expectations were fixed before any run. Runs are" in Tags(page).text
    assert "The rule was fixed before any run. The claim needs lines" in Tags(seen).text
    assert "so that the verdict is not blind. Runs are" in Tags(seen).text
    assert "the expectations were fixed" not in Tags(seen).text


def test_names_are_text(page):
    assert HOSTILE_ARM not in page
    assert HOSTILE_ARM in Tags(page).text
    labels = json.loads(carried(page, "plot-measure-1"))["layout"]["yaxis"]["ticktext"]
    assert all("<script" not in label for label in labels)
    for name in ("plot-comparisons", "plot-measure-1"):
        assert "<script" not in carried(page, name)


def test_one_seed_has_no_interval_and_a_failed_run_its_reason():
    page = render_study(parse_result(one_seed()))
    plot = json.loads(carried(page, "plot-comparisons"))
    assert [trace["x"] for trace in plot["data"]] == [[-0.12], [-0.12], []]
    assert plot["data"][1]["error_x"]["array"] == [0.0]
    text = Tags(page).text
    assert "Out of <memory>." in text
    assert "nan" not in text.lower().replace("command", "")
    assert "failed" in text


def test_one_comparison_alone_is_drawn():
    plain = stored()
    plain["comparisons"] = plain["comparisons"][:1]
    plain["study"]["expectations"] = plain["study"]["expectations"][:1]
    plot = json.loads(carried(render_study(parse_result(plain)), "plot-comparisons"))
    assert len(plot["data"]) == 2


def test_a_result_without_seeds_numbers_still_shows_mean_and_interval():
    plain = stored()
    for one in plain["comparisons"]:
        del one["numbers"]
    plot = json.loads(carried(render_study(parse_result(plain)), "plot-comparisons"))
    assert [len(trace["x"]) for trace in plot["data"]] == [0, 1, 0, 1]


@pytest.mark.parametrize("content", ["{}", "[1]", "no JSON", json.dumps({**stored(), "schema": 99})])
def test_what_is_no_result_is_one_sentence(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(RunError, match="is not the result of a study, or one that this version cannot read"):
        read_result(tmp_path / "x.json")


def test_the_index_counts_every_claim_and_leads_to_the_pages():
    claims = [Claim("C6", "SAM <b>", "chen2022", "Table 6"), Claim("C7", "more", "chen2022", "Fig. 1")]
    results = {"C6": parse_result(stored()), "mine": parse_result(stored(claim="mine", verdict="not reproduced"))}
    found = list_entries(claims, results)
    assert [entry.claim.name for entry in found] == ["C6", "C7", "mine"]
    assert count_outcomes(found) == {
        **{"reproduced": 0, "not reproduced": 1, "undecided": 0, "not testable here": 0},
        **{"exploratory": 1, "not run yet": 1},
    }
    page = render_index(found)
    links = [attributes["href"] for tag, attributes in Tags(page).tags if tag == "a"]
    assert [link for link in links if link.endswith(".html")] == ["C6.html", "mine.html"]
    assert 'id="packed-plotly"' not in page  # there is nothing to draw
    assert HOSTILE_ARM not in page
    assert "-0.1595 to -0.04048" in Tags(page).text


def test_a_result_of_another_experiment_says_nothing_of_the_claim():
    result = parse_result(stored())
    assert describe_changes(result) == "changed by epochs=5, by a study that this version cannot read"
    counted = count_outcomes(tally({"C6": result}))
    assert (counted["changed"], counted["undecided"], counted["exploratory"]) == (1, 0, 0)
    page = render_index(tally({"C6": result}))
    assert "another experiment than the catalogue's: changed by epochs=5" in page
    shipped = open_study("C6").model_dump(mode="json", exclude_defaults=True)
    as_written = {**stored(study=shipped, words=[]), "comparisons": stored()["comparisons"][:1]}
    assert describe_changes(parse_result(as_written)) == ""
    assert describe_changes(parse_result({**as_written, "data": ["shapes"]})) == "on shapes instead of cifar10"
    shipped["arms"]["SAM"] = {}
    assert describe_changes(parse_result(as_written)) == "by another study of that name"
