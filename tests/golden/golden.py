"""The golden record: what 0.1 computes, to be computed again, bit by bit, by whatever is rebuilt from it.

    python -m tests.golden.golden --exact      compare with record.json bit by bit; exit 1 on any difference
    python -m tests.golden.golden --write      write record.json
    python -m tests.golden.golden --make-run   train and examine run-0.1 (only where it is not there)

Bits repeat with the packages that wrote the record and, where MKL computes, with MKL_CBWR=COMPATIBLE set;
elsewhere see `test_golden.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

# All that is vitclinic's, in one place: when modules move, these lines are what changes.
from vitclinic import Dataset, Measurement, Run, create_model, examine, load_model, open_data, resume, train
from vitclinic.data import Split
from vitclinic.exam.targets import resolve
from vitclinic.probes import Subject, measure, parse_probes

HERE = Path(__file__).parent
RECORD = HERE / "record.json"
RUN = HERE / "run-0.1"

Plain = dict[str, Any]

# ---------------------------------------------------------------------------------------------------- networks, images

CLASSES = 5
SIZE = 16
IMAGES = 22
BATCH = 8


class Noise:
    """Noise as images, in memory."""

    def __init__(self, count: int) -> None:
        self.pixels = np.random.default_rng(0).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)
        self.digest = f"noise {count}"
        self.skipped: list[str] = []
        self.kept = np.arange(count)

    def read(self, indices: Any) -> Any:
        return self.pixels[indices]


@cache
def noise() -> Dataset:
    """Return a data set of noise, the same images in every split."""
    images = Noise(IMAGES)
    split = Split(images, np.arange(IMAGES), np.arange(IMAGES) % CLASSES)
    names = tuple(f"class {number}" for number in range(CLASSES))
    return Dataset("noise", names, (SIZE, SIZE), 3, {"train": split, "val": split, "test": split}, images.digest)


def _vit() -> nn.Module:
    small = {"img_size": SIZE, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2, "drop_rate": 0.1}
    return create_model("vit_tiny_fitted", num_classes=CLASSES, mean=[0.5] * 3, std=[0.25] * 3, **small)


def _resnet() -> nn.Module:
    return timm.create_model("resnet18", channels=(8, 8, 16, 16), layers=(1, 1, 1, 1), num_classes=CLASSES)


def _mixer() -> nn.Module:
    return timm.models.MlpMixer(img_size=SIZE, patch_size=4, embed_dim=16, num_blocks=2, num_classes=CLASSES)


def _alternet() -> nn.Module:
    small = {"layers": (1, 2, 2, 4), "channels": (8, 8, 8, 16), "heads": (1, 1, 2, 2), "head_width": 4}
    return create_model("alternet50", img_size=SIZE, num_classes=CLASSES, stem="cifar", drop_path_rate=0.2, **small)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "vit": _vit,
    "resnet": _resnet,
    "mixer": _mixer,
    "alternet": _alternet,
}
STORED = "run"
"""The network of the stored run, which also has a training to tell of."""
NETWORKS = (*BUILDERS, STORED)


def shaken(network: nn.Module) -> nn.Module:
    """Give all parameters and statistics ordinary values: many start at zero or one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*network.parameters(), *_statistics(network)):
            if tensor.squeeze().ndim <= 1:
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
            else:
                fan_in = 4 if tensor.shape[0] == 1 else tensor[0].numel()
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / fan_in**0.5)
    return network


def _statistics(network: nn.Module) -> Iterator[Tensor]:
    for name, buffer in network.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            yield buffer


@cache
def subject(network: str) -> Subject:
    """Return what is measured: a network in float64, with images in batches of which the last is smaller."""
    if network == STORED:
        target = resolve(str(RUN), torch.device("cpu"))
        target.network.double()
        return Subject(
            target.network,
            open_data(Run.open(RUN).recipe.data),
            limit=IMAGES,
            batch_size=BATCH,
            output_names=target.output_names,
            training=target.training,
        )
    torch.manual_seed(0)
    return Subject(shaken(BUILDERS[network]().double()), noise(), batch_size=BATCH)


