"""Segmentation: its scores, its windows, its pyramid on any backbone, and that it trains like any task."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torchmetrics.classification import MulticlassJaccardIndex

from tests.processes import run_ranks
from tests.rows import drop_timing
from tests.training.test_representations import same_weights
from tests.training.test_resume import killed_and_resumed
from vitclinic import Run, load_model, open_data
from vitclinic._core.callback import Callback
from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import DataError, RecipeError, TreatmentError
from vitclinic._core.segmentation import class_iou, count_pixels, mean_iou, mean_iou_interval
from vitclinic.data import DataConfig, ImageSpec
from vitclinic.models.pyramid import Pyramid
from vitclinic.models.segmenter import Segmenter, pixel_loss, slide
from vitclinic.training import build_recipe, plan_run, resume, train
from vitclinic.training.init import read_initial_weights
from vitclinic.training.network import build_network
from vitclinic.training.trainer import Trainer

# ------------------------------------------------------------------------------------------------------- the scores


def brute_force(predicted: torch.Tensor, truth: torch.Tensor, classes: int) -> list[float]:
    """Return IoU of each class over all images, pixel by pixel."""
    found = []
    for label in range(classes):
        both = union = 0
        for said, true in zip(predicted.flatten().tolist(), truth.flatten().tolist(), strict=True):
            if true != 255:
                both += said == label == true
                union += label in (said, true)
        found.append(both / union if union else float("nan"))
    return found


@given(st.integers(0, 10**6), st.integers(2, 6), st.booleans())
def test_iou_is_that_of_torchmetrics_and_of_brute_force(seed: int, classes: int, empty: bool) -> None:
    """With void pixels, classes that are nowhere, and images that are all void."""
    random = torch.Generator().manual_seed(seed)
    known = max(1, classes - 1)  # the last class is in no truth
    truth = torch.randint(0, known, (3, 4, 5), generator=random)
    truth[torch.rand(truth.shape, generator=random) < 0.3] = 255
    predicted = torch.randint(0, classes if seed % 2 else known, truth.shape, generator=random)
    if empty:
        truth[1] = 255
    truth[0, 0, 0] = 0
    counts = count_pixels(predicted, truth, classes).numpy()
    np.testing.assert_allclose(class_iou(counts.sum(0)), brute_force(predicted, truth, classes))
    theirs = MulticlassJaccardIndex(classes, average="macro", ignore_index=255)(predicted, truth)
    np.testing.assert_allclose(mean_iou(counts.sum(0)), float(theirs), rtol=1e-6)
    assert counts.shape == (3, 3, classes)


def test_a_mean_over_no_class_is_no_number_and_the_interval_holds_the_mean() -> None:
    assert np.isnan(mean_iou(np.zeros((3, 2), np.int64)))
    random = torch.Generator().manual_seed(0)
    truth = torch.randint(0, 3, (40, 6, 6), generator=random)
    noise = torch.rand(truth.shape, generator=random) < 0.3
    counts = count_pixels(torch.where(noise, 0, truth), truth, 3).numpy()
    low, high = mean_iou_interval(counts)
    assert low < float(mean_iou(counts.sum(0))) < high < low + 0.2
    np.testing.assert_allclose(mean_iou_interval(np.repeat(counts[:1], 5, 0)), float(mean_iou(counts[0])))


def test_the_loss_is_the_mean_over_images_of_their_pixels_that_are_not_void() -> None:
    scores = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    masks = torch.randint(0, 3, (2, 4, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    masks[0, :2] = 255
    of_images = []
    for image, mask in zip(scores, masks, strict=True):
        known = (mask != 255).nonzero()
        of_images.append(torch.stack([-image[:, y, x].log_softmax(0)[int(mask[y, x])] for y, x in known]).mean())
    torch.testing.assert_close(pixel_loss(scores, masks), torch.stack(of_images).mean())
    assert pixel_loss(scores, torch.full_like(masks, 255)) == 0


# ------------------------------------------------------------------------------------------------------ the windows


def local(images: torch.Tensor) -> torch.Tensor:
    """Scores that depend on their own pixel alone."""
    return torch.stack([images[:, 0] - images[:, 1], images[:, 2].square(), images.mean(1)], dim=1)


@given(st.integers(3, 20), st.integers(3, 20), st.integers(2, 9), st.integers(2, 9), st.floats(0.1, 1))
def test_windows_give_what_the_whole_image_gives(h: int, w: int, window_h: int, window_w: int, stride: float) -> None:
    """By a network that looks at single pixels, whatever the sizes."""
    images = torch.rand(2, 3, h, w, dtype=torch.float64, generator=torch.Generator().manual_seed(h * w))
    torch.testing.assert_close(slide(local, images, (window_h, window_w), stride), local(images))


def test_a_window_as_large_as_the_image_is_one_pass() -> None:
    passes = []

    def network(images: torch.Tensor) -> torch.Tensor:
        passes.append(images)
        return images.cumsum(3)

    images = torch.rand(1, 3, 8, 6)
    assert torch.equal(slide(network, images, (8, 6)), images.cumsum(3))
    assert len(passes) == 1


# ------------------------------------------------------------------------------------------------------ the pyramid


class OwnViT(nn.Module):
    """A transformer by hand: patches of 8, a class token, three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        layer = {"nhead": 2, "dim_feedforward": 32, "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, **layer) for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, 0]


TINY = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 16, "num_heads": 2, "num_classes": 0}
SWIN = {"embed_dim": 8, "depths": [1, 1, 2, 1], "num_heads": [1, 1, 2, 2]}
NETWORKS = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", **TINY),
    "swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=2, num_classes=0, **SWIN
    ),
    "resnet": lambda: timm.create_model("resnet18", num_classes=0),
    "own": OwnViT,
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("head", ["upernet", "linear"])
def test_every_backbone_has_a_pyramid_whose_heads_learn(name: str, head: str) -> None:
    spec = ImageSpec(5, 3, (32, 32))
    network = Segmenter(NETWORKS[name](), spec, head, width=16, auxiliary=True)
    assert [max(1, round(32 / stride)) for stride, _ in network.pyramid.strides] == [8, 4, 2, 1]
    if name != "resnet":  # which has a BatchNorm of its own
        assert isinstance(network(torch.rand(1, 3, 32, 32)), dict)  # one image in training, on maps of one place
    scores = network.train()(torch.rand(2, 3, 32, 32))
    assert scores["out"].shape == scores["aux"].shape == (2, 5, 32, 32)
    (scores["out"].square().mean() + scores["aux"].square().mean()).backward()
    assert all((p.grad is not None) == p.requires_grad for p in network.parameters())
    assert any(p.requires_grad for p in network.backbone.parameters())
    assert network.eval()(torch.rand(1, 3, 32, 32)).shape == (1, 5, 32, 32)


