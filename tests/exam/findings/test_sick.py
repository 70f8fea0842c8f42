"""Networks made sick on purpose, trained and examined: the right finding appears, and not in their healthy twins."""

import pytest

import vitclinic
from vitclinic.exam.findings import find

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains on digits: `trained(steps, *words, patch_size=2, ...)`; validated and saved at the end only."""
    folder = tmp_path_factory.mktemp("sick")

    def train(steps, *words, **model):
        network = {"name": "vit_tiny_fitted", "patch_size": 2, "embed_dim": 32, "depth": 3, "num_heads": 2, **model}
        recipe = {
            "model": network,
            "data": {"source": "digits", "augment": "none"},
            "batch_size": 64,
            "steps": steps,
            "validation": {"every": f"{steps} steps"},
            "checkpoint": {"every": f"{steps} steps"},
            "out": str(folder / str(len(list(folder.iterdir())))),
        }
        return vitclinic.train(recipe, list(words))

    return train


@pytest.fixture(scope="module")
def eight_heads(trained):
    """A network that learns well: the twin of those with one head, and with few images."""
    return trained(200, "optimizer.lr=0.003", "schedule={name: constant, warmup: 10 steps}", num_heads=8)


@pytest.fixture(scope="module")
def well(eight_heads):
    probes = ["accuracy", "attention_entropy", "train_nll", "hessian_spectrum"]
    return vitclinic.examine(eight_heads.path, probes=probes)


def rules_of(findings):
    return {finding.rule for finding in findings}


def by_rule(findings, rule):
    (finding,) = (finding for finding in findings if finding.rule == rule)
    return finding


def test_the_twin_is_healthy(eight_heads, well):
    assert rules_of(find(well, eight_heads.metrics)) == {"healthy"}


@pytest.mark.parametrize(("rate", "expected"), [(0.3, True), (0.001, False)])
def test_learning_rate_too_high(trained, rate, expected):
    run = trained(80, f"optimizer.lr={rate}", "schedule.warmup=0", "clip=null")
    found = find({}, run.metrics)
    assert ("unstable_training" in rules_of(found)) == expected
    if expected:
        assert by_rule(found, "unstable_training").suggestions[0].treatment == "optimizer.lr=0.03"


@pytest.mark.parametrize(("depth", "expected"), [(24, True), (3, False)])
def test_24_layers_without_help(trained, depth, expected):
    """No warm-up, at a rate at which three layers keep their patches apart."""
    run = trained(60, "optimizer.lr=0.003", "schedule.warmup=0", depth=depth)
    found = find(vitclinic.examine(run.path, probes=["token_similarity"]))
    assert ("over_smoothing" in rules_of(found)) == expected
    if expected:
        finding = by_rule(found, "over_smoothing")
        assert (finding.severity, finding.basis) == ("problem", "published range")
        assert finding.suggestions[0].treatment == "patch_diversity"


def test_one_head(trained, well):
    """One head of the width of one of eight: NEP falls as heads are added [park2022 Fig. C.5]."""
    run = trained(200, "optimizer.lr=0.003", "schedule={name: constant, warmup: 10 steps}", num_heads=1, embed_dim=4)
    exam = vitclinic.examine(run.path, probes=["accuracy", "attention_entropy", "hessian_spectrum"])
    assert "non_convex_loss" in rules_of(find(exam))
    found = find(exam, reference=well)
    assert by_rule(found, "non_convex_loss").basis == "reference network"
    assert by_rule(found, "non_convex_loss").suggestions[0].treatment == "model.num_heads=2"
    dense = by_rule(found, "over_dense_attention")
    assert dense.basis == "reference network"
    assert dense.suggestions[0].treatment == "context_broadcasting"  # which gains most with few heads, Fig. 9


def test_few_images_without_augmentation(trained):
    run = trained(360, "data.limit=60", "batch_size=20", "optimizer.lr=0.005")
    found = find(vitclinic.examine(run.path, probes=["accuracy", "train_nll"]))
    assert {"data_starved", "over_confidence"} <= rules_of(found)
    assert "of which there are 60" in by_rule(found, "data_starved").statement
    assert "sam" in {suggestion.treatment for suggestion in by_rule(found, "data_starved").suggestions}
