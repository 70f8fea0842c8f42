"""A study as a whole: what it trains, what it measures, and what becomes of it when something goes wrong."""

import json
import math
import os
import random
import signal
import time

import pytest
import yaml

from tests.processes import Command
from vitclinic._core.errors import DataError, RecipeError, RunError
from vitclinic._core.io import is_unchanged
from vitclinic.data import DataConfig
from vitclinic.experiments import runner
from vitclinic.experiments.study.catalogue import open_study
from vitclinic.experiments.study.conduct import study
from vitclinic.experiments.study.expectations import Measure
from vitclinic.experiments.study.measures import measure_run
from vitclinic.experiments.study.store import name_result, read_results
from vitclinic.training import Run

from .networks import STUDY, TINY, tiny_study

DIVERGING = {"optimizer": {"name": "sgd", "lr": 1e9}, "schedule": {"warmup": 0}, "clip": None}
IMPOSSIBLE = {"treatments": ["spatial_smoothing"]}  # which is for CNNs


OWN_SEED = "A study sets 'seed' itself: remove it from the recipe. A study's own options are `seeds` and `out`."


def table(result):
    """All that a study says, but for the clock."""
    plain = result.plain()
    del plain["seconds"], plain["date"]
    return plain


def stamps(folder, result, arm):
    """When the runs of an arm were last written to."""
    return [(folder / "pool" / run / "status.json").stat().st_mtime_ns for run in result.runs[arm].values()]


def test_every_arm_is_trained_with_every_seed_measured_and_judged(tmp_path):
    result = study(tiny_study(), out=tmp_path)
    assert result.values.keys() == {"slow", "fast"}
    assert all(numbers.keys() == {"accuracy", "norm", "diverged"} for numbers in result.values["fast"].values())
    (comparison,) = result.verdict.comparisons
    differences = [result.values["fast"][seed]["norm"] - result.values["slow"][seed]["norm"] for seed in (0, 1)]
    assert comparison.mean == pytest.approx(sum(differences) / 2)
    assert result.verdict.exploratory
    stored = json.loads((tmp_path / "T1.json").read_text())
    assert is_unchanged(stored)
    del stored["digest"]
    assert stored == json.loads(json.dumps(result.plain()))
    assert stored["values"]["fast"]["1"] == result.values["fast"][1]


@pytest.mark.parametrize(
    "rows", [17, *(pytest.param(r, marks=pytest.mark.slow) for r in random.Random(0).sample(range(1, 32), 6))]
)
def test_killed_anywhere_it_goes_on_to_the_identical_table(tmp_path, rows):
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(STUDY))
    killed = tmp_path / "killed"
    process = Command(["study", str(file), "--out", str(killed)])
    while process.poll() is None and written_rows(killed) < rows:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "T1.json").exists()
    assert table(study(file, out=killed)) == table(study(file, out=tmp_path / "whole"))


def written_rows(folder):
    return sum(file.read_text().count("\n") for file in folder.glob("pool/*/metrics.jsonl"))


