"""Every rule: it speaks where its number is beyond the line, and is silent on the other side, where the interval
reaches the line, and where there is nothing to look at."""

import pytest

from tests.exam.findings.made import changed, exam, layers, measured, transformer, without_numbers
from vitclinic.exam.findings import find, known_rules


def confidence(sure, right):
    return exam(accuracy={"confidence": sure, "accuracy": right, "ece": 0.1})


def noise(high, low, clean=(0.78, 0.82)):
    return exam(frequency_noise={"drop_high": high, "drop_low": low, "clean_accuracy": clean})


def likelihood(train, test, entropy=0.0):
    return exam(train_nll={"nll": train, "target_entropy": entropy}, accuracy={"nll": test})


def outlying(share, kind="msa"):
    found = layers(kind, "outliers", (0.0, 0.0), share)
    return {"outliers_most": share, "units": found["units"]}


def sliced(weak):
    accuracies = {"worst_slice_accuracy": (0.5, 0.6), "rest_accuracy": (0.8, 0.9)}
    return exam(slices={"weak": weak, "smallest_p": 0.001, **accuracies})


CASES = {  # rule: (sick, well, the interval reaches the line)
    "guessing": (
        exam(accuracy={"accuracy": (0.08, 0.12), "commonest": 0.1}),
        exam(accuracy={"accuracy": (0.11, 0.15), "commonest": 0.1}),
        None,  # reaching the line is the finding
    ),
    "over_confidence": (
        confidence((0.89, 0.91), (0.69, 0.71)),
        confidence((0.70, 0.72), (0.69, 0.71)),
        confidence((0.79, 0.81), (0.66, 0.82)),
    ),
    "under_confidence": (
        confidence((0.40, 0.42), (0.69, 0.71)),
        confidence((0.70, 0.72), (0.69, 0.71)),
        confidence((0.54, 0.70), (0.69, 0.71)),
    ),
    "data_starved": (
        likelihood((0.0, 0.02), (2.9, 3.1)),
        likelihood((1.7, 1.8), (1.7, 1.8)),
        likelihood((1.0, 1.2), (1.4, 2.0)),
    ),
    "sharp_minimum": (
        exam(sharpness={"lambda_max": (800, 801)}),
        exam(sharpness={"lambda_max": (20, 21)}),
        exam(sharpness={"lambda_max": (170, 190)}),
    ),
    "no_minimum": (
        exam(sharpness={"lambda_max": (-22, -21)}),
        exam(sharpness={"lambda_max": (21, 22)}),
        exam(sharpness={"lambda_max": (-3, 1)}),
    ),
    "non_convex_loss": (
        exam(hessian_spectrum={"nep": (0.18, 0.32), "ape": (48, 62)}),
        exam(hessian_spectrum={"nep": (0.0, 0.05)}),
        exam(hessian_spectrum={"nep": (0.05, 0.25)}),
    ),
    "over_smoothing": (
        exam(token_similarity=transformer((0.8, 0.82), (0.3, 0.32))),
        exam(token_similarity=transformer((0.57, 0.59), (0.1, 0.2))),
        exam(token_similarity=transformer((0.68, 0.78), (0.3, 0.32))),
    ),
    "outlier_tokens": (
        exam(token_norms=outlying((0.022, 0.026))),
        exam(token_norms=outlying((0.0, 0.001))),
        exam(token_norms=outlying((0.004, 0.01))),
    ),
    "over_dense_attention": (
        exam(attention_entropy=layers("msa", "ratio", (0.995, 0.999))),
        exam(attention_entropy=layers("msa", "ratio", (0.82, 0.84))),
        exam(attention_entropy=layers("msa", "ratio", (0.93, 0.99))),
    ),
    "saturated_attention": (
        exam(attention_entropy=layers("msa", "ratio", (0.5, 0.6), (0.01, 0.02))),
        exam(attention_entropy=layers("msa", "ratio", (0.5, 0.6), (0.1, 0.2))),
        exam(attention_entropy=layers("msa", "ratio", (0.5, 0.6), (0.01, 0.06))),
    ),
    "dead_units": (
        exam(sparsity=layers("mlp", "active", (0.4, 0.5), (0.0, 0.005))),
        exam(sparsity=layers("mlp", "active", (0.4, 0.5), (0.05, 0.06))),
        exam(sparsity=layers("mlp", "active", (0.4, 0.5), (0.0, 0.015))),
    ),
    "saturated_units": (
        exam(sparsity=layers("mlp", "active", (0.4, 0.5), (0.995, 1.0))),
        exam(sparsity=layers("mlp", "active", (0.4, 0.5), (0.6, 0.7))),
        exam(sparsity=layers("mlp", "active", (0.4, 0.5), (0.985, 1.0))),
    ),
    "high_frequency_fragility": (
        noise((0.5, 0.52), (0.2, 0.22)),
        noise((0.1, 0.12), (0.3, 0.32)),
        noise((0.35, 0.55), (0.2, 0.22)),
    ),
    "meaningless_saliency": (
        exam(saliency={"gain": (-0.02, 0.03)}),
        exam(saliency={"gain": (0.1, 0.2)}),
        exam(saliency={"gain": (0.0, 0.1)}),
    ),
    "weak_slice": (sliced(weak=1), sliced(weak=0), None),  # its line is a test
    "texture_bias": (
        exam(shape_bias={"shape_bias": (0.2, 0.3)}),
        exam(shape_bias={"shape_bias": (0.7, 0.8)}),
        exam(shape_bias={"shape_bias": (0.4, 0.55)}),
    ),
}


