"""The papers' recipes against the papers' tables, field by field, and every shipped recipe against a dry run.

The numbers here are copied from the papers (and from DeiT's and park2022's published settings, where a paper refers to
them), not from the recipes.
"""

import re
from pathlib import Path

import pytest

from vitclinic import list_recipes, plan_run
from vitclinic.cli.list import TWO_CORES, describe_recipes, recipe_header
from vitclinic.training import build_recipe, read_shipped_recipes

ROOT = Path(__file__).parent.parent.parent

INCEPTION = {"randaugment": "off", "erasing": 0, "mixup": 0, "cutmix": 0, "smoothing": 0, "repeats": 1}
DEIT = {
    "randaugment": "rand-m9-n2-mstd0.5-inc1",
    "erasing": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "smoothing": 0.1,
    "repeats": 3,
}
DIVERSE = {**DEIT, "mixup": 0, "repeats": 1}  # gong2021 Sec. 5.1: neither mixup nor repeated augmentation
PARK = {**DEIT, "randaugment": "rand-m9-n2-mstd1.0", "erasing": 0, "mixup": 1.0, "cutmix": 0.8, "repeats": 1}

CHEN_VIT = {  # Table 12
    "optimizer": "adamw",
    "lr": 3e-3,
    "weight_decay": 0.3,
    "betas": [0.9, 0.999],
    "batch_size": 4096,
    "epochs": 300,
    "warmup": "10000 steps",
    "schedule": "cosine",
    "clip": 1.0,
    "augment": INCEPTION,
    "loss": "sigmoid",
    "keywords": {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1},
    "precision": "fp32",
    "final_lr": 0,
}
CHEN_MIXER = {**CHEN_VIT, "schedule": "linear", "keywords": {"drop_path_rate": 0.1}}
CHEN_RESNET = {
    **CHEN_VIT,
    "optimizer": "sgd",
    "lr": 0.1 * 4096 / 256,
    "momentum": 0.9,
    "weight_decay": 1e-3,
    "epochs": 90,
    "warmup": "5000 steps",
    "clip": None,
    "loss": "softmax",
    "keywords": {},
}
DEIT_BASE = {  # DeiT, Table 9, and its published code
    "optimizer": "adamw",
    "lr": 5e-4 * 1024 / 512,
    "weight_decay": 0.05,
    "betas": [0.9, 0.999],
    "batch_size": 1024,
    "epochs": 300,
    "warmup": 5,
    "schedule": "cosine",
    "clip": None,
    "augment": DEIT,
    "loss": "softmax",
    "keywords": {"drop_path_rate": 0.1},
    "precision": "fp16",
    "final_lr": 1e-5,
}
GONG = {**DEIT_BASE, "epochs": 400, "augment": DIVERSE, "keywords": {"drop_path_rate": 0.5}}  # Sec. 5.1
VOLO = {  # Table 2, and VOLO's published code: 300 epochs and 10 of cooldown, MixToken with Beta(1, 1)
    **DEIT_BASE,
    "lr": 1.6e-3,
    "epochs": 300 + 10,
    "warmup": 20,
    "augment": {**DIVERSE, "cutmix_cell": 16},
    "model": "volo_d1_224",
    "token_labels": {"source": "timm:dm_nfnet_f6", "weight": 0.5, "class_targets": "teacher", "top": 5},
}
PARK_BASE = {  # App. A.1
    **DEIT_BASE,
    "lr": 1.25e-4,
    "batch_size": 96,
    "augment": PARK,
    "clip": 5.0,
    "precision": "fp32",
    "final_lr": 0,
}
UPERNET = {  # hyeonwoo2023 Sec. 4.3, gong2021 Sec. 5.2
    **DEIT_BASE,
    "lr": 6e-5,
    "weight_decay": 0.01,
    "batch_size": 16,
    "epochs": None,
    "warmup": "1500 steps",
    "final_lr": 0,
    "augment": INCEPTION,
}
LOSSES = {"patch_diversity": {"cosine": 1.0, "contrastive": 1.0, "mixing": 1.0}}
BROADCAST = {"context_broadcasting": {"scaled": False, "position": "mlp_end", "layers": "upper"}}
STEM = {"conv_stem": {"components": "3Conv+3BN+3ReLU+1Proj", "strides": [2, 1, 1, 8], "act": "relu", "hidden": 64}}
ALTERNET = {"stem": "cifar", "msas": [0, 1, 1, 2], "heads": [3, 6, 12, 24], "window": 4, "drop_path_rate": 0.1}
VIT_TI = {"patch_size": 2, "embed_dim": 192, "depth": 12, "num_heads": 3, "drop_path_rate": 0.1}


def sam(rho):
    """SAM with the strength of Table 11, each of 128 cores with its own 32 images."""
    return {"sam": {"rho": rho, "m": 32, "adaptive": False, "every": 1}}