def test_maps_are_the_states_of_the_blocks_on_their_grid() -> None:
    """The map at the stride of the patches is not resampled: it is the tokens as they lie."""
    vit = NETWORKS["vit"]().eval()
    pyramid = Pyramid(vit, ImageSpec(5, 3, (32, 32)))
    images, seen = torch.rand(2, 3, 32, 32), []
    vit.blocks[1].register_forward_hook(lambda *call: seen.append(call[2]))
    maps = pyramid(vit, images)
    assert torch.equal(maps[1], seen[0][:, 1:].transpose(1, 2).reshape(2, 16, 4, 4))
    resnet = NETWORKS["resnet"]().eval()
    found = Pyramid(resnet, ImageSpec(5, 3, (32, 32)))(resnet, images)
    expected = resnet.forward_intermediates(images, indices=[1, 2, 3, 4], intermediates_only=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_patches_of_any_size_are_brought_to_four_strides() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=28, patch_size=7, depth=1, embed_dim=8, num_heads=1)
    shapes = [x.shape[2] for x in Pyramid(vit, ImageSpec(5, 3, (28, 28)))(vit, torch.rand(1, 3, 28, 28))]
    assert shapes == [7, 4, 2, 1]


# --------------------------------------------------------------------------------------------------------- training

MODEL = {"name": "vit_tiny_patch16_224", "patch_size": 16, "depth": 6, "embed_dim": 16, "num_heads": 2}


@pytest.fixture
def recipe(tmp_path):
    task = {"name": "segmentation", "width": 16}
    base = {"task": task, "data": "scenes:12", "model": MODEL, "batch_size": 4, "steps": 3, "device": "cpu"}
    return lambda **keys: {**base, "out": str(tmp_path / "run"), "workers": 0, "checkpoint": "2 steps", **keys}


