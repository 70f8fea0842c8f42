"""With a reference network: interval against interval, and only where both were measured alike."""

import pytest

from tests.exam.findings.made import changed, exam, layers, transformer
from vitclinic.exam.findings import find


def only(findings):
    (finding,) = findings
    return finding


def similarity(low, high):
    return exam(token_similarity=transformer((low, high), (0.1, 0.12)))


def test_worse_than_the_reference_within_the_published_range_is_a_notice():
    finding = only(find(similarity(0.58, 0.60), reference=similarity(0.25, 0.27)))
    assert (finding.basis, finding.severity) == ("reference network", "notice")
    assert "reference network has 0.26 (0.25 to 0.27)" in finding.statement
    assert "reference network" in finding.threshold
    assert "above 0.7" not in finding.threshold


def test_worse_than_the_reference_and_beyond_the_published_range_is_a_problem():
    finding = only(find(similarity(0.80, 0.82), reference=similarity(0.25, 0.27)))
    assert (finding.basis, finding.severity) == ("reference network", "problem")
    # The reference alone would make it a notice: the line that makes it a problem is told, too.
    assert "above 0.7" in finding.threshold
    assert "reference network's by 0.1" in finding.threshold


def test_no_better_than_a_sick_reference_is_still_sick():
    finding = only(find(similarity(0.80, 0.82), reference=similarity(0.80, 0.82)))
    assert (finding.basis, finding.severity) == ("published range", "problem")
    assert "reference network has" in finding.statement


@pytest.mark.parametrize(
    "reference",
    [similarity(0.57, 0.59), similarity(0.30, 0.55), similarity(0.65, 0.69)],
    ids=["within the margin", "intervals that meet", "better"],
)
def test_no_finding_where_it_is_not_clearly_worse(reference):
    assert find(similarity(0.58, 0.60), reference=reference) == []


@pytest.mark.parametrize(
    "change",
    [{"data": "c" * 64}, {"config": {"tokens": 9}}, {"revision": 2}, {"conditions": {"augment": "deit"}}],
    ids=lambda change: next(iter(change)),
)
def test_what_was_not_measured_alike_is_not_compared(change):
    assert find(similarity(0.58, 0.60), reference=changed(similarity(0.25, 0.27), **change)) == []


def test_a_reference_that_failed_is_none():
    assert find(similarity(0.58, 0.60), reference=changed(similarity(0.2, 0.3), status="failed", reason="Why.")) == []


WORSE = {
    "sharp_minimum": (
        exam(sharpness={"lambda_max": (60, 61), "loss": 0.2}),
        exam(sharpness={"lambda_max": (20, 21), "loss": 0.25}),
    ),
    "non_convex_loss": (
        exam(hessian_spectrum={"nep": (0.05, 0.09)}),
        exam(hessian_spectrum={"nep": (0.0, 0.04)}),
    ),
    "over_dense_attention": (
        exam(attention_entropy=layers("msa", "ratio", (0.90, 0.91))),
        exam(attention_entropy=layers("msa", "ratio", (0.80, 0.81))),
    ),
    "over_confidence": (
        exam(accuracy={"confidence": (0.72, 0.73), "accuracy": (0.69, 0.70)}),
        exam(accuracy={"confidence": (0.62, 0.63), "accuracy": (0.68, 0.69)}),
    ),
    "under_confidence": (
        exam(accuracy={"confidence": (0.67, 0.68), "accuracy": (0.69, 0.70)}),
        exam(accuracy={"confidence": (0.75, 0.76), "accuracy": (0.69, 0.70)}),
    ),
    "data_starved": (
        exam(train_nll={"nll": (1.5, 1.6)}, accuracy={"accuracy": (0.3, 0.32), "nll": 1.7}),
        exam(train_nll={"nll": (1.2, 1.3)}, accuracy={"accuracy": (0.45, 0.47), "nll": 1.4}),
    ),
    "high_frequency_fragility": (
        exam(frequency_noise={"drop_high": (0.2, 0.22), "drop_low": (0.1, 0.12), "clean_accuracy": 0.8}),
        exam(frequency_noise={"drop_high": (0.1, 0.12), "drop_low": (0.1, 0.12), "clean_accuracy": 0.8}),
    ),
    "texture_bias": (
        exam(shape_bias={"shape_bias": (0.6, 0.65)}),
        exam(shape_bias={"shape_bias": (0.8, 0.85)}),
    ),
}


@pytest.mark.parametrize("rule", WORSE)
def test_rules_that_compare(rule):
    worse, better = WORSE[rule]
    finding = only(finding for finding in find(worse, reference=better) if finding.rule == rule)
    assert (finding.basis, finding.severity) == ("reference network", "notice")
    assert rule not in [finding.rule for finding in find(better, reference=worse)]
    assert rule not in [finding.rule for finding in find(worse, reference=worse)]


def test_curvature_at_other_losses_is_not_compared():
    """Where every image is classified with certainty the Hessian vanishes with the loss: docs/results/curvature.md."""
    fitted, fitting = {"lambda_max": (7, 8), "loss": 0.006}, {"lambda_max": (19, 20), "loss": 0.22}
    assert find(exam(sharpness=fitting), reference=exam(sharpness=fitted)) == []


def test_a_reference_that_is_no_minimum_is_no_measure():
    assert (
        find(exam(sharpness={"lambda_max": 20, "loss": 0.2}), reference=exam(sharpness={"lambda_max": -5, "loss": 0.2}))
        == []
    )
