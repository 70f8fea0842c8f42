"""Every study of the catalogue: it says what it means, builds what it names, and runs in miniature."""

import json
import math
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from timm.models import is_model

import vitclinic.models  # noqa: F401  (registers our networks)
from tests.reports.made_studies import stored
from vitclinic._core.io import parse_yaml, read_our_yaml
from vitclinic.data import ImageSpec, shapes
from vitclinic.data.augment import check_magnitude
from vitclinic.experiments.study.catalogue import open_study, shipped_studies
from vitclinic.experiments.study.conduct import study
from vitclinic.experiments.study.costs import TWO_CORES, plan_study
from vitclinic.experiments.study.schema import parse_study
from vitclinic.experiments.study.store import read_results
from vitclinic.experiments.study.verdicts import ENOUGH_SEEDS, judge
from vitclinic.probes import known_probes
from vitclinic.training.network import create_network

CLAIMS = list(shipped_studies())

FEW = {
    "images": 12,
    "pairs": 8,
    "draws": 2,
    "trace_draws": 2,
    "density_draws": 1,
    "density_steps": 3,
    "batches": 2,
    "batch": 6,
    "block": 6,
    "points": 3,
    "max_products": 6,
    "repeats": 1,
    "tokens": 8,
    "steps": 2,
}
"""Options of probes that say how much is done, and little enough of it."""


def test_what_we_ship_is_sound_yaml_so_that_it_may_be_read_without_checks() -> None:
    bases = resources.files("vitclinic.experiments.study") / "claims" / "bases"
    for text in (*shipped_studies().values(), *(file.read_text(encoding="utf-8") for file in bases.iterdir())):
        assert read_our_yaml(text) == parse_yaml(text, "a study")


def epochs_measured(asked):
    """The epochs that the measures of a study speak of."""
    at = [int(measure.result.partition("@")[2]) for measure in asked.measures.values() if "@" in (measure.result or "")]
    if any(measure.checkpoint == "early" for measure in asked.measures.values()):
        at += [epoch for recipe in asked.recipes().values() for epoch in recipe.checkpoint.keep_epochs]
    return at + [measure.epoch for measure in asked.measures.values() if measure.epoch is not None]


@pytest.mark.parametrize("claim", CLAIMS)
def test_it_is_named_after_its_claim_and_speaks_of_what_it_measures(claim):
    asked = open_study(claim)
    assert asked.claim == claim
    assert asked.paper in ("park2022", "chen2022", "wang2022", "hyeonwoo2023", "gong2021")
    assert min(asked.seeds_at("cpu"), asked.seeds_at("paper")) >= ENOUGH_SEEDS
    compared = {arm for expected in asked.expectations for term in expected.terms() for arm in named(term)}
    assert compared <= {*dict(asked.all_arms()), *asked.matched, *asked.ladders}


def test_a_result_stored_before_studies_said_it_is_not_taken_for_blind(tmp_path):
    for claim in ("C4", "H2"):
        (tmp_path / f"{claim}.json").write_text(json.dumps(stored(claim=claim)))
    found = read_results(tmp_path)
    assert found["C4"].blind
    assert not found["H2"].blind


@pytest.mark.parametrize(("claim", "measure", "own"), [("H1", "ratio", [4.4 / 5.3]), ("P12", "ape", [-0.562, -0.796])])
def test_the_paper_s_own_numbers_lie_clear_of_the_lines_that_are_ours(claim, measure, own):
    asked = open_study(claim)
    assert not asked.blind
    for expected in (expected for expected in asked.expectations if expected.measure == measure):
        line = expected.than or expected.greater[1]
        assert all(expected.direction * (number - line) > 0.05 for number in own)


IN_A_RECIPE = {
    "weight decay": lambda recipe: recipe.optimizer.weight_decay,
    "rate": lambda recipe: recipe.optimizer.lr,
    "heads": lambda recipe: recipe.model.num_heads,
    "dimension of a head": lambda recipe: recipe.model.embed_dim / recipe.model.num_heads,
    "images": lambda recipe: recipe.data.limit or recipe.data.fraction or 1,
}
"""What the trends of the catalogue are over."""


def is_over(trend, recipes, read):
    """Whether the numbers of a trend are in the ratio of what its arms have, at both ends of a pair."""
    ratios = [read(recipes[arm]) / at for at, term in trend.items() for arm in named(term)]
    return ratios == pytest.approx([ratios[0]] * len(ratios))


@pytest.mark.parametrize("scale", ["cpu", "paper"])
@pytest.mark.parametrize("claim", CLAIMS)
def test_its_trends_are_over_what_the_recipes_of_their_arms_have(claim, scale):
    asked = open_study(claim)
    recipes = asked.recipes(scale=scale)
    for expected in asked.at_scale(scale).expectations:
        trend = expected.grows or expected.falls
        assert trend is None or any(is_over(trend, recipes, read) for read in IN_A_RECIPE.values()), expected.says


