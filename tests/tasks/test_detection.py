"""Detection: its losses beside torchvision's, its draws, its scores, and what it trains on."""

import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork

from tests.processes import run_ranks
from tests.rows import drop_timing
from tests.training.test_resume import killed_and_resumed
from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import VitclinicError
from vitclinic.data import ImageSpec, open_data
from vitclinic.data.randomness import torch_seed
from vitclinic.models import Normalized
from vitclinic.models.detector import _as_target, _shapes_only, paste_masks
from vitclinic.models.regions import KeyedSampler
from vitclinic.tasks.detection import Detection
from vitclinic.training import Run, build_recipe, load_model, train
from vitclinic.training.plan import plan_run
from vitclinic.training.trainer import Trainer

SMALL = {"name": "detection", "width": 16, "samples": 16, "proposals": 20}
VIT = {"name": "vit_tiny_patch16_224", "patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 2}
SPEC = ImageSpec(6, 3, (64, 64))


def plain(tmp_path, **changes):
    return {
        "task": SMALL,
        "data": {"source": "scenes:24", "augment": "none"},
        "model": VIT,
        "batch_size": 4,
        "steps": 2,
        "optimizer": {"lr": 1e-3},
        "out": str(tmp_path / "run"),
        **changes,
    }


def trainer_of(recipe):
    built = build_recipe(recipe)
    return Trainer(built, open_data(built.data), 10, ALONE, torch.device("cpu"))


@pytest.fixture(scope="module")
def scenes():
    return open_data(build_recipe({"task": "detection", "data": "scenes:24"}).data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer in double precision, after a step, and a batch of its stream."""
    trainer = trainer_of(plain(tmp_path_factory.mktemp("detection"), precision="fp64"))
    trainer.advance()
    return trainer, trainer._convert(trainer.stream[range(8, 12)])


def part(batch, rows):
    return batch.annotations.objects[rows], batch.keys[rows], batch.images[rows]


def losses_of(detector, batch, rows):
    objects, keys, images = part(batch, rows)
    return detector.compute_losses(detector.train()(images), (64, 64), objects, keys)


def test_the_losses_of_an_image_are_torchvisions(trained, monkeypatch):
    """torchvision's own functions on the same image, with the same draws."""
    trainer, batch = trained
    detector, rows = trainer.network.backbone, slice(0, 1)
    ours = losses_of(detector, batch, rows)
    objects, keys, images = part(batch, rows)
    targets, maps = [_as_target(objects[0])], detector(images)
    stages = detector.proposals, detector.regions
    stages[0].fg_bg_sampler.keys = stages[1].fg_bg_sampler.keys = keys.tolist()
    monkeypatch.setattr(type(stages[0]), "compute_loss", RegionProposalNetwork.compute_loss)
    regions, first = stages[0](_shapes_only(1, (64, 64), maps["0"]), maps, targets)
    _, second = RoIHeads.forward(stages[1], maps, regions, [(64, 64)], targets)
    theirs = [*first.values(), *second.values()]
    assert [loss.item() for loss in ours.values()] == pytest.approx([loss.item() for loss in theirs], rel=1e-6)
    assert list(ours) == ["objectness", "proposals", "classes", "boxes", "masks"]


def test_the_losses_of_a_batch_are_the_mean_of_its_images(trained):
    trainer, batch = trained
    detector = trainer.network.backbone
    whole = losses_of(detector, batch, slice(0, 4))
    alone = [losses_of(detector, batch, slice(row, row + 1)) for row in range(4)]
    for name, loss in whole.items():
        assert float(loss.detach()) == pytest.approx(np.mean([float(each[name].detach()) for each in alone]), rel=1e-9)


def test_draws_depend_on_the_keys_and_not_on_torchs_generator(trained):
    trainer, batch = trained
    detector = trainer.network.backbone
    found = []
    for seed, shift in ((0, 0), (1, 0), (0, 1)):
        torch.manual_seed(seed)
        objects, keys, images = part(batch, slice(0, 4))
        state = torch.get_rng_state()
        losses = detector.compute_losses(detector.train()(images), (64, 64), objects, keys + shift)
        assert torch.equal(state, torch.get_rng_state())
        found.append(float(losses["classes"].detach()))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("objects", [0, 3, 40])
def test_draws_of_an_image_are_torchvisions(objects):
    labels = torch.cat([torch.ones(objects), torch.zeros(60), -torch.ones(5)])[torch.randperm(65 + objects)]
    sampler = KeyedSampler(32, 0.25, "regions")
    sampler.keys = [11, 12]
    ours = sampler([labels, labels])
    for row, key in enumerate(sampler.keys):
        torch.manual_seed(torch_seed("regions", key))
        theirs = BalancedPositiveNegativeSampler(32, 0.25)([labels])
        assert all(torch.equal(kind[row], their[0]) for kind, their in zip(ours, theirs, strict=True))


def test_micro_batches_make_the_step_of_the_whole_batch(tmp_path):
    gradients = []
    for parts in (1, 2):
        sgd = {"name": "sgd", "lr": 1.0, "momentum": 0.0}
        trainer = trainer_of(plain(tmp_path, precision="fp64", accumulate=parts, clip=None, optimizer=sgd))
        trainer.advance()
        gradients.append(torch.cat([p.detach().flatten() for p in trainer.parameters]))
    assert (gradients[0] - gradients[1]).abs().max() < 1e-9


def test_images_without_objects_teach_what_background_is(trained):
    trainer, batch = trained
    detector = trainer.network.backbone
    empty = {name: tensor[:0] for name, tensor in batch.annotations.objects[0].items()}
    unmasked = {name: tensor for name, tensor in empty.items() if name != "masks"}  # of a file without annotations
    alone = replace(batch.annotations, objects=(unmasked,))
    nothing = replace(batch, images=batch.images[:1], keys=batch.keys[:1], annotations=alone)
    assert all(torch.isfinite(loss) for loss in trainer.criterion(trainer.network.train(), nothing)[1].values())
    losses = detector.compute_losses(detector.train()(batch.images[:1]), (64, 64), [empty], torch.tensor([1]))
    assert all(bool(loss.isfinite()) for loss in losses.values())
    assert losses["classes"] > 0
    assert losses["boxes"] == losses["masks"] == 0


def test_regions_in_a_crowd_are_neither_objects_nor_background(trained):
    trainer, _batch = trained
    stage = trainer.network.backbone.proposals
    crowd = torch.tensor([[0.0, 0.0, 64.0, 64.0]], dtype=torch.float64)
    nothing = {"boxes": crowd[:0], "labels": torch.zeros(0, dtype=torch.int64), "crowd": crowd}
    anchors = [torch.tensor([[4.0, 4.0, 20.0, 20.0], [50.0, 50.0, 200.0, 200.0]], dtype=torch.float64)]
    labels, _ = stage.assign_targets_to_anchors(anchors, [nothing])
    assert labels[0].tolist() == [-1, 0]


class Oracle(nn.Module):
    """A detector that knows the answers, or some of them."""

    def __init__(self, dataset, split, known):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.dataset, self.split, self.known, self.seen = dataset, split, known, 0

    def forward(self, images):
        rows = np.arange(self.seen, self.seen + len(images))
        self.seen += len(images)
        return [self._answer(one.objects) for one in self.dataset.splits[self.split].annotate(rows)]

    def _answer(self, objects):
        count = round(self.known * len(objects))
        return {
            "boxes": torch.from_numpy(objects.boxes[:count]),
            "labels": torch.from_numpy(objects.labels[:count]),
            "scores": torch.ones(count),
            "masks": torch.from_numpy(objects.masks[:count]),
        }


def test_who_finds_everything_has_an_ap_of_one_and_who_finds_nothing_of_zero(scenes):
    task = Detection()
    all_of_it = task.evaluate(Oracle(scenes, "val", 1.0), scenes, "val", ALONE, batch_size=7)
    assert all_of_it["ap"] == all_of_it["mask_ap75"] == pytest.approx(1)
    assert all_of_it["miss"] == pytest.approx(0)
    assert all_of_it["count"] == 24
    assert all_of_it["objects"] > 24
    assert task.evaluate(Oracle(scenes, "val", 0.0), scenes, "val", ALONE)["ap"] == 0


def test_pasted_masks_fill_their_boxes():
    ones = torch.ones(2, 28, 28)
    pasted = paste_masks(ones, torch.tensor([[1.0, 2.0, 5.0, 4.0], [0.0, 0.0, 8.0, 6.0]]), (6, 8))
    assert pasted[0].nonzero().tolist() == [[row, column] for row in (2, 3) for column in (1, 2, 3, 4)]
    assert pasted[1].all()
    half = ones[:1].clone()
    half[:, :, 14:] = 0
    assert (
        paste_masks(half, torch.tensor([[0.0, 0.0, 8.0, 6.0]]), (6, 8))[0].any(0).tolist() == [True] * 4 + [False] * 4
    )


BACKBONES = {
    "vit": ({**VIT, "depth": 8}, [{"context_broadcasting": {}}, {"sam": {"rho": 0.05}}]),
    "stem": ({**VIT, "embed_dim": 32}, ["conv_stem"]),
    "swin": (
        {
            "name": "swin_tiny_patch4_window7_224",
            "embed_dim": 16,
            "depths": [1, 1, 1],
            "num_heads": [2, 2, 2],
            "window_size": 4,
        },
        [{"sam": {"rho": 0.05}}],
    ),
    "resnet": ({"name": "resnet10t"}, []),
}


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_backbone_trains_with_treatments(name, tmp_path):
    model, treatments = BACKBONES[name]
    trainer = trainer_of(plain(tmp_path, model=model, treatments=treatments, batch_size=2))
    before = {key: value.clone() for key, value in trainer.network.trunk.state_dict().items()}
    rows = [trainer.advance() for _ in range(2)]
    assert all(np.isfinite(list(row["losses"].values())).all() for row in rows)
    assert any(not torch.equal(value, before[key]) for key, value in trainer.network.trunk.state_dict().items())


class OwnViT(nn.Module):
    """A ViT as somebody writes it, of no family that is known."""

    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, 24, 16, 16)
        self.place = nn.Parameter(torch.randn(1, 16, 24) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(4))
        self.mixes = nn.ModuleList(nn.MultiheadAttention(24, 2, batch_first=True) for _ in range(2))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(2))

    def forward(self, images):
        x = self.cut(images).flatten(2).transpose(1, 2) + self.place
        for number in range(2):
            y = self.norms[2 * number](x)
            x = x + self.mixes[number](y, y, y, need_weights=False)[0]
            x = x + self.mlps[number](self.norms[2 * number + 1](x))
        return x.mean(1)


