"""Made-up networks, measured by every probe: plausible numbers under the names and in the shapes that the probes give.

A ViT of four blocks for 32 x 32 pixels; what differs between two of them is the `seed`.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from tests.reports.made_errors import errors
from vitclinic._core.records import Finding, Measurement, Provenance, Scalar, Suggestion, UnitRow
from vitclinic.probes import known_probes
from vitclinic.reports.figure import ExamView

BLOCKS = 4
GRID = 8
SIDE = 32
HOSTILE = "<script>alert(1)</script>"
CORRUPTED = ("gaussian_noise", "defocus_blur", "fog", "jpeg_compression")


def units(values, kinds=("stem", "position", "msa", "mlp", "head"), grown=0.1):
    """Rows of the units of these kinds, of which value number k of unit number i is values[k] + grown * i."""
    layout = [("stem", "stem"), ("position", "position")]
    for block in range(BLOCKS):
        layout += [(f"blocks.{block}.attn", "msa"), (f"blocks.{block}.mlp", "mlp")]
    layout.append(("head", "head"))
    return [
        UnitRow(
            name=name,
            kind=kind,
            stage=0,
            depth=depth,
            values={key: estimate(start + grown * depth) for key, start in values.items()},
        )
        for depth, (name, kind) in enumerate(layout)
        if kind in kinds
    ]


def estimate(value, half=0.02):
    return Scalar(value=value, low=value - half, high=value + half, n=1000)


def exact(value):
    return Scalar(value=float(value))


def measurement(probe, seed=0, **parts):
    """A measurement by `probe`, with its default options where it is one of ours."""
    known = known_probes().get(probe)
    record = {
        "probe": probe,
        "config": {} if known is None else known().model_dump(mode="json"),
        "subject": f"network {seed}",
        "data": "test images",
        "provenance": provenance(),
        "facts": None if known is None else known.facts(),
    }
    return Measurement(**{**record, **parts})


def provenance(**parts):
    facts = {"seed": 0, "mode": "eval", "device": "cpu", "batch_size": 64, "duration": 5.04, "images": 1000}
    return Provenance(**{**facts, "date": "2026-11-16T03:54:21Z", "versions": {"vitclinic": "0.1.0"}, **parts})


@functools.cache
def vit(seed: int = 0, name: str = "runs/plain", healthy: bool = False) -> ExamView:
    """One network: all probes, findings, training, facts."""
    rng = np.random.default_rng(seed)
    parts = {**_behaviour(rng), **_features(rng), **_attention(rng), **_curvature(rng), **_network(rng)}
    measurements = {probe: measurement(probe, seed, **made) for probe, made in parts.items()}
    facts = {"Network": "vit_tiny_fitted", "Treatments": "none", "Data": "shapes:200, 10 classes, 32 x 32"}
    return ExamView(name, measurements, findings(healthy), training(rng), facts)


def several() -> list[ExamView]:
    """Three networks; the last has a hostile name, a failed probe, one that does not apply, and one of a plugin's."""
    third = vit(2, HOSTILE)
    odd = {
        "fgsm": measurement("fgsm", 2, status="failed", reason="ValueError: cannot read '/home/me/secret/x.png'"),
        "trajectory": measurement("trajectory", 2, status="does_not_apply", reason="There is no run."),
        "flatness": third.measurements["flatness"].model_copy(
            update={"status": "not_converged", "reason": "Few draws."}
        ),
        "my.own probe": plugin(),
    }
    return [
        vit(0, "runs/plain"),
        vit(1, "runs/with-sam", healthy=True),
        ExamView(third.name, {**third.measurements, **odd}, third.findings, third.training, {"Data": HOSTILE}),
    ]


def plugin():
    """What nobody has written a drawer for."""
    scalars = {"odd_one": estimate(0.5), HOSTILE: exact(3)}
    return measurement("my.own probe", scalars=scalars, units=units({"oddness": 0.2, HOSTILE: 0.4}))