def named(term):
    return [term] if isinstance(term, str) else term if isinstance(term, list) else []


def test_the_example_in_the_docs_is_a_study(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "study.md").read_text(encoding="utf-8")
    file = tmp_path / "mine.yaml"
    file.write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    asked = open_study(file)
    assert len(asked.recipes()) == len(asked.recipes(scale="paper")) == 3
    assert asked.recipes()["AdamW"].epochs == 40


@pytest.mark.parametrize("scale", ["cpu", "paper"])
@pytest.mark.parametrize("claim", CLAIMS)
def test_its_recipes_name_known_networks_and_last_as_long_as_it_measures(claim, scale):
    asked = open_study(claim)
    for recipe in asked.recipes(scale=scale).values():
        assert is_model(recipe.model.name)
        assert recipe.steps is not None or recipe.epochs >= max(epochs_measured(asked), default=0)


@pytest.mark.parametrize("claim", CLAIMS)
def test_no_length_of_the_cpu_s_scale_is_left_at_the_paper_s(claim):
    for recipe in open_study(claim).recipes(scale="paper").values():
        assert recipe.steps is not None or recipe.epochs >= 90


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim[0] == "C" and claim != "C3"])
def test_what_is_claimed_of_convergence_comes_with_the_fit(claim):
    assert any(measure.probe == "train_nll" for measure in open_study(claim).measures.values())


@pytest.mark.parametrize("claim", ["W1", "W2", "W7"])
def test_a_study_of_crashes_counts_what_stalls_and_asks_that_something_learns(claim):
    asked = open_study(claim)
    assert {"learns", "diverged"} <= {measure.result for measure in asked.measures.values()}
    assert any(condition.measure == "learns" for condition in asked.conditions)


MINIMA = [claim for claim in CLAIMS if claim[0] == "C" and claim != "C3"]


@pytest.mark.parametrize("claim", MINIMA)
def test_what_is_claimed_of_minima_is_refused_where_a_network_interpolates(claim):
    """A cross-entropy Hessian vanishes there by itself."""
    asked = open_study(claim)
    bounds = [one for one in asked.conditions if asked.measures[one.measure].probe == "train_nll" and one.least]
    classifying = {arm for arm, recipe in asked.recipes().items() if recipe.task.name == "classification"}
    assert {one.least for one in bounds if one.arms is None or set(one.arms) == classifying} == {0.05}
    assert any((one.least, one.most) == (0.3, 1.0) for one in bounds)


@pytest.mark.parametrize("claim", MINIMA)
def test_its_numbers_are_of_one_network_the_last(claim):
    """`test.accuracy` is that of the best checkpoint on val."""
    measures = open_study(claim).measures.values()
    assert not any((measure.result or "").startswith(("test.", "val.")) for measure in measures)
    assert {measure.checkpoint for measure in measures if measure.probe} == {"last"}


@pytest.mark.parametrize("scale", ["cpu", "paper"])
@pytest.mark.parametrize("claim", CLAIMS)
def test_sam_climbs_on_32_images_and_nothing_is_changed_in_silence(claim, scale):
    for recipe in open_study(claim).recipes(scale=scale).values():
        assert all(treatment.m == 32 for treatment in recipe.treatments if treatment.name == "sam")
        check_magnitude(recipe.data.augment.resolve().randaugment)


@pytest.mark.parametrize("claim", ["G2", "G3"])
def test_the_plain_arms_of_patch_losses_are_mixed_alike(claim):
    for scale, cell in (("cpu", 4), ("paper", 16)):
        augments = [recipe.data.augment.resolve() for recipe in open_study(claim).recipes(scale=scale).values()]
        assert {(a.mixup, a.cutmix, a.cutmix_cell, a.repeats) for a in augments} == {(0.0, 1.0, cell, 1)}


def test_what_training_does_has_a_control_before_it():
    for claim in ("P1", "P2", "P3", "P4", "P12", "P13", "P15", "H1", "G1"):
        assert any(measure.checkpoint == "epoch-0" for measure in open_study(claim).measures.values()), claim


def test_the_audit_s_settings_are_in_the_files():
    heads = open_study("P12").recipes()
    assert {recipe.model.embed_dim * recipe.model.keywords.get("mlp_ratio", 4) for recipe in heads.values()} == {384}
    assert [recipe.model.patch_size for recipe in open_study("P14").recipes().values()] == [2, 4, 8]
    assert open_study("P10").recipes()["ResNet"].model.name == "preact_resnet50"
    assert open_study("P11").measures["throughput"].result == "train.images_per_second"
    for claim in ("P6", "P7", "P8", "P9", "P10"):
        assert [(one.measure, one.least) for one in open_study(claim).conditions] == [("learned", 0.6)]


