"""What fits into a budget: the choice among forms, and what a user may say about it."""

from __future__ import annotations

import math
import random

import pytest

from tests.probes.subjects import subject
from vitclinic._core.errors import RecipeError
from vitclinic.exam.planner import FIRST, Offer, choose, forms, limits
from vitclinic.exam.request import parse_request
from vitclinic.exam.timing import Step, TimeBudget
from vitclinic.probes import find_obstacle, known_probes, parse_probes


def spent(offers: list[Offer], taken: dict[str, int]) -> float:
    return sum(offer.cost(taken[offer.name]) for offer in offers if offer.name in taken)


def test_all_are_planned_in_their_cheapest_form_before_any_is_more_thorough() -> None:
    offers = [Offer("first", [1, 2, 50]), Offer("second", [1, 3]), Offer("third", [1])]
    assert choose(offers, 3) == {"first": 0, "second": 0, "third": 0}
    assert choose(offers, 4) == {"first": 1, "second": 0, "third": 0}
    assert choose(offers, 6) == {"first": 1, "second": 1, "third": 0}
    assert choose(offers, 60) == {"first": 2, "second": 1, "third": 0}


def test_what_is_too_long_is_left_out_and_makes_room_for_what_is_not() -> None:
    assert choose([Offer("long", [9, 20]), Offer("short", [1])], 5) == {"short": 0}
    assert choose([Offer("long", [9])], 5) == {}


def test_a_plan_is_never_longer_than_its_budget() -> None:
    draw = random.Random(0)
    for _ in range(200):
        offers = [
            Offer(str(n), sorted(draw.uniform(0, 20) for _ in range(draw.randint(1, 4))))
            for n in range(draw.randint(1, 8))
        ]
        budget = draw.uniform(0, 60)
        taken = choose(offers, budget)
        assert spent(offers, taken) <= budget + 1e-9
        left = budget - spent(offers, taken)
        assert all(offer.cost(0) > left for offer in offers if offer.name not in taken)


def test_a_form_that_is_stored_is_kept_and_not_made_again_more_thoroughly() -> None:
    stored = Offer("a", [1, 0, 30], stored=1)
    assert choose([stored], 100) == {"a": 1}
    for_another_network_too_long = Offer("a", [1, 0, 30], stored=2)
    assert choose([for_another_network_too_long], 5) == {"a": 1}


def test_what_cannot_be_timed_costs_nothing() -> None:
    assert choose([Offer("a", [math.nan, math.nan]), Offer("b", [1])], 1) == {"a": 1, "b": 0}


@pytest.mark.parametrize("name", known_probes())
def test_cheaper_forms_are_probes_that_cost_less(name: str) -> None:
    patient = subject("vit", count=3000)
    (probe,) = parse_probes([name])
    found = forms(probe)
    assert found[-1] == probe
    if find_obstacle(probe, patient) is None:
        costs = [form.forwards(form.view(patient)) for form in found]
        assert costs == sorted(set(costs))


def test_an_option_of_the_users_is_in_every_form() -> None:
    (probe,) = parse_probes([{"landscape": {"points": 5}}])
    assert [(form.points, form.images) for form in forms(probe)] == [(5, 64), (5, 128), (5, 256)]  # type: ignore[attr-defined]
    (probe,) = parse_probes([{"corruptions": {"images": 7}}])
    assert forms(probe) == [probe]


def test_what_comes_first_is_as_thorough_as_leaves_the_others_enough() -> None:
    accuracy = Offer("accuracy", [1, 2, 4, 9], first=True)
    assert choose([Offer("b", [3]), accuracy], 10) == {"accuracy": 2, "b": 0}
    assert accuracy.cost(2) <= FIRST * 10 < accuracy.cost(3)
    assert choose([accuracy], 0.5) == {}
    assert choose([accuracy], 20) == {"accuracy": 3}


def test_a_dear_probe_does_not_take_the_place_of_cheap_ones() -> None:
    offers = [Offer("dear", [32]), *(Offer(str(number), [4]) for number in range(5))]
    assert choose(offers, 45) == {str(number): 0 for number in range(5)}
    assert "dear" in choose(offers, 55)


class Clockwork(TimeBudget):
    """A budget of which so much is left."""

    def __init__(self, budget: float, left: float) -> None:
        super().__init__(budget)
        self._left = left

    @property
    def left(self) -> float:
        return self._left