def findings(healthy):
    over_smoothing = Finding(
        rule="over_smoothing",
        title="Over-smoothed patches",
        severity="problem",
        statement=f"The patches of an image are alike, most of all in {HOSTILE}: their mean cosine is 0.71.",
        numbers={"token_similarity.absolute_cosine_last": estimate(0.71), "training.spikes": exact(0)},
        threshold="Above 0.6, as in a DeiT of 24 layers (Gong et al. 2021, Fig. 1b).",
        basis="published range",
        suggestions=(Suggestion(treatment="patch_diversity", paper="Gong et al. 2021", why="It keeps patches apart."),),
    )
    confident = Finding(
        rule="over_confidence",
        title="Over-confident",
        severity="notice",
        statement="Confidence exceeds accuracy by 0.06.",
        numbers={"accuracy.ece": estimate(0.06)},
        threshold="More than 0.05 (ours).",
        basis="heuristic",
    )
    steady = Finding(
        rule="unstable_training",
        title="Steady training",
        severity="healthy",
        statement="The loss fell without a spike.",
        numbers={},
        threshold="No step above three times the running median (ours).",
        basis="heuristic",
    )
    return (steady,) if healthy else (steady, confident, over_smoothing)


def training(rng, steps=60):
    def row(kind, step, loss, **more):
        plain = {"kind": kind, "step": step, "epoch": step // 10, "loss": loss, "losses": {"task": loss}}
        return {**plain, "lr": 1e-3 * (1 - step / steps), "grad_norm": 1 + rng.random(), **more}

    rows = [row("train", step, 2.3 * math.exp(-step / 30) + 0.1 * rng.random()) for step in range(1, steps + 1)]
    for step in range(10, steps + 1, 10):
        accuracy = 0.8 * (1 - math.exp(-step / 30))
        ends = {"accuracy_low": accuracy - 0.02, "accuracy_high": accuracy + 0.02, "count": 1000}
        rows.append(row("val", step, 2 - accuracy, accuracy=accuracy, nll=2 - accuracy, **ends))
    return sorted(rows, key=lambda row: (row["step"], row["kind"]))


def shares(rng, *keys):
    return {key: estimate(0.3 + 0.5 * rng.random()) for key in keys}


def _noisy_masks():
    changes = ("shot_noise", "gaussian_noise_5", "gaussian_noise_10", "gaussian_blur_1", "gaussian_blur_2")
    names = ("miou", *(f"miou_{change}" for change in changes), "miou_changed", "drop")
    return {"scalars": shares(np.random.default_rng(7), *names)}


def _embeddings(images=12):
    rng, labels = np.random.default_rng(8), np.arange(images) % 3
    arrays = {
        "points": rng.normal(size=(images, 2)).astype(np.float32),
        "shown_images": rng.integers(0, 256, (images, SIDE, SIDE, 3), dtype=np.uint8),
        "shown_names": np.array([f"{HOSTILE}/{number}.png" for number in range(images)]),
        "labels": labels,
        "predicted": np.where(np.arange(images) % 4, labels, 0),
        "by_scores": np.array(True),
        "classes": np.array([HOSTILE, "square", "star"]),
    }
    return {"scalars": {"effective_rank": exact(9.5), "variance_shown": exact(0.4)}, "arrays": arrays}


def _behaviour(rng):
    right = rng.random(100) < 0.7
    edges = np.linspace(0, 1, 16)
    middle = (edges[1:] + edges[:-1]) / 2
    bins = {"bin_edges": edges, "bin_images": np.arange(15), "bin_confidence": middle, "bin_accuracy": middle**1.3}
    bins |= {"bin_accuracy_low": middle**1.3 - 0.05, "bin_accuracy_high": middle**1.3 + 0.05}
    table = 0.8 - 0.1 * np.arange(5) - 0.05 * rng.random((len(CORRUPTED), 5))
    corrupted = {"accuracy": table, "low": table - 0.03, "high": table + 0.03}
    corrupted["samples"] = rng.integers(0, 256, (1 + len(CORRUPTED), SIDE, SIDE, 3), dtype=np.uint8)
    rings = np.linspace(0.05, 0.95, 10)
    drop = 0.3 * np.sin(3 * rings) ** 2
    noise = {"frequency": rings, "frequencies": np.arange(10, 20), "accuracy": 0.8 - drop, "drop": drop}
    noise["drop_interval"] = np.stack([drop - 0.02, drop + 0.02], axis=1)
    attack = ("clean_accuracy", "robust_accuracy", "drop", "success", "noise_accuracy", "zero_gradient_share")
    attacked = {"clean": right, "robust": right & (rng.random(100) < 0.5)}
    classes = (HOSTILE, "square", "star")
    decided = {
        "images": np.full(3, 50),
        "shape_decisions": np.array([20, 30, 10]),
        "texture_decisions": np.array([9, 9, 9]),
    }
    return {
        **errors(np.random.default_rng(rng.integers(1000)), classes),
        "accuracy": {
            "scalars": shares(rng, "accuracy", "top5_accuracy", "nll", "confidence", "ece"),
            "arrays": bins,
        },
        "vqa": _answers(),
        "segmentation": _masks(),
        "mask_noise": _noisy_masks(),
        "detection": _boxes(),
        "train_nll": {"scalars": shares(rng, "nll", "target_entropy")},
        "corruptions": {
            "scalars": shares(rng, "accuracy", "clean_accuracy", "drop", *(f"accuracy_{one}" for one in CORRUPTED)),
            "arrays": corrupted,
        },
        "frequency_noise": {
            "scalars": {**shares(rng, "clean_accuracy", "drop_low", "drop_high"), "l2_norm": exact(5.5)},
            "arrays": noise,
        },
        "occlusion": {
            "scalars": shares(rng, "accuracy", "clean_accuracy", "drop"),
            "arrays": {"clean": right, "occluded": right & (rng.random(100) < 0.8)},
        },
        "fgsm": {"scalars": {**shares(rng, *attack), "epsilon": exact(1 / 255)}, "arrays": attacked},
        "pgd": {"scalars": {**shares(rng, *attack), "epsilon": exact(1 / 255)}, "arrays": attacked},
        "missing_rate": {
            "scalars": shares(rng, "missing_rate", "missing_rate_different_classes", "missing_rate_same_class")
        },
        "shift": {
            "scalars": {**shares(rng, "accuracy", "accuracy_among_mapped"), "images_left_out": exact(0)},
            "arrays": {"correct": right, "among_mapped": right, "counted": np.ones(100, dtype=bool)},
        },
        "saliency": {
            "scalars": shares(rng, "gain", "insertion", "deletion", "shuffled_insertion", "shuffled_deletion"),
            "arrays": _saliency(rng),
        },
        "shape_bias": {
            "scalars": shares(
                rng, "shape_bias", "shape_decisions", "texture_decisions", *(f"shape_bias_{one}" for one in classes)
            ),
            "arrays": decided,
        },
    }


def _answers():
    rng = np.random.default_rng(11)
    texts = ("what colour is the star", HOSTILE)
    shown = {
        "images": rng.integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8),
        "names": np.array(["a.png", HOSTILE]),
        "questions": np.array(texts),
        "given": np.array(["red", HOSTILE]),
        "truth": np.array(["blue", "yes, no"]),
        "scores": np.array([0.0, 0.3]),
        "confidence": np.array([0.9, 0.6]),
    }
    beginnings = {"beginnings": np.array(["what colour", HOSTILE]), "beginning_questions": np.array([30, 10])}
    return {
        "scalars": shares(rng, "accuracy", "accuracy_yes_no", "accuracy_number", "accuracy_other"),
        "arrays": {
            **beginnings,
            "beginning_accuracy": np.array([0.8, 0.5]),
            **{f"shown_{name}": values for name, values in shown.items()},
        },
    }