# ------------------------------------------------------------------------------------------------------------- probes

QUICK: dict[str, Plain] = {
    "accuracy": {"bins": 5},
    "attention_maps": {"images": 2},
    "cka": {"batch": 4},
    "corruptions": {"images": 3},
    "cost": {"repeats": 1, "batch": 4},
    "flatness": {"images": 8, "draws": 12, "precision": 0.0},
    "hessian_spectrum": {"batches": 2, "batch": 4, "top": 2, "tolerance": 0.1},
    "landscape": {"images": 8, "points": 3},
    "ntk": {"images": 8, "block": 4},
    "pgd": {"steps": 3},
    "shape_bias": {"images": 20},
    "sharpness": {"images": 8, "trace_draws": 2, "density_steps": 3, "tolerance": 0.2},
    "train_nll": {"images": 20},
}
"""Options with which a probe that takes long is cheap; none has a budget, so that no clock decides."""

_CLASS_MAP = [0, [1, 2], 4, 3, None, 0, 1, 2, 3, 4]
"""Which outputs are right for each of the ten digits."""

VARIANTS: dict[str, tuple[str, Plain]] = {
    "cka, the usual batch": ("cka", {}),
    "flatness, until precise": ("flatness", {"images": 8, "sigma": 0.05, "precision": 0.2, "batch_norm": "train"}),
    "frequency_noise, wide": ("frequency_noise", {"width": 0.3, "strength": 0.2}),
    "hessian_spectrum, plain": (
        "hessian_spectrum",
        {"batches": 2, "batch": 4, "top": 1, "tolerance": 0.1, "augment": False, "regulariser": False},
    ),
    "landscape, a line": ("landscape", {"images": 8, "points": 5, "dimensions": 1, "normalisation": "dim0"}),
    "landscape, eigenvectors": (
        "landscape",
        {"images": 4, "points": 3, "dimensions": 1, "directions": "eigenvectors"},
    ),
    "landscape, trajectory": (
        "landscape",
        {"images": 8, "points": 3, "directions": "trajectory", "regulariser": "run"},
    ),
    "ntk, as it is": ("ntk", {"images": 8, "block": 8, "relu": False, "batch_norm": "running"}),
    "occlusion, mean": ("occlusion", {"value": "mean"}),
    "pgd, l2": ("pgd", {"steps": 2, "norm": "l2", "epsilon": 0.5, "random_start": True, "restarts": 1}),
    "sharpness, by the batch": (
        "sharpness",
        {"images": 8, "batch_norm": "train", "tolerance": 0.2, "trace_draws": 2, "components": False},
    ),
    "shift, digits": ("shift", {"data": "digits", "classes": _CLASS_MAP, "images": 20}),
    "trajectory, projections": ("trajectory", {"source": "projections"}),
}
"""Further options of some probes."""

REGISTERED = (
    *("accuracy", "attention_distance", "attention_entropy", "attention_maps", "cb_scale", "cka", "corruptions"),
    *("cost", "fgsm", "flatness", "fourier", "frequency_noise", "hessian_spectrum", "landscape", "lesion"),
    *("missing_rate", "norms", "ntk", "occlusion", "pgd", "shape_bias", "sharpness", "shift", "sparsity"),
    *("token_similarity", "train_nll", "trajectory", "variance"),
)
"""All probes of 0.1."""

PROBES: dict[str, tuple[str, Plain]] = {name: (name, QUICK.get(name, {})) for name in REGISTERED} | VARIANTS
"""What is measured of every network, by the name that it has in the record."""

OF_THE_CLOCK = {"images_per_second", "latency_seconds", "peak_memory_bytes", "seconds"}
"""Scalars and arrays that depend on the machine's clock and memory."""


def probe_numbers() -> Plain:
    """Return the numbers of every probe on every network."""
    return {label: numbers_of(label) for label in PROBES}


def numbers_of(label: str) -> Plain:
    """Return the numbers of one entry of PROBES, by network."""
    name, options = PROBES[label]
    probes = parse_probes([{name: options}])
    return {network: told(measure(subject(network), probes)[0]) for network in NETWORKS}