PAPERS = {
    "chen2022-vit-b16": {**CHEN_VIT, "model": "vit_base_patch16_224", "score": "74.6%"},
    "chen2022-vit-b16-sam": {
        **CHEN_VIT,
        "model": "vit_base_patch16_224",
        "treatments": sam(0.2),
        "score": "79.9%",
    },
    "chen2022-vit-s16-sam": {
        **CHEN_VIT,
        "model": "vit_small_patch16_224",
        "treatments": sam(0.1),
        "score": "78.1%",
    },
    "chen2022-mixer-b16-sam": {**CHEN_MIXER, "model": "mixer_b16_224", "treatments": sam(0.6), "score": "77.4%"},
    "chen2022-resnet152-sam": {**CHEN_RESNET, "model": "resnet152", "treatments": sam(0.02), "score": "79.3%"},
    "chen2022-vit-b16-21k-sam": {  # Sec. 5.1; Dosovitskiy et al. (2021), Table 3
        **CHEN_VIT,
        "lr": 1e-3,
        "weight_decay": 0.03,
        "epochs": 90,
        "schedule": "linear",
        "data": "imagenet21k",
        "model": "vit_base_patch16_224",
        "treatments": sam(0.2),
        "score": "1.4 points",
    },
    "chen2022-vit-b16-21k-1k": {  # Sec. 5.1, Table 9; Dosovitskiy et al. (2021), Table 4
        **CHEN_VIT,
        "optimizer": "sgd",
        "momentum": 0.9,
        "lr": 0.03,
        "weight_decay": 0,
        "batch_size": 512,
        "epochs": None,
        "steps": 20_000,
        "warmup": "500 steps",
        "loss": "softmax",
        "keywords": {},
        "init": "timm:vit_base_patch16_224.augreg_in21k",
        "model": "vit_base_patch16_224",
        "score": "1.4 points",
    },
    "wang2022-deit-s": {**DEIT_BASE, "model": "deit_small_patch16_224", "score": "79.8%"},
    "wang2022-deit-s-convstem": {
        **DEIT_BASE,
        "lr": 1e-3 * 1024 / 512,
        "model": "deit_small_patch16_224",
        "treatments": STEM,
        "score": "81.9%",
    },
    "wang2022-volo-d1": {**VOLO, "treatments": {"conv_stem": {"components": "1Proj"}}, "score": "83.4%"},
    "wang2022-volo-d1-convstem": {**VOLO, "score": "84.1%"},
    "wang2022-deit-s-two-stage": {  # Tables 6 and 7; rho is chen2022's, whose paper does not give one
        **DEIT_BASE,
        "lr": 1e-4 * 1024 / 512,
        "init": "timm:vit_small_patch16_224.dino",
        "model": "deit_small_patch16_224",
        "treatments": sam(0.1),
        "score": "81.6%",
    },
    "hyeonwoo2023-deit-s-cb": {
        **DEIT_BASE,
        "lr": 1e-3 * 1024 / 1024,
        "model": "deit_small_patch16_224",
        "treatments": BROADCAST,
        "score": "80.8%",
    },
    "hyeonwoo2023-deit-ti-cb": {
        **DEIT_BASE,
        "lr": 1e-3 * 1024 / 1024,
        "model": "deit_tiny_patch16_224",
        "treatments": BROADCAST,
        "score": "73.4%",
    },
    "hyeonwoo2023-mask-rcnn-ti-cb": {  # Sec. 4.4; the warm-up and the dropped paths are Swin's and DeiT's
        **DEIT_BASE,
        "lr": 1e-4 * 16 / 16,
        "batch_size": 16,
        "epochs": 12,
        "warmup": "500 steps",
        "final_lr": 0,
        "augment": INCEPTION,
        "model": "deit_tiny_patch16_224",
        "treatments": BROADCAST,
        "score": "35.1",
    },
    "hyeonwoo2023-upernet-ti-cb": {  # Sec. 4.3; the warm-up is Swin's, the dropped paths are DeiT's
        **UPERNET,
        "steps": 40_000,
        "schedule": "polynomial",
        "model": "deit_tiny_patch16_224",
        "treatments": BROADCAST,
        "data": "ade20k",
        "task": {"width": 192},
        "score": "36.5%",
    },
    "hyeonwoo2023-vilt-vqa2-cb": {  # Sec. 4.7; ViLT's published code
        **UPERNET,
        "lr": 1e-4,
        "betas": [0.9, 0.98],
        "head_lr": 1e-3,
        "batch_size": 256,
        "epochs": 10,
        "warmup": "10%",
        "schedule": "linear",
        "model": "vit_base_patch32_384",
        "keywords": {},
        "treatments": {"context_broadcasting": {"scaled": True, "tokens": "text"}},
        "data": "vqa2",
        "score": "71.46%",
    },
    "gong2021-upernet-swin-b-ade20k": {
        **UPERNET,
        "steps": 160_000,
        "model": "swin_base_patch4_window7_224",
        "keywords": {"drop_path_rate": 0.3},
        "late_drop_path": (0.5, 0.2),
        "data": "ade20k",
        "task": {"width": 512, "crop": None},
        "score": "48.4%",
    },
    "gong2021-upernet-swin-b-cityscapes": {
        **UPERNET,
        "steps": 80_000,
        "model": "swin_base_patch4_window7_224",
        "keywords": {"drop_path_rate": 0.3},
        "late_drop_path": (0.5, 0.2),
        "data": "cityscapes",
        "task": {"width": 512, "crop": 768},  # 769 there, of which patches of 4 leave one pixel
        "score": "80.8%",
    },
    "gong2021-deit-s24": {
        **GONG,
        "model": "deit_small_patch16_224",
        "keywords": {"depth": 24, "drop_path_rate": 0.5},
        "treatments": LOSSES,
        "score": "82.2%",
    },
    "gong2021-deit-b12": {**GONG, "model": "deit_base_patch16_224", "treatments": LOSSES, "score": "82.9%"},
    "gong2021-swin-b-384": {  # Sec. 5.1 and Table 1; clipping, dropped paths and half precision are Swin's own
        **GONG,
        "init": "timm:swin_base_patch4_window12_384.ms_in1k",
        "model": "swin_base_patch4_window12_384",
        "lr": 1e-5,
        "final_lr": 0,
        "weight_decay": 1e-8,
        "epochs": 30,
        "warmup": 0,
        "schedule": "constant",
        "clip": 5.0,
        "treatments": {"patch_diversity": {"cosine": 1.0, "contrastive": 0.0, "mixing": 1.0}},
        "score": "84.7%",
    },
    "park2022-alternet50-cifar100": {**PARK_BASE, "model": "alternet50", "keywords": ALTERNET, "score": "Fig. 12b"},
    "park2022-resnet50-cifar100": {
        **PARK_BASE,
        "model": "preact_resnet50",
        "keywords": {"stem": "cifar", "drop_path_rate": 0.1},
        "score": "Fig. 12",
    },
    "park2022-vit-ti-cifar100": {**PARK_BASE, "model": "vit_tiny_fitted", "keywords": VIT_TI, "score": "Fig. 5a"},
}