def _masks():
    rng = np.random.default_rng(12)
    iou = np.array([0.9, 0.6, np.nan])
    return {
        "scalars": shares(rng, "miou", "pixel_accuracy", "nll"),
        "arrays": {
            "classes": np.array(["ground", HOSTILE, "sea"]),
            **{"class_iou": iou, "class_iou_low": iou - 0.1, "class_iou_high": iou + 0.1},
            "class_images": np.array([30, 20, 0]),
            "image_iou": np.array([0.4, 0.5, 0.9]),
            "shown_images": rng.integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8),
            "shown_names": np.array(["a.png", HOSTILE]),
            "shown_truth": rng.choice(np.array([0, 1, 255], np.uint8), (2, SIDE, SIDE)),
            "shown_predicted": rng.integers(0, 2, (2, SIDE, SIDE), dtype=np.uint8),
            "shown_iou": np.array([0.4, 0.5]),
        },
    }


def _boxes():
    rng = np.random.default_rng(13)
    boxes = np.array([[2.0, 2.0, 20.0, 18.0], [5.0, 8.0, 30.0, 30.0]])
    framed = {"rows": np.array([0, 1]), "boxes": boxes, "labels": np.array([0, 1])}
    ap = np.array([0.7, np.nan])
    return {
        "scalars": {**shares(rng, "ap", "ap50", "ap75", "mask_ap", "mask_ap50", "mask_ap75"), "objects": exact(40)},
        "arrays": {
            "classes": np.array([HOSTILE, "star"]),
            **{"class_ap": ap, "class_ap50": ap, "class_mask_ap": ap, "class_mask_ap50": ap},
            "class_objects": np.array([40, 0]),
            "image_f1": np.array([0.0, 0.5, 1.0]),
            "shown_images": rng.integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8),
            "shown_names": np.array(["a.png", HOSTILE]),
            "shown_f1": np.array([0.0, 0.5]),
            **{f"shown_{kind}_{key}": values for kind in ("truth", "found") for key, values in framed.items()},
            "shown_found_scores": np.array([0.9, 0.6]),
        },
    }


