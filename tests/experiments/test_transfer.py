"""Transfer: a grid of learning rates on a sub-split, then the whole training set, once."""

import json

import numpy as np
import pytest

from vitclinic import transfer
from vitclinic._core.errors import RecipeError
from vitclinic.data import DataConfig, open_data
from vitclinic.experiments.transfer import LRS, plan_transfer
from vitclinic.training import Run, train

TINY = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
SHORT = {"steps": 3, "batch_size": 20, "workers": 0, "data.augment": "none"}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "pretrained"
    return train(data="digits", model=TINY, steps=2, batch_size=20, test=False, out=out)


def test_the_paper_protocol_and_the_splits_of_its_two_stages(pretrained):
    trials, final = plan_transfer(pretrained.path, "digits", lrs=LRS, held_out=0.2)
    assert [recipe.optimizer.lr for recipe in trials] == [0.001, 0.003, 0.01, 0.03]
    for recipe in (*trials, final):
        assert (recipe.optimizer.name, recipe.optimizer.momentum, recipe.optimizer.weight_decay) == ("sgd", 0.9, 0)
        assert (recipe.steps, recipe.batch_size, recipe.clip, recipe.schedule.name) == (500, 512, 1.0, "cosine")
        assert recipe.image_size == 8  # that of the run's own images
    some, whole = open_data(trials[0].data), open_data(final.data)
    assert (len(some.train), len(some.val), len(whole.val)) == (1079, 359, 0)
    assert len(whole.train) == 1079 + 359
    assert np.array_equal(some.test.rows, whole.test.rows)
    assert set(whole.train.rows) == set(some.train.rows) | set(some.val.rows)


def test_it_chooses_on_val_reads_test_once_and_goes_on_where_it_was(pretrained, tmp_path):
    found = transfer(pretrained.path, "digits", SHORT, lrs=[0.01, 0.3], out=tmp_path)
    assert found.lr == max(found.trials, key=found.trials.get)
    assert found.test["count"] == 180
    assert found.run.recipe.optimizer.lr == found.lr
    assert found.run.recipe.init.source == str(pretrained.path)
    runs = [Run.open(path) for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert len(runs) == 3
    assert sum("test" in run.results for run in runs) == 1
    stored = json.loads((tmp_path / "transfer.json").read_text())
    again = transfer(pretrained.path, "digits", SHORT, lrs=[0.01, 0.3], out=tmp_path)
    assert again == found
    assert again.plain() == stored


def test_val_folders_of_the_data_join_the_training_images(tmp_path):
    from PIL import Image

    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        for name, value in (("a", 10), ("b", 200)):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (4, 4), (value + number + 20 * count,) * 3).save(folder / f"{number}.png")
    plain = open_data(str(tmp_path))
    joined = open_data(DataConfig(source=str(tmp_path), train_on_val=True))
    assert (len(joined.train), len(joined.val), len(joined.test)) == (10, 0, 2)
    both = [split.read(np.arange(len(split))) for split in (plain.train, plain.val)]
    assert np.array_equal(joined.train.read(np.arange(10)), np.concatenate(both))
    assert np.array_equal(joined.train.read(np.array([9, 0])), np.concatenate(both)[[9, 0]])
    assert joined.train.labels.tolist() == [*plain.train.labels, *plain.val.labels]


def test_mistakes_are_sentences(pretrained, tmp_path):
    with pytest.raises(RecipeError, match="learning rates above 0, each once"):
        transfer(pretrained.path, "digits", lrs=[0.1, 0.1], out=tmp_path)
    with pytest.raises(RecipeError, match="'held_out' is a share"):
        transfer(pretrained.path, "digits", held_out=0, out=tmp_path)
    with pytest.raises(RecipeError, match="'test' is not for transfer"):
        transfer(pretrained.path, "digits", {"test": False}, out=tmp_path)