def test_every_paper_recipe_is_checked_here():
    assert {row["name"] for row in describe_recipes() if row["scale"] != TWO_CORES} == set(PAPERS)
    assert {name for name in list_recipes() if re.match(r"\w+20\d\d-", name)} == set(PAPERS)


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_has_the_settings_of_its_paper(name):
    recipe, paper = build_recipe(name), PAPERS[name]
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (recipe.model.name, recipe.model.keywords) == (paper["model"], paper["keywords"])
    assert (optimizer.name, optimizer.lr) == (paper["optimizer"], pytest.approx(paper["lr"]))
    assert optimizer.weight_decay == paper["weight_decay"]
    assert optimizer.betas == paper["betas"]
    assert optimizer.momentum == paper.get("momentum", optimizer.momentum)
    assert (schedule.name, schedule.warmup) == (paper["schedule"], paper["warmup"])
    assert schedule.final * optimizer.lr == pytest.approx(paper["final_lr"])
    assert recipe.init.source == paper.get("init")
    assert recipe.steps == paper.get("steps")
    assert (recipe.batch_size, recipe.epochs, recipe.clip) == (paper["batch_size"], paper["epochs"], paper["clip"])
    assert recipe.precision == paper["precision"]
    assert recipe.loss.name == paper["loss"]
    assert recipe.ema is None
    assert recipe.head_lr == paper.get("head_lr")
    assert (recipe.late_drop_path.rate, recipe.late_drop_path.share) == paper.get("late_drop_path", (None, 0.2))
    assert {option: getattr(recipe.task, option) for option in paper.get("task", {})} == paper.get("task", {})
    parts = recipe.data.augment.resolve().model_dump()
    assert {part: parts[part] for part in paper["augment"]} == paper["augment"]
    assert recipe.data.held_out == 0  # papers train on all images
    labels = getattr(recipe.task, "token_labels", None)
    assert (labels and labels.model_dump(exclude={"digest"})) == paper.get("token_labels")
    treatments = {treatment.name: treatment.model_dump() for treatment in recipe.treatments}
    assert list(treatments) == list(paper.get("treatments", {}))
    for treatment, options in paper.get("treatments", {}).items():
        assert {option: treatments[treatment][option] for option in options} == options


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_names_its_command_data_and_score(name):
    header, recipe = recipe_header(read_shipped_recipes()[name]), build_recipe(name)
    key = name.partition("-")[0]
    assert header["scale"].startswith(f"paper: {key}, ")
    assert header["command"] == f"vitclinic train {name} data=/path/to/{recipe.data.source}"
    published = {"objects": "coco", "class": "cifar100" if key == "park2022" else "imagenet"}
    assert recipe.data.source == (PAPERS[name].get("data") or published[recipe.data.target])
    assert PAPERS[name]["score"] in header["expect"]
    assert header["expect"].endswith("not run by us")
    assert header["time"].startswith("not run by us")


