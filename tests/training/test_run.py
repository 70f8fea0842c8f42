import os
import resource
import subprocess
import sys

import pytest
import torch

from tests.processes import holding
from vitclinic._core.errors import RecipeError, RunError
from vitclinic.training import Run, load_model, resume, train


def test_a_finished_run_holds_everything(tiny):
    run = train(tiny())
    assert {p.name for p in run.path.iterdir() if not p.name.startswith(".")} == {
        "recipe.yaml",
        "status.json",
        "environment.json",
        "data.json",
        "metrics.jsonl",
        "checkpoints",
    }
    assert run.status["status"] == "finished"
    assert run.recipe.digest(run.data_facts["digest"]) == run.status["digest"]
    assert run.results["test"]["count"] == 180


def test_load_gives_the_trained_network_back(tiny):
    run = train(tiny())
    network = load_model(run.path)
    assert not network.training
    pixels = torch.rand(4, 1, 8, 8)
    assert torch.equal(network(pixels), load_model(run.path, "best")(pixels))
    assert load_model(run.path, "last")(pixels).shape == (4, 10)
    with pytest.raises(RunError, match="no checkpoint 'epoch-3'"):
        load_model(run.path, "epoch-3")


def test_a_run_without_out_gets_a_name_of_its_own(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = tiny()
    del plain["out"]
    run = train(plain)
    assert run.path.parent.name == "runs"
    assert run.status["digest"][:8] in run.path.name
    with pytest.raises(RunError, match="already holds a run"):
        train(plain)


def test_nothing_is_written_over(tiny, tmp_path):
    run = train(tiny())
    before = (run.path / "metrics.jsonl").read_text()
    with pytest.raises(RunError, match="already holds a run \\(finished\\)"):
        train(tiny(seed=1))
    with pytest.raises(RunError, match="nothing to resume"):
        resume(run.path)
    assert (run.path / "metrics.jsonl").read_text() == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(RunError, match="not empty"):
        train(tiny(out=str(tmp_path / "full")))
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_not_a_run(tmp_path):
    for action in (resume, load_model, Run.open):
        with pytest.raises(RunError, match=r"no recipe\.yaml"):
            action(tmp_path)


def test_two_processes_in_one_directory(tiny, tmp_path):
    with holding(tmp_path / "run"), pytest.raises(RunError, match="Another process is working"):
        train(tiny())
    assert train(tiny()).status["status"] == "finished"  # a killed owner's lock is gone


@pytest.mark.parametrize("place", ["/proc/run", "/dev/null/run"])
def test_a_place_that_cannot_be_written(tiny, place):
    with pytest.raises(RunError, match="Cannot write"):
        train(tiny(out=place))


def test_a_full_disk_is_one_sentence_and_loses_nothing(tiny, tmp_path):
    """The kernel refuses the write, as a full disk would: the run's files may not grow beyond a limit."""
    plain = tiny(steps=10, checkpoint={"every": "5 steps"})
    code = (
        "import json, resource, signal, sys\n"
        "from vitclinic._core.callback import Callback\nfrom vitclinic._core.errors import RunError\n"
        "from vitclinic.training import train\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "class Fill(Callback):\n"
        "    def on_step(self, trainer):\n"
        "        if trainer.step == 7:\n"
        "            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
        "try:\n    train(json.loads(sys.argv[1]), callbacks=[Fill()])\n"
        "except RunError as error:\n    print('sentence:', error)\n"
    )
    import json

    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(plain)], capture_output=True, text=True, env=os.environ, check=False
    )
    assert "sentence: Cannot write" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1
    run = Run(tmp_path / "run")
    assert run.status["status"] == "failed"
    assert run.checkpoints.read("last")[1]["step"] == 5
    assert resume(run.path).status["status"] == "finished"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_resumed_run_keeps_its_recipe(tiny):
    from vitclinic._core.callback import Callback

    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 3:
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(tiny(), callbacks=[Stop()])
    run = Run.open(tiny()["out"])
    assert run.status["status"] == "failed"
    with pytest.raises(RecipeError, match="seed cannot change"):
        resume(run.path, ["seed=4"])
    assert resume(run.path, workers=1).status["status"] == "finished"


def test_moved_data_can_be_named_anew(tiny, tmp_path, picture):
    from vitclinic._core.callback import Callback

    class Stop(Callback):
        def on_step(self, trainer):
            raise RuntimeError("power cut")

    for number in range(20):
        (tmp_path / "set" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        picture(number, (8, 8)).save(tmp_path / "set" / "ab"[number % 2] / f"{number}.png")
    with pytest.raises(RuntimeError):
        train(tiny(data=str(tmp_path / "set")), callbacks=[Stop()])
    (tmp_path / "set").rename(tmp_path / "moved")
    with pytest.raises(RecipeError, match="out cannot change"):
        resume(tmp_path / "run", {"out": "elsewhere"}, data=tmp_path / "moved")
    assert resume(tmp_path / "run", data=tmp_path / "moved").status["status"] == "finished"


def test_a_directory_whose_making_was_cut_off_can_be_used(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "environment.json").write_text("{}")
    assert train(tiny()).status["status"] == "finished"


def test_changed_data_cannot_be_resumed(tiny, tmp_path, picture):
    from vitclinic._core.callback import Callback

    class Stop(Callback):
        def on_step(self, trainer):
            raise RuntimeError("power cut")

    for name in ["a", "b"]:
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(20):
            picture(number, (8, 8)).save(tmp_path / "set" / name / f"{number}.png")
    with pytest.raises(RuntimeError):
        train(tiny(data=str(tmp_path / "set")), callbacks=[Stop()])
    picture(77, (8, 8)).save(tmp_path / "set" / "a" / "0.png")
    with pytest.raises(RunError, match="has changed"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("count", [1, 3])
def test_very_few_images_of_one_class_train(tiny, tmp_path, picture, count):
    (tmp_path / "set" / "only").mkdir(parents=True)
    for number in range(count):
        picture(number, (8, 8)).save(tmp_path / "set" / "only" / f"{number}.png")
    run = train(tiny(data=str(tmp_path / "set")))
    assert run.status["status"] == "finished"
    assert load_model(run.path)(torch.rand(1, 3, 8, 8)).shape == (1, 1)
