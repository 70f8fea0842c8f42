"""Prescriptions whose outcome is known."""

import json

import numpy as np
import pytest

from vitclinic._core.callback import Callback
from vitclinic._core.errors import DataError, RecipeError, RunError
from vitclinic.data import open_data
from vitclinic.data.dataset import Split
from vitclinic.experiments.prescribe import ledger
from vitclinic.experiments.prescribe.conduct import prescribe
from vitclinic.training import build_recipe, train

from .made import RECIPE, made_world, pretended_trials

ARMS = ["neutral", "diverging", "helping", "mistaken", "spatial_smoothing"]


class Listening(Callback):
    def __init__(self):
        self.events, self.stages, self.kept, self.left_out = [], [], [], {}

    def on_trial_plan(self, plan, arms, left_out, used, budget):
        self.events.append("plan")
        self.plan, self.arms, self.left_out = plan, [arm.name for arm in arms], dict(left_out)

    def on_stage(self, decided):
        self.events.append(decided.stage.name)
        self.stages.append(decided)

    def on_tried(self, tried, kept):
        self.kept.append((tried, kept))


@pytest.fixture(scope="module")
def clock():
    with made_world() as made:
        yield made


@pytest.fixture(scope="module")
def first(clock, tmp_path_factory):
    """The prescription that most tests look at, and who listened."""
    listener = Listening()
    out = tmp_path_factory.mktemp("prescription") / "out"
    return prescribe(RECIPE, budget=450, treatments=ARMS, out=out, callbacks=[listener], seed=3), listener


@pytest.fixture
def asked(tmp_path, clock):
    """Asks for a prescription in the test's own folder."""

    def ask(out="out", callbacks=(), treatments=ARMS, budget=450, recipe=RECIPE, **more):
        return prescribe(recipe, budget=budget, treatments=treatments, out=tmp_path / out, callbacks=callbacks, **more)

    return ask


def drop_timing(found):
    return {key: value for key, value in found.record().items() if key != "timing"}


def test_a_treatment_that_truly_helps_is_found_and_prescribed(first, tmp_path):
    found, listener = first
    assert listener.events == ["plan", "rung 1", "final"]
    assert found.verdict == "helps"
    assert found.winner.name == "helping"
    assert found.effect.low > 0.2
    assert found.effect.mean == pytest.approx(found.final.mean("helping") - found.final.mean("plain"))

    # What did not apply is left out with the reason, and stops nothing.
    assert listener.arms == ["neutral", "diverging", "helping"]
    assert "mistake" in listener.left_out["mistaken"]
    assert "spatial_smoothing does not fit" in listener.left_out["spatial_smoothing"]
    # An arm that always diverges is data: it has the accuracy of guessing, and loses.
    rung = found.rungs[0]
    assert rung.diverged("diverging") == len(rung.seeds)
    assert rung.mean("diverging") == pytest.approx(0.1)

    # The recipe file is the given recipe with the treatment, in the same time: its step costs two. `train` takes it.
    text = (found.folder / "prescription.yaml").read_text()
    assert found.statement in text
    prescribed = build_recipe(found.folder / "prescription.yaml")
    assert prescribed == build_recipe({**RECIPE, "treatments": ["helping"], "steps": 15}) == found.recipe
    assert found.changes == ["treatments: none becomes helping", "steps: 30 becomes 15"]
    assert "# change: steps: 30 becomes 15" in text
    run = train(found.folder / "prescription.yaml", steps=2, out=tmp_path / "run")
    assert run.status["status"] == "finished"

    stored = json.loads((found.folder / "prescription.json").read_text())
    assert stored["effect"]["low"] == found.effect.low
    assert stored["rungs"][0]["measure"] == "val accuracy; selection, optimistic"
    assert [arm["arm"] for arm in stored["final"]["arms"]] == ["helping", "plain"]
    assert stored["remedies"] == [{"name": "helping", "overrides": {"treatments": ["helping"]}}]
    assert [one["name"] for one in stored["tried"]] == ["neutral", "diverging", "helping"]


def test_seeds_are_paired_and_the_final_ones_fresh(first):
    found, _ = first
    for tried in (*found.rungs, found.final):
        for arm in tried.arms:
            assert [trial.seed for trial in tried.trials if trial.arm == arm] == list(tried.seeds)
    selection = {seed for rung in found.rungs for seed in rung.seeds}
    assert selection == {3000}
    assert list(found.final.seeds) == [3100, 3101, 3102]


def test_test_images_are_not_read_while_it_selects(asked, monkeypatch):
    hidden = open_data(build_recipe(RECIPE).data).test
    real, seen = Split.read, {"selecting": True, "reads": 0}

    def guarded(split, indices):
        if split.images.digest == hidden.images.digest and np.isin(split.rows[indices], hidden.rows).any():
            assert not seen["selecting"], "a test image was read during selection"
            seen["reads"] += 1
        return real(split, indices)

    class Opening(Callback):
        def on_stage(self, decided):
            seen["selecting"] = decided.stage.name != "final"

    monkeypatch.setattr(Split, "read", guarded)
    found = asked(callbacks=[Opening()], treatments=["neutral", "helping"])
    assert found.rungs
    assert seen["reads"] > 0  # the guard is where images pass


