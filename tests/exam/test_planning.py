"""Exams within a budget: what is planned is remembered, what is stored is kept, and time that runs out is a reason."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import vitclinic
from tests.probes.subjects import noise, vit
from tests.probes.subjects import subject as patient
from vitclinic._core.callback import Callback
from vitclinic._core.errors import ModelError, RecipeError
from vitclinic._core.records import Scalar
from vitclinic._core.time import Time
from vitclinic.exam.timing import Pace, TimeBudget
from vitclinic.probes import OwningProbe, Result
from vitclinic.probes.curvature.clock import Clock
from vitclinic.probes.guards import Partial

SOME = ["accuracy", "norms", "fgsm", "flatness", "train_nll"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def at_pace(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """As if an image took so many seconds."""
    monkeypatch.setattr(Pace, "forward", seconds)
    monkeypatch.setattr(Pace, "of_shared_pass", lambda self, probes, images: seconds * images)


def network(name: str = "vit") -> Any:
    return patient(name).network


class Told(Callback):
    def __init__(self) -> None:
        self.measured: list[str] = []
        self.schedule: Any = None

    def on_schedule(self, schedule: Any) -> None:
        self.schedule = schedule

    def on_measurement(self, step: Any, measurement: Any) -> None:
        self.measured.append(measurement.probe)


def test_the_same_call_again_does_nothing_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    at_pace(monkeypatch, 0.1)
    options: dict[str, Any] = {"data": noise(300), "probes": SOME, "budget": 1000}
    first = vitclinic.examine(network(), **options)
    assert first["flatness"].config["images"] == 64
    at_pace(monkeypatch, 100.0)  # now hardly anything would fit
    told = Told()
    again = vitclinic.examine(network(), **options, callbacks=[told])
    assert told.measured == []
    assert again.measurements == first.measurements
    assert again.reused == set(first)


def test_a_new_plan_keeps_the_forms_that_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    at_pace(monkeypatch, 0.1)
    first = vitclinic.examine(network(), noise(300), probes=SOME, budget=420)
    assert (first["flatness"].config["draws"], first["fgsm"].config["images"]) == (20, 128)
    more = vitclinic.examine(network(), noise(300), probes=SOME, budget=40_000)
    assert set(first) <= more.reused
    assert more["flatness"] == first["flatness"]
    fresh = vitclinic.examine(network(), noise(300), probes=SOME, budget=40_000, fresh=True)
    assert (fresh["flatness"].config["draws"], fresh["fgsm"].config["images"]) == (100, 512)
    assert not fresh.reused


def test_all_targets_are_measured_in_the_same_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    at_pace(monkeypatch, 0.1)
    alone = vitclinic.examine(network(), noise(300), probes=SOME, budget=500)
    both = vitclinic.examine([network(), network("resnet")], noise(300), probes=SOME, budget=500)
    for probe in both[0]:
        assert both[0][probe].terms == both[1][probe].terms
        assert both[0][probe].data == both[1][probe].data
    assert both[0].reused
    assert alone["flatness"] == both[0]["flatness"]


def test_what_does_not_fit_is_named_with_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    at_pace(monkeypatch, 0.1)
    told = Told()
    exam = vitclinic.examine(network(), noise(300), probes=SOME, budget=140, callbacks=[told])
    assert told.schedule.seconds <= 140
    assert told.schedule.left_out == {"flatness": pytest.approx(64 * 22 * 0.1), "train_nll": pytest.approx(30)}
    assert "at least 2" in exam.left_out["flatness"]
    with pytest.raises(KeyError, match="'flatness' was not measured: there was no time for it"):
        exam["flatness"]
    assert exam.view.left_out == exam.left_out
    again = vitclinic.examine(network(), noise(300), probes=SOME, budget=140)  # there is now time, and yet: the same
    assert (again.left_out, again.reused) == (exam.left_out, set(exam))


def test_a_budget_that_nothing_fits_into_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    at_pace(monkeypatch, 1.0)
    with pytest.raises(RecipeError, match=r"Nothing fits into 1 seconds: the shared pass alone takes about 22"):
        vitclinic.examine(network(), noise(), probes=["norms", "flatness"], budget=1)
    assert list(Path().rglob("*.json")) == []


class Slow(OwningProbe):
    """Takes longer than it says."""

    name = "slow"
    seconds: ClassVar[float] = 0.3

    def forwards(self, subject: Any) -> float:
        return 0.0

    def measure(self, subject: Any) -> Result:
        time.sleep(self.seconds)
        return Result({"x": Scalar(value=1.0)})


class Slower(Slow):
    """As slow."""

    name = "slower"


def test_what_would_begin_after_the_budget_is_left_out_and_done_by_the_next_call() -> None:
    options: dict[str, Any] = {"data": noise(), "probes": [Slow(), Slower()], "budget": 0.2}
    first = vitclinic.examine(network(), **options)
    assert (list(first), list(first.left_out)) == (["slow"], ["slower"])
    assert "ran out" in first.left_out["slower"]
    again = vitclinic.examine(network(), **options)
    assert (list(again), again.reused, again.left_out) == (["slow", "slower"], {"slow"}, {})


class Endless(OwningProbe):
    """Counts as long as it may."""

    name = "endless"
    enough: int = 40
    budget: Time | None = None

    def forwards(self, subject: Any) -> float:
        return 0.0

    def measure(self, subject: Any) -> Result:
        clock, partial = Clock(self.budget), Partial(subject.scratch.get(self.name))
        before = partial.read()
        counted = start = 0 if before is None else int(before["counted"])
        while counted < self.enough and not clock.has_expired():
            time.sleep(0.01)
            counted += 1
        partial.write({"counted": np.array(counted)})
        found = Result({"counted": Scalar(value=counted), "start": Scalar(value=start)})
        return found.unless(None if counted == self.enough else "the budget ended.")


def test_what_a_budget_cut_off_is_enough_for_no_more_time_and_goes_on_with_more() -> None:
    def examined(budget: float | None) -> Any:
        return vitclinic.examine(network(), noise(), probes=[Endless(budget=budget)])

    cut = examined(0.1)
    assert cut["endless"].status == "not_converged"
    assert examined(0.1).reused == {"endless"}
    assert examined(0.05).reused == {"endless"}
    more = examined(None)
    assert more["endless"].status == "ok"
    assert more["endless"].scalars["start"].value == cut["endless"].scalars["counted"].value > 0
    assert not list(Path().rglob("*.partial"))
    assert more["endless"].terms == cut["endless"].terms
    assert examined(0.1)["endless"] == more["endless"]  # what has come to its end is so for any budget


def test_a_damaged_plan_is_made_anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    at_pace(monkeypatch, 0.001)
    vitclinic.examine(network(), noise(), probes=["norms"], budget=9)
    (path,) = Path().rglob("*.plan")
    assert json.loads(path.read_text())["entries"][0]["probe"] == "norms"
    for content in ("{", "[" * 200_000, '{"entries": ' + "[" * 70 + "]" * 70 + "}", "[]"):
        path.write_text(content)
        caplog.clear()
        assert vitclinic.examine(network(), noise(), probes=["norms"], budget=9).reused == {"norms"}
        assert "planned again" in caplog.text


def test_a_network_that_fails_in_being_timed_fails_its_probes_once_each() -> None:
    class Single(type(vit())):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            if len(x) > 1:
                raise RuntimeError("one at a time")
            return super().forward(x)

    single = Single(16, 4, embed_dim=12, depth=1, num_heads=2, num_classes=5)
    exam = vitclinic.examine(single, noise(), probes=["norms", "fgsm"], budget="1m")
    assert {measurement.status for measurement in exam.values()} == {"failed"}


def test_a_network_that_does_not_take_the_images_does_not_keep_the_others_from_being_examined() -> None:
    exams = vitclinic.examine([vit(img_size=32), network()], noise(), probes=["norms"])
    assert [exam["norms"].status for exam in exams] == ["ok"]
    ((name, failure),) = exams.failures.items()
    assert name == "VisionTransformer"
    assert "cannot take the" in str(failure)


def test_an_only_network_that_does_not_take_the_images_is_an_error_before_anything_is_measured() -> None:
    for targets in (vit(img_size=32), [vit(img_size=32)]):
        with pytest.raises(ModelError, match="cannot take the"):
            vitclinic.examine(targets, noise(), probes=["norms"])
    assert list(Path().rglob("*.json")) == []


class Overrunning(Endless):
    """Takes far longer than it says, and can be cut."""

    name = "overrunning"
    enough: int = 10_000

    def forwards(self, subject: Any) -> float:
        return 1.0


class Cheap(Slow):
    """Takes next to nothing."""

    name = "cheap"
    seconds: ClassVar[float] = 0.0


def test_what_overruns_is_cut_and_goes_on_last_and_nothing_cheap_is_skipped_for_it() -> None:
    told = Told()
    probes = [Overrunning(), Slow(), Cheap()]
    exam = vitclinic.examine(network(), noise(), probes=probes, budget=3, callbacks=[told])
    assert told.measured == ["slow", "cheap", "overrunning", "overrunning"] or told.measured == [
        "slow",
        "cheap",
        "overrunning",
    ]
    assert exam.left_out == {}
    assert exam["overrunning"].status == "not_converged"
    assert (exam["slow"].status, exam["cheap"].status) == ("ok", "ok")


class Resumed(Endless):
    """Is cut once, and comes to its end when it goes on."""

    name = "resumed"

    def measure(self, subject: Any) -> Result:
        partial = Partial(subject.scratch.get(self.name))
        begun = partial.read() is not None
        partial.write({"begun": np.array(1)})
        return Result({"x": Scalar(value=1.0)}).unless(None if begun else "the budget ended.")


def test_what_was_cut_comes_to_its_end_somewhat_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeBudget, "left", property(lambda self: -0.1 * self.budget))
    exam = vitclinic.examine(network(), noise(), probes=[Resumed()], budget=10)
    assert exam["resumed"].status == "ok"


def test_accuracy_is_measured_on_all_images_where_the_shared_pass_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "forward", 0.01)
    monkeypatch.setattr(Pace, "of_shared_pass", lambda self, probes, images: 0.01 * images * len(list(probes)))
    exam = vitclinic.examine(network(), noise(600), probes=["accuracy", "norms", "fourier"], budget=20)
    assert exam["accuracy"].provenance.images == 600
    assert exam["norms"].provenance.images == exam["fourier"].provenance.images < 600