def test_it_trains_and_the_loaded_network_segments(recipe):
    run = train(recipe(steps=4, ema=0.9))
    score = run.results["test"]
    assert set(score) == {"miou", "miou_low", "miou_high", "iou", "pixel_accuracy", "nll", "count", "step"}
    assert list(score["iou"]) == ["background", "circle", "square", "triangle", "star", "cross", "heart"]
    assert score["count"] == 12
    (row, *_) = run.metrics
    assert set(row["losses"]) == {"task", "auxiliary"}
    network = load_model(run.path)
    scores = network(Image.new("RGB", (80, 64)))
    assert scores.shape == (1, 7, 64, 64)
    # The score is that of the network's own predictions.
    dataset = open_data(run.recipe.data)
    images = torch.from_numpy(dataset.test.read(np.arange(12))).permute(0, 3, 1, 2) / 255
    masks = torch.from_numpy(np.stack([each.mask for each in dataset.test.annotate(np.arange(12))]))
    with torch.no_grad():
        predicted = network(images).argmax(1)
    theirs = MulticlassJaccardIndex(7, ignore_index=255)(predicted, masks.long())
    assert score["miou"] == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.parametrize(
    "treatment", ["sam", "conv_stem", "patch_diversity", {"context_broadcasting": {"layers": "all"}}]
)
@pytest.mark.parametrize("model", [MODEL, {"name": "swin_tiny_patch4_window7_224", "window_size": 4, **SWIN}])
def test_treatments_train(recipe, treatment, model):
    run = train(recipe(steps=2, treatments=[treatment], model=model))
    assert run.status["status"] == "finished"


def test_patches_have_the_classes_of_their_pixels(recipe):
    built = build_recipe(recipe(treatments=[{"patch_diversity": {"cosine": 0, "contrastive": 0}}], precision="fp64"))
    trainer = Trainer(built, open_data(built.data), 3, ALONE, torch.device("cpu"))
    assert not trainer.notices  # nothing is mixed, so that no augmentation is overridden
    batch = trainer._convert(trainer.stream[range(0, 4)])
    masks = batch.annotations.masks.clone()
    masks[0] = 255
    masks[1, :, :40] = 255
    batch = replace(batch, annotations=replace(batch.annotations, masks=masks))
    found = trainer.learner(batch)["patch_mixing"]
    objective = trainer.learner.objectives["patch_mixing"]
    rows, columns = objective.grid
    trainer.network.train()
    trainer.network(batch.images)
    (patches_bnd,) = objective.reader.take()
    scores_bnk = objective.head(patches_bnd).log_softmax(-1)
    expected = []
    for image, mask in enumerate(masks):
        losses = []
        for patch, part in enumerate(blocks(mask, rows, columns)):
            known = part[part != 255]
            if len(known):
                losses.append(-scores_bnk[image, patch, known.long()].mean())
        expected.append(torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_a_classifier_s_weights_are_all_loaded_but_its_head(recipe, tmp_path):
    """The last linear layer of a ViT without a classifier is that of its last block, not a head of other classes."""
    vit = {"name": "vit_tiny_fitted", "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 2}
    first = train({"data": "shapes:8", "model": {**vit, "img_size": 64}, "steps": 1, "out": str(tmp_path / "first")})
    built = build_recipe(recipe(model=vit, init=str(first.path)))
    loaded = build_network(built, open_data(built.data), read_initial_weights(built))[1]
    assert loaded.found.drawn == ()
    assert "blocks.3.mlp.fc2.weight" in loaded.found.loaded


def blocks(mask, rows, columns):
    height, width = mask.shape[0] // rows, mask.shape[1] // columns
    for row in range(rows):
        for column in range(columns):
            yield mask[row * height : (row + 1) * height, column * width : (column + 1) * width]


def test_sam_trains_a_resnet_and_bf16_goes_the_same_way(recipe):
    run = train(recipe(steps=2, treatments=["sam"], model="resnet18", precision="bf16"))
    assert run.status["status"] == "finished"


def test_context_broadcasting_is_left_out_of_blocks_that_feed_the_head(recipe, tmp_path):
    run = train(recipe(steps=1, treatments=[{"context_broadcasting": {"layers": "all"}}]))
    trunk = load_model(run.path).trunk
    having = [number for number, block in enumerate(trunk.blocks) if hasattr(block.mlp, "context_broadcasting")]
    assert having == [0, 3]  # the pyramid reads 1, 2, 4, 5
    shallow = {**MODEL, "depth": 2}
    with pytest.raises(TreatmentError, match="feeds the head of segmentation"):
        train(recipe(treatments=["context_broadcasting"], model=shallow, out=str(tmp_path / "shallow")))


def test_a_cut_run_resumes_to_the_same_bits(recipe, tmp_path):
    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 3:
                raise KeyboardInterrupt

    whole = train(recipe(steps=5))
    with pytest.raises(KeyboardInterrupt):
        train(recipe(steps=5, out=str(tmp_path / "cut")), callbacks=[Stop()])
    cut = resume(tmp_path / "cut")
    assert drop_timing(cut.metrics) == drop_timing(whole.metrics)
    weights, again = whole.checkpoints.read_model("last"), cut.checkpoints.read_model("last")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(recipe, tmp_path):
    plain = recipe(steps=40, checkpoint={"every": "7 steps"}, workers=1)
    whole = train({**plain, "out": str(tmp_path / "whole")})
    killed = killed_and_resumed(lambda **changes: {**plain, **changes}, tmp_path, [20], {})
    assert drop_timing(killed.metrics) == drop_timing(whole.metrics)
    assert same_weights(whole.checkpoints.read_model("last"), killed.checkpoints.read_model("last"))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_make_the_steps_of_one(recipe, tmp_path, parallel):
    plain = recipe(steps=5, precision="fp64", accumulate=1, parallel=parallel)
    alone = train({**plain, "out": str(tmp_path / "alone")})
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**plain, "out": str(tmp_path / "both")}))
    done = run_ranks("train", "-q", str(file))
    assert done.returncode == 0, done.stderr
    both = Run(tmp_path / "both")
    assert same_weights(alone.checkpoints.read_model("last"), both.checkpoints.read_model("last"), 1e-9)
    assert both.results["test"]["miou"] == pytest.approx(alone.results["test"]["miou"], abs=1e-9)
    assert both.results["test"]["miou_low"] == pytest.approx(alone.results["test"]["miou_low"], abs=1e-9)