def _saliency(rng):
    falling = np.linspace(0.8, 0.1, 9)
    maps = rng.random((2, GRID, GRID))
    return {
        "method": np.array(["gradient_attention"]),
        "maps": np.kron(maps, np.ones((1, 4, 4))),
        "grid_maps": maps,
        "images": np.random.default_rng(7).integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8),
        "numbers": np.array([3, 17]),
        "insertion": falling[::-1],
        "deletion": falling,
        "shuffled_insertion": 0.9 * falling[::-1],
        "shuffled_deletion": 1.1 * falling,
    }


def _features(rng):
    on_grid = ("stem", "position", "msa", "mlp")
    rows = units({"delta_log_amplitude": -3.0 - rng.random(), "change": 0.1}, on_grid)
    curves = -np.linspace(0, 4, 5) * np.linspace(1, 0.5, len(rows))[:, None] - 0.1 * rng.random((len(rows), 5))
    everywhere = units({"cka_mean": 0.5, "cka_previous": 0.8}, grown=0.01)
    distance = np.abs(np.subtract.outer(np.arange(len(everywhere)), np.arange(len(everywhere))))
    lesions = units(
        {"accuracy": 0.5, "accuracy_drop": 0.1 * rng.random(), "nll_rise": 0.3}, ("position", "msa", "mlp"), 0.01
    )
    changes = ("last", "change_msa", "change_mlp")
    return {
        "fourier": {
            "scalars": {f"delta_log_amplitude_{end}": estimate(rng.random() - 2) for end in changes},
            "units": rows,
            "arrays": {
                "frequencies": np.tile(np.linspace(0, 1, 5), (len(rows), 1)),
                "delta_log_amplitude": curves,
                "half_width": np.full_like(curves, 0.05),
                "interpolated": np.zeros(curves.shape, dtype=bool),
            },
        },
        "variance": {
            "scalars": {f"variance_{end}": estimate(rng.random()) for end in changes},
            "units": units({"variance": 0.5 + rng.random(), "change": 0.1}, on_grid),
        },
        "cka": {
            "scalars": {"cka_mean": estimate(0.6), "images": exact(1000)},
            "units": everywhere,
            "arrays": {"cka": np.exp(-distance / (3 + 3 * rng.random()))},
        },
        "token_similarity": {
            "scalars": shares(rng, "absolute_cosine_last", "cosine_last", "absolute_cosine_rise"),
            "units": units({"absolute_cosine": 0.1, "cosine": 0.05 * rng.random()}, on_grid, 0.05),
            "config": {"tokens": 256},
        },
        "token_norms": {
            "scalars": shares(rng, "outliers_last", "images_with_outliers_last", "outliers_most")
            | {"peak_last": estimate(1.5)},
            "units": units({"norm": 20.0, "peak": 1.2, "outliers": 0.01, "prefix_norm": 15.0}, on_grid, 0.01),
            "arrays": {
                "mean_norm": 20 + rng.random((len(rows), GRID, GRID)),
                "distribution": np.tile([0.1, 0.7, 0.2], (len(rows), 1)),
                "edges": np.array([1.0, 10.0, 100.0, 1000.0]),
                "prefix_norm": np.full((len(rows), 1), 15.0),
            },
        },
        "embedding_map": _embeddings(),
        "knn": {"scalars": shares(rng, "accuracy")},
        "linear_probe": {"scalars": shares(rng, "accuracy")},
        "retrieval": {
            "scalars": shares(rng, "map", "rank1", "rank5", "rank10"),
            "arrays": {"cmc": np.sort(rng.random(20))},
        },
        "alignment_uniformity": {"scalars": {"alignment": estimate(0.8), "uniformity": estimate(-2.5)}},
        "sparsity": {
            "scalars": shares(rng, "active", "active_first", "active_last"),
            "units": units({"active": 0.1 + 0.2 * rng.random()}, ("mlp",), 0.03),
        },
        "lesion": {
            "scalars": shares(
                rng, "accuracy", "nll", "accuracy_drop_position", "accuracy_drop_msa", "accuracy_drop_mlp"
            ),
            "units": lesions,
            "arrays": {
                "correct": rng.random((1 + len(lesions), 50)) < 0.6,
                "nll": rng.random((1 + len(lesions), 50)),
            },
        },
    }