PARAMETERS = {  # millions, as the papers state them: chen2022 Table 2, hyeonwoo2023 Table 5, gong2021 Table 1
    "chen2022-vit-b16": 87,
    "chen2022-vit-b16-sam": 87,
    "chen2022-vit-s16-sam": 22,
    "chen2022-mixer-b16-sam": 59,
    "chen2022-resnet152-sam": 60,
    "hyeonwoo2023-deit-s-cb": 22.0,
    "hyeonwoo2023-deit-ti-cb": 5.7,
    "gong2021-deit-s24": 44,
    "gong2021-deit-b12": 86,
    "gong2021-swin-b-384": 88,
    "wang2022-volo-d1-convstem": 27,  # VOLO's own list
}
FORWARD = {  # billions of multiply-adds, as hyeonwoo2023 Table 5 has them
    "hyeonwoo2023-deit-s-cb": 4.6,
    "hyeonwoo2023-deit-ti-cb": 1.3,
}
OURS = {  # by hand: DeiT-S is 22,050,664; ...
    "wang2022-deit-s": 22_050_664,
    "wang2022-deit-s-convstem": 22_050_664 - (768 + 1) * 384 + 1_656_768,
    "park2022-vit-ti-cifar100": 12 * (12 * 192**2 + 13 * 192) + (12 + 1) * 192 + 192 + 257 * 192 + 2 * 192 + 193 * 100,
}
IMAGES = {
    **{"imagenet": 1_281_167, "imagenet21k": 14_197_122, "cifar100": 50_000},
    **{"ade20k": 20_210, "cityscapes": 2_975, "coco": 118_287, "vqa2": 82_783},
}

WITHOUT_TEST = ("imagenet", "ade20k", "cityscapes", "coco", "vqa2")
HEAVY = {
    name for name in PAPERS if re.search("b1[26]|152|swin|s24|s-cb|alternet|rcnn|volo|two-stage|upernet|vilt", name)
} | {"wang2022-deit-s"}
"""Networks that take seconds to build: with `pytest -m slow`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in HEAVY else ()) for name in list_recipes()]
)
def test_every_shipped_recipe_can_be_planned(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_run(name)
    scored_on_val = plan.recipe.data.held_out == 0 and plan.recipe.data.source in WITHOUT_TEST
    notes = plan.notes if plan.recipe.init.source is None else plan.notes[-1:]  # those before are of its weights
    assert [note.split(":")[0] for note in notes] == [
        "The data has no test images and none are held out"
    ] * scored_on_val
    assert plan.parameters > 0
    # A pyramid does not read the final norm, which is then not trained.
    unread = plan.recipe.data.target in ("mask", "objects")
    assert (plan.trainable < plan.parameters) == (bool(plan.recipe.freeze) or unread)
    assert sum(group.parameters for group in plan.optimizer) == plan.trainable + plan.objective_parameters
    assert plan.memory.activations > 0
    assert plan.forward_flops > 0
    if name in PARAMETERS:
        stated = PARAMETERS[name]
        assert plan.parameters / 1e6 == pytest.approx(stated, abs=0.06 if stated % 1 else 1)
    if name in OURS:
        assert plan.parameters == OURS[name]
    if name in FORWARD:
        assert plan.forward_flops / 2e9 == pytest.approx(FORWARD[name], abs=0.05)
    if name in PAPERS:
        paper, images = PAPERS[name], IMAGES[plan.recipe.data.source]
        assert plan.images["train"] == images
        assert plan.steps == paper.get("steps", -(-(paper["epochs"] or 0) * images // paper["batch_size"]))
        warmup = paper["warmup"]
        if isinstance(warmup, str) and warmup.endswith("%"):
            expected = float(warmup.rstrip("%")) / 100 * plan.steps
        else:
            expected = int(warmup.split()[0]) if isinstance(warmup, str) else warmup * images / paper["batch_size"]
        assert plan.warmup_steps == pytest.approx(expected)
        assert plan.passes == (2 if "sam" in plan.treatments else 1)
        assert plan.memory.pass_images == (32 if "sam" in plan.treatments else paper["batch_size"])
        page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
        assert f"| `{name}` | {plan.parameters:,} | {plan.steps:,} |" in page