def told(measurement: Measurement) -> Plain:
    """Return what a measurement says, without what the clock has to do with."""
    scalars, arrays = measurement.scalars, measurement.arrays
    return {
        "status": measurement.status,
        "scalars": {name: _interval(scalar) for name, scalar in scalars.items() if name not in OF_THE_CLOCK},
        "units": [
            [row.name, row.kind, {name: _number(value.value) for name, value in row.values.items()}]
            for row in measurement.units
        ],
        "arrays": {name: summary(array) for name, array in sorted(arrays.items()) if name not in OF_THE_CLOCK},
    }


def _interval(scalar: Any) -> list[Any]:
    return [None if number is None else _number(number) for number in (scalar.value, scalar.low, scalar.high)]


def summary(array: Any) -> Plain:
    """Return an array's type, shape, and sum, sum of magnitudes and first three values of what is finite in it."""
    array = np.asarray(array)
    found: Plain = {"dtype": "text" if array.dtype.kind in "US" else str(array.dtype), "shape": list(array.shape)}
    if array.dtype.kind in "US":
        return {**found, "texts": [str(text) for text in array.ravel()]}
    flat = array.ravel().astype(np.float64)
    finite = flat[np.isfinite(flat)]
    numbers = [math.fsum(finite), math.fsum(np.abs(finite)), *finite[:3].tolist()]
    return {**found, "not_finite": len(flat) - len(finite), "numbers": numbers}


def _number(value: float) -> float | str:
    """As strict JSON has it."""
    return float(value) if math.isfinite(value) else str(float(value))


# --------------------------------------------------------------------------------------------------------- treatments