def _attention(rng):
    most = math.log(GRID * GRID + 1)
    dense = {"entropy": 0.5 * most, "upper": 0.6 * most, "class_entropy": 0.4 * most, "patch_entropy": 0.5 * most}
    entropies = units({**dense, "maximum": most, "ratio": 0.5}, ("msa",), 0.05)
    maps = rng.random((2, GRID, GRID))
    maps /= maps.sum((1, 2), keepdims=True)
    return {
        "attention_entropy": {
            "scalars": shares(rng, "ratio", "upper_ratio", "class_ratio"),
            "units": entropies,
            "arrays": {"head_entropy": most * rng.random((BLOCKS, 3))},
        },
        "token_kinds": {
            "scalars": shares(
                np.random.default_rng(12), "text_to_image", "image_to_text", "text_entropy", "image_entropy"
            ),
            "units": units({"text_to_image": 0.4, "image_to_text": 0.2}, ("msa",), 0.05),
        },
        "softmax_jacobian": {
            "scalars": shares(rng, "ratio", "nuclear", "frobenius"),
            "units": units({"nuclear": 0.8, "frobenius": 0.3, "maximum": 0.98, "ratio": 0.82}, ("msa",), 0.01),
            "arrays": {"head_nuclear": rng.random((BLOCKS, 3))},
        },
        "attention_distance": {
            "scalars": shares(rng, "distance", "relative_distance"),
            "units": units({"distance": 0.3 * rng.random(), "relative_distance": 0.01}, ("msa",), 0.05),
            "arrays": {"head_distance": rng.random((BLOCKS, 3))},
        },
        "attention_maps": {
            "scalars": {"on_grid": exact(0.9), "peak": exact(float(maps.max())), "images": exact(2)},
            "arrays": {
                "maps": np.kron(maps, np.ones((1, 4, 4))),
                "grid_maps": maps,
                "images": np.random.default_rng(7).integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8),
                "numbers": np.array([3, 17]),
            },
        },
        "cb_scale": {
            "scalars": shares(rng, "ratio", "mean"),
            "units": units({"ratio": 0.2 * rng.random(), "mean": 0.1}, ("mlp",), 0.05),
            "arrays": {"scales": rng.normal(0.3, 0.1, (BLOCKS, 24))},
        },
    }