def test_a_network_of_ones_own_trains(scenes):
    task = Detection(width=16, samples=16, proposals=20)
    network = Normalized(task.attach(OwnViT(), SPEC), [0.5] * 3, [0.25] * 3).train()
    stream = task.stream(scenes, build_recipe({}).data.augment, 0, network)
    criterion = task.criterion(network, SPEC)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    for step in range(2):
        _, losses = criterion(network, stream[range(2 * step, 2 * step + 2)])
        sum(losses.values()).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
        optimizer.step()


def test_half_precision_trains_and_a_run_is_loaded_again(tmp_path):
    run = train(plain(tmp_path, precision="bf16", steps=2))
    assert run.results["test"]["count"] == 24
    found = load_model(run.path)(torch.rand(2, 3, 64, 64))
    assert len(found) == 2
    assert found[0]["boxes"].shape[1:] == (4,)
    assert found[0]["masks"].shape[1:] == (64, 64)
    assert all(label < 6 for label in found[0]["labels"].tolist())


def test_a_run_can_be_planned_and_its_memory_is_known(tmp_path):
    plan = plan_run(plain(tmp_path, batch_size=8))
    assert plan.memory.activations > 8 * 16 * 4 * 7 * 7 * 16  # what the second stage reads, at least
    assert plan.notes == ()