def step(name: str, seconds: float) -> Step:
    return Step(0, subject(), parse_probes([name]), seconds)


def test_what_can_be_cut_gets_its_estimate_and_its_share_of_what_nobody_claims() -> None:
    flatness, lesion, sharpness = step("flatness", 10), step("lesion", 10), step("sharpness", 10)
    clock = Clockwork(100, left=60)
    assert clock.allow(flatness, [lesion, sharpness]) == pytest.approx(10 + 30 / 2)
    assert clock.allow(lesion, [flatness]) is None
    own = Step(0, subject(), parse_probes([{"flatness": {"budget": "2m"}}]), 10)
    assert clock.allow(own, []) is None
    assert TimeBudget(None).allow(flatness, []) is None
    assert Clockwork(100, left=5).allow(flatness, [lesion]) == TimeBudget.LEAST


def test_estimates_are_corrected_by_what_was_seen() -> None:
    clock = Clockwork(100, left=60)
    clock.note(step("lesion", 10), 20.0)
    clock.note(step("lesion", math.nan), 1000.0)
    assert clock.correction == 2
    assert clock.allow(step("flatness", 10), [step("lesion", 10)]) == pytest.approx(20 + 20)


def test_a_probe_is_corrected_by_what_it_took_on_another_network() -> None:
    clock = Clockwork(100, left=60)
    clock.note(step("lesion", 10), 10.0)
    clock.note(step("sharpness", 10), 30.0)
    assert clock.allow(step("sharpness", 10), [step("lesion", 10)]) == pytest.approx(30 + 20)


def test_what_was_cut_has_the_time_until_nothing_more_is_begun() -> None:
    clock = Clockwork(100, left=-10)
    assert clock.resume(step("sharpness", 10), []) == 40
    assert clock.resume(step("sharpness", 10), [step("flatness", 30)]) == 10
    assert clock.resume(step("sharpness", math.nan), [step("flatness", 30)]) == 20


def test_a_plan_is_followed_somewhat_beyond_its_budget() -> None:
    assert not Clockwork(100, left=-49).is_over
    assert Clockwork(100, left=-50).is_over
    assert not TimeBudget(None).is_over


def test_the_shared_pass_has_all_images_or_fewer() -> None:
    assert limits(50) == [None]
    assert limits(1000) == [64, 256, None]


def test_what_is_measured_by_default_quickly_and_in_full() -> None:
    probes, budget = parse_request(None, None, False, False, {})
    assert budget == 300
    ranks = {name: probe.rank for name, probe in known_probes().items() if not probe.asked_for}
    assert [probe.name for probe in probes] == sorted(ranks, key=ranks.__getitem__)
    quick, budget = parse_request(None, None, True, False, {})
    assert budget is None
    assert {probe.name for probe in quick} == {name for name, probe in known_probes().items() if probe.by_default}
    full, budget = parse_request(None, None, False, True, {})
    assert (len(full), budget) == (len(ranks), None)
    named, budget = parse_request(["norms"], None, False, False, {})
    assert ([probe.name for probe in named], budget) == (["norms"], None)
    assert parse_request(["norms"], "90s", False, False, {})[1] == 90


def test_an_option_that_is_set_puts_its_probe_first() -> None:
    probes, _ = parse_request(None, None, False, False, {"landscape": {"points": 5}})
    assert probes[0].name == "landscape"
    assert probes[0].points == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quick": True, "full": True}, "Give only one of probes, quick and full"),
        ({"probes": ["norms"], "quick": True}, "Give only one of probes, quick and full"),
        ({"budget": "3m", "full": True}, "A budget cannot be combined with full"),
        ({"budget": "soon"}, "'budget': write a time such as 90s, 3m or 1h30m (got 'soon')."),
        ({"budget": 0}, "'budget' must be more than 0 seconds"),
        ({"budget": -1}, "'budget': write a time"),
        ({"settings": {"landscpe": {"points": 5}}}, "Did you mean 'landscape'?"),
        ({"settings": {"landscape": {"pionts": 5}}}, "Did you mean 'points'?"),
        ({"probes": []}, "'probes' is empty"),
    ],
)
def test_mistakes_are_sentences(said: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_request(**{"probes": None, "budget": None, "quick": False, "full": False, "settings": {}, **said})  # type: ignore[arg-type]
    assert message in str(caught.value)
