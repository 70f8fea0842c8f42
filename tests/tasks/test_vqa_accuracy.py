"""Accuracy of answers against the official formula, person by person, and its interval against resampling."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitclinic.tasks.vqa_accuracy import accuracy_interval, find_kind, image_moments, score_answer, soft_targets

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
ANSWERS = st.lists(st.sampled_from(["red", "blue", "teal"]), min_size=1, max_size=12)


def official(given_answer, answers):
    """The official evaluation: leave out one person at a time, and count the others who agree."""
    scores = []
    for left_out in range(len(answers)):
        others = answers[:left_out] + answers[left_out + 1 :]
        scores.append(min(1.0, sum(other == given_answer for other in others) / 3))
    return sum(scores) / len(scores)


@PATIENT
@given(ANSWERS)
def test_accuracy_is_the_official_one_of_four_people_and_more(answers):
    for answer in ("red", "blue", "pink"):
        found = score_answer(answer, answers)
        if len(answers) > 3:
            assert found == pytest.approx(official(answer, answers))
        else:
            assert found == answers.count(answer) / len(answers)


@PATIENT
@given(ANSWERS)
def test_targets_are_a_third_for_each_who_agrees(answers):
    numbers = {"red": 0, "blue": 1}
    found = soft_targets(answers, numbers)
    for answer, number in numbers.items():
        expected = min(answers.count(answer) / min(3, len(answers)), 1)
        assert found.get(number, 0.0) == pytest.approx(expected)


def test_kinds():
    assert [find_kind([a]) for a in ("Yes.", "no", "2", "two", "1,000", "red", "2 dogs")] == [
        *("yes_no", "yes_no", "number", "number", "number", "other", "other")
    ]


@PATIENT
@given(st.lists(st.lists(st.sampled_from([0.0, 0.3, 0.9, 1.0]), min_size=1, max_size=5), min_size=2, max_size=8))
def test_the_interval_does_not_depend_on_how_images_are_divided(scores):
    flat = np.array([score for image in scores for score in image])
    rows = np.array([row for row, image in enumerate(scores) for _ in image])
    whole = image_moments(flat, rows)
    parts = sum(image_moments(flat[rows == row], rows[rows == row]) for row in range(len(scores)))
    np.testing.assert_allclose(whole, parts)
    low, high = accuracy_interval(whole)
    assert 0 <= low <= flat.mean() + 1e-12
    assert flat.mean() - 1e-12 <= high <= 1


def test_the_interval_is_that_of_resampled_images():
    random = np.random.default_rng(0)
    chance = random.random(400)  # how hard an image is: its questions are right together
    scores = [(random.random(8) < each).astype(float) for each in chance]
    flat, rows = np.concatenate(scores), np.repeat(np.arange(400), 8)
    low, high = accuracy_interval(image_moments(flat, rows))
    means = [np.mean([scores[i] for i in random.integers(400, size=400)]) for _ in range(2000)]
    expected = np.quantile(means, [0.025, 0.975])
    np.testing.assert_allclose([low, high], expected, atol=0.006)
    assert high - low > 1.4 * 2 * 1.96 * np.sqrt(0.25 / 3200)  # wider than if all questions were independent


def test_all_right_is_not_certain():
    low, high = accuracy_interval(image_moments(np.ones(30), np.repeat(np.arange(10), 3)))
    assert high == 1
    assert 0.6 < low < 0.8
