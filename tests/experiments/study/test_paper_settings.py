"""The studies at the paper's scale against the papers' own tables of settings, field by field.

Written from the papers' texts: park2022 App. A; chen2022 Tables 11 and 12, App. H; wang2022 "Training" and Tables 1-3;
hyeonwoo2023 Sec. 4.1 (DeiT's settings); gong2021 Sec. 5.1.
"""

import pytest

from vitclinic.experiments.study.catalogue import open_study, shipped_studies

CLAIMS = list(shipped_studies())
PARK = {
    "batch_size": 96,
    "epochs": 300,
    "optimizer.name": "adamw",
    "optimizer.lr": 1.25e-4,
    "optimizer.weight_decay": 0.05,
    "schedule.name": "cosine",
    "schedule.warmup": 5,
    "loss.name": "softmax",
    "data.source": "cifar100",
    "data.held_out": 0,
    "clip": None,
}
CHEN = {
    "batch_size": 4096,
    "epochs": 300,
    "optimizer.name": "adamw",
    "optimizer.lr": 3e-3,
    "optimizer.weight_decay": 0.3,
    "schedule.warmup": "10000 steps",
    "loss.name": "sigmoid",
    "data.source": "imagenet",
    "data.held_out": 0,
    "data.augment.level": "light",
    "clip": 1.0,
}
CHEN_RESNET = CHEN | {
    "epochs": 90,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1 * 4096 / 256,
    "optimizer.weight_decay": 1e-3,
    "schedule.warmup": "5000 steps",
    "schedule.name": "cosine",
    "loss.name": "softmax",
    "clip": None,
}
STRONG = {"optimizer.lr": 1e-3, "optimizer.weight_decay": 0.1}
DEIT = {
    "batch_size": 1024,
    "epochs": 300,
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-3,
    "optimizer.weight_decay": 0.05,
    "schedule.name": "cosine",
    "schedule.warmup": 5,
    "loss.name": "softmax",
    "data.source": "imagenet",
    "data.held_out": 0,
    "data.augment.level": "deit",
    "clip": None,
}
RHO = {"vit_base_patch16_224": 0.2, "mixer_b16_224": 0.6, "resnet152": 0.02}
"""chen2022 Table 11, supervised; adversarial training has 0.1 for ViT-B/16."""
STEM_RATE = 2e-3
"""wang2022's 1e-3 at batch 1024, as DeiT's command line scales it by batch / 512."""


CONTRASTIVE = CHEN | {  # App. C
    "batch_size": 2048,
    "epochs": 350,
    "optimizer.name": "lamb",
    "optimizer.lr": 1e-3 * 2048 / 256,
    "schedule.name": "cosine",
    "task.temperature": 0.1,
    "loss.name": "softmax",
}
CLASSIFIER = CHEN | {  # App. C
    "batch_size": 2048,
    "epochs": 90,
    "optimizer.name": "rmsprop",
    "optimizer.lr": 0.05,
    "optimizer.weight_decay": 1e-6,
    "schedule.name": "exponential",
    "schedule.warmup": 0,
    "freeze": ["backbone"],
    "loss.name": "softmax",
}
TRANSFER = CHEN | {  # App. D, Tables 9 and 10; the protocol that it follows has SGD
    "batch_size": 512,
    "epochs": None,
    "steps": 10_000,
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.9,
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0,
    "schedule.warmup": "500 steps",
    "data.source": "cifar10",
    "model.img_size": 224,
    "loss.name": "softmax",
}
CHEN_STAGES = {"contrastive": CONTRASTIVE, "classifier": CLASSIFIER, "transferred": TRANSFER}
DINO = {  # wang2022 Table 2 (rate, warm-up, epochs), which follows DINO's own settings for 100 epochs
    "batch_size": 256,
    "epochs": 100,
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-4,
    "optimizer.weight_decay": 0.04,
    "optimizer.weight_decay_end": 0.4,
    "schedule.name": "cosine",
    "schedule.warmup": 10,
    "data.source": "imagenet",
    "data.held_out": 0,
    "clip": 3.0,
    "task.outputs": 65536,
    "task.momentum": 0.996,
    "task.local_crops": 8,
    "task.centring": "centre",
}
REID = {  # wang2022 Table 4 (rates), which follows TransReID's settings
    "batch_size": 64,
    "epochs": 120,
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.9,
    "optimizer.weight_decay": 1e-4,
    "schedule.name": "cosine",
    "data.source": "market1501",
    "model.img_size": [256, 128],
    "task.instances": 4,
    "clip": None,
}