def _curvature(rng):
    x = np.linspace(-1, 1, 9)
    losses = 0.5 + np.add.outer((2 + rng.random()) * x**2, x**2)
    epochs = np.arange(5.0)
    course = {"epoch": epochs, "radius": np.linspace(1, 0.3, 5), "angle": rng.random() * epochs / 5}
    blocks = rng.lognormal(3, 0.2, 10)
    kernel = np.sort(rng.lognormal(0, 2, (10, 48)))[:, ::-1]
    names = ("lambda_max", "trace", "lambda_max_embedding", "lambda_max_msa", "lambda_max_mlp")
    return {
        "sharpness": {
            "scalars": {name: estimate(20 * rng.random()) for name in names}
            | {"loss": exact(0.5), "products": exact(90)},
            "units": units({"lambda_max": 5 * rng.random()}, ("stem", "msa"), 0.5),
            "arrays": {"density_nodes": np.linspace(-2, 20, 40), "density_weights": np.full(40, 1 / 40)},
        },
        "hessian_spectrum": {
            "scalars": {"nep": estimate(0.1), "ape": estimate(30 + 30 * rng.random(), 5), "products": exact(300)},
            "arrays": {
                "eigenvalues": rng.normal(20, 15, (16, 5)),
                "errors": np.zeros((16, 5)),
                "residuals": np.zeros((16, 5)),
            },
        },
        "flatness": {
            "scalars": {"flatness": estimate(1 + rng.random()), "loss": exact(0.5), "sigma": exact(0.01)},
            "arrays": {"losses": rng.lognormal(0.5, 0.1, 50)},
        },
        "landscape": {
            "scalars": {"loss": exact(0.5), "largest_loss": exact(losses.max()), "points_not_finite": exact(0)},
            "arrays": {"x": x, "y": x, "losses": losses, "evaluated": np.ones_like(losses, dtype=bool)},
        },
        "ntk": {
            "scalars": {
                "condition_number": estimate(float(blocks.mean()), 3),
                "lambda_1": exact(9),
                "lambda_m": exact(0.1),
            },
            "arrays": {"condition_number": blocks, "eigenvalues": kernel},
        },
        "trajectory": {
            "scalars": {"distance": exact(12), "angle_max": exact(course["angle"].max()), "points": exact(5)},
            "arrays": {**course, "radius_error": np.zeros(5), "angle_error": np.zeros(5)},
        },
    }


def _network(rng):
    cost = {"parameters": exact(5_717_416), "flops": exact(2.5e9), "peak_memory_bytes": exact(6e7), "batch": exact(64)}
    speed = {"images_per_second": estimate(200 + 50 * rng.random(), 5), "latency_seconds": estimate(0.01, 0.001)}
    norms = ("weight_norm", "weight_norm_outside_units", "activation_norm_first", "activation_norm_middle")
    return {
        "anatomy": _anatomy(),
        "cost": {"scalars": {**cost, **speed}, "arrays": {"seconds": 0.01 + 0.001 * rng.random((10, 2))}},
        "norms": {
            "scalars": {**shares(rng, *norms), "activation_norm_last": estimate(50)},
            "units": units({"weight_norm": 5 * rng.random(), "activation_norm": 10.0}, grown=1.0),
        },
    }


def _anatomy():
    """A row for each unit, as on a grid of patches with a class token."""
    rows = []
    for row in units({}):
        values = {"parameters": 10_000, "residual": row.kind in ("msa", "mlp"), "attention_map": row.kind == "msa"}
        values |= {"channels": 10} if row.kind == "head" else {"channels": 192, "grid_height": GRID, "grid_width": GRID}
        values |= {"prefix_tokens": 1} if row.kind in ("position", "msa", "mlp") else {}
        rows.append(row.model_copy(update={"values": {key: exact(value) for key, value in values.items()}}))
    texts = {"network": HOSTILE, "family": "timm ViT", "notes": [f"{HOSTILE} could not be settled."]}
    scalars = {"units": exact(len(rows)), "stages": exact(1), "observed": exact(0)}
    return {"scalars": scalars, "units": rows, "arrays": {key: np.array(text) for key, text in texts.items()}}
