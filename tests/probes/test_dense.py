"""Probes of masks and boxes, against the scores of the tasks and counts made by hand."""

import json

import numpy as np
import pytest
import torch
from scipy import ndimage, stats

from vitclinic._core.distributed import ALONE
from vitclinic._core.segmentation import count_pixels, mean_iou
from vitclinic.anatomy import double_differentiable
from vitclinic.data import open_data
from vitclinic.data.corruptions.noise import Draws
from vitclinic.models.detector import _prefer_background
from vitclinic.probes import DetectionPrecision, MaskNoise, SegmentationAccuracy, Sharpness, Subject
from vitclinic.probes.behaviour.mask_noise import add_shot_noise
from vitclinic.probes.curvature.hessian import Hessian
from vitclinic.probes.running import measure
from vitclinic.reports.figure import ExamView
from vitclinic.reports.figures import draw
from vitclinic.training import build_recipe
from vitclinic.training.trainer import Trainer

VIT = {"name": "vit_tiny_patch16_224", "patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 2}
MASKS = {"name": "segmentation", "head": "linear", "auxiliary": 0}
BOXES = {"name": "detection", "width": 16, "samples": 16, "proposals": 20}
PLAIN = {"model": VIT, "data": {"source": "scenes:10", "augment": "none"}, "batch_size": 4, "steps": 1}


def make_subject(task, **changes):
    recipe = build_recipe({**PLAIN, "task": task, **changes})
    dataset = open_data(recipe.data)
    trainer = Trainer(recipe, dataset, 1, ALONE, torch.device("cpu"))
    network = trainer.network.eval()
    return Subject(network, dataset, output_names=dataset.classes), recipe.task


def view(subject, probe):
    (one,) = measure(subject, [probe])
    assert one.status == "ok", one.reason
    return one


@pytest.fixture(scope="module")
def masks():
    return make_subject(MASKS)


@pytest.fixture(scope="module")
def boxes():
    """A detector that names some class wherever it looks."""
    subject, task = make_subject(BOXES)
    with torch.no_grad():
        subject.given.backbone.regions.box_predictor.cls_score.bias[0] = 0.0
    return subject, task


def test_masks_are_scored_as_by_the_task_and_the_worst_come_first(masks):
    subject, task = masks
    one = view(subject, SegmentationAccuracy(shown=4))
    score = task.evaluate(subject.given, subject.dataset, "test", ALONE)
    assert one.scalars["miou"].value == pytest.approx(score["miou"])
    assert (one.scalars["miou"].low, one.scalars["miou"].high) == pytest.approx((score["miou_low"], score["miou_high"]))
    assert one.scalars["pixel_accuracy"].value == pytest.approx(score["pixel_accuracy"])
    assert one.scalars["nll"].value == pytest.approx(score["nll"])
    of_classes = dict(zip(one.arrays["classes"].tolist(), one.arrays["class_iou"].tolist(), strict=True))
    assert of_classes == pytest.approx({k: np.nan if v is None else v for k, v in score["iou"].items()}, nan_ok=True)
    assert one.arrays["shown_iou"].tolist() == sorted(one.arrays["image_iou"].tolist())[:4]
    truth, predicted = (torch.from_numpy(one.arrays[f"shown_{kind}"]) for kind in ("truth", "predicted"))
    again = mean_iou(count_pixels(predicted, truth, 7).numpy())
    assert again == pytest.approx(one.arrays["shown_iou"])  # 64 pixels are not made smaller


def test_masks_of_noisy_images_are_those_of_the_noise_drawn_here(masks):
    subject, task = masks
    with torch.no_grad():  # an untrained network says the same of all pixels: let it go by their brightness
        subject.given.backbone.head[-1].weight.normal_(generator=torch.Generator().manual_seed(0))
    one = view(subject, MaskNoise(draws=3))
    assert one.scalars["miou"].value == pytest.approx(
        task.evaluate(subject.given, subject.dataset, "test", ALONE)["miou"]
    )
    batch = next(subject.batches())
    for sigma in (1, 2):
        pixels = ndimage.gaussian_filter(batch.images.numpy(), (0, 0, sigma, sigma), mode="nearest")
        with torch.no_grad():
            scores = subject.given(torch.from_numpy(np.round(pixels * 255) / 255).float())
        expected = mean_iou(count_pixels(scores.argmax(1), batch.annotations.masks, 7).sum(0).numpy())
        assert one.scalars[f"miou_gaussian_blur_{sigma}"].value == pytest.approx(expected, abs=0.003)
        assert one.scalars[f"miou_gaussian_blur_{sigma}"].low is None  # nothing is drawn
    for name in ("shot_noise", "gaussian_noise_5", "gaussian_noise_10"):
        found, of_draws = one.scalars[f"miou_{name}"], one.arrays[f"draws_{name}"]
        assert len(set(of_draws.tolist())) == 3  # each draw is another
        half = stats.t.ppf(0.975, 2) * of_draws.std(ddof=1) / 3**0.5
        assert (found.value, found.low) == pytest.approx((of_draws.mean(), of_draws.mean() - half))
    drop, clean, changed = (one.scalars[name] for name in ("drop", "miou", "miou_changed"))
    assert drop.value == pytest.approx(clean.value - changed.value)
    assert drop.low < drop.value < drop.high
    assert drop.high - drop.low < changed.high - changed.low  # pairs differ less than networks do among images
    again = view(subject, MaskNoise(draws=3))
    assert again.scalars == one.scalars


def test_the_sharpness_of_masks_is_that_of_the_dense_hessian_of_the_training_loss():
    tiny = {"name": "vit_tiny_patch16_224", "patch_size": 32, "depth": 1, "embed_dim": 4, "num_heads": 1}
    subject, task = make_subject(MASKS, model=tiny, precision="fp64")
    network, some = subject.given, subject.on("train", 3)
    head = {name: p for name, p in network.named_parameters() if "head.1" in name}
    (batch,) = some.batches()

    def loss(*values):
        scores = torch.func.functional_call(network, dict(zip(head, values, strict=True)), (batch.images,))
        return task.losses(scores, batch)["task"]

    with double_differentiable():
        blocks = torch.autograd.functional.hessian(loss, tuple(p.detach() for p in head.values()))
    sizes = [p.numel() for p in head.values()]
    dense = torch.cat(
        [
            torch.cat([b.reshape(n, m) for b, m in zip(row, sizes, strict=True)], 1)
            for row, n in zip(blocks, sizes, strict=True)
        ]
    )
    surface = Sharpness(images=3).surface(some)
    with surface.gradient_mode():
        assert surface.value() == pytest.approx(float(loss(*head.values()).detach()), rel=1e-9)
        product, size = Hessian(surface).block(list(head))
        found = torch.stack([product(unit) for unit in torch.eye(size, dtype=torch.float64)])
    torch.testing.assert_close(found, dense, rtol=1e-6, atol=1e-9)
    (one,) = measure(subject, [Sharpness(images=3, trace_draws=0, density_draws=0, max_products=12)])
    assert one.scalars["loss"].value == pytest.approx(surface.value(), rel=1e-6)
    assert [row.name for row in one.units] == ["blocks.0"]
    (refused,) = measure(subject, [Sharpness(loss="sigmoid")])
    assert refused.reason == "the loss of pixels is that of softmax: leave out loss=sigmoid."


def test_shot_noise_has_the_variance_of_its_photons():
    grey = torch.full((2, 1, 64, 64), 102 / 255)
    noisy = add_shot_noise(grey, 60, Draws("here", 0, [0, 1]))
    assert float(noisy.mean()) == pytest.approx(0.4, abs=0.004)
    assert float(noisy.var()) == pytest.approx(0.4 / 60, rel=0.06)


def test_boxes_are_scored_as_by_the_task_and_the_worst_come_first(boxes):
    subject, task = boxes
    one = view(subject, DetectionPrecision(shown=4))
    score = task.evaluate(subject.given, subject.dataset, "test", ALONE)
    for name in ("ap", "ap50", "ap75", "mask_ap", "mask_ap50", "mask_ap75", "objects"):
        assert one.scalars[name].value == pytest.approx(score[name]), name
    assert one.scalars["ap50"].low <= one.scalars["ap50"].value <= one.scalars["ap50"].high
    assert one.arrays["class_objects"].sum() == score["objects"]
    assert one.arrays["shown_f1"].tolist() == sorted(one.arrays["image_f1"].tolist())[:4]
    first = one.arrays["shown_truth_rows"] == 0
    assert first.sum() >= 1
    assert one.arrays["shown_truth_boxes"][first].max() <= 64
    assert set(one.arrays["shown_found_labels"].tolist()) <= set(range(6))


def test_an_untrained_detector_says_nothing():
    subject, _ = make_subject(BOXES)
    with torch.no_grad():
        assert sum(len(found["scores"]) for found in subject.given(subject.example)) == 0


@pytest.mark.parametrize("outputs", [2, 7, 1001])
def test_each_class_of_an_untrained_detector_has_the_same_small_probability(outputs):
    classifier = torch.nn.Linear(4, outputs)
    _prefer_background(classifier)
    probabilities = classifier.bias.softmax(0)
    assert probabilities[1:].max() <= 0.0101
    assert probabilities[0] >= 0.499


@pytest.mark.parametrize("probe", [SegmentationAccuracy(), DetectionPrecision()])
def test_networks_without_the_head_and_data_without_the_annotations_are_left_out(masks, probe):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    (one,) = measure(Subject(network, open_data("digits"), limit=8), [probe])
    assert one.status == "does_not_apply"
    assert "runs of the task" in one.reason
    subject, _ = masks
    (one,) = measure(Subject(subject.given, open_data("shapes:8"), limit=4), [SegmentationAccuracy()])
    assert one.reason == "the data has no masks."


def test_a_detector_shows_other_probes_the_features_of_its_backbone(boxes):
    subject, _ = boxes
    with torch.no_grad():
        assert torch.equal(subject.logits(subject.example), bare_features(subject))
    assert subject.features is not None
    assert [unit.name for unit in subject.anatomy.of_kind("msa")] == ["blocks.0.msa", "blocks.1.msa"]


def bare_features(subject):
    network = subject.given
    return network.trunk((subject.example - network.mean) / network.std)


NASTY = "<script>alert(1)</script>"


@pytest.mark.parametrize("kind", ["masks", "boxes"])
def test_a_page_shows_the_worst_images_with_names_escaped(masks, boxes, kind):
    subject, probe = (masks[0], SegmentationAccuracy(shown=5)) if kind == "masks" else (boxes[0], DetectionPrecision())
    one = view(subject, probe)
    hostile = np.array([NASTY] * len(one.arrays["classes"]))
    one = one.model_copy(update={"arrays": {**one.arrays, "classes": hostile}})
    figures = draw(one.probe, [ExamView(name="a network", measurements={one.probe: one})])
    (figure,) = figures
    album = figure.album
    assert len(album.thumbnails) == len(one.arrays["shown_images"])
    width, height = album.thumbnails[0].size
    assert width == 3 * height + 8
    assert album.pack().count("data:image/") == len(album.thumbnails)
    shown = [str(row.title) for listing in album.lists for row in listing.rows]
    shown += [str(each.said) for each in album.thumbnails]
    assert any("&lt;script&gt;" in text for text in shown)
    assert not any("<script>" in text for text in shown)
    assert json.loads(album.pack())
