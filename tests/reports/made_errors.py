"""Made-up errors: arrays as the probes `errors`, `label_errors` and `slices` leave them, for any classes and paths."""

from __future__ import annotations

import numpy as np

from vitclinic._core.records import Scalar
from vitclinic.probes.behaviour.errors import class_scalars
from vitclinic.probes.behaviour.slices import compare_slices, divide_columns, divide_numbers

RTL = "\u202eחתול \u202dسيارة"
LONG = "a name of three hundred characters, " * 9
NASTY = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "' onclick='alert(3)",
    RTL,
    LONG,
    "%{x} $a$ &amp;",
]


def errors(
    rng, classes=("disc", "ring", "square"), images=400, wrong=0.25, folder="/home/me/photos", shown=60, side=24
):
    """Return the parts of the measurements of the three probes, by probe."""
    count = len(classes)
    labels = rng.integers(0, count, images)
    miss = rng.random(images) < wrong
    predicted = np.where(miss, (labels + 1 + rng.geometric(0.4, images)) % count, labels)
    confidence = 0.5 + 0.5 * rng.random(images)
    pairs, counts = np.unique(np.stack([labels, predicted], 1), axis=0, return_counts=True)
    totals = np.bincount(labels, minlength=count)
    correct = np.bincount(labels[labels == predicted], minlength=count)
    names = np.array([f"{folder}/{classes[label]}/{number}.png" for number, label in enumerate(labels)])
    mistakes = np.flatnonzero(labels != predicted)[:shown]
    given = {"classes": np.array(classes)}

    def show(places):
        return {
            "shown_images": rng.integers(0, 256, (len(places), side, side, 3), dtype=np.uint8),
            "shown_numbers": places,
            "shown_names": names[places],
            "shown_labels": labels[places],
            "shown_predicted": predicted[places],
            "shown_confidence": confidence[places],
            "shown_own": 1 - confidence[places],
        }

    suspects = mistakes[np.argsort(-confidence[mistakes])]
    confused = {"class_images": totals, "class_correct": correct, "pairs": pairs, "pair_images": counts}
    suspected = {
        "suspect_numbers": suspects,
        "suspect_names": names[suspects],
        "suspect_labels": labels[suspects],
        "suspect_suggested": predicted[suspects],
        "suspect_score": 1 - confidence[suspects],
        "thresholds": np.full(count, 0.7),
    }
    return {
        "errors": {"scalars": class_scalars(totals, correct), "arrays": {**given, **confused, **show(mistakes)}},
        "label_errors": {
            "scalars": {
                "suspected": Scalar(value=float(len(suspects)), n=images),
                "suspected_share": Scalar(value=len(suspects) / images, n=images),
                "wrong_labels": Scalar(value=0.05, n=images),
            },
            "arrays": {**given, **suspected, **show(suspects[:30])},
        },
        "slices": _slices(rng, labels == predicted, {**given, **show(mistakes[:24])}),
    }


def _slices(rng, correct, shown):
    n = len(correct)
    columns = {"camera": rng.choice(["front", "back"], n), '<b onclick="alert(4)">': rng.choice([NASTY[0], RTL], n)}
    numbers = {"brightness": rng.random(n), "contrast": rng.random(n)}
    tests = compare_slices([*divide_numbers(numbers), *divide_columns(columns)], correct)
    low, high = (np.array([test.correct / test.images + sign * 0.05 for test in tests]) for sign in (-1, 1))
    arrays = {
        "slice_feature": np.array([test.part.feature for test in tests]),
        "slice_value": np.array([test.part.value for test in tests]),
        "slice_images": np.array([test.images for test in tests]),
        "slice_accuracy": (low + high) / 2,
        "slice_accuracy_low": low,
        "slice_accuracy_high": high,
        "rest_accuracy": np.array([test.rest_correct / test.rest_images for test in tests]),
        "slice_p": np.array([test.p for test in tests]),
        "slice_p_adjusted": np.array([test.adjusted for test in tests]),
        "shown_slice": np.arange(len(shown["shown_labels"])) % 3,
    }
    scalars = {"slices": Scalar(value=float(len(tests))), "weak": Scalar(value=0.0), "smallest_p": Scalar(value=0.4)}
    return {"scalars": scalars, "arrays": {**arrays, **shown}}