def test_two_commands_at_a_time_share_their_runs_and_find_the_same(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(STUDY))
    both = [Command(["study", str(file), "--out", str(tmp_path / "out"), "--json"]) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    one, other = (json.loads(out) for out, _ in said)
    assert one == other
    assert set(one["statuses"]["fast"].values()) == {"finished"}


def test_interrupted_it_says_one_sentence_and_the_same_command_goes_on(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({**STUDY, "base": {**TINY, "steps": 300}}))
    process = Command(["study", str(file), "--out", str(tmp_path), "--seeds", "1"])
    while process.poll() is None and written_rows(tmp_path) < 10:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert error.strip() == "interrupted; every run is saved; run the same command to resume"
    (run,) = tmp_path.glob("pool/*/status.json")
    assert json.loads(run.read_text())["status"] == "interrupted"


def test_what_changes_is_trained_and_nothing_else(tmp_path):
    first = study(tiny_study(), out=tmp_path)
    slow, fast = stamps(tmp_path, first, "slow"), stamps(tmp_path, first, "fast")
    arms = {"slow": STUDY["arms"]["slow"], "fast": {"optimizer": {"lr": 2e-2}}}
    second = study(tiny_study(arms=arms), out=tmp_path)
    assert stamps(tmp_path, second, "slow") == slow
    assert second.values["slow"] == first.values["slow"]
    assert second.values["fast"] != first.values["fast"]
    assert stamps(tmp_path, first, "fast") == fast
    assert len(list(tmp_path.glob("pool/*"))) == 6


def test_another_value_on_an_axis_or_another_seed_trains_only_itself(tmp_path):
    def on(*rates):
        says = {"says": "s", "measure": "norm", "greater": ["optimizer.lr=0.01", 0]}
        return tiny_study(arms={}, axes={"optimizer.lr": list(rates)}, expectations=[says])

    study(on(0.01, 0.001), out=tmp_path, seeds=1)
    assert len(list(tmp_path.glob("pool/*"))) == 2
    study(on(0.01, 0.003), out=tmp_path, seeds=1)
    assert len(list(tmp_path.glob("pool/*"))) == 3
    study(on(0.01, 0.003), out=tmp_path, seeds=2)
    assert len(list(tmp_path.glob("pool/*"))) == 5


def test_another_measure_trains_nothing(tmp_path):
    first = study(tiny_study(), out=tmp_path)
    before = stamps(tmp_path, first, "fast")
    measures = {**STUDY["measures"], "alike": {"probe": "token_similarity", "scalar": "absolute_cosine_last"}}
    second = study(tiny_study(measures=measures), out=tmp_path)
    assert stamps(tmp_path, second, "fast") == before
    assert 0 < second.values["fast"][0]["alike"] < 1


@pytest.mark.slow
def test_two_processes_give_the_table_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 2)  # a thread each, as these tests have
    arms = {**STUDY["arms"], "absurd": DIVERGING, "impossible": IMPOSSIBLE}
    asked = tiny_study(arms=arms)
    together = study(asked, out=tmp_path / "two", processes=2)
    assert table(together) == table(study(asked, out=tmp_path / "one"))
    assert together.statuses["absurd"] == {0: "diverged", 1: "diverged"}


def test_a_divergence_is_data_and_what_it_lacks_is_missing(tmp_path):
    expectations = [
        {"says": "it diverges", "measure": "diverged", "greater": ["absurd", "fast"]},
        {"says": "its weights are larger", "measure": "norm", "greater": ["absurd", "fast"]},
    ]
    arms = {"fast": {}, "absurd": DIVERGING}
    result = study(tiny_study(arms=arms, expectations=expectations), out=tmp_path)
    assert [numbers["diverged"] for numbers in result.values["absurd"].values()] == [1, 1]
    assert math.isnan(result.values["absurd"][0]["accuracy"])
    assert result.missing["absurd"][0]["accuracy"] == "there is no test.accuracy: it diverged"
    assert "fast" not in result.missing
    diverged, norm = result.verdict.comparisons
    assert (diverged.mean, diverged.seeds, diverged.missing) == (1.0, 2, 0)
    assert (norm.seeds, norm.missing, norm.status) == (0, 2, "undecided")
    assert not result.failures


def test_an_arm_that_fails_does_not_stop_the_others(tmp_path):
    arms = {"impossible": IMPOSSIBLE, **STUDY["arms"]}
    result = study(tiny_study(arms=arms), out=tmp_path)
    assert result.failures.keys() == {("impossible", 0), ("impossible", 1)}
    assert "spatial_smoothing does not fit" in result.failures["impossible", 0]
    assert set(result.statuses["fast"].values()) == {"finished"}
    with pytest.raises(RunError, match="Every run of T1 failed: spatial_smoothing"):
        study(tiny_study(arms={"slow": IMPOSSIBLE, "fast": IMPOSSIBLE}), out=tmp_path)