def test_boxes_alone(tmp_path):
    trainer = trainer_of(plain(tmp_path, task={**SMALL, "masks": False}))
    assert "masks" not in trainer.advance()["losses"]
    score = trainer.task.evaluate(trainer.network, trainer.dataset, "val", ALONE)
    assert "mask_ap" not in score
    assert 0 <= score["ap"] <= 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"compile": True}, "ompile is not for the task detection"),
        ({"progressive_resizing": {"start": 0.5}}, "at full size"),
        ({"task": {"name": "detection", "scale": [2.0, 1.0]}}, "the least and the largest factor"),
        ({"data": "digits"}, "come with class labels, not with objects"),
        ({"treatments": ["patch_diversity"]}, "classification or segmentation"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changes, sentence, tmp_path):
    with pytest.raises(VitclinicError, match=sentence):
        trainer_of(plain(tmp_path, **changes))


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_to_the_bit(tmp_path):
    recipe = plain(tmp_path, steps=30, checkpoint={"every": "4 steps"}, treatments=[{"sam": {"rho": 0.05}}])
    whole = train({**recipe, "out": str(tmp_path / "whole")})
    killed = killed_and_resumed(
        lambda **changes: {**recipe, **changes}, tmp_path, [random.Random(time.time()).randint(6, 20)], {}
    )
    assert drop_timing(killed.metrics) == drop_timing(whole.metrics)
    ours, theirs = (run.checkpoints.read_model("last") for run in (whole, killed))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_make_the_steps_of_one(tmp_path, parallel):
    recipe = plain(tmp_path, precision="fp64", steps=4, parallel=parallel)
    alone = train({**recipe, "out": str(tmp_path / "alone")})
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**recipe, "out": str(tmp_path / "both")}))
    done = run_ranks("train", "-q", str(file))
    assert done.returncode == 0, done.stderr
    both = Run(tmp_path / "both")
    ours, theirs = (run.checkpoints.read_model("last") for run in (alone, both))
    assert all((value - theirs[name]).abs().max() < 1e-9 for name, value in ours.items())
    assert both.results["test"]["ap"] == pytest.approx(alone.results["test"]["ap"], abs=1e-12)
