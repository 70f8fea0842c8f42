"""How a prescription goes from single remedies to combinations, with trials whose outcome is made up."""

import io
import json

import pytest

from vitclinic._core.callback import Callback
from vitclinic._core.errors import DamagedFileError, RunError
from vitclinic.experiments.prescribe import arms, ledger, plan
from vitclinic.experiments.prescribe.conduct import prescribe
from vitclinic.training import build_recipe

from .made import RECIPE, STEP_COSTS, made_world, pretended_trials

RATE, EMA, CLIP, WIDE = "optimizer.lr=0.01", "ema=0.9", "clip=1", {"wide": {"model.embed_dim": 32}}
FOUR = [RATE, EMA, CLIP, WIDE]


class Listening(Callback):
    def __init__(self):
        self.stages, self.left_out, self.kept = [], {}, []

    def on_trial_plan(self, plan, arms, left_out, used, budget):
        self.plan, self.arms, self.left_out = plan, [arm.name for arm in arms], dict(left_out)

    def on_stage(self, decided):
        self.stages.append(decided)

    def on_tried(self, tried, kept):
        self.kept.append(kept)


@pytest.fixture(scope="module")
def clock():
    with made_world() as made:
        yield made


@pytest.fixture
def asked(tmp_path, clock):
    def ask(gains, out="out", remedies=FOUR, budget=800, **more):
        listener = Listening()
        with pretended_trials(gains) as seen:
            found = prescribe(
                {**RECIPE, **more.pop("recipe", {})},
                remedies=remedies,
                budget=budget,
                out=tmp_path / out,
                callbacks=[listener, *more.pop("callbacks", [])],
                **more,
            )
        return found, seen, listener

    return ask


def without_timing(found):
    return {key: value for key, value in found.record().items() if key != "timing"}


def test_combinations_grow_from_the_best_while_they_improve(asked):
    gains = {"wide": 0.20, RATE: 0.10, EMA: 0.05, CLIP: -0.01}
    found, seen, listener = asked(gains)
    assert [set(stage) for stage in seen[:-1]] == [
        {"plain", "wide", RATE, EMA, CLIP},
        {"plain", "wide", f"wide + {RATE}", f"wide + {EMA}"},  # clip did not beat the plain recipe
        {"plain", f"wide + {RATE}", f"wide + {RATE} + {EMA}"},
    ]
    assert listener.kept == [["wide", RATE, EMA], [f"wide + {RATE}"], [f"wide + {RATE} + {EMA}"]]
    assert set(seen[-1]) == {"plain", f"wide + {RATE} + {EMA}"}
    assert found.effect.mean == pytest.approx(0.35)
    assert (
        found.recipe.plain()
        == build_recipe(
            {**RECIPE, "model": {**RECIPE["model"], "embed_dim": 32}, "ema": 0.9}, ["optimizer.lr=0.01"]
        ).plain()
    )
    network = (
        "vit_tiny_fitted (patch_size 4, embed_dim {width}, depth 1, num_heads 2, class_token False, global_pool avg)"
    )
    assert found.changes == [
        f"network: {network.format(width=16)} becomes {network.format(width=32)}",
        "learning rate: 0.0001 becomes 0.01",
        "averaged weights (ema): none becomes 0.9",
    ]


def test_it_stops_where_nothing_is_gained_by_more(asked):
    found, seen, _ = asked({"wide": 0.2, RATE: 0.1, f"wide + {RATE}": -0.15, EMA: 0.1, f"wide + {EMA}": -0.2})
    assert len(seen) == 3  # singles, one growth, the final
    assert found.winner.name == "wide"


def test_what_made_the_best_worse_is_not_tried_again(asked):
    gains = {"wide": 0.2, RATE: 0.1, f"wide + {RATE}": -0.15, EMA: 0.05, CLIP: 0.01}
    _, seen, _ = asked(gains)
    assert f"wide + {RATE}" in seen[1]
    assert set(seen[2]) == {"plain", f"wide + {EMA}", f"wide + {EMA} + {CLIP}"}


def test_where_nothing_beats_the_plain_recipe_the_best_is_still_compared(asked):
    found, seen, _ = asked({"wide": -0.2, RATE: -0.1, EMA: -0.3, CLIP: -0.1})
    assert len(seen) == 2
    assert found.verdict == "nothing helped"
    assert found.recipe == found.plain