def test_crops_are_what_the_network_takes_and_windows_what_it_is_scored_by(recipe):
    task = {"name": "segmentation", "head": "linear", "crop": 32, "auxiliary": 0}
    run = train(recipe(task=task, model={**MODEL, "patch_size": 8}))
    network = load_model(run.path)
    assert network.trunk.patch_embed.img_size == (32, 32)
    assert run.results["test"]["count"] == 12
    assert plan_run(recipe(task=task, model={**MODEL, "patch_size": 8})).memory.activations > 0


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"data": {"source": "scenes:12", "augment": {"mixup": 0.2}}}, "takes no data.augment.mixup: set it to 0"),
        ({"data": {"source": "scenes:12", "augment": {"randaugment": "rand-m9"}}}, "set data.augment.randaugment=off"),
        ({"progressive_resizing": 0.5}, "needs its masks and boxes at full size: remove progressive_resizing"),
        ({"compile": True}, "is not for the task segmentation: remove it"),
        ({"task": {"name": "segmentation", "norm": "batch"}, "batch_size": 1}, "needs several images at a time"),
        ({"task": {"name": "segmentation", "scale": [2.0, 0.5]}}, "the least and the largest factor"),
    ],
)
def test_what_does_not_fit_is_one_sentence_before_training(recipe, keys, sentence):
    with pytest.raises(RecipeError, match=sentence.replace(".", r"\.")):
        build_recipe(recipe(**keys))


# ------------------------------------------------------------------------------------------------------ the sources


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    for number in range(10):
        size = (20, 24)
        for kind, values in (("images", random.integers(0, 256, (*size, 3))), ("masks", random.integers(0, 3, size))):
            (tmp_path / "set" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.astype(np.uint8)).save(tmp_path / "set" / kind / f"{number}.png")
    return SimpleNamespace(path=tmp_path / "set", config=DataConfig(source=str(tmp_path / "set"), target="mask"))


