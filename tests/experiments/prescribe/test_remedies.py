"""Remedies: what each changes, which there are, and what is wrong with those that are not."""

import pytest

from vitclinic import list_remedies, list_treatments
from vitclinic._core.errors import RecipeError
from vitclinic.experiments.prescribe import remedies
from vitclinic.experiments.prescribe.arms import Arm, explain_clash, grow
from vitclinic.experiments.prescribe.prescription import describe_changes
from vitclinic.experiments.prescribe.remedies import TABLE, KnownRemedy, find_remedy, known_remedies, make_remedy
from vitclinic.training import build_recipe

RECIPES = [
    build_recipe(),
    build_recipe({"data": {"augment": "deit"}, "optimizer": {"name": "sgd", "lr": 0.1}, "ema": 0.9, "batch_size": 16}),
]


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: getattr(entry, "name", entry))
def test_every_entry_of_the_table_changes_some_recipe(entry):
    if isinstance(entry, str):
        assert entry in list_treatments()
        return
    made = [remedy for recipe in RECIPES if (remedy := entry.make(recipe)) is not None]
    assert made
    assert entry.changes


def test_names_are_unique_and_can_be_joined():
    names = [entry.name if isinstance(entry, KnownRemedy) else entry for entry in TABLE]
    assert len(names) == len(set(names))
    assert not any(" + " in name or "=" in name for name in names)


def test_a_network_that_is_registered_is_tried_first_and_one_that_is_not_is_skipped(monkeypatch):
    monkeypatch.setattr(remedies, "list_models", lambda: ["alternet18"])
    assert list(known_remedies(RECIPES[0]))[:2] == ["muon", "AlterNet"]
    monkeypatch.setattr(remedies, "list_models", lambda: ["alternet18", "hybrid_vit"])
    assert next(iter(known_remedies(RECIPES[0]))) == "hybrid network"
    assert "hybrid network" in [row["name"] for row in remedies.describe_remedies()]


def test_what_this_version_does_not_have_is_skipped():
    def made(overrides):
        return KnownRemedy("made", "", overrides).make(RECIPES[0])

    assert made({"treatments": ["sam"]}) is not None
    assert made({"treatments": ["sam_in_the_morning"]}) is None
    assert made({"treatments": [{"sam": {"rho": 0.2}}]}) is not None
    assert made({"treatments": [{"sam": {"morning": True}}]}) is None
    assert made({"optimizer.name": "of tomorrow"}) is None
    assert made({"sleep.hours": 8}) is None
    assert made({"model": "sleeping_transformer"}) is None
    assert (
        KnownRemedy("made", "", {"treatments": [{"sam": {"rho": 0.2}}]}).make(build_recipe({"treatments": ["sam"]}))
        is None
    )


