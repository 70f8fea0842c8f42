"""Networks made sick on purpose, trained and examined: the right finding appears, and not in their healthy twins."""

import pytest

import vitclinic
from vitclinic.clinic.findings import find

pytestmark = pytest.mark.slow


def trained(folder, name, *words):
    return vitclinic.train({}, "batch_size=64", f"out={folder / name}", *words)


def vit(patch=2, width=32, depth=4, heads=2):
    return f"model={{name: vit_tiny_fitted, patch_size: {patch}, embed_dim: {width}, depth: {depth}, num_heads: {heads}}}"


def rules_of(findings):
    return {finding.rule for finding in findings}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sick")


class TestLearningRateTooHigh:
    @pytest.fixture(scope="class", params=[0.3, 0.001], ids=["too high", "usual"])
    def run(self, request, folder):
        words = "data=digits", "schedule.warmup=0", "clip=null", "steps=120"
        return request.param, trained(folder, f"rate-{request.param}", vit(), f"optimizer.lr={request.param}", *words)

    def test_unstable_training(self, run):
        rate, made = run
        found = find({}, made.metrics)
        assert ("unstable_training" in rules_of(found)) == (rate == 0.3)
        if rate == 0.3:
            assert found[0].suggestions[0].treatment == "optimizer.lr=0.03"
        else:
            assert found == []
