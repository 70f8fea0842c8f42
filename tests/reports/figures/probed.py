"""Two tiny networks, measured by the real probes of curvature and behaviour, and a made course of training."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import timm
import torch
from torch import nn

from tests.anatomy.networks import shaken
from tests.probes.subjects import InMemory
from vitclinic._core.records import Measurement
from vitclinic.data import Augment, Dataset, Split, shapes
from vitclinic.probes import PastWeights, Subject, Training, measure, parse_probes
from vitclinic.reports.figure import ExamView

PROBES: list[Any] = [
    "anatomy",
    {"hessian_spectrum": {"batches": 2, "batch": 4, "top": 3}},
    {"sharpness": {"images": 6, "trace_draws": 3, "density_steps": 4}},
    {"flatness": {"draws": 6, "images": 6}},
    {"landscape": {"points": 5, "images": 6}},
    "trajectory",
    {"ntk": {"images": 12, "block": 4}},
    "accuracy",
    "errors",
    "embedding_map",
    {"slices": {"least": 2}},
    {"train_nll": {"images": 16}},
    {"corruptions": {"images": 4}},
    {"frequency_noise": {"images": 8, "width": 0.25}},
    "occlusion",
    {"fgsm": {"images": 8}},
    {"pgd": {"images": 8, "steps": 2}},
    "missing_rate",
    "shift",
    {"shape_bias": {"images": 90}},
    {"saliency": {"images": 6, "steps": 4}},
    {"cost": {"repeats": 6, "batch": 2}},
    "norms",
]
NAMES = [next(iter(probe)) if isinstance(probe, dict) else probe for probe in PROBES]


def images(count: int = 30) -> Dataset:
    """Shapes, the same in every split."""
    held = InMemory(0)
    drawn = [shapes.cue_conflict(1, number) for number in range(count)]
    held.pixels = np.stack([image for image, _, _ in drawn])
    split = Split(held, np.arange(count), np.array([shape for _, shape, _ in drawn]))
    splits = dict.fromkeys(("train", "val", "test"), split)
    return Dataset("shapes", shapes.CLASSES, (32, 32), 3, splits, f"figures {count}")


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    vit = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=len(shapes.CLASSES)
    )
    resnet = timm.create_model("resnet18", channels=(4, 4, 8, 8), layers=(1, 1, 1, 1), num_classes=10)
    return {"vit": shaken(vit), "resnet": shaken(resnet)}


def training_of(network: nn.Module) -> Training:
    """As if it had come to where it is in four epochs."""

    def state(epoch: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(1)
        far = 1 - epoch / 4
        drawn = {
            name: torch.randn(w.shape, generator=random) if w.is_floating_point() else w
            for name, w in network.state_dict().items()
        }
        return {
            name: w + far * 0.1 * drawn[name] + far**2 * 0.05 * drawn[name].abs() if w.is_floating_point() else w
            for name, w in network.state_dict().items()
        }

    weights = {float(epoch): (lambda epoch=epoch: state(epoch)) for epoch in range(5)}
    past = PastWeights(weights, projections=dict, digest=lambda: "made", finished=True)
    return Training(Augment(), 0.05, frozenset(), past)


@cache
def pair() -> tuple[ExamView, ExamView]:
    """The two networks; measured once, and not to be changed."""
    dataset = images()
    found = []
    for name, network in networks().items():
        subject = Subject(network, dataset, name=name, batch_size=16, training=training_of(network))
        measurements = {one.probe: one for one in measure(subject, parse_probes(PROBES))}
        assert {one.status for one in measurements.values()} <= {"ok", "not_converged"}, measurements
        found.append(ExamView(name, measurements, training=course()))
    return found[0], found[1]


def course(steps: int = 700, diverges: bool = False) -> list[dict[str, Any]]:
    """Rows as training writes them."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        row = {"step": step, "epoch": step // 100, "lr": 1e-3 * (1 - step / steps)}
        rows.append({"kind": "train", **row, "loss": 2.3 / step**0.2 + step % 2 * 0.1, "grad_norm": 1 + step % 3})
        if step % 100 == 0:
            accuracy = 0.1 + step / steps / 2
            score = {"accuracy": accuracy, "accuracy_low": accuracy - 0.05, "accuracy_high": accuracy + 0.05}
            rows.append({"kind": "val", **row, "loss": 2.0 / step**0.1, "grad_norm": None, **score})
    if diverges:
        rows.append({"kind": "train", "step": steps + 1, "epoch": 9, "lr": 0.0, "loss": None, "grad_norm": None})
    return rows


def renamed(one: ExamView, name: str) -> ExamView:
    return replace(one, name=name)


def changed(one: ExamView, probe: str, **fields: Any) -> ExamView:
    """With a measurement that differs in these fields."""
    measurement: Measurement = one.measurements[probe].model_copy(update=fields)
    return replace(one, measurements={**one.measurements, probe: measurement})