def test_another_optimizer_has_rates_and_options_of_its_own():
    recipe = build_recipe({"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5, "nesterov": True}})
    changed = find_remedy("adamw", recipe).apply(recipe)
    assert changed.optimizer == build_recipe().optimizer
    recipe = build_recipe({"optimizer": {"name": "lamb", "lr": 0.02}})
    assert find_remedy("adamw", recipe).apply(recipe).optimizer == build_recipe().optimizer
    muon = find_remedy("muon", recipe).apply(recipe).optimizer
    assert (muon.name, muon.lr, muon.weight_decay) == ("muon", 1e-2, 0.3)


def test_what_the_recipe_has_already_is_left_out():
    plain, other = (set(known_remedies(recipe)) for recipe in RECIPES)
    assert {"crop and flip", "adamw"} & plain == set()
    assert {"crop and flip", "no augmentation", "adamw"} <= other
    assert {"deit augmentation", "ema", "batch size / 2"} & other == set()
    assert "4 blocks" not in known_remedies(build_recipe({"model": {"name": "vit_tiny_fitted", "depth": 4}}))
    pretrained = set(known_remedies(build_recipe({"model": {"name": "deit_tiny_patch16_224", "pretrained": True}})))
    assert "AlterNet" not in pretrained
    assert "lr / 3" in pretrained


def test_another_network_sees_the_same_images_and_has_its_own_keywords():
    recipe = build_recipe({"model": {"name": "vit_tiny_fitted", "depth": 4, "img_size": 48, "in_chans": 1}})
    changed = known_remedies(recipe)["AlterNet"].apply(recipe)
    assert changed.model.name == "alternet18"
    assert "depth" not in changed.model.keywords
    assert (changed.model.img_size, changed.model.in_chans) == (48, 1)


def test_a_remedy_overlays_keys_and_adds_treatments():
    recipe = build_recipe(
        {"treatments": ["sam"], "optimizer": {"lr": 0.1}, "data": {"augment": {"level": "deit", "mixup": 0.1}}}
    )
    remedy = make_remedy(
        "mine", {"optimizer.weight_decay": 0.1, "data": {"augment": {"smoothing": 0.2}}, "treatments": ["gap_head"]}
    )
    changed = remedy.apply(recipe)
    assert (changed.optimizer.lr, changed.optimizer.weight_decay) == (0.1, 0.1)
    assert (changed.data.augment.mixup, changed.data.augment.smoothing) == (0.1, 0.2)
    assert changed.treatments.written == ["sam", "gap_head"]
    assert remedy.keys == {"optimizer.weight_decay", "data.augment.smoothing", "treatments.gap_head"}
    # A level of augmentation is that level alone.
    assert find_remedy("crop and flip", recipe).apply(recipe).data.augment == build_recipe().data.augment


def test_rates_are_those_of_the_recipe():
    recipe = build_recipe({"optimizer": {"lr": 2e-3}})
    found = known_remedies(recipe)
    assert found["lr x 3"].apply(recipe).optimizer.lr == 6e-3
    assert found["lr / 3"].apply(recipe).optimizer.lr == 6.67e-4


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("lr x3", "There is no remedy 'lr x3'. Did you mean 'lr x 3'?"),
        ("hybrid", "There is no remedy 'hybrid'"),
        ("crop and flip", "'crop and flip' has no effect on this recipe"),
        ("optimizer.lr=1e-3", "has no effect: the recipe already sets it"),
        ("optimizer.rate=1", "Unknown key 'optimizer.rate'"),
        ("epochs=3", "changes epochs, which all arms have in common"),
        ("model.img_size=64", "changes model.img_size, which all arms have in common"),
        ({"mine": {"data.limit": 3, "seed": 1}}, "changes seed and data.limit, which all arms have in common"),
        ({"mine": 3}, "'mine' needs overrides of the recipe"),
        ({"samm": {"rho": 1}}, "Unknown key 'rho'"),
        ("optimizer.name=mon", "'optimizer.name'"),
    ],
)
def test_mistakes_are_sentences(entry, message):
    with pytest.raises(RecipeError) as caught:
        find_remedy(entry, build_recipe())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ("lr x 3", "lr / 3", "both set optimizer.lr"),
        ("lr x 3", "ema", None),
        ("sam", {"sam": {"rho": 0.2}}, "both set treatments.sam"),
        ("AlterNet", "4 blocks", "both change the network"),
        ("4 blocks", "AlterNet", "both change the network"),
        ("4 blocks", "model.embed_dim=96", None),
        ("no augmentation", "deit augmentation", "both set data.augment.level"),
    ],
)
def test_two_values_of_one_key_do_not_go_together(one, other, clash):
    recipe = build_recipe()
    first, second = (find_remedy(entry, recipe) for entry in (one, other))
    assert explain_clash(Arm((first,)), second) == clash
    assert explain_clash(Arm(), second) is None


def test_an_arm_grows_at_its_end_and_else_at_its_beginning_and_is_read_as_it_was_written():
    recipe = build_recipe()
    arm = Arm((find_remedy("lr x 3", recipe), find_remedy({"sam": {"rho": 0.2}}, recipe)))
    assert [one.name for one in grow(arm, find_remedy("gap_head", recipe))] == [
        "lr x 3 + sam(rho=0.2) + gap_head",
        "gap_head + lr x 3 + sam(rho=0.2)",
    ]
    assert [one.name for one in grow(arm, find_remedy("ema", recipe))] == ["lr x 3 + sam(rho=0.2) + ema"]
    assert Arm.read(arm.record()) == arm
    assert Arm().record() == []


def test_changes_of_a_recipe_in_words():
    plain = build_recipe({"model": {"name": "vit_tiny_fitted", "depth": 6}, "data": {"augment": "deit"}, "steps": 100})
    changed = build_recipe(
        plain, ["model=alternet18", "data.augment=none", "clip=null", "steps=50", "treatments=[sam]"]
    )
    assert describe_changes(plain, changed) == [
        "network: vit_tiny_fitted (depth 6) becomes alternet18",
        "treatments: none becomes sam",
        "augmentation: deit becomes none",
        "clip: 1 becomes none",
        "steps: 100 becomes 50",
    ]
    assert describe_changes(plain, plain) == []
    assert describe_changes(build_recipe(), build_recipe({"epochs": 12.5})) == ["epochs: 30 becomes 12.5"]


def test_remedies_are_listed_in_their_order():
    names = list_remedies()
    assert names.index("conv_stem") < names.index("sam") < names.index("talking_heads")
    assert set(list_treatments()) <= set(names)
