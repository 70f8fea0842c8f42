import pytest
import torch

from vitclinic._core.errors import RunError
from vitclinic.training.checkpoint import Checkpoints


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "run" / "checkpoints")


def model(value):
    return {"w": torch.full((3,), float(value)), "shared": torch.arange(4.0)}


def nested(step):
    return {
        "step": step,
        "best": None,
        "optimizer": {
            "state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1}],
        },
        "empty": {},
    }


def test_nested_state_reads_back_equal(checkpoints):
    checkpoints.save(["last"], model(1), nested(5))
    weights, state = checkpoints.read("last")
    assert torch.equal(weights["w"], model(1)["w"])
    assert state["step"] == 5
    assert state["best"] is None
    assert state["empty"] == {}
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], torch.ones(2))
    assert state["optimizer"]["param_groups"] == [{"lr": 0.1}]


def test_views_and_tied_tensors_are_stored(checkpoints):
    base = torch.arange(12.0)
    checkpoints.save(["last"], {"a": base, "tied": base, "view": base[2:5], "turned": base.view(3, 4).T}, nested(1))
    weights, _ = checkpoints.read("last")
    assert torch.equal(weights["tied"], base)
    assert torch.equal(weights["view"], base[2:5])
    assert torch.equal(weights["turned"], base.view(3, 4).T)


def test_last_keeps_its_forerunner(checkpoints):
    for step in (1, 2, 3):
        checkpoints.save(["last"], model(step), nested(step))
    assert checkpoints.names() == ["last", "previous"]
    assert (checkpoints.read("last")[1]["step"], checkpoints.read("previous")[1]["step"]) == (3, 2)


def damage_truncated(file):
    file.write_bytes(file.read_bytes()[:-7])


def damage_flipped(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [damage_truncated, damage_flipped, lambda file: file.unlink()])
@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "checksums.json"])
def test_a_damaged_last_checkpoint_falls_back_with_a_message(checkpoints, caplog, damage, name):
    for step in (1, 2):
        checkpoints.save(["last"], model(step), nested(step))
    damage(checkpoints.folder / "last" / name)
    _, state = checkpoints.newest_intact()
    assert state["step"] == 1
    assert "damaged" in caplog.text


def test_nothing_whole_is_an_error_not_a_fresh_start(checkpoints):
    checkpoints.save(["last"], model(1), nested(1))
    damage_truncated(checkpoints.folder / "last" / "state.safetensors")
    with pytest.raises(RunError, match="nothing to resume from"):
        checkpoints.newest_intact()


def test_no_checkpoint_yet(checkpoints):
    assert checkpoints.newest_intact() is None


@pytest.mark.parametrize("name", ["last", "best"])
@pytest.mark.parametrize("rename", [0, 1])
def test_a_kill_between_the_renames_loses_no_finished_checkpoint(checkpoints, monkeypatch, name, rename):
    """Cut `publish` off after each of its renames: what was whole before, or what is new, can be read."""
    from pathlib import Path

    for step in (1, 2):
        checkpoints.save([name], model(step), nested(step))
    real, calls = Path.rename, []

    def dying(self, target):
        calls.append(target)
        if len(calls) > rename:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", dying)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save([name], model(3), nested(3))
    monkeypatch.undo()
    step = checkpoints.newest_intact()[1]["step"] if name == "last" else checkpoints.read("best")[1]["step"]
    assert step == 2


def test_asking_for_a_checkpoint_that_is_not_there(checkpoints):
    checkpoints.save(["last"], model(1), nested(1))
    with pytest.raises(RunError, match="no checkpoint 'epoch-7'; it has last"):
        checkpoints.read("epoch-7")