def test_where_nothing_helps_it_says_so_and_writes_no_recipe(asked, tmp_path):
    with pretended_trials({"neutral": -0.01, "harmless": 0.0}):
        found = asked(treatments=["neutral", "harmless"])
    assert found.verdict == "nothing helped"
    assert found.file is None
    assert found.statement.startswith("Nothing helped: the best in the selection, ")
    assert found.recipe == build_recipe(RECIPE)
    assert not (tmp_path / "out" / "prescription.yaml").exists()
    assert json.loads((tmp_path / "out" / "prescription.json").read_text())["verdict"] == "nothing helped"


def test_asked_again_it_is_read_and_not_trained(first, monkeypatch):
    found, _ = first
    monkeypatch.setattr("vitclinic.experiments.runner.train", None)
    monkeypatch.setattr("vitclinic.experiments.prescribe.ledger.measure_costs", None)
    again = prescribe(RECIPE, budget=450, treatments=ARMS, out=found.folder, seed=3)
    assert drop_timing(again) == drop_timing(found)


def test_selection_keeps_no_weights_and_the_final_does(first):
    found, _ = first
    with_weights = {path.parent.parent.parent.name for path in found.folder.rglob("model.safetensors")}
    assert with_weights == {trial.run for trial in found.final.trials}


def test_too_small_a_budget_says_what_would_be_needed(asked, tmp_path):
    with pytest.raises(RecipeError) as caught:
        asked(budget=20, treatments=["neutral", "helping", "harmless"])
    assert "at least" in str(caught.value)
    assert "Comparing one remedy needs about" in str(caught.value)
    assert "3 pairs of trials" in str(caught.value)
    with pretended_trials({}):  # 2 x 3 trials of 10 s, and a reserve
        assert asked(out="enough", budget=75, treatments=["neutral"]).final.seeds


def test_a_place_where_nothing_was_tried_is_free_for_another_question(asked):
    with pytest.raises(RecipeError, match="is too small"):
        asked(treatments=["neutral"], budget=2)
    with pretended_trials({}):
        assert asked(treatments=["neutral"]).winner.name == "neutral"


def test_what_could_not_be_tried_is_tried_again_until_there_is_a_plan(asked, monkeypatch):
    """A package that was missing is installed, memory is free again: the same command goes on."""
    measured = ledger.measure_cost

    def broken(*parts):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ledger, "measure_cost", broken)
    with pytest.raises(RecipeError, match="cannot be trained: RuntimeError: out of memory"):
        asked(treatments=["neutral"])
    monkeypatch.setattr(ledger, "measure_cost", measured)
    with pretended_trials({}):
        assert asked(treatments=["neutral"]).winner.name == "neutral"


def test_mistakes_are_sentences(asked, tmp_path, photo_folder):
    with pytest.raises(DataError, match="has 4 val images, and prescribe selects on them: it needs at least 50"):
        asked(recipe={**RECIPE, "data": str(photo_folder)})
    with pytest.raises(RecipeError, match="'budget': write a time"):
        asked(budget="soon")
    with pytest.raises(RecipeError, match=r"There is no treatment 'helpin'\. Did you mean 'helping'"):
        asked(treatments=["helpin"])
    with pytest.raises(RecipeError, match="has the treatment 'helping' already"):
        asked(recipe={**RECIPE, "treatments": ["helping"]})
    with pytest.raises(RecipeError, match=r"No remedy applies .* mistaken"):
        asked(treatments=["mistaken"])
    with pytest.raises(RecipeError, match="an `out` of its own"):
        asked(recipe={**RECIPE, "out": "here"})
    with pytest.raises(RecipeError, match=r"cannot be trained: .*heads"):
        asked(out="impossible", recipe={**RECIPE, "model": {**RECIPE["model"], "num_heads": 3}})
    with pytest.raises(RecipeError, match=r"There is no remedy 'lr x2'\. Did you mean 'lr x 3'"):
        asked(treatments=None, remedies=["lr x2"])
    with pytest.raises(RecipeError, match=r"changes data\.limit, which all arms have in common"):
        asked(treatments=None, remedies=[{"fewer": {"data.limit": 50}}])
    with pytest.raises(RecipeError, match="'batch_size'"):
        asked(treatments=None, remedies=["batch_size=none"])
    with pretended_trials({}):
        asked(out="mine", treatments=["neutral"])
    with pytest.raises(RunError, match="holds another prescription"):
        asked(out="mine", treatments=["helping"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letters.txt").write_text("dear")
    with pytest.raises(RunError, match="not empty"):
        asked(out="full")


def test_the_recipe_may_have_treatments_of_its_own(asked):
    with pretended_trials({"helping": 0.2}):
        found = asked(recipe={**RECIPE, "treatments": ["context_broadcasting"]}, treatments=["helping"])
    assert found.rungs == []  # one candidate needs no selection
    assert [(one.arm.name, one.stage) for one in found.tried] == [("helping", "final")]
    assert found.verdict == "helps"
    assert found.recipe.treatments.written == ["context_broadcasting", "helping"]
    assert {len(found.final.accuracies(arm)) for arm in found.final.arms} == {len(found.final.seeds)}