def test_what_does_not_go_together_is_left_out_with_the_reason(asked):
    remedies = ["optimizer.lr=0.01", "optimizer.lr=0.1", "helping", "neutral", {"alter": {"model.name": "alternet18"}}]
    remedies.append({"deep": {"model.depth": 2}})
    gains = {"helping": 0.2, "neutral": 0.15, "alter": 0.1, "deep": 0.05, "optimizer.lr=0.01": 0.02}
    found, seen, _ = asked({**gains, "optimizer.lr=0.1": 0.01}, remedies=remedies, budget=1200)
    # Two step rules in one recipe are an error of the treatments; two values of one key are one of ours.
    assert "At most one" in found.left_out["helping + neutral"]
    assert "neutral + helping" not in found.left_out  # once is enough
    assert "both change the network" in found.left_out.values()
    assert all("optimizer.lr=0.01 + optimizer.lr=0.1" not in arm for stage in seen for arm in stage)
    assert any(reason == "both set optimizer.lr" for reason in found.left_out.values())


def test_an_order_that_a_treatment_asks_for_is_found(asked):
    recipe = {"model": {**RECIPE["model"], "class_token": True, "global_pool": "token"}}
    gains = {"local_attention(kernel=3)": 0.2, "gap_head": 0.1}
    remedies = [{"local_attention": {"kernel": 3}}, "gap_head"]
    found, _, _ = asked(gains, remedies=remedies, recipe=recipe)
    assert found.winner.name == "gap_head + local_attention(kernel=3)"
    assert not found.left_out  # the order that does not go is not told


def test_every_arm_has_the_same_time(asked):
    gains = {"helping": 0.2, RATE: 0.1, EMA: 0.1, "wide": 0.05}
    found, _, listener = asked(gains, remedies=["helping", RATE, EMA, WIDE], budget=450)
    assert [decided.stage.name for decided in listener.stages] == [
        "rung 1",
        "growth 1",
        "growth 2",
        "growth 3",
        "final",
    ]
    for decided in listener.stages:
        assert decided.stage.seconds < 30  # the budget binds, not the recipe's own length
        for arm in decided.arms:
            cost = STEP_COSTS["helping"] if "helping" in arm.name else 1.0
            assert 0 <= decided.stage.seconds - cost * decided.steps[arm.name] < cost
    assert sum(stage.planned for stage in listener.plan) <= 450
    # And so has the recipe that is prescribed: 15 steps that cost two, where the plain one has 30.
    assert found.recipe.steps == 15


@pytest.mark.parametrize("length", [{"epochs": 15, "steps": None}, {"max_time": "30s", "steps": None}])
def test_the_prescribed_recipe_takes_the_time_of_the_plain_one_in_its_own_unit(asked, length):
    """100 images in batches of 50: 30 steps of 1 s; with `helping`, which costs two, 15 of them."""
    recipe = {**length, "schedule": {"name": "cosine", "warmup": "3 epochs"}}
    found, _, _ = asked({"helping": 0.2}, remedies=["helping"], recipe=recipe)
    if "epochs" in length:
        assert (found.recipe.epochs, found.recipe.schedule.warmup) == (7.5, "20.00%")
        assert "epochs: 15 becomes 7.5" in found.changes
    else:
        assert (found.recipe.max_time, found.recipe.schedule.warmup) == ("30s", "3 epochs")
    assert len([change for change in found.changes if "steps" in change]) == 0


def test_more_images_a_step_mean_fewer_steps_an_epoch_in_the_same_time(asked):
    """The made cost of a step does not depend on the batch: half of it would be twice the steps of an epoch."""
    found, _, _ = asked({"batch_size=25": 0.2}, remedies=["batch_size=25"], recipe={"epochs": 15, "steps": None})
    assert (found.recipe.epochs, found.recipe.batch_size) == (7.5, 25)


def test_a_remedy_too_dear_for_its_trials_is_left_out(asked):
    found, seen, listener = asked({}, remedies=["dear", RATE, EMA])
    assert "dear" not in seen[0]
    assert "a step takes 25 s: a trial of" in listener.left_out["dear"]
    assert "dear" in found.left_out


def test_the_last_of_the_list_are_left_out_where_the_time_is_not_enough(asked):
    _, _, listener = asked({}, remedies=FOUR, budget=90)
    assert listener.arms == [RATE]
    assert listener.left_out[EMA] == listener.left_out["wide"] == "the budget has no time for it"