def rules_of(*arguments, **options):
    return [finding.rule for finding in find(*arguments, **options)]


def test_every_rule_about_measurements_has_a_case():
    assert set(known_rules()) == {*CASES, "unstable_training", "stalled_training"}  # those have a page of their own


@pytest.mark.parametrize("rule", CASES)
def test_it_speaks_beyond_its_line(rule):
    (finding,) = [finding for finding in find(CASES[rule][0]) if finding.rule == rule]
    assert finding.severity in ("problem", "notice")
    assert finding.numbers
    assert finding.basis == known_rules()[rule].basis != "reference network"
    assert finding.threshold.startswith(known_rules()[rule].threshold)
    assert finding.suggestions


def test_dense_attention_says_nothing_of_a_network_that_has_not_learned():
    """An untrained network has 0.9999 of the largest entropy, and is not sick for it."""
    attention = layers("msa", "ratio", (0.9998, 0.9999))
    learned = exam(attention_entropy=attention, accuracy={"accuracy": (0.4, 0.5), "commonest": 0.1})
    untrained = exam(attention_entropy=attention, accuracy={"accuracy": (0.08, 0.12), "commonest": 0.1})
    assert "over_dense_attention" in rules_of(learned)
    assert "over_dense_attention" not in rules_of(untrained)


@pytest.mark.parametrize("rule", CASES)
def test_it_is_silent_on_the_other_side(rule):
    assert rule not in rules_of(CASES[rule][1])


@pytest.mark.parametrize("rule", [rule for rule in CASES if CASES[rule][2]])
def test_it_is_silent_where_the_interval_reaches_the_line(rule):
    assert rule not in rules_of(CASES[rule][2])


@pytest.mark.parametrize("rule", CASES)
def test_it_abstains_where_there_is_nothing_to_look_at(rule):
    sick = CASES[rule][0]
    assert find({}) == []
    assert find(changed(sick, status="failed", reason="Why.")) == []
    assert find(changed(sick, status="does_not_apply", reason="Why.")) == []
    assert find(changed(sick, scalars={}, units=[])) == []
    assert find(without_numbers(sick)) == []


def test_an_estimate_that_has_not_converged_counts_only_with_an_interval():
    for ends, expected in (((800, 801), ["sharp_minimum"]), (800, [])):
        assert (
            rules_of(changed(exam(sharpness={"lambda_max": ends}), status="not_converged", reason="Why.")) == expected
        )


def test_between_two_lines_is_a_notice():
    (finding,) = find(exam(sharpness={"lambda_max": (300, 301)}))
    assert finding.severity == "notice"
    (finding,) = find(exam(attention_entropy=layers("msa", "ratio", (0.96, 0.97))))
    assert finding.severity == "notice"
    (finding,) = find(confidence((0.76, 0.77), (0.69, 0.70)))
    assert (finding.rule, finding.severity) == ("over_confidence", "notice")
    (finding,) = find(confidence((0.54, 0.56), (0.69, 0.70)))
    assert (finding.rule, finding.severity) == ("under_confidence", "notice")
    (finding,) = find(likelihood((1.0, 1.02), (1.7, 1.75)))
    assert (finding.rule, finding.severity) == ("data_starved", "notice")


def test_positions_of_a_cnn_or_a_mixer_are_not_called_over_smoothed():
    for kind in ("conv", "token_mlp"):
        assert find(exam(token_similarity=transformer((0.88, 0.89), (0.4, 0.41), kind))) == []


def test_outlier_tokens_are_told_with_their_layer_and_their_remedy_in_transformers_only():
    (finding,) = find(exam(token_norms=outlying((0.022, 0.026))))
    assert finding.severity == "problem"
    assert "after blocks.1.msa" in finding.statement
    assert [suggestion.treatment for suggestion in finding.suggestions] == ["registers"]
    (finding,) = find(exam(token_norms=outlying((0.006, 0.01))))
    assert finding.severity == "notice"
    assert find(exam(token_norms=outlying((0.022, 0.026), kind="conv"))) == []


def test_patches_that_were_alike_from_the_start_are_not_over_smoothed():
    assert find(exam(token_similarity=transformer((0.88, 0.89), (-0.1, 0.1)))) == []


def test_high_frequencies_hurt_only_where_low_ones_hurt_less():
    assert find(noise((0.5, 0.52), (0.51, 0.53))) == []


def test_soft_targets_are_not_taken_for_a_bad_fit():
    """A training NLL near the entropy of its mixed labels is a perfect fit."""
    assert rules_of(likelihood((1.40, 1.42), (2.5, 2.6), entropy=1.4)) == ["data_starved"]
    assert rules_of(likelihood((1.40, 1.42), (1.5, 1.6), entropy=0.0)) == []


def test_saturated_attention_is_told_with_its_gradient_where_that_was_measured():
    sick = CASES["saturated_attention"][0]
    steepness = layers("msa", "ratio", (0.7, 0.8), (0.02, 0.03))
    (finding,) = find({**sick, **exam(softmax_jacobian=steepness)})
    assert finding.numbers["softmax_jacobian.ratio of blocks.1.msa"].value == pytest.approx(0.025)
    assert "softmax_jacobian.ratio of blocks.0.msa" not in finding.numbers


def test_few_heads_are_told_where_attention_was_measured():
    import numpy as np

    entropy = measured("attention_entropy", {"ratio": 0.9}, arrays={"head_entropy": np.ones((4, 1))})
    (finding,) = find({**CASES["non_convex_loss"][0], "attention_entropy": entropy})
    assert finding.suggestions[0].treatment == "model.num_heads=2"