def test_arms_with_one_recipe_share_their_runs(tmp_path):
    says = {"says": "s", "measure": "norm", "greater": ["one", "other"]}
    arms = {"one": {}, "other": {"treatments": []}}
    result = study(tiny_study(arms=arms, expectations=[says]), out=tmp_path)
    assert result.runs["one"] == result.runs["other"]
    assert result.values["one"] == result.values["other"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"expecttions": []}, "Unknown key 'T1.expecttions'. Did you mean 'expectations'?"),
        (
            {"measures": {"norm": {"probe": "norm", "scalar": "weight_norm"}}},
            "'T1.measures.norm': there is no probe 'norm'. Did you mean 'norms'?",
        ),
        (
            {"measures": {"norm": {"probe": "norms", "scalar": "weight_nrom"}}},
            "'T1.measures.norm': norms has no number 'weight_nrom'. Did you mean 'weight_norm'?",
        ),
        (
            {"measures": {"norm": {"probe": "norms", "value": "activation_nrom"}}},
            "'T1.measures.norm': norms has no number 'activation_nrom'. Did you mean 'activation_norm_last'?",
        ),
        (
            {"measures": {"norm": {"result": "accuracy"}}},
            "'T1.measures.norm.result': write diverged, stalled, learns, test.accuracy, or val.accuracy@5"
            " (got 'accuracy').",
        ),
        (
            {"expectations": [{"says": "s", "measure": "norm", "greater": ["fat", "slow"]}]},
            "'T1': the expectation 's' names 'fat', which does not exist. Did you mean 'fast'?",
        ),
        (
            {"arms": {"slow": {}, "fast": {"optimzer": {"lr": 1}}}},
            "The arm 'fast' of T1: Unknown key 'optimzer'. Did you mean 'optimizer'?",
        ),
        (
            {"arms": {"slow": {}, "fast": {"treatments": ["samm"]}}},
            "The arm 'fast' of T1: There is no treatment 'samm'. Did you mean 'sam'?",
        ),
        (
            {"measures": {"norm": {"probe": "norms", "scalar": "weight_norm", "checkpoint": "epoch-3"}}},
            "The measure 'norm' needs the weights of epoch 3, and 'slow' does not keep them:"
            " add 3 to checkpoint.keep_epochs.",
        ),
        (
            {"measures": {"norm": {"probe": "norms", "scalar": "weight_norm", "checkpoint": "early"}}},
            "The measure 'norm' needs early weights, and 'slow' keeps none: set checkpoint.keep_epochs, as in [0, 3].",
        ),
        ({"claim": "../T1"}, "'T1.claim': write a short name: the result's file is named after it (got '../T1')."),
        (
            {"claim": "T" * 61},
            f"'T1.claim': write a name of at most 60 letters: the result's file is named after it (got '{'T' * 61}').",
        ),
        (
            {"claim": "Index"},
            "'T1.claim': write another name: index.html is the page of all studies (got 'Index').",
        ),
        (
            {"claim": "C6-paper"},
            "'T1.claim': write another name: results at the paper's scale end in -paper (got 'C6-paper').",
        ),
        ({"axes": {"optimizer.lr": []}}, "'T1': the axis 'optimizer.lr' has no values."),
        ({"axes": {"optimizer.lr": [0.1, 0.10]}}, "'T1': there are two arms 'optimizer.lr=0.1'."),
        (
            {"arms": {**STUDY["arms"], "batch_size=9": {}}, "axes": {"batch_size": [8, 9]}},
            "'T1': there are two arms 'batch_size=9'.",
        ),
        ({"base": {**TINY, "seed": 1}}, f"The arm 'slow' of T1: {OWN_SEED}"),
        ({"arms": {"slow": {}, "fast": {"seed": 1}}}, f"The arm 'fast' of T1: {OWN_SEED}"),
        ({"axes": {"seed": [1, 2]}}, f"The arm 'seed=1' of T1: {OWN_SEED}"),
        ({"base": {**TINY, "out": "runs/x"}}, f"The arm 'slow' of T1: {OWN_SEED.replace('seed', 'out', 1)}"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_trained(tmp_path, changes, sentence):
    with pytest.raises(RecipeError) as found:
        study(tiny_study(**changes), out=tmp_path)
    assert str(found.value) == sentence
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["seed=3", "out=runs/x"])
def test_a_word_that_a_study_would_ignore_is_refused(tmp_path, word):
    with pytest.raises(RecipeError, match=f"A study sets '{word.partition('=')[0]}' itself"):
        study(tiny_study(), [word], out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_key_that_is_there_twice_is_not_read_as_its_last(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(STUDY) + "seeds: 7\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml' is not YAML: duplicate key 'seeds'"):
        open_study(file)


def test_a_base_is_what_several_studies_have_in_common(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({**STUDY, "base": {"like": "small", "batch_size": 50}}))
    slow = open_study(file).recipes()["slow"]
    assert (slow.data.limit, slow.batch_size, slow.optimizer.lr) == (3000, 50, 1e-5)
    file.write_text(yaml.safe_dump({**STUDY, "base": {"like": "smal"}}))
    with pytest.raises(RecipeError, match=r"There is no base 'smal' for studies\. Did you mean 'small'"):
        open_study(file)


def test_data_that_is_only_a_name_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as found:
        study("C6", out=tmp_path)
    assert str(found.value).startswith("C6 is studied on CIFAR-10, which does not come with vitclinic: give your")
    with pytest.raises(DataError, match="C6 is studied on ImageNet"):
        study("C6", scale="paper", out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_result_says_what_was_changed_but_not_where_the_data_lies(tmp_path, photo_folder):
    words = ["batch_size=8", "data.limit=8", "steps=2"]
    result = study(tiny_study(), words, data=photo_folder, out=tmp_path / "out", seeds=1)
    stored = result.file.read_text()
    assert str(tmp_path) not in stored
    assert (result.data, result.words) == (("photos",), tuple(words))
    moved = photo_folder.rename(tmp_path / "moved")
    measures = {**STUDY["measures"], "alike": {"probe": "token_similarity", "scalar": "absolute_cosine_last"}}
    again = study(tiny_study(measures=measures), words, data=moved, out=tmp_path / "out", seeds=1)
    assert again.runs == result.runs
    assert not again.failures


def test_other_words_and_data_have_results_of_their_own(tmp_path, photo_folder):
    plain = study(tiny_study(), out=tmp_path)
    before = plain.file.read_text()
    lesser = study(tiny_study(), ["steps=1"], out=tmp_path, seeds=1)
    other = study(
        tiny_study(), {"steps": 1, "batch_size": 8, "data.limit": 8}, data=photo_folder, out=tmp_path, seeds=1
    )
    assert plain.file == tmp_path / "T1.json"
    assert len({plain.file, lesser.file, other.file}) == 3
    assert lesser.file.name.startswith("T1+")
    assert study(tiny_study(), ["steps=1"], out=tmp_path, seeds=1).file == lesser.file
    assert study(tiny_study(), out=tmp_path, data="digits").file == plain.file
    assert plain.file.read_text() == before
    assert set(read_results(tmp_path)) == {file.stem for file in (plain.file, lesser.file, other.file)}


def test_other_images_of_the_same_name_are_other_data(tmp_path):
    asked = tiny_study(base={**TINY, "data": "digits"})
    one, other = (asked.recipes([f"data.source={tmp_path / name / 'photos'}"]).values() for name in ("one", "other"))
    assert name_result(asked, "cpu", (), one) != name_result(asked, "cpu", (), other)
    assert name_result(asked, "cpu", (), asked.recipes().values()) == "T1"


@pytest.mark.parametrize(
    ("source", "same"),
    [
        *((name, True) for name in ("data/cifar10", "CIFAR-10/", "cifar_10", "hf:me/cifar10", "torchvision:CIFAR10@x")),
        *((name, False) for name in ("cifar100", "torchvision:CIFAR100@cifar10", "torchvision:SVHN@x", "photos")),
    ],
)
def test_a_published_set_is_known_by_its_name_wherever_it_lies(source, same):
    asked = tiny_study(base={**TINY, "data": "cifar10"})
    name = name_result(asked, "cpu", (), asked.recipes([f"data.source={source}"]).values())
    assert (name == "T1") == same


def test_of_the_same_call_the_result_with_more_seeds_is_kept(tmp_path, caplog):
    study(tiny_study(), out=tmp_path, seeds=1)
    more = study(tiny_study(), out=tmp_path, seeds=2)
    assert not caplog.records
    before, page = more.file.read_text(), more.page.read_text()
    fewer = study(tiny_study(), out=tmp_path, seeds=1)
    assert fewer.seeds == (0,)
    assert (more.file.read_text(), more.page.read_text()) == (before, page)
    assert [record.getMessage() for record in caplog.records] == [
        f"'{more.file}' holds this study with more seeds and stays as it is."
    ]
    study(tiny_study(title="another"), out=tmp_path, seeds=1)
    assert json.loads(more.file.read_text())["study"]["title"] == "another"


def test_an_arm_may_be_a_network_that_is_measured_instead_of_trained(tmp_path):
    trained = study(tiny_study(), out=tmp_path)
    network = str(tmp_path / "pool" / trained.runs["fast"][1])  # or timm:NAME, or a file
    result = study(tiny_study(), out=tmp_path, targets={"fast": network + "@last"})
    assert set(result.statuses["fast"].values()) == {"measured"}
    assert not result.failures
    assert {numbers["norm"] for numbers in result.values["fast"].values()} == {trained.values["fast"][1]["norm"]}
    assert result.values["slow"] == trained.values["slow"]
    assert "not trained here" in result.missing["fast"][0]["accuracy"]
    assert result.file.name.startswith("T1+")  # no result of the study as it is written
    pair = study(tiny_study(), out=tmp_path, targets={"fast": [network, network], "slow": network})
    assert len(pair.seeds) == 2  # as many as an arm has networks
    with pytest.raises(RecipeError, match=r"names the arm 'faster', which does not exist\. Did you mean 'fast'"):
        study(tiny_study(), out=tmp_path, targets={"faster": network})


def test_an_arm_can_be_measured_where_its_loss_is_another_s(tmp_path):
    """The fast arm at that of its epochs whose loss is nearest to the slow arm's last."""
    base = {**TINY, "steps": 9, "checkpoint": {"every": "3 steps", "keep_epochs": [0, 1, 2, 3]}}
    result = study(
        tiny_study(
            base=base,
            measures={**STUDY["measures"], "train_nll": {"probe": "train_nll", "scalar": "nll"}},
            matched={"fast, matched": {"of": "fast", "to": "slow"}},
            expectations=[{"says": "s", "measure": "norm", "greater": ["fast", "fast, matched"]}],
        ),
        out=tmp_path,
        seeds=1,
    )
    goal = result.values["slow"][0]["train_nll"]
    run, data = Run.open(tmp_path / "pool" / result.runs["fast"][0]), DataConfig(source="digits", limit=60)
    at = {n: Measure(probe="train_nll", scalar="nll", checkpoint=f"epoch-{n}") for n in (1, 2, 3)}
    losses = {n: measure_run(run, data, {"nll": measure}).numbers["nll"] for n, measure in at.items()}
    epoch = min(losses, key=lambda n: abs(math.log(losses[n] / goal)))
    assert result.epochs == {"fast, matched": {0: epoch}}
    assert result.values["fast, matched"][0]["train_nll"] == losses[epoch]
    assert "of the whole run" in result.missing["fast, matched"][0]["accuracy"]
    stored = json.loads((tmp_path / "T1.json").read_text())
    assert stored["epochs"] == {"fast, matched": {"0": epoch}}


def test_the_result_of_another_study_with_the_same_claim_is_kept(tmp_path):
    study(tiny_study(seeds=1), out=tmp_path)
    before = (tmp_path / "T1.json").read_text()
    study(tiny_study(seeds=1, arms={"slow": {}, "fast": {"optimizer": {"lr": 0.1}}}), out=tmp_path)
    (kept,) = tmp_path.glob("T1+*.json")
    assert kept.read_text() == before
    assert kept.with_suffix(".html").is_file()
    assert (tmp_path / "T1.json").read_text() != before