STEPS = 10
VIT: Plain = {"name": "vit_tiny_fitted", "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 2}
CNN: Plain = {"name": "resnet18", "layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "stem_width": 8}
DEIT: Plain = {"source": "digits", "limit": 64, "augment": "deit"}
SAM_2: Plain = {"treatments": ["sam"], "accumulate": 2}


def _treated(*treatments: Any, **changes: Any) -> Plain:
    return {"treatments": list(treatments), **changes}


ALONE = (
    *("adversarial", "context_broadcasting", "conv_stem", "extra_block", "ffn_variant", "gap_head"),
    *("local_attention", "no_softmax", "patch_diversity", "relu_activation", "sam", "spatial_smoothing"),
    *("squeeze_excitation", "talking_heads", "uniform_heads"),
)
"""All treatments of 0.1."""

TREATMENTS: dict[str, Plain] = {
    **{name: _treated(name) for name in ALONE},
    "spatial_smoothing": _treated("spatial_smoothing", model=CNN),
    "adversarial, farther": _treated({"adversarial": {"epsilon": 0.1, "step": 1.0}}),
    "context_broadcasting, scaled": _treated({"context_broadcasting": {"scaled": True, "initial_scale": 0.1}}),
    "context_broadcasting, both": _treated({"context_broadcasting": {"position": "both", "layers": "all"}}),
    "context_broadcasting, mlp_mid": _treated({"context_broadcasting": {"position": "mlp_mid"}}),
    "context_broadcasting, mlp_front": _treated({"context_broadcasting": {"position": "mlp_front", "layers": [0]}}),
    "conv_stem, gelu": _treated({"conv_stem": {"act": "gelu", "components": "3Conv+3ReLU+1Proj", "hidden": 8}}),
    "extra_block, mlp": _treated({"extra_block": {"kind": "mlp"}}),
    "ffn_variant, no_norm": _treated({"ffn_variant": {"variant": "no_norm"}}),
    "ffn_variant, relu": _treated({"ffn_variant": {"variant": "relu"}}),
    "ffn_variant, conv_gelu": _treated({"ffn_variant": {"variant": "conv_gelu"}}),
    "local_attention, global": _treated({"local_attention": {"kernel": "global"}}),
    "patch_diversity, contrastive": _treated({"patch_diversity": {"contrastive": 0.5, "normalise": True}}),
    "patch_diversity, no mixing": _treated({"patch_diversity": {"mixing": 0.0}}, data=DEIT),
    "sam, adaptive": _treated({"sam": {"adaptive": True, "rho": 0.5}}),
    "sam, every 2": _treated({"sam": {"every": 2}}),
    "sam, every 3, adaptive": _treated({"sam": {"every": 3, "adaptive": True, "alpha": 0.3}}),
    "sam, m": _treated({"sam": {"m": 4}}),
    "sam, accumulate 2": SAM_2,
    "sam, accumulate 2, ascent of the batch": SAM_2 | _treated({"sam": {"ascent": "batch"}}),
    "sam, every 2, accumulate 2": SAM_2 | _treated({"sam": {"every": 2}}),
    "sam, cnn": _treated("sam", model=CNN),
    "squeeze_excitation, msa_end": _treated({"squeeze_excitation": {"position": "msa_end", "reduction": 4}}),
    "uniform_heads, adjust": _treated({"uniform_heads": {"variant": "adjust"}}),
    "uniform_heads, append": _treated({"uniform_heads": {"variant": "append"}}),
    "sam and adversarial": _treated("sam", "adversarial"),
    "conv_stem, context_broadcasting and sam": _treated("conv_stem", "context_broadcasting", "sam"),
    "conv_stem, patch_diversity and sam": _treated("conv_stem", "patch_diversity", "sam"),
    "patch_diversity and adversarial": _treated("patch_diversity", "adversarial"),
    "context_broadcasting and squeeze_excitation": _treated("context_broadcasting", "squeeze_excitation"),
    "gap_head, local_attention and context_broadcasting": _treated(
        "gap_head", "local_attention", "context_broadcasting"
    ),
    "extra_block, local_attention and talking_heads": _treated("extra_block", "local_attention", "talking_heads"),
    "relu_activation and no_softmax": _treated("relu_activation", "no_softmax"),
    "none": _treated(),
    "none, cnn": _treated(model=CNN),
    "none, dropout": _treated(model={**VIT, "drop_rate": 0.1, "drop_path_rate": 0.2}, accumulate=2),
    "none, deit": _treated(data=DEIT),
    "none, sigmoid": _treated(loss="sigmoid", data=DEIT),
    "none, ema": _treated(ema=0.9),
    "none, lamb": _treated(optimizer={"name": "lamb", "lr": 0.01}, schedule={"name": "linear", "final": 0.1}),
    "none, sgd": _treated(optimizer={"name": "sgd", "lr": 0.1, "nesterov": True}, clip=None, schedule="constant"),
    "sam, sigmoid, deit, ema": _treated("sam", loss="sigmoid", data=DEIT, ema=0.9),
}
"""What of a recipe is changed, by the name that the case has in the record."""


def treated_weights() -> Plain:
    """Return the losses and the final weights of every case of TREATMENTS."""
    return {case: weights_of(case) for case in TREATMENTS}


def weights_of(case: str) -> Plain:
    """Return the loss of each of ten steps in float64 on digits, and the weights after them.

    Read from the files of the run: the network to use, and its unaveraged weights where it has averaged ones.
    """
    recipe: Plain = {
        "model": VIT,
        "data": {"source": "digits", "limit": 64},
        "steps": STEPS,
        "batch_size": 8,
        "precision": "fp64",
        "checkpoint": f"{STEPS} steps",
        "validation": f"{STEPS} steps",
        "test": False,
        "workers": 0,
        "device": "cpu",
    }
    with tempfile.TemporaryDirectory() as folder:
        run = train({**recipe, **TREATMENTS[case], "out": str(Path(folder) / "run")})
        rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        checkpoint = run.path / "checkpoints" / "last"
        state = load_file(checkpoint / "state.safetensors")
        trained = {name: value for name, value in state.items() if name.startswith(("/raw_network", "/objectives"))}
        weights = {**load_file(checkpoint / "model.safetensors"), **trained}
    rows = [row for row in rows if row["kind"] == "train"]
    return {
        "losses": [row["loss"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
        "weights": {name: _three(weights[name]) for name in sorted(weights)},
    }


def _three(tensor: Tensor) -> list[float]:
    """Sum, sum of magnitudes and first value."""
    flat = tensor.double().flatten()
    return [math.fsum(flat.tolist()), math.fsum(flat.abs().tolist()), float(flat[0])]


# --------------------------------------------------------------------------------------------------------- stored run

RECIPE: Plain = {
    "model": {"name": "vit_tiny_fitted", "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2},
    "data": {"source": "shapes:120", "limit": 80, "augment": "deit"},
    "treatments": [{"context_broadcasting": {"scaled": True}}, "sam"],
    "optimizer": {"lr": 0.005},
    "steps": 20,
    "batch_size": 16,
    "checkpoint": {"every": "5 steps", "keep_epochs": [0, 1, 2]},
    "validation": "10 steps",
    "logging": {"trajectory": 16},
    "workers": 0,
    "device": "cpu",
}
EXAMINED: list[Any] = [
    "accuracy",
    "norms",
    "fourier",
    "variance",
    "cka",
    "attention_entropy",
    "cb_scale",
    "trajectory",
    {"cost": {"repeats": 2, "batch": 4}},
    {"sharpness": {"images": 8, "trace_draws": 2, "density_steps": 3, "tolerance": 0.2}},
    {"hessian_spectrum": {"batches": 2, "batch": 4, "top": 2, "tolerance": 0.1}},
    {"lesion": {"images": 40}},
    {"train_nll": {"images": 40}},
    {"shape_bias": {"images": 90}},
    {"landscape": {"images": 8, "points": 3}},
]
"""What the stored run was examined by."""
PLANNED: list[Any] = ["accuracy", "norms", {"occlusion": {"images": 20}}]
BUDGET = "2m"
"""What it was examined by a second time, within a budget: that leaves a plan."""
LIMIT = 100
REDEFINED = frozenset({"cb_scale", "sharpness"})
"""Probes whose definition has changed since 0.1, and whose stored measurements are therefore made again."""
OF_THE_MACHINE = {"cost"}
"""Measurements that are those of one machine, and are made anew on another."""


def examined(run: str | Path, fresh: bool = False, out: Path | None = None) -> Any:
    """Return the exam of the stored run, by the probes that it was examined by."""
    return examine(str(run), probes=EXAMINED, limit=LIMIT, device="cpu", fresh=fresh, out=out)


def planned(run: str | Path) -> Any:
    """Return its exam within a budget."""
    return examine(str(run), probes=PLANNED, budget=BUDGET, limit=LIMIT, device="cpu")


def make_run() -> None:
    """Train and examine the stored run, from the repository's root."""
    out = RUN.relative_to(Path.cwd())
    train({**RECIPE, "out": str(out)})
    examined(out)
    planned(out)
    environment = json.loads((RUN / "environment.json").read_text())
    environment["command"] = ["vitclinic", "train"]
    (RUN / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
    (RUN / ".lock").unlink(missing_ok=True)


def run_facts(run: Path = RUN) -> Plain:
    """Return what the stored run is: its digests, results, losses, the weights of its checkpoints, and some logits."""
    opened = Run.open(run)
    images = torch.linspace(0, 1, 2 * 3 * 32 * 32, dtype=torch.float64).reshape(2, 3, 32, 32)
    checkpoints = sorted(folder.name for folder in (run / "checkpoints").iterdir() if folder.is_dir())
    return {
        "digest": opened.status["digest"],
        "data": opened.data_facts["digest"],
        "results": opened.results,
        "losses": [row["loss"] for row in opened.metrics],
        "checkpoints": {
            name: {key: _three(value) for key, value in sorted(load_model(run, name).state_dict().items())}
            for name in checkpoints
        },
        "logits": load_model(run).double()(images).flatten().tolist(),
    }


def resumed_weights() -> Plain:
    """Return the last weights of a copy of the stored run that goes on from its checkpoint before the last."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shutil.copytree(RUN, run)
        shutil.rmtree(run / "checkpoints" / "last")
        status = json.loads((run / "status.json").read_text())
        (run / "status.json").write_text(json.dumps({**status, "status": "interrupted"}))
        resume(run)
        weights = load_file(run / "checkpoints" / "last" / "model.safetensors")
        return {name: _three(weights[name]) for name in sorted(weights)}


def stored_numbers(run: Path = RUN) -> Plain:
    """Return what is stored of the run, by the names of the files."""
    return {path.stem: told(Measurement.read(path)) for path in sorted((run / "exams").glob("*.json"))}


def measured_anew() -> Plain:
    """Return what an exam of the stored run finds when nothing stored is reused: in float32, as users have it."""
    with tempfile.TemporaryDirectory() as folder:
        exam = examined(RUN, fresh=True, out=Path(folder))
        return {name: told(measurement) for name, measurement in sorted(exam.items())}


# ------------------------------------------------------------------------------------------------- record, comparison


def draws() -> Plain:
    """Return some random numbers in float32, as initial weights are drawn; their last bits depend on the processor."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, generator=generator)
    truncated = torch.empty(1000).uniform_(-0.95, 0.95, generator=generator).erfinv()  # as timm truncates
    return {"normal": normal.tolist(), "truncated": float(truncated.double().abs().sum())}


SECTIONS: dict[str, Callable[[], Plain]] = {
    "draws": draws,
    "probes": probe_numbers,
    "treatments": treated_weights,
    "run": run_facts,
    "stored": stored_numbers,
    "resumed": resumed_weights,
    "measured_anew": measured_anew,
}


def computed() -> Plain:
    """Return all that the record holds, with every number as JSON gives it back."""
    found: Plain = json.loads(json.dumps({name: section() for name, section in SECTIONS.items()}, allow_nan=False))
    return found


@cache
def record() -> Plain:
    """Return the record as it was written."""
    found: Plain = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def differences(found: Any, recorded: Any, rtol: float = 0.0, atol: float = 0.0, at: str = "") -> list[str]:
    """Return a line for each entry that differs.

    Numbers that stand in one list are measured by the largest of them: a sum by the sum of the magnitudes.
    """
    if isinstance(found, Mapping) and isinstance(recorded, Mapping):
        keys = [*recorded, *(key for key in found if key not in recorded)]
        return [
            line
            for key in keys
            for line in differences(found.get(key, "missing"), recorded.get(key, "missing"), rtol, atol, f"{at}/{key}")
        ]
    if isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        numbers = [abs(number) for number in recorded if isinstance(number, float) and math.isfinite(number)]
        scale = max(numbers, default=0.0) * rtol
        pairs = enumerate(zip(found, recorded, strict=True))
        return [
            line
            for place, (ours, theirs) in pairs
            for line in differences(ours, theirs, rtol, max(atol, scale), f"{at}/{place}")
        ]
    if isinstance(found, float) and isinstance(recorded, float):
        same = found == recorded or abs(found - recorded) <= atol + rtol * abs(recorded)
    else:
        same = type(found) is type(recorded) and found == recorded
    return [] if same else [f"{at}: {found!r} instead of {recorded!r}"]


def _written(value: Any, depth: int = 3) -> str:
    """As JSON, one line for each entry below `depth`."""
    if depth and isinstance(value, dict) and value:
        lines = [f"{json.dumps(key)}: {_written(item, depth - 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n}"
    return json.dumps(value, allow_nan=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the record, or compare with it bit by bit."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.golden")
    what = parser.add_mutually_exclusive_group(required=True)
    for option in ("--exact", "--write", "--make-run"):
        what.add_argument(option, action="store_true")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VITCLINIC_CACHE"] = folder
        if chosen.make_run:
            make_run()
            return 0
        found = computed()
        if chosen.write:
            versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
            RECORD.write_text(_written({"versions": {**versions, "timm": timm.__version__}, **found}) + "\n")
            return 0
    lines = differences(found, {name: record()[name] for name in SECTIONS})
    print("\n".join(lines) or "Everything is as recorded, bit by bit.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