def chen_settings(claim, arm, recipe):
    name = recipe.model.name
    if claim == "C12" and arm.split()[0] in CHEN_STAGES:
        return CHEN_STAGES[arm.split()[0]]
    if name.startswith("resnet"):
        return CHEN_RESNET
    wanted = CHEN | {"schedule.name": "linear" if name.startswith("mixer") else "cosine"}
    if recipe.optimizer.name == "sgd":  # Sec. 4.2: ViT with SGD, of which the paper gives no rate
        return wanted | {"optimizer.name": "sgd", "optimizer.lr": 1.6, "optimizer.weight_decay": 1e-3}
    if arm.endswith("augmented"):
        return wanted | STRONG
    if claim == "C9" and "fewe" in arm:  # H.2: the batch shrinks with the data, the rate stays
        return wanted | {"batch_size": 512 if "fewest" in arm else 1024}
    if claim == "C11":
        return wanted | {"optimizer.weight_decay": {"little": 0.2, "middle": 0.3, "much": 0.5}[arm.split()[0]]}
    return wanted


def settings(claim, arm, recipe):
    if claim[0] == "P":
        return PARK
    if claim[0] == "C":
        return chen_settings(claim, arm, recipe)
    if claim == "W8":
        rate = 5e-2 if arm.startswith("large") else 1.6e-3
        return DINO if arm.startswith("DINO") else REID | {"optimizer.lr": rate}
    if claim == "W9":  # Tables 6 and 7; rates as DeiT's code scales them
        rate = 1e-4 if arm.startswith("two") else 1e-3 if arm.endswith("stem") else 5e-4
        return DINO if arm == "DINO" else DEIT | {"optimizer.lr": rate * 1024 / 512}
    if claim in ("G1", "G2", "G3"):
        return DEIT | {"epochs": 400}
    if claim in ("W1", "W2"):
        return {key: value for key, value in DEIT.items() if key != "optimizer.lr"}  # the ladder
    changed = claim in ("W5", "W6", "W7") or (claim == "W3" and arm == "conv stem")
    return DEIT | {"optimizer.lr": STEM_RATE} if changed else DEIT


def read(recipe, path):
    for part in path.split("."):
        recipe = getattr(recipe, part)
    return recipe


@pytest.mark.parametrize("claim", CLAIMS)
def test_at_the_paper_s_scale_every_field_is_the_paper_s(claim):
    for arm, recipe in open_study(claim).recipes(scale="paper").items():
        if claim == "C3":  # at initialisation: nothing is trained
            continue
        wanted = settings(claim, arm, recipe)
        if claim in ("P13", "G4"):
            wanted = {key: value for key, value in wanted.items() if key != "data.augment.level"}
        assert {key: read(recipe, key) for key in wanted} == wanted, arm


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim[0] == "C" and claim != "C3"])
def test_dropout_stochastic_depth_and_rho_are_those_of_tables_11_and_12(claim):
    for arm, recipe in open_study(claim).recipes(scale="paper").items():
        keywords, name = recipe.model.keywords, recipe.model.name
        dropped = (keywords.get("pos_drop_rate", 0.0), keywords.get("proj_drop_rate", 0.0))
        assert dropped == ((0.1, 0.1) if name.startswith("vit") else (0.0, 0.0)), arm
        if name.startswith("mixer"):
            assert keywords["drop_path_rate"] == 0.1
        for sam in (treatment for treatment in recipe.treatments if treatment.name == "sam"):
            own = 0.02 if arm.startswith("contrastive") else 0.1 if claim == "C10" else RHO[name]
            assert (sam.rho, sam.m) == (own, 32), arm


def test_strong_augmentation_is_that_of_h_3():
    for claim, arm in (("C9", "ViT, augmented"), ("C9", "Mixer, augmented"), ("C13", "augmented")):
        augment = open_study(claim).recipes(scale="paper")[arm].data.augment.resolve()
        assert (augment.randaugment, augment.mixup, augment.mix_probability) == ("rand-m15-n2-mmax15", 1.0, 0.5)


def test_small_data_are_augmented_as_in_park2022():
    for claim in (claim for claim in CLAIMS if claim[0] == "P" and claim != "P13"):
        for arm, recipe in open_study(claim).recipes(scale="paper").items():
            augment = recipe.data.augment.resolve()
            assert (augment.mixup, augment.cutmix, augment.erasing, augment.repeats) == (1.0, 0.8, 0.0, 1), (claim, arm)
            assert (augment.randaugment, augment.smoothing) == ("rand-m9-n2-mstd0.5-inc1", 0.1), (claim, arm)