@pytest.mark.parametrize(
    "claim", [*MINIMA[:4], "W1", "P12", *(pytest.param(c, marks=pytest.mark.slow) for c in CLAIMS)]
)
def test_on_null_data_it_is_wrong_less_than_once_in_twenty(claim):
    """No arm differs, nothing exceeds its line, and its conditions hold: a verdict would be false."""
    asked = open_study(claim).model_copy(update={"conditions": []})
    random, trials, seeds = np.random.default_rng(0), 200, range(asked.seeds)
    wrong = sum(
        judge(asked, null_values(asked, seeds, random), seeds).word in ("reproduced", "not reproduced")
        for _ in range(trials)
    )
    assert wrong <= trials * 0.05 + 3 * math.sqrt(trials * 0.05 * 0.95)


def null_values(asked, seeds, random):
    """Numbers of every arm around the line that its comparisons are drawn at, a seed moving all arms alike."""
    lines = {one.measure: line_of(one) for one in asked.expectations}
    arms = [*dict(asked.all_arms()), *asked.matched]
    found = {arm: {seed: {} for seed in seeds} for arm in arms}
    for name, measure in asked.measures.items():
        common = random.normal(size=len(seeds))
        for arm in arms:
            own = random.normal(size=len(seeds))
            for place, seed in enumerate(seeds):
                number = common[place] * (len(arms) > 1 and lines.get(name) is None) + own[place]
                if measure.is_end:
                    number = float(own[place] > 0)
                elif measure.over_units == "trend":
                    number = round(3 * math.tanh(own[place])) / 3
                found[arm][seed][name] = number if lines.get(name) is None else number + lines[name]
    return found


def line_of(expected):
    """The number that an arm alone is compared with; None if arms are compared with each other."""
    pair = expected.greater or expected.less
    alone = pair is not None and isinstance(pair[0], str) and isinstance(pair[1], float)
    return pair[1] if alone else None


@pytest.mark.parametrize("claim", CLAIMS)
def test_its_networks_can_be_built_at_cpu_scale(claim, built):
    for recipe in open_study(claim).recipes().values():
        key = recipe.model.model_dump_json() + str(recipe.treatments)
        if key not in built:
            built[key] = create_network(recipe, ImageSpec(10, 3, (32, 32)))


@pytest.fixture(scope="module")
def built():
    """Networks by what they are, so that arms and studies that share one build it once."""
    return {}


@pytest.mark.parametrize("claim", CLAIMS)
def test_its_minutes_are_those_of_its_flops(claim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the data need not be there
    plan = plan_study(claim)
    assert plan.minutes == max(1, round(plan.flops / TWO_CORES / 60))


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_dry_run_at_the_paper_s_scale_builds_every_network(claim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_study(claim, scale="paper")
    assert len(plan.arms) == len(open_study(claim).recipes(scale="paper"))
    for cost in plan.arms:
        assert cost.parameters > (1e5 if claim == "P12" else 1e6)  # P12 has ViTs as narrow as 48 channels
        assert cost.flops > 1e15 or cost.steps == 1  # C3 measures at initialisation


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """40 training images and 20 each for val and test, of ten classes."""
    folder = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 40), ("val", 20), ("test", 20)):
        for number in range(count):
            image, label, _ = shapes.example(0, split, number)
            place = folder / split / shapes.CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """One for all studies: a run that several ask for is trained once."""
    return tmp_path_factory.mktemp("studies")


def miniature(asked):
    """The same study with probes that look at next to nothing; what it compares stays."""
    plain = asked.model_dump(exclude_defaults=True)
    for measure in plain["measures"].values():
        if "probe" in measure:
            measure["limit"] = 12
            options = dict(measure.get("options", {}))
            for name, field in known_probes()[measure["probe"]].model_fields.items():
                value = options.get(name, field.get_default(call_default_factory=True))
                if name in FEW and isinstance(value, int):
                    options[name] = min(value, FEW[name])
            measure["options"] = options
    return parse_study(plain, asked.claim)


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
def test_it_runs_in_miniature_and_every_measure_has_a_number_somewhere(claim, pictures, pool):
    asked = miniature(open_study(claim))
    epochs = max([2, *epochs_measured(asked)])
    words = ["data.limit=null", "batch_size=20", f"epochs={epochs}", "workers=0"]
    found = study(asked, words, data=pictures, seeds=1, out=pool)
    assert not found.failures
    for name in (name for name, measure in asked.measures.items() if measure.difference is None):
        reasons = {arm: by_seed[0].get(name) for arm, by_seed in found.missing.items()}
        # so early, a curvature may well be negative
        excused = any(reason and reason.endswith("has no logarithm") for reason in reasons.values())
        numbers = [by_seed[0][name] for by_seed in found.values.values()]
        assert excused or any(math.isfinite(number) for number in numbers), reasons