def test_folders_of_images_and_masks(folder):
    dataset = open_data(folder.config, size=(20, 24))
    assert dataset.classes == ("0", "1", "2")
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 8, "val": 1, "test": 1}
    row = int(dataset.test.rows[0])
    (found,) = dataset.test.annotate(np.array([0]))
    np.testing.assert_array_equal(found.mask, np.asarray(Image.open(folder.path / "masks" / f"{row}.png")))
    (folder.path / "classes.json").write_text(json.dumps(["sky", "tree", "road", "sign"]))
    assert open_data(folder.config).classes == ("sky", "tree", "road", "sign")


def test_folders_of_splits(folder, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "split" / split).mkdir(parents=True)
        for kind in ("images", "masks"):
            (tmp_path / "split" / split / kind).symlink_to(folder.path / kind)
    dataset = open_data(DataConfig(source=str(tmp_path / "split"), target="mask", held_out=0.2))
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 8, "val": 10, "test": 2}


def test_parquet_of_images_and_masks(folder, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        name: [{"bytes": (folder.path / kind / f"{row}.png").read_bytes(), "path": f"{row}.png"} for row in range(10)]
        for name, kind in (("image", "images"), ("mask", "masks"))
    }
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    dataset = open_data(DataConfig(source=str(tmp_path / "train.parquet"), target="mask"), size=(20, 24))
    files = open_data(folder.config, size=(20, 24))
    np.testing.assert_array_equal(
        dataset.train.annotate(np.array([3]))[0].mask, files.train.annotate(np.array([3]))[0].mask
    )
    assert dataset.digest == files.digest


def test_masks_that_are_void_everywhere_are_told(folder, recipe):
    (folder.path / "classes.json").write_text(json.dumps(["sky", "tree"]))
    for file in (folder.path / "masks").iterdir():
        Image.fromarray(np.full((20, 24), 255, np.uint8)).save(file)
    with pytest.raises(DataError, match=r"masks of .* are void everywhere: there is no class to score"):
        train(recipe(data=str(folder.path), model={**MODEL, "img_size": 32}, steps=1))


def test_what_is_wrong_with_masks_is_one_sentence(folder):
    masks = folder.path / "masks"
    (masks / "3.png").rename(masks / "x.png")
    with pytest.raises(DataError, match=r"3.png' has no mask of that name in '.*masks' \(1 such\)\.$"):
        open_data(folder.config)
    (folder.path / "images" / "3.png").unlink()
    with pytest.raises(DataError, match=r"x.png' is the mask of no image in"):
        open_data(folder.config)
    (masks / "x.png").unlink()
    Image.new("L", (20, 24)).save(masks / "4.png")
    with pytest.raises(DataError, match=r"4.png: its mask has 24 x 20 pixels, and the image 20 x 24\.$"):
        open_data(folder.config)
    Image.new("RGB", (24, 20)).save(masks / "4.png")
    with pytest.raises(DataError, match=r"4.png: its mask cannot be read \(a mask has one number a pixel"):
        open_data(folder.config)
    Image.new("L", (24, 20), 7).save(masks / "4.png")
    (folder.path / "classes.json").write_text('["a", "b", "c"]')
    with pytest.raises(DataError, match=r"4.png: its mask has the label 7, and there are 3 classes"):
        open_data(folder.config)
    with pytest.raises(DataError, match=r"has no folder 'images'; expected 'images' and 'masks' with equal names"):
        open_data(DataConfig(source=str(masks), target="mask"))


@pytest.mark.parametrize("content", ["", "[]", "x", '"5"', "1", "99999999", '{"largest": 1}', "[" * 200_000])
def test_a_damaged_number_of_labels_is_looked_for_again(folder, content, monkeypatch, tmp_path):
    monkeypatch.setenv("VITCLINIC_CACHE", str(tmp_path / "labels"))
    classes = open_data(DataConfig(source=str(folder.path), target="mask")).classes
    (stored,) = (tmp_path / "labels" / "labels").iterdir()
    kept = stored.read_text()
    stored.write_text(content if content[:1] != "{" else json.dumps({**json.loads(kept), "largest": 0}))
    assert open_data(DataConfig(source=str(folder.path), target="mask")).classes == classes
    assert stored.read_text() == kept
