"""`train`, `resume` and `build_recipe` as Python functions: typed keywords, overrides, values as they are."""

import inspect
import shutil
from pathlib import Path
from typing import get_args

import pytest

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError
from vitclinic.data import open_data
from vitclinic.tasks import Classification
from vitclinic.training import Recipe, build_recipe, resume, train
from vitclinic.training.optimizer import OptimizerConfig
from vitclinic.training.overrides import default_base
from vitclinic.treatments import SharpnessAware, Treatments

SMALLEST = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


def test_every_key_of_a_recipe_is_a_keyword():
    keywords = {
        name: parameter
        for name, parameter in inspect.signature(train).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert keywords.keys() - {"callbacks"} == Recipe.model_fields.keys()
    assert all(parameter.default is None for name, parameter in keywords.items() if name != "callbacks")
    assert all(parameter.annotation != "Any" for parameter in keywords.values())
    documented = inspect.getdoc(train)
    assert all(f"\n    {name}: " in documented for name in keywords)
    recipe = build_recipe("plain")
    for config in (recipe.optimizer, recipe.schedule):
        names = get_args(type(config).model_fields["name"].annotation)
        assert all(f'`"{name}"`' in documented for name in names), names


def test_keywords_win_over_overrides_and_these_over_the_recipe():
    recipe = build_recipe(
        {"seed": 1, "epochs": 3, "optimizer": "sgd"}, {"seed": 2, "optimizer.lr": 0.5}, seed=3, steps=7
    )
    assert (recipe.seed, recipe.epochs, recipe.steps) == (3, None, 7)
    assert (recipe.optimizer.name, recipe.optimizer.lr) == ("sgd", 0.5)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.lr=0.5", "data.augment=none", "model=resnet18", "model.drop_rate=0.1"],
        {"optimizer.lr": 0.5, "data.augment": "none", "model": {"name": "resnet18", "drop_rate": 0.1}},
        {"optimizer": {"lr": 0.5}, "data": {"augment": "none"}, "model": "resnet18", "model.drop_rate": 0.1},
    ],
)
def test_overrides_are_words_dotted_keys_or_nested_data(overrides):
    expected = {
        "optimizer": {"lr": 0.5},
        "data": {"augment": {"level": "none"}},
        "model": {"name": "resnet18", "drop_rate": 0.1},
    }
    assert build_recipe(None, overrides).plain() == expected


def test_python_values_are_taken_as_they_are(tmp_path):
    recipe = build_recipe(
        {"data": Path("a: b #c")},
        {"out": tmp_path / "x, y", "data.limit": 3},
        optimizer={"betas": (0.8, 0.9)},
        treatments=[SharpnessAware(rho=0.2)],
        task=Classification(),
    )
    assert (recipe.data.source, recipe.data.limit, recipe.out) == ("a: b #c", 3, str(tmp_path / "x, y"))
    assert recipe.optimizer.betas == [0.8, 0.9]
    assert recipe.plain()["treatments"] == [{"sam": {"rho": 0.2}}]
    assert build_recipe(recipe, optimizer=OptimizerConfig(name="sgd")).optimizer.name == "sgd"
    assert build_recipe(recipe, treatments=Treatments(["gap_head"])).treatments.written == ["gap_head"]
    assert build_recipe(recipe) is recipe


def test_none_is_not_given_as_a_keyword_and_a_value_as_an_override():
    assert build_recipe({"clip": 2.0}, clip=None).clip == 2.0
    assert build_recipe({"clip": 2.0}, {"clip": None}).clip is None


@pytest.mark.parametrize(
    ("overrides", "keys", "message"),
    [
        ("epochs=3", {}, "^Overrides must be a mapping or a list of 'key=value' words"),
        (None, {"optimzer": "sgd"}, r"^Unknown key 'optimzer'. Did you mean 'optimizer'\?$"),
        ({"optimizer.lrr": 1.0}, {}, r"^Unknown key 'optimizer.lrr'. Did you mean 'lr'\?$"),
        ({"steps": 4}, {"epochs": 3}, "^Give one of epochs, steps, max_time"),
    ],
)
def test_mistakes_are_sentences(overrides, keys, message):
    with pytest.raises(RecipeError, match=message):
        build_recipe(None, overrides, **keys)


def test_nothing_is_not_trained_for_minutes():
    with pytest.raises(RecipeError, match="Say what to train on"):
        train()


def test_an_open_dataset_is_refused_with_what_to_do():
    with pytest.raises(RecipeError, match="Pass what was given to open_data"):
        train(data=open_data("digits"))


def test_a_moved_folder_with_an_odd_name_is_trained_on_and_resumed(tmp_path, photo_folder, tiny):
    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 2:
                raise KeyboardInterrupt

    plain = tiny()
    model = {**plain["model"], "img_size": 16}
    odd, moved = tmp_path / "1e3: [x", tmp_path / "null"
    shutil.copytree(photo_folder, odd)
    with pytest.raises(KeyboardInterrupt):
        train(model=model, data=odd, steps=4, batch_size=8, out=tmp_path / "#run", callbacks=[Stop()])
    odd.rename(moved)
    run = resume(tmp_path / "#run", data=moved)
    assert run.status["status"] == "finished"
    assert run.path == tmp_path / "#run"


def test_without_recipe_network_and_task_the_recipe_is_small(tmp_path):
    assert default_base(["data=photos/", "optimizer.lr=1"]) == default_base({"data.limit": 3}) == "small"
    assert default_base(["model.depth=2"]) is default_base(model="resnet18") is default_base({"task": "own"}) is None
    assert default_base(["task=segmentation", "steps=3"]) == "segmentation"
    assert default_base(task={"name": "segmentation", "width": 64}) == "segmentation"
    assert default_base(task="detection") == "detection"
    assert default_base(["task=segmentation", "data=streets/"]) is None
    assert default_base(task="segmentation", model="vit") is default_base(task="vqa") is None
    run = train(data="digits", steps=1, test=False, out=tmp_path / "run")
    assert run.recipe.model.name == "hybrid_vit"
    assert run.recipe.optimizer == build_recipe("small").optimizer
    assert train(model=SMALLEST, data="digits", steps=1, test=False, out=tmp_path / "own").recipe.batch_size == 128