def test_unless_some_are_named_the_first_twelve_that_apply_are_tried(asked, monkeypatch):
    monkeypatch.setattr(ledger, "measure_costs", lambda recipes, *rest: [ledger.Cost(1.0, 0.0)] * len(recipes))
    _, _, listener = asked({}, remedies=None, budget=20_000)
    assert len(listener.arms) == plan.MOST == 12
    assert listener.left_out["talking_heads"] == "the first 12 are tried; name others"
    assert [stage.arms for stage in listener.plan] == [13, 7, 5, 5, 5, 2]


def test_growing_that_ends_early_leaves_time_for_more_pairs(asked, monkeypatch):
    monkeypatch.setattr(plan, "FINAL_SEEDS", (3, 6))
    _, _, listener = asked({"wide": 0.2}, budget=450)
    assert listener.plan[-1].seeds == 3
    assert len(listener.stages[-1].seeds) == listener.stages[-1].stage.seeds == 6
    _, _, grown = asked({"wide": 0.2, RATE: 0.1, EMA: 0.1, CLIP: 0.1}, out="grown", budget=450)
    assert len(grown.stages) == 5


@pytest.mark.parametrize("event", ["on_stage", "on_tried"])
def test_a_machine_slower_than_planned_shortens_what_is_left(asked, clock, event):
    class Slow(Callback):
        def on_stage(self, decided):
            clock.now += 150 * (event == "on_stage" and decided.stage.name == "rung 1")

        def on_tried(self, tried, kept):
            clock.now += 150 * (event == "on_tried" and tried.name == "rung 1")  # of 450, where 63 are planned

    gains = {"wide": 0.2, RATE: 0.1, EMA: 0.1, CLIP: 0.1}
    found, _, listener = asked(gains, budget=450, callbacks=[Slow()])
    planned, decided = listener.plan, [stage.stage for stage in listener.stages]
    assert decided[0] == planned[0]
    slowness = 150 / planned[0].planned if event == "on_stage" else 1.0  # how much slower the first rung was
    rest = sum(stage.planned for stage in planned[1:])
    assert decided[1].seconds == pytest.approx(planned[1].seconds * 300 / (slowness * rest), rel=1e-3)
    assert [stage.seeds for stage in decided] == [stage.seeds for stage in planned]
    assert found.used == pytest.approx(150)


class PowerCutError(Exception):
    """The power goes."""


def test_cut_off_anywhere_it_goes_on_to_the_same_answer_with_the_costs_it_had(asked, monkeypatch):
    """Before and after each time that the ledger is written."""
    monkeypatch.setattr(ledger, "measure_costs", lambda recipes, *rest: [ledger.Cost(1.0, 0.0)] * len(recipes))
    monkeypatch.setattr(ledger, "measure_cost", lambda *parts: ledger.Cost(1.0, 0.0))
    gains, remedies = {"wide": 0.20, RATE: 0.10, EMA: 0.05}, [RATE, EMA, WIDE]
    whole, stages, _ = asked(gains, out="whole", remedies=remedies)
    assert len(stages) == 4
    real, cuts = ledger.write_json, {"writes": 0, "at": None, "after": False}

    def cutting(path, data):
        cuts["writes"] += 1
        if cuts["writes"] != cuts["at"]:
            return real(path, data)
        if cuts["after"]:
            real(path, data)
        raise PowerCutError

    monkeypatch.setattr(ledger, "write_json", cutting)
    asked(gains, out="counted", remedies=remedies)
    writes = cuts["writes"]
    assert writes > 15
    for at in range(1, writes + 1):
        for after in (False, True):
            cuts.update(writes=0, at=at, after=after)
            with pytest.raises(PowerCutError):
                asked(gains, out=f"cut-{at}-{after}", remedies=remedies)
            cuts.update(at=None)
            found, _, _ = asked(gains, out=f"cut-{at}-{after}", remedies=remedies)
            assert without_timing(found) == without_timing(whole)


def test_a_ledger_of_an_older_version_is_a_sentence(asked, tmp_path):
    asked({"wide": 0.2}, remedies=[WIDE])
    file = tmp_path / "out" / "plan.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "schema": 1, "candidates": [["sam"]]}))
    with pytest.raises(
        RunError, match="of another version of vitclinic, which cannot be continued here: choose another"
    ):
        asked({"wide": 0.2}, remedies=[WIDE])
    file.write_text(json.dumps({**stored, "schema": 1, "decided": []}))
    assert asked({"wide": 0.2}, remedies=[WIDE])[0].winner.name == "wide"  # nothing was tried: nothing is lost


@pytest.mark.parametrize(
    "change",
    [
        {"used": "x"},
        {"used": -1.0},
        {"costs": []},
        {"costs": {"plain": {"step": "x", "image": 1.0}}},
        {"candidates": [[{"name": "wide"}]]},
        {"plan": [{"name": 1}]},
        {"decided": [{}]},
        {"reasons": {"a": 1}},
        "[" * 200_000,
        "[]",
    ],
    ids=str,
)
def test_a_damaged_ledger_is_a_sentence(asked, tmp_path, change):
    asked({"wide": 0.2}, remedies=[WIDE])
    file = tmp_path / "out" / "plan.json"
    stored = json.loads(file.read_text())
    file.write_text(change if isinstance(change, str) else json.dumps({**stored, **change}))
    with pytest.raises(DamagedFileError, match=r"is damaged.*remove it, or choose another `out`"):
        asked({"wide": 0.2}, remedies=[WIDE])


def test_it_explains_itself_by_the_exam(asked, monkeypatch, tmp_path):
    reasons = [
        arms.Reason("wide", "Narrow", "problem", "It is narrow: 16.", {"norms.width": 16.0}, "more room", "p"),
        arms.Reason("dear", "Poor", "notice", "It is poor.", {}, "w", "p"),
    ]
    remedies = [arms.find_remedy(entry, build_recipe(RECIPE)) for entry in (WIDE, "dear")]
    monkeypatch.setattr(
        "vitclinic.experiments.prescribe.conduct.read_reasons",
        lambda run, recipe: list(zip(remedies, reasons, strict=True)),
    )
    found, _, listener = asked({"wide": 0.2, RATE: 0.1}, examined="runs/a")
    assert listener.arms == ["wide", RATE, EMA, CLIP]  # what was found comes first
    stored = json.loads((tmp_path / "out" / "prescription.json").read_text())
    wide, rate = stored["tried"][0], stored["tried"][1]
    assert (wide["name"], wide["stage"], wide["gain"]) == ("wide", "growth 1", pytest.approx(0.2))
    assert wide["overrides"] == {"model": {"embed_dim": 32}}
    assert wide["reasons"][0]["statement"] == "It is narrow: 16."
    assert (rate["stage"], rate["reasons"]) == ("rung 1", [])

    # The reasons of the first time are kept: the table does not change because the exam has.
    monkeypatch.setattr(
        "vitclinic.experiments.prescribe.conduct.read_reasons", lambda run, recipe: [(remedies[0], reasons[1])]
    )
    assert without_timing(asked({"wide": 0.2, RATE: 0.1}, examined="runs/a")[0]) == without_timing(found)


def test_what_is_printed_tells_the_plan_the_changes_and_the_reasons(asked, monkeypatch):
    from rich.console import Console

    from vitclinic.experiments.display import PrescriptionDisplay, show_prescription

    remedy = arms.find_remedy(WIDE, build_recipe(RECIPE))
    reason = arms.Reason("wide", "Narrow", "problem", "It is narrow.", {"norms.width": 16.0}, "more room", "p")
    monkeypatch.setattr("vitclinic.experiments.prescribe.conduct.read_reasons", lambda run, recipe: [(remedy, reason)])
    console = Console(width=200, file=io.StringIO())
    found, _, _ = asked(
        {"wide": 0.2}, examined="a", callbacks=[PrescriptionDisplay(console)], remedies=[WIDE, EMA, "dear"]
    )
    show_prescription(found, console)
    text = " ".join(console.file.getvalue().split())
    assert "2 remedies to try: wide, ema=0.9" in text
    assert "rung 1: 3 arms x 1 seed, on val, 30 s per trial, about 1.5 min; tells 10.7 points" in text
    assert "assumed to be 1 point" in text
    assert "left out: dear (a step takes 25 s" in text
    assert "network: vit_tiny_fitted (patch_size 4, embed_dim 16" in text
    assert "seed plain wide 100 30.1% 50.1%" in text
    assert "arm rung 1 wide +20.0% plain 30.0%" in text
    assert "finding number remedy gain Narrow norms.width 16 wide +20.0% (rung 1)" in text
